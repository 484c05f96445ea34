"""A forward and backward in progress: the one mutable object.

A frame holds the working copies of the units' states while they move, and nothing of the committed state is touched
until `commit` builds the new one. If anything raises, `abort` waits for what is in flight and forgets the rest: the
state that the frame began with is as good as before.

Life of a unit in a frame: `enter` (gather, wait, prefetch the next, attach to autograd, install into the cells),
`leave` (reshard), `before_backward` (gather again, prefetch), `receive` (its gradients are complete: reshard, launch
the reduction), and at the end `settle`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from hsdp_fn import GradPhase, HSDPState, PhaseError, Regrouped, Sync
from hsdp_fn import unit as on_unit
from hsdp_fn.schedule import Log
from hsdp_fn.state import Token

from .backend import ms_backend
from .binding import Binding
from .casting import cast_floating, tensors_in
from .gather import attach, saving
from .reducer import Reducer
from .use import Use


class Frame:
    """One microbatch's forward and backward.

    Args:
        state: where it starts; stays usable until `commit`.
        sync: how far backward reduces gradients.
        anchor: what the loss is differentiated by, so that autograd builds nodes; None for a forward alone.
    """

    def __init__(self, state: HSDPState, sync: Sync, anchor: Tensor | None) -> None:
        self.start, self.layout, self.backend, self.sync = state, state.layout, ms_backend(state), sync
        self.anchor, self.in_backward, self.running = anchor, False, True
        self.log = Log(state.token.journal)
        self.uses = [Use(u, kept=isinstance(u.full, tuple)) for u in state.units]
        self._binding: Binding | None = None
        self._reducer = Reducer(self.layout, self.uses, sync, self.log, self.backend)
        self._begun: set[int] = set()  # units that have begun in the model's present run
        self._last = -1  # the unit that began last
        self._finished: list[int] = []  # units in the order in which they finished
        self._backward: list[int] = []  # units in the order in which backward needs them
        self._guests: list[int] = []  # units that were gathered for a backward in which no node will reshard them

    # -- forward ------------------------------------------------------------------------------------------------

    def bind(self, binding: Binding) -> None:
        """Run the units of a model through this frame until it ends."""
        self._require_running()
        if self._binding is not None and self._binding is not binding:
            raise PhaseError("one value_and_grad call can run one model; this one ran another before")
        binding.connect(self)
        self._binding = binding

    def run(
        self,
        index: int,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        final: bool = True,
    ) -> Any:
        """``call(*args, **kwargs)`` as the forward of a unit whose parameters are installed in its cells.

        Args:
            final: the unit has run afterwards; else further cells of it follow.
        """
        use, policy = self.uses[index], self.layout.units[index].mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((tuple(args), dict(kwargs)), policy.param_dtype)
        self.enter(index)
        use.depth += 1
        try:
            with self._saved_params(index):
                out = call(*args, **kwargs)
        finally:
            use.depth -= 1
        out = out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)
        self._leave(index, out, final)
        return out

    def enter(self, index: int) -> tuple[Tensor, ...]:
        """Full parameters of a unit, attached to autograd and installed in its cells."""
        self._require_running()
        if self.in_backward:
            raise PhaseError(f"unit {self.layout.units[index].title!r} was used in backward, by a hook for instance")
        use = self.uses[index]
        with ms._no_grad():
            full = self._gathered(index)
            for ahead in self._next(index):
                self._start_gather(ahead)
        if self._differentiable and self.layout.units[index].trainable:
            if use.attached is None:
                use.attached = attach(self, index, full)
                use.nodes += 1
            full = use.attached
        if self._binding is not None:
            self._binding.install(index, full)
        return full

    def look(self, index: int) -> tuple[Tensor, ...]:
        """`enter`, for parameters used by name: costs nothing where the unit has been entered and is still there."""
        use = self.uses[index]
        if index in self._begun and isinstance(use.state.full, tuple):
            return self.current(index)
        return self.enter(index)

    def current(self, index: int) -> tuple[Tensor, ...]:
        """What `enter` gave for a unit that is running."""
        attached = self.uses[index].attached
        return self._gathered(index) if attached is None else attached

    def _leave(self, index: int, out: Any, final: bool) -> None:
        """The unit has run: arrange its backward, and free its full parameters if that is how it is handled."""
        if self.uses[index].depth:
            return  # an outer call of the same unit goes on
        if self._differentiable:
            self._watch(index, out)
        if final:
            self._finished.append(index)
            self._reshard_after_forward(index)

    def _watch(self, index: int, out: Any) -> None:
        """Call `before_backward` when gradients reach any of a unit's outputs, once."""
        seen, owner = False, weakref.ref(self)

        def hook(grad: Tensor) -> Tensor:
            nonlocal seen
            frame = owner()
            if not seen and frame is not None:
                seen = True
                with ms._no_grad():
                    frame.before_backward(index)
            return grad

        for tensor in tensors_in(out):
            if tensor._requires_grad:
                tensor.register_hook(hook)

    def _next(self, index: int) -> list[int]:
        """Units to start gathering when this one begins: those that follow in the layout."""
        if index < self._last:
            self._begun.clear()  # the model runs once more
        self._last = index
        self._begun.add(index)
        following = range(index + 1, min(index + 1 + self.layout.prefetch.forward, len(self.uses)))
        return [i for i in following if i not in self._begun]

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Forward has ended: backward needs the units in the reverse of the order in which they finished."""
        self.in_backward = True
        self._backward = list(dict.fromkeys(reversed(self._finished)))

    def before_backward(self, index: int) -> None:
        """Gradients reached the unit's output: its parameters are needed now, the next unit's soon."""
        self._require_running()
        self._release(index)
        self._gathered(index)
        if not self.layout.units[index].trainable:
            self._guests.append(index)
        at = self._backward.index(index) + 1 if index in self._backward else len(self._backward)
        for i in islice(filter(self._reshards, self._backward[at:]), self.layout.prefetch.backward):
            if not self.uses[i].reduced:
                self._start_gather(i)

    def remake(self, index: int, at: int) -> Tensor:
        """A parameter that autograd has saved, gathered again if need be."""
        self._require_running()
        if not isinstance(self.uses[index].state.full, tuple):
            self.before_backward(index)
        return self._gathered(index)[at]

    def receive(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Gradients of one use of the unit; those of the last use launch the reduction."""
        self._require_running()
        use = self.uses[index]
        use.nodes -= 1
        if any(g is not None for g in grads):
            use.add_partial(grads)
        if use.nodes == 0:
            for due in self._reducer.due(index):
                self._reduce(due)

    def settle(self) -> None:
        """The backward has ended: reduce what no node has, and reshard. Every collective of the microbatch has been
        issued then; the last reductions may still be in flight."""
        for index in reversed(range(len(self.uses))):
            use, plan = self.uses[index], self.layout.units[index]
            held = use.state.grads_phase is GradPhase.HELD and not use.reduced
            unused = plan.reduction.unused == "zeros" and not use.reduced and bool(plan.trainable)
            if use.partial is not None or (self.sync is not Sync.NONE and (unused or held)):
                self._reduce(index)
        if self.sync is not Sync.NONE and any(u.reduction.unused == "checked" for u in self.layout.units):
            self._reducer.compare("nothing more")
        self._reducer.advance()
        for index in range(len(self.uses)):
            self._reshard(index)

    # -- end ----------------------------------------------------------------------------------------------------

    def commit(self) -> HSDPState:
        """`settle`, and the new state."""
        self.settle()
        return self._end(micro=1)

    def end_forward(self) -> HSDPState:
        """The state after a forward without backward: gathered is what was so before; the ledger grows."""
        for index, use in enumerate(self.uses):
            if not use.kept:
                self._reshard(index)
        return self._end(micro=0)

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        self.running = False
        for use in self.uses:
            on_unit.drop_flight(use.state, self.backend)
        if self._binding is not None:
            self._binding.disconnect()
        with suppress(Exception):
            self.backend.catch_up()

    def _end(self, *, micro: int) -> HSDPState:
        self.backend.catch_up()
        self.running = False
        if self._binding is not None:
            self._binding.disconnect()
        s, units = self.start, tuple(use.state for use in self.uses)
        ledger, token = s.ledger + tuple(self.log), Token(s.token.journal)
        return HSDPState(units, s.layout, s.backend, s.step, s.micro + micro, ledger, token)

    # -- parts --------------------------------------------------------------------------------------------------

    @property
    def _differentiable(self) -> bool:
        return self.anchor is not None and bool(_pynative_executor.requires_grad())

    def _require_running(self) -> None:
        if not self.running:
            raise PhaseError(
                "this step has ended: its parameters can't be gathered and it can't be differentiated any more; return "
                "what is needed as aux"
            )

    def _reshards(self, index: int) -> bool | int:
        return False if self.uses[index].kept else self.layout.units[index].reshard_after_forward

    def _saved_params(self, index: int) -> Any:
        if self._reshards(index) and self._differentiable:
            return saving(self, index, self.current(index))
        return nullcontext()

    def _start_gather(self, index: int) -> None:
        use = self.uses[index]
        use.state = on_unit.start_gather(use.state, self.layout.units[index], self.backend, self.log)

    def _gathered(self, index: int) -> tuple[Tensor, ...]:
        use = self.uses[index]
        if not isinstance(use.state.full, tuple):
            self._start_gather(index)
            use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backend)
        assert isinstance(use.state.full, tuple)
        return use.state.full

    def _reshard(self, index: int) -> None:
        use, plan = self.uses[index], self.layout.units[index]
        use.state = on_unit.reshard(on_unit.finish_gather(use.state, plan, self.backend))
        use.attached, use.kept = None, False
        if self._binding is not None:
            self._binding.uninstall(index)

    def _reshard_after_forward(self, index: int) -> None:
        """Free the unit, as far as its layout says: to smaller groups, or not at all. A forward alone has no backward
        that would gather over the groups: it reshards wholly."""
        way = self._reshards(index)
        if not way:
            return
        use, plan = self.uses[index], self.layout.units[index]
        unit = use.state
        self._reshard(index)
        if type(way) is int and self.anchor is not None:
            with ms._no_grad():
                use.state = on_unit.reshard_after_forward(unit, plan, self.backend)
            assert isinstance(use.state.full, Regrouped) or use.state.full is None

    def _release(self, index: int) -> None:
        """Reshard what an earlier unit's backward has left gathered."""
        guests, self._guests = self._guests, []
        for other in guests:
            if other == index:
                self._guests.append(other)
            elif self._reshards(other):
                self._reshard(other)

    def _reduce(self, index: int) -> None:
        """Reshard the unit and launch the reduction of what it has received."""
        use = self.uses[index]
        self._reshard(index)
        grads, use.partial = use.partial, None
        self._reducer.launch(index, grads)
