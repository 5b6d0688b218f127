"""Jobs on a cluster whose commands are busy, chatty, or say that a job was taken away: none is given twice,
and what keeps one from running is told. sbatch, squeue and sacct are small programs that answer as told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treetune.cluster import submission
from treetune.cluster.jobs import RunningJobs, SlurmJobs
from treetune.cluster.submission import (
    SlurmBusy,
    SlurmRefused,
    cluster_options,
    job_number,
    output_of,
    submit,
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


class Cluster:
    """Answers of each program, one after the other; the last one is given again and again."""

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
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.answers("squeue", NOTHING)
    cluster.answers("sacct", NOTHING)
    return cluster


def test_a_controller_that_was_busy_is_asked_again(cluster: Cluster) -> None:
    cluster.answers("sbatch", TIMED_OUT, TIMED_OUT, {"out": "17;east"})
    jobs = cluster.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == {0, 1}, "they are still to come"
    assert any("Socket timed out" in words for words in jobs.waits().values())
    jobs.alive()
    assert len(cluster.calls("sbatch")) == 3
    cluster.answers("squeue", {"out": "17_0|RUNNING|None\n17_1|PENDING|Priority"})
    assert jobs.alive() == {0, 1} and jobs.running() == {0}
    assert len(cluster.calls("sbatch")) == 3


def test_a_job_that_was_taken_in_spite_of_the_timeout_is_not_given_again(cluster: Cluster) -> None:
    cluster.answers("sbatch", TIMED_OUT)
    cluster.answers("squeue", {"out": "17_0|RUNNING|None"})
    jobs = cluster.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == {0, 1}
    asked = cluster.calls("sbatch")
    assert len(asked) == 2 and "--array=0-1" in asked[0] and "--array=1 " in asked[1]


def test_a_job_that_was_taken_and_has_ended_since_is_not_given_again(cluster: Cluster) -> None:
    cluster.answers("sbatch", TIMED_OUT)
    cluster.answers("sacct", {"out": "17_0|COMPLETED\n17_1|FAILED"})
    jobs = cluster.jobs()
    jobs.start([0, 1])
    assert jobs.alive() == set()
    assert len(cluster.calls("sbatch")) == 1


def test_nothing_is_given_again_while_the_queue_cannot_be_seen(cluster: Cluster) -> None:
    cluster.answers("sbatch", TIMED_OUT)
    cluster.answers("squeue", {"err": "slurm_load_jobs error: Unable to contact slurm controller", "code": 1})
    jobs = cluster.jobs()
    jobs.start([0])
    for _ in range(3):
        with pytest.raises(OSError, match="Unable to contact"):
            jobs.alive()
    assert len(cluster.calls("sbatch")) == 1


def test_a_job_that_no_cluster_takes_is_refused_at_once(cluster: Cluster) -> None:
    cluster.answers("sbatch", {"err": "sbatch: error: invalid partition specified: gpus", "code": 1})
    with pytest.raises(SlurmRefused, match="invalid partition"):
        cluster.jobs().start([0])


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
def test_a_job_has_its_number_in_whatever_a_site_prints(printed: str, number: str | None) -> None:
    assert job_number(printed) == number


def test_a_banner_is_no_task_and_tasks_to_come_are_counted(cluster: Cluster) -> None:
    cluster.answers("squeue", {"out": "Maintenance on 3_4\nCLUSTER: east\n17_[2-3,5%2]|PENDING|Resources"})
    jobs = cluster.jobs("--clusters=east")
    assert jobs.alive() == {2, 3, 5} and jobs.running() == set()
    assert "--clusters=east" in cluster.calls("squeue")[0]


def test_jobs_that_wait_or_are_held_are_told_with_their_reason(cluster: Cluster) -> None:
    held = "(launch failure requeued held)"
    cluster.answers(
        "squeue", {"out": f"17_0|PENDING|Priority\n17_1|PENDING|JobHeldUser\n17_2|REQUEUE_HOLD|{held}"}
    )
    jobs = cluster.jobs()
    assert jobs.alive() == {0, 1, 2}
    told = list(jobs.waits().values())
    assert told[0] == "1 of the jobs waits in the queue: Priority"
    assert "JobHeldUser; `scontrol release 17_1`" in told[1] and "scontrol release 17_2" in told[2]


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
    cluster: Cluster, state: str, is_taken_away: bool
) -> None:
    cluster.answers("sbatch", {"out": "17"})
    cluster.answers("sacct", {"out": f"Notice: 3 nodes are down\n17_0|{state}|0:15"})
    jobs = cluster.jobs()
    jobs.start([0])
    assert f"job 17_0 ended as {state}" in jobs.why(0)
    assert jobs.was_taken_away(0) == is_taken_away


# For scripts of the shell


def test_a_patient_sbatch_prints_the_number_alone(cluster: Cluster) -> None:
    cluster.answers("sbatch", {"out": "Welcome\nSubmitted batch job 9 on cluster east"})
    command = [sys.executable, submission.__file__, "--job-name=a", "job.sh", "word"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "9\n"
    assert cluster.calls("sbatch") == ["sbatch --job-name=a job.sh word"]


def test_a_patient_sbatch_looks_for_the_job_before_it_gives_it_again(cluster: Cluster) -> None:
    cluster.answers("sbatch", TIMED_OUT, {"out": "12"})
    cluster.answers("squeue", {"out": "5"}, {"out": "5\n11"})
    assert submit(["--job-name=a", "job.sh"], pause_s=0.0) == "11"
    assert len(cluster.calls("sbatch")) == 1 and "--name=a" in cluster.calls("squeue")[0]
    cluster.answers("sbatch", TIMED_OUT, {"out": "12"})
    cluster.answers("squeue", {"out": "5"})
    assert submit(["--job-name=a", "job.sh"], pause_s=0.0) == "12"
    cluster.answers("sbatch", TIMED_OUT)
    with pytest.raises(SlurmRefused, match="look with squeue before you try again"):
        submit(["--job-name=a", "job.sh"], patience_s=0.5, pause_s=0.1)


def test_what_was_taken_without_a_number_is_looked_for_and_never_given_again(cluster: Cluster) -> None:
    cluster.answers("sbatch", {"out": "Your job was taken."})
    cluster.answers("squeue", NOTHING, NOTHING, {"out": "13"})
    script = cluster.home / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=named\n")
    assert submit([str(script)], pause_s=0.0) == "13"
    assert len(cluster.calls("sbatch")) == 1 and "--name=named" in cluster.calls("squeue")[0]


def test_a_command_that_hangs_is_busy(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "ANSWER_S", 0.2)
    with pytest.raises(SlurmBusy, match="sleep said nothing"):
        output_of(["sleep", "60"])


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--clusters=a"], ["--clusters=a"]),
        (["-M", "a"], ["--clusters=a"]),
        (["-Ma"], ["--clusters=a"]),
        ([], []),
    ],
)
def test_the_cluster_of_sbatch_is_asked_by_all_commands(options: list[str], needed: list[str]) -> None:
    assert cluster_options(options) == needed
