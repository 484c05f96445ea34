"""Safetensors files: what is in them, writing them, and reading some rows of a tensor.

A file is the header's length (8 bytes, little endian), a JSON header, and the tensors' bytes. A file may hold only a
part of a tensor. Where that part begins stands in the header's metadata, as ``HuggingFaceStorageWriter`` of
``torch.distributed.checkpoint`` puts it there (key ``DCP_SHARDING_INFO``), so that torch reads what is written here and
the other way round. Bytes go through untouched: this module knows the size of a dtype and nothing else of it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .dtypes import ITEMSIZE
from .errors import HSDPError

SUFFIX = ".safetensors"
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
_HEADER_LIMIT = 100_000_000  # the format's own
#: Bytes of tensors, as unsigned integers of the dtype's size.
Raw = NDArray[Any]


class CheckpointError(HSDPError, ValueError):
    """Files of a checkpoint that are missing, cut short, contradictory or no checkpoint at all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular part of a tensor.

    Attributes:
        name: of the tensor.
        dtype: neutral name.
        offsets: where the part begins in the tensor.
        sizes: shape of the part.
    """

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a part of a tensor is: ``file``, the first byte in it, where the part begins in the tensor, its shape."""

    file: Path
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in some files.

    Attributes:
        dtype: neutral name, or the format's own code of a dtype that has none.
        shape: as far as the parts reach.
        itemsize: bytes of an element.
        chunks: the parts.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    chunks: tuple[Chunk, ...]

    def covers(self, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether each element of this part of the tensor is there exactly once."""
        hits = [hit for c in self.chunks if prod((hit := _overlap(c, offsets, sizes))[1])]
        if not hits or sum(prod(shared) for _, shared in hits) != prod(sizes):
            return not hits and prod(sizes) == 0
        begins = np.array([begin for begin, _ in hits], np.int64).reshape(len(hits), 1, -1)
        ends = begins + np.array([shared for _, shared in hits], np.int64).reshape(begins.shape)
        meet = np.maximum(begins, begins.swapaxes(0, 1)) < np.minimum(ends, ends.swapaxes(0, 1))
        return int(meet.all(-1).sum()) == len(hits)  # each part meets itself only

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Raw:
        """A part of the tensor in new memory. Only the pages that hold it are read.

        Raises:
            OSError: a file can't be read.
        """
        kind = np.dtype(f"u{self.itemsize}")
        out: Raw = np.empty(tuple(sizes), kind)
        for chunk in self.chunks:
            start, shared = _overlap(chunk, offsets, sizes)
            if prod(shared) == 0:
                continue
            source = np.memmap(chunk.file, kind, "r", chunk.begin, chunk.sizes or (1,)).reshape(chunk.sizes)
            inside = tuple(slice(at - o, at - o + n) for at, o, n in zip(start, chunk.offsets, shared, strict=True))
            target = tuple(slice(at - o, at - o + n) for at, o, n in zip(start, offsets, shared, strict=True))
            out[target] = source[inside]
        return out


class FileWriter:
    """One new file: all pieces are known at the start, their bytes may come in any order.

    Args:
        path: of the file; its directory exists.
        pieces: each name once.
        sharded: say where the pieces begin, as torch does; without, each must be a whole tensor.

    Example:
        with FileWriter(path, pieces) as file:
            for piece in pieces:
                file.put(piece.name, values[piece.name])
    """

    def __init__(self, path: Path, pieces: Iterable[Piece], *, sharded: bool) -> None:
        # Large items first keeps every tensor aligned.
        self._pieces = {p.name: p for p in sorted(pieces, key=lambda p: -ITEMSIZE[p.dtype])}
        self._begin: dict[str, int] = {}
        self._missing = set(self._pieces)
        metadata = {"format": "pt"}
        if sharded:
            where = {p.name: {_OFFSETS: list(p.offsets)} for p in self._pieces.values()}
            metadata |= {_SHARDING: json.dumps(where), "DCP_VERSION": "1.0"}
        header: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for p in self._pieces.values():
            header[p.name] = {"dtype": _CODES[p.dtype], "shape": list(p.sizes), "data_offsets": [at, at + p.nbytes]}
            self._begin[p.name] = at
            at += p.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.path = path
        self._file: BinaryIO = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._base = 8 + len(text)
        self.nbytes = self._base + at

    def put(self, name: str, values: Raw) -> None:
        """Write a piece: an array of its shape, whose bytes are taken as they are."""
        piece = self._pieces[name]
        assert (values.shape, values.nbytes) == (piece.sizes, piece.nbytes), (piece, values.shape, values.dtype)
        self._file.seek(self._base + self._begin[name])
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self._missing.discard(name)

    def close(self) -> None:
        """All pieces were given: bring the file to the disk."""
        assert not self._missing, f"nothing was written for {sorted(self._missing)}"
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close and remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close() if kind is None else self.abandon()


def catalog(files: Iterable[Path]) -> dict[str, Stored]:
    """What some files hold together, by tensor name. Reads their headers only.

    Raises:
        CheckpointError: naming the file that is cut short or isn't of this format, or two that contradict each other.
        OSError: a file can't be read.
    """
    found: dict[str, tuple[str, int, dict[tuple[int, ...], Chunk]]] = {}
    for file in files:
        for name, dtype, itemsize, chunk in _entries(file):
            known, _, chunks = found.setdefault(name, (dtype, itemsize, {}))
            first = next(iter(chunks.values()), chunk)
            if (dtype, len(chunk.sizes)) != (known, len(first.sizes)):
                raise CheckpointError(
                    f"{name!r} is {known} with {len(first.sizes)} dims in {first.file} and {dtype} with "
                    f"{len(chunk.sizes)} dims in {file}; these files aren't of one checkpoint"
                )
            other = chunks.get(chunk.offsets)
            if other is not None and 0 not in (*chunk.sizes, *other.sizes):
                raise CheckpointError(
                    f"the part of {name!r} at {chunk.offsets} is in {other.file} and in {file}; only one of them can "
                    f"belong to this checkpoint"
                )
            if other is None or 0 in other.sizes:
                chunks[chunk.offsets] = chunk
    stored = {}
    for name, (dtype, itemsize, chunks) in found.items():
        ends = zip(*(map(sum, zip(c.offsets, c.sizes, strict=True)) for c in chunks.values()), strict=True)
        stored[name] = Stored(dtype, tuple(max(end) for end in ends), itemsize, tuple(chunks.values()))
    return stored


def digest(tensors: Mapping[str, Stored]) -> str:
    """Short hash of names, dtypes and parts, by which ranks see that they look at the same files."""
    facts = [
        (name, t.dtype, sorted((c.file.name, c.begin, c.offsets, c.sizes) for c in t.chunks))
        for name, t in sorted(tensors.items())
    ]
    return sha256(repr(facts).encode()).hexdigest()[:16]


def _entries(file: Path) -> Iterable[tuple[str, str, int, Chunk]]:
    """Name, dtype, size of an element and place of each tensor of a file."""
    length, header = _header(file)
    try:
        metadata = header.pop("__metadata__", None) or {}
        sharding = json.loads(metadata[_SHARDING]) if _SHARDING in metadata else None
        end = 0
        out = []
        for name, entry in header.items():
            sizes, (begin, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
            offsets = (0,) * len(sizes) if sharding is None else tuple(map(int, sharding[name][_OFFSETS]))
            dtype = _NAMES.get(entry["dtype"], entry["dtype"])
            itemsize = ITEMSIZE[dtype] if dtype in ITEMSIZE else (stop - begin) // max(1, prod(sizes))
            wrong = len(offsets) != len(sizes) or min((begin, *offsets, *sizes)) < 0
            if wrong or (dtype in ITEMSIZE and stop - begin != prod(sizes) * itemsize):
                raise CheckpointError(f"{file}: the header's entry of {name!r} contradicts itself: {entry}")
            end = max(end, stop)
            out.append((name, dtype, itemsize, Chunk(file, length + begin, offsets, sizes)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the header isn't that of a safetensors file: {error!r}") from error
    if (size := file.stat().st_size) != length + end:
        raise CheckpointError(
            f"{file} has {size:,} bytes, its header says {length + end:,}: it was cut short or overwritten"
        )
    return out


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the parsed header."""
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _HEADER_LIMIT:
            raise CheckpointError(f"{file} isn't a safetensors file, or one that was never finished")
        text = opened.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header can't be parsed, so the file is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is a {type(header).__name__}, not a table of tensors")
    return 8 + length, header


def _overlap(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Begin and shape of what a chunk and a part have in common."""
    begin = tuple(max(a, b) for a, b in zip(chunk.offsets, offsets, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True))
    return begin, tuple(max(0, end - at) for at, end in zip(begin, ends, strict=True))
