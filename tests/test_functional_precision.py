"""Mixed precision, reductions in every dtype, divide factors: values on gloo ranks, and against FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard

import hsdp_fn_torch as ht
from hsdp_fn import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    PolicyError,
    ReductionPolicy,
    Sync,
    UnitSpec,
    expected_comm,
    grads,
    masters,
)
from tests.test_example_parts import gpt
from tests.test_functional import GPT, make_gpt, tokens
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Chain,
    batch,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    local_rows,
    mean_grads,
    mesh_for,
    on_ranks,
    step_grads,
    step_of,
)

POLICIES = {
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16 in and fp32 out": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "output_dtype": torch.float32,
    },
    "fp32, reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "bf16, inputs not cast": {
        "param_dtype": torch.bfloat16,
        "output_dtype": torch.bfloat16,
        "cast_forward_inputs": False,
    },
}


# --------------------------------------------------------------------------------------------------- against FSDP2


@pytest.mark.parametrize("policy", sorted(POLICIES))
@on_ranks(2)
def test_losses_under_mixed_precision_are_bitwise_those_of_fsdp2(rank, world, policy):
    base, mesh, options = make_gpt(), fsdp_mesh(world), POLICIES[policy]
    inner = {key: value for key, value in options.items() if key != "output_dtype"}  # the root's output only
    theirs = copy.deepcopy(base)
    for module in theirs.layers:
        fully_shard(module, mesh=mesh, mp_policy=TorchPolicy(**inner))
    fully_shard(theirs, mesh=mesh, mp_policy=TorchPolicy(**options))
    their_opt = torch.optim.AdamW(theirs.parameters(), lr=1e-2)

    ours = copy.deepcopy(base)
    units = [UnitSpec(name, mp_policy=MixedPrecisionPolicy(**inner)) for name in LAYERS]
    state = ht.shard_module(ours, mesh, units, mp_policy=MixedPrecisionPolicy(**options))
    step = step_of(ours, gpt.loss_fn)
    params = ht.shard_parameters(state)
    our_opt = torch.optim.AdamW(params.values(), lr=1e-2)

    found: dict[str, list[float]] = {"theirs": [], "ours": []}
    for i in range(4):
        x, y = tokens(rank, i)
        loss = gpt.loss_fn(theirs(x), y)
        loss.backward()
        found["theirs"].append(loss.item())
        (loss, _), state = step(state, x, y)
        found["ours"].append(loss.item())
        their_grads = {name: p.grad.to_local() for name, p in theirs.named_parameters()}
        their_opt.step()
        their_opt.zero_grad()
        if i < 3:
            state, _ = ht.optimizer_step(state, our_opt, params)
        else:
            _, rows = grads(state)
            equal(rows, their_grads, policy)
    assert found["ours"] == found["theirs"]
    assert {p.dtype for p in params.values()} == {torch.float32}


@on_ranks(2)
def test_accumulation_in_low_precision_is_bitwise_that_of_fsdp2(rank, world):
    base, mesh = make_gpt(GPT), fsdp_mesh(world)
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    theirs = copy.deepcopy(base)
    for module in (*theirs.layers, theirs):
        fully_shard(module, mesh=mesh, mp_policy=TorchPolicy(**options))
    ours = copy.deepcopy(base)
    state = ht.shard_module(ours, mesh, LAYERS, mp_policy=MixedPrecisionPolicy(**options))
    step = step_of(ours, gpt.loss_fn)
    for i, last in enumerate((False, False, True)):
        theirs.set_requires_gradient_sync(last)
        x, y = tokens(rank, i)
        gpt.loss_fn(theirs(x), y).backward()
        (_, _), state = step(state, x, y, sync=Sync.FULL if last else Sync.NONE)
    _, rows = grads(state)
    equal(rows, {name: p.grad.to_local() for name, p in theirs.named_parameters()})


# ----------------------------------------------------------------------------------------------------- what is cast


class Probe(nn.Module):
    """A linear layer that notes the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.met: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        self.met = [x.dtype, extra["float"].dtype, extra["int"].dtype, self.linear.weight.dtype]
        return {"out": self.linear(x.to(self.linear.weight.dtype)), "int": extra["int"]}


class Probes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Probe() for _ in range(3))
        self.root = nn.Linear(WIDTH, 3)
        self.met: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.met = []
        for layer in self.layers:
            out = layer(x, extra={"float": x, "int": torch.arange(3)})
            self.met += [out["out"].dtype, out["int"].dtype]
            x = out["out"]
        return self.root(x.to(self.root.weight.dtype))


