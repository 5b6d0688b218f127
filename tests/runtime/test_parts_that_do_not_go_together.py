"""What can't be meant is told before anything starts, with what would be right."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.in_process import TASK, TRAINER, small
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.rollouts.credit import Gae, NoCredit
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.selection import All, CorrectOnly, MixedGroups, PreferencePairs
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import ChooseCheckpoint, Evaluation, EvaluationSet
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.preference import DpoPositive
from treetune.trainers.objectives.spo import CorrectPaths
from treetune_domains.mixture import Curriculum, Domain, Mixture
from treetune_lab.values.critic import ControlVariate, CriticValues
from treetune_lab.values.over_another import Smoothed
from treetune_threads.parallel_threads import ParallelThreads, ThreadStates

ANSWERS = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0)
VALIDATION = Evaluation(sets=(EvaluationSet(split="validation", problems=3),))
MLE, DPO = (replace(TRAINER, objective=objective) for objective in (MaximumLikelihood(), DpoPositive()))
GUARDED = replace(TRAINER, skip_without_advantage=True)
PATHS = replace(TRAINER, objective=CorrectPaths(normalise_by="batch"))
SHAPING = (OverlongPenalty(cache=6, scale=0.5), LengthPenalty(weight=0.25))
CRITICS = (CriticValues(), ControlVariate(), Smoothed(over=CriticValues()))
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
    checked(small(tmp_path, **changes))


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
            "'held-out', and the evaluation has only validation remedy name one of them",
        ),
        ({"choose_checkpoint": ChooseCheckpoint(set="validation")}, "has no sets remedy name one"),
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
        ({"shaping": (*SHAPING, LengthPenalty())}, "two different ones are called length_penalty"),
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
            r"task\.prefer_mixed: some problems are to be drawn more",
        ),
        ({**MIXED, "task": NESTED}, r"task\.domains\.inner\.task: a mixture can't be a domain"),
        ({**MIXED, "task": NESTED}, r"task\.domains\.other\.max_tokens: answers may have 99 tokens"),
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
        checked(small(tmp_path, **changes))
    assert re.search(message, " ".join(str(refused.value).split()))
