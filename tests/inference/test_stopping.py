"""A row's text as tokens come: what is certain comes out, what is uncertain is held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.inference.buckets import batch_bucket, cache_bucket, prefill_blocks
from jaxlab.inference.stopping import RowText

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id


def feed(text: str, stop=(), limit=1000, end=True) -> tuple[list[str], RowText]:
    row = RowText(TOKENIZER, (EOS,), stop, limit)
    tokens = TOKENIZER.encode(text) + ([EOS] if end else [])
    return [row.push(token) for token in tokens], row


def test_characters_come_whole():
    pieces, row = feed("aé€😀")
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]
    assert row.text == "aé€😀"
    assert row.finish_reason == "stop"


def test_a_character_cut_by_the_limit_is_marked():
    _, row = feed("a€", limit=3)
    assert row.text == "a\ufffd"
    assert row.finish_reason == "length"
    assert len(row.token_ids) == 3


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    pieces, row = feed("ab<en<end>cd", stop=("<end>",))
    assert pieces[:7] == ["a", "b", "", "", "", "<en", ""]
    assert row.text == "ab<en"
    assert row.finish_reason == "stop"
    assert row.token_ids == TOKENIZER.encode("ab<en<end>")


def test_what_is_held_back_comes_out_at_the_end():
    assert feed("ab<en", stop=("<end>",))[1].text == "ab<en"
    assert feed("ab<en", stop=("<end>",), limit=5)[1].text == "ab<en"


def test_tokens_after_the_end_are_ignored():
    _, row = feed("abc", limit=2)
    assert row.push(TOKENIZER.encode("z")[0]) == ""
    assert (row.text, len(row.token_ids)) == ("ab", 2)


def test_without_a_tokenizer_only_tokens_count():
    row = RowText(None, (9,), (), 10)
    assert [row.push(token) for token in (4, 5, 9)] == ["", "", ""]
    assert (row.text, row.token_ids, row.finish_reason) == ("", [4, 5, 9], "stop")


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(text, stop):
    pieces, row = feed(text, tuple(stop))
    # The match that is complete first; of those complete with the same character, the longest.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert row.text == expected == "".join(pieces)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_batch_buckets(rows, bucket):
    assert batch_bucket(rows) == bucket


@given(st.integers(1, 100_000))
def test_cache_buckets_hold_the_length_without_much_waste(length):
    bucket = cache_bucket(length)
    assert bucket >= length
    assert bucket == 128 or bucket <= 1.5 * length
    assert cache_bucket(bucket) == bucket


@given(st.integers(1, 5000), st.sampled_from([1, 7, 16, 100, 512]))
def test_prefill_blocks_cover_the_prompt_with_few_widths(length, block):
    blocks = prefill_blocks(length, block)
    assert length <= sum(blocks)
    assert max(blocks) <= block
    assert sum(blocks[:-1]) < length
    assert set(blocks[:-1]) <= {block}
