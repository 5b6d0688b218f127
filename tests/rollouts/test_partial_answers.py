"""Answers that take several iterations: none is preferred for being short, each token knows its version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.inference.base import Completion, Request
from treetune.rollouts.context import CarryOver, RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.vocabulary import Metrics, Problem, Trajectory
from treetune_lab.partial import PartialAnswers

INNER = SingleTurn(samples=2, max_tokens=mdp.LONGEST)
SPLIT = mdp.problems(4000)


class Versioned(mdp.TabularEngine):
    """Its weights have a version and are the same in all of them."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def _completions(self, request: Request) -> list[Completion]:
        return [replace(one, policy_version=self.version) for one in super()._completions(request)]


def _keep_nothing(answers: Sequence[Trajectory]) -> None:
    """The rank takes them itself."""


class Run:
    """Iterations one after the other, each with problems that none before it had."""

    def __init__(self, rollout: PartialAnswers, in_flight: int, world_size: int = 1) -> None:
        self.rollout, self.in_flight, self.world_size = rollout, in_flight, world_size
        self.carried: list[Trajectory] = []
        self.trained: list[list[Trajectory]] = []
        self.metrics: list[Metrics] = []
        self.begun: list[list[str]] = []

    def iterate(self, iterations: int) -> None:
        for iteration in range(len(self.trained), len(self.trained) + iterations):
            before = {one.problem.id for one in self.carried}
            drawn = SPLIT[iteration * self.in_flight : (iteration + 1) * self.in_flight]
            parts = mdp.on_ranks(
                self.world_size,
                lambda context, drawn=drawn: self._on_rank(context, drawn),
                **self._given(iteration),
            )
            self.trained.append([one for trained, _, _ in parts for one in trained])
            self.carried = [one for _, carried, _ in parts for one in carried]
            self.metrics.append(parts[0][2])
            known = dict.fromkeys(one.problem.id for one in [*self.trained[-1], *self.carried])
            self.begun.append([id for id in known if id not in before])

    def _given(self, iteration: int) -> dict[str, Any]:
        earlier = list(self.carried)
        return {
            "engine": lambda: Versioned(iteration),
            "iteration": lambda: iteration,
            "services": lambda: [CarryOver(earlier, _keep_nothing)],
        }

    def _on_rank(
        self, context: RolloutContext, drawn: Sequence[Problem]
    ) -> tuple[list[Trajectory], list[Trajectory], Metrics]:
        left: list[Trajectory] = []
        context = context.with_services(CarryOver(context.get(CarryOver).answers, left.extend))
        trajectories, metrics = answered(self.rollout.run(context, drawn))
        return trajectories, left, metrics


def test_an_answer_goes_on_where_it_was_and_each_segment_has_its_version() -> None:
    run = Run(PartialAnswers(rollout=INNER, tokens_per_iteration=2), in_flight=20)
    run.iterate(6)
    lengths = Counter(len(one.segments) for part in run.trained for one in part)
    assert set(lengths) == {1, 2, 3}
    for iteration, part in enumerate(run.trained):
        for one in part:
            versions = [segment.policy_version for segment in one.segments]
            assert versions == list(range(versions[0], versions[0] + len(versions))), "one after the other"
            assert versions[-1] is not None and versions[-1] <= iteration
            assert all(len(segment.token_ids) == 2 for segment in one.segments[:-1])
            ids = plain(one.response_ids)
            assert mdp.answers((), mdp.LONGEST)[ids] > 0, "it is an answer of the language"
            assert (one.text, one.step_ends) == (mdp.decode(ids), mdp.step_ends(ids))
            assert one.reward == mdp.reward(ids)
    assert run.metrics[0]["rollout/versions"] == 1 < run.metrics[2]["rollout/versions"]


@pytest.mark.parametrize("groups", [None, 12])
def test_every_problem_that_is_begun_is_trained_on_once_so_that_lengths_are_the_policys(
    groups: int | None,
) -> None:
    run = Run(PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=groups), in_flight=40)
    run.iterate(60)
    trained = Counter(one.id for part in run.trained for one in part)
    assert set(trained.values()) == {1}, "no answer comes twice"
    old = {id for begun in run.begun[:50] for id in begun}
    assert {f"{id}#{sample}" for id in old for sample in range(2)} <= set(trained), "and none is left out"
    if groups is not None:
        assert all(len(part) == 2 * groups for part in run.trained[3:]), (
            "iterations are as large as they should be"
        )
    lengths = [len(one.response_ids) for part in run.trained for one in part if one.problem.id in old]
    exact = sum(p * len(answer) for answer, p in mdp.answers().items())
    assert sum(lengths) / len(lengths) == pytest.approx(exact, abs=0.15)
    # What ends in the iteration that begins it is shorter: to take such first would be felt.
    early = [len(one.response_ids) for part in run.trained for one in part if len(one.segments) == 1]
    assert sum(early) / len(early) < exact - 0.5


def test_ranks_come_to_what_one_rank_comes_to() -> None:
    rollout = PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=5)
    alone, together = Run(rollout, in_flight=9), Run(rollout, in_flight=9, world_size=2)
    for run in (alone, together):
        run.iterate(5)
    assert together.trained == alone.trained
    assert together.carried == alone.carried
    assert together.metrics == alone.metrics


def test_an_iteration_goes_on_until_there_is_something_to_train_on() -> None:
    run = Run(PartialAnswers(rollout=replace(INNER, samples=8), tokens_per_iteration=1), in_flight=1)
    run.iterate(1)
    assert len(run.trained[0]) == 8
    assert run.metrics[0]["rollout/groups_carried"] == 0
