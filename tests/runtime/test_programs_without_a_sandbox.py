"""Who lets a model's programs run without a sandbox is told so: when asked, at every start, and later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.in_process import small, train
from treetune.main import main
from treetune.runtime.base import without_sandbox

UNSAFE = {"type": "unsafe_local"}
WORDS = "task.grader.sandbox is unsafe_local: programs that the model writes run as you do"


def test_it_is_told_at_every_start_and_kept_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"task": {"grader": {"sandbox": UNSAFE}}}
    directory = train(small(tmp_path, iterations=1), **plain)
    assert WORDS in capsys.readouterr().err
    manifest = json.loads((directory.path / "manifest.json").read_text())
    assert manifest["without_sandbox"] == ["task.grader.sandbox"]
    train(small(tmp_path, iterations=2), **plain)
    assert WORDS in capsys.readouterr().err


def test_check_config_notes_it(capsys: pytest.CaptureFixture[str]) -> None:
    grader = "{ type: 'cruxeval', sandbox: { type: 'unsafe_local' } }"
    task = f"{{ task: {{ type: 'short_programs', grader: {grader} }} }}"
    given = ["--configs", "configs/quickstart/grpo.jsonnet", "--override", task]
    assert main([*given, "check_config"]) == 0
    assert "unsafe_local" in capsys.readouterr().err


def test_it_is_found_wherever_it_stands() -> None:
    assert without_sandbox({"domains": [{"x": 1}, {"grader": {"sandbox": UNSAFE}}]}) == [
        "domains.1.grader.sandbox"
    ]
    assert without_sandbox({"sandbox": {"type": "bubblewrap"}}) == []
