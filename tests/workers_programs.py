"""What `test_facade_programs` plays its programs on: this library's module, and plain dictionaries of whole tensors.

Everybody computes the losses of all ranks with an ordinary module, and keeps the books: gradients that were committed,
sums that are held back, what a failure undoes. Parameters are halves in -1 .. 1 and data are integers, so that sums are
exact in every order and everything but clipped gradients is compared for equality.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp_fn_torch as ht
from hsdp_fn import PhaseError, Sync
from hsdp_fn.state import Pending
from tests.workers_facade import Boom
from tests.workers_recovery import Places, local
from tests.workers_torch import chunk, fsdp_mesh, hsdp_mesh, integers_

WIDTH = 5
MESHES = {2: ("shard", "2 x 1", "1 x 2"), 4: ("2 x 2", "shard")}


class Setup(NamedTuple):
    """What a program is played on.

    Attributes:
        mesh: one of `MESHES`.
        depth, nested, tied: of `Net`.
        reshard: ``reshard_after_forward`` of the units and of the root.
        zeros: parameters without a gradient count as ones of zeros.
        strict: `set_strict_iterations`.
        routes: the programs may leave units out, or call one alone. A rank that fails alone doesn't know then what its
            peers issue, so all fail.
        adam: AdamW instead of SGD with momentum.
    """

    mesh: str
    depth: int = 1
    nested: bool = False
    tied: bool = False
    reshard: tuple[bool | int | None, bool | int | None] = (None, None)
    zeros: bool = False
    strict: bool = False
    routes: bool = False
    adam: bool = False


class Fault(NamedTuple):
    """An exception at a place (see `Places`), the ``nth`` time; of one rank alone only inside an attempt."""

    place: str
    nth: int = 0
    who: int | None = None


class Step(NamedTuple):
    """A method of the player, and its arguments."""

    name: str
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


class Part(nn.Module):
    """Two linear layers and a residual; perhaps another one within it."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.inner = Part(False) if nested else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x if self.inner is None else self.inner(x)


class Net(nn.Module):
    """Uneven rows, one parameter of a single row, one that nobody uses, perhaps a tied one."""

    def __init__(self, depth: int, nested: bool, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Part(nested) for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH if tied else 3)
        if tied:
            self.last.weight = self.first.weight
        self.scale, self.spare = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = x if i == skip else layer(x)
        return self.last(x) * self.scale


def loss_of(model: nn.Module, at: int, rank: int, route: tuple[str, int] | None = None) -> Tensor:
    """Linear in the output, of integers that differ on every rank. Route: a unit that is left out, or called alone."""
    generator = torch.Generator().manual_seed(1000 * at + rank + 1)
    draw = torch.randint(-2, 3, (2, 2, WIDTH), generator=generator).double()
    if route is not None and route[0] == "alone":
        out = model.layers[route[1] % len(model.layers)](draw[0])
    else:
        out = model(draw[0], None if route is None else route[1] % len(model.layers))
    return (out * draw[1][:, : out.shape[1]]).sum()


@functools.cache
def mesh_of(kind: str, world: int) -> Any:
    return fsdp_mesh(world) if kind == "shard" else hsdp_mesh(*map(int, kind.split(" x ")))


class Trap(Places):
    """Raises at the ``nth`` place of a name. ``fault`` None: never."""

    def __init__(self, model: nn.Module, fault: Fault | None) -> None:
        super().__init__(model)
        self.fault, self.fired, self.on = fault, False, True

    def come(self, name: str) -> None:
        """By one more place."""
        if self.on and self.fault is not None and name == self.fault.place:
            self.names.append(name)
            if len(self.names) - 1 == self.fault.nth:
                self.fired = True
                raise Boom(name)

    @contextlib.contextmanager
    def set(self) -> Iterator[Trap]:
        """Inside, it may spring. Does nothing without a fault."""
        with self.armed() if self.fault is not None else contextlib.nullcontext():
            yield self
        self.on = False


@dataclass
class Books:
    """By name, as means over ranks: ``.grad``; what is held whole, and this rank's own of it; what is held
    reduce-scattered."""

    grad: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    partial: dict[str, Tensor] = field(default_factory=dict)

    def copy(self) -> Books:
        return Books(dict(self.grad), dict(self.whole), dict(self.partial))


@dataclass
class Graph:
    """A forward that may be differentiated.

    Attributes:
        loss: the library's.
        losses: of all ranks, by the ordinary module.
        names: parameters that required gradients.
        versions: of the units then.
        dead: it must be refused.
    """

    loss: Tensor
    losses: list[Tensor]
    names: list[str]
    versions: dict[str, int]
    dead: bool = False


