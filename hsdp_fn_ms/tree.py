"""The root's cell of state: the committed state of all units of a model, and the frame that is running.

Calls of sharded cells go through here. Each outermost call is a *pass*: it begins with a node of autograd that has the
sharded parameters as its inputs, and on which every unit's node hangs. Backward comes to that node last, so that its
own backward is the end: the frame is committed there, and the finished gradients are what the node returns for the
parameters. An exception leaves the committed state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.graph.api import _pynative_executor

from hsdp_fn import HSDPState, PhaseError, Sync, UnitState
from hsdp_fn import unit as on_unit
from hsdp_fn.agreement import agree
from hsdp_fn.handling import reducing_fully
from hsdp_fn.layout import Layout
from hsdp_fn.policy import Keep
from hsdp_fn.rollback import Gradients, Rollback, without_full
from hsdp_fn.schedule import Log
from hsdp_fn.settings import GroupPlan, arrange, plan_groups, require_sums_fit
from hsdp_fn.state import Token

from . import compat
from .backend import MSBackend
from .binding import Tables, named_cells, require_plain
from .casting import casting
from .frame import Frame
from .gather import begin_graph
from .group import Group, deliver, hooked
from .model import require_rows
from .recording import End, end_recording


class Tree(Rollback):
    """All groups at and below one cell, which is the first of them to run.

    Args:
        root: that cell.
        groups: its groups, the root's first, then in the order of its cells.

    Raises:
        RankMismatchError: ranks have different layouts. Communicates one short message a rank; then makes the process
            groups that aren't there yet.
        LayoutError: a rank would hold no row of any trainable parameter.
        NotImplementedError: a cell that would lose gradients, see `binding.require_plain`.
    """

    backend: MSBackend
    groups: Sequence[Group]
    tables: Tables
    frame: Frame | None

    def __init__(self, root: nn.Cell, groups: Sequence[Group]) -> None:
        require_plain(root)
        self.root = root
        self._all = list(groups)
        own = [g for g in groups if g.layout is not None]
        super().__init__(groups[0].backend, own, Tables([g.slots for g in own]))
        self.indices = {id(g): i for i, g in enumerate(self.groups)}
        self.last_backward, self.strict = groups[0].settings.last_backward, groups[0].settings.strict
        self._followers: dict[int, int] = {}
        self._delivered = False  # gradients, since it was last asked whether parameters have changed
        self._ask = False  # something has happened since, after which it matters
        self._pending = 0  # passes that were recorded and have had no backward yet
        self._failures = 0  # of ``backward()`` when the present backward began
        self.arrange()
        self._facts: list[object] = [g.facts() for g in self.groups]
        if not self.groups:
            return  # nothing to shard: `run` only calls
        layout = self._plan()
        require_rows(layout, self.backend)
        initial = []
        for group, plan in zip(self.groups, layout.units, strict=True):
            assert group.unit is not None
            initial.append([(group.spec, "" if group.changed(plan, group.unit) else group.initial)])
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
            ValueError: a prefetch list names a cell of another tree.
        """
        arrange(self._all, self.root, self.indices)

    @property
    def running(self) -> bool:
        """Whether a forward, or a backward by ``backward()``, is going on at this moment. (Of MindSpore's own backwards
        nobody tells.)"""
        return self._calls > 0 or (compat.delivers() and self.frame is not None and self.frame.in_backward)

    @property
    def state(self) -> HSDPState:
        """See `Rollback.state`; with masters of the parameters' present values."""
        s = super().state
        if self.running or not self.groups:
            return s
        with ms._no_grad():
            plans = zip(self.groups, s.layout.units, s.units, strict=True)
            units = tuple([g.adopt(p, u) if g.changed(p, u) else u for g, p, u in plans])
        return HSDPState(units, s.layout, s.backend, s.step, s.micro, s.ledger, Token(s.token.journal))

    def stopped(self) -> str | None:
        """See `Rollback.stopped`. In an attempt, and where iterations are strict, a backward of inputs alone counts:
        nobody tells of its end."""
        frame = self.frame
        failed = self.attempting or self.strict or compat.failures() > self._failures
        if frame is not None and frame.in_backward and failed:
            frame.stop()
        return super().stopped()

    def undo_failed_backward(self) -> None:
        """See `Rollback.undo_failed_backward`. Also drops a backward of inputs alone, of whose end nobody has told.

        Raises:
            PhaseError: a backward runs, whose hook has called this.
        """
        if self.running and not self._calls:
            raise PhaseError("used in backward, by a hook for instance; do that afterwards")
        super().undo_failed_backward()
        if self.frame is not None and self.frame.in_backward:
            self.drop()

    # -- forward ------------------------------------------------------------------------------------------------

    def run(self, group: Group, cell: nn.Cell, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A call of one of the group's cells, as part of the frame."""
        if not self.groups:
            return casting(group.settings.mp_policy, call, args, kwargs)
        outermost = self._calls == 0
        if outermost:
            frame = self._begin_pass()
        else:
            assert self.frame is not None
            frame = self.frame
        self._calls += 1
        try:
            if group.layout is None:
                out = casting(group.settings.mp_policy, call, args, kwargs)
            else:
                out = frame.run(self.indices[id(group)], call, args, kwargs, final=group.runs(cell))
            if outermost and self.frame is frame:
                self._pass_ends(frame, whole=cell is self.root)
            return out
        except BaseException:
            if outermost:
                self.drop()
            raise
        finally:
            self._calls -= 1

    def unshard(self, group: Group, *, wait: bool) -> None:
        """Gather a group by hand. Communicates: its all-gathers, unless it is there."""
        frame, index = self._begin_pass() if self._calls == 0 else self.frame, self.indices[id(group)]
        assert frame is not None
        try:
            if wait:
                frame.hold(index)
            else:
                frame.start_unshard(index)
        finally:
            if self._calls == 0:
                frame.end_pass(whole=False)

    def finish_unshard(self, group: Group) -> None:
        """Wait for a gather that was started by hand, if it is still under way."""
        index = self.indices[id(group)]
        if self.frame is not None and self.frame.uses[index].kept:
            self.unshard(group, wait=True)

    def reshard(self, group: Group) -> None:
        """Free a group's full parameters, if they are there."""
        index, s = self.indices[id(group)], self.committed
        if self.frame is not None:
            self.frame.reshard(index)
        units = tuple([on_unit.reshard(u) if i == index else u for i, u in enumerate(s.units)])
        self.committed = HSDPState(units, s.layout, s.backend, s.step, s.micro, s.ledger, s.token)

    def up_to_date(self) -> HSDPState:
        """The committed state, with masters of the parameters' present values.

        Raises:
            PhaseError: in a forward or backward.
        """
        if self.running:
            raise PhaseError("inside a forward or backward; do that afterwards")
        self._begin_frame()
        return self.committed

    def load(self, rows: Mapping[str, Tensor], step: int) -> None:
        """Take over this rank's rows by fully qualified name, and the number of steps that have led to them."""
        self.drop()
        s = self.committed
        with ms._no_grad():
            for group, plan in zip(self.groups, s.layout.units, strict=True):
                for spec, param in zip(plan.params, group.params, strict=True):
                    if spec.name in rows and param.size:
                        param.copy_(rows[spec.name])
            units = [g.adopt(p, u) for g, p, u in zip(self.groups, s.layout.units, s.units, strict=True)]
        self.committed, self._delivered = HSDPState(tuple(units), s.layout, s.backend, step, 0, (), Token()), False

    # -- frames -------------------------------------------------------------------------------------------------

    def _begin_frame(self) -> None:
        self.committed = self._running().snapshot()

    def _begin_pass(self) -> Frame:
        """An outermost call begins."""
        frame = self._running()
        compat.record()
        now = frame.begin_pass()
        if _pynative_executor.requires_grad() and (params := self._differentiated()):
            earlier = [(p, o.shape) for g in self.groups for o in g.originals if (p := o.ref()) is not None]
            ends = End(self, now, params, [shape for _, shape in earlier])
            self._pending += 1
            now.anchor = begin_graph(ends, [*params, *(p for p, _ in earlier)])
        return frame

    def _pass_ends(self, frame: Frame, *, whole: bool) -> None:
        """The outermost call has returned."""
        if whole:
            for index, group in enumerate(self.groups):
                if group.to_run:  # only some of its cells ran
                    group.to_run.clear()
                    frame.complete(index)
        frame.end_pass(whole=whole)
        with ms._no_grad():
            self.backend.catch_up()

    def _running(self) -> Frame:
        """The frame to go on with, or a new one, over what the parameters are now."""
        self.undo_failed_backward()
        require_plain(self.root)
        below = {id(cell) for _, cell in named_cells(self.root)}
        for group in self.groups:
            group.require_home(below)
        facts: list[object] = [g.facts() for g in self.groups]
        layout = self._plan_again() if facts != self._facts else None
        with ms._no_grad():
            changed = self._changed()
            anywhere = self._changed_anywhere(bool(changed))
            if layout is not None:
                self.drop()
                self._facts = facts
            self._follow(layout, changed, stepped=anywhere and self._delivered)
            if not self.attempting:
                self._delivered = self._ask = False
            frame = self.frame
            if frame is None:
                frame = self.frame = Frame(
                    self.committed,
                    [g.handling for g in self.groups],
                    backends=[g.unit_backend() for g in self.groups],
                    tables=self.tables,
                    followers=self._followers,
                    on_backward=self._backward_begins,
                )
                self._pending = 0
            elif anywhere:
                frame.outdate()
                self._pending = 0
            for index, use in enumerate(frame.uses):
                if not use.kept:  # gathers must be the same on all ranks, whatever graphs they still hold
                    frame.reshard(index)
            frame.resume(self._joined(frame))
        frame.follow([g.settings.reduction for g in self.groups])
        frame.log.journal = self._journal
        return frame

    def _changed_anywhere(self, mine: bool) -> bool:
        """Whether parameters of any rank have changed, where that matters: for full parameters still there, for
        graphs that may be differentiated yet, and for the number of steps. Communicates then: one number, as a vote.

        Raises:
            PhaseError: parameters have changed in an attempt, whose peers couldn't be freed from such a vote.
        """
        if self.attempting:
            if mine:
                raise PhaseError("parameters have changed inside an attempt; step the optimizer outside of it")
            return False
        if not (self._ask or self._pending or (self.frame and any(use.kept for use in self.frame.uses))):
            return mine
        return self.backend.votes(not mine) < len(self.backend.spec.data_parallel_group(self.backend.rank))

    def _joined(self, frame: Frame) -> HSDPState:
        """The committed state, which it becomes, with the full parameters that the frame has kept."""
        s = self.committed
        units = [
            UnitState(u.name, u.master, use.state.full, u.acc_full, u.acc_partial, u.reducing, u.grad)
            for u, use in zip(s.units, frame.uses, strict=True)
        ]
        self.committed = HSDPState(tuple(units), s.layout, s.backend, s.step, s.micro, (), Token())
        return self.committed

    def _changed(self) -> list[int]:
        """Units whose parameters somebody has updated since the last pass."""
        s = self.committed
        units = enumerate(zip(self.groups, s.layout.units, s.units, strict=True))
        return [i for i, (group, plan, unit) in units if group.changed(plan, unit)]

    def _follow(self, layout: Layout | None, changed: Sequence[int], *, stepped: bool) -> None:
        """Bring the committed state up to date with what has changed outside. Nothing is gathered in it afterwards."""
        s = self.committed
        layout = layout or s.layout
        units = [
            g.adopt(p, u) if i in changed else without_full(u)
            for i, (g, p, u) in enumerate(zip(self.groups, layout.units, s.units, strict=True))
        ]
        step, micro = (s.step + 1, 0) if stepped else (s.step, s.micro)
        self.committed = HSDPState(tuple(units), layout, s.backend, step, micro, (), Token())

    def _plan_again(self) -> Layout:
        """The layout of what has been frozen or unfrozen.

        Raises:
            RuntimeError: reduce-scattered sums of earlier microbatches are held, of other parameters.
        """
        layout = self._plan()
        require_sums_fit(self.committed, layout)
        return layout

    def _plan(self) -> Layout:
        paths: dict[int, str] = {}
        for name, cell in named_cells(self.root):
            paths.setdefault(id(cell), name)
        plans = [
            GroupPlan(
                [paths.get(id(m), "(removed)") for m in g.modules], g.specs(self.root), g.wanted, g.settings, g.spec
            )
            for g in self.groups
        ]
        return plan_groups(plans, self._all[0].spec, self.backend.offload)

    def _differentiated(self) -> list[Parameter]:
        """What gradients are for."""
        return [p for g in self.groups for p in g.params if p.requires_grad and p.size]

    # -- backward -----------------------------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        """What is gathered for it are the masters, of the values that the forward has had, even if an optimizer has
        stepped the parameters since."""
        frame = self.frame
        assert frame is not None
        self._failures = compat.failures()
        frame.follow([g.settings.reduction for g in self.groups])

    def end_backward(self, *, hooks: bool, micro: int = 1) -> Gradients:
        """Commit; the finished gradients. The frame goes on, for other passes. If anything raises before the commit,
        the backward has stopped, like one that has raised elsewhere.

        Args:
            hooks: run those of the parameters first, outside of attempts; else MindSpore does, afterwards.
        """
        frame = self.frame
        assert frame is not None
        try:
            frame.settle()
            state = frame.snapshot(micro=micro)
            ledger = Log(self._journal)
            ledger.extend(state.ledger)
            units = []
            for group, plan, unit in zip(self.groups, state.layout.units, state.units, strict=True):
                group.to_run.clear()
                units.append(on_unit.finish_reduce(unit, plan, group.unit_backend(), ledger))
            self.backend.catch_up()
            plans = reversed(list(zip(self.groups, state.layout.units, units, strict=True)))
            gradients: Gradients = [p for group, plan, unit in plans for p in group.gradients(plan, unit)]
            if hooks and self._attempt is None:
                gradients = self.hooked(gradients)
        except BaseException:
            frame.stop()
            raise
        done = [UnitState(u.name, u.master, u.full, u.acc_full, u.acc_partial, None, None) for u in units]
        self.committed = HSDPState(
            tuple(done), state.layout, state.backend, state.step, state.micro, tuple(ledger), Token()
        )
        if micro and self._pending:
            self._pending -= 1
        self._delivered |= any(g.handling.sync is Sync.FULL for g in self.groups)
        self._ask |= self._delivered
        frame.resume(self.committed)
        return gradients

    def finish_accumulation(self) -> None:
        """Reduce what microbatches have held back, as a last backward would.

        Raises:
            PhaseError: in a forward or backward.
        """
        if self.running:
            raise PhaseError("finish_accumulation inside a forward or backward; call it afterwards")
        with ms._no_grad():
            self._running().start_sweep()
            try:
                with reducing_fully([g.handling for g in self.groups]):
                    self.keep_or_deliver(self.end_backward(hooks=True, micro=0))
            except BaseException:
                self.drop()
                raise

    def keep_or_deliver(self, gradients: Gradients) -> None:
        """Gradients, after their hooks, for the parameters' ``.grad``: at once, or when the attempt has succeeded."""
        if self._attempt is not None:
            self._attempt[2].append(gradients)
        else:
            self.deliver(gradients)

    def hooked(self, gradients: Gradients) -> Gradients:
        """See `Rollback.hooked`."""
        return hooked(gradients)

    def deliver(self, gradients: Gradients) -> None:
        """See `Rollback.deliver`."""
        with ms._no_grad():
            deliver(gradients)

    def drop(self) -> None:
        """See `Rollback.drop`."""
        super().drop()
        self._ask = True

    def reset(self, keep: Keep = Keep.NOTHING) -> None:
        """See `Rollback.reset`, and `recording.end_recording`."""
        super().reset(keep)
        end_recording()

    def end_attempt(self, *, commit: bool) -> None:
        """See `Rollback.end_attempt`, and `recording.end_recording`."""
        failed = self.attempting and not commit
        super().end_attempt(commit=commit)
        if failed:
            self._delivered = False
            end_recording()