@on_ranks(2)
def test_each_unit_casts_its_inputs_parameters_and_outputs_by_its_own_policy(rank, world):
    f32, f64, bf16, i64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
    model = integers_(Probes())
    units = [
        UnitSpec("layers.0", mp_policy=MixedPrecisionPolicy(bf16, output_dtype=f64)),
        UnitSpec("layers.1", mp_policy=MixedPrecisionPolicy(bf16, cast_forward_inputs=False)),
        UnitSpec("layers.2"),
    ]
    state = ht.shard_module(model, fsdp_mesh(world), units, mp_policy=MixedPrecisionPolicy(output_dtype=f64))
    out, state = ht.evaluate(lambda p, x: ht.functional_call(model, p, x))(state, batch(rank)[0])
    assert [layer.met for layer in model.layers] == [
        [bf16, bf16, i64, bf16],
        [f64, f64, i64, bf16],
        [bf16, bf16, i64, f32],
    ]
    assert model.met == [f64, i64, bf16, i64, f64, i64]
    assert out.dtype == f64
    (_, _), state = step_of(model)(state, *batch(rank))
    state, rows = grads(state)
    assert {row.dtype for row in rows.values()} == {f32}


@on_ranks(2)
def test_integers_survive_bf16_compute_with_fp32_masters_exactly(rank, world):
    model = integers_(Chain(depth=1))
    single = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS[:1], mp_policy=policy)
    _, rows, state = step_grads(step_of(model, lambda out, y: (out * y.to(out.dtype)).sum()), state, *batch(rank))
    halves = {name: g.bfloat16().float() for name, g in mean_grads(single, [batch(r) for r in range(world)]).items()}
    exact = mean_grads(single, [batch(r) for r in range(world)])
    assert all(g.dtype == torch.float32 for g in rows.values())
    fine = {name for name, g in exact.items() if torch.equal(g, halves[name])}
    equal({n: rows[n] for n in fine}, {n: r for n, r in local_rows(state, exact).items() if n in fine})
    assert "last.bias" in fine
    assert state.ledger == expected_comm(state.layout)


# ------------------------------------------------------------------------------------------------------- reductions


def gradient_of_a_linear(rank: int, mesh, dtype: torch.dtype, reduction: ReductionPolicy | None = None, **policies):
    """Gradient of a bias-free Linear(2, 2) under the loss that gives every weight ``rank + 1`` on each rank."""
    model = nn.Linear(2, 2, bias=False, dtype=dtype)
    state = ht.shard_module(model, mesh, reduction=reduction, **policies)
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).sum())
    _, rows, state = step_grads(step, state, torch.ones(1, 2, dtype=dtype) * (rank + 1))
    return rows["weight"]


@on_ranks(1, 2, 4)
def test_the_mean_over_ranks_in_every_dtype(rank, world):
    meshes = [fsdp_mesh(world), *([hsdp_mesh(2, 2), hsdp_mesh(4, 1), hsdp_mesh(1, 4)] if world == 4 else [])]
    for mesh in meshes:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            found = gradient_of_a_linear(rank, mesh, dtype)
            equal(found, torch.full_like(found, {1: 1.0, 2: 1.5, 4: 2.5}[world]), f"{mesh} {dtype}")


@on_ranks(1, 2, 4)
def test_sums_divide_factors_and_scaling_factors(rank, world):
    mesh = mesh_for(world)
    total = world * (world + 1) / 2
    cases = {
        ReductionPolicy(op="sum"): total,
        ReductionPolicy(divide_factor=1.0): total,
        ReductionPolicy(divide_factor=3.0): {1: 1 / 3, 2: 1.0, 4: 10 / 3}[world],
        ReductionPolicy(divide_factor=5.0): {1: 0.2, 2: 0.6, 4: 2.0}[world],
        ReductionPolicy(divide_factor=0.5): 2 * total,
        ReductionPolicy(op="sum", scaling_factor=4.0): 4 * total,
        ReductionPolicy(scaling_factor=2.0): 2 * total / world,
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for policy, value in cases.items():
            found = gradient_of_a_linear(rank, mesh, dtype, policy)
            expected = torch.full_like(found, value)
            if value in (1 / 3, 10 / 3, 0.2, 0.6):
                tolerance = 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=f"{policy} {dtype}: {found}")
            else:
                equal(found, expected, f"{policy} {dtype}")


