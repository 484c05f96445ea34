"""Generated programs of the facade's calls, with exceptions at any place; every step compared with plain bookkeeping.

A program is a list of steps, each a method of `Player`. A step that can't be taken where it stands does nothing, so
that every list is a program, and a failing one shrinks to what matters. See `workers_programs` for what is compared.
``HYPOTHESIS_PROFILE=thorough`` plays many more.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import hsdp_fn_torch as ht
from hsdp_fn import Keep, PeerFailed, PhaseError, PolicyError, Sync
from hsdp_fn_torch import recoverable
from tests.workers_facade import Boom, full
from tests.workers_programs import (
    MESHES,
    Books,
    Fault,
    Setup,
    Step,
    Trap,
    Twins,
    loss_of,
    require,
    require_raises,
)
from tests.workers_recovery import set_sync

FULL_DICT = StateDictOptions(full_state_dict=True)


class Player(Twins):
    """The steps of a program."""

    # -------------------------------------------------------------------------------------------------- microbatches

    def microbatch(self, at: int, hold: Sync | None = None, route: Any = None, fault: Fault | None = None) -> None:
        """Forward and backward; ``hold``: how far backward reduces, from now on."""
        if hold is not None:
            self.sync(hold)
        with Trap(self.model, fault).set() as trap:
            graph = self.run_forward(at, route, trap)
            if graph is not None:
                self.run_backward(graph, trap)
        self.again = functools.partial(self.microbatch, at, None, route) if trap.fired else None

    def forward(self, at: int, route: Any = None, fault: Fault | None = None) -> None:
        """A forward whose graph is kept."""
        with Trap(self.model, fault).set() as trap:
            graph = self.run_forward(at, route, trap)
        if graph is not None:
            self.graphs = [*self.graphs[-2:], graph]

    def backward(self, which: int, retain: bool = False, fault: Fault | None = None) -> None:
        """Of one of the graphs that are kept."""
        if self.graphs:
            graph = self.graphs.pop(which % len(self.graphs))
            with Trap(self.model, fault).set() as trap:
                if self.run_backward(graph, trap, retain) and retain:
                    self.graphs.append(graph)

    def retry(self) -> None:
        """The microbatch that has failed last."""
        if self.again is not None:
            self.seen["retried"] += 1
            self.again()

    def evaluate(self, at: int, inference: bool = False, fault: Fault | None = None) -> None:
        with torch.no_grad():
            expected = loss_of(self.single, at, self.rank)
        mode = torch.inference_mode() if inference else torch.no_grad()
        with Trap(self.model, fault).set() as trap, mode:
            done, found = self.call(lambda: loss_of(self.model, at, self.rank), trap)
        if done:
            require(torch.equal(found, expected), f"evaluated {found.item()}, expected {expected.item()}")
            self.standing = True
        elif trap.fired:
            self.dropped()

    def attempt(
        self,
        at: int,
        hold: Sync | None = None,
        batches: int = 1,
        nested: bool = False,
        fault: Fault | None = None,
    ) -> None:
        """`recoverable`, of one microbatch or several; ``nested``: with an attempt inside that is refused."""
        if hold is not None:
            self.sync(hold)
        batches = batches if self.setup.routes else 1
        syncs = set(self.syncs.values())
        routed = self.setup.routes or len(syncs) > 1
        who = None if fault is None or fault.who is None or routed else fault.who % self.world
        before, deferred = self.books, []
        trap = Trap(self.model, fault if who in (None, self.rank) else None)
        refused = self.refusal()
        self.graphs = []
        try:
            with self.told(), trap.set(), recoverable(self.model, timeout=20.0) as attempt:
                require(refused is None, f"not refused: {refused}")
                self.began()
                self.standing = False
                if nested:
                    require_raises(PhaseError, "other attempts", recoverable(self.model).__enter__)
                for i in range(batches):
                    loss = loss_of(self.model, at + i, self.rank)
                    graph = self.graph_of(loss, at + i)
                    loss.backward()
                    deferred.append(self.gradients(graph))
                    self.compare_grads("inside the attempt")
            outcome = "ok"
        except Boom as error:
            require(trap.fired and str(error) == fault.place, f"raised {error}")
            require(who is None or not getattr(error, "__notes__", ()), f"{getattr(error, '__notes__', ())}")
            outcome = "failed"
        except PeerFailed as error:
            require(who is not None and error.ranks == (who,), f"raised {error}")
            require(error.reasons == {who: f"Boom: {fault.place}"}, f"raised {error}")
            outcome = "failed"
        except RuntimeError as error:
            require(refused is not None and refused in str(error), f"raised {error!r}")
            self.seen["attempts refused"] += 1
            return
        fired = torch.tensor(float(trap.fired))
        dist.all_reduce(fired)
        require((outcome == "failed") == bool(fired), f"{outcome}, though {fired.item():g} ranks failed")
        require(attempt.committed is (outcome == "ok"), "committed")
        self.standing = self.gathering = False
        if outcome == "ok":
            for got in deferred:
                self.take(got)
        else:
            self.books = before
            self.again = functools.partial(self.attempt, at, None, batches)
        self.seen[f"attempts {outcome}" + ("" if who is None or not fired else " alone")] += 1

    def finish(self, fault: Fault | None = None) -> None:
        """`finish_accumulation`."""
        if self.setup.zeros:
            return
        with Trap(self.model, fault).set() as trap:
            done, _ = self.call(self.model.finish_accumulation, trap, runs=self.begun, begins=False)
        if done and self.begun:
            self.seen["finished"] += bool(self.books.whole or self.books.partial)
            self.take({}, finish=True)
            self.standing = self.gathering = False
        elif trap.fired:
            self.dropped()

    def reset(self, keep: bool) -> None:
        """`reset_iter_state`."""
        self.model.reset_iter_state(keep=Keep.ACCUMULATED if keep else Keep.NOTHING)
        self.seen["reset a stopped backward"] += self.stopped
        self.gathering = False
        if not self.begun:
            return
        if not keep:
            self.seen["dropped sums"] += bool(self.books.whole or self.books.partial)
            self.books = Books(dict(self.books.grad))
        self.dropped()

    # ------------------------------------------------------------------------------------------------- between these

    def step(self, zero: str = "to none") -> None:
        """The optimizer's, after which parameters are rounded in place; then perhaps `zero_grad`."""
        moved = list(self.books.grad)
        for name, p in self.truth.items():
            p.grad = None if name not in self.books.grad else self.books.grad[name].clone()
        for optimizer in (self.optimizer, self.true_optimizer):
            optimizer.step()
        with torch.no_grad():
            for name in moved:
                for rows in (self.params[name].to_local(), self.truth[name]):
                    rows.mul_(2).round_().div_(2).clamp_(-1, 1)
        self.changed(moved)
        self.seen["steps"] += bool(moved)
        self.seen["steps while sums are held"] += bool(moved and (self.books.whole or self.books.partial))
        self.zero(zero)

    def zero(self, how: str) -> None:
        if how == "to none":
            self.optimizer.zero_grad()
        elif how == "the model's":
            if not self.call(self.model.zero_grad, runs=False)[0]:
                return
        elif how == "to zero":
            self.optimizer.zero_grad(set_to_none=False)
            self.books.grad = {n: torch.zeros_like(g) for n, g in self.books.grad.items()}
        if how in ("to none", "the model's"):
            self.books.grad = {}
        self.inexact &= how == "keep"

    def clip(self, norm: float, torchs: bool) -> None:
        """`clip_grad_norm_`, torch's or this library's."""
        if not self.books.grad:
            return
        function = torch.nn.utils.clip_grad_norm_ if torchs else ht.clip_grad_norm_
        found = full(function(self.params.values(), norm))
        expected = torch.stack([g.square().sum() for g in self.books.grad.values()]).sum().sqrt()
        require(torch.allclose(found, expected, rtol=1e-12), f"norm {found.item()}, expected {expected.item()}")
        scale = (norm / (expected + 1e-6)).clamp(max=1.0)
        self.books.grad = {n: g * scale for n, g in self.books.grad.items()}
        self.inexact |= bool(scale != 1)

    def save(self, whole: bool) -> None:
        """State dicts of model and optimizer, kept for `load`."""
        take = ht.get_model_state_dict if whole else nn.Module.state_dict
        done, found = self.call(
            lambda: take(self.model, options=FULL_DICT) if whole else self.model.state_dict(), runs=False
        )
        if not done:
            return
        expected = self.single.state_dict()
        require(found.keys() == expected.keys(), f"keys {found.keys() ^ expected.keys()}")
        for name, value in found.items():
            require(torch.equal(full(value), expected[name]), f"{name} in the state dict")
        kept = {name: value.clone() for name, value in found.items()}
        truth = copy.deepcopy((expected, self.true_optimizer.state_dict()))
        self.saved.append((whole, kept, copy.deepcopy(self.optimizer.state_dict()), *truth))

    def load(self, which: int, by: str, optimizer: bool) -> None:
        """What was saved before."""
        if not self.saved:
            return
        whole, values, states, truth, true_states = self.saved[which % len(self.saved)]
        loads = {
            "load_state_dict": lambda: self.model.load_state_dict(values),
            "set_model_state_dict": lambda: ht.set_model_state_dict(
                self.model, values, options=FULL_DICT if whole else None
            ),
            "from rank 0": lambda: ht.set_model_state_dict(
                self.model,
                truth if self.rank == 0 else {},
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            ),
        }
        if not self.call(loads[by], runs=False)[0]:
            return
        self.single.load_state_dict(truth)
        self.changed(list(self.params))
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(states))
            self.true_optimizer.load_state_dict(copy.deepcopy(true_states))
        self.seen["loaded"] += 1

    def sync(self, how: Sync, unit: int | None = None) -> None:
        """How far backward reduces, of all units or one."""
        names = self.units if unit is None else [self.units[unit % len(self.units)]]
        for name in names:
            module = self.model.get_submodule(name)
            module.set_requires_gradient_sync(how is not Sync.NONE, recurse=False)
            if how is not Sync.NONE:
                module.set_requires_all_reduce(how is Sync.FULL, recurse=False)
            self.syncs[name] = Sync.FULL if how is Sync.SHARD and self.mesh.ndim == 1 else how
        if unit is None:
            set_sync(self.model, how)

    def unshard(self, unit: int, wait: bool | None, fault: Fault | None = None) -> None:
        """By hand; ``wait``: None, as it is; else asynchronously, and whether it is waited for."""
        name = self.units[unit % len(self.units)]
        module = self.model.get_submodule(name)
        with Trap(self.model, fault).set() as trap:
            done, handle = self.call(lambda: module.unshard(async_op=wait is not None), trap)
        self.standing |= done
        self.gathering |= done and wait is not None
        if done and wait:
            handle.wait()
        if done and wait is not False:
            for own, key, p in self.slots:
                found = next(n for n, q in self.params.items() if q is p)
                if self.unit_of[found] == name:
                    require(torch.equal(own._parameters[key].detach(), self.truth[found]), f"{found}, gathered")

    def reshard(self, unit: int) -> None:
        self.model.get_submodule(self.units[unit % len(self.units)]).reshard()

    def freeze(self, which: int, frozen: bool) -> None:
        """One parameter, or thaw it."""
        name = list(self.params)[which % len(self.params)]
        for params in (self.params, self.truth):
            params[name].requires_grad_(not frozen)

    def handle(self, what: str, value: bool, unit: int | None = None) -> None:
        """A setter of how parameters are handled."""
        root = unit is None
        module = self.model if root else self.model.get_submodule(self.units[unit % len(self.units)])
        if what == "last":
            self.model.set_is_last_backward(value)
        else:
            setter = getattr(module, f"set_reshard_after_{what}")
            setter(value, recurse=root)

    # ------------------------------------------------------------------------------------- calls that are refused

    def refused(self, what: str) -> None:
        """A call that raises, and changes nothing."""
        model, inner = self.model, self.model.layers[0]
        calls: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
            "attempt on a part": (RuntimeError, "root", lambda: recoverable(inner)),
            "reset of a part": (RuntimeError, "root", inner.reset_iter_state),
            "reset, not recursive": (PolicyError, "whole tree", lambda: model.reset_iter_state(recursive=False)),
            "reset, keep": (PolicyError, "Keep", lambda: model.reset_iter_state(keep=True)),
            "finish of a part": (RuntimeError, "root", inner.finish_accumulation),
            "setter": (PolicyError, "bool", lambda: model.set_requires_gradient_sync(1)),
        }
        if what in calls and (self.begun or what not in ("reset of a part", "attempt on a part")):
            error, match, call = calls[what]
            require_raises(error, match, call)

    def refused_inside(self, at: int, what: str) -> None:
        """A call inside forward that raises, which the module catches; forward goes on."""
        values = self.single.state_dict()
        calls: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
            "finish": (PhaseError, "inside a forward", self.model.finish_accumulation),
            "attempt": (PhaseError, "outside of forward", lambda: recoverable(self.model).__enter__()),
            "load": (
                RuntimeError,
                "can't be loaded inside",
                lambda: self.model.load_state_dict(values),
            ),
        }
        error, match, call = calls[what]
        hook = self.model.layers[0].up.register_forward_hook(lambda *_: require_raises(error, match, call))
        try:
            self.microbatch(at)
        finally:
            hook.remove()

    def refused_load(self) -> None:
        """A key is missing."""
        values = {n: torch.zeros_like(v) for n, v in self.single.state_dict().items() if n != "scale"}
        self.call(lambda: self.model.load_state_dict(values), runs=False, wrong="Missing key")


