"""`reproduce_table` runs what is missing in the right order, resumes, and survives what fails."""

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

from tests.tables.small_table import FAKE, SHORT, calls, cells, experiment, show, table
from tests.view.report import fabricated
from treetune.processes.lifetime import process_fields
from treetune.tables.launch import plan_text, reproduce, run
from treetune.tables.runs import make_plan
from treetune.tables.settings import MethodRow, Reproduction, TableExperiment
from treetune.tables.write import make_table


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tells the stand-in what runs do, by experiment or `experiment:seed`, other than finish."""
    return lambda **runs: monkeypatch.setenv("APP_FAKE", json.dumps(runs))


def test_needed_runs_go_first_and_seed_by_seed_and_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:1", "grpo:1"]
    assert reproduce(table(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:2", "ppo:2", "grpo:2"]
    found = cells(tmp_path)
    assert [len(found[row]["seeds"]) for row in ("SFT", "PPO", "GRPO")] == [2, 2, 2]
    assert found["PPO"]["measured"]["mean"] == pytest.approx(0.53, abs=0.01)


def test_a_failed_run_is_said_its_dependants_are_skipped_and_the_rest_goes_on(
    tmp_path: Path, does: Callable[..., None]
) -> None:
    does(**{"sft:1": "fail"})
    assert reproduce(table(tmp_path), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "sft:2", "ppo:2", "grpo:2"]
    found = cells(tmp_path)
    why = found["SFT"]["absent"]["1"]
    assert "failed" in why and "the moon is in the wrong house" in why
    log = tmp_path / "logs/seed-1/quickstart/sft.log"
    assert str(log) in why and "wrong house" in log.read_text()
    assert found["PPO"]["absent"] == {"1": "skipped, because it needs sft (failed)"}
    assert [one["seed"] for one in found["PPO"]["seeds"]] == [2]
    assert "(1 of 2 seeds)" in (tmp_path / "small.md").read_text()

    does()
    assert reproduce(table(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:1", "grpo:1"]
    assert cells(tmp_path)["SFT"]["absent"] == {}


def test_stopping_at_the_first_failure_is_a_choice(tmp_path: Path, does: Callable[..., None]) -> None:
    does(**{"ppo:1": "fail"})
    assert reproduce(table(tmp_path, on_failure="stop"), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "ppo:1"]
    assert (tmp_path / "small.md").is_file()


def test_a_configuration_that_is_wrong_costs_only_its_own_row(tmp_path: Path) -> None:
    broken = table(tmp_path, seeds=(1,)).experiments | {
        "grpo": TableExperiment(configs=("configs/quickstart/grpoo.jsonnet",), needs=("sft",))
    }
    assert reproduce(table(tmp_path, seeds=(1,), experiments=broken), show, FAKE) == 1
    assert calls(tmp_path) == ["sft:1", "ppo:1"]
    assert "did you mean" in cells(tmp_path)["GRPO"]["absent"]["1"]


def test_a_set_that_training_left_unmeasured_is_evaluated(tmp_path: Path, does: Callable[..., None]) -> None:
    does(ppo="unmeasured")
    assert reproduce(table(tmp_path, seeds=(1,)), show, FAKE) == 0
    assert "ppo:1 run_evaluation" in calls(tmp_path)
    assert cells(tmp_path)["PPO"]["measured"] is not None


def test_a_run_that_ends_well_and_did_nothing_is_not_tried_for_ever(
    tmp_path: Path, does: Callable[..., None]
) -> None:
    does(ppo="do_nothing")
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
    other = table(tmp_path, seeds=(1,)).experiments | {"ppo": changed}
    assert reproduce(table(tmp_path, seeds=(1,), experiments=other), show, FAKE) == 1
    assert calls(tmp_path) == []
    ppo = cells(tmp_path)["PPO"]
    assert ppo["measured"] is None
    assert ppo["absent"]["1"].startswith("different: other trainer.learning_rate in ")
    assert cells(tmp_path)["GRPO"]["measured"] is not None


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, does: Callable[..., None]) -> None:
    does(sft="hang")
    short = table(
        tmp_path,
        seeds=(1,),
        deadline_hours=2 / 3600,
        experiments={"sft": experiment("sft")},
        rows=(MethodRow(name="SFT", experiment="sft"),),
    )
    assert reproduce(short, show, FAKE) == 1
    assert "longer than" in cells(tmp_path)["SFT"]["absent"]["1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_with_the_command_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    """Also where that is killed and can tell nobody."""
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
    process.send_signal(number)
    process.wait(30)
    wait_for(lambda: (process_fields(pid) or ["Z"])[0] in ("Z", "X"), None)
    plan = make_plan(table(tmp_path, seeds=(1,)))
    assert plan.statuses["ppo", 1].state == "interrupted"
    said = "ended by SIGTERM; the same command continues" in (tmp_path / "out.txt").read_text()
    assert said is (number == signal.SIGTERM)


def wait_for(what: Any, process: subprocess.Popen[bytes] | None, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it took too long"
        assert process is None or process.poll() is None, "the command has ended"
        time.sleep(0.1)


def test_two_commands_do_not_share_a_directory(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".reproduction.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another reproduce_table"):
            reproduce(table(tmp_path), show, FAKE)


def test_a_plan_with_nothing_there_names_every_run_and_its_cost_and_writes_nothing(tmp_path: Path) -> None:
    text = plan_text(make_plan(table(tmp_path / "new")))
    lines = [line.split()[:4] for line in text.splitlines()[1:7]]
    assert lines == [[name, seed, "missing", "0/2"] for seed in "12" for name in ("sft", "ppo", "grpo")]
    assert "60 s (30 s an iteration stated), after sft" in text
    assert "unknown (nothing measured or stated), after sft" in text
    assert "6 runs: 6 missing; still about 2 min of runs; 4 runs of unknown cost" in text
    assert not (tmp_path / "new").exists()


def test_a_plan_takes_measured_iterations_before_stated_ones(tmp_path: Path) -> None:
    both = table(tmp_path)
    fabricated.write_progress(both_config(both, "ppo", 1), 1)
    text = plan_text(make_plan(both))
    ppo = [line for line in text.splitlines() if line.startswith("ppo")]
    assert "interrupted" in ppo[0] and "10 s (10.0 s an iteration in seed 1)" in ppo[0]
    assert "missing" in ppo[1] and "20 s (10.0 s an iteration in seed 1)" in ppo[1]


def both_config(of: Reproduction, name: str, seed: int) -> Any:
    config = make_plan(of).run(name, seed).config
    assert config is not None
    return config


def test_a_table_is_written_from_what_is_there(tmp_path: Path) -> None:
    small = table(tmp_path, seeds=(1,))
    fabricated.write_run(both_config(small, "sft", 1), 0.4)
    assert make_table(small, "the command", tmp_path / "results") == 0
    assert {path.name for path in (tmp_path / "results").iterdir()} >= {
        f"small.{ending}" for ending in ("md", "json", "tex", "html")
    }
    text = (tmp_path / "results" / "small.md").read_text()
    assert "| SFT | 40.0 [" in text
    assert "| PPO | not run |" in text
    assert "`the command`" in text


def test_experiments_that_would_share_a_directory_are_told_apart(tmp_path: Path) -> None:
    twice = table(tmp_path, seeds=(1,)).experiments | {"grpo": experiment("ppo", needs=("sft",))}
    statuses = make_plan(table(tmp_path, seeds=(1,), experiments=twice)).statuses
    assert [statuses[name, 1].state for name in ("sft", "ppo", "grpo")] == ["missing", "wrong", "wrong"]
    assert "{experiment_name+: '_grpo'}" in statuses["grpo", 1].why


def test_a_wrong_configuration_ends_the_commands_that_only_list_runs_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = table(tmp_path, seeds=(1,))
    wrong = TableExperiment(configs=("configs/quickstart/ppo.jsonnet",), overrides=("{ triner: {} }",))
    broken = table(tmp_path, seeds=(1,), experiments=right.experiments | {"ppo": wrong})
    options = {"at_once": 1, "plan": False, "launch_lines": False, "slurm": None}
    for chosen in ({"plan": True}, {"launch_lines": True}, {"slurm": tmp_path / "jobs.sh"}):
        assert run(right, SimpleNamespace(**options | chosen), show) == 0
        capsys.readouterr()
        assert run(broken, SimpleNamespace(**options | chosen), show) == 2
        shown = capsys.readouterr()
        assert "triner: unknown key" in shown.out + shown.err
        assert ("wrong configuration of ppo, seed 1:" in shown.err) == ("plan" not in chosen)
