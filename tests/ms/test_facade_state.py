"""What is read from a sharded cell, and when: its state, its state dicts, its numbers of steps."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from safetensors.numpy import load_file

import hsdp_fn_ms as hm
from hsdp_fn import MixedPrecisionPolicy, PeerFailed, PhaseError, masters
from tests.ms.pool import on_ranks
from tests.ms.workers import Chain, Plain, Tied, array, batch, fill, mesh_of, squares, tensor
from tests.ms.workers_facade import HOWS, differentiate, parameters, sharded, trainable


def step(how: str, cell: Any, optimizer: nn.Optimizer, x: Tensor, y: Tensor, times: int = 1) -> None:
    total: dict[str, Any] = {}
    for _ in range(times):
        _, found = differentiate(how, cell, lambda x, y: squares(cell(x), y), x, y)
        total = found if how == "backward" or not total else {n: total[n] + g for n, g in found.items()}
    optimizer(tuple([total[n] for n in trainable(cell)]))
    cell.zero_grad()


@on_ranks(2)
def test_whole_values_are_those_of_the_masters_whatever_is_computed_in(rank, world):
    cell = fill(Chain(Plain))
    before = {name: array(p) for name, p in parameters(cell).items()}
    sharded(cell, mesh_of("shard", world), mp_policy=MixedPrecisionPolicy("float16", "float32"))
    found = hm.get_model_state_dict(cell)
    for name, value in before.items():
        np.testing.assert_array_equal(array(found[name]), value)
    hm.set_model_state_dict(cell, found)
    for name, value in hm.get_model_state_dict(cell).items():
        np.testing.assert_array_equal(array(value), before[name])


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_the_state_has_the_values_of_the_parameters_at_any_moment(rank, world, how):
    cell = sharded(fill(Chain()), mesh_of("shard", world))
    step(how, cell, nn.SGD(cell.trainable_params(), learning_rate=0.1), *batch(rank))
    rows = masters(cell.hsdp_state)
    for name, param in parameters(cell).items():
        np.testing.assert_array_equal(array(rows[name]), array(param))
    whole, file = hm.get_model_state_dict(cell), Path(tempfile.gettempdir()) / f"hsdp_fn_{how}_{os.getppid()}"
    hm.save_full(file, cell)
    loaded = load_file(file)
    assert loaded.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(loaded[name], array(value))
    mint.distributed.barrier()
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_steps_are_counted_alike_though_only_one_rank_has_changed(rank, world, how):
    """The loss is one of rank 0's rows alone; and several backwards before a step are one step."""
    cell = sharded(fill(Chain(Plain)), mesh_of("shard", world))
    params = cell.trainable_params()
    optimizer = nn.SGD(params, learning_rate=0.1)
    for _ in range(2):
        for _ in range(2):
            cell.zero_grad()
            _, found = differentiate(how, cell, lambda x: cell(x)[:, :1].sum(), batch(rank)[0])
        optimizer(tuple([g if rank == 0 else ops.zeros_like(g) for g in (found[n] for n in trainable(cell))]))
    with ms._no_grad():
        cell(batch(rank)[0])
    assert (cell.hsdp_state.step, cell.hsdp_state.micro) == (2, 0)


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_steps_are_the_same_on_all_ranks_after_an_attempt_that_failed_on_one(rank, world, how):
    cell = sharded(fill(Chain()), mesh_of("shard", world))
    optimizer = nn.SGD(cell.trainable_params(), learning_rate=0.1)
    x, y = batch(rank)
    for fails in (0, 1, 0):

        def loss(x: Tensor, y: Tensor, fails: int = fails) -> Tensor:
            return squares(cell(x), y) * (1 // (1 - fails * (rank == 0)))

        with pytest.raises((ZeroDivisionError, PeerFailed)) if fails else nullcontext(), hm.recoverable(cell):
            _, found = differentiate(how, cell, loss, x, y)
        if not fails:
            given = found if how == "function" else {n: p.grad for n, p in trainable(cell).items()}
            optimizer(tuple([given[n] for n in trainable(cell)]))
            cell.zero_grad()
    with ms._no_grad():
        cell(x)
    steps = cell.hsdp_state.backend.exchange(str(cell.hsdp_state.step))
    assert set(steps.values()) == {"2"}


@on_ranks(2)
def test_an_attempt_whose_backward_was_stopped_and_caught_inside_fails(rank, world):
    hm.enable_mindspore_backward_compat()
    cell = sharded(fill(Chain()), mesh_of("shard", world))
    x, y = batch(rank)
    with pytest.raises(PhaseError, match="a backward of this attempt stopped"), hm.recoverable(cell) as attempt:
        out = cell(x)

        def hook(grad: Tensor) -> Tensor:
            raise KeyError("hook")

        out.register_hook(hook)
        with pytest.raises(KeyError, match="hook"):
            squares(out, y).backward()
    assert attempt.committed is False
    assert all(p.grad is None for p in cell.trainable_params())


@on_ranks(2)
def test_what_runs_before_a_sharded_cell_is_recorded_after_mindspores_own_functions_too(rank, world):
    hm.enable_mindspore_backward_compat()
    front, cell = fill(Plain()), sharded(fill(Chain(Plain)), mesh_of("shard", world))
    x, y = batch(rank)
    ms.grad(lambda z: (z * z).sum())(tensor(np.ones(3, np.float32)))
    squares(cell(front(x)), y).backward()
    assert all(p.grad is not None and array(p.grad).any() for p in front.trainable_params())


@on_ranks(2)
def test_an_exception_that_the_loss_function_catches_costs_nothing_else(rank, world):
    cell = sharded(fill(Chain()), mesh_of("shard", world))
    x, y = batch(rank)
    weights = ms.ParameterTuple(cell.trainable_params())
    plain = ms.value_and_grad(lambda x, y: squares(cell(x), y), None, weights=weights)
    _, expected = plain(x, y)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with pytest.raises(TypeError):
            cell(x, "one too many")
        return squares(cell(x), y)

    for _ in range(2):
        _, found = ms.value_and_grad(loss, None, weights=weights)(x, y)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array(a), array(b))
    with pytest.raises(ZeroDivisionError):
        ms.value_and_grad(lambda x, y: squares(cell(x), y) / 0 if 1 // 0 else x, None, weights=weights)(x, y)
    for a, b in zip(plain(x, y)[1], expected, strict=True):
        np.testing.assert_array_equal(array(a), array(b))


class Direct(nn.Cell):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(tensor(np.ones(4, np.float32)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


@on_ranks(2)
def test_a_model_with_parameters_of_its_own_is_freed_after_a_functional_step(rank, world):
    def train() -> weakref.ref[Direct]:
        cell = Direct()
        state = hm.shard_cell(cell, mesh_of("shard", world))
        hm.value_and_grad(lambda p, x: hm.functional_call(cell, p, x))(state, tensor(np.ones(4, np.float32)))
        return weakref.ref(cell)

    ref = train()
    gc.collect()
    assert ref() is None


@on_ranks(2)
def test_two_values_of_one_tied_parameter_are_refused(rank, world):
    cell = fill(Tied())
    hm.fully_shard(cell, mesh=mesh_of("shard", world))
    found = hm.get_model_state_dict(cell)
    np.testing.assert_array_equal(array(found["first.weight"]), array(found["last.weight"]))
    before = array(cell.first.weight)
    with pytest.raises(RuntimeError, match=r"'last\.weight' and 'first\.weight' are one parameter"):
        cell.load_state_dict(found | {"last.weight": found["last.weight"] + 1})
    np.testing.assert_array_equal(array(cell.first.weight), before)


@on_ranks(2)
def test_retained_gradients_add_up_and_leaves_get_no_hooks(rank, world):
    hm.enable_mindspore_backward_compat()

    class Same(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(tensor(np.ones(4, np.float32)), name="w")

        def construct(self, x: Tensor) -> Tensor:
            return x

    x = tensor(np.ones(4, np.float32))
    x.requires_grad = True
    y = x * 2
    y.retain_grad()
    loss = (y * y).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(array(y.grad), np.full(4, 8.0, np.float32))
    cell = hm.fully_shard(Same(), mesh=mesh_of("shard", world))
    for _ in range(3):
        cell(x)
    assert len(x.hooks()) == 0
