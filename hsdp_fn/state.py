"""The sharding state: one immutable pytree.

`HSDPState` holds a tuple of `UnitState`; tensors are its leaves, everything else is static. The types are registered
with optree in the namespace ``hsdp_fn``: two states of different phase have different treespecs, so a `tree_map` over
both refuses, while step counts, ledgers and tokens never make two states incompatible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree

from .backend import Backend, Handle, Tensor
from .errors import PendingError, StaleStateError
from .layout import Collective, Layout
from .lifecycle import GradPhase, ParamPhase
from .policy import Sync
from .schedule import Journal

_PACKAGES = ("hsdp_fn", "hsdp_fn_torch", "hsdp_fn_ms")
#: The optree namespace of all state types.
NAMESPACE = "hsdp_fn"


class Token:
    """Says whether a state may still be used. Dies with the call that consumes the state. ``journal`` is that of the
    attempt to which the state belongs, if any; it is handed on to the states that follow.

    All tokens compare equal, else no two treespecs would match. A copy made by `tree_map` shares its original's token,
    as it may share its memory; `clone` makes a new one.
    """

    __slots__ = ("consumer", "journal", "line")

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        self.consumer: str | None = None
        self.line: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token)

    def __hash__(self) -> int:
        return 0

    def consume(self, op: str) -> None:
        """Mark the state as used up by ``op``, and remember the user's line that called it."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
            frame = frame.f_back
        self.consumer, self.line = op, f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def require(self, op: str) -> None:
        """Raise `StaleStateError` when an earlier call consumed the state."""
        if self.consumer is not None:
            raise StaleStateError(
                f"{op}: this state was consumed by {self.consumer}() at {self.line}. A call that returns a state uses "
                f"up the one it was given. The code is probably\n    new = {self.consumer}(state, ...)\n"
                f"    {op}(state, ...)          # should be {op}(new, ...)\n"
                f"Keep the returned state, or branch beforehand with clone(state)."
            )


class Frozen:
    """Static data that never makes two states incompatible: equal to any other."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Collectives of one unit in flight. Owns outputs, inputs and handles, so that nothing frees a running buffer.

    Has no leaves: a `tree_map` can't touch a buffer that is being written.

    Attributes:
        op: ``all_gather`` or ``reduce``.
        unit: the unit's name.
        outputs: one buffer a bucket; None where the bucket takes no part. Written by the collectives only.
        keepalive: inputs of the collectives.
        handles: one a bucket; None where nothing runs.
        sync: how far a reduction goes; None for a gather.
        present: which parameters contributed a gradient, in the unit's order; empty for a gather.
        regathering: of a gather, from smaller groups than all shard ranks (see `Regrouped`).
        summed: of a reduction, for each bucket whether its output will be the sum over all ranks it has to reach, or
            still owes the sum over the replicate group.
    """

    op: str
    unit: str
    outputs: tuple[Tensor | None, ...]
    keepalive: tuple[Tensor | None, ...]
    handles: tuple[Handle, ...]
    sync: Sync | None = None
    present: tuple[bool, ...] = ()
    summed: tuple[bool, ...] = ()
    regathering: bool = False

    def read(self) -> None:
        """Raise: what a collective writes can't be read before `wait`."""
        raise PendingError(
            f"{self.op} of unit {self.unit or '(root)'!r} is still running: state = wait(state) before reading it"
        )


