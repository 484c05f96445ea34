"""`fully_shard` against torch's own: the same training function gives the same bits."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.workers_facade import (
    OURS,
    NormHead,
    Tied,
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
from tests.workers_torch import WIDTH, Block, Chain, counts, equal, fsdp_mesh, hsdp_mesh, mesh_for, on_ranks

ALL_REDUCE_LATER = (lambda m: m.set_requires_all_reduce(False), lambda m: m.set_requires_all_reduce(True))
SYNC_LATER = (
    lambda m: m.set_requires_gradient_sync(False),
    lambda m: None,
    lambda m: m.set_requires_gradient_sync(True),
)

# ---------------------------------------------------------------------------------------------------------- wrapping


@on_ranks(2, 4)
def test_root_only(rank, world):
    mesh = mesh_for(world)
    assert_parity(lambda api: train(api.fully_shard(chain(), mesh=mesh), rank))


@on_ranks(2, 4)
def test_blocks_and_root(rank, world):
    mesh = mesh_for(world)
    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank))


@on_ranks(2)
def test_blocks_without_a_root(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh, root=False)
        return train(model, rank, make_optimizer=lambda params: adamw(params, foreach=False))

    assert_parity(run)


@on_ranks(2)
def test_units_within_units(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model = chain()
        for layer in model.layers:
            api.fully_shard(layer.up, mesh=mesh)
        return train(shard_blocks(api, model, mesh), rank)

    assert_parity(run)


@on_ranks(2)
def test_root_without_parameters_of_its_own(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.ReLU(), Block())
        for at in (0, 2):
            api.fully_shard(model[at], mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank)

    assert_parity(run)


@on_ranks(2)
def test_a_list_is_one_unit(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = NormHead()
        for layer in model.layers:
            api.fully_shard(layer, mesh=mesh)
        api.fully_shard([model.norm, model.head], mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank)

    assert_parity(run)


@on_ranks(2)
def test_head_of_a_list_called_alone_on_chunks(rank, world):
    """Forward stops at the norm; the head then runs once a chunk, and all chunks' gradients count."""
    mesh = fsdp_mesh(world)

    def loss(model, x):
        hidden = model(x, upto="norm")
        return sum(model.head(chunk).square().mean() for chunk in hidden.chunk(2))

    def run(api):
        torch.manual_seed(0)
        model = NormHead()
        for layer in model.layers:
            api.fully_shard(layer, mesh=mesh)
        api.fully_shard([model.norm, model.head], mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank, loss=loss)

    assert_parity(run)


@on_ranks(2)
def test_tied_weights_in_the_root(rank, world):
    mesh = fsdp_mesh(world)

    def loss(model, x):
        tokens = (x * 3).long().remainder(7)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def run(api):
        torch.manual_seed(0)
        model = Tied()
        api.fully_shard(model.block, mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank, loss=loss)

    assert_parity(run)


@on_ranks(2, 4)
def test_uneven_shapes_and_fewer_rows_than_ranks(rank, world):
    """Sizes 1, 3, 5 on 2 and 4 ranks (4: shard groups of 2 and of 4)."""
    for mesh in [fsdp_mesh(world), *([hsdp_mesh()] if world == 4 else [])]:

        def run(api, mesh=mesh):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1), nn.Linear(1, 5))
            api.fully_shard(model[2], mesh=mesh)
            return train(api.fully_shard(model, mesh=mesh), rank)

        assert_parity(run)


@on_ranks(2)
def test_shards_along_another_dim(rank, world):
    from torch.distributed.tensor import Shard

    mesh = fsdp_mesh(world)

    def place(param):
        return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh, shard_placement_fn=place), rank))


# ------------------------------------------------------------------------------------------------- frozen and unused


@pytest.mark.parametrize("frozen", [("layers.1.",), ("first.",), ("bias",), ("layers.0.up.weight", "last.")])
@on_ranks(2)
def test_frozen_parameters(rank, world, frozen):
    mesh = fsdp_mesh(world)

    def run(api):
        model = chain()
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in frozen))
        return train(shard_blocks(api, model, mesh), rank)

    assert_parity(run)


