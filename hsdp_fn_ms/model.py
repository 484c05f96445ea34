"""From a cell to a layout and a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindspore import Parameter, Tensor, mint, nn

from hsdp_fn import (
    BackendError,
    DataParallelMeshDims,
    HSDPState,
    Layout,
    LayoutError,
    OffloadPolicy,
    ParamSpec,
    UnitSpec,
    plan_layout,
    shard,
)
from hsdp_fn.dtypes import dtype_name

from .backend import MSBackend
from .binding import parameter_places
from .mesh import DeviceMesh, mesh_spec
from .probe import facts


def param_specs(cell: nn.Cell) -> list[ParamSpec]:
    """The parameters of a cell by their paths, tied ones once with their further names as aliases. Does not
    communicate.

    Raises:
        LayoutError: the cell was sharded already; parameters in a `ParameterTuple`.
    """
    return [
        ParamSpec(first, tuple(param.shape), dtype_name(param.dtype), bool(param.requires_grad), tuple(aliases))
        for (first, *aliases), param in _named(cell)
    ]


def plan_cell(
    cell: nn.Cell,
    mesh: DeviceMesh,
    units: Sequence[str | UnitSpec] = (),
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **policies: Any,
) -> Layout:
    """`plan_layout` for a cell and a mesh. Does not communicate.

    Args:
        cell: paths, shapes and dtypes come from it (not the parameters' own ``name``, which MindSpore lets repeat).
        mesh, dp_mesh_dims: 1-D (shard), 2-D (replicate, shard), or any mesh whose data-parallel axes ``dp_mesh_dims``
            names; see `mesh_spec`.
        units: paths of cells in execution order, or `UnitSpec`.
        policies: the keyword arguments of `plan_layout`.

    Raises:
        LayoutError: see `plan_layout` and `param_specs`.
        BackendError: a unit that computes in bfloat16 on CPU, where MindSpore can hardly do more than add and multiply
            in it.
    """
    layout = plan_layout(param_specs(cell), mesh_spec(mesh, dp_mesh_dims), units, **policies)
    require_compute_dtypes(layout)
    return layout


def require_compute_dtypes(layout: Layout) -> None:
    """Raise `BackendError` for units that would compute in bfloat16 on CPU."""
    if facts().device != "CPU":
        return
    for unit in layout.units:
        if names := [m.spec.name for b in unit.buckets if b.compute_dtype == "bfloat16" for m in b.params.members]:
            raise BackendError(
                f"parameters {names} of unit {unit.title!r} would be used in bfloat16, for which MindSpore has no "
                f"matrix product on CPU; use param_dtype='float16' or 'float32' there"
            )


def shard_cell(
    cell: nn.Cell,
    mesh: DeviceMesh,
    units: Sequence[str | UnitSpec] = (),
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored: Iterable[str] = (),
    **policies: Any,
) -> HSDPState:
    """Plan, shard the cell's parameters and leave the cell as a skeleton.

    Communicates: one short message a rank (see `shard`). No weights travel: every rank must hold the same ones, for
    instance from the same seed.

    Args:
        cell: on success its sharded parameters are emptied (shape ``(0,)``, so that their memory is free), to be used
            through `functional_call` only; ignored parameters stay. On failure it is unchanged.
        mesh, units, dp_mesh_dims: see `plan_cell`.
        offload_policy, ignored, policies: see `plan_layout`.

    Returns:
        The first state, step 0.
    """
    backend = MSBackend(mesh, dp_mesh_dims=dp_mesh_dims, offload_policy=offload_policy)
    policies |= {"dp_mesh_dims": dp_mesh_dims, "offload_policy": offload_policy}
    try:
        ignored = tuple(ignored)
        layout = plan_cell(cell, mesh, units, ignored=ignored, **policies)
        named = _named(cell)
    except Exception as error:
        backend.exchange(f"error: {error}")  # the peers wait in `shard`; there they learn of it
        raise
    state = shard({first: Tensor(param) for (first, *_), param in named}, layout, backend=backend)
    sharded = {p.name for p in layout.params()}
    for (first, *_), param in named:
        if first in sharded:
            param.set_data(mint.zeros((0,), dtype=param.dtype), slice_shape=True)
    return state


def _named(cell: nn.Cell) -> list[tuple[list[str], Parameter]]:
    """Each parameter with all its names."""
    if not isinstance(cell, nn.Cell):
        raise LayoutError(f"expected a Cell of mindspore.nn, found {type(cell).__name__}")
    names: dict[int, tuple[list[str], Parameter]] = {}
    for name, owner, local in parameter_places(cell):
        param = owner._params[local]
        names.setdefault(id(param), ([], param))[0].append(name)
    return list(names.values())


def require_rows(layout: Layout, backend: MSBackend) -> None:
    """MindSpore's optimizers refuse an empty list and its autograd needs a parameter to differentiate by."""
    if not any(p.requires_grad for p in layout.params()):
        return
    for rank in layout.mesh.data_parallel_group(backend.rank):
        rows = 0
        for unit in layout.units:
            for b in unit.buckets:
                if rank in b.mesh.ranks and b.grads is not None:
                    index = b.mesh.shard_index(rank)
                    rows += sum(0 not in m.local_shape(index) for m in b.grads.members)
        if not rows:
            raise LayoutError(
                f"rank {rank} would hold no row of any trainable parameter, for which MindSpore has neither optimizers "
                f"nor gradients; shard over fewer ranks"
            )
