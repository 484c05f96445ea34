"""A process is lost in the middle of a step; torchrun starts all anew, and they go on from the last checkpoint.

The processes run this file as a script, with a folder as its argument. They train a model with each API. Every step
writes a checkpoint of its own, and ``<folder>/latest`` names the newest complete one. In the first life the last rank
kills itself in the middle of a step: the one model has made it, the other one is in backward.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import hsdp_fn_torch as ht
from hsdp_fn import load_masters, masters
from tests.workers_facade import OURS, adamw, chain, data, mean_square, shard_blocks
from tests.workers_recovery import local, within
from tests.workers_torch import LAYERS, equal, fsdp_mesh

ROOT = Path(__file__).resolve().parents[1]
STEPS, LOST_IN = 5, 3  # the step in which a process is lost has this number; so many are in the checkpoint then
LIMIT = 150.0  # seconds for a run with two lives; about 15 are needed on an idle machine
NOTICED = 30.0  # seconds after which a rank must have noticed that another one is lost

pytestmark = pytest.mark.timeout(2 * LIMIT)


class Facade:
    """Training with `fully_shard`; checkpoints by ``torch.distributed.checkpoint``."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.model = rank, shard_blocks(OURS, chain(depth=2), fsdp_mesh(world))
        self.optimizer = adamw(list(self.model.parameters()))

    def step(self, number: int) -> None:
        mean_square(self.model, data(self.rank, number)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        optimizer = ht.get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": ht.get_model_state_dict(self.model), "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.parts(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp.load(parts := self.parts(), checkpoint_id=folder)
        ht.set_model_state_dict(self.model, parts["model"])
        ht.set_optimizer_state_dict(self.model, self.optimizer, parts["optimizer"])

    def rows(self) -> list[Any]:
        """This rank's rows of the parameters, and what the optimizer keeps for each."""
        return [
            (local(p.detach()).clone(), {key: local(value).clone() for key, value in self.optimizer.state[p].items()})
            for p in self.model.parameters()
        ]


class Functional:
    """Training with an explicit state; each rank saves its own rows."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.model = rank, chain(depth=2)
        self.state = ht.shard_module(self.model, fsdp_mesh(world), LAYERS[:2])
        self._step = ht.value_and_grad(lambda p, x: ht.functional_call(self.model, p, x).square().mean())
        self._own()

    def _own(self) -> None:
        self.params = ht.shard_parameters(self.state)
        self.optimizer = adamw(list(self.params.values()))

    def step(self, number: int) -> None:
        (_, _), self.state = self._step(self.state, data(self.rank, number))
        self.state, _ = ht.optimizer_step(self.state, self.optimizer, self.params)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": self.state.step, "rows": masters(self.state), "optimizer": self.optimizer.state_dict()}
        torch.save(content, folder / f"rank-{self.rank}.pt")

    def load(self, folder: Path) -> None:
        content = torch.load(folder / f"rank-{self.rank}.pt")
        self.state = load_masters(self.state, content["rows"], step=content["step"])
        self._own()
        self.optimizer.load_state_dict(content["optimizer"])

    def rows(self) -> list[Any]:
        return [(p.detach().clone(), dict(self.optimizer.state[p])) for p in self.params.values()]


TRAINERS = {"functional": Functional, "facade": Facade}


def make_trainers(rank: int, world: int) -> dict[str, Any]:
    return {name: make(rank, world) for name, make in TRAINERS.items()}


# ------------------------------------------------------------------------------------------------------- the script


def main(folder: Path) -> None:
    """One life of one process."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life == 0:  # so that an error can be told from torchrun's signal to stop
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    rank, world = dist.get_rank(), dist.get_world_size()
    with (folder / "lives").open("a") as lives:
        lives.write(f"{life} {rank} {os.getpid()}\n")
    trainers, done, latest = make_trainers(rank, world), 0, folder / "latest"
    if latest.exists():
        done = int(latest.read_text())
        for name, trainer in trainers.items():
            trainer.load(folder / f"{name}-{done}")
        (folder / f"loaded-{rank}").write_text(f"life {life}, step {done}")
    for number in range(done, STEPS):
        if (life, number, rank) == (0, LOST_IN, world - 1):
            layer = trainers["facade"].model.layers[0]
            layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            with within(NOTICED):
                for trainer in trainers.values():
                    trainer.step(number)
        except RuntimeError as error:
            (folder / f"noticed-{rank}").write_text(f"life {life}, step {number}: {error}")
            raise
        for name, trainer in trainers.items():
            trainer.save(folder / f"{name}-{number + 1}")
        dist.barrier()
        if rank == 0:
            (folder / "next").write_text(str(number + 1))
            (folder / "next").replace(latest)
    torch.save([trainer.rows() for trainer in trainers.values()], folder / f"rows-{rank}.pt")
    dist.destroy_process_group()


def _end_with(parent: int) -> None:
    """A worker doesn't outlive torchrun."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


# -------------------------------------------------------------------------------------------------------- the tests


def torchrun(folder: Path) -> tuple[int, str]:
    """Run the script on two processes: exit status and output. Nothing of it is left afterwards."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    # Otherwise all lives share one store, in which a restarted process finds the addresses of the first life's.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH", "")) if p)
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, *launcher, "--module", "tests.test_restart", str(folder)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(LIMIT)
        finally:
            process.kill()  # its workers see to themselves
            process.wait()
    return process.returncode, (folder / "output").read_text()


def lives(folder: Path) -> list[tuple[int, int, int]]:
    """Life, rank and process id of each process that ran."""
    return sorted(tuple(map(int, line.split())) for line in (folder / "lives").read_text().splitlines())


def require_gone(pids: list[int]) -> None:
    """No such process is left, or is soon."""
    deadline = time.monotonic() + 5.0
    while pids:
        for pid in list(pids):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                pids.remove(pid)
        assert time.monotonic() < deadline, f"processes {pids} are left"
        time.sleep(0.05)


def uninterrupted(rank: int, world: int) -> list[Any]:
    trainers = make_trainers(rank, world).values()
    for number in range(STEPS):
        for trainer in trainers:
            trainer.step(number)
    return [trainer.rows() for trainer in trainers]


def test_a_run_that_loses_a_process_ends_like_one_that_does_not(gloo, tmp_path):
    """The same bits of parameters and optimizers; the other process had noticed by itself, with an error."""
    code, output = torchrun(tmp_path)
    assert code == 0, output
    assert [(life, rank) for life, rank, _ in lives(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)], output
    assert [p.name for p in tmp_path.glob("noticed-*")] == ["noticed-0"], output
    assert (tmp_path / "noticed-0").read_text().startswith(f"life 0, step {LOST_IN}: ")
    for rank, expected in enumerate(gloo.run(uninterrupted)):
        assert (tmp_path / f"loaded-{rank}").read_text() == f"life 1, step {LOST_IN}"
        equal(torch.load(tmp_path / f"rows-{rank}.pt"), expected, f"rank {rank}")
        assert all(slots["step"] == STEPS for rows in expected for _, slots in rows)
    require_gone([pid for _, _, pid in lives(tmp_path)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
