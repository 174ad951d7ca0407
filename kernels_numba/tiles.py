"""What both tensor-core kernels of prefill share: 16 bytes brought into shared memory, and one mma step of depth 16."""

from __future__ import annotations

from numba import cuda

from kernels_numba.instructions.asynchronous import copy_async_16
from kernels_numba.instructions.memory import load_u32x4, shared_store_u32x4
from kernels_numba.instructions.tensor import mma_f16, mma_f16_k8


@cuda.jit(device=True, forceinline=True)
def copy_16(target, to, source, at, asynchronous):
    """Copies 16 bytes from global to shared memory, by cp.async where the GPU has it (8.0), else through registers."""
    if asynchronous:
        copy_async_16(target, to, source, at)
    else:
        a, b, c, d = load_u32x4(source, at)
        shared_store_u32x4(target, to, a, b, c, d)


@cuda.jit(device=True, forceinline=True)
def mma_k16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, whole):
    """A (16 x 16) @ B (16 x 8) + C: one mma where the GPU has m16n8k16 (8.0, `whole`), else two of depth 8."""
    if whole:
        return mma_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
    c0, c1, c2, c3 = mma_f16_k8(a0, a1, b0, c0, c1, c2, c3)
    return mma_f16_k8(a2, a3, b1, c0, c1, c2, c3)
