"""What `fully_shard` is given and its setters change: which values stay the same, which change, and what it costs."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import hsdp_fn_ms as hm
from hsdp_fn import MixedPrecisionPolicy, Replicate, Shard, expected_comm
from hsdp_fn.schedule import totals
from tests.ms.pool import on_ranks
from tests.ms.sizes import WIDTH
from tests.ms.workers import Chain, Plain, Single, array, batch, close, fill, linear, mesh_of, squares, tensor, weights
from tests.ms.workers_facade import (
    HOWS,
    Uneven,
    differentiate,
    exact,
    full_values,
    parameters,
    rows,
    sharded,
    trainable,
)

UNITS = 3
"""Two layers and the root."""


def integers() -> tuple[nn.Cell, Single]:
    return fill(Chain(Plain, 2), integers=True), Single(fill(Chain(Plain, 2), integers=True), linear)


def gradients(how: str, cell: nn.Cell, rank: int, micro: int = 0) -> dict[str, Tensor]:
    """Of one backward."""
    x, y = batch(rank, micro, integers=True)
    _, found = differentiate(how, cell, lambda x, y: linear(cell(x), y), x, y)
    cell.zero_grad()
    return found


def expected(cell: nn.Cell, single: Single, world: int, micro: int = 0, factor: float = 1.0) -> dict[str, np.ndarray]:
    """This rank's rows of the mean over ranks, times a factor."""
    _, found = single.gradients([batch(r, micro, integers=True) for r in range(world)])
    return rows(cell, {name: g * np.float32(factor) for name, g in found.items()})


def gathers(cell: Any) -> int:
    """All-gathers of the last iteration."""
    return sum(c.op == "all_gather" for c in cell.hsdp_state.ledger)


# -- values stay the same ---------------------------------------------------------------------------------------------


def kept(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh, reshard_after_forward=False)
    return UNITS


def root_too(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh, reshard_after_forward=True)
    return 2 * UNITS


def mixed(cell: Any, mesh: hm.DeviceMesh) -> int:
    for each, reshard in zip([*cell.layers, cell], (True, False, mesh.shape[0]), strict=True):
        hm.fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    return UNITS + 2


def set_later(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh)
    cell.set_reshard_after_forward(False)
    cell.layers[1].set_reshard_after_forward(True, recurse=False)
    return UNITS + 1


def unfused(cell: Any, mesh: hm.DeviceMesh) -> int:
    count = len(parameters(cell))
    sharded(cell, mesh, comm_fusion=False)
    return 2 * count - 4  # the root's are gathered once


