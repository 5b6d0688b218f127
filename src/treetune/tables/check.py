"""A check, before anything runs, that a table can be filled from what its experiments will write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import indent

from treetune.config.errors import ConfigIssue, did_you_mean
from treetune.config.schema import OWN_PACKAGE, package_of
from treetune.contracts import Continuations, CriticValues, Pairs
from treetune.exceptions import ConfigError
from treetune.findings import placed_parts
from treetune.rollouts.metrics import OF_ITERATION, PREFIX, name_in
from treetune.rollouts.numbers import EVALUATED, LARGEST, OF_CORRECT, registered
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import PHASES
from treetune.runtime.diagnostics import SIGNS
from treetune.tables.columns import PASS_AT_1, value_named
from treetune.tables.runs import TableRuns, make_plan
from treetune.tables.settings import Reproduction
from treetune.tasks.base import Task

METRICS: Mapping[str, tuple[str, ...]] = {
    group: tuple(names.split())
    for group, names in {
        "choice": "accuracy epoch step",
        "credit": "advantage_mean advantage_std advantage_zero critic_error critic_weight filter_before"
        " filter_behind unvalued value_decided value_mean value_overlap_seconds value_samples value_states"
        " value_std value_tokens value_unavailable value_unfinished value_unknown",
        "critic": "clip_fraction grad_norm loss mse return value",
        "engine": "canary_gap canary_mean_gap logprob_gap_max logprob_gap_mean nucleus_log_mass"
        " restarts tokens_per_second",
        "episodes": "correct count error groups_ungraded left_out mixed no_answer once_hit problems"
        " prompt_tokens response_tokens response_tokens_max reward score steps timeout unavailable"
        " unfinished unique",
        "memory": "generation training",
        "overlap": "credit_seconds generation_seconds staleness",
        "preference": "accuracy chosen_reward margin ranking reference_ranking rejected_reward shortfall",
        "rollout": "groups_begun groups_carried groups_dropped groups_lacking rounds sampled_tokens versions",
        "selection": "episodes groups groups_capped groups_dropped groups_kept groups_surplus kept pairs"
        " pairs_possible tokens",
        "spo": "distance first_choice lacking",
        "train": "advantage_abs advantage_mean approx_kl clip_fraction computed_tokens entropy entropy_coef"
        " grad_norm importance importance_capped importance_masked kl kl_loss learning_rate loss policy_loss"
        " ratio reference_ahead reference_seconds skipped_by_ratio skipped_steps steps tokens",
    }.items()
}
"""The metrics of the package's own parts. Many are recorded by some experiments alone; `ONLY_WITH` knows of
whole groups."""

ONLY_WITH: Mapping[str, tuple[Callable[[PolicyIteration], bool], str]] = {
    "choice": (lambda root: root.choose_checkpoint is not None, "it chooses no checkpoint"),
    "critic": (lambda root: CriticValues() in root.credit.gives, "its credit trains no critic"),
    "credit/critic": (lambda root: CriticValues() in root.credit.gives, "its credit asks no critic"),
    "overlap": (lambda root: root.overlap == "one_step", "its overlap is 'none'"),
    "train/reference": (
        lambda root: root.trainer.reference_scores == "while_sampling",
        "its trainer.reference_scores is 'before_training'",
    ),
    "preference": (lambda root: Pairs() in root.selection.gives, "its selection makes no pairs"),
    "credit/value": (
        lambda root: Continuations() in root.credit.gives,
        "its credit samples no continuations to value states",
    ),
}


def known_metrics(root: PolicyIteration) -> set[str]:
    """All that such an experiment may record in an iteration."""
    names = {f"{group}/{name}" for group, own in METRICS.items() for name in own}
    names |= {f"seconds/{name}" for name in (*PHASES, "other", "total")} | {"iteration", "wall_time"}
    names |= {f"diagnostics/{sign}" for sign in (*SIGNS, "stop")}
    names |= {f"shaping/{one.label}" for one in root.shaping}
    names |= {f"{one.label}/{name}" for one in root.shaping for name in one.measures}
    numbers = {
        f"{group.name}/{name}{ending}"
        for group in registered().values()
        for name in group.numbers
        for ending in ("", OF_CORRECT, LARGEST)
    }
    for one in root.evaluation.sets:
        names |= {f"evaluation/{one.label}/{name}" for name in (*EVALUATED, *numbers)}
        for domain in (one.task or root.task).domain_names() or ():
            names |= {f"evaluation/{one.label}/{PREFIX}{domain}/{name}" for name in EVALUATED}
    return names | numbers


def lacks_metric(root: PolicyIteration, name: str) -> str | None:
    """Why an experiment won't record a metric; None where it will or may. A user's own part may record
    anything."""
    if (of := name_in(name)) is not None:
        return _lacks_domain(root.task, of[0]) or _unlike(of[1], OF_ITERATION)
    known = known_metrics(root)
    if name not in known:
        own = any(package_of(type(placed.part)) != OWN_PACKAGE for placed in placed_parts(root))
        return None if own else did_you_mean(name, sorted(known))
    for beginning, (applies, why) in ONLY_WITH.items():
        if name.startswith(beginning) and not applies(root):
            return why
    return None


def lacks_value(root: PolicyIteration, label: str, value: str) -> str | None:
    """Why an evaluation set of the experiment won't have a number; None where it will or may."""
    samples = {one.label: one.samples for one in root.evaluation.sets}
    if label not in samples:
        return f"it has no evaluation set {label!r}; {did_you_mean(label, list(samples))}"
    value_named(value)
    if (of := name_in(value)) is not None:
        chosen = next(one for one in root.evaluation.sets if one.label == label)
        return _lacks_domain(chosen.task or root.task, of[0]) or lacks_value(root, label, of[1])
    k = value.removeprefix("pass_at_")
    if k != value and int(k) > samples[label]:
        return f"its set {label!r} has {samples[label]} samples of each problem"
    if k != value and int(k).bit_count() > 1:
        return f"pass@k is measured for k = 1, 2, 4 and so on, and not for {k}"
    return None


