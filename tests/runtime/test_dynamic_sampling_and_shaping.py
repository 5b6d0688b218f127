"""A run that samples further problems until groups are mixed, and one whose rewards are shaped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.runtime.in_process import FakeSettings, directory_of, raises_after, sampled_requests, small, train
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.inference.base import EngineError
from treetune.rollouts.credit import Gae, NoCredit
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.selection import CorrectOnly, MixedGroups
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime import generation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.objectives.spo import CorrectPaths
from treetune.tree import answers_of
from treetune.vocabulary import Episode, Trajectory

GROUPS = 5
GUARDED = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, skip_without_advantage=True)
ANSWERS = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0)
SETS = Evaluation(sets=(EvaluationSet(split="test", problems=3),))


def dynamic(base: Path, **changes: Any) -> PolicyIteration:
    """Rounds of 4 problems; about every other group is mixed."""
    return small(
        base,
        **{
            "rollout": UntilMixed(rollout=ANSWERS, groups=GROUPS),
            "selection": MixedGroups(at_most=GROUPS),
            "evaluation": SETS,
            **changes,
        },
    )


def trajectories_of(config: PolicyIteration, iteration: int) -> list[Trajectory]:
    return read_trajectories(directory_of(config).iteration(iteration) / "trajectories.arrow")


def episodes_of(config: PolicyIteration, iteration: int) -> list[Episode]:
    return read_episodes(directory_of(config).iteration(iteration) / "episodes.arrow")


def weights_of(config: PolicyIteration) -> dict[str, Any]:
    return load_file(directory_of(config).checkpoint(2) / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    config = dynamic(tmp_path_factory.mktemp("dynamic"))
    train(config)
    return config


def test_every_iteration_trains_on_as_many_groups_and_counts_all_that_it_sampled(
    undisturbed: PolicyIteration,
) -> None:
    rows = directory_of(undisturbed).read_metrics()
    for iteration, row in enumerate(rows):
        sampled, trained = trajectories_of(undisturbed, iteration), episodes_of(undisturbed, iteration)
        problems = {t.problem.id for t in sampled}
        assert row["rollout/rounds"] == len(problems) / 4 > 1
        assert row["episodes/count"] == len(sampled) == 2 * len(problems)
        assert row["episodes/score"] == pytest.approx(sum(t.score for t in sampled) / len(sampled))
        groups: dict[str, list[Episode]] = {}
        for episode in trained:
            groups.setdefault(episode.group, []).append(episode)
        assert len(groups) == GROUPS
        assert all({e.score for e in group} == {0.0, 1.0} for group in groups.values())
        tokens = sum(len(t.response_ids) for t in sampled)
        assert row["engine/tokens_per_second"] * row["seconds/generation"] == pytest.approx(tokens, rel=1e-3)
        assert row["rollout/groups_dropped"] == row["selection/groups_dropped"] < 1
        assert row["rollout/groups_lacking"] == 0


def assert_same(config: PolicyIteration, undisturbed: PolicyIteration) -> None:
    for iteration in (0, 1):
        assert episodes_of(config, iteration) == episodes_of(undisturbed, iteration)
    weights, expected = weights_of(config), weights_of(undisturbed)
    assert all((weights[name] == expected[name]).all() for name in expected)


def test_a_run_struck_in_a_later_round_samples_nothing_twice_and_ends_the_same(
    undisturbed: PolicyIteration, tmp_path: Path
) -> None:
    struck = dynamic(tmp_path, engine=FakeSettings(fail_after=6))
    with pytest.raises(EngineError, match="told to fail"):
        train(struck)
    assert sampled_requests(struck) == 6, "in the middle of the second round"
    resumed = dynamic(tmp_path, engine=FakeSettings())
    train(resumed)
    assert sampled_requests(struck) + sampled_requests(resumed) == sampled_requests(undisturbed)
    assert_same(resumed, undisturbed)


def test_a_run_struck_after_its_rounds_reads_all_of_them_back(
    undisturbed: PolicyIteration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = dynamic(tmp_path)
    with monkeypatch.context() as patch:
        stop = raises_after(generation.write_episodes, 0, RuntimeError("struck here"))
        patch.setattr(generation, "write_episodes", stop)
        with pytest.raises(RuntimeError, match="struck here"):
            train(struck)
    resumed = dynamic(tmp_path, engine=FakeSettings())
    train(resumed)
    assert sampled_requests(struck) + sampled_requests(resumed) == sampled_requests(undisturbed)
    assert_same(resumed, undisturbed)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stored_rounds_are_dealt_to_any_number_of_ranks_by_whole_groups(
    undisturbed: PolicyIteration, world_size: int
) -> None:
    stored = trajectories_of(undisturbed, 0)
    shares = []
    for rank in range(world_size):
        run: Any = SimpleNamespace(ranks=SimpleNamespace(rank=rank, world_size=world_size))
        shares.append(answers_of(generation.own_trees(run.ranks, stored)))
    assert [trajectory for share in shares for trajectory in share] == stored
    counts = [len({t.problem.id for t in share}) for share in shares]
    assert all(len(share) == 2 * count for share, count in zip(shares, counts, strict=True))
    assert max(counts) - min(counts) <= 1


def test_the_bound_is_said_in_the_log_and_the_run_goes_on(tmp_path: Path) -> None:
    rollout = UntilMixed(rollout=ANSWERS, groups=50, max_rounds=2)
    config = dynamic(tmp_path, rollout=rollout, selection=MixedGroups(at_most=50), iterations=1)
    train(config)
    log = (directory_of(config).logs / "run.log").read_text()
    assert log.count("50 problems with answers that differ in score were asked for") == 1
    assert "since max_rounds is 2" in log


def refused(config: PolicyIteration, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(config)
    assert re.search(message, " ".join(str(caught.value).split()))


def test_a_rollout_that_asks_for_further_problems_needs_some_left(tmp_path: Path) -> None:
    refused(dynamic(tmp_path, problems_per_iteration=None), "null has none left")


SHAPING = (OverlongPenalty(cache=6, scale=0.5), LengthPenalty(weight=0.25))


def test_shaping_reaches_episodes_and_metrics_and_leaves_stored_trajectories_as_they_were_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, shaping=SHAPING, iterations=1)
    train(config)
    stored, episodes = trajectories_of(config, 0), episodes_of(config, 0)
    assert {t.bonus for t in stored} == {0.0}
    assert [e.score for e in episodes] == [t.score for t in stored]
    assert any(e.reward != e.score for e in episodes)
    (row,) = directory_of(config).read_metrics()
    assert row["episodes/score"] == pytest.approx(sum(e.score for e in episodes) / len(episodes))
    assert row["episodes/reward"] == pytest.approx(sum(e.reward for e in episodes) / len(episodes))
    assert row["shaping/overlong_penalty"] < 0
    assert "shaping/length_penalty" in row
    log = (directory_of(config).logs / "run.log").read_text()
    assert f"score {row['episodes/score']:.3f}  reward {row['episodes/reward']:.3f}" in log


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"credit": MonteCarlo(samples=1)}, "needs? a credit for what whole answers earn"),
        (
            {
                "credit": NoCredit(),
                "trainer": Trainer(objective=MaximumLikelihood(), learning_rate=1e-3),
            },
            "needs? an objective that learns from advantages",
        ),
        ({"shaping": (*SHAPING, LengthPenalty())}, "two different ones are called length_penalty"),
        ({"rollout": replace(ANSWERS, max_tokens=5)}, "cache has 6 tokens"),
    ],
)
def test_shaping_that_can_not_be_meant_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(small(tmp_path, **{"shaping": SHAPING, **changes}), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection": MixedGroups(at_most=2)}, "make the two equal"),
        (
            {"trainer": Trainer(objective=MaximumLikelihood(), learning_rate=1e-3)},
            "needs an objective that learns from advantages",
        ),
    ],
)
def test_waiting_for_groups_that_nobody_trains_on_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(dynamic(tmp_path, **changes), message)


@pytest.mark.parametrize(
    "changes",
    [{"credit": Gae()}, {"trainer": replace(GUARDED, objective=CorrectPaths(normalise_by="correct"))}],
)
def test_a_guard_that_would_never_be_at_work_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    checked(small(tmp_path, trainer=GUARDED))
    refused(small(tmp_path, **{"trainer": GUARDED, **changes}), "skip_without_advantage looks at")


def test_a_loss_that_counts_wrong_answers_refuses_a_selection_that_drops_them(tmp_path: Path) -> None:
    trainer = Trainer(objective=CorrectPaths(normalise_by="batch"), learning_rate=1e-3)
    checked(small(tmp_path, trainer=trainer, credit=NoCredit()))
    refused(small(tmp_path, trainer=trainer, selection=CorrectOnly()), "choose the selection 'all'")
