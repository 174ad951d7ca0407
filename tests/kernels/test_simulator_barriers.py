"""Barriers on the simulator: arrivals counted, divergence named, hardware mode runs on, deadlocks explained."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint64

from kernels_numba.instructions.asynchronous import (
    copy_bulk,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from kernels_numba.instructions.barriers import barrier_arrive, barrier_sync
from kernels_numba.simulator.errors import Deadlock, DivergentBarrier, SimulationError, UnwrittenRead
from tests.kernels.simulation import SITE, assert_one_line, simulate


@cuda.jit
def divergent(out):
    t = cuda.threadIdx.x
    if t < 32:
        cuda.syncthreads()  # the first warp's
    else:
        cuda.syncthreads()  # everybody else's
    out[t] = t


@cuda.jit
def early_leave(out):
    t = cuda.threadIdx.x
    if t >= 40:
        return
    cuda.syncthreads()
    out[t] = t


@cuda.jit
def late_leave(out):
    t = cuda.threadIdx.x
    if t < 40:
        cuda.syncthreads()
    out[t] = t


@cuda.jit(device=True)
def meet():
    cuda.syncthreads()


@cuda.jit
def divergent_calls(out):
    t = cuda.threadIdx.x
    if t < 32:
        meet()  # by the first warp
    else:
        meet()  # by the second
    out[t] = t


@cuda.jit
def same_call(out):
    t = cuda.threadIdx.x
    for _ in range(3):
        meet()
    out[t] = t


def test_one_phase_at_two_lines_names_both_lines_and_threads():
    with pytest.raises(DivergentBarrier) as caught:
        simulate(divergent, 1, 64, np.zeros(64, np.int32))
    assert_one_line(
        caught.value,
        r"divergent:\d+ `cuda.syncthreads\(\)  # the first warp's`",
        r"divergent:\d+ `cuda.syncthreads\(\)  # everybody else's`",
        r"\(0, 0, 0\)",
        r"\(32, 0, 0\)",
        r"block \(0, 0, 0\)",
    )


@pytest.mark.parametrize("kernel", [early_leave, late_leave])
def test_waiting_for_threads_that_left_is_refused(kernel):
    with pytest.raises(DivergentBarrier, match="left") as caught:
        simulate(kernel, 1, 64, np.zeros(64, np.int32))
    assert_one_line(caught.value, r"`cuda.syncthreads\(\)`", r"thread \(\d+, 0, 0\)", "block")


@pytest.mark.parametrize("kernel", [divergent, early_leave, late_leave, divergent_calls])
def test_hardware_mode_counts_arrivals_and_runs_on(kernel, settings):
    settings.hardware = True
    out = np.full(64, -1, np.int32)
    simulate(kernel, 1, 64, out)
    expected = np.where(np.arange(64) < (40 if kernel is early_leave else 64), np.arange(64), -1)
    assert np.array_equal(out, expected)


def test_a_barrier_inside_a_device_function_is_told_apart_by_its_calls():
    with pytest.raises(DivergentBarrier) as caught:
        simulate(divergent_calls, 1, 64, np.zeros(64, np.int32))
    assert_one_line(caught.value, r"divergent_calls:\d+ `meet\(\)  # by the first warp`", "# by the second`")
    out = np.zeros(64, np.int32)
    simulate(same_call, 1, 64, out)
    assert np.array_equal(out, np.arange(64))


@cuda.jit
def skipped_barrier(out, idle):
    """Warp 0 sums what the others leave; `idle` warps skip their barrier, so warp 0 passes it too early."""
    part = cuda.shared.array(96, float32)
    t = cuda.threadIdx.x
    part[t] = float32(0.0)
    cuda.syncthreads()
    if t >= 96 - 32 * idle:
        for _ in range(2):
            part[t] = float32(1.0)
    else:
        part[t] = float32(1.0)
        cuda.syncthreads()  # the workers'
    cuda.syncthreads()  # before the merge
    if t == 0:
        total = float32(0.0)
        for k in range(96):
            total += part[k]
        out[0] = total
    part[t] = float32(-1.0)


def test_a_skipped_barrier_is_named_and_gives_wrong_numbers_in_hardware_mode(settings):
    out = np.zeros(1, np.float32)
    simulate(skipped_barrier, 1, 96, out, 0)
    assert out[0] == 96
    with pytest.raises(DivergentBarrier) as caught:
        simulate(skipped_barrier, 1, 96, out, 1)
    assert_one_line(caught.value, "# the workers'`", "# before the merge`")
    settings.hardware, settings.warp_order = True, "reverse"
    simulate(skipped_barrier, 1, 96, out, 1)
    assert np.isfinite(out[0])
    assert out[0] != 96


@cuda.jit
def votes(out, data):
    t = cuda.threadIdx.x
    out[0, t] = cuda.syncthreads_count(data[t] > 3)
    out[1, t] = cuda.syncthreads_and(data[t] > 3)
    out[2, t] = cuda.syncthreads_or(data[t] > 3)


@pytest.mark.parametrize("over", [0, 1, 39, 40])
def test_voting_barriers(over):
    data = np.where(np.arange(40) < over, 9, 0).astype(np.int32)
    out = np.full((3, 40), -1, np.int32)
    simulate(votes, 1, 40, out, data)
    assert np.array_equal(out, np.array([[over], [over == 40], [over > 0]]) * np.ones((1, 40), np.int32))


@cuda.jit
def named(out):
    """A consumer warp waits until a producer warp has arrived; they meet at different lines."""
    box = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    if t < 32:
        barrier_sync(1, 64)
        out[t] = box[t]
    else:
        box[t - 32] = 100 + t
        barrier_arrive(1, 64)


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
def test_named_barriers_are_met_from_different_lines(order, settings):
    settings.warp_order = order
    out = np.zeros(32, np.int32)
    simulate(named, 2, 64, out)
    assert np.array_equal(out, 132 + np.arange(32))


@cuda.jit
def named_twice(count, other):
    if cuda.threadIdx.x < 32:
        barrier_sync(2, count)
    else:
        barrier_sync(2, other)


def test_named_barriers_refuse_counts_that_hardware_refuses():
    with pytest.raises(DivergentBarrier, match="expects 64 threads"):
        simulate(named_twice, 1, 64, 64, 96)
    with pytest.raises(SimulationError, match="multiples of 32"):
        simulate(named_twice, 1, 64, 40, 40)


def test_a_deadlock_says_where_each_group_waits():
    with pytest.raises(Deadlock) as caught:
        simulate(named_twice, 1, 64, 96, 96)
    assert_one_line(caught.value, f"named barrier 2 at {SITE}", r"\(0, 0, 0\).* and 29 more", "block")


@cuda.jit
def waits_twice():
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        barrier_sync(3, 64)


def test_a_deadlock_between_two_kinds_of_barrier_names_both():
    with pytest.raises(Deadlock) as caught:
        simulate(waits_twice, 1, 64)
    assert_one_line(caught.value, f"syncthreads at {SITE}", f"named barrier 3 at {SITE}")


@cuda.jit
def ring(source, out, rounds):
    """A producer thread brings 16 floats a round by bulk copy; a consumer warp doubles them."""
    tile = cuda.shared.array(16, float32)
    gates = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(gates, 0, 1)
        mbarrier_init(gates, 1, 32)
    cuda.syncthreads()
    if t == 32:
        for r in range(rounds):
            if r > 0:
                mbarrier_wait(gates, 1, (r - 1) & 1)
            mbarrier_arrive_expect(gates, 0, 64)
            copy_bulk(tile, 0, source, 16 * r, 64, gates, 0)
    elif t < 32:
        for r in range(rounds):
            mbarrier_wait(gates, 0, r & 1)
            if t < 16:
                out[16 * r + t] = 2 * tile[t]
            mbarrier_arrive(gates, 1)


@pytest.mark.parametrize("order", ["forward", "reverse", 1])
def test_mbarriers_and_bulk_copies_pass_a_ring(order, settings, rng):
    settings.warp_order = order
    source = rng.standard_normal(80).astype(np.float32)
    out = np.full(80, np.nan, np.float32)
    simulate(ring, 1, 64, source, out, 5)
    assert np.array_equal(out, 2 * source)


@cuda.jit
def unwaited(source, out):
    tile = cuda.shared.array(16, float32)
    gates = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(gates, 0, 1)
        mbarrier_arrive_expect(gates, 0, 64)
        copy_bulk(tile, 0, source, 0, 64, gates, 0)
    cuda.syncthreads()
    out[t] = tile[t]


def test_a_bulk_copy_that_nobody_waited_for_has_not_landed(settings):
    source, out = np.ones(16, np.float32), np.zeros(16, np.float32)
    with pytest.raises(UnwrittenRead, match=r"float32\[16\]"):
        simulate(unwaited, 1, 16, source, out)
    settings.hardware = True
    simulate(unwaited, 1, 16, source, out)
    assert not np.any(out == 1)


@cuda.jit
def mbarrier_misuse(what):
    gates = cuda.shared.array(1, uint64)
    if what > 0:
        mbarrier_init(gates, 0, 2)
    if what == 1:
        mbarrier_wait(gates, 0, 0)
    mbarrier_arrive(gates, 0)


def test_mbarriers_need_init_and_enough_arrivals():
    with pytest.raises(SimulationError, match="before mbarrier_init"):
        simulate(mbarrier_misuse, 1, 1, 0)
    with pytest.raises(Deadlock, match="mbarrier_wait"):
        simulate(mbarrier_misuse, 1, 1, 1)


@cuda.jit
def missing_barrier(out):
    """Reads the neighbour's element without a barrier: right only when that warp ran before."""
    tile = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    tile[t] = t
    if t >= 32:
        out[t] = tile[t - 32]


