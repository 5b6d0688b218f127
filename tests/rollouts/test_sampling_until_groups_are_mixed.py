"""Further problems are sampled until enough groups have spread, and never for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.inference.base import Completion, Request
from treetune.rollouts.context import FurtherProblems, RolloutContext
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
        return mdp.context(
            services=[FurtherProblems(lambda: SPLIT[self.first : self.whole])], say=self.said.append, **given
        )

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
    rounds = len(asked) // 6
    assert metrics["rollout/rounds"] == rounds > 2
    assert metrics["rollout/groups_dropped"] == pytest.approx(1 - n_mixed(trajectories) / len(asked))
    assert metrics["rollout/groups_lacking"] == 0
    assert metrics["episodes/count"] == len(trajectories) == 12 * rounds
    assert metrics["episodes/problems"] == len(asked)
    assert metrics["episodes/score"] == pytest.approx(sum(t.score for t in trajectories) / len(trajectories))
    assert split.said == []


def test_what_is_sampled_is_what_one_call_with_all_problems_samples() -> None:
    trajectories, _ = Split(first=6).run(UntilMixed(rollout=INNER, groups=12, max_rounds=99))
    at_once, metrics = answered(INNER.run(mdp.context(), SPLIT[: len(trajectories) // 2]))
    assert trajectories == at_once
    assert metrics["episodes/mixed"] == n_mixed(trajectories) / (len(trajectories) // 2)


def test_enough_at_once_is_one_round_that_asks_for_no_further_problem() -> None:
    def never() -> Sequence[Problem]:
        raise AssertionError("nothing further is needed")

    rollout = UntilMixed(rollout=INNER, groups=1)
    trajectories, metrics = answered(rollout.run(mdp.context(services=[FurtherProblems(never)]), SPLIT[:8]))
    assert trajectories == answered(INNER.run(mdp.context(), SPLIT[:8]))[0]
    assert metrics["rollout/rounds"] == 1


def test_a_task_that_never_gives_spread_ends_at_the_bound_and_says_so() -> None:
    split = Split(first=4)
    trajectories, metrics = split.run(UntilMixed(rollout=INNER, groups=3, max_rounds=5), engine=Sure())
    assert len(by_problem(trajectories)) == 20
    assert metrics["rollout/rounds"] == 5
    assert metrics["rollout/groups_dropped"] == 1.0
    assert metrics["rollout/groups_lacking"] == 3
    (said,) = split.said
    assert "went on with 0 of 20 after 5 rounds, since max_rounds is 5" in said


def test_a_split_without_further_problems_ends_it_and_says_so() -> None:
    split = Split(first=4, whole=7)
    trajectories, metrics = split.run(UntilMixed(rollout=INNER, groups=3, max_rounds=5), engine=Sure())
    assert [len(group) for group in by_problem(trajectories).values()] == [2] * 7, "each problem once"
    assert metrics["rollout/rounds"] == 2
    (said,) = split.said
    assert "the split has no further problem" in said
    split = Split(first=7, whole=7)
    assert split.run(UntilMixed(rollout=INNER, groups=3), engine=Sure())[1]["rollout/rounds"] == 1
    assert "the split has no further problem" in split.said[0]


def test_later_rounds_may_be_smaller_and_progress_goes_on_counting() -> None:
    seen: list[tuple[int, int]] = []
    rollout = UntilMixed(rollout=INNER, groups=3, max_rounds=3, problems_per_round=2)
    context = Split(first=4).context(engine=Sure(), progress=lambda *done: seen.append(done))
    trajectories, _ = answered(rollout.run(context, SPLIT[:4]))
    assert len(trajectories) == 2 * (4 + 2 + 2)
    assert [done for done, _ in seen] == list(range(2, 17, 2))
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
        "services": lambda: [FurtherProblems(lambda: SPLIT[first:whole])],
    }
    ((alone, metrics),) = mdp.on_ranks(1, run, **given_to_all)
    by_rank = mdp.on_ranks(ranks, run, **given_to_all)
    assert [t for trajectories, _ in by_rank for t in trajectories] == alone
    assert all(metrics_of_rank == metrics for _, metrics_of_rank in by_rank)
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
