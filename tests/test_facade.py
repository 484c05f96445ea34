"""`fully_shard` and `HSDPModule` on their own: what the call makes of a module, and what may happen to it then."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hsdp_fn import HSDPState, LayoutError, MixedPrecisionPolicy, PolicyError, RankMismatchError
from hsdp_fn_torch.facade import HSDPModule, fully_shard
from tests.workers_facade import OURS, Boom, Tied, adamw, chain, data, full, mean_square, shard_blocks, tripwire
from tests.workers_torch import (
    WIDTH,
    Block,
    Chain,
    batch,
    chunk,
    counts,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    loss_of,
    mean_grads,
    mesh_for,
    on_ranks,
)


def fulls(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def sharded(world: int, **options) -> Chain:
    return shard_blocks(OURS, chain(), mesh_for(world), **options)


# ---------------------------------------------------------------------------------------------------------- the call


@on_ranks(2)
def test_the_same_object_of_an_extended_class(rank, world):
    model = chain()
    mesh = fsdp_mesh(world)
    pair = [model.layers[0], model.layers[1]]
    assert fully_shard(pair, mesh=mesh) is pair
    assert fully_shard(model, mesh=mesh) is model
    assert type(model).__name__ == "HSDPChain"
    assert isinstance(model, Chain) and isinstance(model, HSDPModule)
    assert [type(layer).__name__ for layer in model.layers] == ["HSDPBlock", "HSDPBlock", "Block"]
    assert type(model.layers[0]) is type(model.layers[1])
    assert type(model.first) is nn.Linear


@on_ranks(2, 4)
def test_parameters_are_dtensors_of_the_original(rank, world):
    mesh, model = mesh_for(world), chain()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.layers[0].up.bias.requires_grad_(False)
    grads_wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    shard_blocks(OURS, model, mesh)
    assert list(dict(model.named_parameters())) == list(before)
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter), name
        assert p.device_mesh == mesh
        assert p.placements == ((Replicate(), Shard(0)) if world == 4 else (Shard(0),)), name
        assert p.shape == before[name].shape and p.stride() == before[name].stride(), name
        assert p.requires_grad == grads_wanted[name], name
        assert p.is_leaf and p.grad is None, name
        rows = p.to_local()
        equal([rows], [chunk(before[name], 2, 0)[mesh.get_local_rank(mesh.ndim - 1)]], name)
        assert rows.is_contiguous(), name
    equal(fulls(model), before)


@on_ranks(2)
def test_fewer_rows_than_ranks(rank, world):
    model = nn.Linear(WIDTH, 1)
    fully_shard(model, mesh=fsdp_mesh(world))
    assert model.weight.to_local().shape == (1 - rank, WIDTH)
    model(data(rank, 0)).sum().backward()
    assert model.weight.grad.to_local().shape == (1 - rank, WIDTH)
    equal([full(model.weight.grad)], [(data(0, 0).sum(0) + data(1, 0).sum(0)).div(2)[None]])


@on_ranks(2)
def test_shard_placement(rank, world):
    model, seen = chain(), []
    original = model.first.weight

    def place(param):
        seen.append(param)
        return Shard(-1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    before = fulls(model)
    fully_shard(model, mesh=fsdp_mesh(world), shard_placement_fn=place)
    assert any(p is original for p in seen)
    assert model.first.weight.placements == (Shard(1),)
    assert model.first.weight.to_local().is_contiguous()
    assert model.first.bias.placements == (Shard(0),)
    equal([model.first.weight.to_local()], [before["first.weight"].chunk(2, 1)[rank]])
    equal(fulls(model), before)


@on_ranks(4)
def test_replicated_and_ignored_parameters(rank, world):
    mesh, model = hsdp_mesh(), integers_(chain())
    single = copy.deepcopy(model)
    ignored = model.first.bias
    fully_shard(model, mesh=mesh, ignored_params=[ignored], replicate_params=[model.last.bias])
    assert model.first.bias is ignored and not isinstance(ignored, DTensor)
    assert model.last.bias.placements == (Replicate(), Replicate())
    x, y = batch(rank)
    loss_of(model(x), y).backward()
    expected = mean_grads(single, [batch(r) for r in range(world)])
    own = mean_grads(single, [batch(rank)])
    equal(full_grads(model), expected | {"first.bias": own["first.bias"]})


@on_ranks(2)
def test_the_default_mesh_is_all_ranks(rank, world):
    model = fully_shard(chain())
    assert model.first.weight.device_mesh.shape == (world,)
    assert model.first.weight.placements == (Shard(0),)


@on_ranks(2)
def test_a_slice_of_a_sharded_sequential_is_plain(rank, world):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    fully_shard(model[1], mesh=fsdp_mesh(world))
    fully_shard(model, mesh=fsdp_mesh(world))
    part = model[:2]
    assert type(part) is nn.Sequential
    assert len(part) == 2 and part[0] is model[0] and isinstance(part[1], HSDPModule)


@on_ranks(2)
def test_deepcopy_is_refused(rank, world):
    model = sharded(world)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(nn.ModuleList([model]))


@on_ranks(2)
def test_a_second_call_is_refused(rank, world):
    model = sharded(world)
    params = dict(model.named_parameters())
    for again in (model, model.layers[0], [model.layers[1], model.first]):
        with pytest.raises(AssertionError, match="each distinct composable API can be applied to a module once only"):
            fully_shard(again, mesh=fsdp_mesh(world))
    assert all(p is params[name] for name, p in model.named_parameters())
    assert type(model.first) is nn.Linear
    model(data(rank, 0)).sum().backward()


def _scalar() -> nn.Module:
    model = chain()
    model.first.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    return model


def _modules_in_a_list() -> nn.Module:
    return nn.ModuleList([Block()])


def _modules_in_a_dict() -> nn.Module:
    return nn.ModuleDict({"a": Block()})


def _not_a_module() -> str:
    return "module"


def _nothing() -> list:
    return []


def _not_only_modules() -> list:
    return [Block(), 3]


def _strided() -> nn.Module:
    model = chain()
    model.layers[0].up.weight = nn.Parameter(torch.randn(WIDTH, 9).t())
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "match"),
    [
        (_scalar, {}, LayoutError, r"first\.temperature.*scalar"),
        (_strided, {}, LayoutError, r"layers\.0\.up\.weight.*contiguous"),
        (chain, {"shard_placement_fn": "Shard(1) for all"}, LayoutError, r"Shard\(1\).*first\.bias.*out of range"),
        (chain, {"shard_placement_fn": "Shard(-3) for all"}, LayoutError, r"Shard\(-3\).*first\.weight.*out of range"),
        (chain, {"shard_placement_fn": "a string"}, ValueError, r"shard_placement_fn.*first\.weight"),
        (chain, {"reshard_after_forward": 3}, PolicyError, "reshard_after_forward"),
        (chain, {"reshard_after_forward": 0}, PolicyError, "reshard_after_forward"),
        (chain, {"reshard_after_forward": "yes"}, PolicyError, "reshard_after_forward"),
        (chain, {"mp_policy": "bfloat16"}, ValueError, "mp_policy"),
        (chain, {"offload_policy": "cpu"}, ValueError, "offload_policy"),
        (chain, {"mesh": "3-D"}, ValueError, "mesh"),
        (chain, {"mesh": "cpu"}, ValueError, "mesh"),
        (_modules_in_a_list, {}, ValueError, "containers that do not implement forward"),
        (_modules_in_a_dict, {}, ValueError, "containers that do not implement forward"),
        (_not_a_module, {}, ValueError, "str"),
        (_nothing, {}, ValueError, "empty"),
        (_not_only_modules, {}, ValueError, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
@on_ranks(2)
def test_refused_arguments_leave_the_module_as_it_was(rank, world, make, options, error, match):
    given = {
        "Shard(1) for all": lambda p: Shard(1),
        "Shard(-3) for all": lambda p: Shard(-3),
        "a string": lambda p: "Shard(0)",
        "3-D": init_device_mesh("cpu", (1, 1, world), mesh_dim_names=("a", "b", "c")),
    }
    options = {"mesh": fsdp_mesh(world)} | {k: given.get(v, v) if isinstance(v, str) else v for k, v in options.items()}
    module = make()
    parts = [m for m in (module if isinstance(module, list) else [module]) if isinstance(m, nn.Module)]
    before = [(type(m), dict(m.__dict__), dict(m.named_parameters())) for m in parts]
    with pytest.raises(error, match=match):
        fully_shard(module, **options)
    for m, (kind, attributes, params) in zip(parts, before, strict=True):
        assert type(m) is kind
        assert m.__dict__ == attributes
        assert all(p is params[name] for name, p in m.named_parameters())


@pytest.mark.parametrize(
    "setter", ["set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward"]
)
@on_ranks(2)
def test_setters_take_bools_only(rank, world, setter):
    model = sharded(world)
    for wrong in (1, None, "no"):
        with pytest.raises(PolicyError, match=setter.removeprefix("set_")):
            getattr(model, setter)(wrong)
    model(data(rank, 0)).sum().backward()
    assert model.first.weight.grad is not None  # no setting was half made


@pytest.mark.parametrize(
    ("setter", "wrong", "name"),
    [
        ("set_gradient_divide_factor", 0.0, "divide_factor"),
        ("set_gradient_divide_factor", "many", "divide_factor"),
        ("set_gradient_divide_factor", True, "divide_factor"),
        ("set_gradient_scaling_factor", -1.0, "scaling_factor"),
        ("set_reduce_op_type", "max", "op"),
        ("set_reduce_op_type", 3, "op"),
    ],
)
@on_ranks(2)
def test_setters_name_what_is_wrong(rank, world, setter, wrong, name):
    model = sharded(world)
    with pytest.raises(PolicyError, match=name):
        getattr(model, setter)(wrong)


@on_ranks(2)
def test_sums_and_scaling_factors(rank, world):
    def gradients(prepare):
        model = sharded(world)
        prepare(model)
        mean_square(model, data(rank, 0)).backward()
        return full_grads(model)

    mean = gradients(lambda m: None)
    equal(gradients(lambda m: m.set_reduce_op_type("sum")), {n: g * 2 for n, g in mean.items()})
    of_root = gradients(lambda m: m.set_gradient_scaling_factor(8.0))
    equal(of_root, {n: g * (1 if n.startswith("layers") else 8) for n, g in mean.items()})
    only_root = gradients(lambda m: m.set_reduce_op_type("sum", recurse=False))
    equal(only_root, {n: g * (1 if n.startswith("layers") else 2) for n, g in mean.items()})


@on_ranks(2)
def test_ranks_with_different_models_are_told(rank, world):
    model = shard_blocks(OURS, Chain(depth=3), fsdp_mesh(world), mp_policy=MixedPrecisionPolicy())
    if rank == 1:
        model.set_reshard_after_forward(False)
    with pytest.raises(RankMismatchError, match="layouts"):
        model(data(rank, 0))


@on_ranks(2)
def test_weights_tied_across_two_calls_are_refused(rank, world):
    """At the latest in the first forward, and by name."""
    model, mesh = Tied(), fsdp_mesh(world)

    def shard_and_run():
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.zeros(2, 3, dtype=torch.long))

    with pytest.raises(ValueError, match=r"head\.weight|embed\.weight|weight"):
        shard_and_run()


# ------------------------------------------------------------------------------------------------------ the root


@on_ranks(2)
def test_the_first_to_run_forward_is_the_root(rank, world):
    model = sharded(world)
    model.layers[1](data(rank, 0))
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        model(data(rank, 0))


@on_ranks(2)
def test_a_list_cannot_be_the_root(rank, world):
    modules = [Block(), Block()]
    fully_shard(modules, mesh=fsdp_mesh(world))
    with pytest.raises(RuntimeError, match="single root module"):
        modules[0](data(rank, 0))


@on_ranks(2)
def test_looking_at_a_child_does_not_make_it_a_root(rank, world):
    """Nor do setters, state_dict or a refused reset."""
    model = sharded(world)
    model.layers[0].set_requires_gradient_sync(True)
    model.layers[0].state_dict()
    for look in (lambda m: m.hsdp_state, lambda m: m.describe(), lambda m: m.reset_iter_state()):
        with contextlib.suppress(RuntimeError):
            look(model.layers[0])
    model(data(rank, 0)).sum().backward()
    assert model.layers[0].up.weight.grad is not None


@on_ranks(2)
def test_state_and_description(rank, world):
    model = sharded(world)
    model(data(rank, 0)).sum().backward()
    state = model.hsdp_state
    assert isinstance(state, HSDPState)
    assert [u.name for u in state.units] == ["", "layers.0", "layers.1", "layers.2"]
    assert model.layers[1].hsdp_state is state
    text = model.describe()
    for part in ("layers.0", "layers.2", "sharded", "issued: 7 all_gather", "issued: 4 reduce_scatter"):
        assert part in text, text


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2, 4)
def test_collectives_of_one_iteration(rank, world, reshard):
    """U blocks and the root: 2U + 1 all-gathers and U + 1 reductions, since the root stays gathered by default."""
    model, blocks = sharded(world, reshard_after_forward=reshard), 3
    for step in range(2):
        model(data(rank, step)).sum().backward()
        gathers = {True: 2 * (blocks + 1), False: blocks + 1, None: 2 * blocks + 1}[reshard]
        expected = {"all_gather": gathers, "reduce_scatter": blocks + 1}
        assert counts(model.hsdp_state.ledger) == expected | ({"all_reduce": blocks + 1} if world == 4 else {})


@on_ranks(2)
def test_set_reshard_after_forward(rank, world):
    model = sharded(world)

    def gathers():
        model(data(rank, 0)).sum().backward()
        return counts(model.hsdp_state.ledger)["all_gather"]

    assert gathers() == 7
    model.set_reshard_after_forward(False)
    assert gathers() == 4
    model.layers[0].set_reshard_after_forward(True)
    assert gathers() == 5
    model.set_reshard_after_forward(True, recurse=False)
    assert gathers() == 6


@on_ranks(4)
def test_collectives_of_microbatches(rank, world):
    model = sharded(world)

    def reductions():
        model(data(rank, 0)).sum().backward()
        return {op: n for op, n in counts(model.hsdp_state.ledger).items() if op != "all_gather"}

    model.set_requires_gradient_sync(False)
    assert reductions() == {}
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    assert reductions() == {"reduce_scatter": 4}
    assert model.first.weight.grad is None
    model.set_requires_all_reduce(True)
    assert reductions() == {"reduce_scatter": 4, "all_reduce": 4}
    assert model.first.weight.grad is not None


# ------------------------------------------------------------------------------------------- parameters over iterations


@on_ranks(2)
def test_parameter_objects_stay(rank, world):
    model = sharded(world)
    params = dict(model.named_parameters())
    optimizer = adamw(list(params.values()))
    before = fulls(model)
    for step in range(3):
        out = model(data(rank, step))
        assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in params.items()]
        out.sum().backward()
        assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in params.items()]
        optimizer.step()
        optimizer.zero_grad()
    assert all((fulls(model)[n] != before[n]).any() for n in before)


@on_ranks(2, 4)
def test_gradients_are_dtensors_like_the_parameters(rank, world):
    model = sharded(world, mp_policy=MixedPrecisionPolicy(param_dtype="bfloat16"))
    out = model(data(rank, 0))
    assert all(p.grad is None for p in model.parameters())
    out.sum().backward()
    for name, p in model.named_parameters():
        assert isinstance(p.grad, DTensor), name
        assert (p.grad.placements, p.grad.device_mesh) == (p.placements, p.device_mesh), name
        assert (p.grad.shape, p.grad.dtype) == (p.shape, torch.float32), name
        assert p.grad.to_local().shape == p.to_local().shape, name
        assert p.grad.to_local().is_contiguous(), name


@on_ranks(2)
def test_gradients_of_unused_parameters_stay_none(rank, world):
    model = shard_blocks(OURS, nn_skipping(), fsdp_mesh(world))
    model(data(rank, 0)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    unused = {name for name, g in grads.items() if g is None}
    assert unused == {n for n in grads if n.startswith(("layers.1.", "first."))}
    assert counts(model.hsdp_state.ledger)["reduce_scatter"] == 3


class Skipping(Chain):
    """Uses neither its first layer nor its middle block."""

    def forward(self, x):
        return self.last(self.layers[2](self.layers[0](x)))


def nn_skipping() -> Skipping:
    torch.manual_seed(0)
    return Skipping()


@on_ranks(2)
def test_edits_of_local_tensors_are_used(rank, world):
    model, single = sharded(world), chain()
    with torch.no_grad():
        model(data(rank, 0))
        dict(model.named_parameters())["last.weight"].to_local().fill_(0.5)
        single.last.weight.fill_(0.5)
        equal([model(data(rank, 0))], [single(data(rank, 0))])


@on_ranks(2)
def test_exact_gradients_of_integers(rank, world):
    """Against one process on both ranks' data."""
    model = integers_(chain())
    single = copy.deepcopy(model)
    shard_blocks(OURS, model, fsdp_mesh(world))
    for step in range(2):
        x, y = batch(rank, step)
        loss_of(model(x), y).backward()
        equal(full_grads(model), mean_grads(single, [batch(r, step) for r in range(world)]))
        model.zero_grad()


