"""What `recovery` lets fail: a model with places where a failure can be injected, and the contenders that train it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp_fn as hsdp
import hsdp_fn_torch as ht
from hsdp_fn import Keep, ReductionPolicy, Sync
from hsdp_fn_torch.facade import fully_shard

WIDTH = 6
BLOCKS = 3
UNITS = tuple(f"blocks.{i}" for i in range(BLOCKS))

# ------------------------------------------------------------------------------------------------- model and failures


class Boom(Exception):
    """The injected failure."""


class Faults:
    """Where this process is to fail next: ``("forward" | "backward", block)`` or ``("collective", index)``.

    Attributes:
        skipped: the block that returns its input.
        collectives: how many this rank has come to.
    """

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.skipped: int | None = None
        self.collectives = 0

    def reach(self, kind: str, index: int) -> None:
        if self.at == (kind, index):
            self.at = None
            raise Boom(f"{kind} {index}")

    def reach_collective(self) -> None:
        self.collectives += 1
        self.reach("collective", self.collectives - 1)


FAULTS = Faults()


class Wire(torch.autograd.Function):
    """The identity, which may fail in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
        ctx.index = index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        FAULTS.reach("backward", ctx.index)
        return grad, None


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if FAULTS.skipped == self.index:
            return x
        y = self.up(x)
        FAULTS.reach("forward", self.index)
        return x + self.down(torch.tanh(Wire.apply(y, self.index)))


class Net(nn.Module):
    """Three blocks and a head, which belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        FAULTS.reach("forward", BLOCKS)
        return self.head(Wire.apply(x, BLOCKS))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(index: int) -> Tensor:
    """This rank's microbatch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def count_collectives(owner: Any, *names: str) -> None:
    """Let these functions tell `FAULTS` before they do anything."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            FAULTS.reach_collective()
            return function(*args, **kwargs)

        return call

    for name in names:
        setattr(owner, name, counting(getattr(owner, name)))


# --------------------------------------------------------------------------------------------------------- contenders


class Contender(ABC):
    """One way to train, on two ranks.

    Args:
        hybrid: the ranks replicate; otherwise they shard.
        check: compare what takes part in a reduction, where the contender can.
    """

    ours = True

    def __init__(self, *, hybrid: bool = False, check: bool = False) -> None:
        names = ("replicate", "shard") if hybrid else ("shard",)
        self.start(init_device_mesh("cpu", (2, 1) if hybrid else (2,), mesh_dim_names=names), check)

    @abstractmethod
    def start(self, mesh: DeviceMesh, check: bool) -> None: ...

    @abstractmethod
    def microbatch(self, x: Tensor, sync: Sync = Sync.FULL) -> None:
        """Forward and backward."""

    @abstractmethod
    def attempt(self, x: Tensor) -> None:
        """The same, with all reductions, where a rank may fail alone."""

    @abstractmethod
    def reset(self, keep: Keep) -> None:
        """What the user is to call after a failure on all ranks."""

    @abstractmethod
    def clear(self) -> None:
        """Drop gradients, as before every step."""

    @abstractmethod
    def visible(self) -> list[Tensor | None]:
        """Copies of what the user can see of gradients."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor | None]:
        """This rank's rows of the finished gradients, which are dropped."""

    @abstractmethod
    def outdated(self) -> None:
        """Take a step with an update, and then differentiate, or use, what stems from before it."""


class Functional(Contender):
    def start(self, mesh: DeviceMesh, check: bool) -> None:
        model = build()
        policies = {"reduction": ReductionPolicy(unused="checked")} if check else {}
        self._state = ht.shard_module(model, mesh, UNITS, **policies)
        self._step = ht.value_and_grad(lambda params, x: ht.functional_call(model, params, x).square().mean())

    def microbatch(self, x: Tensor, sync: Sync = Sync.FULL) -> None:
        _, self._state = self._step(self._state, x, sync=sync)

    def attempt(self, x: Tensor) -> None:
        attempt: Any = ht.recoverable(self._state)
        try:
            with attempt:
                _, attempt.state = self._step(attempt.state, x)
        finally:
            self._state = attempt.state

    def reset(self, keep: Keep) -> None:
        self._state = hsdp.reset_iter(self._state, keep=keep)

    def clear(self) -> None:
        self.reset(Keep.NOTHING)

    def visible(self) -> list[Tensor | None]:
        self._state.token.require("the next step")
        return [leaf.clone() for leaf in optree.tree_leaves(self._state, namespace="hsdp_fn")]

    def gradients(self) -> dict[str, Tensor | None]:
        self._state, rows = hsdp.grads(self._state)
        rows = {name: None if g is None else g.clone() for name, g in rows.items()}
        self.clear()
        return rows

    def outdated(self) -> None:
        self.microbatch(batch(0))
        self._state, rows = hsdp.grads(self._state)
        old, masters = self._state, hsdp.masters(self._state)
        self._state = hsdp.apply_updates(old, {name: masters[name] - g for name, g in rows.items()})
        self._step(old, batch(1))


class Facade(Contender):
    shard: Callable[..., Any] = staticmethod(fully_shard)

    def start(self, mesh: DeviceMesh, check: bool) -> None:
        self.model: Any = build()
        for block in self.model.blocks:
            self.shard(block, mesh=mesh)
        self.shard(self.model, mesh=mesh)
        self.rows: dict[str, Any] = dict(self.model.named_parameters())  # torch shows others after a failure
        if check and self.ours:
            self.model.set_check_unused_params()

    def microbatch(self, x: Tensor, sync: Sync = Sync.FULL) -> None:
        self._set(sync)
        self.model(x).square().mean().backward()

    def attempt(self, x: Tensor) -> None:
        self._set(Sync.FULL)  # before it begins: what is to be issued follows from the settings
        with ht.recoverable(self.model):
            self.microbatch(x)

    def _set(self, sync: Sync) -> None:
        self.model.set_requires_gradient_sync(sync is not Sync.NONE)
        self.model.set_requires_all_reduce(sync is Sync.FULL)

    def reset(self, keep: Keep) -> None:
        self.model.reset_iter_state(keep=keep)

    def clear(self) -> None:
        for p in self.rows.values():
            p.grad = None

    def visible(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.to_local().clone() for p in self.rows.values()]

    def gradients(self) -> dict[str, Tensor | None]:
        rows = dict(zip(self.rows, self.visible(), strict=True))
        self.clear()
        return rows

    def outdated(self) -> None:
        self.microbatch(batch(0))
        old = self.model(batch(1)).square().mean()
        torch.optim.SGD(self.rows.values(), lr=1.0).step()
        self.clear()
        old.backward()


class Torch(Facade):
    ours = False
    shard = staticmethod(torch.distributed.fsdp.fully_shard)

    def attempt(self, x: Tensor) -> None:
        self.microbatch(x)

    def reset(self, keep: Keep) -> None:
        self.model.reset_iter_state()


CONTENDERS: dict[str, type[Contender]] = {"functional": Functional, "facade": Facade, "torch": Torch}
