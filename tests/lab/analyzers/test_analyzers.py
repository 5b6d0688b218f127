"""Analyses of experiments: the commands `run_analyzers` and `compare_analyses`, and the credit microscope.

These tests promise:

* Every analyzer writes its numbers, a figure and its states once, and goes on after an interruption.
* The gradient of an analysis is the one that the trainer took.
* Whatever an analyzer lacks is named, and the other analyzers go on.
* The microscope shows the credit of the run beside other methods, and samples only what is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers the analyzers)
from tests.support import tabular_mdp as mdp
from tests.support.small_run import FakeSettings, sampled_requests, small, train
from treetune.config.build import build, check_root
from treetune.credit.gae import Gae
from treetune.credit.grpo import Group
from treetune.credit.values.bisect import Bisect
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.analyzers.command import compare_analyses, run_analyzers
from treetune.lab.analyzers.credit_bench import order_by_problem
from treetune.lab.analyzers.credit_microscope import (
    OWN_CREDIT,
    TRUE_CREDIT,
    CreditMicroscope,
    choose_answers,
    draw_microscope,
)
from treetune.lab.analyzers.gradients import Loss, problem_gradients
from treetune.lab.analyzers.step_credit import Shown, StepCredit
from treetune.lab.arena.worth import describe_worth, measured_ratio
from treetune.main import main
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.analysis import Analyzer
from treetune.runtime.base import PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.session import Session
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import units_of

Captured = pytest.CaptureFixture[str]
ROLLOUTS = {"rollouts": 8, "states": 6, "problems": 4, "samples": [1, 3]}
VALUES = {"type": "value_accuracy", "prompts": 2, **ROLLOUTS}
EVERY_ANALYZER = [
    {**VALUES, "checkpoints": "all"},
    {"type": "action_ranking", "candidates": 12, "alternatives": 40, "at_least": 2, **ROLLOUTS},
    {
        "type": "credit_bench",
        "problems": 2,
        "truth": {"type": "continuations", "samples": 4},
        "methods": {
            "GRPO": {"type": "group"},
            "VinePPO": {"type": "monte_carlo", "samples": 2},
            "mask": {"type": "probability_mask", "below": 0.5},
        },
        "with_rollouts": {
            "tree": {
                "rollout": {
                    "type": "tree",
                    "samples": 2,
                    "max_tokens": 8,
                    "branching": {"type": "least_sure"},
                },
                "credit": {"type": "tree"},
            }
        },
    },
    {
        "type": "credit_bench",
        "name": "credit_worth",
        "problems": 2,
        "truth": None,
        "methods": {
            "RLOO": {"type": "rloo"},
            "siblings": {"type": "monte_carlo", "values": {"type": "siblings"}},
        },
    },
    {"type": "advantage_distribution"},
    {"type": "kl_to_reference", "problems": 4, "samples": 2},
    {"type": "diversity", "name": "different"},
    {"type": "weight_distance"},
]
PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Keeps one process group for all runs in this process: DeepSpeed remembers a group that was left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        yield


@pytest.fixture(scope="module")
def runs(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one finished experiment without a critic and one with it. Tests must not change them."""
    base = tmp_path_factory.mktemp("runs")
    train(small(base, experiment_name="group"))
    train(small(base, experiment_name="gae", credit=Gae()))
    return base