@on_ranks(2)
def test_freezing_and_thawing_between_steps(rank, world):
    mesh = fsdp_mesh(world)

    def toggle(model, trace, step):
        model.layers[1].up.weight.requires_grad_(step % 2 == 1)
        for p in model.layers[2].parameters():
            p.requires_grad_(step % 2 == 1)

    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, before_step=toggle))


@on_ranks(2)
def test_unused_parameters_get_no_gradient(rank, world):
    mesh = fsdp_mesh(world)

    class Skipping(Chain):
        def forward(self, x):
            return self.last(self.layers[2](self.layers[0](x)))

    def run(api):
        torch.manual_seed(0)
        return train(shard_blocks(api, Skipping(), mesh), rank)

    trace = assert_parity(run)
    missing = {what for what, value in trace.records if value is None}
    assert "gradient of first.weight" in missing
    assert "gradient of layers.1.up.weight" in missing


@on_ranks(2)
def test_only_one_of_two_outputs_in_the_loss(rank, world):
    mesh = fsdp_mesh(world)

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x):
            return {"a": self.a(x), "b": [self.b(x), None]}

    def run(api):
        torch.manual_seed(0)
        model = TwoHeads()
        api.fully_shard(model.a, mesh=mesh)
        api.fully_shard(model.b, mesh=mesh)
        return train(api.fully_shard(model, mesh=mesh), rank, loss=lambda m, x: m(x)["a"].square().mean())

    trace = assert_parity(run)
    assert all(value is None for what, value in trace.records if what.startswith("gradient of b."))


# ------------------------------------------------------------------------------------------------------ accumulation


@on_ranks(2, 4)
def test_accumulation_without_communication(rank, world):
    mesh = mesh_for(world)
    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, micro=SYNC_LATER, steps=3))


@on_ranks(2)
def test_accumulation_of_one_module_only(rank, world):
    """``recurse=False``: the root holds its gradients back, the blocks reduce each time."""
    mesh = fsdp_mesh(world)
    micro = [functools.partial(_set_own_sync, on) for on in (False, True)]
    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, micro=micro, steps=3))


def _set_own_sync(on, model):
    model.set_requires_gradient_sync(on, recurse=False)


