"""Functional training: a loss function of gathered parameters becomes a function from state to state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hsdp_fn import ROOT, HSDPState, Sync, expected_comm
from hsdp_fn.handling import handling_of
from hsdp_fn.params import Params
from hsdp_fn.state import phases_of

from .binding import binding_of
from .casting import map_tensors
from .frame import Frame
from .use import Handling


def functional_call(model: nn.Module, params: Params, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """``model(*args, **kwargs)`` with the gathered parameters of ``params`` in place of its own.

    Communicates: each unit's all-gather just before its module runs (the root unit's before the model's), and the next
    unit's beside it. The model's own parameters are neither read nor changed; its buffers are used as they are.

    Args:
        model: the module that the layout was planned for. Each unit's module must be run by calling it.
        params: what `value_and_grad` or `evaluate` passed to the function.
        args: positional arguments; a single tensor may stand for itself.
        kwargs: keyword arguments.

    Raises:
        LayoutError: the model lacks a parameter or unit module of the layout.
    """
    frame = params._frame
    frame.bind(binding_of(model, frame.layout))
    args = args if isinstance(args, tuple) else (args,)
    root = frame.layout.unit_index.get(ROOT)
    if root is None:
        return model(*args, **(kwargs or {}))
    return frame.run(root, model, args, kwargs or {})


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
    peers wait for it in the next collective.)

    Args:
        fn: takes a `Params` and the batch; returns the loss, a real scalar tensor, or ``(loss, aux)`` with ``has_aux``.
        has_aux: ``fn`` returns a pair. Tensors of ``aux`` are detached.

    Raises (by the step):
        StaleStateError: the state was consumed; TypeError: ``fn`` didn't return a scalar tensor.
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
        frame = Frame(state, handling_of(state, sync, Handling, reshard_after_backward=reshard_after_backward))
        try:
            with torch.enable_grad():
                out = fn(Params(frame), *batch, **kwargs)
                loss, aux = _loss_of(out, has_aux)
                frame.backward(loss)
            new = frame.commit()
            frame.backend.settle()  # as in `evaluate`
        except BaseException as error:
            frame.abort()
            _explain(error)
            raise
        state.token.consume("value_and_grad")
        return (loss.detach(), map_tensors(aux, torch.Tensor.detach)), new

    return step


def evaluate(fn: Callable[..., Any]) -> Callable[..., tuple[Any, HSDPState]]:
    """Make ``run(state, *batch, **kwargs) -> (fn(params, *batch, **kwargs), state')`` without gradients.

    Communicates: one all-gather over the shard group for each bucket that isn't gathered, so all ranks must call it
    equally often. After ``unshard(state)`` it doesn't communicate, and ranks may call it as often as they like: units
    that come gathered stay gathered. The new state differs in its ledger only.
    """

    def run(state: HSDPState, *batch: Any, **kwargs: Any) -> tuple[Any, HSDPState]:
        state.token.require("evaluate")
        if state.token.journal is not None:
            state.token.journal.plan(expected_comm(state.layout, backward=False, phases=phases_of(state)))
        frame = Frame(state, handling_of(state, Sync.NONE, Handling), forward_only=True)
        try:
            with torch.no_grad():
                out = fn(Params(frame), *batch, **kwargs)
            new = frame.rest_forward()
            frame.backend.settle()  # masters that are being copied to the device may be written in place
        except BaseException as error:
            frame.abort()
            _explain(error)
            raise
        state.token.consume("evaluate")
        return out, new

    return run


def _explain(error: BaseException) -> None:
    """Say what a clash with the meta device means here."""
    if isinstance(error, RuntimeError) and "meta" in str(error) and hasattr(error, "add_note"):
        error.add_note(
            "Outside the forward of its unit a module has placeholders on the meta device for parameters. Was a weight "
            "used before or after its unit ran, or a unit's forward() called directly instead of the module? Use "
            "params[name] for a full parameter, or put both modules into one unit."
        )


def _loss_of(out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux:
        if not (isinstance(out, Sequence) and len(out) == 2):
            raise TypeError(f"with has_aux=True the function must return (loss, aux), found {type(out).__name__}")
        loss, aux = out
    else:
        loss, aux = out, None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the function must return a scalar floating loss, found {found}; with has_aux=True a pair")
    if loss.is_meta:
        raise TypeError(
            "the loss is on the meta device: it was made of the module's placeholders, outside the forward "
            "of their unit; use params[name] for the full parameter"
        )
    if not loss.requires_grad:
        raise TypeError("the loss doesn't depend on any trainable parameter of the state; was it detached?")
    return loss, aux
