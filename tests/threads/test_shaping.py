"""Rewards for short critical paths.

These tests promise:

* A right answer earns for a path shorter than its reference, as published and within clip and floor.
* A useless thread earns more only against the published reference.
* Wrong answers earn nothing and are compared with nothing.
* A running reference is the same on any number of ranks, and measured references of other data are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetune.parts  # noqa: F401  (registers them)
from tests.support import tabular_mdp as mdp
from tests.support import threads
from tests.support.columns import plain
from tests.support.threads import EXAMPLE, USELESS_THREAD, answer, block, part
from tests.support.trees import answered
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext, ShapingMemory
from treetune.rollouts.shaping import WrongAnswers, apply_shaping
from treetune.threads.shaping import (
    EPSILON,
    Acceleration,
    AccelerationForm,
    GroupLengthPenalty,
    Measured,
    OfDemonstration,
    OfGroup,
    ReferenceLength,
    Running,
    Total,
    acceleration,
    group_penalties,
    measured_lengths,
)
from treetune.tree import trees_of
from treetune.vocabulary import Grade, Metrics, Trajectory

SEQUENTIAL = 60
"""The assumed number of tokens that the reference's example takes without threads."""


def make_acceleration(reference: ReferenceLength, **changed: Any) -> Acceleration:
    settings: dict[str, Any] = {"weight": 0.5, "clip": 0.9, "form": "saved", "threads": "written"}
    return Acceleration(reference=reference, **settings | changed)


@dataclass(frozen=True, kw_only=True)
class TaskWithDemonstrations(mdp.LetterTask):
    """Has a demonstration with threads, and one without them of `SEQUENTIAL` tokens with the end token."""

    def demonstration(self, problem: Any, seed: int) -> str:
        return EXAMPLE

    def sequential_demonstration(self, problem: Any, seed: int) -> str:
        return "a" * (SEQUENTIAL - 1)


def measured_file(folder: Path, rows: Sequence[tuple[str, float, int]]) -> str:
    path = folder / "answers.jsonl"
    lines = [
        {"problem": name, "prompt": "?", "reward": reward, "tokens": tokens} for name, reward, tokens in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("critical", "reference", "saved", "ratio"),
    [(60, 60, 0, 0), (45, 60, 1 / 4, 1 / 3), (90, 60, -1 / 2, -1 / 3), (0, 0, 0, 0)],
)
def test_both_forms_are_0_at_the_reference_and_rise_as_the_path_gets_shorter(
    critical: int, reference: int, saved: float, ratio: float
) -> None:
    accelerations = [acceleration(critical, reference, form) for form in ("saved", "ratio")]
    assert accelerations == pytest.approx([saved, ratio])


@pytest.mark.parametrize(
    ("form", "critical", "earned"),
    [("saved", 52, 0.2), ("ratio", 52, 0.2), ("saved", 65, 7 / 72), ("ratio", 65, 7 / 65)],
)
def test_the_published_forms_and_their_clip(form: AccelerationForm, critical: int, earned: float) -> None:
    threaded = "<Parallel>" + threads.thread(72 - critical) * 2 + "</Parallel>"
    threaded_answer = answer(threaded + "a" * (72 - len(threads.encode(threaded))))
    bonuses = make_acceleration(Total(), form=form, clip=0.2).bonuses(threads.context(), [threaded_answer])
    assert bonuses == [pytest.approx(0.5 * earned)]


def test_wrong_answers_get_nothing_and_are_compared_with_nothing() -> None:
    group = [answer(EXAMPLE), answer("a" * 200, sample=1, right=False), answer(EXAMPLE, sample=2)]
    for reference in (Total(), OfGroup()):
        bonuses, numbers = make_acceleration(reference, opening=0.25).assess(threads.context(), group)
        assert (bonuses[1], len(numbers["without_reference"])) == (0.0, 2)
    assert make_acceleration(OfGroup()).bonuses(threads.context(), group) == [0.0, 0.0, 0.0]


def test_a_group_compares_with_the_median_of_the_others() -> None:
    lengths = [40, 60, 50, 100]
    group = [answer("a" * length, sample=sample) for sample, length in enumerate(lengths)]
    group.append(answer("a", sample=4, right=False))
    bonuses, numbers = make_acceleration(OfGroup(), floor=-0.9).assess(threads.context(), group)
    assert numbers["reference_tokens"] == [60, 50, 60, 50]
    expected = [0.5 * (1 - length / median) for length, median in zip(lengths, (60, 50, 60, 50), strict=True)]
    expected[3] = 0.5 * -0.9
    assert bonuses == [*map(pytest.approx, expected), 0.0]


