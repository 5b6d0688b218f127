"""Files with rewards: a name that is a library's takes nothing from that library, and golds come as rows had
them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treetune.domains.foreign import GOLD_IS_JSON
from treetune.domains.graders.function import FunctionGrader
from treetune.domains.routed_rows import RoutedRows
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

QUESTION = Problem(id="p", prompt="?", gold="42")

NEEDS_THE_LIBRARY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    import colorsys, math_verify, json
    from math_verify import parse, verify
    json.dumps(1), colorsys.rgb_to_hsv(0, 0, 0)
    return float(verify(parse('$' + ground_truth + '$'), parse(solution_str)))
"""


@pytest.mark.parametrize("name", ["math_verify", "json", "colorsys", "antigravity", "rewards"])
def test_a_file_named_like_a_library_leaves_the_library_to_all(name: str, tmp_path: Path) -> None:
    (tmp_path / "rewards").mkdir()
    file = tmp_path / "rewards" / f"{name}.py"
    file.write_text(NEEDS_THE_LIBRARY)
    with GraderPool(FunctionGrader(path=f"{file}:compute_score"), workers=1) as pool:
        grade = pool.submit("\\boxed{42}", QUESTION).result()
    assert (grade.reward, grade.message) == (1.0, None)


@pytest.mark.parametrize("name", ["math_verify", "json", "rewards"])
def test_a_file_in_the_working_directory_takes_nothing_either(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(NEEDS_THE_LIBRARY)
    program = f"""
import sys
from treetune.vocabulary import Problem
from treetune.domains.graders.function import FunctionGrader
sys.path.insert(0, "")
problem = Problem(id="p", prompt="?", gold="42")
grade = FunctionGrader(path="{name}.py:compute_score").grade("\\\\boxed{{42}}", problem)
print(grade.reward, grade.message)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "1.0 None\n"


def test_a_file_still_finds_the_files_beside_it_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_it.py").write_text("import main_of_rewards\nWORTH = 0.5\n")
    (tmp_path / "main_of_rewards.py").write_text(
        "import beside_it\ndef f(response, gold): return beside_it.WORTH"
    )
    assert FunctionGrader(path=f"{tmp_path}/main_of_rewards.py:f").grade("x", QUESTION).reward == 0.5


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder, worth in (("a", 0.25), ("b", 0.75)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_named.py").write_text(
            f"WORTH = {worth}\ndef f(r, g):\n    return WORTH\n"
        )
    graders = [FunctionGrader(path=f"{tmp_path}/{folder}/twice_named.py:f") for folder in "ab"]
    assert [grader.grade("x", QUESTION).reward for grader in graders] == [0.25, 0.75]


SEARCH_R1 = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split()[-1] in ground_truth["target"])
def kind(completions, ground_truth, **columns):
    return [float(type(truth).__name__ == "list") for truth in ground_truth]
def texts(response, gold):
    return float(isinstance(gold, str))
def state_kind(state, **rest):
    return float(isinstance(state["answer"], dict))
"""


@pytest.mark.parametrize(
    ("function", "truth", "reward"),
    [
        ("compute_score", {"target": ["Paris"]}, 1.0),
        ("compute_score", {"target": ["Rome"]}, 0.0),
        ("kind", ["a", "b"], 1.0),
        ("kind", '["a", "b"]', 0.0),
        ("texts", {"target": []}, 1.0),
        ("state_kind", {"target": []}, 1.0),
    ],
)
def test_functions_of_other_libraries_get_the_ground_truth_that_the_row_has(
    function: str, truth: Any, reward: float, tmp_path: Path
) -> None:
    (tmp_path / "search_r1.py").write_text(SEARCH_R1)
    row = {
        "data_source": "x__y",
        "prompt": [{"role": "user", "content": "q?"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    grader = FunctionGrader(path=f"{tmp_path}/search_r1.py:{function}")
    task = RoutedRows(train=(str(tmp_path / "rows.jsonl"),), routes={"": grader})
    problem = task.problems("train")[0]
    assert problem.data.get(GOLD_IS_JSON, False) is not isinstance(truth, str)
    assert task.grader.of(problem).grade("It is Paris", problem).reward == reward
