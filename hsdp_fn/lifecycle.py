"""The phases of a unit and the one table of legal transitions.

A unit has two independent phases: where its parameters are and where its gradients are. Every function that changes a
unit looks its move up here first, before it issues anything. `PARAM_MOVES` and `GRAD_MOVES` are the whole rule.
"""

from __future__ import annotations

from enum import Enum

from .errors import PhaseError


class _Key(Enum):
    """An enum whose members are cheap dict keys: `Enum` hashes in Python, and moves are looked up all the time."""

    __hash__ = object.__hash__


class ParamPhase(_Key):
    """Where a unit's full parameters are. REGROUPED: as after forward, over groups smaller than all shard ranks."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    REGROUPED = "regrouped"


class GradPhase(_Key):
    """Where a unit's gradients are. HELD: some microbatch isn't fully reduced yet. READY: reduced, not yet taken."""

    EMPTY = "empty"
    HELD = "held"
    REDUCING = "reducing"
    READY = "ready"


class Op(_Key):
    """The moves."""

    UNSHARD = "unshard"
    WAIT = "wait"
    SHARD = "shard"
    FULL_PARAMS = "full_params"
    REDUCE = "reduce_grads"
    GRADS = "grads"
    APPLY = "apply_updates"
    LOAD = "load_masters"
    RESET = "reset_iter"


_S, _G, _U, _P = ParamPhase.SHARDED, ParamPhase.GATHERING, ParamPhase.UNSHARDED, ParamPhase.REGROUPED
_E, _H, _R, _Y = GradPhase.EMPTY, GradPhase.HELD, GradPhase.REDUCING, GradPhase.READY

#: (phase, move) -> the phase afterwards. A pair that isn't here is illegal. `unshard` that isn't awaited ends in
#: GATHERING instead of UNSHARDED, `shard` after a forward, where smaller groups are asked for, in REGROUPED instead of
#: SHARDED. A move that isn't named here doesn't look at the parameters.
PARAM_MOVES: dict[tuple[ParamPhase, Op], ParamPhase] = {
    (_S, Op.UNSHARD): _U,
    (_G, Op.UNSHARD): _U,
    (_U, Op.UNSHARD): _U,
    (_P, Op.UNSHARD): _U,
    (_S, Op.WAIT): _S,
    (_G, Op.WAIT): _U,
    (_U, Op.WAIT): _U,
    (_P, Op.WAIT): _P,
    (_S, Op.SHARD): _S,
    (_U, Op.SHARD): _S,
    (_P, Op.SHARD): _S,
    (_U, Op.FULL_PARAMS): _U,
    (_S, Op.APPLY): _S,
    (_S, Op.LOAD): _S,
    (_S, Op.RESET): _S,
    (_G, Op.RESET): _S,
    (_U, Op.RESET): _S,
    (_P, Op.RESET): _S,
}

#: (phase, move) -> the phases that can follow.
GRAD_MOVES: dict[tuple[GradPhase, Op], tuple[GradPhase, ...]] = {
    (_E, Op.REDUCE): (_E, _H, _R, _Y),
    (_H, Op.REDUCE): (_H, _R, _Y),
    (_Y, Op.REDUCE): (_H, _R, _Y),
    (_E, Op.WAIT): (_E,),
    (_H, Op.WAIT): (_H,),
    (_R, Op.WAIT): (_H, _Y),
    (_Y, Op.WAIT): (_Y,),
    (_E, Op.GRADS): (_E,),
    (_R, Op.GRADS): (_E,),
    (_Y, Op.GRADS): (_E,),
    (_E, Op.APPLY): (_E,),
    (_E, Op.LOAD): (_E,),
    (_E, Op.RESET): (_E,),
    (_H, Op.RESET): (_E, _H, _Y),
    (_R, Op.RESET): (_E, _H, _Y),
    (_Y, Op.RESET): (_E, _Y),
}

_PARAM_ADVICE: dict[tuple[ParamPhase, Op], str] = {
    (_G, Op.SHARD): "the gather is still running: state = wait(state) first",
    (_S, Op.FULL_PARAMS): "they are sharded: state = unshard(state) first",
    (_P, Op.FULL_PARAMS): "they are sharded over smaller groups: state = unshard(state) first",
    (_G, Op.FULL_PARAMS): "the gather is still running: state = wait(state) first",
    (_G, Op.APPLY): "a gather of the old values is running: state = shard(wait(state)) first",
    (_U, Op.APPLY): "full parameters of the old values would outlive the update: state = shard(state) first",
    (_P, Op.APPLY): "pieces of the old values would outlive the update: state = shard(state) first",
    (_P, Op.LOAD): "pieces of the old values would outlive the load: state = shard(state) first",
    (_G, Op.LOAD): "a gather of the old values is running: state = shard(wait(state)) first",
    (_U, Op.LOAD): "full parameters of the old values would outlive the load: state = shard(state) first",
}
_GRAD_ADVICE: dict[tuple[GradPhase, Op], str] = {
    (_R, Op.REDUCE): "an earlier reduction is still running: state = wait(state) first",
    (
        _H,
        Op.GRADS,
    ): "microbatches are accumulated but not reduced: finish with reduce_grads(state, None, sync=Sync.FULL)",
    (_H, Op.APPLY): "accumulated gradients would be lost: reduce and take them, or drop them with reset_iter(state)",
    (_R, Op.APPLY): "a reduction is still running: state, grads = grads(state) first",
    (_Y, Op.APPLY): "reduced gradients weren't taken: state, grads = grads(state) first, or reset_iter(state)",
    (_H, Op.LOAD): "accumulated gradients belong to the old values: state = reset_iter(state) first",
    (_R, Op.LOAD): "a reduction is still running: state = reset_iter(state) first",
    (_Y, Op.LOAD): "reduced gradients belong to the old values: state = reset_iter(state) first",
}
_PARAM_OPS = frozenset(op for _, op in PARAM_MOVES)
_GRAD_OPS = frozenset(op for _, op in GRAD_MOVES)


def check(unit: str, params: ParamPhase, grads: GradPhase, op: Op) -> None:
    """Look a move up in the tables.

    Raises:
        PhaseError: the move is illegal; names the unit, its phase and what to do instead.
    """
    if (params, op) not in PARAM_MOVES and op in _PARAM_OPS:
        advice = _PARAM_ADVICE.get((params, op), "the transition table has no such move")
        raise PhaseError(f"{op.value}: unit {unit or '(root)'!r} has {params.value} parameters; {advice}")
    if (grads, op) not in GRAD_MOVES and op in _GRAD_OPS:
        advice = _GRAD_ADVICE.get((grads, op), "the transition table has no such move")
        raise PhaseError(f"{op.value}: unit {unit or '(root)'!r} has gradients in phase {grads.value}; {advice}")
