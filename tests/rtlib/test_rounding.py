"""The activation forms: what a kernel keeps of a linear's input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rtlib.rounding import FORMS, activation_codes, round_activation

BLOCKS = hnp.arrays(np.float32, (2, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32))
DTYPES = {"int8": np.int8, "fp16": np.float16, "bf16": np.uint16}


def absmax_of_blocks(x: np.ndarray) -> np.ndarray:
    """Return each element's block maximum."""
    return np.repeat(np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], -1, 32).max(axis=-1), 32, axis=-1)


@given(BLOCKS)
def test_int8_is_within_half_a_step_of_its_own_block(x):
    steps = absmax_of_blocks(x) / 127
    # half a step; float32 rounding of the factor, the product and the scale move codes near 127 by 127 * 3 * 2^-24
    bound = steps * (0.5 + 127 * 2.0**-22) + 1e-30
    assert (np.abs(round_activation(x, "int8") - x) <= bound).all()


@given(BLOCKS)
def test_fp16_has_eleven_bits_below_the_block_maximum(x):
    # half a unit in the 11th bit of each value, and of the smallest step, 2^-24 of the scale, for the small ones
    bound = np.abs(x) * 2.0**-11 + absmax_of_blocks(x) * 2.0**-25 + 1e-30
    assert (np.abs(round_activation(x, "fp16") - x) <= bound).all()


@given(hnp.arrays(np.float32, (1, 32), elements=st.floats(-(2.0**126), 2.0**126, width=32)))
def test_bf16_is_the_nearest_of_the_values_with_eight_bits(x):
    rounded = round_activation(x, "bf16")
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    above = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    nearest = np.minimum(np.abs(below - x), np.abs(above - x))
    np.testing.assert_array_equal(np.abs(rounded - x), nearest)


@pytest.mark.parametrize(
    ("value", "expected"), [(1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (-1 - 2.0**-8, -1.0)]
)
def test_bf16_ties_go_to_even(value, expected):
    assert round_activation(np.full(32, value, np.float32), "bf16")[0] == expected


@pytest.mark.parametrize("form", FORMS)
def test_codes_times_scales_are_the_rounded_values(form, rng):
    x = rng.standard_normal((3, 96)).astype(np.float32)
    values, scales = activation_codes(x, form)
    assert values.dtype == DTYPES[form]
    assert (values.shape, scales.shape, scales.dtype) == ((3, 96), (3, 3), np.float32)
    plain = (values.astype(np.uint32) << 16).view(np.float32) if form == "bf16" else values
    product = plain.reshape(3, 3, 32).astype(np.float64) * scales[..., None]
    np.testing.assert_array_equal(round_activation(x, form), product.reshape(3, 96))


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_specks_stay_finite(form):
    x = np.zeros((1, 96), np.float32)
    x[0, 32:64] = 1e-38
    x[0, 64] = 1e-29
    rounded = round_activation(x, form)
    assert np.isfinite(rounded).all()
    assert not rounded[0, :32].any()
    assert rounded[0, 64] == pytest.approx(1e-29, rel=2.0**-8)


def test_fp16_scales_are_powers_of_two_that_leave_room():
    x = np.concatenate([np.full(32, 1e5), np.full(32, 65504.0), np.full(32, 1.0), np.full(32, 1.9999999)])
    values, scales = activation_codes(x, "fp16")
    assert scales.tolist() == [65536.0, 32768.0, 1.0, 1.0]
    assert (np.abs(values) <= 2).all()


@pytest.mark.parametrize("form", FORMS)
def test_one_large_activation_harms_only_its_own_block(form, rng):
    x = rng.standard_normal(256).astype(np.float32)
    spoilt = x.copy()
    spoilt[100] = 1e5
    rounded, clean = round_activation(spoilt, form), round_activation(x, form)
    others = np.r_[0:96, 128:256]
    np.testing.assert_array_equal(rounded[others], clean[others])
    step = {"int8": 1e5 / 127, "fp16": 1e5 * 2.0**-10, "bf16": 1e5 * 2.0**-7}[form]
    assert (np.abs(rounded - spoilt)[96:128] <= step / 2 * (1 + 1e-5)).all()


def test_no_rounding_and_unknown_forms(rng):
    x = rng.standard_normal(32)
    np.testing.assert_array_equal(round_activation(x, None), x)
    with pytest.raises(ValueError, match="activation form 'fp8', expected one of int8, fp16, bf16"):
        round_activation(x, "fp8")
