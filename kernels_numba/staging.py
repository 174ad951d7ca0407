"""A vector made ready in shared memory: RMSNorm if asked for, then rounded to the form that a GEMV reads."""

from __future__ import annotations

from numba import cuda, float32, uint32

from kernels_numba.activation import BLOCK, INT8, round_four, words_per_block
from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import fma, rsqrt
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.reduce import block_sum


def staged_size(k: int, form: int) -> tuple[int, int]:
    """Shared memory of a vector of K: words of values, floats of pairs."""
    words, pairs = k // BLOCK * words_per_block(form), k // BLOCK * 2
    if 4 * (words + pairs) > 44 * 1024:
        raise KernelError(f"a vector of {k} does not fit into shared memory: round it in the kernel before")
    return words, pairs


@cuda.jit(device=True)
def inverse_rms(x, partial, tid, k, eps, warps):
    """1 / sqrt(mean(x^2) + eps) of float32 [K], in every thread of the block."""
    squares = float32(0.0)
    for start in range(0, k, warps * 128):
        at = uint32(uint32(start) + uint32(tid * uint32(4)))
        if at < uint32(k):
            a, b, c, d = load_f32x4(x, at)
            squares = fma(a, a, fma(b, b, fma(c, c, fma(d, d, squares))))
    mean = float32(block_sum(squares, partial, tid, warps) * float32(1.0 / k))
    return rsqrt(float32(mean + eps))


@cuda.jit(device=True)
def round_vector(x, weight, factor, normed, values, pairs, tid, k, warps, form):
    """Rounds x, or x * factor * weight, into shared `values` and `pairs`; a barrier must follow."""
    lane = uint32(tid & uint32(31))
    for start in range(0, k, warps * 128):
        at = uint32(uint32(start) + uint32(tid * uint32(4)))
        if at < uint32(k):  # whole warps, as K is a multiple of 128
            a, b, c, d = load_f32x4(x, at)
            if normed:
                e, f, g, h = load_f32x4(weight, at)
                a, b = float32(float32(a * factor) * e), float32(float32(b * factor) * f)
                c, d = float32(float32(c * factor) * g), float32(float32(d * factor) * h)
            first, second, scale, total = round_four(a, b, c, d, form)
            if form == INT8:
                values[uint32(at >> uint32(2))] = first
            else:
                values[uint32(at >> uint32(1))] = first
                values[uint32(uint32(at >> uint32(1)) + uint32(1))] = second
            if uint32(lane & uint32(7)) == uint32(0):
                block = uint32(at >> uint32(4))  # twice the number of the block of 32
                pairs[block] = scale
                pairs[uint32(block + uint32(1))] = total
