"""The state as a value: its treespecs, what is a leaf, what a clone shares, and what people are told about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given, settings

import hsdp_fn as h
from hsdp_fn import HSDPState, MeshSpec, ParamSpec, PendingError, StaleStateError, Sync, UnitState
from hsdp_fn.state import NAMESPACE, Token
from tests.probe import Probe, handles
from tests.strategies import Case, assert_same, cases


def known(mesh: MeshSpec | None = None) -> Case:
    """Two units on four ranks: the root with 3 float64 (1 of 4 stored elements a rank), "a" with 5x2 float32 (4 of 16);
    regrouped to two ranks after forward (2 of 4 and 6 of 12)."""
    specs = [ParamSpec("bias", (3,), "float64"), ParamSpec("a.w", (5, 2), "float32")]
    return Case(h.plan_layout(specs, mesh or MeshSpec.fsdp(4), ["a"], reshard_after_forward=2), seed=1)


def start(case: Case) -> HSDPState:
    return h.shard(case.params(), case.layout, backend=Probe(case.mesh))


def phases(case: Case) -> dict[str, HSDPState]:
    """A state in each phase, all of one layout."""
    return {
        "sharded": start(case),
        "gathering": h.unshard(start(case), async_op=True),
        "unsharded": h.unshard(start(case)),
        "regrouped": h.shard(h.unshard(start(case)), after_forward=True),
        "held whole": h.reduce_grads(start(case), case.grads(0), sync=Sync.NONE),
        "held partial": h.reduce_grads(start(case), case.grads(0), sync=Sync.SHARD),
        "reducing": h.reduce_grads(start(case), case.grads(0), async_op=True),
        "ready": h.reduce_grads(start(case), case.grads(0)),
    }


def spec(state: HSDPState) -> Any:
    return optree.tree_structure(state, none_is_leaf=False, namespace=NAMESPACE)


def leaves(state: HSDPState) -> list[Any]:
    return optree.tree_leaves(state, namespace=NAMESPACE)


# ------------------------------------------------------------------------------------------------------------ trees


def test_states_of_different_phases_have_different_treespecs_and_tree_map_over_both_refuses() -> None:
    states = phases(known())
    for one, a in states.items():
        for other, b in states.items():
            assert (spec(a) == spec(b)) == (one == other)
            if one != other:
                with pytest.raises(ValueError):
                    optree.tree_map(lambda x, y: x, a, b, namespace=NAMESPACE)


def test_states_of_different_layouts_have_different_treespecs() -> None:
    assert spec(start(known())) != spec(start(known(MeshSpec.hsdp(1, 4))))
    assert spec(start(known())) == spec(start(known()))


def test_treespecs_are_equal_across_steps_microbatches_ledgers_and_tokens() -> None:
    case = known()
    state = start(case)
    first = spec(state)
    for step in range(3):
        state = h.unshard(state)
        state = h.reduce_grads(h.shard(state), case.grads(step))
        state, _ = h.grads(state)
        assert state.ledger
        assert spec(state) == first
        assert hash(spec(state)) == hash(first)
        state = h.apply_updates(state, {})
        assert spec(state) == first


def test_tree_map_over_a_state_gives_a_state_of_the_same_phase_with_every_tensor_mapped() -> None:
    case = known()
    for name, state in phases(case).items():
        doubled = optree.tree_map(lambda x: 2 * x, state, namespace=NAMESPACE)
        assert isinstance(doubled, HSDPState)
        assert spec(doubled) == spec(state), name
        assert (doubled.step, doubled.micro, doubled.ledger) == (state.step, state.micro, state.ledger)
        for a, b in zip(leaves(state), leaves(doubled), strict=True):
            np.testing.assert_array_equal(2 * a, b)
    twice = optree.tree_map(lambda x, y: x + y, start(case), start(case), namespace=NAMESPACE)
    assert_same(h.masters(twice), {n: 2 * v for n, v in case.rows(case.values()).items()})


def test_leaves_are_masters_then_full_parameters_then_gradients_and_what_is_in_flight_has_none() -> None:
    case = known()
    states = phases(case)
    masters = [(4, 1), (4, 4)]
    shapes = {name: [tuple(x.shape) for x in leaves(state)] for name, state in states.items()}
    by_unit = lambda *more: [s for pair in zip(masters, *more, strict=True) for s in pair]  # noqa: E731
    assert shapes == {
        "sharded": masters,
        "gathering": masters,
        "unsharded": by_unit([(4, 3), (4, 5, 2)]),
        "regrouped": by_unit([(4, 2), (4, 6)]),
        "held whole": by_unit([(4, 3), (4, 5, 2)]),
        "held partial": by_unit(masters),
        "reducing": masters,
        "ready": by_unit(masters),
    }


def test_paths_of_leaves_are_the_names_of_fields() -> None:
    paths, _, _ = optree.tree_flatten_with_path(h.unshard(start(known())), namespace=NAMESPACE)
    assert paths[:2] == [("units", 0, "master", 0), ("units", 0, "full", 0)]
    paths, _, _ = optree.tree_flatten_with_path(phases(known())["regrouped"], namespace=NAMESPACE)
    assert paths[:2] == [("units", 0, "master", 0), ("units", 0, "full", "flats", 0)]


def test_pending_refuses_to_be_read_and_survives_a_tree_map_as_itself() -> None:
    case = known()
    for state, op in ((phases(case)["gathering"], "all_gather"), (phases(case)["reducing"], "reduce")):
        mapped = optree.tree_map(lambda x: x, state, namespace=NAMESPACE)
        for unit, same, title in zip(state.units, mapped.units, ("(root)", "a"), strict=True):
            pending = unit.full or unit.reducing
            assert (same.full or same.reducing) is pending
            assert isinstance(pending, h.Pending)
            with pytest.raises(PendingError, match=rf"{op} of unit '{title if title == 'a' else '.root.'}'.*wait"):
                pending.read()


def test_states_are_frozen() -> None:
    state = start(known())
    for value, name in ((state, "step"), (state.units[0], "master"), (state.layout, "mesh")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)


# ---------------------------------------------------------------------------------------------------- tokens, clones


def test_a_mapped_copy_of_a_consumed_state_is_consumed_too() -> None:
    state = start(known())
    copy = optree.tree_map(np.copy, state, namespace=NAMESPACE)
    h.unshard(state)
    with pytest.raises(StaleStateError, match="consumed by unshard"):
        h.masters(copy)


def test_tokens_are_equal_and_hash_alike_even_when_one_is_dead() -> None:
    dead = Token()
    dead.consumer = "wait"
    assert Token() == dead
    assert hash(Token()) == hash(dead)
    assert Token() != "wait"


@given(cases())
@settings(max_examples=25)
def test_a_clone_shares_no_memory_and_no_token_and_is_equal_otherwise(case: Case) -> None:
    for make in (
        lambda s: s,
        h.unshard,
        lambda s: h.shard(h.unshard(s), after_forward=True),
        lambda s: h.reduce_grads(s, case.grads(0), sync=Sync.NONE),
        lambda s: h.reduce_grads(s, case.grads(0), sync=Sync.SHARD),
        lambda s: h.reduce_grads(s, case.grads(0)),
    ):
        state = make(start(case))
        copy = h.clone(state)
        assert spec(copy) == spec(state)
        assert (copy.step, copy.micro, copy.ledger) == (state.step, state.micro, state.ledger)
        before = [np.copy(x) for x in leaves(state)]
        for mine, theirs in zip(leaves(state), leaves(copy), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert not np.shares_memory(mine, theirs)
            theirs[...] = 1
        for mine, old in zip(leaves(state), before, strict=True):
            np.testing.assert_array_equal(mine, old)
        h.reset_iter(copy)
        h.masters(state)
        with pytest.raises(StaleStateError, match="clone"):
            h.clone(copy)


def test_what_is_in_flight_cant_be_cloned_and_stays_in_flight() -> None:
    for name in ("gathering", "reducing"):
        state = phases(known())[name]
        flying = handles(state)
        with pytest.raises(PendingError):
            h.clone(state)
        assert flying
        assert state.backend.in_flight == flying
        h.clone(h.wait(state))


# ------------------------------------------------------------------------------------------------------------ people


def test_memory_bytes_are_exact_in_every_phase() -> None:
    master, full, piece = 1 * 8 + 4 * 4, 3 * 8 + 10 * 4, 2 * 8 + 6 * 4
    gathered = packed = 4 * master
    expected = {
        "sharded": {},
        "gathering": {"in_flight": gathered},
        "unsharded": {"full": full},
        "regrouped": {"regrouped": piece},
        "held whole": {"acc_full": full},
        "held partial": {"acc_partial": master},
        "reducing": {"in_flight": packed + master},
        "ready": {"grad": master},
    }
    for name, state in phases(known()).items():
        held = {k: v for k, v in h.memory_bytes(state).items() if v}
        assert held == {"master": master, **expected[name], "total": master + sum(expected[name].values())}, name
    regathering = h.memory_bytes(h.unshard(phases(known())["regrouped"], async_op=True))
    assert {k: v for k, v in regathering.items() if v} == {
        "master": master,
        "in_flight": piece + 2 * piece,
        "total": master + 3 * piece,
    }


def test_memory_bytes_count_the_cast_shard_of_a_gather_in_flight_and_full_parameters_that_are_copies() -> None:
    w = ParamSpec("w", (4,), "float32")
    half = h.MixedPrecisionPolicy(param_dtype="float16")
    cast = Case(h.plan_layout([w], MeshSpec.fsdp(2), mp_policy=half), seed=1)
    flying = h.unshard(start(cast), async_op=True)
    assert h.memory_bytes(flying)["in_flight"] == 2 * 2 + 4 * 2
    whole = Case(h.plan_layout([w], MeshSpec.replicated(2)), seed=1)
    assert h.memory_bytes(h.unshard(start(whole))) == {
        **dict.fromkeys(("regrouped", "acc_full", "acc_partial", "grad", "in_flight"), 0),
        "master": 16,
        "full": 16,  # this backend copies
        "total": 32,
    }


def test_describe_is_a_table_of_units_and_of_what_was_issued() -> None:
    case = known()
    state = h.reduce_grads(h.unshard(start(case)), case.grads(0), sync=Sync.SHARD)
    lines = h.describe(state).splitlines()
    assert lines[0] == f"HSDPState step 0, microbatch 1, layout {case.layout.digest}, backend reference"
    assert lines[1] == "mesh shard=4: shard over ('shard',), replicate over nothing"
    assert lines[2].split() == ["unit", "params", "grads", "tensors", "elements", "shard", "bytes"]
    assert lines[3].split() == ["(root)", "unsharded", "held", "1", "3", "1", str(8 + 24 + 8)]
    assert lines[4].split() == ["a", "unsharded", "held", "1", "10", "4", str(16 + 40 + 16)]
    assert lines[5] == f"issued: 2 all_gather, {4 * 8 + 16 * 4} bytes ({8 + 6 * 4} of them padding)"
    assert lines[6] == f"issued: 2 reduce_scatter, {4 * 8 + 16 * 4} bytes ({8 + 6 * 4} of them padding)"
    assert len(lines) == 7
    regrouped = h.describe(phases(case)["regrouped"]).splitlines()
    assert regrouped[3].split() == ["(root)", "regrouped", "empty", "1", "3", "1", str(8 + 16)]
    assert regrouped[4].split() == ["a", "regrouped", "empty", "1", "10", "4", str(16 + 24)]


def test_describe_and_memory_bytes_work_on_a_consumed_state_and_say_who_consumed_it() -> None:
    state = start(known())
    h.unshard(state)
    assert ", consumed by unshard at " in h.describe(state).splitlines()[0]
    assert __file__ in h.describe(state)
    assert h.memory_bytes(state)["total"] == 24


def test_diff_is_empty_between_a_state_and_its_clone_and_names_every_change() -> None:
    case = known()
    a = start(case)
    same = h.clone(a)
    assert h.diff(a, a) == []
    assert h.diff(a, same) == ["unit (root): masters are other tensors", "unit a: masters are other tensors"]
    b = h.unshard(h.clone(a), "a")
    b = h.reduce_grads(b, {**case.grads(0), "bias": None}, sync=Sync.NONE)
    assert [line for line in h.diff(a, b) if "masters" not in line] == [
        "micro: 0 -> 1",
        "ledger: 0 collectives -> 1",
        "unit a: parameters sharded -> unsharded",
        "unit a: gradients empty -> held",
        "unit a: acc_full of [] -> ['a.w']",
    ]
    d = h.shard(h.unshard(h.clone(a), "a"), "a", after_forward=True)
    assert [line for line in h.diff(a, d) if "masters" not in line] == [
        "ledger: 0 collectives -> 1",
        "unit a: parameters sharded -> regrouped",
    ]
    assert h.diff(d, h.clone(d)) == ["unit (root): masters are other tensors", "unit a: masters are other tensors"]
    c = h.apply_updates(h.clone(a), {})
    assert [line for line in h.diff(a, c) if "masters" not in line] == ["step: 0 -> 1"]
    other = start(known(MeshSpec.hsdp(1, 4)))
    assert h.diff(a, other) == [f"layouts differ: {a.layout.digest} and {other.layout.digest}"]


def test_the_repr_fits_a_line_and_names_phases() -> None:
    state = h.unshard(start(known()), "a")
    assert repr(state) == "HSDPState(step=0, micro=0, (root):sharded/empty, a:unsharded/empty)"


def test_phases_follow_from_the_fields_that_are_set() -> None:
    seen = {(u.params_phase, u.grads_phase) for s in phases(known()).values() for u in s.units}
    assert {p for p, _ in seen} == set(h.ParamPhase)
    assert {g for _, g in seen} == set(h.GradPhase)
    assert UnitState("u", ()).params_phase is h.ParamPhase.SHARDED
