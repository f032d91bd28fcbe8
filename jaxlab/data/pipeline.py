"""The grain pipeline: documents → tokens → packed rows → shuffled rows → batches of this process.

Every process packs the same global sequence of rows and yields its share of each batch. So batch i
is the same whatever the number of processes, the position in the data (`get_state`) is one for all
of them, and a run resumes on another number of processes where it stopped. The price is that each
process tokenises everything: `num_workers` threads of a fast tokenizer make some million tokens a
second, and a process needs `batch_size * sequence_length` of them a step.
"""

import atexit
import weakref

import grain
import numpy as np

from jaxlab.data.batch_ramp import RampedBatchIterDataset
from jaxlab.data.config import DataConfig
from jaxlab.data.documents import Source, Split
from jaxlab.data.packing import encode_document, finish_rows, row_origin, split_document
from jaxlab.data.sources import open_split
from jaxlab.errors import DataError

# What decides the order and the content of the rows, so what a saved position depends on.
_IDENTITY = (
    "source",
    "validation_source",
    "validation_fraction",
    "text_field",
    "messages_field",
    "document_separator",
    "sequence_length",
    "batch_size",
    "batch_ramp",
    "packing",
    "shuffle",
    "shuffle_rows",
    "loss_on",
)
# What is shuffled together where `shuffle_rows` is not given: the first batch waits for it.
_SHUFFLED_TOKENS = 1 << 18
_SHUFFLED_ROWS = 1 << 10


