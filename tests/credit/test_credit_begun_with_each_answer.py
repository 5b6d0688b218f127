"""Continuations may be asked for with each answer, while others are sampled: the numbers are the same."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.columns import plain
from tests.fake_engine import FakeEngine
from tests.rollouts import tabular_mdp as mdp
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
from treetune.engine.requests import ANSWERS, CONTINUATIONS, Completion, Later, OnResult, Request
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


class AsItComes(FakeEngine):
    """Answers in an order that the seed decides, continuations among answers."""

    def __init__(self, seed: int = 0, fail_after: int | None = None) -> None:
        super().__init__(mdp.chances, mdp.EOS, fail_after=fail_after)
        self._random = random.Random(seed)

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        waiting: list[tuple[int, Request]] = []
        promised: list[Later] = []

        def add(further: Sequence[Request | Later]) -> None:
            for one in further:
                if isinstance(one, Later):
                    promised.append(one)
                else:
                    waiting.append((len(results), one))
                    results.append([])

        add(requests)
        while waiting or promised:
            for later in [one for one in promised if one.ready.done()]:
                promised.remove(later)
                add(later.requests())
            if waiting:
                index, request = waiting.pop(self._random.randrange(len(waiting)))
                (results[index],) = super().generate([request])
                if on_result is not None:
                    add(on_result(index, results[index]) or ())
        return results


def context(engine: Engine, **given: object) -> RolloutContext:
    return mdp.context(engine=engine, sampling=ROLLOUT.sampling, **given)


def iteration(
    context: RolloutContext, credit: MonteCarlo, rollout: SingleTurn | UntilMixed = ROLLOUT
) -> tuple[list[Trajectory], list[Episode], Metrics]:
    """As the runtime carries it out."""
    early = credit.early_continuations(context)
    trees, _ = rollout.run(context if early is None else early.attach(context), mdp.problems(PROBLEMS))
    trees, _ = drop_ungraded(context, trees, credit)
    episodes, metrics = credit.assign(replace(context, early_continuations=early), trees)
    return answers_of(trees), episodes, metrics


def asked(requests: Sequence[Request]) -> Counter[tuple[tuple[int, ...], int]]:
    """Samples, by what was before them and their seeds."""
    return Counter((plain(one.prompt_ids), one.seed + i) for one in requests for i in range(one.n))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("values", ESTIMATORS, ids=lambda one: repr(one)[:50])
def test_numbers_and_samples_are_those_of_two_waves_in_whichever_order_answers_come(
    values: ValueEstimator, order: int
) -> None:
    waves, pipelined = AsItComes(), AsItComes(order)
    expected = iteration(context(waves), MonteCarlo(samples=3, values=values, pipelined=False))
    assert iteration(context(pipelined), MonteCarlo(samples=3, values=values)) == expected
    assert asked(pipelined.asked) == asked(waves.asked)


def begun(inner: FakeEngine, credit: MonteCarlo, **given: object) -> tuple[EarlyContinuations, list[Tree]]:
    """A rollout with what credit asks for beside it."""
    here = context(inner, **given)
    early = credit.early_continuations(here)
    return early, ROLLOUT.run(early.attach(here), mdp.problems(PROBLEMS))[0]


@pytest.mark.parametrize("values", [FreshContinuations(), Sequential(error=0.2, most=9), Smoothed()])
def test_everything_that_the_credit_wants_is_there_when_the_last_answer_is(values: ValueEstimator) -> None:
    inner = AsItComes()
    credit = MonteCarlo(samples=3, values=values)
    early, trees = begun(inner, credit)
    nobody = AsItComes(fail_after=0)
    episodes, _ = credit.assign(replace(context(nobody), early_continuations=early), trees)
    assert len(episodes) == PROBLEMS * SAMPLES
    priorities = [one.priority for one in inner.asked]
    assert priorities.count(ANSWERS) == PROBLEMS * SAMPLES
    assert CONTINUATIONS in priorities[: priorities.index(ANSWERS, PROBLEMS * SAMPLES)]


def test_bisecting_begins_with_the_prompts() -> None:
    inner = AsItComes()
    begun(inner, MonteCarlo(samples=3, values=Bisect()))
    early = [one for one in inner.asked if one.priority == CONTINUATIONS]
    assert [plain(one.prompt_ids)[-1] for one in early] == [mdp.ALPHABET.index("?")] * PROBLEMS


def test_whoever_samples_nothing_or_is_told_to_wait_asks_for_nothing_early() -> None:
    for credit in (MonteCarlo(values=Siblings()), MonteCarlo(pipelined=False)):
        assert credit.early_continuations(context(AsItComes())) is None


@pytest.mark.parametrize("answered", [0, 1, 7, 20, 33, 45])
def test_a_run_that_is_killed_goes_on_to_the_same_numbers_and_asks_for_nothing_twice(
    answered: int, tmp_path: Path
) -> None:
    credit = MonteCarlo(samples=3, values=Sequential(error=0.2, most=9))
    whole = AsItComes()
    expected = iteration(context(whole), credit)

    def journaled(inner: FakeEngine) -> JournaledEngine:
        return JournaledEngine(inner, tmp_path / "answers", continuations=tmp_path / "continuations")

    killed, again = AsItComes(answered, fail_after=answered), AsItComes(1)
    with pytest.raises(EngineError):
        iteration(context(journaled(killed)), credit)
    assert iteration(context(journaled(again)), credit) == expected
    assert asked(killed.asked + again.asked) == asked(whole.asked)
    # Killed again, in credit now: whoever goes on finds the continuations where credit keeps them.
    nobody = AsItComes(fail_after=0)
    kept = JournaledEngine(nobody, tmp_path / "continuations")
    here = context(kept)
    here = replace(here, early_continuations=credit.early_continuations(here))
    later = credit.assign(here, trees_of(expected[0]))
    assert later == expected[1:]


def test_answers_and_continuations_are_kept_apart(tmp_path: Path) -> None:
    inner = AsItComes()
    kept = JournaledEngine(inner, tmp_path / "answers", continuations=tmp_path / "continuations")
    iteration(context(kept), MonteCarlo(samples=3))
    lines = {name: len((tmp_path / name).read_text().splitlines()) for name in ("answers", "continuations")}
    counts = Counter(one.priority for one in inner.asked)
    assert lines == {"answers": counts[ANSWERS], "continuations": counts[CONTINUATIONS]}
    assert kept.sampled.total() == inner.tokens
    assert 0 < kept.sampled[ANSWERS] < kept.sampled[CONTINUATIONS]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_state_is_gone_on_from_once_by_the_rank_of_its_answer(world_size: int) -> None:
    engines: list[FakeEngine] = []

    def new() -> FakeEngine:
        engines.append(AsItComes(len(engines)))
        return engines[-1]

    def run(here: RolloutContext) -> tuple[list[Episode], Metrics]:
        return iteration(here, MonteCarlo(samples=3))[1:]

    mdp.assert_ranks_agree(world_size, run, engine=new)
    alone, *others = engines
    assert asked([one for each in others for one in each.asked]) == asked(alone.asked)
    for each in others:
        of_answers, of_continuations = (
            {plain(one.prompt_ids)[0] for one in each.asked if one.priority == priority}
            for priority in (ANSWERS, CONTINUATIONS)
        )
        assert of_continuations == of_answers, "of the same problems"


class SomeGrades(mdp.InlinePool):
    """Of the problems that `kept` names, nobody can grade what is not among its texts. Grades come late."""

    def __init__(self, kept: dict[str, set[str]], thread: ThreadPoolExecutor) -> None:
        super().__init__()
        self.kept, self.thread = kept, thread

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        if response not in self.kept.get(problem.id, {response}):
            return self.thread.submit(Grade, 0.0, "unavailable", message="nobody there")
        return self.thread.submit(super().submit(response, problem).result)


@pytest.mark.parametrize(
    ("credit", "left"),
    [
        (MonteCarlo(samples=3), {0: 0, 1: 1, 2: 4}),
        (MonteCarlo(samples=3, siblings_count_into_prompt_value=True), {0: 0, 1: 0, 2: 4}),
    ],
    ids=["each", "two or more"],
)
def test_answers_that_are_left_out_cost_nothing(credit: MonteCarlo, left: dict[int, int]) -> None:
    answers, _, _ = iteration(context(AsItComes()), credit)
    kept = {"train/0": set(), "train/1": {answers[SAMPLES].text}}
    assert [one.text for one in answers[SAMPLES : 2 * SAMPLES]].count(answers[SAMPLES].text) == 1

    def run(inner: FakeEngine, credit: MonteCarlo) -> tuple[list[Trajectory], list[Episode], Metrics]:
        with ThreadPoolExecutor(1) as thread:
            return iteration(context(inner, grader=SomeGrades(kept, thread)), credit)

    waves, pipelined = AsItComes(), AsItComes(1)
    expected = run(waves, replace(credit, pipelined=False))
    assert run(pipelined, credit) == expected
    assert asked(pipelined.asked) == asked(waves.asked)
    groups = Counter(one.problem.id for one in expected[0])
    assert {number: groups[f"train/{number}"] for number in left} == left
    continued = {mdp.decode(one.prompt_ids)[0] for one in pipelined.asked if one.priority == CONTINUATIONS}
    assert continued == {str(number) for number in range(PROBLEMS) if left.get(number, SAMPLES)}


def test_rounds_until_answers_differ_cost_what_they_did() -> None:
    rollout = UntilMixed(rollout=ROLLOUT, groups=6, problems_per_round=2, max_rounds=3)
    further = [replace(one, id=f"more/{one.id}", prompt=f"7{one.prompt}") for one in mdp.problems(4)]
    runs = []
    for pipelined in (False, True):
        inner = AsItComes(3)
        lent = context(inner, further_problems=FurtherProblems(lambda: further))
        credit = MonteCarlo(samples=3, pipelined=pipelined)
        runs.append((iteration(lent, credit, rollout), asked(inner.asked)))
    assert runs[0] == runs[1]


def test_services_are_asked_about_continuations_when_credit_is_given() -> None:
    pool = mdp.InlinePool()
    pool.has_services = True
    credit = MonteCarlo(samples=3, values=Sequential(error=0.2, most=9))
    early, trees = begun(AsItComes(), credit, grader=pool)
    assert len(pool.submitted) == PROBLEMS * SAMPLES
    here = context(AsItComes(), grader=pool)
    episodes, metrics = credit.assign(replace(here, early_continuations=early), trees)
    expected = iteration(context(AsItComes()), replace(credit, pipelined=False))
    assert (episodes, metrics) == expected[1:]


class HoldsOneBack(mdp.InlinePool):
    """Gives the grade of the first continuation only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Future[Grade] = Future()
        self.grade: Grade | None = None

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        graded = super().submit(response, problem)
        if self.grade is not None:
            return graded
        self.grade = graded.result()
        return self.held

    def release(self) -> None:
        if not self.held.done():
            self.held.set_result(self.grade)


def test_whoever_waits_for_grades_keeps_no_other_state_waiting() -> None:
    prefixes = [
        AnswerPrefix(problem, token_array(mdp.encode(problem.prompt)), ()) for problem in mdp.problems(3)
    ]
    plan = ContinuationPlan(UntilSure(first=2, error=0.1, most=4), ROLLOUT.sampling)
    grader = HoldsOneBack()
    # All three states ask once, and the two others once more while the first one's grade is held back.
    enough = len(prefixes) + 2
    asked_at_release: list[int] = []

    class Inner(AsItComes):
        def _sample(self, *request: object) -> Completion:
            if len(self.asked) == enough and not asked_at_release:
                asked_at_release.append(len(self.asked))
                grader.release()
            return super()._sample(*request)  # type: ignore[arg-type]

    # Where a state did keep the others waiting, the test fails and doesn't hang.
    last_resort = threading.Timer(30.0, grader.release)
    last_resort.start()
    try:
        estimates = MonteCarlo().states.estimate(context(Inner(), grader=grader), prefixes, plan)
    finally:
        last_resort.cancel()
    assert asked_at_release == [enough]
    assert estimates == MonteCarlo().states.estimate(context(AsItComes()), prefixes, plan)
