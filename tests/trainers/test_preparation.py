"""The stages before the first step: which are chosen, and that each finds what it needs."""

from __future__ import annotations

import itertools

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.episode_generators.credit.gae import Gae
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.base import Objective
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.ppo import ClippedPolicyGradient
from treetune.trainers.objectives.preference import DirectPreference
from treetune.trainers.preparation.stages import CriticValues, OldLogprobs, RefLogprobs, preparation

PENALISED = [
    ClippedPolicyGradient(kl_coef=0.1, kl_placement=placement)
    for placement in ("loss", "reward", "advantage")
]
OBJECTIVES = [part() for part in Objective.registered().values()] + PENALISED


def trainer(objective: Objective, **settings: object) -> Trainer:
    return Trainer(objective=objective, learning_rate=1e-3, **settings)


@pytest.mark.parametrize(
    "objective", OBJECTIVES, ids=lambda one: f"{type(one).__name__}-{one.reward_kl_coef}"
)
def test_every_stage_comes_behind_those_that_fill_in_what_it_needs(objective):
    for gae, several, how, measure in itertools.product(
        (None, Gae()), (False, True), ("none", "whiten"), (False, True)
    ):
        settings = trainer(objective, advantage_normalisation=how, measure_kl=measure)
        known: set[str] = set()
        for stage in preparation(settings, gae, several_steps=several):
            assert known.issuperset(stage.needs), stage
            known.update(stage.fills)
        assert ("advantages_N" in known) == objective.needs_advantages
        assert not objective.needs_reference or "ref_logprobs_N" in known
        assert not (objective.needs_advantages and several) or "old_logprobs_N" in known


@pytest.mark.parametrize(
    ("objective", "settings", "several", "scored"),
    [
        (MaximumLikelihood(), {}, True, []),
        (DirectPreference(), {"measure_kl": False}, True, [RefLogprobs]),
        (DirectPreference(), {}, True, [RefLogprobs, OldLogprobs]),
        (ClippedPolicyGradient(), {"measure_kl": False}, False, []),
        (ClippedPolicyGradient(), {"measure_kl": False}, True, [OldLogprobs]),
        (ClippedPolicyGradient(), {}, False, [RefLogprobs]),
        (PENALISED[1], {"measure_kl": False}, False, [RefLogprobs, OldLogprobs]),
    ],
)
def test_no_model_is_run_for_what_nobody_needs(objective, settings, several, scored):
    stages = preparation(trainer(objective, **settings), None, several_steps=several)
    runs_models = [type(one) for one in stages if isinstance(one, RefLogprobs | OldLogprobs | CriticValues)]
    assert runs_models == scored
