"""Multiplies another credit's advantages by a weight for each token. The weight is computed from a signal of
the token, such as its entropy or surprise.

    other credit ── A_t ──────────────────────────────┐
    signal of each token ── s_t ── weights ── w_t ──> A'_t = w_t · A_t

    signal                                          weights
    entropy            H_t = −Σ_v π(v) log π(v)     group_share  w = base + bonus · (share in its group)
    surprise           −log π(a_t)                  softmax      w = T · exp(s_t / τ) / Σ_j exp(s_j / τ)
    relative_surprise  −log π(a_t) / H_t            top_share    w = 1 for the largest s, else 0
    deviation          d_t · (H_t / log V)^κ        interval     w = 1 for lowest ≤ s ≤ highest, else 0
    group_divergence   JS(π_t ‖ mean of the group)

Methods of the literature are settings of `weighted_by`:

* GTPO (Tan et al., arXiv:2508.04349, eq. 3, 5 and 6): ``entropy``, ``group_share``, ``standardise``.
* DGPO (Jin et al., arXiv:2605.03327): ``deviation``, ``softmax``. d_t = 1 − Σ_v √(π(v)·π_ref(v)).
* Forking tokens, "80/20" (Wang et al., arXiv:2506.01939): ``entropy``, ``top_share``.
* RSI-S (Lv et al., arXiv:2606.31575): ``relative_surprise``, ``interval``, ``drop``.
* ICT (Feng et al., arXiv:2606.19771): ``group_divergence``, ``top_share`` with a `share` of 0.1 and `among`
  ``answer``, ``drop``. The signal is u_i,t = JS(π_i,t ‖ P_t), where P_t is the mean of the distributions that
  the answers to the problem have at position t. Each answer trains only its tokens with the largest u.

The texts of GTPO, DGPO, RSI-S and ICT weren't read; the formulas are those of public reimplementations and
summaries that cite these equations. In ICT, the first steps train all tokens; this is not implemented.

EP-GRPO (arXiv:2605.04960) is left out: only its abstract was found. It names three parts (modulation gated by
entropy, process signals from policy divergence, a mapping of cumulative entropy) and gives no formula.

Example, with ``entropy`` and ``softmax`` at τ = 1: two tokens have the entropies 0 and log 3, and the
advantage 1. Their weights are 2 · 1/4 and 2 · 3/4. Their weighted advantages are the same numbers.

This is a credit over another credit, and not a weight in the objective, for three reasons. Advantages are
weighted before training, so the viewer, selections and the arena show the advantages that are trained. The
weights don't depend on how the answers are divided into steps and micro-batches, since all answers are
weighted at once. And the weights can be combined with every credit and every objective. In a run this costs
one more forward pass of the policy over the iteration's answers (`model_scores`), since the trainer's own
first pass comes after credit and selection. Only ``surprise`` costs nothing: it is in the engine's log-probs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, OneLine, SampledAnswers
from treetune.credit.base import THREADS_REMEDY, Credit, TrainerScores
from treetune.credit.literature.scored_texts import check_reference_model, check_uncut_sampling
from treetune.credit.literature.token_level import OverAnotherCredit
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.metrics import pool_columns
from treetune.vocabulary import Column, Episode

Signal = Literal["entropy", "surprise", "relative_surprise", "deviation", "group_divergence"]
Weights = Literal["group_share", "softmax", "top_share", "interval"]

PASSES_OF_SIGNAL: dict[Signal, int] = {
    "entropy": 1,
    "surprise": 0,
    "relative_surprise": 1,
    "deviation": 2,  # one of the policy and one of the reference
    "group_divergence": 1,
}
"""The number of the trainer's forward passes over all answers that each signal takes."""

EPS = 1e-8
"""Added to entropies and variances before a division by them."""


