"""Whether a table can be filled, told before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from treetune.config.errors import ConfigError, ConfigIssue
from treetune.runtime.base import PolicyIteration
from treetune_tables.recorded import lacks_metric, lacks_value
from treetune_tables.runs import Plan, make_plan
from treetune_tables.settings import Reproduction
from treetune_tables.values import PASS_AT_1

REMEDY = "mend the experiment's configuration, or what the table asks of it"


def check(table: Reproduction) -> None:
    """Raises ConfigError with every experiment that can't be run, and all that no run will write."""
    plan = make_plan(table)
    wrong = {run.name: run.wrong for run in plan.runs if run.wrong}
    issues = [
        ConfigIssue("can't be run", f"experiments.{name}", remedy=REMEDY, excerpt=_indented(why))
        for name, why in wrong.items()
    ]
    issues += unwritten(plan)
    if issues:
        raise ConfigError(issues)


def refuse_unwritten(plan: Plan) -> None:
    """Raises ConfigError if a column or a panel would stay empty whatever is run."""
    issues = list(unwritten(plan))
    if issues:
        raise ConfigError(issues)


def unwritten(plan: Plan) -> Iterator[ConfigIssue]:
    """What the table shows and no run will write. Experiments that can't be built are not judged."""
    table = plan.table
    roots = {run.name: run.root for run in plan.runs if run.root is not None}
    for number, column in enumerate(table.columns):
        key, names = f"columns.{number}", [row.cell(column.name).experiment for row in table.rows]
        if column.evaluation is not None and column.over is None:
            lacks = partial(lacks_value, label=column.evaluation, value=column.shown)
            yield from _lacking(f"{key}.value", column.shown, names, roots, lacks)
        if column.curve is not None:
            lacks = partial(lacks_value, label=column.curve, value=PASS_AT_1)
            yield from _lacking(f"{key}.curve", f"the set {column.curve!r}", names, roots, lacks)
    before = {name for experiment in table.experiments.values() for name in experiment.needs}
    for number, panel in enumerate(table.panels):
        key, names = f"panels.{number}", [row.experiment for row in table.rows]
        if panel.evaluation is not None:
            lacks = partial(lacks_value, label=panel.evaluation, value=panel.shown)
            yield from _lacking(f"{key}.value", panel.shown, names, roots, lacks)
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


def _indented(text: str | None) -> str:
    return "\n".join(f"    {line}" for line in (text or "").splitlines() if line)
