"""Checkpoints: exact for any number of ranks, torch's in both directions, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.common.np_dtype import bfloat16
from safetensors.numpy import save_file

import hsdp_fn as hsdp
import hsdp_fn_ms as hm
from hsdp_fn import HSDPState, LayoutError, ParamSpec, StaleStateError
from hsdp_fn.safetensors import CheckpointError
from hsdp_fn_ms.checkpoint import load_checkpoint, save_checkpoint, save_full, torch_names
from tests.ms import torch_checkpoint as torch_side
from tests.ms.odd import odd_state, raw, require_bits
from tests.ms.pool import on_ranks
from tests.ms.torch_checkpoint import ODD, TIED, odd_bits
from tests.ms.workers import LAYERS, Chain, Plain, array, batch, fill, full_values, mesh_of, squares, weights

ADAM = {"learning_rate": 0.05, "eps": 1e-2}
DATA_RANKS = 4
"""Each step's data are those of so many ranks; fewer ranks share them out."""


def save_odd(rank: int, world: int, kind: str, path: Path, seed: int) -> None:
    state = odd_state(kind, world, seed)
    save_checkpoint(path, state, extra={"epoch": 3, "name": "größer", "losses": [0.1, None]})
    require_bits(state, odd_bits(seed))  # not consumed


def load_odd(rank: int, world: int, kind: str, path: Path, seed: int, extra: dict[str, Any]) -> None:
    state, loaded = load_checkpoint(path, old := odd_state(kind, world, seed + 1))
    assert loaded.extra == extra and not loaded.missing and not loaded.unexpected
    require_bits(state, odd_bits(seed))
    with pytest.raises(StaleStateError):
        hsdp.masters(old)


EXTRA = {"epoch": 3, "name": "größer", "losses": [0.1, None]}


def test_values_are_exact_from_any_number_of_ranks_on_any_other(mccl, tmp_path):
    places = [("shard", 2), ("shard", 4), ("both", 4), ("shard", 1), ("replicate", 2)]
    for i, (kind, world) in enumerate(places):
        mccl.run(save_odd, kind, tmp_path / str(i), i, world=world, timeout=300.0)
        others = places if i == 0 else [places[i - 1]]
        for kind_then, world_then in others:
            mccl.run(load_odd, kind_then, tmp_path / str(i), i, EXTRA, world=world_then, timeout=300.0)


def test_what_torch_writes_loads_here_to_the_bit(gloo, mccl, tmp_path):
    gloo.run(torch_side.save_odd, tmp_path / "torch", 5, world=2)
    for kind, world in [("shard", 2), ("both", 4)]:
        mccl.run(load_odd, kind, tmp_path / "torch", 5, {}, world=world, timeout=300.0)


def test_what_is_written_here_torch_loads_to_the_bit(gloo, mccl, tmp_path):
    for kind, world in [("shard", 2), ("both", 4)]:
        mccl.run(save_odd, kind, tmp_path / kind, 6, world=world, timeout=300.0)
        for found in gloo.run(torch_side.load_odd, tmp_path / kind, world=2):
            for name, bits in odd_bits(6).items():
                np.testing.assert_array_equal(found[name], bits, err_msg=name)


def exchange_chain(rank: int, world: int, path: Path, save: bool) -> dict[str, np.ndarray]:
    cell = fill(Chain(), seed=int(save))
    state = hm.shard_cell(cell, mesh_of("shard", world), LAYERS)
    names = torch_names(cell)
    if save:
        save_checkpoint(path, state, rename=names)
    else:
        state, _ = load_checkpoint(path, state, rename=names)
    return {names.get(name, name): value for name, value in full_values(state).items()}


def test_a_models_norms_are_called_as_torch_calls_them(gloo, mccl, tmp_path):
    ours = mccl.run(exchange_chain, tmp_path / "ms", True, world=2, timeout=300.0)[0]
    theirs = gloo.run(torch_side.load_chain, tmp_path / "ms", world=2)
    assert theirs[0].keys() == ours.keys() and "layers.1.norm.weight" in ours
    assert all((theirs[rank][name] == value).all() for rank in (0, 1) for name, value in ours.items())
    drawn = {name: value + np.float32(0.25) for name, value in ours.items()}
    for folder, consolidated in (("shards", False), ("whole", True)):
        gloo.run(torch_side.save_chain, tmp_path / folder, drawn, consolidated, world=2)
        for back in mccl.run(exchange_chain, tmp_path / folder, False, world=2, timeout=300.0):
            assert back.keys() == drawn.keys() and all((back[name] == value).all() for name, value in drawn.items())


# ------------------------------------------------------------------------------------------------------------ training


