"""Checkpoints of a training run: everything needed to go on to the same bits.

A checkpoint is a directory `checkpoints/STEP` with three items: `params`, `state` (step, optimizer,
random key, moving average) and `run` (JSON: position in the data, configuration). Orbax writes it
in the background and renames it into place when it is whole.
"""

import contextlib
import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxlab.errors import CheckpointError, StorageError
from jaxlab.training.step import TrainState

_LOSS = "validation_loss"


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: the state, the position in the data, the metrics."""

    step: int
    state: TrainState
    data_state: Any
    model: dict[str, Any]


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    Args:
      directory: holds one directory a checkpoint; made if need be.
      keep: latest checkpoints to keep, besides the one of lowest validation loss.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 2):
        self.directory = epath.Path(directory)
        # Orbax tells its every step to the log, and warns of defaults that are meant.
        logging.getLogger("absl").setLevel(logging.ERROR)
        with _storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            # Orbax refuses relative paths; messages keep the one the user gave.
            absolute = self.directory.resolve() if _is_local(self.directory) else self.directory
            self._manager = ocp.CheckpointManager(
                absolute,
                item_handlers={
                    "params": ocp.StandardCheckpointHandler(),
                    "state": ocp.StandardCheckpointHandler(),
                    "run": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy(
                        [
                            LatestN(keep),
                            BestN(
                                get_metric_fn=lambda metrics: metrics[_LOSS],
                                reverse=True,
                                n=1,
                                keep_checkpoints_without_metrics=False,
                            ),
                        ]
                    ),
                    best_fn=lambda metrics: metrics[_LOSS],
                    best_mode="min",
                    cleanup_tmp_directories=True,
                    enable_async_checkpointing=True,
                ),
            )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, in ascending order."""
        return sorted(self._manager.all_steps())

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The checkpoint of lowest validation loss, if any was validated."""
        with contextlib.suppress(ValueError, KeyError):
            return self._manager.best_step()
        return None

    def path(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def save(
        self,
        state: TrainState,
        *,
        data_state: Any,
        model: dict[str, Any],
        config: dict[str, Any],
        validation_loss: float | None = None,
    ) -> int:
        """Begin to save; returns when the state may be overwritten, with its step.

        Waits for the save before, and raises what went wrong with it.

        Raises:
          StorageError: the disk is full or not writable. Earlier checkpoints are as they were.
        """
        step = int(state.step)
        if jax.default_backend() == "cpu":
            # The writer reads CPU arrays in place, and the train step will reuse their memory.
            state = jax.tree.map(jnp.copy, state)
        params, rest = _items(state)
        run = {"data_state": data_state, "model": model, "config": config}
        with self._saving():
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                return step
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    state=ocp.args.StandardSave(rest),
                    run=ocp.args.JsonSave(run),
                ),
                metrics=None if validation_loss is None else {_LOSS: float(validation_loss)},
                force=True,
            )
        return step

    def wait(self) -> None:
        """Return when all is on disk.

        Raises:
          StorageError: as `save`.
        """
        with self._saving():
            self._manager.wait_until_finished()

    def restore(
        self,
        state: TrainState,
        *,
        model: dict[str, Any] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Restored | None:
        """The last checkpoint that can be read, or None if there is none.

        Args:
          state: shapes, types and shardings (`jax.ShapeDtypeStruct`s) that the result shall have;
            the mesh may be another than the one it was saved from.
          model: the model's configuration, compared with the saved one.
          tell: is told of checkpoints that were passed over because they are damaged.

        Raises:
          CheckpointError: the checkpoint is of another model or optimizer (names the parameter),
            or all are damaged.
        """
        damaged = []
        for step in reversed(self.steps):
            try:
                run = self._manager.restore(
                    step, args=ocp.args.Composite(run=ocp.args.JsonRestore())
                )
                run = run["run"]
                shapes = self._manager.item_metadata(step)
                saved = {name: shapes[name].tree for name in ("params", "state")}
            except Exception as error:
                damaged.append(f"{self.path(step)} ({_first_line(error)})")
                tell(f"checkpoint {damaged[-1]} is damaged; trying the one before")
                continue
            if model is not None:
                _check_model(self.path(step), run["model"], model)
            params, rest = _items(state)
            _check_shapes(self.path(step), saved["params"], params)
            _check_shapes(self.path(step), saved["state"], rest)
            try:
                items = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        params=ocp.args.StandardRestore(params),
                        state=ocp.args.StandardRestore(rest),
                    ),
                )
            except Exception as error:
                damaged.append(f"{self.path(step)} ({_first_line(error)})")
                tell(f"checkpoint {damaged[-1]} is damaged; trying the one before")
                continue
            for bad in [s for s in self.steps if s > step]:
                self._set_aside(bad)
            return Restored(step, _state(state, items), run["data_state"], run["model"])
        if damaged:
            raise CheckpointError(
                f"no checkpoint can be read: {'; '.join(damaged)}. Restore one from a backup, or "
                "start again in another output directory"
            )
        return None

    def restore_params(self, step: int, params: Any) -> Any:
        """The parameters of one checkpoint, with the shapes and shardings of `params`."""
        try:
            return self._manager.restore(
                step, args=ocp.args.Composite(params=ocp.args.StandardRestore(params))
            )["params"]
        except (ValueError, OSError, KeyError) as error:
            raise CheckpointError(
                f"checkpoint {self.path(step)} cannot be read: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        """Wait for what is being written, then let go."""
        with self._saving():
            self._manager.close()

    def _set_aside(self, step: int) -> None:
        """Move a damaged checkpoint out of the way of the one that will be saved at its step."""
        if jax.process_index() == 0:
            with _storage_errors(self.directory):
                target = self.directory / f"damaged-{step}"
                if target.exists():
                    target.rmtree()
                self.path(step).rename(target)
        from jaxlab.training.distributed import meet

        meet(f"set aside {step}")
        self._manager.reload()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """As `_storage_errors`; also removes what a failed save has left behind."""
        try:
            with _storage_errors(self.directory):
                yield
        except StorageError:
            if "://" not in str(self.directory) and jax.process_index() == 0:
                for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):
                    _remove(leftover)
            raise


def _remove(directory: epath.Path) -> None:
    """Remove the rest of a failed save, whose other writes may still come in for a moment."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def _items(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """What is saved of a state: the parameters, and the rest as a dictionary."""
    if isinstance(state.rng, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, state.rng)
        rng = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.rng.sharding)
    else:
        rng = jax.random.key_data(state.rng)
    rest = {"step": state.step, "opt_state": state.opt_state, "rng": rng}
    if state.ema_params is not None:
        rest["ema_params"] = state.ema_params
    return state.params, rest


def _state(like: TrainState, items: Any) -> TrainState:
    rest = items["state"]
    return like.replace(
        step=rest["step"],
        params=items["params"],
        opt_state=rest["opt_state"],
        rng=jax.random.wrap_key_data(rest["rng"]),
        ema_params=rest.get("ema_params"),
    )


# Fields of the model that change how it is computed, but not what its parameters mean.
_FREE_FIELDS = {"dtype", "remat", "attention", "max_position_embeddings"}


def _check_model(path: epath.Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if name not in _FREE_FIELDS and name in saved and saved[name] != value:
            raise CheckpointError(
                f"checkpoint {path} is of a model with {name} {saved[name]!r}, now {value!r}: "
                "restore the old value, or start a new run in another output directory"
            )


def _check_shapes(path: epath.Path, saved: Any, wanted: Any) -> None:
    """Compare by name, so that the message can tell which parameter differs."""
    found, expected = _by_name(saved), _by_name(wanted)
    for name in [*expected, *found]:
        if name not in found:
            fault = f"has no {name}, which the configuration asks for"
        elif name not in expected:
            fault = f"has {name}, which the configuration does not"
        elif tuple(found[name].shape) != tuple(expected[name].shape):
            fault = (
                f"has {name} of shape {list(found[name].shape)}, the configuration asks for "
                f"{list(expected[name].shape)}"
            )
        else:
            continue
        raise CheckpointError(
            f"checkpoint {path} {fault}: it is of another model or optimizer. Restore the old "
            "configuration, or start a new run in another output directory"
        )


def _by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        "/".join(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


@contextlib.contextmanager
def _storage_errors(directory: epath.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (reason := _storage_reason(error)) is None:
            raise
        raise StorageError(
            f"cannot write a checkpoint to {directory}: {reason}. Earlier checkpoints are intact; "
            "make room there, then run again to resume"
        ) from error


def _storage_reason(error: BaseException | None) -> str | None:
    """Why storage failed, if that is what an error (or its cause) is about."""
    while error is not None:
        text = str(error)
        if (
            (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
            or "No space left on device" in text
            or "ENOSPC" in text
        ):
            return "no space left on device"
        if isinstance(error, PermissionError) or "EACCES" in text or "Permission denied" in text:
            return "permission denied"
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            return "read-only file system"
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _is_local(path: epath.Path) -> bool:
    return "://" not in str(path)
