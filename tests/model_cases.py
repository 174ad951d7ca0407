"""Runtimes of small random models, and how their logits are judged: shared by the tests on either stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernels_numba import device_memory
from rtlib.chat import stop_ids
from rtlib.config import ModelConfig
from rtlib.folder import ModelFolder
from rtlib.loading import EMBEDDED, Loaded
from rtlib.model import Options
from rtlib.runtime import Runtime
from rtlib.tokenizer import Tokenizer
from rtlib.weights import ModelWeights

# relative L2 error of the logits of a step: about twice what rounding the activations alone costs in float64 over 4 to
# 28 layers of random weights (9e-4, 6e-3, 2.7e-2)
GATES = {"fp16": 2e-3, "bf16": 1e-2, "int8": 4e-2}

SMALL = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rope_theta=10000.0,
    rms_eps=1e-6,
    tie_embeddings=False,
    max_positions=64,
)


def make_runtime(weights: ModelWeights, folder: Path = EMBEDDED, **options: object) -> Runtime:
    """A runtime of weights made in the test, with the tokenizer of a folder."""
    place = ModelFolder(folder.resolve())
    tokenizer = Tokenizer.open(place)
    loaded = Loaded(weights, tokenizer, stop_ids(tokenizer, weights.config.eos_ids, {}), place)
    return Runtime(loaded, Options(**({"max_context": weights.config.max_positions} | options)))


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """L2(got - expected) / L2(expected); NaN where anything is not finite."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))


def judge_step(got: np.ndarray, expected: np.ndarray, gate: float) -> bool:
    """Asserts a step's gate, and the argmax where it must agree; tells whether it had to.

    It must where the reference's first choice leads the second by more than the largest error of a logit.
    """
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    error = relative_error(got, expected)
    assert error < gate, f"relative error {error:.2e}, the gate is {gate:.0e}"
    second, first = np.sort(expected)[-2:]
    decided = bool(first - second > np.abs(got - expected).max())
    if decided:
        assert int(np.argmax(got)) == int(np.argmax(expected))
    return decided


def poison(runtime: Runtime, word: int) -> None:
    """Fills the KV cache, and everything that a prompt's launches write before they read it, with one word."""
    model, prefill = runtime.model, runtime._prefill
    scratch = (prefill.residual, prefill.qkv, prefill.attended, prefill.gate_up, prefill.values, prefill.scales)
    for array in (*model.keys, *model.values, model.partials, *scratch, prefill.sums):
        device_memory.overwrite(array, np.full(array.size, word, np.uint32).view(array.dtype))
    device_memory.overwrite(
        model.state.block_table, np.full(model.state.block_table.size, 0xDEADBEEF, np.uint32).view(np.int32)
    )


def cache_words(runtime: Runtime) -> np.ndarray:
    """Every word of the KV cache."""
    return np.concatenate([device_memory.download(a) for a in (*runtime.model.keys, *runtime.model.values)])
