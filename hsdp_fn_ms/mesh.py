"""A device mesh of named axes over MindSpore's process groups, which has none of its own, and its roles for the core.

The shape of torch's: `init_device_mesh`, names, slices by name, flattening, groups and coordinates by axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
import numpy.typing as npt
from mindspore.communication.management import GlobalComm

from hsdp_fn import BackendError, DataParallelMeshDims, MeshError, MeshSpec

from .launch import BACKENDS, world
from .probe import facts

_DEVICES = {"cpu": "CPU", "npu": "Ascend", "ascend": "Ascend"}
_GROUPS: dict[tuple[int, ...], str] = {}


class DeviceMesh:
    """A row-major array of ranks with named axes, seen from this process.

    Communicates when made: one process group an axis, of this rank's ranks along it, unless there is one of these ranks
    already. All ranks of the mesh must make it at the same place.

    Args:
        device_type: ``cpu`` or ``npu``; must be MindSpore's present device target.
        mesh: ranks, nested lists or an array.
        mesh_dim_names: one unique name an axis, or None.

    Raises:
        MeshError: ranks that don't exist or occur twice, names that don't fit, another device; a group whose ranks
            don't rise (MindSpore sorts the ranks of a group).
        BackendError: a group couldn't be made.
    """

    def __init__(self, device_type: str, mesh: Any, mesh_dim_names: Sequence[str] | None = None) -> None:
        self.device_type = _device(device_type)
        self.mesh = _ranks(mesh)
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check_names(self.mesh_dim_names, self.mesh.ndim)
        self.rank, self.world_size = world()
        if self.mesh.max() >= self.world_size:
            raise MeshError(f"the mesh has rank {self.mesh.max()}, but the world has {self.world_size} ranks")
        self._flattened: dict[str, DeviceMesh] = {}
        self._root = self
        for axis in range(self.ndim):
            for line in np.moveaxis(self.mesh, axis, -1).reshape(-1, self.mesh.shape[axis]):
                if list(line) != sorted(line):
                    raise MeshError(
                        f"ranks must rise along each axis, as MindSpore sorts the ranks of a group; found "
                        f"{line.tolist()} in {self.mesh.tolist()}"
                    )
        if self.get_coordinate() is not None:
            for axis in range(self.ndim):
                if self.mesh.shape[axis] > 1:
                    process_group(self._line(axis))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(self.mesh.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(int(n) for n in self.mesh.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks along an axis; of all for None."""
        return prod(self.shape) if mesh_dim is None else self.shape[self._axis(mesh_dim)]

    def get_rank(self) -> int:
        """This process's rank in the world."""
        return self.rank

    def get_coordinate(self) -> list[int] | None:
        """This rank's position on each axis; None when it isn't in the mesh."""
        found = np.argwhere(self.mesh == self.rank)
        return [int(c) for c in found[0]] if len(found) else None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along an axis; of a 1-D mesh its only one.

        Raises:
            MeshError: the rank isn't in the mesh, or which axis isn't said.
        """
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.rank} isn't in the mesh {self}")
        return coordinate[self._axis(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> str:
        """The process group of this rank along an axis, by MindSpore's name for it; of a 1-D mesh its only one.

        Raises:
            MeshError: the rank isn't in the mesh, or which axis isn't said.
        """
        axis = self._axis(mesh_dim)
        if self.get_coordinate() is None:
            raise MeshError(f"rank {self.rank} isn't in the mesh {self}")
        return process_group(self._line(axis))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along some axes that this rank is in. A flattened axis is found by its name.

        Raises:
            MeshError: an axis that isn't there, out of order, or a rank that isn't in the mesh.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if len(wanted) == 1 and wanted[0] in self._root._flattened:
            return self._root._flattened[wanted[0]]
        axes = [self._axis(name) for name in wanted]
        if axes != sorted(set(axes)):
            raise MeshError(f"axes {wanted} must be in the order of the mesh, each once: {self.mesh_dim_names}")
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.rank} isn't in the mesh {self}")
        place = tuple(slice(None) if axis in axes else c for axis, c in enumerate(coordinate))
        part = DeviceMesh(self.device_type, self.mesh[place], wanted)
        part._root = self._root
        return part

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """All axes as one, the first slowest. Communicates when there is no group of these ranks yet.

        Args:
            mesh_dim_name: the new axis's name, by which the root mesh finds it again; None joins the names.

        Raises:
            MeshError: the name is an axis already.
        """
        name = mesh_dim_name or "_".join(self.mesh_dim_names or (f"axis{i}" for i in range(self.ndim)))
        if self.ndim > 1 and name in (self._root.mesh_dim_names or ()):
            raise MeshError(f"the mesh has an axis {name!r} already; give the flattened one another name")
        flat = DeviceMesh(self.device_type, self.mesh.reshape(-1), (name,))
        flat._root = self._root
        self._root._flattened[name] = flat
        return flat

    _flatten = flatten  # torch's name

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceMesh)
            and self.device_type == other.device_type
            and self.mesh_dim_names == other.mesh_dim_names
            and self.mesh.shape == other.mesh.shape
            and bool((self.mesh == other.mesh).all())
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.mesh_dim_names, self.mesh.shape, self.mesh.tobytes()))

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"

    def _line(self, axis: int) -> tuple[int, ...]:
        """Ranks that differ from this one on an axis only."""
        coordinate = self.get_coordinate()
        assert coordinate is not None
        place = tuple(slice(None) if at == axis else c for at, c in enumerate(coordinate))
        return tuple(int(r) for r in self.mesh[place])

    def _axis(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim != 1:
                raise MeshError(f"the mesh has {self.ndim} axes {self.mesh_dim_names}; say which")
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise MeshError(f"axis {mesh_dim!r} isn't an axis of the mesh; it has {self.mesh_dim_names}")
            return (self.mesh_dim_names or ()).index(mesh_dim)
        if type(mesh_dim) is not int or not -self.ndim <= mesh_dim < self.ndim:
            raise MeshError(f"axis {mesh_dim!r} is out of range for a mesh of {self.ndim} axes")
        return mesh_dim % self.ndim


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of all ranks, in row-major order. Communicates, see `DeviceMesh`.

    Example:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    Args:
        device_type: ``cpu`` or ``npu``.
        mesh_shape: sizes, whose product is the number of ranks.
        mesh_dim_names: one unique name an axis, or None.

    Raises:
        MeshError: see `DeviceMesh`; also a shape of another number of ranks.
    """
    shape = tuple(mesh_shape)
    if not shape or any(type(n) is not int or n < 1 for n in shape):
        raise MeshError(f"mesh_shape must be a non-empty tuple of positive ints, found {mesh_shape!r}")
    if prod(shape) != (size := world()[1]):
        raise MeshError(f"a mesh of shape {shape} has {prod(shape)} ranks, the world has {size}")
    return DeviceMesh(device_type, np.arange(size).reshape(shape), mesh_dim_names)


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
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"expected a DeviceMesh of hsdp_fn_ms, found {mesh!r}")
    if dp_mesh_dims is None:
        if mesh.ndim not in (1, 2):
            raise MeshError(
                f"expected a 1-D mesh (shard) or a 2-D mesh (replicate, shard), found {mesh.ndim} axes "
                f"{mesh.mesh_dim_names}; name the data-parallel ones: "
                f"dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
            )
        names = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else ("replicate", "shard"))
        return _spec(mesh, names, names[-1:], names[:-1])
    if not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise MeshError(f"dp_mesh_dims must be a DataParallelMeshDims of hsdp_fn, found {dp_mesh_dims!r}")
    if mesh.mesh_dim_names is None:
        raise MeshError(f"dp_mesh_dims names axes, but {mesh} has none; make the mesh with mesh_dim_names")
    for role, axes in (("shard", dp_mesh_dims.shard_names), ("replicate", dp_mesh_dims.replicate_names)):
        if unknown := [axis for axis in axes if axis not in mesh.mesh_dim_names]:
            raise MeshError(
                f"dp_mesh_dims: {role} axes {unknown} aren't axes of the mesh; it has {mesh.mesh_dim_names}"
            )
        if (ordered := tuple(name for name in mesh.mesh_dim_names if name in axes)) != axes:
            raise MeshError(f"dp_mesh_dims: {role} axes {axes} must be in the order of the mesh: {ordered}")
    return _spec(mesh, mesh.mesh_dim_names, dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names)


