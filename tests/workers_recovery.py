"""What the tests of `recoverable` share: faults at every place of an attempt, and what must be so afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp_fn_torch as ht
from hsdp_fn import HSDPState, PeerFailed, Sync, clone, grads
from hsdp_fn.schedule import Log
from hsdp_fn_torch import TorchBackend, recoverable
from tests.live_bytes import LiveBytes
from tests.workers_facade import Boom, data, mean_square
from tests.workers_torch import equal, snapshot

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
WHO = ("the first rank", "the last rank", "all ranks", "all ranks, each elsewhere")


class _Passing(torch.autograd.Function):
    """Identity whose backward comes by a place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, name: str) -> Tensor:
        ctx.places, ctx.name = places, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.places.come(ctx.name)
        return grad, None, None


class Places:
    """Counts the places that the code inside `armed` comes by, and raises `Boom` at the one that is asked for: before
    and after each collective, before and after each wait, before and after each module's forward, in its backward.

    Args:
        model: whose modules' calls are places.

    Attributes:
        names: of the places that were come by the last time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._at: int | None = None
        self.names: list[str] = []

    def come(self, name: str) -> None:
        """By one more place."""
        self.names.append(name)
        if len(self.names) - 1 == self._at:
            raise Boom(self.text(self._at))

    def text(self, at: int, names: Sequence[str] | None = None) -> str:
        """What the exception at a place says."""
        return f"{(names or self.names)[at]}, place {at}"

    @contextlib.contextmanager
    def armed(self, at: int | None = None) -> Iterator[None]:
        """Inside, raise at this place; None: only count."""
        self._at, self.names = at, []
        with contextlib.ExitStack() as stack:
            for op in COLLECTIVES:
                self._patch(stack, TorchBackend, op, before=f"before {op}")
            self._patch(stack, TorchBackend, "wait", before="before wait", after="after wait")
            append = Log.append

            def issued(log: Log, collective: Any) -> None:
                append(log, collective)
                self.come(f"after {collective.op}")

            stack.callback(setattr, Log, "append", append)
            Log.append = issued
            for name, module in self._model.named_modules():
                if not isinstance(module, nn.ModuleList):
                    self._hook(stack, name, module)
            yield

    def _patch(self, stack: contextlib.ExitStack, owner: type, name: str, *, before: str, after: str = "") -> None:
        original = getattr(owner, name)

        def patched(*args: Any) -> Any:
            self.come(before)
            out = original(*args)
            if after:
                self.come(after)
            return out

        stack.callback(setattr, owner, name, original)
        setattr(owner, name, patched)

    def _hook(self, stack: contextlib.ExitStack, name: str, module: nn.Module) -> None:
        def pre(*_: Any) -> None:
            self.come(f"before {name!r}")

        def post(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.come(f"after {name!r}")
            return _Passing.apply(out, self, f"backward of {name!r}")

        stack.callback(module.register_forward_pre_hook(pre).remove)
        stack.callback(module.register_forward_hook(post).remove)


# ------------------------------------------------------------------------------------------------- what is attempted


class Functional:
    """A microbatch by `value_and_grad` on a state that holds an earlier one.

    Args:
        sync: of both.
        finish: take the gradients inside the attempt, which waits for the last reductions.
    """

    def __init__(
        self, model: nn.Module, state: HSDPState, rank: int, sync: Sync = Sync.FULL, finish: bool = False
    ) -> None:
        self.model, self.rank, self.sync, self.finish = model, rank, sync, finish
        self._step = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).float().square().mean())
        (_, _), self.target = self._step(state, data(rank, 0), sync=sync)
        if sync is Sync.FULL:  # nothing is in flight: the state can be cloned
            self.target, _ = grads(self.target)

    def body(self, attempt: Any) -> None:
        (_, _), attempt.state = self._step(attempt.state, data(self.rank, 1), sync=self.sync)
        if self.finish:
            attempt.state, _ = grads(attempt.state)

    def clean(self) -> list[Tensor | None]:
        """What the microbatch gives without `recoverable`; the target stays."""
        (_, _), state = self._step(clone(self.target), data(self.rank, 1), sync=self.sync)
        rows: dict[str, Tensor | None] = {}
        if self.sync is Sync.FULL:
            state, rows = grads(state)
        return [*rows.values(), *optree.tree_leaves(state, namespace="hsdp_fn")]

    def succeed(self) -> None:
        """An attempt without a fault, on a copy."""
        with recoverable(clone(self.target)) as attempt:
            self.body(attempt)

    def look(self) -> Any:
        tables = {id(m): dict(m._parameters) for m in self.model.modules()}
        return snapshot(self.target), {n: (id(p), p.detach().clone()) for n, p in self.model.named_parameters()}, tables

    def require_untouched(self, attempt: Any, before: Any, what: str) -> None:
        assert attempt.state is self.target, what
        require_same_state(self.target, before[0], what)
        for name, p in self.model.named_parameters():
            assert id(p) == before[1][name][0], f"{what}: another tensor stands at {name}"
            require_equal([p.detach()], [before[1][name][1]], f"{what}: {name}")
        assert all(dict(m._parameters) == before[2][id(m)] for m in self.model.modules()), what

    def tensors(self) -> list[Any]:
        return [*self.model.parameters(), *optree.tree_leaves(self.target, namespace="hsdp_fn")]


class Facade:
    """A microbatch through `fully_shard`'s module, which has ``.grad`` of one and holds back another.

    Args:
        sync: of the one that is held back, and of that which is attempted.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        sync: Sync = Sync.FULL,
        loss: Callable[[nn.Module, Tensor], Tensor] = mean_square,
    ) -> None:
        self.model = self.target = model
        self.rank, self.sync, self.loss = rank, sync, loss
        self._begin()

    def _begin(self) -> None:
        set_sync(self.model, Sync.FULL)
        self.model.reset_iter_state()
        self.model.zero_grad()
        self.loss(self.model, data(self.rank, 0)).backward()
        if self.sync is not Sync.FULL:
            set_sync(self.model, self.sync)
            self.loss(self.model, data(self.rank, 1)).backward()
        self._grads = {p: p.grad for p in self.model.parameters()}

    def body(self, attempt: Any) -> None:
        self.loss(self.model, data(self.rank, 2)).backward()

    def clean(self) -> list[Tensor | None]:
        """What the microbatch gives without `recoverable`; then go back to where it began."""
        kept = [None if p.grad is None else local(p.grad).clone() for p in self.model.parameters()]
        self.loss(self.model, data(self.rank, 2)).backward()
        found = [None if p.grad is None else local(p.grad).clone() for p in self.model.parameters()]
        found += [t.clone() for t in optree.tree_leaves(self.model.hsdp_state, namespace="hsdp_fn")]
        if self.sync is Sync.FULL:
            for p, grad in zip(self.model.parameters(), kept, strict=True):
                if grad is not None:
                    local(p.grad).copy_(grad)
        else:
            self._begin()
        return found

    def succeed(self) -> None:
        """An attempt without a fault; then go back to where it began."""
        with recoverable(self.target) as attempt:
            self.body(attempt)
        self._begin()

    def look(self) -> Any:
        grads_ = [(p.grad, None if p.grad is None else local(p.grad).clone()) for p in self.model.parameters()]
        return snapshot(self.model.hsdp_state), {id(m): dict(m._parameters) for m in self.model.modules()}, grads_

    def require_untouched(self, attempt: Any, before: Any, what: str) -> None:
        for m in self.model.modules():
            now, then = m._parameters, before[1][id(m)]
            assert now.keys() == then.keys(), what
            assert all(now[k] is then[k] and hasattr(then[k], "placements") for k in then), f"{what}: other parameters"
        # The ledger may begin anew: an attempt begins with taking in what has changed since the last microbatch.
        require_same_state(self.model.hsdp_state, before[0], what, ledger=False)
        for p, (grad, value) in zip(self.model.parameters(), before[2], strict=True):
            assert p.grad is grad, what
            require_equal([None if grad is None else local(grad)], [value], f"{what}: .grad")

    def tensors(self) -> list[Any]:
        found = [local(t) for p in self.model.parameters() for t in (p, p.grad) if t is not None]
        return found + optree.tree_leaves(self.model.hsdp_state, namespace="hsdp_fn")


