"""A context has what parts ask for in fields with names.

* A part that needs a field which its phase doesn't have raises an error that names it.
* The attributes of earlier versions' contexts say what to use in their place.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from tests.support import tabular_mdp as mdp
from treetune.credit.base import Credit
from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.implicit_reward import ImplicitReward
from treetune.credit.literature.v0_5 import FusedBaseline
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.credit.values.critic import CriticEstimator
from treetune.credit.vineppo import MonteCarlo
from treetune.models.sources import TinyModel
from treetune.rollouts.answers import require_growing_rollout
from treetune.rollouts.context import FORMER_ATTRIBUTES
from treetune.rollouts.partial import PartialAnswers
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of

ANSWERS = [mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=i) for i, text in enumerate(("a;a", "a;b"))]


@pytest.mark.parametrize(
    ("credit", "name"),
    [
        (FusedBaseline(), "critic"),
        (MonteCarlo(values=CriticEstimator()), "critic"),
        (ImplicitReward(reward_model=TinyModel()), "reference scores"),
        (ForkingTokens(over=Rloo()), "distributions"),
        (WeightedBy(over=Rloo(), signal="deviation"), "reference distances"),
        (WeightedBy(over=Rloo(), signal="group_divergence"), "group divergences"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_credit_names_the_scores_that_it_misses(credit: Credit, name: str) -> None:
    with pytest.raises(LookupError, match=f"^this phase of the run has no {name}$"):
        credit.assign(mdp.context(), trees_of(ANSWERS))


def test_a_rollout_names_the_field_that_it_misses() -> None:
    rollout = PartialAnswers(rollout=SingleTurn(samples=2, max_tokens=mdp.LONGEST), tokens_per_iteration=2)
    with pytest.raises(LookupError, match=r"^this phase of the run has no carry-over$"):
        rollout.run(mdp.context(), mdp.problems(1))


@pytest.mark.parametrize("rollout", [None, SingleTurn(samples=2, max_tokens=mdp.LONGEST)])
def test_only_some_rollouts_continue_answers(rollout: SingleTurn | None) -> None:
    with pytest.raises(LookupError, match="no rollout that continues answers from their middle"):
        require_growing_rollout(mdp.context(rollout=rollout))


@pytest.mark.parametrize("name", FORMER_ATTRIBUTES)
def test_a_former_attribute_says_what_to_use_in_its_place(name: str) -> None:
    context: Any = mdp.context()
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': .* such as context\.further_problems"):
        getattr(context, name)
    assert not hasattr(context, name)


def test_other_names_are_missing_as_in_any_object_and_a_context_can_be_copied() -> None:
    context: Any = mdp.context()
    with pytest.raises(AttributeError, match=r"^'RolloutContext' object has no attribute 'sampler'$"):
        _ = context.sampler
    assert copy.copy(context) == context == replace(context)
