"""Dtypes of the facade: what is gathered, computed, reduced and stored, and who may change it when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hsdp_fn import MixedPrecisionPolicy
from hsdp_fn_torch import fully_shard
from tests.workers_facade import (
    OURS,
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
from tests.workers_torch import WIDTH, Block, Chain, Traffic, close, equal, fsdp_mesh, hsdp_mesh, mesh_for, on_ranks

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def averaged(single: nn.Module, world: int, step: int) -> dict[str, Tensor]:
    """Gradients of the mean over the ranks' losses, by plain autograd."""
    single.zero_grad()
    for rank in range(world):
        (mean_square(single, data(rank, step).to(next(single.parameters()).dtype)) / world).backward()
    return {name: p.grad for name, p in single.named_parameters()}


class Looking(Block):
    """A block that notes the dtypes it meets in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, self.up.weight.dtype, self.down.bias.dtype))
        return super().forward(x)


# ------------------------------------------------------------------------------------------- compute, store and reduce


@on_ranks(2)
def test_parameters_are_used_in_param_dtype_and_stored_in_their_own(rank, world):
    model = chain(block=Looking)
    shard_blocks(OURS, model, fsdp_mesh(world), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    optimizer = adamw(list(model.parameters()))
    mean_square(model, data(rank, 0)).backward()
    optimizer.step()
    assert [layer.seen for layer in model.layers] == [[(BF16, BF16, BF16)]] * 3
    for p in model.parameters():
        slots = [t.dtype for t in optimizer.state[p].values() if t.dim()]
        assert [p.dtype, p.to_local().dtype, p.grad.dtype, p.grad.to_local().dtype, *slots] == [F32] * 6


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [
        (None, None, ("float32", "float32")),
        (BF16, None, ("bfloat16", "bfloat16")),
        (BF16, F32, ("bfloat16", "float32")),
        (None, BF16, ("float32", "bfloat16")),
        (F16, BF16, ("float16", "bfloat16")),
    ],
)
@on_ranks(2, 4)
def test_dtypes_of_the_collectives(rank, world, param_dtype, reduce_dtype, expected):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = shard_blocks(OURS, chain(), mesh_for(world), mp_policy=policy)
    mean_square(model, data(rank, 0)).backward()
    with Traffic() as traffic:
        mean_square(model, data(rank, 1)).backward()
    found = {(op, dtype) for op, dtype, _ in traffic.seen}
    reductions = ["reduce_scatter"] + (["all_reduce"] if world == 4 else [])
    assert found == {("all_gather", expected[0]), *((op, expected[1]) for op in reductions)}
    assert {p.grad.dtype for p in model.parameters()} == {F32}


@on_ranks(2)
def test_sums_are_rounded_in_the_reduce_dtype(rank, world):
    """1 + 1/256 needs more bits than bfloat16 has."""

    def mean(reduce_dtype):
        linear = nn.Linear(1, 1, bias=False)
        fully_shard(linear, mesh=fsdp_mesh(world), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        linear(torch.tensor([[2.0, 2.0 / 256][rank]]).reshape(1, 1)).sum().backward()
        return full(linear.weight.grad).item()

    assert mean(F32) == 1 + 1 / 256
    assert mean(BF16) == 1.0


@on_ranks(4)
def test_fp16_sums_do_not_overflow(rank, world):
    """Four times 30000 is beyond float16."""

    def run(api, mesh):
        policy, trace = api.MixedPrecisionPolicy(reduce_dtype=F16), Trace()
        linear = nn.Linear(1, 1, bias=False)
        api.fully_shard(linear, mesh=mesh, mp_policy=policy)
        linear(torch.full((1, 1), 30000.0)).sum().backward()
        trace.note_grads(linear)
        return trace

    for mesh in (fsdp_mesh(world), hsdp_mesh()):
        trace = assert_parity(lambda api, mesh=mesh: run(api, mesh))
        assert trace.records[-1][1].item() == 30000.0


@on_ranks(4)
def test_small_fp16_gradients_survive_the_division(rank, world):
    """Four ranks' smallest float16: dividing it by four before the sum would give nothing."""
    tiny = 2.0**-24
    linear = nn.Linear(1, 1, bias=False)
    fully_shard(linear, mesh=fsdp_mesh(world), mp_policy=MixedPrecisionPolicy(reduce_dtype=F16))
    linear(torch.full((1, 1), 2 * tiny)).sum().backward()
    assert full(linear.weight.grad).item() == 2 * tiny


