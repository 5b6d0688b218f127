"""Promises of running on SLURM:

* a busy controller is asked again, and no job is ever submitted twice;
* the number of a job is read from any output, and every reason for which a job waits is reported;
* the scripts of scripts/slurm and of `reproduce_table --slurm` request what is documented.

There is no cluster. sbatch, squeue, sacct, scontrol and srun are small programs that record their calls and
answer as a test says; srun also runs its command, once for each node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treetune.cluster import slurm
from treetune.cluster.jobs import RunningJobs, SlurmJobs
from treetune.cluster.slurm import (
    SlurmBusy,
    SlurmRefused,
    array_ranges,
    cluster_options,
    job_number,
    run_command,
    submit_patiently,
)

PROGRAM = """#!{python}
import json, sys
from pathlib import Path
home = Path({home!r})
answers = json.loads((home / {name!r}).read_text())
answer = answers.pop(0) if len(answers) > 1 else answers[0]
(home / {name!r}).write_text(json.dumps([answer] if not answers else answers))
with (home / 'calls').open('a') as calls:
    print({name!r}, *sys.argv[1:], file=calls)
print(answer.get('out', ''))
print(answer.get('err', ''), file=sys.stderr)
sys.exit(answer.get('code', 0))
"""
TIMED_OUT = {"err": "sbatch: error: Batch job submission failed: Socket timed out on send/recv", "code": 1}
NOTHING: dict[str, Any] = {}


class Commands:
    """Programs of SLURM that give a test's answers one after the other; the last answer repeats."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.bin = home, home / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")

    def answers(self, name: str, *answers: dict[str, Any]) -> None:
        (self.home / name).write_text(json.dumps(list(answers)))
        program = self.bin / name
        program.write_text(PROGRAM.format(python=sys.executable, home=str(self.home), name=name))
        program.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.home / "calls"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [line for line in lines if line.startswith(f"{name} ")]

    def jobs(self, *options: str) -> RunningJobs:
        settings = SlurmJobs(poll=0.001, settle=0.0, options=options)
        return settings.begin(["work"], self.home / "output")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(tmp_path, monkeypatch)
    commands.answers("squeue", NOTHING)
    commands.answers("sacct", NOTHING)
    return commands


def test_a_controller_that_was_busy_is_asked_again(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT, TIMED_OUT, {"out": "17;east"})
    jobs = commands.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == {0, 1}, "they are not submitted yet"
    assert any("Socket timed out" in message for message in jobs.describe_waits().values())
    jobs.alive()
    assert len(commands.calls("sbatch")) == 3
    commands.answers("squeue", {"out": "17_0|RUNNING|None\n17_1|PENDING|Priority"})
    assert jobs.alive() == {0, 1} and jobs.running_shards() == {0}
    assert len(commands.calls("sbatch")) == 3


