#!/usr/bin/env python
"""Does the 7B checkpoint's directory load onto eight devices without a copy of it on the host?

Writes a directory with the names, shapes, shards and types of NX-AI/xLSTM-7b: six float32 files of
27.5 GB in all, which take up little of the disk, because only the first row of each tensor is
written. Loads it in bfloat16 onto eight virtual devices (fsdp 4, tensor 2), compares the first
rows, and reports how much memory the process needed beyond the 13.7 GB of the result.

    python scripts/check_xlstm_7b.py --blocks 8     # a quarter of the model, on a small machine
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import numpy as np

from jaxlab.checkpoints import config_to_hf, load_params, read_config
from jaxlab.checkpoints.layout import hf_layout
from jaxlab.checkpoints.safetensors_file import header_bytes
from jaxlab.models import XLSTM, XLSTMConfig
from jaxlab.training.sharding import MeshConfig, make_mesh, param_shardings

SHARDS = 6
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=32, help="Of the model's 32 blocks.")
    parser.add_argument("--directory", type=Path, help="Where to write; default: a temporary one.")
    arguments = parser.parse_args()
    config = XLSTMConfig.preset("7b", num_blocks=arguments.blocks)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        directory = Path(temporary)
        write(directory, config)
        report = load(directory)
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["overhead_in_largest_parameters"] <= 2 else 1)


def tensors_of(config: XLSTMConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order of the files."""
    return {
        entry.names[0].format(layer): entry.stored_shape
        for entry in hf_layout(config)
        for layer in (entry.layers_of(config) if entry.stacked else (0,))
    }


def first_row(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that only this tensor begins with, exact in bfloat16."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.integers(-64, 64, shape[-1]).astype(np.float32)


def write(directory: Path, config: XLSTMConfig) -> None:
    (directory / "config.json").write_text(json.dumps(config_to_hf(config)))
    tensors = list(tensors_of(config).items())
    weight_map = {}
    for shard, part in enumerate(np.array_split(np.arange(len(tensors)), SHARDS), 1):
        name = f"model-{shard:05d}-of-{SHARDS:05d}.safetensors"
        own = [tensors[index] for index in part]
        with (directory / name).open("wb") as file:
            file.write(header_bytes(own, np.float32))
            for tensor, shape in own:
                weight_map[tensor] = name
                row = first_row(tensor, shape)
                file.write(row.tobytes())
                file.seek((int(np.prod(shape)) - row.size) * 4, os.SEEK_CUR)  # a hole
            file.truncate(file.tell())
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def load(directory: Path) -> dict[str, float]:
    config = read_config(directory).replace(param_dtype="bfloat16")
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    shardings = param_shardings(XLSTM(config), mesh)
    before = peak_bytes()
    began = time.perf_counter()
    params = load_params(directory, config, shardings=shardings)
    seconds = time.perf_counter() - began
    overhead = peak_bytes() - before
    leaves = jax.tree.leaves(params)
    held = sum(leaf.nbytes for leaf in leaves)
    largest = max(leaf.nbytes for leaf in leaves)
    for entry in hf_layout(config):
        leaf = params
        for key in entry.path:
            leaf = leaf[key]
        layers = entry.layers_of(config) if entry.stacked else (None,)
        for row in {0, len(layers) - 1}:
            value = np.asarray(leaf[row] if entry.stacked else leaf).astype(np.float32)
            stored = entry.unview(value)
            name = entry.names[0].format(layers[row])
            wanted = first_row(name, entry.stored_shape)
            found = stored.reshape(-1)[: wanted.size]
            assert (found == wanted).all(), f"{name} is not where it belongs"
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "seconds": round(seconds, 1),
        "held_gb": held / 1e9,
        "beyond_gb": (overhead - held) / 1e9,
        "overhead_in_largest_parameters": (overhead - held) / largest,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
