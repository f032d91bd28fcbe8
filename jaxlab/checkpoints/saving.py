"""Write a Hugging Face directory that transformers loads: whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.checkpoints.hf_config import config_to_hf
from jaxlab.checkpoints.layout import StoredParameter, hf_layout
from jaxlab.checkpoints.loading import INDEX_NAME, WEIGHTS_NAME, Params
from jaxlab.checkpoints.safetensors_file import header_bytes
from jaxlab.data.tokenizers import Tokenizer
from jaxlab.errors import CheckpointError, StorageError
from jaxlab.models.families import AnyModelConfig

_DEFAULT_SHARD_BYTES = 5_000_000_000
# With tokenizer*, chat_template* and model*.safetensors: what a saved model consists of.
_MODEL_FILES = {
    "config.json",
    "generation_config.json",
    INDEX_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file, from row `row` of one parameter, or of several."""

    name: str
    shape: tuple[int, ...]
    row: int | None  # None: the parameter is not stacked
    parts: tuple[StoredParameter, ...]


def save_pretrained(
    directory: str | os.PathLike[str],
    params: Params,
    config: AnyModelConfig,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> None:
    """Save a model as `config.json`, safetensors, tokenizer files and `generation_config.json`.

    Everything is written to a directory beside the target, flushed to the disk, and then takes the
    target's place in one step: an interrupted or failed save leaves the old directory as it was.
    (Into the current directory or a mount point, which cannot be exchanged, the finished files move
    one by one.) Files in the old directory that are not part of a model are kept. Parameters are
    gathered to the host one layer of one parameter at a time. With several processes, all must call
    this; the first one writes.

    Args:
      directory: the target, made if it does not exist.
      params: the tree of `Transformer`, layers stacked.
      config: the model.
      tokenizer: saved along, or None.
      dtype: type of the stored weights, the type of the embedding by default.
      max_shard_bytes: above this the weights are split over several files with an index.

    Raises:
      ArchitectureError: `config` cannot be expressed in Hugging Face's format; lists why.
      CheckpointError: `params` do not have the shapes of `config`.
      StorageError: the disk is full, or the directory cannot be written.
    """
    directory = Path(directory).resolve()  # a symbolic link stays, its target is exchanged
    layout = hf_layout(config)
    _check_params(params, layout, config)
    stored_dtype = jnp.dtype(dtype or params["embed"]["embedding"].dtype)
    hf_config = config_to_hf(config, dtype=stored_dtype.name)
    tensors = _tensors(layout, config)
    writer = jax.process_index() == 0
    failure: Exception | None = None
    staging: Path | None = None
    values = _gathered(params, tensors, stored_dtype)
    try:
        if writer:
            with _storage_errors(directory):
                staging = _staging(directory)
                _check_space(staging, tensors, stored_dtype)
                _write_weights(staging, tensors, values, stored_dtype, max_shard_bytes)
                _write_json(staging / "config.json", hf_config)
                _write_json(staging / "generation_config.json", _generation_config(config))
                if tokenizer is not None:
                    tokenizer.save_pretrained(staging)
                _publish(staging, directory)
    except Exception as error:
        failure = error
    finally:
        if jax.process_count() > 1:
            # Gathering is collective: the others wait for this process even if it cannot write.
            for _ in values:
                pass
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    _agree(failure, directory)


def _check_params(params: Params, layout: list[StoredParameter], config: AnyModelConfig) -> None:
    found = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if all(hasattr(key, "key") for key in path)
    }
    expected = {
        entry.path: (len(entry.layers_of(config)), *entry.shape) if entry.stacked else entry.shape
        for entry in layout
    }
    wrong = [
        f"{'/'.join(map(str, path))} is {found.get(path, 'missing')}, expected "
        f"{expected.get(path, 'absent')}"
        for path in sorted(set(found) | set(expected))
        if found.get(path) != expected.get(path)
    ]
    if wrong:
        raise CheckpointError(
            f"the parameters are not those of the {config.architecture} model to save: "
            f"{'; '.join(wrong[:6])}{f'; … ({len(wrong)} in all)' if len(wrong) > 6 else ''}. "
            "Pass the stacked tree and the configuration it was made with"
        )


