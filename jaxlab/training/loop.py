"""The training run: builds everything from a configuration, trains, resumes, records, saves."""

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxlab import checkpoints
from jaxlab.data import make_pipeline, unigram_entropy
from jaxlab.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from jaxlab.errors import ConfigError, NonFiniteLossError, StorageError
from jaxlab.models import (
    AnyModelConfig,
    LanguageModule,
    ModelConfig,
    XAttention,
    abstract_params,
    init_params,
    module_for,
    resolve_attention,
)
from jaxlab.models.attention.separator_watch import SeparatorWatch
from jaxlab.objectives import Objective, language_modeling
from jaxlab.training import distributed
from jaxlab.training.checkpoint import Checkpointer
from jaxlab.training.config import ExperimentConfig, model_config
from jaxlab.training.interruption import Interruption
from jaxlab.training.metrics import (
    MetricsWriter,
    draw_loss_curve,
    peak_flops,
    perplexity,
    train_flops_per_token,
)
from jaxlab.training.optimizers import make_optimizer, make_schedule, trainable_mask
from jaxlab.training.reporter import Reporter
from jaxlab.training.run_lock import run_lock
from jaxlab.training.sharding import (
    batch_sharding,
    batch_shards,
    check_mesh,
    logical_rules,
    make_mesh,
    param_shardings,
    replicated,
    shardings_like_params,
    use_mesh,
)
from jaxlab.training.step import TrainState, make_eval_step, make_train_step