# ------------------------------------------------------------------------------------------------------ state dicts


@on_ranks(2)
def test_state_dict_in_every_phase(rank, world):
    """DTensors that alias the live parameters: a dict taken before the first forward shows what training does."""
    model = sharded(world)
    first = model.state_dict()
    optimizer = adamw(list(model.parameters()))

    def check(phase):
        now = model.state_dict()
        assert list(now) == list(first)
        for name, value in now.items():
            assert isinstance(value, DTensor), f"{phase}: {name}"
            assert value.to_local().data_ptr() == first[name].to_local().data_ptr(), f"{phase}: {name}"

    check("new")
    for step in range(2):
        out = model(data(rank, step))
        check("between forward and backward")
        out.sum().backward()
        check("after backward")
        optimizer.step()
        optimizer.zero_grad()
        check("after the optimizer")
    with torch.no_grad():
        model(data(rank, 9))
    check("after evaluation")
    equal({n: full(v) for n, v in first.items()}, fulls(model))


@pytest.mark.parametrize("when", ["before", "after", "backward"])
@on_ranks(2)
def test_state_dict_after_an_exception(rank, world, when):
    model = sharded(world)
    params, before = dict(model.named_parameters()), fulls(model)
    with tripwire(model.layers[1], when), pytest.raises(Boom):
        mean_square(model, data(rank, 0)).backward()
    assert all(isinstance(v, DTensor) for v in model.state_dict().values())
    assert [id(p) for p in model.parameters()] == [id(p) for p in params.values()]
    equal({n: full(v) for n, v in model.state_dict().items()}, before)


