"""The parameters of one `fully_shard` call: sharded, and standing in their modules as DTensors.

The local tensor of each `DTensor` parameter is a view of the unit's master, so that an optimizer's update in place is
an update of the state. A group keeps its own one-unit layout; the tree that takes it over plans all groups together,
with fully qualified names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from hsdp_fn import LayoutError, ParamSpec, ReductionPolicy, Replicate, Shard, Sync, UnitState, plan_layout
from hsdp_fn.layout import Bucket, Layout, Member, Placement, UnitLayout
from hsdp_fn.policy import MixedPrecisionPolicy

from .backend import TorchBackend
from .binding import Slot
from .mesh import mesh_spec

ShardPlacementFn = Callable[[nn.Parameter], TorchShard | None]


@dataclass(slots=True)
class Settings:
    """What the setters of `HSDPModule` change: how the next iteration treats the group.

    Attributes:
        reshard_after_forward: True, False, or None for True except at the root.
        mp_policy, reduction: see the core's policies.
        sync_gradients, all_reduce: False holds back all communication of gradients, or only the all-reduce.
    """

    reshard_after_forward: bool | None
    mp_policy: MixedPrecisionPolicy
    reduction: ReductionPolicy
    sync_gradients: bool = True
    all_reduce: bool = True

    @property
    def sync(self) -> Sync:
        """How far the next backward reduces."""
        if not self.sync_gradients:
            return Sync.NONE
        return Sync.FULL if self.all_reduce else Sync.SHARD


@dataclass(eq=False)
class Group:
    """One unit of the facade.

    Attributes:
        modules: what was given to `fully_shard`; they run as one unit.
        mesh, backend: where it is sharded and what communicates.
        layout: of this group alone. None for a group without parameters, as are ``unit`` and ``params``.
        slots: for every name of every parameter, the table it stands in.
        params: the sharded parameters, in the layout's order.
        unit: the masters.
        settings: see `Settings`.
        pointers: of the parameters' local tensors while they view the masters.
    """

    modules: list[nn.Module]
    mesh: DeviceMesh
    backend: TorchBackend
    settings: Settings
    layout: Layout | None = None
    slots: tuple[Slot, ...] = ()
    params: tuple[nn.Parameter, ...] = ()
    unit: UnitState | None = None
    pointers: tuple[int, ...] = ()

    def shard(
        self,
        places: Sequence[tuple[str, nn.Module, str]],
        ignored: Iterable[nn.Parameter],
        replicated: Iterable[nn.Parameter],
        placement_fn: ShardPlacementFn | None,
    ) -> None:
        """Plan and shard the parameters that stand in ``places``. Nothing changes before everything has been checked.

        Raises:
            LayoutError, ValueError: naming the parameter; see `plan_layout`.
        """
        left_out, whole = {id(p) for p in ignored}, {id(p) for p in replicated}
        originals: list[nn.Parameter] = []
        names: list[list[str]] = []
        slots: list[Slot] = []
        for name, module, local in places:
            param = module._parameters[local]
            assert param is not None
            if id(param) in left_out:
                continue
            if (taken := getattr(param, "_hsdp_taken", None)) is not None:
                raise LayoutError(
                    f"parameter {name!r} is tied to {taken!r} of another fully_shard call, which would untie them; "
                    f"give both modules to one call: fully_shard([a, b], ...)"
                )
            known = [i for i, p in enumerate(originals) if p is param]
            if not known:
                originals.append(param)
                names.append([])
            at = known[0] if known else len(originals) - 1
            names[at].append(name)
            slots.append((module._parameters, local, at))
        if not originals:
            return
        placements: dict[str, Placement] = {}
        specs = []
        for param, (first, *aliases) in zip(originals, names, strict=True):
            if not param.is_meta and (objection := self.backend.objection(param)) is not None:
                raise LayoutError(f"parameter {first!r} {objection}")
            placements[first] = Replicate() if id(param) in whole else _placement(param, first, placement_fn)
            specs.append(ParamSpec(first, tuple(param.shape), str(param.dtype), param.requires_grad, tuple(aliases)))
        layout = plan_layout(
            specs,
            mesh_spec(self.mesh),
            mp_policy=self.settings.mp_policy,
            offload_policy=self.backend.offload,
            placement_fn=lambda spec: placements[spec.name],
        )
        unit = UnitState("", tuple(_master(b, originals, self.backend) for b in layout.units[0].buckets))
        for param, (first, *_) in zip(originals, names, strict=True):
            param._hsdp_taken = first  # type: ignore[attr-defined]  # whoever holds it still can tell
        self.layout, self.unit, self.slots = layout, unit, tuple(slots)
        self.params = tuple(self._sharded_parameters(layout.units[0], unit, originals))
        for table, local, at in slots:
            table[local] = self.params[at]
        self.pointers = self._pointers()

    def specs(self, root: nn.Module) -> list[ParamSpec]:
        """The parameters with names as seen from the root of a tree, and as trainable as they are now."""
        if self.layout is None:
            return []
        prefixes = {id(m._parameters): name for name, m in root.named_modules(remove_duplicate=False)}
        names: list[list[str]] = [[] for _ in self.params]
        for table, local, at in self.slots:
            prefix = prefixes[id(table)]
            names[at].append(f"{prefix}.{local}" if prefix else local)
        return [
            replace(spec, name=first, aliases=tuple(aliases), requires_grad=param.requires_grad)
            for spec, param, (first, *aliases) in zip(self.layout.units[0].params, self.params, names, strict=True)
        ]

    def placements(self) -> list[Placement]:
        """Where each parameter is sharded."""
        assert self.layout is not None
        found = {m.index: (b, m) for b in self.layout.units[0].buckets for m in b.params.members}
        pairs = [found[i] for i in range(len(self.params))]
        return [Shard(m.dim) if b.mesh.shard else Replicate() for b, m in pairs]

    def gradients(self, unit: UnitState, plan: UnitLayout) -> Iterator[tuple[nn.Parameter, DTensor]]:
        """The finished gradient of the unit, as DTensors like the parameters."""
        for bucket, flat in zip(plan.buckets, unit.grad.flats if unit.grad else (), strict=False):
            if flat is None or bucket.grads is None or unit.grad is None:
                continue
            rows = self.backend.split(bucket.mesh, bucket.grads, flat)
            for member, row in zip(bucket.grads.members, rows, strict=True):
                if unit.grad.present[member.index]:
                    yield self.params[member.index], self._dtensor(bucket, member, row)

    def facts(self) -> tuple[object, ...]:
        """What the plan depends on and users can change."""
        s = self.settings
        return s.reshard_after_forward, s.mp_policy, s.reduction, tuple([p.requires_grad for p in self.params])

    def adopt(self, plan: UnitLayout, unit: UnitState) -> UnitState:
        """Take over local tensors that somebody has replaced (`to_empty`, ``load_state_dict(assign=True)``): they are
        copied into the masters, which the parameters view again afterwards.

        Raises:
            RuntimeError: parameters are still on the meta device; names them.
        """
        self.params = tuple([self._standing(i) for i in range(len(self.params))])
        if self._pointers() == self.pointers and not unit.master[0].is_meta:
            return unit
        if still := [plan.params[i].name for i, p in enumerate(self.params) if _local(p).is_meta]:
            raise RuntimeError(
                f"parameters are still on the meta device: {still}; materialize and initialize them before the first "
                f"forward (module.to_empty(device=...), then its reset_parameters)"
            )
        masters = []
        for bucket, master in zip(plan.buckets, unit.master, strict=True):
            if master.is_meta:
                master = torch.zeros(master.shape, dtype=master.dtype, device=self.backend.home)
            members = bucket.params.members
            master = self.backend.join(
                bucket.mesh, bucket.params, master, [_local(self.params[m.index]) for m in members]
            )
            for member, row in zip(members, self.backend.split(bucket.mesh, bucket.params, master), strict=True):
                _set_local(self.params[member.index], row)
            masters.append(master)
        self.pointers = self._pointers()
        return UnitState(
            unit.name, tuple(masters), unit.full, unit.acc_full, unit.acc_partial, unit.reducing, unit.grad
        )

    def marks(self) -> list[object]:
        """For each parameter its identity and its versions: an operator on the DTensor counts there, not below."""
        params = [self._standing(i) for i in range(len(self.params))]
        return [(id(p), p._version, _local(p)._version) for p in params]

    def _standing(self, at: int) -> nn.Parameter:
        """The parameter that stands in the modules now; loading with ``assign=True`` puts new ones there."""
        table, local, _ = next(slot for slot in self.slots if slot[2] == at)
        return table[local]  # type: ignore[no-any-return]

    def _pointers(self) -> tuple[int, ...]:
        return tuple([_local(p).data_ptr() for p in self.params])

    def _sharded_parameters(
        self, plan: UnitLayout, unit: UnitState, originals: Sequence[nn.Parameter]
    ) -> Iterator[nn.Parameter]:
        rows: dict[int, DTensor] = {}
        for bucket, master in zip(plan.buckets, unit.master, strict=True):
            for member, row in zip(
                bucket.params.members, self.backend.split(bucket.mesh, bucket.params, master), strict=True
            ):
                rows[member.index] = self._dtensor(bucket, member, row)
        for at, original in enumerate(originals):
            yield nn.Parameter(rows[at], requires_grad=original.requires_grad)

    def _dtensor(self, bucket: Bucket, member: Member, row: Tensor) -> DTensor:
        shard = TorchShard(member.dim) if bucket.mesh.shard else TorchReplicate()
        placements = [TorchReplicate()] * (self.mesh.ndim - 1) + [shard]
        shape = torch.Size(member.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(row, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def _placement(param: nn.Parameter, name: str, placement_fn: ShardPlacementFn | None) -> Placement:
    wanted = placement_fn(param) if placement_fn is not None else None
    if wanted is None:
        return Shard(0)
    if not isinstance(wanted, TorchShard):
        raise ValueError(f"shard_placement_fn must return a Shard or None, found {wanted!r} for parameter {name!r}")
    return Shard(wanted.dim)


def _master(bucket: Bucket, originals: Sequence[nn.Parameter], backend: TorchBackend) -> Tensor:
    params = [originals[m.index] for m in bucket.params.members]
    if any(p.is_meta for p in params):
        return torch.empty(bucket.params.numel, dtype=params[0].dtype, device="meta")
    return backend.shard_params(bucket.mesh, bucket.params, params)


def _local(param: nn.Parameter) -> Tensor:
    assert isinstance(param, DTensor)
    return param._local_tensor


def _set_local(param: nn.Parameter, row: Tensor) -> None:
    assert isinstance(param, DTensor)
    param._local_tensor = row
