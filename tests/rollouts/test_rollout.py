"""Rollouts: requests, order, grading, ends of answers, and refusals.

These tests promise:

* A trajectory holds exactly what the engine sampled, in the order of problems and samples.
* Any number of ranks samples the same.
* Answers depend on run, iteration and purpose, and on nothing else.
* Stop strings and limits end an answer as configured, and wrong problems and settings are refused.
* A demonstration becomes the trajectory that a rollout would have made of its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support import tabular_mdp as mdp
from tests.support import threads
from tests.support.columns import plain
from tests.support.trees import answered
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.requests import Completion, OnResult, Request, SamplingParams
from treetune.rollouts.answers import cut_at_stop
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.single_turn import SingleTurn, sample_answers
from treetune.tree import trees_of
from treetune.vocabulary import Metrics, Problem, Trajectory

SINGLE_TURN = SingleTurn(samples=4, max_tokens=mdp.LONGEST)
STOP = "b;"
STOPPED = SingleTurn(samples=32, max_tokens=12, stop=(STOP,))
LONG = Problem(id="train/long", prompt="1" * 59 + "?", gold="")


def test_a_trajectory_holds_what_the_engine_sampled_in_the_order_of_problem_and_sample() -> None:
    trajectories, _ = mdp.roll_out(SINGLE_TURN, 5)
    assert [trajectory.id for trajectory in trajectories] == [
        f"train/{p}#{s}" for p in range(5) for s in range(4)
    ]
    assert len({plain(trajectory.response_ids) for trajectory in trajectories}) > 4
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        ids = plain(segment.token_ids)
        assert (segment.origin, segment.policy_version, plain(segment.logprobs)) == (
            "sampled",
            3,
            (-0.5,) * len(ids),
        )
        assert (plain(trajectory.prompt_ids), trajectory.text) == (
            mdp.encode(trajectory.problem.prompt),
            mdp.decode(ids),
        )
        assert (trajectory.step_ends, trajectory.reward) == (mdp.step_ends(ids), mdp.reward(ids))


@pytest.mark.parametrize("reads_logprobs", [True, False])
def test_answers_have_log_probs_exactly_if_something_reads_them(reads_logprobs: bool) -> None:
    engine = mdp.TabularEngine()
    trajectories, _ = mdp.roll_out(SINGLE_TURN, 3, engine=engine, reads_logprobs=reads_logprobs)
    assert {request.reads_logprobs for request in engine.requests} == {reads_logprobs}
    assert {
        segment.logprobs is not None for trajectory in trajectories for segment in trajectory.segments
    } == {reads_logprobs}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_sample_contiguous_shares_that_together_are_what_one_rank_samples(world_size: int) -> None:
    def roll_out(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(SINGLE_TURN.run(context, mdp.problems(3)))

    mdp.assert_ranks_agree(world_size, roll_out, engine=mdp.TabularEngine)


def test_answers_change_with_run_iteration_and_purpose_and_with_nothing_else() -> None:
    def seeds(purpose: str = "rollout", **changed: int) -> set[int]:
        engine = mdp.TabularEngine()
        sampling = SamplingParams(max_tokens=mdp.LONGEST)
        sample_answers(
            mdp.context(engine=engine, **changed),
            mdp.problems(2),
            samples=2,
            sampling=sampling,
            purpose=purpose,
        )
        return {request.seed for request in engine.requests}

    assert seeds() == seeds()
    assert len(seeds() | seeds(seed=9) | seeds(iteration=9) | seeds("evaluation")) == 8


def test_a_cut_answer_earns_the_unfinished_reward_even_when_it_is_right() -> None:
    trajectories, metrics = mdp.roll_out(SingleTurn(samples=40, max_tokens=3, unfinished_reward=-0.5), 1)
    cut = [trajectory for trajectory in trajectories if trajectory.text == "a;a"]
    assert {(trajectory.unfinished, trajectory.reward, trajectory.grade.extracted) for trajectory in cut} == {
        (True, -0.5, "a")
    }
    assert metrics["episodes/unfinished"] == sum(trajectory.unfinished for trajectory in trajectories) / 40


def test_answers_are_graded_while_others_are_still_sampled() -> None:
    pool = mdp.InlinePool()
    graded_when_sampled: list[int] = []

    class OneByOne(mdp.TabularEngine):
        def generate(
            self, requests: Sequence[Request], on_result: OnResult | None = None
        ) -> list[list[Completion]]:
            results = []
            for index, request in enumerate(requests):
                graded_when_sampled.append(len(pool.submitted))
                results.append(self._completions(request))
                on_result(index, results[-1])
            return results

    mdp.roll_out(SINGLE_TURN, 3, engine=OneByOne(), grader=pool)
    assert graded_when_sampled == sorted(set(graded_when_sampled))


def test_metrics_describe_the_answers_and_progress_counts_them() -> None:
    progress_calls: list[tuple[int, int]] = []
    trajectories, metrics = mdp.roll_out(SINGLE_TURN, 8, progress=lambda *done: progress_calls.append(done))
    groups = [trajectories[i : i + 4] for i in range(0, 32, 4)]
    expected = {
        "count": 32,
        "problems": 8,
        "reward": sum(trajectory.reward for trajectory in trajectories) / 32,
        "score": sum(trajectory.reward for trajectory in trajectories) / 32,
        "once_hit": sum(any(trajectory.reward for trajectory in group) for group in groups) / 8,
        "unique": sum(len({trajectory.text for trajectory in group}) for group in groups) / 32,
        "response_tokens": sum(len(trajectory.response_ids) for trajectory in trajectories) / 32,
        "steps": sum(len(trajectory.step_ends) for trajectory in trajectories) / 32,
    }
    assert {name: metrics[f"episodes/{name}"] for name in expected} == pytest.approx(expected)
    assert progress_calls == [(done, 32) for done in range(1, 33)]


def test_a_prompt_without_room_for_an_answer_is_named_on_every_rank_before_anything_is_sampled() -> None:
    def refuse(context: RolloutContext) -> str:
        with pytest.raises(
            ValueError, match="'train/long' has a prompt of 60 tokens, which leaves 4 of"
        ) as error:
            SINGLE_TURN.run(context, [*mdp.problems(2), LONG])
        assert context.engine.requests == []
        return str(error.value)

    assert len(set(mdp.on_ranks(3, refuse, engine=mdp.TabularEngine))) == 1


@pytest.mark.parametrize(
    ("problems", "settings", "message"),
    [
        ([], {}, "no problems"),
        (mdp.problems(2) + mdp.problems(1), {}, "'train/0'.*take fewer problems"),
        ([Problem(id="train/0", prompt="", gold="")], {}, "'train/0' has an empty prompt"),
        (
            mdp.problems(1),
            {"max_prompt_tokens": 1},
            "'train/0' has a prompt of 2 tokens; max_prompt_tokens allows 1",
        ),
        (mdp.problems(8), {"max_tokens": 63}, "up to 63; raise context_length, or set"),
    ],
)
def test_wrong_problems_are_refused(problems: list[Problem], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SINGLE_TURN, **settings).run(mdp.context(), problems)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": 0.0, "samples": 8}, "the same answer 8 times"),
        ({"stop": ("\n\n", "")}, "empty string"),
    ],
)
def test_sampling_parameters_that_make_no_sense_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SingleTurn(max_tokens=8, **settings)


def test_a_stop_string_ends_an_answer_and_is_hidden_from_graders() -> None:
    pool = mdp.InlinePool()
    trajectories, _ = mdp.roll_out(STOPPED, 2, engine=mdp.engine_of_even_letters(), grader=pool)
    assert {text for _, text in pool.submitted} == {
        cut_at_stop(trajectory.text, (STOP,)) for trajectory in trajectories
    }
    stopped = [trajectory for trajectory in trajectories if STOP in trajectory.text]
    assert any(trajectory.text == STOP for trajectory in stopped), "an answer of nothing else"
    assert any(trajectory.response_ids[-1] == mdp.EOS for trajectory in trajectories)
    for trajectory in stopped:
        text_before_stop = trajectory.text.removesuffix(STOP)
        assert trajectory.finish_reason == "stop" and STOP not in text_before_stop
        assert mdp.decode(trajectory.response_ids) == trajectory.text
        assert mdp.EOS not in trajectory.response_ids, "the end token was not sampled"
        ends = [position + 1 for position, character in enumerate(text_before_stop) if character == ";"]
        assert trajectory.step_ends == (*ends, len(trajectory.response_ids))


def test_continuations_are_graded_without_the_stop_string_that_ended_them() -> None:
    pool, sampler = mdp.InlinePool(), mdp.engine_of_even_letters()
    context = mdp.context(engine=sampler, grader=pool, sampling=STOPPED.sampling)
    trees, _ = STOPPED.run(context, mdp.problems(2))
    pool.submitted.clear()
    sampler.asked.clear()
    MonteCarlo(samples=8).assign(context, trees)
    assert all(request.sampling.stop == (STOP,) for request in sampler.asked)
    assert len(pool.submitted) > 50
    assert not any(STOP in text for _, text in pool.submitted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\n\n\nP: b", "a"), ("a", "a"), ("", ""), ("\n\n\nP: b", ""), ("1;2\n\n\nP:", "1")],
)
def test_the_graded_text_ends_before_the_first_stop_string(text: str, expected: str) -> None:
    assert cut_at_stop(text, ("\n\n\nP:", ";")) == expected


def test_prompt_and_answer_never_exceed_the_context_where_long_prompts_are_allowed() -> None:
    rollout = SingleTurn(samples=16, max_tokens=12, max_prompt_tokens=8)
    sampler = mdp.engine_of_even_letters()
    context = mdp.context(engine=sampler, context_length=10, sampling=rollout.sampling)
    problems = [Problem(id=f"train/{n}", prompt="1" * n + "?", gold="") for n in (1, 4, 7)]
    trajectories, _ = answered(rollout.run(context, problems))
    assert {len(request.prompt_ids): request.sampling.max_tokens for request in sampler.asked} == {
        2: 8,
        5: 5,
        8: 2,
    }
    for trajectory in trajectories:
        assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= 10
        assert trajectory.unfinished == (trajectory.response_ids[-1] != mdp.EOS)
    sampler.asked.clear()
    MonteCarlo(samples=2).assign(context, trees_of(trajectories))
    assert {len(request.prompt_ids) + request.sampling.max_tokens for request in sampler.asked} == {10}


def test_demonstrations_need_no_engine_and_end_with_the_end_token() -> None:
    rollout = Demonstrations(samples=2)
    assert (rollout.needs_engine, rollout.sampling) == (False, None)
    trajectories, metrics = mdp.roll_out(rollout, 20, engine=None)
    assert len(trajectories) == 40 and len({trajectory.text for trajectory in trajectories}) == 3
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        ids = (*mdp.encode(trajectory.text), mdp.EOS)
        assert (plain(trajectory.response_ids), trajectory.finish_reason, trajectory.step_ends) == (
            ids,
            "stop",
            mdp.step_ends(ids),
        )
        assert (segment.origin, segment.logprobs) == ("sampled", None)
    assert (
        metrics["episodes/reward"] == sum(trajectory.text.count("a") >= 2 for trajectory in trajectories) / 40
    )


def test_demonstrations_that_are_not_graded_ask_no_grader_and_count_as_right() -> None:
    trajectories, metrics = mdp.roll_out(Demonstrations(graded=False), 5, engine=None, grader=None)
    assert [trajectory.grade.correct for trajectory in trajectories] == [True] * 5
    assert metrics["episodes/reward"] == 1.0


def test_demonstrations_are_drawn_anew_in_each_iteration_and_alike_on_all_ranks() -> None:
    def texts(context: RolloutContext) -> tuple[list[str], None]:
        return [
            trajectory.text
            for trajectory in answered(Demonstrations(samples=2).run(context, mdp.problems(9)))[0]
        ], None

    alone, _ = mdp.assert_ranks_agree(2, texts)
    assert texts(mdp.context(iteration=4))[0] != alone


def test_demonstrations_that_do_not_fit_are_named_or_left_out_and_counted() -> None:
    with pytest.raises(ValueError, match="'train/0' has a prompt of 2 tokens, which leaves 1 of"):
        mdp.roll_out(Demonstrations(), 1, context_length=3)
    # Two tokens of prompt, three or five of demonstration, and the end token: six or eight.
    rollout = Demonstrations(samples=4, too_long="leave_out")
    alone, metrics = mdp.assert_ranks_agree(
        2, lambda context: answered(rollout.run(context, mdp.problems(9))), context_length=lambda: 7
    )
    assert {len(trajectory.response_ids) for trajectory in alone} == {4}
    assert 0 < metrics["episodes/left_out"] == 36 - len(alone) < 36
    assert mdp.roll_out(rollout, 9, context_length=8)[1]["episodes/left_out"] == 0


DEMONSTRATION = (
    "a\n<Parallel><Outlines><Outline>1:a</Outline><Outline>2:b</Outline></Outlines>\n"
    "<Thread>\n1:aa\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>\nab"
)


@dataclass(frozen=True)
class ThreadedTask(mdp.LetterTask):
    text: str = DEMONSTRATION

    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.text


def demonstrate(demonstration: str = DEMONSTRATION, **changed: Any) -> Trajectory:
    context = threads.context(task=ThreadedTask(text=demonstration), **changed)
    (trajectory,), _ = answered(Demonstrations().run(context, [Problem(id="train/0", prompt="ab?", gold="")]))
    return trajectory


def test_a_demonstration_with_threads_becomes_what_a_rollout_would_have_sampled() -> None:
    trajectory = demonstrate()
    assert trajectory.text == DEMONSTRATION
    first, second = ((0, 0),), ((0, 1),)
    assert [
        (threads.decode(segment.token_ids), segment.origin, segment.branch) for segment in trajectory.segments
    ] == [
        (DEMONSTRATION[: DEMONSTRATION.index("\n<Thread>")], "sampled", ()),
        ("\n", "injected", ()),
        ("<Thread>\n1:", "injected", first),
        ("aa\n</Thread>", "sampled", first),
        ("<Thread>\n2:", "injected", second),
        ("b\n</Thread>", "sampled", second),
        ("\n", "injected", ()),
        ("</Parallel>\nab", "sampled", ()),
    ]
    assert plain(trajectory.response_ids) == (*threads.encode(DEMONSTRATION), threads.CODEC.eos_id)
    lengths = [b - a for a, b in itertools.pairwise((0, *trajectory.step_ends))]
    assert lengths == [len(segment.token_ids) for segment in trajectory.segments]


def test_a_demonstration_without_threads_stays_one_segment_with_the_steps_of_the_task() -> None:
    trajectory = demonstrate("a;ab")
    assert (len(trajectory.segments), trajectory.step_ends) == (1, (2, 5))


def test_threads_that_no_rollout_writes_and_tags_of_several_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'train/0' can't be cut: .* thread 1 ends within a line"):
        demonstrate(DEMONSTRATION.replace("aa\n", "aa"))
    spelled = replace(threads.CODEC, encode=lambda text: tuple(map(ord, text)))
    with pytest.raises(ValueError, match=r"several tokens for their tags.* model.added_tokens \(<Think>"):
        demonstrate(codec=spelled)
