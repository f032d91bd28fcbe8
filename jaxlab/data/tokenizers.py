"""Text <-> token ids: Hugging Face tokenizers, the ones inside GGUF files, and plain bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxlab.data import chat
from jaxlab.errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_MARKER = "jaxlab_tokenizer"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of jaxlab needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self, messages: Sequence[chat.Message], add_generation_prompt: bool = True
    ) -> list[int]: ...
    def save_pretrained(self, directory: str | os.PathLike[str]) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens, for models from scratch: 0 pad, 1 bos, 2 eos, 3… the 256 bytes.

    `encode` never makes a special token of text that looks like one; `apply_chat_template` does for
    those that the template writes.

    Args:
      chat_template: a Jinja template as Hugging Face's tokenizers have, or None.

    >>> ByteTokenizer().encode("Hi")
    [75, 108]
    >>> ByteTokenizer().decode([1, 75, 108, 2])
    'Hi'
    """

    vocab_size = 259
    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2
    _special = ("<pad>", "<bos>", "<eos>")
    _offset = len(_special)

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, after a bos if `add_special_tokens`. Lone surrogates become "?"."""
        ids = [byte + self._offset for byte in text.encode("utf-8", errors="replace")]
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids out of range nothing."""
        data = bytearray()
        for token in ids:
            token = int(token)
            if self._offset <= token < self.vocab_size:
                data.append(token - self._offset)
            elif 0 <= token < self._offset and not skip_special_tokens:
                data += self._special[token].encode()
        return data.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[chat.Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation; see `jaxlab.data.chat.render`."""
        variables = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        text = chat.render_text(messages, self.chat_template, variables, add_generation_prompt)
        ids: list[int] = []
        for part in re.split("(<pad>|<bos>|<eos>)", text):
            ids += [self._special.index(part)] if part in self._special else self.encode(part)
        return ids

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write it as a byte-level BPE without merges: transformers loads it with the same ids."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _byte_level_bpe(self._special).save(str(directory / "tokenizer.json"))
        description = {
            _BYTE_MARKER: "byte",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
        }
        if self.chat_template:
            description["chat_template"] = self.chat_template
        (directory / "tokenizer_config.json").write_text(
            json.dumps(description, indent=2, ensure_ascii=False), encoding="utf-8"
        )


def _byte_level_bpe(special: tuple[str, ...]) -> Any:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    # GPT-2's names of the bytes: printable Latin-1 names itself, the rest is shifted to 256….
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + position) for position, byte in enumerate(shifted)}
    vocabulary = {token: index for index, token in enumerate(special)}
    vocabulary |= {names[byte]: byte + len(special) for byte in range(256)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


class PretrainedTokenizer:
    """A transformers tokenizer under the `Tokenizer` protocol. The original is `.hf`."""

    def __init__(self, hf: PreTrainedTokenizerBase):
        self.hf = hf
        self.vocab_size = max(hf.get_vocab().values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.hf.pad_token_id

    @property
    def chat_template(self) -> str | None:
        """The template, or the one named "default" of several."""
        template = self.hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Special tokens written out in it are recognised, as transformers does."""
        # A lone surrogate cannot be encoded as UTF-8, which the Rust library asks for.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        text = self.hf.decode(
            [int(token) for token in ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # a list of ids gives one text, a list of lists several
        return text

    def apply_chat_template(
        self, messages: Sequence[chat.Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation; see `jaxlab.data.chat.render`."""
        variables = self.hf.special_tokens_map
        text = chat.render_text(messages, self.chat_template, variables, add_generation_prompt)
        return self.encode(text)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        self.hf.save_pretrained(str(directory))


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer.

    Args:
      source: "byte", a directory with a Hugging Face tokenizer, a `.gguf` file, or what
        `jaxlab.data.model_source.resolve` takes: a named model or a hub id.

    Raises:
      TokenizerError: there is none, or it is malformed.
      CheckpointError: `source` cannot be found.
    """
    if source == "byte":
        return ByteTokenizer()
    from jaxlab.data.model_source import resolve

    path = resolve(source, weights=False)
    if path.is_file():
        from jaxlab.data.gguf_file import GGUFFile
        from jaxlab.data.gguf_tokenizer import tokenizer_from_gguf

        return PretrainedTokenizer(tokenizer_from_gguf(GGUFFile(path)))
    return _from_directory(path)


def _from_directory(path: Path) -> Tokenizer:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(
            f"{path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}): "
            "copy the model's tokenizer files there, or give another tokenizer"
        )
    description = path / "tokenizer_config.json"
    if description.is_file():
        try:
            values = json.loads(description.read_text(encoding="utf-8"))
            if values.get(_BYTE_MARKER) == "byte":
                return ByteTokenizer(chat_template=values.get("chat_template"))
        except (OSError, ValueError, AttributeError) as error:
            raise TokenizerError(f"cannot read {description}: {error}; fetch it again") from error
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # transformers and its Rust library raise many types, bare Exception too
        raise TokenizerError(
            f"cannot load the tokenizer in {path}: {error}; fetch its files again"
        ) from error
    return PretrainedTokenizer(hf)


class _HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


def check_vocabulary(tokenizer: Tokenizer, config: _HasVocabulary) -> None:
    """Refuse a tokenizer that does not belong to the model.

    Embeddings may have some rows more than there are tokens (models pad them to round numbers), but
    never fewer, and not twice as many.

    Raises:
      TokenizerError: names both sizes.
    """
    tokens, rows = tokenizer.vocab_size, config.vocab_size
    if tokens > rows:
        raise TokenizerError(
            f"the tokenizer has {tokens} tokens, the model's vocabulary only {rows}: "
            "use the model's own tokenizer, or (from scratch) set vocab_size to at least "
            f"{tokens}"
        )
    if rows > max(2 * tokens, tokens + 1024):
        raise TokenizerError(
            f"the model's vocabulary has {rows} entries, the tokenizer only {tokens} tokens, so it "
            "cannot be the model's: use the model's own tokenizer, or (from scratch) set "
            "vocab_size "
            f"to about {tokens}"
        )


class StreamDecoder:
    """Decode tokens as they come; characters whose bytes are not all there yet are held back.

    The pieces, concatenated, are `tokenizer.decode` of all ids.

    >>> decoder = StreamDecoder(ByteTokenizer())
    >>> [decoder.push(token) for token in ByteTokenizer().encode("é!")], decoder.finish()
    (['', 'é', '!'], '')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Ids from the last emitted piece on. That piece stays as context: decoders treat the first
        # token of a text differently (SentencePiece drops its space).
        self._window: list[int] = []
        self._emitted = 0  # ids of the window whose text is out

    def push(self, token: int) -> str:
        """Add one token; returns the text that is now certain, often one token's, sometimes ""."""
        self._window.append(int(token))
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return text

    def finish(self) -> str:
        """What is held back, incomplete characters as U+FFFD. The decoder is then empty."""
        text = self._pending()
        self._window, self._emitted = [], 0
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._window[: self._emitted], self._skip)
        return self._tokenizer.decode(self._window, self._skip)[len(before) :]
