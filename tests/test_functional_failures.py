"""A step that raises never happened: the state it was given, the model, and what a clean step then computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hsdp_fn_torch as ht
from hsdp_fn import (
    Keep,
    PhaseError,
    PrefetchPolicy,
    StaleStateError,
    Sync,
    clone,
    expected_comm,
    grads,
    masters,
    reduce_grads,
    reset_iter,
    unshard,
    wait,
)
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Block,
    Chain,
    assert_same_parts,
    assert_untouched,
    batch,
    equal,
    fsdp_mesh,
    integers_,
    local_rows,
    mean_grads,
    mesh_for,
    model_parts,
    on_ranks,
    sgd,
    snapshot,
    step_grads,
    step_of,
)

MODULES = ("", "first", "layers.0", "layers.0.down", "layers.1", "layers.1.up", "layers.2", "layers.2.down", "last")


class Boom(RuntimeError):
    """What the tests make raise."""


class RaiseInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise Boom("backward")


class Tripwire:
    """Makes one module of a model raise, inside a with block: before its forward, after it, or in its backward."""

    def __init__(self, model: nn.Module, name: str, when: str) -> None:
        self.module, self.when = model.get_submodule(name), when

    def __enter__(self) -> None:
        def before(module, args):
            raise Boom("before")

        def after(module, args, out):
            if self.when == "after":
                raise Boom("after")
            return RaiseInBackward.apply(out)

        hook = self.module.register_forward_pre_hook if self.when == "before" else self.module.register_forward_hook
        self.handle = hook(before if self.when == "before" else after)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def model_and_state(world: int, **policies):
    model = integers_(Chain())
    return copy.deepcopy(model), model, ht.shard_module(model, mesh_for(world), LAYERS, **policies)


def assert_clean_step(single: nn.Module, model: nn.Module, state, rank: int, world: int, what: str) -> None:
    """A step on (a copy of) the state gives exactly one process's gradients, ledger and updated masters."""
    _, rows, state = step_grads(step_of(model), clone(state), *batch(rank))
    expected = mean_grads(single, [batch(r) for r in range(world)])
    equal(rows, local_rows(state, expected), what)
    assert state.ledger == expected_comm(state.layout), what
    state = sgd(state, rows, 0.5)
    updated = {name: p.detach() - 0.5 * expected[name] for name, p in single.named_parameters()}
    equal(masters(state), local_rows(state, updated), what)


@on_ranks(2, 4)
def test_a_step_that_raises_in_any_module_never_happened(rank, world):
    for prefetch in (PrefetchPolicy(0, 0), PrefetchPolicy(1, 1), PrefetchPolicy(2, 2)):
        single, model, state = model_and_state(world, prefetch=prefetch)
        parts, before = model_parts(model), snapshot(state)
        for name in MODULES:
            for when in ("before", "after", "backward"):
                what = f"{prefetch}, {when} of {name!r}"
                with Tripwire(model, name, when), pytest.raises(Boom, match=when):
                    step_of(model)(state, *batch(rank))
                assert_untouched(state, before, what)
                assert_same_parts(model, parts, what)
        assert_clean_step(single, model, state, rank, world, str(prefetch))


@on_ranks(2)
def test_a_loss_function_that_raises_outside_the_model_never_ran(rank, world):
    single, model, state = model_and_state(world)
    parts, before = model_parts(model), snapshot(state)

    def at_once(p, x, y):
        raise Boom

    def after_a_parameter(p, x, y):
        p["layers.1.up.weight"]
        raise Boom

    def after_the_model(p, x, y):
        ht.functional_call(model, p, x)
        raise Boom

    def in_the_model_called_wrongly(p, x, y):
        ht.functional_call(model, p, x[:, :3])

    def in_the_inputs_backward(p, x, y):
        return (ht.functional_call(model, p, RaiseInBackward.apply(x.clone().requires_grad_())) * y).sum()

    def by_interrupt(p, x, y):
        ht.functional_call(model, p, x)
        raise KeyboardInterrupt

    errors = {
        at_once: Boom,
        after_a_parameter: Boom,
        after_the_model: Boom,
        in_the_model_called_wrongly: RuntimeError,
        in_the_inputs_backward: Boom,
        by_interrupt: KeyboardInterrupt,
    }
    for fn, error in errors.items():
        with pytest.raises(error):
            ht.value_and_grad(fn)(state, *batch(rank))
        assert_untouched(state, before, fn.__name__)
        assert_same_parts(model, parts, fn.__name__)
        if fn is not in_the_inputs_backward:
            with pytest.raises(error):
                ht.evaluate(fn)(state, *batch(rank))
            assert_untouched(state, before, fn.__name__)
            assert_same_parts(model, parts, fn.__name__)
    assert_clean_step(single, model, state, rank, world, "after all of them")


