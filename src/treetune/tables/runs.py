"""The runs of a reproduction, and their state on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import Config, load
from treetune.exceptions import ConfigError
from treetune.runtime.base import PolicyIteration, Runtime, StopAfter
from treetune.runtime.directory import ExperimentDirectory, expected_iterations, verify_answers
from treetune.runtime.manifest import different_keys, read_config
from treetune.tables.columns import by_problem
from treetune.tables.settings import Reproduction, TableExperiment

State = Literal["finished", "unmeasured", "interrupted", "missing", "running", "failed", "different", "wrong"]
"""`unmeasured` is trained and lacks evaluations or analyses; `different` holds an experiment of another
configuration; `wrong` has a configuration that can't be built. `failed` and `interrupted` continue."""

MEASURABLE: tuple[State, ...] = ("finished", "unmeasured")
"""Trained to the end."""

TO_DO: tuple[State, ...] = ("unmeasured", "interrupted", "missing", "failed")
"""The states that `reproduce_table` runs."""

Key = tuple[str, int]
"""An experiment's name in the table, and a seed."""


@dataclass(frozen=True)
class PlannedRun:
    """An experiment with one seed.

    `template` is its configuration with the table's first seed, checked; None where it can't be
    built, and `wrong` says why. Jsonnet takes its time, and a run that isn't there needs no more.
    The table reads its evaluation `sets` at the end, those in `along` at every checkpoint that is
    kept, and its `analyses`.
    """

    name: str
    seed: int
    recipe: TableExperiment
    base: Path
    template: Mapping[str, Any] | None
    wrong: str | None = None
    sets: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    analyses: tuple[str, ...] = ()
    root: PolicyIteration | None = None
    """The object that the template builds."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """The experiments of the table that all seeds share, and the seed of each."""

    @property
    def key(self) -> Key:
        return self.name, self.seed

    @property
    def needs(self) -> list[Key]:
        return [(needed, self.shared.get(needed, self.seed)) for needed in self.recipe.needs]

    @property
    def label(self) -> str:
        return f"{self.name}, {'shared' if self.recipe.shared else f'seed {self.seed}'}"

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The configuration with this run's own seed and directory."""
        if self.template is None or self.template.get("seed") == self.seed:
            return self.template
        return _load(self.recipe, self.environment).data

    @property
    def experiment_name(self) -> str:
        return str(self.template["experiment_name"]) if self.template else self.name

    @property
    def budget(self) -> StopAfter | None:
        """The budget that ends it, if one does."""
        settings = self.template.get("stop_after") if self.template else None
        return StopAfter(**settings) if settings else None

    @property
    def iterations(self) -> int:
        """The number of all its iterations; where a budget ends it, the number to expect from those that are
        there."""
        most = int(self.template["iterations"]) if self.template else 0
        done = max([*self.directory.checkpoints(), len(self.directory.read_metrics())], default=0)
        return most if self.template is None else expected_iterations(most, self.budget, self.directory, done)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The variables that the run's configuration reads beside its files."""
        return run_environment(self.base, self.recipe, self.seed)

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / folder_of(self.recipe, self.seed) / self.experiment_name)

    @property
    def log(self) -> Path:
        folder = self.base / "logs" / folder_of(self.recipe, self.seed)
        return folder / f"{self.experiment_name}.log"

    @property
    def record(self) -> Path:
        """Attempts at this run: commands, seconds, exit codes."""
        return self.log.with_suffix(".json")

    @property
    def seconds(self) -> float:
        """The seconds of all attempts, with starts and evaluations; 0 where nobody wrote them down."""
        return sum(float(attempt.get("seconds") or 0.0) for attempt in self.attempts())

    def attempts(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self.record.read_text())["attempts"])
        except (OSError, ValueError, KeyError, TypeError):
            return []


@dataclass(frozen=True)
class RunStatus:
    """The state of a run on disk. `done` iterations are in its metrics; `why` is for people."""

    state: State
    done: int = 0
    why: str = ""
    unmeasured: tuple[str, ...] = ()
    unanalysed: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableRuns:
    """The runs in the order in which they can be carried out, and how each one stands."""

    table: Reproduction
    runs: list[PlannedRun]
    statuses: Mapping[Key, RunStatus] = field(default_factory=dict)

    def run(self, name: str, seed: int) -> PlannedRun:
        """The experiment's with that seed, or the one that all seeds share."""
        return next(run for run in self.of(name) if run.recipe.shared or run.seed == seed)

    def of(self, name: str | None) -> list[PlannedRun]:
        """The experiment's runs, in the order of their seeds."""
        return [run for run in self.runs if run.name == name]

    def blocked_by(self, run: PlannedRun) -> list[str]:
        """Needed runs that can't become finished by being run, in words."""
        found = []
        for key in run.needs:
            status = self.statuses[key]
            if status.state not in ("finished", *TO_DO):
                found.append(f"{key[0]} ({status.state})")
            elif status.state not in MEASURABLE:
                found += self.blocked_by(self.run(*key))
        return found

    def to_do(self) -> list[PlannedRun]:
        return [run for run in self.runs if self.statuses[run.key].state in TO_DO]


