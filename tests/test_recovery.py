"""Attempts that all ranks take or none: what they give, refuse and cost; faults are in test_recovery_faults."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import hsdp_fn as h
import hsdp_fn_torch as ht
from hsdp_fn import (
    Keep,
    LayoutError,
    MeshSpec,
    ParamSpec,
    PeerFailed,
    PhaseError,
    StaleStateError,
    Sync,
    clone,
    expected_comm,
    grads,
    masters,
    microbatches,
    reset_iter,
)
from hsdp_fn import unit as on_unit
from hsdp_fn.schedule import Journal, Log, still_owed
from hsdp_fn.state import Token
from hsdp_fn_torch import recoverable
from tests.probe import Probe
from tests.strategies import Case
from tests.workers_facade import OURS, Boom, chain, data, full, mean_square, shard_blocks, tripwire
from tests.workers_recovery import local, require_equal, sacrificed, set_sync, within
from tests.workers_torch import LAYERS, Traffic, assert_untouched, equal, fsdp_mesh, mesh_for, on_ranks, snapshot

UNITS = LAYERS[:2]


def functional(world: int, **options):
    model = chain(depth=2)
    state = ht.shard_module(model, mesh_for(world), UNITS, **options)
    return model, state, ht.value_and_grad(lambda p, x: ht.functional_call(model, p, x).square().mean())


def facade(world: int, **options):
    return shard_blocks(OURS, chain(depth=2), mesh_for(world), **options)


def local_grads(model) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


# ------------------------------------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("hold", [Sync.NONE, Sync.SHARD])
@on_ranks(2, 4)
def test_a_microbatch_that_failed_is_run_again_functional(rank, world, hold):
    model, start, step = functional(world)
    state = clone(start)
    for i, sync in enumerate(microbatches(3, hold=hold)):
        (_, _), state = step(state, data(rank, i), sync=sync)
    _, expected = grads(state)
    for failing in range(3):
        for when in ("before", "after", "backward"):
            state, tries = clone(start), 0
            for i, sync in enumerate(microbatches(3, hold=hold)):
                done = False
                while not done:
                    tries += 1
                    odd = i == failing and tries == i + 1 and rank == i % world
                    try:
                        trip = tripwire(model.layers[1], when) if odd else nullcontext()
                        with recoverable(state) as attempt, trip:
                            (_, _), attempt.state = step(attempt.state, data(rank, i), sync=sync)
                        done = True
                        with pytest.raises(StaleStateError, match=r"recoverable|value_and_grad"):
                            step(state, data(rank, i))
                    except (Boom, PeerFailed):
                        assert attempt.state is state and not attempt.committed
                    state = attempt.state
                assert state.micro == i + 1
            assert tries == 4
            _, found = grads(state)
            require_equal(list(found.values()), list(expected.values()), f"{failing} {when}")


@pytest.mark.parametrize("hold", [Sync.NONE, Sync.SHARD])
@on_ranks(4)
def test_a_microbatch_that_failed_is_run_again_in_the_facade(rank, world, hold):
    model = facade(world)

    def run(i, sync):
        set_sync(model, sync)
        mean_square(model, data(rank, i)).backward()

    for i, sync in enumerate(microbatches(3, hold=hold)):
        run(i, sync)
    expected = local_grads(model)
    model.reset_iter_state()
    model.zero_grad()
    for failing in range(3):
        for when in ("before", "after", "backward"):
            tries = 0
            for i, sync in enumerate(microbatches(3, hold=hold)):
                done = False
                while not done:
                    tries += 1
                    odd = i == failing and tries == i + 1 and rank == i % world
                    try:
                        set_sync(model, sync)
                        with recoverable(model):
                            with tripwire(model.layers[1], when) if odd else nullcontext():
                                run(i, sync)
                            assert {p.grad for p in model.parameters()} == {None}, "delivered before the end"
                        done = True
                    except (Boom, PeerFailed):
                        assert {p.grad for p in model.parameters()} == {None}
                assert model.hsdp_state.micro == i + 1
            assert tries == 4
            require_equal(local_grads(model), expected, f"{failing} {when}")
            model.reset_iter_state()
            model.zero_grad()


@on_ranks(2)
def test_a_failed_microbatch_and_a_reset_that_keeps(rank, world):
    """After an attempt nothing has to be reset, and a reset that keeps what is held changes nothing."""
    _, state, step = functional(world)
    (_, _), state = step(state, data(rank, 0), sync=Sync.NONE)
    before = snapshot(state)
    with pytest.raises((Boom, PeerFailed)), recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 1))
        if rank == 1:
            raise Boom("late")
    assert_untouched(attempt.state, before)
    equal(snapshot(reset_iter(attempt.state, keep=Keep.ACCUMULATED))[1], before[1])


@on_ranks(2)
def test_an_attempt_of_a_whole_step(rank, world):
    """After one success a rank that fails at any of its microbatches knows what it still owes."""
    _, state, step = functional(world)

    def body(attempt, fail_at=-1):
        for i, sync in enumerate(microbatches(3)):
            if i == fail_at and rank == 0:
                raise Boom("between")
            (_, _), attempt.state = step(attempt.state, data(rank, i), sync=sync)
        attempt.state, rows = grads(attempt.state)
        return rows

    with recoverable(state) as attempt:
        expected = body(attempt)
    state = reset_iter(attempt.state)
    for fail_at in (0, 1, 2):
        before = snapshot(state)
        with pytest.raises(Boom if rank == 0 else PeerFailed) as caught, recoverable(state) as attempt:
            body(attempt, fail_at)
        assert not getattr(caught.value, "__notes__", ())
        assert attempt.state is state
        assert_untouched(state, before)
    with recoverable(state) as attempt:
        found = body(attempt)
    require_equal(list(found.values()), list(expected.values()), "afterwards")


# ----------------------------------------------------------------------------------------------------- what is raised


@on_ranks(4)
def test_each_failed_rank_is_named_with_its_reason(rank, world):
    _, state, step = functional(world)
    reasons = {1: "ValueError: one", 2: "Boom: two", 3: "AssertionError: "}
    errors = {1: ValueError("one"), 2: Boom("two"), 3: AssertionError()}
    with pytest.raises(Exception) as caught, recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0))
        if rank in errors:
            raise errors[rank]
    if rank in errors:
        assert caught.value is errors[rank] and not getattr(caught.value, "__notes__", ())
    else:
        assert isinstance(caught.value, PeerFailed) and isinstance(caught.value, h.HSDPError)
        assert caught.value.ranks == (1, 2, 3) and caught.value.reasons == reasons
        assert all(f"rank {r}: {text}" in str(caught.value) for r, text in reasons.items())
    assert attempt.state is state


def test_what_peer_failed_says():
    error = PeerFailed({3: "c", 0: "a"})
    assert error.ranks == (0, 3) and list(error.reasons) == [0, 3]
    assert str(error).endswith("rank 0: a; rank 3: c")


@pytest.mark.parametrize("what", ["foreign", "consumed", "nothing", "raw"])
@on_ranks(2)
def test_a_state_that_cant_be_taken_counts_as_a_failure(rank, world, what):
    _, state, step = functional(world)
    other = ht.shard_module(chain(depth=1), mesh_for(world), LAYERS[:1])
    expected = {"foreign": LayoutError, "nothing": LayoutError, "raw": LayoutError, "consumed": StaleStateError}[what]
    for failing in range(world):
        before = snapshot(state)
        with pytest.raises(expected if rank == failing else PeerFailed) as caught, recoverable(state) as attempt:
            first = attempt.state
            (_, _), new = step(first, data(rank, 0))
            bad = {"foreign": other, "consumed": first, "nothing": None, "raw": masters(new)}[what]
            attempt.state = bad if rank == failing else new
        assert not getattr(caught.value, "__notes__", ())
        if rank != failing:
            assert caught.value.ranks == (failing,)
        assert attempt.state is state
        assert_untouched(state, before)


@on_ranks(2)
def test_an_attempt_that_ends_inside_its_own_failure_can_be_tried_again_at_once(rank, world):
    model = facade(world)
    taken = 0
    for i in range(6):
        try:
            with recoverable(model):
                mean_square(model, data(rank, i)).backward()
                if i % 3 == rank:
                    raise Boom(str(i))
            taken += 1
        except (Boom, PeerFailed):
            pass
    assert taken == 2
    single = chain(depth=2)
    for i in (2, 5):
        sum(mean_square(single, data(r, i)) / world for r in range(world)).backward()
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


@on_ranks(2)
def test_refused_on_every_rank_before_anything(rank, world):
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    model.zero_grad()
    plain, used = chain(depth=1), functional(world)
    (_, _), _ = used[2](used[1], data(rank, 0))
    with Traffic() as traffic:
        with pytest.raises(TypeError, match="recoverable takes a state or a module of fully_shard, found Chain"):
            recoverable(plain)
        with pytest.raises(RuntimeError, match="root"), recoverable(model.layers[0]):
            raise AssertionError("inside")
        with pytest.raises(StaleStateError, match="recoverable"), recoverable(used[1]):
            raise AssertionError("inside")
    assert traffic.seen == []

    def inside(*_):
        with pytest.raises(PhaseError, match="outside of forward"), recoverable(model):
            raise AssertionError("inside")

    handle = model.layers[0].register_forward_hook(inside)
    mean_square(model, data(rank, 0)).backward()
    handle.remove()
    expected = local_grads(model)
    model.zero_grad()
    with recoverable(model):
        with pytest.raises(PhaseError, match="other attempts"), recoverable(model):
            raise AssertionError("inside")
        mean_square(model, data(rank, 0)).backward()
    require_equal(local_grads(model), expected, "the outer attempt")


@on_ranks(2)
def test_without_anything_inside_and_without_gradients(rank, world):
    model = facade(world)
    with recoverable(model) as attempt:
        pass
    assert attempt.committed and attempt.journal == []
    with recoverable(model), torch.no_grad():
        out = model(data(rank, 0))
    equal(out, model(data(rank, 0)).detach())
    _, state, _ = functional(world)
    before = snapshot(state)
    with recoverable(state) as attempt:
        pass
    assert attempt.committed
    equal(snapshot(attempt.state)[1], before[1])


@on_ranks(2)
def test_attempts_that_differ_warn(rank, world):
    model = facade(world)

    def run(upto):
        with recoverable(model):
            for i in range(upto):
                mean_square(model, data(rank, i)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(1)
        run(2)  # differs from the first, which only shows at its end
    with pytest.warns(UserWarning, match="issued different collectives"):
        run(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(2)


@on_ranks(2)
def test_an_explicit_schedule(rank, world):
    """Of a first attempt that `expected_comm` doesn't know: an evaluation before the step, two steps."""
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    model.zero_grad()
    once = expected_comm(model.hsdp_state.layout)
    for fail_at in (0, 1):
        with pytest.raises(Boom if rank else PeerFailed) as caught, recoverable(model, schedule=once + once):
            for i in range(2):
                if i == fail_at and rank:
                    raise Boom("early")
                mean_square(model, data(rank, i)).backward()
        assert not getattr(caught.value, "__notes__", ())
        assert {p.grad for p in model.parameters()} == {None}


