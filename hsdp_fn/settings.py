"""What users have set for the units of a module, and the layout that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .layout import ROOT, Layout, OnMesh, ParamSpec, Placement, UnitSpec
from .mesh import MeshSpec
from .planner import plan_layout
from .policy import MixedPrecisionPolicy, OffloadPolicy, ReductionPolicy


@dataclass(slots=True)
class Settings:
    """What `fully_shard` was given and setters change.

    Attributes:
        reshard_after_forward: True, False, a group size, or None for True except at the root.
        mp_policy, reduction: see these classes.
        fused: one collective of a kind for all parameters of one dtype.
        whole: nothing is sharded (`replicate`).
        forward_prefetch, backward_prefetch: groups to gather while this one runs; None for the default.
        last_backward, strict: what a tree of which this group is the root begins with.
    """

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    reduction: ReductionPolicy
    fused: bool = True
    whole: bool = False
    forward_prefetch: list[Any] | None = None
    backward_prefetch: list[Any] | None = None
    last_backward: bool = True
    strict: bool = False


class GroupPlan(NamedTuple):
    """One group, as `plan_groups` takes it.

    Attributes:
        modules: names of its modules as seen from the root; "(removed)" for one that isn't below the root any more.
        params: its parameters, with names as seen from there.
        wanted: how each is to be placed.
        settings: what users have set.
        mesh: where it is sharded, unless ``wanted`` says otherwise.
    """

    modules: Sequence[str]
    params: Sequence[ParamSpec]
    wanted: Sequence[Placement | OnMesh]
    settings: Settings
    mesh: MeshSpec


def plan_groups(groups: Iterable[GroupPlan], mesh: MeshSpec, offload: OffloadPolicy) -> Layout:
    """One layout of all groups below a root. Does not communicate.

    Args:
        mesh: the root's.

    Raises:
        LayoutError: see `plan_layout`.
    """
    specs: list[ParamSpec] = []
    units: list[UnitSpec] = []
    wanted: dict[str, Placement | OnMesh] = {}
    for group in groups:
        specs += group.params
        wanted.update(zip((s.name for s in group.params), group.wanted, strict=True))
        settings = group.settings
        units.append(
            UnitSpec(
                min(group.modules, key=lambda name: name != ROOT),
                tuple(n for s in group.params for n in (s.name, *s.aliases)),
                settings.reshard_after_forward,
                settings.mp_policy,
                settings.reduction,
                settings.fused,
                group.mesh,
            )
        )
    return plan_layout(specs, mesh, units, offload_policy=offload, placement_fn=lambda spec: wanted[spec.name])
