"""What a frame keeps of each unit."""

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
        kept: it came gathered: its full parameters belong to the state that the frame began with, and stay gathered
            through forward.
        depth: calls of it that are running, one inside the other.
        attached: outputs of its newest autograd node, while they are installed or may be again.
        nodes: autograd nodes made for it that backward hasn't reached.
        partial: gradients so far.
        reduced: they have been handed on.
    """

    state: UnitState
    kept: bool
    depth: int = 0
    attached: tuple[Tensor, ...] | None = None
    nodes: int = 0
    partial: list[Tensor | None] | None = None
    reduced: bool = False

    def add_partial(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the full parameters."""
        if self.partial is None:
            self.partial = list(grads)
        else:
            pairs = zip(self.partial, grads, strict=True)
            self.partial = [g if o is None else o if g is None else o + g for o, g in pairs]