# -------------------------------------------------------------------------------------------- what it costs and notes


@on_ranks(2, 4)
def test_one_number_over_each_group_and_nothing_without(rank, world):
    _, state, step = functional(world)
    with Traffic() as plain:
        (_, _), new = step(clone(state), data(rank, 0))
        grads(new)
    with Traffic() as attempted, recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0))
        attempt.state, _ = grads(attempt.state)
    votes = [("all_reduce", "int32", 1)] * (2 if world == 4 else 1)
    assert attempted.seen == plain.seen + votes
    assert plain.seen == Traffic.of(expected_comm(state.layout))
    sharded = facade(world)
    mean_square(sharded, data(rank, 0)).backward()
    with Traffic() as plain:
        mean_square(sharded, data(rank, 0)).backward()
    with Traffic() as attempted, recoverable(sharded):
        mean_square(sharded, data(rank, 0)).backward()
    assert attempted.seen == plain.seen + votes


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("sync", list(Sync))
@on_ranks(2, 4)
def test_the_journal_is_what_was_expected(rank, world, sync, reshard):
    _, state, step = functional(world, reshard_after_forward=reshard)
    with recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0), sync=sync)
    expected = list(expected_comm(attempt.state.layout, sync=sync))
    assert attempt.journal == expected == list(attempt.state.ledger)
    assert attempt.state.token.journal is None, "later calls would add to it"
    model = facade(world, reshard_after_forward=reshard)
    set_sync(model, sync)
    with recoverable(model) as attempt:
        mean_square(model, data(rank, 0)).backward()
    synced = Sync.FULL if sync is Sync.SHARD and world == 2 else sync
    assert attempt.journal == list(expected_comm(model.hsdp_state.layout, sync=synced))


