"""Weights of a whole model: what quantising a folder gives, in which order, and how many bytes."""

from dataclasses import replace

import numpy as np
import pytest
from made_folders import TINY, random_tensors, write_folder

from rtlib.checkpoint import Checkpoint
from rtlib.config import PRESETS
from rtlib.layout import EMBEDDING, FUSED, HEAD
from rtlib.nibbles import unpack_scales_zeros
from rtlib.progress import progress
from rtlib.quantise import dequantise, quantise
from rtlib.reference import ReferenceModel
from rtlib.weights import quantise_checkpoint, random_weights

TENSORS = random_tensors(TINY)
LAYER = "model.layers.1."


@pytest.mark.parametrize("group", [32, 128])
def test_fused_rows_are_the_projections_in_order(tmp_path, group):
    weights = quantise_checkpoint(Checkpoint.open(write_folder(tmp_path, TINY, TENSORS, shards=2)), group)
    assert weights.group == group
    for name, projections in FUSED.items():
        fused = getattr(weights.layers[1], name)
        alone = [quantise(TENSORS[f"{LAYER}{part}.weight"], group) for part in projections]
        np.testing.assert_array_equal(fused.codes, np.concatenate([part.codes for part in alone]))
        np.testing.assert_array_equal(fused.scales_zeros, np.concatenate([part.scales_zeros for part in alone]))
        assert fused.group == group
        assert fused.input_order is None
    parts = [TENSORS[f"{LAYER}self_attn.{part}_proj.bias"] for part in "qkv"]
    np.testing.assert_array_equal(weights.layers[1].qkv_bias, np.concatenate(parts))
    assert weights.layers[1].o.bias is None
    np.testing.assert_array_equal(weights.layers[1].input_norm, TENSORS[f"{LAYER}input_layernorm.weight"])
    np.testing.assert_array_equal(weights.layers[1].post_norm, TENSORS[f"{LAYER}post_attention_layernorm.weight"])
    np.testing.assert_array_equal(weights.final_norm, TENSORS["model.norm.weight"])


def test_head_and_table(tmp_path):
    weights = quantise_checkpoint(Checkpoint.open(write_folder(tmp_path / "a", TINY, TENSORS)))
    np.testing.assert_array_equal(weights.head.codes, quantise(TENSORS[HEAD], 128).codes)
    np.testing.assert_allclose(dequantise(weights.embedding), TENSORS[EMBEDDING], rtol=0, atol=0.002)  # 0.4 / 127 / 2
    tied = replace(TINY, tie_embeddings=True)
    weights = quantise_checkpoint(Checkpoint.open(write_folder(tmp_path / "b", tied, random_tensors(tied))))
    np.testing.assert_array_equal(weights.head.codes, quantise(random_tensors(tied)[EMBEDDING], 128).codes)


def test_large_vocabularies_are_read_by_blocks(tmp_path, monkeypatch):
    whole = quantise_checkpoint(Checkpoint.open(write_folder(tmp_path, TINY, TENSORS)))
    monkeypatch.setattr("rtlib.weights._BLOCK_ROWS", 24)  # 64 rows: two blocks and a tail
    blocks = quantise_checkpoint(Checkpoint.open(tmp_path))
    for a, b in [(whole.head.codes, blocks.head.codes), (whole.embedding.codes, blocks.embedding.codes)]:
        np.testing.assert_array_equal(a, b)


def test_a_model_without_attention_biases(tmp_path):
    config = replace(TINY, attention_bias=False)
    weights = quantise_checkpoint(Checkpoint.open(write_folder(tmp_path, config, random_tensors(config))))
    assert weights.layers[0].qkv_bias is None


def test_progress_sees_everything_that_takes_long(tmp_path):
    seen = []

    def record(items, label, unit="layer"):
        for item in items:
            seen.append((label, unit, item))
            yield item

    quantise_checkpoint(Checkpoint.open(write_folder(tmp_path, TINY, TENSORS)), progress=record)
    table, head = "quantising the embedding table", "quantising the head"
    rows = slice(0, 64)
    assert seen == [
        ("quantising", "layer", 0),
        ("quantising", "layer", 1),
        (table, "block", rows),
        (head, "block", rows),
    ]


def test_the_progress_bar_is_silent_off_a_terminal(capfd):
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


def test_random_weights_have_the_dimensions_and_are_repeatable():
    a, b, c = random_weights(TINY, 32, 1), random_weights(TINY, 32, 1), random_weights(TINY, 32, 2)
    assert a.layers[0].qkv.codes.shape == (256, 16)
    assert a.layers[0].qkv.scales_zeros.shape == (256, 4)
    assert a.layers[0].down.codes.shape == (128, 32)
    assert (a.head.outputs, a.head.inputs) == (64, 128)
    np.testing.assert_array_equal(a.layers[1].down.codes, b.layers[1].down.codes)
    assert not np.array_equal(a.layers[1].down.codes, c.layers[1].down.codes)
    scales, zeros = unpack_scales_zeros(a.head.scales_zeros)
    assert (scales > 0).all()
    assert len(np.unique(scales)) > 100
    assert ((zeros >= 7) & (zeros <= 8)).all()


def test_random_weights_give_logits_near_one():
    logits = ReferenceModel(random_weights(TINY, 64, 3)).logits(np.arange(20))
    assert 0.3 < logits.std() < 3  # a unit-variance input keeps its spread through every linear


def test_byte_counts():
    weights = random_weights(TINY, 64, 1)
    counts = weights.byte_counts
    # codes take half a byte a weight, a word of scale and zero point 4 bytes a group
    assert counts["gate_up"] == 2 * (512 * 128 // 2 + 512 * 2 * 4)
    assert counts["qkv"] == 2 * (256 * 128 // 2 + 256 * 2 * 4 + 256 * 4)
    assert counts["embedding"] == 64 * 128 + 64 * 2
    assert counts["norms"] == 5 * 128 * 4
    assert set(counts) == {"embedding", "qkv", "o", "gate_up", "down", "norms", "head"}
    assert weights.nbytes == sum(counts.values())


def test_the_largest_layer_has_the_bytes_that_were_derived_for_it():
    config = replace(PRESETS["qwen2.5-coder-7b"], num_layers=1, vocab_size=128)
    counts = random_weights(config).byte_counts
    # half a byte and 4 / 128 of one a weight: 8.5, 6.6, 70 and 35 MB with 2 bytes a group, 3 % more with 4
    assert counts["gate_up"] == 2 * 18944 * 3584 * 17 // 32
    assert counts["down"] == 3584 * 18944 * 17 // 32
    assert counts["o"] == 3584 * 3584 * 17 // 32
    assert counts["qkv"] == 4608 * 3584 * 17 // 32 + 4608 * 4
