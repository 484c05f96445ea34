"""Parameters with meshes of their own (routed experts), and units on different meshes below one root."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp_fn
import hsdp_fn_torch
from hsdp_fn import DataParallelMeshDims, OnMesh
from hsdp_fn_torch import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    clip_grad_norm_,
    fully_shard,
    functional_call,
    get_model_state_dict,
    mesh_spec,
    optimizer_step,
    replicate,
    set_model_state_dict,
    shard_module,
    shard_parameters,
    value_and_grad,
)
from tests.workers_facade import OURS, THEIRS, Boom, Trace, assert_parity, full, tripwire
from tests.workers_meshes import full_grads, groups, mesh_of, note_places, parameters_of, place
from tests.workers_torch import WIDTH, Traffic, batch, chunk, close, equal, integers_, loss_of, mean_grads, on_ranks

EXPERTS = 4
DENSE = WIDTH * WIDTH + WIDTH
PER_EXPERT = WIDTH * WIDTH


class Experts(nn.Module):
    """Stacked experts, all of which see all of a rank's rows."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, WIDTH, WIDTH))

    def forward(self, x: Tensor, which: slice = slice(None)) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return sum((torch.relu(x @ w) for w in weight[which].unbind()), torch.zeros_like(x))


class Sparse(nn.Module):
    """A dense layer, experts, a dense layer of 4 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.out = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor, which: slice = slice(None)) -> Tensor:
        x = self.gate(x)
        return self.out(x + self.experts(x, which))


def own(rank):
    """The experts of a rank: the axis ``ep`` is the fast one."""
    return slice(0, 2) if rank % 2 == 0 else slice(2, 4)


def single_process(depth=1):
    return integers_(nn.Sequential(*(Sparse() for _ in range(depth))) if depth > 1 else Sparse(), seed=5)


def pair(world):
    """``(edp, ep)``: ranks with equal experts, ranks with different ones."""
    return mesh_of(edp=world // 2, ep=2)


def keep_own(model, rank, world, kind="local"):
    """Leave a rank its own experts: as a plain tensor, or as a DTensor on the expert-parallel axis."""
    for m in model.modules():
        if isinstance(m, Experts):
            rows = m.weight.detach()[own(rank)].clone()
            rows = rows if kind == "local" else DTensor.from_local(rows, pair(world)["ep"], [Shard(0)])
            m.weight = nn.Parameter(rows)
    return model


def by_mesh(info, model, result=ShardPlacementResult, placement=None):
    """A placement function that gives experts a mesh of their own."""
    experts = {id(m.weight) for m in model.modules() if isinstance(m, Experts)}
    return lambda p: result(placement, info) if id(p) in experts else None


def batches(world, step=0):
    return [(x, own(r), y) for r in range(world) for x, y in [batch(r, step, outputs=4)]]


def run_once(model, rank, step=0):
    x, y = batch(rank, step, outputs=4)
    loss = loss_of(model(x), y)
    loss.backward()
    return loss


def as_whole(grads, expected, rank):
    """What was expected of all experts, of those that a whole tensor here consists of."""
    return {n: g if grads[n].shape == g.shape else g[own(rank)] for n, g in expected.items()}


# ------------------------------------------------------------------------------------------- one unit, two meshes


@pytest.mark.parametrize("kind", ["local", "DTensor"])
@pytest.mark.parametrize("names", ["ours", "torch's"])
@on_ranks(4)
def test_dense_and_expert_gradients_are_those_of_one_process(rank, world, kind, names):
    """Dense: the mean over 4. Experts: the sum over the two ranks that have them, divided by 4 all the same."""
    single, mesh, ep = single_process(), mesh_of(dp=world), pair(world)
    model = keep_own(copy.deepcopy(single), rank, world, kind)
    kinds = (FSDPMeshInfo, ShardPlacementResult)
    if names == "torch's":
        kinds = (torch_common.FSDPMeshInfo, torch_common.ShardPlacementResult)
    fn = by_mesh(kinds[0](ep["edp"], shard_mesh_dim=0), model, kinds[1])
    fully_shard(model, mesh=mesh, shard_placement_fn=fn)
    weight = model.experts.weight
    assert model.gate.weight.device_mesh == mesh and model.gate.weight.placements == (Shard(0),)
    if kind == "local":
        assert (weight.device_mesh, weight.placements) == (ep["edp"], (Shard(0),))
        equal([full(weight)], [single.experts.weight[own(rank)]])
    else:
        assert weight.device_mesh.mesh_dim_names == ("edp", "ep")
        assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        equal([full(weight)], [single.experts.weight])
    assert weight.to_local().shape == (1, WIDTH, WIDTH)
    for step in range(2):
        model.zero_grad()
        loss = run_once(model, rank, step)
        equal([loss], [loss_of(single(*batches(world, step)[rank][:2]), batches(world, step)[rank][2])])
        found = full_grads(model)
        equal(found, as_whole(found, mean_grads(single, batches(world, step)), rank), f"step {step}")
        assert place(weight.grad) == place(weight)


@pytest.mark.parametrize("kind", ["local", "DTensor"])
@on_ranks(4)
def test_the_bits_of_torch_with_the_same_factor(rank, world, kind):
    """Torch divides by the size of each mesh by default; told the factor 4, it gives the same."""
    ep = pair(world)

    def run(api):
        common = torch_common if api is not OURS else hsdp_fn_torch
        info = common.FSDPMeshInfo(ep["edp"], shard_mesh_dim=0)
        torch.manual_seed(0)
        model, trace = nn.Sequential(Sparse(), nn.Linear(4, WIDTH), Sparse()), Trace()
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
        keep_own(model, rank, world, kind)
        for m in (model[0], model[2], model):
            fn = by_mesh(info, m, common.ShardPlacementResult)
            api.fully_shard(m, mesh=mesh_of(dp=world), shard_placement_fn=fn)
            if api is not OURS:
                m.set_force_sum_reduction_for_comms(True)  # gloo can't multiply beforehand
            m.set_gradient_divide_factor(4.0)
        note_places(trace, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(batch(rank, step)[0]).square().mean()
            loss.backward()
            trace.note("loss", loss.detach())
            note_places(trace, model, grads=True)
            optimizer.step()
            optimizer.zero_grad()
        note_places(trace, model)
        return trace

    assert_parity(run)


@on_ranks(4)
def test_one_collective_of_a_kind_for_each_mesh_and_dtype(rank, world):
    model = keep_own(single_process(), rank, world)
    model.extra = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    model.register_forward_hook(lambda m, args, out: out + m.extra.float().sum())
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn, reshard_after_forward=True)
    run_once(model, rank)
    with Traffic() as traffic:
        run_once(model, rank)
    dense = 8 * WIDTH + 8 + 4 * WIDTH  # 6 rows are 8 with padding
    kinds = [("bfloat16", 8), ("float32", dense), ("float32", 2 * PER_EXPERT)]
    expected = [("all_gather", *k) for k in kinds] * 2 + [("reduce_scatter", *k) for k in kinds]
    assert sorted(traffic.seen) == sorted(expected)
    promised = hsdp_fn.expected_comm(model.hsdp_state.layout)
    sizes = sorted((c.op, c.dtype, c.numel, c.group_size) for c in promised if c.op == "reduce_scatter")
    assert [s[3] for s in sizes if s[2] == 2 * PER_EXPERT] == [2]


@pytest.mark.parametrize("placement", [Shard(1), Shard(2), None])
@on_ranks(4)
def test_experts_on_another_dim(rank, world, placement):
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world)
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model, placement=placement)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
    assert model.experts.weight.placements == (placement or Shard(0),)
    run_once(model, rank)
    found = full_grads(model)
    equal(found, as_whole(found, mean_grads(single, batches(world)), rank))


@pytest.mark.parametrize("kind", ["HSDP", "DDP", "DDP of all", "equal to the unit's"])
@on_ranks(4)
def test_other_kinds_of_mesh_infos(rank, world, kind):
    """Experts on 2 x 2 ranks, whole on two, whole on four; and the unit's own mesh, which is no mesh of its own."""
    single, mesh = single_process(), mesh_of(dp=world)
    model = copy.deepcopy(single)
    if kind == "DDP":
        keep_own(model, rank, world)
    info = {
        "HSDP": lambda: HSDPMeshInfo(mesh_of(rep=2, edp=2), shard_mesh_dim=1, replicate_mesh_dim=0),
        "DDP": lambda: DDPMeshInfo(pair(world)["edp"], replicate_mesh_dim=0),
        "DDP of all": lambda: DDPMeshInfo(mesh, replicate_mesh_dim=0),
        "equal to the unit's": lambda: FSDPMeshInfo(mesh, shard_mesh_dim=0),
    }[kind]()
    fully_shard(model, mesh=mesh, shard_placement_fn=by_mesh(info, model))
    weight, which = model.experts.weight, own(rank) if kind == "DDP" else slice(None)
    expected = {"HSDP": (Replicate(), Shard(0)), "equal to the unit's": (Shard(0),)}.get(kind, (Replicate(),))
    assert weight.placements == expected
    equal([full(weight)], [single.experts.weight[which]])
    with Traffic() as traffic:
        run_once(model, rank)
    everyone = batches(world) if kind == "DDP" else [(x, y) for x, _, y in batches(world)]
    found = full_grads(model)
    equal(found, as_whole(found, mean_grads(single, everyone), rank))
    ops = [op for op, *_ in traffic.seen if op in ("all_reduce", "reduce_scatter")]
    assert sorted(ops) == {"HSDP": ["all_reduce", "reduce_scatter", "reduce_scatter"]}.get(
        kind, ["reduce_scatter"] if kind.startswith("equal") else ["all_reduce", "reduce_scatter"]
    )


