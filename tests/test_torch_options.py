"""Options of a plan that only torch can show: main gradients of bfloat16 parameters, and units that aren't fused."""

from __future__ import annotations

from itertools import product

import torch

from hsdp_fn import (
    MeshSpec,
    MixedPrecisionPolicy,
    ParamSpec,
    ReductionPolicy,
    Sync,
    full_params,
    grads,
    memory_bytes,
    plan_layout,
    reduce_grads,
    shard,
    totals,
    unshard,
)
from hsdp_fn_torch import TorchBackend, optimizer_step, shard_parameters
from tests.workers_torch import close, equal, fsdp_mesh, hsdp_mesh, on_ranks


@on_ranks(2)
def test_a_bfloat16_parameter_has_the_unrounded_float32_sum_as_its_main_gradient(rank, world):
    """1 from rank 0 and 2^-9 from rank 1, in one microbatch or two; the bfloat16 next to 1 is 1 + 2^-7."""
    ones = torch.ones(3, dtype=torch.bfloat16)
    for main, dtype, exact in ((True, torch.float32, 1 + 2**-9), (False, torch.bfloat16, 1.0)):
        layout = plan_layout(
            [ParamSpec("w", (3,), "bfloat16")],
            MeshSpec.fsdp(world),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=main),
            reduction=ReductionPolicy("sum"),
        )
        state = shard({"w": ones}, layout, backend=TorchBackend(fsdp_mesh(world)))
        mine, nothing = ones * (1.0 if rank == 0 else 2**-9), torch.zeros_like(ones)
        one_microbatch, two = [mine], [mine, nothing] if rank == 0 else [nothing, mine]
        for micros, sync in product((one_microbatch, two), Sync):
            for g, how in zip(micros, [sync, Sync.FULL][-len(micros) :], strict=True):
                state = reduce_grads(state, {"w": g}, sync=how)
            assert memory_bytes(state)["grad"] == 2 * dtype.itemsize
            state, rows = grads(state)
            equal(rows["w"], torch.full((2 - rank,), exact, dtype=dtype), f"{main} {sync} {len(micros)}")


@on_ranks(4)
def test_units_that_arent_fused_communicate_by_parameter_with_the_same_values(rank, world):
    shapes = {"a.w": (5, 2), "a.b": (3,), "a.n": (1,)}
    specs = [ParamSpec(name, shape, "float32") for name, shape in shapes.items()]
    full = {name: torch.arange(float(s.numel)).view(s.shape) for name, s in zip(shapes, specs, strict=True)}
    found = {}
    for fused in (True, False):
        layout = plan_layout(specs, MeshSpec.hsdp(2, 2), ["a"], fused=fused)
        state = unshard(shard(full, layout, backend=TorchBackend(hsdp_mesh())))
        equal(full_params(state), full)
        state = reduce_grads(state, {name: (rank + 1) * value for name, value in full.items()})
        counts = {op: (t.count, t.nbytes) for op, t in totals(state.ledger).items()}
        n = 1 if fused else 3
        assert counts == {"all_gather": (n, 72), "reduce_scatter": (n, 72), "all_reduce": (n, 36)}
        found[fused] = grads(state)[1]
    equal(found[False], found[True])


@on_ranks(2)
def test_an_optimizer_steps_with_main_gradients(rank, world):
    """It takes them in the parameters' own dtype, clipped before the cast: 3.0 of norm 3 sqrt(4) becomes 0.5."""
    layout = plan_layout(
        [ParamSpec("w", (4,), "bfloat16")],
        MeshSpec.fsdp(world),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True),
    )
    state = shard({"w": torch.ones(4, dtype=torch.bfloat16)}, layout, backend=TorchBackend(fsdp_mesh(world)))
    params = shard_parameters(state)
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    state = reduce_grads(state, {"w": torch.full((4,), 2.0 + 2.0 * rank, dtype=torch.bfloat16)})
    state, norm = optimizer_step(state, optimizer, params, max_norm=1.0)
    close([norm], [torch.tensor(6.0)])
    equal([params["w"].detach()], [torch.full((2,), 0.5, dtype=torch.bfloat16)])
