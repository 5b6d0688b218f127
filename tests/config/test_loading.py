"""Promises of reading a configuration:

* files, the environment and overrides become one object, and each later one wins over the earlier ones;
* shipped files have the same names from every folder, and an import is relative to the importing file first;
* an error in Jsonnet is told with file, line, column, text and the key that is evaluated;
* the configuration that is evaluated as one text equals the one that Jsonnet evaluates with its imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.shipped import CONFIGS
from treetune.config import jsonnet, layers
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.exceptions import ConfigError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.jsonnet").write_text(
        "{ seed: 1, trainer: { rate: 0.1, steps: $.seed * 10 }, name:: 'hidden' }"
    )
    Path("fast.jsonnet").write_text("{ trainer+: { rate: 0.5 } }")
    Path("longest.libsonnet").write_text("function(context, prompt)\n  context - prompt\n")
    Path("method.libsonnet").write_text("function(name)\n  error 'no method ' + name\n")
    Path("egg.jsonnet").write_text("(import 'wrong.jsonnet') + {}")


def message_of_failed_load(*configs: str, overrides: tuple[str, ...] = (), **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(configs, overrides, environ)
    return str(error.value)


def test_later_files_overlay_earlier_ones_and_dollar_binds_late_and_overrides_come_in_order() -> None:
    data = load(["base.jsonnet", "fast.jsonnet"], ["{ seed: 2 }", "{ seed: super.seed + 1 }"], {}).data
    assert data == {"seed": 3, "trainer": {"rate": 0.5, "steps": 30}}


def test_our_files_have_the_same_name_from_everywhere() -> None:
    names = ["quickstart/sft.jsonnet", "configs/quickstart/sft.jsonnet"]
    assert load(names[:1], [], {}).data == load(names[1:], [], {}).data
    Path("mine.jsonnet").write_text("import 'configs/quickstart/sft.jsonnet'")
    assert load(["mine.jsonnet"], [], {}).data == load(names[:1], [], {}).data
    assert (
        "configs/quickstart/sft.jsonnet"
        in message_of_failed_load("configs/quickstart/sftt.jsonnet").split("remedy")[1]
    )


def test_examples_are_found_by_their_name_from_everywhere() -> None:
    assert load(["examples/own_parts/rank.jsonnet"], [], {}).data["experiment_name"] == "quickstart/own_rank"


def test_yaml_and_json_are_read_as_data_and_a_plus_in_yaml_merges() -> None:
    Path("whole.json").write_text('{"seed": 1, "trainer": {"rate": 0.1, "steps": 10}}')
    Path("part.yaml").write_text("trainer+:\n  rate: 3e-6  # a number\nwords: ['1', é]\n")
    data = load(["whole.json", "part.yaml"], [], {}).data
    assert data == {"seed": 1, "trainer": {"rate": 3e-6, "steps": 10}, "words": ["1", "é"]}
    Path("importing.jsonnet").write_text("(import 'whole.json') + (import 'part.yaml')")
    assert load(["importing.jsonnet"], [], {}).data == data
    settings = Explanation(load(["whole.json", "part.yaml"], [], {})).settings(("trainer", "rate"))
    assert [setting.source for setting in settings] == ["whole.json", "part.yaml"]
    Path("torn.yaml").write_text("a: [1\n")
    assert "torn.yaml:2:1: this can't be read as YAML: expected ',' or ']'" in message_of_failed_load(
        "base.jsonnet", "torn.yaml"
    )


def test_the_environment_wins_over_files_and_an_override_over_the_environment() -> None:
    environ = {"APP_SEED": "7", "APP_DIRECTORY": "out", "APP_EXPERIMENT_NAME": "x"}
    data = load(["base.jsonnet"], [], environ).data
    assert (data["seed"], data["directory"], data["experiment_name"]) == (7, "out", "x")
    assert data["trainer"]["steps"] == 70
    assert load(["base.jsonnet"], ["{ seed: 9 }"], environ).data["seed"] == 9


def test_every_missing_variable_is_named_with_its_line_and_command_and_only_those_of_app_are_there() -> None:
    Path("variable.jsonnet").write_text(
        "{\n  a: std.extVar('APP_A'),\n  b: std.extVar('APP_B'), h: std.extVar('HOME') }"
    )
    message = message_of_failed_load("variable.jsonnet", HOME="/root")
    for part in ("variable.jsonnet:2", "export APP_A=", "variable.jsonnet:3", "export APP_B=", "APP_HOME"):
        assert part in message


def test_an_error_of_a_file_about_a_variable_is_no_unset_variable() -> None:
    Path("own.jsonnet").write_text("{ a: error 'undefined external variable: X' }")
    message = message_of_failed_load("own.jsonnet")
    assert "in the value of a (own.jsonnet:1:6)" in message and "is not set" not in message
    # Variables that really aren't set are reported first, also one of the same name.
    Path("both.jsonnet").write_text(
        "{ a: std.extVar('APP_A'), b: error 'undefined external variable: APP_A',"
        " c: error 'undefined external variable: X' }"
    )
    message = message_of_failed_load("both.jsonnet")
    assert "export APP_A=" in message and "both.jsonnet:1:6" in message
    assert "undefined external variable: APP_A" in message_of_failed_load("both.jsonnet", APP_A="1")


@pytest.mark.parametrize("value", ["one", "1.5", "", "1e3", "99999999999999999999"])
def test_a_seed_that_is_no_whole_number_is_an_error(value: str) -> None:
    message = message_of_failed_load("base.jsonnet", APP_SEED=value)
    assert "APP_SEED" in message and "whole number" in message


def test_an_empty_directory_is_an_error() -> None:
    assert "unset APP_DIRECTORY" in message_of_failed_load("base.jsonnet", APP_DIRECTORY="")


def test_imports_are_relative_to_the_importing_file_and_files_to_here_before_they_are_to_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "configs"
    (configs / "parts").mkdir(parents=True)
    (configs / "base.jsonnet").write_text("{ wrong: 1 }")
    (configs / "parts" / "near.jsonnet").write_text("{ near: 1 }")
    (configs / "far.jsonnet").write_text("{ far: 1 }")
    (configs / "parts" / "all.jsonnet").write_text("(import 'near.jsonnet') + (import 'far.jsonnet')")
    monkeypatch.setattr(layers, "CONFIGS_FOLDER", configs)
    assert load(["parts/all.jsonnet"], ["import 'far.jsonnet'"], {}).data == {"near": 1, "far": 1}
    assert "seed" in load(["base.jsonnet"], [], {}).data


def test_a_missing_file_is_told_with_the_nearest_ones_and_where_it_was_looked_for() -> None:
    message = message_of_failed_load("bsae.jsonnet")
    assert "did you mean base.jsonnet" in message
    assert str(layers.CONFIGS_FOLDER / "bsae.jsonnet") in message


@pytest.mark.parametrize(
    ("text", "parts_of_message"),
    [
        ("{ a: 1,\n  b: }", ["wrong.jsonnet:2", "unexpected"]),
        ("{\n\n  a: c }", ["wrong.jsonnet:3", "Unknown variable"]),
        ("{\n  a: 1 / 0 }", ["wrong.jsonnet:2", "division by zero"]),
        ("{\n  a: error 'no luck' }", ["wrong.jsonnet:2", "no luck"]),
        ("{ a: 1,\n  a: 2 }", ["wrong.jsonnet:2", "duplicate field"]),
        ("{\n  a: 1,\n  b 2,\n}", ["wrong.jsonnet:3:5", "      b 2,\n        ^"]),
        ("'text'", ["wrong.jsonnet", "should be an object"]),
        ("{} +\n  import 'fats.jsonnet'", ["wrong.jsonnet:2", "did you mean fast.jsonnet"]),
        ("(import 'egg.jsonnet') + {}", ["import each other"]),
        ("{ a: { b: std.parseInt('x') } }", ["in the value of a.b (wrong.jsonnet:1:11)"]),
        (
            "{} +\n(import 'method.libsonnet')('vinepo')",
            ["method.libsonnet:2:3: Jsonnet: no method vinepo", "called from wrong.jsonnet:2:1"],
        ),
    ],
)
def test_an_error_in_jsonnet_has_file_line_and_text(text: str, parts_of_message: list[str]) -> None:
    Path("wrong.jsonnet").write_text(text)
    message = message_of_failed_load("base.jsonnet", "wrong.jsonnet")
    assert [part for part in [*parts_of_message, "wrong.jsonnet"] if part not in message] == [], message
    assert "RUNTIME ERROR" not in message


def test_an_error_in_an_override_is_placed_there() -> None:
    assert "--override 2:1" in message_of_failed_load("base.jsonnet", overrides=("{}", "{ a: "))


def test_an_error_in_a_library_names_the_key_and_the_file_that_set_it() -> None:
    Path("user.jsonnet").write_text(
        "local longest = import 'longest.libsonnet';\n"
        "{ context: 10,\n  rollout: { sets: [{ max_tokens: longest($.context, 2) }] } }"
    )
    Path("wrong.jsonnet").write_text("{\n  context: null }")
    message = " ".join(message_of_failed_load("user.jsonnet", "wrong.jsonnet").split())
    assert "longest.libsonnet:2:3" in message
    assert "in the value of rollout.sets.max_tokens (user.jsonnet:3:35)" in message
    assert "it is made from context, which wrong.jsonnet:2 sets (null)" in message


def test_a_long_line_is_cut_around_the_error() -> None:
    Path("wrong.jsonnet").write_text("{ a: [" + "1, " * 100 + "], b 2, c: [" + "1, " * 100 + "] }")
    message = message_of_failed_load("wrong.jsonnet").splitlines()
    line_of_mark = next(number for number, line in enumerate(message) if line.strip() == "^")
    excerpt, mark = message[line_of_mark - 1 : line_of_mark + 1]
    assert len(excerpt) <= 104
    assert excerpt[mark.index("^")] == "2"


# Evaluation as one text, which is faster than Jsonnet's own imports

VARIABLES = {"APP_SEED": "1", "APP_DIRECTORY": "somewhere"}
SHIPPED = sorted(
    path.relative_to(CONFIGS)
    for path in layers.find_configuration_files(CONFIGS)
    if path.parent.name in ("configs", "quickstart", "countdown")
)[::12]  # each takes a second


def load_flattened_and_with_imports(monkeypatch: pytest.MonkeyPatch, *configs: str) -> dict[str, Any]:
    """Load configurations as one text, assert that Jsonnet's imports give the same, and return the result."""
    flattened = load(configs, environ=VARIABLES).data
    with monkeypatch.context() as patch:
        patch.setattr(jsonnet, "evaluate_flattened", jsonnet._evaluate_with_imports)
        assert load(configs, environ=VARIABLES).data == flattened
    return flattened


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_a_shipped_configuration_is_the_same_when_it_is_evaluated_as_one_text(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_flattened_and_with_imports(monkeypatch, str(path))


def test_local_names_the_root_and_relative_imports_stay_those_of_each_file_in_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    files = {
        "a.jsonnet": "local x = 1; (import 'deep/b.jsonnet') + { x: x, total:: 5, root: $.total }",
        "deep/b.jsonnet": "local x = 2; { y: x, late: $.x, lib: (import 'c.libsonnet').double(x) }",
        "deep/c.libsonnet": "{ double(n):: n * 2, text:: importstr 'words.txt' }",
        "deep/words.txt": "import 'nothing'",
        "d.jsonnet": "{ y+: 1, text: (import 'deep/c.libsonnet').text }",
        "asks.jsonnet": "{ me: std.thisFile, unused:: import 'none' }",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    from_environment = {"seed": 1, "directory": "somewhere"}
    alone = load_flattened_and_with_imports(monkeypatch, "a.jsonnet")
    assert alone == {**from_environment, "x": 1, "y": 2, "late": 1, "lib": 4, "root": 5}
    assert load_flattened_and_with_imports(monkeypatch, "a.jsonnet", "d.jsonnet") == alone | {
        "y": 3,
        "text": "import 'nothing'",
    }
    assert load_flattened_and_with_imports(monkeypatch, "asks.jsonnet") == {
        **from_environment,
        "me": str(tmp_path / "asks.jsonnet"),
    }


def test_a_shipped_table_is_evaluated_as_one_text_and_never_with_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(jsonnet, "_evaluate_with_imports")
    assert load(["tables/vineppo_main.jsonnet"], environ={}).data["name"] == "vineppo_main"
