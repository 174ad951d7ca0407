"""Matrix fragments: `mma` and `ldmatrix`. All 32 lanes of a warp take part.

In the fragments g = lane // 4 and t = lane % 4. A (16 x 16, row-major): a0 holds row g, columns 2t and 2t + 1; a1 row
g + 8; a2 and a3 the same rows, columns 8 further. B (16 x 8): b0 holds rows 2t and 2t + 1 of column g, b1 those 8 on.
C (16 x 8): c0, c1 hold row g, columns 2t and 2t + 1; c2, c3 row g + 8. Source: PTX ISA, "Matrix fragments for mma".
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from kernels_numba.instruction import instruction
from kernels_numba.numba_bridge import machine
from kernels_numba.simulator.errors import SimulationError

_ALL = 0xFFFFFFFF
_OPERANDS = {8: struct.Struct("<3I4f"), 16: struct.Struct("<6I4f")}  # by depth: words of A and B, floats of C


def _where(depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the elements of A, B and C stand among all lanes' operands: in units of halves, halves and floats."""
    words = depth // 4  # of A in a lane; of B half as many
    size = words + words // 2 + 4
    lane, half = 4 * np.arange(8)[:, None] + np.arange(4), np.arange(2)  # [g, t]
    a = 2 * (size * lane[None, :, None, :, None] + np.arange(words).reshape(1, 1, -1, 1, 1)) + half
    a = a.reshape(8, words // 2, 2, 4, 2).transpose(2, 0, 1, 3, 4)  # row half, g, column half, t, column
    b = 2 * (size * lane[:, None, :, None] + words + np.arange(words // 2).reshape(1, -1, 1, 1)) + half
    b = b.transpose(1, 2, 3, 0)  # row half, t, row, g
    c = size * lane[None, :, :, None] + words + words // 2 + np.arange(4).reshape(2, 1, 1, 2)  # row half, g, t, column
    return a.reshape(16, depth), b.reshape(depth, 8), c.reshape(16, 8)


_PLACES = {8: _where(8), 16: _where(16)}


def _as_halves(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float64)


def _as_bfloats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _all_lanes(values: dict[int, Any]) -> list:
    if len(values) != 32:
        raise SimulationError(f"a matrix instruction met {len(values)} lanes: it needs all 32 of a full warp")
    return [values[lane] for lane in range(32)]


def _multiply(values: dict[int, tuple], depth: int, unpack: Any) -> dict[int, tuple]:
    """D = A @ B + C of one warp, from and to fragments; `depth` is k, 8 or 16."""
    pack = _OPERANDS[depth].pack  # at less than half the cost of arrays made from tuples
    raw = b"".join([pack(*v) for v in _all_lanes(values)])
    halves, floats = np.frombuffer(raw, np.uint16), np.frombuffer(raw, np.float32)
    in_a, in_b, in_c = _PLACES[depth]
    d = unpack(halves[in_a]) @ unpack(halves[in_b]) + floats[in_c]
    d = d.astype(np.float32).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    return dict(enumerate(zip(*d, strict=True)))


def _mma(name: str, depth: int, unpack: Any, operands: tuple) -> tuple:
    return machine.collective((name,), _ALL, operands, lambda values: _multiply(values, depth, unpack))


@instruction(
    "f32 f32 f32 f32",
    "u32 u32 u32 u32 u32 u32 f32 f32 f32 f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$out0, $out1, $out2, $out3}, "
    "{$a0, $a1, $a2, $a3}, {$b0, $b1}, {$c0, $c1, $c2, $c3};",
    effects=True,
    least=(8, 0),
)
def mma_f16(a0: int, a1: int, a2: int, a3: int, b0: int, b1: int, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple:
    """A (16 x 16) @ B (16 x 8) + C of fp16 fragments, accumulated in float32."""
    return _mma("mma_f16", 16, _as_halves, (a0, a1, a2, a3, b0, b1, c0, c1, c2, c3))


@instruction(
    "f32 f32 f32 f32",
    "u32 u32 u32 u32 u32 u32 f32 f32 f32 f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$out0, $out1, $out2, $out3}, "
    "{$a0, $a1, $a2, $a3}, {$b0, $b1}, {$c0, $c1, $c2, $c3};",
    effects=True,
    least=(8, 0),
)
def mma_bf16(a0: int, a1: int, a2: int, a3: int, b0: int, b1: int, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple:
    """A (16 x 16) @ B (16 x 8) + C of bf16 fragments, accumulated in float32."""
    return _mma("mma_bf16", 16, _as_bfloats, (a0, a1, a2, a3, b0, b1, c0, c1, c2, c3))


@instruction(
    "f32 f32 f32 f32",
    "u32 u32 u32 f32 f32 f32 f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$out0, $out1, $out2, $out3}, "
    "{$a0, $a1}, {$b0}, {$c0, $c1, $c2, $c3};",
    effects=True,
)
def mma_f16_k8(a0: int, a1: int, b0: int, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple:
    """A (16 x 8) @ B (8 x 8) + C of fp16 fragments: the shape that compute capability 7.5 has."""
    return _mma("mma_f16_k8", 8, _as_halves, (a0, a1, b0, c0, c1, c2, c3))


def _matrices(values: dict[int, bytes], count: int, transposed: bool) -> dict[int, tuple]:
    """Fragments of `count` 8 x 8 matrices of 2-byte elements; lane 8m + r brings row r of matrix m."""
    rows = np.stack([np.frombuffer(row, np.uint16) for row in _all_lanes(values)[: 8 * count]]).reshape(count, 8, 8)
    rows = np.ascontiguousarray(rows.transpose(0, 2, 1) if transposed else rows)
    words = rows.view(np.uint32).reshape(count, 32)  # lane 4r + t: row r, columns 2t and 2t + 1
    return {lane: tuple(int(w) for w in words[:, lane]) for lane in range(32)}


def _ldmatrix(name: str, count: int, transposed: bool, array: Any, index: int) -> tuple:
    raw = array.bytes_at(index, 16) if machine.current.lane < 8 * count else b""
    return machine.collective((name,), _ALL, raw, lambda values: _matrices(values, count, transposed))


@instruction(
    "u32 u32 u32 u32",
    "shared",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$out0, $out1, $out2, $out3}, [$array];",
    effects=True,
)
def ldmatrix_x4(array: Any, index: int) -> tuple:
    """Four 8 x 8 matrices of 16-bit elements; lane 8m + r names the 16-byte row r of matrix m."""
    return _ldmatrix("ldmatrix_x4", 4, False, array, index)


@instruction(
    "u32 u32 u32 u32",
    "shared",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$out0, $out1, $out2, $out3}, [$array];",
    effects=True,
)
def ldmatrix_x4_transposed(array: Any, index: int) -> tuple:
    """`ldmatrix_x4` with each matrix transposed on the way."""
    return _ldmatrix("ldmatrix_x4_transposed", 4, True, array, index)


@instruction("u32 u32", "shared", "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$out0, $out1}, [$array];", effects=True)
def ldmatrix_x2(array: Any, index: int) -> tuple:
    """Two 8 x 8 matrices; lanes 0 to 15 name the rows."""
    return _ldmatrix("ldmatrix_x2", 2, False, array, index)
