"""Documents by index: from text, JSON lines, tables, Hugging Face data sets and `python-docs`.

A source has a length, and `source[i]` is a document: a `str`, or a chat as a list of
`{"role": ..., "content": ...}`. Files are read where a document lies, never whole: text and JSON
lines through an index of offsets, tables through Arrow memory maps. Reading is thread-safe.
"""

import bisect
import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxlab.data import python_docs
from jaxlab.data.config import DataConfig
from jaxlab.data.documents import Document, Source, Split
from jaxlab.data.tables import (
    is_saved_dataset,
    load_from_disk,
    load_from_hub,
    load_parquet,
    open_dataset,
    table,
)
from jaxlab.data.text_files import JsonLines, TextFile
from jaxlab.errors import DataError

# Below this many documents a held-out share of whole documents would be coarse, so each document's
# end is held out instead.
MIN_DOCUMENTS_TO_SPLIT = 100

_TABLES = (".parquet",)
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
_TEXTS = (".txt", ".md")


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
        return open_dataset(load_from_hub(name), name, config, split)
    path = Path(name).expanduser()
    if path.is_dir():
        if is_saved_dataset(path):
            return open_dataset(load_from_disk(path), name, config, split)
        return _open_directory(path, config), False
    if path.exists():
        return _open_files([path], config), False
    if _looks_like_dataset_id(name, path):
        return open_dataset(load_from_hub(name), name, config, split)
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
        sources.append(table(load_parquet(tables), name, config))
    return _concatenated(sources)


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
        assert isinstance(text, str)  # _hold_out looked
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
        held_out = np.asarray(
            [i for i in order if python_docs.is_validation(source.names[i], fraction)], np.int64
        )
    else:
        count = len(source)
        if count < MIN_DOCUMENTS_TO_SPLIT and all(isinstance(source[i], str) for i in range(count)):
            return TextPart(source, fraction, split)
        hashes = _mixed(np.arange(count, dtype=np.uint64))
        size = min(max(1, round(fraction * count)), count - 1)
        held_out = np.argpartition(hashes, size)[:size] if size else np.empty(0, np.int64)
        held_out = held_out[np.argsort(hashes[held_out])]
    if split == "validation":
        return Selected(source, held_out)
    kept = np.ones(len(source), bool)
    kept[held_out] = False
    return Selected(source, np.flatnonzero(kept))


def _mixed(index: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a fixed hash of 64-bit integers."""
    with np.errstate(over="ignore"):
        z = index + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
