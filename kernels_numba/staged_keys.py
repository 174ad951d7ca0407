"""Keys and values of one head, brought from their pages to shared memory a stage of KEYS at a time.

The 16-byte chunks of a row are permuted by the row's number, so that ldmatrix, which reads the same chunk of eight
rows, finds them in different banks. Slots after the last key become zeros, whatever the page holds: a probability of 0
times NaN would be NaN.
"""

from __future__ import annotations

from numba import cuda, uint32

from kernels_numba.instructions.memory import shared_store_u32x4
from kernels_numba.paged_kv import page_word
from kernels_numba.tiles import copy_16

KEYS = 32


@cuda.jit(device=True, forceinline=True)
def place(row, chunk, head_dim):
    """The word at which a 16-byte chunk of a row lies in a stage."""
    if head_dim == 32:  # two rows share a line of 128 bytes
        chunk = uint32(chunk ^ uint32(uint32(row >> uint32(1)) & uint32(3)))
    else:
        chunk = uint32(chunk ^ uint32(row & uint32(7)))
    return uint32(uint32(row * uint32(head_dim // 2)) + uint32(chunk * uint32(4)))


@cuda.jit(device=True, forceinline=True)
def load_keys(
    ks, vs, base, k_pages, v_pages, block_table, first, count, head, tid, threads, kv_heads, page_size, head_dim,
    asynchronous,
):  # fmt: skip
    """Starts to bring keys first .. first + KEYS - 1, if below `count`, and their values to [base ..] of ks and vs."""
    chunks = head_dim // 8
    for turn in range((KEYS * chunks + threads - 1) // threads):
        at = uint32(uint32(turn * threads) + tid)
        if at < uint32(KEYS * chunks):
            row, chunk = uint32(at // uint32(chunks)), uint32(at % uint32(chunks))
            key, to = uint32(first + row), uint32(base + place(row, chunk, head_dim))
            page = block_table[uint32(key // uint32(page_size))] if key < count else -1
            if page >= 0:
                slot, word = uint32(key % uint32(page_size)), uint32(chunk * uint32(4))
                source = page_word(page, head, slot, word, kv_heads, page_size, head_dim)
                copy_16(ks, to, k_pages, source, asynchronous)
                copy_16(vs, to, v_pages, source, asynchronous)
            else:
                shared_store_u32x4(ks, to, uint32(0), uint32(0), uint32(0), uint32(0))
                shared_store_u32x4(vs, to, uint32(0), uint32(0), uint32(0), uint32(0))
