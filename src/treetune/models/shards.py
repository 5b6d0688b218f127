"""Weights one after the other: out of their files into a model, and out of a model in chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treetune.exceptions import NotInParts
from treetune.models.policy_files import HEAD, embeddings_among, making_room_explained
from treetune.models.saved_weights import persistent_buffers
from treetune.store.files import sync, write_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_READ = "read_weight"
"""Attribute of a parameter that is still in its file: a function that reads its values."""


def in_parts(
    config: PretrainedConfig,
    files: Mapping[str, Path],
    dtypes: tuple[torch.dtype, torch.dtype],
    **options: Any,
) -> PreTrainedModel:
    """A model whose parameters have their shapes and no memory. Values are read in the first of `dtypes`, and
    then cast to the second. Raises NotInParts where `files`, by the name of each weight, lack one of its
    names or have it in another shape, or hold what the model doesn't have. Persistent buffers are read at
    once."""
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtypes[0], **options)
    model.tie_weights()
    names = dict(model.named_parameters())
    buffers = persistent_buffers(model)
    if lacking := sorted((names.keys() | buffers.keys()) - files.keys()):
        raise NotInParts(f"its files have no {lacking[0]}")
    state = model.state_dict().keys()
    if unexpected := sorted(name for name in files.keys() - state if not is_passed_over(model, name)):
        raise NotInParts(f"its files have {unexpected[0]}, which the model has no place for")
    shapes: dict[str, list[int]] = {}
    for file in set(files.values()):
        with safe_open(file, framework="pt") as content:
            shapes |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
    for name, weight in names.items():
        if list(weight.shape) != shapes[name]:
            raise NotInParts(f"{name} is {shapes[name]} in its files, and {list(weight.shape)} in the model")
    for name, buffer in buffers.items():
        if list(buffer.shape) != shapes[name]:
            raise NotInParts(f"{name} is {shapes[name]} in its files, and {list(buffer.shape)} in the model")
        buffer.copy_(_read_file(name, files[name], (buffer.dtype,)))
    placeholders = {}
    for name, weight in names.items():
        # One element that stands for all.
        parameter = nn.Parameter(torch.empty(1, dtype=dtypes[-1]).expand(weight.shape))
        setattr(parameter, _READ, partial(_read_file, name, files[name], dtypes))
        placeholders[id(weight)] = parameter
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = placeholders[id(weight)]
    return model


def is_passed_over(model: PreTrainedModel, name: str) -> bool:
    """Returns whether the model's class says that files may hold a weight that it has no place for."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _read_file(name: str, file: Path, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    from safetensors import safe_open

    # Opened anew, so that the mapped file doesn't stay beside what was read of it.
    with safe_open(file, framework="pt") as content:
        weight = content.get_tensor(name)
    for dtype in dtypes:
        weight = weight.to(dtype)
    return weight


def is_in_file(parameter: nn.Parameter) -> bool:
    """Returns whether its values are still to be read."""
    return hasattr(parameter, _READ)


def read_whole(module: nn.Module, *, recurse: bool = True) -> nn.Module:
    """Reads all weights that are still in files, on this rank, into memory of its own; returns the module.
    Without `recurse`, those of the module itself, and not of its parts."""
    for parameter in module.parameters(recurse):
        if is_in_file(parameter):
            parameter.data = _read(parameter).clone()
    return module


class InTurn(nn.Module):
    """A module whose parameters are read when they are asked for, and only where `reads` says so: elsewhere
    they have memory, and values that somebody is going to send."""

    def __init__(self, module: nn.Module, *, reads: bool) -> None:
        super().__init__()
        self.module, self.reads = module, reads

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self.module.parameters(recurse):
            if is_in_file(parameter):
                parameter.data = (
                    _read(parameter) if self.reads else torch.empty(parameter.shape, dtype=parameter.dtype)
                )
            yield parameter


def _read(parameter: nn.Parameter) -> Tensor:
    read: Callable[[], Tensor] = getattr(parameter, _READ)
    delattr(parameter, _READ)
    return read()


def weight_files(path: str, revision: str | None) -> dict[str, Path] | None:
    """The safetensors files of a model's weights, by their names: in a folder, or of a name on the hub. None
    where it has none."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file)

    if (index := find("model.safetensors.index.json")) is not None:
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {name: find(name) for name in set(named.values())}
        if None in files.values():
            return None
        return {weight: file for weight, name in named.items() if (file := files[name]) is not None}
    if (single := find("model.safetensors")) is None:
        return None
    with safe_open(single, framework="pt") as content:
        return dict.fromkeys(content.keys(), single)


INDEX = "model.safetensors.index.json"
"""The list of all names and their files in Hugging Face's format: with it, a folder is whole."""

Weight = tuple[str, "Tensor"]


def with_head(weights: Iterable[Weight], names: Iterable[str], tied: bool) -> Iterator[Weight]:
    """The weights, with an output head of its own where it is `tied` to the embeddings, or is not among the
    `names`: right behind them, since whoever hands the weights out may not keep them. See
    `write_for_engine`."""
    known = list(names)
    source = embeddings_among(known) if tied or HEAD not in known else None
    for name, weight in weights:
        if name == HEAD and source is not None:
            continue
        yield name, weight
        if name == source:
            yield HEAD, weight


def in_chunks(
    weights: Iterable[Weight], most_bytes: int, keep: Callable[[Tensor], Tensor]
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Weights in their order, as many as have no more than `most_bytes` together, or a single larger one; and
    whether these are the last. Each is taken by `keep` before the next is asked for: until then alone it is
    there."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        if chunk and size + weight.nbytes > most_bytes:
            yield chunk, False
            chunk, size = {}, 0
        chunk[name] = keep(weight)
        size += weight.nbytes
    yield chunk, True


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"model-{number + 1:05d}.safetensors"


def write_shard(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file of weights. Raises OSError that says what to do where there is no room."""
    from safetensors.torch import save_file

    with making_room_explained(path.parent):
        save_file(weights, path, metadata={"format": "pt"})
        sync(path)


def write_index(files: Mapping[str, str], directory: Path) -> None:
    """Writes the file of each weight's name: the folder is whole."""
    write_json(directory / INDEX, {"metadata": {}, "weight_map": dict(files)})
