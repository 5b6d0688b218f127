"""Runs commands of SLURM on real clusters, where controllers are busy at times and sites print banners.

`python submission.py ARGUMENTS` is a patient sbatch: it tries again while the controller is busy, never
submits a job twice, and prints nothing but the job's number. Shell scripts use it; it needs only Python.
"""

from __future__ import annotations

import getpass
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ANSWER_S = 120.0
"""Seconds that a command of SLURM may take."""
PATIENCE_S, PAUSE_S = 1800.0, 20.0
"""Seconds for which a busy controller is asked again, and between two tries: until then a job that it took
without saying so has to be in its queue."""

_BUSY = re.compile(
    r"timed? ?out|unable to contact|temporar|try again|connection (refused|reset)|zero bytes|standby mode"
    r"|communication|connect failure|said nothing|socket",
    re.IGNORECASE,
)
_SUBMITTED = re.compile(r"Submitted batch job (\d+)", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"^\s*(\d+)(?:;\S*)?\s*$", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NAME = re.compile(r"^#SBATCH\s+(?:--job-name=|--job-name\s+|-J\s*)(\S+)", re.MULTILINE)


class SlurmRefused(RuntimeError):
    """A command of SLURM failed; the message is its complaint."""


class SlurmBusy(SlurmRefused):
    """A failure that passes. The controller may have carried out the command nevertheless."""


def output_of(command: Sequence[str]) -> str:
    """Returns the output of a command of SLURM. Raises SlurmBusy or SlurmRefused with its complaint, and
    ValueError where there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"there is no {command[0]} here: run this on a machine of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmBusy(f"{command[0]} said nothing for {ANSWER_S:.0f} s") from error
    if not done.returncode:
        return _COLOURS.sub("", done.stdout)
    complaint = re.sub(r"\s+", " ", done.stderr or done.stdout).strip()
    kind = SlurmBusy if _BUSY.search(complaint) else SlurmRefused
    raise kind(f"{command[0]}: {complaint[:300] or f'exit code {done.returncode}'}")


def job_number(answer: str) -> str | None:
    """Returns the job's number in sbatch's output, which may also have banners and the cluster's name; None
    if there is no number."""
    if submitted := _SUBMITTED.search(answer):
        return submitted[1]
    numbers = _NUMBER_ALONE.findall(answer)
    return numbers[-1] if numbers else None


def cluster_options(options: Sequence[str]) -> list[str]:
    """Returns the option that names another cluster, among those of sbatch: all commands need it then."""
    for place, option in enumerate(options):
        name, separator, value = option.partition("=")
        if name in ("--clusters", "--cluster", "-M"):
            return [f"--clusters={value if separator else ''.join(options[place + 1 : place + 2])}"]
        if option.startswith("-M"):
            return [f"--clusters={option[2:].strip()}"]
    return []


def submit(arguments: Sequence[str], patience_s: float = PATIENCE_S, pause_s: float = PAUSE_S) -> str:
    """Submits a job and returns its number.

    If the controller is busy, the job is looked for in the queue by its name before it is submitted again.
    Raises SlurmRefused if the job isn't accepted, or if that can't be found out in time.
    """
    deadline = time.monotonic() + patience_s
    jobs_before = _queued(arguments, deadline, pause_s)
    was_taken = False
    while True:
        complaint = ""
        if not was_taken:
            try:
                answer = output_of(["sbatch", *arguments])
            except SlurmBusy as busy:
                complaint = str(busy)
            else:
                if number := job_number(answer):
                    return number
                was_taken = True
                complaint = f"sbatch answered {answer.strip()[:200]!r}, and no number of a job"
        if complaint:
            print(f"{complaint}; looking for its job in the queue", file=sys.stderr)
        if time.monotonic() + pause_s > deadline:
            raise SlurmRefused(
                f"{complaint or 'its job is not in the queue'}: look with squeue before you try again"
            )
        time.sleep(pause_s)
        jobs_now = _queued(arguments, deadline, pause_s)
        if jobs_before is None or jobs_now is None:
            raise SlurmRefused(f"{complaint}, and squeue isn't here to tell whether it was taken")
        if new_jobs := jobs_now - jobs_before:
            return max(new_jobs, key=int)


def _queued(arguments: Sequence[str], deadline: float, pause_s: float) -> set[str] | None:
    """Returns the numbers of the jobs of this name in the queue; None where there is no squeue."""
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i"]
    name = _job_name(arguments)
    command += [f"--name={name}"] if name else []
    while True:
        try:
            answer = output_of([*command, *cluster_options(arguments)])
        except ValueError:
            return None
        except SlurmBusy:
            if time.monotonic() + pause_s > deadline:
                raise
            time.sleep(pause_s)
            continue
        return set(re.findall(r"^\s*(\d+)", answer, re.MULTILINE))


def _job_name(arguments: Sequence[str]) -> str | None:
    """Returns the job's name: from the options, or else from the script."""
    for place, argument in enumerate(arguments):
        if argument.startswith("--job-name="):
            return argument.partition("=")[2]
        if argument in ("--job-name", "-J") and place + 1 < len(arguments):
            return arguments[place + 1]
    for argument in arguments:
        if not argument.startswith("-") and Path(argument).is_file():
            name_line = _NAME.search(Path(argument).read_text(errors="replace"))
            return name_line[1] if name_line else Path(argument).name
    return None


if __name__ == "__main__":
    try:
        print(submit(sys.argv[1:]))
    except (ValueError, RuntimeError) as failure:
        sys.exit(f"{failure}")