@on_ranks(4)
def test_a_unit_on_replicas_with_experts_on_pairs(rank, world):
    """Dense parameters on 2 x 2 ranks: the divisor is 4 for both."""
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world)
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(rep=2, shard=2), shard_placement_fn=fn)
    run_once(model, rank)
    found = full_grads(model)
    equal(found, as_whole(found, mean_grads(single, batches(world)), rank))


@on_ranks(4)
def test_a_parameter_on_more_ranks_than_its_unit(rank, world):
    """A gate on all four in a unit on two: a mean over four, the rest over two."""
    single, ep = single_process(), pair(world)
    model = keep_own(copy.deepcopy(single), rank, world)
    gate, info = model.gate.weight, FSDPMeshInfo(mesh_of(dp=world), shard_mesh_dim=0)
    fully_shard(
        model, mesh=ep["edp"], shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p is gate else None
    )
    for _ in range(2):
        model.zero_grad()
        run_once(model, rank)
        found, everyone = full_grads(model), mean_grads(single, batches(world))
        expected = mean_grads(single, batches(world)[rank % 2 :: 2]) | {"gate.weight": everyone["gate.weight"]}
        equal(found, as_whole(found, expected, rank))


@pytest.mark.parametrize("kind", ["local", "DTensor"])
@on_ranks(4)
def test_accumulation_and_regrouping(rank, world, kind):
    """Held back for two microbatches; with pieces of the dense parameters over two ranks (all of the experts')."""
    single = single_process(2)
    single = nn.Sequential(single[0], nn.Linear(4, WIDTH), single[1])
    integers_(single[1])

    class Two(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x, which=slice(None)):
            return self.parts[2](torch.tanh(self.parts[1](self.parts[0](x, which))), which)

    single = Two(single)
    model = keep_own(copy.deepcopy(single), rank, world, kind)
    for m in (model.parts[0], model.parts[2], model):
        fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), m)
        fully_shard(m, mesh=mesh_of(dp=world), shard_placement_fn=fn, reshard_after_forward=2)
    for _ in range(2):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        run_once(model, rank, 0)
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        run_once(model, rank, 1)
        found, parts = full_grads(model), [mean_grads(single, batches(world, s)) for s in range(2)]
        expected = {n: parts[0][n] + parts[1][n] for n in parts[0]}
        for name, g in as_whole(found, expected, rank).items():
            close([found[name] / g.abs().max()], [g / g.abs().max()], 2e-6, name)
    model(batch(rank)[0])
    dense = model.parts[0]._modules["gate"]._parameters["weight"]
    assert isinstance(dense, DTensor)
    if kind == "local":
        assert dense.device_mesh.size() == 2
        equal([full(dense)], [single.parts[0].gate.weight])


