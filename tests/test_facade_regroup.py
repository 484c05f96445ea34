"""``reshard_after_forward`` as a number: parameters kept over groups of so many ranks between forward and backward."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from hsdp_fn import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ParamPhase,
    PhaseError,
    PolicyError,
    Sync,
    describe,
    expected_comm,
    full_params,
    memory_bytes,
    plan_layout,
    shard,
    unshard,
)
from hsdp_fn.layout import ParamSpec
from hsdp_fn.mesh import MeshSpec
from hsdp_fn_torch import (
    evaluate,
    fully_shard,
    functional_call,
    get_model_state_dict,
    set_model_state_dict,
    shard_module,
    value_and_grad,
)
from tests.live_bytes import LiveBytes
from tests.workers_facade import OURS, THEIRS, Trace, assert_parity, chain, data, full, mean_square, shard_blocks, train
from tests.workers_meshes import full_grads, groups, line, mesh_of, on_mesh, parameters_of, shard_all, spread
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Chain,
    Traffic,
    batch,
    close,
    equal,
    integers_,
    local_rows,
    loss_of,
    mean_grads,
    on_ranks,
    step_grads,
    step_of,
)

ROWS = 5 * WIDTH + 5 + 3 * 9 + 3
"""Elements that one of two ranks keeps of a `Block` of 9 and 6 rows."""


def small(world):
    return mesh_of(shard=world)


def even(depth=2):
    """Sizes that 2 and 4 divide."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))


def places(model):
    """Over how many ranks each weight stands in its module; 1 for a whole one."""
    weights = [m._parameters["weight"] for m in model.modules() if "weight" in m._parameters]
    return [w.device_mesh.size() if isinstance(w, DTensor) else 1 for w in weights]


# ------------------------------------------------------------------------------------------------- against torch


@pytest.mark.parametrize("root", [None, 2])
@on_ranks(4)
def test_two_of_four_trains_like_torch(rank, world, root):
    """Uneven rows (9, 6 and 3 over 4), several units; the root kept whole, or regrouped too."""
    mesh = small(world)

    def run(api):
        model = shard_blocks(api, chain(depth=2), mesh, root=False, reshard_after_forward=2)
        return train(api.fully_shard(model, mesh=mesh, reshard_after_forward=root), rank, steps=3)

    assert_parity(run)


@on_ranks(4)
def test_mixed_precision(rank, world):
    def run(api):
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard_blocks(api, chain(depth=2), small(world), mp_policy=policy, reshard_after_forward=2)
        return train(model, rank, steps=3)

    assert_parity(run)


@on_ranks(4)
def test_two_forwards_then_two_backwards(rank, world):
    def run(api):
        model, trace = shard_blocks(api, chain(depth=2), small(world), reshard_after_forward=2), Trace()
        for step in range(2):
            losses = [mean_square(model, data(rank, 10 * step + i)) for i in range(2)]
            for loss in losses:
                loss.backward()
                trace.note("loss", loss.detach())
                trace.note_grads(model)
        return trace

    assert_parity(run)


