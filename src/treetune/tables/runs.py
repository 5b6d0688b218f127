"""The runs of a table of type `reproduction`, and their state on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import track

from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.config.layers import Config
from treetune.exceptions import ConfigError
from treetune.runtime.base import PolicyIteration, Runtime, StopAfter
from treetune.runtime.directory import (
    ANSWERS,
    SUMMARY,
    ExperimentDirectory,
    expected_iterations,
    verify_answers,
)
from treetune.runtime.manifest import find_different_keys, read_config
from treetune.tables.columns import means_by_problem

if TYPE_CHECKING:
    # `settings` checks a table's runs, and imports this module.
    from treetune.tables.settings import Reproduction, TableExperiment

RunState = Literal[
    "finished", "unmeasured", "interrupted", "missing", "running", "failed", "different", "wrong"
]
"""The state of a run on disk:

* finished: trained, with all evaluations and analyses that the table shows;
* unmeasured: trained, but evaluations or analyses are missing;
* interrupted, failed: begun; the next `reproduce_table` resumes it;
* missing: not begun;
* running: another process runs it now;
* different: its directory has an experiment of another configuration;
* wrong: its configuration can't be built.
"""

TRAINED_STATES: tuple[RunState, ...] = ("finished", "unmeasured")
"""The states of a run that was trained to the end."""

STATES_TO_DO: tuple[RunState, ...] = ("unmeasured", "interrupted", "missing", "failed")
"""The states that `reproduce_table` runs."""

RunKey = tuple[str, int]
"""An experiment's name in the table, and a seed: ("ppo", 3)."""


@dataclass(frozen=True)
class PlannedRun:
    """An experiment of the table with one seed.

    Example: `name="ppo", seed=3, base=Path("experiments/quickstart")`, whose directory is
    experiments/quickstart/seed-3/ppo_countdown.
    """

    name: str
    """The experiment's name in the table."""
    seed: int
    recipe: TableExperiment
    """The experiment's settings in the table."""
    base: Path
    """The table's directory."""
    checked_config: Mapping[str, Any] | None
    """The checked configuration with the table's first seed; None where it can't be built.

    Jsonnet is slow, so the configuration with this run's seed is evaluated only where it is needed
    (`config`).
    """
    why_wrong: str = ""
    """The reason why the configuration can't be built; empty where it can."""
    sets_at_end: tuple[str, ...] = ()
    """The evaluation sets that the table shows at the end of training."""
    sets_at_checkpoints: tuple[str, ...] = ()
    """The evaluation sets that the table shows at every checkpoint that is kept."""
    analyses: tuple[str, ...] = ()
    """The analyses that the table shows."""
    root: PolicyIteration | None = None
    """The object that `checked_config` builds."""
    shared_seeds: Mapping[str, int] = field(default_factory=dict)
    """The table's experiments that all seeds share, with the seed of each."""

    @property
    def key(self) -> RunKey:
        return self.name, self.seed

    @property
    def needs(self) -> list[RunKey]:
        """The keys of the runs that must finish first. A shared experiment has its own seed."""
        return [(needed, self.shared_seeds.get(needed, self.seed)) for needed in self.recipe.needs]

    @property
    def label(self) -> str:
        return f"{self.name}, {'shared' if self.recipe.shared else f'seed {self.seed}'}"

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The configuration with this run's seed and directory."""
        if self.checked_config is None or self.checked_config.get("seed") == self.seed:
            return self.checked_config
        return _load_config(self.recipe, self.environment).data

    @property
    def experiment_name(self) -> str:
        return str(self.checked_config["experiment_name"]) if self.checked_config else self.name

    @property
    def budget(self) -> StopAfter | None:
        """The budget that ends the run; None where only the number of iterations does."""
        settings = self.checked_config.get("stop_after") if self.checked_config else None
        return StopAfter(**settings) if settings else None

    @property
    def iterations(self) -> int:
        """The number of iterations in all.

        Where a budget ends the run, the number is estimated from the tokens of the iterations that are done.
        """
        if self.checked_config is None:
            return 0
        most_iterations = int(self.checked_config["iterations"])
        finished_iterations = max([*self.directory.checkpoints(), len(self.directory.read_metrics())])
        return expected_iterations(most_iterations, self.budget, self.directory, finished_iterations)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment variables that the run's configuration reads."""
        return run_environment(self.base, self.recipe, self.seed)

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / folder_name(self.recipe, self.seed) / self.experiment_name)

    @property
    def log(self) -> Path:
        folder = self.base / "logs" / folder_name(self.recipe, self.seed)
        return folder / f"{self.experiment_name}.log"

    @property
    def record(self) -> Path:
        """The file of the attempts at this run, with commands, seconds and exit codes."""
        return self.log.with_suffix(".json")

    @property
    def seconds(self) -> float:
        """The seconds of all attempts, with starts and evaluations; 0 where no record exists."""
        return sum(float(attempt.get("seconds") or 0.0) for attempt in self.attempts())

    def attempts(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self.record.read_text())["attempts"])
        except (OSError, ValueError, KeyError, TypeError):
            return []


