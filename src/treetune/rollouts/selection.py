"""Selections: the episodes that are trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.contracts import (
    Advantages,
    Answers,
    Experiment,
    Finding,
    Need,
    Pairs,
    SampledAnswers,
    UseOfPairs,
    WholeBatch,
)
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derived_random
from treetune.vocabulary import CORRECT_SCORE, Episode, Metrics


def selection_metrics(episodes: Sequence[Episode], kept: Sequence[Episode]) -> Metrics:
    """Counts the episodes and groups that were there, and those that are trained on."""
    return {
        "selection/episodes": float(len(episodes)),
        "selection/kept": float(len(kept)),
        "selection/groups": float(len({episode.group for episode in episodes})),
        "selection/groups_kept": float(len({episode.group for episode in kept})),
    }


def unreachable(threshold: float, experiment: Experiment) -> Iterator[Finding]:
    """Returns a finding where no answer can reach the threshold."""
    best = experiment.task.grader.best
    if threshold > best:
        yield Finding(
            f"reward_threshold is {threshold:g}, and the best answer scores {best:g}: nothing would be left",
            "reward_threshold",
            f"lower it to {best:g} or less",
        )


@Selection.register("all")
@dataclass(frozen=True, kw_only=True)
class All(Selection):
    """Every episode."""

    gives = (WholeBatch(),)

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        return list(episodes), selection_metrics(episodes, episodes)


@Selection.register("correct_only")
@dataclass(frozen=True, kw_only=True)
class CorrectOnly(Selection):
    """Episodes that score high enough, the first of each problem."""

    reward_threshold: float = CORRECT_SCORE
    """Score from which on an episode is kept."""
    max_per_problem: Annotated[int, Gt(0)] | None = None
    """Episodes of a problem at most; None: there is no bound. ReST-EM (Singh et al., arXiv:2312.06585) has
    10, so that easy problems don't crowd out hard ones."""

    keeps_groups = False

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return unreachable(self.reward_threshold, experiment)

    @override
    def most_kept(self, answers: int, problems: int) -> int:
        return answers if self.max_per_problem is None else min(answers, self.max_per_problem * problems)

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        taken: Counter[str] = Counter()
        kept = []
        for episode in episodes:
            if episode.score < self.reward_threshold or taken[episode.group] == self.max_per_problem:
                continue
            taken[episode.group] += 1
            kept.append(episode)
        capped = sum(count == self.max_per_problem for count in taken.values())
        return kept, selection_metrics(episodes, kept) | {"selection/groups_capped": float(capped)}


@Selection.register("mixed_groups")
@dataclass(frozen=True, kw_only=True)
class MixedGroups(Selection):
    """Drops groups in which every answer scored the same: relative to them, nothing was better.

    The filter of DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2); the rollout
    ``until_mixed`` samples more. It is about the score: a group in which all are right, and some are
    merely shorter, is dropped.

    ``selection/groups_dropped`` is the share of groups without spread, ``selection/groups_surplus`` the
    number of those over `at_most`.
    """

    at_most: Annotated[int, Gt(0)] | None = None
    """Keeps so many groups with spread, the first in the order of the problems, which has nothing to do with
    their answers. None: all."""

    needs = (Need(Answers(2), "it looks for problems whose answers differ"),)

    @override
    def most_kept(self, answers: int, problems: int) -> int:
        groups = problems if self.at_most is None else min(problems, self.at_most)
        return groups * (answers // max(1, problems))

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        scores: dict[str, set[float]] = {}
        for episode in episodes:
            scores.setdefault(episode.group, set()).add(episode.score)
        mixed = [group for group, of_group in scores.items() if len(of_group) > 1]
        chosen = set(mixed[: self.at_most])
        kept = [episode for episode in episodes if episode.group in chosen]
        metrics = selection_metrics(episodes, kept)
        metrics["selection/groups_surplus"] = float(len(mixed) - len(chosen))
        if scores:
            metrics["selection/groups_dropped"] = 1.0 - len(mixed) / len(scores)
        return kept, metrics


@Selection.register("preference_pairs")
@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Selection):
    """Every answer that scores high enough against every other one to the same problem.

    A problem whose answers are all on one side gives no pair. An answer comes as often as it is compared:
    first the better one of a pair, then the other, both with the pair's number. ``selection/kept`` counts
    answers that are in any pair.
    """

    reward_threshold: float = CORRECT_SCORE
    """Score from which on an answer is the better one."""
    max_pairs_per_problem: Annotated[int, Gt(0)] | None = 64
    """Draws that many of a problem's pairs where there are more, each as likely as any other; None: there is
    no bound. The draw derives from run seed, iteration and problem."""

    keeps_groups = False

    gives = (Pairs(),)
    needs = (
        Need(UseOfPairs(), "it makes pairs of answers"),
        Need(Answers(2), "it pairs answers to the same problem"),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return unreachable(self.reward_threshold, experiment)

    @override
    def most_kept(self, answers: int, problems: int) -> int:
        each = answers // max(1, problems)
        pairs = (each // 2) * (each - each // 2)
        bound = self.max_pairs_per_problem
        return problems * (pairs if bound is None else min(pairs, bound))

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        rows: list[Episode] = []
        possible = capped = 0
        for name, group in groups.items():
            accepted = [episode for episode in group if episode.score >= self.reward_threshold]
            rejected = [episode for episode in group if episode.score < self.reward_threshold]
            count = len(accepted) * len(rejected)
            numbers: Sequence[int] = range(count)
            if self.max_pairs_per_problem is not None and count > self.max_pairs_per_problem:
                draw = derived_random(context.seed, context.iteration, name, "pairs")
                numbers = sorted(draw.sample(numbers, self.max_pairs_per_problem))
                capped += 1
            for number in numbers:
                better, other = divmod(number, len(rejected))
                pair = len(rows) // 2
                rows.append(replace(accepted[better], pair=pair, chosen=True))
                rows.append(replace(rejected[other], pair=pair, chosen=False))
            possible += count
        kept = list({row.trajectory: row for row in rows}.values())
        return rows, selection_metrics(episodes, kept) | {
            "selection/pairs": float(len(rows) // 2),
            "selection/pairs_possible": float(possible),
            "selection/groups_capped": float(capped),
        }


@Selection.register("tokens")
@dataclass(frozen=True, kw_only=True)
class SomeTokens(Selection):
    """Every answer, but only its tokens that have an advantage other than 0 and were not nearly certain;
    answers of which none is left are left out. The other tokens are context: nothing is learnt from them, and
    no mean or normalisation over tokens counts them.

    SPO's (Guo et al., arXiv:2505.23564, and its public code, which masks what was sampled with 0.9 or more
    and drops segments without advantage). ``selection/tokens`` is the share of tokens that is kept.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Keeps tokens that were sampled with a smaller probability."""

    needs = (
        Need(Advantages(before_training=True), "it leaves out tokens whose advantage is 0"),
        Need(SampledAnswers(), "it looks at the probabilities that tokens were sampled with"),
    )

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        kept = []
        for episode in episodes:
            assert episode.advantages is not None and episode.behaviour_logprobs is not None
            open_T = (episode.behaviour_logprobs < math.log(self.below)) & (episode.advantages != 0)
            trained = episode.trained & open_T
            if trained.any():
                kept.append(replace(episode, trained=trained))
        metrics = selection_metrics(episodes, kept)
        if before := sum(int(episode.trained.sum()) for episode in episodes):
            metrics["selection/tokens"] = sum(int(episode.trained.sum()) for episode in kept) / before
        return kept, metrics
