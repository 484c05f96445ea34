"""Shards as DTensors, and parameters that tensor parallelism has made DTensors already.

A parameter that is a DTensor on a tensor-parallel mesh is sharded once more: its local tensor, over the data-parallel
mesh. The sharded parameter then lives on both meshes joined, ``(data parallel..., tensor parallel...)``; in forward it
is a DTensor on the tensor-parallel mesh again. One that is a DTensor on a whole mesh, of which ``dp_mesh_dims`` names
the data-parallel axes, stays on that. Where both shard the same dim, the data-parallel placement is torch's
``_StridedShard``, so that ``full_tensor`` gives the rows back in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from hsdp_fn import MeshError, PhaseError
from hsdp_fn.layout import Member, UnitLayout

from .mesh import DataMesh


@dataclass(eq=False)
class Standing:
    """How a parameter appears to the user: the DTensor that its shard is part of.

    Attributes:
        mesh: on which the sharded parameter lives.
        placements: one for each of its axes.
        shape: global.
        inner: what the parameter was before: its spec as a DTensor of tensor parallelism; None for a plain tensor.
        name: the parameter's.
        summed: axes of ``inner`` along which the data-parallel reduction sums the gradient.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    inner: Any = None
    name: str = ""
    summed: frozenset[int] = frozenset()
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)
    _inner_specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    @staticmethod
    def of(param: Tensor, name: str, data: DataMesh, dim: int | None) -> Standing:
        """Where ``param`` will stand once its local tensor is sharded on ``dim`` (None: replicated) of ``data``, which
        `require_stands` has nothing against.

        Raises:
            MeshError: the parameter's own mesh can't be joined with it.
        """
        mesh, roles = data.standing
        placements: list[Placement] = [Shard(dim) if r == "shard" and dim is not None else Replicate() for r in roles]
        if not isinstance(param, DTensor):
            return Standing(mesh, tuple(placements), torch.Size(param.shape), name=name)
        spec = param._spec
        summed: frozenset[int] = frozenset()
        if data.spmd:
            summed = frozenset(i for i, axis in enumerate(data.spec.names) if axis not in data.others)
            own = dict(zip(data.spec.names, spec.placements, strict=True))
            placements = [own.get(role, p) for role, p in zip(roles, placements, strict=True)]
        else:
            try:
                mesh = DeviceMesh._concatenate([mesh, spec.mesh])
            except (RuntimeError, ValueError, AssertionError) as error:
                raise MeshError(
                    f"parameter {name!r} is a DTensor on mesh {spec.mesh} that can't be joined with fully_shard's mesh "
                    f"{mesh}: {error}. Take both from one: m = init_device_mesh(..., mesh_dim_names=('dp', 'tp')): "
                    f"m['tp'] for tensor parallelism, m['dp'] for fully_shard"
                ) from error
            placements += spec.placements
        if dim is not None and "shard" in roles:
            at = roles.index("shard")
            inside = [mesh.size(i) for i in range(at + 1, mesh.ndim) if _splits(placements[i], dim)]
            factor = torch.Size(inside).numel()
            placements[at] = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        return Standing(mesh, tuple(placements), torch.Size(param.shape), spec, name, summed)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Of the sharded parameter or its gradient. The same one each time: making a spec costs more than a DTensor."""
        found = self._specs.get(dtype)
        if found is None:
            meta = TensorMeta(self.shape, torch.empty(self.shape, device="meta").stride(), dtype)
            found = self._specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return found

    def dtensor(self, row: Tensor) -> DTensor:
        """This rank's shard of the parameter, or of its gradient, as a DTensor over its memory."""
        return over(row, self.spec(row.dtype))  # from_local would move rows on the host to the mesh's device

    def present(self, full: Tensor) -> Tensor:
        """What stands in the module in forward, of the gathered local tensor."""
        if self.inner is None:
            return full
        spec = self._inner_specs.get(full.dtype)
        if spec is None:
            meta = TensorMeta(self.shape, self.inner.tensor_meta.stride, full.dtype)
            spec = DTensorSpec(self.inner.mesh, self.inner.placements, tensor_meta=meta)
            self._inner_specs[full.dtype] = spec
        return as_dtensor(full, spec)

    def absorb(self, grad: Tensor | None, reduce_dtype: torch.dtype) -> Tensor | None:
        """The local gradient that goes into the data-parallel reduction. Communicates over the tensor-parallel mesh
        where the gradient's placements differ from the parameter's; sums there in ``reduce_dtype``."""
        if grad is None or self.inner is None:
            return grad
        if not isinstance(grad, DTensor):
            raise MeshError(f"expected the gradient of a tensor-parallel parameter to be a DTensor, found {type(grad)}")
        wanted = self._wanted(grad.placements)
        if grad.placements != wanted:
            sums = any(p.is_partial() and p != w for p, w in zip(grad.placements, wanted, strict=True))
            whole: Any = grad.to(reduce_dtype) if sums else grad
            grad = whole.redistribute(placements=wanted)
        assert isinstance(grad, DTensor)
        local: Any = grad.to_local()
        wait = getattr(local, "wait", None)  # a functional collective's result may be in flight
        done: Tensor = wait() if wait is not None else local
        return done

    def _wanted(self, found: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """What a gradient is brought to: the parameter's own placements, but along data-parallel axes what it has
        there, since the reduction sums over these (a rank's term of the sum, or this rank's own gradient)."""
        out = list(self.inner.placements)
        for i in self.summed:
            if not (found[i].is_replicate() or found[i].is_partial("sum")):
                raise MeshError(
                    f"the gradient of {self.name!r} has placements {found}; along the data-parallel axis "
                    f"{self.inner.mesh.mesh_dim_names[i]!r} only Replicate() and Partial('sum') can be reduced"
                )
            out[i] = found[i]
        return tuple(out)


def require_stands(param: Tensor, name: str, data: DataMesh) -> None:
    """All that can be said against a parameter on a mesh before anything is made.

    Raises:
        MeshError: naming parameter, axis, and the way out.
    """
    if not isinstance(param, DTensor):
        if data.others:
            raise MeshError(
                f"parameter {name!r} is a plain tensor, but the mesh has axes {data.others} beside the data-parallel "
                f"ones, and nothing says what they do to it; make it a DTensor on the whole mesh: "
                f"distribute_tensor(param, mesh, placements), with Replicate() on axes that don't split it"
            )
        return
    spec = param._spec
    if spec.mesh.device_type != data.mesh.device_type:
        raise MeshError(
            f"parameter {name!r} is a DTensor on a mesh of device type {spec.mesh.device_type!r}, but "
            f"fully_shard's mesh has {data.mesh.device_type!r}; make both meshes for the same device"
        )
    if any(isinstance(p, Partial) for p in spec.placements):
        raise MeshError(f"parameter {name!r} has placements {spec.placements}; Partial can't be sharded")
    if not data.spmd:
        return
    if spec.mesh != data.mesh:
        raise MeshError(
            f"parameter {name!r} is a DTensor on mesh {spec.mesh}, but with dp_mesh_dims it must be on the very mesh "
            f"that fully_shard is given, {data.mesh}"
        )
    for placement, axis in zip(spec.placements, data.spec.names, strict=True):
        if axis not in data.others and not placement.is_replicate():
            role = "shard" if axis in data.spec.shard else "replicate"
            raise MeshError(
                f"parameter {name!r} has placement {placement} on axis {axis!r}, which dp_mesh_dims gives the role "
                f"{role!r}: expected Replicate() there; fully_shard splits it itself"
            )


def _splits(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def local_of(param: Tensor) -> Tensor:
    """The local tensor of a DTensor; another tensor itself."""
    return param._local_tensor if isinstance(param, DTensor) else param


def as_dtensor(local: Tensor, spec: Any) -> DTensor:
    """A DTensor of a known spec, without autograd."""
    made: DTensor = _NEW(DTensor, local, spec, requires_grad=False)
    return made


_NEW: Any = DTensor.__new__  # DTensor's own __init__ does nothing, and costs more than all of this
_BLANK: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def over(row: Tensor, spec: Any) -> DTensor:
    """A DTensor over a row that lies anywhere in its storage. (The wrapper takes its offset from the tensor that it is
    made of; with another than zero, torch takes it for a tensor with memory, which can't be pickled or copied.)"""
    kind = row.dtype, row.device
    if kind not in _BLANK:
        _BLANK[kind] = torch.empty(0, dtype=row.dtype, device=row.device)
    made = as_dtensor(_BLANK[kind], spec)
    made._local_tensor = row
    return made


def piece(row: Tensor, mesh: DeviceMesh, member: Member) -> DTensor:
    """A parameter over a smaller group. A copy of the masters: nobody would notice its gradient, so that one raises."""
    specs = mesh.__dict__.setdefault("_hsdp_specs", {})  # with the mesh, since equal meshes may have other groups
    key = (member.spec.shape, member.dim, row.dtype)
    if key not in specs:
        shape = torch.Size(member.spec.shape)
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), row.dtype)
        specs[key] = DTensorSpec(mesh, (Shard(member.dim),), tensor_meta=meta)
    made = over(row, specs[key])
    if member.spec.requires_grad:
        made.requires_grad_().register_hook(functools.partial(_no_gradient, member.spec.name))  # type: ignore[no-untyped-call]
    return made


def _no_gradient(name: str, grad: Tensor) -> None:
    raise PhaseError(
        f"the parameter {name!r} was used outside the forward of its unit, where it stands over smaller groups, "
        f"a copy of the masters whose gradient would be lost. Use it inside forward, or in a method registered with "
        f"register_fsdp_forward_method, or after module.unshard()"
    )


def set_local(param: nn.Parameter, row: Tensor) -> None:
    """Make a DTensor parameter view other memory."""
    assert isinstance(param, DTensor)
    param._local_tensor = row


def absorbed(standings: Sequence[Standing], plan: UnitLayout, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`Standing.absorb` of all gradients of a unit."""
    out = list(grads)
    for bucket in plan.buckets:
        for member in bucket.grads.members if bucket.grads is not None else ():
            at = member.index
            out[at] = standings[at].absorb(grads[at], getattr(torch, bucket.reduce_dtype))
    return out


def presented(standings: Sequence[Standing], full: Sequence[Tensor]) -> list[Tensor]:
    """`Standing.present` of all parameters of a unit."""
    return [s.present(t) for s, t in zip(standings, full, strict=True)]
