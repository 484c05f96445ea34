"""What the arguments of `fully_shard` mean to the core's planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard as TorchShard

from hsdp_fn import MeshError, MeshSpec, OffloadPolicy, Replicate, Shard, settings
from hsdp_fn.layout import Layout, Placement
from hsdp_fn.settings import GroupPlan

from .mesh import DataMesh, ShardPlacementResult, data_mesh_of

if TYPE_CHECKING:
    from .group import Group

ShardPlacementFn = Callable[[nn.Parameter], TorchShard | ShardPlacementResult | None]


def plan_groups(root: nn.Module, groups: Sequence[Group], mesh: MeshSpec, offload: OffloadPolicy) -> Layout:
    """One layout of all groups below a root, with names as seen from there. Does not communicate."""
    paths = {id(m): name for name, m in root.named_modules()}
    plans = [
        GroupPlan(
            [paths.get(id(m), "(removed)") for m in group.modules],
            group.specs(root),
            group.wanted,
            group.settings,
            group.data.spec,
        )
        for group in groups
    ]
    return settings.plan_groups(plans, mesh, offload)


def placement_of(
    param: nn.Parameter, name: str, placement_fn: ShardPlacementFn | None, data: DataMesh
) -> tuple[Placement, DataMesh]:
    """Where a parameter is to be sharded, and over which mesh: the unit's, ``data``, or its own.

    Raises:
        ValueError (or MeshError, one of it): naming the parameter.
    """
    wanted: Any = placement_fn(param) if placement_fn is not None else None
    if isinstance(wanted, ShardPlacementResult) or type(wanted).__name__ == "ShardPlacementResult":  # ours, or torch's
        data, wanted = _own_mesh(wanted.mesh_info, name, data), wanted.placement
        if not data.spec.shard and wanted is None:
            return Replicate(), data
    if wanted is None:
        return Shard(0), data
    if not isinstance(wanted, TorchShard):
        raise ValueError(
            f"shard_placement_fn must return a Shard, a ShardPlacementResult or None, found {wanted!r} for parameter "
            f"{name!r}"
        )
    return Shard(wanted.dim), data


def _own_mesh(info: Any, name: str, data: DataMesh) -> DataMesh:
    """A parameter's own mesh; the unit's where it is that."""
    try:
        own = data_mesh_of(info)
    except MeshError as error:
        raise MeshError(f"shard_placement_fn of parameter {name!r}: {error}") from None
    if own.mesh.get_coordinate() is None:
        raise MeshError(
            f"shard_placement_fn puts parameter {name!r} on ranks {own.spec.ranks}, without this one; take a slice of "
            f"a mesh over all ranks of the unit: mesh['edp']"
        )
    if own.mesh.device_type != data.mesh.device_type:
        raise MeshError(
            f"shard_placement_fn puts parameter {name!r} on a mesh of device type {own.mesh.device_type!r}, its unit "
            f"is on {data.mesh.device_type!r}"
        )
    return data if own.spec == data.spec and own.mesh == data.mesh else own


def has_extension(inner: Tensor) -> bool:
    """Whether the tensor brings FSDP2's all-gather extensions."""
    return hasattr(inner, "fsdp_pre_all_gather") or hasattr(inner, "fsdp_post_all_gather")


def require_plain_tensor(inner: Tensor, name: str) -> None:
    """Sharding copies values into flat memory, where another class of tensor would become a plain one."""
    if type(inner.data) is not Tensor or has_extension(inner):
        raise NotImplementedError(
            f"parameter {name!r} is a {type(inner.data).__name__}; tensor subclasses and all-gather extensions "
            f"(fsdp_pre_all_gather) aren't supported. Leave it out with ignored_params, or convert it first"
        )
