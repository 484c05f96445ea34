"""Hypothesis strategies and plain-Python oracles of the core's tests: meshes, parameters, units, gradients.

Everything is integer-valued and small, so that sums are exact in every dtype (float16 included) and a test can ask for
equality. The oracles share no code with `hsdp_fn`: they index and sum numpy arrays over explicit lists of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import permutations, product
from math import frexp, prod
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import assume
from hypothesis import strategies as st

from hsdp_fn import (
    ROOT,
    Layout,
    MeshSpec,
    MixedPrecisionPolicy,
    OnMesh,
    ParamSpec,
    PrefetchPolicy,
    ReductionPolicy,
    Replicate,
    Shard,
    UnitSpec,
    plan_layout,
)
from hsdp_fn.layout import Bucket, Member

Array = npt.NDArray[Any]


# ---------------------------------------------------------------------------------------------------------- oracles


def chunks(rows: int, parts: int) -> list[list[int]]:
    """Row numbers of each part as ``torch.chunk`` hands them out: equal pieces, the last ones short or empty."""
    size = next(s for s in range(rows + 1) if s * parts >= rows)
    return [list(range(rows))[part * size : (part + 1) * size] for part in range(parts)]


def peers(mesh: MeshSpec, position: int, axes: tuple[str, ...]) -> list[int]:
    """Positions in ``mesh.ranks`` that differ from ``position`` on ``axes`` only, the first axis slowest."""
    grid = np.arange(mesh.size).reshape(mesh.shape)
    here = [int(c) for c in np.argwhere(grid == position)[0]]
    plane = grid[tuple(slice(None) if name in axes else here[i] for i, name in enumerate(mesh.names))]
    kept = [name for name in mesh.names if name in axes]
    return [int(p) for p in plane.transpose([kept.index(a) for a in axes]).reshape(-1)] if axes else [position]


def shard_position(mesh: MeshSpec, position: int) -> int:
    """Which piece of a sharded parameter the rank at ``position`` owns."""
    return peers(mesh, position, mesh.shard).index(position)


def is_power_of_two(x: float) -> bool:
    return frexp(x)[0] == 0.5


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, repr=False)
class Case:
    """A layout with integer values to run on it.

    Attributes:
        layout: the plan.
        seed: of parameters and gradients.
    """

    layout: Layout
    seed: int

    def __repr__(self) -> str:
        """What a person needs to see why a case fails."""
        lines = [f"Case(seed={self.seed}, {self.mesh}"]
        for unit in self.layout.units:
            policies = f"{unit.mp_policy}, {unit.reduction}, reshard_after_forward={unit.reshard_after_forward}"
            lines.append(f"    unit {unit.title}: {policies}")
            for bucket in unit.buckets:
                where = f"on {bucket.mesh}, a mean over {bucket.mean_over}"
                where += f" of {bucket.mesh}"
                lines += [f"        {m.spec} dim {m.dim} {where}" for m in bucket.params.members]
        return "\n".join(lines) + ")"

    @property
    def mesh(self) -> MeshSpec:
        return self.layout.mesh

    @cached_property
    def places(self) -> dict[str, tuple[Bucket, Member]]:
        """Bucket and member of each parameter."""
        return {m.spec.name: (b, m) for unit in self.layout.units for b in unit.buckets for m in b.params.members}

    @cached_property
    def reductions(self) -> dict[str, ReductionPolicy]:
        """Policy of each parameter: its unit's."""
        return {p.name: unit.reduction for unit in self.layout.units for p in unit.params}

    @cached_property
    def grad_dtypes(self) -> dict[str, str]:
        """Dtype of each parameter's finished gradient: its own, or the reduction's where the policy keeps that."""
        out = {}
        for unit in self.layout.units:
            mp = unit.mp_policy
            for p in unit.params:
                reduced = mp.reduce_dtype or mp.param_dtype or p.dtype
                out[p.name] = reduced if mp.apply_grad_on_fp32_main_grad else p.dtype
        return out

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, (_, m) in self.places.items() if m.spec.requires_grad)

    @cached_property
    def exact(self) -> bool:
        """Whether every gradient is exact: all multipliers are powers of two."""
        return all(is_power_of_two(self.scale(name)) for name in self.trainable)

    def peers(self, mesh: MeshSpec, position: int, axes: tuple[str, ...]) -> list[int]:
        """`peers` on another mesh of the same ranks, in positions of the layout's, which tensors are stacked by."""
        there = mesh.ranks.index(self.mesh.ranks[position])
        return [self.mesh.ranks.index(mesh.ranks[p]) for p in peers(mesh, there, axes)]

    def scale(self, name: str) -> float:
        """What the sum over data-parallel ranks is multiplied by: a mean is over those of the unit's mesh, or of the
        parameter's own where these are more."""
        r = self.reductions[name]
        (unit,) = (unit.mesh for unit in self.layout.units if name in unit.positions)
        ranks = max(len(peers(mesh, 0, mesh.shard + mesh.replicate)) for mesh in (unit, self.places[name][0].mesh))
        divisor = r.divide_factor or (ranks if r.op == "avg" else 1)
        return (r.scaling_factor or 1.0) / divisor

    def values(self, version: int = 0) -> dict[str, Array]:
        """Full parameters as one rank sees them."""
        rng = np.random.default_rng((self.seed, 1, version))
        specs = {name: m.spec for name, (_, m) in self.places.items()}
        return {n: rng.integers(-99, 100, s.shape).astype(s.dtype) for n, s in specs.items()}

    def params(self, version: int = 0) -> dict[str, Array]:
        """Full parameters stacked over ranks, as `shard` takes them."""
        return {name: np.repeat(v[None], self.mesh.size, 0) for name, v in self.values(version).items()}

    def rows(self, values: Mapping[str, Array], padding: float = 0.0) -> dict[str, Array]:
        """Every rank's rows, stacked, as `masters` gives them and `apply_updates` takes them."""
        return {name: self.local(name, np.repeat(v[None], self.mesh.size, 0), padding) for name, v in values.items()}

    def local(self, name: str, full: Array, padding: float = 0.0) -> Array:
        """Rows that each rank owns of its own ``full[rank]``, filled up with ``padding`` to the stored shape."""
        bucket, member = self.places[name]
        mesh = bucket.mesh
        owned = chunks(member.spec.shape[member.dim], len(peers(mesh, 0, mesh.shard)))
        shape = list(member.spec.shape)
        shape[member.dim] = len(owned[0])
        out = np.full((self.mesh.size, *shape), padding, full.dtype)
        for position in range(self.mesh.size):
            mine = owned[shard_position(mesh, mesh.ranks.index(self.mesh.ranks[position]))]
            at = (position, *(slice(None),) * member.dim, slice(0, len(mine)))
            out[at] = np.take(full[position], mine, axis=member.dim)
        return out

    def grads(self, micro: int, unused: Iterable[str] = ()) -> dict[str, Array | None]:
        """One microbatch: whole gradients of each rank, ``[ranks, *shape]`` in compute dtype; None where unused."""
        rng = np.random.default_rng((self.seed, 2, micro))
        out: dict[str, Array | None] = {}
        for name in self.trainable:
            bucket, member = self.places[name]
            value = rng.integers(-8, 9, (self.mesh.size, *member.spec.shape)).astype(bucket.compute_dtype)
            out[name] = None if name in unused else value
        return out

    def mean(self, name: str, total: Array) -> Array:
        """This rank's rows of the gradient, in its finished dtype, from the per-rank sums over microbatches."""
        mesh = self.places[name][0].mesh
        axes, whole = mesh.shard + mesh.replicate, total.astype("float64")
        summed = np.stack([whole[self.peers(mesh, p, axes)].sum(0) for p in range(self.mesh.size)])
        return self.local(name, summed * self.scale(name)).astype(self.grad_dtypes[name])

    def assert_gradient(self, name: str, found: Array, total: Array) -> None:
        """``found`` is the gradient of ``total``: exactly, or to rounding where a multiplier is no power of two."""
        expected = self.mean(name, total)
        assert found.dtype == expected.dtype, name
        if self.exact:
            np.testing.assert_array_equal(found, expected, err_msg=name)
        else:
            bucket = self.places[name][0]
            eps = max(float(np.finfo(d).eps) for d in (bucket.reduce_dtype, bucket.dtype))
            np.testing.assert_allclose(found, expected, rtol=4 * eps, atol=0, err_msg=name)


