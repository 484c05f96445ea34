"""The same weights, data and optimizer on hsdp_fn_torch over gloo and on hsdp_fn_ms over mccl: the same training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import nn

import hsdp_fn_ms as hm
from tests.ms.sizes import OUT, WIDTH
from tests.ms.torch_side import LAYERS, draw, train_on_torch
from tests.ms.workers import Chain, array, fill, full_values, squares, tensor, weights

STEPS, RATE, MAX_NORM = 5, 0.05, 1.0


def train_on_mindspore(
    rank: int, world: int, shape: tuple[int, ...], values: dict[str, Any], batches: list[list[tuple[Any, Any]]]
) -> tuple[list[float], dict[str, Any]]:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    cell = fill(Chain(), values=values)
    state = hm.shard_cell(cell, hm.init_device_mesh("cpu", shape, mesh_dim_names=names), LAYERS)
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    params = hm.shard_parameters(state)
    optimizer = nn.Momentum(list(params.values()), learning_rate=RATE, momentum=0.9)
    losses = []
    for each in batches:
        (loss, _), state = step(state, *(tensor(value) for value in each[rank]))
        state, _ = hm.optimizer_step(state, optimizer, params, max_norm=MAX_NORM)
        losses.append(float(array(loss)))
    return losses, full_values(state)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_training_equals_the_torch_side(gloo, mccl, shape):
    world = int(np.prod(shape))
    values = weights(Chain())
    batches = [[(draw((4, WIDTH), i, rank), draw((4, OUT), i, rank, 1)) for rank in range(world)] for i in range(STEPS)]
    theirs = gloo.run(train_on_torch, shape, values, batches, RATE, MAX_NORM, world=world, timeout=300.0)
    ours = mccl.run(train_on_mindspore, shape, values, batches, world=world, timeout=300.0)
    for (losses, trained), (expected_losses, expected) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(trained[name], value, rtol=0, atol=1e-5, err_msg=name)
    moved = max(float(np.abs(ours[0][1][name] - value).max()) for name, value in values.items())
    assert moved > 0.01
