"""Ways of calling sharded modules: nested values, methods beside forward, modules grouped into one unit and run in
part, losses in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from hsdp_fn_torch import register_fsdp_forward_method
from tests.workers_facade import (
    OURS,
    THEIRS,
    Boom,
    NormHead,
    Trace,
    assert_parity,
    data,
    full,
    shard_blocks,
    tripwire,
)
from tests.workers_torch import WIDTH, Block, Chain, Traffic, equal, fsdp_mesh, on_ranks

# ------------------------------------------------------------------------------------------------------------- chunks


def norm_head(api, mesh, **options):
    torch.manual_seed(0)
    model = NormHead()
    for layer in (model.embed, *model.layers):
        api.fully_shard(layer, mesh=mesh, **options)
    api.fully_shard([model.norm, model.head], mesh=mesh, **options)
    return api.fully_shard(model, mesh=mesh, **options)


def _chunks(model, x):
    """Each chunk of the head has a backward of its own, the rest of the model one for all."""
    hidden = model(x, upto="norm")
    cut = hidden.detach().requires_grad_()
    for part in cut.chunk(2):
        model.head(part).square().sum().backward()
    hidden.backward(cut.grad)


def _chunks_kept_gathered(model, x):
    hidden = model(x, upto="norm")
    cut = hidden.detach().requires_grad_()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for part in cut.chunk(2):
        model.head(part).square().sum().backward()
    model.head.reshard()
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    hidden.backward(cut.grad)


def _chunks_synced_once(model, x):
    """The last chunk's backward reduces what the earlier ones have left."""
    hidden = model(x, upto="norm")
    cut = hidden.detach().requires_grad_()
    first, second = cut.chunk(2)
    model.set_requires_gradient_sync(False)
    model.head(first).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model.head(second).square().sum().backward()
    hidden.backward(cut.grad)


def _two_backwards(model, x):
    losses = [model(k * x).square().sum() for k in (1, 2)]
    for loss in losses:
        loss.backward()


def _one_backward(model, x):
    (model(x).square().sum() + model(2 * x).square().sum()).backward()


def _retained(model, x):
    out = model(x)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].square().sum().backward()


def _retained_and_told(model, x):
    out = model(x)
    model.set_is_last_backward(False)
    out[:, 0].sum().backward(retain_graph=True)
    model.set_is_last_backward(True)
    out[:, 1].square().sum().backward()


def _interleaved(model, x):
    losses = [model(k * x).square().sum() for k in (1, 2)]
    losses[0].backward()
    third = model(3 * x).square().sum()
    losses[1].backward()
    third.backward()


def _unsharded_by_hand(model, x):
    hidden = model(x, upto="norm")
    model.head.unshard()
    nn.functional.linear(hidden, model.head.weight, model.head.bias).square().sum().backward()


def _used_after_forward(model, x):
    """The skipped head's weights, which stay because nothing is resharded."""
    model.set_reshard_after_forward(False)
    hidden = model(x, upto="norm")
    nn.functional.linear(hidden, model.head.weight).square().sum().backward()


def _child_alone(model, x):
    model(x).square().sum().backward()
    model.layers[0](x).square().sum().backward()


def _wrong_prefetches(model, x):
    model.set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_modules_to_forward_prefetch([model.embed])
    model.head.set_modules_to_backward_prefetch([model.embed])
    model.layers[1].set_modules_to_backward_prefetch([model.head])
    model(x).square().sum().backward()


def _kept_after_backward(model, x):
    model.set_reshard_after_backward(False)
    model(x).square().sum().backward()
    model.set_reshard_after_backward(True)
    model(x).square().sum().backward()


def _two_partial_forwards(model, x):
    (model(x, upto="norm").square().sum() + model(2 * x, upto="norm").sum()).backward()


def _evaluated_between(model, x):
    model(x).square().sum().backward()
    with torch.no_grad():
        model(x)
    model(x).square().sum().backward()


