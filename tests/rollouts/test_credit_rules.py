"""Golden values of the rules that need no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.base import Credit, GroupCredit
from treetune.rollouts.credit import (
    Gae,
    Group,
    NoCredit,
    Outcome,
    Rloo,
    gae,
    group_advantages,
    leave_one_out_advantages,
)
from treetune.tree import trees_of
from treetune.vocabulary import Grade, Segment, Trajectory

RIGHT, WRONG = mdp.encode("a;a") + (mdp.EOS,), mdp.encode("b;a;b") + (mdp.EOS,)


def group(answers: Sequence[tuple[int, ...]], problem: int = 0) -> list[Trajectory]:
    of = mdp.problems(problem + 1)[problem]
    return [mdp.trajectory(answer, of, sample) for sample, answer in enumerate(answers)]


def test_group_advantages_are_centred_and_scaled_by_the_unbiased_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std=False, eps=1e-6) == [0.5, -0.5, -0.5, 0.5]
    deviation = (4 * 0.25 / 3) ** 0.5
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std=True, eps=1e-6)[0] == pytest.approx(
        0.5 / (deviation + 1e-6)
    )


@pytest.mark.parametrize("rewards", [[1.0], [0.1] * 3, [0.0] * 8])
def test_groups_without_spread_have_exactly_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards, std=True, eps=1e-6) == [0.0] * len(rewards)
    if len(rewards) > 1:
        assert leave_one_out_advantages(rewards) == [0.0] * len(rewards)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    assert leave_one_out_advantages([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


def test_rloo_with_one_answer_names_the_problem_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"'train/1'.*one answer.*`samples` to 2"):
        Rloo().assign(mdp.context(), trees_of(group([RIGHT, WRONG]) + group([RIGHT], problem=1)))


@pytest.mark.parametrize("credit", [Group(std=False), Rloo()])
def test_answers_are_compared_within_their_problem_only(credit: Credit) -> None:
    trajectories = group([RIGHT, RIGHT]) + group([RIGHT, WRONG], problem=1)
    episodes, metrics = credit.assign(mdp.context(), trees_of(trajectories))
    of_answers = [set(plain(episode.advantages)) for episode in episodes]
    assert of_answers[:2] == [{0.0}, {0.0}]
    (better,), (worse,) = of_answers[2:]
    assert better == -worse > 0
    assert metrics["credit/advantage_zero"] == pytest.approx(8 / (8 + 4 + 6))


@pytest.mark.parametrize("credit", [Outcome(), Group(), Gae(), NoCredit()])
def test_episodes_keep_what_the_trajectory_knew(credit: Credit) -> None:
    trajectories = group([RIGHT, WRONG])
    episodes, _ = credit.assign(mdp.context(), trees_of(trajectories))
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        assert plain(episode.response_ids) == plain(trajectory.response_ids)
        assert plain(episode.prompt_ids) == plain(trajectory.prompt_ids)
        assert plain(episode.trained) == (True,) * len(episode.response_ids)
        assert plain(episode.behaviour_logprobs) == (-0.5,) * len(episode.response_ids)
        assert (episode.reward, episode.group) == (trajectory.reward, "train/0")
        assert (episode.trajectory, episode.policy_version) == (trajectory.id, 3)
        assert (episode.step_ends, episode.text) == (trajectory.step_ends, trajectory.text)
        assert (episode.advantages is None) == (credit in (Gae(), NoCredit()))


def test_outcome_gives_every_token_the_reward() -> None:
    (episode,), metrics = Outcome().assign(mdp.context(), trees_of(group([RIGHT])))
    assert plain(episode.advantages) == (1.0,) * 4
    assert metrics["credit/advantage_mean"] == 1.0


def test_credit_is_for_the_reward_and_the_score_stays_beside_it() -> None:
    answer = replace(group([RIGHT])[0], bonus=-0.25)
    (episode,), _ = Outcome().assign(mdp.context(), trees_of([answer]))
    assert (episode.score, episode.reward, set(plain(episode.advantages))) == (1.0, 0.75, {0.75})


def test_injected_tokens_are_not_trained_and_the_oldest_policy_signs() -> None:
    trajectory = Trajectory(
        problem=mdp.problems(1)[0],
        sample=0,
        prompt_ids=(1,),
        segments=(
            Segment((0, 2), logprobs=(-1.0, -2.0), policy_version=5),
            Segment((7,), origin="injected"),
            Segment((0, mdp.EOS), logprobs=(-3.0, -4.0), policy_version=4),
        ),
        finish_reason="stop",
        text="a;5a",
        grade=Grade(1.0, "ok"),
        step_ends=(2, 5),
    )
    (episode,), _ = Outcome().assign(mdp.context(), trees_of([trajectory]))
    assert plain(episode.trained) == (True, True, False, True, True)
    assert plain(episode.behaviour_logprobs) == (-1.0, -2.0, 0.0, -3.0, -4.0)
    assert episode.policy_version == 4


def test_gae_with_gamma_and_lambda_one_is_return_minus_value() -> None:
    rewards, values = [0.0, 0.5, 0.0, 1.0], [0.3, 0.1, 0.6, 0.2]
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0)
    assert advantages == pytest.approx([1.2, 1.4, 0.4, 0.8])
    assert returns == pytest.approx([1.5, 1.5, 1.0, 1.0])


def test_gae_with_lambda_zero_is_the_one_step_error_and_telescopes() -> None:
    rewards, values = [0.0, 0.0, 1.0], [0.3, 0.1, 0.6]
    advantages, _ = gae(rewards, values, gamma=1.0, lam=0.0)
    assert advantages == pytest.approx([-0.2, 0.5, 0.4])
    assert sum(advantages) == pytest.approx(1.0 - values[0])


def test_gae_discounts_as_its_definition_says() -> None:
    gamma, lam = 0.9, 0.8
    rewards, values = [0.1, 0.0, 0.2, 1.0], [0.3, 0.1, 0.6, 0.2]
    errors = [
        reward + gamma * after - before
        for reward, before, after in zip(rewards, values, [*values[1:], 0.0], strict=True)
    ]
    exact = [sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(4)]
    assert gae(rewards, values, gamma, lam)[0] == pytest.approx(exact)


def test_gae_of_a_batch_is_gae_of_each_row() -> None:
    torch = pytest.importorskip("torch")
    rewards_BT, values_BT = torch.rand(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    advantages, returns = gae(rewards_BT.unbind(1), values_BT.unbind(1), 0.9, 0.7)
    advantages_BT, returns_BT = torch.stack(advantages, 1), torch.stack(returns, 1)
    for row in range(3):
        one, its_returns = gae(rewards_BT[row].tolist(), values_BT[row].tolist(), 0.9, 0.7)
        assert advantages_BT[row].tolist() == pytest.approx(one)
        assert returns_BT[row].tolist() == pytest.approx(its_returns)


def test_gae_refuses_rewards_and_values_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="one value per reward"):
        gae([0.0, 1.0], [0.5], 1.0, 1.0)


def test_an_own_credit_that_leaves_out_an_answer_is_told_with_the_problem() -> None:
    class Short(GroupCredit):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards[1:]

    with pytest.raises(ValueError, match=r"problem '.*': 1 advantages for 2 answers"):
        Short().assign(mdp.context(), trees_of(group([RIGHT, WRONG])))


def test_a_critics_credit_of_ones_own_may_take_another_lambda_for_its_returns() -> None:
    class Decoupled(Gae):
        def from_values(
            self, rewards: Sequence[float], values: Sequence[float]
        ) -> tuple[Sequence[float], Sequence[float]]:
            advantages, _ = gae(rewards, values, self.gamma, 1 - 1 / (0.5 * len(rewards)))
            return advantages, gae(rewards, values, self.gamma, 1.0)[1]

    credit = Decoupled()
    assert credit.leaves_values_to_trainer and not credit.asks_critic
    advantages, returns = credit.from_values([0.0, 0.0, 0.0, 1.0], [0.5] * 4)
    assert returns == [1.0] * 4
    assert advantages == [0.0625, 0.125, 0.25, 0.5]
