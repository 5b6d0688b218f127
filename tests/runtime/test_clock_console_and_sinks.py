"""The clock of a run's phases, its console, and the mirrors of its metrics (W&B, TensorBoard, trackio).

Promises that these tests hold:

* The seconds of the phases and of everything else add up to the total.
* Without a terminal, the console prints plain lines, and says during long phases how far they are.
* A mirror that fails is given up with a warning, and the run goes on.
* A mirror whose service shows how a run ended is told whether it failed, was stopped, or is finished.
* After kills and resumes, and when it is switched on late, a mirror has every iteration exactly once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import treetune.parts  # noqa: F401  (registers the groups of numbers that a line of the console shows)
from tests.support.stubs import until
from treetune.config.jsonnet import load
from treetune.exceptions import Collapsed, Stopped
from treetune.rollouts.storage import write_trajectories
from treetune.runtime import console as console_module
from treetune.runtime import mirrors as mirrors_module
from treetune.runtime.console import PHASES, Clock, Console, format_duration
from treetune.runtime.directory import ExperimentDirectory, metrics_row
from treetune.runtime.mirrors import Mirrors
from treetune.runtime.record import CollapseWatch, Record, format_summary_line
from treetune.runtime.sinks import (
    MIRRORS_RECORD,
    WANDB_BLOCK,
    WANDB_CHUNK_HEAD,
    Sink,
    TensorboardSink,
    TrackioSink,
    WandbSink,
    _MirrorState,
    _steps_in,
    with_mirrors_of_environment,
)
from treetune.tables.check import METRICS_OF_GROUPS
from treetune.vocabulary import Grade, Problem, Segment, Trajectory

ROOT = Path(__file__).parents[2]


class FakeTime:
    """Stands in for the module `time`: its clock moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake_time = FakeTime()
    monkeypatch.setattr(console_module, "time", fake_time)
    return fake_time


def test_phases_and_other_add_up_to_the_total(fake_time: FakeTime) -> None:
    """A phase that fails is counted, and so are the seconds of an earlier process, which are not 'other'."""
    clock = Clock()
    clock.add_earlier("generation", 10.0)
    for phase, seconds in (("generation", 2.0), ("training", 3.0), ("generation", 1.0)):
        with clock.phase(phase):
            fake_time.now += seconds
        fake_time.now += 0.25
    with pytest.raises(ValueError), clock.phase("sync"):  # noqa: PT012 (the block is what is measured)
        fake_time.now += 4.0
        raise ValueError
    counted = {"generation": 13.0, "training": 3.0, "sync": 4.0, "other": 0.75, "total": 20.75}
    expected = {f"seconds/{name}": counted.get(name, 0.0) for name in (*PHASES, "other", "total")}
    assert clock.metrics() == expected


def test_without_a_terminal_there_are_plain_lines_and_failures_go_to_the_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(tmp_path / "logs" / "run.log", visible=True)
    with console.phase("sampling", "answers") as show:
        show(1, 2)
        console.say("iteration 1 is done")
    try:
        raise RuntimeError("the disk is full")
    except RuntimeError as error:
        console.record_failure(type(error), error, error.__traceback__)
    assert not [thread for thread in threading.enumerate() if thread.name == "console"]
    console.close()
    another_rank = Console(None, visible=False)
    another_rank.say("from rank 1")
    another_rank.close()
    assert capsys.readouterr() == ("", "iteration 1 is done\n")
    log = (tmp_path / "logs" / "run.log").read_text()
    assert all(part in log for part in ("INFO iteration 1 is done", "Traceback", "the disk is full"))