@dataclass(frozen=True, slots=True, eq=False)
class GradShards:
    """This rank's shard of a unit's gradients.

    Attributes:
        flats: one flat shard a bucket, laid out as ``bucket.grads``; None where the bucket has none.
        present: which of the unit's parameters have a gradient; the rows of the others are zeros.
    """

    flats: tuple[Tensor | None, ...]
    present: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Regrouped:
    """Parameters of a unit between forward and backward, split over groups smaller than all shard ranks
    (``reshard_after_forward`` as an int). Derived: dropping it loses nothing.

    Attributes:
        flats: this rank's piece of each bucket, in compute dtype, laid out as ``bucket.regather.params``; None where
            the bucket is gathered from its masters.
    """

    flats: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnitState:
    """One unit. Its phases follow from which fields are set.

    Attributes:
        name: the unit's name.
        master: one flat shard a bucket, in the parameters' own dtype. The truth: only `apply_updates` and
            `load_masters` change it.
        full: full parameters in the unit's order, in compute dtype; a `Pending` while they are gathered; `Regrouped`
            while they are split over smaller groups; None while sharded. Derived: dropping it loses nothing.
        acc_full: whole gradients of microbatches with ``Sync.NONE``, in accumulation dtype, in the unit's order; None
            for a parameter without one. Can't be derived.
        acc_partial: gradients of microbatches with ``Sync.SHARD``, reduced over the shard group only, not yet divided,
            in accumulation dtype. Can't be derived.
        reducing: a reduction in flight, else None.
        grad: the finished gradient, scaled, in each bucket's ``grad_dtype``, waiting for `grads`.
    """

    name: str
    master: tuple[Tensor, ...]
    full: tuple[Tensor, ...] | Pending | Regrouped | None = None
    acc_full: tuple[Tensor | None, ...] | None = None
    acc_partial: GradShards | None = None
    reducing: Pending | None = None
    grad: GradShards | None = None

    @property
    def params_phase(self) -> ParamPhase:
        """Where the full parameters are."""
        if self.full is None:
            return ParamPhase.SHARDED
        if isinstance(self.full, Regrouped):
            return ParamPhase.REGROUPED
        return ParamPhase.GATHERING if isinstance(self.full, Pending) else ParamPhase.UNSHARDED

    @property
    def grads_phase(self) -> GradPhase:
        """Where the gradients are."""
        if self.reducing is not None:
            return GradPhase.REDUCING
        if self.acc_full is not None or self.acc_partial is not None:
            return GradPhase.HELD
        return GradPhase.EMPTY if self.grad is None else GradPhase.READY


@dataclass(frozen=True, slots=True, eq=False)
class HSDPState:
    """The whole state of sharded training on one rank.

    Attributes:
        units: in the layout's order.
        layout: who owns what. Static.
        backend: who computes. Static.
        step: optimizer steps taken: calls of `apply_updates`.
        micro: microbatches whose gradients went into the present step.
        ledger: collectives issued since the last step, oldest first.
        token: whether this value may still be used.
    """

    units: tuple[UnitState, ...]
    layout: Layout
    backend: Backend
    step: int
    micro: int
    ledger: tuple[Collective, ...]
    token: Token

    def __repr__(self) -> str:
        phases = ", ".join(f"{u.name or '(root)'}:{u.params_phase.value}/{u.grads_phase.value}" for u in self.units)
        return f"HSDPState(step={self.step}, micro={self.micro}, {phases})"


def phases_of(state: HSDPState) -> dict[str, ParamPhase]:
    """Where each unit's parameters are."""
    return {u.name: u.params_phase for u in state.units}


def _flatten_pending(p: Pending) -> tuple[tuple[()], tuple[str, str, Frozen], None]:
    return (), (p.op, p.unit, Frozen(p)), None


def _unflatten_pending(meta: tuple[str, str, Frozen], _: Any) -> Pending:
    pending: Pending = meta[2].value
    return pending


def _flatten_unit(u: UnitState) -> tuple[tuple[Any, ...], str, tuple[str, ...]]:
    fields = ("master", "full", "acc_full", "acc_partial", "reducing", "grad")
    return tuple(getattr(u, f) for f in fields), u.name, fields


def _flatten_state(s: HSDPState) -> tuple[tuple[Any, ...], tuple[Layout, Frozen, Token], tuple[str]]:
    return (s.units,), (s.layout, Frozen((s.backend, s.step, s.micro, s.ledger)), s.token), ("units",)


def _unflatten_state(meta: tuple[Layout, Frozen, Token], children: Any) -> HSDPState:
    layout, kept, token = meta
    backend, step, micro, ledger = kept.value
    return HSDPState(children[0], layout, backend, step, micro, ledger, token)


#: Every node type with how it is taken apart, ``node -> (children, metadata, names)``, and put together again,
#: ``(metadata, children) -> node``. Framework packages register the same with their own pytrees.
NODES: tuple[tuple[type, Callable[[Any], tuple[Any, ...]], Callable[[Any, Any], Any]], ...] = (
    (Pending, _flatten_pending, _unflatten_pending),
    (GradShards, lambda g: ((g.flats,), g.present, ("flats",)), lambda present, c: GradShards(c[0], present)),
    (Regrouped, lambda r: ((r.flats,), None, ("flats",)), lambda _, c: Regrouped(c[0])),
    (UnitState, _flatten_unit, lambda name, children: UnitState(name, *children)),
    (HSDPState, _flatten_state, _unflatten_state),
)
_register: Any = optree.register_pytree_node  # its annotation asks for a Collection; any class can be a node
for _kind, _flatten, _unflatten in NODES:
    _register(_kind, _flatten, _unflatten, namespace=NAMESPACE)
