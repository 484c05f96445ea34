"""How a running forward and backward is to treat each unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from .layout import Layout
from .policy import ReductionPolicy, Sync
from .state import HSDPState


@dataclass(slots=True, eq=False)
class Handling:
    """How a frame treats one unit. Read whenever it matters, so that the facade's setters take effect at once.

    Attributes:
        sync: how far backward reduces its gradients.
        reshard_after_forward: free its full parameters when it has run. An int: keep them over groups of so many ranks.
        reshard_after_backward: free them when a backward has ended.
        unshard_in_backward: gather it when gradients reach its output. Without, it is gathered only if autograd asks
            for a parameter it has saved.
        forward_prefetch, backward_prefetch: units to start gathering when this one runs; None: the frame's default.
        max_reductions: reductions that may be in flight when this unit's starts, its own included.
    """

    sync: Sync = Sync.FULL
    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    max_reductions: int = 1


H = TypeVar("H", bound=Handling)


def handling_of(state: HSDPState, sync: Sync, kind: type[H], *, reshard_after_backward: bool = True) -> list[H]:
    """One a unit, as the layout says; units that come gathered stay so through forward.

    Args:
        kind: `Handling`, or what a framework makes of it.
    """
    return [
        kind(sync, False if isinstance(unit.full, tuple) else plan.reshard_after_forward, reshard_after_backward)
        for plan, unit in zip(state.layout.units, state.units, strict=True)
    ]


def handled(layout: Layout, reductions: Sequence[ReductionPolicy], handling: Sequence[Handling]) -> Layout:
    """The layout, saying of each unit how it is reduced and handled now. The very same one where it says so already."""
    ways = [(r, way.reshard_after_forward) for r, way in zip(reductions, handling, strict=True)]
    units = layout.units
    if all((u.reduction, u.reshard_after_forward) == way for u, way in zip(units, ways, strict=True)):
        return layout
    units = tuple(
        [replace(u, reduction=r, reshard_after_forward=reshard) for u, (r, reshard) in zip(units, ways, strict=True)]
    )
    return replace(layout, units=units)


@contextmanager
def reducing_fully(handling: Sequence[Handling]) -> Iterator[None]:
    """Inside, backward reduces everything, whatever is set."""
    syncs = [way.sync for way in handling]
    for way in handling:
        way.sync = Sync.FULL
    try:
        yield
    finally:
        for way, sync in zip(handling, syncs, strict=True):
            way.sync = sync
