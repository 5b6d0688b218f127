"""The page of an experiment's configuration.

Promises that these tests hold:

* Its command, pasted into a shell, shows what set a key, however the run was started.
* Without recorded configuration files it shows no command, and says where the values are.
"""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Viewer
from treetune.runtime.directory import ExperimentDirectory

MAIN = Path(__file__).resolve().parents[3] / "src" / "treetune" / "main.py"


def record_command(run: ExperimentDirectory, words: list[str], folder: Path, **further: Any) -> None:
    """Writes the command that started a run into its manifest, as `describe_command` returns it."""
    variables = {"APP_EXPERIMENT_NAME": "the run's name"}
    command = {"words": words, "folder": str(folder), "variables": variables}
    run.manifest_file.write_text(json.dumps({"command": command, "continued": [], **further}))


def command_of(page: str) -> str:
    match = re.search(r'<pre class="text">(.*?)</pre>', page, re.DOTALL)
    assert match is not None, page
    return html.unescape(match[1])


def run_in_shell(command: str, folder: Path) -> str:
    """Runs a line of a shell in another folder, where `treetune` is this checkout's program."""
    program = folder / "treetune"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(MAIN)])} "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    finished = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


OVERRIDE = """{ seed: 7,  note: "it's $HOME" }"""


@pytest.mark.parametrize(
    ("words", "forked", "places"),
    [
        (["--configs", "a.jsonnet", "--override", OVERRIDE, "run_iteration_loop"], {}, ["a.jsonnet:1"]),
        (["run", "a.jsonnet", "--num_gpus", "1", f"--override={OVERRIDE}"], {}, ["a.jsonnet:1"]),
        (
            ["fork", "runs/base", "--iteration", "1", "--override", OVERRIDE],
            {"forked": {"run": "runs/base", "after": 1, "config": "0123abcd"}},
            ["runs/base/config.json:1"],
        ),
        (
            ["fork", "runs/base", "--configs", "a.jsonnet,b.jsonnet", "--override", OVERRIDE],
            {"forked": {"run": "runs/base", "after": 1, "config": "0123abcd"}},
            ["a.jsonnet:1", "b.jsonnet:1"],
        ),
    ],
    ids=["main.py", "run", "fork", "fork with files"],
)
def test_the_command_of_the_page_shows_in_a_shell_what_set_a_key(
    viewer: Viewer, tmp_path: Path, words: list[str], forked: Mapping[str, Any], places: list[str]
) -> None:
    folder = tmp_path / "a folder of configurations"
    (folder / "runs" / "base").mkdir(parents=True)
    for file in ("a.jsonnet", "b.jsonnet", "runs/base/config.json"):
        (folder / file).write_text('{ "type": "policy_iteration", "seed": 1 }')
    record_command(viewer.record(), words, folder, **forked)

    command = command_of(viewer.page("/configuration", run="run", search="seed"))

    lines = run_in_shell(command, tmp_path).splitlines()
    assert lines[0] == "seed = 7"
    assert [line.split() for line in lines[-len(places) - 1 :]] == [
        *([place, "1"] for place in places),
        ["--override", "7"],
    ]


def test_the_command_sets_the_variables_of_the_run(viewer: Viewer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonnet").write_text("{ type: 'policy_iteration', experiment_name: 'x' }")
    record_command(viewer.record(), ["run", "a.jsonnet"], tmp_path)
    command = command_of(viewer.page("/configuration", run="run", search="experiment_name"))
    assert "environment variable APP_EXPERIMENT_NAME" in run_in_shell(command, tmp_path)


def test_a_run_without_recorded_files_has_no_command_and_names_the_file_with_all_values(
    viewer: Viewer, tmp_path: Path
) -> None:
    run = viewer.record()
    assert f"All values are in <code>{run.config_file}" in viewer.page("/configuration", run="run")
    record_command(run, ["-m", "my_script"], tmp_path)
    page = viewer.page("/configuration", run="run")
    assert f"All values are in <code>{run.config_file}" in page and "<pre" not in page
    answers = viewer.record("credited", type="credited_log")
    record_command(answers, ["credit", "log.jsonl", "--credit", "group.jsonnet"], tmp_path)
    assert "<pre" not in viewer.page("/configuration", run="credited")
