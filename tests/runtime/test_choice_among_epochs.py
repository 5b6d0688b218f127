"""Which epoch an iteration goes on with, and that a crash changes neither that nor the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.in_process import (
    FakeSettings,
    directory_of,
    raises_after,
    sampled_requests,
    small,
    train,
)
from tests.support.faults import Experiment
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.inference.base import EngineError
from treetune.inference.settings import Engines
from treetune.rollouts.credit import Gae, NoCredit
from treetune.rollouts.selection import All, CorrectOnly, PreferencePairs
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import training
from treetune.runtime.base import ChooseCheckpoint, Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.sampler import Sampler
from treetune.runtime.training import choose
from treetune.store.files import write_json, write_text
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.objectives.preference import DpoPositive

SETS = Evaluation(sets=(EvaluationSet(split="validation", problems=3),))


def restem(
    base: Path, epochs: int = 3, rule: Any = None, every: int | None = None, **changes: Any
) -> PolicyIteration:
    """Two iterations; `rule` None chooses nothing."""
    return small(
        base,
        **{
            "credit": NoCredit(),
            "selection": CorrectOnly(),
            "trainer": Trainer(
                objective=MaximumLikelihood(aggregation="sequence"),
                learning_rate=1e-2,
                epochs=epochs,
                minibatch_size=2,
            ),
            "restart": "every_iteration",
            "evaluation": SETS,
            "choose_checkpoint": rule and ChooseCheckpoint(set="validation", rule=rule, every=every),
        }
        | changes,
    )


def scripted(
    monkeypatch: pytest.MonkeyPatch, accuracies: Sequence[Sequence[float] | Mapping[int, float]]
) -> list[tuple[int, int]]:
    """Measurements come from this table, by iteration and epoch (or step); the list of those that were asked
    for."""
    asked: list[tuple[int, int]] = []

    def measure(sampler: Sampler, done: int, chosen: EvaluationSet, folder: Path, name: str) -> None:
        assert chosen.label == "validation"
        iteration, epoch = int(folder.parts[-3]), int(folder.name)
        sampler.server.ready()
        assert sampler.server.engine is not None
        assert sampler.server.engine.version == done == iteration + 1, "the weights are in the engine"
        asked.append((iteration, epoch))
        names = ("ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
        write_text(folder / "answers.jsonl", "")
        write_json(
            folder / "summary.json",
            {"pass_at_1": accuracies[iteration][epoch], **dict.fromkeys(names, 0.0)},
        )

    monkeypatch.setattr(training, "measure", measure)
    return asked


def weights(config: PolicyIteration, number: int = 2) -> bytes:
    return (directory_of(config).checkpoint(number) / "policy" / "model.safetensors").read_bytes()


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
    assert choose(accuracies, "first_maximum") == first_maximum
    assert choose(accuracies, "best") == best


def test_the_first_maximum_ends_training_and_the_chosen_weights_are_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [[0.1, 0.3, 0.2, 0.9], [0.1, 0.2, 0.3, 0.4]])
    chosen = restem(tmp_path / "chosen", rule="first_maximum")
    directory = train(chosen)
    # The start weights were measured in the first iteration, with the same draws.
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    rows = directory.read_metrics()
    assert [row["choice/epoch"] for row in rows] == [1, 3]
    assert [row["choice/accuracy"] for row in rows] == [0.3, 0.4]
    # What was measured of the chosen weights is the iteration's evaluation too.
    assert [row["evaluation/validation/pass_at_1"] for row in rows] == [0.3, 0.4]
    assert not list(directory.path.glob("iterations/*/candidates/state"))
    monkeypatch.undo()
    one_epoch, three = restem(tmp_path / "one", epochs=1), restem(tmp_path / "three", epochs=3)
    train(one_epoch)
    train(three)
    assert weights(chosen, 1) == weights(one_epoch, 1)
    # The engine's answers don't depend on the weights here, and training began anew.
    assert weights(chosen, 2) == weights(three, 2)
    assert weights(chosen, 1) != weights(three, 1)


def test_the_best_epoch_is_taken_after_all_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [[0.3, 0.1, 0.2, 0.3]] * 2)
    config = restem(tmp_path, rule="best")
    directory = train(config)
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert [row["choice/epoch"] for row in directory.read_metrics()] == [0, 0]
    assert weights(config, 1) == weights(config, 2), "the start weights, both times"


@pytest.mark.parametrize(("after", "every"), [(3, None), (4, None), (8, None), (11, None), (8, 3), (11, 3)])
def test_a_run_that_ends_in_a_measurement_continues_there_with_the_same_weights(
    after: int, every: int | None, tmp_path: Path
) -> None:
    """The fake engine fails at a request; the answers before it are kept, and none is asked for twice."""
    undisturbed = restem(tmp_path / "undisturbed", rule="best", epochs=2, every=every)
    train(undisturbed)
    config = restem(
        tmp_path / "hit", rule="best", epochs=2, every=every, engine=FakeSettings(fail_after=after)
    )
    with pytest.raises(EngineError, match="told to fail here"):
        train(config)
    again = replace(config, engines=Engines(policy=FakeSettings()))
    train(again)
    assert weights(again) == weights(undisturbed)
    assert sampled_requests(again) == sampled_requests(undisturbed) - after
    name = "choice/epoch" if every is None else "choice/step"
    choices = [[row[name] for row in directory_of(c).read_metrics()] for c in (again, undisturbed)]
    assert choices[0] == choices[1]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_run_that_ends_in_training_chooses_the_same_again(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Struck when it writes a candidate's state; the measurements of before are read back."""
    from treetune.trainers.core import PolicyTrainer

    table = [[0.1, 0.2, 0.3, 0.2], [0.1, 0.2, 0.1, 0.0]]
    asked = scripted(monkeypatch, table)
    undisturbed, config = (
        restem(tmp_path / "whole", rule="first_maximum"),
        restem(tmp_path / "hit", rule="first_maximum"),
    )
    train(undisturbed)
    expected = sorted(asked)
    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "save", raises_after(PolicyTrainer.save, when, OSError("struck")))
        with pytest.raises(OSError, match="struck"):
            train(config)
    train(config)
    assert sorted(asked) == expected, "each is measured once"
    assert weights(config, 1) == weights(undisturbed, 1)
    assert weights(config, 2) == weights(undisturbed, 2)