@dataclass(frozen=True)
class FitResult:
    """What a run came to.

    Attributes:
      state: the last `TrainState`, on the mesh.
      step: updates done.
      output_dir: where everything is.
      stopped_by: number of the signal that ended the run early, else None. The fields below are
        then None or empty: they are made when all steps are done.
      validation_loss: nats per token after the last step; None without validation data.
      unigram_entropy: nats per token of a model that only knows how frequent each token is.
      best_step: the checkpoint of lowest validation loss.
      model_dir: the trained model as a Hugging Face directory.
      loss_curve: the PNG.
      samples: pairs of prompt and continuation.
    """

    state: TrainState
    step: int
    output_dir: str
    stopped_by: int | None = None
    validation_loss: float | None = None
    unigram_entropy: float | None = None
    best_step: int | None = None
    model_dir: str | None = None
    loss_curve: str | None = None
    samples: tuple[tuple[str, str], ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run before all steps were done."""
        return self.stopped_by is not None

    @property
    def paths(self) -> dict[str, str]:
        """What was written, by name."""
        written = {
            "model": self.model_dir,
            "loss curve": self.loss_curve,
            "metrics": f"{self.output_dir}/metrics.jsonl",
            "checkpoints": f"{self.output_dir}/checkpoints",
        }
        return {name: path for name, path in written.items() if path is not None}


def fit(config: ExperimentConfig, *, reporter: Reporter | None = None) -> FitResult:
    """Train as `config` says, or go on with what is in its `output_dir`.

    A run that was killed resumes from its last checkpoint to the same bits that it would have come
    to. SIGTERM and Ctrl-C save and return. Writes `config.json`, `metrics.jsonl`, `checkpoints/`
    and, at the end, `loss_curve.png`, `sample.txt` and the model as `model/`.

    Args:
      reporter: is told of the progress; default: nobody is.

    Raises:
      ConfigError, MeshError: the configuration contradicts itself, the model or the devices.
      DataError, TokenizerError, CheckpointError: an input is missing, broken or does not fit.
      NonFiniteLossError: the loss became NaN or infinite; tells step, checkpoint and rows.
      StorageError: the disk is full; the last checkpoint is intact.
      DistributedError: another process of the run died.
    """
    reporter = reporter or Reporter()
    distributed.initialize(config.distributed)
    run = _Run(config, reporter if jax.process_index() == 0 else Reporter())
    with distributed.peer_errors(), Interruption() as interruption, run:
        return run.train(interruption)


class _Run:
    """Everything one run needs, built once. Its methods are the parts of `fit`, in order."""

    def __init__(self, config: ExperimentConfig, reporter: Reporter):
        self.config, self.reporter = config, reporter
        self.directory = epath.Path(config.output_dir)
        self.stack = contextlib.ExitStack()

        self.tokenizer, self.source, self.model = _resolve_model(config)
        self.module = module_for(self.model)
        training = config.training
        sizes = check_mesh(
            config.mesh,
            self.model,
            num_devices=jax.device_count(),
            batch_size=config.data.batch_size,
            batch_ramp=config.data.batch_sizes[:-1],
            sequence_length=config.data.sequence_length,
            accumulate=training.accumulate,
        )
        self.mesh = make_mesh(config.mesh)
        self.mesh_sizes = sizes
        self.batch_sharding = batch_sharding(self.mesh)
        self.objective = _objective(config, self.module, batch_shards(self.mesh))
        self.optimizer = make_optimizer(config.optimizer, steps=training.steps, only=training.only)
        step = make_train_step(
            self.objective,
            self.optimizer,
            accumulate=training.accumulate,
            only=training.only,
            ema_decay=training.ema_decay,
            schedule=make_schedule(config.optimizer, training.steps),
        )
        self.abstract_state = self._abstract_state()
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self.step_function = jax.jit(
            step, donate_argnums=0, out_shardings=(state_shardings, replicated(self.mesh))
        )
        self.compiled_eval: Any = None
        self.eval_function = jax.jit(
            make_eval_step(self.objective), out_shardings=replicated(self.mesh)
        )
        shape = (config.data.batch_size, config.data.sequence_length)
        self.share = distributed.process_rows(self.batch_sharding, shape)

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and distributed.lost_a_peer(error):
            # Closing the checkpoints would wait for a process that is gone.
            self.stack.pop_all()
        self.stack.close()

    def _abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state."""
        params = abstract_params(self.module)
        ema = self.config.training.ema_decay is not None
        shapes = jax.eval_shape(
            lambda p, key: TrainState.create(p, self.optimizer, key, ema=ema),
            params,
            jax.random.key(0),
        )
        shardings = shardings_like_params(
            shapes, params, param_shardings(self.module, self.mesh), self.mesh
        )
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    def initial_state(self) -> TrainState:
        """The state before the first step: loaded or fresh parameters, placed on the mesh."""
        training = self.config.training
        params_key, step_key = jax.random.split(jax.random.key(self.config.seed))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        if self.source is not None:
            params = checkpoints.load_params(
                self.source,
                self.model,
                shardings=shardings.params,
                param_dtype=self.model.param_dtype,
            )
        else:
            initialize = jax.jit(
                lambda key: init_params(self.module, key), out_shardings=shardings.params
            )
            params = initialize(params_key)
        create = jax.jit(
            lambda params, key: TrainState.create(
                params, self.optimizer, key, ema=training.ema_decay is not None
            ),
            donate_argnums=0,
            out_shardings=shardings,
        )
        return create(params, step_key)

    def pipeline(self, split: str) -> Any:
        index, count = self.share
        pipeline = make_pipeline(
            self.config.data,
            self.tokenizer,
            split=split,
            seed=self.config.seed,
            process_index=index,
            process_count=count,
        )
        self.stack.callback(pipeline.close)
        return pipeline

    def train(self, interruption: Interruption) -> FitResult:
        """The whole run."""
        with use_mesh(self.mesh, logical_rules(self.model, self.mesh)):
            result = self._train_steps(interruption)
        if not result.interrupted:
            result = self.finish(result)
            distributed.meet("finished")
        self.reporter.on_end(result)
        return result

    def _train_steps(self, interruption: Interruption) -> FitResult:
        config, training, reporter = self.config, self.config.training, self.reporter
        train_data = self.pipeline("train")
        self.validation_data = self.pipeline("validation") if config.validates else None

        self._prepare_directory()  # the processes meet there
        checkpointer = Checkpointer(self.directory / "checkpoints", keep=training.keep)
        self.stack.callback(checkpointer.close)
        model = self.model.model_dump(mode="json")
        restored = checkpointer.restore(self.abstract_state, model=model, tell=reporter.on_message)
        if restored is None:
            state, start_step = self.initial_state(), 0
        else:
            state, start_step = restored.state, restored.step
            train_data.set_state(restored.data_state)
            if start_step > training.steps:
                raise ConfigError(
                    f"training.steps is {training.steps} but {self.directory} is at step "
                    f"{start_step}: raise training.steps, or use another output_dir"
                )
        distributed.meet("state")
        writer = self._writer(start_step)
        reporter.on_start(self._info(state, start_step, resumed=restored is not None))
        if restored is not None:
            reporter.on_message(f"resumed from step {start_step} of {self.directory}")

        agreement = distributed.Agreement(self.mesh)
        watch = _Watch(self, writer, checkpointer, train_data)
        compiled: dict[int, Any] = {}  # by rows of a batch
        separators = SeparatorWatch(self.model)
        stopped_by = 0
        validation_loss = _recorded(writer.records, "validation_loss", start_step)
        step = start_step
        while step < training.steps:
            local = dict(next(train_data))
            rows = local.pop("row_ids")
            separators.look(local["tokens"])
            batch = distributed.global_batch(local, self.batch_sharding, self.share)
            size = batch["tokens"].shape[0]
            if size not in compiled:
                stopped_by = watch.flush()  # compiling is not to count as that step's time
                begun = time.perf_counter()
                compiled[size] = self.step_function.lower(state, batch).compile()
                distributed.meet(f"compiled for {size} rows")
                reporter.on_compile(time.perf_counter() - begun)
                watch.restart_clock()
            state, metrics = compiled[size](state, batch)
            step += 1
            wish = agreement.say(interruption.signal_number)
            stopped_by = watch.step_done(step, metrics, rows, size, wish) or stopped_by
            if jax.process_count() == 1:
                stopped_by = interruption.signal_number  # nobody else has to agree

            last = step == training.steps
            validate = last or _due(step, training.eval_every)
            save = last or stopped_by or _due(step, config.checkpoint_every)
            if not (validate or save):
                continue
            # The state is known only once its step is: nothing that is NaN may be saved.
            stopped_by = watch.flush() or stopped_by
            save = save or bool(stopped_by)
            if validate and self.validation_data is not None:
                validation_loss = self.validate(state, step, writer)
            if save:
                checkpointer.save(
                    state,
                    data_state=train_data.get_state(),
                    model=model,
                    config=self._config_record(),
                    validation_loss=validation_loss if validate else None,
                )
                reporter.on_checkpoint(step, str(checkpointer.path(step)))
            watch.restart_clock()
            if stopped_by and not last:
                checkpointer.wait()
                distributed.meet("interrupted")
                reporter.on_message(f"stopped after step {step}; run again to go on from there")
                return FitResult(state, step, str(self.directory), stopped_by=stopped_by)

        checkpointer.wait()
        self.records = writer.records
        return FitResult(
            state,
            step,
            str(self.directory),
            validation_loss=validation_loss,
            best_step=checkpointer.best_step,
        )

    def _prepare_directory(self) -> None:
        if jax.process_index() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"cannot make output_dir {self.directory}: {error.strerror or error}"
                ) from error
            self.stack.enter_context(run_lock(self.directory))
            text = json.dumps(self._config_record(), indent=2) + "\n"
            _write_text(self.directory / "config.json", text)
        distributed.meet("output directory")

    def _config_record(self) -> dict[str, Any]:
        """The configuration with its defaults, but of the model only what was given."""
        record = self.config.model_dump(mode="json")
        record["model"] = self.config.model.model_dump(mode="json", exclude_unset=True)
        return record

    def _writer(self, start_step: int) -> Any:
        if jax.process_index() != 0:
            return _NoWriter()
        writer = MetricsWriter(
            self.directory, start_step=start_step, tensorboard=self.config.training.tensorboard
        )
        self.stack.callback(writer.close)
        return writer

    def _info(self, state: TrainState, start_step: int, *, resumed: bool) -> dict[str, Any]:
        mask = trainable_mask(state.params, self.config.training.only)
        trained = zip(jax.tree.leaves(state.params), jax.tree.leaves(mask), strict=True)
        devices = jax.devices()
        return {
            "name": self.config.name,
            "output_dir": str(self.directory),
            "devices": f"{len(devices)} × {devices[0].device_kind}",
            "mesh": self.mesh_sizes,
            "start_step": start_step,
            "steps": self.config.training.steps,
            "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            "num_trainable": sum(leaf.size for leaf, is_trained in trained if is_trained),
            "params_bytes": _nbytes(state.params),
            "optimizer_bytes": _nbytes(state.opt_state),
            "batch_size": self.config.data.batch_size_at(start_step),
            "sequence_length": self.config.data.sequence_length,
            "resumed": resumed,
        }

    def validate(self, state: TrainState, step: int, writer: Any) -> float:
        """Mean loss over the validation batches, recorded and reported."""
        assert self.validation_data is not None
        self.validation_data.reset()
        params = state.params if state.ema_params is None else state.ema_params
        total = weight = 0.0
        for index, local in enumerate(self.validation_data):
            if index == self.config.training.eval_batches:
                break
            local = {name: value for name, value in local.items() if name != "row_ids"}
            batch = distributed.global_batch(local, self.batch_sharding, self.share)
            if self.compiled_eval is None:
                self.compiled_eval = self.eval_function.lower(params, batch).compile()
                distributed.meet("compiled the validation")
            metrics = jax.device_get(self.compiled_eval(params, batch))
            total += float(metrics["cross_entropy"]) * float(metrics["weight"])
            weight += float(metrics["weight"])
        loss = total / max(weight, 1.0)
        record = {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": perplexity(loss),
            "validation_tokens": weight,
        }
        writer.write(record)
        self.reporter.on_eval(record)
        return loss

    def finish(self, result: FitResult) -> FitResult:
        """Write the model, the curve and the sample."""
        config, state = self.config, result.state
        params = state.params if state.ema_params is None else state.ema_params
        model_dir = self.directory / "model"
        samples: tuple[tuple[str, str], ...] = ()
        with _local_directory(model_dir) as local:
            checkpoints.save_pretrained(local, params, self.model, self.tokenizer)
            if jax.process_index() == 0 and config.sample is not None:
                samples = self._sample(params, local)
        result = dataclasses.replace(result, model_dir=str(model_dir), samples=samples)
        if jax.process_index() != 0:
            return result
        unigram = None
        if self.validation_data is not None:
            unigram = unigram_entropy(
                config.data, self.tokenizer, max_batches=config.training.eval_batches
            )
        curve = self.directory / "loss_curve.png"
        draw_loss_curve(self.records, curve, title=config.name, unigram=unigram)
        return dataclasses.replace(result, unigram_entropy=unigram, loss_curve=str(curve))

    def _sample(self, params: Any, model_dir: Path) -> tuple[tuple[str, str], ...]:
        """Continue the prompts, on one device: the other processes need not take part."""
        from jaxlab.inference import Generator, SamplingParams

        sample = self.config.sample
        assert sample is not None
        if jax.device_count() > 1:
            params = checkpoints.load_params(model_dir, self.model)
        generator = Generator(self.module, params, self.tokenizer)
        texts = []
        for prompt in sample.prompts:
            room = self.model.max_position_embeddings - len(generator.encode(prompt))
            settings = SamplingParams(
                max_new_tokens=max(1, min(sample.max_new_tokens, room)),
                temperature=sample.temperature,
                seed=self.config.seed,
            )
            texts.append((prompt, generator.generate([prompt], settings)[0].text))
        content = "\n\n".join(prompt + text for prompt, text in texts) + "\n"
        _write_text(self.directory / "sample.txt", content)
        return tuple(texts)


