"""State dicts of sharded models: taken and loaded in every form, refused as a whole, written and read by DCP."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from hsdp_fn import LayoutError, RankMismatchError
from hsdp_fn_torch.facade import fully_shard
from hsdp_fn_torch.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    load_into,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.workers_facade import (
    OURS,
    THEIRS,
    Api,
    Boom,
    Tied,
    adamw,
    chain,
    data,
    full,
    mean_square,
    shard_blocks,
    tripwire,
)
from tests.workers_torch import (
    WIDTH,
    Chain,
    chunk,
    equal,
    fsdp_mesh,
    hsdp_mesh,
    integers_,
    mesh_for,
    on_ranks,
)


def sharded(world: int, seed: int | None = None, **options) -> Chain:
    model = chain() if seed is None else integers_(chain(), seed)
    return shard_blocks(OURS, model, mesh_for(world), **options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under all its names, gathered."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: full(t) for name, t in named}


def plain(seed: int, make=chain) -> dict[str, torch.Tensor]:
    """The state dict of an unsharded model, the same on every rank."""
    return integers_(make(), seed).state_dict()


def memory(model: nn.Module) -> dict[str, tuple[int, int, bytes]]:
    """Identity, address and bytes of what this rank holds."""
    found = {}
    for m_name, m in model.named_modules(remove_duplicate=False):
        for name, t in (m._parameters | m._buffers).items():
            if t is None:
                continue
            rows = t._local_tensor if isinstance(t, DTensor) else t.detach()
            data = b"" if rows.is_meta else rows.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{m_name}.{name}"] = (id(t), 0 if rows.is_meta else rows.data_ptr(), data)
    return found


@contextlib.contextmanager
def refused(model: nn.Module, error: type[Exception], match: str = ""):
    """It raises, and what the model holds is the same to the byte and in the same place."""
    before = memory(model)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert memory(model) == before


# ------------------------------------------------------------------------------------------------------------ getting


@on_ranks(2, 4)
def test_default_gives_dtensors_that_alias_the_shards(rank, world):
    model = sharded(world)
    found = get_model_state_dict(model)
    params = dict(model.named_parameters())
    assert list(found) == list(params)
    for name, p in params.items():
        assert isinstance(found[name], DTensor) and found[name].placements == p.placements
        assert found[name].to_local().data_ptr() == p.to_local().data_ptr() or p.to_local().numel() == 0
    optimizer = adamw(list(model.parameters()))
    out = mean_square(model, data(rank, 0))
    between = get_model_state_dict(model)  # between forward and backward
    assert all(isinstance(v, DTensor) for v in between.values())
    out.backward()
    optimizer.step()
    for state in (found, between):
        equal({n: full(v) for n, v in state.items()}, whole(model))


@on_ranks(2)
def test_the_forms_of_a_model_state_dict(rank, world):
    model = sharded(world)
    expected = whole(model)
    shards = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(v, DTensor) and v.to_local().device.type == "cpu" for v in shards.values())
    everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert not any(isinstance(v, DTensor) for v in everywhere.values())
    equal(everywhere, expected)
    one = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    equal(one, expected if rank == 0 else {})
    with CommDebugMode() as issued:
        get_model_state_dict(model)
        get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert issued.get_total_counts() == 0
    for f in (
        lambda o: get_model_state_dict(model, options=o),
        lambda o: set_model_state_dict(model, everywhere, options=o),
    ):
        with refused(model, ValueError, "full_state_dict must be True"):
            f(StateDictOptions(broadcast_from_rank0=True))


@on_ranks(2)
def test_frozen_parameters_are_left_out_under_all_names(rank, world):
    model = Tied()
    model.embed.weight.requires_grad_(False)
    fully_shard(model, mesh=fsdp_mesh(world))
    options = StateDictOptions(ignore_frozen_params=True)
    found = get_model_state_dict(model, options=options)
    assert sorted(found) == [n for n in sorted(model.state_dict()) if n.startswith("block")]
    # It has no say in loading: what isn't there is missing.
    with refused(model, RuntimeError, r'Missing key\(s\) in state_dict: "embed.weight", "head.weight"'):
        set_model_state_dict(model, found, options=options)
    assert not set_model_state_dict(model, model.state_dict(), options=options).missing_keys


# ------------------------------------------------------------------------------------------------------------ setting


@on_ranks(2, 4)
def test_whole_tensors_are_cut_without_communication(rank, world):
    model, wanted = sharded(world), plain(7)
    before = {n: v.clone() for n, v in wanted.items()}
    kept = [(id(p), p.to_local().data_ptr()) for p in model.parameters()]
    with CommDebugMode() as issued:
        result = load_into(model, wanted)
    assert issued.get_total_counts() == 0
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert [(id(p), p.to_local().data_ptr()) for p in model.parameters()] == kept
    equal(whole(model), wanted)
    equal(wanted, before)
    set_model_state_dict(model, plain(8), options=StateDictOptions(full_state_dict=True))
    equal(whole(model), plain(8))


@on_ranks(2)
def test_only_rank_0_has_the_tensors(rank, world):
    model, wanted = sharded(world), plain(7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    kept = [(id(p), p.to_local().data_ptr()) for p in model.parameters()]
    set_model_state_dict(model, wanted if rank == 0 else {}, options=options)
    equal(whole(model), wanted)
    assert [(id(p), p.to_local().data_ptr()) for p in model.parameters()] == kept
    del wanted["last.bias"]
    with refused(model, RuntimeError, 'Missing.*"last.bias"'):
        set_model_state_dict(model, wanted if rank == 0 else {}, options=options)
    with refused(model, LayoutError, "DTensors for"):
        set_model_state_dict(model, model.state_dict() if rank == 0 else {}, options=options)
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    result = set_model_state_dict(model, plain(9) | {"more": torch.ones(2)} if rank == 0 else {}, options=loose)
    assert (result.missing_keys, result.unexpected_keys) == ([], ["more"])
    equal(whole(model), plain(9))


@on_ranks(2, 4)
def test_shards_and_dtensors_of_other_placements(rank, world):
    model, wanted, mesh = sharded(world), plain(7), mesh_for(world)
    at = mesh.get_local_rank(mesh.ndim - 1)
    load_into(model, {n: chunk(v, 2, 0)[at].clone() for n, v in wanted.items()})
    equal(whole(model), wanted)
    wanted = plain(8)
    outer = [Replicate()] * (mesh.ndim - 1)
    for other in (Replicate(), Shard(0)):
        load_into(
            model, {n: distribute_tensor(v, model.first.weight.device_mesh, [*outer, other]) for n, v in wanted.items()}
        )
        equal(whole(model), wanted)
    wanted = plain(9)
    mixed = {
        n: v if i % 2 else distribute_tensor(v, mesh, [*outer, Shard(v.ndim - 1)])
        for i, (n, v) in enumerate(wanted.items())
    }
    set_model_state_dict(model, mixed)
    equal(whole(model), wanted)


@on_ranks(2)
def test_every_problem_is_named_before_anything_changes(rank, world):
    model = sharded(world)
    good = plain(7)
    bad = {n: v for n, v in good.items() if n != "layers.1.up.bias"} | {
        "typo": torch.ones(1),
        "first.x.y": torch.ones(1),
    }
    strict_match = (
        r"Error\(s\) in loading state_dict for Chain:\n\tMissing key\(s\) in state_dict: \"layers.1.up.bias\". \n"
        r"\tUnexpected key\(s\) in state_dict: \"typo\", \"first.x.y\". "
    )
    for load in (load_into, set_model_state_dict):
        with refused(model, RuntimeError, strict_match):
            load(model, bad)
    for full_option in (False, True):
        with refused(model, RuntimeError, "Missing"):
            set_model_state_dict(model, bad, options=StateDictOptions(full_state_dict=full_option))
    with refused(model, RuntimeError, "Missing"):
        load_into(model, {})

    local = tuple(model.last.weight.to_local().shape)
    wrong = good | {"last.weight": torch.ones(3, 5), "first.bias": torch.ones(1)}
    with refused(model, ValueError) as caught:
        load_into(model, wrong)
    for part in ("'last.weight'", "'first.bias'", "(3, 5)", "(3, 6)", str(local)):
        assert part in str(caught.value), part
    mesh = fsdp_mesh(world)
    other = hsdp_mesh(1, 2)
    for value, match in (
        (
            distribute_tensor(good["last.weight"], other, [Replicate(), Shard(0)]),
            "'last.weight': expected a DTensor on",
        ),
        (distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]), r"'last.weight': expected a DTensor of shape \(3, 6\)"),
        (DTensor.from_local(torch.ones(3, 6), mesh, [Partial()]), "expected placements"),
        ("three", "expected a tensor, found str"),
        (torch.ones(3, 6, device="meta"), "meta device"),
    ):
        with refused(model, LayoutError, match):
            load_into(model, good | {"last.weight": value})
    shard = good | {"last.weight": chunk(good["last.weight"], 2, 0)[rank]}
    with refused(model, (LayoutError, RankMismatchError), "last.weight"):
        set_model_state_dict(model, shard, options=StateDictOptions(full_state_dict=True))
    with refused(model, TypeError, "dict-like"):
        load_into(model, [1])


@on_ranks(2)
def test_one_rank_with_a_problem_stops_all(rank, world):
    model, good = sharded(world), plain(7)
    mine = good if rank == 0 else {n: v for n, v in good.items() if n != "last.bias"}
    error, match = (RankMismatchError, "rank 1 met RuntimeError: .*") if rank == 0 else (RuntimeError, "Missing")
    with refused(model, error, match) as caught:
        set_model_state_dict(model, mine)
    assert "last.bias" in str(caught.value)
    with refused(model, RankMismatchError, "other keys"):
        set_model_state_dict(model, mine, options=StateDictOptions(strict=False))


@on_ranks(2)
def test_loosely(rank, world):
    model, wanted = sharded(world), plain(7)
    before = whole(model)
    some = {n: v for n, v in wanted.items() if n.startswith("layers")}
    result = load_into(model, some | {"more": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert result.unexpected_keys == ["more"]
    equal(whole(model), before | some)


class Odd(nn.Module):
    """Buffers, an ignored parameter, a norm with its own loader, None entries, a child that appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 5, bias=False)
        self.again = self.a
        self.norm = nn.BatchNorm1d(5)
        self.alone = nn.Parameter(torch.zeros(5))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x):
        return self.norm(self.a(x)) * self.scale + self.alone


