"""What MindSpore records for backward: that it does, how it is ended, and the end of a backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint
from mindspore.graph.api import _pynative_executor
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

from hsdp_fn import PhaseError

from . import compat
from .use import Pass

if TYPE_CHECKING:
    from .tree import Tree


def end_failed_graphs() -> None:
    """From now on, in this process, end what MindSpore records when a function that it differentiates raises, which it
    forgets: the next backward of some operators (LayerNorm) would fail. Does nothing the second time."""
    if getattr(base._pynative_func_grad_forward, "_hsdp_ends", False):
        return
    forward, running = base._pynative_func_grad_forward, 0

    @functools.wraps(forward)
    def ended(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running += 1
        try:
            return forward(fn, *args, **kwargs)
        except BaseException:
            if running == 1:  # else an outer function goes on, if it catches this
                end_recording()
            raise
        finally:
            running -= 1

    ended._hsdp_ends = True  # type: ignore[attr-defined]
    base._pynative_func_grad_forward = grad_func._pynative_func_grad_forward = ended


def end_recording() -> None:
    """End what MindSpore still records."""
    recording = _pynative_executor.grad_flag()
    _pynative_executor.clear_res()
    _pynative_executor.set_grad_flag(recording)


class End:
    """The end of a pass's backward.

    Args:
        params: what gradients are for.
        earlier: shapes of parameters from before `fully_shard` that somebody still holds.
    """

    def __init__(self, tree: Tree, came: Pass, params: Sequence[Parameter], earlier: Sequence[tuple[int, ...]]) -> None:
        self._tree, self._came, self._at = weakref.ref(tree), came, {id(p): i for i, p in enumerate(params)}
        self._earlier = earlier

    def __call__(self) -> list[Tensor | None]:
        """Gradients of the parameters, for MindSpore to hand on; and something for the earlier ones, whose hooks raise
        if it was these that were asked for."""
        tree = self._tree()
        if tree is None or tree.frame is None:
            raise PhaseError("the iteration of this graph has ended; it can't be differentiated any more")
        gradients = tree.end_backward(hooks=compat.delivers())
        self._came.end()
        found: list[Tensor | None] = [None] * len(self._at)
        if compat.delivers():
            tree.keep_or_deliver([g for g in gradients if compat.wanted(g[0])])
            return [*found, *(None for _ in self._earlier)]
        for param, grad, _ in gradients:  # main gradients, too, in the parameter's dtype: MindSpore takes no other
            found[self._at[id(param)]] = grad if grad.dtype == param.dtype else grad.astype(param.dtype)
        zero = Tensor(0.0, ms.float32)
        return [*found, *(mint.broadcast_to(zero, shape) for shape in self._earlier)]  # views of one element