def test_pairs_are_trained_on_and_the_best_epoch_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [[0.1, 0.2, 0.1]])
    config = small(
        tmp_path,
        rollout=SingleTurn(samples=6, max_tokens=12, unfinished_reward=1.0),
        credit=NoCredit(),
        selection=PreferencePairs(max_pairs_per_problem=4),
        trainer=Trainer(objective=DpoPositive(), learning_rate=1e-2, epochs=2, minibatch_size=4),
        iterations=1,
        evaluation=SETS,
        choose_checkpoint=ChooseCheckpoint(set="validation"),
    )
    (row,) = train(config).read_metrics()
    assert row["selection/pairs"] > 4
    assert row["preference/chosen_reward"] > 0 > row["preference/rejected_reward"]
    assert row["choice/epoch"] == 1


def preferences(base: Path, every: int | None = None) -> PolicyIteration:
    """One iteration on pairs, in two epochs."""
    return small(
        base,
        rollout=SingleTurn(samples=6, max_tokens=12, unfinished_reward=1.0),
        credit=NoCredit(),
        selection=PreferencePairs(max_pairs_per_problem=4),
        trainer=Trainer(objective=DpoPositive(), learning_rate=1e-2, epochs=2, minibatch_size=4),
        iterations=1,
        evaluation=SETS,
        choose_checkpoint=ChooseCheckpoint(set="validation", rule="best", every=every),
    )


def test_candidates_may_be_so_many_steps_apart_and_the_end_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: defaultdict[int, float] = defaultdict(lambda: 0.1)
    asked = scripted(monkeypatch, [table])
    (row,) = train(preferences(tmp_path / "all", every=3)).read_metrics()
    assert row["train/steps"] == 8
    assert asked == [(0, 0), (0, 3), (0, 6), (0, 8)]
    assert (row["choice/step"], row["choice/accuracy"], row["choice/step_3"]) == (0, 0.1, 0.1)

    # What is between two candidates of one epoch is in neither of those that epochs would have given.
    table[3] = 0.9
    chosen = preferences(tmp_path / "third step", every=3)
    (row,) = train(chosen).read_metrics()
    assert (row["choice/step"], row["choice/accuracy"]) == (3, 0.9)
    table.clear()
    table[8] = 0.9
    last = preferences(tmp_path / "last step", every=3)
    train(last)
    assert weights(chosen, 1) != weights(last, 1)
    table.clear()
    table[2] = 0.9
    by_epoch = preferences(tmp_path / "last epoch")
    train(by_epoch)
    assert weights(last, 1) == weights(by_epoch, 1), "where candidates lie changes no weights"


