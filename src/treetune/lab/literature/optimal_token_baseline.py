"""The optimal token baseline: a baseline for each position, from answers weighted by their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, OneLine, SampledAnswers
from treetune.lab.literature.token_level import Distributions
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import advantage_metrics, episode_of
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics

EPS = 1e-8
"""Added to a sum of weights: verl's."""


@Credit.register("optimal_token_baseline")
@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(Credit):
    """The answer's reward less a baseline B_t, which has a value for each position t of a group
    (Li et al., arXiv:2602.07078, as verl's ``optimal_token_baseline`` computes it).

    B_t = Σ_i R_i W_i,t / Σ_i W_i,t over the answers i that have a token t, where W_i,t is the sum of w over
    the answer's first t tokens, and w = 1 − 2 π(a) + Σ_v π(v)² is the squared length of ∇ log π(a) in the
    logits: what is noisier counts more. Where one answer alone is left, its baseline is 0. It takes
    gradients of different tokens to be independent, and all of an answer's reward to come at its end.

    **Biased**, as its own reward is in the baseline: on the tests' language the expected gradient is off by
    33 % of its length with three answers (cosine 0.9999), as a group's mean is.
    """

    squared_norms: Literal["of_sampled", "exact"] = "of_sampled"
    """Where Σ π² comes from. ``exact``: the service `Distributions`, which analyses lend.
    ``of_sampled``: π(a) stands for it, whose mean it is, so that w is 1 − π(a); the paper has no such."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(), "it adds up along an answer, token by token"),
        Need(SampledAnswers(), "it weighs answers by the probabilities of their tokens"),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.squared_norms == "exact" and experiment.credit is self:
            yield Finding(
                "squared_norms is 'exact', and a run knows the probabilities of sampled tokens alone",
                "squared_norms",
                "set it to 'of_sampled'",
            )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        answers = answers_of(trees)
        plain = [episode_of(context, answer) for answer in answers]
        assert all(one.behaviour_logprobs is not None for one in plain), "sampled answers have log-probs"
        chosen = [np.exp(np.asarray(one.behaviour_logprobs, np.float64)) for one in plain]
        squares = chosen
        if self.squared_norms == "exact":
            squares = [of_answer for of_answer, _ in context.get(Distributions).along(plain)]
        norms = iter([1 - 2 * own + square for own, square in zip(chosen, squares, strict=True)])
        advantages: list[Column] = []
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            advantages += optimal_token_advantages(rewards, [next(norms) for _ in rewards])
        episodes = [replace(one, advantages=row) for one, row in zip(plain, advantages, strict=True)]
        return episodes, advantage_metrics(context, episodes)


def optimal_token_advantages(rewards: Sequence[float], norms: Sequence[Column]) -> list[Column]:
    """Returns an advantage for each token of a group's answers, given what they earned and, for each of their
    tokens, the squared length of its gradient."""
    import numpy as np

    lengths = [len(one) for one in norms]
    weights_GT = np.zeros((len(norms), max(lengths)))
    for row, one in zip(weights_GT, norms, strict=True):
        row[: len(one)] = np.cumsum(one)
    baseline_T = np.array(rewards) @ weights_GT / (weights_GT.sum(0) + EPS)
    baseline_T[sorted([0, *lengths])[-2] :] = 0.0  # behind the last but one there is one answer alone
    return [reward - baseline_T[:length] for reward, length in zip(rewards, lengths, strict=True)]
