"""One small known model, its moves, and the check that a refused call changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
import pytest

import hsdp_fn as h
from hsdp_fn import HSDPState, MeshSpec, ParamSpec
from hsdp_fn.lifecycle import GradPhase, Op, ParamPhase
from hsdp_fn.state import NAMESPACE
from tests.probe import Probe
from tests.strategies import Case, assert_same

#: What is illegal, written a second time and by hand, so that an edit of the library's tables shows.
ILLEGAL_PARAMS = {
    (ParamPhase.SHARDED, Op.FULL_PARAMS),
    (ParamPhase.GATHERING, Op.SHARD),
    (ParamPhase.GATHERING, Op.FULL_PARAMS),
    (ParamPhase.GATHERING, Op.APPLY),
    (ParamPhase.GATHERING, Op.LOAD),
    (ParamPhase.UNSHARDED, Op.APPLY),
    (ParamPhase.UNSHARDED, Op.LOAD),
    (ParamPhase.REGROUPED, Op.FULL_PARAMS),
    (ParamPhase.REGROUPED, Op.APPLY),
    (ParamPhase.REGROUPED, Op.LOAD),
}
ILLEGAL_GRADS = {
    (GradPhase.REDUCING, Op.REDUCE),
    (GradPhase.HELD, Op.GRADS),
    *((phase, op) for phase in GradPhase if phase is not GradPhase.EMPTY for op in (Op.APPLY, Op.LOAD)),
}

SPECS = (
    ParamSpec("embed.w", (3, 2), "float32", aliases=("head.w",)),
    ParamSpec("embed.frozen", (2,), "int64", requires_grad=False),
    ParamSpec("a.w", (5, 2), "float32"),
    ParamSpec("a.b", (4,), "float64"),
)
HALF = h.MixedPrecisionPolicy(param_dtype="float16", reduce_dtype="float32")
CASE = Case(h.plan_layout(SPECS, MeshSpec.hsdp(2, 4), ["a"], mp_policy=HALF, reshard_after_forward=2), seed=3)


def start(case: Case = CASE) -> HSDPState:
    return h.shard(case.params(), case.layout, backend=Probe(case.mesh))


def step(state: HSDPState) -> dict[str, Any]:
    """A whole step from wherever the state is; the masters afterwards."""
    state = h.shard(h.unshard(h.reset_iter(state)))
    state, rows = h.grads(h.reduce_grads(state, CASE.grads(7)))
    masters = h.masters(state)
    return h.masters(h.apply_updates(state, {n: masters[n] - g for n, g in rows.items() if g is not None}))


@contextmanager
def refused(state: HSDPState, error: type[Exception] | tuple[type[Exception], ...], *messages: str) -> Iterator[None]:
    """The call raises ``error`` with all ``messages``, issues nothing, changes nothing, and leaves a usable state."""
    backend: Any = state.backend
    issued, spec = len(backend.issued), optree.tree_structure(state, namespace=NAMESPACE)
    leaves = optree.tree_leaves(state, namespace=NAMESPACE)
    values = [x.copy() for x in leaves]
    with pytest.raises(error) as caught:
        yield
    for message in messages:
        assert message in str(caught.value)
    assert len(backend.issued) == issued
    assert optree.tree_structure(state, namespace=NAMESPACE) == spec
    for now, before, value in zip(optree.tree_leaves(state, namespace=NAMESPACE), leaves, values, strict=True):
        assert now is before
        np.testing.assert_array_equal(now, value)
    assert_same(step(state), step(start()))


CALLS: dict[Op, Callable[[HSDPState], Any]] = {
    Op.UNSHARD: h.unshard,
    Op.WAIT: h.wait,
    Op.SHARD: h.shard,
    Op.FULL_PARAMS: h.full_params,
    Op.REDUCE: lambda s: h.reduce_grads(s, CASE.grads(0)),
    Op.GRADS: h.grads,
    Op.APPLY: lambda s: h.apply_updates(s, {}),
    Op.LOAD: lambda s: h.load_masters(s, {}, step=1),
    Op.RESET: h.reset_iter,
}
