"""Policies and dtype names: what they accept, what they refuse by field name, and the gradient's multipliers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdp_fn import CPUOffloadPolicy, HSDPError, MixedPrecisionPolicy, PolicyError, PrefetchPolicy, ReductionPolicy
from hsdp_fn.dtypes import COMPUTE_FLOATS, ITEMSIZE, dtype_name, is_compute_float, wider
from tests.strategies import is_power_of_two


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        *(
            (MixedPrecisionPolicy, f, v)
            for f in ("param_dtype", "reduce_dtype", "output_dtype")
            for v in ("int64", "f", 4)
        ),
        (MixedPrecisionPolicy, "param_dtype", "float8_e4m3fn"),
        (MixedPrecisionPolicy, "cast_forward_inputs", 1),
        (MixedPrecisionPolicy, "cast_forward_inputs", None),
        *((MixedPrecisionPolicy, "apply_grad_on_fp32_main_grad", v) for v in (1, None, "float32")),
        (ReductionPolicy, "op", "mean"),
        (ReductionPolicy, "op", None),
        (ReductionPolicy, "unused", "error"),
        (ReductionPolicy, "unused", None),
        *((ReductionPolicy, "divide_factor", v) for v in (0, 0.0, -2.0, float("inf"), float("nan"), True, "2")),
        *((ReductionPolicy, "scaling_factor", v) for v in (0, 0.0, -2.0, float("inf"), float("nan"), True, "2")),
        *((PrefetchPolicy, f, v) for f in ("forward", "backward") for v in (-1, 1.0, True, None, "1")),
        (CPUOffloadPolicy, "pin_memory", "yes"),
    ],
)
def test_a_field_outside_its_domain_is_refused_by_name(policy: Any, field: str, value: Any) -> None:
    policy()
    with pytest.raises(PolicyError, match=field) as caught:
        policy(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HSDPError)


def test_dtypes_are_taken_by_name_and_as_objects_of_a_framework() -> None:
    given_ = (np.float16, np.dtype("float32"), "torch.float64")
    policy = MixedPrecisionPolicy(*given_)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == ("float16", "float32", "float64")
    assert policy == MixedPrecisionPolicy("float16", "float32", "float64")
    for name, size in ITEMSIZE.items():
        assert dtype_name(name) == dtype_name(f"torch.{name}") == name
        if "bfloat" not in name and "float8" not in name:
            assert dtype_name(np.dtype(name)) == dtype_name(np.dtype(name).type(0).dtype) == name
            assert np.dtype(name).itemsize == size


def test_policies_are_values_that_cant_be_changed_afterwards() -> None:
    for policy in (MixedPrecisionPolicy(), ReductionPolicy(), PrefetchPolicy(), CPUOffloadPolicy()):
        assert policy == type(policy)()
        assert hash(policy) == hash(type(policy)())
        field = next(iter(policy.__dataclass_fields__))
        with pytest.raises(AttributeError):
            setattr(policy, field, None)


# ---------------------------------------------------------------------------------------------------------- factors


@given(
    st.integers(1, 512),
    st.sampled_from(["avg", "sum"]),
    st.sampled_from([None, 0.5, 1.0, 2.0, 3.0, 100.0]),
    st.sampled_from([None, 0.25, 3.0]),
    st.sampled_from(sorted(COMPUTE_FLOATS)),
)
def test_the_two_multipliers_make_the_whole_one(
    ranks: int, op: str, divide: float | None, scaling: float | None, dtype: str
) -> None:
    before, after = ReductionPolicy(op, divide, scaling).factors(ranks, dtype)
    divisor = divide if divide is not None else ranks if op == "avg" else 1
    exact = Fraction(scaling or 1) / Fraction(divisor)
    assert abs(Fraction(before) * Fraction(after) - exact) <= exact * Fraction(2) ** -52
    if dtype != "float16":
        assert before == 1.0


@given(st.integers(1, 4096))
def test_float16_is_scaled_before_the_sum_by_a_power_of_two_near_the_root_of_the_divisor(ranks: int) -> None:
    before, after = ReductionPolicy().factors(ranks, "float16")
    assert is_power_of_two(before)
    assert ranks**0.5 <= 1 / before < 2 * ranks**0.5 or ranks == 1
    assert before <= 1.0
    assert after <= 1.0


def test_a_divisor_of_one_multiplies_by_exactly_one() -> None:
    for policy in (ReductionPolicy("sum"), ReductionPolicy(divide_factor=1.0)):
        for dtype in COMPUTE_FLOATS:
            assert policy.factors(8, dtype) == (1.0, 1.0)


# ----------------------------------------------------------------------------------------------------------- dtypes


def test_the_wider_dtype_holds_every_value_of_both() -> None:
    assert {(a, b): wider(a, b) for a in COMPUTE_FLOATS for b in COMPUTE_FLOATS} == {
        (a, b): a if a == b else "float64" if "float64" in (a, b) else "float32"
        for a in COMPUTE_FLOATS
        for b in COMPUTE_FLOATS
    }


def test_only_floats_that_can_be_computed_with_are_compute_floats() -> None:
    assert [d for d in ITEMSIZE if is_compute_float(d)] == ["float64", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", ["complex64", "", "float", None, 3, float])
def test_an_unknown_dtype_is_refused_with_what_was_given(dtype: Any) -> None:
    with pytest.raises(PolicyError, match="unknown dtype") as caught:
        dtype_name(dtype)
    assert repr(dtype) in str(caught.value)
