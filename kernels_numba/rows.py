"""Rows of activations rounded for the prefill product: fp16 values and, for each row, a power of two as scale.

The scale brings a row's absmax into [2^14, 2^15): nothing overflows fp16, and what is small beside the largest value
keeps as many bits as fp16 has. Beside the values stand their sums over each group of weights, as a zero point needs them:
sums[group][token], so that the tokens of a tile are neighbours.

A block makes one row; a thread owns 4 neighbours at each step along it, a warp 128, so that a group's sum is a sum over
lanes. The row is read again for each pass: it is in the L1 cache by then.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.activation import SMALLEST
from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import bits_float, fabs, float_bits, floats_half2, fmax, half2_floats
from kernels_numba.instructions.memory import load_f32x4
from kernels_numba.reduce import lanes_max, lanes_sum

TOP = 14  # the exponent that a row's absmax is brought to


def check_rows(k: int, group: int, warps: int) -> None:
    """Raises KernelError unless rows of K values can be rounded for weights in these groups."""
    if k % 128 or group not in (32, 64, 128) or not 1 <= warps <= 32:
        raise KernelError(
            f"rows of {k} values, groups of {group}, {warps} warps: K must be a multiple of 128, groups 32, 64 or 128, "
            "and there are 1 to 32 warps"
        )


@cuda.jit(device=True)
def row_factor(absmax):
    """The power of two that a row is multiplied by; 1 for a row of zeros."""
    if absmax < float32(SMALLEST):
        return float32(1.0)
    return bits_float(uint32(uint32((2 * 127 + TOP) << 23) - uint32(float_bits(absmax) & uint32(0x7F800000))))


@cuda.jit(device=True)
def row_scale(absmax):
    """What the rounded values are multiplied by: 1 / row_factor."""
    if absmax < float32(SMALLEST):
        return float32(1.0)
    return bits_float(uint32(uint32(float_bits(absmax) & uint32(0x7F800000)) - uint32(TOP << 23)))


@cuda.jit(device=True)
def largest(a, b, c, d):
    """The largest absolute value of four."""
    return fmax(fmax(fabs(a), fabs(b)), fmax(fabs(c), fabs(d)))


@cuda.jit(device=True)
def block_max(value, partial, tid, warps):
    """The largest value of the block's threads, in each of them; `partial` is shared, float32 [warps]."""
    value = lanes_max(value)
    if uint32(tid & uint32(31)) == uint32(0):
        partial[uint32(tid >> uint32(5))] = value
    cuda.syncthreads()
    for w in range(warps):
        value = fmax(value, partial[uint32(w)])
    return value


@cuda.jit(device=True)
def store_four(values, sums, row, at, k, group, capacity, a, b, c, d):
    """Rounds elements at .. at + 3 of a row, already scaled, and their group's sum; whole warps call it."""
    first, second = floats_half2(a, b), floats_half2(c, d)
    to = uint32(uint32(uint32(row * uint32(k)) + at) >> uint32(1))
    values[to] = first
    values[uint32(to + uint32(1))] = second
    a, b = half2_floats(first)
    c, d = half2_floats(second)
    total = lanes_sum(float32(float32(a + b) + float32(c + d)), group // 4)
    if uint32(at % uint32(group)) == uint32(0):
        sums[uint32(uint32(uint32(at // uint32(group)) * uint32(capacity)) + row)] = total


@functools.cache
def make_round_rows(k: int, group: int, warps: int):
    """Rounds float32 rows. Spec: values = fp16(x / scales), with scales = 2^(floor(log2(max |x|)) - 14) of each row.

    Grid [T], block [32 * warps]. Arguments of the kernel: x float32 [T * K], values uint32 [T * K / 2] (two fp16 a word),
    scales float32 [T], sums float32 [K / group * capacity], capacity (tokens that there is room for).
    """
    check_rows(k, group, warps)

    @cuda.jit
    def round_rows(x, values, scales, sums, capacity):
        partial = cuda.shared.array(32, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        line = uint32(row * uint32(k))
        absmax = float32(0.0)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = load_f32x4(x, uint32(line + at))
                absmax = fmax(absmax, largest(a, b, c, d))
        absmax = block_max(absmax, partial, tid, warps)
        factor = row_factor(absmax)
        if tid == uint32(0):
            scales[row] = row_scale(absmax)
        for start in range(0, k, warps * 128):
            at = uint32(uint32(start) + uint32(tid * uint32(4)))
            if at < uint32(k):
                a, b, c, d = load_f32x4(x, uint32(line + at))
                a, b, c, d = float32(a * factor), float32(b * factor), float32(c * factor), float32(d * factor)
                store_four(values, sums, row, at, k, group, capacity, a, b, c, d)

    return round_rows
