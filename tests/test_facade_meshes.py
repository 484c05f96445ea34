"""Meshes of several axes: ``dp_mesh_dims``, tensor parallelism on and beside them, replicas, and process groups."""

from __future__ import annotations

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims as TorchDims
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from hsdp_fn import DataParallelMeshDims
from hsdp_fn_torch import (
    clip_grad_norm_,
    fully_shard,
    functional_call,
    get_model_state_dict,
    global_norm,
    optimizer_step,
    set_model_state_dict,
    shard_module,
    shard_parameters,
    value_and_grad,
)
from tests.workers_facade import OURS, THEIRS, Trace, assert_parity, chain, data, full, mean_square, train
from tests.workers_meshes import (
    Mlp,
    full_grads,
    groups,
    line,
    mesh_of,
    mlps,
    note_places,
    on_mesh,
    parameters_of,
    place,
    shard_all,
    spread,
)
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Chain,
    Traffic,
    batch,
    close,
    equal,
    integers_,
    loss_of,
    mean_grads,
    on_ranks,
)


def dims(api, shard=None, replicate=None):
    return (TorchDims if api is THEIRS else DataParallelMeshDims)(shard=shard, replicate=replicate)


def trained(api, model, mesh, rank, batch_axes, steps=2, **options):
    """A few steps on one batch that is split over the batch axes; everything that must be equal."""
    trace = Trace()
    shard_all(api.fully_shard, model, mesh=mesh, **options)
    note_places(trace, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    part = sum(2**i * mesh.get_local_rank(axis) for i, axis in enumerate(batch_axes))
    for step in range(steps):
        loss = model(on_mesh(data(part, step), mesh, batch_axes)).square().mean()
        trace.note("loss", full(loss))
        loss.backward()
        note_places(trace, model, grads=True)
        optimizer.step()
        optimizer.zero_grad()
    note_places(trace, model)
    return trace


# ------------------------------------------------------------------------------------- dp_mesh_dims against torch

LAYOUTS = {
    "dp tp": ({"dp": 2, "tp": 2}, ("dp",), ()),
    "tp dp": ({"tp": 2, "dp": 2}, ("dp",), ()),
    "one dp": ({"dp": 1, "tp": 4}, ("dp",), ()),
    "one tp": ({"dp": 4, "tp": 1}, ("dp",), ()),
    "replicate tp": ({"dp": 2, "tp": 2}, (), ("dp",)),
    "rep shard tp": ({"rep": 2, "shard": 2, "tp": 1}, ("shard",), ("rep",)),
    "rep tp shard": ({"rep": 2, "tp": 1, "shard": 2}, ("shard",), ("rep",)),
    "shard cp": ({"shard": 2, "cp": 2}, ("shard", "cp"), ()),
    "two replicate": ({"r1": 2, "r2": 2, "shard": 1}, ("shard",), ("r1", "r2")),
}
"""Axes of the mesh, which of them shard, which replicate."""


@pytest.mark.parametrize("layout", list(LAYOUTS))
@on_ranks(4)
def test_parameters_on_the_whole_mesh_train_like_torch(rank, world, layout):
    """Losses, meshes, placements, local rows and whole values of parameters and gradients."""
    axes, shard, replicate = LAYOUTS[layout]
    mesh = mesh_of(**axes)

    def run(api):
        names = [n if len(n) != 1 else n[0] for n in (shard, replicate)]
        chosen = dims(api, names[0] or None, names[1] or None)
        return trained(api, spread(mlps(), mesh), mesh, rank, shard + replicate, dp_mesh_dims=chosen)

    records = dict(assert_parity(run).records)
    original = dict(mlps().named_parameters())
    found = spread(mlps(), mesh)
    shard_all(fully_shard, found, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard or None, replicate or None))
    for name, p in found.named_parameters():
        equal([full(p)], [original[name]], name)
    if layout == "dp tp":
        placements = {name: records[f"place of {name}"][2] for name in original if name.startswith("0.")}
        assert placements["0.up.weight"] == (_StridedShard(0, split_factor=2), Shard(0))
        assert placements["0.down.weight"] == (Shard(0), Shard(1))
        assert placements["0.norm.weight"] == (Shard(0), Replicate())


