"""Promises of the template in examples/own_parts:

* its configurations are checked like the shipped ones, and its README lists every file;
* its parts do what their docstrings say (`own_parts_program.py` tests them in a process of its own);
* a run with its parts is replayed from another folder, also with another of its parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "own_parts"
MAIN = ROOT / "src" / "treetune" / "main.py"


def treetune(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_configuration_with_own_rows_finds_them_from_the_folder_that_it_names() -> None:
    """The others, which `tests/examples/test_own_parts_run.py` trains, are right from any folder."""
    done = treetune(
        "--configs", str(TEMPLATE / "own_rows.jsonnet"), "check_config", "--config-only", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_its_parts_are_checked_like_ours(tmp_path: Path) -> None:
    for name, override, part_of_message in (
        ("rank.jsonnet", "{credit+: {only_winner: true}}", "did you mean 'only_winners'"),
        ("rank.jsonnet", "{rollout+: {samples: 1}}", "answers to each problem"),
        ("weighted.jsonnet", "{trainer+: {objective+: {positive_weight: -1}}}", "at least 0"),
        ("close.jsonnet", "{task+: {grader+: {path: 'my_package.rewards:clos'}}}", "did you mean 'close'"),
    ):
        done = treetune(
            "--configs", str(TEMPLATE / name), "--override", override, "check_config", cwd=tmp_path
        )
        assert done.returncode == 2
        assert part_of_message in " ".join(done.stderr.split()), done.stderr


def test_its_parts_do_what_they_say_and_a_run_goes_through_with_all_of_them() -> None:
    program = Path(__file__).with_name("own_parts_program.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(program)],
        cwd=TEMPLATE, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{TEMPLATE}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_lists_every_file() -> None:
    readme = (TEMPLATE / "README.md").read_text()
    files = [path.relative_to(TEMPLATE) for path in TEMPLATE.rglob("*.*") if "__pycache__" not in path.parts]
    assert [str(name) for name in files if str(name) != "README.md" and f"`{name}`" not in readme] == []
    assert json.loads((TEMPLATE / "questions.jsonl").read_text().splitlines()[0])["level"] == 1


def test_a_run_with_its_parts_is_replayed_from_any_folder_with_another_of_them(tmp_path: Path) -> None:
    tiny = """{ directory: 'runs', experiment_name: 'own', iterations: 1, problems_per_iteration: 4,
      model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96,
               context_length: 128 },
      rollout+: { samples: 4, max_tokens: 12, unfinished_reward: 1.0 }, evaluation+: { sets: [] },
      trainer+: { schedule+: { may_outlast_training: true } } }"""
    files = f"{TEMPLATE / 'rank.jsonnet'},engines/in_process.jsonnet"
    done = treetune("--configs", files, "--override", tiny, "run_iteration_loop", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    other_objective = (
        "{ imports+: ['my_package.weighted'], trainer+: { objective: { type: 'weighted_ppo' } } }"
    )
    done = treetune(
        "--override", other_objective, "replay", "../runs/own", "--iteration", "1", cwd=tmp_path / "elsewhere"
    )
    assert done.returncode == 0, done.stderr
    assert "the resulting weights are bit-identical to the run's" in done.stdout
    assert "cosine of the gradients" in done.stdout
