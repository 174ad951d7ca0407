"""Rows of activations rounded for the prefill product: fp16 values and, for each row, a power of two as scale.

The scale brings a row's absmax into [2^14, 2^15): nothing overflows fp16, and what is small beside the largest value
keeps as many bits as fp16 has. Each 8 neighbours stand in the order 0 2 4 6 1 3 5 7, as the codes of a word come out of
it. Beside the values stand their sums over each group of weights, as a zero point needs them: sums[group][token], so
that the tokens of a tile are neighbours.

A block makes one row, a thread 4 neighbours at each step along it, a warp 128, so that a group's sum is one over lanes.
The row stays in registers from the first pass, which finds its largest value, to the second, which rounds it.
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


@cuda.jit(device=True, forceinline=True)
def row_factor(absmax):
    """The power of two that a row is multiplied by; 1 for a row of zeros."""
    if absmax < float32(SMALLEST):
        return float32(1.0)
    return bits_float(uint32(uint32((2 * 127 + TOP) << 23) - uint32(float_bits(absmax) & uint32(0x7F800000))))


@cuda.jit(device=True, forceinline=True)
def row_scale(absmax):
    """What the rounded values are multiplied by: 1 / row_factor."""
    if absmax < float32(SMALLEST):
        return float32(1.0)
    return bits_float(uint32(uint32(float_bits(absmax) & uint32(0x7F800000)) - uint32(TOP << 23)))


@cuda.jit(device=True, forceinline=True)
def block_max(value, partial, tid, warps):
    """The largest value of the block's threads, in each of them; `partial` is shared, float32 [warps]."""
    value = lanes_max(value)
    if uint32(tid & uint32(31)) == uint32(0):
        partial[uint32(tid >> uint32(5))] = value
    cuda.syncthreads()
    for w in range(warps):
        value = fmax(value, partial[uint32(w)])
    return value


@cuda.jit(device=True, forceinline=True)
def store_four(values, sums, row, at, k, group, capacity, a, b, c, d):
    """Rounds elements at .. at + 3 of a row, already scaled, and their group's sum; whole warps call it."""
    even, odd = floats_half2(a, c), floats_half2(b, d)
    to = uint32(uint32(uint32(row * uint32(k)) + uint32(at & uint32(0xFFFFFFF8))) >> uint32(1))
    to = uint32(to + uint32(uint32(at >> uint32(2)) & uint32(1)))
    values[to] = even
    values[uint32(to + uint32(2))] = odd
    a, c = half2_floats(even)
    b, d = half2_floats(odd)
    total = lanes_sum(float32(float32(a + b) + float32(c + d)), group // 4)
    if uint32(at % uint32(group)) == uint32(0):
        sums[uint32(uint32(uint32(at // uint32(group)) * uint32(capacity)) + row)] = total


@cuda.jit(device=True, forceinline=True)
def store_row(own, largest_of_warps, values, scales, sums, row, tid, k, group, capacity, warps):
    """Rounds a row that lies in registers: a thread's elements `own`, 4 for each step along the row."""
    steps = (k + 128 * warps - 1) // (128 * warps)
    absmax = float32(0.0)
    for step in range(steps):
        e = 4 * step
        absmax = fmax(absmax, fmax(fmax(fabs(own[e]), fabs(own[e + 1])), fmax(fabs(own[e + 2]), fabs(own[e + 3]))))
    absmax = block_max(absmax, largest_of_warps, tid, warps)
    factor = row_factor(absmax)
    if tid == uint32(0):
        scales[row] = row_scale(absmax)
    for step in range(steps):
        e, at = 4 * step, uint32(uint32(step * 128 * warps) + uint32(tid * uint32(4)))
        if at < uint32(k):
            a, b = float32(own[e] * factor), float32(own[e + 1] * factor)
            c, d = float32(own[e + 2] * factor), float32(own[e + 3] * factor)
            store_four(values, sums, row, at, k, group, capacity, a, b, c, d)


@cuda.jit(device=True, forceinline=True)
def clear(own, count):
    """Makes a thread's elements 0, for those beyond the row's end."""
    for i in range(count):
        own[i] = float32(0.0)


def row_elements(k: int, warps: int) -> int:
    """How many of a row's elements a thread holds."""
    return -(-k // (128 * warps)) * 4


@functools.cache
def make_round_rows(k: int, group: int, warps: int):
    """Rounds float32 rows. Spec: values = fp16(x / scales), with scales = 2^(floor(log2(max |x|)) - 14) of each row.

    Grid [T], block [32 * warps]. Arguments of the kernel: x float32 [T * K], values uint32 [T * K / 2] (two fp16 a
    word), scales float32 [T], sums float32 [K / group * capacity], capacity (tokens that there is room for).
    """
    check_rows(k, group, warps)
    elements = row_elements(k, warps)

    @cuda.jit
    def round_rows(x, values, scales, sums, capacity):
        largest_of_warps = cuda.shared.array(32, float32)
        own = cuda.local.array(elements, float32)
        tid, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        clear(own, elements)
        for step in range(elements // 4):
            e, at = 4 * step, uint32(uint32(step * 128 * warps) + uint32(tid * uint32(4)))
            if at < uint32(k):
                own[e], own[e + 1], own[e + 2], own[e + 3] = load_f32x4(x, uint32(uint32(row * uint32(k)) + at))
        store_row(own, largest_of_warps, values, scales, sums, row, tid, k, group, capacity, warps)

    return round_rows
