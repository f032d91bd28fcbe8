"""Batches that grow as a run goes on."""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np


class RampedBatchIterDataset(grain.IterDataset):
    """Stacks the rows of an endless data set by a schedule of batch sizes.

    Args:
      rows: dictionaries of numpy arrays, without end.
      ramp: `(size, batches)`, in order: so many batches of that size.
      size: rows of every batch after them.
    """

    def __init__(self, rows: grain.IterDataset, ramp: Sequence[tuple[int, int]], size: int):
        super().__init__(rows)
        self._ramp, self._size = tuple(ramp), size

    def __iter__(self) -> "_RampedBatches":
        return _RampedBatches(iter(self._parent), self._ramp, self._size)


class _RampedBatches(grain.DatasetIterator):
    """Its state is that of the rows and the number of batches made."""

    def __init__(self, rows: grain.DatasetIterator, ramp: Sequence[tuple[int, int]], size: int):
        super().__init__(rows)
        self._ramp, self._size, self._made = ramp, size, 0

    def __next__(self) -> dict[str, np.ndarray]:
        size = size_at(self._ramp, self._size, self._made)
        rows = [next(self._parent) for _ in range(size)]
        self._made += 1
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def get_state(self) -> dict[str, Any]:
        return {"rows": self._parent.get_state(), "batches": self._made}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["rows"])
        self._made = state["batches"]


def size_at(ramp: Sequence[tuple[int, int]], size: int, index: int) -> int:
    """Rows of the batch with an index, from 0: by the `(size, batches)` of a ramp, then `size`."""
    for ramped, batches in ramp:
        if index < batches:
            return ramped
        index -= batches
    return size
