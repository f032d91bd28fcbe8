"""Every token once an epoch, exact resumption, and an order that no process count changes."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data import DataConfig, make_pipeline, render_row, statistics, unigram_entropy
from jaxlab.data.packing import row_origin
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import DataError


class NumberTokenizer:
    """Documents are "START LENGTH" and become tokens START, START + 1, ...: none occurs twice."""

    vocab_size = 100_000
    bos_token_id = None
    eos_token_id = None
    pad_token_id = None
    chat_template = None

    def encode(self, text, add_special_tokens=False):
        start, length = map(int, text.split())
        return list(range(start, start + length))


def write_documents(directory, lengths):
    """A file of documents with the given numbers of tokens, and the tokens of each."""
    starts = [1 + start for start in itertools.accumulate([0, *lengths[:-1]])]
    path = Path(directory) / "documents.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": f"{s} {n}"}) + "\n" for s, n in zip(starts, lengths, strict=True)
        )
    )
    documents = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    return str(path), documents


def pipeline(path, split="train", seed=0, processes=(0, 1), **config):
    options = {
        "validation_source": path,
        "sequence_length": 8,
        "batch_size": 4,
        "shuffle_rows": 16,
        **config,
    }
    return make_pipeline(
        DataConfig(source=path, **options),
        NumberTokenizer(),
        split=split,
        seed=seed,
        process_index=processes[0],
        process_count=processes[1],
    )


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(left, right, strict=True)
    )


def check_rows(batch, documents):
    """The invariants of packed rows, against the documents themselves; returns all tokens."""
    everything = []
    document_of = {token: tokens for tokens in documents for token in tokens}
    for row in range(len(batch["tokens"])):
        tokens, segments = batch["tokens"][row], batch["segment_ids"][row]
        targets, mask = batch["targets"][row], batch["loss_mask"][row]
        filled = segments > 0
        assert np.all(np.diff(filled.astype(int)) <= 0), "padding only at the end"
        numbers = segments[filled]
        assert np.all(np.isin(np.diff(numbers), (0, 1)))
        assert len(numbers) == 0 or numbers[0] == 1
        assert np.all(mask[~filled] == 0)
        assert np.all(tokens[~filled] == 0)
        for number in np.unique(numbers):
            columns = np.flatnonzero(segments == number)
            piece = tokens[columns].tolist()
            document = document_of[piece[0]]
            offset = document.index(piece[0])
            assert piece == document[offset : offset + len(piece)]
            assert batch["positions"][row, columns].tolist() == list(range(len(piece)))
            assert targets[columns[:-1]].tolist() == piece[1:]
            assert mask[columns].tolist() == [1.0] * (len(piece) - 1) + [0.0]
            everything += piece
        if filled[0]:
            document, offset = row_origin(batch["row_ids"][row])
            assert documents[document][offset] == tokens[0]
        else:
            assert batch["row_ids"][row] == -1
    return everything


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum),
    length=st.integers(2, 17),
    packing=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_validation_has_every_token_once(tmp_path_factory, lengths, length, packing):
    path, documents = write_documents(tmp_path_factory.mktemp("data"), lengths)
    batches = list(
        pipeline(path, "validation", sequence_length=length, packing=packing, prefetch=0)
    )
    seen = [token for batch in batches for token in check_rows(batch, documents)]
    assert seen == list(range(1, 1 + sum(lengths)))
    assert all(batch["tokens"].shape == (4, length) for batch in batches)
    rows = sum(int((batch["row_ids"] >= 0).sum()) for batch in batches)
    if packing:
        assert rows == -(-sum(lengths) // length)  # no row but the last has padding
    else:
        assert rows == sum(-(-n // length) for n in lengths)
        assert all(batch["segment_ids"].max() == 1 for batch in batches)


def test_every_epoch_of_training_has_every_token_once(tmp_path):
    # 128 tokens are 16 rows, and rows are shuffled 16 at a time: epochs end where windows end.
    path, documents = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6])
    batches = pipeline(path, shuffle_rows=16)
    orders = []
    for _ in range(5):
        tokens = [t for batch in take(batches, 4) for t in check_rows(batch, documents)]
        assert sorted(tokens) == list(range(1, 129))
        orders.append(tuple(tokens))
    assert len(set(orders)) == 5


def test_documents_are_reordered_every_epoch_without_row_shuffling(tmp_path):
    path, _ = write_documents(tmp_path, [8] * 12)
    batches = pipeline(path, shuffle_rows=1)
    epochs = [[int(r) >> 32 for b in take(batches, 3) for r in b["row_ids"]] for _ in range(4)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_training_in_order_repeats_the_documents(tmp_path):
    path, documents = write_documents(tmp_path, [5, 30, 1, 0, 12])
    batches = take(pipeline(path, shuffle=False), 12)
    seen = [token for batch in batches for token in check_rows(batch, documents)]
    assert seen == (list(range(1, 49)) * 20)[: len(seen)]
    assert len(seen) == 12 * 4 * 8


def test_seed_decides_the_order(tmp_path):
    path, _ = write_documents(tmp_path, [7] * 40)
    first = take(pipeline(path, seed=1), 5)
    assert same(first, take(pipeline(path, seed=1), 5))
    assert not same(first, take(pipeline(path, seed=2), 5))
    held_out = take(pipeline(path, "validation", seed=1), 5)
    assert same(held_out, take(pipeline(path, "validation", seed=2), 5))


def test_one_document_is_enough(tmp_path):
    path, documents = write_documents(tmp_path, [3])
    seen = [
        t for batch in take(pipeline(path, shuffle_rows=1), 3) for t in check_rows(batch, documents)
    ]
    assert seen == [1, 2, 3] * 32


@pytest.mark.parametrize(
    ("packing", "num_workers", "prefetch", "shuffle_rows"),
    [(True, 0, 2, 5), (True, 2, 2, 5), (True, 0, 0, 40), (False, 0, 2, 5), (False, 2, 0, 40)],
)
def test_resumes_exactly_at_every_step(tmp_path, packing, num_workers, prefetch, shuffle_rows):
    # About 5 batches an epoch: every remainder, window and epoch end is passed.
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 11])
    config = {
        "packing": packing,
        "num_workers": num_workers,
        "prefetch": prefetch,
        "shuffle_rows": shuffle_rows,
    }
    steps = 24
    original = pipeline(path, **config)
    states, batches = [original.get_state()], []
    for _ in range(steps):
        batches.append(next(original))
        states.append(json.loads(json.dumps(original.get_state())))
    batches += take(original, 3)
    fresh = pipeline(path, **config)
    for step in range(steps + 1):
        fresh.set_state(states[step])
        assert fresh.get_state() == states[step]
        assert same(take(fresh, 3), batches[step : step + 3]), step
    fresh.reset()
    assert same(take(fresh, 3), batches[:3])
    # The workers and what is prefetched change neither the batches nor the positions.
    plain = pipeline(path, packing=packing, shuffle_rows=shuffle_rows, num_workers=0, prefetch=0)
    assert same(take(plain, steps), batches[:steps])
    assert plain.get_state() == states[steps]


RAMP = [[2, 3], [4, 2]]


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 2), (2, 0)])
def test_a_ramp_cuts_the_same_rows_into_growing_batches(tmp_path, num_workers, prefetch):
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 11])
    config = {"num_workers": num_workers, "prefetch": prefetch, "batch_ramp": RAMP}
    ramped = pipeline(path, batch_size=8, **config)
    states, batches = [ramped.get_state()], []
    for _ in range(8):
        batches.append(next(ramped))
        states.append(json.loads(json.dumps(ramped.get_state())))
    assert [len(batch["tokens"]) for batch in batches] == [2, 2, 2, 4, 4, 8, 8, 8]

    one_by_one = take(pipeline(path, batch_size=2), 19)
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    rows = {key: np.concatenate([batch[key] for batch in one_by_one]) for key in joined}
    assert same([joined], [rows])

    batches += take(ramped, 2)
    fresh = pipeline(path, batch_size=8, **config)
    for step, state in enumerate(states):  # in each size, and where one follows another
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert same(take(fresh, 2), batches[step : step + 2]), step
    fresh.reset()
    assert same(take(fresh, 2), batches[:2])


def test_processes_share_each_size_of_a_ramp(tmp_path):
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 11])
    whole = pipeline(path, batch_size=8, batch_ramp=RAMP)
    shares = [pipeline(path, processes=(i, 2), batch_size=8, batch_ramp=RAMP) for i in range(2)]
    for batch in take(whole, 7):
        parts = [next(share) for share in shares]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in batch}
        assert same([joined], [batch])
    assert all(share.get_state() == whole.get_state() for share in shares)
    with pytest.raises(DataError, match="batch_ramp 2 can't be divided among 4 processes; 4 can"):
        pipeline(path, processes=(0, 4), batch_size=8, batch_ramp=RAMP)


def test_validation_has_no_ramp(tmp_path):
    path, _ = write_documents(tmp_path, [30, 30, 9])
    ramped = list(pipeline(path, "validation", batch_ramp=[[1, 9]]))
    assert same(ramped, list(pipeline(path, "validation")))


@pytest.mark.parametrize("ramp", [[[4, 2], [2, 2]], [[8, 2]], [[2, 1], [2, 1]]])
def test_a_ramp_has_to_rise(ramp):
    with pytest.raises(ValueError, match="let it rise to batch_size"):
        DataConfig(batch_size=8, batch_ramp=ramp)


def test_the_size_of_each_step_of_a_ramp():
    config = DataConfig(batch_size=8, batch_ramp=RAMP)
    assert config.batch_sizes == (2, 4, 8)
    assert [config.batch_size_at(step) for step in range(7)] == [2, 2, 2, 4, 4, 8, 8]
    assert DataConfig(batch_size=8).batch_sizes == (8,)


@pytest.mark.parametrize("packing", [True, False])
def test_validation_resumes_and_ends(tmp_path, packing):
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 0])
    original = pipeline(path, "validation", packing=packing)
    states, batches = [original.get_state()], []
    for batch in original:
        batches.append(batch)
        states.append(original.get_state())
    assert len(batches) >= 4
    for step, state in enumerate(states):
        fresh = pipeline(path, "validation", packing=packing)
        fresh.set_state(state)
        assert same(list(fresh), batches[step:]), step
    original.reset()
    assert same(list(original), batches)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_batches_of_one(tmp_path, split, count):
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 11])
    whole = pipeline(path, split)
    shares = [pipeline(path, split, processes=(i, count)) for i in range(count)]
    for batch in take(whole, 4):
        parts = [next(share) for share in shares]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in batch}
        assert same([joined], [batch])
    assert all(share.get_state() == whole.get_state() for share in shares)


def test_resumes_on_another_number_of_processes(tmp_path):
    path, _ = write_documents(tmp_path, [5, 30, 1, 12, 17, 3, 25, 9, 20, 6, 11])
    whole = pipeline(path)
    expected = take(whole, 9)
    first_of_two = pipeline(path, processes=(0, 2))
    take(first_of_two, 5)
    second_of_four = pipeline(path, processes=(1, 4))
    second_of_four.set_state(first_of_two.get_state())
    mine = [{key: value[1:2] for key, value in batch.items()} for batch in expected[5:]]
    assert same(take(second_of_four, 4), mine)


def test_describes_rows(tmp_path):
    path, _ = write_documents(tmp_path, [5, 30])
    (batch,) = take(pipeline(path, "validation", batch_size=6), 1)
    held_out = pipeline(path, "validation")
    assert held_out.describe_row(batch["row_ids"][1]) == f"{path} line 2, token 3"
    assert held_out.describe_row(batch["row_ids"][5]) == "padding"


def test_batch_that_processes_cannot_share(tmp_path):
    path, _ = write_documents(tmp_path, [5])
    with pytest.raises(DataError, match="batch_size 4 can't be divided among 3 processes; 3 or 6"):
        pipeline(path, processes=(0, 3))
    with pytest.raises(DataError, match="among 8 processes; 8 can"):
        pipeline(path, processes=(0, 8))


def test_position_of_other_data_is_refused(tmp_path):
    path, _ = write_documents(tmp_path, [5, 30])
    state = pipeline(path).get_state()
    with pytest.raises(DataError, match="sequence_length 8, now 16"):
        pipeline(path, sequence_length=16).set_state(state)
    with pytest.raises(DataError, match="seed 0, now 1"):
        pipeline(path, seed=1).set_state(state)
    with pytest.raises(DataError, match="split 'train', now 'validation'"):
        pipeline(path, "validation").set_state(state)
    changed, _ = write_documents(tmp_path, [5, 30, 2])
    with pytest.raises(DataError, match="documents 2, now 3"):
        pipeline(changed).set_state(state)
    with pytest.raises(DataError, match="batch_ramp None, now"):
        pipeline(path, batch_ramp=[[2, 3]]).set_state(pipeline(path).get_state())
    with pytest.raises(DataError, match="version 2"):
        pipeline(path).set_state({**state, "version": 2})


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_a_fault_in_the_middle_is_named(tmp_path, num_workers, prefetch):
    path, _ = write_documents(tmp_path, [40, 40])
    with Path(path).open("a") as file:
        file.write("no json\n")
    batches = pipeline(path, "validation", num_workers=num_workers, prefetch=prefetch)
    with pytest.raises(DataError, match=r"documents\.jsonl line 3 is not JSON"):
        list(batches)


def test_training_on_empty_documents_is_refused(tmp_path):
    path, _ = write_documents(tmp_path, [0, 0])
    with pytest.raises(DataError, match="all 2 documents of the training data are empty"):
        pipeline(path)


def test_closing_twice(tmp_path):
    path, _ = write_documents(tmp_path, [5])
    batches = pipeline(path, num_workers=1)
    next(batches)
    batches.close()
    batches.close()


# --- what is made of the pipeline --------------------------------------------------------------


def test_unigram_entropy_by_hand(tmp_path):
    (tmp_path / "train.txt").write_text("aab")
    (tmp_path / "held_out.txt").write_text("ab")
    config = DataConfig(
        source=str(tmp_path / "train.txt"),
        validation_source=str(tmp_path / "held_out.txt"),
        sequence_length=8,
    )
    # Learned training tokens: bos a a b eos; targets: a b eos.
    total = 5 + 259
    expected = -np.mean(np.log([3 / total, 2 / total, 2 / total]))
    assert unigram_entropy(config, ByteTokenizer()) == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_of_python_docs():
    config = DataConfig(source="python-docs", sequence_length=256)
    entropy = unigram_entropy(config, ByteTokenizer())
    assert 3.0 < entropy < 3.6  # English text in bytes
    part = unigram_entropy(config, ByteTokenizer(), max_train_tokens=200_000, max_batches=3)
    assert part != entropy
    assert abs(part - entropy) < 0.5


@given(st.integers(1, 300))
def test_scattered_documents_are_all_the_documents(count):
    order = list(statistics._scattered(count))
    assert sorted(order) == list(range(count))
    if count > 20:
        assert max(np.diff(sorted(order[:10]))) < count / 3


def test_unigram_entropy_needs_targets(tmp_path):
    path, _ = write_documents(tmp_path, [1])
    config = DataConfig(source=path, validation_source=path)
    with pytest.raises(DataError, match="no token to predict"):
        unigram_entropy(config, NumberTokenizer())


def test_rendered_row(tmp_path):
    (tmp_path / "a.txt").write_text("Hi\nyou|Bye")
    config = DataConfig(
        source=str(tmp_path / "a.txt"),
        document_separator="|",
        validation_fraction=0.0,
        sequence_length=11,
        batch_size=1,
        shuffle=False,
    )
    (batch,) = take(make_pipeline(config, ByteTokenizer(), split="train"), 1)
    assert render_row(batch, 0, ByteTokenizer()).splitlines() == [
        "row 0: 2 segments, 11 of 11 tokens, 9 learned",
        "segment 1: columns 0-7, positions 0-7",
        "⟦<bos>⟧Hi⏎you<eos>",
        "segment 2: columns 8-10, positions 0-2",
        "⟦<bos>⟧By",
    ]
