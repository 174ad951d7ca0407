"""Decode attention of up to eight query heads over 16 tokens, by one warp on tensor cores, from registers alone.

Both products are `mma` with the heads as rows: S = Q K^T and O = P V. A fragment has 16 rows; eight heads use 8, so
each number goes in twice: rows 0-7 hold it rounded to fp16, rows 8-15 what the rounding lost, times 2048. The sum of
the two results is good to 22 bits, and costs no instruction more. In a fragment, g = lane // 4 is a head (or a token of
K, or a column of V), t = lane % 4 picks columns (source: instructions/tensor.py).

The order in which the terms of a sum are taken is free, so the fragments are filled as memory lies: a lane reads 16
bytes of K (8 dimensions of one token) and has its share of two products; of V it reads the same 4 to 16 dimensions of
the four tokens 2t, 2t + 1, 2t + 8, 2t + 9, which `prmt` pairs up.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, uint32

from kernels_numba.instructions.arithmetic import (
    bits_float,
    exp2,
    fabs,
    float_bits,
    floats_half2,
    fma,
    fmax,
    half2_floats,
    prmt,
)
from kernels_numba.instructions.memory import load_f32x4, load_u32x2, load_u32x4, shared_u32x2, shared_u32x4
from kernels_numba.reduce import ALL_LANES
from kernels_numba.tiles import mma_k16

TOKENS = 16  # of one step of a warp
HEADS = 8  # of one warp
NEVER = np.float32(-np.inf)  # the score of a token that is not there
LOST = np.float32(2.0**-11)  # the weight of what rounding to fp16 lost


@cuda.jit(device=True, forceinline=True)
def split_pair(x, y):
    """Two floats as a half2, and what the rounding lost of them, times 2048, as another."""
    high = floats_half2(x, y)
    a, b = half2_floats(high)
    low = floats_half2(float32(float32(x - a) * float32(2048.0)), float32(float32(y - b) * float32(2048.0)))
    return high, low


@cuda.jit(device=True, forceinline=True)
def quad_max(value):
    """The largest of the four lanes of a row, in each of them."""
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 2))


@cuda.jit(device=True, forceinline=True)
def quad_sum(value):
    """The sum over the four lanes of a row, in each of them."""
    value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 2))


@cuda.jit(device=True, forceinline=True)
def load_query(q, head, t, floats, query, head_dim):
    """Row g of Q as fragments; gives the power of two that was taken out of it, so that fp16 holds it.

    head: whose query it is. floats (float32 [head_dim / 4]) is scratch, query (uint32 [head_dim / 4]) the result: for
    each 16 columns a0, a1, a2, a3. Piece p = 4c + t of 8 dimensions is this lane's.
    """
    largest = float32(0.0)
    at = uint32(uint32(head * uint32(head_dim)) + uint32(t * uint32(8)))
    for k in range(head_dim // 16):
        a, b, c, d = load_f32x4(q, uint32(at + uint32(k // 2 * 32 + k % 2 * 4)))
        floats[4 * k] = a
        floats[4 * k + 1] = b
        floats[4 * k + 2] = c
        floats[4 * k + 3] = d
        largest = fmax(fmax(fmax(largest, fabs(a)), fabs(b)), fmax(fabs(c), fabs(d)))
    # 2^14 or a little more becomes the largest: fp16 ends at 2^16, and what lies 2^28 below is still exact
    exponent = uint32(max(uint32(float_bits(quad_max(largest)) >> uint32(23)), uint32(15)))
    up = bits_float(uint32(uint32(uint32(268) - exponent) << uint32(23)))
    for k in range(head_dim // 8):
        high, low = split_pair(float32(floats[2 * k] * up), float32(floats[2 * k + 1] * up))
        query[2 * k] = high
        query[2 * k + 1] = low
    return bits_float(uint32(uint32(exponent - uint32(14)) << uint32(23)))


@cuda.jit(device=True, forceinline=True)
def load_tokens(k_words, v_words, k_base, v_base, limit, lane, keys, values, head_dim, in_shared):
    """Reads the fragments of 16 tokens whose rows start at these words, all loads under way before one is used.

    in_shared: 1 when both arrays lie in shared memory. limit: the last token that is there, 0-15: it is read again in
    place of those that are not, whose slots may hold anything.
    """
    g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
    for k in range(head_dim // 16):
        row = min(uint32(g + uint32(8 * (k // (head_dim // 32)))), limit)
        piece = uint32(uint32(k % (head_dim // 32) * 4) + t)
        at = uint32(k_base + uint32(uint32(row * uint32(head_dim // 2)) + uint32(piece * uint32(4))))
        a, b, c, d = shared_u32x4(k_words, at) if in_shared else load_u32x4(k_words, at)
        keys[4 * k] = a
        keys[4 * k + 1] = b
        keys[4 * k + 2] = c
        keys[4 * k + 3] = d
    for k in range(4):
        row = min(uint32(uint32(t * uint32(2)) + uint32(k // 2 * 8 + k % 2)), limit)
        at = uint32(v_base + uint32(row * uint32(head_dim // 2)))
        if head_dim == 32:
            at = uint32(at + uint32(g * uint32(2)))
            a, b = shared_u32x2(v_words, at) if in_shared else load_u32x2(v_words, at)
            values[2 * k] = a
            values[2 * k + 1] = b
        else:
            at = uint32(at + uint32(g * uint32(4)))
            for half in range(head_dim // 64):
                a, b, c, d = shared_u32x4(v_words, at) if in_shared else load_u32x4(v_words, at)
                first = head_dim // 16 * k + 4 * half
                values[first] = a
                values[first + 1] = b
                values[first + 2] = c
                values[first + 3] = d
                at = uint32(at + uint32(32))
    cuda.syncwarp()  # else the compiler moves loads of V down to their use


@cuda.jit(device=True, forceinline=True)
def scores(query, keys, first, head_dim, wide):
    """Row g, columns 2t and 2t + 1 of Q K^T for 8 tokens, whose K fragments start at keys[first]."""
    c0, c1, c2, c3 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for k in range(head_dim // 16):
        c0, c1, c2, c3 = mma_k16(
            query[4 * k],
            query[4 * k + 1],
            query[4 * k + 2],
            query[4 * k + 3],
            keys[first + 2 * k],
            keys[first + 2 * k + 1],
            c0,
            c1,
            c2,
            c3,
            wide,
        )
    return fma(c2, LOST, c0), fma(c3, LOST, c1)


@cuda.jit(device=True, forceinline=True)
def attend(query, keys, values, sums, factor, top, total, step, length, t, head_dim, wide):
    """Takes 16 more tokens, `step` and following, into the online softmax of row g; gives the new top and total.

    keys: uint32 [head_dim / 4], fragments of tokens 0-7, then 8-15. values: uint32 [head_dim / 4], of tokens 2t,
    2t + 1, 2t + 8, 2t + 9. sums: float32 [head_dim / 2], the accumulator's fragments. top: the largest score so far,
    unscaled; total: this lane's share of the sum of weights. factor: from a score to the exponent of 2. Tokens from
    `length` on weigh nothing, though their slots must hold finite numbers.
    """
    s0, s1 = scores(query, keys, 0, head_dim, wide)
    s2, s3 = scores(query, keys, head_dim // 8, head_dim, wide)
    token = uint32(step + uint32(t * uint32(2)))
    s0 = s0 if token < length else NEVER
    s1 = s1 if uint32(token + uint32(1)) < length else NEVER
    s2 = s2 if uint32(token + uint32(8)) < length else NEVER
    s3 = s3 if uint32(token + uint32(9)) < length else NEVER
    new_top = fmax(top, quad_max(fmax(fmax(s0, s1), fmax(s2, s3))))
    # differences first, then the scale: of two scores of 3e5 the difference is exact, the scaled scores are not
    shrink = exp2(float32(float32(top - new_top) * factor))
    s0 = exp2(float32(float32(s0 - new_top) * factor))
    s1 = exp2(float32(float32(s1 - new_top) * factor))
    s2 = exp2(float32(float32(s2 - new_top) * factor))
    s3 = exp2(float32(float32(s3 - new_top) * factor))
    total = fma(total, shrink, float32(float32(s0 + s1) + float32(s2 + s3)))
    a0, a1 = split_pair(s0, s1)
    a2, a3 = split_pair(s2, s3)
    words = head_dim // 16
    for j in range(head_dim // 8):
        pick = uint32(0x7632) if j % 2 else uint32(0x5410)
        b0 = prmt(values[j // 2], values[words + j // 2], pick)
        b1 = prmt(values[2 * words + j // 2], values[3 * words + j // 2], pick)
        c0, c1 = float32(sums[4 * j] * shrink), float32(sums[4 * j + 1] * shrink)
        c2, c3 = float32(sums[4 * j + 2] * shrink), float32(sums[4 * j + 3] * shrink)
        c0, c1, c2, c3 = mma_k16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, wide)
        sums[4 * j] = c0
        sums[4 * j + 1] = c1
        sums[4 * j + 2] = c2
        sums[4 * j + 3] = c3
    return new_top, total


@cuda.jit(device=True, forceinline=True)
def dimension(column, j, head_dim):
    """The dimension that column 0-7 of the j-th fragment of O stands for."""
    if head_dim == 32:
        return uint32(uint32(column * uint32(4)) + uint32(j))
    return uint32(uint32(uint32(column * uint32(8)) + uint32(j % 8)) + uint32(j // 8 * 64))


@cuda.jit(device=True, forceinline=True)
def share(sums, top, total, warp, lane, all_sums, all_tops, all_totals, head_dim):
    """Puts a warp's result where the block can see it: [warps, HEADS, head_dim], and twice [warps, HEADS].

    The sums go as bits into uint32, so that they may use memory that held fp16 pairs before.
    """
    g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
    row = uint32(uint32(warp * uint32(HEADS)) + g)
    total = quad_sum(total)
    if t == uint32(0):
        all_tops[row] = top
        all_totals[row] = total
    at, column = uint32(row * uint32(head_dim)), uint32(t * uint32(2))
    for j in range(head_dim // 8):
        left = uint32(at + dimension(column, j, head_dim))
        right = uint32(at + dimension(uint32(column + uint32(1)), j, head_dim))
        all_sums[left] = float_bits(fma(sums[4 * j + 2], LOST, sums[4 * j]))
        all_sums[right] = float_bits(fma(sums[4 * j + 3], LOST, sums[4 * j + 1]))
