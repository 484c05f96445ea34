"""`MeshSpec`: which ranks share what, against an oracle that slices a numpy grid of ranks."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdp_fn import DataParallelMeshDims, HSDPError, MeshError, MeshSpec
from tests.strategies import meshes, meshes_over, peers


@given(meshes())
def test_coordinates_are_positions_in_the_row_major_array_of_ranks(mesh: MeshSpec) -> None:
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    for rank in mesh.ranks:
        assert grid[mesh.coordinate(rank)] == rank


@given(meshes())
def test_a_group_holds_the_ranks_that_differ_on_its_axes_only_in_flattened_order(mesh: MeshSpec) -> None:
    for axes in (mesh.shard, mesh.replicate, mesh.shard + mesh.replicate, mesh.names[::-1], ()):
        for position, rank in enumerate(mesh.ranks):
            expected = tuple(mesh.ranks[p] for p in peers(mesh, position, axes))
            assert mesh.group(rank, axes) == expected
            assert expected[mesh.index(rank, axes)] == rank


@given(meshes())
def test_groups_are_a_partition_of_the_ranks(mesh: MeshSpec) -> None:
    for axes in (mesh.shard, mesh.replicate, mesh.names):
        groups = {mesh.group(rank, axes) for rank in mesh.ranks}
        assert sorted(r for group in groups for r in group) == sorted(mesh.ranks)
        assert all(mesh.group(rank, axes) == group for group in groups for rank in group)


@given(meshes())
def test_sizes_multiply_and_every_piece_is_owned_by_as_many_ranks_as_replicate_it(mesh: MeshSpec) -> None:
    others = [n for n, name in zip(mesh.shape, mesh.names, strict=True) if name not in mesh.shard + mesh.replicate]
    assert mesh.size == len(mesh.ranks) == mesh.shard_size * mesh.replicate_size * int(np.prod(others))
    assert mesh.data_parallel_size == mesh.shard_size * mesh.replicate_size
    owners = [mesh.shard_index(rank) for rank in mesh.ranks]
    assert [owners.count(piece) for piece in range(mesh.shard_size)] == [mesh.size // mesh.shard_size] * mesh.shard_size


@given(meshes())
def test_as_replicated_keeps_ranks_and_divisor_and_repeats_over_all_data_parallel_axes(mesh: MeshSpec) -> None:
    whole = mesh.as_replicated()
    assert (whole.shape, whole.names, whole.ranks, whole.shard) == (mesh.shape, mesh.names, mesh.ranks, ())
    assert set(whole.replicate) == set(mesh.shard + mesh.replicate)
    assert whole.data_parallel_size == whole.replicate_size == mesh.data_parallel_size
    assert whole.as_replicated() == whole


@given(meshes(), st.data())
def test_the_data_parallel_group_is_that_of_shard_and_replicate_axes_in_the_meshs_order(
    mesh: MeshSpec, data: st.DataObject
) -> None:
    mesh = data.draw(st.one_of(st.just(mesh), meshes_over(mesh.ranks, 4)))
    axes = [name for name in mesh.names if name in mesh.shard + mesh.replicate]
    for position, rank in enumerate(mesh.ranks):
        group = mesh.data_parallel_group(rank)
        assert list(group) == [mesh.ranks[p] for p in peers(mesh, position, tuple(axes))]
        assert len(group) == mesh.data_parallel_size
        assert [mesh.ranks.index(r) for r in group] == sorted(mesh.ranks.index(r) for r in group)


@given(meshes(16), st.data())
def test_cutting_makes_groups_of_neighbours_in_each_shard_groups_order(mesh: MeshSpec, data: st.DataObject) -> None:
    mesh = data.draw(st.one_of(st.just(mesh), meshes_over(mesh.ranks, 4)))
    whole = {tuple(mesh.ranks[p] for p in peers(mesh, i, mesh.shard)) for i in range(mesh.size)}
    for size in range(-1, mesh.shard_size + 2):
        if size < 1 or mesh.shard_size % size:
            with pytest.raises(MeshError, match=f"groups of {size} ranks.*{mesh.shard_size} shard ranks"):
                mesh.cut(size)
            continue
        cut = mesh.cut(size)
        assert sorted(cut.ranks) == sorted(mesh.ranks)
        assert (cut.shard_size, cut.replicate) == (size, ())
        runs = {group[i : i + size] for group in whole for i in range(0, len(group), size)}
        assert {cut.group(rank, cut.shard) for rank in mesh.ranks} == runs
        assert all(cut.shard_index(rank) == mesh.shard_index(rank) % size for rank in mesh.ranks)


def test_cutting_two_flattened_axes_by_hand() -> None:
    mesh = MeshSpec((2, 4), ("a", "b"), shard=("b", "a"), ranks=tuple(range(10, 18)))
    assert mesh.group(10, mesh.shard) == (10, 14, 11, 15, 12, 16, 13, 17)
    cut = mesh.cut(4)
    assert [cut.group(rank, cut.shard) for rank in (14, 12)] == [(10, 14, 11, 15), (12, 16, 13, 17)]


@given(meshes(), st.data())
def test_other_roles_leave_the_ranks_where_they_are(mesh: MeshSpec, data: st.DataObject) -> None:
    other = data.draw(meshes_over(mesh.ranks))
    dims = DataParallelMeshDims(other.shard or None, other.replicate or None)
    bare = MeshSpec(other.shape, other.names, shard=other.names, ranks=other.ranks)
    assert bare.with_roles(dims) == other
    assert other.with_roles(dims) == other


def test_other_roles_name_an_axis_that_isnt_there() -> None:
    mesh = MeshSpec.hsdp(2, 2)
    assert mesh.with_roles(DataParallelMeshDims("replicate")).shard == ("replicate",)
    for dims in (DataParallelMeshDims("tp"), DataParallelMeshDims("shard", ("replicate", "tp"))):
        with pytest.raises(MeshError, match=r"axis 'tp' isn't an axis .*'replicate', 'shard'"):
            mesh.with_roles(dims)


def test_two_shard_axes_act_as_one_and_the_first_is_the_slowest() -> None:
    mesh = MeshSpec((2, 3), ("a", "b"), shard=("b", "a"))
    assert mesh.shard_size == 6
    assert mesh.group(0, mesh.shard) == (0, 3, 1, 4, 2, 5)
    assert [mesh.shard_index(r) for r in range(6)] == [0, 2, 4, 1, 3, 5]


def test_the_three_named_constructors_give_the_known_meshes() -> None:
    assert MeshSpec.fsdp(4) == MeshSpec((4,), ("shard",), shard=("shard",), ranks=(0, 1, 2, 3))
    assert MeshSpec.replicated(2) == MeshSpec((2,), ("replicate",), replicate=("replicate",), ranks=(0, 1))
    hybrid = MeshSpec.hsdp(2, 3)
    assert (hybrid.replicate_size, hybrid.shard_size, hybrid.data_parallel_size) == (2, 3, 6)
    assert hybrid.group(4, hybrid.shard) == (3, 4, 5)
    assert hybrid.group(4, hybrid.replicate) == (1, 4)


def test_every_small_hybrid_mesh_shards_consecutive_ranks_and_replicates_across_them() -> None:
    for replicate, shard in product(range(1, 4), range(1, 4)):
        mesh = MeshSpec.hsdp(replicate, shard)
        for rank in range(replicate * shard):
            first = rank - rank % shard
            assert mesh.group(rank, mesh.shard) == tuple(range(first, first + shard))
            assert mesh.group(rank, mesh.replicate) == tuple(range(rank % shard, replicate * shard, shard))
            assert mesh.shard_index(rank) == rank % shard


def test_the_order_of_global_ranks_decides_who_owns_which_piece() -> None:
    for order in permutations((4, 7, 9)):
        mesh = MeshSpec((3,), ("s",), shard=("s",), ranks=order)
        assert [mesh.shard_index(rank) for rank in order] == [0, 1, 2]
        assert mesh.group(9, ("s",)) == order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": ()}, "shape must be"),
        ({"shape": (2, 0)}, r"shape must be .*\(2, 0\)"),
        ({"shape": (2, -1)}, "shape must be"),
        ({"shape": (2, 2.0)}, "shape must be"),
        ({"shape": (2, "2")}, "shape must be"),
        ({"names": ("a",)}, r"names must hold one unique name per axis.*\('a',\)"),
        ({"names": ("a", "a")}, "names must hold one unique name"),
        ({"shard": ("c",)}, "shard axis 'c'"),
        ({"replicate": ("c",)}, "replicate axis 'c'"),
        ({"shard": ("b", "b")}, "shard names an axis twice"),
        ({"replicate": ("a", "a"), "shard": ()}, "replicate names an axis twice"),
        ({"shard": ("a", "b")}, r"\['a'\] are in both shard and replicate"),
        ({"shard": (), "replicate": ()}, "at least one of shard and replicate"),
        ({"ranks": (0, 1, 2)}, "ranks must be 4 different"),
        ({"ranks": (0, 1, 2, 2)}, "ranks must be 4 different"),
        ({"ranks": (0, 1, 2, -3)}, "ranks must be 4 different"),
        ({"ranks": (0, 1, 2, "3")}, "ranks must be"),
        ({"ranks": (0, 1, 2, 3.5)}, "ranks must be"),
        ({"shape": 4}, "shape must be"),
    ],
)
def test_a_field_that_cant_be_part_of_a_mesh_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"shape": (2, 2), "names": ("a", "b"), "shard": ("b",), "replicate": ("a",)}
    assert MeshSpec(**good).size == 4
    with pytest.raises(MeshError, match=message):
        MeshSpec(**{**good, **change})


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None])
def test_the_named_constructors_refuse_a_size_that_is_no_positive_int(size: Any) -> None:
    for make in (MeshSpec.fsdp, MeshSpec.replicated, lambda n: MeshSpec.hsdp(2, n), lambda n: MeshSpec.hsdp(n, 2)):
        with pytest.raises(MeshError, match="shape must be"):
            make(size)


def test_a_mesh_given_with_lists_equals_the_one_given_with_tuples_or_is_refused() -> None:
    good = MeshSpec((2, 2), ("a", "b"), shard=("b",), replicate=("a",))
    try:
        mesh = MeshSpec([2, 2], ["a", "b"], shard=["b"], replicate=["a"])
    except MeshError:
        return
    assert mesh == good
    assert hash(mesh) == hash(good)


def test_a_rank_outside_the_mesh_is_refused_by_number() -> None:
    mesh = MeshSpec((2,), ("s",), shard=("s",), ranks=(3, 5))
    for call in (mesh.coordinate, mesh.shard_index, lambda r: mesh.group(r, ("s",)), lambda r: mesh.index(r, ("s",))):
        with pytest.raises(MeshError, match="rank 4"):
            call(4)


def test_an_axis_that_the_mesh_doesnt_have_is_refused_by_name() -> None:
    mesh = MeshSpec.hsdp(2, 2)
    for call in (mesh.group, mesh.index):
        with pytest.raises(MeshError, match="tensor"):
            call(0, ("tensor",))


def test_every_mesh_error_is_a_value_error_and_an_error_of_this_library() -> None:
    with pytest.raises(ValueError) as caught:
        MeshSpec.fsdp(0)
    assert isinstance(caught.value, HSDPError)


# -------------------------------------------------------------------------------------------------------------- dims


@pytest.mark.parametrize(
    ("dims", "shard", "replicate"),
    [
        (DataParallelMeshDims("dp"), ("dp",), ()),
        (DataParallelMeshDims(replicate="dp"), (), ("dp",)),
        (DataParallelMeshDims(("a", "b"), "c"), ("a", "b"), ("c",)),
        (DataParallelMeshDims(shard=("b", "a"), replicate=("c", "d")), ("b", "a"), ("c", "d")),
    ],
)
def test_data_parallel_dims_are_read_as_tuples_in_the_order_given(
    dims: DataParallelMeshDims, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> None:
    assert (dims.shard_names, dims.replicate_names) == (shard, replicate)


def test_data_parallel_dims_are_values() -> None:
    dims = DataParallelMeshDims(("a", "b"), "c")
    assert (dims.shard, dims.replicate) == (("a", "b"), "c")
    assert dims == DataParallelMeshDims(["a", "b"], "c")
    assert hash(dims) == hash(DataParallelMeshDims(["a", "b"], "c"))
    assert dims != DataParallelMeshDims(("b", "a"), "c")
    with pytest.raises(AttributeError):
        dims.shard = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least one of shard and replicate"),
        ({"shard": None, "replicate": None}, "at least one of shard and replicate"),
        *(({role: ()}, rf"{role} must be .*found \(\)") for role in ("shard", "replicate")),
        *(({role: value}, f"{role} must be") for role in ("shard", "replicate") for value in (3, ("a", 3), "", {"a"})),
        *(({role: ("a", "b", "a")}, rf"{role} names dims \['a'\] twice") for role in ("shard", "replicate")),
        ({"shard": "a", "replicate": "a"}, r"\['a'\] are in both"),
        ({"shard": ("a", "b"), "replicate": ("c", "b")}, r"\['b'\] are in both"),
        ({"shard": "a", "replicate": ()}, "replicate must be"),
    ],
)
def test_data_parallel_dims_that_cant_be_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message) as caught:
        DataParallelMeshDims(**fields)
    assert isinstance(caught.value, ValueError)
