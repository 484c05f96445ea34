"""A checkpoint is loaded whole or not at all, on every rank alike, and a save that fails leaves none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import hsdp_fn as hsdp
import hsdp_fn_ms as hm
from hsdp_fn import HSDPState, LayoutError, ParamSpec, PeerFailed, PhaseError, RankMismatchError, StaleStateError
from hsdp_fn.checkpoint import unfinished
from hsdp_fn.safetensors import CheckpointError, FileWriter
from hsdp_fn_ms.checkpoint import load_checkpoint, save_checkpoint, save_full
from tests.ms.odd import odd_state, raw, require_bits
from tests.ms.pool import on_ranks
from tests.ms.torch_checkpoint import odd_bits
from tests.ms.workers import full_values, mesh_of

# -------------------------------------------------------------------------------------------------- what doesn't fit


@on_ranks(2)
def test_everything_that_does_not_fit_is_named_and_nothing_is_changed(rank, world, tmp_path):
    save_checkpoint(tmp_path / "s", odd_state("shard", world, 1))
    other = odd_state(
        "shard",
        world,
        2,
        a_bias=None,
        c_fp16=None,
        c_new=((2,), "float32", 0, True),
        a_weight=((3, 5), "float32", 0, True),
        b_count=((5,), "int64", 0, False),
        c_fp64=((2, 5, 3), "float32", 1, False),
    )
    before = {name: raw(row) for name, row in hsdp.masters(other).items()}
    with pytest.raises(LayoutError) as caught:
        load_checkpoint(tmp_path / "s", other)
    for text in (
        "missing: ['c.new']",
        "unexpected: ['a.bias', 'c.fp16']",
        "'a.weight' has shape (5, 3) in the checkpoint, (3, 5) here",
        "'b.count' is int32 in the checkpoint, int64 here",
        "'c.fp64' is float64 in the checkpoint, float32 here; cast=True rounds",
        "strict=False",
    ):
        assert text in str(caught.value), caught.value
    with pytest.raises(LayoutError) as caught:
        load_checkpoint(tmp_path / "s", other, strict=False, cast=True)
    assert "missing" not in str(caught.value) and "c.fp64" not in str(caught.value)
    assert "'a.weight' has shape" in str(caught.value) and "'b.count' is int32" in str(caught.value)
    assert all((raw(row) == before[name]).all() for name, row in hsdp.masters(other).items())
    fits = odd_state("shard", world, 2, a_bias=None, c_fp16=None, c_new=((2,), "float32", 0, True))
    fits, loaded = load_checkpoint(tmp_path / "s", fits, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("c.new",), ("a.bias", "c.fp16"))
    assert (raw(hsdp.masters(fits)["c.new"]) == 0).all()


@on_ranks(2)
def test_values_of_narrower_floats_are_taken_and_of_wider_ones_rounded_if_asked(rank, world, tmp_path):
    def make(dtype: str, values: np.ndarray) -> HSDPState:
        mesh = mesh_of("shard", world)
        layout = hsdp.plan_layout([ParamSpec("w", (3,), dtype)], hm.mesh_spec(mesh))
        value = Tensor(values.astype(np.float32)).astype(getattr(ms, dtype))
        return hsdp.shard({"w": value}, layout, backend=hm.MSBackend(mesh))

    exact, rough = np.array([1.5, -2.0, 0.25]), np.array([1.0 + 2**-12, 3.0, -1.0 - 2**-7 - 2**-12])
    zeros = np.zeros(3)
    save_checkpoint(tmp_path / "bf16", make("bfloat16", exact))
    save_checkpoint(tmp_path / "fp32", make("float32", rough))
    state, _ = load_checkpoint(tmp_path / "bf16", make("float32", zeros))
    assert state.layout.units[0].params[0].dtype == "float32"
    assert (full_values(state)["w"] == exact).all()
    for dtype, rounded in [("bfloat16", [1.0, 3.0, -1.0 - 2**-7]), ("float16", [1.0, 3.0, -1.0 - 2**-7])]:
        narrow = make(dtype, zeros)
        with pytest.raises(LayoutError, match=f"'w' is float32 in the checkpoint, {dtype} here; cast=True rounds"):
            load_checkpoint(tmp_path / "fp32", narrow)
        narrow, _ = load_checkpoint(tmp_path / "fp32", narrow, cast=True)
        assert full_values(narrow)["w"].tolist() == rounded
    with pytest.raises(LayoutError, match="'w' is bfloat16 in the checkpoint, float16 here"):
        load_checkpoint(tmp_path / "bf16", narrow)


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank_before_anything_is_written(rank, world, tmp_path):
    state = odd_state("shard", world, 1)
    path = tmp_path / "s"
    for extra in ({1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": {1}}, {"a": np.float32(1)}):
        with pytest.raises(ValueError, match=r"extra (can't be written as JSON|would come back as)"):
            save_checkpoint(path, state, extra=extra)
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] have other .*extra"):
        save_checkpoint(path, state, extra={"rank": rank})
    with pytest.raises(LayoutError, match=r"more than one parameter would be called \['a.bias'\]"):
        save_checkpoint(path, state, rename={"a.weight": "a.bias"})
    with pytest.raises(LayoutError, match=r"no parameters \['nobody'\]"):
        save_checkpoint(path, state, rename={"nobody": "a"})
    assert list(tmp_path.iterdir()) == []
    gathered = hsdp.unshard(state)
    save_checkpoint(path, gathered)
    with pytest.raises(FileExistsError, match="never written over"):
        save_checkpoint(path, gathered)
    with pytest.raises(PhaseError, match="unsharded"):
        load_checkpoint(path, gathered)
    with pytest.raises(StaleStateError):
        save_checkpoint(tmp_path / "stale", state)
    with pytest.raises(LayoutError, match="no state of an optimizer"):
        state = hsdp.shard(gathered)
        optimizer = nn.SGD([p for p in hm.shard_parameters(state).values()], 0.1)
        load_checkpoint(path, state, optimizer=optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


@on_ranks(4)
def test_values_that_other_ranks_hold_under_the_same_names_are_refused(rank, world, tmp_path):
    mesh = hm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard"))
    dims = hsdp.DataParallelMeshDims(shard="shard")
    layout = hsdp.plan_layout([ParamSpec("w", (4,), "float32")], hm.mesh_spec(mesh, dims))
    values = {"w": Tensor(np.zeros(4, np.float32))}
    state = hsdp.shard(values, layout, backend=hm.MSBackend(mesh, dp_mesh_dims=dims))
    with pytest.raises(hsdp.MeshError, match="axes \\['tp'\\] that aren't data parallel"):
        save_checkpoint(tmp_path / "s", state)


# ------------------------------------------------------------------------------------------------------------ failures

SHARDS = ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"]


def damage(path: Path, kind: str) -> str:
    """Spoil a checkpoint; what an error about it says."""
    last = path / SHARDS[1]
    if kind == "missing file":
        last.unlink()
        return f"files of this checkpoint are missing: ['{SHARDS[1]}']"
    if kind == "short file":
        last.write_bytes(last.read_bytes()[:-4])
        return f"files were cut short or overwritten: ['{SHARDS[1]}']"
    if kind == "header":
        data = bytearray(last.read_bytes())
        data[8:40] = b"\xff" * 32
        last.write_bytes(data)
        return f"{SHARDS[1]}: the header can't be parsed"
    if kind == "further file":
        shutil.copy(last, path / "shard-00003-model-00001-of-00001.safetensors")
        return "['shard-00003-model-00001-of-00001.safetensors'] aren't files of this checkpoint"
    if kind == "index":
        (path / "hsdp_fn.json").write_text('{"format": 1, "fil')
        return "hsdp_fn.json can't be parsed"
    if kind == "format":
        (path / "hsdp_fn.json").write_text('{"format": 2}')
        return "has format 2"
    if kind == "no index, missing file":
        (path / "hsdp_fn.json").unlink()
        (path / SHARDS[0]).unlink()
        return "'a.weight' isn't whole in the checkpoint"
    if kind == "empty":
        shutil.rmtree(path)
        path.mkdir()
        return "it is no checkpoint"
    assert kind == "unfinished"
    path.rename(unfinished(path))
    return "is one that was never finished"


@pytest.mark.parametrize(
    "kind",
    [
        "missing file",
        "short file",
        "header",
        "further file",
        "index",
        "format",
        "no index, missing file",
        "empty",
        "unfinished",
    ],
)
@on_ranks(2)
def test_a_damaged_checkpoint_is_an_error_on_every_rank_and_changes_nothing(rank, world, tmp_path, kind):
    save_checkpoint(tmp_path / "s", odd_state("shard", world, 1))
    state = odd_state("shard", world, 2)
    texts = state.backend.exchange(damage(tmp_path / "s", kind) if rank == 0 else "")
    with pytest.raises((CheckpointError, LayoutError), match=re.escape(texts[0])):
        load_checkpoint(tmp_path / "s", state)
    require_bits(state, odd_bits(2))


@on_ranks(2)
def test_a_rank_that_sees_other_files_is_told_apart(rank, world, tmp_path):
    for seed in (0, 1):
        save_checkpoint(tmp_path / str(seed) / "s", odd_state("shard", world, seed), extra={"seed": seed})
    state = odd_state("shard", world, 2)
    with pytest.raises(RankMismatchError, match=r"ranks \[1\] have other layout, checkpoint"):
        load_checkpoint(tmp_path / str(rank) / "s", state)
    with pytest.raises(PeerFailed if rank else CheckpointError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / ("nowhere" if rank == 0 else "0/s"), state)
    require_bits(state, odd_bits(2))


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_nothing(rank, world, tmp_path, failing):
    state = odd_state("shard", world, 1)

    def full(self: FileWriter, name: str, values: Any) -> None:
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(FileWriter, "put", full)
        for save, name in ((save_checkpoint, "s"), (save_full, "f")):
            if save is save_full and failing == 1:
                continue  # only rank 0 writes there
            with pytest.raises(OSError if rank == failing else PeerFailed, match="No space left"):
                save(tmp_path / name, state)
    state.backend.exchange("")
    assert list(tmp_path.iterdir()) == []
    state.backend.exchange("")
    save_checkpoint(tmp_path / "s", state)
    state, _ = load_checkpoint(tmp_path / "s", state)
    require_bits(state, odd_bits(1))


@on_ranks(2)
def test_what_a_killed_save_left_is_replaced_by_the_next(rank, world, tmp_path):
    state = odd_state("shard", world, 1)
    if rank == 0:
        unfinished(tmp_path / "s").mkdir()
        (unfinished(tmp_path / "s") / SHARDS[1]).write_bytes(b"half")
    state.backend.exchange("")
    save_checkpoint(tmp_path / "s", state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    state, _ = load_checkpoint(tmp_path / "s", state)
    require_bits(state, odd_bits(1))
