"""Models whose weights stay in their files until somebody deals them out, one after the other.

Under ZeRO-3 and AutoTP each rank keeps its part. A model that is read whole first takes its whole size of the
machine's memory for every rank; here a rank has its parts and the one weight that is being dealt out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_READ = "read_weight"
"""Of a parameter that is still in its file: gives its values."""


class NotInParts(Exception):
    """A model's weights can't be read one after the other; the words say why."""


def in_parts(
    config: PretrainedConfig,
    files: Mapping[str, Path],
    dtypes: tuple[torch.dtype, torch.dtype],
    **options: Any,
) -> PreTrainedModel:
    """A model whose parameters have their shapes and no memory. Values are read as `dtypes` say: the first,
    and then the second. Raises NotInParts where `files`, by the name of each weight, lack one of its names
    or have it in another shape."""
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtypes[0], **options)
    model.tie_weights()
    names = dict(model.named_parameters())
    if lacking := sorted(names.keys() - files.keys()):
        raise NotInParts(f"its files have no {lacking[0]}")
    shapes: dict[str, list[int]] = {}
    for file in set(files.values()):
        with safe_open(file, framework="pt") as content:
            shapes |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
    for name, weight in names.items():
        if list(weight.shape) != shapes[name]:
            raise NotInParts(f"{name} is {shapes[name]} in its files, and {list(weight.shape)} in the model")
    placed = {id(weight): _placeholder(name, weight, files[name], dtypes) for name, weight in names.items()}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = placed[id(weight)]
    return model


def _placeholder(name: str, weight: Tensor, file: Path, dtypes: tuple[torch.dtype, ...]) -> nn.Parameter:
    def read() -> Tensor:
        from safetensors import safe_open

        # Opened anew, so that the mapped file doesn't stay beside what was read of it.
        with safe_open(file, framework="pt") as content:
            found = content.get_tensor(name)
        for dtype in dtypes:
            found = found.to(dtype)
        return found

    # One element that stands for all.
    parameter = nn.Parameter(torch.empty(1, dtype=dtypes[-1]).expand(weight.shape))
    setattr(parameter, _READ, read)
    return parameter


def is_in_file(parameter: nn.Parameter) -> bool:
    """Whether its values are still to be read."""
    return hasattr(parameter, _READ)


def read_whole(module: nn.Module, *, recurse: bool = True) -> nn.Module:
    """Reads what is still in files, on this rank, into memory of its own; the module. Without `recurse`, only
    what is the module's own, and not its parts'."""
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
                values = (
                    _read(parameter) if self.reads else torch.empty(parameter.shape, dtype=parameter.dtype)
                )
                parameter.data = values
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
        found = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    if (index := find("model.safetensors.index.json")) is not None:
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        places = {name: find(name) for name in set(named.values())}
        if None in places.values():
            return None
        return {weight: place for weight, name in named.items() if (place := places[name]) is not None}
    if (single := find("model.safetensors")) is None:
        return None
    with safe_open(single, framework="pt") as content:
        return dict.fromkeys(content.keys(), single)
