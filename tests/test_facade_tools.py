"""What is used on sharded models and beside them: norms, scalers, offload, `replicate`, tensor parallelism, names."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate_with_fsdp import replicate as torchs_replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hsdp_fn import CPUOffloadPolicy, MixedPrecisionPolicy
from hsdp_fn_torch import HSDPModule, ReplicateModule, compat, fully_shard, hsdp_sync_stream, replicate
from tests.workers_facade import (
    OURS,
    THEIRS,
    Trace,
    adamw,
    assert_parity,
    chain,
    data,
    full,
    mean_square,
    shard_blocks,
    train,
)
from tests.workers_torch import WIDTH, Chain, close, counts, equal, fsdp_mesh, mesh_for, on_ranks


def sharded(world: int, **options) -> Chain:
    return shard_blocks(OURS, chain(), mesh_for(world), **options)


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


# -------------------------------------------------------------------------------------------- gradients and optimizers


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(2, 4)
def test_the_norm_is_a_dtensor_and_takes_one_all_reduce(rank, world, norm_type):
    mesh = mesh_for(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        mean_square(model, data(rank, 0)).backward()
        with CommDebugMode() as comm:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)
            trace.note("kind", isinstance(norm, DTensor))
            trace.note("norm", full(norm))
        trace.note("collectives", {str(op): n for op, n in comm.get_comm_counts().items()})
        trace.note_grads(model)
        whole = torch.stack([g.norm(norm_type) for g in grads(model).values()]).norm(norm_type)
        close(whole, torch.tensor(0.01), 1e-4)
        return trace

    found = dict(assert_parity(run).records)
    assert found["kind"] is True
    assert sum(found["collectives"].values()) > 0


@pytest.mark.parametrize("where", [0, 1, None])
@on_ranks(2, 4)
def test_an_inf_on_one_rank_is_seen_by_all_scalers(rank, world, where):
    """All skip that step and halve the scale, though only one rank's shard shows it (and its replica's)."""
    mesh = mesh_for(world)

    def run(api):
        model, trace = shard_blocks(api, chain(), mesh), Trace()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in range(2):
            scaler.scale(mean_square(model, data(rank, step))).backward()
            if step == 1 and rank % 2 == where:
                model.layers[1].up.weight.grad.to_local()[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            if step == 0:
                trace.note_grads(model)
            trace.note_params(model)
            scaler.step(optimizer)
            scaler.update()
            trace.note_params(model)
            trace.note("scale", scaler.get_scale())
            optimizer.zero_grad()
        return trace

    trace = assert_parity(run)
    assert [v for what, v in trace.records if what == "scale"] == [1024.0, 1024.0 if where is None else 512.0]
    n = len(list(chain().parameters()))
    before, after = trace.records[-2 * n - 1 : -n - 1], trace.records[-n - 1 : -1]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)) == (where is not None)


@on_ranks(2)
def test_an_inf_in_a_loss_is_seen_by_all_scalers(rank, world):
    model = sharded(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [full(p) for p in model.parameters()]
    loss = mean_square(model, data(rank, 0))
    scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    equal([full(p) for p in model.parameters()], before)


@on_ranks(2)
def test_foreach_fused_and_plain_optimizers_agree(rank, world):
    def run(**options):
        return train(sharded(world), rank, make_optimizer=lambda params: adamw(params, **options), steps=3)

    plain = [v for _, v in run(foreach=False).records]
    equal([v for _, v in run(foreach=True).records], plain)
    close([v for _, v in run(fused=True).records], plain, 1e-5)


@on_ranks(2, 4)
def test_zero_grad_drops_or_zeroes(rank, world):
    """By either name, for a part of the model, and between forward and backward."""
    model = sharded(world, reshard_after_forward=False)

    def fill():
        mean_square(model, data(rank, 0)).backward()
        assert all(p.grad is not None for p in model.parameters())

    fill()
    model.layers[0].zero_grad()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {
        n for n, _ in model.named_parameters() if n.startswith("layers.0.")
    }
    model.zero_grads()
    assert all(p.grad is None for p in model.parameters())
    fill()
    kept = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.to_local().any() for p, g in zip(model.parameters(), kept, strict=True))
    loss = mean_square(model, data(rank, 1))
    model.zero_grad()
    loss.backward()
    fresh = sharded(world)
    mean_square(fresh, data(rank, 1)).backward()
    equal(grads(model), grads(fresh))


@on_ranks(2)
def test_syncing_the_stream_waits_for_the_accelerator_only(rank, world):
    calls: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            calls.append("synchronize")

    assert hsdp_sync_stream() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", Stream)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        hsdp_sync_stream()
        assert calls == []
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        hsdp_sync_stream()
    assert calls == ["synchronize"]


# ------------------------------------------------------------------------------------------------------------- offload


@on_ranks(2, 4)
def test_offloaded_models_train_alike(rank, world):
    mesh = mesh_for(world)

    def run(api):
        make = torchs.CPUOffloadPolicy if api is THEIRS else CPUOffloadPolicy
        model = shard_blocks(api, chain(), mesh, offload_policy=make(pin_memory=False))
        optimizers = []

        def make_optimizer(params):
            optimizers.append(adamw(params))
            return optimizers[0]

        trace = train(model, rank, make_optimizer=make_optimizer, steps=3)
        for p in model.parameters():
            held = [p.to_local(), *(t for t in optimizers[0].state[p].values())]
            assert {t.device.type for t in held} == {"cpu"}
        return trace

    assert_parity(run)


@on_ranks(2)
def test_offloaded_parameters_elsewhere_are_named(rank, world):
    """Before the first forward, with the device on which each was found; putting them back is enough."""
    model = sharded(world, offload_policy=CPUOffloadPolicy(pin_memory=False))
    moved = {name: model.get_parameter(name) for name in ("layers.1.up.weight", "layers.1.down.bias")}
    here = {name: p._local_tensor for name, p in moved.items()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for p in moved.values():
            p._local_tensor = torch.empty(p.to_local().shape, device="cuda:0")
    with pytest.raises(RuntimeError) as caught:
        model(data(rank, 0))
    for name in moved:
        assert f"('{name}', 'cuda:0')" in str(caught.value)
    assert "layers.1.up.bias" not in str(caught.value)
    for name, p in moved.items():
        p._local_tensor = here[name]
    fresh = sharded(world)
    equal(model(data(rank, 0)), fresh(data(rank, 0)))


# ----------------------------------------------------------------------------------------------------------- replicate


@on_ranks(2, 4)
def test_replicate_trains_like_torchs_and_like_ddp(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))

    def run(api):
        apply = torchs_replicate if api is THEIRS else replicate
        model = chain()
        for layer in model.layers:
            apply(layer, mesh=mesh)
        return train(apply(model, mesh=mesh), rank, steps=3)

    trace = assert_parity(run)
    ddp = train(DistributedDataParallel(chain()), rank, steps=3)
    close([v for _, v in trace.records], [v for _, v in ddp.records], 1e-6)


@pytest.mark.parametrize("policy", [{"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {}])
@on_ranks(2)
def test_replicate_in_mixed_precision_and_with_held_back_gradients(rank, world, policy):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    micro = (lambda m: m.set_requires_gradient_sync(False), lambda m: m.set_requires_gradient_sync(True))

    def run(api):
        apply = torchs_replicate if api is THEIRS else replicate
        model = apply(chain(), mesh=mesh, mp_policy=api.MixedPrecisionPolicy(**policy))
        return train(model, rank, micro=micro, steps=2)

    assert_parity(run)


@on_ranks(2, 4)
def test_replicated_parameters_are_whole_and_all_reduced(rank, world):
    model, plain = chain(), chain()
    params = list(model.parameters())
    ignored = model.last.bias
    assert replicate(model, mesh=fsdp_mesh(world), ignored_params=[ignored]) is model
    assert type(model).__name__ == "ReplicateChain"
    assert isinstance(model, ReplicateModule) and isinstance(model, HSDPModule) and isinstance(model, Chain)
    assert type(model).__mro__[1] is ReplicateModule
    assert model.last.bias is ignored is params[-1]
    for p, q in zip(list(model.parameters())[:-1], list(plain.parameters())[:-1], strict=True):
        assert isinstance(p, DTensor)
        assert p.placements == (Replicate(),)
        equal(p.to_local(), q.detach())
    for _ in range(2):
        mean_square(model, data(rank, 0)).backward()
        assert counts(model.hsdp_state.ledger) == {"all_reduce": 1}
    with pytest.raises(AssertionError, match="once only"):
        replicate(model, mesh=fsdp_mesh(world))
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)


@on_ranks(2, group_intact=True)
def test_a_slice_of_a_replicated_sequential_is_plain(rank, world):
    model = replicate(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), mesh=fsdp_mesh(world))
    assert type(model[:2]) is nn.Sequential
    assert model[:2][0] is model[0]


@on_ranks(2, 4)
def test_replicated_and_sharded_modules_in_one_model(rank, world):
    """Blocks of both kinds below a sharded root, or below a replicated one."""
    mesh = mesh_for(world)

    def run(how):
        model = chain()
        for i, layer in enumerate(model.layers):
            (replicate if i in how else fully_shard)(layer, mesh=mesh)
        (replicate if "root" in how else fully_shard)(model, mesh=mesh)
        trace = train(model, rank, steps=3)
        return [v for _, v in trace.records], counts(model.hsdp_state.ledger), model

    expected, _, _ = run(())
    found, ledger, model = run((0, 2))
    close(found, expected, 1e-5)
    scatters = {"all_gather": 3, "reduce_scatter": 2}
    assert ledger == scatters | {"all_reduce": 4 if world == 4 else 2}
    whole = mesh.ndim * (Replicate(),)
    for name, p in model.named_parameters():
        assert (p.placements == whole) == name.startswith(("layers.0", "layers.2")), name
    if world == 2:
        found, ledger, _ = run((1, "root"))
        close(found, expected, 1e-5)
        assert ledger == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 2}


@on_ranks(2)
def test_modules_that_torch_replicates_are_left_alone(rank, world):
    model = chain()
    torchs_replicate(model.layers[1], mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",)))
    theirs = dict(model.layers[1].named_parameters())
    fully_shard(model, mesh=fsdp_mesh(world))
    assert all(p is theirs[n] for n, p in model.layers[1].named_parameters())
    assert all(p.placements == (Shard(0),) for n, p in model.named_parameters() if not n.startswith("layers.1."))


# ----------------------------------------------------------------------------------------------------- tensor parallel


class Normed(nn.Module):
    """A block whose norm can run on shards of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(Normed() for _ in range(2))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def parallel_net(tp: DeviceMesh, sequence: bool) -> Net:
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
                "": PrepareModuleInputOutput(
                    input_layouts=(Replicate(),),
                    desired_input_layouts=(Shard(0),),
                    use_local_input=True,
                    output_layouts=(Shard(0),),
                    desired_output_layouts=(Replicate(),),
                ),
            }
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, tp, plan)
    return net