@on_ranks(4)
def test_training_without_sums_over_other_ranks_experts(rank, world):
    """Ranks with other experts never mix: after three steps each has what one process has."""
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world)
    fully_shard(
        model,
        mesh=mesh_of(dp=world),
        shard_placement_fn=by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model),
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-12) for m in (model, single)]
    for step in range(3):
        run_once(model, rank, step)
        expected = mean_grads(single, batches(world, step))
        for n, p in single.named_parameters():
            p.grad = expected[n]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {n: full(p) for n, p in model.named_parameters()}
    close(found, as_whole(found, {n: p.detach() for n, p in single.named_parameters()}, rank), 1e-5)


@on_ranks(4)
def test_reduce_scattered_sums_of_a_unit_on_replicas(rank, world):
    """The all-reduce is put off: the dense sums are held, and so are the experts', which need none."""
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world)
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(rep=2, shard=2), shard_placement_fn=fn)
    for _ in range(2):
        model.zero_grad()
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            with Traffic() as traffic:
                run_once(model, rank, step)
            assert ("all_reduce" in [op for op, *_ in traffic.seen]) == (step == 2)
        parts = [mean_grads(single, batches(world, s)) for s in range(3)]
        found = full_grads(model)
        for name, g in as_whole(found, {n: sum(p[n] for p in parts) for n in parts[0]}, rank).items():
            close([found[name] / 1000], [g / 1000], 1e-6, name)


