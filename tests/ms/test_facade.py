"""Training with `fully_shard` and MindSpore's own tools equals plain MindSpore in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hsdp_fn_ms as hm
from hsdp_fn import GradPhase, PhaseError, expected_comm
from hsdp_fn.schedule import totals
from tests.ms.pool import on_ranks
from tests.ms.sizes import OUT, WIDTH
from tests.ms.torch_facade import train_with_torch
from tests.ms.torch_side import draw
from tests.ms.workers import (
    Chain,
    Plain,
    Single,
    Tied,
    array,
    batch,
    close,
    fill,
    linear,
    mesh_of,
    squares,
    tensor,
    weights,
)
from tests.ms.workers_facade import (
    HOWS,
    Trainer,
    Uneven,
    differentiate,
    exact,
    full_values,
    parameters,
    rows,
    same_values,
    sharded,
    trainable,
)


def train(rank: int, world: int, cell: Any, single: Single, hows: Sequence[str] = HOWS, steps: int = 5) -> None:
    """Train both; each step issues what is expected, and at the end all parameters are the same."""
    trainer = Trainer(cell, single, rank, hows)
    for i in range(steps):
        trainer.step([batch(r, i) for r in range(world)])
        assert cell.hsdp_state.ledger == expected_comm(cell.hsdp_state.layout)
    same_values(cell, single)


def pair() -> tuple[nn.Cell, Single]:
    """Two chains of the same weights, the second with its oracle."""
    return fill(Chain(depth=2)), Single(fill(Chain(depth=2)))


def integers() -> tuple[nn.Cell, Single]:
    """The same with gradients that are integers."""
    return fill(Chain(Plain, 2), integers=True), Single(fill(Chain(Plain, 2), integers=True), linear)


# -- five steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_five_steps_of_training_equal_a_single_process(rank, world, how):
    cell, single = pair()
    train(rank, world, sharded(cell, mesh_of("shard", world)), single, [how])


@on_ranks(4)
def test_five_steps_of_hybrid_training_equal_a_single_process(rank, world):
    cell, single = pair()
    train(rank, world, sharded(cell, mesh_of("both", world)), single)


@on_ranks(2)
def test_one_shard_rank_trains_as_a_single_process(rank, world):
    cell, single = pair()
    train(rank, world, sharded(cell, mesh_of("replicate", world)), single, steps=2)
    assert {b.gather for u in cell.hsdp_state.layout.units for b in u.buckets} == {None}


@on_ranks(4)
def test_five_steps_with_fewer_rows_than_ranks_equal_a_single_process(rank, world):
    cell, single = fill(Uneven()), Single(fill(Uneven()))
    sharded(cell, mesh_of("shard", world))
    three, seven, five = ((1, 2, 2), (1, 2, 2), (1, 2, 1), (0, 1, 0))[rank]
    for layer, size in zip([cell.first, *cell.layers, cell.last], (three, seven, five, three), strict=True):
        assert layer.weight.shape[0] == layer.bias.shape[0] == size
    missing = {name for name, p in parameters(cell).items() if not p.size}
    assert len(missing) == (6 if rank == 3 else 0)
    assert [id(p) for p in cell.trainable_params()] == [id(p) for n, p in parameters(cell).items() if n not in missing]
    train(rank, world, cell, single)


@on_ranks(2)
def test_five_replicated_steps_equal_a_single_process(rank, world):
    cell, single = pair()
    for each in [*cell.layers, cell]:
        hm.replicate(each, mesh=mesh_of("shard", world))
    assert type(cell).__name__ == "ReplicateChain" and type(cell).__bases__ == (hm.ReplicateModule, Chain)
    assert cell.first.weight.shape == (WIDTH, WIDTH)
    train(rank, world, cell, single)
    assert {b.gather for u in cell.hsdp_state.layout.units for b in u.buckets} == {None}


@on_ranks(2)
def test_adam_steps_as_in_a_single_process(rank, world):
    """A large epsilon: Adam divides by what may be rounding noise."""
    cell, single = pair()
    sharded(cell, mesh_of("shard", world))
    ours = nn.Adam(cell.trainable_params(), learning_rate=0.05, eps=1e-2)
    whole = nn.Adam(list(single.params.values()), learning_rate=0.05, eps=1e-2)
    for i in range(5):
        batches = [batch(r, i) for r in range(world)]
        _, found = differentiate(HOWS[i % 2], cell, lambda x, y: squares(cell(x), y), *batches[rank])
        ours(tuple(found.values()))
        cell.zero_grad()
        _, expected = single.gradients(batches)
        whole(tuple([Parameter(expected[name], name=name) for name in single.params]))
        if i == 2:  # loading what is there changes nothing
            hm.set_model_state_dict(cell, hm.get_model_state_dict(cell))
    same_values(cell, single, 2e-6)


def test_training_equals_the_torch_facade(gloo, mccl):
    """On two replicas of two shards."""
    world, steps = 4, 5
    values = weights(Chain())
    batches = [[(draw((4, WIDTH), i, rank), draw((4, OUT), i, rank, 1)) for rank in range(world)] for i in range(steps)]
    theirs = gloo.run(train_with_torch, values, batches, world=world, timeout=300.0)
    ours = mccl.run(train_with_mindspore, values, batches, world=world, timeout=300.0)
    for (losses, trained), (expected_losses, expected) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        close(trained, expected, 1e-5)
    assert max(float(np.abs(ours[0][1][name] - value).max()) for name, value in values.items()) > 0.01


def train_with_mindspore(
    rank: int, world: int, values: dict[str, Any], batches: list[list[tuple[Any, Any]]]
) -> tuple[list[float], dict[str, Any]]:
    cell = sharded(fill(Chain(), values=values), mesh_of("both", world))
    optimizer = nn.Momentum(cell.trainable_params(), learning_rate=0.05, momentum=0.9)
    step = ms.value_and_grad(lambda x, y: squares(cell(x), y), None, weights=optimizer.parameters)
    losses = []
    for each in batches:
        value, found = step(*(tensor(v) for v in each[rank]))
        optimizer(found)
        losses.append(float(array(value)))
    return losses, full_values(cell)


# -- parameters that are not like the others --------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_frozen_and_unfrozen_between_steps(rank, world):
    """Before the first step, and between steps; the twin's are toggled likewise."""
    cell, single = integers()
    sharded(cell, mesh_of("shard", world))
    everything = set(parameters(cell))

    def check(i: int, frozen: set[str]) -> None:
        for name in everything:
            parameters(cell)[name].requires_grad = single.params[name].requires_grad = name not in frozen
        batches = [batch(r, i, integers=True) for r in range(world)]
        _, found = differentiate(HOWS[i % 2], cell, lambda x, y: linear(cell(x), y), *batches[rank])
        assert {n for n, p in parameters(cell).items() if getattr(p, "_grad", None) is not None} <= everything - frozen
        _, expected = single.gradients(batches)
        exact(found, rows(cell, expected))
        cell.zero_grad()
        layout = cell.hsdp_state.layout
        assert {p.name for p in layout.params() if not p.requires_grad} == frozen
        assert cell.hsdp_state.ledger == expected_comm(layout)

    check(0, {"first.weight", "layers.0.up.bias"})
    check(1, set())
    check(2, {n for n in everything if n.startswith("layers.1")})  # a unit that has nothing to reduce
    check(3, everything - {"first.bias"})


