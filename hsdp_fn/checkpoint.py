"""Sharded checkpoints: which rows a rank writes and reads, and the steps that all ranks take together.

A checkpoint is a directory: one safetensors file a rank that has something to write, the optimizer's in the directory
``optimizer``, and ``hsdp_fn.json``. It is written beside its place, under a hidden name, and renamed when all of it is
on the disk, so what has its name is complete. Of directories that others have written (torch's
``HuggingFaceStorageWriter``, one or several plain files, with or without an index) the safetensors files are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from .backend import Backend
from .dtypes import is_compute_float, wider
from .errors import LayoutError, MeshError, PeerFailed, RankMismatchError
from .layout import Bucket, Layout, Member
from .safetensors import SUFFIX, CheckpointError, FileWriter, Piece, Raw, Stored, catalog, digest

INDEX = "hsdp_fn.json"
MODEL, OPTIMIZER = "", "optimizer"
_HF_INDEX = "model.safetensors.index.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of a tensor: its rows, or all of it.

    Attributes:
        name: in the checkpoint.
        dtype: neutral name.
        shape: of the whole tensor.
        offsets, sizes: this rank's part; a size of 0 where it has none.
        writes: whether this rank is the one to write it.
        aliases: further names in the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    writes: bool
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> Part:
    """A tensor that each rank has all of; it isn't said yet who writes it."""
    return Part(name, dtype, shape, (0,) * len(shape), shape, False)


def parts_of(layout: Layout, rank: int, rename: Mapping[str, str] | None = None) -> dict[str, Part]:
    """This rank's part of each parameter, by its name in the layout. Does not communicate.

    Args:
        rename: names in the checkpoint, by name in the layout; those that aren't in it stay.

    Raises:
        MeshError: the layout's mesh has other axes than data-parallel ones, or parameters on some of its ranks only:
            other ranks may have other values under the same name.
        LayoutError: ``rename`` has an unknown name, or gives one name to two parameters.
    """
    _check_mesh(layout)
    rename = dict(rename or {})
    known = {name for spec in layout.params() for name in (spec.name, *spec.aliases)} | set(layout.ignored)
    if unknown := sorted(set(rename) - known):
        raise LayoutError(f"rename: the layout has no parameters {unknown}")
    new = [rename.get(name, name) for name in known]
    if double := sorted({name for name in new if new.count(name) > 1}):
        raise LayoutError(f"rename: more than one parameter would be called {double}")
    parts = {}
    for unit in layout.units:
        for bucket in unit.buckets:
            for member in bucket.params.members:
                spec = member.spec
                first, *others = (rename.get(name, name) for name in (spec.name, *spec.aliases))
                offsets, sizes, writes = _rows(bucket, member, rank)
                parts[spec.name] = Part(first, spec.dtype, spec.shape, offsets, sizes, writes, tuple(others))
    return parts


def together(backend: Backend, work: Callable[[], str]) -> dict[int, str]:
    """Communicates: do ``work`` on every rank, and tell each other how it went: one short message a rank.

    Returns:
        What ``work`` gave on each rank.

    Raises:
        Whatever ``work`` raises here; PeerFailed where it raised on other ranks only.
    """
    failure: Exception | None = None
    told = ""
    try:
        told = work()
    except Exception as error:  # whatever it is, the peers must learn of it
        failure = error
    answers = backend.exchange(f"!{type(failure).__name__}: {failure}" if failure is not None else f"={told}")
    if failure is not None:
        raise failure
    if reasons := {rank: text[1:] for rank, text in answers.items() if text.startswith("!")}:
        raise PeerFailed(reasons)
    return {rank: text[1:] for rank, text in answers.items()}


def require_same(answers: Mapping[int, str], what: str) -> None:
    """Raises:
    RankMismatchError: naming ``what`` and the ranks that differ from the first.
    """
    if not answers:
        return
    first = min(answers)
    if wrong := [rank for rank, answer in answers.items() if answer != answers[first]]:
        raise RankMismatchError(f"ranks {wrong} have other {what} than rank {first}; they must be the same everywhere")


# ------------------------------------------------------------------------------------------------------------- writing


