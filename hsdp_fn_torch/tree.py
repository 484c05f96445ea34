"""The root's cell: the committed state of all units of a model, and the frame that is running.

Hooks of the facade do nothing but go through here: a call of a unit's module runs in the frame; the first sign of
backward arranges its end; the end of backward commits the frame and hands gradients to the parameters. An exception
leaves the committed state as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hsdp_fn import ROOT, HSDPState, ParamSpec, RankMismatchError, UnitSpec, UnitState, plan_layout
from hsdp_fn import unit as on_unit
from hsdp_fn.layout import Layout, Placement
from hsdp_fn.state import Token

from .binding import Tables
from .frame import Frame
from .group import Group
from .mesh import mesh_spec


class Tree:
    """All groups at and below one module, which is the first of them to run forward.

    Args:
        root: that module.
        groups: its groups, the root's first, then in the order of its modules.

    Raises:
        RankMismatchError: ranks have different layouts. Communicates one short message a rank.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Group]) -> None:
        self.root = root
        self.groups = [g for g in groups if g.layout is not None]
        self.indices = {id(g): i for i, g in enumerate(self.groups)}
        self.frame: Frame | None = None
        self._begun: list[object] = []  # the parameters' versions when the frame began
        self._calls = 0
        self._tables = Tables([g.slots for g in self.groups], root.modules())
        self._backend = groups[0].backend
        self._facts = [g.facts() for g in self.groups]
        layout = self._plan()
        answers = set(self._backend.exchange(layout.mesh, layout.digest))
        if len(answers) > 1:
            raise RankMismatchError(f"ranks have sharded different models or policies: layouts {sorted(answers)}")
        units = []
        for group, plan in zip(self.groups, layout.units, strict=True):
            assert group.unit is not None
            units.append(UnitState(plan.name, group.unit.master))
            group.unit = None
        self.state = HSDPState(tuple(units), layout, self._backend, 0, 0, (), Token())

    def run(self, group: Group, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, final: bool) -> Any:
        """A call of one of the group's modules, as part of the frame."""
        frame = self._running()
        self._calls += 1
        try:
            if group.layout is None:
                return call(*args, **kwargs)
            return frame.run(self.indices[id(group)], call, args, kwargs, final=final)
        except BaseException:
            # Inside, the caller may catch it and go on; in backward the engine reports it, and the next forward or
            # state_dict finds the frame.
            if self._calls == 1 and not frame.in_backward:
                self.drop()
            raise
        finally:
            self._calls -= 1
            if self._calls == 0 and self.frame is frame and not frame.in_backward:
                frame.pause()
                if not frame.has_graph:
                    self.state, self.frame = frame.commit_forward(), None

    def drop(self) -> None:
        """Forget the running frame: the iteration never happened."""
        if self.frame is not None:
            self.frame.abort()
            self.frame = None

    def reset(self) -> None:
        """`drop`, and forget gradients that earlier backwards have held back."""
        self.drop()
        s = self.state
        for unit in s.units:
            on_unit.drop_flight(unit, self._backend)
        units = tuple(UnitState(u.name, u.master) for u in s.units)
        self.state = HSDPState(units, s.layout, s.backend, s.step, 0, (), Token())

    def _running(self) -> Frame:
        self.undo_failed_backward()
        frame = self.frame
        if frame is not None and self._calls == 0 and not frame.in_backward and self._versions() != self._begun:
            self.drop()  # a forward was left over, and the parameters have changed since
            frame = None
        if frame is None:
            self._refresh()
            syncs = [g.settings.sync for g in self.groups]
            frame = Frame(self.state, syncs, tables=self._tables, on_backward=self._backward_begins)
            self.frame = frame
            self._begun = self._versions()
        return frame

    def undo_failed_backward(self) -> None:
        """Drop a frame whose backward raised: its end was never called."""
        frame = self.frame
        if frame is not None and frame.in_backward and torch._C._current_graph_task_id() < 0:
            warnings.warn(
                "the last backward didn't end, so it is undone: its gradients are dropped and forward starts anew",
                stacklevel=4,
            )
            self.drop()

    def _versions(self) -> list[object]:
        """What changes when somebody updates or replaces a parameter."""
        return [fact for g in self.groups for fact in g.marks()]

    def _refresh(self) -> None:
        """Follow what has changed outside: settings, frozen parameters, replaced local tensors."""
        s = self.state
        facts = [g.facts() for g in self.groups]
        layout = s.layout if facts == self._facts else self._plan()
        self._facts = facts
        units = tuple(g.adopt(p, u) for g, p, u in zip(self.groups, layout.units, s.units, strict=True))
        self.state = HSDPState(units, layout, s.backend, s.step, s.micro, (), Token())

    def _plan(self) -> Layout:
        specs: list[ParamSpec] = []
        units: list[UnitSpec] = []
        placements: dict[str, Placement] = {}
        paths = {id(m): name for name, m in self.root.named_modules()}
        for group in self.groups:
            mine = group.specs(self.root)
            specs += mine
            placements.update(zip((s.name for s in mine), group.placements(), strict=True))
            name = min((paths[id(m)] for m in group.modules), key=lambda n: (n != ROOT,))
            settings = group.settings
            owned = tuple(n for s in mine for n in (s.name, *s.aliases))
            units.append(UnitSpec(name, owned, settings.reshard_after_forward, settings.mp_policy, settings.reduction))
        return plan_layout(
            specs,
            mesh_spec(self.groups[0].mesh),
            units,
            offload_policy=self._backend.offload,
            placement_fn=lambda spec: placements[spec.name],
        )

    def _backward_begins(self) -> None:
        if self.frame is not None:
            self.frame.syncs = tuple([g.settings.sync for g in self.groups])
        Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        """Commit the frame and give the gradients to the parameters."""
        assert self.frame is not None
        state, self.frame = self.frame.commit(), None
        units = []
        for group, plan, unit in zip(self.groups, state.layout.units, state.units, strict=True):
            unit = on_unit.finish_reduce(unit, plan, self._backend, [])
            for param, grad in group.gradients(unit, plan):
                param.grad = grad if param.grad is None else param.grad + grad
                for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(param)
            units.append(
                UnitState(unit.name, unit.master, unit.full, unit.acc_full, unit.acc_partial, unit.reducing, None)
            )
        self._backend.settle()
        self.state = HSDPState(
            tuple(units), state.layout, state.backend, state.step, state.micro, state.ledger, state.token
        )
