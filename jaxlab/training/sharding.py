"""One device mesh, and one table that says which mesh axis splits which axis of an array.

Model code names the axes of its arrays (`"heads"`, `"batch"`, …); `LOGICAL_RULES` maps the names to
mesh axes; nothing else in the library spells out a sharding. Run traced code inside `use_mesh`, so
that the constraints in the model take effect.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from pydantic import BaseModel, ConfigDict, Field

from jaxlab.errors import MeshError
from jaxlab.models.families import AnyModelConfig
from jaxlab.models.parameters import logical_axes

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

# Logical axis -> mesh axis. A name that is not here is not split.
LOGICAL_RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # activations
    ("batch", ("data", "fsdp")),
    ("length", "sequence"),
    ("kv_length", None),  # every query shard sees all keys
    ("act_embed", None),
    # activations and parameters
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    # parameters
    ("embed", "fsdp"),
    ("head_dim", None),
    ("layers", None),
)

# These are replicated where the mesh does not divide them, as inference engines do with the few
# key/value heads of a GQA model; the others must divide.
REPLICABLE = ("vocab", "kv_heads")

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


class MeshConfig(BaseModel):
    """How many devices lie along each mesh axis; one axis may be -1, all that are left."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: int = Field(-1, description="Copies of the model, each with its part of the batch.")
    fsdp: int = Field(1, description="Devices over which parameters and batch are split.")
    tensor: int = Field(1, description="Devices over which heads, MLP and vocabulary are split.")
    sequence: int = Field(1, description="Devices over which the tokens of a row are split.")

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Axis sizes with -1 filled in.

        Raises:
          MeshError: an axis is 0 or below -1, two are -1, or the product is not `num_devices`.
        """
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise MeshError(
                    f"mesh.{axis} is {size}: give a positive number, or -1 for the rest"
                )
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise MeshError(f"mesh.{' and mesh.'.join(free)} are both -1: only one axis can be")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and num_devices % fixed == 0:
            sizes[free[0]] = num_devices // fixed
        if math.prod(sizes.values()) != num_devices:
            nearest = _nearest_mesh(sizes, num_devices, lambda candidate: True)
            raise MeshError(
                f"mesh {_describe(sizes)} does not make {num_devices} devices; "
                f"{_describe(nearest)} would"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (default: all), in the order that suits their network.

    Raises:
      MeshError: as `MeshConfig.sizes`.
    """
    sizes = config.sizes(len(devices if devices is not None else jax.devices()))
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )


def check_mesh(
    config: MeshConfig | Mesh,
    model: AnyModelConfig,
    *,
    num_devices: int,
    batch_size: int,
    sequence_length: int,
    accumulate: int = 1,
    batch_ramp: Sequence[int] = (),
) -> dict[str, int]:
    """Check, before anything is built, that a mesh divides the model and the batch.

    Args:
      batch_size, batch_ramp: rows of a batch, and of the smaller ones before it.

    Returns:
      The axis sizes.

    Raises:
      MeshError: names the axis, the sizes that do not divide, and a mesh that would work.
    """
    sizes = dict(config.shape) if isinstance(config, Mesh) else config.sizes(num_devices)
    batches = [("data.batch_size", batch_size), *(("data.batch_ramp", n) for n in batch_ramp)]

    def faults(sizes: dict[str, int]) -> list[str]:
        rows = sizes["data"] * sizes["fsdp"]
        width, heads, inner = model.hidden_size, model.num_heads, model.intermediate_size
        checks = [
            *(("data*fsdp", rows, *_micro_batch(name, n, accumulate)) for name, n in batches),
            ("fsdp", sizes["fsdp"], f"model.hidden_size {width}", width),
            ("tensor", sizes["tensor"], f"model.num_heads {heads}", heads),
            ("tensor", sizes["tensor"], f"model.intermediate_size {inner}", inner),
            (
                "sequence",
                sizes["sequence"],
                f"data.sequence_length {sequence_length}",
                sequence_length,
            ),
        ]
        return [
            f"mesh axis {axis} = {size} does not divide {what}"
            for axis, size, what, value in checks
            if value % size
        ]

    for name, size in batches:
        if size % accumulate:
            raise MeshError(
                f"{name} {size} is not a multiple of training.accumulate {accumulate}: "
                f"use a batch of {-(-size // accumulate) * accumulate}"
            )
    found = faults(sizes)
    if not found:
        return sizes
    working = _nearest_mesh(sizes, num_devices, lambda candidate: not faults(candidate))
    if working:
        remedy = f"{_describe(working)} would work"
    else:
        rows = num_devices * accumulate
        larger = " and ".join(f"{name} {-(-size // rows) * rows}" for name, size in batches)
        remedy = (
            f"no mesh of {num_devices} devices would; with {larger}, "
            f"{_describe({'data': num_devices})} would work"
        )
    raise MeshError(f"{'; '.join(found)}. {remedy}")