# --------------------------------------------------------------------------------------------------------------- casts


class Inner(nn.Module):
    """Takes tensors in all places and notes their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, index: Tensor, *, mask: Tensor, more: dict[str, Any]) -> dict[str, Any]:
        nested = [t.dtype if isinstance(t, Tensor) else t for t in more["list"]]
        self.seen.append((x.dtype, index.dtype, mask.dtype, nested, self.weight.dtype))
        out = x.to(self.weight.dtype) * self.weight
        return {"out": out, "index": index, "pair": (mask, "text")}


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("output_dtype", [F64, None])
@on_ranks(2)
def test_floating_tensors_are_cast_wherever_they_are(rank, world, cast, output_dtype):
    mesh = fsdp_mesh(world)

    def run(api):
        trace, inner = Trace(), Inner()
        policy = api.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output_dtype, cast_forward_inputs=cast)
        api.fully_shard(inner, mesh=mesh, mp_policy=policy)
        x, mask, index = data(rank, 0), torch.ones(WIDTH, dtype=F64), torch.arange(3)
        more = {"list": [torch.ones(2), index, 1.5, None]}
        out = inner(x, index, mask=mask, more=more)
        assert (x.dtype, mask.dtype, more["list"][0].dtype) == (F32, F64, F32)  # the caller's stay
        out["out"].float().sum().backward()
        trace.note("inside", inner.seen)
        trace.note("outside", (out["out"].dtype, out["index"].dtype, out["pair"][0].dtype, out["pair"][1]))
        trace.note_grads(inner)
        return trace

    found = dict(assert_parity(run).records)
    x, mask, nested = (BF16, BF16, BF16) if cast else (F32, F64, F32)
    assert found["inside"] == [(x, torch.int64, mask, [nested, torch.int64, 1.5, None], BF16)]
    expected = (BF16, torch.int64, mask, "text") if output_dtype is None else (F64, torch.int64, F64, "text")
    assert found["outside"] == expected


@on_ranks(2)
def test_inputs_of_each_module_of_a_list_are_cast(rank, world):
    a, b = Looking(), Looking()
    root = nn.Sequential(a, b)
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    fully_shard([a, b], mesh=fsdp_mesh(world), mp_policy=policy)
    fully_shard(root, mesh=fsdp_mesh(world))
    assert root(data(rank, 0)).dtype == F32
    assert a.seen == b.seen == [(BF16, BF16, BF16)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", ["inside", "around"])
@on_ranks(2)
def test_recomputation_casts_again(rank, world, reentrant, order):
    """A checkpoint around a unit or inside of it; the dtypes are those of the first time."""
    mesh = fsdp_mesh(world)
    outputs: list[torch.dtype] = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Looking()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    class Around(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(self.through, layer, x, use_reentrant=reentrant)
            return self.last(x)

        def through(self, layer: nn.Module, x: Tensor) -> Tensor:
            out = layer(x)
            outputs.append(out.dtype)
            return out

    def run(api):
        torch.manual_seed(0)
        model = Around(block=Looking) if order == "around" else Chain(block=Inside)
        half = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32)
        for layer in model.layers:
            api.fully_shard(layer, mesh=mesh, mp_policy=half)
        trace = train(
            api.fully_shard(model, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(param_dtype=F32)), rank, steps=2
        )
        trace.note("seen", [m.seen for m in model.modules() if isinstance(m, Looking)])
        return trace

    assert assert_parity(run).records[-1] == ("seen", [[(BF16, BF16, BF16)] * 4] * 3)
    times = 2 if reentrant else 1  # the other kind stops as soon as it has what was saved
    assert outputs == ([F32] * 12 * times if order == "around" else [])


class Normed(nn.Module):
    """A batch norm and a layer norm between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.second(self.batch(self.first(x))))


