"""What the memory can do at best: a copy and a read of more than the L2 holds, 16 bytes a lane."""

from __future__ import annotations

from numba import cuda, uint32

from kernels_numba.instructions.memory import store_u32x4, stream_u32x4

THREADS = 256
LOADS = 4  # of 16 bytes that each thread has on their way at once


@cuda.jit
def copy_words(source, target, quads):
    """target = source, uint32 [4 * quads], four quads a thread and turn."""
    step = uint32(uint32(cuda.gridDim.x) * uint32(THREADS))
    at = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS)) + uint32(cuda.threadIdx.x))
    while at < quads:
        a, b, c, d = stream_u32x4(source, uint32(at * uint32(4)))
        store_u32x4(target, uint32(at * uint32(4)), a, b, c, d)
        at = uint32(at + step)


@cuda.jit
def read_words(source, found, quads):
    """Reads uint32 [4 * quads] and keeps an exclusive-or of all, so that no load can be left out."""
    step = uint32(uint32(cuda.gridDim.x) * uint32(THREADS))
    at = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS)) + uint32(cuda.threadIdx.x))
    kept = uint32(0)
    while uint32(at + uint32(uint32(LOADS - 1) * step)) < quads:
        a, b, c, d = stream_u32x4(source, uint32(at * uint32(4)))
        e, f, g, h = stream_u32x4(source, uint32(uint32(at + step) * uint32(4)))
        i, j, k, m = stream_u32x4(source, uint32(uint32(at + uint32(uint32(2) * step)) * uint32(4)))
        n, o, p, q = stream_u32x4(source, uint32(uint32(at + uint32(uint32(3) * step)) * uint32(4)))
        kept = uint32(kept ^ a ^ b ^ c ^ d ^ e ^ f ^ g ^ h ^ i ^ j ^ k ^ m ^ n ^ o ^ p ^ q)
        at = uint32(at + uint32(uint32(LOADS) * step))
    if kept == uint32(0x12345678):
        found[0] = kept
