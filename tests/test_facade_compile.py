"""`torch.compile` around, below and beside `fully_shard`: the bits of torch's own, and nothing of ours in a graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hsdp_fn_torch as ht
from tests.workers_facade import OURS, THEIRS, Trace, assert_parity, chain, data, mean_square, shard_blocks, train
from tests.workers_torch import fsdp_mesh, on_ranks


@pytest.mark.parametrize("how", ["blocks before sharding", "blocks after sharding", "the whole model"])
@on_ranks(2, timeout=120)
def test_compiled_training_is_bitwise_that_of_fsdp2(rank, world, how):
    def run(api) -> Trace:
        torch._dynamo.reset()
        model = chain()
        if how == "blocks before sharding":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        shard_blocks(api, model, fsdp_mesh(world))
        if how == "blocks after sharding":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        compiled = torch.compile(model, backend="aot_eager") if how == "the whole model" else model
        return train(model, rank, steps=3, loss=lambda _, x: mean_square(compiled, x))

    assert_parity(run)


@on_ranks(2, timeout=120)
def test_compiled_blocks_are_compiled_once_and_as_many_as_with_fsdp2(rank, world):
    def graphs(api) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = chain()
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        shard_blocks(api, model, fsdp_mesh(world))
        for step in range(3):
            mean_square(model, data(rank, step)).backward()
        return counter.frame_count

    assert graphs(OURS) == graphs(THEIRS) > 0


@on_ranks(2, timeout=120)
def test_a_compiled_functional_step(rank, world):
    def losses(compiled: bool) -> list[float]:
        torch._dynamo.reset()
        model = chain()
        if compiled:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        state = ht.shard_module(model, fsdp_mesh(world), [f"layers.{i}" for i in range(len(model.layers))])
        step = ht.value_and_grad(lambda params, x: ht.functional_call(model, params, x).square().mean())
        found = []
        for i in range(3):
            (loss, _), state = step(state, data(rank, i))
            found.append(loss.item())
        return found

    assert losses(compiled=True) == losses(compiled=False)
