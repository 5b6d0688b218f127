"""The model that an experiment starts from, of which copies are made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from treetune.runtime.base import PolicyIteration

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from treetune.models.sources import ModelSource


log = logging.getLogger(__name__)


class StartModel:
    """Tokenizer, codec and fresh copies of the experiment's start model, on this rank's device.

    Raises ValueError where tokens are new to a model whose embeddings are not trained.
    """

    def __init__(self, config: PolicyIteration, device: torch.device) -> None:
        self.source: ModelSource = config.model
        self.tokenizer = self.source.load_tokenizer(config.task.alphabet)
        self.codec = self.source.codec(self.tokenizer)
        self._config, self._device = config, device
        self._logged = False
        if config.trainer.lora is not None and (unlearned := self.source.unlearned_tokens()):
            raise ValueError(
                f"model.added_tokens has {', '.join(map(repr, unlearned))}, which the model doesn't know yet,"
                " and trainer.lora trains no embeddings, so they would stay the mean of other tokens: train"
                " all weights (trainer.lora: null), or start from a checkpoint of a run that did"
            )

    def load(self, device: torch.device | None = None) -> PreTrainedModel:
        """A fresh copy in the trainer's precision, on `device` (None: this rank's)."""
        config = self._config
        model = self.source.load_model(config.seed, config.task.alphabet)
        from treetune.trainers.deepspeed_model import cast_parameters, torch_dtype

        self._refuse_too_few_rows(model)
        cast_parameters(model, torch_dtype(config.trainer.precision))
        return model.to(device=device or self._device)

    def on_cpu(self) -> PreTrainedModel:
        """A fresh copy to be written down or dealt out: it takes nothing of the device's memory."""
        import torch

        return self.load(torch.device("cpu"))

    def in_parts(self) -> PreTrainedModel:
        """A fresh copy to be dealt out over ranks weight by weight: where that can be, its weights are in
        their files until then; otherwise whole, on the CPU, and the reason is logged once."""
        from treetune.models.shards import NotInParts
        from treetune.trainers.deepspeed_model import torch_dtype

        try:
            model = self.source.load_in_parts(torch_dtype(self._config.trainer.precision))
        except NotInParts as reason:
            if not self._logged:
                log.info("each rank reads the whole model into the machine's memory at first: %s", reason)
                self._logged = True
            return self.on_cpu()
        self._refuse_too_few_rows(model)
        return model

    def weights(self) -> tuple[dict[str, Tensor], PretrainedConfig]:
        """Its weights by name, on the CPU, and its architecture."""
        model = self.on_cpu()
        return dict(model.named_parameters()), model.config

    def _refuse_too_few_rows(self, model: PreTrainedModel) -> None:
        rows = model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and the model embeds only {rows}: they do"
                " not belong together, or tokens were added and the model's embeddings not resized"
            )
