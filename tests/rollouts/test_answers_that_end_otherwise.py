"""Answers that a stop string ends, and prompts that leave little room: on the rollout and on values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fake_engine import FakeEngine
from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.rollouts.answers import before_stop
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of
from treetune.vocabulary import Problem, TokenIds

STOP = "b;"


def letters(ids: TokenIds, version: int) -> Sequence[float]:
    """Both letters, the end of a step and the end token are equally likely, whatever came before."""
    return [
        0.25 if token in (mdp.A, mdp.B, mdp.END_OF_STEP, mdp.EOS) else 0.0 for token in range(mdp.EOS + 1)
    ]


def engine() -> FakeEngine:
    return FakeEngine(letters, mdp.EOS, decode=mdp.decode, context_length=64)


ROLLOUT = SingleTurn(samples=32, max_tokens=12, stop=(STOP,))


def test_a_stop_string_ends_an_answer_with_what_was_sampled_and_nothing_else() -> None:
    trajectories, _ = answered(ROLLOUT.run(mdp.context(engine=engine()), mdp.problems(2)))
    stopped = [t for t in trajectories if STOP in t.text]
    assert stopped
    for t in stopped:
        assert t.finish_reason == "stop"
        assert t.text.endswith(STOP)
        assert mdp.decode(t.response_ids) == t.text
        assert mdp.EOS not in t.response_ids, "the end token was not sampled"
    assert any(t.response_ids[-1] == mdp.EOS for t in trajectories)


def test_a_stop_string_is_not_shown_to_graders_and_begins_a_step_where_another_token_would() -> None:
    pool = mdp.InlinePool()
    trajectories, _ = answered(ROLLOUT.run(mdp.context(engine=engine(), grader=pool), mdp.problems(2)))
    assert {text for _, text in pool.submitted} == {before_stop(t.text, (STOP,)) for t in trajectories}
    stopped = [t for t in trajectories if STOP in t.text]
    assert any(t.text == STOP for t in stopped), "an answer of nothing else"
    for t in stopped:
        words = t.text.removesuffix(STOP)
        ends = [place + 1 for place, character in enumerate(words) if character == ";"]
        assert t.step_ends == (*ends, len(t.response_ids))


def test_continuations_are_graded_without_the_stop_string_that_ended_them() -> None:
    pool = mdp.InlinePool()
    sampler = engine()
    context = mdp.context(engine=sampler, grader=pool, sampling=ROLLOUT.sampling)
    trajectories, _ = answered(ROLLOUT.run(context, mdp.problems(2)))
    pool.submitted.clear()
    sampler.asked.clear()
    MonteCarlo(samples=8).assign(context, trees_of(trajectories))
    assert all(request.sampling.stop == (STOP,) for request in sampler.asked)
    assert len(pool.submitted) > 50
    assert not any(STOP in text for _, text in pool.submitted)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a\n\n\nP: b", "a"), ("a", "a"), ("", ""), ("\n\n\nP: b", ""), ("1;2\n\n\nP:", "1")],
)
def test_what_an_answer_says_ends_before_the_first_stop_string(text: str, words: str) -> None:
    assert before_stop(text, ("\n\n\nP:", ";")) == words


def test_prompt_and_answer_never_exceed_the_context_where_long_prompts_are_allowed() -> None:
    rollout = SingleTurn(samples=16, max_tokens=12, max_prompt_tokens=8)
    sampler = engine()
    context = mdp.context(engine=sampler, context_length=10, sampling=rollout.sampling)
    problems = [Problem(id=f"train/{n}", prompt="1" * n + "?", gold="") for n in (1, 4, 7)]
    trajectories, _ = answered(rollout.run(context, problems))
    assert {len(r.prompt_ids): r.sampling.max_tokens for r in sampler.asked} == {2: 8, 5: 5, 8: 2}
    for t in trajectories:
        assert len(t.prompt_ids) + len(t.response_ids) <= 10
        assert t.unfinished == (t.response_ids[-1] != mdp.EOS)
    sampler.asked.clear()
    MonteCarlo(samples=2).assign(context, trees_of(trajectories))
    assert sampler.asked
    assert all(len(r.prompt_ids) + r.sampling.max_tokens == 10 for r in sampler.asked)


def test_without_a_limit_for_prompts_every_one_must_leave_room_for_a_whole_answer() -> None:
    rollout = SingleTurn(samples=1, max_tokens=6)
    with pytest.raises(
        ValueError, match="for a response of up to 6; make context_length longer, or say with"
    ):
        answered(rollout.run(mdp.context(context_length=7), mdp.problems(1)))