@on_ranks(4)
def test_the_journal_of_smaller_groups(rank, world):
    model = shard_blocks(OURS, chain(depth=2), fsdp_mesh(world), reshard_after_forward=2)
    with recoverable(model) as attempt:
        mean_square(model, data(rank, 0)).backward()
    assert attempt.journal == list(expected_comm(model.hsdp_state.layout))
    assert {c.group_size for c in attempt.journal} == {2, 4}


# --------------------------------------------------------------------------------------------------------- the core


SPECS = [ParamSpec("w", (3, 2), "float32"), ParamSpec("a.w", (4,), "float32"), ParamSpec("b.w", (5,), "float32")]
MESHES = [MeshSpec.fsdp(4), MeshSpec.hsdp(2, 2), MeshSpec.replicated(4)]


def test_what_is_still_owed():
    schedule = expected_comm(h.plan_layout(SPECS, MeshSpec.hsdp(2, 2), ["a", "b"]))
    for done in range(len(schedule) + 1):
        assert still_owed(schedule, schedule[:done]) == schedule[done:]
        assert still_owed(list(schedule), list(schedule[:done])) == schedule[done:]
    assert still_owed(schedule, schedule[1:]) is None
    assert still_owed(schedule, schedule + schedule[:1]) is None
    assert still_owed((), schedule[:1]) is None
    assert still_owed((), ()) == ()


