"""Reading a Hugging Face model folder: config, sharded safetensors, and every tensor checked against the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtlib.config import ModelConfig
from rtlib.errors import CheckpointError, join_problems
from rtlib.folder import PACKED_MANIFEST, ModelFolder
from rtlib.hub import find_folder
from rtlib.layout import EMBEDDING, HEAD, compare_tensors, expected_tensors
from rtlib.scheme import QuantScheme, read_scheme
from rtlib.tensorfile import TensorEntry, TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = {"F32": np.float32, "F16": np.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder whose tensors are read one at a time; `scheme` is None unless it holds AWQ or GPTQ words.

    `generation` is generation_config.json's object, or an empty one.
    """

    folder: ModelFolder
    config: ModelConfig
    generation: dict[str, Any]
    scheme: QuantScheme | None
    files: dict[str, TensorFile]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a folder, or a Hugging Face id found in the local cache, and check names, shapes and dtypes.

        Raises ConfigError for the config and CheckpointError for files and tensors, each with all that was found.
        """
        folder = find_folder(source)
        raw = folder.json("config.json")
        config = ModelConfig.from_dict(raw, folder.path / "config.json")
        scheme = read_scheme(raw, folder.path / "config.json")
        files = _open_files(folder)
        entries = {name: file.entries[name] for name, file in files.items()}
        problems = compare_tensors(expected_tensors(config, scheme, files.keys()), entries)
        if problems:
            raise CheckpointError(join_problems(folder.path, problems))
        return cls(folder, config, folder.optional_json("generation_config.json"), scheme, files)

    @property
    def names(self) -> list[str]:
        """Return the tensors' names, sorted."""
        return sorted(self.files)

    @property
    def head_name(self) -> str:
        """Return the tensor that the head is made of: the embedding table when they are tied."""
        return EMBEDDING if self.config.tie_embeddings else HEAD

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's dtype, shape and place; raises CheckpointError when there is no such tensor."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder.path}: tensor {name} is missing")
        return self.files[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self.entry(name).shape

    def tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a float tensor, or some of its rows, as float32; only that part is read.

        Raises CheckpointError for a dtype that is no float and for NaN or Inf, naming the tensor.
        """
        dtype = self.entry(name).dtype
        values = self.raw(name, rows)
        if dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        elif dtype in _FLOATS:
            values = values.astype(np.float32, copy=False)
        else:
            raise CheckpointError(f"{self.folder.path}: tensor {name} has dtype {dtype}, expected BF16, F16 or F32")
        bad = values.size - np.count_nonzero(np.isfinite(values))
        if bad:
            raise CheckpointError(f"{self.folder.path}: tensor {name} holds {bad} values that are NaN or infinite")
        return values

    def raw(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, in its own dtype; bfloat16 comes as uint16."""
        self.entry(name)
        return self.files[name].read(name, rows)


def _open_files(folder: ModelFolder) -> dict[str, TensorFile]:
    """Return the file of each tensor, from one file or from an index and its shards."""
    if folder.has(SINGLE_FILE):
        file = TensorFile.open(folder.file(SINGLE_FILE))
        return dict.fromkeys(file.entries, file)
    if folder.has(INDEX_FILE):
        return _open_shards(folder)
    raise CheckpointError(f"{folder.path}: {_missing_weights(folder)}")


def _missing_weights(folder: ModelFolder) -> str:
    """Say what stands in the folder in place of the weights that are read."""
    if folder.has(PACKED_MANIFEST):
        return "already in the packed form; give the checkpoint that it was made from"
    if pickled := folder.names(".bin") + folder.names(".pt") + folder.names(".pth"):
        return (
            f"only pickled weights ({pickled[0]}), which are never opened because they can run code; "
            "convert them with transformers: from_pretrained, then save_pretrained(safe_serialization=True)"
        )
    if shards := folder.names(".safetensors"):
        return f"found {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the whole model folder"
    return f"no weights: expected {SINGLE_FILE} or {INDEX_FILE}; fetch the whole model folder"


def _open_shards(folder: ModelFolder) -> dict[str, TensorFile]:
    """Open every shard that the index names and check that index and shards agree on what lies where."""
    where = folder.path / INDEX_FILE
    index = folder.json(INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise CheckpointError(f"{where}: weight_map is missing or not a map from tensor names to file names")
    shards, problems = {}, []
    for shard in sorted(set(index.values())):
        try:
            shards[shard] = TensorFile.open(folder.file(shard))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(join_problems(where, problems))
    problems = _index_problems(index, shards)
    if problems:
        raise CheckpointError(join_problems(where, problems))
    return {name: shards[shard] for name, shard in index.items()}


def _index_problems(index: dict[str, str], shards: dict[str, TensorFile]) -> list[str]:
    """List the tensors that are not where the index says, or that lie in a shard the index does not name for them."""
    holders: dict[str, list[str]] = {}
    for shard, file in shards.items():
        for name in file.entries:
            holders.setdefault(name, []).append(shard)
    problems = []
    for name in sorted(index.keys() | holders.keys()):
        found = holders.get(name, [])
        if len(found) > 1:
            problems.append(f"{name} lies in both {' and '.join(found)}")
        elif [index.get(name)] != found:
            problems.append(f"{name} is in {found[0] if found else 'no shard'}, the index says {index.get(name)}")
    return problems