def test_other_warp_orders_catch_a_missing_barrier(settings):
    out = np.zeros(128, np.int32)
    simulate(missing_barrier, 1, 128, out)
    assert np.array_equal(out[32:], np.arange(96))  # lockstep in forward order hides it
    settings.warp_order = "reverse"
    with pytest.raises(UnwrittenRead):
        simulate(missing_barrier, 1, 128, out)
    caught = 0
    for seed in range(5):
        settings.warp_order = seed
        try:
            simulate(missing_barrier, 1, 128, out)
        except UnwrittenRead:
            caught += 1
    assert caught >= 4  # a shuffle of 4 warps leaves the order forward once in 24


@cuda.jit
def order_of_arrival(out, turn):
    if cuda.laneid == 0:
        out[turn[0]] = cuda.threadIdx.x // 32
        turn[0] += 1


def test_warp_orders(settings):
    def arrivals(order):
        settings.warp_order = order
        out = np.zeros(8, np.int32)
        simulate(order_of_arrival, 1, 256, out, np.zeros(1, np.int32))
        return list(out)

    assert arrivals("forward") == list(range(8))
    assert arrivals("reverse") == list(range(8))[::-1]
    assert arrivals(7) == arrivals(7)
    assert sorted(arrivals(7)) == list(range(8))
    assert len({tuple(arrivals(seed)) for seed in range(6)}) > 1
    with pytest.raises(SimulationError, match="'backwards'"):
        arrivals("backwards")