@on_ranks(4)
def test_all_reduces_of_experts_on_replicas_are_put_off_like_torchs(rank, world):
    """A unit that only shards, experts that are replicated as well."""

    def run(api):
        common = torch_common if api is not OURS else hsdp_fn_torch
        info = common.HSDPMeshInfo(mesh_of(rep=2, edp=2), shard_mesh_dim=1, replicate_mesh_dim=0)
        model, trace = single_process(), Trace()
        fn = by_mesh(info, model, common.ShardPlacementResult)
        api.fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
        run_once(model, rank)
        for later in (False, True):
            model.set_requires_all_reduce(later)
            with Traffic() as traffic:
                run_once(model, rank, 1)
            trace.note(f"all-reduces with {later}", [op for op, *_ in traffic.seen].count("all_reduce"))
        note_places(trace, model, grads=True)
        return trace

    assert_parity(run)


@pytest.mark.parametrize("which", ["frozen experts", "frozen dense", "idle experts"])
@on_ranks(4)
def test_frozen_and_idle_parameters(rank, world, which):
    """Frozen ones get no gradient and no reduction; experts that only some ranks use count as zeros there, if asked."""
    single = single_process()
    if which.startswith("frozen"):
        for n, p in single.named_parameters():
            p.requires_grad_(("experts" in n) == (which == "frozen dense"))
    model = keep_own(copy.deepcopy(single), rank, world)
    model.experts.weight.requires_grad_(which != "frozen experts")
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
    everyone = batches(world)
    if which == "idle experts":
        model.set_reduce_scatter_unused_params(True)
        everyone = [(x, which if r != 1 else slice(0, 0), y) for r, (x, which, y) in enumerate(everyone)]
    x, y = batch(rank, outputs=4)
    for _ in range(2):
        model.zero_grad()
        with Traffic() as traffic:
            loss_of(model(x, slice(0, 0) if which == "idle experts" and rank == 1 else slice(None)), y).backward()
        found, expected = full_grads(model), mean_grads(single, everyone)
        assert {n for n, g in found.items() if g is not None} == set(expected)
        found = {n: g for n, g in found.items() if g is not None}
        equal(found, as_whole(found, expected, rank))
    count = [op for op, *_ in traffic.seen].count("reduce_scatter")
    assert count == (2 if which == "idle experts" else 1)


@on_ranks(4)
def test_experts_on_a_whole_mesh(rank, world):
    """Its mesh info names the data-parallel axis of the mesh that the parameter is on."""
    single, ep = single_process(), pair(world)
    model = copy.deepcopy(single)
    whole = distribute_tensor(single.experts.weight.detach(), ep, [Replicate(), Shard(0)])
    model.experts.weight = nn.Parameter(whole)
    chosen = {"dp_mesh_dims": DataParallelMeshDims("edp"), "spmd_mesh": ep}
    fully_shard(
        model,
        mesh=mesh_of(dp=world),
        shard_placement_fn=by_mesh(FSDPMeshInfo(ep["edp"], shard_mesh_dim=0, **chosen), model),
    )
    weight = model.experts.weight
    assert weight.device_mesh == ep and weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    equal([full(weight)], [single.experts.weight])
    run_once(model, rank)
    equal(full_grads(model), mean_grads(single, batches(world)))


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)])
@on_ranks(4)
def test_experts_split_over_two_axes_more(rank, world, sizes):
    """Expert and tensor parallel: cut over data-parallel ranks like torch's, and whole again as the original."""
    mesh, single = mesh_of(**dict(zip(("edp", "ep", "tp"), sizes, strict=True))), single_process()
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)]):
        found = []
        for api, common in ((THEIRS, torch_common), (OURS, hsdp_fn_torch)):
            model = copy.deepcopy(single)
            weight = distribute_tensor(single.experts.weight.detach(), mesh["ep", "tp"], placements)
            model.experts.weight = nn.Parameter(weight)
            fn = by_mesh(common.FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0), model, common.ShardPlacementResult)
            api.fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
            trace = Trace()
            note_places(trace, model)
            found.append(dict(trace.records))
        assert found[0].keys() == found[1].keys()
        for what, value in found[0].items():
            if isinstance(value, Tensor):
                equal([found[1][what]], [value], f"{what} of {placements}")
            else:
                assert found[1][what] == value, (what, placements)
        equal([found[1]["parameter experts.weight"]], [single.experts.weight])


