"""Checks that training on device ``npu`` equals training on the CPU with gloo; run by `test_training.py`.

Each rank belongs to both: groups of gloo for CPU tensors, groups of hccl for the device's. The kernels are the same on
both sides, so what could differ is what this library (or torch's FSDP2) does about streams, memory and dtypes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hsdp_fn
import hsdp_fn_torch as ours
from hsdp_fn import CPUOffloadPolicy, MixedPrecisionPolicy, Sync
from tests.npu_sim import checks

ours.npu.require("training_checks")  # on hardware nobody has imported torch_npu before
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(RANK)
dist.init_process_group("cpu:gloo,npu:hccl")
SHAPE, AXES = ((RANKS,), ("shard",)) if RANKS == 2 else ((2, RANKS // 2), ("replicate", "shard"))
MESHES = {kind: init_device_mesh(kind, SHAPE, mesh_dim_names=AXES) for kind in ("cpu", "npu")}
DELAYED = os.environ.get("NPU_SIM_DELAY_US", "0") != "0"
#: On hardware, whose kernels round otherwise than the CPU's, `tests/test_npu_hardware.py` asks for less.
TOLERANCE = float(os.environ.get("HSDP_NPU_TOLERANCE", "1e-6"))
STEPS, MICROBATCHES, ROWS, WIDTH = 3, 2, 4, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, each a unit of its own, between an embedding and a head whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Run:
    """What must be equal: every loss, and the whole parameters at the end."""

    losses: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * (micro + 10 * step))
    return torch.randint(11, (ROWS, 5), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten()) / MICROBATCHES


def same(found: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=tolerance)
    assert found.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}")
    start = dict(net().named_parameters())
    assert any(not torch.equal(value, start[name].detach()) for name, value in expected.params.items()), "nothing moved"


# ------------------------------------------------------------------------------------------------------------- training


def alone() -> Run:
    """One process that sees the batches of all ranks."""
    run, model = Run(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            for rank in range(RANKS):
                tokens = batch(rank, step, micro)
                loss = loss_of(model(tokens), tokens)
                (loss / RANKS).backward()
                if rank == RANK:
                    run.losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    run.params = {name: p.detach() for name, p in model.named_parameters()}
    return run


def modules(
    api: Any, kind: str, *, hold: bool = False, prepare: Callable[[Any], object] = lambda model: None, **options: Any
) -> Run:
    """Train a ``fully_shard`` module; ``hold``: send nothing before the last microbatch."""
    run, model = Run(), net().to(kind)
    for module in (*model.layers, model):
        api.fully_shard(module, mesh=MESHES[kind], **options)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        losses = []
        for micro in range(MICROBATCHES):
            model.set_requires_gradient_sync(not hold or micro == MICROBATCHES - 1)
            tokens = batch(RANK, step, micro).to(kind)
            losses.append(loss_of(model(tokens), tokens))
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.losses += [loss.item() for loss in losses]
    run.params = {name: whole(p, MESHES[kind]) for name, p in model.named_parameters()}
    return run


def whole(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """Communicates, on the mesh's device, wherever the rows are kept."""
    assert isinstance(parameter, DTensor)
    rows = parameter.detach().to(mesh.device_type)
    return rows.full_tensor().cpu()


def functional(kind: str, *, early: Sync = Sync.FULL, **options: Any) -> Run:
    """Train by functions from state to state."""
    run, model = Run(), net().to(kind)
    units = [f"layers.{i}" for i in range(3)]
    state = ours.shard_module(model, MESHES[kind], units, **options)
    params = ours.shard_parameters(state)
    optimizer = torch.optim.AdamW(params.values(), lr=0.02)
    step_fn = ours.value_and_grad(lambda p, tokens: loss_of(ours.functional_call(model, p, tokens), tokens))
    for step in range(STEPS):
        losses = []
        for micro in range(MICROBATCHES):
            sync = Sync.FULL if micro == MICROBATCHES - 1 else early
            (loss, _), state = step_fn(state, batch(RANK, step, micro).to(kind), sync=sync)
            losses.append(loss)
        state, _ = ours.optimizer_step(state, optimizer, params, max_norm=1.0)
        run.losses += [loss.item() for loss in losses]
    state = hsdp_fn.wait(hsdp_fn.unshard(state))
    run.params = {name: value.detach().cpu() for name, value in hsdp_fn.full_params(state).items()}
    return run


