"""Promises of the start and the end of the command line:

* it starts as a script from any folder and imports nothing heavy before a run begins;
* it hides no package of a user that has the name of one of ours;
* it ends without a traceback when the reader of its output goes away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "src" / "treetune" / "main.py"
VINEPPO = ("--configs", "quickstart/vineppo.jsonnet")

HEAVY = {
    "torch", "numpy", "transformers", "vllm", "deepspeed", "datasets", "pyarrow", "aiohttp", "wandb",
    "tokenizers",
}  # fmt: skip


def run_python(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("APP_", "PYTHONPATH"))
    }
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "command", [["--help"], [*VINEPPO, "print_config"], [*VINEPPO, "check_config", "--config-only"]]
)
def test_nothing_heavy_is_imported_before_a_run_begins(command: list[str], tmp_path: Path) -> None:
    script = (
        f"import runpy, sys, json; sys.argv = {[str(MAIN), *command]!r}\n"
        f"sys.path.insert(0, {str(MAIN.parent)!r})\n"
        f"try: runpy.run_path({str(MAIN)!r}, run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        f"print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)"
    )
    done = run_python("-c", script, cwd=tmp_path)
    assert json.loads(done.stderr.splitlines()[-1]) == [0, []], done.stderr


def test_every_module_that_registers_a_part_is_imported_and_light(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import treetune.parts\nprint(*sys.modules)"
    )
    imported = set(run_python("-c", script, cwd=tmp_path).stdout.split())
    registering = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in (ROOT / "src").rglob("*.py")
        if any(line.startswith("@") and ".register(" in line for line in path.read_text().splitlines())
    }
    assert len(registering) > 20
    assert registering <= imported
    assert imported.isdisjoint(HEAVY)


def test_comparing_a_configuration_with_an_earlier_run_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import treetune.runtime.manifest\nprint(*sys.modules)"
    )
    imported = set(run_python("-c", script, cwd=tmp_path).stdout.split())
    assert "treetune.runtime.manifest" in imported
    assert imported.isdisjoint(HEAVY)


def test_a_script_does_not_hide_packages_that_have_the_names_of_ours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    script = (
        f"import runpy, sys; sys.argv = ['main.py', '--help']; sys.path.insert(0, {str(MAIN.parent)!r})\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        f"try: runpy.run_path({str(MAIN)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import models; print(models.__file__, file=sys.stderr)"
    )
    assert run_python("-c", script, cwd=ROOT).stderr.strip() == str(tmp_path / "models" / "__init__.py")


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(MAIN), *VINEPPO, "print_config"],
        cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141  # as a shell counts the end by SIGPIPE: 128 + 13