@pytest.mark.parametrize("phase", ["new", "forward", "graph", "backward"])
@on_ranks(2)
def test_load_state_dict_copies_in_place(rank, world, phase):
    """And the next forward uses it, whatever ran before."""
    source = integers_(chain(), seed=5)
    wanted = copy.deepcopy(source)
    shard_blocks(OURS, source, fsdp_mesh(world))
    model = sharded(world)
    pointers = [p.to_local().data_ptr() for p in model.parameters()]
    params = list(model.parameters())
    if phase == "forward":
        with torch.no_grad():
            model(data(rank, 0))
    elif phase == "graph":  # a forward that no backward follows
        model(data(rank, 0))
    elif phase == "backward":
        model(data(rank, 0)).sum().backward()
        model.zero_grad()
    model.load_state_dict(source.state_dict())
    assert [p.to_local().data_ptr() for p in model.parameters()] == pointers
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    x, y = batch(rank)
    out = model(x)
    equal([out], [wanted(x)])
    loss_of(out, y).backward()
    equal(full_grads(model), mean_grads(wanted, [batch(r) for r in range(world)]))


@pytest.mark.parametrize("phase", ["new", "backward"])
@on_ranks(2)
def test_load_state_dict_by_assignment(rank, world, phase):
    source = integers_(chain(), seed=5)
    wanted = copy.deepcopy(source)
    shard_blocks(OURS, source, fsdp_mesh(world))
    model = sharded(world)
    if phase == "backward":
        model(data(rank, 0)).sum().backward()
        model.zero_grad()
    model.load_state_dict(source.state_dict(), assign=True)
    x, y = batch(rank)
    out = model(x)
    equal([out], [wanted(x)])
    loss_of(out, y).backward()
    equal(full_grads(model), mean_grads(wanted, [batch(r) for r in range(world)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    with torch.no_grad():
        for name, p in wanted.named_parameters():
            p -= mean_grads_of(source, wanted, world)[name]
        equal([model(x)], [wanted(x)])


def mean_grads_of(source, wanted, world):
    clean = integers_(chain(), seed=5)
    with torch.enable_grad():
        return mean_grads(clean, [batch(r) for r in range(world)])


@on_ranks(2)
def test_state_dicts_survive_a_file(rank, world):
    model = sharded(world)
    before = fulls(model)
    file = io.BytesIO()
    torch.save({n: v.to_local().clone() for n, v in model.state_dict().items()}, file)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        file.seek(0)
        for name, rows in torch.load(file).items():
            model.state_dict()[name].to_local().copy_(rows)
    equal(fulls(model), before)


# ------------------------------------------------------------------------------------------------------ deferred init


def _meta_chain(world: int) -> Chain:
    with torch.device("meta"):
        model = Chain()
    return shard_blocks(OURS, model, fsdp_mesh(world))


@on_ranks(2)
def test_meta_initialization(rank, world):
    """to_empty and reset_parameters after sharding; then it trains as a model that was real all along."""
    model = _meta_chain(world)
    params = list(model.parameters())
    assert all(isinstance(p, DTensor) and p.is_meta for p in params)
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in model.parameters())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    integers = {name: p.detach() for name, p in integers_(chain()).named_parameters()}
    for name, p in model.named_parameters():
        p.detach().to_local().copy_(integers[name].chunk(2)[rank])
    single = integers_(chain())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, single)]
    for step in range(2):
        x, y = batch(rank, step)
        loss_of(model(x), y).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        for name, g in mean_grads(single, [batch(r, step) for r in range(world)]).items():
            single.get_parameter(name).grad = g
        optimizers[1].step()
        equal(fulls(model), {n: p for n, p in single.named_parameters()})


