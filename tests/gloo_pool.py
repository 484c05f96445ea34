"""Warm sets of gloo worker processes, on which a test runs a function on every rank.

``GlooPool.run(fn, *args, world=2)`` calls ``fn(rank, world, *args)`` in each process of a set whose default process
group has exactly ``world`` ranks. There is one set for each world size. It is started on first use and serves all later
jobs, so a job costs milliseconds, and only the first one pays for the import of torch (the parent never imports it).

A job that fails leaves its set in doubt: a peer may be blocked in a collective, and an unmatched collective spoils the
group for good. Such a set is ended and the next job gets a fresh one, unless the caller promises ``group_intact=True``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

START_LIMIT_S = 90.0
"""How long a fresh set may take to import torch and to join its group."""
GROUP_LIMIT_S = 60.0
#: Process groups that a worker may have made before it is replaced.
GROUPS_LIMIT = 60
"""Timeout of the workers' default process group."""
GRACE_S = 10.0
"""How long the other ranks are awaited once one has failed: they are often blocked on it for good."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank returned no value.

    Attributes:
        rank: the rank it happened on.
        type_name: class name of the exception; ``WorkerDied`` if the process ended; ``NoAnswer`` if the rank was still
            busy or blocked ten seconds after another one had failed.
        ancestry: ``module.qualname`` of the exception's class and of all its bases; empty without an exception.
        message: ``str()`` of the exception.
        traceback: the remote one, with causes and notes; without an exception, faulthandler's stacks of all threads.
    """

    rank: int
    type_name: str
    ancestry: tuple[str, ...]
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe ``error`` in text alone, since not every exception survives pickling."""
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, tuple(map(_name, type(error).__mro__)), str(error), text)

    def is_a(self, error: type[BaseException]) -> bool:
        """Whether the exception was an instance of ``error``."""
        return _name(error) in self.ancestry

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}\n{self.traceback.rstrip()}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job on one rank.

    Attributes:
        rank: the rank.
        value: what the function returned; None if it failed.
        failure: None if it returned.
        group_lost: the rank can serve no further job, since its process or its default group is gone.
    """

    rank: int
    value: Any = None
    failure: Failure | None = None
    group_lost: bool = False


class RemoteError(Exception):
    """A job failed on one rank or more. The text holds each rank's failure with its full remote traceback.

    Attributes:
        failures: all of them, in the order in which they came in: the first is most likely the cause of the others.
        rank: rank of the first failure.
        type_name: class name of the first failure's exception.
    """

    def __init__(self, world: int, failures: list[Failure]) -> None:
        self.failures = failures
        self.rank = failures[0].rank
        self.type_name = failures[0].type_name
        super().__init__("\n\n".join([f"{len(failures)} of {world} ranks failed", *map(str, failures)]))


