"""Safetensors files: checked before they are trusted, read through a memory map.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, without gaps.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxlab.errors import CheckpointError, StorageError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The reference implementation's limit.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and byte range (from the start of the file) of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One open file. `entries` maps names to `TensorEntry`; `tensor(name)` is a view of the map.

    `metadata` is what the header says besides, unchecked.

    Raises:
      CheckpointError: the file is not a complete, well-formed safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.entries, self.metadata = _read_header(file, size, self.path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error

    def tensor(self, name: str) -> np.ndarray:
        """A read-only array over the file's pages; nothing is read until it is used."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // dtype.itemsize
        return np.frombuffer(self._map, dtype, count, entry.begin).reshape(entry.shape)

    def release_pages(self) -> None:
        """Let the kernel drop the pages read so far; it can read them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(
    file: BinaryIO, size: int, path: Path
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    remedy = "the download or copy is incomplete or damaged: fetch the file again"
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, too few for a safetensors file: {remedy}")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: the header is said to be {length} bytes long, but the file has {size} "
            f"(and headers end at {_MAX_HEADER_BYTES}): {remedy}"
        )
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not valid JSON ({error}): {remedy}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object: {remedy}")
    metadata = header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    entries = {
        name: _entry(name, value, 8 + length, data_bytes, path) for name, value in header.items()
    }
    _check_contiguous(entries, 8 + length, size, path)
    return entries, metadata if isinstance(metadata, dict) else {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a name appears twice")
    return keys


def _entry(name: str, value: Any, data_start: int, data_bytes: int, path: Path) -> TensorEntry:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: tensor {name!r} {what}: the file is damaged, fetch it again"
        )

    def whole(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 0

    if not isinstance(value, dict):
        raise fail(f"is described by {value!r:.80}, not by an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if dtype not in DTYPES:
        raise fail(f"has the unknown type {dtype!r:.40} (known: {', '.join(DTYPES)})")
    if not (isinstance(shape, list) and len(shape) <= 32 and all(map(whole, shape))):
        raise fail(f"has the impossible shape {shape!r:.80}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(whole, offsets))):
        raise fail(f"has the impossible offsets {offsets!r:.80}")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise fail(
            f"lies at bytes {begin} to {end} of the data, but the file holds {data_bytes} "
            "bytes of data"
        )
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise fail(f"of shape {shape} and type {dtype} cannot be {end - begin} bytes long")
    return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def _check_contiguous(entries: dict[str, TensorEntry], start: int, size: int, path: Path) -> None:
    position, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            relation = "overlaps with" if entry.begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} {relation} {previous}: the file is damaged, "
                "fetch it again"
            )
        position, previous = entry.end, f"tensor {name!r}"
    if position != size:
        raise CheckpointError(
            f"{path}: {size - position} bytes follow {previous}, which should end the file: "
            "the file is damaged, fetch it again"
        )


def dtype_name(dtype: Any) -> str:
    """The format's name of a numpy type, `"BF16"` for bfloat16."""
    return _DTYPE_NAMES[np.dtype(dtype)]


def header_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: Any) -> bytes:
    """Length prefix and header of a file that holds `tensors`, all of one type, in this order."""
    return _header([(name, shape, np.dtype(dtype)) for name, shape in tensors], {"format": "pt"})


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write a file of its own in one step: an interrupted or failed write leaves the old one.

    Raises:
      StorageError: the disk is full, or the place cannot be written.
    """
    path = Path(path)
    # The widest types first: every tensor is then aligned to its type.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header = _header([(name, array.shape, array.dtype) for name, array in ordered], metadata)
    staging = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as file:
            file.write(header)
            for _, array in ordered:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. Choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or could not be made
            staging.unlink()


def _header(
    tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], metadata: dict[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, shape, dtype in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # keeps the data aligned for memory maps
    return len(text).to_bytes(8, "little") + text
