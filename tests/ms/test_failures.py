"""A step that raises never happened; with `recoverable`, not even on the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hsdp_fn_ms as hm
from hsdp_fn import (
    BackendError,
    HSDPState,
    Layout,
    LayoutError,
    MeshSpec,
    MixedPrecisionPolicy,
    ParamSpec,
    PeerFailed,
    PhaseError,
    PolicyError,
    RankMismatchError,
    ReductionPolicy,
    StaleStateError,
    Sync,
    grads,
    masters,
    plan_layout,
    shard,
)
from hsdp_fn.reference import ReferenceBackend
from hsdp_fn_ms.binding import named_cells
from tests.ms.pool import on_ranks
from tests.ms.workers import LAYERS, Block, Chain, Plain, array, batch, fill, mesh_of, squares


class Boom(Exception):
    """What the tests raise."""


class Fuse:
    """Raises where it is told to: ``place`` is a name, None for nowhere."""

    def __init__(self) -> None:
        self.place: str | None = None

    def at(self, place: str) -> None:
        if self.place == place:
            raise Boom(place)

    def backward(self, x: Tensor) -> Tensor:
        """Identity that may raise in backward."""
        y = x * 1

        def hook(grad: Tensor) -> Tensor:
            self.at("backward")
            return grad

        if y._requires_grad:
            y.register_hook(hook)
        return y


class Fused(Block):
    """With a norm, whose backward MindSpore breaks for good where the graph of a failed forward isn't ended."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse

    def construct(self, x: Tensor) -> Tensor:
        self.fuse.at("unit")
        return super().construct(self.fuse.backward(x))


def setup(world: int, **policies: Any) -> tuple[nn.Cell, Fuse, HSDPState, Callable[..., Any]]:
    fuse = Fuse()
    cell = Chain(Block)
    cell.layers[1] = Fused(fuse)
    state = hm.shard_cell(fill(cell), mesh_of("shard", world), LAYERS, **policies)

    def loss(p: hm.Params, x: Tensor, y: Tensor) -> Tensor:
        out = squares(hm.functional_call(cell, p, x), y)
        fuse.at("loss")
        return ops.matmul(out.reshape(1, 1), Tensor(np.ones((2, 2), np.float32))) if fuse.place == "shapes" else out

    return cell, fuse, state, hm.value_and_grad(loss)


