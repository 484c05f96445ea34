"""Reductions of one backward: in which order they start, and how many are in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspore import Tensor

from hsdp_fn import Layout, RankMismatchError, Sync
from hsdp_fn import unit as on_unit
from hsdp_fn.schedule import Log

from .backend import MSBackend
from .use import Use


class Reducer:
    """Starts the reductions of a frame's units and moves them on, one in flight beside the newest.

    Args:
        layout: the units; ``uses``: one a unit.
        sync: how far to reduce.
        log: collects the collectives issued.
    """

    def __init__(self, layout: Layout, uses: list[Use], sync: Sync, log: Log, backend: MSBackend) -> None:
        self._layout, self._uses, self._sync, self._log, self._backend = layout, uses, sync, log, backend
        self._flight: list[int] = []  # units whose reduction was launched and isn't finished, oldest first
        self._arrived: set[int] = set()  # units whose gradients are complete but whose turn hasn't come
        # Units that reduce in one order on all ranks; the last one is next.
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
        self.advance()
        use, plan = self._uses[index], self._layout.units[index]
        if index in self._flight:
            self._flight.remove(index)
        unit = on_unit.finish_reduce(use.state, plan, self._backend, self._log)
        if plan.reduction.unused == "checked" and self._sync is not Sync.NONE:
            used = [p.name for p, g in zip(plan.params, grads or (), strict=False) if g is not None]
            self.compare(f"unit {plan.title!r} with gradients of {used}")
        use.state = on_unit.start_reduce(unit, plan, self._backend, grads, self._sync, self._log)
        use.reduced = True
        if use.state.reducing is not None:
            self._flight.append(index)

    def advance(self) -> None:
        """Take the reductions in flight one step further; their inputs are freed before the next one packs."""
        for index in self._flight:
            use, plan = self._uses[index], self._layout.units[index]
            use.state = on_unit.advance_reduce(use.state, plan, self._backend, self._log, donate=True)
        self._flight = [i for i in self._flight if self._uses[i].state.reducing is not None]

    def compare(self, mine: str) -> None:
        """Communicates: one short message a rank of the backend's mesh.

        Raises:
            RankMismatchError: on every rank, if they don't reduce the same.
        """
        answers = self._backend.exchange(mine)
        if len(set(answers.values())) > 1:
            raise RankMismatchError(
                "ranks use different parameters in this backward, and would mix gradients: "
                + "; ".join(f"rank {rank} reduces {answer}" for rank, answer in answers.items())
                + ". Use them on all ranks, or reduce zeros for those that aren't used (unused='zeros')"
            )
