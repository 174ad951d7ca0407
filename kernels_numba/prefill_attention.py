"""Causal attention of a chunk of tokens over paged keys and values, on tensor cores.

Spec: `softmax(q @ k.T / sqrt(head_dim), keys after the query masked) @ v`, query head h with KV head
h // (heads / kv_heads). A block takes 16 queries a warp of one head and walks over the keys, KEYS at a time, with the
online softmax: a running maximum, sum and output per query, in float32.

fp16 holds keys and values exactly, queries and probabilities not, so each of these is the sum of `terms` fp16 numbers:
one costs 2^-11 of relative error, two leave float32's own. A query is brought into [1, 2) by a power of two first,
so that scores of any size are finite.

A lane holds rows g and g + 8 of its warp's 16 queries (g = lane // 4), and of each 8 columns two (2t and 2t + 1, with
t = lane % 4): of the scores s[4n ..] = row g's two keys of the n-th eight, row g + 8's; of the output the same, in o.
What an mma leaves is laid out as the next one takes it, so the scores become probabilities in place.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, uint32

from kernels_numba.activation import FP16, block_factor, block_scale
from kernels_numba.attention_tile import NEVER, quad_max, quad_sum
from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import divide, exp2, fabs, floats_half2, fmax, half2_floats
from kernels_numba.instructions.asynchronous import copy_async_commit, copy_async_wait_0
from kernels_numba.instructions.tensor import ldmatrix_x4, ldmatrix_x4_transposed
from kernels_numba.staged_keys import KEYS, load_keys, place
from kernels_numba.tiles import mma_k16

QUERIES = 16  # of a warp


@cuda.jit(device=True, forceinline=True)
def two_terms(x, y):
    """Two floats as a half2, and what the rounding lost of them as another."""
    first = floats_half2(x, y)
    a, b = half2_floats(first)
    return first, floats_half2(float32(x - a), float32(y - b))


@cuda.jit(device=True, forceinline=True)
def query_absmax(qkv, at, t, head_dim):
    """The largest absolute value of one query."""
    absmax = float32(0.0)
    for i in range(head_dim // 8):
        x = uint32(at + uint32(uint32(8 * i) + uint32(t * uint32(2))))
        absmax = fmax(absmax, fmax(fabs(qkv[x]), fabs(qkv[uint32(x + uint32(1))])))
    return quad_max(absmax)


@cuda.jit(device=True, forceinline=True)
def load_query(q, row, qkv, at, t, head_dim, terms):
    """One of a lane's two queries (row 0 or 1) as A fragments, q[term][16 columns][4]; gives their scale."""
    absmax = query_absmax(qkv, at, t, head_dim)
    factor = block_factor(absmax, FP16)
    for i in range(head_dim // 8):
        x = uint32(at + uint32(uint32(8 * i) + uint32(t * uint32(2))))
        first, rest = two_terms(float32(qkv[x] * factor), float32(qkv[uint32(x + uint32(1))] * factor))
        q[2 * i + row] = first
        if terms == 2:
            q[head_dim // 4 + 2 * i + row] = rest
    return block_scale(absmax, FP16)


@cuda.jit(device=True, forceinline=True)
def multiply_into(c, at, a, e, b0, b1, whole):
    """c[at .. at + 3] += fragment a[e .. e + 3] @ (b0, b1)."""
    c[at], c[at + 1], c[at + 2], c[at + 3] = mma_k16(
        a[e], a[e + 1], a[e + 2], a[e + 3], b0, b1, c[at], c[at + 1], c[at + 2], c[at + 3], whole
    )


@cuda.jit(device=True, forceinline=True)
def score(s, q, ks, base, lane, head_dim, terms, whole):
    """s = q @ k.T of a stage's keys, not scaled."""
    # ldmatrix brings, of 16 keys and 16 dimensions, (keys, dims) (low, low), (low, high), (high, low), (high, high)
    key = uint32(uint32(uint32(lane >> uint32(4)) * uint32(8)) + uint32(lane & uint32(7)))
    dims = uint32(uint32(lane >> uint32(3)) & uint32(1))
    for i in range(KEYS // 2):
        s[i] = float32(0.0)
    for i in range(head_dim // 16):
        for n in range(KEYS // 16):
            here = place(uint32(uint32(16 * n) + key), uint32(uint32(2 * i) + dims), head_dim)
            b0, b1, b2, b3 = ldmatrix_x4(ks, uint32(base + here))
            for term in range(terms):
                multiply_into(s, 8 * n, q, head_dim // 4 * term + 4 * i, b0, b1, whole)
                multiply_into(s, 8 * n + 4, q, head_dim // 4 * term + 4 * i, b2, b3, whole)


@cuda.jit(device=True, forceinline=True)
def mask(s, row, scale, first_key, position, t):
    """Scales one row of scores and takes out the keys after its query; gives the largest."""
    top = float32(NEVER)
    for n in range(KEYS // 8):
        for side in range(2):
            key = uint32(first_key + uint32(uint32(8 * n + side) + uint32(t * uint32(2))))
            x = float32(s[4 * n + 2 * row + side] * scale)
            x = x if key <= position else float32(NEVER)
            s[4 * n + 2 * row + side] = x
            top = fmax(top, x)
    return quad_max(top)


@cuda.jit(device=True, forceinline=True)
def weigh(s, o, row, top, new_top, total, head_dim):
    """Turns one row of scores into probabilities, and its output and sum so far to the new maximum; gives the sum."""
    shrink = exp2(float32(top - new_top))
    total = float32(total * shrink)
    for i in range(head_dim // 8):
        o[4 * i + 2 * row] = float32(o[4 * i + 2 * row] * shrink)
        o[4 * i + 2 * row + 1] = float32(o[4 * i + 2 * row + 1] * shrink)
    for n in range(KEYS // 8):
        a = exp2(float32(s[4 * n + 2 * row] - new_top))
        b = exp2(float32(s[4 * n + 2 * row + 1] - new_top))
        s[4 * n + 2 * row], s[4 * n + 2 * row + 1] = a, b
        total = float32(total + float32(a + b))
    return total


@cuda.jit(device=True, forceinline=True)
def add_values(o, p, s, vs, base, lane, head_dim, terms, whole):
    """o += probabilities @ v of a stage's keys; p: room for 16 keys' fragments, [term][4]."""
    # as in `score`, (keys, dims) (low, low), (high, low), (low, high), (high, high), each transposed
    key = uint32(uint32(uint32(uint32(lane >> uint32(3)) & uint32(1)) * uint32(8)) + uint32(lane & uint32(7)))
    dims = uint32(lane >> uint32(4))
    for n in range(KEYS // 16):
        for i in range(4):
            first, rest = two_terms(s[8 * n + 2 * i], s[8 * n + 2 * i + 1])
            p[i] = first
            if terms == 2:
                p[i + 4] = rest
        for i in range(head_dim // 16):
            here = place(uint32(uint32(16 * n) + key), uint32(uint32(2 * i) + dims), head_dim)
            b0, b1, b2, b3 = ldmatrix_x4_transposed(vs, uint32(base + here))
            for term in range(terms):
                multiply_into(o, 8 * i, p, 4 * term, b0, b1, whole)
                multiply_into(o, 8 * i + 4, p, 4 * term, b2, b3, whole)


@cuda.jit(device=True, forceinline=True)
def store_output(o, row, total, out, at, t, head_dim):
    """Writes one of a lane's rows, divided by its sum."""
    inverse = divide(float32(1.0), total)
    for i in range(head_dim // 8):
        to = uint32(at + uint32(uint32(8 * i) + uint32(t * uint32(2))))
        out[to] = float32(o[4 * i + 2 * row] * inverse)
        out[uint32(to + uint32(1))] = float32(o[4 * i + 2 * row + 1] * inverse)


def attention_grid(heads: int, tokens: int, warps: int) -> tuple[int, int]:
    """Blocks along heads and along queries."""
    return heads, -(-tokens // (QUERIES * warps))


@functools.cache
def make_prefill_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    warps: int = 4,
    terms: int = 2,
    capability: tuple[int, int] = (9, 0),
):
    """Attention of T tokens at the positions start .. start + T - 1, whose keys and values are in the pages already.

    Grid attention_grid(heads, T, warps), block [32 * warps]. Arguments of the kernel: qkv float32
    [T * (heads + 2 kv_heads) * head_dim] (q rotated), k_pages and v_pages uint32 (words of two fp16), block_table
    int32, start, tokens (T), out float32 [T * heads * head_dim]. terms: fp16 numbers a query or probability is made of.
    """
    if head_dim not in (32, 64, 128) or heads % kv_heads or terms not in (1, 2) or not 1 <= warps <= 8:
        raise KernelError(
            f"attention of {heads} heads of {head_dim} over {kv_heads}, {terms} terms, {warps} warps: head_dim must be "
            "32, 64 or 128, the heads a multiple of the KV heads, terms 1 or 2, warps 1 to 8"
        )
    width, group, threads = (heads + 2 * kv_heads) * head_dim, heads // kv_heads, 32 * warps
    stage_words = KEYS * head_dim // 2
    shared_words, q_words, p_words = 2 * stage_words, head_dim // 4 * terms, 4 * terms
    s_floats, o_floats = KEYS // 2, head_dim // 2
    per_score = math.log2(math.e) / math.sqrt(head_dim)  # the softmax is one of powers of two
    asynchronous = whole = int(capability >= (8, 0))

    @cuda.jit
    def prefill_attention(qkv, k_pages, v_pages, block_table, start, tokens, out):
        ks = cuda.shared.array(shared_words, uint32, alignment=16)
        vs = cuda.shared.array(shared_words, uint32, alignment=16)
        q = cuda.local.array(q_words, uint32)
        s = cuda.local.array(s_floats, float32)
        p = cuda.local.array(p_words, uint32)
        o = cuda.local.array(o_floats, float32)
        tid, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        kv_head, column = uint32(head // uint32(group)), uint32(head * uint32(head_dim))
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        first, last = uint32(uint32(cuda.blockIdx.y) * uint32(QUERIES * warps)), uint32(tokens - 1)
        query = uint32(first + uint32(warp * uint32(QUERIES)))  # the warp's first
        token0, token1 = uint32(query + g), uint32(uint32(query + g) + uint32(8))
        position0, position1 = uint32(uint32(start) + token0), uint32(uint32(start) + token1)
        scale0 = load_query(q, 0, qkv, uint32(uint32(min(token0, last) * uint32(width)) + column), t, head_dim, terms)
        scale1 = load_query(q, 1, qkv, uint32(uint32(min(token1, last) * uint32(width)) + column), t, head_dim, terms)
        scale0, scale1 = float32(scale0 * float32(per_score)), float32(scale1 * float32(per_score))
        for i in range(o_floats):
            o[i] = float32(0.0)
        top0, top1, total0, total1 = float32(NEVER), float32(NEVER), float32(0.0), float32(0.0)
        # how many keys the block's and the warp's last query may see
        count = uint32(uint32(uint32(start) + min(uint32(first + uint32(QUERIES * warps - 1)), last)) + uint32(1))
        seen = uint32(uint32(uint32(start) + min(uint32(query + uint32(QUERIES - 1)), last)) + uint32(1))
        if query > last:
            seen = uint32(0)
        stages = uint32(uint32(count + uint32(KEYS - 1)) // uint32(KEYS))
        for turn in range(stages + uint32(1)):
            # stage `turn` is on its way while stage `turn - 1` is computed
            if asynchronous:
                copy_async_wait_0()
            cuda.syncthreads()
            if uint32(turn) < stages:
                base, first_key = uint32(uint32(uint32(turn) & uint32(1)) * uint32(stage_words)), uint32(turn * KEYS)
                load_keys(
                    ks, vs, base, k_pages, v_pages, block_table, first_key, count, kv_head, tid, threads, kv_heads,
                    page_size, head_dim, asynchronous,
                )  # fmt: skip
                if asynchronous:
                    copy_async_commit()
            stage = uint32(uint32(turn) - uint32(1))
            first_key = uint32(stage * uint32(KEYS))
            if uint32(turn) > uint32(0) and first_key < seen:
                base = uint32(uint32(stage & uint32(1)) * uint32(stage_words))
                score(s, q, ks, base, lane, head_dim, terms, whole)
                new0 = fmax(top0, mask(s, 0, scale0, first_key, position0, t))
                new1 = fmax(top1, mask(s, 1, scale1, first_key, position1, t))
                total0 = weigh(s, o, 0, top0, new0, total0, head_dim)
                total1 = weigh(s, o, 1, top1, new1, total1, head_dim)
                top0, top1 = new0, new1
                add_values(o, p, s, vs, base, lane, head_dim, terms, whole)
        total0, total1 = quad_sum(total0), quad_sum(total1)
        if token0 <= last:
            store_output(o, 0, total0, out, uint32(uint32(token0 * uint32(heads * head_dim)) + column), t, head_dim)
        if token1 <= last:
            store_output(o, 1, total1, out, uint32(uint32(token1 * uint32(heads * head_dim)) + column), t, head_dim)

    return prefill_attention
