"""Keys and values of a chunk of tokens appended to their pages.

Position p of a sequence stands in page block_table[p // page_size], slot p % page_size; a page holds
[kv_heads, page_size, head_dim] fp16 numbers, so that the keys of a head are neighbours. A page of -1 takes nothing.
Spec: fp16(clip(x, -65504, 65504)), to nearest even. A thread owns two neighbours of K and of V, one word each.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, uint32

from kernels_numba.instructions.arithmetic import floats_half2

THREADS = 64


@cuda.jit(device=True, forceinline=True)
def finite(x):
    """The nearest number to x that fp16 can hold; NaN stays NaN."""
    if x > float32(65504.0):
        return float32(65504.0)
    if x < float32(-65504.0):
        return float32(-65504.0)
    return x


@cuda.jit(device=True, forceinline=True)
def page_word(page, head, slot, i, kv_heads, page_size, head_dim):
    """The flat index of word i of a slot's vector in an array of pages."""
    line = uint32(uint32(uint32(page) * uint32(kv_heads)) + head)
    line = uint32(uint32(line * uint32(page_size)) + slot)
    return uint32(uint32(line * uint32(head_dim // 2)) + i)


def append_grid(kv_heads: int, head_dim: int, tokens: int) -> tuple[int, int]:
    """Blocks along the words of a token's keys, and tokens."""
    return -(-kv_heads * head_dim // 2 // THREADS), tokens


@functools.cache
def make_kv_append(heads: int, kv_heads: int, head_dim: int, page_size: int):
    """Appends k and v of T rows of [q; k; v] at the positions start .. start + T - 1.

    Grid append_grid(...), block [THREADS]. Arguments of the kernel: qkv float32 [T * (heads + 2 kv_heads) * head_dim],
    block_table int32, start, k_pages and v_pages uint32 [pages * kv_heads * page_size * head_dim / 2].
    """
    half, width = head_dim // 2, (heads + 2 * kv_heads) * head_dim
    first_k, first_v = heads * head_dim, (heads + kv_heads) * head_dim

    @cuda.jit
    def kv_append(qkv, block_table, start, k_pages, v_pages):
        word = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS)) + uint32(cuda.threadIdx.x))
        row = uint32(cuda.blockIdx.y)
        if word < uint32(kv_heads * half):
            position = uint32(uint32(start) + row)
            page = block_table[uint32(position // uint32(page_size))]
            if page >= 0:
                head, i = uint32(word // uint32(half)), uint32(word % uint32(half))
                slot = uint32(position % uint32(page_size))
                to = page_word(page, head, slot, i, kv_heads, page_size, head_dim)
                at = uint32(uint32(row * uint32(width)) + uint32(word * uint32(2)))
                k, v = uint32(at + uint32(first_k)), uint32(at + uint32(first_v))
                k_pages[to] = floats_half2(finite(qkv[k]), finite(qkv[uint32(k + uint32(1))]))
                v_pages[to] = floats_half2(finite(qkv[v]), finite(qkv[uint32(v + uint32(1))]))

    return kv_append