@pytest.mark.parametrize("change", ["double", "assign", "error", "meta"])
@on_ranks(4)
def test_parameters_on_two_meshes_are_replaced_converted_and_reset(rank, world, change):
    single, ep = single_process(), pair(world)
    model = keep_own(copy.deepcopy(single), rank, world, "DTensor")
    if change == "meta":
        model = model.to("meta")
    fn = by_mesh(FSDPMeshInfo(ep["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
    dtype = torch.float64 if change == "double" else torch.float32
    if change == "meta":
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for n, p in single.named_parameters():
                target = dict(model.named_parameters())[n]
                target.copy_(distribute_tensor(p.detach(), target.device_mesh, target.placements))
    else:
        run_once(model, rank)
        model.zero_grad()
    if change == "double":
        model.to(dtype)
        single.to(dtype)
    elif change == "assign":
        model.load_state_dict({n: -v for n, v in model.state_dict().items()}, assign=True)
        with torch.no_grad():
            for p in single.parameters():
                p.neg_()
    elif change == "error":
        with tripwire(model.gate, "backward"), pytest.raises(Boom):
            run_once(model, rank)
        model.reset_iter_state()
    x, y = (t.to(dtype) for t in batch(rank, outputs=4))
    loss_of(model(x), y).backward()
    everyone = [(x.to(dtype), which, y.to(dtype)) for x, which, y in batches(world)]
    equal(full_grads(model), mean_grads(single, everyone))


# ------------------------------------------------------------------------------------------ warnings and refusals


def told(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if "different weights" in str(w.message)]


@pytest.mark.parametrize("kind", ["local", "DTensor"])
@on_ranks(4)
def test_different_experts_are_no_mistake_but_different_copies_are(rank, world, kind):
    mesh, info = mesh_of(dp=world), FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0)

    def first_forward(change):
        model = keep_own(single_process(), rank, world, kind)
        with torch.no_grad():
            change(model)
        fully_shard(model, mesh=mesh, shard_placement_fn=by_mesh(info, model))
        return told(lambda: model(batch(rank)[0]))

    def one_copy(model):
        weight = model.experts.weight
        (weight.to_local() if kind == "DTensor" else weight).add_(1.0 if rank == 3 else 0.0)

    assert first_forward(lambda model: None) == []
    found = first_forward(one_copy)
    assert len(found) == (1 if rank in (1, 3) else 0), found  # ranks 1 and 3 have the same experts
    assert all("(root)" in text for text in found)
    assert len(first_forward(lambda model: model.gate.weight.add_(rank == 2))) == 1


@on_ranks(4)
def test_mesh_infos_that_are_refused(rank, world):
    model, mesh, ep = keep_own(single_process(), rank, world), mesh_of(dp=world), pair(world)
    before = parameters_of(model)
    for info, text in (
        (FSDPMeshInfo(ep, shard_mesh_dim=0), r"'experts\.weight'.*ep.*submesh"),
        ("edp", r"'experts\.weight'.*FSDPMeshInfo"),
        (ep["edp"], r"'experts\.weight'.*FSDPMeshInfo"),
        (None, r"'experts\.weight'.*FSDPMeshInfo"),
    ):
        with pytest.raises(ValueError, match=f"(?s){text}"):
            fully_shard(model, mesh=mesh, shard_placement_fn=by_mesh(info, model))
    for wrong in ("Shard(0)", 0, Replicate()):
        with pytest.raises(ValueError, match=r"'experts\.weight'|'gate\.weight'"):
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda p, wrong=wrong: wrong)
    for kind, options in ((FSDPMeshInfo, {}), (DDPMeshInfo, {}), (HSDPMeshInfo, {"shard_mesh_dim": 0})):
        with pytest.raises(ValueError, match="mesh_dim"):
            kind(mesh, **options)
    with pytest.raises(ValueError, match="out of range"):
        FSDPMeshInfo(mesh, shard_mesh_dim=1)
    with pytest.raises(ValueError, match=r"=3.*4|=3.*2"):
        fn = by_mesh(FSDPMeshInfo(ep["edp"], shard_mesh_dim=0), model)
        fully_shard(model, mesh=mesh, shard_placement_fn=fn, reshard_after_forward=3)
    assert parameters_of(model) == before
    fully_shard(model, mesh=mesh, shard_placement_fn=by_mesh(FSDPMeshInfo(ep["edp"], shard_mesh_dim=0), model))
    run_once(model, rank)


@pytest.mark.parametrize("other", ["dim", "mesh", "size"])
@on_ranks(4)
def test_ranks_that_place_experts_otherwise_are_told(rank, world, other):
    """At the first forward, on every rank, before any parameter travels."""
    model, ep = keep_own(single_process(), rank, world), pair(world)
    info, placement, reshard = FSDPMeshInfo(ep["edp"], shard_mesh_dim=0), Shard(0), None
    if rank == 2:
        if other == "mesh":
            info = FSDPMeshInfo(mesh_of(dp=world), shard_mesh_dim=0)
        placement, reshard = Shard(1) if other == "dim" else Shard(0), 2 if other == "size" else None
    fn = by_mesh(info, model, placement=placement)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn, reshard_after_forward=reshard)
    with pytest.raises(hsdp_fn.RankMismatchError, match="different models or policies"):
        run_once(model, rank)


