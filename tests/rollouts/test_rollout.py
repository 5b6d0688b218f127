"""What the rollouts sample, in which order, how they grade it, where answers end, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.threads import threads
from tests.trees import answered
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.requests import Completion, OnResult, Request, SamplingParams
from treetune.rollouts.answers import before_stop
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
    trajectories, _ = mdp.rolled_out(SINGLE_TURN, 5)
    assert [t.id for t in trajectories] == [f"train/{p}#{s}" for p in range(5) for s in range(4)]
    assert len({plain(t.response_ids) for t in trajectories}) > 4
    for t in trajectories:
        (segment,) = t.segments
        ids = plain(segment.token_ids)
        assert (segment.origin, segment.policy_version, plain(segment.logprobs)) == (
            "sampled",
            3,
            (-0.5,) * len(ids),
        )
        assert (plain(t.prompt_ids), t.text) == (mdp.encode(t.problem.prompt), mdp.decode(ids))
        assert (t.step_ends, t.reward) == (mdp.step_ends(ids), mdp.reward(ids))


@pytest.mark.parametrize("read", [True, False])
def test_answers_have_log_probs_where_the_context_says_that_somebody_reads_them(read: bool) -> None:
    engine = mdp.TabularEngine()
    trajectories, _ = mdp.rolled_out(SINGLE_TURN, 3, engine=engine, reads_logprobs=read)
    assert {request.reads_logprobs for request in engine.requests} == {read}
    assert {segment.logprobs is not None for one in trajectories for segment in one.segments} == {read}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_sample_contiguous_shares_that_together_are_what_one_rank_samples(world_size: int) -> None:
    def run(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(SINGLE_TURN.run(context, mdp.problems(3)))

    mdp.assert_ranks_agree(world_size, run, engine=mdp.TabularEngine)


def test_answers_change_with_run_iteration_and_purpose_and_with_nothing_else() -> None:
    def seeds(purpose: str = "rollout", **place: int) -> set[int]:
        engine = mdp.TabularEngine()
        sampling = SamplingParams(max_tokens=mdp.LONGEST)
        sample_answers(
            mdp.context(engine=engine, **place),
            mdp.problems(2),
            samples=2,
            sampling=sampling,
            purpose=purpose,
        )
        return {request.seed for request in engine.requests}

    assert seeds() == seeds()
    assert len(seeds() | seeds(seed=9) | seeds(iteration=9) | seeds("evaluation")) == 8


def test_a_cut_answer_earns_the_unfinished_reward_even_when_it_is_right() -> None:
    trajectories, metrics = mdp.rolled_out(SingleTurn(samples=40, max_tokens=3, unfinished_reward=-0.5), 1)
    cut = [t for t in trajectories if t.text == "a;a"]
    assert {(t.unfinished, t.reward, t.grade.extracted) for t in cut} == {(True, -0.5, "a")}
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
                on_result(index, results[-1])
            return results

    mdp.rolled_out(SINGLE_TURN, 3, engine=OneByOne(), grader=pool)
    assert graded_when_sampled == sorted(set(graded_when_sampled))


def test_metrics_say_what_the_answers_were_like_and_progress_reaches_their_number() -> None:
    seen: list[tuple[int, int]] = []
    trajectories, metrics = mdp.rolled_out(SINGLE_TURN, 8, progress=lambda *done: seen.append(done))
    groups = [trajectories[i : i + 4] for i in range(0, 32, 4)]
    expected = {
        "count": 32,
        "problems": 8,
        "reward": sum(t.reward for t in trajectories) / 32,
        "score": sum(t.reward for t in trajectories) / 32,
        "once_hit": sum(any(t.reward for t in g) for g in groups) / 8,
        "unique": sum(len({t.text for t in g}) for g in groups) / 32,
        "response_tokens": sum(len(t.response_ids) for t in trajectories) / 32,
        "steps": sum(len(t.step_ends) for t in trajectories) / 32,
    }
    assert {name: metrics[f"episodes/{name}"] for name in expected} == pytest.approx(expected)
    assert seen == [(done, 32) for done in range(1, 33)]


def test_a_prompt_that_leaves_no_room_is_named_on_every_rank_before_anything_is_sampled() -> None:
    def run(context: RolloutContext) -> str:
        with pytest.raises(
            ValueError, match="'train/long' has a prompt of 60 tokens, which leaves 4 of"
        ) as error:
            SINGLE_TURN.run(context, [*mdp.problems(2), LONG])
        assert context.engine.requests == []
        return str(error.value)

    assert len(set(mdp.on_ranks(3, run, engine=mdp.TabularEngine))) == 1


@pytest.mark.parametrize(
    ("problems", "given", "message"),
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
def test_wrong_problems_are_refused(problems: list[Problem], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SINGLE_TURN, **given).run(mdp.context(), problems)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": 0.0, "samples": 8}, "the same answer 8 times"),
        ({"stop": ("\n\n", "")}, "empty string"),
    ],
)
def test_sampling_parameters_that_make_no_sense_together_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SingleTurn(max_tokens=8, **given)


def test_a_stop_string_ends_an_answer_is_not_shown_to_graders_and_begins_a_step_where_a_token_would() -> None:
    pool = mdp.InlinePool()
    trajectories, _ = mdp.rolled_out(STOPPED, 2, engine=mdp.even_letters(), grader=pool)
    assert {text for _, text in pool.submitted} == {before_stop(t.text, (STOP,)) for t in trajectories}
    stopped = [t for t in trajectories if STOP in t.text]
    assert any(t.text == STOP for t in stopped), "an answer of nothing else"
    assert any(t.response_ids[-1] == mdp.EOS for t in trajectories)
    for t in stopped:
        words = t.text.removesuffix(STOP)
        assert t.finish_reason == "stop" and STOP not in words
        assert mdp.decode(t.response_ids) == t.text
        assert mdp.EOS not in t.response_ids, "the end token was not sampled"
        ends = [place + 1 for place, character in enumerate(words) if character == ";"]
        assert t.step_ends == (*ends, len(t.response_ids))


def test_continuations_are_graded_without_the_stop_string_that_ended_them() -> None:
    pool, sampler = mdp.InlinePool(), mdp.even_letters()
    context = mdp.context(engine=sampler, grader=pool, sampling=STOPPED.sampling)
    trees, _ = STOPPED.run(context, mdp.problems(2))
    pool.submitted.clear()
    sampler.asked.clear()
    MonteCarlo(samples=8).assign(context, trees)
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
    sampler = mdp.even_letters()
    context = mdp.context(engine=sampler, context_length=10, sampling=rollout.sampling)
    problems = [Problem(id=f"train/{n}", prompt="1" * n + "?", gold="") for n in (1, 4, 7)]
    trajectories, _ = answered(rollout.run(context, problems))
    assert {len(r.prompt_ids): r.sampling.max_tokens for r in sampler.asked} == {2: 8, 5: 5, 8: 2}
    for t in trajectories:
        assert len(t.prompt_ids) + len(t.response_ids) <= 10
        assert t.unfinished == (t.response_ids[-1] != mdp.EOS)
    sampler.asked.clear()
    MonteCarlo(samples=2).assign(context, trees_of(trajectories))
    assert {len(r.prompt_ids) + r.sampling.max_tokens for r in sampler.asked} == {10}


def test_demonstrations_need_no_engine_and_end_with_the_end_token() -> None:
    rollout = Demonstrations(samples=2)
    assert (rollout.needs_engine, rollout.sampling) == (False, None)
    trajectories, metrics = mdp.rolled_out(rollout, 20, engine=None)
    assert len(trajectories) == 40 and len({t.text for t in trajectories}) == 3
    for t in trajectories:
        (segment,) = t.segments
        ids = (*mdp.encode(t.text), mdp.EOS)
        assert (plain(t.response_ids), t.finish_reason, t.step_ends) == (ids, "stop", mdp.step_ends(ids))
        assert (segment.origin, segment.logprobs) == ("sampled", None)
    assert metrics["episodes/reward"] == sum(t.text.count("a") >= 2 for t in trajectories) / 40


def test_demonstrations_that_are_not_graded_ask_no_grader_and_count_as_right() -> None:
    trajectories, metrics = mdp.rolled_out(Demonstrations(graded=False), 5, engine=None, grader=None)
    assert [t.grade.correct for t in trajectories] == [True] * 5
    assert metrics["episodes/reward"] == 1.0


def test_demonstrations_are_drawn_anew_in_each_iteration_and_alike_on_any_rank() -> None:
    def texts(context: RolloutContext) -> tuple[list[str], None]:
        return [t.text for t in answered(Demonstrations(samples=2).run(context, mdp.problems(9)))[0]], None

    alone, _ = mdp.assert_ranks_agree(2, texts)
    assert texts(mdp.context(iteration=4))[0] != alone


def test_demonstrations_that_do_not_fit_are_named_or_left_out_and_counted() -> None:
    with pytest.raises(ValueError, match="'train/0' has a prompt of 2 tokens, which leaves 1 of"):
        mdp.rolled_out(Demonstrations(), 1, context_length=3)
    # Two tokens of prompt, three or five of demonstration, and the end token: six or eight.
    rollout = Demonstrations(samples=4, too_long="leave_out")
    alone, metrics = mdp.assert_ranks_agree(
        2, lambda context: answered(rollout.run(context, mdp.problems(9))), context_length=lambda: 7
    )
    assert {len(t.response_ids) for t in alone} == {4}
    assert 0 < metrics["episodes/left_out"] == 36 - len(alone) < 36
    assert mdp.rolled_out(rollout, 9, context_length=8)[1]["episodes/left_out"] == 0


WRITTEN = (
    "a\n<Parallel><Outlines><Outline>1:a</Outline><Outline>2:b</Outline></Outlines>\n"
    "<Thread>\n1:aa\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>\nab"
)


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
    lengths = [b - a for a, b in itertools.pairwise((0, *trajectory.step_ends))]
    assert lengths == [len(segment.token_ids) for segment in trajectory.segments]


def test_one_without_threads_stays_one_segment_with_the_tasks_steps() -> None:
    trajectory = demonstrated("a;ab")
    assert (len(trajectory.segments), trajectory.step_ends) == (1, (2, 5))


def test_threads_that_no_rollout_writes_and_tags_that_are_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'train/0' can't be cut: .* thread 1 ends within a line"):
        demonstrated(WRITTEN.replace("aa\n", "aa"))
    spelled = replace(threads.CODEC, encode=lambda text: tuple(map(ord, text)))
    with pytest.raises(ValueError, match=r"several tokens for their tags.* model.added_tokens \(<Think>"):
        demonstrated(codec=spelled)
