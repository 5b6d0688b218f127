"""Log-probabilities of chosen tokens, paid for only where they are needed.

The backbone runs over whole sequences; the language-model head runs only at the positions that
predict a trained token, a chunk at a time, so that a full ``[tokens, vocabulary]`` float32 block
never exists.

Architectures do more to a hidden state than multiply it by the head's weight: Granite divides the logits,
Cohere multiplies them, Gemma caps them, BERT's decoders have a layer before the head. Nothing of that is
written again here. A chunk of hidden states goes through the model's own `forward`, with the backbone's
result given to it (`logits_of`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from treetune.architectures import LengthRule, length_rule, probe_rows
from treetune.models.attention import PACKED, attention_arguments
from treetune.models.dropout import turn_dropout_off
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

    @override
    def __eq__(self, other: object) -> bool:
        # DeepSpeed compares what the ranks of a tensor-parallel group are given. Tuples would ask
        # `tensor == tensor` for one truth value.
        return isinstance(other, ModelInputs) and all(
            torch.equal(a, b.to(a.device))
            if isinstance(a, Tensor) and isinstance(b, Tensor)
            else a is b or (not isinstance(a, Tensor) and a == b)
            for a, b in zip(self, other, strict=True)
        )

    @override
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
        turn_dropout_off(model)
        self.model, self.parallel, self.terms = model, parallel, terms
        self._length_rule = length_rule(model.config.to_dict())
        self._keeps_packed_apart = False
        """Whether packed rows were seen to be computed as each is alone."""

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        with_terms: bool = False,
        nucleus: Nucleus | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies of next-token distributions, the objective's `terms`, and last
        the log mass of a `nucleus` where one is given.

        All are float32 of shape [N], at ``inputs.positions_N``. Logits are divided by `temperature`, as
        the sampler does. The entropy carries a gradient only with `entropy_gradient`.

        The head runs on a chunk of positions at a time, on as many chunks as ``inputs.max_positions`` would
        need. Under ZeRO-3 each chunk gathers the head's weight, and ranks that gathered it unequally often
        would wait for each other for ever.

        With `whole`, the log-probabilities alone, from the model's own forward pass, which everything else
        is held to.
        """
        assert inputs.labels_N is not None, "a policy is asked for the probability of given tokens"
        if whole:
            return self._whole_forward(inputs)
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
        _refuse_rows_of_two_lengths(self._length_rule, inputs, type(self.model).__name__)
        if parallel is None:
            if inputs.position_ids_BT is not None and inputs.subtree_last_1T is None:
                self._refuse_leaks(inputs)
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
        logits_CV = logits_of(self.model, hidden_CD).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        logprobs_CV = logits_CV.log_softmax(-1)
        logprobs_C = logprobs_CV.gather(-1, labels_C[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        of_objective = () if terms is None else terms(logits_CV, labels_C)
        mass = () if nucleus is None else (nucleus.log_mass(logits_CV, labels_C),)
        return logprobs_C, entropy_C, *of_objective, *mass

    def _whole_forward(self, inputs: ModelInputs) -> tuple[Tensor]:
        """Log-probabilities as the model itself gives them: float32 of shape [N] in a tuple, from its whole
        logits in evaluation mode, at temperature 1 and without gradient. For rows that aren't packed."""
        assert inputs.labels_N is not None and inputs.position_ids_BT is None and self.parallel is None
        backbone = backbone_of(self.model)
        with torch.no_grad(), _evaluating(self.model):
            logits_BTV = self.model(
                input_ids=inputs.input_ids_BT,
                use_cache=False,
                **attention_arguments(backbone, None, None),
            ).logits
        logprobs_NV = logits_BTV.flatten(0, 1)[inputs.positions_N].float().log_softmax(-1)
        return (logprobs_NV.gather(-1, inputs.labels_N[:, None]).squeeze(-1),)

    def _refuse_leaks(self, inputs: ModelInputs) -> None:
        """Raises ValueError where the model doesn't keep packed sequences apart: convolutions and recurrent
        states run on from one to the next, and some attentions know no packing. Asked once, of a short row
        that is packed behind another; collective where weights are dealt out.
        """
        config: Any = self.model.config
        # The packed attention of this package is given the boundaries, and refuses other layers by itself.
        if self._keeps_packed_apart or config._attn_implementation == PACKED or inputs.input_ids_BT.is_meta:
            return
        name = type(self.model).__name__
        device = inputs.input_ids_BT.device
        rows = probe_rows(self.model.config, (11, 9))
        first_T, second_T = (torch.tensor(row, device=device) for row in rows)
        places_1T = torch.cat([torch.arange(len(first_T)), torch.arange(len(second_T))])[None].to(device)
        predicting = torch.arange(len(second_T) - 1, device=device)
        packed = ModelInputs(
            torch.cat([first_T, second_T])[None],
            predicting + len(first_T),
            second_T[1:],
            places_1T,
        )
        alone = ModelInputs(second_T[None], predicting, second_T[1:])
        backbone = backbone_of(self.model)
        with torch.no_grad():
            logits_packed = logits_of(self.model, _hidden(backbone, packed)).float()
            logits_alone = logits_of(self.model, _hidden(backbone, alone)).float()
        gap_N = logits_packed.log_softmax(-1) - logits_alone.log_softmax(-1)
        gap_N = gap_N.gather(-1, second_T[1:, None]).abs()
        limit = probe_limit(next(self.model.parameters()).dtype, device)
        if not float(gap_N.mean()) <= limit:
            raise ValueError(
                f"{name} doesn't keep packed sequences apart: the log-probs of a sequence that is packed"
                f" behind another differ by {float(gap_N.mean()):.2g} from those that it has alone. Set"
                " trainer.layout to 'padded'"
            )
        self._keeps_packed_apart = True


class CriticModule(nn.Module):
    """VinePPO's critic: a full second model with a linear head (Kazemnejad et al. 2024, app. D).

    The head reads the last hidden state of the position *before* each trained token: the value of
    the state in which that token was chosen. Its weight is drawn from N(0, 1/(d+1)), its bias is 0.
    """

    def __init__(self, model: nn.Module, seed: int, parallel: SequenceParallel | None = None) -> None:
        super().__init__()
        turn_dropout_off(model)
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
    positions: dict[str, Tensor] = {}
    if inputs.position_ids_BT is not None:
        if not takes_positions(backbone):
            raise ValueError(
                f"{type(backbone).__name__} takes no positions, which begin anew at each packed sequence: set"
                " trainer.layout to 'padded'"
            )
        positions["position_ids"] = inputs.position_ids_BT
    run = backbone(
        input_ids=inputs.input_ids_BT,
        use_cache=False,
        **positions,
        **attention_arguments(backbone, inputs.position_ids_BT, inputs.subtree_last_1T),
    )
    return run.last_hidden_state.flatten(0, 1)[inputs.positions_N]


def takes_positions(backbone: nn.Module) -> bool:
    """Returns whether the backbone can be told the positions of its tokens."""
    parameters = inspect.signature(backbone.forward).parameters
    return "position_ids" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


class _BackboneResult:
    """What a backbone returns, of which only the last hidden state is known."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # caches, attentions, router logits: nobody asked for them


class _AnsweredBackbone:
    """Stands for a backbone that has run: whatever it is called with, it returns the result. So do its parts,
    because some models call their backbone's decoder; anything else is the backbone's."""

    def __init__(self, backbone: nn.Module, result: _BackboneResult) -> None:
        self._backbone, self._result = backbone, result

    def __call__(self, *inputs: Any, **options: Any) -> _BackboneResult:
        return self._result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backbone, name)
        return _AnsweredBackbone(value, self._result) if isinstance(value, nn.Module) else value


def logits_of(model: nn.Module, hidden_CD: Tensor) -> Tensor:
    """The model's logits at its last hidden states, [C, V], by its own forward pass: with the scaling,
    capping and layers that it has behind the backbone."""
    backbone = backbone_of(model)
    view = copy.copy(model)  # the same weights and hooks, so that nobody sees the backbone replaced
    prefix: Any = model.base_model_prefix
    answered: Any = _AnsweredBackbone(backbone, _BackboneResult(hidden_CD[None]))
    view._modules = {**model._modules, prefix: answered}
    # `forward` and not the call: hooks of the whole model have their turn when it is called as a whole.
    return type(model).forward(view, inputs_embeds=hidden_CD[None], use_cache=False).logits[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, while inside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _refuse_rows_of_two_lengths(rule: LengthRule | None, inputs: ModelInputs, name: str) -> None:
    """Raises ValueError where rows would get other frequencies beside a longer row than alone."""
    if rule is None or inputs.input_ids_BT.numel() <= rule.limit:
        return
    rows, width = inputs.input_ids_BT.shape
    longest = width
    if inputs.position_ids_BT is not None:
        longest = int(inputs.position_ids_BT.max()) + 1
        rows = int((inputs.position_ids_BT == 0).sum())
    if rows > 1 and longest > rule.limit:
        raise ValueError(
            f"{name} has {rule.kind}, and rows of more than {rule.limit} tokens (here {longest}) change what"
            f" it computes of those beside them: set context_length to {rule.limit} or less"
        )


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


def probe_limit(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the mean difference between log-probs of the same tokens, in nats, that rounding explains. In
    half precision, where other kernels add up in another order, differences up to 0.66 at one token and 0.05
    in the mean have been measured."""
    if dtype == torch.float32:
        return 5e-4 if device.type == "cpu" else 5e-3
    return 0.1
