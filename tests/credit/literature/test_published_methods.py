"""Credits of the literature, one published method each.

These tests promise:

* Each credit gives the advantages that a plain reference of its public code or its formula gives.
* The expected gradient of an unbiased credit is the exact one. The bias of every other credit is as stated.
* Each credit of the literature stands in the table of expected gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pstdev, stdev, variance
from typing import Literal

import numpy as np
import pytest
import torch

from tests.credit.expectations import REWARD_MODEL, critic_of, expectation, knows_length_alone
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.credit.base import Credit
from treetune.credit.gae import Gae
from treetune.credit.literature.com_mcs import CompoundValues
from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.gdpo import Gdpo
from treetune.credit.literature.gigpo import GroupInGroup
from treetune.credit.literature.grpo_lambda import GrpoLambda, sum_traces
from treetune.credit.literature.hicra import HierarchyAware
from treetune.credit.literature.implicit_reward import ImplicitReward
from treetune.credit.literature.james_stein import JamesStein
from treetune.credit.literature.lambda_grpo import LambdaGrpo
from treetune.credit.literature.max_rl import MaxRl
from treetune.credit.literature.opo import OptimalBaseline
from treetune.credit.literature.optimal_token_baseline import OptimalTokenBaseline
from treetune.credit.literature.pass_at_k import PassAtK
from treetune.credit.literature.prime import Prime
from treetune.credit.literature.probability_mask import ProbabilityMask
from treetune.credit.literature.remax import ReMax
from treetune.credit.literature.resets import Resets
from treetune.credit.literature.rredcot import GoldLikelihood
from treetune.credit.literature.rtmc import RolloutTree
from treetune.credit.literature.self_distillation import SelfDistillation
from treetune.credit.literature.tempo import Tempo
from treetune.credit.literature.trace import Trace
from treetune.credit.literature.v0_5 import FusedBaseline, fused_baseline
from treetune.credit.literature.vapo import DecoupledGae
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import LowProbability
from treetune.credit.values.base import ValueEstimator
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.base import Completion, Request
from treetune.models.sources import TinyModel
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import Distributions, ModelScores
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Episode, Grade, Metrics, Segment, Trajectory


def squares_and_entropies(answer: Trajectory | Episode) -> tuple[np.ndarray, np.ndarray]:
    """Returns Σ p² and −Σ p log p of the policy's distribution of each token."""
    ids = plain(answer.response_ids)
    squares = []
    entropies = []
    for t in range(len(ids)):
        chances = mdp.policy(ids[:t]).values()
        squares.append(sum(p * p for p in chances))
        entropies.append(-sum(p * math.log(p) for p in chances))
    return np.array(squares), np.array(entropies)


DISTRIBUTIONS = ModelScores(
    distributions=Distributions(lambda answers: [squares_and_entropies(answer) for answer in answers])
)
CRITIC = ModelScores(critic=critic_of(knows_length_alone))


def make_group(texts: str, problem_number: int = 0) -> list[Trajectory]:
    """Returns answers to one problem, one for each text, with the end token and the policy's log-probs."""
    problem = mdp.problems(problem_number + 1)[problem_number]
    answers = []
    for sample, text in enumerate(texts.split()):
        ids = (*mdp.encode(text), mdp.EOS)
        answers.append(mdp.trajectory(ids, problem, sample, logprobs=mdp.policy_logprobs(ids)))
    return answers


def assign_credit(
    credit: Credit, answers: Sequence[Trajectory], scores: ModelScores | None = None
) -> list[Episode]:
    context = mdp.context(model_scores=scores or ModelScores())
    return credit.assign(context, trees_of(answers))[0]


UNSURE = [1.0, 0.5, 0.2, 0.7, 0.95, 0.8]
"""Probabilities of the six tokens of an answer, four of them below 0.9."""
HICRA = HierarchyAware(over=Rloo(), phrases=(";A",))
RTMC = MonteCarlo(samples=1, values=RolloutTree())

GROUP = make_group("a;a;b a;b;b a;a b")
OTHERS = make_group("a;a b b;a;a a;b;a", 1) + make_group("b;b;b a;a;a", 2)
"""Answers to two other problems, from which a baseline over problems also learns."""
GROUPS = [GROUP, OTHERS[:4], OTHERS[4:]]