def assert_same(found: Mapping[str, Array | None], expected: Mapping[str, Array | None]) -> None:
    """Same names, same dtypes, same bits (None matches None only)."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        other = found[name]
        assert (other is None) == (array is None), name
        if array is not None and other is not None:
            assert other.dtype == array.dtype, name
            np.testing.assert_array_equal(other, array, err_msg=name)


# -------------------------------------------------------------------------------------------------------- strategies


# Choices are drawn from explicit lists: hypothesis would otherwise spend most examples on one rank and empty shapes.


def _axis_sizes(max_world: int) -> list[tuple[int, ...]]:
    line = [(n,) for n in range(2, max_world + 1)]
    plane = [s for n in (2, 3) for s in product(range(2, 9), repeat=n) if prod(s) <= max_world]
    return [(1, 2), (2, 1), *line, *(plane * (3 if len(plane) < len(line) else 1))]


_ROLES = [
    ("shard", "replicate", "other"),
    ("replicate", "shard", "shard"),
    ("shard", "replicate", "shard"),
    ("replicate", "shard", "replicate"),
    ("shard", "shard", "replicate"),
    ("shard", "other", "replicate"),
    ("replicate", "replicate", "shard"),
]


@st.composite
def meshes(draw: st.DrawFn, max_world: int = 8) -> MeshSpec:
    """FSDP, HSDP, replicated, and meshes of up to three axes in any order and role; global ranks in any order; one
    rank now and then."""
    if draw(st.integers(0, 15)) == 15:
        return MeshSpec.fsdp(1)
    sizes = draw(st.sampled_from(_axis_sizes(max_world)))
    order = draw(st.permutations(range(len(sizes))))
    roles = dict(zip(order, draw(st.sampled_from(_ROLES)), strict=False))  # the first isn't "other"
    names = ("x", "y", "z")[: len(sizes)]
    split = draw(st.permutations([n for i, n in enumerate(names) if roles[i] == "shard"]))
    repeat = draw(st.permutations([n for i, n in enumerate(names) if roles[i] == "replicate"]))
    first = draw(st.integers(0, 3))
    ranks = draw(st.one_of(st.just(()), st.permutations(range(first, first + prod(sizes)))))
    return MeshSpec(sizes, names, tuple(split), tuple(repeat), tuple(ranks))


def group_sizes(ranks: Iterable[int]) -> list[int]:
    """Sizes that cut shard groups of each of these numbers of ranks, where there is more than one; at least one of
    them into several groups."""
    several = [n for n in ranks if n > 1]
    return [size for size in range(2, max(several, default=0)) if all(n % size == 0 for n in several)]


@cache
def _grids(size: int, max_axes: int, splits: bool) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shapes of meshes of so many ranks with the roles of their axes; ``splits``: only such whose shard groups can be
    cut."""
    out = []
    for axes in range(1, max_axes + 1):
        shapes = [s for s in product(range(1, size + 1), repeat=axes) if prod(s) == size]
        few = max(1, min(s.count(1) for s in shapes))
        roles = [
            r for r in product(("shard", "shard", "other", "replicate", "other"), repeat=axes) if set(r) != {"other"}
        ]
        out += [(shape, role) for shape in shapes if shape.count(1) <= few for role in roles]
    if splits:
        out = [g for g in out if group_sizes([prod(n for n, r in zip(*g, strict=True) if r == "shard")])]
    return out


