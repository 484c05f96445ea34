"""The two APIs behind one interface: how a step is taken, judged, saved and resumed with each."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from gpt import GPT, loss_of
from mindspore import Tensor, nn

import hsdp_fn_ms as hm
from hsdp_fn import Collective, HSDPState, Sync, microbatches

Batch = tuple[Tensor, Tensor]


class Functional:
    """The state is passed from call to call."""

    def __init__(self, model: GPT, mesh: hm.DeviceMesh, options: argparse.Namespace) -> None:
        self.options = options
        self.state: HSDPState = hm.shard_cell(model, mesh, [f"layers.{i}" for i in range(options.layers)])
        self.params = hm.shard_parameters(self.state)
        self.optimizer = nn.Adam(list(self.params.values()), learning_rate=options.learning_rate)
        self.value_and_grad = hm.value_and_grad(lambda p, x, y: loss_of(hm.functional_call(model, p, x), y))
        self.evaluate = hm.evaluate(lambda p, x, y: loss_of(hm.functional_call(model, p, x), y))

    def step(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor | None, list[Collective]]:
        """One optimizer step over microbatches: the last loss, the gradient's norm, and what was communicated."""
        before = len(self.state.ledger)
        for sync, batch in zip(microbatches(len(batches), hold=Sync(self.options.hold)), batches, strict=True):
            (loss, _), self.state = self.value_and_grad(self.state, *batch, sync=sync)
        issued = list(self.state.ledger[before:])
        self.state, norm = hm.optimizer_step(self.state, self.optimizer, self.params, max_norm=self.options.max_norm)
        return loss, norm, issued

    def judge(self, batch: Batch) -> Tensor:
        """The loss, without gradients."""
        loss, self.state = self.evaluate(self.state, *batch)
        return loss

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        hm.save_checkpoint(path, self.state, optimizer=self.optimizer, extra=extra)

    def load(self, path: Path) -> hm.Loaded:
        self.state, loaded = hm.load_checkpoint(path, self.state, optimizer=self.optimizer)
        return loaded


class Facade:
    """The state is behind the model, which is trained as any MindSpore cell is."""

    def __init__(self, model: GPT, mesh: hm.DeviceMesh, options: argparse.Namespace) -> None:
        self.options = options
        for layer in model.layers:
            hm.fully_shard(layer, mesh=mesh)
        self.model = hm.fully_shard(model, mesh=mesh)
        self.optimizer = nn.Adam(model.trainable_params(), learning_rate=options.learning_rate)
        self.judge((ms.mint.zeros((1, 1), dtype=ms.int32),) * 2)  # from the first forward on there is a state
        self.value_and_grad = ms.value_and_grad(
            lambda x, y: loss_of(model(x), y), None, weights=self.optimizer.parameters
        )

    @property
    def state(self) -> HSDPState:
        """The explicit state."""
        return self.model.hsdp_state

    def step(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor | None, list[Collective]]:
        """See `Functional.step`."""
        issued: list[Collective] = []
        total: tuple[Tensor, ...] | None = None
        for sync, batch in zip(microbatches(len(batches), hold=Sync(self.options.hold)), batches, strict=True):
            self.model.set_requires_gradient_sync(sync is not Sync.NONE)
            self.model.set_requires_all_reduce(sync is Sync.FULL)
            loss, found = self.value_and_grad(*batch)
            total = found if total is None else tuple([a + b for a, b in zip(total, found, strict=True)])
            issued += self.state.ledger
        assert total is not None
        clipped, norm = hm.clip_grad_norm(self.model, total, self.options.max_norm)
        self.optimizer(clipped)
        return loss, norm, issued

    def judge(self, batch: Batch) -> Tensor:
        """See `Functional.judge`."""
        with ms._no_grad():
            return loss_of(self.model(batch[0]), batch[1])

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        hm.save_checkpoint(path, self.model, optimizer=self.optimizer, extra=extra)

    def load(self, path: Path) -> hm.Loaded:
        _, loaded = hm.load_checkpoint(path, self.model, optimizer=self.optimizer)
        return loaded


TRAINERS = {"functional": Functional, "facade": Facade}
