"""What once went wrong in the facade: graphs that only some ranks keep, modes, hooks that raise, copies."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hsdp_fn import PhaseError, expected_comm
from hsdp_fn.arguments import offload_policy_of
from hsdp_fn_torch import CPUOffloadPolicy, fully_shard
from tests.workers_facade import OURS, Boom, chain, data, full, mean_square, shard_blocks
from tests.workers_torch import close, equal, fsdp_mesh, hsdp_mesh, on_ranks


class Crossed(nn.Module):
    """Units of equal shapes that run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, upto="head"):
        x = self.a(torch.relu(self.b(x)))
        return x if upto == "a" else self.head(x)


def crossed(world: int, **options) -> tuple[Crossed, Crossed]:
    torch.manual_seed(0)
    model = Crossed()
    single = copy.deepcopy(model)
    mesh = fsdp_mesh(world)
    for unit in (model.a, model.b, model):
        fully_shard(unit, mesh=mesh, **options)
    return model, single


def assert_mean_grads(model, single, world, loss, at=0):
    """The gradients are those of the ranks' mean loss on one process."""
    for p in single.parameters():
        p.grad = None
    sum(loss(single, data(r, at, width=8)) / world for r in range(world)).backward()
    expected = dict(single.named_parameters())
    for name, p in model.named_parameters():
        close([full(p.grad)], [expected[name].grad], what=name)


def square(model, x):
    return model(x).square().sum()


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_a_graph_that_only_some_ranks_keep(rank, world, reshard):
    """Which collectives run, and in which order, doesn't depend on what Python still holds."""
    model, single = crossed(world, reshard_after_forward=reshard)
    kept = model(data(rank, 3, width=8))
    if rank:
        del kept
    for at in range(2):
        square(model, data(rank, at, width=8)).backward()
        assert_mean_grads(model, single, world, square, at)
        model.zero_grad()


@on_ranks(2)
def test_a_graph_of_a_part_that_only_some_ranks_keep(rank, world):
    model, single = crossed(world, reshard_after_forward=False)
    square(model, data(rank, 0, width=8)).backward()
    model.zero_grad()
    kept = model.b(data(rank, 1, width=8)), model.a(data(rank, 2, width=8))
    kept[1].sum().backward()
    if rank:
        del kept
    model.zero_grad()
    square(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, square)


def head_by_hand(model, x):
    return F.linear(model(x, upto="a"), model.head.weight, model.head.bias).square().sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_an_evaluation_between_forward_and_loss(rank, world, mode):
    model, single = crossed(world)
    hidden = model(data(rank, 0, width=8), upto="a")
    with mode():
        model(data(rank, 1, width=8))
    F.linear(hidden, model.head.weight, model.head.bias).square().sum().backward()
    assert_mean_grads(model, single, world, head_by_hand)


@on_ranks(2)
def test_parameters_gathered_without_grad_have_gradients(rank, world):
    model, single = crossed(world)
    with torch.no_grad():
        model.unshard()
    head_by_hand(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, head_by_hand)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_inference_mode_before_and_between_steps(rank, world, reshard):
    model, single = crossed(world, reshard_after_forward=reshard)
    for at in range(2):
        with torch.inference_mode():
            close([model(data(rank, at, width=8))], [single(data(rank, at, width=8))])
        square(model, data(rank, at, width=8)).backward()
        assert_mean_grads(model, single, world, square, at)
        model.zero_grad()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2)
def test_a_parameters_hook_that_raises_adds_nothing_twice(rank, world, kind):
    model, single = crossed(world)
    param = dict(model.named_parameters())["b.weight"]

    def boom(_):
        raise Boom(kind)

    handle = getattr(param, kind)(boom)
    with pytest.raises(Boom):
        square(model, data(rank, 0, width=8)).backward()
    handle.remove()
    if kind == "register_hook":
        assert {p.grad for p in model.parameters()} == {None}
    model.zero_grad()
    square(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, square)


@on_ranks(2)
def test_gradients_are_added_in_place(rank, world):
    model, single = crossed(world)
    square(model, data(rank, 0, width=8)).backward()
    held = {n: p.grad for n, p in model.named_parameters()}
    square(model, data(rank, 0, width=8)).backward()
    assert all(p.grad is held[n] for n, p in model.named_parameters())
    assert_mean_grads(model, single, world, lambda m, x: 2 * square(m, x))


@on_ranks(2)
def test_what_is_frozen_after_forward_has_no_gradient(rank, world):
    model, _ = crossed(world)
    loss = square(model, data(rank, 0, width=8))
    model.a.requires_grad_(False)
    loss.backward()
    assert model.a.weight.grad is None
    assert model.b.weight.grad is not None


