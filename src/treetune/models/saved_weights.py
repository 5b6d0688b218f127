"""Converts the weights of a model in memory to those of its files, which other programs read.

Names and tensors may differ: transformers stacks the experts of a mixture into one tensor when it loads them,
and takes it apart when it saves. Not only parameters belong to a model, but also its persistent buffers (a
layer's scale, a router's bias).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

MOST_NAMES = 5
"""The most names in a message."""


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that are saved with the parameters, by name."""
    buffers: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, buffer in own_persistent_buffers(part).items():
            buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def own_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the persistent buffers of the module itself, without those of its submodules."""
    not_persistent = module._non_persistent_buffers_set
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in not_persistent
    }


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's parameters and persistent buffers by their names in memory. Tied weights are listed
    once, by the first name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


class Architecture:
    """Describes the weights in the files of a model with this configuration. It reads them off a model on the
    meta device, whose weights take no memory."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, whose weights have shapes but no values."""
        import torch

        with torch.device("meta"):
            return model_class(self.config)._from_config(self.config)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in memory of all weights that transformers saves. Tied weights have one name."""
        ignored = set(self.skeleton._keys_to_ignore_on_save or ())
        return frozenset(saved_weights(self.skeleton)) - ignored

    @cached_property
    def unsaved_names(self) -> frozenset[str]:
        """The names in memory that `names` leaves out: further names of tied weights, and weights that
        transformers doesn't save (`_keys_to_ignore_on_save`).

        Example: ``{"lm_head.weight"}`` of a model whose output layer shares the tensor
        ``model.embed_tokens.weight``.
        """
        # A state dict lists a tied weight under each of its names, and `names` only under the first one.
        return frozenset(self.skeleton.state_dict()) - self.names

    def refuse_other_weights(self, names: Iterable[str], use: object) -> None:
        """Raises ValueError unless `names` are the names of the architecture's weights.

        Args:
            names: The names of the weights in memory. Those of `self.unsaved_names` may be among them, and
                need not be.
            use: The use of the weights, for the message: "the weights for `use` are not those of …".
        """
        given_names = set(names)
        missing = self.names - given_names
        unexpected = given_names - self.names - self.unsaved_names
        faults = []
        if missing:
            faults.append(f"{list_some_names(sorted(missing))} are missing")
        if unexpected:
            faults.append(f"{list_some_names(sorted(unexpected))} are unexpected")
        if faults:
            raise ValueError(
                f"the weights for {use} are not those of a {type(self.skeleton).__name__}:"
                f" {'; '.join(faults)}. Pass exactly the parameters and persistent buffers of the model, by"
                " their names in it"
            )

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """For each weight that files have in another form, the names in memory of all weights that are
        converted together with it. Weights that files have unchanged are left out.

        Example: if files have query and key in one tensor, ``{"q": ("k", "q"), "k": ("k", "q")}``.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        # The last conversion of loading is undone first.
        reversed_conversions = [conversion.reverse_transform() for conversion in self._conversions[::-1]]
        renamings = [entry for entry in reversed_conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in reversed_conversions if isinstance(entry, WeightConverter)]
        names_by_target: dict[str, list[str]] = {}
        for name in sorted(self.names | self.unsaved_names):
            # `target` is the name in files. `pattern` belongs to the converter that changes the tensor; it is
            # None if the tensor stays as it is. Then the name may still change.
            target, pattern = rename_source_key(name, renamings, converters, reverse=True)
            is_converted = pattern is not None or target != name
            if is_converted:
                names_by_target.setdefault(target, []).append(name)
        groups = {}
        for names in names_by_target.values():
            for name in names:
                groups[name] = tuple(names)
        return groups

    @cached_property
    def _conversions(self) -> Sequence[Any]:
        """transformers' conversions of the weights of files to those in memory, in the order of loading."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        mapping = get_model_conversion_mapping(self.skeleton, add_legacy=False)
        # Changes of a prefix are left out, as `revert_weight_conversion` does for a model that wasn't loaded
        # from files: it isn't known whether the files had the prefix.
        return [entry for entry in mapping if not isinstance(entry, PrefixChange)]

    @property
    def is_converted(self) -> bool:
        """Whether files have other names, or other tensors, than a model in memory."""
        return bool(self._groups)

    def convert_to_saved(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Converts weights to those of files, as `save_pretrained` writes them, and yields them by name.

        A weight that is converted together with others is kept until all of them have come.
        """
        incomplete: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, weight in weights:
            group = self._groups.get(name)
            if group is None:
                yield name, weight
                continue
            members = incomplete.setdefault(group, {})
            # A copy, since a weight may exist only until the next one is requested (`weights_in_turn`).
            members[name] = weight if len(group) == 1 else weight.clone()
            if len(members) == len(group):
                yield from self._convert(incomplete.pop(group)).items()
        # Some groups never become complete: those with several names of a tied weight, which comes under one
        # name only.
        for members in incomplete.values():
            yield from self._convert(members).items()

    def _convert(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.skeleton, dict(weights)))


_ARCHITECTURES: dict[str, Architecture] = {}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Returns the architecture of a configuration. Equal configurations share an `Architecture`, since making
    it takes seconds for a large model."""
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

        # The class is in a Python file that came with the model, in the repository or folder `_name_or_path`.
        reference = config.auto_map["AutoModelForCausalLM"]
        return get_class_from_dynamic_module(reference, config._name_or_path)
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers has no model that continues text for a {type(config).__name__}")
    classes = AutoModelForCausalLM._model_mapping[type(config)]
    if not isinstance(classes, list | tuple):
        return classes
    # Several classes serve this configuration: take the one that it names.
    class_by_name = {candidate.__name__: candidate for candidate in classes}
    for name in config.architectures or ():
        if name in class_by_name:
            return class_by_name[name]
    return classes[0]


def list_some_names(names: Sequence[str]) -> str:
    """Returns the first names, and the number of the others: ``a, b, c, d, e and 7 more``."""
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"