class NoRows:
    """The optimizer of a rank that has no rows: MindSpore's own refuse an empty list."""

    parameters = ()

    def __call__(self, gradients: tuple[()]) -> None:
        assert gradients == ()


def train(
    rank: int, world: int, kind: str, steps: range, load: Path | None, save: Path | None, adam: dict[str, float]
) -> dict[str, np.ndarray]:
    cell = fill(Chain(depth=1), seed=0 if load is None else 1)
    state = hm.shard_cell(cell, mesh_of(kind, world), LAYERS[:1])
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    params = hm.shard_parameters(state)
    optimizer = nn.Adam(list(params.values()), **adam) if params else None
    assert params or rank == 3
    if load is not None:
        state, loaded = load_checkpoint(load, state, optimizer=optimizer)
        assert state.step == steps.start == loaded.step and loaded.extra == {"seen": steps.start * DATA_RANKS}
    for i in steps:
        drawn = [batch(r, i) for r in range(rank, DATA_RANKS, world)]
        x, y = (Tensor(np.concatenate([array(each[at]) for each in drawn])) for at in (0, 1))
        (_, _), state = step(state, x, y)
        state, _ = hm.optimizer_step(state, optimizer or NoRows(), params, max_norm=0.3)
    if save is not None:
        save_checkpoint(save, state, optimizer=optimizer, extra={"seen": steps.stop * DATA_RANKS})
    return full_values(state)


def test_training_goes_on_exactly_where_it_was_saved(mccl, tmp_path):
    whole = mccl.run(train, "shard", range(10), None, None, ADAM, world=2, timeout=300.0)
    mccl.run(train, "shard", range(5), None, tmp_path / "s", ADAM, world=2, timeout=300.0)
    other = ADAM | {"learning_rate": 0.7}  # the saved one counts
    resumed = mccl.run(train, "shard", range(5, 10), tmp_path / "s", None, other, world=2, timeout=300.0)
    for name, value in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)