def share_of_rank(context: RolloutContext) -> list[Trajectory]:
    """Returns the answers to the problems that this rank works on."""
    ranks = context.ranks
    answers: list[Trajectory] = []
    for number, group in enumerate(GROUPS):
        if number * ranks.world_size // len(GROUPS) == ranks.rank:
            answers += group
    return answers


@pytest.mark.parametrize("exact", [False, True])
def test_the_optimal_token_baseline_weighs_answers_by_the_energy_of_their_paths(exact: bool) -> None:
    """verl's: B_t is over the answers that have a token t, and 0 where only the longest answer has one."""
    credit = OptimalTokenBaseline(squared_norms="exact" if exact else "of_sampled")
    answers = make_group("a;a;b a;b b a;a")
    energies = []
    for answer in answers:
        ids = plain(answer.response_ids)
        path_energies = []
        energy = 0.0
        for t, token in enumerate(ids):
            chances = mdp.policy(ids[:t])
            squares = sum(p * p for p in chances.values()) if exact else chances[token]
            energy += 1 - 2 * chances[token] + squares
            path_energies.append(energy)
        energies.append(path_energies)
    lengths = [len(path_energies) for path_energies in energies]
    for number, episode in enumerate(assign_credit(credit, answers, DISTRIBUTIONS)):
        for t, advantage in enumerate(episode.advantages):
            active = [i for i in range(4) if lengths[i] > t]
            total = sum(energies[i][t] for i in active)
            baseline = sum(answers[i].reward * energies[i][t] for i in active) / total
            expected = answers[number].reward - (baseline if len(active) > 1 else 0.0)
            assert advantage == pytest.approx(expected, abs=1e-6)


def test_the_james_stein_baseline_shrinks_towards_the_other_problems() -> None:
    rewards = [[answer.reward for answer in group] for group in GROUPS]
    all_answers = list(itertools.chain.from_iterable(GROUPS))
    episodes = iter(assign_credit(JamesStein(), all_answers))
    for number, own_rewards in enumerate(rewards):
        others = rewards[:number] + rewards[number + 1 :]
        target = fmean(fmean(group_rewards) for group_rewards in others)
        noise = fmean(variance(group_rewards) / len(group_rewards) for group_rewards in others)
        spread = fmean((fmean(group_rewards) - target) ** 2 for group_rewards in others)
        shrinkage = noise / (noise + spread + 1e-6)
        assert 0 < shrinkage < 1
        for index, reward in enumerate(own_rewards):
            leave_one_out = fmean(own_rewards[:index] + own_rewards[index + 1 :])
            expected = reward - (1 - shrinkage) * leave_one_out - shrinkage * target
            tokens = len(plain(GROUPS[number][index].response_ids))
            assert next(episodes).advantages == pytest.approx([expected] * tokens, abs=1e-12)


def test_the_james_stein_baseline_of_one_problem_alone_is_rloos() -> None:
    rewards = [answer.reward for answer in GROUP]
    for index, episode in enumerate(assign_credit(JamesStein(), GROUP)):
        expected = rewards[index] - fmean(rewards[:index] + rewards[index + 1 :])
        assert episode.advantages == pytest.approx([expected] * len(episode.advantages))


def test_the_james_stein_baseline_is_the_same_on_two_ranks() -> None:
    def assign_on_rank(context: RolloutContext) -> tuple[list[Episode], Metrics]:
        return JamesStein().assign(context, trees_of(share_of_rank(context)))

    mdp.assert_ranks_agree(2, assign_on_rank)


def rewards_of_answers_with_prefix(answers: Sequence[Trajectory], ids: tuple[int, ...]) -> list[float]:
    return [answer.reward for answer in answers if plain(answer.response_ids)[: len(ids)] == ids]


