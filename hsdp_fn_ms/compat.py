"""``loss.backward()``, ``param.grad`` and their kin, which MindSpore's tensors lack, as HyperParallel gave them.

Without it, differentiate with ``mindspore.value_and_grad(fn, None, weights=cell.trainable_params())``, as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

from .casting import is_floating
from .probe import facts, settle

_enabled = False
_failures = 0  # backwards that have raised
_running: list[set[int] | None] = []  # of each backward that runs at this moment, the leaves that it is for; None: all


def enable_mindspore_backward_compat() -> None:
    """Give tensors ``backward()``, ``grad``, ``requires_grad``, ``is_leaf``, ``grad_fn``, ``retain_grad()``,
    ``retains_grad`` and ``detach()``, and cells ``zero_grad()``, as PyTorch has them, in this process. Does nothing the
    second time. (What MindSpore has of these already stays.)

    From here on forwards are recorded for a later ``backward()``, unless inside ``mindspore._no_grad()``: evaluate
    there.

    (``mindspore.value_and_grad`` marks the tensors that it is called with as requiring gradients, for good: don't pass
    the same ones to a forward for ``backward()``.)

    ``backward`` communicates what the backward of `fully_shard` does. Afterwards ``param.grad`` has this rank's rows of
    the reduced gradient, added to what was there; MindSpore's optimizers take them by hand::

        loss.backward()
        optimizer(tuple([p.grad for p in optimizer.parameters]))
        cell.zero_grad()
    """
    global _enabled
    facts()
    if not _enabled:
        for name, what in _TENSOR.items():
            if not hasattr(Tensor, name):
                setattr(Tensor, name, what)
        if not hasattr(nn.Cell, "zero_grad"):
            nn.Cell.zero_grad = zero_grad
        _pynative_executor.grad = _recording_after(_pynative_executor.grad)
    _enabled = True
    record()


def _recording_after(grad: Callable[..., Any]) -> Callable[..., Any]:
    """MindSpore's own differentiation, which ends all recording; but what follows is to be recorded again."""

    @functools.wraps(grad)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        try:
            return grad(*args, **kwargs)
        finally:
            record()

    return differentiate


def record() -> None:
    """Let what follows be recorded for ``backward()``, where that is there."""
    if _enabled:
        _pynative_executor.set_grad_flag(True)


def enabled() -> bool:
    """Whether ``backward()`` is there."""
    return _enabled


def delivers() -> bool:
    """Whether it is ``backward()`` that runs, whose gradients go to ``.grad``."""
    return bool(_running)


def failures() -> int:
    """How many of ``backward()`` have raised so far."""
    return _failures


def wanted(param: Tensor) -> bool:
    """Whether the ``backward()`` that runs is for this leaf."""
    return _running[-1] is None or id(param) in _running[-1]


def zero_grad(self: nn.Cell, set_to_none: bool = True) -> None:
    """Drop (or replace by zeros) ``.grad``, and ``main_grad`` where there is one, of the cell's parameters."""
    for param in self.get_parameters():
        for name in ("_grad", "main_grad"):
            if (held := getattr(param, name, None)) is not None:
                setattr(param, name, None if set_to_none else ops.zeros_like(held))


def backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Differentiate, and add the gradients to ``.grad`` of the leaves.

    Args:
        gradient: of this tensor; None: 1, for a floating tensor of one element.
        retain_graph: whether another backward through the same graph follows.
        inputs: the leaves that get gradients; None: all.

    Raises:
        RuntimeError: it needs a ``gradient``, doesn't require gradients, or was recorded before.
        NotImplementedError: ``create_graph``.
    """
    global _failures
    if create_graph:
        raise NotImplementedError("backward(create_graph=True): MindSpore differentiates twice through ms.grad only")
    if not self._requires_grad:
        raise RuntimeError(
            "backward: this tensor doesn't require gradients; it was computed without any trainable parameter, under "
            "mindspore._no_grad(), or before enable_mindspore_backward_compat()"
        )
    if gradient is None:
        if self.size != 1 or not is_floating(self):
            raise RuntimeError(
                f"backward without a gradient needs a floating tensor of one element, found {tuple(self.shape)} of "
                f"{self.dtype}"
            )
        gradient = ops.ones_like(self)
    elif not isinstance(gradient, Tensor):
        raise TypeError(f"backward: the gradient must be a tensor, found {type(gradient).__name__}")
    elif tuple(gradient.shape) != tuple(self.shape) or gradient.dtype != self.dtype:
        raise RuntimeError(
            f"backward: the gradient is {tuple(gradient.shape)} of {gradient.dtype}, the tensor {tuple(self.shape)} of "
            f"{self.dtype}"
        )
    leaves = None if inputs is None else list(inputs)
    if leaves is not None and (not leaves or not all(isinstance(t, Tensor) for t in leaves)):
        raise RuntimeError(f"backward: inputs must be tensors that require gradients, or None; found {inputs!r}")
    _running.append(None if leaves is None else {id(t) for t in leaves})
    try:
        run_backward((self,), (gradient,), retain_graph, False, tuple(leaves or ()))
        if facts().device == "CPU":
            settle()  # or an operator's error would come later
    except BaseException:
        _failures += 1
        raise
    finally:
        _running.pop()


def _set_grad(self: Tensor, value: Tensor | None) -> None:
    self._grad = value


def _set_requires_grad(self: Tensor, value: bool) -> None:
    self._requires_grad = value


def _retain_grad(self: Tensor) -> None:
    """MindSpore's own copies the gradient, for which CPU has no kernel."""
    owner = weakref.ref(self)

    def keep(grad: Tensor) -> Tensor:
        if (tensor := owner()) is not None:
            tensor._grad = grad if tensor._grad is None else ops.add(tensor._grad, grad)
        return grad

    if not self._is_leaf and not getattr(self, "_hsdp_retains", False):
        self._hsdp_retains = True
        self.register_hook(keep)


def _detach(self: Tensor) -> Any:
    return ops.stop_gradient(self)


_TENSOR: dict[str, Any] = {
    "backward": backward,
    "grad": property(lambda self: self._grad, _set_grad, doc="The gradient, or None."),
    "requires_grad": property(lambda self: self._requires_grad, _set_requires_grad, doc="Whether it gets gradients."),
    "is_leaf": property(lambda self: self._is_leaf, doc="Whether no recorded operator has made it."),
    "grad_fn": property(lambda self: self._grad_node, doc="What has made it, for autograd."),
    "retain_grad": _retain_grad,
    "retains_grad": property(
        lambda self: getattr(self, "_hsdp_retains", False), doc="Whether it does, no leaf though."
    ),
    "detach": _detach,
}
