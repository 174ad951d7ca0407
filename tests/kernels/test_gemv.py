"""GEMVs against NumPy float64 on the same rounded activations; 1e-5 bounds one kernel's float32 sums."""

import numpy as np
import pytest

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.activation import FORMS
from kernels_numba.errors import KernelError
from kernels_numba.fused import make_gate_up, make_qkv
from kernels_numba.gemv import ADD, NORMED, RAW, ROUNDED, STORE, Shape, make_gemv
from kernels_numba.int4_dot import UNPACKINGS
from kernels_numba.launching import Launch
from kernels_numba.tuning import choose
from rtlib.quantise import dequantise, quantise
from rtlib.rounding import activation_codes, round_activation

BOUND = 1e-5
EPS = 1e-6
GUARD = 8  # elements after an output that must stay as they were


def made(n: int, k: int, group: int = 128, seed: int = 0):
    rng = np.random.default_rng(seed)
    weight = quantise(rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k), group)
    x, norm = rng.standard_normal(k).astype(np.float32), rng.uniform(0.5, 1.5, k).astype(np.float32)
    return weight, x, norm


def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    return (x / np.sqrt((x.astype(np.float64) ** 2).mean() + EPS) * norm).astype(np.float32)


def words(weight) -> tuple:
    return memory.upload(weight.codes), memory.upload(weight.scales_zeros)


