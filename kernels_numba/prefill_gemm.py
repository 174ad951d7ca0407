"""INT4 matrix times a chunk of tokens on tensor cores: y[t, n] = scale[t] * sum over k of s * (q[n, k] - z) * x[t, k].

Spec: `(values * scales[:, None]) @ dequantised.T`. The weights are the mma's A operand, decoded in registers; the
tokens are B. K is summed over, so its order inside an mma is free: lane t of a quad takes word 4j + t of a row of codes
and the same 8 values of x, both by plain wide loads. `rows.store_four` has put these 8 in the order in which a word
gives its codes, two at a time: 0 2, 4 6, 1 3, 5 7.

Codes enter as q - 8, which fp16 holds exactly. s * (q - z) summed is s * (sum((q - 8) * x) - (z - 8) * sum(x)); the
sums of x come from the kernel that rounded it. A group has accumulators of its own, which are added to the total in
float32 once: tensor cores cut off low bits when they add to a large number, and over all of K that would be seen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels_numba.errors import KernelError
from kernels_numba.gemv import ADD
from kernels_numba.instructions.arithmetic import and_or, fma, half2_floats, half2_fma, half2_sub
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


@cuda.jit(device=True, forceinline=True)
def decode_pairs(word):
    """Codes (0, 2) and (4, 6) of a word, less 8, as two half2; of the word shifted right by 8, (1, 3) and (5, 7).

    Under the exponent of 1024 a code q reads 1024 + q, and one that stands 4 bits higher 1024 + 16 q.
    """
    low = and_or(word, uint32(0x000F000F), uint32(0x64006400))
    high = and_or(word, uint32(0x00F000F0), uint32(0x64006400))
    return half2_sub(low, uint32(0x64086408)), half2_fma(high, uint32(0x2C002C00), uint32(0xD480D480))


@cuda.jit(device=True, forceinline=True)
def plan_x(sources, tid, first, last, columns, threads, k):
    """Where a thread's 16-byte pieces of x come from, at k = 0; gives where in a stage the first goes to.

    A token's line of 128 bytes has 8 pieces; two tokens' lie in different banks. The next piece is threads / 8 further.
    """
    c = uint32(tid & uint32(7))
    for turn in range((columns * 8 + threads - 1) // threads):
        token = uint32(first + uint32(uint32(turn * threads + tid) >> uint32(3)))
        sources[turn] = uint32(uint32(min(token, last) * uint32(k // 2)) + uint32(c * uint32(4)))
    place = uint32(c ^ uint32(uint32(uint32(tid >> uint32(3)) & uint32(1)) << uint32(2)))
    return uint32(uint32(uint32(tid >> uint32(3)) * uint32(32)) + uint32(place * uint32(4)))


@cuda.jit(device=True, forceinline=True)
def plan_codes(sources, tid, first, rows, threads, n, k):
    """The same for codes: a row has 2 pieces; rows 4 apart lie in different banks."""
    c = uint32(tid & uint32(1))
    for turn in range((rows * 2 + threads - 1) // threads):
        row = uint32(first + uint32(uint32(turn * threads + tid) >> uint32(1)))
        sources[turn] = uint32(uint32(min(row, uint32(n - 1)) * uint32(k // 8)) + uint32(c * uint32(4)))
    place = uint32(c ^ uint32(uint32(tid >> uint32(3)) & uint32(1)))
    return uint32(uint32(uint32(tid >> uint32(1)) * uint32(8)) + uint32(place * uint32(4)))


@cuda.jit(device=True, forceinline=True)
def plan_sums(sources, tid, first, capacity, columns, threads, per_stage):
    """The same for the sums of x: a group has columns / 4 pieces, and a stage per_stage groups."""
    for turn in range((per_stage * columns // 4 + threads - 1) // threads):
        piece = uint32(turn * threads + tid)
        line = uint32(uint32(first >> uint32(2)) + uint32(piece % uint32(columns // 4)))
        line = min(line, uint32(uint32(capacity >> uint32(2)) - uint32(1)))
        sources[turn] = uint32(uint32(uint32(piece // uint32(columns // 4)) * capacity) + uint32(line * uint32(4)))
    return uint32(tid * uint32(4))


@cuda.jit(device=True, forceinline=True)
def bring(target, to, source, sources, at, pieces, tid, threads, asynchronous):
    """Starts to bring a thread's pieces of a stage, `at` words after their places in the plan."""
    for turn in range((pieces + threads - 1) // threads):
        if pieces % threads == 0 or uint32(turn * threads + tid) < uint32(pieces):
            copy_16(target, uint32(to + uint32(4 * threads * turn)), source, uint32(sources[turn] + at), asynchronous)


@cuda.jit(device=True, forceinline=True)
def fold(total, part, scales_zeros, ss, own, m_tiles, n_tiles):
    """Adds a group's sums to the totals, with scale and zero point, and starts the next group at 0.

    total, part: accumulators [n_tiles][m_tiles][4]. scales_zeros: a lane's rows g and g + 8 of each m tile.
    ss[own ..]: the sums of x of a lane's two tokens of each n tile.
    """
    for b in range(n_tiles):
        u, v = shared_f32x2(ss, uint32(own + uint32(8 * b)))
        for m in range(m_tiles):
            s0, z0 = half2_floats(scales_zeros[2 * m])
            s1, z1 = half2_floats(scales_zeros[2 * m + 1])
            z0, z1 = float32(float32(8.0) - z0), float32(float32(8.0) - z1)
            e = 4 * (b * m_tiles + m)
            total[e] = fma(s0, fma(z0, u, part[e]), total[e])
            total[e + 1] = fma(s0, fma(z0, v, part[e + 1]), total[e + 1])
            total[e + 2] = fma(s1, fma(z1, u, part[e + 2]), total[e + 2])
            total[e + 3] = fma(s1, fma(z1, v, part[e + 3]), total[e + 3])
            part[e], part[e + 1], part[e + 2], part[e + 3] = float32(0.0), float32(0.0), float32(0.0), float32(0.0)


@cuda.jit(device=True, forceinline=True)
def multiply(part, a, ws, xs, own_w, own_x, j, g, t, m_tiles, n_tiles, whole):
    """Half a stage: word j of a lane's rows, all of their tiles' tokens; a: fragments [m_tiles][8]."""
    swap_w, swap_x = uint32(uint32(g >> uint32(2)) & uint32(1)), uint32(g & uint32(1))
    at_w = uint32(own_w + uint32(uint32(uint32(uint32(j) ^ swap_w) * uint32(4)) + t))
    at_x = uint32(own_x + uint32(uint32(uint32(uint32(j) ^ swap_x) * uint32(16)) + uint32(t * uint32(4))))
    for i in range(2 * m_tiles):
        word, e = ws[uint32(at_w + uint32(64 * i))], 8 * (i // 2) + i % 2
        a[e], a[e + 2] = decode_pairs(word)
        a[e + 4], a[e + 6] = decode_pairs(uint32(word >> uint32(8)))
    for b in range(n_tiles):
        x0, x1, x2, x3 = shared_u32x4(xs, uint32(at_x + uint32(256 * b)))
        for m in range(m_tiles):
            q, e = 8 * m, 4 * (b * m_tiles + m)
            c0, c1, c2, c3 = part[e], part[e + 1], part[e + 2], part[e + 3]
            c0, c1, c2, c3 = mma_k16(a[q], a[q + 1], a[q + 2], a[q + 3], x0, x1, c0, c1, c2, c3, whole)
            c0, c1, c2, c3 = mma_k16(a[q + 4], a[q + 5], a[q + 6], a[q + 7], x2, x3, c0, c1, c2, c3, whole)
            part[e], part[e + 1], part[e + 2], part[e + 3] = c0, c1, c2, c3


@cuda.jit(device=True, forceinline=True)
def store(total, scales, bias, y, token, row, last, i, side, n, m_tiles, n_tiles, target, biased):
    """One of a lane's rows (i of 2 m_tiles) of one of its two tokens of each n tile."""
    for b in range(n_tiles):
        at = uint32(token + uint32(8 * b))
        if at <= last:
            out = float32(total[4 * (b * m_tiles + i // 2) + 2 * (i % 2) + side] * scales[at])
            if biased:
                out = float32(out + bias[row])
            to = uint32(uint32(at * uint32(n)) + row)
            if target == ADD:
                out = float32(out + y[to])
            y[to] = out


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
    [N * K / group], the rounded rows (values uint32 [T * K / 2], scales float32 [T], sums float32
    [K / group * capacity]), bias float32 [N], y float32 [T * N], tokens (T), capacity (a multiple of 4).
    Raises KernelError for shapes that it cannot serve.
    """
    if k % 128 or n < 1 or group not in (32, 64, 128):
        raise KernelError(
            f"a product of {n} x {k} in groups of {group}: K must be a multiple of 128, groups 32, 64 or 128"
        )
    rows, columns, threads = tile.rows, tile.tokens, tile.block
    m_tiles, n_tiles, warps_m = tile.m_tiles, tile.n_tiles, tile.warps_m
    per_stage, stages_per_group = (2, 1) if group == 32 else (1, group // DEPTH)
    x_words, w_words, s_words = columns * DEPTH // 2, rows * DEPTH // 8, per_stage * columns
    shared_x, shared_w, shared_s = STAGES * x_words, STAGES * w_words, STAGES * s_words
    if 4 * (shared_x + shared_w + shared_s) > SHARED_LIMIT:
        raise KernelError(f"{tile} needs more than 48 KB of shared memory: use smaller tiles")
    accumulators, fragments, lane_rows = 4 * m_tiles * n_tiles, 8 * m_tiles, 2 * m_tiles
    x_pieces, w_pieces, s_pieces = -(-columns * 8 // threads), -(-rows * 2 // threads), -(-s_words // (4 * threads))
    stages, groups = k // DEPTH, k // group
    asynchronous = whole = int(capability >= (8, 0))

    @cuda.jit
    def prefill_gemm(codes, scales_zeros, values, scales, sums, bias, y, tokens, capacity):
        xs = cuda.shared.array(shared_x, uint32, alignment=16)
        ws = cuda.shared.array(shared_w, uint32, alignment=16)
        ss = cuda.shared.array(shared_s, float32, alignment=16)
        total = cuda.local.array(accumulators, float32)
        part = cuda.local.array(accumulators, float32)
        a = cuda.local.array(fragments, uint32)
        sz = cuda.local.array(lane_rows, uint32)
        x_from = cuda.local.array(x_pieces, uint32)
        w_from = cuda.local.array(w_pieces, uint32)
        s_from = cuda.local.array(s_pieces, uint32)
        tid = uint32(cuda.threadIdx.x)
        first_token = uint32(uint32(cuda.blockIdx.x) * uint32(columns))
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(rows))
        last, room = uint32(tokens - 1), uint32(capacity)
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        row = uint32(uint32(uint32(warp % uint32(warps_m)) * uint32(16 * m_tiles)) + g)  # the lane's; 8, 16 .. further
        column = uint32(uint32(warp // uint32(warps_m)) * uint32(8 * n_tiles))
        x_to = plan_x(x_from, tid, first_token, last, columns, threads, k)
        w_to = plan_codes(w_from, tid, first_row, rows, threads, n, k)
        s_to = plan_sums(s_from, tid, first_token, room, columns, threads, per_stage)
        for i in range(accumulators):
            total[i], part[i] = float32(0.0), float32(0.0)
        for turn in range(stages + STAGES - 1):
            # stage `turn` is on its way while stage `turn - (STAGES - 1)` is multiplied
            if turn >= STAGES - 1:
                if asynchronous:
                    copy_async_wait_1()
                cuda.syncthreads()
            if turn < stages:
                buffer, at = uint32(uint32(turn) % uint32(STAGES)), uint32(turn * DEPTH)
                to = uint32(x_to + uint32(buffer * uint32(x_words)))
                bring(xs, to, values, x_from, uint32(at >> uint32(1)), columns * 8, tid, threads, asynchronous)
                to = uint32(w_to + uint32(buffer * uint32(w_words)))
                bring(ws, to, codes, w_from, uint32(at >> uint32(3)), rows * 2, tid, threads, asynchronous)
                to, of = uint32(s_to + uint32(buffer * uint32(s_words))), uint32(at // uint32(group))
                bring(ss, to, sums, s_from, uint32(of * room), s_words // 4, tid, threads, asynchronous)
            if asynchronous:
                copy_async_commit()
            if turn >= STAGES - 1:
                stage = uint32(turn - (STAGES - 1))
                buffer = uint32(stage % uint32(STAGES))
                own_x = uint32(uint32(buffer * uint32(x_words)) + uint32(uint32(column + g) * uint32(32)))
                own_w = uint32(uint32(buffer * uint32(w_words)) + uint32(row * uint32(8)))
                own_s = uint32(uint32(buffer * uint32(s_words)) + uint32(column + uint32(t * uint32(2))))
                of = uint32(uint32(stage * uint32(DEPTH)) // uint32(group))
                for j in range(2):
                    if j == 0 or group == 32:
                        for i in range(lane_rows):
                            r = min(uint32(uint32(first_row + row) + uint32(8 * i)), uint32(n - 1))
                            at = uint32(uint32(r * uint32(groups)) + uint32(of + uint32(j)))
                            sz[i] = stream_u32(scales_zeros, at)
                    multiply(part, a, ws, xs, own_w, own_x, j, g, t, m_tiles, n_tiles, whole)
                    if group == 32:
                        fold(total, part, sz, ss, uint32(own_s + uint32(j * columns)), m_tiles, n_tiles)
                if group > 32 and uint32(stage % uint32(stages_per_group)) == uint32(stages_per_group - 1):
                    fold(total, part, sz, ss, own_s, m_tiles, n_tiles)
        for side in range(2):
            token = uint32(uint32(first_token + column) + uint32(uint32(t * uint32(2)) + uint32(side)))
            for i in range(lane_rows):
                r = uint32(uint32(first_row + row) + uint32(8 * i))
                if r < uint32(n):
                    store(total, scales, bias, y, token, r, last, i, side, n, m_tiles, n_tiles, target, biased)

    return prefill_gemm