def require_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    """The same bits. (`torch.testing` takes longer than a whole attempt; it only says what differs.)"""
    same = len(found) == len(expected) and all(
        a is b or (a is not None and b is not None and a.dtype == b.dtype and (a.is_meta or torch.equal(a, b)))
        for a, b in zip(found, expected, strict=True)
    )
    if not same:
        equal(list(found), list(expected), what)
        raise AssertionError(what)


def require_same_state(state: HSDPState, before: tuple[Any, ...], what: str, *, ledger: bool = True) -> None:
    """`assert_untouched`, by `require_equal`."""
    state.token.require("require_same_state")
    after = snapshot(state)
    assert after[0] == before[0], f"{what}: {before[0]} -> {after[0]}"
    assert after[2:5] == before[2:5], f"{what}: {before[2:5]} -> {after[2:5]}"
    assert not ledger or after[5] == before[5], f"{what}: {before[5]} -> {after[5]}"
    require_equal(after[1], before[1], what)


def local(tensor: Any) -> Tensor:
    """A DTensor's own rows."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def set_sync(model: nn.Module, sync: Sync) -> None:
    """`Sync` by the facade's setters."""
    model.set_requires_gradient_sync(sync is not Sync.NONE)
    if sync is not Sync.NONE:
        model.set_requires_all_reduce(sync is Sync.FULL)


