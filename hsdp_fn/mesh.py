"""Which ranks share what: a device mesh as pure integers.

A mesh is a row-major array of global ranks with named axes. Two disjoint sets of axes carry data parallelism: the
*shard* axes, over which each parameter is split, and the *replicate* axes, over which each shard is repeated. Axes in
neither set (tensor or pipeline parallel) are left alone: ranks that differ only there never communicate here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod

from .errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A mesh and the role of its axes.

    Attributes:
        shape: size of each axis, all at least 1.
        names: name of each axis, unique.
        shard: axes that split parameters; several act as one, flattened in this order (first is the slowest).
        replicate: axes that repeat the shards, flattened likewise.
        ranks: global ranks in row-major order; empty means ``0 .. size-1``.

    Raises:
        MeshError: naming the field, on any value that can't be a mesh.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    #: Number of pieces each parameter is split into, of ranks that hold the same shard, and their product: the number
    #: of ranks that see different data, which divides the mean gradient.
    shard_size: int = field(init=False, repr=False, compare=False)
    replicate_size: int = field(init=False, repr=False, compare=False)
    data_parallel_size: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("shape", "names", "shard", "replicate", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise MeshError(f"{name} must be a tuple, found {value!r}")
            object.__setattr__(self, name, tuple(value))
        if not self.shape or any(type(n) is not int or n < 1 for n in self.shape):
            raise MeshError(f"shape must be a non-empty tuple of positive ints, found {self.shape!r}")
        if len(self.names) != len(self.shape) or len(set(self.names)) != len(self.names):
            raise MeshError(f"names must hold one unique name per axis of shape {self.shape}, found {self.names!r}")
        for role, axes in (("shard", self.shard), ("replicate", self.replicate)):
            for axis in axes:
                if axis not in self.names:
                    raise MeshError(f"{role} axis {axis!r} isn't an axis of the mesh; it has {self.names}")
            if len(set(axes)) != len(axes):
                raise MeshError(f"{role} names an axis twice: {axes}")
        if both := set(self.shard) & set(self.replicate):
            raise MeshError(f"axes {sorted(both)} are in both shard and replicate; an axis has one role")
        if not self.shard and not self.replicate:
            raise MeshError("at least one of shard and replicate must name an axis: this mesh has no data parallelism")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(prod(self.shape))))
        if any(type(r) is not int or r < 0 for r in self.ranks) or not (
            len(self.ranks) == len(set(self.ranks)) == prod(self.shape)
        ):
            raise MeshError(f"ranks must be {prod(self.shape)} different global ranks, found {self.ranks}")
        object.__setattr__(self, "shard_size", self._size(self.shard))
        object.__setattr__(self, "replicate_size", self._size(self.replicate))
        object.__setattr__(self, "data_parallel_size", self.shard_size * self.replicate_size)
        object.__setattr__(self, "_hash", hash((self.shape, self.names, self.shard, self.replicate, self.ranks)))

    def __hash__(self) -> int:
        return self._hash  # computed once: meshes are looked up at every collective

    @classmethod
    def fsdp(cls, shard: int) -> MeshSpec:
        """Fully sharded: one axis ``shard`` of the given size."""
        return cls((shard,), ("shard",), shard=("shard",))

    @classmethod
    def hsdp(cls, replicate: int, shard: int) -> MeshSpec:
        """Hybrid sharded: axis 0 replicates, axis 1 shards (the convention of FSDP2)."""
        return cls((replicate, shard), ("replicate", "shard"), shard=("shard",), replicate=("replicate",))

    @classmethod
    def replicated(cls, replicate: int) -> MeshSpec:
        """Plain data parallelism: every rank holds everything."""
        return cls((replicate,), ("replicate",), replicate=("replicate",))

    @property
    def size(self) -> int:
        """Number of ranks in the mesh, all axes together."""
        return prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a global rank on each axis.

        Raises:
            MeshError: the rank isn't in the mesh.
        """
        if rank not in self.ranks:
            raise MeshError(f"rank {rank} isn't in the mesh of shape {self.shape} with ranks {self.ranks}")
        index = self.ranks.index(rank)
        out = []
        for n in reversed(self.shape):
            index, c = divmod(index, n)
            out.append(c)
        return tuple(reversed(out))

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Position of a rank along the flattened ``axes``: its place in `group(rank, axes)`."""
        coordinate = self.coordinate(rank)
        flat = 0
        for at in self._places(axes):
            flat = flat * self.shape[at] + coordinate[at]
        return flat

    def shard_index(self, rank: int) -> int:
        """Which of the `shard_size` pieces the rank owns."""
        return self.index(rank, self.shard)

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` on ``axes`` only, in flattened order. The rank itself is in it."""
        base = list(self.coordinate(rank))
        places = self._places(axes)
        members = []
        for position in product(*(range(self.shape[p]) for p in places)):
            for place, value in zip(places, position, strict=True):
                base[place] = value
            members.append(self._rank_at(base))
        return tuple(members)

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Global ranks that the rank communicates with, over shard and replicate axes together, in the mesh's order."""
        return self.group(rank, tuple(n for n in self.names if n in self.shard or n in self.replicate))

    def cut(self, size: int) -> MeshSpec:
        """The same ranks with each shard group cut into runs of ``size`` neighbours, which are the new shard groups.

        Raises:
            MeshError: ``size`` doesn't divide the number of shard ranks.
        """
        if size < 1 or self.shard_size % size:
            raise MeshError(f"groups of {size} ranks can't be cut out of {self.shard_size} shard ranks")
        groups = dict.fromkeys(self.group(rank, self.shard) for rank in self.ranks)
        ranks = tuple(rank for group in groups for rank in group)
        return MeshSpec((len(ranks) // size, size), ("run", "shard"), shard=("shard",), ranks=ranks)

    def with_roles(self, dims: DataParallelMeshDims) -> MeshSpec:
        """The same mesh with other data-parallel axes.

        Raises:
            MeshError: naming an axis that isn't there.
        """
        return MeshSpec(self.shape, self.names, dims.shard_names, dims.replicate_names, self.ranks)

    def as_replicated(self) -> MeshSpec:
        """The same ranks with every data-parallel axis replicating: the mesh of a parameter that isn't split."""
        if not self.shard:
            return self
        axes = tuple(n for n in self.names if n in self.shard or n in self.replicate)
        return MeshSpec(self.shape, self.names, shard=(), replicate=axes, ranks=self.ranks)

    def _size(self, axes: tuple[str, ...]) -> int:
        return prod(self.shape[at] for at in self._places(axes))

    def _places(self, axes: tuple[str, ...]) -> list[int]:
        if unknown := [axis for axis in axes if axis not in self.names]:
            raise MeshError(f"axes {unknown} aren't axes of the mesh; it has {self.names}")
        return [self.names.index(axis) for axis in axes]

    def _rank_at(self, coordinate: list[int]) -> int:
        index = 0
        for n, c in zip(self.shape, coordinate, strict=True):
            index = index * n + c
        return self.ranks[index]


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Which dims of a larger device mesh carry data parallelism, by name.

    Attributes:
        shard: the dim that splits parameters, or several that act as one, flattened in this order; None for none.
        replicate: the dim or dims that repeat the shards, likewise.

    Raises:
        MeshError: (a `ValueError`) naming the field: neither is set, no name, a name given twice or in both.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for role in ("shard", "replicate"):
            value = getattr(self, role)
            if value is None:
                continue
            names = tuple(value) if isinstance(value, (tuple, list)) else (value,)
            if not names or any(not isinstance(name, str) or not name for name in names):
                raise MeshError(f"{role} must be a dim's name, a non-empty tuple of names, or None, found {value!r}")
            if double := sorted({name for name in names if names.count(name) > 1}):
                raise MeshError(f"{role} names dims {double} twice: {value!r}")
            object.__setattr__(self, role, value if isinstance(value, str) else names)
        if self.shard is None and self.replicate is None:
            raise MeshError("at least one of shard and replicate must name a dim: without, nothing is data parallel")
        if both := sorted(set(self.shard_names) & set(self.replicate_names)):
            raise MeshError(f"dims {both} are in both shard and replicate; a dim has one role")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dims that split parameters, in order; empty where none does."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dims that repeat the shards, in order; empty where none does."""
        return _names(self.replicate)


def _names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if dims is None else (dims,) if isinstance(dims, str) else dims
