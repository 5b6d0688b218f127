"""Promises to a user who writes parts in modules of his own:

* `imports` finds them in the working directory, beside the configuration, or by an installed package's entry
  points;
* their keys are checked and suggested like those of our parts;
* a module that is missing, fails or registers something that is no part is told with file, line and remedy;
* a run notes each of them with a hash of its text.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.example_parts import Picture, Shape
from treetune.config import folders
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.exceptions import ConfigError

MAIN = Path(__file__).parents[2] / "src" / "treetune" / "main.py"

TRIANGLE_PART = '''
from dataclasses import dataclass

from tests.config.example_parts import Shape


@Shape.register("triangle")
@dataclass(frozen=True, kw_only=True)
class Triangle(Shape):
    """Three corners."""

    corners: int = 3
'''

EXPERIMENT = """{ type: 'drawing', seed: 1, directory: 'x', imports: ['own_shapes.triangle'],
  shape: { type: 'triangle' } }"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a working directory, and forget afterwards what it imported and registered."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("experiment.jsonnet").write_text(EXPERIMENT)
    monkeypatch.setattr(Shape, "_parts", Shape.parts_by_name())
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    modules_before, finders_before = set(sys.modules), list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders_before
    for name in set(sys.modules) - modules_before:
        del sys.modules[name]


def write_module(folder: Path, text: str = TRIANGLE_PART, module: str = "own_shapes/triangle.py") -> None:
    (folder / module).parent.mkdir(parents=True, exist_ok=True)
    (folder / module).write_text(textwrap.dedent(text))


def build_experiment(*overrides: str, file: str = "experiment.jsonnet") -> Any:
    config = load([file], overrides, {})
    return build(Picture, config.data, Explanation(config))


