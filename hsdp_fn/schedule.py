"""Which collectives a step issues, in order, with bytes: computed from the layout alone, before anything runs; and what
was issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from .layout import ROOT, Collective, Layout, UnitLayout
from .lifecycle import ParamPhase
from .policy import Sync


def expected_comm(
    layout: Layout,
    *,
    sync: Sync = Sync.FULL,
    backward: bool = True,
    phases: Mapping[str, ParamPhase] | None = None,
) -> tuple[Collective, ...]:
    """The collectives of one microbatch in the order in which they are issued.

    Holds when the units run once each, in the layout's order, inside those whose names theirs begin with (the root's is
    empty), and every trainable parameter gets a gradient. For ``U`` units and a root, of one bucket each: with
    resharding ``2U + 1`` gathers and ``U + 1`` reduce-scatters, else ``U + 1`` of each. A unit that is resharded to
    smaller groups is gathered over these in backward.

    Args:
        sync: how far gradients are reduced.
        backward: False for a forward without gradients (evaluation).
        phases: where parameters are before, by unit; sharded by default. Units that come unsharded stay so; those whose
            gather is in flight are treated as the layout says.
    """
    out: list[Collective] = []
    phases = phases or {}
    kept = {name for name, phase in phases.items() if phase is ParamPhase.UNSHARDED}
    for unit in layout.units:
        phase = phases.get(unit.name, ParamPhase.SHARDED)
        if phase is ParamPhase.SHARDED:
            out += _gathers(unit)
        elif phase is ParamPhase.REGROUPED:
            out += _regathers(unit)
    if not backward:
        return tuple(out)
    gathered: set[str] = set()

    def away(unit: UnitLayout) -> bool:
        return bool(unit.reshard_after_forward) and unit.name not in kept

    def regather(units: Iterable[UnitLayout]) -> None:
        for unit in units:
            if away(unit) and unit.name not in gathered:
                gathered.add(unit.name)
                out.extend(_regathers(unit))

    # The output of a unit with others inside comes last, so its backward begins before theirs and ends after them.
    order: list[UnitLayout] = []
    ends: list[tuple[int, UnitLayout]] = []  # how many have begun by then

    def visit(unit: UnitLayout) -> None:
        order.append(unit)
        for child in reversed(inside[unit.name]):
            visit(child)
        ends.append((len(order), unit))

    inside, outermost = _nested(layout.units)
    for unit in reversed(outermost):
        visit(unit)
    owed: list[Collective] = []
    for begun in range(len(order)):
        next_ones = filter(away, order[begun + 1 :])
        regather([order[begun], *islice(next_ones, layout.prefetch.backward)])
        while ends and ends[0][0] == begun + 1:
            owed = _reduce(ends.pop(0)[1], sync, owed, out)
    return tuple(out + owed)


class Journal(list[Collective]):
    """What an attempt has issued so far, in order. ``planned``: what it is to issue, as far as its ``calls`` (how many)
    have said."""

    __slots__ = ("calls", "planned")

    def __init__(self) -> None:
        super().__init__()
        self.planned: tuple[Collective, ...] = ()
        self.calls = 0

    def plan(self, collectives: Iterable[Collective]) -> None:
        """A call begins that is to issue these."""
        self.planned += tuple(collectives)
        self.calls += 1


class Log(list[Collective]):
    """Collectives in the order in which they were issued.

    Args:
        journal: of the attempt that they belong to, if any, which gets them too.
    """

    __slots__ = ("journal",)

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__()
        self.journal = journal

    def append(self, collective: Collective) -> None:
        """One more was issued."""
        super().append(collective)
        if self.journal is not None:
            self.journal.append(collective)


def still_owed(schedule: Sequence[Collective], issued: Sequence[Collective]) -> tuple[Collective, ...] | None:
    """What remains of a schedule; None if what was issued isn't its beginning."""
    done = len(issued)
    return tuple(schedule[done:]) if tuple(schedule[:done]) == tuple(issued) else None


@dataclass(frozen=True, slots=True)
class CommTotal:
    """Sums over collectives of one kind: how many, and the bytes of their larger buffers."""

    count: int
    nbytes: int
    padding: int


def totals(collectives: Iterable[Collective]) -> dict[str, CommTotal]:
    """Collectives summed by kind. ``padding`` is in bytes and part of ``nbytes``."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    padding: Counter[str] = Counter()
    for c in collectives:
        count[c.op] += 1
        nbytes[c.op] += c.nbytes
        padding[c.op] += c.padding * c.nbytes // c.numel if c.numel else 0
    return {op: CommTotal(count[op], nbytes[op], padding[op]) for op in count}


def _nested(units: Sequence[UnitLayout]) -> tuple[dict[str, list[UnitLayout]], list[UnitLayout]]:
    """By name of a unit those directly inside its module; and the outermost units. In the order of ``units``."""
    inside: dict[str, list[UnitLayout]] = {unit.name: [] for unit in units}
    outermost: list[UnitLayout] = []
    for unit in units:
        name = unit.name
        while name != ROOT:
            name = name.rpartition(".")[0]
            if name in inside:
                inside[name].append(unit)
                break
        else:
            outermost.append(unit)
    return inside, outermost


def _gathers(unit: UnitLayout) -> list[Collective]:
    return [b.gather for b in unit.buckets if b.gather is not None]


def _regathers(unit: UnitLayout) -> list[Collective]:
    if type(unit.reshard_after_forward) is bool:
        return _gathers(unit)
    gathers = [b.gather if b.regather is None else b.regather.gather for b in unit.buckets]
    return [g for g in gathers if g is not None]


def _reduce(unit: UnitLayout, sync: Sync, owed: list[Collective], out: list[Collective]) -> list[Collective]:
    """Append what the unit's reduction issues at once; return the all-reduces that it owes for later."""
    if sync is Sync.NONE or not any(b.grads for b in unit.buckets):
        return owed
    out += owed
    owed = []
    for b in unit.buckets:
        if b.reduce_scatter is not None:
            out.append(b.reduce_scatter)
        if b.all_reduce is not None and sync is Sync.FULL:
            (owed if b.reduce_scatter is not None else out).append(b.all_reduce)
    return owed
