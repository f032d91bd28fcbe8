"""Tokens of documents, the assistant's mask to the token, and rows as training batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data.packing import (
    LEARNED,
    OFFSET,
    TOKEN,
    encode_document,
    finish_rows,
    row_origin,
    split_document,
)
from jaxlab.data.tokenizers import ByteTokenizer, PretrainedTokenizer
from jaxlab.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<bos>' + m.role + '\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)
# Llama 2's way: no white space behind the end, content trimmed, the role marked by brackets.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<bos>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' <eos>' }}{% endif %}{% endfor %}"
)
# Qwen 3's way: only the last turn shows its reasoning, so a longer chat rewrites earlier turns.
REWRITING = (
    "{% for m in messages %}{{ '<bos>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)
# No special token ends a turn.
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

contents = st.text(alphabet="ab \n<é§0", max_size=8)
chats = st.lists(st.tuples(contents, contents), min_size=1, max_size=3).map(
    lambda turns: [
        message
        for user, assistant in turns
        for message in (
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        )
    ]
)


def learned_text(rows, tokenizer):
    """The text of each run of learned tokens."""
    learned = rows[:, LEARNED].astype(bool)
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1), len(rows)]
    return [
        tokenizer.decode(rows[start:end, TOKEN], skip_special_tokens=False)
        for start, end in itertools.pairwise(edges)
        if learned[start]
    ]


def test_text_gets_the_special_tokens_there_are():
    tokenizer = ByteTokenizer()
    rows = encode_document("Hi", tokenizer, index=7)
    assert rows.tolist() == [[1, 1, 7, 0], [75, 1, 7, 1], [108, 1, 7, 2], [2, 1, 7, 3]]
    tokenizer.bos_token_id = None
    assert encode_document("Hi", tokenizer)[:, TOKEN].tolist() == [75, 108, 2]
    tokenizer.eos_token_id = None
    assert encode_document("Hi", tokenizer)[:, TOKEN].tolist() == [75, 108]
    assert encode_document("", tokenizer).shape == (0, 4)


@given(chats)
@settings(max_examples=60, deadline=None)
def test_chatml_mask(chat):
    tokenizer = ByteTokenizer(CHATML)
    rows = encode_document(chat, tokenizer)
    assert rows[:, TOKEN].tolist() == tokenizer.apply_chat_template(chat, False)
    assert learned_text(rows, tokenizer) == [m["content"] + "<eos>" for m in chat[1::2]]
    everything = encode_document(chat, tokenizer, loss_on="all")
    assert everything[:, LEARNED].all()


@given(chats)
@settings(max_examples=60, deadline=None)
def test_bracket_mask(chat):
    tokenizer = ByteTokenizer(BRACKETS)
    expected = [f" {m['content'].strip()} <eos>" for m in chat[1::2]]
    assert learned_text(encode_document(chat, tokenizer), tokenizer) == expected


@given(chats)
@settings(max_examples=60, deadline=None)
def test_mask_where_the_template_rewrites_earlier_turns(chat):
    tokenizer = ByteTokenizer(REWRITING)
    *earlier, last = [m["content"] + "<eos>" for m in chat[1::2]]
    expected = [*earlier, "<think>\n\n</think>\n\n" + last]
    assert learned_text(encode_document(chat, tokenizer), tokenizer) == expected


@given(chats)
@settings(max_examples=30, deadline=None)
def test_mask_where_nothing_special_ends_a_turn(chat):
    tokenizer = ByteTokenizer(PLAIN)
    expected = [m["content"] + "\n" for m in chat[1::2]]
    assert learned_text(encode_document(chat, tokenizer), tokenizer) == expected


def merging_tokenizer(*corpus):
    """A byte-level BPE with the merges of a corpus, across line ends too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(corpus * 20, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")
    hf.chat_template = CHATML
    return PretrainedTokenizer(hf)


def test_mask_of_a_tokenizer_with_merges():
    tokenizer = merging_tokenizer("assistant\n\nassistant\n a\n\n", "user\nab ab\n")
    chat = [
        {"role": "user", "content": "ab\n\n"},
        {"role": "assistant", "content": "An answer of two\n\nparagraphs."},
        {"role": "user", "content": "assistant\n"},
        {"role": "assistant", "content": "ab ab"},
    ]
    rows = encode_document(chat, tokenizer)
    assert learned_text(rows, tokenizer) == [m["content"] + "<eos>" for m in chat[1::2]]


def test_a_merge_across_the_turns_start_is_learned_whole():
    tokenizer = merging_tokenizer("\n\n")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nassistant"}]
    prompt = tokenizer.apply_chat_template(chat[:1], True)
    rows = encode_document(chat, tokenizer)
    assert rows[: len(prompt), TOKEN].tolist() != prompt  # "\n" of the prompt is half of a token
    assert learned_text(rows, tokenizer) == ["\n\n\nassistant<eos>"]


def test_chat_faults():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"x\.jsonl line 3 is a chat.*no chat template"):
        encode_document(chat, ByteTokenizer(), where="x.jsonl line 3")
    refusing = ByteTokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"x\.jsonl line 3.*roles must alternate"):
        encode_document(chat, refusing, where="x.jsonl line 3")
    tools = [{"name": "f"}]
    calling = [{**chat[0]}, {**chat[1], "tool_calls": tools}, *chat]
    with pytest.raises(DataError, match=r"turn 2.*calls tools.*loss_on: all"):
        encode_document(calling, ByteTokenizer(REWRITING))


def test_rows_become_a_batch():
    a = encode_document("ab", ByteTokenizer(), index=3)  # 1 100 101 2
    b = encode_document("c", ByteTokenizer(), index=9)  # 1 102 2
    b[1, LEARNED] = 0
    packed = np.concatenate([a, b, np.zeros((1, 4), np.int64)])[None]
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0]])
    batch = finish_rows(packed, segments, positions, pad_token_id=77)
    assert batch["tokens"].tolist() == [[1, 100, 101, 2, 1, 102, 2, 77]]
    assert batch["targets"].tolist() == [[100, 101, 2, 77, 102, 2, 77, 77]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 0, 0]]
    assert batch["segment_ids"].tolist() == segments.tolist()
    assert batch["positions"].tolist() == positions.tolist()
    assert row_origin(batch["row_ids"][0]) == (3, 0)
    types = {key: value.dtype.name for key, value in batch.items()}
    assert types == {
        "tokens": "int32",
        "targets": "int32",
        "loss_mask": "float32",
        "segment_ids": "int32",
        "positions": "int32",
        "row_ids": "int64",
    }
    padding = finish_rows(
        np.zeros((1, 8, 4), int), np.zeros((1, 8), int), np.zeros((1, 8), int), pad_token_id=77
    )
    assert padding["row_ids"].tolist() == [-1]
    assert padding["loss_mask"].sum() == 0


@given(st.integers(0, 50), st.integers(1, 10))
def test_pieces_of_a_document(size, length):
    rows = np.repeat(np.arange(size)[:, None], 4, axis=1)
    pieces = list(split_document(rows, length))
    assert all(0 < len(piece) <= length for piece in pieces)
    assert [offset for piece in pieces for offset in piece[:, OFFSET]] == list(range(size))
