"""Metrics of answers: by domain, of the numbers that a rollout declares, and of threads.

These tests promise:

* Each domain has its own stop strings, budget and steps, and metrics over its own answers.
* A declared number is averaged over the answers that have it, on any number of ranks.
* Lengths, seconds and blocks of answers with threads are those of the reference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support import tabular_mdp as mdp
from tests.support import threads
from tests.support.threads import answer, block, part
from tests.support.trees import answered
from treetune.credit.grpo import Group
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.mixture import Domain, Mixture
from treetune.engine.requests import SamplingParams
from treetune.rollouts import numbers
from treetune.rollouts.answers import contiguous_share, cut_at_stop
from treetune.rollouts.context import FurtherProblems, RolloutContext
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.metrics import domain_advantages, domain_columns, trajectory_metrics
from treetune.rollouts.numbers import Number, NumberGroup, add_measured_numbers
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.tables.columns import MeasuredColumn, Panel, read_number_of_summary
from treetune.threads.fork_join import EVENTS
from treetune.threads.numbers import (
    THREAD_NUMBERS,
    count_threads_of_answer,
    critical_seconds,
    measure_threads,
)
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Grade, Metrics, Problem, Segment, TextCodec, Trajectory


@dataclass(frozen=True, kw_only=True)
class TaskOfOneStep(mdp.LetterTask):
    """A task whose answers are one step."""

    def demonstration(self, problem: Problem, seed: int) -> str:
        return "b"

    def step_boundaries(self, response: str) -> list[int]:
        return [0, len(response)] if response else [0]


STOP = "a;"
TASK = Mixture(
    domains={
        "cut": Domain(task=mdp.LetterTask(), stop=(STOP,)),
        "long": Domain(task=mdp.LetterTask()),
        "short": Domain(task=TaskOfOneStep(), max_tokens=3),
    }
)
NAMES = ("reward", "correct", "unfinished", "unavailable", "response_tokens", "mixed", "problems")
ROLLOUT = SingleTurn(samples=16, max_tokens=12, stop=("b;",), unfinished_reward=0.0)


def problems(count: int = 6) -> list[Problem]:
    names = list(TASK.domains)
    return [
        replace(problem, id=f"{names[i % 3]}/{problem.id}", domain=names[i % 3])
        for i, problem in enumerate(mdp.problems(count))
    ]


def answers_of_domain(answers: list[Trajectory], domain: str) -> list[Trajectory]:
    return [answer for answer in answers if answer.problem.domain == domain]


def test_each_domain_has_its_own_stop_string_budget_and_steps() -> None:
    pool = mdp.InlinePool()
    answers, _ = answered(
        ROLLOUT.run(mdp.context(engine=mdp.engine_of_even_letters(), task=TASK, grader=pool), problems())
    )
    for trajectory in answers_of_domain(answers, "short"):
        assert len(trajectory.response_ids) <= 3
        assert trajectory.step_ends == (len(trajectory.response_ids),)
    assert max(len(trajectory.response_ids) for trajectory in answers_of_domain(answers, "long")) > 3
    for domain, stop in (("cut", STOP), ("long", "b;"), ("short", "b;")):
        other_stop = "b;" if stop == STOP else STOP
        texts = [trajectory.text for trajectory in answers_of_domain(answers, domain)]
        assert all(stop not in text.removesuffix(stop) for text in texts)
        assert any(text.endswith(stop) for text in texts) and any(other_stop in text for text in texts)
        graded = {text for id, text in pool.submitted if id.startswith(domain)}
        assert graded == {cut_at_stop(text, (stop,)) for text in texts}
    assert any(len(trajectory.step_ends) > 1 for trajectory in answers_of_domain(answers, "cut"))


def test_a_continuation_has_the_remaining_budget_and_the_stop_string_of_its_domain() -> None:
    sampler = mdp.engine_of_even_letters()
    answer = (*mdp.encode("a;b"), mdp.EOS)
    mdp.assign_credit(
        MonteCarlo(samples=3),
        [mdp.trajectory(answer, problem) for problem in problems(3)],
        engine=sampler,
        task=TASK,
        sampling=SamplingParams(max_tokens=6, stop=("b;",)),
    )
    limits = {
        (request.sampling.stop, request.sampling.max_tokens + len(mdp.response_part(request.prompt_ids)))
        for request in sampler.asked
    }
    assert limits == {((STOP,), 6), (("b;",), 6), (("b;",), 3)}


def test_each_domain_has_its_own_demonstrations() -> None:
    answers, _ = answered(Demonstrations(samples=3).run(mdp.context(task=TASK), problems()))
    assert {answer.text for answer in answers_of_domain(answers, "short")} == {"b"}
    assert {answer.text for answer in answers_of_domain(answers, "long")} != {"b"}


def test_metrics_by_domain_are_those_of_its_answers_alone() -> None:
    def roll_out(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(ROLLOUT.run(context, problems()))

    answers, metrics = mdp.assert_ranks_agree(
        3, roll_out, engine=mdp.engine_of_even_letters, task=lambda: TASK
    )
    for domain in TASK.domains:
        domain_metrics = trajectory_metrics(mdp.context(task=TASK), answers_of_domain(answers, domain))
        for name in NAMES:
            assert metrics[f"domains/{domain}/{name}"] == pytest.approx(domain_metrics[f"episodes/{name}"])
        rates = [
            np.mean([leaf.grade.correct for leaf in tree.leaves])
            for tree in trees_of(answers_of_domain(answers, domain))
        ]
        learnable = np.mean([p * (1 - p) * 16 / 15 for p in rates])
        assert metrics[f"domains/{domain}/learnable"] == pytest.approx(learnable)


def test_the_spread_of_rewards_is_over_all_graded_answers() -> None:
    answers = mdp.all_trajectories()
    ungraded = replace(answers[0], sample=len(answers), grade=Grade(7.0, "unavailable"))
    metrics = trajectory_metrics(mdp.context(), [*answers, ungraded])
    assert metrics["episodes/reward_std"] == pytest.approx(np.std([answer.reward for answer in answers]))
    assert "episodes/reward_std" not in trajectory_metrics(mdp.context(), [ungraded])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_learnable_part_of_a_domain_is_expected_to_be_p_times_one_minus_p(count: int) -> None:
    p, expected = 0.3, 0.0
    answer = replace(mdp.trajectory(mdp.encode("b?")), problem=replace(mdp.problems(1)[0], domain="one"))
    for results in itertools.product([False, True], repeat=count):
        chance = math.prod(p if is_right else 1 - p for is_right in results)
        answers = [replace(answer, grade=Grade(float(is_right), "ok")) for is_right in results]
        (learnable,) = domain_columns({"0": answers})["domains/one/learnable"]
        expected += chance * learnable
    assert expected == pytest.approx(p * (1 - p))


def test_without_domains_there_are_no_metrics_by_domain() -> None:
    _, metrics = mdp.roll_out(ROLLOUT, 2, engine=mdp.engine_of_even_letters())
    assert not [name for name in metrics if name.startswith("domains/")]


def test_ungraded_answers_are_counted_and_not_part_of_the_scores_of_a_domain() -> None:
    problem = problems(1)[0]
    right = replace(mdp.trajectory((mdp.A, mdp.EOS), problem), grade=Grade(1.0, "ok"))
    ungraded = replace(right, sample=1, grade=Grade(0.0, "unavailable"))
    metrics = trajectory_metrics(mdp.context(task=TASK), [right, ungraded])
    expected = {"correct": 1.0, "reward": 1.0, "unavailable": 0.5, "error": 0.0}
    assert {name: metrics[f"domains/cut/{name}"] for name in expected} == expected
    assert "domains/cut/learnable" not in metrics, "of one graded answer nothing is known"


def test_advantages_by_domain_are_over_the_trained_tokens_of_the_domain() -> None:
    trees, _ = ROLLOUT.run(mdp.context(engine=mdp.engine_of_even_letters(), task=TASK), problems())
    episodes, _ = Group().assign(mdp.context(task=TASK), trees)
    assert [episode.domain for episode in episodes] == [answer.problem.domain for answer in answers_of(trees)]
    metrics = domain_advantages(episodes)
    for domain in TASK.domains:
        values = np.concatenate([episode.advantages for episode in episodes if episode.domain == domain])
        assert metrics[f"domains/{domain}/advantage_std"] == pytest.approx(values.std())
        assert metrics[f"domains/{domain}/advantage_zero"] == pytest.approx((values == 0).mean())
    assert domain_advantages([replace(episode, domain="") for episode in episodes]) == {}


def lengths(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    return [{"letters": float(len(trajectory.text))} for trajectory in trajectories]


TURNS = NumberGroup(
    "turns",
    {
        "count": Number(
            "turns of an answer", better="lower", largest=True, while_training=True, label="turns"
        ),
        "letters": Number("letters of an answer"),
    },
    lengths,
    ratios={"fewer_turns": ("count", "count")},
)


@pytest.fixture
def _turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_groups", {})
    numbers.declare_group(TURNS)


def answers_with_turns() -> list[Trajectory]:
    """Returns all answers; the first three have a number of turns, as a rollout counts them."""
    answers = mdp.all_trajectories()
    turns = [
        replace(answer, numbers={"turns/count": float(count)}) for count, answer in enumerate(answers[:3])
    ]
    return answers_of(numbers.add_measured_numbers(trees_of([*turns, *answers[3:]]), mdp.CODEC))


@pytest.mark.usefixtures("_turns")
def test_means_are_over_the_answers_that_have_the_number_and_over_correct_ones() -> None:
    answers = answers_with_turns()
    metrics = trajectory_metrics(mdp.context(), answers)
    assert (metrics["turns/count"], metrics["turns/count_max"]) == (1.0, 2.0)
    assert metrics["turns/letters"] == sum(len(answer.text) for answer in answers) / len(answers)
    correct = [index for index, answer in enumerate(answers[:3]) if answer.grade.correct]
    assert 0 < len(correct) < 3
    assert metrics["turns/count_right"] == sum(correct) / len(correct)
    assert "turns/letters_max" not in metrics


@pytest.mark.usefixtures("_turns")
def test_a_rank_without_a_number_has_the_means_of_the_others() -> None:
    answers = answers_with_turns()
    with_turns = [answer for answer in answers if "turns/count" in answer.numbers]
    without_turns = [answer for answer in answers if "turns/count" not in answer.numbers]
    shares = [with_turns, without_turns]
    ranks = mdp.on_ranks(2, lambda context: trajectory_metrics(context, shares[context.ranks.rank]))
    assert ranks[0] == ranks[1] and ranks[0]["turns/count"] == 1.0


@pytest.mark.usefixtures("_turns")
def test_evaluations_and_the_line_of_an_iteration_show_the_numbers_declared_for_them() -> None:
    means = numbers.number_metrics(numbers.collect_number_columns(answers_with_turns()))
    summary = {"pass_at_1": 0.5, **numbers.group_numbers(means)}
    assert summary["turns"]["count"] == 1.0
    metrics = numbers.evaluation_metrics("test", summary)
    assert metrics["evaluation/test/turns/count"] == 1.0
    assert not [name for name in metrics if "letters" in name]
    assert numbers.describe_numbers({"turns/count": 2.25, "turns/letters": 3.0}) == ["turns 2.2"]


@pytest.mark.usefixtures("_turns")
def test_tables_show_a_declared_number_by_its_short_or_full_name() -> None:
    for name in ("count", "turns/count"):
        column = MeasuredColumn(name="turns", evaluation="test", value=name)
        assert column.improves == "lower" and not column.in_percent
        assert read_number_of_summary({"turns": {"count": 3.0}}, name, "summary.json") == 3.0
    Panel(name="of correct ones", evaluation="test", value="count_right")
    MeasuredColumn(name="fewer", evaluation="test", value="fewer_turns", over="another row")
    with pytest.raises(ValueError, match="did you mean 'letters'"):
        MeasuredColumn(name="x", evaluation="test", value="leters")


FORKED = (
    part("aa<Parallel><Outlines></Outlines>", 2.0),
    part("\n"),
    part("<Thread>\n1:", branch=((0, 0),)),
    part("aaa\n</Thread>", 5.0, ((0, 0),)),
    part("<Thread>\n2:", branch=((0, 1),)),
    part("a\n</Thread>", 3.0, ((0, 1),)),
    part("\n"),
    part("</Parallel>a<Parallel><Outlines></Outlines>", 0.5),
    part("\n"),
    part("<Thread>\n1:", branch=((1, 0),)),
    part("a<Parallel><Outlines></Outlines>", 1.0, ((1, 0),)),
    part("\n", branch=((1, 0),)),
    part("<Thread>\n1:aa\n</Thread>", 7.0, ((1, 0), (0, 0))),
    part("<Thread>\n2:aaaaa\n</Thread>", 4.0, ((1, 0), (0, 1))),
    part("\n", branch=((1, 0),)),
    part("</Parallel>\n</Thread>", 0.25, ((1, 0),)),
    part("\n"),
    part("</Parallel>a", 1.0),
)
CRITICAL_SECONDS = 2.0 + 5.0 + 0.5 + (1.0 + 7.0 + 0.25) + 1.0
"""The slowest way through the answer: at each fork, the seconds of the slowest thread."""


def numbers_of(trajectory: Trajectory) -> dict[str, float]:
    (numbers,) = measure_threads([trajectory], threads.CODEC)
    return numbers


def test_the_critical_path_goes_through_the_slowest_thread_of_each_block() -> None:
    numbers = numbers_of(answer(*FORKED))
    assert numbers["seconds_sampling"] == pytest.approx(sum(part.seconds or 0 for part in FORKED))
    assert numbers["seconds_critical"] == pytest.approx(CRITICAL_SECONDS)
    assert critical_seconds(answer(*FORKED[:1]).segments) == 2.0


def test_seconds_are_left_out_where_not_all_were_measured() -> None:
    unmeasured = replace(FORKED[3], seconds=None)
    numbers = numbers_of(answer(*FORKED[:3], unmeasured, *FORKED[4:]))
    assert "total_num_tokens" in numbers
    assert not {"seconds_sampling", "seconds_critical"} & numbers.keys()


def test_blocks_count_to_the_depth_to_which_the_rollout_forked() -> None:
    flat = answer("".join(threads.decode(segment.token_ids) for segment in FORKED))
    forked, counts_of_written = (
        count_threads_of_answer(answer, threads.TAG_IDS) for answer in (answer(*FORKED), flat)
    )
    assert forked.threads_of_blocks == (2, 2, 1)
    assert counts_of_written.threads_of_blocks == (2, 2), "no rollout forked here: tags in a thread are text"


def test_an_answer_with_threads_has_the_numbers_of_the_reference() -> None:
    numbers = numbers_of(answer(threads.EXAMPLE))
    expected = {
        "total_num_tokens": 72,
        "num_tokens_in_the_longest_thread": 52,
        "acceleration_ratio": 20 / 72,
        "parallel_ratio": 59 / 72,
        "parallel_count": 1,
        "with_parallel": 1,
        "thread_counts_per_block": 2,
        "avg_tokens_per_parallel_block": 59,
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert numbers.keys() == set(THREAD_NUMBERS) - set(EVENTS)


def test_an_answer_without_a_block_has_no_numbers_of_blocks() -> None:
    numbers = numbers_of(answer("aaa"))
    assert numbers["with_parallel"] == 0
    assert numbers["num_tokens_in_the_longest_thread"] == numbers["total_num_tokens"] == 3
    assert not {"thread_counts_per_block", "avg_tokens_per_parallel_block"} & numbers.keys()


def test_blocks_within_threads_are_well_formed_only_where_the_rollout_forked() -> None:
    def format_correct(*segments: Segment | str) -> float:
        return numbers_of(answer(*segments))["format_correct"]

    outlines = "<Outlines><Outline>1:a</Outline></Outlines>"
    inner = f"<Parallel>{outlines}\n<Thread>\n1:a\n</Thread>\n</Parallel>"
    assert format_correct("aa") == format_correct(inner) == 1.0
    assert format_correct(inner.replace("<Outline>1:", "<Outline>2:")) == 0.0
    assert format_correct("<Parallel>aa") == 0.0
    around = (f"<Parallel>{outlines}", "\n<Thread>\n1:", "\n</Thread>\n</Parallel>")
    assert format_correct(around[0] + around[1] + inner + around[2]) == 0.0
    forked = part(inner.partition("<Thread>")[0], 1.0, ((0, 0),))
    inside = part("<Thread>" + inner.partition("<Thread>")[2], 1.0, ((0, 0), (0, 0)))
    assert format_correct(around[0], part(around[1], branch=((0, 0),)), forked, inside, around[2]) == 1.0


def measured_answers(codec: TextCodec, answers: Sequence[Trajectory]) -> list[Trajectory]:
    return answers_of(add_measured_numbers(trees_of(answers), codec))


def test_without_tags_no_number_of_threads_is_measured() -> None:
    trajectories = measured_answers(mdp.CODEC, mdp.all_trajectories())
    assert not any(trajectory.numbers for trajectory in trajectories)
    metrics = trajectory_metrics(mdp.context(), trajectories)
    assert not [name for name in metrics if name.startswith("threads/")]


ANSWERS = measured_answers(
    threads.CODEC,
    [
        answer(block(2, 4), problem="train/0", sample=0),
        answer("aaaa", problem="train/0", sample=1, right=False),
        answer(block(9), block(1, 1, 1, 1), problem="train/1", sample=0, right=False),
        answer("aa", problem="train/2", sample=0),
        answer(*FORKED, problem="train/3", sample=0),
    ],
)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_means_are_over_the_answers_of_all_ranks(world_size: int) -> None:
    def metrics_of_share(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        own_answers = contiguous_share(ANSWERS, context.ranks.rank, context.ranks.world_size)
        metrics = trajectory_metrics(context, own_answers)
        of_answers = [name for name in metrics if name.startswith("threads/") or name == "episodes/correct"]
        return own_answers, {name: metrics[name] for name in of_answers}

    _, metrics = mdp.assert_ranks_agree(world_size, metrics_of_share, codec=lambda: threads.CODEC)
    lengths = [len(answer.response_ids) for answer in ANSWERS]
    expected = {
        "threads/total_num_tokens": sum(lengths) / 5,
        "threads/total_num_tokens_max": max(lengths),
        "threads/total_num_tokens_right": (lengths[0] + 2 + lengths[4]) / 3,
        "threads/with_parallel": 3 / 5,
        "threads/with_parallel_right": 2 / 3,
        "episodes/correct": 3 / 5,
        "threads/thread_counts_per_block": (2 + (1 + 4) / 2 + 5 / 3) / 3,
        "threads/thread_counts_per_block_max": 2.5,
        "threads/seconds_critical_max": CRITICAL_SECONDS,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_where_no_answer_was_right_there_is_no_mean_over_right_ones() -> None:
    wrong = measured_answers(threads.CODEC, [answer("a", right=False)])
    metrics = trajectory_metrics(threads.context(), wrong)
    assert metrics["episodes/correct"] == 0.0
    assert not [name for name in metrics if name.endswith("_right")]


class WrittenAnswers(SingleTurn):
    """Writes two answers to each problem. The first one is wrong if the number of the problem is even."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        numbers = [int(problem.id.removeprefix("train/")) for problem in problems]
        answers = [
            answer(block(number, 3), problem=f"train/{number}", sample=sample, right=number % 2 + sample > 0)
            for number in numbers
            for sample in range(2)
        ]
        trees = add_measured_numbers(trees_of(answers), context.codec)
        metrics = trajectory_metrics(context, answers_of(trees))
        return trees, metrics | {"rollout/own": float(len(answers))}


def test_the_rounds_of_until_mixed_are_measured_as_one() -> None:
    problems = mdp.problems(10)
    context = threads.context(further_problems=FurtherProblems(lambda: problems[2:]))
    rollout = UntilMixed(rollout=WrittenAnswers(samples=2, max_tokens=9), groups=3, problems_per_round=4)
    answers, metrics = answered(rollout.run(context, problems[:2]))
    assert metrics["rollout/rounds"] == 2
    expected = trajectory_metrics(context, answers)
    assert {name: metrics[name] for name in expected} == expected
    assert len({metrics["threads/total_num_tokens"], metrics["threads/total_num_tokens_max"]}) == 2