def rows_of(state: HSDPState) -> dict[str, np.ndarray]:
    return {name: array(value) for name, value in masters(state).items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def clean_gradient(step: Callable[..., Any], state: HSDPState, rank: int) -> dict[str, np.ndarray]:
    (_, _), state = step(state, *batch(rank, 3))
    return {name: array(g) for name, g in grads(state)[1].items()}


def assert_untouched(cell: nn.Cell) -> None:
    for name, below in named_cells(cell):
        assert "construct" not in vars(below) and not set(below._params) & set(vars(below)), name


@contextmanager
def failing(at: int) -> Iterator[list[str]]:
    """The ``at``-th collective that is issued inside raises instead. Yields what was issued."""
    issued: list[str] = []
    originals = {name: getattr(hm.MSBackend, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}

    def wrap(name: str) -> Callable[..., Any]:
        def call(self: hm.MSBackend, *args: Any) -> Any:
            issued.append(name)
            if len(issued) - 1 == at:
                raise Boom(name)
            return originals[name](self, *args)

        return call

    for name in originals:
        setattr(hm.MSBackend, name, wrap(name))
    try:
        yield issued
    finally:
        for name, original in originals.items():
            setattr(hm.MSBackend, name, original)


@on_ranks(2)
def test_a_step_that_raises_anywhere_never_happened(rank, world):
    cell, fuse, state, step = setup(world)
    before = rows_of(state)
    for place in ("unit", "loss", "backward", "shapes"):
        fuse.place = place
        with pytest.raises((Boom, RuntimeError, ValueError)):
            step(state, *batch(rank))
        fuse.place = None
        assert_untouched(cell)
        same(rows_of(state), before)
    after = clean_gradient(step, state, rank)
    _, _, fresh, step = setup(world)
    same(after, clean_gradient(step, fresh, rank))


@on_ranks(2)
def test_a_collective_that_cannot_be_issued_leaves_the_state_as_it_was_wherever_it_is(rank, world):
    cell, _, state, step = setup(world)
    before = rows_of(state)
    with failing(-1) as issued:
        count = len(clean_gradient(step, setup(world)[2], rank)) and len(issued)
    assert count == 7 + 4
    for at in range(0, count, 2):
        with failing(at), pytest.raises(Boom):
            clean_gradient(step, state, rank)
        assert_untouched(cell)
    same(rows_of(state), before)
    after = clean_gradient(step, state, rank)
    _, _, fresh, step = setup(world)
    same(after, clean_gradient(step, fresh, rank))


@pytest.mark.parametrize("place", ["unit", "loss", "backward", "shapes"])
@on_ranks(2)
def test_a_rank_that_fails_alone_frees_its_peers_and_nobody_takes_the_attempt(rank, world, place):
    cell, fuse, state, step = setup(world)
    before = rows_of(state)
    fuse.place = place if rank == 1 else None
    mine: type[Exception] = RuntimeError if place == "shapes" else Boom  # the operator's own, or a late one
    text = "must be equal" if place == "shapes" else place
    with pytest.raises(mine if rank == 1 else PeerFailed, match=text) as caught, hm.recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, *batch(rank))
    assert rank == 1 or caught.value.ranks == (1,)
    assert attempt.state is state and attempt.committed is False
    assert not getattr(caught.value, "__notes__", [])
    assert_untouched(cell)
    same(rows_of(state), before)
    fuse.place = None
    with hm.recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, *batch(rank, 3))
    assert attempt.committed
    after = {name: array(g) for name, g in grads(attempt.state)[1].items()}
    with pytest.raises(StaleStateError):
        step(state, *batch(rank))
    _, _, fresh, step = setup(world)
    same(after, clean_gradient(step, fresh, rank))


@on_ranks(2)
def test_attempts_are_refused_where_they_cannot_be_kept(rank, world):
    _, _, state, step = setup(world)
    with pytest.raises(TypeError, match="takes a state"):
        hm.recoverable({})
    with pytest.raises(LayoutError, match="must be a state"), hm.recoverable(state) as attempt:
        (_, _), _ = step(attempt.state, *batch(rank))
        attempt.state = None
    with pytest.raises(PhaseError, match="must come from the one"), hm.recoverable(state) as attempt:
        attempt.state = state
    with (
        pytest.raises(PhaseError, match="inside another"),
        hm.recoverable(state) as attempt,
        hm.recoverable(attempt.state),
    ):
        pass
    checked = setup(world, reduction=ReductionPolicy(unused="checked"))[2]
    with pytest.raises(PolicyError, match="checked"), hm.recoverable(checked):
        pass


@on_ranks(2)
def test_wrong_losses_and_used_up_states_are_refused(rank, world):
    cell, _, state, step = setup(world)

    def refused(error: type, match: str, fn: Callable[..., Any], **options: Any) -> None:
        with pytest.raises(error, match=match):
            hm.value_and_grad(fn, **options)(state, *batch(rank))
        assert_untouched(cell)

    refused(TypeError, "scalar floating loss", lambda p, x, y: hm.functional_call(cell, p, x))
    refused(TypeError, "scalar floating loss", lambda p, x, y: 1.0)
    refused(TypeError, "doesn't depend", lambda p, x, y: x.sum())
    refused(TypeError, "must return", lambda p, x, y: x.sum(), has_aux=True)
    with pytest.raises(TypeError, match="sync must be"):
        step(state, *batch(rank), sync="full")
    kept = []
    (_, _), new = hm.value_and_grad(lambda p, x, y: kept.append(p) or p["first.weight"].sum())(state, *batch(rank))
    with pytest.raises(PhaseError, match="this step has ended"):
        kept[0]["layers.0.up.weight"]
    with pytest.raises(StaleStateError, match="value_and_grad"):
        step(state, *batch(rank))
    (_, _), new = step(new, *batch(rank), sync=Sync.FULL)
    assert new.micro == 2


