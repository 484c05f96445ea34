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
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import Collective, GradPhase, HSDPState, Sync, UnitState
from hsdp_fn import unit as on_unit
from hsdp_fn.state import Token

from .backend import TorchBackend
from .binding import Binding
from .casting import cast_floating, tensors_in
from .gather import SavedParams, attach

_NO_HOOKS = nullcontext()


class Frame:
    """One microbatch's forward and backward.

    Args:
        state: where it starts; stays usable until `commit`.
        sync: how far the gradients are reduced.
    """

    def __init__(self, state: HSDPState, sync: Sync) -> None:
        assert isinstance(state.backend, TorchBackend), f"a state of {state.backend.name} can't run torch modules"
        self.layout, self.backend, self.sync = state.layout, state.backend, sync
        self.start = state
        self.units: list[UnitState] = list(state.units)
        self.log: list[Collective] = []
        self.in_backward = False
        self.anchor = torch.zeros((), requires_grad=True)
        count = len(self.units)
        # Units that the state brings along gathered stay so through forward.
        self._kept = [isinstance(u.full, tuple) for u in state.units]
        self.packed = [0] * count  # saved views of each unit's parameters; `gather` counts them up
        self._attached: list[tuple[Tensor, ...] | None] = [None] * count  # outputs of the live autograd node
        self._leaves: list[tuple[Tensor, ...] | None] = [None] * count  # installed for recomputation in backward
        self._nodes = [0] * count  # autograd nodes of the forward whose gradients haven't come
        self._partial: list[list[Tensor | None] | None] = [None] * count  # gradients so far
        self._reduced = [False] * count
        self._depth = [0] * count
        self._order: list[int] = []  # units in the order in which they finished forward
        self._seen: set[int] = set()  # units that have begun forward in this pass
        self._last = -1  # the one that began last
        self._backward_order: list[int] = []  # units to gather again
        self._place: dict[int, int] = {}  # position there
        self._frozen: list[int] = []  # units without trainable parameters, gathered again in backward
        self._in_flight: list[int] = []
        self._half = -1
        self._binding: Binding | None = None

    # -- forward ------------------------------------------------------------------------------------------------

    def bind(self, binding: Binding) -> None:
        """Run the units of a module through this frame until it ends."""
        if self._binding is not None and self._binding is not binding:
            raise RuntimeError("one value_and_grad call can run one model; this one ran another before")
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
        policy = self.layout.units[index].mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        full = self.enter(index)
        self._depth[index] += 1
        try:
            with self._saved_params(index, full):
                out = call(*args, **kwargs)
        finally:
            self._depth[index] -= 1
        out = out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)
        self.leave(index, out, final)
        return out

    def enter(self, index: int) -> tuple[Tensor, ...]:
        """Full parameters of a unit, attached to autograd and installed in its modules."""
        full = self._gathered(index)
        if self.in_backward:
            self._prefetch_backward(index)
        else:
            self._prefetch_forward(index)
        if torch.is_grad_enabled() and self.layout.units[index].trainable:
            if self._attached[index] is None:
                self._attached[index] = attach(self, index, full)
                self._nodes[index] += not self.in_backward
            full = self._attached[index] or full
        self._install(index, full)
        return full

    def current(self, index: int) -> tuple[Tensor, ...]:
        """What `enter` gave for a unit that is running."""
        return self._attached[index] or self._gathered(index)

    def leave(self, index: int, out: Any, final: bool) -> None:
        """The unit has run: arrange its backward, and free its full parameters if the layout says so."""
        if self._depth[index]:
            return  # an outer call of the same unit goes on
        if self.in_backward:  # recomputed: its backward follows at once
            self._install_leaves(index)
            return
        if torch.is_grad_enabled():
            self._watch(index, out)
        if final:
            self._order.append(index)
            if self._reshards(index):
                self._reshard(index)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Differentiate; units are gathered again and their gradients reduced on the way."""
        self.in_backward = True
        again = [i for i in reversed(self._order) if self._reshards(i)]
        self._backward_order = list(dict.fromkeys(again))
        self._place = {index: at for at, index in enumerate(self._backward_order)}
        torch.autograd.backward(loss)

    def before_backward(self, index: int) -> None:
        """Gradients reached the unit's output: its parameters are needed now, the next unit's soon."""
        for other in [i for i in self._frozen if i != index and not self._depth[i]]:
            self._frozen.remove(other)
            self._reshard(other)
        self._gathered(index)
        if self._leaves[index] is None:
            self._install_leaves(index)
        plan = self.layout.units[index]
        # Half-way through this unit's backward the reduction of the one before has had time to run: its input is freed
        # before this unit's gradients are all there. Guarded by test_torch_memory.py.
        self._half = self.packed[index] // 2
        if not plan.trainable and plan.reshard_after_forward and index not in self._frozen:
            self._frozen.append(index)
        self._prefetch_backward(index)

    def remake(self, index: int, at: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A saved view of the unit's parameters, gathered again if need be."""
        if not isinstance(self.units[index].full, tuple):
            self.before_backward(index)
        self.packed[index] -= 1
        if self._in_flight and self.packed[index] == self._half:
            self._advance()
            self.backend.trim()
        return self._gathered(index)[at].as_strided(size, stride, offset)

    def receive(self, index: int, grads: Sequence[Tensor | None], *, counted: bool) -> None:
        """Gradients of one use of the unit; the last use's launch the reduction."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"unit {self.layout.units[index].title!r}: backward with create_graph=True can't go through gathered "
                f"parameters; use differentiable_unshard for higher-order gradients"
            )
        self._add_partial(index, grads)
        self._nodes[index] -= counted
        if self._nodes[index] <= 0:
            self._reduce(index)

    # -- end ----------------------------------------------------------------------------------------------------

    def commit(self) -> HSDPState:
        """Finish what is left and build the new state. Reductions of the last units may still be in flight."""
        for index, plan in enumerate(self.layout.units):
            self._collect_leaves(index)
            held = self.units[index].grads_phase is GradPhase.HELD and not self._reduced[index]
            unused = self.layout.reduction.unused == "zeros" and not self._reduced[index] and bool(plan.trainable)
            if self._partial[index] is not None or (self.sync is not Sync.NONE and (unused or held)):
                self._reduce(index)
        self._advance()  # which issues every all-reduce that is still owed
        self._end(keep=False)
        return self._state(self.start.micro + 1)

    def commit_forward(self) -> HSDPState:
        """The state after a forward without backward: gathered is what was gathered before; the ledger grows."""
        self._end(keep=True)
        return self._state(self.start.micro)

    def abort(self) -> None:
        """Wait for what is in flight and forget the frame."""
        for unit in self.units:
            on_unit.drop_flight(unit, self.backend)
        self._close()
        self.units = list(self.start.units)

    # -- parts --------------------------------------------------------------------------------------------------

    def _gathered(self, index: int) -> tuple[Tensor, ...]:
        unit = self.units[index]
        if not isinstance(unit.full, tuple):
            plan = self.layout.units[index]
            unit = on_unit.finish_gather(on_unit.start_gather(unit, plan, self.backend, self.log), plan, self.backend)
            self.units[index] = unit
        assert isinstance(unit.full, tuple)
        return unit.full

    def _start_gather(self, index: int) -> None:
        unit = self.units[index]
        if unit.full is None:
            self.units[index] = on_unit.start_gather(unit, self.layout.units[index], self.backend, self.log)

    def _prefetch_forward(self, index: int) -> None:
        if index < self._last:
            self._seen.clear()  # another pass through the model
        self._last = index
        self._seen.add(index)
        for ahead in range(index + 1, min(index + 1 + self.layout.prefetch.forward, len(self.units))):
            if ahead not in self._seen:
                self._start_gather(ahead)

    def _prefetch_backward(self, index: int) -> None:
        first = self._place.get(index, -1) + 1
        for ahead in self._backward_order[first : first + self.layout.prefetch.backward]:
            if not self._reduced[ahead]:
                self._start_gather(ahead)

    def _reshards(self, index: int) -> bool:
        return self.layout.units[index].reshard_after_forward and not self._kept[index]

    def _saved_params(self, index: int, full: Sequence[Tensor]) -> Any:
        if self._reshards(index) and torch.is_grad_enabled():
            return SavedParams(self, index, [full[b.params.members[0].index] for b in self.layout.units[index].buckets])
        return _NO_HOOKS

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

    def _install(self, index: int, tensors: Sequence[Tensor]) -> None:
        if self._binding is not None:
            self._binding.install(index, tensors)

    def _install_leaves(self, index: int) -> None:
        """What checkpointed parts of a unit recompute with, and differentiate into. Leaves, so that such a nested
        backward doesn't run the unit's node before its time."""
        if self._binding is None:
            return
        self._collect_leaves(index)
        leaves = self._gathered(index)
        for tensor, spec in zip(leaves, self.layout.units[index].params, strict=True):
            tensor.grad = None
            tensor.requires_grad_(spec.requires_grad)
        self._leaves[index] = leaves
        self._binding.install(index, leaves)

    def _reshard(self, index: int) -> None:
        plan = self.layout.units[index]
        self.units[index] = on_unit.reshard(on_unit.finish_gather(self.units[index], plan, self.backend))
        self._attached[index] = self._leaves[index] = None
        if self._binding is not None:
            self._binding.uninstall(index)

    def _add_partial(self, index: int, grads: Sequence[Tensor | None]) -> None:
        old = self._partial[index]
        if old is None:
            self._partial[index] = list(grads)
        else:
            self._partial[index] = [
                g if o is None else o if g is None else o + g for o, g in zip(old, grads, strict=True)
            ]

    def _collect_leaves(self, index: int) -> None:
        leaves = self._leaves[index]
        if leaves is not None:
            self._leaves[index] = None
            grads = [t.grad for t in leaves]
            if any(g is not None for g in grads):
                self._add_partial(index, grads)

    def _reduce(self, index: int) -> None:
        """Reshard the unit and launch the reduction of what it has received."""
        self._collect_leaves(index)
        self._reshard(index)
        grads, self._partial[index] = self._partial[index], None
        self._advance()
        plan, backend, reduction = self.layout.units[index], self.backend, self.layout.reduction
        unit = on_unit.finish_reduce(self.units[index], plan, backend, reduction, self.log)
        self.units[index] = on_unit.start_reduce(unit, plan, backend, grads, self.sync, reduction, self.log)
        self._reduced[index] = True
        if self.units[index].reducing is not None:
            self._in_flight.append(index)

    def _advance(self) -> None:
        """Take the frame's reductions in flight one step further; their inputs are freed before the next one packs."""
        still = []
        for index in self._in_flight:
            plan, reduction = self.layout.units[index], self.layout.reduction
            unit = self.units[index]
            if unit.reducing is not None:
                unit = on_unit.advance_reduce(unit, plan, self.backend, reduction, self.log, donate=True)
                self.units[index] = unit
            if unit.reducing is not None:
                still.append(index)
        self._in_flight = still

    def _end(self, *, keep: bool) -> None:
        """Leave the modules and reshard everything, except, if asked to ``keep`` them, what came gathered."""
        self._close()
        for index, plan in enumerate(self.layout.units):
            if not (keep and self._kept[index]):
                self.units[index] = on_unit.reshard(on_unit.finish_gather(self.units[index], plan, self.backend))

    def _state(self, micro: int) -> HSDPState:
        s = self.start
        return HSDPState(tuple(self.units), s.layout, s.backend, s.step, micro, s.ledger + tuple(self.log), Token())

    def _close(self) -> None:
        self._attached = [None] * len(self.units)
        self._leaves = [None] * len(self.units)
        if self._binding is not None:
            self._binding.disconnect()
            self._binding = None
