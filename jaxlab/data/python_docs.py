"""The embedded corpus `python-docs`: English prose that every CPython carries.

Two parts: the language reference in `pydoc_data.topics`, a document a topic, and the docstrings of
the standard library, a document a module, laid out like `help()` with the signature above each
docstring. Modules are read as source through `ast`, never imported. Those that distributions split
off or leave out (tests, tkinter, idlelib, ...) are skipped, so that the corpus is the same wherever
the Python version is the same, and so are the hundred codecs of `encodings`, which all say one
thing. About 2 MB.
"""

import ast
import gc
import hashlib
import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxlab.data.model_source import cache_directory
from jaxlab.errors import DataError

_SKIPPED = {
    *("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    *("encodings", "pydoc_data"),
}
# Part of the cached file's name: raise it when the corpus changes.
_FORMAT = 1


def documents() -> list[tuple[str, str]]:
    """The corpus as `(name, text)` pairs in a fixed order; built once a Python version.

    The first call takes about three seconds and writes `python-docs-VERSION.jsonl` to the user's
    cache directory (`$JAXLAB_CACHE`, else `~/.cache/jaxlab`); later ones read it. Where that can't
    be written, the corpus is built every time.

    Raises:
      DataError: this Python has no documentation to read (a stripped installation).
    """
    version = ".".join(map(str, sys.version_info[:3]))
    path = cache_directory() / f"python-docs-{version}-{_FORMAT}.jsonl"
    try:
        with path.open(encoding="utf-8") as file:
            return [tuple(json.loads(line)) for line in file]
    except (OSError, ValueError):
        pass
    corpus = [*_topics(), *_modules(Path(sysconfig.get_path("stdlib")))]
    if sum(len(text) for _, text in corpus) < 500_000:
        raise DataError(
            f"python-docs: the Python at {sys.base_prefix} carries hardly any documentation "
            f"({len(corpus)} documents): its standard library is missing or compiled. "
            "Use a full CPython, or give data.source a file."
        )
    _write(path, corpus)
    return corpus


def is_validation(name: str, fraction: float) -> bool:
    """Whether the document `name` is held out; about `fraction` of all names are."""
    return _name_hash(name) < fraction


def validation_order(names: Sequence[str]) -> list[int]:
    """Indices of `names` in the order of their hash, so that any prefix is a fair sample."""
    return sorted(range(len(names)), key=lambda index: _name_hash(names[index]))


def _name_hash(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].strip() + "\n"


def _modules(root: Path) -> Iterator[tuple[str, str]]:
    collecting = gc.isenabled()
    gc.disable()  # the syntax trees have no cycles to collect, and the collector doubles the time
    try:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if _SKIPPED.intersection(parts) or parts[0].startswith(("_sysconfigdata", "config-")):
                continue
            name = ".".join(parts).removesuffix(".__init__")
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            sections = list(_docstrings(tree, name))
            if sections:
                yield f"module/{name}", "\n\n\n".join(sections) + "\n"
    finally:
        if collecting:
            gc.enable()


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(node: _Documented, name: str) -> Iterator[str]:
    """The docstrings of a module, class or function and of what it defines, outermost first."""
    docstring = (ast.get_docstring(node) or "").strip()
    if docstring:
        yield f"{_heading(node, name)}\n\n{docstring}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            outer = "" if isinstance(node, ast.Module) else f"{name}."
            yield from _docstrings(child, outer + child.name)


def _heading(node: _Documented, name: str) -> str:
    if isinstance(node, ast.Module):
        return f"Module {name}"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {name}({bases})" if bases else f"class {name}"
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{name}({ast.unparse(node.args)})"


def _write(path: Path, corpus: list[tuple[str, str]]) -> None:
    """Writes the corpus so that a reader sees all of it or nothing; a failure costs only time."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            temporary = file.name
            for document in corpus:
                file.write(json.dumps(document) + "\n")
        Path(temporary).replace(path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
