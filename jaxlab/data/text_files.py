"""Documents in text files and in JSON lines, read where they lie through an index of offsets."""

import gzip
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from jaxlab.data.documents import Document, document_of
from jaxlab.data.model_source import cache_directory
from jaxlab.errors import DataError, StorageError

# A text file that names no document separator is one document up to this size; a larger one is cut
# into documents of at most this size at its blank lines (or line ends), so that no machine has to
# tokenise a whole corpus as one piece.
MAX_TEXT_BYTES = 1 << 20


class TextFile:
    """A UTF-8 text file: one document, or as many as `separator` divides it into.

    A document that is white space only is left out. A file above `MAX_TEXT_BYTES` without a
    separator is cut at blank lines, or line ends, into documents of at most that size.
    """

    def __init__(self, path: Path, separator: str | None = None):
        self._path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        spans = self._separated(separator.encode()) if separator else self._sections()
        kept = [(start, end) for start, end in spans if self._map[start:end].strip()]
        if not kept:
            raise DataError(f"{path}: the file holds only white space")
        self._spans = np.asarray(kept, np.int64)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> str:
        start, end = (int(offset) for offset in self._spans[index])
        text = _decode(self._map[start:end], self._path, start)
        return text.removeprefix("\ufeff") if start == 0 else text

    def describe(self, index: int) -> str:
        start, end = self._spans[index]
        return f"{self._path} bytes {start}-{end}"

    def _separated(self, separator: bytes):
        start = 0
        while (end := self._map.find(separator, start)) >= 0:
            yield start, end
            start = end + len(separator)
        yield start, len(self._map)

    def _sections(self):
        start, size = 0, len(self._map)
        while size - start > MAX_TEXT_BYTES:
            limit = start + MAX_TEXT_BYTES
            for mark in (b"\n\n", b"\n", b" "):
                # Not in the first half: a lone early blank line must not make tiny documents.
                if (found := self._map.rfind(mark, start + MAX_TEXT_BYTES // 2, limit)) >= 0:
                    end = found + len(mark)
                    break
            else:
                end = limit
                while end > start and self._map[end] & 0xC0 == 0x80:  # inside a character
                    end -= 1
                end = end if end > start else limit
            yield start, end
            start = end
        yield start, size


class JsonLines:
    """One JSON object a line, each with a text or a chat; `.gz` and `.zst` are unpacked first.

    Compressed files can't be read from the middle, so they are unpacked once into the cache
    directory. Blank lines are left out.
    """

    def __init__(self, path: Path, text_field: str = "text", messages_field: str = "messages"):
        self._path = path
        self._fields = (text_field, messages_field)
        readable = _unpacked(path) if path.suffix in (".gz", ".zst") else path
        self._file = readable.open("rb")
        starts, ends = _line_spans(readable)
        self._lines = np.flatnonzero(ends - starts > 1)  # more than a carriage return
        self._starts, self._ends = starts[self._lines], ends[self._lines]
        if not len(self._starts):
            raise DataError(f"{path}: the file holds no lines")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Document:
        start, end = int(self._starts[index]), int(self._ends[index])
        line = _decode(os.pread(self._file.fileno(), end - start, start), self._path, start)
        try:
            record = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # the latter: brackets a thousand deep
            raise DataError(
                f"{self.describe(index)} is not JSON ({error}): {line[:60]!r}. "
                "Each line of the file has to be one JSON object"
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{self.describe(index)} is a JSON {type(record).__name__}, not an object with "
                f"a field {self._fields[0]!r} or {self._fields[1]!r}"
            )
        return document_of(record, *self._fields, self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._path} line {self._lines[index] + 1}"


def _line_spans(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of where each line starts and ends (before its newline), int64 each."""
    newlines, position = [], 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            found = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            newlines.append(found.astype(np.int64) + position)
            position += len(block)
    ends = np.concatenate([*newlines, np.asarray([position])])
    return np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]), ends


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8. "
            f"Convert the file, for example: iconv -f latin1 -t utf-8 {path} > utf8.txt"
        ) from None


def _unpacked(path: Path) -> Path:
    """The unpacked copy of a compressed file, made once and kept in the cache directory."""
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    directory = cache_directory() / "unpacked"
    target = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{path.stem}"
    if target.exists():
        return target
    temporary = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as unpacked:
            temporary = Path(unpacked.name)
            with _decompressing(path) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        temporary.replace(target)
    except (gzip.BadGzipFile, EOFError, UnicodeError) as error:
        raise DataError(f"{path}: the file is damaged ({error}); fetch or write it again") from None
    except OSError as error:
        if "compress" in str(error).lower():  # how pyarrow reports damaged zstd data
            raise DataError(f"{path}: the file is damaged ({error}); write it again") from None
        raise StorageError(
            f"{path} could not be unpacked into {directory} ({error}): make room there, or set "
            "JAXLAB_CACHE to a directory that has some"
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return target


def _decompressing(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
