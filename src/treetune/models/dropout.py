"""Turns off dropout and other randomness of a model in training.

The trainer's log-probs must be those of the distribution that the engine samples from, which has no dropout.
A model's dropout is set in one of three ways: in a module of PyTorch, in a number that a layer passes to a
function (``F.dropout(x, p=self.residual_dropout)``), or in the configuration that a layer reads in its
forward pass (``self.config.attn_pdrop``). Layers that are skipped at random are set in the same ways.

A router of experts may draw noise in training. PhiMoE's jitter can't be set to 0, since it also decides in
evaluation which experts are considered. So a layer with such noise stays in evaluation mode.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

DROPOUT_NAME_PART = "drop"
"""The part that the names of dropout probabilities have in common: ``residual_dropout``, ``attn_pdrop``,
``layerdrop``, ``drop_path_rate``."""
JITTER_NAME_PART = "jitter"
"""The part that the names of a router's noise have in common: ``router_jitter_noise``, ``jitter_noise``."""


def turn_dropout_off(model: nn.Module) -> None:
    """Turns off all randomness of the model, in place. The model's own configuration, which checkpoints
    contain, stays the same: its layers get a changed copy."""
    configs_without_dropout: dict[int, Any] = {}
    """The changed copy of each configuration, by the configuration's id. Layers that share a configuration
    get the same copy."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _find_random_settings(vars(module), DROPOUT_NAME_PART):
            setattr(module, name, 0.0)
        if _find_random_settings(vars(module), JITTER_NAME_PART):
            # The layer draws noise in training mode only, so it stays in evaluation mode: its method `train`
            # is replaced, since the method `train` of the whole model calls it. The size of the noise isn't
            # set to 0, since in PhiMoE it also decides in evaluation which experts are considered.
            module.eval()
            vars(module)["train"] = MethodType(_stay_in_evaluation, module)
        config = getattr(module, "config", None)
        is_model_config = hasattr(config, "to_dict")  # and not another object of this name
        if module is model or not is_model_config:
            continue
        if id(config) not in configs_without_dropout:
            configs_without_dropout[id(config)] = _without_dropout(config)
        module.config = configs_without_dropout[id(config)]


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces the method `train` of a layer, so that it stays in evaluation mode."""
    return module


def _find_random_settings(values: dict[str, Any], name_part: str) -> list[str]:
    """Returns the names that contain `name_part`, such as "dropout", and whose value is a float other than 0.
    Integers and booleans are left out, since they aren't probabilities."""
    return [
        name for name, value in values.items() if type(value) is float and value != 0.0 and name_part in name
    ]


def _without_dropout(config: Any) -> Any:
    """Returns a copy of the configuration with dropout 0; the configuration itself if it has none."""
    names = _find_random_settings(vars(config), DROPOUT_NAME_PART)
    if not names:
        return config
    config = copy.copy(config)
    for name in names:
        setattr(config, name, 0.0)
    return config
