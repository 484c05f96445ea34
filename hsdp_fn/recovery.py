"""Attempts that all ranks finish or none, though a rank may fail alone.

A rank that meets an exception inside an attempt doesn't leave its peers waiting: it takes part in the collectives that
they are still to issue, which it knows from the schedule, and throws the results away (*drain*). Then all ranks count
who has succeeded (*vote*). Either everybody commits, or everybody is where it was before: the failed rank with its own
exception, its peers with `PeerFailed`.

The framework packages' ``recoverable`` makes them, and says what users have to know.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from . import unit as on_unit
from .backend import RankBackend
from .errors import LayoutError, PeerFailed, PhaseError, PolicyError
from .layout import Collective, Layout
from .lifecycle import ParamPhase
from .policy import ReductionPolicy
from .rollback import Gradients, Rollback
from .schedule import Journal, expected_comm, still_owed
from .state import HSDPState, Token, UnitState, phases_of

Issued = tuple[Collective, ...]
A = TypeVar("A", bound="Attempt")

# A backend: for each kind of attempt and what was planned in it, what it issued the last time that it succeeded, and
# whether that was so the time before.
_REMEMBERED: WeakKeyDictionary[RankBackend, dict[Any, dict[Issued, tuple[Issued, bool]]]] = WeakKeyDictionary()


class Attempt(ABC):
    """A context manager. What is done inside all ranks do, or none.

    Communicates at the end: one number, over the shard group and, where there is one, over the replicate group; after a
    failure also one short message a rank, and before that what peers still wait for.

    Args:
        backend: whose ranks vote.
        timeout: seconds that waiting for one collective may take inside; None: as the process groups say.
        schedule: all that it issues, if that is known better than from what such an attempt issued the last time, or
            from `expected_comm`.
        aside: entered while peers are freed, for collectives that the framework isn't to differentiate.

    Attributes:
        journal: collectives that this rank has issued in it.
        committed: whether all ranks have succeeded; None before the end.

    Raises (at the end):
        PeerFailed: on ranks that have succeeded where others haven't; names these and what they met.
        Whatever was raised inside, on the ranks where it was.
    """

    def __init__(
        self,
        backend: RankBackend,
        timeout: float | None,
        schedule: Sequence[Collective] | None,
        aside: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._backend, self._timeout, self._limits, self._aside = backend, timeout, ExitStack(), aside
        self.journal = Journal()
        self.committed: bool | None = None
        self._schedule = None if schedule is None else tuple(schedule)
        self._began_as: Any = None

    def __enter__(self: A) -> A:
        self._require_usable()
        try:
            self._begin()
            self._began_as = self._kind()
            if any(not same for _, same in self._known().values()):
                warnings.warn(
                    "attempts like this one have issued different collectives; a rank that fails alone can't free its "
                    "peers, which then wait for their timeout",
                    stacklevel=2,
                )
        except BaseException as error:
            self._fail(error)
            raise
        for backend in {id(b): b for b in (self._backend, *self._units()[2])}.values():
            self._limits.enter_context(backend.limited(self._timeout))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._limits:
            if error is not None:
                self._fail(error)
                return
            try:
                self._make_ready()
            except BaseException as wrong:
                self._fail(wrong)
                raise
            self._vote()

    def _vote(self) -> None:
        """This rank has succeeded."""
        everybody = len(self._backend.spec.data_parallel_group(self._backend.rank))
        try:
            votes = self._backend.votes(True)
        except Exception as failure:
            self._undo()
            _note(failure, "It was the vote that failed: peers may have committed. Restart from a checkpoint.")
            raise
        self.committed = votes == everybody
        if self.committed:
            self._remember()
            self._commit()
            return
        self._undo()
        answers = self._backend.exchange("")
        raise PeerFailed({rank: reason for rank, reason in answers.items() if reason})

    def _fail(self, error: BaseException) -> None:
        """This rank hasn't: go back, and free the peers."""
        self.committed = False
        self._undo()
        reason = _text(error)
        try:
            if not isinstance(error, Exception):
                note: str | None = "it was interrupted"
            elif _in_collective(error):
                note = "one of its collectives failed"
            else:
                note = self._drain()
            if note is None:
                self._backend.votes(False)
                self._backend.exchange(reason)
        except Exception as other:
            note = f"a collective failed while this rank tried to free its peers ({_text(other)})"
        if note is not None:
            _note(error, f"Other ranks may be waiting for this one until their timeout: {note}.")

    def _drain(self) -> str | None:
        """Take part in what peers are still to issue. What keeps this rank from it, or None."""
        schedule = self._schedule
        if schedule is None:
            known, planned = self._known(), self.journal.planned
            fitting = {issued for plan, (issued, _) in known.items() if plan[: len(planned)] == planned}
            if self.journal.calls and planned in known:  # rather than one that had more calls to come
                fitting = {known[planned][0]}
            if len(fitting) > 1:
                return "attempts like this one have issued different collectives"
            if not fitting and self._began_as is not None and self._began_as[0] != self._kind()[0]:
                return "settings were changed inside the attempt"
            if not fitting and not self.journal.calls:
                return "no attempt like this one has succeeded before, so it isn't known what they will issue"
            schedule = fitting.pop() if fitting else planned
        owed = still_owed(schedule, self.journal)
        if owed is None:
            return f"the {len(self.journal)} collectives that it has issued aren't the beginning of a known schedule"
        layout, units, backends = self._units()
        with self._aside():
            for collective in owed:
                index = layout.unit_index[collective.unit]
                on_unit.pay(collective, layout.units[index], units[index], backends[index])
        return None

    def _known(self) -> dict[Issued, tuple[Issued, bool]]:
        return _REMEMBERED.get(self._backend, {}).get(self._began_as, {})

    def _remember(self) -> None:
        known = _REMEMBERED.setdefault(self._backend, {}).setdefault(self._began_as, {})
        before, issued = known.get(self.journal.planned), tuple(self.journal)
        known[self.journal.planned] = issued, before is None or before[0] == issued

    @abstractmethod
    def _kind(self) -> tuple[Any, Any]:
        """What is known when an attempt begins: settings, and where parameters are. With what is planned in it, it says
        what it will issue."""

    @abstractmethod
    def _units(self) -> tuple[Layout, Sequence[UnitState], Sequence[RankBackend]]:
        """What to take part with."""

    @abstractmethod
    def _require_usable(self) -> None:
        """Raise, on all ranks alike, if there can't be an attempt."""

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _make_ready(self) -> None:
        """All that can fail before a commit."""

    @abstractmethod
    def _commit(self) -> None: ...

    @abstractmethod
    def _undo(self) -> None: ...


