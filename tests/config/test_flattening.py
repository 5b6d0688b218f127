"""A configuration evaluated as one text is what it is with its imports."""

from pathlib import Path
from typing import Any

import pytest

from treetune.config import jsonnet
from treetune.config.jsonnet import CONFIGS, configurations, load

VARIABLES = {"APP_SEED": "1", "APP_DIRECTORY": "somewhere"}
ENVIRONMENT = {"seed": 1, "directory": "somewhere"}
SHIPPED = sorted(
    path.relative_to(CONFIGS)
    for path in configurations(CONFIGS)
    if path.parent.name in ("configs", "quickstart", "countdown")
)[::12]


def both_ways(monkeypatch: pytest.MonkeyPatch, *configs: str) -> dict[str, Any]:
    """The result, found alike with imports and without."""
    fast = load(configs, environ=VARIABLES).data
    with monkeypatch.context() as patch:
        patch.setattr(jsonnet, "_evaluate_flattened", jsonnet._evaluate_with_imports)
        assert load(configs, environ=VARIABLES).data == fast
    return fast


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_shipped_configurations_are_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(monkeypatch, str(path))


def test_names_roots_and_folders_stay_those_of_each_file(
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
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    alone = both_ways(monkeypatch, "a.jsonnet")
    assert alone == {**ENVIRONMENT, "x": 1, "y": 2, "late": 1, "lib": 4, "root": 5}
    assert both_ways(monkeypatch, "a.jsonnet", "d.jsonnet") == alone | {"y": 3, "text": "import 'nothing'"}
    assert both_ways(monkeypatch, "asks.jsonnet") == {**ENVIRONMENT, "me": str(tmp_path / "asks.jsonnet")}


def test_nothing_shipped_needs_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(jsonnet, "_evaluate_with_imports")
    assert load(["tables/vineppo_main.jsonnet"], environ={}).data["name"] == "vineppo_main"
