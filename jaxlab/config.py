"""Typed configuration: a YAML file plus `key=value` overrides, read into a pydantic model.

Errors name the key, where it stands, what was expected, and the nearest name that exists:

    configs/quickstart.yaml:14: unknown key `training.step`; did you mean `training.steps`?

A file is strict: no unknown key, no duplicate key, no string where a number belongs.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from jaxlab.errors import ConfigError

Config = TypeVar("Config", bound=pydantic.BaseModel)
_COMMAND_LINE = "command line"


class _Loader(yaml.SafeLoader):
    """The safe loader, with `1e-4` a number (YAML 1.1 reads it as a string) and no dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(cls: type[Config], path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the YAML file `path`, applies `overrides`, and validates the result as a `cls`.

    Args:
      cls: a pydantic model class.
      path: a YAML file holding one mapping.
      overrides: `"a.b.c=value"` strings, applied in order; the value is read as YAML, so
        `training.steps=100`, `data.source=[a.txt,b.txt]` and `model.sliding_window=null` have
        the types one expects.

    Returns:
      The validated `cls`.

    Raises:
      ConfigError: the file is missing or is no YAML mapping, a key is unknown or duplicated, a
        value has the wrong type. The message names file, line, key, value and remedy.
    """
    path = Path(path)
    tree, origins = _read(path)
    for override in overrides:
        _apply_override(tree, origins, override)
    return parse_config(cls, tree, origins, default_origin=str(path))


def parse_config(
    cls: type[Config],
    tree: dict[str, Any],
    origins: dict[str, str] | None = None,
    *,
    default_origin: str = "config",
) -> Config:
    """Validates plain data as a `cls`; `origins` maps dotted keys to where they were written.

    Raises:
      ConfigError: as `load_config`.
    """
    origins = origins or {}
    try:
        # Strict about scalars. Configs are frozen, so their sequences are tuples.
        return cls.model_validate(_tuples(tree), strict=True)
    except pydantic.ValidationError as error:
        messages = _explain(cls, error.errors(), origins, default_origin)
        raise ConfigError("\n".join(messages)) from error


def reasons(error: pydantic.ValidationError) -> str:
    """The faults of data that came from elsewhere than a config file: `key: fault; key: fault`."""
    return "; ".join(
        f"{'.'.join(map(str, details['loc'])) or 'model'}: {_message(details)}"
        for details in error.errors()
    )


def _message(details: Any) -> str:
    """What pydantic says, without its prefixes."""
    return details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _lists(value: Any) -> Any:
    """As it was written, for messages."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return list(map(_lists, value)) if isinstance(value, tuple) else value


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}{_neighbours(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config {path}: {error}") from error
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"config {path} is empty; expected a mapping such as `name: my-run`")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"config {path} is not a mapping of keys to values")
        origins: dict[str, str] = {}
        _index_lines(root, "", path, origins)
        return loader.construct_document(root), origins
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + str(getattr(error, "problem", None) or error)


