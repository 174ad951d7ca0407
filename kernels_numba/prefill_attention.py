"""Causal attention of a chunk of tokens over paged keys and values, on tensor cores.

Spec: `softmax(q @ k.T / sqrt(head_dim), keys after the query masked) @ v`, query head h with KV head
h // (heads / kv_heads). A block takes 16 queries a warp of one head and walks over the keys, KEYS at a time, with the
online softmax: a running maximum, sum and output per query, in float32.

fp16 holds keys and values exactly, queries and probabilities not, so each of these is the sum of TERMS fp16 numbers: one
term costs 2^-11 of relative error, two leave float32's own. A query is brought into [1, 2) by a power of two first, so
that no score is too large. Slots after the last key are zeros in shared memory, whatever the page holds.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, uint32

from kernels_numba.activation import FP16, block_factor, block_scale
from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import divide, exp2, fabs, floats_half2, fmax, half2_floats
from kernels_numba.instructions.asynchronous import copy_async_commit, copy_async_wait_0
from kernels_numba.instructions.memory import shared_store_u32x4
from kernels_numba.instructions.tensor import ldmatrix_x4, ldmatrix_x4_transposed
from kernels_numba.paged_kv import page_word
from kernels_numba.reduce import ALL_LANES
from kernels_numba.tiles import copy_16, mma_k16

KEYS = 32  # of a stage of shared memory
QUERIES = 16  # of a warp
NEVER = float("-inf")


@cuda.jit(device=True)
def quad_max(value):
    """The largest value of the four lanes that share a row of a fragment."""
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 2))


@cuda.jit(device=True)
def quad_sum(value):
    """The sum over the four lanes that share a row of a fragment."""
    value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 2))


@cuda.jit(device=True)
def split_half2(a, b):
    """Two floats as two half2: rounded, and what rounding left, rounded."""
    first = floats_half2(a, b)
    c, d = half2_floats(first)
    return first, floats_half2(float32(a - c), float32(b - d))


@cuda.jit(device=True)
def place(row, chunk, head_dim):
    """The word of 16-byte chunk `chunk` of a row in shared memory: eight rows' equal chunks lie in different banks."""
    if head_dim == 32:
        chunk = uint32(chunk ^ uint32(uint32(row >> uint32(1)) & uint32(3)))
    else:
        chunk = uint32(chunk ^ uint32(row & uint32(7)))
    return uint32(uint32(row * uint32(head_dim // 2)) + uint32(chunk * uint32(4)))


@cuda.jit(device=True)
def load_keys(
    ks,
    vs,
    base,
    k_pages,
    v_pages,
    block_table,
    first,
    count,
    head,
    tid,
    threads,
    kv_heads,
    page_size,
    head_dim,
    asynchronous,
):
    """Starts to bring keys first .. first + KEYS - 1 of one KV head, and their values, to shared memory from `base`."""
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


@cuda.jit(device=True)
def query_absmax(qkv, at, t, head_dim):
    """The largest absolute value of one query, whose four lanes look at two neighbours in eight each."""
    absmax = float32(0.0)
    for i in range(head_dim // 8):
        x = uint32(at + uint32(uint32(8 * i) + uint32(t * uint32(2))))
        absmax = fmax(absmax, fmax(fabs(qkv[x]), fabs(qkv[uint32(x + uint32(1))])))
    return quad_max(absmax)


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
    """Attention of T tokens at the positions start .. start + T - 1, whose own keys and values are in the pages already.

    Grid attention_grid(heads, T, warps), block [32 * warps]. Arguments of the kernel: qkv float32
    [T * (heads + 2 kv_heads) * head_dim] (q rotated), k_pages and v_pages uint32 (words of two fp16), block_table int32,
    start, tokens (T), out float32 [T * heads * head_dim]. terms: fp16 numbers that stand for a query or probability.
    """
    if head_dim not in (32, 64, 128) or heads % kv_heads or terms not in (1, 2) or not 1 <= warps <= 8:
        raise KernelError(
            f"attention of {heads} heads of {head_dim} over {kv_heads}, {terms} terms, {warps} warps: head_dim must be 32, "
            "64 or 128, the heads a multiple of the KV heads, terms 1 or 2, warps 1 to 8"
        )
    width, steps, half = (heads + 2 * kv_heads) * head_dim, head_dim // 16, head_dim // 2
    group, threads, stage_words = heads // kv_heads, 32 * warps, KEYS * half
    shared_words = 2 * stage_words
    q_words, s_floats, o_floats, q_low = 4 * steps * terms, KEYS // 2, head_dim // 2, 4 * steps * (terms - 1)
    p_words, key_steps = 4 * terms, KEYS // 16
    per_score = math.log2(math.e) / math.sqrt(head_dim)  # softmax in powers of two
    asynchronous = int(capability >= (8, 0))

    @cuda.jit
    def prefill_attention(qkv, k_pages, v_pages, block_table, start, tokens, out):
        ks = cuda.shared.array(shared_words, uint32, alignment=16)
        vs = cuda.shared.array(shared_words, uint32, alignment=16)
        q = cuda.local.array(q_words, uint32)
        s = cuda.local.array(s_floats, float32)
        p = cuda.local.array(p_words, uint32)
        o = cuda.local.array(o_floats, float32)
        tid, head = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        kv_head = uint32(head // uint32(group))
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        block_query = uint32(uint32(cuda.blockIdx.y) * uint32(QUERIES * warps))
        query = uint32(block_query + uint32(warp * uint32(QUERIES)))  # of the warp, the first
        last = uint32(tokens - 1)
        line0 = uint32(uint32(min(uint32(query + g), last) * uint32(width)) + uint32(head * uint32(head_dim)))
        line1 = uint32(
            uint32(min(uint32(uint32(query + g) + uint32(8)), last) * uint32(width)) + uint32(head * uint32(head_dim))
        )
        absmax0, absmax1 = query_absmax(qkv, line0, t, head_dim), query_absmax(qkv, line1, t, head_dim)
        factor0, factor1 = block_factor(absmax0, FP16), block_factor(absmax1, FP16)
        scale0 = float32(block_scale(absmax0, FP16) * float32(per_score))
        scale1 = float32(block_scale(absmax1, FP16) * float32(per_score))
        for i in range(2 * steps):
            x = uint32(uint32(8 * i) + uint32(t * uint32(2)))
            a, b = qkv[uint32(line0 + x)], qkv[uint32(uint32(line0 + x) + uint32(1))]
            c, d = qkv[uint32(line1 + x)], qkv[uint32(uint32(line1 + x) + uint32(1))]
            first, rest = split_half2(float32(a * factor0), float32(b * factor0))
            second, other = split_half2(float32(c * factor1), float32(d * factor1))
            q[2 * i], q[2 * i + 1] = first, second
            if terms == 2:
                q[q_low + 2 * i], q[q_low + 2 * i + 1] = rest, other
        for i in range(o_floats):
            o[i] = float32(0.0)
        top0, top1 = float32(NEVER), float32(NEVER)
        sum0, sum1 = float32(0.0), float32(0.0)
        position0 = uint32(uint32(uint32(start) + query) + g)
        position1 = uint32(position0 + uint32(8))
        # keys that the block's last query, and the warp's, may see
        count = uint32(uint32(uint32(start) + min(uint32(block_query + uint32(QUERIES * warps - 1)), last)) + uint32(1))
        seen = uint32(uint32(uint32(start) + min(uint32(query + uint32(QUERIES - 1)), last)) + uint32(1))
        if query > last:
            seen = uint32(0)
        stages = uint32(uint32(count + uint32(KEYS - 1)) // uint32(KEYS))
        load_keys(
            ks,
            vs,
            uint32(0),
            k_pages,
            v_pages,
            block_table,
            uint32(0),
            count,
            kv_head,
            tid,
            threads,
            kv_heads,
            page_size,
            head_dim,
            asynchronous,
        )
        if asynchronous:
            copy_async_commit()
        for stage in range(stages):
            first_key = uint32(uint32(stage) * uint32(KEYS))
            base = uint32(uint32(uint32(stage) & uint32(1)) * uint32(stage_words))
            if asynchronous:
                copy_async_wait_0()
            cuda.syncthreads()
            if uint32(stage + 1) < stages:
                other_base = uint32(uint32(stage_words) - base)
                next_key = uint32(first_key + uint32(KEYS))
                load_keys(
                    ks,
                    vs,
                    other_base,
                    k_pages,
                    v_pages,
                    block_table,
                    next_key,
                    count,
                    kv_head,
                    tid,
                    threads,
                    kv_heads,
                    page_size,
                    head_dim,
                    asynchronous,
                )
                if asynchronous:
                    copy_async_commit()
            if first_key < seen:
                # scores: keys 8n + 2t, 8n + 2t + 1 of queries g and g + 8 in s[4n .. 4n + 3]
                for i in range(s_floats):
                    s[i] = float32(0.0)
                for i in range(steps):
                    for n in range(key_steps):
                        # matrices: (keys, dims) (low, low), (low, high), (high, low), (high, high)
                        row = uint32(
                            uint32(16 * n)
                            + uint32(uint32(uint32(lane >> uint32(4)) * uint32(8)) + uint32(lane & uint32(7)))
                        )
                        chunk = uint32(uint32(2 * i) + uint32(uint32(lane >> uint32(3)) & uint32(1)))
                        b0, b1, b2, b3 = ldmatrix_x4(ks, uint32(base + place(row, chunk, head_dim)))
                        for term in range(terms):
                            e = q_low * term + 4 * i
                            r = 8 * n
                            s[r], s[r + 1], s[r + 2], s[r + 3] = mma_k16(
                                q[e],
                                q[e + 1],
                                q[e + 2],
                                q[e + 3],
                                b0,
                                b1,
                                s[r],
                                s[r + 1],
                                s[r + 2],
                                s[r + 3],
                                asynchronous,
                            )
                            s[r + 4], s[r + 5], s[r + 6], s[r + 7] = mma_k16(
                                q[e],
                                q[e + 1],
                                q[e + 2],
                                q[e + 3],
                                b2,
                                b3,
                                s[r + 4],
                                s[r + 5],
                                s[r + 6],
                                s[r + 7],
                                asynchronous,
                            )
                new0, new1 = top0, top1
                for n in range(KEYS // 8):
                    for side in range(2):
                        key = uint32(first_key + uint32(uint32(8 * n + side) + uint32(t * uint32(2))))
                        a, b = float32(s[4 * n + side] * scale0), float32(s[4 * n + 2 + side] * scale1)
                        a = a if key <= position0 else float32(NEVER)
                        b = b if key <= position1 else float32(NEVER)
                        s[4 * n + side], s[4 * n + 2 + side] = a, b
                        new0, new1 = fmax(new0, a), fmax(new1, b)
                new0, new1 = quad_max(new0), quad_max(new1)
                shrink0, shrink1 = exp2(float32(top0 - new0)), exp2(float32(top1 - new1))
                top0, top1 = new0, new1
                sum0, sum1 = float32(sum0 * shrink0), float32(sum1 * shrink1)
                for i in range(o_floats // 4):
                    o[4 * i], o[4 * i + 1] = float32(o[4 * i] * shrink0), float32(o[4 * i + 1] * shrink0)
                    o[4 * i + 2], o[4 * i + 3] = float32(o[4 * i + 2] * shrink1), float32(o[4 * i + 3] * shrink1)
                for n in range(key_steps):
                    for i in range(2):
                        r = 8 * n + 4 * i
                        a, b = exp2(float32(s[r] - top0)), exp2(float32(s[r + 1] - top0))
                        c, d = exp2(float32(s[r + 2] - top1)), exp2(float32(s[r + 3] - top1))
                        sum0, sum1 = float32(sum0 + float32(a + b)), float32(sum1 + float32(c + d))
                        first, rest = split_half2(a, b)
                        second, other = split_half2(c, d)
                        p[2 * i], p[2 * i + 1] = first, second
                        if terms == 2:
                            p[2 * i + 4], p[2 * i + 5] = rest, other
                    for i in range(steps):
                        # matrices: (keys, dims) (low, low), (high, low), (low, high), (high, high), each transposed
                        row = uint32(
                            uint32(16 * n)
                            + uint32(
                                uint32(uint32(uint32(lane >> uint32(3)) & uint32(1)) * uint32(8))
                                + uint32(lane & uint32(7))
                            )
                        )
                        chunk = uint32(uint32(2 * i) + uint32(lane >> uint32(4)))
                        b0, b1, b2, b3 = ldmatrix_x4_transposed(vs, uint32(base + place(row, chunk, head_dim)))
                        for term in range(terms):
                            e = 4 * term
                            r = 8 * i
                            o[r], o[r + 1], o[r + 2], o[r + 3] = mma_k16(
                                p[e],
                                p[e + 1],
                                p[e + 2],
                                p[e + 3],
                                b0,
                                b1,
                                o[r],
                                o[r + 1],
                                o[r + 2],
                                o[r + 3],
                                asynchronous,
                            )
                            o[r + 4], o[r + 5], o[r + 6], o[r + 7] = mma_k16(
                                p[e],
                                p[e + 1],
                                p[e + 2],
                                p[e + 3],
                                b2,
                                b3,
                                o[r + 4],
                                o[r + 5],
                                o[r + 6],
                                o[r + 7],
                                asynchronous,
                            )
        sum0, sum1 = quad_sum(sum0), quad_sum(sum1)
        inverse0, inverse1 = divide(float32(1.0), sum0), divide(float32(1.0), sum1)
        token0, token1 = uint32(query + g), uint32(uint32(query + g) + uint32(8))
        for i in range(o_floats // 4):
            column = uint32(uint32(head * uint32(head_dim)) + uint32(uint32(8 * i) + uint32(t * uint32(2))))
            if token0 <= last:
                to = uint32(uint32(token0 * uint32(heads * head_dim)) + column)
                out[to] = float32(o[4 * i] * inverse0)
                out[uint32(to + uint32(1))] = float32(o[4 * i + 1] * inverse0)
            if token1 <= last:
                to = uint32(uint32(token1 * uint32(heads * head_dim)) + column)
                out[to] = float32(o[4 * i + 2] * inverse1)
                out[uint32(to + uint32(1))] = float32(o[4 * i + 3] * inverse1)

    return prefill_attention
