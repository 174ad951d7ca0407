"""Memory on the simulator: ranges, alignment, reads before writes, shared, local and dynamic arrays, atomics."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from kernels_numba.instructions.memory import load_u32x4, shared_u32x4, store_u32x4, stream_u32x2
from kernels_numba.simulator.errors import InvalidLaunch, Misaligned, OutOfRange, SimulationError, UnwrittenRead
from tests.kernels.simulation import SITE, assert_one_line, simulate


@cuda.jit
def read_at(data, out, at):
    out[0] = data[at]


@cuda.jit
def write_at(data, at):
    data[at] = 1


@cuda.jit
def read_2d(data, out, i, j):
    out[0] = data[i, j]


@pytest.mark.parametrize("at", [8, 1000, -1, -8])
def test_indices_outside_an_array(at):
    data, out = np.zeros(8, np.float32), np.zeros(1, np.float32)
    for kernel, args in ((read_at, (data, out, at)), (write_at, (data, at))):
        with pytest.raises(OutOfRange) as caught:
            simulate(kernel, 1, 1, *args)
        wraps = "negative index, which numba wraps" if at < 0 else "index"
        assert_one_line(caught.value, f"index {at} is outside data of 8 float32", wraps, SITE, r"thread \(0, 0, 0\)")
        assert isinstance(caught.value, IndexError)
    assert not data.any()


@pytest.mark.parametrize(("i", "j"), [(2, 0), (0, 3), (-1, 0), (0, -1)])
def test_indices_outside_two_dimensions(i, j):
    data = np.zeros((2, 3), np.int32)
    with pytest.raises(OutOfRange, match=rf"index \({i}, {j}\) is outside data of \(2, 3\) int32"):
        simulate(read_2d, 1, 1, data, np.zeros(1, np.int32), i, j)


def test_a_float_index_and_an_empty_array_are_refused():
    with pytest.raises(OutOfRange, match=r"indexed by the float 1.5"):
        simulate(read_at, 1, 1, np.zeros(8, np.float32), np.zeros(1, np.float32), 1.5)
    with pytest.raises(OutOfRange, match="index 0 is outside data of 0 float32"):
        simulate(read_at, 1, 1, np.zeros(0, np.float32), np.zeros(1, np.float32), 0)


@cuda.jit
def vectors(data, out, at):
    a, b, c, d = load_u32x4(data, at)
    store_u32x4(out, at, d, c, b, a)


@cuda.jit
def pairs(data, out, at):
    out[0], out[1] = stream_u32x2(data, at)


def test_vector_accesses_are_aligned_and_inside():
    data, out = np.arange(16, dtype=np.uint32), np.zeros(16, np.uint32)
    simulate(vectors, 1, 1, data, out, 4)
    assert list(out[:8]) == [0, 0, 0, 0, 7, 6, 5, 4]
    with pytest.raises(Misaligned) as caught:
        simulate(vectors, 1, 1, data, out, 6)
    assert_one_line(caught.value, r"data\[6\] is not on a 16-byte boundary", SITE, "thread", "block")
    with pytest.raises(Misaligned, match="8-byte boundary"):
        simulate(pairs, 1, 1, data, out, 3)
    for at in (16, 14, -4):
        with pytest.raises(OutOfRange, match=rf"elements {at}\.\.{at + 3} are outside data of 16 uint32"):
            simulate(vectors, 1, 1, data, out, at)


@cuda.jit
def shared_vector(out, at):
    tile = cuda.shared.array(16, uint32)
    t = cuda.threadIdx.x
    tile[t] = t
    cuda.syncthreads()
    out[0], out[1], out[2], out[3] = shared_u32x4(tile, at)


def test_shared_vector_loads():
    out = np.zeros(4, np.uint32)
    simulate(shared_vector, 1, 16, out, 12)
    assert list(out) == [12, 13, 14, 15]
    with pytest.raises(Misaligned):
        simulate(shared_vector, 1, 16, out, 2)
    with pytest.raises(UnwrittenRead, match=r"uint32\[16\]\[8\] is read before it is written"):
        simulate(shared_vector, 1, 8, out, 8)


@cuda.jit
def unwritten(out, space):
    here = cuda.shared.array(4, float32)
    mine = cuda.local.array(4, float32)
    if space == 0:
        out[0] = here[3]
    elif space == 1:
        out[0] = mine[2]
    else:
        mine[1] = 5.0
        out[0] = mine[1]


def test_reads_before_writes(settings):
    out = np.zeros(1, np.float32)
    with pytest.raises(UnwrittenRead) as caught:
        simulate(unwritten, 1, 1, out, 0)
    assert_one_line(caught.value, r"the shared array float32\[4\]\[3\] is read before", SITE, "thread", "block")
    with pytest.raises(UnwrittenRead, match=r"the local array float32\[4\]\[2\]"):
        simulate(unwritten, 1, 1, out, 1)
    simulate(unwritten, 1, 1, out, 2)
    assert out[0] == 5
    settings.hardware = True
    simulate(unwritten, 1, 1, out, 0)
    assert np.isnan(out[0])  # garbage that shows


@cuda.jit
def second_block_reads(out):
    tile = cuda.shared.array(1, int32)
    if cuda.blockIdx.x == 0:
        tile[0] = 1
    out[cuda.blockIdx.x] = tile[0]


def test_shared_memory_does_not_survive_its_block():
    with pytest.raises(UnwrittenRead, match=r"block \(1, 0, 0\)"):
        simulate(second_block_reads, 2, 1, np.zeros(2, np.int32))


@cuda.jit
def one_line(out):
    a, b = cuda.shared.array(8, int32), cuda.shared.array(8, int32)
    t = cuda.threadIdx.x
    a[t] = t
    b[t] = 100 + t
    cuda.syncthreads()
    out[0, t] = a[7 - t]
    out[1, t] = b[7 - t]


def test_two_shared_arrays_on_one_line_are_two():
    out = np.zeros((2, 8), np.int32)
    simulate(one_line, 1, 8, out)
    assert np.array_equal(out, [7 - np.arange(8), 107 - np.arange(8)])


SIZE = (4, 8)


@cuda.jit
def shared_2d(out):
    tile = cuda.shared.array(SIZE, float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[y, x] = 10 * y + x
    cuda.syncthreads()
    row = tile[y]
    out[y, x] = row[7 - x]


def test_shared_arrays_of_two_dimensions_and_their_rows():
    out = np.zeros(SIZE, np.float32)
    simulate(shared_2d, 1, (8, 4), out)
    assert np.array_equal(out, 10 * np.arange(4)[:, None] + 7 - np.arange(8))


@cuda.jit
def dynamic(out):
    whole = cuda.shared.array(0, float32)
    front, back = whole[:8], whole[8:16]
    t = cuda.threadIdx.x
    front[t] = t
    back[t] = 50 + t
    cuda.syncthreads()
    out[t] = whole[15 - t] + front[t]


def test_dynamic_shared_memory_and_its_parts():
    out = np.zeros(8, np.float32)
    simulate(dynamic, 1, 8, out, shared=64)
    assert np.array_equal(out, 57 - np.arange(8) + np.arange(8))
    with pytest.raises(OutOfRange, match="dynamic shared array"):
        simulate(dynamic, 1, 8, out, shared=32)
    with pytest.raises(OutOfRange, match="outside the dynamic shared array float32"):
        simulate(dynamic, 1, 8, out)


def test_shared_memory_beyond_a_gpus(settings):
    settings.compute_capability = (7, 5)
    with pytest.raises(InvalidLaunch, match="100000 bytes .* 0 to 65536 at compute capability 7.5"):
        simulate(dynamic, 1, 8, np.zeros(8, np.float32), shared=100000)
    settings.compute_capability = (9, 0)
    simulate(dynamic, 1, 8, np.zeros(8, np.float32), shared=100000)
    with pytest.raises(InvalidLaunch, match="static shared memory: the limit is 49152"):
        simulate(too_much, 1, 1)


@cuda.jit
def too_much():
    cuda.shared.array(12289, float32)


@cuda.jit
def atomics(counts, top, low, old):
    t = cuda.grid(1)
    old[t] = cuda.atomic.add(counts, 0, 1)
    cuda.atomic.sub(counts, 1, t)
    cuda.atomic.max(top, 0, t % 7)
    cuda.atomic.min(low, 0, -t)
    cuda.atomic.or_(counts, 2, 1 << t)
    cuda.atomic.exch(counts, 3, 9)
    cuda.atomic.cas(counts, 4, 0, t + 1)
    cuda.atomic.inc(counts, 5, 3)


def test_atomics_give_the_old_value():
    counts, top, low = np.zeros(6, np.uint32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    old = np.zeros(20, np.int32)
    simulate(atomics, 2, 10, counts, top, low, old)
    assert list(counts) == [20, 2**32 - 190, 2**20 - 1, 9, 1, 0]
    assert sorted(old) == list(range(20))
    assert (top[0], low[0]) == (6, -19)


@cuda.jit
def strided_part(data, out):
    column = data[:, 0]
    out[0] = column[1]


def test_read_only_arrays_and_strided_parts():
    data = np.ones(4, np.float32)
    data.flags.writeable = False
    with pytest.raises(SimulationError, match="data is read-only"):
        simulate(write_at, 1, 1, data, 0)
    with pytest.raises(SimulationError, match="not contiguous"):
        simulate(strided_part, 1, 1, np.ones((2, 2), np.float32), np.zeros(1, np.float32))
