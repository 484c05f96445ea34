"""The torch half of the comparison with MindSpore: imported by gloo workers, never beside MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LAYERS = ("layers.0", "layers.1", "layers.2")


def chain(weights: dict[str, Any]) -> tuple[Any, Callable[[str], str]]:
    """The model of the comparison with these weights, and torch's name for one of MindSpore's."""
    import torch
    from torch import nn

    from tests.ms.sizes import HIDDEN, OUT, WIDTH

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.last = nn.Linear(WIDTH, OUT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    def ours(name: str) -> str:
        return name.replace("norm.gamma", "norm.weight").replace("norm.beta", "norm.bias")

    model = Chain()
    model.load_state_dict({ours(name): torch.from_numpy(value) for name, value in weights.items()})
    return model, ours


def train_on_torch(
    rank: int,
    world: int,
    shape: tuple[int, ...],
    weights: dict[str, Any],
    batches: list[list[tuple[Any, Any]]],
    lr: float,
    max_norm: float,
) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank and the trained weights, by MindSpore's names of the norm's parameters."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import hsdp_fn_torch as ht
    from hsdp_fn import full_params, unshard

    model, ours = chain(weights)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    state = ht.shard_module(model, init_device_mesh("cpu", shape, mesh_dim_names=names), LAYERS)
    step = ht.value_and_grad(lambda p, x, y: ((ht.functional_call(model, p, x) - y) ** 2).mean())
    params = ht.shard_parameters(state)
    optimizer = torch.optim.SGD(params.values(), lr=lr, momentum=0.9)
    losses = []
    for each in batches:
        x, y = (torch.from_numpy(value) for value in each[rank])
        (loss, _), state = step(state, x, y)
        state, _ = ht.optimizer_step(state, optimizer, params, max_norm=max_norm)
        losses.append(float(loss))
    full = full_params(unshard(state))
    return losses, {name: full[ours(name)].detach().numpy().copy() for name in weights}


def draw(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """Float32 values from a seed."""
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)
