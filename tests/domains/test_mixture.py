"""Promises of a mixture of domains, and of drawing problems:

* an iteration has as many problems as asked for, all different, and draws depend on seed and iteration alone;
* a domain's draws, grades, steps and sampling are the same whichever domains stand beside it;
* weights are kept on average, whatever the rounding, and a domain that runs short is replaced by the others;
* in epochs every problem comes once before any comes again, and between iterations all are equally likely;
* a curriculum and the preference for problems of mixed success follow what was measured.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.domains.mixture import (
    Curriculum,
    Difficulty,
    Domain,
    DomainTask,
    Fixed,
    Mixture,
    Proportional,
    Temperature,
    Weighting,
    allocate_problems,
    first_of_shuffle,
)
from treetune.engine.requests import SamplingParams
from treetune.exceptions import NoSplit
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import Split, Task
from treetune.tasks.countdown import Countdown
from treetune.tasks.drawing import DrawingContext, Replacement, draw_problems
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.rows import Gsm8k
from treetune.vocabulary import Problem

GRADER, FIXED = FinalAnswer(marker="#"), Fixed()
PARAMS = SamplingParams(max_tokens=100, stop=("rollout's",))


@dataclass(frozen=True, kw_only=True)
class Rated(Task):
    """A task of `count` problems, whose pass rates rise from 0 to 1; a step is a character."""

    count: int
    grader: Grader = GRADER
    splits: tuple[Split, ...] = ("train",)

    def problems(self, split: Split) -> Sequence[Problem]:
        self.size(split)
        rates = [i / (self.count - 1) if self.count > 1 else 0.5 for i in range(self.count)]
        return [Problem(f"{split}/{i}", f"{i}?", str(i), {"rate": rate}) for i, rate in enumerate(rates)]

    def size(self, split: Split) -> int:
        if split not in self.splits:
            raise NoSplit(f"no {split} split: name another")
        return self.count

    def step_boundaries(self, response: str) -> list[int]:
        return list(range(len(response) + 1))


def mixture(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None = None, weighting: Weighting = FIXED
) -> Mixture:
    """Make a mixture with a domain of each size; the weights are 1 unless others are named."""
    weights = weights or dict.fromkeys(sizes, 1.0)
    domains = {name: Domain(task=Rated(count=size), weight=weights[name]) for name, size in sizes.items()}
    return Mixture(domains=domains, weighting=weighting)


def draw(task: Mixture, count: int, iteration: int = 0, **more: Any) -> list[Problem]:
    return task.drawing_rule().draw(
        task.problems("train"), count, DrawingContext(more.pop("seed", 7), iteration, **more)
    )


def ids(problems: Sequence[Problem], domain: str = "") -> list[str]:
    """List the ids of the problems, or of those of one domain."""
    return [problem.id for problem in problems if domain in ("", problem.domain)]


SIZES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1)
MODES: Any = st.sampled_from(["between_iterations", "epochs"])


@given(SIZES, st.integers(0, 5), MODES, st.data())
def test_an_iteration_has_the_asked_number_of_different_problems(
    sizes: dict[str, int], iteration: int, mode: Replacement, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, sum(sizes.values())))
    weights = {name: data.draw(st.floats(0.01, 10)) for name in sizes}
    drawn = draw(mixture(sizes, weights), count, iteration, replacement=mode)
    assert len(drawn) == len(set(ids(drawn))) == count


@given(SIZES, st.integers(1, 8), st.integers(0, 5), MODES)
def test_another_domain_beside_it_changes_nothing_for_a_domain(
    sizes: dict[str, int], per_domain: int, iteration: int, mode: Replacement
) -> None:
    sizes = {name: size + per_domain for name, size in sizes.items()}  # so that no domain runs short
    alone = draw(mixture(sizes), per_domain * len(sizes), iteration, replacement=mode)
    with_new_domain = draw(
        mixture({**sizes, "new": 40}), per_domain * (len(sizes) + 1), iteration, replacement=mode
    )
    for name in sizes:
        assert ids(alone, name) == ids(with_new_domain, name)
    assert len(ids(with_new_domain, "new")) == per_domain


@given(SIZES, st.integers(0, 5))
def test_a_smaller_draw_of_a_domain_is_the_beginning_of_a_larger_one(
    sizes: dict[str, int], iteration: int
) -> None:
    many = draw(mixture(sizes), sum(sizes.values()), iteration)
    few = draw(mixture(sizes), max(1, sum(sizes.values()) // 2), iteration)
    for name in sizes:
        first_ids = ids(few, name)
        assert first_ids == ids(many, name)[: len(first_ids)]


@given(SIZES, MODES, st.integers(0, 3))
def test_draws_depend_on_seed_and_iteration_alone(
    sizes: dict[str, int], mode: Replacement, iteration: int
) -> None:
    count = max(1, sum(sizes.values()) // 2)
    task = mixture(sizes)
    draw(task, count, iteration + 1, replacement=mode)
    in_reversed_order = mixture(dict(reversed(sizes.items())))
    drawn = ids(draw(task, count, iteration, replacement=mode))
    assert drawn == ids(draw(in_reversed_order, count, iteration, replacement=mode))
    large = mixture({"a": 100, "b": 100})
    assert ids(draw(large, 20, iteration, seed=1)) != ids(draw(large, 20, iteration, seed=2))


@given(SIZES, st.integers(0, 1000))
@settings(max_examples=30)
def test_in_epochs_every_problem_of_a_domain_comes_once_before_any_comes_again(
    sizes: dict[str, int], seed: int
) -> None:
    task = mixture(sizes, {name: 1.0 + number for number, name in enumerate(sizes)})
    count = max(1, sum(sizes.values()) // 3)
    stream = []
    for iteration in range(8):
        stream += draw(task, count, iteration, replacement="epochs", seed=seed)
    for name, size in sizes.items():
        ids_of_domain = ids(stream, name)
        for start in range(0, len(ids_of_domain) - size + 1, size):
            assert len(set(ids_of_domain[start : start + size])) == size


@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))))
def test_a_shorter_beginning_of_a_shuffle_is_the_beginning_of_a_longer_one(sizes: tuple[int, int]) -> None:
    size, count = sizes
    all_numbers = list(first_of_shuffle(size, size, random.Random(1)))
    assert sorted(all_numbers) == list(range(size))
    assert list(first_of_shuffle(size, count, random.Random(1))) == all_numbers[:count]


def test_a_small_weight_has_its_share_over_many_iterations() -> None:
    task = mixture({"large": 500, "small": 500, "third": 500}, {"large": 9.7, "small": 0.3, "third": 2.0})
    drawn: Counter[str] = Counter()
    for iteration in range(1000):
        drawn.update(problem.domain for problem in draw(task, 12, iteration))
    assert drawn["small"] == pytest.approx(300, abs=40)  # 4 standard deviations are below 68
    assert drawn["third"] == 2000
    assert drawn.total() == 12_000
    # Shares that are whole numbers are kept in every iteration.
    for iteration in range(20):
        drawn = Counter(
            problem.domain for problem in draw(mixture({"a": 90, "b": 90, "c": 90}), 9, iteration)
        )
        assert drawn == {"a": 3, "b": 3, "c": 3}


def test_a_domain_that_runs_short_gives_all_and_the_others_the_rest() -> None:
    drawn = allocate_problems(
        {"a": 8.0, "b": 1.0, "c": 1.0}, {"a": 4, "b": 50, "c": 50}, 24, random.Random(0)
    )
    assert drawn == {"a": 4, "b": 10, "c": 10}
    with pytest.raises(ValueError, match=r"problems_per_iteration is 9, and the domains .* have 8 problems"):
        allocate_problems({"a": 1.0, "b": 2.0}, {"a": 4, "b": 4}, 9, random.Random(0))


def test_a_domain_of_weight_0_is_measured_and_never_trained_on() -> None:
    learnt = Domain(task=Rated(count=5, splits=("train", "test")))
    measured = Domain(task=Rated(count=3, splits=("test",)), weight=0)
    task = Mixture(domains={"learnt": learnt, "measured": measured})
    assert {problem.domain for problem in task.problems("train")} == {"learnt"}
    assert (task.size("train"), task.size("test")) == (5, 8)
    alternating = ["learnt/test/0", "measured/test/0", "learnt/test/1", "measured/test/1"]
    assert ids(task.problems("test"))[:4] == alternating
    with pytest.raises(ValueError, match="no domain of the mixture has a validation split"):
        task.problems("validation")
    with pytest.raises(ValueError, match="domain 'a': no train split"):
        Mixture(domains={"a": Domain(task=Rated(count=5, splits=("test",)))}).problems("train")


def test_weights_by_size_and_temperature() -> None:
    sizes = {"large": 400, "small": 100}

    def weights(weighting: Weighting) -> dict[str, float]:
        task = mixture(sizes, weighting=weighting)
        return dict(task.drawing_rule().metrics(task.problems("train"), DrawingContext(0, 0)))

    assert weights(Proportional()) == {"domains/large/weight": 0.8, "domains/small/weight": 0.2}
    assert weights(Temperature(temperature=2.0))["domains/large/weight"] == pytest.approx(20 / 30)
    assert weights(Temperature(temperature=1e9))["domains/large/weight"] == pytest.approx(0.5)


def test_a_curriculum_follows_what_was_measured() -> None:
    """The expected weights are computed by hand: a running mean of 4 p (1 - p), and a floor."""
    measured = [
        {"domains/easy/learnable": 0.0, "domains/medium/learnable": 0.25},
        {"domains/medium/learnable": 0.2},  # no easy problem was drawn
        {"domains/easy/learnable": 0.1, "domains/medium/learnable": 0.0},
    ]
    rule = Curriculum(rate=0.5, floor=0.1)
    sizes, fixed_weights = {"easy": 10, "medium": 10}, {"easy": 1.0, "medium": 3.0}
    drawing = DrawingContext(0, 3, recorded=measured.__getitem__)
    weights = list(rule.over_iterations(fixed_weights, sizes, drawing))
    mean_of_easy, mean_of_medium = [1.0, 0.5, 0.5, 0.45], [1.0, 1.0, 0.9, 0.45]
    assert [of_iteration["easy"] for of_iteration in weights] == pytest.approx(
        [0.1 + mean for mean in mean_of_easy]
    )
    assert [of_iteration["medium"] for of_iteration in weights] == pytest.approx(
        [3 * (0.1 + mean) for mean in mean_of_medium]
    )


def test_difficulty_leaves_training_problems_out_and_measured_ones_in() -> None:
    rated = Rated(count=11, splits=("train", "test"))
    task = Mixture(
        domains={"a": Domain(task=rated, difficulty=Difficulty(field="rate", above=0.0, below=0.9))}
    )
    assert [problem.gold for problem in task.problems("train")] == list("12345678")
    assert len(task.problems("test")) == 11
    assert task.size("train") is None
    lacking = Mixture(domains={"a": Domain(task=rated, difficulty=Difficulty(field="pass_rate"))})
    with pytest.raises(ValueError, match=r"domain 'a': problem 'train/0' has no number 'pass_rate'.*'rate'"):
        lacking.problems("train")


def test_stop_and_budget_are_the_domains_own() -> None:
    with_stop = Gsm8k(stop=("task's",))
    task = Mixture(
        domains={
            "nothing_set": Domain(task=Rated(count=3)),
            "set_by_task": Domain(task=with_stop, max_tokens=30),
            "set_by_domain": Domain(task=with_stop, stop=("domain's",), max_tokens=300),
            "no_stop_of_task": Domain(task=Gsm8k(stop=())),
            "no_stop_of_domain": Domain(task=with_stop, stop=()),
        }
    )

    def sampling(domain: str) -> SamplingParams:
        return task.of(Problem("x", "x", "x", domain=domain)).adjust_sampling(PARAMS)

    assert sampling("nothing_set") == PARAMS
    assert sampling("set_by_task") == SamplingParams(max_tokens=30, stop=("task's",))
    # A domain's bound can't raise the rollout's.
    assert sampling("set_by_domain") == SamplingParams(max_tokens=100, stop=("domain's",))
    assert sampling("no_stop_of_task") == PARAMS
    assert sampling("no_stop_of_domain") == SamplingParams(max_tokens=100)


def test_each_answer_is_graded_and_split_into_steps_by_its_domain() -> None:
    sums = AdditionChain(train_size=5, validation_size=1, test_size=1)
    numbers = Countdown(train_size=5, validation_size=1, test_size=1, operators=("+", "-"))
    task = Mixture(domains={"sums": Domain(task=sums), "numbers": Domain(task=numbers)})
    for problem in task.problems("train"):
        answer = task.of(problem).demonstration(problem, 0)
        assert task.grader.grade(answer, problem).correct
        assert task.grader.of(problem) == (sums if problem.domain == "sums" else numbers).grader
        assert task.of(problem).step_boundaries(answer)[-1] == len(answer)
    assert set(sums.alphabet()) | set(numbers.alphabet()) == set(task.alphabet())
    assert set(task.grader.parts()) == {sums.grader, numbers.grader}


def test_further_problems_are_those_that_were_not_drawn() -> None:
    task = mixture({"a": 40, "b": 10}, {"a": 1.0, "b": 1.0})
    problems = task.problems("train")
    drawing = DrawingContext(3, 2)
    taken = task.drawing_rule().draw(problems, 10, drawing)
    further = task.drawing_rule().draw_further(problems, taken, drawing)
    assert sorted(ids(taken) + ids(further)) == sorted(ids(problems))
    assert Counter(problem.domain for problem in further[:10]) == {"a": 5, "b": 5}


def test_a_bad_name_of_a_domain_and_weights_of_zero_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="'a/b', which is not a valid name"):
        Mixture(domains={"a/b": Domain(task=Rated(count=2))})
    with pytest.raises(ValueError, match="all domains have the weight 0"):
        Mixture(domains={"a": Domain(task=Rated(count=2), weight=0)})


def test_problems_that_were_right_in_part_are_drawn_more_readily() -> None:
    task = Mixture(domains={"a": Domain(task=Rated(count=100))}, prefer_mixed=4.0)
    rates = {"a/train/0": 0.5, "a/train/1": 0.25, "a/train/2": 1.0, "a/train/3": 0.0}
    earlier = [rates, {"a/train/1": 0.0}]  # the latest rate of a problem counts
    drawn: Counter[str] = Counter()
    for seed in range(1000):
        problems = draw(task, 5, 2, seed=seed, pass_rates=earlier.__getitem__)
        assert len(set(ids(problems))) == 5
        drawn.update(ids(problems))
    draws_of_others = sum(drawn.values()) - drawn["a/train/0"]
    # It weighs 4, and the 99 others 1 each: the chance to be among five draws is about 1 - (99/103)**5.
    assert drawn["a/train/0"] == pytest.approx(1000 * (1 - (99 / 103) ** 5), abs=70)
    assert drawn["a/train/1"] < 90 > draws_of_others / 99, "all others are as likely as ever"
    three = ids(draw(task, 3, 2, pass_rates=earlier.__getitem__))
    nine = ids(draw(task, 9, 2, pass_rates=earlier.__getitem__))
    assert three == nine[:3]


def test_where_nothing_was_right_in_part_draws_are_as_without_preference() -> None:
    domains = {"a": Domain(task=Rated(count=30))}
    preferring, plain = Mixture(domains=domains, prefer_mixed=4.0), Mixture(domains=domains)
    pass_rates = [{"a/train/0": 1.0}]
    assert draw(preferring, 9, 1, pass_rates=pass_rates.__getitem__) == draw(plain, 9, 1)


def test_a_domain_hands_on_all_that_its_task_can_do() -> None:
    """A method that is added to Task must be added to the wrapper of a mixture's domain, too."""
    of_mixture_alone = {"drawing_rule", "answer_boundaries"}  # the latter is made of `step_boundaries`
    names_of_task = {name for name in (*vars(Task), *Task.__annotations__) if not name.startswith("_")}
    assert names_of_task - of_mixture_alone - {"root"} <= vars(DomainTask).keys()


