"""What top-p and top-k leave of a distribution, as the engine cuts it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Nucleus(NamedTuple):
    """The sampler's truncation of a distribution that is at its temperature already."""

    top_p: float = 1.0
    top_k: int = -1

    @property
    def is_all(self) -> bool:
        return self.top_p >= 1.0 and self.top_k <= 0

    def log_mass(self, logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        """The logarithm of the probability that is left, float32 of shape [C], without gradient; at most 0.

        A token that was sampled has this much less than the log-prob that the engine reports: the engine's
        is of what is left. Cut as vLLM does: top-k first, then of that the likeliest tokens that have `top_p`
        together. The label, which the engine sampled, is counted in.
        """
        with torch.no_grad():
            probs_CV, order_CV = logits_CV.softmax(-1).sort(dim=-1, descending=True, stable=True)
            if 0 < self.top_k < probs_CV.shape[-1]:
                probs_CV[:, self.top_k :] = 0
            before_CV = probs_CV.cumsum(-1) - probs_CV
            is_kept_CV = before_CV < self.top_p * probs_CV.sum(-1, keepdim=True)
            is_kept_CV |= order_CV == labels_C[:, None]
            return (probs_CV * is_kept_CV).sum(-1).log().clamp(max=0.0)