def test_without_a_terminal_a_long_phase_prints_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user sees only the output of a batch job, and a phase can take an hour."""
    monkeypatch.setattr(console_module, "PRINT_EVERY_S", 0.01)
    was_printed = threading.Event()

    def watch(record: logging.LogRecord) -> bool:
        if " of 512" in record.getMessage():
            was_printed.set()
        return True

    console = Console(None, visible=True)
    console.log.addFilter(watch)
    with console.phase("iteration 3: sampling", "answers", lambda: "90 tokens/s") as show:
        show(128, 512)
        assert was_printed.wait(60)
    console.close()
    console.log.filters.clear()
    assert "iteration 3: sampling  128 of 512 answers  90 tokens/s  for 0 s  " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "0 s"), (99, "99 s"), (150, "2 min"), (3600, "60 min"), (6100, "1.7 h"), (200_000, "55.6 h")],
)
def test_a_duration_is_written_in_seconds_minutes_or_hours_by_its_length(
    seconds: float, expected: str
) -> None:
    assert format_duration(seconds) == expected


def test_the_line_of_an_iteration_has_rewards_evaluations_and_times() -> None:
    row = {
        "iteration": 2,
        "episodes/reward": 0.5,
        "train/kl": 0.01,
        "evaluation/test/pass_at_1": 0.75,
        "seconds/total": 30.0,
        "seconds/training": 10.0,
    }
    line = format_summary_line(row, iterations=10)
    for part in ("iteration 3/10", "reward 0.500", "KL 0.0100", "test 0.750", "30.0 s", "training 10.0"):
        assert part in line
    assert "\n" not in line
    assert line.endswith("4 min left")
    assert "left" not in format_summary_line(row, iterations=3), "it was the last iteration"
    assert "threads" not in line
    row |= {"threads/with_parallel": 0.43, "threads/num_tokens_in_the_longest_thread": 61.4}
    assert "  with threads 43%  longest thread 61.4  " in format_summary_line(row, iterations=10)


class BrokenSink(Sink):
    """A sink whose method `failing_method` fails or, if it `hangs`, doesn't return."""

    closing_s = 0.2

    def __init__(self, failing_method: str, hangs: bool = False) -> None:
        self.failing_method, self.hangs = failing_method, hangs
        self.logged: list[int] = []

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        return self._fail_in("open")

    def log(self, handle: Any, iteration: int, metrics: Mapping[str, float]) -> None:
        self._fail_in("log")
        self.logged.append(iteration)

    def close(self, handle: Any) -> None:
        self._fail_in("close")

    def _fail_in(self, method: str) -> None:
        if method != self.failing_method:
            return
        if self.hangs:
            threading.Event().wait(60)
        raise RuntimeError("no connection")


@pytest.mark.parametrize(("hangs", "reason"), [(False, "no connection"), (True, "no answer within 0.2 s")])
@pytest.mark.parametrize("failing_method", ["open", "log", "close"])
def test_a_sink_that_fails_or_hangs_is_given_up_with_a_warning_and_the_others_go_on(
    failing_method: str, hangs: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors_module, "CALL_S", 0.2)
    console = Console(tmp_path / "run.log", visible=False)
    broken, working = BrokenSink(failing_method, hangs), BrokenSink("none")
    mirrors = Mirrors((broken, working), tmp_path, "name", {})
    mirrors.log(0, {"train/loss": 1.0})
    mirrors.log(1, {"train/loss": 1.0})
    mirrors.close()
    console.close()
    assert working.logged == [0, 1]
    assert broken.logged == ([0, 1] if failing_method == "close" else [])
    (warning,) = (tmp_path / "run.log").read_text().splitlines()
    assert "WARNING BrokenSink" in warning
    assert reason in warning