def write(
    path: Path,
    backend: Backend,
    *,
    lead: int,
    rank: int,
    groups: Mapping[str, Sequence[tuple[Part, Callable[[], Raw]]]],
    index: Mapping[str, Any],
) -> None:
    """Write a new checkpoint. Communicates: three short messages a rank.

    Args:
        path: must not exist; a directory that all ranks share.
        lead: the rank that makes directories and writes the index.
        groups: for `MODEL` and `OPTIMIZER` the parts and where to get their bytes from.
        index: goes into the index file.

    Raises:
        FileExistsError: there is something at ``path``.
        OSError: as the file system does.
        PeerFailed: on the ranks that were fine. Nothing is at ``path`` then, unless it was the very last message
            that failed, after the directory had got its name: it is complete.
    """
    place = unfinished(path)

    def begin() -> str:
        if path.exists():
            raise FileExistsError(f"{path} is there already; a checkpoint is never written over another one")
        if rank == lead:
            if place.exists():
                shutil.rmtree(place)
            for group in groups:
                (place / group).mkdir(parents=True)
        return ""

    def fill() -> str:
        sizes = {}
        for group, entries in groups.items():
            mine = [(p, values) for p, values in entries if p.writes]
            if not mine:
                continue
            name = f"{group}{'/' if group else ''}shard-{rank + 1:05d}-model-00001-of-00001{SUFFIX}"
            if not (place / group).is_dir():
                raise FileNotFoundError(
                    f"rank {lead} made {place / group}, but this rank doesn't see it; a checkpoint needs a directory "
                    f"that all ranks share"
                )
            pieces = [Piece(n, p.dtype, p.offsets, p.sizes) for p, _ in mine for n in p.names]
            with FileWriter(place / name, pieces, sharded=True) as file:
                for part, values in mine:
                    raw = values()
                    for n in part.names:
                        file.put(n, raw)
            sizes[name] = file.nbytes
        return json.dumps(sizes)

    def finish() -> str:
        if rank == lead:
            files = {name: size for text in answers.values() for name, size in json.loads(text).items()}
            text = json.dumps({"format": _FORMAT, **index, "files": files}, indent=1)
            with (place / INDEX).open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            for group in groups:
                sync_directory(place / group)
            sync_directory(place)
            place.rename(path)
            sync_directory(path.parent)
        return ""

    try:
        together(backend, begin)
        answers = together(backend, fill)
        together(backend, finish)
    except BaseException:
        if rank == lead:
            shutil.rmtree(place, ignore_errors=True)
        raise


