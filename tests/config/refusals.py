"""Quickstarts with something overridden: what they are told, or what is built of them."""

from __future__ import annotations

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.errors import ConfigError, ConfigIssue
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.runtime.base import PolicyIteration, Runtime

VINEPPO = "quickstart/vineppo.jsonnet"
GRPO = "quickstart/grpo.jsonnet"
PPO = "quickstart/ppo.jsonnet"
SFT = "quickstart/sft.jsonnet"
DAPO = "quickstart/dapo.jsonnet"
DPO = "quickstart/dpo.jsonnet"
SPO = "quickstart/spo_3_1.jsonnet"


def issues_of(configs: str, *overrides: str) -> tuple[ConfigIssue, ...]:
    config = load(configs.split(","), overrides, environ={})
    with pytest.raises(ConfigError) as caught:
        build(Runtime, config.data, Explanation(config))
    return caught.value.issues


def built(configs: str, *overrides: str) -> PolicyIteration:
    config = load(configs.split(","), overrides, environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def assert_told(configs: str, override: str, key: str, message: str) -> None:
    """That one issue of this key has the message, and each its file and a remedy."""
    issues = issues_of(configs, override)
    told = [issue for issue in issues if issue.key == key and message in issue.what + (issue.remedy or "")]
    assert told, "\n\n".join(issue.render() for issue in issues)
    assert all(issue.source and issue.remedy for issue in issues), [issue.render() for issue in issues]
