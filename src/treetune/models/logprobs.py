"""Log-probabilities of chosen tokens, paid for only where they are needed.

The backbone runs over whole sequences; the language-model head runs only at the positions that
predict a trained token, a chunk at a time, so that a full ``[tokens, vocabulary]`` float32 block
never exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**24
"""Entries of one chunk of float32 logits: 64 MiB, whatever the vocabulary."""

Terms = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""From logits of shape [C, V] and labels of shape [C] to tensors of shape [C]."""


class PolicyModule(nn.Module):
    """A causal language model that answers log-probabilities of given next tokens.

    Everything goes through `forward`, so that DeepSpeed's hooks (ZeRO-3 gathers parameters there)
    see every use of a weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if getattr(model.config, "final_logit_softcapping", None):
            raise ValueError(
                f"{model.config.model_type} caps its logits (final_logit_softcapping), which the"
                " chunked log-probabilities don't do: use a model without it"
            )
        self.model = model

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        positions_N: Tensor,
        labels_N: Tensor,
        temperature: float,
        entropy_needs_gradient: bool = False,
        terms: Terms | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probability and entropy of the next-token distribution at `positions_N`, and `terms` of it.

        `positions_N` index the flattened ``B*T`` tokens, `labels_N` are the tokens that follow
        there. Logits are divided by `temperature`, as the sampler does. All results are float32
        of shape [N]; the entropy carries a gradient only where asked for. `terms` is called on a chunk
        of positions at a time.
        """
        hidden_BTD = backbone_of(self.model)(
            input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False
        ).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1)[positions_N]
        rows = max(1, LOGITS_PER_CHUNK // self.model.config.get_text_config().vocab_size)
        if len(labels_N) <= rows:
            return self._score(hidden_ND, labels_N, temperature, entropy_needs_gradient, terms)
        parts = [
            # The chunk's logits are computed again in backward: two matrix products for one
            # are cheaper than keeping [N, V] in float32.
            checkpoint(
                self._score,
                hidden_CD,
                labels_C,
                temperature,
                entropy_needs_gradient,
                terms,
                use_reentrant=False,
            )
            for hidden_CD, labels_C in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True)
        ]
        return tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))

    def _score(
        self,
        hidden_CD: Tensor,
        labels_C: Tensor,
        temperature: float,
        entropy_needs_gradient: bool,
        terms: Terms | None,
    ) -> tuple[Tensor, ...]:
        logits_CV = self.model.get_output_embeddings()(hidden_CD).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        logprobs_CV = logits_CV.log_softmax(-1)
        logprobs_C = logprobs_CV.gather(-1, labels_C[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_needs_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        own = () if terms is None else terms(logits_CV, labels_C)
        return logprobs_C, entropy_C, *own


class CriticModule(nn.Module):
    """VinePPO's critic: a full second model with a linear head (Kazemnejad et al. 2024, app. D).

    The head reads the last hidden state of the position *before* each trained token: the value of
    the state in which that token was chosen. Its weight is drawn from N(0, 1/(d+1)), its bias is 0.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.backbone = backbone_of(model)
        size = model.config.get_text_config().hidden_size
        dtype = next(self.backbone.parameters()).dtype
        self.head = nn.Linear(size, 1, dtype=dtype)
        generator = torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            weight = torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
            self.head.weight.copy_(weight)
            self.head.bias.zero_()

    def forward(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None, positions_N: Tensor) -> Tensor:
        """Values, float32 of shape [N], at the flattened positions."""
        hidden_BTD = self.backbone(
            input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False
        ).last_hidden_state
        return self.head(hidden_BTD.flatten(0, 1)[positions_N]).squeeze(-1).float()


def backbone_of(model: nn.Module) -> nn.Module:
    """The transformer under the language-model head."""
    backbone = model.base_model
    if backbone is model:
        raise ValueError(f"{type(model).__name__} has no backbone under a language-model head")
    return backbone
