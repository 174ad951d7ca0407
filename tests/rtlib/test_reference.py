"""The float64 reference against plain loops, against itself step by step, and against transformers if installed."""

from dataclasses import replace

import numpy as np
import pytest
from made_folders import TINY, random_tensors, write_folder

from rtlib.checkpoint import Checkpoint
from rtlib.reference import (
    ReferenceCache,
    ReferenceModel,
    attention,
    log_softmax,
    perplexity,
    rms_norm,
    rotate,
    silu,
)
from rtlib.rope import YarnScaling
from rtlib.weights import quantise_checkpoint, random_weights

IDS = np.random.default_rng(7).integers(0, TINY.vocab_size, 24)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the L2 norm of the difference over that of what was expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_attention_is_the_plain_loop(rng):
    q, keys, values = rng.standard_normal((3, 6, 8)), rng.standard_normal((7, 2, 8)), rng.standard_normal((7, 2, 8))
    found = attention(q, keys, values, np.array([4, 5, 6]))
    for token, position in enumerate([4, 5, 6]):
        for head in range(6):
            kv_head = head // 3
            scores = [q[token, head] @ keys[s, kv_head] / 8**0.5 for s in range(position + 1)]
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(weights[s] * values[s, kv_head] for s in range(position + 1))
            np.testing.assert_allclose(found[token, head], expected, rtol=1e-12)


def test_attention_holds_scores_of_3e5(rng):
    keys = rng.standard_normal((5, 1, 4))
    q = np.full((1, 1, 4), 1.0)
    keys[2] = 1.5e5  # the score is 4 * 1.5e5 / 2
    found = attention(q, keys, keys, np.array([4]))
    np.testing.assert_array_equal(found[0, 0], keys[2, 0])


def test_rotation_turns_pairs_as_complex_numbers(rng):
    x, angles = rng.standard_normal((5, 3, 8)), rng.uniform(0, 6, (5, 4))
    found = rotate(x, np.cos(angles), np.sin(angles))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), rtol=1e-12)


def test_small_functions(rng):
    x = rng.standard_normal((2, 6))
    np.testing.assert_allclose(rms_norm(x, np.arange(6.0), 0.5)[1, 5], 5 * x[1, 5] / ((x[1] @ x[1]) / 6 + 0.5) ** 0.5)
    np.testing.assert_allclose(silu(x), x / (1 + np.exp(-x)), rtol=1e-14)
    np.testing.assert_array_equal(silu(np.array([-1e5, 0.0, 1e5])), [0, 0, 1e5])
    np.testing.assert_allclose(log_softmax(x), np.log(np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)), rtol=1e-12)
    assert log_softmax(np.array([3e5, 0.0, 3e5])).tolist() == [-np.log(2), -3e5 - np.log(2), -np.log(2)]


@pytest.mark.parametrize("chunks", [[1] * 24, [10, 14], [23, 1]])
def test_steps_and_chunks_equal_the_whole_sequence(chunks):
    model = ReferenceModel(random_weights(TINY, 64, 1))
    cache, parts, start = ReferenceCache(), [], 0
    for size in chunks:
        parts.append(model.logits(IDS[start : start + size], cache))
        start += size
    assert cache.length == 24
    # float64 sums in another order
    np.testing.assert_allclose(np.concatenate(parts), model.logits(IDS), rtol=0, atol=1e-12)


def test_later_tokens_do_not_change_earlier_logits():
    model = ReferenceModel(random_weights(TINY, 64, 1))
    changed = IDS.copy()
    changed[20:] = (changed[20:] + 1) % TINY.vocab_size
    before, after = model.logits(IDS), model.logits(changed)
    np.testing.assert_allclose(before[:20], after[:20], rtol=0, atol=1e-12)
    assert relative(after[20:], before[20:]) > 0.1


def test_keeping_matrices_changes_nothing():
    weights = random_weights(TINY, 32, 2)
    np.testing.assert_array_equal(
        ReferenceModel(weights, keep=False).logits(IDS[:5]), ReferenceModel(weights).logits(IDS[:5])
    )


