"""INT4 matrix times a chunk of tokens on tensor cores: y[t, n] = scale[t] * sum over k of s * (q[n, k] - z) * x[t, k].

Spec: `(values * scales[:, None]) @ dequantised.T`. The weights are the mma's A operand, decoded in registers; the tokens
are B. As K is summed over, its order inside an mma is free: lane t of a quad takes words 4j + t of a row, 8 weights
each, and the same 16 bytes of x, so that both come by plain wide loads and no value moves between lanes.

Codes enter as q - 8, which fp16 holds exactly; sum(s * (q - z) * x) = s * (sum((q - 8) * x) - (z - 8) * sum(x)), with the
sums of x made by the kernel that rounded it. A group's sum stands in accumulators of its own and is added to the total in
float32 once: tensor cores cut off low bits when they add to a large accumulator, and over all of K that would be seen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels_numba.errors import KernelError
from kernels_numba.gemv import ADD
from kernels_numba.instructions.arithmetic import fma, half2_floats, half2_sub, prmt
from kernels_numba.instructions.asynchronous import copy_async_commit, copy_async_wait_1
from kernels_numba.instructions.memory import shared_f32x2, shared_u32x4, stream_u32
from kernels_numba.tiles import copy_16, mma_k16

DEPTH = 64  # of K in a stage of shared memory: a line of 128 bytes of x, 32 bytes of codes
STAGES = 3
SHARED_LIMIT = 48 * 1024


@dataclass(frozen=True)
class Tile:
    """What a block computes: warps_m * m_tiles * 16 outputs of warps_n * n_tiles * 8 tokens."""

    warps_m: int = 4
    warps_n: int = 1
    m_tiles: int = 2
    n_tiles: int = 8

    @property
    def rows(self) -> int:
        return 16 * self.m_tiles * self.warps_m

    @property
    def tokens(self) -> int:
        return 8 * self.n_tiles * self.warps_n

    @property
    def block(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def grid(self, n: int, tokens: int) -> tuple[int, int]:
        """Blocks along tokens (first, so that blocks that share weights run together) and along outputs."""
        return -(-tokens // self.tokens), -(-n // self.rows)


def choose_tile(n: int, tokens: int, multiprocessors: int = 1) -> Tile:
    """The tile for N outputs and a chunk of tokens: no more tokens than there are, and enough blocks for the GPU."""
    n_tiles = next(count for count in (1, 2, 4, 8) if 8 * count >= tokens or count == 8)
    tile = Tile(n_tiles=n_tiles)
    blocks = tile.grid(n, tokens)
    return tile if blocks[0] * blocks[1] >= 2 * multiprocessors else Tile(m_tiles=1, n_tiles=n_tiles)


@cuda.jit(device=True)
def decode_half(word, high):
    """Elements 0 to 3 of a word of codes, or 4 to 7 when `high`, less 8, as two half2: each byte under 1024's exponent."""
    nibbles = uint32(uint32(word >> uint32(4 * high)) & uint32(0x0F0F0F0F))
    first = prmt(nibbles, uint32(0x64646464), uint32(0x4140))
    second = prmt(nibbles, uint32(0x64646464), uint32(0x4342))
    return half2_sub(first, uint32(0x64086408)), half2_sub(second, uint32(0x64086408))