MESHES = {
    "FSDP": ((2, 2), ("dp", "tp")),
    "HSDP that shards": ((1, 2, 2), ("rep", "dp", "tp")),
    "HSDP that replicates": ((2, 1, 2), ("rep", "dp", "tp")),
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", list(MESHES))
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
@on_ranks(4)
def test_tensor_parallel_models(rank, world, kind, options, sequence):
    shape, names = MESHES[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dp, tp = mesh[names[:-1]] if len(names) > 2 else mesh["dp"], mesh["tp"]

    def run(api):
        model = parallel_net(tp, sequence)
        before = [full(p) for p in model.parameters()]
        shard_blocks(api, model, dp, **options)
        trace = Trace()
        trace.note("placements", [(str(p.placements), p.device_mesh.mesh_dim_names) for p in model.parameters()])
        equal([full(p) for p in model.parameters()], before, "put together again")
        trace.records += train(model, rank // 2, steps=3).records
        return trace

    trace = assert_parity(run)
    torch.manual_seed(0)
    single = Net()
    optimizer = adamw(list(single.parameters()))
    for step in range(3):
        for r in range(2):
            (mean_square(single, data(r, 10 * step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    n = len(list(single.parameters()))
    close([v for _, v in trace.records[-n:]], [p.detach() for p in single.parameters()], 1e-4)


@on_ranks(4)
def test_tensor_parallel_models_with_held_back_gradients(rank, world):
    """They are summed over tensor-parallel ranks in every microbatch; torch does that once: equal but for rounding."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    micro = (lambda m: m.set_requires_gradient_sync(False), lambda m: m.set_requires_gradient_sync(True))

    def run(api):
        model = shard_blocks(api, parallel_net(mesh["tp"], True), mesh["dp"])
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        return train(model, rank // 2, micro=micro, steps=2, make_optimizer=sgd).records

    found, expected = dict(run(OURS)), dict(run(THEIRS))
    close(found, expected, 1e-6)
    assert found["gradient of layers.0.norm.weight"].count_nonzero()


class Scale(nn.Module):
    """A weight that all tensor-parallel ranks have, though each sees only its rows of the input."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(2), tp, [Replicate()]))
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return (DTensor.from_local(x, self.tp, [Shard(0)]) * self.weight).to_local()


@pytest.mark.parametrize("held_back", [False, True])
@on_ranks(4)
def test_partial_gradients_are_summed_in_the_reduce_dtype(rank, world, held_back):
    """1 from one tensor-parallel rank and 1/256 from the other: bfloat16 would round their sum to 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Scale(mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    x = torch.tensor([[1.0, 2.0]]) / (256 if rank % 2 else 1)
    for micro in range(2 if held_back else 1):
        model.set_requires_gradient_sync(not held_back or micro == 1)
        model(x).sum().backward()
    expected = torch.tensor([1.0, 2.0]) * (1 + 1 / 256) * (2 if held_back else 1)
    equal(full(model.weight.grad), expected)
    assert model.weight.grad.placements == model.weight.placements == (Shard(0), Replicate())


class Extended(Tensor):
    """A tensor subclass that says how it wants to be gathered."""

    def fsdp_pre_all_gather(self, mesh): ...

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None): ...


@on_ranks(2)
def test_all_gather_extensions_are_refused_by_name(rank, world):
    model = chain()
    model.last.weight = nn.Parameter(model.last.weight.detach().as_subclass(Extended))
    with pytest.raises(NotImplementedError, match=r"'last\.weight' is a Extended.*fsdp_pre_all_gather"):
        fully_shard(model, mesh=fsdp_mesh(world))
    fully_shard(model, mesh=fsdp_mesh(world), ignored_params=[model.last.weight])


@on_ranks(2, group_intact=True)
def test_all_gather_extensions_of_instances_are_refused(rank, world):
    """They come after sharding, so the first forward must tell."""
    model = fully_shard(chain(), mesh=fsdp_mesh(world))
    model.last.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    model.last.weight._local_tensor.fsdp_post_all_gather = lambda *args, out=None: None
    with pytest.raises(NotImplementedError, match=r"last\.weight"):
        model(data(rank, 0))


# --------------------------------------------------------------------------------------------------------------- names


def test_compat_has_the_names_of_fsdp2() -> None:
    from torch.distributed.fsdp import _fully_shard

    public = {name for name in vars(_fully_shard) if not name.startswith("_")} & set(torchs.__all__)
    assert public | {"ReplicateModule", "replicate"} == set(compat.__all__)
    assert all(getattr(compat, name) is not None for name in compat.__all__)
    assert compat.FSDPModule is HSDPModule


def test_names_of_fsdp1_say_what_to_use_instead() -> None:
    for name in ("FullyShardedDataParallel", "ShardingStrategy"):
        with pytest.raises(AttributeError, match=f"{name} belongs to FSDP1; use fully_shard"):
            getattr(compat, name)
    with pytest.raises(AttributeError, match="no attribute 'fullyshard'"):
        compat.fullyshard  # noqa: B018


@on_ranks(2)
def test_a_script_changes_its_imports_alone(rank, world):
    mesh = fsdp_mesh(world)

    def run(api):
        names = torchs if api is THEIRS else compat
        policy = names.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = chain()
        for layer in model.layers:
            names.fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=names.OffloadPolicy())
        names.fully_shard(model, mesh=mesh, mp_policy=policy)
        assert isinstance(model, names.FSDPModule)
        names.register_fsdp_forward_method(model, "forward")
        names.share_comm_ctx([model])
        assert isinstance(model.unshard(async_op=True), names.UnshardHandle)
        return train(model, rank, steps=2)

    assert_parity(run)
