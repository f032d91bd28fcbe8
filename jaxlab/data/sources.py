"""Documents by index: from text, JSON lines, tables, Hugging Face data sets and `python-docs`.

A source has a length, and `source[i]` is a document: a `str`, or a chat as a list of
`{"role": ..., "content": ...}`. Files are read where a document lies, never whole: text and JSON
lines through an index of offsets, tables through Arrow memory maps. Reading is thread-safe.
"""

import bisect
import difflib
import gzip
import hashlib
import itertools
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from jaxlab.data import python_docs
from jaxlab.data.config import DataConfig
from jaxlab.errors import DataError, StorageError

Document = str | list[dict]
Split = Literal["train", "validation"]

# A text file that names no document separator is one document up to this size; a larger one is cut
# into documents of at most this size at its blank lines (or line ends), so that no machine has to
# tokenise a whole corpus as one piece.
MAX_TEXT_BYTES = 1 << 20
# Below this many documents a held-out share of whole documents would be coarse, so each document's
# end is held out instead.
MIN_DOCUMENTS_TO_SPLIT = 100

_TABLES = (".parquet",)
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
_TEXTS = (".txt", ".md")
_VALIDATION_SPLITS = ("validation", "valid", "dev")


class Source(Protocol):
    """Random access to documents."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def describe(self, index: int) -> str:
        """Where document `index` lies, for messages: 'notes.jsonl line 12'."""
        ...


def open_split(config: DataConfig, split: Split) -> Source:
    """The documents of one split of `config`'s data, in a fixed order.

    Without `validation_source`, a data set's own validation split is used if it has one; the rest
    holds out `validation_fraction`: whole documents by a hash of their index (of their name in
    `python-docs`), or, from a text source of fewer than 100 documents, the end of each document
    from a line's end onwards. Validation documents come in hash order, so the first batches are a
    fair sample; training documents in the source's order.

    Raises:
      DataError: a source is missing, empty or malformed, or nothing is left for `split`.
    """
    if split not in ("train", "validation"):
        raise DataError(f"split {split!r} does not exist: it is 'train' or 'validation'")
    if config.validation_source is not None:
        spec = config.source if split == "train" else config.validation_source
        source = _concatenated([_open(name, config, None)[0] for name in _names(spec)])
    else:
        parts = [_open(name, config, split) for name in _names(config.source)]
        source = _concatenated(
            [
                part if is_split else _hold_out(part, split, config.validation_fraction)
                for part, is_split in parts
            ]
        )
    if len(source) == 0:
        names = ", ".join(_names(config.source))
        if split == "validation" and config.validation_source is None:
            raise DataError(
                f"no document of {names} is held out for validation at validation_fraction="
                f"{config.validation_fraction}: raise it, or set data.validation_source"
            )
        raise DataError(f"{names} holds no documents for {split}: the data set is empty")
    return source


def _names(spec: str | tuple[str, ...]) -> tuple[str, ...]:
    return (spec,) if isinstance(spec, str) else spec


def _open(name: str, config: DataConfig, split: Split | None) -> tuple[Source, bool]:
    """Opens one named source, and says whether what came back is already just `split`."""
    if name == "python-docs":
        return PythonDocs(), False
    if name.startswith("hf:"):
        return _open_dataset(_load_from_hub(name), name, config, split)
    path = Path(name).expanduser()
    if path.is_dir():
        if _is_saved_dataset(path):
            return _open_dataset(_load_from_disk(path), name, config, split)
        return _open_directory(path, config), False
    if path.exists():
        return _open_files([path], config), False
    if _looks_like_dataset_id(name, path):
        return _open_dataset(_load_from_hub(name), name, config, split)
    raise DataError(f"{name}: no such file or directory{_nearest(path)}{_hub_hint(name)}")


def _nearest(path: Path) -> str:
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        siblings = []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    if near:
        return f"; did you mean {path.parent / near[0]}?"
    if difflib.get_close_matches(path.name, ["python-docs"], n=1):
        return "; did you mean python-docs?"
    return ""


def _hub_hint(name: str) -> str:
    if Path(name).suffix or name.startswith(("/", ".", "~")):
        return ""
    return f" (a data set on the Hugging Face hub is named hf:{name})"


def _looks_like_dataset_id(name: str, path: Path) -> bool:
    """Whether a name that is no local path can only mean `owner/name` on the hub."""
    if name.startswith(("/", ".", "~")) or path.name.endswith((*_TABLES, *_LINES, *_TEXTS)):
        return False
    identifier = name.split(":")[0]
    return identifier.count("/") == 1 and not Path(identifier).parent.exists()


# --- files -----------------------------------------------------------------------------------


def _open_directory(path: Path, config: DataConfig) -> Source:
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name.endswith((*_TABLES, *_LINES, *_TEXTS))
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise DataError(
            f"{path}: the directory holds no {', '.join((*_TEXTS, *_LINES, *_TABLES))} file and "
            "was not written by datasets.save_to_disk"
        )
    return _open_files(files, config)


def _open_files(files: Sequence[Path], config: DataConfig) -> Source:
    """One source over files of any of the known kinds, in the given order within each kind."""
    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty (0 bytes); remove it or write it again")
    sources: list[Source] = []
    tables = [file for file in files if file.name.endswith(_TABLES)]
    for file in files:
        if file.name.endswith(_LINES):
            sources.append(JsonLines(file, config.text_field, config.messages_field))
        elif file.name.endswith(_TEXTS):
            sources.append(TextFile(file, config.document_separator))
        elif file not in tables:
            raise DataError(
                f"{file}: unknown kind of file; jaxlab reads "
                f"{', '.join((*_TEXTS, *_LINES, *_TABLES))}. Rename plain text to .txt"
            )
    if tables:
        name = str(tables[0]) if len(tables) == 1 else f"{tables[0]} … {tables[-1].name}"
        sources.append(_table(_load_parquet(tables), name, config))
    return _concatenated(sources)


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
        except ValueError as error:
            raise DataError(
                f"{self.describe(index)} is not JSON ({error}): {line[:60]!r}. "
                "Each line of the file has to be one JSON object"
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{self.describe(index)} is a JSON {type(record).__name__}, not an object with "
                f"a field {self._fields[0]!r} or {self._fields[1]!r}"
            )
        return _document(record, *self._fields, self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._path} line {self._lines[index] + 1}"


def _line_spans(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of where each line starts and ends (before its newline), int64 each."""
    ends, position = [], 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            ends.append(newlines.astype(np.int64) + position)
            position += len(block)
    ends = np.concatenate([*ends, [position]])
    return np.concatenate([[0], ends[:-1] + 1]), ends


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
    directory = python_docs.cache_directory() / "unpacked"
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