def play(rank: int, world: int, setup: Setup, steps: list[Step]) -> tuple[str, Counter[str]]:
    """Play a program. What went wrong, on this rank (of all, if any), and what has happened."""
    player, history = Player(setup, rank, world), []
    for step in steps:
        problem, code = "", 0
        try:
            getattr(player, step.name)(**step.options)
        except Exception:
            problem, code = traceback.format_exc(), 1
        if not code:
            try:
                player.check()
            except Exception:
                problem, code = traceback.format_exc(), world + 1
        history.append(repr(step))
        total = torch.tensor(code)
        dist.all_reduce(total)
        if total:
            text = f"rank {rank} of {setup}, at the last of these:\n  " + "\n  ".join(history) + f"\n{problem}"
            if total % (world + 1) not in (0, world):  # a rank alone: collectives may be unmatched
                raise AssertionError(text)
            return text, player.seen
    return "", player.seen


MODULES = ["", "layers.0", "layers.0.up", "last", "layers.1"]
WHEN = ["before", "after", "backward of"]
REFUSED = ["attempt on a part", "reset of a part", "reset, not recursive", "reset, keep", "finish of a part", "setter"]
LOADS = ["load_state_dict", "set_model_state_dict", "from rank 0"]
#: What must have happened in the programs, for these to prove anything.
MUST_HAPPEN = {"backwards", "failed calls", "failed backwards", "attempts ok", "attempts failed", "steps", "refused"}

