"""`fully_shard` and `replicate`: the explicit state behind an interface close to FSDP2's and HyperParallel's.

The class of the module is extended in place to ``HSDP{Orig}`` with bases ``(HSDPModule, Orig)``; its parameters become
DTensors over this rank's shard. What then happens in forward and backward is in `tree` and `frame`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsdp_fn import (
    DataParallelMeshDims,
    MeshError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReductionPolicy,
)
from hsdp_fn.arguments import mesh_dims_of, modules_of, mp_policy_of, offload_policy_of, parameters_of, require_bool
from hsdp_fn.extending import extended_class
from hsdp_fn.planner import reshard_size

from .backend import TorchBackend
from .comm import UnitComm
from .compiling import not_traced
from .group import Group, Settings, group_of
from .mesh import DataMesh, data_mesh
from .module import HSDPModule
from .planning import ShardPlacementFn
from .roots import tree_of

M = TypeVar("M", bound=nn.Module)


class ReplicateModule(HSDPModule):
    """What `replicate` makes of a module's class: an `HSDPModule` whose parameters are whole on every rank."""


def fully_shard(
    module: M | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
    comm_fusion: bool = True,
    comm_fusion_zero_copy: bool | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M | list[nn.Module]:
    """Shard a module's parameters in place, as one unit; call it on inner modules first, on the root last.

    Does not communicate, except to make the process group of several flattened axes when these are first used; the
    first forward exchanges one short message a rank.

    Args:
        module: a module, or a list of modules that are gathered and reduced as one unit.
        mesh: 1-D shards; 2-D replicates over axis 0 and shards over axis 1; with ``dp_mesh_dims`` any. None: all ranks,
            1-D, on the CPU or the present accelerator. Parameters may be DTensors on a tensor-parallel mesh beside it.
        reshard_after_forward: free full parameters after forward. None: True, except at the root. An int: keep them
            over groups of so many neighbouring shard ranks, which backward gathers over; it must divide the number of
            shard ranks. 1 means False, all of them True.
        shard_placement_fn: called with each parameter; a ``Shard(dim)``, None for ``Shard(0)``, or a
            `ShardPlacementResult` with a mesh of the parameter's own (a routed expert's). One collective for each mesh
            and dtype. Gradients are divided by the number of data-parallel ranks of the unit's mesh (or its own, if
            that has more), whose batches an expert's tokens came from.
        mp_policy, offload_policy: see these classes.
        ignored_params: left alone altogether.
        replicate_params: kept whole on every rank; their gradients are all-reduced.
        comm_fusion: one collective for all parameters of a dtype. False: one a parameter, for debugging.
        comm_fusion_zero_copy: gather from the masters' own memory and, where the layout allows it, into that of the
            parameters. None: True. False copies at both ends.
        dp_mesh_dims: which axes of ``mesh`` carry data parallelism: several shard axes act as one, several replicate
            axes likewise. Parameters are DTensors on that mesh, ``Replicate()`` along these axes, and keep their other
            placements; in forward they are what they were. Plain tensors are taken where the mesh has no other axes.
            Of a gradient, the local tensor counts along these axes, whether Partial or Replicate.

    Returns:
        The very object given.

    Raises:
        ValueError (or a subclass of it), TypeError: naming what is wrong; AssertionError: the module was sharded
        before; NotImplementedError: not supported yet, or a tensor subclass. The module is unchanged then.
    """
    modules = _modules(module, "fully_shard")
    require_bool("comm_fusion", comm_fusion)
    if comm_fusion_zero_copy is not None:
        require_bool("comm_fusion_zero_copy", comm_fusion_zero_copy)
    data = data_mesh(_mesh(mesh), mesh_dims_of(dp_mesh_dims))
    if shard_placement_fn is not None and not data.spec.shard:
        raise MeshError("shard_placement_fn needs a mesh with a shard axis; dp_mesh_dims names replicate axes only")
    reshard = reshard_after_forward
    if reshard is not None:
        reshard = reshard_size(reshard, data.spec.shard_size, "fully_shard")
    settings = Settings(reshard, mp_policy_of(mp_policy), ReductionPolicy(), fused=comm_fusion)
    group = Group(modules, data, _backend(data, offload_policy_of(offload_policy)), settings)
    group.comm = UnitComm(zero_copy=comm_fusion_zero_copy is not False)
    _take(group, HSDPModule, ignored_params, replicate_params, shard_placement_fn)
    return module


def replicate(
    module: M | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M | list[nn.Module]:
    """Data parallelism without sharding, as a unit of its own: parameters whole on every rank, gradients all-reduced
    over all ranks of the mesh. The class becomes ``Replicate{Orig}`` with bases ``(ReplicateModule, Orig)``. May stand
    beside and below modules of `fully_shard`, on the same mesh or another. Arguments, returns and errors: as there.
    """
    modules = _modules(module, "replicate")
    data = data_mesh(_mesh(mesh))
    settings = Settings(False, mp_policy_of(mp_policy), ReductionPolicy(), whole=True)
    group = Group(modules, data, _backend(data, offload_policy_of(offload_policy)), settings)
    _take(group, ReplicateModule, ignored_params, None, None)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module run like its forward: parameters gathered, gradients reduced. Without
    effect on other modules, and the second time.

    Raises:
        ValueError: the module has no such method; TypeError: it is a module.
    """
    if not isinstance(module, HSDPModule):
        return
    method = getattr(module, method_name, None)
    if isinstance(method, nn.Module):
        raise TypeError(f"{method_name!r} of {type(module).__name__} is a module, not a method; shard it on its own")
    if not callable(method):
        raise ValueError(f"{type(module).__name__} doesn't have a method {method_name!r}")
    if getattr(method, "_hsdp_forward", False):
        return
    bound = method.__func__ if getattr(method, "__self__", None) is module else None

    @not_traced
    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(bound, self) if bound is not None else method
        return tree_of(self).run(group_of(self), self, call, args, kwargs)

    forward._hsdp_forward = True  # type: ignore[attr-defined]
    module.__dict__[method_name] = forward.__get__(module, type(module))  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[HSDPModule]) -> None:
    """Let modules that are roots of their own (pipeline stages) share what communication holds: their buffers for
    gathers and reductions are reused from one another. (There are no streams of ours to share.)

    Raises:
        ValueError: an element isn't an `HSDPModule`.
    """
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ValueError(f"expected HSDPModules, found {type(module).__name__}: {module!r}")
    pools = [group_of(m).backend.pool for m in modules]
    for module in modules:
        group_of(module).backend.share_pool(pools[0])


def hsdp_sync_stream() -> None:
    """Wait until the gradients of all backwards that have ended are there: on the host too, where they may be read
    without any further order. (On CPU they always are.)"""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


# -- parts ------------------------------------------------------------------------------------------------------------


def _modules(module: object, function: str) -> list[nn.Module]:
    return modules_of(module, function, nn.Module, HSDPModule, _is_container)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _take(
    group: Group,
    base: type[HSDPModule],
    ignored: Iterable[nn.Parameter] | None,
    replicated: Iterable[nn.Parameter] | None,
    placement_fn: ShardPlacementFn | None,
) -> None:
    ignored = parameters_of("ignored_params", ignored, nn.Parameter, torch.Tensor)
    replicated = parameters_of("replicate_params", replicated, nn.Parameter, torch.Tensor)
    group.shard(list(_own_parameters(group.modules)), ignored, replicated, placement_fn)
    for m in group.modules:
        m.__dict__["_hsdp_group"] = group
        m.__class__ = extended_class(type(m), base, "HSDP" if base is HSDPModule else "Replicate")
        for below in m.modules():
            if below is not m and isinstance(below, HSDPModule):
                below.__dict__["_hsdp_inner"] = weakref.ref(m)
            for buffer in below._buffers.values():
                if buffer is not None and not buffer.is_meta and buffer.device != group.backend.device:
                    buffer.data = buffer.to(group.backend.device)


def _own_parameters(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """``(name, owner, local name)`` of the parameters at and below the modules that no group below them owns."""

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        for local, param in module._parameters.items():
            if param is not None:
                yield f"{path}{local}", module, local
        for name, child in module._modules.items():
            if child is not None and not isinstance(child, HSDPModule) and not _replicated_by_torch(child):
                yield from walk(f"{path}{name}.", child)

    for i, top in enumerate(modules):
        yield from walk(f"{i}." if len(modules) > 1 else "", top)


def _replicated_by_torch(module: nn.Module) -> bool:
    """Whether torch's composable ``replicate`` manages the module."""
    from torch.distributed._composable.contract import _get_registry

    return "replicate" in (_get_registry(module) or ())


def _backend(data: DataMesh, offload: OffloadPolicy) -> TorchBackend:
    if offload not in data.backends:
        data.backends[offload] = TorchBackend(data.mesh, spec=data.spec, offload_policy=offload)
    backend: TorchBackend = data.backends[offload]
    return backend


def _mesh(mesh: object) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        raise MeshError(f"mesh must be a DeviceMesh or None, found {mesh!r}")
    device = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        dist.init_process_group()
    with torch.device("cpu"):  # the mesh is a tensor; a default device of meta must not make it one without values
        return init_device_mesh(device.type if device is not None else "cpu", (dist.get_world_size(),))