@st.composite
def meshes_over(draw: st.DrawFn, ranks: Sequence[int], max_axes: int = 3, *, splits: bool = False) -> MeshSpec:
    """Meshes of exactly these ranks, in any order and shape: some axes shard, some replicate, others do neither.
    ``splits``: there are enough shard ranks for groups smaller than all."""
    axes = draw(st.sampled_from([n for n in (1, 2, 2, 3, 3, 3, 4, 4) if n <= max_axes]))
    grids = [g for g in _grids(len(ranks), max_axes, splits) if len(g[0]) == axes]
    shape, roles = draw(st.sampled_from(grids))
    names = draw(st.permutations(("x", "y", "z", "t")[:axes]))
    split = draw(st.permutations([n for n, role in zip(names, roles, strict=True) if role == "shard"]))
    repeat = draw(st.permutations([n for n, role in zip(names, roles, strict=True) if role == "replicate"]))
    return MeshSpec(shape, tuple(names), tuple(split), tuple(repeat), tuple(draw(st.permutations(ranks))))


_SHAPES = st.sampled_from(
    [
        *((n,) for n in (1, 2, 3, 4, 5, 7, 8, 9, 16)),
        *((n, m) for n in (1, 2, 3, 5, 6) for m in (1, 2, 3)),
        *[(2, 3, 2), (3, 1, 2), (1, 5, 2), (1, 1, 9)],
        *[(0,), (0, 3), (4, 0), (2, 0, 2)],
    ]
)
_DTYPES = st.sampled_from(["float32", "float32", "float32", "float64", "float16", "int64"])


@st.composite
def specs(draw: st.DrawFn, name: str) -> ParamSpec:
    """A parameter: 1-D to 3-D, possibly empty, of a few dtypes; frozen sometimes (int64 always); tied sometimes."""
    dtype = draw(_DTYPES)
    frozen = dtype == "int64" or draw(st.integers(0, 4)) == 4
    aliases = (f"{name}_tied",) if draw(st.integers(0, 5)) == 5 else ()
    return ParamSpec(name, draw(_SHAPES), dtype, not frozen, aliases)


