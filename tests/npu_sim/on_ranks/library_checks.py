"""Checks that this library on device ``npu`` equals itself on the CPU with gloo, feature by feature; run by
`test_library.py` on two ranks, which shard, and those whose names begin with ``hsdp`` on four: two replicas of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions

import hsdp_fn
import hsdp_fn_torch as ours
from hsdp_fn import CPUOffloadPolicy, MixedPrecisionPolicy, PrefetchPolicy, ReductionPolicy, Replicate, Shard, Sync
from tests.npu_sim import checks
from tests.npu_sim.on_ranks.library_training import (
    FLAT,
    MESHES,
    MICROBATCHES,
    RANK,
    RANKS,
    Net,
    Run,
    alone,
    batch,
    facade,
    functional,
    hold,
    hold_sums,
    loss_of,
    net,
    on,
    on_both,
    same,
    sharded,
    stream_for,
    train,
    units_of,
    whole,
)

# ---------------------------------------------------------------------------------------------------------- prefetching


def check_prefetch_of_chosen_modules() -> None:
    def two_ahead(model: Any) -> None:
        first, second, third = model.layers
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        model.set_modules_to_backward_prefetch([third, second])
        third.set_modules_to_backward_prefetch([second, first])

    same(on_both(lambda kind: facade(kind, prepare=two_ahead)), alone())


def check_prefetch_by_policy() -> None:
    for ahead in (0, 2):
        on_both(lambda kind, n=ahead: functional(kind, prefetch=PrefetchPolicy(n, n)))


# ------------------------------------------------------------------------------------------------------------ placement


def check_replicate() -> None:
    def run(kind: str) -> Run:
        model = net().to(kind)
        for module in units_of(model):
            ours.replicate(module, mesh=FLAT[kind])
        return train(model, kind)

    same(on_both(run), alone())


def check_replicate_below_fully_shard_and_replicated_parameters() -> None:
    def run(kind: str) -> Run:
        model = net().to(kind)
        ours.replicate(model.layers[1], mesh=FLAT[kind])
        for module in (model.layers[0], model.layers[2]):
            ours.fully_shard(module, mesh=FLAT[kind], replicate_params=[module.up.bias])
        ours.fully_shard(model, mesh=FLAT[kind])
        return train(model, kind)

    same(on_both(run), alone())


def check_replicated_parameters_by_functions() -> None:
    place = lambda spec: Replicate() if spec.name.endswith("bias") else Shard(0)  # noqa: E731
    on_both(lambda kind: functional(kind, placement_fn=place))


# ------------------------------------------------------------------------------------------------- custom communication


class Buffered:
    """Buffers of its own, used again."""

    def __init__(self) -> None:
        self.buffers: dict[object, Tensor] = {}

    def reused(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (tuple(size), dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(tuple(size), dtype=dtype, device=device)
        return self.buffers[key]


class OwnAllGather(Buffered):
    """Into a buffer that every gather uses again."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.reused(size, dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter:
    """Synchronously: nothing remains to be waited for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def check_custom_collectives() -> None:
    def prepare(model: Any) -> None:
        for module in units_of(model):
            module.set_custom_all_gather(OwnAllGather())
            module.set_custom_reduce_scatter(OwnReduceScatter())

    same(on_both(lambda kind: facade(kind, prepare=prepare)), alone())


def check_buffers_of_the_process_group() -> None:
    def prepare(model: Any) -> None:
        for module in units_of(model):
            module.set_allocate_memory_from_process_group_for_comm(True)

    on_both(lambda kind: facade(kind, prepare=prepare, comm_fusion_zero_copy=False))


def check_an_all_reduce_hook_on_the_current_stream() -> None:
    def prepare(model: Any) -> None:
        model.layers[0].set_all_reduce_hook(lambda gradient: gradient.mul_(3))

    on_both(lambda kind: facade(kind, prepare=prepare))


def check_an_all_reduce_hook_on_a_stream_of_its_own() -> None:
    def prepare(model: Any) -> None:
        for i, module in enumerate(units_of(model)):
            module.set_all_reduce_hook(lambda gradient, by=1 + i: gradient.mul_(by).add_(gradient), stream=stream)

    for kind in ("npu", "cpu"):
        stream = stream_for(kind)
        found = facade(kind, prepare=prepare)
        if kind == "npu":
            on_device = found
    same(on_device, found)


def check_shared_communication_of_two_roots() -> None:
    def run(kind: str) -> Run:
        first, second = sharded(kind), sharded(kind)
        ours.share_comm_ctx([first, second])
        run = train(first, kind)
        same(train(second, kind), run)
        return run

    same(on_both(run), alone())


# --------------------------------------------------------------------------------------------------------------- order


def check_an_event_after_the_optimizer() -> None:
    """The optimizer steps on a stream of its own, which nothing but the event orders before the next gathers."""

    def run(kind: str) -> Run:
        stream, kept = stream_for(kind), []

        def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
            kept.append([p.grad for p in model.parameters()])  # the other stream reads them later
            if stream is not None:
                stream.wait_stream(torch.npu.current_stream())
            with on(stream):
                optimizer.step()
                if stream is not None:
                    model.set_post_optim_event(stream.record_event())

        model = sharded(kind)
        run = train(model, kind, update=update)
        if stream is not None:  # the last event has no forward that would wait for it
            torch.npu.current_stream().wait_stream(stream)
            run.params = {name: whole(p, kind) for name, p in model.named_parameters()}
        return run

    same(on_both(run), alone())


def check_gradients_are_there_for_any_stream_after_hsdp_sync_stream() -> None:
    model, side = sharded("npu"), torch.npu.Stream()
    tokens = batch(0, 0).to("npu")
    loss_of(model(tokens), tokens).backward()
    ours.hsdp_sync_stream()
    with torch.npu.stream(side):
        early = [p.grad.to_local().clone() for p in model.parameters()]
    torch.npu.synchronize()
    for found, p in zip(early, model.parameters(), strict=True):
        assert torch.equal(found.cpu(), p.grad.to_local().cpu())


# ------------------------------------------------------------------------------------------------------------- offload


def check_parameters_on_the_host() -> None:
    """Pinned or not, with accumulation in ``.grad``, of whole gradients, and clipping."""
    expected = alone(max_norm=0.1)
    for pinned in (True, False):
        for before in (lambda model, micro: None, hold):
            trained = {"before": before, "max_norm": 0.1}
            options = {"offload_policy": CPUOffloadPolicy(pin_memory=pinned), "trained": trained}
            same(facade("npu", **options), expected)
            if pinned:
                same(facade("cpu", **options), expected)


def check_parameters_on_the_host_by_functions() -> None:
    expected = functional("cpu", max_norm=0.1)
    for pinned in (True, False):
        for early in Sync:
            policy = CPUOffloadPolicy(pin_memory=pinned)
            same(functional("npu", offload_policy=policy, early=early, max_norm=0.1), expected)


def check_half_precision_on_the_host() -> None:
    options = {"offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy("bfloat16", "float32")}
    on_both(lambda kind: facade(kind, **options))
    on_both(lambda kind: functional(kind, early=Sync.SHARD, **options))


# ----------------------------------------------------------------------------------------------------------- precision


def check_mixed_precision() -> None:
    for policy in (
        MixedPrecisionPolicy("float16"),
        MixedPrecisionPolicy("float16", "float32"),
        MixedPrecisionPolicy("bfloat16", "bfloat16"),
        MixedPrecisionPolicy(None, "bfloat16"),
    ):
        found = on_both(lambda kind, p=policy: facade(kind, mp_policy=p))
        same(found, alone(), 0.2)
        on_both(lambda kind, p=policy: functional(kind, mp_policy=p))


# ------------------------------------------------------------------------------------------- unused, recomputed, loaded


def check_parameters_that_one_rank_does_not_use() -> None:
    def run(kind: str) -> Run:
        model = sharded(kind)
        model.set_reduce_scatter_unused_params(True)
        model.uses_bonus = RANK == 0
        return train(model, kind)

    def by_functions(kind: str) -> Run:
        model = net()
        model.uses_bonus = RANK == 0
        return functional(kind, model=model, reduction=ReductionPolicy(unused="zeros"))

    run = on_both(run)
    assert run.grads["bonus"] is not None
    torch.testing.assert_close(on_both(by_functions).params["bonus"], run.params["bonus"], rtol=0, atol=1e-6)


def check_recomputed_layers() -> None:
    def run(kind: str) -> Run:
        model = sharded(kind)
        model.recomputes = True
        return train(model, kind)

    def by_functions(kind: str) -> Run:
        model = net()
        model.recomputes = True
        return functional(kind, model=model)

    same(on_both(run), alone())
    on_both(by_functions)


def check_a_state_dict_goes_on_in_another_model() -> None:
    whole_tensors = StateDictOptions(full_state_dict=True)

    def run(kind: str) -> Run:
        trained, model = sharded(kind), sharded(kind)
        train(trained, kind, steps=1)
        for options in (None, whole_tensors):
            for p in model.parameters():
                torch.nn.init.zeros_(p)
            saved = ours.get_model_state_dict(trained, options=options)
            ours.set_model_state_dict(model, saved, options=options)
            for a, b in zip(trained.parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(a, kind), whole(b, kind))
        return train(model, kind, steps=1)

    on_both(run)


def check_differentiable_unshard() -> None:
    def run(kind: str) -> Run:
        model = net().to(kind)
        state = ours.shard_module(model, MESHES[kind], [])
        rows = {name: row.clone().requires_grad_() for name, row in hsdp_fn.masters(state).items()}
        tokens = batch(0, 0).to(kind)
        params = ours.differentiable_unshard(state, rows)
        loss = loss_of(torch.func.functional_call(model, params, (tokens,)), tokens)
        gradients = dict(zip(rows, torch.autograd.grad(loss, list(rows.values())), strict=True))
        return Run([loss.item()], {}, {name: g.cpu() for name, g in gradients.items()})

    found, expected = run("npu"), run("cpu")
    assert found.losses == expected.losses
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- on four ranks


def check_hsdp_that_accumulates() -> None:
    expected = alone()
    for before in (hold, hold_sums):
        same(on_both(lambda kind, b=before: facade(kind, trained={"before": b})), expected)
    for early in (Sync.NONE, Sync.SHARD):
        on_both(lambda kind, e=early: functional(kind, early=e))


def check_hsdp_with_parameters_on_the_host() -> None:
    policy = CPUOffloadPolicy()
    same(facade("npu", offload_policy=policy, trained={"before": hold_sums}), alone())
    same(functional("npu", offload_policy=policy, early=Sync.SHARD), functional("cpu"))


def check_hsdp_with_a_hook_and_a_group_of_its_own_for_reductions() -> None:
    def prepare(model: Any) -> None:
        model.set_separate_reduce_scatter_group()
        model.layers[0].set_all_reduce_hook(lambda gradient: gradient.mul_(3))
        try:
            model.layers[0].set_all_reduce_hook(None, stream=torch.npu.Stream())
        except ValueError as error:
            assert "native HSDP" in str(error)
        else:
            raise AssertionError("a stream was accepted")

    on_both(lambda kind: facade(kind, prepare=prepare))


def check_hsdp_made_by_hooks_on_a_stream() -> None:
    """Shards over one axis only; the hook sums over the other one."""
    mesh = MESHES["npu"]
    replicas, stream = mesh.get_group("replicate"), torch.npu.Stream()

    def sum_over_replicas(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=replicas)
        gradient.div_(2)

    def prepare(model: Any) -> None:
        for module in units_of(model):
            module.set_all_reduce_hook(sum_over_replicas, stream=stream)

    same(facade("npu", mesh=mesh["shard"], prepare=prepare), alone())


def check_hsdp_keeps_pieces_over_smaller_groups() -> None:
    same(on_both(lambda kind: facade(kind, mesh=FLAT[kind], reshard_after_forward=2)), alone())
    on_both(lambda kind: functional(kind, mesh=FLAT[kind], reshard_after_forward=2))


def check_hsdp_in_half_precision() -> None:
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    on_both(lambda kind: facade(kind, mp_policy=policy, trained={"before": hold_sums}))


assert RANKS in (2, 4) and MICROBATCHES == 2 and Net.uses_bonus
checks.main(globals())
dist.destroy_process_group()
