"""Samples with a transformers model that other code of this process holds and trains.

The engine has no copy of the weights: a sample is drawn with the weights that the model has at that time. So
a trainer that updates its model needs no weight sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from treetune.engine.base import Canary, Chunk, EngineLaunch, SyncReport
from treetune.engine.in_process import InProcessEngine, sliding_window_of
from treetune.engine.requests import Completion, Deferred, OnResult, Request
from treetune.engine.settings import InProcessSettings
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeldModelEngine(InProcessEngine):
    """An engine that samples with a model that other code holds and trains. The model is in evaluation mode
    while the engine samples, and in its earlier mode again after that."""

    def __init__(self, model: PreTrainedModel, codec: TextCodec, launch: EngineLaunch) -> None:
        """Makes an engine that samples with `model`, which other code holds and trains.

        Raises:
            ValueError: This engine can't sample with the model.
        """
        import torch

        name = type(model).__name__
        if model.dtype != torch.float32:
            raise ValueError(
                f"the weights of the {name} are {model.dtype}, and this engine computes in float32: give a"
                " folder with the weights, or the engine of a server"
            )
        # Windows need the engine's attention in the model (`attach_attention`), which the trainer uses, too.
        if sliding_window_of(model) is not None:
            raise ValueError(
                f"the {name} has sliding windows, for which this engine would change the model: give a folder"
                " with its weights"
            )
        self._held_model, self._codec = model, codec
        # The base class compares its log-probs with the model's, which must be without dropout.
        with _evaluating(model):
            super().__init__(InProcessSettings(), launch)

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        self._forget_prompts()  # the trainer may have changed the weights since the last call
        with _evaluating(self._held_model):  # without dropout
            return super().generate(requests, on_result)

    @override
    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Raises ValueError: the code that holds the model also trains it, so there is nothing to load."""
        raise ValueError("this engine samples with a model of other code, which changes its weights itself")

    @override
    def _read(self, folder: Path) -> None:
        self._model = self._held_model
        self._tokenizer = _DecodingTokenizer(self._codec)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Puts a model into evaluation mode for the block, and then each module back into its earlier mode."""
    # Not `model.train(…)` at the end, which would also set modules that the trainer keeps in evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


class _DecodingTokenizer:
    """The tokenizer with which `InProcessEngine` decodes samples, to look for stop strings."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._codec.decode(token_ids)
