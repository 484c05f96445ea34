"""`fully_shard` and `replicate` for cells: the explicit state behind FSDP2's and HyperParallel's interface.

The class of the cell is extended in place to ``HSDP{Orig}`` with bases ``(HSDPModule, Orig)``; its parameters are
replaced by ones that hold this rank's rows. What then happens in forward and backward is in `tree` and `frame`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor, nn

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
from hsdp_fn.settings import Settings

from .backend import MSBackend
from .binding import named_cells, require_no_tuples
from .group import Group, PlacementFn, group_of
from .launch import world
from .mesh import DeviceMesh, init_device_mesh
from .module import HSDPModule
from .probe import facts, settle
from .recording import end_failed_graphs
from .roots import tree_of

C = TypeVar("C")
_BACKENDS: weakref.WeakKeyDictionary[DeviceMesh, dict[Any, MSBackend]] = weakref.WeakKeyDictionary()
_WORLD: dict[int, DeviceMesh] = {}


class ReplicateModule(HSDPModule):
    """What `replicate` makes of a cell's class: an `HSDPModule` whose parameters are whole on every rank."""


def fully_shard(
    module: C,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
    replicate_params: Iterable[Parameter] | None = None,
    comm_fusion: bool = True,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> C:
    """Shard a cell's parameters in place, as one unit; call it on inner cells first, on the root last, and make the
    optimizer afterwards, of ``cell.trainable_params()``.

    Gradients come as MindSpore gives them: returned by ``mindspore.value_and_grad(fn, None, weights=...)``, whose
    weights must include at least one parameter of the cell; or in ``param.grad``, after
    `enable_mindspore_backward_compat` and ``loss.backward()``. Either way they are this rank's rows of the reduced
    gradient. Parameters from before the call are emptied.

    Does not communicate, except to make the process groups of a mesh's axes when these are first used; the first
    forward exchanges one short message a rank.

    Args:
        module: a cell, or a list of cells that are gathered and reduced as one unit.
        mesh: 1-D shards; 2-D replicates over axis 0 and shards over axis 1; with ``dp_mesh_dims`` any. None: all ranks,
            1-D.
        reshard_after_forward: free full parameters after forward. None: True, except at the root. An int: keep them
            over groups of so many neighbouring shard ranks, which backward gathers over; it must divide the number of
            shard ranks. 1 means False, all of them True.
        shard_placement_fn: called with each parameter; a ``Shard(dim)``, ``Replicate()`` or ``OnMesh`` of `hsdp_fn`, or
            None for ``Shard(0)``.
        mp_policy, offload_policy: see these classes. Offloading changes nothing on CPU and is refused elsewhere.
        ignored_params: left alone altogether.
        replicate_params: kept whole on every rank; their gradients are all-reduced.
        comm_fusion: one collective for all parameters of a dtype. False: one a parameter, for debugging.
        dp_mesh_dims: the data-parallel axes of a larger mesh; several of one role act as one.

    Returns:
        The very object given.

    Raises:
        ValueError (or a subclass of it), TypeError: naming what is wrong; AssertionError: the cell was sharded before;
        BackendError: MindSpore can't be used here, or not with such dtypes. The cell is unchanged then.
    """
    cells = modules_of(module, "fully_shard", nn.Cell, HSDPModule, _is_container)
    require_bool("comm_fusion", comm_fusion)
    facts()
    mesh = _mesh(mesh)
    backend = _backend(mesh, mesh_dims_of(dp_mesh_dims), offload_policy_of(offload_policy))
    spec = backend.spec
    if shard_placement_fn is not None and not spec.shard:
        raise MeshError("shard_placement_fn needs a mesh with a shard axis; dp_mesh_dims names replicate axes only")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function of a parameter, found {shard_placement_fn!r}")
    reshard = reshard_after_forward
    if reshard is not None:
        reshard = reshard_size(reshard, spec.shard_size, "fully_shard")
    settings = Settings(reshard, mp_policy_of(mp_policy), ReductionPolicy(), fused=comm_fusion)
    _take(Group(cells, spec, backend, settings), HSDPModule, ignored_params, replicate_params, shard_placement_fn)
    return module


def replicate(
    module: C,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
) -> C:
    """Data parallelism without sharding, as a unit of its own: parameters whole on every rank, gradients all-reduced
    over all ranks of the mesh. The class becomes ``Replicate{Orig}`` with bases ``(ReplicateModule, Orig)``. May stand
    beside and below cells of `fully_shard`. Arguments, returns and errors: as there.
    """
    cells = modules_of(module, "replicate", nn.Cell, HSDPModule, _is_container)
    facts()
    backend = _backend(_mesh(mesh), None, offload_policy_of(offload_policy))
    settings = Settings(False, mp_policy_of(mp_policy), ReductionPolicy(), whole=True)
    _take(Group(cells, backend.spec, backend, settings), ReplicateModule, ignored_params, None, None)
    return module


def register_fsdp_forward_method(module: nn.Cell, method_name: str) -> None:
    """Let another method of a sharded cell run like its forward: parameters gathered, gradients reduced. Without effect
    on other cells, and the second time.

    Raises:
        ValueError: the cell has no such method; TypeError: it is a cell.
    """
    if not isinstance(module, HSDPModule):
        return
    method = getattr(module, method_name, None)
    if isinstance(method, nn.Cell):
        raise TypeError(f"{method_name!r} of {type(module).__name__} is a cell, not a method; shard it on its own")
    if not callable(method):
        raise ValueError(f"{type(module).__name__} doesn't have a method {method_name!r}")
    if getattr(method, "_hsdp_forward", False):
        return
    owner = weakref.ref(module)
    bound = getattr(method, "__func__", None) if getattr(method, "__self__", None) is module else None

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cell = owner()
        assert cell is not None
        call = functools.partial(bound, cell) if bound is not None else method
        return tree_of(cell).run(group_of(cell), cell, call, args, kwargs)

    forward._hsdp_forward = True  # type: ignore[attr-defined]
    module.__dict__[method_name] = forward


def hsdp_sync_stream() -> None:
    """Wait until the gradients of all backwards that have ended are there, on the host too, and raise what operators
    have left to be raised."""
    settle()
    if facts().device != "CPU":
        ms.runtime.synchronize()


# -- parts ------------------------------------------------------------------------------------------------------------


def _take(
    group: Group,
    base: type[HSDPModule],
    ignored: Iterable[Parameter] | None,
    replicated: Iterable[Parameter] | None,
    placement_fn: PlacementFn | None,
) -> None:
    ignored = parameters_of("ignored_params", ignored, Parameter, Tensor)
    replicated = parameters_of("replicate_params", replicated, Parameter, Tensor)
    end_failed_graphs()
    with ms._no_grad():
        group.shard(list(_own_parameters(group.modules)), ignored, replicated, placement_fn)
    for cell in group.modules:
        cell.__dict__["_hsdp_group"] = group
        cell.__class__ = extended_class(type(cell), base, "HSDP" if base is HSDPModule else "Replicate")
        for _, below in named_cells(cell):
            if below is not cell and isinstance(below, HSDPModule):
                below.__dict__["_hsdp_inner"] = weakref.ref(cell)


def _own_parameters(cells: list[nn.Cell]) -> Iterator[tuple[str, nn.Cell, str]]:
    """``(name, owner, local name)`` of the parameters at and below the cells that no group below them owns."""

    def walk(path: str, cell: nn.Cell) -> Iterator[tuple[str, nn.Cell, str]]:
        require_no_tuples(path, cell)
        for local, param in cell._params.items():
            if isinstance(param, Parameter):
                yield f"{path}{local}", cell, local
        for name, child in cell._cells.items():
            if child is not None and not isinstance(child, HSDPModule):
                yield from walk(f"{path}{name}.", child)

    for i, top in enumerate(cells):
        yield from walk(f"{i}." if len(cells) > 1 else "", top)


def _is_container(cell: nn.Cell) -> bool:
    return isinstance(cell, (nn.CellList, nn.CellDict))


def _backend(mesh: DeviceMesh, dims: DataParallelMeshDims | None, offload: OffloadPolicy) -> MSBackend:
    known = _BACKENDS.setdefault(mesh, {})
    if (dims, offload) not in known:
        known[dims, offload] = MSBackend(mesh, dp_mesh_dims=dims, offload_policy=offload)
    return known[dims, offload]


def _mesh(mesh: object) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        raise MeshError(f"mesh must be a DeviceMesh of hsdp_fn_ms or None, found {mesh!r}")
    _, ranks = world()
    if ranks not in _WORLD:
        _WORLD[ranks] = init_device_mesh("cpu" if facts().device == "CPU" else "npu", (ranks,))
    return _WORLD[ranks]
