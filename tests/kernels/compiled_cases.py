"""The kernels that are compiled without a GPU, and what their machine code must contain.

`test_compiled` runs `main` in processes of the compile stage: each compiles a share of the cases and prints JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numba import float32, int32, uint8, uint16, uint32

from kernels_numba.activation import BF16, FP16, INT8
from kernels_numba.ceilings import copy_words, read_words
from kernels_numba.dequant import FLOAT16, make_dequantise
from kernels_numba.drawing import make_draw
from kernels_numba.embedding import make_embedding_rows
from kernels_numba.errors import KernelError, StageError
from kernels_numba.fused import make_gate_up, make_qkv
from kernels_numba.gemv import ADD, NORMED, ROUNDED, STORE, Shape, make_gemv
from kernels_numba.inspection import Listing, inspect
from kernels_numba.int4_dot import LOP3, PRMT
from kernels_numba.norm import make_norm_rows
from kernels_numba.paged_attention import make_paged_attention
from kernels_numba.paged_kv import make_kv_append
from kernels_numba.prefill_attention import make_prefill_attention
from kernels_numba.prefill_gemm import Tile, make_prefill_gemm
from kernels_numba.ring_attention import make_ring_attention
from kernels_numba.rope import make_rope_rows
from kernels_numba.rows import make_round_rows
from kernels_numba.sampling import make_argmax, mark_seen
from kernels_numba.swiglu import make_swiglu_rows
from kernels_numba.teaching import faulty_attention, mended_attention

Capability = tuple[int, int]
ALL: list[Capability] = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
U, F, N, H, B = uint32[::1], float32[::1], int32[::1], uint16[::1], uint8[::1]
PAGED = float32[:, :, ::1]


@dataclass(frozen=True)
class Case:
    """One kernel: how it is made for a capability, its argument types, and what must be found in it.

    sass: `opcode.modifier...` and the least number of such instructions, from the capability given on. registers: the
    most that a thread may take, so that the intended number of warps fits. wide: 64-bit products, quotients, selections
    and comparisons that are allowed (addresses are 64 bits wide and do not count): a loop over `range` counts in int64,
    which costs a comparison and a selection. wide_newer: the same from 10.0 on, for which NVVM has a newer LLVM that
    widens loop counters of its own accord. local_newer: bytes of local memory that are allowed from 10.0 on, where that
    LLVM keeps some small arrays in memory that the older one puts into registers.
    """

    name: str
    make: Callable[[Capability], Any]
    arguments: tuple
    sass: dict[str, tuple[int, Capability]] = field(default_factory=dict)
    capabilities: tuple[Capability, ...] = tuple(ALL)
    registers: int = 128
    wide: int = 8
    wide_newer: int = 32
    local_newer: int = 0

    def local_allowed(self, capability: Capability) -> int:
        return 0 if capability < (10, 0) else self.local_newer

    def wide_allowed(self, capability: Capability) -> int:
        return self.wide if capability < (10, 0) else self.wide_newer


def after(least: int, capability: Capability = (7, 5)) -> tuple[int, Capability]:
    return least, capability


def _gemv(form: int, source: int, target: int, unpacking: int = LOP3, k: int = 3584, n: int = 3584) -> Callable:
    shape = Shape(n, k, 128, lanes=32, warps=4)
    return lambda cc: make_gemv(shape, form, source, target, unpacking, int(cc >= (9, 0)))


def gemv_case(name: str, form: int, source: int, target: int, wanted: dict, unpacking: int = LOP3, **more: Any) -> Case:
    arguments = (U, U, U, F, F, F, float32, F)
    return Case(name, _gemv(form, source, target, unpacking), arguments, {"LDG.128": after(1), **wanted}, **more)


DEPENDENT = {"PREEXIT": after(1, (9, 0)), "ACQBULK": after(1, (9, 0))}
PAGES = (H, H)
QKV = Shape(36 * 128, 3584, 128, stride=64, lanes=32, warps=4)
GATE_UP = Shape(37888, 3584, 128, stride=18944, lanes=16, warps=8, rounds=2)

CASES = [
    gemv_case("gemv int8 store", INT8, NORMED, STORE, {"IDP.4A": after(8), **DEPENDENT}),
    gemv_case("gemv int8 add", INT8, ROUNDED, ADD, {"IDP.4A": after(8), **DEPENDENT}),
    gemv_case("gemv fp16 lop3", FP16, ROUNDED, ADD, {"LOP3": after(8), "HADD2": after(8)}),
    gemv_case("gemv fp16 prmt", FP16, ROUNDED, ADD, {"PRMT": after(8)}, PRMT),
    gemv_case("gemv bf16 prmt", BF16, ROUNDED, ADD, {"PRMT": after(8)}, PRMT),
    Case(
        "qkv",
        lambda cc: make_qkv(QKV, INT8, 28, 4, 128, 16, LOP3, int(cc >= (9, 0))),
        (U, U, F, F, float32, F, F, F, N, N, F, *PAGES),
        {"LDG.128": after(1), "IDP.4A": after(8), **DEPENDENT},
    ),
    Case(
        "gate_up",
        lambda cc: make_gate_up(GATE_UP, INT8, LOP3, int(cc >= (9, 0))),
        (U, U, F, F, float32, B, F),
        {"LDG.128": after(1), "IDP.4A": after(8), "MUFU.EX2": after(1), **DEPENDENT},
    ),
    Case("dequantise", lambda cc: make_dequantise(3584, 3584, 128, FLOAT16), (U, U, U), {"STG.128": after(1)}),
    Case("embedding_rows", lambda cc: make_embedding_rows(3584, 4), (N, U, H, F)),
    Case(
        "norm_rows",
        lambda cc: make_norm_rows(3584, 128, 8),
        (F, F, float32, U, F, F, int32),
        {"LDG.128": after(1), "SHFL.BFLY": after(5)},
    ),
    Case("round_rows", lambda cc: make_round_rows(3584, 128, 8), (F, U, F, F, int32)),
    Case("swiglu_rows", lambda cc: make_swiglu_rows(18944, 128, 8), (F, U, F, F, int32), {"MUFU.EX2": after(1)}),
    Case("rope_rows", lambda cc: make_rope_rows(28, 4, 128), (F, F, F, int32)),
    Case("kv_append", lambda cc: make_kv_append(28, 4, 128, 16), (F, N, int32, U, U)),
    Case(
        "paged_attention",
        lambda cc: make_paged_attention(28, 4, 128, 16, 32, int(cc >= (9, 0)), cc),
        (F, U, U, N, N, F, U, F),
        {"HMMA": after(16), "LDG.128": after(8), **DEPENDENT},
        registers=224,
        wide_newer=64,
        local_newer=128,
    ),
    Case(
        "ring_attention",
        lambda cc: make_ring_attention(28, 4, 128, 16, 32, int(cc >= (9, 0)), cc),
        (F, U, U, N, N, F, U, F),
        {"HMMA": after(16), "UBLKCP": after(1, (9, 0)), **DEPENDENT},
        registers=224,
        wide_newer=64,
        local_newer=128,
    ),
    Case("faulty_attention", lambda cc: faulty_attention, (F, PAGED, PAGED, N, N, F), wide=96, wide_newer=96),
    Case("mended_attention", lambda cc: mended_attention, (F, PAGED, PAGED, N, N, F), wide=96, wide_newer=96),
    Case("copy_words", lambda cc: copy_words, (U, U, uint32), {"LDG.128": after(1), "STG.128": after(1)}),
    Case("read_words", lambda cc: read_words, (U, U, uint32), {"LDG.128": after(4)}),
    Case(
        "prefill_gemm",
        lambda cc: make_prefill_gemm(3584, 3584, 128, Tile(), STORE, 0, cc),
        (U, U, U, F, F, F, F, int32, int32),
        {"HMMA": after(16), "HMMA.16816": after(8, (8, 0)), "LDGSTS.128": after(1, (8, 0))},
        registers=255,
    ),
    Case(
        "prefill_attention",
        lambda cc: make_prefill_attention(28, 4, 128, 16, 4, capability=cc),
        (F, U, U, N, int32, int32, F),
        {"HMMA": after(16), "LDGSTS.128": after(1, (8, 0)), "MUFU.EX2": after(1)},
        registers=255,
        wide_newer=288,
        local_newer=288,
    ),
    Case(
        "argmax",
        lambda cc: make_argmax(152064, 132, int(cc >= (9, 0))),
        (F, U, U, F, F, U, U, N, N, N, N, N, N),
        {"SHFL.BFLY": after(5), **DEPENDENT},
    ),
    Case(
        "draw",
        lambda cc: make_draw(152064, 37, 1024, int(cc >= (9, 0))),
        (F, U, U, F, U, U, U, U, N, N, N, N, N, N),
        {"LDG.128": after(4), "SHFL.UP": after(5), **DEPENDENT},
        registers=64,
        wide=192,  # sums of weights have 48 bits
        wide_newer=192,
    ),
    Case("mark_seen", lambda cc: mark_seen, (N, N, U, U)),
]
COMBINATIONS = [(case, capability) for case in CASES for capability in case.capabilities]

_FLOAT64 = re.compile(r"^(DADD|DMUL|DFMA|DSETP|DMNMX)|F64|MUFU\.\w*64")
_WIDE = re.compile(r"\b(?:mul\.lo|mad\.lo|div|rem|selp|setp\.\w+|mul\.hi)\.[sub]64\b")


def float64_instructions(listing: Listing) -> list[str]:
    return sorted(name for name in listing.instructions if _FLOAT64.search(name))


def wide_arithmetic(listing: Listing) -> list[str]:
    """64-bit products, quotients, selections and comparisons in the PTX: what an index that was not cast leads to."""
    return _WIDE.findall(listing.ptx)


def measure(case: Case, capability: Capability) -> dict[str, Any]:
    """What the test looks at, as plain values."""
    try:
        listing = inspect(case.make(capability), case.arguments, capability)
    except (KernelError, StageError) as error:
        return {"error": str(error)}
    return {
        "registers": listing.registers,
        "spilled": listing.spill_bytes,
        "local": listing.local_bytes,
        "float64": float64_instructions(listing),
        "wide": wide_arithmetic(listing),
        "counts": {name: listing.count(name) for name in case.sass},
    }


def main() -> None:
    share, of = int(sys.argv[1]), int(sys.argv[2])
    results = {f"{c.name} {cc}": measure(c, cc) for c, cc in COMBINATIONS[share::of]}
    json.dump(results, sys.stdout)