def odd(world: int, **options) -> Odd:
    model = Odd()
    return fully_shard(model, mesh=mesh_for(world), ignored_params=[model.alone], **options)


@on_ranks(2)
def test_what_is_not_sharded_is_loaded_as_ever(rank, world):
    source = integers_(Odd(), 5)
    source.norm.running_mean.fill_(3)
    source.scale.fill_(2)
    model = odd(world)
    load_into(model, source.state_dict())
    equal(whole(model), whole(source))
    old = {n: v for n, v in source.state_dict().items() if n != "norm.num_batches_tracked"}
    load_into(model, dict(old))  # BatchNorm's own rule for dicts without versions
    with refused(model, RuntimeError, "size mismatch for alone"):
        load_into(model, source.state_dict() | {"alone": torch.ones(4), "a.weight": torch.ones(5, WIDTH)})
    state = source.state_dict()
    state["scale"] = torch.full((1,), 4.0)  # as saved by very old torch
    load_into(model, state)
    assert model.scale.item() == 4


@on_ranks(2)
def test_size_mismatches_of_plain_targets_in_one_error(rank, world):
    model = nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=fsdp_mesh(world)), nn.Linear(3, 2))
    with refused(model, RuntimeError) as caught:
        load_into(model, {"0.weight": torch.ones(9), "0.bias": torch.ones(3), "1.weight": torch.ones(3, 3), "x": 1})
    for part in ("Missing", '"1.bias"', "Unexpected", '"x"', "size mismatch for 1.weight", "'0.weight'", "(9,)"):
        assert part in str(caught.value), part
    with refused(model, RuntimeError, "found a DTensor"):
        load_into(model, model.state_dict() | {"1.weight": model[0].weight})
    wanted = {k: torch.full(v.shape, 2.0) for k, v in model.state_dict().items()}
    load_into(model, wanted)
    equal(whole(model), wanted)


