"""Shards as DTensors, and parameters that tensor parallelism has made DTensors already.

A parameter that is a DTensor on a tensor-parallel mesh is sharded once more: its local tensor, over the data-parallel
mesh. The sharded parameter then lives on both meshes joined, ``(data parallel..., tensor parallel...)``; in forward it
is a DTensor on the tensor-parallel mesh again. Where both shard the same dim, the data-parallel placement is torch's
``_StridedShard``, so that ``full_tensor`` gives the rows back in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from hsdp_fn import MeshError
from hsdp_fn.layout import UnitLayout


@dataclass(eq=False)
class Standing:
    """How a parameter appears to the user: the DTensor that its shard is part of.

    Attributes:
        mesh: on which the sharded parameter lives.
        placements: one for each of its axes.
        shape: global.
        inner: what the parameter was before: its spec as a DTensor of tensor parallelism; None for a plain tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    inner: Any = None
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)
    _inner_specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    @staticmethod
    def of(param: Tensor, name: str, mesh: DeviceMesh, dim: int | None) -> Standing:
        """Where ``param`` will stand once its local tensor is sharded on ``dim`` (None: replicated) of ``mesh``.

        Raises:
            MeshError: the parameter's own mesh doesn't go with ``mesh``.
        """
        whole: list[Placement] = [Replicate()] * mesh.ndim
        if not isinstance(param, DTensor):
            if dim is not None:
                whole[-1] = Shard(dim)
            return Standing(mesh, tuple(whole), torch.Size(param.shape))
        spec = param._spec
        if spec.mesh.device_type != mesh.device_type:
            raise MeshError(
                f"parameter {name!r} is a DTensor on a mesh of device type {spec.mesh.device_type!r}, but "
                f"fully_shard's mesh has {mesh.device_type!r}; make both meshes for the same device"
            )
        if any(isinstance(p, Partial) for p in spec.placements):
            raise MeshError(f"parameter {name!r} has placements {spec.placements}; Partial can't be sharded")
        try:
            joined = DeviceMesh._concatenate([mesh, spec.mesh])
        except (RuntimeError, ValueError, AssertionError) as error:
            raise MeshError(
                f"parameter {name!r} is a DTensor on mesh {spec.mesh} that can't be joined with fully_shard's mesh "
                f"{mesh}: {error}. Take both from one mesh: m = init_device_mesh(..., mesh_dim_names=('dp', 'tp')); "
                f"m['tp'] for tensor parallelism, m['dp'] for fully_shard"
            ) from error
        if dim is not None:
            same = [spec.mesh.size(i) for i, p in enumerate(spec.placements) if p.is_shard(dim)]
            factor = torch.Size(same).numel()
            whole[-1] = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        return Standing(joined, (*whole, *spec.placements), torch.Size(param.shape), spec)

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
        if grad.placements != self.inner.placements:
            whole: Any = grad.to(reduce_dtype) if any(isinstance(p, Partial) for p in grad.placements) else grad
            grad = whole.redistribute(placements=self.inner.placements)
        assert isinstance(grad, DTensor)
        local: Any = grad.to_local()
        wait = getattr(local, "wait", None)  # a functional collective's result may be in flight
        done: Tensor = wait() if wait is not None else local
        return done


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
