"""Samples further problems until enough of them have answers that differ in score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Answers, Experiment, Feature, Finding, Need, SampledAnswers, UseOfAdvantages
from treetune.episode_generators.base import GenerationContext, Rollout
from treetune.episode_generators.metrics import mean, trajectory_metrics
from treetune.episode_generators.rollout.answers import rank_share
from treetune.inference.base import SamplingParams
from treetune.vocabulary import Metrics, Problem, Trajectory


@Rollout.register("until_mixed")
@dataclass(frozen=True, kw_only=True)
class UntilMixed(Rollout):
    """`rollout` on the iteration's problems and then, round by round, on further ones, until `groups`
    problems have answers that differ in score.

    DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2). Together with the selection
    ``mixed_groups`` with `at_most`, each iteration trains on equally many groups that say something.
    Everything that was sampled is kept and counted, so that ``episodes/score`` is the policy's on
    problems that were not chosen by how it answered them.

    A round has `problems_per_round` problems (None: as many as the first). It is over after
    `max_rounds`, or when the split has no problem left that the iteration hasn't had; the log says so,
    and the iteration goes on with the groups that it has.

    ``rollout/rounds``; ``rollout/groups_dropped``: share of problems whose answers all scored the same;
    ``rollout/groups_lacking``: how many were missing at the end. What the inner rollout measures
    beyond ``episodes/`` and numbers of answers is averaged over the rounds, each with the weight of its
    problems.
    """

    rollout: Rollout
    groups: Annotated[int, Gt(0)]
    max_rounds: Annotated[int, Gt(0)] = 10
    problems_per_round: Annotated[int, Gt(0)] | None = None

    @property
    def gives(self) -> tuple[Feature, ...]:
        return self.rollout.gives

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(SampledAnswers(), "it samples until answers differ"),
            Need(Answers(2), "it waits for answers that differ"),
            Need(
                UseOfAdvantages(),
                "answers that differ are worth something where they are compared",
                "choose the rollout 'single_turn', or an objective that learns from advantages",
            ),
        )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if isinstance(self.rollout, UntilMixed):
            yield Finding(
                "until_mixed can't be within another one", "rollout", "name a rollout that samples answers"
            )
        first = experiment.problems_per_iteration
        if first is None:
            yield Finding(
                "the rollout asks for further problems where answers don't differ, and"
                " problems_per_iteration null has none left",
                "$.problems_per_iteration",
                "set it to a number below that of the training problems",
            )
        elif first == experiment.task.size("train"):
            yield Finding(
                f"the rollout asks for further problems, and problems_per_iteration takes all {first}",
                "$.problems_per_iteration",
                "lower it",
            )
        else:
            most = first + (self.max_rounds - 1) * (self.problems_per_round or first)
            if self.groups > most:
                yield Finding(
                    f"{self.groups} groups are asked for, and {self.max_rounds} rounds have {most} problems",
                    "groups",
                    "lower groups, or raise max_rounds or problems_per_iteration",
                )
        kept = experiment.selection.at_most
        if kept is not None and kept < self.groups:
            yield Finding(
                f"the rollout samples until {self.groups} groups have spread (groups), and the selection"
                f" trains on {kept} of them (at_most)",
                "groups",
                "make the two equal",
            )

    def most_answers(self, problems: int) -> int:
        further = (self.max_rounds - 1) * (self.problems_per_round or problems)
        return (problems + further) * self.samples

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.rollout.samples

    @property
    def unfinished_reward(self) -> float | None:  # type: ignore[override]
        return self.rollout.unfinished_reward

    @property
    def max_prompt_tokens(self) -> int | None:  # type: ignore[override]
        return self.rollout.max_prompt_tokens

    @property
    def sampling(self) -> SamplingParams | None:
        return self.rollout.sampling

    @property
    def sampler(self) -> Rollout:
        return self.rollout.sampler

    def run(
        self, context: GenerationContext, problems: Sequence[Problem]
    ) -> tuple[list[Trajectory], Metrics]:
        own: list[Trajectory] = []
        asked: list[Problem] = []
        reports: list[tuple[int, Metrics]] = []
        further: list[Problem] | None = None
        upcoming = list(problems)
        mixed = 0
        # A round's metrics are of all ranks, so all of them decide alike.
        while True:
            trajectories, report = self.rollout.run(_after(context, len(own)), upcoming)
            own += trajectories
            asked += upcoming
            reports.append((len(upcoming), report))
            mixed += round(report["episodes/mixed"] * report["episodes/problems"])
            if mixed >= self.groups or len(reports) == self.max_rounds:
                break
            if further is None:
                further = list(context.further_problems())
            size = self.problems_per_round or len(problems)
            upcoming, further = further[:size], further[size:]
            if not upcoming:
                break
        if mixed < self.groups:
            reason = (
                f"max_rounds is {self.max_rounds}"
                if len(reports) == self.max_rounds
                else "the split has no further problem"
            )
            context.say(
                f"iteration {context.iteration + 1}: {self.groups} problems with answers that differ in score"
                f" were asked for; went on with {mixed} of {len(asked)} after {len(reports)} rounds, since"
                f" {reason}"
            )
        trajectories = _shared_out(context, asked, own) if len(reports) > 1 else own
        return trajectories, _averaged(reports) | trajectory_metrics(context, trajectories) | {
            "rollout/rounds": float(len(reports)),
            "rollout/groups_dropped": 1.0 - mixed / len(asked),
            "rollout/groups_lacking": float(max(0, self.groups - mixed)),
        }


def _after(context: GenerationContext, done: int) -> GenerationContext:
    """The context for a round that comes after `done` answers of this rank."""
    return replace(context, progress=lambda of_round, total: context.progress(done + of_round, done + total))


def _shared_out(
    context: GenerationContext, asked: Sequence[Problem], own: Sequence[Trajectory]
) -> list[Trajectory]:
    """This rank's share of all rounds' trajectories, so that all ranks' are in the order of `asked`.

    As they were sampled, a rank would hold a share of each round. Collective.
    """
    by_problem: dict[str, list[Trajectory]] = {}
    for of_rank in context.exchange("rounds", list(own)):
        for trajectory in of_rank:
            by_problem.setdefault(trajectory.problem.id, []).append(trajectory)
    return [t for problem in rank_share(context, asked) for t in by_problem.get(problem.id, [])]


def _averaged(reports: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Each metric's mean over the rounds that have it, weighted by their problems."""
    names = dict.fromkeys(name for _, report in reports for name in report)
    averages = {}
    for name in names:
        having = [(report[name], float(problems)) for problems, report in reports if name in report]
        averages[name] = mean([value for value, _ in having], [weight for _, weight in having])
    return averages
