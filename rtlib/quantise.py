"""Group-wise INT4 quantisation that searches scale and zero point, and the int8 embedding table."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from rtlib.nibbles import pack_codes, pack_scales_zeros, unpack_codes, unpack_scales_zeros

CODE_MAX = 15
TABLE_GROUP = 128  # inputs per scale of the embedding table
_CHUNK = 2**18  # weights per step: few enough for the caches, enough that the calls themselves cost little (measured)
_SHRINKS = (1.0, 0.85, 0.7)  # parts of a group's lower and upper range to start from; what lies outside is clipped
_REFINEMENTS = 4
_FP16_MAX = float(np.finfo(np.float16).max)
# float32 [groups, group] -> codes as float32 of the same shape, scales and zero points as float32 [groups], fp16-exact
Method = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Int4Weight:
    """An INT4 matrix of N outputs and K inputs, w = s * (q - z), in the layout the kernels read (rtlib.nibbles).

    codes uint32 [N, K / 8]; scales_zeros uint32 [N, K / group], fp16 scale below and fp16 zero point above.
    """

    codes: np.ndarray
    scales_zeros: np.ndarray
    group: int

    @property
    def outputs(self) -> int:
        """Return N."""
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """Return K."""
        return self.codes.shape[1] * 8


@dataclass(frozen=True)
class Int8Table:
    """An embedding table, w = s * code: codes int8 [V, H], scales float16 [V, H / 128]."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def quantise(weight: np.ndarray, group: int = 128) -> Int4Weight:
    """Quantise float32 [N, K] to INT4, choosing each group's scale and zero point for the least squared error.

    Several clipped ranges are tried; the best is refined by alternating least squares: codes for fixed scale and zero
    point, then scale and zero point for fixed codes. Every candidate is judged after rounding to fp16. Zero points stay
    in [0, 15], so that q - z is small. A group of zeros gives zeros. K must be a multiple of `group`; weights finite.
    """
    return _by_chunks(weight, group, _search)


def quantise_nearest(weight: np.ndarray, group: int = 128) -> Int4Weight:
    """Quantise float32 [N, K] to INT4 by round-to-nearest over the range of each group, zero point an integer.

    The common baseline, kept to measure the search against.
    """
    return _by_chunks(weight, group, _nearest)