def unfinished(path: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return path.parent / f".{path.name}.unfinished"


def sync_directory(path: Path) -> None:
    """Make renamed and new names in a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: as given.
        model: tensors of the model by name.
        optimizer: those of the optimizer; None where it has none.
        index: what `write` was given; empty for a checkpoint that others have written.
    """

    path: Path
    model: Mapping[str, Stored]
    optimizer: Mapping[str, Stored] | None = None
    index: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the headers.

        Raises:
            CheckpointError: nothing is there, or files are missing, foreign, cut short or damaged.
        """
        if path.is_file():
            return cls(path, catalog([path]))
        if not path.is_dir():
            hint = f"; {unfinished(path)} is one that was never finished" if unfinished(path).exists() else ""
            raise CheckpointError(f"there is no checkpoint at {path}{hint}")
        if (path / INDEX).exists():
            return cls._own(path)
        files = sorted(path.glob(f"*{SUFFIX}"))
        if (path / _HF_INDEX).exists():
            listed = set(_json(path / _HF_INDEX).get("weight_map", {}).values())
            if missing := sorted(name for name in listed if not (path / name).is_file()):
                raise CheckpointError(f"{path}: its index {_HF_INDEX} names files that aren't there: {missing}")
            files = [path / name for name in sorted(listed)]
        if not files:
            raise CheckpointError(f"{path} holds neither {INDEX} nor a {SUFFIX} file: it is no checkpoint")
        return cls(path, catalog(files))

    @classmethod
    def _own(cls, path: Path) -> Checkpoint:
        index = _json(path / INDEX)
        if index.get("format") != _FORMAT:
            raise CheckpointError(f"{path} has format {index.get('format')!r}; this version reads format {_FORMAT}")
        listed = index.get("files", {})
        if missing := sorted(name for name in listed if not (path / name).is_file()):
            raise CheckpointError(f"{path}: files of this checkpoint are missing: {missing}")
        there = {str(file.relative_to(path)) for file in path.rglob(f"*{SUFFIX}")}
        if strangers := sorted(there - set(listed)):
            raise CheckpointError(f"{path}: {strangers} aren't files of this checkpoint; move them elsewhere")
        if wrong := sorted(name for name, size in listed.items() if (path / name).stat().st_size != size):
            raise CheckpointError(f"{path}: files were cut short or overwritten: {wrong}")
        groups: dict[str, list[Path]] = {MODEL: [], OPTIMIZER: []}
        for name in sorted(listed):
            groups[OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else MODEL].append(path / name)
        optimizer = catalog(groups[OPTIMIZER]) if groups[OPTIMIZER] else None
        return cls(path, catalog(groups[MODEL]), optimizer, index)

    @property
    def digest(self) -> str:
        """Short hash by which ranks see that they have opened the same checkpoint."""
        index = json.dumps(self.index, sort_keys=True)
        return sha256(f"{digest(self.model)} {digest(self.optimizer or {})} {index}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Match:
    """How the tensors that are wanted and those of a checkpoint fit together.

    Attributes:
        sources: what to read for each part that is there, all names under which it is stored.
        missing: names that aren't there; unexpected: those that nobody wants.
        problems: what can't be loaded at all, one sentence each.
    """

    sources: dict[str, list[Stored]]
    missing: list[str]
    unexpected: list[str]
    problems: list[str]

    @classmethod
    def of(
        cls, parts: Mapping[str, Part], tensors: Mapping[str, Stored], *, cast: bool, known: Iterable[str] = ()
    ) -> Match:
        """Compare names, shapes, dtypes, and whether all rows are there. Reads nothing.

        Args:
            cast: take values of another dtype even where that rounds.
            known: further names that are no surprise.
        """
        match = cls({}, [], [], [])
        for key, part in parts.items():
            found = {name: tensors[name] for name in part.names if name in tensors}
            if not found:
                match.missing.append(part.name)
            for name, stored in found.items():
                if (problem := _objection(part, stored, cast)) is not None:
                    match.problems.append(f"{name!r} {problem}")
            match.sources[key] = list(found.values())
        wanted = {name for part in parts.values() for name in part.names} | set(known)
        match.unexpected.extend(name for name in tensors if name not in wanted)
        return match


def read_part(part: Part, sources: Sequence[Stored]) -> Raw:
    """This rank's part, in the checkpoint's dtype.

    Raises:
        CheckpointError: a tied parameter has other values under its other name.
    """
    first, *others = (stored.read(part.offsets, part.sizes) for stored in sources)
    for other in others:
        if other.dtype != first.dtype or (other != first).any():
            raise CheckpointError(
                f"{part.names} are one tensor in this model, but differ in the checkpoint: the model that wrote it "
                f"hadn't tied them"
            )
    return first


def _objection(part: Part, stored: Stored, cast: bool) -> str | None:
    if stored.shape != part.shape:
        return f"has shape {stored.shape} in the checkpoint, {part.shape} here"
    if not stored.covers((0,) * len(part.shape), part.shape):
        return "isn't whole in the checkpoint: files are missing, or there are files of several checkpoints"
    if stored.dtype == part.dtype:
        return None
    floats = is_compute_float(stored.dtype) and is_compute_float(part.dtype)
    if (floats and wider(stored.dtype, part.dtype) == part.dtype) or (floats and cast):
        return None
    hint = "; cast=True rounds" if floats else ""
    return f"is {stored.dtype} in the checkpoint, {part.dtype} here{hint}"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} can't be parsed, so it is damaged: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is a {type(found).__name__}, not a table")
    return found


def _rows(bucket: Bucket, member: Member, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Offsets and shape of a rank's rows, and whether it writes them: the first of those that have them."""
    mesh, shape = bucket.mesh, member.spec.shape
    at = mesh.shard_index(rank)
    start, stop = member.rows(at)
    offsets = tuple(start if dim == member.dim else 0 for dim in range(len(shape)))
    first = mesh.group(rank, mesh.replicate)[0] == rank if mesh.replicate else True
    # Of a tensor without elements the first shard writes the shape.
    return offsets, member.local_shape(at), first and (stop > start if shape[member.dim] else at == 0)


def _check_mesh(layout: Layout) -> None:
    for where, names in [(layout.mesh, ["the layout"])] + [
        (b.mesh, [m.spec.name for m in b.params.members]) for unit in layout.units for b in unit.buckets
    ]:
        axes = [
            name
            for name, size in zip(where.names, where.shape, strict=True)
            if size > 1 and name not in where.shard + where.replicate
        ]
        if axes or set(where.ranks) != set(layout.mesh.ranks):
            what = f"axes {axes} that aren't data parallel" if axes else f"ranks {where.ranks} only"
            raise MeshError(
                f"checkpoint: the mesh of {names} has {what}: other ranks may hold other values under the same names, "
                f"which one checkpoint can't tell apart"
            )
