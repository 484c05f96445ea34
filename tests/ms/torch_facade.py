"""The torch half of the comparison of both facades: imported by gloo workers, never beside MindSpore."""

from __future__ import annotations

from typing import Any


def train_with_torch(
    rank: int, world: int, weights: dict[str, Any], batches: list[list[tuple[Any, Any]]]
) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank and the trained weights, by MindSpore's names of the norm's parameters."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import hsdp_fn_torch as ht
    from tests.ms.torch_side import chain

    model, ours = chain(weights)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.layers, model):
        ht.fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for each in batches:
        x, y = (torch.from_numpy(value) for value in each[rank])
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    full = {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}
    return losses, {name: full[ours(name)] for name in weights}
