"""From a module to a layout and a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp_fn import (
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

from .backend import TorchBackend
from .binding import refresh_flat_weights
from .mesh import mesh_spec


def param_specs(model: nn.Module) -> list[ParamSpec]:
    """The parameters of a module, tied ones once with their further names as aliases. Does not communicate.

    Raises:
        LayoutError: the module is sharded already (has DTensor parameters).
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if hasattr(param, "placements"):
            raise LayoutError(f"parameter {name!r} is a DTensor; give the module before it is sharded")
        names.setdefault(param, []).append(name)
    return [
        ParamSpec(first, tuple(param.shape), str(param.dtype), param.requires_grad, tuple(aliases))
        for param, (first, *aliases) in names.items()
    ]


def plan_module(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[str | UnitSpec] = (),
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **policies: Any,
) -> Layout:
    """`plan_layout` for a module and a torch mesh. Does not communicate; parameters may be on the meta device.

    Args:
        model: names, shapes and dtypes come from it.
        mesh, dp_mesh_dims: 1-D (shard), 2-D (replicate, shard), or any mesh whose data-parallel axes ``dp_mesh_dims``
            names; see `mesh_spec`.
        units: module names in execution order, or `UnitSpec`.
        policies: the keyword arguments of `plan_layout`.

    Raises:
        LayoutError: see `plan_layout`; also a parameter that isn't contiguous or dense.
    """
    for name, param in model.named_parameters():
        if param.layout is not torch.strided or not param.is_contiguous():
            raise LayoutError(
                f"parameter {name!r} isn't dense and contiguous (layout {param.layout}); call .contiguous() first"
            )
    return plan_layout(param_specs(model), mesh_spec(mesh, dp_mesh_dims), units, **policies)


def shard_module(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[str | UnitSpec] = (),
    *,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored: Iterable[str] = (),
    **policies: Any,
) -> HSDPState:
    """Plan, shard the module's parameters and leave the module as a skeleton on the meta device.

    Communicates: one short message a rank (see `shard`). No weights travel: every rank must hold the same ones, for
    instance from the same seed.

    Args:
        model: on success its sharded parameters are replaced by meta tensors (so that their memory is free), to be used
            through `functional_call` only; buffers and ignored parameters stay. On failure it is unchanged.
        mesh, units, dp_mesh_dims: see `plan_module`.
        offload_policy, ignored, policies: see `plan_layout`.

    Returns:
        The first state, step 0.
    """
    backend = TorchBackend(mesh, dp_mesh_dims=dp_mesh_dims, offload_policy=offload_policy)
    policies |= {"dp_mesh_dims": dp_mesh_dims, "offload_policy": offload_policy}
    try:
        ignored = tuple(ignored)
        layout = plan_module(model, mesh, units, ignored=ignored, **policies)
    except Exception as error:
        backend.exchange(f"error: {error}")  # the peers wait in `shard`; there they learn of it
        raise
    with torch.no_grad():
        params = {name: p.detach() for name, p in model.named_parameters()}
    state = shard(params, layout, backend=backend)
    placeholders = {
        p.name: nn.Parameter(torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta"), p.requires_grad)
        for p in layout.params()
    }
    names = {alias: p.name for p in layout.params() for alias in (p.name, *p.aliases)}
    for name, canonical in names.items():
        prefix, _, local = name.rpartition(".")
        model.get_submodule(prefix)._parameters[local] = placeholders[canonical]
    refresh_flat_weights(model.modules())
    return state