def apply_shapings(
    shapings: Sequence[Shaping], group: Sequence[Trajectory]
) -> tuple[list[Trajectory], Metrics]:
    return answered(apply_shaping(threads.context(), shapings, trees_of(group)))


def test_an_answer_that_is_the_only_right_one_has_no_reference_and_is_counted() -> None:
    group = [answer(EXAMPLE), answer("a", sample=1, right=False), answer("a", problem="train/1")]
    earned, metrics = apply_shapings([make_acceleration(OfGroup(), opening=0.25)], group)
    assert [answer_with_bonus.bonus for answer_with_bonus in earned] == [0.25, 0.0, 0.0]
    assert metrics["acceleration/without_reference"] == 1.0
    assert "acceleration/unclipped" not in metrics


def test_metrics_describe_the_comparison_with_the_reference() -> None:
    group = [answer(EXAMPLE), answer("a" * 72, sample=1), answer("a", sample=2, right=False)]
    _, metrics = apply_shapings([make_acceleration(Total(), clip=0.2)], group)
    expected = {
        "shaping/acceleration": 0.5 * 0.2 / 3,
        "acceleration/without_reference": 0,
        "acceleration/reference_tokens": 72,
        "acceleration/unclipped": 20 / 72 / 2,
        "acceleration/at_clip": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_the_floor_limits_the_loss_for_a_slow_answer() -> None:
    slow = [answer("a" * 100), answer("a" * 600, sample=1)]
    context = threads.context(task=TaskWithDemonstrations())
    assert make_acceleration(OfDemonstration()).bonuses(context, slow) == [0.0, 0.0]
    below = make_acceleration(OfDemonstration(), floor=-0.8).bonuses(context, slow)
    assert below == [pytest.approx(0.5 * (1 - 100 / SEQUENTIAL)), pytest.approx(0.5 * -0.8)]


def test_only_threads_that_were_sampled_in_parallel_shorten_the_path_unless_configured_as_published() -> None:
    written_answer = answer("<Parallel><Outlines></Outlines>\n" + threads.thread(9) * 2 + "\n</Parallel>")
    forked_answer = answer(
        "<Parallel><Outlines></Outlines>",
        part("\n"),
        part("<Thread>", branch=((0, 0),)),
        part("a" * 9 + "</Thread>", 1.0, ((0, 0),)),
        part("<Thread>", branch=((0, 1),)),
        part("a" * 9 + "</Thread>", 1.0, ((0, 1),)),
        part("\n"),
        "</Parallel>",
    )
    assert plain(written_answer.response_ids) == plain(forked_answer.response_ids)
    for counted, saving in (("written", [1, 1]), ("forked", [0, 1])):
        bonuses = make_acceleration(Total(), threads=counted).bonuses(
            threads.context(), [written_answer, forked_answer]
        )
        assert bonuses == pytest.approx(
            [0.5 * count * 9 / len(written_answer.response_ids) for count in saving]
        )


def references(folder: Path) -> dict[str, ReferenceLength]:
    rows = [("train/0", 1.0, SEQUENTIAL - 5), ("train/0", 1.0, SEQUENTIAL + 5), ("train/0", 0.0, 999)]
    return {
        "group": OfGroup(),
        "demonstration": OfDemonstration(),
        "running": Running(),
        "measured": Measured(answers=measured_file(folder, rows)),
    }


@pytest.mark.parametrize("form", ["saved", "ratio"])
@pytest.mark.parametrize("name", ["group", "demonstration", "running", "measured"])
def test_a_useless_thread_pays_only_with_the_published_reference(
    name: str, form: AccelerationForm, tmp_path: Path
) -> None:
    """With a third thread of 30 tokens the path gets longer (52 to 54), and the published ratio better."""

    # Two other right answers, one of them sequential.
    siblings = [answer("a" * SEQUENTIAL, sample=1), answer(block(30, 20) + "a" * 20, sample=2)]

    def earned(text: str, reference: ReferenceLength) -> float:
        shaping = make_acceleration(reference, form=form, floor=-0.9)
        return shaping.bonuses(threads.context(task=TaskWithDemonstrations()), [answer(text), *siblings])[0]

    honest, hacked = earned(EXAMPLE, Total()), earned(USELESS_THREAD, Total())
    if form == "saved":
        assert (honest, hacked) == (pytest.approx(0.5 * 20 / 72), pytest.approx(0.5 * 50 / 104))
        assert (round(2 * honest, 3), round(2 * hacked, 3)) == (0.278, 0.481)
    assert hacked > honest
    reference = references(tmp_path)[name]
    honest, hacked = earned(EXAMPLE, reference), earned(USELESS_THREAD, reference)
    assert hacked < honest
    expected = {"saved": 1 - 52 / SEQUENTIAL, "ratio": SEQUENTIAL / 52 - 1}[form]
    if name != "group":
        assert honest == pytest.approx(0.5 * expected)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 30), st.integers(1, 90))
