"""Further problems are sampled until enough groups have spread, and never for ever; answers that take several
iterations aren't preferred for being short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.engine.requests import Completion, Request
from treetune.rollouts.context import CarryOver, FurtherProblems, RolloutContext
from treetune.rollouts.partial import PartialAnswers
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.vocabulary import Metrics, Problem, Trajectory

INNER = SingleTurn(samples=2, max_tokens=mdp.LONGEST)
SPLIT = mdp.problems(60)


class Sure(mdp.TabularEngine):
    """Gives the same answer every time, so that no group ever has spread."""

    def _completions(self, request: Request) -> list[Completion]:
        return [mdp.completion((*mdp.encode("a;a"), mdp.EOS))] * request.n


@dataclass
class Split:
    """The first problems are the iteration's; the others are there to be asked for."""

    first: int
    whole: int = len(SPLIT)
    said: list[str] = field(default_factory=list)

    def context(self, **given: object) -> RolloutContext:
        further = FurtherProblems(lambda: SPLIT[self.first : self.whole])
        return mdp.context(further_problems=further, say=self.said.append, **given)

    def run(self, rollout: UntilMixed, **given: object) -> tuple[list[Trajectory], Metrics]:
        return answered(rollout.run(self.context(**given), SPLIT[: self.first]))


def by_problem(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem.id, []).append(trajectory)
    return groups


def n_mixed(trajectories: Sequence[Trajectory]) -> int:
    return sum(len({t.score for t in group}) > 1 for group in by_problem(trajectories).values())


