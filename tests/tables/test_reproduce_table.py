"""The command `reproduce_table`.

These tests promise:

* Missing runs are run in order, each once, and finished ones are never run again.
* A failed, wrong, hanging or killed run costs only the rows that need it, and the same command continues.
* A plan names every run and its cost, and writes nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tables import fabricated
from tests.tables.small_table import FAKE, SHORT, calls, cells, experiment, show, table
from treetune.processes.lifetime import process_fields
from treetune.tables.launch import plan_text, reproduce, run
from treetune.tables.runs import make_plan
from treetune.tables.settings import MethodRow, Reproduction, TableExperiment
from treetune.tables.write import make_table


@pytest.fixture
def set_behaviours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets how runs of the stand-in behave, by experiment or `experiment:seed`."""
    return lambda **runs: monkeypatch.setenv("APP_FAKE", json.dumps(runs))


def test_needed_runs_go_first_seed_by_seed_and_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:1", "grpo:1"]
    assert reproduce(table(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:2", "ppo:2", "grpo:2"]
    cells_by_row = cells(tmp_path)
    assert [len(cells_by_row[row]["seeds"]) for row in ("SFT", "PPO", "GRPO")] == [2, 2, 2]
    assert cells_by_row["PPO"]["measured"]["mean"] == pytest.approx(0.53, abs=0.01)


def test_a_failed_run_is_reported_its_dependants_are_skipped_and_the_others_go_on(
    tmp_path: Path, set_behaviours: Callable[..., None]
) -> None:
    set_behaviours(**{"sft:1": "fail"})
    assert reproduce(table(tmp_path), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "sft:2", "ppo:2", "grpo:2"]
    cells_by_row = cells(tmp_path)
    reason = cells_by_row["SFT"]["absent"]["1"]
    assert "failed" in reason and "the moon is in the wrong house" in reason
    log = tmp_path / "logs/seed-1/quickstart/sft.log"
    assert str(log) in reason and "wrong house" in log.read_text()
    assert cells_by_row["PPO"]["absent"] == {"1": "skipped, because it needs sft (failed)"}
    assert [seed["seed"] for seed in cells_by_row["PPO"]["seeds"]] == [2]
    assert "(1 of 2 seeds)" in (tmp_path / "small.md").read_text()

    set_behaviours()
    assert reproduce(table(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:1", "grpo:1"]
    assert cells(tmp_path)["SFT"]["absent"] == {}


def test_the_table_can_stop_at_the_first_failure(tmp_path: Path, set_behaviours: Callable[..., None]) -> None:
    set_behaviours(**{"ppo:1": "fail"})
    assert reproduce(table(tmp_path, on_failure="stop"), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "ppo:1"]
    assert (tmp_path / "small.md").is_file()


def test_a_wrong_configuration_costs_only_its_own_row(tmp_path: Path) -> None:
    broken = table(tmp_path, seeds=(1,)).experiments | {
        "grpo": TableExperiment(configs=("configs/quickstart/grpoo.jsonnet",), needs=("sft",))
    }
    assert reproduce(table(tmp_path, seeds=(1,), experiments=broken), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "ppo:1"]
    assert "did you mean" in cells(tmp_path)["GRPO"]["absent"]["1"]


def test_a_wrong_configuration_is_reported_even_if_a_needed_run_has_failed(
    tmp_path: Path, set_behaviours: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_behaviours(sft="fail")
    broken = table(tmp_path, seeds=(1,)).experiments | {
        "grpo": TableExperiment(configs=("configs/quickstart/grpoo.jsonnet",), needs=("sft",))
    }
    assert reproduce(table(tmp_path, seeds=(1,), experiments=broken), show, FAKE) == 1
    announced = capsys.readouterr().out
    assert "ppo, seed 1: skipped, because it needs sft" in announced
    assert "grpo, seed 1: wrong, " in announced and "did you mean" in announced
    cells_by_row = cells(tmp_path)
    assert cells_by_row["PPO"]["absent"] == {"1": "skipped, because it needs sft (failed)"}
    assert "did you mean" in cells_by_row["GRPO"]["absent"]["1"]


def test_a_set_that_training_left_unmeasured_is_evaluated(
    tmp_path: Path, set_behaviours: Callable[..., None]
) -> None:
    set_behaviours(ppo="unmeasured")
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 0
    assert "ppo:1 run_evaluation" in calls(tmp_path)
    assert cells(tmp_path)["PPO"]["measured"] is not None


def test_a_run_that_ends_without_doing_anything_is_tried_once(
    tmp_path: Path, set_behaviours: Callable[..., None]
) -> None:
    set_behaviours(ppo="do_nothing")
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 1
    assert calls(tmp_path).count("ppo:1") == 1


def test_a_run_of_another_configuration_is_neither_mixed_in_nor_overwritten(tmp_path: Path) -> None:
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 0
    assert len(calls(tmp_path)) == 3
    changed = TableExperiment(
        configs=("configs/quickstart/ppo.jsonnet",),
        overrides=(SHORT, "{ trainer+: { learning_rate: 1e-5 } }"),
        needs=("sft",),
    )
    changed_experiments = table(tmp_path, seeds=(1,)).experiments | {"ppo": changed}
    assert reproduce(table(tmp_path, seeds=(1,), experiments=changed_experiments), show, FAKE) == 1
    assert calls(tmp_path) == []
    ppo = cells(tmp_path)["PPO"]
    assert ppo["measured"] is None
    assert ppo["absent"]["1"].startswith("different: other trainer.learning_rate in ")
    assert cells(tmp_path)["GRPO"]["measured"] is not None


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, set_behaviours: Callable[..., None]) -> None:
    set_behaviours(sft="hang")
    short = table(
        tmp_path,
        seeds=(1,),
        deadline_hours=2 / 3600,
        experiments={"sft": experiment("sft")},
        rows=(MethodRow(name="SFT", experiment="sft"),),
    )
    assert reproduce(short, show, FAKE) == 1
    assert "longer than" in cells(tmp_path)["SFT"]["absent"]["1"]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_with_the_command_that_started_it(tmp_path: Path, signal_number: signal.Signals) -> None:
    """It also ends if the command is killed, and can't send it a signal."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.tables.small_table import FAKE, evaluated, show, table\n"
        "from treetune.tables import runs\n"
        "from treetune.tables.launch import reproduce\n"
        "runs.load = evaluated\n"
        f"sys.exit(reproduce(table(Path({str(tmp_path)!r}), seeds=(1,)), show, FAKE))"
    )
    pid_file = tmp_path / "seed-1" / "ppo.pid"
    environment = os.environ | {"APP_FAKE": json.dumps({"ppo": "hang"})}
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=out, stderr=out)
    wait_for(lambda: pid_file.is_file() and pid_file.read_text() != "", process)
    pid = int(pid_file.read_text())
    process.send_signal(signal_number)
    process.wait(30)
    wait_for(lambda: (process_fields(pid) or ["Z"])[0] in ("Z", "X"), None)
    plan = make_plan(table(tmp_path, seeds=(1,)))
    assert plan.statuses["ppo", 1].state == "interrupted"
    was_announced = "ended by SIGTERM; the same command continues" in (tmp_path / "out.txt").read_text()
    assert was_announced is (signal_number == signal.SIGTERM)


def wait_for(condition: Any, process: subprocess.Popen[bytes] | None, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        assert process is None or process.poll() is None, "the command has ended"
        time.sleep(0.1)


def test_two_commands_do_not_share_a_directory(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".reproduction.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another reproduce_table"):
            reproduce(table(tmp_path), show, FAKE)


def test_a_plan_names_every_run_and_its_cost_and_writes_nothing(tmp_path: Path) -> None:
    text = plan_text(make_plan(table(tmp_path / "new")))
    lines = [line.split()[:4] for line in text.splitlines()[1:7]]
    assert lines == [[name, seed, "missing", "0/2"] for seed in "12" for name in ("sft", "ppo", "grpo")]
    assert "60 s (30 s an iteration stated), after sft" in text
    assert "unknown (nothing measured or stated), after sft" in text
    assert "6 runs: 6 missing; still about 2 min of runs; 4 runs of unknown cost" in text
    assert not (tmp_path / "new").exists()


def test_a_plan_prefers_measured_seconds_to_stated_ones(tmp_path: Path) -> None:
    small = table(tmp_path)
    fabricated.write_progress(config_of(small, "ppo", 1), 1)
    text = plan_text(make_plan(small))
    ppo = [line for line in text.splitlines() if line.startswith("ppo")]
    assert "interrupted" in ppo[0] and "10 s (10.0 s an iteration in seed 1)" in ppo[0]
    assert "missing" in ppo[1] and "20 s (10.0 s an iteration in seed 1)" in ppo[1]


def config_of(reproduction: Reproduction, name: str, seed: int) -> Any:
    config = make_plan(reproduction).run(name, seed).config
    assert config is not None
    return config


def test_a_table_is_written_from_the_runs_that_are_there(tmp_path: Path) -> None:
    small = table(tmp_path, seeds=(1,))
    fabricated.write_run(config_of(small, "sft", 1), 0.4)
    assert make_table(small, "the command", tmp_path / "results") == 0
    assert {path.name for path in (tmp_path / "results").iterdir()} >= {
        f"small.{ending}" for ending in ("md", "json", "tex", "html")
    }
    text = (tmp_path / "results" / "small.md").read_text()
    assert "| SFT | 40.0 [" in text
    assert "| PPO | not run |" in text
    assert "`the command`" in text


def test_experiments_that_would_share_a_directory_are_refused(tmp_path: Path) -> None:
    twice = table(tmp_path, seeds=(1,)).experiments | {"grpo": experiment("ppo", needs=("sft",))}
    statuses = make_plan(table(tmp_path, seeds=(1,), experiments=twice)).statuses
    assert [statuses[name, 1].state for name in ("sft", "ppo", "grpo")] == ["missing", "wrong", "wrong"]
    assert "{experiment_name+: '_grpo'}" in statuses["grpo", 1].why


def test_commands_that_list_runs_end_with_2_if_a_configuration_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = table(tmp_path, seeds=(1,))
    wrong = TableExperiment(configs=("configs/quickstart/ppo.jsonnet",), overrides=("{ triner: {} }",))
    broken = table(tmp_path, seeds=(1,), experiments=right.experiments | {"ppo": wrong})
    options = {"at_once": 1, "plan": False, "launch_lines": False, "slurm": None}
    for option in ({"plan": True}, {"launch_lines": True}, {"slurm": tmp_path / "jobs.sh"}):
        assert run(right, SimpleNamespace(**options | option), show) == 0
        capsys.readouterr()
        assert run(broken, SimpleNamespace(**options | option), show) == 2
        output = capsys.readouterr()
        assert "triner: unknown key" in output.out + output.err
        assert ("wrong configuration of ppo, seed 1:" in output.err) == ("plan" not in option)
