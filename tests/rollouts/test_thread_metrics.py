"""What is counted and measured of answers with threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.rollouts import tabular_mdp as mdp
from tests.rollouts import threads
from tests.rollouts.threads import answer, block, part
from tests.trees import answered
from treetune.rollouts.context import FurtherProblems, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import measured
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Metrics, Problem, Segment, Trajectory
from treetune_threads.fork_join import EVENTS
from treetune_threads.numbers import (
    NUMBERS,
    counts_of,
    critical_seconds,
    measure,
)

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
ON_THE_WAY = 2.0 + 5.0 + 0.5 + (1.0 + 7.0 + 0.25) + 1.0


def numbers_of(trajectory: Trajectory) -> dict[str, float]:
    (numbers,) = measure([trajectory], threads.CODEC)
    return numbers


def test_the_slowest_way_goes_through_each_blocks_slowest_thread() -> None:
    numbers = numbers_of(answer(*FORKED))
    assert numbers["seconds_sampling"] == pytest.approx(2 + 5 + 3 + 0.5 + 1 + 7 + 4 + 0.25 + 1)
    assert numbers["seconds_critical"] == pytest.approx(ON_THE_WAY)
    assert critical_seconds(answer(*FORKED[:1]).segments) == 2.0


def test_seconds_that_were_not_all_measured_are_not_told() -> None:
    unmeasured = replace(FORKED[3], seconds=None)
    numbers = numbers_of(answer(*FORKED[:3], unmeasured, *FORKED[4:]))
    assert "total_num_tokens" in numbers
    assert not {"seconds_sampling", "seconds_critical"} & numbers.keys()


def test_blocks_count_as_deep_as_they_were_rolled_out() -> None:
    counts = counts_of(answer(*FORKED), threads.TAG_IDS)
    assert counts.threads_of_blocks == (2, 2, 1)
    flat = counts_of(
        answer("".join(threads.decode(segment.token_ids) for segment in FORKED)), threads.TAG_IDS
    )
    assert flat.threads_of_blocks == (2, 2), "nobody forked here: tags in a thread are text"


def test_an_answer_has_the_references_numbers() -> None:
    numbers = numbers_of(answer(threads.EXAMPLE))
    assert numbers["total_num_tokens"] == 72
    assert numbers["num_tokens_in_the_longest_thread"] == 52
    assert numbers["acceleration_ratio"] == pytest.approx(20 / 72)
    assert numbers["parallel_ratio"] == pytest.approx(59 / 72)
    assert numbers["parallel_count"] == numbers["with_parallel"] == 1
    assert numbers["thread_counts_per_block"] == 2
    assert numbers["avg_tokens_per_parallel_block"] == 59
    assert numbers.keys() == set(NUMBERS) - set(EVENTS)


def test_an_answer_without_a_block_has_no_numbers_of_blocks() -> None:
    numbers = numbers_of(answer("aaa"))
    assert numbers["with_parallel"] == 0
    assert numbers["num_tokens_in_the_longest_thread"] == numbers["total_num_tokens"] == 3
    assert not {"thread_counts_per_block", "avg_tokens_per_parallel_block"} & numbers.keys()


def test_the_form_is_told_and_blocks_within_threads_are_well_formed_only_where_they_were_rolled_out() -> None:
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


def test_without_tags_nothing_is_told() -> None:
    trajectories = answers_of(measured(trees_of(mdp.all_trajectories()), mdp.CODEC))
    assert not any(trajectory.numbers for trajectory in trajectories)
    metrics = trajectory_metrics(mdp.context(), trajectories)
    assert not [name for name in metrics if name.startswith("threads/")]


ANSWERS = answers_of(
    measured(
        trees_of(
            [
                answer(block(2, 4), problem="train/0", sample=0),
                answer("aaaa", problem="train/0", sample=1, right=False),
                answer(block(9), block(1, 1, 1, 1), problem="train/1", sample=0, right=False),
                answer("aa", problem="train/2", sample=0),
                answer(*FORKED, problem="train/3", sample=0),
            ]
        ),
        threads.CODEC,
    )
)


def metrics_of_share(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
    own = ANSWERS[
        5 * context.ranks.rank // context.ranks.world_size : 5
        * (context.ranks.rank + 1)
        // context.ranks.world_size
    ]
    return own, trajectory_metrics(context, own)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_means_are_over_the_answers_of_all_ranks_however_many_calls_they_took(world_size: int) -> None:
    ranks = mdp.on_ranks(world_size, metrics_of_share, codec=lambda: threads.CODEC)
    alone = trajectory_metrics(threads.context(), ANSWERS)
    of_answers = [name for name in alone if name.startswith("threads/") or name == "episodes/correct"]
    assert all(metrics[name] == alone[name] for _, metrics in ranks for name in of_answers)
    lengths = [len(one.response_ids) for one in ANSWERS]
    assert alone["threads/total_num_tokens"] == pytest.approx(sum(lengths) / 5)
    assert alone["threads/total_num_tokens_max"] == max(lengths)
    assert alone["threads/total_num_tokens_right"] == pytest.approx((lengths[0] + 2 + lengths[4]) / 3)
    assert alone["threads/with_parallel"] == pytest.approx(3 / 5)
    assert alone["threads/with_parallel_right"] == pytest.approx(2 / 3)
    assert alone["episodes/correct"] == pytest.approx(3 / 5)
    assert alone["threads/thread_counts_per_block"] == pytest.approx((2 + (1 + 4) / 2 + 5 / 3) / 3)
    assert alone["threads/thread_counts_per_block_max"] == 2.5
    assert alone["threads/seconds_critical_max"] == ON_THE_WAY


def test_where_nothing_was_right_there_is_no_mean_of_it() -> None:
    metrics = trajectory_metrics(
        threads.context(), answers_of(measured(trees_of([answer("a", right=False)]), threads.CODEC))
    )
    assert metrics["episodes/correct"] == 0.0
    assert not [name for name in metrics if name.endswith("_right")]


class Written(SingleTurn):
    """Two answers to each problem, of which the first is wrong to those with an even number."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        numbers = [int(problem.id.removeprefix("train/")) for problem in problems]
        written = [
            answer(block(number, 3), problem=f"train/{number}", sample=sample, right=number % 2 + sample > 0)
            for number in numbers
            for sample in range(2)
        ]
        trees = measured(trees_of(written), context.codec)
        metrics = trajectory_metrics(context, answers_of(trees))
        return trees, metrics | {"rollout/own": float(len(written))}


def test_rounds_until_groups_are_mixed_are_measured_as_one() -> None:
    problems = mdp.problems(10)
    context = threads.context(services=[FurtherProblems(lambda: problems[2:])])
    rollout = UntilMixed(rollout=Written(samples=2, max_tokens=9), groups=3, problems_per_round=4)
    written, metrics = answered(rollout.run(context, problems[:2]))
    assert metrics["rollout/rounds"] == 2
    expected = trajectory_metrics(context, written)
    assert {name: metrics[name] for name in expected} == expected
    assert len({metrics["threads/total_num_tokens"], metrics["threads/total_num_tokens_max"]}) == 2