class GlooPool:
    """Runs module-level functions on all ranks of gloo groups; see the module's text. Not for several threads."""

    def __init__(self) -> None:
        self._sets: dict[int, _WorkerSet] = {}

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60.0, group_intact: bool = False
    ) -> list[Any]:
        """Call ``fn(rank, world, *args)`` on every rank and return the values in rank order.

        Args:
            fn: a module-level function; each worker imports its module.
            args: picklable, the same for every rank.
            world: number of ranks of the default process group.
            timeout: seconds for the whole job, not counting the start of a fresh set.
            group_intact: a promise that a failing rank leaves no collective unmatched, so that the set is kept.

        Raises:
            RemoteError: a rank raised or died; ranks that this left blocked are listed as ``NoAnswer``.
            TimeoutError: no rank failed, but some gave no answer in time. The text has the stacks of those ranks.
        """
        outcomes = self._job(fn, args, world, timeout, group_intact)
        if failures := [outcome.failure for outcome in outcomes if outcome.failure is not None]:
            raise RemoteError(world, failures)
        return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60.0, group_intact: bool = False
    ) -> list[Outcome]:
        """Like ``run``, but return what became of each rank, in rank order, instead of raising ``RemoteError``."""
        outcomes = self._job(fn, args, world, timeout, group_intact)
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def raises(
        self, error: type[BaseException], fn: Callable[..., Any], *args: Any, match: str = "", **options: Any
    ) -> list[Failure]:
        """Assert that EVERY rank raises an ``error`` whose text matches the regex ``match``; return the failures.

        ``options`` are the keyword arguments of ``run``.

        Example:
            gloo.raises(ValueError, build_with_bad_policy, match="mesh has no dim", group_intact=True)
        """
        failures = []
        for outcome in self.outcomes(fn, *args, **options):
            failure = outcome.failure
            assert failure is not None, f"rank {outcome.rank} raised nothing, it returned {outcome.value!r}"
            assert failure.is_a(error), f"expected {_name(error)} on every rank, got {failure}"
            assert re.search(match, failure.message), f"{match!r} isn't in the text of {failure}"
            failures.append(failure)
        return failures

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all workers that the pool holds now, by world size in order of start, then by rank."""
        return tuple(process.pid for workers in self._sets.values() for process in workers.processes)

    def close(self) -> None:
        """End and join all workers. A later job starts fresh ones."""
        while self._sets:
            self._sets.popitem()[1].end()

    def _job(
        self, fn: Callable[..., Any], args: tuple[Any, ...], world: int, timeout: float, group_intact: bool
    ) -> list[Outcome]:
        """Run one job; return the outcomes in order of arrival."""
        job = pickle.dumps((_target(fn), args, timeout))
        workers = self._sets.setdefault(world, _WorkerSet(world))
        keep = False
        try:
            outcomes = workers.call(job, timeout)
            failed = any(outcome.failure is not None for outcome in outcomes)
            keep = not any(outcome.group_lost for outcome in outcomes) and (group_intact or not failed)
        finally:  # also after a KeyboardInterrupt or pytest-timeout's exception: late answers would spoil the next job
            if not keep:
                self._sets.pop(world).end(at_once=True)
        return outcomes


class _WorkerSet:
    """The processes of one group, each with a duplex pipe. A worker ends itself once its pipe has no other end."""

    def __init__(self, world: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._world = world
        self._pipes: list[Connection] = []
        self._directory = ""

    def call(self, job: bytes, limit: float) -> list[Outcome]:
        """Hand ``job`` to every worker, started now if need be, and return the outcomes in order of arrival."""
        if not self.processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead worker: reported when its answer is read
                pipe.send_bytes(job)
        return self._collect(limit)

    def end(self, at_once: bool = False) -> None:
        """End and reap the processes: by closing their pipes, or by a kill ``at_once`` or five seconds later."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if at_once else 5.0)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="gloo-pool-")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        if sys.platform == "linux":
            # The default is the address that the host's name resolves to, and in a container it may resolve to none.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        paths = [os.path.abspath(path) for path in sys.path]
        for rank in range(self._world):
            _stack_file(self._directory, rank).touch()
            ours, theirs = Pipe()
            self._pipes.append(ours)
            call = f"serve({rank}, {self._world}, {self._directory!r}, {theirs.fileno()})"
            code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import serve; {call}"
            with theirs:  # closed here, so that the death of the worker is seen as the end of its pipe
                command = [sys.executable, "-u", "-c", code]
                self.processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
        if failures := [outcome.failure for outcome in self._collect(START_LIMIT_S) if outcome.failure is not None]:
            raise RemoteError(self._world, failures)

    def _collect(self, limit: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        failed = False
        deadline = time.monotonic() + limit
        due: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while due and (ready := wait(list(due), max(0.0, deadline - time.monotonic()))):
            outcomes += (answers := [self._receive(due.pop(pipe)) for pipe in ready])
            if not failed and any(outcome.failure is not None for outcome in answers):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        stuck = sorted(due.values())
        message = "no answer in time" + (", after another rank had failed" if failed else "")
        blocked = [
            Failure(rank, "NoAnswer", (), message, stack)
            for rank, stack in zip(stuck, self._stacks(stuck), strict=True)
        ]
        if stuck and not failed:
            head = f"ranks {stuck} of {self._world} gave no answer within {limit} s"
            raise TimeoutError("\n\n".join([head, *map(str, blocked)]))
        return outcomes + [Outcome(failure.rank, failure=failure, group_lost=True) for failure in blocked]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            message = f"the process ended with exit code {self.processes[rank].wait(5.0)} during this job or before it"
            failure = Failure(rank, "WorkerDied", (), message, _stack_file(self._directory, rank).read_text())
            return Outcome(rank, failure=failure, group_lost=True)
        outcome: Outcome = pickle.loads(answer)
        return outcome

    def _stacks(self, ranks: list[int]) -> list[str]:
        """The stacks of all threads of ``ranks``, written by faulthandler: also from within a blocked C call."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGUSR1)
        texts = ["" for _ in ranks]
        for _ in range(20 if ranks else 0):
            time.sleep(0.1)
            before, texts = texts, [_stack_file(self._directory, rank).read_text() for rank in ranks]
            if all(texts) and texts == before:
                break
        return texts


def serve(rank: int, world: int, directory: str, descriptor: int) -> NoReturn:
    """Body of a worker: join the group, then answer one job after the other until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    pipe = Connection(descriptor)
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs, directory), daemon=True).start()
    with _stack_file(directory, rank).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)

        import torch.distributed as dist

        limit = timedelta(seconds=GROUP_LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world, timeout=limit
        )
        pipe.send_bytes(pickle.dumps(Outcome(rank)))
        modules = 0
        while True:
            gc.collect()
            if len(sys.modules) > modules:  # spare later collections the scan of all that was imported: some 50 ms
                gc.freeze()
                modules = len(sys.modules)
            pipe.send_bytes(_answer(rank, world, jobs.get(), stacks))


