"""What a run reads: the `data:` section of an experiment."""

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxlab.data.batch_ramp import size_at

_Positive = Annotated[int, Field(ge=1)]


class DataConfig(BaseModel):
    """Where documents come from and how they become batches.

    Sizes are in tokens (`sequence_length`) and rows (`batch_size`, over all processes). The order
    of the data is a function of this config and the experiment's seed alone: not of the number of
    processes, nor of `num_workers` or `prefetch`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str | tuple[str, ...] = Field(
        "python-docs",
        description="What to read: 'python-docs', a .txt, .jsonl (also .gz, .zst) or .parquet "
        "file, a directory of these or of datasets.save_to_disk, a Hugging Face dataset as "
        "'hf:ID', 'hf:ID:CONFIG' or 'hf:ID:CONFIG:SPLIT', or a list of these.",
    )
    validation_source: str | tuple[str, ...] | None = Field(
        None,
        description="What to validate on, in the same forms. Without it, validation_fraction of "
        "the source is held out (or the data set's own validation split is used if it has one).",
    )
    validation_fraction: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="Share of the documents held out for validation, chosen by a hash. A text "
        "source of fewer than 100 documents gives up the end of each document instead.",
    )
    text_field: str = Field(
        "text", description="Field of a .jsonl line, or column of a table, that holds the text."
    )
    messages_field: str = Field(
        "messages",
        description="Field that holds a chat (a list of {role, content}); read where text_field "
        "is absent.",
    )
    document_separator: str | None = Field(
        None,
        min_length=1,
        description="Text between two documents of a .txt file, such as '<|endoftext|>' or a "
        "blank line. Without it a file is one document.",
    )
    sequence_length: int = Field(512, ge=2, description="Tokens in a row.")
    batch_size: int = Field(8, ge=1, description="Rows in a batch, over all processes.")
    batch_ramp: tuple[tuple[_Positive, _Positive], ...] | None = Field(
        None,
        description="Smaller batches at the start of training, as pairs of rows and steps: "
        "[[128, 2000], [256, 2000]] is 128 rows for 2,000 steps, 256 for 2,000, and batch_size "
        "from then on. null: batch_size all along.",
    )
    packing: bool = Field(
        True,
        description="Fill each row with documents, one after the other, told apart by segment "
        "ids. Without it each row holds one document (or a piece of a long one), padded.",
    )
    shuffle: bool = Field(
        True, description="Read the training documents in a new random order every epoch."
    )
    shuffle_rows: int | None = Field(
        None,
        ge=1,
        description="Rows that are shuffled together after packing, so that the rows of a long "
        "document do not follow each other. Without it as many as hold 262,144 tokens, at most "
        "1,024.",
    )
    loss_on: Literal["assistant", "all"] = Field(
        "assistant",
        description="Tokens of a chat that are learned: the assistant's turns, or all. Text is "
        "always learned whole.",
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="Threads that read and tokenise ahead; 0 tokenises in the prefetch thread.",
    )
    prefetch: int = Field(
        2, ge=0, description="Batches prepared ahead in a thread; 0 prepares each when asked."
    )

    @field_validator("source", "validation_source")
    @classmethod
    def _not_empty(cls, value):
        names = (value,) if isinstance(value, str) else value
        if names is not None and (not names or not all(name.strip() for name in names)):
            raise ValueError("names no data: give a file, a directory, a data set or 'python-docs'")
        return value

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        sizes = self.batch_sizes
        for size, following in itertools.pairwise(sizes):
            if size >= following:
                raise ValueError(
                    f"batch_ramp {[list(pair) for pair in self.batch_ramp or ()]} has {size} rows "
                    f"before {following}, and batch_size is {self.batch_size}: let it rise to "
                    "batch_size, or set batch_ramp to null"
                )
        return self

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of the batches of training, rising: those of the ramp, and `batch_size`."""
        return (*(size for size, _ in self.batch_ramp or ()), self.batch_size)

    def batch_size_at(self, step: int) -> int:
        """Rows of the training batch that comes after `step` others."""
        return size_at(self.batch_ramp or (), self.batch_size, step)
