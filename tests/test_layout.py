"""`plan_layout`: who owns which rows, against plain-Python oracles; and every input it must refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import hsdp_fn
from hsdp_fn import (
    ROOT,
    Collective,
    HSDPError,
    Layout,
    LayoutError,
    MeshSpec,
    MixedPrecisionPolicy,
    OnMesh,
    ParamSpec,
    PrefetchPolicy,
    ReductionPolicy,
    Replicate,
    Shard,
    UnitSpec,
    UnknownUnitError,
    plan_layout,
)
from hsdp_fn.layout import Flat
from tests.strategies import chunks, layouts

ITEMSIZE = {"float16": 2, "float32": 4, "float64": 8, "int64": 8}
SMALL_SHAPES = [*product(range(13)), *product(range(8), range(4)), *product(range(4), range(1, 6), range(1, 3))]


def plan(*specs: ParamSpec, world: int = 2, units: tuple[str | UnitSpec, ...] = (), **kwargs: Any) -> Layout:
    return plan_layout(specs, MeshSpec.fsdp(world), units, **kwargs)


# ------------------------------------------------------------------------------------------------------- ownership


def test_every_small_shape_on_every_small_world_is_split_like_torch_chunk_on_every_dim() -> None:
    for world, shape in product(range(1, 9), SMALL_SHAPES):
        for dim in range(len(shape)):
            (unit,) = plan(ParamSpec("w", shape, "float32"), world=world, placement_fn=lambda _, d=dim: Shard(d)).units
            flat = unit.buckets[0].params
            (member,) = flat.members
            owned = chunks(shape[dim], world)
            assert [list(range(*member.rows(i))) for i in range(world)] == owned
            assert member.chunk == len(owned[0])
            assert member.dim == dim
            for piece, rows in enumerate(owned):
                assert member.local_shape(piece) == (*shape[:dim], len(rows), *shape[dim + 1 :])
            assert member.stored_shape == member.local_shape(0)
            assert member.numel == flat.numel == prod(member.stored_shape)
            assert flat.padding == world * flat.numel - prod(shape)


@given(layouts())
def test_rows_of_every_parameter_are_a_partition_and_each_piece_keeps_the_order(layout: Layout) -> None:
    for unit in layout.units:
        for bucket in unit.buckets:
            for member in bucket.params.members:
                pieces = [list(range(*member.rows(i))) for i in range(bucket.mesh.shard_size)]
                assert pieces == chunks(member.spec.shape[member.dim], bucket.mesh.shard_size)
                assert [row for piece in pieces for row in piece] == list(range(member.spec.shape[member.dim]))


@given(layouts())
def test_members_of_a_flat_shard_lie_side_by_side_and_what_isnt_parameters_is_counted_as_padding(
    layout: Layout,
) -> None:
    buckets = [b for u in layout.units for b in u.buckets]
    flats = [f for b in buckets for f in (b.params, b.grads, b.regather and b.regather.params) if f is not None]
    for flat in flats:
        taken = [place for m in flat.members for place in range(m.offset, m.offset + m.numel)]
        assert taken == list(range(flat.numel))
        assert flat.padding == flat.shard_size * flat.numel - sum(m.spec.numel for m in flat.members)
        assert 0 <= flat.padding <= sum((flat.shard_size - 1) * m.numel // max(m.chunk, 1) for m in flat.members)


@given(layouts())
def test_buckets_hold_every_parameter_once_and_gradients_only_the_trainable_ones(
    layout: Layout,
) -> None:
    for unit in layout.units:
        members = [m for b in unit.buckets for m in b.params.members]
        assert sorted(m.index for m in members) == list(range(len(unit.params)))
        assert all(unit.params[m.index] is m.spec for m in members)
        fused = len({(b.mesh, b.dtype) for b in unit.buckets}) == len(unit.buckets)
        assert fused or [b.params.members[0].index for b in unit.buckets] == list(range(len(unit.params)))
        for bucket in unit.buckets:
            assert {m.spec.dtype for m in bucket.params.members} == {bucket.dtype}
            wanted = [m.spec.name for m in bucket.params.members if m.spec.requires_grad]
            assert [m.spec.name for m in bucket.grads.members] == wanted if bucket.grads else not wanted
            assert (bucket.grads is bucket.params) == (len(wanted) == len(bucket.params.members))
        assert [p.name for p in unit.trainable] == [p.name for p in unit.params if p.requires_grad]


@given(layouts(main_grads=True))
def test_collectives_carry_whole_padded_flats_in_the_dtype_of_their_kind_and_empty_ones_carry_none(
    layout: Layout,
) -> None:
    def expect(found: Collective | None, op: str, flat: Flat | None, dtype: str, group: int) -> None:
        if flat is None or group == 1 or flat.numel == 0:
            assert found is None
            return
        assert found is not None
        stored = sum(prod(m.stored_shape) for m in flat.members)
        numel = stored if op == "all_reduce" else stored * group
        padding = 0 if op == "all_reduce" else numel - sum(prod(m.spec.shape) for m in flat.members)
        assert (found.op, found.unit, found.bucket, found.dtype) == (op, unit.name, bucket.index, dtype)
        assert (found.numel, found.group_size, found.padding) == (numel, group, padding)
        assert found.nbytes == numel * ITEMSIZE[dtype]

    for unit, bucket in ((u, b) for u in layout.units for b in u.buckets):
        floating = bucket.dtype != "int64"
        compute = (unit.mp_policy.param_dtype or bucket.dtype) if floating else bucket.dtype
        reduce = unit.mp_policy.reduce_dtype or compute
        assert (bucket.compute_dtype, bucket.reduce_dtype) == (compute, reduce)
        main = unit.mp_policy.apply_grad_on_fp32_main_grad
        assert bucket.grad_dtype == (reduce if main else bucket.dtype)
        s, r = bucket.mesh.shard_size, bucket.mesh.replicate_size
        expect(bucket.gather, "all_gather", bucket.params, compute, s)
        size = unit.reshard_after_forward
        assert (bucket.regather is None) == (isinstance(size, bool) or s <= size)
        if bucket.regather is not None:
            assert bucket.regather.params.shard_size == bucket.regather.mesh.shard_size == size
            assert [m.spec for m in bucket.regather.params.members] == [m.spec for m in bucket.params.members]
            expect(bucket.regather.gather, "all_gather", bucket.regather.params, compute, size)
        expect(bucket.reduce_scatter, "reduce_scatter", bucket.grads, reduce, s)
        expect(bucket.all_reduce, "all_reduce", bucket.grads, reduce, r)


@pytest.mark.parametrize(
    ("master", "reduce", "accumulator"),
    [
        ("float32", None, "float32"),
        ("float32", "float16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float16", "float32"),
        ("float16", "float16", "float16"),
        ("float32", "float64", "float64"),
        ("float64", "float16", "float64"),
    ],
)
def test_gradients_accumulate_in_the_wider_of_master_and_reduction_dtype(
    master: str, reduce: str | None, accumulator: str
) -> None:
    layout = plan(ParamSpec("w", (4,), master), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    assert layout.units[0].buckets[0].acc_dtype == accumulator


@pytest.mark.parametrize(
    ("master", "compute", "reduce", "main"),
    [
        ("bfloat16", None, "float32", "float32"),
        ("float32", "bfloat16", "float32", "float32"),
        ("bfloat16", "float32", None, "float32"),
        ("bfloat16", None, None, "bfloat16"),
        ("float32", None, "float64", "float64"),
        ("float32", "bfloat16", None, "bfloat16"),
    ],
)
def test_a_main_gradient_is_finished_and_accumulated_in_the_reduce_dtype(
    master: str, compute: str | None, reduce: str | None, main: str
) -> None:
    policies = [MixedPrecisionPolicy(compute, reduce, apply_grad_on_fp32_main_grad=on) for on in (True, False)]
    (kept,), (cast,) = (plan(ParamSpec("w", (4,), master), mp_policy=p).units[0].buckets for p in policies)
    assert (kept.dtype, kept.grad_dtype, kept.acc_dtype) == (master, main, main)
    assert (cast.dtype, cast.grad_dtype) == (master, master)
    assert (kept.gather, kept.reduce_scatter) == (cast.gather, cast.reduce_scatter)


# --------------------------------------------------------------------------------------------------------- buckets


def names_of(layout: Layout) -> dict[str, list[list[str]]]:
    """Names of each unit's parameters, bucket by bucket."""
    return {u.name: [[m.spec.name for m in b.params.members] for b in u.buckets] for u in layout.units}


