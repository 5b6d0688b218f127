"""What can't sample an iteration while it trains the one before, or carry answers over, is refused."""

from __future__ import annotations

import pytest

from tests.config.refusals import PPO, SFT, VINEPPO, built, issues_of

OVERLAP = "runtimes/one_step_overlap.jsonnet"
PARTIAL = "rollouts/partial.jsonnet"

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
    "partial answers that nothing corrects for": (
        f"{VINEPPO},{PARTIAL}",
        "{trainer+: {objective+: {importance_cap: null}}}",
        "rollout",
        "answers of earlier weights",
    ),
    "partial answers that are all whole": (
        f"{VINEPPO},{PARTIAL}",
        "{rollout+: {tokens_per_iteration: 48}}",
        "rollout.tokens_per_iteration",
        "none would be carried over",
    ),
    "partial answers with a stop string": (
        f"{VINEPPO},{PARTIAL}",
        "{rollout+: {rollout+: {stop: ['\\n\\n']}}}",
        "rollout.rollout.stop",
        "would not be seen",
    ),
    "partial answers, each problem once": (
        f"{VINEPPO},{PARTIAL}",
        "{problem_sampling: 'epochs'}",
        "problem_sampling",
        "passed over",
    ),
    "partial answers within another rollout": (
        f"{VINEPPO},{PARTIAL},rollouts/until_mixed.jsonnet",
        "{}",
        "rollout.rollout.type",
        "only the experiment's own rollout can",
    ),
    "more groups than are in flight": (
        f"{VINEPPO},{PARTIAL}",
        "{rollout+: {groups: 65}}",
        "rollout.groups",
        "64 problems are in flight",
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
def test_a_policy_gradient_with_truncated_importance_goes_with_both(configs: str) -> None:
    experiment = built(f"{configs},{OVERLAP},{PARTIAL}")
    assert (experiment.overlap, experiment.rollout.carries) == ("one_step", True)