def test_wandb_gives_up_an_upload_that_does_not_end_and_says_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has the interface of wandb 0.31, whose `finish` waits for ever without these settings."""

    class Run:
        dir = f"{tmp_path}/wandb/run-1/files"

        def finish(self, exit_code: int | None = None) -> None:
            raise TimeoutError("Timed out finishing run.")

    def init(*, settings: SimpleNamespace, **_: object) -> Run:
        assert vars(settings) == {"finish_timeout": 7.0, "finish_timeout_raises": True}
        return Run()

    class Settings(SimpleNamespace):
        model_fields = ("finish_timeout", "finish_timeout_raises")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=Settings))
    console = Console(tmp_path / "run.log", visible=False)
    Mirrors((WandbSink(finish_timeout=7.0),), tmp_path, "name", {}).close()
    console.close()
    (warning,) = (tmp_path / "run.log").read_text().splitlines()
    assert f"within 7 s (finish_timeout of the sink). `wandb sync {tmp_path}/wandb/run-1`" in warning


def test_wandb_has_the_settings_that_end_an_upload() -> None:
    import wandb

    assert {"finish_timeout", "finish_timeout_raises"} <= set(wandb.Settings.model_fields)


def scalars_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def test_tensorboard_gets_every_number_also_under_the_further_names_of_a_fragment(
    tmp_path: Path,
) -> None:
    row = {
        "episodes/reward": 0.5,
        "episodes/reward_std": 0.75,
        "episodes/correct": 0.25,
        "threads/acceleration_ratio": 0.125,
        "threads/with_parallel": 1.0,
        "train/policy_loss": -2.0,
        "critic/loss": 3.0,
    }
    (of_fragment,) = load([str(ROOT / "configs/sinks/threadweaver_tensorboard.jsonnet")]).data["sinks"]
    both = TensorboardSink(further_names=of_fragment["further_names"])
    for name, sink in (("plain", TensorboardSink()), ("both", both)):
        mirrors = Mirrors((sink,), tmp_path / name, "name", {})
        mirrors.log(0, row)
        del row["critic/loss"]
        mirrors.log(1, row)
        mirrors.close()
        row["critic/loss"] = 3.0
    points = {}
    for key, value in row.items():
        iterations = range(1) if key == "critic/loss" else range(2)
        points[key] = [(iteration, value) for iteration in iterations]
    assert scalars_of_tensorboard(tmp_path / "plain") == points
    further_names = (
        "reward/mean",
        "reward/std",
        "metrics/correct_rate",
        "metrics/acceleration_ratio",
        "metrics/parallel_usage",
        "loss/policy_loss",
        "loss/value_loss",
    )
    points_of_further_names = dict(zip(further_names, points.values(), strict=True))
    assert scalars_of_tensorboard(tmp_path / "both") == points | points_of_further_names


@pytest.mark.parametrize(
    ("names", "of_wandb", "of_tensorboard"),
    [
        (
            {"test/score", "test/avg_response_length", "train/score", "actor/loss", "actor/entropy"},
            "wandb_verl_names",
            "tensorboard_verl_names",
        ),
        (
            {"reward/mean", "reward/std", "metrics/correct_rate", "metrics/acceleration_ratio"}
            | {"metrics/parallel_usage", "loss/policy_loss", "loss/value_loss"},
            "threadweaver_wandb",
            "threadweaver_tensorboard",
        ),
    ],
)
def test_wandb_and_tensorboard_have_the_same_names_of_other_dashboards(
    names: set[str], of_wandb: str, of_tensorboard: str
) -> None:
    fragments = []
    for fragment in (of_wandb, of_tensorboard):
        (settings,) = load([str(ROOT / f"configs/sinks/{fragment}.jsonnet")]).data["sinks"]
        fragments.append(settings)
    wandb, tensorboard = fragments
    assert (wandb["type"], tensorboard["type"]) == ("wandb", "tensorboard")
    assert wandb["further_names"] == tensorboard["further_names"]
    assert set(wandb["further_names"]) == names
    for metric in wandb["further_names"].values():
        group, _, name = metric.partition("/")
        is_of_iterations = name in METRICS_OF_GROUPS.get(group, ())
        assert is_of_iterations or group in ("evaluation", "threads"), metric


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    mirrors = Mirrors((WandbSink(project="test"),), tmp_path, "name", {"seed": 1})
    mirrors.log(0, {"train/loss": 0.5})
    mirrors.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))


def test_trackio_gets_name_configuration_and_each_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has the signatures of trackio 0.43, with which the sink was tried by hand."""
    calls: list[object] = []

    class Run:
        def log(self, metrics: dict, step: int | None = None) -> None:
            calls.append((step, metrics))

        def finish(self) -> None:
            calls.append("finished")

    def init(project: str, name: str | None = None, config: dict | None = None, **settings: object) -> Run:
        calls.append((project, name, config, settings))
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    mirrors = Mirrors((TrackioSink(),), tmp_path, "quickstart/vineppo", {"seed": 1})
    mirrors.log(0, {"train/loss": 0.5})
    mirrors.close()
    begun = ("treetune", "quickstart/vineppo", {"seed": 1}, {"resume": "allow", "embed": False})
    assert calls == [begun, (0, {"train/loss": 0.5}), "finished"]


