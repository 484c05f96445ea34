"""From a torch `DeviceMesh` to the core's `MeshSpec`, to process groups, and to the mesh on which parameters stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hsdp_fn import DataParallelMeshDims, MeshError, MeshSpec


def mesh_spec(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> MeshSpec:
    """The roles of a mesh's axes. Does not communicate.

    Args:
        mesh: with ``dp_mesh_dims`` any named mesh. Without, by FSDP2's convention: 1-D: its axis shards; 2-D: axis 0
            replicates, axis 1 shards. Unnamed axes get the names ``shard`` and ``replicate``.
        dp_mesh_dims: the axes that carry data parallelism; ranks that differ on the others only don't communicate.

    Raises:
        MeshError: more than two axes without ``dp_mesh_dims``; an axis that isn't there, or out of order; ranks that
            don't rise along the axes of a group.
    """
    if dp_mesh_dims is None:
        if mesh.ndim not in (1, 2):
            raise MeshError(
                f"expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found {mesh.ndim} axes "
                f"{mesh.mesh_dim_names}; name the data-parallel ones: "
                f"dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
            )
        names = tuple(mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else ("replicate", "shard")))
        return _spec(mesh, names, names[-1:], names[:-1])
    if not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise MeshError(f"dp_mesh_dims must be a DataParallelMeshDims of hsdp_fn, found {dp_mesh_dims!r}")
    found = mesh.mesh_dim_names
    if found is None:
        raise MeshError(f"dp_mesh_dims names axes, but {mesh} has none; make the mesh with mesh_dim_names")
    for role, axes in (("shard", dp_mesh_dims.shard_names), ("replicate", dp_mesh_dims.replicate_names)):
        if unknown := [axis for axis in axes if axis not in found]:
            raise MeshError(f"dp_mesh_dims: {role} axes {unknown} aren't axes of the mesh; it has {tuple(found)}")
        if (ordered := tuple(name for name in found if name in axes)) != axes:
            raise MeshError(f"dp_mesh_dims: {role} axes {axes} must be in the order of the mesh: {ordered}")
    return _spec(mesh, tuple(found), dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names)


def _spec(mesh: DeviceMesh, names: tuple[str, ...], shard: tuple[str, ...], replicate: tuple[str, ...]) -> MeshSpec:
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    spec = MeshSpec(tuple(int(n) for n in mesh.mesh.shape), names, shard=shard, replicate=replicate, ranks=ranks)
    for axes in (shard, replicate):
        for group in {spec.group(rank, axes) for rank in ranks} if axes else ():
            if list(group) != sorted(group):
                raise MeshError(
                    f"the ranks of a mesh must be in rising order along each axis, as torch sorts the ranks of a "
                    f"group; found {group} along {axes} in {mesh.mesh.tolist()}"
                )
    return spec


# -- process groups -----------------------------------------------------------------------------------------------

# The default process group: device type and ranks: the group of these ranks; None for the default one itself, which the
# value must not keep.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]] = (
    WeakKeyDictionary()
)


def process_group(device: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of these ranks, one for all modules and meshes: of a mesh that a backend was made for, else a
    new one. Making it communicates, among these ranks only, which all have to ask for it at the same place."""
    default = dist.distributed_c10d._get_default_group()
    known, key = _GROUPS.setdefault(default, {}), (device, tuple(ranks))
    if key in known and known[key] is None:
        return default
    found = known.get(key)
    if found is None or found not in dist.distributed_c10d._world.pg_map:  # never made, or destroyed since
        if len(ranks) == dist.get_world_size() and torch.device(device) in default._device_types:
            known[key] = None
            return default
        found = known[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="hsdp")
    return found


def remember(mesh: DeviceMesh) -> None:
    """Use a mesh's process groups for their ranks from now on. All ranks of the mesh must call it at the same place."""
    if mesh.get_coordinate() is None or not dist.is_initialized():
        return
    default = dist.distributed_c10d._get_default_group()
    known = _GROUPS.setdefault(default, {})
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        key = (mesh.device_type, tuple(dist.get_process_group_ranks(group)))
        if key not in known or (known[key] is not None and known[key] not in dist.distributed_c10d._world.pg_map):
            known[key] = None if group is default else group


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Some axes of a mesh as one. Communicates, over all ranks of the world, when nobody has flattened them before."""
    part = mesh if names == tuple(mesh.mesh_dim_names or ()) else mesh[names]
    if part.ndim == 1:
        return part
    root, wanted = part._get_root_mesh(), part.mesh.flatten().tolist()
    for found in root._flatten_mapping.values():
        if found.mesh.tolist() == wanted:
            return found
    name, taken = "_".join(names), {*root._flatten_mapping, *(root.mesh_dim_names or ())}
    while name in taken:
        name += "_"
    return part._flatten(name)


# -- a mesh with roles ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataMesh:
    """A device mesh and the roles of its axes; one object for equal meshes with equal roles, see `data_mesh`.

    Attributes:
        mesh: as the user has it.
        spec: the roles.
        spmd: it was given with ``dp_mesh_dims``: parameters live on the whole of it.
        backends: what communicates on it, by offload policy.
    """

    mesh: DeviceMesh
    spec: MeshSpec
    spmd: bool
    backends: dict[Any, Any] = field(default_factory=dict)

    @property
    def others(self) -> tuple[str, ...]:
        """Axes that aren't data parallel."""
        return tuple(n for n in self.spec.names if n not in self.spec.shard and n not in self.spec.replicate)

    @cached_property
    def standing(self) -> tuple[DeviceMesh, tuple[str, ...]]:
        """The mesh on which sharded parameters stand, and the role of each of its axes: ``shard``, ``replicate``, or
        the name of an axis that isn't data parallel. Several shard axes are flattened into one, at the place of the
        first, and replicate axes beside them likewise, as FSDP2 does. The first use may communicate (`flattened`)."""
        spec, names = self.spec, self.spec.names
        if len(spec.shard) < 2:
            roles = {**dict.fromkeys(spec.shard, "shard"), **dict.fromkeys(spec.replicate, "replicate")}
            return self.mesh, tuple(roles.get(name, name) for name in names)
        parts, roles_ = [], []
        for name in names:
            if name == spec.shard[0]:
                for role, axes in (("replicate", spec.replicate), ("shard", spec.shard)):
                    if axes:
                        parts.append(flattened(self.mesh, axes))
                        roles_.append(role)
            elif name in self.others:
                parts.append(self.mesh[name])
                roles_.append(name)
        for part in parts:
            remember(part)
        return DeviceMesh._concatenate(parts) if len(parts) > 1 else parts[0], tuple(roles_)