def test_lambda_grpo_divides_by_the_size_of_the_process_set() -> None:
    """The author's code: GRPO's advantage, divided by how many answers share a token and all before it."""
    rewards = [answer.reward for answer in GROUP]
    assert len(rewards_of_answers_with_prefix(GROUP, mdp.encode("a"))) == 3
    for answer, episode in zip(GROUP, assign_credit(LambdaGrpo(), GROUP), strict=True):
        ids = plain(answer.response_ids)
        group_advantage = (answer.reward - fmean(rewards)) / (stdev(rewards) + 1e-4)
        sets = [len(rewards_of_answers_with_prefix(GROUP, ids[: t + 1])) for t in range(len(ids))]
        assert episode.advantages == pytest.approx([group_advantage / size for size in sets])


@pytest.mark.parametrize("std", [True, False])
def test_tempo_adds_the_difference_of_prefix_values_to_grpos(std: bool) -> None:
    """The authors' code: (r − mean + mean of the branch − mean of its ancestor) / (std + eps)."""
    rewards = [answer.reward for answer in GROUP]
    scale = stdev(rewards) + 1e-6 if std else 1.0
    for answer, episode in zip(GROUP, assign_credit(Tempo(std=std), GROUP), strict=True):
        ids = plain(answer.response_ids)
        values = [fmean(rewards_of_answers_with_prefix(GROUP, ids[:t])) for t in range(len(ids) + 1)]
        expected = [
            (answer.reward - fmean(rewards) + behind - before) / scale for before, behind in pairwise(values)
        ]
        assert episode.advantages == pytest.approx(expected)
    equal_rewards = make_group("a;a a;b;a a;a")
    assert all(set(episode.advantages) == {0.0} for episode in assign_credit(Tempo(), equal_rewards))


def test_rtmc_draws_the_value_before_a_step_towards_the_mean_of_the_group() -> None:
    """A public port: mean return of (s, a) less (n V + 2 · the group's mean) / (n + 2)."""
    centre = fmean(answer.reward for answer in GROUP)
    for answer, episode in zip(GROUP, assign_credit(RTMC, GROUP), strict=True):
        ids, start, expected = plain(answer.response_ids), 0, []
        for end in answer.step_ends:
            rewards_before = rewards_of_answers_with_prefix(GROUP, ids[:start])
            rewards_after = rewards_of_answers_with_prefix(GROUP, ids[:end])
            smoothed = (math.fsum(rewards_before) + 2 * centre) / (len(rewards_before) + 2)
            expected += [fmean(rewards_after) - smoothed] * (end - start)
            start = end
        assert episode.advantages == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "guess", "spread", "baseline"),
    [
        ([1, 0, 0, 0], 0.4, 1.0, 0.4),  # within the noise of four: the guess is believed
        # off by 0.75, beyond a noise of 1/16 by 1/2: w = 8/9
        ([1, 1, 1, 1], 0.25, 1.0, 8 / 9 + 0.25 / 9),
        # The paper's ±1, with a noise of 1/4: the same, twice as wide.
        ([1, 1, 1, 1], -0.5, 2.0, 8 / 9 - 0.5 / 9),
    ],
)
def test_v0_5_gives_up_the_guess_where_the_answers_contradict_it(
    rewards: list[float], guess: float, spread: float, baseline: float
) -> None:
    assert fused_baseline(rewards, guess, spread) == pytest.approx(baseline)


def test_v0_5_takes_the_critics_value_of_the_prompt() -> None:
    rewards, prompt_value = [answer.reward for answer in GROUP], knows_length_alone(())
    assert fmean(rewards) != prompt_value
    for reward, episode in zip(rewards, assign_credit(FusedBaseline(), GROUP, CRITIC), strict=True):
        baseline = fused_baseline(rewards, prompt_value, 1.0)
        assert episode.advantages == pytest.approx([reward - baseline] * len(episode.advantages))


