"""The command line of `train_gpt.py`: what can be asked for, and the checks of single options."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

DTYPES = ("float32", "bfloat16", "float16")

# Options that decide the losses. A checkpoint can be continued by a run that has the same values of all of these.
DECISIVE = (
    *("steps", "dim", "layers", "heads", "seq_len", "batch_size", "microbatches", "sync", "lr", "warmup", "seed"),
    *("param_dtype", "reduce_dtype", "corpus_bytes"),
)


class Refused(Exception):
    """The run can't be started as asked. The message is one line for the person who asked."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that torchrun started; a process started without it is a world of one.

    Attributes:
        rank, size: this process and how many there are.
        local_rank: this process among those on its machine.
        launched: whether torchrun started it, so that an address to meet at is in the environment.
    """

    rank: int
    size: int
    local_rank: int
    launched: bool

    @classmethod
    def from_environment(cls) -> "World":
        """Read what torchrun sets; communicates with nobody."""
        rank, size, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        return cls(rank, size, local, "MASTER_ADDR" in os.environ)


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options; each is described by ``train_gpt.py --help``. `mesh` is (replicate ranks, shard ranks)."""

    steps: int
    dim: int
    layers: int
    heads: int
    seq_len: int
    batch_size: int
    microbatches: int
    sync: str
    lr: float
    warmup: int
    seed: int
    corpus_bytes: int | None
    mesh: tuple[int, int]
    reshard: str
    prefetch: int
    param_dtype: str | None
    reduce_dtype: str | None
    checkpoint_activations: str
    offload: bool
    device: str
    threads: int
    api: str
    out: Path
    valid_every: int
    valid_windows: int
    log_every: int
    sample_bytes: int
    prompt: str
    temperature: float
    save_every: int
    resume: bool
    stop_after: int | None

    def decisive(self) -> dict[str, object]:
        """What a checkpoint must agree on with the run that continues it."""
        values = asdict(self)
        return {name: values[name] for name in DECISIVE}

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth over all of ``--steps``."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        return self.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps)))

    @property
    def mesh_name(self) -> str:
        """The mesh as ``--mesh`` takes it."""
        replicate, shard = self.mesh
        return str(shard) if replicate == 1 else f"{replicate}x{shard}"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose error is one line, raised instead of printed under a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults after each description, where there is one to speak of."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def _real(positive: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise argparse.ArgumentTypeError(f"must be finite and {'above' if positive else 'at least'} 0, got {text}")
        return value

    return parse


