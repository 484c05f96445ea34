"""`fully_shard`: which tensors a call owns, and how their shards stand in the modules. Compared with torch's own."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from hsdp_fn import LayoutError, MeshError, PolicyError
from hsdp_fn_torch import HSDPModule, fully_shard
from hsdp_fn_torch.mesh import FSDPMeshInfo, ShardPlacementResult
from tests.workers_facade import OURS, THEIRS, Trace, assert_parity, chain, data, full, mean_square, shard_blocks, train
from tests.workers_torch import (
    WIDTH,
    Block,
    Traffic,
    batch,
    chunk,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    loss_of,
    mean_grads,
    mesh_for,
    on_ranks,
)


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: "sharded" if isinstance(p, DTensor) else "plain" for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------- arguments


class Forwarding(nn.ModuleList):
    """A container that can run."""

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


@on_ranks(2)
def test_a_container_that_has_a_forward_is_sharded(rank, world):
    model = Forwarding([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])
    single = copy.deepcopy(model)
    fully_shard(model, mesh=fsdp_mesh(world))
    equal([model(data(rank, 0))], [single(data(rank, 0))])
    assert type(model[:1]) is Forwarding
    assert type(model[0]) is nn.Linear


@on_ranks(2)
def test_a_scalar_is_refused_with_the_way_out(rank, world):
    model = chain()
    model.first.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError, match=r"first\.temperature.*1-D tensor of one element"):
        fully_shard(model, mesh=fsdp_mesh(world))
    model.first.temperature = nn.Parameter(torch.ones(1))
    fully_shard(model, mesh=fsdp_mesh(world))
    assert model.first.temperature.to_local().shape == (1 - rank,)


@on_ranks(2)
def test_channels_last_is_refused_by_name(rank, world):
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(LayoutError, match=r"'0\.weight' isn't contiguous"):
        fully_shard(model, mesh=fsdp_mesh(world))


@on_ranks(2)
def test_a_replicating_mesh_needs_no_names(rank, world):
    """Axis 0 replicates and axis 1 shards, whatever they are called."""
    model = fully_shard(nn.Linear(WIDTH, 4), mesh=init_device_mesh("cpu", (world, 1)))
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.to_local().shape == (4, WIDTH)
    model(data(rank, 0)).sum().backward()
    expected = (data(0, 0).sum(0) + data(1, 0).sum(0)) / 2
    equal([full(model.weight.grad)], [expected.expand(4, -1)])


@on_ranks(2)
def test_columns_that_do_not_divide_evenly(rank, world):
    """Five columns: three on the first rank, two on the second; the gradient is split alike."""
    torch.manual_seed(0)
    model = integers_(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    single = copy.deepcopy(model)
    fully_shard(model, mesh=fsdp_mesh(world), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert model[0].weight.placements == (Shard(1),)
    assert model[0].weight.to_local().shape == (4, 3 - rank)
    equal([model[0].weight.to_local()], [single[0].weight.chunk(2, 1)[rank]])
    batches = [batch(r, width=5) for r in range(world)]
    loss_of(model(batches[rank][0]), batches[rank][1]).backward()
    expected = mean_grads(single, batches)
    equal(full_grads(model), expected)
    grad = model[0].weight.grad.to_local()
    assert grad.is_contiguous()
    equal([grad], [expected["0.weight"].chunk(2, 1)[rank]])


@on_ranks(2)
def test_dims_are_counted_from_the_end_for_every_rank_of_tensor(rank, world):
    def run(api):
        model = api.fully_shard(chain(), mesh=mesh, shard_placement_fn=place)
        trace = Trace()
        for name, p in model.named_parameters():
            trace.note(name, [type(placement).__name__ + str(placement.dim) for placement in p.placements])
            trace.note(f"shard of {name}", p.to_local().clone())
        mean_square(model, data(rank, 0)).backward()
        trace.note_grads(model)
        return trace

    def place(param):
        return Shard(-1) if param.shape[-1] % 2 == 0 or param.ndim == 1 else None

    mesh = fsdp_mesh(world)
    trace = dict(assert_parity(run).records)
    assert trace["first.weight"] == ["Shard1"]
    assert trace["first.bias"] == ["Shard0"]


@on_ranks(2)
def test_everything_is_contiguous_when_columns_are_sharded(rank, world):
    """Shards, gradients, and the full parameters that forward sees."""
    model, seen = nn.Sequential(nn.Linear(WIDTH, 4)), []
    model[0].register_forward_pre_hook(lambda m, args: seen.append((m.weight.shape, m.weight.is_contiguous())))
    fully_shard(model, mesh=fsdp_mesh(world), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    model(data(rank, 0)).sum().backward()
    assert seen == [((4, WIDTH), True)]
    assert model[0].weight.to_local().shape == (4, WIDTH // 2)
    assert model[0].weight.to_local().is_contiguous()
    assert model[0].weight.grad.to_local().is_contiguous()


@pytest.mark.parametrize("value", [0, -1, 3, 1.0, "yes"])
@on_ranks(2)
def test_both_refuse_these_for_reshard_after_forward(rank, world, value):
    for api in (THEIRS, OURS):
        model = nn.Linear(WIDTH, 4)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            api.fully_shard(model, mesh=fsdp_mesh(world), reshard_after_forward=value)
        assert type(model) is nn.Linear
    with pytest.raises(PolicyError):
        fully_shard(nn.Linear(WIDTH, 4), mesh=fsdp_mesh(world), reshard_after_forward=value)


@pytest.mark.parametrize(("value", "gathers", "warned"), [(1, 2, 1), (2, 4, 0), (True, 4, 0), (False, 2, 0)])
@on_ranks(2)
def test_reshard_after_forward_as_a_group_size(rank, world, value, gathers, warned):
    """1 means False, with a warning; the number of shard ranks means True. A bool isn't taken for 1."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (model[0], model):
            fully_shard(module, mesh=fsdp_mesh(world), reshard_after_forward=value)
    assert len({str(w.message) for w in caught}) == warned
    model(data(rank, 0))  # the layouts are compared in here
    model.reset_iter_state()
    with Traffic() as traffic:
        model(data(rank, 0)).sum().backward()
    assert [op for op, *_ in traffic.seen].count("all_gather") == gathers


