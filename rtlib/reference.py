"""The whole model in NumPy float64: what every kernel and every path is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rtlib.checkpoint import Checkpoint
from rtlib.float_weights import float_weights
from rtlib.rope import cos_sin
from rtlib.rounding import round_activation
from rtlib.weights import ModelWeights

Ids = Sequence[int] | np.ndarray


@dataclass
class ReferenceCache:
    """Keys and values of the positions so far: per layer float64 [positions, kv_heads, head_dim]."""

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the number of positions held."""
        return len(self.keys[0]) if self.keys else 0

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the keys and values of new positions to a layer and return all of that layer's."""
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = np.concatenate([self.keys[layer], keys])
            self.values[layer] = np.concatenate([self.values[layer], values])
        return self.keys[layer], self.values[layer]


class ReferenceModel:
    """A Qwen2 model in float64; `activations` is the form each linear's input is rounded to, None for no rounding.

    Weights come dequantised from ModelWeights, or in float from a Checkpoint, which they are compared with.
    `keep` holds every matrix in float64 after its first use; without it each is made anew, for models that do not fit.
    """

    def __init__(self, source: ModelWeights | Checkpoint, activations: str | None = None, keep: bool = True) -> None:
        """Take the weights; none is converted yet."""
        self.config = source.config
        self.activations = activations
        self._weights = float_weights(source, keep)

    def logits(self, ids: Ids, cache: ReferenceCache | None = None) -> np.ndarray:
        """Return float64 logits [len(ids), vocab] of the tokens that follow each of `ids`.

        Without a cache `ids` is a whole sequence; with one they follow what the cache holds, and are added to it.
        """
        return self._linear(None, "head", self._norm(None, "final_norm", self.hidden(ids, cache)[-1]))

    def hidden(self, ids: Ids, cache: ReferenceCache | None = None) -> list[np.ndarray]:
        """Return the residual stream, float64 [len(ids), hidden] each, after the embedding and after every layer."""
        cache = ReferenceCache() if cache is None else cache
        positions = cache.length + np.arange(len(ids))
        states = [self._weights.embed(np.asarray(ids, np.int64))]
        for layer in range(self.config.num_layers):
            states.append(self._layer(layer, states[-1], positions, cache))
        return states

    def _layer(self, layer: int, x: np.ndarray, positions: np.ndarray, cache: ReferenceCache) -> np.ndarray:
        """Return the residual stream after one decoder layer."""
        qkv = self._linear(layer, "qkv", self._norm(layer, "input_norm", x))
        x = x + self._linear(layer, "o", self._attend(layer, qkv, positions, cache))
        gate, up = np.split(self._linear(layer, "gate_up", self._norm(layer, "post_norm", x)), 2, axis=-1)
        return x + self._linear(layer, "down", silu(gate) * up)

    def _attend(self, layer: int, qkv: np.ndarray, positions: np.ndarray, cache: ReferenceCache) -> np.ndarray:
        """Return attention's output [T, heads x head_dim] for T new positions."""
        config = self.config
        tables = cos_sin(config, positions)
        q, k, v = np.split(qkv, [config.query_size, config.query_size + config.kv_size], axis=-1)
        q = rotate(q.reshape(len(q), config.num_heads, config.head_dim), *tables)
        k = rotate(k.reshape(len(k), config.num_kv_heads, config.head_dim), *tables)
        keys, values = cache.append(layer, k, v.reshape(k.shape))
        return attention(q, keys, values, positions).reshape(len(q), -1)

    def _norm(self, layer: int | None, name: str, x: np.ndarray) -> np.ndarray:
        """Return RMSNorm's output for the residual stream."""
        return rms_norm(x, self._weights.norm(layer, name), self.config.rms_eps)

    def _linear(self, layer: int | None, name: str, x: np.ndarray) -> np.ndarray:
        """Return a linear's output for its input, gathered and rounded as a kernel would."""
        linear = self._weights.linear(layer, name)
        gathered = x if linear.input_order is None else x[..., linear.input_order]
        y = round_activation(gathered, self.activations) @ linear.matrix.T
        return y if linear.bias is None else y + linear.bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Apply RoPE to [T, heads, head_dim] with tables [T, head_dim / 2]; pair i is (i, i + head_dim / 2)."""
    low, high = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return causal attention [T, heads, head_dim]; query head h reads KV head h // (heads / kv_heads).

    q [T, heads, head_dim]; keys, values [S, kv_heads, head_dim]; a query at position p sees the keys 0 .. p.
    """
    new, heads, head_dim = q.shape
    grouped = q.reshape(new, keys.shape[1], -1, head_dim)
    scores = np.einsum("tkgd,skd->kgts", grouped, keys, optimize=True) / np.sqrt(head_dim)
    scores = np.where(np.arange(len(keys)) <= positions[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgts,skd->tkgd", weights, values, optimize=True).reshape(new, heads, head_dim)


def silu(x: np.ndarray) -> np.ndarray:
    """Return x / (1 + exp(-x)), without overflow for large negative x."""
    tail = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1, tail) / (1 + tail)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def perplexity(model: ReferenceModel, ids: Ids, window: int) -> float:
    """Return exp of the mean negative log likelihood of every token but the first of each window.

    The ids are cut into windows that do not see each other; the last may be shorter. At least two ids are needed.
    """
    ids = np.asarray(ids, np.int64)
    losses = []
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        predicted = log_softmax(model.logits(part[:-1])) if len(part) > 1 else np.empty((0, 1))
        losses.append(-predicted[np.arange(len(part) - 1), part[1:]])
    return float(np.exp(np.concatenate(losses).mean()))
