"""Turns off what a model does at random while it is trained.

Log-probs must be those that the engine samples from, and dropout has no place there. Dropout lies in three
places: in modules of PyTorch, in numbers that a layer hands on to a function
(``F.dropout(x, p=self.residual_dropout)``), and in the configuration that a layer reads while it runs
(``self.config.attn_pdrop``). Layers that are skipped at random are of the same kind.

Routers of experts that draw noise or choices in training are another: PhiMoE's jitter decides in evaluation
too which experts are near enough, so that it can't be set to 0. Such a layer stays in evaluation mode.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

DROPOUT = "drop"
"""Part of the names of such numbers: ``residual_dropout``, ``attn_pdrop``, ``layerdrop``,
``drop_path_rate``."""
JITTER = "jitter"
"""Part of the names of a router's noise: ``router_jitter_noise``, ``jitter_noise``."""


def turn_dropout_off(model: nn.Module) -> None:
    """Sets everything random in the model to 0, in place. The configuration that is written with the model
    stays what it was: the layers below get a copy of it."""
    changed: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _random_numbers(vars(module), DROPOUT):
            setattr(module, name, 0.0)
        if _random_numbers(vars(module), JITTER):
            module.eval()
            vars(module)["train"] = MethodType(_stay_in_evaluation, module)
        config = getattr(module, "config", None)
        if module is model or config is None or not hasattr(config, "to_dict"):
            continue
        if id(config) not in changed:
            changed[id(config)] = _without_dropout(config)
        module.config = changed[id(config)]


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands for `train` of a layer that computes something else in training."""
    return module


def _random_numbers(values: dict[str, Any], part: str) -> list[str]:
    return [name for name, value in values.items() if type(value) is float and value != 0.0 and part in name]


def _without_dropout(config: Any) -> Any:
    """A copy of the configuration in which these numbers are 0; the configuration itself where they are."""
    names = _random_numbers(vars(config), DROPOUT)
    if not names:
        return config
    config = copy.copy(config)
    for name in names:
        setattr(config, name, 0.0)
    return config
