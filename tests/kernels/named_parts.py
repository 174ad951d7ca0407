"""A module whose device functions and names other tests' kernels reach by attribute, by alias and by name."""

from __future__ import annotations

import math

import numba.cuda
from numba import cuda as gpu

SCALE = 3
TABLE = (1, 10, 100)


@gpu.jit(device=True)
def scaled(x):
    return x * SCALE + TABLE[1]


@numba.cuda.jit(device=True)
def neighbour(tile, t, count):
    numba.cuda.syncthreads()
    return tile[(t + 1) % count] + math.floor(0.5)


def plain(x):
    return x + 1
