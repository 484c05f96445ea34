"""Functional training on gloo ranks: losses, gradients and collectives against FSDP2, one process, and the oracle."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hsdp_fn_torch as ht
from hsdp_fn import (
    PrefetchPolicy,
    Replicate,
    Sync,
    UnitSpec,
    expected_comm,
    grads,
    masters,
    totals,
)
from tests.test_example_parts import gpt
from tests.workers_torch import (
    LAYERS,
    Chain,
    Traffic,
    assert_same_parts,
    batch,
    close,
    counts,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    local_rows,
    loss_of,
    mean_grads,
    mesh_for,
    model_parts,
    norm_like,
    on_ranks,
    sgd,
    step_grads,
    step_of,
)

GPT = gpt.GPTConfig(dim=32, layers=3, heads=2, seq_len=16)
TIED = gpt.GPTConfig(dim=32, layers=3, heads=2, seq_len=16, tie_embeddings=True, vocab=259)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def tokens(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    text = torch.randint(0, 256, (2, 17), generator=generator)
    return text[:, :-1], text[:, 1:]


def make_gpt(config=GPT) -> nn.Module:
    model = gpt.GPT(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def fsdp2_losses(model, mesh, optimizer: str, steps: int, tail: bool = False) -> list[float]:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    if tail:
        fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for i in range(steps):
        x, y = tokens(dist.get_rank(), i)
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def our_losses(model, mesh, optimizer: str, steps: int, units=LAYERS) -> list[float]:
    state = ht.shard_module(model, mesh, units)
    step = step_of(model, gpt.loss_fn)
    params = ht.shard_parameters(state)
    opt = OPTIMIZERS[optimizer]([p for p in params.values() if p.requires_grad])
    losses = []
    for i in range(steps):
        (loss, _), state = step(state, *tokens(dist.get_rank(), i))
        assert state.ledger == expected_comm(state.layout), counts(state.ledger)
        state, _ = ht.optimizer_step(state, opt, params)
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@on_ranks(2)
def test_the_losses_of_ten_steps_are_bitwise_those_of_fsdp2(rank, world, optimizer):
    base, mesh = make_gpt(), fsdp_mesh(world)
    ours = our_losses(copy.deepcopy(base), mesh, optimizer, 10)
    assert ours == fsdp2_losses(copy.deepcopy(base), mesh, optimizer, 10)
    assert len(set(ours)) == 10  # it does train


@on_ranks(4)
def test_the_losses_of_hsdp_are_bitwise_those_of_fsdp2(rank, world):
    base, mesh = make_gpt(), hsdp_mesh()
    assert our_losses(copy.deepcopy(base), mesh, "adamw", 4) == fsdp2_losses(copy.deepcopy(base), mesh, "adamw", 4)


@on_ranks(2)
def test_a_unit_of_several_modules_trains_like_fsdp2s_list_of_modules(rank, world):
    base, mesh = make_gpt(), fsdp_mesh(world)
    units = [*LAYERS, UnitSpec("tail", modules=("norm", "head"))]
    ours = our_losses(copy.deepcopy(base), mesh, "adamw", 4, units)
    assert ours == fsdp2_losses(copy.deepcopy(base), mesh, "adamw", 4, tail=True)


@on_ranks(2)
def test_tied_embeddings_of_uneven_rows_train_like_fsdp2(rank, world):
    base, mesh = make_gpt(TIED), fsdp_mesh(world)
    ours = our_losses(copy.deepcopy(base), mesh, "adamw", 4)
    assert ours == fsdp2_losses(copy.deepcopy(base), mesh, "adamw", 4)


@on_ranks(2, 4)
def test_gradients_are_exactly_the_mean_over_the_ranks_of_one_process(rank, world):
    model = integers_(Chain(depth=1)).double()  # shallow and wide enough for the values after a step to stay exact
    single = copy.deepcopy(model)
    state = ht.shard_module(model, mesh_for(world), LAYERS[:1])
    for i in range(2):
        batches = [tuple(t.double() for t in batch(r, i)) for r in range(world)]
        loss, rows, state = step_grads(step_of(model), state, *batches[rank])
        equal(loss, loss_of(single(batches[rank][0]), batches[rank][1]).detach(), f"loss {i}")
        mean = mean_grads(single, batches)
        equal(rows, local_rows(state, mean), f"gradients {i}")
        state = sgd(state, rows, 0.125)
        with torch.no_grad():
            for name, p in single.named_parameters():
                p -= 0.125 * mean[name]
        equal(masters(state), local_rows(state, dict(single.named_parameters())), f"masters {i}")
    assert state.step == 2


@on_ranks(2, 4)
def test_ten_adamw_steps_follow_one_process_to_rounding(rank, world):
    base = make_gpt()
    single = copy.deepcopy(base)
    opt = torch.optim.AdamW(single.parameters(), lr=1e-2, eps=1e-3)
    model = copy.deepcopy(base)
    state = ht.shard_module(model, mesh_for(world), LAYERS)
    step = step_of(model, gpt.loss_fn)
    params = ht.shard_parameters(state)
    ours = torch.optim.AdamW(params.values(), lr=1e-2, eps=1e-3)
    for i in range(10):
        mean = mean_grads(single, [tokens(r, i) for r in range(world)], gpt.loss_fn)
        (_, _), state = step(state, *tokens(rank, i))
        state, _ = ht.optimizer_step(state, ours, params)
        for name, p in single.named_parameters():
            p.grad = mean[name]
        opt.step()
    close(masters(state), local_rows(state, dict(single.named_parameters())), 1e-6)


@on_ranks(2)
def test_a_functional_update_of_the_masters_is_torchs_sgd(rank, world):
    model = integers_(Chain())
    mesh = fsdp_mesh(world)
    by_hand, by_torch = copy.deepcopy(model), model
    a, b = ht.shard_module(by_hand, mesh, LAYERS), ht.shard_module(by_torch, mesh, LAYERS)
    params = ht.shard_parameters(b)
    opt = torch.optim.SGD(params.values(), lr=0.125)
    for i in range(3):
        _, rows, a = step_grads(step_of(by_hand), a, *batch(rank, i))
        a = sgd(a, rows, 0.125)
        (_, _), b = step_of(by_torch)(b, *batch(rank, i))
        b, _ = ht.optimizer_step(b, opt, params)
        equal(masters(a), masters(b), f"step {i}")


# ------------------------------------------------------------------------------------------------------- collectives


@on_ranks(2, 4)
def test_the_ledger_is_what_the_schedule_expects(rank, world):
    mesh = mesh_for(world)
    for reshard, ahead, sync in product((None, True, False), (0, 1, 2), Sync):
        model = integers_(Chain())
        prefetch = PrefetchPolicy(ahead, ahead)
        state = ht.shard_module(model, mesh, LAYERS, reshard_after_forward=reshard, prefetch=prefetch)
        (_, _), state = step_of(model)(state, *batch(rank), sync=sync)
        what = f"reshard {reshard}, prefetch {ahead}, {sync}"
        if sync is Sync.FULL:
            state, _ = grads(state)  # an all-reduce may be issued as late as here
        assert state.ledger == expected_comm(state.layout, sync=sync), what
        units = len(LAYERS)
        gathers = {None: 2 * units + 1, True: 2 * units + 2, False: units + 1}[reshard]
        found = counts(state.ledger)
        assert found["all_gather"] == gathers, what
        assert found.get("reduce_scatter", 0) == (0 if sync is Sync.NONE else units + 1), what
        assert found.get("all_reduce", 0) == (units + 1 if sync is Sync.FULL and world == 4 else 0), what


@on_ranks(2, 4)
def test_the_ledger_is_what_c10d_was_asked_for_to_the_byte(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, mesh_for(world), LAYERS, placement_fn=norm_like)
    with Traffic() as mode:
        (_, _), state = step_of(model)(state, *batch(rank))
        state, _ = grads(state)
    assert mode.seen == Traffic.of(state.ledger)
    assert state.ledger == expected_comm(state.layout)


@on_ranks(2)
def test_the_bytes_of_a_step_are_theory_plus_declared_padding(rank, world):
    model = integers_(Chain())
    numel = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.layers.parameters())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    (_, _), state = step_of(model)(state, *batch(rank))
    sums = totals(state.ledger)
    gathered, reduced = sums["all_gather"], sums["reduce_scatter"]
    assert gathered.nbytes - gathered.padding == 4 * (numel + layers)
    assert reduced.nbytes - reduced.padding == 4 * numel
    assert gathered.padding > 0


class ManyDtypes(nn.Module):
    """Two dtypes and a frozen matrix in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.plain = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen(self.plain(x)) + self.wide(x.double()).float()


