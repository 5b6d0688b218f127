"""A user's modules are found, checked like ours, and what is wrong with them is one clear message."""

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

PART = '''
from dataclasses import dataclass

from tests.config.example_parts import Shape


@Shape.register("triangle")
@dataclass(frozen=True, kw_only=True)
class Triangle(Shape):
    """Three corners."""

    corners: int = 3
'''

TRIANGLE = """{ type: 'drawing', seed: 1, directory: 'x', imports: ['own_shapes.triangle'],
  shape: { type: 'triangle' } }"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has its own working directory, and forgets what it imported."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("experiment.jsonnet").write_text(TRIANGLE)
    monkeypatch.setattr(Shape, "_parts", Shape.registered())
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    before, finders = set(sys.modules), list(sys.meta_path)
    yield here
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str = PART, module: str = "own_shapes/triangle.py") -> None:
    (folder / module).parent.mkdir(parents=True, exist_ok=True)
    (folder / module).write_text(textwrap.dedent(text))


def built(*overrides: str, file: str = "experiment.jsonnet") -> Any:
    config = load([file], overrides, {})
    return build(Picture, config.data, Explanation(config))


def told(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        built(*overrides)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("also_here", [False, True])
def test_a_part_is_found_in_the_working_directory_and_then_beside_the_configuration(
    also_here: bool, here: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    write(there)
    if also_here:
        write(here, PART.replace("= 3", "= 4"))
    (there / "experiment.jsonnet").write_text(TRIANGLE)
    assert built(file=str(there / "experiment.jsonnet")).shape.corners == (4 if also_here else 3)


def test_a_package_brings_all_modules_in_it_that_register_a_part(here: Path) -> None:
    write(here)
    write(here, "raise RuntimeError('nobody asked')", "own_shapes/other.py")
    assert built("{ imports: ['own_shapes'] }").shape.corners == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("{ shape+: { cornres: 4 } }", "shape.cornres: unknown key of shape 'triangle'"),
        ("{ shape+: { cornres: 4 } }", "did you mean 'corners'"),
        ("{ shape: { type: 'pentagram' } }", "triangle (of own_shapes.triangle)"),
        ("{ imports: [] }", "imports: ['my_package.my_part']"),
        ("{ imports: ['own_shapes.triangel'] }", "did you mean 'own_shapes.triangle'"),
        ("{ imports: ['own_shapes/triangle.py'] }", "write 'own_shapes.triangle'"),
    ],
)
def test_own_parts_are_checked_and_offered_like_ours(override: str, words: str, here: Path) -> None:
    write(here)
    assert words in told(override)


def test_a_missing_module_is_told_with_the_places_that_were_looked_in(here: Path) -> None:
    text = told()
    for words in (
        "imports.0: there is no module 'own_shapes'",
        "experiment.jsonnet:1",
        f"{here} (the working directory)",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import math\nmath.sin('x')\n", 2, "TypeError"),
        ("def f(:\n    pass\n", 1, "SyntaxError"),
        ("import not_installed_anywhere\n", 1, "not_installed_anywhere is not installed"),
        ("\n\nraise SystemExit(3)\n", 3, "SystemExit"),
    ],
)
def test_an_exception_in_a_module_is_told_with_file_and_line(
    text: str, line: int, words: str, here: Path
) -> None:
    write(here, text)
    message = told()
    assert f"own_shapes/triangle.py:{line}" in message
    assert words in message


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_a_module_whose_part_is_none_is_told_what_is_wrong_with_it(
    change: tuple[str, str], words: list[str], here: Path
) -> None:
    write(here, PART.replace(*change))
    text = told()
    assert [word for word in [*words, "imports.0"] if word not in text] == [], text


STUBS = '''
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


def test_a_part_without_a_method_that_its_base_class_leaves_to_it_is_told_which(here: Path) -> None:
    write(here, f"{STUBS}\n    def korner(self, number): ...\n")
    text = told()
    assert "shape 'triangle' (own_shapes/triangle.py) is missing methods that every shape has" in text
    assert "write corner(self, number) in class Triangle" in text


@pytest.mark.parametrize("method", ["corner(self, number)", "outline(self)"])
def test_a_method_is_needed_only_by_what_calls_it(method: str, here: Path) -> None:
    write(here, f"{STUBS}\n    def {method}: ...\n")
    assert type(built().shape).__name__ == "Triangle"


def test_own_modules_are_noted_with_a_hash_that_changes_with_them_and_no_folder_passes_for_one(
    here: Path,
) -> None:
    write(here, f"import own_helper\n{PART}")
    write(here, "", "own_helper.py")
    (here / "wandb_runs_of_mine").mkdir()
    built()
    before = folders.own_modules()
    assert before.keys() == {"own_shapes.triangle", "own_helper"}
    write(here, "x = 1", "own_helper.py")
    after = folders.own_modules()
    assert [name for name in before if before[name] != after[name]] == ["own_helper"]
    with pytest.raises(ModuleNotFoundError):
        __import__("wandb_runs_of_mine")


def test_an_installed_package_names_its_parts_in_its_entry_points(tmp_path: Path) -> None:
    """In a process of its own: installed packages are looked through once."""
    part = PART.replace("tests.config.example_parts", "treetune.tasks.graders.base").replace(
        "Shape", "Grader"
    )
    write(
        tmp_path / "site", part + "\n    def grade(self, response, problem): ...\n", "installed_triangle.py"
    )
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
