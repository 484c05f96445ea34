"""Activation checkpointing around units, inside units and both, and the user's own saved-tensor hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hsdp_fn_torch as ht
from hsdp_fn import PrefetchPolicy, Sync, expected_comm, grads
from tests.test_example_parts import gpt
from tests.test_functional import make_gpt, tokens
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Block,
    Chain,
    assert_same_parts,
    batch,
    counts,
    equal,
    fsdp_mesh,
    integers_,
    local_rows,
    mean_grads,
    model_parts,
    on_ranks,
    step_grads,
    step_of,
)


class AroundUnits(Chain):
    """Recomputes whole units."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


class Deep(nn.Module):
    """A unit of three sublayers, of which it recomputes those that ``chosen`` names."""

    reentrant = False
    chosen: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            x = checkpoint(part, x, use_reentrant=self.reentrant) if i in self.chosen else part(x)
        return x


class AroundSpans(Chain):
    """Recomputes two units in one go, and the root's last layer."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        x = checkpoint(lambda x: self.layers[2](self.layers[1](x)), x, use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


def variants() -> dict[str, tuple[Callable[[bool], nn.Module], tuple[str, ...]]]:
    """Models by name, each made for one kind of checkpointing, with their units."""

    def around(reentrant: bool) -> nn.Module:
        model = AroundUnits()
        model.reentrant = reentrant
        return model

    def inside(chosen: tuple[int, ...], outer: type[Chain] = Chain) -> Callable[[bool], nn.Module]:
        def make(reentrant: bool) -> nn.Module:
            model = outer(Deep)
            for module in model.modules():
                if isinstance(module, (Deep, AroundUnits)):
                    module.reentrant = reentrant
                if isinstance(module, Deep):
                    module.chosen = chosen
            return model

        return make

    def spans(reentrant: bool) -> nn.Module:
        model = AroundSpans()
        model.reentrant = reentrant
        return model

    return {
        "around units": (around, LAYERS),
        "one sublayer inside units": (inside((1,)), LAYERS),
        "the last sublayer inside units": (inside((2,)), LAYERS),
        "several sublayers inside units": (inside((0, 2)), LAYERS),
        "all sublayers inside units": (inside((0, 1, 2)), LAYERS),
        "nested": (inside((0, 2), AroundUnits), LAYERS),
        "around units of a single root unit": (around, ()),
        "several sublayers inside a single root unit": (inside((0, 2)), ()),
        "spans of units": (spans, LAYERS),
    }


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", sorted(variants()))
@on_ranks(2)
def test_recomputation_changes_no_gradient_and_no_collective(rank, world, name, reentrant):
    make, units = variants()[name]
    for ahead in (0, 1):
        model = integers_(make(reentrant))
        plain = copy.deepcopy(model)  # in one process checkpointing is torch's own affair
        prefetch = PrefetchPolicy(ahead, ahead)
        state = ht.shard_module(model, fsdp_mesh(world), units, prefetch=prefetch)
        parts = model_parts(model)
        for i in range(2):
            x, y = batch(rank, i)
            inputs = [(batch(r, i)[0].requires_grad_(), batch(r, i)[1]) for r in range(world)]
            _, rows, state = step_grads(step_of(model), state, x.requires_grad_(), y)
            equal(rows, local_rows(state, mean_grads(plain, inputs)), f"prefetch {ahead}, step {i}")
            assert_same_parts(model, parts)
        u = len(units)
        assert counts(state.ledger) == {"all_gather": 2 * (2 * u + 1), "reduce_scatter": 2 * (u + 1)}, counts(
            state.ledger
        )


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_the_ledger_of_recomputed_units_is_the_schedules(rank, world, reentrant):
    for ahead in (0, 1, 2):
        make, units = variants()["around units"]
        model = integers_(make(reentrant))
        state = ht.shard_module(model, fsdp_mesh(world), units, prefetch=PrefetchPolicy(ahead, ahead))
        (_, _), state = step_of(model)(state, batch(rank)[0].requires_grad_(), batch(rank)[1])
        assert state.ledger == expected_comm(state.layout), f"prefetch {ahead}"


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed_microbatches_accumulate(rank, world, reentrant):
    for name in ("around units", "several sublayers inside units"):
        make, units = variants()[name]
        model = integers_(make(reentrant))
        plain = copy.deepcopy(model)
        state = ht.shard_module(model, fsdp_mesh(world), units)
        for i, sync in enumerate((Sync.NONE, Sync.SHARD, Sync.FULL)):
            x, y = batch(rank, i)
            (_, _), state = step_of(model)(state, x.requires_grad_(), y, sync=sync)
        state, rows = grads(state)
        per_micro = [
            mean_grads(plain, [(batch(r, i)[0].requires_grad_(), batch(r, i)[1]) for r in range(world)])
            for i in range(3)
        ]
        equal(rows, local_rows(state, {n: sum(m[n] for m in per_micro) for n in per_micro[0]}), name)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_transformer_with_recomputed_blocks_has_bitwise_the_same_losses(rank, world, reentrant):
    found = []
    for recompute in (False, True):
        model = make_gpt()
        if recompute:
            for layer in model.layers:
                inner = layer.ffn.forward
                layer.ffn.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
        state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
        params = ht.shard_parameters(state)
        opt = torch.optim.AdamW(params.values(), lr=1e-2)
        losses = []
        for i in range(3):
            (loss, _), state = step_of(model, gpt.loss_fn)(state, *tokens(rank, i))
            losses.append(loss.item())
            assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 4}
            state, _ = ht.optimizer_step(state, opt, params)
        found.append(losses)
    assert found[0] == found[1]


# ----------------------------------------------------------------------------------------------------- users' hooks


class Counting(saved_tensors_hooks):
    """Counts what is packed and unpacked, and hands out copies, to show that they are used."""

    def __init__(self) -> None:
        self.packed: list[torch.Size] = []
        self.unpacked: list[torch.Size] = []

        def pack(t: Tensor) -> Tensor:
            self.packed.append(t.size())
            return t.clone()

        def unpack(t: Tensor) -> Tensor:
            self.unpacked.append(t.size())
            return t

        super().__init__(pack, unpack)


@on_ranks(2)
def test_hooks_around_the_forward_see_activations_and_no_gathered_weights(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    hooks = Counting()

    def fn(p, x, y):
        with hooks:
            out = ht.functional_call(model, p, x)
        return (out * y).sum()

    _, rows, state = step_grads(ht.value_and_grad(fn), state, *batch(rank))
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
    assert state.ledger == expected_comm(state.layout)
    assert sorted(hooks.packed) == sorted(hooks.unpacked)
    # Per block: input of `up`, relu's result for itself and as input of `down`. The weights (9, 6) and (6, 9) aren't
    # among them. The root isn't resharded, so what autograd saves of it goes to the user's hooks.
    shapes = [tuple(size) for size in hooks.packed]
    assert not {(9, WIDTH), (WIDTH, 9)} & set(shapes), shapes
    assert shapes.count((4, 9)) == 6


@on_ranks(2)
def test_activations_can_be_offloaded_around_the_forward_and_inside_a_unit(rank, world):
    class OffloadsInside(Block):
        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                return super().forward(x)

    for model, outside in ((integers_(Chain()), True), (integers_(Chain(OffloadsInside)), False)):
        single = copy.deepcopy(model)
        state = ht.shard_module(model, fsdp_mesh(world), LAYERS)

        def fn(p, x, y, model=model, outside=outside):
            if not outside:
                return (ht.functional_call(model, p, x) * y).sum()
            with save_on_cpu():
                return (ht.functional_call(model, p, x) * y).sum()

        _, rows, state = step_grads(ht.value_and_grad(fn), state, *batch(rank))
        equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])), str(outside))
        assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 4}


@on_ranks(2)
def test_hooks_and_recomputation_together(rank, world):
    for reentrant in (False, True):
        for name in ("around units", "several sublayers inside units"):
            make, units = variants()[name]
            model = integers_(make(reentrant))
            plain = copy.deepcopy(model)
            state = ht.shard_module(model, fsdp_mesh(world), units)

            def fn(p, x, y, model=model):
                with Counting():
                    return (ht.functional_call(model, p, x) * y).sum()

            _, rows, state = step_grads(ht.value_and_grad(fn), state, batch(rank)[0].requires_grad_(), batch(rank)[1])
            inputs = [(batch(r)[0].requires_grad_(), batch(r)[1]) for r in range(world)]
            equal(rows, local_rows(state, mean_grads(plain, inputs)), f"{name}, reentrant {reentrant}")
            assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 4}
