"""What a linear reads: 32 neighbouring activations rounded together, in one of three forms.

int8: codes rint(x * (127 / absmax)), scale absmax / 127. fp16: x over a power of two that brings absmax into [1, 2).
bf16: x rounded, scale 1. Beside the values stand, for each 32, the scale and scale * sum(values), which a weight's zero
point needs: sum(s * (q - z) * x) = s * (sum(q * x) - z * sum(x)).

A NaN or infinity among them gives a product that is NaN: int8 has no code for it, so the scale carries it.

Values are words (uint32): four int8 codes, or two halves. Pairs are float32 (scale, scale * sum).
"""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from kernels_numba.instructions.arithmetic import (
    bits_float,
    divide,
    float_bits,
    floats_half2,
    half2_floats,
    round_int,
)
from kernels_numba.reduce import ALL_LANES

INT8, FP16, BF16 = 0, 1, 2
FORMS = {"int8": INT8, "fp16": FP16, "bf16": BF16}
BLOCK = 32  # activations that share a scale

SMALLEST = 1e-30  # a block whose absmax is below counts as zero: 127 / absmax would overflow


def words_per_block(form: int) -> int:
    """uint32 words that 32 activations take."""
    return 8 if form == INT8 else 16


@cuda.jit(device=True)
def bf16_bits(x):
    """The upper half of a float32, rounded to nearest even; a NaN stays one."""
    if x != x:  # a GPU's has all bits set, and would wrap to zero below
        return uint32(0x7FFF)
    bits = float_bits(x)
    return uint32(uint32(bits + uint32(0x7FFF) + uint32((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@cuda.jit(device=True)
def magnitude(x):
    """|x| as an integer in the order of the numbers, NaN above all: a maximum of floats would lose a NaN."""
    return int32(uint32(float_bits(x) & uint32(0x7FFFFFFF)))


@cuda.jit(device=True)
def larger(value, hop):
    """The larger of a lane's magnitude and that of the lane `hop` away."""
    return max(value, int32(cuda.shfl_xor_sync(ALL_LANES, value, hop)))


@cuda.jit(device=True)
def lanes_absmax(x):
    """The largest |x| of a warp, in every lane; NaN if there is one."""
    return bits_float(uint32(larger(larger(larger(larger(larger(magnitude(x), 16), 8), 4), 2), 1)))


@cuda.jit(device=True)
def block_factor(absmax, form):
    """What x is multiplied with before it is rounded."""
    if form == INT8:
        return float32(0.0) if absmax < float32(SMALLEST) else divide(float32(127.0), absmax)
    if form == FP16 and absmax >= float32(SMALLEST):
        return bits_float(uint32(uint32(254 << 23) - uint32(float_bits(absmax) & uint32(0x7F800000))))
    return float32(1.0)


@cuda.jit(device=True)
def block_scale(absmax, form):
    """What a rounded value is multiplied with to give the activation."""
    if form == INT8:
        return float32(0.0) if absmax < float32(SMALLEST) else divide(absmax, float32(127.0))
    if form == FP16 and absmax >= float32(SMALLEST):
        return bits_float(uint32(float_bits(absmax) & uint32(0x7F800000)))
    return float32(1.0)


@cuda.jit(device=True)
def round_bits(x, form):
    """One scaled activation as its 8 or 16 bits."""
    if form == INT8:
        return uint32(uint32(round_int(x)) & uint32(0xFF))
    if form == FP16:
        return uint32(floats_half2(x, float32(0.0)))
    return bf16_bits(x)


@cuda.jit(device=True)
def bits_value(bits, form):
    """The number that `round_bits` stands for."""
    if form == INT8:
        return float32(int32(uint32(bits << uint32(24))) >> 24)
    if form == FP16:
        low, _ = half2_floats(bits)
        return low
    return bits_float(uint32(bits << uint32(16)))


@cuda.jit(device=True)
def round_four(a, b, c, d, form):
    """Rounds 32 activations that 8 neighbouring lanes hold, four each; all lanes of the warp must call it.

    Gives (first word, second word, scale, scale * sum); int8 has one word per lane, the others two.
    """
    largest = max(max(magnitude(a), magnitude(b)), max(magnitude(c), magnitude(d)))
    absmax = bits_float(uint32(larger(larger(larger(largest, 1), 2), 4)))
    factor = block_factor(absmax, form)
    p, q = round_bits(float32(a * factor), form), round_bits(float32(b * factor), form)
    r, s = round_bits(float32(c * factor), form), round_bits(float32(d * factor), form)
    total = float32(
        float32(bits_value(p, form) + bits_value(q, form)) + float32(bits_value(r, form) + bits_value(s, form))
    )
    total = float32(total + cuda.shfl_xor_sync(ALL_LANES, total, 1))
    total = float32(total + cuda.shfl_xor_sync(ALL_LANES, total, 2))
    total = float32(total + cuda.shfl_xor_sync(ALL_LANES, total, 4))
    scale = block_scale(absmax, form)
    if form == INT8:
        first = uint32(uint32(p | uint32(q << uint32(8))) | uint32(uint32(r << uint32(16)) | uint32(s << uint32(24))))
        second = uint32(0)
    else:
        first, second = uint32(p | uint32(q << uint32(16))), uint32(r | uint32(s << uint32(16)))
    return first, second, scale, float32(scale * total)
