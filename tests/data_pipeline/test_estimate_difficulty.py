"""`estimate_difficulty`: however its jobs end, the result is the same and nothing is asked twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.oracle import Oracle, sums, write
from tests.data_pipeline.scripted import serving
from treetune.inference.guard import descendants
from treetune.main import main
from treetune_cluster.jobs import ranges
from treetune_data.difficulty.merging import bin_of, read_rates
from treetune_domains.domain_rows import read_domain_rows

SAMPLES = 5
WRITTEN = ("rates.parquet", "rows.parquet", "summary.json", "histogram.svg")


class Work:
    def __init__(self, folder: Path, oracle: Oracle) -> None:
        self.folder, self.oracle = folder, oracle
        self.input, self.output = folder / "rows.jsonl", folder / "out"
        write(self.input, sums(40))

    def arguments(self, **settings: Any) -> list[str]:
        address = {
            "base_url": self.oracle.url, "model": "oracle", "concurrency": 2, "retries": 0, "timeout": 600,
            "give_up_after": 2,
        }  # fmt: skip
        config = {
            "type": "estimate_difficulty",
            "task": {"type": "rows", "routes": {"math": {"type": "final_answer", "marker": "#"}}},
            "policy": {"type": "endpoint", "addresses": [address]},
            "answers": {"samples": SAMPLES, "max_tokens": 64},
            "shards": 2,
            "jobs": {"type": "local", "at_once": 2, "poll": 0.05},
            "column": "low_pass_rate",
            **settings,
        }
        file = self.folder / "config.jsonnet"
        file.write_text(json.dumps(config))
        command = ["--configs", str(file), "estimate_difficulty"]
        return [*command, "--input", str(self.input), "--output", str(self.output)]

    def run(self, **settings: Any) -> int:
        return main(self.arguments(**settings))

    @contextlib.contextmanager
    def started(self, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The command as a process of its own, which has ended when this has."""
        with (self.folder / "log").open("ab") as log:
            words = [sys.executable, "-m", "treetune.main", *self.arguments(**settings)]
            command = subprocess.Popen(words, stderr=log)
            try:
                yield command
            finally:
                command.kill()
                command.wait()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())

    def written(self) -> dict[str, bytes]:
        return {name: (self.output / name).read_bytes() for name in WRITTEN}

    def wait_for_answers(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while sum(self.oracle.asked.values()) < count:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.01)


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    with serving(Oracle()) as found:
        yield found


