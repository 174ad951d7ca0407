"""Where a kernel's names may come from: modules, closures, aliases, imports inside functions, cells run again."""

from __future__ import annotations

import linecache

import numba
import numba as nb
import numpy as np
import pytest
from numba import cuda, float32, int32, types
from numba.cuda import atomic, blockIdx, grid, syncthreads, threadIdx

import tests.kernels.named_parts
from kernels_numba.instructions import arithmetic
from kernels_numba.instructions.asynchronous import copy_async_commit
from kernels_numba.simulator.errors import SimulationError
from tests.kernels import named_parts as parts
from tests.kernels.named_parts import neighbour, plain, scaled
from tests.kernels.named_parts import scaled as renamed
from tests.kernels.simulation import assert_one_line, simulate

CONSTANTS = np.array([5, 6, 7], np.int32)
HALF = 0.5


@cuda.jit
def by_name(out):
    tile = cuda.shared.array(8, int32)
    t = threadIdx.x
    tile[t] = t
    syncthreads()
    atomic.add(out, grid(1), tile[7 - t] + 100 * blockIdx.x)


def test_names_imported_from_numba_cuda():
    out = np.zeros(16, np.int32)
    simulate(by_name, 2, 8, out)
    assert np.array_equal(out, np.concatenate([7 - np.arange(8), 107 - np.arange(8)]))


@cuda.jit
def by_module(out):
    t = numba.cuda.threadIdx.x
    out[0, t] = parts.scaled(t)
    out[1, t] = tests.kernels.named_parts.scaled(t)
    out[2, t] = renamed(t) + scaled(t)
    out[3, t] = arithmetic.and_or(t, 3, 8)
    out[4, t] = parts.SCALE * parts.TABLE[2]


def test_device_functions_by_module_alias_and_name():
    out = np.zeros((5, 8), np.int64)
    simulate(by_module, 1, 8, out)
    t = np.arange(8)
    assert np.array_equal(out, [3 * t + 10, 3 * t + 10, 6 * t + 20, (t & 3) | 8, np.full(8, 300)])


def test_a_module_that_changes_between_launches_is_looked_up_again(monkeypatch):
    monkeypatch.setattr(parts, "SCALE", 5)
    out = np.zeros((5, 8), np.int64)
    simulate(by_module, 1, 8, out)
    assert np.array_equal(out[0], 5 * np.arange(8) + 10)


@cuda.jit
def through_another_module(out):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    tile[t] = t
    out[t] = neighbour(tile, t, 8)


def test_device_functions_of_another_module_may_use_barriers():
    out = np.zeros(8, np.float32)
    simulate(through_another_module, 1, 8, out)
    assert np.array_equal(out, (np.arange(8) + 1) % 8)


def make_closure(width, kind):
    from numba import cuda as inner_cuda  # a factory's own import: a closure cell, not a global

    cast = kind

    @inner_cuda.jit(device=True)
    def add(x):
        return cast(x) + width

    @inner_cuda.jit
    def kernel(out):
        tile = inner_cuda.shared.array(width, kind)
        t = inner_cuda.threadIdx.x
        tile[t] = add(t)
        inner_cuda.syncthreads()
        out[t] = tile[width - 1 - t]

    return kernel


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("kind", [int32, nb.float32, np.int32, np.float64, types.uint32])
def test_closures_and_cuda_imported_inside_a_factory(width, kind):
    out = np.zeros(width)
    simulate(make_closure(width, kind), 1, width, out)
    assert np.array_equal(out, 2 * width - 1 - np.arange(width))


def test_two_closures_of_one_factory_do_not_share_memory():
    def make(width):
        @cuda.jit(device=True)
        def fill(t):
            tile = cuda.shared.array(width, int32)
            tile[t % width] = width
            cuda.syncthreads()
            return tile[0]

        return fill

    first, second = make(4), make(8)

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = first(t) + 10 * second(t)

    out = np.zeros(8, np.int32)
    simulate(kernel, 1, 8, out)
    assert np.all(out == 84)


@cuda.jit
def outside_numbers(out):
    t = cuda.threadIdx.x
    out[t] = CONSTANTS[t] * HALF


def test_global_arrays_are_constants_and_read_only():
    out = np.zeros(3)
    simulate(outside_numbers, 1, 3, out)
    assert list(out) == [2.5, 3.0, 3.5]

    @cuda.jit
    def writes():
        CONSTANTS[0] = 1

    with pytest.raises(SimulationError, match="constant array is read-only"):
        simulate(writes, 1, 1)
    assert CONSTANTS[0] == 5


def run_cell(source: str, scope: dict, number: int) -> None:
    """Runs source as a notebook runs a cell: under a name of its own that linecache knows."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), scope)


def test_a_cell_run_again_redefines_a_device_function():
    scope: dict = {}
    run_cell("import numpy as np\nfrom numba import cuda", scope, 1)
    run_cell("@cuda.jit(device=True)\ndef f(x):\n    return x + OFFSET\nOFFSET = 1", scope, 2)
    run_cell("@cuda.jit\ndef k(out):\n    out[cuda.threadIdx.x] = f(cuda.threadIdx.x)", scope, 3)
    out = np.zeros(4, np.int32)
    simulate(scope["k"], 1, 4, out)
    assert list(out) == [1, 2, 3, 4]
    run_cell("@cuda.jit(device=True)\ndef f(x):\n    return 10 * x", scope, 4)
    simulate(scope["k"], 1, 4, out)
    assert list(out) == [0, 10, 20, 30]
    run_cell("@cuda.jit(device=True)\ndef f(x):\n    return x - OFFSET", scope, 5)
    scope["OFFSET"] = 7
    simulate(scope["k"], 1, 4, out)
    assert list(out) == [-7, -6, -5, -4]


def test_an_error_in_a_cell_shows_its_line():
    scope: dict = {}
    run_cell("from numba import cuda\n@cuda.jit\ndef k(out):\n    out[9] = 1  # too far", scope, 6)
    with pytest.raises(SimulationError) as caught:
        simulate(scope["k"], 1, 1, np.zeros(2))
    assert_one_line(caught.value, "k:4 `out\\[9\\] = 1  # too far`", "thread", "block")


@cuda.jit
def calls_plain(out, called):
    if called:
        out[0] = plain(1)
    else:
        out[0] = 2


def test_a_plain_function_is_refused_as_on_the_gpu():
    out = np.zeros(1, np.int32)
    simulate(calls_plain, 1, 1, out, 0)
    with pytest.raises(SimulationError, match=r"plain is a plain Python function: .*device=True"):
        simulate(calls_plain, 1, 1, out, 1)


@cuda.jit
def unknown():
    cuda.no_such_thing(1)


def test_what_the_simulator_lacks_is_named():
    with pytest.raises(AttributeError, match="the simulator has no cuda.no_such_thing"):
        simulate(unknown, 1, 1)


def test_instructions_of_a_newer_gpu_are_refused(settings):
    @cuda.jit
    def kernel(out, newer):
        if newer:
            copy_async_commit()
        out[0] = 1

    out = np.zeros(1, np.int32)
    for capability, newer, refused in (((9, 0), 1, False), ((7, 5), 0, False), ((7, 5), 1, True), ((8, 0), 1, False)):
        settings.compute_capability = capability
        if refused:
            with pytest.raises(
                SimulationError, match="copy_async_commit needs compute capability 8.0, the setting is 7.5"
            ):
                simulate(kernel, 1, 1, out, newer)
        else:
            simulate(kernel, 1, 1, out, newer)
