"""Writes SLURM's job scripts, submits jobs and asks for their state. Other code uses SLURM through this file.

Controllers of real clusters are busy at times. So commands are repeated while that may help, but a job is
never submitted twice. Sites also print banners, so lines that SLURM did not write are ignored.

Shell scripts run this file, which needs only Python's standard library:

    python slurm.py sbatch ARGUMENTS...                submits a job and prints only its number
    python slurm.py experiment CONFIGS [COMMAND...]    submits an experiment: scripts/slurm/submit.sh
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COMMAND_TIMEOUT_S = 120.0
"""Seconds that a command of SLURM may take."""
BUSY_PATIENCE_S, RETRY_PAUSE_S = 1800.0, 20.0
"""`BUSY_PATIENCE_S` is the time in seconds after which a busy controller is given up, and `RETRY_PAUSE_S` the
time between two tries. If the controller has accepted a job without an answer, the job has to appear in the
queue within `RETRY_PAUSE_S`."""

DEFAULT_RESOURCES = {
    "NODES": "1",
    "GPUS_PER_NODE": "8",
    "CPUS_PER_NODE": "96",
    "MEMORY": "1000G",
    "TIME": "3-00:00:00",
    "JOBS": "1",
    "SIGNAL_SECONDS": "300",
}
"""The resources of an experiment's job, by the environment variables that change them."""
WHOLE_NUMBERS = ("NODES", "GPUS_PER_NODE", "CPUS_PER_NODE", "JOBS", "SIGNAL_SECONDS")
"""The variables whose values are whole numbers above 0."""

RUNNING_STATES = ("RUNNING", "COMPLETING")
ENDED_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""The states in the accounting of jobs that have ended."""
TAKEN_AWAY_STATES = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED", "REVOKED")
"""The states of jobs that the cluster ended, for reasons outside of the job."""

_BUSY_COMPLAINT = re.compile(
    r"timed? ?out|unable to contact|temporar|try again|connection (refused|reset)|zero bytes|standby mode"
    r"|communication|connect failure|said nothing|socket",
    re.IGNORECASE,
)
"""Complaints after which the same command may succeed."""
_SUBMITTED_LINE = re.compile(r"Submitted batch job (\d+)", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"^\s*(\d+)(?:;\S*)?\s*$", re.MULTILINE)
"""A line of ``sbatch --parsable``: ``17``, or ``17;east`` with the cluster's name."""
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TASK_LINE = re.compile(r"(\d+)_(\d+)\|(\w+)(?: by \S+)?(?:\|(.*))?")
"""A line of squeue or sacct on one task of an array: ``17_0|RUNNING|None``. ``17_0|CANCELLED by 1000`` names
the user who cancelled it."""
_PENDING_TASKS = re.compile(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]\|(\w+)(?:\|(.*))?")
"""A line of squeue on all tasks of an array that don't run yet: ``17_[2-3,5%2]|PENDING|Resources``."""

_OPTIONS_WITHOUT_VALUE = (
    "-h", "--help", "-H", "--hold", "-k", "--no-kill", "-O", "--overcommit", "-Q", "--quiet", "-s",
    "--oversubscribe", "--share", "-u", "--usage", "-v", "--verbose", "-V", "--version", "-W", "--wait",
    "--contiguous", "--exclusive", "--get-user-env", "--ignore-pbs", "--nice", "--no-requeue", "--parsable",
    "--propagate", "--reboot", "--requeue", "--resv-ports", "--spread-job", "--stepmgr", "--test-only",
    "--use-min-nodes",
)  # fmt: skip
"""The options of sbatch that don't take the next word as their value. Some may have a value after ``=``."""


class SlurmRefused(RuntimeError):
    """A command of SLURM has failed. The message is the command's complaint."""


class SlurmBusy(SlurmRefused):
    """A command of SLURM has failed, and may succeed later. The controller may have carried it out
    nevertheless."""


class ArrayTask(NamedTuple):
    """A task of an array: ``ArrayTask("17", 2, "PENDING", "Resources")``."""

    job: str
    """The number of the array's job."""
    number: int
    """The number of the task in the array."""
    state: str
    reason: str
    """The reason why the task waits; empty if the output has none."""


# Job scripts


