"""The frozen description of a decoder-only transformer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox"]
LayerType = Literal["full", "sliding"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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


class AttentionConfig(_Frozen):
    """Which keys a query may see, and which implementation computes it."""

    pattern: Literal["full"] = "full"
    implementation: Literal["xla", "pallas", "cudnn"] | None = Field(
        default=None, description="None picks the best one for the platform and the arguments."
    )


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

    attention: AttentionConfig = AttentionConfig()

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
        return self

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
