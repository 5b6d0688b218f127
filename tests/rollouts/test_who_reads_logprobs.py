"""The engine is asked for log-probs where somebody reads them, and nowhere else."""

from __future__ import annotations

import pytest

from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of


@pytest.mark.parametrize("read", [True, False])
def test_answers_have_log_probs_where_the_context_says_that_somebody_reads_them(read: bool) -> None:
    context = mdp.context(engine=(engine := mdp.TabularEngine()), reads_logprobs=read)
    trajectories, _ = answered(SingleTurn(samples=4, max_tokens=mdp.LONGEST).run(context, mdp.problems(3)))
    assert {request.reads_logprobs for request in engine.requests} == {read}
    assert {segment.logprobs is not None for one in trajectories for segment in one.segments} == {read}


def test_continuations_that_are_only_graded_ask_for_none() -> None:
    context = mdp.context(engine=(engine := mdp.TabularEngine()))
    MonteCarlo(samples=2).assign(context, trees_of(mdp.all_trajectories()))
    assert engine.requests and not any(request.reads_logprobs for request in engine.requests)
