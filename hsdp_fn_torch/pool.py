"""Reuse of large host buffers within a step.

On CPU a large allocation is fresh zero pages each time it is made (always above 32 MiB, often below), and touching
them costs several times the copy itself. The pool hands such buffers out again as soon as nothing else holds their
storage: not an output in flight, not a tensor saved for backward, not a view the user kept. Device allocators do this
themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Smaller buffers come from the allocator's own heap, mostly without page faults.
_LARGE = 2**20


class BufferPool:
    """Flat buffers of one device. Reuses them between `open` and `close`; at any other time it only allocates."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._limit = _LARGE if device.type == "cpu" else float("inf")
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._users = 0

    def open(self) -> None:
        """Begin to keep buffers. May be nested."""
        self._users += 1

    def close(self) -> None:
        """Keep nothing any more: buffers still in use are freed by their last user."""
        self._users -= 1
        if not self._users:
            self._kept.clear()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized 1-D tensor, possibly over memory that an earlier one has left."""
        if not self._users or numel * dtype.itemsize < self._limit:
            return torch.empty(numel, dtype=dtype, device=self.device)
        for kept in self._kept.get((numel, dtype), ()):
            if _idle(kept):
                return kept.detach()
        self.trim()  # idle buffers of other sizes would only add to the peak
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self._kept.setdefault((numel, dtype), []).append(buffer)
        return buffer.detach()

    def trim(self) -> None:
        """Free every buffer that nothing else holds."""
        for key, kept in list(self._kept.items()):
            busy = [t for t in kept if not _idle(t)]
            if busy:
                self._kept[key] = busy
            else:
                del self._kept[key]


def _idle(buffer: Tensor) -> bool:
    """Whether the pool's tensor is the only one over its storage."""
    storage = buffer.untyped_storage()  # its own reference makes two
    return torch._C._storage_Use_Count(storage._cdata) == 2
