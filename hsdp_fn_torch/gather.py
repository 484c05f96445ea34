"""Full parameters inside autograd: one node a unit, and saved tensors that don't keep a resharded unit alive.

`attach` gives a unit's full parameters a common autograd node. Its backward receives the gradients of all of them at
once, when the last use has been differentiated, and hands them to the frame, which launches one reduction.

`SavedParams` packs what autograd saves while a unit runs: a saved view of a full parameter becomes a description of the
view, so that resharding really frees it; unpacking gathers the unit again if need be. Everything else is passed on to
the hooks that were there before (activation checkpointing, offloading), or kept as it is.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch import autograd_function as functorch_functions
from torch.distributed.tensor import DTensor

from hsdp_fn import PhaseError
from hsdp_fn.layout import Bucket

from .casting import tensors_in
from .dtensor import as_dtensor, presented
from .use import Ticket

if TYPE_CHECKING:
    from .frame import Frame

_NOTHING: AbstractContextManager[Any] = nullcontext()
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_top = torch._C._autograd._top_saved_tensors_default_hooks


class _Attach(torch.autograd.Function):
    """Identity of a unit's full parameters. The anchor only makes autograd build a node."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, frame: Frame, index: int, full: Sequence[Tensor], ahead: bool
    ) -> tuple[Tensor, ...]:
        # Weak: the frame holds the outputs of this node. What watches a live graph keeps the frame.
        ctx.frame, ctx.index = weakref.ref(frame), index
        ctx.ticket = None  # a recomputed use isn't waited for
        if not frame.in_backward:
            use = frame.uses[index]
            ctx.ticket = Ticket(ctx, frame.order.now, use.epoch, ahead)
            use.tickets.append(weakref.ref(ctx.ticket))
        ctx.set_materialize_grads(False)
        out = tuple([t.detach() for t in full])
        standings = frame.handling[index].standings
        if standings is not None:
            out = tuple(presented(standings, out))
        frozen = [t for t, spec in zip(out, frame.layout.units[index].params, strict=True) if not spec.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None, None]:
        frame = ctx.frame()
        if frame is None:
            raise PhaseError(
                "the iteration that this graph belongs to was dropped; it can't be differentiated any more"
            )
        with plainly():
            frame.receive(ctx.index, grads, ctx.ticket)
        return None, None, None, None, None


def attach(frame: Frame, index: int, full: Sequence[Tensor], *, ahead: bool = False) -> tuple[Tensor, ...]:
    """Full parameters as outputs of the unit's autograd node; frozen ones don't require gradients. ``ahead``: outside
    of its forward, for whoever may use them, so that nothing waits for their gradients."""
    apply: Callable[..., Any] = _Attach.apply
    if torch._C._are_functorch_transforms_active():
        # A node of ordinary autograd, which transforms (torch.func.jvp) pass over: parameters are constants to them.
        apply = super(torch.autograd.Function, _Attach).apply
        with functorch_functions.enable_single_level_autograd_function():  # type: ignore[attr-defined]
            out: tuple[Tensor, ...] = apply(frame.anchor, frame, index, full, ahead)  # type: ignore[no-untyped-call]
    else:
        out = apply(frame.anchor, frame, index, full, ahead)
    return out


@contextmanager
def _plain(inference: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(torch._C._DisableFuncTorch())
        if inference:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def plainly() -> AbstractContextManager[Any]:
    """Inside, tensors are ordinary ones: not seen by torch.func's transforms, and not of inference mode, so that what
    is gathered in an evaluation may serve training."""
    inference = torch.is_inference_mode_enabled()
    return _plain(inference) if inference or torch._C._are_functorch_transforms_active() else _NOTHING


def watch(frame: Frame, index: int, out: Any) -> None:
    """Call `Frame.before_backward` when gradients reach any of a unit's outputs, once a backward. Hooks on nodes
    survive in-place edits of the output; where even these are lost (edited views), `Frame.remake` gathers."""
    seen, number = -1, frame.order.now

    def hook(_: Any) -> None:
        nonlocal seen
        if seen != frame.backwards:
            seen = frame.backwards
            frame.before_backward(index, number)

    for tensor in tensors_in(out):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)


