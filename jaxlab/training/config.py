"""The typed description of an experiment: what `jaxlab train CONFIG` reads."""

from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from jaxlab.checkpoints import read_config, resolve
from jaxlab.config import parse_config
from jaxlab.data.config import DataConfig
from jaxlab.errors import ConfigError
from jaxlab.models import AnyModelConfig, ModelConfig, XLSTMConfig, config_class
from jaxlab.training.optimizers import OptimizerConfig
from jaxlab.training.sharding import MeshConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _ModelSource(_Section):
    source: str | None = Field(
        None,
        description="A model to continue from: a name, a directory, a .gguf file or a hub id. "
        "Without it a new model is made, with fresh parameters.",
    )


# The fields of all families, by name. Those that several have are of the same kind in each.
_MODEL_FIELDS = {**XLSTMConfig.model_fields, **ModelConfig.model_fields}

# None of them required: with a source they override its configuration.
ModelSection: Any = create_model(  # type: ignore[call-overload]
    "ModelSection",
    __base__=_ModelSource,
    __doc__="The model: a source, the fields of `ModelConfig` or, with `architecture: xlstm`, of "
    "`XLSTMConfig`; or a source with some overridden.",
    **{
        name: (Optional[field.annotation], Field(None, description=field.description))  # noqa: UP045
        for name, field in _MODEL_FIELDS.items()
        if name != "architecture"
    },
    architecture=(
        Optional[  # noqa: UP045
            Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "xlstm"]
        ],
        Field(None, description="The family, as a Hugging Face model_type. Default: llama."),
    ),
)


class ObjectiveConfig(_Section):
    """The loss."""

    name: Literal["language_modeling"] = "language_modeling"
    z_loss: float = Field(
        0.0, ge=0, description="Factor of the mean squared log-normaliser; 1e-4 is usual."
    )
    chunk_size: int = Field(
        128, ge=1, description="Positions of a row whose logits are in memory at a time."
    )


class TrainingConfig(_Section):
    """How long, how often, what is kept."""

    steps: int = Field(1000, ge=1, description="Updates of the parameters.")
    accumulate: int = Field(1, ge=1, description="Micro-batches that a batch is computed in.")
    eval_every: int | None = Field(
        None, ge=1, description="Steps between validations; null: only after the last step."
    )
    eval_batches: int | None = Field(
        None, ge=1, description="Batches of a validation; null: the whole validation split."
    )
    log_every: int = Field(10, ge=1, description="Steps between lines of metrics.jsonl.")
    checkpoint_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints; null: as often as validations."
    )
    keep: int = Field(
        2, ge=1, description="Latest checkpoints kept, besides the one of lowest validation loss."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of a moving average of the parameters, which is then what is validated "
        "and saved as the model.",
    )
    only: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Patterns of the parameters to train, such as 'layers/attention/*'; the "
        "others stay as they are and need no optimizer state. null: all.",
    )
    tensorboard: bool = Field(False, description="Also write TensorBoard events.")


class SampleConfig(_Section):
    """The text written at the end of a run."""

    prompts: tuple[str, ...] = Field(("The ",), description="Beginnings to continue.")
    max_new_tokens: int = Field(128, ge=1, description="Tokens of each continuation.")
    temperature: float = Field(0.8, ge=0, description="0 takes the likeliest token each time.")


class DistributedConfig(_Section):
    """Several processes that train one model. Cloud TPUs, Slurm and MPI are recognised without."""

    coordinator_address: str | None = Field(
        None, description="host:port of process 0. Default: JAX_COORDINATOR_ADDRESS."
    )
    num_processes: int | None = Field(
        None, ge=1, description="How many processes. Default: JAX_NUM_PROCESSES."
    )
    process_id: int | None = Field(
        None, ge=0, description="Which one this is. Default: JAX_PROCESS_ID."
    )
    auto: bool = Field(
        False, description="Find the other processes through the cluster's own environment."
    )
    peer_timeout: int = Field(
        30, ge=5, description="Seconds without a sign of life after which a process counts as dead."
    )