@on_ranks(4)
def test_groups_do_not_grow_with_modules(rank, world):
    made = []
    for depth in (2, 12):
        dp = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        blocks = nn.ModuleList(keep_own(single_process(), rank, world) for _ in range(depth))
        model, before = nn.Sequential(), groups()
        for at, block in enumerate(blocks):
            model.append(nn.Sequential(block, nn.Linear(4, WIDTH)))
            info = FSDPMeshInfo(ep["edp"], shard_mesh_dim=0)
            fully_shard(model[at], mesh=dp, shard_placement_fn=by_mesh(info, model[at]))
        fully_shard(model, mesh=dp)
        model(batch(rank)[0]).sum().backward()
        made.append(groups() - before)
    assert made == [0, 0], made


# ------------------------------------------------------------------------------------- units on meshes of their own


@pytest.mark.parametrize("tokens", ["one a rank", "both"])
@on_ranks(4)
def test_an_expert_module_on_its_own_mesh(rank, world, tokens):
    """An expert of two ranks, below a root on four: the mean over two of tokens [1, 1] and [2, 2] is 1.5."""
    ep = pair(world)
    for api in (THEIRS, OURS):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        for p in model.parameters():
            nn.init.eye_(p)
        api.fully_shard(model[1], mesh=ep["edp"])
        api.fully_shard(model, mesh=mesh_of(dp=world))
        if api is THEIRS:
            model[1].set_force_sum_reduction_for_comms(True)  # gloo can't multiply beforehand
        x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
        x = x[rank // 2 : rank // 2 + 1] if tokens == "one a rank" else x
        for factor in (None, 2.0, 4.0):
            model.zero_grad()
            if factor is not None:
                model[1].set_gradient_divide_factor(factor)
            model(x).sum(1).mean().backward()
            expected = torch.full((2, 2), 1.5 * 2 / (factor or 2.0))
            equal(full_grads(model), {"0.weight": torch.full((2, 2), 1.5), "1.weight": expected}, str(factor))
        assert model[1].weight.device_mesh == ep["edp"]


@on_ranks(4)
def test_units_on_several_meshes_below_one_root_train_like_torch(rank, world):
    """The root on four ranks, an expert on pairs, a block on 2 x 2, one on one rank of each pair's other axis."""
    ep, hsdp = pair(world), mesh_of(rep=2, shard=2)

    def run(api):
        torch.manual_seed(0)
        model, trace = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))), Trace()
        with torch.no_grad():
            model[1].weight.add_(rank % 2)  # another expert on the other rank of the pair
            model[3].weight.add_(rank // 2)
        api.fully_shard(model[1], mesh=ep["edp"])
        api.fully_shard(model[2], mesh=hsdp, reshard_after_forward=False)
        api.fully_shard(model[3], mesh=ep["ep"])
        api.fully_shard(model, mesh=mesh_of(dp=world))
        note_places(trace, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = torch.tanh(model(batch(rank, 2 * step + micro)[0])).square().mean()
                loss.backward()
                trace.note("loss", loss.detach())
            note_places(trace, model, grads=True)
            optimizer.step()
            optimizer.zero_grad()
        note_places(trace, model)
        return trace

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_parity(run)


@on_ranks(4)
def test_replicated_children_of_a_sharded_root(rank, world):
    """`replicate` over all ranks and over 2 x 2 ones flattened, below roots of other kinds: exact, and torch's bits."""
    single = integers_(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)))
    expected = mean_grads(single, [batch(r) for r in range(world)])
    flat, hsdp = mesh_of(dp=world), mesh_of(rep=2, shard=2)
    for root, child in ((flat, flat), (hsdp, flat), (flat, hsdp)):
        model = copy.deepcopy(single)
        replicate(model[0], mesh=flat)
        fully_shard(model[1], mesh=child)
        fully_shard(model, mesh=root)
        for _ in range(2):
            model.zero_grad()
            loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
            equal(full_grads(model), expected)
        assert model[0].weight.placements == (Replicate(),)
        assert [m.weight.device_mesh for m in model[1:3]] == [child, root]

    def run(api):
        torch.manual_seed(0)
        model, trace = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), Trace()
        (replicate if api is OURS else torch_replicate)(model[0], mesh=flat)
        api.fully_shard(model[1], mesh=hsdp)
        api.fully_shard(model, mesh=flat)
        for step in range(2):
            model(batch(rank, step)[0]).square().mean().backward()
            trace.note_grads(model)
        return trace

    assert_parity(run)