@on_ranks(2)
def test_a_handle_that_is_waited_for_too_late_gathers_nothing(rank, world):
    model, _ = crossed(world)
    handle = model.a.unshard(async_op=True)
    square(model, data(rank, 0, width=8)).backward()
    handle.wait()
    assert model.hsdp_state.units[1].full is None
    assert hasattr(model.a.weight, "placements")


@on_ranks(2)
def test_two_graphs_of_one_unshard(rank, world):
    model, _ = crossed(world)
    x = data(rank, 0, width=8)
    model.a.unshard()
    losses = [F.linear(x, model.a.weight).sum(), F.linear(2 * x, model.a.weight).sum()]
    for loss in losses:
        loss.backward()
    mean = sum(3 * data(r, 0, width=8).sum(dim=0) for r in range(world)) / world
    close([full(model.a.weight.grad)], [mean.expand(8, 8)])


@on_ranks(2)
def test_trees_without_parameters(rank, world):
    root = fully_shard(nn.Sequential(nn.ReLU()), mesh=fsdp_mesh(world))
    equal([root(-torch.ones(2))], [torch.zeros(2)])
    layer = nn.Linear(3, 3)
    fully_shard(layer, mesh=fsdp_mesh(world), ignored_params=set(layer.parameters()))
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None


@on_ranks(2)
def test_a_module_that_is_removed(rank, world):
    model = shard_blocks(OURS, chain(), fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    del model.layers[1]
    model.first.requires_grad_(False)
    model.zero_grad()
    mean_square(model, data(rank, 0)).backward()
    assert model.first.weight.grad is None
    assert model.layers[0].up.weight.grad is not None


@on_ranks(2)
def test_sharded_parameters_and_state_dicts_can_be_copied_and_saved(rank, world):
    model = shard_blocks(OURS, chain(), init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    mean_square(model, data(rank, 0)).backward()
    found = model.state_dict()
    equal([full(t) for t in copy.deepcopy(found).values()], [full(t) for t in found.values()])
    equal([full(copy.deepcopy(p)) for p in model.parameters()], [full(p) for p in model.parameters()])
    assert all(
        t._local_tensor.data_ptr() == p._local_tensor.data_ptr()
        for t, p in zip(found.values(), model.parameters(), strict=True)
    )
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    equal([t.to_local() for t in loaded.values()], [t.to_local() for t in found.values()])


@on_ranks(2)
def test_checkpoints_are_saved_in_the_background(rank, world):
    import tempfile

    import torch.distributed as dist

    model = shard_blocks(OURS, chain(), fsdp_mesh(world))
    mean_square(model, data(rank, 0)).backward()
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where, src=0)
    before = [full(p) for p in model.parameters()]
    dcp.async_save(model.state_dict(), checkpoint_id=where[0]).result()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load(model.state_dict(), checkpoint_id=where[0])
    equal([full(p) for p in model.parameters()], before)


@on_ranks(2)
def test_a_module_twice_in_one_list_is_refused(rank, world):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(ValueError, match="twice"):
        fully_shard([a, b, a], mesh=fsdp_mesh(world))
    assert type(a) is nn.Linear


def test_torchs_own_policies_are_taken():
    import torch.distributed.fsdp as theirs

    assert offload_policy_of(theirs.CPUOffloadPolicy(pin_memory=False)) == CPUOffloadPolicy(pin_memory=False)
    assert type(offload_policy_of(theirs.OffloadPolicy())).__name__ == "OffloadPolicy"


@on_ranks(2)
def test_shared_frozen_units_stay_gathered_over_backwards(rank, world):
    """Accumulation over a frozen base gathers it once."""
    model, _ = crossed(world)
    model.a.requires_grad_(False)
    model.set_reshard_after_backward(False)
    gathers = []
    for at in range(3):
        square(model, data(rank, at, width=8)).backward()
        gathers.append(sum(c.op == "all_gather" for c in model.hsdp_state.ledger))
    assert gathers[1:] == [gathers[1], gathers[1]]
    assert gathers[1] < gathers[0]


@on_ranks(2)
def test_what_is_unfrozen_after_an_evaluation_with_grad_is_trained(rank, world):
    """Nobody differentiates the evaluation; a graph of before the change can't be differentiated any more."""
    model, single = crossed(world)
    for m in (model, single):
        m.a.requires_grad_(False)
    old = square(model, data(rank, 1, width=8))
    for m in (model, single):
        m.a.requires_grad_(True)
    square(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, square)
    with pytest.raises(PhaseError, match="has ended"):
        old.backward()


@on_ranks(2)
def test_parameters_replaced_before_a_backward_are_used_afterwards(rank, world):
    """The graph of before is told so; the next forward takes the new ones over, whoever asked first."""
    model, single = crossed(world)
    loss = square(model, data(rank, 0, width=8))
    for p in single.parameters():
        p.data.mul_(2.0)
    doubled = {name: p.detach() * 2.0 for name, p in model.state_dict().items()}
    model.load_state_dict(doubled, assign=True)
    with pytest.raises(PhaseError, match="replaced"):
        loss.backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the backward that raised is undone
        square(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, square)


@on_ranks(2)
def test_several_modules_gathered_by_hand_stay_so(rank, world):
    model, single = crossed(world)
    model.a.unshard()
    model.b.unshard()

    def by_hand(m, x):
        x = F.linear(torch.relu(F.linear(x, m.b.weight, m.b.bias)), m.a.weight, m.a.bias)
        return x.square().sum()

    by_hand(model, data(rank, 0, width=8)).backward()
    for part in ("a", "b"):
        for p in getattr(single, part).parameters():
            p.grad = None
    sum(by_hand(single, data(r, 0, width=8)) / world for r in range(world)).backward()
    for name, p in model.named_parameters():
        if name[0] in "ab":
            close([full(p.grad)], [single.get_parameter(name).grad], what=name)


@on_ranks(2)
def test_unshard_inside_of_backward(rank, world):
    model, single = crossed(world)

    def hook(grad):
        model.b.unshard()
        return grad

    out = model(data(rank, 0, width=8))
    out.register_hook(hook)
    out.square().sum().backward()
    assert_mean_grads(model, single, world, square)
    assert hasattr(model.b.weight, "placements")


@pytest.mark.parametrize("gather", ["forward", "unshard"])
@on_ranks(2)
def test_what_inference_mode_has_gathered_serves_training(rank, world, gather):
    model, single = crossed(world)
    with torch.inference_mode():
        model(data(rank, 1, width=8)) if gather == "forward" else model.unshard()
    F.linear(data(rank, 0, width=8), model.head.weight, model.head.bias).square().sum().backward()
    sum(
        F.linear(data(r, 0, width=8), single.head.weight, single.head.bias).square().sum() / world for r in range(world)
    ).backward()
    close([full(model.head.weight.grad)], [single.head.weight.grad])


@on_ranks(2)
def test_the_layout_follows_the_setters(rank, world):
    """So that the schedule can be predicted from it."""
    model, _ = crossed(world)
    for reshard in (True, False, True):
        model.set_reshard_after_forward(reshard)
        square(model, data(rank, 0, width=8)).backward()
        state = model.hsdp_state
        assert [u.reshard_after_forward for u in state.layout.units] == [reshard] * 3
        assert sorted(map(repr, state.ledger)) == sorted(map(repr, expected_comm(state.layout)))  # units run crossed


@on_ranks(2)
def test_parameters_on_meta_are_named_each_time(rank, world):
    with torch.device("meta"):
        model = Crossed()
    fully_shard(model, mesh=fsdp_mesh(world))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"meta device.*head\.weight"):
            model(data(rank, 0, width=8))


@on_ranks(4)
def test_freezing_while_partial_sums_are_held_is_refused(rank, world):
    """Nothing is lost: thawed again, the accumulation goes on."""
    torch.manual_seed(0)
    model = Crossed()
    single = copy.deepcopy(model)
    for unit in (model.a, model.b, model):
        fully_shard(unit, mesh=hsdp_mesh())
    model.set_requires_all_reduce(False)
    square(model, data(rank, 0, width=8)).backward()
    model.a.weight.requires_grad_(False)
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match="unit 'a' were frozen or unfrozen while sums"):
        model(data(rank, 1, width=8))
    model.a.weight.requires_grad_(True)
    square(model, data(rank, 0, width=8)).backward()
    assert_mean_grads(model, single, world, lambda m, x: 2 * square(m, x))


@on_ranks(2)
def test_a_module_gathered_by_hand_stays_so_while_others_run(rank, world):
    model, _ = crossed(world, reshard_after_forward=True)
    model.a.unshard()
    for _ in range(2):
        model.b(data(rank, 0, width=8))
        assert not hasattr(model.a.weight, "placements")
        assert hasattr(model.b.weight, "placements")
    model.a.reshard()
    assert hasattr(model.a.weight, "placements")