def test_no_further_thread_ever_earns_more_against_a_sequential_answer(
    lengths: list[int], further: int, sequential: int
) -> None:
    bonuses = []
    for of_threads in (lengths, [*lengths, further]):
        threaded = answer(block(*of_threads), problem="train/1")
        sequential_answer = answer("a" * sequential, problem="train/1", sample=1)
        bonuses.append(
            make_acceleration(Running(), floor=-9.0).bonuses(
                threads.context(), [threaded, sequential_answer]
            )[0]
        )
    assert bonuses[1] <= bonuses[0]


def test_a_running_length_follows_the_iterations_and_is_remembered_for_each_problem() -> None:
    shaping = make_acceleration(Running(decay=0.75), floor=-9.0)
    memory = ShapingMemory()
    rounds = [
        [answer("a" * 40), answer("a" * 60, sample=1), answer("a", sample=2, right=False)],
        [answer(block(6, 6)), answer("a" * 30, problem="train/1")],
        [answer("a" * 90), answer(block(3, 5), problem="train/1")],
        [answer("a", problem="train/2", right=False), answer(block(3), problem="train/3")],
    ]
    numbers_by_iteration = []
    for iteration, group in enumerate(rounds):
        context = threads.context(shaping_memory=memory, iteration=iteration)
        numbers_by_iteration.append(shaping.assess(context, group)[1])
        memory = ShapingMemory(json.loads(json.dumps(context.shaping_memory)))
    assert [numbers["reference_tokens"] for numbers in numbers_by_iteration] == [
        [50, 50],
        [50, 30],
        [60, 30],
        [],
    ]
    assert numbers_by_iteration[3]["without_reference"] == [1.0]
    assert memory == {"acceleration": {"train/0": 60.0, "train/1": 30.0}}


ANSWERS = [
    answer("a" * (10 * problem + 5 * sample + 1), problem=f"train/{problem}", sample=sample)
    for problem in range(5)
    for sample in range(2)
]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_all_ranks_remember_the_same_lengths(world_size: int) -> None:
    def run_share(context: RolloutContext) -> tuple[list[float], tuple[Metrics, ShapingMemory]]:
        own_problems = contiguous_share(range(5), context.ranks.rank, context.ranks.world_size)
        memory = ShapingMemory({"acceleration": {"train/1": 40.0}})
        trees = trees_of(
            [
                answer_of_problem
                for problem in own_problems
                for answer_of_problem in ANSWERS[2 * problem : 2 * problem + 2]
            ]
        )
        shapings = [make_acceleration(Running(), floor=-0.9)]
        context = replace(context, shaping_memory=memory)
        earned, metrics = answered(apply_shaping(context, shapings, trees))
        return [answer_of_problem.bonus for answer_of_problem in earned], (metrics, memory)

    _, (_, memory) = mdp.assert_ranks_agree(world_size, run_share, codec=lambda: threads.CODEC)
    assert set(memory["acceleration"]) == {f"train/{problem}" for problem in range(5)}


def test_measured_lengths_are_means_over_right_answers(tmp_path: Path) -> None:
    rows = [("train/0", 1.0, 10), ("train/0", 1.0, 30), ("train/0", 0.0, 500), ("train/1", 0.0, 50)]
    shaping = make_acceleration(Measured(answers=measured_file(tmp_path, rows)))
    shaping.check_at_start([answer("a").problem])
    group = [answer("a" * 10), answer("a", problem="train/1"), answer("a", problem="train/2")]
    bonuses, numbers = shaping.assess(threads.context(), group)
    assert bonuses == [0.25, 0.0, 0.0]
    assert numbers["without_reference"] == [0.0, 1.0, 1.0]
    assert numbers["reference_tokens"] == [20]


