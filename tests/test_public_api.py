"""Promises of the public names, `treetune.__all__` and `treetune.credit.__all__`:

* each exists and has a docstring, editors and programs find the same ones, and importing them is light;
* they are enough to write a part of each kind, and examples and documents import nothing else.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_origin

import pytest

import treetune
import treetune.credit
from tests.support.documents import PAGES, ROOT, Document
from treetune.config.registrable import Registrable

SOURCE = ast.parse((ROOT / "src" / "treetune" / "__init__.py").read_text())


def imports_for_editors() -> dict[str, str]:
    """Return the names below `if TYPE_CHECKING`, each with its module."""
    (block,) = (
        node for node in SOURCE.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    modules = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            modules[alias.name] = str(statement.module)
    return modules


def test_editors_and_running_programs_find_the_same_names_in_the_same_modules() -> None:
    assert imports_for_editors() == treetune._MODULE_OF
    assert sorted(treetune.__all__) == sorted(["open", *treetune._MODULE_OF])


@pytest.mark.parametrize("name", treetune.__all__)
def test_a_public_name_exists_and_has_a_docstring(name: str) -> None:
    value = getattr(treetune, name)
    assert name in dir(treetune)
    if inspect.isclass(value) or inspect.isfunction(value):
        documentation = inspect.getdoc(value) or ""
        assert value.__doc__ and len(documentation) > 20, f"{name} has no docstring"
        assert not documentation.startswith(f"{name}("), f"{name} has only the docstring that Python makes"
        assert value.__name__ == name
    else:
        is_a_type_or_constant = get_origin(value) is not None or isinstance(value, tuple)
        assert is_a_type_or_constant, f"{name} is neither a class, a function, a type nor a constant"


@pytest.mark.parametrize("name", treetune.credit.__all__)
def test_a_public_name_of_the_library_of_credit_exists_and_has_a_docstring(name: str) -> None:
    value = getattr(treetune.credit, name)
    assert value.__name__ == name
    assert len(inspect.getdoc(value) or "") > 20 and name in treetune.credit._MODULE_OF


def test_an_unknown_name_is_an_error_as_in_any_module() -> None:
    assert not hasattr(treetune, "Trajectories")
    with pytest.raises(ImportError, match="Trajectories"):
        exec("from treetune import Trajectories")


def test_the_base_of_each_kind_of_part_that_experiments_name_is_public() -> None:
    kinds = ["Task", "Grader", "Rollout", "Credit", "Selection", "Shaping", "Objective", "Environment"]
    kinds += ["ValueEstimator", "Branching", "Tool", "Sandbox", "EngineSettings", "Analyzer", "Sink"]
    for kind in kinds:
        assert kind in treetune.__all__
        assert issubclass(getattr(treetune, kind), Registrable)


def test_importing_the_nouns_and_the_bases_of_parts_imports_nothing_heavy() -> None:
    heavy = ["torch", "vllm", "deepspeed", "transformers", "pyarrow"]
    script = (
        "import sys\n"
        "from treetune import *\n"
        f"print([module for module in {heavy!r} if module in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def imported_modules(source: str) -> set[str]:
    """Return the modules of this package that Python source imports from, but for the public names of
    treetune.credit."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "treetune.credit":
            wrong = {alias.name for alias in node.names} - set(treetune.credit.__all__)
            modules.update(f"treetune.credit.{name}" for name in wrong)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return {module for module in modules if module.partition(".")[0] == "treetune"}


EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if "one_file" not in path.parts  # whole programs, of which some read the package's own files
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_imports_the_public_names_alone(path: Path) -> None:
    assert imported_modules(path.read_text()) <= {"treetune"}


def python_in_documents() -> list[tuple[str, str]]:
    blocks = []
    for page in PAGES:
        for info, text in Document(page).fences:
            if info.split()[:1] == ["python"]:
                blocks.append((str(page.relative_to(ROOT)), text))
    return blocks


