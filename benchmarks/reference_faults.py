"""Failures at every collective of steps on the numpy reference backend, which is all ranks at once.

Each failure is met in two ways: a reset and a clean step, and the failed call again. Both must end, bit for bit, like a
run without a failure, with nothing left in flight and the masters untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

import hsdp_fn as hsdp
from hsdp_fn import HSDPState, Layout, MeshSpec, MixedPrecisionPolicy, ParamSpec, Sync, microbatches
from tests.probe import InjectedFault, Probe, handles

SPECS = [
    ParamSpec("head.weight", (3, 5), "float32"),
    ParamSpec("blocks.0.weight", (4, 6), "float32"),
    ParamSpec("blocks.0.bias", (7,), "float32"),
    ParamSpec("blocks.1.weight", (2, 3, 4), "float32"),
]
UNITS = ["blocks.0", "blocks.1"]
MESHES = {"FSDP": MeshSpec.fsdp(4), "HSDP": MeshSpec.hsdp(2, 2), "replicated": MeshSpec.replicated(4)}
PRECISIONS = {"fp32": MixedPrecisionPolicy(), "fp16": MixedPrecisionPolicy(param_dtype="float16")}
REGATHERS: tuple[bool | int, ...] = (True, False, 2)

Step = list[Callable[[HSDPState], HSDPState]]


def layouts() -> Iterator[tuple[str, Layout]]:
    """By the name of the mesh."""
    for (name, mesh), precision, reshard in product(MESHES.items(), PRECISIONS.values(), REGATHERS):
        if reshard is not True and reshard is not False and name != "FSDP":
            continue
        yield name, hsdp.plan_layout(SPECS, mesh, UNITS, mp_policy=precision, reshard_after_forward=reshard)


def values(seed: int) -> dict[str, Any]:
    """Integers that differ from rank to rank, small enough that sums are exact in fp16."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.integers(-4, 5, (4, *p.shape)).astype("float32") for p in SPECS}


def step(layout: Layout, held: Sync, count: int) -> Step:
    """The calls of a step of ``count`` microbatches, unit by unit as a forward and backward make them."""
    calls: Step = []
    names = [u.name for u in layout.units]
    for index, sync in enumerate(microbatches(count, hold=held)):
        grads = {n: g.astype(layout.units[0].buckets[0].compute_dtype) for n, g in values(1 + index).items()}
        for name in names:
            calls.append(lambda s, n=name: hsdp.unshard(s, n, async_op=True))  # type: ignore[misc]
            calls.append(lambda s, n=name: hsdp.shard(hsdp.wait(s, n), n, after_forward=True))  # type: ignore[misc]
        for unit in reversed(layout.units):
            mine = {p.name: grads[p.name] for p in unit.params}
            calls.append(lambda s, n=unit.name: hsdp.shard(hsdp.unshard(s, n), n))  # type: ignore[misc]
            calls.append(
                lambda s, n=unit.name, g=mine, how=sync: hsdp.reduce_grads(  # type: ignore[misc]
                    s, g, sync=how, units=n, async_op=True
                )
            )
        calls.append(hsdp.wait)
    return calls


def run(state: HSDPState, calls: Step, *, retry: bool) -> HSDPState:
    """The state that the failed call left, or, with ``retry``, the one after all calls."""
    for call in calls:
        try:
            state = call(state)
        except InjectedFault:
            if not retry:
                break
            state = call(state)
    return state


def start(layout: Layout, fault: tuple[str, int] | None = None, *, lasting: bool = False) -> HSDPState:
    backend = Probe(layout.mesh, fault=fault, lasting=lasting, in_place=True)
    return hsdp.shard(values(0), layout, backend=backend)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and x.tobytes() == b[n].tobytes() for n, x in a.items())


def problem(layout: Layout, calls: Step, fault: tuple[str, int], expected: dict[str, Any], way: str) -> str:
    """What is wrong after this failure; empty if nothing is."""
    state = start(layout, fault, lasting=way == "reset after a lasting failure")
    masters = {name: rows.copy() for name, rows in hsdp.masters(state).items()}
    state = run(state, calls, retry=way == "the call again")
    backend: Any = state.backend
    if not same(hsdp.masters(state), masters):
        return "masters were touched"
    if not backend.in_flight <= handles(state):
        return "a collective that nobody knows is in flight"
    if way != "the call again":
        state = run(hsdp.reset_iter(state), calls, retry=False)
    state, grads = hsdp.grads(state)
    return "" if same(grads, expected) else "gradients differ"


def sweep(stride: int = 1) -> dict[str, tuple[int, int, list[str]]]:
    """By mesh: how many failures were right, how many there were, and what wasn't right.

    Args:
        stride: inject every such failure only.
    """
    found: dict[str, tuple[int, int, list[str]]] = {}
    for name, layout in layouts():
        right, count, problems = found.get(name, (0, 0, []))
        for held, micro in [(Sync.FULL, 1), *product(Sync, [2])]:
            calls = step(layout, held, micro)
            clean = run(start(layout), calls, retry=False)
            backend: Any = clean.backend
            places = [(kind, k) for kind, times in backend.calls.items() for k in range(times)]
            _, expected = hsdp.grads(clean)
            for fault in places[::stride]:
                for way in ("reset", "reset after a lasting failure", "the call again"):
                    wrong = problem(layout, calls, fault, expected, way)
                    count += 1
                    right += not wrong
                    if wrong:
                        problems.append(f"{layout.mesh}, {micro} microbatches, {held}, {fault}, {way}: {wrong}")
        found[name] = right, count, problems
    return found