at = st.integers(0, 5)
unit = st.integers(0, 4)
some_unit = st.one_of(st.none(), st.none(), unit)
flag = st.booleans()
hold = st.sampled_from([None, None, *Sync])
route = st.one_of(st.none(), st.tuples(st.sampled_from(["skip", "alone"]), st.integers(0, 1)))


def faults(world: int, who: st.SearchStrategy[int | None]) -> st.SearchStrategy[Fault]:
    """In a module, or at a collective."""
    ops = ["all_gather", "reduce_scatter", "all_reduce", "wait"]
    in_modules = [f"{when} {name!r}" for name in MODULES for when in WHEN]
    at_collectives = [f"{when} {op}" for op in ops for when in WHEN[:2]]
    return st.one_of(
        st.builds(Fault, st.sampled_from(in_modules), st.just(0), who),
        st.builds(Fault, st.sampled_from(at_collectives), st.integers(0, 5), who),
    )


def kinds(world: int) -> dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]]:
    """How often each step is drawn, and its options."""
    sometimes = st.one_of(st.none(), st.none(), faults(world, st.none()))
    alone = st.one_of(st.none(), faults(world, st.sampled_from([*range(world), None])))
    return {
        "retry": (2, {}),
        "microbatch": (6, {"at": at, "hold": hold, "route": route, "fault": sometimes}),
        "forward": (3, {"at": at, "route": route, "fault": sometimes}),
        "backward": (4, {"which": st.integers(0, 2), "retain": flag, "fault": sometimes}),
        "attempt": (4, {"at": at, "hold": hold, "batches": st.integers(1, 2), "nested": flag, "fault": alone}),
        "sync": (2, {"how": st.sampled_from(Sync), "unit": some_unit}),
        "evaluate": (1, {"at": at, "inference": flag, "fault": sometimes}),
        "finish": (3, {"fault": sometimes}),
        "reset": (3, {"keep": flag}),
        "step": (3, {"zero": st.sampled_from(["to none", "the model's", "to zero", "keep"])}),
        "zero": (1, {"how": st.sampled_from(["to none", "the model's", "to zero"])}),
        "clip": (1, {"norm": st.sampled_from([4.0, 1e6]), "torchs": flag}),
        "save": (1, {"whole": flag}),
        "load": (1, {"which": st.integers(0, 2), "by": st.sampled_from(LOADS), "optimizer": flag}),
        "unshard": (1, {"unit": unit, "wait": st.sampled_from([None, True, False]), "fault": sometimes}),
        "reshard": (1, {"unit": unit}),
        "freeze": (2, {"which": st.integers(0, 30), "frozen": flag}),
        "handle": (2, {"what": st.sampled_from(["forward", "backward", "last"]), "value": flag, "unit": some_unit}),
        "refused": (1, {"what": st.sampled_from(REFUSED)}),
        "refused_inside": (1, {"at": at, "what": st.sampled_from(["finish", "attempt", "load"])}),
        "refused_load": (1, {}),
    }


