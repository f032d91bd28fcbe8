"""Will it fit, and how fast can it be? Compiles a config's step for a TPU slice that is not there.

`preflight` lowers the very train step (or decode step) that a run would use, with its shardings,
for the devices of a TPU topology, and lets libtpu compile it. What the compiler says about memory
is then what the slice would say. If the step does not fit, nearby changes are compiled until one
does.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlab.data.tokenizers import load_tokenizer
from jaxlab.errors import ConfigError, JaxlabError, MeshError
from jaxlab.models import (
    AnyModelConfig,
    LanguageModule,
    ModelConfig,
    SepLLMAttention,
    abstract_params,
    init_cache,
    module_for,
)
from jaxlab.models.cost import cost_of
from jaxlab.objectives import language_modeling
from jaxlab.training import roofline
from jaxlab.training.config import ExperimentConfig, model_config
from jaxlab.training.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxlab.training.roofline import CHIPS, Chip, Roofline, Work
from jaxlab.training.sharding import (
    MeshConfig,
    batch_sharding,
    batch_shards,
    check_mesh,
    logical_rules,
    make_mesh,
    param_shardings,
    shardings_like_params,
    use_mesh,
)
from jaxlab.training.step import TrainState, make_train_step
from pallas_kernels.attention import compiling_for

Mode = Literal["train", "decode"]
_MAX_TRIALS = 8  # compilations spent on looking for a change that fits


class PreflightError(JaxlabError):
    """A topology that does not exist, or a compiler that is not installed."""


@dataclass(frozen=True)
class Plan:
    """The parts of an experiment that decide memory and speed."""

    model: AnyModelConfig
    mesh: MeshConfig
    batch_size: int
    sequence_length: int
    optimizer: OptimizerConfig
    accumulate: int = 1
    steps: int = 1000
    ema_decay: float | None = None
    only: tuple[str, ...] | None = None
    z_loss: float = 0.0
    chunk_size: int = 256
    batch_ramp: tuple[int, ...] = ()  # smaller batches before; they need no more memory

    @classmethod
    def of(cls, config: ExperimentConfig) -> Plan:
        """The plan of an experiment; builds no parameters.

        Raises:
          CheckpointError: the model's source is missing or cannot be fetched.
        """
        vocab_size = None
        model: Any = config.model  # its fields are made from those of ModelConfig
        if model.source is None and model.vocab_size is None:
            vocab_size = load_tokenizer(config.tokenizer_source).vocab_size
        return cls(
            model=_with_any_separators(model_config(model, vocab_size=vocab_size)),
            mesh=config.mesh,
            batch_size=config.data.batch_size,
            sequence_length=config.data.sequence_length,
            accumulate=config.training.accumulate,
            optimizer=config.optimizer,
            steps=config.training.steps,
            ema_decay=config.training.ema_decay,
            only=config.training.only,
            z_loss=config.objective.z_loss,
            chunk_size=config.objective.chunk_size,
            batch_ramp=config.data.batch_sizes[:-1],
        )


def _with_any_separators(model: AnyModelConfig) -> AnyModelConfig:
    """Which tokens are separators is data: any ids compile to the same, and need no tokenizer."""

    def known(attention: Any) -> Any:
        if not isinstance(attention, SepLLMAttention):
            return attention
        return attention.model_copy(update={"separators": (0,)})

    if not isinstance(model, ModelConfig):
        return model
    if isinstance(model.attention, tuple):
        return model.replace(attention=tuple(known(a) for a in model.attention))
    return model.replace(attention=known(model.attention))


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips, such as `v5p:4x4x4`."""

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Reads `KIND:AxB` or `KIND:AxBxC`.

        Raises:
          PreflightError: the form, or the kind of chip, is not known.
        """
        match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+){1,2})", text.strip().lower())
        if match is None:
            raise PreflightError(
                f"topology {text!r} is not of the form KIND:AxB or KIND:AxBxC, such as v5e:4x4 or "
                "v5p:4x4x4"
            )
        kind, shape = match[1], tuple(int(size) for size in match[2].split("x"))
        if kind not in CHIPS:
            raise PreflightError(
                f"topology {text!r}: chip {kind!r} is not known; there are {', '.join(CHIPS)}"
            )
        chip = CHIPS[kind]
        if len(shape) == 2 and chip.torus_dims == 3:
            shape = (*shape, 1)
        if len(shape) > chip.torus_dims:
            raise PreflightError(
                f"topology {text!r}: {kind} slices have {chip.torus_dims} dimensions, such as "
                f"{kind}:4x4"
            )
        return cls(chip, shape)

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    def doubled(self) -> Topology:
        """The next larger slice: the shortest side twice as long."""
        shape = list(self.shape)
        shape[shape.index(min(shape))] *= 2
        return Topology(self.chip, tuple(sorted(shape)))

    def devices(self) -> list[Any]:
        """The slice's devices, to compile for; no TPU is needed.

        Raises:
          PreflightError: libtpu is not installed, or knows no such slice.
        """
        from jax.experimental import topologies

        try:
            import libtpu  # noqa: F401
        except ImportError:
            raise PreflightError(
                "compiling for a TPU needs libtpu, which is not installed: "
                "pip install 'jaxlab[preflight]'"
            ) from None
        for name, value in _LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
        try:
            topology = topologies.get_topology_desc(str(self), "tpu", **options)
        except Exception as error:  # jax raises its runtime's own kinds
            raise PreflightError(f"topology {self} does not exist: {_first_line(error)}") from error
        return list(topology.devices)


# Keeps libtpu from asking a metadata server for the TPU it is not running on.
_LIBTPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at the same time
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_LIBRARY_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip.

    `temporary` is gradients, activations and workspace, as the compiler laid them out at their
    peak; `cache` the keys and values of a decode step; `program` the code.
    """

    parameters: int
    optimizer: int
    cache: int
    batch: int
    temporary: int
    program: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Change:
    """A config change under which the step fits: overrides, and the topology if it is another."""

    overrides: dict[str, Any]
    topology: Topology
    total_bytes: int

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.overrides.items()]
        return " ".join(parts)


