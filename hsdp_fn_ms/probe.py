"""What this MindSpore, on this device, does with a few operators: asked once in a process, and refused where this
package can't work with it.

Some of MindSpore's failures are silent (arithmetic in place that changes nothing, writes into views that are dropped)
and some come late (a missing kernel raises at a later operator). Nothing here relies on those operators; `Facts` says
how they behave, so that a person can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint
from mindspore.graph.api import _pynative_executor

from hsdp_fn import BackendError

NUMPY_TEXT = (
    "MindSpore 2.10 needs numpy < 2 (found {}): with numpy 2 its operators raise SystemError and bfloat16 tensors "
    "can't be read; pip install 'numpy>=1.25,<2'"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """How operators behave here.

    Attributes:
        device: the device target, ``CPU`` or ``Ascend``.
        arithmetic_in_place: ``t.add_(1)`` changes ``t``.
        writes_to_views: ``t[2:].copy_(x)`` changes ``t``.
    """

    device: str
    arithmetic_in_place: bool
    writes_to_views: bool


@cache
def facts() -> Facts:
    """Run the probes, the first time. Does not communicate.

    Raises:
        BackendError: numpy 2, graph mode, or an operator without which nothing works; says what to do.
    """
    require_numpy(np.__version__)
    require_pynative()
    try:
        _require_operators()
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"MindSpore {ms.__version__} can't run basic operators here: {error}") from error
    return Facts(ms.get_context("device_target"), _changes_in_place(), _writes_to_views())


def require_numpy(version: str) -> None:
    """Raise `BackendError` for a numpy that MindSpore's operators fail with."""
    if int(version.split(".")[0]) >= 2:
        raise BackendError(NUMPY_TEXT.format(version))


def require_pynative() -> None:
    """Raise `BackendError` in graph mode, where units can't be gathered and freed between operators."""
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise BackendError(
            "hsdp_fn_ms runs in PyNative mode only; call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first"
        )


def settle() -> None:
    """Let all that was issued run, so that its errors are raised here and not at a later operator."""
    _pynative_executor.sync()


def _require_operators() -> None:
    """The copies that the backend is made of."""
    source = Tensor(np.arange(6, dtype=np.float32))
    target = mint.empty((6,), dtype=ms.float32)
    target.copy_(mint.cat([mint.narrow(source, 0, 2, 4), mint.zeros((2,), dtype=ms.float32)], 0) * 2.0)
    settle()
    if target.asnumpy().tolist() != [4.0, 6.0, 8.0, 10.0, 0.0, 0.0]:
        raise BackendError(f"MindSpore {ms.__version__} copies wrong values here: {target.asnumpy().tolist()}")
    if source.astype(ms.bfloat16).astype(ms.float32).asnumpy().tolist() != source.asnumpy().tolist():
        raise BackendError(f"MindSpore {ms.__version__} casts bfloat16 wrongly here")


def _changes_in_place() -> bool:
    tensor = Tensor(np.ones(2, np.float32))
    try:
        tensor.add_(1.0)
        settle()
    except Exception:
        return False
    return bool((tensor.asnumpy() == 2.0).all())


def _writes_to_views() -> bool:
    tensor = Tensor(np.ones(4, np.float32))
    try:
        mint.narrow(tensor, 0, 2, 2).copy_(Tensor(np.zeros(2, np.float32)))
        settle()
    except Exception:
        return False
    return bool((tensor.asnumpy() == [1.0, 1.0, 0.0, 0.0]).all())
