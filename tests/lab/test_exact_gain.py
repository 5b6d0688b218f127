"""The exact gradient variances of a language, against enumeration and against sampled answers."""

from __future__ import annotations

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.lab import test_arena
from treetune.credit.rloo import Rloo
from treetune.lab.arena import languages
from treetune.lab.arena.exact import exact_variance
from treetune.lab.arena.languages import TrueAdvantages
from treetune.lab.arena.scores import ScoredMethod, gradients_of
from treetune.rollouts.single_turn import SingleTurn

SMALL = test_arena.SMALL


@pytest.mark.parametrize("name", SMALL)
def test_the_exact_variances_are_those_of_all_pairs_of_answers(name: str) -> None:
    language = SMALL[name]
    exact = exact_variance(language, answers=2)
    assert exact.rloo == pytest.approx(test_arena.exact_variance(language, Rloo(), 2)[0], rel=1e-5)
    enumerated = test_arena.exact_variance(language, TrueAdvantages(), 2)[0]
    assert exact.true_advantages == pytest.approx(enumerated, rel=1e-5)


@pytest.mark.parametrize("name", ["middle", "luck"])
def test_the_exact_variances_are_those_of_sampled_groups_of_eight(name: str) -> None:
    language = SMALL[name]
    context = languages.context_of(language, 4000, seed=3)
    trees, _ = SingleTurn(samples=8, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    exact = exact_variance(language, answers=8)
    for credit, variance in ((Rloo(), exact.rloo), (TrueAdvantages(), exact.true_advantages)):
        gradients_ND, _ = gradients_of(language, context, ScoredMethod(credit), trees)
        squares_N = np.square(gradients_ND - gradients_ND.mean(0)).sum(1)
        standard_error = squares_N.std() / np.sqrt(len(squares_N))
        assert abs(squares_N.mean() - variance) < 4 * standard_error