@dataclass(frozen=True)
class PreflightReport:
    """What `preflight` found. `memory` is None if the compiler gave up before laying it out.

    Attributes:
      total_bytes: needed on one chip.
      compiler_flops: of one chip as XLA estimates it: a scanned body counts once.
      nearest_change: if the step does not fit, the nearest change found that does, if any.
    """

    mode: Mode
    topology: Topology
    mesh: dict[str, int]
    num_params: int
    tokens_per_step: int
    memory: Memory | None
    total_bytes: int
    compiler_flops: float | None
    work: Work
    roofline: Roofline
    nearest_change: Change | None = None

    @property
    def hbm_bytes(self) -> int:
        """Memory of a chip that a program may use."""
        return int(self.topology.chip.hbm_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.hbm_bytes

    @property
    def tokens_per_second(self) -> float:
        """At the roofline, over the whole slice."""
        return self.tokens_per_step / self.roofline.seconds


def preflight(
    config: ExperimentConfig,
    topology: str,
    mode: Mode = "train",
    *,
    suggest: bool = True,
    progress: Callable[[str], None] = lambda message: None,
) -> PreflightReport:
    """Compiles the step of `config` for a TPU slice and reports memory, work and speed.

    Args:
      config: the experiment.
      topology: chips, such as `"v5p:4x4x4"` or `"v5e:4x4"`.
      mode: `"train"`: one update. `"decode"`: one token for each of `data.batch_size` rows whose
        caches have room for `data.sequence_length`, with parameters in the compute type.
      suggest: look for a change that fits if this does not; costs more compilations.
      progress: told what is being compiled.

    Raises:
      PreflightError: no such topology, or libtpu is missing.
      MeshError: the mesh divides neither the slice nor the model.
    """
    if mode not in ("train", "decode"):
        raise ConfigError(f"mode is {mode!r}: use 'train' or 'decode'")
    plan = Plan.of(config)
    slice_ = Topology.parse(topology)
    progress(f"compiling the {mode} step for {slice_}")
    report = _compile(plan, slice_, mode)
    if report.fits or not suggest:
        return report
    change = _nearest_change(plan, slice_, mode, report, progress)
    return dataclasses.replace(report, nearest_change=change)


def _compile(plan: Plan, topology: Topology, mode: Mode) -> PreflightReport:
    devices = topology.devices()
    sizes = check_mesh(
        plan.mesh,
        plan.model,
        num_devices=len(devices),
        batch_size=plan.batch_size,
        sequence_length=plan.sequence_length,
        accumulate=plan.accumulate if mode == "train" else 1,
        batch_ramp=plan.batch_ramp if mode == "train" else (),
    )
    mesh = make_mesh(plan.mesh, devices)
    model = plan.model if mode == "train" else plan.model.replace(param_dtype=plan.model.dtype)
    module = module_for(model)
    params = abstract_params(module)
    shardings = param_shardings(module, mesh)
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    params = _placed(params, shardings)

    with compiling_for("tpu"), use_mesh(mesh, logical_rules(model, mesh)):
        if mode == "train":
            lowered, sizes_by_kind = _lower_train(plan, module, params, shardings, mesh)
        else:
            lowered, sizes_by_kind = _lower_decode(plan, module, params, mesh)
        memory, total, flops = _compiled_memory(lowered, sizes_by_kind)

    if mode == "train":
        work = roofline.train_work(
            model,
            batch_size=plan.batch_size,
            sequence_length=plan.sequence_length,
            accumulate=plan.accumulate,
            mesh=sizes,
            num_params=num_params,
            optimizer_bytes=sizes_by_kind["optimizer"],
        )
    else:
        work = roofline.decode_work(
            model,
            batch_size=plan.batch_size,
            context=plan.sequence_length,
            mesh=sizes,
            num_params=num_params,
        )
    return PreflightReport(
        mode=mode,
        topology=topology,
        mesh=sizes,
        num_params=num_params,
        tokens_per_step=plan.batch_size * (plan.sequence_length if mode == "train" else 1),
        memory=memory,
        total_bytes=total,
        compiler_flops=flops,
        work=work,
        roofline=roofline.roofline(work, topology.chip, sizes),
    )


def _lower_train(
    plan: Plan, module: LanguageModule, params: Any, shardings: Any, mesh: Mesh
) -> tuple[Any, dict[str, int]]:
    """The train step with its shardings, lowered; and bytes a chip holds by kind."""
    optimizer = make_optimizer(plan.optimizer, steps=plan.steps, only=plan.only)
    objective = language_modeling(
        module, z_loss=plan.z_loss, chunk_size=plan.chunk_size, shards=batch_shards(mesh)
    )
    step = make_train_step(
        objective,
        optimizer,
        accumulate=plan.accumulate,
        only=plan.only,
        ema_decay=plan.ema_decay,
        schedule=make_schedule(plan.optimizer, plan.steps),
    )
    state = jax.eval_shape(
        lambda p: TrainState.create(
            p, optimizer, jax.random.key(0), ema=plan.ema_decay is not None
        ),
        params,
    )
    state = _placed(state, shardings_like_params(state, params, shardings, mesh))
    rows = batch_sharding(mesh)
    shape = (plan.batch_size, plan.sequence_length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        for name, dtype in (
            ("tokens", jnp.int32),
            ("targets", jnp.int32),
            ("loss_mask", jnp.float32),
            ("segment_ids", jnp.int32),
            ("positions", jnp.int32),
        )
    }
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state, batch)
    sizes = {
        "parameters": _bytes_per_chip(state.params),
        "optimizer": _bytes_per_chip((state.opt_state, state.ema_params, state.step)),
        "batch": _bytes_per_chip(batch),
        "cache": 0,
    }
    return lowered, sizes


