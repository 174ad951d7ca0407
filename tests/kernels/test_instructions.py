"""Each instruction against NumPy, on the stage at hand; on the GPU its PTX also against its meaning in Python."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, uint32, uint64

from kernels_numba import stage
from kernels_numba.instruction import INSTRUCTIONS
from kernels_numba.instructions import arithmetic, asynchronous, barriers, memory, tensor

pytestmark = pytest.mark.skipif(not stage.has_device, reason="the compile stage runs nothing")

TESTED: set[str] = set()


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test as the one of these instructions; skips it on a GPU that lacks one."""
    TESTED.update(names)
    least = max(INSTRUCTIONS[name].least for name in names)
    return pytest.mark.skipif(
        stage.has_device and stage.compute_capability() < least,
        reason=f"needs compute capability {least[0]}.{least[1]}",
    )


def run(kernel: Any, block: int, *arrays: np.ndarray) -> None:
    """Runs on the stage; on a GPU also on the simulator, and both must leave the same bits in every array."""
    simulated = [a.copy() for a in arrays]
    kernel[1, block](*arrays)
    if stage.name == "gpu":
        stage.simulate(kernel)[1, block](*simulated)
        for real, meant in zip(arrays, simulated, strict=True):
            assert np.array_equal(real, meant, equal_nan=real.dtype.kind == "f")


# one number in, one number out: arithmetic


def elementwise(call: Any, operands: int, results: int) -> Any:
    """A kernel that applies an instruction to each element of its arrays."""

    @cuda.jit
    def unary(a, out):
        t = cuda.grid(1)
        if t < a.size:
            out[t] = call(a[t])

    @cuda.jit
    def unary_pair(a, out):
        t = cuda.grid(1)
        if t < a.size:
            low, high = call(a[t])
            out[2 * t] = low
            out[2 * t + 1] = high

    @cuda.jit
    def binary(a, b, out):
        t = cuda.grid(1)
        if t < a.size:
            out[t] = call(a[t], b[t])

    @cuda.jit
    def ternary(a, b, c, out):
        t = cuda.grid(1)
        if t < a.size:
            out[t] = call(a[t], b[t], c[t])

    return {(1, 1): unary, (1, 2): unary_pair, (2, 1): binary, (3, 1): ternary}[operands, results]