@pytest.mark.parametrize("order", ["inside", "around"])
@on_ranks(4)
def test_activation_checkpointing(rank, world, order):
    class Checkpointing(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.last(x)

    def run(api):
        torch.manual_seed(0)
        model = Checkpointing(depth=2) if order == "around" else Chain(depth=2)
        for at, layer in enumerate(model.layers if order == "inside" else ()):
            model.layers[at] = checkpoint_wrapper(layer)
        return train(shard_blocks(api, model, small(world), reshard_after_forward=2), rank, steps=2)

    assert_parity(run)


@on_ranks(4)
def test_forward_without_grad_then_training(rank, world):
    def evaluate_first(model, trace, step):
        with torch.no_grad():
            trace.note("evaluation", mean_square(model, data(rank, 500 + step)))

    def run(api):
        model = shard_blocks(api, chain(depth=2), small(world), reshard_after_forward=2)
        trace = Trace()
        evaluate_first(model, trace, 0)
        for step in range(2):  # no update between: torch would go on with pieces of before it
            mean_square(model, data(rank, step)).backward()
            trace.note_grads(model)
            evaluate_first(model, trace, step)
        return trace

    assert_parity(run)


@on_ranks(4)
def test_accumulation_without_communication(rank, world):
    later = (lambda m: m.set_requires_gradient_sync(False), lambda m: m.set_requires_gradient_sync(True))

    def run(api):
        return train(
            shard_blocks(api, chain(depth=2), small(world), reshard_after_forward=2), rank, micro=later, steps=2
        )

    assert_parity(run)


@on_ranks(4)
def test_all_ranks_mean_true_and_replicas_count_not(rank, world):
    """2 x 2: two of two shard ranks are all of them, so nothing is regrouped. 1 x 4: two of four are."""

    def run(api, mesh):
        model = shard_blocks(api, chain(depth=2), mesh, reshard_after_forward=2)
        return train(model, rank, steps=2)

    assert_parity(lambda api: run(api, mesh_of(replicate=2, shard=2)))
    assert_parity(lambda api: run(api, mesh_of(replicate=1, shard=4)))
    for mesh, over in ((mesh_of(replicate=2, shard=2), 4), (mesh_of(replicate=1, shard=4), 2), (small(world), 2)):
        model = shard_blocks(OURS, chain(), mesh, reshard_after_forward=2)
        model(data(rank, 0))
        assert places(model) == [over] * 8
    model = shard_blocks(OURS, chain(), small(world), reshard_after_forward=4)
    model(data(rank, 0))
    assert places(model) == [4] * 8


@on_ranks(4)
def test_collectives_and_what_stands_there_are_torchs_where_rows_divide(rank, world):
    """Forward gathers over 4 ranks, backward over 2; the reduction is over 4."""

    def run(api):
        model, trace = even(), Trace()
        for child in model:
            api.fully_shard(child, mesh=small(world), reshard_after_forward=2)
        api.fully_shard(model, mesh=small(world))
        model(data(rank, 0, width=8)).sum().backward()
        with Traffic() as forward:
            loss = mean_square(model, data(rank, 1, width=8))
        trace.note("forward", forward.seen)
        for m in model:
            for name, p in m._parameters.items():
                trace.note(f"{name} stands", [p.shape, p.to_local().shape, p.requires_grad, p.placements[-1]])
                trace.note(f"rows of {name}", p.to_local().detach().clone())
        with Traffic() as backward:
            loss.backward()
        trace.note("backward", backward.seen)
        trace.note_grads(model)
        return trace

    records = dict(assert_parity(run).records)
    assert records["forward"] == [("all_gather", "float32", 72)] * 2
    assert sorted(records["backward"]) == [("all_gather", "float32", 72)] * 2 + [("reduce_scatter", "float32", 72)] * 2


# -------------------------------------------------------------------------------------------- between the two passes


@on_ranks(4)
def test_what_stands_in_the_modules_after_forward(rank, world):
    """DTensors over pairs of neighbours, of uneven rows, whole ones equal to the original; lists and state dicts have
    the shards over all ranks."""
    single, model = chain(), shard_blocks(OURS, chain(), small(world), reshard_after_forward=2)
    before = dict(model.named_parameters())
    loss = mean_square(model, data(rank, 0))
    original = dict(single.named_parameters())
    pair = [0, 1] if rank < 2 else [2, 3]
    for prefix, m in model.named_modules():
        for local, p in m._parameters.items():
            name = f"{prefix}.{local}"
            assert isinstance(p, DTensor) and p is not before[name], name
            assert (p.device_mesh.mesh.tolist(), p.placements) == (pair, (Shard(0),)), name
            assert (p.shape, p.stride(), p.requires_grad) == (original[name].shape, original[name].stride(), True), name
            equal([p.to_local(), full(p)], [original[name].chunk(2)[rank % 2], original[name]], name)
    assert all(p is before[n] and p.device_mesh.size() == 4 for n, p in model.named_parameters())
    state = model.state_dict()
    assert all(state[n].data_ptr() == p.data_ptr() and state[n].placements == (Shard(0),) for n, p in before.items())
    assert places(model) == [2] * 8, "looking changes nothing"
    loss.backward()
    assert places(model) == [4] * 8
    assert all(
        m._parameters[n] is before[f"{prefix}.{n}"] for prefix, m in model.named_modules() for n in m._parameters
    )


@on_ranks(4)
def test_bytes_between_forward_and_backward(rank, world):
    """Of three units each rank keeps half; nothing is whole, and backward leaves nothing."""
    depth, model = 3, nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for m in model:
        fully_shard(m, mesh=small(world), reshard_after_forward=2)
    fully_shard(model, mesh=small(world))
    x, numel = torch.ones(1, 64), 64 * 64 + 64
    model(x).sum().backward()
    model.zero_grad()
    with LiveBytes() as live:
        loss = model(x).sum()
        found = memory_bytes(model.hsdp_state)
        assert (found["regrouped"], found["full"], found["in_flight"]) == (depth * numel * 2, 0, 0)
        assert [u.params_phase for u in model.hsdp_state.units] == [ParamPhase.REGROUPED] * depth
        assert "regrouped" in model.describe()
        assert depth * numel * 2 <= live.now <= depth * numel * 2 + 4096
        loss.backward()
        assert memory_bytes(model.hsdp_state)["regrouped"] == 0
    assert [u.params_phase for u in model.hsdp_state.units] == [ParamPhase.SHARDED] * depth


@on_ranks(4)
def test_bytes_of_collectives_of_uneven_rows(rank, world):
    """9 and 6 rows: 12 and 8 with padding over 4 ranks, 10 and 6 over 2."""
    model = shard_blocks(OURS, chain(depth=1), small(world), root=False, reshard_after_forward=2).layers[0]
    model(data(rank, 0)).sum().backward()
    with Traffic() as traffic:
        loss = model(data(rank, 1)).sum()
        over4 = 12 * WIDTH + 12 + 8 * 9 + 8
        assert traffic.seen == [("all_gather", "float32", over4)]
        loss.backward()
    assert traffic.seen[1:] == [("all_gather", "float32", 2 * ROWS), ("reduce_scatter", "float32", over4)]


@pytest.mark.parametrize("even_columns", [True, False])
@on_ranks(4)
def test_columns(rank, world, even_columns):
    """``Shard(1)``, also of a number of columns that isn't a multiple of the ranks (torch refuses that)."""
    width = 8 if even_columns else 7

    def build():
        torch.manual_seed(0)
        return integers_(nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3)))

    def place(p):
        return Shard(p.ndim - 1)

    model, single = build(), build()
    for m in (*model, model):
        fully_shard(m, mesh=small(world), reshard_after_forward=2, shard_placement_fn=place)
    xs = [batch(r, width=width) for r in range(world)]
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model(xs[rank][0]), xs[rank][1])
        for m, s in zip(model, single, strict=True):
            assert m.weight.placements == (Shard(1),) and m.weight.device_mesh.size() == 2
            equal([m.weight.to_local(), full(m.weight)], [s.weight.chunk(2, 1)[rank % 2], s.weight])
        loss.backward()
        equal(full_grads(model), mean_grads(single, xs))