@st.composite
def steps(draw: st.DrawFn, world: int) -> Step:
    table = kinds(world)
    name = draw(st.sampled_from([name for name, (often, _) in table.items() for _ in range(often)]))
    return Step(name, {option: draw(strategy) for option, strategy in table[name][1].items()})


def setups(world: int) -> st.SearchStrategy[Setup]:
    reshard = st.sampled_from([None, True, False, 2][: 3 if world == 2 else 4])
    seldom = st.sampled_from([False, False, True])
    return st.builds(
        Setup,
        st.sampled_from(MESHES[world]),
        depth=st.integers(1, 2),
        nested=seldom,
        tied=flag,
        reshard=st.tuples(reshard, reshard),
        zeros=seldom,
        strict=seldom,
        routes=seldom,
        adam=flag,
    )


def programs(gloo: Any, world: int, examples: int) -> Counter[str]:
    """Play so many; what has happened in them."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=list(HealthCheck),
    )
    @given(setups(world), st.lists(steps(world), min_size=8, max_size=20))
    def every(setup: Setup, program: list[Step]) -> None:
        answers = gloo.run(play, setup, program, world=world, timeout=60.0)
        problems = [text for text, _ in answers if text]
        assert not problems, "\n\n".join(problems)
        seen.update(answers[0][1])

    every()
    return seen


def do(name: str, **options: Any) -> Step:
    return Step(name, options)


def backward_fails(how: Sync) -> list[Step]:
    """Of the second of three microbatches whose sums are held back."""
    fault = Fault("backward of 'layers.0'")
    return [do("microbatch", at=0, hold=how), do("microbatch", at=1, fault=fault), do("retry"), do("finish")]


def rank_fails(how: Sync) -> list[Step]:
    """The last one of an attempt alone, when the others have done their part."""
    fault = Fault("backward of ''", 0, 1)
    return [do("microbatch", at=0, hold=how), do("attempt", at=1, fault=fault), do("retry"), do("finish")]


def rank_fails_late(how: Sync) -> list[Step]:
    fault = Fault("after ''", 0, 1)
    return [do("attempt", at=0, hold=how), do("attempt", at=1, fault=fault), do("retry"), do("finish")]


def sums_are_dropped(how: Sync) -> list[Step]:
    """And those of a second accumulation kept."""
    steps = [do("microbatch", at=0, hold=how), do("reset", keep=False), do("microbatch", at=1), do("reset", keep=True)]
    return [*steps, do("microbatch", at=2, hold=Sync.FULL)]


def graphs_end(how: Sync) -> list[Step]:
    """One by the optimizer's step, one by a forward that fails."""
    steps = [do("microbatch", at=0), do("forward", at=1), do("step"), do("backward", which=0)]
    steps += [do("forward", at=1), do("forward", at=2, fault=Fault("after 'last'")), do("backward", which=0)]
    return [*steps, do("microbatch", at=3, hold=how), do("finish")]


