"""The differentiable gather: a pure function, for higher-order gradients, functional transforms and compile."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import hsdp_fn_torch as ht
from hsdp_fn import MeshSpec, MixedPrecisionPolicy, ParamSpec, ReductionPolicy, masters, plan_layout
from hsdp_fn_torch.differentiable import _flatten, _unflatten
from tests.workers_torch import (
    LAYERS,
    Chain,
    Traffic,
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
    norm_like,
    on_ranks,
    step_grads,
    step_of,
)


def loss_of_rows(model, state, x: Tensor, y: Tensor):
    """The loss on this rank's batch as a function of this rank's rows."""

    def loss(rows):
        return loss_of(torch.func.functional_call(model, ht.differentiable_unshard(state, rows), x), y)

    return loss


@on_ranks(1, 2, 4)
def test_it_gathers_every_parameter_under_every_name(rank, world):
    model = integers_(Chain())
    model.last.weight = model.layers[0].up.weight = torch.nn.Parameter(model.layers[0].up.weight.detach())
    model.last.bias = torch.nn.Parameter(torch.zeros(9))
    single = copy.deepcopy(model)
    state = ht.shard_module(model, mesh_for(world), placement_fn=norm_like)
    full = ht.differentiable_unshard(state, masters(state))
    equal(full, {name: p.detach() for name, p in single.named_parameters(remove_duplicate=False)})
    assert {"last.weight", "layers.0.up.weight"} <= full.keys()


@on_ranks(1, 2, 4)
def test_its_gradient_is_the_mean_over_all_ranks(rank, world):
    meshes = [mesh_for(world)] + ([fsdp_mesh(4), hsdp_mesh(4, 1)] if world == 4 else [])
    for mesh in meshes:
        model = integers_(Chain())
        single = copy.deepcopy(model)
        state = ht.shard_module(model, mesh, LAYERS, placement_fn=norm_like)
        found = torch.func.grad(loss_of_rows(model, state, *batch(rank)))(dict(masters(state)))
        mean = mean_grads(single, [batch(r) for r in range(world)])
        equal(found, {name: row.contiguous() for name, row in local_rows(state, mean).items()}, str(mesh))


@on_ranks(2)
def test_autograd_and_func_grad_agree_and_each_issues_one_collective_a_bucket(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    loss = loss_of_rows(model, state, *batch(rank))
    by_func = torch.func.grad(loss)(dict(masters(state)))
    rows = {name: row.clone().requires_grad_() for name, row in masters(state).items()}
    names = list(rows)
    by_autograd = torch.autograd.grad(loss(rows), [rows[n] for n in names])
    equal(dict(zip(names, by_autograd, strict=True)), {n: by_func[n] for n in names})
    _, by_step, state = step_grads(step_of(model), state, *batch(rank))
    equal(by_step, by_func)
    assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 4}


@on_ranks(2, 4)
def test_reduction_policies_scale_its_gradient(rank, world):
    for reduction, factor in (
        (ReductionPolicy(op="sum"), 1.0),
        (ReductionPolicy(divide_factor=8.0), 1 / 8),
        (ReductionPolicy(scaling_factor=4.0), 4 / world),
    ):
        model = integers_(Chain())
        single = copy.deepcopy(model)
        state = ht.shard_module(model, mesh_for(world), reduction=reduction)
        found = torch.func.grad(loss_of_rows(model, state, *batch(rank)))(dict(masters(state)))
        mean = mean_grads(single, [batch(r) for r in range(world)])
        equal(found, local_rows(state, {n: g * world * factor for n, g in mean.items()}), str(reduction))


@on_ranks(2)
def test_low_precision_compute_has_gradients_in_the_dtype_of_the_rows(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x, y = (t.bfloat16() for t in batch(rank))
    full = ht.differentiable_unshard(state, masters(state))
    assert {t.dtype for t in full.values()} == {torch.bfloat16}
    found = torch.func.grad(loss_of_rows(model, state, x, y))(dict(masters(state)))
    assert {g.dtype for g in found.values()} == {torch.float32}


# -------------------------------------------------------------------------------------------------- higher orders


def penalty(gradient) -> Tensor:
    """Squared norm."""
    return sum(g.square().sum() for g in gradient)


@on_ranks(2, 4)
def test_double_backward_through_the_gather_is_that_of_one_process(rank, world):
    """The rows' own squared gradient, differentiated: the second backward gathers what the first one scattered."""
    mesh = mesh_for(world)
    model = integers_(Chain(depth=1)).double()
    single = copy.deepcopy(model)
    state = ht.shard_module(model, mesh, LAYERS[:1], placement_fn=norm_like)
    batches = [tuple(t.double() for t in batch(r)) for r in range(world)]
    loss = loss_of_rows(model, state, *batches[rank])
    names = list(masters(state))
    rows = [masters(state)[n].clone().requires_grad_() for n in names]
    first = torch.autograd.grad(loss(dict(zip(names, rows, strict=True))), rows, create_graph=True)
    # Each rank penalises its own rows, and the second gradient too is that of the mean over ranks. Of S x R ranks, R
    # hold the same rows, so the mean is 1 / S of the whole penalty.
    weights = {}
    for plan in state.layout.units:
        for bucket in plan.buckets:
            for member in bucket.params.members:
                weights[member.spec.name] = bucket.mesh.shard_size
    terms = [g.square().sum() * weights[n] for n, g in zip(names, first, strict=True)]
    second = torch.autograd.grad(sum(terms), rows)

    params = dict(single.named_parameters())
    total = sum(loss_of(single(x), y) for x, y in batches) / world
    whole = torch.autograd.grad(total, [params[n] for n in names], create_graph=True)
    expected = torch.autograd.grad(penalty(whole), [params[n] for n in names], allow_unused=True)
    expected = {n: torch.zeros_like(params[n]) if g is None else g for n, g in zip(names, expected, strict=True)}
    assert any(g.abs().sum() > 0 for g in expected.values())
    found = dict(zip(names, second, strict=True))
    close(found, {n: row.contiguous() for n, row in local_rows(state, expected).items()}, 1e-12)


@on_ranks(2)
def test_a_hessian_vector_product_is_that_of_one_process(rank, world):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world))
    batches = [tuple(t.double() for t in batch(r)) for r in range(world)]
    direction = {n: torch.full_like(p, 0.5) for n, p in single.named_parameters()}
    along = local_rows(state, direction)

    def dot(rows):
        gradient = torch.func.grad(loss_of_rows(model, state, *batches[rank]))(rows)
        return sum((gradient[n] * along[n]).sum() for n in rows)

    found = torch.func.grad(dot)(dict(masters(state)))
    params = dict(single.named_parameters())
    total = sum(loss_of(single(x), y) for x, y in batches) / world
    first = torch.autograd.grad(total, list(params.values()), create_graph=True)
    product = sum((g * direction[n]).sum() for n, g in zip(params, first, strict=True))
    expected = torch.autograd.grad(product, list(params.values()), allow_unused=True)
    expected = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), expected, strict=True)}
    # A rank's `dot` is over its own rows; the mean over ranks of their sum is half of the whole product.
    close({n: g * world for n, g in found.items()}, local_rows(state, expected), 1e-12)


# ---------------------------------------------------------------------------------------------------------- compile


@on_ranks(2)
def test_a_whole_training_function_compiles_into_one_graph(rank, world):
    model = integers_(Chain(depth=1))
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS[:1])
    x, y = batch(rank)
    rows = {name: row.clone() for name, row in masters(state).items()}

    def loss(rows, x, y):
        full = ht.differentiable_unshard(state, rows)
        h = x @ full["first.weight"].t() + full["first.bias"]
        inner = torch.relu(h @ full["layers.0.up.weight"].t() + full["layers.0.up.bias"])
        h = h + inner @ full["layers.0.down.weight"].t() + full["layers.0.down.bias"]
        return ((h @ full["last.weight"].t() + full["last.bias"]) * y).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.func.grad(loss_of_rows(model, state, x, y))(dict(masters(state)))
    for _ in range(2):
        leaves = {name: row.clone().requires_grad_() for name, row in rows.items()}
        value = compiled(leaves, x, y)
        value.backward()
        equal(value.detach(), loss(rows, x, y))
        equal({name: leaf.grad for name, leaf in leaves.items()}, {name: expected[name] for name in leaves})


@on_ranks(2)
def test_it_issues_one_collective_a_bucket_in_each_direction(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, placement_fn=norm_like)
    rows = {name: row.clone().requires_grad_() for name, row in masters(state).items()}
    with Traffic(namespace="_c10d_functional") as mode:
        full = ht.differentiable_unshard(state, rows)
        gathers = list(mode.seen)
        sum(t.sum() for t in full.values()).backward()
    assert [op for op, _, _ in gathers] == ["all_gather"] * 4
    reduced = [op for op, _, _ in mode.seen[len(gathers) :]]
    assert sorted(reduced) == ["all_reduce"] * 4 + ["reduce_scatter"] * 4


def test_padding_that_no_rank_owns_has_no_part_in_values_or_gradients():
    for ranks in (1, 2, 3, 5):
        spec = ParamSpec("w", (4, 3), "float32")
        bucket = plan_layout([spec], MeshSpec.fsdp(ranks)).units[0].buckets[0]
        whole = torch.arange(12.0).view(4, 3)
        pieces = [*whole.chunk(ranks), *[whole[:0]] * (ranks - len(whole.chunk(ranks)))]
        shards = [_flatten([piece], bucket.params, r) for r, piece in enumerate(pieces)]
        (back,) = _unflatten(torch.cat(shards), bucket)
        equal(back, whole)
