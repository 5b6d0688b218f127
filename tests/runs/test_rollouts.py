"""What whole runs of trees, turns, rounds, shaped rewards and threads train on and count.
(`test_interrupted_runs` kills them.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runs.even_answers import EvenAnswers
from tests.support.small_run import (
    MODEL,
    TASK,
    FakeSettings,
    answers_of,
    computed,
    directory_of,
    episodes_of,
    evaluated,
    log_of,
    raises_after,
    small,
    train,
    trained,
)
from tests.support.unruly_environment import Unruly
from treetune.credit.gae import Gae
from treetune.credit.grpo import Group
from treetune.credit.states.by_tokens import EveryNTokens
from treetune.credit.trees import TreeCredit
from treetune.domains.environments.base import EnvironmentTask
from treetune.domains.multi_turn import MultiTurn, TurnStates
from treetune.engine.settings import InProcessSettings
from treetune.lab.trees.branching import AtStates, LeastSure
from treetune.lab.trees.rollout import TreeRollout
from treetune.lab.trees.turns import TurnTree
from treetune.models.policy_files import read_policy
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime import commands, generation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import Split
from treetune.threads.format import TAGS
from treetune.threads.parallel_threads import ParallelThreads
from treetune.threads.shaping import Acceleration, Measured, Running, Total
from treetune.tree import answers_of as answers_of_trees
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Problem

ANSWERS = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0)

# Trees

AT_STATES = AtStates(states=EveryNTokens(tokens=3), ways=(2, 2))
LEAST_SURE = LeastSure(positions=2, ways=1, rounds=2)


def growing(folder: Path, branching: Any = AT_STATES, layout: str = "padded", **changes: Any):
    rollout = TreeRollout(samples=2, max_tokens=12, branching=branching, unfinished_reward=1.0)
    config = small(folder, **{"rollout": rollout, "credit": TreeCredit(), **changes})
    return replace(config, trainer=replace(config.trainer, layout=layout))


@pytest.mark.parametrize("branching", [AT_STATES, LEAST_SURE], ids=["at states", "least sure"])
def test_what_was_sampled_is_stored_as_trees_and_each_of_its_tokens_is_trained_once(
    branching: Any, tmp_path: Path
) -> None:
    config = trained(growing(tmp_path, branching))
    for iteration in range(config.iterations):
        trees, rows = trees_of(answers_of(config, iteration)), episodes_of(config, iteration)
        sampled = sum(len(node.segment.token_ids) for tree in trees for node in tree.nodes)
        assert sum(int(row.trained.sum()) for row in rows) == sampled
        assert len(rows) == sum(len(tree.leaves) for tree in trees) > len(trees) * 2
    assert 0 < directory_of(config).read_metrics()[0]["tree/shared"] < 1


def test_the_update_is_that_of_rows_run_one_by_one_where_shared_tokens_are_computed_once(
    tmp_path: Path,
) -> None:
    """And each token has the log-prob that it was sampled with, by an engine that samples from the model."""
    found = []
    for layout in ("padded", "tree"):
        config = growing(tmp_path / layout, engine=InProcessSettings(), layout=layout, iterations=1)
        (row,) = train(config).read_metrics()
        assert row["tree/shared"] > 0
        assert row["engine/logprob_gap_max"] < 1e-4
        policy, _ = read_policy(directory_of(config).checkpoint_folder(1) / "policy")
        found.append(np.concatenate([policy[name].float().numpy().ravel() for name in sorted(policy)]))
    assert np.abs(found[0] - found[1]).max() < 1e-6


# Turns

MOODS = ("calm", "calm", "hangs", "calm", "dies", "says a megabyte", "is closed", "calm")
TURNS = MultiTurn(samples=2, max_tokens=24, max_turns=4, turn_tokens=1, observation_characters=6)


def playing(folder: Path, moods: tuple[str, ...], count: int, **changes: Any) -> PolicyIteration:
    """With an engine that writes any character of the game, each as likely."""
    game = Unruly(moods=moods)
    return small(
        folder,
        FakeSettings(alphabet=game.alphabet(), odds={"<pad>": 0.0, "<eos>": 0.0}),
        task=EnvironmentTask(environment=game, train_size=count),
        problems_per_iteration=count,
        **{"rollout": TURNS, **changes},
    )


def test_every_sampled_token_of_every_known_answer_is_trained_once_and_no_other(tmp_path: Path) -> None:
    config = trained(playing(tmp_path, MOODS, 8))
    outcomes: dict[str, set[str]] = {mood: set() for mood in MOODS}
    for iteration in range(config.iterations):
        rows = {one.trajectory: one for one in episodes_of(config, iteration)}
        for answer in answers_of(config, iteration):
            outcomes[answer.problem.gold].add(answer.grade.outcome)
            assert len(answer.response_ids) <= 24
            assert (answer.id in rows) == answer.grade.is_known
            if not answer.grade.is_known:
                continue
            row, start = rows[answer.id], 0
            for segment in answer.segments:
                span = slice(start, start := start + len(segment.token_ids))
                assert (row.trained[span] == (segment.origin == "sampled")).all()
                if segment.logprobs is not None:
                    assert (row.behaviour_logprobs[span] == segment.logprobs).all()
            assert start == len(row.response_ids)
            assert row.reward == answer.reward == pytest.approx(sum(answer.step_rewards) or answer.reward)
    assert outcomes == {
        "calm": {"ok"},
        "hangs": {"timeout"},
        "dies": {"error"},
        "says a megabyte": {"ok"},
        "is closed": {"unavailable"},
    }
    for row in directory_of(config).read_metrics():
        assert row["episodes/unavailable"] == row["episodes/timeout"] == row["episodes/error"] == 1 / 8
        assert row["turns/observations_cut"] > 0


def turn_tree(*ways: int) -> TurnTree:
    settings = {field.name: getattr(TURNS, field.name) for field in fields(TURNS)}
    return TurnTree(**settings, branching=AtStates(states=TurnStates(), ways=ways))


def test_turns_of_trees_are_stored_and_trained_once_where_environments_fail_too(tmp_path: Path) -> None:
    changes = {"rollout": turn_tree(2), "credit": TreeCredit(), "iterations": 1}
    config = trained(playing(tmp_path, ("calm", "hangs", "calm", "is closed"), 4, **changes))
    rows = {row.trajectory: row for row in episodes_of(config, 0)}
    for tree in trees_of(answers_of(config, 0)):
        known = [number for number, leaf in enumerate(tree.leaves) if leaf.grade.is_known]
        assert len(known) in (0, len(tree.leaves)) and len(tree.leaves) == 4
        remaining = tree.select_leaves(known)
        nodes = {node for path in remaining.paths for node in path}
        sampled = [tree.nodes[node].segment for node in nodes if tree.nodes[node].segment.origin == "sampled"]
        trained_tokens = sum(int(rows[leaf.id].trained.sum()) for leaf in remaining.leaves)
        assert trained_tokens == sum(len(segment.token_ids) for segment in sampled)
    (row,) = directory_of(config).read_metrics()
    assert row["tree/depth"] == 1 and row["tree/shared"] > 0 and row["train/grad_norm"] > 0
    assert row["episodes/unavailable"] == row["episodes/timeout"] == 1 / 4


def test_the_update_is_the_same_where_turns_of_a_tree_are_computed_once(tmp_path: Path) -> None:
    found = []
    for layout in ("padded", "tree"):
        changes = {"rollout": turn_tree(2, 2), "credit": TreeCredit(), "iterations": 1}
        config = playing(tmp_path / layout, ("calm",), 4, **changes)
        # A step of Adam would divide gradients that are 0 up to rounding by their own size.
        trainer = replace(config.trainer, layout=layout, adam_eps=1.0)
        config = trained(replace(config, trainer=trainer))
        assert directory_of(config).read_metrics()[0]["train/grad_norm"] > 0.01
        policy, _ = read_policy(directory_of(config).checkpoint_folder(1) / "policy")
        found.append(np.concatenate([policy[name].float().numpy().ravel() for name in sorted(policy)]))
    assert np.abs(found[0] - found[1]).max() < 2e-7


@pytest.mark.parametrize("credit", [Group(), Gae()], ids=str)
def test_turns_are_trained_and_measured_with_every_credit(credit: Group | Gae, tmp_path: Path) -> None:
    sets = (EvaluationSet(split="validation", problems=4, while_training=True),)
    given = {"rollout": replace(TURNS, samples=4), "evaluation": Evaluation(sets=sets, every=1)}
    config = trained(playing(tmp_path, ("calm",), 4, credit=credit, **given))
    for row in directory_of(config).read_metrics():
        assert row["train/grad_norm"] > 0 and row["evaluation/validation/turns/count"] >= 2
    assert any(one.step_rewards for iteration in range(2) for one in episodes_of(config, iteration))


# Rounds until groups are mixed

GROUPS = 5


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    """Rounds of 4 problems; about every other group is mixed."""
    return trained(
        small(
            tmp_path_factory.mktemp("dynamic"),
            rollout=UntilMixed(rollout=ANSWERS, groups=GROUPS),
            selection=MixedGroups(at_most=GROUPS),
        )
    )


def test_every_iteration_trains_on_as_many_groups_and_counts_all_that_it_sampled(
    dynamic: PolicyIteration,
) -> None:
    for iteration, row in enumerate(directory_of(dynamic).read_metrics()):
        sampled = answers_of(dynamic, iteration)
        problems = {t.problem.id for t in sampled}
        assert row["rollout/rounds"] == len(problems) / 4 > 1
        assert row["episodes/count"] == len(sampled) == 2 * len(problems)
        assert row["episodes/score"] == pytest.approx(sum(t.score for t in sampled) / len(sampled))
        groups: dict[str, list[Episode]] = {}
        for episode in episodes_of(dynamic, iteration):
            groups.setdefault(episode.group, []).append(episode)
        assert len(groups) == GROUPS
        assert all({e.score for e in group} == {0.0, 1.0} for group in groups.values())
        tokens = sum(len(t.response_ids) for t in sampled)
        assert row["engine/tokens_per_second"] * row["seconds/generation"] == pytest.approx(tokens, rel=1e-3)
        assert row["rollout/groups_dropped"] == row["selection/groups_dropped"] < 1
        assert row["rollout/groups_lacking"] == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stored_rounds_are_dealt_to_any_number_of_ranks_by_whole_groups(
    dynamic: PolicyIteration, world_size: int
) -> None:
    stored = answers_of(dynamic, 0)
    shares = []
    for rank in range(world_size):
        ranks: Any = SimpleNamespace(rank=rank, world_size=world_size)
        shares.append(answers_of_trees(generation.trees_of_rank(ranks, stored)))
    assert [trajectory for share in shares for trajectory in share] == stored
    counts = [len({t.problem.id for t in share}) for share in shares]
    assert all(len(share) == 2 * count for share, count in zip(shares, counts, strict=True))
    assert max(counts) - min(counts) <= 1


def test_the_bound_of_rounds_is_said_in_the_log_and_the_run_goes_on(tmp_path: Path) -> None:
    rollout = UntilMixed(rollout=ANSWERS, groups=50, max_rounds=2)
    log = log_of(trained(small(tmp_path, rollout=rollout, selection=MixedGroups(at_most=50), iterations=1)))
    assert log.count("50 problems with answers that differ in score were asked for") == 1
    assert "since max_rounds is 2" in log


# Shaped rewards


def test_shaping_reaches_episodes_and_metrics_and_leaves_stored_trajectories_as_they_were_graded(
    tmp_path: Path,
) -> None:
    shaping = (OverlongPenalty(cache=6, scale=0.5), LengthPenalty(weight=0.25))
    config = trained(small(tmp_path, shaping=shaping, iterations=1))
    stored, episodes = answers_of(config, 0), episodes_of(config, 0)
    assert {t.bonus for t in stored} == {0.0}
    assert [e.score for e in episodes] == [t.score for t in stored]
    assert any(e.reward != e.score for e in episodes)
    (row,) = directory_of(config).read_metrics()
    for name in ("score", "reward"):
        assert row[f"episodes/{name}"] == pytest.approx(mean(getattr(e, name) for e in episodes))
    assert row["shaping/overlong_penalty"] < 0
    assert "shaping/length_penalty" in row
    assert f"score {row['episodes/score']:.3f}  reward {row['episodes/reward']:.3f}" in log_of(config)


# Threads, and what shaping remembers of answers from one iteration to the next

TAGGED = replace(MODEL, added_tokens=TAGS)
ACCELERATION = Acceleration(
    weight=0.5, clip=0.5, form="saved", reference=Running(decay=0.5), floor=-0.5, threads="written"
)


def threaded(base: Path, **changes: Any) -> PolicyIteration:
    """It is asked the same few problems again and again, is often right, and likes to open and close
    threads."""
    given = {
        "task": replace(TASK, train_size=6, grader=EvenAnswers()),
        "model": TAGGED,
        "engine": FakeSettings(model=TAGGED, odds={"<Parallel>": 2.0, "<Thread>": 4.0, "</Thread>": 4.0}),
        "rollout": ParallelThreads(samples=6, max_tokens=30, unfinished_reward=None, parallel=False),
        **changes,
    }
    return small(base, **given)


def test_an_evaluation_tells_of_each_answer_and_of_all(tmp_path: Path) -> None:
    sets = (EvaluationSet(split="test", samples=3, while_training=True),)
    config = trained(threaded(tmp_path, iterations=1, evaluation=Evaluation(every=1, sets=sets)))
    summary, rows = evaluated(config, 1, "test")
    assert len(rows) == 30
    for row in rows:
        own = row["threads"]
        assert own["total_num_tokens"] == row["tokens"]
        assert own["with_parallel"] == float("<Parallel>" in row["text"])
        assert own["num_tokens_in_the_longest_thread"] <= row["tokens"]
    assert len({row["threads"]["acceleration_ratio"] for row in rows}) > 2
    (metrics,) = directory_of(config).read_metrics()
    right = [row for row in rows if row["reward"] == 1.0]
    assert 0 < len(right) < len(rows)
    for name in ("acceleration_ratio", "num_tokens_in_the_longest_thread", "with_parallel"):
        for ending, kept in (("", rows), ("_right", right)):
            expected = mean(row["threads"][name] for row in kept)
            assert summary["threads"][name + ending] == pytest.approx(expected)
            assert metrics[f"evaluation/test/threads/{name}{ending}"] == pytest.approx(expected)


def test_an_evaluation_of_a_model_without_tags_tells_nothing_of_threads(tmp_path: Path) -> None:
    sets = Evaluation(sets=(EvaluationSet(split="test"),))
    config = trained(small(tmp_path, iterations=1, evaluation=sets))
    summary, rows = evaluated(config, 1, "test")
    named = [*summary, *(name for row in rows for name in row), *directory_of(config).read_metrics()[0]]
    assert not [name for name in named if "threads" in name]


def test_what_shaping_remembers_is_kept_with_each_iteration_and_missed_where_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(threaded(tmp_path, shaping=(ACCELERATION,), iterations=3))
    lengths: dict[str, float] = {}
    moved = 0
    for iteration, memory in enumerate(computed(config)["remembered"]):
        plain: dict[str, list[int]] = {}
        for one in answers_of(config, iteration):
            if one.grade.correct and "<Parallel>" not in one.text:
                plain.setdefault(one.problem.id, []).append(len(one.response_ids))
        for problem, found in plain.items():
            moved += problem in lengths and lengths[problem] != mean(found)
            lengths[problem] = (lengths.get(problem, mean(found)) + mean(found)) / 2
        assert memory == {"acceleration": lengths}
    assert moved, "a mean that never moved would show nothing"
    for row in directory_of(config).read_metrics():
        assert "shaping/acceleration" in row
        assert 0 <= row["acceleration/without_reference"] < 1

    struck = threaded(tmp_path / "struck", shaping=(ACCELERATION,))
    with monkeypatch.context() as patch:
        stop = raises_after(generation.write_episodes, 1, RuntimeError("struck here"))
        patch.setattr(generation, "write_episodes", stop)
        with pytest.raises(RuntimeError, match="struck here"):
            train(struck)
    (directory_of(struck).iteration_folder(0) / "memory.json").unlink()
    with pytest.raises(ValueError, match=r"memory.json is gone, .*another experiment_name"):
        train(threaded(tmp_path / "struck", shaping=(ACCELERATION,)))


def test_shaping_that_remembers_nothing_writes_no_memory(tmp_path: Path) -> None:
    directory = train(threaded(tmp_path, iterations=1, shaping=(replace(ACCELERATION, reference=Total()),)))
    assert not (directory.iteration_folder(0) / "memory.json").exists()


def test_a_reference_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    nowhere = replace(ACCELERATION, reference=Measured(answers=str(tmp_path / "answers.jsonl")))
    config = threaded(tmp_path, shaping=(nowhere,))
    with pytest.raises(ValueError, match="run the evaluation of the sequential experiment first"):
        commands.run("run_iteration_loop", config, {})
    assert not directory_of(config).path.exists()


# Which problems


@dataclass(frozen=True, kw_only=True)
class Uneven(AdditionChain):
    """Every fifth prompt is long."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return [
            replace(p, prompt=p.prompt * (9 if i % 5 == 0 else 1))
            for i, p in enumerate(super().problems(split))
        ]