def test_a_units_parameters_are_in_buckets_by_mesh_and_dtype_or_each_in_its_own() -> None:
    dtypes = {"a.w": "float32", "a.e": "float64", "a.b": "float32", "a.n": "float32"}
    specs = [ParamSpec(n, (3, 2), d, requires_grad=n != "a.n") for n, d in dtypes.items()]

    def planned(**fused: bool) -> Layout:
        return plan(*specs, units=("a",), placement_fn=lambda s: Replicate() if s.name == "a.b" else None, **fused)

    assert names_of(planned()) == names_of(planned(fused=True)) == {"a": [["a.w", "a.n"], ["a.e"], ["a.b"]]}
    layout = planned(fused=False)
    assert names_of(layout) == {"a": [["a.w"], ["a.e"], ["a.b"], ["a.n"]]}
    buckets = layout.units[0].buckets
    assert [b.index for b in buckets] == [0, 1, 2, 3]
    assert [(b.params.numel, b.params.members[0].offset) for b in buckets] == [(4, 0), (4, 0), (6, 0), (4, 0)]
    assert [b.grads is b.params for b in buckets] == [True, True, True, False]
    assert buckets[3].grads is None


def test_a_units_own_choice_to_fuse_wins_over_the_layouts() -> None:
    specs = [ParamSpec(f"{u}.{p}", (4,), "float32") for u in ("head", "a", "b") for p in ("v", "w")]
    for default in (True, False):
        layout = plan(*specs, units=(UnitSpec("a", fused=not default), "b"), fused=default)
        assert [len(u.buckets) for u in layout.units] == ([1, 2, 1] if default else [2, 1, 2])


