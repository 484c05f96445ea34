"""How units are called under functional training: containers, views, inner tensors, no module at all, compiled."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hsdp_fn_torch as ht
from hsdp_fn import UnknownUnitError, expected_comm
from tests.workers_torch import (
    LAYERS,
    WIDTH,
    Block,
    Chain,
    assert_same_parts,
    assert_trains_like_one_process,
    assert_untouched,
    batch,
    counts,
    equal,
    fsdp_mesh,
    integers_,
    local_rows,
    loss_of,
    mean_grads,
    mesh_for,
    model_parts,
    on_ranks,
    snapshot,
    step_grads,
    step_of,
)

# ----------------------------------------------------------------------------------------- what a unit takes and gives


@dataclass
class Carried:
    """What a unit of the containers test returns."""

    values: dict[str, Any]
    label: str


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Carrier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, carried: Carried, *, scale: list[Any]) -> Carried:
        pair = carried.values["pair"]
        moved = Pair(self.linear(pair.left) * scale[0]["by"], pair.right + 1)
        return Carried({"pair": moved, "steps": carried.values["steps"] + [len(carried.label)]}, carried.label + "x")


class Containers(Chain):
    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        carried = Carried({"pair": Pair(first, first), "steps": []}, "")
        for layer in self.layers:
            carried = layer(carried, scale=[{"by": 2}])
        assert carried.values["steps"] == [0, 1, 2] and carried.label == "xxx"
        assert type(carried.values["pair"]) is Pair
        return self.last(carried.values["pair"].left + carried.values["pair"].right)


@on_ranks(2)
def test_units_take_and_return_nested_containers(rank, world):
    found = assert_trains_like_one_process(Chain(), rank, world)
    assert assert_trains_like_one_process(Containers(Carrier), rank, world) == found


class Inner(Block):
    """Keeps an activation that isn't part of its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.relu(self.up(x))
        return x + self.down(self.seen).detach()


class LossOnInner(Chain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        inner = sum(layer.seen.sum(dim=1, keepdim=True) for layer in self.layers)
        for layer in self.layers:
            del layer.seen
        return out + inner


@on_ranks(2)
def test_a_loss_on_an_inner_tensor_of_a_unit(rank, world):
    found = assert_trains_like_one_process(LossOnInner(Inner), rank, world)
    assert found == {"all_gather": 7, "reduce_scatter": 4}


@on_ranks(2)
def test_a_loss_on_inner_tensors_after_the_model_has_returned(rank, world):
    model = integers_(Chain(Inner))
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)

    def loss(m, out):
        return sum(layer.seen.sum() for layer in m.layers)

    step = ht.value_and_grad(lambda p, x: loss(model, ht.functional_call(model, p, x)))
    _, rows, state = step_grads(step, state, batch(rank)[0])
    total = sum(loss(single, single(batch(r)[0])) for r in range(world)) / world
    names, params = zip(*single.named_parameters(), strict=True)
    expected = torch.autograd.grad(total, params, allow_unused=True)
    equal(rows, local_rows(state, dict(zip(names, expected, strict=True))))


class Flattened(nn.Module):
    """Returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(-1)


class EditsOutputs(Chain):
    """Writes into what its units return."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            y.mul_(2)
            y[:WIDTH].add_(1)
            x = y.view(-1, WIDTH)
        return self.last(x)


@on_ranks(2)
def test_an_in_place_edit_of_a_view_that_a_unit_returned(rank, world):
    found = assert_trains_like_one_process(EditsOutputs(Flattened), rank, world)
    assert found == {"all_gather": 7, "reduce_scatter": 4}