def _document(record: dict, text_field: str, messages_field: str, where: str) -> Document:
    """The text or the chat of a record, checked."""
    if record.get(text_field) is not None:
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(
                f"{where}: field {text_field!r} is a {type(text).__name__}, not a string"
            )
        return text
    messages = record.get(messages_field)
    if messages is None:
        raise DataError(_no_field(where, text_field, messages_field, list(record)))
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field {messages_field!r} is not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: each message needs a 'role' and a 'content', but one is {message!r:.80}"
            )
    return messages


def _no_field(where: str, text_field: str, messages_field: str, found: list[str]) -> str:
    return (
        f"{where} has neither a field {text_field!r} nor {messages_field!r}; it has "
        f"{', '.join(map(repr, found)) or 'none'}. Set data.text_field to the one with the text"
    )


# --- tables and Hugging Face data sets ---------------------------------------------------------


class Table:
    """Rows of a `datasets.Dataset` (memory-mapped Arrow) with a text or a messages column."""

    def __init__(self, dataset, name: str, text_field: str, messages_field: str):
        columns = [c for c in (text_field, messages_field) if c in dataset.column_names]
        if not columns:
            raise DataError(_no_field(name, text_field, messages_field, dataset.column_names))
        self._dataset = dataset.select_columns(columns)
        self._name = name
        self._fields = (text_field, messages_field)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Document:
        return _document(self._dataset[int(index)], *self._fields, self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._name} row {index}"


def _table(dataset, name: str, config: DataConfig) -> Table:
    return Table(dataset, name, config.text_field, config.messages_field)


def _open_dataset(
    loaded, name: str, config: DataConfig, split: Split | None
) -> tuple[Source, bool]:
    """The rows of a Dataset or DatasetDict, and whether the data set made the split itself."""
    if not isinstance(loaded, dict):
        return _table(loaded, name, config), False
    held_out = next((key for key in _VALIDATION_SPLITS if key in loaded), None)
    if split == "validation" and held_out:
        return _table(loaded[held_out], f"{name}:{held_out}", config), True
    if "train" in loaded:
        return _table(loaded["train"], f"{name}:train", config), split is not None and bool(
            held_out
        )
    if len(loaded) == 1:
        (key,) = loaded
        return _table(loaded[key], f"{name}:{key}", config), False
    raise DataError(
        f"{name} has no split 'train'; it has {', '.join(map(repr, loaded))}. "
        "Name one: hf:ID:CONFIG:SPLIT"
    )


