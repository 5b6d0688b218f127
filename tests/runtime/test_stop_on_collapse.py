"""A run that collapses says so once; told to stop it keeps the good weights, and stays stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.in_process import directory_of, raises_after, sampled_requests, small, train
from tests.support.faults import CONFIG
from treetune import main as command_line
from treetune.processes import lifetime
from treetune.runtime import commands, loop
from treetune.runtime.base import Checkpoints, PolicyIteration
from treetune.runtime.diagnostics import Diagnostics
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.record import Collapsed, Record, Watch
from treetune.store.files import write_json

STOP = Diagnostics(
    entropy_floor=1.0,
    unfinished_ceiling=None,
    limit_share=None,
    patience=2,
    on_collapse="stop",
)
ENTROPIES = (3.0, 3.0, 3.0, 0.5, 0.5, 3.0, 3.0)
"""Below the floor in iterations 4 and 5 (as people count), of which the second makes it count: the weights
after 3 iterations are the first that show it, and those after 2 the last that don't."""


@pytest.fixture(autouse=True)
def entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is real, and the entropy that it reports is from the table."""
    real = loop.train

    def train_with_known_entropy(sampler: Any, trainer: Any, iteration: int, *rest: Any) -> dict[str, float]:
        return real(sampler, trainer, iteration, *rest) | {"train/entropy": ENTROPIES[iteration]}

    monkeypatch.setattr(loop, "train", train_with_known_entropy)


def config_of(base: Path, diagnostics: Diagnostics = STOP, **changes: Any) -> PolicyIteration:
    settings = {"iterations": len(ENTROPIES), "checkpoints": Checkpoints(every=1)} | changes
    return small(base, diagnostics=diagnostics, **settings)


def stopped(config: PolicyIteration) -> str:
    """What the run says when it stops."""
    with pytest.raises(Collapsed) as told:
        train(config)
    return str(told.value)


def log_of(directory: ExperimentDirectory) -> list[str]:
    lines = (directory.logs / "run.log").read_text().splitlines()
    return [line.split(" INFO ")[1] for line in lines if " INFO " in line and "entropy_low" in line]


def column(directory: ExperimentDirectory, name: str) -> list[float]:
    return [row[name] for row in directory.read_metrics()]


def contents(directory: ExperimentDirectory) -> dict[str, bytes]:
    """All that the run computed; logs, seconds and what only resuming needs are left out."""
    places: Sequence[Path] = sorted(directory.path.glob("checkpoints/*/policy/*.safetensors"))
    return {str(path.relative_to(directory.path)): path.read_bytes() for path in places}


def test_a_stopped_run_keeps_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    message = stopped(config)
    directory = directory_of(config)
    assert directory.checkpoints() == [2, 4, 5], "the last good one, and the two newest"
    assert not (directory.checkpoint(2) / "trainer").exists(), "its weights alone"
    assert f"The last checkpoint from before is {directory.checkpoint(2) / 'policy'}" in message
    assert "stopped after iteration 5 of 7" in message
    assert "entropy_low since iteration 4: entropy in nats per token is below 1 (0.5)" in message
    assert column(directory, "diagnostics/entropy_low") == [0, 0, 0, 0, 1]
    assert column(directory, "diagnostics/stop") == [0, 0, 0, 0, 1]
    (line,) = log_of(directory)
    assert line.startswith("warning: entropy_low in iterations 4 to 5: ")


def test_the_same_command_stays_stopped_and_another_configuration_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = stopped(config_of(tmp_path))
    directory = directory_of(config_of(tmp_path))
    before = directory.metrics.read_bytes()
    again = config_of(tmp_path)
    assert stopped(again) == message
    assert not again.engines.policy.engines, "nothing was started for it"  # type: ignore[attr-defined]
    assert directory.metrics.read_bytes() == before

    commands.clean_up_checkpoints(again, {})
    assert directory.checkpoints() == [2, 4, 5], "tidying up keeps the good weights too"

    train(config_of(tmp_path, replace(STOP, on_collapse="warn")))
    assert directory.resumable() == len(ENTROPIES)
    assert column(directory, "diagnostics/entropy_low") == [0, 0, 0, 0, 1, 0, 0]
    assert [line.split(":")[0] for line in log_of(directory)] == [
        "warning",
        "entropy_low is over in iteration 6",
    ], "a line when it begins and a line when it ends"
    train(again)
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("struck", ["before the stop", "before the checkpoint", "before the line"])
def test_a_run_killed_on_its_way_to_the_stop_ends_as_if_nothing_had_happened(
    struck: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = config_of(tmp_path / "undisturbed")
    message = stopped(undisturbed)

    config = config_of(tmp_path / "killed")
    with monkeypatch.context() as patch:
        owner: Any
        owner, name, calls = {
            "before the stop": (Watch, "stop_if_collapsed", 4),
            "before the checkpoint": (Record, "_checkpoint", 4),
            "before the line": (Record, "_keep_line", 8),
        }[struck]
        patch.setattr(owner, name, raises_after(getattr(owner, name), calls, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(config)
    directory = directory_of(config)
    assert directory.resumable() == (5 if struck == "before the stop" else 4)
    sampled = sampled_requests(config)
    assert stopped(config) == message.replace("undisturbed", "killed")
    assert sampled_requests(config) == sampled, "episodes that are there are not sampled again"
    assert contents(directory) == contents(directory_of(undisturbed))
    assert column(directory, "diagnostics/stop") == [0, 0, 0, 0, 1]


def test_a_stop_between_checkpoints_writes_one_to_go_on_from(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoints=Checkpoints(every=2))
    assert "checkpoints/0002/policy" in stopped(config)
    directory = directory_of(config)
    assert directory.checkpoints() == [2, 4, 5]
    assert directory.resumable() == 5


def test_weights_that_collapsed_before_any_checkpoint_are_said_to_have(tmp_path: Path) -> None:
    early = replace(STOP, entropy_floor=4.0)
    assert "The start weights show it already" in stopped(config_of(tmp_path, early))
    assert directory_of(config_of(tmp_path)).checkpoints() == [1, 2]


def test_without_a_stop_nothing_more_is_kept_and_the_run_is_finished(tmp_path: Path) -> None:
    directory = train(config_of(tmp_path, replace(STOP, on_collapse="warn")))
    assert directory.checkpoints() == [len(ENTROPIES) - 1, len(ENTROPIES)]
    assert "diagnostics/stop" not in directory.read_metrics()[0]


def test_a_sign_that_counts_in_the_last_iteration_stops_nothing(tmp_path: Path) -> None:
    directory = train(config_of(tmp_path, iterations=5))
    assert column(directory, "diagnostics/entropy_low")[-1] == 1
    assert column(directory, "diagnostics/stop")[-1] == 0
    assert directory.resumable() == 5


def test_the_command_line_ends_with_one_message_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifetime, "exit_on_signals", lambda: None)  # the test's process keeps its own
    file = CONFIG
    settings = f"{{directory: '{tmp_path}', diagnostics: {{on_collapse: 'stop'}}}}"
    words = ["--configs", str(file), "--override", settings]
    assert command_line.main([*words, "print_config"]) == 0
    plain = json.loads(capsys.readouterr().out)
    directory = ExperimentDirectory(tmp_path / "small")
    write_json(directory.path / "config.json", plain)
    for i in range(2):
        row = {"iteration": i, "train/entropy": 1.0, "episodes/unfinished": 1.0}
        write_json(directory.iteration(i) / "metrics.json", row)
    write_json(directory.checkpoint(2) / "trainer" / "state", {})
    write_json(directory.checkpoint(2) / "state.json", {})
    patient = "{diagnostics+: {patience: 2}}"
    assert command_line.main([*words, "--override", patient, "run_iteration_loop"]) == 1
    told = capsys.readouterr().err
    assert "run_iteration_loop failed:" in told and "truncated since iteration 1" in told
    assert "set on_collapse to 'warn'" in told
