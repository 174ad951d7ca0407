"""The weights of a whole model, packed as the kernels read them, and the ways to make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rtlib import foreign
from rtlib.checkpoint import Checkpoint
from rtlib.config import ModelConfig
from rtlib.errors import CheckpointError
from rtlib.layout import EMBEDDING, FINAL_NORM, FUSED, fused_shape, has_bias, is_quantised, layer_prefix
from rtlib.nibbles import pack_scales_zeros
from rtlib.progress import progress
from rtlib.quantise import TABLE_GROUP, Int4Weight, Int8Table, quantise, quantise_embedding

_BLOCK_ROWS = 8192  # rows of a vocabulary-sized matrix that are read and quantised at a time


@dataclass(frozen=True)
class Linear(Int4Weight):
    """An INT4 linear: y = w @ x[input_order] + bias.

    bias float32 [N] or None; input_order int32 [K] or None, the inputs in the order in which the codes have them.
    """

    bias: np.ndarray | None = None
    input_order: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of everything a product reads: codes, scales and zero points, bias, order."""
        parts = (self.codes, self.scales_zeros, self.bias, self.input_order)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: norms float32 [H]; qkv, gate_up with the rows of their projections stacked in that order."""

    input_norm: np.ndarray
    qkv: Linear
    o: Linear
    post_norm: np.ndarray
    gate_up: Linear
    down: Linear

    @property
    def qkv_bias(self) -> np.ndarray | None:
        """Return the bias of q, k and v, float32 [Nq + 2 Nkv], or None."""
        return self.qkv.bias


@dataclass(frozen=True)
class ModelWeights:
    """A whole model; final_norm float32 [H], head INT4 [V, H] even where it is tied to the table."""

    config: ModelConfig
    group: int
    embedding: Int8Table
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray
    head: Linear

    @property
    def byte_counts(self) -> dict[str, int]:
        """Return the bytes of each part, summed over the layers."""
        counts = {"embedding": self.embedding.nbytes}
        for name in FUSED:
            counts[name] = sum(getattr(layer, name).nbytes for layer in self.layers)
        norms = sum(layer.input_norm.nbytes + layer.post_norm.nbytes for layer in self.layers)
        return counts | {"norms": norms + self.final_norm.nbytes, "head": self.head.nbytes}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.byte_counts.values())


def quantise_checkpoint(checkpoint: Checkpoint, group: int = 128, progress: Callable = progress) -> ModelWeights:
    """Return the weights of a checkpoint, with one float tensor in memory at a time.

    AWQ and GPTQ words are repacked, not requantised; `group` is for float linears, as such a checkpoint brings its own.
    `progress(items, label, unit=...)` is wrapped around what takes long. Raises CheckpointError for damaged tensors.
    """
    if checkpoint.scheme is not None:
        group = foreign.effective_group(checkpoint.scheme)
    layers = [_load_layer(checkpoint, i, group) for i in progress(range(checkpoint.config.num_layers), "quantising")]
    return ModelWeights(
        config=checkpoint.config,
        group=group,
        embedding=_load_embedding(checkpoint, progress),
        layers=tuple(layers),
        final_norm=checkpoint.tensor(FINAL_NORM),
        head=_load_head(checkpoint, group, progress),
    )


def random_weights(config: ModelConfig, group: int = 128, seed: int = 0) -> ModelWeights:
    """Return weights of a config's dimensions with random codes, scales, zero points, biases and norms.

    Scales keep the activations near 1, so that logits are finite and spread.
    """
    rng = np.random.default_rng(seed)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def linear(outputs: int, inputs: int, bias: bool = False) -> Linear:
        return _random_linear(rng, outputs, inputs, group, vector(outputs, 0.0) if bias else None)

    def layer() -> LayerWeights:
        sizes = {name: fused_shape(config, name) for name in FUSED}
        return LayerWeights(
            input_norm=vector(config.hidden_size, 1.0),
            qkv=linear(*sizes["qkv"], bias=config.attention_bias),
            o=linear(*sizes["o"]),
            post_norm=vector(config.hidden_size, 1.0),
            gate_up=linear(*sizes["gate_up"]),
            down=linear(*sizes["down"]),
        )

    table_shape = (config.vocab_size, config.hidden_size)
    embedding = Int8Table(
        codes=rng.integers(-127, 128, table_shape, np.int8),
        scales=rng.uniform(0.005, 0.015, (table_shape[0], table_shape[1] // TABLE_GROUP)).astype(np.float16),
    )
    layers = tuple(layer() for _ in range(config.num_layers))
    return ModelWeights(config, group, embedding, layers, vector(config.hidden_size, 1.0), linear(*table_shape))


def _random_linear(rng: np.random.Generator, outputs: int, inputs: int, group: int, bias: np.ndarray | None) -> Linear:
    """Return a linear of uniform codes, whose outputs have the spread of its inputs."""
    codes = rng.integers(0, 2**32, (outputs, inputs // 8), np.uint32)
    spread = 1 / (4.6 * inputs**0.5)  # 4.6 is the standard deviation of a uniform code
    scales = rng.uniform(0.75 * spread, 1.25 * spread, (outputs, inputs // group))
    zeros = rng.uniform(7.0, 8.0, scales.shape)
    return Linear(codes, pack_scales_zeros(scales, zeros), group, bias)


def _load_layer(checkpoint: Checkpoint, index: int, group: int) -> LayerWeights:
    """Read one layer."""
    prefix = layer_prefix(index)
    fused = {name: _load_fused(checkpoint, prefix, FUSED[name], group) for name in FUSED}
    return LayerWeights(
        input_norm=checkpoint.tensor(f"{prefix}input_layernorm.weight"),
        post_norm=checkpoint.tensor(f"{prefix}post_attention_layernorm.weight"),
        **fused,
    )


def _load_fused(checkpoint: Checkpoint, prefix: str, projections: tuple[str, ...], group: int) -> Linear:
    """Read some projections of one input and stack their rows."""
    parts = [_load_linear(checkpoint, prefix + projection, group) for projection in projections]
    biases = [
        checkpoint.tensor(f"{prefix}{projection}.bias")
        for projection in projections
        if has_bias(checkpoint.config, projection)
    ]
    order = parts[0].input_order
    for projection, part in zip(projections, parts, strict=True):
        same = part.input_order is order or (
            order is not None and part.input_order is not None and np.array_equal(part.input_order, order)
        )
        if not same:
            raise CheckpointError(
                f"{prefix}{projection}.g_idx orders the inputs unlike that of {projections[0]}; they share one input "
                "and must be quantised with one order: requantise them together, or without desc_act"
            )
    return Linear(
        codes=np.concatenate([part.codes for part in parts]),
        scales_zeros=np.concatenate([part.scales_zeros for part in parts]),
        group=parts[0].group,
        bias=np.concatenate(biases) if biases else None,
        input_order=order,
    )


def _load_linear(checkpoint: Checkpoint, prefix: str, group: int) -> Linear:
    """Read one linear without its bias: quantised if it is float, repacked if it is in a scheme's words."""
    if not is_quantised(checkpoint.scheme, checkpoint.files, prefix):
        return Linear(**vars(quantise(checkpoint.tensor(f"{prefix}.weight"), group)))
    weight, order = read_foreign(checkpoint, prefix)
    return Linear(**vars(weight), input_order=order)


