"""Which epoch or step an iteration goes on with. (`test_interrupted_runs` has what a crash changes:
nothing.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import TRAINER, raises_after, small, train, trained, weights_of
from treetune.credit.no_credit import NoCredit
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.preference import DpoPositive
from treetune.rollouts.selection import CorrectOnly, PreferencePairs
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import training
from treetune.runtime.base import ChooseCheckpoint, Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.resources import RunResources
from treetune.runtime.training import choose_candidate
from treetune.store.files import write_json, write_text
from treetune.trainer.core import PolicyTrainer

SETS = Evaluation(sets=(EvaluationSet(split="validation", problems=3),))
Table = Sequence[Sequence[float] | Mapping[int, float]]


def restem(base: Path, rule: Any = None, epochs: int = 3, every: int | None = None) -> PolicyIteration:
    """Two iterations; `rule` None chooses nothing."""
    objective = MaximumLikelihood(aggregation="sequence")
    return small(
        base,
        credit=NoCredit(),
        selection=CorrectOnly(),
        trainer=replace(TRAINER, objective=objective, learning_rate=1e-2, epochs=epochs, minibatch_size=2),
        restart="every_iteration",
        evaluation=SETS,
        choose_checkpoint=rule and ChooseCheckpoint(set="validation", rule=rule, every=every),
    )


def preferences(base: Path, every: int | None = None) -> PolicyIteration:
    """One iteration on pairs, in two epochs."""
    return small(
        base,
        rollout=SingleTurn(samples=6, max_tokens=12, unfinished_reward=1.0),
        credit=NoCredit(),
        selection=PreferencePairs(max_pairs_per_problem=4),
        trainer=replace(TRAINER, objective=DpoPositive(), learning_rate=1e-2, epochs=2, minibatch_size=4),
        iterations=1,
        evaluation=SETS,
        choose_checkpoint=ChooseCheckpoint(set="validation", rule="best", every=every),
    )


def scripted(monkeypatch: pytest.MonkeyPatch, accuracies: Table) -> list[tuple[int, int]]:
    """Measurements come from this table, by iteration and epoch (or step); the list of those that were asked
    for."""
    asked: list[tuple[int, int]] = []

    def measure(resources: RunResources, done: int, chosen: EvaluationSet, folder: Path, name: str) -> None:
        assert chosen.label == "validation"
        iteration, epoch = int(folder.parts[-3]), int(folder.name)
        resources.server.wait_until_ready()
        assert resources.server.engine is not None
        assert resources.server.engine.version == done == iteration + 1, "the weights are in the engine"
        asked.append((iteration, epoch))
        names = ("ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
        write_text(folder / "answers.jsonl", "")
        accuracy = {"pass_at_1": accuracies[iteration][epoch]}
        write_json(folder / "summary.json", dict.fromkeys(names, 0.0) | accuracy)

    monkeypatch.setattr(training, "measure_set", measure)
    return asked


@pytest.mark.parametrize(
    ("accuracies", "first_maximum", "best"),
    [
        ([0.3], 0, 0),
        ([0.3, 0.2, 0.5], 0, 2),
        ([0.3, 0.4, 0.4, 0.6], 1, 3),
        ([0.3, 0.4, 0.5], 2, 2),
        ([0.5, 0.6, 0.5, 0.6], 1, 1),
    ],
)
def test_the_rules(accuracies: list[float], first_maximum: int, best: int) -> None:
    assert (choose_candidate(accuracies, "first_maximum"), choose_candidate(accuracies, "best")) == (
        first_maximum,
        best,
    )


def test_the_first_maximum_ends_training_and_the_chosen_weights_are_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [[0.1, 0.3, 0.2, 0.9], [0.1, 0.2, 0.3, 0.4]])
    chosen = restem(tmp_path / "chosen", "first_maximum")
    directory = train(chosen)
    # The start weights were measured in the first iteration, with the same draws.
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    rows = directory.read_metrics()
    assert [row["choice/epoch"] for row in rows] == [1, 3]
    # What was measured of the chosen weights is the iteration's evaluation too.
    for name in ("choice/accuracy", "evaluation/validation/pass_at_1"):
        assert [row[name] for row in rows] == [0.3, 0.4]
    assert "train/kl" in rows[1], "how far the policy had gone that the second iteration sampled"
    assert not list(directory.path.glob("iterations/*/candidates/state"))
    monkeypatch.undo()
    one_epoch, three = trained(restem(tmp_path / "one", epochs=1)), trained(restem(tmp_path / "three"))
    assert weights_of(chosen, 1) == weights_of(one_epoch, 1)
    # The engine's answers don't depend on the weights here, and training began anew.
    assert weights_of(chosen, 2) == weights_of(three, 2)
    assert weights_of(chosen, 1) != weights_of(three, 1)


def test_the_best_epoch_is_taken_after_all_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [[0.3, 0.1, 0.2, 0.3]] * 2)
    config = restem(tmp_path, "best")
    assert [row["choice/epoch"] for row in train(config).read_metrics()] == [0, 0]
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert weights_of(config, 1) == weights_of(config, 2), "the start weights, both times"


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_run_that_ends_as_it_writes_a_candidate_chooses_the_same_again(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [[0.1, 0.2, 0.3, 0.2], [0.1, 0.2, 0.1, 0.0]])
    undisturbed = trained(restem(tmp_path / "whole", "first_maximum"))
    expected = sorted(asked)
    asked.clear()
    config = restem(tmp_path / "hit", "first_maximum")
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "save", raises_after(PolicyTrainer.save, when, OSError("struck")))
        with pytest.raises(OSError, match="struck"):
            train(config)
    train(config)
    assert sorted(asked) == expected, "each is measured once"
    for number in (1, 2):
        assert weights_of(config, number) == weights_of(undisturbed, number)


def test_candidates_may_be_so_many_steps_apart_and_the_end_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: defaultdict[int, float] = defaultdict(lambda: 0.1)
    asked = scripted(monkeypatch, [table])

    def with_best(candidate: int, every: int | None) -> tuple[dict[str, Any], bytes]:
        """The row and the weights of a run whose best candidate is this one."""
        table.clear()
        table[candidate] = 0.9
        config = preferences(tmp_path / f"{candidate} of every {every}", every)
        (row,) = train(config).read_metrics()
        return row, weights_of(config, 1)

    third, weights_of_third = with_best(3, every=3)
    assert asked == [(0, 0), (0, 3), (0, 6), (0, 8)]
    assert [third[f"choice/{name}"] for name in ("step", "accuracy", "step_6")] == [3, 0.9, 0.1]
    assert third["train/steps"] == 8 and third["selection/pairs"] > 4
    assert third["preference/chosen_reward"] > 0 > third["preference/rejected_reward"]
    # What is between two candidates of one epoch is in neither of those that epochs would have given.
    _, weights_of_last = with_best(8, every=3)
    assert weights_of_third != weights_of_last
    by_epoch, weights_of_second_epoch = with_best(2, every=None)
    assert by_epoch["choice/epoch"] == 2
    assert weights_of_last == weights_of_second_epoch, "where candidates lie changes no weights"


def test_the_first_step_that_is_no_better_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [{0: 0.1, 2: 0.2, 4: 0.2, 6: 0.9}, {0: 0.1, 2: 0.1}])
    directory = train(restem(tmp_path, "first_maximum", epochs=8, every=2))
    assert asked == [(0, 0), (0, 2), (0, 4), (1, 2)]
    assert [row["choice/step"] for row in directory.read_metrics()] == [2, 0]
