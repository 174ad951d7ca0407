"""RMSNorm of a chunk of tokens, rounded for the product that follows: one block a row.

Spec: `x / sqrt(mean(x^2) + eps) * weight`, then `rows.make_round_rows`.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.instructions.arithmetic import fma, rsqrt
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.reduce import block_sum
from kernels_numba.rows import check_rows, clear, row_elements, store_row


@functools.cache
def make_norm_rows(k: int, group: int, warps: int):
    """RMSNorm of float32 rows to fp16 rows with scales and group sums.

    Grid [T], block [32 * warps]. Arguments of the kernel: x float32 [T * K], weight float32 [K], eps (float32), values
    uint32 [T * K / 2], scales float32 [T], sums float32 [K / group * capacity], capacity.
    """
    check_rows(k, group, warps)
    elements = row_elements(k, warps)

    @cuda.jit
    def norm_rows(x, weight, eps, values, scales, sums, capacity):
        partial = cuda.shared.array(32, float32)
        largest_of_warps = cuda.shared.array(32, float32)
        own = cuda.local.array(elements, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        clear(own, elements)
        squares = float32(0.0)
        for step in range(elements // 4):
            e, at = 4 * step, uint32(uint32(step * 128 * warps) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = load_f32x4(x, uint32(uint32(row * uint32(k)) + at))
                squares = fma(a, a, fma(b, b, fma(c, c, fma(d, d, squares))))
                own[e], own[e + 1], own[e + 2], own[e + 3] = a, b, c, d
        mean = float32(block_sum(squares, partial, tid, warps) * float32(1.0 / k))
        inverse = rsqrt(float32(mean + eps))
        for step in range(elements // 4):
            e, at = 4 * step, uint32(uint32(step * 128 * warps) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = load_f32x4(weight, at)
                own[e], own[e + 1] = float32(float32(own[e] * inverse) * a), float32(float32(own[e + 1] * inverse) * b)
                own[e + 2] = float32(float32(own[e + 2] * inverse) * c)
                own[e + 3] = float32(float32(own[e + 3] * inverse) * d)
        store_row(own, largest_of_warps, values, scales, sums, row, tid, k, group, capacity, warps)

    return norm_rows