@on_ranks(2)
def test_tied_frozen_and_unused_parameters_train_as_in_a_single_process(rank, world):
    """The first and the last layer share a weight and stand in one call, as a list; one layer is frozen, one unused."""
    mesh = mesh_of("shard", world)
    cell, single = fill(Tied()), Single(fill(Tied()))
    for layer in cell.layers:
        hm.fully_shard(layer, mesh=mesh)
    hm.fully_shard([cell.first, cell.last], mesh=mesh)
    hm.fully_shard(cell, mesh=mesh)
    assert cell.first.weight is cell.last.weight
    trainer = Trainer(cell, single, rank)
    for i, how in enumerate((*HOWS, HOWS[0])):
        before = {n: array(p) for n, p in parameters(cell).items() if n.startswith(("layers.1", "layers.2"))}
        batches = [batch(r, i, outputs=WIDTH) for r in range(world)]
        _, found = differentiate(how, cell, trainer.forward, *batches[rank])
        for name, g in found.items():
            if name.startswith("layers.2"):
                assert g is None if how == "backward" else not array(g).any(), name
        _, expected = single.gradients(batches)
        expected = {n: g for n, g in rows(cell, expected).items() if not n.startswith("layers.2")}
        close({n: array(g) for n, g in found.items() if n in expected}, expected)
        exact({n: parameters(cell)[n] for n in before}, before)
        cell.zero_grad()
        zeros = [ops.zeros_like(p) if found[n] is None else found[n] for n, p in trainable(cell).items()]
        trainer.optimizer(tuple(zeros))
        single.step(batches)
    found = full_values(cell)
    close({n: found[n] for n in single.params}, {n: array(p) for n, p in single.params.items()})
    np.testing.assert_array_equal(found["last.weight"], found["first.weight"])


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_ranks_may_use_different_units_where_zeros_are_reduced(rank, world, how):
    """What is gathered must match, so everything is gathered by hand."""
    cell = fill(Chain(Plain), integers=True)
    sharded(cell, mesh_of("shard", world))
    cell.set_reduce_scatter_unused_params(True)
    for each in [cell, *cell.layers]:
        each.set_reduce_op_type("sum")

    cell.construct = lambda x: cell.layers[rank](cell.first(x))
    x = tensor(np.ones((1, WIDTH), np.float32))
    for each in [cell, *cell.layers]:
        each.unshard()
    _, found = differentiate(how, cell, lambda x: cell(x).sum(), x)
    for name, g in found.items():
        if name.startswith("last"):
            assert not array(g).any(), name
    for i in range(2):
        np.testing.assert_array_equal(array(found[f"layers.{i}.down.bias"]), 1)


