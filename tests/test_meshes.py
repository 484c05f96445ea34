"""Units and parameters on meshes of their own, and groups smaller than all shard ranks between forward and backward:
on random meshes of the same ranks, against sums over explicit lists of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdp_fn as h
from hsdp_fn import (
    ROOT,
    DataParallelMeshDims,
    HSDPError,
    HSDPState,
    Layout,
    LayoutError,
    MeshError,
    MeshSpec,
    OnMesh,
    ParamPhase,
    ParamSpec,
    Regrouped,
    Replicate,
    Shard,
    Sync,
    UnitSpec,
    expected_comm,
    plan_layout,
)
from tests.probe import Probe
from tests.strategies import Array, Case, assert_same, chunks, group_sizes, meshes_over, peers
from tests.test_schedule import microbatch

Placed = Shard | Replicate | OnMesh | None


# ------------------------------------------------------------------------------------------------------------ oracle


def group(mesh: MeshSpec, rank: int, axes: tuple[str, ...]) -> list[int]:
    """Ranks that differ from ``rank`` on ``axes`` only, the first axis slowest."""
    return [mesh.ranks[p] for p in peers(mesh, mesh.ranks.index(rank), axes)]


@dataclass(frozen=True)
class Plan:
    """Arguments of `plan_layout`, and what follows from them for each parameter, worked out anew.

    Attributes:
        mesh, units, specs, placements, fused: the arguments.
        world: the mesh that the backend was made for: tensors are stacked in the order of its ranks.
    """

    mesh: MeshSpec
    units: tuple[UnitSpec, ...]
    specs: tuple[ParamSpec, ...]
    placements: Mapping[str, Placed]
    fused: bool
    world: MeshSpec

    def layout(self) -> Layout:
        def placement(spec: ParamSpec) -> Placed:
            return self.placements[spec.name]

        return plan_layout(self.specs, self.mesh, self.units, fused=self.fused, placement_fn=placement)

    def shard(self) -> HSDPState:
        params = {n: np.stack([v] * self.world.size) for n, v in self.values().items()}
        return h.shard(params, self.layout(), backend=Probe(self.world))

    def values(self) -> dict[str, Array]:
        rng = np.random.default_rng(len(self.specs))
        return {s.name: rng.integers(-99, 100, s.shape).astype(s.dtype) for s in self.specs}

    def grads(self, micro: int) -> dict[str, Array]:
        """Other integers on every rank."""
        rng = np.random.default_rng(1 + micro)
        trainable = [s for s in self.specs if s.requires_grad]
        return {s.name: rng.integers(-9, 10, (self.world.size, *s.shape)).astype(s.dtype) for s in trainable}

    def unit_mesh(self, name: str) -> MeshSpec:
        """Mesh of the unit that owns the parameter."""
        (own,) = (u.mesh for u in self.units if u.name == name.partition(".")[0])
        return own or self.mesh

    def place(self, name: str) -> tuple[int | None, MeshSpec]:
        """Dim that the parameter is split on, None for none; and its mesh."""
        wanted, mesh = self.placements[name], self.unit_mesh(name)
        if isinstance(wanted, OnMesh):
            wanted, mesh = wanted.placement, wanted.mesh
        (shape,) = (s.shape for s in self.specs if s.name == name)
        return None if isinstance(wanted, Replicate) else (wanted or Shard(0)).dim % len(shape), mesh

    def rows(self, name: str, by_rank: Array, parts: int | None = None, padding: int = 0) -> Array:
        """Of each rank's whole value the rows that it owns, padded as they are stored; ``parts``: split over runs of so
        many neighbours only."""
        dim, mesh = self.place(name)
        out = []
        for position, rank in enumerate(self.world.ranks):
            owners = [rank] if dim is None else group(mesh, rank, mesh.shard)
            if parts is not None and dim is not None:
                start = owners.index(rank) // parts * parts
                owners = owners[start : start + parts]
            pieces = chunks(by_rank[position].shape[dim or 0], len(owners))
            mine = np.moveaxis(by_rank[position], dim or 0, 0)[pieces[owners.index(rank)]]
            padded = np.full((len(pieces[0]), *mine.shape[1:]), padding, mine.dtype)
            padded[: len(mine)] = mine
            out.append(np.moveaxis(padded, 0, dim or 0))
        return np.stack(out)

    def divisor(self, name: str) -> int:
        """Number of data-parallel ranks of the unit's mesh, or of the parameter's own where these are more."""
        meshes = self.unit_mesh(name), self.place(name)[1]
        return max(len(group(mesh, mesh.ranks[0], mesh.shard + mesh.replicate)) for mesh in meshes)

    def mean(self, name: str, grads: Array) -> Array:
        """Rows of the gradient: the sum over the ranks that share the parameter, over the `divisor`."""
        mesh = self.place(name)[1]
        sums = []
        for rank in self.world.ranks:
            sharing = group(mesh, rank, mesh.shard + mesh.replicate)
            sums.append(grads[[self.world.ranks.index(r) for r in sharing]].sum(0))
        return self.rows(name, np.stack(sums) * grads.dtype.type(1 / self.divisor(name)))


SHAPES = [(1,), (3,), (7,), (16,), (17,), (5, 3), (3, 5), (1, 4), (4, 1), (2, 1, 3), (1, 1, 9), (0, 2)]
WORLDS = [1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 12, 12, 16, 16]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to three units on up to 16 ranks; meshes of one to four axes."""
    first, world = draw(st.integers(0, 2)), draw(st.sampled_from(WORLDS))
    splits = world > 3 and draw(st.integers(0, 2)) > 0
    pool = [draw(meshes_over(range(first, first + world), 4, splits=splits)) for _ in range(3)]
    mesh, *others = pool
    specs, placements, units = [], {}, []
    for unit in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        own = draw(st.sampled_from([None, None, *others]))
        shard_ranks = [(own or mesh).shard_size]
        for i in range(draw(st.integers(1, 4))):
            shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float32", "float32", "float64"]))
            specs.append(ParamSpec(f"{unit}.p{i}", shape, dtype, draw(st.integers(0, 5)) < 5))
            placements[specs[-1].name] = placed = draw(placings(shape, pool))
            if isinstance(placed, OnMesh) and isinstance(placed.placement, Shard):
                shard_ranks.append(placed.mesh.shard_size)
        sizes = group_sizes(shard_ranks) if shard_ranks[0] > 1 else []
        reshard = draw(st.sampled_from([None, True, False, *sizes * 3]))
        units.append(UnitSpec(unit, reshard_after_forward=reshard, mesh=own))
    return Plan(mesh, tuple(units), tuple(specs), placements, draw(st.booleans()), draw(st.sampled_from(pool)))


