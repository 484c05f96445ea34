"""With operators in MindSpore's own threads, as a program that asks for nothing else has them: errors come late."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hsdp_fn_ms as hm
from hsdp_fn import Sync, expected_comm
from tests.ms.pool import on_ranks
from tests.ms.workers import (
    LAYERS,
    Chain,
    Single,
    array,
    batch,
    close,
    fill,
    full_values,
    mesh_of,
    momentum_step,
    squares,
)
from tests.ms.workers_facade import HOWS, differentiate, parameters, sharded, trainable


@on_ranks(2, blocking=False)
def test_training_with_an_explicit_state_equals_a_single_process(rank, world):
    cell, single = fill(Chain()), Single(fill(Chain()))
    state, velocity = hm.shard_cell(cell, mesh_of("shard", world), LAYERS), {}
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    for i in range(3):
        batches = [batch(r, i) for r in range(world)]
        before = len(state.ledger)
        (_, _), state = step(state, *batches[rank])
        assert state.ledger[before:] == expected_comm(state.layout)
        state = momentum_step(state, velocity)
        single.step(batches)
    close(full_values(state), {n: array(p) for n, p in single.params.items()})
    (_, _), state = step(state, *batch(rank), sync=Sync.NONE)
    assert state.micro == 1


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2, blocking=False)
def test_training_a_sharded_cell_equals_a_single_process(rank, world, how):
    cell, single = sharded(fill(Chain()), mesh_of("shard", world)), Single(fill(Chain()))
    optimizer = nn.SGD(cell.trainable_params(), learning_rate=0.1, momentum=0.9)
    for i in range(3):
        batches = [batch(r, i) for r in range(world)]
        _, found = differentiate(how, cell, lambda x, y: squares(cell(x), y), *batches[rank])
        optimizer(tuple([found[n] for n in trainable(cell)]))
        cell.zero_grad()
        single.step(batches)
    found = hm.get_model_state_dict(cell)
    close({n: array(found[n]) for n in parameters(cell)}, {n: array(p) for n, p in single.params.items()})


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2, blocking=False)
def test_an_operator_that_fails_late_fails_in_its_own_step(rank, world, how):
    """Not in the next one, and not as a collective's error."""
    cell = sharded(fill(Chain()), mesh_of("shard", world))

    def wrong(x: Tensor, y: Tensor) -> Tensor:
        out = squares(cell(x), y)
        return ops.matmul(out.reshape(1, 1), Tensor(np.ones((2, 2), np.float32))).sum()

    good = {n: array(g) for n, g in differentiate(how, cell, lambda x, y: squares(cell(x), y), *batch(rank))[1].items()}
    cell.zero_grad()
    with pytest.raises((RuntimeError, ValueError), match="must be equal"):
        differentiate(how, cell, wrong, *batch(rank))
    cell.reset_iter_state()
    cell.zero_grad()
    again = differentiate(how, cell, lambda x, y: squares(cell(x), y), *batch(rank))[1]
    for name, value in good.items():
        np.testing.assert_array_equal(array(again[name]), value)