@on_ranks(2)
def test_a_tensor_parallel_mesh_of_another_device(rank, world):
    mesh = DeviceMesh("meta", list(range(world)), mesh_dim_names=("tp",))
    model = nn.Linear(WIDTH, 4)
    local = torch.zeros(4, WIDTH, device="meta")
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    weight = model.weight
    with pytest.raises(MeshError, match=r"'weight'.*'meta'.*'cpu'"):
        fully_shard(model, mesh=fsdp_mesh(world))
    assert model.weight is weight and type(model) is nn.Linear


@on_ranks(2)
def test_the_default_mesh_under_a_default_device_of_meta(rank, world):
    """The mesh has values nevertheless, and the parameters stay on meta until they are materialized."""
    with torch.device("meta"):
        model = fully_shard(nn.Linear(3, 5))
    assert model.weight.is_meta and model.weight.to_local().shape == (3 - rank, 3)
    assert model.weight.device_mesh.mesh.tolist() == [0, 1]
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
        equal([model(torch.ones(1, 3))], [torch.full((1, 5), 5.0)])


# ---------------------------------------------------------------------------------------------- what a call owns


@on_ranks(2)
def test_inner_calls_own_what_is_below_them(rank, world):
    """One all-gather a call, each of exactly the elements that are left to it."""
    mesh, model = fsdp_mesh(world), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    for module in (model[1][0], model[1], model):
        fully_shard(module, mesh=mesh)
    with torch.no_grad():
        model(data(rank, 0, width=4))
    with Traffic() as traffic:
        for module in (model, model[1], model[1][0]):
            module.reshard()
            module.unshard()
    assert traffic.seen == [("all_gather", "float32", n) for n in (20, 28, 30)]


@on_ranks(2)
def test_modules_of_torchs_composable_replicate_are_left_alone(rank, world):
    from torch.distributed._composable.replicate import replicate

    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model, trace = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block()), nn.Linear(WIDTH, 3)), Trace()
        replicate(model[1])
        api.fully_shard(model, mesh=mesh)
        trace.note("kinds", kinds(model))
        for step in range(2):
            mean_square(model, data(rank, step)).backward()
            trace.note_grads(model)
        return trace

    found = assert_parity(run).records[0][1]
    assert [name for name, kind in found.items() if kind == "plain"] == [n for n in found if n.startswith("1.")]


