"""Decode attention over poisoned pages, and its float64 spec, for the tests of both attention kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba import device_memory as memory
from kernels_numba.launching import Launch
from kernels_numba.paged_attention import AttentionShape

GARBAGE = 0x0DDBAD00  # a page that no pool has
GUARD = 8


def expected_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q K^T / sqrt(head_dim)) V in float64: q [heads, head_dim], k and v [kv_heads, tokens, head_dim]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    out = np.empty_like(q)
    for h in range(q.shape[0]):
        scores = k[h // group] @ q[h] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[h] = weights @ v[h // group] / weights.sum()
    return out


def paged(rng: np.random.Generator, k: np.ndarray, page_size: int, spare: int) -> tuple[np.ndarray, np.ndarray]:
    """K or V [kv_heads, tokens, head_dim] scattered over shuffled pages full of NaN, and the block table for it.

    spare: pages, and cells of the block table, that nothing uses.
    """
    kv_heads, tokens, head_dim = k.shape
    used = -(-tokens // page_size)
    pages = np.full((used + spare, kv_heads, page_size, head_dim), np.nan, np.float16)
    table = np.full(used + spare, GARBAGE, np.int32)
    table[:used] = rng.permutation(used + spare)[:used]
    for token in range(tokens):
        pages[table[token // page_size], :, token % page_size] = k[:, token]
    return pages.view(np.uint32).reshape(-1), table


class Case:
    """One attention to run: made from its shape and length, with all inputs and outputs on the device."""

    def __init__(self, rng: np.random.Generator, shape: AttentionShape, length: int, scale: float = 1.0):
        self.shape = shape
        self.q = (rng.standard_normal((shape.heads, shape.head_dim)) * scale).astype(np.float32)
        self.k, self.v = (
            rng.standard_normal((shape.kv_heads, length, shape.head_dim)).astype(np.float16) for _ in range(2)
        )
        self.place(rng)

    def place(self, rng: np.random.Generator) -> None:
        """Puts q, k and v where the kernel reads them."""
        seed = int(rng.integers(2**32))
        keys, table = paged(np.random.default_rng(seed), self.k, self.shape.page_size, 2)
        values, _ = paged(np.random.default_rng(seed), self.v, self.shape.page_size, 2)
        self.tickets = memory.filled(self.shape.tickets, np.uint32)
        self.out = memory.filled(self.q.size + GUARD, np.float32, np.nan)
        self.arguments = (
            memory.upload(self.q),
            memory.upload(keys),
            memory.upload(values),
            memory.upload(table),
            memory.filled(1, np.int32, self.k.shape[1] - 1),
            memory.filled(self.shape.workspace, np.float32, np.nan),
            self.tickets,
            self.out,
        )

    def run(self, kernel: Any, block: int) -> np.ndarray:
        """The output of one launch [heads, head_dim]."""
        Launch(kernel, self.shape.grid, block, *self.arguments).run()
        out = memory.download(self.out)
        assert np.isnan(out[self.q.size :]).all(), "the guard after the output was written"
        assert not memory.download(self.tickets).any(), "a ticket was not put back to 0"
        return out[: self.q.size].reshape(self.q.shape)

    def error(self, out: np.ndarray) -> float:
        """Relative L2 error of the output against the spec."""
        right = expected_attention(self.q, self.k, self.v)
        return float(np.linalg.norm(out - right) / np.linalg.norm(right))