@dataclass(frozen=True)
class RunStatus:
    """The state of a run on disk.

    Example: `RunStatus("unmeasured", 1000, "test after 1000 missing", ("test after 1000",))`.
    """

    state: RunState
    finished_iterations: int = 0
    """The number of iterations in the run's metrics."""
    why: str = ""
    """A message with the reason for the state."""
    unmeasured: tuple[str, ...] = ()
    """The evaluations that the table shows and the run lacks."""
    unanalysed: tuple[str, ...] = ()
    """The analyses that the table shows and the run lacks."""


@dataclass(frozen=True)
class TableRuns:
    """The table's runs, each after those that it needs, with their states."""

    table: Reproduction
    runs: list[PlannedRun]
    statuses: Mapping[RunKey, RunStatus] = field(default_factory=dict)

    def run(self, name: str, seed: int) -> PlannedRun:
        """Returns an experiment's run with a seed, or the run that all seeds share."""
        return next(run for run in self.runs_of(name) if run.recipe.shared or run.seed == seed)

    def runs_of(self, name: str | None) -> list[PlannedRun]:
        """Returns an experiment's runs, in the order of their seeds."""
        return [run for run in self.runs if run.name == name]

    def blocked_by(self, run: PlannedRun) -> list[str]:
        """Returns the runs that this run needs and that `reproduce_table` can't finish.

        Each has its state: ["sft (different)"]. In place of a needed run that is itself blocked, the list has
        the runs that block it.
        """
        blocking = []
        for needed_key in run.needs:
            needed_name, _ = needed_key
            state = self.statuses[needed_key].state
            if state in TRAINED_STATES:
                continue
            if state in STATES_TO_DO:  # it can be run, unless it is blocked itself
                blocking += self.blocked_by(self.run(*needed_key))
            else:
                blocking.append(f"{needed_name} ({state})")
        return blocking

    def to_do(self) -> list[PlannedRun]:
        return [run for run in self.runs if self.statuses[run.key].state in STATES_TO_DO]


def inspect_again(plan: TableRuns) -> TableRuns:
    """Returns the same runs with the states that they have on disk now."""
    return TableRuns(plan.table, plan.runs, {run.key: inspect_run(run) for run in plan.runs})


def add_seeds(plan: TableRuns, seeds_by_name: Mapping[str, Sequence[int]]) -> TableRuns:
    """Returns the plan with further seeds of some experiments, and of all experiments that these need.

    `seeds_by_name` has the further seeds by the experiment's name: `{"ppo": [4, 5]}`.
    """
    table = plan.table
    needed_keys: list[RunKey] = []
    for name, seeds in seeds_by_name.items():
        needed_keys += needed_run_keys(table, name, seeds)
    planned_keys = {run.key for run in plan.runs}
    new_keys = [key for key in dict.fromkeys(needed_keys) if key not in planned_keys]
    if not new_keys:
        return plan
    # The runs of an experiment differ only by the seed.
    added_runs = [replace(plan.runs_of(name)[0], seed=seed) for name, seed in new_keys]
    shared = [run for run in plan.runs if run.recipe.shared]
    seeded = [run for run in [*plan.runs, *added_runs] if not run.recipe.shared]
    order = table.order()
    seeded.sort(key=lambda run: (table.seeds.index(run.seed), order.index(run.name)))
    runs = [*shared, *seeded]  # a shared run needs only shared ones
    return TableRuns(table, runs, {**plan.statuses, **{run.key: inspect_run(run) for run in added_runs}})