@pytest.fixture
def base(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def experiment(base: Path, name: str, *settings: dict[str, Any], **changes: Any) -> PolicyIteration:
    if name == "gae":
        changes["credit"] = Gae()
    analyzers = tuple(build(Analyzer, dict(settings_of_analyzer)) for settings_of_analyzer in settings)
    return small(base, experiment_name=name, analyzers=analyzers, **changes)


def run_analysis(
    base: Path, name: str, *settings: dict[str, Any], **changes: Any
) -> tuple[int, PolicyIteration]:
    config = experiment(base, name, *settings, **changes)
    return run_analyzers(config, {**PLAIN, "analyzers": list(settings)}), config


def read_result(base: Path, name: str, label: str) -> dict[str, Any]:
    return json.loads((base / name / "analyses" / label / "result.json").read_text())


@pytest.fixture(scope="module")
def all_analyses(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the experiments and runs every analyzer on them. Tests must not change the result."""
    base = tmp_path_factory.mktemp("analysed") / "runs"
    shutil.copytree(runs, base)
    assert [run_analysis(base, name, *EVERY_ANALYZER)[0] for name in ("group", "gae")] == [0, 0]
    return base


@pytest.mark.parametrize("name", ["group", "gae"])
def test_every_analyzer_writes_numbers_a_figure_and_its_states_once(
    all_analyses: Path, name: str, capsys: Captured
) -> None:
    base = all_analyses
    labels = [settings.get("name", settings["type"]) for settings in EVERY_ANALYZER]
    assert sorted(path.name for path in (base / name / "analyses").iterdir()) == sorted(labels)
    for label in labels:
        folder = base / name / "analyses" / label
        names = {path.name for path in folder.iterdir()}
        assert names == {"result.json", "states.jsonl", "figure.png", "figure.svg"}
        assert (folder / "figure.png").read_bytes()[1:4] == b"PNG"
        assert (
            label in ("weight_distance", "credit_bench", "credit_worth")
            or (folder / "states.jsonl").read_text()
        )

    values = read_result(base, name, "value_accuracy")
    assert values["points"] == [0, 1, 2]
    numbers = values["numbers"]
    assert numbers["answers"] == {"0": "stored", "1": "stored", "2": "sampled"}, "the run ended there"
    estimators = {"monte_carlo_1", "monte_carlo_3"} | ({"critic"} if name == "gae" else set())
    assert set(numbers["by_checkpoint"]["2"]["estimators"]) == estimators
    scores = read_result(base, name, "credit_bench")["numbers"]["by_checkpoint"]["2"]["methods"]
    assert set(scores) == {"true advantages", "GRPO", "VinePPO", "mask", "tree"}
    assert scores["GRPO"]["cost"] == scores["mask"]["cost"] == 1.0 < scores["VinePPO"]["cost"]
    assert scores["tree"]["cost"] > 0
    lines = describe_worth(ExperimentDirectory(base / name))
    assert lines[0].startswith("after 2 iterations (") and lines[1].startswith("| method | gain per answer")
    assert lines[-1] == "no method has a gain here: all answers to each problem have the same reward"
    kl = read_result(base, name, "kl_to_reference")["numbers"]["by_checkpoint"]
    assert kl["0"]["k3"]["value"] == pytest.approx(0, abs=1e-9)
    assert kl["2"]["k3"]["value"] > kl["0"]["k3"]["value"]
    distance = read_result(base, name, "weight_distance")["numbers"]["by_checkpoint"]
    assert distance["0"]["all"]["absolute"] == 0 < distance["2"]["all"]["relative"]
    advantages = read_result(base, name, "advantage_distribution")["numbers"]
    assert advantages["episodes_without_advantages"] == 0
    assert advantages["episodes_without_values"] == (0 if name == "gae" else advantages["episodes"])

    code, config = run_analysis(base, name, *EVERY_ANALYZER)
    assert (code, sampled_requests(config)) == (0, 0)
    assert capsys.readouterr().out.count("is done") == len(EVERY_ANALYZER)


def test_the_cost_of_training_is_the_median_over_iterations_that_sampled_and_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"episodes/response_tokens": 10.0, "episodes/count": 8.0, "selection/kept": 4.0}
    rows = [
        row
        | {
            "credit/value_tokens": 80.0,
            "seconds/generation": 1.0,
            "seconds/credit": 1.0,
            "seconds/training": training_seconds,
        }
        for training_seconds in (1.0, 2.0, 100.0)
    ]
    # 2 seconds for 160 sampled tokens, and 2 for 40 trained ones.
    assert measured_ratio([*rows, {"iteration": 3.0}]) == pytest.approx(4.0)
    assert measured_ratio([{"iteration": 0.0}]) is None
    scores = {
        name: {"cost": cost, "problems": 2, "bias": 0.0, "gain": gain, "gain_per_token": gain}
        for name, cost, gain in [
            ("RLOO", 1.0, {"value": 1.0, "low": 1.0, "high": 1.0}),
            ("VinePPO", 6.0, {"value": 3.0, "low": 2.5, "high": 4.0}),
        ]
    }
    stored_result = {"numbers": {"by_checkpoint": {"7": {"solved": 0.5, "methods": scores}}}}
    monkeypatch.setattr("treetune.lab.arena.worth.read_result", lambda path: stored_result)
    directory: Any = SimpleNamespace(read_metrics=lambda: rows, analysis_folder=lambda name: name)
    assert describe_worth(directory)[-2:] == [
        "In this run, training a token took 4 times as long as sampling one (ρ).",
        "So VinePPO has the highest gain per cost: at least 1.25 times RLOO's.",
    ]
    scores["VinePPO"]["gain"]["low"] = 2.0
    assert describe_worth(directory)[-1].startswith("No method has a higher gain per cost than RLOO")


@pytest.mark.parametrize("name", ["group", "gae"])
@pytest.mark.parametrize("point", [0, 1])
def test_the_gradient_of_all_episodes_is_the_one_that_the_trainer_took(
    base: Path, name: str, point: int
) -> None:
    """The weights and the advantages are those of the iteration: another iteration's would differ."""
    config = experiment(base, name, VALUES)
    with Session.open(config, PLAIN, "analysis") as session:
        episodes = read_episodes(session.directory.iteration_folder(point) / "episodes.arrow")
        loss, gradients = Loss(session, point, episodes).gradients(units_of(episodes, in_pairs=False))
    metrics = ExperimentDirectory(base / name).read_metrics()[point]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    assert norm == pytest.approx(metrics["train/grad_norm"], rel=1e-4)
    assert loss == pytest.approx(metrics["train/loss"], rel=1e-4, abs=1e-6)


def test_the_gradients_of_problems_are_the_same_in_both_layouts_and_are_computed_once(
    base: Path, tmp_path: Path
) -> None:
    """A credit that trains only some tokens has the gradient of one that gives the others no advantage."""
    config = experiment(base, "group", VALUES)
    gradients = {}
    for layout in ("padded", "tree"):
        trainer = replace(config.trainer, layout=layout)
        with Session.open(replace(config, trainer=trainer), PLAIN, "analysis") as session:
            stored = read_episodes(session.directory.iteration_folder(1) / "episodes.arrow")
            advantages = np.random.default_rng(0).normal(size=len(stored))
            episodes = []
            masked = []
            zeroed = []
            for episode, advantage in zip(stored, advantages, strict=True):
                tokens = len(episode.response_ids)
                episodes.append(replace(episode, advantages=np.full(tokens, advantage)))
                is_first_T = np.arange(tokens) == 0
                masked.append(replace(episodes[-1], trained=is_first_T))
                zeroed.append(replace(episode, advantages=advantage * is_first_T))
            credits = [episodes, masked, zeroed]
            store = tmp_path / layout
            gradients[layout] = problem_gradients(session, 1, credits, 0, lambda *_: None, store)
            files = sorted(store.iterdir())
            problems = gradients[layout].shape[1]
            assert len(files) == 2 * problems, "masked and zeroed tokens make the same gradient"
            files[0].unlink()
            np.save(files[-1], np.load(files[-1]) + 1)  # if the file is read again, the result shows the 1
            second_gradients = problem_gradients(session, 1, credits, 0, lambda *_: None, store)
            changed = set((second_gradients - gradients[layout]).max(2).round(3).flatten().tolist())
            assert changed == {0.0, 1.0}
    assert np.abs(gradients["padded"]).max((1, 2)).all(), "each credit has a gradient"
    assert gradients["padded"][1].tolist() == gradients["padded"][2].tolist()
    assert gradients["tree"] == pytest.approx(gradients["padded"], rel=1e-3, abs=1e-6)


def test_answers_that_the_weights_of_the_checkpoint_did_not_sample_are_refused(base: Path) -> None:
    """An iteration's episodes belong to the weights before it, and to no others."""
    folder = base / "group" / "iterations"
    shutil.rmtree(folder / "0001")
    shutil.copytree(folder / "0000", folder / "0001")
    code, _ = run_analysis(base, "group", {**VALUES, "checkpoints": [1]})
    assert code == 1
    assert not (base / "group" / "analyses" / "value_accuracy").exists()


def test_the_lacks_of_an_analyzer_are_named_and_the_others_go_on(base: Path, capsys: Captured) -> None:
    shutil.rmtree(base / "gae" / "checkpoints" / "0002" / "critic")
    shutil.rmtree(base / "gae" / "iterations")
    settings = (VALUES, {"type": "diversity"}, {"type": "weight_distance", "checkpoints": [7]})
    code, config = run_analysis(base, "gae", *settings, {"type": "weight_distance", "name": "distance"})
    output = capsys.readouterr().out
    assert code == 1
    assert "value_accuracy: the checkpoint" in output and "holds no critic" in output
    assert "diversity: " in output and "no iteration with trajectories.arrow" in output
    assert "weight_distance: 7 is not the number of a checkpoint" in output and "there are 0, 1, 2" in output
    assert [path.name for path in (base / "gae" / "analyses").iterdir()] == ["distance"]
    assert config.engines.policy.engines == [], "nothing that could still be done needs an engine"


def test_an_experiment_without_checkpoints_or_with_another_configuration_is_refused(
    base: Path, capsys: Captured
) -> None:
    shutil.rmtree(base / "group" / "checkpoints")
    assert run_analysis(base, "group", VALUES)[0] == 1
    assert "has no checkpoint: train the experiment with `treetune run` first" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no experiment"):
        run_analysis(base, "another", VALUES)
    config = experiment(base, "group", VALUES)
    with pytest.raises(ValueError, match="another configuration"):
        run_analyzers(config, {**PLAIN, "trainer": {"seed": 2}, "analyzers": [VALUES]})
    with pytest.raises(ValueError, match="has no analyzers"):
        run_analysis(base, "group")
    assert main(["certify", str(base)]) == 2
    assert f"{base} has no experiment: {base / 'config.json'} is missing" in capsys.readouterr().err


def test_an_interrupted_analysis_goes_on_to_the_same_result(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "undisturbed")
    code, undisturbed = run_analysis(tmp_path / "undisturbed", "group", VALUES)
    assert code == 0
    needed = sampled_requests(undisturbed)
    code, interrupted = run_analysis(base, "group", VALUES, engine=FakeSettings(fail_after=needed // 2))
    assert code == 1
    assert not (base / "group" / "analyses" / "value_accuracy").exists(), "whole or not at all"
    code, resumed = run_analysis(base, "group", VALUES)
    assert code == 0
    assert sampled_requests(interrupted) + sampled_requests(resumed) == needed
    states = [
        (folder / "group" / "analyses" / "value_accuracy" / "states.jsonl").read_text()
        for folder in (base, tmp_path / "undisturbed")
    ]
    assert states[0] == states[1]


def test_other_settings_are_another_analysis_and_equal_ones_run_once(base: Path, capsys: Captured) -> None:
    assert run_analysis(base, "group", {"type": "diversity"})[0] == 0
    for _ in range(2):
        assert (
            run_analysis(base, "group", {"type": "diversity", "order": 2}, {"type": "diversity", "order": 2})[
                0
            ]
            == 0
        )
    assert read_result(base, "group", "diversity")["settings"] == {"type": "diversity", "order": 2}
    assert capsys.readouterr().out.count("is done") == 1
    with pytest.raises(ValueError, match="several entries of analyzers have the same name: diversity"):
        check_root(experiment(base, "group", {"type": "diversity"}, {"type": "diversity", "order": 2}))


def test_several_experiments_go_into_one_figure_and_those_of_one_name_are_pooled(
    all_analyses: Path, tmp_path: Path
) -> None:
    base = all_analyses
    experiments = [f"VinePPO={base / 'group'}", str(base / "gae")]
    figure = compare_analyses("value_accuracy", experiments, tmp_path / "out" / "values")
    assert sorted(path.name for path in figure.parent.iterdir()) == [
        "values.json",
        "values.png",
        "values.svg",
    ]
    assert set(json.loads(figure.with_name("values.json").read_text())) == {"VinePPO", "gae"}
    svg = figure.with_name("values.svg").read_text()
    assert "VinePPO: MC, K = 3" in svg and "gae: critic" in svg
    with pytest.raises(ValueError, match=r"has no analysis 'none' .*it has: .*value_accuracy"):
        compare_analyses("none", experiments, tmp_path / "out" / "diversity")

    sources = [f"both={base / name}" for name in ("group", "gae")]
    figure = compare_analyses("value_accuracy", sources, tmp_path / "both")
    (pooled,) = json.loads(figure.with_name("both.json").read_text()).values()
    separate = [read_result(base, name, "value_accuracy")["numbers"]["all"] for name in ("group", "gae")]
    together = pooled["numbers"]["all"]
    for part in ("within", "prompts"):
        assert together["states"][part]["count"] == sum(
            numbers["states"][part]["count"] for numbers in separate
        )
    errors = [numbers["estimators"]["monte_carlo_3"]["within"] for numbers in (*separate, together)]
    sums = [numbers["states"] * numbers["mean_absolute_error"]["value"] for numbers in errors]
    assert sums[2] == pytest.approx(sums[0] + sums[1])
    assert together["estimators"]["critic"] == separate[1]["estimators"]["critic"]
    with pytest.raises(ValueError, match="weight_distance can't be combined"):
        compare_analyses("weight_distance", [sources[1]] * 2, tmp_path / "twice")


def test_a_run_is_finished_whatever_analyzers_its_command_names(base: Path, capsys: Captured) -> None:
    config = experiment(base, "group", VALUES)
    run_iteration_loop(config, {**PLAIN, "analyzers": [VALUES]})
    assert "is finished" in capsys.readouterr().out
    assert ExperimentDirectory(base / "group").checkpoints() == [1, 2]


@pytest.fixture(scope="module")
def run(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains for two iterations, in which an answer that was cut off earns a half."""
    config = small(
        tmp_path_factory.mktemp("looked_at"),
        rollout=SingleTurn(samples=3, max_tokens=12, unfinished_reward=0.5),
        credit=MonteCarlo(samples=2),
    )
    return config, train(config)


Run = tuple[PolicyIteration, ExperimentDirectory]


def look_with_microscope(run: Run, **settings: Any) -> dict[str, Any]:
    """Runs the credit microscope, and returns its numbers by iteration."""
    config, directory = run
    analyzer = CreditMicroscope(problems=3, answers=2, **settings)
    label = "-".join([*analyzer.methods, str(analyzer.truth), str(analyzer.iterations)])
    plain_config = {**PLAIN, "analyzers": [{"type": "credit_microscope", "name": label}]}
    assert run_analyzers(replace(config, analyzers=(replace(analyzer, name=label),)), plain_config) == 0
    folder = directory.analysis_folder(label)
    assert (folder / "figure.png").is_file()
    return json.loads((folder / "result.json").read_text())["numbers"]["by_iteration"]


def test_the_credit_of_the_run_is_shown_without_sampling(run: Run) -> None:
    before = sampled_requests(run[0])
    (numbers,) = look_with_microscope(run).values()
    assert sampled_requests(run[0]) == before
    folder = run[1].iteration_folder(1)
    episodes = {answer.trajectory: answer for answer in read_episodes(folder / "episodes.arrow")}
    trajectories = {answer.id: answer for answer in read_trajectories(folder / "trajectories.arrow")}
    assert len(numbers["answers"]) == 2
    for answer in numbers["answers"]:
        episode, (credit,) = episodes[answer["answer"]], answer["credit"].values()
        assert "".join(answer["steps"]) == trajectories[answer["answer"]].text
        assert [number["value"] for number in credit["values"]] == list(episode.step_values or ())
        assert [number["value"] for number in credit["advantages"]] == pytest.approx(
            [episode.advantages[end - 1] for end in episode.step_ends]  # type: ignore[index]
        )
        assert all(number["low"] <= number["value"] <= number["high"] for number in credit["values"])


def test_other_methods_are_shown_and_stored_continuations_are_not_sampled_again(run: Run) -> None:
    before = sampled_requests(run[0])
    (numbers,) = look_with_microscope(
        run, methods={"the same": MonteCarlo(samples=2), "GRPO": Group()}
    ).values()
    assert sampled_requests(run[0]) == before
    for answer in numbers["answers"]:
        assert answer["credit"]["the same"] == answer["credit"][OWN_CREDIT]
        group = answer["credit"]["GRPO"]
        assert group["values"] == [None] * len(answer["steps"])
        assert len({number["value"] for number in group["advantages"]}) == 1
        assert all(number["low"] is None for number in group["advantages"])
    assert numbers["costs"]["the same"]["sampled_tokens"] == 0


def test_other_methods_and_the_truth_are_sampled_from_the_weights_of_their_iteration(run: Run) -> None:
    methods = {"K=5": MonteCarlo(samples=5), "bisect": MonteCarlo(samples=5, values=Bisect(threshold=2.0))}
    by_iteration = look_with_microscope(run, methods=methods, truth=16, iterations="all")
    assert list(by_iteration) == ["0", "1"]
    for numbers in by_iteration.values():
        for answer in numbers["answers"]:
            assert list(answer["credit"]) == [OWN_CREDIT, "K=5", "bisect", TRUE_CREDIT]
            five_samples, bisected = answer["credit"]["K=5"], answer["credit"]["bisect"]
            # Bisecting halves nothing: it values the prompt alone, by the same continuations, as one step.
            assert bisected["values"] == [five_samples["values"][0]] + [None] * (len(answer["steps"]) - 1)
            assert len({number["value"] for number in bisected["advantages"]}) == 1
            width = {
                name: credit["values"][0]["high"] - credit["values"][0]["low"]
                for name, credit in answer["credit"].items()
            }
            assert width[TRUE_CREDIT] < width["K=5"] < width[OWN_CREDIT]
        assert numbers["costs"]["K=5"]["sampled_tokens"] > numbers["costs"]["bisect"]["sampled_tokens"] == 0


def test_the_legend_has_the_methods_of_all_answers() -> None:
    number = {"value": 0.5, "low": None, "high": None}
    credit = {"values": [None, None], "advantages": [number, number]}

    def make_row(*methods: str) -> dict[str, Any]:
        return {"correct": True, "steps": ["1", "2"], "credit": dict.fromkeys(methods, credit)}

    figure = draw_microscope({"a, 1": make_row("GRPO"), "b, 1": make_row("RLOO", "GRPO")})
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GRPO", "RLOO"]


def make_step_credit(*values: float) -> StepCredit:
    return StepCredit((None,) * len(values), tuple(map(Shown, values)))


def test_answers_of_a_methods_own_rollout_are_compared_in_the_order_of_the_problems() -> None:
    problems: list[Any] = [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    episodes: list[Any] = [SimpleNamespace(group=group) for group in "baab"]
    first_of_b, first_of_a, second_of_a, second_of_b = episodes
    ordered = order_by_problem("tree", episodes, problems)
    expected = (first_of_a, second_of_a, first_of_b, second_of_b)
    assert [id(episode) for episode in ordered] == [id(episode) for episode in expected]
    with pytest.raises(ValueError, match="'tree' gave no advantages to the answers to a, so that"):
        order_by_problem("tree", episodes[:1], problems)
    with pytest.raises(ValueError, match="rollout of 'tree' also answered b"):
        order_by_problem("tree", episodes, problems[:1])


def test_answers_are_chosen_where_methods_differ_right_and_wrong_ones_of_different_problems() -> None:
    prefix, right_end, wrong_end = (mdp.A, mdp.END_OF_STEP), (mdp.A, mdp.EOS), (mdp.B, mdp.EOS)
    answers = [
        replace(mdp.trajectory((*prefix, *end), sample=number), problem=problem)
        for problem in mdp.problems(3)
        for number, end in enumerate([right_end, right_end, wrong_end, wrong_end])
    ]
    right = [answer for answer in answers if answer.grade.correct]
    wrong = [answer for answer in answers if not answer.grade.correct]
    assert len(right) == len(wrong) == 6
    credit_a = {answer.id: make_step_credit(1.0, 1.0) for answer in answers}
    credit_b = {answer.id: make_step_credit(100.0, 100.0) for answer in answers}
    assert choose_answers(answers, {"a": credit_a, "b": credit_b}, 2) == [right[0], wrong[0]], (
        "a factor is no difference"
    )
    for number, answer in ((3, right[2]), (4, right[3]), (5, wrong[1])):
        credit_b[answer.id] = make_step_credit(100.0, -100.0 * number)
    chosen = choose_answers(answers, {"a": credit_a, "b": credit_b}, 3)
    assert chosen == [
        right[3],
        wrong[1],
        next(answer for answer in wrong if answer.problem != wrong[1].problem),
    ]
    all_chosen = choose_answers(answers, {"a": credit_a, "b": credit_b}, 12)
    assert len(all_chosen) == 12
    assert right[2] in all_chosen


def test_a_run_whose_critic_gives_advantages_in_training_needs_methods(base: Path, capsys: Captured) -> None:
    assert run_analysis(base, "gae", {"type": "credit_microscope"})[0] == 1
    assert "credit_microscope.jsonnet" in capsys.readouterr().out
