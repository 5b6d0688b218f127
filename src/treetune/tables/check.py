"""Checks, before anything runs, that a table's experiments will write everything that the table shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from treetune.config.errors import ConfigIssue, did_you_mean
from treetune.config.schema import OWN_PACKAGE, package_of
from treetune.contracts import Continuations, CriticValues, Pairs
from treetune.credit.reward_models import RewardModelCredit
from treetune.exceptions import ConfigError
from treetune.findings import placed_parts
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.metrics import DOMAIN_METRICS, DOMAIN_PREFIX, split_domain
from treetune.rollouts.numbers import CORRECT_SUFFIX, EVALUATED_NUMBERS, LARGEST_SUFFIX, registered_groups
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import PHASES
from treetune.runtime.diagnostics import SIGNS
from treetune.tables.columns import PASS_AT_1, kind_of_value
from treetune.tables.runs import TableRuns, make_plan, needed_run_keys
from treetune.tasks.base import Task
from treetune.tasks.mixed import TaskWithDomains

if TYPE_CHECKING:
    # `settings` calls `check_table`, and imports this module.
    from treetune.tables.settings import Reproduction

METRICS_OF_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(names.split())
    for group, names in {
        "choice": "accuracy epoch step",
        "credit": "advantage_mean advantage_std advantage_zero critic_error critic_weight filter_before"
        " filter_behind greedy_reward scored_prompt_tokens scored_texts teacher_kl unvalued value_decided"
        " value_mean value_overlap_seconds value_samples value_states value_std value_tokens"
        " value_unavailable value_unfinished value_unknown without_context",
        "critic": "clip_fraction grad_norm loss mse return value without_own_prompt",
        "engine": "canary_gap canary_mean_gap logprob_gap_max logprob_gap_mean nucleus_log_mass"
        " restarts tokens_per_second",
        "episodes": "correct count error groups_ungraded left_out mixed no_answer once_hit problems"
        " prompt_tokens response_tokens response_tokens_max reward reward_std score steps timeout unavailable"
        " unfinished unique",
        "memory": "generation training",
        "overlap": "credit_seconds generation_seconds staleness",
        "preference": "accuracy chosen_reward log_odds_ratio margin ranking reference_ranking rejected_reward"
        " shortfall",
        "reward_model": "accuracy grad_norm loss return",
        "rollout": "groups_begun groups_carried groups_dropped groups_lacking rounds sampled_tokens versions",
        "selection": "episodes groups groups_capped groups_dropped groups_kept groups_surplus kept pairs"
        " pairs_possible tokens",
        "spo": "distance first_choice lacking",
        "train": "advantage_abs advantage_mean approx_kl clip_fraction computed_tokens divergence entropy"
        " entropy_coef grad_norm importance importance_capped importance_masked kl kl_loss learning_rate loss"
        " policy_loss ratio reference_ahead reference_seconds skipped_by_ratio skipped_steps steps teacher_kl"
        " tokens value_loss with_teacher",
    }.items()
}
"""The names of the metrics of the parts in this package, by their group: ``"choice": ("accuracy", …)`` stands
for ``choice/accuracy`` and so on. Many of them are recorded only in some experiments; `CONDITIONS_OF_METRICS`
has the conditions of whole groups."""

CONDITIONS_OF_METRICS: Mapping[str, tuple[Callable[[PolicyIteration], bool], str]] = {
    "choice": (lambda root: root.choose_checkpoint is not None, "it chooses no checkpoint"),
    "critic": (lambda root: CriticValues() in root.credit.gives, "its credit trains no critic"),
    "credit/critic": (lambda root: CriticValues() in root.credit.gives, "its credit asks no critic"),
    "reward_model": (
        lambda root: isinstance(root.credit, RewardModelCredit),
        "its credit trains no reward model",
    ),
    "overlap": (lambda root: root.overlap == "one_step", "its overlap is 'none'"),
    "train/reference": (
        lambda root: root.trainer.reference_scores == "while_sampling",
        "its trainer.reference_scores is 'before_training'",
    ),
    "preference": (lambda root: Pairs() in root.selection.gives, "its selection makes no pairs"),
    "credit/value": (
        lambda root: Continuations() in root.credit.gives or _scores_given_texts(root),
        "its credit samples no continuations to value states",
    ),
    "credit/scored": (lambda root: _scores_given_texts(root), "its credit scores no texts"),
    "credit/teacher": (lambda root: _scores_given_texts(root), "its credit has no teacher"),
}
"""By the beginning of the metrics' names: whether an experiment records metrics whose names begin like this,
and the reason why an experiment doesn't record them."""