@pytest.mark.parametrize(
    ("credit", "tokens", "lam"),
    [
        (DecoupledGae(), 40, 0.5),  # 1 − 1 / (0.05 · 40)
        (DecoupledGae(), 200, 0.9),
        (DecoupledGae(), 6, 0.0),
        (DecoupledGae(alpha=None), 40, 0.95),
    ],
)
def test_the_policy_of_vapo_has_its_own_lambda_and_the_critic_learns_the_rewards(
    credit: DecoupledGae, tokens: int, lam: float
) -> None:
    values = [math.sin(t) for t in range(tokens)]
    rewards = [0.0] * (tokens - 1) + [1.0]
    errors = [r + after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    advantages, returns = credit.from_values(rewards, values)
    for t in range(tokens):
        assert advantages[t] == pytest.approx(sum(lam**k * e for k, e in enumerate(errors[t:])))
    assert returns == pytest.approx([1.0] * tokens)


def test_spo_cuts_before_every_nth_token_that_was_unlikely() -> None:
    """SPO-chain's code: the 1st, the (n + 1)-th, … of the tokens below 0.9."""
    answer = replace(GROUP[0], segments=(Segment(GROUP[0].response_ids, logprobs=np.log(UNSURE)),))
    assert LowProbability(begin_with=True, every=1).step_starts(answer) == [0, 1, 2, 3, 5]
    assert LowProbability(begin_with=True, every=2).step_starts(answer) == [0, 1, 3]
    assert LowProbability(begin_with=True, every=2, below=0.3).step_starts(answer) == [0, 2]
    assert LowProbability(begin_with=True, below=0.01).step_starts(answer) == [0]


def test_the_probability_mask_trains_what_was_unlikely() -> None:
    unsure = replace(GROUP[0], segments=(Segment(GROUP[0].response_ids, logprobs=np.log(UNSURE)),))
    sure = replace(GROUP[1], segments=(Segment(GROUP[1].response_ids, logprobs=np.zeros(6)),))
    masked, not_masked = assign_credit(ProbabilityMask(over=Rloo()), [unsure, sure])
    assert masked.trained.tolist() == [p < 0.9 for p in UNSURE] and set(masked.advantages) == {1.0}
    assert not_masked.trained.all() and set(not_masked.advantages) == {0.0}


def test_forking_tokens_keep_a_share_of_all_tokens_by_their_entropy() -> None:
    entropies = np.concatenate([squares_and_entropies(answer)[1] for answer in GROUP])
    for share in (0.1, 0.5, 1.0):
        threshold = sorted(entropies, reverse=True)[int(share * len(entropies)) - 1]
        unmasked_episodes = assign_credit(Rloo(), GROUP)
        masked_episodes = assign_credit(ForkingTokens(over=Rloo(), share=share), GROUP, DISTRIBUTIONS)
        for answer, before, after in zip(GROUP, unmasked_episodes, masked_episodes, strict=True):
            is_kept = squares_and_entropies(answer)[1] >= threshold
            assert after.advantages.tolist() == (before.advantages * is_kept).tolist()
            assert after.trained.tolist() == before.trained.tolist()


def test_hicra_raises_the_advantages_of_phrases() -> None:
    """The authors' branch: A · (1 + α · sign A) where a token plans."""
    for answer, before, after in zip(
        GROUP, assign_credit(Rloo(), GROUP), assign_credit(HICRA, GROUP), strict=True
    ):
        text = mdp.decode(answer.response_ids)
        for t, (a, raised) in enumerate(zip(before.advantages, after.advantages, strict=True)):
            plans = any(text[start : start + 2] == ";a" for start in (t - 1, t) if start >= 0)
            assert raised == pytest.approx(a * (1 + 0.2 * math.copysign(1, a)) if plans else a)


def test_gigpo_compares_a_turn_with_all_turns_after_the_same_observations() -> None:
    """Eq. 8 with γ = 1/2. Two answers observe ``+`` and then ``-``; a third observes ``+`` twice."""

    def make_answer(sample: int, observations: Sequence[str], earned: Sequence[float]) -> Trajectory:
        segments, ends = [Segment((0,), logprobs=(-0.5,))], [1]
        for observation in observations:
            segments += [Segment((ord(observation),), "injected"), Segment((0,), logprobs=(-0.5,))]
            ends.append(ends[-1] + 2)
        return replace(
            GROUP[0],
            sample=sample,
            segments=tuple(segments),
            grade=Grade(sum(earned), "ok"),
            step_ends=tuple(ends),
            step_rewards=tuple(earned) if any(earned[:-1]) else (),
        )

    answers = [
        make_answer(0, "+-", [0, 0, 1]),
        make_answer(1, "+-", [0.5, 0, 0.25]),
        make_answer(2, "++", [0, 0, 0]),
    ]
    returns = [[0.25, 0.5, 1.0], [0.5 + 0.0625, 0.125, 0.25], [0.0, 0.0, 0.0]]
    anchors = [["", "+", "-"], ["", "+", "-"], ["", "+", "+"]]
    rewards = [1.0, 0.75, 0.0]
    for number, episode in enumerate(assign_credit(GroupInGroup(gamma=0.5, weight=2.0), answers)):
        expected = []
        for turn in range(3):
            anchor = anchors[number][turn]
            returns_at_anchor = [
                returns[i][t] for i, t in itertools.product(range(3), repeat=2) if anchors[i][t] == anchor
            ]
            step_advantage = returns[number][turn] - fmean(returns_at_anchor)
            expected.append(rewards[number] - fmean(rewards) + 2 * step_advantage)
        assert episode.advantages[episode.trained] == pytest.approx(expected)


def test_com_mcs_mixes_a_value_with_the_next_one_and_leaves_baselines_alone() -> None:
    plain_credit = MonteCarlo(samples=2)
    mixed_credit = replace(plain_credit, values=CompoundValues(next_weight=0.25))
    for answer, plain_episode, mixed_episode in zip(
        GROUP, assign_credit(plain_credit, GROUP), assign_credit(mixed_credit, GROUP), strict=True
    ):
        values = [*plain_episode.step_values, answer.reward]
        start = 0
        for step, end in enumerate(plain_episode.step_ends):
            is_last = step == len(plain_episode.step_ends) - 1
            next_value = values[step + 1] if is_last else 0.75 * values[step + 1] + 0.25 * values[step + 2]
            expected = [next_value - values[step]] * (end - start)
            assert mixed_episode.advantages[start:end] == pytest.approx(expected)
            start = end


def test_max_rl_divides_by_the_mean_reward() -> None:
    """TRL's: (r − mean) / mean; nothing where no answer is right."""
    rewards = [answer.reward for answer in GROUP]
    for reward, episode in zip(rewards, assign_credit(MaxRl(), GROUP), strict=True):
        expected = (reward - fmean(rewards)) / fmean(rewards)
        assert episode.advantages == pytest.approx([expected] * len(episode.advantages))
    wrong = make_group("b;b;b b;a;b b")
    assert all(set(episode.advantages) == {0.0} for episode in assign_credit(MaxRl(), wrong))


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"an answer earned -1.0: let the grader give rewards of 0 or more"):
        MaxRl().advantages([1.0, -1.0])


