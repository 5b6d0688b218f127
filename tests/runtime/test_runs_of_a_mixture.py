"""A run on several domains: what it records of each, and that its curriculum survives an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.runtime.in_process import TASK, FakeSettings, directory_of, sampled_requests, small, train
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.inference.base import EngineError
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.record import summary_line
from treetune.store.checksums import read_record
from treetune.tasks.sampling import Drawing
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune_domains.mixture import Curriculum, Domain, Mixture

MIXED = Mixture(
    # What is cut off earns the reward, so the two differ: next to all answers of ten tokens are.
    domains={"long": Domain(task=TASK), "short": Domain(task=TASK, max_tokens=1)},
    weighting=Curriculum(rate=0.5, floor=0.05),
)
WHITENED = Trainer(
    objective=ClippedPolicyGradient(),
    learning_rate=1e-3,
    advantage_normalisation="whiten",
    normalise_by_domain=True,
)
ITERATIONS = 3


def mixed(base: Path, **changes: Any) -> PolicyIteration:
    return small(
        base,
        **{
            "task": MIXED,
            "rollout": SingleTurn(samples=4, max_tokens=6, unfinished_reward=1.0),
            "trainer": WHITENED,
            "iterations": ITERATIONS,
            "problems_per_iteration": 12,
            "evaluation": Evaluation(
                sets=(EvaluationSet(split="test", samples=2, while_training=True),), every=1
            ),
            **changes,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    config = mixed(tmp_path_factory.mktemp("undisturbed"))
    train(config)
    return config


def rows_of(config: PolicyIteration) -> list[dict[str, Any]]:
    return list(directory_of(config).read_metrics())


def asked(config: PolicyIteration, iteration: int) -> list[tuple[str, str]]:
    folder = directory_of(config).iteration(iteration)
    answers = read_trajectories(folder / "trajectories.arrow")
    return list(dict.fromkeys((one.problem.id, one.problem.domain) for one in answers))


def test_each_iteration_asks_what_the_curriculum_makes_of_those_before(undisturbed: PolicyIteration) -> None:
    rows = rows_of(undisturbed)
    problems = MIXED.problems("train")
    for iteration in range(ITERATIONS):
        drawing = Drawing(undisturbed.seed, iteration, recorded=rows.__getitem__)
        assert [id for id, _ in asked(undisturbed, iteration)] == [
            one.id for one in MIXED.draw(problems, 12, drawing)
        ]
        counts = [domain for _, domain in asked(undisturbed, iteration)]
        for name in MIXED.domains:
            assert rows[iteration][f"domains/{name}/problems"] == counts.count(name)
    weights = [row["domains/short/weight"] for row in rows]
    assert weights[0] == 0.5 and weights[1] != weights[0], "nothing moved: the test says nothing"


def test_metrics_evaluations_and_episodes_tell_domains_apart(undisturbed: PolicyIteration) -> None:
    directory = directory_of(undisturbed)
    row = rows_of(undisturbed)[-1]
    summary = json.loads((directory.evaluation(ITERATIONS, "test") / "summary.json").read_text())
    lines = (directory.evaluation(ITERATIONS, "test") / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    for name in MIXED.domains:
        own = [one["reward"] >= 1 for one in answers if one["domain"] == name]
        of_domain = summary["domains"][name]
        assert of_domain["pass_at_1"] == pytest.approx(sum(own) / len(own))
        assert of_domain["ci_low"] <= of_domain["pass_at_1"] <= of_domain["ci_high"]
        for number in ("pass_at_1", "ci_low", "ci_high", "mean_tokens"):
            assert row[f"evaluation/test/domains/{name}/{number}"] == of_domain[number]
    assert summary["domains"]["short"]["mean_tokens"] == 1
    assert summary["n_problems"] == sum(one["n_problems"] for one in summary["domains"].values()) == 20
    episodes = read_episodes(directory.iteration(ITERATIONS - 1) / "episodes.arrow")
    assert {e.domain for e in episodes} == {e.group.partition("/")[0] for e in episodes} == {"long", "short"}
    assert row["domains/long/advantage_std"] >= 0


@pytest.mark.parametrize("requests", [5, 40, 60])
def test_an_interrupted_run_draws_and_learns_as_an_undisturbed_one(
    undisturbed: PolicyIteration, tmp_path: Path, requests: int
) -> None:
    struck = mixed(tmp_path, engine=FakeSettings(fail_after=requests))
    with pytest.raises(EngineError, match="told to fail"):
        train(struck)
    resumed = mixed(tmp_path, engine=FakeSettings())
    train(resumed)
    assert sampled_requests(struck) + sampled_requests(resumed) == sampled_requests(undisturbed)
    for iteration in range(ITERATIONS):
        assert asked(resumed, iteration) == asked(undisturbed, iteration)
    places = [directory_of(one).checkpoint(ITERATIONS) / "policy" for one in (resumed, undisturbed)]
    ours, theirs = (load_file(place / "model.safetensors") for place in places)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_another_domain_changes_nothing_for_the_answers_of_the_first(
    undisturbed: PolicyIteration, tmp_path: Path
) -> None:
    more = Mixture(domains={**MIXED.domains, "third": Domain(task=TASK)}, weighting=MIXED.weighting)
    joined = mixed(tmp_path, task=more, problems_per_iteration=18, iterations=1)
    train(joined)

    def answers(config: PolicyIteration, domain: str) -> dict[str, tuple[int, ...]]:
        found = read_trajectories(directory_of(config).iteration(0) / "trajectories.arrow")
        return {one.id: tuple(one.response_ids) for one in found if one.problem.domain == domain}

    for name in MIXED.domains:
        assert answers(joined, name) == answers(undisturbed, name)


def test_a_curriculum_whose_earlier_numbers_are_gone_is_told(tmp_path: Path) -> None:
    train(mixed(tmp_path, iterations=1))
    (directory_of(mixed(tmp_path)).iteration(0) / "rollout.json").unlink()
    with pytest.raises(ValueError, match=r"rollout\.json is gone, which says how the policy did on problems"):
        train(mixed(tmp_path, iterations=2, engine=FakeSettings()))


def test_a_curriculum_needs_several_answers_to_a_problem(tmp_path: Path) -> None:
    for task in (MIXED, Mixture(domains=MIXED.domains, prefer_mixed=2.0)):
        with pytest.raises(ConfigError, match="it is drawn by how often the policy is right"):
            checked(mixed(tmp_path, task=task, rollout=SingleTurn(samples=1, max_tokens=6)))


def test_mistakes_within_a_mixture_are_told_at_their_place(tmp_path: Path) -> None:
    nested = Mixture(domains={"inner": Domain(task=MIXED), "other": Domain(task=TASK, max_tokens=99)})
    with pytest.raises(ConfigError) as caught:
        checked(mixed(tmp_path, task=nested))
    assert "task.domains.inner.task: a mixture can't be a domain" in str(caught.value)
    assert "task.domains.other.max_tokens: answers may have 99 tokens" in str(caught.value)


def test_the_line_of_an_iteration_says_each_domains_reward_and_each_sets_accuracy_once(
    undisturbed: PolicyIteration,
) -> None:
    row = rows_of(undisturbed)[-1]
    line = summary_line(row, ITERATIONS)
    long, short = (row[f"domains/{name}/reward"] for name in ("long", "short"))
    assert f"reward {row['episodes/reward']:.3f}  (long {long:.3f}, short {short:.3f})" in line
    assert line.count("test ") == 1 and f"test {row['evaluation/test/pass_at_1']:.3f}" in line


def test_a_run_that_prefers_mixed_problems_remembers_them_over_an_interruption(tmp_path: Path) -> None:
    preferring = Mixture(domains=MIXED.domains, prefer_mixed=3.0)
    whole = mixed(tmp_path / "whole", task=preferring)
    train(whole)
    rates = read_record(directory_of(whole).iteration(0) / "pass_rates.json", "")
    assert rates.keys() == {id for id, _ in asked(whole, 0)} and any(0 < rate < 1 for rate in rates.values())
    struck = mixed(tmp_path / "struck", task=preferring, engine=FakeSettings(fail_after=50))
    with pytest.raises(EngineError, match="told to fail"):
        train(struck)
    resumed = mixed(tmp_path / "struck", task=preferring)
    train(resumed)
    assert [asked(resumed, i) for i in range(ITERATIONS)] == [asked(whole, i) for i in range(ITERATIONS)]


def test_preferring_and_going_through_epochs_do_not_go_together(tmp_path: Path) -> None:
    preferring = Mixture(domains=MIXED.domains, prefer_mixed=3.0)
    with pytest.raises(ConfigError, match=r"task\.prefer_mixed: some problems are to be drawn more"):
        checked(mixed(tmp_path, task=preferring, problem_sampling="epochs"))