# -- several forwards and backwards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world, hold", [(2, "gradient_sync"), (4, "gradient_sync"), (4, "all_reduce")])
def test_microbatches_give_the_gradient_of_their_sum(mccl, world, hold):
    mccl.run(microbatches, hold, world=world, timeout=300.0)


def microbatches(rank: int, world: int, hold: str) -> None:
    """Held back by rank or by shard, then reduced by a backward, by `finish_accumulation`, and dropped by a reset."""
    cell, single = integers()
    sharded(cell, mesh_of("shard" if world == 2 else "both", world))
    for each in [cell, *cell.layers]:
        each.set_reduce_op_type("sum")
    forward = lambda x, y: linear(cell(x), y)  # noqa: E731
    switch = getattr(cell, f"set_requires_{hold}")

    def held(*micro: int) -> None:
        for i in micro:
            _, found = differentiate(HOWS[i % 2], cell, forward, *batch(rank, i, integers=True))
            for name, g in found.items():
                assert g is None if i % 2 else not array(g).any(), name
        assert {u.grads_phase for u in cell.hsdp_state.units} <= {GradPhase.HELD}
        ops_issued = set(totals(cell.hsdp_state.ledger))
        assert ("reduce_scatter" in ops_issued) == (hold == "all_reduce")
        assert "all_reduce" not in ops_issued

    def expected(*micro: int) -> dict[str, np.ndarray]:
        batches = [batch(r, i, integers=True) for i in micro for r in range(world)]
        return rows(cell, {n: np.round(g * len(batches)) for n, g in single.gradients(batches)[1].items()})

    switch(False)
    held(0, 1)
    switch(True)
    _, found = differentiate("function", cell, forward, *batch(rank, 2, integers=True))
    exact(found, expected(0, 1, 2))
    cell.zero_grad()
    switch(False)
    held(3, 4)
    cell.finish_accumulation()
    exact({n: p._grad for n, p in trainable(cell).items()}, expected(3, 4))
    cell.finish_accumulation()  # nothing is held: adds nothing
    exact({n: p._grad for n, p in trainable(cell).items()}, expected(3, 4))
    cell.zero_grad()
    held(5)  # the setting stays
    cell.reset_iter_state()
    switch(True)
    _, found = differentiate("backward", cell, forward, *batch(rank, 6, integers=True))
    exact(found, expected(6))


@on_ranks(2)
def test_units_that_run_twice_in_one_forward_get_the_sum(rank, world):
    class Twice(Chain):
        def construct(self, x: Tensor) -> Tensor:
            return self.last(self.layers[0](self.layers[1](self.layers[0](self.first(x)))))

    cell, single = fill(Twice(Plain, 2), integers=True), Single(fill(Twice(Plain, 2), integers=True), linear)
    sharded(cell, mesh_of("shard", world))
    for i, how in enumerate(HOWS):
        batches = [batch(r, i, integers=True) for r in range(world)]
        _, found = differentiate(how, cell, lambda x, y: linear(cell(x), y), *batches[rank])
        exact(found, rows(cell, single.gradients(batches)[1]))
        cell.zero_grad()
        assert totals(cell.hsdp_state.ledger)["reduce_scatter"].count == 3


@pytest.mark.parametrize("order, reshard", [((0, 1), True), ((1, 0), True), ((1, 0), False)])
@on_ranks(2)
def test_two_forwards_before_their_backwards_in_either_order(rank, world, order, reshard):
    hm.enable_mindspore_backward_compat()
    cell, single = integers()
    sharded(cell, mesh_of("shard", world), reshard_after_forward=reshard)
    for step in range(2):
        losses = [linear(cell(x), y) for x, y in (batch(rank, 2 * step + i, integers=True) for i in range(2))]
        for i in order:
            losses[i].backward()
        batches = [batch(r, 2 * step + i, integers=True) for i in range(2) for r in range(world)]
        expected = {n: g * 2 for n, g in single.gradients(batches)[1].items()}  # two microbatches of means
        exact({n: p.grad for n, p in trainable(cell).items()}, rows(cell, expected))
        cell.zero_grad()


