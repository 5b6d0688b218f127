"""Answers that nobody could grade are as if they had not been sampled, and are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts import unavailable
from treetune.rollouts.answers import with_unfinished
from treetune.rollouts.base import Credit
from treetune.rollouts.context import Log, RolloutContext
from treetune.rollouts.credit import Gae, Group, Outcome, Rloo
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.monte_carlo import MonteCarlo, step_advantages
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Episode, Grade, Trajectory

LOST = Grade(0.0, "unavailable", message="the judge is down")


def lose(trajectories: list[Trajectory], *places: int) -> list[Trajectory]:
    return [replace(t, grade=LOST) if i in places else t for i, t in enumerate(trajectories)]


def answers(problems: int = 2) -> list[Trajectory]:
    """All answers of the little language to each problem."""
    return [
        replace(one, problem=problem, prompt_ids=mdp.encode(problem.prompt))
        for problem in mdp.problems(problems)
        for one in mdp.all_trajectories()
    ]


def credited(credit: Credit, trajectories: list[Trajectory]) -> list[Episode]:
    context = mdp.context()
    trees, _ = unavailable.graded(context, trees_of(trajectories), credit)
    return credit.assign(context, trees)[0]


@pytest.mark.parametrize(
    "credit",
    [
        Group(),
        Rloo(),
        Outcome(),
        Gae(),
        MonteCarlo(samples=3),
        MonteCarlo(samples=3, siblings_count_into_prompt_value=True),
    ],
    ids=lambda credit: type(credit).__name__,
)
def test_a_group_with_lost_answers_is_credited_as_one_without_them(credit: Credit) -> None:
    everyones = answers()
    lost = (0, 3, len(everyones) - 1)
    without = [one for place, one in enumerate(everyones) if place not in lost]
    episodes = credited(credit, lose(everyones, *lost))
    assert episodes == credited(credit, without)
    assert len(episodes) == len(everyones) - len(lost)
    if not isinstance(credit, Gae):
        assert any(episode.advantages.any() for episode in episodes if episode.advantages is not None)


def test_a_problem_with_too_few_graded_answers_for_its_credit_is_left_out_whole_and_counted() -> None:
    said: list[str] = []
    context = mdp.context(say=said.append)
    everyones = answers()
    of_one = len(everyones) // 2
    for least, credit in ((2, Rloo()), (1, Outcome())):
        trees = trees_of(lose(everyones, *range(of_one - 1)))
        kept, metrics = unavailable.graded(context, trees, credit)
        assert len(answers_of(kept)) == (of_one if least == 2 else of_one + 1)
        assert metrics == ({"episodes/groups_ungraded": 1.0} if least == 2 else {})
    assert said == [
        "iteration 4: 1 problems are left out, since fewer than 2 of their answers could be graded"
    ]


def test_what_is_said_of_scores_is_said_of_graded_answers_and_the_others_are_counted() -> None:
    everyones = answers()
    lost = [place for place, one in enumerate(everyones) if not one.grade.correct]
    metrics = trajectory_metrics(mdp.context(), lose(everyones, *lost))
    assert metrics["episodes/score"] == metrics["episodes/correct"] == metrics["episodes/reward"] == 1.0
    assert metrics["episodes/unavailable"] == len(lost) / len(everyones)
    assert metrics["episodes/count"] == len(everyones)
    assert (metrics["episodes/problems"], metrics["episodes/mixed"]) == (2.0, 0.0)
    nothing = trajectory_metrics(mdp.context(), lose(everyones, *range(len(everyones))))
    assert nothing["episodes/unavailable"] == 1.0
    assert not {"episodes/score", "episodes/reward", "episodes/once_hit"} & nothing.keys()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_line_says_how_many_answers_were_lost_on_all_ranks_and_why(world_size: int) -> None:
    said: list[str] = []

    def work(context: RolloutContext) -> None:
        own = lose(answers(), 0, 1) if context.ranks.rank == 0 else answers()
        unavailable.report(replace(context, log=Log(say=said.append)), "iteration 4", own)

    mdp.on_ranks(world_size, work)
    total = world_size * len(answers())
    words = f"iteration 4: 2 of {total} answers could not be graded and are left out: the judge is down (2)"
    assert said == [words] * world_size


def test_where_no_answer_could_be_graded_that_is_an_error_on_every_rank() -> None:
    def work(context: RolloutContext) -> None:
        everyones = answers()
        with pytest.raises(unavailable.NothingGraded, match="the judge is down"):
            unavailable.report(context, "iteration 4", lose(everyones, *range(len(everyones))))

    mdp.on_ranks(2, work)


def test_an_answer_that_was_cut_off_is_worth_what_it_is_worth_whoever_could_have_graded_it() -> None:
    assert with_unfinished(LOST, "length", 0.0).is_known
    assert not with_unfinished(LOST, "length", None).is_known
    assert not with_unfinished(LOST, "stop", 0.0).is_known


def test_steps_on_both_sides_of_an_unknown_state_are_credited_as_one() -> None:
    assert step_advantages([0.5, None, 0.75, None], 1.0) == [0.25, 0.25, 0.25, 0.25]
    assert step_advantages([0.5, 0.25, None, None], 1.0) == [-0.25, 0.75, 0.75, 0.75]


class Down(mdp.InlinePool):
    """Grades nothing that begins with some letter."""

    def submit(self, response, problem, **how):  # type: ignore[no-untyped-def]
        future = super().submit(response, problem)
        if response.startswith("a"):
            future._result = LOST
        return future


def test_continuations_that_nobody_could_grade_do_not_count_and_are_told() -> None:
    said: list[str] = []
    context = mdp.context(grader=Down(), say=said.append)
    episodes, metrics = MonteCarlo(samples=8).assign(context, trees_of(mdp.all_trajectories()))
    assert metrics["credit/value_unavailable"] > 0
    assert metrics["credit/value_unknown"] > 0
    assert metrics["credit/unvalued"] == 0
    # From the prompt some continuations begin with b, and are all that counts.
    for episode in episodes:
        assert episode.step_values is not None
        assert episode.advantages is not None
        if mdp.decode(episode.response_ids.tolist()).startswith("a"):
            assert len(set(episode.step_values)) == len(set(episode.advantages.tolist())) == 1
    assert len(said) == 1
    assert "continuations could not be graded" in said[0]


def test_answers_to_a_prompt_without_a_value_are_left_out_and_counted() -> None:
    class AllDown(Down):
        def submit(self, response, problem, **how):  # type: ignore[no-untyped-def]
            future = super().submit(response, problem)
            if problem.id == "train/0":
                future._result = LOST
            return future

    everyones = answers()
    of_one = len(everyones) // 2
    context = mdp.context(grader=AllDown())
    episodes, metrics = MonteCarlo(samples=4).assign(context, trees_of(everyones))
    assert {episode.group for episode in episodes} == {"train/1"}
    assert metrics["credit/unvalued"] == of_one
    # Siblings know what the prompt is worth, where they count.
    credit = MonteCarlo(samples=4, siblings_count_into_prompt_value=True)
    episodes, metrics = credit.assign(context, trees_of(everyones))
    assert (len(episodes), metrics["credit/unvalued"]) == (len(everyones), 0.0)
