"""Promises of the experiments and tables under configs/:

* `check_config` finds nothing wrong with any of them;
* a quickstart experiment and its publication take credit, objective and selection from the same definition;
* one mistake in an experiment, a file or a variable is told once, with its remedy, within one screen.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.shipped import CONFIGS, ROOT, loaded, whole_configurations
from treetune import main as command_line
from treetune.config import lexer
from treetune.config.explain import Explanation
from treetune.config.layers import find_configuration_files, shorten_path

VINEPPO = "configs/quickstart/vineppo.jsonnet"
SCREEN_LINES, SCREEN_COLUMNS = 24, 120
DEFINITIONS = {"methods", "presets", "credit", "objectives", "selections", "rollouts"}

LINES = Path(__file__).with_name("broken_configurations.tsv").read_text().splitlines()
ROWS = [line.split("\t") for line in LINES if not line.startswith("#")]
BROKEN = {name: (override, message) for name, override, message in ROWS}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@cache
def external_variables() -> set[str]:
    """Collect the variables that configurations read from the environment, but for those of every run."""
    variables = {"APP_SEED"}
    for path in CONFIGS.rglob("*sonnet"):
        tokens = list(lexer.split_tokens(path.read_text()))
        # A call is three tokens and more: extVar ( 'NAME' …
        calls = zip(tokens, tokens[1:], tokens[2:], strict=False)
        variables |= {variable.value for function, _, variable in calls if function.text == "extVar"}
    return variables - {"APP_DIRECTORY", "APP_EXPERIMENT_NAME"}


@pytest.mark.parametrize("name", whole_configurations())
def test_a_shipped_configuration_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in external_variables():
        monkeypatch.setenv(variable, "1")
    assert command_line.main(["--configs", name, "check_config", "--config-only"]) == 0, (
        capsys.readouterr().err
    )


def test_the_quickstart_is_among_the_checked_configurations() -> None:
    assert {f"configs/quickstart/{name}.jsonnet" for name in ("sft", "vineppo")} <= {*whole_configurations()}


def test_no_method_and_no_preset_share_a_name() -> None:
    methods = {path.stem for path in find_configuration_files(CONFIGS / "methods")}
    presets = {path.stem for path in find_configuration_files(CONFIGS / "presets")}
    assert methods & presets == set()


@pytest.mark.parametrize("method", ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_positive"])
def test_the_quickstart_and_the_paper_call_the_same_definition(method: str) -> None:
    small = Explanation(loaded(f"quickstart/{method}"))
    large = Explanation(loaded(f"polIter_rho1bSft2_{method}_MATH"))
    for key in (("credit", "type"), ("selection", "type"), ("restart",), ("trainer", "objective", "type")):
        assert (small.value(key), small.source(key)) == (large.value(key), large.source(key))


@pytest.mark.parametrize("name", [path.stem for path in find_configuration_files(CONFIGS / "quickstart")])
def test_credit_and_objective_of_a_quickstart_experiment_come_from_a_definition(name: str) -> None:
    explanation = Explanation(loaded(f"quickstart/{name}"))
    for key in (("credit", "type"), ("trainer", "objective", "type")):
        source = explanation.source(key)
        assert source is not None
        folder = source.removeprefix(shorten_path(CONFIGS) + "/").split("/")[0]
        assert folder in DEFINITIONS


def assert_told_in_one_screen(
    arguments: list[str], parts_of_message: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert exit code 2 and one message of a screen's size that has all the parts and no traceback."""
    code = command_line.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    message = " ".join(err.split())
    assert [part for part in parts_of_message if part not in message] == [], err
    assert "mistakes" not in lines[0], f"one mistake, told as several:\n{err}"


@pytest.mark.parametrize(("override", "message"), BROKEN.values(), ids=BROKEN)
def test_one_mistake_in_an_experiment_is_told_in_one_screen(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--configs", VINEPPO, "--override", override, "check_config"]
    assert_told_in_one_screen(arguments, message.split(" ... "), capsys)


@pytest.mark.parametrize("mistake", ["unknown key", "unknown type", "error in Jsonnet", "no type"])
def test_a_mistake_in_a_file_is_told_with_file_and_line(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override, message = BROKEN[mistake]
    file = tmp_path / "mine.jsonnet"
    file.write_text("// mine\n" + override)
    # The place differs: the file and its second line in place of the override.
    parts_of_message = [part for part in message.split(" ... ") if not part.startswith("--override")]
    arguments = ["--configs", f"{VINEPPO},{file}", "run_iteration_loop"]
    assert_told_in_one_screen(arguments, [*parts_of_message, "mine.jsonnet:2"], capsys)


@pytest.mark.parametrize(
    ("content", "parts_of_message"),
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
    content: str, parts_of_message: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonnet"
    file.write_text(content)
    arguments = ["--configs", f"{VINEPPO},{file}", "check_config"]
    assert_told_in_one_screen(arguments, parts_of_message, capsys)


def test_a_missing_file_and_a_seed_that_is_no_number_are_told_in_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing_file = ["vinepo.jsonnet", VINEPPO, "looked for"]
    assert_told_in_one_screen(["--configs", "vinepo.jsonnet", "check_config"], missing_file, capsys)
    monkeypatch.setenv("APP_SEED", "one")
    wrong_seed = ["APP_SEED", "whole number", "export APP_SEED=1"]
    assert_told_in_one_screen(["--configs", VINEPPO, "print_config"], wrong_seed, capsys)