def process_group(ranks: Sequence[int]) -> str:
    """MindSpore's name of the group of these ranks, in rising order: one for all meshes and backends. Making it
    communicates among these ranks only, which all have to ask for it at the same place.

    Raises:
        BackendError: it couldn't be made, or this process hasn't joined a world.
    """
    key = tuple(ranks)
    found = _GROUPS.get(key)
    if found is None:
        if not GlobalComm.INITED:
            raise BackendError(f"no process group of ranks {key}: call init_process_group() first")
        if len(key) == dist.get_world_size():
            found = GlobalComm.WORLD_COMM_GROUP
        else:
            found = dist.new_group(list(key), backend=BACKENDS[facts().device])
        if not found:  # MindSpore only logs why
            raise BackendError(f"MindSpore couldn't make a process group of ranks {key}; its log says why")
        _GROUPS[key] = found
    return found


def _spec(mesh: DeviceMesh, names: tuple[str, ...], shard: tuple[str, ...], replicate: tuple[str, ...]) -> MeshSpec:
    ranks = tuple(int(r) for r in mesh.mesh.reshape(-1))
    spec = MeshSpec(mesh.shape, names, shard=shard, replicate=replicate, ranks=ranks)
    for axes in (shard, replicate):
        for group in {spec.group(rank, axes) for rank in ranks} if axes else ():
            if list(group) != sorted(group):
                raise MeshError(
                    f"the ranks of a mesh must be in rising order along {axes}, as MindSpore sorts the ranks of a "
                    f"group; found {group} in {mesh.mesh.tolist()}"
                )
    return spec


def _device(device_type: object) -> str:
    if not isinstance(device_type, str) or device_type.lower() not in _DEVICES:
        raise MeshError(f"device_type must be one of {tuple(_DEVICES)}, found {device_type!r}")
    wanted, present = _DEVICES[device_type.lower()], facts().device
    if wanted != present:
        raise MeshError(f"the mesh is for {wanted}, but MindSpore's device target is {present}")
    return device_type.lower()


def _ranks(mesh: Any) -> npt.NDArray[np.int64]:
    array = np.asarray(mesh)
    if array.ndim == 0 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise MeshError(f"mesh must be a non-empty array of ranks, found {mesh!r}")
    if array.min() < 0 or len(np.unique(array)) != array.size:
        raise MeshError(f"mesh must hold different ranks from 0 on, found {array.tolist()}")
    return array.astype(np.int64)


def _check_names(names: tuple[str, ...] | None, ndim: int) -> None:
    if names is None:
        return
    if len(names) != ndim or len(set(names)) != ndim or not all(isinstance(n, str) and n for n in names):
        raise MeshError(f"mesh_dim_names must hold one unique name for each of {ndim} axes, found {names!r}")