def test_the_expected_gradient_of_max_rl_is_that_of_the_first_terms_of_log_p() -> None:
    """∇ −Σ_{k<n} (1−p)^k / k = (1 − (1−p)^(n−1)) / p · ∇p."""
    p = mdp.value(())
    for answers in (2, 3):
        weight = (1 - (1 - p) ** (answers - 1)) / p
        gradient = expectation(MaxRl(), answers).gradient
        for key, slope in mdp.exact_gradient().items():
            assert gradient.get(key, 0.0) == pytest.approx(weight * slope, abs=1e-9)


def test_opo_weighs_rewards_by_lengths() -> None:
    """verl's: b = Σ l r / Σ l."""
    answers = make_group("a;a;b a;b b a;a")
    lengths = [len(answer.response_ids) for answer in answers]
    assert len(set(lengths)) > 1
    baseline = sum(n * answer.reward for n, answer in zip(lengths, answers, strict=True)) / sum(lengths)
    for answer, episode in zip(answers, assign_credit(OptimalBaseline(), answers), strict=True):
        assert episode.advantages == pytest.approx([answer.reward - baseline] * len(episode.advantages))


def best_of_sets(rewards: Sequence[float], k: int, with_answer: int | None = None) -> list[float]:
    """Returns the best reward of every set of k answers, or of every set with this answer in it."""
    sets = itertools.combinations(range(len(rewards)), k)
    return [
        max(rewards[i] for i in members) for members in sets if with_answer is None or with_answer in members
    ]