class Tying(nn.Module):
    """One weight under three names, in this class's order: two modules, and the parameter of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.seen: list[bool] = []

    def forward(self, x):
        self.seen.append(self.a.weight is self.b.weight is self.c.weight and type(self.a.weight) is torch.Tensor)
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def tied(self) -> bool:
        return self.a.weight is self.b.weight is self.c.weight


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_tied_parameters_are_one_at_every_name(rank, world, reshard):
    """Sharded, in forward, between forward and backward, after backward, and gathered by hand."""
    torch.manual_seed(0)
    model = integers_(Tying())
    single = copy.deepcopy(model)
    fully_shard(model, mesh=fsdp_mesh(world), reshard_after_forward=reshard)
    assert model.tied() and isinstance(model.a.weight, DTensor)
    assert list(dict(model.named_parameters())) == ["a.weight", "a.bias", "b.bias", "c.bias"]
    batches = [batch(r, outputs=WIDTH) for r in range(world)]
    out = model(batches[rank][0])
    assert model.seen == [True]
    assert model.tied() and isinstance(model.b.weight, DTensor) == reshard
    loss_of(out, batches[rank][1]).backward()
    assert model.tied() and isinstance(model.c.weight, DTensor)
    equal(full_grads(model), mean_grads(single, batches))
    model.unshard()
    assert model.tied() and not isinstance(model.b.weight, DTensor)
    model.reshard()
    assert model.tied() and isinstance(model.b.weight, DTensor)


@on_ranks(2)
def test_a_module_under_two_names_in_one_call(rank, world):
    mesh = fsdp_mesh(world)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = self.a

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    def run(api):
        torch.manual_seed(0)
        model = api.fully_shard(Twice(), mesh=mesh)
        trace = train(model, rank, steps=2)
        trace.note("names", [list(dict(model.named_parameters())), list(model.state_dict())])
        return trace

    assert_parity(run)


@on_ranks(2)
def test_a_sharded_module_under_two_names(rank, world):
    mesh = fsdp_mesh(world)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = self.a
            self.c = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.c(self.b(torch.relu(self.a(x))))

    def run(api):
        torch.manual_seed(0)
        model = Twice()
        api.fully_shard(model.a, mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        trace = train(model, rank, steps=2)
        trace.note("names", [list(dict(model.named_parameters())), list(model.state_dict())])
        return trace

    assert_parity(run)


@on_ranks(2)
def test_ties_over_two_calls_are_found_when_the_original_is_gone(rank, world):
    """By then, the first call's parameter has another object in its place; the error names both."""
    mesh, model = fsdp_mesh(world), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=mesh)
    gc.collect()
    weight = model[1].weight
    for module in (model[1], model):
        with pytest.raises(ValueError, match=r"weight' is tied to 'weight' of another fully_shard call"):
            fully_shard(module, mesh=mesh)
    assert model[1].weight is weight and type(model[1]) is nn.Linear


@on_ranks(2)
def test_a_parameter_at_the_address_of_a_freed_one_is_not_taken_for_it(rank, world):
    mesh, ids, again = fsdp_mesh(world), set(), 0
    for _ in range(40):
        model = nn.Linear(WIDTH, 2, bias=False)
        again += id(model.weight) in ids
        ids.add(id(model.weight))
        fully_shard(model, mesh=mesh)
        gc.collect()
    assert again > 0, "no address was used twice, so nothing was tested"


