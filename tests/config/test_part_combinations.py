"""Promises of the combinations of the package's parts:

* a combination that makes no sense is refused with its key, its file and a remedy (the rows of
  `refused_combinations.tsv`);
* combinations that papers and documents use are accepted;
* an environment is asked once what it needs, and its answer comes before a run;
* a key by which another library calls a setting is answered with ours.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.support.shipped import experiment_of, issues_of
from treetune.contracts import Feature, Finding, Forks, OneLine, Turns
from treetune.domains.environments.games import GuessNumber
from treetune.findings import collect_findings
from treetune.rollouts.single_turn import SingleTurn

sys.path.append(str(Path(__file__).parents[2] / "examples/own_parts"))  # which a line imports from
LINES = Path(__file__).with_name("refused_combinations.tsv").read_text().splitlines()
ROWS = [line.split("\t") for line in LINES if not line.startswith("#")]
REFUSED = {name: columns for name, *columns in ROWS}

THREADS = "threadweaver/tiny/rl_parallel_published"
TREE = "quickstart/tree"
TURNS = ("multi_turn/maze", "multi_turn/qwen2.5-1.5b-instruct_python_GSM8K")
OVERLAP = "runtimes/one_step_overlap,rollouts/partial"
JUDGE = "type: 'judge', prompt: '{problem} {response}'"
SERVED = "engines+: {judge: {model: 'm', server: {type: 'vllm'}, context_length: 600}}"
MONTE_CARLO = "shaping: [], credit: {type: 'monte_carlo', samples: 3, "


@pytest.mark.parametrize(("configs", "override", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_a_combination_that_makes_no_sense_is_refused_with_what_does(
    configs: str, override: str, keys: str, message: str
) -> None:
    issues = issues_of(configs, override)
    assert sorted(str(issue.key) for issue in issues) == sorted(keys.split())
    assert all(issue.source and issue.remedy for issue in issues), issues
    first_key = keys.split()[0]
    messages = [f"{issue.what} {issue.remedy}" for issue in issues if issue.key == first_key]
    one_line_each = [" ".join(text.split()) for text in messages]
    expected = ".*".join(map(re.escape, message.split(" ... ")))
    assert any(re.search(expected, line) for line in one_line_each), messages


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("{type: 'addition_chain'}", "doesn't have ' ', '(', ')'"),  # those of Countdown
        # Without characters of the experiment's task, nothing is said about those of the evaluation sets.
        ("{type: 'multiplication', wording: 'words'}", "has no small alphabet"),
    ],
)
def test_a_tiny_model_compares_evaluation_sets_with_the_characters_of_the_experiments_task(
    task: str, message: str
) -> None:
    sets = ", ".join(
        f"{{name: '{set_type}', split: 'test', problems: 8, task: {{type: '{set_type}'}}}}"
        for set_type in ("addition_chain", "countdown")
    )
    issues = issues_of("quickstart/sft", f"{{task: {task}, evaluation+: {{sets: [{sets}]}}}}")
    (issue,) = [issue for issue in issues if issue.key == "model.alphabet"]
    assert message in issue.what


@pytest.mark.parametrize(
    ("configs", "override", "feature"),
    [
        (THREADS, "{shaping: [], credit: {type: 'monte_carlo'}, rollout+: {parallel: false}}", OneLine()),
        (THREADS, f"{{{MONTE_CARLO} states: {{type: 'threads'}}}}}}", Forks()),
        (f"{THREADS},rollouts/until_mixed", "{}", Forks()),
        (TREE, f"{{{MONTE_CARLO}}}}}", OneLine()),
        (TREE, "{credit: {type: 'monte_carlo', values: {type: 'siblings'}}}", OneLine()),
        (f"{TREE},rollouts/until_mixed", "{}", OneLine()),
        ("quickstart/grpo,credit/resets,rollouts/until_mixed", "{}", OneLine()),
        ("quickstart/grpo,credit/tree,rollouts/tree_last_states", "{}", OneLine()),
        ("quickstart/vineppo", f"{{{SERVED}, task+: {{grader: {{{JUDGE}}}}}}}", OneLine()),
        ("countdown/tiny_grpo", "{task+: {operators: ['*']}}", OneLine()),  # sampling needs no teacher
        *(
            (file, credit, Turns())
            for file in TURNS
            for credit in (
                "{credit: {type: 'rloo'}}",
                "{credit: {type: 'gae'}}",
                f"{{{MONTE_CARLO} states: {{type: 'turns'}}}}}}",
                "{credit: {type: 'monte_carlo', states: {type: 'turns'}, values: {type: 'siblings'}}}",
                "{credit: {type: 'gigpo'}}",
                "{credit: {type: 'tree'}}",
            )
        ),
        *(
            (f"{file},{fragments}", "{}", Turns())
            for file in TURNS
            for fragments in (
                "presets/tree_grpo",
                "rollouts/turn_tree,credit/tree",
                "rollouts/turn_tree_last_turns,credit/tree",
            )
        ),
        ("multi_turn/maze_tree", f"{{{MONTE_CARLO} states: {{type: 'turns'}}}}}}", Turns()),
    ],
)
def test_a_combination_that_makes_sense_is_accepted(configs: str, override: str, feature: Feature) -> None:
    assert feature in experiment_of(configs, override).rollout.gives


def test_c3_is_a_fragment_for_answers_in_turns() -> None:
    credit = experiment_of(f"{TURNS[0]},credit/c3").credit
    assert (type(credit).__name__, credit.samples, credit.lam) == ("MonteCarlo", 3, 1.0)


@pytest.mark.parametrize("name", ["vineppo", "ppo"])
def test_a_policy_gradient_with_truncated_importance_goes_with_answers_of_earlier_weights(name: str) -> None:
    experiment = experiment_of(f"quickstart/{name},{OVERLAP}")
    assert (experiment.overlap, experiment.rollout.carries) == ("one_step", True)


@pytest.mark.parametrize("preset", ["treerl", "spo_tree", "treepo", "tree_grpo"])
def test_published_trees_go_on_the_right_of_an_experiment(preset: str) -> None:
    assert type(experiment_of(f"quickstart/grpo,presets/{preset}").rollout).__name__ == "TreeRollout"


def test_an_evaluation_samples_answers_that_have_nothing_to_do_with_each_other() -> None:
    root = experiment_of(TREE)
    assert {type(each_set.rollout(root)) for each_set in root.evaluation.sets} == {SingleTurn}


def test_a_missing_file_of_an_environment_is_told_before_a_run(tmp_path: Path) -> None:
    search = f"{{type: 'search', corpus: ['{tmp_path}/passages.jsonl']}}"
    experiment = experiment_of(TURNS[1], f"{{rollout+: {{environment+: {{tools: [{search}]}}}}}}")
    assert experiment.missing_for_grades() == [f"{tmp_path}/passages.jsonl isn't there, which is searched"]


@dataclass(frozen=True)
class AskedGame(GuessNumber):
    """A game that counts how often it is asked what it needs."""

    asked: list[int] = field(default_factory=list, compare=False)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        self.asked.append(1)
        yield Finding("the game's dictionary isn't installed", level="missing")


def test_an_environment_is_asked_once_what_it_needs_whether_the_task_or_the_rollout_has_it() -> None:
    experiment = experiment_of(TURNS[0])
    for is_in_task in (True, False):
        game = AskedGame()
        task = replace(experiment.task, environment=game) if is_in_task else experiment.task
        rollout = replace(experiment.rollout, environment=None if is_in_task else game)
        changed = replace(experiment, task=task, rollout=rollout)
        assert changed.missing_for_grades() == ["the game's dictionary isn't installed"]
        assert game.asked == [1]
        collect_findings(changed)
        assert game.asked == [1, 1]


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
    (issue,) = issues_of("quickstart/grpo", override)
    assert remedy in str(issue.remedy)