@on_ranks(4)
def test_replicated_parameters_of_a_regrouped_unit(rank, world):
    """They are whole already: nothing is gathered for them, and they stand as they are."""
    model, single = integers_(even(1)), integers_(even(1))
    fully_shard(model[0], mesh=small(world), reshard_after_forward=2, replicate_params=[model[0].bias])
    fully_shard(model, mesh=small(world))
    xs = [batch(r, width=8, outputs=8) for r in range(world)]
    for _ in range(2):
        model.zero_grad()
        with Traffic() as traffic:
            loss = loss_of(model(xs[rank][0]), xs[rank][1])
            equal([full(model[0].weight), full(model[0].bias)], [single[0].weight, single[0].bias])
            loss.backward()
    assert next(n for op, _, n in traffic.seen if op == "all_gather") == 64
    equal(full_grads(model), mean_grads(single, xs))


@on_ranks(4)
def test_an_update_between_forwards_is_seen(rank, world):
    """A forward leaves pieces of the old values; after the update they are worth nothing."""
    model, single = integers_(chain()), integers_(chain())
    shard_blocks(OURS, model, small(world), reshard_after_forward=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, single)]
    everyone = [batch(r) for r in range(world)]
    for step in range(3):
        for m in (model, single):
            m.zero_grad()
        loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
        (sum(loss_of(single(x), y) for x, y in everyone) / world).backward()
        equal(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, f"step {step}")
        out = model(batch(rank)[0])  # leaves pieces, while somebody may differentiate it
        for optimizer in optimizers:
            for g in optimizer.param_groups:
                for p in g["params"]:
                    p.grad.sign_()
            optimizer.step()
        assert places(model) == [2] * 8 and out.requires_grad
        with torch.no_grad():
            equal([model(batch(rank)[0])], [single(batch(rank)[0])], f"after step {step}")
            equal([full(m.weight) for m in model.layers[0].children()], [m.weight for m in single.layers[0].children()])


