"""A training loop that finds the microbatch size by itself, though memory ends on one rank only.

    torchrun --nproc-per-node 2 examples/torch/auto_microbatch.py [--api functional]

A step's batch is cut into microbatches, as many rows at a time as memory holds. How many that is, one learns by running
out of it. With sharded parameters there is a catch: the rank that runs out leaves its forward, and its peers wait in
the next all-gather for a rank that never comes. `recoverable` makes a microbatch something that all ranks take or
none: the rank that ran out has its own exception, the others get `PeerFailed`, and all are where they were before it.
So all halve the microbatch, and begin the step again.

What to look at:

- `take_step` runs one microbatch in each attempt, so that what an attempt communicates is known from the start.
- `train` drops the whole step after a failure, with the gradients that its earlier microbatches have held back. It does
  so after the ``except`` block: inside, the exception's traceback would keep the activations alive.
- `ran_out` asks what a peer met. Another failure than an OutOfMemoryError isn't to be answered by a smaller microbatch.

There is no memory to run out of on a CPU, so `Budget` plays the allocator: it counts the inputs of the blocks that a
microbatch has saved for backward, and the gradients that are held back between microbatches, and raises what CUDA
would raise. Rank 1 has less than rank 0. In the first step both run out at 8 rows. Four rows fit, until gradients are
held back as well: both run out in the second microbatch, when one was taken. At 2 rows only rank 1 does. One row fits.

At the end the run is compared with one that had the final size from the beginning. The arithmetic is the same, so
losses and parameters must be equal bit for bit; the exit code is 1 if they aren't.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from composed import SEED, join, make_optimizer, mean_over_ranks, say, text_batches, whole_parameters
from gpt import GPT, GPTConfig, loss_fn
from text import Batches
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp_fn as hsdp
import hsdp_fn_torch as ht
from hsdp_fn import HSDPState, PeerFailed, Sync, microbatches
from hsdp_fn_torch.facade import fully_shard

CONFIG = GPTConfig(dim=32, layers=3, heads=2, seq_len=128)
ROWS = 8  # of a step, on each rank
ROW_BYTES = CONFIG.layers * CONFIG.seq_len * CONFIG.dim * 4  # what a row's forward saves, as `Budget` counts
BUDGETS = (7 * ROW_BYTES, 6 * ROW_BYTES)  # by rank


class Budget:
    """The memory of one rank: raises torch.OutOfMemoryError in a block's forward when a microbatch needs more."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def watch(self, model: GPT) -> None:
        """Count the input of every block, which stays for backward."""
        for block in model.layers:
            block.register_forward_pre_hook(lambda _, inputs: self.take(inputs[0].numel() * inputs[0].element_size()))

    def begin(self, held: int) -> None:
        """A microbatch begins, beside so many bytes of gradients."""
        self.used = held

    def take(self, count: int) -> None:
        if self.used + count > self.limit:
            raise torch.OutOfMemoryError(f"tried to allocate {count:,} bytes, {self.used:,} of {self.limit:,} in use")
        self.used += count


class Facade:
    """`fully_shard` and an optimizer: the state is the module's."""

    def __init__(self, model: GPT, mesh: DeviceMesh) -> None:
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        self.model: Any = fully_shard(model, mesh=mesh)
        self.optimizer = make_optimizer(model.parameters())

    @property
    def state(self) -> HSDPState:
        """Exists from the first forward on."""
        return self.model.hsdp_state

    def attempt(self, x: Tensor, y: Tensor, share: float, sync: Sync) -> Tensor:
        """Forward and backward of a microbatch that is this share of the step; its part of the loss. What fails in it
        on any rank has happened on none."""
        # Before the attempt begins: the settings say what it is going to communicate.
        self.model.set_requires_gradient_sync(sync is Sync.FULL)
        with ht.recoverable(self.model):
            loss = loss_fn(self.model(x), y) * share
            loss.backward()
        return loss.detach()

    def drop_step(self) -> None:
        """Forget the gradients of the microbatches that this step has taken so far."""
        self.model.reset_iter_state()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """All of them, whole. Communicates."""
        return whole_parameters(self.model)