def test_a_job_that_was_accepted_in_spite_of_the_timeout_is_not_submitted_again(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("squeue", {"out": "17_0|RUNNING|None"})
    jobs = commands.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == {0, 1}
    submissions = commands.calls("sbatch")
    assert len(submissions) == 2 and "--array=0-1" in submissions[0] and "--array=1 " in submissions[1]


def test_a_job_that_was_accepted_and_has_ended_is_not_submitted_again(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("sacct", {"out": "17_0|COMPLETED\n17_1|FAILED"})
    jobs = commands.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == set()
    assert len(commands.calls("sbatch")) == 1


def test_a_job_that_was_accepted_and_cancelled_is_not_submitted_again(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("sacct", {"out": "17_0|CANCELLED by 1000"})
    jobs = commands.jobs()
    jobs.start([0])
    assert jobs.alive() == set()
    assert len(commands.calls("sbatch")) == 1


def test_a_job_that_was_accepted_after_the_queue_was_read_is_alive_and_not_submitted_again(
    commands: Commands,
) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("sacct", {"out": "18_0|RUNNING\n18_1|COMPLETED\n18_[2-3]|PENDING"})
    jobs = commands.jobs()
    jobs.start([0, 1, 2, 3])
    assert jobs.alive() == {0, 2, 3} and jobs.running_shards() == {0}
    commands.answers("squeue", {"out": "18_2|RUNNING|None"})
    assert jobs.alive() == {2}
    assert len(commands.calls("sbatch")) == 1


def test_nothing_is_submitted_again_while_the_queue_cannot_be_seen(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers(
        "squeue", {"err": "slurm_load_jobs error: Unable to contact slurm controller", "code": 1}
    )
    jobs = commands.jobs()
    jobs.start([0])
    for _ in range(3):
        with pytest.raises(OSError, match="Unable to contact"):
            jobs.alive()
    assert len(commands.calls("sbatch")) == 1


def test_a_job_that_the_cluster_refuses_is_an_error_at_once(commands: Commands) -> None:
    commands.answers("sbatch", {"err": "sbatch: error: invalid partition specified: gpus", "code": 1})
    with pytest.raises(SlurmRefused, match="invalid partition"):
        commands.jobs().start([0])


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("123", "123"),
        ("123;east", "123"),
        ("Submitted batch job 123", "123"),
        ("Submitted batch job 123 on cluster east", "123"),
        ("*** Welcome ***\nYour project has 1200 hours left.\n123\n", "123"),
        ("123;east\nPlease read https://site/news from 2026\n", "123"),
        ("sbatch: Verify job submission ...\nSubmitted batch job 123\n0\n", "123"),
        ("\nYour job was taken.\n", None),
        ("", None),
    ],
)
def test_the_number_of_a_job_is_read_from_whatever_a_site_prints(printed: str, number: str | None) -> None:
    assert job_number(printed) == number


def test_banners_are_ignored_and_pending_tasks_are_counted(commands: Commands) -> None:
    commands.answers("squeue", {"out": "Maintenance on 3_4\nCLUSTER: east\n17_[2-3,5%2]|PENDING|Resources"})
    jobs = commands.jobs("--clusters=east")
    assert jobs.alive() == {2, 3, 5} and jobs.running_shards() == set()
    assert "--clusters=east" in commands.calls("squeue")[0]


def test_jobs_that_wait_or_are_held_are_reported_with_their_reason(commands: Commands) -> None:
    reason_of_hold = "(launch failure requeued held)"
    commands.answers(
        "squeue",
        {"out": f"17_0|PENDING|Priority\n17_1|PENDING|JobHeldUser\n17_2|REQUEUE_HOLD|{reason_of_hold}"},
    )
    jobs = commands.jobs()
    assert jobs.alive() == {0, 1, 2}
    messages = list(jobs.describe_waits().values())
    assert messages[0] == "1 of the jobs waits in the queue: Priority"
    assert "JobHeldUser; `scontrol release 17_1`" in messages[1]
    assert "scontrol release 17_2" in messages[2]


@pytest.mark.parametrize(
    ("state", "is_taken_away"),
    [
        ("PREEMPTED", True),
        ("NODE_FAIL", True),
        ("FAILED", False),
        ("CANCELLED by 7", False),
        ("TIMEOUT", False),
    ],
)
def test_a_job_that_was_preempted_or_lost_its_machine_was_taken_away(
    commands: Commands, state: str, is_taken_away: bool
) -> None:
    commands.answers("sbatch", {"out": "17"})
    commands.answers("sacct", {"out": f"Notice: 3 nodes are down\n17_0|{state}|0:15"})
    jobs = commands.jobs()
    jobs.start([0])
    assert f"job 17_0 ended as {state}" in jobs.describe_end(0)
    assert jobs.was_taken_away(0) == is_taken_away


def test_the_sbatch_of_scripts_prints_the_number_alone(commands: Commands) -> None:
    commands.answers("sbatch", {"out": "Welcome\nSubmitted batch job 9 on cluster east"})
    command = [sys.executable, slurm.__file__, "sbatch", "--job-name=a", "job.sh", "word"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "9\n"
    assert commands.calls("sbatch") == ["sbatch --job-name=a job.sh word"]


def test_the_sbatch_of_scripts_looks_for_the_job_before_it_submits_again(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT, {"out": "12"})
    commands.answers("squeue", {"out": "5"}, {"out": "5\n11"})
    assert submit_patiently(["--job-name=a", "job.sh"], pause_s=0.0) == "11"
    assert len(commands.calls("sbatch")) == 1 and "--name=a" in commands.calls("squeue")[0]
    commands.answers("sbatch", TIMED_OUT, {"out": "12"})
    commands.answers("squeue", {"out": "5"})
    assert submit_patiently(["--job-name=a", "job.sh"], pause_s=0.0) == "12"
    commands.answers("sbatch", TIMED_OUT)
    with pytest.raises(SlurmRefused, match="look with squeue before you try again"):
        submit_patiently(["--job-name=a", "job.sh"], patience_s=0.5, pause_s=0.1)


def test_a_job_accepted_without_a_number_is_looked_for_and_never_submitted_again(commands: Commands) -> None:
    commands.answers("sbatch", {"out": "Your job was taken."})
    commands.answers("squeue", NOTHING, NOTHING, {"out": "13"})
    script = commands.home / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=named\n")
    assert submit_patiently([str(script)], pause_s=0.0) == "13"
    assert len(commands.calls("sbatch")) == 1 and "--name=named" in commands.calls("squeue")[0]


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=first  # a comment
#SBATCH --partition=gpu -J "in script" -M east
set -e
#SBATCH --job-name=after-a-command
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "filters"),
    [
        (["-Jx", "job.sh"], {}, ["--name=x", "--clusters=east"]),
        (["-J", "x", "job.sh"], {}, ["--name=x"]),
        (["-HJx", "job.sh"], {}, ["--name=x"]),
        (["--job-name", "x", "job.sh"], {}, ["--name=x"]),
        (["--job=x", "job.sh"], {}, ["--name=x"]),
        (["--job-name=a", "--job-name=x", "job.sh"], {}, ["--name=x"]),
        (["--job-name=a", "-Jx", "job.sh"], {"SBATCH_JOB_NAME": "v"}, ["--name=x"]),
        (["--hold", "job.sh"], {"SBATCH_JOB_NAME": "v"}, ["--name=v"]),
        (["--job-name=x", "job.sh", "--job-name=y", "-Mwest"], {}, ["--name=x", "--clusters=east"]),
        (["--output", "log.sh", "job.sh"], {}, ["--name=in script"]),
        (["-Mwest", "-M", "north", "log.sh"], {}, ["--name=log.sh", "--clusters=north"]),
        (["job.sh"], {"SBATCH_CLUSTERS": "south"}, ["--clusters=south"]),
    ],
)
def test_the_job_is_looked_for_by_the_name_and_the_cluster_that_sbatch_takes(
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    filters: list[str],
) -> None:
    monkeypatch.chdir(commands.home)
    Path("job.sh").write_text(SCRIPT)
    Path("log.sh").write_text("#!/bin/bash\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("squeue", NOTHING, {"out": "11"})
    assert submit_patiently(arguments, pause_s=0.0) == "11"
    for call in commands.calls("squeue"):
        assert [option for option in filters if f" {option}" not in call] == []


def test_a_job_whose_name_has_a_comma_is_looked_for_among_all_jobs(commands: Commands) -> None:
    commands.answers("sbatch", TIMED_OUT)
    commands.answers("squeue", NOTHING, {"out": "11"})
    assert submit_patiently(["--job-name=a,b", "job.sh"], pause_s=0.0) == "11"
    assert "--name" not in commands.calls("squeue")[0]


@pytest.mark.parametrize("option", ["-Jx", "-J x", "--job-name x", "-a0-3", "-o x", "--array=0", "gpu"])
def test_an_option_that_the_command_sets_itself_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="are set by this command"):
        SlurmJobs(options=(option,))


@pytest.mark.parametrize(
    "option", ["--arr=0", "--job x", "--outp=x", "--pars", "--hol --job-name=x", "--excl=user --array=0"]
)
def test_an_abbreviated_option_is_read_as_sbatch_reads_it(option: str) -> None:
    with pytest.raises(ValueError, match="are set by this command"):
        SlurmJobs(options=(option,))


def test_abbreviated_options_that_the_command_does_not_set_are_accepted() -> None:
    SlurmJobs(options=("--part=gpu", "--nod=2", "--hol", "--acc x"))


def test_the_cluster_of_an_option_of_two_words_is_named_to_all_commands(commands: Commands) -> None:
    jobs = commands.jobs('--comment="for us"', "-M east")
    jobs.alive()
    assert "--clusters=east" in commands.calls("squeue")[0]


def test_a_command_that_hangs_is_busy(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 0.2)
    with pytest.raises(SlurmBusy, match="sleep said nothing"):
        run_command(["sleep", "60"])


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--clusters=a"], ["--clusters=a"]),
        (["-M", "a"], ["--clusters=a"]),
        (["-Ma"], ["--clusters=a"]),
        ([], []),
    ],
)
def test_the_cluster_that_sbatch_submits_to_is_named_to_all_commands(
    options: list[str], needed: list[str]
) -> None:
    assert cluster_options(options) == needed


