"""RRPO: wrong answers are continued from one of their steps, and only the continuations are trained
(arXiv:2605.25507).

    wrong answer    prompt ── step 1 ── step 2 ── step 3          reward 0, not trained
    reset           prompt ── step 1 ──┬── suffix 1               reward 1     A = +0.5
                       not trained     └── suffix 2               reward 0     A = −0.5

The rollout `tree` with the branching `resets` samples the continuations, and this credit trains them. The
method is that of the paper's abstract (Samanta et al., RRPO): a step of a wrong answer is drawn uniformly,
and the policy gradient is applied only to the tokens of the resampled suffixes. The paper's equations were
not available for this file, so it is an assumption that advantages are GRPO's among the suffixes of a wrong
answer. SRPO, in which the model itself finds the wrong step, is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from treetune.contracts import (
    Advantages,
    CreditForRewards,
    CreditForTrees,
    Experiment,
    Finding,
    Need,
    OneLine,
    innermost_rollout,
)
from treetune.credit.base import THREADS_REMEDY, Credit
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.grpo import group_advantages
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree
from treetune.vocabulary import Episode, Fork, Metrics, Trajectory


@Credit.register("resets")
@dataclass(frozen=True, kw_only=True)
class Resets(Credit):
    """RRPO (Samanta et al., arXiv:2605.25507, abstract): the tokens of a continuation of a wrong answer get
    (r − mean) / standard deviation, over the continuations of the same wrong answer from the same step. All
    other tokens are not trained, and neither are answers that were sampled from the prompt.

    It needs the rollout `tree` with the branching `resets`. A problem without wrong answers trains nothing.

    **Biased** as a policy gradient: states are weighted by how often a wrong answer visits them, and the
    tokens before a reset are never trained. On the tests' language, with answers of at most four tokens, two
    continuations and no `std`, the expected gradient is off by 59 % of the true gradient's length (cosine
    0.983)."""

    std: bool = True
    """Whether advantages are divided by the standard deviation of the rewards of the continuations."""

    gives = (Advantages(before_training=True), CreditForRewards(), CreditForTrees())
    needs = (Need(OneLine(), "it trains the tokens after a state", THREADS_REMEDY),)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        rollout, key = innermost_rollout(experiment.rollout)
        # Of the rollouts, only `tree` has a branching. Of the branchings, only `resets` needs grades: they
        # tell it which answers are wrong.
        branching = getattr(rollout, "branching", None)
        continues_wrong_answers = getattr(branching, "needs_grades", False)
        if not continues_wrong_answers:
            yield Finding(
                "it trains the continuations of wrong answers, which only the rollout 'tree' with the"
                " branching 'resets' samples",
                key,
                "append configs/credit/resets.jsonnet to --configs, or choose the credit 'group'",
            )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Compares the continuations of each reset with each other, and trains only their tokens after the
        reset."""
        episodes: list[Episode] = []
        for tree in trees:
            answers_by_reset: dict[Fork, list[Trajectory]] = {}
            for leaf in tree.leaves:
                if leaf.fork is not None:
                    answers_by_reset.setdefault(leaf.fork, []).append(leaf)
            for fork, answers in answers_by_reset.items():
                advantages = group_advantages([answer.reward for answer in answers], self.std, eps=1e-6)
                for answer, advantage in zip(answers, advantages, strict=True):
                    episode = make_episode(context, answer, [advantage] * len(answer.step_ends))
                    trained = episode.trained.copy()
                    trained[: fork.tokens] = False  # the wrong answer's tokens, up to the reset
                    episodes.append(replace(episode, trained=trained))
        return episodes, advantage_metrics(context, episodes)
