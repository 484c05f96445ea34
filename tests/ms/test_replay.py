"""Generated programs of the pure functions on real ``mccl`` ranks and on the numpy reference, compared at every step.

Each rank runs the program on its MindSpore backend, and the whole world's program on the reference. Values are
integers, so masters, full parameters and gradients must be equal bit for bit; ledgers, phases, counters and errors must
be the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

import hsdp_fn_ms as hm
from hsdp_fn import (
    HSDPError,
    HSDPState,
    Keep,
    Layout,
    MixedPrecisionPolicy,
    ParamSpec,
    ReductionPolicy,
    Replicate,
    Shard,
    Sync,
    UnitSpec,
    apply_updates,
    clone,
    full_params,
    grads,
    masters,
    plan_layout,
    reduce_grads,
    reset_iter,
    shard,
    unshard,
    wait,
)
from hsdp_fn.reference import ReferenceBackend
from tests.ms.pool import on_ranks
from tests.ms.workers import array, mesh_of, tensor
from tests.strategies import Case

LENGTH = 20
#: Calls by how often they are drawn.
CALLS = {"unshard": 2, "wait": 1, "shard": 2, "full": 1, "reduce": 5, "grads": 4, "apply": 1, "reset": 1, "clone": 1}
SYNCS = [*Sync, Sync.FULL, Sync.FULL]
SHAPES = [(1,), (3,), (4,), (5, 2), (2, 3), (4, 4), (3, 1, 2), (1, 5)]
DTYPES = ["float32", "float32", "float32", "float64", "float16"]


def draw_layout(draw: random.Random, mesh: hm.DeviceMesh) -> Layout:
    """A root and up to two units of up to three parameters: several dtypes, dims, frozen and replicated ones. Reduced
    in what ``mccl`` can reduce."""
    specs, placements = [], {}
    units = ["a", "b"][: draw.randint(0, 2)]
    for owner in ["root", *units]:
        for i in range(draw.randint(1, 3)):
            name, shape = f"{owner}.p{i}", draw.choice(SHAPES)
            specs.append(ParamSpec(name, shape, draw.choice(DTYPES), draw.random() < 0.85))
            placements[name] = draw.choice([None, None, Replicate(), Shard(draw.randrange(len(shape)))])
    return plan_layout(
        specs,
        hm.mesh_spec(mesh),
        [UnitSpec(name) for name in units],
        mp_policy=MixedPrecisionPolicy(
            draw.choice([None, None, "float16", "float32"]), draw.choice(["float32", "float32", "float16"])
        ),
        reduction=ReductionPolicy(
            draw.choice(["avg", "sum"]),
            draw.choice([None, None, 1.0, 2.0]),
            draw.choice([None, None, 2.0]),
            draw.choice(["none", "zeros"]),
        ),
        placement_fn=lambda spec: placements[spec.name],
        fused=draw.random() < 0.7,
    )


def equal(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, theirs in expected.items():
        ours = found[name]
        assert (ours is None) == (theirs is None), f"{what}: {name}"
        if ours is not None:
            assert array(ours).dtype == theirs.dtype, f"{what}: {name}"
            np.testing.assert_array_equal(array(ours), theirs, err_msg=f"{what}: {name}")


class Pair:
    """One program's two states: this rank's, and the reference's of all ranks."""

    def __init__(self, case: Case, mesh: hm.DeviceMesh, rank: int) -> None:
        self.case, self.at = case, case.mesh.ranks.index(rank)
        self.done = self.refused = self.gradients = 0
        params = case.params()
        mine = {name: tensor(value[self.at]) for name, value in params.items()}
        self.states: list[HSDPState] = [
            shard(mine, case.layout, backend=hm.MSBackend(mesh)),
            shard(params, case.layout, backend=ReferenceBackend(case.mesh)),
        ]

    def of_rank(self, stacked: Mapping[str, Any], rows: bool = False) -> dict[str, Any]:
        """This rank's part of the reference's arrays; of ``rows``, only those that it really owns."""
        out: dict[str, Any] = {}
        for name, value in stacked.items():
            if value is None:
                out[name] = None
                continue
            out[name] = value[self.at]
            if rows:
                bucket, member = self.case.places[name]
                start, stop = member.rows(bucket.mesh.shard_index(self.case.mesh.ranks[self.at]))
                out[name] = np.take(out[name], range(stop - start), member.dim)
        return out

    def tensors(self, stacked: Mapping[str, Any], rows: bool = False) -> dict[str, Tensor | None]:
        return {n: None if a is None else tensor(a) for n, a in self.of_rank(stacked, rows).items()}

    def run(
        self,
        what: str,
        ours: Callable[[HSDPState], Any],
        theirs: Callable[[HSDPState], Any],
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        """The same call on both: the same new states and results, or the same error and the old states."""
        results, errors = [], []
        for state, call in zip(self.states, (ours, theirs), strict=True):
            try:
                results.append(call(state))
                errors.append(None)
            except HSDPError as error:
                results.append(None)
                errors.append(f"{type(error).__name__}: {error}")
        assert errors[0] == errors[1], f"{what}: {errors}"
        self.done += 1
        self.refused += errors[0] is not None
        if errors[0] is None:
            take = take or (lambda result: (result, None))
            self.states = [take(result)[0] or old for result, old in zip(results, self.states, strict=True)]
            found, expected = (take(result)[1] for result in results)
            if expected is not None:
                self.gradients += take is taken_rows and any(row is not None for row in found.values())
                equal(found, self.of_rank(expected, rows=take is taken_rows), what)
        self.compare(what)

    def compare(self, what: str) -> None:
        a, b = self.states
        assert (a.step, a.micro) == (b.step, b.micro), what
        assert a.ledger == b.ledger, what
        phases = [[(u.params_phase, u.grads_phase) for u in state.units] for state in self.states]
        assert phases[0] == phases[1], f"{what}: {phases}"
        equal(masters(a), self.of_rank(masters(b), rows=True), what)


def taken_rows(result: Any) -> Any:
    """A state and rows, as `grads` returns them."""
    return result


def taken_values(result: Any) -> Any:
    """Values without a state, as `full_params` returns them."""
    return None, result


def play(pair: Pair, draw: random.Random) -> list[str]:
    """Draw and run calls; legal ones are likelier. Returns what was done."""
    case, done = pair.case, []
    names = [unit.name for unit in case.layout.units]
    for i in range(LENGTH):
        (op,) = draw.choices(list(CALLS), list(CALLS.values()))
        units = draw.choice([None, None, None, draw.sample(names, draw.randint(1, len(names)))])
        later = draw.random() < 0.5
        what = f"{i}: {op} of {units}, async {later}"
        if op == "unshard":
            pair.run(what, *[lambda s, u=units, a=later: unshard(s, u, async_op=a)] * 2)
        elif op == "wait":
            pair.run(what, *[lambda s, u=units: wait(s, u)] * 2)
        elif op == "shard":
            pair.run(what, *[lambda s, u=units: shard(s, u)] * 2)
        elif op == "full":
            pair.run(what, *[lambda s, u=units: full_params(s, u)] * 2, take=taken_values)
        elif op == "reduce":
            sync = draw.choice(SYNCS)
            chosen = set(names if units is None else units)
            owned = [p.name for u in case.layout.units if u.name in chosen for p in u.trainable]
            unused = draw.choice([[], [], draw.sample(owned, draw.randint(0, len(owned)))])
            given = {n: g for n, g in case.grads(i, unused).items() if n in owned} if draw.random() < 0.8 else None
            mine = None if given is None else pair.tensors(given)
            pair.run(
                f"{what}, {sync}, without {unused}, grads given {given is not None}",
                lambda s, g=mine, u=units, y=sync, a=later: reduce_grads(s, g, sync=y, units=u, async_op=a),
                lambda s, g=given, u=units, y=sync, a=later: reduce_grads(s, g, sync=y, units=u, async_op=a),
            )
        elif op == "grads":
            pair.run(what, grads, grads, take=taken_rows)
        elif op == "apply":
            new = case.rows(case.values(version=i + 1))
            if draw.random() < 0.3:
                new = {name: new[name] for name in draw.sample(sorted(new), draw.randint(0, len(new)))}
            mine = pair.tensors(new, rows=True)
            pair.run(what, lambda s, m=mine: apply_updates(s, m), lambda s, m=new: apply_updates(s, m))
        elif op == "reset":
            keep = draw.choice(list(Keep))
            pair.run(f"{what}, {keep}", *[lambda s, k=keep: reset_iter(s, keep=k)] * 2)
        else:
            pair.run(what, clone, clone)
        done.append(op)
    return done


def replay(rank: int, world: int, seeds: range) -> None:
    kinds = {2: ("shard", "replicate"), 4: ("both", "shard", "replicate")}[world]
    seen: set[str] = set()
    pairs = []
    for seed in seeds:
        draw = random.Random(seed)
        mesh = mesh_of(kinds[seed % len(kinds)], world)
        case = Case(draw_layout(draw, mesh), seed)
        pair = Pair(case, mesh, rank)
        try:
            pair.compare("the first state")
            seen.update(play(pair, draw))
            finish(pair)
            pairs.append(pair)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} on {mesh}: {error}") from error
    assert seen == set(CALLS), seen
    done, refused, gradients = (sum(getattr(p, n) for p in pairs) for n in ("done", "refused", "gradients"))
    assert 0 < refused < done / 2 and gradients > len(pairs), (done, refused, gradients)


def finish(pair: Pair) -> None:
    """From wherever the program stopped: take what there is, then one clean step."""
    pair.run("reset", reset_iter, reset_iter)
    given = pair.case.grads(99)
    mine = pair.tensors(given)
    pair.run("reduce", lambda s: reduce_grads(s, mine), lambda s: reduce_grads(s, given))
    pair.run("grads", grads, grads, take=taken_rows)
    pair.run("unshard", unshard, unshard)
    pair.run("full", full_params, full_params, take=taken_values)


@pytest.mark.parametrize("first", range(0, 20, 5))
@on_ranks(2)
def test_programs_on_two_ranks_do_what_the_reference_does(rank, world, first):
    replay(rank, world, range(first, first + 5))


@pytest.mark.parametrize("first", [100])
@on_ranks(4)
def test_programs_on_four_ranks_do_what_the_reference_does(rank, world, first):
    replay(rank, world, range(first, first + 5))
