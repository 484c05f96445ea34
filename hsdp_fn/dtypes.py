"""Dtypes by name, so that the core can count bytes without a framework."""

from __future__ import annotations

from .errors import PolicyError

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

#: Dtypes that a mixed-precision policy casts and that a gradient can have. The 8-bit floats are storage formats: they
#: are gathered as they are and never cast.
COMPUTE_FLOATS: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")

# Precision order for accumulation: float16 and bfloat16 don't contain each other, their join is float32.
_RANK = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2}


def dtype_name(dtype: object) -> str:
    """The neutral name of a dtype object of any framework: ``torch.float32``, ``numpy.float32``, ``"float32"``.

    Raises:
        PolicyError: the name isn't one of `ITEMSIZE`.
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = str(dtype)
    name = name.rsplit(".", 1)[-1].lower()
    if name not in ITEMSIZE:
        raise PolicyError(f"unknown dtype {dtype!r}; expected one of {', '.join(ITEMSIZE)}")
    return name


def is_compute_float(dtype: str) -> bool:
    """Whether a mixed-precision policy applies to this dtype."""
    return dtype in _RANK


def wider(a: str, b: str) -> str:
    """The narrowest floating dtype that holds every value of both ``a`` and ``b``."""
    if a == b:
        return a
    if _RANK[a] == _RANK[b]:
        return "float32"
    return a if _RANK[a] > _RANK[b] else b
