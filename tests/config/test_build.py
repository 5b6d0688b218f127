"""Promises of building a configuration:

* the signatures of the constructors are the schema: values, defaults and nested parts become objects by them;
* every mistake is told, all at once, each at its key with a remedy, and with the file and line that set it;
* a misspelled name is answered with the nearest right one, and swapped letters count as one edit.
"""

from __future__ import annotations

import collections.abc
import typing
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import MinLen

from tests.config.example_parts import Circle, Drawing, Frame, Picture, Shape, Square
from treetune.config.build import build, keys_at
from treetune.config.errors import ConfigIssue, count_edits, nearest
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.exceptions import ConfigError

RIGHT = {"type": "drawing", "seed": 1, "directory": "x", "shape": {"type": "circle", "radius": 2}}


def issues_of_change(**changes: Any) -> list[ConfigIssue]:
    with pytest.raises(ConfigError) as error:
        build(Picture, {**RIGHT, **changes})
    return list(error.value.issues)


def only_issue_of_change(**changes: Any) -> ConfigIssue:
    (issue,) = issues_of_change(**changes)
    return issue


def test_nested_optional_listed_and_named_parts_are_built() -> None:
    square = {"type": "square"}
    built = build(
        Picture,
        {
            **RIGHT,
            "extra": square,
            "more": [square, {"type": "circle", "radius": 1}],
            "named": {"a": square},
            "frame": {"width": 1, "tags": ["a", "b"]},
            "limit": None,
        },
    )
    assert built == Drawing(
        seed=1,
        directory="x",
        shape=Circle(radius=2.0),
        extra=Square(),
        more=(Square(), Circle(radius=1.0)),
        named={"a": Square()},
        frame=Frame(width=1.0, tags=("a", "b")),
    )


def test_defaults_are_used_where_nothing_is_set() -> None:
    assert build(Picture, {**RIGHT, "extra": None}) == build(Picture, RIGHT)


def test_a_whole_number_may_stand_for_a_number() -> None:
    built = build(Picture, {**RIGHT, "scale": 3})
    assert isinstance(built, Drawing)
    assert (built.scale, type(built.scale)) == (3.0, float)