def loaded(how: Sync) -> list[Step]:
    """Values and optimizer of before two steps, while sums are held."""
    steps = [do("microbatch", at=0), do("step"), do("save", whole=how is Sync.NONE), do("microbatch", at=1), do("step")]
    steps += [do("microbatch", at=2, hold=how), do("load", which=0, by=LOADS[how is Sync.NONE], optimizer=True)]
    return [*steps, do("microbatch", at=3, hold=Sync.FULL), do("step")]


def finish_fails(how: Sync) -> list[Step]:
    """When it has reduced one unit already."""
    steps = []
    for op in ("all_reduce", "reduce_scatter"):
        steps += [do("microbatch", at=0, hold=how), do("finish", fault=Fault(f"after {op}", 1)), do("finish")]
    return [*steps, do("step")]


def frozen_while_held(how: Sync) -> list[Step]:
    """Refused where sums are of other parameters than those of now."""
    freeze, thaw = do("freeze", which=0, frozen=True), do("freeze", which=0, frozen=False)
    steps = [do("microbatch", at=0, hold=how), freeze, do("microbatch", at=1), do("finish"), thaw]
    return [*steps, do("microbatch", at=2), do("finish"), do("zero", how="the model's")]


KNOWN = (
    *(backward_fails, rank_fails, rank_fails_late, sums_are_dropped),
    *(graphs_end, loaded, finish_fails, frozen_while_held),
)


@pytest.mark.parametrize("how", [Sync.NONE, Sync.SHARD])
@pytest.mark.parametrize("make", KNOWN, ids=lambda make: make.__name__)
def test_what_no_run_may_leave_out(gloo, make, how):
    for depth, mesh in ((1, "2 x 1"), (2, "1 x 2")):
        answers = gloo.run(play, Setup(mesh, depth=depth), make(how), world=2, timeout=60.0)
        assert not any(text for text, _ in answers), "\n\n".join(text for text, _ in answers)


@pytest.mark.timeout(0)  # each program has its own limit
def test_programs_on_two_ranks_keep_the_books(gloo):
    examples = settings().max_examples * 3 // 5
    happened = programs(gloo, 2, examples)
    assert examples < 60 or not MUST_HAPPEN - {what for what, times in happened.items() if times}, happened


@pytest.mark.timeout(0)
def test_programs_on_four_ranks_keep_the_books(gloo):
    assert programs(gloo, 4, settings().max_examples // 8)["backwards"]
