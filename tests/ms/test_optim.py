"""Optimizers over the shards equal the same optimizer over whole parameters."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Parameter, nn

import hsdp_fn_ms as hm
from hsdp_fn import LayoutError, MixedPrecisionPolicy, PhaseError, grads, unshard
from tests.ms.pool import on_ranks
from tests.ms.workers import (
    LAYERS,
    Chain,
    Plain,
    Single,
    Tied,
    array,
    batch,
    close,
    fill,
    full_values,
    mesh_of,
    squares,
)

#: Adam divides by what may be rounding noise: a large epsilon keeps its steps comparable.
ADAM = {"learning_rate": 0.05, "eps": 1e-2}
MAX_NORM = 0.3


@pytest.mark.parametrize("kind", ["shard", "replicate"])
@on_ranks(2)
def test_adam_over_shards_with_clipping_equals_adam_over_whole_parameters(rank, world, kind):
    cell, single = fill(Chain(Plain)), Single(fill(Chain(Plain)))
    state = hm.shard_cell(cell, mesh_of(kind, world), LAYERS)
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    params = hm.shard_parameters(state)
    optimizer = nn.Adam(list(params.values()), **ADAM)
    whole = nn.Adam(list(single.params.values()), **ADAM)
    norms = []
    for i in range(3):
        batches = [batch(r, i) for r in range(world)]
        (_, _), state = step(state, *batches[rank])
        state, norm = hm.optimizer_step(state, optimizer, params, max_norm=MAX_NORM)
        _, found = single.gradients(batches)
        expected = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in found.values())))
        assert array(norm) == pytest.approx(expected, rel=1e-5)
        norms.append(expected)
        scale = min(1.0, MAX_NORM / (expected + 1e-6))
        whole(tuple(Parameter(found[n] * np.float32(scale), name=n) for n in single.params))
    assert state.step == 3 and max(norms) > MAX_NORM
    close(full_values(state), {n: array(p) for n, p in single.params.items()}, 1e-5)


@on_ranks(2)
def test_parameters_without_a_gradient_or_a_row_are_left_in_peace(rank, world):
    cell = fill(Tied())
    state = hm.shard_cell(cell, mesh_of("shard", world), LAYERS)
    before = full_values(state)
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    params = hm.shard_parameters(state)
    assert not any(name.startswith("layers.1") for name in params)  # frozen
    optimizer = nn.SGD(list(params.values()), learning_rate=0.1)
    (_, _), state = step(state, *batch(rank, outputs=6))
    state, norm = hm.optimizer_step(state, optimizer, params)
    assert norm is None
    after = full_values(state)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {"first.weight", "last.weight", "layers.0.up.weight"} <= changed
    assert not any(name.startswith(("layers.1", "layers.2")) for name in changed)


@on_ranks(2)
def test_main_gradients_and_mixed_precision_end_in_the_parameters_dtype(rank, world):
    cell = fill(Chain(Plain, 1))
    policy = MixedPrecisionPolicy("float16", "float32", apply_grad_on_fp32_main_grad=True)
    for p in cell.get_parameters():
        p.set_dtype(hm.backend.ms.float16)
    state = hm.shard_cell(cell, mesh_of("shard", world), LAYERS[:1], mp_policy=policy)
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x).astype(y.dtype), y))
    params = hm.shard_parameters(state)
    (_, _), state = step(state, *batch(rank))
    state, norm = hm.optimizer_step(state, nn.SGD(list(params.values()), 0.1), params, max_norm=1.0)
    assert np.isfinite(array(norm)) and {str(p.dtype) for p in params.values()} == {"Float16"}
    assert {v.dtype for v in full_values(state).values()} == {np.dtype("float16")}


@on_ranks(2)
def test_what_an_optimizer_step_cannot_take_is_refused_with_the_gradients_still_there(rank, world):
    cell = fill(Chain(Plain, 1))
    state = hm.shard_cell(cell, mesh_of("shard", world), LAYERS[:1])
    step = hm.value_and_grad(lambda p, x, y: squares(hm.functional_call(cell, p, x), y))
    params = hm.shard_parameters(state)
    optimizer = nn.SGD(list(params.values()), 0.1)
    (_, _), state = step(state, *batch(rank))
    some = dict(list(params.items())[:2])
    with pytest.raises(LayoutError, match="pass shard_parameters"):
        hm.optimizer_step(state, optimizer, some)
    with pytest.raises(LayoutError, match="built over exactly"):
        hm.optimizer_step(state, nn.SGD(list(some.values()), 0.1), params)
    gathered = unshard(state)
    with pytest.raises(PhaseError, match="unsharded"):
        hm.optimizer_step(gathered, optimizer, params)
    _, found = grads(gathered)
    assert all(g is not None for g in found.values())
    with pytest.raises(ValueError, match="max_norm must be positive"):
        hm.clipped(found, hm.global_norm(gathered, found), 0.0)
