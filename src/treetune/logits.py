"""Computes a model's logits from its last hidden states, for some positions at a time.

The logits of all positions of a batch may need far more memory than the model: 8 rows of 4,096 tokens with a
vocabulary of 150,000 have 5 billion of them.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def backbone_of(model: nn.Module) -> nn.Module:
    """Returns the transformer under the language-model head. Raises ValueError if the model has none."""
    backbone = model.base_model
    if backbone is model:  # transformers returns the model itself if it has no backbone
        raise ValueError(f"{type(model).__name__} has no backbone under a language-model head")
    return backbone


class _BackboneResult:
    """A backbone's output that has only the last hidden state; all other fields are None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # Python would take None for a special method
            raise AttributeError(name)
        return None  # caches, attentions, router logits: not requested


class _FinishedBackbone:
    """Replaces a backbone, and returns the same result for any inputs.

    Its submodules return this result, too, because some models call their backbone's decoder. All other
    attributes are those of the backbone.
    """

    def __init__(self, backbone: nn.Module, result: _BackboneResult) -> None:
        self._backbone, self._result = backbone, result

    def __call__(self, *inputs: Any, **options: Any) -> _BackboneResult:
        return self._result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backbone, name)
        return _FinishedBackbone(value, self._result) if isinstance(value, nn.Module) else value


def logits_of(model: nn.Module, hidden_CD: Tensor) -> Tensor:
    """Returns the model's logits at its last hidden states, [C, V].

    Runs the model's own forward pass after the backbone, with all scaling, capping and layers there.
    """
    finished: Any = _FinishedBackbone(backbone_of(model), _BackboneResult(hidden_CD[None]))
    # A shallow copy with the same weights, so that the backbone is replaced only there.
    view = copy.copy(model)
    prefix: Any = model.base_model_prefix
    view._modules = {**model._modules, prefix: finished}
    # `forward` is called directly: hooks on the whole model must not run once for each chunk. The replaced
    # backbone ignores `inputs_embeds`, since its result is set already.
    return type(model).forward(view, inputs_embeds=hidden_CD[None], use_cache=False).logits[0]
