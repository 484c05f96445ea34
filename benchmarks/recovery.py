"""What is left after a failure, here and with FSDP2, in one run: ``python benchmarks/recovery.py``.

Two gloo processes run into a failure, do what the contender offers against it, and take one more step without one. They
are started afresh for each contender, and for each scenario in which torch may hang. The contenders:

- ``functional``: a state and `value_and_grad`. On all ranks at once: `reset_iter`. Alone: `recoverable`.
- ``facade``: `hsdp_fn_torch`'s `fully_shard`. On all ranks at once: `reset_iter_state`. Alone: `recoverable`.
- ``torch``: torch's `fully_shard` with `reset_iter_state`. It has nothing against failures of one rank alone.

A cell says ``right`` if whatever the failed call had shown (``.grad``, or the state) was as before it, and the step
after it has the gradients of a run without a failure, bit for bit; ``WRONG`` and how; ``error``: what was raised
instead; ``hang``: only the timeout of the process group ended it; ``dies``: the process did. Where torch is wrong, the
scenario is run again with `zero_grad` after `reset_iter_state`.

Afterwards failures are injected at every collective and every wait for one, and in forward and backward of every
module, on rank 0, on rank 1, and on both.

The last line counts the checks of this library (torch's don't count); exit code 0 only if all are right.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import optree
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp_fn as hsdp
import hsdp_fn_torch as ht
from hsdp_fn import Keep, PeerFailed, PhaseError, RankMismatchError, ReductionPolicy, StaleStateError, Sync
from hsdp_fn_torch.backend import TorchBackend
from hsdp_fn_torch.facade import fully_shard

RANKS = (0, 1)
WIDTH = 6
BLOCKS = 3
UNITS = tuple(f"blocks.{i}" for i in range(BLOCKS))
RIGHT = "right"
LIMIT_S = 100  # of a pair of processes
TIMEOUT_S = 60.0  # of a process group
HANG_S = 4.0  # of a process group that is expected to hang


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


# ---------------------------------------------------------------------------------------------------------- scenarios


def fails(
    contender: Contender,
    at: tuple[str, int],
    *,
    ranks: Sequence[int] = RANKS,
    before: Sync | None = None,
    retry: bool = False,
    clear: bool = False,
) -> str:
    """A failure, and the step after it.

    Args:
        at: where; see `Faults`.
        ranks: who fails.
        before: a microbatch that succeeds before, and how far it is reduced.
        retry: keep it, and run the failed one again. Otherwise the next step begins anew.
        clear: also drop gradients afterwards.
    """
    failing = 1 if retry else 0  # the same batch everywhere else, so that doubled gradients are exactly that
    if retry and before is not None:
        contender.microbatch(batch(0), before)
    contender.microbatch(batch(failing))
    expected = contender.gradients()

    if before is not None:
        contender.microbatch(batch(0), before)
    shown = contender.visible()
    alone = len(ranks) == 1
    FAULTS.collectives, FAULTS.at = 0, at if dist.get_rank() in ranks else None
    met = raised(partial(contender.attempt if alone else contender.microbatch, batch(failing)))
    FAULTS.at = None
    answers = [] if same(shown, contender.visible()) else ["gradients left behind"]
    if contender.ours and not as_told(met, ranks):
        answers.append(f"met {met!r}")
    if not (alone and contender.ours):  # after `recoverable` there is nothing to do
        contender.reset(Keep.ACCUMULATED if retry else Keep.NOTHING)
    elif before is not None and not retry:
        contender.reset(Keep.NOTHING)
    if clear:
        contender.clear()
        answers = []
    contender.microbatch(batch(failing))
    return verdict([*answers, *differences(contender.gradients(), expected)])


def old_graph(contender: Contender, **_: Any) -> str:
    """Right is to refuse: what would come out is the gradient of neither the old nor the new parameters."""
    contender.microbatch(batch(1))
    true = contender.gradients()
    contender.microbatch(batch(0))
    contender.gradients()
    met = raised(contender.outdated)
    if isinstance(met, (PhaseError, StaleStateError)):
        return RIGHT
    return verdict([f"met {met!r}"] if met else [f"in silence, {d}" for d in differences(contender.gradients(), true)])


def divergent(contender: Contender, **_: Any) -> str:
    """Rank 1 doesn't use the parameters of block 1. Right is to refuse, on both ranks, and to go on."""
    contender.microbatch(batch(0))
    expected = contender.gradients()
    FAULTS.skipped = 1 if dist.get_rank() == 1 else None
    met = raised(partial(contender.microbatch, batch(0)))
    FAULTS.skipped = None
    answers = [] if isinstance(met, RankMismatchError) else [f"met {met!r}" if met else "in silence"]
    contender.reset(Keep.NOTHING)
    contender.clear()
    contender.microbatch(batch(0))
    return verdict([*answers, *differences(contender.gradients(), expected)])


