"""`expected_comm`: collectives, order and bytes of a microbatch, against the ledger of one made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdp_fn as h
from hsdp_fn import ROOT, HSDPState, Layout, MeshSpec, ParamSpec, PrefetchPolicy, Replicate, Sync, expected_comm, totals
from tests.probe import Probe
from tests.strategies import Case, cases


def microbatch(state: HSDPState, case: Case, sync: Sync) -> HSDPState:
    """Forward and backward by hand: units in order inside the root, each all-reduce owed until the next reduction."""
    layout = case.layout
    for unit in layout.units:
        state = h.unshard(state, unit.name)
    for unit in layout.units:
        state = h.shard(state, unit.name, after_forward=True) if unit.reshard_after_forward else state
    grads = case.grads(0)
    events = backward_events([u.name for u in layout.units])
    order = [name for what, name in events if what == "begin"]
    done: set[str] = set()

    def reduce(state: HSDPState, name: str) -> HSDPState:
        given_ = {p.name: grads[p.name] for u in layout.units if u.name == name for p in u.trainable}
        if not given_ or sync is Sync.NONE:
            return h.reduce_grads(state, given_, sync=sync, units=name)
        return h.reduce_grads(h.wait(state, done), given_, sync=sync, units=name, async_op=True)

    for what, name in events:
        if what == "begin":
            at = order.index(name)
            away = [n for n in order[at + 1 :] if layout.units[layout.unit_index[n]].reshard_after_forward]
            for ahead in [name, *away[: layout.prefetch.backward]]:
                state = h.unshard(state, ahead)
        else:
            state = h.shard(reduce(state, name), name)
            done.add(name)
    return h.wait(state)


def backward_events(names: list[str]) -> list[tuple[str, str]]:
    """When the backward of each unit begins and ends: the last one first, and around those inside."""

    def encloses(outer: str, inner: str) -> bool:
        return outer != inner and (outer == ROOT or inner.startswith(f"{outer}."))

    outermost = [n for n in names if not any(encloses(other, n) for other in names)]
    out: list[tuple[str, str]] = []
    for name in reversed(outermost):
        inside = [n for n in names if encloses(name, n)]
        out += [("begin", name), *(backward_events(inside) if inside else []), ("end", name)]
    return out


@given(cases(), st.sampled_from(Sync))
def test_a_microbatch_by_hand_issues_what_expected_comm_says_in_that_order(case: Case, sync: Sync) -> None:
    backend = Probe(case.mesh)
    state = microbatch(h.shard(case.params(), case.layout, backend=backend), case, sync)
    expected = expected_comm(case.layout, sync=sync)
    assert state.ledger == expected
    assert backend.issued == [(c.op, c.nbytes, c.group_size) for c in expected]


@pytest.mark.parametrize("mesh", [MeshSpec.fsdp(2), MeshSpec.hsdp(2, 2), MeshSpec.replicated(2)])
@pytest.mark.parametrize("earlier", [None, Sync.NONE, Sync.SHARD])
def test_the_last_microbatch_issues_the_same_collectives_whatever_was_accumulated_before(
    earlier: Sync | None, mesh: MeshSpec
) -> None:
    specs = [ParamSpec(f"{u}.{p}", (4,), "float32") for u in ("head", "u0", "u1") for p in ("whole", "split")]
    layout = h.plan_layout(
        specs, mesh, ["u0", "u1"], placement_fn=lambda spec: Replicate() if spec.name.endswith("whole") else None
    )
    case = Case(layout, 0)
    state = h.shard(case.params(), layout, backend=Probe(mesh))
    if earlier is not None:
        state = microbatch(state, case, earlier)
    before = len(state.ledger)
    assert microbatch(state, case, Sync.FULL).ledger[before:] == expected_comm(layout)


@given(cases())
@settings(max_examples=50)
def test_a_forward_without_gradients_gathers_each_unit_once(case: Case) -> None:
    state = h.shard(case.params(), case.layout, backend=Probe(case.mesh))
    for unit in case.layout.units:
        state = h.shard(h.unshard(state, unit.name), unit.name)
    assert state.ledger == expected_comm(case.layout, backward=False)


def model(units: int, mesh: MeshSpec, *, reshard: Any = None, ahead: int = 1) -> Layout:
    """A root with one parameter of 6 elements and units with one of 10, in float32."""
    specs = [ParamSpec("head.w", (6,), "float32"), *(ParamSpec(f"u{i}.w", (5, 2), "float32") for i in range(units))]
    names = [f"u{i}" for i in range(units)]
    return h.plan_layout(specs, mesh, names, reshard_after_forward=reshard, prefetch=PrefetchPolicy(backward=ahead))


@pytest.mark.parametrize("units", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_counts_and_bytes_are_the_closed_form_with_and_without_resharding(units: int, ahead: int) -> None:
    root, unit, shard = 6 * 4, 12 * 4, 6 * 4  # stored by two ranks together; one rank's gradient shard of a unit
    for reshard, gathers in ((None, 2 * units + 1), (False, units + 1), (True, 2 * units + 2)):
        for mesh in (MeshSpec.fsdp(2), MeshSpec.hsdp(3, 2)):
            found = totals(expected_comm(model(units, mesh, reshard=reshard, ahead=ahead)))
            times = 1 if reshard is False else 2
            roots = 2 if reshard else 1
            padded = 2 * 4
            assert found["all_gather"] == h.CommTotal(
                gathers, roots * root + times * units * unit, times * units * padded
            )
            assert found["reduce_scatter"] == h.CommTotal(units + 1, root + units * unit, units * padded)
            reduces = h.CommTotal(units + 1, root // 2 + units * shard, 0) if mesh.replicate_size > 1 else None
            assert found.get("all_reduce") == reduces


@pytest.mark.parametrize(
    ("ahead", "backward"),
    [
        (0, "all_gather u2, reduce_scatter u2, reduce_scatter u1, all_gather u0, reduce_scatter u0"),
        (1, "all_gather u2, all_gather u0, reduce_scatter u2, reduce_scatter u1, reduce_scatter u0"),
    ],
)
def test_backward_prefetches_past_units_that_are_still_there(ahead: int, backward: str) -> None:
    layout = model(3, MeshSpec.fsdp(2), reshard={"u0": True, "u1": False, "u2": True}, ahead=ahead)
    found = [f"{c.op} {c.unit}" for c in expected_comm(layout)[4:]]  # after forward's gathers
    assert ", ".join(found) == backward + ", reduce_scatter "


def test_backward_of_a_unit_goes_around_those_inside_it() -> None:
    specs = [ParamSpec(f"{unit}.w", (2,), "float32") for unit in ("a", "a.x", "a.y", "b")]
    layout = h.plan_layout(specs, MeshSpec.fsdp(2), ["a", "a.x", "a.y", "b"], reshard_after_forward=False)
    reduced = [c.unit for c in expected_comm(layout) if c.op == "reduce_scatter"]
    assert reduced == ["b", "a.y", "a.x", "a"]


def test_a_unit_resharded_to_smaller_groups_is_gathered_over_these_in_backward() -> None:
    """5 x 2 elements are stored as 8 rows by four ranks, as 6 by two."""
    for reshard, again in ((2, ("all_gather", 2, 12 * 4, 2)), (True, ("all_gather", 4, 16 * 4, 6))):
        layout = model(2, MeshSpec.hsdp(2, 4), reshard={"u0": reshard, "u1": reshard})
        found = expected_comm(layout)
        gathers = [(c.op, c.group_size, c.nbytes, c.padding) for c in found if c.op == "all_gather" and c.unit == "u0"]
        assert gathers == [("all_gather", 4, 16 * 4, 6), again]
        forward = expected_comm(layout, backward=False)
        assert forward == found[: len(forward)]
        assert {c.group_size for c in forward} == {4}


def test_a_unit_that_isnt_fused_has_the_same_bytes_in_one_collective_a_parameter() -> None:
    """On 2 x 2 ranks rows of 5, 3 and 1 are stored as 6, 4 and 2: 12 elements together, 6 a shard, 3 padding."""
    specs = [ParamSpec(f"a.{n}", (n,), "float32") for n in (5, 3, 1)]
    half = h.MixedPrecisionPolicy("bfloat16", "float32")
    for fused, n in ((True, 1), (False, 3)):
        layout = h.plan_layout(specs, MeshSpec.hsdp(2, 2), ["a"], mp_policy=half, fused=fused)
        assert totals(expected_comm(layout)) == {
            "all_gather": h.CommTotal(2 * n, 2 * 24, 2 * 6),
            "reduce_scatter": h.CommTotal(n, 48, 12),
            "all_reduce": h.CommTotal(n, 24, 0),
        }
    found = [(c.op, c.bucket, c.nbytes, c.padding) for c in expected_comm(layout)]
    gathers = [("all_gather", 0, 12, 1), ("all_gather", 1, 8, 1), ("all_gather", 2, 4, 1)]
    assert found == [
        *gathers,
        *gathers,
        ("reduce_scatter", 0, 24, 1),
        ("reduce_scatter", 1, 16, 1),
        ("reduce_scatter", 2, 8, 1),
        ("all_reduce", 0, 12, 0),
        ("all_reduce", 1, 8, 0),
        ("all_reduce", 2, 4, 0),
    ]


def test_replicated_and_frozen_parameters_that_arent_fused_issue_what_each_needs() -> None:
    specs = [
        ParamSpec("a.w", (4,), "float32"),
        ParamSpec("a.n", (3,), "float32"),
        ParamSpec("a.f", (2,), "int64", False),
    ]
    layout = h.plan_layout(
        specs, MeshSpec.hsdp(2, 2), ["a"], placement_fn=lambda s: Replicate() if s.name == "a.n" else None, fused=False
    )
    found = [(c.op, c.bucket, c.group_size, c.nbytes) for c in expected_comm(layout)]
    gathers = [("all_gather", 0, 2, 16), ("all_gather", 2, 2, 16)]
    reduces = [("reduce_scatter", 0, 2, 16), ("all_reduce", 1, 4, 12), ("all_reduce", 0, 2, 8)]
    assert found == [*gathers, *gathers, *reduces]


def test_the_order_of_a_step_is_forward_then_backward_with_each_all_reduce_owed_until_the_next_reduction() -> None:
    found = [f"{c.op} {c.unit or 'root'}" for c in expected_comm(model(2, MeshSpec.hsdp(2, 2)))]
    assert found == [
        "all_gather root",
        "all_gather u0",
        "all_gather u1",
        "all_gather u1",
        "all_gather u0",
        "reduce_scatter u1",
        "all_reduce u1",
        "reduce_scatter u0",
        "all_reduce u0",
        "reduce_scatter root",
        "all_reduce root",
    ]


def test_sync_decides_which_reductions_there_are() -> None:
    layout = model(2, MeshSpec.hsdp(2, 2))
    kinds = {sync: {c.op for c in expected_comm(layout, sync=sync)} for sync in Sync}
    assert kinds == {
        Sync.NONE: {"all_gather"},
        Sync.SHARD: {"all_gather", "reduce_scatter"},
        Sync.FULL: {"all_gather", "reduce_scatter", "all_reduce"},
    }


def test_one_rank_and_frozen_units_communicate_nothing_of_what_they_dont_need() -> None:
    assert expected_comm(model(2, MeshSpec.fsdp(1))) == ()
    assert totals(()) == {}
    frozen = h.plan_layout([ParamSpec("a.w", (4,), "float32", requires_grad=False)], MeshSpec.hsdp(2, 2), ["a"])
    assert {c.op for c in expected_comm(frozen)} == {"all_gather"}
    replicated = model(1, MeshSpec.replicated(2))
    assert [c.op for c in expected_comm(replicated)] == ["all_reduce", "all_reduce"]
