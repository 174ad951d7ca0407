"""Sums and maxima over the lanes of a warp and the threads of a block, the same in every thread and at every run."""

from __future__ import annotations

from numba import cuda, float32, uint32

from kernels_numba.instructions.arithmetic import fmax

ALL_LANES = 0xFFFFFFFF


@cuda.jit(device=True)
def lanes_sum(value, lanes):
    """The sum over the neighbouring lanes of a team, in each of them."""
    if lanes > 16:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 16))
    if lanes > 8:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 8))
    if lanes > 4:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 4))
    if lanes > 2:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 2))
    if lanes > 1:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return value


@cuda.jit(device=True)
def lanes_max(value):
    """The largest of a warp's values, in every lane."""
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 16))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 8))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 4))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 2))
    return fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 1))


@cuda.jit(device=True)
def block_sum(value, partial, tid, warps):
    """The sum over all threads of the block, in each of them; `partial` is shared, float32 [warps]."""
    value = lanes_sum(value, 32)
    if uint32(tid & uint32(31)) == uint32(0):
        partial[uint32(tid >> uint32(5))] = value
    cuda.syncthreads()
    total = float32(0.0)
    for w in range(warps):
        total = float32(total + partial[uint32(w)])
    return total
