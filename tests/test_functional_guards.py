"""What goes wrong quietly elsewhere and is refused, or right, here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

import hsdp_fn_torch as ht
from hsdp_fn import (
    BackendError,
    CPUOffloadPolicy,
    GradientError,
    LayoutError,
    PhaseError,
    RankMismatchError,
    Replicate,
    clone,
    expected_comm,
    full_params,
    memory_bytes,
    shard,
    unshard,
)
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Chain,
    batch,
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


@on_ranks(2)
def test_parameters_and_graphs_of_a_call_that_has_ended_are_refused_and_communicate_nothing(rank, world):
    model, kept = integers_(Chain()), {}

    def fn(p, x, y):
        kept["params"], kept["out"] = p, ht.functional_call(model, p, x)
        return loss_of(ht.functional_call(model, p, x), y)

    (_, _), state = ht.value_and_grad(fn)(ht.shard_module(model, fsdp_mesh(world), LAYERS), *batch(rank))
    issued = len(state.ledger)
    with pytest.raises(PhaseError, match="has ended"):
        kept["params"]["first.weight"]
    with pytest.raises(PhaseError, match="has ended"):
        kept["out"].sum().backward()
    assert len(state.ledger) == issued


@on_ranks(2)
def test_a_module_replaced_between_steps_is_refused_and_one_of_another_shape_too(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    (_, _), state = step_of(model)(state, *batch(rank))
    model.layers[1].up = nn.Linear(WIDTH, 5)
    with pytest.raises(
        LayoutError, match=r"parameter 'layers\.1\.up\.weight' of Chain has shape \(5, .* planned for \(9,"
    ):
        step_of(model)(state, *batch(rank))
    model.layers[1].up = nn.Linear(WIDTH, 9)  # the same shape: its place is found again, its weights are the state's
    (loss, _), state = step_of(model)(state, *batch(rank))
    equal(loss, loss_of(integers_(Chain())(batch(rank)[0]), batch(rank)[1]).detach())


@on_ranks(2)
def test_a_gradient_penalty_inside_forward_changes_neither_gradients_nor_what_is_resharded(rank, world):
    def penalized(f, x, y):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(loss_of(f(x), y), x)
        return loss_of(f(x + g), y)

    model, single = integers_(Chain()), integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    step = ht.value_and_grad(lambda p, x, y: penalized(lambda v: ht.functional_call(model, p, v), x, y))
    (_, _), state = step(state, *batch(rank))
    means = []
    for r in range(world):
        single.zero_grad()
        penalized(single, *batch(r)).backward()
        means.append({n: p.grad.clone() for n, p in single.named_parameters()})
    mean = {n: sum(m[n] for m in means) / world for n in means[0]}
    backward_gathers = [c.unit for c in state.ledger if c.op == "all_gather"][-len(LAYERS) :]
    assert sorted(backward_gathers) == sorted(LAYERS)  # gathered again for the real backward, so they were freed
    from hsdp_fn import grads

    _, rows = grads(state)
    equal(rows, local_rows(state, mean))


@on_ranks(2)
def test_one_rank_that_cannot_take_the_layout_or_a_parameter_fails_on_all_ranks(rank, world):
    mesh = fsdp_mesh(world)
    model = nn.Linear(4, 4)
    layout = ht.plan_module(model, mesh)
    params = {n: p.detach() for n, p in model.named_parameters()}
    odd = ht.TorchBackend(mesh, offload_policy=CPUOffloadPolicy() if rank else None)
    with pytest.raises(BackendError if rank else RankMismatchError):
        shard(params, layout, backend=odd)
    if rank:
        params["weight"] = params["weight"].to(torch.complex64)
    with pytest.raises(LayoutError if rank else RankMismatchError, match=r"'weight'.*complex64"):
        shard(params, layout, backend=ht.TorchBackend(mesh))


@on_ranks(2)
def test_a_failed_step_on_a_gathered_state_leaves_its_full_parameters_as_they_were(rank, world):
    model = integers_(Chain())
    state = unshard(ht.shard_module(model, fsdp_mesh(world), LAYERS))

    def fails(p, x, y):
        out = ht.functional_call(model, p, x)
        out.register_hook(lambda g: g)
        loss_of(out, y).backward()
        raise ValueError("after the backward")

    with pytest.raises(ValueError, match="after the backward"):
        ht.value_and_grad(fails)(state, *batch(rank))
    assert not any(t.requires_grad or t.grad is not None for t in full_params(state).values())
    _, rows, _ = step_grads(step_of(model), clone(state), *batch(rank))
    equal(rows, local_rows(state, mean_grads(integers_(Chain()), [batch(r) for r in range(world)])))


@on_ranks(2)
def test_a_sparse_gradient_is_refused_by_name_and_sparse_inputs_pass(rank, world):
    model = nn.Embedding(8, 4, sparse=True)
    state = ht.shard_module(model, fsdp_mesh(world))
    step = ht.value_and_grad(lambda p, i: ht.functional_call(model, p, i).sum())
    with pytest.raises(GradientError, match=r"gradient of 'weight' is torch\.sparse_coo"):
        step(state, torch.arange(3))
    table = nn.Linear(4, 4, bias=False)
    state = ht.shard_module(nn.Sequential(table), fsdp_mesh(world), ["0"])
    x = torch.eye(4).to_sparse()
    step = ht.value_and_grad(lambda p: p.run("0", lambda w: torch.sparse.mm(x, w["0.weight"]).sum()))
    (_, _), state = step(state)
    from hsdp_fn import grads

    assert grads(state)[1]["0.weight"].eq(1).all()


@on_ranks(2)
def test_full_parameters_are_a_copy_also_where_nothing_is_gathered(rank, world):
    state = unshard(ht.shard_module(nn.Linear(4, 4), fsdp_mesh(world), placement_fn=lambda spec: Replicate()))
    held = memory_bytes(state)
    assert (held["master"], held["full"], held["total"]) == (80, 80, 160)
    before = [m.clone() for m in state.units[0].master]
    full_params(state)["weight"].zero_()
    equal(list(state.units[0].master), before)
    split = memory_bytes(unshard(ht.shard_module(nn.Linear(4, 4), fsdp_mesh(world))))
    assert (split["master"], split["full"]) == (40, 80)


@on_ranks(2)
def test_states_are_nodes_of_torch_s_own_pytree(rank, world):
    state = ht.shard_module(nn.Linear(4, 4), fsdp_mesh(world))
    leaves, spec = torch_pytree.tree_flatten(state)
    assert [t.numel() for t in leaves if isinstance(t, torch.Tensor)] == [10]
    again = torch_pytree.tree_unflatten([t.clone() if isinstance(t, torch.Tensor) else t for t in leaves], spec)
    assert again.layout == state.layout and again.units[0].master[0].equal(state.units[0].master[0])
    assert expected_comm(again.layout) == expected_comm(state.layout)


class Clamps(Chain):
    """Clips a weight of the root in place while it runs."""

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.5, 0.5)
        return super().forward(x)


@on_ranks(2)
def test_an_in_place_edit_of_a_unit_that_stays_gathered_is_refused_too(rank, world):
    model = integers_(Clamps())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    with pytest.raises(RuntimeError, match=r"forward of unit '\(root\)' modified its gathered parameters in place"):
        step_of(model)(state, *batch(rank))
    with pytest.raises(RuntimeError, match="in place"):
        ht.evaluate(lambda p, x: ht.functional_call(model, p, x))(state, batch(rank)[0])


@on_ranks(2)
def test_an_optimizer_step_on_a_gathered_state_changes_nothing(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    params = ht.shard_parameters(state)
    (_, _), state = step_of(model)(state, *batch(rank))
    before = {n: p.detach().clone() for n, p in params.items()}
    state = unshard(state)
    with pytest.raises(PhaseError, match="shard"):
        ht.optimizer_step(state, torch.optim.SGD(params.values(), lr=1.0), params)
    equal(dict(params), before)
    state, _ = ht.optimizer_step(shard(state), torch.optim.SGD(params.values(), lr=1.0), params)
    assert state.step == 1


@on_ranks(2)
def test_an_optimizer_over_another_state_is_refused_on_every_rank_even_where_it_owns_no_rows(rank, world):
    state = ht.shard_module(nn.Linear(4, 1, bias=False), fsdp_mesh(world))
    params = ht.shard_parameters(clone(state))
    assert params["weight"].shape[0] == 1 - rank
    with pytest.raises(LayoutError, match="'weight' isn't this state's master"):
        ht.optimizer_step(state, torch.optim.SGD(params.values(), lr=1.0), params)


@on_ranks(2)
def test_losses_on_placeholders_frozen_placeholders_and_backwards_in_evaluate_are_refused(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    with pytest.raises(TypeError, match="loss is on the meta device"):
        ht.value_and_grad(lambda p: sum(w.square().sum() for w in model.parameters()))(state)

    def differentiates(p, x, y):
        with torch.enable_grad():
            loss_of(ht.functional_call(model, p, x), y).backward()

    with pytest.raises(PhaseError, match="inside evaluate"):
        ht.evaluate(differentiates)(state, *batch(rank))
    model.layers[0].up.weight.requires_grad_(False)
    with pytest.raises(LayoutError, match=r"'layers\.0\.up\.weight' .* was frozen"):
        step_of(model)(state, *batch(rank))


@on_ranks(2)
def test_a_recurrent_module_keeps_no_gathered_weights_after_a_step(rank, world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x):
            return self.lstm(x)[0]

    model = Model()
    state = ht.shard_module(model, fsdp_mesh(world), ["lstm"])
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).sum())
    (_, _), state = step(state, torch.ones(2, 1, 4))
    assert all(w.is_meta for w in model.lstm._flat_weights)
