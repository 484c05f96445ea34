"""What a frame keeps of each unit, and how it is to treat it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hsdp_fn import UnitState
from hsdp_fn.handling import Handling as AnyHandling
from hsdp_fn.layout import UnitLayout

from .dtensor import Standing, absorbed, presented


@dataclass(slots=True, eq=False)
class Handling(AnyHandling):
    """How a frame treats one unit, see `hsdp_fn.handling`.

    Attributes:
        standings: what the full parameters are in the modules, where these are DTensors of tensor parallelism.
    """

    standings: Sequence[Standing] | None = None


@dataclass(slots=True, eq=False)
class Use:
    """One unit in a frame.

    Attributes:
        state: the unit's state as it moves.
        kept: it came gathered: its full parameters belong to the state that the frame began with.
        depth: calls of it that are running, one inside the other.
        attached: outputs of its newest autograd node, while they are installed or may be again.
        over: that node's call has ended; the next call makes a node of its own.
        held: gathered by hand, and installed until it is resharded or a backward has ended.
        tickets: of the live autograd nodes of its forwards.
        epoch: how often its parameters have changed; graphs of an earlier one can't be differentiated.
        ran: it has run in a differentiable forward since it was last reduced or resharded by a backward.
        packed: saved views of its parameters that backward hasn't asked for yet.
        leaves: what checkpointed parts of it recompute with in backward, and differentiate into.
        partial: gradients so far.
        reduced: they have been handed on.
    """

    state: UnitState
    kept: bool
    depth: int = 0
    attached: tuple[Tensor, ...] | None = None
    over: bool = False
    held: bool = False
    tickets: list[weakref.ref[Ticket]] = field(default_factory=list)
    epoch: int = 0
    ran: bool = False
    packed: int = 0
    leaves: tuple[Tensor, ...] | None = None
    partial: list[Tensor | None] | None = None
    reduced: bool = False

    @property
    def waits(self) -> bool:
        """Whether some graph of it is alive that no backward has reached."""
        return any(t.backward is None and not t.ahead for t in self.live())

    def live(self, *, but: Ticket | None = None) -> list[Ticket]:
        """Tickets of nodes that are alive."""
        return [t for ref in self.tickets if (t := ref()) is not None and t is not but]

    def make_leaves(self, plan: UnitLayout, way: Handling, full: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """New ``leaves`` over the full parameters."""
        self.collect_leaves(plan, way)
        leaves = tuple([t.detach() for t in full]) if self.kept else full  # the state that came in has those
        if way.standings is not None:
            leaves = tuple(presented(way.standings, leaves))
        for tensor, spec in zip(leaves, plan.params, strict=True):
            tensor.grad = None
            tensor.requires_grad_(spec.requires_grad)
        self.leaves = leaves
        return leaves

    def collect_leaves(self, plan: UnitLayout, way: Handling) -> None:
        """Add what the leaves have received to ``partial``, and forget them."""
        if self.leaves is not None:
            grads = [t.grad for t in self.leaves]
            for tensor in self.leaves:
                tensor.grad = None  # the tensor may stay gathered; the gradient is counted once
            self.leaves = None
            if any(g is not None for g in grads):
                self.add_partial(plan, way, grads)

    def disown_full(self) -> None:
        """Full parameters that stay gathered don't stay leaves, which `make_leaves` has made of them."""
        full = self.state.full
        if isinstance(full, tuple) and any(t.requires_grad for t in full):
            self.state = replace(self.state, full=tuple([t.detach() for t in full]))

    def add_partial(self, plan: UnitLayout, way: Handling, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the full parameters. Communicates where tensor parallelism has left sums to be made."""
        if way.standings is not None:
            grads = absorbed(way.standings, plan, grads)
        if self.partial is None:
            self.partial = list(grads)
        else:
            pairs = zip(self.partial, grads, strict=True)
            self.partial = [g if o is None else o if g is None else o + g for o, g in pairs]


class Ticket:
    """One autograd node of a unit, made in a forward. Lives as long as the node.

    Attributes:
        number: of the pass it was made in.
        epoch: of the unit's parameters then.
        backward: number of the last backward that brought its gradients; None before.
        ahead: nothing waits for them.
    """

    __slots__ = ("__weakref__", "_node", "ahead", "backward", "epoch", "number")

    def __init__(self, node: Any, number: int, epoch: int, ahead: bool) -> None:
        self._node = weakref.ref(node)
        self.number, self.epoch, self.ahead = number, epoch, ahead
        self.backward: int | None = None

    def expected(self, backward: int) -> bool:
        """Whether the running backward will still bring its gradients."""
        node = self._node()
        return self.backward != backward and node is not None and bool(torch._C._will_engine_execute_node(node))
