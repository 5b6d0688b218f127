"""Files, environment and overrides become one object, and what can't be evaluated says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.config import jsonnet
from treetune.config.errors import ConfigError
from treetune.config.jsonnet import load


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.jsonnet").write_text(
        "{ seed: 1, trainer: { rate: 0.1, steps: $.seed * 10 }, name:: 'hidden' }"
    )
    Path("fast.jsonnet").write_text("{ trainer+: { rate: 0.5 } }")


def message(*configs: str, overrides: tuple[str, ...] = (), **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(configs, overrides, environ)
    return str(error.value)


def test_later_files_overlay_earlier_ones_and_dollar_binds_late() -> None:
    data = load(["base.jsonnet", "fast.jsonnet"], ["{ seed: 3 }"], {}).data
    assert data == {"seed": 3, "trainer": {"rate": 0.5, "steps": 30}}


def test_our_files_have_the_same_name_from_everywhere() -> None:
    names = ["quickstart/sft.jsonnet", "configs/quickstart/sft.jsonnet"]
    assert load(names[:1], [], {}).data == load(names[1:], [], {}).data
    Path("mine.jsonnet").write_text("import 'configs/quickstart/sft.jsonnet'")
    assert load(["mine.jsonnet"], [], {}).data == load(names[:1], [], {}).data
    assert "configs/quickstart/sft.jsonnet" in message("configs/quickstart/sftt.jsonnet").split("remedy")[1]


def test_overrides_are_added_in_order() -> None:
    assert load(["base.jsonnet"], ["{ seed: 3 }", "{ seed: super.seed + 1 }"], {}).data["seed"] == 4


def test_the_environment_wins_over_files_and_an_override_over_the_environment() -> None:
    environ = {"APP_SEED": "7", "APP_DIRECTORY": "out", "APP_EXPERIMENT_NAME": "x"}
    data = load(["base.jsonnet"], [], environ).data
    assert (data["seed"], data["directory"], data["experiment_name"]) == (7, "out", "x")
    assert data["trainer"]["steps"] == 70
    assert load(["base.jsonnet"], ["{ seed: 9 }"], environ).data["seed"] == 9


def test_only_app_variables_are_external_variables() -> None:
    Path("variable.jsonnet").write_text("{ a: std.extVar('APP_A'), b: std.extVar('HOME') }")
    text = message("variable.jsonnet", APP_A="1", HOME="/root")
    assert "HOME" in text
    assert "APP_HOME" in text


def test_every_missing_variable_is_named_with_its_line_and_command() -> None:
    Path("variable.jsonnet").write_text("{\n  a: std.extVar('APP_A'),\n  b: std.extVar('APP_B'),\n}")
    text = message("variable.jsonnet")
    for variable, line in (("APP_A", 2), ("APP_B", 3)):
        assert f"variable.jsonnet:{line}" in text
        assert f"export {variable}=" in text


@pytest.mark.parametrize("value", ["one", "1.5", "", "1e3", "99999999999999999999"])
def test_a_seed_that_is_no_whole_number_is_an_error(value: str) -> None:
    text = message("base.jsonnet", APP_SEED=value)
    assert "APP_SEED" in text
    assert "whole number" in text


def test_an_empty_directory_is_an_error() -> None:
    assert "unset APP_DIRECTORY" in message("base.jsonnet", APP_DIRECTORY="")


def test_imports_are_relative_to_the_importing_file_and_then_to_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "configs"
    (configs / "parts").mkdir(parents=True)
    (configs / "parts" / "near.jsonnet").write_text("{ near: 1 }")
    (configs / "far.jsonnet").write_text("{ far: 1 }")
    (configs / "parts" / "all.jsonnet").write_text("(import 'near.jsonnet') + (import 'far.jsonnet')")
    monkeypatch.setattr(jsonnet, "CONFIGS", configs)
    assert load(["parts/all.jsonnet"], ["import 'far.jsonnet'"], {}).data == {"near": 1, "far": 1}


def test_the_working_directory_is_looked_into_before_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "base.jsonnet").write_text("{ wrong: 1 }")
    monkeypatch.setattr(jsonnet, "CONFIGS", configs)
    assert "seed" in load(["base.jsonnet"], [], {}).data


def test_a_missing_file_is_told_with_the_nearest_ones_and_where_it_was_looked_for() -> None:
    text = message("bsae.jsonnet")
    assert "did you mean base.jsonnet" in text
    assert str(jsonnet.CONFIGS / "bsae.jsonnet") in text


def test_a_missing_import_is_told_with_the_file_that_imports_it() -> None:
    Path("user.jsonnet").write_text("{} +\n  import 'fats.jsonnet'")
    text = message("user.jsonnet")
    assert "user.jsonnet:2" in text
    assert "did you mean fast.jsonnet" in text


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("{ a: 1,\n  b: }", 2, "unexpected"),
        ("{\n\n  a: c }", 3, "Unknown variable"),
        ("{\n  a: 1 / 0 }", 2, "division by zero"),
        ("{\n  a: error 'no luck' }", 2, "no luck"),
        ("{ a: 1,\n  a: 2 }", 2, "duplicate field"),
    ],
)
def test_an_error_in_jsonnet_has_file_line_and_text(text: str, line: int, what: str) -> None:
    Path("wrong.jsonnet").write_text(text)
    shown = message("base.jsonnet", "wrong.jsonnet")
    assert f"wrong.jsonnet:{line}" in shown
    assert what in shown
    assert "RUNTIME ERROR" not in shown


def test_an_error_in_an_override_is_placed_there() -> None:
    shown = message("base.jsonnet", overrides=("{}", "{ a: "))
    assert "--override 2:1" in shown


def test_files_that_import_each_other_end_in_a_message() -> None:
    Path("egg.jsonnet").write_text("(import 'hen.jsonnet') + {}")
    Path("hen.jsonnet").write_text("(import 'egg.jsonnet') + {}")
    assert "import each other" in message("egg.jsonnet")


def test_a_file_that_is_no_object_is_named() -> None:
    Path("list.jsonnet").write_text("'text'")
    shown = message("base.jsonnet", "list.jsonnet")
    assert "list.jsonnet" in shown
    assert "should be an object" in shown


def test_an_error_in_a_library_names_the_key_and_the_file_that_set_it() -> None:
    Path("longest.libsonnet").write_text("function(context, prompt)\n  context - prompt\n")
    Path("user.jsonnet").write_text(
        "local longest = import 'longest.libsonnet';\n"
        "{ context: 10,\n  rollout: { sets: [{ max_tokens: longest($.context, 2) }] } }"
    )
    Path("wrong.jsonnet").write_text("{\n  context: null }")
    shown = " ".join(message("user.jsonnet", "wrong.jsonnet").split())
    assert "longest.libsonnet:2:3" in shown
    assert "in the value of rollout.sets.max_tokens (user.jsonnet:3:35)" in shown
    assert "it is made from context, which wrong.jsonnet:2 sets (null)" in shown


def test_an_error_of_a_library_that_is_called_names_the_file_that_calls_it() -> None:
    Path("method.libsonnet").write_text("function(name)\n  error 'no method ' + name\n")
    Path("user.jsonnet").write_text("{} +\n(import 'method.libsonnet')('vinepo')")
    shown = message("base.jsonnet", "user.jsonnet")
    assert "method.libsonnet:2:3: Jsonnet: no method vinepo" in shown
    assert "called from user.jsonnet:2:1" in shown


def test_an_error_of_the_standard_library_names_the_key() -> None:
    Path("user.jsonnet").write_text("{ a: { b: std.parseInt('x') } }")
    assert "in the value of a.b (user.jsonnet:1:11)" in message("user.jsonnet")


def test_an_error_of_syntax_has_line_column_and_text() -> None:
    Path("wrong.jsonnet").write_text("{\n  a: 1,\n  b 2,\n}")
    shown = message("wrong.jsonnet")
    assert "wrong.jsonnet:3:5" in shown
    assert "      b 2,\n        ^" in shown


def test_of_a_long_line_the_place_of_the_error_is_shown() -> None:
    Path("wrong.jsonnet").write_text("{ a: [" + "1, " * 100 + "], b 2, c: [" + "1, " * 100 + "] }")
    lines = message("wrong.jsonnet").splitlines()
    place = next(number for number, line in enumerate(lines) if line.strip() == "^")
    text, mark = lines[place - 1 : place + 1]
    assert len(text) <= 104
    assert text[mark.index("^")] == "2"
