"""What numbers mean inside a simulated kernel.

Integers are Python ints, which never wrap: numba computes `uint32 op uint32` in 64 bits too, and an explicit cast
(or a store into an array) is what wraps on both stages. Floats are NumPy scalars, rounded after each operation;
a literal such as `0.5` is float64, as numba types it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def truncate(value: Any) -> int:
    """A number as an int, towards zero; NaN gives 0 and infinities the int64 ends, as `cvt.rzi` does."""
    if value.__class__ is int:
        return value
    try:
        return int(value)
    except ValueError:
        return 0
    except OverflowError:
        return (1 << 63) - 1 if value > 0 else -(1 << 63)


def _unsigned(bits: int) -> Callable[[Any], int]:
    mask = (1 << bits) - 1

    def cast(value: Any) -> int:
        if value.__class__ is int:
            return value & mask
        return truncate(value) & mask

    return cast


def _signed(bits: int) -> Callable[[Any], int]:
    mask, half, full = (1 << bits) - 1, 1 << (bits - 1), 1 << bits

    def cast(value: Any) -> int:
        value = truncate(value) & mask
        return value - full if value >= half else value

    return cast


CASTS: dict[str, Callable] = {
    **{f"uint{bits}": _unsigned(bits) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": _signed(bits) for bits in (8, 16, 32, 64)},
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "bool": bool,
}
_DTYPES = {id(cast): np.dtype(name) for name, cast in CASTS.items()}
INT_CASTS: dict[str, Callable] = {name: cast for name, cast in CASTS.items() if "int" in name}


def dtype_of(kind: Any) -> np.dtype:
    """The NumPy dtype of a cast function, a NumPy type, a dtype or a numba type."""
    known = _DTYPES.get(id(kind))
    return known if known is not None else np.dtype(str(kind) if hasattr(kind, "mangling_args") else kind)


class _Namespace:
    """A module as kernels see it: a few names replaced, all others passed on."""

    def __init__(self, module: Any, replaced: dict[str, Any]):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        self.__dict__[name] = value
        return value


def _floating(ufunc: np.ufunc) -> Callable:
    """A math function that keeps float32 as float32 and gives inf or NaN where Python's raises."""

    def call(*args: Any) -> Any:
        return ufunc(*[a if isinstance(a, np.floating) else np.float64(a) for a in args])

    return call


def _to_int(ufunc: np.ufunc) -> Callable:
    return lambda x: truncate(ufunc(x))


_UFUNCS = {
    "sqrt exp log log2 log10 log1p expm1 sin cos tan sinh cosh tanh fabs exp2 copysign hypot fmod": {},
    "acos asin atan atan2 acosh asinh atanh pow": dict(
        acos="arccos",
        asin="arcsin",
        atan="arctan",
        atan2="arctan2",
        acosh="arccosh",
        asinh="arcsinh",
        atanh="arctanh",
        pow="power",
    ),
}
MATH = _Namespace(
    math,
    {
        **{n: _floating(getattr(np, other.get(n, n))) for names, other in _UFUNCS.items() for n in names.split()},
        **{n: _to_int(getattr(np, n)) for n in ("floor", "ceil", "trunc")},
        **{n: (lambda f: lambda x: bool(f(x)))(getattr(np, n)) for n in ("isnan", "isinf", "isfinite")},
    },
)
NUMPY = _Namespace(np, INT_CASTS)
BUILTINS: dict[str, Any] = {"float": np.float64, "int": truncate}


def constants(values: tuple) -> tuple:
    """A code object's constants with float literals as float64 scalars, so that `1.0 / 0.0` is inf."""
    return tuple(np.float64(v) if v.__class__ is float else v for v in values)
