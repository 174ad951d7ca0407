"""Small model folders for the tests: random tensors, written in every dtype and split that a real folder may have."""

import json
from pathlib import Path

import numpy as np

from rtlib.config import ModelConfig
from rtlib.layout import expected_tensors

TINY = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10000.0,
    rms_eps=1e-6,
    tie_embeddings=False,
    max_positions=64,
    eos_ids=(3, 5),
)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 tensors, by Hugging Face's names, that bfloat16 holds exactly; activations stay near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, spec in expected_tensors(config, None, ()).items():
        if spec.optional:
            continue
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * rng.standard_normal(spec.shape)
        else:
            values = rng.standard_normal(spec.shape) / (spec.shape[-1] ** 0.5 if len(spec.shape) == 2 else 10)
        tensors[name] = to_bfloat16_values(values)
    return tensors


def to_bfloat16_values(values: np.ndarray) -> np.ndarray:
    """Return float32 values cut to bfloat16's 8 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


def encode(values: np.ndarray, dtype: str) -> tuple[str, list[int], bytes]:
    """Return a tensor as safetensors has it: dtype name, shape, bytes."""
    if dtype == "BF16":
        stored = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype({"F32": np.float32, "F16": np.float16, "I32": np.int32, "F64": np.float64}[dtype])
    return dtype, list(values.shape), stored.tobytes()


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]], header: dict | None = None) -> bytes:
    """Return a file's bytes; entries of `header` replace those that follow from the tensors."""
    entries, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(entries | (header or {})).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    dtype: str = "F32",
    shards: int = 1,
    **extra: object,
) -> Path:
    """Write config.json (with `extra` fields) and one file or several shards with an index; integers stay integers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | extra))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    encoded = {
        name: encode(values, "I32" if values.dtype == np.int32 else "F16" if name.endswith(".scales") else dtype)
        for name, values in tensors.items()
    }
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(encoded))
        return folder
    weight_map = {}
    for index in range(shards):
        shard = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: encoded[name] for name in list(encoded)[index::shards]}
        (folder / shard).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
