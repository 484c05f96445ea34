"""`fully_shard` and `HSDPModule`: the explicit state behind an interface close to FSDP2's and HyperParallel's.

The class of the module is extended in place to ``HSDP{Orig}`` with bases ``(HSDPModule, Orig)``. Calling the module
goes through its tree's frame; everything else here changes settings or asks the tree. No hook holds logic of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hsdp_fn import HSDPState, MeshError, MixedPrecisionPolicy, OffloadPolicy, PolicyError, ReductionPolicy, describe

from .backend import TorchBackend
from .group import Group, Settings, ShardPlacementFn
from .tree import Tree

M = TypeVar("M", bound=nn.Module)

# The extended class refers to its original, so the value must not keep it.
_CLASSES: WeakKeyDictionary[type, weakref.ref[type]] = WeakKeyDictionary()


class HSDPModule:
    """What `fully_shard` makes of a module's class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing from the extended class (slicing a Sequential does) gives an ordinary module."""
        original: Any = cls.__mro__[2]
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = _group(self)
        tree = _tree_of(self)
        call = super().__call__  # type: ignore[misc]
        return tree.run(group, call, args, kwargs, final=group.modules[-1] is cast(Any, self))

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("HSDP modules don't support deepcopy; copy the module before fully_shard")

    @property
    def hsdp_state(self) -> HSDPState:
        """The explicit committed state of the whole tree. Exists from the first forward on."""
        return _existing_tree(self).state

    def describe(self) -> str:
        """The state as a table, for people."""
        return describe(self.hsdp_state)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward communicates gradients. False accumulates them whole (``Sync.NONE``)."""
        _require_bool("requires_gradient_sync", requires_gradient_sync)
        for group in _groups(self, recurse):
            group.settings.sync_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis. False keeps reduce-scattered sums (``Sync.SHARD``)."""
        _require_bool("requires_all_reduce", requires_all_reduce)
        for group in _groups(self, recurse):
            if group.mesh.ndim > 1:
                group.settings.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward, overriding the root's default."""
        _require_bool("reshard_after_forward", reshard_after_forward)
        for group in _groups(self, recurse):
            group.settings.reshard_after_forward = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients by ``factor`` instead of the number of data-parallel ranks. 1.0: a sum."""
        r = _group(self).settings.reduction
        _group(self).settings.reduction = ReductionPolicy(r.op, factor, r.scaling_factor, r.unused)

    def set_gradient_scaling_factor(self, factor: float | None = None) -> None:
        """Multiply this module's reduced gradients."""
        r = _group(self).settings.reduction
        _group(self).settings.reduction = ReductionPolicy(r.op, r.divide_factor, factor, r.unused)

    def set_reduce_op_type(self, op: str, recurse: bool = True) -> None:
        """``"avg"`` or ``"sum"`` over the data-parallel ranks."""
        for group in _groups(self, recurse):
            r = group.settings.reduction
            name = op.strip().lower() if isinstance(op, str) else op
            group.settings.reduction = ReductionPolicy(name, r.divide_factor, r.scaling_factor, r.unused)

    def reset_iter_state(self) -> None:
        """Back to before the iteration, after an exception or at any moment: waits for what is in flight, reshards, and
        drops the gradients of unfinished microbatches. ``.grad`` that earlier backwards have given stays.

        Raises:
            RuntimeError: not called on the root.
        """
        me = cast(Any, self)
        tree: Tree | None = me.__dict__.get("_hsdp_tree")
        if me.__dict__.get("_hsdp_inner") or (tree is not None and tree.root is not me):
            raise RuntimeError("reset_iter_state must be called on the root module")
        if tree is not None:
            tree.reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Sharded DTensors that share the masters' memory, in any phase."""
        tree: Tree | None = cast(Any, self).__dict__.get("_hsdp_tree")
        if tree is not None:
            tree.undo_failed_backward()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]


