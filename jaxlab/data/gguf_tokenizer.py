"""The tokenizer in a GGUF file's metadata, rebuilt as a fast tokenizer.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the splits
below are the ones those names stand for in llama.cpp (src/llama-vocab.cpp) and in the models' own
`tokenizer.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from jaxlab.data.gguf_file import GGUFFile
from jaxlab.errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's fallback for files from before the name was recorded.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", None, r"\p{N}+", r"[0-9][0-9][0-9]")

_PRE_TOKENIZERS: dict[str, str] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "gpt2", "pythia"), "gpt2"),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"), "llama3"
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), "qwen2"),
    "tekken": "tekken",
    "default": "default",
}


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer, its special tokens and its chat template.

    Raises:
      TokenizerError: the file holds no tokenizer, an inconsistent one, or one of an unknown kind.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TokenizerError(
            f"{file.path} holds no tokenizer (tokenizer.ggml.tokens): "
            "give the model's Hugging Face tokenizer instead"
        )
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if not isinstance(kind, str) or kind not in builders:
        raise TokenizerError(
            f"{file.path}: tokenizers of kind {kind!r} are not implemented for GGUF "
            f"(supported: {', '.join(builders)}): give the model's Hugging Face tokenizer instead"
        )
    roles = _special_roles(file, tokens)
    try:
        tokenizer, add_bos = builders[kind](metadata, tokens)
        _add_special_tokens(tokenizer, metadata, tokens)
        _add_template(tokenizer, metadata, roles, tokens, add_bos)
    except TokenizerError as error:
        raise TokenizerError(f"{file.path}: {error}") from error
    except Exception as error:  # the Rust library raises bare Exception
        raise TokenizerError(
            f"{file.path}: its tokenizer is inconsistent ({error}): convert the model again"
        ) from error

    from transformers import PreTrainedTokenizerFast

    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        model_max_length=_context(metadata),
        **roles,
    )


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not implemented "
            f"(supported: {', '.join(sorted(_PRE_TOKENIZERS))}): "
            "give the model's Hugging Face tokenizer instead"
        )
    family = _PRE_TOKENIZERS[name]
    # Llama 3 takes a whole word from the vocabulary before it looks at merges.
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=family == "llama3")
    )
    tokenizer.pre_tokenizer = _byte_level_pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, family == "llama3"


def _byte_level_pre_tokenizer(family: str) -> pre.PreTokenizer:
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    if family == "gpt2":
        return gpt2
    if family == "digits":
        return pre.Sequence([pre.Digits(individual_digits=True), gpt2])
    if family == "default":
        gpt2_split = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        splits = [
            pre.Split(Regex(pattern or gpt2_split), behavior="isolated") for pattern in _DEFAULT
        ]
        return pre.Sequence([*splits, bytes_only])
    pattern = {"llama3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}[family]
    return pre.Sequence([pre.Split(Regex(pattern), behavior="isolated"), bytes_only])


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    # Runs of spaces are stored as spaces in Gemma's files and meet the text as "▁".
    tokens = [token.replace(" ", "▁") if token.strip(" ") == "" else token for token in tokens]
    vocabulary = _vocabulary(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError("a SentencePiece tokenizer needs one score per token")
    # Gemma's scores do not follow its merge order; its ids do.
    rank = {
        token: (index if gemma else -scores[index], index) for token, index in vocabulary.items()
    }
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    mergeable = [token for token, index in vocabulary.items() if types[index] in (1, _USER_DEFINED)]
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_of(mergeable, vocabulary, rank),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer, True


def _merges_of(
    pieces: list[str], vocabulary: dict[str, int], rank: dict[str, tuple[float, int]]
) -> list[tuple[str, str]]:
    """SentencePiece merges any two pieces whose union is a piece, best-scored union first."""
    merges = []
    for piece in sorted(pieces, key=rank.__getitem__):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += sorted(
            (cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary),
            key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]),
        )
    return merges


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or []
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _special_roles(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    roles = {}
    for role, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise TokenizerError(
                f"{file.path}: the {role} has id {index!r}, but there are {len(tokens)} tokens: "
                "convert the model again"
            )
        roles[role] = tokens[index]
    return roles


def _add_template(
    tokenizer: Tokenizer,
    metadata: dict[str, Any],
    roles: dict[str, str],
    tokens: list[str],
    add_bos: bool,
) -> None:
    """What `add_special_tokens=True` puts around a text."""
    before = metadata.get("tokenizer.ggml.add_bos_token", add_bos) and roles.get("bos_token")
    after = metadata.get("tokenizer.ggml.add_eos_token", False) and roles.get("eos_token")
    if before or after:
        used = [token for token in (before, after) if token]
        tokenizer.post_processor = TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[(token, tokens.index(token)) for token in used],
        )


def _context(metadata: dict[str, Any]) -> int:
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length if isinstance(length, int) else 2**31
