"""What makes no sense together is told with its key, its file and a remedy, before anything starts."""

from __future__ import annotations

import pytest

from tests.config.refusals import DAPO, DPO, GRPO, PPO, SFT, SPO, VINEPPO, assert_told, issues_of

NONSENSE = {
    "one answer for a group": (GRPO, "{rollout+: {samples: 1}}", "credit", "needs 2 answers"),
    "one answer for the others' mean": (
        "quickstart/rloo.jsonnet",
        "{rollout+: {samples: 1}}",
        "credit",
        "2 answers",
    ),
    "no advantages": (GRPO, "{credit: {type: 'none'}}", "trainer.objective", "needs advantages"),
    "a critic that nobody asks": (
        PPO,
        "{trainer+: {objective: {type: 'mle'}}}",
        "credit",
        "needs an objective that learns from advantages",
    ),
    "continuations that nobody asks for": (
        VINEPPO,
        "{trainer+: {objective: {type: 'mle'}}}",
        "credit",
        "its continuations cost most",
    ),
    "continuations that are all the same": (
        VINEPPO,
        "{credit+: {temperature: 0}}",
        "credit.temperature",
        "the same",
    ),
    "siblings of an only answer": (
        VINEPPO,
        "{credit+: {siblings_count_into_prompt_value: true}, rollout+: {samples: 1}}",
        "credit",
        "counts the others",
    ),
    "a policy gradient without a policy": (
        SFT,
        "{credit: {type: 'outcome'}, trainer+: {objective: {type: 'ppo'}}}",
        "trainer.objective",
        "needs answers that the policy samples",
    ),
    "pairs for nobody": (
        GRPO,
        "{selection: {type: 'preference_pairs'}}",
        "selection",
        "objective that compares pairs",
    ),
    "no pairs": (DPO, "{selection: {type: 'all'}}", "trainer.objective", "needs pairs of answers"),
    "pairs of one answer": (DPO, "{rollout+: {samples: 1}}", "selection", "needs 2 answers"),
    "a critic of what is thrown away": (PPO, "{restart: 'every_iteration'}", "restart", "goes on learning"),
    "a batch that isn't whole": (
        SPO,
        "{selection: {type: 'correct_only'}}",
        "trainer.objective",
        "all answers of the",
    ),
    "a step that would never be left out": (
        PPO,
        "{trainer+: {skip_without_advantage: true}}",
        "trainer",
        "there before training begins",
    ),
    "importance of what nobody sampled": (
        SFT,
        "{trainer+: {objective: {type: 'spo', loss_on: 'all', normalise_by: 'batch', importance_cap: 2}}}",
        "trainer.objective",
        "importance_cap compares",
    ),
    "shaping beside continuations": (
        VINEPPO,
        "{shaping: [{type: 'wrong_answers'}]}",
        "shaping.0",
        "needs a credit for what whole answers earn",
    ),
    "shaping twice": (
        GRPO,
        "{shaping: [{type: 'wrong_answers'}, {type: 'wrong_answers', penalty: 2}]}",
        "shaping",
        "wrong_answers",
    ),
    "shaping of one answer": (
        "quickstart/reinforce_pp.jsonnet",
        "{shaping: [{type: 'length_penalty'}], rollout+: {samples: 1}}",
        "shaping.0",
        "needs 2 answers",
    ),
    "shaping that never sets in": (
        GRPO,
        "{shaping: [{type: 'length_penalty', from_iteration: 25}]}",
        "shaping.0.from_iteration",
        "there are only 25",
    ),
    "further problems of none": (
        DAPO,
        "{problems_per_iteration: null, rollout+: {groups: 9}, selection: {type: 'all'}}",
        "problems_per_iteration",
        "none left",
    ),
    "more groups than rounds": (
        DAPO,
        "{rollout+: {groups: 641}, selection: {type: 'all'}}",
        "rollout.groups",
        "640",
    ),
    "groups that nobody trains on": (
        DAPO,
        "{selection+: {at_most: 2}}",
        "rollout.groups",
        "make the two equal",
    ),
    "rounds within rounds": (
        DAPO,
        "{rollout+: {local old = super.rollout, rollout: {type: 'until_mixed', rollout: old, groups: 3}}}",
        "rollout.rollout",
        "within another",
    ),
    "rounds of demonstrations": (
        DAPO,
        "{rollout+: {rollout: {type: 'demonstrations', samples: 2}}, shaping: []}",
        "rollout",
        "samples until answers differ",
    ),
    "a set of one answer four times": (
        VINEPPO,
        "{evaluation+: {sets: [{split: 'test', samples: 4, temperature: 0}]}}",
        "evaluation.sets.0.temperature",
        "same answer 4 times",
    ),
    "sets of the same name": (
        VINEPPO,
        "{evaluation+: {sets: [{split: 'test'}, {split: 'test'}]}}",
        "evaluation.sets",
        "test",
    ),
    "sets that nobody answers": (
        SFT,
        "{evaluation+: {rollout: null}}",
        "evaluation.rollout",
        "rollout that samples",
    ),
    "a choice on no set": (
        "quickstart/restem.jsonnet",
        "{choose_checkpoint+: {set: 'held_out'}}",
        "choose_checkpoint.set",
        "only validation, test",
    ),
    "a name that leaves the folder": (
        VINEPPO,
        "{experiment_name: 'a/../../../x'}",
        "experiment_name",
        "no name for",
    ),
    "a name that begins at the root": (
        VINEPPO,
        "{experiment_name: '/tmp/x'}",
        "experiment_name",
        "no name for",
    ),
    "a name of 300 characters": (
        VINEPPO,
        "{experiment_name: std.repeat('x', 300)}",
        "experiment_name",
        "300 bytes",
    ),
    "a name of two lines": (VINEPPO, "{experiment_name: 'a\\nb'}", "experiment_name", "no name for"),
    "a set that is two folders": (
        VINEPPO,
        "{evaluation+: {sets: [{split: 'test', name: 'a/b'}]}}",
        "evaluation.sets.0.name",
        "no name for",
    ),
    "a set beyond the split": (
        VINEPPO,
        "{evaluation+: {sets: [{split: 'test', problems: 1001}]}}",
        "evaluation.sets.0.problems",
        "has 1000",
    ),
    "more problems than there are": (
        VINEPPO,
        "{problems_per_iteration: 100001}",
        "problems_per_iteration",
        "100000",
    ),
    "a minibatch beyond the batch": (
        VINEPPO,
        "{trainer+: {minibatch_size: 513}}",
        "trainer.minibatch_size",
        "512",
    ),
    "a warm-up beyond training": (
        VINEPPO,
        "{trainer+: {schedule+: {steps: 26}}}",
        "trainer.schedule.steps",
        "training has 25",
    ),
    "a score beyond the best": (
        "quickstart/restem.jsonnet",
        "{selection+: {reward_threshold: 1.5}}",
        "selection.reward_threshold",
        "scores 1",
    ),
    "every answer imitated": (
        "quickstart/restem.jsonnet",
        "{selection: {type: 'all'}}",
        "selection.type",
        "wrong ones too",
    ),
    "a gradient of other weights": (
        GRPO,
        "{restart: 'every_iteration'}",
        "restart",
        "where answers were sampled",
    ),
    "an alphabet without the task's characters": (
        SFT,
        "{model+: {alphabet: '0123456789'}}",
        "model.alphabet",
        "lacks '\\n', '#', '+', '='",
    ),
    "threads without their tags": (
        "threadweaver/tiny/rl_parallel_published.jsonnet",
        "{model: {type: 'tiny', context_length: 2048}}",
        "model.added_tokens",
        "tags of threads as single tokens",
    ),
    "an analysis of advantages that nobody gives": (
        SFT,
        "{analyzers: [{type: 'advantage_distribution'}]}",
        "analyzers.0",
        "it shows them",
    ),
    "an analysis of answers that nobody sampled": (
        SFT,
        "{analyzers: [{type: 'diversity'}]}",
        "analyzers.0",
        "it looks at answers",
    ),
    "an analysis of a checkpoint after the end": (
        VINEPPO,
        "{analyzers: [{type: 'weight_distance', checkpoints: [26]}]}",
        "analyzers.0.checkpoints",
        "beyond the last, 25",
    ),
    "gradients of other weights": (
        "quickstart/restem.jsonnet",
        "{analyzers: [{type: 'gradient_variance'}]}",
        "analyzers.0.type",
        "trains the start weights anew",
    ),
    "a preset on a corpus": (
        "quickstart/sft.jsonnet,presets/grpo_as_published.jsonnet",
        "{}",
        "presets.0.name",
        "has demonstrations",
    ),
    "two presets": (
        "quickstart/dapo.jsonnet,presets/grpo_as_published.jsonnet",
        "{}",
        "presets.1.name",
        "dapo and grpo",
    ),
    "a preset on the left": (
        "presets/grpo_as_published.jsonnet,quickstart/ppo.jsonnet",
        "{}",
        "presets.0.name",
        "on the left",
    ),
    "a preset for a corpus": (
        "quickstart/vineppo.jsonnet,presets/greedy_jsd.jsonnet",
        "{}",
        "presets.0.name",
        "goes on experiments with demonstrations",
    ),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_what_makes_no_sense_together_is_told_with_its_key_its_file_and_a_remedy(nonsense: str) -> None:
    assert_told(*NONSENSE[nonsense])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("{lr: 1}", "{trainer+: {learning_rate: …}}"),
        ("{trainer+: {lr: 1}}", "did you mean 'learning_rate'?"),
        ("{batch_size: 1}", "{trainer+: {minibatch_size: …}}"),
        ("{rollout+: {num_generations: 4}}", "did you mean 'samples'?"),
        ("{rollout+: {max_new_tokens: 4}}", "did you mean 'max_tokens'?"),
    ],
)
def test_a_key_that_other_libraries_have_is_answered_with_ours(override: str, remedy: str) -> None:
    (issue,) = issues_of(GRPO, override)
    assert remedy in str(issue.remedy)