WORDS = np.array(
    [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x01020304, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32
)
FLOATS = np.array(
    [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 1 / 3, 1e-45, -1e-40, 1.2e-38, 65504, 65519, 65520, 6e-8, 2.9e-8]
    + [3e38, -3e38, 1e10, -1e10, 2**31, -(2**31), 2.0**31 - 128, np.inf, -np.inf, np.nan],
    np.float32,
)
HALVES = np.array(
    [0, -0.0, 1, -1, 0.5, 1024, 1025, 2047, 2048, 65504, -65504, 6e-8, -6e-8, 6.1e-5, 1 / 3, np.inf, -np.inf, np.nan],
    np.float16,
)


def _every_pair(edges: np.ndarray, count: int, rng: np.random.Generator, draw: Callable) -> list[np.ndarray]:
    """`count` operands: all pairs (triples meet at random) of the edges, then 300 random numbers."""
    n = len(edges)
    first, second = np.repeat(edges, n), np.tile(edges, n)
    columns = [first, second, rng.permutation(second)][:count]
    return [np.concatenate([c, draw(300)]) for c in columns]


def words(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    return _every_pair(WORDS, count, rng, lambda n: rng.integers(0, 2**32, n, dtype=np.uint32))


def floats(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    draw = lambda n: (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)  # noqa: E731
    return _every_pair(FLOATS, count, rng, draw)


def halves(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    draw = lambda n: (rng.standard_normal(n) * 10.0 ** rng.integers(-4, 4, n)).astype(np.float16)  # noqa: E731
    packed = []
    for low in _every_pair(HALVES, count, rng, draw):
        packed.append(np.stack([low, rng.permutation(low)], 1).view(np.uint32).ravel())
    return packed


def as_halves(words: np.ndarray) -> np.ndarray:
    return words.view(np.float16).reshape(-1, 2)


def as_words(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs.astype(np.float16)).view(np.uint32).ravel()


def permuted_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    source = np.stack([a, b], 1).view(np.uint8)
    picks = selector[:, None] >> (4 * np.arange(4, dtype=np.uint32)) & 15
    chosen = np.take_along_axis(source, (picks & 7).astype(np.int64), 1)
    signs = np.where(chosen >> 7, 0xFF, 0).astype(np.uint8)
    return np.where(picks >> 3, signs, chosen).astype(np.uint8).view(np.uint32).ravel()


def byte_dots(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    products = a.view(np.uint8).reshape(-1, 4).astype(np.int64) * b.view(np.int8).reshape(-1, 4)
    return (products.sum(1) + c).astype(np.int32)


def rounded_once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in exact fractions, then the nearest float32, ties to the even one."""
    plain = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    for k in np.flatnonzero(np.isfinite(plain)):
        exact = Fraction(float(a[k])) * Fraction(float(b[k])) + Fraction(float(c[k]))
        near = [np.nextafter(plain[k], np.float32(-np.inf)), plain[k], np.nextafter(plain[k], np.float32(np.inf))]
        near = [x for x in near if np.isfinite(x)]
        plain[k] = min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))
    return plain


def nearest_int(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0, np.clip(np.rint(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)).astype(np.int32)


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b.astype(np.float64)


# name, operands, results' dtype, NumPy's answer, tolerance as a relative error (0: the same bits)
ARITHMETIC = [
    ("and_or", words, np.uint32, lambda a, b, c: (a & b) | c, 0),
    ("prmt", words, np.uint32, permuted_bytes, 0),
    ("dp4a", lambda rng, n: [*words(rng, 2), words(rng, 3)[2].view(np.int32)], np.int32, byte_dots, 0),
    ("fma", floats, np.float32, rounded_once, 0),
    ("float_bits", floats, np.uint32, lambda x: x.view(np.uint32), 0),
    ("bits_float", words, np.float32, lambda w: w.view(np.float32), 0),
    ("half2_floats", halves, np.float32, lambda w: as_halves(w).astype(np.float32).ravel(), 0),
    ("floats_half2", floats, np.uint32, lambda a, b: as_words(np.stack([a, b], 1)), 0),
    ("half2_sub", halves, np.uint32, lambda a, b: as_words(as_halves(a).astype(np.float64) - as_halves(b)), 0),
    (
        "half2_fma",
        halves,
        np.uint32,
        lambda a, b, c: as_words(times(as_halves(a), as_halves(b)) + as_halves(c)),  # exact in float64
        0,
    ),
    ("round_int", floats, np.int32, nearest_int, 0),
    ("exp2", floats, np.float32, lambda x: np.exp2(x.astype(np.float64)).astype(np.float32), 2.0**-22),
    ("rsqrt", floats, np.float32, lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32), 2.0**-22),
    ("divide", floats, np.float32, lambda a, b: a / b, 0),
    ("multiply", floats, np.float32, lambda a, b: a * b, 0),
    ("mul_high", words, np.uint32, lambda a, b: a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32), 0),
    ("fmax", floats, np.float32, np.fmax, 0),
    ("fabs", floats, np.float32, np.abs, 0),
]
NOT_A_NUMBER_BITS = {"floats_half2", "half2_sub", "half2_fma"}  # a NaN's other bits differ between machines
TESTED.update(name for name, *_ in ARITHMETIC)


def assert_close(name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    if name in NOT_A_NUMBER_BITS:
        found, expected = as_halves(found), as_halves(expected)
    elif name == "float_bits":
        found, expected = found.view(np.float32), expected.view(np.float32)
    if not tolerance:
        assert np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")
        return
    tiny = np.finfo(np.float32).tiny  # below it float32 has fewer bits, so the error is absolute
    usual = np.isfinite(expected)
    assert np.array_equal(found[~usual], expected[~usual], equal_nan=True)
    error = np.abs(found[usual].astype(np.float64) - expected[usual])
    assert np.all(error <= tolerance * np.maximum(np.abs(expected[usual]), tiny))


@pytest.mark.parametrize(
    ("name", "operands", "dtype", "expected", "tolerance"), ARITHMETIC, ids=[a[0] for a in ARITHMETIC]
)
def test_arithmetic(name, operands, dtype, expected, tolerance, rng):
    known = INSTRUCTIONS[name]
    arrays = operands(rng, len(known.takes))
    kernel = elementwise(getattr(arithmetic, name), len(known.takes), len(known.returns))
    with np.errstate(all="ignore"):
        wanted = expected(*arrays).astype(dtype)
    found = np.zeros(len(arrays[0]) * len(known.returns), dtype)
    blocks = -(-len(arrays[0]) // 128)
    kernel[blocks, 128](*arrays, found)
    assert_close(name, found, wanted, tolerance)
    if stage.name == "gpu":
        meant = np.zeros_like(found)
        stage.simulate(kernel)[blocks, 128](*arrays, meant)
        assert_close(name, found, meant, 2 * tolerance)  # both may be off by the tolerance


# loads and stores


@cuda.jit
def wide_global(data, numbers, out, floats_out):
    """Every global load of the set, each thread its own 16 bytes, written to rows of their own."""
    t = uint32(cuda.threadIdx.x)
    four = uint32(t * uint32(4))
    a, b, c, d = memory.stream_u32x4(data, four)
    memory.store_u32x4(out, four, d, c, b, a)
    a, b, c, d = memory.load_u32x4(data, four)
    memory.store_u32x4(out, uint32(four + uint32(128)), a, b, c, d)
    a, b = memory.stream_u32x2(data, uint32(four + uint32(2)))
    c, d = memory.load_u32x2(data, four)
    e = memory.stream_u32(data, uint32(four + uint32(1)))
    f = memory.load_u32_l2(data, uint32(four + uint32(3)))
    memory.store_u32x4(out, uint32(four + uint32(256)), a, b, c, d)
    memory.store_u32x4(out, uint32(four + uint32(384)), e, f, uint32(0), uint32(0))
    a, b, c, d = memory.early_u32x4(data, four)
    memory.store_u32x4(out, uint32(four + uint32(512)), d, memory.early_u32(data, uint32(four + uint32(2))), b, a)
    x, y, z, w = memory.load_f32x4(numbers, four)
    floats_out[four] = w
    floats_out[four + 1] = z
    floats_out[four + 2] = y
    floats_out[four + 3] = x + memory.load_f32_l2(numbers, uint32(four + uint32(3)))


@needs(
    *("stream_u32x4", "store_u32x4", "load_u32x4", "stream_u32x2", "load_u32x2", "stream_u32"),
    *("load_u32_l2", "load_f32x4", "load_f32_l2", "early_u32x4", "early_u32"),
)
def test_global_loads_and_stores(rng):
    data = rng.integers(0, 2**32, 128, dtype=np.uint32)
    numbers = rng.standard_normal(128).astype(np.float32)
    out, floats_out = np.zeros(640, np.uint32), np.zeros(128, np.float32)
    run(wide_global, 32, data, numbers, out, floats_out)
    rows, values = data.reshape(32, 4), numbers.reshape(32, 4)
    zero = np.zeros(32, np.uint32)
    expected = [rows[:, ::-1], rows, rows[:, [2, 3, 0, 1]], np.stack([rows[:, 1], rows[:, 3], zero, zero], 1)]
    expected.append(rows[:, ::-1])
    assert np.array_equal(out, np.concatenate(expected).ravel())
    reversed_values = values[:, ::-1].copy()
    reversed_values[:, 3] += values[:, 3]
    assert np.array_equal(floats_out, reversed_values.ravel())


@cuda.jit
def wide_shared(data, numbers, out, floats_out):
    tile = cuda.shared.array(128, uint32)
    values = cuda.shared.array(128, float32)
    t = uint32(cuda.threadIdx.x)
    four = uint32(t * uint32(4))
    memory.shared_store_u32x4(tile, four, data[four], data[four + 1], data[four + 2], data[four + 3])
    for k in range(4):
        values[four + k] = numbers[four + k]
    cuda.syncthreads()
    other = uint32(uint32(31 - t) * uint32(4))  # what another thread wrote
    a, b, c, d = memory.shared_u32x4(tile, other)
    memory.store_u32x4(out, four, a, b, c, d)
    a, b = memory.shared_u32x2(tile, uint32(other + uint32(2)))
    out[128 + four] = a
    out[128 + four + 1] = b
    x, y, z, w = memory.shared_f32x4(values, other)
    floats_out[four] = x
    floats_out[four + 1] = w
    x, y = memory.shared_f32x2(values, uint32(other + uint32(2)))
    floats_out[four + 2] = x
    floats_out[four + 3] = y + z


@needs("shared_store_u32x4", "shared_u32x4", "shared_u32x2", "shared_f32x4", "shared_f32x2")
def test_shared_loads_and_stores(rng):
    data = rng.integers(0, 2**32, 128, dtype=np.uint32)
    numbers = rng.standard_normal(128).astype(np.float32)
    out, floats_out = np.zeros(256, np.uint32), np.zeros(128, np.float32)
    run(wide_shared, 32, data, numbers, out, floats_out)
    rows, values = data.reshape(32, 4)[::-1], numbers.reshape(32, 4)[::-1]
    assert np.array_equal(out[:128].reshape(32, 4), rows)
    assert np.array_equal(out[128:].reshape(32, 4)[:, :2], rows[:, 2:])
    expected = np.stack([values[:, 0], values[:, 3], values[:, 2], values[:, 3] + values[:, 2]], 1)
    assert np.array_equal(floats_out.reshape(32, 4), expected)


@cuda.jit
def draws(counter, seen):
    old = memory.ticket(counter, uint32(1), uint32(1))
    cuda.atomic.add(seen, old, 1)


@needs("ticket")
def test_tickets_are_drawn_once_each():
    counter, seen = np.array([7, 0, 9], np.uint32), np.zeros(128, np.int32)
    run(draws, 128, counter, seen)
    assert list(counter) == [7, 128, 9]
    assert np.all(seen == 1)
    top = np.array([0, 2**32 - 1, 0], np.uint32)
    run(draws_modulo, 1, top, seen)
    assert top[1] == 0  # wraps at 32 bits


@cuda.jit
def draws_modulo(counter, seen):
    seen[0] = memory.ticket(counter, uint32(1), uint32(1)) & uint32(1)


# matrix fragments, by the layouts of the PTX ISA written out lane by lane


def fragment_a(matrix: np.ndarray) -> np.ndarray:
    """[32, words]: word w of lane l holds two neighbours in A: row l // 4 + 8 (w % 2), column 2 (l % 4) + 8 (w // 2)"""
    count = matrix.shape[1] // 4
    out = np.zeros((32, count), np.uint32)
    for lane in range(32):
        for w in range(count):
            row, column = lane // 4 + 8 * (w % 2), 2 * (lane % 4) + 8 * (w // 2)
            out[lane, w] = int(matrix[row, column]) | int(matrix[row, column + 1]) << 16
    return out


def fragment_b(matrix: np.ndarray) -> np.ndarray:
    """[32, words]: word w of lane l holds rows 2 (l % 4) + 8 w and the next of B, column l // 4."""
    count = matrix.shape[0] // 8
    out = np.zeros((32, count), np.uint32)
    for lane in range(32):
        for w in range(count):
            row, column = 2 * (lane % 4) + 8 * w, lane // 4
            out[lane, w] = int(matrix[row, column]) | int(matrix[row + 1, column]) << 16
    return out


def fragment_c(matrix: np.ndarray) -> np.ndarray:
    """[32, 4]: element e of lane l is row l // 4 + 8 (e // 2), column 2 (l % 4) + e % 2."""
    lanes, e = np.arange(32)[:, None], np.arange(4)[None, :]
    return matrix[lanes // 4 + 8 * (e // 2), 2 * (lanes % 4) + e % 2]


@cuda.jit
def run_mma_f16(a, b, c, d):
    t = cuda.threadIdx.x
    a0, a1, a2, a3 = a[t, 0], a[t, 1], a[t, 2], a[t, 3]
    c0, c1, c2, c3 = c[t, 0], c[t, 1], c[t, 2], c[t, 3]
    d0, d1, d2, d3 = tensor.mma_f16(a0, a1, a2, a3, b[t, 0], b[t, 1], c0, c1, c2, c3)
    d[t, 0], d[t, 1], d[t, 2], d[t, 3] = d0, d1, d2, d3


@cuda.jit
def run_mma_bf16(a, b, c, d):
    t = cuda.threadIdx.x
    a0, a1, a2, a3 = a[t, 0], a[t, 1], a[t, 2], a[t, 3]
    c0, c1, c2, c3 = c[t, 0], c[t, 1], c[t, 2], c[t, 3]
    d0, d1, d2, d3 = tensor.mma_bf16(a0, a1, a2, a3, b[t, 0], b[t, 1], c0, c1, c2, c3)
    d[t, 0], d[t, 1], d[t, 2], d[t, 3] = d0, d1, d2, d3


@cuda.jit
def run_mma_f16_k8(a, b, c, d):
    t = cuda.threadIdx.x
    d[t, 0], d[t, 1], d[t, 2], d[t, 3] = tensor.mma_f16_k8(
        a[t, 0], a[t, 1], b[t, 0], c[t, 0], c[t, 1], c[t, 2], c[t, 3]
    )


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def half_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def from_half(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float64)


@pytest.mark.parametrize(
    ("kernel", "depth", "bits", "back"),
    [
        pytest.param(run_mma_f16, 16, half_bits, from_half, marks=needs("mma_f16")),
        pytest.param(run_mma_bf16, 16, bfloat_bits, from_bfloat, marks=needs("mma_bf16")),
        pytest.param(run_mma_f16_k8, 8, half_bits, from_half, marks=needs("mma_f16_k8")),
    ],
)
def test_matrix_products(kernel, depth, bits, back, rng):
    a, b = bits(rng.standard_normal((16, depth))), bits(rng.standard_normal((depth, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = np.zeros((32, 4), np.float32)
    kernel[1, 32](fragment_a(a), fragment_b(b), fragment_c(c), d)
    wide_a, wide_b = back(a), back(b)
    expected = wide_a @ wide_b + c
    bound = np.abs(wide_a) @ np.abs(wide_b) + np.abs(c)
    # products are exact; depth + 1 additions in float32, which tensor cores truncate (one unit of 2^-23 each)
    assert np.all(np.abs(d - fragment_c(expected)) <= (depth + 1) * 2.0**-23 * fragment_c(bound))
    ones = np.zeros((32, 4), np.float32)
    small = bits(rng.integers(-8, 9, (16, depth))), bits(rng.integers(-8, 9, (depth, 8)))
    kernel[1, 32](fragment_a(small[0]), fragment_b(small[1]), np.zeros((32, 4), np.float32), ones)
    assert np.array_equal(ones, fragment_c(back(small[0]) @ back(small[1])))  # small integers are exact


@cuda.jit
def load_matrices(rows, out):
    tile = cuda.shared.array(256, uint32)  # 4 matrices of 8 rows of 4 words, with 16 bytes between rows
    t = uint32(cuda.threadIdx.x)
    for k in range(4):
        tile[uint32(t * uint32(8)) + k] = rows[t, k]
    cuda.syncthreads()
    at = uint32(t * uint32(8))
    out[0, t, 0], out[0, t, 1], out[0, t, 2], out[0, t, 3] = tensor.ldmatrix_x4(tile, at)
    out[1, t, 0], out[1, t, 1], out[1, t, 2], out[1, t, 3] = tensor.ldmatrix_x4_transposed(tile, at)
    out[2, t, 0], out[2, t, 1] = tensor.ldmatrix_x2(tile, at)


@needs("ldmatrix_x4", "ldmatrix_x4_transposed", "ldmatrix_x2")
def test_matrix_loads(rng):
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    out = np.zeros((3, 32, 4), np.uint32)
    run(load_matrices, 32, matrices.view(np.uint32).reshape(32, 4), out)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for m in range(4):
            plain = int(matrices[m, row, column]) | int(matrices[m, row, column + 1]) << 16
            turned = int(matrices[m, column, row]) | int(matrices[m, column + 1, row]) << 16
            assert out[0, lane, m] == plain
            assert out[1, lane, m] == turned
            assert out[2, lane, m] == (plain if m < 2 else 0)


# copies that land later


@cuda.jit
def copies_in_flight(source, out):
    """Three groups of 16 bytes a thread; each is read as soon as its wait allows."""
    tile = cuda.shared.array(384, uint32)
    t = uint32(cuda.threadIdx.x)
    four = uint32(t * uint32(4))
    for k in range(3):
        at = uint32(four + uint32(128 * k))
        asynchronous.copy_async_16(tile, at, source, at)
        asynchronous.copy_async_commit()
    asynchronous.copy_async_wait_2()
    a, b, c, d = memory.shared_u32x4(tile, four)
    memory.store_u32x4(out, four, a, b, c, d)
    asynchronous.copy_async_wait_1()
    a, b, c, d = memory.shared_u32x4(tile, uint32(four + uint32(128)))
    memory.store_u32x4(out, uint32(four + uint32(128)), a, b, c, d)
    asynchronous.copy_async_wait_0()
    a, b, c, d = memory.shared_u32x4(tile, uint32(four + uint32(256)))
    memory.store_u32x4(out, uint32(four + uint32(256)), a, b, c, d)


ASYNC = ("copy_async_16", "copy_async_commit", "copy_async_wait_0", "copy_async_wait_1", "copy_async_wait_2")


@needs(*ASYNC)
def test_asynchronous_copies_land_group_by_group(rng):
    source, out = rng.integers(0, 2**32, 384, dtype=np.uint32), np.zeros(384, np.uint32)
    run(copies_in_flight, 32, source, out)
    assert np.array_equal(out, source)


@cuda.jit
def impatient(source, out, waits):
    tile = cuda.shared.array(8, uint32)
    for k in range(2):
        asynchronous.copy_async_16(tile, uint32(4 * k), source, uint32(4 * k))
        asynchronous.copy_async_commit()
    if waits == 1:
        asynchronous.copy_async_wait_1()
    elif waits == 2:
        asynchronous.copy_async_wait_0()
    out[0] = tile[0]
    out[1] = tile[4]


@pytest.mark.skipif(stage.name != "sim", reason="what an impatient read finds on a GPU is chance")
def test_a_copy_not_waited_for_has_not_landed():
    from kernels_numba.simulator.errors import UnwrittenRead

    source, out = np.arange(8, dtype=np.uint32), np.zeros(2, np.uint32)
    for waits, missing in ((0, r"\[0\]"), (1, r"\[4\]")):
        with pytest.raises(UnwrittenRead, match=f"uint32.8.{missing} is read before it is written"):
            impatient[1, 1](source, out, waits)
    impatient[1, 1](source, out, 2)
    assert list(out) == [0, 4]


@cuda.jit
def ring(source, out):
    """Thread 32 brings 64 bytes a round; a warp reads them; full and empty mbarriers keep them apart."""
    tile = cuda.shared.array(32, uint32)
    gates = cuda.shared.array(4, uint64)
    t = uint32(cuda.threadIdx.x)
    if t == 0:
        for k in range(2):
            asynchronous.mbarrier_init(gates, uint32(k), uint32(1))
            asynchronous.mbarrier_init(gates, uint32(2 + k), uint32(32))
    asynchronous.fence_async()
    cuda.syncthreads()
    for r in range(6):
        slot, parity = uint32(r & 1), uint32(r >> 1 & 1)
        if t == 32:
            if r > 1:
                asynchronous.mbarrier_wait(gates, uint32(2 + slot), uint32(parity ^ uint32(1)))
            asynchronous.mbarrier_arrive_expect(gates, slot, uint32(64))
            at = uint32(r * 16)
            asynchronous.copy_bulk(tile, uint32(slot * uint32(16)), source, at, uint32(64), gates, slot)
        elif t < 32:
            asynchronous.mbarrier_wait(gates, slot, parity)
            if t < 16:
                out[uint32(r * 16) + t] = tile[uint32(slot * uint32(16)) + t]
            asynchronous.mbarrier_arrive(gates, uint32(2 + slot))


@needs("mbarrier_init", "mbarrier_wait", "mbarrier_arrive_expect", "mbarrier_arrive", "copy_bulk", "fence_async")
def test_bulk_copies_through_a_ring_of_mbarriers(rng):
    source, out = rng.integers(0, 2**32, 96, dtype=np.uint32), np.zeros(96, np.uint32)
    run(ring, 64, source, out)
    assert np.array_equal(out, source)


@cuda.jit
def hand_over(out):
    """Warp 1 fills a box and arrives; warp 0 waits for it and empties it; warp 2 takes no part."""
    box = cuda.shared.array(32, uint32)
    t = uint32(cuda.threadIdx.x)
    for r in range(4):
        if t < 32:
            barriers.barrier_sync(uint32(1), uint32(64))
            out[uint32(32 * r) + t] = box[t]
            barriers.barrier_arrive(uint32(2), uint32(64))
        elif t < 64:
            if r > 0:
                barriers.barrier_sync(uint32(2), uint32(64))
            box[t - 32] = uint32(uint32(100 * r) + t)
            barriers.barrier_arrive(uint32(1), uint32(64))
    if t >= 32 and t < 64:
        barriers.barrier_sync(uint32(2), uint32(64))


@needs("barrier_sync", "barrier_arrive")
def test_named_barriers_hand_over():
    out = np.zeros(128, np.uint32)
    run(hand_over, 96, out)
    assert np.array_equal(out.reshape(4, 32), 100 * np.arange(4)[:, None] + 32 + np.arange(32))


@cuda.jit
def dependent(out):
    barriers.launch_dependents()
    barriers.wait_for_previous()
    out[cuda.threadIdx.x] = cuda.threadIdx.x


@needs("launch_dependents", "wait_for_previous")
def test_dependent_launch_instructions_pass_without_a_previous_kernel():
    out = np.zeros(32, np.uint32)
    run(dependent, 32, out)
    assert np.array_equal(out, np.arange(32))


def test_every_instruction_is_tested():
    assert sorted(set(INSTRUCTIONS) - TESTED) == []
