"""The parameters of one `fully_shard` call: sharded, and standing in their modules as DTensors.

The local tensor of each `DTensor` parameter is a view of the unit's master, so that an optimizer's update in place is
an update of the state. A group keeps its own one-unit layout; the tree that takes it over plans all groups together,
with fully qualified names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp_fn import (
    LayoutError,
    MeshSpec,
    OnMesh,
    ParamSpec,
    Replicate,
    UnitState,
    plan_layout,
    settings,
)
from hsdp_fn.layout import Bucket, Layout, Placement, UnitLayout

from .backend import TorchBackend
from .binding import Slot
from .comm import UnitComm
from .dtensor import Standing, local_of, presented, require_stands, set_local
from .guards import fingerprint, mark_taken, taken_as
from .mesh import DataMesh
from .planning import ShardPlacementFn, has_extension, placement_of, require_plain_tensor
from .use import Handling

#: Parameters with what is to be added to their gradients, and the attribute that it is for.
Gradients = Sequence[tuple[nn.Parameter, DTensor, str]]


@dataclass(slots=True)
class Settings(settings.Settings):
    """The core's settings, and torch's own.

    Attributes:
        post_optimizer_event: what a tree of which this group is the root begins with.
    """

    post_optimizer_event: Any = None


@dataclass(eq=False)
class Group:
    """One unit of the facade.

    Attributes:
        modules: what was given to `fully_shard`; they run as one unit.
        data, backend: where it is sharded and what communicates.
        settings, handling, comm: what the setters change.
        layout: of this group alone. None for a group without parameters, as are ``unit`` and ``params``.
        slots: for every name of every parameter, the table it stands in; ``firsts``: each parameter's first slot.
        params: the sharded parameters, in the layout's order; ``standings``: what they are part of; ``wanted``: how
            each was to be placed.
        unit: the masters, until a tree takes them over.
        pointers: of the parameters' local tensors while they view the masters.
        initial, first_marks: for each mesh a fingerprint of the whole parameters there, and `marks`, when they were
            sharded.
        peers: the widest set of ranks that is known to take part in the model: the unit's, or the root's.
        to_run: modules that have yet to run in this pass through the group.
    """

    modules: list[nn.Module]
    data: DataMesh
    backend: TorchBackend
    settings: Settings
    handling: Handling = field(default_factory=Handling)
    comm: UnitComm = field(default_factory=UnitComm)
    layout: Layout | None = None
    slots: tuple[Slot, ...] = ()
    firsts: tuple[int, ...] = ()
    params: tuple[nn.Parameter, ...] = ()
    standings: tuple[Standing, ...] = ()
    wanted: tuple[Placement | OnMesh, ...] = ()
    unit: UnitState | None = None
    pointers: tuple[int, ...] = ()
    initial: Sequence[tuple[MeshSpec, str]] = ()
    peers: tuple[int, ...] = ()
    first_marks: Sequence[object] = ()
    to_run: set[int] = field(default_factory=set)

    # -- fully_shard --------------------------------------------------------------------------------------------

    def shard(
        self,
        places: Sequence[tuple[str, nn.Module, str]],
        ignored: Iterable[nn.Parameter],
        replicated: Sequence[nn.Parameter],
        placement_fn: ShardPlacementFn | None,
    ) -> None:
        """Plan and shard the parameters that stand in ``places``. Nothing changes before everything has been checked.

        Raises:
            LayoutError, ValueError: naming the parameter; see `plan_layout`.
        """
        left_out, whole = {id(p) for p in ignored}, {id(p) for p in replicated}
        if both := [name for name, m, local in places if id(m._parameters[local]) in left_out & whole]:
            raise LayoutError(f"parameters {both} are in ignored_params and in replicate_params; leave them in one")
        originals: list[nn.Parameter] = []
        names: list[list[str]] = []
        slots: list[Slot] = []
        known: dict[int, int] = {}
        for name, module, local in places:
            param = module._parameters[local]
            assert param is not None
            if id(param) in left_out:
                continue
            if (taken := taken_as(param) or getattr(param, "_hsdp_taken_in", None)) is not None:
                raise LayoutError(
                    f"parameter {name!r} is tied to {taken!r} of another fully_shard call, which would untie them; "
                    f"give both modules to one call: fully_shard([a, b], ...)"
                )
            at = known.setdefault(id(param), len(originals))
            if at == len(originals):
                originals.append(param)
                names.append([])
            names[at].append(name)
            slots.append((module._parameters, local, at))
        if not originals:
            return
        wanted: dict[str, Placement | OnMesh] = {}
        specs, standings, meshes = [], [], []
        for param, (first, *aliases) in zip(originals, names, strict=True):
            inner = local_of(param)
            require_plain_tensor(inner, first)
            if not param.is_meta and (objection := self.backend.objection(inner)) is not None:
                raise LayoutError(f"parameter {first!r} {objection}")
            if self.settings.whole or id(param) in whole:
                placement: Placement = Replicate()
                data = self.data
            else:
                placement, data = placement_of(param, first, placement_fn, self.data)
            wanted[first] = placement if data is self.data else OnMesh(placement, data.spec)
            meshes.append(data)
            require_stands(param, first, data)
            specs.append(ParamSpec(first, tuple(inner.shape), str(param.dtype), param.requires_grad, tuple(aliases)))
        layout = plan_layout(
            specs,
            self.data.spec,
            mp_policy=self.settings.mp_policy,
            offload_policy=self.backend.offload,
            fused=self.settings.fused,
            reshard_after_forward=self.settings.reshard_after_forward,
            placement_fn=lambda spec: wanted[spec.name],
        )
        if self.settings.reshard_after_forward is not None:
            self.settings.reshard_after_forward = layout.units[0].reshard_after_forward
        dims = _dims(layout.units[0])
        for param, (first, *_), data, dim in zip(originals, names, meshes, dims, strict=True):
            standings.append(Standing.of(param, first, data, dim))
        unit = UnitState("", tuple(_master(b, originals, self.backend) for b in layout.units[0].buckets))
        by_mesh: dict[MeshSpec, list[nn.Parameter]] = {}
        for param, data in zip(originals, meshes, strict=True):
            by_mesh.setdefault(data.spec, []).append(param)
        self.initial = [(mesh, fingerprint(local_of(p) for p in params)) for mesh, params in by_mesh.items()]
        self.wanted = tuple(wanted.values())
        mark_taken(originals, [first for first, *_ in names])
        self.layout, self.unit, self.slots, self.standings = layout, unit, tuple(slots), tuple(standings)
        self.firsts = tuple([next(i for i, slot in enumerate(slots) if slot[2] == at) for at in range(len(originals))])
        self.params = tuple(self._sharded_parameters(layout.units[0], unit, originals))
        if any(s.inner is not None for s in standings):
            self.handling.standings = self.standings
        for table, local, at in slots:
            table[local] = self.params[at]
        self.mark_experts()
        self.pointers = _pointers([local_of(p) for p in self.params])
        self.first_marks = self.marks([table[local] for table, local, _ in slots])

    # -- what a tree asks ---------------------------------------------------------------------------------------

    @property
    def hybrid(self) -> bool:
        """Whether a mesh of it both shards and replicates."""
        buckets = self.layout.units[0].buckets if self.layout is not None else ()
        meshes = [self.data.spec, *(bucket.mesh for bucket in buckets)]
        return any(mesh.shard and mesh.replicate for mesh in meshes)

    def unit_backend(self) -> TorchBackend:
        """What the group communicates with."""
        return self.backend if self.comm.is_default else self.backend.for_unit(self.comm)

    def specs(self, root: nn.Module) -> list[ParamSpec]:
        """The parameters with names as seen from the root of a tree, and as trainable and of the dtype that they are
        now."""
        if self.layout is None:
            return []
        earlier = [(s.name, *s.aliases) for s in self.layout.units[0].params]
        prefixes: dict[int, list[str]] = {}  # a module may stand under several names
        for name, m in root.named_modules(remove_duplicate=False):
            prefixes.setdefault(id(m._parameters), []).append(name)
        names: list[list[str]] = [[] for _ in self.params]
        for (table, local), at in {(id(table), local): at for table, local, at in self.slots}.items():
            names[at] += [f"{prefix}.{local}" if prefix else local for prefix in prefixes.get(table, ())]
        names = [found or [f"(removed) {old[0]}"] for found, old in zip(names, earlier, strict=True)]
        return [
            replace(spec, name=first, aliases=tuple(aliases), requires_grad=param.requires_grad, dtype=str(param.dtype))
            for spec, param, (first, *aliases) in zip(self.layout.units[0].params, self.params, names, strict=True)
        ]

    def facts(self) -> object:
        """What the plan depends on and users can change."""
        return self.settings.mp_policy, [p.requires_grad for p in self.params]  # another dtype is other memory, too

    def marks(self, entries: Sequence[nn.Parameter]) -> list[object]:
        """Of the parameters: identities, places in memory, and versions. An operator on a DTensor counts there, not in
        its local tensor; versions only grow.

        Args:
            entries: what stands in each of the group's slots.
        """
        params = [entries[at] for at in self.firsts]
        locals_ = [local_of(p) for p in params]
        versions = [p._version + t._version for p, t in zip(params, locals_, strict=True)]
        return [[id(p) for p in params], [t.data_ptr() for t in locals_], versions]

    def find(self) -> None:
        """Look up the parameters that stand in the modules now."""
        self.params = tuple([self.slots[at][0][self.slots[at][1]] for at in self.firsts])

    def adopt(self, plan: UnitLayout, unit: UnitState) -> UnitState:
        """Take over parameters that `find` has found replaced (``load_state_dict(assign=True)``) or whose local tensors
        aren't views of the masters any more (`to_empty`, ``.to(dtype)``): they are copied into masters, which the
        parameters view again afterwards.

        Raises:
            RuntimeError: parameters are still on the meta device, or aren't DTensors; names them.
        """
        if len(self.slots) > len(self.firsts):
            self._require_ties(plan)
        locals_ = [local_of(p) for p in self.params]
        if _pointers(locals_) == self.pointers and -1 not in self.pointers:
            return unit
        self._require_home(plan)
        self.require_plain()
        if unit.acc_full is not None or unit.acc_partial is not None:
            raise RuntimeError(
                f"parameters of unit {plan.title!r} were replaced or converted while gradients of earlier microbatches "
                f"are held back; finish the accumulation first, or drop it with reset_iter_state"
            )
        masters = []
        for bucket in plan.buckets:
            members = bucket.params.members
            rows = [locals_[m.index] for m in members]
            master = torch.zeros(bucket.params.numel, dtype=rows[0].dtype, device=self.backend.home)
            master = self.backend.join(bucket.mesh, bucket.params, master, rows)
            for member, row in zip(members, self.backend.split(bucket.mesh, bucket.params, master), strict=True):
                set_local(self.params[member.index], row)
            masters.append(master)
        self.mark_experts()
        self.pointers = _pointers([local_of(p) for p in self.params])
        return UnitState(unit.name, tuple(masters), None, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad)

    def gradients(self, unit: UnitState, plan: UnitLayout) -> Iterator[tuple[nn.Parameter, DTensor, str]]:
        """The finished gradient of the unit, as DTensors like the parameters, and the attribute that it is for."""
        where = "main_grad" if plan.mp_policy.apply_grad_on_fp32_main_grad else "grad"
        for bucket, flat in zip(plan.buckets, unit.grad.flats if unit.grad else (), strict=False):
            if flat is None or bucket.grads is None or unit.grad is None:
                continue
            rows = self.backend.split(bucket.mesh, bucket.grads, flat)
            for member, row in zip(bucket.grads.members, rows, strict=True):
                param = self.params[member.index]
                if unit.grad.present[member.index] and param.requires_grad:
                    yield param, self.standings[member.index].dtensor(row), where

    def presented(self, full: Sequence[Tensor]) -> Sequence[Tensor]:
        """What stands in the modules of gathered local tensors."""
        return full if self.handling.standings is None else presented(self.standings, full)

    # -- forward ------------------------------------------------------------------------------------------------

    def runs(self, module: nn.Module) -> Callable[[], bool]:
        """One of the modules begins to run. What is returned tells, when it has run, whether all of them have."""
        if len(self.modules) == 1:
            return _yes
        if not self.to_run:
            self.to_run.update(id(m) for m in self.modules)

        def ran() -> bool:
            if id(module) not in self.to_run:
                return False
            self.to_run.discard(id(module))
            return not self.to_run

        return ran

    # -- parts --------------------------------------------------------------------------------------------------

    def require_plain(self) -> None:
        """Somebody may have put all-gather hooks on a local tensor meanwhile.

        Raises:
            NotImplementedError: naming the parameter.
        """
        if self.layout is not None:
            for param, spec in zip(self.params, self.layout.units[0].params, strict=True):
                if has_extension(local_of(param)):
                    require_plain_tensor(local_of(param), spec.name)

    def mark_experts(self, peers: tuple[int, ...] = ()) -> None:
        """Tell `clip_grad_norm_` of parameters that stand on some of ``peers`` only: the others hold others."""
        self.peers = max(self.data.spec.data_parallel_group(self.backend.rank), peers, self.peers, key=len)
        for param, standing in zip(self.params, self.standings, strict=True):
            if not set(self.peers) <= set(standing.mesh.mesh.flatten().tolist()):
                param._hsdp_peers = self.peers  # type: ignore[attr-defined]

    def _require_ties(self, plan: UnitLayout) -> None:
        for table, local, at in self.slots:
            if table[local] is not self.params[at]:
                spec = plan.params[at]
                raise RuntimeError(
                    f"parameter {spec.name!r} is tied (also as {list(spec.aliases)}), but was replaced under one of "
                    f"its names only; put the same parameter at all of them"
                )

    def _require_home(self, plan: UnitLayout) -> None:
        plain = [s.name for s, p in zip(plan.params, self.params, strict=True) if not isinstance(p, DTensor)]
        if plain:
            raise RuntimeError(
                f"parameters were replaced by tensors that aren't sharded: {plain}; give them the DTensor that stood "
                f"there, or copy into it (load_state_dict, or param.to_local().copy_(shard))"
            )
        if still := [s.name for s, p in zip(plan.params, self.params, strict=True) if local_of(p).is_meta]:
            raise RuntimeError(
                f"parameters are still on the meta device: {still}; materialize and initialize them before the first "
                f"forward (module.to_empty(device=...), then its reset_parameters)"
            )
        home = self.backend.home
        away = [
            (s.name, str(local_of(p).device))
            for s, p in zip(plan.params, self.params, strict=True)
            if local_of(p).device.type != home.type
        ]
        if away:
            raise RuntimeError(f"parameters must be on {home}, where fully_shard has put them; found {away}")

    def _sharded_parameters(
        self, plan: UnitLayout, unit: UnitState, originals: Sequence[nn.Parameter]
    ) -> Iterator[nn.Parameter]:
        rows: dict[int, Tensor] = {}
        for bucket, master in zip(plan.buckets, unit.master, strict=True):
            parts = self.backend.split(bucket.mesh, bucket.params, master)
            for member, row in zip(bucket.params.members, parts, strict=True):
                rows[member.index] = row
        for at, original in enumerate(originals):
            row = rows[at].to("meta") if original.is_meta else rows[at]
            blank = self.standings[at].dtensor(torch.empty_like(row))
            param = nn.Parameter(blank, requires_grad=original.requires_grad)  # detaches what it is given
            set_local(param, row)
            _carry_over(original, param)
            param._hsdp_taken_in = plan.params[at].name  # type: ignore[attr-defined]  # by this call
            yield param


def hooked(gradients: Gradients) -> Gradients:
    """Gradients as the parameters' own hooks (``register_hook``) make them. These run before anything is added, so that
    one which raises leaves nothing added."""
    out = []
    for param, grad, where in gradients:
        for before in (param._backward_hooks or {}).values():
            changed: Any = before(grad)
            grad = grad if changed is None else changed
        out.append((param, grad, where))
    return out


def deliver(gradients: Gradients) -> None:
    """Add finished gradients, after `hooked`, to the parameters' ``.grad`` (or ``.main_grad``), in place, and run the
    hooks of ``register_post_accumulate_grad_hook``, as autograd would."""
    with torch.no_grad():
        for param, grad, where in gradients:
            held = getattr(param, where, None)
            if held is None:
                setattr(param, where, grad)
            elif isinstance(held, DTensor) and held._spec == grad._spec:
                held._local_tensor.add_(grad._local_tensor)
            else:
                held += grad
    for param, _, _ in gradients:
        for after in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
            after(param)


def group_of(module: Any) -> Group:
    """The unit that the module belongs to."""
    group: Group = module.__dict__["_hsdp_group"]
    return group


def groups_of(module: Any, recurse: bool = True) -> list[Group]:
    """The module's unit, if it has one, and with ``recurse`` those of the modules below, each once."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(m.__dict__["_hsdp_group"] for m in modules if "_hsdp_group" in m.__dict__))


