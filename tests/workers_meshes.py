"""What the tests of several meshes share: meshes made once a worker, what stands in modules, process groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.workers_facade import Trace, full


@functools.cache
def mesh_of(**axes: int) -> DeviceMesh:
    """``mesh_of(dp=2, tp=2)``: a named mesh over all ranks, the same object in all tests of a worker, so that they
    make no process groups of their own."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def groups() -> int:
    """How many process groups this rank is in."""
    return len(dist.distributed_c10d._world.pg_map)


def place(tensor: Tensor) -> Any:
    """What is to be equal of two DTensors beside their values."""
    if not isinstance(tensor, DTensor):
        return type(tensor).__name__
    mesh = tensor.device_mesh
    return mesh.mesh.tolist(), mesh.mesh_dim_names, tensor.placements, tensor.shape, tensor.stride()


def note_places(trace: Trace, model: nn.Module, *, grads: bool = False) -> None:
    """Record of every parameter, or its gradient, where it stands, its local rows and the whole of it."""
    for name, p in model.named_parameters():
        tensor = p.grad if grads else p
        what = f"gradient of {name}" if grads else name
        trace.note(f"place of {what}", place(tensor))
        trace.note(f"shard of {what}", None if tensor is None else tensor.to_local().detach().clone())
        trace.note(what if grads else f"parameter {name}", full(tensor))


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


class Mlp(nn.Module):
    """Two layers and a norm, to be split over a tensor-parallel axis."""

    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Line(nn.Module):
    """The first layer of an `Mlp`, for many ranks: torch takes long to plan each operator on a mesh of three axes."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def line(hidden: int = 8) -> nn.Sequential:
    """A `Line` with the same random values on every rank and call."""
    torch.manual_seed(0)
    return nn.Sequential(Line(hidden))


SPLIT = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
"""Placements of an `Mlp` on a tensor-parallel axis; the rest is replicated."""


def mlps(depth: int = 2, **sizes: int) -> nn.Sequential:
    """`Mlp`s with the same random values on every rank and call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(**sizes) for _ in range(depth)))


def spread(model: nn.Module, mesh: DeviceMesh, axes: Sequence[str] = ("tp",)) -> nn.Module:
    """Make all parameters DTensors on the whole mesh: split over ``axes`` as `SPLIT` says, else replicated."""
    for name, p in list(model.named_parameters()):
        prefix, _, local = name.rpartition(".")
        split = next((how for key, how in SPLIT.items() if name.endswith(key)), Replicate())
        placements: list[Placement] = [split if axis in axes else Replicate() for axis in mesh.mesh_dim_names or ()]
        whole = nn.Parameter(distribute_tensor(p.detach(), mesh, placements), requires_grad=p.requires_grad)
        model.get_submodule(prefix)._parameters[local] = whole
    return model


def on_mesh(x: Tensor, mesh: DeviceMesh, batch_axes: Sequence[str] = ()) -> DTensor:
    """A rank's rows as a DTensor: of one batch split over ``batch_axes``, replicated over the others."""
    return DTensor.from_local(
        x, mesh, [Shard(0) if a in batch_axes else Replicate() for a in mesh.mesh_dim_names or ()]
    )


def shard_all(shard: Callable[..., Any], model: nn.Module, **options: Any) -> nn.Module:
    """Each child a unit, the root one without parameters of its own."""
    for child in model.children():
        shard(child, **options)
    shard(model, **options)
    return model


def parameters_of(model: nn.Module) -> Mapping[str, tuple[int, type]]:
    """Identities and classes of parameters and modules, to see that nothing has been changed."""
    found: dict[str, tuple[int, type]] = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    return found | {f"module {name}": (id(m), type(m)) for name, m in model.named_modules()}
