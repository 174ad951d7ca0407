"""What the kernels do to the input of a linear before the product: the specification of each activation form.

All arithmetic is float32 to the nearest even, so that a kernel can agree bit for bit.
"""

from __future__ import annotations

import numpy as np

FORMS = ("int8", "fp16", "bf16")
BLOCK = 32  # consecutive inputs that share a scale: one per lane of a warp
_SMALLEST = np.float32(1e-30)  # a block below this is taken as zero: 127 / absmax would leave float32


def activation_codes(x: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what a kernel keeps of activations [..., K], K a multiple of 32: values in the form, and float32 scales.

    The scales are [..., K / 32]; an activation is value * scale.
    int8: codes rint(x * (127 / absmax)), scale absmax / 127; both divisions and the product in float32.
    fp16: float16 of x / scale, scale the power of two that brings absmax into [1, 2): nothing overflows, and 16
    products with codes up to 15 still add up in fp16. bf16: uint16, the upper half of the rounded float32; scale 1.
    """
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    absmax = np.abs(blocks).max(axis=-1)
    if form == "int8":
        values, scales = _to_int8(blocks, absmax)
    elif form == "fp16":
        scales = np.where(absmax < _SMALLEST, 1, np.ldexp(np.float32(1), np.frexp(absmax)[1] - 1)).astype(np.float32)
        values = (blocks / scales[..., None]).astype(np.float16)
    elif form == "bf16":
        values, scales = _to_bf16(blocks), np.ones_like(absmax)
    else:
        raise ValueError(f"activation form {form!r}, expected one of {', '.join(FORMS)}")
    return values.reshape(x.shape), scales


def round_activation(x: np.ndarray, form: str | None) -> np.ndarray:
    """Return float64 activations [..., K] as a product in that form sees them; with None they are left as they are."""
    if form is None:
        return np.asarray(x, np.float64)
    values, scales = activation_codes(x, form)
    if form == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64) * np.repeat(scales.astype(np.float64), BLOCK, axis=-1)


def _to_int8(blocks: np.ndarray, absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes and scales of blocks float32 [..., B, 32]."""
    live = absmax >= _SMALLEST
    factors = np.divide(np.float32(127), absmax, out=np.zeros_like(absmax), where=live)
    scales = np.where(live, absmax / np.float32(127), np.float32(0))
    return np.rint(blocks * factors[..., None]).astype(np.int8), scales


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