def records_of_wandb(folder: Path) -> list[Any]:
    """Reads the records of W&B's offline files, which `wandb sync` sends to the server."""
    from wandb.proto.wandb_internal_pb2 import Record

    from treetune.runtime.sinks import _records_in

    records = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in _records_in(file.read_bytes()):
            records.append(Record.FromString(content))
    return records


def history_of_wandb(folder: Path) -> list[dict[str, Any]]:
    """Reads the logged points, with the keys of W&B's file."""
    points = []
    for record in records_of_wandb(folder):
        if record.WhichOneof("record_type") == "history":
            point = {}
            for item in record.history.item:
                point[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            points.append(point)
    return points


@dataclass(frozen=True)
class EndingSink(Sink):
    """A sink that notes how it is closed."""

    ends: list[object] = field(default_factory=list)

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        return None

    def close(self, handle: Any) -> None:
        self.ends.append("finished")

    def close_failed(self, handle: Any, exit_code: int, *, is_preempted: bool) -> None:
        self.ends.append((exit_code, "preempted" if is_preempted else "failed"))


@pytest.mark.parametrize(
    ("error", "ranks", "at_boundary", "end"),
    [
        (None, 1, False, "finished"),
        (RuntimeError("no memory"), 1, False, (1, "failed")),
        (Collapsed("entropy"), 2, False, (1, "failed")),
        (Stopped(128 + signal.SIGTERM), 1, False, (143, "preempted")),
        (Stopped(128 + signal.SIGUSR1), 2, True, (138, "preempted")),
        # Perhaps the launcher's signal, since another rank has failed.
        (Stopped(128 + signal.SIGTERM), 2, False, (143, "failed")),
        (Stopped(128 + signal.SIGINT), 2, True, (130, "failed")),
        (KeyboardInterrupt(), 1, False, (130, "failed")),
    ],
)
def test_a_sink_is_told_how_the_run_has_ended(
    error: BaseException | None,
    ranks: int,
    at_boundary: bool,
    end: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(CollapseWatch, "of", lambda session, start: None)
    sink = EndingSink()
    checkpoints = SimpleNamespace(grace=60.0)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(sinks=(sink,), experiment_name="name", checkpoints=checkpoints),
        ranks=SimpleNamespace(is_first=True, world_size=ranks),
        directory=ExperimentDirectory(tmp_path),
        plain_config={},
    )
    unused: Any = None
    expectation = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expectation, Record.open(session, unused, unused, start=0) as record:
        if at_boundary:
            record._stop.reach_boundary()
        if error is not None:
            raise error
    assert sink.ends == [end]


@pytest.mark.parametrize(
    ("exit_code", "is_preempted", "expected_code"),
    [
        (None, False, 0),
        (1, False, 1),
        (128 + signal.SIGTERM, True, 143),
        (128 + signal.SIGINT, False, 255),  # W&B's own code for a Ctrl-C
    ],
)
@pytest.mark.usefixtures("offline")
def test_wandb_shows_how_the_run_has_ended(
    exit_code: int | None, is_preempted: bool, expected_code: int, tmp_path: Path
) -> None:
    mirrors = Mirrors((WandbSink(),), tmp_path, "name", {})
    mirrors.log(0, {"train/loss": 0.5})
    if exit_code is None:
        mirrors.close()
    else:
        mirrors.close_failed(exit_code, is_preempted=is_preempted)

    def codes() -> list[int]:
        return [record.exit.exit_code for record in records_of_wandb(tmp_path) if record.HasField("exit")]

    # W&B's own process may still be writing its file.
    assert until(lambda: codes() == [expected_code])
    assert any(record.HasField("preempting") for record in records_of_wandb(tmp_path)) == is_preempted


@pytest.mark.usefixtures("offline")
def test_wandb_gets_further_names_and_a_table_of_answers_every_few_iterations(tmp_path: Path) -> None:
    directory = ExperimentDirectory(tmp_path)
    for iteration in range(2):
        problem = Problem(id=f"train/{iteration}", prompt="1+2=", gold="3")
        answers = [
            Trajectory(
                problem=problem,
                sample=i,
                prompt_ids=[1, 2],
                segments=(Segment([3, 4], logprobs=[-1.0, -2.0], policy_version=iteration),),
                finish_reason="stop",
                text=f"text {i}",
                grade=Grade(reward=1.0, outcome="ok", extracted="3"),
                step_ends=(2,),
            )
            for i in range(3)
        ]
        directory.iteration_folder(iteration).mkdir(parents=True)
        write_trajectories(directory.iteration_folder(iteration) / "trajectories.arrow", answers, iteration)
    sink = WandbSink(further_names={"actor/entropy": "train/entropy", "a": "b"}, answers_every=2, answers=2)
    mirrors = Mirrors((sink,), tmp_path, "name", {})
    mirrors.log(0, {"train/entropy": 0.5})
    mirrors.log(1, {"train/entropy": 0.25})
    mirrors.close()
    # W&B's own process may still be writing its file.
    assert until(lambda: len(history_of_wandb(tmp_path)) == 2)
    first, second = history_of_wandb(tmp_path)
    assert (first["train/entropy"], first["actor/entropy"]) == (0.5, 0.5)
    assert "a" not in first and not any("answers" in key for key in first)
    assert any(key.startswith("answers") for key in second)
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/answers_*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["iteration"], row["problem"], row["text"]) for row in rows] == [
        (1, "train/1", "text 0"),
        (1, "train/1", "text 1"),
    ]


