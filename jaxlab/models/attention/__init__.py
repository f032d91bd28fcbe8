"""The attention sublayer: projections here, the pattern's mathematics in `PATTERNS`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxlab.models.attention import full
from jaxlab.models.config import ModelConfig
from jaxlab.models.layers import LayerKind
from jaxlab.models.linear import Linear
from jaxlab.models.norm import Norm
from jaxlab.models.rope import apply_rope

PATTERNS = {"full": full}


class Attention(nn.Module):
    """Grouped-query self-attention: project, normalise, rotate, attend, project back."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        *,
        segment_ids: jax.Array | None = None,
        slots: Any = None,
        layer: jax.Array | int | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """`x [B, T, D]` to `[B, T, D]`, and the layer's cache `slots` with the block appended.

        Without `slots` the text attends to itself; with it, to what each row already holds too.
        """
        config = self.config
        heads, kv_heads = (
            (config.num_heads, config.head_dim),
            (config.num_kv_heads, config.head_dim),
        )

        def project(name: str, shape: tuple[int, int], axis: str) -> jax.Array:
            axes = ("embed", axis, "head_dim")
            return Linear(config, shape, axes, use_bias=config.qkv_bias, name=name)(x)

        query = project("q_proj", heads, "heads")
        key = project("k_proj", kv_heads, "kv_heads")
        value = project("v_proj", kv_heads, "kv_heads")
        if config.qk_norm:
            query = Norm(config, rms=True, name="q_norm")(query)
            key = Norm(config, rms=True, name="k_norm")(key)
        query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        query = nn.with_logical_constraint(query, ("batch", "length", "heads", "head_dim"))
        key = nn.with_logical_constraint(key, ("batch", "kv_length", "kv_heads", "head_dim"))
        value = nn.with_logical_constraint(value, ("batch", "kv_length", "kv_heads", "head_dim"))

        pattern = PATTERNS[config.attention.pattern]
        if slots is None:
            output = pattern.attend(
                query, key, value, config=config, kind=self.kind, segment_ids=segment_ids
            )
        else:
            output, slots = pattern.attend_cached(
                query, key, value, slots, layer, lengths, config=config, kind=self.kind
            )
        output = Linear(
            config,
            (config.hidden_size,),
            ("heads", "head_dim", "embed"),
            contract=2,
            use_bias=config.attention_out_bias,
            name="o_proj",
        )(output.astype(jnp.dtype(config.dtype)))
        return output, slots
