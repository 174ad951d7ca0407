"""The teaching pair: what the faulty kernel does on each stage and mode, and that the mended one is right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.launching import Launch
from kernels_numba.simulator.errors import DivergentBarrier
from kernels_numba.teaching import (
    DIM,
    PAGE,
    THREADS,
    attention_spec,
    faulty_attention,
    leaves_idle_warp,
    mended_attention,
)

IDLE = [33, 40, 56, 68]  # the last page leaves a warp without tokens
BUSY = [25, 32, 57, 64]
TOLERANCE = 1e-5  # float32 accumulation
RUNS = 10 if stage.name == "gpu" else 1  # a race may come out right now and then; this one must not
WRONG = 1e-3  # one token of 33 that is left out may weigh little, and is still far above the bound of what is right


def error(out: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(out - right) / np.linalg.norm(right))


def attend(rng: np.random.Generator, kernel: Any, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kernel's output over NaN-poisoned pages; the right one; and the one without the last, partial page."""
    q = rng.standard_normal(DIM).astype(np.float32)
    k, v = rng.standard_normal((2, length, DIM)).astype(np.float32)
    pages = -(-length // PAGE)
    table = rng.permutation(pages + 1)[:pages].astype(np.int32)
    k_pages, v_pages = np.full((2, pages + 1, PAGE, DIM), np.nan, np.float32)
    for token in range(length):
        k_pages[table[token // PAGE], token % PAGE] = k[token]
        v_pages[table[token // PAGE], token % PAGE] = v[token]
    out = memory.filled(DIM, np.float32, np.nan)
    arrays = q, k_pages, v_pages, np.append(table, np.int32(2**30)), np.array([length], np.int32)
    shaped = [memory.upload(a).reshape(a.shape) for a in arrays]
    Launch(kernel, 1, THREADS, *shaped, out).run()
    whole = length // PAGE * PAGE
    too_early = attention_spec(q, k[:whole], v[:whole]) if whole else np.full(DIM, np.nan)
    return memory.download(out), attention_spec(q, k, v), too_early


def test_which_lengths_leave_a_warp_idle():
    assert [n for n in range(64, 97) if leaves_idle_warp(n)] == list(range(65, 89))
    assert all(leaves_idle_warp(n) for n in (100, 104, 136))


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.parametrize("length", [1, *IDLE, *BUSY])
def test_the_mended_kernel_is_right_for_all_lengths(rng, settings, length, order):
    settings.warp_order = order
    out, right, _ = attend(rng, mended_attention, length)
    assert error(out, right) < TOLERANCE


@pytest.mark.skipif(stage.name == "gpu", reason="a GPU names no barriers")
@pytest.mark.parametrize("length", [64, 68])
def test_the_simulator_names_both_barriers_of_the_faulty_kernel(rng, length):
    with pytest.raises(DivergentBarrier) as raised:
        attend(rng, faulty_attention, length)
    sites = re.findall(r"faulty_attention:(\d+) `cuda.syncthreads\(\)  # (.*?)`", str(raised.value))
    assert len({line for line, _ in sites}) == 2
    assert [meaning for _, meaning in sites] == ["the page is full"] * 2


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.parametrize("length", IDLE)
def test_the_faulty_kernel_merges_too_early_where_a_warp_is_idle(rng, settings, length, order):
    settings.hardware, settings.warp_order = True, order
    for _ in range(RUNS):
        out, right, too_early = attend(rng, faulty_attention, length)
        assert error(out, right) > WRONG
        assert error(out, too_early) < TOLERANCE


@pytest.mark.parametrize("length", BUSY)
def test_the_faulty_kernel_is_right_where_all_warps_have_work(rng, settings, length):
    settings.hardware = True
    out, right, _ = attend(rng, faulty_attention, length)
    assert error(out, right) < TOLERANCE


def test_on_a_single_page_the_early_merge_finds_nothing(rng, settings):
    settings.hardware = True
    out, _, _ = attend(rng, faulty_attention, 20)
    assert np.isnan(out).all()
