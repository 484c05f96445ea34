"""Which parameters a step uses, under functional training: tied, reused, unused, nested, in odd orders."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hsdp_fn_torch as ht
from hsdp_fn import LayoutError, PrefetchPolicy, ReductionPolicy, Sync, grads
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Block,
    Chain,
    assert_trains_like_one_process,
    batch,
    counts,
    equal,
    fsdp_mesh,
    integers_,
    local_rows,
    loss_of,
    mean_grads,
    on_ranks,
    step_grads,
    step_of,
)

# ------------------------------------------------------------------------------------------------ used, tied, unused


class TiedBlock(nn.Module):
    """Encodes and decodes with one matrix of an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 7, bias=False)
        self.decode = nn.Linear(WIDTH, 7, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.encode(x) @ self.decode.weight


@on_ranks(2, 4)
def test_a_matrix_tied_inside_a_unit_gets_the_gradient_of_both_uses(rank, world):
    found = assert_trains_like_one_process(Chain(TiedBlock), rank, world)
    assert (found["all_gather"], found["reduce_scatter"]) == (7, 4)


class Reused(Chain):
    """Runs the middle block twice, with another one in between."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layers
        return self.last(b(c(b(a(self.first(x))))))


@on_ranks(2, 4)
def test_a_unit_used_twice_is_reduced_once(rank, world):
    for ahead in (0, 1, 2):
        found = assert_trains_like_one_process(Reused(), rank, world, prefetch=PrefetchPolicy(ahead, ahead))
        assert found["reduce_scatter"] == 4
    assert found["all_gather"] == 8  # one more forward use


class Recursive(nn.Module):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.linear(x) if depth == 0 else self.linear(self(x, depth - 1))


@on_ranks(2)
def test_a_unit_that_calls_itself(rank, world):
    found = assert_trains_like_one_process(Chain(Recursive), rank, world)
    assert found == {"all_gather": 7, "reduce_scatter": 4}


class HalfUsed(Block):
    """Owns a matrix that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


@on_ranks(2, 4)
def test_an_unused_parameter_has_no_gradient(rank, world):
    found = assert_trains_like_one_process(Chain(HalfUsed), rank, world)
    assert found["reduce_scatter"] == 4


class Skipping(Chain):
    """Never runs its middle block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers[2](self.layers[0](self.first(x))))


@on_ranks(2, 4)
def test_an_unused_unit_has_no_gradient_and_no_reduction(rank, world):
    for ahead in (0, 1, 2):
        found = assert_trains_like_one_process(Skipping(), rank, world, prefetch=PrefetchPolicy(ahead, ahead))
        assert found["reduce_scatter"] == 3


@on_ranks(2)
def test_an_unused_unit_is_reduced_as_zeros_where_the_policy_says_so(rank, world):
    model = integers_(Skipping())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, reduction=ReductionPolicy(unused="zeros"))
    _, rows, state = step_grads(step_of(model), state, *batch(rank))
    assert counts(state.ledger)["reduce_scatter"] == 4
    for name, row in rows.items():
        if name.startswith("layers.1"):
            equal(row, torch.zeros_like(row), name)


class RankDependent(Chain):
    """Skips its middle block on rank 1."""

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.layers[0](self.first(x))
        return self.last(self.layers[2](x if skip else self.layers[1](x)))


@on_ranks(2)
def test_ranks_that_use_different_units_agree_where_unused_ones_are_zeros(rank, world):
    model = integers_(RankDependent())
    single = copy.deepcopy(model)
    policy = ReductionPolicy(unused="zeros")
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, reshard_after_forward=False, reduction=policy)
    step = ht.value_and_grad(lambda p, x, y: loss_of(ht.functional_call(model, p, (x, rank == 1)), y))
    _, rows, state = step_grads(step, state, *batch(rank))
    total = sum(loss_of(single(batch(r)[0], r == 1), batch(r)[1]) for r in range(world)) / world
    names, params = zip(*single.named_parameters(), strict=True)
    equal(rows, local_rows(state, dict(zip(names, torch.autograd.grad(total, params), strict=True))))


@on_ranks(2)
def test_a_unit_unused_in_the_last_microbatch_still_reduces_what_it_holds(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    (_, _), state = step_of(model)(state, *batch(rank, 0), sync=Sync.NONE)
    short = ht.value_and_grad(lambda p: p["first.weight"].sum())
    (_, _), state = short(state)
    state, rows = grads(state)
    expected = mean_grads(single, [batch(r, 0) for r in range(world)])
    expected["first.weight"] = expected["first.weight"] + 1
    equal(rows, local_rows(state, expected))


@on_ranks(2)
def test_units_listed_in_another_order_than_they_run_give_the_same_values(rank, world):
    for ahead in (1, 2):
        assert_trains_like_one_process(Chain(), rank, world, units=LAYERS[::-1], prefetch=PrefetchPolicy(ahead, ahead))


@on_ranks(2)
def test_units_inside_units(rank, world):
    units = ["layers", *LAYERS, "layers.1.up"]
    with pytest.raises(LayoutError, match="owns no parameter"):
        ht.shard_module(Chain(), fsdp_mesh(world), units)
    found = assert_trains_like_one_process(Chain(), rank, world, units=units[1:])
    assert found == {"all_gather": 9, "reduce_scatter": 5}


@on_ranks(2)
def test_a_model_that_is_one_root_unit(rank, world):
    for reshard, gathers in ((None, 1), (True, 2)):
        found = assert_trains_like_one_process(Chain(), rank, world, units=(), reshard_after_forward=reshard)
        assert found == {"all_gather": gathers, "reduce_scatter": 1}


@on_ranks(2)
def test_a_model_whose_root_owns_nothing(rank, world):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    found = assert_trains_like_one_process(model, rank, world, units=("0", "2"))
    assert found == {"all_gather": 4, "reduce_scatter": 2}


@on_ranks(2)
def test_parameters_that_are_ignored_stay_with_the_model(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    kept = model.last.bias
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, ignored=["last.bias"])
    assert model.last.bias is kept
    _, rows, state = step_grads(step_of(model), state, *batch(rank))
    expected = mean_grads(single, [batch(r) for r in range(world)])
    del expected["last.bias"]
    equal(rows, local_rows(state, expected))
