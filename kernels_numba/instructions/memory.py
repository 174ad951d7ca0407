"""Loads and stores of a stated width. An array operand is a one-dimensional array and a flat index, aligned to it.

`stream_*` is for weights: data that no kernel writes, read once, so it should leave no trace in the L1 cache.
All keep their place: weights that are asked for before a wait are on their way while the kernel waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.instruction import instruction


@instruction(
    "u32 u32 u32 u32",
    "global",
    "ld.global.nc.L1::no_allocate.v4.u32 {$out0, $out1, $out2, $out3}, [$array];",
    effects=True,
)
def stream_u32x4(array: Any, index: int) -> tuple:
    """16 bytes of read-only data as four words."""
    return array.load(index, 4)


@instruction(
    "u32 u32 u32 u32",
    "global",
    "ld.global.L1::no_allocate.v4.u32 {$out0, $out1, $out2, $out3}, [$array];",
    effects=True,
)
def early_u32x4(array: Any, index: int) -> tuple:
    """`stream_u32x4` that the assembler does not move behind a wait, as it does with read-only loads."""
    return array.load(index, 4)


@instruction("u32", "global", "ld.global.u32 $out, [$array];", effects=True)
def early_u32(array: Any, index: int) -> int:
    """`stream_u32` that the assembler does not move behind a wait."""
    return array.load(index, 1)[0]


@instruction("u32 u32", "global", "ld.global.nc.L1::no_allocate.v2.u32 {$out0, $out1}, [$array];")
def stream_u32x2(array: Any, index: int) -> tuple:
    """8 bytes of read-only data as two words."""
    return array.load(index, 2)


@instruction("u32", "global", "ld.global.nc.u32 $out, [$array];", effects=True)
def stream_u32(array: Any, index: int) -> int:
    """One word of read-only data, kept in the L1 cache: neighbouring lanes share it."""
    return array.load(index, 1)[0]


@instruction("u32 u32 u32 u32", "global", "ld.global.v4.u32 {$out0, $out1, $out2, $out3}, [$array];", effects=True)
def load_u32x4(array: Any, index: int) -> tuple:
    """16 bytes as four words."""
    return array.load(index, 4)


@instruction("f32 f32 f32 f32", "global", "ld.global.v4.f32 {$out0, $out1, $out2, $out3}, [$array];", effects=True)
def load_f32x4(array: Any, index: int) -> tuple:
    """16 bytes as four floats."""
    return array.load(index, 4)


@instruction("u32 u32", "global", "ld.global.v2.u32 {$out0, $out1}, [$array];", effects=True)
def load_u32x2(array: Any, index: int) -> tuple:
    """8 bytes as two words."""
    return array.load(index, 2)


@instruction("", "global u32 u32 u32 u32", "st.global.v4.u32 [$array], {$a, $b, $c, $d};", effects=True)
def store_u32x4(array: Any, index: int, a: int, b: int, c: int, d: int) -> None:
    """Four words as one store of 16 bytes."""
    array.store(index, (a, b, c, d))


@instruction("u32 u32 u32 u32", "shared", "ld.shared.v4.u32 {$out0, $out1, $out2, $out3}, [$array];", effects=True)
def shared_u32x4(array: Any, index: int) -> tuple:
    """16 bytes of shared memory as four words."""
    return array.load(index, 4)


@instruction("u32 u32", "shared", "ld.shared.v2.u32 {$out0, $out1}, [$array];", effects=True)
def shared_u32x2(array: Any, index: int) -> tuple:
    """8 bytes of shared memory as two words."""
    return array.load(index, 2)


@instruction("f32 f32 f32 f32", "shared", "ld.shared.v4.f32 {$out0, $out1, $out2, $out3}, [$array];", effects=True)
def shared_f32x4(array: Any, index: int) -> tuple:
    """16 bytes of shared memory as four floats."""
    return array.load(index, 4)


@instruction("f32 f32", "shared", "ld.shared.v2.f32 {$out0, $out1}, [$array];", effects=True)
def shared_f32x2(array: Any, index: int) -> tuple:
    """8 bytes of shared memory as two floats."""
    return array.load(index, 2)


@instruction("", "shared u32 u32 u32 u32", "st.shared.v4.u32 [$array], {$a, $b, $c, $d};", effects=True)
def shared_store_u32x4(array: Any, index: int, a: int, b: int, c: int, d: int) -> None:
    """Four words as one store of 16 bytes to shared memory."""
    array.store(index, (a, b, c, d))


@instruction("u32", "global u32", "atom.acq_rel.gpu.global.add.u32 $out, [$array], $value;", effects=True)
def ticket(array: Any, index: int, value: int) -> int:
    """Adds to a counter and gives what it was; what was written before is seen by whoever draws a later ticket."""
    at = array.span(index, 1, 4)
    old = array.get(at)
    array.put(at, old + value)
    return old


@instruction("f32", "global", "ld.global.cg.f32 $out, [$array];", effects=True)
def load_f32_l2(array: Any, index: int) -> np.float32:
    """One float from the L2 cache: what other blocks of the same launch have written."""
    return array.load(index, 1)[0]


@instruction("u32", "global", "ld.global.cg.u32 $out, [$array];", effects=True)
def load_u32_l2(array: Any, index: int) -> int:
    """One word from the L2 cache: what other blocks of the same launch have written."""
    return array.load(index, 1)[0]
