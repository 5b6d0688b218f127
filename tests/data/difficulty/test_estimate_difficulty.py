"""Promises of `estimate_difficulty`:

* every row gets its rate, every answer is asked for once, and equal rows have separate answers;
* however the work is divided among jobs, and however jobs and commands end, the result has the same bytes,
  and only requests that were under way are repeated;
* an answer that can't be graded yet is kept and graded later, and a request that fails costs no other one;
* on SLURM a lost task is submitted again, and a new command continues with tasks that still run;
* whatever is wrong is one message before anything is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data import command
from tests.data.command import write_lines
from tests.data.oracle import Oracle, sums
from tests.data.scripted import serving
from treetune.data.difficulty import watching
from treetune.data.difficulty.answering import AskingShard, AtAddresses, SampleQuestion
from treetune.data.difficulty.merging import RowRate, bin_of, read_rates
from treetune.domains.domain_rows import domain_row
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.engine.guard import find_descendants
from treetune.engine.requests import SamplingParams
from treetune.main import main
from treetune.runtime.claims import _own_identity
from treetune.runtime.console import Console
from treetune.vocabulary import Problem

ROWS, SAMPLES = 40, 5
LOCAL = {"type": "local", "at_once": 2, "poll": 0.05}
RESULTS = ("rates.parquet", "rows.parquet", "summary.json", "histogram.svg")


class Work(command.Work):
    def __init__(self, folder: Path, oracle: Oracle) -> None:
        address = {
            "base_url": oracle.url, "model": "oracle", "concurrency": 2, "retries": 0, "timeout": 600,
            "give_up_after": 2,
        }  # fmt: skip
        super().__init__(
            folder,
            "estimate_difficulty",
            sums(ROWS),
            task={"type": "rows", "routes": {"math": {"type": "final_answer", "marker": "#"}}},
            policy={"type": "endpoint", "addresses": [address]},
            answers={"samples": SAMPLES, "max_tokens": 64},
            shards=2,
            jobs=LOCAL,
            column="low_pass_rate",
        )
        self.oracle = oracle

    @property
    def requests(self) -> int:
        """How many requests the oracle has had."""
        return sum(self.oracle.asked.values())

    @property
    def log(self) -> str:
        return (self.output / "logs" / "run.log").read_text()

    def rates(self) -> list[RowRate]:
        return list(read_rates(self.output / "rates.parquet"))

    def results(self) -> dict[str, bytes]:
        return {name: (self.output / name).read_bytes() for name in RESULTS}

    def wait_for_requests(self, count: int) -> None:
        self.wait_until(lambda: self.requests >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Oracle]:
    with serving(Oracle()) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def undisturbed(server: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Run the command where nothing fails, and keep its result and its requests to compare with."""
    done = Work(tmp_path_factory.mktemp("undisturbed"), server)
    assert done.run() == 0
    done.oracle = copy(server)
    return done


@pytest.fixture
def oracle(server: Oracle) -> Oracle:
    server.begin()
    return server


@pytest.fixture
def work(undisturbed: Work, oracle: Oracle, tmp_path: Path) -> Work:
    return Work(tmp_path, oracle)


def test_every_row_has_its_rate_and_every_answer_was_asked_for_once(undisturbed: Work) -> None:
    rates = undisturbed.rates()
    assert [row.index for row in rates] == list(range(ROWS))
    assert all(row.answers == SAMPLES and row.unavailable == 0 for row in rates)
    assert [row["low_pass_rate"] for row in undisturbed.rows()] == [row.correct / SAMPLES for row in rates]
    assert all(row.correct == 0 for row in rates if row.index % 10 == 0), "the oracle never knows 0+b"
    requests = undisturbed.oracle.asked
    assert set(requests.values()) == {1} and len(requests) == ROWS * SAMPLES
    summary = undisturbed.summary
    assert sum(summary["bins"].values()) == ROWS and summary["asked_twice"] == 0
    assert (undisturbed.output / "histogram.png").is_file()
    # Rows 8 and 9 are equal, and each has separate answers.
    assert rates[8].key == rates[9].key and (rates[8].occurrence, rates[9].occurrence) == (0, 1)
    assert len({seed for prompt, seed in requests if prompt.startswith("8+1=")}) == 2 * SAMPLES