@on_ranks(2, 4)
def test_several_dtypes_frozen_and_replicated_parameters_in_one_unit(rank, world):
    model = integers_(Chain(ManyDtypes))
    single = copy.deepcopy(model)

    def place(spec):
        return Replicate() if spec.name.endswith("bias") else None

    state = ht.shard_module(model, mesh_for(world), LAYERS, placement_fn=place)
    assert [len(unit.buckets) for unit in state.layout.units] == [2, 4, 4, 4]
    _, rows, state = step_grads(step_of(model), state, *batch(rank))
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
    assert state.ledger == expected_comm(state.layout)
    assert "layers.0.frozen.weight" not in rows


@on_ranks(2)
def test_a_wholly_frozen_unit_is_gathered_twice_and_never_reduced(rank, world):
    for ahead in (0, 1, 2):
        model = integers_(Chain())
        for p in model.layers[1].parameters():
            p.requires_grad_(False)
        single = copy.deepcopy(model)
        state = ht.shard_module(model, fsdp_mesh(world), LAYERS, prefetch=PrefetchPolicy(ahead, ahead))
        _, rows, state = step_grads(step_of(model), state, *batch(rank))
        equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
        assert state.ledger == expected_comm(state.layout)
        assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 3}


@on_ranks(2, 4)
def test_matrices_split_unevenly_on_dim_1_beside_replicated_biases(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, placement_fn=norm_like)
    assert masters(state)["layers.0.down.weight"].shape[1] in ({5, 4} if world == 2 else {3, 0})
    _, rows, state = step_grads(step_of(model), state, *batch(rank))
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
    assert state.ledger == expected_comm(state.layout)


