"""Real text that every machine has: the Python sources of the standard library, split by whole files, as bytes."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

# Installed packages are not the standard library. Tests are left out because many distributions don't ship them;
# `encodings` and `pydoc_data` because they are generated: tables, which would flatter the loss, and one file so large
# that whichever side got it would be mostly that file.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation text. No file gives bytes to both.

    Args:
        train: the bytes of `train_files`, one file after another; uint8 `[bytes]`.
        valid: the bytes of `valid_files`, likewise.
        train_files: paths relative to the corpus root, with forward slashes, sorted.
        valid_files: likewise; the held-out files.
    """

    train: Bytes
    valid: Bytes
    train_files: tuple[str, ...]
    valid_files: tuple[str, ...]


def load_corpus(root: Path | None = None, limit: int | None = None, valid_fraction: float = 0.05) -> Corpus:
    """Read every non-empty `*.py` file under `root`, apart from `SKIPPED_FOLDERS`, and hold some files out.

    Whether a file is held out depends on its relative path alone (a hash of it), so a file stays on its side of the
    split when other files come and go, and whatever `limit` is.

    Args:
        root: folder to read; None is this interpreter's standard library.
        limit: most bytes to take, both sides together; None is all. Whole files are taken, in an order that is fixed
            by their paths but unrelated to the alphabet, up to the first that would go past the limit.
        valid_fraction: expected share of held-out files, between 0 and 1.

    Raises:
        ValueError: `valid_fraction` or `limit` out of range, or so little text that a side is left empty.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must lie between 0 and 1, got {valid_fraction}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 byte, got {limit}")
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root

    content: dict[str, bytes] = {}
    total = 0
    for name in sorted(_python_files(root), key=lambda name: _path_hashes(name)[1]):
        data = (root / name).read_bytes()
        if not data:
            continue
        total += len(data)
        if limit is not None and total > limit:
            break
        content[name] = data

    names = sorted(content)
    valid_files = tuple(name for name in names if _path_hashes(name)[0] < valid_fraction)
    train_files = tuple(name for name in names if _path_hashes(name)[0] >= valid_fraction)
    if not (train_files and valid_files):
        raise ValueError(
            f"too little text under {root} with limit={limit}, valid_fraction={valid_fraction}: "
            f"{len(train_files)} files to train on, {len(valid_files)} held out"
        )
    return Corpus(
        train=np.frombuffer(b"".join(content[name] for name in train_files), dtype=np.uint8),
        valid=np.frombuffer(b"".join(content[name] for name in valid_files), dtype=np.uint8),
        train_files=train_files,
        valid_files=valid_files,
    )


def _python_files(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                yield path.relative_to(root).as_posix()


def _path_hashes(name: str) -> tuple[float, bytes]:
    """Two unrelated hashes of a relative path: a number in [0, 1) for the split, and a key for the order."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") / 2**32, digest[4:]


def unigram_entropy(train: Bytes, valid: Bytes) -> float:
    """Cross-entropy of `valid` under the byte frequencies of `train`, in nats for each byte.

    What a model reaches that ignores all context. Each of the 256 counts has one added (so no byte has probability 0).
    """
    counts = np.bincount(train, minlength=256) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-(np.bincount(valid, minlength=256) @ log_probability) / valid.size)


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Random windows of a text, as a pure function of the step: there is no state to save or to restore.

    The starts of a step's `batch_size` windows come from a counter-based generator keyed on (seed, step). Which process
    reads which of them, in which microbatch, is arithmetic on the window's index in the step. So a resumed run sees
    the batches that it would have seen, and the windows of a step don't depend on the number of ranks or microbatches.

    Args:
        data: uint8 `[bytes]`, at least `seq_len + 1` long.
        seq_len: tokens in a window.
        batch_size: windows of one optimizer step, over all ranks and microbatches.
        seed: 0 or more.
        micros: microbatches that each step is cut into.

    Raises:
        ValueError: a field out of range; `data` too short; `batch_size` not a multiple of `micros`.
    """

    data: Bytes
    seq_len: int
    batch_size: int
    seed: int
    micros: int = 1

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 1), ("batch_size", 1), ("seed", 0), ("micros", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        _check_text(self.data, self.seq_len)
        if self.batch_size % self.micros:
            raise ValueError(
                f"batch_size must be a multiple of micros, got batch_size={self.batch_size}, micros={self.micros}"
            )

    def batch(self, step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """One rank's part of one microbatch.

        Args:
            step: 0 or more.
            micro: which microbatch of the step, from 0 to `micros - 1`.
            rank: which part of the microbatch, from 0 to `world - 1`.
            world: number of parts; `batch_size / micros` must be a multiple of it.

        Returns:
            `(x, y)`, both int64 `[batch_size / micros / world, seq_len]`; y is x one byte later.

        Raises:
            ValueError: an argument out of range, or a microbatch that doesn't divide over the ranks.
        """
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        if not 0 <= micro < self.micros:
            raise ValueError(f"micro must lie in 0..{self.micros - 1}, got {micro}")
        _check_rank(rank, world)
        windows = self.batch_size // self.micros
        if windows % world:
            raise ValueError(
                f"a microbatch of {windows} windows (batch_size={self.batch_size}, micros={self.micros}) "
                f"doesn't divide over world={world} ranks"
            )
        share = windows // world
        first = micro * windows + rank * share
        key = np.array([self.seed, step], dtype=np.uint64)
        starts = np.random.Generator(np.random.Philox(key=key)).integers(
            self.data.size - self.seq_len, size=self.batch_size
        )
        return _windows(self.data, starts[first : first + share], self.seq_len)


def validation_batches(
    data: Bytes, seq_len: int, windows: int, batch_size: int, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same evenly spaced windows of `data` at every call, divided over the ranks.

    All ranks get the same number of batches of the same size. So the mean over a rank's batches, averaged over the
    ranks, is the mean over all windows, and no rank waits for another in a forward pass that communicates.

    Args:
        data: uint8 `[bytes]`, at least `seq_len + 1` long.
        seq_len: tokens in a window.
        windows: number of windows over all ranks; a multiple of `batch_size * world`. They overlap where
            `windows * seq_len` is more than the text has.
        batch_size: windows in one batch of one rank.
        rank: from 0 to `world - 1`.
        world: number of ranks.

    Returns:
        An iterator over `(x, y)`, both int64 `[batch_size, seq_len]`; y is x one byte later.

    Raises:
        ValueError: an argument out of range, or windows that don't divide evenly.
    """
    for name, value in (("seq_len", seq_len), ("windows", windows), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    _check_text(data, seq_len)
    _check_rank(rank, world)
    if windows % (batch_size * world):
        raise ValueError(
            f"windows must be a multiple of batch_size * world, "
            f"got windows={windows}, batch_size={batch_size}, world={world}"
        )
    starts = np.linspace(0, data.size - seq_len - 1, windows).astype(np.int64)
    mine = starts[rank::world].reshape(-1, batch_size)
    return (_windows(data, row, seq_len) for row in mine)


def _windows(data: Bytes, starts: npt.NDArray[np.int64], seq_len: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def _check_text(data: Bytes, seq_len: int) -> None:
    if data.ndim != 1 or data.dtype != np.uint8:
        raise ValueError(f"data must be one-dimensional uint8, got {data.ndim}-dimensional {data.dtype}")
    if data.size < seq_len + 1:
        raise ValueError(f"data must have at least seq_len + 1 = {seq_len + 1} bytes, got {data.size}")


def _check_rank(rank: int, world: int) -> None:
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, got {rank}")
