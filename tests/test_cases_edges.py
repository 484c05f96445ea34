"""More of users' reported faults, as in `test_cases.py`: second order, dtypes, scale, optimizers, ties, copies."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hsdp_fn import LayoutError, MeshError
from hsdp_fn_torch import MixedPrecisionPolicy, broadcast_module, clip_grad_norm_, fully_shard, replicate
from tests.test_cases import AB, HALF, Data, Named, Net, assert_like_reference, averaged, gradients, seeded, shard
from tests.workers_facade import adamw, data, full
from tests.workers_torch import close, equal, fsdp_mesh, hsdp_mesh, mesh_for, on_ranks


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_second_derivatives_in_inputs(rank, world, reshard):
    single = seeded(lambda: nn.Linear(4, 4, bias=False))
    model = fully_shard(copy.deepcopy(single), mesh=fsdp_mesh(world), reshard_after_forward=True)
    model.set_reshard_after_backward(reshard)
    for _ in range(2):
        x = torch.ones(1, 4, requires_grad=True)
        out = model(x)
        go = torch.zeros_like(out).requires_grad_()
        (g,) = torch.autograd.grad(out, x, go, create_graph=True)
        (g2,) = torch.autograd.grad(g.sum(), go)
        close(g2, single.weight.sum(1)[None])


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_gradient_penalty_trains_parameters(rank, world, reshard):
    """The loss and the derivative of what its input's gradient has computed from the parameters. Not a gradient of the
    parameters that keeps its graph: that is refused."""

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def backward(m, step, **options):
        x = data(rank, step, width=4).requires_grad_()
        y = m(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().sum() + g.square().sum()).backward(**options)

    assert_like_reference(make, lambda m: shard(m, world, reshard_after_forward=reshard), backward)
    with pytest.raises(NotImplementedError, match="create_graph"):
        backward(shard(seeded(make), world), 0, create_graph=True)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_saved_tensor_hooks_see_what_they_see_without_sharding(rank, world, reshard):
    """The same tensors in the same order; not parameters that are resharded, which nobody keeps."""

    def packed(model):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.detach().clone()), t)[1], lambda t: t):
            out = model(torch.ones(2, 4, requires_grad=True))
        out.sum().backward()
        return seen

    layers = seeded(lambda: [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()])
    single = nn.Sequential(nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)))
    model = shard(copy.deepcopy(single), world, reshard_after_forward=reshard)
    expected = packed(single)
    assert len(expected) == 12
    for _ in range(2):
        equal(packed(model), [t for t in expected if t.shape != (4, 4)] if reshard else expected)
    close(gradients(model), {name: g * 2 for name, g in averaged(single).items()})


@on_ranks(2)
def test_checkpointing_around_a_sharded_norm(rank, world):
    def make():
        block = Net(lambda m, x: torch.tanh(m.layer(m.norm(x))), norm=nn.LayerNorm(4), layer=nn.Linear(4, 4))
        return Net(lambda m, x: m.last(checkpoint(m.block, x, use_reentrant=False)), block=block, last=nn.Linear(4, 4))

    def place(m):
        for inner in (m.block.norm, m.block, m):
            fully_shard(inner, mesh=fsdp_mesh(world), reshard_after_forward=True)

    assert_like_reference(make, place, lambda m, step: m(data(rank, step, width=4)).square().sum().backward())


# ------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_parameters_of_two_dtypes_in_one_unit(rank, world, frozen):
    a = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=not frozen)
    model = Net(lambda m, x: x * m.a * m.b, a=a, b=nn.Parameter(torch.ones(4)))
    fully_shard(model, mesh=fsdp_mesh(world))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        a = None if frozen else torch.full((4,), 2.0, dtype=torch.bfloat16)
        equal(gradients(model), {"a": a, "b": torch.full((4,), 2.0)})
        model.zero_grad()


@on_ranks(2)
def test_sums_over_tensor_parallel_ranks_are_in_the_reduce_dtype(rank, world):
    """Of a weight that is whole on each of them: in bf16 the smaller part would be lost."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    model = fully_shard(Net(lambda m, x: x * m.w, w=weight), mesh=mesh["dp"], mp_policy=HALF)
    part = torch.full((1, 4), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    model(DTensor.from_local(part, mesh["tp"], [Shard(0)])).sum().backward()
    equal(full(model.w.grad), torch.full((4,), 1.00390625))


@on_ranks(2)
def test_batch_norm_wants_a_unit_of_its_own_in_full_precision(rank, world):
    """Its statistics stay fp32 and each rank's own. In one bf16 unit with a layer it is an error of torch's."""

    def make():
        return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    x = data(rank, 0, width=4)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        fully_shard(make(), mesh=fsdp_mesh(world), mp_policy=HALF)(x)
    model, single = make(), make()[1]
    fully_shard(model[0], mesh=fsdp_mesh(world), mp_policy=HALF)
    fully_shard(model[1], mesh=fsdp_mesh(world))
    fully_shard(model, mesh=fsdp_mesh(world))
    out = model(x)
    assert out.dtype is torch.bfloat16
    single(model[0](x).detach())
    for name in ("running_mean", "running_var"):
        equal(getattr(model[1], name), getattr(single, name))
    out.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("cast", [True, False])
@on_ranks(2)
def test_only_floating_inputs_are_cast_and_only_if_wanted(rank, world, cast):
    """Wherever they are: in dicts, lists, dataclasses and named tuples too."""
    seen = []

    def run(m, x, *, cos, idx, d):
        seen.extend([x.dtype, cos.dtype, idx.dtype, d["t"].x.dtype, d["n"][0].x.dtype, d["s"]])
        return m.layer(x.to(m.layer.weight.dtype))

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=cast)
    model = fully_shard(Net(run, layer=nn.Linear(4, 4)), mesh=fsdp_mesh(world), mp_policy=policy)
    given = {"t": Data(torch.ones(1)), "n": [Named(torch.ones(1)), None], "s": "str"}
    out = model(torch.ones(1, 4), cos=torch.ones(1), idx=torch.arange(2), d=given)
    wanted = torch.bfloat16 if cast else torch.float32
    assert seen == [wanted, wanted, torch.int64, wanted, wanted, "str"]
    assert out.dtype is torch.float32
    assert given["t"].x.dtype is torch.float32  # the caller's own


