"""What a frame keeps of each unit, and of each forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspore import Tensor

from hsdp_fn import UnitState


@dataclass(slots=True, eq=False)
class Use:
    """One unit in a frame.

    Attributes:
        state: the unit's state as it moves.
        kept: its full parameters stay when the forward has ended: they came gathered, were gathered by hand, or are not
            to be freed after backward.
        held: they were gathered by hand, and are installed between forwards too.
        depth: calls of it that are running, one inside the other.
        attached: outputs of its newest autograd node, while they are installed or may be again.
        partial: gradients so far.
        reduced: they have been handed on.
    """

    state: UnitState
    kept: bool
    held: bool = False
    depth: int = 0
    attached: tuple[Tensor, ...] | None = None
    partial: list[Tensor | None] | None = None
    reduced: bool = False

    def add_partial(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the full parameters."""
        if self.partial is None:
            self.partial = list(grads)
        else:
            pairs = zip(self.partial, grads, strict=True)
            self.partial = [g if o is None else o if g is None else o + g for o, g in pairs]


class Pass:
    """One outermost forward, and the backward of its graph. Lives as long as the graph.

    Attributes:
        number: see `hsdp_fn.order.Order`.
        epoch: how often parameters had changed before it.
        anchor: what its nodes hang on, so that autograd makes them; None without gradients.
    """

    __slots__ = ("__weakref__", "_left", "_made", "anchor", "epoch", "number")

    def __init__(self, number: int, epoch: int) -> None:
        self.number, self.epoch = number, epoch
        self.anchor: Tensor | None = None
        self._made: dict[int, int] = {}  # by unit, autograd nodes
        self._left: dict[int, int] = {}  # of these, those that backward hasn't reached

    def add_node(self, index: int) -> None:
        """The unit has one more autograd node."""
        self._made[index] = self._left[index] = self._made.get(index, 0) + 1

    def reach_node(self, index: int) -> bool:
        """Backward has reached a node of the unit. Whether it was the last one."""
        self._left[index] -= 1
        return self._left[index] == 0

    def end(self) -> None:
        """Its backward has ended; with a graph that was retained there may be another."""
        self._left = dict(self._made)