@dataclass(frozen=True, slots=True)
class Scenario:
    """A failure and what follows.

    Attributes:
        run: to be called with a contender, on each rank.
        hybrid, check: of the contender.
        hangs: torch may hang in it.
        clear: `zero_grad` might help torch.
    """

    run: Callable[..., str]
    hybrid: bool = False
    check: bool = False
    hangs: bool = False
    clear: bool = True


def alone(kind: str, index: int, **more: Any) -> Scenario:
    return Scenario(partial(fails, at=(kind, index), ranks=[0], **more), hangs=True, clear=False)


SCENARIOS = {
    "exception in forward, all ranks": Scenario(partial(fails, at=("forward", 1))),
    "exception in backward, all ranks": Scenario(partial(fails, at=("backward", 1))),
    "no-sync microbatch, then exception": Scenario(partial(fails, at=("backward", 1), before=Sync.NONE)),
    "all-reduce put off, then exception": Scenario(partial(fails, at=("backward", 1), before=Sync.SHARD), hybrid=True),
    "failed microbatch again, sums kept": Scenario(
        partial(fails, at=("backward", 0), before=Sync.NONE, retry=True), clear=False
    ),
    "rank 0 alone in forward": alone("forward", 1),
    "rank 0 alone in backward": alone("backward", 1),
    "rank 0 alone at a collective": alone("collective", 3),
    "rank 0 alone, again, sums kept": alone("backward", 0, before=Sync.NONE, retry=True),
    "old graph after an optimizer step": Scenario(old_graph, clear=False),
    "ranks use different parameters": Scenario(divergent, check=True, hangs=True, clear=False),
}


