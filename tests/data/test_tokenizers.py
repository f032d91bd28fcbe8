"""Tokenizers: bytes, Hugging Face directories, GGUF metadata; and decoding while tokens come."""

import json

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxlab.data.gguf_file import GGUFFile
from jaxlab.data.gguf_tokenizer import tokenizer_from_gguf
from jaxlab.data.model_source import resolve
from jaxlab.data.tokenizers import (
    ByteTokenizer,
    PretrainedTokenizer,
    StreamDecoder,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
)
from jaxlab.errors import CheckpointError, JaxlabError, TokenizerError
from jaxlab.models import ModelConfig

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 2024, 1234567 cats  ran\n\n\tfor 3.14 km.",
    "don't DON'T we'll",
    "Ünïcode naïve 日本語 한국어 🙂👩‍👩‍👧 ½ ²  e\u0301",
    "def f(x):\n    return x ** 2  # ok\r\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "   leading and trailing   ",
    "\x00\x07\ufeff",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2-135m-instruct")


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_byte_ids():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("A\n") == [68, 13]
    assert tokenizer.encode("A", add_special_tokens=True) == [1, 68]
    assert tokenizer.encode("<eos>") == [byte + 3 for byte in b"<eos>"]
    assert tokenizer.decode([1, 68, 2], skip_special_tokens=False) == "<bos>A<eos>"
    assert tokenizer.decode([258, 300, -1]) == "\ufffd"
    assert tokenizer.encode("\ud800") == tokenizer.encode("?")


def test_the_byte_tokenizer_loads_here_and_in_transformers_with_the_same_ids(tmp_path):
    original = ByteTokenizer(chat_template="{{ messages[0]['content'] }}{{ eos_token }}")
    original.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, ByteTokenizer)
    assert again.chat_template == original.chat_template
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == 259
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == original.encode(text)
        assert theirs.decode(original.encode(text), clean_up_tokenization_spaces=False) == text
    messages = [{"role": "user", "content": "Hé"}]
    expected = theirs.apply_chat_template(messages, return_dict=False)
    assert original.apply_chat_template(messages) == expected


def test_all_are_tokenizers(smollm2):
    assert isinstance(ByteTokenizer(), Tokenizer)
    assert isinstance(smollm2, Tokenizer)


def test_smollm2_ids(smollm2):
    """Digits one by one, no space in front, no bos."""
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert smollm2.encode("Hello, world!") == [19556, 28, 905, 17]
    assert smollm2.encode("Hello, world!", add_special_tokens=True) == [19556, 28, 905, 17]
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    digits = [smollm2.decode([token]) for token in smollm2.encode("a 123 45")]
    assert digits == ["a", " ", "1", "2", "3", " ", "4", "5"]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trips_and_saves(smollm2, text, tmp_path):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    smollm2.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode(text) == ids
    assert again.chat_template == smollm2.chat_template
    assert (again.eos_token_id, again.vocab_size) == (2, 49152)


def test_smollm2_chat_template(smollm2):
    ids = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert smollm2.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    theirs = smollm2.hf.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == theirs


@pytest.mark.parametrize("text", TEXTS)
def test_stream_decoding_gives_the_same_text(smollm2, text):
    for tokenizer in (smollm2, ByteTokenizer()):
        ids = tokenizer.encode(text)
        decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
        pieces = [decoder.push(token) for token in ids]
        pieces.append(decoder.finish())
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        assert not any("\ufffd" in piece for piece in pieces[:-1]) or "\ufffd" in text


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 258), max_size=40))
def test_stream_decoding_of_arbitrary_bytes(ids):
    tokenizer = ByteTokenizer()
    decoder = StreamDecoder(tokenizer)
    text = "".join(decoder.push(token) for token in ids) + decoder.finish()
    assert text == tokenizer.decode(ids)


def test_stream_decoding_holds_back_half_characters():
    decoder = StreamDecoder(ByteTokenizer())
    pieces = [decoder.push(token) for token in ByteTokenizer().encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert decoder.push(0xF0 + 3) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_vocabularies_must_fit():
    def config(size):
        return ModelConfig(
            vocab_size=size, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1
        )

    tokenizer = ByteTokenizer()
    for size in (259, 264, 320, 1024):  # padded embeddings
        check_vocabulary(tokenizer, config(size))
    with pytest.raises(TokenizerError, match=r"has 259 tokens, the model's vocabulary only 256"):
        check_vocabulary(tokenizer, config(256))
    with pytest.raises(TokenizerError, match=r"49152 entries, the tokenizer only 259"):
        check_vocabulary(tokenizer, config(49152))


def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_hugging_face_tokenizer_with_several_templates(tmp_path):
    fast = FastTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=fast, chat_template={"default": "a{{ messages[0].content }}", "tool": "b"}
    )
    hf.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "b"}]) == [0, 1]
    assert tokenizer.vocab_size == 2


