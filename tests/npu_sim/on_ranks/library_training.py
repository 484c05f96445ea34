"""What the checks of this library share: a small model, its batches, and training of it by either API.

Importing it joins the process group. Each rank belongs to groups of gloo for CPU tensors and of hccl for the device's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import hsdp_fn
import hsdp_fn_torch as ours
from hsdp_fn import Sync

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(RANK)
dist.init_process_group("cpu:gloo,npu:hccl")
KINDS = ("cpu", "npu")
FLAT = {kind: init_device_mesh(kind, (RANKS,), mesh_dim_names=("shard",)) for kind in KINDS}
#: On two ranks they shard; on four they are replicas of shards.
MESHES = FLAT
if RANKS == 4:
    MESHES = {kind: init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard")) for kind in KINDS}
STEPS, MICROBATCHES, WIDTH, WORDS = 2, 2, 6, 7
UNITS = ["layers.0", "layers.1", "layers.2"]


class Layer(nn.Module):
    """Five hidden units, so that no number of ranks divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Layers, each a unit of its own, and what is in the root's.

    Attributes:
        recomputes: layers are checkpointed.
        uses_bonus: whether forward uses the parameter ``bonus``.
    """

    recomputes = False
    uses_bonus = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in UNITS)
        self.bonus = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x * self.bonus if self.uses_bonus else x)


@dataclass
class Run:
    """What must be equal: every loss, and the whole gradients and parameters of the last step."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, micro: int, rank: int = RANK) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * (micro + 10 * step))
    return torch.randint(WORDS, (2, 3), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    flat = logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(flat, tokens.roll(-1, 1).flatten()) / MICROBATCHES


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    """Not one that divides by the gradient's size."""
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def same(found: Run, expected: Run, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=tolerance)
    for what in ("grads", "params"):
        values, wanted = getattr(found, what), getattr(expected, what)
        assert values.keys() == wanted.keys(), what
        for name, value in wanted.items():
            assert (value is None) == (values[name] is None), f"{what} of {name}"
            if value is not None:
                says = lambda text, of=f"{what} of {name}": f"{of}: {text}"  # noqa: E731
                torch.testing.assert_close(values[name], value, rtol=0, atol=tolerance, msg=says)
    start = dict(net().named_parameters())
    assert any(not torch.equal(value, start[name].detach()) for name, value in expected.params.items()), "nothing moved"


def is_same(found: Run, expected: Run) -> bool:
    try:
        same(found, expected)
    except AssertionError:
        return False
    return True


def on_both(train: Callable[[str], Run], tolerance: float = 1e-6) -> Run:
    """Train on the device and on the CPU, which must agree."""
    run = train("npu")
    same(run, train("cpu"), tolerance)
    return run


def alone(steps: int = STEPS, *, max_norm: float | None = None) -> Run:
    """One process that sees the batches of all ranks."""
    run, model = Run(), net()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        for micro in range(MICROBATCHES):
            for rank in range(RANKS):
                tokens = batch(step, micro, rank)
                loss = loss_of(model(tokens), tokens)
                (loss / RANKS).backward()
                if rank == RANK:
                    run.losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        run.grads = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    run.params = {name: p.detach() for name, p in model.named_parameters()}
    return run


# --------------------------------------------------------------------------------------------------------- fully_shard


def sharded(
    kind: str, *, mesh: DeviceMesh | None = None, prepare: Callable[[Any], object] = lambda model: None, **options: Any
) -> Any:
    """A model of which each layer, and the rest, is a unit of `fully_shard`; ``prepare`` may make settings."""
    model = net().to(kind)
    for module in (*model.layers, model):
        ours.fully_shard(module, mesh=mesh or MESHES[kind], **options)
    prepare(model)
    return model


def units_of(model: Any) -> Sequence[Any]:
    return [*model.layers, model]


def train(
    model: Any,
    kind: str,
    *,
    steps: int = STEPS,
    before: Callable[[Any, int], object] = lambda model, micro: None,
    update: Callable[[Any, torch.optim.Optimizer], object] = lambda model, optimizer: optimizer.step(),
    max_norm: float | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Run:
    """Train a sharded module.

    Args:
        before: called before each microbatch, with its number.
        update: makes the optimizer's step.
        forward: in place of the model's.
    """
    run, optimizer = Run(), optimizer_of(model.parameters())
    for step in range(steps):
        losses = []
        for micro in range(MICROBATCHES):
            before(model, micro)
            tokens = batch(step, micro).to(kind)
            losses.append(loss_of((forward or model)(tokens), tokens))
            losses[-1].backward()
        if max_norm is not None:
            ours.clip_grad_norm_(model.parameters(), max_norm)
        if step == steps - 1:
            run.grads = whole_gradients(model, kind)
        update(model, optimizer)
        optimizer.zero_grad()
        run.losses += [loss.item() for loss in losses]
    run.params = {name: whole(p, kind) for name, p in model.named_parameters()}
    return run


def facade(kind: str, *, trained: dict[str, Any] | None = None, **options: Any) -> Run:
    """`sharded` with these options, then `train` with those in ``trained``."""
    return train(sharded(kind, **options), kind, **(trained or {}))


def whole_gradients(model: nn.Module, kind: str) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad, kind) for name, p in model.named_parameters()}


