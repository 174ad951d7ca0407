"""Paged decode attention against float64, over pages whose unused slots are NaN."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Case

from kernels_numba import device_memory as memory
from kernels_numba.errors import KernelError
from kernels_numba.paged_attention import WARPS, AttentionShape, make_paged_attention, plan_attention

TOLERANCE = 1e-5  # float32 accumulation; q and the weights enter with 22 bits
SMALL = AttentionShape(4, 2, 32, 16, 2)


def attention(case: Case, capability: tuple[int, int] = (8, 0)) -> np.ndarray:
    s = case.shape
    kernel = make_paged_attention(s.heads, s.kv_heads, s.head_dim, s.page_size, s.splits, 0, capability)
    return case.run(kernel, 32 * WARPS)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49])
def test_lengths_around_page_boundaries_in_one_split(rng, length):
    case = Case(rng, AttentionShape(4, 2, 32, 16, 1), length)
    assert case.error(attention(case)) < TOLERANCE


@pytest.mark.parametrize("length", [64, 65, 127, 129, 145])
def test_lengths_around_the_ends_of_splits(rng, length):
    case = Case(rng, AttentionShape(2, 1, 32, 16, 2), length)
    assert case.error(attention(case)) < TOLERANCE


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(1, 1, 32, 16, 1),
        AttentionShape(7, 1, 128, 16, 2),
        AttentionShape(3, 1, 64, 64, 1),
        AttentionShape(9, 1, 32, 16, 2),
        AttentionShape(16, 1, 32, 32, 1),
    ],
    ids=lambda s: f"{s.heads}of{s.kv_heads}x{s.head_dim}page{s.page_size}splits{s.splits}",
)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_groups_head_dims_and_page_sizes(rng, shape, capability):
    case = Case(rng, shape, 70)
    assert case.error(attention(case, capability)) < TOLERANCE


def test_a_split_longer_than_the_block_takes_further_rounds(rng):
    case = Case(rng, AttentionShape(1, 1, 32, 16, 1), 16 * WARPS + 5)
    assert case.error(attention(case)) < TOLERANCE


@pytest.mark.parametrize("order", ["reverse", 3])
def test_the_order_of_warps_changes_no_bit(rng, settings, order):
    case = Case(rng, SMALL, 81)
    forward = attention(case)
    settings.warp_order = order
    np.testing.assert_array_equal(attention(case), forward)


def test_what_unused_memory_holds_changes_no_bit(rng):
    case = Case(rng, SMALL, 70)
    first = attention(case)
    table = memory.download(case.arguments[3])
    for pages in case.arguments[1:3]:
        words = memory.download(pages).view(np.float16).reshape(-1, 2, 16, 32)
        words[np.isnan(words)] = np.inf
        words[table[4], :, 6:] = 3.0  # the rest of the tail page, after token 69
        memory.overwrite(pages, words.view(np.uint32).reshape(-1))
    memory.overwrite(case.arguments[3], np.array([-1, 2**31 - 1]), 5)
    np.testing.assert_array_equal(attention(case), first)


def test_one_workspace_serves_one_length_after_another(rng):
    case = Case(rng, SMALL, 130)
    k, v = case.k, case.v
    for length in (130, 20, 70):
        memory.overwrite(case.arguments[4], np.array([length - 1]))
        out = attention(case)
        case.k, case.v = k[:, :length], v[:, :length]
        assert case.error(out) < TOLERANCE


def test_scores_of_3e5_are_finite_and_right(rng):
    case = Case(rng, SMALL, 70)
    case.q *= np.float32(3e5 * np.sqrt(32) / 32)
    case.k[:] = np.sign(case.k)
    case.k[0, 5] = case.k[0, 40] = np.where(case.q[0] < 0, -1, 1)  # two tokens share head 0's largest score
    case.place(rng)
    out = attention(case)
    np.testing.assert_allclose(out[0], (case.v[0, 5].astype(float) + case.v[0, 40]) / 2, rtol=1e-5, atol=1e-6)
    assert case.error(out) < TOLERANCE


def test_heads_of_very_different_size(rng):
    case = Case(rng, SMALL, 33)
    case.q *= np.array([[1e-20], [1e4], [1e-3], [0]], np.float32)
    case.q[2, 7] = 30  # one large element among small ones
    case.place(rng)
    assert case.error(attention(case)) < TOLERANCE


def test_a_nan_in_use_is_seen_in_its_own_heads_alone(rng):
    case = Case(rng, SMALL, 20)
    case.k[1, 3, 0] = np.nan
    case.place(rng)
    out = attention(case)
    assert np.isnan(out[2:]).all()
    assert np.isfinite(out[:2]).all()


def test_the_plan_gives_each_multiprocessor_a_block():
    plan = plan_attention(28, 4, 128, 16, 16384, 132)
    assert (plan.grid, plan.tickets, plan.workspace) == ((4, 33), 4, 4 * 33 * 8 * 130)
    assert plan_attention(28, 4, 128, 16, 128, 132).splits == 2  # no more than there are tokens for
    assert plan_attention(4, 2, 32, 16, 512, 1).splits == 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 2, 48, 16, 1), "head_dim 48"),
        ((4, 3, 32, 16, 1), "4 heads on 3 KV heads"),
        ((4, 2, 32, 8, 1), "pages of 8 tokens"),
        ((4, 2, 32, 16, 0), "0 splits"),
    ],
)
def test_impossible_shapes_are_refused(numbers, message):
    with pytest.raises(KernelError, match=message):
        make_paged_attention(*numbers)
