"""One unit's step as a compiled graph with its collectives inside (dynamic to static, unit by unit).

`jit_unit` compiles a pure function of a unit's full parameters with ``mindspore.jit``. The graph starts from this
rank's flat shards: it casts and gathers them, cuts them into parameters, runs the function, differentiates it, packs,
reduces and scales (`traced` has its source). States, checks and ledgers stay in Python, since none of them can be
compiled. It is the eager path's arithmetic in one program.

Run with ``mccl`` on CPU, where a graph has no reduce-scatter, and an all-gather over all ranks of the world only: the
first is an all-reduce and the own chunk, the second, over other groups, an all-reduce of zeros around the own shard
(the same values, except that -0.0 becomes 0.0). MindSpore's operators, for Ascend, have never been run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.communication.management import GlobalComm
from mindspore.graph.api import _pynative_executor

from hsdp_fn import BackendError, GradPhase, GradShards, HSDPState, LayoutError, PhaseError, UnitState
from hsdp_fn.layout import Bucket, Collective, UnitLayout
from hsdp_fn.lifecycle import Op, check
from hsdp_fn.state import Token

from . import compat, traced
from .backend import MSBackend, ms_backend
from .casting import is_floating

#: What the kernels of compiled collectives take on CPU (eager ones take more): gathered over the world, and summed.
_GATHERED = frozenset({"float16", "float32", "float64", "int16", "int32", "int64"})
_SUMMED = frozenset({"float16", "float32"})


def jit_unit(state: HSDPState, unit: str, function: Callable[..., Any]) -> UnitGraph:
    """Compile the step of one unit. Does not communicate; MindSpore compiles at the first call with inputs of a shape.

    Example:
        block = jit_unit(state, "layers.0", block_fn)             # block_fn(params, x) -> y
        y, state = block.forward(state, x)
        (grad_x,), state = block.backward(state, (x,), grad_y)

    Args:
        state: gives the layout and the backend; stays usable. The graph serves every state of this layout.
        unit: name of the unit.
        function: ``function(params, *inputs)`` of the unit's full parameters by name (as in `Params.run`) and of
            tensors; returns a tensor or a tuple of them. A plain Python function without side effects that
            ``mindspore.jit`` can parse, with its source at hand. Tensors that it captures are constants.

    Raises:
        UnknownUnitError: the layout has no such unit.
        TypeError: ``function`` isn't a Python function with source, or captures a `Parameter` or a cell that has some:
            the graph would use their values of the first call for ever, and give them no gradient.
        BackendError: a dtype that compiled collectives can't carry, or a parameter without elements.
    """
    backend = ms_backend(state)
    (index,) = state.layout.select(unit)
    plan = state.layout.units[index]
    _check_function(function, plan)
    for bucket in plan.buckets:
        _check_bucket(bucket, plan, backend)
    return UnitGraph(state, index, function)


class UnitGraph:
    """A unit's compiled step; made by `jit_unit`.

    Each method takes a state and the unit's inputs, consumes the state and returns the next one. It reads the unit's
    masters; parameters that are gathered already stay so, and aren't used. A call that raises consumes nothing.

    Inputs are tensors, cast as the unit's `MixedPrecisionPolicy` says. New shapes or dtypes compile anew.

    Raises (all methods):
        StaleStateError: the state was consumed.
        LayoutError: the state has another layout.
        TypeError: an input isn't a tensor.
        PhaseError: inside an eager differentiation, in which the parameters' gradients would be lost.
        NotImplementedError: inside an attempt of `recoverable`: how far a graph has come can't be seen from outside, so
            a failed rank couldn't take part in what its peers wait for.
        BackendError: MindSpore couldn't compile or run the graph. If that happens on one rank alone, its peers wait in
            the graph's first collective until MindSpore gives up.
    """

    def __init__(self, state: HSDPState, index: int, function: Callable[..., Any]) -> None:
        self._layout, self._backend, self._index = state.layout, ms_backend(state), index
        self._plan = plan = state.layout.units[index]
        self._what = f"{function.__qualname__} of unit {plan.title!r}"
        self._call = traced.caller(function, plan)
        self._gathers = [_gatherer(bucket, self._backend) for bucket in plan.buckets]
        self._reduces = [_reducer(bucket, plan, self._backend) for bucket in plan.buckets if bucket.grads is not None]
        self._trainable = [[m.spec.requires_grad for m in bucket.params.members] for bucket in plan.buckets]
        self._forward = ms.jit(traced.forward_program(self._gathers, self._call))
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def forward(self, state: HSDPState, *inputs: Tensor) -> tuple[Any, HSDPState]:
        """``(function(params, *inputs), state')``.

        Communicates, in the graph: one all-gather a bucket over its shard group. The new state differs in its ledger.
        """
        unit = self._unit(state, inputs, "forward")
        out = self._run(self._forward, unit, inputs)
        return out, self._next(state, unit, backward=False, op="forward")

    def backward(
        self, state: HSDPState, inputs: Sequence[Tensor], out_grads: Any
    ) -> tuple[tuple[Tensor | None, ...], HSDPState]:
        """``(gradients of the inputs, state')``: the vector-Jacobian product; computes forward again.

        Communicates, in the graph and in this order: one all-gather a bucket over its shard group; then, bucket by
        bucket, a reduce-scatter over the shard group and an all-reduce over the replicate group, where those have more
        than one rank.

        Args:
            inputs: of the forward.
            out_grads: a gradient of each output, of its shape and dtype: a tensor, or a tuple where ``function``
                returns one.

        Returns:
            One gradient an input, None for those that aren't floating. In the state the unit's finished gradient,
            scaled by its `ReductionPolicy` and added to one that waits for `grads` already. *Every* trainable parameter
            of the unit has one: zeros where ``function`` doesn't use it, which the eager path leaves without.

        Raises:
            PhaseError: also when gradients are in flight, or held by ``Sync.NONE`` or ``Sync.SHARD``: a graph reduces
                fully, so all microbatches of such a step have to.
            TypeError: also when there is nothing to differentiate, or ``out_grads`` aren't tensors.
            GradientError: ``out_grads`` don't fit the outputs.
        """
        if not isinstance(inputs, (tuple, list)):
            raise TypeError(f"inputs must be a tuple of tensors, found {type(inputs).__name__}")
        single = not isinstance(out_grads, (tuple, list))
        given = (out_grads,) if single else tuple(out_grads)
        if not given or not all(isinstance(g, Tensor) for g in given):
            found = [type(g).__name__ for g in given]
            raise TypeError(f"out_grads must be a tensor or a non-empty tuple of tensors, found {found}")
        unit, floating = self._differentiable(state, inputs, "backward")
        program = self._program(traced.backward_program, floating, single)
        shapes = ", ".join(f"{tuple(g.shape)} {g.dtype}" for g in given)
        grads, flats = self._run(program, unit, (*inputs, *given), f"; found {shapes}")
        new = self._next(state, self._with_gradient(unit, flats), backward=True, op="backward")
        return _placed(grads, floating), new

    def value_and_grad(
        self, state: HSDPState, *inputs: Tensor
    ) -> tuple[tuple[Tensor, tuple[Tensor | None, ...]], HSDPState]:
        """``((loss, gradients of the inputs), state')`` for a ``function`` that returns a loss, a floating tensor of
        one element: forward and backward in one graph, gathered once. Communicates, returns and raises as `backward`.
        """
        unit, floating = self._differentiable(state, inputs, "value_and_grad")
        grads, flats, loss = self._run(self._program(traced.loss_program, floating), unit, inputs)
        new = self._next(state, self._with_gradient(unit, flats), backward=True, op="value_and_grad")
        return (loss, _placed(grads, floating)), new

    def _unit(self, state: HSDPState, inputs: Sequence[Tensor], op: str) -> UnitState:
        """The unit's state, when everything is in order."""
        state.token.require(op)
        if state.layout != self._layout or ms_backend(state).spec != self._backend.spec:
            raise LayoutError(f"{op}: {self._what} was compiled for another layout; make it anew with jit_unit")
        for at, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{op}: input {at} of {self._what} is a {type(tensor).__name__}; inputs are tensors, let the "
                    f"function capture what is constant"
                )
        recorded = any(t._requires_grad and not t._is_leaf for t in inputs)  # for ``backward()`` everything may be
        if _pynative_executor.requires_grad() and (recorded or not compat.enabled()):
            raise PhaseError(
                f"{op}: {self._what} was called inside a differentiation, which can't reach its parameters; call "
                f"backward() or value_and_grad() of the compiled unit instead"
            )
        if state.token.journal is not None:
            raise NotImplementedError(
                f"{op}: compiled units can't take part in attempts of recoverable; use the eager value_and_grad there"
            )
        return state.units[self._index]

    def _differentiable(
        self, state: HSDPState, inputs: Sequence[Tensor], op: str
    ) -> tuple[UnitState, tuple[bool, ...]]:
        """`_unit`, of which a gradient can be taken; and which inputs are floating."""
        unit = self._unit(state, inputs, op)
        check(unit.name, unit.params_phase, unit.grads_phase, Op.REDUCE)
        if unit.grads_phase is GradPhase.HELD:
            raise PhaseError(
                f"{op}: unit {self._plan.title!r} holds gradients of microbatches that aren't fully reduced, which a "
                f"graph can't go on with: finish with reduce_grads(state, None), or use Sync.FULL throughout the step"
            )
        floating = tuple(is_floating(tensor) for tensor in inputs)
        if not any(floating) and not self._plan.trainable:
            raise TypeError(f"{op}: {self._what} has neither trainable parameters nor floating inputs")
        return unit, floating

    def _program(self, make: Callable[..., Any], floating: tuple[bool, ...], *more: bool) -> Callable[..., Any]:
        """The compiled program for inputs of this kind, made on first use."""
        key = (make, floating, *more)
        if key not in self._programs:
            program = make(self._gathers, self._call, self._reduces, self._trainable, floating, *more)
            self._programs[key] = ms.jit(program)
        return self._programs[key]

    def _run(self, program: Callable[..., Any], unit: UnitState, args: Sequence[Tensor], found: str = "") -> Any:
        """Run a graph on the unit's masters. What was issued before runs first, so that late errors of other operators
        aren't taken for the graph's.

        Args:
            found: for the text of an error that the program raises itself.
        """
        self._backend.catch_up()
        try:
            with ms._no_grad():
                out = program(*unit.master, *args)
                self._backend.catch_up()
        except Exception as error:
            text = next((line.strip(" -'") for line in str(error).splitlines() if line.strip(" -")), "")
            for kind, start in traced.REFUSALS:
                if start in text:
                    raise kind(f"{self._what}: {text}{found}") from error
            raise BackendError(
                f"MindSpore couldn't compile or run {self._what}: {type(error).__name__}: {text}; its whole text is "
                f"above"
            ) from error
        return out

    def _with_gradient(self, unit: UnitState, flats: Sequence[Tensor]) -> UnitState:
        """The unit with these shards of its finished gradient, beside or added to what it had."""
        given, new = iter(flats), []
        for i, bucket in enumerate(self._plan.buckets):
            before = None if unit.grad is None else unit.grad.flats[i]
            flat = next(given) if bucket.grads is not None else None
            if flat is not None and before is not None:
                flat = self._backend.add(before, flat, bucket.grad_dtype)
            new.append(flat)
        present = tuple(p.requires_grad for p in self._plan.params)
        grad = GradShards(tuple(new), present) if any(present) else None
        return UnitState(unit.name, unit.master, unit.full, None, None, None, grad)

    def _next(self, state: HSDPState, unit: UnitState, *, backward: bool, op: str) -> HSDPState:
        """The state after a call that has succeeded."""
        self._backend.catch_up()
        units = tuple(unit if i == self._index else u for i, u in enumerate(state.units))
        ledger = state.ledger + tuple(_issued(self._plan, backward))
        new = HSDPState(units, state.layout, state.backend, state.step, state.micro, ledger, Token())
        state.token.consume(op)
        return new


def _issued(plan: UnitLayout, backward: bool) -> Iterator[Collective]:
    """The collectives of one graph, in order."""
    found = [b.gather for b in plan.buckets]
    for bucket in plan.buckets if backward else ():
        if bucket.grads is not None:
            found += [bucket.reduce_scatter, bucket.all_reduce]
    return (collective for collective in found if collective is not None)


def _placed(grads: Sequence[Tensor], floating: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """One gradient an input."""
    given = iter(grads)
    return tuple(next(given) if flag else None for flag in floating)


def _gatherer(bucket: Bucket, backend: MSBackend) -> Callable[..., Any]:
    if bucket.gather is None:
        return traced.gatherer(bucket, None)
    group = backend.group(bucket.mesh, bucket.mesh.shard)
    ranks, index = bucket.mesh.shard_size, bucket.mesh.shard_index(backend.rank)
    native = _gathers_natively(group, backend)
    return traced.gatherer(bucket, traced.all_gather(group, ranks, index, native=native))


def _reducer(bucket: Bucket, plan: UnitLayout, backend: MSBackend) -> Callable[..., Any]:
    scatter = everywhere = None
    if bucket.reduce_scatter is not None:
        group = backend.group(bucket.mesh, bucket.mesh.shard)
        ranks, index = bucket.mesh.shard_size, bucket.mesh.shard_index(backend.rank)
        scatter = traced.reduce_scatter(group, ranks, index, native=backend.kind != "mccl")
    if bucket.all_reduce is not None:
        everywhere = traced.all_reduce(backend.group(bucket.mesh, bucket.mesh.replicate))
    return traced.reducer(bucket, plan, scatter, everywhere)


def _gathers_natively(group: str, backend: MSBackend) -> bool:
    return backend.kind != "mccl" or group == GlobalComm.WORLD_COMM_GROUP


def _check_bucket(bucket: Bucket, plan: UnitLayout, backend: MSBackend) -> None:
    """Raise `BackendError` for what graphs can't do: on CPU their collectives know fewer dtypes than eager ones."""
    names = [m.spec.name for m in bucket.params.members]
    if empty := [m.spec.name for m in bucket.params.members if not m.spec.numel]:
        raise BackendError(f"parameters {empty} of unit {plan.title!r} have no elements; compile a unit without them")
    if backend.kind != "mccl":
        return
    if bucket.gather is not None:
        native = _gathers_natively(backend.group(bucket.mesh, bucket.mesh.shard), backend)
        known = _GATHERED if native else _SUMMED
        if bucket.compute_dtype not in known:
            where = "over the whole world" if native else "over a part of the world"
            raise BackendError(
                f"a compiled gather {where} can't carry {bucket.compute_dtype} on CPU, asked for by {names} of unit "
                f"{plan.title!r}; it can carry {sorted(known)}"
            )
    reduces = bucket.reduce_scatter is not None or bucket.all_reduce is not None
    if reduces and bucket.reduce_dtype not in _SUMMED:
        raise BackendError(
            f"a compiled reduction can't carry {bucket.reduce_dtype} on CPU, asked for by {names} of unit "
            f"{plan.title!r}; give a reduce_dtype of {sorted(_SUMMED)}"
        )


def _check_function(function: Callable[..., Any], plan: UnitLayout) -> None:
    """Raise `TypeError` for a function whose source can't be read, or that brings parameters of its own."""
    if not inspect.isfunction(function):
        raise TypeError(f"expected a Python function for unit {plan.title!r}, found {type(function).__name__}")
    try:
        inspect.getsource(function)
    except (OSError, TypeError):
        raise TypeError(f"{function.__qualname__} has no source at hand, which mindspore.jit compiles") from None
    for name, value in _captured(function, set()):
        if isinstance(value, Parameter) or (isinstance(value, nn.Cell) and any(True for _ in value.get_parameters())):
            raise TypeError(
                f"{function.__qualname__} uses {name} ({type(value).__name__}), which has parameters of its own: a "
                f"compiled graph would keep their first values for ever and give them no gradient; use the parameters "
                f"that the function is given"
            )


def _captured(function: Callable[..., Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a function, and the plain functions that it uses, take from outside."""
    if id(function) in seen or function.__module__.split(".")[0] == "mindspore":
        return
    seen.add(id(function))
    found = inspect.getclosurevars(function)
    for name, value in {**found.globals, **found.nonlocals}.items():
        yield name, value
        if inspect.isfunction(value):
            yield from _captured(value, seen)