@st.composite
def placings(draw: st.DrawFn, shape: tuple[int, ...], pool: list[MeshSpec]) -> Placed:
    """Any dim or none, on any of the meshes or none of its own."""
    placement = draw(st.sampled_from([Replicate(), *(Shard(d) for d in range(-len(shape), len(shape)))]))
    own = draw(st.sampled_from([None, None, *pool]))
    return placement if own is None else OnMesh(placement, own)


# -------------------------------------------------------------------------------------------------------- properties


@given(plans())
def test_every_rank_holds_its_rows_and_gathers_the_whole_parameters_back(plan: Plan) -> None:
    state, values = plan.shard(), plan.values()
    stacked = {n: np.stack([v] * plan.world.size) for n, v in values.items()}
    assert_same(h.masters(state), {n: plan.rows(n, v) for n, v in stacked.items()})
    assert_same(h.full_params(h.unshard(state)), stacked)


@given(plans())
def test_new_rows_become_the_masters_of_their_owners_and_padding_is_zeroed(plan: Plan) -> None:
    new = {n: np.stack([v + 1] * plan.world.size) for n, v in plan.values().items()}
    state = h.apply_updates(plan.shard(), {n: plan.rows(n, v, padding=77) for n, v in new.items()})
    assert_same(h.masters(state), {n: plan.rows(n, v) for n, v in new.items()})
    assert_same(h.full_params(h.unshard(state)), new)


@given(plans(), st.sampled_from(Sync), st.booleans())
def test_a_gradient_is_the_sum_over_the_parameters_own_ranks_over_the_number_of_the_units_or_its_own(
    plan: Plan, sync: Sync, async_op: bool
) -> None:
    first, second = plan.grads(0), plan.grads(1)
    state = h.reduce_grads(plan.shard(), first, sync=sync, async_op=async_op)
    _, rows = h.grads(h.reduce_grads(h.wait(state), second))
    expected = {n: plan.mean(n, first[n] + second[n]) for n in first}
    if sync is Sync.FULL:  # each is scaled, and thus rounded, on its own
        expected = {n: plan.mean(n, first[n]) + plan.mean(n, second[n]) for n in first}
    assert_same(rows, expected)


