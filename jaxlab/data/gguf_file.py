"""GGUF files: metadata and tensor table, every length and offset checked before it is used.

The layout is llama.cpp's (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts,
key-value pairs, tensor descriptions, then aligned tensor data. Package `gguf` gives the types and
dequantises; its reader trusts the lengths in a file, so it is not used.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxlab.errors import CheckpointError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
      shape: in numpy's order, slowest dimension first (the file has the reverse).
      type: quantisation type.
      begin, end: byte range in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    begin: int
    end: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
      metadata: key -> int, float, bool, str, or a list of those.
      tensors: name -> `GGUFTensor`.

    Raises:
      CheckpointError: the file is not a complete, well-formed GGUF file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < 24:
                    raise CheckpointError(
                        f"{self.path} is too short for a GGUF file: {_Cursor.remedy}"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error
        cursor = _Cursor(self._map, self.path)
        _check_magic(cursor)
        num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = _read_metadata(cursor, num_pairs)
        self.tensors = _read_tensor_table(cursor, num_tensors, self.metadata)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path} is one part of a model split over "
                f"{self.metadata['split.count']} files: "
                "join them first, with llama.cpp's `llama-gguf-split --merge FIRST OUTPUT`"
            )

    def tensor(self, name: str) -> np.ndarray:
        """The tensor's values: a view of the file if F32, F16 or F64, else dequantised float32."""
        entry = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, entry.end - entry.begin, entry.begin)
        plain = {
            gguf.GGMLQuantizationType.F32: np.float32,
            gguf.GGMLQuantizationType.F16: np.float16,
            gguf.GGMLQuantizationType.F64: np.float64,
        }.get(entry.type)
        if plain is not None:
            return raw.view(plain).reshape(entry.shape)
        row_bytes = (entry.end - entry.begin) // max(1, math.prod(entry.shape[:-1]))
        try:
            values = gguf.dequantize(raw.reshape(-1, row_bytes), entry.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {entry.type.name}, which package "
                "gguf cannot "
                "dequantise: use a file in another quantisation (Q8_0, Q4_K_M, F16, …)"
            ) from error
        return values.reshape(entry.shape)

    def release_pages(self) -> None:
        """Let the kernel drop the pages read so far; it can read them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class _Cursor:
    """Reads little-endian values in order, never past the end."""

    remedy = "the download or copy is incomplete or damaged, fetch the file again"

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path = data, path
        self.position, self.size = 0, len(data)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} (at byte {self.position}): {self.remedy}")

    def require(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.position} are left")

    def scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self.require(width, "a number")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += width
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.require(length, "a string")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"a string is not UTF-8 ({error.reason})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 2:
            raise self.fail(f"unknown value type {kind}")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[item_kind])
            self.require(count * width, "an array")
            values = struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", self.data, self.position)
            self.position += count * width
            return list(values)
        # A string is at least its length field, an array its type and length.
        self.require(count * 8, "an array")
        return [self.value(item_kind, depth + 1) for _ in range(count)]


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file (it begins with {magic!r}): "
            "give a .gguf file or a Hugging Face directory"
        )
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        what = "big-endian" if version & 0xFFFF == 0 else f"of GGUF version {version}"
        raise CheckpointError(
            f"{cursor.path} is {what}; supported are little-endian files of versions 2 and 3: "
            "convert the model again with a current llama.cpp"
        )


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    cursor.require(
        count * 13, f"a table of {count} metadata keys"
    )  # length, type, one byte of value
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _read_tensor_table(
    cursor: _Cursor, count: int, metadata: dict[str, Any]
) -> dict[str, GGUFTensor]:
    cursor.require(count * 24, f"a table of {count} tensors")
    described = [_read_description(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in described:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if offset % alignment or (shape and shape[-1] % block):
            raise cursor.fail(
                f"tensor {name!r} of shape {shape} at offset {offset} does not fit type {kind.name}"
            )
        begin = start + offset
        end = begin + math.prod(shape) // block * block_bytes
        if end > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: tensor {name!r} ends at byte {end}, the file has {cursor.size}: "
                f"{cursor.remedy}"
            )
        tensors[name] = GGUFTensor(name, shape, kind, begin, end)
    _check_disjoint(cursor, tensors)
    return tensors


def _read_description(
    cursor: _Cursor,
) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    code, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = gguf.GGMLQuantizationType(code)
    except ValueError as error:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has the unknown quantisation type {code}: "
            "upgrade package gguf, or use a file in another quantisation (Q8_0, Q4_K_M, F16, …)"
        ) from error
    return name, shape, kind, offset


def _check_disjoint(cursor: _Cursor, tensors: dict[str, GGUFTensor]) -> None:
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda entry: entry.begin):
        if previous is not None and tensor.begin < previous.end:
            raise cursor.fail(f"tensors {previous.name!r} and {tensor.name!r} overlap")
        previous = tensor
