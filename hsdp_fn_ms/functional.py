"""Functional training: a loss function of gathered parameters becomes a function from state to state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor

from hsdp_fn import ROOT, HSDPState, Sync, expected_comm
from hsdp_fn.handling import Handling, handling_of
from hsdp_fn.params import Params
from hsdp_fn.state import phases_of

from .binding import binding_of
from .casting import is_floating, map_tensors
from .frame import Frame


def functional_call(cell: nn.Cell, params: Params, *args: Any, **kwargs: Any) -> Any:
    """``cell(*args, **kwargs)`` with the gathered parameters of ``params`` in place of its own.

    Communicates: each unit's all-gather just before its cell runs (the root unit's before the model's), and the next
    unit's beside it. The model's own parameters are neither read nor changed.

    Args:
        cell: the model that the layout was planned for. Each unit's cell must be run by calling it.
        params: what `value_and_grad` or `evaluate` passed to the function.

    Raises:
        LayoutError: the model lacks a parameter or unit cell of the layout.
        NotImplementedError: a cell with ``recompute``, ``mindspore.jit`` or a ``bprop`` of its own, which would lose
            gradients.
        PhaseError: outside of the call that made ``params``.
    """
    frame = params._frame
    frame.bind(binding_of(cell, frame.layout))
    root = frame.layout.unit_index.get(ROOT)
    if root is None:
        return cell(*args, **kwargs)
    return frame.run(root, cell, args, kwargs)


def value_and_grad(
    fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[tuple[Tensor, Any], HSDPState]]:
    """Make ``step(state, *batch, sync=Sync.FULL, reshard_after_backward=True, **kwargs) -> ((loss, aux), state')``.

    The step runs ``loss = fn(params, *batch, **kwargs)`` forward and backward. Communicates, with ``U`` units that are
    resharded after forward and a root that isn't: ``2U + 1`` all-gathers over the shard group and, with ``SHARD`` or
    ``FULL``, ``U + 1`` reduce-scatters; with ``FULL`` on a mesh that replicates also ``U + 1`` all-reduces over the
    replicate group. `expected_comm` lists them. Gradients are in the state afterwards: take them with `grads`, which
    waits for the last reductions.

    With ``reshard_after_backward=False`` units stay gathered in the state, where the next microbatch finds them: with
    `unshard` before the first one, each unit is gathered once a step. Without effect on numbers. Before an update they
    have to be resharded: by the last microbatch, or `shard`.

    A step that raises never happened: the state passed in stays usable, byte for byte. (When one rank raises alone, its
    peers wait for it in the next collective; see `recoverable`.)

    Args:
        fn: takes a `Params` and the batch; returns the loss, a floating tensor of one element, or ``(loss, aux)`` with
            ``has_aux``.
        has_aux: ``fn`` returns a pair. Tensors of ``aux`` are detached.

    Raises (by the step):
        StaleStateError: the state was consumed; TypeError: ``fn`` didn't return such a loss.
    """

    def step(
        state: HSDPState, *batch: Any, sync: Sync = Sync.FULL, reshard_after_backward: bool = True, **kwargs: Any
    ) -> tuple[tuple[Tensor, Any], HSDPState]:
        state.token.require("value_and_grad")
        if not isinstance(sync, Sync):
            raise TypeError(f"sync must be a Sync (NONE, SHARD or FULL), found {sync!r}")
        if not isinstance(reshard_after_backward, bool):
            raise TypeError(f"reshard_after_backward must be a bool, found {reshard_after_backward!r}")
        if state.token.journal is not None:
            state.token.journal.plan(expected_comm(state.layout, sync=sync, phases=phases_of(state)))
        ways = handling_of(state, sync, Handling, reshard_after_backward=reshard_after_backward)
        frame = Frame(state, ways)
        extra: list[Any] = []

        def forward(anchor: Tensor) -> Tensor:
            frame.begin_pass().anchor = anchor
            out = fn(Params(frame), *batch, **kwargs)
            loss, aux = _loss_of(out, has_aux)
            extra.append(map_tensors(aux, ops.stop_gradient))
            frame.begin_backward()
            return loss

        try:
            loss = _differentiated(forward)
            with ms._no_grad():
                new = frame.commit()
        except BaseException:
            frame.abort()
            raise
        state.token.consume("value_and_grad")
        return (ops.stop_gradient(loss), extra[0]), new

    return step


def evaluate(fn: Callable[..., Any]) -> Callable[..., tuple[Any, HSDPState]]:
    """Make ``run(state, *batch, **kwargs) -> (fn(params, *batch, **kwargs), state')`` without gradients.

    Communicates: one all-gather over the shard group for each bucket that isn't gathered, so all ranks must call it
    equally often. After ``unshard(state)`` it doesn't communicate: units that come gathered stay gathered. The new
    state differs in its ledger only.
    """

    def run(state: HSDPState, *batch: Any, **kwargs: Any) -> tuple[Any, HSDPState]:
        state.token.require("evaluate")
        if state.token.journal is not None:
            state.token.journal.plan(expected_comm(state.layout, backward=False, phases=phases_of(state)))
        frame = Frame(state, handling_of(state, Sync.NONE, Handling))
        frame.begin_pass()
        try:
            with ms._no_grad():
                out = fn(Params(frame), *batch, **kwargs)
                new = frame.end_forward()
        except BaseException:
            frame.abort()
            raise
        state.token.consume("evaluate")
        return out, new

    return run


def _differentiated(forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Run ``forward(anchor)`` and its backward. MindSpore never ends the graph of a function that raises a Python
    exception, and backwards after it fail (LayerNorm's, for one: guarded by test_failures.py). So the exception is kept
    until the graph has ended with another result."""
    recording, failure = _pynative_executor.grad_flag(), None

    def careful(anchor: Tensor) -> Tensor:
        nonlocal failure
        try:
            return forward(anchor)
        except BaseException as error:
            failure = error
            return anchor * 1.0

    try:
        loss, _ = ms.value_and_grad(careful, 0)(Tensor(np.zeros((), np.float32)))
    except BaseException as error:
        failure = failure or error
    finally:
        _pynative_executor.set_grad_flag(recording)
    if failure is not None:
        raise failure
    return loss


def _loss_of(out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux:
        if not (isinstance(out, Sequence) and len(out) == 2):
            raise TypeError(f"with has_aux=True the function must return (loss, aux), found {type(out).__name__}")
        loss, aux = out
    else:
        loss, aux = out, None
    if not isinstance(loss, Tensor) or loss.size != 1 or not is_floating(loss):
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the function must return a scalar floating loss, found {found}; with has_aux=True a pair")
    if not loss._requires_grad:
        raise TypeError("the loss doesn't depend on any trainable parameter of the state; was it detached?")
    return loss, aux
