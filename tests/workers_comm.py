"""What test_comm.py runs on ranks: custom collectives in FSDP2's manner; units moved by the core's functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

import hsdp_fn_torch as ht
from hsdp_fn import HSDPState, Layout, ParamSpec, Sync, UnitSpec, UnitState, plan_layout, shard
from hsdp_fn import unit as on_unit
from hsdp_fn_torch.backend import TorchBackend

#: Shapes by unit: uneven on 2 and 4 ranks, fewer rows than ranks, one element, a whole unit of one parameter.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "a": {"a.w": (5, 3), "a.b": (1,)},
    "b": {"b.w": (7,)},
    "c": {"c.w": (3, 2), "c.v": (8, 1), "c.u": (1, 1)},
}


class Counted:
    """A mixin that notes calls and hands out one buffer a size, over and over."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.kept: dict[Any, Tensor] = {}

    def allocate(self, size, *, dtype, device):
        return self.kept.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))


class CountedGather(Counted, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append({"sizes": (output_tensor.numel(), input_tensor.numel()), "group": group})
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedScatter(Counted, ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append({"sizes": (output_tensor.numel(), input_tensor.numel()), "group": group, "op": op})
        dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op)


class Units:
    """The units of `SHAPES` on a mesh, each on a backend of its own, moved by the core's functions."""

    def __init__(self, mesh: DeviceMesh, comms: Mapping[str, Any] | None = None, *, floats: bool = False, **policies):
        specs = [ParamSpec(n, s, "float32") for unit in SHAPES.values() for n, s in unit.items()]
        plans = [UnitSpec(name) for name in SHAPES]
        self.layout: Layout = plan_layout(specs, ht.mesh_spec(mesh), plans, **policies)
        self.base = TorchBackend(mesh)
        generator = torch.Generator().manual_seed(3)
        self.params = {s.name: values(s.shape, generator, floats) for s in specs}
        self.state: HSDPState = shard(self.params, self.layout, backend=self.base)
        self.plans = {u.name: u for u in self.layout.units}
        self.units: dict[str, UnitState] = {u.name: u for u in self.state.units}
        self.backends = {name: self.base.for_unit((comms or {}).get(name)) for name in SHAPES}
        self.floats = floats
        self.log: list[Any] = []

    def gather(self, name: str) -> list[Tensor]:
        """Copies of the unit's full parameters, gathered and resharded."""
        unit, plan, backend = self.units[name], self.plans[name], self.backends[name]
        unit = on_unit.finish_gather(on_unit.start_gather(unit, plan, backend, self.log), plan, backend)
        full = [t.clone() for t in unit.full]
        self.units[name] = on_unit.reshard(unit)
        return full

    def grads(self, name: str, rank: int, step: int = 0) -> list[Tensor]:
        """This rank's gradients of the unit's parameters."""
        generator = torch.Generator().manual_seed(100 * rank + step)
        return [values(p.shape, generator, self.floats) for p in self.plans[name].params]

    def reduce(self, name: str, rank: int, step: int = 0, sync: Sync = Sync.FULL, *, donate: bool = False) -> None:
        """Reduce this rank's gradients of the unit to the end."""
        plan, backend = self.plans[name], self.backends[name]
        given: Sequence[Tensor] = self.grads(name, rank, step)
        unit = on_unit.start_reduce(self.units[name], plan, backend, given, sync, self.log)
        while unit.reducing is not None:
            unit = on_unit.advance_reduce(unit, plan, backend, self.log, donate=donate)
        self.units[name] = unit

    def flats(self, name: str) -> list[Tensor]:
        """The unit's finished flat gradients."""
        return [flat for flat in self.units[name].grad.flats if flat is not None]


def values(shape: Sequence[int], generator: torch.Generator, floats: bool) -> Tensor:
    """Numbers: integers, unless ``floats``."""
    if floats:
        return torch.randn(tuple(shape), generator=generator)
    return torch.randint(-9, 10, tuple(shape), generator=generator).float()


def everything(units: Units, rank: int, *, donate: bool = False) -> dict[str, list[Tensor]]:
    """Gather and reduce all units, in flight together where the core allows it: full parameters, then gradients."""
    out: dict[str, list[Tensor]] = {}
    for name in SHAPES:
        out[name] = units.gather(name)
        units.reduce(name, rank, donate=donate)
    return {name: out[name] + units.flats(name) for name in SHAPES}
