"""Selections: which episodes are trained on.

Example: of two problems with two answers each, with the scores 1, 1 and 1, 0, `mixed_groups` keeps the second
problem's answers, `correct_only` the three with the score 1, and `preference_pairs` makes the pair (1, 0).
"""

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


def selection_metrics(episodes: Sequence[Episode], kept_episodes: Sequence[Episode]) -> Metrics:
    """Returns metrics: the numbers of episodes and of groups before the selection and after it."""
    return {
        "selection/episodes": float(len(episodes)),
        "selection/kept": float(len(kept_episodes)),
        "selection/groups": float(len({episode.group for episode in episodes})),
        "selection/groups_kept": float(len({episode.group for episode in kept_episodes})),
    }


def check_reachable(threshold: float, experiment: Experiment) -> Iterator[Finding]:
    """Yields a finding if the threshold is above the best possible score."""
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
    """Keeps every episode."""

    gives = (WholeBatch(),)

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        return list(episodes), selection_metrics(episodes, episodes)


@Selection.register("correct_only")
@dataclass(frozen=True, kw_only=True)
class CorrectOnly(Selection):
    """Keeps the episodes that score high enough: all of them, or only the first ones of each problem
    (`max_per_problem`)."""

    reward_threshold: float = CORRECT_SCORE
    """The lowest score of an episode that is kept."""
    max_per_problem: Annotated[int, Gt(0)] | None = None
    """The largest number of episodes of a problem; null: there is no bound. ReST-EM (Singh et al.,
    arXiv:2312.06585) has 10, so that easy problems don't crowd out hard ones."""

    keeps_groups = False

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_reachable(self.reward_threshold, experiment)

    @override
    def most_kept(self, answers: int, problems: int) -> int:
        return answers if self.max_per_problem is None else min(answers, self.max_per_problem * problems)

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        kept_by_group: Counter[str] = Counter()
        capped_groups: set[str] = set()  # groups that lost episodes because of `max_per_problem`
        kept_episodes = []
        for episode in episodes:
            if episode.score < self.reward_threshold:
                continue
            if self.max_per_problem is not None and kept_by_group[episode.group] == self.max_per_problem:
                capped_groups.add(episode.group)
                continue
            kept_by_group[episode.group] += 1
            kept_episodes.append(episode)
        metrics = selection_metrics(episodes, kept_episodes)
        return kept_episodes, metrics | {"selection/groups_capped": float(len(capped_groups))}


@Selection.register("mixed_groups")
@dataclass(frozen=True, kw_only=True)
class MixedGroups(Selection):
    """Drops groups in which all answers have the same score, so no answer is better than the others.

    The filter of DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2); the rollout
    ``until_mixed`` samples until there are enough groups. Only the score counts: a group whose answers are
    all right is dropped even if shaping rewards some of them more.

    ``selection/groups_dropped`` is the share of groups without spread, ``selection/groups_surplus`` the
    number of groups with spread beyond `at_most`.
    """

    at_most: Annotated[int, Gt(0)] | None = None
    """The largest number of groups that are kept; null: all. The first ones are kept, in the order of the
    problems, which does not depend on the answers."""

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
        mixed_groups = [group for group, scores_of_group in scores.items() if len(scores_of_group) > 1]
        kept_groups = set(mixed_groups[: self.at_most])
        kept_episodes = [episode for episode in episodes if episode.group in kept_groups]
        metrics = selection_metrics(episodes, kept_episodes)
        metrics["selection/groups_surplus"] = float(len(mixed_groups) - len(kept_groups))
        if scores:
            metrics["selection/groups_dropped"] = 1.0 - len(mixed_groups) / len(scores)
        return kept_episodes, metrics


