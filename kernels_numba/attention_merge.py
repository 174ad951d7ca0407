"""Merging partial softmaxes: the warps of a block, then the blocks of a KV head, in a fixed order.

A partial is (top, total, sums): the largest score, the sum of exp(score - top), the sum of exp(score - top) * V.
Merged: top = max of tops; each partial weighs exp(its top - top); out = weighted sums / weighted totals.
"""

from __future__ import annotations

from numba import cuda, float32, uint32

from kernels_numba.attention_tile import HEADS, NEVER
from kernels_numba.instructions.arithmetic import divide, exp2, fmax
from kernels_numba.instructions.memory import load_f32_l2, ticket
from kernels_numba.reduce import lanes_max, lanes_sum


@cuda.jit(device=True, forceinline=True)
def merge_warps(tops, totals, sums, active, head, factor, lane, merged, head_dim):
    """One head's partials of `active` warps: leaves dimensions lane, lane + 32 ... in `merged`; gives top and total."""
    top, total = float32(NEVER), float32(0.0)
    warp = uint32(0)
    while warp < active:
        top = fmax(top, tops[uint32(uint32(warp * uint32(HEADS)) + head)])
        warp = uint32(warp + uint32(1))
    for j in range(head_dim // 32):
        merged[j] = float32(0.0)
    warp = uint32(0)
    while warp < active:
        row = uint32(uint32(warp * uint32(HEADS)) + head)
        weight = exp2(float32(float32(tops[row] - top) * factor))
        total = float32(total + float32(weight * totals[row]))
        for j in range(head_dim // 32):
            at = uint32(uint32(row * uint32(head_dim)) + uint32(lane + uint32(32 * j)))
            merged[j] = float32(merged[j] + float32(weight * sums[at]))
        warp = uint32(warp + uint32(1))
    return top, total


@cuda.jit(device=True, forceinline=True)
def write_partial(partials, row, rows, top, total, merged, lane, head_dim):
    """A block's partial of one head: first the sums of all rows, then (top, total) of all rows."""
    for j in range(head_dim // 32):
        partials[uint32(uint32(row * uint32(head_dim)) + uint32(lane + uint32(32 * j)))] = merged[j]
    if lane == uint32(0):
        at = uint32(uint32(rows * head_dim) + uint32(row * uint32(2)))
        partials[at] = top
        partials[uint32(at + uint32(1))] = total


@cuda.jit(device=True, forceinline=True)
def is_last(tickets, number, used, flag, tid):
    """Whether this block is the last of `used`, which then sees what the others wrote; the count starts anew."""
    cuda.threadfence()
    cuda.syncthreads()
    if tid == uint32(0):
        arrived = ticket(tickets, number, uint32(1))
        flag[0] = uint32(arrived == uint32(used - uint32(1)))
        if arrived == uint32(used - uint32(1)):
            tickets[number] = uint32(0)
    cuda.syncthreads()
    return flag[0] == uint32(1)


@cuda.jit(device=True, forceinline=True)
def merge_blocks(partials, first, rows, used, factor, lane, weights, own, merged, head_dim):
    """One head's partials of `used` blocks, rows first, first + HEADS ..., by one warp: leaves the output in `merged`.

    weights: shared float32, from `own` on this warp's, as many as `used` rounded up to 4.
    """
    top = float32(NEVER)
    split = lane
    while split < used:
        top = fmax(top, load_f32_l2(partials, _top_of(first, rows, split, head_dim)))
        split = uint32(split + uint32(32))
    top = lanes_max(top)
    total = float32(0.0)
    split = lane
    while split < uint32(uint32(used + uint32(3)) & uint32(0xFFFFFFFC)):
        weight = float32(0.0)
        if split < used:
            where = _top_of(first, rows, split, head_dim)
            weight = exp2(float32(float32(load_f32_l2(partials, where) - top) * factor))
            total = float32(total + float32(weight * load_f32_l2(partials, uint32(where + uint32(1)))))
        weights[uint32(own + split)] = weight
        split = uint32(split + uint32(32))
    total = lanes_sum(total, 32)
    cuda.syncwarp()
    for j in range(head_dim // 32):
        merged[j] = float32(0.0)
    split = uint32(0)
    while split < used:  # four partials are on their way at a time
        for j in range(head_dim // 32):
            column = uint32(lane + uint32(32 * j))
            x0 = _sum_of(partials, first, split, used, column, head_dim)
            x1 = _sum_of(partials, first, uint32(split + uint32(1)), used, column, head_dim)
            x2 = _sum_of(partials, first, uint32(split + uint32(2)), used, column, head_dim)
            x3 = _sum_of(partials, first, uint32(split + uint32(3)), used, column, head_dim)
            at = uint32(own + split)
            x0 = float32(x0 * weights[at]) + float32(x1 * weights[uint32(at + uint32(1))])
            x2 = float32(x2 * weights[uint32(at + uint32(2))]) + float32(x3 * weights[uint32(at + uint32(3))])
            merged[j] = float32(merged[j] + float32(x0 + x2))
        split = uint32(split + uint32(4))
    inverse = divide(float32(1.0), total)
    for j in range(head_dim // 32):
        merged[j] = float32(merged[j] * inverse)


@cuda.jit(device=True, forceinline=True)
def _top_of(first, rows, split, head_dim):
    row = uint32(first + uint32(split * uint32(HEADS)))
    return uint32(uint32(rows * head_dim) + uint32(row * uint32(2)))


@cuda.jit(device=True, forceinline=True)
def _sum_of(partials, first, split, used, column, head_dim):
    """One element of a block's sums; past the last block the last again, which weighs nothing then."""
    row = uint32(first + uint32(min(split, uint32(used - uint32(1))) * uint32(HEADS)))
    return load_f32_l2(partials, uint32(uint32(row * uint32(head_dim)) + column))
