"""A method has one definition; the quickstart and the paper's setting call it."""

from __future__ import annotations

import pytest

from tests.support.shipped import CONFIGS
from treetune.config.explain import Explanation
from treetune.config.jsonnet import configurations, load, shown

SETTINGS = ("quickstart/{}", "polIter_rho1bSft2_{}_MATH")
DEFINITIONS = {"methods", "presets", "credit", "objectives", "selections", "rollouts"}


def explained(name: str) -> Explanation:
    return Explanation(load([f"{name}.jsonnet"], environ={}))


def test_no_name_is_two_methods() -> None:
    methods, presets = (
        {path.stem for path in configurations(CONFIGS / room)} for room in ("methods", "presets")
    )
    assert methods & presets == set()


@pytest.mark.parametrize("method", ["vineppo", "ppo", "grpo", "rloo", "restem", "dpo_positive"])
def test_the_quickstart_and_the_paper_call_the_same_definition(method: str) -> None:
    small, large = (explained(setting.format(method)) for setting in SETTINGS)
    for key in ("credit.type", "selection.type", "restart"):
        path = tuple(key.split("."))
        assert small.value(path) == large.value(path)
        assert small.source(path) == large.source(path)
    objective = ("trainer", "objective", "type")
    assert small.value(objective) == large.value(objective)
    assert small.source(objective) == large.source(objective)


@pytest.mark.parametrize("name", [path.stem for path in configurations(CONFIGS / "quickstart")])
def test_what_a_quickstart_experiment_is_comes_from_a_definition(name: str) -> None:
    explanation = explained(f"quickstart/{name}")
    for key in (("credit", "type"), ("trainer", "objective", "type")):
        source = explanation.source(key)
        assert source is not None and source.removeprefix(shown(CONFIGS) + "/").split("/")[0] in DEFINITIONS
