"""Prefill attention against float64 on the same queries and fp16 keys and values, over poisoned pages."""

from __future__ import annotations

import numpy as np
import pytest
from int4_cases import relative_error

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.errors import KernelError
from kernels_numba.launching import Launch
from kernels_numba.prefill_attention import attention_grid, make_prefill_attention

# two terms: float32 sums and the 2^-22 that is left of a query or probability; one term: 2^-11 of each
BOUNDS = {2: 1e-5, 1: 1e-3}
PAGE = 16


def softmax_attention(q, k, v, start):
    """Float64 [T, heads, head_dim] from q [T, heads, head_dim] and k, v [S, kv_heads, head_dim]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.arange(len(k)) <= start + np.arange(len(q))[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def paged(x: np.ndarray, table: np.ndarray, pages: int) -> np.ndarray:
    """Vectors [S, kv_heads, head_dim] in their pages, as words; everything else is NaN."""
    out = np.full((pages, x.shape[1], PAGE, x.shape[2]), np.nan, np.float16)
    for at, vectors in enumerate(x):
        out[table[at // PAGE], :, at % PAGE] = vectors
    return out.reshape(-1).view(np.uint32)


def attend(rng, heads, kv_heads, head_dim, start, tokens, warps=2, terms=2, capability=(9, 0), stretch=1.0):
    """Runs the kernel; gives what it wrote and what it should have."""
    length = start + tokens
    q = (rng.standard_normal((tokens, heads, head_dim)) * stretch).astype(np.float32)
    k, v = (rng.standard_normal((length, kv_heads, head_dim)).astype(np.float16) for _ in range(2))
    qkv = np.concatenate([q, np.full((tokens, 2 * kv_heads, head_dim), np.nan, np.float32)], 1)
    used = -(-length // PAGE)
    pages = used + 2
    table = np.concatenate([rng.permutation(pages)[:used], [0x7EADBEEF]]).astype(np.int32)
    out = np.full(q.size + 4, np.nan, np.float32)
    kernel = make_prefill_attention(heads, kv_heads, head_dim, PAGE, warps, terms, capability)
    arrays = [memory.upload(a) for a in (qkv, paged(k, table, pages), paged(v, table, pages), table, out)]
    scalars = (np.int32(start), np.int32(tokens))
    Launch(kernel, attention_grid(heads, tokens, warps), 32 * warps, *arrays[:4], *scalars, arrays[4]).run()
    found = memory.download(arrays[4])
    assert np.isnan(found[-4:]).all(), "the guard after the output was written"
    return found[:-4].reshape(q.shape), softmax_attention(q, k, v, start)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (7, 1, 64), (1, 1, 128)])
def test_head_sizes_and_groups(rng, heads, kv_heads, head_dim, terms):
    found, expected = attend(rng, heads, kv_heads, head_dim, 3, 18, terms=terms)
    assert relative_error(found, expected) < BOUNDS[terms]


@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (0, 16), (0, 33), (15, 17), (16, 16), (31, 2), (63, 1), (50, 37)]
)
def test_lengths_around_pages_and_tiles(rng, start, tokens):
    found, expected = attend(rng, 1, 1, 32, start, tokens)
    assert relative_error(found, expected) < BOUNDS[2]


def test_capability_7_5(rng, settings):
    settings.compute_capability = (7, 5)
    found, expected = attend(rng, 2, 1, 64, 5, 20, capability=(7, 5))
    assert relative_error(found, expected) < BOUNDS[2]


def test_scores_of_3e5_are_finite_and_right(rng):
    found, expected = attend(rng, 1, 1, 64, 8, 10, stretch=1.2e5)
    # one key wins each query; two that are 1 apart at 3e5 would be resolved to 2^-22 * 3e5 = 0.07
    assert np.isfinite(found).all()
    assert relative_error(found, expected) < 1e-2


@pytest.mark.skipif(stage.name != "sim", reason="the order of warps is the simulator's to choose")
def test_any_order_of_warps_gives_the_same_bits(settings):
    outputs = []
    for order in ("forward", "reverse", 3):
        settings.warp_order = order
        outputs.append(attend(np.random.default_rng(5), 2, 1, 32, 10, 30)[0])
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


def test_impossible_shapes_are_refused():
    with pytest.raises(KernelError, match="head_dim must be 32, 64 or 128"):
        make_prefill_attention(4, 2, 96, PAGE)