def test_measured_lengths_of_other_data_are_refused_before_a_run_begins(tmp_path: Path) -> None:
    problem = answer("a").problem
    path = measured_file(tmp_path, [("train/1", 1.0, 5)])
    for file, trained_problem, message in (
        (str(tmp_path / "none.jsonl"), problem, "run the evaluation of the sequential experiment first"),
        (path, problem, r"to none of the 1 that are trained on.*split 'train'"),
        (path, replace(problem, id="train/1", prompt="2+2="), r"'train/1' reads '\?' .* and '2\+2=' here"),
    ):
        with pytest.raises(ValueError, match=message):
            Measured(answers=file).check_at_start([trained_problem])
    for text, message in (
        (Path(path).read_text() + '{"problem": "train/2"', r"line 2 of .*damaged.jsonl is not a row"),
        ('{"id": 3}\n', r"line 1 of .*KeyError"),
    ):
        (tmp_path / "damaged.jsonl").write_text(text)
        with pytest.raises(ValueError, match=message):
            measured_lengths(str(tmp_path / "damaged.jsonl"))


def test_a_wrong_answer_gets_its_penalty_whatever_its_score() -> None:
    right, wrong = answer("a"), answer("a", right=False)
    group = [right, wrong, replace(wrong, grade=Grade(0.1, "ok")), replace(right, grade=Grade(1.1, "ok"))]
    assert WrongAnswers(penalty=1.0).bonuses(threads.context(), group) == [0, -1, -1, 0]


def test_the_group_length_penalty_is_that_of_the_reference() -> None:
    settings: dict[str, Any] = {"threshold": 0.8, "weight": 0.2, "window": 10_000}
    lengths = [3000, 8000, 2000, 30_000, 4000]
    shares, alpha = [0.1, 0.6, 0.0, 1.0, 0.2], 0.2 * EPSILON / (0.2 + EPSILON)
    for right, weight in ([1, 1, 1, 1, 0], alpha), ([1] * 5, 0.2), ([1, 1, 1, 0, 0], 0.0):
        penalties = group_penalties(lengths, list(map(bool, right)), **settings)
        assert penalties == pytest.approx([weight * share for share in shares])
    assert group_penalties([5], [True], **settings | {"threshold": 1.0}) == [0.0]


def test_the_group_length_penalty_goes_by_critical_paths() -> None:
    group = [answer("a" * 52), answer(EXAMPLE, sample=1), answer("a" * 72, sample=2)]
    bonuses = GroupLengthPenalty(window=40).bonuses(threads.context(), group)
    assert bonuses == pytest.approx([0.0, 0.0, -0.2 * 20 / 40])


def fragment(name: str) -> tuple[Shaping, ...]:
    config = load([f"shaping/{name}.jsonnet"], environ={"APP_SEQUENTIAL_ANSWERS": "answers.jsonl"})
    return tuple(build(Shaping, part, Explanation(config)) for part in config.data["shaping"])


def test_the_published_rewards_are_presets() -> None:
    group = [
        answer(EXAMPLE),
        answer(block(3, 3) + "a" * 80, sample=1),
        answer(EXAMPLE, sample=2, right=False),
    ]
    threaded = len(group[1].response_ids)
    expected = {
        "readme": [1 + 0.5 * 0.2, 1 + 0.5 * (threaded / (threaded - 3) - 1), 0.0],
        "code": [1 + 0.5 * 0.2, 1 + 0.5 * 3 / threaded, -1.0],
    }
    for name, earned in expected.items():
        trajectories, _ = apply_shapings(fragment(f"acceleration_published_{name}"), group)
        assert [answer_with_reward.reward for answer_with_reward in trajectories] == pytest.approx(earned)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("sequential", OfDemonstration()),
        ("sequential_running", Running(decay=0.8)),
        ("sequential_measured", Measured(answers="answers.jsonl")),
        ("group", OfGroup()),
    ],
)
def test_there_is_a_preset_for_each_reference_that_no_useless_thread_exploits(
    name: str, reference: ReferenceLength
) -> None:
    (shaping,) = fragment(f"acceleration_{name}")
    assert shaping == Acceleration(weight=0.5, clip=0.2, form="saved", reference=reference, floor=0.0)
    assert shaping.remembers == (name == "sequential_running")
    assert fragment("group_length_penalty") == (GroupLengthPenalty(),)
