"""The frozen description of a decoder-only transformer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxlab.models.attention_config import (
    FullAttention,
    KVShiftConfig,
    LayerAttention,
    PatternConfig,
    SepLLMAttention,
    XAttention,
)

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox"]
LayerType = Literal["full", "sliding"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(_Frozen):
    """How rotary frequencies are stretched beyond the trained context.

    Field names are Hugging Face's. `linear` divides every frequency by `factor`; `dynamic` raises
    the base once a text is longer than the trained context; `llama3` stretches only long
    wavelengths; `yarn` blends by wavelength and scales the attention.
    """

    type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = Field(gt=0)
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.type in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ValueError(
                f"rope scaling {self.type!r} needs original_max_position_embeddings, "
                "the context in tokens that the model was first trained at"
            )
        return self


class ModelConfig(_Frozen):
    """A decoder-only transformer: Llama, Mistral, Qwen, Gemma 2, GPT-NeoX and relatives.

    Hashable, so that it can be a static argument of `jax.jit` and a field of a Linen module.
    `num_kv_heads` defaults to `num_heads`, `head_dim` to `hidden_size / num_heads`, `layer_types`
    to all-`sliding` if `sliding_window` is set and all-`full` otherwise.
    """

    architecture: Architecture = Field(
        default="llama", description="The Hugging Face model_type that a saved directory carries."
    )
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(default=0, ge=0, description="0: as many as num_heads.")
    head_dim: int = Field(default=0, ge=0, description="0: hidden_size / num_heads.")
    max_position_embeddings: int = Field(default=2048, gt=0, description="Context in tokens.")

    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = Field(default=1.0, gt=0, le=1, description="Rotated share of a head.")

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(default=1e-5, gt=0)
    norm_unit_offset: bool = Field(default=False, description="Scale by 1 + w, as Gemma does.")
    post_norms: bool = Field(default=False, description="Norm after each sublayer too (Gemma 2).")
    parallel_residual: bool = Field(default=False, description="MLP reads the layer's input.")

    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = Field(default=False, description="RMSNorm of each query and key head (Qwen3).")

    query_scale: float | None = Field(default=None, description="Default: head_dim ** -0.5.")
    attention_softcap: float | None = Field(default=None, gt=0)
    final_softcap: float | None = Field(default=None, gt=0)
    embedding_scale: float = 1.0
    sliding_window: int | None = Field(
        default=None, gt=0, description="Tokens, the query included."
    )
    layer_types: tuple[LayerType, ...] | None = None
    tie_word_embeddings: bool = False

    attention: LayerAttention = Field(
        default=FullAttention(),
        description="The pattern of every layer, or a list with one a layer: full, sepllm, cca, "
        "xattention.",
    )
    kv_shift: KVShiftConfig | None = Field(
        default=None, description="Mix each key and value with those of the tokens before."
    )

    dtype: DTypeName = Field(default="float32", description="Compute type.")
    param_dtype: DTypeName = Field(default="float32", description="Type of stored parameters.")
    remat: Literal["none", "full", "dots", "dots_no_batch"] = Field(
        default="none", description="What a layer's backward pass recomputes instead of storing."
    )
    initializer_range: float = Field(default=0.02, gt=0)

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads = data.get("num_heads")
        if isinstance(heads, int) and heads > 0:
            if not data.get("num_kv_heads"):
                data["num_kv_heads"] = heads
            hidden = data.get("hidden_size")
            if not data.get("head_dim") and isinstance(hidden, int):
                if hidden % heads:
                    raise ValueError(
                        f"hidden_size {hidden} is not divisible by num_heads {heads}: "
                        "set head_dim, or change one of them"
                    )
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: choose num_kv_heads that divides {self.num_heads}"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} rotates {self.rotary_dim} of "
                f"{self.head_dim} channels, an odd number: choose one that rotates an even number"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_layers "
                f"{self.num_layers}: give one per layer, or leave it out"
            )
        if self.layer_types and "sliding" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types asks for sliding layers: set sliding_window (in tokens)")
        self._check_attention()
        return self

    def _check_attention(self) -> None:
        if isinstance(self.attention, tuple) and len(self.attention) != self.num_layers:
            raise ValueError(
                f"attention has {len(self.attention)} entries for num_layers {self.num_layers}: "
                "give one per layer, or one mapping for all"
            )
        patterns = {attention.pattern for attention in self._attentions} - {"full"}
        if patterns and all(self.layer_windows):
            raise ValueError(
                f"attention.pattern {patterns.pop()!r} has no layer to work in: all have the "
                f"sliding_window {self.sliding_window}; set sliding_window to null"
            )
        streaming, separators = set(), set()
        for attention in self._attentions:
            if isinstance(attention, SepLLMAttention):
                window = attention.window
                separators.add(attention.separators)
                if isinstance(window, tuple) and len(window) != self.num_layers:
                    raise ValueError(
                        f"attention.window has {len(window)} entries for num_layers "
                        f"{self.num_layers}: give one per layer, or one number for all"
                    )
                out = [
                    i
                    for i in attention.separators
                    if isinstance(i, int) and not 0 <= i < self.vocab_size
                ]
                if out and isinstance(attention.separators, tuple):
                    raise ValueError(
                        f"attention.separators holds token id {out[0]}, but the vocabulary is "
                        f"0 … {self.vocab_size - 1}"
                    )
            streaming.add(attention if _streams(attention) else None)
            if isinstance(attention, XAttention):
                self._check_xattention(attention)
        if len(separators) > 1:
            raise ValueError("attention.separators differs between layers: give all the same")
        if len(streaming) > 1:
            raise ValueError(
                "attention.positions is 'cache' in some layers and not, or otherwise, in others: "
                "a streaming cache is one for all layers"
            )

    def _check_xattention(self, attention: XAttention) -> None:
        outside = [i for i in attention.dense_layers if not 0 <= i < self.num_layers]
        if outside:
            raise ValueError(
                f"attention.dense_layers holds {outside[0]}, but layers are 0 … "
                f"{self.num_layers - 1}"
            )
        threshold = attention.threshold
        if isinstance(threshold, tuple):
            sizes = {len(row) for row in threshold}
            if len(threshold) != self.num_layers or sizes != {self.num_heads}:
                raise ValueError(
                    f"attention.threshold has {len(threshold)} rows of {sorted(sizes)} numbers; "
                    f"give [layers][heads] = {self.num_layers} rows of {self.num_heads}"
                )

    @property
    def _attentions(self) -> tuple[PatternConfig, ...]:
        return self.attention if isinstance(self.attention, tuple) else (self.attention,)

    @property
    def layer_attention(self) -> tuple[PatternConfig, ...]:
        """The attention of each layer, per-layer settings resolved to the layer's own.

        A layer with the model's sliding window keeps it, and full attention within.
        """
        attentions = self._attentions
        if len(attentions) == 1:
            attentions *= self.num_layers
        return tuple(
            _of_layer(attention, i) if window is None else _within_window(attention)
            for i, (attention, window) in enumerate(
                zip(attentions, self.layer_windows, strict=True)
            )
        )

    @property
    def streaming(self) -> SepLLMAttention | None:
        """The attention of a model whose caches stream with positions of their own, else None."""
        attention = self._attentions[0]
        return attention if isinstance(attention, SepLLMAttention) and _streams(attention) else None

    @property
    def context_limit(self) -> int | None:
        """Tokens that a text can have; None where a streaming cache never sees a long position."""
        return None if self.streaming is not None else self.max_position_embeddings

    @property
    def required_bos(self) -> int | None:
        """None: whether a text begins with a special token is the tokenizer's business."""
        return None

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where the layer sees everything before it."""
        uniform: LayerType = "sliding" if self.sliding_window else "full"
        types = self.layer_types or (uniform,) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding" else None for kind in types)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple, empty if there is none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def replace(self, **changes: Any) -> ModelConfig:
        """A validated copy with some fields changed; nested sections may be given as dicts."""
        return ModelConfig.model_validate({**self.model_dump(), **changes})


def _streams(attention: PatternConfig) -> bool:
    return isinstance(attention, SepLLMAttention) and attention.streaming


def _within_window(attention: PatternConfig) -> PatternConfig:
    return attention if isinstance(attention, FullAttention) else FullAttention()


def _of_layer(attention: PatternConfig, layer: int) -> PatternConfig:
    if isinstance(attention, SepLLMAttention) and isinstance(attention.window, tuple):
        return attention.model_copy(update={"window": attention.window[layer]})
    if isinstance(attention, XAttention):
        if layer in attention.dense_layers:
            return FullAttention()
        # Thresholds are data of the layer, not of the code it compiles to: see `layer_data`.
        return attention.model_copy(update={"threshold": 0.0, "dense_layers": ()})
    return attention
