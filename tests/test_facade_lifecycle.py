"""When full parameters are there: what stands in the modules, what is gathered again, and by how many collectives."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hsdp_fn_torch import HSDPModule, fully_shard
from tests.workers_facade import OURS, THEIRS, Trace, assert_parity, chain, data, full, mean_square, shard_blocks, train
from tests.workers_torch import (
    WIDTH,
    Block,
    Traffic,
    batch,
    equal,
    fsdp_mesh,
    integers_,
    loss_of,
    mean_grads,
    mesh_for,
    on_ranks,
)


def pair(api, mesh, child=None, root=None):
    """A block of its own and a layer of the root's."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 3))
    api.fully_shard(model[0], mesh=mesh, reshard_after_forward=child)
    return api.fully_shard(model, mesh=mesh, reshard_after_forward=root)


def weights(model):
    """What stands in the block and in the root's layer."""
    return model[0].up.weight, model[1].weight


def standing(model):
    return ["sharded" if isinstance(w, DTensor) else "full" for w in weights(model)]


def sent(traffic):
    """What was sent, in an order of its own."""
    return sorted(traffic.seen)


def full_grads(model):
    return {name: full(p.grad) for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------ what stands in the modules


SETTINGS = [
    (None, None, ["sharded", "full"]),
    (True, True, ["sharded", "sharded"]),
    (False, False, ["full", "full"]),
    (False, None, ["full", "full"]),
    (None, True, ["sharded", "sharded"]),
    (False, True, ["full", "sharded"]),
    (1, 2, ["full", "sharded"]),
]
"""``reshard_after_forward`` of the block and of the root, and what stands there after forward."""


@on_ranks(2)
def test_what_stands_in_modules_after_forward_and_backward(rank, world):
    mesh = fsdp_mesh(world)
    originals = [full(w) for w in weights(pair(OURS, mesh))]
    for child, root, expected in SETTINGS:
        for api in (THEIRS, OURS):
            model = pair(api, mesh, child, root)
            out = mean_square(model, data(rank, 0))
            assert standing(model) == expected, (api.name, child, root)
            equal([full(w) for w in weights(model)], originals)
            out.backward()
            assert standing(model) == ["sharded", "sharded"], (api.name, child, root)


@on_ranks(2)
def test_what_stands_in_modules_after_forward_without_grad(rank, world):
    mesh = fsdp_mesh(world)
    for child, root, expected in SETTINGS:
        for api in (THEIRS, OURS):
            model = pair(api, mesh, child, root)
            with torch.no_grad():
                model(data(rank, 0))
            assert standing(model) == expected, (api.name, child, root)


@on_ranks(2)
def test_parameters_are_listed_sharded_while_full_ones_stand_in_the_modules(rank, world):
    """Unlike torch's: optimizers may be made, and ``.grad`` be read, at any moment outside forward."""
    model, seen = pair(OURS, fsdp_mesh(world), False, False), []
    model[1].register_forward_pre_hook(lambda m, args: seen.extend(type(p) for p in model.parameters()))
    before = list(model.parameters())
    out = mean_square(model, data(rank, 0))
    assert seen == [torch.Tensor] * 6
    assert standing(model) == ["full", "full"]
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert all(isinstance(p, DTensor) for p in before)
    assert standing(model) == ["full", "full"]  # looking changes nothing
    out.backward()
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    model.unshard()
    assert standing(model) == ["sharded", "full"]
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_the_root_is_what_runs_first_not_what_was_sharded_last(rank, world):
    """A sharded child that runs first keeps its parameters, as roots do; its siblings belong to nobody's tree yet."""
    mesh = fsdp_mesh(world)
    for api in (THEIRS, OURS):
        model = pair(api, mesh)
        model[0](data(rank, 0)).sum().backward()
        out = model[0](data(rank, 0))
        assert standing(model) == ["full", "sharded"]
        out.sum().backward()
        with pytest.raises(RuntimeError, match=r"\b0\b"):
            model(data(rank, 0))


@on_ranks(2)
def test_a_child_alone_after_the_root(rank, world):
    """It gathers, is freed and reduces by itself, with exact gradients; the rest has none."""
    mesh = fsdp_mesh(world)
    found = []
    for api in (THEIRS, OURS):
        model = pair(api, mesh)
        mean_square(model, data(rank, 0)).backward()
        model.zero_grad()
        with Traffic() as traffic:
            out = model[0](data(rank, 1))
            assert standing(model) == ["sharded", "sharded"]
            out.square().mean().backward()
        assert standing(model) == ["sharded", "sharded"]
        found.append((sent(traffic), full_grads(model)))
    equal(found[1][1], found[0][1])
    assert found[1][0] == found[0][0]
    assert [op for op, *_ in found[0][0]] == ["all_gather", "all_gather", "reduce_scatter"]
    assert [n for n, g in found[1][1].items() if g is None] == ["1.weight", "1.bias"]


# -------------------------------------------------------------------------------------------------- unshard and reshard


@on_ranks(2)
def test_unshard_and_reshard_twice_is_once(rank, world):
    """On this module only, before any forward."""
    mesh = fsdp_mesh(world)
    for api in (THEIRS, OURS):
        model = pair(api, mesh)
        model[0].reshard()  # nothing to free: no error
        expected = {name: full(p) for name, p in model.named_parameters()}
        states = []
        with Traffic() as traffic:
            for call in ("unshard", "unshard", "reshard", "reshard", "unshard"):
                assert getattr(model[0], call)() is None
                states.append(standing(model))
        assert states == [["full", "sharded"]] * 2 + [["sharded", "sharded"]] * 2 + [["full", "sharded"]]
        assert [n for op, _, n in traffic.seen if op == "all_gather"] == [130, 130]
        equal([model[0].up.weight, model[0].down.bias], [expected["0.up.weight"], expected["0.down.bias"]])
        with Traffic() as traffic:
            mean_square(model, data(rank, 0)).backward()
        assert [op for op, *_ in traffic.seen].count("all_gather") == 2  # root; block again in backward


@on_ranks(2)
def test_unshard_before_any_forward_trains_the_same(rank, world):
    """Of the root, of inner modules, or of all; nobody has run then, and the first to run is the root all the same."""
    mesh = fsdp_mesh(world)

    def first(model):
        return model

    def inner(model):
        return model.layers[1]

    for which in (first, inner):

        def run(api, which=which):
            model = shard_blocks(api, chain(), mesh)
            return train(model, rank, steps=2, micro=(lambda m: which(m).unshard(),))

        assert_parity(run)
    model = shard_blocks(OURS, chain(), mesh)
    for layer in model.layers:
        layer.unshard()
    mean_square(model, data(rank, 0)).backward()
    assert [u.name for u in model.hsdp_state.units] == ["", "layers.0", "layers.1", "layers.2"]


@on_ranks(2)
def test_a_handle_may_be_waited_for_or_left(rank, world):
    mesh = fsdp_mesh(world)
    for api in (THEIRS, OURS):
        model = pair(api, mesh)
        mean_square(model, data(rank, 0)).backward()
        model.zero_grad()
        with Traffic() as traffic:
            handle = model[0].unshard(async_op=True)
            assert standing(model) == ["sharded", "sharded"]
            handle.wait()
            assert standing(model) == ["full", "sharded"]
            handle.wait()
            model[0].reshard()
            assert standing(model) == ["sharded", "sharded"]
        assert [op for op, *_ in traffic.seen] == ["all_gather"]
        with Traffic() as traffic:
            model[0].unshard(async_op=True)
            model[0].unshard(async_op=True)
            out = mean_square(model, data(rank, 1))
        assert [op for op, *_ in traffic.seen] == ["all_gather", "all_gather"]  # the block's, the root's
        out.backward()
        expected = pair(OURS, mesh)
        mean_square(expected, data(rank, 1)).backward()
        equal(full_grads(model), full_grads(expected))


@on_ranks(2)
def test_a_handle_that_was_resharded_gathers_nothing(rank, world):
    """torch's brings the parameters back, since its gather goes on."""
    model = pair(OURS, fsdp_mesh(world))
    handle = model[0].unshard(async_op=True)
    model[0].reshard()
    assert standing(model) == ["sharded", "sharded"]
    handle.wait()
    assert standing(model) == ["sharded", "sharded"]


@on_ranks(2)
def test_reshard_between_forward_and_backward_gathers_again(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = pair(api, mesh, False, False), Trace()
        mean_square(model, data(rank, 0)).backward()
        for modules in ((), (0,), (0, 1)):
            with Traffic() as traffic:
                out = mean_square(model, data(rank, 1))
                for at in modules:
                    (model[0] if at == 0 else model).reshard()
                trace.note("standing", standing(model))
                out.backward()
            trace.note("sent", sent(traffic))
            trace.note_grads(model)
            model.zero_grad()
        return trace

    records = assert_parity(run).records
    gathers = [[op for op, *_ in v].count("all_gather") for what, v in records if what == "sent"]
    assert gathers == [2, 3, 4]
    states = [v for what, v in records if what == "standing"]
    assert states == [["full", "full"], ["sharded", "full"], ["sharded", "sharded"]]


@on_ranks(2)
def test_a_list_is_unsharded_and_resharded_at_once(rank, world):
    mesh = fsdp_mesh(world)
    for api in (THEIRS, OURS):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        api.fully_shard([model[0], model[1]], mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        model[1].unshard()
        assert [isinstance(m.weight, DTensor) for m in model] == [False, False, True]
        model[0].reshard()
        assert [isinstance(m.weight, DTensor) for m in model] == [True, True, True]


@on_ranks(2)
def test_set_reshard_after_forward_overrides_the_roots_default(rank, world):
    mesh = fsdp_mesh(world)
    for api in (THEIRS, OURS):
        model, states = pair(api, mesh), []
        with pytest.raises(ValueError, match="reshard_after_forward"):
            model.set_reshard_after_forward(1)
        for value, recurse in ((True, False), (False, False), (False, True), (True, True)):
            model.set_reshard_after_forward(value, recurse=recurse)
            out = mean_square(model, data(rank, 0))
            states.append(standing(model))
            out.backward()
        assert states == [["sharded", "sharded"], ["sharded", "full"], ["full", "full"], ["sharded", "sharded"]]


@on_ranks(2)
def test_full_parameters_may_stay_over_a_backward(rank, world):
    """The next forward then sends nothing before it; after an optimizer step, the new values are gathered."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = pair(api, mesh), Trace()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean_square(model, data(rank, 0)).backward()
        model.set_reshard_after_backward(False)
        mean_square(model, data(rank, 1)).backward()
        with Traffic() as traffic:
            mean_square(model, data(rank, 2)).backward()
        trace.note("sent", [op for op, *_ in sent(traffic)])
        trace.note_grads(model) if api is OURS else trace.records.extend(_grads_of(optimizer, model))
        return trace

    def _grads_of(optimizer, model):
        names = [name for name, _ in model.named_parameters()]
        params = optimizer.param_groups[0]["params"]
        return [(f"gradient of {n}", full(p.grad)) for n, p in zip(names, params, strict=True)]

    assert assert_parity(run).records[0][1].count("all_gather") == 1  # the block, in backward


# ------------------------------------------------------------------------------------------------------- collectives


def _plain(model, x):
    mean_square(model, x).backward()


def _evaluate(model, x):
    with torch.no_grad():
        model(x)


def _two_forwards(model, x):
    (mean_square(model, x) + mean_square(model, 2 * x)).backward()


def _two_backwards(model, x):
    first, second = mean_square(model, x), mean_square(model, 2 * x)
    first.backward()
    second.backward()


def _unsynced(model, x):
    model.set_requires_gradient_sync(False)
    mean_square(model, x).backward()
    model.set_requires_gradient_sync(True)
    mean_square(model, x).backward()


def _child(model, x):
    mean_square(model.layers[1], x).backward()


def _frozen(model, x):
    model.layers[1].requires_grad_(False)
    mean_square(model, x).backward()


def _by_hand(model, x):
    model.layers[2].unshard()
    mean_square(model, x).backward()


def _prefetching(model, x):
    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    mean_square(model, x).backward()


ITERATIONS = (_plain, _evaluate, _two_backwards, _unsynced, _child, _frozen, _by_hand, _prefetching)


def _sent_in(iteration, api, mesh, rank, reshard):
    model, trace = shard_blocks(api, chain(), mesh, reshard_after_forward=reshard), Trace()
    mean_square(model, data(rank, 0)).backward()  # this library compares layouts in the first forward
    trace.note_grads(model)
    with Traffic() as traffic:
        iteration(model, data(rank, 1))
    trace.note(f"sent in {iteration.__name__}", sent(traffic))
    return trace


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2, 4)
def test_collectives_are_exactly_those_of_torch(rank, world, reshard):
    """Kind, dtype and size of each, whatever the order; 4 ranks are 2 x 2."""
    mesh = mesh_for(world)
    for iteration in ITERATIONS:
        trace = assert_parity(lambda api, iteration=iteration: _sent_in(iteration, api, mesh, rank, reshard))
        assert trace.records[-1][1], iteration


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_two_forwards_and_one_backward_gather_less_than_torch(rank, world, reshard):
    """Backward keeps a block until both of its uses are done; torch gathers it for each. Reductions are as many."""
    mesh = fsdp_mesh(world)
    ours, theirs = (_sent_in(_two_forwards, api, mesh, rank, reshard).records[-1][1] for api in (OURS, THEIRS))
    for collective in ours:
        theirs.remove(collective)
    assert theirs == [("all_gather", "float32", 130)] * 3


@on_ranks(2)
def test_one_gather_and_one_reduction_a_group(rank, world):
    """By the names of c10d, as profilers see them; a block is gathered once more in backward, the root isn't."""
    model = shard_blocks(OURS, chain(), fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    names: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace != "aten":
                names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        mean_square(model, data(rank, 1)).backward()
    assert sorted(names) == ["c10d::_allgather_base_"] * 7 + ["c10d::_reduce_scatter_base_"] * 4


@pytest.mark.parametrize("kind", ["one rank", "replicas"])
@on_ranks(2)
def test_a_shard_group_of_one_rank_communicates_like_ddp(rank, world, kind):
    """No gathers and no scatters: nothing at all on a mesh of one rank, one all-reduce a unit between replicas."""
    if kind == "one rank":
        groups = [dist.new_group([r]) for r in range(world)]
        mesh = DeviceMesh.from_group(groups[rank], "cpu")
    else:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model, single = pair(OURS, mesh), pair_unsharded()
    integers_(single)
    with torch.no_grad():
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            p.to_local().copy_(q)
    reference = copy.deepcopy(single)
    if kind == "replicas":
        reference = nn.parallel.DistributedDataParallel(reference)
    model(batch(rank)[0]).sum().backward()
    model.zero_grad()
    for step in range(2):
        x, y = batch(rank, step)
        with Traffic() as traffic:
            loss_of(model(x), y).backward()
        loss_of(reference(x), y).backward()
        equal([full(p.grad) for p in model.parameters()], [p.grad for p in reference.parameters()])
        assert [op for op, *_ in traffic.seen] == (["all_reduce"] * 2 if kind == "replicas" else [])
        model.zero_grad()
        reference.zero_grad()


def pair_unsharded():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(WIDTH, 3))


@on_ranks(2)
def test_an_embedding_that_is_not_gathered_in_backward(rank, world):
    mesh = fsdp_mesh(world)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, WIDTH)
            self.block = Block()

        def forward(self, x):
            return self.block(self.embed((x * 3).long().remainder(7)))

    def run(api, skip):
        torch.manual_seed(0)
        model, trace = Tokens(), Trace()
        for module in (model.embed, model.block, model):
            api.fully_shard(module, mesh=mesh)
        model.embed.set_unshard_in_backward(not skip)
        for step in range(2):
            model.zero_grad()
            with Traffic() as traffic:
                mean_square(model, data(rank, step)).backward()
            trace.note_grads(model)
        trace.note("sent", sent(traffic))
        return trace

    skipped, gathered = (assert_parity(lambda api, skip=skip: run(api, skip)).records for skip in (True, False))
    counts = [[op for op, *_ in records[-1][1]].count("all_gather") for records in (skipped, gathered)]
    assert counts == [3, 4]
    equal([g for _, g in skipped[:-1]], [g for _, g in gathered[:-1]])


@pytest.mark.parametrize("reshard", [(), (0,), (0, 1)], ids=["kept", "block resharded", "all resharded"])
@on_ranks(2)
def test_several_forwards_before_their_backwards(rank, world, reshard):
    """What autograd has saved of the first forward isn't taken for edited when the storage is filled again."""
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = pair(api, mesh, False, False), Trace()
        losses = []
        for step in range(3):
            losses.append(mean_square(model, data(rank, step)))
            for at in reshard:
                (model[0] if at == 0 else model).reshard()
        losses[1].backward(retain_graph=False)
        trace.note_grads(model)
        (losses[0] + losses[2]).backward()
        trace.note_grads(model)
        return trace

    assert_parity(run)


# ------------------------------------------------------------------------------------------------------------- memory


@on_ranks(2)
def test_at_most_two_units_are_whole_at_a_time(rank, world):
    """One that runs and one that is gathered ahead, in forward and in backward; three where two are gathered ahead."""
    depth, whole = 6, []
    model = nn.Sequential(*(Block() for _ in range(depth)))
    for module in (*model, model):
        fully_shard(module, mesh=fsdp_mesh(world))

    def look(*_):
        whole.append(sum(u.full is not None for u in model.hsdp_state.units))

    for block in model:
        block.down.register_forward_hook(look)
        block.down.register_full_backward_hook(look)
    for step in range(3):
        whole.clear()
        mean_square(model, data(rank, step)).backward()
        forward, backward = whole[:depth], whole[depth:]
        ahead = [1] * depth if step == 0 else [2] * (depth - 1) + [1]  # what follows what is learned in the first
        assert (forward, backward) == (ahead, [2] * (depth - 1) + [1]), (step, forward, backward)
    assert all(u.full is None for u in model.hsdp_state.units)
    assert isinstance(model, HSDPModule)


@on_ranks(2)
def test_bytes_of_gathered_units_are_freed_as_they_have_run(rank, world):
    """Full parameters die with their unit's forward: seen through weak references to their storages."""
    import weakref

    depth, model, storages = 5, nn.Sequential(*(Block() for _ in range(5))), []
    for module in (*model, model):
        fully_shard(module, mesh=fsdp_mesh(world))
    alive = []

    def look(module, args):
        storages.append(weakref.ref(module.up.weight.untyped_storage()))
        alive.append([ref() is not None for ref in storages])

    for block in model:
        block.register_forward_pre_hook(look)
    model(data(rank, 0))
    assert [len(a) for a in alive] == list(range(1, depth + 1))
    assert all(sum(a) <= 2 for a in alive), alive
    assert not any(ref() is not None for ref in storages[:-1])


@on_ranks(2)
def test_exact_gradients_in_every_setting(rank, world):
    """Against one process, with parameters freed, kept, and freed by hand."""
    single = integers_(pair_unsharded())
    expected = mean_grads(single, [batch(r) for r in range(world)])
    for child, root in ((True, True), (False, False), (None, None)):
        model = integers_(pair_unsharded())
        fully_shard(model[0], mesh=fsdp_mesh(world), reshard_after_forward=child)
        fully_shard(model, mesh=fsdp_mesh(world), reshard_after_forward=root)
        out = model(batch(rank)[0])
        model[0].reshard()
        loss_of(out, batch(rank)[1]).backward()
        equal(full_grads(model), expected)


@pytest.mark.parametrize("when", ["before backward", "after a forward without grad", "after unshard"])
@on_ranks(2)
def test_edits_of_gathered_parameters_are_told(rank, world, when):
    """They would be lost; torch says nothing."""
    model = shard_blocks(OURS, chain(), fsdp_mesh(world))
    before = [full(p) for p in model.parameters()]
    with torch.no_grad() if when != "before backward" else contextlib.nullcontext():
        if when == "after unshard":
            model.unshard()
            loss = None
        else:
            loss = mean_square(model, data(rank, 0))
    with torch.no_grad():
        model.last.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"unit '\(root\)' were edited in place"):
        loss.backward() if when == "before backward" else model(data(rank, 1))
    model.reset_iter_state()
    equal([full(p) for p in model.parameters()], before)
    mean_square(model, data(rank, 1)).backward()
