"""A run on several domains: what it draws and what it records of each. (`test_interrupted_runs`
interrupts them.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import (
    TASK,
    TRAINER,
    answers_of,
    computed,
    directory_of,
    episodes_of,
    evaluated,
    small,
    train,
    trained,
)
from treetune.domains.mixture import Curriculum, Domain, Mixture
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.record import format_summary_line
from treetune.tasks.drawing import DrawingContext

MIXED = Mixture(
    # What is cut off earns the reward, so the two differ: next to all answers of ten tokens are.
    domains={"long": Domain(task=TASK), "short": Domain(task=TASK, max_tokens=1)},
    weighting=Curriculum(rate=0.5, floor=0.05),
)
ITERATIONS = 3


def mixed(base: Path, **changes: Any) -> PolicyIteration:
    sets = (EvaluationSet(split="test", samples=2, while_training=True),)
    given = {
        "task": MIXED,
        "rollout": SingleTurn(samples=4, max_tokens=6, unfinished_reward=1.0),
        "trainer": replace(TRAINER, advantage_normalisation="whiten", normalise_by_domain=True),
        "iterations": ITERATIONS,
        "problems_per_iteration": 12,
        "evaluation": Evaluation(sets=sets, every=1),
    }
    return small(base, **{**given, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    return trained(mixed(tmp_path_factory.mktemp("mixed")))


def asked(config: PolicyIteration, iteration: int) -> list[tuple[str, str]]:
    answers = answers_of(config, iteration)
    return list(dict.fromkeys((one.problem.id, one.problem.domain) for one in answers))


def test_each_iteration_asks_what_the_curriculum_makes_of_those_before(run: PolicyIteration) -> None:
    rows = directory_of(run).read_metrics()
    for iteration in range(ITERATIONS):
        drawing = DrawingContext(run.seed, iteration, recorded=rows.__getitem__)
        expected = [one.id for one in MIXED.drawing_rule().draw(MIXED.problems("train"), 12, drawing)]
        assert [id for id, _ in asked(run, iteration)] == expected
        drawn = [domain for _, domain in asked(run, iteration)]
        for name in MIXED.domains:
            assert rows[iteration][f"domains/{name}/problems"] == drawn.count(name)
    weights = [row["domains/short/weight"] for row in rows]
    assert weights[0] == 0.5 and weights[1] != weights[0], "nothing moved: the test says nothing"


def test_metrics_evaluations_episodes_and_lines_tell_domains_apart(run: PolicyIteration) -> None:
    row = directory_of(run).read_metrics()[-1]
    summary, answers = evaluated(run, ITERATIONS, "test")
    for name in MIXED.domains:
        own = [one["reward"] >= 1 for one in answers if one["domain"] == name]
        of_domain = summary["domains"][name]
        assert of_domain["pass_at_1"] == pytest.approx(sum(own) / len(own))
        assert of_domain["ci_low"] <= of_domain["pass_at_1"] <= of_domain["ci_high"]
        for number in ("pass_at_1", "ci_low", "ci_high", "mean_tokens"):
            assert row[f"evaluation/test/domains/{name}/{number}"] == of_domain[number]
    assert summary["domains"]["short"]["mean_tokens"] == 1
    assert summary["n_problems"] == sum(one["n_problems"] for one in summary["domains"].values()) == 20
    episodes = episodes_of(run, ITERATIONS - 1)
    assert {e.domain for e in episodes} == {e.group.partition("/")[0] for e in episodes} == {"long", "short"}
    assert row["domains/long/advantage_std"] >= 0

    line = format_summary_line(row, ITERATIONS)
    long, short = (row[f"domains/{name}/reward"] for name in ("long", "short"))
    assert f"reward {row['episodes/reward']:.3f}  (long {long:.3f}, short {short:.3f})" in line
    assert line.count("test ") == 1 and f"test {row['evaluation/test/pass_at_1']:.3f}" in line


def test_another_domain_changes_nothing_for_the_answers_of_the_first(
    run: PolicyIteration, tmp_path: Path
) -> None:
    more = Mixture(domains={**MIXED.domains, "third": Domain(task=TASK)}, weighting=MIXED.weighting)
    joined = trained(mixed(tmp_path, task=more, problems_per_iteration=18, iterations=1))

    def answers(config: PolicyIteration, domain: str) -> dict[str, tuple[int, ...]]:
        found = (one for one in answers_of(config, 0) if one.problem.domain == domain)
        return {one.id: tuple(one.response_ids) for one in found}

    for name in MIXED.domains:
        assert answers(joined, name) == answers(run, name)


def test_a_curriculum_whose_earlier_numbers_are_gone_is_told(tmp_path: Path) -> None:
    directory = train(mixed(tmp_path, iterations=1))
    (directory.iteration_folder(0) / "rollout.json").unlink()
    with pytest.raises(ValueError, match=r"rollout\.json is gone, which has the policy's results on"):
        train(mixed(tmp_path, iterations=2))


def test_a_run_that_prefers_mixed_problems_remembers_how_often_each_was_right(tmp_path: Path) -> None:
    preferring = Mixture(domains=MIXED.domains, prefer_mixed=3.0)
    config = trained(mixed(tmp_path, task=preferring, iterations=1))
    (rates,) = computed(config)["remembered"]
    assert rates.keys() == {id for id, _ in asked(config, 0)} and any(0 < rate < 1 for rate in rates.values())