@pytest.mark.parametrize("rewards", [[1, 0, 0, 1, 0], [0.3, 0.3, -0.2, 1.0, 0.0]])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_compares_the_best_of_sets(rewards: list[float], k: int) -> None:
    """Goes through all sets: Chen et al. over all, Walder & Karkhanis over those without the answer."""
    best_of_all = best_of_sets(rewards, k)
    chen = PassAtK(k=k).advantages(rewards)
    walder = PassAtK(k=k, baseline="without_answer", std=False).advantages(rewards)
    for index in range(len(rewards)):
        mean_with = fmean(best_of_sets(rewards, k, index))
        expected = (mean_with - fmean(best_of_all)) / (pstdev(best_of_all) + 1e-6)
        assert chen[index] == pytest.approx(expected)
        other_rewards = [*rewards[:index], *rewards[index + 1 :]]
        assert walder[index] == pytest.approx(mean_with - fmean(best_of_sets(other_rewards, k - 1)))


def test_pass_at_k_is_the_published_formula_for_right_and_wrong_answers() -> None:
    """Eq. 14 and 15 of Chen et al. with N = 8, three of them right, and k = 4."""
    rewards = [1.0] * 3 + [0.0] * 5
    mean = 1 - math.comb(5, 4) / math.comb(8, 4)
    scale = math.sqrt(mean * (1 - mean))
    wrong = 1 - mean - math.comb(4, 3) / math.comb(7, 3)
    expected = [(1 - mean) / scale] * 3 + [wrong / scale] * 5
    assert PassAtK(k=4).advantages(rewards) == pytest.approx(expected, rel=1e-5)


def test_with_all_answers_in_the_set_only_the_best_answer_has_an_advantage() -> None:
    """verl's grpo_passk: its lead over the second best."""
    credit = PassAtK(k=4, baseline="without_answer", std=False)
    assert credit.advantages([0.25, 1.0, 0.5, 0.0]) == pytest.approx([0.0, 0.5, 0.0, 0.0])
    assert credit.advantages([1.0, 0.5]) == [0.0, 0.0], "two of four answers could be graded"


@pytest.mark.parametrize("k", [2, 3])
def test_the_expected_gradient_without_the_answer_is_a_kth_of_that_of_pass_at_k(k: int) -> None:
    """pass@k = 1 − (1−p)^k."""
    gradient = expectation(PassAtK(k=k, baseline="without_answer", std=False), 3).gradient
    weight = (1 - mdp.value(())) ** (k - 1)
    for key, slope in mdp.exact_gradient().items():
        assert gradient.get(key, 0.0) == pytest.approx(weight * slope, abs=1e-9)


class GreedyEngine(mdp.TabularEngine):
    """Answers each prompt with ``a;a``, or with a wrong answer to the second problem."""

    def _completion(self, request: Request, rng: object, sample: int) -> Completion:
        assert request.sampling.temperature == 0
        is_second = plain(request.prompt_ids)[0] == mdp.encode("1")[0]
        return mdp.completion((*mdp.encode("b" if is_second else "a;a"), mdp.EOS))


def test_remax_compares_with_a_greedy_answer_to_each_problem() -> None:
    engine = GreedyEngine()
    answers = [*GROUP, *OTHERS[:4]]
    episodes, metrics = ReMax().assign(mdp.context(engine=engine), trees_of(answers))
    assert len(engine.requests) == 2 and all(request.n == 1 for request in engine.requests)
    for answer, episode in zip(answers, episodes, strict=True):
        baseline = 1.0 if answer in GROUP else 0.0
        assert set(episode.advantages) == {answer.reward - baseline}
    assert metrics["credit/greedy_reward"] == 0.5
    assert metrics["credit/value_tokens"] == 4 + 2


def test_remax_is_the_same_on_two_ranks() -> None:
    def assign_on_rank(context: RolloutContext) -> tuple[list[Episode], Metrics]:
        return ReMax().assign(context, trees_of(share_of_rank(context)))

    mdp.assert_ranks_agree(2, assign_on_rank, engine=GreedyEngine)


def with_formats(answers: Sequence[Trajectory], formats: Sequence[float | None]) -> list[Trajectory]:
    """Returns the answers with a number for their format; None means that the grader did not end."""
    graded = []
    for answer, value in zip(answers, formats, strict=True):
        numbers = {} if value is None else {"rewards/format": value}
        outcome = "ok" if value is not None else "timeout"
        graded.append(replace(answer, grade=replace(answer.grade, outcome=outcome, numbers=numbers)))
    return graded


