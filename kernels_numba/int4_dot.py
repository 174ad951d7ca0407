"""INT4 weights against rounded activations: 32 weights, one load of 16 bytes, at a time.

How the codes become numbers is a choice: dp4a leaves them bytes; lop3 and prmt make floats of them.
"""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from kernels_numba.activation import FP16, INT8
from kernels_numba.instructions.arithmetic import and_or, bits_float, dp4a, fma, half2_floats, half2_sub, prmt
from kernels_numba.instructions.memory import (
    early_u32,
    early_u32x4,
    load_u32x4,
    shared_f32x2,
    shared_u32x4,
    stream_u32,
    stream_u32x4,
)

CHUNK = 32  # weights in 16 bytes: one load of a lane
LOW_NIBBLES = 0x0F0F0F0F
LOP3, PRMT = 0, 1
UNPACKINGS = {"lop3": LOP3, "prmt": PRMT}


@cuda.jit(device=True)
def dot_int8(w, x0, x1, total):
    """8 weights against 8 int8 activations: two masks, a shift, two dp4a."""
    # dp4a takes 32 bits, so the wider results that numba gives these operators are never computed
    return dp4a((w >> 4) & LOW_NIBBLES, x1, dp4a(w & LOW_NIBBLES, x0, total))


@cuda.jit(device=True)
def two_codes(w, place, unpacking):
    """Codes (0, 2), (4, 6), (1, 3) or (5, 7) of a word, by place, as floats.

    lop3: a code under the exponent of 1024 is the fp16 number 1024 + code. prmt: under that of 2^23, a float32.
    """
    if unpacking == LOP3:
        pair = and_or(uint32(w >> uint32(4 * place)), uint32(0x000F000F), uint32(0x64006400))
        return half2_floats(half2_sub(pair, uint32(0x64006400)))
    nibbles = uint32(uint32(w >> uint32(4 * (place & 1))) & uint32(0x0F0F0F0F))
    low = prmt(nibbles, uint32(0x4B000000), uint32(0x7550 + (place >> 1)))
    high = prmt(nibbles, uint32(0x4B000000), uint32(0x7552 + (place >> 1)))
    return float32(bits_float(low) - float32(8388608.0)), float32(bits_float(high) - float32(8388608.0))


@cuda.jit(device=True)
def two_values(word, form):
    """Two activations of a word."""
    if form == FP16:
        return half2_floats(word)
    return bits_float(uint32(word << uint32(16))), bits_float(uint32(word & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def dot_half(w, x0, x1, x2, x3, total, form, unpacking):
    """8 weights against 8 activations of 16 bits, in float32."""
    a, b = two_values(x0, form)
    c, d = two_values(x1, form)
    q, r = two_codes(w, 0, unpacking)
    total = fma(q, a, total)
    total = fma(r, c, total)
    q, r = two_codes(w, 2, unpacking)
    total = fma(q, b, total)
    total = fma(r, d, total)
    a, b = two_values(x2, form)
    c, d = two_values(x3, form)
    q, r = two_codes(w, 1, unpacking)
    total = fma(q, a, total)
    total = fma(r, c, total)
    q, r = two_codes(w, 3, unpacking)
    total = fma(q, b, total)
    return fma(r, d, total)


@cuda.jit(device=True)
def four_words(x, at, in_shared):
    """16 bytes of activations from shared memory or, where a kernel before has rounded them, from global memory."""
    if in_shared:
        return shared_u32x4(x, at)
    return load_u32x4(x, at)


@cuda.jit(device=True)
def chunk_dots(v, w, x, at, in_shared, form, unpacking):
    """32 weights of two rows (four words each) against 32 activations: the two sums, as floats."""
    if form == INT8:
        a, b, c, d = four_words(x, at, in_shared)
        e, f, g, h = four_words(x, uint32(at + uint32(4)), in_shared)
        first = dot_int8(v[3], g, h, dot_int8(v[2], e, f, dot_int8(v[1], c, d, dot_int8(v[0], a, b, int32(0)))))
        second = dot_int8(w[3], g, h, dot_int8(w[2], e, f, dot_int8(w[1], c, d, dot_int8(w[0], a, b, int32(0)))))
        return float32(first), float32(second)
    p, q = float32(0.0), float32(0.0)
    a, b, c, d = four_words(x, at, in_shared)
    p, q = dot_half(v[0], a, b, c, d, p, form, unpacking), dot_half(w[0], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(4)), in_shared)
    p, q = dot_half(v[1], a, b, c, d, p, form, unpacking), dot_half(w[1], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(8)), in_shared)
    p, q = dot_half(v[2], a, b, c, d, p, form, unpacking), dot_half(w[2], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(12)), in_shared)
    return dot_half(v[3], a, b, c, d, p, form, unpacking), dot_half(w[3], a, b, c, d, q, form, unpacking)


@cuda.jit(device=True)
def two_floats(pairs, at, in_shared):
    """Scale and scale * sum of one block of activations."""
    if in_shared:
        return shared_f32x2(pairs, at)
    return pairs[at], pairs[uint32(at + uint32(1))]


@cuda.jit(device=True)
def chunk_loads(codes, scales_zeros, row0, row1, chunk, k, group, early):
    """What a lane reads of two rows for one chunk: four words of codes each, and the words of scale and zero point."""
    at, of = uint32(chunk * uint32(4)), uint32(chunk // uint32(group // CHUNK))
    if early:
        v = early_u32x4(codes, uint32(uint32(row0 * uint32(k // 8)) + at))
        w = early_u32x4(codes, uint32(uint32(row1 * uint32(k // 8)) + at))
        sz0 = early_u32(scales_zeros, uint32(uint32(row0 * uint32(k // group)) + of))
        sz1 = early_u32(scales_zeros, uint32(uint32(row1 * uint32(k // group)) + of))
        return v, w, sz0, sz1
    v = stream_u32x4(codes, uint32(uint32(row0 * uint32(k // 8)) + at))
    w = stream_u32x4(codes, uint32(uint32(row1 * uint32(k // 8)) + at))
    sz0 = stream_u32(scales_zeros, uint32(uint32(row0 * uint32(k // group)) + of))
    sz1 = stream_u32(scales_zeros, uint32(uint32(row1 * uint32(k // group)) + of))
    return v, w, sz0, sz1


@cuda.jit(device=True)
def add_chunk(y0, y1, v, w, sz0, sz1, x, pairs, chunk, in_shared, form, unpacking):
    """Adds one chunk's part of two rows' products, from what `chunk_loads` gave."""
    width = uint32(8 if form == INT8 else 16)
    dot0, dot1 = chunk_dots(v, w, x, uint32(chunk * width), in_shared, form, unpacking)
    scale, total = two_floats(pairs, uint32(chunk * uint32(2)), in_shared)
    s0, z0 = half2_floats(sz0)
    s1, z1 = half2_floats(sz1)
    y0 = fma(s0, fma(scale, dot0, float32(-float32(z0 * total))), y0)
    return y0, fma(s1, fma(scale, dot1, float32(-float32(z1 * total))), y1)
