"""INT4 weights back to numbers: what every product does in registers, written out.

Spec: `s * (q - z)`, rounded once to float32 or, from there, to fp16. A thread owns one word, 8 weights of a row.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import floats_half2, half2_floats
from kernels_numba.instructions.memory import store_u32x4, stream_u32

THREADS = 128
FLOAT32, FLOAT16 = 0, 1


def dequantise_grid(n: int, k: int) -> int:
    return -(-n * k // 8 // THREADS)


@cuda.jit(device=True, forceinline=True)
def code(word, j):
    """Element j of a word, 0 to 15: at bit 8 j, or at 8 (j - 4) + 4 from j = 4 on."""
    place = 8 * j if j < 4 else 8 * (j - 4) + 4
    return uint32(uint32(word >> uint32(place)) & uint32(15))


@cuda.jit(device=True, forceinline=True)
def weight(word, j, s, z):
    """Element j of a word as a number."""
    return float32(s * float32(float32(code(word, j)) - z))


@functools.cache
def make_dequantise(n: int, k: int, group: int, kind: int):
    """The weight [N, K] as float32 (FLOAT32), or as words of two fp16 numbers (FLOAT16).

    Grid [dequantise_grid(n, k)], block [THREADS]. Arguments of the kernel: codes uint32 [N * K / 8], scales_zeros
    uint32 [N * K / group], out float32 [N * K] or uint32 [N * K / 2].
    """
    if k % 128 or group not in (32, 64, 128):
        raise KernelError(
            f"a weight of {n} x {k} in groups of {group}: K must be a multiple of 128, groups 32, 64 or 128"
        )
    words, per_group = n * k // 8, group // 8

    @cuda.jit
    def dequantise(codes, scales_zeros, out):
        at = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS)) + uint32(cuda.threadIdx.x))
        if at < uint32(words):
            word = stream_u32(codes, at)
            s, z = half2_floats(stream_u32(scales_zeros, uint32(at // uint32(per_group))))
            if kind == FLOAT16:
                a = floats_half2(weight(word, 0, s, z), weight(word, 1, s, z))
                b = floats_half2(weight(word, 2, s, z), weight(word, 3, s, z))
                c = floats_half2(weight(word, 4, s, z), weight(word, 5, s, z))
                d = floats_half2(weight(word, 6, s, z), weight(word, 7, s, z))
                store_u32x4(out, uint32(at * uint32(4)), a, b, c, d)
            else:
                for j in range(8):
                    out[uint32(uint32(at * uint32(8)) + uint32(j))] = weight(word, j, s, z)

    return dequantise
