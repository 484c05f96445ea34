"""Warm sets of MindSpore worker processes: `GlooPool` with ``mccl`` groups, and the decorator that tests use.

A set is started on first use (some ten seconds: the import, and joining through a store) and serves all later jobs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

from tests.gloo_pool import Failure, GlooPool, Outcome, RemoteError, _read_jobs, _resolve, _stack_file, _WorkerSet

START_LIMIT_S = 200.0
"""How long a fresh set may take to import MindSpore and to join its group."""


def on_ranks(
    *worlds: int, blocking: bool = True, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a pytest test whose body runs as ``body(rank, world, ...)`` on every rank of ``mccl`` groups of these sizes;
    further parameters are the test's own.

    Args:
        blocking: operators run in the calling thread, which on few cores is many times faster; else in MindSpore's own
            threads, as it does unless told otherwise.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)[2:]

        def test(mccl: Any, **given: Any) -> None:
            for world in worlds:
                pool = mccl if blocking else mccl.own_threads
                pool.run(body, *[given[name] for name in names], world=world, **{"timeout": 300.0, **options})

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("mccl", *names)]
        test.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        body.__qualname__ = f"body_of_{body.__name__}"
        body.__globals__[body.__qualname__] = body
        return test

    return decorate


class MsPool(GlooPool):
    """Runs module-level functions on all ranks of ``mccl`` groups; see `GlooPool`.

    Args:
        blocking: see `on_ranks`.
    """

    def __init__(self, *, blocking: bool = True) -> None:
        super().__init__()
        self._blocking = blocking
        if blocking:
            self.own_threads = MsPool(blocking=False)

    def close(self) -> None:
        """See `GlooPool.close`."""
        super().close()
        if self._blocking:
            self.own_threads.close()

    def _job(
        self, fn: Callable[..., Any], args: tuple[Any, ...], world: int, timeout: float, group_intact: bool
    ) -> list[Outcome]:
        if world not in self._sets:
            self._sets[world] = _MsWorkers(world, blocking=self._blocking)
        return super()._job(fn, args, world, timeout, group_intact)


class _MsWorkers(_WorkerSet):
    def __init__(self, world: int, *, blocking: bool) -> None:
        self._blocking = blocking and not os.environ.get("HSDP_MS_ASYNC")
        super().__init__(world)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="mccl-pool-")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        paths = [os.path.abspath(path) for path in sys.path]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self._world):
            _stack_file(self._directory, rank).touch()
            ours, theirs = Pipe()
            self._pipes.append(ours)
            call = f"serve({rank}, {self._world}, {port}, {self._directory!r}, {theirs.fileno()}, {self._blocking})"
            code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import serve; {call}"
            with theirs:  # closed here, so that the death of the worker is seen as the end of its pipe
                command = [sys.executable, "-u", "-c", code]
                self.processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
        if failures := [o.failure for o in self._collect(START_LIMIT_S) if o.failure is not None]:
            raise RemoteError(self._world, failures)


def serve(rank: int, world: int, port: int, directory: str, descriptor: int, blocking: bool) -> NoReturn:
    """Body of a worker: join the group, then answer one job after the other until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    pipe = Connection(descriptor)
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs, directory), daemon=True).start()
    with _stack_file(directory, rank).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            import mindspore

            import hsdp_fn_ms

            if blocking:
                mindspore.runtime.launch_blocking()
            hsdp_fn_ms.init_process_group(rank=rank, world_size=world, address=f"127.0.0.1:{port}", timeout=180.0)
            pipe.send_bytes(pickle.dumps(Outcome(rank)))
        except BaseException as error:
            pipe.send_bytes(pickle.dumps(Outcome(rank, failure=Failure.of(rank, error), group_lost=True)))
            os._exit(1)
        while True:
            gc.collect()
            pipe.send_bytes(_answer(rank, world, jobs.get(), stacks))


def _answer(rank: int, world: int, job: bytes, stacks: TextIO) -> bytes:
    """Do ``job`` and pickle its outcome. The seed is 0 on every rank."""
    import mindspore
    import numpy

    try:
        target, args, limit = pickle.loads(job)
        faulthandler.dump_traceback_later(limit + 30.0, exit=True, file=stacks)
        random.seed(0)
        numpy.random.seed(0)
        mindspore.set_seed(0)
        value = _resolve(target)(rank, world, *args)
        return pickle.dumps(Outcome(rank, value))
    except BaseException as error:
        return pickle.dumps(Outcome(rank, failure=Failure.of(rank, error)))
    finally:
        with contextlib.suppress(Exception):
            from mindspore.graph.api import _pynative_executor

            from hsdp_fn_ms import compat
            from hsdp_fn_ms.probe import settle

            compat._enabled = False  # each job is as if it were alone in the process
            _pynative_executor.set_grad_flag(False)
            settle()  # a late error of this job mustn't meet the next one
        faulthandler.cancel_dump_traceback_later()