def _scores_given_texts(root: PolicyIteration) -> bool:
    """Returns whether the experiment's credit scores given texts."""
    return root.credit.scores_texts or root.credit.trainer_scores.reference


def recordable_metrics(root: PolicyIteration) -> set[str]:
    """Returns the names of all metrics that an experiment may record in an iteration.

    A user's component may record further ones."""
    names: set[str] = set()
    for prefix, names_of_group in METRICS_OF_GROUPS.items():
        names |= {f"{prefix}/{name}" for name in names_of_group}
    names |= {f"seconds/{name}" for name in (*PHASES, "other", "total")} | {"iteration", "wall_time"}
    names |= {f"diagnostics/{sign}" for sign in (*SIGNS, "stop")}
    for shaping in root.shaping:
        names.add(f"shaping/{shaping.label}")
        names |= {f"{shaping.label}/{name}" for name in shaping.measures}
    numbers: set[str] = set()  # the names of the numbers of graders, environments and rollouts
    for group in registered_groups().values():
        for name in group.numbers:
            # The mean over all answers, the mean over the correct ones, and the largest number.
            numbers |= {f"{group.name}/{name}{suffix}" for suffix in ("", CORRECT_SUFFIX, LARGEST_SUFFIX)}
    for evaluation_set in root.evaluation.sets:
        prefix = f"evaluation/{evaluation_set.label}"
        names |= {f"{prefix}/{name}" for name in (*EVALUATED_NUMBERS, *numbers)}
        task = evaluation_set.task or root.task
        for domain in _domain_names(task) or ():
            names |= {f"{prefix}/{DOMAIN_PREFIX}{domain}/{name}" for name in EVALUATED_NUMBERS}
    return names | numbers


def why_no_metric(root: PolicyIteration, name: str) -> str | None:
    """Returns the reason why an experiment won't record a metric, or None where it will or may record it.

    A user's component may record any metric: with such a component, an unknown name is not refused. The names
    of domains' metrics are checked nevertheless.
    """
    domain_and_name = split_domain(name)
    if domain_and_name is not None:
        domain, name_in_domain = domain_and_name
        return _why_no_domain(root.task, domain) or _why_not_among(name_in_domain, DOMAIN_METRICS)
    metrics = recordable_metrics(root)
    if name not in metrics:
        packages = {package_of(type(placed.part)) for placed in placed_parts(root)}
        has_users_part = bool(packages - {OWN_PACKAGE})
        return None if has_users_part else did_you_mean(name, sorted(metrics))
    for prefix, (applies, why_not) in CONDITIONS_OF_METRICS.items():
        if name.startswith(prefix) and not applies(root):
            return why_not
    return None