class _Watch:
    """Reads each step's metrics one step late, so that the devices never wait for the host."""

    def __init__(self, run: _Run, writer: Any, checkpointer: Checkpointer, data: Any):
        config = run.config
        self._run, self._writer, self._checkpointer, self._data = run, writer, checkpointer, data
        self._pending: tuple[int, Any, np.ndarray, int, Any] | None = None
        self._row_tokens = config.data.sequence_length
        peak = peak_flops(jax.devices()[0])
        flops = train_flops_per_token(
            run.model, run.abstract_state.params, config.data.sequence_length
        )
        # The share of the devices' peak that one token a second is.
        self._mfu = flops / (peak * jax.device_count()) if peak else None
        self._clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the next step's time."""
        self._clock = time.perf_counter()

    def step_done(self, step: int, metrics: Any, rows: np.ndarray, size: int, wish: Any) -> int:
        """Take note of a step that was started; returns the signal all processes stop for, or 0.

        `rows` are the ids of this process' rows, `size` the number of all processes' rows.
        """
        stopped_by = self.flush()
        self._pending = (step, metrics, rows, size, wish)
        return stopped_by

    def flush(self) -> int:
        """Wait for the last step that was started, and record it."""
        if self._pending is None:
            return 0
        step, metrics, rows, size, wish = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._check_finite(step, values, rows)
        record = {
            "step": step,
            **{name: value for name, value in values.items() if name != "weight"},
            "perplexity": perplexity(values["loss"]),
            "targets": values["weight"],
            "step_seconds": seconds,
            "tokens_per_second": size * self._row_tokens / seconds,
        }
        if self._mfu is not None:
            record["mfu"] = self._mfu * record["tokens_per_second"]
        training = self._run.config.training
        if step == 1 or step == training.steps or step % training.log_every == 0:
            self._writer.write(record)
        self._run.reporter.on_step(record)
        return int(wish)

    def _check_finite(self, step: int, values: dict[str, float], rows: np.ndarray) -> None:
        faulty = [n for n in ("loss", "grad_norm") if not math.isfinite(values[n])]
        if not faulty:
            return
        self._checkpointer.wait()
        good = self._checkpointer.latest_step
        kept = "there is no checkpoint yet"
        if good is not None:
            kept = f"the last good checkpoint is {self._checkpointer.path(good)}"
        rows = distributed.gather_rows(rows)
        shown = ", ".join(str(int(row)) for row in rows[:16]) + (", …" if len(rows) > 16 else "")
        described = self._data.describe_row(rows[0])
        raise NonFiniteLossError(
            f"{faulty[0]} is {values[faulty[0]]} at step {step}; {kept}. The batch had the rows "
            f"{shown} (the first: {described}). Lower optimizer.learning_rate, lengthen "
            "optimizer.warmup_steps, or look at these rows"
        )


