"""What the tests of `fully_shard` share: both implementations behind one interface, models, and a training loop that
records everything that must be equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hsdp_fn
import hsdp_fn_torch.facade as ours
from tests.workers_torch import WIDTH, Block, Chain, equal

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Api:
    """One implementation of fully_shard."""

    name: str
    fully_shard: Callable[..., Any]
    MixedPrecisionPolicy: Callable[..., Any]


THEIRS = Api("torch", theirs.fully_shard, theirs.MixedPrecisionPolicy)
OURS = Api("hsdp-fn", ours.fully_shard, hsdp_fn.MixedPrecisionPolicy)


@dataclass
class Trace:
    """What a training run gave, in the order in which it came."""

    records: list[tuple[str, Any]] = field(default_factory=list)

    def note(self, what: str, value: Any) -> None:
        self.records.append((what, value))

    def note_grads(self, model: nn.Module) -> None:
        """Full gradients of all parameters; None where there is none."""
        for name, p in model.named_parameters():
            self.note(f"gradient of {name}", full(p.grad))

    def note_params(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.note(f"parameter {name}", full(p))


def full(tensor: Tensor | None) -> Tensor | None:
    """A copy of the whole tensor. Communicates for a sharded one."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if whole is None else whole.detach().clone()


def assert_parity(run: Callable[[Api], Trace]) -> Trace:
    """The same function under both implementations gives equal bits; returns this library's trace.

    The function must have recorded at least one gradient that isn't zero, so that nothing is compared with nothing.
    """
    expected, found = run(THEIRS), run(OURS)
    assert [what for what, _ in found.records] == [what for what, _ in expected.records]
    for at, ((what, a), (_, b)) in enumerate(zip(found.records, expected.records, strict=True)):
        if isinstance(b, Tensor) or b is None:
            equal([a], [b], f"record {at}, {what}")
        else:
            assert a == b, f"record {at}, {what}: {a} here, {b} in torch"
    gradients = [g for what, g in expected.records if what.startswith("gradient") and g is not None]
    assert gradients, "no gradient was recorded"
    assert any(g.count_nonzero() for g in gradients), "all recorded gradients are zero"
    return found


def adamw(params: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, **options)


def data(rank: int, step: int, rows: int = 4, width: int = WIDTH) -> Tensor:
    """Inputs that differ on every rank and step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(997 * step + rank + 1))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def train(
    model: nn.Module,
    rank: int,
    *,
    steps: int = 4,
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square,
    make_optimizer: MakeOptimizer = adamw,
    micro: Sequence[Callable[[nn.Module], object]] = (lambda model: None,),
    before_step: Callable[[nn.Module, Trace, int], object] = lambda model, trace, step: None,
    after_step: Callable[[nn.Module, Trace, int], object] = lambda model, trace, step: None,
) -> Trace:
    """An ordinary training loop.

    Args:
        micro: called before the forward of each microbatch of a step.
        before_step, after_step: called between the last backward and the optimizer, and after that.
    """
    optimizer, trace = make_optimizer(list(model.parameters())), Trace()
    for step in range(steps):
        for i, prepare in enumerate(micro):
            prepare(model)
            value = loss(model, data(rank, 10 * step + i))
            value.backward()
            trace.note("loss", value.detach())
        trace.note_grads(model)
        before_step(model, trace, step)
        optimizer.step()
        optimizer.zero_grad()
        after_step(model, trace, step)
    trace.note_params(model)
    return trace


def chain(**options: Any) -> Chain:
    """A `Chain` with the same random parameters on every rank and call."""
    torch.manual_seed(0)
    return Chain(**options)


def shard_blocks(api: Api, model: Chain, mesh: DeviceMesh, root: bool = True, **options: Any) -> Chain:
    """Each block a unit of its own, the root the rest."""
    for layer in model.layers:
        api.fully_shard(layer, mesh=mesh, **options)
    return api.fully_shard(model, mesh=mesh, **options) if root else model


class NormHead(nn.Module):
    """Blocks, then a norm and a head that form one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, upto: str = "head") -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if upto == "head" else x


class Tied(nn.Module):
    """An embedding whose weight the head shares; 7 rows, so that 2 ranks have unequal shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


class Boom(RuntimeError):
    """What the tests make raise."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom("backward")


@contextlib.contextmanager
def tripwire(module: nn.Module, when: str) -> Iterator[None]:
    """Inside, the module raises `Boom`: ``before`` or ``after`` its forward, or in its ``backward``."""

    def trip(*given: Any) -> Tensor:
        if when == "backward":
            return _RaiseInBackward.apply(given[2])
        raise Boom(when)

    hook = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
    handle = hook(trip)
    try:
        yield
    finally:
        handle.remove()
