"""The optimal token baseline: a baseline for each position, from the rewards of answers, weighted by the
sizes of their gradients (arXiv:2602.07078).

Example: at position t, two answers with the rewards 1 and 0 have the weights W = 3 and 1. Both have the
baseline B_t = 0.75 there, and the advantages 0.25 and −0.75.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine, SampledAnswers
from treetune.credit.base import Credit, TrainerScores
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.rollouts.context import RolloutContext, require
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics

EPS = 1e-8
"""Added to a sum of weights before a division by it, as in verl."""


@Credit.register("optimal_token_baseline")
@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(Credit):
    """Optimal token baseline: A_i,t = R_i − B_t with B_t = Σ_i R_i W_i,t / Σ_i W_i,t, over the group's
    answers i that have a token t (Li et al., arXiv:2602.07078, as verl's ``optimal_token_baseline`` computes
    it).

    W_i,t is the sum of w over the answer's first t tokens, where w = 1 − 2 π(a) + Σ_v π(v)² is the squared
    length of ∇ log π(a) with respect to the logits. So answers with noisier gradients weigh more. If only one
    answer has a token t, B_t is 0. The derivation assumes that the gradients of different tokens are
    independent, and that an answer's whole reward comes at its end.

    **Biased**, as the answer's own reward is in the baseline: on the tests' language the expected gradient is
    off by 33 % of its length with three answers (cosine 0.9999), as with a group's mean.
    """

    squared_norms: Literal["of_sampled", "exact"] = "of_sampled"
    """The source of Σ_v π(v)². ``exact``: whole distributions, which the trainer computes in a run with one
    more forward pass of the policy. ``of_sampled``: π(a) as an estimate, since the mean of π(a) over sampled
    tokens is Σ_v π(v)². Then w is 1 − π(a). The paper has no such estimate."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(), "it adds up along an answer, token by token"),
        Need(SampledAnswers(), "it weighs answers by the probabilities of their tokens"),
    )

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        if self.squared_norms != "exact":
            return TrainerScores()
        return TrainerScores(distributions=True, passes=1)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        answers = answers_of(trees)
        plain_episodes = [make_episode(context, answer) for answer in answers]
        probabilities = []  # π(a) by answer, each of shape [T]
        for episode in plain_episodes:
            assert episode.behaviour_logprobs is not None, "sampled answers have log-probs"
            probabilities.append(np.exp(np.asarray(episode.behaviour_logprobs, np.float64)))
        # Σ_v π(v)² by answer. Its estimate is π(a), since the mean of π(a) over sampled tokens is this sum.
        if self.squared_norms == "exact":
            distributions = require(context.model_scores.distributions, "distributions")
            sums_of_squares = [squares_T for squares_T, _ in distributions.along(plain_episodes)]
        else:
            sums_of_squares = probabilities
        squared_norms = []  # w by answer: the squared length of ∇ log π(a) with respect to the logits
        for probabilities_T, squares_T in zip(probabilities, sums_of_squares, strict=True):
            squared_norms.append(1 - 2 * probabilities_T + squares_T)
        advantages: list[Column] = []
        for tree in trees:
            first = len(advantages)  # the index of the tree's first answer
            rewards = [leaf.reward for leaf in tree.leaves]
            advantages += optimal_token_advantages(rewards, squared_norms[first : first + len(rewards)])
        episodes = [
            replace(episode, advantages=advantages_T)
            for episode, advantages_T in zip(plain_episodes, advantages, strict=True)
        ]
        return episodes, advantage_metrics(context, episodes)


def optimal_token_advantages(rewards: Sequence[float], squared_norms: Sequence[Column]) -> list[Column]:
    """Returns R_i − B_t for each token t of a group's answers, with a baseline B_t for each position.

    B_t is the mean reward of the answers that have a token t. The mean is weighted by W_i,t, the sum of the
    squared norms of answer i up to token t.

    Args:
        rewards: The reward R_i of each answer.
        squared_norms: The squared length of the gradient of each token, by answer.
    """
    import numpy as np

    lengths = [len(norms_T) for norms_T in squared_norms]
    weights_GT = np.zeros((len(squared_norms), max(lengths)))  # W_i,t; 0 where answer i has no token t
    for weights_T, norms_T in zip(weights_GT, squared_norms, strict=True):
        weights_T[: len(norms_T)] = np.cumsum(norms_T)
    baseline_T = np.array(rewards) @ weights_GT / (weights_GT.sum(0) + EPS)
    # After the end of the second longest answer, only the longest answer has tokens. With its own reward as
    # the baseline, these tokens would all get the advantage 0. So the baseline is 0 there. With a single
    # answer, this holds from token 0 on.
    second_longest = sorted([0, *lengths])[-2]
    baseline_T[second_longest:] = 0.0
    return [reward - baseline_T[:length] for reward, length in zip(rewards, lengths, strict=True)]