def test_a_run_mirrors_itself_if_the_environment_names_a_run_or_a_key_of_wandb() -> None:
    tensorboard, wandb = TensorboardSink(), WandbSink(project="chosen")
    assert with_mirrors_of_environment((tensorboard,), {}) == (tensorboard,)
    for variable in ("WANDB_RUN_ID", "WANDB_API_KEY"):
        assert with_mirrors_of_environment((tensorboard,), {variable: "x"}) == (tensorboard, WandbSink())
        assert with_mirrors_of_environment((wandb,), {variable: "x"}) == (wandb,)
        assert with_mirrors_of_environment((), {variable: "x", "WANDB_MODE": "disabled"}) == ()


# Mirrors have every point once: after a kill, and when they are switched on late

TRAINING_PROGRAM = """
import os, signal, sys
from pathlib import Path
from treetune.runtime.directory import ExperimentDirectory, metrics_row
from treetune.runtime.mirrors import Mirrors
from treetune.runtime.sinks import TensorboardSink, WandbSink

folder, first, last, ends = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sinks = {"wandb": WandbSink(), "tensorboard": TensorboardSink()}
sinks_of_run = tuple(sinks[name] for name in sys.argv[5:])
mirrors = Mirrors(sinks_of_run, folder, "a/run", {"seed": 1}, finished_iterations=first)
for iteration in range(first, last):
    row = metrics_row(iteration, 1000.0 + iteration, {"train/loss": 1 / (iteration + 1)})
    ExperimentDirectory(folder).append_metrics(row)
    mirrors.log(iteration, row)
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
mirrors.close()
"""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Children would inherit the service of a process that has used W&B, and it would outlive their kill.
    for name in ("WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def train(folder: Path, first: int, last: int, end: str, *names: str) -> None:
    command = [sys.executable, "-c", TRAINING_PROGRAM, str(folder), str(first), str(last), end, *names]
    code = subprocess.run(command, check=False).returncode
    assert code == (-signal.SIGKILL if end == "killed" else 0)


def steps_of_wandb(folder: Path) -> list[int]:
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [step for file in files for step in _steps_in(file)]


@pytest.mark.usefixtures("offline")
def test_a_killed_run_goes_on_as_one_run_of_each_mirror_with_every_point_once(tmp_path: Path) -> None:
    train(tmp_path, 0, 3, "killed", "wandb", "tensorboard")
    train(tmp_path, 3, 5, "well", "wandb", "tensorboard")
    train(tmp_path, 5, 6, "killed", "wandb", "tensorboard")
    train(tmp_path, 6, 7, "well", "wandb", "tensorboard")
    ids = {folder.name.rpartition("-")[2] for folder in tmp_path.glob("wandb/offline-run-*")}
    assert len(ids) == 1
    assert steps_of_wandb(tmp_path) == list(range(7))
    assert scalars_of_tensorboard(tmp_path)["train/loss"] == [
        (i, pytest.approx(1 / (i + 1))) for i in range(7)
    ]


@pytest.mark.usefixtures("offline")
def test_a_mirror_that_is_switched_on_late_gets_the_points_from_before(tmp_path: Path) -> None:
    train(tmp_path, 0, 3, "killed")
    train(tmp_path, 3, 5, "well", "wandb", "tensorboard")
    assert steps_of_wandb(tmp_path) == list(range(5))
    assert [step for step, _ in scalars_of_tensorboard(tmp_path)["train/loss"]] == list(range(5))


@pytest.mark.parametrize("content", ["[1, 2]", "null", "{", '{"other": {"id": "b"}}'])
def test_a_damaged_record_of_mirrors_is_written_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / MIRRORS_RECORD).write_text(content)
    _MirrorState.read(tmp_path, "wandb", name="run").write(id="a")
    entries = json.loads((tmp_path / MIRRORS_RECORD).read_text())
    assert entries["wandb"] == {"id": "a", "name": "run"}
    assert ("other" in entries) == ("other" in content)


