"""The embedded corpus: what it holds, that it is the same every time, and its cache."""

import pytest

from jaxlab.data import python_docs
from jaxlab.errors import DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_corpus_and_its_cache(cache):
    built = python_docs.documents()
    (file,) = cache.iterdir()
    assert file.name.startswith("python-docs-3.")
    names = [name for name, _ in built]
    assert len(set(names)) == len(names) > 300
    assert not [name for name in names if ".test" in name or "site-packages" in name]
    texts = dict(built)
    assert 'The "assert" statement' in texts["topics/assert"].replace("“", '"')
    textwrap = texts["module/textwrap"]
    assert textwrap.startswith("Module textwrap\n\nText wrapping and filling.")
    assert "\n\n\nclass TextWrapper\n\n" in textwrap
    assert "\n\n\ndedent(text)\n\nRemove any common leading whitespace" in textwrap
    assert "TextWrapper.wrap(self, text)" in textwrap

    assert python_docs.documents() == built  # from the cache
    file.write_text(file.read_text()[:-40])  # as if cut off
    assert python_docs.documents() == built  # built again, and written again
    assert len(python_docs.documents()) == len(built)


def test_corpus_without_a_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("JAXLAB_CACHE", str(blocked))
    monkeypatch.setattr(python_docs, "_modules", lambda root: [("module/a", "x" * 600_000)])
    assert python_docs.documents()[-1][0] == "module/a"


def test_stripped_python(cache, monkeypatch):
    monkeypatch.setattr(python_docs, "_topics", list)
    monkeypatch.setattr(python_docs, "_modules", lambda root: [])
    with pytest.raises(DataError, match=r"carries hardly any documentation.*data\.source"):
        python_docs.documents()
    assert not cache.exists()


def test_split_by_name_is_steady():
    names = [f"module/{i}" for i in range(2000)]
    held_out = [name for name in names if python_docs.is_validation(name, 0.05)]
    assert 60 < len(held_out) < 140
    assert all(python_docs.is_validation(name, 0.2) for name in held_out)
    order = python_docs.validation_order(names)
    assert sorted(order) == list(range(2000))
    assert order[: len(held_out)] != sorted(order[: len(held_out)])
    assert {names[i] for i in order[: len(held_out)]} == set(held_out)
