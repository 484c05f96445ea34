"""What can be seen of a running frame: the logger ``hsdp_fn``, and ranges in the profiler.

Both name an event of a unit's life and the unit's modules: ``pre_forward (layers.3)``. The logger writes at DEBUG;
``TORCH_LOGS=+hsdp_fn`` turns it on. Ranges exist while a torch profiler is recording, or where `npu.mark_ranges` has
asked for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hsdp_fn.layout import UnitLayout

log = logging.getLogger("hsdp_fn")

_NOTHING: AbstractContextManager[Any] = nullcontext()
_profiling = torch._C._autograd._profiler_enabled

#: Makes a range of another profiler than torch's from a text.
ranges: Callable[[str], AbstractContextManager[Any]] | None = None


def span(event: str, unit: UnitLayout | None) -> AbstractContextManager[Any]:
    """Around an event of a unit's life; of the root of a tree if there is no unit. Costs next to nothing when nobody
    looks."""
    logging_on = log.isEnabledFor(logging.DEBUG)
    if not (logging_on or ranges is not None or _profiling()):
        return _NOTHING
    text = f"{event} ({unit.title})" if unit is not None else event
    if logging_on:
        log.debug("%s", text)
    if ranges is not None:
        return ranges(f"hsdp_fn::{text}")
    return torch.profiler.record_function(f"hsdp_fn::{text}") if _profiling() else _NOTHING