class StateAttempt(Attempt):
    """On a state.

    Args:
        state: where it starts.
        backend: the state's.

    Attributes:
        state: inside to be used and assigned to; afterwards the result.
    """

    def __init__(
        self,
        state: HSDPState,
        backend: RankBackend,
        timeout: float | None,
        schedule: Sequence[Collective] | None,
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(backend, timeout, schedule, aside)
        self._before = self.state = state

    def _kind(self) -> tuple[Any, Any]:
        return self._before.layout.digest, tuple(phases_of(self._before).values())

    def _units(self) -> tuple[Layout, Sequence[UnitState], Sequence[RankBackend]]:
        s = self._before
        return s.layout, s.units, [self._backend] * len(s.units)

    def _require_usable(self) -> None:
        self._before.token.require("recoverable")
        _require_unchecked(unit.reduction for unit in self._before.layout.units)
        if self._before.token.journal is not None:
            raise PhaseError("an attempt inside another one")

    def _begin(self) -> None:
        self.state = _with_token(self._before, Token(self.journal))

    def _make_ready(self) -> None:
        if not isinstance(self.state, HSDPState) or self.state.layout != self._before.layout:
            raise LayoutError(f"attempt.state must be a state of the same layout, found {self.state!r}")
        if self.state.token.journal is not self.journal:
            raise PhaseError("attempt.state must come from the one that the attempt has handed out")
        self.state.token.require("recoverable")
        self._before.token.require("recoverable")

    def _commit(self) -> None:
        self._before.token.consume("recoverable")
        self.state = _with_token(self.state, Token())

    def _undo(self) -> None:
        if isinstance(self.state, HSDPState) and self.state.layout == self._before.layout:
            for unit, before in zip(self.state.units, self._before.units, strict=True):
                if unit is not before:
                    on_unit.drop_flight(unit, self._backend)
        self.state = self._before


class Trained(Protocol):
    """A module."""

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        ...


class ModuleAttempt(Attempt):
    """On a module.

    Args:
        tree: the module's.
        module: the root.
    """

    def __init__(
        self,
        tree: Rollback,
        module: Trained,
        timeout: float | None,
        schedule: Sequence[Collective] | None,
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(tree.backend, timeout, schedule, aside)
        self._module, self._tree = module, tree
        self._gradients: list[Gradients] = []

    def _kind(self) -> tuple[Any, Any]:
        syncs = tuple(g.handling.sync for g in self._tree.groups)
        settings = self._tree.committed.layout.digest, syncs, self._module.training
        return settings, tuple(self._phases().values())

    def _phases(self) -> dict[str, ParamPhase]:
        return phases_of(self._tree.committed)

    def _units(self) -> tuple[Layout, Sequence[UnitState], Sequence[RankBackend]]:
        tree = self._tree
        return tree.committed.layout, tree.committed.units, [g.unit_backend() for g in tree.groups]

    def _require_usable(self) -> None:
        if not self._tree.groups:
            raise PhaseError("recoverable: nothing of this module is sharded")
        if self._tree.attempting or self._tree.running:
            raise PhaseError("an attempt begins outside of forward, backward and other attempts")
        _require_unchecked(g.settings.reduction for g in self._tree.groups)

    def _begin(self) -> None:
        tree = self._tree
        tree.begin_attempt(self.journal)
        syncs = {g.handling.sync for g in tree.groups}
        if len(syncs) == 1:
            # Here units that come gathered are treated after forward as all others.
            phases = {n: ParamPhase.GATHERING if p is ParamPhase.UNSHARDED else p for n, p in self._phases().items()}
            self.journal.plan(expected_comm(tree.committed.layout, sync=syncs.pop(), phases=phases))

    def _make_ready(self) -> None:
        if self._tree.running:
            raise PhaseError("an attempt ends outside of forward and backward")
        if (at := self._tree.stopped()) is not None:  # somebody has caught its exception inside
            raise PhaseError(f"a backward of this attempt stopped {at}; let its exception leave the attempt")
        self._gradients = [self._tree.hooked(gradients) for gradients in self._tree.kept_back()]

    def _commit(self) -> None:
        self._tree.end_attempt(commit=True)
        for gradients in self._gradients:
            self._tree.deliver(gradients)

    def _undo(self) -> None:
        self._tree.end_attempt(commit=False)


def _require_unchecked(reductions: Iterable[ReductionPolicy]) -> None:
    if any(reduction.unused == "checked" for reduction in reductions):
        raise PolicyError(
            "recoverable doesn't go with unused='checked', whose messages a failed rank can't take part in"
        )


def _in_collective(error: BaseException | None) -> bool:
    """Whether the failure of a collective is the cause."""
    while error is not None:
        if getattr(error, "_hsdp_collective", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception:  # its own __str__ fails
        return type(error).__name__


def _with_token(s: HSDPState, token: Token) -> HSDPState:
    return HSDPState(s.units, s.layout, s.backend, s.step, s.micro, s.ledger, token)