VARIANTS = [
    _chunks,
    _chunks_kept_gathered,
    _chunks_synced_once,
    _two_backwards,
    _one_backward,
    _retained,
    _retained_and_told,
    _interleaved,
    _unsharded_by_hand,
    _used_after_forward,
    _child_alone,
    _wrong_prefetches,
    _kept_after_backward,
    _two_partial_forwards,
    _evaluated_between,
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda f: f.__name__.strip("_"))
@on_ranks(2)
def test_a_step_in_pieces(rank, world, variant):
    """The same bits as torch, and no collective more, whatever is resharded after forward."""
    mesh = fsdp_mesh(world)
    sent: dict[str, list[dict[str, int]]] = {}

    def run(api, reshard):
        model, trace, sent[api.name] = norm_head(api, mesh, reshard_after_forward=reshard), Trace(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            with Traffic() as traffic:
                variant(model, data(rank, step))
            ops = [op for op, _, _ in traffic.seen if op in ("all_gather", "reduce_scatter", "all_reduce")]
            sent[api.name].append({op: ops.count(op) for op in set(ops)})
            trace.note_grads(model)
            optimizer.step()
            optimizer.zero_grad()
        trace.note_params(model)
        return trace

    for reshard in (None, True, False):
        assert_parity(functools.partial(run, reshard=reshard))
        for ours, theirs in zip(sent[OURS.name], sent[THEIRS.name], strict=True):
            assert all(n <= theirs.get(op, 0) for op, n in ours.items()), f"{reshard=}: {ours} here, {theirs} in torch"
        assert theirs["all_gather"] and theirs["reduce_scatter"]


def _norm_and_head(api, mesh, grouped):
    torch.manual_seed(0)
    model = NormHead()
    for layer in (model.embed, *model.layers):
        api.fully_shard(layer, mesh=mesh)
    if grouped:
        api.fully_shard([model.norm, model.head], mesh=mesh)
    else:
        api.fully_shard(model.norm, mesh=mesh)
        api.fully_shard(model.head, mesh=mesh)
    return api.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("variant", [_chunks, _chunks_synced_once], ids=["synced", "accumulated"])
@on_ranks(2)
def test_chunks_of_a_grouped_head_and_of_one_alone(rank, world, variant):
    """Which modules form a unit changes no bit."""
    found = []
    for grouped in (True, False):
        model, trace = _norm_and_head(OURS, fsdp_mesh(world), grouped), Trace()
        for step in range(2):
            variant(model, data(rank, step))
            trace.note_grads(model)
        found.append([value for _, value in trace.records])
    equal(*found)


@on_ranks(2)
def test_a_head_that_is_skipped_twice_has_no_gradient(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        model, trace = norm_head(api, mesh), Trace()
        _two_partial_forwards(model, data(rank, 0))
        trace.note_grads(model)
        return trace

    found = dict(assert_parity(run).records)
    assert {what for what, value in found.items() if value is None} == {
        "gradient of head.weight",
        "gradient of head.bias",
    }


def _gathered(model, unit):
    """Whether the unit's full parameters are there."""
    return isinstance(next(u for u in model.hsdp_state.units if u.name == unit).full, tuple)


@on_ranks(2)
def test_flags_toggled_around_the_chunks(rank, world):
    """The unit is gathered once for all chunks and freed when told to."""
    model = norm_head(OURS, fsdp_mesh(world))
    hidden = model(data(rank, 0), upto="norm")
    cut = hidden.detach().requires_grad_()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    with Traffic() as traffic:
        for part in cut.chunk(4):
            model.head(part).square().sum().backward()
            assert _gathered(model, "norm")
    assert [op for op, _, _ in traffic.seen if op == "all_gather"] == ["all_gather"]
    model.head.reshard()
    assert not _gathered(model, "norm")
    hidden.backward(cut.grad)


@pytest.mark.parametrize("when", ["before", "after", "backward"])
@on_ranks(2)
def test_an_exception_among_the_chunks(rank, world, when):
    """After `reset_iter_state` a step gives what it gives in a fresh model."""

    def step_of(model):
        model.zero_grad()
        _chunks(model, data(rank, 1))
        return [full(p.grad) for p in model.parameters()]

    expected = step_of(norm_head(OURS, fsdp_mesh(world)))
    model = norm_head(OURS, fsdp_mesh(world))
    hidden = model(data(rank, 0), upto="norm")
    cut = hidden.detach().requires_grad_()
    first, second = cut.chunk(2)
    model.head(first).square().sum().backward()
    with tripwire(model.head, when), pytest.raises(Boom):
        model.head(second).square().sum().backward()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for m in model.modules() for p in m._parameters.values())
    equal(step_of(model), expected)


# ------------------------------------------------------------------------------------------------------ nested values


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Inner:
    value: torch.Tensor
    label: str


@dataclasses.dataclass
class Outer:
    inner: Inner
    items: list[Any]
    count: int = 3


SHAPES = {
    "list": (lambda a, b: [a, [b]], lambda v: (v[0], v[1][0])),
    "tuple": (lambda a, b: (a, (None, b)), lambda v: (v[0], v[1][1])),
    "dict": (lambda a, b: {"a": a, "more": {"b": b, "n": 7}}, lambda v: (v["a"], v["more"]["b"])),
    "named tuple": (lambda a, b: Pair(Pair(a, "x"), b), lambda v: (v.left.left, v.right)),
    "ordered": (lambda a, b: OrderedDict(a=a, b=[b]), lambda v: (v["a"], v["b"][0])),
    "default": (lambda a, b: defaultdict(list, a=[a], b=[b]), lambda v: (v["a"][0], v["b"][0])),
    "dataclass": (lambda a, b: Outer(Inner(a, "x"), [b, None]), lambda v: (v.inner.value, v.items[0])),
}


def shape_of(value: Any) -> Any:
    """The value without what its tensors hold: types of containers, dtypes, and everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, dict):
        return type(value), {k: shape_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(v) for v in value]
    if dataclasses.is_dataclass(value):
        return type(value), {f.name: shape_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


class Nested(nn.Module):
    """Takes a nested value by position and one by name, and returns one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.kind = kind
        self.seen: Any = None

    def forward(self, given, *, named):
        make, take = SHAPES[self.kind]
        self.seen = shape_of((given, named))
        (x, y), (z, _) = take(given), take(named)
        return make(self.a(x), self.b(y + z))


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.nested = Nested(kind)

    def forward(self, x):
        make, _ = SHAPES[self.nested.kind]
        x = self.first(x)
        return self.nested(make(x, x + 1), named=make(2 * x, x))


@pytest.mark.parametrize("kind", SHAPES)
@on_ranks(2)
def test_nested_values_go_in_and_out(rank, world, kind):
    """Same containers inside and outside, cast as torch casts, whichever output is in the loss."""
    mesh = fsdp_mesh(world)
    shapes: list[Any] = []

    def run(api, used, reshard):
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
        if api is OURS:
            policy = api.MixedPrecisionPolicy("bfloat16", "float32", output_dtype="float64")
        torch.manual_seed(0)
        model, trace = Around(kind), Trace()
        api.fully_shard(model.nested, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        api.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for step in range(2):
            out = model(data(rank, step))
            shapes[:] = model.nested.seen, shape_of(out)
            for at, value in enumerate(SHAPES[kind][1](out)):
                trace.note(f"output {at}", value.detach())
                if at in used:
                    value.square().sum().backward(retain_graph=True)
            trace.note_grads(model)
        return trace

    for used in ((0,), (1,), (0, 1)):
        assert_parity(functools.partial(run, used=used, reshard=True))  # ours is the last to run
    inside, outside = shapes
    make, _ = SHAPES[kind]
    half, double = (torch.empty(4, WIDTH, dtype=t) for t in (torch.bfloat16, torch.float64))
    assert inside == shape_of((make(half, half), make(half, half)))
    assert outside == shape_of(make(double, double))


class Constant(nn.Module):
    """No tensor goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self):
        return self.block(torch.ones(2, WIDTH)).sum() * self.scale


@on_ranks(2)
def test_forward_without_arguments(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        torch.manual_seed(0)
        model, trace = Constant(), Trace()
        api.fully_shard(model.block, mesh=mesh)
        api.fully_shard(model, mesh=mesh)
        for _ in range(2):
            (model().square().sum() * (rank + 1)).backward()
            trace.note_grads(model)
        return trace

    assert_parity(run)


@on_ranks(2)
def test_values_that_are_no_tensors_pass_through(rank, world):
    """The very objects, in both directions; also where nothing but them comes back."""
    mesh = fsdp_mesh(world)
    marker = object()

    class Odd(Chain):
        def forward(self, x, flag, *, info, silent=False):
            assert info is marker
            assert flag == 3
            out = super().forward(x)
            return None if silent else (out, None, flag, info, "text", {1, 2})

    def run(api):
        torch.manual_seed(0)
        model, trace = shard_blocks(api, Odd(), mesh, mp_policy=api.MixedPrecisionPolicy()), Trace()
        assert model(data(rank, 0), 3, info=marker, silent=True) is None
        out, none, flag, info, text, numbers = model(data(rank, 0), 3, info=marker)
        assert info is marker
        trace.note("rest", (none, flag, text, numbers))
        out.square().sum().backward()
        trace.note_grads(model)
        return trace

    found = dict(assert_parity(run).records)
    assert found["rest"] == (None, 3, "text", {1, 2})


# ------------------------------------------------------------------------------------------------------------ methods


class Methods(Chain):
    """Further ways in beside forward."""

    def short(self, x, *, scale=1.0):
        """Runs one block only, and no forward."""
        return self.last(self.layers[0](self.first(x))) * scale

    def through(self, x):
        """Calls forward."""
        return self(x) + 1

    def raising(self, x):
        self.layers[0](self.first(x))
        raise Boom

    @classmethod
    def twice(cls, x):
        return cls, 2 * x

    @staticmethod
    def thrice(x):
        return 3 * x


REGISTER = {
    THEIRS.name: torch.distributed.fsdp.register_fsdp_forward_method,
    OURS.name: register_fsdp_forward_method,
}


def with_methods(api, mesh, names, *, warm=False, again=1, **options):
    torch.manual_seed(0)
    model = shard_blocks(api, Methods(), mesh, **options)
    if warm:
        model(torch.ones(1, WIDTH)).sum().backward()
        model.zero_grad()
    for _ in range(again):
        for name in names:
            REGISTER[api.name](model, name)
    return model


@pytest.mark.parametrize("again", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("warm", [False, True], ids=["before the first forward", "after it"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_registered_methods_run_like_forward(rank, world, again, warm, reshard):
    """In a loop with forward itself, with and without gradients."""
    mesh = fsdp_mesh(world)

    def run(api):
        model = with_methods(api, mesh, ("short", "through"), warm=warm, again=again, reshard_after_forward=reshard)
        trace, optimizer = Trace(), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for name in ("short", "forward", "through"):
                call = model if name == "forward" else getattr(model, name)
                with torch.no_grad():
                    trace.note(f"{name} without grad", call(data(rank, step)))
                out = call(data(rank, step)) if name != "short" else call(data(rank, step), scale=2.0)
                trace.note(name, out.detach())
                out.square().mean().backward()
                trace.note_grads(model)
            optimizer.step()
            optimizer.zero_grad()
        trace.note_params(model)
        return trace

    assert_parity(run)


@pytest.mark.parametrize(
    "warm",
    [
        False,
        True,
    ],
)
@on_ranks(2)
def test_a_registered_method_gathers_what_it_runs(rank, world, warm):
    """Registered twice it still gathers once, and nothing that another way through the model would need. (The first
    time after another way, a wrong guess of what comes next may cost one gather.)"""
    mesh, sent = fsdp_mesh(world), {}
    for api in (THEIRS, OURS):
        model = with_methods(api, mesh, ("short",), again=1 + (api is OURS), warm=warm)
        for _ in range(2):
            with Traffic() as traffic:
                model.short(data(rank, 0)).sum().backward()
        sent[api.name] = sorted(op for op, _, _ in traffic.seen)
    assert sent[OURS.name] == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert sent[OURS.name] == sent[THEIRS.name]


@on_ranks(2)
def test_methods_without_self(rank, world):
    for api in (THEIRS, OURS):
        model = with_methods(api, fsdp_mesh(world), ("twice", "thrice"))
        cls, x = model.twice(torch.ones(2))
        assert cls is type(model)
        assert x.tolist() == [2.0, 2.0]
        assert model.thrice(torch.ones(2)).tolist() == [3.0, 3.0]


@on_ranks(2)
def test_methods_of_which_nothing_is_known(rank, world):
    for api in (THEIRS, OURS):
        model = with_methods(api, fsdp_mesh(world), ())
        with pytest.raises(ValueError, match="missing"):
            REGISTER[api.name](model, "missing")
    plain = Methods()
    before = dict(plain.__dict__)
    register_fsdp_forward_method(plain, "short")
    register_fsdp_forward_method(plain, "missing")
    assert plain.__dict__ == before


@on_ranks(2)
def test_a_child_is_not_a_method(rank, world):
    """Registering it by mistake doesn't hide it."""
    for api in (THEIRS, OURS):
        model = with_methods(api, fsdp_mesh(world), ())
        with pytest.raises((TypeError, ValueError)):
            REGISTER[api.name](model, "first")
        assert isinstance(model.first, nn.Linear)


@on_ranks(2)
def test_an_exception_in_a_registered_method(rank, world):
    """Leaves nothing behind: the next step is that of a fresh model."""
    found = []
    for disturbed in (False, True):
        model = with_methods(OURS, fsdp_mesh(world), ("short", "raising"))
        if disturbed:
            with pytest.raises(Boom):
                model.raising(data(rank, 5))
            model.reset_iter_state()
        model.short(data(rank, 0)).square().mean().backward()
        found.append([full(p.grad) for p in model.parameters()])
    equal(*found)


# -------------------------------------------------------------------------------------------------------------- views


class ViewBlock(Block):
    def forward(self, x):
        return super().forward(x).unflatten(0, (2, -1))


class EditsViews(Chain):
    """Adds to what its blocks return, in place."""

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x += 1
            x = x.flatten(0, 1)
        return self.last(x).flatten()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_views_that_are_edited_in_place(rank, world, reshard):
    """Gradients are those of one process on both ranks' data. (FSDP2 warns, and fails when it reshards.)"""
    torch.manual_seed(0)
    single = EditsViews(ViewBlock)
    torch.manual_seed(0)
    model = shard_blocks(OURS, EditsViews(ViewBlock), fsdp_mesh(world), reshard_after_forward=reshard)
    for step in range(2):
        out = model(data(rank, step))
        out *= 2
        out.square().mean().backward()
        (sum((2 * single(data(r, step))).square().mean() for r in range(world)) / world).backward()
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, msg=f"step {step}, {name}")
