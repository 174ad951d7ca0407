"""Seeded INT4 weights and rounded activations in the kernels' formats, and what they mean in float64."""

from __future__ import annotations

import numpy as np


def pack_codes(q: np.ndarray) -> np.ndarray:
    """Codes 0..15 [N, K] as words [N, K / 8]: element j at bit 8j, or at 8(j - 4) + 4 from j = 4 on."""
    shifts = np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32)
    words = q.reshape(len(q), -1, 8).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(words, axis=-1).astype(np.uint32)


ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # of each 8 values of a rounded row


def row_words(x: np.ndarray) -> np.ndarray:
    """Rows of fp16 numbers as flat words of two, in the order of rounded rows."""
    return np.ascontiguousarray(x.reshape(-1, 8)[:, ORDER], np.float16).reshape(-1).view(np.uint32)


def words_halves(words: np.ndarray, columns: int) -> np.ndarray:
    """Words of two fp16 numbers as float64 [-1, columns]."""
    return words.view(np.float16).reshape(-1, columns).astype(np.float64)


def int4_weight(rng: np.random.Generator, n: int, k: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat codes, flat scales_zeros (fractional zero points; one scale is 0), and the weight as float64 [N, K]."""
    q = rng.integers(0, 16, (n, k))
    s = (rng.uniform(0.5, 1.5, (n, k // group)) / np.sqrt(k)).astype(np.float16)
    z = rng.uniform(5, 10, (n, k // group)).astype(np.float16)
    s[0, 0] = 0
    packed = s.view(np.uint16).astype(np.uint32) | z.view(np.uint16).astype(np.uint32) << 16
    weight = np.repeat(s.astype(np.float64), group, 1) * (q - np.repeat(z.astype(np.float64), group, 1))
    return pack_codes(q).reshape(-1), packed.reshape(-1), weight


def rounded_rows(
    rng: np.random.Generator, tokens: int, k: int, group: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales and sums of `tokens` rows, with NaN in the sums' unused columns; and the rows as float64."""
    values = rng.standard_normal((tokens, k)).astype(np.float16)
    scales = (2.0 ** rng.integers(-3, 4, tokens)).astype(np.float32)
    sums = np.full((k // group, capacity), np.nan, np.float32)
    sums[:, :tokens] = values.astype(np.float64).reshape(tokens, -1, group).sum(-1).T
    return row_words(values), scales, sums.reshape(-1), values.astype(np.float64) * scales[:, None]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """L2(got - expected) / L2(expected), NaN and infinity included."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))