@given(plans())
def test_ownership_is_a_partition_in_each_shard_group_and_the_same_where_ranks_replicate(plan: Plan) -> None:
    for unit in plan.layout().units:
        for bucket, member in ((b, m) for b in unit.buckets for m in b.params.members):
            dim, mesh = plan.place(member.spec.name)
            assert unit.mesh == plan.unit_mesh(member.spec.name)
            assert bucket.mean_over == plan.divisor(member.spec.name)
            assert bucket.mesh.ranks == mesh.ranks
            assert set(bucket.mesh.shard + bucket.mesh.replicate) == set(mesh.shard + mesh.replicate)
            assert bucket.mesh.shard == (() if dim is None else mesh.shard)
            owned = {rank: list(range(*member.rows(bucket.mesh.shard_index(rank)))) for rank in mesh.ranks}
            for rank in mesh.ranks:
                sharing = [rank] if dim is None else group(mesh, rank, mesh.shard)
                assert [row for r in sharing for row in owned[r]] == list(range(member.spec.shape[dim or 0]))
                repeating = [name for name in mesh.names if dim is None or name not in mesh.shard]
                assert all(owned[r] == owned[rank] for r in group(mesh, rank, tuple(repeating)))


def facts(layout: Layout) -> list[Any]:
    """Everything that a layout says, in plain values."""
    out: list[Any] = [layout.mesh, layout.ignored]
    for unit in layout.units:
        out.append((unit.name, unit.params, unit.mesh, repr(unit.reshard_after_forward)))
        for b in unit.buckets:
            flats = [f and (f.members, f.shard_size, f.numel) for f in (b.params, b.grads)]
            again = b.regather and (b.regather.mesh, b.regather.params.members, b.regather.gather)
            out += [(b.index, b.mesh, b.dtype, b.compute_dtype, b.reduce_dtype, b.grad_dtype, b.mean_over), flats]
            out.append((b.gather, b.reduce_scatter, b.all_reduce, again))
    return out


@given(plans())
def test_a_layout_is_a_pure_function_of_its_arguments(plan: Plan) -> None:
    one = plan.layout()
    mesh = MeshSpec(*(list(getattr(plan.mesh, f)) for f in ("shape", "names", "shard", "replicate", "ranks")))
    placements = dict(reversed(plan.placements.items()))
    reshard = {u.name: u.reshard_after_forward for u in reversed(plan.units) if u.reshard_after_forward is not None}
    units = [replace(u, reshard_after_forward=None) for u in plan.units]
    bare = MeshSpec(plan.mesh.shape, plan.mesh.names, plan.mesh.names, (), plan.mesh.ranks)
    dims = DataParallelMeshDims(plan.mesh.shard or None, plan.mesh.replicate or None)

    def again(mesh: MeshSpec, **options: Any) -> Layout:
        place = placements.__getitem__
        return plan_layout(
            iter(plan.specs), mesh, units, fused=plan.fused, placement_fn=lambda s: place(s.name), **options
        )

    for other in (
        plan.layout(),
        again(mesh, reshard_after_forward=reshard),
        again(mesh, reshard_after_forward=reshard.get),
        again(bare, reshard_after_forward=reshard, dp_mesh_dims=dims),
    ):
        assert facts(other) == facts(one)
        assert (other.digest, other) == (one.digest, one)


@given(plans(), st.data())
def test_digests_differ_exactly_where_a_mesh_a_placement_or_a_group_size_makes_layouts_differ(
    plan: Plan, data: st.DataObject
) -> None:
    pool = [plan.mesh, plan.world, data.draw(meshes_over(plan.mesh.ranks, 4))]
    for unit in plan.units:
        what = data.draw(st.sampled_from(["mesh", "unit", "reshard", "placement"]))
        changed = plan
        if what == "mesh":
            changed = replace(plan, mesh=data.draw(st.sampled_from(pool)))
        elif what == "placement":
            spec = data.draw(st.sampled_from(plan.specs))
            changed = replace(plan, placements={**plan.placements, spec.name: data.draw(placings(spec.shape, pool))})
        else:
            own = replace(unit, mesh=data.draw(st.sampled_from(pool)))
            if what == "reshard":
                own = replace(unit, reshard_after_forward=data.draw(st.sampled_from([True, False, 2, 3, 4])))
            changed = replace(plan, units=tuple(own if u is unit else u for u in plan.units))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = changed.layout()
        except HSDPError:
            continue  # the group size of some unit doesn't divide any more
        assert (other.digest == plan.layout().digest) == (facts(other) == facts(plan.layout()))
        assert (other == plan.layout()) == (other.digest == plan.layout().digest)


