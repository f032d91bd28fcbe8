"""An xLSTM language model as pure functions of parameters, tokens and cache.

    module = XLSTM(XLSTMConfig.preset("165m"))
    params = init_params(module, jax.random.key(0))
    logits = module.apply({"params": params}, tokens)
    logits, cache = module.apply({"params": params}, tokens, cache=cache)

The parameters of all blocks of a kind are stacked along a leading axis; the blocks run under
`lax.scan`, or unrolled with `unstack_layers` parameters, which decode faster on CPU.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxlab.models.layers import REMAT_POLICIES, LayerGroup, group_layers
from jaxlab.models.linear import Linear
from jaxlab.models.xlstm.blocks import MLSTMBlock, TokenInfo, small_init, soft_cap
from jaxlab.models.xlstm.cache import XLSTMCache
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.models.xlstm.norm import RMSNorm
from jaxlab.models.xlstm.slstm import SLSTMBlock

Params = Any

_BLOCKS = {"m": MLSTMBlock, "s": SLSTMBlock}
# Where in `params["layers"]` the stacked parameters of each kind of block are.
BLOCK_NAMES = {"m": "mlstm_block", "s": "slstm_block"}


class XLSTM(nn.Module):
    """The whole model (7B paper, arXiv:2503.13427, section 2); calls: see `__call__`."""

    config: XLSTMConfig

    def setup(self) -> None:
        config = self.config
        self.embed = self.param("embed", _init_embedding, config)["embedding"]
        self.layers = self._declare_layers()
        self.final_norm = RMSNorm(config, use_bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config, (config.vocab_size,), ("embed", "vocab"), kernel_init=small_init(config)
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        cache: XLSTMCache | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> Any:
        """Logits of the next token at every position.

        Args:
          tokens: int32 `[B, T]`.
          positions: not looked at: the model has no position information.
          segment_ids: int32 `[B, T]`; at a new id the memory is cleared, exactly. 0 marks padding,
            which leaves no trace wherever it is.
          cache: continue each row of this cache.
          num_tokens: with a cache, int32 `[B]`: only so many tokens of each row are real, the first
            ones; the rest is padding, its logits mean nothing. Default: all.

        Returns:
          Logits, float32 `[B, T, vocab_size]`; with a cache, `(logits, cache)`.
        """
        hidden = self.hidden_states(
            tokens, positions, segment_ids, cache=cache, num_tokens=num_tokens
        )
        if cache is None:
            return self.unembed(hidden)
        hidden, cache = hidden
        return self.unembed(hidden), cache

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        cache: XLSTMCache | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> Any:
        """As `__call__`, but what `unembed` reads: `[B, T, embedding_dim]` after the final norm."""
        del positions
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids cannot be used with a cache: give each document a row")
        if cache is None and num_tokens is not None:
            raise ValueError("num_tokens goes with a cache: use segment_ids, 0 for padding")
        if cache is not None:
            cache.check_model(self.config)
        x = jnp.take(self.embed, tokens, axis=0).astype(jnp.dtype(self.config.dtype))
        x = nn.with_logical_constraint(x, ("batch", "length", "act_embed"))
        move = None if cache is None else cache.move(tokens.shape[1], num_tokens)
        slots = None
        if not self.is_initializing():  # blocks declare their parameters themselves
            info = TokenInfo(segment_ids, move)
            x, slots = _run_blocks(self.config, self.layers, x, info, cache)
        hidden = self.final_norm(x)
        if self.is_initializing():
            self.unembed(hidden)
        if cache is None:
            return hidden
        assert move is not None
        return hidden, cache.advanced(move, slots)

    def unembed(self, hidden: Float[Array, "*rows D"]) -> Float32[Array, "*rows V"]:
        """Logits, float32 `[..., vocab_size]`, of `hidden [..., D]`, capped if so set."""
        if self.config.tie_word_embeddings:
            logits = jnp.einsum(
                "...d,vd->...v",
                hidden,
                self.embed.astype(hidden.dtype),
                preferred_element_type=jnp.float32,
            )
        else:
            logits = self.lm_head(hidden).astype(jnp.float32)
        logits = soft_cap(logits, self.config.output_logit_soft_cap)
        if logits.ndim == 3:
            logits = nn.with_logical_constraint(logits, ("batch", "length", "vocab"))
        return logits

    def _declare_layers(self) -> Params:
        if not self.is_initializing():
            return self.get_variable("params", "layers")
        return self.param("layers", _init_layers, self.config)


def unstack_blocks(params: Params, config: XLSTMConfig) -> Params:
    """The same parameters with `layers` a tuple of one tree per block; see `unstack_layers`."""
    stacked = params["layers"]
    if isinstance(stacked, tuple):
        return params
    seen = dict.fromkeys(config.blocks, 0)
    layers = []
    for kind in config.blocks:
        layers.append(jax.tree.map(lambda a, i=seen[kind]: a[i], stacked[BLOCK_NAMES[kind]]))
        seen[kind] += 1
    return {**params, "layers": tuple(layers)}


def _init_embedding(key: jax.Array, config: XLSTMConfig) -> Params:
    initializer = nn.with_logical_partitioning(small_init(config), ("vocab", "embed"))
    shape = (config.vocab_size, config.embedding_dim)
    return {"embedding": initializer(key, shape, jnp.dtype(config.param_dtype))}


def _init_layers(key: jax.Array, config: XLSTMConfig) -> Params:
    """Boxed parameters of all blocks, those of a kind stacked."""
    keys = jax.random.split(key, config.num_blocks)
    x = jnp.zeros((1, 1, config.embedding_dim), jnp.dtype(config.dtype))
    layers = {}
    for kind in sorted(set(config.blocks)):
        where = [index for index, letter in enumerate(config.blocks) if letter == kind]
        index = jnp.asarray(where, jnp.float32)

        def init_one(
            key: jax.Array, index: jax.Array, kind: str = kind, boxed: bool = False
        ) -> Params:
            params = _block(config, kind, index).init(key, x, TokenInfo())["params"]
            return params if boxed else nn.unbox(params)

        boxes = jax.eval_shape(lambda k, i, make=init_one: make(k, i, boxed=True), key, index[0])
        stacked = jax.vmap(init_one)(keys[jnp.asarray(where)], index)
        layers[BLOCK_NAMES[kind]] = jax.tree.map(
            lambda box, array: nn.LogicallyPartitioned(array, ("layers", *box.names)),
            boxes,
            stacked,
            is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned),
        )
    return layers


def _block(config: XLSTMConfig, kind: str, index: Any = None) -> nn.Module:
    if kind == "s":
        return SLSTMBlock(config, 0 if index is None else index, parent=None)
    return MLSTMBlock(config, parent=None)


def _run_blocks(
    config: XLSTMConfig, layers: Params, x: jax.Array, info: TokenInfo, cache: XLSTMCache | None
) -> tuple[jax.Array, Any]:
    """The residual stream after all blocks, and the cache's layers with the tokens appended."""
    if isinstance(layers, tuple):
        if cache is not None and not cache.unstacked:
            raise ValueError("unstacked parameters need a cache made with unstacked=True")
        all_slots = []
        for index, (kind, params) in enumerate(zip(config.blocks, layers, strict=True)):
            slots = None if cache is None else cache.layers[index]
            x, slots = _block(config, kind).apply({"params": params}, x, info, slots)
            all_slots.append(slots)
        return x, tuple(all_slots)
    if cache is not None and cache.unstacked:
        raise ValueError("an unstacked cache needs unstacked parameters: see unstack_layers")
    all_slots = []
    seen = dict.fromkeys(config.blocks, 0)
    for index, group in enumerate(group_layers(config.blocks)):
        slots = None if cache is None else cache.layers[index]
        x, slots = _run_group(config, group, seen, layers, x, info, slots)
        for kind in group.kinds:
            seen[kind] += group.repeats
        all_slots.append(slots)
    return x, tuple(all_slots)


