"""Computes the log-probabilities of trained tokens, without the logits of all other tokens.

::

    input_ids [B, T] ──backbone──► hidden states [B, T, D]
                                       │ the N positions that predict a trained token
                                       ▼
                                   hidden states [N, D] ──head, a chunk at a time──► log-probs [N]

A full float32 block ``[tokens, vocabulary]`` never exists.

Many architectures do more than multiply a hidden state by the head's weight: Granite divides the logits,
Cohere multiplies them, Gemma caps them, BERT's decoders have a layer before the head. To get all of it right,
each chunk of hidden states goes through the model's own `forward`, in which the backbone is replaced by one
that returns the chunk (`treetune.logits`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treetune.architectures import LengthRule, length_rule, probe_rows
from treetune.logits import backbone_of, logits_of
from treetune.models.attention import PACKED_ATTENTION, attention_arguments
from treetune.models.dropout import turn_dropout_off
from treetune.models.sequence_parallel import SequenceParallel


class ModelInputs(NamedTuple):
    """B rows of T tokens, and the N positions in them at which the model is evaluated.

    It is a tuple because ZeRO-3's hooks look for tensors only in tuples.

    Example: the rows ``5 6 7`` and ``5 6 8 9``, padded, of which ``7``, ``8`` and ``9`` are trained::

        ModelInputs(
            input_ids_BT=[[5, 6, 7, 0], [5, 6, 8, 9]],
            positions_N=[1, 5, 6],             # of the tokens before the trained ones, in the flattened rows
            labels_N=[7, 8, 9],
        )
    """

    input_ids_BT: Tensor
    positions_N: Tensor
    """Indices into the flattened ``B*T`` tokens."""
    labels_N: Tensor | None = None
    """The tokens after these positions, whose log-probs a policy returns; None for a critic."""
    position_ids_BT: Tensor | None = None
    """The position of each token for the model; None: its index in the row. They begin again with each packed
    sequence; in a prefix tree they are depths."""
    subtree_last_1T: Tensor | None = None
    """For each node of a prefix tree, the last node of its subtree, which for a leaf is the leaf itself; see
    `models.attention`."""
    max_positions: int = 0
    """The largest N in the micro-batches that all ranks compute at the same time. All ranks compute the head
    in the number of chunks that this N needs."""


class Nucleus(NamedTuple):
    """The cut of a distribution by top-p and top-k, after the temperature."""

    top_p: float = 1.0
    """The share of the probability that is kept; 1: all of it."""
    top_k: int = -1
    """The number of most likely tokens that are kept; 0 or less: all tokens."""

    @property
    def is_all(self) -> bool:
        return self.top_p >= 1.0 and self.top_k <= 0

    def log_mass(self, logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        """Returns the log of the probability mass that the cut leaves, float32 [C], without gradient; at most
        0.

        The engine reports ``log(p / mass)`` of a sampled token, since it normalises the remaining
        probabilities. The cut is vLLM's: top-k keeps the k most likely tokens, and top-p then keeps the most
        likely of these, until their share of the kept probability reaches `top_p`. The label always counts,
        since the engine has sampled it, even if rounding would cut it off.

        If several tokens are as likely as the k-th, top-k still keeps k tokens in total, as in vLLM's Triton
        kernel on GPUs. On CPUs, vLLM keeps all tokens that are as likely as the k-th, and log-probs then
        differ from the engine's.
        """
        with torch.no_grad():
            probs_CV = logits_CV.softmax(-1)
            label_probs_C1 = probs_CV.gather(-1, labels_C[:, None])
            probs_CV, order_CV = probs_CV.sort(dim=-1, descending=True, stable=True)
            has_top_k = 0 < self.top_k < probs_CV.shape[-1]
            if has_top_k:
                probs_CV[:, self.top_k :] = 0
            mass_before_CV = probs_CV.cumsum(-1) - probs_CV  # of all likelier tokens
            is_kept_CV = mass_before_CV < self.top_p * probs_CV.sum(-1, keepdim=True)
            if has_top_k:
                is_kept_CV[:, self.top_k :] = False  # with rounding, a probability of 0 may have been kept
            # The kept tokens come first. `clamp` is for NaN, with which no token is kept.
            last_kept_index_C1 = (is_kept_CV.sum(-1, keepdim=True) - 1).clamp(min=0)
            # A label that is less likely than the last kept token is added. A label that is as likely as that
            # token isn't: the engine kept it in the token's place, and the mass is the same.
            is_added_C1 = label_probs_C1 < probs_CV.gather(-1, last_kept_index_C1)
            is_label_CV = order_CV == labels_C[:, None]
            # Top-k may have set the label's probability to 0.
            probs_CV = torch.where(is_label_CV, label_probs_C1, probs_CV)
            is_kept_CV |= is_label_CV & is_added_C1
            return (probs_CV * is_kept_CV).sum(-1).log().clamp(max=0.0)


LOGITS_PER_CHUNK = 2**24
"""The most logits of a chunk, whatever the vocabulary. In float32 they take 64 MiB."""
LOGITS_PER_CHUNK_ON_A_GPU = 2**27
"""The most logits of a chunk on a GPU: 512 MiB. Fewer chunks are faster, since each chunk reads the whole
head, and adds a gradient of the whole head."""

Terms = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Computes tensors of shape [C] from logits of shape [C, V] and labels of shape [C]."""


