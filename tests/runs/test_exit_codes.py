"""A stopped run says so in one line, and `treetune run` ends with the run's exit code, whatever is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs.standing_program import start_standing
from tests.support.experiment_runs import ROOT, Experiment
from treetune.runtime import rank_launcher
from treetune.runtime.rank_launcher import (
    SignalsOfRun,
    count_ranks_here,
    signal_for_group,
    threads_per_process,
)


def wait_until_taken(pid: int, number: int, deadline_s: float = 60.0) -> None:
    """Waits until the process has taken the signal. If two come together, its threads may take the second one
    first."""
    bit = 1 << (number - 1)
    deadline = time.monotonic() + deadline_s
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        masks = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
        if not any(int(mask, 16) & bit for mask in masks):
            time.sleep(0.1)  # for the lines between taking a signal and its handler
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.005)


def test_a_run_that_is_stopped_while_it_samples_says_so_in_one_line(tmp_path: Path) -> None:
    """It answers four requests in an iteration, so that it stands still in the second. DeepSpeed's launcher
    answers Ctrl-C with a SIGTERM to ranks that are on their way out."""
    standing = start_standing(tmp_path, 6, "run_iteration_loop", tmp_path / "output")
    pid, expected_line = standing.process.pid, "stopped in iteration 2; the same command continues"
    os.kill(pid, signal.SIGINT)
    wait_until_taken(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert standing.process.wait(300) == 130
    lines = standing.lines()
    assert len(lines) == 3, lines
    assert lines[0] == f"starting {tmp_path / 'small'}: 60 training problems, 2 iterations"
    assert lines[1].startswith("iteration 1/2")
    assert lines[2] == expected_line
    log = (tmp_path / "small" / "logs" / "run.log").read_text()
    assert expected_line in log and "Traceback" not in log


@pytest.mark.slow
def test_the_exit_code_is_the_runs_whatever_is_killed(tmp_path: Path) -> None:
    """Signals are in test_signals.py, and weights of runs that go on in test_killed_runs.py."""
    config = ROOT / "tests/support/small_supervised.jsonnet"
    experiment = Experiment(tmp_path, "small", 2, config)
    first_metrics = experiment.directory.iteration_folder(0) / "metrics.json"
    last_metrics = experiment.directory.iteration_folder(5) / "metrics.json"
    ends = {
        "node launcher": {128 + signal.SIGKILL},
        "rank": {128 + signal.SIGKILL, 1},  # 1 where the other rank's end is seen first
    }
    for victim, exit_codes in ends.items():
        running = experiment.start()
        running.freeze(first_metrics.is_file, last_metrics.is_file, "the first iteration")
        if victim == "node launcher":
            titles = running.seen.items()
            victims = [process for process, title in titles if "deepspeed.launcher.launch" in title]
        else:
            victims = running.ranks()
        os.kill(victims[0].pid, signal.SIGKILL)
        running.signal_ranks(signal.SIGCONT)
        assert running.wait() in exit_codes, f"{victim}: {running.tail()}"
        running.assert_all_gone()
        experiment.forget_training()


def test_a_wrong_configuration_is_told_once_before_any_rank_is_started() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "src/treetune/main.py", "run", "--ranks", "2", "--configs"]
        + ["configs/quickstart/sft.jsonnet", "--override", "{ trainer+: { learning_rat: 1 } }"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("learning_rat")) == (2, 2)  # the key, and what was written
    assert "did you mean" in done.stderr


def test_ranks_are_the_gpus_that_were_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.delenv("NUM_GPUS", raising=False)
    assert (count_ranks_here(), count_ranks_here(1)) == (2, 1)
    monkeypatch.setenv("NUM_GPUS", "3")
    with pytest.raises(ValueError, match=r"3 ranks .* and CUDA_VISIBLE_DEVICES=4,6 are 2 GPUs"):
        count_ranks_here()
    monkeypatch.setenv("NUM_GPUS", "two")
    with pytest.raises(ValueError, match="NUM_GPUS is 'two'"):
        count_ranks_here()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NUM_GPUS")
    assert count_ranks_here() == 1, "none: the CPU"
    assert count_ranks_here(ranks=2) == 2, "two processes on the CPU, where they are asked for as such"


@pytest.mark.parametrize("wanted", [1, 4])
def test_gpus_that_are_asked_for_and_not_there_are_refused(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NUM_GPUS", raising=False)
    with pytest.raises(ValueError, match=rf"--num_gpus is {wanted}, and .*--ranks {wanted} for"):
        count_ranks_here(wanted)


@pytest.mark.parametrize("names", ["GPU-8f3c-1,GPU-8f3c-2", "MIG-7a11"])
def test_gpus_that_are_handed_out_by_name_reach_the_ranks(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of DeepSpeed's own node launcher, whose other command wants numbers."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os; from pathlib import Path\n"
        "told = [os.environ[name] for name in ('CUDA_VISIBLE_DEVICES', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        "Path(__file__).with_suffix('.' + told[1]).write_text(' '.join(told))\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    monkeypatch.delenv("NUM_GPUS", raising=False)
    monkeypatch.setattr(rank_launcher, "MAIN_PROGRAM", program)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ranks = count_ranks_here()
    try:
        assert rank_launcher.start_ranks([], ranks) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    told = [program.with_suffix(f".{rank}").read_text() for rank in range(ranks)]
    assert told == [f"{names} {rank} {ranks}" for rank in range(len(names.split(",")))]


@pytest.mark.parametrize(
    ("earlier", "number", "expected"),
    [
        ([], signal.SIGINT, None),
        ([signal.SIGINT], signal.SIGTERM, signal.SIGTERM),
        ([signal.SIGINT, signal.SIGINT], signal.SIGINT, signal.SIGKILL),
        ([], signal.SIGUSR1, None),
        ([signal.SIGUSR1], signal.SIGTERM, None),
        ([signal.SIGINT], signal.SIGUSR1, None),
        ([signal.SIGINT, signal.SIGUSR1], signal.SIGINT, signal.SIGTERM),
    ],
)
def test_a_request_for_a_checkpoint_never_ends_a_run_that_writes_its_last_one(
    earlier: list[int], number: int, expected: int | None
) -> None:
    """SIGUSR1 may come from SLURM after a Ctrl-C. Only a second signal that ends a run ends it at once."""
    assert signal_for_group(number, earlier) == expected


@pytest.mark.parametrize(
    ("received", "n_ranks", "code", "expected"),
    [
        ([], 2, 1, 1),
        ([signal.SIGUSR1], 0, 1, 1),  # before there are ranks: nothing was asked of them
        ([signal.SIGUSR1], 2, 1, 1),  # a failure before the checkpoint
        ([signal.SIGUSR1], 2, 138, 138),  # the ranks' own code after the checkpoint
        ([signal.SIGUSR1], 2, 256 - signal.SIGUSR1, 138),  # a rank whose handler wasn't there yet
        ([signal.SIGUSR1], 2, 0, 0),
        ([signal.SIGUSR1, signal.SIGINT], 0, 1, 130),
        ([signal.SIGINT], 2, 1, 130),
        ([signal.SIGINT, signal.SIGUSR1], 2, 1, 130),
    ],
)
def test_a_failure_after_a_request_for_a_checkpoint_keeps_its_exit_code(
    received: list[int], n_ranks: int, code: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_launcher, "signal_ranks", lambda launcher, number: n_ranks)
    monkeypatch.setattr(rank_launcher.os, "killpg", lambda group, number: None)
    signals = SignalsOfRun(launcher=4711)
    for number in received:
        signals.pass_on(number, None)
    assert signals.exit_code(code) == expected


def test_a_process_sees_one_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7a11,MIG-7a12")
    monkeypatch.delenv("NUM_GPUS", raising=False)
    with pytest.raises(ValueError, match=r"parts of GPUs \(MIG\).* would be 2 ranks: set NUM_GPUS to 1"):
        count_ranks_here()
    assert count_ranks_here(1) == 1


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert (threads_per_process(3), threads_per_process(20)) == ("2", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is 'many'"):
        threads_per_process(1)