@Credit.register("weighted_by")
@dataclass(frozen=True, kw_only=True)
class WeightedBy(OverAnotherCredit):
    """Weights by entropy or surprise: A'_t = w_t · A_t, where A_t is another credit's advantage and w_t a
    weight from a `signal` of the token.

    * ``group_share`` (GTPO): w = `base` + `bonus` · n · s_i,t / Σ_k s_k,t. The sum is over the n answers to
      the problem that have a token at position t with an advantage of the same sign. Where the advantage is
      negative, 1/s takes the place of s, so mistakes of which the policy was sure weigh more.
    * ``softmax`` (DGPO): w_t = T · exp(s_t / τ) / Σ_j exp(s_j / τ) over the T trained tokens of the answer,
      whose mean weight is 1.
    * ``top_share`` (forking tokens, 80/20): w = 1 for the `share` of tokens with the largest signal, else 0.
    * ``interval`` (RSI-S): w = 1 where the signal is within `bounds`, else 0.

    **Biased**: a weight that depends on the sampled token, or on the state, changes the direction of the
    expected gradient. On the tests' language, for RLOO with two answers, ``surprise`` and ``softmax``, it is
    off by 25 % of its length (cosine 0.98). `standardise` removes the reward, since the correct answers then
    have a mean advantage of 0: with three answers, ``surprise`` and ``group_share``, the error is 104 %
    (cosine −0.12). docs/credit_assignment.md has the errors of other settings."""

    signal: Signal = "entropy"
    """The number from which a token's weight is computed: the ``entropy`` of the policy's distribution, the
    ``surprise`` −log π(a) of the sampled token, the surprise divided by the entropy (``relative_surprise``),
    the ``deviation`` from the trainer's reference model, d · (H / log V)^κ with d = 1 − Σ √(π·π_ref), or the
    ``group_divergence``, the Jensen-Shannon divergence from the mean of the distributions that the answers to
    the problem have at the same position."""
    weights: Weights = "group_share"
    """How the signal becomes a weight."""
    base: Annotated[float, Ge(0)] = 0.9
    """(for ``group_share``) The part of the weight that all tokens have."""
    bonus: Annotated[float, Ge(0)] = 0.1
    """(for ``group_share``) The mean of the part of the weight that is distributed in proportion to the
    signal. If `base` + `bonus` is 1, the mean weight is 1."""
    temperature: Annotated[float, Gt(0)] = 0.5
    """(for ``softmax``) τ. The smaller it is, the larger are the weights of the tokens with the largest
    signal."""
    share: Annotated[float, Gt(0), Le(1)] = 0.2
    """(for ``top_share``) The share of tokens that keep their advantages."""
    among: Literal["iteration", "answer"] = "iteration"
    """(for ``top_share``) The tokens of which `share` is taken: all tokens of the ``iteration``, or those of
    each ``answer`` by itself."""
    bounds: tuple[float, float] | None = None
    """(for ``interval``) The smallest and the largest signal of tokens that keep their advantages; null for
    other weights."""
    exponent: Annotated[float, Ge(0)] = 1.0
    """(for ``deviation``) κ. With 0, the entropy doesn't count."""
    standardise: bool = False
    """Whether the weighted advantages of a problem are standardised (GTPO, eq. 6), separately for tokens
    whose advantage was above 0 and for those below 0: (A' − mean) / standard deviation over these tokens. The
    correct answers to a problem then have a mean advantage of 0, and so do the wrong ones."""
    drop: bool = False
    """Whether tokens of weight 0 are not trained, so means over tokens don't count them. An answer whose
    weights are all 0 keeps its tokens, with an advantage of 0."""

    def __post_init__(self) -> None:
        if (self.weights == "interval") != (self.bounds is not None):
            raise ValueError(
                "bounds and weights 'interval' belong together: set both, such as bounds [0.5, 3], or neither"
            )
        if self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"bounds {list(self.bounds)} must be [lowest, highest], such as [0.5, 3]")
        if self.standardise and self.weights in ("top_share", "interval"):
            raise ValueError(
                "standardise would give tokens of weight 0 an advantage: set it to false, or weights to"
                " 'group_share' or 'softmax'"
            )
        if self.drop and self.weights not in ("top_share", "interval"):
            raise ValueError(
                f"drop leaves out tokens of weight 0, and weights {self.weights!r} gives no token the weight"
                " 0: set drop to false, or weights to 'top_share' or 'interval'"
            )

    @property
    def _reads_surprise(self) -> bool:
        return self.signal in ("surprise", "relative_surprise")

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        scores = super().trainer_scores  # those of the credit whose advantages are weighted
        compared_with = scores.compared_with
        if self.signal == "deviation":
            compared_with |= {"reference"}
        elif self.signal == "group_divergence":
            compared_with |= {"group"}
        # The surprise is −log p of the sampled token. The other signals are computed from whole distributions
        # over the vocabulary.
        return replace(
            scores,
            reference=scores.reference or self.signal == "deviation",
            distributions=scores.distributions or self.signal != "surprise",
            compared_with=compared_with,
            passes=scores.passes + PASSES_OF_SIGNAL[self.signal],
        )

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        needs = [*super().needs]
        if self._reads_surprise:
            needs.append(Need(SampledAnswers(), "it reads the probabilities that tokens were sampled with"))
        if self.weights == "group_share" or self.signal == "group_divergence":
            needs.append(Need(Answers(2), "it compares a token with those of the other answers"))
            # Answers in one line have no parallel threads. With `turns=True`, they may have several turns.
            needs.append(Need(OneLine(turns=True), "it compares tokens at the same position", THREADS_REMEDY))
        return tuple(needs)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.signal == "deviation":
            yield from check_reference_model(
                experiment, "signal is 'deviation'", "signal", "set signal to 'entropy'"
            )
            if self.over.trainer_scores.reference_model is not None:
                yield Finding(
                    "signal 'deviation' compares the policy with the start model, and the credit"
                    f" {self.over.registered_name()!r} takes another model as the trainer's reference",
                    "signal",
                    "set it to 'entropy'",
                )
        if self.signal in ("deviation", "group_divergence"):
            yield from _check_whole_distributions(experiment, self.signal)
        if self.signal == "relative_surprise":
            yield from check_uncut_sampling(
                experiment, "relative_surprise divides by the entropy of the whole distribution"
            )

    @override
    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        signals = self._compute_signals(context, episodes)
        if self.weights == "group_share":
            weights = group_share_weights(episodes, signals, self.base, self.bonus)
        elif self.weights == "softmax":
            weights = [
                softmax_weights(signals_T, episode.trained, self.temperature)
                for signals_T, episode in zip(signals, episodes, strict=True)
            ]
        elif self.weights == "top_share":
            weights = top_share_weights(context, episodes, signals, self.share, self.among)
        else:  # "interval"
            assert self.bounds is not None, "checked when the credit is built"
            lowest, highest = self.bounds
            weights = [(signals_T >= lowest) & (signals_T <= highest) for signals_T in signals]
        rows = [
            self._weigh_row(episode, weights_T) for episode, weights_T in zip(episodes, weights, strict=True)
        ]
        return standardise_by_sign(episodes, rows) if self.standardise else rows

    def _compute_signals(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Column]:
        """Returns the signal of each response token, by episode. Collective."""
        scores = context.model_scores
        if self.signal == "deviation":
            reference_distances = require(scores.reference_distances, "reference distances")
            # d_t · (H_t / log V)^κ: d_t says how far the policy has moved from the reference at a token. The
            # second factor is small where the policy is nearly certain. With κ = 0, only d_t counts.
            return [
                deviation.distances_T * deviation.relative_entropies_T**self.exponent
                for deviation in reference_distances.along(episodes)
            ]
        if self.signal == "group_divergence":
            return require(scores.group_divergences, "group divergences").along(episodes)
        if self.signal == "surprise":
            return _surprises(episodes)
        distributions = require(scores.distributions, "distributions")
        entropies = [entropies_T for _, entropies_T in distributions.along(episodes)]
        if self.signal == "entropy":
            return entropies
        # "relative_surprise": the surprise divided by the entropy
        return [
            surprises_T / (entropies_T + EPS)
            for surprises_T, entropies_T in zip(_surprises(episodes), entropies, strict=True)
        ]

    def _weigh_row(self, episode: Episode, weights_T: Column) -> Episode:
        """Returns the row with its advantages multiplied by the weights. With `drop`, tokens of weight 0 are
        not trained, unless no token would be left to train."""
        assert episode.advantages is not None, "`needs` asks for a credit with advantages"
        row = replace(episode, advantages=episode.advantages * weights_T)
        if self.drop:
            has_weight_T = episode.trained & (weights_T > 0)
            if has_weight_T.any():  # the trainer takes no row without a trained token
                row = replace(row, trained=has_weight_T)
        return row


