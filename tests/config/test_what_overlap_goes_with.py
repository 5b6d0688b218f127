"""Experiments that can't sample an iteration while they train the one before are refused."""

from __future__ import annotations

import pytest

from tests.config.test_nonsense_is_refused import PPO, SFT, VINEPPO, built, issues_of

OVERLAP = "runtimes/one_step_overlap.jsonnet"

REFUSED = {
    "answers of earlier weights that nothing corrects for": (
        VINEPPO,
        "{overlap: 'one_step'}",
        "trainer.objective.importance_cap",
        "answers of the version before",
    ),
    "no sampling": (SFT, "{overlap: 'one_step'}", "overlap", "samples nothing"),
    "an engine that sleeps": (
        f"{VINEPPO},{OVERLAP}",
        "{engines+: {policy+: {sleep: true}}}",
        "engines.policy.sleep",
        "has both at work at once",
    ),
    "a critic that is asked before training": (
        f"quickstart/critic_values.jsonnet,{OVERLAP}",
        "{}",
        "credit",
        "asks the trainer's critic",
    ),
    "a choice in the middle of training": (
        "quickstart/restem.jsonnet",
        "{overlap: 'one_step'}",
        "choose_checkpoint",
        "in the middle of training",
    ),
}


@pytest.mark.parametrize(("configs", "override", "key", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_trainer_and_engine_in_turn_is_refused(
    configs: str, override: str, key: str, words: str
) -> None:
    (issue,) = issues_of(configs, override)
    assert issue.key == key
    assert words in str(issue)


@pytest.mark.parametrize("configs", [VINEPPO, PPO])
def test_a_policy_gradient_with_truncated_importance_goes_with_it(configs: str) -> None:
    assert built(f"{configs},{OVERLAP}").overlap == "one_step"
