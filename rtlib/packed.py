"""The packed form on disk: a folder whose one safetensors file is mapped as it is, so that loading takes no time.

rtlib.json says the version of the format, the group size and a checksum of every tensor; config.json is that of a
Hugging Face folder, and tokenizer files are copied beside it.
"""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rtlib.atomic import appearing_folder
from rtlib.config import ModelConfig
from rtlib.errors import CheckpointError, join_problems
from rtlib.fields import REQUIRED, Fields
from rtlib.folder import PACKED_MANIFEST, ModelFolder
from rtlib.layout import FUSED, TensorSpec, compare_tensors, fused_shape
from rtlib.quantise import TABLE_GROUP, Int8Table
from rtlib.scheme import GROUPS
from rtlib.tensorfile import TensorFile, write_tensors
from rtlib.weights import LayerWeights, Linear, ModelWeights

WEIGHTS = "rtlib.safetensors"
VERSION = 1
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE",
)
_NORM_FIELDS = ("input_norm", "post_norm")
_FP16_EXPONENTS = np.uint32(0x7C00), np.uint32(0x7C00_0000)  # all ones: NaN or infinite, in the low and the high half


def is_packed(folder: str | Path) -> bool:
    """Tell whether a folder holds the packed form."""
    return (Path(folder) / PACKED_MANIFEST).is_file()


def save(weights: ModelWeights, folder: str | Path, source: ModelFolder | None = None, overwrite: bool = False) -> Path:
    """Write the packed form and return its path; tokenizer files and generation config are copied from `source`.

    The folder appears whole or not at all: it is written beside its place, synced, and renamed. A folder that is not
    empty is refused, except that `overwrite` replaces one in the packed form. Raises CheckpointError, for a full disk
    among others.
    """
    target = Path(folder).expanduser().absolute()
    _check_target(target, overwrite)
    tensors = _flatten(weights)
    manifest = {
        "format": "rtlib packed INT4",
        "version": VERSION,
        "group": weights.group,
        "crc32": {name: _checksum(values) for name, values in tensors.items()},
    }
    try:
        with appearing_folder(target, replace=overwrite) as partial:
            write_tensors(partial / WEIGHTS, tensors)
            _write_json(partial / "config.json", weights.config.to_dict())
            for name in COPIED:
                if source is not None and source.has(name):
                    shutil.copyfile(source.file(name), partial / name)
            _write_json(partial / PACKED_MANIFEST, manifest)
    except OSError as error:
        raise CheckpointError(f"{target}: not written, {_explain(error, tensors)}") from None
    return target


def load(folder: str | Path, verify: bool = False) -> ModelWeights:
    """Return the weights of a folder in the packed form as read-only views of the mapped file.

    Shapes, dtypes and the numbers of scales and zero points are always checked; `verify` reads everything and compares
    the checksums too. Raises CheckpointError and ConfigError.
    """
    place = ModelFolder(Path(folder).expanduser().resolve())
    group, checksums = _read_manifest(place)
    config = ModelConfig.from_dict(place.json("config.json"), place.path / "config.json")
    file = TensorFile.open(place.file(WEIGHTS))
    problems = compare_tensors(_specs(config, group), file.entries)
    if problems:
        raise CheckpointError(join_problems(file.path, problems))
    tensors = {name: file.view(name) for name in file.entries}
    problems = [problem for name, values in tensors.items() if (problem := _find_bad_values(name, values))]
    if problems:
        raise CheckpointError(join_problems(file.path, problems))
    if verify:
        _verify(file.path, tensors, checksums)
    return _rebuild(config, group, tensors)


def _flatten(weights: ModelWeights) -> dict[str, np.ndarray]:
    """Return every array by the name it has in the file."""
    tensors = {
        "embedding.codes": weights.embedding.codes,
        "embedding.scales": weights.embedding.scales,
        "final_norm": weights.final_norm,
    }
    linears = {"head": weights.head}
    for index, layer in enumerate(weights.layers):
        for name in _NORM_FIELDS:
            tensors[f"layers.{index}.{name}"] = getattr(layer, name)
        linears |= {f"layers.{index}.{name}": getattr(layer, name) for name in FUSED}
    for prefix, linear in linears.items():
        parts = {
            "codes": linear.codes,
            "scales_zeros": linear.scales_zeros,
            "bias": linear.bias,
            "input_order": linear.input_order,
        }
        tensors |= {f"{prefix}.{part}": values for part, values in parts.items() if values is not None}
    return tensors


