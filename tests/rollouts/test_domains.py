"""What rollout, values and metrics make of problems of several domains."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.rollouts.test_answers_that_end_otherwise import engine
from tests.trees import answered
from treetune.inference.base import SamplingParams
from treetune.rollouts.answers import before_stop
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Group
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.metrics import domain_advantages, domain_columns, trajectory_metrics
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Grade, Metrics, Problem, Trajectory
from treetune_domains.mixture import Domain, Mixture


@dataclass(frozen=True, kw_only=True)
class WholeAnswers(mdp.LetterTask):
    """Answers are one step."""

    grader: mdp.LetterGrader = field(default_factory=mdp.LetterGrader)

    def demonstration(self, problem: Problem, seed: int) -> str:
        return "b"

    def step_boundaries(self, response: str) -> list[int]:
        return [0, len(response)] if response else [0]


STOP = "a;"
TASK = Mixture(
    domains={
        "cut": Domain(task=mdp.LetterTask(), stop=(STOP,)),
        "long": Domain(task=mdp.LetterTask()),
        "short": Domain(task=WholeAnswers(), max_tokens=3),
    }
)
NAMES = ("reward", "correct", "unfinished", "unavailable", "response_tokens", "mixed", "problems")
ROLLOUT = SingleTurn(samples=16, max_tokens=12, stop=("b;",), unfinished_reward=0.0)


def problems(count: int = 6) -> list[Problem]:
    names = list(TASK.domains)
    return [
        replace(problem, id=f"{names[i % 3]}/{problem.id}", domain=names[i % 3])
        for i, problem in enumerate(mdp.problems(count))
    ]


def of(answers: list[Trajectory], domain: str) -> list[Trajectory]:
    return [one for one in answers if one.problem.domain == domain]


def test_stop_budget_and_steps_are_the_domains_own() -> None:
    pool = mdp.InlinePool()
    answers, _ = answered(ROLLOUT.run(mdp.context(engine=engine(), task=TASK, grader=pool), problems()))
    for one in of(answers, "short"):
        assert len(one.response_ids) <= 3
        assert one.step_ends == (len(one.response_ids),)
    assert max(len(one.response_ids) for one in of(answers, "long")) > 3
    for domain, stop in (("cut", STOP), ("long", "b;"), ("short", "b;")):
        other = "b;" if stop == STOP else STOP
        texts = [one.text for one in of(answers, domain)]
        assert all(stop not in text.removesuffix(stop) for text in texts)
        assert any(text.endswith(stop) for text in texts) and any(other in text for text in texts)
        graded = {text for id, text in pool.submitted if id.startswith(domain)}
        assert graded == {before_stop(text, (stop,)) for text in texts}
    assert any(len(one.step_ends) > 1 for one in of(answers, "cut"))


def test_continuations_have_what_is_left_of_their_domains_budget_and_its_stop() -> None:
    sampler = engine()
    context = mdp.context(
        engine=sampler,
        task=TASK,
        sampling=SamplingParams(max_tokens=6, stop=("b;",)),
        grader=mdp.InlinePool(),
    )
    answer = tuple(mdp.encode("a;b")) + (mdp.EOS,)
    asked = {problem.domain: problem for problem in problems(3)}
    trees = trees_of(mdp.trajectory(answer, problem) for problem in asked.values())
    MonteCarlo(samples=3).assign(context, trees)
    limits = {
        (r.sampling.stop, r.sampling.max_tokens + len(mdp.response_part(r.prompt_ids))) for r in sampler.asked
    }
    assert limits == {((STOP,), 6), (("b;",), 6), (("b;",), 3)}


def test_demonstrations_are_the_domains_own() -> None:
    answers, _ = answered(Demonstrations(samples=3).run(mdp.context(task=TASK), problems()))
    assert {one.text for one in of(answers, "short")} == {"b"}
    assert {one.text for one in of(answers, "long")} != {"b"}


@pytest.mark.parametrize("world_size", [1, 3])
def test_metrics_by_domain_are_those_of_its_answers_alone(world_size: int) -> None:
    def run(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(ROLLOUT.run(context, problems()))

    by_rank = mdp.on_ranks(world_size, run, engine=engine, task=lambda: TASK)
    answers = [one for of_rank, _ in by_rank for one in of_rank]
    metrics = by_rank[0][1]
    assert all(of_rank == metrics for _, of_rank in by_rank)
    for domain in TASK.domains:
        alone = trajectory_metrics(mdp.context(task=TASK), of(answers, domain))
        for name in NAMES:
            assert metrics[f"domains/{domain}/{name}"] == pytest.approx(alone[f"episodes/{name}"])
        rates = [
            np.mean([leaf.grade.correct for leaf in tree.leaves]) for tree in trees_of(of(answers, domain))
        ]
        learnable = np.mean([p * (1 - p) * 16 / 15 for p in rates])
        assert metrics[f"domains/{domain}/learnable"] == pytest.approx(learnable)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_is_learnable_is_expected_to_be_p_times_what_is_left(count: int) -> None:
    p, expected = 0.3, 0.0
    answer = replace(mdp.trajectory(mdp.encode("b?")), problem=replace(mdp.problems(1)[0], domain="one"))
    for right in itertools.product([False, True], repeat=count):
        chance = math.prod(p if one else 1 - p for one in right)
        answers = [replace(answer, grade=Grade(float(one), "ok")) for one in right]
        (found,) = domain_columns({"0": answers})["domains/one/learnable"]
        expected += chance * found
    assert expected == pytest.approx(p * (1 - p))


def test_without_domains_there_are_no_metrics_by_domain() -> None:
    _, metrics = answered(ROLLOUT.run(mdp.context(engine=engine()), mdp.problems(2)))
    assert not [name for name in metrics if name.startswith("domains/")]


def test_what_could_not_be_graded_is_counted_and_no_part_of_a_domains_scores() -> None:
    problem = problems(1)[0]
    right = replace(mdp.trajectory((mdp.A, mdp.EOS), problem), grade=Grade(1.0, "ok"))
    lost = replace(right, sample=1, grade=Grade(0.0, "unavailable"))
    metrics = trajectory_metrics(mdp.context(task=TASK), [right, lost])
    assert metrics["domains/cut/correct"] == metrics["domains/cut/reward"] == 1.0
    assert metrics["domains/cut/unavailable"] == 0.5
    assert metrics["domains/cut/error"] == 0.0
    assert "domains/cut/learnable" not in metrics, "of one graded answer nothing is known"


def test_advantages_by_domain_are_those_of_its_trained_tokens() -> None:
    trees, _ = ROLLOUT.run(mdp.context(engine=engine(), task=TASK), problems())
    episodes, _ = Group().assign(mdp.context(task=TASK), trees)
    assert [e.domain for e in episodes] == [one.problem.domain for one in answers_of(trees)]
    metrics = domain_advantages(episodes)
    for domain in TASK.domains:
        values = [
            a
            for e in episodes
            if e.domain == domain and e.advantages is not None
            for a in plain(e.advantages)
        ]
        centre = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((a - centre) ** 2 for a in values) / len(values))
        assert metrics[f"domains/{domain}/advantage_std"] == pytest.approx(spread)
        zeros = sum(a == 0 for a in values) / len(values)
        assert metrics[f"domains/{domain}/advantage_zero"] == pytest.approx(zeros)
    assert domain_advantages([replace(e, domain="") for e in episodes]) == {}