def whole(value: Tensor, kind: str) -> Tensor:
    """A copy in host memory. Communicates, on the mesh's device, wherever the rows are kept."""
    assert isinstance(value, DTensor)
    return value.detach().to(kind).full_tensor().cpu().clone()


def hold(model: Any, micro: int) -> None:
    """For ``before``: whole gradients are held back until the last microbatch (``Sync.NONE``)."""
    model.set_requires_gradient_sync(micro == MICROBATCHES - 1)


def hold_sums(model: Any, micro: int) -> None:
    """For ``before``: the all-reduce is put off until the last microbatch (``Sync.SHARD``)."""
    model.set_requires_all_reduce(micro == MICROBATCHES - 1)


# ---------------------------------------------------------------------------------------------------------- functional


def functional(
    kind: str,
    *,
    steps: int = STEPS,
    early: Sync = Sync.FULL,
    max_norm: float | None = None,
    mesh: DeviceMesh | None = None,
    model: Net | None = None,
    **options: Any,
) -> Run:
    """Train by functions from state to state; ``early``: of all microbatches but the last."""
    run, model = Run(), (model or net()).to(kind)
    state = ours.shard_module(model, mesh or MESHES[kind], UNITS, **options)
    params = ours.shard_parameters(state)
    optimizer = optimizer_of(params.values())
    step_fn = value_and_grad(model)
    for step in range(steps):
        losses = []
        for micro in range(MICROBATCHES):
            sync = Sync.FULL if micro == MICROBATCHES - 1 else early
            (loss, _), state = step_fn(state, batch(step, micro).to(kind), sync=sync)
            losses.append(loss)
        state, _ = ours.optimizer_step(state, optimizer, params, max_norm=max_norm)
        run.losses += [loss.item() for loss in losses]
    run.params = full(state)
    return run


def value_and_grad(model: Net) -> Any:
    return ours.value_and_grad(lambda p, tokens: loss_of(ours.functional_call(model, p, tokens), tokens))


def full(state: hsdp_fn.HSDPState) -> dict[str, Tensor]:
    """Copies of the full parameters in host memory. Communicates; the state is as good as before, resharded."""
    state = hsdp_fn.wait(hsdp_fn.unshard(state))
    return {name: value.detach().cpu().clone() for name, value in hsdp_fn.full_params(state).items()}


# ------------------------------------------------------------------------------------------------------------- streams


def stream_for(kind: str) -> Any:
    """A stream of the device's; None on the CPU."""
    return torch.npu.Stream() if kind == "npu" else None


def on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.npu.stream(stream)


def anywhere(mine: bool) -> bool:
    """Whether it is so on any rank. Communicates, by gloo."""
    count = torch.tensor(int(mine))
    dist.all_reduce(count)
    return bool(count.item())