def _surprises(episodes: Sequence[Episode]) -> list[Column]:
    """Returns −log p of each response token, by episode; p is the probability with which it was sampled."""
    import numpy as np

    surprises = []
    for episode in episodes:
        assert episode.behaviour_logprobs is not None, "sampled answers have log-probs"
        surprises.append(-np.asarray(episode.behaviour_logprobs, np.float64))
    return surprises


def group_share_weights(
    episodes: Sequence[Episode], signals: Sequence[Column], base: float, bonus: float
) -> list[Column]:
    """Returns the weights of GTPO, eq. 3 and 5: ``base + bonus · n · s_i,t / Σ_k s_k,t`` where advantages are
    positive, and the same with 1/s in place of s where they are negative.

    Each token is compared with a set of tokens: those of the answers to the same problem that are at the same
    position and have an advantage of the same sign. The token itself is in the set. n is the number of these
    tokens, and the sum is over their answers k. Tokens with an advantage of 0 get the weight 1.

    Example: the two correct answers to a problem have the entropies 0.3 and 0.1 at position t. With base 0.9
    and bonus 0.1, their weights there are 0.9 + 0.1 · 2 · 3/4 = 1.05 and 0.95.
    """
    import numpy as np

    tokens = _tokens_with_advantage(episodes, signals)
    sums: dict[_ComparedSet, float] = {}
    counts: dict[_ComparedSet, int] = {}
    for token in tokens:
        sums[token.compared_set] = sums.get(token.compared_set, 0.0) + token.signal_or_inverse
        counts[token.compared_set] = counts.get(token.compared_set, 0) + 1
    weights = [np.ones(len(episode.response_ids)) for episode in episodes]
    for token in tokens:
        count = counts[token.compared_set]
        weight = base + bonus * count * token.signal_or_inverse / sums[token.compared_set]
        weights[token.episode][token.compared_set.position] = weight
    return weights


