"""The bit layout of INT4 weights that the kernels read: eight codes to a word, scale and zero point in another.

Input j of a word's eight consecutive inputs sits at bit 8j for j < 4 and at bit 8(j - 4) + 4 for the others:
w & 0x0F0F0F0F gives inputs 0-3 as bytes (what dp4a takes), (w >> 4) & 0x0F0F0F0F inputs 4-7, and w & 0x000F000F the
pair 0, 2 as halves (what the fp16 magic number takes).
"""

from __future__ import annotations

import numpy as np


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Pack uint8 codes 0..15 [N, K] into uint32 [N, K / 8]."""
    halves = codes.reshape(len(codes), -1, 2, 4)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view("<u4")[..., 0]


def unpack_codes(words: np.ndarray) -> np.ndarray:
    """Return the uint8 codes [N, K] of uint32 words [N, K / 8]."""
    lanes = np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(*words.shape, 1, 4)
    return np.concatenate([lanes & 0x0F, lanes >> 4], axis=2).reshape(len(words), -1)


def pack_scales_zeros(scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Pack scales and zero points, rounded to float16, into uint32 words of the same shape: the scale lies low."""
    low = scales.astype(np.float16).view(np.uint16).astype(np.uint32)
    high = zeros.astype(np.float16).view(np.uint16).astype(np.uint32)
    return low | high << 16


def unpack_scales_zeros(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the float16 scales and zero points of uint32 words, in the words' shape."""
    scales = (words & 0xFFFF).astype(np.uint16).view(np.float16)
    return scales, (words >> 16).astype(np.uint16).view(np.float16)