def raised(call: Callable[[], None]) -> Exception | None:
    """What the call raises. It isn't kept alive by its traceback."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def as_told(met: Exception | None, failing: Sequence[int]) -> bool:
    """Whether a failed rank has met its own exception, and another one what says who failed."""
    if dist.get_rank() in failing:
        return isinstance(met, Boom)
    return isinstance(met, PeerFailed) and met.ranks == tuple(failing) and "Boom" in met.reasons[failing[0]]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Bit for bit; None is None only."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


def differences(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    """How gradients differ; nothing if they are equal bit for bit."""
    kinds = [_difference(found.get(name), expected[name]) for name in expected]
    words = [f"{kinds.count(word)} {word}" for word in ("doubled", "tripled", "otherwise wrong") if word in kinds]
    return [f"{', '.join(words)} of {len(expected)} gradients"] if words else []


def _difference(found: Tensor | None, expected: Tensor | None) -> str:
    if same([found], [expected]):
        return ""
    for times, word in ((2, "doubled"), (3, "tripled")):
        if found is not None and expected is not None and torch.allclose(found, times * expected):
            return word
    return "otherwise wrong"


def verdict(problems: Sequence[str]) -> str:
    return f"WRONG: {'; '.join(problems)}" if problems else RIGHT


# --------------------------------------------------------------------------------------------------- injected failures


@dataclass(frozen=True, slots=True)
class Tally:
    """Injected failures of a kind: how many, and how many went right on both ranks."""

    right: int
    count: int
    problems: tuple[str, ...] = ()


def inject(contender: Contender, stride: int) -> dict[str, Tally]:
    """A failure at every (``stride``-th) place, on one rank and on both, and a clean step after each."""
    contender.attempt(batch(1))  # the first one also sets up
    contender.gradients()
    FAULTS.collectives = 0
    contender.attempt(batch(1))
    collectives, expected = FAULTS.collectives, contender.gradients()
    places = {
        "collectives": [("collective", i) for i in range(0, collectives, stride)],
        "forward": [("forward", i) for i in range(0, BLOCKS + 1, stride)],
        "backward": [("backward", i) for i in range(0, BLOCKS + 1, stride)],
    }
    return {
        kind: _tally([_injected(contender, at, ranks, expected) for ranks in ([0], [1], [0, 1]) for at in found])
        for kind, found in places.items()
    }


def _injected(contender: Contender, at: tuple[str, int], ranks: Sequence[int], expected: dict[str, Any]) -> str:
    shown = contender.visible()
    FAULTS.collectives, FAULTS.at = 0, at if dist.get_rank() in ranks else None
    met = raised(partial(contender.attempt, batch(1)))
    FAULTS.at = None
    problems = [] if as_told(met, ranks) else [f"met {met!r}"]
    problems += [] if same(shown, contender.visible()) else ["not as before"]
    contender.microbatch(batch(1))
    problems += differences(contender.gradients(), expected)
    return f"{at} on ranks {ranks}: {'; '.join(problems)}" if problems else ""


def _tally(problems: Sequence[str]) -> Tally:
    """Of both ranks. Communicates."""
    mine = torch.tensor([int(not p) for p in problems])
    dist.all_reduce(mine, dist.ReduceOp.MIN)
    return Tally(int(mine.sum()), len(problems), tuple(p for p in problems if p))


# ---------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Job:
    """What a pair of processes is to do, one after the other, each with a new contender.

    Attributes:
        contender: one of `CONTENDERS`.
        tasks: names of scenarios, and whether gradients are to be cleared in them; or how far apart to inject failures.
        timeout: of the process group, in seconds.
        limit: seconds for all of it.
        hybrid: of the contender that failures are injected into.
    """

    contender: str
    tasks: tuple[tuple[str, bool] | int, ...]
    timeout: float = TIMEOUT_S
    limit: float = LIMIT_S
    hybrid: bool = False


def _work(rank: int, job: Job, folder: str, pipes: Sequence[tuple[Connection, Connection]]) -> None:
    """A process of a pair: what it finds goes into its connection; then it stays until it is told to end."""
    signal.alarm(int(LIMIT_S))  # whatever happens, to the parent too, it isn't left behind
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's last words
    for other, (theirs, mine) in enumerate(pipes):  # a pipe ends when the last process closes it
        theirs.close()
        if other != rank:
            mine.close()
    answers = pipes[rank][1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    if job.contender == "torch":
        count_collectives(dist, "all_gather_single", "reduce_scatter_single")
    else:
        count_collectives(TorchBackend, "all_gather", "reduce_scatter", "all_reduce", "wait")
    for task in job.tasks:
        answers.send(_answer(CONTENDERS[job.contender], task, job.hybrid))
    answers.recv()  # a process that ends would free those that wait for it
    os._exit(0)


def _answer(kind: type[Contender], task: tuple[str, bool] | int, hybrid: bool) -> Any:
    try:
        if isinstance(task, int):
            return inject(kind(hybrid=hybrid), task)
        scenario = SCENARIOS[task[0]]
        return scenario.run(kind(hybrid=scenario.hybrid, check=scenario.check), clear=task[1])
    except Exception as error:
        lines = str(error).strip().splitlines()
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return "hang"
        return f"error: {type(error).__name__}: {lines[0][:80] if lines else ''}"


def run(job: Job) -> list[list[Any]]:
    """What the ranks of a new pair of processes answer, by task; ``dies`` or ``hang`` for one that doesn't."""
    context = multiprocessing.get_context("fork")  # this process has no threads, and has used no autograd
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in RANKS]
        processes = [context.Process(target=_work, args=(rank, job, folder, pipes), daemon=True) for rank in RANKS]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return _answers([ours for ours, _ in pipes], processes, job)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: Sequence[Connection], processes: Sequence[Any], job: Job) -> list[list[Any]]:
    answers: list[list[Any]] = [[] for _ in pipes]
    rank_of, end = {pipe: rank for rank, pipe in enumerate(pipes)}, time.monotonic() + job.limit
    while rank_of and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(rank_of), left):
            rank = rank_of[pipe]  # type: ignore[index]
            try:
                answers[rank].append(pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                answers[rank].append(f"dies: {signal.Signals(-processes[rank].exitcode).name}")
            if len(answers[rank]) == len(job.tasks) or str(answers[rank][-1]).startswith("dies"):
                del rank_of[pipe]  # type: ignore[arg-type]
    for given in answers:
        given += ["hang"] * (len(job.tasks) - len(given))
    return [list(both) for both in zip(*answers, strict=True)]


def worst(answers: Sequence[str]) -> str:
    """One cell for both ranks."""
    order = ("dies", "hang", "WRONG", "error", RIGHT)
    return min(answers, key=lambda a: next((i for i, word in enumerate(order) if a.startswith(word)), len(order)))


def scenario_cells(contender: str, quick: bool) -> dict[str, str]:
    """By scenario what this contender does."""
    if contender != "torch":
        tasks = tuple((name, False) for name in SCENARIOS)
        return {name: worst(both) for (name, _), both in zip(tasks, run(Job(contender, tasks)), strict=True)}
    tasks = tuple((n, clear) for n, s in SCENARIOS.items() if not s.hangs for clear in {False, s.clear})
    found = dict(zip(tasks, map(worst, run(Job(contender, tasks))), strict=True))
    for name, scenario in SCENARIOS.items():
        if scenario.hangs:
            job = Job(contender, ((name, False),), timeout=HANG_S, limit=5 * HANG_S)
            found[name, False] = "(not in a quick run)" if quick else worst(run(job)[0])
        elif found[name, False].startswith("WRONG") and scenario.clear:
            found[name, False] += f"; after zero_grad {found[name, True].removeprefix('WRONG: ')}"
    return {name: found[name, False] for name in SCENARIOS}


def main(argv: list[str] | None = None) -> int:
    """Run everything and print it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer injected failures, and torch where it can't hang")
    args = parser.parse_args(argv)
    importlib.import_module("torch._dynamo")  # DTensor does at first use, which would be in each process anew
    started, right, count = time.monotonic(), 0, 0
    problems: list[str] = []
    print(f"torch {torch.__version__}, gloo, 2 processes\n", flush=True)

    table = {name: scenario_cells(name, args.quick) for name in CONTENDERS}
    print(f"{'':37}{'functional':12}{'facade':12}torch's fully_shard")
    for name in SCENARIOS:
        cells = [table[contender][name] for contender in CONTENDERS]
        print(f"{name:37}{cells[0]:12}{cells[1]:12}{cells[2]}")
        count += 2
        right += cells[:2].count(RIGHT)

    print("\ninjected failures, right / all  (on rank 0, on rank 1, on both)", flush=True)
    for hybrid in (False,) if args.quick else (False, True):
        for contender in ("functional", "facade"):
            ((found, _),) = run(Job(contender, (3 if args.quick else 1,), hybrid=hybrid))
            label = f"{contender}, {'2 x 1 ranks' if hybrid else '2 ranks'}"
            if isinstance(found, str):
                count += 1
                problems.append(f"{label}: {found}")
                continue
            right += sum(t.right for t in found.values())
            count += sum(t.count for t in found.values())
            problems += [f"{label}: {p}" for t in found.values() for p in t.problems]
            print(f"{label:37}" + "   ".join(f"{kind} {t.right}/{t.count}" for kind, t in found.items()), flush=True)
    for problem in problems:
        print(f"NOT RIGHT: {problem}")
    print(f"\n{time.monotonic() - started:.0f} s\nrecovery: {right}/{count}")
    return 0 if right == count else 1


if __name__ == "__main__":
    sys.exit(main())