def test_gdpo_normalises_each_reward_by_itself() -> None:
    formats = [0.25, None, 1.0, 0.5]
    answers = with_formats(GROUP, formats)
    columns = [
        ([answer.reward for answer in GROUP], 2.0),
        ([number or 0.0 for number in formats], 0.5),
    ]
    for index, episode in enumerate(assign_credit(Gdpo(parts={"score": 2, "rewards/format": 0.5}), answers)):
        expected = 0.0
        for rewards, weight in columns:
            expected += weight * (rewards[index] - fmean(rewards)) / (stdev(rewards) + 1e-6)
        assert episode.advantages == pytest.approx([expected] * len(episode.advantages))


def test_gdpo_names_the_numbers_that_a_grader_gives() -> None:
    answers = with_formats(GROUP, [1.0] * len(GROUP))
    with pytest.raises(ValueError, match=r"no number 'rewards/style'; it has 'score', 'rewards/format'"):
        assign_credit(Gdpo(parts={"rewards/style": 1.0}), answers)
    with pytest.raises(ValueError, match="parts gives no reward a weight"):
        Gdpo(parts={"score": 0.0})


@pytest.mark.parametrize("trace", ["recent", "both"])
@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_grpo_lambda_adds_up_the_traces_of_each_token(
    trace: Literal["recent", "both"], floor: float, lam: float
) -> None:
    """A public port: the matrix of max((γλ)^(s−t), (γλ)^t) below its diagonal, with a floor."""
    gamma = 0.9
    credit = GrpoLambda(lam=lam, gamma=gamma, trace=trace, floor=floor)
    rewards = [answer.reward for answer in GROUP]
    for answer, episode in zip(GROUP, assign_credit(credit, GROUP), strict=True):
        group_advantage = max(-0.1, (answer.reward - fmean(rewards)) / (stdev(rewards) + 1e-6))
        tokens, decay = len(answer.response_ids), gamma * lam
        for t in range(tokens):
            traces = []
            for s in range(t, tokens):
                weight = max(decay ** (s - t), decay**t) if trace == "both" else decay ** (s - t)
                traces.append(max(weight, floor))
            assert episode.advantages[t] == pytest.approx(group_advantage * sum(traces))


