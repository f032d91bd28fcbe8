"""What a training run tells whoever is watching."""

from typing import Any


class Reporter:
    """Hooks that `fit` calls, in process 0 only. This one is silent; subclass what you want.

    Hooks run between steps, so they should return quickly.
    """

    def on_start(self, info: dict[str, Any]) -> None:
        """Before the first step.

        `info` has `name`, `output_dir` (str), `devices` (str), `mesh` (axis sizes), `start_step`,
        `steps`, `num_parameters`, `num_trainable`, `params_bytes`, `optimizer_bytes`,
        `batch_size` (of the next step), `sequence_length` and `resumed` (bool).
        """

    def on_compile(self, seconds: float) -> None:
        """After the train step was compiled: at the start, and for each size of a batch ramp."""

    def on_step(self, metrics: dict[str, float]) -> None:
        """After each step, one step late: `step` (from 1), `loss`, `grad_norm`, `learning_rate`,
        `tokens_per_second`, `step_seconds`, … the record of metrics.jsonl."""

    def on_eval(self, metrics: dict[str, float]) -> None:
        """After a validation: `step`, `validation_loss`, `validation_perplexity`."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint was begun; it is on disk once the next one begins or the run ends."""

    def on_message(self, text: str) -> None:
        """Something worth knowing: a resumed run, a damaged checkpoint that was passed over, …"""

    def on_end(self, result: Any) -> None:
        """After everything was written; `result` is a `FitResult`."""