@on_ranks(2)
def test_sync_set_between_forward_and_backward(rank, world):
    """The setting that holds when backward runs is what counts."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        for step, sync in enumerate((False, True, True, False, True)):
            value = mean_square(model, data(rank, step))
            model.set_requires_gradient_sync(sync)
            value.backward()
            trace.note("loss", value.detach())
            trace.note_grads(model)
        return trace

    assert_parity(run)


@on_ranks(4)
def test_accumulation_of_reduce_scattered_sums(rank, world):
    mesh = hsdp_mesh()
    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, micro=ALL_REDUCE_LATER, steps=3))


@on_ranks(2)
def test_gradients_add_to_those_that_are_there(rank, world):
    """Two backwards that both communicate; and zero_grad(set_to_none=False)."""
    mesh = fsdp_mesh(world)

    def zero(model, trace, step):
        trace.note("before zeroing", full(model.first.weight.grad))

    def make(params):
        optimizer = adamw(params)
        optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
        return optimizer

    def run(api):
        model = shard_blocks(api, chain(), mesh)
        return train(model, rank, micro=(lambda m: None, lambda m: None), make_optimizer=make, before_step=zero)

    assert_parity(run)


# ---------------------------------------------------------------------------------------------------------- reducing


@pytest.mark.parametrize("factor", [1.0, 4.0])
@on_ranks(2, 4)
def test_gradient_divide_factor(rank, world, factor):
    """Of the root only. Powers of two, so that dividing before or after the sum rounds alike."""
    mesh = mesh_for(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh)
        if api is not OURS:
            model.set_force_sum_reduction_for_comms(True)  # gloo can't multiply beforehand
        model.set_gradient_divide_factor(factor)
        return train(model, rank)

    assert_parity(run)


@on_ranks(2)
def test_divide_factor_scales_the_gradients_of_its_module_only(rank, world):
    mesh = fsdp_mesh(world)

    def gradients(factor):
        model = shard_blocks(OURS, chain(), mesh)
        if factor is not None:
            model.layers[0].set_gradient_divide_factor(factor)
        mean_square(model, data(rank, 0)).backward()
        return {name: full(p.grad) for name, p in model.named_parameters()}

    mean, total = gradients(None), gradients(1.0)
    equal(total, {name: g * (world if name.startswith("layers.0.") else 1) for name, g in mean.items()})


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("impl", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", ["inside", "around"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_activation_checkpointing(rank, world, impl, order, reshard):
    """Blocks that are checkpointed inside their unit, or units that are called by a checkpoint."""
    mesh, reentrant = fsdp_mesh(world), impl == "reentrant"

    class Checkpointing(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.last(x)

    def run(api):
        torch.manual_seed(0)
        if order == "around":
            model = Checkpointing()
        else:
            model = Chain()
            wanted = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
            for at, layer in enumerate(model.layers):
                model.layers[at] = checkpoint_wrapper(layer, checkpoint_impl=wanted)
        return train(shard_blocks(api, model, mesh, reshard_after_forward=reshard), rank, steps=3)

    assert_parity(run)


@on_ranks(2)
def test_two_forwards_of_checkpointed_blocks_before_one_backward(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model = Chain()
        for at, layer in enumerate(model.layers):
            model.layers[at] = checkpoint_wrapper(layer)
        return train(shard_blocks(api, model, mesh), rank, loss=_two_forwards, steps=3)

    assert_parity(run)


# --------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
@on_ranks(2, 4)
def test_mixed_precision(rank, world, reduce_dtype):
    mesh = mesh_for(world)

    def run(api):
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        return train(shard_blocks(api, chain(), mesh, mp_policy=policy), rank)

    trace = assert_parity(run)
    assert {v.dtype for what, v in trace.records if what.startswith("gradient")} == {torch.float32}


@on_ranks(2)
def test_mixed_precision_with_accumulation(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return train(shard_blocks(api, chain(), mesh, mp_policy=policy), rank, micro=SYNC_LATER, steps=3)

    assert_parity(run)


@on_ranks(2)
def test_one_module_in_another_precision(rank, world):
    """A block left in fp32 whose output is cast to the others' bf16, and an output cast at the root."""
    mesh = fsdp_mesh(world)

    def run(api):
        half = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        single = api.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        root = api.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = chain()
        for layer, policy in zip(model.layers, (half, single, half), strict=True):
            api.fully_shard(layer, mesh=mesh, mp_policy=policy)
        return train(api.fully_shard(model, mesh=mesh, mp_policy=root), rank)

    assert_parity(run)


# ------------------------------------------------------------------------------------------------ forward and backward


@pytest.mark.parametrize("reshard", [False, True, None])
@on_ranks(2)
def test_reshard_after_forward_of_the_root(rank, world, reshard):
    mesh = fsdp_mesh(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh, root=False)
        return train(api.fully_shard(model, mesh=mesh, reshard_after_forward=reshard), rank)

    assert_parity(run)


def _two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * 2).square().mean() + model(x.flip(0) + 1).square().mean()


@on_ranks(2, 4)
def test_two_forwards_before_one_backward(rank, world):
    mesh = mesh_for(world)
    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, loss=_two_forwards))


@on_ranks(2)
def test_forward_without_grad_between_steps(rank, world):
    mesh = fsdp_mesh(world)

    def evaluate(model, trace, step):
        model.eval()
        with torch.no_grad():
            trace.note("evaluation", mean_square(model, data(rank, 500 + step)))
        model.train()

    def run(api):
        return train(shard_blocks(api, chain(), mesh), rank, after_step=evaluate)

    assert_parity(run)


@on_ranks(2)
def test_forward_without_grad_before_forward_with_grad(rank, world):
    """A reference without grad, then the forward that is trained on, in one step."""
    mesh = fsdp_mesh(world)

    def loss(model, x):
        with torch.no_grad():
            reference = model(x + 1)
        return (model(x) - reference).square().mean()

    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, loss=loss))


