"""What a frame keeps of each unit, and how it is to treat it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hsdp_fn import HSDPState, Sync, UnitState
from hsdp_fn.layout import UnitLayout

from .dtensor import Standing, absorbed, presented

if TYPE_CHECKING:
    from .frame import Frame


@dataclass(slots=True, eq=False)
class Handling:
    """How a frame treats one unit. Read whenever it matters, so that the facade's setters take effect at once.

    Attributes:
        sync: how far backward reduces its gradients.
        reshard_after_forward: free its full parameters when it has run.
        reshard_after_backward: free them when a backward has ended.
        unshard_in_backward: gather it when gradients reach its output. Without, it is gathered only if autograd asks
            for a parameter it has saved.
        forward_prefetch, backward_prefetch: units to start gathering when this one runs; None: the frame's default.
        max_reductions: reductions that may be in flight when this unit's starts, its own included.
        standings: what the full parameters are in the modules, where these are DTensors of tensor parallelism.
    """

    sync: Sync = Sync.FULL
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    max_reductions: int = 1
    standings: Sequence[Standing] | None = None


def handling_of(state: HSDPState, sync: Sync) -> list[Handling]:
    """As the layout says; units that come gathered stay so through forward."""
    return [
        Handling(sync, plan.reshard_after_forward and not isinstance(unit.full, tuple))
        for plan, unit in zip(state.layout.units, state.units, strict=True)
    ]


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
        nodes: live autograd nodes of the forward whose gradients haven't come.
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
    nodes: int = 0
    packed: int = 0
    leaves: tuple[Tensor, ...] | None = None
    partial: list[Tensor | None] | None = None
    reduced: bool = False

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
            self.leaves = None
            if any(g is not None for g in grads):
                self.add_partial(plan, way, grads)

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
    """Counts an autograd node of a unit until its gradients come or its graph is freed."""

    __slots__ = ("_frame", "_index")

    def __init__(self, frame: Frame, index: int) -> None:
        self._frame: weakref.ref[Frame] | None = weakref.ref(frame)
        self._index = index
        frame.uses[index].nodes += 1

    def close(self) -> None:
        """Count it no more. May be called again."""
        if self._frame is not None:
            frame, self._frame = self._frame(), None
            if frame is not None:
                frame.uses[self._index].nodes -= 1

    def __del__(self) -> None:
        self.close()
