"""The credit gets the scores of the open trainer, and never those of a closed one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.rollouts.model_scores import ModelScores
from treetune.runtime import training


class Trainer:
    prefetch = None

    def distributions(self, sequences: Any) -> Any: ...
    def reference_distances(self, sequences: Any) -> Any: ...
    def group_divergences(self, sequences: Any, positions_N: Any) -> Any: ...
    def logprobs_of_reference(self, sequences: Any) -> Any: ...
    def close(self) -> None: ...


def names_of_scores(scores: ModelScores) -> list[str]:
    return [field.name for field in fields(scores) if getattr(scores, field.name) is not None]


def test_a_second_trainer_replaces_the_scores_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "make_trainer", lambda session: Trainer())
    config = SimpleNamespace(credit=WeightedBy(signal="deviation"))
    resources: Any = SimpleNamespace(
        session=SimpleNamespace(config=config),
        server=SimpleNamespace(asleep=nullcontext, trainer=None),
        model_scores=ModelScores(),
    )
    with training.open_trainer(resources):
        scores_of_first = resources.model_scores
    with training.open_trainer(resources):
        scores_of_second = resources.model_scores
    names = names_of_scores(scores_of_second)
    assert names == ["reference", "distributions", "reference_distances", "group_divergences"]
    for name in names:
        assert getattr(scores_of_second, name) is not getattr(scores_of_first, name)
    for credit, expected in ((ForkingTokens(), ["distributions", "group_divergences"]), (Rloo(), [])):
        config.credit = credit
        with training.open_trainer(resources):
            assert names_of_scores(resources.model_scores) == expected
