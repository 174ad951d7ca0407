"""AWQ and GPTQ words repacked: the weight equals each format's definition for every code and every stored zero."""

from pathlib import Path

import numpy as np
import pytest
from made_folders import TINY, random_tensors, write_folder

from rtlib.checkpoint import Checkpoint
from rtlib.errors import CheckpointError
from rtlib.foreign import repack
from rtlib.layout import FUSED, layer_prefix, projection_shape
from rtlib.quantise import dequantise
from rtlib.reference import ReferenceModel
from rtlib.scheme import QuantScheme, read_scheme
from rtlib.weights import quantise_checkpoint

IDS = np.arange(12)
AWQ_COLUMN = {
    0: 0,
    1: 4,
    2: 1,
    3: 5,
    4: 2,
    5: 6,
    6: 3,
    7: 7,
}  # column of eight -> nibble, the inverse of 0 2 4 6 1 3 5 7


def random_words(scheme: QuantScheme, outputs: int, inputs: int, seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of one linear with every 32-bit pattern possible; shapes as the formats have them."""
    rng = np.random.default_rng(seed)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)

    groups = scheme.groups_of(inputs)
    found = {
        "qweight": words(inputs, outputs // 8) if scheme.method == "awq" else words(inputs // 8, outputs),
        "qzeros": words(groups, outputs // 8),
        "scales": rng.uniform(0.001, 0.01, (groups, outputs)).astype(np.float16),
    }
    if scheme.method == "gptq":
        g_idx = np.arange(inputs) // (inputs // groups)
        found["g_idx"] = (rng.permutation(g_idx) if scheme.act_order else g_idx).astype(np.int32)
    return found


def by_definition(scheme: QuantScheme, words: dict[str, np.ndarray], n: int, k: int) -> float:
    """Return one weight from the words in Python integers, as the formats' own readers take them apart."""
    nibble = AWQ_COLUMN[n % 8] if scheme.method == "awq" else n % 8
    if scheme.method == "awq":
        q = int(words["qweight"][k, n // 8]) >> 4 * nibble & 15
        group = k // (len(words["qweight"]) // len(words["scales"]))
    else:
        q = int(words["qweight"][k // 8, n]) >> 4 * (k % 8) & 15
        group = int(words["g_idx"][k])
    stored = int(words["qzeros"][group, n // 8]) & 0xFFFFFFFF
    if scheme.zeros_less_one:
        stored = stored + 0x11111111 & 0xFFFFFFFF
    return float(words["scales"][group, n]) * (q - (stored >> 4 * nibble & 15))


SCHEMES = [
    QuantScheme(method, group, less_one, act_order)
    for method, less_one, act_order in [
        ("awq", False, False),
        ("gptq", True, False),
        ("gptq", False, False),
        ("gptq", True, True),
        ("gptq", False, True),
    ]
    for group in (32, 64, 128, -1)
    if not (act_order and group == -1)
]


def name_of(scheme: QuantScheme) -> str:
    version = {"awq": "", "gptq": "v1" if scheme.zeros_less_one else "v2"}[scheme.method]
    return f"{scheme.method}{version}-{scheme.group}{'-act-order' if scheme.act_order else ''}"


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_every_weight_equals_the_definition_bit_for_bit(scheme):
    words = random_words(scheme, 16, 256, seed=1)
    weight, order = repack(scheme, words, "linear")
    expected = np.array([[by_definition(scheme, words, n, k) for k in range(256)] for n in range(16)])
    assert weight.group == (128 if scheme.group == -1 else scheme.group)
    assert (order is not None) == scheme.act_order
    if order is not None:
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(256))
        expected = expected[:, order]
    np.testing.assert_array_equal(dequantise(weight), expected)


@pytest.mark.parametrize(
    "scheme", [QuantScheme("awq", 32), QuantScheme("gptq", 32, True), QuantScheme("gptq", 32)], ids=name_of
)
@pytest.mark.parametrize("stored", range(16))
def test_every_stored_zero_with_every_code(scheme, stored):
    words = random_words(scheme, 16, 128, seed=stored)
    words["qzeros"][:] = np.array([stored * 0x11111111], np.uint32).view(np.int32)[0]
    words["scales"][:] = 1
    found = dequantise(repack(scheme, words, "linear")[0])
    expected = np.array([[by_definition(scheme, words, n, k) for k in range(128)] for n in range(16)])
    np.testing.assert_array_equal(found, expected)
    if not scheme.zeros_less_one:
        assert set(found.ravel()) == {float(q - stored) for q in range(16)}
    elif stored < 15:
        assert set(found.ravel()) == {float(q - stored - 1) for q in range(16)}


def test_a_stored_15_of_version_1_wraps_and_carries():
    scheme = QuantScheme("gptq", 32, zeros_less_one=True)
    words = random_words(scheme, 8, 32, seed=0)
    words["qweight"][:] = 0
    words["scales"][:] = 1
    words["qzeros"][0, 0] = 0x0000_0F77  # columns 0, 1: 7 -> 8; column 2: 15 -> 0, and one more for column 3: 0 -> 2
    weight, _ = repack(scheme, words, "linear")
    assert (-dequantise(weight)[:, 0]).tolist() == [8, 8, 0, 2, 1, 1, 1, 1]


def test_symmetric_words_mean_a_zero_point_of_8():
    for scheme, word in [(QuantScheme("gptq", 128, True), 0x77777777), (QuantScheme("gptq", 128), 0x88888888)]:
        words = random_words(scheme, 8, 128, seed=0)
        words["qzeros"][:] = np.array([word], np.uint32).view(np.int32)[0]
        words["scales"][:] = 1
        assert set(dequantise(repack(scheme, words, "linear")[0]).ravel()) == set(np.arange(-8.0, 8.0))


def test_a_missing_g_idx_means_groups_in_order():
    scheme = QuantScheme("gptq", 64)
    words = random_words(scheme, 8, 128, seed=2)
    with_index, _ = repack(scheme, words, "linear")
    without, order = repack(scheme, {k: v for k, v in words.items() if k != "g_idx"}, "linear")
    assert order is None
    np.testing.assert_array_equal(with_index.scales_zeros, without.scales_zeros)


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (np.zeros(128), "x.g_idx does not split 128 inputs into 2 groups of 64"),
        (np.full(128, -1), "x.g_idx does not split"),
        (np.arange(128) // 64 + 1, "x.g_idx does not split"),
        (np.minimum(np.arange(128) // 63, 1), "x.g_idx does not split"),
    ],
)
def test_groups_must_have_equal_size(g_idx, message):
    scheme = QuantScheme("gptq", 64)
    words = random_words(scheme, 8, 128, seed=2) | {"g_idx": g_idx.astype(np.int32)}
    with pytest.raises(CheckpointError, match=message):
        repack(scheme, words, "x")


def test_scales_must_be_numbers():
    scheme = QuantScheme("awq", 32)
    words = random_words(scheme, 8, 128, seed=2)
    words["scales"][1, 3] = np.nan
    with pytest.raises(CheckpointError, match="x.scales holds 1 values that are NaN or infinite"):
        repack(scheme, words, "x")


# ---- what config.json says

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("quant", "scheme"),
    [
        (AWQ, QuantScheme("awq", 128)),
        (AWQ | {"version": "GEMM", "modules_to_not_convert": None}, QuantScheme("awq", 128)),
        (GPTQ, QuantScheme("gptq", 128, zeros_less_one=True)),
        (GPTQ | {"checkpoint_format": "gptq", "sym": False}, QuantScheme("gptq", 128, zeros_less_one=True)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, QuantScheme("gptq", 128, act_order=True)),
        (GPTQ | {"format": "gptq_v2", "group_size": -1, "dynamic": {}}, QuantScheme("gptq", -1)),
        (None, None),
    ],
)
def test_schemes_that_are_read(quant, scheme):
    assert read_scheme({"quantization_config": quant}) == scheme


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ("awq", "quantization_config is 'awq', expected an object"),
        ({"quant_method": "bitsandbytes"}, "quantization by 'bitsandbytes' is not served"),
        ({"quant_method": "compressed-tensors"}, "quantization by 'compressed-tensors' is not served"),
        ({}, "quantization by None is not served"),
        (AWQ | {"bits": 8}, "this awq checkpoint is not served: bits is 8, expected 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', expected 'gemm'"),
        (AWQ | {"version": "marlin"}, "version is 'marlin', expected 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point is False, expected true"),
        (AWQ | {"group_size": 256}, "group_size is 256, expected one of"),
        (GPTQ | {"bits": 3}, "this gptq checkpoint is not served: bits is 3, expected 4"),
        (GPTQ | {"group_size": 16}, r"group_size is 16, expected one of \(32, 64, 128\) or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "packed for Marlin"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic gives layers settings of their own"),
        (GPTQ | {"desc_act": "yes"}, "desc_act is 'yes', expected true or false"),
        (GPTQ | {"bits": 8, "group_size": 0}, "2 problems: bits is 8, expected 4; group_size is 0"),
    ],
)
def test_schemes_that_are_refused_by_name(quant, message):
    with pytest.raises(CheckpointError, match=message):
        read_scheme({"quantization_config": quant}, "config.json")


# ---- whole folders


def quantised_tensors(scheme: QuantScheme) -> dict[str, np.ndarray]:
    """Return a model's tensors with every layer's linears in random words; those of one input share their order."""
    tensors = random_tensors(TINY)
    for layer in range(TINY.num_layers):
        for fused in FUSED.values():
            shared = random_words(scheme, 8, projection_shape(TINY, fused[0])[1], seed=layer)
            for index, projection in enumerate(fused):
                prefix = layer_prefix(layer) + projection
                del tensors[f"{prefix}.weight"]
                words = random_words(scheme, *projection_shape(TINY, projection), seed=10 * layer + index)
                if scheme.act_order:
                    words["g_idx"] = shared["g_idx"]
                tensors |= {f"{prefix}.{part}": values for part, values in words.items()}
    return tensors


def quantised_folder(folder: Path, scheme: QuantScheme, tensors: dict[str, np.ndarray]) -> Path:
    """Write such a model with the quantization_config that belongs to it."""
    quant = {"quant_method": scheme.method, "bits": 4, "group_size": scheme.group, "desc_act": scheme.act_order}
    if scheme.method == "gptq":
        quant["checkpoint_format"] = "gptq" if scheme.zeros_less_one else "gptq_v2"
    return write_folder(folder, TINY, tensors, "F16", shards=2, quantization_config=quant)


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme("awq", 64),
        QuantScheme("gptq", 32, True),
        QuantScheme("gptq", 64, True, True),
        QuantScheme("gptq", -1),
    ],
    ids=name_of,
)
def test_layers_of_a_folder_are_served_exactly(tmp_path, scheme):
    checkpoint = Checkpoint.open(quantised_folder(tmp_path, scheme, quantised_tensors(scheme)))
    assert checkpoint.scheme == scheme
    weights = quantise_checkpoint(checkpoint, group=32)
    assert weights.group == (128 if scheme.group == -1 else scheme.group)
    assert (weights.layers[0].qkv.input_order is not None) == scheme.act_order
    # head and table are float there and quantised here: give both the same, so that only the layers can differ
    packed, plain = ReferenceModel(weights), ReferenceModel(checkpoint)
    plain._weights.embed = packed._weights.embed
    for ours, theirs in zip(packed.hidden(IDS), plain.hidden(IDS), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)  # float64 sums over reordered inputs


def test_linears_left_in_float_are_quantised(tmp_path):
    scheme = QuantScheme("awq", 64)
    tensors = quantised_tensors(scheme)
    prefix = f"{layer_prefix(1)}mlp.down_proj"
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{prefix}.{part}"]
    tensors[f"{prefix}.weight"] = random_tensors(TINY)[f"{prefix}.weight"]
    weights = quantise_checkpoint(Checkpoint.open(quantised_folder(tmp_path, scheme, tensors)))
    assert weights.layers[1].down.group == 64
    error = dequantise(weights.layers[1].down) - tensors[f"{prefix}.weight"]
    assert 0 < np.linalg.norm(error) < 0.1 * np.linalg.norm(tensors[f"{prefix}.weight"])  # 4 bits: 8 % here


def test_a_head_in_words_is_repacked(tmp_path):
    scheme = QuantScheme("gptq", 64, True)
    tensors = quantised_tensors(scheme)
    words = random_words(scheme, 64, 128, seed=99)
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{part}": values for part, values in words.items()}
    checkpoint = Checkpoint.open(quantised_folder(tmp_path, scheme, tensors))
    np.testing.assert_array_equal(quantise_checkpoint(checkpoint).head.codes, repack(scheme, words, "lm_head")[0].codes)
    with pytest.raises(CheckpointError, match="tensor lm_head.qweight has dtype I32, expected BF16, F16 or F32"):
        checkpoint.tensor("lm_head.qweight")


def test_the_zero_biases_of_autogptq_are_accepted_and_others_refused(tmp_path):
    scheme = QuantScheme("gptq", 64, True)
    name = f"{layer_prefix(0)}mlp.up_proj.bias"
    tensors = quantised_tensors(scheme) | {name: np.zeros(256, np.float32)}
    assert quantise_checkpoint(Checkpoint.open(quantised_folder(tmp_path / "a", scheme, tensors))).group == 64
    tensors[name][5] = 1
    with pytest.raises(CheckpointError, match=f"{name} is not zero, but this architecture has no bias there"):
        quantise_checkpoint(Checkpoint.open(quantised_folder(tmp_path / "b", scheme, tensors)))


def test_projections_of_one_input_must_share_their_order(tmp_path):
    scheme = QuantScheme("gptq", 64, True, True)
    tensors = quantised_tensors(scheme)
    name = f"{layer_prefix(0)}self_attn.k_proj.g_idx"
    tensors[name] = np.roll(tensors[name], 1)
    with pytest.raises(CheckpointError, match="k_proj.g_idx orders the inputs unlike that of self_attn.q_proj"):
        quantise_checkpoint(Checkpoint.open(quantised_folder(tmp_path, scheme, tensors)))


def test_what_is_missing_or_misshapen_is_listed(tmp_path):
    scheme = QuantScheme("gptq", 64, True, True)
    tensors = quantised_tensors(scheme)
    prefix = f"{layer_prefix(0)}mlp.up_proj"
    del tensors[f"{prefix}.qzeros"], tensors[f"{prefix}.g_idx"]
    tensors[f"{prefix}.qweight"] = tensors[f"{prefix}.qweight"].T.copy()
    folder = quantised_folder(tmp_path, scheme, tensors)
    message = rf"missing tensors: {prefix}.g_idx, {prefix}.qzeros; {prefix}.qweight has shape \[256, 16\]"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_quantised_words_without_a_scheme_are_unknown(tmp_path):
    folder = write_folder(tmp_path, TINY, quantised_tensors(QuantScheme("awq", 64)))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*unknown tensors: .*qweight"):
        Checkpoint.open(folder)
