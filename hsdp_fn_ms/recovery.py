"""Attempts that all ranks finish or none, though a rank may fail alone.

A rank that meets an exception inside `recoverable` doesn't leave its peers waiting: it takes part in the collectives
that they are still to issue, which it knows from the schedule, and throws the results away (*drain*). Then all ranks
count who has succeeded (*vote*). Either everybody commits, or everybody is where it was before: the failed rank with
its own exception, its peers with `PeerFailed`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import mindspore as ms

from hsdp_fn import Collective, HSDPState, LayoutError, PeerFailed, PhaseError, PolicyError
from hsdp_fn import unit as on_unit
from hsdp_fn.schedule import Journal, still_owed
from hsdp_fn.state import Token, phases_of

from .backend import MSBackend, ms_backend

Issued = tuple[Collective, ...]

# A backend: for each kind of attempt and what was planned in it, what it issued the last time that it succeeded, and
# whether that was so the time before.
_REMEMBERED: WeakKeyDictionary[MSBackend, dict[Any, dict[Issued, tuple[Issued, bool]]]] = WeakKeyDictionary()


def recoverable(state: HSDPState, *, schedule: Sequence[Collective] | None = None) -> Attempt:
    """One microbatch (or several) that all ranks take, or none. A context manager. Inside, go on from ``attempt.state``
    and assign to it; afterwards it is the new state if all ranks have succeeded, else the old one, which is still
    good::

        with recoverable(state) as attempt:
            (loss, _), attempt.state = step(attempt.state, x, y)
        state = attempt.state

    A rank that fails can free its peers only if it knows what they will issue: the collectives of an attempt must be
    the same each time. It takes ``schedule``, or what such an attempt issued the last time, or `expected_comm` of one
    forward and backward. Where none of these begins with what it has issued so far, or where a collective itself has
    failed, it can't help, says so in a note to its exception, and its peers wait for the communication's own timeout
    (``mccl``: 30 s, after which its groups can't be used any more). The model's own collectives aren't known here.

    Communicates at the end: one number, over the shard group and, where there is one, over the replicate group; after a
    failure also one short message a rank.

    Args:
        state: run the optimizer outside, and let exceptions leave the block: a rank that catches one inside and goes on
            has issued other collectives than its peers.
        schedule: all that the attempt issues, if it is known better.

    Raises (at the end):
        PeerFailed: on ranks that have succeeded where others haven't; names these and what they met.
        Whatever was raised inside, on the ranks where it was. The state is as it was before, on all ranks.
    """
    if not isinstance(state, HSDPState):
        raise TypeError(f"recoverable takes a state, found {type(state).__name__}")
    return Attempt(state, schedule)


class Attempt:
    """See `recoverable`.

    Attributes:
        state: inside to be used and assigned to; afterwards the result.
        journal: collectives that this rank has issued in it.
        committed: whether all ranks have succeeded; None before the end.
    """

    def __init__(self, state: HSDPState, schedule: Sequence[Collective] | None) -> None:
        self._before = self.state = state
        self._backend = ms_backend(state)
        self._schedule = None if schedule is None else tuple(schedule)
        self.journal = Journal()
        self.committed: bool | None = None

    def __enter__(self) -> Attempt:
        self._before.token.require("recoverable")
        if any(unit.reduction.unused == "checked" for unit in self._before.layout.units):
            raise PolicyError(
                "recoverable doesn't go with unused='checked', whose messages a failed rank can't take part in"
            )
        if self._before.token.journal is not None:
            raise PhaseError("an attempt inside another one")
        self.state = _with_token(self._before, Token(self.journal))
        if any(not same for _, same in self._known().values()):
            warnings.warn(
                "attempts like this one have issued different collectives; a rank that fails alone can't free its "
                "peers, which then wait for their timeout",
                stacklevel=2,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            return
        try:
            self._make_ready()
        except BaseException as wrong:
            self._fail(wrong)
            raise
        self._vote()

    def _make_ready(self) -> None:
        """All that can fail before a commit."""
        if not isinstance(self.state, HSDPState) or self.state.layout != self._before.layout:
            raise LayoutError(f"attempt.state must be a state of the same layout, found {self.state!r}")
        if self.state.token.journal is not self.journal:
            raise PhaseError("attempt.state must come from the one that the attempt has handed out")
        self.state.token.require("recoverable")
        self._before.token.require("recoverable")

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
            known = _REMEMBERED.setdefault(self._backend, {}).setdefault(self._kind(), {})
            before, issued = known.get(self.journal.planned), tuple(self.journal)
            known[self.journal.planned] = issued, before is None or before[0] == issued
            self._before.token.consume("recoverable")
            self.state = _with_token(self.state, Token())
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
            if not fitting and not self.journal.calls:
                return "no attempt like this one has succeeded before, so it isn't known what they will issue"
            schedule = fitting.pop() if fitting else planned
        owed = still_owed(schedule, self.journal)
        if owed is None:
            return f"the {len(self.journal)} collectives that it has issued aren't the beginning of a known schedule"
        layout, units = self._before.layout, self._before.units
        with ms._no_grad():
            for collective in owed:
                index = layout.unit_index[collective.unit]
                on_unit.pay(collective, layout.units[index], units[index], self._backend)
        return None

    def _undo(self) -> None:
        if isinstance(self.state, HSDPState) and self.state.layout == self._before.layout:
            for unit, before in zip(self.state.units, self._before.units, strict=True):
                if unit is not before:
                    on_unit.drop_flight(unit, self._backend)
        self.state = self._before

    def _kind(self) -> Any:
        """What is known when an attempt begins; with what is planned in it, it says what it will issue."""
        return self._before.layout.digest, tuple(phases_of(self._before).values())

    def _known(self) -> dict[Issued, tuple[Issued, bool]]:
        return _REMEMBERED.get(self._backend, {}).get(self._kind(), {})


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