def test_fusing_one_parameter_changes_nothing() -> None:
    specs = [ParamSpec("a.w", (4,), "float32"), ParamSpec("b.w", (4,), "float32")]
    assert plan(*specs, units=("a", "b"), fused=False) == plan(*specs, units=("a", "b"))


# ----------------------------------------------------------------------------------------------------------- units


def test_a_parameter_belongs_to_the_unit_with_the_longest_dotted_prefix() -> None:
    names = ["layers.1.w", "layers.10.w", "layers.1.sub.w", "layers.1.subtle.w", "layers", "norm.w"]
    units = ("layers.1", "layers.10", "layers.1.sub")
    layout = plan(*(ParamSpec(n, (4,), "float32") for n in names), units=units)
    assert {u.name: [p.name for p in u.params] for u in layout.units} == {
        ROOT: ["layers", "norm.w"],
        "layers.1": ["layers.1.w", "layers.1.subtle.w"],
        "layers.10": ["layers.10.w"],
        "layers.1.sub": ["layers.1.sub.w"],
    }


def test_units_keep_the_order_given_and_the_root_comes_first_wherever_it_was_named() -> None:
    specs = [ParamSpec(n, (4,), "float32") for n in ("b.w", "a.w", "c.w", "head.w")]
    layout = plan(*specs, units=("b", UnitSpec(ROOT, reshard_after_forward=True), "a"))
    assert [u.name for u in layout.units] == [ROOT, "b", "a"]
    assert [p.name for p in layout.units[0].params] == ["c.w", "head.w"]
    assert [u.reshard_after_forward for u in layout.units] == [True, True, True]
    assert [u.reshard_after_forward for u in plan(*specs, units=("b", "a")).units] == [False, True, True]
    assert [u.name for u in plan(*specs[:2], units=("b", "a")).units] == ["b", "a"]


def test_a_unit_may_gather_modules_that_share_no_prefix() -> None:
    specs = [ParamSpec(n, (4,), "float32") for n in ("embed.w", "mid.w", "head.w")]
    layout = plan(*specs, units=(UnitSpec("ends", modules=("embed", "head")), "mid"))
    assert {u.name: [p.name for p in u.params] for u in layout.units} == {
        "ends": ["embed.w", "head.w"],
        "mid": ["mid.w"],
    }