def same_memory(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two `Group.marks` differ in versions at most."""
    return a[:2] == b[:2]


def _pointers(rows: Sequence[Tensor]) -> tuple[int, ...]:
    """Where the rows are; -1 for those without memory, which never count as in place."""
    return tuple([-1 if t.is_meta else t.data_ptr() for t in rows])


def _yes() -> bool:
    return True


def _dims(plan: UnitLayout) -> list[int | None]:
    """For each parameter the dim it is sharded on; None for a replicated one."""
    found = {m.index: (m.dim if b.mesh.shard else None) for b in plan.buckets for m in b.params.members}
    return [found[i] for i in range(len(plan.params))]


def _carry_over(original: nn.Parameter, param: nn.Parameter) -> None:
    """Attributes that users have set on the parameter (weight decay marks and the like), and its hooks."""
    param.__dict__.update({k: v for k, v in original.__dict__.items() if k != "_hsdp_taken"})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (known := getattr(original, hooks, None)) is not None:
            setattr(param, hooks, known)  # the very dict, so that their handles still remove them


def _master(bucket: Bucket, originals: Sequence[nn.Parameter], backend: TorchBackend) -> Tensor:
    params = [local_of(originals[m.index]) for m in bucket.params.members]
    if all(p.is_meta for p in params):
        return torch.empty(bucket.params.numel, dtype=params[0].dtype, device="meta")
    params = [torch.zeros(p.shape, dtype=p.dtype, device=backend.home) if p.is_meta else p for p in params]
    return backend.shard_params(bucket.mesh, bucket.params, params)