def columns(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh, shard_placement_fn=lambda p: Shard(1) if len(p.shape) == 2 else None)
    assert cell.first.weight.shape == (WIDTH, WIDTH // mesh.shape[0])
    return 2 * UNITS - 1


def partly_replicated(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh, shard_placement_fn=lambda p: Replicate() if len(p.shape) == 1 else Shard(0))
    assert cell.first.bias.shape == (WIDTH,)
    return 2 * UNITS - 1


def left_whole(cell: Any, mesh: hm.DeviceMesh) -> int:
    for layer in cell.layers:
        hm.fully_shard(layer, mesh=mesh, replicate_params=list(layer.get_parameters()))
    hm.fully_shard(cell, mesh=mesh, replicate_params=[cell.last.weight])
    assert cell.last.weight.shape == (3, WIDTH) and cell.last.bias.shape != (3,)
    return 1


def ahead(cell: Any, mesh: hm.DeviceMesh) -> int:
    sharded(cell, mesh)
    one, two = cell.layers
    cell.set_modules_to_forward_prefetch([one, two])
    two.set_modules_to_forward_prefetch([])
    cell.set_modules_to_backward_prefetch([two, one])
    two.set_modules_to_backward_prefetch([])
    cell.set_reduce_scatter_max_input_buffers(2)
    cell.set_force_sum_reduction_for_comms(True)
    return 2 * UNITS - 1


def not_in_backward(cell: Any, mesh: hm.DeviceMesh) -> int:
    """These layers' weights are needed all the same: autograd asks for them."""
    sharded(cell, mesh)
    cell.layers[1].set_unshard_in_backward(False)
    return 2 * UNITS - 1


WAYS = {
    way.__name__: way
    for way in (
        kept, root_too, mixed, set_later, unfused, columns, partly_replicated, left_whole, ahead, not_in_backward
    )
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_how_units_are_kept_fetched_and_cut_changes_no_value(rank, world, way):
    """In both kinds of backward."""
    cell, single = integers()
    count = WAYS[way](cell, mesh_of("shard", world))
    for micro, how in enumerate(HOWS):
        exact(gradients(how, cell, rank, micro), expected(cell, single, world, micro))
        assert gathers(cell) == count
        if way not in ("ahead", "not_in_backward"):
            assert cell.hsdp_state.ledger == expected_comm(cell.hsdp_state.layout)
    exact(full_values(cell), weights(Chain(Plain, 2), integers=True))


@on_ranks(4)
def test_units_resharded_to_smaller_groups_give_the_same_gradients(rank, world):
    cell, single = fill(Uneven()), Single(fill(Uneven()))
    sharded(cell, mesh_of("shard", world), reshard_after_forward=2)
    batches = [batch(r) for r in range(world)]
    for how in HOWS:
        _, found = differentiate(how, cell, lambda x, y: squares(cell(x), y), *batches[rank])
        close({n: array(g) for n, g in found.items()}, rows(cell, single.gradients(batches)[1]))
        cell.zero_grad()
        ledger = cell.hsdp_state.ledger
        assert ledger == expected_comm(cell.hsdp_state.layout)
        assert [c.group_size for c in ledger if c.op == "all_gather"] == [4] * UNITS + [2] * UNITS


@on_ranks(2)
def test_parameters_that_backward_doesnt_need_arent_gathered_for_it(rank, world):
    """The gradient of a bias alone needs no parameter."""

    class Shift(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.bias = ms.Parameter(Tensor(np.ones(5, np.float32)), name="bias")

        def construct(self, x: Tensor) -> Tensor:
            return x + self.bias

    cell = nn.SequentialCell(Shift(), Shift())
    for each in [cell[0], cell[1], cell]:
        hm.fully_shard(each, mesh=mesh_of("shard", world))
    cell[1].set_unshard_in_backward(False)
    x = tensor(np.full((2, 5), rank + 1, np.float32))
    for how in HOWS:
        _, found = differentiate(how, cell, lambda x: cell(x).sum(), x + 0)  # MindSpore marks inputs for good
        exact(found, {name: np.full(p.shape, 2, np.float32) for name, p in trainable(cell).items()})
        cell.zero_grad()
        assert gathers(cell) == 3


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_units_that_stay_gathered_after_backward_spare_forward_its_gathers_until_a_step(rank, world, how):
    cell, single = integers()
    sharded(cell, mesh_of("shard", world))
    cell.set_reshard_after_backward(False)
    counts = []
    for micro in range(2):
        exact(gradients(how, cell, rank, micro), expected(cell, single, world, micro))
        counts.append(gathers(cell))
        assert {u.params_phase.name for u in cell.hsdp_state.units} == {"UNSHARDED"}
        assert cell.first.weight.shape == (WIDTH // world, WIDTH)
    assert counts == [2 * UNITS - 1, UNITS - 1]  # forward frees them all the same
    for name, p in trainable(cell).items():
        p.set_data(p * 2)
        single.params[name].set_data(single.params[name] * 2)
    cell.set_reshard_after_backward(True)
    for micro in range(2, 4):  # the updated values, then gathered anew
        exact(gradients(how, cell, rank, micro), expected(cell, single, world, micro))
        counts.append(gathers(cell))
    assert counts[-1] == 2 * UNITS - 1


# -- values change ----------------------------------------------------------------------------------------------------


#: Times the mean over two ranks.
FACTORS = {"sum": 2.0, "divide": 0.25, "scale": 4.0, "all": 8.0}


def regulate(what: str, each: Any) -> None:
    if what in ("sum", "all"):
        each.set_reduce_op_type("sum", recurse=False)
    if what in ("scale", "all"):
        each.set_gradient_scaling_factor(tensor(np.array(4.0, np.float32)))
    if what == "divide":
        each.set_gradient_divide_factor(8.0)
    if what == "all":
        with pytest.warns(DeprecationWarning):
            each.set_reduce_scatter_divide_factor(1.0)


@pytest.mark.parametrize("what", FACTORS)
@on_ranks(2)
def test_factors_of_the_reduction(rank, world, what):
    """Set between two backwards; a layer of its own factor differs from the others."""
    cell, single = integers()
    sharded(cell, mesh_of("replicate" if what == "sum" else "shard", world))
    exact(gradients("function", cell, rank), expected(cell, single, world))
    for each in [cell, *cell.layers]:
        regulate(what, each)
    cell.layers[1].set_gradient_scaling_factor(None)
    cell.layers[1].set_gradient_divide_factor(0.5)
    for micro, how in enumerate(HOWS):
        want = expected(cell, single, world, micro, FACTORS[what])
        mean = expected(cell, single, world, micro, 4.0)
        exact(gradients(how, cell, rank, micro), {n: (mean if "layers.1" in n else want)[n] for n in want})


@on_ranks(2)
def test_float16_compute_with_float32_masters_is_exact_on_integers(rank, world):
    cell, single = integers()
    half, seen = MixedPrecisionPolicy("float16", "float32"), []
    for layer in cell.layers:
        hm.fully_shard(layer, mesh=mesh_of("shard", world), mp_policy=half)
        layer.register_forward_pre_hook(lambda c, args: seen.append((str(args[0].dtype), str(c.up.weight.dtype))))
    whole = MixedPrecisionPolicy("float16", "float32", output_dtype="float32")
    hm.fully_shard(cell, mesh=mesh_of("shard", world), mp_policy=whole)
    x, y = batch(rank, integers=True)
    for how in HOWS:
        value, found = differentiate(how, cell, lambda x, y: linear(cell(x), y), x, y)
        assert value.dtype == ms.float32 and set(seen) == {("Float16", "Float16")}
        assert {str(g.dtype) for g in found.values()} == {"Float32"}
        exact(found, expected(cell, single, world))
        ledger = cell.hsdp_state.ledger
        assert {(c.op, c.dtype) for c in ledger} == {("all_gather", "float16"), ("reduce_scatter", "float32")}


@on_ranks(2)
def test_main_gradients_stay_in_the_reduce_dtype(rank, world):
    """Beside float16 parameters, with ``backward()``: they add up until dropped, and ``.grad`` gets nothing.
    MindSpore's own functions return them in the parameters' dtype."""
    cell, single = integers()
    for p in cell.get_parameters():
        p.set_dtype(ms.float16)
    main = MixedPrecisionPolicy("float16", "float32", apply_grad_on_fp32_main_grad=True)
    sharded(cell, mesh_of("shard", world), mp_policy=main)
    x, y = batch(rank, integers=True)
    _, found = differentiate("function", cell, lambda x, y: linear(cell(x), y), x, y)
    assert {str(g.dtype) for g in found.values()} == {"Float16"}
    exact(found, expected(cell, single, world, 0))
    for times in (1, 2):
        _, found = differentiate("backward", cell, lambda x, y: linear(cell(x), y), x, y)
        assert all(g is None for g in found.values())
        assert {str(p.main_grad.dtype) for p in trainable(cell).values()} == {"Float32"}
        exact({n: p.main_grad for n, p in trainable(cell).items()}, expected(cell, single, world, 0, times))
    cell.zero_grad(set_to_none=False)
    assert not any(array(p.main_grad).any() for p in trainable(cell).values())
    cell.zero_grads()
    assert all(p.main_grad is None for p in trainable(cell).values())


@on_ranks(2)
def test_ignored_parameters_are_left_alone(rank, world):
    """Their gradient is this rank's own."""
    cell, single = integers()
    left = [cell.layers[1].up.weight, cell.first.bias]
    values = [array(p) for p in left]
    sharded(cell, mesh_of("shard", world), ignored_params=left)
    assert left[0] is cell.layers[1].up.weight and left[1] is cell.first.bias
    _, own = single.gradients([batch(rank, integers=True)])
    names = ("layers.1.up.weight", "first.bias")
    for how in HOWS:
        found = gradients(how, cell, rank)
        exact({n: found[n] for n in names}, {n: own[n] for n in names})
        exact({n: g for n, g in found.items() if n not in names}, expected(cell, single, world))
    exact(dict(zip(names, left, strict=True)), dict(zip(names, values, strict=True)))
    assert not {p.name for p in cell.hsdp_state.layout.params()} & set(names)


# -- cells, methods, state --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_same_cell_of_an_extended_class(rank, world):
    cell, _ = integers()
    given, old = [cell.first, cell.last], cell.first.weight
    assert hm.fully_shard(given) is given  # over all ranks
    layer = cell.layers[0]
    assert hm.fully_shard(layer, mesh=mesh_of("shard", world)) is layer and hm.fully_shard(cell) is cell
    assert type(cell).__name__ == "HSDPChain" and type(cell).__bases__ == (hm.HSDPModule, Chain)
    assert isinstance(cell, Chain) and isinstance(cell.first, (nn.Dense, hm.HSDPModule))
    assert type(cell.first) is type(cell.last) and not isinstance(cell.layers[1], hm.HSDPModule)
    assert old is not cell.first.weight and old.shape == (0,)
    assert cell.first.weight.name == old.name and cell.first.weight.shape == (WIDTH // world, WIDTH)
    assert isinstance(cell, hm.HSDPModule) and not isinstance(cell, hm.ReplicateModule)
    assert type(type(cell)(Plain)) is Chain  # constructing from the class gives an ordinary cell


@on_ranks(2)
def test_registered_methods_run_like_forward(rank, world):
    class Coder(Chain):
        def encode(self, x: Tensor, *, twice: bool = False) -> Tensor:
            return self.first(x) * (2 if twice else 1)

    cell, single = fill(Coder(Plain), integers=True), Single(fill(Coder(Plain), integers=True), linear)
    sharded(cell, mesh_of("shard", world))
    with pytest.raises(ValueError, match="HSDPCoder doesn't have a method 'decode'"):
        hm.register_fsdp_forward_method(cell, "decode")
    with pytest.raises(TypeError, match="'first' of HSDPCoder is a cell"):
        hm.register_fsdp_forward_method(cell, "first")
    hm.register_fsdp_forward_method(cell, "encode")
    hm.register_fsdp_forward_method(cell, "encode")
    x, _ = batch(rank, integers=True)
    for how in HOWS:
        value, found = differentiate(how, cell, lambda x: cell.encode(x, twice=True).sum(), x)
        assert float(array(value)) == float(array(single.cell.encode(x, twice=True).sum()))
        inputs = sum(2 * array(batch(r, integers=True)[0]).sum(0) for r in range(world)) / world
        for name, g in found.items():
            if name == "first.weight":
                np.testing.assert_array_equal(array(g), np.tile(inputs, (g.shape[0], 1)))
            elif name == "first.bias":
                np.testing.assert_array_equal(array(g), 8)
            else:
                assert g is None if how == "backward" else not array(g).any(), name
        cell.zero_grad()
        assert totals(cell.hsdp_state.ledger)["all_gather"].count == 1


@on_ranks(2)
def test_parameters_gathered_by_hand_are_whole_and_never_stale(rank, world):
    hm.enable_mindspore_backward_compat()
    cell, single = integers()
    sharded(cell, mesh_of("shard", world))
    layer, full = cell.layers[0], array(single.params["layers.0.up.weight"])
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    own = layer.__dict__.get("up", layer.up)
    np.testing.assert_array_equal(array(own.weight), full)
    assert own.weight.shape == full.shape and [p.shape for p in layer.get_parameters()] != [full.shape]
    layer.unshard()
    np.testing.assert_array_equal(array(own.weight), full)
    layer.reshard()
    layer.reshard()
    assert own.weight is parameters(cell)["layers.0.up.weight"] and own.weight.shape != full.shape

    def step(factor: float) -> None:
        """Like an optimizer's."""
        for p in [*cell.trainable_params(), *single.params.values()]:
            ms.ops.assign(p, p * factor)

    layer.unshard()
    step(3)
    exact(gradients("backward", cell, rank), expected(cell, single, world))
    handle = layer.unshard(async_op=True)
    step(-1)
    handle.wait()
    np.testing.assert_array_equal(array(own.weight), -3 * full)
    (own.weight * 2).sum().backward()  # gradients through what was gathered by hand
    found = {n: p.grad for n, p in trainable(cell).items() if p.grad is not None}
    assert set(found) == {"layers.0.up.weight"} and (array(found["layers.0.up.weight"]) == 2).all()
    assert own.weight is parameters(cell)["layers.0.up.weight"]  # freed by the backward's end
    cell.zero_grad()
    exact(gradients("function", cell, rank, 1), expected(cell, single, world, 1))


@on_ranks(2)
def test_state_dicts_whole_and_by_rows_go_out_and_in(rank, world):
    cell, _ = integers()
    sharded(cell, mesh_of("shard", world))
    own = {n: array(p) for n, p in parameters(cell).items()}
    whole = hm.get_model_state_dict(cell)
    exact(whole, weights(Chain(Plain, 2), integers=True))
    mine = hm.get_model_state_dict(cell, full_state_dict=False)
    exact(mine, own)
    objects = list(parameters(cell).values())
    other = {n: tensor(v) for n, v in weights(Chain(Plain, 2), seed=3, integers=True).items()}
    assert hm.set_model_state_dict(cell, other) == ([], [])
    exact(full_values(cell), {n: array(v) for n, v in other.items()})
    assert cell.load_state_dict(mine) == ([], [])
    exact(full_values(cell), {n: array(v) for n, v in whole.items()})

    wrong = {**other, "last.bias": tensor(np.zeros(7, np.float32)), "layers.1.up.weight": 5}
    for bad, match in (
        (wrong, r"'layers.1.up.weight' is a int, expected a tensor; 'last.bias' has shape \(7,\), expected \(3,\)"),
        ({**other, "nobody": other["last.bias"]}, r"unexpected: \['nobody'\]"),
        ({n: v for n, v in other.items() if n != "first.bias"}, r"missing: \['first.bias'\]"),
    ):
        with pytest.raises(RuntimeError, match=match):
            cell.load_state_dict(bad)
        exact(dict(zip(own, parameters(cell).values(), strict=True)), own)
    part = {"first.bias": other["first.bias"], "nobody": other["last.bias"]}
    missing, unexpected = cell.load_state_dict(part, strict=False)
    assert unexpected == ["nobody"] and set(missing) == set(own) - {"first.bias"}
    exact(full_values(cell), {n: array(v) for n, v in {**whole, "first.bias": other["first.bias"]}.items()})
    assert all(a is b for a, b in zip(objects, parameters(cell).values(), strict=True))


@on_ranks(2)
def test_what_a_cell_says_about_itself(rank, world):
    cell, single = integers()
    sharded(cell, mesh_of("shard", world))
    with pytest.raises(RuntimeError, match="the state exists from the root's first forward on"):
        cell.describe()
    for name, g in gradients("function", cell, rank).items():
        assert g.shape == trainable(cell)[name].shape, name
    hm.hsdp_sync_stream()
    assert "layers.1" in cell.describe() and "sharded" in cell.describe().lower()
    assert cell.layers[0].hsdp_state.layout is cell.hsdp_state.layout
    hm.enable_mindspore_backward_compat()
    x, y = batch(rank, integers=True)
    linear(cell(x), y).backward()
    want = expected(cell, single, world)
    exact({n: p.grad for n, p in trainable(cell).items()}, want)
    cell.layers[1].zero_grad()
    left = {n: p.grad for n, p in trainable(cell).items() if p.grad is not None}
    exact(left, {n: g for n, g in want.items() if not n.startswith("layers.1")})
    cell.zero_grad(set_to_none=False)
    assert all(not array(p.grad).any() for n, p in trainable(cell).items() if n in left)
    cell.zero_grad()
    assert all(p.grad is None for p in parameters(cell).values())