def test_the_python_of_documents_imports_the_public_names_alone() -> None:
    blocks = python_in_documents()
    assert any("import" in text for _, text in blocks)
    wrong = {page: imported_modules(text) - {"treetune"} for page, text in blocks}
    assert {page: modules for page, modules in wrong.items() if modules} == {}


def test_the_package_imports_from_modules_so_that_import_linter_sees_its_layers() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "treetune":
                assert {alias.name for alias in node.names}.isdisjoint(treetune.__all__), path


PARTS_OF_EACH_KIND = '''
"""A part of each kind, written with the public names alone."""

from dataclasses import dataclass

from treetune import *


@Selection.register("first_only")
@dataclass(frozen=True, kw_only=True)
class FirstOnly(Selection):
    """Trains on the first episode alone."""

    def select(self, context, episodes):
        return episodes[:1], {}


@Shaping.register("bonus_for_brevity")
@dataclass(frozen=True, kw_only=True)
class Brief(Shaping):
    """One more for each answer."""

    def bonuses(self, context, trajectories):
        return [1.0 for _ in trajectories]


@Credit.register("all_alike")
@dataclass(frozen=True, kw_only=True)
class Alike(GroupCredit):
    """Every answer is worth 0."""

    needs = (Need(Answers(2), "it compares answers"), Need(OneLine(), "it reads steps"))

    def advantages(self, rewards):
        return [0.0 for _ in rewards]


@Environment.register("echo")
@dataclass(frozen=True, kw_only=True)
class Echo(Game):
    """Says what it hears."""

    def problem(self, id, level):
        return Problem(id, "Say something.", "")

    def reset(self, problem, random):
        return None

    def step(self, state, action):
        return Turn(action)


@Branching.register("nowhere")
@dataclass(frozen=True, kw_only=True)
class Nowhere(Branching):
    """Branches nowhere."""

    unbiased = True

    def branches(self, answers, number):
        return Branches(())

    def most_answers(self, samples):
        return samples


@Tool.register("clock")
@dataclass(frozen=True, kw_only=True)
class WallClock(Tool):
    """Tells the time."""

    name: str = "clock"

    def call(self) -> str:
        """Tells the time."""
        return "noon"


@EngineSettings.register("dice")
@dataclass(frozen=True, kw_only=True)
class Dice(EngineSettings):
    """Samples by throwing dice."""

    canary_tolerance: float | None = None

    def start(self, launch):
        return Engine()

    def tolerance(self, device):
        return Tolerance(1.0, 1.0)


@Analyzer.register("nothing_to_see")
@dataclass(frozen=True, kw_only=True)
class NothingToSee(Analyzer):
    """Finds nothing."""

    name: str | None = None

    def points(self, config, directory):
        return []

    def analyse(self, resources, points, work):
        return Findings({})

    @staticmethod
    def draw(results):
        raise ValueError("there is nothing to draw")


@Sink.register("void")
@dataclass(frozen=True, kw_only=True)
class Void(Sink):
    """Keeps nothing."""

    def open(self, directory, name, config):
        return None

    def log(self, handle, iteration, metrics):
        pass

    def close(self, handle):
        pass
'''


def test_parts_of_each_kind_that_no_example_shows_are_written_with_the_public_names(tmp_path: Path) -> None:
    (tmp_path / "each_kind.py").write_text(PARTS_OF_EACH_KIND)
    (tmp_path / "experiment.jsonnet").write_text(
        "(import 'quickstart/vineppo.jsonnet')"
        " + { imports: ['each_kind'], experiment_name: 'each_kind', credit: { type: 'all_alike' },"
        " selection: { type: 'first_only' }, shaping: [{ type: 'bonus_for_brevity' }] }"
    )
    main = str(ROOT / "src" / "treetune" / "main.py")
    done = subprocess.run(
        [sys.executable, main, "--configs", "experiment.jsonnet", "check_config", "--config-only"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