@pytest.mark.parametrize(
    ("shards", "array"), [([0, 1, 2, 5], "0-2,5"), ([3], "3"), ([7, 1], "1,7"), ([1, 2, 4, 5], "1-2,4-5")]
)
def test_shards_are_written_as_an_array(shards: list[int], array: str) -> None:
    assert array_ranges(shards) == array


def test_a_script_that_submits_itself_queues_one_wave_after_the_other(tmp_path: Path) -> None:
    bin_folder, calls, script = tmp_path / "bin", tmp_path / "calls", tmp_path / "waves.sh"
    bin_folder.mkdir()
    sbatch = bin_folder / "sbatch"
    sbatch.write_text('#!/bin/bash\necho "$@" >> "$CALLS"; echo "$(wc -l < "$CALLS")00;cluster"\n')
    sbatch.chmod(0o755)
    first, second, third = (
        slurm.ShellTask(label, f"echo {number} >> $CALLS")
        for number, label in enumerate(("first", "second", "third"))
    )
    waves = [[first], [second, third]]
    header = slurm.script_header("waves", "%A.out", slurm.node_options(1, 2, 6), "# a comment", tmp_path)
    script.write_text(slurm.self_submitting_script(header, tmp_path / "logs", waves))

    def run(*options: str, **variables: str) -> list[str]:
        calls.unlink(missing_ok=True)
        environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "CALLS": str(calls), **variables}
        subprocess.run(["bash", str(script), *options], env=environment, check=True, timeout=60)
        return calls.read_text().splitlines()

    assert run("--partition=gpu") == [
        f"--parsable --array=0-0 --partition=gpu {script}",
        f"--parsable --dependency=afterany:100 --array=1-2 --partition=gpu {script}",
    ]
    assert (tmp_path / "logs").is_dir()
    assert run(SLURM_ARRAY_TASK_ID="2") == ["2"]
    assert "#SBATCH --gpus-per-node=2\n#SBATCH --cpus-per-task=6\n" in script.read_text()


