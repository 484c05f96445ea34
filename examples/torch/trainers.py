"""One training step in each of the two APIs. Everything else of `train_gpt.py` is the same for both.

`Functional` carries the sharding state from call to call as a value. `Facade` trains a `fully_shard` module as FSDP2's
are. The collectives and the arithmetic are the same, so the losses are equal bit for bit.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from checkpoint import Saved, local
from gpt import GPT, loss_fn
from options import Options
from report import CommTally
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp_fn import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    PrefetchPolicy,
    Sync,
    expected_comm,
    memory_bytes,
    wait,
)
from hsdp_fn_torch import (
    Params,
    evaluate,
    fully_shard,
    functional_call,
    global_norm,
    optimizer_step,
    shard_module,
    shard_parameters,
    value_and_grad,
)

Batch = tuple[Tensor, Tensor]
MAX_NORM = 1.0
RESHARD = {"blocks": None, "always": True, "never": False}


class Trainer(Protocol):
    """A sharded model and its optimizer.

    Attributes:
        model: what was sharded.
        params: what the optimizer updates, by name: this process's rows, or DTensors of them.
        comm: collectives issued and expected so far.
        step: optimizer steps done.
    """

    model: GPT
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    comm: CommTally

    @property
    def step(self) -> int: ...

    def train_step(self, batches: Sequence[Batch], lr: float) -> Tensor:
        """One optimizer step; one backward for each of the batches, which are on the device.

        Communicates: what the tally is told to expect, and one element for the gradient's norm.

        Returns:
            This process's mean loss over the batches.
        """
        ...

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch, without gradients. Communicates: one forward's gathers."""
        ...

    def logits(self, tokens: Tensor) -> Tensor:
        """The model's output, without gradients. Communicates: one forward's gathers."""
        ...

    def finish(self) -> None:
        """Make the tally complete."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of the sharding state by field. The model has run before."""
        ...


class Functional:
    """`value_and_grad` and `optimizer_step`: each takes a state and returns the next."""

    def __init__(self, model: GPT, mesh: DeviceMesh, options: Options, saved: Saved | None) -> None:
        self.model, self.comm = model, CommTally()
        self.state = shard_module(
            model,
            mesh,
            [f"layers.{i}" for i in range(options.layers)],
            mp_policy=MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype),
            offload_policy=CPUOffloadPolicy() if options.offload else None,
            prefetch=PrefetchPolicy(options.prefetch, options.prefetch),
            reshard_after_forward=RESHARD[options.reshard],
        )
        if saved is not None:
            self.state = saved.restore(self.state)
        self.params = shard_parameters(self.state)
        self.optimizer = _optimizer(self.params, options, saved)
        self._early = _early_sync(options)

        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(functional_call(model, params, x), y)

        self._grad = value_and_grad(lambda params, x, y: loss(params, x, y) / options.microbatches)
        self._loss = evaluate(loss)
        self._logits = evaluate(lambda params, tokens: functional_call(model, params, tokens))

    @property
    def step(self) -> int:
        return self.state.step

    def train_step(self, batches: Sequence[Batch], lr: float) -> Tensor:
        total = torch.zeros((), device=batches[0][0].device)
        for left, (x, y) in zip(reversed(range(len(batches))), batches, strict=True):
            sync = self._early if left else Sync.FULL
            (loss, _), self.state = self._grad(self.state, x, y, sync=sync)
            self.comm.expect(expected_comm(self.state.layout, sync=sync))
            total += loss
        self.state = wait(self.state)  # the last all-reduces are in the ledger only once they are issued
        self.comm.record(self.state)  # the optimizer step begins a new ledger
        _set_lr(self.optimizer, lr)
        self.state, _ = optimizer_step(self.state, self.optimizer, self.params, max_norm=MAX_NORM)
        return total

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self._forward(self._loss, x, y)

    def logits(self, tokens: Tensor) -> Tensor:
        return self._forward(self._logits, tokens)

    def _forward(self, run: Any, *batch: Tensor) -> Any:
        out, self.state = run(self.state, *batch)
        self.comm.expect(expected_comm(self.state.layout, backward=False))
        return out

    def finish(self) -> None:
        self.comm.record(self.state)

    def memory(self) -> dict[str, int]:
        return memory_bytes(self.state)


class Facade:
    """`fully_shard` on each block and on the root; then an ordinary loop of forward, backward and optimizer."""

    def __init__(self, model: GPT, mesh: DeviceMesh, options: Options, saved: Saved | None) -> None:
        self.comm = CommTally()
        for module in (*model.layers, model):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype),
                offload_policy=CPUOffloadPolicy() if options.offload else None,
                reshard_after_forward=RESHARD[options.reshard],
            )
        self.model: Any = model  # an HSDPModule now
        self.params = dict(model.named_parameters())
        self.step = 0
        if saved is not None:
            saved.restore_parameters(self.params)
            self.step = saved.step
        self.optimizer = _optimizer(self.params, options, saved)
        self._early = _early_sync(options)

    def train_step(self, batches: Sequence[Batch], lr: float) -> Tensor:
        total = torch.zeros((), device=batches[0][0].device)
        for left, (x, y) in zip(reversed(range(len(batches))), batches, strict=True):
            sync = self._early if left else Sync.FULL
            self.model.set_requires_gradient_sync(sync is not Sync.NONE)
            self.model.set_requires_all_reduce(sync is Sync.FULL)
            loss = loss_fn(self.model(x), y) / len(batches)
            loss.backward()
            self._record(sync=sync)
            total += loss.detach()
        _set_lr(self.optimizer, lr)
        # `clip_grad_norm_` would do, but sums the norm in another order and communicates for each parameter.
        grads = {name: None if p.grad is None else local(p.grad) for name, p in self.params.items()}
        norm = global_norm(self.model.hsdp_state, grads)
        torch.nn.utils.clip_grads_with_norm_(self.params.values(), MAX_NORM, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    @torch.no_grad()
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(self.logits(x), y)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens)
        for module in (self.model, *self.model.layers):
            module.reshard()  # what isn't resharded after forward; no backward will do it
        self._record(backward=False)
        return out

    def _record(self, **call: Any) -> None:
        """Take in the ledger, which is that of the last forward and backward alone."""
        state = self.model.hsdp_state
        self.comm.expect(expected_comm(state.layout, **call))
        self.comm.record(state)

    def finish(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return memory_bytes(self.model.hsdp_state)


TRAINERS = {"functional": Functional, "facade": Facade}


def _early_sync(options: Options) -> Sync:
    """Of all microbatches but the last. Without replicas nothing can be held back between shard and full."""
    held = Sync(options.sync)
    return Sync.FULL if held is Sync.SHARD and options.mesh[0] == 1 else held


def _optimizer(params: dict[str, nn.Parameter], options: Options, saved: Saved | None) -> torch.optim.Optimizer:
    # foreach: every operator once for all parameters, as one on a DTensor costs much more than one on its rows.
    optimizer = torch.optim.AdamW(params.values(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    if saved is not None:
        saved.restore_optimizer(optimizer, params)
    return optimizer


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