def refreshed(plan: TableRuns) -> TableRuns:
    """The same runs, as they stand now."""
    return TableRuns(plan.table, plan.runs, {run.key: inspect(run) for run in plan.runs})


def with_seeds(plan: TableRuns, wanted: Mapping[str, Sequence[int]]) -> TableRuns:
    """The plan with these seeds of its experiments besides, and of those that they need."""
    table = plan.table
    missing = dict.fromkeys(key for name in wanted for key in all_needed(table, name, wanted[name]))
    there = {run.key for run in plan.runs}
    added = [replace(plan.of(name)[0], seed=seed) for name, seed in missing if (name, seed) not in there]
    if not added:
        return plan
    places = {name: place for place, name in enumerate(table.order())}
    shared = [run for run in plan.runs if run.recipe.shared]
    own = [run for run in [*plan.runs, *added] if not run.recipe.shared]
    own.sort(key=lambda run: (table.seeds.index(run.seed), places[run.name]))
    runs = [*shared, *own]  # who is shared needs nobody that isn't
    return TableRuns(table, runs, {**plan.statuses, **{run.key: inspect(run) for run in added}})


def all_needed(table: Reproduction, name: str, seeds: Sequence[int]) -> Iterator[Key]:
    """Yields the runs, but for shared ones, that an experiment with these seeds takes: itself last."""
    recipe = table.experiments[name]
    for needed in recipe.needs:
        yield from all_needed(table, needed, seeds)
    if not recipe.shared:
        yield from ((name, seed) for seed in seeds)


def folder_of(recipe: TableExperiment, seed: int) -> str:
    return "shared" if recipe.shared else f"seed-{seed}"


def run_environment(base: Path, recipe: TableExperiment, seed: int) -> dict[str, str]:
    return {"APP_SEED": str(seed), "APP_DIRECTORY": str(base / folder_of(recipe, seed))}


def make_plan(table: Reproduction) -> TableRuns:
    """Evaluates every experiment's configuration, and looks at what is there of its runs: with the seeds that
    every row has. (What else a row needs, `until.grown` says.)"""
    base, found = Path(table.directory), _configurations(table)
    shared = {name: recipe.seed for name, recipe in table.experiments.items() if recipe.shared}
    runs = []
    for seed in table.seeds_of_all_rows:  # seed by seed: a table of fewer seeds is complete early
        for name, (config, root, wrong) in found.items():
            recipe, readings = table.experiments[name], _read_by(table, name)
            if seed == table.seeds[0] or not recipe.shared:
                own = shared.get(name, seed)
                run = PlannedRun(name, own, recipe, base, config, wrong, *readings, root=root, shared=shared)
                runs.append(run)
    return TableRuns(table, runs, {run.key: inspect(run) for run in runs})


Checked = tuple[dict[str, Any] | None, PolicyIteration | None, str | None]
"""A configuration and what it builds, or what is wrong with it."""


def _configurations(table: Reproduction) -> dict[str, Checked]:
    """Returns each experiment with the first seed, in the order in which they can be run."""
    base, shown = Path(table.directory), Console(stderr=True)
    environments = {
        name: run_environment(base, recipe, recipe.seed if recipe.shared else table.seeds[0])
        for name, recipe in table.experiments.items()
    }
    order = track(table.order(), "experiments", console=shown, transient=True, disable=not shown.is_terminal)
    found = {
        name: _checked(table.experiments[name], environments[name], *_read_by(table, name)) for name in order
    }
    names = {name: config["experiment_name"] for name, (config, *_) in found.items() if config}
    for name, experiment_name in names.items():
        same = [other for other, theirs in names.items() if theirs == experiment_name and other != name]
        if same:
            clash = (
                f"{same[0]} is called {experiment_name!r} as well, and would write to the same directory:"
                " give it a name of its own, such as overrides:"
                f" [\"{{experiment_name+: '_{name}'}}\"]"
            )
            found[name] = None, None, clash
    return found