@on_ranks(2)
def test_a_compiled_module_is_still_compiled_after_a_step_that_raised(rank, world):
    _, model, _ = model_and_state(world)
    model = integers_(Chain())
    model.layers[1].compile(backend="eager")
    slot = model.layers[1]._compiled_call_impl
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    parts = model_parts(model)
    with Tripwire(model, "layers.2", "before"), pytest.raises(Boom):
        step_of(model)(state, *batch(rank))
    assert_same_parts(model, parts)
    assert slot is not None and model.layers[1]._compiled_call_impl is slot
    assert "_compiled_call_impl" not in model.layers[0].__dict__


@pytest.mark.parametrize("first", [Sync.NONE, Sync.SHARD, Sync.FULL])
@on_ranks(2, 4)
def test_a_failed_microbatch_keeps_those_that_had_succeeded(rank, world, first):
    single, model, state = model_and_state(world)
    step = step_of(model)
    (_, _), state = step(state, *batch(rank, 0), sync=first)
    for name, when in (("layers.1", "after"), ("layers.1", "backward"), ("first", "backward")):
        with Tripwire(model, name, when), pytest.raises(Boom):
            step(state, *batch(rank, 1))
    late = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, RaiseInBackward.apply(x)).sum())
    with pytest.raises(Boom):  # in what is differentiated last, when all units have been reduced
        late(state, batch(rank, 1)[0].requires_grad_())
    assert state.micro == 1
    (_, _), state = step(state, *batch(rank, 1))
    state, rows = grads(state)
    both = [mean_grads(single, [batch(r, i) for r in range(world)]) for i in (0, 1)]
    equal(rows, local_rows(state, {name: both[0][name] + both[1][name] for name in both[0]}))


@on_ranks(2, 4)
def test_reset_after_a_failure_drops_or_keeps_the_accumulated_gradients(rank, world):
    single, model, state = model_and_state(world)
    mean = [mean_grads(single, [batch(r, i) for r in range(world)]) for i in (0, 1)]
    step = step_of(model)
    for keep in Keep:
        for sync in Sync:
            (_, _), partial = step(clone(state), *batch(rank, 0), sync=sync)
            with Tripwire(model, "layers.0", "backward"), pytest.raises(Boom):
                step(partial, *batch(rank, 1))
            partial = reset_iter(partial, keep=keep)
            _, rows, partial = step_grads(step, partial, *batch(rank, 1))
            kept = keep is Keep.ACCUMULATED
            total = {name: mean[1][name] + (mean[0][name] if kept else 0) for name in mean[1]}
            equal(rows, local_rows(partial, total), f"{keep}, {sync}")


@on_ranks(2)
def test_a_step_on_a_state_with_collectives_in_flight_may_raise(rank, world):
    single, model, state = model_and_state(world)
    mean = [mean_grads(single, [batch(r, i) for r in range(world)]) for i in (0, 1)]
    whole = {name: g * world for name, g in mean_grads(single, [batch(rank, 0)]).items()}
    for sync in (Sync.SHARD, Sync.FULL):
        flying = unshard(clone(state), ["layers.1"], async_op=True)
        flying = reduce_grads(flying, {name: g / world for name, g in whole.items()}, sync=sync, async_op=True)
        fn = ht.value_and_grad(lambda p, x: ht.functional_call(model, p, RaiseInBackward.apply(x)).sum())
        for _ in range(2):
            with pytest.raises(Boom):
                fn(flying, batch(rank, 1)[0].requires_grad_())
        _, rows, flying = step_grads(step_of(model), flying, *batch(rank, 1))
        equal(rows, local_rows(flying, {name: mean[0][name] + mean[1][name] for name in mean[0]}), str(sync))


@on_ranks(2)
def test_gradients_that_were_refused_can_be_taken_after_all(rank, world):
    single, _, state = model_and_state(world)
    mine = mean_grads(single, [batch(rank)])
    tail = {n: g for n, g in mine.items() if n.startswith("layers.2")}
    rest = {n: g for n, g in mine.items() if n not in tail}
    state = reduce_grads(state, rest, units=["", "layers.0", "layers.1"], async_op=True)
    state = reduce_grads(state, tail, units="layers.2", sync=Sync.SHARD, async_op=True)
    for _ in range(2):
        with pytest.raises(PhaseError, match="unit 'layers"):
            grads(state)
    state = reduce_grads(wait(state), None)
    state, rows = grads(state)
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))