@on_ranks(2)
def test_forward_on_meta_parameters_names_them(rank, world):
    model = _meta_chain(world)
    model.layers[0].to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="meta") as caught:
        model(data(rank, 0))
    named = {name for name, _ in model.named_parameters() if f"'{name}'" in str(caught.value)}
    assert "first.weight" in named
    assert not any(name.startswith("layers.0.") for name in named), named
    model.to_empty(device="cpu")  # and it isn't too late
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    single = chain()
    with torch.no_grad():
        for p in single.parameters():
            p.fill_(1.0)
        equal([model(batch(rank)[0])], [single(batch(rank)[0])])


# --------------------------------------------------------------------------------------------------------- exceptions


def _run(model, rank, disturb=lambda model, step, micro: None, steps=3):
    """Steps of two microbatches, the first without communication. ``disturb`` runs before each microbatch."""
    optimizer, seen = adamw(list(model.parameters())), []
    for step in range(steps):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            if disturb(model, step, micro) == "restart":
                model.set_requires_gradient_sync(False)
                mean_square(model, data(rank, 10 * step)).backward()
                model.set_requires_gradient_sync(True)
            loss = mean_square(model, data(rank, 10 * step + micro))
            loss.backward()
            seen.append(loss.detach())
        seen += full_grads(model).values()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *fulls(model).values()]