# ----------------------------------------------------------------------------------------------- hooks and overrides


class Custom(nn.Module):
    """Takes its weight under an old name, transposed; has extra state; counts its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, WIDTH))
        self.extra, self.seen = 0, []
        self.register_load_state_dict_pre_hook(self._pre)
        self.register_load_state_dict_post_hook(self._post)

    @staticmethod
    def _pre(module, state_dict, prefix, *others):
        module.seen.append("pre")
        if prefix + "old" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "old").t()

    @staticmethod
    def _post(module, keys):
        module.seen.append("post")
        module.seen.append(float(module.weight.to_local().abs().sum()))
        for key in [k for k in keys.missing_keys if k.endswith("optional")]:
            keys.missing_keys.remove(key)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if state == "boom":
            raise Boom("extra")
        self.extra = state


class Split(nn.Module):
    """Its loader makes two parameters of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        if prefix + "qk" in state_dict:
            state_dict[prefix + "q"], state_dict[prefix + "k"] = state_dict.pop(prefix + "qk").chunk(2)
        super()._load_from_state_dict(state_dict, prefix, *others)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.custom, self.split = nn.Linear(2, 3), Custom(), Split()


@on_ranks(2)
def test_hooks_overrides_and_extra_state_run(rank, world):
    model = fully_shard(Model(), mesh=fsdp_mesh(world))
    source = integers_(Model(), 4)
    source.custom.extra = 5
    load_into(model, source.state_dict())
    equal(whole(model), whole(source))
    assert model.custom.extra == 5
    mine = float(model.custom.weight.to_local().abs().sum())
    assert model.custom.seen == ["pre", "post", mine] and mine > 0  # the post-hook sees what was loaded

    state = integers_(source, 6).state_dict()
    state["custom.old"] = state.pop("custom.weight").t()
    state["split.qk"] = torch.cat([state.pop("split.q"), state.pop("split.k")])
    load_into(model, state)
    equal(whole(model), whole(source))
    before_hooks = dict(model.custom._load_state_dict_pre_hooks)
    assert len(before_hooks) == 1

    for change, error, match in (
        ({"custom._extra_state": "boom"}, Boom, "extra"),
        ({"typo": torch.ones(1)}, RuntimeError, "typo"),
        ({"custom.old": torch.ones(4, 4)}, LayoutError, "custom.weight"),
        ({"first.weight": torch.ones(7)}, LayoutError, "first.weight"),
    ):
        for load in (load_into, set_model_state_dict):
            with refused(model, error, match):
                load(model, {n: v + 1 if isinstance(v, torch.Tensor) else v for n, v in state.items()} | change)
    assert dict(model.custom._load_state_dict_pre_hooks) == before_hooks
    with refused(model, RankMismatchError if rank == 0 else Boom):
        set_model_state_dict(
            model, state | {"custom._extra_state": "boom" if rank == 1 else 6, "first.bias": torch.ones(3)}
        )