# ------------------------------------------------------------------------------------------ norms and state dicts


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("kind", ["local", "DTensor", "DDP", "HSDP", "unit on replicas", "own unit"])
@on_ranks(4)
def test_clipping(rank, world, kind, order):
    """The norm of all experts and the rest on every rank, whoever holds them; all are scaled alike."""
    single, ep = single_process(), pair(world)
    model = copy.deepcopy(single) if kind == "HSDP" else keep_own(copy.deepcopy(single), rank, world, kind)
    info = FSDPMeshInfo(ep["edp"], shard_mesh_dim=0)
    if kind == "DDP":
        info = DDPMeshInfo(ep["edp"], replicate_mesh_dim=0)
    if kind == "HSDP":
        info = HSDPMeshInfo(mesh_of(rep=2, edp=2), shard_mesh_dim=1, replicate_mesh_dim=0)
    fn = by_mesh(info, model)
    if kind == "own unit":
        fn = fully_shard(model.experts, mesh=mesh_of(dp=world), shard_placement_fn=fn) and None
    mesh = mesh_of(rep=2, shard=2) if kind == "unit on replicas" else mesh_of(dp=world)
    fully_shard(model, mesh=mesh, shard_placement_fn=fn)
    run_once(model, rank)
    expected = mean_grads(single, [(x, y) for x, _, y in batches(world)] if kind == "HSDP" else batches(world))
    for n, p in single.named_parameters():
        p.grad = expected[n].clone()
    norm = clip_grad_norm_(model.parameters(), 1.0, order)
    close([norm], [nn.utils.clip_grad_norm_(single.parameters(), 1.0, order)], 2e-6)
    answers = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(answers, norm)
    equal(answers, answers[:1] * world)
    found = full_grads(model)
    close(found, as_whole(found, {n: p.grad for n, p in single.named_parameters()}, rank), 2e-6)


@on_ranks(4)
def test_state_dicts(rank, world):
    """Experts as DTensors: whole and sharded ones go round, and the model trains on."""
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world, "DTensor")
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
    run_once(model, rank)
    model.zero_grad()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    equal(whole, dict(single.state_dict()))
    sharded = {n: v.clone() for n, v in get_model_state_dict(model).items()}
    assert place(sharded["experts.weight"]) == place(model.experts.weight)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    set_model_state_dict(model, sharded)
    equal({n: full(p) for n, p in model.named_parameters()}, dict(single.state_dict()))
    set_model_state_dict(model, {n: -v for n, v in whole.items()}, options=StateDictOptions(full_state_dict=True))
    equal({n: full(p) for n, p in model.named_parameters()}, {n: -v for n, v in single.state_dict().items()})