def test_an_input_order_is_undone_by_the_gather():
    weights = random_weights(TINY, 32, 3)
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    layer = weights.layers[0]
    inverse = np.argsort(order)

    moved = replace(weights, layers=(replace(layer, qkv=replace(layer.qkv, input_order=order)), *weights.layers[1:]))
    model, plain = ReferenceModel(moved), ReferenceModel(weights)
    x = np.random.default_rng(1).standard_normal((4, 128))
    np.testing.assert_allclose(model._linear(0, "qkv", x[:, inverse]), plain._linear(0, "qkv", x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "low", "gate"), [("fp16", 1e-4, 2e-3), ("bf16", 1e-3, 1e-2), ("int8", 4e-3, 4e-2)])
def test_rounded_activations_stay_within_the_gates(form, low, gate):
    weights = random_weights(replace(TINY, num_layers=4), 64, 4)
    error = relative(ReferenceModel(weights, form).logits(IDS), ReferenceModel(weights).logits(IDS))
    assert low < error < gate


def test_float_checkpoint_and_its_quantised_weights(tmp_path):
    checkpoint = Checkpoint.open(write_folder(tmp_path, TINY, random_tensors(TINY), shards=2))
    exact = ReferenceModel(checkpoint).logits(IDS)
    coarse = relative(ReferenceModel(quantise_checkpoint(checkpoint, 128)).logits(IDS), exact)
    fine = relative(ReferenceModel(quantise_checkpoint(checkpoint, 32)).logits(IDS), exact)
    # each of the 9 products in a row adds 7 to 9 % (groups of 32 and 128) of its output as independent noise
    assert fine < coarse < 0.35


def test_perplexity_is_the_mean_over_windows():
    model = ReferenceModel(random_weights(TINY, 64, 5))
    losses = []
    for part in (IDS[:10], IDS[10:20], IDS[20:]):
        rows = log_softmax(model.logits(part))
        losses += [-rows[i, part[i + 1]] for i in range(len(part) - 1)]
    assert perplexity(model, IDS, 10) == pytest.approx(np.exp(np.mean(losses)), rel=1e-12)
    assert perplexity(model, IDS[:21], 10) == pytest.approx(np.exp(np.mean(losses[:18])), rel=1e-12)


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary():
    weights = random_weights(TINY, 64, 5)
    blank = replace(weights.head, scales_zeros=np.zeros_like(weights.head.scales_zeros))
    assert perplexity(ReferenceModel(replace(weights, head=blank)), IDS, 24) == pytest.approx(64, rel=1e-12)


KINDS = {
    "untied": TINY,
    "tied": replace(TINY, tie_embeddings=True),
    "head_dim 64, group of 7": replace(TINY, hidden_size=896, num_heads=14, head_dim=64, tie_embeddings=True),
    "head_dim 128, explicit": replace(TINY, num_heads=2, num_kv_heads=1, head_dim=128),
    "theta 1e6": replace(TINY, rope_theta=1e6, rms_eps=1e-5),
    "YaRN": replace(TINY, rope_theta=1e6, max_positions=128, rope_scaling=YarnScaling(4.0, 32)),
    "YaRN, factor given": replace(TINY, rope_scaling=YarnScaling(8.0, 16, attention_factor=0.9, beta_fast=8.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_logits(tmp_path, kind):
    torch = pytest.importorskip("torch", reason="torch and transformers are optional, for comparison")
    transformers = pytest.importorskip("transformers", reason="torch and transformers are optional, for comparison")
    config = KINDS[kind]
    folder = write_folder(tmp_path, config, random_tensors(config), "BF16", shards=2)
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(IDS[None])).logits[0].numpy()
    # float32 on their side: about 1e-6 over two layers
    assert relative(ReferenceModel(Checkpoint.open(folder)).logits(IDS), expected.astype(np.float64)) < 1e-5