def make_pipeline(
    config: DataConfig,
    tokenizer,
    *,
    split: Split,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> "DataPipeline":
    """The batches of one split for one process.

    Args:
      config: where the data is and its sizes; `config.batch_size` counts the rows of all processes,
        and so do the sizes of `config.batch_ramp`, by which "train" begins.
      tokenizer: a `jaxlab.data.Tokenizer`.
      split: "train": endless, documents reshuffled every epoch, rows shuffled in windows.
        "validation": one pass in a fixed order; rows of padding (segment 0, loss mask 0) complete
        the last batch.
      seed: of the shuffle.
      process_index, process_count: which contiguous share of each batch's rows to yield: the
        batches of all processes, concatenated in order, are the batch of a single process.

    Returns:
      A `DataPipeline`; see `jaxlab.data.packing.finish_rows` for what a batch holds.

    Raises:
      DataError: the data is missing, empty or malformed, or process_count does not divide
        batch_size or a size of batch_ramp.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index {process_index} is not below process_count {process_count}"
        )
    for size in config.batch_sizes if split == "train" else (config.batch_size,):
        if size % process_count:
            low = size // process_count * process_count
            near = f"{low} or {low + process_count}" if low else str(process_count)
            name = "batch_size" if size == config.batch_size else "batch_ramp"
            raise DataError(
                f"data.{name} {size} can't be divided among {process_count} processes; {near} can"
            )
    source = open_split(config, split)
    return DataPipeline(
        _dataset(config, tokenizer, source, split, seed, process_index, process_count),
        source,
        identity={
            "split": split,
            "seed": seed,
            "documents": len(source),
            "vocab_size": int(tokenizer.vocab_size),
            **{key: value for key, value in config.model_dump().items() if key in _IDENTITY},
        },
    )


class DataPipeline:
    """An iterator of batches whose position can be saved and restored exactly.

    A batch is a dictionary of numpy arrays `[batch_size / process_count, sequence_length]`
    (`row_ids` has no second axis), smaller ones while a ramp lasts; see
    `jaxlab.data.packing.finish_rows`.
    """

    def __init__(self, dataset: grain.IterDataset, source: Source, identity: dict):
        self._iterator = iter(dataset)
        self._source = source
        self._identity = _json_like(identity)
        self._start = self.get_state()
        _open_pipelines.add(self)

    def __iter__(self) -> "DataPipeline":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def get_state(self) -> dict:
        """The position after the last batch yielded, as a small JSON-able dictionary.

        It does not depend on the process or the number of processes. Batches prefetched but not
        yet yielded are not counted.
        """
        return {
            "version": 1,
            "data": self._identity,
            "position": _json_like(self._iterator.get_state()),
        }

    def set_state(self, state: dict) -> None:
        """Continues from a saved position: the next batches are those that would have followed.

        Raises:
          DataError: the position was saved with other data, another seed, or other sizes.
        """
        if state.get("version") != 1:
            raise DataError(
                f"the saved data position has version {state.get('version')!r}, not 1: it was "
                "written by another version of jaxlab; start from step 0 or use that version"
            )
        for key, now in self._identity.items():
            saved = state["data"].get(key)
            if saved != now:
                raise DataError(
                    f"the saved data position is of a run with {key} {saved!r}, now {now!r}: "
                    "the data can't be continued. Restore the old value, or start a new run in "
                    "another output directory"
                )
        self._iterator.set_state(_tuples(state["position"]))

    def reset(self) -> None:
        """Goes back to the first batch."""
        self.set_state(self._start)

    def describe_row(self, row_id: int | np.integer) -> str:
        """Where a row of a batch begins, from its entry in `row_ids`."""
        if row_id < 0:
            return "padding"
        document, offset = row_origin(row_id)
        return f"{self._source.describe(document)}, token {offset}"

    def close(self) -> None:
        """Stops the prefetch threads; the pipeline can't be used afterwards. Twice is harmless."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


# grain's iterators complain when the interpreter takes their modules away before them.
_open_pipelines: weakref.WeakSet[DataPipeline] = weakref.WeakSet()


@atexit.register
def _close_pipelines() -> None:
    for pipeline in list(_open_pipelines):
        pipeline.close()


def _dataset(
    config: DataConfig,
    tokenizer,
    source: Source,
    split: Split,
    seed: int,
    process_index: int,
    process_count: int,
) -> grain.IterDataset:
    document_seed, row_seed = (
        int(word) for word in np.random.SeedSequence(seed).generate_state(2, np.uint32)
    )
    shuffle = config.shuffle and split == "train"

    def encode(index: int) -> dict[str, np.ndarray] | None:
        rows = encode_document(
            source[index],
            tokenizer,
            index=index,
            loss_on=config.loss_on,
            where=source.describe(index),
        )
        return {"tokens": rows} if len(rows) else None  # grain leaves a None out

    documents = grain.MapDataset.range(len(source))
    if shuffle:
        documents = documents.shuffle(document_seed)
    if split == "train":
        _require_tokens(source, encode)
        documents = documents.repeat()
    documents = documents.map(encode).to_iter_dataset(
        grain.ReadOptions(
            num_threads=config.num_workers, prefetch_buffer_size=8 * config.num_workers
        )
    )
    if config.packing:
        rows = grain.experimental.ConcatThenSplitIterDataset(
            documents, length_struct={"tokens": config.sequence_length}
        )
    else:
        rows = grain.experimental.FlatMapIterDataset(documents, _Pieces(config.sequence_length))
    if shuffle:
        window = config.shuffle_rows or min(
            _SHUFFLED_ROWS, max(1, _SHUFFLED_TOKENS // config.sequence_length)
        )
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=window, seed=row_seed)

    pad_token_id = tokenizer.pad_token_id or 0

    def finish(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Training has no end, so none of its batches is short.
        size = len(batch["tokens"]) if split == "train" else config.batch_size
        share = size // process_count
        first = process_index * share
        mine = {key: value[first : first + share] for key, value in batch.items()}
        missing = share - len(mine["tokens"])
        if missing:
            mine = {
                key: np.concatenate([value, np.zeros((missing, *value.shape[1:]), value.dtype)])
                for key, value in mine.items()
            }
        return finish_rows(
            mine["tokens"],
            mine["tokens_segment_ids"],
            mine["tokens_positions"],
            pad_token_id=pad_token_id,
        )

    if split == "train" and config.batch_ramp:
        batches = RampedBatchIterDataset(rows, config.batch_ramp, config.batch_size)
    else:
        batches = rows.batch(config.batch_size, drop_remainder=False)
    return grain.experimental.ThreadPrefetchIterDataset(
        batches.map(finish), prefetch_buffer_size=config.prefetch
    )


class _Pieces(grain.experimental.FlatMapTransform):
    """Rows of one document each, in the shape the packing gives its rows."""

    max_fan_out = 1 << 30

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        rows = []
        for piece in split_document(element["tokens"], self._length):
            padding = self._length - len(piece)
            filled = np.arange(self._length, dtype=np.int32) < len(piece)
            rows.append(
                {
                    "tokens": np.pad(piece, ((0, padding), (0, 0))),
                    "tokens_segment_ids": filled.astype(np.int32),
                    "tokens_positions": np.arange(self._length, dtype=np.int32) * filled,
                }
            )
        return rows


def _require_tokens(source: Source, encode) -> None:
    """Refuses data in which no document has a token: an endless pipeline would search for ever."""
    if not any(encode(index) is not None for index in range(len(source))):
        raise DataError(
            f"all {len(source)} documents of the training data are empty "
            f"({source.describe(0)} and on); check data.source and data.text_field"
        )


def _json_like(value):
    """The value with lists for tuples, as it is after a trip through JSON."""
    if isinstance(value, dict):
        return {key: _json_like(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_like(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _tuples(value):
    """Tuples for lists: grain compares the slices in a packing's state with tuples."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
