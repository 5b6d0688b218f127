"""What can't be meant is told before anything starts, with what would be right; parts of one's own that don't
do what they say are told before anything is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import TASK, TRAINER, directory_of, small, train
from treetune.config.build import check_root
from treetune.credit.base import GroupCredit
from treetune.credit.gae import Gae
from treetune.credit.no_credit import NoCredit
from treetune.credit.values.critic import ControlVariate, CriticEstimator
from treetune.credit.values.smoothed import Smoothed
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.graders.judge import JudgeModel
from treetune.domains.mixture import Curriculum, Domain, Mixture
from treetune.engine.requests import CONTINUATION_PRIORITY, Request, SamplingParams
from treetune.engine.settings import Engines, InProcessSettings, VllmSettings
from treetune.exceptions import ConfigError, SameOnAllRanks
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.preference import DpoPositive
from treetune.objectives.spo import CorrectPaths
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection import All, CorrectOnly, MixedGroups, PreferencePairs
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn, adapt_to_fixed_problems, sample_answers
from treetune.rollouts.storage import read_trajectories
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import ChooseCheckpoint, Evaluation, EvaluationSet
from treetune.runtime.fitting import refuse_engines_on_exclusive_gpus
from treetune.threads.parallel_threads import ParallelThreads, ThreadStates
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Metrics, Problem

ANSWERS = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0)
VALIDATION = Evaluation(sets=(EvaluationSet(split="validation", problems=3),))
MLE, DPO = (replace(TRAINER, objective=objective) for objective in (MaximumLikelihood(), DpoPositive()))
GUARDED = replace(TRAINER, skip_without_advantage=True)
PATHS = replace(TRAINER, objective=CorrectPaths(normalise_by="batch"))
SHAPING = (OverlongPenalty(cache=6, scale=0.5), LengthPenalty(weight=0.25))
CRITICS = (CriticEstimator(), ControlVariate(), Smoothed(over=CriticEstimator()))
UNTIL_MIXED: dict[str, Any] = {
    "rollout": UntilMixed(rollout=ANSWERS, groups=5),
    "selection": MixedGroups(at_most=5),
}
DOMAINS = {"long": Domain(task=TASK), "short": Domain(task=TASK, max_tokens=1)}
CURRICULUM = Mixture(domains=DOMAINS, weighting=Curriculum(rate=0.5, floor=0.05))
PREFERRED = Mixture(domains=DOMAINS, prefer_mixed=3.0)
MIXED = {"task": CURRICULUM, "rollout": replace(ANSWERS, samples=4)}
ONE_ANSWER = SingleTurn(samples=1, max_tokens=6)
NESTED = Mixture(domains={"inner": Domain(task=CURRICULUM), "other": Domain(task=TASK, max_tokens=99)})
OFTEN_RIGHT = "it is drawn by how often the policy is right"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"credit": MonteCarlo(values=values)} for values in CRITICS),
        {"shaping": SHAPING},
        {"trainer": GUARDED},
        {"trainer": PATHS, "credit": NoCredit()},
        UNTIL_MIXED,
        MIXED,
        {**MIXED, "task": PREFERRED},
        {"trainer": DPO, "selection": PreferencePairs(), "credit": NoCredit()},
        {"choose_checkpoint": ChooseCheckpoint(set="validation"), "evaluation": VALIDATION},
    ],
)
def test_parts_that_go_together_are_let_through(changes: dict[str, Any], tmp_path: Path) -> None:
    check_root(small(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Pairs
        ({"trainer": DPO, "selection": All(), "credit": NoCredit()}, "choose the selection 'preference_pair"),
        ({"selection": PreferencePairs()}, "choose the objective 'dpo' or 'dpo_positive'"),
        (
            {"trainer": DPO, "selection": PreferencePairs(), "rollout": replace(ANSWERS, samples=1)},
            "set the rollout's samples to 2 or more",
        ),
        # The choice among epochs
        (
            {"choose_checkpoint": ChooseCheckpoint(set="held-out"), "evaluation": VALIDATION},
            "'held-out', and the evaluation has only validation remedy choose one of",
        ),
        ({"choose_checkpoint": ChooseCheckpoint(set="validation")}, "has no sets remedy choose one"),
        # Critics
        ({"restart": "every_iteration", "credit": Gae()}, "set restart to 'never'"),
        *(
            ({"restart": "every_iteration", "credit": MonteCarlo(values=values)}, "set restart to 'never'")
            for values in CRITICS
        ),
        (
            {
                "rollout": ParallelThreads(samples=2, max_tokens=12),
                "credit": MonteCarlo(states=ThreadStates(), values=ControlVariate()),
            },
            "choose values without a critic",
        ),
        # Groups that are waited for
        ({**UNTIL_MIXED, "problems_per_iteration": None}, "null has none left"),
        ({**UNTIL_MIXED, "selection": MixedGroups(at_most=2)}, "make the two equal"),
        ({**UNTIL_MIXED, "trainer": MLE}, "needs an objective that learns from advantages"),
        # Shaping
        (
            {"shaping": SHAPING, "credit": MonteCarlo(samples=1)},
            "needs? a credit for what whole answers earn",
        ),
        (
            {"shaping": SHAPING, "credit": NoCredit(), "trainer": MLE},
            "needs? an objective that learns from advantages",
        ),
        (
            {"shaping": (*SHAPING, LengthPenalty())},
            "several entries of shaping have the same name: length_penalty",
        ),
        ({"shaping": SHAPING, "rollout": replace(ANSWERS, max_tokens=5)}, "cache has 6 tokens"),
        # Losses that look at advantages or at wrong answers
        ({"trainer": GUARDED, "credit": Gae()}, "skip_without_advantage looks at"),
        (
            {"trainer": replace(GUARDED, objective=CorrectPaths(normalise_by="correct"))},
            "skip_without_advantage looks at",
        ),
        ({"trainer": PATHS, "selection": CorrectOnly()}, "choose the selection 'all'"),
        # Mixtures
        ({"task": CURRICULUM, "rollout": ONE_ANSWER}, OFTEN_RIGHT),
        ({"task": Mixture(domains=DOMAINS, prefer_mixed=2.0), "rollout": ONE_ANSWER}, OFTEN_RIGHT),
        (
            {**MIXED, "task": PREFERRED, "problem_sampling": "epochs"},
            r"task\.prefer_mixed: prefer_mixed draws some problems more often",
        ),
        ({**MIXED, "task": NESTED}, r"task\.domains\.inner\.task: a mixture can't be a domain"),
        ({**MIXED, "task": NESTED}, r"task\.domains\.other\.max_tokens: max_tokens of the domain is 99"),
        # The context
        (
            {"rollout": SingleTurn(max_tokens=12, max_prompt_tokens=64)},
            "max_prompt_tokens = 64 leaves nothing of the context_length of 64",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_told(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_root(small(tmp_path, **changes))
    assert re.search(message, " ".join(str(refused.value).split()))


# Parts of one's own


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
            of[one.problem.id].add_answer(replace(one, sample=one.sample + self.samples))
        return trees, metrics


class TwiceInEvaluationToo(Twice):
    @property
    def rollout_for_fixed_problems(self) -> Rollout:
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
        context.engine.generate([Request(ids, 1, 1, cold, priority=CONTINUATION_PRIORITY)])
        return super().run(context, problems)


class Divides(GroupCredit):
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [math.nan if place == 1 else reward for place, reward in enumerate(rewards)]


MEASURED = Evaluation(sets=(EvaluationSet(split="test", samples=2),))


def test_evaluation_samples_plainly_where_a_rollout_says_nothing_of_it(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=Twice(samples=2, max_tokens=12, top_p=0.9), evaluation=MEASURED)
    directory = train(config)
    assert len(read_trajectories(directory.iteration_folder(0) / "trajectories.arrow")) == 16
    answers = (directory.evaluation_folder(2, "test") / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 2 * TASK.test_size
    plain = SingleTurn(samples=2, max_tokens=12, top_p=0.9)
    assert adapt_to_fixed_problems(config.rollout) == adapt_to_fixed_problems(plain) == plain


def test_a_count_of_answers_that_no_set_asked_for_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=TwiceInEvaluationToo(samples=2, max_tokens=12), evaluation=MEASURED)
    with pytest.raises(ValueError, match=r"TwiceInEvaluationToo gave 4 answers .* asks for 2 of each"):
        train(config)
    assert not (directory_of(config).evaluation_folder(2, "test") / "summary.json").exists()


def test_an_evaluations_own_rollout_that_would_be_replaced_is_told(tmp_path: Path) -> None:
    config = small(tmp_path, evaluation=replace(MEASURED, rollout=Twice(samples=2, max_tokens=12)))
    with pytest.raises(ConfigError, match=r"evaluation.rollout: Twice can't answer a fixed list"):
        check_root(config)


@pytest.mark.parametrize(("key", "value"), [("temperature", 1.3), ("top_p", 0.5), ("top_k", 3)])
def test_answers_sampled_otherwise_than_the_rollout_says_are_refused(
    tmp_path: Path, key: str, value: float
) -> None:
    config = small(tmp_path, rollout=Warmer(samples=2, max_tokens=12, warmer=(key, value)))
    with pytest.raises(ValueError, match=rf"requested answers with {key} = {value}, .* has (1\.0|-1)"):
        train(config)
    assert directory_of(config).newest_resumable() is None


def test_what_is_not_trained_may_be_sampled_otherwise(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=AsksForHints(samples=2, max_tokens=12, unfinished_reward=1.0))
    assert train(config).newest_resumable() == 2


def test_advantages_that_are_no_numbers_are_the_credits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"credit Divides gave the answer 'train/.*NaN or infinite"):
        train(small(tmp_path, credit=Divides()))


@pytest.mark.parametrize(
    ("engines", "mode", "refused"),
    [
        (Engines(policy=VllmSettings()), "Exclusive_Process", "the trainer and engines.policy "),
        (Engines(policy=VllmSettings()), "Default", None),
        (Engines(policy=VllmSettings(devices=(1,))), "Exclusive_Process", None),
        (Engines(policy=InProcessSettings()), "Exclusive_Process", None),
        (
            Engines(policy=InProcessSettings(), judge=JudgeModel(model="m", server=VllmSettings())),
            "Exclusive_Process",
            "the trainer and engines.judge.server ",
        ),
    ],
)
def test_two_processes_on_a_gpu_that_takes_one_are_refused_before_the_start(
    engines: Engines, mode: str, refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "nvidia-smi"
    asked.write_text(f'#!/bin/bash\ncase "$*" in *compute_mode*GPU-1f) echo {mode} ;; *) exit 1 ;; esac\n')
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f")
    config = replace(small(tmp_path), engines=engines)
    if refused is None:
        return refuse_engines_on_exclusive_gpus(config)
    with pytest.raises(
        SameOnAllRanks, match=rf"compute mode is {mode}, which allows one process, but {refused}"
    ):
        refuse_engines_on_exclusive_gpus(config)