# ------------------------------------------------------------------------------------------------------- group sizes


@given(plans(), st.booleans())
def test_pieces_between_forward_and_backward_are_those_of_runs_of_neighbours_and_gather_the_whole_back(
    plan: Plan, async_op: bool
) -> None:
    stacked = {n: np.stack([v] * plan.world.size) for n, v in plan.values().items()}
    state = h.shard(h.unshard(plan.shard()), after_forward=True)
    for unit, own in zip(state.units, state.layout.units, strict=True):
        size = own.reshard_after_forward
        splits = [b for b in own.buckets if not isinstance(size, bool) and b.mesh.shard_size > size]
        assert unit.params_phase is (ParamPhase.REGROUPED if splits else ParamPhase.SHARDED)
        if not isinstance(unit.full, Regrouped):
            continue
        for bucket, flat in zip(own.buckets, unit.full.flats, strict=True):
            assert (flat is None) == (bucket not in splits)
            for member in bucket.regather.params.members if bucket.regather and flat is not None else ():
                found = flat[:, member.offset : member.offset + member.numel]
                expected = plan.rows(member.spec.name, stacked[member.spec.name], size)
                np.testing.assert_array_equal(found, expected.reshape(len(found), -1))
    issued = len(state.ledger)
    state = h.wait(h.unshard(state, async_op=async_op))
    assert_same(h.full_params(state), stacked)
    buckets = [b for u in state.layout.units for b in u.buckets]
    gathers = [b.regather.gather if b.regather else b.gather for b in buckets]
    assert list(state.ledger[issued:]) == [g for g in gathers if g is not None]


@given(plans(), st.sampled_from(Sync))
def test_a_step_by_hand_issues_what_expected_comm_says(plan: Plan, sync: Sync) -> None:
    case = Case(replace(plan, world=plan.mesh).layout(), 0)
    backend = Probe(case.mesh)
    state = microbatch(h.shard(case.params(), case.layout, backend=backend), case, sync)
    expected = expected_comm(case.layout, sync=sync)
    assert state.ledger == expected
    assert backend.issued == [(c.op, c.nbytes, c.group_size) for c in expected]


W, E = ParamSpec("a.w", (8, 2), "float32"), ParamSpec("a.e", (12,), "float32")


def planned(
    *units: str | UnitSpec, mesh: MeshSpec | None = None, own: MeshSpec | None = None, **options: Any
) -> Layout:
    """Parameters ``a.w`` and ``b.w``; ``a.e`` on its ``own`` mesh."""
    return plan_layout(
        [W, *([E] if own else []), replace(W, name="b.w")],
        mesh or MeshSpec.fsdp(8),
        units or ("a", "b"),
        placement_fn=lambda s: OnMesh(Shard(0), own) if own and s is E else None,
        **options,
    )


def reshards(layout: Layout) -> dict[str, Any]:
    return {u.name: u.reshard_after_forward for u in layout.units}


def test_a_group_size_is_one_for_all_units_or_by_their_names_or_of_a_function_that_may_leave_it_to_the_default() -> (
    None
):
    assert reshards(planned(reshard_after_forward=2)) == {"a": 2, "b": 2}
    assert reshards(planned("a", reshard_after_forward={"a": 4})) == {ROOT: False, "a": 4}
    assert reshards(planned("a", reshard_after_forward={ROOT: 2})) == {ROOT: 2, "a": True}
    assert reshards(planned(reshard_after_forward={"a": 2, "b": False})) == {"a": 2, "b": False}
    assert reshards(planned(UnitSpec("a", (), 4), "b", reshard_after_forward=2)) == {"a": 4, "b": 2}
    asked: list[str] = []

    def of(name: str) -> int | bool | None:
        asked.append(name)
        return {"a": 2, "b": None, ROOT: True}[name]

    assert reshards(planned(reshard_after_forward=of)) == {"a": 2, "b": True}
    assert reshards(planned("a", reshard_after_forward=of)) == {ROOT: True, "a": 2}
    assert sorted(asked) == [ROOT, "a", "a", "b"]