def _run_group(
    config: XLSTMConfig,
    group: LayerGroup,
    start: dict[str, int],
    layers: Params,
    x: jax.Array,
    info: TokenInfo,
    slots: Any,
) -> tuple[jax.Array, Any]:
    """Scan over the group's periods. The cache is carried, so that it is updated in place.

    `start`: how many blocks of each kind come before the group.
    """
    count = {kind: group.kinds.count(kind) for kind in group.kinds}

    def periods(kind: str) -> Params:
        def split(array: jax.Array) -> jax.Array:
            array = array[start[kind] : start[kind] + count[kind] * group.repeats]
            return array.reshape(group.repeats, count[kind], *array.shape[1:])

        return jax.tree.map(split, layers[BLOCK_NAMES[kind]])

    def run_period(carry: tuple[jax.Array, Any], inputs: tuple[Any, jax.Array]):
        (x, slots), (params, index) = carry, inputs
        seen = dict.fromkeys(count, 0)
        for position, kind in enumerate(group.kinds):
            own = jax.tree.map(lambda a, i=seen[kind]: a[i], params[kind])
            seen[kind] += 1
            here = None if slots is None else slots[position]
            x, here = _block(config, kind).apply({"params": own}, x, info, here, index)
            if slots is not None:
                slots = (*slots[:position], here, *slots[position + 1 :])
        return (x, slots), None

    if config.remat != "none" and slots is None:
        # prevent_cse is for unrolled code: inside a scan it only slows things down.
        run_period = jax.checkpoint(
            run_period, policy=REMAT_POLICIES[config.remat], prevent_cse=False
        )
    inputs = ({kind: periods(kind) for kind in count}, jnp.arange(group.repeats))
    (x, slots), _ = jax.lax.scan(run_period, (x, slots), inputs)
    return x, slots