def _lower_decode(
    plan: Plan, module: LanguageModule, params: Any, mesh: Mesh
) -> tuple[Any, dict[str, int]]:
    """One greedy token for every row, lowered; and bytes a chip holds by kind."""
    rules = logical_rules(module.config, mesh)
    cache = jax.eval_shape(lambda: init_cache(module.config, plan.batch_size, plan.sequence_length))

    def sharding_of(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, nn.logical_to_mesh_axes(names, rules) or PartitionSpec())

    cache = _placed(cache, jax.tree.map(sharding_of, cache, _cache_axes(cache)))
    rows = NamedSharding(mesh, nn.logical_to_mesh_axes(("batch", None), rules) or PartitionSpec())
    tokens = jax.ShapeDtypeStruct((plan.batch_size, 1), jnp.int32, sharding=rows)

    def decode(params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = module.apply({"params": params}, tokens, cache=cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    out = (rows, jax.tree.map(lambda leaf: leaf.sharding, cache))
    lowered = jax.jit(decode, donate_argnums=1, out_shardings=out).lower(params, cache, tokens)
    sizes = {
        "parameters": _bytes_per_chip(params),
        "optimizer": 0,
        "batch": _bytes_per_chip(tokens),
        "cache": _bytes_per_chip(cache),
    }
    return lowered, sizes


def _cache_axes(cache: Any) -> Any:
    """A tree like the cache's, with a tuple of logical axis names in place of each array.

    What `cache.logical_axes()` says where there is one; otherwise arrays of five axes are keys and
    values of stacked layers, and others are split by rows.
    """
    if hasattr(cache, "logical_axes"):
        return cache.logical_axes()
    slots = ("layers", "batch", "kv_length", "kv_heads", "head_dim")
    return jax.tree.map(lambda leaf: slots if len(leaf.shape) == 5 else ("batch",), cache)


def _compiled_memory(
    lowered: Any, sizes: dict[str, int]
) -> tuple[Memory | None, int, float | None]:
    """(memory by kind, total bytes a chip, the compiler's FLOPs); the first and last None if the
    compiler refused because the step does not fit."""
    try:
        with warnings.catch_warnings():
            # What is compiled for absent devices cannot be read back from jax's persistent cache.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        required = _required_bytes(str(error))
        if required is None:
            raise PreflightError(
                f"the TPU compiler refused the step: {_first_line(error)}"
            ) from error
        return None, required, None
    analysis = compiled.memory_analysis()
    temporary = (
        analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + max(0, analysis.argument_size_in_bytes - sum(sizes.values()))  # padding of arguments
    )
    memory = Memory(**sizes, temporary=temporary, program=analysis.generated_code_size_in_bytes)
    costs = compiled.cost_analysis() or {}
    return memory, memory.total, costs.get("flops")


def _required_bytes(message: str) -> int | None:
    """How much memory the compiler says it would need, if that is why it refused."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    match = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", message)
    match = match or re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    return int(float(match[1]) * units[match[2]]) if match else None


def _nearest_change(
    plan: Plan,
    topology: Topology,
    mode: Mode,
    report: PreflightReport,
    progress: Callable[[str], None],
) -> Change | None:
    """The first of the candidates that compiles and fits."""
    trials = 0
    for overrides, candidate, slice_ in _candidates(plan, topology, mode, report.mesh):
        if not _could_fit(candidate, slice_, mode):
            continue
        if trials == _MAX_TRIALS:
            return None
        trials += 1
        changed = " ".join(f"{key}={value}" for key, value in overrides.items())
        progress(f"it does not fit; trying {changed or 'the same config'} on {slice_}")
        try:
            trial = _compile(candidate, slice_, mode)
        except (MeshError, PreflightError):
            continue
        if trial.fits:
            return Change(overrides, slice_, trial.total_bytes)
    return None


def _candidates(
    plan: Plan, topology: Topology, mode: Mode, mesh: dict[str, int]
) -> Iterator[tuple[dict[str, Any], Plan, Topology]]:
    """From near to far: what costs only time, the layout, the problem's size, more chips."""
    if mode == "train":
        yield from _train_candidates(plan, topology, mesh)
    else:
        yield from _decode_candidates(plan, topology, mesh)


def _train_candidates(
    plan: Plan, topology: Topology, mesh: dict[str, int]
) -> Iterator[tuple[dict[str, Any], Plan, Topology]]:
    weaker = ("none", "dots", "dots_no_batch", "full")
    saver = "full" if weaker.index(plan.model.remat) < 3 else None
    base: dict[str, Any] = {}
    frugal = plan
    if saver:
        for remat in dict.fromkeys(("dots_no_batch", "full")):
            if weaker.index(remat) > weaker.index(plan.model.remat):
                changed = dataclasses.replace(plan, model=plan.model.replace(remat=remat))
                yield {"model.remat": remat}, changed, topology
        base = {"model.remat": "full"}
        frugal = dataclasses.replace(plan, model=plan.model.replace(remat="full"))

    rows = mesh["data"] * mesh["fsdp"]
    most = plan.batch_size // rows  # micro-batches of one row a chip
    accumulate = [n for n in range(plan.accumulate + 1, most + 1) if most % n == 0]
    for count in accumulate[:1] + accumulate[-1:]:
        changed = dataclasses.replace(frugal, accumulate=count)
        yield {**base, "training.accumulate": count}, changed, topology

    for layout in _layouts(plan, topology.chips):
        overrides = {**base, **{f"mesh.{axis}": size for axis, size in layout.items()}}
        rows = layout["data"] * layout["fsdp"]
        changed = dataclasses.replace(frugal, mesh=MeshConfig(**layout))
        if plan.batch_size % (rows * plan.accumulate) == 0:
            yield overrides, changed, topology
            most = plan.batch_size // rows
            if most > plan.accumulate:
                changed = dataclasses.replace(changed, accumulate=most)
                yield {**overrides, "training.accumulate": most}, changed, topology

    larger = topology
    for _ in range(6):
        larger = larger.doubled()
        batch = -(-plan.batch_size // larger.chips) * larger.chips
        layout = {"data": 1, "fsdp": larger.chips, "tensor": 1, "sequence": 1}
        overrides = {**base, **{f"mesh.{axis}": size for axis, size in layout.items()}}
        changed = dataclasses.replace(
            frugal, mesh=MeshConfig(**layout), batch_size=batch, accumulate=1
        )
        if batch != plan.batch_size:
            overrides["data.batch_size"] = batch
        if plan.accumulate != 1:
            overrides["training.accumulate"] = 1
        yield overrides, changed, larger


def _layouts(plan: Plan, chips: int) -> Iterator[dict[str, int]]:
    """Meshes that split the state over all chips: by fsdp alone, then with tensor 2, 4, 8."""
    for tensor in (1, 2, 4, 8):
        layout = {"data": 1, "fsdp": chips // tensor, "tensor": tensor, "sequence": 1}
        if chips % tensor == 0 and layout != plan.mesh.model_dump():
            yield layout


def _decode_candidates(
    plan: Plan, topology: Topology, mesh: dict[str, int]
) -> Iterator[tuple[dict[str, Any], Plan, Topology]]:
    tensor = mesh["tensor"]
    while (tensor := tensor * 2) <= topology.chips:
        layout = {"data": topology.chips // tensor, "fsdp": 1, "tensor": tensor, "sequence": 1}
        overrides = {f"mesh.{axis}": size for axis, size in layout.items()}
        yield overrides, dataclasses.replace(plan, mesh=MeshConfig(**layout)), topology
    batch = plan.batch_size
    while (batch := batch // 2) >= mesh["data"] * mesh["fsdp"]:
        yield {"data.batch_size": batch}, dataclasses.replace(plan, batch_size=batch), topology
    length = plan.sequence_length
    while (length := length // 2) >= 512:
        changed = dataclasses.replace(plan, sequence_length=length)
        yield {"data.sequence_length": length}, changed, topology
    larger = topology
    for _ in range(4):
        larger = larger.doubled()
        tensor = math.gcd(larger.chips, plan.model.num_heads)
        layout = {"data": 1, "fsdp": larger.chips // tensor, "tensor": tensor, "sequence": 1}
        overrides = {f"mesh.{axis}": size for axis, size in layout.items()}
        yield overrides, dataclasses.replace(plan, mesh=MeshConfig(**layout)), larger


def _could_fit(plan: Plan, topology: Topology, mode: Mode) -> bool:
    """False if what must be in memory at all times is already too much: saves a compilation."""
    model = plan.model
    cost = cost_of(model)
    num_params = cost.matmul_params(model)
    sizes = plan.mesh.sizes(topology.chips)
    if mode == "train":
        width = jnp.dtype(model.param_dtype).itemsize
        # Parameters and gradients; the two moments of AdamW, none that matter for Adafactor.
        copies = {"adamw": 4, "lion": 3, "muon": 3, "adafactor": 2}[plan.optimizer.name]
        if plan.only is not None:
            copies = 1
        needed = num_params * width * copies / (sizes["fsdp"] * sizes["tensor"])
        # Even full rematerialisation keeps the input of each layer.
        chips = sizes["data"] * sizes["fsdp"] * sizes["sequence"]
        tokens = plan.batch_size / plan.accumulate * plan.sequence_length / chips
        width = jnp.dtype(model.dtype).itemsize
        needed += tokens * model.num_layers * model.hidden_size * width
    else:
        width = jnp.dtype(model.dtype).itemsize
        needed = num_params * width / (sizes["fsdp"] * sizes["tensor"])
        rows = plan.batch_size / (sizes["data"] * sizes["fsdp"])
        divided = 1 if model.num_kv_heads % sizes["tensor"] else sizes["tensor"]
        needed += rows * cost.cache_bytes(model, 1, plan.sequence_length) / divided
    return needed < topology.chip.hbm_bytes


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _bytes_per_chip(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        shard = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shard) * leaf.dtype.itemsize
    return total


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
