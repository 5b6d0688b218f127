"""Every experiment and table under configs/ is right, and a broken one is told so in one screen."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.shipped import CONFIGS, ROOT, loaded, whole_configurations
from treetune import main as command_line
from treetune.config import lexer
from treetune.config.explain import Explanation
from treetune.config.layers import configurations, relative

VINEPPO = "configs/quickstart/vineppo.jsonnet"
SCREEN_LINES, SCREEN_COLUMNS = 24, 120
DEFINITIONS = {"methods", "presets", "credit", "objectives", "selections", "rollouts"}

LINES = Path(__file__).with_name("told_in_one_screen.tsv").read_text().splitlines()
BROKEN = {name: rest for name, *rest in (line.split("\t") for line in LINES if not line.startswith("#"))}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@cache
def external_variables() -> set[str]:
    """What configurations read from the environment, but for what every run has."""
    found = {"APP_SEED"}
    for path in CONFIGS.rglob("*sonnet"):
        tokens = list(lexer.tokens(path.read_text()))
        calls = zip(tokens, tokens[1:], tokens[2:], strict=False)
        found |= {variable.value for call, _, variable in calls if call.text == "extVar"}
    return found - {"APP_DIRECTORY", "APP_EXPERIMENT_NAME"}


@pytest.mark.parametrize("name", whole_configurations())
def test_a_shipped_configuration_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in external_variables():
        monkeypatch.setenv(variable, "1")
    assert command_line.main(["--configs", name, "check_config", "--config-only"]) == 0, (
        capsys.readouterr().err
    )


def test_the_quickstart_is_among_them() -> None:
    assert {f"configs/quickstart/{name}.jsonnet" for name in ("sft", "vineppo")} <= {*whole_configurations()}


def test_no_name_is_two_methods() -> None:
    methods, presets = (
        {path.stem for path in configurations(CONFIGS / room)} for room in ("methods", "presets")
    )
    assert methods & presets == set()


@pytest.mark.parametrize("method", ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_positive"])
def test_the_quickstart_and_the_paper_call_the_same_definition(method: str) -> None:
    small, large = (
        Explanation(loaded(name)) for name in (f"quickstart/{method}", f"polIter_rho1bSft2_{method}_MATH")
    )
    for key in (("credit", "type"), ("selection", "type"), ("restart",), ("trainer", "objective", "type")):
        assert (small.value(key), small.source(key)) == (large.value(key), large.source(key))


@pytest.mark.parametrize("name", [path.stem for path in configurations(CONFIGS / "quickstart")])
def test_what_a_quickstart_experiment_is_comes_from_a_definition(name: str) -> None:
    explanation = Explanation(loaded(f"quickstart/{name}"))
    for key in (("credit", "type"), ("trainer", "objective", "type")):
        source = explanation.source(key)
        assert (
            source is not None and source.removeprefix(relative(CONFIGS) + "/").split("/")[0] in DEFINITIONS
        )


def assert_told(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One screen on standard error that holds the words; exit code 2; no traceback."""
    code = command_line.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    one_line = " ".join(err.split())
    assert [word for word in words if word not in one_line] == [], err
    assert "mistakes" not in lines[0], f"one mistake, told as several:\n{err}"


@pytest.mark.parametrize(("override", "words"), BROKEN.values(), ids=BROKEN)
def test_one_mistake_in_an_experiment_is_told_in_one_screen(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--configs", VINEPPO, "--override", override, "check_config"]
    assert_told(arguments, words.split(" ... "), capsys)


@pytest.mark.parametrize("mistake", ["unknown key", "unknown type", "error in Jsonnet", "no type"])
def test_a_mistake_in_a_file_is_told_with_file_and_line(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override, words = BROKEN[mistake]
    file = tmp_path / "mine.jsonnet"
    file.write_text("// mine\n" + override)
    in_file = [word for word in words.split(" ... ") if not word.startswith("--override")]
    arguments = ["--configs", f"{VINEPPO},{file}", "run_iteration_loop"]
    assert_told(arguments, [*in_file, "mine.jsonnet:2"], capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{ seed: std.parseInt(std.extVar('APP_SHARD')) }",
            ["APP_SHARD", "mine.jsonnet:1", "export APP_SHARD="],
        ),
        (
            "import 'quickstart/vinepo.jsonnet'",
            ["quickstart/vinepo.jsonnet", "no such file", "mine.jsonnet:1", "vineppo.jsonnet"],
        ),
        ("{ iterations: twelve }", ["mine.jsonnet:1", "Unknown variable: twelve"]),
        ("['a list']", ["mine.jsonnet", "object"]),
    ],
)
def test_a_file_that_cannot_be_evaluated_is_told_in_one_screen(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonnet"
    file.write_text(text)
    assert_told(["--configs", f"{VINEPPO},{file}", "check_config"], words, capsys)


def test_a_missing_file_and_a_seed_that_is_no_number_are_told_in_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_told(
        ["--configs", "vinepo.jsonnet", "check_config"], ["vinepo.jsonnet", VINEPPO, "looked for"], capsys
    )
    monkeypatch.setenv("APP_SEED", "one")
    words = ["APP_SEED", "whole number", "export APP_SEED=1"]
    assert_told(["--configs", VINEPPO, "print_config"], words, capsys)