def rounded(x: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Values as words and (scale, scale * sum) pairs, as a kernel before would leave them."""
    codes, scales = activation_codes(x, form)
    sums = round_activation(x, form).reshape(-1, 32).sum(axis=1)
    return np.ascontiguousarray(codes).view(np.uint32), np.stack([scales, sums], 1).astype(np.float32)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def run_gemv(shape: Shape, weight, x, norm, form: str, source: int, target: int, unpacking: str = "lop3", start=None):
    values, pairs = rounded(x, form)
    y = memory.upload(np.full(shape.n + GUARD, np.nan, np.float32))
    if start is not None:
        memory.overwrite(y, start)
    kernel = make_gemv(shape, FORMS[form], source, target, UNPACKINGS[unpacking])
    arrays = (memory.upload(a) for a in (values, pairs, x, norm))
    Launch(kernel, shape.grid, shape.block, *words(weight), *arrays, np.float32(EPS), y).run()
    result = memory.download(y)
    assert np.isnan(result[shape.n :]).all(), "written beyond the last row"
    return result[: shape.n]


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("n", "k", "group", "lanes", "split", "warps", "rounds"),
    [(64, 128, 128, 4, 1, 2, 2), (37, 384, 64, 16, 2, 4, 1), (5, 128, 32, 4, 4, 4, 1), (48, 256, 128, 32, 1, 2, 1)],
)
def test_int8_of_any_shape(n, k, group, lanes, split, warps, rounds, order, settings):
    settings.warp_order = order
    weight, x, norm = made(n, k, group)
    shape = Shape(n, k, group, 1, lanes, split, warps, rounds)
    y = run_gemv(shape, weight, x, norm, "int8", RAW, STORE)
    assert error(y, dequantise(weight) @ round_activation(x, "int8")) < BOUND


@pytest.mark.parametrize("source", [ROUNDED, RAW, NORMED])
@pytest.mark.parametrize(
    ("form", "unpacking"),
    [("int8", "lop3"), ("fp16", "lop3"), ("fp16", "prmt"), ("bf16", "prmt")],
)
def test_sources_and_forms(source, form, unpacking):
    weight, x, norm = made(24, 256)
    y = run_gemv(Shape(24, 256, lanes=8, warps=2), weight, x, norm, form, source, STORE, unpacking)
    vector = normed(x, norm) if source == NORMED else x
    # a norm rounded differently in its last bit may move an activation to the next code: half a step of one of 256
    bound = {"int8": 1e-3, "fp16": 1e-4, "bf16": 1e-3}[form] if source == NORMED else BOUND
    assert error(y, dequantise(weight) @ round_activation(vector, form)) < bound


def test_add_leaves_the_sum():
    weight, x, norm = made(9, 128)
    start = np.arange(9, dtype=np.float32)
    y = run_gemv(Shape(9, 128, lanes=4, warps=1), weight, x, norm, "fp16", RAW, ADD, start=start)
    assert error(y, start + dequantise(weight) @ round_activation(x, "fp16")) < BOUND


def test_one_outlier_stays_in_its_block():
    x = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    x[40] = 1e5
    identity = quantise(np.eye(128, dtype=np.float32), 128)
    y = run_gemv(Shape(128, 128, lanes=4, warps=2), identity, x, x, "int8", RAW, STORE)
    assert np.isfinite(y).all()
    inside = np.arange(128) // 32 == 1
    # an output is its own activation times the diagonal's code: half a step of its block, and fp16's rounding of s
    steps = np.where(inside, 1e5 / 127, np.abs(x[~inside]).max() / 127)
    assert (np.abs(y - x) <= 0.5 * steps + 1e-3 * np.abs(x) + 1e-6).all()


@pytest.mark.parametrize("form", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("source", [RAW, NORMED])
@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_does_not_vanish_in_rounding(form, source, damage):
    weight, x, norm = made(8, 128)
    x[37] = damage
    with np.errstate(invalid="ignore"):  # the rounding in NumPy, which these sources do not read
        y = run_gemv(Shape(8, 128, lanes=4, warps=1), weight, x, norm, form, source, STORE)
    assert not np.isfinite(y).any()


def test_qkv_appends_through_the_table():
    heads, kv_heads, head_dim, page = 4, 2, 32, 4
    n, k, position = (heads + 2 * kv_heads) * head_dim, 128, 9
    weight, x, norm = made(n, k, seed=3)
    rng = np.random.default_rng(4)
    bias = rng.standard_normal(n).astype(np.float32)
    angles = rng.uniform(0, 6, (16, head_dim // 2))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    pages = [memory.filled(6 * kv_heads * page * head_dim, np.uint16, 0x7E00) for _ in range(2)]
    q = memory.filled(heads * head_dim, np.float32, np.nan)
    shape = choose(n, k, 128, head_dim // 2)
    kernel = make_qkv(shape, FORMS["fp16"], heads, kv_heads, head_dim, page)
    table = np.array([5, 1, 3, -1], np.int32)
    arrays = [memory.upload(a) for a in (bias, cosines, sines, np.array([position], np.int32), table)]
    vectors = (memory.upload(x), memory.upload(norm), np.float32(EPS))
    Launch(kernel, shape.grid, shape.block, *words(weight), *vectors, *arrays, q, *pages).run()
    y = (dequantise(weight) @ round_activation(normed(x, norm), "fp16") + bias).reshape(-1, head_dim)
    first, second = y[:, : head_dim // 2], y[:, head_dim // 2 :]
    c, s = np.cos(angles[position]), np.sin(angles[position])
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=1)
    assert error(memory.download(q), turned[:heads].ravel()) < 1e-4  # fp16 of a norm whose last bit may differ
    for cache, rows in zip(pages, (turned[heads : heads + kv_heads], y[heads + kv_heads :]), strict=True):
        found = memory.download(cache).view(np.float16).reshape(6, kv_heads, page, head_dim)
        assert error(found[3, :, position % page].astype(float), rows) < 1e-3  # rounded to fp16
        found[3, :, position % page] = np.nan
        assert np.isnan(found).all(), "written outside the token's slot"


@pytest.mark.parametrize("form", ["int8", "fp16"])
def test_gate_up_rounds_for_down(form):
    inner, k = 128, 128
    weight, x, norm = made(2 * inner, k, seed=5)
    shape = choose(2 * inner, k, 128, inner, pairs_per_block=32)
    values = memory.filled(inner * (1 if form == "int8" else 2), np.uint8, 99)
    pairs = memory.filled(inner // 32 * 2, np.float32, np.nan)
    kernel = make_gate_up(shape, FORMS[form])
    view = memory.view(values, np.uint8 if form == "int8" else np.uint16)
    vectors = (memory.upload(x), memory.upload(norm), np.float32(EPS))
    Launch(kernel, shape.grid, shape.block, *words(weight), *vectors, view, pairs).run()
    gate, up = np.split(dequantise(weight) @ round_activation(normed(x, norm), form), 2)
    expected = gate / (1 + np.exp(-gate)) * up
    scales, sums = memory.download(pairs).reshape(-1, 2).T
    found = memory.download(values).view(np.int8 if form == "int8" else np.float16).astype(float).reshape(-1, 32)
    assert np.allclose(found.sum(axis=1) * scales, sums, rtol=1e-5, atol=1e-6)
    step = np.abs(expected).reshape(-1, 32).max(axis=1) * (1 / 127 if form == "int8" else 2**-10)
    # half a step of rounding, and what one activation of the input rounded the other way can move
    assert (np.abs(found * scales[:, None] - expected.reshape(-1, 32)) <= step[:, None] * 0.55 + 1e-3).all()


def test_shapes_that_cannot_be_served():
    with pytest.raises(KernelError, match="multiple of 128"):
        Shape(8, 100)
    with pytest.raises(KernelError, match="multiple of 32 that divides all"):
        make_gate_up(Shape(256, 128, stride=128, lanes=32, warps=1), FORMS["int8"])


def test_choose_covers_every_row():
    for n, k in [(4608, 3584), (152064, 3584), (896, 4864), (1, 128), (27, 27648)]:
        for multiprocessors in (1, 40, 132):
            shape = choose(n, k, 128, multiprocessors=multiprocessors)
            assert shape.grid * shape.teams * shape.rounds >= shape.pairs >= n / 2


if stage.name == "sim":

    def test_missing_page_takes_nothing():
        """A page of -1 (slot -1) leaves the caches as they were."""
        weight, x, norm = made(96, 128, seed=6)
        shape = choose(96, 128, 128, 16)
        caches = [np.full(64, 7, np.uint16) for _ in range(2)]
        ones = np.ones(32, np.float32)
        make_qkv(shape, FORMS["int8"], 1, 1, 32, 2)[shape.grid, shape.block](
            *words(weight), x, norm, np.float32(EPS), np.zeros(96, np.float32), ones, ones, np.zeros(1, np.int32),
            np.array([-1], np.int32), np.zeros(32, np.float32), *caches,
        )  # fmt: skip
        assert all((cache == 7).all() for cache in caches)
