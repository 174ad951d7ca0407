"""The row-wise kernels of prefill against NumPy float64, over poisoned outputs."""

from __future__ import annotations

import numpy as np
import pytest
from int4_cases import ORDER, relative_error, words_halves

from kernels_numba import device_memory as memory
from kernels_numba.embedding import make_embedding_rows
from kernels_numba.errors import KernelError
from kernels_numba.launching import Launch
from kernels_numba.norm import make_norm_rows
from kernels_numba.paged_kv import THREADS as KV_THREADS
from kernels_numba.paged_kv import append_grid, make_kv_append
from kernels_numba.rope import THREADS as ROPE_THREADS
from kernels_numba.rope import make_rope_rows, rope_grid
from kernels_numba.rows import make_round_rows
from kernels_numba.swiglu import make_swiglu_rows

FLOAT32_BOUND = 1e-5  # one kernel, float32 arithmetic
HALF_BOUND = 4.9e-4  # 2^-11: one rounding to fp16
POISON = np.uint32(0xDEADBEEF)


def run(kernel, grid, block, *arguments):
    """Launches on uploaded arrays; gives them downloaded, scalars left out."""
    given = [memory.upload(a.copy()) if isinstance(a, np.ndarray) else a for a in arguments]
    Launch(kernel, grid, block, *given).run()
    return [memory.download(a) for a, b in zip(given, arguments, strict=True) if isinstance(b, np.ndarray)]


class Rounded:
    """Poisoned room for rounded rows, and checks of what a kernel left there."""

    def __init__(self, tokens: int, k: int, group: int):
        self.tokens, self.k, self.group, self.capacity = tokens, k, group, tokens + 3
        self.room = (
            np.full((tokens * k) // 2 + 4, POISON, np.uint32),
            np.full(tokens + 1, np.nan, np.float32),
            np.full(k // group * self.capacity, np.nan, np.float32),
        )

    def check(self, values, scales, sums, expected) -> None:
        assert (values[self.tokens * self.k // 2 :] == POISON).all()
        assert np.isnan(scales[-1])
        halves = words_halves(values[: self.tokens * self.k // 2], self.k)
        halves = halves.reshape(-1, 8)[:, np.argsort(ORDER)].reshape(self.tokens, self.k)
        scales = scales[:-1].astype(np.float64)
        absmax = np.abs(halves).max(1)
        assert np.isin(np.log2(scales), np.arange(-126, 128)).all()
        assert ((absmax >= 2**14) & (absmax <= 2**15)).all()
        smallest = 2.0**-25  # half the spacing of fp16's smallest numbers
        bound = (HALF_BOUND + FLOAT32_BOUND) * np.abs(expected) + smallest * scales[:, None]
        assert (np.abs(halves * scales[:, None] - expected) <= bound).all()
        sums = sums.reshape(-1, self.capacity)
        assert np.isnan(sums[:, self.tokens :]).all()
        exact = halves.reshape(self.tokens, -1, self.group)
        # float32 sums of `group` numbers: at most group roundings of 2^-24 of the sum of absolute values
        assert (np.abs(sums[:, : self.tokens].T - exact.sum(-1)) <= self.group * 2.0**-24 * np.abs(exact).sum(-1)).all()


def rms_norm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(("k", "group", "warps"), [(128, 128, 1), (384, 64, 2), (256, 32, 4)])
def test_norm_rows(rng, settings, k, group, warps, order):
    settings.warp_order = order
    x = (rng.standard_normal((3, k)) * [[1e-3], [1.0], [1e4]]).astype(np.float32)
    weight = rng.uniform(0.5, 2, k).astype(np.float32)
    room = Rounded(3, k, group)
    kernel = make_norm_rows(k, group, warps)
    out = run(kernel, 3, 32 * warps, x, weight, np.float32(1e-6), *room.room, np.int32(room.capacity))
    room.check(*out[2:], rms_norm(x, weight, 1e-6))


def test_norm_rows_beside_an_outlier_keep_their_bits(rng):
    x = rng.standard_normal((1, 256)).astype(np.float32)
    x[0, 7] = 1e5
    room = Rounded(1, 256, 128)
    kernel = make_norm_rows(256, 128, 2)
    out = run(kernel, 1, 64, x, np.ones(256, np.float32), np.float32(0), *room.room, np.int32(room.capacity))
    room.check(*out[2:], rms_norm(x, 1.0, 0.0))


def test_swiglu_rows_beyond_the_range_of_fp16(rng):
    gate = (rng.standard_normal((2, 384)) * [[1], [3000]]).astype(np.float32)
    up = (rng.standard_normal((2, 384)) * [[1], [3000]]).astype(np.float32)
    room = Rounded(2, 384, 128)
    kernel = make_swiglu_rows(384, 128, 3)
    out = run(kernel, 2, 96, np.concatenate([gate, up], 1), *room.room, np.int32(room.capacity))
    x = gate.astype(np.float64)
    expected = x * np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x))) * up
    # the exponential of float32 arguments near -80 is off by 1e-5: relative to such tiny products only
    room.check(*out[1:], expected)


def test_round_rows_of_zeros_and_numbers(rng):
    x = rng.standard_normal((2, 128)).astype(np.float32)
    room = Rounded(2, 128, 32)
    kernel = make_round_rows(128, 32, 1)
    out = run(kernel, 2, 32, x, *room.room, np.int32(room.capacity))
    room.check(*out[1:], x.astype(np.float64))
    zeros = run(kernel, 2, 32, np.zeros_like(x), *room.room, np.int32(room.capacity))
    assert not zeros[1][:128].any()
    assert (zeros[2][:2] == 1).all()


def test_embedding_rows(rng):
    codes = rng.integers(-127, 128, (10, 384)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, (10, 3)).astype(np.float16)
    ids = np.array([9, 0, 9, 4], np.int32)
    x = np.full(4 * 384 + 4, np.nan, np.float32)
    words, bits = codes.reshape(-1).view(np.uint32), scales.reshape(-1).view(np.uint16)
    out = run(make_embedding_rows(384, 2), 4, 64, ids, words, bits, x)[3]
    expected = codes[ids] * np.repeat(scales[ids].astype(np.float32), 128, 1)
    assert np.array_equal(out[:-4].reshape(4, 384), expected)  # one product each: exact
    assert np.isnan(out[-4:]).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 64), (2, 2, 128)])