def _mesh(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be SHARD (as 2) or REPLICATExSHARD (as 2x4), got {text!r}")
    return int(match[1] or 1), int(match[2])


def build_parser() -> argparse.ArgumentParser:
    """The parser, its options in the groups that ``--help`` shows."""
    parser = _Parser(
        prog="train_gpt.py",
        description="Train a byte-level GPT on the sources of Python's standard library with hsdp-fn, sharded over the "
        "processes that torchrun started. Without options: FSDP over all processes, about three minutes on two cores.",
        usage="torchrun --standalone --nproc_per_node=2 examples/torch/train_gpt.py [options]",
        allow_abbrev=False,
        formatter_class=lambda prog: _Help(prog, max_help_position=32, width=110),
    )
    one, zero = _whole(1), _whole(0)

    task = parser.add_argument_group("training")
    task.add_argument(
        "--steps", type=one, metavar="N", default=1200, help="optimizer steps; also the length of the lr schedule"
    )
    task.add_argument("--batch-size", type=one, metavar="N", default=8, help="windows of one step, over all processes")
    task.add_argument("--seq-len", type=one, metavar="N", default=128, help="bytes in a window")
    task.add_argument(
        "--lr", type=_real(True), metavar="X", default=3e-3, help="highest learning rate; falls to a tenth (cosine)"
    )
    task.add_argument("--warmup", type=zero, metavar="N", default=50, help="steps of linear warm-up")
    task.add_argument("--seed", type=zero, metavar="N", default=0, help="of weights, batches and the sample")
    task.add_argument("--corpus-bytes", type=one, metavar="N", default=None, help="use at most this much text")

    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=one, metavar="N", default=128, help="width")
    model.add_argument(
        "--layers", type=one, metavar="N", default=4, help="transformer blocks; each is gathered as one unit"
    )
    model.add_argument("--heads", type=one, metavar="N", default=4, help="attention heads; must divide --dim")

    shard = parser.add_argument_group("sharding")
    shard.add_argument(
        "--api",
        choices=["functional", "facade"],
        default="functional",
        help="functions from state to state, or a fully_shard module in an ordinary loop; the losses are the same",
    )
    shard.add_argument(
        "--mesh",
        type=_mesh,
        default=None,
        metavar="[Rx]S",
        help="S for FSDP over S processes, RxS for HSDP: R replicas of S shards (default: all processes shard)",
    )
    shard.add_argument(
        "--microbatches", type=one, metavar="N", default=1, help="cut each step into this many backward passes"
    )
    shard.add_argument(
        "--sync", choices=["shard", "none"], default="shard", help="reduction of all microbatches but the last"
    )
    shard.add_argument(
        "--reshard",
        choices=["blocks", "always", "never"],
        default="blocks",
        help="what is freed after forward and gathered again in backward: the blocks, also the root unit, or nothing",
    )
    shard.add_argument("--prefetch", type=zero, metavar="N", default=1, help="units gathered ahead of the running one")
    shard.add_argument(
        "--param-dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default=None,
        help="dtype of gathered parameters and of compute: float32, bfloat16 or float16 (as stored if not given)",
    )
    shard.add_argument(
        "--reduce-dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default=None,
        help="dtype of gradient reduction (that of compute if not given)",
    )
    shard.add_argument(
        "--checkpoint-activations",
        choices=["none", "reentrant", "non-reentrant"],
        default="none",
        help="recompute each block in backward instead of keeping its activations (reentrant: with this library, "
        "gradients are then reduced after backward, not during it)",
    )
    shard.add_argument("--offload", action="store_true", help="keep parameters and optimizer on the CPU")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu", help="where to compute")
    machine.add_argument("--threads", type=one, metavar="N", default=1, help="CPU threads of each process")

    watch = parser.add_argument_group("output")
    watch.add_argument(
        "--out", type=Path, metavar="PATH", default=Path("runs/gpt"), help="folder of checkpoint, curve and report"
    )
    watch.add_argument("--log-every", type=one, metavar="N", default=25, help="steps between updates of loss and speed")
    watch.add_argument(
        "--valid-every", type=zero, metavar="N", default=100, help="steps between validations; 0: only at the end"
    )
    watch.add_argument(
        "--valid-windows", type=one, metavar="N", default=128, help="least number of held-out windows for each"
    )
    watch.add_argument("--sample-bytes", type=zero, metavar="N", default=300, help="bytes to generate at the end")
    watch.add_argument("--prompt", metavar="TEXT", default="def ", help="what they continue")
    watch.add_argument(
        "--temperature", type=_real(False), metavar="X", default=0.6, help="of the sample; 0 takes the likeliest"
    )

    resume = parser.add_argument_group("interruption")
    resume.add_argument(
        "--save-every", type=zero, metavar="N", default=200, help="steps between checkpoints; 0: only at the end"
    )
    resume.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    resume.add_argument(
        "--stop-after",
        type=one,
        metavar="N",
        default=None,
        help="leave after this step as if killed, without saving (to try it)",
    )
    return parser


def parse(argv: Sequence[str] | None, world: World) -> Options:
    """Options from the command line, checked against each other and against the number of processes.

    Raises:
        Refused: naming the option, its value and what would do.
    """
    given = vars(build_parser().parse_args(argv))
    given["mesh"] = given["mesh"] or (1, world.size)
    options = Options(**given)
    _check_world(options, world)
    if options.stop_after is not None and options.stop_after > options.steps:
        raise Refused(f"--stop-after {options.stop_after} is beyond --steps {options.steps}")
    if options.sample_bytes and not options.prompt:
        raise Refused("--prompt must have at least one character (or give --sample-bytes 0)")
    if options.api == "facade" and options.prefetch != 1:
        raise Refused(f"--prefetch {options.prefetch} needs --api functional; the facade gathers one unit ahead")
    return options


def _check_world(options: Options, world: World) -> None:
    replicate, shard = options.mesh
    if replicate * shard != world.size:
        raise Refused(
            f"--mesh {options.mesh_name} is for {replicate * shard} processes, but this run has {world.size} "
            f"(torchrun --nproc_per_node={replicate * shard} starts that many)"
        )
    parts = options.microbatches * world.size
    if options.batch_size % parts:
        raise Refused(
            f"--batch-size {options.batch_size} can't be divided over {world.size} processes and "
            f"{options.microbatches} microbatches; it must be a multiple of {parts}"
        )


def check_device(options: Options, world: World) -> None:
    """See that this process has a device to compute on.

    Raises:
        Refused: there is none, or the package that drives it is missing.
    """
    if options.device == "npu":
        try:
            import torch_npu  # noqa: F401
        except ImportError as error:
            raise Refused(f"--device npu needs the package torch_npu, which can't be imported: {error}") from error
    if options.device == "cpu":
        return
    module = torch.get_device_module(options.device)
    found = module.device_count() if module.is_available() else 0
    if world.local_rank >= found:
        raise Refused(
            f"--device {options.device}: each process needs a device of its own, but process {world.local_rank} of "
            f"this machine finds {found} (PyTorch {torch.__version__})"
        )


def say(text: str = "", *, error: bool = False) -> None:
    """Print one whole line at once, so that lines of different processes don't mix."""
    stream = sys.stderr if error else sys.stdout
    stream.write(text + "\n")
    stream.flush()
