"""A model of the state that only adds dictionaries: what a unit holds, which collectives it has issued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsdp_fn import Collective, GradPhase, ParamPhase, Sync
from hsdp_fn.layout import Bucket, UnitLayout
from tests.strategies import Case

Array = npt.NDArray[Any]
#: Per-rank sums over microbatches, ``[ranks, *shape]`` in float64; a name that isn't there has no gradient.
Sums = dict[str, Array]


def add(a: Sums | None, b: Mapping[str, Array | None]) -> Sums:
    """Sums of both, over the names of either."""
    out = dict(a or {})
    for name, value in b.items():
        if value is not None:
            out[name] = out.get(name, 0) + value.astype("float64")
    return out


@dataclass
class UnitModel:
    """One unit.

    Attributes:
        plan: its layout.
        params: where its parameters are.
        whole, partial, ready: sums held by NONE microbatches, held by SHARD microbatches, finished.
        flight: how far the reduction in flight goes, and its sums.
        early: buckets of that reduction which were all-reduced at once.
    """

    plan: UnitLayout
    params: ParamPhase = ParamPhase.SHARDED
    whole: Sums | None = None
    partial: Sums | None = None
    flight: tuple[Sync, Sums] | None = None
    ready: Sums | None = None
    early: list[Bucket] = field(default_factory=list)

    @property
    def grads(self) -> GradPhase:
        if self.flight is not None:
            return GradPhase.REDUCING
        if self.whole is not None or self.partial is not None:
            return GradPhase.HELD
        return GradPhase.EMPTY if self.ready is None else GradPhase.READY

    def gather(self) -> list[Collective]:
        """Start the gather; its collectives, over the groups that the parameters are split over now."""
        before, buckets = self.params, self.plan.buckets
        if before not in (ParamPhase.SHARDED, ParamPhase.REGROUPED):
            return []
        self.params = ParamPhase.GATHERING
        gathers = [b.regather.gather if b.regather and before is ParamPhase.REGROUPED else b.gather for b in buckets]
        return [gather for gather in gathers if gather is not None]

    def land(self) -> None:
        """Finish the gather."""
        if self.params is ParamPhase.GATHERING:
            self.params = ParamPhase.UNSHARDED

    def reshard(self, *, after_forward: bool) -> None:
        """Drop the full parameters, after forward no further than to groups of the size that the plan says."""
        size = self.plan.reshard_after_forward
        splits = not isinstance(size, bool) and any(b.mesh.shard_size > size for b in self.plan.buckets)
        if not (after_forward and splits):
            self.params = ParamPhase.SHARDED
        elif self.params is ParamPhase.UNSHARDED:
            self.params = ParamPhase.REGROUPED

    def reduce(self, case: Case, given: Mapping[str, Array | None], sync: Sync) -> list[Collective]:
        """Take in one microbatch; the reduce-scatters issued."""
        names = [p.name for p in self.plan.trainable]
        total = add(self.whole, {n: given.get(n) for n in names})
        if sync is Sync.NONE:
            self.whole = total or None
            return []
        if self.plan.reduction.unused == "zeros":
            zeros = {n: np.zeros((case.mesh.size, *case.places[n][1].spec.shape)) for n in names}
            total = add(zeros, total)
        if not total and (sync is Sync.SHARD or self.partial is None):
            return []
        self.whole, self.flight = None, (sync, total)
        scattered = self._taking_part(total)
        self.early = self._all_reduced_at_once(total) if sync is Sync.FULL else []
        return [
            c
            for bucket in self.plan.buckets
            for c in (
                bucket.reduce_scatter if bucket in scattered else None,
                bucket.all_reduce if bucket in self.early else None,
            )
            if c is not None
        ]

    def finish(self) -> list[Collective]:
        """Finish the reduction in flight; the all-reduces issued."""
        if self.flight is None:
            return []
        sync, total = self.flight
        total = add(self.partial, total)
        self.flight, self.partial = None, None
        if sync is Sync.SHARD:
            self.partial = total
            return []
        self.ready = add(self.ready, total)
        return [b.all_reduce for b in self._taking_part(total) if b.all_reduce is not None and b not in self.early]

    def drop(self, *, gradients: bool) -> None:
        """Back to sharded; without gradients when they are dropped too."""
        self.params = ParamPhase.SHARDED
        if gradients:
            self.whole = self.partial = self.flight = self.ready = None

    def _taking_part(self, total: Sums) -> list[Bucket]:
        """Buckets with a gradient."""
        return [b for b in self.plan.buckets if b.grads and any(m.spec.name in total for m in b.grads.members)]

    def _all_reduced_at_once(self, total: Sums) -> list[Bucket]:
        """Buckets without a shard group don't wait for a reduce-scatter; what SHARD microbatches held goes along."""
        return [b for b in self._taking_part(add(self.partial, total)) if b.reduce_scatter is None]