def test_a_log_adds_to_its_journal_and_tokens_hand_it_on():
    one, two = expected_comm(h.plan_layout(SPECS, MeshSpec.fsdp(4), ["a", "b"]))[:2]
    journal = Journal()
    first, second, alone = Log(journal), Log(journal), Log()
    first.append(one)
    second.append(two)
    alone.append(one)
    assert (first, second, alone, journal) == ([one], [two], [one], [one, two])
    first.clear()
    assert journal == [one, two]
    assert Token().journal is None and Token(journal).journal is journal


@pytest.mark.parametrize("mesh", MESHES)
def test_states_that_follow_note_in_the_same_journal(mesh):
    case = Case(h.plan_layout(SPECS, mesh, ["a", "b"]), 1)
    state = h.shard(case.params(), case.layout, backend=Probe(mesh))
    journal = Journal()
    s = h.HSDPState(state.units, state.layout, state.backend, 0, 0, (), Token(journal))
    s = h.wait(h.unshard(s, async_op=True))
    s = h.reduce_grads(h.shard(s), case.grads(0), sync=Sync.SHARD)
    s, _ = h.grads(h.reduce_grads(s, None))
    assert s.token.journal is journal and tuple(journal) == s.ledger and journal
    assert h.clone(s).token.journal is None


