"""What a step must compute, read and send, and how long a chip takes for each at best.

Counts are analytic: exact for matrix products, a stated model for memory and network traffic. The
compiler's own estimate counts a scanned body once and knows nothing of custom calls, so it cannot
replace them. The longest of the three times is the bound; it assumes perfect overlap and full
rates, so real steps are slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxlab.models import AnyModelConfig
from jaxlab.models.cost import cost_of

GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Chip:
    """A TPU chip.

    Attributes:
      hbm_bytes: memory a program may use, as the compiler says (a little less than is sold).
      peak_flops: bfloat16 operations a second.
      hbm_bandwidth: bytes a second.
      link_bandwidth: bytes a second over one link in one direction.
      torus_dims: dimensions of the network; a chip has two links in each.
    """

    name: str
    hbm_bytes: float
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    torus_dims: int


# Google's published figures (cloud.google.com/tpu/docs, jax-ml.github.io/scaling-book/tpus).
CHIPS = {
    "v4": Chip("v4", 31.25 * GIB, 275e12, 1.23e12, 45e9, 3),
    "v5e": Chip("v5e", 15.75 * GIB, 197e12, 0.82e12, 45e9, 2),
    "v5p": Chip("v5p", 95.73 * GIB, 459e12, 2.77e12, 90e9, 3),
    "v6e": Chip("v6e", 31.24 * GIB, 918e12, 1.64e12, 90e9, 2),
}


@dataclass(frozen=True)
class Work:
    """Work of one step on one chip.

    Attributes:
      model_flops: what the mathematics needs (the numerator of MFU).
      hardware_flops: with what rematerialisation computes again.
      hbm_bytes: read and written in the chip's memory.
      network_bytes: sent over links, by mesh axis.
    """

    model_flops: float
    hardware_flops: float
    hbm_bytes: float
    network_bytes: dict[str, float]


@dataclass(frozen=True)
class Roofline:
    """Seconds a step takes at least, by resource; `bound` names the longest."""

    compute: float
    memory: float
    network: float
    mfu: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        times = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(times, key=lambda name: times[name])


def train_flops(config: AnyModelConfig, batch_size: int, sequence_length: int) -> float:
    """Operations of a training step over a batch: 6 per parameter and token, and 3 times the
    forward pass of what mixes tokens, attention or cells."""
    cost = cost_of(config)
    tokens = batch_size * sequence_length
    mixing = batch_size * cost.mixing_flops(config, sequence_length, sequence_length)
    return 6.0 * cost.matmul_params(config) * tokens + 3.0 * mixing


def train_work(
    config: AnyModelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    accumulate: int,
    mesh: dict[str, int],
    num_params: int,
    optimizer_bytes: float,
) -> Work:
    """Work of a training step on one chip.

    Args:
      batch_size: rows over all chips; each micro-batch has `batch_size / accumulate`.
      mesh: sizes of the axes data, fsdp, tensor, sequence.
      num_params: all parameters.
      optimizer_bytes: optimizer state on one chip.
    """
    data, fsdp, tensor, sequence = (mesh.get(a, 1) for a in ("data", "fsdp", "tensor", "sequence"))
    chips = data * fsdp * tensor * sequence
    model = train_flops(config, batch_size, sequence_length) / chips
    # Full rematerialisation runs the layers' forward once more: a third on top.
    recompute = {"none": 0.0, "dots": 0.02, "dots_no_batch": 0.08, "full": 1 / 3}[config.remat]
    hardware = model * (1 + recompute)

    width = _BYTES[config.dtype]
    stored = _BYTES[config.param_dtype]
    tokens = batch_size * sequence_length / (data * fsdp * sequence)  # on one chip
    local_params = num_params / (fsdp * tensor)
    gathered = num_params / tensor * width  # what a chip multiplies with, in the compute type
    passes = 3 if config.remat == "full" else 2
    weights = passes * accumulate * gathered + 2 * accumulate * local_params * stored
    update = 2 * optimizer_bytes + 4 * local_params * stored
    cost = cost_of(config)
    whole, divided = cost.layer_activations(config)
    per_token = whole + divided / tensor
    logits = 4 * 3 * config.vocab_size / tensor
    activations = tokens * (config.num_layers * per_token * width * (passes + 1) + logits)

    layer_output = tokens * config.hidden_size * width
    rows = batch_size / (data * fsdp)
    exchanged = sequence * cost.sequence_bytes(config, tokens, rows) / tensor
    network = {
        # A ring all-gather or reduce-scatter sends (n-1)/n of the whole, an all-reduce twice that.
        "fsdp": accumulate * (passes * gathered + num_params / tensor * stored) * _ring(fsdp),
        "data": 2 * local_params * stored * _ring(data),
        # Two all-reduces a layer and pass: after attention or cell, and after the MLP.
        "tensor": config.num_layers * 2 * passes * 2 * layer_output * _ring(tensor),
        "sequence": config.num_layers * (passes + 1) * exchanged * _ring(sequence),
    }
    return Work(model, hardware, weights + update + activations, network)


def decode_work(
    config: AnyModelConfig,
    *,
    batch_size: int,
    context: int,
    mesh: dict[str, int],
    num_params: int,
) -> Work:
    """Work on one chip of decoding a token for each of `batch_size` rows of `context` tokens."""
    data, fsdp, tensor, sequence = (mesh.get(a, 1) for a in ("data", "fsdp", "tensor", "sequence"))
    chips = data * fsdp * tensor * sequence
    cost = cost_of(config)
    flops = 2.0 * cost.matmul_params(config) * batch_size
    flops += batch_size * cost.mixing_flops(config, 1, context)
    width = _BYTES[config.dtype]
    rows = batch_size / (data * fsdp)
    cache = rows * cost.decode_bytes(config, context) / tensor
    gathered = num_params / tensor * _BYTES[config.param_dtype]
    layer_output = rows * config.hidden_size * width
    network = {
        "fsdp": num_params / tensor * width * _ring(fsdp),
        "data": 0.0,
        "tensor": config.num_layers * 2 * 2 * layer_output * _ring(tensor),
        "sequence": 0.0,
    }
    return Work(flops / chips, flops / chips, gathered + cache, network)


def roofline(work: Work, chip: Chip, mesh: dict[str, int]) -> Roofline:
    """The times of `work` on a `chip` at full rates.

    A mesh axis has the share of the chip's links that its size asks for: of a torus with d
    dimensions, an axis over n of N chips spans about `d · log n / log N` of them (at least one),
    and a ring uses both directions of each.
    """
    chips = math.prod(mesh.values())
    network = 0.0
    for axis, sent in work.network_bytes.items():
        size = mesh.get(axis, 1)
        if size > 1:
            dims = max(1.0, chip.torus_dims * math.log(size) / math.log(chips))
            network += sent / (2 * chip.link_bandwidth * dims)
    compute = work.hardware_flops / chip.peak_flops
    memory = work.hbm_bytes / chip.hbm_bandwidth
    seconds = max(compute, memory, network)
    return Roofline(compute, memory, network, work.model_flops / chip.peak_flops / seconds)


def _ring(size: int) -> float:
    return (size - 1) / size
