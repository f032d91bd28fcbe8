"""How a model attends: one configuration class a pattern, and the shift of keys and values."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from pallas_kernels.sepllm.streaming import StreamSizes

Share = Annotated[float, Field(ge=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FullAttention(_Frozen):
    """Every token sees every token before it (or those in the model's sliding window)."""

    pattern: Literal["full"] = "full"
    implementation: Literal["xla", "pallas", "cudnn"] | None = Field(
        default=None, description="None picks the best one for the platform and the arguments."
    )


class SepLLMAttention(_Frozen):
    """Initial tokens, separators and a window of recent tokens (SepLLM, arXiv 2412.12094).

    With `positions: absolute` the cache keeps what the mask shows, every separator included. With
    `positions: cache` it streams without end: `capacity` tokens at most, of which
    `separator_capacity` separators and at least `local_window` recent ones survive each
    compression, and positions are places in the cache (§3.3; window and mask then only matter to
    calls without a cache).
    """

    pattern: Literal["sepllm"]
    initial_tokens: int = Field(default=4, ge=0, description="First tokens, always visible.")
    window: int | Literal["full"] | tuple[int | Literal["full"], ...] = Field(
        default=256,
        description="Recent tokens that are visible, the query included; or one entry a layer; "
        "'full' sees everything.",
    )
    separators: Literal["exact", "separator_only", "none"] | tuple[int | str, ...] = Field(
        default="exact",
        description="'exact': the tokens that are one of . , ? ! ; : space, tab, newline; "
        "'separator_only': every token made of them only; a list of token ids and strings; or "
        "'none', which is StreamingLLM.",
    )
    separator_capacity: int | None = Field(
        default=None,
        ge=1,
        description="Separators that a cache has room for. null: all that max_length tokens can "
        "hold; 64 when streaming.",
    )
    local_window: int = Field(
        default=224, ge=1, description="Streaming: recent tokens that a compression keeps."
    )
    capacity: int = Field(default=324, ge=1, description="Streaming: tokens in the cache at most.")
    positions: Literal["absolute", "cache"] = "absolute"
    implementation: Literal["xla"] | None = None

    @model_validator(mode="after")
    def _check(self) -> SepLLMAttention:
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        for window in windows:
            if window != "full" and window < 1:
                raise ValueError(
                    f"window {window} shows a token not even itself: give at least 1, or 'full'"
                )
        if not self.separators:
            raise ValueError(
                "separators is an empty list: name token ids or strings, use 'exact', or 'none' "
                "for initial tokens and a window alone"
            )
        if self.streaming:
            self.stream_sizes.check()
        return self

    @property
    def streaming(self) -> bool:
        """Whether caches stream, with positions counted in the cache."""
        return self.positions == "cache"

    @property
    def stream_sizes(self) -> StreamSizes:
        """The regions of a streaming cache."""
        separators = 64 if self.separator_capacity is None else self.separator_capacity
        return StreamSizes(
            self.initial_tokens,
            0 if self.separators == "none" else separators,
            self.local_window,
            self.capacity,
        )


class CCAAttention(_Frozen):
    """One core token for each group of far tokens, near tokens one by one (arXiv 2412.12465)."""

    pattern: Literal["cca"]
    group_size: int = Field(default=16, ge=1, description="Tokens that a core token stands for.")
    window_size: int = Field(
        default=1024, ge=1, description="Recent tokens that are always seen one by one."
    )
    pooling: Literal["cca", "mean", "max"] = Field(
        default="cca", description="'cca' weighs a group by its last token's query (the paper's)."
    )
    core_heads: Literal["query", "kv"] = Field(
        default="query", description="'kv' (not the paper's): one core a key head; smaller cache."
    )
    sink_tokens: int = Field(
        default=0, ge=0, description="First tokens kept visible (not the paper's; 4 helps a lot)."
    )
    implementation: Literal["xla"] | None = None


class XAttention(_Frozen):
    """Blocks of keys chosen by antidiagonal scores (arXiv 2503.16428): for prefill; decodes dense.

    In a cached call the blocks are chosen where its tokens fill whole blocks, from a block's
    beginning on; other calls are dense.
    """

    pattern: Literal["xattention"]
    threshold: Share | tuple[tuple[Share, ...], ...] | str = Field(
        default=0.9,
        description="Share of the estimated attention that chosen blocks reach: a number, "
        "[layers][heads], or the JSON file of a calibration.",
    )
    stride: int = Field(default=8, ge=1, description="Side of the tiles that are scored.")
    block_size: int = Field(default=128, ge=1, description="Tokens of a block.")
    dense_layers: tuple[int, ...] = Field(default=(), description="Layers that stay dense.")
    dense_tail_tokens: int = Field(
        default=0, ge=0, description="Last queries of a text that see everything."
    )
    min_length: int = Field(default=0, ge=0, description="Texts shorter than this are dense.")
    constant_mask: bool = Field(
        default=False,
        description="Accept in training that the choice of blocks has no gradient.",
    )
    implementation: Literal["xla"] | None = None

    @model_validator(mode="after")
    def _check(self) -> XAttention:
        if self.block_size % self.stride:
            raise ValueError(
                f"stride {self.stride} does not divide block_size {self.block_size}: choose "
                "4, 8 or 16 with blocks of 128"
            )
        return self


class KVShiftConfig(_Frozen):
    """Each key and value mixed with those of the tokens before (arXiv 2411.19574).

    Adds `window` coefficients a key head for keys and for values. They go before the rotary
    embedding and with any pattern.
    """

    window: int = Field(default=2, ge=1, description="Tokens mixed, the present one included.")
    keys: bool = True
    values: bool = True
    constraint: Literal["none", "gate", "clip"] = Field(
        default="none",
        description="'gate': sigmoid of one number and its complement; 'clip': each kept in [0,1].",
    )
    init: Literal["uniform", "identity"] = Field(
        default="uniform",
        description="'identity' changes nothing at first: for adding it to a trained model.",
    )

    @model_validator(mode="after")
    def _check(self) -> KVShiftConfig:
        if not (self.keys or self.values):
            raise ValueError("keys and values are both false: leave kv_shift out instead")
        if self.constraint == "gate" and self.window != 2:
            raise ValueError(f"constraint 'gate' mixes two tokens, but window is {self.window}")
        if self.constraint == "gate" and self.init == "identity":
            raise ValueError(
                "init 'identity' is out of reach of constraint 'gate', whose sigmoid never is 1: "
                "use constraint 'none' or 'clip'"
            )
        return self

    @property
    def shifted(self) -> tuple[str, ...]:
        """Which of "key" and "value" are mixed; the coefficients are `key_shift`, `value_shift`."""
        return ("key",) * self.keys + ("value",) * self.values


_PATTERNS: dict[str, type[_Frozen]] = {
    "full": FullAttention,
    "sepllm": SepLLMAttention,
    "cca": CCAAttention,
    "xattention": XAttention,
}
_PER_LAYER = "[per layer]"  # not a name that a file could have for a key


def _prepare(value: Any) -> Any:
    """A pattern's bare name stands for its defaults; an unknown name is refused here."""
    if isinstance(value, str):
        value = {"pattern": value}
    if isinstance(value, dict):
        pattern = value.get("pattern", "full")
        if pattern not in _PATTERNS:
            close = difflib.get_close_matches(str(pattern), _PATTERNS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose {', '.join(_PATTERNS)}"
            raise ValueError(f"pattern {pattern!r} is unknown; {hint}")
    elif not isinstance(value, list | tuple | BaseModel):
        raise ValueError(
            f"it is {value!r}; expected a pattern's name, a mapping, or a list with one a layer"
        )
    return value


def _tag(value: Any) -> str:
    if isinstance(value, list | tuple):
        return _PER_LAYER
    pattern = value.get("pattern", "full") if isinstance(value, dict) else value.pattern
    return _PATTERNS[pattern].__name__


AttentionConfig = Annotated[
    Annotated[FullAttention, Tag("FullAttention")]
    | Annotated[SepLLMAttention, Tag("SepLLMAttention")]
    | Annotated[CCAAttention, Tag("CCAAttention")]
    | Annotated[XAttention, Tag("XAttention")],
    Discriminator(_tag),
    BeforeValidator(_prepare),
]
"""The configuration of one pattern; which one, its `pattern` says (default `full`)."""

LayerAttention = Annotated[
    Annotated[FullAttention, Tag("FullAttention")]
    | Annotated[SepLLMAttention, Tag("SepLLMAttention")]
    | Annotated[CCAAttention, Tag("CCAAttention")]
    | Annotated[XAttention, Tag("XAttention")]
    | Annotated[tuple[AttentionConfig, ...], Tag(_PER_LAYER)],
    Discriminator(_tag),
    BeforeValidator(_prepare),
]
"""One pattern for every layer, or a list of one a layer."""

PatternConfig = FullAttention | SepLLMAttention | CCAAttention | XAttention
