"""The credit gets the services of the open trainer, and never those of a closed one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.token_level import Distributions, GroupDivergences, ReferenceDistances
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.runtime import training


class Trainer:
    prefetch = None

    def distributions(self, sequences: Any) -> Any: ...
    def reference_distances(self, sequences: Any) -> Any: ...
    def group_divergences(self, sequences: Any, positions_N: Any) -> Any: ...
    def logprobs_of_reference(self, sequences: Any) -> Any: ...
    def close(self) -> None: ...


def test_a_second_trainer_replaces_the_services_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "make_trainer", lambda session: Trainer())
    config = SimpleNamespace(credit=WeightedBy(signal="deviation"))
    resources: Any = SimpleNamespace(
        session=SimpleNamespace(config=config),
        server=SimpleNamespace(asleep=nullcontext, trainer=None),
        credit_services=[],
    )
    with training.open_trainer(resources):
        of_first = list(resources.credit_services)
    with training.open_trainer(resources):
        of_second = list(resources.credit_services)
    expected = [Distributions, GroupDivergences, ReferenceDistances]
    assert [type(service) for service in of_second] == expected
    for service in of_second:
        assert all(service is not earlier for earlier in of_first)
    for credit, services in ((ForkingTokens(), [Distributions, GroupDivergences]), (Rloo(), [])):
        config.credit = credit
        with training.open_trainer(resources):
            assert [type(service) for service in resources.credit_services] == services
