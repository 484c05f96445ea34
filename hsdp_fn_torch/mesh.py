"""From a torch `DeviceMesh` to the core's `MeshSpec` and to process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hsdp_fn import MeshError, MeshSpec


def mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    """The roles of a data-parallel mesh, by FSDP2's convention. Does not communicate.

    Args:
        mesh: 1-D: its axis shards. 2-D: axis 0 replicates, axis 1 shards. Unnamed axes get the names ``shard`` and
            ``replicate``.

    Raises:
        MeshError: more than two axes; ranks that don't rise along an axis.
    """
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found {mesh.ndim} axes "
            f"{mesh.mesh_dim_names}; pass the data-parallel submesh"
        )
    if any(bool((mesh.mesh.diff(dim=axis) < 0).any()) for axis in range(mesh.ndim)):
        raise MeshError(
            f"the ranks of a mesh must be in rising order along each axis, as torch sorts the ranks of a group; found "
            f"{mesh.mesh.tolist()}"
        )
    default = ("shard",) if mesh.ndim == 1 else ("replicate", "shard")
    names = tuple(mesh.mesh_dim_names or default)
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    shape = tuple(int(n) for n in mesh.mesh.shape)
    return MeshSpec(shape, names, shard=names[-1:], replicate=names[:-1], ranks=ranks)


class Groups:
    """Process groups along axes of one mesh, each made once and shared by all units.

    Making a group communicates (the first use of an axis set); all ranks reach it in the same order, as they run the
    same layout.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._made: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def along(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The group of this rank along ``axes`` of the mesh, flattened."""
        group = self._made.get(axes)
        if group is None:
            group = self._made[axes] = self._make(axes)
        return group

    def all(self) -> dist.ProcessGroup:
        """The group of all ranks of the mesh."""
        if self._mesh.ndim == 1:
            return self._mesh.get_group(0)
        if self._mesh.size() == dist.get_world_size():
            return dist.distributed_c10d._get_default_group()
        return self._mesh._flatten().get_group()

    def _make(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        names = self._mesh.mesh_dim_names
        if names is None or self._mesh.ndim == 1:
            if len(axes) == self._mesh.ndim:
                return self.all()
            return self._mesh.get_group(("replicate", "shard").index(axes[0]))
        if len(axes) == 1:
            return self._mesh.get_group(axes[0])
        return self._mesh[axes]._flatten().get_group()


@dataclass(frozen=True, eq=False)
class DataParallelMeshInfo:
    """Which axes of a mesh do what for one parameter.

    Attributes:
        mesh: data parallel axes only.
        shard_mesh_dim, replicate_mesh_dim: positions of the axes; None for none.

    Raises:
        MeshError: neither is given, or an axis doesn't exist.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

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
        mesh_info: over which mesh. Only the unit's own mesh so far.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo
