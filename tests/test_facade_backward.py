"""Backward in all its orders: unused, frozen and odd parameters, hooks, several forwards and backwards."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hsdp_fn import PhaseError
from tests.workers_facade import (
    OURS,
    THEIRS,
    Trace,
    adamw,
    assert_parity,
    chain,
    data,
    full,
    mean_square,
    shard_blocks,
    train,
)
from tests.workers_torch import WIDTH, Block, Chain, Traffic, batch, close, equal, fsdp_mesh, loss_of, on_ranks


def full_grads(model):
    return {name: full(p.grad) for name, p in model.named_parameters()}


def averaged(single, loss, world):
    """Gradients of the mean over ranks of ``loss(model, rank)``, in one process."""
    single.zero_grad()
    (sum(loss(single, r) for r in range(world)) / world).backward()
    return {name: p.grad for name, p in single.named_parameters()}


def sent(traffic, *ops):
    return [op for op, _, _ in traffic.seen if op in (ops or ("all_gather", "reduce_scatter", "all_reduce"))]


def all_sharded(model):
    """No full parameter is left, neither in the modules nor in the state."""
    inside = all(isinstance(p, DTensor) for m in model.modules() for p in m._parameters.values() if p is not None)
    return inside and not any(isinstance(u.full, tuple) for u in model.hsdp_state.units)


# ---------------------------------------------------------------------------------------------------- unused and None


@on_ranks(2)
def test_tokens_into_an_embedding_of_its_own(rank, world):
    """Nothing that goes into the unit requires gradients; it is reduced when the backward has ended."""
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, WIDTH), Block(), nn.Linear(WIDTH, 7))
        for module in model:
            api.fully_shard(module, mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        return train(model, rank, loss=lambda m, x: m((x * 3).long().remainder(7)).square().mean())

    assert_parity(run)


class Branches(nn.Module):
    """Two units of which the loss may leave out one, and one that no loss can see."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.lost = Block(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        self.lost(x)
        return self.a(x), self.b(x)


@pytest.mark.parametrize(
    "reshard",
    [
        True,
        False,
    ],
)
@pytest.mark.parametrize("used", [(0,), (1,), (1, 0)], ids=str)
@on_ranks(2)
def test_outputs_and_modules_that_backward_leaves_out(rank, world, reshard, used):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model, trace = Branches(), Trace()
        for child in model.children():
            api.fully_shard(child, mesh=mesh, reshard_after_forward=reshard)
        api.fully_shard(model, mesh=mesh)
        for step in range(2):
            out = model(data(rank, step))
            loss = sum(out[at].square().mean() for at in used)
            del out
            loss.backward()
            trace.note_grads(model)
            trace.note("sharded", [isinstance(p, DTensor) for p in model.parameters()])
            if api is OURS:
                assert all_sharded(model)
        return trace

    records = assert_parity(run).records
    missing = {what.split(".")[0][-1] for what, value in records if value is None}
    assert missing == {"t"} | ({"a", "b"} - {"ab"[at] for at in used})  # "lost", and what isn't used


class EitherLayer(nn.Module):
    """One unit, of which a rank uses one half only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        return self.a(x) if first else self.b(x)


@on_ranks(2)
def test_ranks_that_use_different_parameters_of_a_unit(rank, world):
    """Zeros where a rank has no gradient; also for the parameter that none uses."""
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = api.fully_shard(EitherLayer(), mesh=mesh)
        model.set_reduce_scatter_unused_params(True)
        return train(model, rank, loss=lambda m, x: m(x, rank == 0).square().mean(), steps=2)

    found = [value for what, value in assert_parity(run).records if what == "gradient of c.weight"]
    equal(found, [torch.zeros(WIDTH, WIDTH)] * 2)


class EitherBlock(Chain):
    """Runs all of its units, and uses all but one."""

    def forward(self, x, without):
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            out = layer(x)
            x = out if at != without else x
        return self.last(x)


@on_ranks(2)
def test_ranks_that_use_different_units(rank, world):
    """Whole units are reduced in the same order on all ranks, whichever of them has gradients where."""
    torch.manual_seed(0)
    single = EitherBlock()
    model = shard_blocks(OURS, copy.deepcopy(single), fsdp_mesh(world), reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    for step in range(2):
        model.zero_grad()
        model(data(rank, step), rank).square().mean().backward()
        expected = averaged(single, lambda m, r, step=step: m(data(r, step), r).square().mean(), world)
        close(full_grads(model), expected)


@on_ranks(4)
def test_unused_parameters_of_tensor_parallelism(rank, world):
    """Zeros as DTensors like the parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def run(api):
        torch.manual_seed(0)
        model, trace = EitherLayer(), Trace()
        parallelize_module(model, mesh["tp"], dict.fromkeys("abc", ColwiseParallel()))
        api.fully_shard(model, mesh=mesh["dp"])
        model.set_reduce_scatter_unused_params(True)
        first = mesh["dp"].get_local_rank() == 0
        model(data(first, 0), first).square().mean().backward()
        trace.note_grads(model)
        trace.note("placements", [str(p.grad.placements) for p in model.parameters()])
        return trace

    found = dict(assert_parity(run).records)
    equal(found["gradient of c.weight"], torch.zeros(WIDTH, WIDTH))


