"""Rollouts in rounds: `until_mixed`, and partial answers that take several iterations.

These tests promise:

* Further problems are sampled until enough groups have spread, within the bound and the split, and no longer.
* Every problem that is begun is trained on once, and short answers are not preferred.
* Any number of ranks samples the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.trees import answered
from treetune.engine.requests import Completion, Request
from treetune.rollouts.context import CarryOver, FurtherProblems, RolloutContext
from treetune.rollouts.partial import PartialAnswers
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.vocabulary import Metrics, Problem, Trajectory

INNER = SingleTurn(samples=2, max_tokens=mdp.LONGEST)
SPLIT = mdp.problems(60)


class EngineWithOneAnswer(mdp.TabularEngine):
    """Gives the same answer every time, so that no group has spread."""

    def _completions(self, request: Request) -> list[Completion]:
        return [mdp.completion((*mdp.encode("a;a"), mdp.EOS))] * request.n


@dataclass
class Split:
    """A split whose first problems belong to an iteration. More can be requested, up to `end`."""

    first: int
    end: int = len(SPLIT)
    messages: list[str] = field(default_factory=list)

    def context(self, **changed: object) -> RolloutContext:
        further = FurtherProblems(lambda: SPLIT[self.first : self.end])
        return mdp.context(further_problems=further, say=self.messages.append, **changed)

    def run(self, rollout: UntilMixed, **changed: object) -> tuple[list[Trajectory], Metrics]:
        return answered(rollout.run(self.context(**changed), SPLIT[: self.first]))


def group_by_problem(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem.id, []).append(trajectory)
    return groups


def count_mixed_groups(trajectories: Sequence[Trajectory]) -> int:
    return sum(
        len({trajectory.score for trajectory in group}) > 1
        for group in group_by_problem(trajectories).values()
    )


def test_sampling_goes_on_until_enough_groups_are_mixed_and_keeps_all_answers() -> None:
    split = Split(first=6)
    trajectories, metrics = split.run(UntilMixed(rollout=INNER, groups=12, max_rounds=99))
    problem_ids = list(group_by_problem(trajectories))
    assert problem_ids == [problem.id for problem in SPLIT[: len(problem_ids)]], (
        "in the order of the split's problems"
    )
    assert count_mixed_groups(trajectories) >= 12 > count_mixed_groups(trajectories[:-12]), (
        "and not a round longer"
    )
    expected = {
        "rollout/rounds": len(problem_ids) / 6,
        "rollout/groups_dropped": 1 - count_mixed_groups(trajectories) / len(problem_ids),
        "rollout/groups_lacking": 0,
        "episodes/count": len(trajectories),
        "episodes/problems": len(problem_ids),
        "episodes/score": sum(trajectory.score for trajectory in trajectories) / len(trajectories),
        "episodes/mixed": count_mixed_groups(trajectories) / len(problem_ids),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert len(trajectories) == 2 * len(problem_ids) > 24 and not split.messages
    at_once, _ = answered(INNER.run(mdp.context(), SPLIT[: len(problem_ids)]))
    assert trajectories == at_once, "what one call with all problems samples"
    mixed_in_two_rounds = count_mixed_groups(trajectories[:24])
    two_rounds, _ = Split(first=6).run(UntilMixed(rollout=INNER, groups=mixed_in_two_rounds, max_rounds=99))
    assert two_rounds == trajectories[:24], "two rounds for as many as two rounds have"


def test_enough_mixed_groups_at_once_are_one_round_without_a_further_problem() -> None:
    def never() -> Sequence[Problem]:
        raise AssertionError("nothing further is needed")

    rollout = UntilMixed(rollout=INNER, groups=1)
    context = mdp.context(further_problems=FurtherProblems(never))
    trajectories, metrics = answered(rollout.run(context, SPLIT[:8]))
    assert trajectories == answered(INNER.run(mdp.context(), SPLIT[:8]))[0]
    assert metrics["rollout/rounds"] == 1


@pytest.mark.parametrize(
    ("first", "end", "problems", "rounds", "reason"),
    [
        (4, 60, 20, 5, "went on with 0 of 20 after 5 rounds, since max_rounds is 5"),
        (4, 7, 7, 2, "the split has no further problem"),
        (7, 7, 7, 1, "the split has no further problem"),
    ],
)
def test_without_spread_sampling_ends_at_the_bound_or_with_the_split_and_reports_why(
    first: int, end: int, problems: int, rounds: int, reason: str
) -> None:
    split = Split(first, end)
    trajectories, metrics = split.run(
        UntilMixed(rollout=INNER, groups=3, max_rounds=5), engine=EngineWithOneAnswer()
    )
    assert [len(group) for group in group_by_problem(trajectories).values()] == [2] * problems, (
        "each problem once"
    )
    values = [metrics[f"rollout/{name}"] for name in ("rounds", "groups_dropped", "groups_lacking")]
    assert values == [rounds, 1.0, 3]
    (message,) = split.messages
    assert reason in message


def test_later_rounds_may_be_smaller_and_progress_counts_over_all_rounds() -> None:
    progress_calls: list[tuple[int, int]] = []
    rollout = UntilMixed(rollout=INNER, groups=3, max_rounds=3, problems_per_round=2)
    context = Split(first=4).context(
        engine=EngineWithOneAnswer(), progress=lambda *done: progress_calls.append(done)
    )
    trajectories, _ = answered(rollout.run(context, SPLIT[:4]))
    assert len(trajectories) == 2 * (4 + 2 + 2)
    assert [done for done, _ in progress_calls] == list(range(1, 17))
    assert {total for _, total in progress_calls} == {8, 12, 16}


@settings(max_examples=25)
@given(
    first=st.integers(1, 7),
    end=st.integers(7, 40),
    groups=st.integers(1, 15),
    max_rounds=st.integers(1, 6),
    per_round=st.none() | st.integers(1, 7),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 3),
)
def test_any_number_of_ranks_samples_the_same_and_each_end_has_a_reason(
    first: int, end: int, groups: int, max_rounds: int, per_round: int | None, ranks: int, seed: int
) -> None:
    rollout = UntilMixed(rollout=INNER, groups=groups, max_rounds=max_rounds, problems_per_round=per_round)

    def roll_out(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(rollout.run(context, SPLIT[:first]))

    factories = {
        "engine": mdp.TabularEngine,
        "seed": lambda: seed,
        "further_problems": lambda: FurtherProblems(lambda: SPLIT[first:end]),
    }
    answers, metrics = mdp.assert_ranks_agree(ranks, roll_out, **factories)
    assert len({answer.id for answer in answers}) == len(answers), "no problem twice"
    has_enough = count_mixed_groups(answers) >= groups
    reached_bound = metrics["rollout/rounds"] == max_rounds
    exhausted = len(group_by_problem(answers)) == end
    assert has_enough or reached_bound or exhausted
    assert metrics["rollout/groups_lacking"] == max(0, groups - count_mixed_groups(answers))


def test_until_mixed_has_the_settings_of_its_inner_rollout() -> None:
    inner = SingleTurn(samples=3, max_tokens=7, unfinished_reward=-0.5, max_prompt_tokens=9, top_p=0.9)
    rollout = UntilMixed(rollout=inner, groups=2)
    for name in ("samples", "sampling", "unfinished_reward", "max_prompt_tokens", "needs_engine"):
        assert getattr(rollout, name) == getattr(inner, name), name
    assert rollout.sampler == inner
    assert rollout.gives == inner.gives


def test_no_problems_are_refused_as_the_inner_rollout_refuses_them() -> None:
    with pytest.raises(ValueError, match="no problems"):
        UntilMixed(rollout=INNER, groups=2).run(mdp.context(), [])


PROBLEMS_OF_ITERATIONS = mdp.problems(4000)


class EngineWithVersion(mdp.TabularEngine):
    """Has weights whose version grows while they stay the same."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def _completions(self, request: Request) -> list[Completion]:
        return [replace(answer, policy_version=self.version) for answer in super()._completions(request)]


