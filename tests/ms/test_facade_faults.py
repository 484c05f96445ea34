"""Faults, misuse and bad input of MindSpore's facade: what raises never happened, what is refused changes nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.graph.api import _pynative_executor

import hsdp_fn_ms as hm
from hsdp_fn import (
    BackendError,
    DataParallelMeshDims,
    Keep,
    LayoutError,
    MeshError,
    MixedPrecisionPolicy,
    PeerFailed,
    PhaseError,
    PolicyError,
    RankMismatchError,
    Shard,
)
from hsdp_fn_ms import compat
from tests.ms.pool import on_ranks
from tests.ms.sizes import OUT, WIDTH
from tests.ms.test_failures import Boom, Compiled, Fuse, Fused, assert_untouched, same
from tests.ms.workers import Chain, Plain, Tied, array, batch, fill, mesh_of, squares, tensor
from tests.ms.workers_facade import HOWS, differentiate, parameters, sharded, trainable

PLACES = ("unit", "loss", "backward", "output", "parameter")


class Watched(Chain):
    """One block with a norm between two layers of the root; raises where its fuse says."""

    def __init__(self) -> None:
        super().__init__(Plain, 0)
        self.fuse = Fuse()
        self.layers.append(Fused(self.fuse))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        if out._requires_grad:
            out.register_hook(lambda grad: self.fuse.at("output") or grad)
        value = squares(out, y)
        self.fuse.at("loss")
        return value


def only(how: str) -> None:
    """As in a process that differentiates in this way alone."""
    compat._enabled = False
    _pynative_executor.set_grad_flag(False)
    if how == "backward":
        hm.enable_mindspore_backward_compat()


def watched(how: str, world: int, kind: str = "shard", **options: Any) -> Any:
    only(how)
    cell = sharded(fill(Watched()), mesh_of(kind, world), **options)
    cell.layers[0].up.weight.register_hook(lambda grad: cell_fuse.at("parameter") or grad)
    cell_fuse = cell.fuse
    return cell


def step(how: str, cell: Any, *batches: Tensor) -> dict[str, np.ndarray]:
    """This rank's rows of the gradients that a step gives; those that it doesn't give left out."""
    _, found = differentiate(how, cell, cell.loss, *batches)
    return {name: array(g) for name, g in found.items() if g is not None}


def clean(how: str, world: int, *batches: Tensor, **options: Any) -> dict[str, np.ndarray]:
    """The same of a fresh cell."""
    return step(how, watched(how, world, **options), *batches)


def everything(cell: Any) -> dict[str, np.ndarray]:
    """Parameters, their gradients, masters and held sums."""
    out = {name: array(p) for name, p in parameters(cell).items() if p.size}
    out |= {f"{name}.grad": array(p._grad) for name, p in parameters(cell).items() if p._grad is not None}
    state = cell.hsdp_state
    for unit in state.units:
        held = [*unit.master, *(unit.acc_full or ()), *(unit.acc_partial.flats if unit.acc_partial else ())]
        out |= {f"{unit.name}.{i}": array(value) for i, value in enumerate(held) if value is not None}
    return out | {"micro": np.array([state.step, state.micro])}


@contextmanager
def broken(at: int) -> Iterator[list[str]]:
    """The ``at``-th launch of, or wait for, a collective inside raises. Yields what came."""
    came: list[str] = []
    originals = {name: getattr(hm.MSBackend, name) for name in ("all_gather", "reduce_scatter", "all_reduce", "wait")}

    def wrap(name: str) -> Callable[..., Any]:
        def call(self: hm.MSBackend, *args: Any) -> Any:
            if args != (None,):
                came.append(name)
            if name == "wait":
                originals[name](self, *args)
            if args != (None,) and len(came) - 1 == at:
                raise Boom(name)
            return originals[name](self, *args) if name != "wait" else None

        return call

    for name in originals:
        setattr(hm.MSBackend, name, wrap(name))
    try:
        yield came
    finally:
        for name, original in originals.items():
            setattr(hm.MSBackend, name, original)


def hold(cell: Any, kind: str, on: bool) -> None:
    """Keep gradients back: whole ones, or reduce-scattered sums."""
    (cell.set_requires_all_reduce if kind == "both" else cell.set_requires_gradient_sync)(not on)


def two_microbatches(how: str, cell: Any, kind: str, rank: int) -> None:
    """One whose gradients are there, and one that holds them back."""
    step(how, cell, *batch(rank, 0))
    hold(cell, kind, True)
    step(how, cell, *batch(rank, 1))
    hold(cell, kind, False)


# ------------------------------------------------------------------------------------------------- what raises


@pytest.mark.parametrize("kind", ["shard", "both"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_a_microbatch_that_raises_anywhere_never_happened(rank, world, how, kind):
    fresh = watched(how, world, kind)
    two_microbatches(how, fresh, kind, rank)
    with broken(-1) as came:
        expected = step(how, fresh, *batch(rank, 2))
    cell = watched(how, world, kind)
    two_microbatches(how, cell, kind, rank)
    before = everything(cell)
    for place in (*PLACES[:-1], *range(kind == "both", len(came), 1 + (kind == "both"))):
        cell.fuse.place = place if isinstance(place, str) else None
        with pytest.raises(Boom), broken(place if isinstance(place, int) else -1):
            step(how, cell, *batch(rank, 2))
        cell.fuse.place = None
        cell.reset_iter_state(keep=Keep.ACCUMULATED)
        assert_untouched(cell)
        found = everything(cell)
        assert found.keys() == before.keys(), place
        same(found, before)
    assert set(came) == {"wait", *(("all_gather", "reduce_scatter") if kind == "shard" else ("all_reduce",))}
    same(step(how, cell, *batch(rank, 2)), expected)
    same(everything(cell), everything(fresh))


@pytest.mark.parametrize("kind", ["shard", "both"])
@on_ranks(2)
def test_a_parameters_hook_that_raises_leaves_earlier_microbatches(rank, world, kind):
    """With `mindspore.value_and_grad` MindSpore runs these hooks itself, after the end: only `recoverable` helps."""
    cell = watched("backward", world, kind)
    two_microbatches("backward", cell, kind, rank)
    before = everything(cell)
    cell.fuse.place = "parameter"
    with pytest.raises(Boom):
        step("backward", cell, *batch(rank, 2))
    cell.reset_iter_state(keep=Keep.ACCUMULATED)
    same(everything(cell), before)


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_reset_drops_what_was_held_back_but_no_gradient(rank, world, how):
    cell = watched(how, world)
    two_microbatches(how, cell, "shard", rank)
    given = {name: array(p._grad) for name, p in trainable(cell).items() if p._grad is not None}
    cell.fuse.place = "backward"
    with pytest.raises(Boom):
        step(how, cell, *batch(rank, 2))
    cell.fuse.place = None
    cell.reset_iter_state()
    same({name: array(p._grad) for name, p in trainable(cell).items() if p._grad is not None}, given)
    assert bool(given) == (how == "backward") and cell.hsdp_state.micro == 0
    cell.zero_grad()
    same(step(how, cell, *batch(rank, 2)), clean(how, world, *batch(rank, 2)))


@pytest.mark.parametrize("place", ["backward", "output"])
@on_ranks(2)
def test_a_backward_that_stopped_is_undone_with_a_warning_or_has_to_be_answered(rank, world, place):
    expected = clean("backward", world, *batch(rank, 1))
    cell = watched("backward", world)

    def stop() -> None:
        cell.fuse.place = place
        with pytest.raises(Boom):
            step("backward", cell, *batch(rank))
        cell.fuse.place = None

    stop()
    with pytest.warns(UserWarning, match="the last backward stopped"):
        same(step("backward", cell, *batch(rank, 1)), expected)
    cell.zero_grad()
    cell.set_strict_iterations()
    stop()
    for refused in (lambda: cell(batch(rank)[0]), lambda: hm.get_model_state_dict(cell)):
        with pytest.raises(RuntimeError, match="call reset_iter_state"):
            refused()
    cell.reset_iter_state()
    same(step("backward", cell, *batch(rank, 1)), expected)


@pytest.mark.parametrize("kind", ["shard", "both"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_a_rank_that_fails_alone_in_an_attempt_frees_its_peers(rank, world, how, kind):
    fresh = watched(how, world, kind)
    two_microbatches(how, fresh, kind, rank)
    expected = step(how, fresh, *batch(rank, 2))
    cell = watched(how, world, kind)
    two_microbatches(how, cell, kind, rank)
    before = everything(cell)
    for place in PLACES:
        cell.fuse.place = place if rank == 1 else None
        with pytest.raises(Boom if rank == 1 else PeerFailed, match=place) as caught, hm.recoverable(cell):
            step(how, cell, *batch(rank, 2))
        cell.fuse.place = None
        assert not getattr(caught.value, "__notes__", [])
        assert_untouched(cell)
        same(everything(cell), before)
    with hm.recoverable(cell) as attempt:
        found = step(how, cell, *batch(rank, 2))
    assert attempt.committed
    same(found if how == "function" else {n: array(p.grad) for n, p in trainable(cell).items()}, expected)
    same(everything(cell), everything(fresh))


# ------------------------------------------------------------------------------- changes at the wrong moment


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_parameters_that_change_between_forward_and_backward_leave_the_gradient_that_of_the_forward(rank, world, how):
    expected = clean(how, world, *batch(rank))
    cell = watched(how, world)
    values = {name: tensor(array(p)) for name, p in parameters(cell).items()}
    weight = cell.last.weight

    def data() -> None:
        weight.data = Tensor(weight) * 2

    changes = (
        lambda: ops.assign(weight, Tensor(weight) * 2),
        lambda: weight.set_data(Tensor(weight) * 2),
        lambda: cell.load_state_dict({name: value * 2 for name, value in values.items()}),
        data,
    )
    for change in changes:

        def loss(x: Tensor, y: Tensor, change: Callable[[], Any] = change) -> Tensor:
            out = cell.loss(x, y)
            change()
            return out

        _, found = differentiate(how, cell, loss, *batch(rank))
        same({name: array(g) for name, g in found.items() if g is not None}, expected)
        cell.zero_grad()
        cell.load_state_dict(values)
    same(step(how, cell, *batch(rank)), clean(how, world, *batch(rank)))


@on_ranks(2)
def test_what_is_frozen_after_forward_has_no_gradient(rank, world):
    cell = watched("backward", world)
    loss = cell.loss(*batch(rank))
    cell.last.weight.requires_grad = False
    loss.backward()
    assert cell.last.weight.grad is None and cell.last.bias.grad is not None


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_parameters_that_are_replaced_or_converted_are_named(rank, world, how):
    expected = clean(how, world, *batch(rank))
    cell = watched(how, world)
    step(how, cell, *batch(rank))
    last, weight, rows = cell.last, cell.last.weight, array(cell.last.weight)

    def refused(match: str) -> None:
        for call in (lambda: step(how, cell, *batch(rank)), lambda: hm.get_model_state_dict(cell)):
            with pytest.raises(RuntimeError, match=match):
                call()
            cell.reset_iter_state()

    last.weight = Parameter(tensor(rows * 2), name="other")
    refused("weight.* was replaced")
    del last.weight
    refused("weight.* was replaced")
    last._params["weight"] = weight
    cell.last = nn.Dense(WIDTH, OUT)
    refused("weight.* replaced or removed")
    cell.last = last
    for other in (np.zeros((7, 7), np.float32), rows.astype(np.float16)):
        weight.data = tensor(other)
        refused("'last.weight' was converted after fully_shard: found .*, expected this rank's rows")
    weight.data = tensor(rows)
    cell.zero_grad()
    same(step(how, cell, *batch(rank)), expected)


@on_ranks(2)
def test_weights_from_before_fully_shard_are_an_error_and_never_zeros(rank, world):
    only("function")
    cell = fill(Watched())
    early = cell.trainable_params()
    optimizer = nn.SGD(early, learning_rate=0.1)
    sharded(cell, mesh_of("shard", world))
    for given in (early, ParameterTuple(early), [early[-1], cell.last.bias], optimizer.parameters):
        with pytest.raises(RuntimeError, match="trainable_params"):
            ms.value_and_grad(cell.loss, None, weights=given)(*batch(rank))
        cell.reset_iter_state()
    grads = step("function", cell, *batch(rank))
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        optimizer(tuple(map(tensor, grads.values())))
        hm.hsdp_sync_stream()
    hm.enable_mindspore_backward_compat()
    cell.loss(*batch(rank)).backward()
    assert all(p.grad is None for p in early)
    same({name: array(p.grad) for name, p in trainable(cell).items()}, grads)


# ------------------------------------------------------------------------------------- what is asked of autograd


@on_ranks(2)
def test_gradients_of_some_weights_or_of_inputs_alone(rank, world):
    expected = clean("function", world, *batch(rank))
    cell = watched("function", world)
    x, y = batch(rank)
    plain = fill(Watched())
    of_input = array(ms.grad(plain.loss, 0)(x, y))
    for name, param in list(trainable(cell).items())[::4]:
        np.testing.assert_array_equal(array(ms.grad(cell.loss, None, weights=[param])(x, y)[0]), expected[name])
        np.testing.assert_array_equal(array(ms.grad(cell.loss, None, weights=param)(x, y)), expected[name])
    both = ms.grad(cell.loss, 0, weights=cell.trainable_params())(x, y)
    np.testing.assert_array_equal(array(both[0]), of_input)
    same(dict(zip(expected, map(array, both[1]), strict=True)), expected)
    values = {name: tensor(array(p)) for name, p in parameters(cell).items()}
    uses = (
        lambda: cell.load_state_dict(values),
        lambda: hm.get_model_state_dict(cell),
        lambda: cell.finish_accumulation(),
        lambda: hm.recoverable(cell).__enter__().__exit__(None, None, None),
        lambda: same(step("function", cell, x, y), expected),
    )
    for use in uses:
        np.testing.assert_array_equal(array(ms.grad(cell.loss, 0)(x, y)), of_input)
        use()
    same(step("function", cell, x, y), expected)


@on_ranks(2)
def test_backward_checks_what_it_is_asked_for(rank, world):
    expected = clean("backward", world, *batch(rank))
    cell = watched("backward", world)
    x, y = batch(rank)

    def refused(error: type, match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=match):
            call()
        assert all(p.grad is None for p in parameters(cell).values())

    refused(RuntimeError, "floating tensor of one element", lambda: cell(x).backward())
    refused(RuntimeError, "the gradient is", lambda: cell.loss(x, y).backward(tensor(np.ones(2, np.float32))))
    refused(TypeError, "gradient", lambda: cell.loss(x, y).backward(1.0))
    refused(NotImplementedError, "create_graph", lambda: cell.loss(x, y).backward(create_graph=True))
    with ms._no_grad():
        loss = cell.loss(x, y)
    refused(RuntimeError, "doesn't require gradients", loss.backward)
    hm.enable_mindspore_backward_compat()
    loss = cell.loss(x, y)
    loss.backward()
    same({name: array(p.grad) for name, p in trainable(cell).items()}, expected)
    cell.zero_grad()
    refused(RuntimeError, "backward the graph twice", loss.backward)
    cell.loss(x, y).backward(inputs=[cell.last.weight])
    assert [name for name, p in trainable(cell).items() if p.grad is not None] == ["last.weight"]
    np.testing.assert_array_equal(array(cell.last.weight.grad), expected["last.weight"])
    cell.zero_grad()
    same(step("backward", cell, x, y), expected)


class Inner(nn.Cell):
    """A gradient inside forward, itself again, or itself from a hook in backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, OUT)

    def construct(self, x: Tensor, depth: int = 2) -> Tensor:
        if self.kind == "recursion":
            return self(ops.tanh(self.a(x)), depth - 1) if depth else self.b(x)
        if self.kind == "gradient":
            return self.b(self.a(x) + ms.grad(lambda x: ops.tanh(self.a(x)).sum())(x))
        h = self.a(x) * 1
        if h._requires_grad and depth == 2:
            h.register_hook(lambda grad: self(x, 1).sum() * 0 + grad)
        return self.b(h)