@pytest.mark.parametrize("bare", [False, True])
@on_ranks(2)
def test_casts_are_of_the_unit_that_asks_for_them(rank, world, bare):
    """Of inputs and of the output; also of a root that has no parameters of its own."""
    seen = []

    def run(m, x):
        seen.append(x.dtype)
        x = m.a(x)
        seen.append(x.dtype)
        return m.b(x)

    own = {} if bare else {"p": nn.Parameter(torch.ones(1))}
    model = Net(run, a=AB().a, b=AB().b, **own)
    for child in (model.a, model.b):
        fully_shard(child, mesh=fsdp_mesh(world), mp_policy=HALF)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mesh=fsdp_mesh(world), mp_policy=policy)
    assert [model(torch.ones(1, 4)).dtype, *seen] == [torch.float32, torch.bfloat16, torch.bfloat16]


class _InputFirst(torch.autograd.Function):
    """A linear layer as one node, so that its input's gradient travels on while ``late`` is differentiated."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


@pytest.mark.parametrize("function", [nn.functional.linear, _InputFirst.apply])
@on_ranks(2)
def test_a_weight_gradient_that_is_ready_after_the_last_input_gradient(rank, world, function):
    def head(m, h):
        late = m.w * 1.0
        return sum(function(part, late).square().sum() for part in h.chunk(2))

    def make():
        head_module = Net(head, w=nn.Parameter(torch.randn(4, 4)))
        return Net(lambda m, x: m.head(m.body(x)), body=nn.Linear(4, 4), head=head_module)

    assert_like_reference(make, lambda m: shard(m, world), lambda m, step: m(data(rank, step, width=4)).backward())


@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_conversion_to_another_dtype_after_sharding(rank, world, steps):
    """Before the first forward or between steps; not while gradients are held back in the old dtype."""
    single = seeded(lambda: nn.Linear(4, 5))
    model = fully_shard(copy.deepcopy(single), mesh=fsdp_mesh(world))
    x = torch.ones(2, 4) * (rank + 1)
    expected = {"weight": torch.full((5, 4), 3.0), "bias": torch.full((5,), 2.0)}
    for _ in range(steps):
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
        single.load_state_dict({name: p - 0.5 * expected[name] for name, p in single.state_dict().items()})
    for m in (model, single):
        m.to(torch.bfloat16)
    for _ in range(2):
        out = model(x.bfloat16())
        equal(out, single(x.bfloat16()))
        out.sum().backward()
        equal(gradients(model), {name: g.bfloat16() for name, g in expected.items()})
        model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(x.bfloat16()).sum().backward()
    model.float()
    with pytest.raises(RuntimeError, match="finish the accumulation first"):
        model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(2, 4)
def test_the_mean_in_every_reduce_dtype(rank, world, dtype):
    for mesh in (fsdp_mesh(world), mesh_for(world)):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh, mp_policy=policy)
        model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        equal(full(model.weight.grad), torch.full((2, 2), (world + 1) / 2))


@on_ranks(1, 2, 4)
def test_a_divide_factor_of_ones_own(rank, world):
    """Of the sum over all data-parallel ranks, without any setting for gloo; of one child, the other has the mean."""
    factor, scaled, mean = {1: (4.0, 0.25, 1.0), 2: (3.0, 1.0, 1.5), 4: (5.0, 2.0, 2.5)}[world]
    model = AB()
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh_for(world))
    model.a.set_gradient_divide_factor(factor)
    for _ in range(2):
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
        close(gradients(model), {"a.weight": torch.full((4, 4), scaled), "b.weight": torch.full((4, 4), mean)})
        model.zero_grad()


@on_ranks(2)
def test_an_expert_that_sees_all_tokens_has_the_mean_of_a_dense_layer(rank, world):
    """Each rank's expert is sharded over the one rank that shares it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))
    expert = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh["edp"])
    dense = fully_shard(nn.Linear(2, 2, bias=False), mesh=fsdp_mesh(world))
    expert.set_gradient_divide_factor(2.0)
    tokens = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    for _ in range(2):
        expert(tokens).sum().backward()
        dense(tokens[rank : rank + 1]).sum().backward()
        for model in (expert, dense):
            equal(full(model.weight.grad), torch.full((2, 2), 1.5))
            model.zero_grad()


