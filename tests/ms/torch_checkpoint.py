"""The torch half of the exchange of checkpoints: plain ``torch.distributed.checkpoint`` over ``fully_shard`` of
`hsdp_fn_torch`. Run by gloo workers, never beside MindSpore.

Also what both sides know of the tensors that are exchanged, as bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

#: Name, full shape, dtype, split dim (None: replicated), trainable. ``tied.last`` is the same tensor as ``tied.first``.
ODD: dict[str, tuple[tuple[int, ...], str, int | None, bool]] = {
    "a.weight": ((5, 3), "float32", 0, True),
    "a.bias": ((1,), "float32", 0, True),
    "b.weight": ((3, 7), "bfloat16", 1, True),
    "b.count": ((5,), "int32", 0, False),
    "b.big": ((3,), "int64", 0, False),
    "b.bytes": ((6, 2), "uint8", 0, False),
    "c.fp16": ((6, 2), "float16", 0, True),
    "c.fp64": ((2, 5, 3), "float64", 1, False),
    "c.whole": ((4, 2), "float32", None, True),
    "tied.first": ((3, 2), "float32", 0, True),
}
TIED = {"tied.first": "tied.last"}
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


def odd_bits(seed: int) -> dict[str, np.ndarray]:
    """Any bits, so that NaNs and denormal numbers are among the values; as unsigned integers of the dtype's size."""
    rng = np.random.default_rng(seed)
    bits = {}
    for name, (shape, dtype, _, _) in ODD.items():
        size = _SIZES[dtype]
        bits[name] = rng.integers(0, 256, (*shape, size), np.uint8).view(f"u{size}").reshape(shape)
    return bits


def save_odd(rank: int, world: int, path: Path, seed: int) -> None:
    """Write the odd tensors as torch does."""
    import torch.distributed.checkpoint as dcp

    model = _odd_model(odd_bits(seed))
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer)


def load_odd(rank: int, world: int, path: Path) -> dict[str, np.ndarray]:
    """The odd tensors, whole, as torch reads them into a sharded model."""
    import torch.distributed.checkpoint as dcp

    model = _odd_model({name: np.zeros_like(bits) for name, bits in odd_bits(0).items()})
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert model.get_parameter("tied.last") is model.get_parameter("tied.first")
    return {name: _bits(_whole(model.get_parameter(name))) for name in ODD}


def save_chain(rank: int, world: int, path: Path, values: dict[str, np.ndarray], consolidated: bool) -> None:
    """Write a chain with these values, also as whole tensors beside the shards if asked for."""
    import torch
    import torch.distributed.checkpoint as dcp

    model = _chain()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=consolidated)
    dcp.save(model.state_dict(), storage_writer=writer)


def load_chain(rank: int, world: int, path: Path) -> dict[str, np.ndarray]:
    """The chain's values, whole, as torch reads them."""
    import torch.distributed.checkpoint as dcp

    model = _chain()
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    return {name: _whole(param).numpy().copy() for name, param in model.named_parameters()}


def _odd_model(bits: dict[str, np.ndarray]) -> Any:
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard

    import hsdp_fn_torch as ht

    model = nn.Module()
    replicated = []
    dims: dict[int, int] = {}
    for name, (shape, dtype, dim, trainable) in ODD.items():
        owner, local = name.split(".")
        if not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        raw = torch.from_numpy(np.frombuffer(bits[name].tobytes(), np.uint8).copy())
        value = raw.view(getattr(torch, dtype)).reshape(shape)
        param = nn.Parameter(value, requires_grad=trainable)
        model.get_submodule(owner).register_parameter(local, param)
        if name in TIED:
            model.get_submodule(owner).register_parameter(TIED[name].split(".")[1], param)
        if dim is None:
            replicated.append(param)
        else:
            dims[id(param)] = dim

    def placement(param: nn.Parameter) -> Shard:
        return Shard(dims[id(param)])

    return ht.fully_shard(model, shard_placement_fn=placement, replicate_params=replicated)


def _chain() -> Any:
    from torch import nn

    import hsdp_fn_torch as ht
    from tests.ms.sizes import HIDDEN, OUT, WIDTH

    model = nn.Module()
    model.first, model.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
    model.layers = nn.ModuleList()
    for _ in range(3):
        block = nn.Module()
        block.norm = nn.LayerNorm(WIDTH)
        block.up, block.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        model.layers.append(ht.fully_shard(block))
    return ht.fully_shard(model)


def _whole(param: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def _bits(tensor: Any) -> np.ndarray:
    import torch

    size = tensor.element_size()
    return tensor.contiguous().view(torch.uint8).numpy().copy().view(f"u{size}").reshape(tuple(tensor.shape))