@on_ranks(2)
def test_models_that_do_not_fit_their_layout_are_refused(rank, world):
    cell, _, state, step = setup(world)
    other = fill(Chain(Block, 2))
    with pytest.raises(LayoutError, match=r"has parameter 'layers\.2"):
        hm.value_and_grad(lambda p, x, y: hm.functional_call(other, p, x).sum())(state, *batch(rank))
    cell.first.weight.requires_grad = False
    with pytest.raises(LayoutError, match="was frozen, unfrozen or removed"):
        step(state, *batch(rank))
    cell.first.weight.requires_grad = True
    (_, _), state = step(state, *batch(rank))
    mesh = mesh_of("shard", world)
    with pytest.raises(LayoutError, match="owns no parameter"):
        hm.shard_cell(fill(Chain(Plain)), mesh, ["nothing"])
    with pytest.raises(BackendError, match="no matrix product on CPU"):
        hm.shard_cell(fill(Chain(Plain)), mesh, LAYERS, mp_policy=MixedPrecisionPolicy("bfloat16"))
    with pytest.raises(LayoutError, match="expected a Cell"):
        hm.plan_cell({}, mesh)
    lists = hm.shard_cell(fill(Chain(Plain)), mesh, ["layers"])
    with pytest.raises(LayoutError, match="has no construct"):
        hm.evaluate(lambda p, x: hm.functional_call(Chain(Plain), p, x))(lists, batch(rank)[0])
    theirs: Layout = plan_layout([ParamSpec("w", (4,), "float32")], MeshSpec.fsdp(1))
    numbers = shard({"w": np.ones((1, 4), np.float32)}, theirs, backend=ReferenceBackend(MeshSpec.fsdp(1)))
    with pytest.raises(BackendError, match="can't run MindSpore tensors"):
        step(numbers, *batch(rank))


@on_ranks(2)
def test_ranks_with_different_models_learn_of_it_together(rank, world):
    mesh = mesh_of("shard", world)
    with pytest.raises(RankMismatchError, match="ranks disagree"):
        hm.shard_cell(fill(Chain(Plain, 2 + rank)), mesh, LAYERS[:2])
    with pytest.raises(LayoutError if rank else RankMismatchError):
        hm.shard_cell(fill(Chain(Plain)), mesh, ["nothing"] if rank else LAYERS)
    state = hm.shard_cell(fill(Chain(Plain)), mesh, LAYERS, reduction=ReductionPolicy(unused="checked"))
    with pytest.raises(RankMismatchError, match="different parameters"):
        hm.value_and_grad(lambda p, x: p["first.weight" if rank else "first.bias"].sum())(state, batch(rank)[0])


class Compiled(Plain):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.up(x)


@on_ranks(2)
def test_cells_that_would_lose_gradients_are_refused(rank, world):
    def refused(cell: nn.Cell, match: str) -> None:
        state = hm.shard_cell(fill(cell), mesh_of("shard", world), LAYERS[:1])
        with pytest.raises(NotImplementedError, match=match):
            hm.value_and_grad(lambda p, x, y: hm.functional_call(cell, p, x).sum())(state, *batch(rank))

    recomputed = Chain(Plain, 1)
    recomputed.layers[0].up.recompute()
    refused(recomputed, "'layers.0.up' .* is recomputed in backward")
    refused(Chain(Compiled, 1), "'layers.0' .* compiled by mindspore.jit")
    custom = Chain(Plain, 1)
    custom.layers[0].has_bprop = True
    refused(custom, "bprop of its own")
