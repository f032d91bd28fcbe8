"""A cache reduced to its states, and made again from them: what is worth keeping of a prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.models.layers import group_layers
from jaxlab.models.xlstm.cache import XLSTMCache, init_xlstm_cache
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.slstm import CONV_TAPS
from pallas_kernels.mlstm.lazy import fold_tokens

States = list[dict[str, jax.Array]]


def block_states(config: XLSTMConfig, cache: XLSTMCache) -> States:
    """The state of each block after all tokens of the cache, pending ones folded in.

    Returns:
      One dict a block: of mLSTM `c [B, H, Dqk, Dv]`, `n [B, H, Dqk]` and `m [B, H]`; of sLSTM
      `state [B, 4, H, Dh]` and `inputs [B, 3, D]`, the last inputs of its convolution.
    """
    used = cache.lengths - cache.folded

    def state(kind: str, slots: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if kind == "m":
            pending = jnp.arange(slots["k"].shape[1]) < used[:, None]
            new = fold_tokens(
                slots["k"],
                slots["v"],
                slots["i"],
                slots["f"],
                (slots["c"], slots["n"], slots["m"]),
                pending,
                input_gate=config.input_gate,
            )
            return dict(zip(("c", "n", "m"), new, strict=True))
        rows = jnp.arange(used.shape[0])
        columns = used[:, None] + jnp.arange(CONV_TAPS - 1)
        return {
            "state": slots["states"][rows, used],
            "inputs": slots["inputs"][rows[:, None], columns],
        }

    return [
        state(kind, slots)
        for kind, slots in zip(config.blocks, _by_block(config, cache), strict=True)
    ]


def cache_of_states(
    config: XLSTMConfig, states: States, lengths: jax.Array, **options: Any
) -> XLSTMCache:
    """The cache whose rows have read `lengths [B]` tokens and come to `states`, all committed.

    `options`: those of `init_xlstm_cache`.
    """
    cache = init_xlstm_cache(config, lengths.shape[0], **options)

    def slots_of(
        kind: str, empty: dict[str, jax.Array], state: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        if kind == "m":
            return {**empty, **{name: state[name].astype(empty[name].dtype) for name in state}}
        first = empty["states"].at[:, 0].set(state["state"])
        inputs = state["inputs"].astype(empty["inputs"].dtype)
        return {"states": first, "inputs": empty["inputs"].at[:, : CONV_TAPS - 1].set(inputs)}

    filled = [
        slots_of(kind, empty, state)
        for kind, empty, state in zip(config.blocks, _by_block(config, cache), states, strict=True)
    ]
    layers: Any = tuple(filled)
    if not cache.unstacked:
        layers = tuple(
            tuple(
                jax.tree.map(
                    lambda *x: jnp.stack(x),
                    *(
                        filled[group.start + repeat * len(group.kinds) + position]
                        for repeat in range(group.repeats)
                    ),
                )
                for position in range(len(group.kinds))
            )
            for group in group_layers(config.blocks)
        )
    # Copies: a jitted step may donate the cache.
    lengths, committed, folded = (jnp.array(lengths, jnp.int32) for _ in range(3))
    return cache.replace(lengths=lengths, committed=committed, folded=folded, layers=layers)


def _by_block(config: XLSTMConfig, cache: XLSTMCache) -> list[dict[str, jax.Array]]:
    """The slots of each block, first to last."""
    if cache.unstacked:
        return list(cache.layers)
    blocks = []
    for group, slots in zip(group_layers(config.blocks), cache.layers, strict=True):
        for repeat in range(group.repeats):
            blocks += [jax.tree.map(lambda x, r=repeat: x[r], own) for own in slots]
    return blocks
