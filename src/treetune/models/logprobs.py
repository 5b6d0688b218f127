"""Log-probabilities of chosen tokens, paid for only where they are needed.

The backbone runs over whole sequences; the language-model head runs only at the positions that
predict a trained token, a chunk at a time, so that a full ``[tokens, vocabulary]`` float32 block
never exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treetune.models.attention import attention_arguments
from treetune.models.sequence_parallel import SequenceParallel


class ModelInputs(NamedTuple):
    """B rows of T tokens, and the N positions in them about which the model is asked.

    A tuple, because DeepSpeed looks for tensors in tuples: ZeRO-3's hooks go through what a module is
    called with.
    """

    input_ids_BT: Tensor
    positions_N: Tensor
    """Indices of the flattened ``B*T`` tokens."""
    labels_N: Tensor | None = None
    """The tokens that follow there, which a policy is asked for; a critic needs none."""
    position_ids_BT: Tensor | None = None
    """None: every row counts from 0. Packed rows begin again with each sequence; in a prefix tree it is the
    depth."""
    subtree_last_1T: Tensor | None = None
    """Where the row is a prefix tree, the last node of each node's subtree; see `models.attention`."""
    max_positions: int = 0
    """The largest N that any rank has at this turn. Ranks run their heads on equally many chunks."""

    def __eq__(self, other: object) -> bool:
        # DeepSpeed compares what the ranks of a tensor-parallel group are given. Tuples would ask
        # `tensor == tensor` for one truth value.
        return isinstance(other, ModelInputs) and all(
            torch.equal(a, b.to(a.device))
            if isinstance(a, Tensor) and isinstance(b, Tensor)
            else a is b or (not isinstance(a, Tensor) and a == b)
            for a, b in zip(self, other, strict=True)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


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


LOGITS_PER_CHUNK = 2**24
"""Entries of one chunk of float32 logits: 64 MiB, whatever the vocabulary."""
LOGITS_PER_CHUNK_ON_A_GPU = 2**27
"""512 MiB there: each chunk reads the whole head again, and adds a whole gradient of it."""

Terms = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""A function from logits of shape [C, V] and labels of shape [C] to tensors of shape [C]."""


class PolicyModule(nn.Module):
    """A causal language model that answers log-probabilities of given next tokens.

    Everything goes through `forward`, so that DeepSpeed's hooks (ZeRO-3 gathers parameters there)
    see every use of a weight. With `parallel`, to which the model is attached, the ranks of a group run
    it together: each on its stretch of the sequences, and all are given all results. `terms` are an
    objective's (`Objective.terms`), given where it is asked `with_terms`.
    """

    def __init__(
        self, model: nn.Module, parallel: SequenceParallel | None = None, terms: Terms | None = None
    ) -> None:
        super().__init__()
        if getattr(model.config, "final_logit_softcapping", None):
            raise ValueError(
                f"{model.config.model_type} caps its logits (final_logit_softcapping), which the"
                " chunked log-probabilities don't do: use a model without it"
            )
        self.model, self.parallel, self.terms = model, parallel, terms

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        with_terms: bool = False,
        nucleus: Nucleus | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies of next-token distributions, the objective's `terms`, and last
        the log mass of a `nucleus` where one is given.

        All are float32 of shape [N], at ``inputs.positions_N``. Logits are divided by `temperature`, as
        the sampler does. The entropy carries a gradient only with `entropy_gradient`.

        The head runs on a chunk of positions at a time, on as many chunks as ``inputs.max_positions`` would
        need. Under ZeRO-3 each chunk gathers the head's weight, and ranks that gathered it unequally often
        would wait for each other for ever.
        """
        assert inputs.labels_N is not None, "a policy is asked for the probability of given tokens"
        backbone, parallel = backbone_of(self.model), self.parallel
        vocabulary = self.model.config.get_text_config().vocab_size
        most = max(len(inputs.labels_N), inputs.max_positions)
        entries = LOGITS_PER_CHUNK_ON_A_GPU if inputs.input_ids_BT.is_cuda else LOGITS_PER_CHUNK
        chunks = math.ceil(most / max(1, entries // vocabulary))
        score = partial(
            self._score,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            terms=self.terms if with_terms else None,
            nucleus=nucleus,
        )
        if parallel is None:
            return self._in_chunks(score, _hidden(backbone, inputs), inputs.labels_N, chunks)
        hidden_MD, mine_M = _own_hidden(backbone, parallel, inputs)
        mine = torch.stack(self._in_chunks(score, hidden_MD, inputs.labels_N[mine_M], chunks))
        return parallel.gather(mine, mine_M, len(inputs.labels_N)).unbind()

    def _in_chunks(
        self, score: Callable[..., tuple[Tensor, ...]], hidden_ND: Tensor, labels_N: Tensor, chunks: int
    ) -> tuple[Tensor, ...]:
        if chunks <= 1:
            return score(hidden_ND, labels_N)
        # The chunk's logits are computed again in backward: two matrix products for one are cheaper than
        # keeping [N, V] in float32.
        parts = [
            checkpoint(score, hidden_CD, labels_C, use_reentrant=False)
            for hidden_CD, labels_C in zip(
                hidden_ND.tensor_split(chunks), labels_N.tensor_split(chunks), strict=True
            )
        ]
        return tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))

    def _score(
        self,
        hidden_CD: Tensor,
        labels_C: Tensor,
        *,
        temperature: float,
        entropy_gradient: bool,
        terms: Terms | None,
        nucleus: Nucleus | None,
    ) -> tuple[Tensor, ...]:
        logits_CV = self.model.get_output_embeddings()(hidden_CD).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        logprobs_CV = logits_CV.log_softmax(-1)
        logprobs_C = logprobs_CV.gather(-1, labels_C[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        of_objective = () if terms is None else terms(logits_CV, labels_C)
        mass = () if nucleus is None else (nucleus.log_mass(logits_CV, labels_C),)
        return logprobs_C, entropy_C, *of_objective, *mass


class CriticModule(nn.Module):
    """VinePPO's critic: a full second model with a linear head (Kazemnejad et al. 2024, app. D).

    The head reads the last hidden state of the position *before* each trained token: the value of
    the state in which that token was chosen. Its weight is drawn from N(0, 1/(d+1)), its bias is 0.
    """

    def __init__(self, model: nn.Module, seed: int, parallel: SequenceParallel | None = None) -> None:
        super().__init__()
        self.backbone, self.parallel = backbone_of(model), parallel
        size = model.config.get_text_config().hidden_size
        dtype = next(self.backbone.parameters()).dtype
        self.head = nn.Linear(size, 1, dtype=dtype)
        generator = torch.Generator().manual_seed(seed % 2**63)
        with torch.no_grad():
            weight = torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
            self.head.weight.copy_(weight)
            self.head.bias.zero_()

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Values, float32 of shape [N], at ``inputs.positions_N``."""
        if self.parallel is None:
            return self._value(_hidden(self.backbone, inputs))
        hidden_MD, mine_M = _own_hidden(self.backbone, self.parallel, inputs)
        values_1N = self.parallel.gather(self._value(hidden_MD)[None], mine_M, len(inputs.positions_N))
        return values_1N.squeeze(0)

    def _value(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND).squeeze(-1).float()


def _hidden(backbone: nn.Module, inputs: ModelInputs) -> Tensor:
    """The last hidden states at the asked positions, [N, D]."""
    run = backbone(
        input_ids=inputs.input_ids_BT,
        position_ids=inputs.position_ids_BT,
        use_cache=False,
        **attention_arguments(backbone, inputs.position_ids_BT, inputs.subtree_last_1T),
    )
    return run.last_hidden_state.flatten(0, 1)[inputs.positions_N]


def _own_hidden(
    backbone: nn.Module, parallel: SequenceParallel, inputs: ModelInputs
) -> tuple[Tensor, Tensor]:
    """The last hidden states where ranks share a sequence: [M, D] at the M positions that lie in this rank's
    stretch, and which of the N these are.
    """
    assert inputs.subtree_last_1T is None, "refused where the trainer is built"
    mine_M, places_M = parallel.own_positions(inputs.positions_N, inputs.input_ids_BT.shape[1])
    hidden_BtD = parallel.hidden(backbone, inputs.input_ids_BT, inputs.position_ids_BT)
    return hidden_BtD.flatten(0, 1)[places_M], mine_M


def backbone_of(model: nn.Module) -> nn.Module:
    """The transformer under the language-model head."""
    backbone = model.base_model
    if backbone is model:
        raise ValueError(f"{type(model).__name__} has no backbone under a language-model head")
    return backbone