@Selection.register("preference_pairs")
@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Selection):
    """Pairs every answer that scores high enough with every other answer to the same problem that does not.

    A problem whose answers are all accepted, or all rejected, gives no pair. An answer has a row for each of
    its pairs: the rows of a pair are neighbours with the pair's number, the better one first.
    ``selection/kept`` counts the answers that are in any pair.
    """

    reward_threshold: float = CORRECT_SCORE
    """The lowest score of an accepted answer."""
    max_pairs_per_problem: Annotated[int, Gt(0)] | None = 64
    """The largest number of pairs of a problem; null: there is no bound. If a problem has more, its pairs are
    drawn uniformly from them. The draw derives from run seed, iteration and problem."""

    keeps_groups = False

    gives = (Pairs(),)
    needs = (
        Need(UseOfPairs(), "it makes pairs of answers"),
        Need(Answers(2), "it pairs answers to the same problem"),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_reachable(self.reward_threshold, experiment)

    @override
    def most_kept(self, answers: int, problems: int) -> int:
        answers_per_problem = answers // max(1, problems)
        # A problem has the most pairs if half of its answers are accepted.
        accepted = answers_per_problem // 2
        most_pairs = accepted * (answers_per_problem - accepted)
        if self.max_pairs_per_problem is not None:
            most_pairs = min(most_pairs, self.max_pairs_per_problem)
        return problems * most_pairs

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        rows: list[Episode] = []
        possible_pairs = capped_groups = 0
        for problem_id, group in groups.items():
            accepted = [episode for episode in group if episode.score >= self.reward_threshold]
            rejected = [episode for episode in group if episode.score < self.reward_threshold]
            n_pairs = len(accepted) * len(rejected)
            # The number i * len(rejected) + j stands for the pair of accepted[i] and rejected[j].
            kept_pairs: Sequence[int] = range(n_pairs)
            if self.max_pairs_per_problem is not None and n_pairs > self.max_pairs_per_problem:
                draw = derived_random(context.seed, context.iteration, problem_id, "pairs")
                kept_pairs = sorted(draw.sample(kept_pairs, self.max_pairs_per_problem))
                capped_groups += 1
            for number_in_group in kept_pairs:
                accepted_index, rejected_index = divmod(number_in_group, len(rejected))
                pair = len(rows) // 2  # the pair's number among the pairs of all groups
                rows.append(replace(accepted[accepted_index], pair=pair, chosen=True))
                rows.append(replace(rejected[rejected_index], pair=pair, chosen=False))
            possible_pairs += n_pairs
        # An answer may be in several pairs, and counts once.
        kept_episodes = list({row.trajectory: row for row in rows}.values())
        return rows, selection_metrics(episodes, kept_episodes) | {
            "selection/pairs": float(len(rows) // 2),
            "selection/pairs_possible": float(possible_pairs),
            "selection/groups_capped": float(capped_groups),
        }


@Selection.register("tokens")
@dataclass(frozen=True, kw_only=True)
class SomeTokens(Selection):
    """SPO's selection of tokens: trains the tokens that have an advantage other than 0 and were not nearly
    certain.

    The other tokens are context: they are not trained, and means and normalisation over tokens don't count
    them. Answers without a remaining token are left out (Guo et al., arXiv:2505.23564, and its public code,
    which masks tokens that were sampled with a probability of 0.9 or more and drops segments without
    advantage). ``selection/tokens`` is the share of tokens that is kept.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Keeps tokens that were sampled with a smaller probability."""

    needs = (
        Need(Advantages(before_training=True), "it leaves out tokens whose advantage is 0"),
        Need(SampledAnswers(), "it looks at the probabilities that tokens were sampled with"),
    )

    @override
    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        kept_episodes = []
        for episode in episodes:
            assert episode.advantages is not None and episode.behaviour_logprobs is not None
            # A token that was nearly certain, or that has the advantage 0, is no longer trained.
            is_uncertain_T = episode.behaviour_logprobs < math.log(self.below)
            trained_T = episode.trained & is_uncertain_T & (episode.advantages != 0)
            if trained_T.any():
                kept_episodes.append(replace(episode, trained=trained_T))
        metrics = selection_metrics(episodes, kept_episodes)
        tokens_before = sum(int(episode.trained.sum()) for episode in episodes)
        tokens_kept = sum(int(episode.trained.sum()) for episode in kept_episodes)
        if tokens_before:
            metrics["selection/tokens"] = tokens_kept / tokens_before
        return kept_episodes, metrics