class Functional:
    """The same with `value_and_grad`: the state is a value, which an attempt replaces or leaves."""

    def __init__(self, model: GPT, mesh: DeviceMesh) -> None:
        self.state: HSDPState = ht.shard_module(model, mesh, [f"layers.{i}" for i in range(len(model.layers))])
        self.step = ht.value_and_grad(lambda p, x, y, share: loss_fn(ht.functional_call(model, p, x), y) * share)
        self.rows = ht.shard_parameters(self.state)
        self.optimizer = make_optimizer(self.rows.values())

    def attempt(self, x: Tensor, y: Tensor, share: float, sync: Sync) -> Tensor:
        with ht.recoverable(self.state) as attempt:
            (loss, _), attempt.state = self.step(attempt.state, x, y, share, sync=sync)
        self.state = attempt.state
        return loss

    def drop_step(self) -> None:
        self.state = hsdp.reset_iter(self.state)

    def update(self) -> None:
        self.state, _ = ht.optimizer_step(self.state, self.optimizer, self.rows)

    def parameters(self) -> dict[str, Tensor]:
        gathered = hsdp.unshard(self.state)
        whole = hsdp.full_params(gathered)
        self.state = hsdp.shard(gathered)
        return whole


Trainer = Facade | Functional
TRAINERS: dict[str, type[Trainer]] = {"facade": Facade, "functional": Functional}


def take_step(trainer: Trainer, budget: Budget, x: Tensor, y: Tensor, size: int) -> Tensor:
    """Gradients of a step, ``size`` rows at a time; its loss on this rank.

    Communicates: as the trainer does, and one number a microbatch, by which the ranks agree that all have succeeded.

    Raises:
        torch.OutOfMemoryError: the budget ended here; PeerFailed: elsewhere. Microbatches before that one were taken.
    """
    parts = list(zip(x.split(size), y.split(size), strict=True))
    loss, held = torch.zeros(()), 0
    for sync, (part, targets) in zip(microbatches(len(parts)), parts, strict=True):
        budget.begin(held)
        loss = loss + trainer.attempt(part, targets, len(part) / len(x), sync)
        held = hsdp.memory_bytes(trainer.state)["acc_full"]
    return loss


def ran_out(error: Exception) -> bool:
    """Whether memory ended, here or on all the ranks that failed."""
    if isinstance(error, PeerFailed):
        return all(reason.startswith("OutOfMemoryError") for reason in error.reasons.values())
    return isinstance(error, torch.OutOfMemoryError)


def train(trainer: Trainer, budget: Budget, batches: Batches, steps: int, size: int) -> tuple[list[float], int]:
    """Train from microbatches of ``size`` rows on. The losses of all steps, and the size that it ended with."""
    losses = []
    for step in range(steps):
        x, y = batches.batch(step, 0, dist.get_rank(), dist.get_world_size())
        loss = None
        while loss is None:
            try:
                loss = take_step(trainer, budget, x, y, size)
            except (torch.OutOfMemoryError, PeerFailed) as error:
                if size == 1 or not ran_out(error):
                    raise
                met = f"step {step}, {size} rows, rank {dist.get_rank()}: {type(error).__name__}: {error}"
                print(f"{met}\n", end="", flush=True)  # in one piece, as several ranks print
            if loss is None:
                trainer.drop_step()
                size //= 2
        trainer.update()
        losses.append(mean_over_ranks(loss))
        say(f"step {step}  loss {losses[-1]:.4f}  in microbatches of {size}")
    return losses, size


def run(api: str, steps: int, size: int, limit: int) -> tuple[list[float], int, dict[str, Tensor]]:
    """A training run from the same start: losses, last microbatch size, whole parameters."""
    model, budget = GPT(CONFIG), Budget(limit)
    model.init_weights(torch.Generator().manual_seed(SEED))
    budget.watch(model)
    trainer = TRAINERS[api](model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
    batches = text_batches(CONFIG.seq_len, ROWS * dist.get_world_size())
    losses, size = train(trainer, budget, batches, steps, size)
    return losses, size, trainer.parameters()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and compare. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=TRAINERS, default="facade", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (default: %(default)s)")
    options = parser.parse_args(arguments)
    join(2)
    losses, size, parameters = run(options.api, options.steps, ROWS, BUDGETS[dist.get_rank()])
    say(f"the same, in microbatches of {size} from the beginning:")
    small_losses, _, small_parameters = run(options.api, options.steps, size, sys.maxsize)
    equal = losses == small_losses and all(torch.equal(p, small_parameters[name]) for name, p in parameters.items())
    say(f"losses and parameters {'are equal, bit for bit' if equal else 'DIFFER'}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