def _lacks_domain(task: Task, name: str) -> str | None:
    names = task.domain_names()
    if names is None:
        return None
    return _unlike(name, names) if names else "its problems have no domains"


def _unlike(name: str, known: Sequence[str]) -> str | None:
    return None if name in known else f"there is no {name!r}; {did_you_mean(name, known)}"


REMEDY = "mend the experiment's configuration, or what the table asks of it"


def check(table: Reproduction) -> None:
    """Raises ConfigError with every experiment that can't be run, and all that no run will write."""
    plan = make_plan(table)
    wrong = {run.name: filter(None, run.wrong.splitlines()) for run in plan.runs if run.wrong}
    issues = [
        ConfigIssue(
            "can't be run", f"experiments.{name}", remedy=REMEDY, excerpt=indent("\n".join(why), "    ")
        )
        for name, why in wrong.items()
    ]
    issues += unwritten(plan)
    if issues:
        raise ConfigError(issues)


def refuse_unwritten(plan: TableRuns) -> None:
    """Raises ConfigError if a column or a panel would stay empty whatever is run."""
    issues = list(unwritten(plan))
    if issues:
        raise ConfigError(issues)


def unwritten(plan: TableRuns) -> Iterator[ConfigIssue]:
    """Yields what the table shows and no run will write. Experiments that can't be built are not judged."""
    table = plan.table
    roots = {run.name: run.root for run in plan.runs if run.root is not None}
    for number, column in enumerate(table.columns):
        key, names = f"columns.{number}", [row.cell(column.name).experiment for row in table.rows]
        if column.evaluation is not None and column.over is None:
            lacks = partial(lacks_value, label=column.evaluation, value=column.number)
            yield from _lacking(f"{key}.value", column.number, names, roots, lacks)
        if column.curve is not None:
            lacks = partial(lacks_value, label=column.curve, value=PASS_AT_1)
            yield from _lacking(f"{key}.curve", f"the set {column.curve!r}", names, roots, lacks)
    before = {name for experiment in table.experiments.values() for name in experiment.needs}
    for number, panel in enumerate(table.panels):
        key, names = f"panels.{number}", [row.experiment for row in table.rows]
        if panel.evaluation is not None:
            lacks = partial(lacks_value, label=panel.evaluation, value=panel.number)
            yield from _lacking(f"{key}.value", panel.number, names, roots, lacks)
        if panel.metric is not None:
            lacks = partial(lacks_metric, name=panel.metric)
            trained = [name for name in names if name not in before]
            yield from _lacking(f"{key}.metric", panel.metric, trained, roots, lacks)


def _lacking(
    key: str,
    what: str,
    names: list[str | None],
    roots: dict[str, PolicyIteration],
    lacks: Callable[[PolicyIteration], str | None],
) -> Iterator[ConfigIssue]:
    """An issue if every experiment lacks it: what one row has is worth its place."""
    used = list(dict.fromkeys(name for name in names if name is not None))
    reasons = {name: lacks(roots[name]) for name in used if name in roots}
    if len(reasons) < len(used) or not used or not all(reasons.values()):
        return
    name, reason = next(iter(reasons.items()))
    others = f", as all {len(used)} experiments of the rows" if len(used) > 1 else ""
    yield ConfigIssue(
        f"no run will write {what}: the experiment {name!r} lacks it{others}: {reason}",
        key,
        remedy="name something that the rows' experiments record, or add it to them",
    )