@on_ranks(2)
def test_a_state_that_was_used_up_is_refused_before_anything_runs(rank, world):
    _, model, state = model_and_state(world)
    (_, _), new = step_of(model)(state, *batch(rank))
    with pytest.raises(StaleStateError, match=r"(?s)value_and_grad.*test_functional_failures\.py:\d+"):
        step_of(model)(state, *batch(rank))
    _, newer = ht.evaluate(lambda p: None)(new)
    with pytest.raises(StaleStateError, match="consumed by evaluate"):
        ht.evaluate(lambda p: None)(new)
    assert newer.ledger == expected_comm(newer.layout)


@on_ranks(2)
def test_a_model_that_is_already_running_is_refused_and_the_outer_step_goes_on(rank, world):
    single, model, state = model_and_state(world)
    parts = model_parts(model)
    other = clone(state)

    def nested(p, x, y):
        out = ht.functional_call(model, p, x)
        with pytest.raises(RuntimeError, match="running"):
            ht.evaluate(lambda q: ht.functional_call(model, q, x))(other)
        return (out * y).sum()

    _, rows, state = step_grads(ht.value_and_grad(nested), state, *batch(rank))
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
    assert_same_parts(model, parts)
    assert_clean_step(single, model, other, rank, world, "the refused state")


@on_ranks(2)
def test_two_models_in_one_step_are_refused_and_both_stay_whole(rank, world):
    single, model, state = model_and_state(world)
    second = integers_(Chain())
    parts, second_parts, before = model_parts(model), model_parts(second), snapshot(state)

    def both(p, x, y):
        return (ht.functional_call(model, p, x) * ht.functional_call(second, p, x)).sum()

    with pytest.raises(RuntimeError, match="one model"):
        ht.value_and_grad(both)(state, *batch(rank))
    assert_untouched(state, before)
    assert_same_parts(model, parts)
    assert_same_parts(second, second_parts)
    assert_clean_step(single, model, state, rank, world, "after two models")


@on_ranks(2)
def test_a_model_of_another_layout_is_refused_before_any_collective(rank, world):
    _, model, state = model_and_state(world)
    before = snapshot(state)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Block()])

    with pytest.raises(ValueError, match=r"has parameter 'last\.weight', but Narrow doesn't"):
        ht.value_and_grad(lambda p, x: ht.functional_call(Narrow(), p, x))(state, batch(rank)[0])
    assert_untouched(state, before)
    with pytest.raises(TypeError, match="sync must be a Sync"):
        step_of(model)(state, *batch(rank), sync="full")
    assert_untouched(state, before)


@on_ranks(2)
def test_a_gradient_of_a_gradient_is_right_or_refused(rank, world):
    single, model, state = model_and_state(world)
    parts, before = model_parts(model), snapshot(state)
    weight = "layers.1.up.weight"

    def of_inputs(forward, w, x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        return g.square().sum()

    def of_a_weight(forward, w, x):
        (g,) = torch.autograd.grad((x @ w.t()).square().sum(), w, create_graph=True)
        return g.square().sum()

    for fn in (of_inputs, of_a_weight):
        step = ht.value_and_grad(lambda p, x, fn=fn: fn(lambda x: ht.functional_call(model, p, x), p[weight], x))
        try:
            _, rows, _ = step_grads(step, clone(state), batch(rank)[0])
        except NotImplementedError as error:
            assert "differentiable_unshard" in str(error), error
        else:
            total = sum(fn(single, single.get_parameter(weight), batch(r)[0]) for r in range(world)) / world
            names, params = zip(*single.named_parameters(), strict=True)
            expected = torch.autograd.grad(total, params, allow_unused=True)
            equal(rows, local_rows(state, dict(zip(names, expected, strict=True))), fn.__name__)
        assert_untouched(state, before, fn.__name__)
        assert_same_parts(model, parts, fn.__name__)


class EditsItsActivation(Block):
    """Edits in place what relu has saved for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        out = self.down(hidden)
        hidden.mul_(2.0)
        return out


class EditsItsWeight(Block):
    """Rescales its weight in place while it runs, as clipping layers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (EditsItsActivation, r"modified by an inplace operation: a tensor of shape .* saved in unit 'layers.2'"),
        (EditsItsWeight, r"forward of unit 'layers.0' modified its gathered parameters in place"),
    ],
)
@on_ranks(2)
def test_an_in_place_edit_that_would_give_wrong_gradients_is_refused(rank, world, block, message):
    model = integers_(Chain(block))
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS, prefetch=PrefetchPolicy(0, 0))
    with pytest.raises(RuntimeError, match=message):
        step_of(model)(state, *batch(rank))
    ht.evaluate(lambda p: p["first.weight"].sum())(state)  # the state is as good as before
