"""The working copies of a state's units while a frame runs: gathered, resharded, made into a state again. `frame` says
when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import HSDPState, PhaseError
from hsdp_fn import unit as on_unit
from hsdp_fn.order import Order
from hsdp_fn.schedule import Log
from hsdp_fn.state import Token

from .backend import TorchBackend, torch_backend
from .binding import Tables
from .dtensor import presented
from .use import Handling, Use


class Units:
    """All units of a layout, as they move.

    Args:
        state: where they start.
        handling: how each is treated.
        backends: what each communicates with, if not the state's backend.
        tables: where the modules keep their parameters, if not known through `bind`.
        followers: see `Order`.
        on_wake: called when a graph is used while they rest; whether it may go on.
    """

    def __init__(
        self,
        state: HSDPState,
        handling: Sequence[Handling],
        backends: Sequence[TorchBackend] | None,
        tables: Tables | None,
        followers: dict[int, int] | None,
        on_wake: Callable[[Any], bool] | None,
    ) -> None:
        self.layout, self.backend, self.handling = state.layout, torch_backend(state), handling
        self.backends = list(backends) if backends is not None else [self.backend] * len(state.units)
        self.uses = [Use(u, kept=isinstance(u.full, tuple)) for u in state.units]
        self.log = Log(state.token.journal)
        self.order = Order(state.layout, handling, followers)
        self.running = False
        self._tables, self._binding, self._on_wake = tables, tables, on_wake
        self._begin(state)

    def reshard(self, index: int) -> None:
        """Free a unit's full parameters; its modules have their own back."""
        use, plan = self.uses[index], self.layout.units[index]
        use.state = on_unit.reshard(on_unit.finish_gather(use.state, plan, self.backends[index]))
        use.attached = use.leaves = None
        use.kept = use.held = use.over = False
        if self._binding is not None:
            self._binding.uninstall(index)

    def reshard_after_forward(self, index: int) -> None:
        """`reshard`, as far as the unit's handling says: to smaller groups, or not at all. A forward without gradients
        has no backward that would gather over the groups: it reshards wholly."""
        way = self.handling[index].reshard_after_forward
        if type(way) is not int or not torch.is_grad_enabled():
            if way:
                self.reshard(index)
            return
        use, plan, backend = self.uses[index], self.layout.units[index], self.backends[index]
        unit = on_unit.finish_gather(use.state, plan, backend)
        self.reshard(index)
        use.state = on_unit.reshard_after_forward(unit, plan, backend)

    def outdate(self, indices: Iterable[int]) -> None:
        """Parameters of these units have changed: what was gathered of them is worth nothing, and graphs made with them
        can't be differentiated any more."""
        for index in indices:
            self.uses[index].epoch += 1
            self.reshard(index)

    def rest(self, *, micro: int = 0) -> HSDPState:
        """The state as it stands, ``micro`` microbatches on. The modules have their own parameters back."""
        for index, use in enumerate(self.uses):
            use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backends[index])
            use.attached = use.leaves = None
        self._disconnect()
        return self.snapshot(micro=micro)

    def snapshot(self, *, micro: int = 0) -> HSDPState:
        """The units as they stand, ``micro`` microbatches on."""
        s, units = self.start, tuple(use.state for use in self.uses)
        ledger, token = s.ledger + tuple(self.log), Token(s.token.journal)
        return HSDPState(units, self.layout, s.backend, s.step, s.micro + micro, ledger, token)

    def resume(self, state: HSDPState) -> None:
        """Go on from a state of the same layout: after `rest`, or when `settle` has ended one backward of several."""
        for use, unit in zip(self.uses, state.units, strict=True):
            use.state, use.kept = unit, isinstance(unit.full, tuple)
        self.log.clear()
        self._begin(state)

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        self._on_wake = None
        try:
            for use, backend in zip(self.uses, self.backends, strict=True):
                on_unit.drop_flight(use.state, backend)
        finally:
            self._disconnect()
            self.uses[:] = [Use(u, kept=True) for u in self.start.units]

    def _begin(self, state: HSDPState) -> None:
        self.start = state
        if not self.running:
            self.running = True
            self._pool = self.backend.pool
            self._pool.open()
            self._binding = self._tables
            if self._tables is not None:
                self._tables.remember()

    def _disconnect(self) -> None:
        if self.running:
            self.running = False
            self._pool.close()
        if self._binding is not None:
            self._binding.disconnect()
            self._binding = None

    def _require_running(self) -> None:
        if not self.running and not (self._on_wake is not None and self._on_wake(self)):
            raise PhaseError(
                "the iteration of this graph has ended: its parameters can't be gathered and it can't be "
                "differentiated any more. Either it was dropped after an error, or parameters were replaced, frozen or "
                "unfrozen since, or the call of value_and_grad or evaluate has returned (return what is needed as aux, "
                "detached)"
            )

    def _require_epoch(self, index: int, epoch: int) -> None:
        if self.uses[index].epoch != epoch:
            raise PhaseError(
                f"parameters of unit {self.layout.units[index].title!r} have changed since the forward of this graph, "
                f"by an optimizer's step for instance; its gradients would mix old values with new ones. Run backward "
                f"before the step, or forward again"
            )

    def _gathered(self, index: int) -> tuple[Tensor, ...]:
        use = self.uses[index]
        if not isinstance(use.state.full, tuple):
            self._start_gather(index)
            use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backends[index])
        assert isinstance(use.state.full, tuple)
        return use.state.full

    def _start_gather(self, index: int) -> None:
        use = self.uses[index]
        use.state = on_unit.start_gather(use.state, self.layout.units[index], self.backends[index], self.log)

    def presented(self, index: int) -> Sequence[Tensor]:
        """A unit's full parameters as its modules have them, without autograd."""
        full, standings = self._gathered(index), self.handling[index].standings
        return full if standings is None else presented(standings, full)

    def _bases(self, index: int) -> list[Tensor]:
        """One parameter a bucket: a bucket's full parameters are views of one buffer."""
        full = self._gathered(index)
        return [full[b.params.members[0].index] for b in self.layout.units[index].buckets]