def needed_run_keys(table: Reproduction, name: str, seeds: Sequence[int]) -> Iterator[RunKey]:
    """Yields the keys of the runs that an experiment with these seeds needs, and then those of its own runs.

    Experiments that all seeds share are left out. They run only once, and every plan has them from the start.
    A run may be yielded more than once.
    """
    recipe = table.experiments[name]
    for needed in recipe.needs:
        yield from needed_run_keys(table, needed, seeds)
    if not recipe.shared:
        yield from ((name, seed) for seed in seeds)


def folder_name(recipe: TableExperiment, seed: int) -> str:
    """Returns the name of the folder of runs with this seed, below the table's directory."""
    return "shared" if recipe.shared else f"seed-{seed}"


def run_environment(base: Path, recipe: TableExperiment, seed: int) -> dict[str, str]:
    """Returns the environment variables by which a configuration gets its seed and directory."""
    return {"APP_SEED": str(seed), "APP_DIRECTORY": str(base / folder_name(recipe, seed))}


def make_plan(table: Reproduction) -> TableRuns:
    """Evaluates every experiment's configuration, and reads the states of its runs from disk.

    The plan has the seeds that every row has; `until.add_needed_seeds` adds those that only some rows need.
    """
    base, configurations = Path(table.directory), _load_configurations(table)
    shared_seeds = {name: recipe.seed for name, recipe in table.experiments.items() if recipe.shared}
    runs = []
    first_seed, *_ = table.seeds_of_all_rows
    # All experiments of a seed come before the next seed, so that a table of fewer seeds is complete early.
    for table_seed in table.seeds_of_all_rows:
        for name, configuration in configurations.items():
            recipe = configuration.recipe
            # A shared experiment runs once for all seeds of the table, with the runs of the first seed.
            if recipe.shared and table_seed != first_seed:
                continue
            measurements = _measurements_of(table, name)
            run = PlannedRun(
                name=name,
                seed=shared_seeds.get(name, table_seed),
                recipe=recipe,
                base=base,
                checked_config=configuration.config,
                why_wrong=configuration.why_wrong,
                sets_at_end=measurements.sets_at_end,
                sets_at_checkpoints=measurements.sets_at_checkpoints,
                analyses=measurements.analyses,
                root=configuration.root,
                shared_seeds=shared_seeds,
            )
            runs.append(run)
    return TableRuns(table, runs, {run.key: inspect_run(run) for run in runs})


class _Configuration(NamedTuple):
    """An experiment's configuration and the object that it builds, or the reason why it can't be run."""

    recipe: TableExperiment
    """The table's entry, with overrides that name the folders of shared experiments."""
    config: dict[str, Any] | None = None
    root: PolicyIteration | None = None
    why_wrong: str = ""
    """The reason why it can't be run; empty where it can."""


class _Measurements(NamedTuple):
    """The evaluations and analyses of an experiment that the table shows."""

    sets_at_end: tuple[str, ...]
    """Evaluation sets at the end of training."""
    sets_at_checkpoints: tuple[str, ...]
    """Evaluation sets at every checkpoint that is kept."""
    analyses: tuple[str, ...]


def _load_configurations(table: Reproduction) -> dict[str, _Configuration]:
    """Returns the configuration of each experiment, evaluated with the first seed of the experiment.

    An experiment comes after the experiments that it needs.
    """
    base, console = Path(table.directory), Console(stderr=True)
    order = track(
        table.order(), "experiments", console=console, transient=True, disable=not console.is_terminal
    )
    configurations: dict[str, _Configuration] = {}
    for name in order:
        recipe = table.experiments[name]
        seed = recipe.seed if recipe.shared else table.seeds[0]
        environment = run_environment(base, recipe, seed)
        shared_names = []
        for needed in recipe.needs:
            config_of_needed = configurations[needed].config
            if table.experiments[needed].shared and config_of_needed is not None:
                shared_names.append(str(config_of_needed["experiment_name"]))
        configurations[name] = _load_configuration(
            recipe, environment, _measurements_of(table, name), shared_names
        )
    # `name` is the name in the table. The configuration's `experiment_name` is the name of a run's folder.
    names_by_experiment_name: dict[str, list[str]] = {}
    for name, configuration in configurations.items():
        if configuration.config:
            names_by_experiment_name.setdefault(configuration.config["experiment_name"], []).append(name)
    for experiment_name, names in names_by_experiment_name.items():
        if len(names) < 2:
            continue
        for name in names:
            namesake = names[0] if name != names[0] else names[1]
            message = (
                f"{namesake} is called {experiment_name!r} as well, and would write to the same"
                " directory: give it another name, such as overrides:"
                f" [\"{{experiment_name+: '_{name}'}}\"]"
            )
            configurations[name] = _Configuration(table.experiments[name], why_wrong=message)
    return configurations