@pytest.mark.usefixtures("offline")
def test_an_iteration_that_is_repeated_is_no_second_point(tmp_path: Path) -> None:
    train(tmp_path, 0, 5, "killed", "wandb", "tensorboard")
    train(tmp_path, 2, 6, "well", "wandb", "tensorboard")
    assert steps_of_wandb(tmp_path) == list(range(6))
    assert [step for step, _ in scalars_of_tensorboard(tmp_path)["train/loss"]] == list(range(6))


def test_wandb_run_id_chooses_the_run_which_gets_the_points_that_its_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has the interface of wandb 0.31: `init` with an id, and `starting_step`."""
    servers: dict[str, list[int]] = {}

    class Run:
        def __init__(self, id: str, dir: str) -> None:
            self.steps = servers.setdefault(id, [])
            self.dir = f"{dir}/wandb/run-{id}/files"
            self.starting_step = len(self.steps)

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            assert not self.steps or step > self.steps[-1], "W&B drops a step that is not later than the last"
            self.steps.append(step)

        def finish(self) -> None: ...

    def init(*, id: str, dir: str, mode: str, resume: str, **_: object) -> Run:
        assert (mode, resume) == ("online", "allow")
        return Run(id, dir)

    class Settings:
        model_fields = ()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=Settings))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    directory = ExperimentDirectory(tmp_path)
    for first, last in ((0, 3), (3, 5)):
        mirrors = Mirrors((WandbSink(),), tmp_path, "name", {}, finished_iterations=first)
        for iteration in range(first, last):
            row = metrics_row(iteration, 0.0, {"train/loss": 0.5})
            directory.append_metrics(row)
            mirrors.log(iteration, row)
        [(_, steps)] = servers.items()
        del steps[-1:]  # a point that never reached the server
    assert steps == [0, 1, 2, 3]
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    Mirrors((WandbSink(),), tmp_path, "name", {}, finished_iterations=5)
    assert servers["chosen"] == [0, 1, 2, 3, 4]


def test_trackio_gets_the_points_that_a_kill_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trackio 0.43 writes in the background, so that it lacks the last points of a killed process."""
    stored: list[int] = []

    class Run:
        def __init__(self) -> None:
            self._next_step = max(stored, default=-1) + 1

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            stored.append(step)

        def finish(self) -> None: ...

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: Run()))
    directory = ExperimentDirectory(tmp_path)
    for iteration in range(3):
        directory.append_metrics(metrics_row(iteration, 0.0, {"train/loss": 0.5}))
    Mirrors((TrackioSink(),), tmp_path, "name", {}, finished_iterations=3)
    del stored[-1:]
    Mirrors((TrackioSink(),), tmp_path, "name", {}, finished_iterations=3).log(3, {"train/loss": 0.5})
    assert stored == [0, 1, 2, 3]


