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
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load

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
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own working directory, and forgets what it imported."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(Shape, "_parts", Shape.registered())
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str = PART, module: str = "own_shapes/triangle.py") -> None:
    (folder / module).parent.mkdir(parents=True, exist_ok=True)
    (folder / module).write_text(textwrap.dedent(text))


def built(configs: list[str], *overrides: str) -> Any:
    config = load(configs, overrides, {})
    return build(Picture, config.data, Explanation(config))


def told(*overrides: str) -> str:
    Path("experiment.jsonnet").write_text(TRIANGLE)
    with pytest.raises(ConfigError) as error:
        built(["experiment.jsonnet"], *overrides)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("place", ["here", "there"])
def test_a_part_is_found_in_the_working_directory_and_beside_the_configuration(
    place: str, tmp_path: Path
) -> None:
    write(tmp_path / place)
    (tmp_path / "there").mkdir(exist_ok=True)
    (tmp_path / "there" / "experiment.jsonnet").write_text(TRIANGLE)
    assert built([str(tmp_path / "there" / "experiment.jsonnet")]).shape.corners == 3


def test_the_working_directory_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "here", PART.replace("= 3", "= 4"))
    write(tmp_path / "there")
    (tmp_path / "there" / "experiment.jsonnet").write_text(TRIANGLE)
    assert built([str(tmp_path / "there" / "experiment.jsonnet")]).shape.corners == 4


def test_a_package_brings_all_modules_in_it_that_register_a_part(tmp_path: Path) -> None:
    write(tmp_path / "here")
    write(tmp_path / "here", "raise RuntimeError('nobody asked')", "own_shapes/other.py")
    Path("experiment.jsonnet").write_text(TRIANGLE)
    assert built(["experiment.jsonnet"], "{ imports: ['own_shapes'] }").shape.corners == 3


def test_keys_of_an_own_part_are_checked_like_ours(tmp_path: Path) -> None:
    write(tmp_path / "here")
    text = told("{ shape+: { cornres: 4 } }")
    assert "shape.cornres: unknown key of shape 'triangle'" in text
    assert "did you mean 'corners'" in text


def test_types_are_listed_with_the_module_that_they_come_from(tmp_path: Path) -> None:
    write(tmp_path / "here")
    assert "triangle (of own_shapes.triangle)" in told("{ shape: { type: 'pentagram' } }")


def test_a_type_that_nobody_knows_is_told_of_imports() -> None:
    assert "imports: ['my_package.my_part']" in told("{ imports: [] }")


def test_a_missing_module_is_told_with_the_places_that_were_looked_in() -> None:
    text = told()
    assert "imports.0: there is no module 'own_shapes'" in text
    assert "experiment.jsonnet:1" in text
    assert f"{Path.cwd()} (the working directory)" in text


def test_a_misspelled_module_of_a_package_is_told_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "here")
    assert "did you mean 'own_shapes.triangle'" in told("{ imports: ['own_shapes.triangel'] }")


def test_a_file_name_is_told_as_the_module_that_it_means() -> None:
    assert "write 'own_shapes.triangle'" in told("{ imports: ['own_shapes/triangle.py'] }")


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
    text: str, line: int, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "here", text)
    message = told()
    assert f"own_shapes/triangle.py:{line}" in message
    assert words in message


def test_a_module_of_an_earlier_version_is_told_with_where_it_is_now(tmp_path: Path) -> None:
    write(tmp_path / "here", "from treetune.episode_generators.base import GroupCredit\n" + PART)
    message = told()
    assert "what treetune.episode_generators had is in treetune.rollouts now: CHANGELOG.md" in message


def test_a_name_that_is_taken_is_told_with_both_places(tmp_path: Path) -> None:
    write(tmp_path / "here", PART.replace('"triangle"', '"circle"'))
    text = told()
    assert "'circle' is registered twice" in text
    assert "tests.config.example_parts.Circle" in text
    assert "own_shapes.triangle.Triangle" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("@dataclass(frozen=True, kw_only=True)\n", ""), "no frozen dataclass"),
        (("Triangle(Shape)", "Triangle"), "no sub-class of Shape"),
        (("corners: int", "corners: 'Corner'"), "a field whose type can't be read"),
        (("corners: int", "corners: memoryview"), "no type of a configuration's values"),
    ],
)
def test_a_class_that_is_no_part_is_told_what_it_lacks(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "here", PART.replace(*change))
    text = told()
    assert words in text
    assert "imports.0" in text


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


def test_a_part_without_a_method_that_its_base_class_leaves_to_it_is_told_which(tmp_path: Path) -> None:
    write(tmp_path / "here", f"{STUBS}\n    def korner(self, number): ...\n")
    text = told()
    assert "shape 'triangle' (own_shapes/triangle.py) lacks what every shape has" in text
    assert "write corner(self, number) in class Triangle" in text


@pytest.mark.parametrize("method", ["corner(self, number)", "outline(self)"])
def test_a_method_is_needed_only_by_what_calls_it(method: str, tmp_path: Path) -> None:
    write(tmp_path / "here", f"{STUBS}\n    def {method}: ...\n")
    Path("experiment.jsonnet").write_text(TRIANGLE)
    assert type(built(["experiment.jsonnet"]).shape).__name__ == "Triangle"


def test_a_folder_of_the_working_directory_passes_for_no_package(tmp_path: Path) -> None:
    write(tmp_path / "here")
    (tmp_path / "here" / "wandb_runs_of_mine").mkdir()
    Path("experiment.jsonnet").write_text(TRIANGLE)
    built(["experiment.jsonnet"])
    with pytest.raises(ModuleNotFoundError):
        __import__("wandb_runs_of_mine")


def test_own_modules_are_noted_with_a_hash_that_changes_with_them(tmp_path: Path) -> None:
    write(tmp_path / "here", f"import own_helper\n{PART}")
    write(tmp_path / "here", "", "own_helper.py")
    Path("experiment.jsonnet").write_text(TRIANGLE)
    built(["experiment.jsonnet"])
    before = folders.own_modules()
    assert before.keys() == {"own_shapes.triangle", "own_helper"}
    write(tmp_path / "here", "x = 1", "own_helper.py")
    after = folders.own_modules()
    assert [name for name in before if before[name] != after[name]] == ["own_helper"]


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
