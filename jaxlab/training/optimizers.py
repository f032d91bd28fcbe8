"""Optimizers and learning-rate schedules, put together from optax."""

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxlab.errors import ConfigError


class OptimizerConfig(BaseModel):
    """An optax optimizer with its schedule, clipping and weight decay."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["adamw", "adafactor", "lion", "muon"] = Field(
        "adamw",
        description="Adafactor's learning rate is relative to the size of each parameter. Muon "
        "orthogonalises the layers' matrices and leaves the rest to AdamW, with updates scaled so "
        "that AdamW's learning rates serve.",
    )
    learning_rate: float = Field(3e-4, gt=0, description="The highest rate of the schedule.")
    schedule: Literal["cosine", "linear", "exponential", "constant", "wsd"] = Field(
        "cosine",
        description="Between warm-up and cool-down. exponential: a constant factor each step, for "
        "runs that may be continued. wsd: constant, then a linear decay at the end.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly.")
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="Steps after the warm-up in which cosine, linear and exponential reach "
        "min_lr_ratio; then the first two stay there, and exponential goes on at its pace. null: "
        "all that are neither warm-up nor cool-down.",
    )
    cooldown_steps: int = Field(
        0, ge=0, description="Last steps, over which the rate falls linearly to 0."
    )
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="Share of all steps in which wsd decays."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Where a schedule's decay ends, as a share of learning_rate."
    )
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled decay, times the learning rate; of matrices only."
    )
    decay_embeddings: bool = Field(False, description="Decay embeddings too.")
    b1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment (momentum).")
    b2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")
    clip_norm: float | None = Field(
        1.0, gt=0, description="Gradients are scaled down to this global norm; null: never."
    )

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if self.schedule == "wsd" and self.decay_fraction == 1 and self.warmup_steps:
            raise ValueError("decay_fraction 1 leaves no room for warmup_steps: lower one of them")
        if self.schedule == "exponential" and not self.min_lr_ratio:
            raise ValueError(
                "min_lr_ratio 0 is never reached by schedule exponential: give one above 0, such "
                "as 0.1, and cooldown_steps to end at 0"
            )
        if self.schedule == "wsd" and self.cooldown_steps:
            raise ValueError(
                f"cooldown_steps {self.cooldown_steps} does not go with schedule wsd, which decays "
                "in the last decay_fraction of the steps: use schedule constant for a cool-down"
            )
        if self.schedule in ("constant", "wsd") and self.decay_steps is not None:
            raise ValueError(
                f"decay_steps {self.decay_steps} has no meaning for schedule {self.schedule}: "
                "leave it out, or use cosine, linear or exponential"
            )
        return self


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates done so far.

    Warm-up rises linearly to `learning_rate`, which the first step after it uses; the last of
    `steps` updates comes one short of the schedule's end: `learning_rate * min_lr_ratio`, or 0
    after a cool-down, which falls linearly from wherever the schedule is by then.

    Raises:
      ConfigError: warm-up and cool-down are longer than the run.
    """
    peak, warmup, cooldown = config.learning_rate, config.warmup_steps, config.cooldown_steps
    if warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps {warmup} is not less than training.steps {steps}: "
            "shorten the warm-up or train longer"
        )
    rest = steps - warmup - cooldown
    if rest < 1:
        raise ConfigError(
            f"optimizer.warmup_steps {warmup} and optimizer.cooldown_steps {cooldown} leave none "
            f"of training.steps {steps} between them: shorten them or train longer"
        )
    floor = peak * config.min_lr_ratio
    decay = config.decay_steps or rest
    if config.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(peak, decay, alpha=config.min_lr_ratio)
    elif config.schedule == "linear":
        schedule = optax.linear_schedule(peak, floor, decay)
    elif config.schedule == "exponential":
        schedule = optax.exponential_decay(peak, decay, config.min_lr_ratio)
    elif config.schedule == "wsd":
        decay = min(rest, max(1, round(steps * config.decay_fraction)))
        schedule = optax.linear_schedule(peak, floor, decay, transition_begin=rest - decay)
    else:
        schedule = optax.constant_schedule(peak)
    parts, borders = [schedule], []
    if warmup:
        # Begins at one step's worth and not at 0: a step at rate 0 would be wasted.
        parts.insert(0, optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)))
        borders.append(warmup)
    if cooldown:
        fall = optax.linear_schedule(1.0, 0.0, cooldown)
        parts.append(lambda count: schedule(rest) * fall(count))
        borders.append(steps - cooldown)
    return optax.join_schedules(parts, borders) if borders else schedule