@on_ranks(4)
def test_state_dicts_of_local_experts(rank, world):
    """Each rank of the pair gets and loads its own experts."""
    single = single_process()
    model = keep_own(copy.deepcopy(single), rank, world)
    fn = by_mesh(FSDPMeshInfo(pair(world)["edp"], shard_mesh_dim=0), model)
    fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=fn)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    equal(whole["experts.weight"], single.experts.weight.detach()[own(rank)])
    set_model_state_dict(model, {n: -v for n, v in whole.items()}, options=StateDictOptions(full_state_dict=True))
    equal([full(model.experts.weight)], [-single.experts.weight[own(rank)]])
    sharded = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict({n: -v for n, v in sharded.items()})
    equal([full(model.experts.weight)], [single.experts.weight[own(rank)]])
    run_once(model, rank)
    found = full_grads(model)
    equal(found, as_whole(found, mean_grads(single, batches(world)), rank))


# ------------------------------------------------------------------------------------------------------- functional


@pytest.mark.parametrize("kind", ["sharded", "replicated", "submesh", "hsdp unit", "unit of its own"])
@on_ranks(4)
def test_functional_training(rank, world, kind):
    """Exact gradients, one norm on all ranks, rows of each rank's own experts after the steps."""
    single = single_process()
    model, ep = keep_own(copy.deepcopy(single), rank, world), pair(world)
    spec = mesh_spec(ep["edp"]) if kind == "submesh" else mesh_spec(ep, DataParallelMeshDims("edp"))
    placement = hsdp_fn.Replicate() if kind == "replicated" else hsdp_fn.Shard(0)
    mesh = mesh_of(rep=2, shard=2) if kind == "hsdp unit" else mesh_of(dp=world)
    units, place_at = ["gate"], lambda p: OnMesh(placement, spec) if p.name.startswith("experts") else None
    if kind == "unit of its own":  # whose gradients are means over its own ranks
        units, place_at = ["gate", hsdp_fn.UnitSpec("experts", mesh=spec)], None
    state = shard_module(model, mesh, units, placement_fn=place_at)
    params = shard_parameters(state)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    step = value_and_grad(lambda p, x, y: loss_of(functional_call(model, p, x), y))
    alone = torch.optim.SGD(single.parameters(), lr=0.5)
    for i in range(3):
        x, y = batch(rank, i, outputs=4)
        (loss, _), state = step(state, x, y)
        close([loss / 100], [loss_of(single(x, own(rank)), y).detach() / 100], 1e-5)
        expected = mean_grads(single, batches(world, i))
        if kind == "unit of its own":
            expected["experts.weight"] *= 2
        state, norm = optimizer_step(state, optimizer, params, max_norm=1.0)
        for n, p in single.named_parameters():
            p.grad = expected[n].clone()
        close([norm], [nn.utils.clip_grad_norm_(single.parameters(), 1.0)], 1e-5)
        answers = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(answers, norm)
        equal(answers, answers[:1] * world)
        alone.step()
    pieces = 1 if kind == "replicated" else 2
    mine = chunk(single.experts.weight.detach()[own(rank)], pieces, 0)[rank // 2 % pieces]
    close([params["experts.weight"]], [mine], 1e-5)


# ---------------------------------------------------------------------------------------------------- eight ranks


@on_ranks(8)
def test_eight_ranks(rank, world):
    """Experts on 4 x 2 ranks, regrouped over 2, and on 2 x 2 x 2 with replicas: gradients of one process."""
    single = single_process()
    ep, three = pair(world), mesh_of(erep=2, edp=2, ep=2)
    infos = (
        FSDPMeshInfo(ep["edp"], shard_mesh_dim=0),
        HSDPMeshInfo(three["erep", "edp"], shard_mesh_dim=1, replicate_mesh_dim=0),
    )
    for info in infos:
        for kind in ("local", "DTensor"):
            model = keep_own(copy.deepcopy(single), rank, world, "local")
            if kind == "DTensor":
                ep_mesh = ep["ep"] if info is infos[0] else three["ep"]
                local = DTensor.from_local(model.experts.weight.detach(), ep_mesh, [Shard(0)])
                model.experts.weight = nn.Parameter(local)
            fully_shard(model, mesh=mesh_of(dp=world), shard_placement_fn=by_mesh(info, model), reshard_after_forward=2)
            for step in range(2):
                model.zero_grad()
                run_once(model, rank, step)
                found = full_grads(model)
                expected = mean_grads(single, batches(world, step))
                equal(found, as_whole(found, expected, rank), f"{type(info).__name__} {kind}")
            whole = single.experts.weight if kind == "DTensor" else single.experts.weight[own(rank)]
            equal([full(dict(model.named_parameters())["experts.weight"])], [whole])
