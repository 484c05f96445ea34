"""Each method of the protocol on real ranks against the numpy reference, bit for bit."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import hsdp_fn_ms as hm
from hsdp_fn import (
    BackendError,
    CPUOffloadPolicy,
    Layout,
    MeshError,
    MeshSpec,
    MixedPrecisionPolicy,
    ParamSpec,
    Replicate,
    Shard,
    plan_layout,
)
from hsdp_fn.layout import Bucket
from hsdp_fn.reference import ReferenceBackend
from hsdp_fn_ms.collectives import Flight
from tests.ms.pool import on_ranks
from tests.ms.workers import array, mesh_of, tensor

SPECS = [
    ParamSpec("a", (5, 3), "float32"),
    ParamSpec("b", (1,), "float32"),
    ParamSpec("c", (4, 2), "float32", False),
    ParamSpec("d", (2, 3, 2), "float32"),
    ParamSpec("e", (0, 3), "float32"),
    ParamSpec("f", (7,), "float16"),
    ParamSpec("g", (3, 4), "float64"),
]
PLACES = {"d": Shard(1), "b": Replicate(), "g": Shard(1)}


def plan(mesh: hm.DeviceMesh, specs: Any = SPECS, **policies: Any) -> Layout:
    policies.setdefault("mp_policy", MixedPrecisionPolicy(reduce_dtype="float32"))
    return plan_layout(specs, hm.mesh_spec(mesh), placement_fn=lambda s: PLACES.get(s.name), **policies)


class Both:
    """This rank's backend and the reference of all ranks."""

    def __init__(self, mesh: hm.DeviceMesh) -> None:
        self.ours, self.reference = hm.MSBackend(mesh), ReferenceBackend(hm.mesh_spec(mesh))
        self.at = self.reference.mesh.ranks.index(self.ours.rank)
        self.rng = np.random.default_rng(3)

    def draw(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Integers, different on each rank: ``[ranks, *shape]``."""
        return self.rng.integers(-9, 10, (self.reference.mesh.size, *shape)).astype(dtype)

    def whole(self, bucket: Bucket) -> list[np.ndarray]:
        return [
            self.reference.stack(self.rng.integers(-9, 10, m.spec.shape).astype(bucket.dtype))
            for m in bucket.params.members
        ]

    def same(self, found: Tensor, expected: np.ndarray) -> None:
        assert array(found).dtype == expected.dtype
        np.testing.assert_array_equal(array(found), expected[self.at])


@pytest.mark.parametrize("kind", ["shard", "replicate", "both"])
@on_ranks(2)
def test_copies_and_collectives_are_those_of_the_reference(rank, world, kind):
    mesh = mesh_of(kind, world)
    both = Both(mesh)
    ours, reference = both.ours, both.reference
    for bucket in plan(mesh).units[0].buckets:
        where, flat = bucket.mesh, bucket.params
        stacked = both.whole(bucket)
        mine = [tensor(p[both.at]) for p in stacked]
        expected = reference.shard_params(where, flat, stacked)
        shard = ours.shard_params(where, flat, mine)
        if all(m.dim == 0 for m in flat.members):  # else the padding is laid out differently
            both.same(shard, expected)
        assert {ours.storage(shard)}.isdisjoint({ours.storage(t) for t in mine})
        assert ours.nbytes(shard) == reference.nbytes(expected) and ours.dtype(shard) == bucket.dtype
        for member, row, theirs in zip(
            flat.members, ours.split(where, flat, shard), reference.split(where, flat, expected), strict=True
        ):
            assert ours.shape(row) == ours.local_shape(where, member)
            start, stop = member.rows(where.shard_index(rank))
            both.same(row, np.take(theirs, range(stop - start), member.dim + 1))
        gathered = shard
        if bucket.gather is not None:
            gathered, handle = ours.all_gather(where, ours.load(shard, bucket.compute_dtype))
            ours.wait(handle)
            ours.wait(handle)  # again: nothing
        for full, theirs in zip(ours.unpack(where, flat, gathered), stacked, strict=True):
            both.same(full, theirs.astype(bucket.compute_dtype))
        if bucket.grads is None:
            continue
        grads = [both.draw(m.spec.shape, bucket.compute_dtype) for m in bucket.grads.members]
        given: list[Any] = [tensor(g[both.at]) for g in grads]
        grads[-1], given[-1] = (None, None) if len(grads) > 1 else (grads[-1], given[-1])
        packed = ours.pack(where, bucket.grads, given, "float32", 0.5)
        summed, theirs = packed, reference.pack(where, bucket.grads, grads, "float32", 0.5)
        before = array(packed).copy()
        if bucket.reduce_scatter is not None:
            summed, handle = ours.reduce_scatter(where, packed)
            ours.wait(handle)
            theirs, flight = reference.reduce_scatter(where, theirs)
            reference.wait(flight)
        np.testing.assert_array_equal(array(packed), before)
        if bucket.all_reduce is not None:
            buffer = ours.clone(summed)
            assert ours.storage(buffer) != ours.storage(summed)
            summed, handle = ours.all_reduce(where, buffer)
            ours.wait(handle)
            theirs, flight = reference.all_reduce(where, theirs)
            reference.wait(flight)
        for member, row, expected in zip(
            bucket.grads.members,
            ours.split(where, bucket.grads, summed),
            reference.split(where, bucket.grads, theirs),
            strict=True,
        ):
            start, stop = member.rows(where.shard_index(rank))
            both.same(row, np.take(expected, range(stop - start), member.dim + 1))


@on_ranks(2)
def test_an_output_holds_nothing_before_it_is_awaited(rank, world):
    """Also on CPU, where MindSpore's handles wait for nothing: a missing wait shows."""
    backend = hm.MSBackend(mesh_of("shard", world))
    spec = backend.spec
    for issue, size in ((backend.all_gather, 6), (backend.reduce_scatter, 6)):
        out, handle = issue(spec, tensor(np.ones(size, np.float32)))
        out.copy_(tensor(np.full(out.shape, np.nan, np.float32)))
        assert np.isnan(array(out)).all()
        backend.wait(handle)
        assert not np.isnan(array(out)).any()


@on_ranks(2)
def test_casts_scales_and_sums_are_those_of_the_reference(rank, world):
    both = Both(mesh_of("shard", world))
    ours, reference = both.ours, both.reference
    for source in ("float16", "float32", "float64"):
        value = both.draw((5,), source)
        mine = tensor(value[both.at])
        assert ours.cast(mine, source) is mine and ours.load(mine, source) is mine
        for wanted in ("float16", "float32", "float64"):
            both.same(ours.cast(mine, wanted), reference.cast(value, wanted))
            both.same(ours.add(mine, mine, wanted), reference.add(value, value, wanted))
            both.same(ours.store(mine, wanted, 1 / 3, donate=True), reference.store(value, wanted, 1 / 3, donate=True))
    zeros = ours.zeros(3, "bfloat16")
    assert ours.dtype(zeros) == "bfloat16" and ours.nbytes(zeros) == 6
    assert array(ours.add(ours.cast(tensor(np.float32([1.0])), "bfloat16"), zeros[:1], "float32")) == [1.0]


@on_ranks(2)
def test_joined_rows_are_new_memory_unless_they_are_the_shards_own(rank, world):
    mesh = mesh_of("shard", world)
    both = Both(mesh)
    ours = both.ours
    (bucket,) = plan(mesh, [*SPECS[:1], ParamSpec("h", (3, 2), "float32")]).units[0].buckets
    where, flat = bucket.mesh, bucket.params
    shard = ours.shard_params(where, flat, [tensor(p[both.at]) for p in both.whole(bucket)])
    before, rows = array(shard).copy(), ours.split(where, flat, shard)
    assert ours.join(where, flat, shard, rows) is shard and ours.join(where, flat, shard, [None, None]) is shard
    new = ours.join(where, flat, shard, [None, rows[1] + 1])
    assert ours.storage(new) != ours.storage(shard)
    np.testing.assert_array_equal(array(shard), before)
    assert array(ours.split(where, flat, new)[0]).tolist() == array(rows[0]).tolist()
    assert array(ours.split(where, flat, new)[1]).tolist() == (array(rows[1]) + 1).tolist()
    parameter = ms.Parameter(rows[1] + 2, name="h")
    assert (
        array(ours.split(where, flat, ours.join(where, flat, shard, [None, parameter]))[1]).tolist()
        == (array(rows[1]) + 2).tolist()
    )


@on_ranks(2, 4)
def test_messages_and_votes_reach_all_data_parallel_ranks(rank, world):
    for kind in ("shard", "replicate", "both"):
        backend = hm.MSBackend(mesh_of(kind, world))
        assert backend.exchange(f"from {rank}") == {r: f"from {r}" for r in range(world)}
        assert backend.votes(True) == world
        assert backend.votes(rank != 0) == world - 1


@on_ranks(2)
def test_what_cannot_run_is_refused_before_anything_is_issued(rank, world):
    mesh = mesh_of("shard", world)
    backend = hm.MSBackend(mesh)

    def refused(error: type, match: str, specs: Any, spec: MeshSpec | None = None, **policies: Any) -> None:
        with pytest.raises(error, match=match):
            backend.check(plan_layout(specs, spec or hm.mesh_spec(mesh), **policies))

    w = [ParamSpec("w", (4,), "float32")]
    refused(BackendError, "can't reduce float64", w, mp_policy=MixedPrecisionPolicy(reduce_dtype="float64"))
    refused(BackendError, "can't gather bool", [ParamSpec("w", (4,), "bool", False)])
    refused(BackendError, "has no float8_e5m2", [ParamSpec("w", (4,), "float8_e5m2", False)])
    refused(MeshError, "the layout is for ranks", w, MeshSpec.fsdp(4))
    refused(MeshError, "in this order", w, MeshSpec((2,), ("s",), ("s",), ranks=(1, 0)))
    refused(BackendError, "give both the same policy", w, offload_policy=CPUOffloadPolicy())
    with pytest.raises(BackendError, match="can't be given a time limit"), backend.limited(3.0):
        pass
    with backend.limited(None):
        pass
    assert "all_reduce of a copy" in backend.describe() and "mccl on CPU" in backend.describe()


@on_ranks(2)
def test_the_facts_of_this_mindspore_are_those_that_the_package_works_around(rank, world):
    found = hm.facts()
    assert (found.device, found.arithmetic_in_place, found.writes_to_views) == ("CPU", False, False)


def test_a_failed_collective_raises_each_time_it_is_awaited():
    class Handle:
        def wait(self) -> None:
            raise OSError("the peer is gone")

    flight = Flight(Handle(), tensor(np.zeros(1, np.float32)), None, late=True)
    for _ in range(2):
        with pytest.raises(OSError, match="the peer is gone"):
            flight.wait()