@on_ranks(2)
def test_a_module_called_twice_in_one_forward(rank, world):
    mesh = fsdp_mesh(world)

    class Recurrent(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return self.last(self.first(x))

    def run(api):
        torch.manual_seed(0)
        return train(shard_blocks(api, Recurrent(), mesh), rank)

    assert_parity(run)


@on_ranks(2)
def test_loss_inside_the_model(rank, world):
    mesh = fsdp_mesh(world)

    class WithLoss(Chain):
        def forward(self, x, *, target):
            return (super().forward(x) - target).square().mean()

    def run(api):
        torch.manual_seed(0)
        model = shard_blocks(api, WithLoss(), mesh)
        return train(model, rank, loss=lambda m, x: m(x, target=x[:, :3]))

    assert_parity(run)


@on_ranks(2)
def test_a_child_trained_alone_after_the_root(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh)
        trace = train(model, rank, steps=1)
        for step in (1, 2):
            value = mean_square(model.layers[1], data(rank, step))
            value.backward()
            trace.note("loss", value.detach())
            trace.note_grads(model)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_inputs_that_need_gradients(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        for step in range(3):
            x = data(rank, step).requires_grad_()
            mean_square(model, x).backward()
            trace.note_grads(model)
            trace.note("gradient of x", x.grad)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_compiled_blocks(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch._dynamo.reset()
        model = chain()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return train(shard_blocks(api, model, mesh), rank, steps=3)

    assert_parity(run)


# ---------------------------------------------------------------------------------------------- optimizers and hooks


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(2, 4)
def test_clip_grad_norm(rank, world, norm_type):
    mesh = mesh_for(world)

    def clip(model, trace, step):
        trace.note("norm", full(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)))
        trace.note_grads(model)

    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, before_step=clip, steps=3))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"amsgrad": True, "foreach": False}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
        ("Adam", {"fused": True, "weight_decay": 0.1}),
    ],
)
@on_ranks(2)
def test_optimizers(rank, world, kind, options):
    mesh = fsdp_mesh(world)

    def make(params):
        return getattr(torch.optim, kind)(params, lr=0.02, **options)

    assert_parity(lambda api: train(shard_blocks(api, chain(), mesh), rank, make_optimizer=make))


@on_ranks(2)
def test_post_accumulate_grad_hooks(rank, world):
    """Once a synced backward and parameter, with the reduced gradient in place; not in one that isn't synced."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        seen: dict[str, int] = {}
        for name, p in model.named_parameters():

            def hook(param, name=name):
                seen[name] = seen.get(name, 0) + (param.grad is not None)

            p.register_post_accumulate_grad_hook(hook)
        for step, sync in enumerate((True, False, True)):
            model.set_requires_gradient_sync(sync)
            mean_square(model, data(rank, step)).backward()
            trace.note("hooks", dict(sorted(seen.items())))
            trace.note_grads(model)
        return trace

    trace = assert_parity(run)
    assert set(trace.records[-1 - sum(1 for _ in chain().parameters())][1].values()) == {2}


@on_ranks(2)
def test_optimizer_in_backward(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        for name, p in model.named_parameters():
            optimizer = adamw([p])

            def hook(param, name=name, optimizer=optimizer):
                optimizer.step()
                trace.note(f"gradient of {name}", param.grad.to_local().clone())
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            value = mean_square(model, data(rank, step))
            value.backward()
            trace.note("loss", value.detach())
        trace.records.sort(key=lambda record: record[0])  # stable: the order of parameters isn't promised
        trace.note_params(model)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_hooks_of_modules_see_the_same(rank, world):
    """Forward and backward hooks that users have put on blocks and the root."""
    mesh = fsdp_mesh(world)

    def run(api):
        model = chain()
        trace = Trace()
        for name, module in model.named_modules():
            if name.count(".") == 1 or not name:
                module.register_forward_pre_hook(lambda m, args, n=name: trace.note(f"pre {n}", args[0].detach()))
                module.register_forward_hook(lambda m, args, out, n=name: trace.note(f"post {n}", out.detach()))
                module.register_full_backward_hook(lambda m, gi, go, n=name: trace.note(f"backward {n}", go[0]))
        model = shard_blocks(api, model, mesh)
        trace.records += train(model, rank, steps=2).records
        return trace

    assert_parity(run)


@on_ranks(2)
def test_as_many_collectives_as_torch(rank, world):
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        mean_square(model, data(rank, 0)).backward()
        with CommDebugMode() as comm:
            mean_square(model, data(rank, 1)).backward()
        trace.note("collectives", {str(op): n for op, n in comm.get_comm_counts().items()})
        trace.note_grads(model)
        if api is OURS:
            assert counts(model.hsdp_state.ledger) == {"all_gather": 7, "reduce_scatter": 4}
        return trace

    trace = assert_parity(run)
    assert sum(trace.records[0][1].values()) == 11