def why_no_value(root: PolicyIteration, label: str, value: str) -> str | None:
    """Returns the reason why an evaluation set won't have a number, or None where it will or may have it.

    Args:
        root: The experiment.
        label: The name of the evaluation set.
        value: The name of the number, such as "pass_at_8".
    """
    sets = {evaluation_set.label: evaluation_set for evaluation_set in root.evaluation.sets}
    if label not in sets:
        return f"it has no evaluation set {label!r}; {did_you_mean(label, list(sets))}"
    kind_of_value(value)  # raises ValueError for a name that no evaluation has
    domain_and_name = split_domain(value)
    if domain_and_name is not None:
        domain, name_in_domain = domain_and_name
        task = sets[label].task or root.task
        return _why_no_domain(task, domain) or why_no_value(root, label, name_in_domain)
    if value.startswith("pass_at_"):
        k, samples = int(value.removeprefix("pass_at_")), sets[label].samples
        if k > samples:
            return f"its set {label!r} has {samples} samples of each problem"
        is_power_of_two = k.bit_count() == 1
        if not is_power_of_two:
            return f"pass@k is measured for k = 1, 2, 4 and so on, and not for {k}"
    return None


def _domain_names(task: Task) -> Sequence[str] | None:
    """Returns the names of the domains of a task's problems.

    The names are an empty tuple for a task without domains. They are None for a task whose domains are named
    only in the rows of its data, which are not read here."""
    return task.domain_names() if isinstance(task, TaskWithDomains) else ()


def _why_no_domain(task: Task, name: str) -> str | None:
    """Returns the reason why a task has no domain of this name, or None where it has or may have one."""
    names = _domain_names(task)
    if names is None:  # the task doesn't know its domains before it has read its data
        return None
    return _why_not_among(name, names) if names else "its problems have no domains"


def _why_not_among(name: str, names: Sequence[str]) -> str | None:
    return None if name in names else f"there is no {name!r}; {did_you_mean(name, names)}"


TABLE_REMEDY = "fix the experiment's configuration, or the column or panel of the table"


def check_table(table: Reproduction) -> None:
    """Raises ConfigError with every experiment that can't be run, and every number that no run will write."""
    plan = make_plan(table)
    issues_by_experiment: dict[str, ConfigIssue] = {}  # all seeds of an experiment have the same issue
    for run in plan.runs:
        if run.why_wrong:
            lines = [line for line in run.why_wrong.splitlines() if line]
            issues_by_experiment[run.name] = ConfigIssue(
                "can't be run",
                f"experiments.{run.name}",
                remedy=TABLE_REMEDY,
                excerpt=indent("\n".join(lines), "    "),
            )
    issues = [*issues_by_experiment.values(), *missing_start_models(plan), *find_unwritten_numbers(plan)]
    if issues:
        raise ConfigError(issues)


def check_plan(plan: TableRuns) -> None:
    """Raises ConfigError if a column or panel shows something that no run writes, or if a run would have no
    start model."""
    issues = [*missing_start_models(plan), *find_unwritten_numbers(plan)]
    if issues:
        raise ConfigError(issues)


def missing_start_models(plan: TableRuns) -> Iterator[ConfigIssue]:
    """Yields an issue for each experiment whose start model is missing.

    It is missing if its path is below the table's directory, nothing exists there, and no needed experiment
    writes it. A configuration may work by itself and fail in a table: a table gives each seed its own
    `directory`, and a start model that was trained outside of the table isn't found there.
    """
    base = Path(plan.table.directory)
    for name, recipe in plan.table.experiments.items():
        # The run of the first seed: `root` was built with this seed, so it has the paths of this run.
        run = plan.runs_of(name)[0]
        if run.root is None or not isinstance(run.root.model, PretrainedModel):
            continue
        path = Path(run.root.model.name_or_path)
        if not path.is_relative_to(base) or path.exists():
            continue
        needed_names = {needed for needed, _ in needed_run_keys(plan.table, name, [run.seed])}
        needed_names.discard(name)  # `needed_run_keys` yields the experiment itself, too
        needed_names |= set(recipe.needs)  # `needed_run_keys` leaves out shared experiments
        folders = [plan.run(needed, run.seed).directory.path for needed in needed_names]
        if any(path.is_relative_to(folder) for folder in folders):
            continue
        yield ConfigIssue(
            f"it starts from {path}, which doesn't exist, and no experiment that it needs writes it",
            f"experiments.{name}",
            remedy=_remedy_for_start_model(plan, path),
        )


