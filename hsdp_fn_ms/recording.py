"""What MindSpore records for backward: that it does, how it is ended, and the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, Tensor, mint
from mindspore.graph.api import _pynative_executor

from hsdp_fn import PhaseError

from . import compat
from .frame import Frame
from .use import Pass

if TYPE_CHECKING:
    from .tree import Tree


def require_recording(frame: Frame) -> None:
    """Raise `PhaseError` where a forward for ``backward()`` wasn't recorded to its end: its gradients would be lost."""
    if frame.now is not None and frame.now.anchor is not None and not _pynative_executor.requires_grad():
        raise PhaseError(
            "MindSpore has stopped recording inside this forward, as its grad and value_and_grad do when they return; "
            "with backward() these can't be used inside a forward"
        )


def end_recording() -> None:
    """End what MindSpore still records: it never ends the graph of a function that has raised, and the next backward of
    some operators (LayerNorm) fails then."""
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
        aside = []
        for param, grad, where in gradients:
            if where == "grad":
                found[self._at[id(param)]] = grad
            else:
                aside.append((param, grad, where))
        tree.keep_or_deliver(aside)
        zero = Tensor(0.0, ms.float32)
        return [*found, *(mint.broadcast_to(zero, shape) for shape in self._earlier)]  # views of one element