def test_a_units_own_policies_win_over_the_layouts() -> None:
    specs = [ParamSpec(n, (4,), "float32") for n in ("head.w", "a.w", "b.w")]
    half, full = MixedPrecisionPolicy("float16"), MixedPrecisionPolicy("float32")
    mean, total = ReductionPolicy(), ReductionPolicy("sum")
    own = UnitSpec("a", reshard_after_forward=False, mp_policy=full, reduction=mean)
    layout = plan(*specs, units=(own, "b"), mp_policy=half, reduction=total, reshard_after_forward=True)
    found = {u.name: (u.mp_policy, u.reduction, u.reshard_after_forward) for u in layout.units}
    assert found == {ROOT: (half, total, True), "a": (full, mean, False), "b": (half, total, True)}
    assert [u.buckets[0].compute_dtype for u in layout.units] == ["float16", "float32", "float16"]


def test_tied_weights_belong_to_one_unit_under_both_names() -> None:
    tied = ParamSpec("embed.w", (4,), "float32", aliases=("head.w",))
    layout = plan(tied, ParamSpec("mid.w", (4,), "float32"), units=(UnitSpec("ends", ("embed", "head")), "mid"))
    assert layout.units[0].positions == {"embed.w": 0, "head.w": 0}
    for units in (("embed", "mid"), ("mid", "head"), ("embed", "head")):
        with pytest.raises(LayoutError, match=r"'embed\.w' is tied to 'head\.w'.*different units"):
            plan(tied, ParamSpec("mid.w", (4,), "float32"), units=units)


def test_tied_weights_may_meet_in_a_root_that_claims_one_of_them_by_name() -> None:
    tied = ParamSpec("embed.w", (4,), "float32", aliases=("head.w",))
    layout = plan(tied, units=(UnitSpec(ROOT, modules=("embed",)),))
    assert [p.name for p in layout.units[0].params] == ["embed.w"]


def test_ignoring_a_tied_parameter_by_any_name_leaves_it_out_of_every_unit() -> None:
    tied = ParamSpec("embed.w", (4,), "float32", aliases=("head.w",))
    for name in ("embed.w", "head.w"):
        layout = plan(tied, ParamSpec("mid.w", (4,), "float32"), ignored=[name])
        assert [p.name for p in layout.params()] == ["mid.w"]
        assert "embed.w" in layout.ignored


def test_select_gives_indices_in_the_order_asked_each_once_and_names_an_unknown_unit() -> None:
    layout = plan(*(ParamSpec(n, (4,), "float32") for n in ("a.w", "b.w", "c.w")), units=("a", "b"))
    assert layout.select(None) == (0, 1, 2)
    assert layout.select("b") == layout.select(["b", "b"]) == (2,)
    assert layout.select(["b", ROOT]) == (2, 0)
    assert layout.select([]) == ()
    with pytest.raises(UnknownUnitError, match=r"no unit 'z'.*'', 'a', 'b'") as caught:
        layout.select(["a", "z"])
    assert isinstance(caught.value, LookupError)


# ---------------------------------------------------------------------------------------------------------- digest

BASE = """
from hsdp_fn import *
spec = ParamSpec("a.w", (5, 2), "float32", aliases=("a.v",))
layout = plan_layout([spec, ParamSpec("b.w", (3,), "float64")], MeshSpec.hsdp(2, 2), ["a"], ignored=[])
print(layout.digest)
"""


def test_the_digest_is_the_same_in_every_process_whatever_the_hash_seed() -> None:
    root = str(Path(hsdp_fn.__file__).parent.parent)
    found = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        result = subprocess.run([sys.executable, "-c", BASE], env=env, capture_output=True, text=True, check=True)
        found.add(result.stdout.strip())
    scope: dict[str, Any] = {}
    exec(BASE.replace("print(layout.digest)", ""), scope)
    assert found == {scope["layout"].digest}


@given(layouts())
@settings(max_examples=30)
def test_planning_twice_gives_equal_layouts_with_equal_hashes(layout: Layout) -> None:
    again = replace(layout, units=tuple(replace(u) for u in layout.units))
    assert again is not layout
    assert again == layout
    assert hash(again) == hash(layout)
    assert layout != layout.digest


