"""The committed state of a tree, the frame that runs on top of it, and the ways back: after an error, by hand, or since
another rank has failed.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from . import unit as on_unit
from .backend import RankBackend
from .handling import Handling
from .layout import Layout
from .lifecycle import ParamPhase
from .policy import Keep, ReductionPolicy
from .schedule import Journal, Log
from .state import HSDPState, Token, UnitState

#: Parameters with what is to be added to their gradients, and the attribute that it is for.
Gradients = Sequence[tuple[Any, Any, str]]


class RollbackFrame(Protocol):
    """A frame: forwards and backwards in progress.

    Attributes:
        in_backward: a backward has begun, and hasn't ended.
        reached: the unit that backward came to last.
        log: the collectives issued.
    """

    in_backward: bool
    reached: int | None
    layout: Layout
    log: Log

    @property
    def stopped(self) -> bool:
        """Whether a backward has begun, and has raised before its end."""
        ...

    def snapshot(self) -> HSDPState:
        """The units as they stand."""
        ...

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        ...


class RollbackTables(Protocol):
    """Where modules keep the parameters of the units."""

    @property
    def in_place(self) -> bool:
        """Whether full parameters stand anywhere."""
        ...

    def own(self) -> AbstractContextManager[None]:
        """Inside, every module has its own parameters."""
        ...

    def disconnect(self) -> None:
        """Every module has its own parameters again."""
        ...


class RollbackSettings(Protocol):
    """What users have set for a unit."""

    reduction: ReductionPolicy


class RollbackGroup(Protocol):
    """A unit of the facade.

    Attributes:
        to_run: modules that have yet to run in this pass through it.
    """

    to_run: set[int]

    @property
    def handling(self) -> Handling:
        """How frames treat it."""
        ...

    @property
    def settings(self) -> RollbackSettings:
        """What users have set."""
        ...

    def unit_backend(self) -> RankBackend:
        """What it communicates with."""
        ...


class Rollback(ABC):
    """What a failing iteration must not touch, and how to get back to it.

    Args:
        backend: the root's.
        groups: those with parameters.
        tables: where their modules keep them.

    Attributes:
        committed: the state. Replaced as a whole, at the end of a backward.
        frame: what is under way; None while nothing is.
        strict: a backward that stopped has to be answered by `reset`.
    """

    backend: RankBackend
    groups: Sequence[RollbackGroup]
    tables: RollbackTables
    committed: HSDPState
    frame: RollbackFrame | None
    _last: RollbackFrame | None

    def __init__(self, backend: RankBackend, groups: Sequence[RollbackGroup], tables: RollbackTables) -> None:
        self.backend, self.groups, self.tables = backend, groups, tables
        self.frame = None
        self.strict = False
        self._last = None  # the frame that rests; graphs of it may wake it
        self._attempt: tuple[Journal, HSDPState, list[Gradients]] | None = None  # and its start, and gradients
        self._calls = 0  # of the tree's modules, one inside the other

    @property
    def state(self) -> HSDPState:
        """The committed state, or, while an iteration is under way, the units as they stand."""
        return self.committed if self.frame is None else self.frame.snapshot()

    @property
    def running(self) -> bool:
        """Whether a forward or backward is going on at this moment."""
        if self.frame is not None and self.frame.in_backward:
            return not self.frame.stopped
        return self._calls > 0

    def drop(self) -> None:
        """Forget the running frame: the iteration never happened."""
        if self.frame is not None:
            self.frame.abort()
        self.frame = self._last = None
        for group in self.groups:
            group.to_run.clear()

    def reset(self, keep: Keep = Keep.NOTHING) -> None:
        """`drop`, and unless they are to be kept forget gradients that earlier backwards have held back."""
        if not self.groups:
            return
        self.drop()
        self.tables.disconnect()
        s = self.committed
        for unit in s.units:
            on_unit.drop_flight(unit, self.backend)
        if keep is Keep.ACCUMULATED:
            kept = tuple(UnitState(u.name, u.master, None, u.acc_full, u.acc_partial) for u in s.units)
            self.committed = HSDPState(kept, s.layout, s.backend, s.step, s.micro, s.ledger, Token())
            return
        units = tuple(UnitState(u.name, u.master) for u in s.units)
        self.committed = HSDPState(units, s.layout, s.backend, s.step, 0, (), Token())

    def stopped(self) -> str | None:
        """Where a backward has stopped without an end; None if none has."""
        frame = self.frame
        if frame is None or not frame.stopped:
            return None
        return "before any unit" if frame.reached is None else f"in unit {frame.layout.units[frame.reached].title!r}"

    def undo_failed_backward(self) -> None:
        """Drop a frame whose backward raised: its end was never called.

        Raises:
            RuntimeError: ``strict``.
        """
        if (at := self.stopped()) is not None:
            if self.strict:
                raise RuntimeError(f"the last backward stopped {at}; call reset_iter_state() before anything else")
            warnings.warn(
                f"the last backward stopped {at}, so it is undone: its gradients are dropped and forward starts anew",
                stacklevel=4,
            )
            self.drop()

    @property
    def attempting(self) -> bool:
        """Whether an attempt is going on."""
        return self._attempt is not None

    @property
    def _journal(self) -> Journal | None:
        return None if self._attempt is None else self._attempt[0]

    def begin_attempt(self, journal: Journal) -> None:
        """Note collectives in the journal, and keep gradients back, until `end_attempt`. Settings, and parameters that
        were changed or replaced, are taken over first, so that ``committed`` says what comes.
        """
        self.undo_failed_backward()
        if self.frame is not None:
            self.committed = self.frame.snapshot()
            self.drop()
        self._begin_frame()
        self._attempt = journal, self.committed, []

    def kept_back(self) -> list[Gradients]:
        """Gradients of the attempt so far, backward by backward."""
        return self._attempt[2] if self._attempt is not None else []

    def end_attempt(self, *, commit: bool) -> None:
        """Without ``commit``, everything is as it was before the attempt. Without effect outside of one."""
        if self._attempt is None:
            return
        _, before, _ = self._attempt
        self._attempt = None
        if self.frame is not None:
            self.frame.log.journal = None
        if not commit:
            self.drop()
            self.tables.disconnect()
            units = tuple([u if u.params_phase is not ParamPhase.GATHERING else without_full(u) for u in before.units])
            self.committed = replace(before, units=units)  # what was being gathered has been waited for, and dropped

    @abstractmethod
    def _begin_frame(self) -> None:
        """Make ready for a forward: the committed state is up to date afterwards."""

    @abstractmethod
    def hooked(self, gradients: Gradients) -> Gradients:
        """Gradients as the parameters' own hooks make them. These run before anything is added."""

    @abstractmethod
    def deliver(self, gradients: Gradients) -> None:
        """Add finished gradients, after `hooked`, to those that the parameters have."""

    @contextmanager
    def own_parameters(self) -> Iterator[None]:
        """Inside, every module has its sharded parameters, whatever a running frame has put there."""
        self.undo_failed_backward()
        with self.tables.own() if self.tables.in_place else nullcontext():
            yield


def without_full(u: UnitState) -> UnitState:
    """The unit without full parameters, or a gather of them."""
    return UnitState(u.name, u.master, None, u.acc_full, u.acc_partial, u.reducing, u.grad)