def _neighbours(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    names = sorted(str(found) for found in folder.glob("*.yaml"))
    close = difflib.get_close_matches(str(path), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if names else ""


def _index_lines(node: yaml.MappingNode, prefix: str, path: Path, origins: dict[str, str]) -> None:
    """Fills `origins` with `file:line` for every key; refuses a key written twice."""
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: a key must be a plain word")
        key = f"{prefix}{key_node.value}"
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if key in origins:
            raise ConfigError(f"{origin}: key `{key}` was already given at {origins[key]}")
        origins[key] = origin
        if isinstance(value_node, yaml.MappingNode):
            _index_lines(value_node, f"{key}.", path, origins)


def _apply_override(tree: dict[str, Any], origins: dict[str, str], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key or not all(key.split(".")):
        lacks = " (no key stands before the =)" if separator and not key else ""
        raise ConfigError(
            f"override {override!r} is not of the form key=value or key.sub=value{lacks}"
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of override {override!r} is not valid YAML: {_one_line(error)}"
        ) from error
    *parents, leaf = key.split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        elif not isinstance(child, dict):
            parent = ".".join(parents[: depth + 1])
            raise ConfigError(
                f"override {override!r}: `{parent}` is {child!r}, which has no keys below it"
            )
        node = child
    node[leaf] = value
    for known in [known for known in origins if known == key or known.startswith(f"{key}.")]:
        del origins[known]
    origins[key] = _COMMAND_LINE


def _explain(
    cls: type[pydantic.BaseModel],
    errors: Sequence[Any],
    origins: dict[str, str],
    default_origin: str,
) -> list[str]:
    """One message a faulty key, misspelt keys first: a missing one is often their consequence."""
    unknown: list[str] = []
    missing: list[str] = []
    invalid: list[str] = []
    wrong: dict[str, tuple[str, Any, list[str]]] = {}  # a union reports once a member: merged
    for details in errors:
        key, parent, leaf = _locate(cls, details["loc"])
        origin = _origin(key, origins) or default_origin
        message = _message(details)
        if details["type"] == "extra_forbidden":
            unknown.append(f"{origin}: unknown key `{key}`; {_suggestion(cls, parent, key, leaf)}")
        elif details["type"] == "missing":
            missing.append(f"{origin}: `{key}` is required and missing")
        elif details["type"] in ("value_error", "assertion_error"):
            invalid.append(f"{origin}: {f'`{key}`: ' if key else ''}{message}")
        else:
            expected = message.removeprefix("Input should be ")
            if expected.startswith("a valid dictionary"):
                expected = "a mapping"
            expected = expected.replace("a valid tuple", "a list")
            if details["type"] == "too_short":
                expected = f"a list of at least {details['ctx']['min_length']}"
            elif details["type"] == "string_too_short":
                expected = "a text that is not empty"
            wrong.setdefault(key, (origin, _lists(details["input"]), []))[2].append(expected)
    for key, (origin, value, expectations) in wrong.items():
        expected = " or ".join(dict.fromkeys(expectations))
        invalid.append(f"{origin}: `{key}` is {value!r}; expected {expected}")
    return unknown + missing + invalid


def _origin(key: str, origins: dict[str, str]) -> str | None:
    """Where `key`, or the nearest key above it, was written."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None


def _locate(
    cls: type[pydantic.BaseModel], location: tuple[int | str, ...]
) -> tuple[str, type[pydantic.BaseModel], str]:
    """(dotted key, the model class that holds it, its last name) of a pydantic error location.

    Pydantic puts the names of union members into locations; a reader's file has no such key.
    """
    names: list[str] = []
    current: type[pydantic.BaseModel] = cls
    parent, leaf = cls, ""
    for part in location:
        if isinstance(part, int):
            names[-1] += f"[{part}]"
            continue
        if part.startswith("["):
            continue  # the tag of a list among a union's members
        field = current.model_fields.get(leaf)
        members = _model_classes(field.annotation) if field else []
        tagged = [member for member in members if member.__name__ == part]
        if tagged:
            current, leaf = tagged[0], ""
            continue
        if members:
            current = next((m for m in members if part in m.model_fields), members[0])
        elif leaf:
            break  # the name of a member of a scalar union such as `int | str`
        names.append(part)
        parent, leaf = current, part
    return ".".join(names), parent, leaf


def _model_classes(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        return [m for part in typing.get_args(annotation) for m in _model_classes(part)]
    return []


def _all_keys(
    cls: type[pydantic.BaseModel], section: str = ""
) -> Iterator[tuple[str, str, type[pydantic.BaseModel]]]:
    """(dotted section with its last dot, name, class that holds it) of every key there may be."""
    for name, field in cls.model_fields.items():
        yield section, name, cls
        for inner in _model_classes(field.annotation):
            yield from _all_keys(inner, f"{section}{name}.")


def _suggestion(
    cls: type[pydantic.BaseModel], parent: type[pydantic.BaseModel], key: str, leaf: str
) -> str:
    """What may have been meant: a key of the same section, of its other kinds, or elsewhere."""
    prefix = key.removesuffix(leaf)
    plain = re.sub(r"\[\d+\]", "", key)
    siblings = sorted(parent.model_fields)
    kinds: dict[str, list[str]] = {}  # keys of the section's other kinds: the settings they go with
    elsewhere: list[tuple[str, str]] = []
    for section, name, owner in _all_keys(cls):
        if section == plain.removesuffix(leaf):
            if name not in siblings:
                kinds.setdefault(name, []).append(_setting(prefix, owner))
        elif not plain.startswith(f"{section}{name}."):
            elsewhere.append((section, name))
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)
    hints = [f"did you mean `{prefix}{close[0]}`?"] if close else []
    if leaf in kinds:
        hints.append(f"`{key}` goes with {_alternatives(kinds[leaf])}")
    elif not close:
        for name in difflib.get_close_matches(leaf, kinds, n=1, cutoff=0.7):
            hints.append(
                f"did you mean `{prefix}{name}`, which goes with {_alternatives(kinds[name])}?"
            )
    if hints:
        return " ".join(hints)
    names = difflib.get_close_matches(leaf, {name for _, name in elsewhere}, n=1, cutoff=0.8)
    found = [f"{section}{name}" for section, name in elsewhere if name in names]
    if found:
        nearest = max(found, key=lambda known: difflib.SequenceMatcher(a=plain, b=known).ratio())
        return f"did you mean `{nearest}`?"
    holder = f"`{prefix.rstrip('.')}`" if prefix else "the config"
    return f"{holder} has the keys {', '.join(siblings)}"


def _setting(section: str, owner: type[pydantic.BaseModel]) -> str:
    """The key and value that make a section be of the kind `owner`, as `attention.pattern=cca`."""
    for name, field in owner.model_fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            values = typing.get_args(field.annotation)
            if len(values) == 1:
                return f"{section}{name}={values[0]}"
    return owner.__name__


def _alternatives(settings: Sequence[str]) -> str:
    """Some settings of one key, in words: `attention.pattern=cca or xattention`."""
    key = settings[0].partition("=")[0]
    values = [setting.removeprefix(f"{key}=") for setting in settings]
    return f"{key}={' or '.join(dict.fromkeys(values))}" if "=" in settings[0] else values[0]
