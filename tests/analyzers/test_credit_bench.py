"""The bench of credit: its truth is the truth, and its numbers say what they claim."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support import chains
from tests.support.chain_critic import ChainCritic
from treetune.rollouts.base import Credit, Critic
from treetune.rollouts.credit import Group
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.valuation import FreshContinuations, ValueEstimator
from treetune.vocabulary import Episode, Trajectory
from treetune_lab.analyzers.credit_bench import credited
from treetune_lab.analyzers.credit_measures import Credited, Truth, measure
from treetune_lab.values.critic import ControlVariate
from treetune_lab.values.over_another import Filtered
from treetune_lab.values.sampled import Siblings


def task(language: chains.Language, steps: int = 5, count: int = 4) -> chains.ChainTask:
    return chains.ChainTask(language=language, steps=steps, count=count, difficulties=2)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_values_are_the_means_of_many_answers_from_there(language: chains.Language) -> None:
    problem = task(language).problems("train")[1]
    chain: chains.Chain = problem.data["chain"]
    grader = chains.ChainGrader()
    begun = [chains.token(chain.first, 0, 2), chains.token(chain.first, 1, 0)]
    for start, value in (([], chain.value(0, chain.first)), (begun, chain.value(1, chain.first))):
        rng, earned = random.Random(0), 0.0
        for _ in range(2000):
            ids = [*start, *chains.continued(chain, start, rng).token_ids[:-1].tolist()]
            assert len(ids) == chain.steps * chains.WORDS_OF_STEP
            earned += grader.grade(" ".join(map(str, ids)), problem).reward / 2000
        assert earned == pytest.approx(value, abs=0.05)


def true_episode(answer: Trajectory) -> Episode:
    of_steps = truth_of(answer).advantages
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=[True] * len(answer.response_ids),  # type: ignore[arg-type]
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,
        advantages=np.repeat(of_steps, np.diff(answer.step_ends, prepend=0)),
        step_ends=answer.step_ends,
        step_values=truth_of(answer).values,
    )


def times(episode: Episode, factor: float) -> Episode:
    assert episode.advantages is not None
    return replace(episode, advantages=factor * episode.advantages)


def truth_of(answer: Trajectory) -> Truth:
    return Truth(answer.problem.id, answer.step_ends, chains.true_values(answer), answer.reward)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_the_gradient_with_true_advantages_is_the_exact_one_on_average(language: chains.Language) -> None:
    of = task(language, steps=3, count=2)
    answers = chains.answers_of_chains(of, samples=1500, seed=3)
    mean: chains.Gradient = {}
    for answer in answers:
        for slot, value in chains.gradient(answer, true_episode(answer)).items():
            mean[slot] = mean.get(slot, 0.0) + value / len(answers)
    exact = chains.exact_gradient(of)
    assert chains.length(exact) > 0
    assert chains.cosine(mean, exact) > 0.97
    assert chains.length(mean) == pytest.approx(chains.length(exact), rel=0.15)


def test_true_advantages_measure_as_perfect_and_their_negatives_as_wrong() -> None:
    answers = chains.answers_of_chains(task("fork"), samples=8, seed=1)
    truths, episodes = [truth_of(one) for one in answers], [true_episode(one) for one in answers]
    perfect = measure(truths, Credited(episodes, 0, 0.0), seed=0)
    assert perfect["correlation"]["value"] == pytest.approx(1.0)
    assert perfect["error"]["value"] == pytest.approx(0.0, abs=1e-12)
    assert perfect["bias"]["value"] == pytest.approx(0.0)
    assert perfect["decisive_signs"]["value"] == perfect["signs"]["value"] == 1.0
    wrong = [times(one, -1.0) for one in episodes]
    found = measure(truths, Credited(wrong, 0, 0.0), seed=0)
    assert found["correlation"]["value"] == pytest.approx(-1.0)
    assert found["decisive_signs"]["value"] == 0.0


def test_a_scale_of_advantages_is_no_error_and_none_at_all_is_a_whole_one() -> None:
    answers = chains.answers_of_chains(task("slips"), samples=8, seed=1)
    truths, episodes = [truth_of(one) for one in answers], [true_episode(one) for one in answers]
    scaled = [times(one, 7.0) for one in episodes]
    assert measure(truths, Credited(scaled, 0, 0.0), 0)["error"]["value"] == pytest.approx(0.0, abs=1e-12)
    nothing = [replace(times(one, 0.0), step_values=None) for one in episodes]
    found = measure(truths, Credited(nothing, 0, 0.0), 0)
    assert found["error"]["value"] == 1.0
    assert found["correlation"]["value"] is None
    assert found["bias"]["value"] is None


def test_more_continuations_are_nearer_to_the_truth_and_dearer_and_groups_are_free() -> None:
    of = task("slips", steps=8, count=24)
    answers = chains.answers_of_chains(of, samples=8, seed=2)
    truths = [truth_of(one) for one in answers]

    def found(credit: Credit) -> dict[str, float]:
        one = measure(truths, credited(chains.context_of(of, 5), credit, answers), 0)
        return {"correlation": one["correlation"]["value"], "tokens": one["tokens_per_answer"]}

    group, few, many = found(Group()), found(MonteCarlo(samples=2)), found(MonteCarlo(samples=16))
    assert group["tokens"] == found(MonteCarlo(values=Siblings()))["tokens"] == 0
    assert group["correlation"] < many["correlation"]
    assert few["correlation"] < many["correlation"]
    assert many["tokens"] == pytest.approx(8 * few["tokens"], rel=0.05)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_the_critic_of_a_language_knows_the_answer_so_far_alone_and_is_wrong(
    language: chains.Language,
) -> None:
    of = task(language, steps=4, count=16)
    critic = ChainCritic.of_earlier(of, samples=8, seed=1)
    answers = chains.answers_of_chains(of, samples=32, seed=2)
    known: dict[tuple[int, ...], float] = {}
    for answer, values in zip(answers, critic(answers), strict=True):
        ids = answer.response_ids.tolist()
        for place, value in enumerate(values.tolist()):
            assert known.setdefault(tuple(ids[:place]), value) == value
            assert 0 <= value <= 1
    assert len(known) < sum(len(answer.response_ids) for answer in answers)
    rewards = [answer.reward for answer in answers]
    assert 0.02 < critic.error(answers) < 0.75 * (0.01 + np.std(rewards))


def test_a_critic_beside_continuations_is_nearer_to_the_truth_at_the_same_cost() -> None:
    of = task("walk", steps=8, count=24)
    answers = chains.answers_of_chains(of, samples=8, seed=2)
    truths = [truth_of(one) for one in answers]
    critic = ChainCritic.of_earlier(of, samples=8, seed=1)

    def found(values: ValueEstimator) -> tuple[float, float]:
        context = chains.context_of(of, 5).with_services(Critic(critic))
        of_method = credited(context, MonteCarlo(samples=3, values=values), answers)
        measured = measure(truths, of_method, 0)
        return measured["error"]["value"], measured["tokens_per_answer"]

    raw, beside, filtered = (found(values) for values in (FreshContinuations(), ControlVariate(), Filtered()))
    assert raw[1] == beside[1] == filtered[1]
    assert beside[0] < raw[0] - 0.02
    assert filtered[0] < raw[0] - 0.05


def test_the_same_seed_gives_the_same_bench() -> None:
    of = task("repair")
    answers = chains.answers_of_chains(of, samples=4, seed=2)
    first, second = (
        credited(chains.context_of(of, 5), MonteCarlo(samples=2), answers).episodes for _ in range(2)
    )
    assert first == second
    assert not math.isnan(first[0].reward)