def _measurements_of(table: Reproduction, name: str) -> _Measurements:
    """Returns the evaluations and analyses of an experiment that the table's columns and panels show.

    An evaluation set is shown at the end of training, or at every checkpoint that is kept.
    """
    columns = []
    for column in table.columns:
        if any(row.cell(column.name).experiment == name for row in table.rows):
            columns.append(column)
    at_end = [column.evaluation for column in columns if column.evaluation is not None]
    at_checkpoints = [
        column.curve for column in columns if column.is_read_from_curve and column.curve is not None
    ]
    # Panels show the row's `experiment`, and never those of its cells.
    if any(row.experiment == name for row in table.rows):
        at_checkpoints += [panel.evaluation for panel in table.panels if panel.evaluation is not None]
    analyses = [column.analysis for column in columns if column.analysis is not None]

    def once_each(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))

    # Columns may show the same set or analysis more than once.
    return _Measurements(once_each(at_end), once_each(at_checkpoints), once_each(analyses))


def _load_configuration(
    recipe: TableExperiment,
    environment: Mapping[str, str],
    measurements: _Measurements,
    shared_names: Sequence[str],
) -> _Configuration:
    """Returns an experiment's configuration, or the reason why it can't be run.

    Args:
        recipe: The experiment's settings in the table.
        environment: The environment variables that the configuration reads.
        measurements: What the table shows of the experiment.
        shared_names: The `experiment_name` of each shared experiment that it needs.
    """
    try:
        config = _load_config(recipe, environment)
        directory = Path(environment["APP_DIRECTORY"])
        # Only a loaded configuration shows which paths need overrides. So it is loaded again with them.
        overrides = _overrides_for_shared(config.data, directory, shared_names)
        if overrides:
            recipe = replace(recipe, overrides=(*recipe.overrides, *overrides))
            config = _load_config(recipe, environment)
        root = build(Runtime, config.data, Explanation(config))
    except ConfigError as error:
        return _Configuration(recipe, why_wrong=str(error))
    assert isinstance(root, PolicyIteration)
    why_wrong = _why_not_measured(config.data, measurements)
    if why_wrong:
        return _Configuration(recipe, why_wrong=why_wrong)
    return _Configuration(recipe, config.data, root)


def _overrides_for_shared(
    config: Mapping[str, Any], directory: Path, shared_names: Sequence[str]
) -> list[str]:
    """Returns overrides that make paths in a configuration lead to the folders of shared experiments.

    A configuration names its start model as ``$.directory + '/sft/checkpoints/last/policy'``. In a table,
    `directory` is the folder of the seed, ``…/seed-3``, and a shared experiment is in ``…/shared``.
    """
    overrides = []
    for key, text in _texts_in(config):
        for name in shared_names:
            path = Path(text)
            if path.is_relative_to(directory / name):
                shared_path = directory.parent / "shared" / path.relative_to(directory)
                value = json.dumps(str(shared_path))
                # Built from the inside: { "model"+: { "name_or_path": "…/shared/sft/…" } }.
                override = f"{{ {json.dumps(key[-1])}: {value} }}"
                for part in reversed(key[:-1]):
                    override = f"{{ {json.dumps(part)}+: {override} }}"
                overrides.append(override)
                break
    return overrides