def test_the_number_of_shards_changes_nothing(
    work: Work, undisturbed: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(shards=3, jobs={**LOCAL, "at_once": 1}) == 0
    assert work.results() == undisturbed.results()
    assert "impossible" in capsys.readouterr().err, "the bins are shown"


def test_the_settings_of_an_answer_reach_the_address(work: Work) -> None:
    answers = {"samples": 2, "max_tokens": 7, "temperature": 0.3, "top_p": 0.5, "top_k": -1, "stop": ["!"]}
    assert work.run(answers=answers, shards=1) == 0
    body = work.oracle.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["stop"]) == (7, 0.3, 0.5, ["!"])
    assert "top_k" not in body


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_an_answer_that_was_cut_off_in_the_thought_that_its_prompt_opened_is_wrong(
    work: Work, undisturbed: Work, api: str
) -> None:
    work.oracle.finish = "length"
    address = {"base_url": work.oracle.url, "model": "oracle", "api": api}
    policy: dict[str, Any] = {"type": "endpoint", "addresses": [address]}
    if api == "chat":
        policy["template_opens_thought"] = True
    else:
        rows = []
        for number in range(5, 10):
            rows.append(domain_row("math__sums", f"{number}+1=?\n<think>\n", str(number + 1)))
        write_lines(work.input, rows)
    task = {"type": "rows", "routes": {"math": {"type": "numeric", "without_marker": "last_number"}}}
    assert work.run(policy=policy, task=task, shards=1) == 0
    assert sum(row.correct for row in work.rates()) == 0


@pytest.mark.slow
def test_requests_that_fail_are_told_and_the_others_are_kept(oracle: Oracle, tmp_path: Path) -> None:
    address = EndpointSettings(base_url=oracle.url, model="oracle", concurrency=1, retries=0, give_up_after=2)
    prompts = ("1+1=?", "no sum", "2+2=?")  # the oracle fails on the second
    questions = [
        SampleQuestion(row, 0, 7, Problem(str(row), prompt, "")) for row, prompt in enumerate(prompts)
    ]
    policy, shard = AtAddresses(addresses=(address,)), AskingShard(0, tmp_path, 0)
    answered_rows = set()
    failure = pytest.raises(RuntimeError, match=r"^1 requests failed; the other answers are kept")
    with policy.open(SamplingParams(64), shard) as ask, failure:
        ask(questions, lambda question, _: answered_rows.add(question.row))
    assert answered_rows == {0, 2}


def test_killed_jobs_and_a_killed_command_change_nothing(work: Work, undisturbed: Work) -> None:
    work.oracle.seconds = 0.03
    with work.started() as command:
        work.wait_for_requests(20)
        jobs = [pid for pid in find_descendants(command.pid) if b"--shard" in command_line_of(pid)]
        assert jobs
        for pid in jobs:
            os.kill(pid, signal.SIGKILL)
        work.wait_for_requests(60)
    total = ROWS * SAMPLES
    assert work.requests < total, "there was something left to do"
    assert work.run() == 0
    assert work.results() == undisturbed.results()
    # Only what was under way when a process died was asked for again: two requests of two jobs, twice.
    assert work.requests <= total + 8
    assert "another job continues" in work.log and "signal 9" in work.log


@pytest.mark.slow
def test_a_job_that_falls_silent_is_ended_and_another_goes_on(work: Work) -> None:
    work.oracle.seconds = 600.0
    # Longer than a job takes to start on a busy machine.
    with work.started(jobs={**LOCAL, "at_once": 1, "silence": 12.0}, shards=1) as command:
        work.wait_for_requests(2)
        work.oracle.seconds = 0.0
        assert command.wait(180) == 0
    assert "has made no progress for" in work.log
    assert work.requests == ROWS * SAMPLES + 2, "two were under way when it fell silent"