class PartialRun:
    """Runs iterations one after the other, each with problems that none before it had."""

    def __init__(self, rollout: PartialAnswers, in_flight: int, world_size: int = 1) -> None:
        self.rollout, self.in_flight, self.world_size = rollout, in_flight, world_size
        self.carried: list[Trajectory] = []
        self.trained: list[list[Trajectory]] = []
        self.metrics: list[Metrics] = []
        self.begun: list[list[str]] = []

    def iterate(self, iterations: int) -> None:
        for iteration in range(len(self.trained), len(self.trained) + iterations):
            before = {answer.problem.id for answer in self.carried}
            new_problems = PROBLEMS_OF_ITERATIONS[
                iteration * self.in_flight : (iteration + 1) * self.in_flight
            ]
            parts = mdp.on_ranks(
                self.world_size,
                lambda context, new_problems=new_problems: self._on_rank(context, new_problems),
                engine=lambda version=iteration: EngineWithVersion(version),
                iteration=lambda number=iteration: number,
            )
            self.trained.append([answer for trained, _, _ in parts for answer in trained])
            self.carried = [answer for _, carried, _ in parts for answer in carried]
            self.metrics.append(parts[0][2])
            problem_ids = dict.fromkeys(answer.problem.id for answer in [*self.trained[-1], *self.carried])
            self.begun.append([id for id in problem_ids if id not in before])

    def _on_rank(
        self, context: RolloutContext, new_problems: Sequence[Problem]
    ) -> tuple[list[Trajectory], list[Trajectory], Metrics]:
        carried: list[Trajectory] = []
        context = replace(context, carry_over=CarryOver(self.carried, carried.extend))
        trajectories, metrics = answered(self.rollout.run(context, new_problems))
        return trajectories, carried, metrics