@pytest.mark.parametrize(
    ("mesh", "reshard"), [(m, n) for m in MESHES for n in (True, 2) if n is True or m.shard_size > 1]
)
def test_to_pay_is_to_issue_exactly_that_collective(mesh, reshard):
    small = {"a": reshard if mesh.shard_size > 2 else True, "b": True}
    case = Case(h.plan_layout(SPECS, mesh, ["a", "b"], reshard_after_forward=small), 1)
    backend = Probe(mesh)
    state = h.shard(case.params(), case.layout, backend=backend)
    before = h.masters(state)
    for owed in expected_comm(case.layout):
        backend.issued.clear()
        index = case.layout.unit_index[owed.unit]
        on_unit.pay(owed, case.layout.units[index], state.units[index], backend)
        assert backend.issued == [(owed.op, owed.nbytes, owed.group_size)]
        assert not backend.in_flight
    assert all((before[n] == m).all() for n, m in h.masters(state).items())


# ------------------------------------------------------------------------------------------- ranks that can't be freed


def unknown_schedule(rank: int, world: int) -> str:
    """Rank 0 has issued what no schedule begins with; the other rank gets an error in time, and so does it."""
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    begin, message = time.monotonic(), ""
    try:
        with recoverable(model, timeout=2.0):
            model.layers[1](data(rank, 0))
            if rank == 0:
                raise Boom("alone")
            mean_square(model, data(rank, 0)).backward()
    except PeerFailed:
        raise
    except Exception as error:
        message = f"{type(error).__name__} {' '.join(getattr(error, '__notes__', ()))}"
    if rank == 0:
        time.sleep(5.0)  # a process that ends closes its connections, which peers notice at once
    return f"{message} after {time.monotonic() - begin:.1f}"


def killed(rank: int, world: int) -> str:
    """The last rank is killed in the middle of a backward."""
    model, state, step = functional(world)
    with recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0))
    state = reset_iter(attempt.state)
    before = snapshot(state)
    with pytest.raises(Exception) as caught, within(20.0), recoverable(state, timeout=10.0) as attempt:
        if rank == world - 1:
            model.layers[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        (_, _), attempt.state = step(attempt.state, data(rank, 1))
    assert attempt.state is state and attempt.committed is False
    assert_untouched(state, before)
    return type(caught.value).__name__


def test_peers_of_a_rank_with_an_unknown_schedule_wait_no_longer_than_the_timeout():
    (_, first), (_, second) = sacrificed(unknown_schedule)
    assert "Boom" in first and "aren't the beginning of a known schedule" in first
    assert "RuntimeError" in second and float(second.split("after")[-1]) < 15.0


def test_the_peer_of_a_killed_process_gets_an_error_and_ends():
    (status, output), (lost, _) = sacrificed(killed, kills=[1])
    assert lost == -signal.SIGKILL
    assert status == 0 and output.strip(), output


@on_ranks(2)
def test_an_interrupt_isnt_drained(rank, world):
    """All ranks get it, as by Ctrl-C: nobody communicates any more, and the state is as before."""
    model, state, step = functional(world)
    before = snapshot(state)
    with Traffic() as traffic, pytest.raises(KeyboardInterrupt) as caught, recoverable(state) as attempt:
        (_, _), attempt.state = step(attempt.state, data(rank, 0))
        raise KeyboardInterrupt
    if hasattr(caught.value, "add_note"):  # from Python 3.11 on
        assert "it was interrupted" in " ".join(caught.value.__notes__)
    assert traffic.seen == Traffic.of(expected_comm(state.layout))
    assert attempt.state is state and attempt.committed is False
    assert_untouched(state, before)
    model = facade(world)
    mean_square(model, data(rank, 0)).backward()
    held = local_grads(model)
    with pytest.raises(KeyboardInterrupt), recoverable(model):
        mean_square(model, data(rank, 0)).backward()
        raise KeyboardInterrupt
    require_equal(local_grads(model), held, "the facade")
    with recoverable(model):
        mean_square(model, data(rank, 0)).backward()
