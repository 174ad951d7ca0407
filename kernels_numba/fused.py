"""The two GEMVs of a layer that do more than multiply: qkv (norm, bias, RoPE, KV append) and gate+up (norm, SwiGLU)."""

from __future__ import annotations

import functools

from numba import cuda, float32, uint8, uint16, uint32

from kernels_numba.activation import BLOCK, INT8, bits_value, block_factor, block_scale, lanes_absmax, round_bits
from kernels_numba.errors import KernelError
from kernels_numba.gemv import Shape, first_row, gathered, staged_pair_sums
from kernels_numba.instructions.arithmetic import divide, exp2, floats_half2
from kernels_numba.int4_dot import LOP3
from kernels_numba.paged_kv import finite
from kernels_numba.reduce import lanes_sum
from kernels_numba.staging import staged_size


@cuda.jit(device=True)
def finite_half(x):
    """A float as the fp16 bits that a page keeps."""
    return uint16(floats_half2(finite(x), float32(0.0)))


@cuda.jit(device=True)
def swiglu(gate, up):
    """gate * sigmoid(gate) * up; for a very negative gate the exponential is infinite and the quotient 0."""
    return float32(divide(gate, float32(float32(1.0) + exp2(float32(gate * float32(-1.4426950408889634))))) * up)


@functools.cache
def make_qkv(
    shape: Shape,
    form: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    unpacking: int = LOP3,
    dependent: int = 0,
):
    """RMSNorm, the q, k and v projections with bias, RoPE, and k and v appended to their pages, for one token.

    Arguments of the kernel: codes, scales_zeros, x float32 [K], weight float32 [K], eps, bias float32 [N],
    cosines and sines float32 [positions * head_dim / 2], position int32 [1], block_table int32, q float32
    [heads * head_dim], k_pages and v_pages as halves: uint16 [pages * kv_heads * page_size * head_dim]. A page of -1
    takes nothing.
    """
    n, k, stride, all_pairs, split, cut = shape.n, shape.k, shape.stride, shape.pairs, shape.split, shape.cut
    words, floats = staged_size(k, form)
    per_block = shape.per_block
    slots = 2 * split * per_block
    half = head_dim // 2
    if stride != half or n != (heads + 2 * kv_heads) * head_dim:
        raise KernelError(
            f"{shape} does not fit {heads} + 2 x {kv_heads} heads of {head_dim}: rotation pairs are {half} apart"
        )

    @cuda.jit
    def qkv(codes, scales_zeros, x, weight, eps, bias, cosines, sines, position, block_table, q, k_pages, v_pages):
        own_values = cuda.shared.array(words, uint32, alignment=16)
        own_pairs = cuda.shared.array(floats, float32, alignment=16)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32, alignment=16)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        staged_pair_sums(
            codes, scales_zeros, x, weight, eps, own_values, own_pairs, partial, sums, tid, block, cut,
            1, form, unpacking, dependent,
        )  # fmt: skip
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


@functools.cache
def make_gate_up(shape: Shape, form: int, unpacking: int = LOP3, dependent: int = 0):
    """RMSNorm, the gate and up projections and SwiGLU for one token, rounded for the down projection.

    Arguments of the kernel: codes, scales_zeros, x float32 [K], weight float32 [K], eps, values (the rounded vector of
    N / 2 as uint8 for int8, else uint16), pairs float32 [N / 64 * 2]. A warp rounds 32 pairs: one block of activations.
    """
    n, k, stride, all_pairs, split, cut = shape.n, shape.k, shape.stride, shape.pairs, shape.split, shape.cut
    words, floats = staged_size(k, form)
    per_block = shape.per_block
    slots = 2 * split * per_block
    if per_block % BLOCK or all_pairs % per_block or 2 * stride != n:
        raise KernelError(
            f"{shape} has {per_block} pairs a block, expected a multiple of {BLOCK} that divides all, "
            f"of a gate and its up, {n // 2} apart"
        )

    @cuda.jit
    def gate_up(codes, scales_zeros, x, weight, eps, values, pairs):
        own_values = cuda.shared.array(words, uint32, alignment=16)
        own_pairs = cuda.shared.array(floats, float32, alignment=16)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32, alignment=16)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        staged_pair_sums(
            codes, scales_zeros, x, weight, eps, own_values, own_pairs, partial, sums, tid, block, cut,
            1, form, unpacking, dependent,
        )  # fmt: skip
        if tid < uint32(per_block):  # whole warps
            gate, up = gathered(sums, tid, split)
            h = swiglu(gate, up)
            absmax = lanes_absmax(h)
            bits = round_bits(float32(h * block_factor(absmax, form)), form)
            total = lanes_sum(bits_value(bits, form), 32)
            at = uint32(uint32(block * uint32(per_block)) + tid)
            if form == INT8:
                values[at] = uint8(bits)
            else:
                values[at] = uint16(bits)
            if uint32(tid & uint32(31)) == uint32(0):
                scale, to = block_scale(absmax, form), uint32(at >> uint32(4))  # two floats for each 32
                pairs[to] = scale
                pairs[uint32(to + uint32(1))] = float32(scale * total)

    return gate_up
