"""Every kind of source gives its documents by index; every fault names its place and remedy."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from jaxlab.data import DataConfig, text_files
from jaxlab.data.sources import open_split
from jaxlab.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))


def documents(source, split="train", **config):
    config = {"validation_fraction": 0.0, **config}
    if isinstance(source, list | tuple):
        source = tuple(map(str, source))
    opened = open_split(
        DataConfig(source=source if type(source) is tuple else str(source), **config), split
    )
    return [opened[index] for index in range(len(opened))]


def write_lines(path, records):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\ntwo ü drei\n", encoding="utf-8")
    assert documents(path) == ["one\n\ntwo ü drei\n"]


def test_text_file_divided_by_a_separator(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>two\n<|end|> \n<|end|>three", encoding="utf-8")
    assert documents(path, document_separator="<|end|>") == ["one", "two\n", "three"]


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_large_text_file_is_cut_without_loss(tmp_path, monkeypatch, mark):
    monkeypatch.setattr(text_files, "MAX_TEXT_BYTES", 64)
    text = mark.join(f"paragraph {i} ü with a few words in it".replace(" ", "_") for i in range(40))
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    parts = documents(path)
    assert "".join(parts) == text
    assert max(len(part.encode()) for part in parts) <= 64
    assert len(parts) > 10
    if mark:
        assert all(part.endswith(mark) for part in parts[:-1])


def test_json_lines_of_texts_and_chats(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"messages": CHAT}])
    path.write_text(path.read_text() + "\n" + json.dumps({"text": "wörld", "n": 1}))
    source = open_split(DataConfig(source=str(path), validation_fraction=0), "train")
    assert [source[i] for i in range(len(source))] == ["one", CHAT, "wörld"]
    assert source.describe(2) == f"{path} line 4"  # blank lines count


def test_json_lines_with_windows_line_ends_and_other_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "one"}\r\n\r\n{"body": "two"}\r\n')
    assert documents(path, text_field="body") == ["one", "two"]


def test_compressed_json_lines(tmp_path):
    records = [{"text": f"document {i}"} for i in range(200)]
    packed = write_lines(tmp_path / "a.jsonl.gz", records)
    zst = tmp_path / "b.jsonl.zst"
    plain = write_lines(tmp_path / "c.jsonl", records).read_bytes()
    with pyarrow.CompressedOutputStream(str(zst), "zstd") as file:
        file.write(plain)
    expected = [record["text"] for record in records]
    assert documents(packed) == expected
    assert documents(zst) == expected
    assert documents(packed) == expected  # from the unpacked copy
    assert len(list((tmp_path / "cache" / "unpacked").iterdir())) == 2


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": [1, 2], "text": ["one", "two"]})
    pyarrow.parquet.write_table(table, path)
    assert documents(path) == ["one", "two"]
    chats = tmp_path / "chats.parquet"
    extra = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [extra]}), chats)
    assert documents(chats) == [extra]


def test_saved_dataset_and_its_own_validation_split(tmp_path):
    train = datasets.Dataset.from_dict({"text": ["a", "b"]})
    held_out = datasets.Dataset.from_dict({"text": ["v"]})
    datasets.DatasetDict(train=train, validation=held_out).save_to_disk(tmp_path / "both")
    assert documents(tmp_path / "both", validation_fraction=0.5) == ["a", "b"]
    assert documents(tmp_path / "both", "validation", validation_fraction=0.5) == ["v"]
    train.save_to_disk(tmp_path / "one")
    assert documents(tmp_path / "one") == ["a", "b"]


def test_directory_and_list(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_text("b")
    (tmp_path / "d" / "sub" / "a.txt").write_text("a")
    (tmp_path / "d" / "ignored.csv").write_text("x")
    (tmp_path / "d" / ".hidden.txt").write_text("x")
    write_lines(tmp_path / "d" / "c.jsonl", [{"text": "c"}])
    assert documents(tmp_path / "d") == ["b", "c", "a"]
    assert documents([tmp_path / "d" / "b.txt", tmp_path / "d" / "c.jsonl"]) == ["b", "c"]


def test_python_docs_split_is_a_partition():
    train = documents("python-docs", validation_fraction=0.05)
    held_out = documents("python-docs", "validation", validation_fraction=0.05)
    everything = documents("python-docs")
    assert sorted(train + held_out) == sorted(everything)
    assert not set(train) & set(held_out)
    sizes = sum(map(len, train)), sum(map(len, held_out))
    assert 1_500_000 < sum(sizes) < 4_000_000
    assert 0.02 < sizes[1] / sum(sizes) < 0.1


def test_whole_documents_are_held_out_of_many(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(300)])
    train = documents(path, validation_fraction=0.1)
    held_out = documents(path, "validation", validation_fraction=0.1)
    assert len(held_out) == 30
    assert sorted(train + held_out) == sorted(f"document {i}" for i in range(300))


def test_the_end_of_each_document_is_held_out_of_few(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    (train,) = documents(tmp_path / "a.txt", validation_fraction=0.1)
    (held_out,) = documents(tmp_path / "a.txt", "validation", validation_fraction=0.1)
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.08 * len(text) < len(held_out) <= 0.1 * len(text)


def test_chats_are_never_cut(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 4)
    assert documents(path, validation_fraction=0.01) == [CHAT] * 3
    assert documents(path, "validation", validation_fraction=0.01) == [CHAT]


def test_validation_source(tmp_path):
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    config = {"validation_source": str(tmp_path / "b.txt"), "validation_fraction": 0.5}
    assert documents(tmp_path / "a.txt", **config) == ["train"]
    assert documents(tmp_path / "a.txt", "validation", **config) == ["held out"]


# --- faults ------------------------------------------------------------------------------------


def fails(source, *words, split="train", **config):
    with pytest.raises(DataError) as caught:
        documents(source, split, **config)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    fails(tmp_path / "corpsu.txt", "no such file", "did you mean", "corpus.txt")
    fails("python-doc", "did you mean python-docs")
    fails("wikitext", "no such file", "hf:wikitext")


def test_empty_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_text(" \n\n ")
    (tmp_path / "c.jsonl").write_text("\n\n")
    (tmp_path / "d").mkdir()
    fails(tmp_path / "a.txt", "a.txt", "empty (0 bytes)")
    fails(tmp_path / "b.txt", "only white space")
    fails(tmp_path / "c.jsonl", "no lines")
    fails(tmp_path / "d", "holds no", ".txt")


def test_empty_data_set(tmp_path):
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    fails(tmp_path / "none", "empty")
    rows = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(rows, tmp_path / "none.parquet")
    fails(tmp_path / "none.parquet", "none.parquet", "empty", "no rows")
    (tmp_path / "a.txt").write_text("x")
    fails(tmp_path / "a.txt", "validation_source", "validation_fraction", split="validation")


def test_line_that_is_not_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": broken}\n')
    fails(path, "a.jsonl line 3", "not JSON", "broken")
    path.write_text('["a"]\n')
    fails(path, "line 1", "list", "'text'")
    path.write_text("[" * 100_000 + "\n")  # deeper than the parser can go
    fails(path, "a.jsonl line 1", "not JSON")


def test_missing_field_names_those_found(tmp_path):
    fails(write_lines(tmp_path / "a.jsonl", [{"body": "x", "id": 1}]), "'body', 'id'", "text_field")
    fails(write_lines(tmp_path / "b.jsonl", [{"text": 3}]), "'text'", "int")
    fails(write_lines(tmp_path / "n.jsonl", [{"text": None}]), "line 1", "'text' is null")
    fails(write_lines(tmp_path / "c.jsonl", [{"messages": [{"role": 1}]}]), "line 1", "role")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    fails(tmp_path / "a.parquet", "'body'", "text_field")


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("grün".encode("latin1"))
    fails(tmp_path / "a.txt", "byte 2 (0xfc)", "iconv")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    fails(tmp_path / "a.jsonl", "byte 24 (0xff)")


def test_damaged_and_unknown_files(tmp_path):
    packed = write_lines(tmp_path / "a.jsonl.gz", [{"text": "x" * 1000}] * 100)
    packed.write_bytes(packed.read_bytes()[:-20])
    fails(packed, "a.jsonl.gz", "damaged")
    (tmp_path / "b.jsonl.zst").write_bytes(b"not zstd at all")
    fails(tmp_path / "b.jsonl.zst", "b.jsonl.zst", "damaged")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    fails(tmp_path / "a.parquet", "a.parquet", "parquet")
    (tmp_path / "a.pdf").write_bytes(b"x")
    fails(tmp_path / "a.pdf", "unknown kind", ".jsonl")
    assert not list((tmp_path / "cache" / "unpacked").iterdir())


def test_data_set_that_the_hub_cannot_give(monkeypatch):
    def refuse(*arguments, **options):
        assert arguments == ("owner/name", "small")
        assert options == {"split": "train"}
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    fails("owner/name:small:train", "owner/name", "no route to host", "save_to_disk")
    fails("hf:owner/name:small:train", "owner/name", "no route to host")


def test_names_of_nothing_are_refused():
    for source in ("", (), ("a.txt", " ")):
        with pytest.raises(ValueError, match="names no data"):
            DataConfig(source=source)
