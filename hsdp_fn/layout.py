"""Who owns which rows: parameters, units, buckets, offsets and padding, as plain records.

A *unit* is the set of parameters gathered together just before use. Inside a unit, parameters that share mesh and
dtype form a *bucket*: one flat shard, one all-gather, one reduce-scatter (in a unit that isn't fused, each parameter is
a bucket of its own). `planner.plan_layout` makes layouts; every rank makes the same one, and `Layout.digest` lets them
verify it.

Sharding follows ``torch.chunk`` on one dim: each of ``S`` ranks owns ``ceil(n / S)`` rows, trailing ranks own fewer or
none. In a flat shard every rank stores the full ``ceil(n / S)`` rows, the missing ones as zeros, so that collectives
are uniform; only the real rows are ever exposed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from .dtypes import ITEMSIZE, dtype_name, wider
from .errors import LayoutError, PolicyError, UnknownUnitError
from .mesh import MeshSpec
from .policy import MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy, ReductionPolicy

#: Name of the unit that owns every parameter no other unit claims.
ROOT = ""


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along ``dim`` over the mesh's shard axes. Negative dims count from the end."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Replicate:
    """Held whole by every rank; its gradient is all-reduced over all data-parallel ranks."""


Placement = Shard | Replicate


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A placement on another mesh than the unit's: a routed expert's, say, whose copies are fewer.

    The parameter's gradients are summed over the data-parallel ranks of ``mesh`` and divided by the number of those of
    the unit's mesh, if these are more: what the other ranks' batches contribute has come through the model's own
    communication (an expert's tokens, sent from all of them).
    """

    placement: Placement
    mesh: MeshSpec


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter before sharding.

    Attributes:
        name: fully qualified name.
        shape: full shape.
        dtype: dtype of the master copy, by name.
        requires_grad: frozen parameters are gathered but have no place in gradients.
        aliases: further names of the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.aliases, str) or not isinstance(self.aliases, (tuple, list)):
            raise LayoutError(f"parameter {self.name!r}: aliases must be a tuple of names, found {self.aliases!r}")
        object.__setattr__(self, "aliases", tuple(self.aliases))
        shape = tuple(self.shape) if isinstance(self.shape, (tuple, list)) else (-1,)
        if any(type(n) is not int or n < 0 for n in shape):
            raise LayoutError(f"parameter {self.name!r}: shape must hold ints >= 0, found {self.shape!r}")
        object.__setattr__(self, "shape", shape)
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        except PolicyError as error:
            raise LayoutError(f"parameter {self.name!r}: {error}") from None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What to gather together.

    Attributes:
        name: the unit's name, unique.
        modules: dotted prefixes whose parameters it owns; empty means ``(name,)``. A parameter belongs to the unit
            with the longest matching prefix.
        reshard_after_forward: free the full parameters after forward and gather them again in backward. An int: keep
            them over groups of that many neighbouring shard ranks, from which backward gathers. None takes the layout's
            default.
        mp_policy: mixed precision of this unit; None takes the layout's.
        reduction: how its gradients are reduced; None takes the layout's.
        fused: one collective of a kind for all parameters that share mesh and dtype, instead of one a parameter; None
            takes the layout's default.
        mesh: of its parameters; None takes the layout's.
    """

    name: str
    modules: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    reduction: ReductionPolicy | None = None
    fused: bool | None = None
    mesh: MeshSpec | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter's place in one rank's flat shard.

    Attributes:
        index: position in ``UnitLayout.params``.
        spec: the parameter.
        dim: the dim that is split (0 for replicated parameters).
        chunk: rows that each rank stores, padding included: ``ceil(rows / S)``.
        offset: first element in the flat shard.
        numel: elements in the flat shard, padding included.
    """

    index: int
    spec: ParamSpec
    dim: int
    chunk: int
    offset: int
    numel: int

    def rows(self, shard_index: int) -> tuple[int, int]:
        """``(start, stop)`` of the rows that the rank really owns; equal when it owns none."""
        n = self.spec.shape[self.dim]
        start = min(shard_index * self.chunk, n)
        return start, min(start + self.chunk, n)

    def local_shape(self, shard_index: int) -> tuple[int, ...]:
        """Shape of the rows that the rank owns."""
        start, stop = self.rows(shard_index)
        shape = self.spec.shape
        return (*shape[: self.dim], stop - start, *shape[self.dim + 1 :])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored piece, padding included; the same on every rank."""
        shape = self.spec.shape
        return (*shape[: self.dim], self.chunk, *shape[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Flat:
    """The order of some parameters in a flat shard. Compared by identity: a backend may keep plans by it.

    Attributes:
        members: the parameters, in order of offset.
        shard_size: number of ranks the flat is split over.
        numel: elements of one rank's flat shard, padding included.
    """

    members: tuple[Member, ...]
    shard_size: int
    numel: int

    @property
    def padding(self) -> int:
        """Elements of the whole flat (all ranks) that are padding."""
        return self.numel * self.shard_size - sum(m.spec.numel for m in self.members)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: what the ledger records and `expected_comm` predicts.

    Attributes:
        op: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        unit: name of the unit.
        bucket: index of the bucket in the unit.
        dtype: dtype of the buffers.
        numel: elements of the larger buffer (gather output, reduce-scatter input, all-reduce buffer), with padding.
        group_size: ranks that take part.
        padding: how many of ``numel`` are padding; not counted for an all-reduce, where it differs by rank.
    """

    op: str
    unit: str
    bucket: int
    dtype: str
    numel: int
    group_size: int
    padding: int

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, eq=False)
class Regather:
    """Where a bucket's parameters are between forward and backward, if not over all of its shard ranks.

    Attributes:
        mesh: whose shard groups are runs of neighbours in those of the bucket's mesh.
        params: all members, split over such a run.
        gather: the all-gather in backward.
    """

    mesh: MeshSpec
    params: Flat
    gather: Collective | None


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one unit with one mesh and one master dtype; a single one in a unit that isn't fused.

    Attributes:
        index: position in the unit.
        mesh: which axes shard and replicate these parameters.
        dtype: of masters.
        compute_dtype: in which they are gathered and used.
        reduce_dtype: in which gradients are reduced.
        grad_dtype: of the gradients handed to the optimizer: ``dtype``, or ``reduce_dtype`` with
            `MixedPrecisionPolicy.apply_grad_on_fp32_main_grad`.
        mean_over: how many ranks' batches a mean gradient is over: the data-parallel ranks of the unit's mesh, or of
            the bucket's where these are more.
        params: all members; ``grads``: the trainable ones (the same object when all are), None when there is none.
        gather, reduce_scatter, all_reduce: the collectives that it issues; None where the group has one rank or
            there is no element.
        regather: of a unit that is resharded to smaller groups after forward; None where it is resharded over all.
    """

    index: int
    mesh: MeshSpec
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    grad_dtype: str
    mean_over: int
    params: Flat
    grads: Flat | None
    gather: Collective | None
    reduce_scatter: Collective | None
    all_reduce: Collective | None
    regather: Regather | None = None

    @cached_property
    def acc_dtype(self) -> str:
        """Dtype in which gradients of several microbatches add up: the wider of finished gradient and reduction."""
        return wider(self.grad_dtype, self.reduce_dtype)


@dataclass(frozen=True, eq=False)
class UnitLayout:
    """One unit: its parameters in order, their buckets, and whether it is resharded after forward (an int: over so many
    ranks); ``modules`` are its prefixes, ``mesh`` is that of parameters without one of their own."""

    name: str
    modules: tuple[str, ...]
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    mesh: MeshSpec
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    reduction: ReductionPolicy

    @cached_property
    def trainable(self) -> tuple[ParamSpec, ...]:
        """Parameters that have gradients, in the unit's order."""
        return tuple(p for p in self.params if p.requires_grad)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Index of each parameter by name and by alias."""
        return {name: i for i, p in enumerate(self.params) for name in (p.name, *p.aliases)}

    @property
    def title(self) -> str:
        """Name for people."""
        return self.name or "(root)"


@dataclass(frozen=True, eq=False)
class Layout:
    """The whole plan: units in execution order, root first. Two layouts are equal when their digests are.

    Attributes:
        units: the units.
        mesh: of units without one of their own. Its data-parallel ranks compare their layouts.
        reduction: of units that have none of their own; prefetch, offload: policies.
        ignored: names of parameters left out of sharding and of gradients altogether.
    """

    units: tuple[UnitLayout, ...]
    mesh: MeshSpec
    reduction: ReductionPolicy
    prefetch: PrefetchPolicy
    offload: OffloadPolicy
    ignored: tuple[str, ...] = ()
    unit_index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_index", {u.name: i for i, u in enumerate(self.units)})

    @cached_property
    def digest(self) -> str:
        """Short hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self._facts()).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def select(self, units: str | Iterable[str] | None) -> tuple[int, ...]:
        """Indices of units by name; None selects all.

        Raises:
            UnknownUnitError: naming the unit and those that exist.
        """
        if units is None:
            return tuple(range(len(self.units)))
        names = (units,) if isinstance(units, str) else tuple(units)
        for name in names:
            if name not in self.unit_index:
                known = ", ".join(repr(u.name) for u in self.units)
                raise UnknownUnitError(f"no unit {name!r} in this layout; its units are {known}")
        return tuple(dict.fromkeys(self.unit_index[name] for name in names))

    def params(self) -> Iterator[ParamSpec]:
        """All sharded or replicated parameters, unit by unit."""
        for unit in self.units:
            yield from unit.params

    def _facts(self) -> Iterator[str]:
        yield repr((self.mesh, self.reduction, self.prefetch, self.offload, self.ignored))
        for unit in self.units:
            yield repr(
                (unit.name, unit.modules, unit.reshard_after_forward, unit.mp_policy, unit.reduction, unit.params)
            )
            yield repr(self._fact(unit.mesh))
            for b in unit.buckets:
                mesh = self._fact(b.mesh)
                yield repr((mesh, b.dtype, b.compute_dtype, b.reduce_dtype, b.mean_over, b.params.members))

    def _fact(self, mesh: MeshSpec) -> object:
        """A mesh as all ranks know it: of one over other ranks (an expert's), each knows the part that it is in."""
        whole = set(mesh.ranks) == set(self.mesh.ranks)
        return mesh if whole else (mesh.shape, mesh.names, mesh.shard, mesh.replicate)
