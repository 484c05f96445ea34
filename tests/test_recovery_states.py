"""What attempts begin with and how they end: units that are gathered, settings and parameters that were changed before,
hooks and messages that fail; and the end of an accumulation without a backward.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hsdp_fn_torch as ht
from hsdp_fn import ParamPhase, PeerFailed, PhaseError, PolicyError, PrefetchPolicy, Sync, expected_comm, unshard
from hsdp_fn_torch import fully_shard, recoverable
from tests.workers_facade import OURS, Boom, chain, data, full, mean_square, shard_blocks, tripwire
from tests.workers_recovery import require_equal, set_sync
from tests.workers_torch import LAYERS, WIDTH, Block, mesh_for, on_ranks


def functional(world):
    model = chain(depth=2)
    state = ht.shard_module(model, mesh_for(world), LAYERS[:2])
    return model, state, ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).square().mean())


def facade(world, **options):
    return shard_blocks(OURS, chain(depth=2), mesh_for(world), **options)


def outcome(target, body):
    """``own``, ``peer`` or ``ok``; a failed rank could free its peers, or it has a note."""
    try:
        with recoverable(target, timeout=20.0) as attempt:
            body(attempt)
    except Boom as error:
        assert not getattr(error, "__notes__", None), error.__notes__
        return "own"
    except PeerFailed as error:
        assert error.ranks == (0,)
        return "peer"
    return "ok"


def whole_grads(model):
    return [None if p.grad is None else full(p.grad) for p in model.parameters()]


def keep_gathered(model, rank):
    model.set_reshard_after_backward(False)
    mean_square(model, data(rank, 0)).backward()
    model.zero_grad()


def evaluate(model, rank):
    with torch.no_grad():
        model(data(rank, 0))


#: What may have happened since the last step: a name, options of the model, and what is done.
SINCE = {
    "nothing": ({}, lambda m, rank: None),
    "kept whole after forward": ({}, lambda m, rank: m.set_reshard_after_forward(False)),
    "frozen": ({}, lambda m, rank: m.layers[0].requires_grad_(False)),
    "kept whole after backward": ({}, keep_gathered),
    "evaluated": ({}, evaluate),
    "evaluated and kept whole": ({"reshard_after_forward": False}, evaluate),
}


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("when", ["before", "after forward"])
@on_ranks(2)
def test_a_rank_knows_what_comes_whatever_happened_since_the_last_step(rank, world, since, when):
    options, happen = SINCE[since]
    model, twin = facade(world, **options), facade(world, **options)
    for m in (model, twin):
        mean_square(m, data(rank, 0)).backward()
        m.zero_grad()
        happen(m, rank)

    def body(attempt):
        if rank == 0 and when == "before":
            raise Boom("before")
        loss = mean_square(model, data(rank, 1))
        if rank == 0:
            raise Boom("after forward")
        loss.backward()

    assert outcome(model, body) == ("own" if rank == 0 else "peer")
    assert all(p.grad is None for p in model.parameters())
    for m in (model, twin):
        mean_square(m, data(rank, 1)).backward()
    require_equal(whole_grads(model), whole_grads(twin), since)


@on_ranks(2)
def test_units_that_come_gathered_are_not_gathered_again(rank, world):
    model, state, _ = functional(world)
    state = unshard(state)

    def fail(params, x):
        if rank == 0:
            raise Boom("in the loss")
        return ht.functional_call(model, params, x).square().mean()

    step = ht.value_and_grad(fail)

    def body(attempt):
        (_, _), attempt.state = step(attempt.state, data(rank, 0))

    assert outcome(state, body) == ("own" if rank == 0 else "peer")


@on_ranks(2)
def test_states_are_warned_of_attempts_that_differ(rank, world):
    _, state, step = functional(world)
    half = ht.value_and_grad(lambda params, x: params["layers.0.up.weight"].sum())
    for run in (step, half):  # the plan is the same, what is issued isn't
        with recoverable(state) as attempt:
            (_, _), attempt.state = run(attempt.state, data(rank, 0))
        state = attempt.state
    with pytest.warns(UserWarning, match="different collectives"), recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0))


@on_ranks(2)
def test_a_hook_of_a_parameter_that_fails_counts_before_the_vote(rank, world):
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    model.zero_grad()

    def hook(grad):
        if rank == 0:
            raise Boom("hook")

    handle = model.first.weight.register_hook(hook)
    assert outcome(model, lambda _: mean_square(model, data(rank, 0)).backward()) == ("own" if rank == 0 else "peer")
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    assert outcome(model, lambda _: mean_square(model, data(rank, 0)).backward()) == "ok"
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_a_failed_backward_that_somebody_catches_inside_isnt_committed(rank, world):
    """Otherwise this rank would commit without its gradients, and its peer with mixed ones."""
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    expected = whole_grads(model)
    model.zero_grad()

    with pytest.raises((PhaseError, PeerFailed)) as caught, recoverable(model):
        if rank == 0:
            with pytest.raises(Boom), tripwire(model.layers[1], "backward"):
                mean_square(model, data(rank, 0)).backward()
        else:
            mean_square(model, data(rank, 0)).backward()
    assert isinstance(caught.value, PhaseError if rank == 0 else PeerFailed)
    assert not getattr(caught.value, "__notes__", None)
    assert all(p.grad is None for p in model.parameters())
    mean_square(model, data(rank, 0)).backward()
    require_equal(whole_grads(model), expected, "after it")


@on_ranks(2)
def test_an_exception_without_a_text_is_told_by_its_class(rank, world):
    class Mute(Boom):
        def __str__(self):
            raise ValueError("no text")

    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    with pytest.raises((Mute, PeerFailed)) as caught, recoverable(model):
        if rank == 0:
            raise Mute
        mean_square(model, data(rank, 0)).backward()
    assert rank == 0 or caught.value.reasons == {0: "Mute"}


@on_ranks(2)
def test_attempts_dont_go_with_compared_use(rank, world):
    model = facade(world)
    model.set_check_unused_params(True)
    mean_square(model, data(rank, 0)).backward()
    with pytest.raises(PolicyError, match="checked") as refused, recoverable(model):
        pass
    assert not getattr(refused.value, "__notes__", None), "nobody waits: all ranks are refused alike"
    model.set_check_unused_params(False)
    assert outcome(model, lambda _: mean_square(model, data(rank, 0)).backward()) == "ok"


@on_ranks(2)
def test_what_is_no_state_and_no_sharded_module_is_refused(rank, world):
    for target in (None, {}, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="a state or a module of fully_shard"):
            recoverable(target)


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@on_ranks(2, 4)
def test_an_accumulation_is_finished_without_a_backward(rank, world, setter):
    """As by a last backward with sync; and on the root only, outside of forward, once."""
    model, twin = facade(world), facade(world)
    for m in (model, twin):
        getattr(m, setter)(False)
        mean_square(m, data(rank, 0)).backward()
    getattr(twin, setter)(True)
    for m in (model, twin):
        mean_square(m, data(rank, 1)).backward()
    model.finish_accumulation()
    require_equal(whole_grads(model), whole_grads(twin), setter)
    assert all(u.acc_full is None and u.acc_partial is None for u in model.hsdp_state.units)
    before = whole_grads(model)
    model.finish_accumulation()
    require_equal(whole_grads(model), before, "nothing is held any more")
    with pytest.raises(RuntimeError, match="root"):
        model.layers[0].finish_accumulation()


@pytest.mark.parametrize("first", [True, False])
@on_ranks(2)
def test_an_attempt_that_has_nothing_to_issue(rank, world, first):
    """Everything is gathered already, and gradients are held back: the vote is all that peers wait for."""
    model = facade(world, reshard_after_forward=False)
    evaluate(model, rank)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)

    def body(attempt, fail=True):
        loss = mean_square(model, data(rank, 0))
        if rank == 0 and fail:
            raise Boom("after forward")
        loss.backward()

    if not first:
        assert outcome(model, lambda attempt: body(attempt, fail=False)) == "ok"
    assert outcome(model, body) == ("own" if rank == 0 else "peer")
    with recoverable(model) as attempt:
        body(attempt, fail=False)
    assert list(attempt.journal) == []


@on_ranks(2)
def test_what_was_being_gathered_when_an_attempt_failed_is_let_go(rank, world):
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    handle = model.layers[1].unshard(async_op=True)

    def body(attempt):
        if rank == 0:
            raise Boom("before")
        mean_square(model, data(rank, 0)).backward()

    assert outcome(model, body) == ("own" if rank == 0 else "peer")
    assert {u.params_phase for u in model.hsdp_state.units} == {ParamPhase.SHARDED}
    handle.wait()
    mean_square(model, data(rank, 0)).backward()


# ------------------------------------------------------------------------------------------------ units inside units


class Outer(nn.Module):
    """Two blocks between layers of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.one, self.two, self.b = Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.two(self.one(self.a(x))))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Outer() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