class Twins:
    """The two models and the books of one of them; what must be so."""

    def __init__(self, setup: Setup, rank: int, world: int) -> None:
        self.setup, self.rank, self.world = setup, rank, world
        self.single = integers_(Net(setup.depth, setup.nested, setup.tied).double())
        self.model = copy.deepcopy(self.single)
        self.mesh = mesh_of(setup.mesh, world)
        units = [n for n, m in self.model.named_modules() if isinstance(m, Part)]
        for name in reversed(units):
            ht.fully_shard(self.model.get_submodule(name), mesh=self.mesh, reshard_after_forward=setup.reshard[0])
        ht.fully_shard(self.model, mesh=self.mesh, reshard_after_forward=setup.reshard[1])
        if setup.zeros:
            self.model.set_reduce_scatter_unused_params(True)
        self.model.set_strict_iterations(setup.strict)
        self.units = ["", *units]
        self.params: dict[str, DTensor] = dict(self.model.named_parameters())
        self.truth = dict(self.single.named_parameters())
        self.slots = [(m, k, p) for m in self.model.modules() for k, p in m._parameters.items()]
        self.unit_of = {n: max((u for u in self.units if n.startswith(u)), key=len) for n in self.params}
        make = (
            functools.partial(torch.optim.AdamW, lr=0.5, weight_decay=0.125)
            if setup.adam
            else functools.partial(torch.optim.SGD, lr=2.0**-5, momentum=0.5)
        )
        self.optimizer, self.true_optimizer = make(self.params.values()), make(self.truth.values())
        self.books = Books()
        self.syncs = dict.fromkeys(self.units, Sync.FULL)
        self.versions = dict.fromkeys(self.units, 0)
        self.planned = self.trainable()
        self.graphs: list[Graph] = []
        self.saved: list[Any] = []
        self.begun = self.stopped = self.standing = False
        self.gathering = False  # a gather by hand that nobody has waited for may be in flight
        self.inexact = False  # since gradients were clipped
        self.again: Callable[[], None] | None = None
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------ what must be so

    def check(self) -> None:
        """Gradients, parameters, where these stand, and what is held; nothing is in flight."""
        self.compare_grads("afterwards")
        for name, p in self.params.items():
            require(
                torch.equal(local(p), self.rows(p, self.truth[name])), f"{name} is {p}, expected {self.truth[name]}"
            )
        if not self.standing:
            for module, key, p in self.slots:
                require(module._parameters[key] is p, f"{key} of {type(module).__name__} isn't the sharded parameter")
        if self.stopped or not self.begun:
            return
        require([id(p) for p in self.model.parameters()] == [id(p) for p in self.params.values()], "parameters()")
        state = self.model.hsdp_state
        for unit, plan in zip(state.units, state.layout.units, strict=True):
            names = [p.name for p in plan.params]
            require(unit.reducing is None and unit.grad is None, f"{plan.title} is being reduced")
            require(
                self.gathering or self.standing or not isinstance(unit.full, Pending), f"{plan.title} is being gathered"
            )
            mine = dict(zip(names, unit.acc_full or [None] * len(names), strict=True))
            for name in names:
                expected = self.books.whole.get(name, (None, None))[1]
                require(same(mine[name], expected), f"held of {name}: {mine[name]}, expected {expected}")
            held = any(n in self.books.partial for n in names)
            require((unit.acc_partial is not None) == held, f"{plan.title} holds sums: {unit.acc_partial}")

    def compare_grads(self, when: str) -> None:
        for name, p in self.params.items():
            expected = self.books.grad.get(name)
            found = None if p.grad is None else local(p.grad)
            rows = None if expected is None else self.rows(p, expected)
            require(same(found, rows, self.inexact), f"{when}, .grad of {name} is {found}, expected {rows}")

    def rows(self, like: DTensor, whole: Tensor) -> Tensor:
        """This rank's of a whole tensor."""
        axis = self.mesh.ndim - 1
        return chunk(whole.detach(), self.mesh.size(axis), 0)[self.mesh.get_local_rank(axis)]

    # ------------------------------------------------------------------------------------------------------- the books

    def trainable(self) -> dict[str, bool]:
        return {n: p.requires_grad for n, p in self.truth.items()}

    def gradients(self, graph: Graph) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean over ranks and this rank's own, of what has a gradient."""
        params = [self.truth[n] for n in graph.names]
        flags = [p.requires_grad for p in params]
        for p in params:
            p.requires_grad_(True)
        each = [torch.autograd.grad(v, params, retain_graph=True, allow_unused=True) for v in graph.losses]
        for p, flag in zip(params, flags, strict=True):
            p.requires_grad_(flag)
        found = zip(graph.names, *each, strict=True)
        return {n: (sum(gs) / self.world, gs[self.rank]) for n, *gs in found if gs[0] is not None}

    def take(self, got: dict[str, tuple[Tensor, Tensor]], finish: bool = False) -> None:
        """A backward has ended with these, or an accumulation without one."""
        books = self.books = self.books.copy()
        for unit in self.units:
            sync = Sync.FULL if finish else self.syncs[unit]
            names = [n for n in self.params if self.unit_of[n] == unit]
            for name in names:
                if name in got:
                    before = books.whole.get(name, (0, 0))
                    books.whole[name] = before[0] + got[name][0], before[1] + got[name][1]
            if sync is Sync.NONE:
                continue
            for name in names:
                if name not in books.whole and self.setup.zeros and not finish:
                    books.whole[name] = torch.zeros_like(self.truth[name]), None
                if name in books.whole:
                    mean, _ = books.whole.pop(name)
                    if self.planned[name]:
                        books.partial[name] = books.partial.get(name, 0) + mean
                if sync is Sync.FULL and name in books.partial:
                    mean = books.partial.pop(name)
                    if self.truth[name].requires_grad:
                        books.grad[name] = books.grad.get(name, 0) + mean

    def changed(self, names: list[str]) -> None:
        """Parameters have: graphs of before can't be differentiated."""
        for unit in {self.unit_of[n] for n in names}:
            self.versions[unit] += 1

    def dropped(self) -> None:
        """The iteration is undone."""
        self.stopped = self.standing = False
        for graph in self.graphs:
            graph.dead = True

    def began(self) -> None:
        """A call has gone on with the tree, or made it."""
        if self.planned != self.trainable():
            self.planned = self.trainable()
            self.dropped()
        self.begun = True

    def refusal(self, runs: bool = True) -> str | None:
        """Why a call is refused now. ``runs``: it goes on with the iteration."""
        if self.stopped and self.setup.strict:
            return "call reset_iter_state() before anything else"
        now = self.trainable()
        edited = {self.unit_of[n] for n in now if now[n] != self.planned[n]}
        if runs and any(self.unit_of[n] in edited for n in self.books.partial):
            return "were frozen or unfrozen while sums of earlier microbatches are held back"
        return None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """A warning inside says that a backward which stopped is undone, if one has."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                undone = self.stopped and not self.setup.strict
                require(any("so it is undone" in str(w.message) for w in warned) == undone, f"warned of {warned}")
                if undone:
                    self.dropped()

    def call(
        self,
        body: Callable[[], Any],
        trap: Trap | None = None,
        *,
        runs: bool = True,
        begins: bool = True,
        wrong: str = "",
    ) -> tuple[bool, Any]:
        """Whether the library has done it, and what it has returned. It hasn't if it must refuse it, if the call is
        ``wrong``, or if the trap springs."""
        refused = self.refusal(runs) or wrong or None
        with self.told():
            try:
                found = body()
            except Boom:
                require(trap is not None and trap.fired, "raised by nobody")
                self.seen["failed calls"] += 1
                if runs:
                    self.began()
                return False, None
            except RuntimeError as error:
                require(refused is not None and refused in str(error), f"raised {error!r}")
                self.seen["refused"] += 1
                return False, None
        require(refused is None, f"not refused: {refused}")
        if runs and begins:
            self.began()
        return True, found

    def graph_of(self, loss: Tensor, at: int, route: Any = None) -> Graph:
        losses = [loss_of(self.single, at, rank, route) for rank in range(self.world)]
        expected = losses[self.rank]
        require(torch.equal(loss.detach(), expected.detach()), f"loss {loss.item()}, expected {expected.item()}")
        names = [n for n, p in self.truth.items() if p.requires_grad]
        return Graph(loss, losses, names, dict(self.versions))

    def run_forward(self, at: int, route: Any, trap: Trap) -> Graph | None:
        if not (self.setup.routes and self.begun):
            route = None
        done, loss = self.call(lambda: loss_of(self.model, at, self.rank, route), trap)
        if not done:
            if trap.fired:
                self.dropped()
            return None
        self.standing = True
        return self.graph_of(loss, at, route)

    def run_backward(self, graph: Graph, trap: Trap, retain: bool = False) -> bool:
        outdated = [u for u in self.units if graph.versions[u] != self.versions[u]]
        if not graph.loss.requires_grad:
            return False
        trap.on &= not (graph.dead or self.stopped or outdated)  # refused, perhaps after a gather
        if graph.dead:
            require_raises(PhaseError, "ended|dropped", graph.loss.backward)
            self.seen["dead graphs"] += 1
            return False
        if self.stopped:
            require_raises(PhaseError, "another backward of this iteration stopped", graph.loss.backward)
            self.seen["graphs of a stopped iteration"] += 1
            return False
        if outdated:
            require_raises(PhaseError, "have changed", graph.loss.backward)
            self.seen["outdated graphs"] += 1
            self.stopped = self.standing = True
            return False
        try:
            graph.loss.backward(retain_graph=retain)
        except Boom:
            require(trap.fired, "raised by nobody")
            self.seen["failed backwards"] += 1
            self.stopped = self.standing = True
            return False
        got = self.gradients(graph)
        self.take(got)
        self.standing = self.gathering = False
        self.seen["backwards"] += 1
        return True


def require(fact: bool, text: str) -> None:
    if not fact:
        raise AssertionError(text)


def require_raises(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    """As ``pytest.raises``."""
    try:
        call()
    except error as raised:
        require(re.search(match, str(raised)) is not None, f"{match!r} isn't in {raised}")
    else:
        raise AssertionError(f"no {error.__name__} about {match!r}")


def same(a: Tensor | None, b: Tensor | None, nearly: bool = False) -> bool:
    """Equal; ``nearly``: to 12 digits of the largest value."""
    if a is None or b is None:
        return a is b
    if a.shape == b.shape and nearly and b.numel():
        return bool((a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1.0))
    return torch.equal(a, b)