def script_header(name: str, log: str, options: Sequence[str], comment: str, folder: Path) -> list[str]:
    """Returns the first lines of a job script: sbatch's options, the comment, and the commands that enter
    `folder` and put this Python first in the PATH.

    Args:
        log: The file of the job's output, in sbatch's form: ``logs/slurm-%j.out``.
        options: Further options of sbatch: ``--partition=gpu``.
        comment: Lines that begin with ``#``.
    """
    return [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --output={log}",
        *(f"#SBATCH {option}" for option in options),
        *comment.splitlines(),
        "set -euo pipefail",
        f"cd {shlex.quote(str(folder))}",
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
    ]


def node_options(nodes: int, gpus: int, cpus: int) -> list[str]:
    """Returns the options of sbatch for one task on each of `nodes` nodes, with its GPUs and cores."""
    return [f"--nodes={nodes}", "--ntasks-per-node=1", f"--gpus-per-node={gpus}", f"--cpus-per-task={cpus}"]


class ShellTask(NamedTuple):
    """A task of an array of jobs, and the line of the shell that carries it out."""

    label: str
    line: str


def self_submitting_script(header: Sequence[str], logs: Path, waves: Sequence[Sequence[ShellTask]]) -> str:
    """Returns a script that submits itself: ``bash FILE`` queues an array of tasks for each wave.

    A wave starts when the previous one has ended, whether its tasks succeeded or not.

    Args:
        header: The lines of `script_header`.
        logs: The folder of the jobs' output. The script makes it, since sbatch doesn't.
        waves: The tasks of each wave.
    """
    task_ranges: list[str] = []  # as sbatch's --array takes them: "0-3"
    cases: list[str] = []  # of the shell's `case`, one for each task
    for wave in waves:
        task_ranges.append(f"{len(cases)}-{len(cases) + len(wave) - 1}")
        for task in wave:
            cases.append(f"    {len(cases)}) # {task.label}\n        {task.line} ;;")
    submission = f"""
if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    mkdir -p {shlex.quote(str(logs))}
    after=()
    for wave in {" ".join(task_ranges)}; do
        job=$({shlex.quote(sys.executable)} {shlex.quote(__file__)} sbatch \\
            --parsable "${{after[@]}}" --array="$wave" "$@" "${{BASH_SOURCE[0]}}")
        echo "tasks $wave: job $job"
        after=(--dependency="afterany:$job")
    done
    exit 0
fi

case "$SLURM_ARRAY_TASK_ID" in"""
    unknown_task = '    *) echo "there is no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;'
    return "\n".join([*header, submission, *cases, unknown_task, "esac", ""])


def array_ranges(indices: Sequence[int]) -> str:
    """Returns the value of sbatch's --array: ``0-2,5`` for 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1].append(index)
        else:
            ranges.append([index])
    texts = []
    for consecutive in ranges:
        first, last = consecutive[0], consecutive[-1]
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)


# Submission


def run_command(command: Sequence[str]) -> str:
    """Returns the output of a command of SLURM. Raises SlurmBusy or SlurmRefused with the command's complaint
    if it fails, and ValueError if this machine doesn't have the command."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ValueError(f"there is no {command[0]} here: run this on a machine of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmBusy(f"{command[0]} said nothing for {COMMAND_TIMEOUT_S:.0f} s") from error
    if completed.returncode == 0:
        return _COLOUR_CODE.sub("", completed.stdout)
    complaint = re.sub(r"\s+", " ", completed.stderr or completed.stdout).strip()
    error_type = SlurmBusy if _BUSY_COMPLAINT.search(complaint) else SlurmRefused
    raise error_type(f"{command[0]}: {complaint[:300] or f'exit code {completed.returncode}'}")


def job_number(answer: str) -> str | None:
    """Returns the job's number from sbatch's output, which may also contain banners and the cluster's name.
    Returns None if there is no number."""
    if submitted := _SUBMITTED_LINE.search(answer):
        return submitted[1]
    numbers = _NUMBER_ALONE.findall(answer)
    return numbers[-1] if numbers else None