def test_it_goes_on_until_there_are_enough_and_keeps_all_that_was_sampled() -> None:
    split = Split(first=6)
    trajectories, metrics = split.run(UntilMixed(rollout=INNER, groups=12, max_rounds=99))
    asked = list(by_problem(trajectories))
    assert asked == [p.id for p in SPLIT[: len(asked)]], "in the order of the split's problems"
    assert n_mixed(trajectories) >= 12 > n_mixed(trajectories[:-12]), "and not a round longer"
    expected = {
        "rollout/rounds": len(asked) / 6,
        "rollout/groups_dropped": 1 - n_mixed(trajectories) / len(asked),
        "rollout/groups_lacking": 0,
        "episodes/count": len(trajectories),
        "episodes/problems": len(asked),
        "episodes/score": sum(t.score for t in trajectories) / len(trajectories),
        "episodes/mixed": n_mixed(trajectories) / len(asked),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert len(trajectories) == 2 * len(asked) > 24 and not split.said
    at_once, _ = answered(INNER.run(mdp.context(), SPLIT[: len(asked)]))
    assert trajectories == at_once, "what one call with all problems samples"
    enough = n_mixed(trajectories[:24])
    exactly, _ = Split(first=6).run(UntilMixed(rollout=INNER, groups=enough, max_rounds=99))
    assert exactly == trajectories[:24], "two rounds for as many as two rounds have"


def test_enough_at_once_is_one_round_that_asks_for_no_further_problem() -> None:
    def never() -> Sequence[Problem]:
        raise AssertionError("nothing further is needed")

    rollout = UntilMixed(rollout=INNER, groups=1)
    context = mdp.context(further_problems=FurtherProblems(never))
    trajectories, metrics = answered(rollout.run(context, SPLIT[:8]))
    assert trajectories == answered(INNER.run(mdp.context(), SPLIT[:8]))[0]
    assert metrics["rollout/rounds"] == 1


@pytest.mark.parametrize(
    ("first", "whole", "problems", "rounds", "why"),
    [
        (4, 60, 20, 5, "went on with 0 of 20 after 5 rounds, since max_rounds is 5"),
        (4, 7, 7, 2, "the split has no further problem"),
        (7, 7, 7, 1, "the split has no further problem"),
    ],
)
def test_without_spread_it_ends_at_the_bound_or_with_the_split_and_says_so(
    first: int, whole: int, problems: int, rounds: int, why: str
) -> None:
    split = Split(first, whole)
    trajectories, metrics = split.run(UntilMixed(rollout=INNER, groups=3, max_rounds=5), engine=Sure())
    assert [len(group) for group in by_problem(trajectories).values()] == [2] * problems, "each problem once"
    told = [metrics[f"rollout/{name}"] for name in ("rounds", "groups_dropped", "groups_lacking")]
    assert told == [rounds, 1.0, 3]
    (said,) = split.said
    assert why in said


def test_later_rounds_may_be_smaller_and_progress_goes_on_counting() -> None:
    seen: list[tuple[int, int]] = []
    rollout = UntilMixed(rollout=INNER, groups=3, max_rounds=3, problems_per_round=2)
    context = Split(first=4).context(engine=Sure(), progress=lambda *done: seen.append(done))
    trajectories, _ = answered(rollout.run(context, SPLIT[:4]))
    assert len(trajectories) == 2 * (4 + 2 + 2)
    assert [done for done, _ in seen] == list(range(1, 17))
    assert {total for _, total in seen} == {8, 12, 16}


@settings(max_examples=25)
@given(
    first=st.integers(1, 7),
    whole=st.integers(7, 40),
    groups=st.integers(1, 15),
    max_rounds=st.integers(1, 6),
    per_round=st.none() | st.integers(1, 7),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 3),
)
def test_any_number_of_ranks_samples_the_same_and_every_stop_has_its_reason(
    first: int, whole: int, groups: int, max_rounds: int, per_round: int | None, ranks: int, seed: int
) -> None:
    rollout = UntilMixed(rollout=INNER, groups=groups, max_rounds=max_rounds, problems_per_round=per_round)

    def run(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
        return answered(rollout.run(context, SPLIT[:first]))

    given_to_all = {
        "engine": mdp.TabularEngine,
        "seed": lambda: seed,
        "further_problems": lambda: FurtherProblems(lambda: SPLIT[first:whole]),
    }
    alone, metrics = mdp.assert_ranks_agree(ranks, run, **given_to_all)
    assert len({t.id for t in alone}) == len(alone), "no problem twice"
    enough = n_mixed(alone) >= groups
    bound = metrics["rollout/rounds"] == max_rounds
    exhausted = len(by_problem(alone)) == whole
    assert enough or bound or exhausted
    assert metrics["rollout/groups_lacking"] == max(0, groups - n_mixed(alone))


def test_the_run_sees_the_inner_rollout_through_it() -> None:
    inner = SingleTurn(samples=3, max_tokens=7, unfinished_reward=-0.5, max_prompt_tokens=9, top_p=0.9)
    rollout = UntilMixed(rollout=inner, groups=2)
    for name in ("samples", "sampling", "unfinished_reward", "max_prompt_tokens", "needs_engine"):
        assert getattr(rollout, name) == getattr(inner, name), name
    assert rollout.sampler == inner
    assert rollout.gives == inner.gives


def test_no_problems_are_refused_as_the_inner_rollout_refuses_them() -> None:
    with pytest.raises(ValueError, match="no problems"):
        UntilMixed(rollout=INNER, groups=2).run(mdp.context(), [])


EVER_NEW = mdp.problems(4000)


class Versioned(mdp.TabularEngine):
    """Its weights have a version and are the same in all of them."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def _completions(self, request: Request) -> list[Completion]:
        return [replace(one, policy_version=self.version) for one in super()._completions(request)]


class Run:
    """Iterations one after the other, each with problems that none before it had."""

    def __init__(self, rollout: PartialAnswers, in_flight: int, world_size: int = 1) -> None:
        self.rollout, self.in_flight, self.world_size = rollout, in_flight, world_size
        self.carried: list[Trajectory] = []
        self.trained: list[list[Trajectory]] = []
        self.metrics: list[Metrics] = []
        self.begun: list[list[str]] = []

    def iterate(self, iterations: int) -> None:
        for iteration in range(len(self.trained), len(self.trained) + iterations):
            before = {one.problem.id for one in self.carried}
            drawn = EVER_NEW[iteration * self.in_flight : (iteration + 1) * self.in_flight]
            parts = mdp.on_ranks(
                self.world_size,
                lambda context, drawn=drawn: self._on_rank(context, drawn),
                engine=lambda version=iteration: Versioned(version),
                iteration=lambda number=iteration: number,
            )
            self.trained.append([one for trained, _, _ in parts for one in trained])
            self.carried = [one for _, carried, _ in parts for one in carried]
            self.metrics.append(parts[0][2])
            known = dict.fromkeys(one.problem.id for one in [*self.trained[-1], *self.carried])
            self.begun.append([id for id in known if id not in before])

    def _on_rank(
        self, context: RolloutContext, drawn: Sequence[Problem]
    ) -> tuple[list[Trajectory], list[Trajectory], Metrics]:
        left: list[Trajectory] = []
        context = replace(context, carry_over=CarryOver(self.carried, left.extend))
        trajectories, metrics = answered(self.rollout.run(context, drawn))
        return trajectories, left, metrics


def test_an_answer_goes_on_where_it_was_and_each_segment_has_its_version() -> None:
    run = Run(PartialAnswers(rollout=INNER, tokens_per_iteration=2), in_flight=20)
    run.iterate(6)
    lengths = Counter(len(one.segments) for part in run.trained for one in part)
    assert set(lengths) == {1, 2, 3}
    for iteration, part in enumerate(run.trained):
        for one in part:
            versions = [segment.policy_version for segment in one.segments]
            assert versions == list(range(versions[0], versions[0] + len(versions))), "one after the other"
            assert versions[-1] is not None and versions[-1] <= iteration
            assert all(len(segment.token_ids) == 2 for segment in one.segments[:-1])
            ids = plain(one.response_ids)
            assert mdp.answers((), mdp.LONGEST)[ids] > 0, "it is an answer of the language"
            assert (one.text, one.step_ends) == (mdp.decode(ids), mdp.step_ends(ids))
            assert one.reward == mdp.reward(ids)
    assert run.metrics[0]["rollout/versions"] == 1 < run.metrics[2]["rollout/versions"]


@pytest.mark.parametrize("groups", [None, 12])
def test_every_problem_that_is_begun_is_trained_on_once_and_lengths_are_the_policys(
    groups: int | None,
) -> None:
    run = Run(PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=groups), in_flight=40)
    run.iterate(60)
    trained = Counter(one.id for part in run.trained for one in part)
    assert set(trained.values()) == {1}, "no answer comes twice"
    old = {id for begun in run.begun[:50] for id in begun}
    assert {f"{id}#{sample}" for id in old for sample in range(2)} <= set(trained), "and none is left out"
    if groups is not None:
        assert {len(part) for part in run.trained[3:]} == {2 * groups}
    lengths = [len(one.response_ids) for part in run.trained for one in part if one.problem.id in old]
    exact = sum(p * len(answer) for answer, p in mdp.answers().items())
    assert sum(lengths) / len(lengths) == pytest.approx(exact, abs=0.15)
    # What ends in the iteration that begins it is shorter: to take such first would be felt.
    early = [len(one.response_ids) for part in run.trained for one in part if len(one.segments) == 1]
    assert sum(early) / len(early) < exact - 0.5


def test_ranks_come_to_what_one_rank_comes_to() -> None:
    rollout = PartialAnswers(rollout=INNER, tokens_per_iteration=2, groups=5)
    alone, together = Run(rollout, in_flight=9), Run(rollout, in_flight=9, world_size=2)
    for run in (alone, together):
        run.iterate(5)
    assert (together.trained, together.carried, together.metrics) == (
        alone.trained,
        alone.carried,
        alone.metrics,
    )


def test_an_iteration_goes_on_until_there_is_something_to_train_on() -> None:
    run = Run(PartialAnswers(rollout=replace(INNER, samples=8), tokens_per_iteration=1), in_flight=1)
    run.iterate(1)
    assert len(run.trained[0]) == 8
    assert run.metrics[0]["rollout/groups_carried"] == 0
