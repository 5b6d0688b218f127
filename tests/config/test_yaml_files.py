"""Promises of YAML configurations:

* a text without quotes means what the core schema of YAML 1.2 says, so `no` is a text and `010` is ten;
* aliases and merges are resolved, and `key+:` merges into what stands on the left;
* a file that a configuration can't hold is refused with line, column and remedy, and nothing in it is
  executed;
* what aliases repeat is bounded, so that a small file can't fill the memory.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import treetune.parts  # noqa: F401
from tests.support.chat_models import bpe_tokenizer
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.exceptions import ConfigError
from treetune.models.sources import ModelSource
from treetune.models.tokenizer import codec_of


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load_yaml(text: str, *files_on_the_left: str) -> dict[str, Any]:
    Path("part.yaml").write_text(text, newline="")
    return load([*files_on_the_left, "part.yaml"], [], {}).data


def message_of_failed_load(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_yaml(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text_in_yaml", "value"),
    [
        *[(number, 0.5) for number in (".5", "+.5", "0.5", "5e-1", "5.E-1")],
        *[("-.5", -0.5), ("1.", 1.0), ("+2", 2), ("010", 10), ("0o17", 15), ("0x1F", 31), ("1e3", 1000)],
        *[(null, None) for null in ("~", "null", "Null", "NULL", "", "!!null ''")],
        *[(true, True) for true in ("true", "True", "TRUE", "!!bool true")],
        *[
            (text, text)
            for text in ("no", "yes", "on", "off", "y", "nUll", "tRUE", "1_000", "1:30", "0b1", "0o8")
        ],
        *[
            (text, text)
            for text in ("2024-01-02", "2024-01-02T03:04:05Z", "1.2.3", ".", "+", "1e", "=", "é😀")
        ],
        *[("'~'", "~"), ('"1"', "1"), ("!!str 5", "5"), ("'it''s'", "it's"), ("|\n  x\n  y", "x\ny\n")],
        *[
            ("$.seed", "$.seed"),
            ("\"' + error 'x' + '\"", "' + error 'x' + '"),
            ("importstr 'x'", "importstr 'x'"),
        ],
    ],
)
def test_a_text_without_quotes_is_what_the_core_schema_says(text_in_yaml: str, value: object) -> None:
    loaded = load_yaml(f"a: {text_in_yaml}\n")["a"]
    assert (loaded, type(loaded) is bool) == (value, type(value) is bool)


def test_aliases_and_merges_are_resolved_and_the_objects_own_keys_win() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc:\n  <<: *a\n  x: 3\nd:\n  <<: [{x: 7}, *a]\n'<<': kept\n"
    a = {"x": 1, "y": [1, 2]}
    assert load_yaml(text) == {"a": a, "b": a, "c": {**a, "x": 3}, "d": {**a, "x": 7}, "<<": "kept"}


def test_a_plus_merges_into_the_left_also_from_an_alias_and_in_an_import() -> None:
    Path("left.json").write_text(json.dumps({"trainer": {"rate": 1, "steps": 10}, "more": {"k": {"m": 1}}}))
    text = "base: &base\n  k+: {n: 2}\ntrainer+:\n  rate: .5\nmore+: *base\n"
    data = load_yaml(text, "left.json")
    assert data["trainer"] == {"rate": 0.5, "steps": 10} and data["more"] == {"k": {"m": 1, "n": 2}}
    Path("importing.jsonnet").write_text("(import 'left.json') + (import 'part.yaml')")
    assert load(["importing.jsonnet"], [], {}).data == data
    settings = Explanation(load(["left.json", "part.yaml"], [], {})).settings(("trainer", "rate"))
    assert [setting.location for setting in settings] == ["left.json:1", "part.yaml:4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "part.yaml:3:1: the key 'a' occurs again, after line 1"),
        ("a:\n  - {x: 1, 'x': 2}\n", "part.yaml:2:12: the key 'x' occurs again, after line 2"),
        ("a: {}\na+: {}\n", "part.yaml:2:1: the key 'a' occurs again"),
        ("a: {<<: {x: 1}, <<: {y: 1}}", "the key '<<' occurs again"),
        ("a: 1\nb: .inf\n", "part.yaml:2:4: .inf isn't finite"),
        ("a: -.INF", "-.INF isn't finite"),
        ("a: .NaN", ".NaN isn't finite"),
        ("a: 1e999", "1e999 isn't finite"),
        (f"a: {2**53}", "is beyond 2**53 - 1"),
        (f"a: {'9' * 5000}", "is beyond 2**53 - 1"),
        ("a:\n\tb: 1", "part.yaml:2:1: this can't be read as YAML: a tab is used for indentation"),
        ("a: 1\n---\nb: 2", "part.yaml:2:1: this can't be read as YAML: a second document begins"),
        ("a: !!python/object/apply:os.getcwd []", "part.yaml:1:4: the tag !!python/object/apply:os.getcwd"),
        ("a: !!binary aGk=", "the tag !!binary"),
        ("a: !!timestamp 2024-01-02", "the tag !!timestamp"),
        ("a: !mine {b: 1}", "the tag !mine"),
        ("a: !!int x", "the tag !!int doesn't fit 'x'"),
        ("a: &a [*a]", "a value holds an alias of itself"),
        ("a: &a {<<: *a}", "an object merges itself"),
        ("<<: 3", "<< merges something that isn't an object"),
        ("a: *b", "undefined alias 'b'"),
        ("? [1]\n: 2", "a key can't be a list or an object"),
        ("+: 1", "a key is missing"),
        ("%YAML 1.1\n---\na: yes", "it says that it is YAML 1.1"),
        ("a: x\x01", "part.yaml:1:5: YAML can't have a character of code 1"),
        ("# nothing\n", "the file holds nothing"),
        ("- 1\n", "part.yaml:1:1: a configuration is an object"),
        ("a: " + "[" * 5000 + "]" * 5000, "more than 100 deep"),
        ("a: " + "[" * 150 + "]" * 150, "more than 100 deep"),
    ],
)
def test_what_a_configuration_cannot_hold_is_refused_with_its_place_and_a_remedy(
    text: str, expected: str
) -> None:
    message = message_of_failed_load(text)
    assert expected in message and "remedy" in message


def test_what_aliases_repeat_is_bounded() -> None:
    # Each name holds its predecessor ten times, so that the last would hold 10**10 values.
    names = "abcdefghij"
    lists, merges = "", ""
    for before, name in zip(("", *names), names, strict=False):
        items = ", ".join([f"*{before}" if before else "x"] * 10)
        lists += f"{name}: &{name} [{items}]\n"
        objects = ", ".join([f"*{before}" if before else "{x: 1}"] * 10)
        merges += f"{name}: &{name} {{<<: [{objects}]}}\n"
    assert "more than 100,000 values" in message_of_failed_load(lists)
    assert load_yaml(merges)["j"] == {"x": 1}, "an object that is merged ten times is still one object"


def test_a_mistake_in_an_imported_file_is_told_with_the_file_that_imports_it() -> None:
    Path("part.yaml").write_text("a: 1\na: 2\n")
    Path("importing.jsonnet").write_text("import 'part.yaml'")
    with pytest.raises(ConfigError) as caught:
        load(["importing.jsonnet"], [], {})
    assert "part.yaml:2:1: the key 'a'" in str(caught.value)
    assert "imported in importing.jsonnet:1" in str(caught.value)


def test_a_system_message_of_null_is_none_in_the_prompt_too() -> None:
    model = {"type": "pretrained", "name_or_path": "a-model"}
    prompts = {}
    for system in ("~", "null", "'~'"):
        text = f"model:\n  chat:\n    system: {system}\n"
        chat = build(ModelSource, model | load_yaml(text)["model"]).chat
        prompts[system] = codec_of(bpe_tokenizer(), chat=chat).whole_prompt("2 + 2?")
    assert "system" not in prompts["~"] and prompts["null"] == prompts["~"]
    assert "<|im_start|>system\n~<|im_end|>" in prompts["'~'"]