@on_ranks(2)
def test_two_losses_in_one_backward_and_a_graph_that_is_retained(rank, world):
    hm.enable_mindspore_backward_compat()
    cell, single = fill(Chain(Plain), integers=True), Single(fill(Chain(Plain), integers=True), linear)
    sharded(cell, mesh_of("shard", world))
    batches = [[batch(r, i, integers=True) for r in range(world)] for i in range(2)]
    (
        linear(cell(batches[0][rank][0]), batches[0][rank][1]) + linear(cell(batches[1][rank][0]), batches[1][rank][1])
    ).backward()
    both = {n: 2 * g for n, g in rows(cell, single.gradients(batches[0] + batches[1])[1]).items()}
    exact({n: p.grad for n, p in trainable(cell).items()}, both)
    cell.zero_grad()
    loss, one = linear(cell(batches[0][rank][0]), batches[0][rank][1]), rows(cell, single.gradients(batches[0])[1])
    issued = []
    for times in (1, 2, 3):
        before = len(cell.hsdp_state.ledger)
        loss.backward(retain_graph=times < 3)
        issued.append(cell.hsdp_state.ledger[before:])
        exact({n: p.grad for n, p in trainable(cell).items()}, {n: times * g for n, g in one.items()})
    assert issued[0] == issued[1] == issued[2] and len(issued[0]) == 7  # three gathers, four reductions


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_graph_of_before_an_optimizer_step_has_the_gradient_of_its_forward_until_another_one_begins(
    rank, world, reshard
):
    """On all ranks alike, though only one of them has changed its rows."""
    hm.enable_mindspore_backward_compat()
    cell, _ = pair()
    sharded(cell, mesh_of("shard", world), reshard_after_forward=reshard)
    x, y = batch(rank)
    older, old = squares(cell(x), y), squares(cell(x), y)
    squares(cell(x), y).backward()
    first = {name: array(p.grad) for name, p in trainable(cell).items()}
    cell.zero_grad()
    if rank == 0:
        with ms._no_grad():
            for p in cell.trainable_params():
                p.copy_(Tensor(p) * 2)
    old.backward()
    for name, p in trainable(cell).items():
        np.testing.assert_array_equal(array(p.grad), first[name])
    squares(cell(x), y)
    with pytest.raises((PhaseError, RuntimeError), match="have changed since the forward of this graph"):
        older.backward()


@on_ranks(2)
def test_evaluation_gives_the_models_output_and_changes_nothing(rank, world):
    """Also between a backward and the optimizer's step, and between microbatches."""
    hm.enable_mindspore_backward_compat()
    cell, single = pair()
    sharded(cell, mesh_of("shard", world))
    x, _ = batch(rank)

    def evaluate() -> None:
        held, before = [u.grads_phase for u in cell.hsdp_state.units], len(cell.hsdp_state.ledger)
        with ms._no_grad():
            out = cell(x)
        assert not out._requires_grad
        np.testing.assert_allclose(array(out), array(single.cell(x)), rtol=1e-5, atol=1e-6)
        issued = cell.hsdp_state.ledger[before:]
        assert issued == expected_comm(cell.hsdp_state.layout, backward=False) or before == 0 or not issued
        assert [u.grads_phase for u in cell.hsdp_state.units] == held
        assert {u.params_phase.name for u in cell.hsdp_state.units} == {"SHARDED"}

    with ms._no_grad():
        cell(x)
    assert cell.hsdp_state.ledger == expected_comm(cell.hsdp_state.layout, backward=False)
    evaluate()
    trainer = Trainer(cell, single, rank, ["backward"])
    trainer.step([batch(r) for r in range(world)])
    evaluate()
    batches = [batch(r, i) for i in range(2) for r in range(world)]
    cell.set_requires_gradient_sync(False)
    squares(cell(batches[rank][0]), batches[rank][1]).backward()
    evaluate()
    cell.set_requires_gradient_sync(True)
    squares(cell(batches[world + rank][0]), batches[world + rank][1]).backward()
    evaluate()
    expected = {n: 2 * g for n, g in single.gradients(batches)[1].items()}
    close({n: array(p.grad) for n, p in trainable(cell).items()}, rows(cell, expected))
