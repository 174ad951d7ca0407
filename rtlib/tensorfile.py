"""One safetensors file: its header checked before anything is trusted, its tensors read by copy or mapped in place.

Layout (safetensors' format description): 8 bytes of header length, little endian; a JSON object that gives each tensor
a dtype, a shape and two offsets into what follows; then the tensors without gaps. Nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtlib.errors import CheckpointError
from rtlib.progress import progress

# BF16 has no NumPy dtype: its two bytes are read as uint16. Names without a NumPy dtype that fits are only sized.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip
_NAMES_OF_DTYPES = {np.dtype(NUMPY_DTYPES[name]): name for name in ("I8", "U8", "F16", "I32", "U32", "F32")}
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own bound
_RANK_LIMIT = 8
_ALIGNMENT = 64  # the first tensor starts at a cache line, so that mapped rows do too
_LFS_PREFIX = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: dtype as safetensors names it, shape, and bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of one safetensors file by name."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        """Take a checked header; use open()."""
        self.path = path
        self.entries = entries
        self._map: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read and check the header, no tensor.

        Raises CheckpointError for a missing file, a Git-LFS pointer, and a header or size that does not add up.
        """
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(len(_LFS_PREFIX))
                _check_start(path, start, size)
                length = int.from_bytes(start[:8], "little")
                if length > min(size - 8, _HEADER_LIMIT):
                    raise CheckpointError(
                        f"{path}: the header claims {length} bytes in a file of {size}: "
                        "not a safetensors file, or one that is cut short; fetch it again"
                    )
                file.seek(8)
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the folder's files") from None
        return cls(path, _parse_header(path, header, size))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a copy of a tensor, or of some consecutive rows of it, without mapping the file.

        Pages of a mapped file count as memory of the process; reading keeps the peak at one tensor.
        """
        entry = self.entries[name]
        dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
        if not entry.shape:
            return np.fromfile(self.path, dtype, 1, offset=entry.begin).reshape(())
        start, stop, _ = rows.indices(entry.shape[0])
        shape = (max(stop - start, 0), *entry.shape[1:])
        count = math.prod(shape)
        offset = entry.begin + start * math.prod(shape[1:]) * dtype.itemsize
        values = np.fromfile(self.path, dtype, count, offset=offset) if count else np.empty(0, dtype)
        if values.size != count:
            raise CheckpointError(f"{self.path}: tensor {name} ended early; the file changed while it was read")
        return values.reshape(shape)

    def view(self, name: str) -> np.ndarray:
        """Return a read-only view of a tensor inside the mapped file: nothing is copied, pages load when touched."""
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entry = self.entries[name]
        dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
        return np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.begin).reshape(entry.shape)


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file and wait until it is on the disk; wider dtypes come first so that all are aligned.

    Served dtypes: int8, uint8, float16, int32, uint32, float32. Raises OSError, a full disk among others.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for name, values in ordered:
        dtype = _NAMES_OF_DTYPES[values.dtype]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in progress(ordered, "writing", unit="tensor"):
            file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())


def _check_start(path: Path, start: bytes, size: int) -> None:
    """Refuse what is no safetensors file at first sight."""
    if start.startswith(_LFS_PREFIX):
        raise CheckpointError(f"{path}: a Git-LFS pointer, not the file itself; run `git lfs pull` in its folder")
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes, a safetensors file has 8 at least; fetch it again")


def _parse_header(path: Path, header: bytes, size: int) -> dict[str, TensorEntry]:
    """Return the entries of a header that describes the rest of the file exactly."""
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); fetch it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the header is {type(raw).__name__}, expected an object; fetch it again")
    base = 8 + len(header)
    entries = {name: _parse_entry(path, name, value, base) for name, value in raw.items() if name != "__metadata__"}
    _check_cover(path, entries, base, size)
    return entries


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing a key that occurs twice: readers disagree on which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name!r} occurs twice")
    return result


def _parse_entry(path: Path, name: str, raw: Any, base: int) -> TensorEntry:
    """Return one tensor's entry with its offsets counted from the file's start."""
    fields = raw if isinstance(raw, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype!r}, expected one of {', '.join(NUMPY_DTYPES)}")
    if not _is_sizes(shape) or len(shape) > _RANK_LIMIT:
        raise CheckpointError(f"{path}: tensor {name} has shape {shape!r}, expected up to {_RANK_LIMIT} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name} has offsets {offsets!r}, expected a begin and an end")
    expected = math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {dtype} takes {expected} bytes, "
            f"its offsets {offsets} give it {offsets[1] - offsets[0]}; fetch it again"
        )
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_sizes(value: Any) -> bool:
    """Tell whether a JSON value is a list of integers that fit a file offset."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(path: Path, entries: dict[str, TensorEntry], base: int, size: int) -> None:
    """Check that the tensors follow each other without gap or overlap and end where the file ends."""
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            relation = "overlaps the one before it" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name} {relation}; the header is damaged, fetch the file again")
        position = entry.end
    if position > size:
        raise CheckpointError(f"{path}: cut short, {size} bytes where the header describes {position}; fetch it again")
    if position < size:
        raise CheckpointError(
            f"{path}: {size - position} trailing bytes that the header does not describe; fetch it again"
        )