# scripts/slurm


ROOT = Path(__file__).parents[2]
TOOLS = {
    "sbatch": """echo "sbatch $*" >>"$CALLS"; echo "$(($(grep -c ^sbatch "$CALLS") + 16));here\"""",
    "scontrol": """[ "$1 $2" = "show hostnames" ] && tr , '\\n' <<<"$3" """,
    "srun": """echo "srun $*" >>"$CALLS"
        while [ "$1" != bash ]; do case "$1" in --nodes=*) nodes=${1#*=} ;; esac; shift; done
        for ((i = 0; i < nodes; i++)); do SLURM_NODEID=$i "$@" || exit; done""",
}
LAUNCHER = """#!/bin/bash
interface=${GLOO_SOCKET_IFNAME:+ by $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME}
echo "treetune $* OMP_NUM_THREADS=$OMP_NUM_THREADS$interface" >>"$CALLS"
case "$*" in *"$FAIL_AT") [ -z "$FAIL_AT" ] || exit 7 ;; esac
"""
PYTHON = f"""#!/bin/bash
exec {sys.executable} "$@"
"""
JOB = {
    "SLURM_JOB_ID": "170123",
    "SLURM_JOB_NODELIST": "n7,n8,n9",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "96",
}


class LoginNode:
    """A checkout on a login node, whose programs record their calls."""

    def __init__(self, path: Path) -> None:
        self.path = path / "a checkout"
        shutil.copytree(ROOT / "scripts/slurm", self.path / "scripts/slurm")
        for name in ("src", "configs"):
            (self.path / name).symlink_to(ROOT / name)
        self.calls = path / "calls"
        self.bin = path / "bin"
        self.bin.mkdir()
        for name, text in TOOLS.items():
            self.tool(self.bin / name, "#!/bin/bash\n" + text)
        (self.path / ".venv/bin").mkdir(parents=True)
        self.tool(self.path / ".venv/bin/python", PYTHON)
        self.tool(self.path / ".venv/bin/treetune", LAUNCHER)

    def tool(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "CALLS": str(self.calls)} | environment
        return subprocess.run(
            ["bash", f"scripts/slurm/{script}", *arguments],
            cwd=self.path, env=variables, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def job(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """As sbatch runs it: a copy of the script, from elsewhere."""
        copy = self.path.parent / "spool"
        shutil.copy(self.path / "scripts/slurm/job.sh", copy)
        slurm = {"SLURM_SUBMIT_DIR": str(self.path), "TREETUNE_LOGS": "logs"} | JOB
        (self.path / "logs").mkdir(exist_ok=True)
        return self.run("../../../spool", *arguments, **slurm | environment)

    def calls_of(self, tool: str) -> list[str]:
        """List the calls of a program, as command lines."""
        return [line for line in self.calls.read_text().splitlines() if line.startswith(f"{tool} ")]


@pytest.fixture
def login(tmp_path: Path) -> LoginNode:
    return LoginNode(tmp_path)


def test_an_experiment_is_queued_with_the_documented_defaults(login: LoginNode) -> None:
    done = login.run("submit.sh", "configs/quickstart/grpo.jsonnet", NODES="4", LOGS="logs", APP_SEED="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17\n", "what another job may depend on, and nothing else"
    assert "queued job 17 of quickstart/grpo: 4 x 8 GPUs, log logs/slurm-17.out" in done.stderr
    (submission,) = login.calls_of("sbatch")
    for options in (
        "--job-name=quickstart/grpo-3 --output=logs/slurm-%j.out --nodes=4 --ntasks-per-node=1",
        "--gpus-per-node=8 --cpus-per-task=96 --mem=1000G --time=3-00:00:00 --dependency=singleton",
        " --exclusive ",
        "--requeue",
        "--signal=USR1@300",
    ):
        assert options in submission
    assert submission.endswith(" scripts/slurm/job.sh configs/quickstart/grpo.jsonnet")
    assert (login.path / "logs").is_dir()


def test_every_option_of_a_job_can_be_set(login: LoginNode) -> None:
    done = login.run(
        "submit.sh", "configs/quickstart/grpo.jsonnet", "run_evaluation", "run_analyzers",
        GPUS_PER_NODE="2", CPUS_PER_NODE="16", MEMORY="200G", TIME="1:00:00", PARTITION="short", ACCOUNT="us",
        QOS="low", JOBS="3", DEPENDENCY="afterok:4", JOB_NAME="mine", LOGS="logs",
        SBATCH_ARGUMENTS="--constraint=h100 --comment='two words'", SIGNAL_SECONDS="900",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "19\n"), done.stderr
    submissions = login.calls_of("sbatch")
    assert len(set(submissions)) == 1 and len(submissions) == 3, "one after the other, by their name"
    for options in (
        "--job-name=mine --output=logs/slurm-%j.out --nodes=1 ",
        "--gpus-per-node=2 --cpus-per-task=16 --mem=200G --time=1:00:00 --dependency=singleton,afterok:4 ",
        " --signal=USR1@900 ",
        "--partition=short --account=us --qos=low --constraint=h100 --comment=two words scripts/slurm/job.sh",
    ):
        assert options in submissions[0]
    assert "--exclusive" not in submissions[0]
    assert submissions[0].endswith("grpo.jsonnet run_evaluation run_analyzers")


GRPO = "configs/quickstart/grpo.jsonnet"


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        (f"submit.sh {GRPO}", {"NODES": "two"}, "NODES is 'two'; it must be a whole number"),
        (f"submit.sh {GRPO}", {"JOBS": "0"}, "JOBS is '0'"),
        (f"submit.sh {GRPO}", {"SBATCH_ARGUMENTS": "--comment='x"}, "No closing quotation): close the quote"),
        (f"submit.sh {GRPO}", {"SIGNAL_SECONDS": "soon"}, "SIGNAL_SECONDS is 'soon'"),
        (f"submit.sh {GRPO}", {"PYTHON": "no-such"}, "there is no no-such: run TREETUNE_DEVICE"),
        ("submit.sh configs/quickstart/gpro.jsonnet", {}, "no such file"),
        ("threadweaver.sh", {}, "usage: scripts/slurm/threadweaver.sh parallel|sequential"),
        ("threadweaver.sh both", {}, "usage"),
        ("threadweaver.sh parallel", {"STAGES": "rl sfft"}, "STAGES has 'sfft'; there are sft and rl"),
    ],
)
def test_nothing_is_queued_that_cannot_run(
    login: LoginNode, command: str, environment: dict[str, str], message: str
) -> None:
    done = login.run(*command.split(), LOGS="logs", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert login.calls_of("sbatch") == []


def test_a_job_starts_the_launcher_once_on_each_of_its_nodes(login: LoginNode) -> None:
    done = login.job("a.jsonnet,b.jsonnet")
    assert done.returncode == 0, done.stderr
    calls = login.calls.read_text().splitlines()
    sruns = [i for i, line in enumerate(calls) if line.startswith("srun ")]
    assert len(sruns) == 2
    train, evaluate = calls[: sruns[1]], calls[sruns[1] :]
    assert "--nodes=3 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=1 bash" in train[0]
    for number, line in enumerate(train[1:]):
        launch = f"treetune run --node_rank {number} --nodes n7,n8,n9 --master_port 20123 --num_gpus 8"
        assert line == f"{launch} --configs a.jsonnet,b.jsonnet run_iteration_loop OMP_NUM_THREADS=12"
    assert [line.replace("run_evaluation", "run_iteration_loop") for line in evaluate] == train


def test_a_network_interface_is_named_to_both_libraries(login: LoginNode) -> None:
    login.job("a.jsonnet", "run_iteration_loop", SOCKET_IFNAME="ib0")
    assert login.calls_of("treetune")[0].endswith(" by ib0 ib0")
    login.job("a.jsonnet", "run_iteration_loop")
    assert " by " not in login.calls_of("treetune")[0]


def test_a_job_whose_training_fails_evaluates_nothing_and_says_so(login: LoginNode) -> None:
    done = login.job("a.jsonnet", FAIL_AT="run_iteration_loop")
    assert done.returncode == 7
    assert len(login.calls_of("srun")) == 1


def test_a_job_without_its_packages_says_how_to_get_them_or_runs_in_a_container(login: LoginNode) -> None:
    (login.path / ".venv/bin/treetune").unlink()
    done = login.job("a.jsonnet")
    assert done.returncode == 2 and "TREETUNE_DEVICE=nvidia ./scripts/setup.sh" in done.stderr
    login.tool(login.bin / "container", '#!/bin/bash\necho "container $*" >>"$CALLS"\n')
    done = login.job("a.jsonnet", "run_evaluation", RUN_IN="container exec x.sif")
    assert done.returncode == 0, done.stderr
    assert login.calls_of("container")[0].startswith("container exec x.sif treetune run --node_rank 0 ")


@pytest.mark.parametrize("form", ["parallel", "sequential"])
def test_a_form_is_fine_tuned_and_then_trained_from_that(login: LoginNode, form: str) -> None:
    (login.path / "mine.jsonnet").write_text("{ seed: 5 }")
    done = login.run("threadweaver.sh", form, CONFIGS="mine.jsonnet", LOGS="logs")
    assert (done.returncode, done.stdout) == (0, "18\n"), done.stderr
    sft, rl = login.calls_of("sbatch")
    assert f"--job-name=threadweaver/sft_{form}-5 " in sft and f"--job-name=threadweaver/{form}-5 " in rl
    assert "--nodes=1 " in sft and "--dependency=singleton " in sft
    assert "--nodes=4 " in rl and "--dependency=singleton,afterok:17 " in rl
    assert sft.endswith(f" configs/threadweaver/sft_{form}.jsonnet,mine.jsonnet")
    assert rl.endswith(f" configs/threadweaver/{form}.jsonnet,mine.jsonnet")


def test_one_stage_can_be_queued_alone_on_other_nodes(login: LoginNode) -> None:
    done = login.run(
        "threadweaver.sh", "parallel", STAGES="rl", NODES="2", DEPENDENCY="afterany:4", LOGS="logs"
    )
    assert done.returncode == 0, done.stderr
    (rl,) = login.calls_of("sbatch")
    assert "threadweaver/parallel-" in rl and "--nodes=2 " in rl and "singleton,afterany:4 " in rl