@pytest.mark.parametrize("module", ["", "first", "layers.0", "layers.1.up", "layers.2", "last"])
@pytest.mark.parametrize("when", ["before", "after", "backward"])
@pytest.mark.parametrize("micro", [0, 1])
@on_ranks(2)
def test_a_microbatch_that_raised_can_be_repeated(rank, world, module, when, micro):
    """Simply by the next forward; gradients that the first microbatch left are counted once."""
    expected = _run(sharded(world), rank)
    model = sharded(world)

    def disturb(model, step, at):
        if (step, at) == (1, micro):
            with tripwire(model.get_submodule(module), when), pytest.raises(Boom):
                mean_square(model, data(rank, 77)).backward()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        equal(_run(model, rank, disturb), expected)
    told = [w for w in warned if "the last backward stopped" in str(w.message)]
    assert len(told) == (when == "backward")


@pytest.mark.parametrize("when", ["before", "after", "backward"])
@pytest.mark.parametrize("micro", [0, 1])
@on_ranks(2, 4)
def test_reset_iter_state_after_an_exception(rank, world, when, micro):
    """The step starts over, since what its first microbatch left is dropped too."""
    expected = _run(sharded(world), rank)

    def disturb(model, step, at):
        if (step, at) == (1, micro):
            with tripwire(model.layers[1], when), pytest.raises(Boom):
                mean_square(model, data(rank, 77)).backward()
            model.reset_iter_state()
            return "restart" if micro == 1 else None
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(_run(sharded(world), rank, disturb), expected)


