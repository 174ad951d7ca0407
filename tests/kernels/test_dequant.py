"""Dequantised weights against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from int4_cases import int4_weight, words_halves

from kernels_numba import device_memory as memory
from kernels_numba.dequant import FLOAT16, FLOAT32, THREADS, dequantise_grid, make_dequantise
from kernels_numba.errors import KernelError
from kernels_numba.launching import Launch

# q - z and its product with s are rounded to float32, 2^-24 each; fp16 rounds once more: 2^-11, 2^-25 for tiny weights
BOUNDS = {FLOAT32: (2.0**-23, 0.0), FLOAT16: (2.0**-11 + 2.0**-23, 2.0**-25)}


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16])
@pytest.mark.parametrize(("n", "k", "group"), [(3, 128, 128), (5, 384, 64), (2, 128, 32)])
def test_dequantise(rng, n, k, group, kind):
    codes, scales_zeros, expected = int4_weight(rng, n, k, group)
    room = n * k // (2 if kind == FLOAT16 else 1)
    poison = np.uint32(0xDEADBEEF)
    out = np.full(room + 4, poison).view(np.uint32 if kind == FLOAT16 else np.float32)
    arrays = [memory.upload(a) for a in (codes, scales_zeros, out)]
    Launch(make_dequantise(n, k, group, kind), dequantise_grid(n, k), THREADS, *arrays).run()
    found = memory.download(arrays[2])
    assert (found[room:].view(np.uint32) == poison).all()
    weights = words_halves(found[:room], k) if kind == FLOAT16 else found[:room].reshape(n, k)
    relative, absolute = BOUNDS[kind]
    assert (np.abs(weights - expected) <= relative * np.abs(expected) + absolute).all()


def test_impossible_shapes_are_refused():
    with pytest.raises(KernelError, match="multiple of 128"):
        make_dequantise(4, 100, 128, FLOAT32)