class _ComparedSet(NamedTuple):
    """The tokens at one position of the answers to a problem, with advantages of one sign."""

    problem: str
    sign: Literal[1, -1]
    position: int


class _WeightedToken(NamedTuple):
    """A token with an advantage other than 0, and its summand in the sum over its compared set.

    Example: the token at position 7 of the third episode has a negative advantage and the entropy 0.5:
    ``_WeightedToken(episode=2, compared_set=_ComparedSet("train/17", -1, 7), signal_or_inverse=2.0)``.
    """

    episode: int
    """The index of the token's episode."""
    compared_set: _ComparedSet
    """The set of tokens with which it is compared. It also has the token's position."""
    signal_or_inverse: float
    """The token's signal s, or 1/s if its advantage is negative."""


def _tokens_with_advantage(episodes: Sequence[Episode], signals: Sequence[Column]) -> list[_WeightedToken]:
    """Returns the trained tokens whose advantage isn't 0, episode after episode. Each has the set of tokens
    with which it is compared: those at its position, in the answers to its problem, with an advantage of the
    same sign."""
    import numpy as np

    tokens = []
    for index, (episode, signals_T) in enumerate(zip(episodes, signals, strict=True)):
        assert episode.advantages is not None
        for position in np.flatnonzero(episode.trained & (episode.advantages != 0)).tolist():
            signal = float(signals_T[position]) + EPS
            # GTPO computes the weight from the signal s where the advantage is positive, and from 1/s where
            # it is negative.
            if episode.advantages[position] > 0:
                compared_set = _ComparedSet(episode.group, sign=1, position=position)
                token = _WeightedToken(index, compared_set, signal_or_inverse=signal)
            else:
                compared_set = _ComparedSet(episode.group, sign=-1, position=position)
                token = _WeightedToken(index, compared_set, signal_or_inverse=1 / signal)
            tokens.append(token)
    return tokens