class _View:
    """A saved tensor that was a view of a unit's full parameters: what it takes to make it again. With its spec if it
    was a DTensor. The offset counts from the parameter ``at``, as another gather may put that elsewhere in its buffer.
    """

    __slots__ = ("at", "offset", "size", "spec", "stride")

    def __init__(self, places: _Places, local: Tensor, spec: Any) -> None:
        offset = int(local.storage_offset())
        which = bisect_right(places.offsets, offset) - 1
        self.at, self.offset, self.spec = places.members[which], offset - places.offsets[which], spec
        self.size, self.stride = local.size(), local.stride()


class _Places:
    """Where a bucket's parameters are in their buffer.

    Attributes:
        start, stop: addresses of the buffer; ``dtype`` of what is in it.
        offsets: of those parameters that different gathers may put to different places, rising; else of the first.
        members: their places in the unit.
    """

    __slots__ = ("dtype", "members", "offsets", "start", "stop")

    def __init__(self, bucket: Bucket, full: Sequence[Tensor]) -> None:
        members = bucket.params.members if bucket.regather is not None else bucket.params.members[:1]
        self.members = [m.index for m in members if full[m.index].numel()] or [members[0].index]
        self.offsets = [int(full[at].storage_offset()) for at in self.members]
        first = full[self.members[0]]
        storage = first.untyped_storage()
        self.start, self.dtype = storage.data_ptr(), first.dtype
        self.stop = self.start + storage.nbytes()


class _Kept:
    """A saved tensor that stays. Detached, since a node whose saved output is the output itself is never freed; with
    its version, which autograd doesn't check behind hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


class _Packed:
    """A saved tensor that went through the hooks beneath ours."""

    __slots__ = ("unpack", "value")

    def __init__(self, value: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.value, self.unpack = value, unpack


class SavedParams:
    """Saved-tensor hooks while one unit runs. Used as a context manager.

    Args:
        full: the unit's parameters; those of a bucket are views of one buffer.
    """

    __slots__ = ("_frame", "_index", "_places")

    def __init__(self, frame: Frame, index: int, full: Sequence[Tensor]) -> None:
        self._frame, self._index = frame, index
        self._places: dict[int, _Places] = {}  # by address
        for bucket in frame.layout.units[index].buckets:
            places = _Places(bucket, full)
            if places.start:
                self._places.setdefault(places.start, places)

    def __enter__(self) -> None:
        beneath = _top(True)
        index, buffers, remake = self._index, list(self._places.values()), self._frame.remake
        use = self._frame.uses[index]
        number, epoch = self._frame.order.now, use.epoch
        title = self._frame.layout.units[index].title
        low = min((b.start for b in buffers), default=0)
        high = max((b.stop for b in buffers), default=0)

        transformed = torch._C._are_functorch_transforms_active()

        def pack(tensor: Tensor) -> Any:
            if transformed and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return _Kept(tensor)
            if tensor.layout is not torch.strided:
                return _Kept(tensor) if beneath is None else _Packed(beneath[0](tensor), beneath[1])
            local, spec = (tensor._local_tensor, tensor._spec) if type(tensor) is DTensor else (tensor, None)
            pointer = local.data_ptr()
            if low <= pointer < high:  # most tensors aren't: one comparison
                for places in buffers:
                    if places.start <= pointer < places.stop and tensor.dtype is places.dtype:
                        use.packed += 1
                        return _View(places, local, spec)
            return _Kept(tensor) if beneath is None else _Packed(beneath[0](tensor), beneath[1])

        def unpack(saved: Any) -> Tensor:
            if type(saved) is _View:
                whole = remake(index, number, epoch, saved.at)
                view = whole.as_strided(saved.size, saved.stride, int(whole.storage_offset()) + saved.offset)
                return view if saved.spec is None else as_dtensor(view, saved.spec)
            if type(saved) is _Packed:
                return saved.unpack(saved.value)
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(saved.tensor.shape)} saved in unit {title!r} is at version "
                    f"{saved.tensor._version}; expected version {saved.version} instead"
                )
            tensor: Tensor = saved.tensor
            return tensor

        _push(pack, unpack)

    def __exit__(self, *_: object) -> None:
        _pop()