def split_arguments(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], str | None]:
    """Returns the options of an sbatch command line with their values, and the script after them.

    All words after the script are the script's own. A switch has the value "". The script is None if the
    command line has none.

    Example: ``["-Jx", "--hold", "job.sh", "-v"]`` gives ``([("-J", "x"), ("--hold", "")], "job.sh")``.
    """
    options: list[tuple[str, str]] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return options, word
        if word == "--":
            return options, next(words, None)
        if word.startswith("--"):
            name, separator, value = word.partition("=")
            has_value = bool(separator)
        else:
            name, value = word[:2], word[2:]
            while name in _OPTIONS_WITHOUT_VALUE and value:  # several letters after one dash: "-HJtrain"
                options.append((name, ""))
                name, value = f"-{value[0]}", value[1:]
            has_value = bool(value)
        is_switch = any(is_option(name, switch) for switch in _OPTIONS_WITHOUT_VALUE)
        if not has_value and not is_switch:
            value = next(words, "")
        options.append((name, value))
    return options, None


def is_option(name: str, option: str) -> bool:
    """Returns whether sbatch reads `name` as `option`, such as ``-J`` or ``--job-name``.

    sbatch also accepts the beginning of a long option: ``--job``. It refuses a beginning that several options
    have.
    """
    is_beginning = len(name) > len("--") and option.startswith(name)
    return name == option or is_beginning


def arguments_in_script(text: str) -> list[str]:
    """Returns the words of a script's #SBATCH lines. Those after the first command are left out, since sbatch
    ignores them."""
    arguments: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            with contextlib.suppress(ValueError):  # a quotation mark without its partner: sbatch refuses it
                arguments += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return arguments


def _value_of_option(arguments: Sequence[str], short: str, long: str, variables: Sequence[str]) -> str | None:
    """Returns the value of an option as sbatch chooses it: from the command line, or else from the first of
    the environment `variables` that is set, or else from the #SBATCH lines of the script. Returns None if
    nothing sets the option."""
    options, script = split_arguments(arguments)
    value = _last_value(options, short, long)
    for variable in variables:
        value = value or os.environ.get(variable)
    if not value and script is not None and Path(script).is_file():
        text = Path(script).read_text(errors="replace")
        options_in_script, _ = split_arguments(arguments_in_script(text))
        value = _last_value(options_in_script, short, long)
    return value


def _last_value(options: Sequence[tuple[str, str]], short: str, long: str) -> str | None:
    """Returns the value of an option; None if it isn't among `options`. If it is there several times, the
    last value counts, as for sbatch."""
    value = None
    for name, value_of_name in options:
        if is_option(name, short) or is_option(name, long):
            value = value_of_name
    return value