def logical_rules(model: AnyModelConfig, mesh: Mesh) -> Rules:
    """`LOGICAL_RULES` for one model on one mesh: what may be replicated is, where it must be."""
    sizes = {"vocab": model.vocab_size, "kv_heads": model.num_kv_heads}
    return tuple(
        (name, None if name in REPLICABLE and sizes[name] % mesh.shape[str(axis)] else axis)
        for name, axis in LOGICAL_RULES
    )


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Make `mesh` and `rules` the ones that the model's logical axis names refer to."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def batch_shards(mesh: Mesh) -> tuple[int, int]:
    """Over how many devices a batch `[rows, tokens]` is split, along each axis."""
    return mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch's `[rows, tokens]` arrays."""
    spec = nn.logical_to_mesh_axes(("batch", "length"), LOGICAL_RULES)
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(module: nn.Module, mesh: Mesh) -> Any:
    """A tree like the parameters', with a `NamedSharding` in place of each array."""
    rules = logical_rules(module.config, mesh)
    return jax.tree.map(
        lambda names: NamedSharding(mesh, nn.logical_to_mesh_axes(names, rules)),
        logical_axes(module),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def shardings_like_params(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for a tree that holds things shaped like parameters, such as an optimizer state.

    A leaf whose path ends in a parameter's path is split as that parameter is; if it lacks one of
    its axes (Adafactor's factored statistics) as the remaining axes are; else it is replicated.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s.
      shardings: what `param_shardings` gives for them.
    """
    known = {
        _names(path): (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        names = _names(path)
        for start in range(len(names)):
            if names[start:] in known:
                return NamedSharding(mesh, _spec_of_part(leaf.shape, *known[names[start:]]))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def _micro_batch(name: str, size: int, accumulate: int) -> tuple[str, float]:
    rows = size / accumulate
    if accumulate == 1:
        return f"{name} {size}", rows
    return f"{name} {size} / training.accumulate {accumulate} = {rows:g} rows", rows


def _spec_of_part(
    shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    if shape == whole:
        return spec
    axes = tuple(spec) + (None,) * (len(whole) - len(spec))
    for dropped in range(len(whole)):
        if shape == whole[:dropped] + whole[dropped + 1 :]:
            return PartitionSpec(*axes[:dropped], *axes[dropped + 1 :])
    return PartitionSpec()


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _describe(sizes: dict[str, int]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in sizes.items()) + "}"


def _nearest_mesh(wanted: dict[str, int], num_devices: int, accept: Any) -> dict[str, int]:
    """The acceptable mesh of `num_devices` whose axis sizes are closest in ratio to the wanted."""
    target = np.array([max(size, 1) for size in wanted.values()], float)
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    best, best_distance = {}, math.inf
    for first in itertools.product(divisors, repeat=len(MESH_AXES) - 1):
        rest, remainder = divmod(num_devices, math.prod(first))
        if remainder or not rest:
            continue
        sizes = (rest, *first)
        distance = float(np.abs(np.log(np.array(sizes) / target)).sum())
        candidate = dict(zip(MESH_AXES, sizes, strict=True))
        if distance < best_distance and accept(candidate):
            best, best_distance = candidate, distance
    return best