def message_of_failed_build(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        build_experiment(*overrides)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("also_here", [False, True])
def test_a_part_is_found_in_the_working_directory_and_then_beside_the_configuration(
    also_here: bool, working_folder: Path, tmp_path: Path
) -> None:
    configurations = tmp_path / "there"
    write_module(configurations)
    if also_here:
        write_module(working_folder, TRIANGLE_PART.replace("= 3", "= 4"))
    (configurations / "experiment.jsonnet").write_text(EXPERIMENT)
    experiment = build_experiment(file=str(configurations / "experiment.jsonnet"))
    assert experiment.shape.corners == (4 if also_here else 3)


def test_a_package_brings_all_modules_in_it_that_register_a_part(working_folder: Path) -> None:
    write_module(working_folder)
    write_module(working_folder, "raise RuntimeError('nobody asked')", "own_shapes/other.py")
    assert build_experiment("{ imports: ['own_shapes'] }").shape.corners == 3


@pytest.mark.parametrize(
    ("override", "part_of_message"),
    [
        ("{ shape+: { cornres: 4 } }", "shape.cornres: unknown key of shape 'triangle'"),
        ("{ shape+: { cornres: 4 } }", "did you mean 'corners'"),
        ("{ shape: { type: 'pentagram' } }", "triangle (of own_shapes.triangle)"),
        ("{ imports: [] }", "imports: ['my_package.my_part']"),
        ("{ imports: ['own_shapes.triangel'] }", "did you mean 'own_shapes.triangle'"),
        ("{ imports: ['own_shapes/triangle.py'] }", "write 'own_shapes.triangle'"),
    ],
)
def test_own_parts_are_checked_and_offered_like_ours(
    override: str, part_of_message: str, working_folder: Path
) -> None:
    write_module(working_folder)
    assert part_of_message in message_of_failed_build(override)


def test_a_missing_module_is_told_with_the_places_that_were_looked_in(working_folder: Path) -> None:
    message = message_of_failed_build()
    assert "imports.0: there is no module 'own_shapes'" in message
    assert "experiment.jsonnet:1" in message
    assert f"{working_folder} (the working directory)" in message


@pytest.mark.parametrize(
    ("module", "line", "part_of_message"),
    [
        ("import math\nmath.sin('x')\n", 2, "TypeError"),
        ("def f(:\n    pass\n", 1, "SyntaxError"),
        ("import not_installed_anywhere\n", 1, "not_installed_anywhere is not installed"),
        ("\n\nraise SystemExit(3)\n", 3, "SystemExit"),
    ],
)
def test_an_exception_in_a_module_is_told_with_file_and_line(
    module: str, line: int, part_of_message: str, working_folder: Path
) -> None:
    write_module(working_folder, module)
    message = message_of_failed_build()
    assert f"own_shapes/triangle.py:{line}" in message
    assert part_of_message in message


@pytest.mark.parametrize(
    ("change", "parts_of_message"),
    [
        (
            (
                "from dataclasses",
                "from treetune.episode_generators.base import GroupCredit\nfrom dataclasses",
            ),
            ["write `from treetune import GroupCredit`"],
        ),
        (
            ('"triangle"', '"circle"'),
            [
                "'circle' is registered twice",
                "tests.config.example_parts.Circle",
                "own_shapes.triangle.Triangle",
            ],
        ),
        (
            ("@dataclass(frozen=True, kw_only=True)\n", ""),
            ["must be decorated with @dataclass(frozen=True, kw_only=True)"],
        ),
        (("Triangle(Shape)", "Triangle"), ["isn't a sub-class of Shape"]),
        (("corners: int", "corners: 'Corner'"), ["a field whose type can't be read"]),
        (("corners: int", "corners: memoryview"), ["can't be the type of a configuration's values"]),
    ],
)
def test_a_module_whose_class_is_no_part_is_told_what_is_wrong_with_it(
    change: tuple[str, str], parts_of_message: list[str], working_folder: Path
) -> None:
    write_module(working_folder, TRIANGLE_PART.replace(*change))
    message = message_of_failed_build()
    assert [part for part in [*parts_of_message, "imports.0"] if part not in message] == [], message


PART_WITHOUT_CORNER = '''
from dataclasses import dataclass

from tests.config.example_parts import Shape


class Polygon(Shape):
    def outline(self):
        return [self.corner(0)]

    def corner(self, number):
        raise NotImplementedError


@Shape.register("triangle")
@dataclass(frozen=True, kw_only=True)
class Triangle(Polygon):
    """Three corners."""
'''


def test_a_part_without_a_method_that_its_base_class_leaves_to_it_is_told_which(working_folder: Path) -> None:
    write_module(working_folder, f"{PART_WITHOUT_CORNER}\n    def korner(self, number): ...\n")
    message = message_of_failed_build()
    assert "shape 'triangle' (own_shapes/triangle.py) is missing methods that every shape has" in message
    assert "write corner(self, number) in class Triangle" in message


@pytest.mark.parametrize("method", ["corner(self, number)", "outline(self)"])
def test_a_part_may_leave_out_a_method_that_nothing_calls(method: str, working_folder: Path) -> None:
    write_module(working_folder, f"{PART_WITHOUT_CORNER}\n    def {method}: ...\n")
    assert type(build_experiment().shape).__name__ == "Triangle"


def test_own_modules_are_noted_with_a_hash_that_changes_with_them_and_a_mere_folder_is_no_module(
    working_folder: Path,
) -> None:
    write_module(working_folder, f"import own_helper\n{TRIANGLE_PART}")
    write_module(working_folder, "", "own_helper.py")
    (working_folder / "wandb_runs_of_mine").mkdir()
    build_experiment()
    before = folders.own_modules()
    assert before.keys() == {"own_shapes.triangle", "own_helper"}
    write_module(working_folder, "x = 1", "own_helper.py")
    after = folders.own_modules()
    assert [name for name in before if before[name] != after[name]] == ["own_helper"]
    with pytest.raises(ModuleNotFoundError):
        __import__("wandb_runs_of_mine")


def test_an_installed_package_names_its_parts_in_its_entry_points(tmp_path: Path) -> None:
    """In a process of its own: installed packages are looked through once."""
    # The process knows no Shape, so the triangle is registered as a grader.
    part = TRIANGLE_PART.replace("tests.config.example_parts", "treetune.tasks.graders.base")
    part = part.replace("Shape", "Grader") + "\n    def grade(self, response, problem): ...\n"
    write_module(tmp_path / "site", part, "installed_triangle.py")
    info = tmp_path / "site" / "installed_triangle-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-triangle\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[treetune.parts]\ntriangle = installed_triangle\n")
    override = "{ task+: { grader: { type: 'triangle', corners: 'x' } } }"
    arguments = ["--configs", "quickstart/vineppo.jsonnet", "--override", override, "check_config"]
    program = (
        "import sys; from treetune.main import main\n"
        f"sys.path += [{str(tmp_path / 'site')!r}]; sys.exit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "task.grader.corners: should be a whole number" in done.stderr
