"""Reductions of one backward: in which order they start, and how many are in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from . import unit as on_unit
from .backend import Backend, Tensor
from .errors import RankMismatchError
from .handling import Handling
from .layout import Layout
from .policy import Sync
from .schedule import Log
from .state import UnitState


class Reducing(Protocol):
    """What a frame keeps of a unit, as far as reductions are concerned.

    Attributes:
        state: the unit's state as it moves.
        reduced: gradients of the present backward have been handed on.
    """

    state: UnitState
    reduced: bool


class Reducer:
    """Starts the reductions of a frame's units and moves them on.

    Args:
        layout: the units.
        uses, handling, backends: one a unit.
        log: collects the collectives issued.
        backend: of the state.
    """

    def __init__(
        self,
        layout: Layout,
        uses: Sequence[Reducing],
        handling: Sequence[Handling],
        backends: Sequence[Backend],
        log: Log,
        backend: Backend,
    ) -> None:
        self._layout, self._backend = layout, backend
        self._uses, self._handling, self._backends, self._log = uses, handling, backends, log
        self._flight: list[int] = []  # units whose reduction was launched and isn't finished, oldest first
        self._arrived: set[int] = set()  # units whose gradients are complete but whose turn hasn't come
        self._turns: list[int] = []  # units that reduce in one order on all ranks; the last one is next

    @property
    def busy(self) -> bool:
        """Whether a reduction is in flight."""
        return bool(self._flight)

    def begin(self, layout: Layout) -> None:
        """A backward begins."""
        self._layout = layout
        self._arrived.clear()
        self._turns = [i for i, u in enumerate(layout.units) if u.trainable and u.reduction.unused == "zeros"]

    def due(self, index: int) -> Iterator[int]:
        """The unit's gradients are complete. Units to reduce now: this one, or, where ranks may use different units,
        those whose turn has come in the one order that all ranks share."""
        if self._layout.units[index].reduction.unused != "zeros":
            yield index
            return
        self._arrived.add(index)
        while self._turns and self._turns[-1] in self._arrived:
            yield self._turns.pop()

    def launch(self, index: int, grads: Sequence[Tensor | None] | None) -> None:
        """Start a unit's reduction. Communicates, see `hsdp_fn.unit.start_reduce`."""
        self.advance(self._handling[index].max_reductions - 1)
        use, plan, backend = self._uses[index], self._layout.units[index], self._backends[index]
        if index in self._flight:
            self._flight.remove(index)
        unit = on_unit.finish_reduce(use.state, plan, backend, self._log)
        sync = self._handling[index].sync
        if plan.reduction.unused == "checked" and sync is not Sync.NONE:
            used = [p.name for p, g in zip(plan.params, grads or (), strict=False) if g is not None]
            self.compare(f"unit {plan.title!r} with gradients of {used}")
        use.state = on_unit.start_reduce(unit, plan, backend, grads, sync, self._log)
        use.reduced = True
        if use.state.reducing is not None:
            self._flight.append(index)

    def advance(self, spare: int = 0) -> None:
        """Take the reductions in flight one step further, except the newest ``spare``; their inputs are freed before
        the next one packs."""
        ready, waiting = (self._flight[:-spare], self._flight[-spare:]) if spare else (self._flight, [])
        for index in ready:
            use, plan, backend = self._uses[index], self._layout.units[index], self._backends[index]
            use.state = on_unit.advance_reduce(use.state, plan, backend, self._log, donate=True)
        self._flight = [i for i in ready if self._uses[i].state.reducing is not None] + waiting

    def compare(self, mine: str) -> None:
        """Communicates: one short message a rank of the root's mesh.

        Raises:
            RankMismatchError: on every rank, if they don't reduce the same.
        """
        answers = self._backend.exchange(mine)
        if len(set(answers.values())) > 1:
            raise RankMismatchError(
                "ranks use different parameters in this backward, and would mix gradients: "
                + "; ".join(f"rank {rank} reduces {answer}" for rank, answer in answers.items())
                + ". Use them on all ranks, or reduce zeros for those that aren't used (unused='zeros', "
                "set_reduce_scatter_unused_params)"
            )
