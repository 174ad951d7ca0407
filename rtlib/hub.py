"""Finding a model's folder: a path, or an id looked up in the local Hugging Face cache, never on the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rtlib.errors import CheckpointError
from rtlib.folder import ModelFolder

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*")


def find_folder(source: str | Path, revision: str = "main") -> ModelFolder:
    """Return the folder of a model given as a path or as a Hugging Face id ("Org/Name").

    Raises CheckpointError when it is neither a folder here nor a model of the cache.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return ModelFolder(path.resolve())
    if path.exists():
        raise CheckpointError(f"{path}: a file, expected a model folder; pass the folder that holds it")
    if not _ID.fullmatch(str(source)) or ".." in str(source):
        raise CheckpointError(f"{source}: no such folder; pass a model folder or a Hugging Face id such as Org/Name")
    return ModelFolder(_find_snapshot(str(source), revision))


def cache_folder() -> Path:
    """Return the Hugging Face cache: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path.home() / ".cache" / "huggingface" / "hub"


def _find_snapshot(model_id: str, revision: str) -> Path:
    """Return the snapshot of a cached model that a branch, tag or commit names."""
    cached = cache_folder() / f"models--{model_id.replace('/', '--')}"
    advice = f"fetch it with `hf download {model_id}`, or pass a folder"
    if not cached.is_dir():
        raise CheckpointError(f"{model_id}: no such folder, and no such model in the cache {cached.parent}; {advice}")
    if not _REVISION.fullmatch(revision):
        raise CheckpointError(f"{model_id}: the revision {revision!r} is not a branch, tag or commit name")
    ref = cached / "refs" / revision
    commit = ref.read_text(encoding="utf-8", errors="replace").strip() if ref.is_file() else revision
    snapshot = cached / "snapshots" / commit
    if not _REVISION.fullmatch(commit) or not snapshot.is_dir():
        raise CheckpointError(
            f"{model_id}: the cache has no snapshot {commit[:60]!r} of revision {revision!r}; {advice}"
        )
    return snapshot.resolve()
