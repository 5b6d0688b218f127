"""Curves of experiments.

Promises that these tests hold:

* There is a curve for each experiment, or for all seeds of a setting together, whose band is named.
* Events (evaluations, restarts, signs, resumes) stand at their iterations.
* Long curves are thinned and keep their peaks; curves can be drawn over time.
"""

import json
import math
from pathlib import Path

import pytest

from tests.view.recorded import begin_run, record_evaluation, record_iteration, recorded_run
from treetune.runtime.console import Console
from treetune.view.curves import (
    MOST_POINTS,
    Bunch,
    chosen_charts,
    evaluation_charts,
    events_of,
    events_of_several,
    group_into_bunches,
    usual_charts,
)
from treetune.view.store import Store


def groups_of(store: Store, together: bool = False) -> list[Bunch]:
    return group_into_bunches({run.name: store.experiment(run) for run in store.runs()}, together=together)


def test_pass_at_1_has_its_interval_over_problems(store: Store, folder: Path) -> None:
    recorded_run(folder / "run", iterations=3)

    [chart] = evaluation_charts(groups_of(store))

    shown = (chart.title, chart.better, chart.band)
    assert shown == ("pass@1 on validation", "up", "95 % interval over problems")
    [line] = chart.series
    assert [x for x, _ in line.points] == [1, 2, 3]
    assert all(line.interval[x][0] <= y <= line.interval[x][1] for x, y in line.points)


def test_a_single_experiment_beside_several_seeds_has_no_band(store: Store, folder: Path) -> None:
    for seed in (1, 2):
        recorded_run(folder / f"seed-{seed}" / "ppo", iterations=2, seed=seed)
    recorded_run(folder / "seed-1" / "grpo", iterations=2, credit={"type": "group"})

    [chart] = evaluation_charts(groups_of(store, together=True))

    assert "t-interval" in chart.band
    assert [bool(line.interval) for line in chart.series] == ["seeds" in line.name for line in chart.series]
    assert len(chart.series) == 2


def test_seeds_together_have_the_interval_of_their_mean(store: Store, folder: Path) -> None:
    for seed, reward in ((1, 0.2), (2, 0.4), (3, 0.9)):
        run = begin_run(folder / f"seed-{seed}" / "ppo", seed=seed)
        record_iteration(run, 0, **{"episodes/reward": reward})
    other = begin_run(folder / "seed-1" / "grpo", credit={"type": "group"})
    record_iteration(other, 0, **{"episodes/reward": 0.7})

    groups = groups_of(store, together=True)
    [chart] = chosen_charts(groups, ["episodes/reward"])

    assert [(group.name, len(group.members)) for group in groups] == [
        ("seed-1/grpo", 1),
        ("ppo (3 seeds)", 3),
    ]
    alone, three = chart.series
    assert not alone.interval
    # Student's t with two degrees of freedom: 4.303 standard errors.
    error = math.sqrt(((0.2 - 0.5) ** 2 + (0.4 - 0.5) ** 2 + (0.9 - 0.5) ** 2) / 2 / 3)
    [(x, y)] = three.points
    assert y == pytest.approx(0.5)
    assert three.interval[x] == pytest.approx((0.5 - 4.303 * error, 0.5 + 4.303 * error), abs=1e-3)
    assert "over up to 3 seeds" in chart.band


def test_a_chart_of_two_metrics_has_one_colour_and_two_kinds_of_line(store: Store, folder: Path) -> None:
    recorded_run(folder / "run")

    charts = {chart.title: chart for chart in usual_charts(groups_of(store))}

    [both] = [chart for title, chart in charts.items() if title.startswith("|engine")]
    assert "dashed" in both.title
    lines = both.as_json()["lines"]
    assert [(line["colour"], line["dash"]) for line in lines] == [(0, 0), (0, 1)]


def test_events_are_evaluations_restarts_signs_and_resumes(store: Store, folder: Path) -> None:
    run = begin_run(folder / "run", planned=9)
    for iteration, (restarts, sign) in enumerate([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]):
        more = {"engine/restarts": restarts} if restarts else {}
        record_iteration(run, iteration, **{"diagnostics/kl": sign, **more})
    console = Console(run.logs_folder / "run.log", visible=False)
    console.say("continuing after iteration 2 of 9")
    console.say("warning: kl in iterations 1 to 3: it is above 9; lower the learning rate")
    console.close()
    manifest = {"continued": [{"after": 3, "changed": {"iterations": "iterations was 4 and is 9"}}]}
    (run.path / "manifest.json").write_text(json.dumps(manifest))

    record_evaluation(run, 4)
    experiment = store.experiment(store.run("run"))

    events = [(event.x, event.kind, event.text) for event in events_of(experiment)]
    assert [(x, kind) for x, kind, _ in events] == [
        (2, "restart"), (2, "resume"), (3, "restart"), (3, "resume"), (3, "sign"), (4, "evaluation"),
        (4, "sign"),
    ]  # fmt: skip
    assert events[4][2] == "kl begins: it is above 9; lower the learning rate"
    assert events[3][2] == "continued with changes: iterations was 4 and is 9"
    assert events[6][2] == "kl ends"
    several = events_of_several({"a": experiment, "b": experiment})
    assert len(several) == 2 * (len(events) - 1) and "evaluation" not in {event.kind for event in several}
    assert several[0].text == "a: the engine was started again"


