"""What is compared: this library's two APIs, FSDP2 with and without explicit prefetch, and each rank computing alone.

Every contender trains its own copy of one model. A step has two parts, which are timed apart: `gradients` is forward,
backward and every reduction finished; `update` is the optimizer and whatever makes the next step possible.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hsdp_fn import grads, reset_iter, wait
from hsdp_fn_torch import functional_call, optimizer_step, shard_module, shard_parameters, value_and_grad
from hsdp_fn_torch.facade import fully_shard

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
LEARNING_RATE = 1e-3

OURS, FACADE, FSDP2, PREFETCH, FLOOR = "ours", "facade", "fsdp2", "fsdp2 prefetch", "floor"


class Contender(Protocol):
    """One way to train the model.

    Attributes:
        name: one of `OURS`, `FACADE`, `FSDP2`, `PREFETCH`, `FLOOR`.
        mark: called between forward and backward.
    """

    name: str
    mark: Callable[[], None]

    def gradients(self, batch: Batch) -> Tensor:
        """Loss of this rank's batch, and gradients ready for the optimizer."""
        ...

    def update(self) -> None:
        """Optimizer step, and gradients dropped."""
        ...

    def forget(self) -> None:
        """Gradients dropped without an optimizer step."""
        ...

    def at_rest(self) -> list[Tensor]:
        """What holds the parameters between steps."""
        ...


def nothing() -> None:
    """The mark of a contender whose forward isn't timed apart."""


class Ours:
    """`value_and_grad`, then `optimizer_step`.

    Args:
        hand_out: `gradients` also takes the gradients out of the state, as views of each parameter's rows. Leave it off
            where `update` follows: `optimizer_step` takes them.
    """

    name = OURS

    def __init__(
        self, model: nn.Module, units: Sequence[str], mesh: DeviceMesh, loss: Loss, *, hand_out: bool = False
    ) -> None:
        self.mark: Callable[[], None] = nothing
        self._hand_out = hand_out
        self._model = model
        self.state = shard_module(model, mesh, units)
        self._params = shard_parameters(self.state)
        self._optimizer = _optimizer(self._params.values())

        def forward(params: Any, inputs: Tensor, *rest: Tensor) -> Tensor:
            value = loss(functional_call(model, params, inputs), *rest)
            self.mark()
            return value

        self._step = value_and_grad(forward)

    def gradients(self, batch: Batch) -> Tensor:
        (value, _), self.state = self._step(self.state, *batch)
        if self._hand_out:
            self.state, _ = grads(self.state)
        else:
            self.state = wait(self.state)
        return value

    def update(self) -> None:
        self.state, _ = optimizer_step(self.state, self._optimizer, self._params)

    def forget(self) -> None:
        self.state = reset_iter(self.state)

    def at_rest(self) -> list[Tensor]:
        return [flat for unit in self.state.units for flat in unit.master]


class Fully:
    """`fully_shard` on each unit, then on the model: this library's (`FACADE`) or torch's (FSDP2).

    Args:
        name: `PREFETCH` also tells each unit to gather the next one, in forward and in backward.
    """

    def __init__(self, name: str, model: nn.Module, units: Sequence[str], mesh: DeviceMesh, loss: Loss) -> None:
        self.name = name
        self.mark: Callable[[], None] = nothing
        self._loss = loss
        modules: list[Any] = [model.get_submodule(name) for name in units]
        shard: Callable[..., Any] = fully_shard if name == FACADE else torch_fully_shard
        for module in modules:
            shard(module, mesh=mesh)
        shard(model, mesh=mesh)
        if name == PREFETCH:
            for earlier, later in pairwise(modules):
                earlier.set_modules_to_forward_prefetch([later])
                later.set_modules_to_backward_prefetch([earlier])
        self._model = model
        self._optimizer = _optimizer(model.parameters())

    def gradients(self, batch: Batch) -> Tensor:
        inputs, *rest = batch
        value = self._loss(self._model(inputs), *rest)
        self.mark()
        value.backward()
        return value.detach()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def at_rest(self) -> list[Tensor]:
        return [p._local_tensor for p in self._model.parameters()]


class Alone:
    """The floor: the whole model on each rank, without any communication. Its parameters never change."""

    name = FLOOR

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.mark: Callable[[], None] = nothing
        self._model, self._loss = model, loss

    def gradients(self, batch: Batch) -> Tensor:
        inputs, *rest = batch
        value = self._loss(self._model(inputs), *rest)
        self.mark()
        value.backward()
        return value.detach()

    def update(self) -> None:
        self._model.zero_grad()

    def forget(self) -> None:
        self._model.zero_grad()

    def at_rest(self) -> list[Tensor]:
        return list(self._model.parameters())


def contenders(
    model: nn.Module, units: Sequence[str], mesh: DeviceMesh, loss: Loss, *, hand_out: bool = False
) -> list[Contender]:
    """All five, each with its own copy of the model. Communicates: what `shard_module` and `fully_shard` do."""

    def fresh() -> nn.Module:
        return copy.deepcopy(model)

    return [
        Ours(fresh(), units, mesh, loss, hand_out=hand_out),
        Fully(FACADE, fresh(), units, mesh, loss),
        Fully(FSDP2, fresh(), units, mesh, loss),
        Fully(PREFETCH, fresh(), units, mesh, loss),
        Alone(fresh(), loss),
    ]


def rotated(field: Sequence[Contender], by: int) -> list[Contender]:
    """The contenders in an order that changes from step to step, so that none always follows the same other."""
    by %= len(field)
    return [*field[by:], *field[:by]]


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE)