def _tensors(layout: list[StoredParameter], config: AnyModelConfig) -> list[_Tensor]:
    """The tensors of the file: those before the layers, layer by layer, those after."""
    groups: dict[tuple[str, Any], list[StoredParameter]] = {}
    for entry in layout:
        groups.setdefault((entry.names[0], entry.layers), []).append(entry)
    before: list[_Tensor] = []
    after: list[_Tensor] = []
    stacked: list[tuple[str, tuple[StoredParameter, ...]]] = []
    for (template, _), entries in groups.items():
        if entries[0].stacked:
            stacked.append((template, tuple(entries)))
        else:
            tensor = _Tensor(template, entries[0].stored_shape, None, tuple(entries))
            (after if stacked else before).append(tensor)
    layers = [
        _Tensor(
            template.format(layer),
            parts[0].stored_shape,
            parts[0].layers_of(config).index(layer),
            parts,
        )
        for layer in range(config.num_layers)
        for template, parts in stacked
        if layer in parts[0].layers_of(config)
    ]
    return [*before, *layers, *after]


def _gathered(params: Params, tensors: list[_Tensor], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Each tensor as stored, on the host, in order."""
    for tensor in tensors:
        parts = [_host_value(_leaf(params, entry.path), tensor.row) for entry in tensor.parts]
        pieces = [entry.unview(part) for entry, part in zip(tensor.parts, parts, strict=True)]
        if tensor.parts[0].fused is not None:
            if tensor.parts[0].interleaved:
                # [H, Dh, …] of each part -> [H, parts, Dh, …], flattened.
                pieces = [np.stack(pieces, axis=1).reshape(tensor.shape)]
            else:
                pieces = [np.concatenate(pieces)]
        yield np.ascontiguousarray(pieces[0].astype(dtype, copy=False))


def _leaf(params: Params, path: tuple[str, ...]) -> jax.Array:
    node: Any = params
    for key in path:
        node = node[key]
    return node


def _host_value(leaf: Any, layer: int | None) -> np.ndarray:
    """`leaf`, or its `layer`, in this host's memory."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    if leaf.is_fully_addressable:
        return np.asarray(leaf if layer is None else leaf[layer])
    sharding = leaf.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise CheckpointError(f"cannot gather a parameter with {sharding}: use NamedSharding")
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    gathered = (
        _replicate(leaf, out=replicated)
        if layer is None
        else _replicate_layer(leaf, np.int32(layer), out=replicated)
    )
    return np.asarray(gathered.addressable_data(0))


@partial(jax.jit, static_argnames="out")
def _replicate(x: jax.Array, *, out: jax.sharding.Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, out)


@partial(jax.jit, static_argnames="out")
def _replicate_layer(x: jax.Array, layer: jax.Array, *, out: jax.sharding.Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(
        jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), out
    )


def _shards(tensors: list[_Tensor], dtype: np.dtype, max_bytes: int) -> list[list[_Tensor]]:
    """Consecutive tensors, as many to a file as fit in `max_bytes`."""
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _size(tensor, dtype)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _size(tensor: _Tensor, dtype: np.dtype) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize


def _write_weights(
    directory: Path,
    tensors: list[_Tensor],
    values: Iterator[np.ndarray],
    dtype: np.dtype,
    max_bytes: int,
) -> None:
    shards = _shards(tensors, dtype, max_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS_NAME
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / name).open("wb") as file:
            file.write(header_bytes([(tensor.name, tensor.shape) for tensor in shard], dtype))
            for tensor in shard:
                file.write(next(values).reshape(-1).view(np.uint8).data)
                weight_map[tensor.name] = name
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        total = sum(_size(tensor, dtype) for tensor in tensors)
        _write_json(
            directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _generation_config(config: AnyModelConfig) -> dict[str, Any]:
    eos = config.eos_token_id
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
    }
    return {key: value for key, value in ids.items() if value is not None}


def _staging(directory: Path) -> Path:
    """A fresh directory to write to, on the disk of `directory`; tidies up after killed saves."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.saving-"
    parent = directory if _stays(directory) else directory.parent
    for stale in parent.glob(prefix + "*"):
        if directory.is_dir():
            # Killed between the exchange and moving over the user's files, which are still in here.
            _keep_foreign_files(old=stale, new=directory)
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _stays(directory: Path) -> bool:
    """Whether `directory` cannot be exchanged: a mount point, or where this process works."""
    return directory.is_dir() and (directory.is_mount() or Path.cwd().is_relative_to(directory))


def _check_space(parent: Path, tensors: list[_Tensor], dtype: np.dtype) -> None:
    """Find out before writing gigabytes."""
    needed = sum(_size(tensor, dtype) for tensor in tensors)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"the model needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
        )


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError):
            # The tokenizers library raises bare Exception("No space left on device (os error 28)").
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            error = OSError(int(code[1]), os.strerror(int(code[1])))
        remedy = {
            errno.ENOSPC: "free some space, or save to another disk",
            errno.EDQUOT: "free some of your quota, or save to another disk",
            errno.EACCES: "choose a directory you may write to",
            errno.EROFS: "choose a directory on a writable disk",
        }.get(error.errno or 0, "choose another directory")
        kept = "; what was there before is intact" if directory.exists() else ""
        raise StorageError(
            f"cannot save to {directory}: {error.strerror or error}{kept}. Remedy: {remedy}"
        ) from error


def _publish(staging: Path, directory: Path) -> None:
    """Put `staging` in the place of `directory`; `staging` then holds what is to be deleted."""
    for entry in staging.rglob("*"):
        if entry.is_file():  # the tokenizer's files
            _sync(entry)
    _sync(staging)
    staging.chmod(0o755 & ~_umask())
    if _stays(directory):
        _replace_files(staging, directory)
    elif directory.exists():
        _exchange(staging, directory)
        _keep_foreign_files(old=staging, new=directory)
    else:
        staging.rename(directory)
    _sync(directory.parent)


def _replace_files(staging: Path, directory: Path) -> None:
    """Move every file over, then delete those of the old model that the new one does not have."""
    new = {entry.name for entry in staging.iterdir()}
    for entry in staging.iterdir():
        entry.replace(directory / entry.name)
    for entry in directory.iterdir():
        if _is_model_file(entry) and entry.name not in new:
            entry.unlink()
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchange(a: Path, b: Path) -> None:
    """Swap two directories: in one step on Linux, in two renames elsewhere."""
    if sys.platform == "linux":
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is not None and rename(here, bytes(a), here, bytes(b), exchange) == 0:
            return
    aside = a.with_name(a.name + "-old")
    b.rename(aside)
    try:
        a.rename(b)
    except OSError:
        aside.rename(b)
        raise
    aside.rename(a)


def _keep_foreign_files(old: Path, new: Path) -> None:
    """Move over what the user keeps beside the model: logs, notes, a README."""
    for entry in old.iterdir():
        if not _is_model_file(entry) and not (new / entry.name).exists():
            entry.rename(new / entry.name)


def _is_model_file(path: Path) -> bool:
    name = path.name
    return (
        name in _MODEL_FILES
        or name.startswith(("tokenizer", "chat_template"))
        or (name.startswith("model") and path.suffix == ".safetensors")
    )


def _agree(failure: Exception | None, directory: Path) -> None:
    """Every process learns whether the first one has written, and fails with it."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = multihost_utils.broadcast_one_to_all(np.array(failure is not None))
        if failed and failure is None:
            raise StorageError(f"the first process could not save to {directory}: see its error")
    if failure is not None:
        raise failure
