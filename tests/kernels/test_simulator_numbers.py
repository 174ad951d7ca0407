"""Numbers in a simulated kernel: what wraps and what does not, infinities, float32 that stays float32."""

from __future__ import annotations

import math
from math import exp as imported_exp

import numba
import numpy as np
import pytest
from numba import cuda, float32, float64, int8, int32, int64, uint8, uint32, uint64
from numpy import uint16 as numpy_uint16

from tests.kernels.simulation import simulate

ENDS = [0, 1, -1, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**63 - 1, -(2**63)]


@cuda.jit
def store(out, value):
    out[0] = value


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_wrap_when_stored(dtype):
    for value in ENDS:
        out = np.zeros(1, dtype)
        simulate(store, 1, 1, out, value)
        assert out[0] == np.array([value & (2**64 - 1)], np.uint64).astype(dtype)[0]


@cuda.jit
def casts(out, value):
    out[0] = uint8(value)
    out[1] = int8(value)
    out[2] = uint32(value)
    out[3] = int32(value)
    out[4] = np.uint32(value)
    out[5] = numba.int32(value)
    out[6] = numpy_uint16(value)
    out[7] = int64(value)


def test_integers_wrap_when_cast():
    for value in ENDS:
        out = np.zeros(8, np.int64)
        simulate(casts, 1, 1, out, value)
        bits = np.array([value & (2**64 - 1)], np.uint64)
        kinds = [np.uint8, np.int8, np.uint32, np.int32, np.uint32, np.int32, np.uint16, np.int64]
        assert list(out) == [int(bits.astype(kind)[0]) for kind in kinds]


@cuda.jit
def expressions(out, a, b):
    x, y = uint32(a[0]), uint32(b[0])
    out[0] = x * y
    out[1] = (x + y) >> 4
    out[2] = uint32(x * y)
    out[3] = uint32(x - y)
    out[4] = uint64(x) << 8


def test_expressions_of_32_bit_integers_do_not_wrap():
    a, b = np.array([2**32 - 1], np.uint32), np.array([2**31], np.uint32)
    out = np.zeros(5, np.uint64)
    simulate(expressions, 1, 1, out, a, b)
    x, y = int(a[0]), int(b[0])  # numba types uint32 op uint32 as uint64, so the GPU computes 64 bits too
    assert list(out) == [x * y, (x + y) >> 4, x * y % 2**32, x - y, x << 8]


@cuda.jit
def from_float(out, value):
    out[0] = int32(value)
    out[1] = uint32(value)
    out[2] = int(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-2.7, (-2, 0, -2)), (2.7, (2, 2, 2)), (1e10, (2**31 - 1, 2**32 - 1, 10**10)), (math.nan, (0, 0, 0))],
)
def test_floats_become_integers_as_the_conversion_instruction_does(value, expected):
    out = np.zeros(3, np.int64)
    simulate(from_float, 1, 1, out, value)
    assert tuple(out) == expected


@cuda.jit
def divisions(out, zero):
    out[0] = 1.0 / 0.0
    out[1] = -1.0 / zero
    out[2] = zero / zero
    out[3] = math.exp(1000)
    out[4] = math.exp(float32(1000.0))
    out[5] = math.log(zero)
    out[6] = math.sqrt(-1.0)
    out[7] = float32(1e30) * float32(1e30)
    out[8] = imported_exp(-math.inf)
    out[9] = math.pow(10.0, 400)


def test_infinities_and_nans_come_without_errors_or_warnings():
    out = np.zeros(10)
    simulate(divisions, 1, 1, out, np.float64(0))
    expected = [math.inf, -math.inf, math.nan, math.inf, math.inf, -math.inf, math.nan, math.inf, 0.0, math.inf]
    assert np.array_equal(out, expected, equal_nan=True)


@cuda.jit
def float_math(x, out):
    v = x[0]
    out[0] = math.exp(v)
    out[1] = math.log(v)
    out[2] = math.sqrt(v)
    out[3] = math.sin(v)
    out[4] = math.pow(v, v)
    out[5] = math.tanh(v)
    out[6] = v * v + v
    out[7] = abs(-v)
    out[8] = max(v, float32(0.25))


def test_math_functions_keep_float32():
    v = np.float32(1.2345678)
    out = np.zeros(9, np.float64)
    simulate(float_math, 1, 1, np.array([v]), out)
    expected = [np.exp(v), np.log(v), np.sqrt(v), np.sin(v), v**v, np.tanh(v), v * v + v, v, v]
    assert all(isinstance(e, np.float32) for e in expected)
    assert np.array_equal(out, np.array(expected, np.float64))  # a float64 result would differ in its low bits


@cuda.jit
def literals(x, out):
    out[0] = x[0] * 0.1
    out[1] = x[0] * float32(0.1)
    out[2] = float(x[0]) * 3
    out[3] = float64(x[0]) + 0.1


def test_a_float_literal_is_float64_as_numba_types_it():
    x = np.array([1.1], np.float32)
    out = np.zeros(4)
    simulate(literals, 1, 1, x, out)
    wide = np.float64(x[0])
    assert list(out) == [wide * 0.1, np.float64(x[0] * np.float32(0.1)), wide * 3, wide + 0.1]


@cuda.jit
def rounding(x, out):
    out[0] = math.floor(x[0])
    out[1] = math.ceil(x[0])
    out[2] = math.trunc(x[0])
    out[3] = round(x[0])
    out[4] = math.isnan(x[0])
    out[5] = math.isinf(x[0] / float32(0.0))


@pytest.mark.parametrize("x", [2.5, -2.5, 0.4, 3.0])
def test_rounding_functions(x):
    out = np.zeros(6, np.int64)
    simulate(rounding, 1, 1, np.array([x], np.float32), out)
    assert list(out) == [math.floor(x), math.ceil(x), math.trunc(x), round(x), 0, 1]


@cuda.jit
def bits(x, out):
    out[0] = cuda.popc(x[0])
    out[1] = cuda.clz(x[0])
    out[2] = cuda.ffs(x[0])
    out[3] = cuda.brev(x[0])
    out[4] = cuda.selp(x[0] > 5, 1, 2)


@pytest.mark.parametrize("x", [0, 1, 0b1010_0000, 2**31, 2**32 - 1])
def test_bit_functions(x):
    out = np.zeros(5, np.uint32)
    simulate(bits, 1, 1, np.array([x], np.uint32), out)
    text = f"{x:032b}"
    assert list(out) == [
        text.count("1"),
        32 - x.bit_length(),
        32 - text.rindex("1") if x else 0,
        int(text[::-1], 2),
        1 + (x <= 5),
    ]


def test_float16_and_bool_arrays():
    half, flags = np.zeros(1, np.float16), np.zeros(1, np.bool_)
    simulate(store, 1, 1, half, 70000.0)
    simulate(store, 1, 1, flags, 3)
    assert np.isinf(half[0])
    assert flags[0]
