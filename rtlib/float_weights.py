"""Weights in float64 for the reference, dequantised from packed weights or read from a checkpoint's floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import numpy as np

from rtlib.checkpoint import Checkpoint
from rtlib.layout import EMBEDDING, FUSED, has_bias, is_quantised, layer_prefix
from rtlib.quantise import dequantise
from rtlib.weights import ModelWeights, read_foreign

_NORMS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
}


@dataclass(frozen=True)
class FloatLinear:
    """One linear: matrix float64 [N, K]; bias [N] or None; input_order [K] or None: the inputs of its columns."""

    matrix: np.ndarray
    bias: np.ndarray | None
    input_order: np.ndarray | None = None


class FloatWeights(Protocol):
    """Names are the fields of LayerWeights, and with layer None those of ModelWeights."""

    embed: Callable[[np.ndarray], np.ndarray]  # ids [T] -> float64 [T, H]
    norm: Callable[[int | None, str], np.ndarray]  # float64 [H]
    linear: Callable[[int | None, str], FloatLinear]


def float_weights(source: ModelWeights | Checkpoint, keep: bool) -> FloatWeights:
    """Return a source's weights in float64; with `keep` each is converted once and held."""
    weights = _Packed(source) if isinstance(source, ModelWeights) else _Read(source)
    if keep:
        # an attribute of the instance: a cache on the class would keep every instance alive
        weights.norm, weights.linear = cache(weights.norm), cache(weights.linear)
    return weights


class _Packed:
    """Dequantises ModelWeights."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return dequantise(self.weights.embedding, ids)

    def norm(self, layer: int | None, name: str) -> np.ndarray:
        return getattr(self._owner(layer), name).astype(np.float64)

    def linear(self, layer: int | None, name: str) -> FloatLinear:
        packed = getattr(self._owner(layer), name)
        return FloatLinear(dequantise(packed), packed.bias, packed.input_order)

    def _owner(self, layer: int | None) -> object:
        return self.weights if layer is None else self.weights.layers[layer]


class _Read:
    """Reads a checkpoint: its floats as they are, its AWQ or GPTQ words dequantised."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self._table[ids].astype(np.float64)

    @cached_property
    def _table(self) -> np.ndarray:
        return self.checkpoint.tensor(EMBEDDING)

    def norm(self, layer: int | None, name: str) -> np.ndarray:
        prefix = "" if layer is None else layer_prefix(layer)
        return self.checkpoint.tensor(f"{prefix}{_NORMS[name]}.weight").astype(np.float64)

    def linear(self, layer: int | None, name: str) -> FloatLinear:
        if layer is None:
            return FloatLinear(self._matrix(self.checkpoint.head_name.removesuffix(".weight")), None)
        prefix = layer_prefix(layer)
        biases = [
            self.checkpoint.tensor(f"{prefix}{projection}.bias")
            for projection in FUSED[name]
            if has_bias(self.checkpoint.config, projection)
        ]
        matrix = np.concatenate([self._matrix(prefix + projection) for projection in FUSED[name]])
        return FloatLinear(matrix, np.concatenate(biases) if biases else None)

    def _matrix(self, module: str) -> np.ndarray:
        if not is_quantised(self.checkpoint.scheme, self.checkpoint.files, module):
            return self.checkpoint.tensor(f"{module}.weight").astype(np.float64)
        weight, order = read_foreign(self.checkpoint, module)
        matrix = dequantise(weight)
        if order is not None:
            matrix[:, order] = matrix.copy()
        return matrix
