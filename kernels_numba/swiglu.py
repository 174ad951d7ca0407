"""SwiGLU of a chunk of tokens, rounded for the down projection: one block a row.

Spec: `gate / (1 + exp(-gate)) * up`, then `rows.make_round_rows`: the product may leave fp16's range.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.fused import swiglu
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.rows import check_rows, clear, row_elements, store_row


@functools.cache
def make_swiglu_rows(k: int, group: int, warps: int):
    """SwiGLU of float32 rows to fp16 rows with scales and group sums; K is the intermediate size.

    Grid [T], block [32 * warps]. Arguments of the kernel: gate_up float32 [T * 2 K], values uint32 [T * K / 2], scales
    float32 [T], sums float32 [K / group * capacity], capacity.
    """
    check_rows(k, group, warps)
    elements = row_elements(k, warps)

    @cuda.jit
    def swiglu_rows(gate_up, values, scales, sums, capacity):
        largest_of_warps = cuda.shared.array(32, float32)
        own = cuda.local.array(elements, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        clear(own, elements)
        for step in range(elements // 4):
            e, at = 4 * step, uint32(uint32(step * 128 * warps) + uint32(tid * uint32(4)))
            if at < uint32(k):
                gate = uint32(uint32(row * uint32(2 * k)) + at)
                a, b, c, d = load_f32x4(gate_up, gate)
                p, q, r, s = load_f32x4(gate_up, uint32(gate + uint32(k)))
                own[e], own[e + 1], own[e + 2], own[e + 3] = swiglu(a, p), swiglu(b, q), swiglu(c, r), swiglu(d, s)
        store_row(own, largest_of_warps, values, scales, sums, row, tid, k, group, capacity, warps)

    return swiglu_rows
