"""Continuations that begin with each answer, while other answers are still sampled.

These tests promise:

* Episodes, metrics and samples are those of a run that waits for all answers first, in any order of answers.
* A killed run goes on to the same numbers, and samples nothing twice.
* Answers that are left out cost no continuations.
* A state that waits for grades keeps no other state waiting.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from treetune.credit.states.base import AnswerPrefix, ContinuationPlan
from treetune.credit.states.early import EarlyContinuations
from treetune.credit.values.base import ValueEstimator
from treetune.credit.values.bisect import Bisect
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.filtered import Filtered
from treetune.credit.values.sequential import Sequential, UntilSure
from treetune.credit.values.siblings import Siblings, ToppedUp
from treetune.credit.values.smoothed import Smoothed
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import (
    ANSWER_PRIORITY,
    CONTINUATION_PRIORITY,
    Completion,
    Deferred,
    OnResult,
    Request,
)
from treetune.exceptions import EngineError
from treetune.rollouts.context import FurtherProblems, RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.unavailable import drop_ungraded
from treetune.rollouts.until_mixed import UntilMixed
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Episode, Grade, Metrics, Problem, Trajectory, token_array

SAMPLES, PROBLEMS = 4, 5
ROLLOUT = SingleTurn(samples=SAMPLES, max_tokens=mdp.LONGEST)
ESTIMATORS = [
    FreshContinuations(),
    FreshContinuations(count_siblings=True),
    Sequential(error=0.2, most=9),
    Sequential(error=0.2, most=9, pilot=True),
    Smoothed(),
    Filtered(),
    Bisect(threshold=0.1),
    Siblings(),
    ToppedUp(),
]


class EngineInSeededOrder(FakeEngine):
    """Serves requests in an order that the seed decides, continuations among answers."""

    def __init__(self, seed: int = 0, fail_after: int | None = None) -> None:
        super().__init__(mdp.chances, mdp.EOS, fail_after=fail_after)
        self._random = random.Random(seed)

    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        waiting: list[tuple[int, Request]] = []
        promised: list[Deferred] = []

        def add(further: Sequence[Request | Deferred]) -> None:
            for request in further:
                if isinstance(request, Deferred):
                    promised.append(request)
                else:
                    waiting.append((len(results), request))
                    results.append([])

        add(requests)
        while waiting or promised:
            for later in [request for request in promised if request.ready.done()]:
                promised.remove(later)
                add(later.requests())
            if waiting:
                index, request = waiting.pop(self._random.randrange(len(waiting)))
                (results[index],) = super().generate([request])
                if on_result is not None:
                    add(on_result(index, results[index]) or ())
        return results


def context(engine: Engine, **changed: object) -> RolloutContext:
    return mdp.context(engine=engine, sampling=ROLLOUT.sampling, **changed)


def run_iteration(
    context: RolloutContext, credit: MonteCarlo, rollout: SingleTurn | UntilMixed = ROLLOUT
) -> tuple[list[Trajectory], list[Episode], Metrics]:
    """Rolls out and assigns credit as the runtime does."""
    early = credit.early_continuations(context)
    trees, _ = rollout.run(context if early is None else early.attach(context), mdp.problems(PROBLEMS))
    trees, _ = drop_ungraded(context, trees, credit)
    episodes, metrics = credit.assign(replace(context, early_continuations=early), trees)
    return answers_of(trees), episodes, metrics


def count_samples(requests: Sequence[Request]) -> Counter[tuple[tuple[int, ...], int]]:
    """Counts samples by the tokens before them and their seeds."""
    samples: Counter[tuple[tuple[int, ...], int]] = Counter()
    for request in requests:
        prompt_ids = plain(request.prompt_ids)
        samples.update((prompt_ids, request.seed + i) for i in range(request.n))
    return samples


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("values", ESTIMATORS, ids=lambda estimator: repr(estimator)[:50])
def test_numbers_and_samples_are_those_of_two_waves_in_any_order_of_answers(
    values: ValueEstimator, order: int
) -> None:
    waves, pipelined = EngineInSeededOrder(), EngineInSeededOrder(order)
    expected = run_iteration(context(waves), MonteCarlo(samples=3, values=values, pipelined=False))
    assert run_iteration(context(pipelined), MonteCarlo(samples=3, values=values)) == expected
    assert count_samples(pipelined.asked) == count_samples(waves.asked)


def roll_out_with_early(
    inner: FakeEngine, credit: MonteCarlo, **changed: object
) -> tuple[EarlyContinuations, list[Tree]]:
    """Rolls out with the early continuations of the credit."""
    rollout_context = context(inner, **changed)
    early = credit.early_continuations(rollout_context)
    return early, ROLLOUT.run(early.attach(rollout_context), mdp.problems(PROBLEMS))[0]


@pytest.mark.parametrize("values", [FreshContinuations(), Sequential(error=0.2, most=9), Smoothed()])
def test_all_continuations_that_the_credit_needs_end_with_the_last_answer(values: ValueEstimator) -> None:
    inner = EngineInSeededOrder()
    credit = MonteCarlo(samples=3, values=values)
    early, trees = roll_out_with_early(inner, credit)
    # Credit would fail if it had to sample anything more.
    credit_context = context(EngineInSeededOrder(fail_after=0))
    episodes, _ = credit.assign(replace(credit_context, early_continuations=early), trees)
    assert len(episodes) == PROBLEMS * SAMPLES
    priorities = [request.priority for request in inner.asked]
    assert priorities.count(ANSWER_PRIORITY) == PROBLEMS * SAMPLES
    assert CONTINUATION_PRIORITY in priorities[: priorities.index(ANSWER_PRIORITY, PROBLEMS * SAMPLES)]


def test_bisecting_begins_with_the_prompts() -> None:
    inner = EngineInSeededOrder()
    roll_out_with_early(inner, MonteCarlo(samples=3, values=Bisect()))
    early = [request for request in inner.asked if request.priority == CONTINUATION_PRIORITY]
    assert [plain(request.prompt_ids)[-1] for request in early] == [mdp.ALPHABET.index("?")] * PROBLEMS


def test_a_credit_that_samples_nothing_or_is_not_pipelined_begins_nothing_early() -> None:
    for credit in (MonteCarlo(values=Siblings()), MonteCarlo(pipelined=False)):
        assert credit.early_continuations(context(EngineInSeededOrder())) is None


@pytest.mark.parametrize("answered", [0, 1, 7, 20, 33, 45])
def test_a_killed_run_goes_on_to_the_same_numbers_and_samples_nothing_twice(
    answered: int, tmp_path: Path
) -> None:
    credit = MonteCarlo(samples=3, values=Sequential(error=0.2, most=9))
    uninterrupted = EngineInSeededOrder()
    expected = run_iteration(context(uninterrupted), credit)

    def journal_engine(inner: FakeEngine) -> JournaledEngine:
        return JournaledEngine(inner, tmp_path / "answers", continuations=tmp_path / "continuations")

    killed, second_run = EngineInSeededOrder(answered, fail_after=answered), EngineInSeededOrder(1)
    with pytest.raises(EngineError):
        run_iteration(context(journal_engine(killed)), credit)
    assert run_iteration(context(journal_engine(second_run)), credit) == expected
    assert count_samples(killed.asked + second_run.asked) == count_samples(uninterrupted.asked)
    # The run is killed again, now in credit. It finds the continuations in the file where credit keeps them.
    failing_engine = EngineInSeededOrder(fail_after=0)
    credit_context = context(JournaledEngine(failing_engine, tmp_path / "continuations"))
    credit_context = replace(credit_context, early_continuations=credit.early_continuations(credit_context))
    assert credit.assign(credit_context, trees_of(expected[0])) == expected[1:]


def test_answers_and_continuations_are_journaled_in_their_own_files(tmp_path: Path) -> None:
    inner = EngineInSeededOrder()
    journaled_engine = JournaledEngine(inner, tmp_path / "answers", continuations=tmp_path / "continuations")
    run_iteration(context(journaled_engine), MonteCarlo(samples=3))
    lines = {name: len((tmp_path / name).read_text().splitlines()) for name in ("answers", "continuations")}
    counts = Counter(request.priority for request in inner.asked)
    assert lines == {"answers": counts[ANSWER_PRIORITY], "continuations": counts[CONTINUATION_PRIORITY]}
    assert journaled_engine.sampled.total() == inner.tokens
    assert 0 < journaled_engine.sampled[ANSWER_PRIORITY] < journaled_engine.sampled[CONTINUATION_PRIORITY]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_state_is_continued_once_by_the_rank_of_its_answer(world_size: int) -> None:
    engines: list[FakeEngine] = []

    def new_engine() -> FakeEngine:
        engines.append(EngineInSeededOrder(len(engines)))
        return engines[-1]

    def run(rank_context: RolloutContext) -> tuple[list[Episode], Metrics]:
        return run_iteration(rank_context, MonteCarlo(samples=3))[1:]

    mdp.assert_ranks_agree(world_size, run, engine=new_engine)
    alone, *others = engines
    requests_of_ranks = list(itertools.chain.from_iterable(engine.asked for engine in others))
    assert count_samples(requests_of_ranks) == count_samples(alone.asked)
    for engine in others:
        problems_by_priority: dict[int, set[int]] = {ANSWER_PRIORITY: set(), CONTINUATION_PRIORITY: set()}
        for request in engine.asked:
            problems_by_priority[request.priority].add(plain(request.prompt_ids)[0])
        assert problems_by_priority[CONTINUATION_PRIORITY] == problems_by_priority[ANSWER_PRIORITY]


class PoolWithLateGrades(mdp.InlinePool):
    """Gives grades late. It grades only the `gradable` texts of the problems that are listed there."""

    def __init__(self, gradable: dict[str, set[str]], thread: ThreadPoolExecutor) -> None:
        super().__init__()
        self.gradable, self.thread = gradable, thread

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        if response not in self.gradable.get(problem.id, {response}):
            return self.thread.submit(Grade, 0.0, "unavailable", message="nobody there")
        return self.thread.submit(super().submit(response, problem).result)


@pytest.mark.parametrize(
    ("credit", "credited_answers"),
    [
        (MonteCarlo(samples=3), {0: 0, 1: 1, 2: 4}),
        (MonteCarlo(samples=3, siblings_count_into_prompt_value=True), {0: 0, 1: 0, 2: 4}),
    ],
    ids=["each", "two or more"],
)
def test_answers_that_are_left_out_cost_nothing(credit: MonteCarlo, credited_answers: dict[int, int]) -> None:
    answers, _, _ = run_iteration(context(EngineInSeededOrder()), credit)
    gradable = {"train/0": set(), "train/1": {answers[SAMPLES].text}}
    second_group = [answer.text for answer in answers[SAMPLES : 2 * SAMPLES]]
    assert second_group.count(answers[SAMPLES].text) == 1

    def iterate(inner: FakeEngine, credit: MonteCarlo) -> tuple[list[Trajectory], list[Episode], Metrics]:
        with ThreadPoolExecutor(1) as thread:
            return run_iteration(context(inner, grader=PoolWithLateGrades(gradable, thread)), credit)

    waves, pipelined = EngineInSeededOrder(), EngineInSeededOrder(1)
    expected = iterate(waves, replace(credit, pipelined=False))
    assert iterate(pipelined, credit) == expected
    assert count_samples(pipelined.asked) == count_samples(waves.asked)
    groups = Counter(answer.problem.id for answer in expected[0])
    assert {number: groups[f"train/{number}"] for number in credited_answers} == credited_answers
    continuations = [request for request in pipelined.asked if request.priority == CONTINUATION_PRIORITY]
    continued_problems = {mdp.decode(request.prompt_ids)[0] for request in continuations}
    expected_problems = {str(i) for i in range(PROBLEMS) if credited_answers.get(i, SAMPLES)}
    assert continued_problems == expected_problems


def test_rounds_until_answers_differ_give_the_same_with_early_continuations() -> None:
    rollout = UntilMixed(rollout=ROLLOUT, groups=6, problems_per_round=2, max_rounds=3)
    further = [
        replace(problem, id=f"more/{problem.id}", prompt=f"7{problem.prompt}") for problem in mdp.problems(4)
    ]
    runs = []
    for pipelined in (False, True):
        inner = EngineInSeededOrder(3)
        rollout_context = context(inner, further_problems=FurtherProblems(lambda: further))
        credit = MonteCarlo(samples=3, pipelined=pipelined)
        runs.append((run_iteration(rollout_context, credit, rollout), count_samples(inner.asked)))
    assert runs[0] == runs[1]


def test_grading_services_are_asked_about_continuations_only_when_credit_is_assigned() -> None:
    pool = mdp.InlinePool()
    pool.has_services = True
    credit = MonteCarlo(samples=3, values=Sequential(error=0.2, most=9))
    early, trees = roll_out_with_early(EngineInSeededOrder(), credit, grader=pool)
    assert len(pool.submitted) == PROBLEMS * SAMPLES
    credit_context = context(EngineInSeededOrder(), grader=pool)
    episodes, metrics = credit.assign(replace(credit_context, early_continuations=early), trees)
    expected = run_iteration(context(EngineInSeededOrder()), replace(credit, pipelined=False))
    assert (episodes, metrics) == expected[1:]


class PoolThatHoldsOneGrade(mdp.InlinePool):
    """Holds back the grade of the first continuation until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Future[Grade] = Future()
        self.grade: Grade | None = None

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        future = super().submit(response, problem)
        if self.grade is not None:
            return future
        self.grade = future.result()
        return self.held

    def release(self) -> None:
        if not self.held.done():
            self.held.set_result(self.grade)