def _rebuild(config: ModelConfig, group: int, tensors: dict[str, np.ndarray]) -> ModelWeights:
    """Return the weights that _flatten took apart."""

    def linear(prefix: str) -> Linear:
        codes, scales_zeros = tensors[f"{prefix}.codes"], tensors[f"{prefix}.scales_zeros"]
        return Linear(codes, scales_zeros, group, tensors.get(f"{prefix}.bias"), tensors.get(f"{prefix}.input_order"))

    def layer(index: int) -> LayerWeights:
        norms = {name: tensors[f"layers.{index}.{name}"] for name in _NORM_FIELDS}
        return LayerWeights(**norms, **{name: linear(f"layers.{index}.{name}") for name in FUSED})

    return ModelWeights(
        config=config,
        group=group,
        embedding=Int8Table(tensors["embedding.codes"], tensors["embedding.scales"]),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=tensors["final_norm"],
        head=linear("head"),
    )


def _specs(config: ModelConfig, group: int) -> dict[str, TensorSpec]:
    """Return what each tensor of the file must look like."""
    vocab, hidden = config.vocab_size, config.hidden_size
    specs = {
        "embedding.codes": TensorSpec((vocab, hidden), ("I8",)),
        "embedding.scales": TensorSpec((vocab, hidden // TABLE_GROUP), ("F16",)),
        "final_norm": TensorSpec((hidden,), ("F32",)),
    }
    shapes = {"head": (vocab, hidden)}
    for index in range(config.num_layers):
        specs |= {f"layers.{index}.{name}": TensorSpec((hidden,), ("F32",)) for name in _NORM_FIELDS}
        shapes |= {f"layers.{index}.{name}": fused_shape(config, name) for name in FUSED}
    for prefix, (outputs, inputs) in shapes.items():
        specs[f"{prefix}.codes"] = TensorSpec((outputs, inputs // 8), ("U32",))
        specs[f"{prefix}.scales_zeros"] = TensorSpec((outputs, inputs // group), ("U32",))
        specs[f"{prefix}.input_order"] = TensorSpec((inputs,), ("I32",), optional=True)
        if prefix.endswith(".qkv") and config.attention_bias:
            specs[f"{prefix}.bias"] = TensorSpec((outputs,), ("F32",))
    return specs


def _read_manifest(place: ModelFolder) -> tuple[int, dict[str, Any]]:
    """Return the group size and the checksums."""
    where = place.path / PACKED_MANIFEST
    fields = Fields(place.json(PACKED_MANIFEST))
    version, group = fields.integer("version", REQUIRED), fields.integer("group", REQUIRED)
    if version is not None and version != VERSION:
        raise CheckpointError(
            f"{where}: version {version} of the packed form, expected {VERSION}; make the folder again"
        )
    if group is not None and group not in GROUPS:
        fields.refuse("group", group, f"one of {GROUPS}")
    checksums = fields.raw.get("crc32")
    if not isinstance(checksums, dict):
        fields.refuse("crc32", checksums, "an object")
    if fields.problems:
        raise CheckpointError(join_problems(where, fields.problems))
    return group, checksums


def _find_bad_values(name: str, values: np.ndarray) -> str | None:
    """Say what is wrong with the values of a tensor that a kernel could not survive."""
    if name.endswith(".input_order"):
        valid = np.array_equal(np.sort(values), np.arange(len(values)))
        return None if valid else f"{name} is not an order of the {len(values)} inputs"
    if values.dtype.kind == "f":
        finite = np.isfinite(values).all()
    else:
        halves = _FP16_EXPONENTS if name.endswith(".scales_zeros") else ()
        finite = not any(((values & exponent) == exponent).any() for exponent in halves)
    return None if finite else f"{name} holds NaN or infinite numbers"


def _checksum(values: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(values).data)


def _verify(path: Path, tensors: dict[str, np.ndarray], checksums: dict[str, Any]) -> None:
    """Compare every tensor's checksum with the manifest's."""
    wrong = [name for name, values in tensors.items() if _checksum(values) != checksums.get(name)]
    if wrong:
        raise CheckpointError(f"{path}: the checksum differs in {', '.join(wrong)}; make the folder again")


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a place that holds something, unless it is the packed form and may be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: a file is in the way; choose another name")
    if not is_packed(target):
        raise CheckpointError(f"{target}: not empty and not in the packed form; choose an empty or a new folder")
    if not overwrite:
        raise CheckpointError(f"{target}: already there; allow overwriting, or choose a new folder")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _explain(error: OSError, tensors: dict[str, np.ndarray]) -> str:
    """Say in a line why writing failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = sum(values.nbytes for values in tensors.values()) / 1e9
        return f"the disk is full: {needed:.2f} GB are needed; free some, or choose another disk"
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return "another process has put a folder there meanwhile; use that one, or choose a new folder"
    return f"{error.strerror or error}"