def gguf_tokenizer(path, arch="llama", **keys):
    """A GGUF file of metadata only, read back as a tokenizer."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return PretrainedTokenizer(tokenizer_from_gguf(GGUFFile(path)))


SPM_TOKENS = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
SPM_TYPES = [2, 3, 3] + [6] * 256
SPM_PIECES = ["▁h", "el", "lo", "▁hel", "▁hello", "▁", "h", "e", "l", "o"]


def spm(path, **changes):
    keys = {
        "tokenizer_model": "llama",
        "token_list": SPM_TOKENS + SPM_PIECES,
        "token_scores": [0.0] * 259 + [-float(index) for index in range(len(SPM_PIECES))],
        "token_types": SPM_TYPES + [1] * len(SPM_PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    return gguf_tokenizer(path, **{**keys, **changes})


def test_a_sentencepiece_tokenizer_from_gguf(tmp_path):
    tokenizer = spm(tmp_path / "m.gguf")
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("hello")) == ["▁hello"]
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    # No piece for these: bytes.
    assert tokenizer.encode("é")[1:] == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("é hello\n")) == "é hello\n"
    assert tokenizer.encode("</s>") == [2]


def test_sentencepiece_flags(tmp_path):
    tokenizer = spm(tmp_path / "m.gguf", add_bos_token=False, add_space_prefix=False)
    assert tokenizer.encode("hello", add_special_tokens=True)[0] != 1
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("hello")) == ["h", "el", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_sentencepiece_decoding_in_a_stream_keeps_spaces(tmp_path):
    tokenizer = spm(tmp_path / "m.gguf")
    ids = tokenizer.encode("hello hello hello")
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token) for token in ids]
    assert pieces == ["hello", " hello", " hello"]


def byte_level(path, pre, merges=(), extra=(), **keys):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, *extra]
    return gguf_tokenizer(
        path,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_list=tokens,
        token_types=[3] + [1] * (len(tokens) - 1),
        token_merges=list(merges) or ["a b"],
        eos_token_id=0,
        **keys,
    )


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "ab 123's  x", ["ab", "Ġ", "1", "2", "3", "'s", "Ġ", "Ġx"]),
        ("gpt-2", "ab 123's  x", ["ab", "Ġ123", "'s", "Ġ", "Ġx"]),
        ("llama-bpe", "ab 12345'S\n\nx", ["ab", "Ġ", "123", "45", "'S", "ĊĊ", "x"]),
        ("qwen2", "ab 123'S\n\nx", ["ab", "Ġ", "1", "2", "3", "'S", "ĊĊ", "x"]),
        ("default", "ab 1234$x", ["ab", "Ġ", "123", "4", "$", "x"]),
        ("tekken", "fooBar 12", ["foo", "Bar", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers(pre, text, words, tmp_path):
    tokenizer = byte_level(tmp_path / "m.gguf", pre, extra=["ab"])
    fast = tokenizer.hf.backend_tokenizer
    assert [word for word, _ in fast.pre_tokenizer.pre_tokenize_str(text)] == words
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_llama3_takes_whole_words_and_adds_bos(tmp_path):
    tokenizer = byte_level(tmp_path / "m.gguf", "llama-bpe", extra=["ab", "xyz"], bos_token_id=0)
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("xyz")) == ["xyz"]  # no merge has it
    assert tokenizer.encode("xyz", add_special_tokens=True)[0] == 0


def test_broken_gguf_tokenizers(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(TokenizerError, match=r"'viking'.*supported: .*qwen2"):
        byte_level(path, "viking")
    with pytest.raises(TokenizerError, match="inconsistent"):
        byte_level(path, "gpt-2", merges=["not there"])
    with pytest.raises(TokenizerError, match="eos_token has id 9999"):
        spm(path, eos_token_id=9999)
    with pytest.raises(TokenizerError, match="one score per token"):
        spm(path, token_scores=[0.0])
    with pytest.raises(TokenizerError, match="'t5' are not implemented"):
        spm(path, tokenizer_model="t5")


@pytest.mark.parity
def test_smollm2_equals_transformers_reading_of_the_same_file(smollm2):
    """Where they agree on the pre-tokenizer: transformers does not split digits for this file."""
    pytest.importorskip("torch")  # transformers reads GGUF through it
    path = resolve("smollm2-135m-instruct")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert theirs.get_vocab() == smollm2.hf.get_vocab()
    for text in TEXTS:
        if not any(character.isnumeric() for character in text):
            assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_metadata_of_any_shape_never_escapes(tmp_path):
    for keys in (
        {"tokenizer_model": "llama"},
        {"tokenizer_model": "gpt2", "token_list": ["a"], "token_merges": ["a"]},
        {"tokenizer_model": "llama", "token_list": ["a"], "token_scores": [0.0, 1.0]},
        {"tokenizer_model": "llama", "token_list": [1, 2], "token_scores": [0.0, 1.0]},
    ):
        with pytest.raises(JaxlabError):
            gguf_tokenizer(tmp_path / "m.gguf", **keys)


def test_tokenizer_files_are_plain_json(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
