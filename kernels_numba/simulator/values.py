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


def _saturated(value: Any, low: int, high: int) -> int:
    """A float as an int of a register, 32 bits or wider: `cvt.rzi` stops at the ends of the range, unlike integers."""
    return min(max(truncate(value), low), high)


def _unsigned(bits: int) -> Callable[[Any], int]:
    mask, top = (1 << bits) - 1, (1 << max(bits, 32)) - 1

    def cast(value: Any) -> int:
        if value.__class__ is int:
            return value & mask
        return (value if isinstance(value, np.integer) else _saturated(value, 0, top)).__int__() & mask

    return cast


def _signed(bits: int) -> Callable[[Any], int]:
    mask, half, full = (1 << bits) - 1, 1 << (bits - 1), 1 << bits

    top = (1 << max(bits, 32) - 1) - 1

    def cast(value: Any) -> int:
        if value.__class__ is not int:
            value = int(value) if isinstance(value, np.integer) else _saturated(value, -top - 1, top)
        value &= mask
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
    "acos asin atan atan2 acosh asinh atanh pow": {
        "acos": "arccos",
        "asin": "arcsin",
        "atan": "arctan",
        "atan2": "arctan2",
        "acosh": "arccosh",
        "asinh": "arcsinh",
        "atanh": "arctanh",
        "pow": "power",
    },
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
# the same functions when they were imported by name
BY_NAME: dict[int, Callable] = {
    **{id(getattr(math, n)): f for n, f in vars(MATH).items() if hasattr(math, n)},
    **{id(getattr(np, n)): f for n, f in INT_CASTS.items()},
}
BUILTINS: dict[str, Any] = {"float": np.float64, "int": truncate}


def constants(values: tuple) -> tuple:
    """A code object's constants with float literals as float64 scalars, so that `1.0 / 0.0` is inf."""
    return tuple(constant(v) for v in values)


def constant(value: Any) -> Any:
    """A number from outside the kernel as the kernel sees it; tuples of them too."""
    if value.__class__ is tuple:
        return constants(value)
    if value.__class__ is float:
        return np.float64(value)
    if isinstance(value, (np.integer, np.bool_)):
        return value.item()
    return value