def _read_by(table: Reproduction, name: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns what the table's cells read of an experiment: sets, sets along training, analyses."""
    columns = [
        column
        for column in table.columns
        if any(row.cell(column.name).experiment == name for row in table.rows)
    ]
    sets = dict.fromkeys(column.evaluation for column in columns if column.evaluation is not None)
    along = dict.fromkeys(column.curve for column in columns if column.speedup and column.curve is not None)
    if any(row.experiment == name for row in table.rows):
        along |= dict.fromkeys(panel.evaluation for panel in table.panels if panel.evaluation is not None)
    analyses = dict.fromkeys(column.analysis for column in columns if column.analysis is not None)
    return tuple(sets), tuple(along), tuple(analyses)


def _checked(
    recipe: TableExperiment,
    environment: Mapping[str, str],
    sets: Sequence[str],
    along: Sequence[str],
    analyses: Sequence[str],
) -> Checked:
    try:
        config = _load(recipe, environment)
        root = build(Runtime, config.data, Explanation(config))
    except ConfigError as error:
        return None, None, str(error)
    assert isinstance(root, PolicyIteration)
    lacking = _lacking(config.data, [*sets, *along], analyses)
    return (None, None, lacking) if lacking else (config.data, root, None)


def _load(recipe: TableExperiment, environment: Mapping[str, str]) -> Config:
    inherited = {k: v for k, v in os.environ.items() if k != "APP_EXPERIMENT_NAME"}
    return load(recipe.configs, recipe.overrides, inherited | dict(environment))


def _lacking(config: Mapping[str, Any], sets: Sequence[str], analyses: Sequence[str]) -> str | None:
    """Returns a message on what the table reports and the experiment doesn't measure."""
    known = [one.get("name") or one["split"] for one in (config.get("evaluation") or {}).get("sets", ())]
    missing = [label for label in sets if label not in known]
    if missing:
        return (
            f"{config['experiment_name']} has no evaluation set {', '.join(map(repr, missing))}, which the"
            f" table reports; it has {', '.join(known) or 'none'}"
        )
    analyzers = [one.get("name") or one["type"] for one in config.get("analyzers") or ()]
    missing = [name for name in analyses if name not in analyzers]
    if missing:
        return (
            f"{config['experiment_name']} has no analyzer {', '.join(map(repr, missing))}, which the table"
            " reports: put its file below configs/analyzers/ on the right of the experiment's configs"
        )
    return None


def inspect(run: PlannedRun) -> RunStatus:
    """Returns the state of a run, from its directory alone."""
    if run.template is None:
        return RunStatus("wrong", why=run.wrong or "")
    directory = run.directory
    done = len(directory.read_metrics())
    stored = directory.path / "config.json"
    if stored.is_file() and directory.has_work():
        assert run.config is not None
        different = different_keys(read_config(directory.path), run.config)
        if different:
            return RunStatus("different", done, f"other {', '.join(different)} in {stored}")
    if directory.is_running():
        return RunStatus("running", done, f"another process is at work in {directory.path}")
    if run.iterations in directory.checkpoints():
        wanted = [(run.iterations, label) for label in run.sets]
        wanted += [(number, label) for number in directory.regular_checkpoints() for label in run.along]
        unmeasured = tuple(
            f"{label} after {number}"
            for number, label in wanted
            if not (directory.evaluation(number, label) / "summary.json").is_file()
        )
        unanalysed = tuple(
            name
            for name in run.analyses
            if not (directory.path / "analyses" / name / "result.json").is_file()
        )
        if not unmeasured and not unanalysed:
            return RunStatus("finished", done)
        why = failure(run) or "lacks " + ", ".join((*unmeasured, *unanalysed))
        return RunStatus("unmeasured", done, why, unmeasured, unanalysed)
    why = failure(run)
    if why:
        return RunStatus("failed", done, why)
    if directory.has_work():
        return RunStatus("interrupted", done, f"at iteration {done} of {run.iterations}")
    return RunStatus("missing")


def failure(run: PlannedRun) -> str:
    """Returns the failure of the last attempt; empty where it ended well."""
    attempts = run.attempts()
    if not attempts or not attempts[-1].get("exit_code"):
        return ""
    last = attempts[-1]
    return f"{last['command']} ended with {last['exit_code']}: {last.get('message', '')} (log {run.log})"


def problem_means(evaluation: Path, value: str) -> dict[str, float] | None:
    """Returns each problem's mean in the answers of an evaluation's folder; see `by_problem`."""
    answers = evaluation / "answers.jsonl"
    verify_answers(answers)
    with answers.open() as file:
        return by_problem(map(json.loads, file), value)
