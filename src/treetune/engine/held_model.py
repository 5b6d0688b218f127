"""Samples with a transformers model that other code of this process holds and trains.

The engine has no copy of the weights: a sample is drawn with the weights that the model has at that time. So
a trainer that updates its model needs no weight sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from treetune.engine.base import Canary, Chunk, EngineLaunch, SyncReport
from treetune.engine.in_process import InProcessEngine, longest_window
from treetune.engine.requests import Completion, Later, OnResult, Request
from treetune.engine.settings import InProcessSettings
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeldModelEngine(InProcessEngine):
    """An engine around a model, which is in evaluation mode while it samples and then as it was before."""

    def __init__(self, model: PreTrainedModel, codec: TextCodec, launch: EngineLaunch) -> None:
        """Raises ValueError for a model that this engine can't sample with."""
        name = type(model).__name__
        if str(model.dtype) != "torch.float32":
            raise ValueError(
                f"the weights of the {name} are {model.dtype}, and this engine computes in float32: give a"
                " folder with the weights, or the engine of a server"
            )
        if longest_window(model) is not None:
            raise ValueError(
                f"the {name} has sliding windows, for which this engine would change the model: give a folder"
                " with its weights"
            )
        self._held_model, self._codec = model, codec
        was_training = model.training
        model.eval()
        try:
            super().__init__(InProcessSettings(), launch)
        finally:
            model.train(was_training)

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        was_training = self._held_model.training
        self._held_model.eval()  # without dropout
        try:
            return super().generate(requests, on_result)
        finally:
            self._held_model.train(was_training)

    @override
    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        raise ValueError("this engine samples with a model of other code, which changes its weights itself")

    @override
    def _read(self, folder: Path) -> None:
        self._model = self._held_model
        self._tokenizer = _DecodingTokenizer(self._codec)


class _DecodingTokenizer:
    """The tokenizer with which `InProcessEngine` decodes samples, to look for stop strings."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._codec.decode(token_ids)
