"""The teaching pair: warp-specialised paged attention with a barrier bug, and the same kernel mended.

out = softmax(q K^T / sqrt(DIM)) V for one query head, one block: a producer warp brings pages of 32 tokens into shared
memory, four consumer warps take eight tokens of each page, the last consumer merges the four partial softmaxes.

The bug. `cuda.syncthreads()` stands inside both branches, and a consumer without tokens on the last page skips that
page, barriers included. A GPU counts arrivals, whatever line they come from: the skipping warp arrives at the barrier
before the merge while the others arrive at "the page is full", all five have arrived, and all go on. The skipping warp
is ahead of the others from here on. It merges while they still work on the last page, and leaves; a warp that has left
is not waited for, so nothing hangs and the launch ends as if all were well.

Why it fails every time, and not now and then:
- consumers own the tokens of a page in order, so when any is idle the last one is, and it is the last one that merges;
- what it then reads is defined: partials are published before the first page and after every page, so the early merge
  is the attention over the whole pages alone. Published once, at the end, it would read what an earlier launch left in
  shared memory, and after a launch on the same inputs that is the right answer;
- a consumer sleeps after its work and before it publishes, as a stand-in for the longer work of a real kernel, so the
  merge, a few hundred cycles after the barrier, cannot come too late to be too early.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32, int32

from kernels_numba.instructions.arithmetic import divide, exp2, fmax
from kernels_numba.instructions.barriers import barrier_arrive, barrier_sync
from kernels_numba.reduce import lanes_sum

DIM = 32  # a lane is a dimension
PAGE = 32  # tokens
CONSUMERS = 4  # warps
OWN = PAGE // CONSUMERS  # tokens of a page that a consumer owns
THREADS = 32 * (1 + CONSUMERS)
FULL, EMPTY, DONE = 1, 2, 3  # named barriers
EMPTY_TOP = np.float32(-np.inf)  # the largest score of no tokens
SCALE = np.float32(math.log2(math.e) / math.sqrt(DIM))
PAGE_SIZE = PAGE * DIM
PARTIAL_SIZE = CONSUMERS * DIM


def attention_spec(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q K^T / sqrt(DIM)) V in float64: q [DIM], k and v [tokens, DIM]."""
    scores = k.astype(np.float64) @ q.astype(np.float64) / math.sqrt(DIM)
    weights = np.exp(scores - scores.max())
    return weights @ v.astype(np.float64) / weights.sum()


def leaves_idle_warp(length: int) -> bool:
    """Whether a consumer has no token on the last page: the lengths for which the faulty kernel is wrong."""
    return 0 < length % PAGE <= PAGE - OWN


@cuda.jit(device=True)
def bring_page(k_pages, v_pages, page, tokens, lane, k_page, v_page):
    """The producer's work: the first `tokens` rows of a page of K and V into shared memory."""
    for token in range(tokens):
        k_page[token * DIM + lane] = k_pages[page, token, lane]
        v_page[token * DIM + lane] = v_pages[page, token, lane]


@cuda.jit(device=True)
def publish(consumer, lane, top, total, summed, tops, totals, sums):
    """A consumer's partial softmax, where the merge finds it."""
    if lane == 0:
        tops[consumer] = top
        totals[consumer] = total
    sums[consumer * DIM + lane] = summed


@cuda.jit(device=True)
def attend_tokens(query, k_page, v_page, first, last, lane, top, total, summed):
    """The consumer's work: tokens first to last - 1 of the page into its online softmax."""
    for token in range(first, last):
        score = float32(lanes_sum(float32(query * k_page[token * DIM + lane]), 32) * SCALE)
        new_top = fmax(top, score)
        shrink, weight = exp2(float32(top - new_top)), exp2(float32(score - new_top))
        total = float32(float32(total * shrink) + weight)
        summed = float32(float32(summed * shrink) + float32(weight * v_page[token * DIM + lane]))
        top = new_top
    for _ in range(4):  # a sleep may end early; four of 5 us do not all
        cuda.nanosleep(5000)
    return top, total, summed


@cuda.jit(device=True)
def merge(tops, totals, sums, lane, out):
    """All consumers' partials into the output, by one warp."""
    top = float32(EMPTY_TOP)
    for consumer in range(CONSUMERS):
        top = fmax(top, tops[consumer])
    total, summed = float32(0.0), float32(0.0)
    for consumer in range(CONSUMERS):
        weight = exp2(float32(tops[consumer] - top))
        total = float32(total + float32(weight * totals[consumer]))
        summed = float32(summed + float32(weight * sums[consumer * DIM + lane]))
    out[lane] = divide(summed, total)