class Detour(nn.Module):
    """Uses its weights through transposes, slices and expanded views: odd saved tensors, odd gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.weight.t()[:, 1:4], self.weight[::2]
        return x @ torch.cat([left, right.t()], 1) * self.scale.expand(WIDTH) + self.weight.sum()


@on_ranks(2)
def test_weights_used_through_views_of_every_kind(rank, world):
    found = assert_trains_like_one_process(Chain(Detour), rank, world)
    assert found == {"all_gather": 7, "reduce_scatter": 4}


# -------------------------------------------------------------------------------------------------- without a module


@on_ranks(2, 4)
def test_parameters_used_by_name_and_by_unit_without_a_module(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, mesh_for(world), LAYERS)

    def block(w, prefix, x):
        up, up_bias, down, down_bias = (
            w[f"{prefix}.{n}"] for n in ("up.weight", "up.bias", "down.weight", "down.bias")
        )
        return x + torch.relu(x @ up.t() + up_bias) @ down.t() + down_bias

    def by_hand(p, x, y):
        x = x @ p["first.weight"].t() + p["first.bias"]
        for name in LAYERS:
            x = p.run(name, block, name, x=x)
        return loss_of(x @ p["last.weight"].t() + p["last.bias"], y)

    x, y = batch(rank)
    loss, rows, state = step_grads(ht.value_and_grad(by_hand), state, x, y)
    single = integers_(Chain())
    equal(loss, loss_of(single(x), y).detach())
    equal(rows, local_rows(state, mean_grads(single, [batch(r) for r in range(world)])))
    with pytest.raises(KeyError, match="no parameter 'other'"):
        ht.evaluate(lambda p: p["other"])(state)
    with pytest.raises(UnknownUnitError, match="no unit 'other'"):
        ht.evaluate(lambda p: p.run("other", lambda w: w))(state)


@on_ranks(2)
def test_a_root_parameter_used_by_name_after_the_units_gathers_nothing_again(rank, world):
    state = ht.shard_module(integers_(Chain()), fsdp_mesh(world), LAYERS)

    def fn(p, x):
        x = x @ p["first.weight"].t()
        for name in LAYERS:
            x = p.run(name, lambda w, x, name=name: torch.relu(x @ w[f"{name}.up.weight"].t())[:, :WIDTH], x)
        return (x @ p["last.weight"].t()).sum()

    (_, _), state = ht.value_and_grad(fn)(state, batch(rank)[0])
    issued = [(c.op, c.unit) for c in state.ledger]
    assert issued == [(c.op, c.unit) for c in expected_comm(state.layout)], issued


@on_ranks(2)
def test_a_parameter_of_a_resharding_unit_can_be_taken_by_name(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    weight = ht.value_and_grad(lambda p, x: (x @ p["layers.1.up.weight"].t() @ p["layers.1.up.weight"]).sum())
    _, rows, state = step_grads(weight, state, batch(rank)[0])
    w = single.layers[1].up.weight
    total = sum((batch(r)[0] @ w.t() @ w).sum() for r in range(world)) / world
    (expected,) = torch.autograd.grad(total, w)
    equal(rows["layers.1.up.weight"], local_rows(state, {"layers.1.up.weight": expected})["layers.1.up.weight"])
    assert [name for name, row in rows.items() if row is not None] == ["layers.1.up.weight"]


@on_ranks(2)
def test_auxiliary_results_come_out_detached(rank, world):
    model = integers_(Chain())
    single = copy.deepcopy(model)
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)

    def fn(p, x, y):
        out = ht.functional_call(model, p, x)
        return loss_of(out, y), {"out": out, "pair": Pair(out.sum(), x), "label": "kept"}

    x, y = batch(rank)
    (loss, aux), state = ht.value_and_grad(fn, has_aux=True)(state, x, y)
    equal(aux["out"], single(x).detach())
    equal(loss, loss_of(single(x), y).detach())
    assert type(aux["pair"]) is Pair and aux["label"] == "kept"
    assert not (loss.requires_grad or aux["out"].requires_grad or aux["pair"].left.requires_grad)


@on_ranks(2)
def test_a_loss_that_is_none_is_refused_and_nothing_has_changed(rank, world):
    model = integers_(Chain())
    state = ht.shard_module(model, fsdp_mesh(world), LAYERS)
    parts, before = model_parts(model), snapshot(state)
    refused = {
        "doesn't depend on any trainable parameter": lambda out: out.sum().detach(),
        r"scalar floating loss, found \(4, 3\)": lambda out: out,
        "found str": lambda out: "loss",
        r"scalar floating loss, found \(\)": lambda out: out.sum().long(),
    }
    for text, loss in refused.items():
        with pytest.raises(TypeError, match=text):
            ht.value_and_grad(lambda p, x, loss=loss: loss(ht.functional_call(model, p, x)))(state, batch(rank)[0])
        assert_untouched(state, before, text)
        assert_same_parts(model, parts, text)
    with pytest.raises(TypeError, match="must return"):
        ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).sum(), has_aux=True)(state, batch(rank)[0])
    assert_untouched(state, before, "has_aux")


@on_ranks(2)
def test_two_models_train_side_by_side(rank, world):
    a, b = integers_(Chain(), 1), integers_(Chain(Detour), 2)
    singles = [copy.deepcopy(m) for m in (a, b)]
    mesh = fsdp_mesh(world)
    states = [ht.shard_module(m, mesh, LAYERS) for m in (a, b)]
    for i in range(2):
        for n, model in enumerate((a, b)):
            _, rows, states[n] = step_grads(step_of(model), states[n], *batch(rank, i))
            expected = mean_grads(singles[n], [batch(r, i) for r in range(world)])
            equal(rows, local_rows(states[n], expected), f"model {n}, step {i}")


@on_ranks(2)
def test_one_model_under_two_layouts(rank, world):
    found = []
    model = integers_(Chain())
    fresh = copy.deepcopy(model)
    coarse = ht.shard_module(model, fsdp_mesh(world))
    fine = ht.shard_module(fresh, fsdp_mesh(world), LAYERS)
    for _ in range(2):
        _, rows, coarse = step_grads(step_of(model), coarse, *batch(rank))
        _, other, fine = step_grads(step_of(model), fine, *batch(rank))  # the same skeleton, the other state
        found += [rows, {name: other[name] for name in rows}]
    for rows in found[1:]:
        equal(rows, found[0])


# ----------------------------------------------------------------------------------------------------------- compile


@on_ranks(2)
def test_units_compiled_in_place_or_wrapped(rank, world):
    x, y = batch(rank)
    base = integers_(Chain())
    mean = mean_grads(base, [batch(r) for r in range(world)])

    in_place = copy.deepcopy(base)
    for layer in in_place.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    state = ht.shard_module(in_place, fsdp_mesh(world), LAYERS)
    parts = model_parts(in_place)
    for i in range(2):
        _, rows, state = step_grads(step_of(in_place), state, x, y)
        equal(rows, local_rows(state, mean), f"Module.compile, step {i}")
    assert_same_parts(in_place, parts)

    wrapped = copy.deepcopy(base)
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    state = ht.shard_module(wrapped, fsdp_mesh(world), LAYERS)
    _, rows, state = step_grads(step_of(wrapped), state, x, y)
    by_name = {p.name: mean[p.name.replace("_orig_mod.", "")] for p in state.layout.params()}
    equal(rows, local_rows(state, by_name), "torch.compile")
    assert counts(state.ledger) == {"all_gather": 7, "reduce_scatter": 4}
