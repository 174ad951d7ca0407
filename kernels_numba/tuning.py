"""How a GEMV is cut into blocks, from its shape and the size of the GPU."""

from __future__ import annotations

from kernels_numba.gemv import Shape
from kernels_numba.int4_dot import CHUNK

WARPS = 8
THREADS_PER_MULTIPROCESSOR = 768  # enough loads in flight to hide the memory's latency


def choose(n: int, k: int, group: int, stride: int = 1, multiprocessors: int = 1, pairs_per_block: int = 0) -> Shape:
    """The shape of a GEMV of N x K, rows paired `stride` apart; pairs_per_block fixes how many pairs a block owns.

    Lanes: as many as divide the steps along K evenly. Split: more warps a pair until the GPU is full.
    Rounds: several pairs a team when there are more blocks than the GPU needs, since each block makes the vector ready.
    """
    if multiprocessors == 1:
        return _for_simulator(n, k, group, stride, pairs_per_block)
    chunks = k // CHUNK
    lanes = next(width for width in (32, 16, 8, 4) if chunks % width == 0)
    pairs = -(-n // (2 * stride)) * stride
    wanted = multiprocessors * THREADS_PER_MULTIPROCESSOR
    split = 1
    while split < WARPS and pairs * lanes * split < wanted and chunks >= 4 * lanes * split:
        split *= 2
    warps = min(WARPS, max(split, -(-pairs * lanes * split // 32)))
    warps = 1 << (warps - 1).bit_length()
    if pairs_per_block:
        while 32 // lanes * warps // split > pairs_per_block:
            warps //= 2
        return Shape(n, k, group, stride, lanes, split, warps, pairs_per_block // (32 // lanes * warps // split))
    teams = 32 // lanes * warps // split
    rounds = max(1, min(8, 32 * warps // teams, pairs // (teams * 4 * multiprocessors)))
    while pairs % (teams * rounds) and rounds > 1:
        rounds -= 1
    return Shape(n, k, group, stride, lanes, split, warps, rounds)


def _for_simulator(n: int, k: int, group: int, stride: int, pairs_per_block: int) -> Shape:
    """A lane a pair: every lane has work and none waits for another, which is what costs time there."""
    warps = 4 if pairs_per_block else min(4, -(-n // 64))
    return Shape(n, k, group, stride, lanes=1, split=1, warps=warps)
