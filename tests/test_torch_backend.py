"""The torch backend: collectives on meshes of every kind, and every refusal."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor import distribute_tensor

import hsdp_fn_torch as ht
from hsdp_fn import (
    BackendError,
    CPUOffloadPolicy,
    HSDPError,
    LayoutError,
    MeshError,
    MeshSpec,
    MixedPrecisionPolicy,
    OffloadPolicy,
    RankMismatchError,
    clone,
    full_params,
    grads,
    masters,
    plan_layout,
    reduce_grads,
    shard,
    unshard,
)
from tests.workers_torch import (
    LAYERS,
    Chain,
    assert_same_parts,
    batch,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    local_rows,
    mean_grads,
    model_parts,
    norm_like,
    on_ranks,
    step_grads,
    step_of,
)

# --------------------------------------------------------------------------------------------------- on meshes


def assert_trains_on(mesh: DeviceMesh, mine: list[int], rank: int, **policies) -> None:
    """Gather and reduce on a mesh whose data-parallel ranks are ``mine``: exact values."""
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, mesh, LAYERS, **policies)
    equal(masters(state), local_rows(state, dict(single.named_parameters())), f"{mesh}: masters")
    gathered = full_params(unshard(clone(state)))
    equal(gathered, {name: p.detach() for name, p in single.named_parameters()}, f"{mesh}: gathered")
    _, rows, state = step_grads(step_of(model), state, *batch(rank))
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in mine])), f"{mesh}: gradients")


@on_ranks(1, 2, 4)
def test_sharding_over_all_ranks(rank, world):
    for placement in (None, norm_like):
        assert_trains_on(fsdp_mesh(world), list(range(world)), rank, placement_fn=placement)


@on_ranks(4)
def test_hybrid_meshes_of_every_shape(rank, world):
    for shape, placement in product(((2, 2), (4, 1), (1, 4)), (None, norm_like)):
        assert_trains_on(hsdp_mesh(*shape), list(range(4)), rank, placement_fn=placement)


@on_ranks(4)
def test_meshes_without_names(rank, world):
    for placement in (None, norm_like):
        assert_trains_on(DeviceMesh("cpu", torch.arange(4)), list(range(4)), rank, placement_fn=placement)
        assert_trains_on(DeviceMesh("cpu", torch.arange(4).view(2, 2)), list(range(4)), rank, placement_fn=placement)


@on_ranks(4)
def test_a_data_parallel_axis_of_a_larger_mesh(rank, world):
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (None, norm_like):
        mine = [r for r in range(4) if r % 2 == rank % 2]
        assert_trains_on(whole["dp"], mine, rank, placement_fn=placement)
        mine = [r for r in range(4) if r // 2 == rank // 2]
        assert_trains_on(whole["tp"], mine, rank, placement_fn=placement)


@on_ranks(4)
def test_two_data_parallel_axes_of_a_larger_mesh(rank, world):
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "tp", "shard"))
    assert_trains_on(whole["replicate", "shard"], list(range(4)), rank, placement_fn=norm_like)
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))
    mine = [r for r in range(4) if r // 2 == rank // 2]
    assert_trains_on(whole["replicate", "shard"], mine, rank, placement_fn=norm_like)


@on_ranks(4)
def test_ranks_in_another_order_are_served_right_or_refused(rank, world):
    names = ("replicate", "shard")
    for ranks, axes in (([2, 0, 3, 1], names[1:]), ([[0, 2], [1, 3]], names), ([[3, 1], [0, 2]], names)):
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=axes)
        try:
            assert_trains_on(mesh, list(range(4)), rank)
        except MeshError as error:
            assert "order" in str(error), error
            assert ranks != [[0, 2], [1, 3]], "this one has its ranks in order along each axis"


@on_ranks(4)
def test_two_axes_one_of_which_replicates_give_the_same_masters_on_replicas(rank, world):
    state = ht.shard_module(integers_(Chain()), hsdp_mesh(), LAYERS)
    everyone: list = [None] * world
    dist.all_gather_object(everyone, [row.tolist() for row in masters(state).values()])
    assert everyone[rank] == everyone[(rank + 2) % 4]
    assert everyone[rank] != everyone[(rank + 1) % 4]


@on_ranks(2)
def test_gradients_given_as_views_are_reduced_and_left_alone(rank, world):
    model = nn.Linear(4, 4, bias=False)
    state = ht.shard_module(model, fsdp_mesh(world))
    given = torch.arange(16.0).view(4, 4).t() * (rank + 1)
    kept = given.clone()
    state = reduce_grads(state, {"weight": given})
    _, rows = grads(state)
    equal(given, kept)
    equal(rows["weight"], (torch.arange(16.0).view(4, 4).t() * 1.5).chunk(2)[rank].contiguous())


# ----------------------------------------------------------------------------------------------------------- refused


def refuse(rank, world, model, error, match, mesh=None, units=LAYERS) -> None:
    """Sharding the model raises ``error`` here and leaves it as it was; the next sharding works."""
    parts = model_parts(model)
    with pytest.raises(error, match=match):
        ht.shard_module(model, mesh or fsdp_mesh(world), units)
    assert_same_parts(model, parts)
    other = integers_(Chain())
    _, rows, _ = step_grads(step_of(other), ht.shard_module(other, fsdp_mesh(world), LAYERS), *batch(rank))
    assert rows["first.weight"] is not None


@on_ranks(4)
def test_a_mesh_of_three_axes_is_refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    refuse(rank, world, Chain(), MeshError, "found 3 axes.*dp_mesh_dims=DataParallelMeshDims", mesh=mesh)


@on_ranks(2)
def test_a_layout_of_another_world_is_refused(rank, world):
    model = Chain()
    params = {name: p.detach() for name, p in model.named_parameters()}
    backend = ht.TorchBackend(fsdp_mesh(world))
    layout = plan_layout(ht.param_specs(model), MeshSpec.fsdp(4), LAYERS)
    with pytest.raises(MeshError, match=r"for ranks \(0, 1, 2, 3\), but this is rank \d of a world of 2; plan again"):
        shard(params, layout, backend=backend)
    layout = plan_layout(ht.param_specs(model), MeshSpec.fsdp(1), LAYERS)
    with pytest.raises(MeshError):
        shard(params, layout, backend=backend)


@on_ranks(2)
def test_a_process_outside_the_mesh_is_refused(rank, world):
    mesh = DeviceMesh("cpu", torch.tensor([0]))
    if rank == 0:
        assert_trains_on(mesh, [0], rank)
    else:
        with pytest.raises(MeshError, match="isn't in the mesh"):
            ht.shard_module(Chain(), mesh)


@on_ranks(2)
def test_a_parameter_that_is_not_contiguous_is_refused_on_every_rank(rank, world):
    model = Chain()
    model.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    refuse(rank, world, model, LayoutError, r"'conv\.weight'.*contiguous.*\.contiguous\(\)")
    model = Chain()
    model.first.weight = nn.Parameter(torch.zeros(6, 6).t())
    model.first.weight = nn.Parameter(torch.zeros(6, 12)[:, ::2])
    refuse(rank, world, model, LayoutError, r"'first\.weight'.*contiguous")


@on_ranks(2)
def test_a_scalar_parameter_is_refused(rank, world):
    model = Chain()
    model.scale = nn.Parameter(torch.tensor(1.0))
    refuse(rank, world, model, LayoutError, "'scale' is a scalar.*1-D tensor of one element")


@on_ranks(2)
def test_a_parameter_on_the_meta_device_is_refused(rank, world):
    model = Chain()
    model.last.weight = nn.Parameter(torch.empty(3, 6, device="meta"))
    refuse(rank, world, model, LayoutError, r"'last\.weight' is on the meta device; materialize it")
    state = ht.shard_module(model := Chain(), fsdp_mesh(world), LAYERS)
    refuse(rank, world, model, LayoutError, "meta device")  # a skeleton can't be sharded a second time
    assert state.step == 0


@on_ranks(2)
def test_a_parameter_that_is_a_dtensor_already_is_refused(rank, world):
    model = Chain()
    model.last.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 6), fsdp_mesh(world), [DShard(0)]))
    refuse(rank, world, model, LayoutError, r"'last\.weight' is a DTensor")
    plain = Chain()
    backend = ht.TorchBackend(fsdp_mesh(world))
    params = {name: p.detach() for name, p in plain.named_parameters()}
    params["first.weight"] = distribute_tensor(params["first.weight"], fsdp_mesh(world), [DShard(0)])
    with pytest.raises(LayoutError, match=r"'first\.weight'.*DTensor"):
        shard(params, ht.plan_module(plain, fsdp_mesh(world), LAYERS), backend=backend)


@on_ranks(2)
def test_parameters_that_are_not_as_planned_are_refused(rank, world):
    model = Chain()
    mesh = fsdp_mesh(world)
    layout, backend = ht.plan_module(model, mesh, LAYERS), ht.TorchBackend(mesh)
    params = {name: p.detach() for name, p in model.named_parameters()}
    last = params["last.bias"]
    cases = [
        ({"last.bias": last.double()}, r"'last\.bias' has dtype float64.*planned for float32"),
        ({"last.bias": torch.zeros(4)}, r"'last\.bias' has dtype float32 and shape \(4,\).*planned for float32 \(3,\)"),
        ({"more": last}, "that the layout doesn't have: .'more'.*planned for this model"),
    ]
    for change, match in cases:
        with pytest.raises(LayoutError, match=match):
            shard({**params, **change}, layout, backend=backend)
    with pytest.raises(LayoutError, match=r"weren't given: .'last\.bias'"):
        shard({name: p for name, p in params.items() if name != "last.bias"}, layout, backend=backend)
    equal(full_params(unshard(shard(params, layout, backend=backend))), params)


@on_ranks(2)
def test_units_that_are_no_modules_are_refused(rank, world):
    refuse(rank, world, Chain(), LayoutError, r"unit 'layers\.9' owns no parameter", units=["layers.9"])
    refuse(rank, world, Chain(), LayoutError, "unique", units=["layers.0", "layers.0"])
    model = Chain()
    state = ht.shard_module(model, fsdp_mesh(world), ["first.weight"])  # a parameter isn't a module that runs
    with pytest.raises(LayoutError, match=r"'first\.weight' doesn't exist"):
        step_of(model)(state, *batch(rank))


@on_ranks(2)
def test_policies_that_the_layout_and_the_backend_disagree_on_are_refused(rank, world):
    model = Chain()
    layout = ht.plan_module(model, fsdp_mesh(world), offload_policy=CPUOffloadPolicy())
    params = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(BackendError, match="give both the same policy"):
        shard(params, layout, backend=ht.TorchBackend(fsdp_mesh(world), offload_policy=OffloadPolicy()))


# ------------------------------------------------------------------------------------------------ ranks that disagree


def shard_what_differs(rank: int, world: int, what: str) -> None:
    """Ranks plan different layouts: in units, in precision, in a shape, in which parameter is frozen, in one's name."""
    model = Chain()
    units, policies = LAYERS, {}
    if rank == world - 1:
        if what == "units":
            units = LAYERS[:2]
        elif what == "precision":
            policies["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        elif what == "shape":
            model.last = nn.Linear(6, 4)
        elif what == "frozen":
            model.last.bias.requires_grad_(False)
        elif what == "name":
            model.other, model.last = model.last, None
    parts = model_parts(model)
    try:
        ht.shard_module(model, fsdp_mesh(world), units, **policies)
    finally:
        assert_same_parts(model, parts)


@pytest.mark.parametrize("what", ["units", "precision", "shape", "frozen", "name"])
def test_ranks_that_plan_different_layouts_all_hear_of_it(gloo, what):
    match = "ranks disagree.*All ranks must plan from the same names, shapes, mesh and policies"
    gloo.raises(RankMismatchError, shard_what_differs, what, match=match, group_intact=True)


def shard_with_one_bad_rank(rank: int, world: int, what: str) -> None:
    """Only the last rank's model can't be sharded."""
    model = Chain()
    if rank == world - 1:
        if what == "meta":
            model.last.weight = nn.Parameter(torch.empty(3, 6, device="meta"))
        elif what == "strides":
            model.last.weight = nn.Parameter(torch.zeros(6, 3).t())
        elif what == "scalar":
            model.last.bias = nn.Parameter(torch.tensor(0.0))
        elif what == "no unit":
            model.layers = model.layers[:2]
    parts = model_parts(model)
    try:
        ht.shard_module(model, fsdp_mesh(world), LAYERS)
    finally:
        assert_same_parts(model, parts)


@pytest.mark.parametrize("what", ["meta", "strides", "scalar", "no unit"])
def test_one_rank_with_a_bad_parameter_fails_all_ranks(gloo, what):
    failures = gloo.raises(HSDPError, shard_with_one_bad_rank, what, timeout=5.0, group_intact=True)
    assert [failure.type_name for failure in failures] == ["RankMismatchError", "LayoutError"]
