"""Packing layout, and the INT4 and int8 quantisers against what they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rtlib.nibbles import pack_codes, pack_scales_zeros, unpack_codes, unpack_scales_zeros
from rtlib.quantise import Int4Weight, dequantise, quantise, quantise_embedding, quantise_nearest

SHIFTS = (0, 8, 16, 24, 4, 12, 20, 28)  # the bit of each of a word's eight inputs, as the kernels read it


def relative_error(weight: np.ndarray, quantised: Int4Weight) -> float:
    """Return the squared error over the squared weights."""
    return float(((dequantise(quantised) - weight) ** 2).sum() / (weight.astype(np.float64) ** 2).sum())


def gaussian(rng: np.random.Generator) -> np.ndarray:
    return (0.02 * rng.standard_normal((24, 512))).astype(np.float32)


def heavy_tailed(rng: np.random.Generator) -> np.ndarray:
    return (0.02 * rng.standard_t(3, (24, 512))).astype(np.float32)


def shifted(rng: np.random.Generator) -> np.ndarray:
    return (0.02 * rng.gamma(1.0, 1.0, (24, 512))).astype(np.float32)


def test_each_code_sits_at_its_bit():
    for position, shift in enumerate(SHIFTS):
        codes = np.zeros((1, 8), np.uint8)
        codes[0, position] = 0xA
        assert pack_codes(codes).tolist() == [[0xA << shift]]


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.sampled_from([8, 32, 128])), elements=st.integers(0, 15)))
def test_codes_survive_packing(codes):
    words = pack_codes(codes)
    assert words.dtype == np.uint32
    assert words.shape == (codes.shape[0], codes.shape[1] // 8)
    np.testing.assert_array_equal(unpack_codes(words), codes)


def test_scales_and_zeros_survive_packing_bit_for_bit():
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = patterns[np.isfinite(patterns)]
    words = pack_scales_zeros(finite, finite[::-1])
    scales, zeros = unpack_scales_zeros(words)
    np.testing.assert_array_equal(scales.view(np.uint16), finite.view(np.uint16))
    np.testing.assert_array_equal(zeros.view(np.uint16), finite[::-1].view(np.uint16))
    assert pack_scales_zeros(np.float16([1.0]), np.float16([2.0]))[0] == 0x4000_3C00


def test_dequantise_is_the_definition():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (3, 64), dtype=np.uint8)
    scales = rng.random((3, 2)).astype(np.float16)
    zeros = (15 * rng.random((3, 2))).astype(np.float16)
    weight = Int4Weight(pack_codes(codes), pack_scales_zeros(scales, zeros), 32)
    expected = [
        [float(scales[n, k // 32]) * (float(codes[n, k]) - float(zeros[n, k // 32])) for k in range(64)]
        for n in range(3)
    ]
    np.testing.assert_array_equal(dequantise(weight), expected)
    np.testing.assert_array_equal(dequantise(weight, slice(1, 3)), expected[1:])


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("make", "gain"), [(gaussian, 0.12), (heavy_tailed, 0.12), (shifted, 0.04)])
def test_search_beats_round_to_nearest(make, gain, group):
    weight = make(np.random.default_rng(2))
    searched, nearest = quantise(weight, group), quantise_nearest(weight, group)
    assert searched.codes.shape == (24, 64)
    assert searched.scales_zeros.shape == (24, 512 // group)
    # measured on these seeds: 16 to 22 % less squared error, 5 to 7 % where all weights have one sign
    assert relative_error(weight, searched) < (1 - gain) * relative_error(weight, nearest)


def test_search_is_near_the_best_of_a_dense_grid():
    weight = heavy_tailed(np.random.default_rng(3)).astype(np.float64)[:, :128]
    found = ((dequantise(quantise(weight, 128)) - weight) ** 2).sum(axis=1)
    full_step = (np.ptp(weight, axis=1) / 15)[:, None]
    best = np.full(len(weight), np.inf)
    for shrink in np.linspace(0.3, 1.0, 60):
        for zero in np.linspace(0, 15, 61):
            codes = np.clip(np.rint(weight / (shrink * full_step) + zero), 0, 15)
            error = ((shrink * full_step * (codes - zero) - weight) ** 2).sum(axis=1)
            best = np.minimum(best, error)
    # a local search against 3660 candidates that ignore fp16: 3 % above them on average here, 17 % for the worst group
    assert found.sum() < 1.08 * best.sum()
    assert (found < 1.3 * best).all()


def test_no_single_group_gets_worse_than_the_scale_of_zero():
    weight = heavy_tailed(np.random.default_rng(4)).reshape(-1, 32)
    error = ((dequantise(quantise(weight, 32)) - weight) ** 2).sum(axis=1)
    assert (error <= (weight.astype(np.float64) ** 2).sum(axis=1)).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.0123, -3e-4, 6e4, -6e4])
def test_an_all_equal_group_is_held_to_fp16_precision(value):
    weight = np.full((2, 128), value, np.float32)
    # one rounding of the scale to fp16's 11 bits; below 15 * 6.1e-5 the scale is subnormal and rounds by 3e-8 * 15
    tolerance = abs(value) * 2.0**-11 + 15 * 2.0**-25
    np.testing.assert_allclose(dequantise(quantise(weight, 128)), value, rtol=0, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (2, 64), elements=st.floats(-1e6, 1e6, width=32)))
def test_any_finite_weights_give_finite_numbers_in_range(weight):
    quantised = quantise(weight, 32)
    scales, zeros = unpack_scales_zeros(quantised.scales_zeros)
    assert np.isfinite(scales).all()
    assert (scales >= 0).all()
    assert ((zeros >= 0) & (zeros <= 15)).all()
    assert np.isfinite(dequantise(quantised)).all()


def test_chunks_do_not_show():
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((600, 512)).astype(np.float32)  # more than one chunk of rows
    whole, part = quantise(weight, 64), quantise(weight[577:], 64)
    np.testing.assert_array_equal(whole.codes[577:], part.codes)
    np.testing.assert_array_equal(whole.scales_zeros[577:], part.scales_zeros)


def test_inputs_must_fill_their_groups():
    with pytest.raises(ValueError, match="96 inputs are not a multiple of the group size 64"):
        quantise(np.zeros((1, 96), np.float32), 64)


def test_embedding_error_is_half_a_step_at_most():
    rng = np.random.default_rng(6)
    table = (0.02 * rng.standard_normal((50, 256))).astype(np.float32)
    table[7] = 0
    quantised = quantise_embedding(table)
    assert quantised.codes.dtype == np.int8
    assert quantised.scales.dtype == np.float16
    assert quantised.nbytes == 50 * 256 + 50 * 2 * 2
    steps = np.repeat(quantised.scales.astype(np.float64), 128, axis=1)
    # half a step, and what a scale rounded down to fp16 (1 / 2048) clips from the largest code of 127
    assert (np.abs(dequantise(quantised) - table) <= steps * (0.5 + 127 / 2048)).all()
    assert not dequantise(quantised)[7].any()