def test_iterations_without_a_sign_neither_begin_nor_end_it(store: Store, folder: Path) -> None:
    run = begin_run(folder / "run", planned=9)
    for iteration, sign in enumerate([1.0, None, None, 1.0, None, 0.0, None, 0.0]):
        record_iteration(run, iteration, **({} if sign is None else {"diagnostics/kl": sign}))
    events = events_of(store.experiment(store.run("run")))
    assert [(event.x, event.text) for event in events] == [(1, "kl begins"), (6, "kl ends")]


def test_a_resume_names_the_software_the_inputs_or_the_code_that_changed(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run")
    inputs = {
        "model": {"path": "tiny", "digest": "0" * 16},
        "rows": {"train": {"count": 3, "digest": "a" * 16}},
    }
    other_rows = {**inputs, "rows": {"train": {"count": 4, "digest": "b" * 16}}}
    before = {"bits_rest_on": {"ranks": 1, "software": {"torch": "2.8"}}, "inputs": inputs}
    software = {"after": 1, "changed": {}, "bits_rest_on": {"ranks": 1, "software": {"torch": "2.9"}}}
    continued = [
        {**before, **software},
        {**before, **software, "after": 2, "inputs": other_rows},
        {**before, **software, "after": 3, "inputs": other_rows, "changed_code": {"reward": "reward.py"}},
    ]
    (run.path / "manifest.json").write_text(json.dumps({**before, "continued": continued}))

    events = events_of(store.experiment(store.run("run")))
    assert [(event.x, event.text) for event in events if event.kind == "resume"] == [
        (1, "continued with changes: torch was 2.8, is 2.9"),
        (
            2,
            "continued with changes: the problems of train were 3 (digest aaaaaaaaaaaa)"
            " and are 4 (digest bbbbbbbbbbbb)",
        ),
        (3, "continued with changes: the code of reward.py has changed"),
    ]


def test_a_resume_that_changed_something_is_one_event(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run")
    console = Console(run.logs_folder / "run.log", visible=False)
    for iterations in (2, 2, 3):
        console.say(f"continuing after iteration {iterations} of 9")
    console.close()
    manifest = {"continued": [{"after": 2, "changed": {"iterations": "iterations was 4 and is 9"}}]}
    (run.path / "manifest.json").write_text(json.dumps(manifest))

    events = events_of(store.experiment(store.run("run")))
    assert [(event.x, event.text) for event in events if event.kind == "resume"] == [
        (2, "continued with changes: iterations was 4 and is 9"),
        (2, "resumed"),
        (3, "resumed"),
    ]


def test_the_first_start_of_a_fork_is_an_event_that_names_the_other_run(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run")
    console = Console(run.logs_folder / "run.log", visible=False)
    for iterations in (2, 3):
        console.say(f"continuing after iteration {iterations} of 9")
    console.close()
    origin = {"run": "experiments/base", "after": 2, "config": "0123abcd"}
    (run.path / "manifest.json").write_text(json.dumps({"continued": [], "forked": origin}))

    events = events_of(store.experiment(store.run("run")))
    assert [(event.x, event.text) for event in events if event.kind == "resume"] == [
        (2, "forked from experiments/base"),
        (3, "resumed"),
    ]


def test_long_curves_keep_their_peaks(store: Store, folder: Path) -> None:
    run = begin_run(folder / "run", planned=5000)
    rows = [{"iteration": i, "train/loss": 100.0 if i == 3333 else 0.1} for i in range(5000)]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    [chart] = chosen_charts(groups_of(store), ["train/loss"])

    [line] = chart.series
    assert len(line.points) <= MOST_POINTS + 2 and (line.points[0][0], line.points[-1][0]) == (1, 5000)
    assert (3334.0, 100.0) in line.points


def test_curves_can_be_drawn_over_the_seconds_in_iterations(store: Store, folder: Path) -> None:
    for seed, seconds in ((1, 10.0), (2, 30.0)):
        run = begin_run(folder / f"seed-{seed}" / "ppo", seed=seed)
        for iteration in range(2):
            record_iteration(
                run, iteration, **{"seconds/total": seconds, "episodes/reward": seed + iteration}
            )
    experiments = {run.name: store.experiment(run) for run in store.runs()}

    apart = chosen_charts(
        group_into_bunches(experiments, False, "seconds in iterations"), ["episodes/reward"]
    )
    [together] = chosen_charts(
        group_into_bunches(experiments, True, "seconds in iterations"), ["episodes/reward"]
    )

    assert [line.points for line in apart[0].series] == [[(10, 1), (20, 2)], [(30, 2), (60, 3)]]
    [line] = together.series
    assert line.points == [(20, 1.5), (40, 2.5)] and set(line.interval) == {20, 40}
    assert together.x_name == "seconds in iterations"