# Which problems of one domain an iteration gets

SIZE_AND_COUNT = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(SIZE_AND_COUNT, st.integers(), st.integers(0, 100), MODES)
def test_no_problem_comes_twice_in_an_iteration(
    sizes: tuple[int, int], seed: int, iteration: int, mode: Replacement
) -> None:
    size, count = sizes
    chosen = draw_problems(range(size), count, seed, iteration, mode)
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= set(range(size))


@given(SIZE_AND_COUNT, st.integers(), MODES)
def test_the_choice_depends_on_seed_and_iteration_alone(
    sizes: tuple[int, int], seed: int, mode: Replacement
) -> None:
    size, count = sizes
    in_order = [draw_problems(range(size), count, seed, i, mode) for i in range(5)]
    in_reversed_order = [draw_problems(range(size), count, seed, i, mode) for i in reversed(range(5))]
    assert in_order == in_reversed_order[::-1]


@given(SIZE_AND_COUNT, st.integers())
@settings(max_examples=40)
def test_in_epochs_every_problem_comes_once_before_any_comes_again(sizes: tuple[int, int], seed: int) -> None:
    size, count = sizes
    iterations = range(min(3 * size, 30))
    stream = []
    for iteration in iterations:
        stream += draw_problems(range(size), count, seed, iteration, "epochs")
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))


@pytest.mark.parametrize("mode", ["between_iterations", "epochs"])
def test_iterations_and_seeds_choose_differently(mode: Replacement) -> None:
    choices = set()
    for seed, iteration in itertools.product(range(3), range(3)):
        choices.add(tuple(draw_problems(range(1000), 64, seed, iteration, mode)))
    assert len(choices) == 9


def test_between_iterations_all_problems_are_equally_likely() -> None:
    drawn = Counter(chain.from_iterable(draw_problems(range(10), 5, 0, i) for i in range(2000)))
    assert all(abs(times - 1000) < 5 * 22.4 for times in drawn.values())  # 5 standard deviations


def test_a_count_that_the_split_cannot_give_is_refused() -> None:
    for count in (0, -1, 11):
        with pytest.raises(ValueError, match="between 1 and 10"):
            draw_problems(range(10), count, 0, 0)
    with pytest.raises(ValueError, match="no problems"):
        draw_problems([], 1, 0, 0)