def test_the_digest_changes_with_every_fact_that_ranks_must_agree_on() -> None:
    base: dict[str, Any] = {"units": ["a"]}
    w, b = ParamSpec("a.w", (4, 2), "float32"), ParamSpec("b.w", (4,), "float32")
    mesh = MeshSpec.fsdp(2)
    layouts_ = [
        plan_layout([w, b], mesh, **base),
        plan_layout([b, w], mesh, units=["b"]),
        plan_layout([replace(w, name="a.x"), b], mesh, **base),
        plan_layout([replace(w, shape=(2, 4)), b], mesh, **base),
        plan_layout([replace(w, dtype="float64"), b], mesh, **base),
        plan_layout([replace(w, requires_grad=False), b], mesh, **base),
        plan_layout([replace(w, aliases=("a.v",)), b], mesh, **base),
        plan_layout([w, b], MeshSpec.fsdp(4), **base),
        plan_layout([w, b], replace(mesh, ranks=(1, 0)), **base),
        plan_layout([w, b], mesh),
        plan_layout([w, b], mesh, **base, ignored=["b.w"]),
        plan_layout([w, b], mesh, **base, reshard_after_forward=True),
        plan_layout([w, b], mesh, **base, placement_fn=lambda s: Replicate()),
        plan_layout([w, b], mesh, **base, placement_fn=lambda s: Shard(-1)),
        plan_layout([w, b], mesh, **base, placement_fn=lambda s: OnMesh(Shard(0), MeshSpec.hsdp(1, 2))),
        plan_layout([w, b], mesh, [UnitSpec("a", mesh=MeshSpec.hsdp(1, 2))]),
        plan_layout([w, b], mesh, **base, mp_policy=MixedPrecisionPolicy("float16")),
        plan_layout([w, b], mesh, **base, mp_policy=MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)),
        plan_layout([w, b], mesh, fused=False),
        plan_layout([w, b], mesh, **base, reduction=ReductionPolicy("sum")),
        plan_layout([w, b], mesh, [UnitSpec("a", reduction=ReductionPolicy("sum"))]),
        plan_layout([w, b], mesh, **base, prefetch=PrefetchPolicy(2, 1)),
        plan_layout([w, b], mesh, **base, offload_policy=hsdp_fn.CPUOffloadPolicy()),
    ]
    assert len({layout.digest for layout in layouts_}) == len(layouts_)


# ------------------------------------------------------------------------------------------------------ bad inputs

