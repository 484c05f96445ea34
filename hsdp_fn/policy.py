"""What the user decides: precision, offload, reduction, prefetch. Frozen records that validate themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import isfinite

from .dtypes import COMPUTE_FLOATS, dtype_name, is_compute_float
from .errors import PolicyError


class Sync(Enum):
    """How far one microbatch's gradients are reduced. An argument of each call, never a sticky flag.

    With ``N`` gradient elements in a unit, ``S`` shard ranks and ``R`` replicate ranks:

    ======  ==========================================  =============================================
    value   communicates                                keeps until FULL, per rank
    ======  ==========================================  =============================================
    NONE    nothing                                     ``N`` elements (does not shrink with S)
    SHARD   one reduce-scatter over the shard group     ``N / S`` elements (a partial sum)
    FULL    reduce-scatter, then all-reduce over the    ``N / S`` elements: the finished gradient
            replicate group when R > 1
    ======  ==========================================  =============================================
    """

    NONE = "none"
    SHARD = "shard"
    FULL = "full"


def microbatches(count: int, *, hold: Sync = Sync.NONE) -> Iterator[Sync]:
    """``sync`` of each of ``count`` microbatches of one optimizer step: ``hold`` for all but the last, which finishes::

        for sync, (x, y) in zip(microbatches(len(batches)), batches, strict=True):
            (loss, _), state = step(state, x, y, sync=sync)

    Raises:
        PolicyError: fewer than one microbatch, or no `Sync`.
    """
    if type(count) is not int or count < 1:
        raise PolicyError(f"count must be an int of at least 1, found {count!r}")
    if not isinstance(hold, Sync):
        raise PolicyError(f"hold must be a Sync (NONE, SHARD or FULL), found {hold!r}")
    return iter([hold] * (count - 1) + [Sync.FULL])


class Keep(Enum):
    """What `reset_iter` leaves of the step: nothing, or the gradients of the microbatches that had succeeded."""

    NOTHING = "nothing"
    ACCUMULATED = "accumulated"


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of compute and of reduction. Accepts names or the dtype objects of any framework.

    Attributes:
        param_dtype: dtype in which parameters are gathered and used; None keeps each parameter's own. Masters,
            optimizer state and (see below) gradients handed to the optimizer stay in the parameter's own dtype.
        reduce_dtype: dtype of the reduce-scatter and all-reduce; None reduces in the compute dtype.
        output_dtype: floating tensors returned by the unit are cast to this; None leaves them.
        cast_forward_inputs: cast floating tensors among the unit's arguments to ``param_dtype``.
        apply_grad_on_fp32_main_grad: leave finished gradients in the reduce dtype (the "main gradient", float32 beside
            bfloat16 parameters) instead of rounding them to the parameter's own; microbatches add up in it as well.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, field)
            if value is None:
                continue
            try:
                name = dtype_name(value)
            except PolicyError as error:
                raise PolicyError(f"{field}: {error}") from None
            if not is_compute_float(name):
                raise PolicyError(f"{field} must be one of {COMPUTE_FLOATS} or None, found {value!r}")
            object.__setattr__(self, field, name)
        for field in ("cast_forward_inputs", "apply_grad_on_fp32_main_grad"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise PolicyError(f"{field} must be a bool, found {value!r}")


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Masters and gradients stay on the compute device."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Masters, gradients and so the optimizer live on the CPU; shards are copied to the device to be gathered.

    Attributes:
        pin_memory: keep them in page-locked memory, so that copies run beside compute. Ignored where the compute
            device is the CPU itself.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise PolicyError(f"pin_memory must be a bool, found {self.pin_memory!r}")


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """How per-rank gradients become one.

    Attributes:
        op: ``"avg"`` divides the sum by the number of data-parallel ranks; ``"sum"`` doesn't.
        divide_factor: divides by this instead (overrides ``op``). Exactly 1.0 costs no division.
        scaling_factor: multiplies the result, after the division.
        unused: what a trainable parameter without a gradient becomes. ``"none"`` leaves it without one, and a bucket
            none of whose parameters has one issues no collective; every rank must then use the same parameters, as a
            rank that didn't use one keeps its rows of it unchanged. ``"checked"`` is the same, and compares before each
            reduction what takes part on all ranks, which costs one short message a rank and unit: for debugging. Units
            that are gathered again in backward must be the same on all ranks even to be compared.
            ``"zeros"`` reduces zeros, in one order of units,
            so that ranks which use different units still reduce the same. (Their gathers must match too: gather such
            units on all ranks with `unshard` before the step.)
    """

    op: str = "avg"
    divide_factor: float | None = None
    scaling_factor: float | None = None
    unused: str = "none"

    def __post_init__(self) -> None:
        if self.op not in ("avg", "sum"):
            raise PolicyError(f"op must be 'avg' or 'sum', found {self.op!r}")
        if self.unused not in ("none", "zeros", "checked"):
            raise PolicyError(f"unused must be 'none', 'zeros' or 'checked', found {self.unused!r}")
        for field in ("divide_factor", "scaling_factor"):
            value = getattr(self, field)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and isfinite(value) and value > 0):
                raise PolicyError(f"{field} must be a positive finite number or None, found {value!r}")

    def factors(self, ranks: int, reduce_dtype: str) -> tuple[float, float]:
        """Multipliers ``(before, after)`` the collectives, for ``ranks`` data-parallel ranks.

        Only float16 is scaled before, by about ``1/sqrt(divisor)``, against overflow of the sum; its product with
        the second factor is the whole multiplier.
        """
        divisor = self.divide_factor if self.divide_factor is not None else (ranks if self.op == "avg" else 1.0)
        total = (self.scaling_factor or 1.0) / divisor
        if reduce_dtype != "float16" or divisor <= 1.0:
            return 1.0, total
        before = 1.0
        while divisor / before > before:
            before *= 2.0
        return 1.0 / before, total * before


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How many units ahead of the running one are gathered, each costing one unsharded unit of memory.

    Attributes:
        forward: units ahead in the layout's order.
        backward: units ahead in the reverse of the order in which this forward used them.
    """

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PolicyError(f"{field} must be an int >= 0, found {value!r}")
