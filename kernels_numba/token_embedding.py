"""The embedding row of the decode state's token: int8 codes times a scale per 128, as float32."""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.activation import INT8, bits_value
from kernels_numba.instructions.arithmetic import half2_floats
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous
from kernels_numba.instructions.memory import stream_u32

THREADS = 128
GROUP = 128  # weights of a row that share a scale


@functools.cache
def make_token_embedding(hidden: int, dependent: int = 0):
    """residual[h] = scale * code of row token[0]. Grid [hidden / 512, rounded up], block [THREADS], four elements a thread.

    Arguments of the kernel: codes uint32 [vocabulary * hidden / 4], scales uint16 [vocabulary * hidden / 128] (fp16 bits),
    token int32 [1], residual float32 [hidden].
    """

    @cuda.jit
    def token_embedding(codes, scales, token, residual):
        if dependent:
            launch_dependents()
            wait_for_previous()
        at = uint32(uint32(uint32(cuda.blockIdx.x * THREADS) + uint32(cuda.threadIdx.x)) * uint32(4))
        if at < uint32(hidden):
            row = uint32(token[0])
            word = stream_u32(codes, uint32(uint32(row * uint32(hidden // 4)) + uint32(at >> uint32(2))))
            scale, _ = half2_floats(uint32(scales[uint32(uint32(row * uint32(hidden // GROUP)) + uint32(at // uint32(GROUP)))]))
            for k in range(4):
                bits = uint32(uint32(word >> uint32(8 * k)) & uint32(0xFF))
                residual[uint32(at + uint32(k))] = float32(scale * bits_value(bits, INT8))

    return token_embedding
