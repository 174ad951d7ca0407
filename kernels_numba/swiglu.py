"""SwiGLU of a chunk of tokens, rounded for the down projection: one block a row.

Spec: `gate / (1 + exp(-gate)) * up`, then `rows.make_round_rows`. The product may leave fp16's range, so a first pass
finds the row's absmax, and a second computes the product again rather than keep it.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.fused import swiglu
from kernels_numba.instructions.arithmetic import fmax
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.rows import block_max, check_rows, largest, row_factor, row_scale, store_four


@cuda.jit(device=True)
def gated_four(gate_up, line, at, k):
    """Elements at .. at + 3 of the product of a row [gate; up] that starts at `line`."""
    a, b, c, d = load_f32x4(gate_up, uint32(line + at))
    e, f, g, h = load_f32x4(gate_up, uint32(uint32(line + at) + uint32(k)))
    return swiglu(a, e), swiglu(b, f), swiglu(c, g), swiglu(d, h)


@functools.cache
def make_swiglu_rows(k: int, group: int, warps: int):
    """SwiGLU of float32 rows to fp16 rows with scales and group sums; K is the intermediate size.

    Grid [T], block [32 * warps]. Arguments of the kernel: gate_up float32 [T * 2 K], values uint32 [T * K / 2], scales
    float32 [T], sums float32 [K / group * capacity], capacity.
    """
    check_rows(k, group, warps)

    @cuda.jit
    def swiglu_rows(gate_up, values, scales, sums, capacity):
        partial = cuda.shared.array(32, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        line = uint32(row * uint32(2 * k))
        absmax = float32(0.0)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = gated_four(gate_up, line, at, k)
                absmax = fmax(absmax, largest(a, b, c, d))
        absmax = block_max(absmax, partial, tid, warps)
        factor = row_factor(absmax)
        if tid == uint32(0):
            scales[row] = row_scale(absmax)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = gated_four(gate_up, line, at, k)
                a, b, c, d = float32(a * factor), float32(b * factor), float32(c * factor), float32(d * factor)
                store_four(values, sums, row, at, k, group, capacity, a, b, c, d)

    return swiglu_rows