def make_optimizer(
    config: OptimizerConfig, *, steps: int, only: Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of `config` for a run of `steps` updates.

    Args:
      only: patterns of the parameters that are trained, see `trainable_mask`; None trains all. The
        others get zero updates and have no optimizer state, and the clipped norm is that of the
        trained ones.

    Raises:
      ConfigError: as `make_schedule`; from `init`, as `trainable_mask`.
    """
    optimizer = _unmasked(config, make_schedule(config, steps))
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    if only is None:
        return optax.with_extra_args_support(optimizer)

    def labels(params: Any) -> Any:
        mask = trainable_mask(params, only)
        return jax.tree.map(lambda trained: "train" if trained else "freeze", mask)

    return optax.partition({"train": optimizer, "freeze": optax.set_to_zero()}, labels)


def trainable_mask(params: Any, only: Sequence[str] | None) -> Any:
    """A tree like `params` of booleans: whether a pattern of `only` matches the parameter.

    A pattern is a shell pattern of a path such as `layers/mlp/up_proj/kernel`, or of a part of the
    tree that holds it: `lm_head`, `layers/attention/*`, `*/bias`. One word is found at any depth:
    `attention`, `*_shift`. `None` matches everything.

    Raises:
      ConfigError: a pattern matches no parameter.
    """
    paths = [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if only is None:
        return jax.tree.map(lambda _: True, params)

    def matches(path: str, pattern: str) -> bool:
        parts = path.split("/")
        holders = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        named = parts if "/" not in pattern else []
        return any(fnmatch.fnmatchcase(name, pattern) for name in (*holders, *named))

    for pattern in only:
        if not any(matches(path, pattern) for path in paths):
            nearest = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.3) or paths[:1]
            raise ConfigError(
                f"training.only: {pattern!r} matches no parameter; the nearest is {nearest[0]!r}"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(matches(_path(path), pattern) for pattern in only), params
    )


def _unmasked(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    def decayed(params: Any) -> Any:
        kept = {"bias", "gate_bias", "scale", "key_shift", "value_shift"}
        if not config.decay_embeddings:
            kept.add("embedding")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: _path(path).rsplit("/", 1)[-1] not in kept, params
        )

    if config.name == "adamw":
        return optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        )
    if config.name == "lion":
        return optax.lion(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        )
    if config.name == "adafactor":
        # optax adds this decay after the learning rate, so it has to be multiplied in here.
        return optax.adafactor(
            schedule,
            weight_decay_rate=lambda count: config.weight_decay * schedule(count),
            weight_decay_mask=decayed,
        )
    return contrib.muon(
        schedule,
        beta=config.momentum,
        eps=config.eps,
        weight_decay=config.weight_decay,
        weight_decay_mask=decayed,
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=_matrix_axes,
        consistent_rms=0.2,  # AdamW's update size (Moonlight, arXiv:2502.16982)
    )


def _matrix_axes(params: Any) -> Any:
    """Which axes of a stacked kernel are inputs, which outputs; None for what is no such matrix."""

    def axes(path: Any, leaf: Any) -> contrib.MuonDimensionNumbers | None:
        names = _path(path).split("/")
        if names[0] != "layers" or names[-1] != "kernel":
            return None
        if names[-2] == "conv":  # one filter a channel
            return None
        if names[-2] in ("igate", "fgate", "zgate", "ogate"):  # a matrix a head: [layers, heads, …]
            return contrib.MuonDimensionNumbers((2,), (3,))
        inputs = (1, 2) if names[-2] == "o_proj" else (1,)  # [layers, heads, head_dim, embed]
        outputs = tuple(axis for axis in range(1, jnp.ndim(leaf)) if axis not in inputs)
        return contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(axes, params)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