def test_a_group_of_all_ranks_means_true_and_of_one_means_false_with_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(reshard_after_forward=8) == planned(reshard_after_forward=True)
    with pytest.warns(UserWarning, match="unit 'a': reshard_after_forward=1 .*means False"):
        assert planned("a", reshard_after_forward={"a": 1}) == planned("a", reshard_after_forward=False)
    four = MeshSpec.hsdp(2, 4)
    assert reshards(planned(UnitSpec("a", mesh=four), "b", reshard_after_forward=4)) == {"a": True, "b": 4}


@pytest.mark.parametrize("value", [0, -2, 3, 16, 2.0, "2", (2,)])
def test_a_group_size_that_doesnt_divide_the_units_ranks_is_refused_by_unit(value: Any) -> None:
    for options in ({"reshard_after_forward": value}, {"reshard_after_forward": lambda _: value}):
        with pytest.raises(ValueError, match=r"unit 'a': reshard_after_forward") as caught:
            planned(**options)
        assert isinstance(caught.value, HSDPError)
    with pytest.raises(HSDPError, match=r"unit 'b': reshard_after_forward"):
        planned("a", UnitSpec("b", (), value))


def test_a_group_size_for_all_units_passes_over_those_that_are_not_split() -> None:
    specs = [ParamSpec(name, (8,), "float32") for name in ("a.w", "b.w")]
    units = [UnitSpec("a", mesh=MeshSpec.replicated(4)), "b"]
    layout = h.plan_layout(specs, MeshSpec.fsdp(4), units, reshard_after_forward=2)
    assert [u.reshard_after_forward for u in layout.units] == [True, 2]
    with pytest.raises(HSDPError, match="unit 'a': reshard_after_forward=2"):
        h.plan_layout(specs, MeshSpec.fsdp(4), [UnitSpec("a", (), 2, mesh=MeshSpec.replicated(4)), "b"])


def test_a_group_size_must_divide_the_ranks_of_units_and_parameters_on_their_own_mesh() -> None:
    six, twelve = MeshSpec.hsdp(2, 6), MeshSpec.fsdp(12)
    assert reshards(planned(mesh=twelve, own=six, reshard_after_forward=3)) == {"a": 3, "b": 3}
    with pytest.raises(HSDPError, match=r"parameter 'a\.e' of unit 'a': reshard_after_forward=4 .*6.* \[2, 3\]"):
        planned(mesh=twelve, own=six, reshard_after_forward=4)
    with pytest.raises(HSDPError, match=r"unit 'a': reshard_after_forward=4 .*6"):
        planned(UnitSpec("a", mesh=six), "b", mesh=twelve, reshard_after_forward=4)
    whole = MeshSpec.replicated(12)  # nothing there to cut
    layout = planned(mesh=twelve, own=whole, reshard_after_forward=4)
    assert [b.regather is not None for b in layout.units[0].buckets] == [True, False]


def test_a_mapping_with_a_unit_that_isnt_there_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"units that aren't there: \['c', 'z'\]"):
        planned(reshard_after_forward={"z": 2, "a": 2, "c": True})


# ---------------------------------------------------------------------------------------------------- known examples


def test_an_experts_gradient_is_its_own_ranks_sum_over_all_ranks() -> None:
    """Four ranks with gradients 1, 2, 3, 4. An expert that is split over ranks 0, 1 and, another one, over 2, 3; a
    parameter that is the same on all."""
    experts = MeshSpec((2, 2), ("expert", "shard"), shard=("shard",))
    for own, sums in (
        (experts, [3, 3, 7, 7]),
        (experts.with_roles(DataParallelMeshDims(None, "expert")), [4, 6, 4, 6]),
        (experts.with_roles(DataParallelMeshDims("shard", "expert")), [10, 10, 10, 10]),
    ):
        layout = planned("a", mesh=MeshSpec.fsdp(4), own=own)
        state = h.shard(
            {s.name: np.zeros((4, *s.shape), s.dtype) for s in layout.params()}, layout, backend=Probe(layout.mesh)
        )
        each = np.arange(1, 5, dtype="float32")
        grads = {s.name: np.broadcast_to(each.reshape(4, *[1] * len(s.shape)), (4, *s.shape)) for s in layout.params()}
        _, rows = h.grads(h.reduce_grads(state, grads))
        assert rows["a.e"] is not None and rows["a.w"] is not None
        assert [set(row.reshape(-1)) for row in rows["a.e"]] == [{s / 4} for s in sums]
        assert {*rows["a.w"].reshape(-1)} == {2.5}