def _load_from_hub(name: str):
    import datasets

    identifier, _, rest = name.removeprefix("hf:").partition(":")
    configuration, _, split = rest.partition(":")
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(identifier, configuration or None, split=split or None)
    except Exception as error:  # datasets raises nearly everything, from OSError to ValueError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{name}: the Hugging Face data set {identifier!r} could not be loaded "
            f"({type(error).__name__}: {reason:.200}). Check its name, configuration and split, "
            "and the connection; or save it on a machine that has one with "
            "datasets.save_to_disk, and give the directory"
        ) from error


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


def _load_from_disk(path: Path):
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"{path}: datasets.load_from_disk failed ({type(error).__name__}: {error}). "
            "The directory is incomplete: save it again"
        ) from error


def _load_parquet(files: Sequence[Path]):
    """Converts parquet files, once, to the memory-mapped Arrow cache of `datasets`.

    Parquet's row groups can only be decoded whole, which a shuffled reader can't afford.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            "parquet", data_files={"train": [str(file) for file in files]}, split="train"
        )
    except Exception as error:
        cause = error.__cause__ or error
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise DataError(
            f"{files[0]}{more}: not readable as parquet ({type(cause).__name__}: "
            f"{cause!s:.200}); fetch or write it again"
        ) from error


# --- the embedded corpus -----------------------------------------------------------------------


class PythonDocs:
    """The `python-docs` corpus; see `jaxlab.data.python_docs`."""

    def __init__(self):
        self._documents = python_docs.documents()
        self.names = [name for name, _ in self._documents]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str:
        return self._documents[index][1]

    def describe(self, index: int) -> str:
        return f"python-docs {self.names[index]}"


# --- combining and splitting -------------------------------------------------------------------


class Concatenated:
    """Sources one after the other."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._ends = list(itertools.accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Document:
        source, index = self._locate(index)
        return source[index]

    def describe(self, index: int) -> str:
        source, index = self._locate(index)
        return source.describe(index)

    def _locate(self, index: int) -> tuple[Source, int]:
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which], index - (self._ends[which - 1] if which else 0)


def _concatenated(sources: Sequence[Source]) -> Source:
    return sources[0] if len(sources) == 1 else Concatenated(sources)


class Selected:
    """Some documents of a source, in the order of `indices` (int64)."""

    def __init__(self, source: Source, indices: np.ndarray):
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Document:
        return self._source[int(self._indices[index])]

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._indices[index]))


class TextPart:
    """Each text's beginning, or its last `fraction`; the cut lies at the end of a line."""

    def __init__(self, source: Source, fraction: float, split: Split):
        self._source = source
        self._fraction = fraction
        self._split = split

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> str:
        text = self._source[index]
        cut = round(len(text) * (1 - self._fraction))
        for mark in ("\n", " "):
            if (found := text.find(mark, cut)) >= 0 and found + 1 < len(text):
                cut = found + 1
                break
        return text[:cut] if self._split == "train" else text[cut:]

    def describe(self, index: int) -> str:
        side = "beginning" if self._split == "train" else "end"
        return f"{self._source.describe(index)} ({side})"


def _hold_out(source: Source, split: Split, fraction: float) -> Source:
    """The part of `source` that belongs to `split` when `fraction` is held out for validation."""
    if fraction == 0.0:
        return source if split == "train" else Selected(source, np.empty(0, np.int64))
    if isinstance(source, PythonDocs):
        order = python_docs.validation_order(source.names)
        held_out = [i for i in order if python_docs.is_validation(source.names[i], fraction)]
        if split == "validation":
            return Selected(source, np.asarray(held_out, np.int64))
        return Selected(source, np.setdiff1d(np.arange(len(source)), held_out))
    count = len(source)
    if count < MIN_DOCUMENTS_TO_SPLIT and all(isinstance(source[i], str) for i in range(count)):
        return TextPart(source, fraction, split)
    held_out_count = min(max(1, round(fraction * count)), count - 1)
    order = np.argsort(_mixed(np.arange(count, dtype=np.uint64)), kind="stable")
    held_out = order[:held_out_count]
    if split == "validation":
        return Selected(source, held_out)
    return Selected(source, np.setdiff1d(np.arange(count), held_out))


def _mixed(index: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a fixed hash of 64-bit integers."""
    with np.errstate(over="ignore"):
        z = index + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
