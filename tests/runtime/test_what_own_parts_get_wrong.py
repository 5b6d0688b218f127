"""Rollouts and credits of one's own that don't do what they say are told, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.runtime.in_process import TASK, directory_of, small, train
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.inference.base import CONTINUATIONS, Request, SamplingParams
from treetune.rollouts.base import GroupCredit, Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn, for_fixed_problems, sample_answers
from treetune.rollouts.storage import read_trajectories
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Metrics, Problem


@dataclass(frozen=True, kw_only=True)
class Twice(SingleTurn):
    """Asks each problem a second time."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        trees, metrics = super().run(context, problems)
        again = sample_answers(
            context, problems, samples=self.samples, sampling=self.sampling, purpose="second try"
        )
        of = {tree.problem.id: tree for tree in trees}
        for one in answers_of(again):
            of[one.problem.id].take(replace(one, sample=one.sample + self.samples))
        return trees, metrics


class TwiceInEvaluationToo(Twice):
    @property
    def sampler(self) -> Rollout:
        return self


@dataclass(frozen=True, kw_only=True)
class Warmer(SingleTurn):
    """Samples otherwise than it says."""

    warmer: tuple[str, float] = ("temperature", 1.3)

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        other = replace(self, **{self.warmer[0]: self.warmer[1]})
        return SingleTurn.run(other, context, problems)


@dataclass(frozen=True, kw_only=True)
class AsksForHints(SingleTurn):
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None
        cold = SamplingParams(max_tokens=3, temperature=0.0)
        ids = context.codec.encode_prompt(problems[0])
        context.engine.generate([Request(ids, 1, 1, cold, priority=CONTINUATIONS)])
        return super().run(context, problems)


class Divides(GroupCredit):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [math.nan if place == 1 else reward for place, reward in enumerate(rewards)]


MEASURED = Evaluation(sets=(EvaluationSet(split="test", samples=2),))


def test_evaluation_samples_plainly_where_a_rollout_says_nothing_of_it(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=Twice(samples=2, max_tokens=12, top_p=0.9), evaluation=MEASURED)
    directory = train(config)
    assert len(read_trajectories(directory.iteration(0) / "trajectories.arrow")) == 16
    answers = (directory.evaluation(2, "test") / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 2 * TASK.test_size
    plain = SingleTurn(samples=2, max_tokens=12, top_p=0.9)
    assert for_fixed_problems(config.rollout) == for_fixed_problems(plain) == plain


def test_a_count_of_answers_that_no_set_asked_for_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=TwiceInEvaluationToo(samples=2, max_tokens=12), evaluation=MEASURED)
    with pytest.raises(ValueError, match=r"TwiceInEvaluationToo gave 4 answers .* asks for 2 of each"):
        train(config)
    assert not (directory_of(config).evaluation(2, "test") / "summary.json").exists()


def test_an_evaluations_own_rollout_that_would_be_replaced_is_told(tmp_path: Path) -> None:
    config = small(tmp_path, evaluation=replace(MEASURED, rollout=Twice(samples=2, max_tokens=12)))
    with pytest.raises(ConfigError, match=r"evaluation.rollout: Twice says nothing of how it answers"):
        checked(config)


@pytest.mark.parametrize(("key", "value"), [("temperature", 1.3), ("top_p", 0.5), ("top_k", 3)])
def test_answers_sampled_otherwise_than_the_rollout_says_are_refused(
    tmp_path: Path, key: str, value: float
) -> None:
    config = small(tmp_path, rollout=Warmer(samples=2, max_tokens=12, warmer=(key, value)))
    with pytest.raises(ValueError, match=rf"asked for answers with {key} = {value}, .* says (1\.0|-1)"):
        train(config)
    assert directory_of(config).resumable() is None


def test_what_is_not_trained_may_be_sampled_otherwise(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=AsksForHints(samples=2, max_tokens=12, unfinished_reward=1.0))
    assert train(config).resumable() == 2


def test_advantages_that_are_no_numbers_are_the_credits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"credit Divides gave the answer 'train/.*no numbers"):
        train(small(tmp_path, credit=Divides()))
