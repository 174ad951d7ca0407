"""Repacking the words of AWQ and GPTQ checkpoints into the kernels' layout, bit for bit.

Both formats mean w[n, k] = s * (q - z) with 4-bit q and z and fp16 s, one s and z per output and group of inputs; they
differ in how words are packed. Layouts as in AutoAWQ's WQLinear_GEMM and GPTQModel's TorchQuantLinear.
"""

from __future__ import annotations

import numpy as np

from rtlib.errors import CheckpointError
from rtlib.nibbles import pack_codes, pack_scales_zeros
from rtlib.quantise import Int4Weight
from rtlib.scheme import PER_CHANNEL, QuantScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column 8 * word + AWQ_ORDER[i]
NATURAL_ORDER = tuple(range(8))
EXPANDED_GROUP = 128  # the group that a per-channel scale is repeated over
_ONE_IN_EACH_NIBBLE = np.uint32(0x11111111)


def effective_group(scheme: QuantScheme) -> int:
    """Return the group size of the repacked weights."""
    return EXPANDED_GROUP if scheme.group == PER_CHANNEL else scheme.group


def repack(scheme: QuantScheme, words: dict[str, np.ndarray], name: str) -> tuple[Int4Weight, np.ndarray | None]:
    """Return one linear's weight, and the order of its inputs if act-order moved them (int32 [K]), else None.

    `words` holds qweight, qzeros, scales and for GPTQ perhaps g_idx, as the checkpoint has them. With an order, column
    j of the weight belongs to input order[j]: groups become contiguous, and inputs are gathered before the product.
    Raises CheckpointError, naming the linear, for scales that are NaN or infinite and for groups of unequal size.
    """
    scales = words["scales"].T
    if bad := scales.size - np.count_nonzero(np.isfinite(scales)):
        raise CheckpointError(f"{name}.scales holds {bad} values that are NaN or infinite; fetch the checkpoint again")
    order = None
    if scheme.method == "awq":
        codes = _unpack_columns(words["qweight"], AWQ_ORDER).T
        zeros = _unpack_columns(words["qzeros"], AWQ_ORDER).T
    else:
        codes = _unpack_rows(words["qweight"]).T
        zeros = _gptq_zeros(words["qzeros"], scheme.zeros_less_one).T
        order = _input_order(words.get("g_idx"), scales.shape[1], name)
    codes = np.ascontiguousarray(codes if order is None else codes[:, order])
    group = effective_group(scheme)
    if scheme.group == PER_CHANNEL:
        repeats = codes.shape[1] // group
        scales, zeros = np.repeat(scales, repeats, axis=1), np.repeat(zeros, repeats, axis=1)
    return Int4Weight(pack_codes(codes), pack_scales_zeros(scales, zeros), group), order


def _unpack_columns(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Return the nibbles of words packed along the last axis: int32 [R, C] to uint8 [R, 8 * C]."""
    codes = np.empty((*words.shape, 8), np.uint8)
    for nibble, column in enumerate(order):
        codes[..., column] = _nibble(words, nibble)
    return codes.reshape(len(words), -1)


def _unpack_rows(words: np.ndarray) -> np.ndarray:
    """Return the nibbles of words packed along the first axis: int32 [R, C] to uint8 [8 * R, C]."""
    codes = np.empty((words.shape[0], 8, words.shape[1]), np.uint8)
    for nibble in NATURAL_ORDER:
        codes[:, nibble] = _nibble(words, nibble)
    return codes.reshape(-1, words.shape[1])


def _nibble(words: np.ndarray, index: int) -> np.ndarray:
    """Return one nibble of each word; the words are read as unsigned, so that the shift brings in no sign."""
    return (words.view(np.uint32) >> np.uint32(4 * index) & np.uint32(0xF)).astype(np.uint8)


def _gptq_zeros(words: np.ndarray, less_one: bool) -> np.ndarray:
    """Return the zero points [groups, N] of GPTQ's qzeros, which version 1 stores minus one.

    The one is added to whole words, as GPTQModel does: a stored 15 becomes 0 and carries into the next nibble. That
    undoes exactly what its writer does for a zero point of 0, which borrows from the next nibble. Readers that add to
    each nibble, or allow a zero point of 16, differ there and nowhere else.
    """
    unsigned = words.view(np.uint32)
    return _unpack_columns(unsigned + _ONE_IN_EACH_NIBBLE if less_one else unsigned, NATURAL_ORDER)


def _input_order(g_idx: np.ndarray | None, groups: int, name: str) -> np.ndarray | None:
    """Return the order that makes the groups contiguous, or None when they are already.

    Inputs of one group keep their order; g_idx int32 [K] gives each input's group.
    """
    if g_idx is None:
        return None
    size = len(g_idx) // groups
    inside = g_idx.min() >= 0 and g_idx.max() < groups
    counts = np.bincount(g_idx, minlength=groups) if inside else np.zeros(1)
    if not (counts == size).all():
        raise CheckpointError(f"{name}.g_idx does not split {len(g_idx)} inputs into {groups} groups of {size}")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    return None if (np.diff(order) == 1).all() else order
