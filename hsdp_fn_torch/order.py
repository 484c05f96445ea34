"""In which order the units of a frame run, and which of them to gather ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hsdp_fn import Layout

from .use import Handling, Use


class Order:
    """Follows the units through forward, and says what to prefetch.

    Forward: what is set by hand, else the units that come next in the layout (``followers`` None) or that came next in
    the last pass (``followers``, learned here). Backward: what is set by hand, else the units that forward finished
    before.

    Args:
        followers: for a unit the one that ran after it; kept by the caller from frame to frame.
    """

    def __init__(self, layout: Layout, handling: Sequence[Handling], followers: dict[int, int] | None) -> None:
        self._layout, self._handling, self._followers = layout, handling, followers
        self.begun: set[int] = set()  # units that have begun in this pass through the model
        self._last = -1  # the one that began last
        self._finished: list[int] = []  # units in the order in which they finished forward
        self._again: list[int] = []  # units to gather again, in the order in which backward needs them
        self._place: dict[int, int] = {}  # position there

    def begin(self, index: int) -> Iterable[int]:
        """A unit begins its forward. Units to start gathering."""
        if self._followers is None and index < self._last:
            self.begun.clear()  # another pass through the model
        if self._followers is not None and self._last >= 0:
            self._followers[self._last] = index
        self._last = index
        self.begun.add(index)
        explicit = self._handling[index].forward_prefetch
        return self._next(index) if explicit is None else explicit

    def finish(self, index: int) -> None:
        """A unit has run."""
        self._finished.append(index)

    def pause(self) -> None:
        """No forward runs any more."""
        if self._followers is not None:
            self._followers.pop(self._last, None)  # nothing came after it
        self._last = -1
        self.begun.clear()

    def begin_backward(self) -> None:
        """Plan what backward will gather."""
        ways = self._handling
        wanted = (i for i in reversed(self._finished) if ways[i].reshard_after_forward and ways[i].unshard_in_backward)
        self._again = list(dict.fromkeys(wanted))
        self._place = {index: at for at, index in enumerate(self._again)}

    def before(self, index: int, uses: Sequence[Use]) -> Iterable[int]:
        """A unit begins its backward. Units to start gathering."""
        explicit = self._handling[index].backward_prefetch
        if explicit is not None:
            return explicit
        first = self._place.get(index, -1) + 1
        ahead = self._again[first : first + self._layout.prefetch.backward]
        return [i for i in ahead if not uses[i].reduced]

    def settle(self, uses: Sequence[Use]) -> None:
        """A backward has ended: forget units of which no graph is left."""
        self._finished = [i for i in self._finished if uses[i].nodes > 0]

    def _next(self, index: int) -> list[int]:
        out: list[int] = []
        for _ in range(self._layout.prefetch.forward):
            index = index + 1 if self._followers is None else self._followers.get(index, len(self._handling))
            if index >= len(self._handling):
                break
            if index not in self.begun:
                out.append(index)
        return out
