"""Forwards and backwards in progress: the one mutable object.

A frame holds the working copies of the units' states while they move, and nothing of the committed state is touched
until a new one is built from them. If anything raises, `abort` waits for what is in flight and forgets the rest: the
state that the frame began with is as good as before.

Life of a unit in a frame: `enter` (gather, wait, prefetch the next, attach to autograd, install into the cells),
`leave` (reshard), `before_backward` (gather again, prefetch), `receive` (its gradients are complete: reshard, launch
the reduction), and at the end `settle`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from hsdp_fn import GradPhase, HSDPState, PhaseError, ReductionPolicy, Sync
from hsdp_fn import unit as on_unit
from hsdp_fn.handling import Handling, handled
from hsdp_fn.order import Order
from hsdp_fn.reducer import Reducer
from hsdp_fn.schedule import Log
from hsdp_fn.state import Token

from .backend import MSBackend, ms_backend
from .binding import Binding, Tables
from .casting import cast_floating, tensors_in
from .gather import attach, saving
from .use import Pass, Use


class Frame:
    """Units of a model, as they move.

    Args:
        state: where it starts; stays usable until a new one is taken from the frame.
        handling: how each unit is treated.
        backends: what each unit communicates with, if not the state's backend.
        tables: where the cells keep their parameters, if not known through `bind`.
        followers: see `hsdp_fn.order.Order`.
        on_backward: called at the first sign of a backward. None: `begin_backward` is called instead.

    Attributes:
        now: the forward that is running.
        reached: the unit that backward came to last.
    """

    def __init__(
        self,
        state: HSDPState,
        handling: Sequence[Handling],
        *,
        backends: Sequence[MSBackend] | None = None,
        tables: Tables | None = None,
        followers: dict[int, int] | None = None,
        on_backward: Callable[[], None] | None = None,
    ) -> None:
        self.start, self.layout, self.backend, self.handling = state, state.layout, ms_backend(state), handling
        self.backends = list(backends) if backends is not None else [self.backend] * len(state.units)
        self.in_backward, self.running = False, True
        self.now: Pass | None = None
        self.reached: int | None = None
        self.log = Log(state.token.journal)
        self.uses = [Use(u, kept=isinstance(u.full, tuple)) for u in state.units]
        self.order = Order(state.layout, handling, followers)
        self._tables, self._on_backward = tables, on_backward
        self._reducer = Reducer(state.layout, self.uses, handling, self.backends, self.log, self.backend)
        self._guests: list[int] = []  # units that were gathered for a backward in which no node will reshard them
        self._epoch = 0  # how often parameters have changed
        self._received = False  # the present backward has brought gradients

    # -- forward ------------------------------------------------------------------------------------------------

    def bind(self, binding: Binding) -> None:
        """Run the units of a model through this frame until it ends."""
        self._require_running()
        if self._tables is not None and self._tables is not binding:
            raise PhaseError("one value_and_grad call can run one model; this one ran another before")
        binding.connect(self)
        self._tables = binding

    def begin_pass(self) -> Pass:
        """An outermost forward begins. Its units have autograd nodes of their own."""
        for use in self.uses:
            use.attached = None
        self.now = Pass(self.order.now, self._epoch)
        return self.now

    def end_pass(self, *, whole: bool) -> None:
        """It has returned. The cells have their own parameters back, except where full ones were gathered by hand.

        Args:
            whole: it was the root's.
        """
        without_graph = self._over()
        self.order.end_pass(whole=whole)
        for index, use in enumerate(self.uses):
            if without_graph and not use.kept:
                self.reshard(index)
            if not use.held:
                self._uninstall(index)

    def run(
        self,
        index: int,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        final: Callable[[], bool] = lambda: True,
    ) -> Any:
        """``call(*args, **kwargs)`` as the forward of a unit whose parameters are installed in its cells.

        Args:
            final: asked when it has run: whether the unit has, or further cells of it follow.
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
        self._leave(index, out, final())
        return out

    def enter(self, index: int) -> tuple[Tensor, ...]:
        """Full parameters of a unit, attached to autograd and installed in its cells."""
        self._require_running()
        if self.in_backward:
            raise PhaseError(f"unit {self.layout.units[index].title!r} was used in backward, by a hook for instance")
        with ms._no_grad():
            self._gathered(index)
            self._prefetch(self.order.begin(index))
        full = self._attached(index)
        if self._tables is not None:
            self._tables.install(index, full)
        return full

    def look(self, index: int) -> tuple[Tensor, ...]:
        """`enter`, for parameters used by name: costs nothing where the unit has been entered and is still there."""
        use = self.uses[index]
        if index in self.order.begun and isinstance(use.state.full, tuple):
            return self.current(index)
        return self.enter(index)

    def current(self, index: int) -> tuple[Tensor, ...]:
        """What `enter` gave for a unit that is running."""
        attached = self.uses[index].attached
        return self._gathered(index) if attached is None else attached

    def complete(self, index: int) -> None:
        """A unit of which only some cells ran has run."""
        self.order.finish(index)
        self._reshard_after_forward(index)

    def start_unshard(self, index: int) -> None:
        """Start gathering a unit by hand."""
        self._require_running()
        self.uses[index].kept = True
        self._start_gather(index)

    def hold(self, index: int) -> None:
        """Gather a unit by hand and leave it installed, attached to autograd if a pass runs."""
        self._require_running()
        with ms._no_grad():
            self._gathered(index)
        use = self.uses[index]
        use.kept = use.held = True
        if self._tables is not None:
            self._tables.install(index, self._attached(index))

    # -- backward -----------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether a backward has brought gradients and hasn't ended. (MindSpore doesn't tell whether it still runs.)"""
        return self.in_backward and self._received

    def begin_backward(self) -> None:
        """A backward begins."""
        if not self.in_backward:
            if self._on_backward is not None:
                self._on_backward()
            self.in_backward, self._received = True, False
            self._reducer.begin(self.layout)

    def before_backward(self, index: int, came: Pass) -> None:
        """Gradients reached the unit's output of a pass: its parameters are needed now, the next unit's soon."""
        self._require_running()
        self._require_fresh(index, came)
        self._release(index)
        way = self.handling[index]
        if self._on_backward is not None:
            if self.now is not None:  # a gradient inside forward: gather, and no more
                self._gathered(index)
                self._guests.append(index)
                return
            self.begin_backward()
        self.order.reach(came.number)
        self.reached = index
        if way.reshard_after_forward and way.unshard_in_backward:  # else autograd has saved what it needs, or asks
            self._gathered(index)
        if not self.layout.units[index].trainable:
            self._guests.append(index)
        self._prefetch(self.order.before(index, came.number, self.uses))

    def remake(self, index: int, came: Pass, at: int) -> Tensor:
        """A parameter that autograd has saved, gathered again if need be."""
        self._require_running()
        self._require_fresh(index, came)
        if not isinstance(self.uses[index].state.full, tuple):
            self.before_backward(index, came)
        return self._gathered(index)[at]

    def receive(self, index: int, came: Pass, grads: Sequence[Tensor | None]) -> None:
        """Gradients of one use of the unit; those of the last use in its pass launch the reduction."""
        self._require_running()
        self._require_fresh(index, came)
        if self._on_backward is not None:
            if self.now is not None:
                raise PhaseError("a backward inside forward reached the parameters; run it after the forward")
            self.begin_backward()
        self._received = True
        if any(g is not None for g in grads):
            self.uses[index].add_partial(grads)
        if came.reach_node(index):
            for due in self._reducer.due(index):
                self._reduce(due)

    def stop(self) -> None:
        """The present backward has stopped before its end."""
        self.in_backward = self._received = True

    def start_sweep(self) -> None:
        """`settle` follows without a backward: what is held back is to be reduced."""
        self._reducer.begin(self.layout)

    def settle(self) -> None:
        """A backward has ended: reduce what no node has, and reshard. Every collective of the microbatch has been
        issued then; the last reductions may still be in flight."""
        for index in reversed(range(len(self.uses))):
            use, plan = self.uses[index], self.layout.units[index]
            held = use.state.grads_phase is GradPhase.HELD and not use.reduced
            unused = plan.reduction.unused == "zeros" and not use.reduced and bool(plan.trainable)
            if use.partial is not None or (self.handling[index].sync is not Sync.NONE and (unused or held)):
                self._reduce(index)
        checked = any(u.reduction.unused == "checked" for u in self.layout.units)
        if checked and any(way.sync is not Sync.NONE for way in self.handling):
            self._reducer.compare("nothing more")
        self._reducer.advance()
        self.order.end_backward()
        for index, use in enumerate(self.uses):
            if self.handling[index].reshard_after_backward:
                self.reshard(index)
            else:
                use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backends[index])
                use.kept, use.held = isinstance(use.state.full, tuple), False
                self._uninstall(index)
            use.reduced = False
        self._guests.clear()
        self.in_backward = self._received = False

    # -- the state ----------------------------------------------------------------------------------------------

    def commit(self) -> HSDPState:
        """`settle`, and the new state."""
        self.settle()
        return self._end(micro=1)

    def end_forward(self) -> HSDPState:
        """The state after a forward without backward: gathered is what was so before; the ledger grows."""
        for index, use in enumerate(self.uses):
            if not use.kept:
                self.reshard(index)
        return self._end(micro=0)

    def snapshot(self, *, micro: int = 0) -> HSDPState:
        """The units as they stand, ``micro`` microbatches on."""
        s, units = self.start, tuple([use.state for use in self.uses])
        ledger, token = s.ledger + tuple(self.log), Token(s.token.journal)
        return HSDPState(units, self.layout, s.backend, s.step, s.micro + micro, ledger, token)

    def resume(self, state: HSDPState) -> None:
        """Go on from a state of the same layout, in which gathered is what the frame has kept."""
        for use, unit in zip(self.uses, state.units, strict=True):
            use.state = unit
        self.start = state
        self.log.clear()

    def outdate(self) -> None:
        """Parameters have changed: what was gathered of them is worth nothing, and graphs made with them can't be
        differentiated any more."""
        self._epoch += 1
        for index in range(len(self.uses)):
            self.reshard(index)

    def reshard(self, index: int) -> None:
        """Free a unit's full parameters; its cells have their own back."""
        use, plan = self.uses[index], self.layout.units[index]
        use.state = on_unit.reshard(on_unit.finish_gather(use.state, plan, self.backends[index]))
        use.kept = use.held = False
        self._uninstall(index)

    def follow(self, reductions: Sequence[ReductionPolicy]) -> None:
        """Reduce like this from now on, one policy a unit, and let the layout say how units are handled."""
        self.layout = handled(self.layout, reductions, self.handling)

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        self.running = False
        self._over()
        for use, backend in zip(self.uses, self.backends, strict=True):
            on_unit.drop_flight(use.state, backend)
        if self._tables is not None:
            self._tables.disconnect()
        with suppress(Exception):
            self.backend.catch_up()

    def _end(self, *, micro: int) -> HSDPState:
        self.backend.catch_up()
        self.running = False
        self._over()
        if self._tables is not None:
            self._tables.disconnect()
        return self.snapshot(micro=micro)

    # -- parts --------------------------------------------------------------------------------------------------

    @property
    def _differentiable(self) -> bool:
        return self.now is not None and self.now.anchor is not None and bool(_pynative_executor.requires_grad())

    def _over(self) -> bool:
        """The pass has ended; whether it was one without gradients. From here on only its graph refers to it."""
        came, self.now = self.now, None
        without = came is None or came.anchor is None
        if came is not None:
            came.anchor = None
        return without

    def _require_running(self) -> None:
        if not self.running:
            raise PhaseError(
                "this step has ended: its parameters can't be gathered and it can't be differentiated any more; return "
                "what is needed as aux"
            )

    def _require_fresh(self, index: int, came: Pass) -> None:
        if came.epoch != self._epoch:
            raise PhaseError(
                f"parameters of unit {self.layout.units[index].title!r} have changed since the forward of this graph, "
                f"by an optimizer's step for instance; its gradients would mix old values with new ones. Run backward "
                f"before the step, or forward again"
            )

    def _attached(self, index: int) -> tuple[Tensor, ...]:
        """A unit's full parameters as the cells are to have them: outputs of an autograd node, if one is needed."""
        use = self.uses[index]
        if self._differentiable and self.layout.units[index].trainable and use.attached is None:
            assert self.now is not None
            use.attached = attach(self, self.now, index, self._gathered(index))
            self.now.add_node(index)
        return self.current(index)

    def _leave(self, index: int, out: Any, final: bool) -> None:
        """The unit has run: arrange its backward, and free its full parameters if that is how it is handled."""
        if self.uses[index].depth:
            return  # an outer call of the same unit goes on
        if self._differentiable:
            self._watch(index, out)
        if final:
            self.order.finish(index)
            self._reshard_after_forward(index)

    def _watch(self, index: int, out: Any) -> None:
        """Call `before_backward` when gradients reach any of a unit's outputs, once in a backward."""
        assert self.now is not None
        seen, owner, came = False, weakref.ref(self), self.now

        def hook(grad: Tensor) -> Tensor:
            nonlocal seen
            frame = owner()
            if frame is not None and not (seen and frame.in_backward):
                seen = True
                with ms._no_grad():
                    frame.before_backward(index, came)
            return grad

        for tensor in tensors_in(out):
            if tensor._requires_grad and not tensor._is_leaf:  # a leaf was made by no unit
                tensor.register_hook(hook)

    def _saved_params(self, index: int) -> Any:
        if self.handling[index].reshard_after_forward and self._differentiable:
            assert self.now is not None
            return saving(self, self.now, index, self.current(index))
        return nullcontext()

    def _prefetch(self, ahead: Iterable[int]) -> None:
        for index in ahead:
            self._start_gather(index)

    def _start_gather(self, index: int) -> None:
        use = self.uses[index]
        use.state = on_unit.start_gather(use.state, self.layout.units[index], self.backends[index], self.log)

    def _gathered(self, index: int) -> tuple[Tensor, ...]:
        use = self.uses[index]
        if not isinstance(use.state.full, tuple):
            self._start_gather(index)
            use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backends[index])
        assert isinstance(use.state.full, tuple)
        return use.state.full

    def _uninstall(self, index: int) -> None:
        self.uses[index].attached = None
        if self._tables is not None:
            self._tables.uninstall(index)

    def _reshard_after_forward(self, index: int) -> None:
        """Free the unit, as far as its handling says: to smaller groups, or not at all. A forward alone has no backward
        that would gather over the groups: it reshards wholly."""
        way = self.handling[index].reshard_after_forward
        if not way:
            return
        use, plan = self.uses[index], self.layout.units[index]
        unit = use.state
        self.reshard(index)
        if type(way) is int and self._differentiable:
            with ms._no_grad():
                use.state = on_unit.reshard_after_forward(unit, plan, self.backends[index])

    def _release(self, index: int) -> None:
        """Reshard what an earlier unit's backward has left gathered."""
        guests, self._guests = self._guests, []
        for other in guests:
            if other == index or self.uses[other].depth:
                self._guests.append(other)
            elif self.handling[other].reshard_after_forward and self.handling[other].reshard_after_backward:
                self.reshard(other)

    def _reduce(self, index: int) -> None:
        """Reshard the unit and launch the reduction of what it has received."""
        use = self.uses[index]
        if self.handling[index].reshard_after_backward:
            self.reshard(index)
        grads, use.partial = use.partial, None
        self._reducer.launch(index, grads)
