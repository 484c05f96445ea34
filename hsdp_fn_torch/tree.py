"""The root's cell: the committed state of all units of a model, and the frame that is running.

Hooks of the facade do nothing but go through here: a call of a unit's module runs in the frame; the first sign of
backward arranges its end; the end of backward commits the frame and hands gradients to the parameters. An exception
leaves the committed state as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hsdp_fn import (
    HSDPState,
    MeshError,
    ParamPhase,
    PhaseError,
    UnitState,
)
from hsdp_fn import unit as on_unit
from hsdp_fn.agreement import agree
from hsdp_fn.handling import reducing_fully
from hsdp_fn.layout import Layout
from hsdp_fn.rollback import Rollback, without_full
from hsdp_fn.schedule import Log
from hsdp_fn.settings import arrange, require_sums_fit
from hsdp_fn.state import Token

from .backend import TorchBackend
from .binding import Tables, edited_text
from .casting import casting
from .frame import Frame
from .gather import plainly
from .group import Gradients, Group, deliver, hooked, same_memory
from .planning import plan_groups

_GATHERING, _UNSHARDED = ParamPhase.GATHERING, ParamPhase.UNSHARDED


class Tree(Rollback):
    """All groups at and below one module, which is the first of them to run forward.

    Args:
        root: that module.
        groups: its groups, the root's first, then in the order of its modules.

    Raises:
        RankMismatchError: ranks have different layouts. Communicates one short message a rank; then makes the process
            groups that aren't there yet.
    """

    backend: TorchBackend
    groups: Sequence[Group]
    tables: Tables
    frame: Frame | None
    _last: Frame | None

    def __init__(self, root: nn.Module, groups: Sequence[Group]) -> None:
        self.root = root
        self._all = list(groups)
        own = [g for g in groups if g.layout is not None]
        super().__init__(groups[0].backend, own, Tables([g.slots for g in own], root.modules()))
        self.indices = {id(g): i for i, g in enumerate(self.groups)}
        settings = groups[0].settings
        self.last_backward, self.strict = settings.last_backward, settings.strict
        self.post_optimizer_event, settings.post_optimizer_event = settings.post_optimizer_event, None
        for group in groups:
            group.require_plain()
        self._values: list[list[object]] = []  # each group's `marks` when they were last looked at
        self._followers: dict[int, int] = {}
        _require_one_device(self.groups, self.backend)
        for group in self._all:
            group.backend.share_pool(self.backend.pool)
        ranks = groups[0].data.spec.data_parallel_group(self.backend.rank)
        for group in self.groups:
            group.mark_experts(ranks)
        self.arrange()
        self._facts: list[object] = [g.facts() for g in self.groups]
        if not self.groups:
            return  # nothing to shard: `run` only calls
        layout = self._plan()
        initial = [
            g.initial if g.marks(self.tables.standing(i)) == g.first_marks else [(mesh, "") for mesh, _ in g.initial]
            for i, g in enumerate(self.groups)
        ]
        agree(self.backend, layout, initial)
        self.backend.prepare(layout)
        units = []
        for group, plan in zip(self.groups, layout.units, strict=True):
            assert group.unit is not None
            units.append(UnitState(plan.name, group.unit.master))
            group.unit = None
        self.committed = HSDPState(tuple(units), layout, self.backend, 0, 0, (), Token())

    def arrange(self) -> None:
        """Work out what settings mean in this tree: the root's default, prefetch lists. Called again when they change.

        Raises:
            ValueError: a prefetch list names a module of another tree.
        """
        arrange(self._all, self.root, self.indices)

    # -- forward ------------------------------------------------------------------------------------------------

    def run(
        self, group: Group, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """A call of one of the group's modules, as part of the frame."""
        if not self.groups:
            return casting(group.settings.mp_policy, call, args, kwargs)
        with plainly():
            frame = self._running()
        self._calls += 1
        try:
            if group.layout is None:
                return casting(group.settings.mp_policy, call, args, kwargs)
            return frame.run(
                self.indices[id(group)],
                call,
                args,
                kwargs,
                final=group.runs(module),
                prefetch=self._calls > 1 or module is self.root,
            )
        except BaseException:
            # Inside, the caller may catch it and go on; in backward the engine reports it, and the next forward or
            # state_dict finds the frame.
            if self._calls == 1 and not frame.in_backward:
                self.drop()
            raise
        finally:
            self._calls -= 1
            if self._calls == 0 and self.frame is frame and not frame.in_backward:
                with plainly():
                    self._pass_ends(frame, module)

    def unshard(self, group: Group, *, wait: bool) -> None:
        """Gather a group by hand. Communicates: its all-gathers, unless it is there."""
        with plainly():
            frame, index = self._running(), self.indices[id(group)]
            if wait:
                frame.hold(index)
                self._settle_copies()
            else:
                frame.start_unshard(index)

    def finish_unshard(self, group: Group) -> None:
        """Wait for a gather that was started by hand, if it is still under way."""
        index = self.indices[id(group)]
        if self.frame is not None and self.frame.uses[index].state.params_phase in (_GATHERING, _UNSHARDED):
            with plainly():
                self.frame.hold(index)
                self._settle_copies()

    def reshard(self, group: Group) -> None:
        """Free a group's full parameters, if they are there."""
        self._require_unedited()
        index, s = self.indices[id(group)], self.committed
        if self.frame is not None:
            self.frame.reshard(index)
        self.tables.uninstall(index)
        units = tuple(on_unit.reshard(u) if i == index else u for i, u in enumerate(s.units))
        self.committed = HSDPState(units, s.layout, s.backend, s.step, s.micro, s.ledger, s.token)

    # -- frames -------------------------------------------------------------------------------------------------

    def _begin_frame(self) -> None:
        with plainly():
            frame = self._running()
            frame.follow([g.settings.reduction for g in self.groups])
            self.committed = frame.snapshot()

    def _running(self) -> Frame:
        """The frame to go on with, or a new one."""
        self.undo_failed_backward()
        frame = self.frame
        if frame is not None and (self._calls or frame.in_backward):
            return frame
        self._require_unedited()
        changed = self._changed()
        idle = frame is None or not frame.has_graph
        if frame is None:
            frame = self._last
            self._await_optimizer()
        elif idle:
            self.committed = frame.snapshot()
        if changed is None:
            self.drop()  # every module has its own parameters again
            for group in self.groups:
                group.find()
        facts: list[object] = [g.facts() for g in self.groups]
        layout = self._plan_again() if changed is None or facts != self._facts else None
        if layout is not None:
            self.drop()
            frame, self._facts = None, facts
        self._follow(layout, changed)
        if frame is None:
            frame = Frame(
                self.committed,
                [g.handling for g in self.groups],
                backends=[g.unit_backend() for g in self.groups],
                tables=self.tables,
                followers=self._followers,
                on_backward=self._backward_begins,
                on_wake=self._wake,
            )
        else:
            frame.outdate(changed or ())
            if idle:
                frame.follow([g.settings.reduction for g in self.groups])
                frame.resume(self.committed)
        frame.backends[:] = [g.unit_backend() for g in self.groups]
        self.frame, self._last = frame, None
        frame.log.journal = self._journal
        return frame

    def _require_unedited(self) -> None:
        edited = self.tables.edited()
        if edited is not None:
            self.drop()
            self.tables.disconnect()
            raise RuntimeError(edited_text(self.committed.layout.units[edited].title))

    def _wake(self, frame: Frame) -> bool:
        """A graph of a frame at rest is differentiated: go on with it."""
        if self._last is not frame:
            return False
        changed = self._changed()
        if changed is None:
            return False
        self._follow(None, changed)
        frame.outdate(changed)
        frame.resume(self.committed)
        self.frame, self._last = frame, None
        frame.log.journal = self._journal
        return True

    def _await_optimizer(self) -> None:
        """Order the next gathers after the event that the user has recorded, once."""
        event, self.post_optimizer_event = self.post_optimizer_event, None
        if event is None:
            return
        kind = self.backend.device.type
        if kind == "cpu":
            event.synchronize()
        else:  # the device's own stream: torch.Stream wouldn't know the device's events
            torch.get_device_module(kind).current_stream().wait_event(event)

    def _rest(self, state: HSDPState) -> None:
        self.committed, self._last, self.frame = state, self.frame, None

    def _pass_ends(self, frame: Frame, module: nn.Module) -> None:
        """The outermost call has returned."""
        whole = module is self.root
        if whole:
            for index, group in enumerate(self.groups):
                if group.to_run:  # only some of its modules ran
                    group.to_run.clear()
                    frame.complete(index)
        frame.pause(whole=whole)
        if not frame.has_graph and not self.tables.in_place:
            self._rest(frame.rest())
        self._settle_copies()  # whoever writes the masters now doesn't change what this forward has used

    def _settle_copies(self) -> None:
        """Copies between host and device have landed afterwards (CPU offload)."""
        for backend in {id(g.backend): g.backend for g in self.groups}.values():
            backend.settle()

    def _versions(self) -> list[list[object]]:
        """What changes when somebody updates or replaces a parameter, for each group."""
        return [g.marks(self.tables.standing(i)) for i, g in enumerate(self.groups)]

    def _changed(self) -> list[int] | None:
        """Units whose parameters somebody has updated since this was last asked; None if any stand elsewhere in memory,
        or were replaced: until `_follow` has taken them over."""
        values, before = self._versions(), self._values
        if not before or not all(same_memory(a, b) for a, b in zip(values, before, strict=True)):
            self._values = []
            return None
        self._values = values
        return [i for i, (a, b) in enumerate(zip(values, before, strict=True)) if a != b]

    def _follow(self, layout: Layout | None, changed: Sequence[int] | None) -> None:
        """Bring the committed state up to date with what has changed outside.

        Args:
            layout: a new one; None keeps the old.
            changed: units whose full parameters are of before an update; None: all, and take over replaced parameters.
        """
        s = self.committed
        for u in s.units if layout is not None else ():
            on_unit.drop_flight(u, self.backend)
        layout = layout or s.layout
        units = [without_full(u) if changed is None or i in changed else u for i, u in enumerate(s.units)]
        if changed is None:
            units = [g.adopt(p, u) for g, p, u in zip(self.groups, layout.units, units, strict=True)]
            self._values = self._versions()
        stepped = bool(s.micro) and (changed is None or bool(changed))
        step, micro = (s.step + 1, 0) if stepped else (s.step, s.micro)
        self.committed = HSDPState(tuple(units), layout, s.backend, step, micro, (), Token())

    def _plan_again(self) -> Layout:
        """The layout of what has been frozen, unfrozen or replaced.

        Raises:
            RuntimeError: reduce-scattered sums of earlier microbatches are held, of other parameters.
        """
        layout = self._plan()
        require_sums_fit(self.committed, layout)
        return layout

    def _plan(self) -> Layout:
        return plan_groups(self.root, self.groups, self._all[0].data.spec, self.backend.offload)

    # -- backward -----------------------------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        frame = self.frame
        assert frame is not None
        changed = self._changed()
        if changed is None:
            frame.in_backward = False
            raise PhaseError("parameters were replaced since the forward of this graph; run forward again")
        frame.outdate(changed)
        frame.follow([g.settings.reduction for g in self.groups])
        ends = partial(self._backward_ends)
        frame.end = weakref.ref(ends)  # the engine holds it as long as the backward goes on
        Variable._execution_engine.queue_callback(ends)

    def finish_accumulation(self) -> None:
        """Reduce what microbatches have held back, as a last backward would.

        Raises:
            PhaseError: in a forward or backward.
        """
        if self.running:
            raise PhaseError("finish_accumulation inside a forward or backward; call it afterwards")
        with plainly(), torch.no_grad():
            self._running().start_sweep()
            try:
                with reducing_fully([g.handling for g in self.groups]):
                    self._backward_ends(micro=0)
            except BaseException:
                self.drop()
                raise

    def hooked(self, gradients: Gradients) -> Gradients:
        """See `Rollback.hooked`."""
        return hooked(gradients)

    def deliver(self, gradients: Gradients) -> None:
        """See `Rollback.deliver`."""
        deliver(gradients)

    def _backward_ends(self, micro: int = 1) -> None:
        """Commit, and give the gradients to the parameters. The frame goes on if graphs are left. If anything raises
        before the commit, the backward has stopped, like one that has raised elsewhere.
        """
        frame = self.frame
        assert frame is not None
        try:
            frame.settle(last=self.last_backward)
            state = frame.snapshot(micro=micro)
            ledger = Log(self._journal)
            ledger.extend(state.ledger)
            units = []
            for group, plan, unit in zip(self.groups, state.layout.units, state.units, strict=True):
                group.to_run.clear()
                units.append(on_unit.finish_reduce(unit, plan, group.unit_backend(), ledger))
            self._settle_copies()  # gradients that were on their way to the host are there
            plans = reversed(list(zip(self.groups, state.layout.units, units, strict=True)))
            gradients: Gradients = [p for group, plan, unit in plans for p in group.gradients(unit, plan)]
            if self._attempt is None:
                gradients = self.hooked(gradients)
        except BaseException:
            frame.in_backward, frame.end = True, None
            raise
        done = [UnitState(u.name, u.master, u.full, u.acc_full, u.acc_partial, None, None) for u in units]
        state = HSDPState(tuple(done), state.layout, state.backend, state.step, state.micro, tuple(ledger), Token())
        frame.resume(state)
        if self._calls or frame.has_graph:
            self.committed = state
        else:
            self._rest(frame.rest())
        if self._attempt is None:
            self.deliver(gradients)
        else:
            self._attempt[2].append(gradients)


def _require_one_device(groups: Sequence[Group], root: TorchBackend) -> None:
    for group in groups:
        if group.backend.device != root.device:
            names = [type(m).__name__ for m in group.modules]
            raise MeshError(
                f"modules {names} are sharded over mesh {group.data.mesh} on {group.backend.device}, but the root is "
                f"on {root.device}; give all modules below a root meshes of one device type"
            )
