"""Separators: every token decoded, whatever the tokenizer does to spaces."""

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from jaxlab.data.separators import OFFICIAL_SEPARATOR_IDS, SEPARATORS, separator_ids
from jaxlab.data.tokenizers import ByteTokenizer, PretrainedTokenizer, load_tokenizer
from jaxlab.errors import TokenizerError


def transformers_tokenizer(tokens, decoder, added=(), **special):
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    fast = FastTokenizer(model)
    fast.decoder = decoder
    fast.add_tokens([AddedToken(token, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def sentencepiece(**special):
    """Decodes as the tokenizers of Llama 2 and Mistral do: a text's first space is dropped."""
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = ["<s>", "<0x0A>", "▁", ".", "▁.", "▁▁", "the", "▁the", ",", "…", "<0x0D>"]
    return transformers_tokenizer(tokens, decoder, bos_token="<s>", **special)


def names(tokenizer, rule):
    return tokenizer.convert_ids_to_tokens(list(separator_ids(tokenizer, rule=rule)))


def test_smollm2_has_the_nine_and_208_made_of_them():
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    exact = separator_ids(tokenizer)
    assert exact == (17, 28, 30, 42, 43, 47, 197, 198, 216)
    assert sorted(tokenizer.decode([i]) for i in exact) == sorted(SEPARATORS)
    made_of_them = separator_ids(tokenizer, rule="separator_only")
    assert len(made_of_them) == 208
    assert set(exact) < set(made_of_them)
    characters = set("".join(SEPARATORS)) | {"\r"}
    assert all(set(tokenizer.decode([i])) <= characters for i in made_of_them)
    assert separator_ids(tokenizer.hf) == exact


def test_bytes():
    tokenizer = ByteTokenizer()
    ids = separator_ids(tokenizer)
    assert sorted(tokenizer.decode([i]) for i in ids) == sorted(SEPARATORS)
    assert set(separator_ids(tokenizer, rule="separator_only")) == {*ids, *tokenizer.encode("\r")}
    assert separator_ids(tokenizer, characters="ab") == tuple(tokenizer.encode("ab"))


def test_a_leading_space_belongs_to_the_token():
    tokenizer = sentencepiece()
    assert names(tokenizer, "exact") == ["<0x0A>", "▁", ".", ","]
    assert names(tokenizer, "separator_only") == [
        *("<0x0A>", "▁", ".", "▁.", "▁▁", ",", "<0x0D>"),
    ]
    wrapped = PretrainedTokenizer(tokenizer)
    assert separator_ids(wrapped) == separator_ids(tokenizer)


def test_tokens_added_to_a_vocabulary_count():
    tokens = [".", "Ġ.", "a", "Ġ", "Ċ"]
    tokenizer = transformers_tokenizer(tokens, decoders.ByteLevel(), added=["  ", "\n\n"])
    assert tokenizer.vocab_size == len(tokens)  # transformers does not count them
    assert names(tokenizer, "exact") == [".", "Ġ", "Ċ"]
    assert names(tokenizer, "separator_only") == [".", "Ġ.", "Ġ", "Ċ", "  ", "\n\n"]


def test_spaces_that_a_decoder_puts_between_tokens_do_not():
    tokenizer = transformers_tokenizer(["the", "##s", ".", ","], decoders.WordPiece("##", False))
    assert names(tokenizer, "exact") == [".", ","]


def test_the_authors_lists():
    sizes = {name: len(ids) for name, ids in OFFICIAL_SEPARATOR_IDS.items()}
    assert sizes == {
        "llama3": 9,
        "llama3-streaming": 17,
        "gpt-neox": 9,
        "gpt-neox-streaming": 20,
        "falcon-streaming": 13,
    }
    assert all(len(set(ids)) == len(ids) for ids in OFFICIAL_SEPARATOR_IDS.values())


class Undecodable:
    vocab_size = 10

    def decode(self, ids, skip_special_tokens=True):
        raise NotImplementedError("ids only")


@pytest.mark.parametrize(
    ("tokenizer", "options", "error", "words"),
    [
        (ByteTokenizer(), dict(rule="all"), ValueError, "rule='all': must be 'exact' or"),
        (ByteTokenizer(), dict(characters=()), ValueError, "give at least one"),
        (ByteTokenizer(), dict(characters=("",)), ValueError, "none of them empty"),
        (ByteTokenizer(), dict(characters=("ab",)), TokenizerError, "no token .* of 259"),
        (Undecodable(), {}, TokenizerError, r"Undecodable cannot decode .*list the separators"),
        (object(), {}, TokenizerError, "object cannot decode"),
        (sentencepiece(pad_token="▁"), {}, TokenizerError, r"padding token 2 \(' '\) is a sep"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(tokenizer, options, error, words):
    with pytest.raises(error, match=words):
        separator_ids(tokenizer, **options)
