"""What the examples of combined parallelisms share: the text, the optimizer, and the run in one process that each
of them is compared with.

    tp_fsdp.py        tensor parallelism and sharding
    cp_fsdp.py        context parallelism and sharding
    moe_ep_fsdp.py    expert parallelism and sharding
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from text import Batches, load_corpus
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SEED = 0
CORPUS_BYTES = 2_000_000
MAX_NORM = 1.0
# Relative, in fp32. Some 3e-7 of the losses and 2e-5 of the rest are seen in 150 steps: rounding errors grow on the
# way, and would without bound if the learning rate were at the edge of instability.
LOSS_TOLERANCE = 1e-5
TOLERANCE = 1e-4
LOG_EVERY = 5


@dataclass(slots=True)
class Run:
    """What a training run leaves behind, for the comparison of two.

    Attributes:
        losses: of each step, the mean over the global batch.
        norms: of each step, the norm of the whole gradient before clipping.
        parameters: by name, whole, after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences between two runs.

    Attributes:
        loss: largest relative difference of a step's losses.
        norm: the same of the gradient norms.
        parameter: largest over the parameters of ``|a - b| / |b|``, with Euclidean norms over the whole parameter.
    """

    loss: float
    norm: float
    parameter: float

    def within(self, tolerance: float) -> bool:
        """Whether all are at most ``tolerance``, and the losses at most `LOSS_TOLERANCE`; NaN is not."""
        return self.loss <= min(tolerance, LOSS_TOLERANCE) and self.norm <= tolerance and self.parameter <= tolerance


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of every example: ``steps`` and ``check``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with a run in one process"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


def join(processes: int) -> None:
    """Join the other processes. Leaves with one line unless there are as many as the example is written for."""
    require_processes(processes)
    # It warns that a sum over two axes takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")


def require_processes(count: int) -> None:
    """Leave with one line unless torchrun has started ``count`` processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) != count:
        sys.exit(f"{sys.argv[0]} is for {count} processes: torchrun --nproc-per-node {count} {sys.argv[0]}")


def text_batches(seq_len: int, batch_size: int) -> Batches:
    """Windows of the standard library's sources. ``batch_size`` is that of the global batch, over all ranks."""
    return Batches(load_corpus(limit=CORPUS_BYTES).train, seq_len, batch_size, SEED)


def make_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW over parameters or groups of them, the same for the run on many ranks and for the one in one process."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train_alone(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    batches: Batches,
    steps: int,
) -> Run:
    """The reference: plain PyTorch on the whole of each global batch. Does not communicate.

    Args:
        model: an unsharded model, from the seed of the run on many ranks.
        loss_of: called with the model and the global batch ``(x, y)``; gives the mean loss.
        batches: the same as in the other run.
        steps: optimizer steps.
    """
    run = Run()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        loss = loss_of(model, *batches.batch(step, 0, 0, 1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def mean_over_ranks(value: Tensor) -> float:
    """Communicates: one all-reduce of one number over all ranks."""
    mean = value.detach().clone() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def whole(tensor: Tensor) -> Tensor:
    """The full value of a DTensor, or the tensor itself. Communicates: gathers over the axes that split it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank. Communicates: as `whole`, once a parameter."""
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def compare(run: Run, reference: Run) -> Difference:
    """How far `run` is from `reference`.

    Raises:
        ValueError: they don't have the same number of steps, or the same parameters.
    """
    if len(run.losses) != len(reference.losses) or len(run.norms) != len(reference.norms):
        raise ValueError(f"runs of {len(run.losses)} and {len(reference.losses)} steps can't be compared")
    if run.parameters.keys() != reference.parameters.keys():
        raise ValueError(f"parameters of one run only: {sorted(run.parameters.keys() ^ reference.parameters.keys())}")
    return Difference(
        loss=_relative(run.losses, reference.losses),
        norm=_relative(run.norms, reference.norms),
        parameter=_distance(run.parameters, reference.parameters),
    )


def verdict(run: Run, reference: Run, tolerance: float = TOLERANCE) -> int:
    """Print the largest differences; the exit code: 0, or 1 unless they are within ``tolerance``."""
    difference = compare(run, reference)
    good = difference.within(tolerance)
    say(
        f"largest relative difference from one process: losses {difference.loss:.1e}, gradient norms "
        f"{difference.norm:.1e}, parameters {difference.parameter:.1e}: {'only rounding' if good else 'TOO LARGE'}"
    )
    return 0 if good else 1


def say(line: str) -> None:
    """Print at once, and on one process only."""
    if dist.get_rank() == 0:
        print(f"{line}\n", end="", flush=True)  # in one piece


def log(step: int, steps: int, run: Run) -> None:
    """Print the newest loss and gradient norm every few steps, and at the last."""
    if step % LOG_EVERY == 0 or step == steps - 1:
        say(f"step {step:3d}  loss {run.losses[-1]:.4f}  gradient norm {run.norms[-1]:.3f}")


def _relative(values: Sequence[float], reference: Sequence[float]) -> float:
    a, b = torch.tensor(values), torch.tensor(reference)
    return float(((a - b) / b).abs().max())


def _distance(values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    distances = [(values[name] - r).norm() / r.norm() for name, r in reference.items()]
    return float(torch.stack(distances).max())  # a NaN in one of them is the maximum
