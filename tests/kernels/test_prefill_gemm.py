"""The prefill product against float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest
from int4_cases import int4_weight, relative_error, rounded_rows

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.errors import KernelError
from kernels_numba.gemv import ADD, STORE
from kernels_numba.launching import Launch
from kernels_numba.prefill_gemm import Tile, choose_tile, make_prefill_gemm

TOLERANCE = 1e-5  # float32 accumulation over K up to 384, each group's sum added once
SMALL = Tile(warps_m=2, warps_n=1, m_tiles=1, n_tiles=1)


def product(rng, n, k, group, tokens, tile, target=STORE, biased=0, capability=(9, 0)):
    """Runs the kernel over poisoned memory; gives the output with its guard, and the expected output."""
    capacity = -(-tokens // 4) * 4
    codes, scales_zeros, weight = int4_weight(rng, n, k, group)
    values, scales, sums, x = rounded_rows(rng, tokens, k, group, capacity)
    bias = rng.standard_normal(n).astype(np.float32)
    y = np.full(tokens * n + 8, np.nan, np.float32)
    expected = x @ weight.T + biased * bias.astype(np.float64)
    if target == ADD:
        y[: tokens * n] = rng.standard_normal(tokens * n)
        expected += y[: tokens * n].reshape(tokens, n)
    kernel = make_prefill_gemm(n, k, group, tile, target, biased, capability)
    arrays = [memory.upload(a) for a in (codes, scales_zeros, values, scales, sums, bias, y)]
    Launch(kernel, tile.grid(n, tokens), tile.block, *arrays, np.int32(tokens), np.int32(capacity)).run()
    out = memory.download(arrays[-1])
    assert np.isnan(out[tokens * n :]).all(), "the guard after the output was written"
    return out[: tokens * n].reshape(tokens, n), expected


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_each_group_size_and_capability(rng, settings, group, capability):
    settings.compute_capability = capability
    y, expected = product(rng, 32, 384, group, 8, SMALL, capability=capability)
    assert relative_error(y, expected) < TOLERANCE


@pytest.mark.parametrize(("n", "tokens"), [(32, 8), (33, 9), (1, 1), (50, 20)])
def test_tails_of_outputs_and_tokens(rng, n, tokens):
    y, expected = product(rng, n, 128, 128, tokens, SMALL, biased=1)
    assert relative_error(y, expected) < TOLERANCE


def test_several_tiles_a_warp_and_warps_along_tokens(rng):
    y, expected = product(rng, 70, 256, 128, 27, Tile(warps_m=2, warps_n=2, m_tiles=2, n_tiles=2))
    assert relative_error(y, expected) < TOLERANCE


def test_added_to_the_residual(rng):
    y, expected = product(rng, 40, 128, 64, 5, SMALL, target=ADD)
    assert relative_error(y, expected) < TOLERANCE


@pytest.mark.skipif(stage.name != "sim", reason="the order of warps is the simulator's to choose")
def test_any_order_of_warps_gives_the_same_bits(settings):
    outputs = []
    for order in ("forward", "reverse", 3):
        settings.warp_order = order
        outputs.append(product(np.random.default_rng(5), 40, 256, 128, 9, SMALL)[0])
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


def test_the_chosen_tile_covers_no_more_tokens_than_needed():
    assert choose_tile(256, 8).tokens == 8
    assert choose_tile(256, 32).tokens == 32
    assert choose_tile(256, 500).tokens == 64


def test_impossible_shapes_are_refused():
    with pytest.raises(KernelError, match="multiple of 128"):
        make_prefill_gemm(32, 192, 64, SMALL, STORE)
    with pytest.raises(KernelError, match="48 KB"):
        make_prefill_gemm(32, 128, 128, Tile(8, 4, 4, 8), STORE)