def cluster_options(arguments: Sequence[str]) -> list[str]:
    """Returns the option that names another cluster if sbatch with these arguments submits to another one; an
    empty list if it doesn't. All later commands on the job need this option, too."""
    clusters = _value_of_option(arguments, "-M", "--clusters", ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"))
    return [f"--clusters={clusters}"] if clusters else []


def submit_once(arguments: Sequence[str]) -> str | None:
    """Submits a job and returns its number; None if sbatch accepted the job without telling its number.

    Raises what `run_command` raises. After SlurmBusy, the job may be in the queue nevertheless.
    """
    return job_number(run_command(["sbatch", *arguments]))


def submit_patiently(
    arguments: Sequence[str], patience_s: float = BUSY_PATIENCE_S, pause_s: float = RETRY_PAUSE_S
) -> str:
    """Submits a job and returns its number.

    If the controller is busy, the job is looked for in the queue by its name before it is submitted again.
    Raises SlurmRefused if the job isn't accepted, or if it isn't known in time whether it is.
    """
    deadline = time.monotonic() + patience_s
    # These jobs are needed to tell the new job from others of the same name.
    jobs_before = _jobs_in_queue(arguments, deadline, pause_s)
    # Whether sbatch has accepted the job without telling its number. Then the job is only looked for in the
    # queue, and not submitted again.
    was_accepted = False
    while True:
        complaint = ""
        if not was_accepted:
            try:
                answer = run_command(["sbatch", *arguments])
            except SlurmBusy as busy:
                complaint = str(busy)
            else:
                if number := job_number(answer):
                    return number
                was_accepted = True
                complaint = f"sbatch answered {answer.strip()[:200]!r}, and no number of a job"
        if complaint:
            print(f"{complaint}; looking for its job in the queue", file=sys.stderr)
        if time.monotonic() + pause_s > deadline:
            raise SlurmRefused(
                f"{complaint or 'its job is not in the queue'}: look with squeue before you try again"
            )
        time.sleep(pause_s)
        jobs_now = _jobs_in_queue(arguments, deadline, pause_s)
        if jobs_before is None or jobs_now is None:
            raise SlurmRefused(f"{complaint}, and squeue isn't here to tell whether it was taken")
        if new_jobs := jobs_now - jobs_before:
            return max(new_jobs, key=int)  # usually there is one; of several, the newest


def _jobs_in_queue(arguments: Sequence[str], deadline: float, pause_s: float) -> set[str] | None:
    """Returns the numbers of this user's jobs in the queue that have the name of the job that `arguments`
    submit. If that name isn't known or contains a comma, returns those of all of this user's jobs. Returns
    None if this machine has no squeue.

    A busy controller is asked again after `pause_s` seconds, until `deadline`. Then SlurmBusy is raised.
    """
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i"]
    name = _job_name(arguments)
    if name and "," not in name:  # squeue would take a name with a comma for several names
        command.append(f"--name={name}")
    while True:
        try:
            answer = run_command([*command, *cluster_options(arguments)])
        except ValueError:
            return None
        except SlurmBusy:
            if time.monotonic() + pause_s > deadline:
                raise
            time.sleep(pause_s)
            continue
        return set(re.findall(r"^\s*(\d+)", answer, re.MULTILINE))


def _job_name(arguments: Sequence[str]) -> str | None:
    """Returns the name that sbatch with these arguments gives to the job; None if the name isn't known."""
    if name := _value_of_option(arguments, "-J", "--job-name", ("SBATCH_JOB_NAME",)):
        return name
    # Without an option, a job has the name of its script.
    _, script = split_arguments(arguments)
    return Path(script).name if script is not None and Path(script).is_file() else None


# The state of jobs


def tasks_in_queue(name: str, cluster: Sequence[str]) -> list[ArrayTask]:
    """Returns the tasks of the arrays of this name that run or are queued. Raises what `run_command` raises.

    Args:
        cluster: The result of `cluster_options`.
    """
    command = ["squeue", "--noheader", "--array", f"--name={name}", "--format=%i|%T|%r"]
    return list(_tasks_in(run_command([*command, *cluster])))


def tasks_in_accounting(name: str, since: float, cluster: Sequence[str]) -> list[ArrayTask]:
    """Returns the tasks of the arrays of this name that SLURM's accounting lists from the time `since`
    (seconds since 1970) on, whether they have ended or not. The list is empty if sacct fails, as on a cluster
    without accounting."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}"]
    try:
        answer = run_command([*command, f"--starttime={start}", "--format=JobID,State", *cluster])
    except (SlurmRefused, ValueError):
        return []
    return list(_tasks_in(answer))


def end_of_task(task: str, cluster: Sequence[str]) -> tuple[str, str] | None:
    """Returns the state in which a task ended and its exit code: ``("NODE_FAIL", "0:9")``. Returns None if
    the accounting doesn't list the task. Raises what `run_command` raises."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
    for line in run_command([*command, f"--jobs={task}", *cluster]).splitlines():
        name, _, state_and_code = line.strip().partition("|")
        if name == task:
            state, _, code = state_and_code.partition("|")
            return state, code
    return None


def cancel_task(task: str, cluster: Sequence[str]) -> None:
    """Ends a task. Raises what `run_command` raises, also if the task has ended already."""
    run_command(["scancel", task, *cluster])


def _tasks_in(answer: str) -> Iterator[ArrayTask]:
    """Yields the tasks in the output of squeue or sacct. Ignores other lines, such as a site's banner."""
    for line in answer.splitlines():
        if task := _TASK_LINE.fullmatch(line.strip()):
            yield ArrayTask(task[1], int(task[2]), task[3], task[4] or "")
        elif pending := _PENDING_TASKS.fullmatch(line.strip()):
            job, ranges, state, reason = pending.groups()
            for index_range in ranges.split(","):  # "2-3,5": the tasks 2, 3 and 5
                first, _, last = index_range.partition("-")
                for index in range(int(first), int(last or first) + 1):
                    yield ArrayTask(job, index, state, reason or "")


# An experiment: what scripts/slurm/submit.sh does


def _split_like_shell(text: str) -> list[str]:
    """Splits SBATCH_ARGUMENTS as a shell would, so that quotes keep an option with spaces together.

    Example: ``--comment='two words' --exclude=n1`` gives ``["--comment=two words", "--exclude=n1"]``.

    Raises ValueError for a quote that isn't closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"SBATCH_ARGUMENTS is {text!r}, which can't be split into options ({error}): close the quote, as"
            " in --comment='two words'"
        ) from error


def submit_experiment(configs: str, commands: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submits an experiment's jobs with the settings of `environment`, and returns the last job's number.

    Runs in the checkout's root. Raises ValueError for a wrong setting, and SystemExit for a wrong
    configuration, before anything is queued.
    """
    settings = {name: environment.get(name) or default for name, default in DEFAULT_RESOURCES.items()}
    for name in WHOLE_NUMBERS:
        if not re.fullmatch(r"[1-9][0-9]*", settings[name]):
            raise ValueError(f"{name} is '{settings[name]}'; it must be a whole number above 0")
    further_options = _split_like_shell(environment.get("SBATCH_ARGUMENTS", ""))
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch here: this is for a SLURM cluster's login node")
    main = str(Path(__file__).parent.parent / "main.py")

    # A mistake is reported here and now, not after hours in the queue.
    check = [sys.executable, main, "check", "--config-only", "--configs", configs]
    if code := subprocess.run(check, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(code)
    print_config = [sys.executable, main, "print_config", "--configs", configs]
    config = json.loads(subprocess.run(print_config, stdout=subprocess.PIPE, check=True).stdout)
    experiment, seed = config["experiment_name"], config.get("seed", 0)
    logs = environment.get("LOGS") or f"{config.get('directory', 'experiments')}/logs"
    Path(logs).mkdir(parents=True, exist_ok=True)

    nodes, gpus, cpus = (int(settings[name]) for name in ("NODES", "GPUS_PER_NODE", "CPUS_PER_NODE"))
    # "singleton": SLURM runs one job of this name at a time. Two jobs would use the same directory.
    dependencies = ["singleton"]
    if dependency := environment.get("DEPENDENCY"):
        dependencies.append(dependency)
    options = [
        *("--parsable", "--export=ALL", "--requeue", "--open-mode=append"),
        # The signal goes to all steps of the job, and so to each node's `treetune run`, which passes it on.
        f"--signal=USR1@{settings['SIGNAL_SECONDS']}",
        f"--job-name={environment.get('JOB_NAME') or f'{experiment}-{seed}'}",
        f"--output={logs}/slurm-%j.out",
        *node_options(nodes, gpus, cpus),
        f"--mem={settings['MEMORY']}",
        f"--time={settings['TIME']}",
        f"--dependency={','.join(dependencies)}",
    ]
    if nodes > 1:
        # Whole nodes, so that no other job slows a rank for which all others wait. The ranks could share
        # nodes: each node's `treetune run` takes the GPUs that SLURM gives to the job there (`list_gpus`).
        options.append("--exclusive")
    for name in ("PARTITION", "ACCOUNT", "QOS"):
        if value := environment.get(name):
            options.append(f"--{name.lower()}={value}")
    options += further_options

    # The job has the environment of sbatch (--export=ALL), and its script reads these variables.
    os.environ.update(TREETUNE_LOGS=logs, GPUS_PER_NODE=settings["GPUS_PER_NODE"])
    for _ in range(int(settings["JOBS"])):
        job = submit_patiently([*options, "scripts/slurm/job.sh", configs, *commands])
        print(
            f"queued job {job} of {experiment}: {nodes} x {gpus} GPUs, log {logs}/slurm-{job}.out",
            file=sys.stderr,
        )
    return job


def main(arguments: Sequence[str]) -> None:
    """Carries out the action that a shell script asks for, and prints the job's number."""
    action, *action_arguments = arguments
    if action == "sbatch":
        try:
            print(submit_patiently(action_arguments))
        except (ValueError, RuntimeError) as failure:
            sys.exit(str(failure))
    elif action == "experiment":
        configs, *commands = action_arguments
        try:
            print(submit_experiment(configs, commands, os.environ))
        except ValueError as wrong:
            print(f"submit.sh: {wrong}", file=sys.stderr)
            sys.exit(2)
        except RuntimeError as failure:
            sys.exit(str(failure))
    else:
        sys.exit(f"slurm.py: {action!r} is neither sbatch nor experiment")


if __name__ == "__main__":
    main(sys.argv[1:])
