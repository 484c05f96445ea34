"""What users have set for the units of a module, and the layout that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .handling import Handling
from .layout import ROOT, Layout, OnMesh, ParamSpec, Placement, UnitSpec
from .mesh import MeshSpec
from .planner import plan_layout
from .policy import MixedPrecisionPolicy, OffloadPolicy, ReductionPolicy
from .state import HSDPState


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


class ArrangedGroup(Protocol):
    """A group, as `arrange` takes it."""

    @property
    def modules(self) -> Sequence[object]:
        """What runs as one unit."""
        ...

    @property
    def settings(self) -> Settings:
        """What users have set."""
        ...

    @property
    def handling(self) -> Handling:
        """How frames treat it."""
        ...

    @property
    def layout(self) -> Layout | None:
        """None for a group without parameters."""
        ...


def arrange(groups: Iterable[ArrangedGroup], root: object, indices: Mapping[int, int]) -> None:
    """Work out what settings mean below a root: its own default of resharding, and prefetch lists.

    Args:
        groups: all of them; their ``handling`` is changed.
        indices: of those with parameters the place in the layout, by identity.

    Raises:
        ValueError: a prefetch list names a module of another root.
    """

    def places(listed: Sequence[ArrangedGroup] | None) -> tuple[int, ...] | None:
        if listed is None:
            return None
        with_parameters = [g for g in listed if g.layout is not None]
        strangers = [type(g.modules[0]).__name__ for g in with_parameters if id(g) not in indices]
        if strangers:
            raise ValueError(f"modules to prefetch must belong to the same root module; {strangers} don't")
        return tuple([indices[id(g)] for g in with_parameters])

    for group in groups:
        s, way = group.settings, group.handling
        default = not any(module is root for module in group.modules)
        way.reshard_after_forward = default if s.reshard_after_forward is None else s.reshard_after_forward
        way.forward_prefetch = places(s.forward_prefetch)
        way.backward_prefetch = places(s.backward_prefetch)


def require_sums_fit(state: HSDPState, layout: Layout) -> None:
    """Can the state's units go on with a new layout of the same parameters?

    Raises:
        RuntimeError: reduce-scattered sums of earlier microbatches are held, of other trainable parameters.
    """
    for unit, old, new in zip(state.units, state.layout.units, layout.units, strict=True):
        frozen = [p.requires_grad for p in old.params] != [p.requires_grad for p in new.params]
        if unit.acc_partial is not None and frozen:
            raise RuntimeError(
                f"parameters of unit {new.title!r} were frozen or unfrozen while sums of earlier microbatches are "
                f"held back; finish the accumulation first, or drop it with reset_iter_state"
            )


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