UNEVEN = Uneven(count=3, digits=2, train_size=60, validation_size=10, test_size=10)


def test_an_iteration_without_a_number_of_problems_takes_the_whole_split(tmp_path: Path) -> None:
    task = replace(TASK, train_size=6)
    directory = train(small(tmp_path, task=task, problems_per_iteration=None, problem_sampling="epochs"))
    rows = directory.read_metrics()
    assert [row["episodes/count"] for row in rows] == [12, 12], "6 problems, 2 answers each"


def test_training_leaves_long_prompts_out_and_says_how_many_and_evaluation_leaves_none_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = replace(ANSWERS, max_tokens=60, max_prompt_tokens=20)
    sets = (EvaluationSet(split="test", samples=2, task=UNEVEN),)
    config = small(
        tmp_path,
        iterations=1,
        task=UNEVEN,
        rollout=rollout,
        problems_per_iteration=48,
        evaluation=Evaluation(sets=sets),
    )
    train(config)
    said = capsys.readouterr().err
    left_out = "12 of 60 training problems are left out: their prompts are longer than max_prompt_tokens = 20"
    assert left_out in said and "48 training problems" in said
    assert "on 10 problems, 2 of them with too long a prompt" in said
    summary, rows = evaluated(config, 1, "test")
    assert (summary["n_problems"], summary["samples"], summary["too_long"]) == (10, 2, 2)
    unanswered = [row for row in rows if row["tokens"] == 0]
    assert {row["problem"] for row in unanswered} == {"test/0", "test/5"}
    assert len(rows) == 20 and len(unanswered) == 4
    assert all(row["reward"] == 0.0 and row["outcome"] == "no_answer" for row in unanswered)
    assert all(row["tokens"] <= 64 - len(row["prompt"]) for row in rows if row["tokens"])
    with pytest.raises(ValueError, match="all 60 training problems have prompts of more than"):
        train(replace(config, rollout=replace(rollout, max_prompt_tokens=2), experiment_name="none"))