@pytest.mark.parametrize(
    ("changes", "key", "part_of_message"),
    [
        ({"seed": "3"}, "seed", "whole number"),
        ({"seed": True}, "seed", "whole number"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": None}, "seed", "null"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"shadow": 1}, "shadow", "true or false"),
        ({"shadow": "true"}, "shadow", "true or false"),
        ({"scale": "big"}, "scale", "a number"),
        ({"scale": True}, "scale", "a number"),
        ({"directory": 3}, "directory", "a string"),
        ({"limit": 0}, "limit", "greater than 0 or null"),
        ({"pair": [1]}, "pair", "exactly 2"),
        ({"pair": [1, "2"]}, "pair.1", "a number"),
        ({"shape": "circle"}, "shape", "{type: …}"),
        ({"shape": {"type": "circle", "radius": 0}}, "shape.radius", "greater than 0"),
        ({"shape": {"type": "circle", "radius": 1, "colour": "gren"}}, "shape.colour", '"red", "green"'),
        ({"more": {}}, "more", "a list"),
        ({"more": [{"type": "square", "side": 0}]}, "more.0.side", "greater than 0"),
        ({"named": []}, "named", "an object"),
        ({"named": {"a": {"type": "circle"}}}, "named.a.radius", "missing"),
        ({"frame": 3}, "frame", "an object"),
        ({"frame": {"width": 11}}, "frame.width", "at most 10"),
        ({"frame": {"width": 1, "tags": []}}, "frame.tags", "length at least 1"),
        ({"frame": {"width": 1, "tags": ["a", 3]}}, "frame.tags.1", "a string"),
        ({"tile": 3}, "configuration", "no multiple of tile 3"),
    ],
)
def test_one_mistake_is_one_issue_at_its_key(changes: dict[str, Any], key: str, part_of_message: str) -> None:
    issue = only_issue_of_change(**changes)
    assert issue.key == key
    assert part_of_message in issue.what


@pytest.mark.parametrize(
    ("changes", "key", "part_of_remedy"),
    [
        ({"shadw": True}, "shadw", "did you mean 'shadow'"),
        ({"shape": {"type": "circle", "radios": 1}}, "shape.radios", "did you mean 'radius'"),
        ({"shape": {"type": "square", "colour": "red"}}, "shape.colour", "it is a key of 'circle'"),
        ({"radius": 3}, "radius", "{shape+: {radius: …}}"),
        (
            {"shape": {"type": "cirkle"}},
            "shape.type",
            "did you mean 'circle'? Types of shape: circle, square",
        ),
        ({"shape": {"radius": 1}}, "shape.type", "circle, square"),
        ({"seed": "3"}, "seed", "write it without quotes: 3"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(
    changes: dict[str, Any], key: str, part_of_remedy: str
) -> None:
    issue = only_issue_of_change(**changes)
    assert issue.key == key
    assert part_of_remedy in str(issue.remedy)


@pytest.mark.parametrize("text", ["1.2.3", "..", ".5", "-"])
def test_a_text_that_is_no_number_is_not_offered_without_quotes(text: str) -> None:
    assert "without quotes" not in str(only_issue_of_change(seed=text).remedy)


def test_all_mistakes_are_told_at_once_in_the_order_of_their_keys() -> None:
    keys = [
        issue.key
        for issue in issues_of_change(seed="x", shape={"type": "circle", "radius": -1}, zoom=1, extra={})
    ]
    assert keys == ["extra.type", "seed", "shape.radius", "zoom"]


def test_a_constructor_is_not_called_with_wrong_values() -> None:
    # size % tile would raise a TypeError on these.
    assert [issue.key for issue in issues_of_change(size="8", tile=3)] == ["size"]


def test_issues_name_the_file_and_line_that_set_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonnet").write_text(
        "{ type: 'drawing', seed: 1, directory: 'x',\n  shape: { type: 'circle', radius: 1 },\n}"
    )
    Path("b.jsonnet").write_text("{\n  shape: { type: 'circle' },\n  size: 9,\n}")
    config = load(["a.jsonnet", "b.jsonnet"], ["{ shadow: 1 }"], {})
    with pytest.raises(ConfigError) as error:
        build(Picture, config.data, Explanation(config))
    shadow, radius = error.value.issues
    assert shadow.source == "--override"
    # The commonest slip of all: `shape:` where `shape+:` was meant.
    assert radius.source == "b.jsonnet:2"
    assert "a.jsonnet:2 sets it" in str(radius.remedy)
    assert "`shape+: {…}`" in str(radius.remedy)
    Path("c.jsonnet").write_text("{\n  size: 9 }")
    config = load(["a.jsonnet", "c.jsonnet"], [], {})
    with pytest.raises(ConfigError, match=r"size from c\.jsonnet:2"):
        build(Picture, config.data, Explanation(config))


def test_the_schema_knows_defaults_below_parts_that_are_set() -> None:
    data = {**RIGHT, "more": [{"type": "square"}], "frame": {}}
    assert keys_at(Picture, data, ("more", "0"))["side"].default == 1
    assert keys_at(Picture, data, ("frame",))["tags"].default == ("plain",)
    assert keys_at(Picture, data, ("shape",))["radius"].required
    assert keys_at(Picture, data, ("seed", "nothing")) == {}


def test_each_item_of_a_tuple_has_the_keys_of_its_own_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Portrait:
        parts: tuple[Frame, Shape]

    portrait = {"parts": [{"width": 2}, {"type": "circle", "radius": 1}]}
    assert "width" in keys_at(Portrait, portrait, ("parts", "0"))
    assert "radius" in keys_at(Portrait, portrait, ("parts", "1"))
    assert keys_at(Portrait, portrait, ("parts", "2")) == {}


def test_a_key_takes_a_part_or_a_list_of_parts_whichever_its_type_names_first() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Collage:
        first: Shape | tuple[Shape, ...]
        second: tuple[Shape, ...] | Shape

    collage: Any = Collage
    square = {"type": "square"}
    key = ("collage",)
    assert build(collage, {"first": square, "second": [square]}, key=key) == Collage(
        first=Square(), second=(Square(),)
    )
    assert build(collage, {"first": [square], "second": square}, key=key) == Collage(
        first=(Square(),), second=Square()
    )
    with pytest.raises(ConfigError, match="first: should be a list"):
        build(collage, {"first": 3, "second": square}, key=key)


@pytest.mark.parametrize(
    ("annotation", "description"),
    [
        (typing.Dict, "an object"),  # noqa: UP006
        (dict, "an object"),
        (collections.abc.Mapping, "an object"),
        (typing.List, "a list"),  # noqa: UP006
        (list, "a list"),
        (typing.Tuple, "a list"),  # noqa: UP006
        (tuple, "a list"),
        (Annotated[dict, MinLen(1)], "an object of length at least 1"),
        (tuple[int, str], "a list of exactly 2: a whole number, a string"),
    ],
)
def test_a_container_of_anything_is_described_like_any_other(annotation: Any, description: str) -> None:
    part: Any = make_dataclass("Part", [("values", annotation)], frozen=True, kw_only=True)
    with pytest.raises(ConfigError, match=f"values: should be {description}, is 3"):
        build(part, {"values": 3}, key=("part",))


@pytest.mark.parametrize(
    ("word", "other_word", "edits"),
    [("", "ab", 2), ("gpro", "grpo", 1), ("gpro", "gspo", 2), ("rlo", "rloo", 1), ("ca", "abc", 3)],
)
def test_a_swap_of_neighbouring_letters_is_one_edit(word: str, other_word: str, edits: int) -> None:
    assert count_edits(word, other_word) == count_edits(other_word, word) == edits


@pytest.mark.parametrize(
    ("typed", "candidates", "best"),
    [
        ("gpro", ["gspo", "grpo", "dapo"], "grpo"),
        ("GPRO", ["GSPO", "GRPO"], "GRPO"),
        ("gpso", ["grpo", "gspo"], "gspo"),
        ("vnieppo", ["vineppo", "ppo"], "vineppo"),
        ("tempera", ["tempo", "temperature"], "temperature"),
    ],
)
def test_the_nearest_name_is_the_one_with_swapped_letters_where_others_are_as_similar(
    typed: str, candidates: list[str], best: str
) -> None:
    assert nearest(typed, candidates) == nearest(typed, candidates[::-1]) == [best]
    assert nearest("xyz", candidates) == []
