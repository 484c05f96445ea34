"""Custom communication of single units: collectives, memory, groups, the hook, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hsdp_fn import BackendError, MixedPrecisionPolicy, PolicyError, ReductionPolicy, Replicate, Sync
from hsdp_fn import unit as on_unit
from hsdp_fn_torch import comm as comm_module
from hsdp_fn_torch.backend import TorchBackend
from hsdp_fn_torch.comm import AllGather, Comm, DefaultMemory, ReduceScatter, UnitBackend, UnitComm, separate_group
from hsdp_fn_torch.p2p import PointToPointAllGather, PointToPointReduceScatter
from tests.workers_comm import SHAPES, CountedGather, CountedScatter, Units, everything
from tests.workers_torch import equal, fsdp_mesh, hsdp_mesh, mesh_for, on_ranks


def same(a, b) -> None:
    """All tensors have the same dtype, shape and bits."""
    assert a.keys() == b.keys()
    for name in a:
        equal(dict(enumerate(a[name])), dict(enumerate(b[name])), name)


# ------------------------------------------------------------------------------------------------ custom collectives


@on_ranks(2, 4)
def test_custom_collectives_are_called_for_their_unit_only_and_change_no_bit(rank, world):
    gather, scatter = CountedGather(), CountedScatter()
    comm = UnitComm()
    comm.set_all_gather(gather)
    comm.set_reduce_scatter(scatter)
    mesh = mesh_for(world)
    default, custom = Units(mesh, floats=True), Units(mesh, {"c": comm}, floats=True)
    same(everything(custom, rank), everything(default, rank))
    bucket = custom.plans["c"].buckets[0]
    shard_size = bucket.mesh.shard_size
    numel = bucket.params.numel
    group = custom.base.group(bucket.mesh, bucket.mesh.shard)
    assert gather.calls == [{"sizes": (numel * shard_size, numel), "group": group}]
    sizes = (numel, numel * shard_size)
    assert scatter.calls == [{"sizes": sizes, "group": group, "op": dist.ReduceOp.SUM}]
    assert custom.log == default.log, "the ledger doesn't depend on who communicates"


@on_ranks(2, 4)
def test_a_gather_buffer_that_is_used_again_leaves_parameters_alone(rank, world):
    gather = CountedGather()
    units = Units(fsdp_mesh(world), {"b": UnitComm(all_gather=gather)})  # one parameter: it lies in place
    plan, backend = units.plans["b"], units.backends["b"]
    unit = on_unit.finish_gather(on_unit.start_gather(units.units["b"], plan, backend, []), plan, backend)
    for buffer in gather.kept.values():
        buffer.fill_(-77.0)
    equal(unit.full[0], units.params["b.w"])


@on_ranks(2)
def test_collectives_on_default_memory_hand_their_output_on(rank, world):
    units = Units(fsdp_mesh(world), {"b": UnitComm(all_gather=PointToPointAllGather())})
    plan, backend = units.plans["b"], units.backends["b"]
    flying = on_unit.start_gather(units.units["b"], plan, backend, [])
    unit = on_unit.finish_gather(flying, plan, backend)
    assert unit.full[0].data_ptr() == flying.full.outputs[0].data_ptr()


@on_ranks(2)
def test_without_zero_copy_neither_end_shares_memory(rank, world):
    comm = UnitComm()
    for zero_copy in (True, False):
        comm.set_zero_copy(zero_copy)
        units = Units(fsdp_mesh(world), {"b": comm})
        plan, backend = units.plans["b"], units.backends["b"]
        flying = on_unit.start_gather(units.units["b"], plan, backend, [])
        assert (flying.full.keepalive[0] is units.units["b"].master[0]) == zero_copy
        unit = on_unit.finish_gather(flying, plan, backend)
        assert (unit.full[0].data_ptr() == flying.full.outputs[0].data_ptr()) == zero_copy
        equal(unit.full[0], units.params["b.w"])


@on_ranks(2)
def test_an_edit_of_what_was_gathered_without_zero_copy_never_reaches_the_masters(rank, world):
    units = Units(hsdp_mesh(2, 1), {name: UnitComm(zero_copy=False) for name in SHAPES})  # no gather at all
    for name, plan in units.plans.items():
        backend = units.backends[name]
        unit = on_unit.finish_gather(on_unit.start_gather(units.units[name], plan, backend, []), plan, backend)
        unit.full[0].fill_(-77.0)
        assert not (unit.master[0] == -77.0).any()


class Broken:
    """An object that fails in one of its parts."""

    def __init__(self, part: str) -> None:
        self.part = part

    def allocate(self, size, *, dtype, device):
        if self.part == "allocate":
            raise RuntimeError("no memory for you")
        if self.part == "shape":
            return torch.empty(3, 3)
        if self.part == "dtype":
            return torch.empty(size, dtype=torch.float64)
        return torch.empty(size, dtype=dtype)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if self.part == "call":
            raise RuntimeError("no such network")
        return "done" if self.part == "handle" else None


@on_ranks(2)
def test_a_custom_object_that_fails_leaves_the_unit_as_it_was(rank, world):
    expected = everything(Units(fsdp_mesh(world)), rank)["c"]
    for part in ("allocate", "shape", "dtype", "call", "handle"):
        error = RuntimeError if part in ("allocate", "call") else BackendError
        match = {"allocate": "no memory", "call": "no such network", "handle": "wait"}.get(part, r"Broken.allocate\(\(")
        comm = UnitComm(all_gather=Broken(part), reduce_scatter=Broken(part))
        units = Units(fsdp_mesh(world), {"c": comm})
        with pytest.raises(error, match=match):
            units.gather("c")
        with pytest.raises(error, match=match):
            units.reduce("c", rank)
        comm.set_all_gather(None)
        comm.set_reduce_scatter(None)
        same({"c": units.gather("c")}, {"c": expected[:3]})
        units.reduce("c", rank)
        same({"c": units.flats("c")}, {"c": expected[3:]})


class Late:
    """Decompresses in wait(), which must therefore run once."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        half = torch.empty_like(output_tensor)
        work = dist.all_gather_single(half, input_tensor / 2, group=group, async_op=True)
        output_tensor.zero_()

        class Handle:
            def wait(self):
                work.wait()
                output_tensor.add_(half, alpha=2.0)

        return Handle()


