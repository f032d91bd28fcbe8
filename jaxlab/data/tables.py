"""Documents in tables: parquet files and Hugging Face data sets, memory-mapped as Arrow."""

from collections.abc import Sequence
from pathlib import Path

from jaxlab.data.config import DataConfig
from jaxlab.data.documents import Document, Source, Split, document_of, no_field_message
from jaxlab.errors import DataError

_VALIDATION_SPLITS = ("validation", "valid", "dev")


class Table:
    """Rows of a `datasets.Dataset` (memory-mapped Arrow) with a text or a messages column."""

    def __init__(self, dataset, name: str, text_field: str, messages_field: str):
        columns = [c for c in (text_field, messages_field) if c in dataset.column_names]
        if not columns:
            raise DataError(
                no_field_message(name, text_field, messages_field, dataset.column_names)
            )
        if not len(dataset):
            raise DataError(_no_rows(name))
        self._dataset = dataset.select_columns(columns)
        self._name = name
        self._fields = (text_field, messages_field)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Document:
        return document_of(self._dataset[int(index)], *self._fields, self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._name} row {index}"


def _no_rows(name: str) -> str:
    return f"{name} is empty, it has no rows: write it again, or leave it out"


def table(dataset, name: str, config: DataConfig) -> Table:
    return Table(dataset, name, config.text_field, config.messages_field)


def open_dataset(loaded, name: str, config: DataConfig, split: Split | None) -> tuple[Source, bool]:
    """The rows of a Dataset or DatasetDict, and whether the data set made the split itself."""
    if not isinstance(loaded, dict):
        return table(loaded, name, config), False
    held_out = next((key for key in _VALIDATION_SPLITS if key in loaded), None)
    if split == "validation" and held_out:
        return table(loaded[held_out], f"{name}:{held_out}", config), True
    if "train" in loaded:
        return table(loaded["train"], f"{name}:train", config), split is not None and bool(held_out)
    if len(loaded) == 1:
        (key,) = loaded
        return table(loaded[key], f"{name}:{key}", config), False
    raise DataError(
        f"{name} has no split 'train'; it has {', '.join(map(repr, loaded))}. "
        "Name one: hf:ID:CONFIG:SPLIT"
    )


def load_from_hub(name: str):
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


def is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


def load_from_disk(path: Path):
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"{path}: datasets.load_from_disk failed ({type(error).__name__}: {error}). "
            "The directory is incomplete: save it again"
        ) from error


def load_parquet(files: Sequence[Path]):
    """Converts parquet files, once, to the memory-mapped Arrow cache of `datasets`.

    Parquet's row groups can only be decoded whole, which a shuffled reader can't afford.
    """
    import datasets
    import pyarrow.parquet

    datasets.disable_progress_bars()
    try:
        # `datasets` cannot read a file of no rows, and does not say that this is why.
        empty = next((f for f in files if not pyarrow.parquet.read_metadata(f).num_rows), None)
        if empty is not None:
            raise DataError(_no_rows(str(empty)))
        return datasets.load_dataset(
            "parquet", data_files={"train": [str(file) for file in files]}, split="train"
        )
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise DataError(
            f"{files[0]}{more}: not readable as parquet ({type(cause).__name__}: "
            f"{cause!s:.200}); fetch or write it again"
        ) from error
