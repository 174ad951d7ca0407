"""What every measurement needs: times between events, the memory's ceilings, and the machine they were read on."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels_numba import ceilings, stage
from kernels_numba import device_memory as memory
from kernels_numba.launching import Launch

CEILING_BYTES = 2**30  # twenty times an H200's L2


def elapsed_us(work: Callable[[], None], repeats: int) -> list[float]:
    """Microseconds of each of `repeats` runs of `work`, between events on its stream, after one run to warm up."""
    from numba import cuda

    work()
    times = []
    for _ in range(repeats):
        begin, end = cuda.event(), cuda.event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cuda.event_elapsed_time(begin, end) * 1e3)
    return times


def measure_ceilings(nbytes: int = CEILING_BYTES) -> dict[str, float]:
    """The memory's copy and read rates in 10^9 bytes per second, the copy's bytes counted twice."""
    quads = nbytes // 16
    source, target = memory.empty(nbytes // 4, np.uint32), memory.empty(nbytes // 4, np.uint32)
    blocks = 16 * stage.multiprocessors()
    copy = Launch(ceilings.copy_words, blocks, ceilings.THREADS, source, target, np.uint32(quads))
    read = Launch(ceilings.read_words, blocks, ceilings.THREADS, source, target, np.uint32(quads))
    return {
        "copy": 2 * nbytes / statistics.median(elapsed_us(copy.run, 10)) / 1e3,
        "read": nbytes / statistics.median(elapsed_us(read.run, 10)) / 1e3,
    }


@functools.cache
def read_ceiling() -> float | None:
    """The memory's read rate in 10^9 bytes per second, measured once in a process; None on sim, which has no memory."""
    return None if stage.name == "sim" else measure_ceilings(CEILING_BYTES // 4)["read"]


def describe_machine() -> dict[str, Any]:
    """GPU, driver, versions and date, to stand beside every recorded figure."""
    versions = {}
    for package in ("numba", "numba-cuda", "cuda-core", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "versions": versions}
    if stage.name == "sim":
        return found | {"stage": "sim"}
    from rtlib.driver import query_driver

    driver = query_driver()
    gpu = driver.gpus[0]
    return found | {"stage": "gpu", "gpu": gpu.name, "capability": gpu.compute_capability, "cuda": driver.cuda_version}