A, B, M = ParamSpec("a.w", (4, 2), "float32"), ParamSpec("b.w", (4,), "float32"), MeshSpec.fsdp(2)
REFUSED: dict[str, tuple[Any, str]] = {
    "no parameter": (lambda: plan(), "no parameter"),
    "a name given twice": (lambda: plan(A, A), r"'a\.w' appears twice"),
    "an alias that is a name": (lambda: plan(A, replace(B, aliases=("a.w",))), r"'a\.w' appears twice"),
    "two units of one name": (lambda: plan(A, units=("a", "a")), "given twice.*'a'"),
    "a unit without parameters": (lambda: plan(A, units=("z",)), "unit 'z' owns no parameter"),
    "a unit whose parameters others claim": (lambda: plan(A, units=("a", "a.w")), "unit 'a' owns no parameter"),
    "one prefix for two units": (lambda: plan(A, units=("a", UnitSpec("z", ("a",)))), "prefix 'a' is claimed by"),
    "only ignored parameters": (lambda: plan(A, units=("a",), ignored=["a.w"]), "unit 'a' owns no parameter"),
    "an unknown ignored name": (lambda: plan(A, ignored=["a.q"]), r"ignored.*'a\.q'"),
    "a scalar": (lambda: plan(ParamSpec("s", (), "float32")), "'s' is a scalar"),
    "a dim too high": (lambda: plan(A, placement_fn=lambda _: Shard(2)), r"Shard\(2\) of parameter 'a\.w'"),
    "a dim too low": (lambda: plan(A, placement_fn=lambda _: Shard(-3)), r"Shard\(-3\) of parameter 'a\.w'"),
    "a dim that is no int": (lambda: plan(A, placement_fn=lambda _: Shard("0")), r"a\.w"),
    "a placement of no kind": (lambda: plan(A, placement_fn=lambda _: "shard"), r"placement of 'a\.w'"),
    "a mesh of no kind, for one": (lambda: plan(A, placement_fn=lambda _: OnMesh(Shard(), 2)), "'a.w': its mesh"),
    "no placement on a mesh": (lambda: plan(A, placement_fn=lambda _: OnMesh(None, M)), "of 'a.w'.*found None"),
    "a mesh on a mesh": (lambda: plan(A, placement_fn=lambda _: OnMesh(OnMesh(Shard(), M), M)), "placement of 'a.w'"),
    "a mesh for a placement": (lambda: plan(A, placement_fn=lambda _: M), "placement of 'a.w'"),
    "a dim too high on a mesh": (lambda: plan(A, placement_fn=lambda _: OnMesh(Shard(2), M)), r"Shard\(2\).*'a\.w'"),
    "a unit's mesh of no kind": (lambda: plan(A, units=(UnitSpec("a", mesh=4),)), "'a': mesh must be a MeshSpec"),
    "a trainable int": (lambda: plan(ParamSpec("i", (4,), "int64")), "'i' of dtype int64 can't require gradients"),
    "a trainable float8": (lambda: plan(ParamSpec("f", (4,), "float8_e5m2")), "'f' of dtype float8_e5m2"),
    "reshard that doesn't divide": (
        lambda: plan(A, units=("a",), reshard_after_forward=3),
        "'a': reshard_after_forward=3",
    ),
    "reshard of no bool, for all": (lambda: plan(A, units=("a",), reshard_after_forward=2.0), "'a': reshard_after"),
    "reshard of no bool, for one": (lambda: plan(A, units=(UnitSpec("a", (), "yes"),)), "'a': reshard_after"),
    "fused of no bool, for all": (lambda: plan(A, units=("a",), fused=None), "'a': fused must be a bool, found None"),
    "fused of no bool, for one": (lambda: plan(A, units=(UnitSpec("a", fused=1),)), "'a': fused must be a bool"),
    "a unit of no kind": (lambda: plan(A, units=(3,)), "3"),
    "a negative size": (lambda: plan(ParamSpec("n", (4, -1), "float32")), "'n'"),
    "a size that is no int": (lambda: plan(ParamSpec("n", (4, 2.5), "float32")), "'n'"),
    "an unknown dtype": (lambda: plan(ParamSpec("n", (4,), "complex64")), "'n'"),
    "a shape that is no tuple": (lambda: plan(ParamSpec("n", 4, "float32")), "'n'"),
    "aliases that are one string": (lambda: plan(ParamSpec("n", (4,), "float32", aliases="tied")), "'n'"),
    "prefixes that are one string": (lambda: plan(A, units=(UnitSpec("u", "a"),)), "'u'"),
    "units that are one string": (lambda: plan(A, units="a"), "units"),
    "ignored names that are one string": (lambda: plan(A, ignored="a.w"), "ignored"),
    "a mesh of no kind": (lambda: plan_layout([A], 2), "mesh"),
    "precision of no kind": (lambda: plan(A, mp_policy="float16"), "mp_policy"),
    "precision of no kind, for one": (lambda: plan(A, units=(UnitSpec("a", mp_policy="half"),)), "'a'.*mp_policy"),
    "a reduction of no kind, for one": (lambda: plan(A, units=(UnitSpec("a", reduction="sum"),)), "'a'.*reduction"),
    "a reduction of no kind": (lambda: plan(A, reduction="sum"), "reduction"),
    "a prefetch of no kind": (lambda: plan(A, prefetch=2), "prefetch"),
    "an offload of no kind": (lambda: plan(A, offload_policy=True), "offload_policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_layout_refuses_by_name(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(HSDPError, match=message):
        call()


def test_a_replicated_scalar_is_planned_whole_or_refused_by_name() -> None:
    try:
        layout = plan(ParamSpec("s", (), "float32"), placement_fn=lambda _: Replicate())
    except LayoutError as error:
        assert "'s'" in str(error)
        return
    flat = layout.units[0].buckets[0].params
    assert (flat.numel, flat.padding) == (1, 0)
    assert flat.members[0].rows(0) == (0, 1)
