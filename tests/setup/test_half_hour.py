"""The half hour on a GPU goes on whatever a step does, ends what is late, and writes it all down."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

PROGRAM = Path(__file__).parents[2] / "scripts/gpu/half_hour.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("half_hour", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def day(program: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "logs").mkdir()
    return program.HalfHour(tmp_path, True, time.monotonic() + 60)


def test_a_step_that_fails_stops_no_other(program: ModuleType, day: Any) -> None:
    def fails(day: Any, seconds: float, log: Path) -> Any:
        return [("said", day.run([sys.executable, "-c", "print('why'); exit(3)"], seconds, log))]

    day.step("first", 60, fails)
    day.step("second", 60, lambda day, seconds, log, word: [("word", word)], "a | b")
    day.until = time.monotonic()
    day.step("third", 60, fails)
    assert [outcome.split(":")[0] for _, outcome, _, _ in day.steps] == ["FAILED", "ok", "no time was left"]
    assert "exit code 3, see first.log: why" in day.steps[0][1]
    page = (day.folder / "gpu.md").read_text()
    assert "| second | ok | 0 |" in page and "| word | a \\| b |" in page
    assert page == program.page(day)


def test_what_is_late_is_ended_with_all_that_it_started(day: Any) -> None:
    inner = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '77']).pid, flush=True); time.sleep(77)"
    )
    log = day.folder / "logs/late.log"
    with pytest.raises(RuntimeError, match=r"not done after 2 s; see late\.log"):
        day.run([sys.executable, "-c", inner], 2.0, log)
    started = int(log.read_text().split()[-1])
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_keys_that_add_to_others_are_written_as_jsonnet_has_them(program: ModuleType, day: Any) -> None:
    (day.folder / "configurations").mkdir()
    path = program.overlay(day, "name", {"trainer+": {"schedule+": program.OUTLASTS}})
    assert '"trainer"+: {' in path.read_text() and '"schedule"+: {' in path.read_text()


def test_words_choose_the_steps(program: ModuleType, day: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (day.folder / "configurations").mkdir()
    taken: list[str] = []
    monkeypatch.setattr(program.HalfHour, "step", lambda day, name, *work: taken.append(name))
    day.only = ("auto", "SFT")
    with pytest.raises(SystemExit, match="no step has auto or SFT"):  # nothing was written down here
        program.go_through(day)
    assert taken == ["SFT", "large model, weights by auto"]