class _Kept(dict[Any, DataMesh]):
    """What a mesh holds of ours. A pickled or copied mesh begins without."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def data_mesh(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> DataMesh:
    """A mesh with roles, see `mesh_spec`. Does not communicate.

    Raises:
        MeshError: see `mesh_spec`.
    """
    # On the root mesh itself: meshes compare equal after their groups were destroyed and made anew.
    kept: _Kept = mesh._get_root_mesh().__dict__.setdefault("_hsdp_meshes", _Kept())
    key = (mesh, dp_mesh_dims)
    if key not in kept:
        kept[key] = DataMesh(mesh, mesh_spec(mesh, dp_mesh_dims), dp_mesh_dims is not None)
        remember(mesh)
    return kept[key]


def data_mesh_of(info: Any) -> DataMesh:
    """The mesh of a parameter's own, from a `DataParallelMeshInfo` or FSDP2's object of the same fields.

    Raises:
        MeshError: it is neither, or its mesh has axes without a role.
    """
    mesh, shard, replicate = (getattr(info, n, None) for n in ("mesh", "shard_mesh_dim", "replicate_mesh_dim"))
    if not isinstance(mesh, DeviceMesh) or (shard is None and replicate is None):
        raise MeshError(f"mesh_info must be an FSDPMeshInfo, HSDPMeshInfo or DDPMeshInfo, found {info!r}")
    dims, whole = getattr(info, "dp_mesh_dims", None), getattr(info, "spmd_mesh", None)
    if dims is not None and whole is not None:
        return data_mesh(whole, DataParallelMeshDims(dims.shard, dims.replicate))
    kept: _Kept = mesh._get_root_mesh().__dict__.setdefault("_hsdp_meshes", _Kept())
    key = (mesh, shard, replicate)
    if key not in kept:
        names = tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))
        roles = [() if at is None else (names[at],) for at in (shard, replicate)]
        if mesh.ndim > len({shard, replicate} - {None}):
            raise MeshError(
                f"mesh_info of a mesh with axes {names} gives {roles} a role; pass the data-parallel submesh"
            )
        kept[key] = DataMesh(mesh, _spec(mesh, names, *roles), False)
        remember(mesh)
    return kept[key]


# -- what users write ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataParallelMeshInfo:
    """Which axes of a mesh do what for one parameter.

    Attributes:
        mesh: data parallel axes only.
        shard_mesh_dim, replicate_mesh_dim: positions of the axes; None for none.
        dp_mesh_dims, spmd_mesh: where parameters live on a larger mesh: that mesh, and its data-parallel axes.

    Raises:
        MeshError: neither is given, or an axis doesn't exist.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise MeshError("at least one of shard_mesh_dim and replicate_mesh_dim must be given")
        for dim in (self.shard_mesh_dim, self.replicate_mesh_dim):
            if dim is not None and not 0 <= dim < self.mesh.ndim:
                raise MeshError(f"axis {dim} is out of range for a mesh of {self.mesh.ndim} axes")


@dataclass(frozen=True, eq=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh of which one axis shards; ``shard_mesh_dim`` is needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise MeshError(f"{type(self).__name__} needs shard_mesh_dim")

    @property
    def shard_mesh_size(self) -> int:
        """Number of ranks that a parameter is cut over."""
        return self.mesh.size(self.shard_mesh_dim)

    @property
    def shard_mesh_rank(self) -> int:
        """Position of this rank among them."""
        return self.mesh.get_local_rank(self.shard_mesh_dim)

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """Their process group."""
        return self.mesh.get_group(self.shard_mesh_dim)


@dataclass(frozen=True, eq=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh of which one axis replicates; ``replicate_mesh_dim`` is needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise MeshError(f"{type(self).__name__} needs replicate_mesh_dim")

    @property
    def replicate_mesh_size(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.mesh.size(self.replicate_mesh_dim)

    @property
    def replicate_mesh_rank(self) -> int:
        """Position of this rank among them."""
        return self.mesh.get_local_rank(self.replicate_mesh_dim)

    @property
    def replicate_process_group(self) -> dist.ProcessGroup:
        """Their process group."""
        return self.mesh.get_group(self.replicate_mesh_dim)


@dataclass(frozen=True, eq=False)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh of which one axis shards and one replicates."""


@dataclass(frozen=True, eq=False)
class ShardPlacementResult:
    """What a ``shard_placement_fn`` may return.

    Attributes:
        placement: the dim to shard; None for ``Shard(0)``.
        mesh_info: over which mesh: an `FSDPMeshInfo`, an `HSDPMeshInfo`, or a `DDPMeshInfo` for a parameter that stays
            whole on each of its ranks.
    """

    placement: Shard | None
    mesh_info: DataParallelMeshInfo
