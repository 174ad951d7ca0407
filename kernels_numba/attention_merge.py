"""Merging partial softmaxes: the warps of a block, then the blocks of a KV head, in a fixed order.

A partial is (top, total, sums): the largest score, the sum of exp(score - top), the sum of exp(score - top) * V.
Merged: top = max of tops; each partial weighs exp(its top - top); out = weighted sums / weighted totals.
"""

from __future__ import annotations

from numba import cuda, float32, uint32

from kernels_numba.attention_tile import HEADS, NEVER
from kernels_numba.instructions.arithmetic import bits_float, divide, exp2, fmax
from kernels_numba.instructions.memory import load_f32_l2, ticket
from kernels_numba.reduce import lanes_max, lanes_sum

AT_ONCE = 16  # partials on their way to a warp at a time


def weights_of(splits: int) -> int:
    """Weights that a warp needs room for: `splits`, in whole rounds."""
    return -(-splits // AT_ONCE) * AT_ONCE


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
            merged[j] = float32(merged[j] + float32(weight * bits_float(sums[at])))
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
def merge_block(
    tops, totals, sums, active, factors, here, warp, warps, lane, merged, partials, row, rows, used, out, head, head_dim
):
    """The block's heads 0 .. here - 1, shared among `warps` warps: a partial each, or the output of a block alone."""
    own = warp
    while own < here:
        top, total = merge_warps(tops, totals, sums, active, own, factors[own], lane, merged, head_dim)
        if used > uint32(1):
            write_partial(partials, uint32(row + own), rows, top, total, merged, lane, head_dim)
        else:
            write_output(out, uint32(head + own), merged, total, lane, head_dim)
        own = uint32(own + uint32(warps))


@cuda.jit(device=True, forceinline=True)
def merge_split(
    partials, row, rows, used, factors, here, warp, warps, lane, weights, room, merged, loaded, out, head, head_dim
):
    """The heads of all `used` blocks of a KV head, shared among the warps of the last one: the output.

    weights: shared float32, `room` of them for each warp. merged, loaded: float32 [head_dim / 32], [head_dim / 2].
    """
    own = warp
    while own < here:
        first, at = uint32(row + own), uint32(warp * uint32(room))
        total = merge_blocks(partials, first, rows, used, factors[own], lane, weights, at, merged, loaded, head_dim)
        write_output(out, uint32(head + own), merged, total, lane, head_dim)
        own = uint32(own + uint32(warps))


@cuda.jit(device=True, forceinline=True)
def write_output(out, head, merged, total, lane, head_dim):
    """The weighted sums of one head over the total weight."""
    inverse = divide(float32(1.0), total)
    at = uint32(uint32(head * uint32(head_dim)) + lane)
    for j in range(head_dim // 32):
        out[uint32(at + uint32(32 * j))] = float32(merged[j] * inverse)


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
def merge_blocks(partials, first, rows, used, factor, lane, weights, own, merged, loaded, head_dim):
    """One head's partials of `used` blocks, rows first, first + HEADS ...: sums in `merged`, gives the total.

    weights: shared float32, from `own` on this warp's, as many as `used` in whole rounds.
    """
    top = float32(NEVER)
    split = lane
    while split < used:
        top = fmax(top, load_f32_l2(partials, _top_of(first, rows, split, head_dim)))
        split = uint32(split + uint32(32))
    top = lanes_max(top)
    total = float32(0.0)
    split = lane
    while split < uint32(uint32(used + uint32(AT_ONCE - 1)) & uint32(0xFFFFFFFF - AT_ONCE + 1)):
        weight = float32(0.0)
        if split < used:
            where = _top_of(first, rows, split, head_dim)
            weight = exp2(float32(float32(load_f32_l2(partials, where) - top) * factor))
            total = float32(total + float32(weight * load_f32_l2(partials, uint32(where + uint32(1)))))
        weights[uint32(own + split)] = weight
        split = uint32(split + uint32(32))
    total = lanes_sum(total, 32)
    cuda.syncwarp()
    columns = head_dim // 32
    for j in range(columns):
        merged[j] = float32(0.0)
    split = uint32(0)
    while split < used:
        for k in range(AT_ONCE):
            row = uint32(first + uint32(uint32(split + uint32(k)) * uint32(HEADS)))
            at = uint32(uint32(row * uint32(head_dim)) + lane)
            for j in range(columns):
                loaded[columns * k + j] = float32(0.0)
                if uint32(split + uint32(k)) < used:
                    loaded[columns * k + j] = load_f32_l2(partials, uint32(at + uint32(32 * j)))
        for k in range(AT_ONCE):
            weight = weights[uint32(uint32(own + split) + uint32(k))]
            for j in range(columns):
                merged[j] = float32(merged[j] + float32(weight * loaded[columns * k + j]))
        split = uint32(split + uint32(AT_ONCE))
    cuda.syncwarp()  # the weights' room is free for the next head
    return total


@cuda.jit(device=True, forceinline=True)
def _top_of(first, rows, split, head_dim):
    row = uint32(first + uint32(split * uint32(HEADS)))
    return uint32(uint32(rows * head_dim) + uint32(row * uint32(2)))