class ExperimentConfig(_Section):
    """A training run, whole."""

    name: str = Field(description="What the run is called.")
    seed: int = Field(0, ge=0, description="Of parameters, data order and sampling.")
    output_dir: str = Field(
        min_length=1,
        description="Directory (or gs:// address) for everything written; a run there is resumed.",
    )
    model: ModelSection = Field(default_factory=ModelSection)
    tokenizer: str | None = Field(
        None,
        description="'byte', a directory or a hub id. Default: the model source's, else 'byte'.",
    )
    data: DataConfig = Field(default_factory=DataConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sample: SampleConfig | None = Field(
        default_factory=SampleConfig, description="null: no sample."
    )
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)

    @model_validator(mode="after")
    def _check(self) -> "ExperimentConfig":
        if self.optimizer.warmup_steps >= self.training.steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} is not less than "
                f"training.steps {self.training.steps}: shorten the warm-up or train longer"
            )
        if self.data.batch_size % self.training.accumulate:
            raise ValueError(
                f"data.batch_size {self.data.batch_size} is not a multiple of training.accumulate "
                f"{self.training.accumulate}"
            )
        if self.training.eval_every is not None and not self.validates:
            raise ValueError(
                f"training.eval_every {self.training.eval_every} asks for validations, but "
                "data.validation_fraction is 0 and data.validation_source null: give one of them, "
                "or set training.eval_every to null"
            )
        model: Any = self.model  # its fields are made, so mypy knows none
        if model.source is None:
            missing = [
                name
                for name, field in config_class(model.architecture).model_fields.items()
                if field.is_required()
                and name != "vocab_size"
                and getattr(model, name, None) is None
            ]
            if missing:
                raise ValueError(
                    f"model has no source and lacks {', '.join(missing)}: give model.source, or "
                    "describe the model"
                )
        return self

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.data.validation_source is not None or self.data.validation_fraction > 0

    @property
    def checkpoint_every(self) -> int | None:
        """Steps between checkpoints."""
        return self.training.checkpoint_every or self.training.eval_every

    @property
    def tokenizer_source(self) -> str:
        """What `load_tokenizer` is given."""
        return self.tokenizer or self.model.source or "byte"


def model_config(section: Any, *, vocab_size: int | None = None) -> AnyModelConfig:
    """The configuration of a `model:` section: its source's with the overrides, or a new one.

    Args:
      section: a `ModelSection`.
      vocab_size: that of the tokenizer, for a new model that does not say its own.

    Raises:
      ConfigError: a field is missing or does not fit the others.
      CheckpointError: the source is missing or malformed.
    """
    fields = section.model_dump(mode="json", exclude_unset=True, exclude={"source"})
    if section.source is not None:
        base = read_config(resolve(section.source))
        base_fields = base.model_dump(mode="json")
        if "attention" in fields and "attention" in base_fields:
            # Another pattern has other keys, so it replaces what it does not resemble.
            known, wanted = base_fields["attention"], fields["attention"]
            if not isinstance(wanted, dict) or wanted.get("pattern", "full") != (
                isinstance(known, dict) and known["pattern"]
            ):
                base_fields["attention"] = None
        tree = _merged(base_fields, fields)
        # These follow from others; kept, the source's values would contradict an override.
        if "layer_types" in tree and "num_layers" in fields and "layer_types" not in fields:
            tree["layer_types"] = None
        return parse_config(type(base), tree, default_origin="model")
    if fields.get("vocab_size") is None:
        if vocab_size is None:
            raise ConfigError(
                "model.vocab_size is missing: give it, or a tokenizer to take it from"
            )
        fields["vocab_size"] = vocab_size
    # An explicit null means the default, except where the default is null anyway.
    fields = {name: value for name, value in fields.items() if value is not None}
    return parse_config(config_class(section.architecture), fields, default_origin="model")


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            name: _merged(base[name], value)
            if isinstance(value, dict) and isinstance(base.get(name), dict)
            else value
            for name, value in changes.items()
        },
    }