def _remedy_for_start_model(plan: TableRuns, path: Path) -> str:
    """Returns the remedy for a start model that no needed experiment writes."""
    # The path without its beginning: the table's directory and the seed's folder in it.
    below_seed = Path(*path.relative_to(plan.table.directory).parts[1:])
    for run in plan.runs:
        if below_seed.is_relative_to(run.experiment_name):
            return f"{run.name} of this table trains it: write needs: [{run.name!r}]"
    return (
        "add the experiment that trains the start model to the table, and name it in `needs`, as in"
        " experiments: { sft: { configs: ['sft.jsonnet'] }, … needs: ['sft'] }"
    )


def find_unwritten_numbers(plan: TableRuns) -> Iterator[ConfigIssue]:
    """Yields an issue for every number that the table shows and no run will write.

    There is no issue for a number that might be written by an experiment whose configuration can't be built.
    """
    table = plan.table
    roots = {run.name: run.root for run in plan.runs if run.root is not None}
    for position, column in enumerate(table.columns):
        key, names = f"columns.{position}", [row.cell(column.name).experiment for row in table.rows]
        # A ratio (`over`) is in no evaluation: the table divides numbers of two rows.
        if column.evaluation is not None and column.over is None:
            why_missing = partial(why_no_value, label=column.evaluation, value=column.number)
            yield from _issue_if_in_no_row(f"{key}.value", column.number, names, roots, why_missing)
        if column.curve is not None:
            why_missing = partial(why_no_value, label=column.curve, value=PASS_AT_1)
            shown_set = f"the set {column.curve!r}"
            yield from _issue_if_in_no_row(f"{key}.curve", shown_set, names, roots, why_missing)
    for position, panel in enumerate(table.panels):
        key, names = f"panels.{position}", [row.experiment for row in table.rows]
        if panel.evaluation is not None:
            why_missing = partial(why_no_value, label=panel.evaluation, value=panel.number)
            yield from _issue_if_in_no_row(f"{key}.value", panel.number, names, roots, why_missing)
        if panel.metric is not None:
            why_missing = partial(why_no_metric, name=panel.metric)
            # A panel doesn't draw the metrics of experiments that others start from.
            drawn_names = [name for name in names if name not in table.start_experiments]
            yield from _issue_if_in_no_row(f"{key}.metric", panel.metric, drawn_names, roots, why_missing)


def _issue_if_in_no_row(
    key: str,
    shown_number: str,
    names: list[str | None],
    roots: dict[str, PolicyIteration],
    why_missing: Callable[[PolicyIteration], str | None],
) -> Iterator[ConfigIssue]:
    """Yields an issue if none of the rows' experiments will write something that the table shows.

    Args:
        key: The key of the table that is to be changed.
        shown_number: The name of what the table shows, for the message: a number, a set or a metric.
        names: The name of each row's experiment; None for a row without one.
        roots: The experiments whose configuration could be built, by their names.
        why_missing: Returns the reason why an experiment won't write it; None if it will or may write it.
    """
    experiments = list(dict.fromkeys(name for name in names if name is not None))
    reasons = {name: why_missing(roots[name]) for name in experiments if name in roots}
    # An experiment whose configuration could not be built may write it: nothing is known about it.
    all_could_be_built = len(reasons) == len(experiments)
    if not experiments or not all_could_be_built or not all(reasons.values()):
        return
    name, reason = next(iter(reasons.items()))
    others = (
        f" (nor does any of the {len(experiments)} experiments of the rows)" if len(experiments) > 1 else ""
    )
    yield ConfigIssue(
        f"no run will write {shown_number}: the experiment {name!r} doesn't record it{others}: {reason}",
        key,
        remedy="name something that the rows' experiments record, or add it to them",
    )