@on_ranks(2)
def test_reset_iter_state_between_forward_and_backward(rank, world):
    expected = _run(sharded(world), rank)

    def disturb(model, step, at):
        if at == 0:
            model(data(rank, 55))
            model.reset_iter_state()

    equal(_run(sharded(world), rank, disturb), expected)


@on_ranks(2)
def test_reset_iter_state_keeps_gradients_that_are_there(rank, world):
    model = sharded(world)
    mean_square(model, data(rank, 0)).backward()
    before = full_grads(model)
    model.reset_iter_state()
    equal(full_grads(model), before)


@pytest.mark.parametrize("phase", ["new", "forward"])
@on_ranks(2)
def test_reset_iter_state_is_the_roots(rank, world, phase):
    model = sharded(world)
    if phase == "forward":
        model(data(rank, 0))
    with pytest.raises(RuntimeError, match="root"):
        model.layers[0].reset_iter_state()
    model.reset_iter_state()


@on_ranks(2)
def test_a_forward_that_nobody_differentiates_changes_nothing(rank, world):
    """Neither gradients nor, after an optimizer step, the parameters that the next forward uses."""
    expected = _run(sharded(world), rank)

    def disturb(model, step, at):
        if at == 0:
            mean_square(model, data(rank, 33))

    equal(_run(sharded(world), rank, disturb), expected)


