"""Read a model's description and parameters from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.checkpoints.gguf_model import IGNORED_TENSORS, config_from_gguf
from jaxlab.checkpoints.hf_config import config_from_hf
from jaxlab.checkpoints.layout import SHIFT_NAMES, StoredParameter, gguf_layout, hf_layout
from jaxlab.checkpoints.safetensors_file import SafetensorsFile
from jaxlab.data.gguf_file import GGUFFile
from jaxlab.data.tokenizers import Tokenizer, load_tokenizer
from jaxlab.errors import CheckpointError
from jaxlab.models.config import ModelConfig
from jaxlab.models.families import AnyModelConfig

Params = dict[str, Any]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Constants that old checkpoints carry along: causal masks and rotary tables.
_IGNORED_HF = re.compile(r"\.rotary_emb\.inv_freq$|\.attention\.(bias|masked_bias)$")
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 6


def read_config(path: str | os.PathLike[str]) -> AnyModelConfig:
    """The description of the model in a Hugging Face directory or a `.gguf` file.

    End-of-text ids of `generation_config.json`, where chat models list them all, are included.

    Raises:
      CheckpointError: the files are missing or malformed.
      ArchitectureError: the architecture is not implemented.
    """
    path = Path(path)
    if _is_gguf(path):
        return config_from_gguf(GGUFFile(path))
    hf = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():
        ends = _as_list(_read_json(generation).get("eos_token_id")) + _as_list(
            hf.get("eos_token_id")
        )
        if ends:
            hf["eos_token_id"] = list(dict.fromkeys(ends))
    return config_from_hf(hf)


def load_params(
    path: str | os.PathLike[str],
    config: AnyModelConfig,
    *,
    shardings: Any = None,
    param_dtype: Any = None,
) -> Params:
    """Read a model's parameters, one stacked parameter at a time.

    Files are memory-mapped: what is in memory besides the result is one parameter at most. With
    `shardings`, each process reads the slices of its own devices only.

    Args:
      path: a Hugging Face directory (`model.safetensors`, or shards with an index), or a GGUF file.
      config: the model, as from `read_config(path)`.
      shardings: pytree of `jax.sharding.Sharding` with the structure of the result, or None for the
        default device.
      param_dtype: type of the result, `config.param_dtype` by default.

    Returns:
      The nested dict of `jax.Array` that `Transformer` takes, layers stacked.

    Raises:
      CheckpointError: a file is missing, truncated or malformed; tensors are missing, unexpected or
        of another shape than `config` says. The message lists them.
    """
    path = Path(path)
    dtype = jnp.dtype(param_dtype or config.param_dtype)
    if _is_gguf(path):
        if not isinstance(config, ModelConfig):
            raise CheckpointError(f"{path}: GGUF files of {config.architecture} are not read")
        return _params_from_gguf(GGUFFile(path), config, dtype, shardings)
    source = _SafetensorsDirectory(path)
    return _read_tree(source, hf_layout(config), config, dtype, shardings)


def load_gguf(
    path: str | os.PathLike[str], *, shardings: Any = None, param_dtype: Any = None
) -> tuple[ModelConfig, Params, Tokenizer]:
    """All that is in a GGUF file: description, dequantised parameters, tokenizer with template.

    Arguments and errors as in `load_params` and `jaxlab.data.tokenizers.load_tokenizer`.
    """
    file = GGUFFile(path)
    config = config_from_gguf(file)
    dtype = jnp.dtype(param_dtype or config.param_dtype)
    return config, _params_from_gguf(file, config, dtype, shardings), load_tokenizer(path)


def _is_gguf(path: Path) -> bool:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a model directory or a .gguf file")
    return path.is_file()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a complete Hugging Face model directory "
            f"(it holds {_listed(sorted(p.name for p in path.parent.iterdir())) or 'nothing'})"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: fetch the file again")
    return value


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    text = ", ".join(names[:_MAX_LISTED])
    return text + (f", … ({len(names)} in all)" if len(names) > _MAX_LISTED else "")


class _Source(Protocol):
    """What `_read_tree` needs of a checkpoint."""

    label: str
    lazy: bool  # whether `tensor` is a view that reads only what is sliced from it

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def tensor(self, name: str) -> np.ndarray: ...
    def ignored(self, name: str) -> bool: ...
    def release_pages(self) -> None: ...


class _SafetensorsDirectory:
    lazy = True

    def __init__(self, directory: Path):
        self.label = str(directory)
        self._files: dict[str, SafetensorsFile] = {}
        for filename, names in _weight_files(directory).items():
            file = SafetensorsFile(directory / filename)
            absent = [] if names is None else [name for name in names if name not in file.entries]
            if absent:
                raise CheckpointError(
                    f"{directory / filename} lacks tensors that {INDEX_NAME} places in it: "
                    f"{_listed(absent)}; the files do not belong together, fetch them all again"
                )
            for name in file.entries if names is None else names:
                self._files[name] = file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[name].shape for name, file in self._files.items()}

    def tensor(self, name: str) -> np.ndarray:
        file = self._files[name]
        dtype = file.entries[name].dtype
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} is stored as {dtype}, a quantised checkpoint; "
                f"supported are {', '.join(_FLOATS)}: use the unquantised model"
            )
        return file.tensor(name)

    def ignored(self, name: str) -> bool:
        return bool(_IGNORED_HF.search(name))

    def release_pages(self) -> None:
        for file in set(self._files.values()):
            file.release_pages()


def _weight_files(directory: Path) -> dict[str, list[str] | None]:
    """File name -> the tensors to take from it (None: all)."""
    if (directory / WEIGHTS_NAME).is_file():
        return {WEIGHTS_NAME: None}
    if not (directory / INDEX_NAME).is_file():
        raise CheckpointError(_no_weights(directory))
    weight_map = _read_json(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX_NAME} has no weight_map: fetch the file again")
    files: dict[str, list[str] | None] = {}
    for name, filename in weight_map.items():
        # A name with a directory in it could point anywhere on this machine.
        if not isinstance(filename, str) or Path(filename).name != filename:
            raise CheckpointError(
                f"{directory / INDEX_NAME} places {name!r} in {filename!r}, which is not a "
                "file name"
            )
        files.setdefault(filename, []).append(name)  # type: ignore[union-attr]
    absent = [filename for filename in files if not (directory / filename).is_file()]
    if absent:
        raise CheckpointError(
            f"{directory} lacks shards that {INDEX_NAME} names: {_listed(absent)}; fetch them"
        )
    return files


def _no_weights(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.glob("*.bin"))
    if pickles:
        return (
            f"{directory} has weights as pickles only ({_listed(pickles)}), which can run "
            "code and are "
            "not read. Convert them where torch and transformers are installed: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained('converted')"
        )
    ggufs = sorted(p.name for p in directory.glob("*.gguf"))
    if ggufs:
        return f"{directory} has GGUF files ({_listed(ggufs)}): give the path of one of them"
    return f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}: fetch the weights"


class _GGUFSource:
    lazy = False

    def __init__(self, file: GGUFFile):
        self.label = str(file.path)
        self._file = file
        self.tensor = file.tensor
        self.release_pages = file.release_pages

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._file.tensors.items()}

    def ignored(self, name: str) -> bool:
        return name in IGNORED_TENSORS


def _params_from_gguf(
    file: GGUFFile, config: ModelConfig, dtype: np.dtype, shardings: Any
) -> Params:
    return _read_tree(_GGUFSource(file), gguf_layout(config), config, dtype, shardings)


def _read_tree(
    source: _Source,
    layout: list[StoredParameter],
    config: AnyModelConfig,
    dtype: np.dtype,
    shardings: Any,
) -> Params:
    shapes = source.shapes()
    names = _check_tensors(source, shapes, layout, config)
    params: Params = {}
    for entry in layout:
        sharding = shardings
        if shardings is not None:
            for key in entry.path:
                sharding = sharding[key]
        if entry.path in names:
            array = _read_parameter(source, entry, names[entry.path], dtype, sharding)
        else:
            array = _identity_shift(entry, config, sharding)
        node = params
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = array
        source.release_pages()
    return params


def _check_tensors(
    source: _Source,
    shapes: Mapping[str, tuple[int, ...]],
    layout: list[StoredParameter],
    config: AnyModelConfig,
) -> dict[tuple[str, ...], list[str]]:
    """Compare all of the file with the model before reading. Returns path -> a name per layer."""
    names: dict[tuple[str, ...], list[str]] = {}
    missing, mismatched = {}, {}
    for entry in layout:
        layers = entry.layers_of(config) if entry.stacked else (0,)
        first = (name for name in entry.names if name.format(layers[0]) in shapes)
        template = next(first, entry.names[0])
        wanted = [template.format(layer) for layer in layers]
        if entry.path[-1] in SHIFT_NAMES and not any(name in shapes for name in wanted):
            _check_shift_can_start(source, config)
            continue
        names[entry.path] = wanted
        for name in names[entry.path]:
            if name not in shapes:
                missing[name] = f"{name} {list(entry.stored_shape)}"
            elif shapes[name] != entry.stored_shape:
                mismatched[name] = (
                    f"{name} is {list(shapes[name])}, expected {list(entry.stored_shape)}"
                )
    used = {name for group in names.values() for name in group}
    tied = ("lm_head.weight", "embed_out.weight") if config.tie_word_embeddings else ()
    extra = [
        name
        for name in shapes
        if name not in used and name not in tied and not source.ignored(name)
    ]
    complaints = []
    if mismatched:
        complaints.append(f"tensors of another shape: {_listed(mismatched.values())}")
    if missing:
        complaints.append(f"missing tensors: {_listed(missing.values())}")
    if extra:
        complaints.append(f"unexpected tensors: {_listed(sorted(extra))}")
    if complaints:
        hint = ""
        if any(name in missing for name in ("lm_head.weight", "embed_out.weight")):
            hint = (
                " (if the model ties its embeddings, set tie_word_embeddings: true in config.json)"
            )
        raise CheckpointError(
            f"{source.label} does not hold the {config.architecture} model of its configuration "
            f"({config.num_layers} layers, width {config.hidden_size}, vocabulary "
            f"{config.vocab_size}): "
            f"{'; '.join(complaints)}{hint}. Check that config and weights belong together, "
            "or fetch both again"
        )
    return names


def _check_shift_can_start(source: _Source, config: AnyModelConfig) -> None:
    assert isinstance(config, ModelConfig)
    assert config.kv_shift is not None
    if config.kv_shift.init != "identity":
        raise CheckpointError(
            f"{source.label} holds no coefficients for kv_shift (init {config.kv_shift.init!r}), "
            "and random ones would ruin a trained model: set kv_shift.init to 'identity' to start "
            "from its unshifted attention, or leave kv_shift out"
        )


def _identity_shift(
    entry: StoredParameter, config: AnyModelConfig, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Coefficients that leave keys and values as they are, for a checkpoint that has none."""
    taps = np.zeros((config.num_layers, *entry.shape), np.float32)
    taps[..., -1] = 1.0
    return jnp.asarray(taps) if sharding is None else jax.device_put(taps, sharding)


