"""Safetensors files as the package of that name writes and reads them, in parts, and damaged."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as oracle

from hsdp_fn.safetensors import CheckpointError, FileWriter, Piece, Stored, catalog, digest

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def values(dtype: str, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    drawn = np.random.default_rng(len(dtype)).integers(0, 2 if dtype == "bool" else 100, shape)
    return drawn.astype(dtype)


def raw(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def write(path: Path, parts: dict[str, tuple[tuple[int, ...], np.ndarray]], *, sharded: bool = True) -> Path:
    pieces = [Piece(name, array.dtype.name, offsets, array.shape) for name, (offsets, array) in parts.items()]
    with FileWriter(path, pieces, sharded=sharded) as file:
        for name, (_, array) in parts.items():
            file.put(name, raw(array))
    return path


def split(folder: Path, array: np.ndarray, parts: int, dim: int) -> list[Path]:
    """A file a part, as ``torch.chunk`` cuts them."""
    size = -(-array.shape[dim] // parts)
    files = []
    for i, at in enumerate(range(0, array.shape[dim], size)):
        rows = np.ascontiguousarray(np.take(array, range(at, min(at + size, array.shape[dim])), dim))
        offsets = tuple(at if d == dim else 0 for d in range(array.ndim))
        files.append(write(folder / f"{i}.safetensors", {"w": (offsets, rows)}))
    return files


def test_what_is_written_here_the_package_reads(tmp_path):
    arrays = {d: values(d) for d in DTYPES} | {"empty": np.zeros((0, 3), np.int8), "scalar": np.array(2.5, np.float32)}
    file = write(tmp_path / "f", {name: ((0,) * a.ndim, a) for name, a in arrays.items()}, sharded=False)
    found = oracle.load_file(file)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert (found[name] == array).all()


def test_what_the_package_writes_is_read_here(tmp_path):
    arrays = {d: values(d) for d in DTYPES} | {"empty": np.zeros((0, 3), np.int8), "scalar": np.array(2.5, np.float32)}
    oracle.save_file(arrays, tmp_path / "f")
    found = catalog([tmp_path / "f"])
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        stored = found[name]
        zeros = (0,) * array.ndim
        assert (stored.dtype, stored.shape) == (array.dtype.name, array.shape) and stored.covers(zeros, array.shape)
        assert (stored.read(zeros, array.shape) == raw(array)).all()


@pytest.mark.parametrize(("parts", "dim"), list(itertools.product((1, 2, 3, 5), (0, 1, 2))))
def test_every_box_of_a_split_tensor_is_that_of_the_whole_one(tmp_path, parts, dim):
    array = values("int16", (5, 3, 4))
    stored = catalog(split(tmp_path, array, parts, dim))["w"]
    assert stored.shape == array.shape
    spans = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in array.shape]
    for box in itertools.product(*spans):
        offsets, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        assert stored.covers(offsets, sizes)
        assert (stored.read(offsets, sizes) == raw(array)[tuple(slice(a, b) for a, b in box)]).all()


def test_only_files_that_hold_a_part_are_opened_for_it(tmp_path):
    array = values("float32", (8, 2))
    files = split(tmp_path, array, 4, 0)
    stored = catalog(files)["w"]
    for file in (files[0], files[3]):
        file.unlink()
    assert (stored.read((3, 0), (2, 2)) == raw(array)[3:5]).all()
    with pytest.raises(FileNotFoundError):
        stored.read((1, 0), (2, 2))


def test_holes_and_rows_that_are_there_twice_are_seen(tmp_path):
    array = values("int8", (6, 2))
    files = split(tmp_path, array, 3, 0)
    hole = catalog([files[0], files[2]])["w"]
    assert hole.shape == (6, 2) and hole.covers((0, 0), (2, 2)) and hole.covers((4, 1), (2, 1))
    assert not hole.covers((0, 0), (6, 2)) and not hole.covers((1, 0), (2, 2))
    stale = write(tmp_path / "stale", {"w": ((1, 0), array[1:3])})
    assert not catalog([*files, stale])["w"].covers((0, 0), (6, 2))
    # as many elements as there should be, by a hole and an overlap
    assert not catalog([files[0], files[2], stale])["w"].covers((0, 0), (6, 2))
    with pytest.raises(CheckpointError, match=r"the part of 'w' at \(2, 0\) is in .*1\.safetensors and in .*copy"):
        catalog([*files, write(tmp_path / "copy", {"w": ((2, 0), array[2:4])})])
    with pytest.raises(CheckpointError, match=r"'w' is int8 with 2 dims .* and int16 with 2 dims"):
        catalog([files[0], write(tmp_path / "other", {"w": ((2, 0), array[2:4].astype("int16"))})])


def test_files_of_one_name_with_other_content_have_another_digest(tmp_path):
    array = values("int8", (6, 2))
    found = [catalog(split(_new(tmp_path / str(n)), array, n, 0)) for n in (2, 3)]
    again = catalog(split(_new(tmp_path / "again"), array, 2, 0))
    assert digest(found[0]) == digest(again) != digest(found[1])


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def damage(file: Path, kind: str) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if kind == "end":
        data = data[:-1]
    elif kind == "longer":
        data += b"\0"
    elif kind == "empty":
        data = b""
    elif kind == "zeros":
        data = bytes(len(data))
    elif kind == "header":
        data = data[: 8 + length // 2]
    elif kind == "noise":
        data = data[:8] + bytes(255 - b for b in data[8 : 8 + length]) + data[8 + length :]
    else:
        if kind == "list":
            text = b"[1, 2]"
        elif kind == "entry":
            text = json.dumps(header | {"w": {"dtype": "F32"}}).encode()
        elif kind == "shape":
            text = json.dumps(header | {"w": header["w"] | {"shape": [9, 9]}}).encode()
        elif kind == "sharding":
            text = json.dumps(header | {"__metadata__": {"DCP_SHARDING_INFO": "{}"}}).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    file.write_bytes(data)


@pytest.mark.parametrize(
    "kind", ["end", "longer", "empty", "zeros", "header", "noise", "list", "entry", "shape", "sharding"]
)
def test_a_damaged_file_is_named(tmp_path, kind):
    file = write(tmp_path / "damaged", {"w": ((0, 0), values("float32"))})
    damage(file, kind)
    with pytest.raises(CheckpointError, match="damaged"):
        catalog([file])


def test_a_writer_that_is_left_by_an_error_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), FileWriter(tmp_path / "f", [Piece("w", "int8", (0,), (3,))], sharded=True):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_numpy_and_this_library_lack_is_kept_by_its_code(tmp_path):
    header = b'{"w": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [0, 3]}}'
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    stored = catalog([tmp_path / "f"])["w"]
    assert (stored.dtype, stored.shape, stored.itemsize) == ("F8_E8M0", (3,), 1)
    assert isinstance(stored, Stored) and bytes(stored.read((1,), (2,))) == b"bc"