def _read_jobs(pipe: Connection, jobs: SimpleQueue[bytes], directory: str) -> None:
    """Queue the parent's jobs; end the process with the parent, also in the middle of a blocked collective."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(pipe.recv_bytes())
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _answer(rank: int, world: int, job: bytes, stacks: TextIO) -> bytes:
    """Do ``job`` and pickle its outcome; not through ``Connection.send``, which puts tensors into shared memory."""
    import torch.distributed as dist

    group = dist.group.WORLD
    try:
        target, args, limit = pickle.loads(job)
        # A job that holds the GIL for ever would outlive the parent: no thread of ours runs then, but this timer does.
        faulthandler.dump_traceback_later(limit + 30.0, exit=True, file=stacks)
        _reset_globals()
        value = _resolve(target)(rank, world, *args)
        return pickle.dumps(Outcome(rank, value, group_lost=_lost(group)))
    except BaseException as error:
        return pickle.dumps(Outcome(rank, failure=Failure.of(rank, error), group_lost=_lost(group)))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _lost(group: Any) -> bool:
    """Whether the next job needs other processes: the job has ended the default group, or earlier ones have left many
    groups behind. Each has threads of its own, which wake up now and then; and torch's caches hold on to meshes, so
    that a group can't be ended safely."""
    import torch.distributed as dist

    return dist.group.WORLD is not group or len(dist.distributed_c10d._world.pg_map) > GROUPS_LIMIT


def _reset_globals() -> None:
    """Undo what an earlier job may have left behind. The seed is 0 on every rank."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # asked first, since the setter imports torch's compiler
        torch.use_deterministic_algorithms(False)


def _target(fn: Callable[..., Any]) -> str:
    """Name ``fn`` as ``module:qualname``; refuse what a worker couldn't find under that name."""
    target = f"{fn.__module__}:{fn.__qualname__}"
    if fn.__module__ == "__main__" or "<locals>" in target or _resolve(target) is not fn:
        raise ValueError(f"{target} can't be imported by a worker: define the function at the top level of a module")
    return target


def _resolve(target: str) -> Any:
    module, qualname = target.split(":")
    return attrgetter(qualname)(importlib.import_module(module))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory, f"stacks-{rank}.txt")
