"""Handles weights one after the other, so that a model is never in memory as a whole: reads them from files
when they are needed, and sends them to engines in chunks."""

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
from treetune.models.policy_files import HEAD_WEIGHT, embeddings_among, explain_failed_write
from treetune.models.saved_weights import persistent_buffers
from treetune.store.files import sync_to_disk, write_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_READ_ATTRIBUTE = "read_weight"
"""The name of an attribute that a parameter has as long as its values are only in a file. The attribute is a
function that reads the values."""


def make_model_in_parts(
    config: PretrainedConfig,
    files: Mapping[str, Path],
    dtypes: tuple[torch.dtype, torch.dtype],
    **options: Any,
) -> PreTrainedModel:
    """Makes a model whose parameters have shapes but no memory.

    `InTurn` and `read_whole` read the values of a parameter when they are needed. Persistent buffers are read
    at once.

    Args:
        config: The model's architecture.
        files: The file of each weight, by the weight's name.
        dtypes: The dtype in which a whole model would be loaded, and the dtype to which it would then be
            cast. Values are cast to both in turn, so that they are the same as in such a model.
        options: Further arguments of the model's class.

    Raises:
        NotInParts: The files and the model don't have the same weights, or not in the same shapes.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    loaded_dtype, final_dtype = dtypes
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=loaded_dtype, **options)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    buffers = persistent_buffers(model)
    _refuse_other_weights(model, parameters | buffers, files)
    for name, buffer in buffers.items():
        buffer.copy_(_read_file(name, files[name], dtypes=(buffer.dtype,)))
    placeholders = {}  # by the id of the parameter that they replace
    for name, weight in parameters.items():
        # The expanded tensor has the shape of the weight, but only one element in memory.
        placeholder = nn.Parameter(torch.empty(1, dtype=final_dtype).expand(weight.shape))
        setattr(placeholder, _READ_ATTRIBUTE, partial(_read_file, name, files[name], dtypes))
        placeholders[id(weight)] = placeholder
    # Modules with tied weights share a parameter, and get the same placeholder.
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = placeholders[id(weight)]
    return model


def _refuse_other_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], files: Mapping[str, Path]
) -> None:
    """Raises NotInParts unless the files have the model's weights, in the same shapes, and no others."""
    from safetensors import safe_open

    missing = sorted(weights.keys() - files.keys())
    if missing:
        raise NotInParts(f"its files have no {missing[0]}")
    # The state dict also has the further names of tied weights, which `weights` lacks.
    further_names = files.keys() - model.state_dict().keys()
    unexpected = sorted(name for name in further_names if not may_be_ignored(model, name))
    if unexpected:
        raise NotInParts(f"its files have {unexpected[0]}, which the model doesn't have")
    shapes: dict[str, list[int]] = {}
    for file in set(files.values()):
        with safe_open(file, framework="pt") as content:
            shapes |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
    for name, weight in weights.items():
        if list(weight.shape) != shapes[name]:
            raise NotInParts(f"{name} is {shapes[name]} in its files, and {list(weight.shape)} in the model")


def may_be_ignored(model: PreTrainedModel, name: str) -> bool:
    """Returns whether the model's class allows files to have a weight that the model doesn't have."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _read_file(name: str, file: Path, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Reads a weight, and casts it to each dtype in turn (see `make_model_in_parts`)."""
    from safetensors import safe_open

    # The file is opened for each weight, so that its mapping doesn't stay in memory.
    with safe_open(file, framework="pt") as content:
        weight = content.get_tensor(name)
    for dtype in dtypes:
        weight = weight.to(dtype)
    return weight