reductions = st.builds(
    ReductionPolicy,
    op=st.sampled_from(["avg", "sum"]),
    divide_factor=st.sampled_from([None, None, 1.0, 0.5, 2.0, 4.0, 3.0]),
    scaling_factor=st.sampled_from([None, None, 2.0, 0.25]),
    unused=st.sampled_from(["none", "zeros"]),
)
precisions = partial(
    st.builds,
    MixedPrecisionPolicy,
    param_dtype=st.sampled_from([None, None, "float16", "float32"]),
    reduce_dtype=st.sampled_from([None, None, "float16", "float32", "float64"]),
)


#: Names that are prefixes of each other.
_UNITS = ("layers.1", "layers.10", "layers.1.sub")


@st.composite
def layouts(draw: st.DrawFn, max_world: int = 8, *, main_grads: bool = False) -> Layout:
    """A planned model: a root, up to three units whose names are prefixes of each other, some parameters ignored or
    replicated, some split on other dims, some units and parameters on another mesh of the same ranks; units fused or
    not, some resharded to smaller groups after forward. With ``main_grads`` finished gradients may have another dtype
    than masters."""
    names = draw(st.sampled_from([u for n in range(4) for u in permutations(_UNITS, n)]))
    owners = [*names, "embed"] if not names or draw(st.booleans()) else names
    params = [draw(specs(f"{o}.p{i}")) for o in owners for i in range(draw(st.sampled_from([1, 2, 2, 3])))]
    regrouping = max_world > 3 and draw(st.integers(0, 2)) == 2
    if regrouping:
        world = draw(st.sampled_from([n for n in (4, 6, 8) if n <= max_world]))
        mesh = draw(meshes_over(range(world), splits=True))
    else:
        mesh = draw(meshes(max_world))
    own_meshes = {name: draw(meshes_over(mesh.ranks)) for name in names if draw(st.integers(0, 4)) == 4}
    shard_ranks = {name: [own_meshes.get(name, mesh).shard_size] for name in (*names, "embed")}
    placements: dict[str, Shard | Replicate | OnMesh | None] = {}
    for spec in params:
        dims = [Shard(d) for d in range(-len(spec.shape), len(spec.shape))]
        placement = draw(st.sampled_from([None, None, Replicate(), *dims]))
        if draw(st.integers(0, 5)) == 5:
            placement = OnMesh(placement or Shard(0), draw(meshes_over(mesh.ranks)))
            if not isinstance(placement.placement, Replicate):
                shard_ranks[spec.name.rpartition(".")[0]].append(placement.mesh.shard_size)
        placements[spec.name] = placement
    left_out = [ParamSpec("skipped", (3, 2), "float32")] if draw(st.booleans()) else []
    sizes = {name: group_sizes(ranks) * 3 if ranks[0] > 1 else [] for name, ranks in shard_ranks.items()}
    own = lambda name: st.builds(  # noqa: E731
        UnitSpec,
        st.just(name),
        reshard_after_forward=st.sampled_from([None, True, False, *sizes[name]]),
        mp_policy=st.sampled_from([None, None, MixedPrecisionPolicy(reduce_dtype="float32")]),
        reduction=st.sampled_from([None, None, ReductionPolicy("sum", unused="zeros"), ReductionPolicy("sum", 2.0)]),
        fused=st.sampled_from([None, None, True, False]),
        mesh=st.just(own_meshes.get(name)),
    )
    return plan_layout(
        draw(st.permutations([*params, *left_out])),
        mesh,
        [draw(own(name)) for name in names],
        mp_policy=draw(precisions(apply_grad_on_fp32_main_grad=st.booleans() if main_grads else st.just(False))),
        reduction=draw(reductions),
        prefetch=PrefetchPolicy(backward=draw(st.integers(0, 2))),
        reshard_after_forward={ROOT: draw(st.sampled_from([False, True, *sizes["embed"]]))},
        fused=draw(st.booleans()),
        placement_fn=lambda spec: placements[spec.name],
        ignored=[spec.name for spec in left_out],
    )


@st.composite
def cases(draw: st.DrawFn, max_world: int = 8, *, exact: bool = False, main_grads: bool = False) -> Case:
    """Layouts with values; ``exact`` leaves out those whose gradients round; ``main_grads`` as for `layouts`."""
    case = Case(draw(layouts(max_world, main_grads=main_grads)), draw(st.integers(0, 2**16)))
    assume(case.exact or not exact)
    return case
