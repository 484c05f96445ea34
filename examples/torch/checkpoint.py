"""Checkpoints of `train_gpt.py`: one file a process, and a pointer that moves only when all of them are complete.

    <out>/checkpoint/latest.json     which folder is valid; step, options and losses so far
    <out>/checkpoint/a/rank-0.pt     rows of the parameters and optimizer state of process 0
    <out>/checkpoint/b/...           the other folder: the next save writes to the one that isn't valid

So a run that is killed at any moment leaves the last complete checkpoint valid. Nothing random is saved: batches are a
function of the seed and the step. Both APIs write the same files, by parameter name, so either continues the other's.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from options import Options, Refused, World
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hsdp_fn import HSDPState, load_masters

FORMAT = 2


@dataclass(slots=True)
class History:
    """Losses so far, in nats for each byte, equal on all processes.

    Attributes:
        train: mean over all processes and microbatches, one for each step.
        valid: (steps done, validation loss).
    """

    train: list[float] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Saved:
    """What one process needs to continue.

    Attributes:
        step: optimizer steps done.
        history: of these steps.
        rows: this process's rows of every parameter, on the CPU.
        optimizer: by parameter name, what its optimizer keeps for these rows.
    """

    step: int
    history: History
    rows: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]

    def restore(self, state: HSDPState) -> HSDPState:
        """The state with these masters and this step. Build the optimizer over it afterwards."""
        return load_masters(state, self.rows, step=self.step)

    @torch.no_grad()
    def restore_parameters(self, params: Mapping[str, nn.Parameter]) -> None:
        """Copy the rows into parameters that are DTensors."""
        for name, param in params.items():
            param.copy_(_like(param, self.rows[name].to(param.device)))

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        """Continue an optimizer that was built over ``params.values()``."""
        state = {
            at: {key: _like(params[name], value) for key, value in self.optimizer[name].items()}
            for at, name in enumerate(params)
            if name in self.optimizer
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


class Checkpoints:
    """The checkpoints of one run.

    Args:
        out: the run's folder.
        options: whose decisive part a checkpoint must match.
        corpus: digest of the text, likewise.
        world: this process; it reads and writes its own file, process 0 also the pointer.
    """

    def __init__(self, out: Path, options: Options, corpus: str, world: World) -> None:
        self.folder = out / "checkpoint"
        self._world = world
        self._facts = {"format": FORMAT, **options.decisive(), "corpus": corpus}
        self._shape = {"processes": world.size, "mesh": options.mesh_name}
        self._where = f"the checkpoint in {out}"
        pointer = self._pointer()
        self._next = "b" if pointer is not None and pointer.get("folder") == "a" else "a"

    @property
    def _latest(self) -> Path:
        return self.folder / "latest.json"

    def _pointer(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._latest.read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def read(self) -> Saved:
        """This process's part of the newest checkpoint. Does not communicate.

        Raises:
            Refused: there is none, it is damaged, or it belongs to other options or another number of processes.
        """
        pointer = self._pointer()
        if pointer is None:
            state = "can't be read" if self._latest.exists() else "doesn't exist"
            raise Refused(f"--resume: {self._where} {state} ({self._latest}); leave out --resume to start anew")
        self._check(pointer)
        path = self.folder / pointer["folder"] / f"rank-{self._world.rank}.pt"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Refused(f"--resume: {path} can't be read: {reason}") from error
        if content["step"] != pointer["step"]:
            raise Refused(f"--resume: {path} is of step {content['step']}, but latest.json says {pointer['step']}")
        history = History(pointer["train"], [(int(step), loss) for step, loss in pointer["valid"]])
        return Saved(pointer["step"], history, content["masters"], content["optimizer"])

    def _check(self, pointer: Mapping[str, Any]) -> None:
        shape = {name: pointer.get(name) for name in self._shape}
        if shape != self._shape:
            raise Refused(
                f"--resume: {self._where} was written by {shape['processes']} processes (mesh {shape['mesh']}), but "
                f"this run has {self._shape['processes']} (mesh {self._shape['mesh']}); each reads only its own rows"
            )
        facts = pointer.get("facts", {})
        other = [name for name, value in self._facts.items() if facts.get(name) != value]
        if other:
            found = "; ".join(f"{name} is {facts.get(name)} there, {self._facts[name]} here" for name in other)
            raise Refused(f"--resume: {self._where} is of another configuration: {found}")

    def save(
        self, step: int, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, history: History
    ) -> None:
        """Write a checkpoint between two steps. Communicates: one barrier over all processes.

        Args:
            step: optimizer steps done.
            params: this process's rows, or DTensors of them, by name; `optimizer` is over these.
        """
        folder = self.folder / self._next
        folder.mkdir(parents=True, exist_ok=True)
        kept = {
            name: {key: _own(value) for key, value in optimizer.state[param].items()}
            for name, param in params.items()
            if param in optimizer.state
        }
        content = {"step": step, "masters": {name: _own(p) for name, p in params.items()}, "optimizer": kept}
        _write(folder / f"rank-{self._world.rank}.pt", lambda file: torch.save(content, file))
        dist.barrier()
        if self._world.rank == 0:
            pointer = {
                "folder": self._next,
                "step": step,
                **self._shape,
                "facts": self._facts,
                "train": history.train,
                "valid": history.valid,
            }
            _write(self._latest, lambda file: file.write(json.dumps(pointer, indent=1).encode()))
        # Process 0 moves the pointer before it joins any later collective, so no other process can come to overwrite
        # the folder that was valid until now while it still is.
        self._next = "b" if self._next == "a" else "a"


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own(value: Any) -> Any:
    """A tensor's local part on the CPU, with memory of its own."""
    return local(value.detach()).cpu().clone() if isinstance(value, Tensor) else value


def _like(param: nn.Parameter, value: Any) -> Any:
    """Rows as `param` has them: as a DTensor where it is one. Other values, such as step counts, themselves."""
    if not (isinstance(param, DTensor) and isinstance(value, Tensor) and value.shape == param.to_local().shape):
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file as a whole: after a crash it has the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
