"""Copies between full tensors and flat shards, in one process, against ``torch.chunk``: all small shapes and worlds."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hsdp_fn import MeshSpec, ParamSpec, Shard, plan_layout
from hsdp_fn_torch import flat as flats
from tests.workers_torch import chunk, equal

SHAPES = [(0,), (1,), (3,), (4,), (5,), (7, 2), (1, 3), (2, 0), (4, 4), (3, 5, 2), (2, 1, 7)]
GROUPS = [
    *[[(shape, dim)] for shape in SHAPES for dim in range(len(shape))],
    [((5,), 0), ((7, 2), 0), ((1, 3), 0)],
    [((4, 4), 0), ((4,), 0)],
    [((4, 4), 1), ((5,), 0), ((3, 5, 2), 1), ((2, 1, 7), 2)],
    [((2, 0), 0), ((3,), 0), ((0,), 0), ((4, 4), 1)],
]
WORLDS = (1, 2, 3, 4, 8)


def plan_of(group, world: int):
    """The `Flat` of some parameters on ``world`` shards."""
    specs = [ParamSpec(f"p{i}", shape, "float32") for i, (shape, _) in enumerate(group)]
    dims = {f"p{i}": dim for i, (_, dim) in enumerate(group)}
    layout = plan_layout(specs, MeshSpec.fsdp(world), placement_fn=lambda spec: Shard(dims[spec.name]))
    return layout.units[0].buckets[0].params


def values(group, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 100, shape, generator=generator).float() for shape, _ in group]


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), float("nan"), dtype=dtype)


def slots(plan: flats.FlatPlan, shard: torch.Tensor) -> list[torch.Tensor]:
    """Each member's slot in a flat shard, padding included."""
    return [shard[m.offset : m.offset + m.numel] for m in plan.flat.members]


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_keeps_the_rows_that_torch_chunk_gives_it_and_zeros(world):
    for group in GROUPS:
        flat = plan_of(group, world)
        full = values(group)
        for rank in range(world):
            plan = flats.FlatPlan.of(flat, rank)
            own = torch.zeros(flat.numel)
            flats.shard_of(plan, full, own)
            rows = flats.split(plan, own)
            for tensor, (_, dim), row, slot in zip(full, group, rows, slots(plan, own), strict=True):
                piece = chunk(tensor, world, dim)[rank]
                equal(row, piece, f"{group} rank {rank} of {world}")
                assert row.is_contiguous()
                assert row.numel() == 0 or row.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
                equal(slot[piece.numel() :], torch.zeros(slot.numel() - piece.numel()), "padding")


@pytest.mark.parametrize("world", WORLDS)
def test_unpacking_what_all_ranks_keep_gives_contiguous_full_parameters(world):
    for group in GROUPS:
        flat = plan_of(group, world)
        full = values(group)
        shards = [torch.zeros(flat.numel) for _ in range(world)]
        for rank, own in enumerate(shards):
            flats.shard_of(flats.FlatPlan.of(flat, rank), full, own)
        gathered = torch.cat(shards)
        for copy in (False, True):
            out = flats.unpack(flats.FlatPlan.of(flat, 0), gathered, allocate, copy=copy)
            equal(list(out), full, f"{group} on {world}, copy {copy}")
            assert all(t.is_contiguous() for t in out)
            if copy:
                storages = {t.untyped_storage().data_ptr() for t in out if t.numel()}
                assert gathered.untyped_storage().data_ptr() not in storages


def gathered_of(group, world: int) -> tuple[flats.FlatPlan, torch.Tensor]:
    """A plan and the all-gather's output for `values`, with NaN where ranks have padding."""
    flat = plan_of(group, world)
    shards = [torch.full((flat.numel,), float("nan")) for _ in range(world)]
    for rank, own in enumerate(shards):
        flats.shard_of(flats.FlatPlan.of(flat, rank), values(group), own)
    return flats.FlatPlan.of(flat, 0), torch.cat(shards)


def refuse(numel: int, dtype: torch.dtype) -> torch.Tensor:
    raise AssertionError(f"asked for {numel} more elements of {dtype}")


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    ("group", "world", "in_place"),
    [
        *[([((rows, 2), 0)], world, True) for rows in (1, 3, 4, 5, 7) for world in WORLDS],
        ([((9,), 0)], 4, True),
        ([((3, 5, 2), 0)], 2, True),
        ([((4, 4), 1)], 1, True),
        ([((4, 4), 0), ((4,), 0)], 1, True),
        ([((4, 4), 1), ((3,), 0)], 1, True),
        ([((4, 4), 1)], 2, False),
        ([((3, 5, 2), 2)], 2, False),
        ([((4, 4), 0), ((4,), 0)], 2, False),
    ],
)
def test_parameters_that_lie_whole_in_the_gathered_buffer_are_its_views_unless_a_copy_is_asked_for(
    group, world, in_place, copy
):
    plan, gathered = gathered_of(group, world)
    asked = []

    def count(numel: int, dtype: torch.dtype) -> torch.Tensor:
        asked.append((numel, dtype))
        return allocate(numel, dtype)

    views = in_place and not copy
    out = flats.unpack(plan, gathered, refuse if views else count, copy=copy)
    equal(list(out), values(group), f"{group} on {world}")
    assert asked == ([] if views else [(gathered.numel(), torch.float32)])
    first, last = gathered.data_ptr(), gathered.data_ptr() + gathered.nbytes
    for tensor in out:
        inside = first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= last
        assert inside == views
        assert tensor.is_contiguous()
    if views:
        with Operators() as operators:
            flats.unpack(plan, gathered, refuse)
        assert operators.names == ["aten.as_strided.default"] * len(group)


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("copy", [False, True])
def test_buffers_may_be_slices_of_larger_ones(copy):
    for group, world in product(GROUPS, WORLDS):
        plan, gathered = gathered_of(group, world)
        outer, larger = torch.cat([torch.full((5,), -1.0), gathered]), allocate(gathered.numel() + 3, torch.float32)
        out = flats.unpack(plan, outer[5:], lambda numel, dtype, larger=larger: larger[3:], copy=copy)
        equal(list(out), values(group), f"{group} on {world}")
        assert larger[:3].isnan().all()