def _read_parameter(
    source: _Source,
    entry: StoredParameter,
    names: list[str],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    shape = (len(names), *entry.shape) if entry.stacked else entry.shape
    if entry.path[-1] in SHIFT_NAMES:
        dtype = np.dtype(np.float32)  # a few numbers, and long sums in their gradients

    def read(index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of the parameter, cast, in memory of its own."""
        if not entry.stacked:
            return np.array(entry.view(source.tensor(names[0]))[index], dtype, order="C")
        layers = range(len(names))[index[0]]
        part = np.empty(
            (len(layers), *(len(range(n)[s]) for n, s in zip(entry.shape, index[1:], strict=True))),
            dtype,
        )
        for row, layer in enumerate(layers):
            part[row] = entry.view(source.tensor(names[layer]))[index[1:]]
        return part

    everything = (slice(None),) * len(shape)
    if sharding is None:
        return jnp.asarray(read(everything))
    if not source.lazy:
        # Dequantising again for every shard would cost more than holding this one parameter.
        whole = read(everything)
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    # Devices that hold the same part (replicas) share one read; no more than one part is here.
    holders: dict[Any, list[jax.Device]] = {}
    indices = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        assert index is not None
        holders.setdefault(tuple((s.start, s.stop) for s in index), []).append(device)
    arrays = []
    for devices in holders.values():
        index = indices[devices[0]]
        assert index is not None
        part = read(index)
        arrays += [jax.device_put(part, device) for device in devices]
        jax.block_until_ready(arrays[-len(devices) :])
        source.release_pages()
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
