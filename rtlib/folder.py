"""A model's folder: which files it has, and reading its JSON files, without ever leaving it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtlib.errors import CheckpointError

PACKED_MANIFEST = "rtlib.json"  # the file that makes a folder one of our packed form
_JSON_LIMIT = 64 * 2**20  # bytes; the largest index file known is below 1 MiB


@dataclass(frozen=True)
class ModelFolder:
    """A folder with config.json and weights; `path` is absolute, with the folder's own links resolved."""

    path: Path

    def has(self, name: str) -> bool:
        """Tell whether a file of that name exists (a broken link does not)."""
        return (self.path / name).is_file()

    def file(self, name: str) -> Path:
        """Return the path of a file that lies in the folder.

        Raises CheckpointError for a name with a directory in it, a missing file, and a link that leads out of the
        folder; the links of a Hugging Face snapshot lead into `blobs` of the same cached model, which is allowed.
        """
        if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(f"{self.path}: the file name {name!r} is not a plain name; nothing outside is read")
        path = self.path / name
        if not path.is_file():
            raise CheckpointError(f"{self.path}: {name} is missing; fetch the whole model folder")
        target = path.resolve()
        if target.parent not in (self.path, self._blobs()):
            raise CheckpointError(f"{path}: a link to {target}, outside the model folder; put the file itself there")
        return path

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; raises CheckpointError when it is missing or not one JSON object."""
        path = self.file(name)
        try:
            if path.stat().st_size > _JSON_LIMIT:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes, expected {_JSON_LIMIT} at most")
            text = path.read_text(encoding="utf-8")
            if text.startswith("version https://git-lfs"):
                raise CheckpointError(f"{path}: a Git-LFS pointer; run `git lfs pull` in its folder")
            value = json.loads(text)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON ({error}); fetch it again") from None
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: holds {type(value).__name__}, expected a JSON object")
        return value

    def optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or an empty one where there is no such file."""
        return self.json(name) if self.has(name) else {}

    def names(self, suffix: str) -> list[str]:
        """Return the sorted names of the files that end with `suffix`."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(suffix) and entry.is_file())

    def _blobs(self) -> Path | None:
        """Return where the links of a cached snapshot lead: models--Org--Name/{snapshots/REVISION -> blobs}."""
        is_snapshot = self.path.parent.name == "snapshots" and self.path.parents[1].name.startswith("models--")
        return self.path.parents[1] / "blobs" if is_snapshot else None
