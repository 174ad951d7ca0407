"""Listings of compiled kernels: PTX, SASS and resources, from any stage, for kernels from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from kernels_numba import inspection
from kernels_numba.errors import KernelError, StageError
from kernels_numba.inspection import inspect
from kernels_numba.instructions.arithmetic import dp4a
from kernels_numba.instructions.memory import stream_u32x4

pytestmark = pytest.mark.skipif(
    find_spec("numba_cuda") is None or find_spec("nvidia") is None, reason="no CUDA compiler: extra cu13 or cu12"
)


@cuda.jit(device=True)
def halved(x):
    return x * float32(0.5)


def make(width):
    from numba import cuda as inside

    @inside.jit(launch_bounds=width)
    def kernel(words, out):
        tile = inside.shared.array(width, float32)
        t = inside.threadIdx.x
        a, b, c, d = stream_u32x4(words, uint32(uint32(4) * uint32(t)))
        tile[t] = halved(float32(dp4a(a, b, int32(c))))
        cuda.syncthreads()
        out[t] = tile[t ^ 1] + float32(d)

    return kernel


SIGNATURE = (uint32[::1], float32[::1])


def test_a_closure_with_device_functions_and_instructions():
    listing = inspect(make(128), SIGNATURE, (9, 0))
    assert listing.name == "kernel"
    assert ".target sm_90a" in listing.ptx
    assert ".maxntid 128" in listing.ptx
    assert "dp4a.u32.s32" in listing.ptx
    assert listing.count("IDP.4A") == 1
    assert listing.count("LDG.128") == listing.count("LDG.E.128") == 1
    assert listing.count("BAR.SYNC") == 1
    assert listing.count("DADD") == 0
    assert 8 <= listing.registers <= 32
    assert (listing.spill_bytes, listing.local_bytes, listing.shared_bytes) == (0, 0, 512)
    text = str(listing)
    assert "kernel for compute capability 9.0" in text
    assert "512 bytes a block" in text
    assert len(repr(listing)) < 200


def test_example_arguments_and_strings_give_the_same_code():
    kernel = make(64)
    by_types = inspect(kernel, SIGNATURE, (7, 5))
    by_example = inspect(kernel, (np.zeros(7, np.uint32), np.zeros((9,), np.float32)), (7, 5))
    by_text = inspect(kernel, "void(uint32[::1], float32[::1])", (7, 5))
    assert by_types.instructions == by_example.instructions == by_text.instructions
    assert by_types.capability == (7, 5)
    assert by_types.shared_bytes == 256


@cuda.jit
def many_numbers(x, out):
    local = cuda.local.array(64, float32)
    for k in range(64):
        local[k] = x[k]
    for k in range(64):
        out[k] = local[int32(x[k])]


def test_local_memory_is_reported():
    listing = inspect(many_numbers, (float32[::1], float32[::1]), (8, 0))
    assert listing.local_bytes == 256
    assert listing.count("LDL") >= 1


def test_what_does_not_compile_is_a_kernel_error():
    @cuda.jit
    def wrong(x):
        x[0] = x.no_such_attribute

    with pytest.raises(KernelError, match="wrong does not compile: .*no_such_attribute"):
        inspect(wrong, (float32[::1],), (9, 0))
    with pytest.raises(KernelError, match=r"is no kernel: one made by @cuda.jit is needed"):
        inspect(len, (), (9, 0))


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(inspection, "find_spec", lambda name: None)
    monkeypatch.setattr(inspection, "which", lambda name: None)
    inspection.tool.cache_clear()
    try:
        with pytest.raises(StageError, match=r"ptxas was not found.* extra cu13 .* or cu12"):
            inspection.tool("ptxas")
    finally:
        inspection.tool.cache_clear()


NOTEBOOK = """
from kernels_numba import stage
from kernels_numba.inspection import inspect
from numba import cuda, float32
from math import exp
SCALE = 3
@cuda.jit(device=True)
def f(x):
    return float32(exp(x)) * float32(SCALE)
@cuda.jit(max_registers=32)
def cell(x):
    i = cuda.grid(1)
    x[i] = f(x[i])
listing = inspect(cell, (float32[::1],), (8, 6))
print(stage.name, listing.count("MUFU.EX2"), listing.count("STG"), listing.spill_bytes)
"""


@pytest.mark.parametrize("stage", ["sim", "compile"])
def test_kernels_of_a_main_module_as_a_notebook_has_them(stage):
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        env={**os.environ, "RTLIB_STAGE": stage, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    name = "sim" if stage == "sim" else "gpu"
    assert done.stdout == f"{name} 1 1 0\n"