@on_ranks(2)
def test_forward_left_over_before_an_optimizer_step(rank, world):
    model, single = sharded(world), chain()
    mean_square(model, data(rank, 0))
    with torch.no_grad():
        for p in (*model.parameters(), *single.parameters()):
            p.mul_(0.5)
    equal([model(data(rank, 1))], [single(data(rank, 1))])


@on_ranks(2)
def test_evaluation_between_backward_and_optimizer_step(rank, world):
    """Leaves nothing gathered that the step then makes stale."""
    model, single = sharded(world), chain()
    mean_square(model, data(rank, 0)).backward()
    with torch.no_grad():
        model(data(rank, 5))
        for p in (*model.parameters(), *single.parameters()):
            p.mul_(0.5)
    equal([model(data(rank, 1))], [single(data(rank, 1))])


@on_ranks(2)
def test_second_backward_through_a_retained_graph_loses_nothing(rank, world):
    """The gradients of both backwards, or an error: never the first one's in silence."""
    model = integers_(chain())
    single = copy.deepcopy(model)
    shard_blocks(OURS, model, fsdp_mesh(world))
    x, y = batch(rank)
    out = model(x)
    loss_of(out, y).backward(retain_graph=True)
    once = mean_grads(single, [batch(r) for r in range(world)])
    equal(full_grads(model), once)
    try:
        loss_of(out, y).backward()
    except RuntimeError:
        equal(full_grads(model), once)
    else:
        equal(full_grads(model), {name: 2 * g for name, g in once.items()})


