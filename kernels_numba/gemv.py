"""INT4 matrix times one vector: the kernel that reads 99 % of a token's bytes.

y[n] = sum over k of s * (q[n, k] - z) * x[k], with s and z per row and group. Spec: `dequantised @ x`.

A team of LANES * SPLIT lanes owns a pair of rows and walks along K together, 32 weights (16 bytes) a lane and step, so
that a warp's loads are whole lines. Rows come in pairs because what follows needs two outputs at once: RoPE the elements
i and i + head_dim / 2, SwiGLU a gate and its up. SPLIT warps share a pair where rows are too few to fill the GPU.
Accumulation is float32; within a step of the int8 form it is an exact integer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, int32, uint8, uint16, uint32

from kernels_numba.activation import (
    ALL_LANES,
    BLOCK,
    FP16,
    INT8,
    block_factor,
    block_scale,
    bits_value,
    round_bits,
    round_four,
    words_per_block,
)
from kernels_numba.errors import KernelError
from kernels_numba.instructions.arithmetic import (
    and_or,
    bits_float,
    divide,
    dp4a,
    exp2,
    fabs,
    floats_half2,
    fma,
    fmax,
    half2_floats,
    half2_sub,
    prmt,
    rsqrt,
)
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous
from kernels_numba.instructions.memory import (
    load_f32x4,
    load_u32x4,
    prefetch,
    shared_f32x2,
    shared_u32x4,
    stream_u32,
    stream_u32x4,
)

CHUNK = 32  # weights in 16 bytes: one load of a lane
LOP3, PRMT = 0, 1
UNPACKINGS = {"lop3": LOP3, "prmt": PRMT}

ROUNDED, RAW, NORMED = 0, 1, 2  # the vector: already rounded, float32, float32 that RMSNorm comes before
STORE, ADD = 0, 1  # what happens to an output: written, or added to what is there


@dataclass(frozen=True)
class Shape:
    """How a GEMV of one shape is cut into blocks. All are compile-time constants of the kernel.

    n, k: outputs and inputs. stride: the distance of the two rows of a pair. lanes: lanes of a warp that share a pair.
    split: warps that share it. warps: of a block. rounds: pairs that a team takes one after the other.
    """

    n: int
    k: int
    group: int = 128
    stride: int = 1
    lanes: int = 16
    split: int = 1
    warps: int = 8
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.k % 128 or self.n < 1 or self.group not in (32, 64, 128):
            raise KernelError(
                f"a GEMV of {self.n} x {self.k} in groups of {self.group}: K must be a multiple of 128, groups 32, 64 or 128"
            )
        if 32 % self.lanes or self.warps % self.split or not 1 <= self.warps <= 32:
            raise KernelError(f"{self}: lanes must divide 32, and split the warps (at most 32)")

    @property
    def pairs(self) -> int:
        return -(-self.n // (2 * self.stride)) * self.stride

    @property
    def teams(self) -> int:
        return 32 // self.lanes * self.warps // self.split

    @property
    def grid(self) -> int:
        return -(-self.pairs // (self.teams * self.rounds))

    @property
    def block(self) -> int:
        return 32 * self.warps


# 32 weights against 32 activations


@cuda.jit(device=True)
def dot_int8(w, x0, x1, total):
    """8 weights against 8 int8 activations: two masks, a shift, two dp4a."""
    total = dp4a(uint32(w & uint32(0x0F0F0F0F)), x0, total)
    return dp4a(uint32(uint32(w >> uint32(4)) & uint32(0x0F0F0F0F)), x1, total)


@cuda.jit(device=True)
def two_codes(w, place, unpacking):
    """Codes (0, 2), (4, 6), (1, 3) or (5, 7) of a word, by place, as floats.

    lop3: a code under the exponent of 1024 is the fp16 number 1024 + code. prmt: under that of 2^23, a float32.
    """
    if unpacking == LOP3:
        pair = and_or(uint32(w >> uint32(4 * place)), uint32(0x000F000F), uint32(0x64006400))
        return half2_floats(half2_sub(pair, uint32(0x64006400)))
    nibbles = uint32(uint32(w >> uint32(4 * (place & 1))) & uint32(0x0F0F0F0F))
    low = prmt(nibbles, uint32(0x4B000000), uint32(0x7550 + (place >> 1)))
    high = prmt(nibbles, uint32(0x4B000000), uint32(0x7552 + (place >> 1)))
    return float32(bits_float(low) - float32(8388608.0)), float32(bits_float(high) - float32(8388608.0))


@cuda.jit(device=True)
def two_values(word, form):
    """Two activations of a word."""
    if form == FP16:
        return half2_floats(word)
    return bits_float(uint32(word << uint32(16))), bits_float(uint32(word & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def dot_half(w, x0, x1, x2, x3, total, form, unpacking):
    """8 weights against 8 activations of 16 bits, in float32."""
    a, b = two_values(x0, form)
    c, d = two_values(x1, form)
    q, r = two_codes(w, 0, unpacking)
    total = fma(q, a, total)
    total = fma(r, c, total)
    q, r = two_codes(w, 2, unpacking)
    total = fma(q, b, total)
    total = fma(r, d, total)
    a, b = two_values(x2, form)
    c, d = two_values(x3, form)
    q, r = two_codes(w, 1, unpacking)
    total = fma(q, a, total)
    total = fma(r, c, total)
    q, r = two_codes(w, 3, unpacking)
    total = fma(q, b, total)
    return fma(r, d, total)


@cuda.jit(device=True)
def four_words(x, at, in_shared):
    """16 bytes of activations from shared memory or, where a kernel before has rounded them, from global memory."""
    if in_shared:
        return shared_u32x4(x, at)
    return load_u32x4(x, at)


@cuda.jit(device=True)
def chunk_dots(v, w, x, at, in_shared, form, unpacking):
    """32 weights of two rows (four words each) against 32 activations: the two sums, as floats."""
    if form == INT8:
        a, b, c, d = four_words(x, at, in_shared)
        e, f, g, h = four_words(x, uint32(at + uint32(4)), in_shared)
        first = dot_int8(v[3], g, h, dot_int8(v[2], e, f, dot_int8(v[1], c, d, dot_int8(v[0], a, b, int32(0)))))
        second = dot_int8(w[3], g, h, dot_int8(w[2], e, f, dot_int8(w[1], c, d, dot_int8(w[0], a, b, int32(0)))))
        return float32(first), float32(second)
    p, q = float32(0.0), float32(0.0)
    a, b, c, d = four_words(x, at, in_shared)
    p, q = dot_half(v[0], a, b, c, d, p, form, unpacking), dot_half(w[0], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(4)), in_shared)
    p, q = dot_half(v[1], a, b, c, d, p, form, unpacking), dot_half(w[1], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(8)), in_shared)
    p, q = dot_half(v[2], a, b, c, d, p, form, unpacking), dot_half(w[2], a, b, c, d, q, form, unpacking)
    a, b, c, d = four_words(x, uint32(at + uint32(12)), in_shared)
    return dot_half(v[3], a, b, c, d, p, form, unpacking), dot_half(w[3], a, b, c, d, q, form, unpacking)


@cuda.jit(device=True)
def two_floats(pairs, at, in_shared):
    """Scale and scale * sum of one block of activations."""
    if in_shared:
        return shared_f32x2(pairs, at)
    return pairs[at], pairs[uint32(at + uint32(1))]


@cuda.jit(device=True)
def pair_sums(
    codes, scales_zeros, x, pairs, row0, row1, first, step, k, group, whole, in_shared, form, unpacking
):
    """A lane's share of two rows' products: chunks first, first + step, ... of K."""
    chunks = uint32(k // CHUNK)
    line, groups = uint32(k // 8), uint32(k // group)
    code0, code1 = uint32(row0 * line), uint32(row1 * line)
    scale0, scale1 = uint32(row0 * groups), uint32(row1 * groups)
    width = uint32(8 if form == INT8 else 16)
    y0, y1 = float32(0.0), float32(0.0)
    for turn in range((k // CHUNK + step - 1) // step):
        chunk = uint32(first + uint32(turn * step))
        if whole or chunk < chunks:
            at = uint32(chunk * uint32(4))
            v = stream_u32x4(codes, uint32(code0 + at))
            w = stream_u32x4(codes, uint32(code1 + at))
            of = uint32(chunk // uint32(group // CHUNK))
            s0, z0 = half2_floats(stream_u32(scales_zeros, uint32(scale0 + of)))
            s1, z1 = half2_floats(stream_u32(scales_zeros, uint32(scale1 + of)))
            dot0, dot1 = chunk_dots(v, w, x, uint32(chunk * width), in_shared, form, unpacking)
            scale, total = two_floats(pairs, uint32(chunk * uint32(2)), in_shared)
            y0 = fma(s0, fma(scale, dot0, float32(-float32(z0 * total))), y0)
            y1 = fma(s1, fma(scale, dot1, float32(-float32(z1 * total))), y1)
    return y0, y1


@cuda.jit(device=True)
def lanes_sum(value, lanes):
    """The sum over the neighbouring lanes of a team, in each of them."""
    if lanes > 16:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 16))
    if lanes > 8:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 8))
    if lanes > 4:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 4))
    if lanes > 2:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 2))
    if lanes > 1:
        value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, 1))
    return value


# the vector, made ready in shared memory


@cuda.jit(device=True)
def block_sum(value, partial, tid, warps):
    """The sum over all threads of the block, in each of them; `partial` is shared, float32 [warps]."""
    value = lanes_sum(value, 32)
    if uint32(tid & uint32(31)) == uint32(0):
        partial[uint32(tid >> uint32(5))] = value
    cuda.syncthreads()
    total = float32(0.0)
    for w in range(warps):
        total = float32(total + partial[uint32(w)])
    return total


@cuda.jit(device=True)
def inverse_rms(x, partial, tid, k, eps, warps):
    """1 / sqrt(mean(x^2) + eps) of float32 [K], in every thread of the block."""
    squares = float32(0.0)
    for start in range(0, k, warps * 128):
        at = uint32(uint32(start) + uint32(tid * uint32(4)))
        if at < uint32(k):
            a, b, c, d = load_f32x4(x, at)
            squares = fma(a, a, fma(b, b, fma(c, c, fma(d, d, squares))))
    mean = float32(block_sum(squares, partial, tid, warps) * float32(1.0 / k))
    return rsqrt(float32(mean + eps))


@cuda.jit(device=True)
def round_vector(x, weight, factor, normed, values, pairs, tid, k, warps, form):
    """Rounds x, or x * factor * weight, into shared `values` and `pairs`; a barrier must follow."""
    lane = uint32(tid & uint32(31))
    for start in range(0, k, warps * 128):
        at = uint32(uint32(start) + uint32(tid * uint32(4)))
        if at < uint32(k):  # whole warps, as K is a multiple of 128
            a, b, c, d = load_f32x4(x, at)
            if normed:
                a = float32(float32(a * factor) * weight[at])
                b = float32(float32(b * factor) * weight[uint32(at + uint32(1))])
                c = float32(float32(c * factor) * weight[uint32(at + uint32(2))])
                d = float32(float32(d * factor) * weight[uint32(at + uint32(3))])
            first, second, scale, total = round_four(a, b, c, d, form)
            if form == INT8:
                values[uint32(at >> uint32(2))] = first
            else:
                values[uint32(at >> uint32(1))] = first
                values[uint32(uint32(at >> uint32(1)) + uint32(1))] = second
            if uint32(lane & uint32(7)) == uint32(0):
                block = uint32(at >> uint32(4))  # twice the number of the block of 32
                pairs[block] = scale
                pairs[uint32(block + uint32(1))] = total


@cuda.jit(device=True)
def first_row(pair, stride):
    """The first of the two rows of a pair; the second is `stride` further."""
    return uint32(uint32(uint32(pair // uint32(stride)) * uint32(2 * stride)) + uint32(pair % uint32(stride)))



# kernels


def _whole(shape: Shape) -> int:
    """1 when every lane of a team has work at every step."""
    return int(shape.k // CHUNK % (shape.lanes * shape.split) == 0)


def _staged(shape: Shape, form: int) -> tuple[int, int]:
    """Shared memory of a vector that is made ready in the block: words of values, floats of pairs."""
    words, pairs = shape.k // BLOCK * words_per_block(form), shape.k // BLOCK * 2
    if 4 * (words + pairs) > 44 * 1024:
        raise KernelError(f"a vector of {shape.k} does not fit into shared memory: round it in the kernel before")
    return words, pairs


@cuda.jit(device=True)
def block_pair_sums(
    codes, scales_zeros, x, pairs, sums, tid, block, n, k, group, stride, all_pairs, lanes, split, warps, rounds, whole, in_shared, form, unpacking
):
    """Every team's pairs, one after the other: leaves sums[2 * (split * pair of the block + part)], for two rows."""
    lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
    member = uint32(lane % uint32(lanes))
    team = uint32(uint32(uint32(warp // uint32(split)) * uint32(32 // lanes)) + uint32(lane // uint32(lanes)))
    part = uint32(warp % uint32(split))
    teams = uint32(32 // lanes * warps // split)
    for turn in range(rounds):
        local = uint32(uint32(uint32(turn) * teams) + team)
        pair = uint32(uint32(block * uint32(teams * uint32(rounds))) + local)
        row0 = first_row(min(pair, uint32(all_pairs - 1)), stride)
        row1 = min(uint32(row0 + uint32(stride)), uint32(n - 1))
        y0, y1 = pair_sums(
            codes, scales_zeros, x, pairs, row0, row1, uint32(uint32(part * uint32(lanes)) + member), lanes * split,
            k, group, whole, in_shared, form, unpacking,
        )
        y0, y1 = lanes_sum(y0, lanes), lanes_sum(y1, lanes)
        if member == uint32(0):
            at = uint32(uint32(uint32(local * uint32(split)) + part) * uint32(2))
            sums[at] = y0
            sums[uint32(at + uint32(1))] = y1


@cuda.jit(device=True)
def gathered(sums, local, split):
    """Both rows' sums of a pair, its parts added in order."""
    y0, y1 = float32(0.0), float32(0.0)
    for part in range(split):
        at = uint32(uint32(uint32(local * uint32(split)) + uint32(part)) * uint32(2))
        y0 = float32(y0 + sums[at])
        y1 = float32(y1 + sums[uint32(at + uint32(1))])
    return y0, y1


@functools.cache
def make_gemv(shape: Shape, form: int, source: int, target: int, unpacking: int = LOP3, dependent: int = 0):
    """y = W @ x, or y += W @ x, for one vector.

    Arguments of the kernel: codes uint32 [N * K / 8], scales_zeros uint32 [N * K / group], values and pairs (the rounded
    vector, for ROUNDED), raw float32 [K], weight float32 [K] and eps (RMSNorm's, for NORMED), y float32 [N].
    What a source does not use may be any array of its dtype.
    """
    n, k, group, stride, all_pairs = shape.n, shape.k, shape.group, shape.stride, shape.pairs
    lanes, split, warps, rounds, whole = shape.lanes, shape.split, shape.warps, shape.rounds, _whole(shape)
    staged = int(source != ROUNDED)
    normed = int(source == NORMED)
    words, floats = _staged(shape, form) if staged else (4, 2)
    per_block = shape.teams * rounds
    slots = 2 * split * per_block
    threads = shape.block

    @cuda.jit
    def gemv(codes, scales_zeros, values, pairs, raw, weight, eps, y):
        own_values = cuda.shared.array(words, uint32)
        own_pairs = cuda.shared.array(floats, float32)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if dependent:
            launch_dependents()
            _prefetch_block(codes, tid, block, k, stride, all_pairs, per_block, threads)
            wait_for_previous()
        if staged:
            factor = float32(1.0)
            if normed:
                factor = inverse_rms(raw, partial, tid, k, eps, warps)
            round_vector(raw, weight, factor, normed, own_values, own_pairs, tid, k, warps, form)
            cuda.syncthreads()
            block_pair_sums(
                codes, scales_zeros, own_values, own_pairs, sums, tid, block, n, k, group, stride, all_pairs,
                lanes, split, warps, rounds, whole, 1, form, unpacking,
            )
        else:
            block_pair_sums(
                codes, scales_zeros, values, pairs, sums, tid, block, n, k, group, stride, all_pairs,
                lanes, split, warps, rounds, whole, 0, form, unpacking,
            )
        cuda.syncthreads()
        pair = uint32(uint32(block * uint32(per_block)) + tid)
        if tid < uint32(per_block) and pair < uint32(all_pairs):
            y0, y1 = gathered(sums, tid, split)
            row0 = first_row(pair, stride)
            row1 = uint32(row0 + uint32(stride))
            if target == ADD:
                y0 = float32(y0 + y[row0])
                if row1 < uint32(n):
                    y1 = float32(y1 + y[row1])
            y[row0] = y0
            if row1 < uint32(n):
                y[row1] = y1

    return gemv


@cuda.jit(device=True)
def _prefetch_block(codes, tid, block, k, stride, all_pairs, per_block, threads):
    """Brings the start of the block's rows on their way to the L2 cache, before anything is waited for."""
    per_row = threads // per_block
    local, member = uint32(tid // uint32(per_row)), uint32(tid % uint32(per_row))
    pair = uint32(uint32(block * uint32(per_block)) + local)
    if local < uint32(per_block) and pair < uint32(all_pairs):
        row = first_row(pair, stride)
        at = uint32(member * uint32(32))  # 128 bytes, a line
        if at < uint32(k // 8):
            prefetch(codes, uint32(uint32(row * uint32(k // 8)) + at))
            prefetch(codes, uint32(uint32(uint32(row + uint32(stride)) * uint32(k // 8)) + at))


@functools.cache
def make_qkv(
    shape: Shape, form: int, heads: int, kv_heads: int, head_dim: int, page_size: int, unpacking: int = LOP3, dependent: int = 0
):
    """RMSNorm, the q, k and v projections with bias, RoPE, and k and v appended to their pages, for one token.

    Arguments of the kernel: codes, scales_zeros, x float32 [K], weight float32 [K], eps, bias float32 [N],
    cosines and sines float32 [positions * head_dim / 2], position int32 [1], block_table int32, q float32 [heads * head_dim],
    k_pages and v_pages as halves: uint16 [pages * kv_heads * page_size * head_dim]. A page of -1 takes nothing.
    """
    n, k, group, stride, all_pairs = shape.n, shape.k, shape.group, shape.stride, shape.pairs
    lanes, split, warps, rounds, whole = shape.lanes, shape.split, shape.warps, shape.rounds, _whole(shape)
    words, floats = _staged(shape, form)
    per_block = shape.teams * rounds
    slots = 2 * split * per_block
    threads = shape.block
    half = head_dim // 2
    if stride != half or n != (heads + 2 * kv_heads) * head_dim:
        raise KernelError(f"{shape} does not fit {heads} + 2 x {kv_heads} heads of {head_dim}: rotation pairs are {half} apart")

    @cuda.jit
    def qkv(codes, scales_zeros, x, weight, eps, bias, cosines, sines, position, block_table, q, k_pages, v_pages):
        own_values = cuda.shared.array(words, uint32)
        own_pairs = cuda.shared.array(floats, float32)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if dependent:
            launch_dependents()
            _prefetch_block(codes, tid, block, k, stride, all_pairs, per_block, threads)
            wait_for_previous()
        factor = inverse_rms(x, partial, tid, k, eps, warps)
        round_vector(x, weight, factor, 1, own_values, own_pairs, tid, k, warps, form)
        cuda.syncthreads()
        block_pair_sums(
            codes, scales_zeros, own_values, own_pairs, sums, tid, block, n, k, group, stride, all_pairs,
            lanes, split, warps, rounds, whole, 1, form, unpacking,
        )
        cuda.syncthreads()
        pair = uint32(uint32(block * uint32(per_block)) + tid)
        if tid < uint32(per_block) and pair < uint32(all_pairs):
            y0, y1 = gathered(sums, tid, split)
            row = first_row(pair, stride)
            y0, y1 = float32(y0 + bias[row]), float32(y1 + bias[uint32(row + uint32(half))])
            head, i = uint32(row // uint32(head_dim)), uint32(row % uint32(head_dim))
            at = uint32(position[0])
            if head < uint32(heads + kv_heads):
                turn = uint32(uint32(at * uint32(half)) + i)
                c, s = cosines[turn], sines[turn]
                y0, y1 = float32(float32(y0 * c) - float32(y1 * s)), float32(float32(y1 * c) + float32(y0 * s))
            if head < uint32(heads):
                q[row] = y0
                q[uint32(row + uint32(half))] = y1
            else:
                page = block_table[uint32(at // uint32(page_size))]
                kv_head = uint32(uint32(head - uint32(heads)) % uint32(kv_heads))
                if page >= 0:
                    slot = uint32(uint32(uint32(page) * uint32(kv_heads)) + kv_head)
                    slot = uint32(uint32(slot * uint32(page_size)) + uint32(at % uint32(page_size)))
                    to = uint32(uint32(slot * uint32(head_dim)) + i)
                    if head < uint32(heads + kv_heads):
                        k_pages[to] = finite_half(y0)
                        k_pages[uint32(to + uint32(half))] = finite_half(y1)
                    else:
                        v_pages[to] = finite_half(y0)
                        v_pages[uint32(to + uint32(half))] = finite_half(y1)

    return qkv


@cuda.jit(device=True)
def finite_half(x):
    """A float as fp16 bits; what is too large becomes the largest finite number."""
    return uint16(floats_half2(max(min(x, float32(65504.0)), float32(-65504.0)), float32(0.0)))


@functools.cache
def make_gate_up(shape: Shape, form: int, unpacking: int = LOP3, dependent: int = 0):
    """RMSNorm, the gate and up projections and SwiGLU for one token, rounded for the down projection.

    Arguments of the kernel: codes, scales_zeros, x float32 [K], weight float32 [K], eps, values (the rounded vector of
    N / 2 as uint8 for int8, else uint16), pairs float32 [N / 64 * 2]. A block owns 32 pairs: one block of activations.
    """
    n, k, group, stride, all_pairs = shape.n, shape.k, shape.group, shape.stride, shape.pairs
    lanes, split, warps, rounds, whole = shape.lanes, shape.split, shape.warps, shape.rounds, _whole(shape)
    words, floats = _staged(shape, form)
    per_block = shape.teams * rounds
    slots = 2 * split * per_block
    threads = shape.block
    if per_block != BLOCK or 2 * stride != n:
        raise KernelError(f"{shape} has {per_block} pairs a block, expected {BLOCK} of a gate and its up, {n // 2} apart")

    @cuda.jit
    def gate_up(codes, scales_zeros, x, weight, eps, values, pairs):
        own_values = cuda.shared.array(words, uint32)
        own_pairs = cuda.shared.array(floats, float32)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if dependent:
            launch_dependents()
            _prefetch_block(codes, tid, block, k, stride, all_pairs, per_block, threads)
            wait_for_previous()
        factor = inverse_rms(x, partial, tid, k, eps, warps)
        round_vector(x, weight, factor, 1, own_values, own_pairs, tid, k, warps, form)
        cuda.syncthreads()
        block_pair_sums(
            codes, scales_zeros, own_values, own_pairs, sums, tid, block, n, k, group, stride, all_pairs,
            lanes, split, warps, rounds, whole, 1, form, unpacking,
        )
        cuda.syncthreads()
        if tid < uint32(32):
            gate, up = gathered(sums, tid, split)
            h = swiglu(gate, up)
            absmax = lanes_max(fabs(h))
            bits = round_bits(float32(h * block_factor(absmax, form)), form)
            total = lanes_sum(bits_value(bits, form), 32)
            at = uint32(uint32(block * uint32(32)) + tid)
            if form == INT8:
                values[at] = uint8(bits)
            else:
                values[at] = uint16(bits)
            if tid == uint32(0):
                scale = block_scale(absmax, form)
                pairs[uint32(block * uint32(2))] = scale
                pairs[uint32(uint32(block * uint32(2)) + uint32(1))] = float32(scale * total)

    return gate_up


@cuda.jit(device=True)
def swiglu(gate, up):
    """gate * sigmoid(gate) * up; for a very negative gate the exponential is infinite and the quotient 0."""
    return float32(divide(gate, float32(float32(1.0) + exp2(float32(gate * float32(-1.4426950408889634))))) * up)


@cuda.jit(device=True)
def lanes_max(value):
    """The largest of a warp's values, in every lane."""
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 16))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 8))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 4))
    value = fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 2))
    return fmax(value, cuda.shfl_xor_sync(ALL_LANES, value, 1))
