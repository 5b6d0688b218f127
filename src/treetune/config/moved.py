"""Tells a user's module that imports an old name which is the new one."""

from __future__ import annotations

import ast
import importlib.util
import linecache

import treetune

MOVED_MODULES = {
    "treetune.analyzers": "treetune.lab.analyzers",
    "treetune.cluster.cuda_transfers": "treetune.engine.cuda_transfers",
    "treetune.cluster.given": "treetune.engine.serve_engine_servers",
    "treetune.cluster.planning": "treetune.runtime.planning",
    "treetune.cluster.runs": "treetune.runtime.fitting",
    "treetune.cluster.several_machines": "treetune.runtime.several_machines",
    "treetune.cluster.submission": "treetune.cluster.slurm",
    "treetune.data_pipeline": "treetune.data",
    "treetune.domains.judge_server": "treetune.runtime.judge_server",
    "treetune.engine.given": "treetune.engine.serve_engine_servers",
    "treetune.endpoints": "treetune.domains.endpoints",
    "treetune.episode_generators": "treetune.rollouts",
    "treetune.exports": "treetune.view.exports",
    "treetune.files": "treetune.store.files",
    "treetune.inference": "treetune.engine",
    "treetune.lab.distillation": "treetune.credit.distillation",
    "treetune.lab.literature": "treetune.credit.literature",
    "treetune.lab.partial": "treetune.rollouts.partial",
    "treetune.lab.trees.credit": "treetune.credit.trees",
    "treetune.lab.values": "treetune.credit.values",
    "treetune.lab.values.over_another": "treetune.credit.values",
    "treetune.lab.values.sampled": "treetune.credit.values",
    "treetune.lab.values.states": "treetune.credit.states.by_tokens",
    "treetune.planning": "treetune.runtime.planning",
    "treetune.reports": "treetune.view.report",
    "treetune.rollouts.credit": "treetune.credit",
    "treetune.rollouts.monte_carlo": "treetune.credit.vineppo",
    "treetune.rollouts.states": "treetune.credit.states",
    "treetune.rollouts.valuation": "treetune.credit.values",
    "treetune.rollouts.values": "treetune.credit.states",
    "treetune.runtime.front_door": "treetune.runtime.rank_launcher",
    "treetune.runtime.sampler": "treetune.runtime.resources",
    "treetune.sandbox": "treetune.domains.sandbox",
    "treetune.sweeps": "treetune.tables",
    "treetune.tasks.environments": "treetune.domains.environments",
    "treetune.tasks.threads": "treetune.threads",
    "treetune.trainers": "treetune.trainer",
    "treetune.trainers.objectives": "treetune.objectives",
    "treetune.viewer": "treetune.view",
    **{
        f"treetune_{name}": f"treetune.{name}"
        for name in ("cluster", "data", "domains", "lab", "tables", "threads", "view")
    },
}
"""Packages and modules of earlier versions, and where their content is."""

SPLIT_MODULES = {
    "treetune.lab.values.over_another",
    "treetune.lab.values.sampled",
    "treetune.rollouts.credit",
    "treetune.rollouts.states",
    "treetune.rollouts.valuation",
    "treetune.rollouts.values",
}
"""Modules of earlier versions whose content is in several modules of a package now."""

RENAMED_CLASSES = {
    "Drawing": "DrawingContext",
    "Limits": "ProgramLimits",
    "NATIVE": "NATIVE_FORMATS",
    "choose": "choose_sandbox",
    "values": "find_values",
}
"""Names that documents of earlier versions imported from modules, and their names in `treetune` now."""


def present_name(module: str) -> str | None:
    """Returns the name that a module of an earlier version has now; None where it isn't known to have moved.

    ``treetune_cluster.planning.plan`` is ``treetune.runtime.planning.plan``: it has moved twice.
    """
    name = module
    while True:
        old_names = [old for old in MOVED_MODULES if f"{name}.".startswith(f"{old}.")]
        if not old_names:
            break
        longest = max(old_names, key=len)  # a module may have moved out of its package
        name = MOVED_MODULES[longest] + name.removeprefix(longest)
    return name if name != module else None


def remedy_for_import(file: str, line: int) -> str | None:
    """Returns what to write in place of the import at this line of a user's file, which failed; None where
    it imports no old name of this package."""
    statement = _import_at(file, line)
    if isinstance(statement, ast.Import):
        remedies = []
        for alias in statement.names:
            new = present_name(alias.name)
            if new is not None:
                remedies.append(_describe_new_place(alias.name, new))
        return "; ".join(remedies) or None
    if statement is None or statement.module is None:  # `from . import x` names no module
        return None
    module = statement.module
    # If `treetune` itself offers all of the names, they needn't be imported from one of its modules.
    public_names = {alias.name: RENAMED_CLASSES.get(alias.name, alias.name) for alias in statement.names}
    if all(name in treetune.__all__ for name in public_names.values()):
        return f"write `from treetune import {', '.join(public_names.values())}`"
    new = present_name(module)
    return _describe_new_place(module, new) if new is not None else None


def _describe_new_place(old: str, new: str) -> str:
    """Says where the content of the module `old` is: in `new`, or in the nearest package around `new` that
    exists. The content of a module in `SPLIT_MODULES` is in several modules of the package `new`."""
    package = new
    while not _module_exists(package):
        package = package.rpartition(".")[0]
    if package == new and old not in SPLIT_MODULES:
        return f"{old} is {new} now"
    return f"what {old} had is in {package} now: CHANGELOG.md says under which names"


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _import_at(file: str, line: int) -> ast.Import | ast.ImportFrom | None:
    """Returns the import statement that includes this line of a file."""
    tree = ast.parse("".join(linecache.getlines(file)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        assert node.end_lineno is not None, "`ast.parse` sets it"
        if node.lineno <= line <= node.end_lineno:
            return node
    return None