@on_ranks(4)
def test_batches_that_the_mesh_does_not_know_of(rank, world):
    """Inputs replicated in name, different in fact: each data-parallel rank's gradient is its own, and averaged."""
    mesh = mesh_of(dp=2, tp=2)

    def run(api):
        model, trace = spread(mlps(), mesh), Trace()
        shard_all(api.fully_shard, model, mesh=mesh, dp_mesh_dims=dims(api, "dp"))
        for step in range(2):
            model(on_mesh(data(rank // 2, step), mesh)).to_local().square().mean().backward()
        note_places(trace, model, grads=True)
        return trace

    found = {k.removeprefix("gradient of "): v for k, v in assert_parity(run).records if k.startswith("gradient")}
    single = mlps()
    for step in range(2):
        (sum(mean_square(single, data(r, step)) for r in range(2)) / 2).backward()
    close(found, {n: p.grad for n, p in single.named_parameters()}, 2e-6)


@on_ranks(4)
def test_one_batch_over_the_mesh_against_a_single_process(rank, world):
    """A sum over a batch that is split over ``dp``: with the factor 1 its gradients are those of one process."""
    mesh, single = mesh_of(dp=2, tp=2), mlps()
    model = shard_all(fully_shard, spread(mlps(), mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    for child in model:
        child.set_gradient_divide_factor(1.0)
    model(on_mesh(data(rank // 2, 0), mesh, ("dp",))).square().sum().backward()
    single(torch.cat([data(r, 0) for r in range(2)])).square().sum().backward()
    close(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, 1e-5)


@on_ranks(4)
def test_accumulation_and_checkpointing_on_the_whole_mesh(rank, world):
    """Held back for two of three microbatches of one split batch; blocks recompute in backward."""
    mesh = mesh_of(tp=2, dp=2)

    class Recomputed(Mlp):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def run(api, kind):
        torch.manual_seed(0)
        model, trace = spread(nn.Sequential(kind(), kind()), mesh), Trace()
        shard_all(api.fully_shard, model, mesh=mesh, dp_mesh_dims=dims(api, "dp"))
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model(on_mesh(data(mesh.get_local_rank("dp"), step), mesh, ("dp",))).square().sum().backward()
        note_places(trace, model, grads=True)
        return trace

    for kind in (Mlp, Recomputed):
        assert_parity(lambda api, kind=kind: run(api, kind))


@pytest.mark.parametrize("style", ["dp_mesh_dims", "joined"])
@on_ranks(4)
def test_forward_without_grad_and_frozen_units(rank, world, style):
    """Evaluation before, between and after steps; a first unit that is frozen altogether."""
    mesh = mesh_of(dp=2, tp=2)

    def run(api):
        model, trace = mlps(), Trace()
        if style == "joined":
            for child in model:
                parallelize_module(child, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            spread(model, mesh)
        model[0].requires_grad_(False)
        options = {"mesh": mesh["dp"]} if style == "joined" else {"mesh": mesh, "dp_mesh_dims": dims(api, "dp")}
        shard_all(api.fully_shard, model, **options)

        def forward(step):
            x = data(rank // 2, step)
            return model(x) if style == "joined" else model(on_mesh(x, mesh)).to_local()

        for step in range(2):
            with torch.no_grad():
                trace.note("evaluation", forward(100 + step))
            loss = forward(step).square().mean()
            trace.note("loss", loss.detach())
            loss.backward()
            with torch.no_grad():
                trace.note("evaluation", forward(200 + step))
            trace.note_grads(model)
        return trace

    found = dict(assert_parity(run).records)
    assert found["gradient of 0.up.weight"] is None


@pytest.mark.parametrize("policy", [(torch.bfloat16, torch.float32), (torch.bfloat16, None)])
@on_ranks(4)
def test_mixed_precision_on_the_whole_mesh(rank, world, policy):
    """Where no sum over ``tp`` is made of the same bits in another dtype, as torch: parameters that tp splits."""
    mesh = mesh_of(dp=2, tp=2)

    def run(api):
        given = api.MixedPrecisionPolicy(*policy)
        model, trace = spread(mlps(1), mesh), Trace()
        shard_all(api.fully_shard, model, mesh=mesh, dp_mesh_dims=dims(api, "dp"), mp_policy=given)
        model(on_mesh(data(rank // 2, 0), mesh)).to_local().float().square().mean().backward()
        trace.note("gradient", full(model[0].up.weight.grad))
        trace.note("gradient", full(model[0].down.weight.grad))
        return trace

    assert_parity(run)


@on_ranks(4)
def test_regrouping_beside_tensor_parallelism(rank, world):
    """Torch refuses it. Four shard ranks, two of which keep the parameters; their values between aren't shown."""
    mesh, single = mesh_of(dp=4, tp=1), integers_(mlps(1))
    for p in single[0].norm.parameters():
        p.requires_grad_(False)
    model = spread(copy.deepcopy(single), mesh)
    shard_all(fully_shard, model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), reshard_after_forward=2)
    assert sum(p.requires_grad for p in model.parameters()) == 4
    xs = [batch(r, outputs=WIDTH) for r in range(world)]
    with Traffic() as traffic:
        loss_of(model(on_mesh(xs[rank][0], mesh)).to_local(), xs[rank][1]).backward()
    close(full_grads(model), {**mean_grads(single, xs), **dict.fromkeys(["0.norm.weight", "0.norm.bias"])}, 2e-6)
    sizes = [n for op, _, n in traffic.seen if op == "all_gather"]
    assert len(sizes) == 2 and sizes[0] >= sizes[1] > 0


@pytest.mark.parametrize("sizes", [(7, 5), (6, 9), (3, 3), (5, 2)])
@on_ranks(4)
def test_uneven_sizes_where_both_split_one_dim(rank, world, sizes):
    """``full_tensor`` is the original, whichever axis comes first, also where ranks have no row; gradients too."""
    width, hidden = sizes
    for mesh in (mesh_of(dp=2, tp=2), mesh_of(tp=2, dp=2), mesh_of(dp=4, tp=1), mesh_of(dp=1, tp=4)):
        single = mlps(1, width=width, hidden=hidden)
        model = spread(copy.deepcopy(single), mesh)
        shard_all(fully_shard, model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        for name, p in single.named_parameters():
            equal([full(dict(model.named_parameters())[name])], [p], f"{name} on {mesh}")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(single.state_dict()), options=whole)
        equal(get_model_state_dict(model, options=whole), dict(single.state_dict()), f"on {mesh}")
        dp = mesh.size(mesh.mesh_dim_names.index("dp"))
        at = mesh.get_local_rank("dp")
        model(on_mesh(data(at, 0, width=width), mesh)).to_local().square().mean().backward()
        (sum(mean_square(single, data(r, 0, width=width)) for r in range(dp)) / dp).backward()
        close(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, 2e-6, f"on {mesh}")


# ---------------------------------------------------------------------------------------------------- eight ranks


@on_ranks(8)
def test_eight_ranks_on_the_whole_mesh(rank, world):
    """Context parallelism beside the shards; replicas. Several shard axes appear as one, where torch's do."""
    cases = [
        ({"dp_shard": 2, "cp": 2, "tp": 2}, ("dp_shard", "cp"), ()),
        ({"rep": 2, "shard": 2, "tp": 2}, ("shard",), ("rep",)),
    ]
    for axes, shard, replicate in cases:
        mesh = mesh_of(**axes)

        def run(api, mesh=mesh, shard=shard, replicate=replicate):
            chosen = dims(api, shard if len(shard) > 1 else shard[0], replicate[0] if replicate else None)
            return trained(api, spread(line(), mesh), mesh, rank, shard + replicate, 1, dp_mesh_dims=chosen)

        records = dict(assert_parity(run).records)
        found = records["place of 0.up.weight"]
        names = ("dp_shard_cp", "tp") if not replicate else ("rep", "shard", "tp")
        assert found[1] == names and found[2][-2:] == (_StridedShard(0, split_factor=2), Shard(0))
        assert records["parameter 0.up.weight"].shape == (8, 6)


@on_ranks(8)
def test_eight_ranks_with_several_axes_a_role(rank, world):
    """Shard axes around a tp axis, and shard beside replicate axes in an unusual order, against a single process: whole
    tensors are right at all times."""
    cases = [
        ({"a": 2, "tp": 2, "b": 2}, ("a", "b"), None),
        ({"s1": 2, "rep": 2, "s2": 2}, ("s1", "s2"), "rep"),
        ({"r1": 2, "shard": 2, "r2": 2}, "shard", ("r1", "r2")),
        ({"r1": 2, "tp": 2, "r2": 2}, None, ("r1", "r2")),
    ]
    for axes, shard, replicate in cases:
        mesh, single = mesh_of(**axes), line(hidden=9)
        chosen = DataParallelMeshDims(shard, replicate)
        model = spread(copy.deepcopy(single), mesh)
        shard_all(fully_shard, model, mesh=mesh, dp_mesh_dims=chosen)
        parallel = chosen.shard_names + chosen.replicate_names
        ranks = 2 ** len(parallel)
        place = sum(2**i * mesh.get_local_rank(axis) for i, axis in enumerate(parallel))
        (model(on_mesh(data(place, 0), mesh)).to_local().square().sum() / (4 * 9)).backward()  # a rank's columns
        (sum(mean_square(single, data(r, 0)) for r in range(ranks)) / ranks).backward()
        for name, p in model.named_parameters():
            expected = dict(single.named_parameters())[name]
            equal([full(p)], [expected.detach()], f"{name} on {axes}")
            close([full(p.grad)], [expected.grad], 2e-6, f"{name} on {axes}")
        for m in (model, single):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        for name, p in single.named_parameters():
            close([full(dict(model.named_parameters())[name])], [p.detach()], 2e-6, f"{name} on {axes}")


@on_ranks(4, 8)
def test_tensor_parallelism_without_dims(rank, world):
    """FSDP + TP on 4 ranks, HSDP + TP on 8: units of their own, with torch's parallel styles."""
    mesh = mesh_of(dp=2, tp=2) if world == 4 else mesh_of(rep=2, shard=2, tp=2)
    data_parallel = mesh["dp"] if world == 4 else mesh["rep", "shard"]

    def run(api):
        model = mlps()
        for child in model:
            parallelize_module(child, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard_all(api.fully_shard, model, mesh=data_parallel)
        trace = Trace()
        note_places(trace, model)
        trace.records += train(model, rank // 2, steps=2, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).records
        return trace

    assert_parity(run)


# ------------------------------------------------------------------------------------------------- plain parameters


@pytest.mark.parametrize(
    ("axes", "shard", "replicate", "flat"),
    [
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), None, {"shard": 4}),
        ({"dp_shard": 4}, "dp_shard", None, {"shard": 4}),
        ({"rep": 2, "s": 2}, "s", "rep", {"replicate": 2, "shard": 2}),
        ({"rep": 2, "a": 2, "b": 1}, ("a", "b"), "rep", {"replicate": 2, "shard": 2}),
        ({"r1": 2, "r2": 1, "s": 2}, "s", ("r1", "r2"), {"replicate": 2, "shard": 2}),
    ],
)
@on_ranks(4)
def test_plain_parameters_where_all_axes_are_data_parallel(rank, world, axes, shard, replicate, flat):
    """Torch wants DTensors even there. The bits of torch's run on the mesh flattened by hand."""

    def run(api):
        model = chain(depth=2)
        options = {"mesh": mesh_of(**flat)}
        if api is OURS:
            options = {"mesh": mesh_of(**axes), "dp_mesh_dims": DataParallelMeshDims(shard, replicate)}
        for layer in model.layers:
            api.fully_shard(layer, **options)
        return train(api.fully_shard(model, **options), rank, steps=3)

    assert_parity(run)
    model = chain()
    fully_shard(model, mesh=mesh_of(**axes), dp_mesh_dims=DataParallelMeshDims(shard, replicate))
    reference = chain()
    THEIRS.fully_shard(reference, mesh=mesh_of(**flat))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.placements[-1] == Shard(0) and p.device_mesh.size() == 4
        equal([p.to_local(), full(p)], [q.to_local(), full(q)])


@on_ranks(4)
def test_replicating_only(rank, world):
    """Whole parameters, gradients averaged, one all-reduce; a placement function has nothing to say."""
    mesh, chosen = mesh_of(r1=2, r2=2), DataParallelMeshDims(replicate=("r1", "r2"))
    model, single = integers_(chain()), integers_(chain())
    with pytest.raises(ValueError, match=r"shard_placement_fn.*replicate"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=chosen, shard_placement_fn=lambda p: Shard(0))
    fully_shard(model, mesh=mesh, dp_mesh_dims=chosen)
    for step in range(2):
        model.zero_grad()
        with Traffic() as traffic:
            loss_of(model(batch(rank, step)[0]), batch(rank, step)[1]).backward()
        equal(full_grads(model), mean_grads(single, [batch(r, step) for r in range(world)]))
    assert [op for op, *_ in traffic.seen] == ["all_reduce"]
    assert all(set(p.placements) == {Replicate()} for p in model.parameters())


@on_ranks(4)
def test_torchs_own_dims_and_an_equal_mesh_are_taken(rank, world):
    mesh = mesh_of(dp=2, tp=2)
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert again is not mesh and again == mesh
    single = mlps(1)
    model = fully_shard(spread(copy.deepcopy(single), mesh)[0], mesh=again, dp_mesh_dims=TorchDims(shard="dp"))
    model(on_mesh(data(rank // 2, 0), again)).to_local().square().mean().backward()
    (sum(mean_square(single, data(r, 0)) for r in range(2)) / 2).backward()
    close(full_grads(model), {n: p.grad for n, p in single[0].named_parameters()}, 2e-6)


@on_ranks(4)
def test_whole_parameters_on_the_whole_mesh_and_what_stands_between(rank, world):
    """Unsharded by hand or kept after forward: DTensors on the whole mesh, as in torch's; replicated ones too."""
    mesh, found = mesh_of(dp=2, tp=2), []
    for api in (THEIRS, OURS):
        model = spread(mlps(1), mesh)[0]
        api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims(api, "dp"), reshard_after_forward=False)
        model(on_mesh(data(rank // 2, 0), mesh)).to_local().sum().backward()
        states = []
        for act in (model.unshard, model.reshard, lambda m=model: m(on_mesh(data(0, 0), mesh)), model.reshard):
            act()
            states.append([place(p) for m in model.modules() for p in m._parameters.values()])
        found.append(states)
    assert found[0] == found[1]
    assert [s[0][2] for s in found[1][:2]] == [(Replicate(), Shard(0)), (_StridedShard(0, split_factor=2), Shard(0))]

    single, model = mlps(1), spread(mlps(1), mesh)
    whole = [model[0].norm.weight, model[0].up.weight]
    shard_all(fully_shard, model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"), replicate_params=whole)
    assert model[0].up.weight.placements == (Replicate(), Shard(0))
    assert model[0].norm.weight.placements == (Replicate(), Replicate())
    model(on_mesh(data(rank // 2, 0), mesh)).to_local().square().mean().backward()
    (sum(mean_square(single, data(r, 0)) for r in range(2)) / 2).backward()
    close(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, 2e-6)


@on_ranks(4)
def test_parts_of_larger_meshes(rank, world):
    """Pipeline stages beside the data-parallel axes: each trains by itself, also where the user has flattened them."""
    for axes, shard in (({"pp": 2, "dp": 2, "cp": 1}, ("dp", "cp")), ({"pp": 1, "dp": 2, "cp": 2}, ("dp", "cp"))):
        root = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        mine = root["dp", "cp"]._flatten("dp_cp_by_hand")
        before, stage = groups(), root.get_local_rank("pp")
        ranks = world // axes["pp"]
        model, single = integers_(chain(), seed=stage), integers_(chain(), seed=stage)
        for m in (*model.layers, model):
            fully_shard(m, mesh=root["dp", "cp"], dp_mesh_dims=DataParallelMeshDims(shard))
        xs = [batch(10 * stage + r) for r in range(ranks)]
        loss_of(model(xs[rank % ranks][0]), xs[rank % ranks][1]).backward()
        equal(full_grads(model), mean_grads(single, xs))
        assert model.first.weight.device_mesh == mine and groups() == before


@on_ranks(4)
def test_several_choices_on_one_mesh_below_one_root(rank, world):
    """Experts sharded over one axis, the rest over both, replicas elsewhere: expert parallelism with a single mesh."""
    mesh = mesh_of(edp=2, ep=2)
    single = integers_(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)))
    model = copy.deepcopy(single)
    expert = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate(), Replicate()]))
    bias = nn.Parameter(distribute_tensor(model[1].bias.detach(), mesh, [Replicate(), Replicate()]))

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = expert, bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to_local(), self.bias.to_local())

    model[1] = Local()
    fully_shard(model[1], mesh=mesh, dp_mesh_dims=DataParallelMeshDims("edp"))
    fully_shard(model[2], mesh=mesh, dp_mesh_dims=DataParallelMeshDims("ep", "edp"))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(("edp", "ep")))
    xs = [batch(r) for r in range(world)]
    for _ in range(2):
        model.zero_grad()
        loss_of(model(xs[rank][0]), xs[rank][1]).backward()
        found, expected = full_grads(model), mean_grads(single, xs)
        pairs = mean_grads(single, [xs[r] for r in range(world) if r % 2 == rank % 2])
        equal(found, expected | {n: g for n, g in pairs.items() if n.startswith("1.")})


@on_ranks(4)
def test_groups_of_neighbours_across_several_shard_axes(rank, world):
    """An int counts flattened shard ranks: neighbours differ on the last axis."""
    model, single = integers_(chain()), integers_(chain())
    for m in (*model.layers, model):
        chosen = DataParallelMeshDims(("dp_shard", "cp"))
        fully_shard(m, mesh=mesh_of(dp_shard=2, cp=2), dp_mesh_dims=chosen, reshard_after_forward=2)
    xs = [batch(r) for r in range(world)]
    loss = loss_of(model(xs[rank][0]), xs[rank][1])
    weight = model.layers[0].up.weight
    assert weight.device_mesh.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    equal([full(weight)], [single.layers[0].up.weight])
    loss.backward()
    equal(full_grads(model), mean_grads(single, xs))


@on_ranks(4)
def test_models_that_take_turns_on_shared_meshes(rank, world):
    """Two roots on overlapping meshes: forwards, then backwards, in either order. Buffers above a MiB are reused."""
    wide, flat, hsdp = 600, mesh_of(shard=4), mesh_of(replicate=2, shard=2)

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(wide, wide) for _ in range(2)))

    models, singles = [build(seed) for seed in (1, 2)], [build(seed) for seed in (1, 2)]
    for model, meshes in zip(models, ((flat, hsdp), (hsdp, flat)), strict=True):
        fully_shard(model[0], mesh=meshes[0])
        fully_shard(model, mesh=meshes[1], reshard_after_forward=True)
    xs = [data(r, 0, rows=2, width=wide) for r in range(world)]
    for order in ((0, 1), (1, 0)):
        losses = [model(xs[rank]).square().sum() for model in models]
        for at in order:
            losses[at].backward()
    for model, single in zip(models, singles, strict=True):
        (sum(single(x).square().sum() for x in xs) * 2 / world).backward()
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            close([full(p.grad) / 100], [q.grad / 100], 1e-5)


@on_ranks(4)
def test_a_root_on_fewer_ranks_than_its_children(rank, world):
    pairs, all_of_them = mesh_of(edp=2, ep=2)["edp"], mesh_of(shard=4)

    def run(api):
        torch.manual_seed(0)
        model, trace = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), Trace()
        api.fully_shard(model[1], mesh=all_of_them)
        api.fully_shard(model, mesh=pairs)
        for step in range(2):
            model(data(rank, step)).square().mean().backward()
            note_places(trace, model, grads=True)
        return trace

    assert_parity(run)


# ---------------------------------------------------------------------------------------------------------- refusals


@on_ranks(4)
def test_refusals_name_what_is_wrong_and_change_nothing(rank, world):
    whole, other, three = mesh_of(dp=2, tp=2), mesh_of(tp=2, dp=2), mesh_of(rep=2, shard=2, tp=1)
    dp, cp = DataParallelMeshDims(shard="dp"), mesh_of(shard=2, cp=2)
    no_names = init_device_mesh("cpu", (2, 2))
    cases = [
        ("unknown axis", mlps(1), whole, DataParallelMeshDims(shard="fsdp"), r"fsdp.*dp.*tp"),
        ("unknown replicate axis", mlps(1), whole, DataParallelMeshDims("dp", "rep"), r"replicate.*rep.*dp.*tp"),
        ("order", mlps(1), cp, DataParallelMeshDims(shard=("cp", "shard")), r"order.*\('shard', 'cp'\)"),
        ("no names", mlps(1), no_names, dp, "mesh_dim_names"),
        ("plain beside tp", mlps(1), whole, dp, r"'up\.weight'.*'tp'.*distribute_tensor"),
        ("other mesh", spread(mlps(1), other), whole, dp, r"'up\.weight'.*mesh"),
        ("sub mesh", spread(mlps(1), whole["tp"]), whole, dp, r"'up\.weight'.*mesh"),
        ("not whole on dp", spread(mlps(1), whole, ("dp",)), whole, dp, r"'up\.weight'.*'dp'.*Replicate"),
        ("partial", partial(mlps(1), whole), whole, dp, r"'up\.weight'.*Partial"),
        ("three axes", mlps(1), three, None, r"3 axes.*dp_mesh_dims"),
        ("a string", mlps(1), whole, "dp", r"DataParallelMeshDims.*'dp'"),
        ("a tuple", mlps(1), whole, ("dp", None), "DataParallelMeshDims"),
    ]
    for what, model, mesh, chosen, text in cases:
        module, before = model[0], parameters_of(model)
        with pytest.raises(ValueError, match=f"(?s){text}"):
            fully_shard(module, mesh=mesh, dp_mesh_dims=chosen)
        assert parameters_of(model) == before, what
        if not isinstance(module.up.weight, DTensor):
            equal([module(data(0, 0))], [mlps(1)[0](data(0, 0))], what)
            fully_shard(module, mesh=mesh_of(shard=4))  # still usable
            module(data(rank, 0)).sum().backward()
    for bad in ({}, {"shard": ()}, {"shard": "dp", "replicate": "dp"}, {"shard": 0}, {"shard": ("dp", "dp")}):
        with pytest.raises(ValueError, match=r"shard"):
            DataParallelMeshDims(**bad)


def partial(model, mesh):
    local = torch.ones(model[0].up.weight.shape)
    model[0].up.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Partial()]))
    return model


@on_ranks(4)
def test_a_gradient_that_cannot_be_reduced_is_told(rank, world):
    """An average over the data-parallel axis isn't this rank's term of a sum."""
    mesh = mesh_of(dp=2, tp=2)

    class Averaged(nn.Linear):
        def forward(self, x):
            return x @ self.weight.to_local(grad_placements=[Partial("avg"), Replicate()])

    model = Averaged(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()]))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match=r"'weight'.*'dp'.*Partial"):
        model(torch.ones(1, 4)).sum().backward()


# ------------------------------------------------------------------------------------------------- process groups


def linears(depth):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


GROUPS = {
    "1-D": ({"shard": 4}, [0, 0]),
    "HSDP": ({"rep": 2, "shard": 2}, [0, 0]),
    "flattened": ({"shard": 2, "cp": 2}, [1, 1]),
    "flattened HSDP": ({"rep": 2, "shard": 2, "cp": 1}, [1, 1]),
    "tp": ({"dp": 2, "tp": 2}, [0, 0]),
    "int": ({"shard": 4}, [1, 0]),
    "replicated in HSDP": ({"rep": 2, "shard": 2}, [1, 0]),
}
"""Axes, and the most groups made beside the mesh's own: one of flattened axes, of the same ranks never again."""


@pytest.mark.parametrize("kind", list(GROUPS))
@on_ranks(4)
def test_groups_do_not_grow_with_modules(rank, world, kind):
    """Two modules and twelve, each on a new mesh, trained."""
    axes, most = GROUPS[kind]
    made = []
    for depth in (2, 12):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model, before, options = linears(depth), groups(), {}
        if kind.startswith("flattened"):
            options["dp_mesh_dims"] = DataParallelMeshDims(("shard", "cp"), "rep" if "rep" in axes else None)
        if kind == "tp":
            options["dp_mesh_dims"] = DataParallelMeshDims("dp")
            spread(model, mesh)
        if kind == "int":
            options["reshard_after_forward"] = 2
        for child in model:
            whole = [child.bias] if kind.startswith("replicated") else None
            fully_shard(child, mesh=mesh, replicate_params=whole, **options)
        fully_shard(model, mesh=mesh, **options)
        for step in range(2):
            x = data(rank // 2 if kind == "tp" else rank, step)
            model(on_mesh(x, mesh) if kind == "tp" else x).square().mean().backward()
        made.append(groups() - before)
    assert all(found <= limit for found, limit in zip(made, most, strict=True)), made


# ------------------------------------------------------------------------------------------- norms and state dicts


@pytest.mark.parametrize("layout", ["dp tp", "tp dp", "rep shard tp", "shard cp", "replicate tp"])
@on_ranks(4)
def test_clipping_and_state_dicts(rank, world, layout):
    """The norm of a single process on every rank; whole and sharded state dicts survive a round trip."""
    axes, shard, replicate = LAYOUTS[layout]
    mesh, chosen = mesh_of(**axes), DataParallelMeshDims(shard or None, replicate or None)
    single = mlps(hidden=9)
    model = shard_all(fully_shard, spread(copy.deepcopy(single), mesh), mesh=mesh, dp_mesh_dims=chosen)
    model(on_mesh(data(0, 0), mesh)).to_local().square().mean().backward()
    mean_square(single, data(0, 0)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(single.parameters(), 0.1)
    close([norm], [expected], 2e-6)
    answers = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(answers, norm)
    equal(answers, answers[:1] * world)
    close(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, 2e-6)
    model.zero_grad()

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    equal(whole, dict(single.state_dict()))
    sharded = {n: v.clone() for n, v in get_model_state_dict(model).items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    set_model_state_dict(model, sharded)
    equal({n: full(p) for n, p in model.named_parameters()}, dict(single.state_dict()))
    set_model_state_dict(model, {n: 2 * v for n, v in whole.items()}, options=StateDictOptions(full_state_dict=True))
    equal({n: full(p) for n, p in model.named_parameters()}, {n: 2 * v for n, v in single.state_dict().items()})
    with torch.no_grad():
        for p in single.parameters():
            p.mul_(2)
        close([model(on_mesh(data(0, 1), mesh)).full_tensor()], [single(data(0, 1))], 2e-6)


@pytest.mark.parametrize("sizes", [(6, 8), (6, 9), (5, 7)])
@on_ranks(4)
def test_checkpoints_of_strided_shards(rank, world, sizes):
    """Written by (dp, tp), read by a model on four shard ranks."""
    single, folder = mlps(1, width=sizes[0], hidden=sizes[1]), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    model = spread(copy.deepcopy(single), mesh_of(dp=2, tp=2))
    shard_all(fully_shard, model, mesh=mesh_of(dp=2, tp=2), dp_mesh_dims=DataParallelMeshDims("dp"))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = fully_shard(copy.deepcopy(single), mesh=mesh_of(shard=4))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    found = get_model_state_dict(other)
    dcp.load(found, checkpoint_id=folder[0])
    set_model_state_dict(other, found)
    equal({n: full(p) for n, p in other.named_parameters()}, dict(single.state_dict()))
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


# ------------------------------------------------------------------------------------------------------- functional


@pytest.mark.parametrize(
    ("axes", "shard", "replicate"),
    [
        ({"dp": 2, "tp": 2}, "dp", None),
        ({"tp": 2, "dp": 2}, "dp", None),
        ({"dp": 2, "tp": 2}, None, "dp"),
        ({"shard": 2, "cp": 2}, ("shard", "cp"), None),
        ({"rep": 2, "a": 2, "b": 1}, ("a", "b"), "rep"),
        ({"a": 2, "rep": 2}, "a", "rep"),
    ],
)
@on_ranks(4)
def test_functional_training(rank, world, axes, shard, replicate):
    """Ranks that differ on other axes only don't communicate: each such slice trains on its own batches."""
    mesh, chosen = mesh_of(**axes), DataParallelMeshDims(shard, replicate)
    others = [n for n in axes if n not in chosen.shard_names + chosen.replicate_names]
    slice_ = mesh.get_local_rank(others[0]) if others else 0
    parallel = [n for n in axes if n not in others]
    count, place = 1, 0
    for axis in parallel:
        place = place * axes[axis] + mesh.get_local_rank(axis)
        count *= axes[axis]
    model, single = integers_(Chain()), integers_(Chain())
    state = shard_module(model, mesh, LAYERS, dp_mesh_dims=chosen)
    params = shard_parameters(state)
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    step = value_and_grad(lambda p, x, y: loss_of(functional_call(model, p, x), y))
    alone = torch.optim.SGD(single.parameters(), lr=1.0)
    for i in range(2):
        xs = [batch(10 * slice_ + r, i) for r in range(count)]
        (loss, _), state = step(state, *xs[place])
        close([loss], [loss_of(single(xs[place][0]), xs[place][1]).detach()], 1e-5)
        expected = mean_grads(single, xs)
        if others:  # what ranks along them hold is the user's to know: here, models of their own
            with pytest.raises(ValueError, match=rf"{others[0]}.*norm="):
                optimizer_step(state, optimizer, params, max_norm=0.5)
        state, norm = optimizer_step(state, optimizer, params, max_norm=0.5, norm=global_norm if others else None)
        for n, p in single.named_parameters():
            p.grad = expected[n]
        close([norm], [nn.utils.clip_grad_norm_(single.parameters(), 0.5)], 1e-5)
        alone.step()
    for name, rows in params.items():
        bucket = next(b for u in state.layout.units for b in u.buckets for m in b.params.members if m.spec.name == name)
        pieces, at = bucket.mesh.shard_size, bucket.mesh.shard_index(rank)
        whole = dict(single.named_parameters())[name].detach()
        chunks = [*whole.chunk(pieces), *[whole[:0]] * pieces]
        close([rows], [chunks[at]], 1e-5, name)


@on_ranks(4)
def test_functional_refusals(rank, world):
    """All ranks fail alike, and the model is as it was."""
    model = integers_(Chain())
    before = parameters_of(model)
    for chosen, text in ((DataParallelMeshDims("fsdp"), "fsdp.*dp.*tp"), ("dp", "DataParallelMeshDims")):
        with pytest.raises(ValueError, match=f"(?s){text}"):
            shard_module(model, mesh_of(dp=2, tp=2), LAYERS, dp_mesh_dims=chosen)
    with pytest.raises(ValueError, match="3 axes"):
        shard_module(model, mesh_of(rep=2, shard=2, tp=1), LAYERS)
    assert parameters_of(model) == before


def test_ranks_that_fall_along_an_axis_are_refused():
    """Without process groups: torch sorts a group's ranks, so that a shard would land elsewhere."""
    from hsdp_fn_torch.mesh import mesh_spec

    mesh = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("rep", "shard"), _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match="rising order"):
        mesh_spec(mesh)