@pytest.mark.parametrize(("before", "after"), [((2, "shard"), (4, "shard")), ((4, "both"), (1, "shard"))])
def test_training_on_another_mesh_goes_on_as_if_it_had_always_been_there(mccl, tmp_path, before, after):
    whole = mccl.run(train, after[1], range(10), None, None, ADAM, world=after[0], timeout=300.0)
    mccl.run(train, before[1], range(5), None, tmp_path / "s", ADAM, world=before[0], timeout=300.0)
    resumed = mccl.run(train, after[1], range(5, 10), tmp_path / "s", None, ADAM, world=after[0], timeout=300.0)
    start = weights(Chain(depth=1), 0)
    for name, value in whole[0].items():
        np.testing.assert_allclose(resumed[0][name], value, rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(value - start[name]).max() > 1e-3


@on_ranks(2)
def test_each_kind_of_optimizer_state_comes_back_by_the_parameters_names(rank, world, tmp_path):
    for cls, options in [
        (nn.SGD, {"learning_rate": 0.1, "momentum": 0.9}),
        (nn.Momentum, {"learning_rate": 0.1, "momentum": 0.9}),
        (nn.Adam, {"learning_rate": nn.ExponentialDecayLR(0.1, 0.9, 2), "use_amsgrad": True}),
        (nn.RMSProp, {"learning_rate": 0.1}),
    ]:
        states = []
        for seed in (0, 1):
            state = hm.shard_cell(fill(Chain(Plain, 1), seed), mesh_of("shard", world), LAYERS[:1])
            optimizer = cls(list(hm.shard_parameters(state).values()), **options)
            for at, value in enumerate(optimizer.get_parameters()):
                drawn = np.random.default_rng((seed, at, rank * (value.ndim > 0 and "." in value.name)))
                value.copy_(Tensor(drawn.integers(1, 9, value.shape).astype(array(value).dtype)))
            states.append((state, optimizer))
        (first, saved), (second, target) = states
        save_checkpoint(tmp_path / cls.__name__, first, optimizer=saved)
        load_checkpoint(tmp_path / cls.__name__, second, optimizer=target)
        stepped = {id(p) for p in target.parameters}
        for a, b in zip(saved.get_parameters(), target.get_parameters(), strict=True):
            assert id(b) in stepped or (array(a) == array(b)).all(), a.name


@on_ranks(2)
def test_optimizer_state_that_is_not_of_its_parameters_shape_is_refused(rank, world, tmp_path):
    state = hm.shard_cell(fill(Chain(Plain, 1)), mesh_of("shard", world), LAYERS[:1])
    optimizer = nn.AdaFactor(list(hm.shard_parameters(state).values()), learning_rate=0.1, relative_step=False)
    with pytest.raises(LayoutError, match=r"'exp_avg_sq\S+' of AdaFactor has shape .* own shape can be saved"):
        save_checkpoint(tmp_path / "s", state, optimizer=optimizer)
    some = nn.SGD(list(hm.shard_parameters(state).values())[:1], 0.1)
    with pytest.raises(LayoutError, match="build it over shard_parameters"):
        save_checkpoint(tmp_path / "s", state, optimizer=some)
    assert not (tmp_path / "s").exists()


@on_ranks(2)
def test_a_rank_without_rows_has_no_optimizer(rank, world, tmp_path):
    def make(value: float) -> HSDPState:
        mesh = mesh_of("shard", world)
        layout = hsdp.plan_layout([ParamSpec("w", (1, 2), "float32")], hm.mesh_spec(mesh))
        return hsdp.shard({"w": Tensor(np.full((1, 2), value, np.float32))}, layout, backend=hm.MSBackend(mesh))

    state = make(1.0)
    optimizer = None if rank else nn.Adam(list(hm.shard_parameters(state).values()))
    save_checkpoint(tmp_path / "s", state, optimizer=optimizer)
    assert sorted(json.loads((tmp_path / "s" / "hsdp_fn.json").read_text())["files"]) == [
        "optimizer/shard-00001-model-00001-of-00001.safetensors",
        "shard-00001-model-00001-of-00001.safetensors",
    ]
    state, _ = load_checkpoint(tmp_path / "s", make(2.0), optimizer=optimizer)
    assert (full_values(state)["w"] == 1.0).all()
    wrong = None if rank == 0 else optimizer
    if rank == 0:  # it has rows, so it counts
        state, _ = load_checkpoint(tmp_path / "s", state, optimizer=wrong)
    else:
        state, _ = load_checkpoint(tmp_path / "s", state)


# ------------------------------------------------------------------------------------------------------- other files


def plain(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bits.view(bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


@on_ranks(2)
def test_one_whole_file_for_mindspore_and_back(rank, world, tmp_path):
    for kind in ("shard", "replicate"):
        state = odd_state(kind, world, 7)
        save_full(tmp_path / "full.safetensors", state)
        state.backend.exchange("")
        found = ms.load_checkpoint(str(tmp_path / "full.safetensors"), format="safetensors")
        expected = odd_bits(7)
        expected |= {alias: expected[name] for name, alias in TIED.items()}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(raw(value), expected[name], err_msg=name)
        back, loaded = load_checkpoint(tmp_path / "full.safetensors", odd_state(kind, world, 8))
        assert loaded.step is None and back.step == 0
        require_bits(back, odd_bits(7))
        state.backend.exchange("")


@on_ranks(2)
def test_plain_files_with_an_index_load_and_files_beside_it_do_not_count(rank, world, tmp_path):
    state = hm.shard_cell(fill(Chain(Plain, 1)), mesh_of("shard", world), LAYERS[:1])
    values = {name: value + np.float32(1) for name, value in full_values(state).items()}
    if rank == 0:
        halves = {f"model-{i}.safetensors": sorted(values)[i::2] for i in (0, 1)}
        for file, names in halves.items():
            save_file({name: values[name] for name in names}, tmp_path / file)
        index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(values, tmp_path / "consolidated.safetensors")
    state.backend.exchange("")
    state, _ = load_checkpoint(tmp_path, state)
    found = full_values(state)
    assert all((found[name] == value).all() for name, value in values.items())
    state.backend.exchange("")
    if rank == 0:
        (tmp_path / "model-1.safetensors").unlink()
    state.backend.exchange("")
    with pytest.raises(CheckpointError, match=r"names files that aren't there: \['model-1.safetensors'\]"):
        load_checkpoint(tmp_path, state)


@on_ranks(2)
def test_a_tied_parameter_needs_one_of_its_names_and_one_value(rank, world, tmp_path):
    bits = odd_bits(9)
    values = {name: plain(bits[name], row[1]) for name, row in ODD.items() if row[1] != "bfloat16"}
    some = {"b_weight": None}
    first = values.pop("tied.first")
    if rank == 0:
        save_file({**values, "tied.last": first}, tmp_path / "one.safetensors")
        save_file({**values, "tied.last": first, "tied.first": first + 1}, tmp_path / "two.safetensors")
    state = odd_state("shard", world, 1, **some)
    state.backend.exchange("")
    with pytest.raises(CheckpointError, match=r"\('tied.first', 'tied.last'\) are one tensor .* but differ"):
        load_checkpoint(tmp_path / "two.safetensors", state)
    state, _ = load_checkpoint(tmp_path / "one.safetensors", state)
    require_bits(state, {name: value for name, value in bits.items() if name != "b.weight"})
