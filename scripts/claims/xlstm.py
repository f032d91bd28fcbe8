"""xLSTM in small: constant cost of decoding, the input gate's bias, chunk sizes, document borders.

    python scripts/claims/xlstm.py                   # about ten minutes on two cores
    python scripts/claims/xlstm.py --part decoding   # or bias, chunks, borders
    python scripts/claims/xlstm.py --quick           # seconds: a smoke test

The paper (arXiv:2503.13427) trains 7B parameters; this shows what does not need them.

Part "decoding": an xLSTM and a transformer of the same width, depth and head count in the same
library, milliseconds a token and bytes of cache after prompts of 128 … 32,768 tokens, at random
weights: the cost does not depend on them. The crossing length is where the xLSTM becomes faster;
below it attention over a short cache is.

Part "bias": byte models on Python sources, three seeds, input-gate bias -10 against 0: validation
loss, and the 99th percentile of the gradient's norm after warm-up. The soft cap's effect does not
show at this size.

Part "chunks": one sequence in chunks of 1 … T, greatest difference and time of each.

Part "borders": a document that opens with the weakest input gate (-15) after one with the
strongest (+15); its outputs against those of the document alone, with exact borders and with the
forget gate of -25 that the paper's code puts there.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import write_report

from jaxlab.models import (
    ModelConfig,
    XLSTMConfig,
    init_cache,
    init_params,
    module_for,
    unstack_layers,
)
from jaxlab.objectives import cross_entropy
from pallas_kernels import mlstm

PARTS = ("decoding", "bias", "chunks", "borders")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--output", default="claims", help="folder for JSON and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, seconds")
    arguments = parser.parse_args()
    parts = {"decoding": decoding, "bias": bias, "chunks": chunks, "borders": borders}
    for name, part in parts.items():
        if arguments.part in (name, "all"):
            part(arguments)


def decoding(arguments: argparse.Namespace) -> None:
    contexts = (64, 128) if arguments.quick else (128, 512, 2048, 8192, 32768)
    tokens = 4 if arguments.quick else 64
    width, layers = (64, 2) if arguments.quick else (256, 4)
    configs = {
        "xlstm": XLSTMConfig(vocab_size=512, embedding_dim=width, num_blocks=layers, num_heads=4),
        "transformer": ModelConfig(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=704,
            num_layers=layers,
            num_heads=4,
            max_position_embeddings=65536,
        ),
    }
    rows: list[dict[str, Any]] = [{"context": context} for context in contexts]
    for name, config in configs.items():
        module = module_for(config)
        params = unstack_layers(init_params(module, jax.random.key(0)), config)

        @partial(jax.jit, donate_argnums=1)
        def extend(params: Any, cache: Any, block: jax.Array, module: Any = module):
            logits, cache = module.apply({"params": params}, block, cache=cache)
            return jnp.argmax(logits[:, -1:], -1).astype(jnp.int32), cache

        for row in rows:
            context = row["context"]
            cache = init_cache(config, 1, context + 2 * tokens, unstacked=True)
            row[f"{name} cache KiB"] = cache.nbytes / 1024
            step = min(512, context)
            block = jnp.zeros((1, step), jnp.int32)
            for _ in range(context // step):
                token, cache = extend(params, cache, block)
            for _ in range(tokens):  # compiles, and settles what is in the caches of the machine
                token, cache = extend(params, cache, token)
            seconds = []
            for _ in range(tokens):
                began = time.perf_counter()
                token, cache = jax.block_until_ready(extend(params, cache, token))
                seconds.append(time.perf_counter() - began)
            row[f"{name} ms"] = 1000 * float(np.median(seconds))
    ratios = {name: rows[-1][f"{name} ms"] / rows[0][f"{name} ms"] for name in configs}
    crossing = next((r["context"] for r in rows if r["xlstm ms"] < r["transformer ms"]), None)

    def figure(axes: Any) -> None:
        for name in configs:
            axes.loglog(contexts, [row[f"{name} ms"] for row in rows], "o-", label=name)
        axes.set(xlabel="tokens before", ylabel="ms a token")
        axes.legend(frameon=False)

    write_report(
        "xlstm_decoding",
        ["context", *(f"{name} {unit}" for name in configs for unit in ("ms", "cache KiB"))],
        rows,
        figure,
        [
            f"Width {width}, {layers} layers, batch 1, float32, medians of {tokens} tokens.",
            f"Last context against first: xlstm {ratios['xlstm']:.2f}, "
            f"transformer {ratios['transformer']:.2f}.",
            f"The xLSTM is the faster one from {crossing} tokens on."
            if crossing
            else "The transformer is the faster one at every length here.",
        ],
        arguments.output,
    )


def bias(arguments: argparse.Namespace) -> None:
    seeds = range(1 if arguments.quick else 3)
    steps = 4 if arguments.quick else 200
    train, held_out = python_bytes()
    rows = []
    for value in (-10.0, 0.0):
        for seed in seeds:
            loss, norms = train_bytes(train, held_out, value, seed, steps)
            late = norms[min(30, steps // 2) :]
            rows.append(
                {
                    "input-gate bias": value,
                    "seed": seed,
                    "validation nats": loss,
                    "p99 gradient norm": float(np.percentile(late, 99)),
                }
            )
            print(rows[-1], flush=True)

    def figure(axes: Any) -> None:
        for value in (-10.0, 0.0):
            found = [row["validation nats"] for row in rows if row["input-gate bias"] == value]
            axes.plot([f"{value:g}"] * len(found), found, "o")
        axes.set(xlabel="input-gate bias at the start", ylabel="validation nats a byte")

    write_report(
        "xlstm_bias",
        list(rows[0]),
        rows,
        figure,
        [f"Byte model, width 64, 3 blocks, 4 heads, {steps} steps of 8 rows of 128 bytes."],
        arguments.output,
    )


def python_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's sources, whole files to train on and others to hold out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for index, file in enumerate(files):
        parts[index % 10 == 0].append(file.read_bytes())
    return tuple(
        np.frombuffer(b"\n".join(part), np.uint8).astype(np.int32) for part in parts.values()
    )


def train_bytes(
    train: np.ndarray, held_out: np.ndarray, igate_bias: float, seed: int, steps: int
) -> tuple[float, np.ndarray]:
    """Validation loss after training, and the gradient's norm at each step."""
    config = XLSTMConfig(
        vocab_size=256,
        embedding_dim=64,
        num_blocks=3,
        num_heads=4,
        ffn_proj_factor=3.0,
        igate_bias_init=igate_bias,
    )
    module = module_for(config)
    params = init_params(module, jax.random.key(seed))
    rate = optax.linear_schedule(0.0, 1e-2, 30)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    state = optimizer.init(params)

    def loss_of(params: Any, rows: jax.Array) -> jax.Array:
        return cross_entropy(module.apply({"params": params}, rows[:, :-1]), rows[:, 1:])[0]

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        grads = jax.grad(loss_of)(params, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.global_norm(grads)

    def draw(text: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
        starts = rng.integers(0, len(text) - 129, count)
        return text[starts[:, None] + np.arange(129)]

    rng = np.random.default_rng(seed)
    norms = []
    for _ in range(steps):
        params, state, norm = update(params, state, draw(train, rng, 8))
        norms.append(float(norm))
    rows = draw(held_out, np.random.default_rng(1000), 128)
    return float(jax.jit(loss_of)(params, rows)), np.asarray(norms)


def cell_inputs(length: int, seed: int = 0) -> list[jax.Array]:
    """`q, k, v, i, f` of one row and four heads, ordinary gates."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(1, length, 4, 64), (1, length, 4, 64), (1, length, 4, 128)]
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)]
    i = jax.random.normal(keys[3], (1, length, 4))
    return [*arrays, i, 3 + jax.random.normal(keys[4], (1, length, 4))]


def chunks(arguments: argparse.Namespace) -> None:
    length = 64 if arguments.quick else 4096
    inputs = cell_inputs(length)
    rows: list[dict[str, Any]] = []
    want = None
    for size in (7, 16, 64, 128, 256, 1024, length):
        call = jax.jit(partial(mlstm, chunk_size=size))
        h = np.asarray(call(*inputs))
        want = h if want is None else want
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(call(*inputs))
            seconds.append(time.perf_counter() - began)
        memory = call.lower(*inputs).compile().memory_analysis()
        rows.append(
            {
                "chunk": size,
                "difference": float(np.abs(h - want).max() / np.abs(want).max()),
                "ms": 1000 * float(np.median(seconds)),
                "temporaries MiB": memory.temp_size_in_bytes / 2**20,
            }
        )

    def figure(axes: Any) -> None:
        axes.loglog([row["chunk"] for row in rows], [row["ms"] for row in rows], "o-")
        axes.set(xlabel="tokens a chunk", ylabel="ms")

    write_report(
        "xlstm_chunks",
        list(rows[0]),
        rows,
        figure,
        [f"{length} tokens, 4 heads of 64 and 128; difference to the first row, of the largest h."],
        arguments.output,
    )


def borders(arguments: argparse.Namespace) -> None:
    length = 16 if arguments.quick else 200
    half = length // 2
    rows = []
    for seed in range(3):
        q, k, v, i, f = cell_inputs(length, seed)
        i = jnp.where(jnp.arange(length)[None, :, None] < half, 15.0, -15.0)
        i = jnp.broadcast_to(i, f.shape)
        alone = mlstm(*(x[:, half:] for x in (q, k, v, i, f)))
        segments = (jnp.arange(length) >= half).astype(jnp.int32)[None]
        weak = f.at[:, half].set(-25.0)
        packed = {
            "exact borders": mlstm(q, k, v, i, f, segment_ids=segments),
            "forget gate -25": mlstm(q, k, v, i, weak),
        }
        scale = float(jnp.abs(alone).max())
        row = {"seed": seed}
        for name, h in packed.items():
            row[name] = float(jnp.abs(h[:, half:] - alone).max()) / scale
        rows.append(row)
    write_report(
        "xlstm_borders",
        list(rows[0]),
        rows,
        None,
        ["Greatest difference to the second document alone, of its largest output."],
        arguments.output,
    )


if __name__ == "__main__":
    main()