def squared_probabilities(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor]:
    """Returns Σ_v π(v)² of each distribution, the probability that two tokens sampled from it are equal."""
    return (logits_CV.softmax(-1).square().sum(-1),)


class TeacherStates(NamedTuple):
    """The last hidden states of a teacher at the N positions of a policy's pass, and its head.

    The teacher's logits of the whole vocabulary are never kept for all positions. They are computed from the
    hidden states for one chunk of positions at a time.
    """

    hidden_ND: Tensor
    logits: Callable[[Tensor], Tensor]
    """Computes the teacher's logits [C, V] from hidden states [C, D]."""
    compare: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    """Computes tensors of shape [C] from the logits of policy and teacher; see `TeacherObjective.compare`."""


class PolicyModule(nn.Module):
    """A causal language model that returns the log-probs of the labels at some positions.

    Everything goes through `forward`, so that DeepSpeed's hooks see every use of a weight (ZeRO-3 gathers
    parameters in them).

    Args:
        parallel: The sequence parallelism that is attached to the model: each rank of a group computes a part
            of each sequence, and all ranks get all results.
        terms: The objective's `DistributionObjective.terms`.
    """

    def __init__(
        self, model: nn.Module, parallel: SequenceParallel | None = None, terms: Terms | None = None
    ) -> None:
        super().__init__()
        turn_dropout_off(model)
        # `terms` computes numbers of the whole next-token distributions, which some losses need.
        self.model, self.parallel, self.terms = model, parallel, terms
        # The rule by which a batch's longest row changes how the other rows are computed. Most models have
        # none.
        self._length_rule = length_rule(model.config.to_dict())
        self._keeps_packed_apart = False
        """True once a probe has shown that packed sequences don't influence each other."""

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        with_terms: bool = False,
        statistics: Terms | None = None,
        nucleus: Nucleus | None = None,
        whole: bool = False,
        teacher: TeacherStates | None = None,
        hidden_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """Computes scores at ``inputs.positions_N``.

        All ranks compute the head in the same number of chunks, that of the rank with the most positions
        (``inputs.max_positions``). Under ZeRO-3 each chunk gathers the head's weight, which is a collective
        call: with another number of calls, ranks would wait for each other for ever.

        Args:
            temperature: Divides the logits, as in the sampler.
            entropy_gradient: Whether the entropies have a gradient.
            with_terms: Whether to compute the objective's terms, which are numbers of the whole next-token
                distributions that its loss needs.
            statistics: Computes further values of the distributions, such as `squared_probabilities`.
            nucleus: The cut whose mass is wanted; None for none.
            whole: Whether to compute only log-probs, by the model's own forward pass. Before training, the
                log-probs of the usual pass are compared with these.
            teacher: The teacher whose distributions are compared with this model's.
            hidden_only: Whether to return only the last hidden states, [N, D] in a tuple. A teacher is called
                in this way.

        Returns:
            The log-probs of the labels, the entropies of the distributions, the objective's terms, the
            comparisons with the teacher, the statistics, and last the log mass of the nucleus, float32 [N]
            each.
        """
        assert inputs.labels_N is not None, "a policy scores the labels"
        if whole:
            return self._whole_forward(inputs)
        backbone, parallel = backbone_of(self.model), self.parallel
        vocabulary = self.model.config.get_text_config().vocab_size
        n_positions = max(len(inputs.labels_N), inputs.max_positions)  # `max_positions` is 0 by default
        logits_per_chunk = LOGITS_PER_CHUNK_ON_A_GPU if inputs.input_ids_BT.is_cuda else LOGITS_PER_CHUNK
        if teacher is not None:
            logits_per_chunk //= 2  # a chunk has the logits of both models
        positions_per_chunk = max(1, logits_per_chunk // vocabulary)
        n_chunks = math.ceil(n_positions / positions_per_chunk)
        score = partial(
            self._score,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            terms=self.terms if with_terms else None,
            statistics=statistics,
            nucleus=nucleus,
            teacher=teacher,
        )
        _refuse_long_rows(self._length_rule, inputs, type(self.model).__name__)
        if parallel is None:
            if inputs.position_ids_BT is not None and inputs.subtree_last_1T is None:
                self._refuse_leaks(inputs)
            hidden_ND = _hidden_at_positions(backbone, inputs)
            if hidden_only:
                return (hidden_ND,)
            teacher_hidden_ND = None if teacher is None else teacher.hidden_ND
            return self._score_in_chunks(score, hidden_ND, inputs.labels_N, n_chunks, teacher_hidden_ND)
        assert teacher is None and not hidden_only, "refused where the trainer is built"
        # Each rank scores the M positions in its part of the sequences.
        hidden_MD, index_M = _hidden_at_positions_of_rank(backbone, parallel, inputs)
        scores_of_rank = self._score_in_chunks(score, hidden_MD, inputs.labels_N[index_M], n_chunks)
        return parallel.gather(torch.stack(scores_of_rank), index_M, len(inputs.labels_N)).unbind()

    def _score_in_chunks(
        self,
        score: Callable[..., tuple[Tensor, ...]],
        hidden_ND: Tensor,
        labels_N: Tensor,
        n_chunks: int,
        teacher_hidden_ND: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Scores the positions in this number of chunks."""
        if n_chunks <= 1:
            return score(hidden_ND, labels_N, teacher_hidden_ND)
        hidden_chunks = hidden_ND.tensor_split(n_chunks)
        label_chunks = labels_N.tensor_split(n_chunks)
        teacher_chunks: tuple[Tensor | None, ...] = (None,) * n_chunks
        if teacher_hidden_ND is not None:
            teacher_chunks = teacher_hidden_ND.tensor_split(n_chunks)
        scores_by_chunk = []
        for chunk in zip(hidden_chunks, label_chunks, teacher_chunks, strict=True):
            # The backward pass computes the chunk's logits once more. This needs less memory than keeping the
            # logits of all positions, float32 [N, V].
            scores_by_chunk.append(checkpoint(score, *chunk, use_reentrant=False))
        return tuple(torch.cat(columns) for columns in zip(*scores_by_chunk, strict=True))

    def _score(
        self,
        hidden_CD: Tensor,
        labels_C: Tensor,
        teacher_hidden_CD: Tensor | None = None,
        *,
        temperature: float,
        entropy_gradient: bool,
        terms: Terms | None,
        statistics: Terms | None,
        nucleus: Nucleus | None,
        teacher: TeacherStates | None,
    ) -> tuple[Tensor, ...]:
        """Scores a chunk of positions; see `forward`."""
        logits_CV = logits_of(self.model, hidden_CD).float()
        if temperature != 1.0:  # a division by 1 would only copy the logits
            logits_CV = logits_CV / temperature
        logprobs_CV = logits_CV.log_softmax(-1)
        logprobs_C = logprobs_CV.gather(-1, labels_C[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        terms_of_objective = () if terms is None else terms(logits_CV, labels_C)
        if teacher is not None:
            with torch.no_grad():
                teacher_logits_CV = teacher.logits(teacher_hidden_CD).float()
                if temperature != 1.0:
                    teacher_logits_CV = teacher_logits_CV / temperature
            terms_of_objective += teacher.compare(logits_CV, teacher_logits_CV)
        further_values = () if statistics is None else statistics(logits_CV, labels_C)
        log_mass = () if nucleus is None else (nucleus.log_mass(logits_CV, labels_C),)
        return logprobs_C, entropy_C, *terms_of_objective, *further_values, *log_mass

    def _whole_forward(self, inputs: ModelInputs) -> tuple[Tensor]:
        """Returns the log-probs from the logits of the whole model, float32 [N], in a tuple like `forward`.

        The model runs its own forward pass, in evaluation mode, at temperature 1 and without gradient. Before
        training, the trainer's log-probs are compared with these. Rows must not be packed.
        """
        assert inputs.labels_N is not None and inputs.position_ids_BT is None and self.parallel is None
        backbone = backbone_of(self.model)
        with torch.no_grad(), _evaluating(self.model):
            logits_BTV = self.model(
                input_ids=inputs.input_ids_BT,
                use_cache=False,
                **attention_arguments(backbone, position_ids_BT=None, subtree_last_1T=None),
            ).logits
        logprobs_NV = logits_BTV.flatten(0, 1)[inputs.positions_N].float().log_softmax(-1)
        return (logprobs_NV.gather(-1, inputs.labels_N[:, None]).squeeze(-1),)

    def _refuse_leaks(self, inputs: ModelInputs) -> None:
        """Raises ValueError if packed sequences influence each other in this model.

        Convolutions and recurrent states continue from one sequence to the next, and some kinds of attention
        don't support packing. This is tried once, with two short sequences: the second one's log-probs must
        be the same packed and alone. Collective if the weights are sharded.
        """
        config: Any = self.model.config
        # `PACKED_ATTENTION` keeps packed sequences apart, and is attached only to models with full attention
        # in all layers. On the meta device there are no values to compare.
        if (
            self._keeps_packed_apart
            or config._attn_implementation == PACKED_ATTENTION
            or inputs.input_ids_BT.is_meta
        ):
            return
        name = type(self.model).__name__
        device = inputs.input_ids_BT.device
        first_ids, second_ids = probe_rows(config, lengths=(11, 9))
        first_T = torch.tensor(first_ids, device=device)
        second_T = torch.tensor(second_ids, device=device)
        position_ids = torch.cat([torch.arange(len(first_T)), torch.arange(len(second_T))])
        predicting = torch.arange(len(second_T) - 1, device=device)
        packed = ModelInputs(
            input_ids_BT=torch.cat([first_T, second_T])[None],
            positions_N=predicting + len(first_T),
            labels_N=second_T[1:],
            position_ids_BT=position_ids[None].to(device),
        )
        alone = ModelInputs(input_ids_BT=second_T[None], positions_N=predicting, labels_N=second_T[1:])
        backbone = backbone_of(self.model)
        with torch.no_grad():
            logits_packed = logits_of(self.model, _hidden_at_positions(backbone, packed)).float()
            logits_alone = logits_of(self.model, _hidden_at_positions(backbone, alone)).float()
        gap_NV = logits_packed.log_softmax(-1) - logits_alone.log_softmax(-1)
        gap = float(gap_NV.gather(-1, second_T[1:, None]).abs().mean())
        limit = probe_limit(next(self.model.parameters()).dtype, device)
        if not gap <= limit:  # also if it is NaN
            raise ValueError(
                f"{name} doesn't keep packed sequences apart: the log-probs of a sequence that is packed"
                f" after another one differ by {gap:.2g} from those of the sequence alone."
                " Set trainer.layout to 'padded'"
            )
        self._keeps_packed_apart = True


class CriticModule(nn.Module):
    """VinePPO's critic: a full second model with a linear head (Kazemnejad et al. 2024, app. D).

    The head reads the last hidden state of the position *before* each trained token: the value of
    the state in which that token was chosen. Its weight is drawn from N(0, 1/(d+1)), its bias is 0.

    Args:
        outputs: The number K of the head's outputs at each position.
        values_of: Computes values [N] from outputs [N, K]; None: the only output is the value.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        parallel: SequenceParallel | None = None,
        outputs: int = 1,
        values_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        assert values_of is not None or outputs == 1, "several outputs need a function for their value"
        # Computes values from the head's outputs. If the head has one output, that output is the value.
        self.values_of = values_of or _only_output
        turn_dropout_off(model)
        self.backbone, self.parallel = backbone_of(model), parallel
        hidden_size = model.config.get_text_config().hidden_size
        dtype = next(self.backbone.parameters()).dtype
        self.head = nn.Linear(hidden_size, outputs, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # From N(0, 1 / (hidden_size + 1)), as in VinePPO.
            weight = torch.randn(outputs, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5
            self.head.weight.copy_(weight)
            self.head.bias.zero_()

    def forward(self, inputs: ModelInputs, with_outputs: bool = False) -> Tensor:
        """Returns the values at ``inputs.positions_N``, float32 [N]; with `with_outputs` the head's outputs
        there, float32 [N, K]."""
        if self.parallel is None:
            outputs_NK = self.head(_hidden_at_positions(self.backbone, inputs)).float()
        else:
            hidden_MD, index_M = _hidden_at_positions_of_rank(self.backbone, self.parallel, inputs)
            outputs_KM = self.head(hidden_MD).float().T
            outputs_NK = self.parallel.gather(outputs_KM, index_M, len(inputs.positions_N)).T
        return outputs_NK if with_outputs else self.values_of(outputs_NK)


def _only_output(outputs_N1: Tensor) -> Tensor:
    return outputs_N1.squeeze(-1)


def _hidden_at_positions(backbone: nn.Module, inputs: ModelInputs) -> Tensor:
    """Returns the last hidden states at ``inputs.positions_N``, [N, D]."""
    position_arguments: dict[str, Tensor] = {}
    if inputs.position_ids_BT is not None:
        if not takes_positions(backbone):
            raise ValueError(
                f"{type(backbone).__name__} has no argument for positions, which packed sequences need: set"
                " trainer.layout to 'padded'"
            )
        position_arguments["position_ids"] = inputs.position_ids_BT
    outputs = backbone(
        input_ids=inputs.input_ids_BT,
        use_cache=False,
        **position_arguments,
        **attention_arguments(backbone, inputs.position_ids_BT, inputs.subtree_last_1T),
    )
    return outputs.last_hidden_state.flatten(0, 1)[inputs.positions_N]


def takes_positions(backbone: nn.Module) -> bool:
    """Returns whether the backbone has an argument for the positions of its tokens."""
    parameters = inspect.signature(backbone.forward).parameters
    return "position_ids" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode for the block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _refuse_long_rows(rule: LengthRule | None, inputs: ModelInputs, name: str) -> None:
    """Raises ValueError if the batch has several rows, and one of them is longer than the rule's limit.

    Some rotary embeddings choose their frequencies by the longest row of a batch (`LengthRule`). Such a row
    would change how the other rows are computed.
    """
    if rule is None or inputs.input_ids_BT.numel() <= rule.limit:  # then no row can be longer
        return
    rows, width = inputs.input_ids_BT.shape
    longest = width
    if inputs.position_ids_BT is not None:
        # Packed sequences count as rows, since their positions begin with 0 and decide on the frequencies.
        longest = int(inputs.position_ids_BT.max()) + 1
        rows = int((inputs.position_ids_BT == 0).sum())
    if rows > 1 and longest > rule.limit:
        raise ValueError(
            f"{name} has {rule.kind}, and a row of more than {rule.limit} tokens (here {longest}) changes how"
            f" the other rows of its batch are computed: set context_length to {rule.limit} or less"
        )


def _hidden_at_positions_of_rank(
    backbone: nn.Module, parallel: SequenceParallel, inputs: ModelInputs
) -> tuple[Tensor, Tensor]:
    """Returns the last hidden states at the M positions in this rank's part of the sequences, [M, D], and the
    indices of these positions among all N, [M]."""
    assert inputs.subtree_last_1T is None, "refused where the trainer is built"
    index_M, positions_M = parallel.own_positions(inputs.positions_N, inputs.input_ids_BT.shape[1])
    hidden_BtD = parallel.hidden_states(backbone, inputs.input_ids_BT, inputs.position_ids_BT)
    return hidden_BtD.flatten(0, 1)[positions_M], index_M


def probe_limit(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest mean difference between log-probs of the same tokens, in nats, that rounding can
    explain.

    In half precision, with kernels that sum in another order, differences of up to 0.66 at a token and 0.05
    in the mean were measured.
    """
    if dtype == torch.float32:
        return 5e-4 if device.type == "cpu" else 5e-3
    return 0.1
