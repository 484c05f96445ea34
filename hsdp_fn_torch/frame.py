"""A forward and backward in progress: the one mutable object.

A frame holds the working copies of the units' states while they move, and nothing of the committed state is touched
until `commit` builds the new one. If anything raises, `abort` waits for what is in flight and forgets the rest: the
state that the frame began with is as good as before.

Life of a unit in a frame: `enter` (gather, wait, prefetch the next, attach to autograd, install into the modules),
`leave` (reshard), `before_backward` (gather again, prefetch), `receive` (its gradients are complete: reshard, launch
the reduction), and at the end of backward `settle`.

A functional step is one frame with one backward. The facade's frame may see several forwards and backwards, in any
order: `settle` ends a backward, `commit` rests, and `resume` goes on from the state that was committed meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import GradientError, GradPhase, HSDPState, PhaseError, ReductionPolicy, Regrouped, Sync
from hsdp_fn.handling import handled
from hsdp_fn.reducer import Reducer

from .backend import TorchBackend
from .binding import Binding, Tables, edited_text
from .casting import cast_floating
from .dtensor import piece
from .gather import SavedParams, attach, plainly, watch
from .trace import span
from .units import Units
from .use import Handling, Ticket

_NO_HOOKS = nullcontext()


class Frame(Units):
    """Microbatches' forwards and backwards, until nothing of their graphs is left to differentiate.

    Args:
        state: where it starts; stays usable until `commit`.
        handling: how each unit is treated.
        backends: what each unit communicates with, if not the state's backend.
        tables: where the modules keep the units' parameters, if not known through `bind`.
        followers: which unit runs after which, learned and used for prefetching; None: the layout's order.
        on_backward: called when a backward begins.
        on_wake: called when a graph of this frame is used while the frame rests; whether it may go on.
        forward_only: gradients of the units' parameters are refused.
    """

    def __init__(
        self,
        state: HSDPState,
        handling: Sequence[Handling],
        *,
        backends: Sequence[TorchBackend] | None = None,
        tables: Tables | None = None,
        followers: dict[int, int] | None = None,
        on_backward: Callable[[], None] | None = None,
        on_wake: Callable[[Frame], bool] | None = None,
        forward_only: bool = False,
    ) -> None:
        super().__init__(state, handling, backends, tables, followers, on_wake)
        self.in_backward, self.backwards = False, 0  # how many have ended
        self.end: weakref.ref[Any] | None = None  # what is called at the end of the backward, alive as long as that
        self.reached: int | None = None  # the unit that backward came to last
        self.anchor = torch.zeros((), requires_grad=True)
        self._on_backward, self._forward_only = on_backward, forward_only
        self._reducer = Reducer(state.layout, self.uses, handling, self.backends, self.log, self.backend)
        self._guests: list[int] = []  # units that were gathered for a backward in which no node will reshard them
        self._soon = -1  # saved views left when a quarter of the present unit's backward is done

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
        final: Callable[[], bool] = lambda: True,
        prefetch: bool = True,
    ) -> Any:
        """``call(*args, **kwargs)`` as the forward of a unit whose parameters are installed in its modules.

        Args:
            final: asked afterwards: whether the unit has run, or has further modules to run.
            prefetch: start gathering the units that follow.
        """
        use, plan = self.uses[index], self.layout.units[index]
        policy = plan.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        with span("pre_forward", plan), plainly():
            self.enter(index, prefetch=prefetch)
        versions = [(t, t._version) for t in self._bases(index)]
        use.depth += 1
        try:
            with self._saved_params(index):
                out = call(*args, **kwargs)
        except BaseException:
            if use.depth == 1 and self.handling[index].reshard_after_forward and not self.in_backward:
                self.reshard(index)
            raise
        finally:
            use.depth -= 1
        if any(t._version != version for t, version in versions):
            raise RuntimeError(
                f"forward of unit {plan.title!r} modified its gathered parameters in place; they "
                f"are a copy of the masters, so the edit would be lost. Change the masters instead (apply_updates)."
            )
        out = out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)
        with span("post_forward", plan), plainly():
            self.leave(index, out, final)
        return out

    def enter(self, index: int, *, prefetch: bool = True) -> tuple[Tensor, ...]:
        """Full parameters of a unit, attached to autograd and installed in its modules."""
        self._require_running()
        use = self.uses[index]
        self._release(index)
        full = self._gathered(index)
        if self.in_backward:
            self._prefetch(self.order.before(index, self.order.at, self.uses))
        elif prefetch:
            self._prefetch(self.order.begin(index))
        if torch.is_grad_enabled() and self.layout.units[index].trainable:
            if use.attached is None or (use.over and not use.depth):
                use.attached, use.over, use.ran = attach(self, index, full), False, True
            full = use.attached
        if self._binding is not None:
            self._binding.install(index, full if full is use.attached else self.presented(index))
        return full

    def look(self, index: int) -> tuple[Tensor, ...]:
        """`enter`, for parameters used by name: costs nothing where the unit has been entered and is still there."""
        use = self.uses[index]
        here = index in self.order.begun and isinstance(use.state.full, tuple)
        if here and (use.attached is not None or not torch.is_grad_enabled()):
            return self.current(index)
        return self.enter(index)

    def current(self, index: int) -> tuple[Tensor, ...]:
        """What `enter` gave for a unit that is running."""
        return self.uses[index].attached or self._gathered(index)

    def leave(self, index: int, out: Any, final: Callable[[], bool]) -> None:
        """The unit has run: arrange its backward, and free its full parameters if that is how it is handled."""
        use = self.uses[index]
        if use.depth:
            return  # an outer call of the same unit goes on
        if self.in_backward:  # recomputed: its backward follows at once
            self._install_leaves(index)
            return
        if torch.is_grad_enabled():
            watch(self, index, out)
        if final():
            use.over = True
            self.order.finish(index)
            self.reshard_after_forward(index)

    def complete(self, index: int) -> None:
        """A unit of which only some modules ran has run."""
        self.order.finish(index)
        if not self.uses[index].held:
            self.reshard_after_forward(index)

    def start_unshard(self, index: int) -> None:
        """Start gathering a unit by hand."""
        self._require_running()
        self._start_gather(index)

    def hold(self, index: int) -> None:
        """Gather a unit by hand and leave it installed, attached to autograd."""
        self._require_running()
        self._gathered(index)
        self.uses[index].held = True
        self._leave_in_place(index)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Differentiate; units are gathered again and their gradients reduced on the way."""
        self.begin_backward()
        torch.autograd.backward(loss)

    def follow(self, reductions: Sequence[ReductionPolicy]) -> None:
        """Reduce like this from now on, one policy a unit, and let the layout say how units are handled."""
        self.layout = handled(self.layout, reductions, self.handling)

    @property
    def has_graph(self) -> bool:
        """Whether a backward may come: the graph of some forward is alive and hasn't been differentiated. Decides
        whether the frame rests, and nothing that other ranks must agree on."""
        return any(use.waits for use in self.uses)

    @property
    def stopped(self) -> bool:
        """Whether a backward has begun, and has raised before its end."""
        over = self.end is None or self.end() is None or torch._C._current_graph_task_id() < 0
        return self.in_backward and self._on_backward is not None and over

    def begin_backward(self) -> None:
        """Plan the order in which backward will need the units. The first sign of backward calls it, if nobody has.

        Raises:
            PhaseError: an earlier one has stopped in the middle.
        """
        if self.in_backward:
            if self.stopped:
                raise PhaseError(
                    "another backward of this iteration stopped in the middle, so it can't be differentiated any more; "
                    "run forward again"
                )
            return
        self.in_backward = True
        if self._on_backward is not None:
            self._on_backward()
        self._reducer.begin(self.layout)
        if self._binding is not None and (edited := self._binding.edited()) is not None:
            raise RuntimeError(edited_text(self.layout.units[edited].title))
        for index, use in enumerate(self.uses):
            if use.attached is not None and use.leaves is None and not use.depth:
                self._install_leaves(index)

    def start_sweep(self) -> None:
        """`settle` follows without a backward: what is held back is to be reduced."""
        self._reducer.begin(self.layout)

    def before_backward(self, index: int, number: int) -> None:
        """Gradients reached the unit's output of a pass: its parameters are needed now, the next unit's soon."""
        self._require_running()
        self._release(index)
        if not self.in_backward and self._on_backward is None:
            self._gathered(index)  # a backward inside forward (a gradient penalty): gather, and no more
            self._guests.append(index)
            return
        self.begin_backward()
        self.order.reach(number)
        self.reached = index
        use, plan = self.uses[index], self.layout.units[index]
        with span("pre_backward", plan):
            if self.handling[index].unshard_in_backward:
                self._gathered(index)
                if use.leaves is None and not use.depth:
                    self._install_leaves(index)
            # On CPU, a quarter into this unit's backward the reduction of the one before has had time to run: its
            # input is freed before this unit's gradients are all there (guarded by test_torch_memory.py). On a device
            # waiting here would hold up the stream.
            self._soon = use.packed * 3 // 4 if self.backend.device.type == "cpu" else -1
            if not plan.trainable:
                self._guests.append(index)
            self._prefetch(self.order.before(index, number, self.uses))
            self.backend.pool.trim()

    def remake(self, index: int, number: int, epoch: int, at: int) -> Tensor:
        """A parameter that a pass has saved a view of, gathered again if need be."""
        use = self.uses[index]
        self._require_epoch(index, epoch)
        if not isinstance(use.state.full, tuple):
            self.before_backward(index, number)
            self._require_epoch(index, epoch)
        use.packed -= 1
        if self._reducer.busy and use.packed == self._soon and self.handling[index].max_reductions == 1:
            self._reducer.advance()
            self.backend.pool.trim()
        return self._gathered(index)[at]

    def receive(self, index: int, grads: Sequence[Tensor | None], ticket: Ticket | None) -> None:
        """Gradients of one use of the unit; those of the last use in this backward launch the reduction.

        Args:
            ticket: of the node that brings them; None for a recomputed use.
        """
        self._require_running()
        use, plan = self.uses[index], self.layout.units[index]
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
        if ticket is not None:
            self._require_epoch(index, ticket.epoch)
            ticket.backward = self.backwards
            self.order.reach(ticket.number)
            last = not any(t.expected(self.backwards) for t in use.live(but=ticket))
        else:  # the engine knows of a recomputed graph only; uses outside of it are in passes that it has reached
            reached = self.order.reached
            last = not any(t.backward != self.backwards and t.number in reached for t in use.live())
        use.add_partial(plan, self.handling[index], grads)
        if last:
            for due in self._reducer.due(index):
                self._reduce(due)

    def settle(self, *, last: bool = True) -> None:
        """The backward has ended: reduce what no node has, and reshard. Every collective of the microbatch has been
        issued then; the last reductions may still be in flight.

        Args:
            last: no backward of other graphs follows that would want what has been gathered too early.
        """
        for index in reversed(range(len(self.uses))):
            use, plan = self.uses[index], self.layout.units[index]
            use.collect_leaves(plan, self.handling[index])
            held = use.state.grads_phase is GradPhase.HELD and not use.reduced
            unused = plan.reduction.unused == "zeros" and not use.reduced and bool(plan.trainable)
            if use.partial is not None or (self.handling[index].sync is not Sync.NONE and (unused or held)):
                self._reduce(index)
        checked = any(u.reduction.unused == "checked" for u in self.layout.units)
        if checked and any(way.sync is not Sync.NONE for way in self.handling):
            self._reducer.compare("nothing more")
        self._reducer.advance()
        whole = self.order.end_backward() or self._on_backward is None
        for index, use in enumerate(self.uses):
            use.leaves = None
            if use.depth:  # a backward inside its forward
                continue
            if use.over and not use.held:
                use.attached = None
            keep = not self.handling[index].reshard_after_backward
            if not (keep or use.reduced or (whole and last)):
                keep = use.ran or not last  # a pass through the root waits for its backward; this was a part's alone
            if not keep:
                self.reshard(index)
                use.ran = False
            else:
                use.disown_full()
                if self._binding is not None:
                    self._binding.uninstall(index)
            use.over, use.held, use.reduced = True, False, False
            use.tickets = [ref for ref in use.tickets if ref() is not None]
        self._guests.clear()
        self.backwards += 1
        self.in_backward = False

    # -- end ----------------------------------------------------------------------------------------------------

    def pause(self, *, whole: bool) -> None:
        """No forward runs any more: the modules have their own parameters back, except where full ones that belong to
        a live graph, or were gathered by hand, stay.

        Args:
            whole: the pass was the root's.
        """
        self.order.end_pass(whole=whole)
        self.backend.pool.trim()
        graph = self.has_graph  # after an evaluation, nobody awaits the pieces: the modules have their own parameters
        for index, (use, way) in enumerate(zip(self.uses, self.handling, strict=True)):
            use.over = True
            if self._binding is None:
                continue
            if isinstance(use.state.full, tuple) and (use.held or not way.reshard_after_forward):
                self._leave_in_place(index)
            elif isinstance(use.state.full, Regrouped) and graph:
                self._leave_pieces(index, use.state.full)
            else:
                self._binding.uninstall(index)

    def commit(self) -> HSDPState:
        """`settle`, and the new state. The frame rests."""
        self.settle()
        return self.rest(micro=1)

    def rest_forward(self) -> HSDPState:
        """The state after a forward without backward: gathered is what was so before; the ledger grows."""
        for index, use in enumerate(self.uses):
            if not use.kept:
                self.reshard(index)
        return self.rest()

    # -- parts --------------------------------------------------------------------------------------------------

    def _leave_in_place(self, index: int) -> None:
        """Full parameters stand in the modules while nobody runs, attached to autograd for whoever uses them."""
        use = self.uses[index]
        if use.attached is None and self.layout.units[index].trainable:
            with torch.enable_grad():
                use.attached = attach(self, index, self._gathered(index), ahead=True)
        if self._binding is not None:
            self._binding.install(index, use.attached or self.presented(index))
            self._binding.leave(index)

    def _leave_pieces(self, index: int, regrouped: Regrouped) -> None:
        """Parameters stand in the modules as DTensors over the smaller groups that they have been resharded to."""
        way, binding = self.handling[index], self._binding
        if binding is None:
            return
        binding.uninstall(index)
        if way.standings is not None:
            return  # of tensor parallelism: which mesh joins both isn't known
        tensors = binding.own_tensors(index)
        for bucket, flat in zip(self.layout.units[index].buckets, regrouped.flats, strict=True):
            if bucket.regather is not None and flat is not None:
                backend, (mesh, params) = self.backends[index], (bucket.regather.mesh, bucket.regather.params)
                over = backend.shard_mesh(mesh)
                for member, row in zip(params.members, backend.split(mesh, params, flat), strict=True):
                    tensors[member.index] = piece(row, over, member)
        binding.install(index, tensors)
        binding.leave(index)

    def _release(self, index: int) -> None:
        """Reshard what an earlier unit's backward has left gathered."""
        guests, self._guests = self._guests, []
        for other in guests:
            if other == index or self.uses[other].depth:
                self._guests.append(other)
            elif self.handling[other].reshard_after_forward and self.handling[other].reshard_after_backward:
                self.reshard(other)

    def _prefetch(self, ahead: Iterable[int]) -> None:
        for index in ahead:
            self._start_gather(index)

    def _saved_params(self, index: int) -> Any:
        if self.handling[index].reshard_after_forward and torch.is_grad_enabled():
            return SavedParams(self, index, self._gathered(index))
        return _NO_HOOKS

    def _install_leaves(self, index: int) -> None:
        """What checkpointed parts of a unit recompute with, and differentiate into. Leaves, so that such a nested
        backward doesn't run the unit's node before its time."""
        if self._binding is None:
            return
        leaves = self.uses[index].make_leaves(self.layout.units[index], self.handling[index], self._gathered(index))
        self._binding.install(index, leaves)

    def _reduce(self, index: int) -> None:
        """Reshard the unit and launch the reduction of what it has received."""
        use, plan = self.uses[index], self.layout.units[index]
        use.collect_leaves(plan, self.handling[index])
        if self.handling[index].reshard_after_backward and not use.depth:
            self.reshard(index)
        grads, use.partial = use.partial, None
        with span("post_backward", plan):
            self._reducer.launch(index, grads)
