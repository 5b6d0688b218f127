"""What the README promises: its example is a method, its configurations are there, its commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

RUN_THE_CLI_WITH_THE_EXAMPLE = """
import sys
sys.path.insert(0, sys.argv[1])
import example_credit
from treetune.main import main
sys.exit(main(sys.argv[2:]))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def the_example() -> str:
    return next(block for block in blocks("python") if "@Credit.register" in block)


def test_the_worked_example_is_under_sixty_lines_and_gives_the_credit_that_it_describes(tmp_path):
    fragment = next(block for block in blocks("jsonnet") if "median" in block)
    assert len(the_example().splitlines()) + len(fragment.splitlines()) + 2 < 60
    (tmp_path / "example_credit.py").write_text(the_example())
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from example_credit import Median
from tests.episode_generators import tabular_mdp as mdp
from treetune.episode_generators.rollout.single_turn import SingleTurn
from statistics import median
context = mdp.context()
trajectories, _ = SingleTurn(samples=5, max_tokens=mdp.LONGEST).run(context, mdp.problems(4))
episodes, _ = Median(scale=2.0).assign(context, trajectories)
for start in range(0, 20, 5):
    rewards = [t.reward for t in trajectories[start:start + 5]]
    for episode, reward in zip(episodes[start:start + 5], rewards):
        assert set(episode.advantages) == {{2.0 * (reward - median(rewards))}}
assert len({{e.advantages[0] for e in episodes}}) > 1
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_worked_examples_configuration_checks(tmp_path):
    (tmp_path / "example_credit.py").write_text(the_example())
    fragment = next(block for block in blocks("jsonnet") if "median" in block)
    quickstart = ROOT / "configs" / "quickstart"
    (tmp_path / "median.jsonnet").write_text(fragment.replace("import '", f"import '{quickstart}/"))
    (tmp_path / "cli.py").write_text(RUN_THE_CLI_WITH_THE_EXAMPLE)

    def check(*overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(tmp_path / "cli.py"), str(tmp_path)]
            + ["--configs", str(tmp_path / "median.jsonnet"), *overrides, "check_config"],
            env={"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert check().returncode == 0, check().stderr
    wrong = check("--override", "{credit+: {scal: 3}}")
    assert wrong.returncode == 2
    assert "scale" in wrong.stdout + wrong.stderr


def test_every_configuration_and_file_that_the_readme_names_is_there():
    names = set(re.findall(r"(?:configs|scripts|docs|src)/[\w/.-]+\w", README))
    made_by_the_reader = {"configs/quickstart/median.jsonnet"}
    made_by_the_reader.add("src/treetune/episode_generators/credit/median.py")
    missing = [name for name in sorted(names - made_by_the_reader) if not (ROOT / name).exists()]
    assert not missing


def test_every_command_that_the_readme_names_is_one():
    from treetune import main

    help_text = subprocess.run(
        [sys.executable, main.__file__, "--help"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    table = re.findall(r"^\| `(\w+)(?: [A-Z.…]+)?` \|", README, re.MULTILINE)
    assert len(table) >= 11
    for command in table:
        assert command in help_text, command


@pytest.mark.parametrize("block", [b for b in blocks("jsonnet") if "big.jsonnet" in b])
def test_the_configuration_for_several_gpus_checks(block, tmp_path):
    (tmp_path / "big.jsonnet").write_text(block)
    done = subprocess.run(
        [sys.executable, "-m", "treetune.main", "--configs"]
        + [f"quickstart/vineppo.jsonnet,{tmp_path / 'big.jsonnet'}", "print_config"],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trainer"]["zero_stage"] == 2