@functools.cache
def make_prefill_gemm(
    n: int,
    k: int,
    group: int,
    tile: Tile,
    target: int,
    biased: int = 0,
    capability: tuple[int, int] = (9, 0),
):
    """y = X @ W^T (+ bias), or y += X @ W^T, for a chunk of tokens.

    Grid tile.grid(n, tokens), block tile.block. Arguments of the kernel: codes uint32 [N * K / 8], scales_zeros uint32
    [N * K / group], values uint32 [T * K / 2] (two fp16 a word), scales float32 [T], sums float32 [K / group * capacity]
    (of each token's values over each group), bias float32 [N], y float32 [T * N], tokens (T), capacity (a multiple of 4).
    Raises KernelError for shapes that it cannot serve.
    """
    if k % 128 or n < 1 or group not in (32, 64, 128):
        raise KernelError(
            f"a product of {n} x {k} in groups of {group}: K must be a multiple of 128, groups 32, 64 or 128"
        )
    rows, columns, threads = tile.rows, tile.tokens, tile.block
    m_tiles, n_tiles, warps_m = tile.m_tiles, tile.n_tiles, tile.warps_m
    per_stage = 2 if group == 32 else 1  # groups
    group_tiles = max(1, group // DEPTH)
    x_words, w_words, sum_words = columns * DEPTH // 2, rows * DEPTH // 8, per_stage * columns
    shared_x, shared_w, shared_sums = STAGES * x_words, STAGES * w_words, STAGES * sum_words
    if 4 * (shared_x + shared_w + shared_sums) > SHARED_LIMIT:
        raise KernelError(f"{tile} needs more than 48 KB of shared memory: use smaller tiles")
    accumulators, fragments, scale_words = 4 * m_tiles * n_tiles, 8 * m_tiles, 2 * m_tiles * per_stage
    x_copies, w_copies = -(-columns * 8 // threads), -(-rows * 2 // threads)
    sum_copies = -(-sum_words // (4 * threads))
    stages, groups = k // DEPTH, k // group
    asynchronous = int(capability >= (8, 0))

    @cuda.jit
    def prefill_gemm(codes, scales_zeros, values, scales, sums, bias, y, tokens, capacity):
        xs = cuda.shared.array(shared_x, uint32, alignment=16)
        ws = cuda.shared.array(shared_w, uint32, alignment=16)
        ss = cuda.shared.array(shared_sums, float32, alignment=16)
        total = cuda.local.array(accumulators, float32)
        part = cuda.local.array(accumulators, float32)
        a = cuda.local.array(fragments, uint32)
        sz = cuda.local.array(scale_words, uint32)
        tid = uint32(cuda.threadIdx.x)
        first_token = uint32(uint32(cuda.blockIdx.x) * uint32(columns))
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(rows))
        last_token, last_line = uint32(tokens - 1), uint32(capacity // 4 - 1)
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        row = uint32(
            uint32(uint32(warp % uint32(warps_m)) * uint32(16 * m_tiles)) + g
        )  # of the block's, and + 8, 16 ...
        column = uint32(uint32(warp // uint32(warps_m)) * uint32(8 * n_tiles))
        for i in range(accumulators):
            total[i] = float32(0.0)
            part[i] = float32(0.0)
        for step in range(-STAGES + 1, stages):
            if step >= 0:
                if asynchronous:
                    copy_async_wait_1()
                cuda.syncthreads()
            ahead = step + STAGES - 1
            if ahead < stages:
                buffer, at = uint32(ahead % STAGES), uint32(ahead)
                for turn in range(x_copies):
                    chunk = uint32(uint32(turn * threads) + tid)
                    if chunk < uint32(columns * 8):
                        token, c = uint32(chunk >> uint32(3)), uint32(chunk & uint32(7))
                        c2 = uint32(c ^ uint32(uint32(token & uint32(1)) << uint32(2)))  # neighbours in other banks
                        to = uint32(
                            uint32(buffer * uint32(x_words))
                            + uint32(uint32(token * uint32(32)) + uint32(c2 * uint32(4)))
                        )
                        source = uint32(min(uint32(first_token + token), last_token) * uint32(k // 2))
                        copy_16(
                            xs,
                            to,
                            values,
                            uint32(source + uint32(uint32(at * uint32(32)) + uint32(c * uint32(4)))),
                            asynchronous,
                        )
                for turn in range(w_copies):
                    chunk = uint32(uint32(turn * threads) + tid)
                    if chunk < uint32(rows * 2):
                        r, c = uint32(chunk >> uint32(1)), uint32(chunk & uint32(1))
                        c2 = uint32(c ^ uint32(uint32(r >> uint32(2)) & uint32(1)))
                        to = uint32(
                            uint32(buffer * uint32(w_words)) + uint32(uint32(r * uint32(8)) + uint32(c2 * uint32(4)))
                        )
                        source = uint32(min(uint32(first_row + r), uint32(n - 1)) * uint32(k // 8))
                        copy_16(
                            ws,
                            to,
                            codes,
                            uint32(source + uint32(uint32(at * uint32(8)) + uint32(c * uint32(4)))),
                            asynchronous,
                        )
                for turn in range(sum_copies):
                    chunk = uint32(uint32(turn * threads) + tid)
                    if chunk < uint32(sum_words // 4):
                        of, line = uint32(chunk // uint32(columns // 4)), uint32(chunk % uint32(columns // 4))
                        of = uint32(uint32(uint32(at * uint32(DEPTH)) // uint32(group)) + of)
                        line = min(uint32(uint32(first_token >> uint32(2)) + line), last_line)
                        to = uint32(uint32(buffer * uint32(sum_words)) + uint32(chunk * uint32(4)))
                        copy_16(
                            ss, to, sums, uint32(uint32(of * uint32(capacity)) + uint32(line * uint32(4))), asynchronous
                        )
            if asynchronous:
                copy_async_commit()
            if step >= 0:
                buffer = uint32(step % STAGES)
                own_x = uint32(uint32(buffer * uint32(x_words)) + uint32(uint32(column + g) * uint32(32)))
                own_w = uint32(uint32(buffer * uint32(w_words)) + uint32(row * uint32(8)))
                own_s = uint32(uint32(buffer * uint32(sum_words)) + uint32(column + uint32(t * uint32(2))))
                of = uint32(uint32(step * DEPTH) // uint32(group))
                for p in range(per_stage):
                    for i in range(2 * m_tiles):
                        r = min(uint32(uint32(first_row + row) + uint32(8 * i)), uint32(n - 1))
                        sz[2 * m_tiles * p + i] = stream_u32(
                            scales_zeros, uint32(uint32(r * uint32(groups)) + uint32(of + uint32(p)))
                        )
                for j in range(2):
                    c_w = uint32(uint32(uint32(uint32(j) ^ uint32(uint32(g >> uint32(2)) & uint32(1))) * uint32(4)) + t)
                    c_x = uint32(uint32(uint32(uint32(j) ^ uint32(g & uint32(1))) * uint32(16)) + uint32(t * uint32(4)))
                    for i in range(2 * m_tiles):
                        word = ws[uint32(own_w + uint32(uint32(i * 64) + c_w))]
                        a[4 * i], a[4 * i + 1] = decode_half(word, 0)
                        a[4 * i + 2], a[4 * i + 3] = decode_half(word, 1)
                    for b in range(n_tiles):
                        x0, x1, x2, x3 = shared_u32x4(xs, uint32(own_x + uint32(uint32(b * 256) + c_x)))
                        for m in range(m_tiles):
                            q, e = 8 * m, 4 * (b * m_tiles + m)
                            c0, c1, c2, c3 = mma_k16(
                                a[q],
                                a[q + 4],
                                a[q + 1],
                                a[q + 5],
                                x0,
                                x1,
                                part[e],
                                part[e + 1],
                                part[e + 2],
                                part[e + 3],
                                asynchronous,
                            )
                            c0, c1, c2, c3 = mma_k16(
                                a[q + 2], a[q + 6], a[q + 3], a[q + 7], x2, x3, c0, c1, c2, c3, asynchronous
                            )
                            part[e], part[e + 1], part[e + 2], part[e + 3] = c0, c1, c2, c3
                    p = j if group == 32 else 0
                    if group == 32 or (j == 1 and (group_tiles == 1 or step % group_tiles == group_tiles - 1)):
                        for m in range(m_tiles):
                            s0, z0 = half2_floats(sz[2 * (m_tiles * p + m)])
                            s1, z1 = half2_floats(sz[2 * (m_tiles * p + m) + 1])
                            z0, z1 = float32(float32(8.0) - z0), float32(float32(8.0) - z1)
                            for b in range(n_tiles):
                                e = 4 * (b * m_tiles + m)
                                u, v = shared_f32x2(ss, uint32(own_s + uint32(p * columns + 8 * b)))
                                total[e] = fma(s0, fma(z0, u, part[e]), total[e])
                                total[e + 1] = fma(s0, fma(z0, v, part[e + 1]), total[e + 1])
                                total[e + 2] = fma(s1, fma(z1, u, part[e + 2]), total[e + 2])
                                total[e + 3] = fma(s1, fma(z1, v, part[e + 3]), total[e + 3])
                                part[e], part[e + 1] = float32(0.0), float32(0.0)
                                part[e + 2], part[e + 3] = float32(0.0), float32(0.0)
        for b in range(n_tiles):
            for side in range(2):
                token = uint32(uint32(first_token + column) + uint32(uint32(8 * b + side) + uint32(t * uint32(2))))
                if token <= last_token:
                    scale, line = scales[token], uint32(token * uint32(n))
                    for i in range(2 * m_tiles):
                        r = uint32(uint32(first_row + row) + uint32(8 * i))
                        if r < uint32(n):
                            out = float32(total[4 * (b * m_tiles + i // 2) + 2 * (i % 2) + side] * scale)
                            if biased:
                                out = float32(out + bias[r])
                            to = uint32(line + r)
                            if target == ADD:
                                out = float32(out + y[to])
                            y[to] = out

    return prefill_gemm