# ------------------------------------------------------------------------------------------------------------- faults


def sweep(
    rank: int, world: int, subject: Functional | Facade, *, who: Sequence[int] | None = None, learn: bool = False
) -> Counter[str]:
    """A fault at every place of an attempt, and after each the checks of `one_fault`.

    Args:
        who: which of `WHO` fail, for each place; None: one after the other, from place to place.
        learn: let an attempt succeed first, as `expected_comm` doesn't know what it issues.

    Returns:
        How many faults were injected, by kind of place.
    """
    places = Places(subject.model)
    if learn:
        subject.succeed()
    expected = subject.clean()
    names = names_of(subject, places)
    injected: Counter[str] = Counter()
    gc.collect()
    gc.freeze()  # so that each of the many collections below is short
    with LiveBytes(subject.tensors()) as live:
        for k in range(len(names)):
            for mode in who if who is not None else (k % len(WHO),):
                one_fault(rank, world, subject, places, names, k, mode, expected, live)
                injected[names[k].split(" '")[0]] += 1
    return injected


def names_of(subject: Functional | Facade, places: Places) -> list[str]:
    """The places of an attempt without a fault, the same on all ranks, that leaves the target as it was."""
    done = RuntimeError("enough seen")
    try:
        with recoverable(subject.target) as attempt, places.armed():
            subject.body(attempt)
            names = list(places.names)
            raise done
    except RuntimeError as error:
        if error is not done:
            raise
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, names)
    assert answers == [names] * len(answers)
    return names


