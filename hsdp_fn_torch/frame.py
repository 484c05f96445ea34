"""A forward and backward in progress: the one mutable object.

A frame holds the working copies of the units' states while they move, and nothing of the committed state is touched
until `commit` builds the new one. If anything raises, `abort` waits for what is in flight and forgets the rest: the
state that the frame began with is as good as before.

Life of a unit in a frame: `enter` (gather, wait, prefetch the next, attach to autograd, install into the modules),
`leave` (reshard), `before_backward` (gather again, prefetch), `receive` (its gradients are complete: reshard, launch
the reduction), and at the end `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import Collective, GradientError, GradPhase, HSDPState, PhaseError, Sync, UnitState
from hsdp_fn import unit as on_unit
from hsdp_fn.state import Token

from .backend import torch_backend
from .binding import Binding, Tables
from .casting import cast_floating, tensors_in
from .gather import SavedParams, attach

_NO_HOOKS = nullcontext()


@dataclass(slots=True, eq=False)
class _Use:
    """One unit in this frame.

    Attributes:
        state: the unit's state as it moves.
        kept: it came gathered, and stays so through forward.
        depth: calls of it that are running, one inside the other.
        attached: outputs of its live autograd node, while they are installed or may be again.
        nodes: autograd nodes of the forward whose gradients haven't come.
        packed: saved views of its parameters that backward hasn't asked for yet.
        leaves: what checkpointed parts of it recompute with in backward, and differentiate into.
        partial: gradients so far.
        reduced: they have been handed on.
    """

    state: UnitState
    kept: bool
    depth: int = 0
    attached: tuple[Tensor, ...] | None = None
    nodes: int = 0
    packed: int = 0
    leaves: tuple[Tensor, ...] | None = None
    partial: list[Tensor | None] | None = None
    reduced: bool = False


class Frame:
    """One microbatch's forward and backward.

    Args:
        state: where it starts; stays usable until `commit`.
        sync: how far the gradients are reduced; one for all units, or one each.
        tables: where the modules keep the units' parameters, if not known through `bind`.
        on_backward: called once, when backward begins.
        forward_only: gradients of the units' parameters are refused.
    """

    def __init__(
        self,
        state: HSDPState,
        sync: Sync | Sequence[Sync],
        *,
        tables: Tables | None = None,
        on_backward: Callable[[], None] | None = None,
        forward_only: bool = False,
    ) -> None:
        self.start, self.layout, self.backend = state, state.layout, torch_backend(state)
        self.syncs = (sync,) * len(state.units) if isinstance(sync, Sync) else tuple(sync)
        self.uses = [_Use(u, kept=isinstance(u.full, tuple)) for u in state.units]
        self.log: list[Collective] = []
        self.in_backward = False
        self.anchor = torch.zeros((), requires_grad=True)
        self._on_backward, self._forward_only = on_backward, forward_only
        self._binding = tables
        if tables is not None:
            tables.remember()
        self._pass: set[int] = set()  # units that have begun in this pass through the model
        self._last = -1  # the one that began last
        self._finished: list[int] = []  # units in the order in which they finished forward
        self._again: list[int] = []  # units to gather again, in the order in which backward needs them
        self._place: dict[int, int] = {}  # position there
        self._guests: list[int] = []  # units that were gathered for a backward in which no node will reshard them
        self._in_flight: list[int] = []  # units whose reduction this frame has launched
        self._soon = -1  # saved views left when a quarter of the present unit's backward is done
        self._arrived: set[int] = set()  # units whose gradients are complete but whose turn hasn't come
        self._turns = [
            i for i, u in enumerate(self.layout.units) if u.trainable and u.reduction.unused == "zeros"
        ]  # the last one reduces first
        self._running = True
        self.backend.pool.open()

    # -- forward ------------------------------------------------------------------------------------------------

    def bind(self, binding: Binding) -> None:
        """Run the units of a module through this frame until it ends."""
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
        """``call(*args, **kwargs)`` as the forward of a unit whose parameters are installed in its modules. Not
        ``final``: the unit has further modules to run."""
        use, policy = self.uses[index], self.layout.units[index].mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        full = self.enter(index)
        versions = [(t, t._version) for t in self._bases(index, full)]
        use.depth += 1
        try:
            with self._saved_params(index, full):
                out = call(*args, **kwargs)
        except BaseException:
            if use.depth == 1 and self._reshards(index) and not self.in_backward:
                self._reshard(index)
            raise
        finally:
            use.depth -= 1
        if any(t._version != version for t, version in versions):
            raise RuntimeError(
                f"forward of unit {self.layout.units[index].title!r} modified its gathered parameters in place; they "
                f"are a copy of the masters, so the edit would be lost. Change the masters instead (apply_updates)."
            )
        out = out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)
        self.leave(index, out, final)
        return out

    def enter(self, index: int) -> tuple[Tensor, ...]:
        """Full parameters of a unit, attached to autograd and installed in its modules."""
        self._require_running()
        use = self.uses[index]
        self._release(index)
        full = self._gathered(index)
        if self.in_backward:
            self._prefetch_backward(index)
        else:
            self._prefetch_forward(index)
        if torch.is_grad_enabled() and self.layout.units[index].trainable:
            if use.attached is None:
                use.attached = attach(self, index, full)
                use.nodes += not self.in_backward
            full = use.attached
        if self._binding is not None:
            self._binding.install(index, full)
        return full

    def look(self, index: int) -> tuple[Tensor, ...]:
        """`enter`, for parameters used by name: costs nothing where the unit has been entered and is still there."""
        use = self.uses[index]
        here = index in self._pass and isinstance(use.state.full, tuple)
        if here and (use.attached is not None or not torch.is_grad_enabled()):
            return self.current(index)
        return self.enter(index)

    def current(self, index: int) -> tuple[Tensor, ...]:
        """What `enter` gave for a unit that is running."""
        return self.uses[index].attached or self._gathered(index)

    def leave(self, index: int, out: Any, final: bool) -> None:
        """The unit has run: arrange its backward, and free its full parameters if the layout says so."""
        if self.uses[index].depth:
            return  # an outer call of the same unit goes on
        if self.in_backward:  # recomputed: its backward follows at once
            self._install_leaves(index)
            return
        if torch.is_grad_enabled():
            self._watch(index, out)
        if final:
            self._finished.append(index)
            if self._reshards(index):
                self._reshard(index)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Differentiate; units are gathered again and their gradients reduced on the way."""
        self.begin_backward()
        torch.autograd.backward(loss)

    @property
    def has_graph(self) -> bool:
        """Whether some forward was differentiable, so that a backward may come."""
        return any(use.nodes > 0 for use in self.uses)

    def begin_backward(self) -> None:
        """Plan the order in which backward will need the units. The first sign of backward calls it, if nobody has."""
        if self.in_backward:
            return
        self.in_backward = True
        self._again = list(dict.fromkeys(i for i in reversed(self._finished) if self._reshards(i)))
        self._place = {index: at for at, index in enumerate(self._again)}
        for index, use in enumerate(self.uses):
            if use.attached is not None and use.leaves is None:
                self._install_leaves(index)
        if self._on_backward is not None:
            self._on_backward()

    def before_backward(self, index: int) -> None:
        """Gradients reached the unit's output: its parameters are needed now, the next unit's soon."""
        self._require_running()
        self._release(index)
        if not self.in_backward:
            if self._on_backward is None:  # a backward inside forward (a gradient penalty): gather, and no more
                self._gathered(index)
                self._guests.append(index)
                return
            self.begin_backward()
        use, plan = self.uses[index], self.layout.units[index]
        self._gathered(index)
        if use.leaves is None:
            self._install_leaves(index)
        # On CPU, a quarter into this unit's backward the reduction of the one before has had time to run: its input is
        # freed before this unit's gradients are all there (guarded by test_torch_memory.py). On a device waiting here
        # would hold up the stream.
        self._soon = use.packed * 3 // 4 if self.backend.device.type == "cpu" else -1
        if not plan.trainable:
            self._guests.append(index)
        self._prefetch_backward(index)
        self.backend.pool.trim()

    def remake(self, index: int, at: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A saved view of the unit's parameters, gathered again if need be."""
        use = self.uses[index]
        if not isinstance(use.state.full, tuple):
            self.before_backward(index)
        use.packed -= 1
        if self._in_flight and use.packed == self._soon:
            self._advance()
            self.backend.pool.trim()
        return self._gathered(index)[at].as_strided(size, stride, offset)

    def receive(self, index: int, grads: Sequence[Tensor | None], *, counted: bool) -> None:
        """Gradients of one use of the unit; the last use's launch the reduction."""
        self._require_running()
        plan = self.layout.units[index]
        if self._forward_only:
            raise PhaseError("a backward inside evaluate() reached the parameters; use value_and_grad for gradients")
        for spec, grad in zip(plan.params, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise GradientError(f"the gradient of {spec.name!r} is {grad.layout}; only dense ones can be reduced")
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"unit {plan.title!r}: backward with create_graph=True can't go through gathered "
                f"parameters; use differentiable_unshard for higher-order gradients"
            )
        if self._on_backward is not None:
            self.begin_backward()
        self._add_partial(index, grads)
        use = self.uses[index]
        use.nodes -= counted
        if use.nodes <= 0:
            self._complete(index)

    # -- end ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Between forward and backward: the modules have their own parameters back."""
        if self._binding is not None:
            for index in range(len(self.uses)):
                self._binding.uninstall(index)

    def commit(self) -> HSDPState:
        """Finish what is left and build the new state. Every collective of the microbatch has been issued then; the
        last reductions may still be in flight."""
        for index in reversed(range(len(self.uses))):
            use, plan = self.uses[index], self.layout.units[index]
            self._collect_leaves(index)
            held = use.state.grads_phase is GradPhase.HELD and not use.reduced
            unused = plan.reduction.unused == "zeros" and not use.reduced and bool(plan.trainable)
            if use.partial is not None or (self.syncs[index] is not Sync.NONE and (unused or held)):
                self._reduce(index)
        self._advance()
        self._end(keep=False)
        return self._state(self.start.micro + 1)

    def commit_forward(self) -> HSDPState:
        """The state after a forward without backward: gathered is what was gathered before; the ledger grows."""
        self._end(keep=True)
        return self._state(self.start.micro)

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        try:
            for use in self.uses:
                on_unit.drop_flight(use.state, self.backend)
        finally:
            self._disconnect()
            self.uses = [_Use(u, kept=True) for u in self.start.units]

    # -- parts --------------------------------------------------------------------------------------------------

    def _require_running(self) -> None:
        if not self._running:
            raise PhaseError(
                "this call of value_and_grad or evaluate has ended: its parameters can't be gathered and its graph "
                "can't be differentiated any more. Return what is needed as aux, detached"
            )

    def _release(self, index: int) -> None:
        """Reshard what an earlier unit's backward has left gathered."""
        guests, self._guests = self._guests, []
        for other in guests:
            if other == index or self.uses[other].depth:
                self._guests.append(other)
            elif self._reshards(other):
                self._reshard(other)

    def _gathered(self, index: int) -> tuple[Tensor, ...]:
        use = self.uses[index]
        if not isinstance(use.state.full, tuple):
            self._start_gather(index)
            use.state = on_unit.finish_gather(use.state, self.layout.units[index], self.backend)
        assert isinstance(use.state.full, tuple)
        return use.state.full

    def _start_gather(self, index: int) -> None:
        use = self.uses[index]
        use.state = on_unit.start_gather(use.state, self.layout.units[index], self.backend, self.log)

    def _prefetch_forward(self, index: int) -> None:
        if index < self._last:
            self._pass.clear()  # another pass through the model
        self._last = index
        self._pass.add(index)
        for ahead in range(index + 1, min(index + 1 + self.layout.prefetch.forward, len(self.uses))):
            if ahead not in self._pass:
                self._start_gather(ahead)

    def _prefetch_backward(self, index: int) -> None:
        first = self._place.get(index, -1) + 1
        for ahead in self._again[first : first + self.layout.prefetch.backward]:
            if not self.uses[ahead].reduced:
                self._start_gather(ahead)

    def _reshards(self, index: int) -> bool:
        return self.layout.units[index].reshard_after_forward and not self.uses[index].kept

    def _saved_params(self, index: int, full: Sequence[Tensor]) -> Any:
        if self._reshards(index) and torch.is_grad_enabled():
            return SavedParams(self, index, self._bases(index, full))
        return _NO_HOOKS

    def _bases(self, index: int, full: Sequence[Tensor]) -> list[Tensor]:
        """One parameter a bucket: a bucket's full parameters are views of one buffer."""
        return [full[b.params.members[0].index] for b in self.layout.units[index].buckets]

    def _watch(self, index: int, out: Any) -> None:
        """Call `before_backward` when gradients reach any of the outputs. A node's hook survives in-place edits of the
        output; where even that is lost (edited views), `remake` still gathers in time."""
        called = False

        def hook(_: Any) -> None:
            nonlocal called
            if not called:
                called = True
                self.before_backward(index)

        for tensor in tensors_in(out):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(hook)

    def _install_leaves(self, index: int) -> None:
        """What checkpointed parts of a unit recompute with, and differentiate into. Leaves, so that such a nested
        backward doesn't run the unit's node before its time."""
        if self._binding is None:
            return
        self._collect_leaves(index)
        leaves = self._gathered(index)
        if self.uses[index].kept:  # the state that came in has these
            leaves = tuple([t.detach() for t in leaves])
        for tensor, spec in zip(leaves, self.layout.units[index].params, strict=True):
            tensor.grad = None
            tensor.requires_grad_(spec.requires_grad)
        self.uses[index].leaves = leaves
        self._binding.install(index, leaves)

    def _collect_leaves(self, index: int) -> None:
        use = self.uses[index]
        if use.leaves is not None:
            grads = [t.grad for t in use.leaves]
            use.leaves = None
            if any(g is not None for g in grads):
                self._add_partial(index, grads)

    def _add_partial(self, index: int, grads: Sequence[Tensor | None]) -> None:
        use = self.uses[index]
        if use.partial is None:
            use.partial = list(grads)
        else:
            pairs = zip(use.partial, grads, strict=True)
            use.partial = [g if o is None else o if g is None else o + g for o, g in pairs]

    def _reshard(self, index: int) -> None:
        use, plan = self.uses[index], self.layout.units[index]
        use.state = on_unit.reshard(on_unit.finish_gather(use.state, plan, self.backend))
        use.attached = use.leaves = None
        if self._binding is not None:
            self._binding.uninstall(index)

    def _complete(self, index: int) -> None:
        """Reduce the unit: at once, or, where ranks may use different units, in the one order that all ranks share."""
        if self.layout.units[index].reduction.unused != "zeros":
            self._reduce(index)
            return
        self._arrived.add(index)
        while self._turns and self._turns[-1] in self._arrived:
            self._reduce(self._turns.pop())

    def _reduce(self, index: int) -> None:
        """Reshard the unit and launch the reduction of what it has received."""
        self._collect_leaves(index)
        self._reshard(index)
        self._advance()
        use, plan = self.uses[index], self.layout.units[index]
        grads, use.partial = use.partial, None
        unit = on_unit.finish_reduce(use.state, plan, self.backend, self.log)
        use.state = on_unit.start_reduce(unit, plan, self.backend, grads, self.syncs[index], self.log)
        use.reduced = True
        if use.state.reducing is not None:
            self._in_flight.append(index)

    def _advance(self) -> None:
        """Take the frame's reductions in flight one step further; their inputs are freed before the next one packs."""
        for index in self._in_flight:
            use, plan = self.uses[index], self.layout.units[index]
            use.state = on_unit.advance_reduce(use.state, plan, self.backend, self.log, donate=True)
        self._in_flight = [i for i in self._in_flight if self.uses[i].state.reducing is not None]

    def _end(self, *, keep: bool) -> None:
        """Leave the modules and reshard everything, except, if asked to ``keep`` them, what came gathered."""
        self._disconnect()
        for use, plan in zip(self.uses, self.layout.units, strict=True):
            use.attached = use.leaves = None
            if not (keep and use.kept):
                use.state = on_unit.reshard(on_unit.finish_gather(use.state, plan, self.backend))

    def _disconnect(self) -> None:
        if self._running:
            self._running = False
            self.backend.pool.close()
        if self._binding is not None:
            self._binding.disconnect()
            self._binding = None

    def _state(self, micro: int) -> HSDPState:
        s, units = self.start, tuple(use.state for use in self.uses)
        return HSDPState(units, s.layout, s.backend, s.step, micro, s.ledger + tuple(self.log), Token())