def of_all_ranks(cell: nn.Cell, world: int) -> dict[str, np.ndarray]:
    """A plain cell's gradients of the mean over all ranks' batches."""
    params = trainable(cell)

    def loss() -> Tensor:
        return sum(squares(cell(x), y) for x, y in map(batch, range(world))) / world

    return dict(zip(params, map(array, ms.grad(loss, None, weights=list(params.values()))()), strict=True))


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_recursion_and_gradients_inside_forward_are_as_without_sharding(rank, world, how):
    only(how)
    mesh = mesh_of("shard", world)
    for kind in ("recursion", "gradient") if how == "function" else ("recursion",):  # `ms.grad` ends the recording
        plain, cell = fill(Inner(kind)), fill(Inner(kind))
        hm.fully_shard(cell.a, mesh=mesh)
        hm.fully_shard(cell, mesh=mesh)
        whole = of_all_ranks(plain, world)
        _, found = differentiate(how, cell, lambda x, y, cell=cell: squares(cell(x), y), *batch(rank))
        for name, g in found.items():
            rows = whole[name][rank * -(-len(whole[name]) // 2) :][: g.shape[0]]
            np.testing.assert_allclose(array(g), rows, rtol=0, atol=1e-6, err_msg=name)
    cell = fill(Inner("hook"))
    hm.fully_shard(cell, mesh=mesh)
    with warnings.catch_warnings(), pytest.raises(PhaseError):
        warnings.simplefilter("ignore")
        differentiate(how, cell, lambda x, y: squares(cell(x), y), *batch(rank))
    cell.reset_iter_state()
    cell.kind = "plain"
    differentiate(how, cell, lambda x, y: squares(cell(x, 1), y), *batch(rank))


# --------------------------------------------------------------------------------------------- cells and roots


@on_ranks(2)
def test_what_can_be_a_root_and_what_cannot(rank, world):
    only("function")
    mesh, (x, y) = mesh_of("shard", world), batch(rank)
    cell = watched("function", world)
    cell.layers[0](x)
    for refused in (lambda: cell(x), lambda: hm.get_model_state_dict(cell)):
        with pytest.raises(RuntimeError, match=r"'layers.0' ran as a root of its own"):
            refused()
    cell = watched("function", world)
    cell(x)
    cell.layers[0](x)
    for method in ("reset_iter_state", "finish_accumulation"):
        with pytest.raises(RuntimeError, match="must be called on the root"):
            getattr(cell.layers[0], method)()
    for function in (hm.recoverable, hm.get_model_state_dict):
        with pytest.raises(RuntimeError, match="takes the root"):
            function(cell.layers[0])
    for shard in (hm.fully_shard, hm.replicate):
        with pytest.raises(AssertionError, match="applied to this module before"):
            shard(cell, mesh=mesh)
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            shard(nn.CellList([nn.Dense(2, 2)]), mesh=mesh)
    outer = hm.fully_shard(nn.SequentialCell([cell, nn.Dense(OUT, 2)]), mesh=mesh)
    with pytest.raises(RuntimeError, match="'0' ran as a root of its own"):
        outer(x)
    pair = hm.fully_shard([nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH)], mesh=mesh)
    with pytest.raises(RuntimeError, match="list can't be the single root"):
        pair[1](x)
    for copied, error in ((copy.deepcopy, AssertionError), (copy.copy, TypeError), (pickle.dumps, TypeError)):
        with pytest.raises(error, match="before fully_shard"):
            copied(cell)
    for back in (copy.deepcopy(cell.last.weight), pickle.loads(pickle.dumps(cell.last.weight))):
        np.testing.assert_array_equal(array(back), array(cell.last.weight))
    assert type(type(cell.last)(2, 2)) is nn.Dense
    same(step("function", cell, x, y), clean("function", world, x, y))


class Tuples(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.both = ParameterTuple([Parameter(tensor(np.ones((WIDTH, 2), np.float32)), name="a")])


class Other(nn.Cell):
    """A dense layer beside a parameter."""

    def __init__(self, value: np.ndarray, dtype: Any = None, trainable: bool = True) -> None:
        super().__init__()
        self.dense = nn.Dense(WIDTH, OUT)
        self.other = Parameter(Tensor(value).astype(dtype or Tensor(value).dtype), name="o", requires_grad=trainable)

    def construct(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.other[0]


@on_ranks(2)
def test_cells_that_cannot_be_sharded_stay_as_they_are(rank, world):
    mesh, (x, _) = mesh_of("shard", world), batch(rank)

    def refused(error: type, match: str, cell: nn.Cell, **options: Any) -> None:
        before = {name: (p, array(p)) for name, p in parameters(cell).items()}
        kind = type(cell)
        with pytest.raises(error, match=match):
            hm.fully_shard(cell, **{"mesh": mesh, **options})
        assert type(cell) is kind and "_hsdp_group" not in vars(cell)
        for name, p in parameters(cell).items():
            assert p is before[name][0]
            np.testing.assert_array_equal(array(p), before[name][1])

    with pytest.raises(LayoutError, match="ParameterTuple"):
        hm.fully_shard(Tuples(), mesh=mesh)
    refused(LayoutError, "'other' is a scalar", Other(np.float32(1)))
    refused(BackendError, "no matrix product on CPU", Other(np.ones(4, np.float32), ms.bfloat16))
    refused(BackendError, "no matrix product on CPU", nn.Dense(2, 2), mp_policy=MixedPrecisionPolicy("bfloat16"))
    tied = Tied()
    hm.fully_shard(tied.first, mesh=mesh)
    with pytest.raises(LayoutError, match=r"'last\.weight' is tied to"):
        hm.fully_shard(tied, mesh=mesh)
    assert type(tied) is Tied and type(tied.last) is nn.Dense
    for good in (Other(np.arange(4), trainable=False), Other(np.ones(4, np.float32), trainable=False)):
        _, found = differentiate("function", hm.fully_shard(good, mesh=mesh), lambda x, c=good: c(x).sum(), x)
        assert list(found) == ["dense.weight", "dense.bias"] and array(found["dense.bias"]).tolist()[0] == 4.0
    wrong: dict[str, Any] = {
        "mesh": 3,
        "reshard_after_forward": 1.0,
        "shard_placement_fn": lambda p: 7,
        "mp_policy": 3,
        "offload_policy": 3,
        "ignored_params": [3],
        "replicate_params": [tensor(np.ones(1))],
        "comm_fusion": 1,
        "dp_mesh_dims": DataParallelMeshDims("nothing"),
    }
    for name, value in wrong.items():
        refused((ValueError, TypeError), "", nn.Dense(2, 2), **{name: value})
    refused(MeshError, "mesh must be", nn.Dense(2, 2), mesh=(2,))
    refused(PolicyError, "doesn't divide", nn.Dense(2, 2), reshard_after_forward=3)
    refused(LayoutError, r"Shard\(5\) of parameter 'weight'", nn.Dense(2, 2), shard_placement_fn=lambda p: Shard(5))
    dense = nn.Dense(2, 2)
    refused(
        LayoutError, r"'weight'\] are in ignored", dense, ignored_params=[dense.weight], replicate_params=[dense.weight]
    )
    for value in (None, 3, [], (dense,), [dense, 3], [dense, dense], nn.Dense):
        with pytest.raises(ValueError):
            hm.fully_shard(value, mesh=mesh)
    assert type(dense) is nn.Dense


@on_ranks(2)
def test_cells_that_cannot_run_say_so_each_time(rank, world):
    only("function")
    mesh, (x, _) = mesh_of("shard", world), batch(rank)
    recomputed, custom = nn.Dense(WIDTH, 2), Plain()
    recomputed.recompute()
    custom.has_bprop = True
    tiny = Other(np.ones(1, np.float32))
    for p in tiny.dense.get_parameters():
        p.requires_grad = False
    for cell, error, match in (
        (recomputed, NotImplementedError, "recomputed in backward"),
        (custom, NotImplementedError, "bprop of its own"),
        (Compiled(), NotImplementedError, "compiled by mindspore.jit"),
        (tiny, LayoutError, "rank 1 would hold no row of any trainable parameter"),
        (nn.SequentialCell([Plain() for _ in range(1 + rank)]), RankMismatchError, "different models or policies"),
    ):
        hm.fully_shard(cell, mesh=mesh)
        for _ in range(2):
            with pytest.raises(error, match=match):
                cell(x)
    for kind in ("shard", "replicate"):
        later = hm.fully_shard(fill(nn.SequentialCell([nn.Dense(WIDTH, 2)])), mesh=mesh_of(kind, world))
        later(x)
        later[0].recompute()
        with pytest.raises(NotImplementedError, match="recomputed in backward"):
            later(x)
    different = hm.fully_shard(fill(Plain(), seed=rank), mesh=mesh)
    with pytest.warns(UserWarning, match="ranks had different weights"):
        different(x)


@on_ranks(2)
def test_settings_that_are_refused_change_nothing(rank, world):
    cell = watched("function", world)
    for run in (False, True):
        if run:
            cell(batch(rank)[0])
        before = repr((cell._hsdp_group.settings, cell._hsdp_group.handling))
        for name, value in (
            *((name, 1) for name in dir(cell) if name.startswith("set_require") or name.startswith("set_reshard")),
            ("set_unshard_in_backward", 1),
            ("set_is_last_backward", 0),
            ("set_check_unused_params", 1),
            ("set_reduce_scatter_unused_params", 1),
            ("set_force_sum_reduction_for_comms", 1),
            ("set_strict_iterations", 1),
            ("set_modules_to_forward_prefetch", cell),
            ("set_modules_to_backward_prefetch", [cell.first]),
            *(
                (name, bad)
                for name in ("set_gradient_divide_factor", "set_gradient_scaling_factor")
                for bad in (0, "x")
            ),
            ("set_gradient_scaling_factor", tensor(np.ones(2))),
            ("set_reduce_op_type", "max"),
            ("set_reduce_scatter_max_input_buffers", 0),
            ("reset_iter_state", False),
            ("unshard", 1),
            ("load_state_dict", {}),
            ("load_state_dict", {"last.weight": 3}),
            ("register", "nothing"),
        ):
            call = getattr(cell, name, lambda method: hm.register_fsdp_forward_method(cell, method))
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                call(value)
            assert repr((cell._hsdp_group.settings, cell._hsdp_group.handling)) == before, name
    for wrong in (3, nn.Dense(2, 2)):
        with pytest.raises(TypeError, match="takes a state or a cell"):
            hm.recoverable(wrong)
    cell.set_check_unused_params(True)
    with pytest.raises(PolicyError, match="checked"), hm.recoverable(cell):
        pass
    cell.set_check_unused_params(False)
    same(step("function", cell, *batch(rank)), clean("function", world, *batch(rank)))


# ------------------------------------------------------------------------------------------ memory and the rest


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_nothing_of_a_step_stays(rank, world, how):
    cell = watched(how, world)
    step(how, cell, *batch(rank))
    frame, passes = type(cell._hsdp_tree.frame), []
    begin = frame.begin_pass
    frame.begin_pass = lambda self: passes.append(weakref.ref(came := begin(self))) or came
    try:
        step(how, cell, *batch(rank))
    finally:
        frame.begin_pass = begin
    assert len(passes) == 1 and passes[0]() is None
    assert all(unit.full is None for unit in cell.hsdp_state.units)
    assert_untouched(cell)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    for i in range(20):
        step(how, cell, *batch(rank, i % 3))
    gc.collect()
    assert len(gc.get_objects()) - objects < 200 and resident() - before < 20e6
    x, y = batch(rank)
    loss = squares(cell(x), y) if how == "backward" else None
    tree = weakref.ref(cell._hsdp_tree)
    params = list(trainable(cell).values())
    held = [None if p._grad is None else array(p._grad) for p in params]
    del cell
    gc.collect()
    assert tree() is None
    if loss is not None:
        with pytest.raises(PhaseError, match="has ended"):
            loss.backward()
        assert all((array(p._grad) == g).all() for p, g in zip(params, held, strict=True))


def resident() -> float:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1]) * 4096.0


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_steps_in_other_threads(rank, world, how):
    expected = clean(how, world, *batch(rank))
    cell = watched(how, world)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(step(how, cell, *batch(rank))))
    thread.start()
    thread.join()
    same(found[0], expected)
    cell.zero_grad()
    same(step(how, cell, *batch(rank)), expected)


def test_the_package_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import hsdp_fn_ms; print(hsdp_fn_ms.HSDPModule.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().endswith("HSDPModule"), done.stderr