class Overriding(nn.Module):
    """A model with a load_state_dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict({k.removeprefix("wrapped."): v for k, v in state_dict.items()}, strict=strict)


@on_ranks(2)
def test_a_load_state_dict_of_the_class_runs(rank, world):
    model = fully_shard(Overriding(), mesh=fsdp_mesh(world))
    wanted = {"linear.weight": torch.randn(3, 3), "linear.bias": torch.randn(3)}
    dist.broadcast(wanted["linear.weight"], 0)
    dist.broadcast(wanted["linear.bias"], 0)
    load_into(model, {f"wrapped.{n}": v for n, v in wanted.items()})
    equal(whole(model), wanted)


@on_ranks(2)
def test_wrapped_modules(rank, world):
    """Names go without the wrappers of activation checkpointing and torch.compile."""
    for how in ("checkpoint", "compile", "outside"):
        model = chain()
        names = list(model.state_dict())
        if how == "checkpoint":
            model.layers[1] = checkpoint_wrapper(model.layers[1])
        elif how == "compile":
            model.layers[1] = torch.compile(model.layers[1], backend="eager")
        fully_shard(model, mesh=fsdp_mesh(world))
        outer = torch.compile(model, backend="eager") if how == "outside" else model
        assert sorted(get_model_state_dict(outer)) == sorted(names), how
        for options in (None, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
            wanted = plain(7 if options else 8)
            set_model_state_dict(outer, wanted, options=options)
            found = get_model_state_dict(outer, options=StateDictOptions(full_state_dict=True))
            equal(found, wanted, how)


# --------------------------------------------------------------------------------------------------- assign and meta


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_meta_parameters_are_materialized(rank, world, assign):
    with torch.device("meta"):
        model = chain()
    shard_blocks(OURS, model, fsdp_mesh(world))
    wanted = plain(7)
    load_into(model, {n: v.to("meta") for n, v in wanted.items()}, assign=True)
    with refused(model, RuntimeError, "Missing"):
        load_into(model, {n: v for n, v in wanted.items() if n != "first.bias"}, assign=assign)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some = {n: v for n, v in wanted.items() if n.startswith("layers")}
        load_into(model, some, strict=False, assign=assign)  # piecewise
        assert model.first.weight.is_meta and not model.layers[0].up.weight.is_meta
        load_into(model, {n: v for n, v in wanted.items() if n not in some}, strict=False, assign=assign)
    equal(whole(model), wanted)
    single = chain()
    single.load_state_dict(wanted)
    x = data(rank, 0)
    equal([model(x)], [single(x)])
    model(x).sum().backward()
    equal(whole(model), wanted)


@on_ranks(2)
def test_assigned_parameters_are_trained(rank, world):
    model, wanted = sharded(world), plain(7)
    model(data(rank, 0)).sum().backward()
    state = plain(7)
    old = dict(model.named_parameters())
    load_into(model, {n: v.to(torch.float64) for n, v in state.items()}, assign=True)
    load_into(model, state, assign=True)
    assert not any("assign_to_params_buffers" in m for m in state._metadata.values())
    assert all(p is not old[n] and p.dtype == torch.float32 for n, p in model.named_parameters())
    equal(whole(model), wanted)
    x = data(rank, 1)
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.step()
    equal(state, wanted)  # the caller's tensors aren't trained
    assert all(not torch.equal(full(p), wanted[n]) for n, p in model.named_parameters() if "last.bias" in n)
    chain().load_state_dict(state, assign=True)  # torch leaves its mark in the dict
    params = list(model.parameters())
    load_into(model, state)
    assert all(p is old for p, old in zip(model.parameters(), params, strict=True))
    frozen = sharded(world)
    frozen.first.weight.requires_grad_(False)
    load_into(frozen, state, assign=True)
    assert not frozen.first.weight.requires_grad and frozen.first.bias.requires_grad


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_tied_names(rank, world, assign):
    model = fully_shard(Tied(), mesh=fsdp_mesh(world))
    wanted = plain(3, Tied)
    load_into(model, wanted, assign=assign)
    equal(whole(model), wanted)
    assert model.head.weight is model.embed.weight
    part = plain(4, Tied)
    del part["embed.weight"]
    with refused(model, RuntimeError, 'Missing.*"embed.weight"'):
        load_into(model, part, assign=assign)
    assert load_into(model, part, strict=False, assign=assign).missing_keys == ["embed.weight"]
    assert model.head.weight is model.embed.weight
    equal(whole(model), plain(4, Tied))
    tokens = torch.arange(7)
    single = Tied()
    single.load_state_dict(plain(4, Tied))
    equal([model(tokens)], [single(tokens)])


@on_ranks(2)
def test_loading_between_forward_and_backward(rank, world):
    model = sharded(world)
    loss = model(data(rank, 0)).sum()
    load_into(model, plain(7))
    del loss
    single = chain()
    single.load_state_dict(plain(7))
    equal([model(data(rank, 1))], [single(data(rank, 1))])


@on_ranks(2)
def test_loading_after_a_backward_that_failed(rank, world):
    model = sharded(world)
    with tripwire(model.layers[1], "backward"), contextlib.suppress(Boom):
        model(data(rank, 0)).sum().backward()
    with pytest.warns(UserWarning, match="the last backward stopped in unit"):
        load_into(model, plain(7))
    equal(whole(model), plain(7))
    single = chain()
    single.load_state_dict(plain(7))
    equal([model(data(rank, 1))], [single(data(rank, 1))])


@on_ranks(4)
def test_columns_and_replicated_parameters(rank, world):
    model = chain()
    place = lambda p: Shard(1) if p.ndim == 2 else None  # noqa: E731
    fully_shard(model, mesh=hsdp_mesh(), shard_placement_fn=place, replicate_params=[model.last.bias])
    for seed, values in ((7, plain(7)), (8, {n: chunk(v, 2, v.ndim - 1)[rank % 2] for n, v in plain(8).items()})):
        values["last.bias"] = plain(seed)["last.bias"]
        load_into(model, values)
        equal(whole(model), plain(seed))
    set_model_state_dict(model, plain(9), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    equal(whole(model), plain(9))
    load_into(model, plain(10), assign=True)
    assert all(p.to_local().is_contiguous() for p in model.parameters())
    equal(whole(model), plain(10))


@on_ranks(2)
def test_some_parameters_of_a_module_on_meta(rank, world):
    mesh = fsdp_mesh(world)
    model = fully_shard(nn.Linear(3, 3, device="meta"), mesh=mesh)
    root = nn.Sequential(model, nn.Linear(3, 2, device="meta"))
    load_into(root, {"0.weight": torch.zeros(3, 3)}, strict=False)
    weight = model.weight
    assert model.bias.is_meta
    wanted = {"0.weight": torch.ones(3, 3), "0.bias": torch.arange(3.0)}
    assert load_into(root, wanted, strict=False).missing_keys == ["1.weight", "1.bias"]
    assert model.weight is weight and not model.bias.is_meta and root[1].bias.is_meta
    equal({f"0.{n}": v for n, v in whole(model).items()}, wanted)


# ---------------------------------------------------------------------------------------------------------------- DCP


def trained(model: nn.Module, rank: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = adamw([p for p in model.parameters()])
    for step in range(steps):
        inputs = torch.arange(7) if hasattr(model, "embed") else data(rank, step)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def make(kind: str, api: Api, world: int, replicate: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Tied() if kind == "tied" else chain()
    if kind == "frozen":
        model.layers[0].up.weight.requires_grad_(False)
    mesh = hsdp_mesh(2, world // 2) if replicate else fsdp_mesh(world)
    if kind == "tied":
        return api.fully_shard(model, mesh=mesh)
    return shard_blocks(api, model, mesh)


def write(rank, world, path, kind, api, replicate):
    model = make(kind, api, world, replicate)
    optimizer = trained(model, rank)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if api is THEIRS:
        state = dict(zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path / "checkpoint")
    fulls = whole_state(model, optimizer)
    if rank == 0:
        torch.save(fulls, path / "expected.pt")


def whole_state(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    return (
        torchs.get_model_state_dict(model, options=options),
        torchs.get_optimizer_state_dict(model, optimizer, options=options),
    )


def read(rank, world, path, kind, api, replicate):
    model = make(kind, api, world, replicate)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    optimizer = adamw(list(model.parameters()))
    get_model, get_optimizer = get_model_state_dict, get_optimizer_state_dict
    set_model, set_optimizer = set_model_state_dict, set_optimizer_state_dict
    if api is THEIRS:
        get_model, get_optimizer = torchs.get_model_state_dict, torchs.get_optimizer_state_dict
        set_model, set_optimizer = torchs.set_model_state_dict, torchs.set_optimizer_state_dict
    state = {"model": get_model(model), "optimizer": get_optimizer(model, optimizer)}
    dcp.load(state, checkpoint_id=path / "checkpoint")
    set_model(model, state["model"])
    set_optimizer(model, optimizer, state["optimizer"])
    found, expected = whole_state(model, optimizer), torch.load(path / "expected.pt")
    equal(found[0], expected[0])
    assert found[1]["state"].keys() == expected[1]["state"].keys()
    assert len(found[1]["state"]) == sum(p.requires_grad for p in model.parameters())
    for name, slots in expected[1]["state"].items():
        equal(found[1]["state"][name], slots, name)
    trained(model, rank, steps=1)  # and it goes on


@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("chain", (4, False), (2, False)),
        ("chain", (2, False), (4, False)),
        ("chain", (4, True), (4, False)),
        ("frozen", (4, True), (2, False)),
        ("tied", (4, False), (2, False)),
        ("tied", (2, False), (4, True)),
    ],
)
def test_checkpoints_are_resharded(gloo, tmp_path, kind, before, after):
    gloo.run(write, tmp_path, kind, OURS, before[1], world=before[0])
    gloo.run(read, tmp_path, kind, OURS, after[1], world=after[0])


@pytest.mark.parametrize("kind", ["chain", "tied"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_are_exchanged_with_torch(gloo, tmp_path, kind, ours_first):
    first, second = (OURS, THEIRS) if ours_first else (THEIRS, OURS)
    gloo.run(write, tmp_path, kind, first, False, world=2)
    gloo.run(read, tmp_path, kind, second, False, world=2)


@on_ranks(2)
def test_whole_optimizer_states(rank, world):
    model = sharded(world)
    optimizer = trained(model, rank)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    expected = copy.deepcopy(state)
    trained_more = trained(model, rank)
    set_optimizer_state_dict(model, trained_more, state, options=options)
    found = get_optimizer_state_dict(model, trained_more, options=options)
    for name, slots in expected["state"].items():
        equal(found["state"][name], slots, name)
    one = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(one) == (rank == 0)


@on_ranks(2)
def test_the_first_optimizer_state_leaves_the_weights_alone(rank, world):
    model = sharded(world)
    before = memory(model)
    get_optimizer_state_dict(model, adamw(list(model.parameters()), weight_decay=0.1))
    assert memory(model) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("load", [load_into, nn.Module.load_state_dict, set_model_state_dict])
@on_ranks(2)
def test_loading_inside_a_forward_or_backward_is_refused(rank, world, load, where):
    """Taking a state dict there is fine: the sharded parameters are put in place for it."""
    model, twin = sharded(world, 1), sharded(world, 1)
    values = {name: 2 * full(value) for name, value in model.state_dict().items()}
    met = []

    def meddle(*_):
        met.append({name: full(value) for name, value in get_model_state_dict(model).items()})
        with pytest.raises(RuntimeError, match="can't be loaded inside a forward or backward"):
            model.load_state_dict(values) if load is nn.Module.load_state_dict else load(model, values)

    layer = model.layers[0].up
    if where == "forward":
        layer.register_forward_hook(meddle)
    else:
        layer.register_full_backward_hook(meddle)
    for m in (model, twin):
        mean_square(m, data(rank, 0)).backward()
    assert len(met) == 1
    equal([2 * v for v in met[0].values()], list(values.values()))
    equal([full(p.grad) for p in model.parameters()], [full(p.grad) for p in twin.parameters()])
    model.load_state_dict(values)
    equal([full(v) for v in model.state_dict().values()], list(values.values()))
