"""What the rollouts sample, in which order, how they grade it, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.rollouts import threads
from tests.trees import answered
from treetune.inference.base import Completion, OnResult, Request, SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.single_turn import SingleTurn, sample_answers
from treetune.vocabulary import Metrics, Problem, Trajectory

SINGLE_TURN = SingleTurn(samples=4, max_tokens=mdp.LONGEST)


def test_trajectories_come_in_the_order_of_problem_and_sample() -> None:
    trajectories, _ = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(5)))
    assert [t.id for t in trajectories] == [f"train/{p}#{s}" for p in range(5) for s in range(4)]
    assert len({plain(t.response_ids) for t in trajectories}) > 4


def test_a_trajectory_holds_what_the_engine_sampled() -> None:
    trajectories, _ = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(3)))
    for t in trajectories:
        (segment,) = t.segments
        assert plain(t.prompt_ids) == mdp.encode(t.problem.prompt)
        assert t.text == mdp.decode(segment.token_ids)
        assert segment.origin == "sampled"
        assert segment.policy_version == 3
        assert plain(segment.logprobs) == (-0.5,) * len(segment.token_ids)
        assert t.step_ends == mdp.step_ends(plain(segment.token_ids))
        assert t.reward == mdp.reward(plain(segment.token_ids))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_sample_contiguous_shares_that_together_are_what_one_rank_samples(world_size: int) -> None:
    def run(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(SINGLE_TURN.run(context, mdp.problems(3)))

    ((alone, metrics),) = mdp.on_ranks(1, run, engine=mdp.TabularEngine)
    by_rank = mdp.on_ranks(world_size, run, engine=mdp.TabularEngine)
    assert [trajectory for trajectories, _ in by_rank for trajectory in trajectories] == alone
    assert all(metrics_of_rank == metrics for _, metrics_of_rank in by_rank)


def test_answers_change_with_run_iteration_and_purpose_and_with_nothing_else() -> None:
    def seeds(purpose: str = "rollout", **place: int) -> set[int]:
        engine = mdp.TabularEngine()
        context = mdp.context(engine=engine, **place)
        sampling = SamplingParams(max_tokens=mdp.LONGEST)
        sample_answers(context, mdp.problems(2), samples=2, sampling=sampling, purpose=purpose)
        return {request.seed for request in engine.requests}

    assert seeds() == seeds()
    assert len(seeds() | seeds(seed=9) | seeds(iteration=9) | seeds("evaluation")) == 8


def test_a_cut_answer_earns_the_unfinished_reward_even_when_it_is_right() -> None:
    rollout = SingleTurn(samples=40, max_tokens=3, unfinished_reward=-0.5)
    trajectories, metrics = answered(rollout.run(mdp.context(), mdp.problems(1)))
    cut = [t for t in trajectories if t.text == "a;a"]
    assert cut
    assert all(t.unfinished and t.reward == -0.5 for t in cut)
    assert {t.grade.extracted for t in cut} == {"a"}
    assert metrics["episodes/unfinished"] == sum(t.unfinished for t in trajectories) / 40


def test_a_grade_is_asked_for_before_the_last_request_is_sampled() -> None:
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
                assert on_result is not None
                on_result(index, results[-1])
            return results

    answered(SINGLE_TURN.run(mdp.context(engine=OneByOne(), grader=pool), mdp.problems(3)))
    assert graded_when_sampled == sorted(set(graded_when_sampled))


def test_metrics_say_what_the_answers_were_like() -> None:
    trajectories, metrics = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(8)))
    groups = [trajectories[i : i + 4] for i in range(0, 32, 4)]
    assert metrics["episodes/count"] == 32
    assert metrics["episodes/problems"] == 8
    assert metrics["episodes/reward"] == pytest.approx(sum(t.reward for t in trajectories) / 32)
    assert metrics["episodes/score"] == metrics["episodes/reward"]
    assert metrics["episodes/once_hit"] == sum(any(t.reward for t in g) for g in groups) / 8
    assert metrics["episodes/unique"] == sum(len({t.text for t in g}) for g in groups) / 32
    assert metrics["episodes/response_tokens"] == sum(len(t.response_ids) for t in trajectories) / 32
    assert metrics["episodes/steps"] == sum(len(t.step_ends) for t in trajectories) / 32


def test_progress_reaches_the_number_of_answers() -> None:
    seen: list[tuple[int, int]] = []
    answered(SINGLE_TURN.run(mdp.context(progress=lambda *done: seen.append(done)), mdp.problems(3)))
    assert seen == [(4, 12), (8, 12), (12, 12)]


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_sampled() -> None:
    engine = mdp.TabularEngine()
    long = Problem(id="train/long", prompt="1" * 59 + "?", gold="")
    with pytest.raises(ValueError, match="'train/long' has a prompt of 60 tokens, which leaves 4 of"):
        answered(SINGLE_TURN.run(mdp.context(engine=engine), [*mdp.problems(2), long]))
    assert engine.requests == []


def test_a_prompt_that_leaves_no_room_is_an_error_on_every_rank() -> None:
    long = Problem(id="train/long", prompt="1" * 59 + "?", gold="")

    def run(context: RolloutContext) -> str:
        with pytest.raises(ValueError, match="'train/long'") as error:
            answered(SINGLE_TURN.run(context, [*mdp.problems(2), long]))
        return str(error.value)

    assert len(set(mdp.on_ranks(3, run))) == 1


def test_a_prompt_over_the_given_limit_is_named() -> None:
    rollout = SingleTurn(samples=1, max_tokens=mdp.LONGEST, max_prompt_tokens=1)
    with pytest.raises(ValueError, match="'train/0' has a prompt of 2 tokens; max_prompt_tokens allows 1"):
        answered(rollout.run(mdp.context(), mdp.problems(1)))


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "no problems"),
        (mdp.problems(2) + mdp.problems(1), "'train/0'.*take fewer problems"),
        ([Problem(id="train/0", prompt="", gold="")], "'train/0' has an empty prompt"),
    ],
)
def test_wrong_problems_are_refused(problems: list[Problem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answered(SINGLE_TURN.run(mdp.context(), problems))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": 0.0, "samples": 8}, "the same answer 8 times"),
        ({"stop": ("\n\n", "")}, "empty string"),
    ],
)
def test_sampling_parameters_that_make_no_sense_together_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SingleTurn(max_tokens=8, **given)  # type: ignore[arg-type]


def test_demonstrations_need_no_engine_and_end_with_the_end_token() -> None:
    rollout = Demonstrations(samples=2)
    assert not rollout.needs_engine
    assert rollout.sampling is None
    trajectories, metrics = answered(rollout.run(mdp.context(engine=None), mdp.problems(20)))
    assert len(trajectories) == 40
    for t in trajectories:
        (segment,) = t.segments
        assert plain(t.response_ids) == (*mdp.encode(t.text), mdp.EOS)
        assert t.finish_reason == "stop"
        assert segment.origin == "sampled"
        assert segment.logprobs is None
        assert t.step_ends == mdp.step_ends(plain(t.response_ids))
    assert metrics["episodes/reward"] == sum(t.text.count("a") >= 2 for t in trajectories) / 40
    assert len({t.text for t in trajectories}) == 3


WRITTEN = (
    "a\n<Parallel><Outlines><Outline>1:a</Outline><Outline>2:b</Outline></Outlines>\n"
    "<Thread>\n1:aa\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>\nab"
)


def test_demonstrations_that_are_not_graded_ask_no_grader_and_count_as_right() -> None:
    context = replace(mdp.context(engine=None), grader=None)  # type: ignore[arg-type]
    trajectories, metrics = answered(Demonstrations(graded=False).run(context, mdp.problems(5)))
    assert [t.grade.correct for t in trajectories] == [True] * 5
    assert metrics["episodes/reward"] == 1.0


@dataclass(frozen=True)
class ThreadedTask(mdp.LetterTask):
    written: str = WRITTEN

    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.written


def demonstrated(written: str = WRITTEN, **given: Any) -> Trajectory:
    context = threads.context(task=ThreadedTask(written=written), **given)
    (trajectory,), _ = answered(Demonstrations().run(context, [Problem(id="train/0", prompt="ab?", gold="")]))
    return trajectory


def test_a_demonstration_with_threads_becomes_what_a_rollout_would_have_made_of_it() -> None:
    trajectory = demonstrated()
    assert trajectory.text == WRITTEN
    first, second = ((0, 0),), ((0, 1),)
    assert [(threads.decode(s.token_ids), s.origin, s.branch) for s in trajectory.segments] == [
        (WRITTEN[: WRITTEN.index("\n<Thread>")], "sampled", ()),
        ("\n", "injected", ()),
        ("<Thread>\n1:", "injected", first),
        ("aa\n</Thread>", "sampled", first),
        ("<Thread>\n2:", "injected", second),
        ("b\n</Thread>", "sampled", second),
        ("\n", "injected", ()),
        ("</Parallel>\nab", "sampled", ()),
    ]
    assert plain(trajectory.response_ids) == (*threads.encode(WRITTEN), threads.CODEC.eos_id)
    assert trajectory.step_ends[-1] == len(trajectory.response_ids)
    lengths = [b - a for a, b in itertools.pairwise((0, *trajectory.step_ends))]
    assert lengths == [len(segment.token_ids) for segment in trajectory.segments]


def test_one_without_threads_stays_one_segment_with_the_tasks_steps() -> None:
    trajectory = demonstrated("a;ab")
    assert len(trajectory.segments) == 1
    assert trajectory.step_ends == (2, 5)


def test_threads_that_no_rollout_writes_and_tags_that_are_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'train/0' can't be cut: .* thread 1 ends within a line"):
        demonstrated(WRITTEN.replace("aa\n", "aa"))
    spelled = replace(threads.CODEC, encode=lambda text: tuple(map(ord, text)))
    with pytest.raises(ValueError, match=r"several tokens for their tags.* model.added_tokens \(<Think>"):
        demonstrated(codec=spelled)


def test_demonstrations_are_drawn_anew_in_each_iteration_and_alike_on_any_rank() -> None:
    def texts(context: RolloutContext) -> list[str]:
        return [t.text for t in answered(Demonstrations(samples=2).run(context, mdp.problems(9)))[0]]

    alone = texts(mdp.context())
    assert [text for texts_of_rank in mdp.on_ranks(2, texts) for text in texts_of_rank] == alone
    assert texts(mdp.context(iteration=4)) != alone


def test_a_demonstration_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="'train/0' has a prompt of 2 tokens, which leaves 1 of"):
        answered(Demonstrations().run(mdp.context(context_length=3), mdp.problems(1)))


def test_demonstrations_that_do_not_fit_can_be_left_out_and_are_counted() -> None:
    # Two tokens of prompt, three or five of demonstration, and the end token: six or eight.
    rollout = Demonstrations(samples=4, too_long="leave_out")

    def run(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(rollout.run(context, mdp.problems(9)))

    ((alone, metrics),) = mdp.on_ranks(1, run, context_length=lambda: 7)
    assert 0 < len(alone) < 36
    assert {len(t.response_ids) for t in alone} == {4}
    assert metrics["episodes/left_out"] == 36 - len(alone)
    by_rank = mdp.on_ranks(2, run, context_length=lambda: 7)
    assert [t for trajectories, _ in by_rank for t in trajectories] == alone
    assert all(metrics_of_rank == metrics for _, metrics_of_rank in by_rank)
    assert run(mdp.context(context_length=8))[1]["episodes/left_out"] == 0