def test_short_and_missing_rows_are_the_tail_of_the_gathered_buffer():
    """3 rows on 2 ranks are stored as 2 and 1, 1 row on 4 ranks as 1, 0, 0 and 0; the view stops before the padding."""
    for rows, world, stored in ((3, 2, 4), (1, 4, 4), (5, 4, 8)):
        plan, gathered = gathered_of([((rows, 2), 0)], world)
        (view,) = flats.unpack(plan, gathered, refuse)
        assert (view.data_ptr(), view.numel()) == (gathered.data_ptr(), rows * 2)
        assert gathered.numel() == stored * 2
        assert gathered[rows * 2 :].isnan().all()
        gathered[0] = 77.0
        assert view[0, 0] == 77.0


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_packing_writes_each_ranks_chunk_as_that_rank_would_keep_it(world, empty):
    for group, missing in product(GROUPS, (False, True)):
        if empty != any(prod(shape) == 0 for shape, _ in group):
            continue
        flat = plan_of(group, world)
        full: list[torch.Tensor | None] = list(values(group))
        if missing:
            full[0] = None
        packed = allocate(world * flat.numel, torch.float32)
        flats.pack(flats.FlatPlan.of(flat, 0), full, packed)
        present = [torch.zeros(shape) if t is None else t for t, (shape, _) in zip(full, group, strict=True)]
        for rank, own in enumerate(packed.view(world, -1)):
            expected = torch.zeros(flat.numel)
            flats.shard_of(flats.FlatPlan.of(flat, rank), present, expected)
            equal(own, expected, f"{group} rank {rank} of {world}, missing {missing}")


def test_packing_takes_gradients_of_any_strides_and_casts_them():
    group = [((4, 6), 0), ((6,), 0)]
    flat = plan_of(group, 2)
    odd = [torch.arange(24.0).view(6, 4).t(), torch.ones(1).expand(6)]
    for dtype in (torch.float32, torch.bfloat16):
        packed = allocate(2 * flat.numel, dtype)
        flats.pack(flats.FlatPlan.of(flat, 0), odd, packed)
        plain = allocate(2 * flat.numel, dtype)
        flats.pack(flats.FlatPlan.of(flat, 0), [t.contiguous() for t in odd], plain)
        equal(packed, plain)
        equal(flats.unpack(flats.FlatPlan.of(flat, 0), packed, allocate)[0], odd[0].to(dtype).contiguous())


@pytest.mark.parametrize("world", WORLDS)
def test_joining_takes_own_views_as_they_are_and_copies_others(world):
    for group in GROUPS:
        flat = plan_of(group, world)
        for rank in range(world):
            plan = flats.FlatPlan.of(flat, rank)
            own, new = torch.zeros(flat.numel), torch.zeros(flat.numel)
            flats.shard_of(plan, values(group), own)
            flats.shard_of(plan, values(group, seed=1), new)
            kept = own.clone()
            views = flats.split(plan, own)
            assert flats.join(plan, own, views) is own
            assert flats.join(plan, own, [None] * len(group)) is own
            others = [t.clone() for t in flats.split(plan, new)]
            joined = flats.join(plan, own, others)
            equal(joined, new, f"{group} rank {rank} of {world}")
            mixed = flats.join(plan, own, [*others[:1], *views[1:]])
            equal(list(flats.split(plan, mixed)), [others[0], *views[1:]])
            equal(own, kept, "the old shard")


def test_a_row_of_another_parameter_that_shares_the_shard_is_no_own_view():
    flat = plan_of([((4, 2), 0), ((4, 2), 0)], 2)
    plan = flats.FlatPlan.of(flat, 0)
    own = torch.arange(float(flat.numel))
    a, b = flats.split(plan, own)
    swapped = flats.join(plan, own, [b, a])
    equal(list(flats.split(plan, swapped)), [b, a])
    turned = flats.join(plan, own, [a.t(), b])
    equal(flats.split(plan, turned)[0], a.t().contiguous())
