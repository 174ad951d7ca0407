"""The choice of the stage; the simulator beside a GPU, and on the simulator that numba itself ships."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

KERNELS = """
import math
import numpy as np
from kernels_numba import stage
import numba
from numba import cuda, float32, int32, uint32
from numba.cuda import threadIdx
from kernels_numba.instructions.arithmetic import dp4a, float_bits
from kernels_numba.instructions.memory import stream_u32x4
from kernels_numba.instructions.barriers import barrier_sync
from kernels_numba.simulator.errors import DivergentBarrier

@cuda.jit(device=True)
def neighbour(tile, t):
    cuda.syncthreads()
    return tile[(t + 1) % 64]

def make(width):
    from numba import cuda
    @cuda.jit(max_registers=64, lineinfo=True)
    def kernel(words, out, faulty):
        tile = cuda.shared.array(width, float32)
        t = threadIdx.x
        tile[t] = float32(t)
        total = neighbour(tile, t)
        for k in range(5):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 16 >> k)
        a, b, c, d = stream_u32x4(words, uint32(4 * (t % 2)))
        out[t] = total + dp4a(a, uint32(0x01010101), int32(b)) + math.exp(float32(0.0)) + float_bits(float32(1.0)) % 2
        barrier_sync(1, 64)
        if faulty:
            if t < 32:
                cuda.syncthreads()
            else:
                numba.cuda.syncthreads()
    return kernel

def check(launchable):
    words = np.arange(8, dtype=np.uint32)
    out = np.zeros(64, np.float32)
    launchable[1, 64](words, out, 0)
    t = np.arange(64)
    sums = ((t + 1) % 64).reshape(2, 32).sum(1).repeat(32)
    dots = np.where(t % 2 == 0, 0 + 1, 4 + 5)
    assert np.array_equal(out, sums + dots + 1), out
    try:
        launchable[1, 64](words, out, 1)
    except DivergentBarrier as error:
        assert "`cuda.syncthreads()`" in str(error) or "kernel:" in str(error), error
    else:
        raise AssertionError("the divergent barrier was not noticed")
    launchable[1, 64](words, out, 0)
"""
# what numba-cuda puts in front of numba's own numba.cuda; macOS has no numba-cuda
WITHOUT_NUMBA_CUDA = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "NumbaCudaFinder"]
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in ("RTLIB_STAGE", "NUMBA_ENABLE_CUDASIM")}
    kept["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=100
    )


def expect(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_line(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_the_simulator_that_numba_ships_works_likewise():
    code = (
        WITHOUT_NUMBA_CUDA
        + KERNELS
        + (
            "assert 'numba_cuda' not in cuda.__file__\n"
            "check(make(64))\n"
            "x = cuda.to_device(np.arange(64, dtype=np.float32))\n"
            "@cuda.jit(launch_bounds=(64, 1))\n"
            "def twice(x):\n    t = cuda.grid(1)\n    if t < x.size:\n        x[t] *= 2\n"
            "twice[1, 64](x); twice.forall(64)(x)\n"
            "assert np.array_equal(x.copy_to_host(), 4 * np.arange(64))\n"
            "y = np.ones(64, np.float32)\n"
            "twice[1, 64](cuda.InOut(y))\n"
            "assert np.all(y == 2)\n"
            "print(stage.name)"
        )
    )
    assert expect(code, RTLIB_STAGE="sim") == "sim\n"


def test_the_simulator_under_numba_cuda():
    assert expect(KERNELS + "check(make(64)); print(stage.name, stage.has_device)", RTLIB_STAGE="sim") == "sim True\n"


@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_a_process_of_the_gpu_stage_simulates_too():
    code = KERNELS + (
        "kernel = make(64)\n"
        "check(stage.simulate(kernel))\n"
        "assert type(kernel).__name__ == 'CUDADispatcher'\n"
        "print(stage.name, stage.has_device)"
    )
    assert expect(code, RTLIB_STAGE="compile") == "gpu False\n"


@pytest.mark.parametrize(
    "environment",
    [{"RTLIB_STAGE": "sim"}, {"NUMBA_ENABLE_CUDASIM": "1"}, {"RTLIB_STAGE": "SIM", "NUMBA_ENABLE_CUDASIM": "0"}],
)
def test_the_environment_chooses_the_simulator(environment):
    assert expect("from kernels_numba import stage; print(stage.name)", **environment) == "sim\n"


@pytest.mark.parametrize("forced", ["", "0"])
def test_otherwise_a_gpu_decides(forced):
    code = "from kernels_numba import stage, choice; print(stage.name == ('gpu' if choice.count_gpus() else 'sim'))"
    environment = {"NUMBA_ENABLE_CUDASIM": forced}
    assert expect(code, **environment) == "True\n"
    assert expect("from kernels_numba import stage; print(stage.name)", CUDA_VISIBLE_DEVICES="") == "sim\n"


def test_a_stage_that_cannot_be_had_is_refused_in_one_line():
    code = "from kernels_numba import stage"
    assert "StageError: RTLIB_STAGE is 'cpu', expected gpu, sim or compile" in last_line(code, RTLIB_STAGE="cpu")
    line = last_line(code, RTLIB_STAGE="gpu", CUDA_VISIBLE_DEVICES="")
    assert "StageError: the stage gpu was asked for and no GPU was found" in line


def test_a_choice_after_numba_is_too_late():
    line = last_line("import numba; from kernels_numba import stage", RTLIB_STAGE="sim")
    assert "StageError: numba was imported before the stage sim was chosen: restart" in line
    line = last_line("import numba; from kernels_numba import stage", RTLIB_STAGE="compile", NUMBA_ENABLE_CUDASIM="1")
    assert "before the stage gpu was chosen" in line
    # numba first is harmless when it made the same choice
    code = "import numba; from kernels_numba import stage; print(stage.name)"
    assert expect(code, RTLIB_STAGE="sim", NUMBA_ENABLE_CUDASIM="1") == "sim\n"