@on_ranks(2, 4)
def test_a_float16_sum_that_would_overflow_is_divided_before(rank, world):
    model = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    state = ht.shard_module(model, mesh_for(world))
    step = ht.value_and_grad(lambda p, x: (ht.functional_call(model, p, x)).sum())
    value = {2: 40000.0, 4: 32000.0}[world]  # float16 ends at 65504
    _, rows, _ = step_grads(step, state, torch.full((1, 2), value, dtype=torch.float16))
    equal(rows["weight"], torch.full_like(rows["weight"], value))


class TwoMaps(nn.Module):
    """Two bias-free identities; ``both`` says whether the second is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(torch.eye(4))
            self.b.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.b(self.a(x)) if both else self.a(x)


@on_ranks(2)
def test_bf16_microbatches_accumulate_in_the_fp32_of_their_reduction(rank, world):
    found = {}
    for first in (Sync.NONE, Sync.SHARD, Sync.FULL):
        model = TwoMaps()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        state = ht.shard_module(model, fsdp_mesh(world), mp_policy=policy)
        step = ht.value_and_grad(lambda p, x, both, model=model: ht.functional_call(model, p, (x, both)).sum())
        (_, _), state = step(state, torch.ones(2, 4) * (rank + 1), False, sync=first)
        if first is Sync.NONE:
            assert [None if t is None else t.dtype for t in state.units[0].acc_full] == [torch.float32, None]
        (_, _), state = step(state, torch.ones(2, 4) * (rank + 2), True)
        _, found[first] = grads(state)
    for first, rows in found.items():
        equal(rows["a.weight"], torch.full((2, 4), 8.0), str(first))
        equal(rows["b.weight"], torch.full((2, 4), 5.0), str(first))


@on_ranks(2)
def test_many_small_bf16_microbatches_lose_nothing_in_fp32(rank, world):
    model = nn.Linear(2, 2, bias=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    state = ht.shard_module(model, fsdp_mesh(world), mp_policy=policy)
    step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).sum())
    values = [256.0] + [1.0] * 9  # in bf16 256 + 1 is 256
    for i, value in enumerate(values):
        (_, _), state = step(state, torch.full((1, 2), value), sync=Sync.NONE if i < 9 else Sync.FULL)
    _, rows = grads(state)
    equal(rows["weight"], torch.full((1, 2), 265.0))


def test_a_dtype_that_nothing_is_computed_in_is_refused():
    with pytest.raises(PolicyError, match="param_dtype must be one of"):
        MixedPrecisionPolicy(param_dtype=torch.int64)


@on_ranks(2)
def test_the_norm_of_a_clipped_step_is_that_of_one_process(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    params = ht.shard_parameters(state)
    (_, _), state = step_of(model)(state, *batch(rank))
    state, norm = ht.optimizer_step(state, torch.optim.SGD(params.values(), lr=1.0), params, max_norm=1.0)
    mean = mean_grads(single, [batch(r) for r in range(world)])
    expected = torch.nn.utils.get_total_norm(mean.values())
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    moved = {name: p.detach() - mean[name] / (expected + 1e-6) for name, p in single.named_parameters()}
    for name, row in local_rows(state, moved).items():
        torch.testing.assert_close(masters(state)[name], row, rtol=1e-6, atol=1e-6)
    everyone = [None] * world
    dist.all_gather_object(everyone, norm.item())
    assert len(set(everyone)) == 1


# ------------------------------------------------------------------------------------------------- no change at all


@on_ranks(2)
def test_cpu_offload_on_the_cpu_is_a_plain_run(rank, world):
    found = []
    for policy in (None, CPUOffloadPolicy()):
        model = make_gpt()
        state = ht.shard_module(model, fsdp_mesh(world), LAYERS, offload_policy=policy)
        _, rows, state = step_grads(step_of(model, gpt.loss_fn), state, *tokens(rank, 0))
        found.append((rows, state.ledger))
    equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@on_ranks(2)
def test_a_policy_of_the_default_precision_changes_nothing(rank, world):
    found = []
    for policy in (None, MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)):
        model = make_gpt()
        state = ht.shard_module(model, fsdp_mesh(world), LAYERS, mp_policy=policy)
        loss, rows, state = step_grads(step_of(model, gpt.loss_fn), state, *tokens(rank, 0))
        found.append({"loss": loss, **rows})
    equal(*found)
