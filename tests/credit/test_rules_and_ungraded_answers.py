"""Credit rules that need no sampling, and answers that nobody could grade.

These tests promise:

* Each rule gives the values that were worked out by hand.
* A user's own rule that returns something else than a number for each answer is refused, with the problem.
* An answer that nobody could grade is left out and counted. It never counts as a reward of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.credit.base import Credit, GroupCredit
from treetune.credit.gae import Gae, gae
from treetune.credit.grpo import Group, group_advantages
from treetune.credit.no_credit import NoCredit
from treetune.credit.reinforce import Outcome
from treetune.credit.rloo import Rloo, leave_one_out_advantages
from treetune.credit.vineppo import MonteCarlo, step_advantages
from treetune.rollouts import unavailable
from treetune.rollouts.answers import apply_unfinished_reward
from treetune.rollouts.context import Log, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Episode, Grade, Problem, Segment, Trajectory

RIGHT, WRONG = (*mdp.encode("a;a"), mdp.EOS), (*mdp.encode("b;a;b"), mdp.EOS)


def make_group(answers: Sequence[tuple[int, ...]], problem_number: int = 0) -> list[Trajectory]:
    problem = mdp.problems(problem_number + 1)[problem_number]
    return [mdp.trajectory(answer, problem, sample) for sample, answer in enumerate(answers)]


def test_group_advantages_are_centred_and_scaled_by_the_unbiased_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std=False, eps=1e-6) == [0.5, -0.5, -0.5, 0.5]
    scaled = group_advantages([1.0, 0.0, 0.0, 1.0], std=True, eps=1e-6)
    assert scaled[0] == pytest.approx(0.5 / ((4 * 0.25 / 3) ** 0.5 + 1e-6))
    assert leave_one_out_advantages([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


@pytest.mark.parametrize("rewards", [[1.0], [0.1] * 3, [0.0] * 8])
def test_groups_without_spread_have_exactly_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards, std=True, eps=1e-6) == [0.0] * len(rewards)
    if len(rewards) > 1:
        assert leave_one_out_advantages(rewards) == [0.0] * len(rewards)


def test_rloo_with_one_answer_names_the_problem_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"'train/1'.*one answer.*`samples` to 2"):
        mdp.assign_credit(Rloo(), make_group([RIGHT, WRONG]) + make_group([RIGHT], problem_number=1))


@pytest.mark.parametrize("credit", [Group(std=False), Rloo()])
def test_answers_are_compared_within_their_problem_only(credit: Credit) -> None:
    answers = make_group([RIGHT, RIGHT]) + make_group([RIGHT, WRONG], problem_number=1)
    episodes, metrics = mdp.assign_credit(credit, answers)
    *equal, (better,), (worse,) = (set(plain(episode.advantages)) for episode in episodes)
    assert equal == [{0.0}, {0.0}] and better == -worse > 0
    assert metrics["credit/advantage_zero"] == pytest.approx(8 / (8 + 4 + 6))


@pytest.mark.parametrize("credit", [Outcome(), Group(), Gae(), NoCredit()])
def test_episodes_keep_the_data_of_their_trajectory(credit: Credit) -> None:
    answers = make_group([RIGHT, WRONG])
    for answer, episode in zip(answers, mdp.assign_credit(credit, answers)[0], strict=True):
        length = len(answer.response_ids)
        assert plain(episode.response_ids) == plain(answer.response_ids)
        assert plain(episode.prompt_ids) == plain(answer.prompt_ids)
        assert plain(episode.trained) == (True,) * length
        assert plain(episode.behaviour_logprobs) == (-0.5,) * length
        expected = (answer.reward, "train/0", answer.id, 3, answer.step_ends, answer.text)
        assert expected == (
            episode.reward,
            episode.group,
            episode.trajectory,
            episode.policy_version,
            episode.step_ends,
            episode.text,
        )
        assert (episode.advantages is None) == (credit in (Gae(), NoCredit()))


def test_outcome_gives_every_token_the_reward_with_its_bonus_and_keeps_the_score() -> None:
    (answer,) = make_group([RIGHT])
    for bonus in (0.0, -0.25):
        (episode,), metrics = mdp.assign_credit(Outcome(), [replace(answer, bonus=bonus)])
        assert (episode.score, episode.reward) == (1.0, 1.0 + bonus)
        assert plain(episode.advantages) == (1.0 + bonus,) * 4
        assert metrics["credit/advantage_mean"] == 1.0 + bonus


def test_injected_tokens_are_not_trained_and_the_oldest_policy_version_counts() -> None:
    segments = (
        Segment((0, 2), logprobs=(-1.0, -2.0), policy_version=5),
        Segment((7,), origin="injected"),
        Segment((0, mdp.EOS), logprobs=(-3.0, -4.0), policy_version=4),
    )
    (episode,), _ = mdp.assign_credit(
        Outcome(), [replace(make_group([RIGHT])[0], segments=segments, step_ends=(2, 5))]
    )
    assert plain(episode.trained) == (True, True, False, True, True)
    assert plain(episode.behaviour_logprobs) == (-1.0, -2.0, 0.0, -3.0, -4.0)
    assert episode.policy_version == 4


@pytest.mark.parametrize(
    ("lam", "rewards", "values", "advantages", "returns"),
    [
        # Return minus value, and the error of one step.
        (1.0, [0.0, 0.5, 0.0, 1.0], [0.3, 0.1, 0.6, 0.2], [1.2, 1.4, 0.4, 0.8], [1.5, 1.5, 1.0, 1.0]),
        (0.0, [0.0, 0.0, 1.0], [0.3, 0.1, 0.6], [-0.2, 0.5, 0.4], [0.1, 0.6, 1.0]),
    ],
)
def test_gae_without_a_discount(
    lam: float, rewards: list[float], values: list[float], advantages: list[float], returns: list[float]
) -> None:
    both = gae(rewards, values, gamma=1.0, lam=lam)
    assert list(map(list, both)) == [pytest.approx(advantages), pytest.approx(returns)]


def test_gae_discounts_as_its_definition_says_for_a_row_and_for_a_batch() -> None:
    gamma, lam = 0.9, 0.8
    rewards_BT, values_BT = torch.rand(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    together = gae(rewards_BT.unbind(1), values_BT.unbind(1), gamma, lam)
    advantages_BT, returns_BT = (torch.stack(list(of_tokens), 1) for of_tokens in together)
    for row, (rewards, values) in enumerate(zip(rewards_BT.tolist(), values_BT.tolist(), strict=True)):
        errors = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0])]
        exact = []
        for t in range(5):
            exact.append(sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])))
        advantages, returns = gae(rewards, values, gamma, lam)
        assert advantages == pytest.approx(exact)
        assert returns == pytest.approx([a + v for a, v in zip(exact, values, strict=True)])
        assert advantages_BT[row].tolist() == pytest.approx(advantages)
        assert returns_BT[row].tolist() == pytest.approx(returns)
    with pytest.raises(ValueError, match="one value per reward"):
        gae([0.0, 1.0], [0.5], 1.0, 1.0)


def test_a_users_credit_that_leaves_out_an_answer_is_refused_with_the_problem() -> None:
    class Short(GroupCredit):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards[1:]

    message = r"Short, problem '.*': advantages\(\) returned 1 value; return one number per answer \(2\)"
    with pytest.raises(ValueError, match=message):
        mdp.assign_credit(Short(), make_group([RIGHT, WRONG]))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"advantages\(\) returned None; return one number per answer \(2\)"),
        (0.5, r"advantages\(\) returned 0.5; return one number per answer \(2\)"),
        (["a", "b"], "'a'"),
        ([None, 1.0], "NoneType"),
    ],
)
def test_a_users_credit_that_returns_no_numbers_is_refused_with_the_problem(
    returned: Any, message: str
) -> None:
    class Wrong(GroupCredit):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=rf"Wrong, problem '.*{message}"):
        mdp.assign_credit(Wrong(), make_group([RIGHT, WRONG]))


def test_a_users_credit_may_return_an_array() -> None:
    class Centred(GroupCredit):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return np.array(rewards) - np.mean(rewards)  # type: ignore[return-value]

    episodes, _ = mdp.assign_credit(Centred(), make_group([RIGHT, WRONG]))
    assert [set(plain(episode.advantages)) for episode in episodes] == [{0.5}, {-0.5}]


def test_a_users_critic_credit_may_take_another_lambda_for_its_returns() -> None:
    class Decoupled(Gae):
        def from_values(
            self, rewards: Sequence[float], values: Sequence[float]
        ) -> tuple[Sequence[float], Sequence[float]]:
            advantages, _ = gae(rewards, values, self.gamma, 1 - 1 / (0.5 * len(rewards)))
            return advantages, gae(rewards, values, self.gamma, 1.0)[1]

    credit = Decoupled()
    assert credit.leaves_values_to_trainer and not credit.asks_critic
    advantages, returns = credit.from_values([0.0, 0.0, 0.0, 1.0], [0.5] * 4)
    assert (returns, advantages) == ([1.0] * 4, [0.0625, 0.125, 0.25, 0.5])


LOST = Grade(0.0, "unavailable", message="the judge is down")


def lose_grades(trajectories: list[Trajectory], *numbers: int) -> list[Trajectory]:
    return [
        replace(trajectory, grade=LOST) if i in numbers else trajectory
        for i, trajectory in enumerate(trajectories)
    ]


def all_answers() -> list[Trajectory]:
    """Returns all answers of the language to each of two problems."""
    answers = []
    for problem in mdp.problems(2):
        for answer in mdp.all_trajectories():
            answers.append(replace(answer, problem=problem, prompt_ids=mdp.encode(problem.prompt)))
    return answers


def credit_graded_answers(credit: Credit, trajectories: list[Trajectory]) -> list[Episode]:
    context = mdp.context()
    trees, _ = unavailable.drop_ungraded(context, trees_of(trajectories), credit)
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
def test_a_group_with_ungraded_answers_is_credited_as_one_without_them(credit: Credit) -> None:
    everyone = all_answers()
    lost = (0, 3, len(everyone) - 1)
    without = [answer for number, answer in enumerate(everyone) if number not in lost]
    episodes = credit_graded_answers(credit, lose_grades(everyone, *lost))
    assert episodes == credit_graded_answers(credit, without)
    assert len(episodes) == len(everyone) - len(lost)
    if not isinstance(credit, Gae):
        assert any(episode.advantages.any() for episode in episodes)


def test_a_problem_with_too_few_graded_answers_for_its_credit_is_left_out_and_counted() -> None:
    messages: list[str] = []
    context = mdp.context(say=messages.append)
    everyone = all_answers()
    answers_per_problem = len(everyone) // 2
    trees = trees_of(lose_grades(everyone, *range(answers_per_problem - 1)))
    for credit, kept_answers, expected in (
        (Rloo(), answers_per_problem, {"episodes/groups_ungraded": 1.0}),
        (Outcome(), answers_per_problem + 1, {}),
    ):
        kept_trees, metrics = unavailable.drop_ungraded(context, trees, credit)
        assert (len(answers_of(kept_trees)), metrics) == (kept_answers, expected)
    assert messages == [
        "iteration 4: 1 problems are left out, because fewer than 2 of their answers could be graded"
    ]


def test_metrics_of_scores_are_over_graded_answers_and_the_others_are_counted() -> None:
    everyone = all_answers()
    lost = [number for number, answer in enumerate(everyone) if not answer.grade.correct]
    metrics = trajectory_metrics(mdp.context(), lose_grades(everyone, *lost))
    expected = {"unavailable": len(lost) / len(everyone), "count": len(everyone), "problems": 2, "mixed": 0}
    expected |= dict.fromkeys(("score", "correct", "reward"), 1)
    assert {name: metrics[f"episodes/{name}"] for name in expected} == expected
    ungraded_metrics = trajectory_metrics(mdp.context(), lose_grades(everyone, *range(len(everyone))))
    assert ungraded_metrics["episodes/unavailable"] == 1.0
    assert not {"episodes/score", "episodes/reward", "episodes/once_hit"} & ungraded_metrics.keys()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_line_reports_how_many_answers_of_all_ranks_were_not_graded_and_why(world_size: int) -> None:
    messages: list[str] = []

    def work(context: RolloutContext) -> None:
        own_answers = lose_grades(all_answers(), 0, 1) if context.ranks.rank == 0 else all_answers()
        unavailable.report_ungraded(
            replace(context, log=Log(say=messages.append)), "iteration 4", own_answers
        )

    mdp.on_ranks(world_size, work)
    total = world_size * len(all_answers())
    message = f"iteration 4: 2 of {total} answers could not be graded and are left out: the judge is down (2)"
    assert messages == [message] * world_size


def test_an_iteration_without_a_graded_answer_is_an_error_on_every_rank() -> None:
    def work(context: RolloutContext) -> None:
        everyone = all_answers()
        with pytest.raises(unavailable.NothingGraded, match="the judge is down"):
            unavailable.report_ungraded(context, "iteration 4", lose_grades(everyone, *range(len(everyone))))

    mdp.on_ranks(2, work)


def test_an_answer_that_was_cut_off_has_the_unfinished_reward_without_a_grade() -> None:
    is_known = []
    for finish_reason, unfinished_reward in (("length", 0.0), ("length", None), ("stop", 0.0)):
        is_known.append(apply_unfinished_reward(LOST, finish_reason, unfinished_reward).is_known)
    assert is_known == [True, False, False]


def test_steps_on_both_sides_of_an_unknown_state_are_credited_as_one() -> None:
    assert step_advantages([0.5, None, 0.75, None], 1.0) == [0.25, 0.25, 0.25, 0.25]
    assert step_advantages([0.5, 0.25, None, None], 1.0) == [-0.25, 0.75, 0.75, 0.75]


@dataclass
class PoolWithoutSomeGrades(mdp.InlinePool):
    """Grades no answer with this beginning, to problems whose id has this beginning."""

    beginning: str = ""
    problem: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        future = super().submit(response, problem)
        if response.startswith(self.beginning) and problem.id.startswith(self.problem):
            future._result = LOST
        return future


def test_continuations_that_nobody_could_grade_do_not_count_and_are_reported() -> None:
    messages: list[str] = []
    episodes, metrics = mdp.assign_credit(
        MonteCarlo(samples=8), grader=PoolWithoutSomeGrades("a"), say=messages.append
    )
    assert metrics["credit/value_unavailable"] > 0 < metrics["credit/value_unknown"]
    assert metrics["credit/unvalued"] == 0
    # Some continuations of the prompt begin with b, and only these count. No state after an "a" has a value.
    for episode in episodes:
        if mdp.decode(episode.response_ids.tolist()).startswith("a"):
            assert len(set(episode.step_values)) == len(set(episode.advantages.tolist())) == 1
    (message,) = messages
    assert "continuations could not be graded" in message


def test_answers_to_a_prompt_without_a_value_are_left_out_and_counted() -> None:
    everyone, pool = all_answers(), PoolWithoutSomeGrades(problem="train/0")
    messages: list[str] = []
    episodes, metrics = mdp.assign_credit(MonteCarlo(samples=4), everyone, grader=pool, say=messages.append)
    assert {episode.group for episode in episodes} == {"train/1"}
    assert metrics["credit/unvalued"] == len(everyone) / 2
    (message,) = messages
    left_out = len(everyone) // 2
    assert f"{left_out} answers are left out, since their prompt has no value" in message
    # With siblings_count_into_prompt_value, the rewards of the siblings give the prompt a value.
    credit = MonteCarlo(samples=4, siblings_count_into_prompt_value=True)
    episodes, metrics = mdp.assign_credit(credit, everyone, grader=pool)
    assert (len(episodes), metrics["credit/unvalued"]) == (len(everyone), 0.0)