def read_foreign(checkpoint: Checkpoint, prefix: str) -> tuple[Int4Weight, np.ndarray | None]:
    """Return an AWQ or GPTQ linear repacked, and the order of its inputs or None; see foreign.repack."""
    _refuse_lost_bias(checkpoint, prefix)
    words = {
        part: checkpoint.raw(f"{prefix}.{part}")
        for part in ("qweight", "qzeros", "scales", "g_idx")
        if f"{prefix}.{part}" in checkpoint.files
    }
    return foreign.repack(checkpoint.scheme, words, prefix)


def _refuse_lost_bias(checkpoint: Checkpoint, prefix: str) -> None:
    """Make sure that a bias this architecture does not have holds only the zeros that AutoGPTQ writes."""
    name = f"{prefix}.bias"
    projection = ".".join(prefix.split(".")[-2:])
    if name in checkpoint.files and not has_bias(checkpoint.config, projection) and checkpoint.tensor(name).any():
        raise CheckpointError(f"{checkpoint.folder.path}: {name} is not zero, but this architecture has no bias there")


def _load_embedding(checkpoint: Checkpoint, progress: Callable) -> Int8Table:
    """Read and quantise the embedding table by blocks of rows."""
    rows = progress(_row_blocks(checkpoint), "quantising the embedding table", unit="block")
    blocks = [quantise_embedding(checkpoint.tensor(EMBEDDING, block)) for block in rows]
    return Int8Table(np.concatenate([b.codes for b in blocks]), np.concatenate([b.scales for b in blocks]))


def _load_head(checkpoint: Checkpoint, group: int, progress: Callable) -> Linear:
    """Read the head: quantised by blocks of rows from its own matrix or the tied table, or repacked."""
    if not checkpoint.config.tie_embeddings and is_quantised(checkpoint.scheme, checkpoint.files, "lm_head"):
        return _load_linear(checkpoint, "lm_head", group)
    rows = progress(_row_blocks(checkpoint), "quantising the head", unit="block")
    blocks = [quantise(checkpoint.tensor(checkpoint.head_name, block), group) for block in rows]
    return Linear(np.concatenate([b.codes for b in blocks]), np.concatenate([b.scales_zeros for b in blocks]), group)


def _row_blocks(checkpoint: Checkpoint) -> list[slice]:
    """Return the blocks of rows in which a vocabulary-sized matrix is read."""
    vocab = checkpoint.config.vocab_size
    return [slice(start, min(start + _BLOCK_ROWS, vocab)) for start in range(0, vocab, _BLOCK_ROWS)]
