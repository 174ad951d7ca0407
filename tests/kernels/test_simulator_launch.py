"""Launches on the simulator: arguments, options, limits, errors that leave it usable, interrupts."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from numba import cuda, float32

from kernels_numba import simulator_benchmark, stage
from kernels_numba.simulator.errors import InvalidLaunch, SimulationError
from tests.kernels.simulation import SITE, assert_one_line, simulate

needs_sim = pytest.mark.skipif(stage.name != "sim", reason="launches by kernel[...] run on the GPU here")


@cuda.jit
def twice(x, out):
    t = cuda.grid(1)
    if t < x.size:
        out[t] = 2 * x[t]


@cuda.jit
def indices(out):
    x, y, z = cuda.grid(3)
    t, b, d, g = cuda.threadIdx, cuda.blockIdx, cuda.blockDim, cuda.gridDim
    at = (t.x + d.x * (t.y + d.y * t.z)) + d.x * d.y * d.z * (b.x + g.x * (b.y + g.y * b.z))
    out[at, 0], out[at, 1], out[at, 2] = x, y, z
    out[at, 3] = cuda.gridsize(1)


def test_indices_of_three_dimensions():
    out = np.full((3 * 2 * 2 * 4 * 2 * 3, 4), -1, np.int32)
    simulate(indices, (3, 2, 2), (4, 2, 3), out)
    seen = {tuple(row[:3]) for row in out}
    assert seen == {(x, y, z) for x in range(12) for y in range(4) for z in range(6)}
    assert np.all(out[:, 3] == 12)


def test_arrays_that_are_not_contiguous(rng):
    wide = rng.standard_normal((64, 2)).astype(np.float32)
    out = np.zeros((64, 3), np.float32)
    simulate(twice, 1, 64, wide[:, 1], out[:, 2])
    assert np.array_equal(out[:, 2], 2 * wide[:, 1])
    assert not out[:, :2].any()


@cuda.jit
def increment(a, b):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    b[y, x] = a[y, x] + 1


def test_the_same_array_twice_is_one_array(rng):
    start = np.asfortranarray(rng.standard_normal((4, 5)))
    both = start.copy(order="F")
    simulate(increment, 1, (5, 4), both, both)
    assert np.array_equal(both, start + 1)


@needs_sim
def test_device_arrays_and_transfer_hints(rng):
    x = rng.standard_normal(40).astype(np.float32)
    on_device, result = cuda.to_device(x), cuda.device_array(40, np.float32)
    twice[2, 32](on_device, result)
    assert np.array_equal(result.copy_to_host(), 2 * x)
    twice[2, 32](on_device[8:], result[:32])
    assert np.array_equal(result.copy_to_host()[:32], 2 * x[8:])
    out, both = np.zeros(40, np.float32), x.copy()
    twice[2, 32](cuda.In(x), cuda.Out(out))
    twice[2, 32](cuda.InOut(both), cuda.InOut(both))
    assert np.array_equal(out, 2 * x)
    assert np.array_equal(both, 2 * x)
    stream = cuda.stream()
    twice[2, 32, stream](x, out)
    stream.synchronize()
    assert np.array_equal(out, 2 * x)


@needs_sim
@pytest.mark.parametrize("count", [1, 100, 129, 1000])
def test_forall_covers_every_element(count):
    x, out = np.arange(count, dtype=np.float32), np.zeros(count, np.float32)
    twice.forall(count)(x, out)
    assert np.array_equal(out, 2 * x)
    twice.forall(count, 32)(out, x)
    assert np.array_equal(x, 2 * out)


@pytest.mark.parametrize(
    "options",
    [
        {"max_registers": 32},
        {"lineinfo": True},
        {"launch_bounds": (128, 2)},
        {"fastmath": True, "opt": True},
        {"debug": False, "lineinfo": False},
    ],
)
def test_options_that_only_a_gpu_knows(options):
    @cuda.jit(**options)
    def kernel(out):
        out[cuda.grid(1)] = 7

    @cuda.jit("void(int32[:])", **options)
    def typed(out):
        out[cuda.grid(1)] = 8

    if stage.name == "gpu" and not stage.has_device:
        pytest.skip("an eager signature compiles for the GPU at hand")
    out = np.zeros(4, np.int32)
    simulate(kernel, 1, 4, out)
    assert np.all(out == 7)
    simulate(typed, 1, 4, out)
    assert np.all(out == 8)


@cuda.jit
def scalars(out, i, f, flag, pair):
    out[0] = i + f
    out[1] = 1 if flag else 0
    out[2] = pair[0][0] + pair[1]
    out[3] = f / 0.0


def test_scalar_and_tuple_arguments():
    out = np.zeros(4)
    simulate(scalars, 1, 1, out, np.int32(4), 0.5, True, (np.array([10.0]), 3))
    assert list(out) == [4.5, 1, 13, np.inf]


@pytest.mark.parametrize(
    ("grid", "block", "what"),
    [
        (1, 1025, "1025 threads"),
        (1, (32, 33), "1056 threads"),
        (1, 0, "0 threads"),
        (1, (1, 1, 65), "z at most 64"),
        (0, 32, "grid"),
        ((1, 65536), 32, "grid"),
    ],
)
def test_launches_that_no_gpu_accepts(grid, block, what):
    with pytest.raises(InvalidLaunch, match=what):
        simulate(twice, grid, block, np.zeros(1), np.zeros(1))


def test_wrong_numbers_of_arguments_and_no_kernel():
    with pytest.raises(TypeError, match="twice takes 2 arguments, 1 were given"):
        simulate(twice, 1, 1, np.zeros(1))
    with pytest.raises(TypeError, match="is no cuda.jit kernel"):
        stage.simulate(len)


@needs_sim
def test_a_kernel_called_without_a_configuration():
    with pytest.raises(TypeError, match=r"twice needs a grid and a block: twice\[blocks, threads\]"):
        twice(np.zeros(1), np.zeros(1))


@cuda.jit
def fails_late(out, why):
    tile = cuda.shared.array(64, float32)
    t = cuda.grid(1)
    tile[cuda.threadIdx.x] = t
    cuda.syncthreads()
    if t == 100:
        if why == 0:
            out[10_000] = 1
        else:
            raise ValueError("the reader's own")
    cuda.syncthreads()
    out[t] = tile[63 - cuda.threadIdx.x]


def assert_usable():
    out = np.zeros(192, np.float32)
    simulate(fails_late, 1, 64, out[:64], 0)
    assert np.array_equal(out[:64], 63 - np.arange(64))
    x = np.arange(1024, dtype=np.float32)
    out = np.zeros(1024, np.float32)
    simulate(twice, 1, 1024, x, out)
    assert np.array_equal(out, 2 * x)


def test_an_error_names_line_thread_and_block_and_leaves_the_machine_usable():
    for _ in range(3):
        with pytest.raises(SimulationError) as caught:
            simulate(fails_late, 3, 64, np.zeros(192, np.float32), 0)
        assert_one_line(caught.value, SITE, r"thread \(36, 0, 0\)", r"block \(1, 0, 0\)", "10000 is outside out of 192")
        assert_usable()


def test_a_readers_own_exception_keeps_its_type_and_gets_a_note():
    with pytest.raises(ValueError, match="the reader's own") as caught:
        simulate(fails_late, 3, 64, np.zeros(192, np.float32), 1)
    (note,) = caught.value.__notes__
    assert_one_line(SimulationError(note), SITE, r"thread \(36, 0, 0\)", r"block \(1, 0, 0\)")
    assert_usable()


@cuda.jit
def endless():
    while cuda.threadIdx.x < 2000:
        cuda.syncthreads()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.parametrize("delay", [0.02, 0.051, 0.13])
def test_ctrl_c_ends_a_kernel_that_never_would(delay):
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        with pytest.raises(KeyboardInterrupt):
            simulate(endless, 1, 256)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert_usable()


@cuda.jit
def launches_another(out):
    twice[1, 1](out, out)


@needs_sim
def test_a_kernel_cannot_launch_a_kernel():
    with pytest.raises((InvalidLaunch, TypeError)):
        simulate(launches_another, 1, 1, np.zeros(1))
    assert_usable()


def test_launches_from_several_threads_take_turns():
    failures = []

    def work(seed):
        x = np.full(256, seed, np.float32)
        out = np.zeros(256, np.float32)
        try:
            for _ in range(5):
                simulate(fails_late, 1, 64, np.zeros(64, np.float32), 0)
                simulate(twice, 4, 64, x, out)
                assert np.array_equal(out, 2 * x)
        except BaseException as error:  # reported below, in the test's own thread
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert_usable()


@needs_sim
def test_the_benchmarks_kernel_takes_well_under_what_numbas_executor_takes():
    assert simulator_benchmark.seconds(3) < 4  # numba's executor: 13 to 20 s; this one 0.2 s on an idle machine
