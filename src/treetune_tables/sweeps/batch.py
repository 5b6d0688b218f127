"""What is missing, for others to run: a command line per run, or a SLURM array."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from treetune_tables.runs import Key, Plan, PlannedRun
from treetune_tables.sweeps.launch import Launcher, commands_of


def waves(plan: Plan) -> list[list[PlannedRun]]:
    """The runs to do, each wave needing only what earlier ones make. Blocked runs are left out."""
    depth: dict[Key, int] = {}
    found: list[list[PlannedRun]] = []
    for run in plan.to_do():
        if plan.blocked_by(run):
            continue
        depth[run.key] = 1 + max((depth.get(needed, -1) for needed in run.needs), default=-1)
        if len(found) <= depth[run.key]:
            found.append([])
        found[depth[run.key]].append(run)
    return found


def launch_lines(plan: Plan, launcher: Launcher) -> list[str]:
    """Shell text: a line for each run, with comments that say what has to be finished before it."""
    lines: list[str] = []
    for number, wave in enumerate(waves(plan)):
        after = (
            "at once, side by side where the machine allows" if number == 0 else "when those above have ended"
        )
        lines.append(f"# {after}:")
        for run in wave:
            lines.append(_line(plan, run, launcher))
    for run in plan.to_do():
        if blocked := plan.blocked_by(run):
            lines.append(f"# {run.words}: blocked by {', '.join(blocked)}")
    return lines or ["# nothing is missing"]


def _line(plan: Plan, run: PlannedRun, launcher: Launcher) -> str:
    commands = commands_of(plan.statuses[run.key])
    if run.analyses and "run_analyzers" not in commands:
        commands.append("run_analyzers")
    return " && ".join(launcher.line(run, command) for command in commands)


def slurm_script(plan: Plan, launcher: Launcher, working_directory: Path) -> str:
    """A script that submits itself: ``bash FILE`` queues one array per wave, each after the last.

    A wave starts when the one before has ended, well or not: a run whose start weights are missing
    then ends at once, and says so, while the others go on.
    """
    table = plan.table
    ranges, cases, first = [], [], 0
    for wave in waves(plan):
        ranges.append(f"{first}-{first + len(wave) - 1}")
        for task, run in enumerate(wave, start=first):
            cases.append(f"    {task}) # {run.words}\n        {_line(plan, run, launcher)} ;;")
        first += len(wave)
    if not ranges:
        raise ValueError("nothing is missing: there is no run to put into a SLURM script")
    logs = shlex.quote(str(Path(table.directory) / "logs"))
    newline = "\n"
    return f"""\
#!/usr/bin/env bash
#SBATCH --job-name={table.name}
#SBATCH --output={Path(table.directory) / "logs"}/slurm-%A-%a.out
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={launcher.ranks}
#SBATCH --cpus-per-task={launcher.ranks * launcher.threads}
#
# `bash FILE` submits this file: one array per wave, each when the one before has ended. What follows the
# file's name goes to sbatch (--partition, --time). When all have ended, reproduce_table fills the table.
set -euo pipefail
cd {shlex.quote(str(working_directory))}
export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"

if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    mkdir -p {logs}
    after=()
    for wave in {" ".join(ranges)}; do
        job=$(sbatch --parsable "${{after[@]}}" --array="$wave" "$@" "${{BASH_SOURCE[0]}}")
        echo "tasks $wave: job ${{job%%;*}}"
        after=(--dependency="afterany:${{job%%;*}}")
    done
    exit 0
fi

case "$SLURM_ARRAY_TASK_ID" in
{newline.join(cases)}
    *) echo "there is no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;
esac
"""