def on_both(train: Callable[[str], Run], tolerance: float = TOLERANCE) -> Run:
    run = train("npu")
    same(run, train("cpu"), tolerance)
    return run


# --------------------------------------------------------------------------------------------------------------- checks


def check_fsdp2_of_torch_equals_a_single_process() -> None:
    same(modules(theirs, "npu"), alone())


def check_fully_shard_equals_gloo_and_a_single_process() -> None:
    same(on_both(lambda kind: modules(ours, kind)), alone())


def check_fully_shard_that_accumulates_before_it_sends() -> None:
    on_both(lambda kind: modules(ours, kind, hold=True))


def check_fully_shard_in_bf16_with_fp32_reductions() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    on_both(lambda kind: modules(ours, kind, mp_policy=policy))


def check_fully_shard_that_keeps_what_it_gathered() -> None:
    on_both(lambda kind: modules(ours, kind, reshard_after_forward=False))


def check_fully_shard_with_parameters_on_the_host() -> None:
    on_both(lambda kind: modules(ours, kind, offload_policy=CPUOffloadPolicy()))


def check_functional_training_equals_gloo_and_a_single_process() -> None:
    same(on_both(functional), alone())


def check_functional_training_that_holds_gradients_back() -> None:
    on_both(lambda kind: functional(kind, early=Sync.NONE))


def check_functional_training_in_bf16_reductions() -> None:
    on_both(lambda kind: functional(kind, mp_policy=MixedPrecisionPolicy("bfloat16", "bfloat16")))


def check_functional_training_with_parameters_on_the_host() -> None:
    on_both(lambda kind: functional(kind, offload_policy=CPUOffloadPolicy()))


def check_fully_shard_with_a_group_of_its_own_for_reductions() -> None:
    """Then gathers and reductions run on two streams at once."""
    on_both(lambda kind: modules(ours, kind, prepare=lambda model: model.set_separate_reduce_scatter_group()))


def check_fully_shard_with_messages_for_collectives() -> None:
    """Point-to-point collectives, which HCCL runs as batches of sends and receives."""

    def prepare(model: Any) -> None:
        for module in (*model.layers, model):
            module.set_custom_all_gather(ours.PointToPointAllGather())
            module.set_custom_reduce_scatter(ours.PointToPointReduceScatter())

    on_both(lambda kind: modules(ours, kind, prepare=prepare))


def check_a_microbatch_that_fails_on_one_rank_is_undone_on_all() -> None:
    model = net().to("npu")
    for module in (*model.layers, model):
        ours.fully_shard(module, mesh=MESHES["npu"])
    tokens = batch(RANK, 0, 0).to("npu")

    def forward() -> Tensor:
        loss = loss_of(model(tokens), tokens)
        if failing and RANK == 1:
            raise ArithmeticError
        loss.backward()
        return loss

    failing = True
    try:
        with ours.recoverable(model):
            forward()
    except (ArithmeticError, hsdp_fn.PeerFailed) as error:
        assert isinstance(error, ArithmeticError) == (RANK == 1)
    failing = False
    with ours.recoverable(model):
        loss = forward()
    assert abs(loss.item() - loss_of(net()(tokens.cpu()), tokens.cpu()).item()) <= TOLERANCE


def refuses_fp64(mesh: DeviceMesh) -> None:
    try:
        ours.shard_module(net().double().to("npu"), mesh, [])
    except hsdp_fn.BackendError as error:
        assert "hccl can't reduce float64" in str(error), error
    else:
        raise AssertionError("it was accepted")


def check_fp64_gradients_are_refused_before_anything_is_sent() -> None:
    group = dist.new_group(backend="hccl")
    refuses_fp64(DeviceMesh.from_group(group, "npu", mesh_dim_names=("shard",)))


def check_fp64_gradients_are_refused_with_a_backend_for_each_device() -> None:
    refuses_fp64(MESHES["npu"])


def check_without_its_waits_this_library_computes_something_else() -> None:
    """That these checks can fail: a wait that is left out shows, where delays are on."""
    expected, wait = alone(), ours.TorchBackend.wait
    ours.TorchBackend.wait = lambda self, handle: None
    try:
        found = modules(ours, "npu")
    finally:
        ours.TorchBackend.wait = wait
    if DELAYED:
        assert not torch.allclose(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=1e-3)


checks.main(globals())
dist.destroy_process_group()
