"""Warp-specialised decode attention: one producer warp keeps a ring of KV tiles filled, four consumer warps empty it.

Same arguments, workspace and results as `paged_attention` (which see for the split and the merge). There, a warp waits
for its own loads; here the loads of the next tiles are always under way, and cost the consumers no registers.

A tile is 16 tokens of K and of V. Tile n goes through stage n % STAGES, and each stage belongs to one consumer. Else
a consumer could wait for a filling after the next and take the next for it: a parity tells only neighbouring phases
apart, and a named barrier none. "Full" is announced by the producer, or by the bytes themselves, "empty" by the
consumer as soon as it holds the tile in registers, so the next one is on its way while it computes:
- compute capability 9.0: bulk copies by the copy engine, full and empty as mbarriers, waited for by parity: the k-th
  time around the ring waits for the phase of parity k % 2;
- 8.0: cp.async by the producer's lanes, one tile ahead of what it announces; 7.5: plain loads and stores. Full and
  empty are named barriers of 64 threads: the producer's warp and the consumer's.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, int32, uint32, uint64

from kernels_numba.attention_merge import is_last, merge_block, merge_split, weights_of
from kernels_numba.attention_tile import HEADS, NEVER, TOKENS, attend, load_query, load_tokens, share
from kernels_numba.instructions.asynchronous import (
    copy_async_commit,
    copy_async_wait_0,
    copy_async_wait_1,
    copy_bulk,
    fence_async,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from kernels_numba.instructions.barriers import barrier_arrive, barrier_sync, launch_dependents, wait_for_previous
from kernels_numba.paged_attention import AttentionShape, first_word, stretch
from kernels_numba.reduce import ALL_LANES
from kernels_numba.tiles import copy_16

CONSUMERS = 4
STAGES = CONSUMERS
THREADS = 32 * (CONSUMERS + 1)
PAIR = 64  # threads of a full or empty barrier: two warps
FULL, EMPTY, DONE = 1, 1 + STAGES, 15  # named barriers: one of each kind for a stage, one among the consumers


@cuda.jit(device=True, forceinline=True)
def upcoming_pages(block_table, begin, end, tile, lane, page_size):
    """In lane i the page of the i-th tile from here, so that the ring never waits for the block table."""
    token = uint32(begin + uint32(uint32(tile + lane) * uint32(TOKENS)))
    return block_table[uint32(min(token, uint32(end - uint32(1))) // uint32(page_size))]


@cuda.jit(device=True, forceinline=True)
def tokens_of(begin, end, tile):
    """Tokens that a tile really has, 1 to 16."""
    return min(uint32(TOKENS), uint32(uint32(end - begin) - uint32(tile * uint32(TOKENS))))


@cuda.jit(device=True, forceinline=True)
def produce_bulk(
    k_pages, v_pages, block_table, ring, barriers, kv_head, begin, end, tiles, lane, kv_heads, page_size, half
):
    """The producer's loop with the copy engine: only the tokens that are there are copied."""
    tile, ahead = uint32(0), int32(0)
    while tile < tiles:
        if uint32(tile & uint32(31)) == uint32(0):
            ahead = upcoming_pages(block_table, begin, end, tile, lane, page_size)
        page = uint32(cuda.shfl_sync(ALL_LANES, ahead, uint32(tile & uint32(31))))
        stage, turn = uint32(tile % uint32(STAGES)), uint32(tile // uint32(STAGES))
        if lane == uint32(0):
            if turn > uint32(0):
                mbarrier_wait(barriers, uint32(stage + uint32(STAGES)), uint32(uint32(turn - uint32(1)) & uint32(1)))
            source = first_word(page, kv_head, uint32(begin + uint32(tile * uint32(TOKENS))), kv_heads, page_size, half)
            target = uint32(stage * uint32(2 * TOKENS * half))
            nbytes = uint32(tokens_of(begin, end, tile) * uint32(4 * half))
            mbarrier_arrive_expect(barriers, stage, uint32(nbytes * uint32(2)))
            copy_bulk(ring, target, k_pages, source, nbytes, barriers, stage)
            copy_bulk(ring, uint32(target + uint32(TOKENS * half)), v_pages, source, nbytes, barriers, stage)
        cuda.syncwarp()
        tile = uint32(tile + uint32(1))


@cuda.jit(device=True, forceinline=True)
def copy_tile(k_pages, v_pages, ring, source, target, tokens, lane, half, asynchronous):
    """16 bytes a lane and step of one tile's K and V, rows that are there alone."""
    row_words = half // 4  # pieces of a row
    for k in range(TOKENS * row_words // 32):
        piece = uint32(lane + uint32(32 * k))
        if uint32(piece // uint32(row_words)) < tokens:
            at = uint32(piece * uint32(4))
            copy_16(ring, uint32(target + at), k_pages, uint32(source + at), asynchronous)
            copy_16(
                ring, uint32(uint32(target + uint32(TOKENS * half)) + at), v_pages, uint32(source + at), asynchronous
            )


@cuda.jit(device=True, forceinline=True)
def produce_pieces(
    k_pages,
    v_pages,
    block_table,
    ring,
    kv_head,
    begin,
    end,
    tiles,
    lane,
    kv_heads,
    page_size,
    half,
    asynchronous,
):
    """The producer's loop without a copy engine; with cp.async a tile is announced when the next is under way."""
    tile, ahead = uint32(0), int32(0)
    while tile < tiles:
        if uint32(tile & uint32(31)) == uint32(0):
            ahead = upcoming_pages(block_table, begin, end, tile, lane, page_size)
        page = uint32(cuda.shfl_sync(ALL_LANES, ahead, uint32(tile & uint32(31))))
        stage = uint32(tile % uint32(STAGES))
        if tile >= uint32(STAGES):
            barrier_sync(uint32(stage + uint32(EMPTY)), uint32(PAIR))
        source = first_word(page, kv_head, uint32(begin + uint32(tile * uint32(TOKENS))), kv_heads, page_size, half)
        target = uint32(stage * uint32(2 * TOKENS * half))
        copy_tile(k_pages, v_pages, ring, source, target, tokens_of(begin, end, tile), lane, half, asynchronous)
        if asynchronous:
            copy_async_commit()
            if tile > uint32(0):
                copy_async_wait_1()
                barrier_arrive(uint32(uint32(uint32(tile - uint32(1)) % uint32(STAGES)) + uint32(FULL)), uint32(PAIR))
        else:
            barrier_arrive(uint32(stage + uint32(FULL)), uint32(PAIR))
        tile = uint32(tile + uint32(1))
    if asynchronous:
        copy_async_wait_0()
        barrier_arrive(uint32(uint32(uint32(tiles - uint32(1)) % uint32(STAGES)) + uint32(FULL)), uint32(PAIR))


@functools.cache
def make_ring_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    splits: int,
    dependent: int = 0,
    capability: tuple[int, int] = (9, 0),
):
    """Warp-specialised decode attention, block of THREADS; grid, workspace and arguments as `make_paged_attention`'s.

    The producer works by bulk copies from `capability` (9, 0) on, by cp.async from (8, 0) on, by plain loads below.
    """
    shape = AttentionShape(heads, kv_heads, head_dim, page_size, splits)
    group, parts, rows = shape.group, shape.parts, shape.rows
    bulk, wide = int(capability >= (9, 0)), int(capability >= (8, 0))
    quarter, half, columns = head_dim // 4, head_dim // 2, head_dim // 32
    slots, ring_words, mbarriers = CONSUMERS * HEADS, STAGES * TOKENS * head_dim, 2 * STAGES
    room = weights_of(splits)
    weights_size = CONSUMERS * room
    scale = math.log2(math.e) / math.sqrt(head_dim)

    @cuda.jit
    def ring_attention(q, k_pages, v_pages, block_table, position, partials, tickets, out):
        ring = cuda.shared.array(ring_words, uint32, alignment=128)
        barriers = cuda.shared.array(mbarriers, uint64)
        all_tops = cuda.shared.array(slots, float32)
        all_totals = cuda.shared.array(slots, float32)
        factors = cuda.shared.array(HEADS, float32)
        weights = cuda.shared.array(weights_size, float32)
        flag = cuda.shared.array(1, uint32)
        tid, number, split = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        warp, lane = uint32(tid >> uint32(5)), uint32(tid & uint32(31))
        if dependent:
            launch_dependents()
            wait_for_previous()
        kv_head = uint32(number // uint32(parts))
        head = uint32(uint32(number % uint32(parts)) * uint32(HEADS))  # the block's first, of the group
        here = min(uint32(HEADS), uint32(uint32(group) - head))
        head = uint32(head + uint32(kv_head * uint32(group)))
        tokens, used = stretch(uint32(uint32(position[0]) + uint32(1)), splits)
        if split >= used:
            return
        begin = uint32(split * tokens)
        end = min(uint32(uint32(position[0]) + uint32(1)), uint32(begin + tokens))
        tiles = uint32(uint32(uint32(end - begin) + uint32(TOKENS - 1)) // uint32(TOKENS))
        if bulk:
            if tid == uint32(0):
                for k in range(mbarriers):
                    mbarrier_init(barriers, uint32(k), uint32(1))
                fence_async()
            cuda.syncthreads()
        row = uint32(number * uint32(splits * HEADS))
        merged = cuda.local.array(columns, float32)
        if warp == uint32(CONSUMERS):
            if bulk:
                produce_bulk(
                    k_pages, v_pages, block_table, ring, barriers, kv_head, begin, end, tiles, lane, kv_heads,
                    page_size, half,
                )  # fmt: skip
            else:
                produce_pieces(
                    k_pages, v_pages, block_table, ring, kv_head, begin, end, tiles, lane, kv_heads, page_size, half,
                    wide,
                )  # fmt: skip
        else:
            g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
            query = cuda.local.array(quarter, uint32)
            keys = cuda.local.array(quarter, uint32)
            values = cuda.local.array(quarter, uint32)
            sums = cuda.local.array(half, float32)
            factor = load_query(q, uint32(head + min(g, uint32(here - uint32(1)))), t, sums, query, head_dim)
            factor = float32(factor * float32(scale))
            if warp == uint32(0) and t == uint32(0):
                factors[g] = factor
            for k in range(half):
                sums[k] = float32(0.0)
            top, total = float32(NEVER), float32(0.0)
            tile, stage = warp, warp
            while tile < tiles:
                if bulk:
                    mbarrier_wait(barriers, stage, uint32(uint32(tile // uint32(STAGES)) & uint32(1)))
                else:
                    barrier_sync(uint32(stage + uint32(FULL)), uint32(PAIR))
                k_base = uint32(stage * uint32(2 * TOKENS * half))
                v_base = uint32(k_base + uint32(TOKENS * half))
                limit = uint32(tokens_of(begin, end, tile) - uint32(1))
                load_tokens(ring, ring, k_base, v_base, limit, lane, keys, values, head_dim, 1)
                if uint32(tile + uint32(STAGES)) < tiles:  # the stage will be filled again: say that it may
                    if bulk:
                        if lane == uint32(0):
                            mbarrier_arrive(barriers, uint32(stage + uint32(STAGES)))
                    else:
                        barrier_arrive(uint32(stage + uint32(EMPTY)), uint32(PAIR))
                step = uint32(begin + uint32(tile * uint32(TOKENS)))
                top, total = attend(query, keys, values, sums, factor, top, total, step, end, t, head_dim, wide)
                tile = uint32(tile + uint32(CONSUMERS))
            barrier_sync(DONE, 32 * CONSUMERS)  # nobody reads the ring any more: it holds the sums from here on
            if warp < tiles:
                share(sums, top, total, warp, lane, ring, all_tops, all_totals, head_dim)
            barrier_sync(DONE, 32 * CONSUMERS)
            merge_block(
                all_tops, all_totals, ring, min(tiles, uint32(CONSUMERS)), factors, here, warp, CONSUMERS, lane, merged,
                partials, uint32(row + uint32(split * uint32(HEADS))), rows, used, out, head, head_dim,
            )  # fmt: skip
        if used > uint32(1) and is_last(tickets, number, used, flag, tid) and warp < uint32(CONSUMERS):
            loaded = cuda.local.array(half, float32)
            merge_split(
                partials, row, rows, used, factors, here, warp, CONSUMERS, lane, weights, room, merged, loaded, out,
                head, head_dim,
            )  # fmt: skip

    return ring_attention
