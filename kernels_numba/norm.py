"""RMSNorm of a chunk of tokens, rounded for the product that follows: one block a row.

Spec: `x / sqrt(mean(x^2) + eps) * weight`, then `rows.make_round_rows`.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.instructions.arithmetic import fma, fmax, rsqrt
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.reduce import block_sum
from kernels_numba.rows import block_max, check_rows, largest, row_factor, row_scale, store_four


@cuda.jit(device=True)
def normed_four(x, weight, line, at, inverse):
    """Elements at .. at + 3 of the row that starts at `line`, normalised."""
    a, b, c, d = load_f32x4(x, uint32(line + at))
    e, f, g, h = load_f32x4(weight, at)
    a, b = float32(float32(a * inverse) * e), float32(float32(b * inverse) * f)
    return a, b, float32(float32(c * inverse) * g), float32(float32(d * inverse) * h)


@functools.cache
def make_norm_rows(k: int, group: int, warps: int):
    """RMSNorm of float32 rows to fp16 rows with scales and group sums.

    Grid [T], block [32 * warps]. Arguments of the kernel: x float32 [T * K], weight float32 [K], eps (float32), values
    uint32 [T * K / 2], scales float32 [T], sums float32 [K / group * capacity], capacity.
    """
    check_rows(k, group, warps)

    @cuda.jit
    def norm_rows(x, weight, eps, values, scales, sums, capacity):
        partial = cuda.shared.array(32, float32)
        largest_of_warps = cuda.shared.array(32, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        line = uint32(row * uint32(k))
        squares = float32(0.0)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = load_f32x4(x, uint32(line + at))
                squares = fma(a, a, fma(b, b, fma(c, c, fma(d, d, squares))))
        mean = float32(block_sum(squares, partial, tid, warps) * float32(1.0 / k))
        inverse = rsqrt(float32(mean + eps))
        absmax = float32(0.0)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = normed_four(x, weight, line, at, inverse)
                absmax = fmax(absmax, largest(a, b, c, d))
        absmax = block_max(absmax, largest_of_warps, tid, warps)
        factor = float32(inverse * row_factor(absmax))  # a power of two changes no rounding
        if tid == uint32(0):
            scales[row] = row_scale(absmax)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = normed_four(x, weight, line, at, factor)
                store_four(values, sums, row, at, k, group, capacity, a, b, c, d)

    return norm_rows