def one_fault(
    rank: int,
    world: int,
    subject: Functional | Facade,
    places: Places,
    names: Sequence[str],
    k: int,
    mode: int,
    expected: Sequence[Tensor | None],
    live: LiveBytes,
) -> None:
    """Attempt, with a fault at place ``k``: failed ranks have their own exception, the others `PeerFailed` with what
    these met; everything is as before; then a microbatch gives the same bits as ever."""
    failing = ((0,), (world - 1,), range(world), range(world))[mode]
    at = {r: (k + 7 * r if mode == 3 else k) % len(names) for r in failing}
    what = f"{WHO[mode]}: {places.text(k, names)}"
    # What is ready when a backward raises stays in the engine's queue until a node made earlier is differentiated.
    older = torch.zeros((), requires_grad=True).neg()
    live.watch(subject.tensors())
    bytes_before = live.now
    before = subject.look()
    attempt: Any = None
    try:
        with recoverable(subject.target) as attempt, places.armed(at.get(rank)):
            subject.body(attempt)
        raise AssertionError(f"{what}: nobody failed")
    except Boom as error:
        assert str(error) == places.text(at[rank], names), what
        assert not getattr(error, "__notes__", ()), f"{what}: {error.__notes__}"
        assert rank in at, what
    except PeerFailed as error:
        assert rank not in at, f"{what}: {error}"
        assert error.ranks == tuple(at), f"{what}: {error}"
        assert error.reasons == {r: f"Boom: {places.text(i, names)}" for r, i in at.items()}, f"{what}: {error}"
    assert attempt.committed is False, what
    subject.require_untouched(attempt, before, what)
    attempt = before = None
    older.backward()
    del older
    require_at_rest(live, bytes_before, what)
    require_equal(subject.clean(), expected, what)


def require_at_rest(live: LiveBytes, at_most: int, what: str) -> None:
    """No more bytes are alive than before, once cycles are gone and threads of the process group have let go."""
    for _ in range(100):
        if live.now <= at_most + 8:  # a frame at rest has a scalar
            return
        gc.collect()
        time.sleep(0.01)
    raise AssertionError(f"{what}: {live.now} live bytes, {at_most} before")


# ------------------------------------------------------------------------------- processes that a fault may cost


def sacrificed(
    scenario: Callable[[int, int], Any], world: int = 2, *, kills: Sequence[int] = (), limit: float = 60.0
) -> list[tuple[int, str]]:
    """Run ``scenario(rank, world)`` in processes of a gloo group of their own, as the group may be lost.

    Args:
        kills: ranks that are expected to kill themselves.
        limit: seconds for everything; processes that are left then are killed and count as hung.

    Returns:
        Exit status (negative: the signal) and output of each rank, whose last line is what the scenario returned.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    names = f"{scenario.__module__}, {scenario.__qualname__!r}"
    code = f"import sys; sys.path[:] = {paths!r}; import {scenario.__module__}; "
    code += f"from {__name__} import fork_ranks; fork_ranks({names}, {world}, sys.argv[1])"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", code, directory]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired as error:
            outputs = [p.read_text() for p in sorted(Path(directory).glob("output-*"))]
            raise AssertionError("\n".join([f"ranks hang after {limit} s", *outputs])) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks are in its group
            process.wait()
        statuses = [int(s) for s in Path(directory, "statuses").read_text().split()]
        outputs = [Path(directory, f"output-{r}").read_text() for r in range(world)]
    for rank, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
        assert rank in kills or status == 0, f"rank {rank} ended with {status}:\n{output}"
    return list(zip(statuses, outputs, strict=True))


def fork_ranks(module: Any, name: str, world: int, directory: str) -> None:
    """Body of the process that `sacrificed` starts: one import of torch for all ranks."""
    torch.set_num_threads(1)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(getattr(module, name), rank, world, directory)
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(directory, "statuses").write_text(" ".join(map(str, statuses)))


def _be_rank(scenario: Callable[[int, int], Any], rank: int, world: int, directory: str) -> None:
    status = 1
    with open(os.path.join(directory, f"output-{rank}"), "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{directory}/store",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=120),
            )
            print(scenario(rank, world), file=output)
            status = 0
        except BaseException:
            traceback.print_exc(file=output)
    os._exit(status)  # not through destructors: they may wait for a lost group


@contextlib.contextmanager
def within(seconds: float, at_least: float = 0.0) -> Iterator[None]:
    """The code inside takes between these times."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert at_least <= took <= seconds, f"took {took:.1f} s, expected {at_least} to {seconds} s"