def test_a_state_that_waits_for_grades_keeps_no_other_state_waiting() -> None:
    prefixes = [
        AnswerPrefix(problem, token_array(mdp.encode(problem.prompt)), ()) for problem in mdp.problems(3)
    ]
    plan = ContinuationPlan(UntilSure(first=2, error=0.1, most=4), ROLLOUT.sampling)
    grader = PoolThatHoldsOneGrade()
    # All three states sample once, and the two others once more while the first one's grade is held back.
    requests_before_release = len(prefixes) + 2
    requests_at_release: list[int] = []

    class Inner(EngineInSeededOrder):
        def _sample(self, *request: object) -> Completion:
            if len(self.asked) == requests_before_release and not requests_at_release:
                requests_at_release.append(len(self.asked))
                grader.release()
            return super()._sample(*request)  # type: ignore[arg-type]

    # If a state kept the others waiting, the test would fail and not hang.
    timer = threading.Timer(30.0, grader.release)
    timer.start()
    try:
        estimates = MonteCarlo().states.estimate(context(Inner(), grader=grader), prefixes, plan)
    finally:
        timer.cancel()
    assert requests_at_release == [requests_before_release]
    assert estimates == MonteCarlo().states.estimate(context(EngineInSeededOrder()), prefixes, plan)
