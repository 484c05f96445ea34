"""Counts the bytes of live tensor storages exactly, also of those that only C++ holds.

A `LiveBytes` mode sees the result of every operator, forward and backward, and keeps a weak reference to its storage.
Storages count once, however many tensors view them, with the size they have at the moment (some libraries free by
resizing), until they are freed, wherever that happens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Live bytes of tensors given to `watch` and of all that operators make inside the mode.

    Attributes:
        peak: the largest value of `now` that was found after an operator, since the start or since `restart`.
    """

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.watch(tensors)

    @property
    def now(self) -> int:
        """Bytes of the storages that are alive."""
        alive = [ref() for ref in list(self._storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def watch(self, tensors: Iterable[Any]) -> None:
        """Count these tensors' storages from now on. Meta tensors and wrapper subclasses have none of their own."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
        self.peak = max(self.peak, self.now)

    def restart(self) -> int:
        """Forget the peak so far and return it."""
        peak, self.peak = self.peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.watch(tree_leaves(out))
        return out
