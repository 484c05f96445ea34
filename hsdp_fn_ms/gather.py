"""Full parameters inside autograd: one node a unit, and saved tensors that don't keep a resharded unit alive.

`attach` gives a unit's full parameters a common autograd node. Its backward receives the gradients of all of them at
once and hands them to the frame, which launches one reduction.

`saving` packs what autograd saves while a unit runs: a saved view of a full parameter becomes a description of it, so
that resharding really frees it; unpacking gathers the unit again if need be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, ops

from hsdp_fn import PhaseError

if TYPE_CHECKING:
    from .frame import Frame
    from .use import Pass


class _Begin(ms._Function):  # type: ignore[misc]
    """Where the graph of a pass begins. All units' nodes hang on its output, so its backward is the last of them."""

    @staticmethod
    def forward(ctx: Any, ends: Callable[[], Sequence[Tensor | None]], *params: Parameter) -> Tensor:
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        return Tensor(0.0, ms.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        with ms._no_grad():
            return (None, *ctx.ends())


def begin_graph(ends: Callable[[], Sequence[Tensor | None]], params: Sequence[Parameter]) -> Tensor:
    """What the units' nodes of a pass are to hang on.

    Args:
        ends: called when all of them have had their backward; gives the gradients of ``params``.
    """
    out: Tensor = _Begin.apply(ends, *params)
    return out


class _Attach(ms._Function):  # type: ignore[misc]
    """Identity of a unit's full parameters. The anchor makes autograd build a node, and go on to what it comes from."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, frame: Frame, came: Pass, index: int, *full: Tensor) -> tuple[Tensor, ...]:
        ctx.frame, ctx.came, ctx.index = weakref.ref(frame), came, index
        ctx.set_materialize_grads(False)
        out = tuple([ops.stop_gradient(t) for t in full])
        frozen = [t for t, spec in zip(out, frame.layout.units[index].params, strict=True) if not spec.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        frame = ctx.frame()
        if frame is None:
            raise PhaseError("the step that this graph belongs to has ended; it can't be differentiated any more")
        with ms._no_grad():
            frame.receive(ctx.index, ctx.came, grads)
        zero = Tensor(0.0, ms.float32)  # without it, backward wouldn't go on to what the anchor comes from
        return (zero, *(None,) * (3 + len(grads)))


def attach(frame: Frame, came: Pass, index: int, full: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Full parameters as outputs of the unit's autograd node; frozen ones don't require gradients."""
    out: tuple[Tensor, ...] = _Attach.apply(came.anchor, frame, came, index, *full)
    return out


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor that was a contiguous part of a unit's full parameter, or its transpose: what it takes to make it
    again. ``offset`` counts elements of the parameter ``at``."""

    at: int
    offset: int
    shape: tuple[int, ...]
    transposed: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a full parameter is: ``start`` and ``stop`` are addresses."""

    at: int
    start: int
    stop: int
    tensor: Tensor


@contextmanager
def saving(frame: Frame, came: Pass, index: int, full: Sequence[Tensor]) -> Iterator[None]:
    """Saved-tensor hooks while one unit runs.

    Args:
        full: the unit's parameters, alive at least until the unit has run.
    """
    places = [_Place(at, t.data_ptr(), t.data_ptr() + t.nbytes, t) for at, t in enumerate(full) if t.nbytes]
    low = min((p.start for p in places), default=0)
    high = max((p.stop for p in places), default=0)
    owner = weakref.ref(frame)

    def pack(tensor: Tensor) -> Any:
        address = tensor.data_ptr()
        if low <= address < high:  # most tensors aren't: one comparison
            for place in places:
                if place.start <= address < place.stop and tensor.dtype == place.tensor.dtype:
                    view = _described(tensor, address, place)
                    if view is not None:
                        return view
        return ops.stop_gradient(tensor)  # a node that saves its own output would never be freed

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return saved
        running = owner()
        if running is None:
            raise PhaseError("the step that this graph belongs to has ended; it can't be differentiated any more")
        with ms._no_grad():
            return _remade(running.remake(index, came, saved.at), saved)

    try:
        with ms.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        places.clear()  # the hooks live as long as the graph


def _described(tensor: Tensor, address: int, place: _Place) -> _View | None:
    """How to make the tensor from the parameter; None when it is another kind of view, which then keeps it alive."""
    offset = (address - place.start) // (place.tensor.nbytes // prod(place.tensor.shape))
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return _View(place.at, offset, shape, None)
    order = tuple(sorted(range(len(shape)), key=lambda d: -tensor.stride()[d]))
    if offset == 0 and tuple(shape[d] for d in order) == tuple(place.tensor.shape):
        strides, running = {}, 1
        for d in reversed(order):
            strides[d], running = running, running * shape[d]
        if all(tensor.stride()[d] == strides[d] for d in order):
            return _View(place.at, 0, shape, tuple(order.index(d) for d in range(len(shape))))
    return None


def _remade(whole: Tensor, view: _View) -> Tensor:
    if view.transposed is not None:
        return mint.permute(whole, view.transposed)
    if view.offset == 0 and view.shape == tuple(whole.shape):
        return whole
    return mint.narrow(whole.reshape(-1), 0, view.offset, prod(view.shape)).reshape(view.shape)