def test_a_job_whose_shard_was_taken_over_stops_and_its_holder_is_waited_for(work: Work) -> None:
    """A job that was suspended for too long counts as dead, and another one may take its shard over."""
    work.oracle.seconds = 0.1
    claims = work.output / "shards" / "0000" / "claims"
    with work.started(jobs={**LOCAL, "at_once": 1}, shards=1) as command:
        work.wait_for_requests(4)
        # What another job writes that takes the shard over. Its process is this one, which lives.
        newer = claims / "0001"
        newer.write_text(json.dumps(_own_identity()))
        work.wait_until(lambda: "still works on it: waiting for it" in work.log)
        answered = work.requests
        assert answered < ROWS * SAMPLES, "there was something left to do"
        time.sleep(0.5)
        assert work.requests == answered, "the job has stopped, and no other one has begun"
        newer.write_text(json.dumps(_own_identity() | {"released": True}))
        work.oracle.seconds = 0.0
        assert command.wait(60) == 0
    log_of_job = (work.output / "shards" / "0000" / "logs" / "shard.log").read_text()
    assert "another job has taken over while this one was suspended" in log_of_job


def test_a_shard_that_a_process_holds_which_is_no_job_is_given_up(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = work.output / "shards" / "0000" / "claims"
    claims.mkdir(parents=True)
    (claims / "0000").write_text(json.dumps(_own_identity()))
    assert work.run(jobs={**LOCAL, "silence": 1.0}, shards=1) == 1
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_a_job_that_dies_again_and_again_is_given_up_with_its_last_message(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    work.oracle.down = True
    jobs = {**LOCAL, "restarts": 1}
    assert work.run(jobs=jobs, shards=1) == 1
    message = capsys.readouterr().err
    assert "1 of 1 shards could not be finished" in message and "HTTP 500" in message
    work.oracle.down = False
    assert work.run(jobs=jobs, shards=1) == 0


def test_answers_that_could_not_be_graded_are_graded_later_and_not_asked_again(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work.folder / "grader_of_a_test.py").write_text(
        "from pathlib import Path\n"
        "from treetune import Unavailable\n"
        "def score(response, gold):\n"
        "    if not Path(__file__).with_name('up').exists():\n"
        "        raise Unavailable('the judge is away')\n"
        "    return float(response.endswith('#' + gold))\n"
    )
    monkeypatch.chdir(work.folder)
    write_lines(work.input, sums(4))
    grader = {"type": "function", "path": "grader_of_a_test:score"}
    task = {"type": "rows", "routes": {"math": grader}}
    assert work.run(task=task, shards=1) == 1
    assert work.summary["unavailable"] == 4 * SAMPLES and work.summary["without_a_rate"] == 4
    assert [row.pass_rate for row in work.rates()] == [None] * 4
    (work.folder / "up").touch()
    requests_before = work.requests
    assert work.run(task=task, shards=1) == 0
    assert work.requests == requests_before
    assert work.summary["unavailable"] == 0 and work.summary["pass_rate"] is not None


def test_an_answer_that_two_jobs_graded_counts_once(work: Work) -> None:
    write_lines(work.input, sums(4))
    assert work.run(shards=1) == 0
    summary = work.summary
    assert sum(summary["outcomes"].values()) == 4 * SAMPLES
    grades = work.output / "shards" / "0000" / "grades.jsonl"
    grades.write_bytes(grades.read_bytes() * 2)
    assert work.run(shards=1) == 0
    assert work.summary == summary


@pytest.mark.parametrize(
    ("settings", "part_of_message"),
    [
        ({"task": {"type": "rows", "routes": {"code": {"type": "final_answer"}}}}, "no route matches"),
        ({"task": {"type": "multiplication"}}, "doesn't read rows"),
        ({"answers": {"samples": 4, "temperature": 0}}, "temperature 0 gives the same answer"),
        ({"answers": {"samples": 4, "top_k": 0}}, "top_k is 0"),
        ({"jobs": {"type": "slurm", "options": ["--array=1"]}}, "--array"),
        ({"policy": {"type": "endpoint", "addresses": []}}, "addresses"),
    ],
)
def test_a_mistake_in_the_settings_is_one_message_before_anything_is_asked(
    work: Work, settings: dict[str, Any], part_of_message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(**settings) == 2
    message = capsys.readouterr().err
    assert part_of_message in message and "Traceback" not in message
    assert not work.oracle.asked


def test_a_folder_of_other_rows_or_settings_is_refused(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(answers={"samples": 1}, shards=1) == 0
    assert work.run(answers={"samples": 2}, shards=1) == 2
    assert "was begun with other rows" in capsys.readouterr().err
    write_lines(work.input, sums(41))
    assert work.run(answers={"samples": 1}, shards=1) == 2
    write_lines(work.input, [])
    assert work.run(answers={"samples": 1}, shards=1) == 2
    assert "there are no rows in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shard", "part_of_message"), [("0", "holds no estimate that a job could work on"), ("2", "--shard is 2")]
)
def test_a_shard_that_does_not_exist_is_refused(
    shard: str, part_of_message: str, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*work.arguments(), "--shard", shard]) == 2
    assert part_of_message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("correct", "answers", "name"),
    [
        (0, 5, "impossible"), (1, 16, "very hard"), (3, 15, "hard"), (2, 5, "medium"), (3, 5, "easy"),
        (4, 5, "very easy"), (15, 16, "very easy"), (5, 5, "perfect"),
    ],
)  # fmt: skip
def test_bins_begin_where_guru_s_do(correct: int, answers: int, name: str) -> None:
    assert bin_of(correct, answers) == name


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put commands of SLURM on the path that run an array's tasks as processes of this machine.

    The fixture is the folder in which they record submissions and process ids.
    """
    records, programs, sources = tmp_path / "cluster", tmp_path / "bin", Path(__file__).parent / "slurm"
    records.mkdir()
    programs.mkdir()
    beginning = (sources / "beginning.txt").read_text().format(python=sys.executable, home=str(records))
    for name in ("sbatch", "squeue", "sacct", "scancel"):
        (programs / name).write_text(beginning + (sources / f"{name}.txt").read_text())
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    yield records
    for file in records.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


SLURM = {"type": "slurm", "poll": 0.1, "settle": 0.2, "options": ["--partition=gpu"], "at_once": 2}
# Our sacct says that the machine of a killed task has failed, and such an end counts as no restart.
SLURM |= {"restarts": 0}


@pytest.mark.slow
def test_on_slurm_a_lost_task_is_submitted_again_and_a_lost_command_watches_on(
    work: Work, undisturbed: Work, cluster: Path
) -> None:
    def submitted() -> list[str]:
        return (cluster / "submitted").read_text().splitlines()

    work.oracle.seconds = 0.05
    with work.started(jobs=SLURM, shards=2):
        work.wait_for_requests(10)
        (cluster / "busy").touch()
        os.killpg(int((cluster / "1_0.pid").read_text()), signal.SIGKILL)
        work.wait_until(lambda: len(submitted()) == 2)
    first, again = submitted()
    assert "--array=0-1%2" in first and "--array=0%2" in again
    assert "#SBATCH --partition=gpu\n" in (work.output / "jobs" / "shard.sh").read_text()
    assert work.run(jobs=SLURM, shards=2) == 0
    assert work.results() == undisturbed.results()
    assert submitted() == [first, again], "running tasks were found again"
    assert work.requests <= ROWS * SAMPLES + 2
    assert "job 1_0 ended as NODE_FAIL, exit code 0:9" in work.log
    assert "jobs of an earlier command are still running" in work.log
    assert "Unable to contact slurm controller" in work.log


class SilentCluster:
    """Says once that no job runs, and then nothing more."""

    def __init__(self) -> None:
        self.answers = [set[int]()]

    def alive(self) -> set[int]:
        if not self.answers:
            raise OSError("squeue: Unable to contact slurm controller")
        return self.answers.pop()

    def start(self, shards: Sequence[int]) -> None:
        pass

    def leave(self) -> str:
        return "no job is left"


def test_a_cluster_that_never_says_which_jobs_run_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "JOBS_UNKNOWN_S", 0.1, raising=False)
    pipeline: Any = SimpleNamespace(jobs=SimpleNamespace(poll=0.02), shards=1)
    cluster: Any = SilentCluster()
    with closing(Console(None, visible=False)) as console:
        watch = watching._Watch(pipeline, tmp_path, console, cluster, answer_count=1)
        with pytest.raises(RuntimeError, match=r"state of the jobs hasn't been known .*Unable to contact"):
            watch.wait_until_done()


def test_without_slurm_it_says_so(
    work: Work, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert work.run(jobs=SLURM) == 2
    assert "there is no squeue here" in capsys.readouterr().err


def command_line_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