@on_ranks(4)
def test_a_step_between_forward_and_backward_is_told(rank, world):
    model = shard_blocks(OURS, chain(), small(world), reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mean_square(model, data(rank, 0)).backward()
    loss = mean_square(model, data(rank, 1))
    optimizer.step()
    with pytest.raises(PhaseError, match="changed since the forward"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------------- by hand


@on_ranks(4)
def test_setters_override_the_number(rank, world):
    single = integers_(chain())
    model = shard_blocks(OURS, integers_(chain()), small(world), reshard_after_forward=2)
    expected = mean_grads(single, [batch(r) for r in range(world)])
    for value, over in ((None, 2), (True, 4), (False, 1)):
        if value is not None:
            model.set_reshard_after_forward(value)
        model.zero_grad()
        loss = loss_of(model(batch(rank)[0]), batch(rank)[1])
        assert places(model) == [over] * 8, value
        loss.backward()
        equal(full_grads(model), expected, str(value))


@pytest.mark.parametrize("value", [True, False])
@on_ranks(4)
def test_setters_between_forward_and_backward(rank, world, value):
    """Pieces that are there already are used, whatever is wanted from now on."""
    model, single = integers_(chain()), integers_(chain())
    shard_blocks(OURS, model, small(world), reshard_after_forward=2)
    loss = loss_of(model(batch(rank)[0]), batch(rank)[1])
    model.set_reshard_after_forward(value)
    loss.backward()
    equal(full_grads(model), mean_grads(single, [batch(r) for r in range(world)]))
    model(batch(rank)[0])
    assert places(model) == [4 if value else 1] * 8


@on_ranks(4)
def test_reset_drops_the_pieces(rank, world):
    model, single = integers_(chain()), integers_(chain())
    shard_blocks(OURS, model, small(world), reshard_after_forward=2)
    out = model(batch(rank)[0])
    model.reset_iter_state()
    assert places(model) == [4] * 8 and memory_bytes(model.hsdp_state)["regrouped"] == 0
    with pytest.raises(PhaseError):
        out.sum().backward()
    loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
    equal(full_grads(model), mean_grads(single, [batch(r) for r in range(world)]))


@on_ranks(4)
def test_unshard_and_reshard_by_hand(rank, world):
    """Unsharding gathers the pieces over their pair; resharding goes back to all ranks, as torch's does."""
    for api in (THEIRS, OURS):
        model = even()
        for child in model:
            api.fully_shard(child, mesh=small(world), reshard_after_forward=2)
        api.fully_shard(model, mesh=small(world))
        model(data(rank, 0, width=8)).sum().backward()
        with torch.no_grad():
            model(data(rank, 0, width=8))
        found = []
        with Traffic() as traffic:
            for call in ("unshard", "reshard", "unshard", "reshard"):
                getattr(model[0], call)()
                found.append(type(model[0].weight).__name__ if call == "unshard" else model[0].weight.placements)
        assert [n for _, _, n in traffic.seen] == [72, 72], api.name
        assert found[1] == found[3] == (Shard(0),), (api.name, found)
        assert model[0].weight.device_mesh.size() == 4
        equal([full(model[0].weight)], [even()[0].weight])


@on_ranks(4)
def test_unshard_by_hand_before_backward(rank, world):
    model, single = integers_(chain()), integers_(chain())
    shard_blocks(OURS, model, small(world), reshard_after_forward=2)
    loss = loss_of(model(batch(rank)[0]), batch(rank)[1])
    model.layers[1].unshard()
    model.layers[2].reshard()
    assert places(model) == [2, 2, 2, 1, 1, 4, 4, 2]
    loss.backward()
    equal(full_grads(model), mean_grads(single, [batch(r) for r in range(world)]))


@pytest.mark.parametrize("use", ["local", "whole", "mixed"])
@on_ranks(4)
def test_pieces_in_a_loss_outside_forward_are_told(rank, world, use):
    """Their gradient would be lost; torch loses it. Looking at values is fine."""
    model = shard_blocks(OURS, chain(), small(world), reshard_after_forward=2)
    loss = mean_square(model, data(rank, 0))
    weight = model.layers[0].up.weight
    with torch.no_grad():
        assert weight.full_tensor().norm() > 0
    term = weight.to_local().sum() if use == "local" else weight.full_tensor().sum()
    with pytest.raises(PhaseError, match=r"layers\.0\.up\.weight.*outside the forward"):
        (loss + term if use == "mixed" else term).backward()
    model.reset_iter_state()
    mean_square(model, data(rank, 1)).backward()
    equal([full(weight)], [chain().layers[0].up.weight])


@pytest.mark.parametrize("looked", [False, True])
@on_ranks(4)
def test_edits_of_pieces_are_told(rank, world, looked):
    """They would be lost; also after somebody has listed the parameters meanwhile."""
    model = shard_blocks(OURS, chain(), small(world), reshard_after_forward=2)
    out = model(data(rank, 0))
    if looked:
        assert len(list(model.parameters())) == 16
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"unit 'layers\.0' were edited in place"):
            model(data(rank, 1))
    assert out.requires_grad
    equal([full(model.layers[0].up.weight)], [chain().layers[0].up.weight])


@on_ranks(4)
def test_state_dicts_while_regrouped(rank, world):
    """Shards over all ranks, whole tensors; and loading between forward and backward outdates the pieces."""
    source = integers_(chain(), seed=3)
    model, values = shard_blocks(OURS, integers_(chain()), small(world), reshard_after_forward=2), source.state_dict()
    out = model(data(rank, 0))
    assert places(model) == [2] * 8 and out.requires_grad
    for name, value in get_model_state_dict(model).items():
        assert value.device_mesh.size() == 4 and value.placements == (Shard(0),)
        equal([full(value)], [integers_(chain()).state_dict()[name]])
    set_model_state_dict(model, values)
    equal([model(data(rank, 0))], [source(data(rank, 0))])
    model.load_state_dict(values)
    loss_of(model(batch(rank)[0]), batch(rank)[1]).backward()
    equal(full_grads(model), mean_grads(source, [batch(r) for r in range(world)]))


# --------------------------------------------------------------------------------------------------------- refusals


@on_ranks(4)
def test_numbers_that_are_refused_or_mean_something_else(rank, world):
    model = integers_(even(1))
    before = parameters_of(model)
    for value in (3, 0, -1, 8):
        with pytest.raises(ValueError, match=rf"reshard_after_forward={value} doesn't divide.*\b4\b.*\[2\]"):
            fully_shard(model, mesh=small(world), reshard_after_forward=value)
    for value in ("2", 2.0, [2]):
        with pytest.raises((ValueError, TypeError), match="reshard_after_forward"):
            fully_shard(model, mesh=small(world), reshard_after_forward=value)
    assert parameters_of(model) == before
    with pytest.warns(UserWarning, match="reshard_after_forward=1 .*means False"):
        fully_shard(model[0], mesh=small(world), reshard_after_forward=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(model, mesh=small(world), reshard_after_forward=4)
        model(data(rank, 0, width=8))
    assert places(model) == [1]
    with pytest.raises(PolicyError, match="reshard_after_forward"):
        model.set_reshard_after_forward(2)


@on_ranks(4)
def test_groups_do_not_grow_with_modules(rank, world):
    counts = []
    for depth in (2, 12):
        model, before = even(depth), groups()
        for m in (*model, model):
            fully_shard(m, mesh=small(world), reshard_after_forward=2)
        mean_square(model, data(rank, 0, width=8)).backward()
        counts.append(groups() - before)
    assert counts[0] <= 1 and counts[1] == 0, counts


# ------------------------------------------------------------------------------------------------------- functional


@on_ranks(4)
def test_functional_training(rank, world):
    """One value, a mapping, a function of the name: exact gradients, and exactly the collectives that were promised."""
    expected = mean_grads(integers_(Chain()), [batch(r) for r in range(world)])
    sizes = {name: 2 for name in LAYERS}
    for reshard in (2, sizes, sizes | {"": 2}, lambda name: 2 if name == "layers.1" else None):
        model = integers_(Chain())
        state = shard_module(model, small(world), LAYERS, reshard_after_forward=reshard)
        found = {u.name: u.reshard_after_forward for u in state.layout.units}
        root = 2 if reshard == 2 or (isinstance(reshard, dict) and "" in reshard) else False
        others = {n: 2 if not callable(reshard) or n == "layers.1" else True for n in LAYERS}
        assert found == {"": root} | others
        promised, step = Traffic.of(expected_comm(state.layout)), step_of(model)
        for i in range(2):
            with Traffic() as traffic:
                _, rows, state = step_grads(step, state, *batch(rank))
            equal(rows, local_rows(state, expected))
            assert traffic.seen == promised == Traffic.of(state.ledger[-len(promised) :]), i
        assert {c.group_size for c in expected_comm(state.layout) if c.op == "all_gather"} == {2, 4}


@on_ranks(4)
def test_functional_phases(rank, world):
    """``shard(state, after_forward=True)`` regroups; the next gather is over two; full parameters need it first."""
    model = integers_(Chain())
    original = copy.deepcopy(model)
    state = shard_module(model, small(world), LAYERS, reshard_after_forward={name: 2 for name in LAYERS})
    before = len(state.ledger)
    state = shard(unshard(state), after_forward=True)
    phases = [u.params_phase for u in state.units]
    assert phases == [ParamPhase.SHARDED] + [ParamPhase.REGROUPED] * 3
    assert "regrouped" in describe(state)
    assert memory_bytes(state)["regrouped"] == 3 * ROWS * 4
    with pytest.raises(PhaseError, match=r"layers\.0.*smaller groups.*unshard"):
        full_params(state, LAYERS[0])
    state = unshard(state, LAYERS)
    assert [c.group_size for c in state.ledger[before:]] == [4] * 4 + [2] * 3
    full_now = full_params(state, LAYERS)
    equal(full_now, {n: p for n, p in original.named_parameters() if n in full_now})
    assert len(full_now) == 12
    state = shard(state)
    assert [u.params_phase for u in state.units] == [ParamPhase.SHARDED] * 4
    out, state = evaluate(lambda p, x: functional_call(model, p, x))(state, batch(rank)[0])
    equal([out], [original(batch(rank)[0])])
    assert [u.params_phase for u in state.units] == [ParamPhase.SHARDED] * 4


@on_ranks(4)
def test_functional_step_from_a_regrouped_state(rank, world):
    """Its forward gathers over two already; held sums and mixed precision go through it: the bits of a plain one."""
    policy, found = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), []
    for reshard in (2, True):
        model = integers_(Chain())
        state = shard_module(model, small(world), LAYERS, reshard_after_forward=reshard, mp_policy=policy)
        state = shard(unshard(state), after_forward=True)
        assert (memory_bytes(state)["regrouped"] > 0) == (reshard == 2)
        step = value_and_grad(lambda p, x, y, m=model: loss_of(functional_call(m, p, x).float(), y))
        before = len(state.ledger)
        _, state = step(state, *batch(rank, 0), sync=Sync.NONE)
        assert {c.group_size for c in state.ledger[before:]} == {2 if reshard == 2 else 4}
        loss, rows, state = step_grads(step, state, *batch(rank, 1))
        found.append((loss, rows))
    equal(found[0][0], found[1][0])
    equal(found[0][1], found[1][1])
    assert rank or any(g.count_nonzero() for g in found[0][1].values())


def test_plans_with_numbers():
    """Without any process: what is refused by name, and the group of each collective."""
    specs = [ParamSpec(f"{name}.weight", (8, 8), "float32") for name in ("a", "b")]
    layout = plan_layout(specs, MeshSpec.fsdp(4), ["a", "b"], reshard_after_forward={"a": 2})
    assert [u.reshard_after_forward for u in layout.units] == [2, True]
    assert [c.group_size for c in expected_comm(layout) if c.op == "all_gather"] == [4, 4, 4, 2]
    with pytest.raises(PolicyError, match=r"'b'.*=3 doesn't divide.*4"):
        plan_layout(specs, MeshSpec.fsdp(4), ["a", "b"], reshard_after_forward=lambda name: 3 if name == "b" else None)
    with pytest.raises(ValueError, match=r"\['c'\]"):
        plan_layout(specs, MeshSpec.fsdp(4), ["a", "b"], reshard_after_forward={"c": 2})
    whole = plan_layout(specs, MeshSpec.fsdp(4), ["a", "b"], reshard_after_forward={"a": 4})
    assert [u.reshard_after_forward for u in whole.units] == [True, True]
    across = MeshSpec((4, 2), ("s", "r"), shard=("s",), replicate=("r",)).cut(2)
    assert [across.group(rank, ("shard",)) for rank in (0, 3, 4, 7)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    other = plan_layout(specs, MeshSpec.fsdp(4), ["a", "b"], reshard_after_forward={"a": True})
    assert layout.digest != other.digest


# ---------------------------------------------------------------------------------------------------- eight ranks


@on_ranks(8)
def test_eight_ranks(rank, world):
    """2 x 4 with groups of 2, and 8 with groups of 4: torch's bits, and pieces over neighbours of one shard group, also
    where these aren't neighbours in the mesh."""

    def run(api, mesh, size):
        model = shard_blocks(api, chain(depth=1), mesh, reshard_after_forward=size)
        return train(model, rank, steps=2)

    for mesh, size in ((mesh_of(replicate=2, shard=4), 2), (mesh_of(shard=8), 4)):
        assert_parity(lambda api, mesh=mesh, size=size: run(api, mesh, size))
        model, single = shard_blocks(OURS, chain(depth=1), mesh, reshard_after_forward=size), chain(depth=1)
        model(data(rank, 0))
        weight = model.layers[0].up.weight
        first = rank // size * size
        assert weight.device_mesh.mesh.tolist() == list(range(first, first + size))
        assert weight.placements == (Shard(0),)
        equal([full(weight)], [single.layers[0].up.weight])
        own = dict(model.named_parameters())["layers.0.up.weight"]
        assert own.placements[-1] == Shard(0) and own.placements[:-1] == (Replicate(),) * (mesh.ndim - 1)

    model, single = integers_(chain(depth=1)), integers_(chain(depth=1))
    for m in (*model.layers, model):  # shard groups of every second rank
        chosen = DataParallelMeshDims("shard", "rep")
        fully_shard(m, mesh=mesh_of(shard=4, rep=2), dp_mesh_dims=chosen, reshard_after_forward=2)
    loss = loss_of(model(batch(rank)[0]), batch(rank)[1])
    weight, first = model.layers[0].up.weight, rank // 4 * 4 + rank % 2
    assert weight.device_mesh.mesh.tolist() == [first, first + 2]
    equal([full(weight)], [single.layers[0].up.weight])
    loss.backward()
    equal(full_grads(model), mean_grads(single, [batch(r) for r in range(world)]))

    single, mesh = line(), mesh_of(dp=4, tp=2)
    model = shard_all(
        fully_shard,
        spread(line(), mesh),
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims("dp"),
        reshard_after_forward=2,
    )
    (model(on_mesh(data(rank // 2, 0), mesh)).to_local().square().sum() / (4 * 8)).backward()  # a rank's columns
    (sum(mean_square(single, data(r, 0)) for r in range(4)) / 4).backward()
    close(full_grads(model), {n: p.grad for n, p in single.named_parameters()}, 2e-6)