@on_ranks(2)
def test_a_custom_handle_is_awaited_once_however_often_states_wait(rank, world):
    units = Units(fsdp_mesh(world), {"b": UnitComm(all_gather=Late())})
    plan, backend = units.plans["b"], units.backends["b"]
    flying = on_unit.start_gather(units.units["b"], plan, backend, [])
    on_unit.finish_gather(flying, plan, backend)
    equal(on_unit.finish_gather(flying, plan, backend).full[0], units.params["b.w"])


@on_ranks(2)
def test_units_without_anything_special_use_the_very_backend(rank, world):
    base = TorchBackend(fsdp_mesh(world))
    assert base.for_unit(None) is base
    comm = UnitComm()
    assert base.for_unit(comm) is base
    comm.set_zero_copy(False)
    one = base.for_unit(comm)
    assert isinstance(one, UnitBackend)
    assert one.for_unit(UnitComm()) is base
    for name, value in vars(base).items():
        assert getattr(one, name) is value, name
    base._copies.append(Event())  # ended by either, gone from both
    one.settle()
    assert base._copies is one._copies
    assert not base._copies


class Event:
    def synchronize(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ the hook


@on_ranks(2, 4)
def test_the_hook_sees_the_mean_and_its_edits_land_in_the_gradient(rank, world):
    seen = []

    def hook(flat):
        assert flat.dim() == 1
        seen.append(flat.clone())
        flat.mul_(3.0).add_(1.0)

    comm = UnitComm()
    comm.set_all_reduce_hook(hook)
    for mesh, donate in product((fsdp_mesh(world), mesh_for(world)), (False, True)):
        plain, edited = everything(Units(mesh), rank), everything(Units(mesh, {"c": comm}), rank, donate=donate)
        same({n: plain[n] for n in "ab"}, {n: edited[n] for n in "ab"})
        equal(seen.pop(), plain["c"][3])
        equal(edited["c"][3], plain["c"][3] * 3.0 + 1.0)
        assert not seen, "one bucket, one call"


@on_ranks(4)
def test_the_hook_sees_each_bucket_in_the_wider_of_reduce_and_gradient_dtype(rank, world):
    seen = []
    comm = UnitComm(all_reduce_hook=lambda t: seen.append(t.dtype))
    mixed = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    units = Units(
        hsdp_mesh(), {"a": comm}, mp_policy=mixed, placement_fn=lambda s: Replicate() if "b" in s.name else None
    )
    units.reduce("a", rank)
    assert seen == [torch.float32] * 2, "of masters, wider than bfloat16"
    assert [f.dtype for f in units.flats("a")] == [torch.float32] * 2


@on_ranks(2, 4)
def test_the_hook_never_writes_into_what_a_state_holds(rank, world):
    comm = UnitComm(all_reduce_hook=lambda t: t.fill_(-77.0))
    for mesh, op in product((fsdp_mesh(world), mesh_for(world)), ("avg", "sum")):
        units = Units(mesh, {"c": comm}, reduction=ReductionPolicy(op))
        plan, backend = units.plans["c"], units.backends["c"]
        units.reduce("c", rank, 0, Sync.SHARD)
        held = units.units["c"]
        before = [f.clone() for f in held.acc_partial.flats]
        finishing = on_unit.start_reduce(held, plan, backend, None, Sync.FULL, [])
        done = on_unit.finish_reduce(finishing, plan, backend, [])
        assert (done.grad.flats[0] == -77.0).all()
        equal(dict(enumerate(held.acc_partial.flats)), dict(enumerate(before)))
        # a gradient that is there already, and a reduction in flight that somebody else still holds
        flying = on_unit.start_reduce(done, plan, backend, units.grads("c", rank), Sync.FULL, [])
        on_unit.await_all(backend, flying.reducing.handles)
        outputs = [t.clone() for t in flying.reducing.outputs]
        again = on_unit.finish_reduce(flying, plan, backend, [])
        assert (again.grad.flats[0] == -154.0).all(), "the hook edits what is added, not the sum"
        assert (done.grad.flats[0] == -77.0).all()
        equal(dict(enumerate(flying.reducing.outputs)), dict(enumerate(outputs)))


@on_ranks(2)
def test_the_hook_runs_without_autograd_and_its_error_passes(rank, world):
    def hook(t):
        assert not torch.is_grad_enabled()
        raise ValueError("enough")

    comm = UnitComm(all_reduce_hook=hook)
    units = Units(fsdp_mesh(world), {"a": comm})
    before = units.units["a"]
    with pytest.raises(ValueError, match="enough"):
        units.reduce("a", rank)
    assert units.units["a"] is before
    comm.set_all_reduce_hook(None)
    units.reduce("a", rank)


class FakeStream:
    def __init__(self, log: list) -> None:
        self.log = log

    def wait_stream(self, other) -> None:
        self.log.append("hook's waits")


@on_ranks(2)
def test_the_hooks_stream_waits_and_is_awaited(rank, world):
    log = []
    comm = UnitComm()
    comm.set_all_reduce_hook(lambda t: log.append("hook"), stream=FakeStream(log))
    Units(fsdp_mesh(world), {"a": comm}).reduce("a", rank)
    assert log == ["hook's waits", "hook"]


# ------------------------------------------------------------------------------------------- groups, and their memory


@on_ranks(2, 4)
def test_a_separate_group_is_made_once_for_all_units(rank, world):
    groups = dist.distributed_c10d._world.pg_map
    mesh = mesh_for(world)
    expected = everything(Units(mesh, floats=True), rank)
    comms = {name: UnitComm() for name in SHAPES}
    units = Units(mesh, comms, floats=True)
    for comm in comms.values():
        comm.set_separate_reduce_scatter_group()
    units.backends = {name: units.base.for_unit(comm) for name, comm in comms.items()}
    comm_module._SEPARATE.clear()  # what earlier tests have made
    before = len(groups)
    units.gather("a")
    units.reduce("a", rank)
    assert len(groups) == before + 1
    for name in ("b", "c"):
        units.reduce(name, rank)
    again = Units(mesh, comms, floats=True)  # other units, another backend, the same ranks
    again.backends["a"].prepare(again.layout)
    same(everything(again, rank), expected)
    assert len(groups) == before + 1
    spec = units.plans["a"].buckets[0].mesh
    own, shared = units.base._separate[spec], units.base.group(spec, spec.shard)
    assert own is not shared
    assert own is separate_group(shared)
    assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(shared)


@on_ranks(2)
def test_custom_reduce_scatters_are_given_the_separate_group(rank, world):
    scatter = CountedScatter()
    comm = UnitComm(reduce_scatter=scatter, separate_reduce_scatter_group=True)
    units = Units(fsdp_mesh(world), {"a": comm})
    units.reduce("a", rank)
    spec = units.base.spec
    assert scatter.calls[0]["group"] is separate_group(units.base.group(spec, spec.shard))


@on_ranks(2)
def test_allocation_from_a_group_without_an_allocator_is_ordinary(rank, world):
    comm = UnitComm()
    comm.set_allocate_from_group(True)
    units = Units(fsdp_mesh(world), {"a": comm, "c": comm}, floats=True)
    assert isinstance(units.backends["a"], UnitBackend)
    same(everything(units, rank), everything(Units(fsdp_mesh(world), floats=True), rank))


@on_ranks(2)
def test_allocation_from_a_group_asks_its_allocator(rank, world):
    class Allocator:
        asked: list = []  # noqa: RUF012

        def supports_tensor_alloc(self, device):
            return True

        def allocate_tensor(self, numel, *, dtype, device):
            self.asked.append((numel, dtype, device.type))
            return torch.empty(numel, dtype=dtype)

    class Group:
        def _get_backend(self, device):
            return Allocator()

    backend = TorchBackend(fsdp_mesh(world)).for_unit(UnitComm(allocate_from_group=True))
    assert backend._from_group(Group(), 5, torch.float32).shape == (5,)
    assert Allocator.asked == [(5, torch.float32, "cpu")]


# ------------------------------------------------------------------------------------------------------ point to point


@on_ranks(1, 2, 4)
def test_point_to_point_is_exact_on_integers(rank, world):
    p2p = {n: UnitComm(all_gather=PointToPointAllGather(), reduce_scatter=PointToPointReduceScatter()) for n in SHAPES}
    for mesh in (fsdp_mesh(world), mesh_for(world)):
        same(everything(Units(mesh, p2p), rank), everything(Units(mesh), rank))


@on_ranks(2, 4)
def test_point_to_point_sums_in_rank_order(rank, world):
    scatter = PointToPointReduceScatter()
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for n in (1, 7, 1000):
            inputs = [
                (torch.randn(world * n, generator=torch.Generator().manual_seed(r)) * 50).to(dtype)
                for r in range(world)
            ]
            out = torch.empty(n, dtype=dtype)
            handle = scatter(out, inputs[rank].clone(), group, dist.ReduceOp.SUM, async_op=True)
            handle.wait()
            handle.wait()
            total = inputs[0].clone()
            for term in inputs[1:]:
                total = total + term
            equal(out, total.view(world, n)[rank])
            theirs = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_single(theirs, inputs[rank].clone(), group=group)
            if world == 2 or dtype is torch.int64:
                equal(out, theirs)
            torch.testing.assert_close(out, theirs, rtol=0.05, atol=3.0)
            if dtype is torch.float64:
                torch.testing.assert_close(out, theirs, rtol=1e-12, atol=1e-12)


@on_ranks(2, 4)
def test_point_to_point_gathers_in_place_and_several_at_once(rank, world):
    gather, group = PointToPointAllGather(), dist.group.WORLD
    flying = []
    for n in (5, 1, 300_000):
        out = torch.empty(world * n)
        own = out.view(world, n)[rank].fill_(float(rank))
        flying.append((n, out, gather(output_tensor=out, input_tensor=own, group=group, async_op=True)))
    for n, out, handle in reversed(flying):
        handle.wait()
        equal(out, torch.arange(float(world)).repeat_interleave(n))
    out = torch.empty(world)
    assert gather(out, torch.full((1,), float(rank)), group) is None
    equal(out, torch.arange(float(world)))


@on_ranks(2)
def test_point_to_point_refuses_other_reductions(rank, world):
    with pytest.raises(NotImplementedError, match="only sums"):
        PointToPointReduceScatter()(torch.empty(1), torch.empty(2), dist.group.WORLD, dist.ReduceOp.MAX)


# ------------------------------------------------------------------------------------------------------- the example


@on_ranks(2, 4)
def test_the_examples_objects_are_exact_on_small_integers_and_halve_the_bytes(rank, world):
    path = Path(__file__).resolve().parents[1] / "examples" / "torch" / "custom_comm.py"
    source = path.read_text().replace("from hsdp_fn_torch.facade import fully_shard", "")
    example = {"__name__": "custom_comm"}
    exec(compile(source, str(path), "exec"), example)
    gather, scatter = example["HalfAllGather"](), example["HalfReduceScatter"]()
    units = Units(fsdp_mesh(world), {"c": UnitComm(all_gather=gather, reduce_scatter=scatter)})
    same(everything(units, rank), everything(Units(fsdp_mesh(world)), rank))
    numel = units.plans["c"].buckets[0].params.numel
    for comm in (gather, scatter):
        assert (comm.sent, comm.plain) == (2 * numel * (world - 1), 4 * numel * (world - 1))


# ------------------------------------------------------------------------------------------------------------- refused


def unchanged(comm: UnitComm, error: type[Exception], match: str, method: str, *args, **kwargs) -> None:
    before = dict(vars(comm))
    with pytest.raises(error, match=match):
        getattr(comm, method)(*args, **kwargs)
    assert all(value is before[name] for name, value in vars(comm).items())


class NoAllocate:
    def __call__(self, *args, **kwargs):
        return None


def test_what_is_refused_leaves_the_description_unchanged() -> None:
    comm = UnitComm()
    for kind in ("all_gather", "reduce_scatter"):
        unchanged(comm, TypeError, "has no method allocate", f"set_{kind}", NoAllocate())
        unchanged(comm, TypeError, "isn't callable", f"set_{kind}", DefaultMemory())
        unchanged(comm, TypeError, "has no method allocate.* and isn't callable", f"set_{kind}", 3)
        unchanged(comm, TypeError, "give an instance", f"set_{kind}", PointToPointAllGather)
    unchanged(comm, TypeError, "must be callable", "set_all_reduce_hook", 3)
    text = "^stream cannot be set when using native HSDP$"
    unchanged(comm, ValueError, text, "set_all_reduce_hook", print, stream=FakeStream([]), replicates=True)
    unchanged(comm, TypeError, "torch stream", "set_all_reduce_hook", print, stream=3)
    for method in ("set_separate_reduce_scatter_group", "set_allocate_from_group", "set_zero_copy"):
        unchanged(comm, PolicyError, "must be a bool, found 1", method, 1)
    assert comm.is_default


def test_allocation_from_the_group_and_custom_collectives() -> None:
    for field, what in (("all_gather", "all gather"), ("reduce_scatter", "reduce scatter")):
        comm = UnitComm()
        comm.set_allocate_from_group(True)
        custom = PointToPointAllGather() if field == "all_gather" else PointToPointReduceScatter()
        getattr(comm, f"set_{field}")(custom)  # custom replaces
        for method, rest in (("set_allocate_from_group", (False,)), ("set_symm_mem", (None, torch.device("cpu")))):
            unchanged(comm, AssertionError, f"when {what} comm is custom: PointToPoint", method, *rest)
        assert getattr(comm, field) is custom
        getattr(comm, f"set_{field}")(None)
        unchanged(comm, AssertionError, "from the process group", "set_symm_mem", None, torch.device("cpu"))
        comm.set_allocate_from_group(False)
        assert comm.is_default


@on_ranks(2)
def test_symmetric_memory_says_why_it_is_not_there(rank, world):
    comm, group = UnitComm(), dist.group.WORLD
    unchanged(comm, NotImplementedError, "needs CUDA devices.*on cpu", "set_symm_mem", group, torch.device("cpu"))
    unchanged(comm, NotImplementedError, "needs an NCCL process group", "set_symm_mem", group, torch.device("cuda", 0))
    unchanged(comm, NotImplementedError, "only backend is 'NCCL'", "set_symm_mem", group, torch.device("cpu"), "X")


def test_objects_of_fsdp2s_classes_are_of_the_protocols() -> None:
    for custom in (CountedGather(), PointToPointAllGather(), CountedScatter(), PointToPointReduceScatter()):
        assert isinstance(custom, Comm)
    assert isinstance(CountedGather(), AllGather)
    assert isinstance(CountedScatter(), ReduceScatter)
    assert not isinstance(DefaultMemory(), AllGather)