def is_in_file(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter's values are still to be read."""
    return hasattr(parameter, _READ_ATTRIBUTE)


def read_whole(module: nn.Module) -> nn.Module:
    """Reads all weights that are still in files into this rank's memory, and returns the module."""
    for parameter in module.parameters():
        if is_in_file(parameter):
            parameter.data = _read_values(parameter).clone()  # the weight may be a view of the mapped file
    return module


class InTurn(nn.Module):
    """A wrapper of a module. Its method `parameters` allocates the memory of a parameter just before it
    yields the parameter.

    DeepSpeed's `zero.Init` takes the parameters one after the other, and sends the first rank's values of
    each to the other ranks. So only the first rank, which has `reads`, reads values. The others allocate
    memory for them.
    """

    def __init__(self, module: nn.Module, *, reads: bool) -> None:
        super().__init__()
        self.module, self.reads = module, reads

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters. A parameter that is still in a file gets memory just before it is yielded,
        and its values if this rank reads."""
        for parameter in self.module.parameters(recurse):
            if is_in_file(parameter):
                if self.reads:
                    parameter.data = _read_values(parameter)
                else:
                    # Memory for the values that DeepSpeed sends from the first rank.
                    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            yield parameter


def _read_values(parameter: nn.Parameter) -> Tensor:
    """Reads the values of a parameter, and marks it as read."""
    read: Callable[[], Tensor] = getattr(parameter, _READ_ATTRIBUTE)
    delattr(parameter, _READ_ATTRIBUTE)
    return read()


def weight_files(path: str, revision: str | None) -> dict[str, Path] | None:
    """Returns the safetensors file of each weight of a model, by the weight's name; None if the model has no
    such files, or if some are missing.

    Args:
        path: A folder, or a name on the hub.
    """
    from safetensors import safe_open
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file)

    index = find(INDEX_FILE)
    if index is not None:
        file_names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files: dict[str, Path] = {}
        for file_name in set(file_names.values()):
            file = find(file_name)
            if file is None:
                return None
            files[file_name] = file
        return {weight: files[file_name] for weight, file_name in file_names.items()}
    single_file = find("model.safetensors")
    if single_file is None:
        return None
    with safe_open(single_file, framework="pt") as content:
        return dict.fromkeys(content.keys(), single_file)


INDEX_FILE = "model.safetensors.index.json"
"""The file that lists all weights with their files, in Hugging Face's format. It is written last, so a folder
that has it is complete."""

NamedWeight = tuple[str, "Tensor"]
"""A weight's name in the model, and the weight."""


def add_head(weights: Iterable[NamedWeight], names: Iterable[str], tied: bool) -> Iterator[NamedWeight]:
    """Yields the weights with a separate output head, which the engine needs (`write_for_engine`).

    If the head is tied to the embeddings, or `names` doesn't have it, the embeddings are yielded again under
    the head's name, directly after the embeddings: a weight may exist only until the next one is requested.

    Args:
        names: The names of all weights.
        tied: Whether the head is tied to the embeddings.
    """
    names = list(names)
    embeddings = embeddings_among(names) if tied or HEAD_WEIGHT not in names else None
    for name, weight in weights:
        if name == HEAD_WEIGHT and embeddings is not None:
            continue  # the head is yielded after the embeddings
        yield name, weight
        if name == embeddings:
            yield HEAD_WEIGHT, weight


def split_into_chunks(
    weights: Iterable[NamedWeight], most_bytes: int, keep: Callable[[Tensor], Tensor]
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields chunks of weights in their order, each with True if it is the last one and False if not.

    A chunk has as many weights as fit into `most_bytes`, or a single weight that is larger.

    Args:
        keep: Copies a weight, which may exist only until the next one is requested.
    """
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
    """Returns the file of a chunk. Chunks are numbered from 0 and files from 1: chunk 0 is in
    ``model-00001.safetensors``."""
    return directory / f"model-{number + 1:05d}.safetensors"


def write_shard(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file of weights. Raises OSError with the remedy if there is no space."""
    from safetensors.torch import save_file

    with explain_failed_write(path.parent):
        save_file(weights, path, metadata={"format": "pt"})  # as in files of transformers
        sync_to_disk(path)


def write_index(files: Mapping[str, str], directory: Path) -> None:
    """Writes the index, which makes the folder complete.

    Args:
        files: The name of each weight's file, by the weight's name.
    """
    write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": dict(files)})