def _texts_in(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the texts in nested objects, each after its key path. Texts in lists are left out, since no
    override can change an item of a list.

    Example: ``(("model", "name_or_path"), "experiments/sft/…")``."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _texts_in(item, (*path, name))
        elif isinstance(item, str):
            yield (*path, name), item


def _load_config(recipe: TableExperiment, environment: Mapping[str, str]) -> Config:
    # The caller's environment may name a single experiment. The table's experiments must not all get this
    # name.
    inherited = {name: value for name, value in os.environ.items() if name != "APP_EXPERIMENT_NAME"}
    return load(recipe.configs, recipe.overrides, inherited | dict(environment))


def _why_not_measured(config: Mapping[str, Any], measurements: _Measurements) -> str | None:
    """Returns a message where the table shows something that the experiment doesn't measure, else None."""
    experiment = config["experiment_name"]
    set_settings = (config.get("evaluation") or {}).get("sets", ())
    labels = [settings.get("name") or settings["split"] for settings in set_settings]
    shown_sets = (*measurements.sets_at_end, *measurements.sets_at_checkpoints)
    missing = [label for label in shown_sets if label not in labels]
    if missing:
        return (
            f"{experiment} has no evaluation set {', '.join(map(repr, missing))}, which the"
            f" table reports; it has {', '.join(labels) or 'none'}"
        )
    analyzers = [settings.get("name") or settings["type"] for settings in config.get("analyzers") or ()]
    missing = [name for name in measurements.analyses if name not in analyzers]
    if missing:
        return (
            f"{experiment} has no analyzer {', '.join(map(repr, missing))}, which the table reports: append"
            " its file below configs/analyzers/ to the experiment's configs"
        )
    return None


def inspect_run(run: PlannedRun) -> RunStatus:
    """Returns the state of a run. Reads its directory, and the table's record of attempts at it."""
    if run.checked_config is None:
        return RunStatus("wrong", why=run.why_wrong)
    directory = run.directory
    finished_iterations = len(directory.read_metrics())
    stored_config = directory.config_file
    if stored_config.is_file() and directory.has_work():
        assert run.config is not None
        different_keys = find_different_keys(read_config(directory.path), run.config)
        if different_keys:
            reason = f"other {', '.join(different_keys)} in {stored_config}"
            return RunStatus("different", finished_iterations, reason)
    if directory.is_running():
        return RunStatus("running", finished_iterations, f"another process is running in {directory.path}")
    is_trained = run.iterations in directory.checkpoints()
    if is_trained:
        unmeasured, unanalysed = _missing_evaluations(run), _missing_analyses(run)
        if not unmeasured and not unanalysed:
            return RunStatus("finished", finished_iterations)
        reason = describe_failure(run) or f"{', '.join((*unmeasured, *unanalysed))} missing"
        return RunStatus("unmeasured", finished_iterations, reason, unmeasured, unanalysed)
    reason = describe_failure(run)
    if reason:
        return RunStatus("failed", finished_iterations, reason)
    if directory.has_work():
        return RunStatus(
            "interrupted", finished_iterations, f"at iteration {finished_iterations} of {run.iterations}"
        )
    return RunStatus("missing")


def _missing_evaluations(run: PlannedRun) -> tuple[str, ...]:
    """Returns the evaluations that the table shows and the run lacks: ("test after 1000",)."""
    directory = run.directory
    shown_evaluations = [(run.iterations, label) for label in run.sets_at_end]
    for iteration in directory.regular_checkpoints():
        shown_evaluations += [(iteration, label) for label in run.sets_at_checkpoints]
    return tuple(
        f"{label} after {iteration}"
        for iteration, label in shown_evaluations
        if not (directory.evaluation_folder(iteration, label) / SUMMARY).is_file()
    )


def _missing_analyses(run: PlannedRun) -> tuple[str, ...]:
    return tuple(name for name in run.analyses if not run.directory.is_analysed(name))


def describe_failure(run: PlannedRun) -> str:
    """Returns a message on the failure of the last attempt; empty where it succeeded."""
    attempts = run.attempts()
    if not attempts or not attempts[-1].get("exit_code"):
        return ""
    command, exit_code, message = (attempts[-1].get(key, "") for key in ("command", "exit_code", "message"))
    return f"{command} ended with {exit_code}: {message} (log {run.log})"


def problem_means(evaluation: Path, value: str) -> dict[str, float] | None:
    """Returns the mean of a number over the answers to each problem, by the problem's name.

    `evaluation` is the folder of an evaluation, and `value` the name of the number. Returns None where the
    number is not a mean over answers, and where an answer has no such number (`columns.means_by_problem`).
    """
    answers = evaluation / ANSWERS
    verify_answers(answers)
    with answers.open() as file:
        return means_by_problem(map(json.loads, file), value)
