"""Turns off what a model does at random while it is trained.

Log-probs must be those that the engine samples from, and dropout has no place there. Dropout lies in three
places: in modules of PyTorch, in numbers that a layer hands on to a function
(``F.dropout(x, p=self.residual_dropout)``), and in the configuration that a layer reads while it runs
(``self.config.attn_pdrop``). Layers that are skipped at random and noise on a router's input are of the same
kind.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

RANDOM = ("drop", "jitter")
"""Parts of the names of such numbers: ``residual_dropout``, ``attn_pdrop``, ``layerdrop``,
``drop_path_rate``, ``router_jitter_noise``."""


def turn_dropout_off(model: nn.Module) -> None:
    """Sets everything random in the model to 0, in place. The configuration that is written with the model
    stays what it was: the layers below get a copy of it."""
    changed: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _random_numbers(vars(module)):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if module is model or config is None or not hasattr(config, "to_dict"):
            continue
        if id(config) not in changed:
            changed[id(config)] = _without_dropout(config)
        module.config = changed[id(config)]


def _random_numbers(values: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in values.items()
        if type(value) is float and value != 0.0 and any(part in name for part in RANDOM)
    ]


def _without_dropout(config: Any) -> Any:
    """A copy of the configuration in which these numbers are 0; the configuration itself where they are."""
    names = _random_numbers(vars(config))
    if not names:
        return config
    config = copy.copy(config)
    for name in names:
        setattr(config, name, 0.0)
    return config