def test_rope_rows(rng, heads, kv_heads, head_dim):
    tokens, start, half = 3, 5, head_dim // 2
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (start + tokens, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    grid = rope_grid(heads, kv_heads, head_dim, tokens)
    out = run(make_rope_rows(heads, kv_heads, head_dim), grid, ROPE_THREADS, qkv, cos, sin, np.int32(start))[0]
    out, rotated = out.reshape(qkv.shape), heads + kv_heads
    x = qkv[:, :rotated].astype(np.float64)
    c, s = cos[start:, None].astype(np.float64), sin[start:, None].astype(np.float64)
    low, high = x[..., :half], x[..., half:]
    expected = np.concatenate([low * c - high * s, high * c + low * s], -1)
    assert relative_error(out[:, :rotated], expected) < FLOAT32_BOUND
    assert np.array_equal(out[:, rotated:], qkv[:, rotated:])


@pytest.mark.parametrize("start", [0, 13, 16])
def test_kv_append(rng, start):
    heads, kv_heads, head_dim, page_size, tokens = 2, 2, 32, 16, 5
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    qkv[0, 2, 0], qkv[1, 5, 3], qkv[2, 4, 1] = 1e6, -1e6, np.nan  # k and v that fp16 cannot hold; NaN must stay
    table = np.array([3, 1], np.int32)
    pages = np.full(4 * kv_heads * page_size * head_dim // 2, POISON, np.uint32)
    kernel, grid = make_kv_append(heads, kv_heads, head_dim, page_size), append_grid(kv_heads, head_dim, tokens)
    k_pages, v_pages = run(kernel, grid, KV_THREADS, qkv, table, np.int32(start), pages, pages.copy())[2:]
    for out, first in ((k_pages, heads), (v_pages, heads + kv_heads)):
        expected = pages.view(np.float16).reshape(4, kv_heads, page_size, head_dim).copy()
        for row in range(tokens):
            at = start + row
            vectors = np.clip(qkv[row, first : first + kv_heads], -65504, 65504).astype(np.float16)
            expected[table[at // page_size], :, at % page_size] = vectors
        found = out.view(np.float16).reshape(expected.shape)
        assert np.array_equal(found, expected, equal_nan=True)
        # poison is NaN too, so bits are compared; a NaN that was written may have any payload (a GPU's is 0x7FFF)
        moved = found.view(np.uint16) != expected.view(np.uint16)
        assert moved.sum() <= 1
        assert np.isnan(expected[moved]).all()


def test_kv_append_to_no_page_writes_nothing(rng):
    qkv = rng.standard_normal((20, 3, 32)).astype(np.float32)
    pages = np.full(16 * 16 * 2, POISON, np.uint32)
    kernel, table = make_kv_append(1, 1, 32, 16), np.array([-1, 1], np.int32)
    out = run(kernel, append_grid(1, 32, 20), KV_THREADS, qkv, table, np.int32(0), pages, pages.copy())
    for found in out[2:]:
        written = (found.reshape(2, 16, 16) != POISON).any(-1)
        assert not written[0].any()
        assert written[1, :4].all()
        assert not written[1, 4:].any()


def test_impossible_rows_are_refused():
    with pytest.raises(KernelError, match="multiple of 128"):
        make_norm_rows(100, 128, 1)
