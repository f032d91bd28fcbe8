"""What a run records: metrics.jsonl, TensorBoard, the loss curve, and how busy the chips were."""

import json
import math
from typing import Any

import jax
from etils import epath

from jaxlab.errors import StorageError
from jaxlab.models import AnyModelConfig
from jaxlab.models.cost import cost_of

# Peak bfloat16 operations per second of one device (dense), by the start of jax's `device_kind`.
# Makers' published figures; the longest name that fits counts.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA B200": 2250e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Operations per second that the device can do at best, or None if it is not in the table."""
    fitting = [kind for kind in PEAK_FLOPS if device.device_kind.startswith(kind)]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def train_flops_per_token(model: AnyModelConfig, params: Any, sequence_length: int) -> float:
    """Operations of a forward and a backward pass for one token, without rematerialisation.

    Six for each parameter that multiplies (PaLM, arXiv:2204.02311, appendix B), and three times
    those by which attention, less what a mask leaves out, or an xLSTM's cells mix tokens forward.
    """
    multiplied = sum(leaf.size for leaf in jax.tree.leaves(params))
    if not model.tie_word_embeddings:  # a look-up multiplies nothing
        multiplied -= model.vocab_size * model.hidden_size
    mixing = cost_of(model).mixing_flops(model, sequence_length, sequence_length)
    return 6.0 * multiplied + 3.0 * mixing / sequence_length


class MetricsWriter:
    """Appends records to `metrics.jsonl`, one JSON object a line, and TensorBoard events.

    Args:
      directory: of the run.
      start_step: the step resumed from. Records of later steps, which the resumed run will write
        again, are cut off.
      tensorboard: also write events to `directory/tensorboard`.
    """

    def __init__(self, directory: epath.Path, *, start_step: int = 0, tensorboard: bool = False):
        self._path = directory / "metrics.jsonl"
        self._remote = "://" in str(directory)
        self.records = [r for r in read_metrics(directory) if r["step"] <= start_step]
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        try:
            # Replaced as a whole: a crash here must not lose the run's history.
            replacement = directory / "metrics.jsonl.new"
            replacement.write_text(text)
            replacement.replace(self._path)
            self._file = None if self._remote else open(self._path, "a", encoding="utf-8")  # noqa: PTH123, SIM115
        except OSError as error:
            raise _storage_error(self._path, error) from error
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            # Steps that will come again are hidden by TensorBoard from here on.
            purge = start_step + 1 if start_step else None
            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def write(self, record: dict[str, float]) -> None:
        """Append a record; it has a `step`.

        Raises:
          StorageError: the disk is full.
        """
        self.records.append(record)
        try:
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()
            else:  # object stores cannot append
                self._path.write_text("".join(json.dumps(r) + "\n" for r in self.records))
            if self._events is not None:
                for name, value in record.items():
                    if name != "step" and isinstance(value, (int, float)):
                        self._events.add_scalar(name, value, record["step"])
        except OSError as error:
            raise _storage_error(self._path, error) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(directory: epath.PathLike) -> list[dict[str, float]]:
    """The records of a run's `metrics.jsonl`; a last line cut short by a crash is left out."""
    path = epath.Path(directory) / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        records.append(record)
    return records


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def draw_loss_curve(
    records: list[dict[str, float]],
    path: epath.PathLike,
    *,
    title: str,
    unigram: float | None = None,
) -> None:
    """Draw training and validation loss over steps as a PNG.

    Args:
      records: of `metrics.jsonl`.
      unigram: entropy of a unigram model, drawn as a line to get below.
    """
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [(r["step"], r["cross_entropy"]) for r in records if "cross_entropy" in r]
    validated = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    if trained:
        axes.plot(*zip(*trained, strict=True), linewidth=1, label="training")
    if validated:
        last = validated[-1][1]
        axes.plot(*zip(*validated, strict=True), marker="o", label=f"validation ({last:.3f})")
    if unigram is not None:
        axes.axhline(unigram, color="gray", linestyle="--", label=f"unigram model ({unigram:.3f})")
    axes.set(xlabel="step", ylabel="cross-entropy [nats per token]", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    try:
        epath.Path(path).write_bytes(buffer.getvalue())
    except OSError as error:
        raise _storage_error(path, error) from error


def _storage_error(path: Any, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror or error}. Free space, then resume")
