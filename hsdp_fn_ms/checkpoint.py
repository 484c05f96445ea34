"""Saving and loading: each rank its own rows, in safetensors files that torch reads too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.np_dtype import bfloat16

from hsdp_fn import HSDPState, Layout, LayoutError, ParamPhase, load_masters, masters
from hsdp_fn.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    Match,
    Part,
    parts_of,
    read_part,
    require_same,
    sync_directory,
    together,
    unfinished,
    write,
)
from hsdp_fn.lifecycle import Op, check
from hsdp_fn.safetensors import FileWriter, Piece, Raw, Stored

from .backend import MSBackend, ms_backend
from .binding import parameter_places
from .roots import names_of, root_tree
from .slots import Slots, optimizer_slots, rows_to_step
from .state_dict import whole_masters

S = TypeVar("S", HSDPState, nn.Cell)

#: What MindSpore's own cells call otherwise than torch's modules do.
_TORCH_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "embedding_table": "weight",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found besides the values.

    Attributes:
        step: of the state that was saved; None where the checkpoint doesn't say (others have written it).
        extra: as it was given to `save_checkpoint`; empty where there was none.
        missing: with ``strict=False``, names that the checkpoint doesn't have: these values stayed.
        unexpected: with ``strict=False``, names that only the checkpoint has.
    """

    step: int | None
    extra: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save_checkpoint(
    path: str | PathLike[str],
    target: HSDPState | nn.Cell,
    *,
    optimizer: nn.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> None:
    """Write the masters, and what is asked for besides, into a new directory. Doesn't consume the state.

    Communicates: four short messages a rank; no tensor travels. Each rank writes its own rows (of replicas the first),
    rank 0 the index. The directory has its name only once everything is on the disk: a save that fails or is killed
    leaves none. Gradients aren't saved, nor are ignored parameters, which the state doesn't have.

    Args:
        path: in a directory that all ranks share. It must not exist.
        target: a state, in any phase, or the root cell of `fully_shard`, outside of forward and backward.
        optimizer: built over `shard_parameters` or the cell's ``trainable_params()``; its moments are saved as rows, by
            the parameters' names, the rest (its step, the learning rate) whole. None on a rank that has no rows of
            trainable parameters.
        extra: what else the program needs to go on, the same on every rank: what JSON has.
        rename: names in the checkpoint by the parameters' names; see `torch_names`.

    Raises:
        FileExistsError: something is at ``path``.
        ValueError: ``extra`` isn't what JSON gives back.
        LayoutError: the optimizer isn't over this state's rows, or keeps state of another shape.
        MeshError: the mesh has axes that aren't data parallel.
        RankMismatchError: ranks differ in their layout, ``extra``, or the whole values of the optimizer.
        PeerFailed: only other ranks met an error.

    Example:
        save_checkpoint(f"run/step-{state.step:06}", state, optimizer=optimizer, extra={"epoch": 3})
    """
    state = target if isinstance(target, HSDPState) else root_tree(target, "save_checkpoint").up_to_date()
    save_rows(
        path,
        state.layout,
        ms_backend(state),
        lambda: masters(state),
        step=state.step,
        optimizer=optimizer,
        params=_stepped(target, optimizer),
        extra=extra,
        rename=rename,
    )


def load_checkpoint(
    path: str | PathLike[str],
    target: S,
    *,
    optimizer: nn.Optimizer | None = None,
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
) -> tuple[S, Loaded]:
    """The state with the masters of a checkpoint; or a cell whose parameters are set to them. The checkpoint may have
    been written with another number of ranks or another mesh, by torch (``dcp.save`` with
    ``HuggingFaceStorageWriter``), or be plain safetensors files of whole tensors.

    Communicates: one short message a rank; each rank reads its own rows only. All of it is read and compared before
    anything changes, on any rank.

    Args:
        path: a directory, or one file.
        target: a state at rest (sharded, no gradients), which is consumed; or the root cell of `fully_shard`, outside
            of forward and backward, and with no gradients held back.
        optimizer: built over `shard_parameters` or the cell's ``trainable_params()``, to be set as well. What it steps
            for a state needn't be set: `optimizer_step` takes the state's rows.
        strict: refuse a checkpoint that lacks a name or has further ones. What the optimizer needs counts, what isn't
            asked for (an optimizer's state, without ``optimizer``) doesn't.
        cast: round values of a wider floating dtype to the state's. Narrower ones are always taken, as they lose
            nothing. (Torch's reader rounds without being asked.)
        rename: as in `save_checkpoint`.

    Returns:
        The new state, or the very cell, with the step of the saved one where the checkpoint says it; and what else was
        found.

    Raises:
        LayoutError: names are missing or unexpected, shapes or dtypes differ, rows are missing: all of them are named.
        CheckpointError: no checkpoint is there, or files are missing or damaged.
        PhaseError: the state isn't at rest.
        RankMismatchError, PeerFailed: ranks see other files, or only other ranks met an error.
    """
    tree = None if isinstance(target, HSDPState) else root_tree(target, "load_checkpoint")
    state: HSDPState = target if tree is None else tree.up_to_date()

    def ready() -> None:
        state.token.require("load_checkpoint")
        for unit in state.units:
            check(unit.name, unit.params_phase if tree is None else ParamPhase.SHARDED, unit.grads_phase, Op.LOAD)

    rows, loaded = load_rows(
        path,
        state.layout,
        ms_backend(state),
        optimizer=optimizer,
        params=_stepped(target, optimizer),
        strict=strict,
        cast=cast,
        rename=rename,
        before=ready,
    )
    step = state.step if loaded.step is None else loaded.step
    if tree is not None:
        tree.load(rows, step)
        return target, loaded
    new: Any = load_masters(state, rows, step=step)
    return new, loaded


def save_rows(
    path: str | PathLike[str],
    layout: Layout,
    backend: MSBackend,
    rows: Callable[[], Mapping[str, Tensor]],
    *,
    step: int,
    optimizer: nn.Optimizer | None = None,
    params: Mapping[str, Parameter] | None = None,
    extra: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> None:
    """`save_checkpoint` of rows instead of a state. Communicates as it does.

    Args:
        rows: gives this rank's rows of every parameter by its name in the layout; an error in it is told to all ranks.
        params: what the optimizer steps, by name in the layout.
    """
    path, rank = Path(path), backend.rank
    entries: list[tuple[Part, Callable[[], Raw]]] = []
    slots: list[Slots] = []

    def collect() -> str:
        plain = _plain(extra)
        parts = parts_of(layout, rank, rename)
        values = rows()
        for name, part in parts.items():
            found = (backend.dtype(values[name]), backend.shape(values[name])) if name in values else None
            if found != (part.dtype, part.sizes):
                raise LayoutError(f"checkpoint: {name!r} is {found}, this rank's rows are {(part.dtype, part.sizes)}")
            entries.append((part, partial(_raw, values[name])))
        slots.append(_slots(layout, optimizer, params, parts))
        says = _digest(slots[0]) if optimizer is not None else _no_optimizer(layout, parts)
        names = sha256(repr([part.names for part in parts.values()]).encode()).hexdigest()[:16]
        return json.dumps([[layout.digest, step, plain, names], says])

    has = _agree(together(backend, collect), "layout, step, extra or rename", "optimizer, or whole values in it")
    groups: dict[str, Sequence[tuple[Part, Callable[[], Raw]]]] = {MODEL: entries}
    if has:
        parts = slots[0].parts | {n: replace(p, writes=rank == has[0]) for n, (p, _) in slots[0].whole.items()}
        groups[OPTIMIZER] = [(parts[name], partial(_raw, value)) for name, value in slots[0].held]
    index = {"step": step, "extra": dict(extra or {})}
    write(path, backend, lead=min(layout.mesh.ranks), rank=rank, groups=groups, index=index)


def load_rows(
    path: str | PathLike[str],
    layout: Layout,
    backend: MSBackend,
    *,
    optimizer: nn.Optimizer | None = None,
    params: Mapping[str, Parameter] | None = None,
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    before: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Tensor], Loaded]:
    """This rank's rows out of a checkpoint, by name in the layout; the optimizer's state is set. Communicates as
    `load_checkpoint` does.

    Args:
        params: what the optimizer steps, by name in the layout.
        before: a check of the caller's, whose error is told to all ranks.
    """
    rows: dict[str, Tensor] = {}
    states: list[tuple[Parameter, Tensor]] = []
    found: list[Loaded] = []

    def read() -> str:
        before()
        parts = parts_of(layout, backend.rank, rename)
        slots = _slots(layout, optimizer, params, parts)
        checkpoint = Checkpoint.open(Path(path))
        ignored = {(rename or {}).get(name, name) for name in layout.ignored}
        match = Match.of(parts, checkpoint.model, cast=cast, known=ignored)
        if optimizer is not None:
            if checkpoint.optimizer is None:
                raise LayoutError(f"{checkpoint.path} has no state of an optimizer; load it without optimizer=")
            of_slots = Match.of(slots.parts, checkpoint.optimizer, cast=cast)
        else:
            of_slots = Match({}, [], [], [])
        missing = [*match.missing, *(f"{OPTIMIZER}: {name}" for name in of_slots.missing)]
        unexpected = [*match.unexpected, *(f"{OPTIMIZER}: {name}" for name in of_slots.unexpected)]
        problems = [*match.problems, *(f"{OPTIMIZER}: {problem}" for problem in of_slots.problems)]
        _refuse(checkpoint.path, missing if strict else [], unexpected if strict else [], problems)
        for name, sources in match.sources.items():
            if sources:
                rows[name] = _read(parts[name], sources, backend)
        for name, value in slots.held:
            if sources := of_slots.sources[name]:
                states.append((value, _read(slots.parts[name], sources, backend)))
        index = checkpoint.index
        found.append(Loaded(index.get("step"), dict(index.get("extra", {})), tuple(missing), tuple(unexpected)))
        says = _no_optimizer(layout, parts) if optimizer is None else type(optimizer).__name__
        return json.dumps([[layout.digest, checkpoint.digest, strict], says])

    _agree(together(backend, read), "layout, checkpoint or strict", "optimizer")
    for value, tensor in states:
        with ms._no_grad():
            value.copy_(tensor)  # not `set_data`, after which MindSpore 2.10's Adam makes other steps on CPU
    return rows, found[0]


def save_full(
    path: str | PathLike[str], target: HSDPState | nn.Cell, *, rename: Mapping[str, str] | None = None
) -> None:
    """Write all masters, whole, into one safetensors file, for ``load_checkpoint(path, format="safetensors")`` of
    MindSpore and anything else that reads such files. Doesn't consume the state; a tied parameter is there once a name.

    Communicates: for each sharded bucket one all-gather over its shard group in the master dtype (not in the ledger),
    and two short messages a rank. Each rank holds one whole bucket at a time; rank 0 writes.

    Args:
        path: of the file; one that is there is replaced once the new one is complete.
        target: a state, in any phase, or the root cell of `fully_shard`, outside of forward and backward.

    Raises:
        OSError, MeshError, PeerFailed: as `save_checkpoint`. The old file is still there then.
    """
    state = target if isinstance(target, HSDPState) else root_tree(target, "save_full").up_to_date()
    path, backend, lead = Path(path), ms_backend(state), min(state.layout.mesh.ranks)
    parts: dict[str, Part] = {}
    files: list[FileWriter] = []

    def begin() -> str:
        state.token.require("save_full")
        parts.update(parts_of(state.layout, backend.rank, rename))
        if backend.rank == lead:
            unfinished(path).unlink(missing_ok=True)
            pieces = [Piece(n, p.dtype, (0,) * len(p.shape), p.shape) for p in parts.values() for n in p.names]
            files.append(FileWriter(unfinished(path), pieces, sharded=False))
        return ""

    failure: list[Exception] = []

    def finish() -> str:
        if failure:
            raise failure[0]
        for file in files:
            file.close()
            file.path.replace(path)
            sync_directory(path.parent)
        return ""

    try:
        together(backend, begin)
        for member, value in whole_masters(state):
            try:
                for file in files if not failure else ():
                    for name in parts[member.spec.name].names:
                        file.put(name, _raw(value))
            except Exception as error:  # the peers go on gathering, so this rank has to
                failure.append(error)
        together(backend, finish)
    except BaseException:
        for file in files:
            file.abandon()
        raise


def torch_names(cell: nn.Cell) -> dict[str, str]:
    """For ``rename``: what torch's modules call the parameters of MindSpore's own cells (``gamma`` of a norm is
    ``weight`` there), by path, where the names differ. Does not communicate. Works on a sharded cell too."""
    names = {}
    for path, owner, local in parameter_places(cell):
        theirs = any(kind.__module__.startswith("mindspore.nn.layer") for kind in type(owner).__mro__)
        if theirs and local in _TORCH_NAMES:
            names[path] = path.removesuffix(local) + _TORCH_NAMES[local]
    return names


def _stepped(target: object, optimizer: nn.Optimizer | None) -> dict[str, Parameter] | None:
    """What the optimizer steps, by name in the layout; what the target doesn't know by a name of its own."""
    if optimizer is None:
        return None
    names = {} if isinstance(target, HSDPState) else names_of(target)
    return {names.get(id(p), p.name): p for p in optimizer.parameters}


def _slots(
    layout: Layout,
    optimizer: nn.Optimizer | None,
    params: Mapping[str, Parameter] | None,
    parts: Mapping[str, Part],
) -> Slots:
    trainable = {spec.name: parts[spec.name] for spec in layout.params() if spec.requires_grad}
    return Slots() if optimizer is None else optimizer_slots(optimizer, params or {}, trainable)


def _no_optimizer(layout: Layout, parts: Mapping[str, Part]) -> str | None:
    """What a rank says that was given no optimizer: nothing, if it has no row that one could step."""
    trainable = {spec.name: parts[spec.name] for spec in layout.params() if spec.requires_grad}
    return "none" if rows_to_step(trainable) else None


def _digest(slots: Slots) -> str:
    """Hash of the optimizer's kind of state and its whole values."""
    found = sha256(repr(sorted(slots.parts)).encode())
    for _, value in sorted(slots.whole.items()):
        found.update(_raw(value[1]).tobytes())
    return found.hexdigest()[:16]


def _agree(answers: Mapping[int, str], first: str, second: str) -> list[int]:
    """Ranks must say the same, about the optimizer only those that say something.

    Returns:
        The ranks that have one.
    """
    facts = {rank: json.loads(text) for rank, text in answers.items()}
    require_same({rank: json.dumps(fact[0]) for rank, fact in facts.items()}, first)
    told = {rank: fact[1] for rank, fact in facts.items() if fact[1] is not None}
    require_same(told, second)
    return [rank for rank, said in told.items() if said != "none"]


def _refuse(path: Path, missing: list[str], unexpected: list[str], problems: list[str]) -> None:
    texts = [f"missing: {missing}"] if missing else []
    texts += [f"unexpected: {unexpected}"] if unexpected else []
    texts += problems
    if texts:
        hint = " (strict=False leaves out names that only one side has)" if missing or unexpected else ""
        raise LayoutError(f"nothing was loaded, as {path} doesn't fit: {'; '.join(texts)}{hint}")


def _plain(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """``extra`` as it will be given back."""
    given = dict(extra or {})
    try:
        back = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint: extra can't be written as JSON: {error}") from error
    if back != given:
        raise ValueError(
            f"checkpoint: extra would come back as {back!r}, it is {given!r}; use strings as keys and lists"
        )
    return given


def _raw(tensor: Tensor) -> Raw:
    """The tensor's bytes, valid as long as the tensor is."""
    values = np.ascontiguousarray(Tensor(tensor).asnumpy()).reshape(tuple(tensor.shape))
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def _read(part: Part, sources: Sequence[Stored], backend: MSBackend) -> Tensor:
    """This rank's part as a tensor."""
    stored = sources[0].dtype
    values = read_part(part, sources).view(bfloat16 if stored == "bfloat16" else np.dtype(stored))
    return backend.cast(Tensor(values), part.dtype)