def test_a_run_of_the_same_name_in_another_directory_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trackio continues the run of a name, whichever directory began it."""
    steps_by_run: dict[str, list[int]] = {}

    class Run:
        def __init__(self, name: str) -> None:
            self._steps = steps_by_run.setdefault(name, [])
            self._next_step = max(self._steps, default=-1) + 1

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            self._steps.append(step)

        def finish(self) -> None: ...

    def init(*, name: str, **_: object) -> Run:
        return Run(name)

    api = SimpleNamespace(runs=lambda project: [SimpleNamespace(name=name) for name in steps_by_run])
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, Api=lambda: api))
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
    for iteration, directory in [(0, "first"), (0, "second"), (1, "first"), (1, "second"), (2, "second")]:
        Mirrors((TrackioSink(),), tmp_path / directory, "name", {}).log(iteration, {"train/loss": 0.5})
    assert steps_by_run.pop("name") == [0, 1]
    [(name_of_second, steps)] = steps_by_run.items()
    assert name_of_second.startswith("name-") and steps == [0, 1, 2]


def test_a_point_that_spans_several_blocks_of_wandbs_file_is_read(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import HistoryRecord, Record

    # A chunk has a whole record, or its first, a middle or its last part.
    kinds = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}

    def chunks(content: bytes, offset: int) -> bytes:
        """Cuts a record into chunks as W&B does, for a file that has `offset` bytes already."""
        cut, is_first = b"", True
        while True:
            left_in_block = WANDB_BLOCK - offset % WANDB_BLOCK
            if left_in_block < WANDB_CHUNK_HEAD.size:
                cut += b"\0" * left_in_block
                offset += left_in_block
                continue
            room = left_in_block - WANDB_CHUNK_HEAD.size
            part, content = content[:room], content[room:]
            is_last = not content
            cut += WANDB_CHUNK_HEAD.pack(0, len(part), kinds[is_first, is_last]) + part
            offset += WANDB_CHUNK_HEAD.size + len(part)
            if is_last:
                return cut
            is_first = False

    written_bytes = b":W&B\xbe\xe1\x00"
    for step in range(3):
        history = HistoryRecord()
        for name, value in (("_step", str(step)), ("text", f'"{"x" * 50_000}"')):
            item = history.item.add()
            item.key, item.value_json = name, value
        written_bytes += chunks(Record(history=history).SerializeToString(), len(written_bytes))
    file = tmp_path / "run-x.wandb"
    file.write_bytes(written_bytes)
    assert list(_steps_in(file)) == [0, 1, 2]
    file.write_bytes(written_bytes[:-10])
    assert list(_steps_in(file)) == [0, 1]