@on_ranks(2)
def test_an_exception_that_forward_catches(rank, world):
    """The root goes on without the block that raised."""

    class Catching(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                try:
                    x = layer(x)
                except Boom:
                    continue
            return self.last(x)

    torch.manual_seed(0)
    single = Catching()
    model = shard_blocks(OURS, copy.deepcopy(single), fsdp_mesh(world))
    with tripwire(model.layers[1], "before"), tripwire(single.layers[1], "before"):
        out, x = model(data(rank, 0)), data(rank, 0)
        equal([out], [single(x)])
        out.sum().backward()
        expected = mean_grads(single, [(data(r, 0), None) for r in range(world)], loss=lambda out, _: out.sum())
    for name, g in full_grads(model).items():
        torch.testing.assert_close(g, expected[name], msg=name) if g is not None else None
    assert model.layers[1].up.weight.grad is None
    assert model.last.weight.grad is not None


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("phase", ["new", "forward", "backward", "failed"])
@on_ranks(2)
def test_a_deleted_model_is_freed(rank, world, phase):
    """Modules, parameters, and the storage behind them."""
    model = sharded(world)
    parts = [weakref.ref(m) for m in model.modules()]
    parts += [weakref.ref(p) for p in model.parameters()]
    parts += [weakref.ref(p.to_local().untyped_storage()) for p in model.parameters() if p.to_local().numel()]
    assert all(r() is not None for r in parts)
    out = None
    if phase != "new":
        out = mean_square(model, data(rank, 0))
    if phase == "backward":
        out.backward()
    elif phase == "failed":
        with tripwire(model.layers[1], "backward"), pytest.raises(Boom):
            mean_square(model, data(rank, 0)).backward()
    del model, out
    torch.zeros((), requires_grad=True).backward()  # autograd itself keeps a failed graph until the next backward
    for _ in range(200):  # gloo's threads let go of the buffers of finished collectives a moment later
        gc.collect()
        alive = [type(a).__name__ for r in parts if (a := r()) is not None]
        if not alive:
            break
        time.sleep(0.01)
    assert not alive


@on_ranks(2)
def test_the_class_of_a_deleted_model_is_freed(rank, world):
    class Local(Chain):
        pass

    model = shard_blocks(OURS, Local(), fsdp_mesh(world))
    freed = weakref.ref(Local)
    del model, Local
    gc.collect()
    assert freed() is None


@on_ranks(4)
def test_a_mesh_made_anew_after_its_groups_were_destroyed(rank, world):
    """It equals the old one, but must not be taken for it: its own groups communicate."""
    for _ in range(2):
        # Names of its own: torch keeps specs of DTensors by equal meshes, and would find this one again in other tests.
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("anew_replicate", "anew_shard"))
        model = shard_blocks(OURS, chain(), mesh)
        mean_square(model, data(rank, 0)).backward()
        for at, axis in enumerate(mesh.mesh_dim_names):
            backend = model.hsdp_state.backend
            assert backend.group(backend.spec, (axis,)) is mesh.get_group(at), axis
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)


@on_ranks(2)
def test_full_parameters_are_gone_after_backward(rank, world):
    model = sharded(world)
    for step in range(2):
        model(data(rank, step)).sum().backward()
        model.zero_grad()
    for u in model.hsdp_state.units:
        assert u.full is None and u.grad is None and u.reducing is None, u.name