@cuda.jit
def faulty_attention(q, k_pages, v_pages, block_table, length, out):
    """Wrong when `leaves_idle_warp(length)`, right for all other lengths. Grid 1, block THREADS.

    q float32 [DIM]; k_pages, v_pages float32 [pages, PAGE, DIM]; block_table int32; length int32 [1];
    out float32 [DIM].
    """
    k_page, v_page = cuda.shared.array(PAGE_SIZE, float32), cuda.shared.array(PAGE_SIZE, float32)
    tops, totals = cuda.shared.array(CONSUMERS, float32), cuda.shared.array(CONSUMERS, float32)
    sums = cuda.shared.array(PARTIAL_SIZE, float32)
    warp, lane = int32(cuda.threadIdx.x // 32), int32(cuda.threadIdx.x % 32)
    consumer, tokens = int32(warp - 1), int32(length[0])
    pages = int32((tokens + PAGE - 1) // PAGE)
    if warp == 0:
        for index in range(pages):
            bring_page(k_pages, v_pages, block_table[index], min(PAGE, tokens - index * PAGE), lane, k_page, v_page)
            cuda.syncthreads()  # the page is full
            cuda.syncthreads()  # the page is empty again
    else:
        top, total, summed = float32(EMPTY_TOP), float32(0.0), float32(0.0)
        publish(consumer, lane, top, total, summed, tops, totals, sums)
        for index in range(pages):
            first, last = consumer * OWN, min(consumer * OWN + OWN, tokens - index * PAGE)
            if first < last:  # the bug: whoever has nothing to do skips the barriers too
                cuda.syncthreads()  # the page is full
                top, total, summed = attend_tokens(q[lane], k_page, v_page, first, last, lane, top, total, summed)
                publish(consumer, lane, top, total, summed, tops, totals, sums)
                cuda.syncthreads()  # the page is empty again
    cuda.syncthreads()  # all partials are there
    if consumer == CONSUMERS - 1:
        merge(tops, totals, sums, lane, out)


@cuda.jit
def mended_attention(q, k_pages, v_pages, block_table, length, out):
    """The same with named barriers that every consumer meets on every page; right for all lengths from 1 on.

    Each barrier has one meaning and its own count: FULL (the producer arrives, consumers wait), EMPTY (consumers
    arrive, the producer waits, from the second page on), DONE (among consumers). Arguments as in `faulty_attention`.
    """
    k_page, v_page = cuda.shared.array(PAGE_SIZE, float32), cuda.shared.array(PAGE_SIZE, float32)
    tops, totals = cuda.shared.array(CONSUMERS, float32), cuda.shared.array(CONSUMERS, float32)
    sums = cuda.shared.array(PARTIAL_SIZE, float32)
    warp, lane = int32(cuda.threadIdx.x // 32), int32(cuda.threadIdx.x % 32)
    consumer, tokens = int32(warp - 1), int32(length[0])
    pages = int32((tokens + PAGE - 1) // PAGE)
    if warp == 0:
        for index in range(pages):
            if index > 0:
                barrier_sync(EMPTY, THREADS)
            bring_page(k_pages, v_pages, block_table[index], min(PAGE, tokens - index * PAGE), lane, k_page, v_page)
            barrier_arrive(FULL, THREADS)
    else:
        top, total, summed = float32(EMPTY_TOP), float32(0.0), float32(0.0)
        publish(consumer, lane, top, total, summed, tops, totals, sums)
        for index in range(pages):
            barrier_sync(FULL, THREADS)
            first, last = consumer * OWN, min(consumer * OWN + OWN, tokens - index * PAGE)
            if first < last:  # only the work is skipped
                top, total, summed = attend_tokens(q[lane], k_page, v_page, first, last, lane, top, total, summed)
                publish(consumer, lane, top, total, summed, tops, totals, sums)
            if index + 1 < pages:
                barrier_arrive(EMPTY, THREADS)
        barrier_sync(DONE, 32 * CONSUMERS)
        if consumer == CONSUMERS - 1:
            merge(tops, totals, sums, lane, out)