class _NoWriter:
    """The metrics of processes that write none."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def write(self, record: dict[str, float]) -> None:
        self.records.append(record)


def _resolve_model(
    config: ExperimentConfig,
) -> tuple[Tokenizer, Path | None, AnyModelConfig]:
    """The tokenizer, where the weights are (None: a new model), the model's configuration."""
    source = None
    if config.model.source is not None:
        source = Path(checkpoints.resolve(config.model.source))
    tokenizer = load_tokenizer(config.tokenizer or source or "byte")
    model = model_config(config.model, vocab_size=int(tokenizer.vocab_size))
    check_vocabulary(tokenizer, model)
    model = resolve_attention(model, tokenizer)
    _check_trainable(model)
    if config.data.sequence_length > model.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length {config.data.sequence_length} is longer than the model's "
            f"context, model.max_position_embeddings {model.max_position_embeddings}: shorten the "
            "rows, or lengthen the context"
        )
    return tokenizer, source, model


def _check_trainable(model: AnyModelConfig) -> None:
    if not isinstance(model, ModelConfig):
        return
    patterns = [a for a in model.layer_attention if isinstance(a, XAttention)]
    if patterns and not patterns[0].constant_mask:
        raise ConfigError(
            "attention.pattern 'xattention' chooses blocks by scores that pass no gradient; it is "
            "made for prefill. Set attention.constant_mask: true to train with the choice as a "
            "constant, or train with another pattern"
        )


def _objective(
    config: ExperimentConfig, module: LanguageModule, shards: tuple[int, int]
) -> Objective:
    options = config.objective
    return language_modeling(
        module, z_loss=options.z_loss, chunk_size=options.chunk_size, shards=shards
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _recorded(records: list[dict[str, float]], name: str, step: int) -> float | None:
    for record in reversed(records):
        if record["step"] == step and name in record:
            return record[name]
    return None


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def _local_directory(directory: epath.Path) -> Iterator[Path]:
    """A local path to write `directory` to; copied afterwards if it is in an object store."""
    if "://" not in str(directory):
        yield Path(directory)
        return
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(temporary) / "model"
        yield local
        if jax.process_index() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for file in local.iterdir():
                epath.Path(file).copy(directory / file.name, overwrite=True)
    distributed.meet("copied the model")


def _write_text(path: epath.Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