# -------------------------------------------------------------------------------------------------- oracle and syncs


@on_ranks(2, 4)
def test_gradients_equal_those_of_the_differentiable_oracle(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, mesh_for(world), LAYERS, placement_fn=norm_like)
    x, y = batch(rank)

    def oracle(rows):
        return loss_of(torch.func.functional_call(model, ht.differentiable_unshard(state, rows), x), y)

    expected, value = torch.func.grad_and_value(oracle)(dict(masters(state)))
    loss, rows, state = step_grads(step_of(model), state, x, y)
    equal(loss, value)
    equal(rows, expected)


@on_ranks(2, 4)
def test_accumulated_microbatches_give_the_same_sum_however_they_are_synced(rank, world):
    mesh = mesh_for(world)
    results = {}
    for plan in ([Sync.NONE] * 2, [Sync.SHARD] * 2, [Sync.FULL] * 2, [Sync.NONE, Sync.SHARD], [Sync.SHARD, Sync.NONE]):
        model = integers_(Chain())
        state = ht.shard_module(model, mesh, LAYERS)
        step = step_of(model)
        for i, sync in enumerate([*plan, Sync.FULL]):
            (_, _), state = step(state, *batch(rank, i), sync=sync)
        assert state.micro == 3
        state, results[tuple(plan)] = grads(state)
    single = integers_(Chain())
    per_micro = [mean_grads(single, [batch(r, i) for r in range(world)]) for i in range(3)]
    total = {name: sum(m[name] for m in per_micro) for name in per_micro[0]}
    for plan, rows in results.items():
        equal(rows, local_rows(state, total), str(plan))


@on_ranks(2)
def test_an_evaluation_between_microbatches_changes_the_ledger_only(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    parts = model_parts(model)
    x, y = batch(rank)
    (_, _), state = step_of(model)(state, x, y, sync=Sync.NONE)
    issued = state.ledger
    out, state = ht.evaluate(lambda p, x: ht.functional_call(model, p, x))(state, x)
    equal(out, single(x))
    assert not out.requires_grad
    assert state.ledger == issued + expected_comm(state.layout, backward=False)
    assert (state.micro, state.step) == (1, 0)
    assert_same_parts(model, parts)
    (_, _), state = step_of(model)(state, x, y)
    state, rows = grads(state)
    mean = mean_grads(single, [batch(r) for r in range(world)])
    equal(rows, local_rows(state, {name: 2 * g for name, g in mean.items()}))