@on_ranks(1)
def test_one_rank_trains_like_the_plain_model(rank, world):
    def make():
        scaled = Net(lambda m, x: m.layer(x) * m.m, layer=nn.Linear(4, 4), m=nn.Parameter(torch.ones(1)))
        return Net(lambda m, x: m.child(x) * m.m, child=scaled, m=nn.Parameter(torch.ones(1) * 2))

    def backward(m, step):
        m(data(rank, step, width=4)).square().sum().backward()

    assert_like_reference(make, lambda m: shard(m, world), backward)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=fsdp_mesh(world)).to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    single = seeded(lambda: nn.Linear(4, 4))
    for m in (model, single):
        backward(m, 0)
        adamw(list(m.parameters())).step()
    equal({n: full(p) for n, p in model.named_parameters()}, dict(single.named_parameters()))
    assert (single.weight != seeded(lambda: nn.Linear(4, 4)).weight).all()


def _infinite() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.full((1,), torch.inf)
    return param


@pytest.mark.parametrize("second", ["plain", "another mesh", "a replicated unit"])
@on_ranks(4)
def test_clipping_over_parameters_of_different_kinds(rank, world, second):
    """torch's clipping refuses plain tensors or another mesh beside, on every rank; ours takes them."""
    single = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model, mesh = copy.deepcopy(single), hsdp_mesh()
    if second == "another mesh":
        fully_shard(model[1], mesh=fsdp_mesh(world))
    elif second == "a replicated unit":
        replicate(model[1], mesh=mesh)
    fully_shard(model[0], mesh=mesh)
    for m in (model, single):
        m(data(rank, 0, width=4)).square().sum().backward()
    if second == "plain":
        averaged(model[1])
        for p in model[1].parameters():
            p.grad /= world
    expected = averaged(single)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    params = list(model.parameters())
    if second != "a replicated unit":
        with pytest.raises((RuntimeError, ValueError), match=r"[Mm]esh|mixed torch.Tensor and DTensor"):
            nn.utils.clip_grad_norm_(params, 0.5)
    with pytest.raises(RuntimeError, match="norm of order inf"):
        clip_grad_norm_([*params, _infinite()], 0.5, torch.inf, error_if_nonfinite=True)
    close(clip_grad_norm_(params, 1e9), norm)
    close(clip_grad_norm_(params, 0.5), norm)
    close(gradients(model), {name: g * 0.5 / norm for name, g in expected.items()})


# ------------------------------------------------------------------------------------- optimizers, ties, copies, seeds


