"""Decode attention of one token over paged fp16 keys and values, split over the context.

out[h] = softmax(q[h] K^T / sqrt(head_dim)) V over the tokens 0 .. position, K and V of KV head h // (heads / kv_heads).

A block takes one KV head with up to eight of its query heads, and one stretch of the context, so K and V are read once
for the whole group; its warps take 16 tokens in turn. How the context is cut follows from the position on the device,
inside a grid that never changes. The last block of a KV head to finish merges all of them, always in the same order.
Bytes that must move: 4 * head_dim per token and KV head (K and V in fp16).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels_numba.attention_merge import is_last, merge_block, merge_split, weights_of
from kernels_numba.attention_tile import HEADS, NEVER, TOKENS, attend, load_query, load_tokens, share
from kernels_numba.errors import KernelError
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous

WARPS = 8
LEAST = 64  # tokens of a split: fewer cost more in the merge than they save
MOST_SPLITS = 128


@dataclass(frozen=True)
class AttentionShape:
    """How a decode attention is cut into blocks, and the workspace it needs.

    splits: blocks that share a KV head's context, at most; the position decides how many of them have work.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    splits: int

    def __post_init__(self) -> None:
        if self.head_dim not in (32, 64, 128):
            raise KernelError(f"attention with head_dim {self.head_dim}: expected 32, 64 or 128")
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise KernelError(
                f"attention with {self.heads} heads on {self.kv_heads} KV heads: heads must be a multiple of KV heads"
            )
        if self.page_size < TOKENS or self.page_size % TOKENS:
            raise KernelError(f"attention over pages of {self.page_size} tokens: expected a multiple of {TOKENS}")
        if not 1 <= self.splits <= MOST_SPLITS:
            raise KernelError(f"attention in {self.splits} splits: expected 1 to {MOST_SPLITS}")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def parts(self) -> int:
        """Blocks that share a KV head's query heads: eight heads each."""
        return -(-self.group // HEADS)

    @property
    def grid(self) -> tuple[int, int]:
        return self.kv_heads * self.parts, self.splits

    @property
    def rows(self) -> int:
        """Partials of one head and block in the workspace."""
        return self.grid[0] * self.splits * HEADS

    @property
    def workspace(self) -> int:
        """Elements of `partials`, float32."""
        return self.rows * (self.head_dim + 2)

    @property
    def tickets(self) -> int:
        """Elements of `tickets`, uint32, all 0 before the first launch."""
        return self.grid[0]


def plan_attention(
    heads: int, kv_heads: int, head_dim: int, page_size: int, max_context: int, multiprocessors: int
) -> AttentionShape:
    """One block for each multiprocessor, as far as `max_context` tokens give each of them enough to do."""
    whole = AttentionShape(heads, kv_heads, head_dim, page_size, 1)
    splits = min(multiprocessors // whole.grid[0], -(-max_context // LEAST), MOST_SPLITS)
    return AttentionShape(heads, kv_heads, head_dim, page_size, max(1, splits))


@cuda.jit(device=True, forceinline=True)
def stretch(length, splits):
    """Tokens of a split, and how many splits have work."""
    pages = uint32(uint32(length + uint32(TOKENS * splits - 1)) // uint32(TOKENS * splits))
    tokens = max(uint32(pages * uint32(TOKENS)), uint32(LEAST))
    return uint32(tokens), uint32(uint32(length + uint32(tokens - uint32(1))) // uint32(tokens))


@cuda.jit(device=True, forceinline=True)
def first_word(page, kv_head, token, kv_heads, page_size, half):
    """Where the row of a token starts, in words, in K or V."""
    row = uint32(uint32(page * uint32(kv_heads)) + kv_head)
    return uint32(uint32(uint32(row * uint32(page_size)) + uint32(token % uint32(page_size))) * uint32(half))


@functools.cache
def make_paged_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    splits: int,
    dependent: int = 0,
    capability: tuple[int, int] = (8, 0),
):
    """Decode attention; grid and workspace as AttentionShape of the same numbers says, block of 32 * WARPS threads.

    Arguments of the kernel: q float32 [heads * head_dim], rotated and not scaled; k_pages, v_pages uint32 (fp16 pairs)
    [pages, kv_heads, page_size, head_dim / 2]; block_table int32; position int32 [1]; partials float32 [workspace];
    tickets uint32 [tickets], 0 before and after; out float32 [heads * head_dim]. Slots and block-table cells past the
    position are never read. Source of the merge: FlashDecoding.
    """
    shape = AttentionShape(heads, kv_heads, head_dim, page_size, splits)
    group, parts, rows = shape.group, shape.parts, shape.rows
    wide = int(capability >= (8, 0))
    quarter, half, columns = head_dim // 4, head_dim // 2, head_dim // 32
    slots, sums_size, room = WARPS * HEADS, WARPS * HEADS * head_dim, weights_of(splits)
    weights_size = WARPS * room
    scale = math.log2(math.e) / math.sqrt(head_dim)

    @cuda.jit
    def paged_attention(q, k_pages, v_pages, block_table, position, partials, tickets, out):
        all_sums = cuda.shared.array(sums_size, uint32)
        all_tops = cuda.shared.array(slots, float32)
        all_totals = cuda.shared.array(slots, float32)
        factors = cuda.shared.array(HEADS, float32)
        weights = cuda.shared.array(weights_size, float32)
        flag = cuda.shared.array(1, uint32)
        if dependent:
            launch_dependents()
            wait_for_previous()
        tid, number, split = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        warp, lane = uint32(tid >> uint32(5)), uint32(tid & uint32(31))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        kv_head = uint32(number // uint32(parts))
        first_head = uint32(uint32(number % uint32(parts)) * uint32(HEADS))  # of the group
        here = min(uint32(HEADS), uint32(uint32(group) - first_head))  # query heads of this block
        first_head = uint32(first_head + uint32(kv_head * uint32(group)))
        length = uint32(uint32(position[0]) + uint32(1))
        tokens, used = stretch(length, splits)
        if split >= used:
            return
        begin = uint32(split * tokens)
        end = min(length, uint32(begin + tokens))
        step = uint32(begin + uint32(warp * uint32(TOKENS)))
        if step < end:
            query = cuda.local.array(quarter, uint32)
            keys = cuda.local.array(quarter, uint32)
            values = cuda.local.array(quarter, uint32)
            sums = cuda.local.array(half, float32)
            page = uint32(block_table[uint32(step // uint32(page_size))])
            base = first_word(page, kv_head, step, kv_heads, page_size, half)
            limit = min(uint32(TOKENS - 1), uint32(uint32(end - uint32(1)) - step))
            load_tokens(k_pages, v_pages, base, base, limit, lane, keys, values, head_dim, 0)
            head = uint32(first_head + min(g, uint32(here - uint32(1))))  # rows past the last head repeat it
            factor = float32(load_query(q, head, t, sums, query, head_dim) * float32(scale))
            if warp == uint32(0) and t == uint32(0):
                factors[g] = factor
            for k in range(half):
                sums[k] = float32(0.0)
            top, total = float32(NEVER), float32(0.0)
            while step < end:
                following = uint32(step + uint32(WARPS * TOKENS))
                if following < end:  # looked up early, so that the loads after this step need not wait for it
                    page = uint32(block_table[uint32(following // uint32(page_size))])
                top, total = attend(query, keys, values, sums, factor, top, total, step, end, t, head_dim, wide)
                step = following
                if step < end:
                    base = first_word(page, kv_head, step, kv_heads, page_size, half)
                    limit = min(uint32(TOKENS - 1), uint32(uint32(end - uint32(1)) - step))
                    load_tokens(k_pages, v_pages, base, base, limit, lane, keys, values, head_dim, 0)
            share(sums, top, total, warp, lane, all_sums, all_tops, all_totals, head_dim)
        cuda.syncthreads()
        if warp >= here and used == uint32(1):
            return
        merged = cuda.local.array(columns, float32)
        active = min(uint32(WARPS), uint32(uint32(uint32(end - begin) + uint32(TOKENS - 1)) // uint32(TOKENS)))
        row = uint32(number * uint32(splits * HEADS))
        merge_block(
            all_tops, all_totals, all_sums, active, factors, here, warp, WARPS, lane, merged, partials,
            uint32(row + uint32(split * uint32(HEADS))), rows, used, out, first_head, head_dim,
        )  # fmt: skip
        if used > uint32(1) and is_last(tickets, number, used, flag, tid):
            loaded = cuda.local.array(half, float32)
            merge_split(
                partials, row, rows, used, factors, here, warp, WARPS, lane, weights, room, merged, loaded, out,
                first_head, head_dim,
            )  # fmt: skip

    return paged_attention
