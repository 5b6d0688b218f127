"""Promises to users of former versions of this package:

* a module that imports a former name is told the present one, with its file and line;
* a module that exists today, or a library that isn't installed, is never taken for a former name;
* a part that defines a former name is refused with the new one, and no part that uses the new one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import treetune
from treetune.config import folders
from treetune.config.imports import function_at
from treetune.config.moved import MOVED_MODULES, RENAMED_CLASSES, present_name
from treetune.credit.base import Credit, GroupCredit
from treetune.credit.gae import Gae
from treetune.objectives.base import Objective
from treetune.objectives.further_inputs import TeacherObjective
from treetune.rollouts.base import Rollout
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.mixed import MixedTask

MAIN = Path(__file__).parents[2] / "src" / "treetune" / "main.py"


def method(self: Any, *arguments: Any) -> None:
    """Stands for any method of a part."""


@pytest.mark.parametrize("old", MOVED_MODULES)
def test_a_moved_module_exists_under_its_new_name_alone(old: str) -> None:
    new = present_name(old)
    assert new is not None and importlib.util.find_spec(new) is not None
    with contextlib.suppress(ModuleNotFoundError):  # the package above it is gone too
        assert importlib.util.find_spec(old) is None


def test_names_that_are_new_in_the_public_api_are_in_it() -> None:
    assert set(RENAMED_CLASSES.values()) <= set(treetune.__all__)


def test_modules_of_today_are_not_said_to_have_moved() -> None:
    for module in ("treetune.vocabulary", "treetune.tasks.base", "treetune.trainer.base", "treetune"):
        assert present_name(module) is None
    assert present_name("treetune_cluster.planning.plan") == "treetune.runtime.planning.plan"


@pytest.mark.parametrize(
    ("statement", "part_of_message"),
    [
        ("from treetune_domains.environments.base import Game", "write `from treetune import Game`"),
        (
            "from treetune.inference.base import Engine, Request",
            "write `from treetune import Engine, Request`",
        ),
        ("from treetune.domains.sandbox.base import Limits", "write `from treetune import ProgramLimits`"),
        ("from treetune import Drawing", "write `from treetune import DrawingContext`"),
        (
            "from treetune.engine.given import read_key",
            "treetune.engine.given is treetune.engine.serve_engine_servers now",
        ),
        ("from treetune.tasks.graders.base import Unavailable", "write `from treetune import Unavailable`"),
        (
            "from treetune.trainers.objectives.base import (\n    Objective,\n    ratio_of,\n)",
            "treetune.trainers.objectives.base is treetune.objectives.base now",
        ),
        (
            "from treetune_domains.environments.base import Game, LONGEST_OBSERVATION",
            "treetune_domains.environments.base is treetune.domains.environments.base now",
        ),
        (
            "import treetune_cluster.planning.plan",
            "treetune_cluster.planning.plan is treetune.runtime.planning",
        ),
        (
            "import math, treetune.inference.journal",
            "treetune.inference.journal is treetune.engine.journal now",
        ),
        (
            "from treetune.episode_generators.gone import something",
            "what treetune.episode_generators.gone had is in treetune.rollouts now",
        ),
        (
            "from treetune.rollouts.credit import group_advantages",
            "what treetune.rollouts.credit had is in treetune.credit now",
        ),
        ("from treetune.rollouts.credit import Gae", "write `from treetune import Gae`"),
        (
            "from treetune_lab.values.critic import critic_values",
            "treetune_lab.values.critic is treetune.credit.values.critic now",
        ),
    ],
)
def test_an_import_of_an_old_name_is_told_the_new_one(
    statement: str, part_of_message: str, tmp_path: Path
) -> None:
    (tmp_path / "old_names.py").write_text(f'"""A part of a user\'s."""\n\n{statement}\n')
    (tmp_path / "experiment.jsonnet").write_text(
        "(import 'quickstart/vineppo.jsonnet') + { imports: ['old_names'], experiment_name: 'old' }"
    )
    done = subprocess.run(
        [sys.executable, str(MAIN), "--configs", "experiment.jsonnet", "check_config"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert part_of_message in " ".join(done.stderr.split())
    assert "old_names.py:3" in done.stderr


def test_a_missing_library_is_not_taken_for_an_old_name(tmp_path: Path) -> None:
    (tmp_path / "needs_much.py").write_text("from treetune import Task\nimport not_installed_anywhere\n")
    folders.set_search_folders([tmp_path], ["needs_much"])
    with pytest.raises(ValueError, match="not_installed_anywhere is not installed") as error:
        function_at("needs_much:score")
    assert "write `from treetune" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "former", "instead"),
    [
        (Task, {"made": method}, "its name is `make_problems`"),
        (Task, {"sampling": method}, "its name is `adjust_sampling`"),
        (Task, {"of": method}, "derive the task from treetune.MixedTask"),
        (Task, {"draw": method}, "override `drawing_rule`, and return a treetune.DrawingRule"),
        (Task, {"answer_boundaries": method}, "it follows from `step_boundaries`"),
        (Objective, {"has_terms": True}, "derive the objective from treetune.DistributionObjective"),
        (Objective, {"terms": method}, "derive the objective from treetune.DistributionObjective"),
        (Objective, {"__annotations__": {"teacher": "Teacher"}}, "treetune.TeacherObjective"),
        (Credit, {"asks_reference": property(method)}, "return treetune.TrainerScores"),
        (Credit, {"asks_reference": True}, "return treetune.TrainerScores"),
        (Task, {"remembers_pass_rates": True}, "with `reads_pass_rates = True`"),
        (GroupCredit, {"reference": cached_property(method)}, "return treetune.TrainerScores"),
        (Credit, {"from_values": method}, "derive the credit from treetune.Gae"),
        (Credit, {"scores_texts": property(method)}, "it follows from `needs`"),
        (Grader, {"behind_thought": method}, "its name is `after_thought`"),
        (Rollout, {"prepare": method}, "its name is `check_at_start`"),
        (Rollout, {"sampler": property(method)}, "its name is `rollout_for_fixed_problems`"),
    ],
)
def test_a_part_that_defines_a_former_name_is_refused_with_the_new_one(
    family: type, former: dict[str, Any], instead: str
) -> None:
    name = [*former.get("__annotations__", former)][-1]
    with pytest.raises(TypeError, match=f"Mine.{name} is of an earlier version, .*{re.escape(instead)}"):
        type("Mine", (family,), former)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (MixedTask, {"of": method, "parts": method}),  # the class that has the name now
        (Gae, {"from_values": method}),
        (TeacherObjective, {"__annotations__": {"teacher": "Teacher"}}),
        (Credit, {"reference": "text", "__annotations__": {"reference": "str"}}),  # a setting, not a method
    ],
)
def test_a_former_name_may_be_an_override_or_a_setting(family: type, names: dict[str, Any]) -> None:
    type("Mine", (family,), names)