def softmax_weights(signals_T: Column, trained: Column, temperature: float) -> Column:
    """Returns ``T · exp(s_t / τ) / Σ_j exp(s_j / τ)`` for the T trained tokens of an answer, and 1 for the
    other tokens."""
    import numpy as np

    weights_T = np.ones(len(signals_T))
    if trained.any():
        scaled = signals_T[trained] / temperature
        exponentials = np.exp(scaled - scaled.max())  # the maximum is subtracted, so that none overflows
        weights_T[trained] = len(scaled) * exponentials / exponentials.sum()
    return weights_T


def top_share_weights(
    context: RolloutContext,
    episodes: Sequence[Episode],
    signals: Sequence[Column],
    share: float,
    among: Literal["iteration", "answer"] = "iteration",
) -> list[Column]:
    """Returns the weight 1 for the tokens with the largest signals, and 0 for the others. Collective.

    The weight 1 goes to a `share` of the trained tokens, but to at least one token. Tokens that tie with the
    smallest signal among these get it, too.

    Args:
        among: The trained tokens that are compared: those of the ``iteration`` (of all ranks), or of each
            ``answer`` by itself.
    """

    def find_threshold(values: Sequence[float]) -> float:
        """Returns the smallest value that gets the weight 1.

        Example: with a share of 0.5, the values 3, 1, 2, 0 have the threshold 2.
        """
        count = max(1, int(share * len(values)))
        return sorted(values)[-count] if values else 0.0

    values_by_episode = []
    for episode, signals_T in zip(episodes, signals, strict=True):
        values_by_episode.append(signals_T[episode.trained].tolist())
    if among == "answer":
        thresholds = [find_threshold(values) for values in values_by_episode]
    else:
        values_of_rank = list(itertools.chain.from_iterable(values_by_episode))
        pooled = pool_columns(context, "signals", {"signal": values_of_rank})["signal"]
        thresholds = [find_threshold(pooled)] * len(episodes)
    return [signals_T >= threshold for signals_T, threshold in zip(signals, thresholds, strict=True)]


def standardise_by_sign(episodes: Sequence[Episode], rows: Sequence[Episode]) -> list[Episode]:
    """Returns rows whose advantages are standardised over the tokens of a problem (GTPO, eq. 6).

    For each problem, two sets of tokens are standardised, each by itself: the tokens with a positive
    advantage in `episodes`, and those with a negative one.

    Args:
        episodes: The episodes before tokens were weighted.
        rows: The same episodes with weighted advantages.
    """
    import numpy as np

    advantages_by_set: dict[tuple[str, int], list[Column]] = {}
    for episode, row in zip(episodes, rows, strict=True):
        assert episode.advantages is not None and row.advantages is not None
        for sign in (1, -1):
            in_set_T = row.trained & (np.sign(episode.advantages) == sign)
            advantages_by_set.setdefault((episode.group, sign), []).append(row.advantages[in_set_T])
    standardised = []
    for episode, row in zip(episodes, rows, strict=True):
        assert episode.advantages is not None and row.advantages is not None
        advantages_T = row.advantages.copy()
        for sign in (1, -1):
            in_set_T = row.trained & (np.sign(episode.advantages) == sign)
            advantages_of_set = np.concatenate(advantages_by_set[episode.group, sign])
            if in_set_T.any():
                deviation = np.sqrt(advantages_of_set.var() + EPS)
                advantages_T[in_set_T] = (advantages_T[in_set_T] - advantages_of_set.mean()) / deviation
        standardised.append(replace(row, advantages=advantages_T))
    return standardised


def _check_whole_distributions(experiment: Experiment, signal: Signal) -> Iterable[Finding]:
    """Yields a finding for a trainer that can't compare whole distributions."""
    if experiment.trainer.sequence_parallel_size > 1:
        yield Finding(
            f"signal {signal!r} compares whole distributions, and ranks that share a sequence don't exchange"
            " them",
            "signal",
            "set trainer.sequence_parallel_size to 1, or signal to 'entropy'",
        )
