"""INT4 matrix times one vector: the kernel that reads 99 % of a token's bytes.

y[n] = sum over k of s * (q[n, k] - z) * x[k], with s and z per row and group. Spec: `dequantised @ x`.

A team of LANES * SPLIT lanes owns a pair of rows and walks along K together, 32 weights (16 bytes) a lane and step, so
that a warp's loads are whole lines. Rows come in pairs because what follows needs two outputs at once: RoPE elements i
and i + head_dim / 2, SwiGLU a gate and its up. SPLIT warps share a pair where rows are too few to fill the GPU.
Accumulation is float32; within a step of the int8 form it is an exact integer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels_numba.errors import KernelError
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous
from kernels_numba.int4_dot import CHUNK, LOP3, add_chunk, chunk_loads
from kernels_numba.reduce import lanes_sum
from kernels_numba.staging import inverse_rms, round_vector, staged_size

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
                f"a GEMV of {self.n} x {self.k} in groups of {self.group}: K must be a multiple of 128, "
                "groups 32, 64 or 128"
            )
        if 32 % self.lanes or self.warps % self.split or not 1 <= self.warps <= 32:
            raise KernelError(f"{self}: lanes must divide 32, and split the warps (at most 32)")
        if self.per_block > self.block:
            raise KernelError(f"{self}: a block owns {self.per_block} pairs, at most one a thread ({self.block})")

    @property
    def pairs(self) -> int:
        return -(-self.n // (2 * self.stride)) * self.stride

    @property
    def teams(self) -> int:
        return 32 // self.lanes * self.warps // self.split

    @property
    def grid(self) -> int:
        return -(-self.pairs // self.per_block)

    @property
    def block(self) -> int:
        return 32 * self.warps

    @property
    def per_block(self) -> int:
        """Pairs of a block."""
        return self.teams * self.rounds

    @property
    def cut(self) -> tuple[int, ...]:
        """What the device functions need, as one constant: n, k, group, stride, pairs, lanes, split, warps, rounds."""
        sizes = (self.n, self.k, self.group, self.stride, self.pairs)
        return (*sizes, self.lanes, self.split, self.warps, self.rounds)


@cuda.jit(device=True)
def first_row(pair, stride):
    """The first of the two rows of a pair; the second is `stride` further."""
    return uint32(uint32(uint32(pair // uint32(stride)) * uint32(2 * stride)) + uint32(pair % uint32(stride)))


@cuda.jit(device=True)
def place_of(tid, block, lanes, split, warps, rounds):
    """Where a thread stands: its place among the lanes of its team, the team's number, and the team's first pair."""
    lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
    member = uint32(uint32(uint32(warp % uint32(split)) * uint32(lanes)) + uint32(lane % uint32(lanes)))
    team = uint32(uint32(uint32(warp // uint32(split)) * uint32(32 // lanes)) + uint32(lane // uint32(lanes)))
    teams = uint32(32 // lanes * warps // split)
    return member, team, uint32(uint32(block * uint32(teams * uint32(rounds))) + team)


@cuda.jit(device=True)
def rows_of(pair, n, stride, all_pairs):
    """The two rows of a pair; pairs and rows that do not exist become the last that do."""
    row = first_row(min(pair, uint32(all_pairs - 1)), stride)
    return row, min(uint32(row + uint32(stride)), uint32(n - 1))


@cuda.jit(device=True)
def first_loads(codes, scales_zeros, tid, block, cut):
    """Asks for a thread's first chunk of weights, which needs no vector, before the vector is waited for."""
    n, k, group, stride, all_pairs, lanes, split, warps, rounds = cut
    member, team, pair = place_of(tid, block, lanes, split, warps, rounds)
    row0, row1 = rows_of(pair, n, stride, all_pairs)
    return chunk_loads(codes, scales_zeros, row0, row1, min(member, uint32(k // CHUNK - 1)), k, group, 1)


@cuda.jit(device=True)
def block_pair_sums(loaded, codes, scales_zeros, x, pairs, sums, tid, block, cut, in_shared, form, unpacking):
    """Every team's pairs, one after the other: leaves sums[2 * (split * pair of the block + part)], for two rows.

    The next chunk is always asked for before the one at hand (`loaded`, at first from `first_loads`) is used.
    """
    n, k, group, stride, all_pairs, lanes, split, warps, rounds = cut
    member, team, pair = place_of(tid, block, lanes, split, warps, rounds)
    teams, last = uint32(32 // lanes * warps // split), uint32(k // CHUNK - 1)
    steps = (k // CHUNK + lanes * split - 1) // (lanes * split)
    row0, row1 = rows_of(pair, n, stride, all_pairs)
    v, w, sz0, sz1 = loaded
    turn = uint32(0)
    while turn < uint32(rounds):  # counted in 32 bits, as `range` would not
        y0, y1 = float32(0.0), float32(0.0)
        chunk, step = member, uint32(0)
        while step < uint32(steps):
            following = uint32(chunk + uint32(lanes * split))
            if step == uint32(steps - 1):
                following = member
                pair = uint32(pair + teams)
                row0, row1 = rows_of(pair, n, stride, all_pairs)
            if step < uint32(steps - 1) or turn < uint32(rounds - 1):
                p, q, sz2, sz3 = chunk_loads(codes, scales_zeros, row0, row1, min(following, last), k, group, 0)
            else:
                p, q, sz2, sz3 = v, w, sz0, sz1
            if chunk <= last:
                y0, y1 = add_chunk(y0, y1, v, w, sz0, sz1, x, pairs, chunk, in_shared, form, unpacking)
            v, w, sz0, sz1 = p, q, sz2, sz3
            chunk, step = following, uint32(step + uint32(1))
        y0, y1 = lanes_sum(y0, lanes), lanes_sum(y1, lanes)
        if uint32(member % uint32(lanes)) == uint32(0):
            local = uint32(uint32(turn * teams) + team)
            at = uint32(uint32(uint32(local * uint32(split)) + uint32(member // uint32(lanes))) * uint32(2))
            sums[at] = y0
            sums[uint32(at + uint32(1))] = y1
        turn = uint32(turn + uint32(1))


@cuda.jit(device=True)
def staged_pair_sums(
    codes,
    scales_zeros,
    x,
    weight,
    eps,
    values,
    pairs,
    partial,
    sums,
    tid,
    block,
    cut,
    normed,
    form,
    unpacking,
    dependent,
):
    """`block_pair_sums` of a float32 vector that the block makes ready itself, in the shared `values` and `pairs`."""
    n, k, group, stride, all_pairs, lanes, split, warps, rounds = cut
    loaded = first_loads(codes, scales_zeros, tid, block, cut)
    if dependent:
        wait_for_previous()
    factor = float32(1.0)
    if normed:
        factor = inverse_rms(x, partial, tid, k, eps, warps)
    round_vector(x, weight, factor, normed, values, pairs, tid, k, warps, form)
    cuda.syncthreads()
    block_pair_sums(loaded, codes, scales_zeros, values, pairs, sums, tid, block, cut, 1, form, unpacking)
    if dependent:
        launch_dependents()
    cuda.syncthreads()


@cuda.jit(device=True)
def rounded_pair_sums(codes, scales_zeros, values, pairs, sums, tid, block, cut, form, unpacking, dependent):
    """`block_pair_sums` of a vector that a kernel before has rounded."""
    loaded = first_loads(codes, scales_zeros, tid, block, cut)
    if dependent:
        wait_for_previous()
    block_pair_sums(loaded, codes, scales_zeros, values, pairs, sums, tid, block, cut, 0, form, unpacking)
    if dependent:
        launch_dependents()
    cuda.syncthreads()


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

    Arguments of the kernel: codes uint32 [N * K / 8], scales_zeros uint32 [N * K / group], values and pairs (the
    rounded vector, for ROUNDED), raw float32 [K], weight float32 [K] and eps (RMSNorm's, for NORMED), y float32 [N].
    What a source does not use may be any array of its dtype.
    """
    n, k, stride, all_pairs, split, cut = shape.n, shape.k, shape.stride, shape.pairs, shape.split, shape.cut
    staged = int(source != ROUNDED)
    normed = int(source == NORMED)
    words, floats = staged_size(k, form) if staged else (4, 2)
    per_block = shape.per_block
    slots = 2 * split * per_block

    @cuda.jit
    def gemv(codes, scales_zeros, values, pairs, raw, weight, eps, y):
        own_values = cuda.shared.array(words, uint32, alignment=16)
        own_pairs = cuda.shared.array(floats, float32, alignment=16)
        partial = cuda.shared.array(32, float32)
        sums = cuda.shared.array(slots, float32, alignment=16)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if staged:
            staged_pair_sums(
                codes, scales_zeros, raw, weight, eps, own_values, own_pairs, partial, sums, tid, block, cut,
                normed, form, unpacking, dependent,
            )  # fmt: skip
        else:
            rounded_pair_sums(codes, scales_zeros, values, pairs, sums, tid, block, cut, form, unpacking, dependent)
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
