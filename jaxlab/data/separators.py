"""Which tokens are separators: found by decoding every token, for any tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from jaxlab.data.tokenizers import PretrainedTokenizer
from jaxlab.errors import TokenizerError

# The nine of the paper (SepLLM, arXiv 2412.12094, §4).
SEPARATORS = (".", ",", "?", "!", ";", ":", " ", "\t", "\n")

# The ids that the authors' code uses, for those who reproduce it (github.com/HKUDS/SepLLM):
# TrainingFree-SepLLM's and Training-SepLLM's configurations, and the streaming ones of
# Streaming-SepLLM/sepllm_kv_cache/kv_cache_manager.py.
OFFICIAL_SEPARATOR_IDS: dict[str, tuple[int, ...]] = {
    # Training-free: no tab, and the token that begins a text.
    "llama3": (13, 11, 30, 0, 26, 25, 198, 220, 128000),
    # Streaming: with a space before, and runs of spaces.
    "llama3-streaming": (
        *(13, 11, 30, 0, 26, 25, 198, 220),
        *(662, 1174, 949, 758, 2652, 551, 720, 256, 262),
    ),
    "gpt-neox": (15, 13, 32, 2, 28, 27, 209, 186, 187),
    "gpt-neox-streaming": (
        *(15, 13, 32, 2, 28, 27, 209, 186, 187),
        *(964, 1157, 3736, 2195, 3706, 1163, 2490, 50276, 586, 4928, 50275),
    ),
    "falcon-streaming": (25, 23, 42, 12, 38, 37, 193, 4610, 204, 258, 1212, 23787, 466),
}


def separator_ids(
    tokenizer: Any,
    characters: Iterable[str] = SEPARATORS,
    rule: Literal["exact", "separator_only"] = "exact",
) -> tuple[int, ...]:
    """The ids of the tokens that are separators, ascending.

    Every id is decoded. Encoding the separators instead would miss: a tokenizer may add a leading
    space or a beginning-of-text token.

    Args:
      tokenizer: one of jaxlab's or of transformers', or any with
        `decode(ids, skip_special_tokens) -> str` and `vocab_size`, one more than its highest id.
      characters: separator strings.
      rule: `"exact"`, the tokens whose text is one of them (the paper's rule); `"separator_only"`,
        every token whose text is made of their characters and carriage returns only, so that a
        double line break counts, which many vocabularies have as one token.

    Raises:
      ValueError: no characters, or the rule is unknown.
      TokenizerError: no token of the vocabulary is a separator, the padding token would be one, or
        the tokenizer cannot decode.
    """
    characters = tuple(characters)
    if not characters or not all(characters):
        raise ValueError(f"characters={characters!r}: give at least one, none of them empty")
    if rule not in ("exact", "separator_only"):
        raise ValueError(f"rule={rule!r}: must be 'exact' or 'separator_only'")
    exact = set(characters)
    single = set("".join(characters)) | {"\r"}
    if hasattr(tokenizer, "get_vocab"):  # transformers': its vocab_size leaves added tokens out
        tokenizer = PretrainedTokenizer(tokenizer)
    try:
        texts = _texts(tokenizer)
    except (AttributeError, NotImplementedError) as error:
        raise TokenizerError(
            f"{type(tokenizer).__name__} cannot decode single ids ({error}): list the separators "
            "as token ids"
        ) from error

    def separates(text: str) -> bool:
        return text in exact if rule == "exact" else bool(text) and set(text) <= single

    ids = tuple(i for i, text in enumerate(texts) if separates(text))
    if not ids:
        raise TokenizerError(
            f"no token of the vocabulary of {len(texts)} is a separator by rule {rule!r} "
            f"(characters {' '.join(map(repr, characters))}): list token ids, or other characters"
        )
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding in ids:
        raise TokenizerError(
            f"the padding token {padding} ({texts[padding]!r}) is a separator by rule {rule!r}: "
            "give the tokenizer another padding token, or list token ids without it"
        )
    return ids


def _texts(tokenizer: Any) -> list[str]:
    """The text of each id inside a text.

    SentencePiece decoders drop the space that begins a text, so an id by itself would lose its own:
    ids are decoded behind a letter. Decoders that put spaces between tokens (WordPiece) have no
    token that, twice, is twice its text; there an id stands by itself.
    """

    def decode(*ids: int) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    alone = [decode(i) for i in range(int(tokenizer.vocab_size))]
    for letter, text in enumerate(alone):
        if text.isalpha() and decode(letter, letter) == text * 2:
            return [decode(letter, i)[len(text) :] for i in range(len(alone))]
    return alone