def test_the_gradient_of_grpo_lambda_is_that_of_its_ratios_at_the_old_policy() -> None:
    """The paper's loss: −A Σ_s exp Σ_{t≤s} (γλ)^(s−t) (log p_t − log p_old,t), at log p = log p_old."""
    tokens, decay = 5, 0.7
    logprobs = torch.zeros(tokens, dtype=torch.float64, requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for s in range(tokens):
        exponent = sum(decay ** (s - t) * logprobs[t] for t in range(s + 1))
        loss = loss - 1.5 * torch.exp(exponent)
    loss.backward()
    assert (-logprobs.grad).tolist() == pytest.approx((1.5 * sum_traces(tokens, decay)).tolist())


@dataclass(frozen=True, kw_only=True)
class WithCritic(Credit):
    """Replaces the trainer for a credit that leaves its advantages to it: it takes the context's critic."""

    over: Gae

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = self.over.assign(context, trees)
        critic = context.model_scores.critic
        assert critic is not None
        for episode, values in zip(episodes, critic.values(answers_of(trees)), strict=True):
            rewards = [0.0] * (len(values) - 1) + [episode.reward]
            advantages, _ = self.over.from_values(rewards, values.tolist())
            object.__setattr__(episode, "advantages", np.array(advantages))
        return episodes, metrics


@dataclass(frozen=True)
class Case:
    """A credit, how many answers a group has, and the bias and cosine of the expected gradient."""

    credit: Credit
    answers: int
    bias: float = 0.0
    cosine: float = 1.0
    scores: ModelScores | None = None
    others: Sequence[Trajectory] = ()


CASES = [
    Case(OptimalTokenBaseline(), 3, 0.3326, 0.9999),
    Case(OptimalTokenBaseline(squared_norms="exact"), 3, 0.3326, 0.9998, DISTRIBUTIONS),
    Case(JamesStein(), 2),
    Case(JamesStein(), 2, others=OTHERS),
    Case(FusedBaseline(), 3, 0.1093, 1.0, CRITIC),
    Case(LambdaGrpo(std=False), 3, 0.4519, 0.9968),
    Case(Tempo(std=False), 3, 0.2284, 0.9919),
    Case(RTMC, 3, 0.3485, 0.9978),
    Case(
        MonteCarlo(samples=1, states=LowProbability(begin_with=True, below=0.6, every=1)), 1, 0.1846, 0.9917
    ),
    Case(ProbabilityMask(over=Rloo(), below=0.6), 2, 0.2638, 0.9646),
    Case(ForkingTokens(over=Rloo()), 2, 0.2571, 0.9664, DISTRIBUTIONS),
    Case(WeightedBy(over=Rloo(), signal="surprise", weights="softmax"), 2, 0.2475, 0.9831),
    Case(HICRA, 2, 0.1240, 0.9968),
    Case(GroupInGroup(), 3, 0.3333),
    Case(MonteCarlo(samples=1, values=CompoundValues()), 1),
    Case(MaxRl(), 3, 0.7812),
    Case(OptimalBaseline(), 3, 0.4023, 0.9962),
    Case(PassAtK(k=2), 3, 0.4476),
    Case(PassAtK(k=2, std=False), 3, 0.7396),
    Case(PassAtK(k=2, baseline="without_answer", std=False), 3, 0.2187),
    Case(ReMax(), 1),
    Case(Gdpo(parts={"score": 1.0}), 3, 0.1547),
    Case(GrpoLambda(lam=0.5, std=False, lowest=None), 3, 0.2517, 0.9864),
    Case(MonteCarlo(values=GoldLikelihood()), 1, 0.3774, 0.9282),
    Case(Trace(std=False), 3, 0.1534, 0.9885),
    Case(SelfDistillation(template="{context}{prompt}", clip=1.0), 1, 2.7602, 0.8697),
    Case(SelfDistillation(template="{context}{prompt}"), 1, 127.6149, 0.5712),
    Case(ImplicitReward(reward_model=TinyModel(), beta=0.3), 2, 0.7878, 0.9785, REWARD_MODEL),
    Case(
        ImplicitReward(reward_model=TinyModel(), beta=0.3, outcome_weight=0.0),
        2,
        0.4663,
        0.8906,
        REWARD_MODEL,
    ),
    Case(WithCritic(over=DecoupledGae()), 1, 0.8713, 0.4989, CRITIC),
    Case(WithCritic(over=DecoupledGae(alpha=None)), 1, 0.1402, 0.9958, CRITIC),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.credit))
def test_the_expected_gradient_is_as_far_off_as_stated(case: Case) -> None:
    measured = expectation(case.credit, case.answers, case.scores, case.others, logprobs=True)
    assert measured.bias_and_cosine == pytest.approx((case.bias, case.cosine), abs=5e-5)
    assert case.bias or measured.bias_and_cosine[0] < 1e-9


def test_the_unbiased_credits_have_less_variance_than_the_credits_that_they_improve() -> None:
    """The other problems are as easy as this one, so that shrinking towards them helps."""
    shrunk, leave_one_out = expectation(JamesStein(), 2, None, OTHERS), expectation(Rloo(), 2)
    assert leave_one_out.variance / shrunk.variance == pytest.approx(1.408, abs=1e-3)
    compound = expectation(MonteCarlo(samples=1, values=CompoundValues()), 1)
    vine = expectation(MonteCarlo(samples=1), 1)
    assert vine.variance / compound.variance == pytest.approx(1.060, abs=1e-3)


def test_every_credit_of_the_literature_is_compared_with_the_exact_gradient() -> None:
    # test_resets.py enumerates trees of resets, and test_prime.py tests what a reward model
    # learns.
    compared: set[type] = {Resets, Prime}
    for case in CASES:
        parts = [case.credit, *(getattr(case.credit, name, None) for name in ("over", "values"))]
        compared |= {type(part) for part in parts}
    registered = {*Credit.parts_by_name().values(), *ValueEstimator.parts_by_name().values()}
    assert {part for part in registered if "literature" in part.__module__} <= compared
