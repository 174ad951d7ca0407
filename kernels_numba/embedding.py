"""The embedding of a chunk of tokens: int8 rows of the table to the float32 residual stream, one block a token.

Spec: `scales[ids] * codes[ids]`, a scale for each 128 columns. A thread owns 4 neighbours, one word of codes.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.activation import INT8, bits_value
from kernels_numba.instructions.arithmetic import half2_floats
from kernels_numba.instructions.memory import stream_u32

COLUMNS = 128  # that share a scale


@functools.cache
def make_embedding_rows(hidden: int, warps: int):
    """Looks up T tokens.

    Grid [T], block [32 * warps]. Arguments of the kernel: ids int32 [T], codes uint32 [V * hidden / 4] (four int8 a
    word), scales uint16 [V * hidden / 128] (fp16 bits), x float32 [T * hidden].
    """

    @cuda.jit
    def embedding_rows(ids, codes, scales, x):
        row, token = uint32(cuda.blockIdx.x), uint32(ids[uint32(cuda.blockIdx.x)])
        for start in range(0, hidden, warps * 128):
            at = uint32(uint32(start) + uint32(uint32(cuda.threadIdx.x) * uint32(4)))
            if at < uint32(hidden):
                source = uint32(uint32(token * uint32(hidden)) + at)
                word = stream_u32(codes, uint32(source >> uint32(2)))
                scale, _ = half2_floats(uint32(scales[uint32(source // uint32(COLUMNS))]))
                to = uint32(uint32(row * uint32(hidden)) + at)
                for k in range(4):
                    bits = uint32(uint32(word >> uint32(8 * k)) & uint32(0xFF))
                    x[uint32(to + uint32(k))] = float32(scale * bits_value(bits, INT8))

    return embedding_rows