def dequantise(weight: Int4Weight | Int8Table, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Return float64 weights, all or some rows: exactly s * (q - z) for INT4, s * code for the int8 table."""
    if isinstance(weight, Int8Table):
        codes = weight.codes[rows].astype(np.float64)
        scales = weight.scales[rows].astype(np.float64)
        return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)
    codes = unpack_codes(weight.codes[rows]).astype(np.float64)
    scales, zeros = unpack_scales_zeros(weight.scales_zeros[rows])
    grouped = codes.reshape(*scales.shape, weight.group)
    grouped -= zeros.astype(np.float64)[..., None]
    grouped *= scales.astype(np.float64)[..., None]
    return codes


def quantise_embedding(table: np.ndarray) -> Int8Table:
    """Quantise float32 [V, H] to symmetric int8 with one fp16 scale per 128, the largest magnitude becoming 127."""
    grouped = table.reshape(len(table), -1, TABLE_GROUP)
    scales = np.minimum(np.abs(grouped).max(axis=2) / 127, _FP16_MAX).astype(np.float16)
    codes = np.rint(grouped * _inverse(scales.astype(np.float32))[..., None])
    return Int8Table(np.clip(codes, -127, 127).astype(np.int8).reshape(table.shape), scales)


def _by_chunks(weight: np.ndarray, group: int, method: Method) -> Int4Weight:
    """Apply a method to blocks of rows on all cores (NumPy releases the interpreter lock) and pack the results."""
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"{inputs} inputs are not a multiple of the group size {group}")
    codes = np.empty((outputs, inputs // 8), np.uint32)
    scales_zeros = np.empty((outputs, inputs // group), np.uint32)
    step = max(1, _CHUNK // inputs)

    def run(start: int) -> None:
        rows = slice(start, min(start + step, outputs))
        groups = np.ascontiguousarray(weight[rows], np.float32).reshape(-1, group)
        chosen, scales, zeros = method(groups)
        codes[rows] = pack_codes(chosen.astype(np.uint8).reshape(-1, inputs))
        scales_zeros[rows] = pack_scales_zeros(scales, zeros).reshape(-1, inputs // group)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, range(0, outputs, step)))
    return Int4Weight(codes, scales_zeros, group)


def _nearest(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round to nearest over each group's range."""
    scales, zeros = _cover(*_range(groups))
    zeros = np.rint(zeros)
    rounding = _Rounding(groups)
    rounding.error(scales, zeros)
    return rounding.codes, scales, zeros


def _search(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Search the scale and zero point of the least squared error; see quantise."""
    low, high = _range(groups)
    rounding = _Rounding(groups)
    best_scales = best_zeros = np.zeros(len(groups), np.float32)
    least = rounding.energies  # the error of scale 0

    def keep_better(scales: np.ndarray, zeros: np.ndarray) -> None:
        nonlocal best_scales, best_zeros, least
        error = rounding.error(scales, zeros)
        better = error < least
        best_scales = np.where(better, scales, best_scales)
        best_zeros = np.where(better, zeros, best_zeros)
        least = np.where(better, error, least)

    for lower, upper in product(_SHRINKS, _SHRINKS):
        keep_better(*_cover(low * np.float32(lower), high * np.float32(upper)))
    rounding.error(best_scales, best_zeros)
    for _ in range(_REFINEMENTS):
        keep_better(*rounding.fit())
    rounding.error(best_scales, best_zeros)
    return rounding.codes, best_scales, best_zeros


class _Rounding:
    """The codes that some groups take for a given scale and zero point, in arrays that are used again and again."""

    def __init__(self, groups: np.ndarray) -> None:
        """Take float32 [groups, group]."""
        self.groups = groups
        self.sums = groups.sum(axis=1)
        self.energies = np.einsum("ij,ij->i", groups, groups)
        self.codes = np.empty_like(groups)
        self._scaled = np.empty_like(groups)

    def error(self, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Set `codes` for float32 scales and zero points [groups]; return each group's sum of squared errors."""
        scaled, codes = self._scaled, self.codes
        np.multiply(self.groups, _inverse(scales)[:, None], out=scaled)
        np.add(scaled, zeros[:, None], out=scaled)
        np.rint(scaled, out=codes)
        np.clip(codes, 0, CODE_MAX, out=codes)
        np.subtract(scaled, codes, out=scaled)
        # a scale of 0 stands for weights of 0, whatever the codes
        return np.where(scales > 0, np.einsum("ij,ij->i", scaled, scaled) * scales * scales, self.energies)

    def fit(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and zero points of the least squared error for the present codes, both rounded to fp16.

        w = s * q + b is a straight line through the points (q, w); the zero point -b / s is rounded and bounded first,
        then the scale is the best one for that zero point.
        """
        count = self.groups.shape[1]
        q, qq = self.codes.sum(axis=1), np.einsum("ij,ij->i", self.codes, self.codes)
        qw = np.einsum("ij,ij->i", self.codes, self.groups)
        slope = (count * qw - q * self.sums) * _inverse(count * qq - q * q)
        zeros = _fp16(np.clip((q - self.sums * _inverse(slope)) / count, 0, CODE_MAX))
        scales = (qw - zeros * self.sums) * _inverse(qq - 2 * zeros * q + count * zeros * zeros)
        return _fp16(np.maximum(scales, 0)), zeros


def _range(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of each group's range, 0 included."""
    return np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)


def _cover(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and zero points, rounded to fp16, whose 16 codes reach from `low` to `high`."""
    scales = _fp16(high / CODE_MAX - low / CODE_MAX)
    return scales, _fp16(np.clip(-low * _inverse(scales), 0, CODE_MAX))


def _fp16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to what fp16 can hold."""
    return np.minimum(values, _FP16_MAX).astype(np.float16).astype(np.float32)


def _inverse(values: np.ndarray) -> np.ndarray:
    """Return 1 / values, with 0 for 0 and for what is so small that its inverse overflows."""
    inverse = np.zeros_like(values)
    np.divide(1, values, out=inverse, where=np.abs(values) > 1e-37)
    return inverse
