"""Bits, bytes, halves, approximate functions. A `half2` is two fp16 numbers in one uint32, the first the low half."""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from kernels_numba.instruction import instruction

_TOP = 1 << 31  # one past the largest int32
_INT = struct.Struct("<I")
_FLOAT = struct.Struct("<f")
_HALVES = struct.Struct("<2e")
_BYTES = struct.Struct("<4b")


def _halves(word: int) -> tuple[float, float]:
    return _HALVES.unpack(_INT.pack(word))


def _half2(low: Any, high: Any) -> int:
    """Two numbers rounded to fp16 (to nearest even, overflow to infinity), packed."""
    pair = np.array((low, high), np.float16)
    return int(pair.view(np.uint32)[0])


@functools.lru_cache(maxsize=1 << 12)  # two codes of weights make only 256 different words
def _half2_fma(a: int, b: int, c: int) -> int:
    (p, q), (r, s), (t, u) = _halves(a), _halves(b), _halves(c)
    return _half2(p * r + t, q * s + u)


@instruction("u32", "u32 u32 u32", "lop3.b32 $out, $a, $b, $c, 0xEA;")
def and_or(a: int, b: int, c: int) -> int:
    """(a & b) | c in one instruction: picks nibbles and sets an exponent above them."""
    return (a & b) | c


@instruction("u32", "u32 u32 u32", "prmt.b32 $out, $a, $b, $selector;")
def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes out of the eight of (a, b), named by nibbles of `selector`; their bit 3 repeats the byte's sign."""
    source = a | b << 32
    out = 0
    for k in range(4):
        pick = selector >> 4 * k
        byte = source >> 8 * (pick & 7) & 0xFF
        if pick & 8:
            byte = 0xFF if byte & 0x80 else 0
        out |= byte << 8 * k
    return out


@functools.lru_cache(maxsize=1 << 14)  # a product meets each word of its vector once a row
def _signed_bytes(word: int) -> tuple[int, int, int, int]:
    return _BYTES.unpack(_INT.pack(word))


@instruction("s32", "u32 u32 s32", "dp4a.u32.s32 $out, $a, $b, $c;")
def dp4a(a: int, b: int, c: int) -> int:
    """c plus the dot product of four unsigned bytes of a with four signed bytes of b."""
    x, y, z, w = _signed_bytes(b)
    total = c + (a & 255) * x + (a >> 8 & 255) * y + (a >> 16 & 255) * z + (a >> 24) * w
    return total if -_TOP <= total < _TOP else (total + _TOP) % (2 * _TOP) - _TOP


@instruction("f32", "f32 f32 f32", "fma.rn.f32 $out, $a, $b, $c;")
def fma(a: Any, b: Any, c: Any) -> np.float32:
    """a * b + c, rounded once (here through float64: a result next to a tie may round the other way, one in 2^29)."""
    return np.float32(float(a) * float(b) + float(c))


@instruction("u32", "f32", "mov.b32 $out, $x;")
def float_bits(x: Any) -> int:
    """The bit pattern of a float32."""
    return _INT.unpack(_FLOAT.pack(x))[0]


@instruction("f32", "u32", "mov.b32 $out, $bits;")
def bits_float(bits: int) -> np.float32:
    """The float32 with this bit pattern (a bf16 number shifted left by 16, for instance)."""
    return np.float32(_FLOAT.unpack(_INT.pack(bits & 0xFFFFFFFF))[0])


@instruction(
    "f32 f32",
    "u32",
    "{ .reg .b16 l, h; mov.b32 {l, h}, $pair; cvt.f32.f16 $out0, l; cvt.f32.f16 $out1, h; }",
)
def half2_floats(pair: int) -> tuple:
    """Both halves of a half2 as float32, exactly."""
    low, high = _HALVES.unpack(_INT.pack(pair))
    return np.float32(low), np.float32(high)


@instruction(
    "u32",
    "f32 f32",
    "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $low; cvt.rn.f16.f32 h, $high; mov.b32 $out, {l, h}; }",
)
def floats_half2(low: Any, high: Any) -> int:
    """Two float32 numbers rounded to fp16, to nearest even, packed."""
    return _half2(low, high)


@instruction("u32", "u32 u32", "sub.rn.f16x2 $out, $a, $b;")
def half2_sub(a: int, b: int) -> int:
    """a - b on both halves, each rounded to fp16."""
    return _half2_fma(a, 0x3C003C00, b ^ 0x80008000)


@instruction("u32", "u32 u32 u32", "fma.rn.f16x2 $out, $a, $b, $c;")
def half2_fma(a: int, b: int, c: int) -> int:
    """a * b + c on both halves, each rounded once to fp16."""
    return _half2_fma(a, b, c)


@instruction("s32", "f32", "cvt.rni.s32.f32 $out, $x;")
def round_int(x: Any) -> int:
    """The nearest integer, halves to even; NaN gives 0, and what int32 cannot hold the end of its range."""
    return int(min(max(float(np.rint(x)), -_TOP), _TOP - 1)) if x == x else 0


@instruction("f32", "f32", "ex2.approx.f32 $out, $x;")
def exp2(x: Any) -> np.float32:
    """2 to the power x; on the GPU within 2 units in the last place."""
    return np.float32(np.exp2(np.float64(x)))


@instruction("f32", "f32", "rsqrt.approx.f32 $out, $x;")
def rsqrt(x: Any) -> np.float32:
    """1 / sqrt(x); on the GPU within a relative error of 2^-22."""
    return np.float32(1.0 / np.sqrt(np.float64(x)))


@instruction("f32", "f32 f32", "div.rn.f32 $out, $a, $b;")
def divide(a: Any, b: Any) -> np.float32:
    """a / b rounded to nearest; a / 0 is infinite, where numba's own division would test for 0 first."""
    return np.float32(np.float32(a) / np.float32(b))


@instruction("f32", "f32 f32", "mul.rn.f32 $out, $a, $b;")
def multiply(a: Any, b: Any) -> np.float32:
    """a * b rounded to nearest by itself, where the compiler would join numba's own product with a sum behind it."""
    return np.float32(np.float32(a) * np.float32(b))


@instruction("u32", "u32 u32", "mul.hi.u32 $out, $a, $b;")
def mul_high(a: int, b: int) -> int:
    """The upper half of a product of 64 bits: a * b / 2^32, rounded down."""
    return a * b >> 32


@instruction("f32", "f32 f32", "max.f32 $out, $a, $b;")
def fmax(a: Any, b: Any) -> np.float32:
    """The larger of two floats; a NaN loses against a number."""
    return a if b != b or a >= b else b


@instruction("f32", "f32", "abs.f32 $out, $x;")
def fabs(x: Any) -> np.float32:
    """The absolute value."""
    return abs(x)