@on_ranks(2)
def test_norms_in_full_precision(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model, seen = Normed(), []
        half = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
        whole = api.MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
        for norm in (model.batch, model.layer):
            api.fully_shard(norm, mesh=mesh, mp_policy=whole)
            norm.register_forward_pre_hook(lambda m, args: seen.append((type(m).__bases__[1].__name__, args[0].dtype)))
            norm.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype,)))
        trace = train(api.fully_shard(model, mesh=mesh, mp_policy=half), rank, steps=3)
        trace.note("running mean", model.batch.running_mean.clone())
        trace.note("seen", seen[:4])
        return trace

    trace = assert_parity(run)
    assert dict(trace.records)["running mean"].dtype == F32


# --------------------------------------------------------------------------------------------------- dtypes that change


@pytest.mark.parametrize("reduce_dtype", [BF16, None])
@on_ranks(2)
def test_dtypes_are_settled_at_the_first_forward(rank, world, reduce_dtype):
    """Sharded in bfloat16, made float32 before the first forward: the policy's reduction stays, nothing else does."""
    mesh = fsdp_mesh(world)

    def run(api):
        policy = api.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        model = shard_blocks(api, chain().to(BF16), mesh, mp_policy=policy)
        trace = Trace()
        model.to(F32)
        with Traffic() as traffic:
            mean_square(model, data(rank, 0)).backward()
        names = {"reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}
        trace.note("traffic", sorted({(names[op], dtype) for op, dtype, _ in traffic.seen if op in names}))
        trace.note("dtypes", sorted({str(t.dtype) for p in model.parameters() for t in (p, p.grad)}))
        trace.note_grads(model)
        trace.records += train(model, rank, steps=2).records
        return trace

    found = dict(assert_parity(run).records)
    wanted = "bfloat16" if reduce_dtype else "float32"
    assert found["traffic"] == [("all_gather", "float32"), ("reduce_scatter", wanted)]
    assert found["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2, 4)
def test_float64_before_and_after_steps(rank, world, steps):
    model = shard_blocks(OURS, chain(), mesh_for(world))
    if steps:
        train(model, rank, steps=steps)
    before = {name: full(p) for name, p in model.named_parameters()}
    single = chain()
    single.load_state_dict(before)
    model.to(F64)
    single.to(F64)
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        local, spec = p.to_local(), p._spec.tensor_meta
        assert (p.dtype, local.dtype, spec.dtype, local.is_contiguous()) == (F64, F64, F64, True)
        equal(full(p), single.get_parameter(name), name)
        assert tuple(p.shape) == tuple(spec.shape) == tuple(single.get_parameter(name).shape)
    for step in range(2):
        with Traffic() as traffic:
            mean_square(model, data(rank, 50 + step).double()).backward()
        if step:
            assert {dtype for op, dtype, _ in traffic.seen if op != "all_reduce"} == {"float64"}
        assert {
            (p.grad.dtype, p.grad.to_local().dtype, p.grad._spec.tensor_meta.dtype) for p in model.parameters()
        } == {(F64, F64, F64)}
        close(grads(model), averaged(single, world, 50 + step), 1e-6)  # the loss is taken in float32
        model.zero_grad()


@on_ranks(2)
def test_float64_before_the_first_forward_as_torch(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model = shard_blocks(api, chain(), mesh).to(F64)
        return train(model, rank, loss=lambda m, x: m(x.double()).square().mean(), steps=3)

    trace = assert_parity(run)
    assert {v.dtype for _, v in trace.records} == {F64}


@on_ranks(2)
def test_bfloat16_masters_after_steps(rank, world):
    """The optimizer goes on with the same parameter objects."""
    model = shard_blocks(OURS, chain(), fsdp_mesh(world))
    params = list(model.parameters())
    train(model, rank, steps=1)
    model.to(BF16)
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    before = [full(p) for p in params]
    optimizer = torch.optim.SGD(params, lr=1.0)
    model(data(rank, 3).to(BF16)).float().square().mean().backward()
    wanted = [p - full(q.grad) for p, q in zip(before, params, strict=True)]
    optimizer.step()
    assert {p.dtype for p in params} == {p.grad.dtype for p in params} == {BF16}
    equal([full(p) for p in params], wanted)
    assert any(not torch.equal(a, b) for a, b in zip(before, wanted, strict=True))


# ----------------------------------------------------------------------------------------------------- main gradients


def main_policy(**more: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(reduce_dtype=F32, apply_grad_on_fp32_main_grad=True, **more)


@on_ranks(2, 4)
def test_main_gradients(rank, world):
    """Of bfloat16 parameters in float32: what the reduction gave, unrounded; ``.grad`` stays None. They add up over
    backwards, and `zero_grad` ends that."""
    mesh = mesh_for(world)
    rounded = shard_blocks(OURS, chain().to(BF16), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=F32))
    exact = shard_blocks(OURS, chain(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.to(BF16).float())
    model = shard_blocks(OURS, chain().to(BF16), mesh, mp_policy=main_policy())
    total: dict[str, Tensor] = {}
    for step in range(2):
        for m in (model, exact, rounded):
            mean_square(m, data(rank, step).to(BF16)).backward()
        for name, g in grads(exact).items():
            total[name] = total[name] + g if step else g
        if step == 0:
            equal(grads(rounded), {name: g.to(BF16) for name, g in total.items()})
            assert any(not torch.equal(g.to(BF16).float(), g) for g in total.values()), "nothing to round"
        exact.zero_grad()
        mains = {name: p.main_grad for name, p in model.named_parameters()}
        equal({name: full(g) for name, g in mains.items()}, total, f"backward {step}")
        for p in model.parameters():
            assert p.grad is None
            assert isinstance(p.main_grad, DTensor)
            assert (p.main_grad.dtype, p.main_grad.placements) == (F32, p.placements)
    model.zero_grad(set_to_none=False)
    assert all(p.main_grad is mains[n] and not p.main_grad.to_local().any() for n, p in model.named_parameters())
    model.zero_grad()
    assert all(p.main_grad is None for p in model.parameters())
    mean_square(model, data(rank, 0).to(BF16)).backward()
    mean_square(exact, data(rank, 0).to(BF16)).backward()
    equal({name: full(p.main_grad) for name, p in model.named_parameters()}, grads(exact))


@on_ranks(4)
def test_main_gradients_of_accumulated_microbatches(rank, world):
    """Held back whole, or reduce-scattered, microbatches add up in the main gradient's dtype."""
    model = shard_blocks(OURS, chain().to(BF16), hsdp_mesh(), mp_policy=main_policy())
    parts = []
    for step in range(3):
        mean_square(model, data(rank, step).to(BF16)).backward()
        parts.append({name: full(p.main_grad) for name, p in model.named_parameters()})
        model.zero_grad()
    for later in (model.set_requires_gradient_sync, model.set_requires_all_reduce):
        for step in range(3):
            later(step == 2)
            mean_square(model, data(rank, step).to(BF16)).backward()
            if step < 2:
                assert all(getattr(p, "main_grad", None) is None and p.grad is None for p in model.parameters())
        found = {name: full(p.main_grad) for name, p in model.named_parameters()}
        close(found, {name: sum(p[name] for p in parts) for name in found}, 1e-6)
        model.zero_grad()


@on_ranks(2)
def test_main_gradients_that_are_already_of_the_parameters_dtype(rank, world):
    """Float32 parameters have them too: where gradients go doesn't depend on the dtype."""
    model = fully_shard(chain(), mesh=fsdp_mesh(world), mp_policy=main_policy(param_dtype=BF16))
    plain = fully_shard(
        chain(), mesh=fsdp_mesh(world), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    )
    for m in (model, plain):
        mean_square(m, data(rank, 0)).backward()
    assert all(p.grad is None for p in model.parameters())
    equal({name: full(p.main_grad) for name, p in model.named_parameters()}, grads(plain))