def test_a_unit_on_its_own_mesh_means_over_the_ranks_of_that_and_a_parameter_on_a_larger_one_over_its_own() -> None:
    half = MeshSpec((2, 2), ("rest", "shard"), shard=("shard",))
    layout = planned(UnitSpec("a", mesh=half), "b", mesh=MeshSpec.fsdp(4))
    assert {u.name: [b.mean_over for b in u.buckets] for u in layout.units} == {"a": [2], "b": [4]}
    assert [u.mesh for u in layout.units] == [half, layout.mesh]
    layout = planned(UnitSpec("a", mesh=half), "b", mesh=MeshSpec.fsdp(4), own=MeshSpec.hsdp(2, 2))
    assert {u.name: [b.mean_over for b in u.buckets] for u in layout.units} == {"a": [2, 4], "b": [4]}


def test_dims_name_the_axes_that_carry_data_parallelism_whatever_the_mesh_says() -> None:
    mesh = MeshSpec((2, 2, 2), ("pp", "dp", "tp"), shard=("tp",), replicate=("pp",), ranks=tuple(range(8))[::-1])
    layout = planned(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(("dp", "pp")))
    assert layout.mesh == MeshSpec((2, 2, 2), mesh.names, shard=("dp", "pp"), ranks=mesh.ranks)
    assert {u.mesh for u in layout.units} == {layout.mesh}
    assert layout == planned(mesh=layout.mesh)
    for dims in (DataParallelMeshDims("cp"), DataParallelMeshDims("dp", ("pp", "cp"))):
        with pytest.raises(MeshError, match="axis 'cp'"):
            planned(mesh=mesh, dp_mesh_dims=dims)


def test_digests_of_ranks_with_other_experts_are_equal_but_not_of_the_same_ranks_in_another_shape_or_order() -> None:
    def digest(shape: tuple[int, ...], ranks: tuple[int, ...], shard: tuple[str, ...] = ("y",)) -> str:
        return planned(mesh=MeshSpec.fsdp(4), own=MeshSpec(shape, ("x", "y"), shard, ("x",), ranks)).digest

    assert digest((1, 2), (0, 1)) == digest((1, 2), (2, 3))
    assert digest((1, 2), (0, 1)) != digest((2, 1), (0, 1))
    everyone = [digest((2, 2), ranks) for ranks in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0))]
    assert len({*everyone, digest((1, 4), (0, 1, 2, 3)), digest((1, 2), (0, 1))}) == 5


def test_the_reference_refuses_a_parameter_on_other_ranks_than_its_own() -> None:
    layout = planned(mesh=MeshSpec.fsdp(4), own=MeshSpec.fsdp(2))
    params = {s.name: np.zeros((4, *s.shape), s.dtype) for s in layout.params()}
    with pytest.raises(MeshError, match=r"ranks \(0, 1\).*\(0, 1, 2, 3\)"):
        h.shard(params, layout, backend=Probe(layout.mesh))


@pytest.mark.parametrize(("names", "order"), list(product([("x", "y"), ("y", "x")], [(0, 1, 2, 3), (2, 0, 3, 1)])))
def test_a_sharded_axis_of_another_mesh_decides_the_owner_by_that_meshs_coordinates(
    names: tuple[str, ...], order: tuple[int, ...]
) -> None:
    own = MeshSpec((2, 2), names, shard=("x",), replicate=("y",), ranks=order)
    layout = planned("a", mesh=MeshSpec.fsdp(4), own=own)
    params = {s.name: np.stack([np.arange(s.numel, dtype=s.dtype).reshape(s.shape)] * 4) for s in layout.params()}
    rows = h.masters(h.shard(params, layout, backend=Probe(layout.mesh)))["a.e"]
    grid = np.array(order).reshape(2, 2)
    for half in (0, 1):
        for rank in grid[half] if names[0] == "x" else grid[:, half]:
            assert rows[rank].tolist() == list(range(6 * half, 6 * half + 6))


@settings(max_examples=10)
@given(plans())
def test_a_step_with_pieces_ends_with_the_masters_of_one_without(plan: Plan) -> None:
    masters = []
    for after_forward in (True, False):
        state = h.shard(h.unshard(plan.shard()), after_forward=after_forward)
        state = h.shard(h.unshard(state))
        state, rows = h.grads(h.reduce_grads(state, plan.grads(0)))
        old = h.masters(state)
        masters.append(h.masters(h.apply_updates(state, {n: old[n] - g for n, g in rows.items() if g is not None})))
    assert_same(*masters)