@on_ranks(2, 4)
def test_the_last_rows_of_tied_and_padded_weights_train(rank, world):
    """Seven rows on two and on four ranks, the last of which have fewer than the others."""
    mesh, lr = fsdp_mesh(world), 0.5

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, WIDTH)
            self.head = nn.Linear(WIDTH, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    tokens = torch.arange(7)
    weight = integers_(Head(), seed=2).embed.weight.detach().clone()
    model, single = integers_(Head(), seed=2), integers_(Head(), seed=2)
    fully_shard(model, mesh=mesh)
    torch.optim.SGD(model.parameters(), lr=lr).zero_grad()
    for m in (model, single):
        optimizer = torch.optim.SGD(m.parameters(), lr=lr)
        (m(tokens) * (1 + tokens)).sum().backward()
        optimizer.step()
    after = full(model.embed.weight)
    equal([after], [single.embed.weight])
    assert ((after - weight).abs().sum(1) > 0).tolist() == [True] * 7
    assert model.embed.weight.to_local().shape[0] == [*chunk(torch.zeros(7), world, 0)][rank].shape[0]
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_ignored_parameters_may_be_anothers(rank, world):
    """Not sharded, reduced by the DDP around them, and moved by a later ``.to``."""
    torch.manual_seed(0)
    model = integers_(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    single, mine = copy.deepcopy(model), list(model[1].parameters())
    fully_shard(model, mesh=fsdp_mesh(world), ignored_params=set(mine))
    model[1] = nn.parallel.DistributedDataParallel(model[1])
    assert kinds(model) == {"0.weight": "sharded", "0.bias": "sharded"} | {
        f"1.module.{n}": "plain" for n in ("weight", "bias")
    }
    assert all(p is q for p, q in zip(model[1].parameters(), mine, strict=True))
    with Traffic() as traffic:
        loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
    assert [n for op, _, n in traffic.seen if op == "reduce_scatter"] == [WIDTH * WIDTH + WIDTH]
    expected = mean_grads(single, [batch(r) for r in range(world)])
    equal({n.replace("module.", ""): g for n, g in full_grads(model).items()}, expected)
    model.zero_grad()
    model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    equal([model(batch(rank)[0].double())], [single.double()(batch(rank)[0].double())])


@on_ranks(2)
def test_ignored_parameters_get_no_gradient_reduction(rank, world):
    model = integers_(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    single, kept = copy.deepcopy(model), model[1].weight
    fully_shard(model, mesh=fsdp_mesh(world), ignored_params=[kept])
    loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
    assert model[1].weight is kept
    everyone, own = mean_grads(single, [batch(r) for r in range(world)]), mean_grads(single, [batch(rank)])
    equal(full_grads(model), everyone | {"1.weight": own["1.weight"]})


@on_ranks(2)
def test_a_list_is_gathered_and_reduced_at_once(rank, world):
    mesh, model = fsdp_mesh(world), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    pair = [model[0], model[2]]
    fully_shard(pair, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert [isinstance(m, HSDPModule) for m in model] == [True, False, True]
    model(data(rank, 0, width=4)).sum().backward()
    with Traffic() as traffic:
        model(data(rank, 1, width=4)).sum().backward()
    in_order = sorted(n for op, _, n in traffic.seen if op == "reduce_scatter")
    assert in_order == [30, 48]
    assert sorted(n for op, _, n in traffic.seen if op == "all_gather") == [30, 48, 48]


@on_ranks(2)
def test_a_root_without_parameters_communicates_nothing(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fully_shard(model[0], mesh=fsdp_mesh(world))
    fully_shard(model, mesh=fsdp_mesh(world))
    with Traffic() as traffic:
        handle = model.unshard(async_op=True)
        handle.wait()
        handle.wait()
        assert model.unshard() is None
        model.reshard()
    assert traffic.seen == []
    model(data(rank, 0, width=4)).sum().backward()
    with Traffic() as traffic:
        model(data(rank, 0, width=4)).sum().backward()
    assert [op for op, *_ in traffic.seen] == ["all_gather", "all_gather", "reduce_scatter"]


@on_ranks(2)
def test_buffers_are_kept_whole(rank, world):
    """Those on the mesh's device are the very same objects, those on meta stay there."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False, device="meta"))
    before = dict(model.named_buffers())
    fully_shard(model, mesh=fsdp_mesh(world))
    assert {n for n, b in model.named_buffers() if b is before[n]} == set(before)
    assert {n for n, t in model.named_buffers() if t.is_meta} == {n for n in before if n.startswith("1.")}
    equal([model[0].running_mean], [torch.zeros(4)])


@on_ranks(2)
def test_meta_parameters_stay_on_meta_beside_others(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    weight = model[0].weight.detach().clone()
    fully_shard(model, mesh=fsdp_mesh(world))
    assert {n for n, p in model.named_parameters() if p.is_meta and p.to_local().is_meta} == {"1.weight", "1.bias"}
    equal([full(model[0].weight)], [weight])


# ------------------------------------------------------------------------------------------ the sharded parameter


@on_ranks(4)
def test_hsdp_replicates_over_dim_0_and_shards_over_dim_1(rank, world):
    mesh, single = hsdp_mesh(), chain()
    model = shard_blocks(OURS, chain(), mesh)
    original = dict(single.named_parameters())
    for name, p in model.named_parameters():
        assert p.placements == (Replicate(), Shard(0)), name
        assert p.device_mesh.mesh_dim_names == ("replicate", "shard"), name
        equal([p.to_local()], [chunk(original[name], 2, 0)[rank % 2]], name)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def tensor_parallel(mesh: DeviceMesh) -> Mlp:
    torch.manual_seed(0)
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (2, 1, 2)])
@on_ranks(4)
def test_tensor_parallel_parameters_live_on_the_joined_mesh(rank, world, shape):
    """Strided exactly where both shard rows; and ``full_tensor`` is the original."""
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    original, seen = dict(Mlp().named_parameters()), []
    model, reference = tensor_parallel(mesh["tp"]), tensor_parallel(mesh["tp"])
    given = list(model.parameters())
    fully_shard(model, mesh=mesh[names[:-1]], shard_placement_fn=seen.append)
    THEIRS.fully_shard(reference, mesh=mesh[names[:-1]])
    assert all(p is q for p, q in zip(seen, given, strict=True))
    assert [type(p) for p in seen] == [DTensor] * 4 + [nn.Parameter] * 2
    whole = (Replicate(),) * (len(shape) - 2)
    placements = {
        "up.weight": (*whole, _StridedShard(0, split_factor=2), Shard(0)),
        "up.bias": (*whole, _StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (*whole, Shard(0), Shard(1)),
        "down.bias": (*whole, Shard(0), Replicate()),
    }
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        if name in placements:
            assert p.placements == placements[name], name
            assert p.device_mesh.mesh_dim_names == names, name
        assert p.placements == theirs[name].placements, name
        assert p.device_mesh == theirs[name].device_mesh, name
        assert (p.shape, p.stride()) == (original[name].shape, original[name].stride()), name
        equal([p.to_local(), full(p)], [theirs[name].to_local(), original[name].detach()], name)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@on_ranks(4)
def test_tensor_parallel_training(rank, world, shape):
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def run(api):
        model = api.fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh[names[:-1]])
        return train(model, rank // 2, steps=2, make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1))

    assert_parity(run)


@on_ranks(2)
def test_ranks_without_rows_save_and_load(rank, world):
    """A weight of one row: the second rank has none of it, and takes part in everything."""
    mesh = fsdp_mesh(world)
    source = integers_(nn.Linear(WIDTH, 1), seed=1)
    wanted = source.weight.detach().clone()
    fully_shard(source, mesh=mesh)
    model = fully_shard(nn.Linear(WIDTH, 1), mesh=mesh)
    model.load_state_dict(source.state_dict())
    assert model.weight.to_local().shape == (1 - rank, WIDTH)
    equal(
        [full(model.weight), model(data(rank, 0))],
        [wanted, nn.functional.linear(data(rank, 0), wanted, full(model.bias))],
    )
    nn.init.constant_(model.weight, 3.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    equal([full(model.weight)], [torch.full((1, WIDTH), 3.0)])


@pytest.mark.parametrize("change", ["load", "assign", "empty", "double", "apply", "nothing"])
@on_ranks(2)
def test_padding_is_zero_after_every_way_to_replace_parameters(rank, world, change):
    """Five rows and a bias of five on two ranks: what is gathered and trained on is right, and the pad stays zero."""
    mesh, dtype = fsdp_mesh(world), torch.float64 if change == "double" else torch.float32
    model, source = (integers_(nn.Linear(3, 5), seed=seed) for seed in (1, 2))
    single = copy.deepcopy(source if change in ("load", "assign") else model).to(dtype)
    model, source = (fully_shard(m, mesh=mesh) for m in (model, source))
    model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    if change in ("load", "assign"):
        model.load_state_dict(source.state_dict(), assign=change == "assign")
    elif change == "empty":
        rows = {name: p.to_local().clone() for name, p in model.named_parameters()}
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.to_local().copy_(rows[name])
    elif change == "double":
        model.to(dtype)
    elif change == "apply":
        model._apply(lambda t: t * 2)
        with torch.no_grad():
            [p.mul_(2) for p in single.parameters()]
    xs = [torch.randint(-2, 3, (2, 3), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    equal([model(xs[rank])], [single(xs[rank])])
    model(xs[rank]).sum().backward()
    equal(full_grads(model), mean_grads(single, [(x, None) for x in xs], loss=lambda out, _: out.sum()))
    for m in (model, single):
        torch.optim.SGD(m.parameters(), lr=1.0).step()
    (master,) = model.hsdp_state.units[0].master
    rows = sum(p.to_local().numel() for p in model.parameters())
    assert (master.numel(), rows) == (12, 12 if rank == 0 else 8)
    assert master.count_nonzero() == sum(p.to_local().count_nonzero() for p in model.parameters())
    assert master.dtype == dtype


@on_ranks(4)
def test_shards_broadcast_over_the_replicas_are_gathered(rank, world):
    mesh = hsdp_mesh()
    torch.manual_seed(rank)
    model = shard_blocks(OURS, type(chain())(), mesh)
    for p in model.parameters():
        dist.broadcast(p.detach().to_local(), group=mesh.get_group("replicate"), group_src=0)
    found = [torch.empty(4, 3) for _ in range(world)]
    dist.all_gather(found, model(data(0, 0)).detach())
    equal(found[1:], [found[0]] * 3)


@on_ranks(2)
def test_edits_of_shards_between_steps_are_sent(rank, world):
    """Before the first forward, after a backward, and while forward's full parameters are still there."""
    model, single = integers_(chain()), integers_(chain())
    shard_blocks(OURS, model, fsdp_mesh(world))
    x, y = batch(rank)
    for value in (1.0, 2.0, -1.0):
        with torch.no_grad():
            for m in (model, single):
                p = m.layers[1].up.weight
                (p.to_local() if m is model else p).fill_(value)
        out = model(x)
        equal([out], [single(x)])
        loss_of(out, y).backward()
        equal(full_grads(model), mean_grads(single, [batch(r) for r in range(world)]))
        model.zero_grad()
    model(x)
    with torch.no_grad():
        dict(model.named_parameters())["last.bias"].to_local().fill_(9.0)
        single.last.bias.fill_(9.0)
    equal([model(x)], [single(x)])


@on_ranks(2)
def test_attributes_and_hooks_of_the_original_parameters_are_kept(rank, world):
    model, seen = integers_(nn.Linear(WIDTH, 4)), []
    single = copy.deepcopy(model)
    model.weight.no_decay = True
    model.weight.register_hook(lambda grad: 3 * grad)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    fully_shard(model, mesh=fsdp_mesh(world))
    assert model.weight.no_decay is True and not hasattr(model.bias, "no_decay")
    batches = [batch(r, outputs=4) for r in range(world)]
    loss_of(model(batches[rank][0]), batches[rank][1]).backward()
    expected = mean_grads(single, batches)
    equal(full_grads(model), expected | {"weight": 3 * expected["weight"]})
    equal(seen, [3 * expected["weight"].chunk(2)[rank]])


@on_ranks(2, 4)
def test_shards_are_those_of_torch(rank, world):
    """Names and their order, sizes, strides, placements, requires_grad, and every local element."""
    mesh = mesh_for(world)

    def run(api):
        model, trace = chain(), Trace()
        model.layers[1].down.weight.requires_grad_(False)
        shard_blocks(api, model, mesh)
        for name, p in model.named_parameters():
            trace.note(name, [p.shape, p.stride(), str(p.placements), p.requires_grad, p.dtype, p.is_leaf])
            trace.note(f"shard of {name}", p.to_local().clone())
        mean_square(model, data(rank, 0)).backward()
        trace.note_grads(model)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_a_placement_may_name_its_mesh(rank, world):
    """The unit's own, or another; see also test_facade_experts.py."""
    mesh, other = fsdp_mesh(world), init_device_mesh("cpu", (world,), mesh_dim_names=("other",))
    for placement, expected in ((Shard(1), Shard(1)), (None, Shard(0))):
        info, model = FSDPMeshInfo(mesh, shard_mesh_dim=0), nn.Linear(WIDTH, 4, bias=False)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p, i=info, s=placement: ShardPlacementResult(s, i))
        assert model.weight.placements == (expected,)
    model, info = nn.Linear(WIDTH, 4), FSDPMeshInfo(other, shard_mesh_dim=0)
    own = model.weight
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p is own else None)
    assert model.weight.device_mesh.mesh_dim_names == ("other",) and model.bias.device_mesh == mesh
    model(torch.zeros(1, WIDTH))
    assert len(model.hsdp_state.layout.units[0].buckets) == 2
