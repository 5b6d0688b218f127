"""The weights of a model as its files have them: all that is learnt, under the names that other programs
read.

A model in memory may have other names than its files. transformers puts the experts of a mixture into one
tensor when it loads them, and takes it apart again when it saves. What is learnt may also lie in buffers that
belong to the state (a layer's scale, a router's bias), and not only in parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

SHOWN = 5
"""Names in a message."""


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are kept with the parameters, by name."""
    buffers: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, buffer in own_persistent_buffers(part).items():
            buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def own_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns those of the module itself, without its parts'."""
    passing = module._non_persistent_buffers_set
    return {
        name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in passing
    }


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns all that belongs to a model's state, by its names in memory, each once: tied weights have the
    name of the first."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


class Architecture:
    """What the files of a model of some configuration hold, told by a model without memory."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        import torch

        with torch.device("meta"):
            return model_class(self.config)._from_config(self.config)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in memory of all that is learnt, each tied weight's once."""
        ignored = set(self.skeleton._keys_to_ignore_on_save or ())
        return frozenset(saved_weights(self.skeleton)) - ignored

    @cached_property
    def tied(self) -> frozenset[str]:
        """Further names in memory of weights that are tied to one among `names`."""
        state = frozenset(self.skeleton.state_dict())
        if self.config.tie_word_embeddings:
            state |= frozenset(getattr(self.skeleton, "all_tied_weights_keys", {}) or {})
        return state - self.names

    def refuse_others(self, names: Iterable[str], where: object) -> None:
        """Raises ValueError where weights are missing among `names` (those in memory), or are there that the
        architecture doesn't have."""
        there = set(names)
        missing, unexpected = self.names - there - self.tied, there - self.names - self.tied
        self._refuse(missing, unexpected, where)

    def _refuse(self, missing: Iterable[str], unexpected: Iterable[str], where: object) -> None:
        wrong = [
            f"{words} {some_names(sorted(names))}"
            for words, names in (("it lacks", missing), ("it has besides", unexpected))
            if names
        ]
        if wrong:
            raise ValueError(
                f"the weights for {where} are not those of a {type(self.skeleton).__name__}:"
                f" {'; '.join(wrong)}. Whoever loaded them would have another model. Give all parameters and"
                " persistent buffers of the model, by their names in it"
            )

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """The names in memory that are made into tensors of a file together, by each of them. Names that are
        the same in files are left out."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        reverse = [conversion.reverse_transform() for conversion in self._conversions[::-1]]
        renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
        together: dict[str, list[str]] = {}
        for name in sorted(self.names | self.tied):
            target, pattern = rename_source_key(name, renamings, converters, reverse=True)
            if pattern is not None or target != name:
                together.setdefault(target, []).append(name)
        return {name: tuple(group) for group in together.values() for name in group}

    @cached_property
    def _conversions(self) -> Sequence[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        mapping = get_model_conversion_mapping(self.skeleton, add_legacy=False)
        return [entry for entry in mapping if not isinstance(entry, PrefixChange)]

    @property
    def is_converted(self) -> bool:
        """Whether files have other names, or other tensors, than a model in memory."""
        return bool(self._conversions) and bool(self._groups)

    def in_turn_as_saved(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields weights by their names in files, as `save_pretrained` writes them. Those that are taken
        apart or put together are kept until all that belongs to them is there."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, weight in weights:
            group = self._groups.get(name) if self._conversions else None
            if group is None:
                yield name, weight
                continue
            present = waiting.setdefault(group, {})
            # A weight is there until the next is asked for.
            present[name] = weight if len(group) == 1 else weight.clone()
            if len(present) == len(group):
                yield from self._converted(waiting.pop(group)).items()
        for present in waiting.values():  # a weight that is tied, and comes once
            yield from self._converted(present).items()

    def _converted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.skeleton, dict(weights)))


_ARCHITECTURES: dict[str, Architecture] = {}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Returns the architecture of a configuration, the same for equal ones: making one takes seconds for a
    large model."""
    key = json.dumps([type(config).__module__, config.to_dict()], default=str, sort_keys=True)
    if key not in _ARCHITECTURES:
        _ARCHITECTURES[key] = Architecture(config)
    return _ARCHITECTURES[key]


def is_remote(config: PretrainedConfig) -> bool:
    """Returns whether the configuration's class came with the model (trust_remote_code)."""
    return type(config).__module__.startswith("transformers_modules.") and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Returns the class of the models of a configuration."""
    if is_remote(config):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        reference = config.auto_map["AutoModelForCausalLM"]
        return get_class_from_dynamic_module(reference, config._name_or_path)
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no model that continues text for a {type(config).__name__}")
    classes = AutoModelForCausalLM._model_mapping[type(config)]
    if not isinstance(classes, list | tuple):
        return classes
    named = {one.__name__: one for one in classes}
    return next((named[name] for name in config.architectures or () if name in named), classes[0])


def some_names(names: Sequence[str]) -> str:
    """Returns the first of them, and how many more there are."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
