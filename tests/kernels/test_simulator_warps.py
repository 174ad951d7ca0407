"""Warp operations on the simulator: collective, masks checked, partial last warps."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from kernels_numba.instructions.tensor import mma_f16_k8
from kernels_numba.simulator.errors import Deadlock, DivergentWarp, SimulationError
from tests.kernels.simulation import SITE, assert_one_line, simulate

FULL = 0xFFFFFFFF


@cuda.jit
def shuffles(data, out, by):
    t = cuda.grid(1)
    v = data[t]
    out[0, t] = cuda.shfl_sync(FULL, v, by)
    out[1, t] = cuda.shfl_xor_sync(FULL, v, by)
    out[2, t] = cuda.shfl_up_sync(FULL, v, by)
    out[3, t] = cuda.shfl_down_sync(FULL, v, by)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32, np.float64])
@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
def test_shuffles(dtype, by, rng):
    data = (rng.standard_normal(64) * 1000).astype(np.int64).astype(dtype)
    out = np.zeros((4, 64), dtype)
    simulate(shuffles, 2, 32, data, out, by)
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    sources = [
        np.full(64, by),
        lane ^ by,
        np.where(lane >= by, lane - by, lane),
        np.where(lane + by < 32, lane + by, lane),
    ]
    assert np.array_equal(out, np.array([data[warp + s] for s in sources]))


@cuda.jit
def asks(data, out):
    t = cuda.threadIdx.x
    v = data[t]
    out[7, t] = cuda.activemask()
    out[0, t] = cuda.all_sync(FULL, v > 2)
    out[1, t] = cuda.any_sync(FULL, v > 2)
    out[2, t] = cuda.eq_sync(FULL, v > 2)
    out[3, t] = cuda.ballot_sync(FULL, v > 2)
    out[4, t] = cuda.match_any_sync(FULL, v)
    mask, same = cuda.match_all_sync(FULL, v)
    out[5, t], out[6, t] = mask, same


@pytest.mark.parametrize("threads", [1, 8, 32, 40])
@pytest.mark.parametrize("top", [1, 2, 5])
def test_votes_and_matches_with_a_partial_last_warp(threads, top, rng):
    data = rng.integers(4 - top, 4 if top > 1 else 5, threads).astype(np.int32)
    data = np.full(threads, 7, np.int32) if top == 1 else data
    out = np.zeros((8, threads), np.uint32)
    simulate(asks, 1, threads, data, out)
    for first in range(0, threads, 32):
        values = data[first : first + 32]
        bits = lambda flags: int(sum(1 << k for k, f in enumerate(flags) if f))  # noqa: E731
        here = out[:, first : first + 32]
        over = values > 2
        assert np.all(here[0] == over.all())
        assert np.all(here[1] == over.any())
        assert np.all(here[2] == (over.all() or not over.any()))
        assert np.all(here[3] == bits(over))
        assert list(here[4]) == [bits(values == v) for v in values]
        equal = len(set(values)) == 1
        assert np.all(here[5] == (FULL if equal else 0))
        assert np.all(here[6] == equal)
        assert np.all(here[7] == bits(np.ones(len(values))))


@cuda.jit
def half_mask(out):
    t = cuda.threadIdx.x
    if t < 16:
        out[t] = cuda.shfl_xor_sync(0xFFFF, t, 8)
    else:
        out[t] = cuda.shfl_sync(0xFFFF0000, t, 16)


def test_disjoint_masks_meet_at_different_lines():
    out = np.zeros(32, np.int32)
    simulate(half_mask, 1, 32, out)
    assert np.array_equal(out, np.where(np.arange(32) < 16, np.arange(32) ^ 8, 16))


@cuda.jit
def two_lines(out):
    t = cuda.threadIdx.x
    if t < 8:
        out[t] = cuda.shfl_sync(FULL, t, 0)  # eight lanes
    else:
        out[t] = cuda.shfl_sync(FULL, t, 0)  # the others


@cuda.jit
def two_operations(out):
    t = cuda.threadIdx.x
    if t < 8:
        out[t] = cuda.shfl_sync(FULL, t, 0)
    else:
        cuda.syncwarp()


@cuda.jit
def unnamed_lane(out):
    out[cuda.threadIdx.x] = cuda.ballot_sync(0xF, 1)


@cuda.jit
def one_left(out):
    t = cuda.threadIdx.x
    if t == 5:
        return
    out[t] = cuda.shfl_sync(FULL, t, 0)


@cuda.jit
def never_comes():
    if cuda.threadIdx.x == 0:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


def test_divergent_warp_operations_are_named():
    out = np.zeros(32, np.int32)
    with pytest.raises(DivergentWarp) as caught:
        simulate(two_lines, 1, 32, out)
    assert_one_line(caught.value, "# eight lanes`", "# the others`", "warp 0", "lane 8", "block")
    with pytest.raises(DivergentWarp) as caught:
        simulate(two_operations, 1, 32, out)
    assert_one_line(caught.value, f"shfl_sync at {SITE}", f"syncwarp at {SITE}")
    with pytest.raises(DivergentWarp, match="lane 4 calls ballot_sync with the mask 0x0000000f") as caught:
        simulate(unnamed_lane, 1, 32, out)
    assert_one_line(caught.value, SITE, r"thread \(4, 0, 0\)")
    with pytest.raises(DivergentWarp, match="lanes 0x00000020 of warp 0, which left"):
        simulate(one_left, 1, 32, out)
    with pytest.raises(Deadlock) as caught:
        simulate(never_comes, 1, 32)
    assert_one_line(caught.value, f"syncthreads at {SITE}", f"syncwarp at {SITE}")


def test_hardware_mode_lets_lanes_meet_across_lines_and_leave(settings):
    settings.hardware = True
    out = np.full(32, -1, np.int32)
    simulate(two_lines, 1, 32, out)
    assert np.all(out == 0)
    out[:] = -1
    simulate(one_left, 1, 32, out)
    assert np.array_equal(out, np.where(np.arange(32) == 5, -1, 0))


@cuda.jit
def reduction(data, out):
    total = data[cuda.grid(1)]
    for k in range(5):
        total += cuda.shfl_xor_sync(FULL, total, 16 >> k)
    if cuda.laneid == 0:
        out[cuda.grid(1) // 32] = total


@pytest.mark.parametrize("order", ["forward", "reverse", 2])
def test_a_butterfly_reduction_keeps_float32(order, settings, rng):
    settings.warp_order = order
    data = rng.standard_normal(128).astype(np.float32)
    out = np.zeros(4, np.float32)
    simulate(reduction, 2, 64, data, out)
    tree = data.reshape(4, 32)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    assert np.array_equal(out, tree[:, 0])  # the same additions in the same order, rounded to float32 each


@cuda.jit
def exchange(out):
    box = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    box[t] = t
    cuda.syncwarp()
    out[t] = box[31 - t]


def test_syncwarp_orders_shared_memory():
    out = np.zeros(32, np.int32)
    simulate(exchange, 1, 32, out)
    assert np.array_equal(out, 31 - np.arange(32))


@cuda.jit
def short_mma():
    mma_f16_k8(uint32(0), uint32(0), uint32(0), float32(0.0), float32(0.0), float32(0.0), float32(0.0))


def test_a_matrix_instruction_needs_a_full_warp():
    with pytest.raises(SimulationError, match="met 8 lanes: it needs all 32"):
        simulate(short_mma, 1, 8)