# ---------------------------------------------------------------------------------------- several forwards, backwards


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.inner(x))


@pytest.mark.parametrize("wrapped", ["around", "inside"])
@on_ranks(2)
def test_two_forwards_of_nested_checkpointed_units(rank, world, wrapped):
    """Checkpointing around the units, or inside them."""
    mesh = fsdp_mesh(world)

    def loss(model, x):
        chosen, rejected = model(x), model(x.flip(0) + 1)
        return -nn.functional.logsigmoid((chosen - rejected).mean()) + chosen.square().mean()

    def run(api):
        torch.manual_seed(0)
        model = Stack()
        for at, block in enumerate(model.inner):
            for linear in (block.up, block.down):
                api.fully_shard(linear, mesh=mesh)
            if wrapped == "inside":
                model.inner[at] = api.fully_shard(checkpoint_wrapper(block), mesh=mesh)
            else:
                model.inner[at] = checkpoint_wrapper(api.fully_shard(block, mesh=mesh))
        api.fully_shard(model.inner, mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank, loss=loss, steps=3)

    assert_parity(run)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_two_backwards_with_prefetches_that_go_astray(rank, world, reshard):
    """What the first backward has gathered for nothing is gone after the last one."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh, reshard_after_forward=reshard), Trace()
        model.layers[0].set_modules_to_backward_prefetch([model.layers[2]])
        model.layers[1].set_modules_to_backward_prefetch([model.layers[2]])
        out = model(data(rank, 0))
        model.set_is_last_backward(False)
        out[:, 0].sum().backward(retain_graph=True)
        trace.note_grads(model)
        model.set_is_last_backward(True)
        out[:, 1].square().sum().backward()
        trace.note_grads(model)
        trace.note("sharded", [isinstance(p, DTensor) for p in model.parameters()])
        if api is OURS:
            assert all_sharded(model)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_a_module_with_and_without_grad_in_one_forward(rank, world):
    mesh = fsdp_mesh(world)

    class Target(Chain):
        def forward(self, x, *, first):
            x = self.first(x)
            if first:
                with torch.no_grad():
                    target = self.layers[0](x)
                return self.last(self.layers[0](x) - target.sin())
            y = self.layers[0](x)
            with torch.no_grad():
                target = self.layers[0](x)
            return self.last(y - target.sin())

    def run(api, first):
        torch.manual_seed(0)
        model = shard_blocks(api, Target(), mesh)
        return train(model, rank, loss=lambda m, x: m(x, first=first).square().mean(), steps=2)

    for first in (True, False):
        assert_parity(functools.partial(run, first=first))


MODES = {
    "every time": [lambda m: None] * 3,
    "once": [
        lambda m: m.set_requires_gradient_sync(False),
        lambda m: None,
        lambda m: m.set_requires_gradient_sync(True),
    ],
    "all-reduced once": [
        lambda m: m.set_requires_all_reduce(False),
        lambda m: None,
        lambda m: m.set_requires_all_reduce(True),
    ],
    "root once": [
        lambda m: m.set_requires_gradient_sync(False, recurse=False),
        lambda m: None,
        lambda m: m.set_requires_gradient_sync(True, recurse=False),
    ],
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(4)
def test_accumulation_without_resharding_after_backward(rank, world, mode):
    """Between microbatches parameters stay; after the last one they are freed. As many collectives as torch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ops: dict[str, list[str]] = {}

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        optimizer, ops[api.name] = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(2):
            for at, prepare in enumerate(MODES[mode]):
                prepare(model)
                model.set_reshard_after_backward(at == 2)
                with Traffic() as traffic:
                    mean_square(model, data(rank, 10 * step + at)).backward()
                ops[api.name] += sent(traffic) if step else []
            trace.note_grads(model)
            trace.note("sharded", [isinstance(p, DTensor) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        trace.note_params(model)
        return trace

    assert_parity(run)
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert ops[OURS.name].count(op) == ops[THEIRS.name].count(op), op


@on_ranks(2)
def test_a_pipeline_with_everything_gathered_up_front(rank, world):
    """Forwards and backwards interleaved; no gather on the way, one reduction a unit at the end."""
    mesh = fsdp_mesh(world)
    ops: dict[str, list[str]] = {}

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_reshard_after_forward(False)
        for step in range(2):
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            for module in (model, *model.layers):
                module.unshard()
            with Traffic() as traffic:
                losses = [mean_square(model, data(rank, 10 * step + i)) for i in range(2)]
                losses.pop(0).backward()
                for i in (2, 3):
                    losses.append(mean_square(model, data(rank, 10 * step + i)))
                    losses.pop(0).backward()
                model.set_is_last_backward(True)
                model.set_reshard_after_backward(True)
                model.set_requires_gradient_sync(True)
                losses.pop().backward()
            ops[api.name] = sent(traffic)
            trace.note_grads(model)
            if api is OURS:
                assert all_sharded(model)
            optimizer.step()
            optimizer.zero_grad()
        trace.note_params(model)
        return trace

    assert_parity(run)
    assert ops[OURS.name] == ops[THEIRS.name] == ["reduce_scatter"] * 4


@on_ranks(2)
def test_losses_that_are_kept(rank, world):
    """Graphs of earlier steps that are still alive change no later gradient."""
    mesh = fsdp_mesh(world)

    def run(api, keep):
        model, trace, kept = shard_blocks(api, chain(), mesh), Trace(), []
        optimizer = adamw(model.parameters())
        for step in range(3):
            extra = mean_square(model, data(rank, 50 + step))  # never differentiated
            value = mean_square(model, data(rank, step))
            value.backward(retain_graph=keep)
            kept += [value, extra] if keep else []
            trace.note_grads(model)
            optimizer.step()
            optimizer.zero_grad()
        trace.note_params(model)
        return trace

    found = assert_parity(functools.partial(run, keep=True))
    equal([v for _, v in found.records], [v for _, v in run(OURS, False).records])


@on_ranks(2)
def test_a_graph_of_before_an_optimizer_step(rank, world):
    """Its parameters are gone: an error says so, nothing is added, and training goes on."""
    model, fresh = (shard_blocks(OURS, chain(), fsdp_mesh(world)) for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, fresh)]
    old = mean_square(model, data(rank, 0))
    old.backward(retain_graph=True)
    mean_square(fresh, data(rank, 0)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(PhaseError, match="have changed since"):
        old.backward()
    assert set(full_grads(model).values()) == {None}
    for m in (model, fresh):
        mean_square(m, data(rank, 1)).backward()
    equal(full_grads(model), full_grads(fresh))


@pytest.mark.parametrize("reshard", [True, None])
@on_ranks(2)
def test_a_forward_of_before_an_optimizer_step(rank, world, reshard):
    """A forward whose backward comes after an update: an error, not gradients of neither the old nor the new model."""
    model = shard_blocks(OURS, chain(), fsdp_mesh(world), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late, now = mean_square(model, data(rank, 0)), mean_square(model, data(rank, 1))
    now.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="changed"):
        late.backward()
    assert set(full_grads(model).values()) == {None}


class Penalty(Chain):
    """The loss holds the gradient of its output with respect to its input."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()


@pytest.mark.parametrize("inside", [True, False], ids=["in forward", "after forward"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_gradient_penalty(rank, world, inside, reshard):
    """As in one process. (FSDP2 finds its parameters gone.)"""
    torch.manual_seed(0)
    single = Penalty()

    def loss(model, r, step):
        if inside:
            return model(data(r, step))
        x = data(r, step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    if not inside:
        single.__class__ = Chain
    model = shard_blocks(OURS, copy.deepcopy(single), fsdp_mesh(world), reshard_after_forward=reshard)
    for step in range(2):
        model.zero_grad()
        loss(model, rank, step).backward()
        close(full_grads(model), averaged(single, lambda m, r, step=step: loss(m, r, step), world))


# --------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("reshard", [True, None])
@on_ranks(2)
def test_post_accumulate_hooks_run_once(rank, world, reshard):
    """Once a backward and parameter, with the sharded gradient in place, however often the parameter was used."""
    model = shard_blocks(OURS, chain(), fsdp_mesh(world), reshard_after_forward=reshard)
    seen: list[str] = []
    names = {p: name for name, p in model.named_parameters()}
    for p in names:

        def hook(param):
            assert isinstance(param.grad, DTensor)
            assert param.grad.to_local().shape == param.to_local().shape
            seen.append(names[param])

        p.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        (mean_square(model, data(rank, step)) + mean_square(model, data(rank, 9))).backward()
        assert sorted(seen) == sorted(names.values())
        seen.clear()


@on_ranks(2)
def test_optimizer_in_backward_is_that_after_backward(rank, world):
    """The same bits."""
    found = []
    for within in (True, False):
        model = shard_blocks(OURS, chain(), fsdp_mesh(world))
        optimizers = {p: adamw([p]) for p in model.parameters()}

        def update(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            if within:
                p.register_post_accumulate_grad_hook(update)
        losses = []
        for step in range(4):
            loss = mean_square(model, data(rank, step))
            loss.backward()
            losses.append(loss.detach())
            for p in () if within else model.parameters():
                update(p)
        found.append([*losses, *(full(p) for p in model.parameters())])
    equal(*found)


@pytest.mark.parametrize("before", [True, False], ids=["before fully_shard", "after it"])
@on_ranks(2)
def test_hooks_on_parameters_see_and_change_the_sharded_gradient(rank, world, before):
    """They get what is about to be added to ``.grad``, once a backward, in the order of registration. (FSDP2 never
    calls those of ``register_hook``.)"""
    expected = shard_blocks(OURS, chain(), fsdp_mesh(world))
    mean_square(expected, data(rank, 0)).backward()
    wanted = full_grads(expected)
    calls = []

    def first(grad):
        calls.append(("first", type(grad), tuple(grad.shape)))
        return grad * 2

    def second(grad):
        calls.append(("second", type(grad), tuple(grad.shape)))

    def post(param):
        calls.append(("post", type(param.grad), tuple(param.grad.shape)))

    def register(model):
        weight = model.layers[0].up.weight
        weight.register_hook(first)
        weight.register_hook(second)
        weight.register_post_accumulate_grad_hook(post)

    model = chain()
    if before:
        register(model)
    shard_blocks(OURS, model, fsdp_mesh(world))
    if not before:
        register(model)
    for times in (1, 2):
        mean_square(model, data(rank, 0)).backward()
        assert calls == [(who, DTensor, (9, WIDTH)) for who in ("first", "second", "post")] * times
        for name, grad in full_grads(model).items():
            equal(grad, times * wanted[name] * (2 if name == "layers.0.up.weight" else 1), name)


@on_ranks(2)
def test_a_removed_hook_is_gone(rank, world):
    model = chain()
    calls: list[str] = []
    handles = [
        model.first.weight.register_hook(lambda grad: calls.append("before")),
        model.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post")),
    ]
    shard_blocks(OURS, model, fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    for handle in handles:
        handle.remove()
    mean_square(model, data(rank, 1)).backward()
    assert calls == ["before", "post"]


# ----------------------------------------------------------------------------------------------------------- functorch


def _dual(model, x, tangent):
    out, slope = torch.func.jvp(model, (x,), (tangent,))
    return out.square().mean() + slope.square().mean()


@pytest.mark.parametrize("reshard", [True, None])
@on_ranks(2)
def test_jvp_before_and_after_the_first_forward(rank, world, reshard):
    """Values, tangents and gradients that go through both."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh, reshard_after_forward=reshard), Trace()
        for step in range(2):
            x, tangent = data(rank, step), data(rank, 10 + step)
            loss = _dual(model, x, tangent)
            loss.backward()
            trace.note("loss", loss.detach())
            trace.note_grads(model)
            model.zero_grad()
            mean_square(model, x).backward()
            trace.note_grads(model)
        return trace

    found = assert_parity(run)
    single = chain()
    expected = averaged(single, lambda m, r: _dual(m, data(r, 0), data(r, 10)), world)
    close(dict(reversed(found.records[1 : 1 + len(expected)])), {f"gradient of {n}": g for n, g in expected.items()})


# ---------------------------------------------------------------------------------------------- frozen, odd parameters


@on_ranks(2)
def test_only_trainable_parameters_are_reduced(rank, world):
    """The reduction holds nothing of the frozen weight: 9 x 6 of the block's 123 elements, with padding."""
    mesh, sizes = fsdp_mesh(world), {}
    for api in (THEIRS, OURS):
        model = chain()
        model.layers[1].up.weight.requires_grad_(False)
        shard_blocks(api, model, mesh)
        with Traffic() as traffic:
            mean_square(model, data(rank, 0)).backward()
        sizes[api.name] = [n for op, _, n in traffic.seen if op == "reduce_scatter"]
        assert model.layers[1].up.weight.grad is None
    assert sizes[OURS.name] == sizes[THEIRS.name]
    assert sizes[OURS.name] == [130, 130 - 10 * WIDTH, 130, 70]


@on_ranks(2)
def test_unfrozen_after_a_forward_with_everything_frozen(rank, world):
    """Is reduced in the policy's dtype. (torch 2.13 uses the compute dtype.)"""
    policy = OURS.MixedPrecisionPolicy("bfloat16", "float32")
    found = []
    for frozen in (True, False):
        model = chain().requires_grad_(not frozen)
        shard_blocks(OURS, model, fsdp_mesh(world), mp_policy=policy)
        model(data(rank, 0))
        model.requires_grad_(True)
        with Traffic() as traffic:
            mean_square(model, data(rank, 0)).backward()
        assert [(op, dtype) for op, dtype, _ in traffic.seen if op == "reduce_scatter"] == [
            ("reduce_scatter", "float32")
        ] * 4
        found.append(full_grads(model))
    equal(*found)


class Scaled(nn.Module):
    """Two layers and a frozen parameter of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.arange(1.0, 8.0).to(dtype), requires_grad=False)
        self.seen, self.kind = torch.empty(0), ""

    def forward(self, x):
        self.seen, self.kind = self.scale.detach().float(), str(self.scale.dtype)
        return self.b(self.a(x)) * self.scale.to(x.dtype).sum()


ODD = [
    torch.int64,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", ODD, ids=str)
@on_ranks(2)
def test_frozen_parameters_of_any_dtype(rank, world, dtype):
    """They come as they are."""
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = api.fully_shard(Scaled(dtype), mesh=mesh)
        trace = Trace()
        mean_square(model, data(rank, 0)).backward()
        for name in ("a", "b"):
            trace.note(f"gradient of {name}", full(getattr(model, name).weight.grad))
        trace.note("frozen", model.seen)
        trace.note("dtype", model.kind)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_frozen_integers_beside_a_compute_dtype(rank, world):
    """A policy casts floating parameters only."""
    mesh, half = fsdp_mesh(world), {THEIRS.name: torch.bfloat16, OURS.name: "bfloat16"}

    def run(api):
        torch.manual_seed(0)
        model = api.fully_shard(
            Scaled(torch.int64), mesh=mesh, mp_policy=api.MixedPrecisionPolicy(param_dtype=half[api.name])
        )
        trace = train(model, rank, steps=2)
        trace.note("dtype", model.kind)
        return trace

    assert ("dtype", "torch.int64") in assert_parity(run).records


@on_ranks(2)
def test_trainable_parameters_of_two_dtypes(rank, world):
    """One gather and one reduction for each; gradients in the parameter's own dtype. (FSDP2 refuses such a unit.)"""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double())
    forward = functools.partial(_through_both, single)
    model = OURS.fully_shard(copy.deepcopy(single), mesh=fsdp_mesh(world))
    model.forward = functools.partial(_through_both, model)
    model(data(rank, 0)).square().mean().backward()
    expected = averaged(single, lambda m, r: forward(data(r, 0)).square().mean(), world)
    close(full_grads(model), expected)
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == {
        "0.weight": torch.float32,
        "0.bias": torch.float32,
        "1.weight": torch.float64,
        "1.bias": torch.float64,
    }


def _through_both(model, x):
    return model[1](model[0](x).double())


@on_ranks(2)
def test_parameters_made_anew_before_the_first_forward(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh)
        for module, local in ((model.layers[0].up, "weight"), (model.first, "bias")):
            param = getattr(module, local)
            setattr(module, local, nn.Parameter(param.detach() * 2))
        return train(model, rank, steps=2)

    found = dict(assert_parity(run).records)
    original = dict(chain().named_parameters())
    assert (found["parameter first.bias"] - 2 * original["first.bias"]).abs().max() < 0.05  # two steps of 0.02 away


@on_ranks(2)
def test_gradients_are_exact_means(rank, world):
    """Of integers, whatever order they are summed in."""
    model = chain()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign())
    single = copy.deepcopy(model)
    shard_blocks(OURS, model, fsdp_mesh(world))
    x, y = batch(rank)
    loss_of(model(x), y).backward()

    def loss(m, r):
        x, y = batch(r)
        return loss_of(m(x), y)

    equal(full_grads(model), averaged(single, loss, world))
