"""What a forward and a backward pass take beside weights and gradients.

The terms are the tensors that autograd keeps for the layers of transformers (RMS norm in float32, rotary
embeddings, PyTorch's attention, gated MLP) and for our head in chunks (`models.logprobs`). They were read off
the code and counted by PyTorch's profiler on CPUs (docs/results/plan.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treetune.models.shapes import Shape

LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**27}
"""As `models.logprobs` has them, which a test holds: that module imports PyTorch."""

BYTES_PER_LOGIT, OF_A_NUCLEUS = 16, 33
"""Of a chunk in the forward pass: float32 logits, log-probs, probabilities and their product; with a nucleus
also what is sorted, with int64 order, and summed up."""
BACKWARD_PER_LOGIT, WITH_ENTROPY, WITH_TERMS = 12, 20, 24
"""Of a chunk in the backward pass: the log-probs again, the gradients of two things that were made of them;
more where the entropy has a gradient, and where the objective has terms of its own."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of a model over `tokens` of which `trained` are predicted, `itemsize` bytes a number."""

    shape: Shape
    itemsize: int
    tokens: int
    trained: int
    device: str
    checkpointing: bool
    masked: bool = False
    """Whether attention has a mask with an entry for each pair of tokens."""

    @property
    def layer(self) -> int:
        """What one block keeps for its backward pass."""
        shape, size = self.shape, self.itemsize
        norms = 2 * (self._norm + size) * shape.hidden
        attention = size * (2 * shape.query + 2 * shape.key)
        if shape.head_norms:
            attention += self._norm * (shape.query + shape.key)
        mlp = 4 * size * shape.intermediate
        small = 4 * (2 + shape.heads)  # scales of norms, sums of attention
        mask = size * self.tokens if self.masked else 0  # as numbers that are added
        return self.tokens * (norms + attention + mlp + small + mask)

    @property
    def _norm(self) -> int:
        """Bytes of an element that a norm keeps: its input in float32, and what it was scaled to."""
        return 4 + self.itemsize

    @property
    def kept(self) -> int:
        """Of a whole forward pass, what waits for the backward pass."""
        shape, size = self.shape, self.itemsize
        blocks = shape.layers * (size * shape.hidden * self.tokens if self.checkpointing else self.layer)
        last = self.tokens * self._norm * shape.hidden + self.trained * size * shape.hidden
        mask = self.tokens**2 if self.masked else 0
        return blocks + last + self.tokens * 2 * size * shape.head_dim + mask

    @property
    def backward_of_a_layer(self) -> int:
        """Beside `kept`: gradients in the last block, which is made again before where it was not kept.

        When its MLP goes backward, the last norm and the chosen hidden states are done with.
        """
        shape, size = self.shape, self.itemsize
        of_last = self.tokens * self._norm * shape.hidden + self.trained * size * shape.hidden
        mlp = self.tokens * (size * shape.hidden + 2 * size * shape.intermediate) - of_last
        again = 0
        if self.checkpointing:
            again = self.layer - (self.tokens * 4 * shape.hidden if size == 4 else 0)
        of_norm = self.tokens * (4 * 3 + size) * shape.hidden if size < 4 else 0
        return max(again + mlp, of_norm)

    def head(
        self,
        *,
        backward: bool,
        is_trained: bool = True,
        entropy_gradient: bool = False,
        terms: bool = False,
        nucleus: bool = False,
    ) -> int:
        """Of one chunk of the head, the largest that is there at once. Beside adapters the head has no
        gradient of its own."""
        chunk = max(1, LOGITS_PER_CHUNK[self.device] // self.shape.vocabulary)
        positions = math.ceil(self.trained / math.ceil(self.trained / chunk)) if self.trained else 0
        logits = positions * self.shape.vocabulary
        forward = logits * (OF_A_NUCLEUS if nucleus else BYTES_PER_LOGIT)
        if not backward:
            return forward
        bytes_back = WITH_TERMS if terms else WITH_ENTROPY if entropy_gradient else BACKWARD_PER_LOGIT
        of_weight = self.shape.head * self.itemsize if is_trained else 0
        of_hidden = self.trained * self.itemsize * self.shape.hidden
        return max(forward, logits * bytes_back + of_weight + of_hidden)

    @property
    def scoring(self) -> int:
        """Of a pass without gradient but for its head: the widest place of one block."""
        shape, size = self.shape, self.itemsize
        mlp = size * (2 * shape.hidden + 3 * shape.intermediate)
        norm = 3 * 4 * shape.hidden + size * shape.hidden
        attention = size * (2 * shape.hidden + 2 * shape.query + 2 * shape.key)
        return self.tokens * (max(mlp, norm, attention) + 2 * size * shape.head_dim)
