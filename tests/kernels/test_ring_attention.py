"""Ring attention against float64 on every path of its producer, over pages whose unused slots are NaN."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Case

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.paged_attention import AttentionShape
from kernels_numba.ring_attention import STAGES, THREADS, make_ring_attention

TOLERANCE = 1e-5  # float32 accumulation; q and the weights enter with 22 bits
PATHS = [(7, 5), (8, 0), (9, 0)]  # plain loads, cp.async, bulk copies


def attention(case: Case, capability: tuple[int, int]) -> np.ndarray:
    if stage.name == "gpu" and capability > stage.compute_capability():
        pytest.skip(f"the path of {capability} needs a GPU that has it")
    s = case.shape
    kernel = make_ring_attention(s.heads, s.kv_heads, s.head_dim, s.page_size, s.splits, 0, capability)
    return case.run(kernel, THREADS)


@pytest.mark.parametrize("capability", PATHS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 65])
def test_lengths_around_page_boundaries_in_one_split(rng, capability, length):
    case = Case(rng, AttentionShape(4, 2, 32, 16, 1), length)
    assert case.error(attention(case, capability)) < TOLERANCE


@pytest.mark.parametrize("capability", PATHS)
@pytest.mark.parametrize("length", [64, 65, 127, 129, 145])
def test_lengths_around_the_ends_of_splits(rng, capability, length):
    case = Case(rng, AttentionShape(2, 1, 32, 16, 2), length)
    assert case.error(attention(case, capability)) < TOLERANCE


@pytest.mark.parametrize("capability", PATHS)
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(7, 1, 128, 16, 2), AttentionShape(3, 1, 64, 64, 1), AttentionShape(16, 1, 32, 32, 1)],
    ids=lambda s: f"{s.heads}of{s.kv_heads}x{s.head_dim}page{s.page_size}splits{s.splits}",
)
def test_groups_head_dims_and_page_sizes(rng, capability, shape):
    case = Case(rng, shape, 70)
    assert case.error(attention(case, capability)) < TOLERANCE


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.parametrize("capability", PATHS)
def test_the_ring_goes_round_more_than_twice_in_every_order_of_warps(rng, settings, capability, order):
    settings.warp_order = order
    case = Case(rng, AttentionShape(1, 1, 32, 16, 1), 16 * (3 * STAGES + 1) + 7)
    assert case.error(attention(case, capability)) < TOLERANCE


def test_a_long_stretch_looks_up_its_pages_more_than_once(rng):
    case = Case(rng, AttentionShape(1, 1, 32, 16, 1), 16 * 33 + 1)
    assert case.error(attention(case, (9, 0))) < TOLERANCE


@pytest.mark.parametrize("capability", PATHS)
def test_what_unused_memory_holds_changes_no_bit(rng, capability):
    case = Case(rng, AttentionShape(4, 2, 32, 16, 2), 70)
    first = attention(case, capability)
    table = memory.download(case.arguments[3])
    for pages in case.arguments[1:3]:
        words = memory.download(pages).view(np.float16).reshape(-1, 2, 16, 32)
        words[np.isnan(words)] = np.inf
        words[table[4], :, 6:] = 3.0  # the rest of the tail page, after token 69
        memory.overwrite(pages, words.view(np.uint32).reshape(-1))
    memory.overwrite(case.arguments[3], np.array([-1, 2**31 - 1]), 5)
    np.testing.assert_array_equal(attention(case, capability), first)


@pytest.mark.parametrize("capability", PATHS)
def test_scores_of_3e5_are_finite_and_right(rng, capability):
    case = Case(rng, AttentionShape(4, 2, 32, 16, 2), 70)
    case.q *= np.float32(3e5 * np.sqrt(32) / 32)
    case.k[:] = np.sign(case.k)
    case.k[0, 5] = case.k[0, 40] = np.where(case.q[0] < 0, -1, 1)  # two tokens share head 0's largest score
    case.place(rng)
    out = attention(case, capability)
    np.testing.assert_allclose(out[0], (case.v[0, 5].astype(float) + case.v[0, 40]) / 2, rtol=1e-5, atol=1e-6)
    assert case.error(out) < TOLERANCE