NESTED = [f"layers.{i}{part}" for i in range(2) for part in ("", ".one", ".two")]


def nested(world=None, **policies):
    torch.manual_seed(0)
    model = Nested()
    for name in reversed(NESTED if world else []):
        fully_shard(model.get_submodule(name), mesh=mesh_for(world), **policies)
    return fully_shard(model, mesh=mesh_for(world), **policies) if world else model


@pytest.mark.parametrize("policies", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("sync", [Sync.NONE, Sync.FULL])
@on_ranks(2)
def test_the_journal_of_units_inside_of_units(rank, world, sync, policies):
    for ahead in (0, 1, 2):
        model = nested()
        state = ht.shard_module(model, mesh_for(world), NESTED, prefetch=PrefetchPolicy(ahead, ahead), **policies)
        step = ht.value_and_grad(lambda p, x, model=model: ht.functional_call(model, p, x).square().mean())
        with recoverable(state) as attempt:
            (_, _), attempt.state = step(attempt.state, data(rank, 0), sync=sync)
        assert attempt.journal == list(expected_comm(attempt.state.layout, sync=sync))
    model = nested(world, **policies)
    set_sync(model, sync)
    for _ in range(2):  # the second one knows in which order units run
        with recoverable(model) as attempt:
            mean_square(model, data(rank, 0)).backward()
        assert attempt.journal == list(expected_comm(model.hsdp_state.layout, sync=sync))


@pytest.mark.parametrize("where", ["before", "after forward"])
@on_ranks(2)
def test_a_first_attempt_with_units_inside_of_units_that_fails_on_one_rank(rank, world, where):
    model, twin = nested(world), nested(world)

    def body(attempt):
        if rank == 0 and where == "before":
            raise Boom(where)
        loss = mean_square(model, data(rank, 0))
        if rank == 0:
            raise Boom(where)
        loss.backward()

    assert outcome(model, body) == ("own" if rank == 0 else "peer")
    for m in (model, twin):
        mean_square(m, data(rank, 0)).backward()
    require_equal(whole_grads(model), whole_grads(twin), where)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@on_ranks(2)
def test_the_journal_where_only_some_units_are_resharded(rank, world, ahead):
    """Backward's prefetch passes over those that are still there."""
    names = [*LAYERS[:3], ""]
    for kept in range(1, 2 ** len(names)):
        reshard = {name: not kept >> i & 1 for i, name in enumerate(names)}
        model = chain(depth=3)
        policies = {"prefetch": PrefetchPolicy(ahead, ahead), "reshard_after_forward": reshard}
        state = ht.shard_module(model, mesh_for(world), LAYERS[:3], **policies)
        step = ht.value_and_grad(lambda p, x, model=model: ht.functional_call(model, p, x).square().mean())
        with recoverable(state) as attempt:
            (_, _), attempt.state = step(attempt.state, data(rank, 0))
        assert attempt.journal == list(expected_comm(attempt.state.layout)), reshard
        if ahead == 1:  # the facade's
            model = chain(depth=3)
            for i, layer in enumerate(model.layers):
                fully_shard(layer, mesh=mesh_for(world), reshard_after_forward=reshard[names[i]])
            fully_shard(model, mesh=mesh_for(world), reshard_after_forward=reshard[""])
            with recoverable(model) as attempt:
                mean_square(model, data(rank, 0)).backward()
            assert attempt.journal == list(expected_comm(model.hsdp_state.layout)), reshard
