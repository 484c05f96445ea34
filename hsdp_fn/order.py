"""In which order the units of a frame run, and which of them to gather ahead.

A *pass* is one outermost call: the root's forward, or a module called alone. Backward follows the pass that it
differentiates. Nothing here, nor in what a frame gathers and reduces, depends on which graphs Python still holds: that
differs from rank to rank, and collectives must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .handling import Handling
from .layout import Layout
from .reducer import Reducing

_PASSES = 256  # remembered; a backward of an older one gathers nothing ahead


class Order:
    """Follows the units through passes, and says what to prefetch.

    Forward: what is set by hand, else the units that come next in the layout (``followers`` None) or that came next the
    last time (``followers``, learned here). Backward: what is set by hand, else the unit that finished before in the
    same pass.

    Args:
        followers: for a unit the one that ran after it; kept by the caller from frame to frame.

    Attributes:
        now: number of the present pass.
        begun: units that have begun in it.
        whole: numbers of passes through the root.
        reached: passes that the present backward has reached; ``at`` is the latest.
    """

    def __init__(self, layout: Layout, handling: Sequence[Handling], followers: dict[int, int] | None) -> None:
        self._layout, self._handling, self._followers = layout, handling, followers
        self.now = self.at = 0
        self.begun: set[int] = set()
        self.whole: set[int] = set()
        self.reached: set[int] = set()
        self._last = -1  # the unit that began last
        self._finished: dict[int, list[int]] = {0: []}  # by pass, units in the order in which they finished
        self._runs: dict[int, tuple[list[int], dict[int, int]]] = {}  # by pass, for the present backward

    def begin(self, index: int) -> Iterable[int]:
        """A unit begins its forward. Units to start gathering."""
        if self._followers is None and index < self._last:
            self.begun.clear()  # the model runs once more
        if self._followers is not None and self._last >= 0:
            self._followers[self._last] = index
        self._last = index
        self.begun.add(index)
        explicit = self._handling[index].forward_prefetch
        return self._next(index) if explicit is None else explicit

    def finish(self, index: int) -> None:
        """A unit has run."""
        self._finished[self.now].append(index)

    def end_pass(self, *, whole: bool) -> None:
        """The outermost call has returned; it was the root's if ``whole``."""
        if self._followers is not None:
            self._followers.pop(self._last, None)  # nothing came after it
        if whole:
            self.whole.add(self.now)
        self._last = -1
        self.begun.clear()
        self.now += 1
        self._finished[self.now] = []
        self._finished.pop(self.now - _PASSES, None)
        self.whole.discard(self.now - _PASSES)

    def reach(self, number: int) -> None:
        """Backward has come to a pass."""
        self.at = number
        self.reached.add(number)

    def before(self, index: int, number: int, uses: Sequence[Reducing]) -> Iterable[int]:
        """A unit begins its backward of a pass. Units to start gathering."""
        explicit = self._handling[index].backward_prefetch
        if explicit is not None:
            return explicit
        ways = self._handling
        ahead: list[int] = []
        run, place = self._backwards_of(number)
        at = place.get(index, -1) + 1
        while at < len(run) and len(ahead) < self._layout.prefetch.backward:
            way = ways[run[at]]
            if way.reshard_after_forward and way.unshard_in_backward:
                ahead.append(run[at])
            at += 1
        return [i for i in ahead if not uses[i].reduced]

    def end_backward(self) -> bool:
        """A backward has ended. Whether it went through the root."""
        whole = bool(self.reached & self.whole)
        self.whole -= self.reached
        self.reached.clear()
        self._runs.clear()
        return whole

    def _backwards_of(self, number: int) -> tuple[list[int], dict[int, int]]:
        """Units of a pass in the order in which backward needs them, and each one's position."""
        found = self._runs.get(number)
        if found is None:
            run = list(dict.fromkeys(reversed(self._finished.get(number, ()))))
            found = self._runs[number] = run, {index: at for at, index in enumerate(run)}
        return found

    def _next(self, index: int) -> list[int]:
        out: list[int] = []
        for _ in range(self._layout.prefetch.forward):
            index = index + 1 if self._followers is None else self._followers.get(index, len(self._handling))
            if index >= len(self._handling):
                break
            if index not in self.begun:
                out.append(index)
        return out
