"""Promises of `explain_config`:

* it lists the files, overrides and variables that set a key in the order in which they are merged, with
  lines, also where an import, a local name or a library stands between;
* the last setting of a leaf in the list is the leaf's value;
* a file whose every key is overridden by later files is reported, and no other file is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treetune import main as command_line
from treetune.config import lexer
from treetune.config.explain import (
    COMPUTED_VALUE,
    MISSING_VALUE,
    Explanation,
    describe_overridden_files,
    key_paths,
)
from treetune.config.jsonnet import load


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**files: str) -> None:
    for name, content in files.items():
        Path(f"{name}.jsonnet").write_text(content)


def places_and_values(
    key: str, *configs: str, overrides: tuple[str, ...] = (), **environ: str
) -> list[tuple[str, Any]]:
    config = load([f"{name}.jsonnet" for name in configs], overrides, environ)
    return [
        (setting.location, setting.value) for setting in Explanation(config).settings(tuple(key.split(".")))
    ]


def test_files_overrides_and_the_environment_come_in_the_order_of_merging_with_lines() -> None:
    write(a="{\n  t: { x: 1 }, seed: 1,\n}", b="{ t+: { x: 2 } }")
    places = [("a.jsonnet:2", 1), ("b.jsonnet:1", 2), ("--override", 3)]
    assert places_and_values("t.x", "a", "b", overrides=("{ t+: { x: 3 } }",)) == places
    assert places_and_values("seed", "a", APP_SEED="5")[-1] == ("environment variable APP_SEED", 5)


def test_imports_come_before_what_the_file_adds_to_them_and_twice_where_they_are_merged_twice() -> None:
    write(base="{ x: 1 }", a="(import 'base.jsonnet') + { x: 2 }")
    places = ["base.jsonnet:1", "a.jsonnet:1", "base.jsonnet:1"]
    assert [place for place, _ in places_and_values("x", "a", "base")] == places


def test_modules_are_looked_for_next_to_imported_files_and_not_next_to_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "parents" / "old").mkdir(parents=True)
    (tmp_path / "parents/old/oldest.jsonnet").write_text("{ x: 1 }")
    (tmp_path / "parents/parent.jsonnet").write_text("(import 'old/oldest.jsonnet') + { y: 1 }")
    write(child="(import 'parents/parent.jsonnet') + (import 'quickstart/grpo.jsonnet') + { seed: 1 }")
    parents = tmp_path / "parents"
    config = load(["child.jsonnet"], [], {})
    assert Explanation(config, ["/more"]).folders == [tmp_path, parents, parents / "old", Path("/more")]


def test_an_import_that_is_added_on_the_right_comes_last() -> None:
    write(late="{ x: 1 }", a="{ x: 2, t: { y: 1 } } + (import 'late.jsonnet')")
    assert [place for place, _ in places_and_values("x", "a")] == ["a.jsonnet:1", "late.jsonnet:1"]


def test_an_import_below_a_key_sets_the_keys_below_it() -> None:
    write(ppo="{ clip: 0.2 }", a="{ t: { objective: (import 'ppo.jsonnet') + { k: 1 } } }")
    assert places_and_values("t.objective.clip", "a") == [("ppo.jsonnet:1", 0.2)]
    assert places_and_values("t.objective", "a") == [
        ("ppo.jsonnet", {"clip": 0.2}),
        ("a.jsonnet:1", {"k": 1}),
    ]


def test_a_local_name_of_an_import_is_followed() -> None:
    write(base="{ x: 1 }", a="local base = import 'base.jsonnet';\nbase { x+: 1 }")
    assert places_and_values("x", "a") == [("base.jsonnet:1", 1), ("a.jsonnet:2", COMPUTED_VALUE)]


def test_a_library_is_called_and_not_merged() -> None:
    Path("lib.libsonnet").write_text("{ double(x): 2 * x }")
    write(a="local lib = import 'lib.libsonnet';\n{ x: lib.double(4) }")
    assert places_and_values("x", "a") == [("a.jsonnet:2", 8)]


def test_files_that_a_library_puts_together_are_named_in_the_order_of_merging() -> None:
    write(far="{ t: { x: 1 } }", near="{ t+: { x: 2 } }", mine="(import 'lib.libsonnet')('three')")
    Path("lib.libsonnet").write_text(
        "local near = import 'near.jsonnet';\nlocal far = import 'far.jsonnet';\n"
        "function(name) far + near + { t+: { x: 3 }, name: name }"
    )
    assert places_and_values("t.x", "mine") == [
        ("far.jsonnet:1", 1),
        ("near.jsonnet:1", 2),
        ("lib.libsonnet:3, called by mine.jsonnet", 3),
    ]
    assert places_and_values("name", "mine") == [("lib.libsonnet:3, called by mine.jsonnet", "three")]


def test_a_file_that_a_library_puts_on_the_right_comes_last() -> None:
    write(late="{ x: 1 }", mine="(import 'lib.libsonnet')()")
    Path("lib.libsonnet").write_text("function() { x: 2 } + (import 'late.jsonnet')")
    assert [place for place, _ in places_and_values("x", "mine")] == [
        "lib.libsonnet:1, called by mine.jsonnet",
        "late.jsonnet:1",
    ]


def test_a_value_that_depends_on_other_files_is_called_computed() -> None:
    write(a="{ n: 2 }", b="{ x: $.n * 10,\n  y: 1 }", c="{ x: super.x + 1 }")
    assert places_and_values("x", "a", "b", "c") == [
        ("b.jsonnet:1", COMPUTED_VALUE),
        ("c.jsonnet:1", COMPUTED_VALUE),
    ]
    assert places_and_values("y", "a", "b", "c") == [("b.jsonnet:2", 1)]
    write(alone="{ n: 2, x: $.n * 10 }", other="{ n: 3 }")
    assert places_and_values("x", "alone", "other") == [("alone.jsonnet:1", COMPUTED_VALUE)]


def test_a_key_in_a_list_is_found() -> None:
    write(item="{ x: 1 }", a="{ rows: [{ x: 0 }, import 'item.jsonnet'] }")
    assert places_and_values("rows.1.x", "a") == [("item.jsonnet:1", 1)]


def test_objects_with_the_same_keys_have_their_own_lines() -> None:
    rows = "{ x: 0,\n rows: [\n{ x: 1 },\n{ x: [2] }] }"
    assert [lexer.field_line(rows, path) for path in (("x",), ("rows", "0", "x"), ("rows", "1", "x"))] == [
        1,
        3,
        4,
    ]
    assert lexer.field_at(rows, 4, 7) == ("rows", "x")
    merged = "{ t: { x: 1 } +\n{ x: 2 }, x: 3,\n u: f({ x: 4 },\n{ y: 5 }), y: 6 }"
    assert [lexer.field_line(merged, path) for path in (("t", "x"), ("x",), ("u", "y"))] == [2, 2, 4]
    either = "{ x: 0, t: if true then { y: 1 } else\n{ x: 2 } }"
    assert [lexer.field_line(either, path) for path in (("x",), ("t", "x"))] == [1, 2]


def test_imports_in_comments_and_texts_do_not_count() -> None:
    comments = "// import 'a'\n/* import 'b' */ # import 'c'\n"
    texts = """{ x: 'import "d"', y: import "e", z: |||\n  import 'f'\n||| }"""
    assert lexer.imported_names(comments + texts) == ["e"]


@pytest.mark.parametrize(
    "literal",
    [r"""'\\"'""", r'''"a\\'\n"''', r"""'\\\"'""", r'''"\\\'"''', r'''"\"\'\n\u0041"''', r"""'it\'s "A"'"""],
)
def test_a_string_literal_has_the_value_that_jsonnet_gives_it(literal: str) -> None:
    write(literal=f"{{ value: {literal} }}")
    value = load(["literal.jsonnet"], environ={}).data["value"]
    (token,) = lexer.split_tokens(literal)
    assert token.value == value


@given(st.text(alphabet="{}'\"|/*#@\\:+ \nab,", max_size=60))
def test_any_text_can_be_searched(text: str) -> None:
    lexer.imported_names(text)
    lexer.field_line(text, ("a",))
    assert sum(1 for _ in lexer.split_tokens(text)) <= len(text)


_OBJECTS = st.recursive(
    st.integers(0, 9), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=6
).filter(lambda value: isinstance(value, dict))


def _merging(value: Any) -> str:
    """An object literal whose nested objects merge (`+:`) with what is below them."""
    if not isinstance(value, dict):
        return json.dumps(value)
    fields = (f"{k}{'+' if isinstance(v, dict) else ''}: {_merging(v)}" for k, v in value.items())
    return "{" + ", ".join(fields) + "}"


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_OBJECTS, min_size=1, max_size=4))
def test_the_last_setting_of_a_leaf_is_its_value(layers: list[dict[str, Any]]) -> None:
    for number, layer in enumerate(layers):
        nested = f"(import '{number - 1}.jsonnet') + " if number else ""
        Path(f"{number}.jsonnet").write_text(nested + _merging(layer))
    try:
        config = load([f"{len(layers) - 1}.jsonnet"], [], {})
    except ValueError:
        return  # a number and an object do not add
    explanation = Explanation(config)
    for path in key_paths(config.data):
        value = explanation.value(path)
        settings_of_path = explanation.settings(path)
        assert value is not MISSING_VALUE
        assert settings_of_path, path
        assert settings_of_path[-1].source.endswith(".jsonnet")
        if not isinstance(value, dict):
            assert settings_of_path[-1].value == value
            setters = [n for n, layer in enumerate(layers) if path in key_paths(layer)]
            assert [setting.source for setting in settings_of_path] == [f"{n}.jsonnet" for n in setters]


# Files that change nothing

EXPERIMENT = "{ seed: 1, credit: { type: 'a', n: 1 }, trainer: { rate: 1 } }"


def notes_on_stack(*texts: str) -> list[str]:
    """On a stack of files that are called 0, 1, 2…"""
    write(**{str(number): text for number, text in enumerate(texts)})
    return list(
        describe_overridden_files(load([f"{number}.jsonnet" for number in range(len(texts))], environ={}))
    )


def test_a_file_that_others_override_is_reported_with_them() -> None:
    (note,) = notes_on_stack("{ credit: { type: 'b' }, trainer+: { rate: 2 } }", EXPERIMENT)
    assert note.startswith("0.jsonnet changes nothing")
    for part in ("credit.type", "by 1.jsonnet", "put it after 1.jsonnet"):
        assert part in note
    (note,) = notes_on_stack(
        EXPERIMENT, "{ credit: { type: 'b' } }", "{ seed: 2 }", "{ credit: { type: 'c' } }"
    )
    assert note.startswith("1.jsonnet changes nothing")
    assert "by 3.jsonnet" in note


@pytest.mark.parametrize(
    ("texts", "overridden_by"),
    [
        (("{ t: { x: 1, y: 2 } }", "{ t: { x: 3, y: 2 } }", "{ t+: { z: 5 } }"), "1.jsonnet"),
        (("{ t: { x: 1 } }", "{ t+: { x: 2 } }", "{ u: 1 }", "{ t: { z: 5 } }"), "1.jsonnet and 3.jsonnet"),
        # The last file can't be evaluated without the one before it.
        (("{ x: 1 }", "{ x: 2, y: 3 }", "{ x: $.y }"), "1.jsonnet and 2.jsonnet"),
        (("{ x: 1 }", "{ x: 2, y: 3 }", "{ z: $.y }"), "1.jsonnet"),
    ],
)
def test_only_files_that_override_something_are_named(texts: tuple[str, ...], overridden_by: str) -> None:
    (note,) = [note for note in notes_on_stack(*texts) if note.startswith("0.jsonnet")]
    assert f"is overridden by {overridden_by}: put it after" in note


def test_files_that_override_only_together_are_all_named() -> None:
    """Each of them hides one of the two terms of the sum."""
    base = "{ sum: self.a + self.b, a:: 0, b:: 0 }"
    (note,) = notes_on_stack(base, "{ a:: 1, b:: 1 }", "{ a:: 5 }", "{ b:: 6 }")
    assert "(sum) is overridden by 2.jsonnet and 3.jsonnet: put it after 3.jsonnet" in note


def test_a_file_that_only_takes_keys_away_is_reported_with_their_object() -> None:
    (note,) = notes_on_stack(EXPERIMENT, "{ credit: { type: 'a' } }", "{ credit: { type: 'c' } }")
    assert "all that it sets (credit) is overridden by 2.jsonnet" in note


@pytest.mark.parametrize(
    "texts",
    [
        (EXPERIMENT, "{ trainer+: { rate: 2 } }"),
        (EXPERIMENT, "{ trainer+: { rate: 1 } }", "{ seed: 2 }"),  # says again what is there already
        ("{ credit: { type: 'b' }, own: 1 }", EXPERIMENT),  # one of its keys stays
        (EXPERIMENT, "{ trainer+: { rate:: 2 } }", "{ trainer+: { twice: super.rate * 2 } }"),
        (EXPERIMENT, "{ credit+: { n: 2 } }", "{ credit+: { n: super.n + 1 } }"),
        (EXPERIMENT,),
    ],
)
def test_a_file_that_changes_something_is_not_reported(texts: tuple[str, ...]) -> None:
    assert notes_on_stack(*texts) == []


def test_check_config_notes_such_a_file_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    configs = "credit/group.jsonnet,quickstart/vineppo.jsonnet"
    assert command_line.main(["--configs", configs, "check_config", "--config-only"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: ") and "quickstart/vineppo.jsonnet" in err
