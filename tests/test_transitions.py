"""The transition table, move by move: a legal move goes where it says, an illegal one is refused with good advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import hsdp_fn as h
from hsdp_fn import GradPhase, HSDPState, Keep, ParamPhase, PhaseError, StaleStateError, Sync, UnknownUnitError
from hsdp_fn.lifecycle import GRAD_MOVES, PARAM_MOVES, Op
from tests import known_model
from tests.known_model import CALLS, CASE, ILLEGAL_GRADS, ILLEGAL_PARAMS, refused, start
from tests.strategies import assert_same

# ------------------------------------------------------------------------------------------- units and stale states


@pytest.mark.parametrize(
    "call", [h.unshard, h.wait, h.shard, h.full_params, lambda s, u: h.reduce_grads(s, {}, units=u)]
)
def test_an_unknown_unit_is_refused_with_those_that_exist(call: Callable[[HSDPState, Any], Any]) -> None:
    for units in ("b", ["a", "b"]):
        state = start()
        with refused(state, UnknownUnitError, "no unit 'b'", "'', 'a'"):
            call(state, units)


@pytest.mark.parametrize("consumer", [op for op in Op if op is not Op.FULL_PARAMS])
def test_a_consumed_state_names_its_consumer_and_the_line_and_never_computes(consumer: Op) -> None:
    state = start()
    line = inspect.currentframe().f_lineno + 1
    CALLS[consumer](state)
    in_lambda = consumer in (Op.REDUCE, Op.APPLY, Op.LOAD)
    at = f"{known_model.__file__}:" if in_lambda else f"{__file__}:{line}"
    issued = list(state.backend.issued)
    for name, call in [*((op.value, f) for op, f in CALLS.items()), ("masters", h.masters), ("clone", h.clone)]:
        with pytest.raises(StaleStateError) as caught:
            call(state)
        assert str(caught.value).startswith(f"{name}: this state was consumed by {consumer.value}() at {at}")
        assert f"{name}(new, ...)" in str(caught.value)
        assert "clone(state)" in str(caught.value)
    assert state.backend.issued == issued


def test_reading_a_state_consumes_nothing() -> None:
    state = h.unshard(start())
    for read in (h.full_params, h.masters, h.clone, h.describe, h.memory_bytes, lambda s: h.diff(s, s)):
        read(state)
        read(state)
    h.shard(state)


# ------------------------------------------------------------------------------------------------------- transitions

PARAMS: dict[ParamPhase, Callable[[HSDPState], HSDPState]] = {
    ParamPhase.SHARDED: lambda s: s,
    ParamPhase.GATHERING: lambda s: h.unshard(s, async_op=True),
    ParamPhase.UNSHARDED: h.unshard,
    ParamPhase.REGROUPED: lambda s: h.shard(h.unshard(s), after_forward=True),
}
GRADS: dict[GradPhase, Callable[[HSDPState], HSDPState]] = {
    GradPhase.EMPTY: lambda s: s,
    GradPhase.HELD: lambda s: h.reduce_grads(s, CASE.grads(1), sync=Sync.NONE),
    GradPhase.REDUCING: lambda s: h.reduce_grads(s, CASE.grads(1), async_op=True),
    GradPhase.READY: lambda s: h.reduce_grads(s, CASE.grads(1)),
}


def test_the_tables_leave_out_exactly_what_is_illegal() -> None:
    params_ops, grads_ops = {op for _, op in PARAM_MOVES}, {op for _, op in GRAD_MOVES}
    assert set(product(ParamPhase, params_ops)) - set(PARAM_MOVES) == ILLEGAL_PARAMS
    assert set(product(GradPhase, grads_ops)) - set(GRAD_MOVES) == ILLEGAL_GRADS
    assert params_ops | grads_ops == set(Op)
    assert set(Op) - params_ops == {Op.REDUCE, Op.GRADS}
    assert set(Op) - grads_ops == {Op.UNSHARD, Op.SHARD, Op.FULL_PARAMS}


@pytest.mark.parametrize(("params", "grads", "op"), list(product(ParamPhase, GradPhase, Op)))
def test_every_move_in_every_phase_goes_where_the_table_says_or_is_refused_with_advice(
    params: ParamPhase, grads: GradPhase, op: Op
) -> None:
    state = GRADS[grads](PARAMS[params](start()))
    assert {(u.params_phase, u.grads_phase) for u in state.units} == {(params, grads)}
    illegal = (params, op) in ILLEGAL_PARAMS, (grads, op) in ILLEGAL_GRADS
    if any(illegal):
        phase = params if illegal[0] else grads
        with refused(state, PhaseError, f"{op.value}: unit '(root)' has ", phase.value, "(state"):
            CALLS[op](state)
        return
    result = CALLS[op](state)
    after = {Op.FULL_PARAMS: state, Op.GRADS: result[0] if op is Op.GRADS else None}.get(op, result)
    for unit in after.units:
        assert unit.params_phase is PARAM_MOVES.get((params, op), params)
        assert unit.grads_phase in GRAD_MOVES.get((grads, op), (grads,))


@pytest.mark.parametrize("grads", list(GradPhase))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParamPhase.SHARDED, ParamPhase.SHARDED),
        (ParamPhase.UNSHARDED, ParamPhase.REGROUPED),
        (ParamPhase.REGROUPED, ParamPhase.REGROUPED),
    ],
)
def test_shard_after_forward_goes_to_smaller_groups_and_no_further_whatever_the_gradients(
    before: ParamPhase, after: ParamPhase, grads: GradPhase
) -> None:
    state = GRADS[grads](PARAMS[before](start()))
    ledger, kept = state.ledger, [u.full for u in state.units]
    new = h.shard(state, after_forward=True)
    assert {(u.params_phase, u.grads_phase) for u in new.units} == {(after, grads)}
    assert new.ledger == ledger
    assert before is after or all(u.full is not full for u, full in zip(new.units, kept, strict=True))
    with pytest.raises(StaleStateError, match="consumed by shard"):
        h.wait(state)


def test_shard_after_forward_is_refused_while_the_gather_runs() -> None:
    state = PARAMS[ParamPhase.GATHERING](start())
    with refused(state, PhaseError, "shard: unit '(root)' has gathering parameters", "wait(state)"):
        h.shard(state, after_forward=True)


@pytest.mark.parametrize("async_op", [True, False])
def test_a_gather_from_smaller_groups_passes_through_every_phase_to_the_same_parameters(async_op: bool) -> None:
    state = PARAMS[ParamPhase.REGROUPED](start())
    issued = len(state.ledger)
    state = h.unshard(state, async_op=async_op)
    assert {u.params_phase for u in state.units} == {ParamPhase.GATHERING if async_op else ParamPhase.UNSHARDED}
    state = h.wait(state)
    assert {c.group_size for c in state.ledger[:issued]} == {4}
    assert {c.group_size for c in state.ledger[issued:]} == {2}
    assert_same(h.full_params(state), h.full_params(h.unshard(start())))


ADVICE: dict[tuple[ParamPhase | GradPhase, Op], Callable[[HSDPState], HSDPState]] = {
    (ParamPhase.SHARDED, Op.FULL_PARAMS): h.unshard,
    (ParamPhase.GATHERING, Op.SHARD): h.wait,
    (ParamPhase.GATHERING, Op.FULL_PARAMS): h.wait,
    (ParamPhase.GATHERING, Op.APPLY): lambda s: h.shard(h.wait(s)),
    (ParamPhase.GATHERING, Op.LOAD): lambda s: h.shard(h.wait(s)),
    (ParamPhase.UNSHARDED, Op.APPLY): h.shard,
    (ParamPhase.UNSHARDED, Op.LOAD): h.shard,
    (ParamPhase.REGROUPED, Op.FULL_PARAMS): h.unshard,
    (ParamPhase.REGROUPED, Op.APPLY): h.shard,
    (ParamPhase.REGROUPED, Op.LOAD): h.shard,
    (GradPhase.REDUCING, Op.REDUCE): h.wait,
    (GradPhase.HELD, Op.GRADS): lambda s: h.reduce_grads(s, None, sync=Sync.FULL),
    (GradPhase.HELD, Op.APPLY): h.reset_iter,
    (GradPhase.REDUCING, Op.APPLY): lambda s: h.grads(s)[0],
    (GradPhase.READY, Op.APPLY): lambda s: h.grads(s)[0],
    (GradPhase.HELD, Op.LOAD): h.reset_iter,
    (GradPhase.REDUCING, Op.LOAD): h.reset_iter,
    (GradPhase.READY, Op.LOAD): h.reset_iter,
}


def test_the_advice_of_every_phase_error_works() -> None:
    assert set(ADVICE) == ILLEGAL_PARAMS | ILLEGAL_GRADS
    for (phase, op), fix in ADVICE.items():
        reach = PARAMS[phase] if isinstance(phase, ParamPhase) else GRADS[phase]
        CALLS[op](fix(reach(start())))


def test_grads_of_a_reduction_in_flight_that_isnt_full_are_refused_before_any_collective() -> None:
    given = CASE.grads(1)
    root, rest = {"embed.w": given["embed.w"]}, {n: g for n, g in given.items() if n != "embed.w"}
    state = h.reduce_grads(start(), root, units="", sync=Sync.FULL, async_op=True)
    state = h.reduce_grads(state, rest, units="a", sync=Sync.SHARD, async_op=True)
    with refused(state, PhaseError, "grads: unit 'a'"):
        h.grads(state)


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize(("params", "grads"), list(product(ParamPhase, GradPhase)))
def test_reset_iter_comes_back_from_every_phase(params: ParamPhase, grads: GradPhase, keep: Keep) -> None:
    state = h.reset_iter(GRADS[grads](PARAMS[params](start())), keep=keep)
    kept = {GradPhase.REDUCING: GradPhase.READY}.get(grads, grads) if keep is Keep.ACCUMULATED else GradPhase.EMPTY
    assert {(u.params_phase, u.grads_phase) for u in state.units} == {(ParamPhase.SHARDED, kept)}
    assert not state.backend.in_flight
    if keep is Keep.NOTHING:
        assert (state.micro, state.ledger) == (0, ())
