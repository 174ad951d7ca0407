"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Give an empty folder beside `target` that takes its place when the block ends well.

    What the block wrote is synced to the disk first. With `replace` a folder that `target` holds by then is removed;
    without, one that is not empty is an error. After any failure, an interrupt included, what was written is removed
    and `target` is as before. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    replaced = partial.with_name(f"{partial.name}-replaced")
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.chmod(0o755)  # mkdtemp makes it private
        if replace and target.exists():
            target.rename(replaced)
        partial.rename(target)
        _sync(target.parent)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
