"""`python -m kernels_numba.simulator_benchmark`: the simulator against the executor of numba's own simulator.

One kernel, 64 blocks of 128 threads with 8 barriers, default checks on. Each executor runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

import numpy as np
from numba import cuda

BLOCKS, THREADS, ROUNDS = 64, 128, 4  # two barriers a round


@cuda.jit
def rotate(out):
    """Each round passes every thread's number on to the thread before it."""
    tile = cuda.shared.array(THREADS, np.int32)
    t = cuda.threadIdx.x
    mine = t
    for _ in range(ROUNDS):
        tile[t] = mine
        cuda.syncthreads()
        mine = tile[(t + 1) % THREADS]
        cuda.syncthreads()
    out[cuda.grid(1)] = mine


def seconds(repeats: int) -> float:
    """The median time of a launch in this process, after one that is not counted when there are several."""
    out, times = np.zeros(BLOCKS * THREADS, np.int32), []
    for _ in range(repeats):
        start = time.perf_counter()
        rotate[BLOCKS, THREADS](out)
        times.append(time.perf_counter() - start)
    if not np.array_equal(out.reshape(BLOCKS, THREADS)[0], (np.arange(THREADS) + ROUNDS) % THREADS):
        raise RuntimeError(f"the kernel gave {out[:8]}..., expected {ROUNDS}, {ROUNDS + 1}, ...")
    return median(times[1:] or times)


def _in_child(code: str) -> float:
    environment = {**os.environ, "RTLIB_STAGE": "sim", "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    # loading the file alone keeps the package, and so this executor, out of the process that times numba's
    alone = (
        f"from importlib import util; spec = util.spec_from_file_location('alone', {__file__!r}); "
        "module = util.module_from_spec(spec); spec.loader.exec_module(module); print(module.seconds(1))"
    )
    print(f"one launch of {BLOCKS} blocks x {THREADS} threads with {2 * ROUNDS} barriers, in seconds:")
    ours = _in_child("from kernels_numba import simulator_benchmark as b, stage; print(b.seconds(6))")
    print(f"  this simulator, default checks: {ours:8.3f}")
    numbas = _in_child(alone)
    print(f"  numba's own executor:           {numbas:8.3f}")
    print(f"  ratio:                          {numbas / ours:8.0f}")


if __name__ == "__main__":
    main()