@on_ranks(2)
def test_an_optimizer_that_was_built_before_sharding_is_told(rank, world):
    model = seeded(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full(model.weight)
    fully_shard(model, mesh=fsdp_mesh(world))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"from before fully_shard.*\['weight', 'bias'\]"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    close(before - full(model.weight), torch.full((4, 4), 0.1))


def _tied() -> Net:
    e, o = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    o.weight = e.weight
    return Net(lambda m, tokens: m.o(m.l(m.e(tokens))), e=e, l=nn.Linear(4, 4), o=o)


@pytest.mark.parametrize("meta", [False, True])
@on_ranks(2)
def test_weights_tied_within_a_unit_stay_tied(rank, world, meta):
    single = seeded(_tied)
    with torch.device("meta" if meta else "cpu"):
        model = seeded(_tied)
    fully_shard(model, mesh=fsdp_mesh(world)).to_empty(device="cpu")
    model.load_state_dict(single.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    for step in range(2):
        for m in (model, single):
            m(torch.arange(3) + rank + step).square().sum().backward()
        for (name, g), p in zip(averaged(single).items(), model.parameters(), strict=True):
            close(full(p.grad), g)
            single.get_parameter(name).grad = g
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert model.e.weight is model.o.weight
        close({n: full(p) for n, p in model.named_parameters()}, dict(single.named_parameters()))


@on_ranks(2)
def test_tied_weights_in_two_units_are_refused_when_the_second_is_sharded(rank, world):
    model = _tied()
    fully_shard(model.e, mesh=fsdp_mesh(world))
    with pytest.raises(LayoutError, match=r"tied.*fully_shard\(\[a, b\]"):
        fully_shard(model.o, mesh=fsdp_mesh(world))
    assert type(model.o) is nn.Linear
    model.o.weight = model.e.weight  # tying the sharded one again doesn't go either
    for module in (model.o, model):
        with pytest.raises((LayoutError, MeshError)):
            fully_shard(module, mesh=fsdp_mesh(world))


@on_ranks(2)
def test_layers_sharded_one_by_one_are_never_taken_for_tied(rank, world):
    """Though the ids of the freed originals are used again."""
    model = nn.Sequential()
    for _ in range(20):
        model.append(fully_shard(seeded(lambda: nn.Linear(4, 4)), mesh=fsdp_mesh(world)))
        gc.collect()
    fully_shard(model, mesh=fsdp_mesh(world))(torch.ones(1, 4)).sum().backward()
    assert len([p for p in model.parameters() if p.grad is not None]) == 40


@on_ranks(2)
def test_an_average_of_uneven_weights(rank, world):
    """Kept as DTensors, or as local shards; either gives the whole tensor on every rank."""
    single = seeded(lambda: nn.Linear(4, 5))
    model = fully_shard(copy.deepcopy(single), mesh=fsdp_mesh(world))
    assert model.weight.to_local().shape == (3 - rank, 4)
    average, expected = model.weight.detach().clone(), single.weight.detach().clone()
    local = model.weight.to_local().detach().clone()
    for _ in range(3):
        with torch.no_grad():
            model.weight.mul_(2)
            single.weight.mul_(2)
            local.lerp_(model.weight.to_local(), 0.25)
        average.lerp_(model.weight.detach(), 0.25)
        expected.lerp_(single.weight.detach(), 0.25)
    equal(full(average), expected)
    p = model.weight
    again = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    equal(full(again), expected)


@on_ranks(2)
def test_initial_weights_that_differ_are_told_or_broadcast_before(rank, world):
    """Sharding sends no weights: replicas keep their own, and shards are rows of each rank's own."""

    def of_seed(seed):
        torch.manual_seed(seed)
        return nn.Linear(4, 4)

    x, meshes = torch.ones(1, 4), [hsdp_mesh(2, 1), fsdp_mesh(2)]
    for mesh in meshes:
        model = of_seed(rank)
        broadcast_module(model, mesh)
        fully_shard(model, mesh=mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            equal(model(x), of_seed(0)(x))
    replicas, mixed = [fully_shard(of_seed(rank), mesh=mesh) for mesh in meshes]
    for model in (replicas, mixed):
        with pytest.warns(UserWarning, match="different weights"):
            model(x)
    equal(replicas(x), of_seed(rank)(x))
    equal(full(mixed.weight), torch.cat([of_seed(0).weight[:2], of_seed(1).weight[2:]]))