@pytest.fixture
def work(tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Work:
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return Work(tmp_path, oracle)


def test_every_row_has_its_rate_and_every_answer_was_asked_for_once(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run() == 0
    rates = list(read_rates(work.output / "rates.parquet"))
    assert [row.index for row in rates] == list(range(40))
    assert all(row.answers == SAMPLES and row.unavailable == 0 for row in rates)
    rows = [row for _, row in read_domain_rows(work.output / "rows.parquet")]
    assert [row["low_pass_rate"] for row in rows] == [row.correct / SAMPLES for row in rates]
    assert all(row.correct == 0 for row in rates if row.index % 10 == 0), (
        "the oracle is never right about 0+b"
    )
    assert set(work.oracle.asked.values()) == {1} and len(work.oracle.asked) == 40 * SAMPLES
    assert sum(work.summary["bins"].values()) == 40 and work.summary["asked_twice"] == 0
    assert (work.output / "histogram.png").is_file()
    assert "impossible" in capsys.readouterr().err


def test_equal_rows_have_answers_of_their_own_and_none_is_lost(work: Work) -> None:
    assert work.run() == 0
    rates = list(read_rates(work.output / "rates.parquet"))
    assert rates[8].key == rates[9].key and (rates[8].occurrence, rates[9].occurrence) == (0, 1)
    seeds = [seed for prompt, seed in work.oracle.asked if prompt.startswith("8+1=")]
    assert len(set(seeds)) == 2 * SAMPLES


def test_how_the_work_is_cut_changes_nothing(work: Work) -> None:
    assert work.run() == 0
    expected = work.written()
    work.output = work.folder / "other"
    assert work.run(shards=5, jobs={"type": "local", "at_once": 1, "poll": 0.05}) == 0
    assert work.written() == expected


def test_the_settings_of_an_answer_reach_the_address(work: Work) -> None:
    answers = {"samples": 2, "max_tokens": 7, "temperature": 0.3, "top_p": 0.5, "top_k": -1, "stop": ["!"]}
    assert work.run(answers=answers) == 0
    body = work.oracle.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["stop"]) == (7, 0.3, 0.5, ["!"])
    assert "top_k" not in body


@pytest.mark.slow
def test_killed_jobs_and_a_killed_command_change_nothing(work: Work) -> None:
    assert work.run() == 0
    expected, total = work.written(), 40 * SAMPLES
    work.output, work.oracle.seconds = work.folder / "killed", 0.03
    work.oracle.asked.clear()
    with work.started() as command:
        work.wait_for_answers(20)
        jobs = [pid for pid in descendants(command.pid) if b"--shard" in _command_line(pid)]
        assert jobs
        for pid in jobs:
            os.kill(pid, signal.SIGKILL)
        work.wait_for_answers(60)
        command.send_signal(signal.SIGKILL)
        command.wait()
    asked = sum(work.oracle.asked.values())
    assert asked < total, "there was something left to do"
    assert work.run() == 0
    assert work.written() == expected
    # Only what was under way when a process died was asked for again: two requests of two jobs, twice.
    assert sum(work.oracle.asked.values()) <= total + 8
    log = (work.output / "logs" / "run.log").read_text()
    assert "another job goes on" in log and "signal 9" in log


@pytest.mark.slow
def test_a_job_that_falls_silent_is_ended_and_another_goes_on(work: Work) -> None:
    work.oracle.seconds = 600.0
    # Longer than a job takes to start on a busy machine.
    jobs = {"type": "local", "at_once": 1, "poll": 0.05, "silence": 15.0}
    with work.started(jobs=jobs, shards=1) as command:
        work.wait_for_answers(2)
        work.oracle.seconds = 0.0
        assert command.wait(180) == 0
    assert "has shown nothing for" in (work.output / "logs" / "run.log").read_text()
    assert sum(work.oracle.asked.values()) == 40 * SAMPLES + 2, "two were under way when it fell silent"


def test_a_job_that_dies_again_and_again_is_left_with_what_it_said(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    work.oracle.down = True
    jobs = {"type": "local", "at_once": 2, "poll": 0.05, "restarts": 1}
    assert work.run(jobs=jobs) == 1
    message = capsys.readouterr().err
    assert "2 of 2 shards could not be finished" in message and "HTTP 500" in message
    work.oracle.down = False
    assert work.run(jobs=jobs) == 0


def test_answers_that_could_not_be_graded_are_graded_later_and_not_asked_again(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work.folder / "grader_of_a_test.py").write_text(
        "from pathlib import Path\n"
        "from treetune.tasks.graders.base import Unavailable\n"
        "def score(response, gold):\n"
        "    if not Path(__file__).with_name('up').exists():\n"
        "        raise Unavailable('the judge is away')\n"
        "    return float(response.endswith('#' + gold))\n"
    )
    monkeypatch.chdir(work.folder)
    write(work.input, sums(4))
    grader = {"type": "function", "path": "grader_of_a_test:score"}
    task = {"type": "rows", "routes": {"math": grader}}
    assert work.run(task=task) == 1
    assert work.summary["unavailable"] == 4 * SAMPLES and work.summary["without_a_rate"] == 4
    assert [row.pass_rate for row in read_rates(work.output / "rates.parquet")] == [None] * 4
    (work.folder / "up").touch()
    asked = sum(work.oracle.asked.values())
    assert work.run(task=task) == 0
    assert sum(work.oracle.asked.values()) == asked
    assert work.summary["unavailable"] == 0 and work.summary["pass_rate"] is not None


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"task": {"type": "rows", "routes": {"code": {"type": "final_answer"}}}}, "no route fits"),
        ({"task": {"type": "multiplication"}}, "doesn't read rows"),
        ({"answers": {"samples": 4, "temperature": 0}}, "temperature 0 gives the same answer"),
        ({"answers": {"samples": 4, "top_k": 0}}, "top_k is 0"),
        ({"jobs": {"type": "slurm", "options": ["--array=1"]}}, "--array"),
        ({"policy": {"type": "endpoint", "addresses": []}}, "addresses"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(
    work: Work, settings: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(**settings) == 2
    message = capsys.readouterr().err
    assert what in message and "Traceback" not in message
    assert not work.oracle.asked


def test_a_folder_of_other_rows_or_settings_is_refused(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(answers={"samples": 1}) == 0
    assert work.run(answers={"samples": 2}) == 2
    assert "was begun with other rows" in capsys.readouterr().err
    write(work.input, sums(41))
    assert work.run(answers={"samples": 1}) == 2


@pytest.mark.parametrize(
    ("shard", "what"), [("0", "holds no estimate that a job could work on"), ("2", "--shard is 2")]
)
def test_a_shard_that_is_not_there_is_refused(
    shard: str, what: str, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*work.arguments(), "--shard", shard]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("correct", "answers", "name"),
    [
        (0, 5, "impossible"), (1, 16, "very hard"), (3, 15, "hard"), (2, 5, "medium"), (3, 5, "easy"),
        (4, 5, "very easy"), (15, 16, "very easy"), (5, 5, "perfect"),
    ],
)  # fmt: skip
def test_bins_begin_where_guru_s_do(correct: int, answers: int, name: str) -> None:
    assert bin_of(correct, answers) == name


FAKES = {
    "sbatch": """
        array, script, words = None, None, sys.argv[1:]
        for word in words:
            if word.startswith('--array='):
                array = word.partition('=')[2].partition('%')[0]
        script = words[-1]
        header = dict(line[10:].split('=', 1) for line in open(script) if line.startswith('#SBATCH --'))
        print(*words, file=(home / 'submitted').open('a'), flush=True)
        number = len((home / 'submitted').read_text().splitlines())
        for part in array.split(','):
            first, _, last = part.partition('-')
            for task in range(int(first), int(last or first) + 1):
                log = open(home / f'{number}_{task}.log', 'w')
                job = subprocess.Popen(['bash', script], env={**os.environ, 'SLURM_ARRAY_TASK_ID': str(task)},
                                       stdout=log, stderr=log, start_new_session=True)
                (home / f'{number}_{task}.name').write_text(header['job-name'].strip())
                (home / f'{number}_{task}.pid').write_text(str(job.pid))
        print(f'{number};cluster')
    """,
    "squeue": """
        if (home / 'busy').exists():
            (home / 'busy').unlink()
            sys.exit('slurm_load_jobs error: Unable to contact slurm controller')
        name = next(word for word in sys.argv if word.startswith('--name=')).partition('=')[2]
        for file in sorted(home.glob('*.pid')):
            if living(file) and (home / f'{file.stem}.name').read_text() == name:
                print(f'{file.stem}|RUNNING')
    """,
    "sacct": """
        task = next(word for word in sys.argv if word.startswith('--jobs=')).partition('=')[2]
        print(f'{task}|NODE_FAIL|0:9')
    """,
    "scancel": """
        os.killpg(int((home / f'{sys.argv[1]}.pid').read_text()), 9)
    """,
}
HEAD = """#!{python}
import os, subprocess, sys
from pathlib import Path
home = Path({home!r})
def living(file):
    try:
        state = Path('/proc/' + file.read_text() + '/stat').read_text().rpartition(')')[2].split()[0]
    except OSError:
        return False
    return state not in 'ZX'
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands of SLURM that run an array's tasks as processes here; the folder in which they keep book."""
    home, programs = tmp_path / "cluster", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    for name, text in FAKES.items():
        program = programs / name
        head = HEAD.format(python=sys.executable, home=str(home))
        program.write_text(head + textwrap.dedent(text))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    yield home
    for file in home.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


SLURM = {"type": "slurm", "poll": 0.1, "settle": 0.2, "options": ["--partition=gpu"], "at_once": 2}


@pytest.mark.slow
def test_on_slurm_a_lost_task_is_submitted_again_and_a_lost_command_watches_on(
    work: Work, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run() == 0
    expected = work.written()
    work.output, work.oracle.seconds = work.folder / "slurm", 0.05
    work.oracle.asked.clear()
    with work.started(jobs=SLURM, shards=2) as command:
        work.wait_for_answers(10)
        (cluster / "busy").touch()
        os.killpg(int((cluster / "1_0.pid").read_text()), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len((cluster / "submitted").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, (work.folder / "log").read_text()
            time.sleep(0.05)
        command.send_signal(signal.SIGKILL)
        command.wait()
    submitted = (cluster / "submitted").read_text().splitlines()
    assert "--array=0-1%2" in submitted[0]
    assert "#SBATCH --partition=gpu\n" in (work.output / "jobs" / "shard.sh").read_text()
    assert "--array=0%2" in submitted[1]
    assert work.run(jobs=SLURM, shards=2) == 0
    assert work.written() == expected
    assert (cluster / "submitted").read_text().splitlines() == submitted, "running tasks were found again"
    assert sum(work.oracle.asked.values()) <= 40 * SAMPLES + 2
    log = (work.output / "logs" / "run.log").read_text()
    assert "job 1_0 ended as NODE_FAIL, exit code 0:9" in log and "jobs of an earlier command go on" in log
    assert "Unable to contact slurm controller" in log


def test_without_slurm_it_says_so(
    work: Work, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert work.run(jobs=SLURM) == 2
    assert "there is no squeue here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shards", "text"), [([0, 1, 2, 5], "0-2,5"), ([3], "3"), ([7, 1], "1,7"), ([1, 2, 4, 5], "1-2,4-5")]
)
def test_shards_as_an_array_of_slurm(shards: list[int], text: str) -> None:
    assert ranges(shards) == text


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