def test_the_first_step_that_is_no_better_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = scripted(monkeypatch, [{0: 0.1, 2: 0.2, 4: 0.2, 6: 0.9}, {0: 0.1, 2: 0.1}])
    directory = train(restem(tmp_path, rule="first_maximum", epochs=8, every=2))
    assert asked == [(0, 0), (0, 2), (0, 4), (1, 2)]
    assert [row["choice/step"] for row in directory.read_metrics()] == [2, 0]


def test_where_an_evaluation_chooses_it_belongs_to_what_a_run_computes(tmp_path: Path) -> None:
    config = restem(tmp_path, rule="best", epochs=1)
    plain = {"choose_checkpoint": {"set": "validation"}}
    train(config, evaluation={"seed": 0}, **plain)
    with pytest.raises(ValueError, match=r"another configuration: evaluation"):
        train(config, evaluation={"seed": 1}, **plain)


MLE = Trainer(objective=MaximumLikelihood(), learning_rate=1e-3)
PPO = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3)
DPO = Trainer(objective=DpoPositive(), learning_rate=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer": DPO, "selection": All(), "credit": NoCredit()},
            "choose the selection 'preference_pairs'",
        ),
        ({"trainer": PPO, "selection": PreferencePairs()}, "choose the objective 'dpo' or 'dpo_positive'"),
        (
            {
                "trainer": DPO,
                "selection": PreferencePairs(),
                "rollout": SingleTurn(samples=1, max_tokens=12),
            },
            "set the rollout's samples to 2 or more",
        ),
        ({"restart": "every_iteration", "trainer": PPO, "credit": Gae()}, "set restart to 'never'"),
        (
            {"choose_checkpoint": ChooseCheckpoint(set="held-out"), "evaluation": SETS},
            "'held-out', and the evaluation has only validation remedy name one of them",
        ),
        ({"choose_checkpoint": ChooseCheckpoint(set="validation")}, "has no sets remedy name one"),
    ],
    ids=["pairs missing", "pairs for nobody", "one answer", "critic", "another set", "no set"],
)
def test_parts_that_do_not_go_together_are_told_before_anything_starts(
    changes: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(small(tmp_path, **changes))
    assert message in " ".join(str(refused.value).split())


RESTEM = """{
  rollout+: { samples: 4, max_tokens: 10 },  // a good half of random answers are longer, and earn the reward
  credit: { type: "none" }, selection: { type: "correct_only" }, iterations: 2, checkpoints: { every: 1 },
  restart: "every_iteration", choose_checkpoint: { set: "validation", rule: "best" },
  evaluation: { sets: [{ split: "validation", problems: 20, samples: 4 }] },  // long enough to be struck
  trainer+: {
    objective: { type: "mle", aggregation: "sequence" }, advantage_normalisation: "none",
    learning_rate: 1e-2, epochs: 2,
  },
}"""


@pytest.mark.server
@pytest.mark.slow
def test_a_run_killed_while_it_measures_an_epoch_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    undisturbed, struck = Experiment(tmp_path, "undisturbed"), Experiment(tmp_path, "struck")
    undisturbed.run("run_iteration_loop", RESTEM)
    running = struck.start("run_iteration_loop", RESTEM)
    candidate = struck.directory.candidate(1, 1)
    running.freeze(
        lambda: any(path.stat().st_size for path in candidate.glob("journal/*.jsonl")),
        (candidate / "summary.json").is_file,
        "the measurement of an epoch",
    )
    running.kill("rank")
    assert running.wait() != 0
    running.assert_all_gone()
    assert struck.directory.resumable() == 1
    struck.run("run_iteration_loop", RESTEM)
    assert struck.policy(2) == undisturbed.policy(2)
    rows, expected = (
        [
            {name: value for name, value in row.items() if name.startswith(("choice/", "train/kl"))}
            for row in experiment.directory.read_metrics()
        ]
        for experiment in (struck, undisturbed)
    )
    assert rows == expected
    assert "train/kl" in rows[1], "how far the policy had gone that the second iteration sampled"
