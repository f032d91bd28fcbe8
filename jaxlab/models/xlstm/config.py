"""The frozen description of an xLSTM language model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DTypeName = Literal["float32", "bfloat16", "float16"]


class XLSTMConfig(BaseModel):
    """A stack of mLSTM and sLSTM blocks: xLSTM 7B (arXiv:2503.13427) and its relatives.

    Hashable, so that it can be a static argument of `jax.jit` and a field of a Linen module. The
    defaults are those of the published 7B model. The sizes that other code asks any model for
    (`hidden_size`, `num_layers`, `intermediate_size`, …) are properties.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Literal["xlstm"] = Field(
        default="xlstm", description="The Hugging Face model_type that a saved directory carries."
    )
    vocab_size: int = Field(default=50304, gt=0)
    embedding_dim: int = Field(default=4096, gt=0, description="Width of the residual stream.")
    num_blocks: int = Field(default=32, gt=0)
    num_heads: int = Field(default=8, gt=0)
    qk_dim_factor: float = Field(
        default=0.5, gt=0, description="Queries and keys of all heads, as a share of the width."
    )
    v_dim_factor: float = Field(
        default=1.0, gt=0, description="Values of all heads, as a share of the width."
    )
    ffn_proj_factor: float = Field(
        default=2.667, gt=0, description="Width of the feed-forward layer in embedding_dims."
    )
    ffn_round_up_to_multiple_of: int = Field(default=64, gt=0)
    gate_soft_cap: float | None = Field(
        default=15.0, gt=0, description="Input and forget gates are a·tanh(x/a); null: no cap."
    )
    output_logit_soft_cap: float | None = Field(
        default=30.0, gt=0, description="The logits' cap; null: none."
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    cell_norm_eps: float = Field(
        default=1e-6,
        gt=0,
        description="Of the norm over each head's output. It takes part in the gating: heads "
        "whose output is smaller than its root stay small.",
    )
    cell_eps: float = Field(default=1e-6, gt=0, description="Added to the cell's denominator.")
    input_gate: Literal["exp", "sigmoid"] = Field(
        default="exp", description="exp: mLSTM. sigmoid: mLSTMsig (TFLA, arXiv:2503.14376)."
    )
    normalize: bool = Field(
        default=True, description="Divide by the normaliser state; mLSTMsig may do without."
    )
    block_pattern: str | None = Field(
        default=None,
        description="One letter a block: m for mLSTM, s for sLSTM, such as 'mmms'; repeated to "
        "num_blocks. null: all m.",
    )
    igate_bias_init: float = Field(default=-10.0, description="Of every head's input gate.")
    fgate_bias_init: tuple[float, float] = Field(
        default=(3.0, 6.0), description="Forget-gate biases run linearly over the heads."
    )
    use_bias: bool = Field(default=False, description="Biases in every projection and norm.")
    weight_mode: Literal["single", "fused"] = Field(
        default="single",
        description="How a checkpoint keeps the projections: apart, or concatenated. The "
        "parameters here are apart either way.",
    )
    tie_word_embeddings: bool = Field(
        default=False,
        description="Unembed with the embedding. transformers' xlstm cannot: it would load such a "
        "model with a random head.",
    )
    chunk_size: int | None = Field(
        default=None, gt=0, description="Tokens a chunk of the chunkwise form; null: the fastest."
    )
    max_position_embeddings: int = Field(
        default=1 << 20,
        gt=0,
        description="Longest row to train or evaluate on. The model has no positions and no limit.",
    )

    dtype: DTypeName = Field(default="float32", description="Compute type.")
    param_dtype: DTypeName = Field(default="float32", description="Type of stored parameters.")
    state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the memory C and n of a cache. bfloat16 halves it, and rounds what "
        "was remembered each time it is written; the stabiliser m stays float32.",
    )
    remat: Literal["none", "full", "dots", "dots_no_batch"] = Field(
        default="none", description="What a block's backward pass recomputes instead of storing."
    )

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        """Takes `hidden_size`, `d_model`, `num_hidden_layers` and `num_layers` as well."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, others in (
            ("embedding_dim", ("hidden_size", "d_model")),
            ("num_blocks", ("num_hidden_layers", "num_layers")),
        ):
            for other in others:
                if other not in data:
                    continue
                value = data.pop(other)
                if value is None:
                    continue
                if data.get(name) not in (None, value):
                    raise ValueError(
                        f"{name} is {data[name]} and {other} is {value}, which mean the same: "
                        "give one of them"
                    )
                data[name] = value
        return data

    @model_validator(mode="after")
    def _check(self) -> XLSTMConfig:
        for name, dim in (("qk_dim_factor", self.qk_dim), ("v_dim_factor", self.v_dim)):
            if dim < 1 or dim % self.num_heads:
                raise ValueError(
                    f"{name} {getattr(self, name)} of embedding_dim {self.embedding_dim} gives "
                    f"{dim} channels, which num_heads {self.num_heads} does not divide: change "
                    "one of them"
                )
        if self.block_pattern is not None:
            if not self.block_pattern or set(self.block_pattern) - {"m", "s"}:
                raise ValueError(
                    f"block_pattern {self.block_pattern!r}: give one letter a block, m (mLSTM) or "
                    "s (sLSTM)"
                )
            if self.num_blocks % len(self.block_pattern):
                raise ValueError(
                    f"block_pattern {self.block_pattern!r} has {len(self.block_pattern)} letters, "
                    f"which do not divide num_blocks {self.num_blocks}"
                )
        if "s" in self.blocks and self.embedding_dim % self.num_heads:
            raise ValueError(
                f"embedding_dim {self.embedding_dim} is not divisible by num_heads "
                f"{self.num_heads}, which sLSTM blocks need: change one of them"
            )
        if self.input_gate == "exp" and not self.normalize:
            raise ValueError(
                "normalize: false goes with input_gate: sigmoid; an exponential gate needs the "
                "normaliser to stay finite"
            )
        return self

    @property
    def blocks(self) -> str:
        """The kind of each block, first to last: `m` or `s`."""
        pattern = self.block_pattern or "m"
        return pattern * (self.num_blocks // len(pattern))

    @property
    def qk_dim(self) -> int:
        """Channels of all heads' queries (and keys)."""
        return int(self.embedding_dim * self.qk_dim_factor)

    @property
    def v_dim(self) -> int:
        """Channels of all heads' values."""
        return int(self.embedding_dim * self.v_dim_factor)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_dim // self.num_heads

    @property
    def v_head_dim(self) -> int:
        return self.v_dim // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """Width of an mLSTM block's feed-forward layer."""
        return self._rounded(self.embedding_dim * self.ffn_proj_factor)

    @property
    def slstm_intermediate_size(self) -> int:
        """Width of an sLSTM block's feed-forward layer: 1.3 times the model's."""
        return self._rounded(self.embedding_dim * 1.3)

    def _rounded(self, size: float) -> int:
        step = self.ffn_round_up_to_multiple_of
        # Rounded up as the published model was: on the product before it became an integer.
        return int(((size + step - 1) // step) * step)

    @property
    def hidden_size(self) -> int:
        return self.embedding_dim

    @property
    def num_layers(self) -> int:
        return self.num_blocks

    @property
    def num_kv_heads(self) -> int:
        """As many as query heads: every head has its own memory."""
        return self.num_heads

    @property
    def context_limit(self) -> int | None:
        """None: a text may have any length."""
        return None

    @property
    def required_bos(self) -> int | None:
        """The token that every text begins with: tokenizers of xLSTMs do not put it there."""
        return self.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple, empty if there is none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def replace(self, **changes: Any) -> XLSTMConfig:
        """A validated copy with some fields changed."""
        return XLSTMConfig.model_validate({**self.model_dump(), **changes})

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> XLSTMConfig:
        """From the contents of a `config.json`; see `jaxlab.checkpoints.config_from_hf`."""
        from jaxlab.checkpoints.hf_xlstm import xlstm_from_hf

        return xlstm_from_hf(hf)

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that transformers loads as this model."""
        from jaxlab.checkpoints.hf_xlstm import xlstm_to_hf

        return xlstm_to_hf(self)

    @classmethod
    def preset(cls, name: Literal["165m", "1.3b", "2.7b", "7b"], **changes: Any) -> XLSTMConfig:
        """A published size: 165m, 1.3b, 2.7b or 7b, with some fields changed.

        Raises:
          ValueError: there is no such size.
        """
        if name.lower() not in PRESETS:
            raise ValueError(f"xLSTM preset {name!r} is not known; there are {', '.join(PRESETS)}")
        return cls.model_validate({**PRESETS[name.lower()], **changes})


# The sizes of NX-AI's published runs; what they leave out is as in the 7B.
PRESETS: dict[str, dict[str, Any]] = {
    "165m": {"embedding_dim": 768, "num_blocks": 12, "num_heads": 4},
    "1.3b": {"embedding_dim": 2048, "num_blocks": 24, "num_heads": 4},
    "2.7b": {"embedding_dim": 2560, "num_blocks": 32, "num_heads": 5},
    "7b": {"embedding_dim": 4096, "num_blocks": 32, "num_heads": 8},
}