def test_a_partial_answer_is_continued_and_each_segment_has_its_policy_version() -> None:
    run = PartialRun(PartialAnswers(rollout=INNER, tokens_per_iteration=2), in_flight=20)
    run.iterate(6)
    lengths = Counter(len(answer.segments) for part in run.trained for answer in part)
    assert set(lengths) == {1, 2, 3}
    for iteration, part in enumerate(run.trained):
        for answer in part:
            versions = [segment.policy_version for segment in answer.segments]
            assert versions == list(range(versions[0], versions[0] + len(versions))), "one after the other"
            assert versions[-1] is not None and versions[-1] <= iteration
            assert all(len(segment.token_ids) == 2 for segment in answer.segments[:-1])
            ids = plain(answer.response_ids)
            assert mdp.answers((), mdp.LONGEST)[ids] > 0, "it is an answer of the language"
            assert (answer.text, answer.step_ends) == (mdp.decode(ids), mdp.step_ends(ids))
            assert answer.reward == mdp.reward(ids)
    assert run.metrics[0]["rollout/versions"] == 1 < run.metrics[2]["rollout/versions"]


@pytest.mark.parametrize("groups", [None, 12])
def test_every_problem_that_is_begun_is_trained_on_once_and_lengths_are_those_of_the_policy(
    groups: int | None,
) -> None:
    run = PartialRun(PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=groups), in_flight=40)
    run.iterate(60)
    trained = Counter(answer.id for part in run.trained for answer in part)
    assert set(trained.values()) == {1}, "no answer comes twice"
    begun_early = {id for begun in run.begun[:50] for id in begun}
    assert {f"{id}#{sample}" for id in begun_early for sample in range(2)} <= set(trained), (
        "and none is left out"
    )
    if groups is not None:
        assert {len(part) for part in run.trained[3:]} == {2 * groups}
    lengths = [
        len(answer.response_ids)
        for part in run.trained
        for answer in part
        if answer.problem.id in begun_early
    ]
    exact = sum(p * len(answer) for answer, p in mdp.answers().items())
    assert sum(lengths) / len(lengths) == pytest.approx(exact, abs=0.15)
    # Answers that end in their first iteration are shorter. If they were preferred, the mean would show it.
    lengths_of_whole = [
        len(answer.response_ids) for part in run.trained for answer in part if len(answer.segments) == 1
    ]
    assert sum(lengths_of_whole) / len(lengths_of_whole) < exact - 0.5


def test_two_ranks_sample_and_carry_over_what_one_rank_does() -> None:
    rollout = PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=5)
    one_rank, two_ranks = PartialRun(rollout, in_flight=9), PartialRun(rollout, in_flight=9, world_size=2)
    for run in (one_rank, two_ranks):
        run.iterate(5)
    assert (two_ranks.trained, two_ranks.carried, two_ranks.metrics) == (
        one_rank.trained,
        one_rank.carried,
        one_rank.metrics,
    )


def test_an_iteration_goes_on_until_at_least_one_group_is_complete() -> None:
    run = PartialRun(PartialAnswers(rollout=replace(INNER, samples=8), tokens_per_iteration=1), in_flight=1)
    run.iterate(1)
    assert len(run.trained[0]) == 8
    assert run.metrics[0]["rollout/groups_carried"] == 0