def fully_shard(
    module: M | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
) -> M | list[nn.Module]:
    """Shard a module's parameters in place, as one unit; call it on inner modules first, on the root last.

    Does not communicate; the first forward exchanges one short message a rank.

    Args:
        module: a module, or a list of modules that are gathered and reduced as one unit.
        mesh: 1-D shards; 2-D replicates over axis 0 and shards over axis 1. None: all ranks, 1-D, on the CPU or the
            present accelerator.
        reshard_after_forward: free full parameters after forward. None: True, except at the root.
        shard_placement_fn: called with each parameter; a ``Shard(dim)``, or None for ``Shard(0)``.
        mp_policy, offload_policy: see these classes.
        ignored_params: left alone altogether.
        replicate_params: kept whole on every rank; their gradients are all-reduced.

    Returns:
        The very object given.

    Raises:
        ValueError (or a subclass of it): naming what is wrong; AssertionError: the module was sharded before. The
        module is unchanged then.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, list) else [module]
    for m in modules:
        if not isinstance(m, nn.Module):
            raise ValueError(f"fully_shard takes a module or a list of modules, found {type(m).__name__}")
        if isinstance(m, HSDPModule):
            raise AssertionError(
                "fully_shard was applied to this module before; each distinct composable API can be "
                "applied to a module once only"
            )
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {m}")
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    if reshard_after_forward is not None:
        _require_bool("reshard_after_forward", reshard_after_forward)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh must be a DeviceMesh or None, found {mesh!r}")
    mesh = mesh if mesh is not None else _default_mesh()
    settings = Settings(reshard_after_forward, mp_policy or MixedPrecisionPolicy(), ReductionPolicy())
    group = Group(modules, mesh, _backend(mesh, offload_policy or OffloadPolicy()), settings)
    group.shard(list(_own_parameters(modules)), ignored_params or (), replicate_params or (), shard_placement_fn)
    for m in modules:
        m.__dict__["_hsdp_group"] = group
        m.__class__ = _extended(type(m))
        for below in m.modules():
            if below is not m and isinstance(below, HSDPModule):
                below.__dict__["_hsdp_inner"] = True
    return module


def _extended(original: type) -> type:
    known = _CLASSES.get(original)
    found = known() if known is not None else None
    if found is None:
        found = type(f"HSDP{original.__name__}", (HSDPModule, original), {})
        _CLASSES[original] = weakref.ref(found)
    return found


def _group(module: Any) -> Group:
    group: Group = module.__dict__["_hsdp_group"]
    return group


def _groups(module: Any, recurse: bool) -> Iterator[Group]:
    if not recurse:
        yield _group(module)
        return
    seen: dict[int, Group] = {}
    for m in module.modules():
        if isinstance(m, HSDPModule):
            seen.setdefault(id(_group(m)), _group(m))
    yield from seen.values()


def _existing_tree(module: Any) -> Tree:
    tree: Tree | None = module.__dict__.get("_hsdp_tree")
    if tree is None:
        raise RuntimeError("the state exists from the root's first forward on")
    return tree


def _tree_of(module: Any) -> Tree:
    """The tree that the module belongs to; the first module that asks becomes the root of one."""
    tree: Tree | None = module.__dict__.get("_hsdp_tree")
    if tree is None:
        groups = list(_groups(module, recurse=True))
        for m in module.modules():
            if "_hsdp_tree" in m.__dict__:
                name = next(n for n, other in module.named_modules() if other is m)
                raise RuntimeError(f"module {name!r} ran forward as a root of its own before {type(module).__name__}")
        if len(groups[0].modules) > 1 and module in groups[0].modules:
            raise RuntimeError("fully_shard of a list can't be the single root module; shard the module around it too")
        tree = Tree(module, groups)
        for m in module.modules():
            if isinstance(m, HSDPModule):
                m.__dict__["_hsdp_tree"] = tree
    return tree


def _own_parameters(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """``(name, owner, local name)`` of the parameters at and below the modules that no group below them owns."""

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        for local, param in module._parameters.items():
            if param is not None:
                yield f"{path}{local}", module, local
        for name, child in module._modules.items():
            if child is not None and not isinstance(child, HSDPModule):
                yield from walk(f"{path}{name}.", child)

    for i, top in enumerate(modules):
        yield from walk(f"{i}." if len(modules) > 1 else "", top)


def _backend(mesh: DeviceMesh, offload: OffloadPolicy) -> TorchBackend:
    # On the mesh itself: meshes compare equal after their groups were destroyed and made anew.
    backends: dict[OffloadPolicy, TorchBackend] = mesh.__dict__.setdefault("_hsdp_backends", {})
    if offload not in backends:
        backends[offload] = TorchBackend(mesh, offload_policy=offload)
    return backends[offload]


def _default_mesh() -> DeviceMesh:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device.type if device is not None else "cpu", (dist.get_world_size(),))


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise PolicyError(f"{name} must be a bool, found {value!r}")
