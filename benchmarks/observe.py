"""What a step allocates and communicates, seen from the dispatcher. Slow: for steps that aren't timed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

_SPLIT = torch.ops.aten.split.Tensor
_KINDS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


class Observer(TorchDispatchMode):
    """Counts live tensor bytes and collectives while it is entered.

    Storages are followed by weak reference from the first operator that returns them until they are really freed, by
    whichever thread. A storage that was resized to nothing counts as nothing. Scratch memory that a communication
    backend allocates inside a collective isn't counted (gloo's reduce-scatter copies its input).

    Args:
        known: tensors that live already and count from the start.

    Attributes:
        peak: most bytes alive after any operator.
        collectives: how many were issued, by kind.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self.collectives: Counter[str] = Counter()
        self._live: dict[int, weakref.ref[UntypedStorage]] = {}
        for tensor in known:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.__name__.replace("_", "")
            self.collectives.update(kind for part, kind in _KINDS.items() if part in name)
        # gloo's reduce-scatter splits its scratch copy when it is waited for: the one view of memory never seen before.
        given = {args[0].untyped_storage()._cdata} if func is _SPLIT else ()
        for tensor in _tensors(out):
            self._follow(tensor, given)
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        """Bytes of all followed storages that are alive."""
        total = 0
        for key, ref in list(self._live.items()):
            storage = ref()
            if storage is None:
                self._live.pop(key, None)
            else:
                total += storage.nbytes()
        return total

    def _follow(self, tensor: Tensor, given: Collection[int] = ()) -> None:
        if not _is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if (known is None or known() is None) and key not in given:
            self._live[key] = weakref.ref(storage)


def _is_plain(tensor: Tensor) -> bool:
    """Has memory of its own; what a wrapper holds is followed on its own."""
    return not tensor.is_meta and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
