"""RoPE of a chunk of tokens, in place: pair i of a head is (i, i + head_dim / 2), Hugging Face's half-split order.

Spec: `low * cos - high * sin, high * cos + low * sin` for every q and k head. The tables come from the host, so that
YaRN is the host's affair. A thread owns one pair.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

THREADS = 128


def rope_grid(heads: int, kv_heads: int, head_dim: int, tokens: int) -> tuple[int, int]:
    """Blocks along the pairs of a token, and tokens."""
    return -(-(heads + kv_heads) * head_dim // 2 // THREADS), tokens


@functools.cache
def make_rope_rows(heads: int, kv_heads: int, head_dim: int):
    """Rotates q and k of T rows of [q; k; v]; v stays as it is.

    Grid rope_grid(...), block [THREADS]. Arguments of the kernel: qkv float32 [T * (heads + 2 kv_heads) * head_dim],
    cosines and sines float32 [positions * head_dim / 2], start (the position of the first row).
    """
    half, width = head_dim // 2, (heads + 2 * kv_heads) * head_dim
    pairs = (heads + kv_heads) * half

    @cuda.jit
    def rope_rows(qkv, cosines, sines, start):
        pair = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS)) + uint32(cuda.threadIdx.x))
        row = uint32(cuda.blockIdx.y)
        if pair < uint32(pairs):
            head, i = uint32(pair // uint32(half)), uint32(pair % uint32(half))
            turn = uint32(uint32(uint32(uint32(start) + row) * uint32(half)) + i)
            c, s = cosines[turn], sines[turn]
            at = uint32(uint32(uint32(row * uint32(width)) + uint32(head * uint32(head_dim))) + i)
            low, high = qkv[at], qkv[uint32(at + uint32(half))]
            qkv[at] = float32(float32(low * c) - float32(high * s))
            qkv[uint32(at + uint32(half))] = float32(float32(high * c) + float32(low * s))

    return rope_rows
