"""A few stored answers, and what each credit method gives their steps, as `replay` computes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts import tabular_mdp as mdp
from tests.runtime.in_process import sampled_requests, small, train
from treetune.rollouts.credit import Gae, Group
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.trainers.ranks import Ranks
from treetune_lab.analyzers.command import run_analyzers
from treetune_lab.analyzers.credit_microscope import OWN, TRUTH, CreditMicroscope, choose
from treetune_lab.analyzers.step_credit import Shown, StepCredit
from treetune_lab.values.sampled import Bisect

PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two iterations; what is cut off earns a half. DeepSpeed remembers a process group that was left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        config = small(
            tmp_path_factory.mktemp("looked_at"),
            rollout=SingleTurn(samples=3, max_tokens=12, unfinished_reward=0.5),
            credit=MonteCarlo(samples=2),
        )
        yield config, train(config)


def looked_at(run: tuple[PolicyIteration, ExperimentDirectory], **settings: Any) -> dict[str, Any]:
    config, directory = run
    given: dict[str, Any] = {"problems": 3, "answers": 2, **settings}
    analyzer = CreditMicroscope(**given)
    label = "-".join([*analyzer.methods, str(analyzer.truth), str(analyzer.iterations)])
    analyzer = replace(analyzer, name=label)
    plain = {**PLAIN, "analyzers": [{"type": "credit_microscope", "name": label}]}
    assert run_analyzers(replace(config, analyzers=(analyzer,)), plain) == 0
    assert (directory.analysis(label) / "figure.png").is_file()
    found = json.loads((directory.analysis(label) / "result.json").read_text())
    return found["numbers"]["by_iteration"]


def test_the_runs_own_credit_is_shown_without_sampling(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    before = sampled_requests(run[0])
    (found,) = looked_at(run).values()
    assert sampled_requests(run[0]) == before
    folder = run[1].iteration(1)
    episodes = {one.trajectory: one for one in read_episodes(folder / "episodes.arrow")}
    trajectories = {one.id: one for one in read_trajectories(folder / "trajectories.arrow")}
    assert len(found["answers"]) == 2
    for one in found["answers"]:
        episode, (credit,) = episodes[one["answer"]], one["credit"].values()
        assert "".join(one["steps"]) == trajectories[one["answer"]].text
        assert [shown["value"] for shown in credit["values"]] == list(episode.step_values or ())
        assert [shown["value"] for shown in credit["advantages"]] == pytest.approx(
            [episode.advantages[end - 1] for end in episode.step_ends]  # type: ignore[index]
        )
        assert all(shown["low"] <= shown["value"] <= shown["high"] for shown in credit["values"])


def test_methods_stand_beside_it_and_what_the_run_stored_is_not_sampled_again(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    before = sampled_requests(run[0])
    (found,) = looked_at(run, methods={"the same": MonteCarlo(samples=2), "GRPO": Group()}).values()
    assert sampled_requests(run[0]) == before
    for one in found["answers"]:
        assert one["credit"]["the same"] == one["credit"][OWN]
        group = one["credit"]["GRPO"]
        assert group["values"] == [None] * len(one["steps"])
        assert len({shown["value"] for shown in group["advantages"]}) == 1
        assert all(shown["low"] is None for shown in group["advantages"])
    assert found["costs"]["the same"]["sampled_tokens"] == 0


def test_other_methods_and_the_truth_are_sampled_from_the_weights_of_then(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    methods = {"K=5": MonteCarlo(samples=5), "bisect": MonteCarlo(samples=5, values=Bisect(threshold=2.0))}
    by_iteration = looked_at(run, methods=methods, truth=16, iterations="all")
    assert list(by_iteration) == ["0", "1"]
    for found in by_iteration.values():
        for one in found["answers"]:
            assert list(one["credit"]) == [OWN, "K=5", "bisect", TRUTH]
            five, halved = one["credit"]["K=5"], one["credit"]["bisect"]
            # Nothing is halved: the prompt alone is valued, by the same continuations, and all is one step.
            assert halved["values"] == [five["values"][0]] + [None] * (len(one["steps"]) - 1)
            assert len({shown["value"] for shown in halved["advantages"]}) == 1
            width = {
                name: of["values"][0]["high"] - of["values"][0]["low"] for name, of in one["credit"].items()
            }
            assert width[TRUTH] < width["K=5"] < width[OWN]
        assert found["costs"]["K=5"]["sampled_tokens"] > found["costs"]["bisect"]["sampled_tokens"] == 0


def shown(*values: float) -> StepCredit:
    return StepCredit((None,) * len(values), tuple(map(Shown, values)))


def test_answers_are_chosen_on_which_methods_differ_right_and_wrong_ones_of_different_problems() -> None:
    begun, right_end, wrong_end = (mdp.A, mdp.END_OF_STEP), (mdp.A, mdp.EOS), (mdp.B, mdp.EOS)
    answers = [
        replace(mdp.trajectory((*begun, *end), sample=place), problem=problem)
        for problem in mdp.problems(3)
        for place, end in enumerate([right_end, right_end, wrong_end, wrong_end])
    ]
    right = [one for one in answers if one.grade.correct]
    wrong = [one for one in answers if not one.grade.correct]
    assert len(right) == len(wrong) == 6
    one = {answer.id: shown(1.0, 1.0) for answer in answers}
    other = {answer.id: shown(100.0, 100.0) for answer in answers}
    assert choose(answers, {"a": one, "b": other}, 2) == [right[0], wrong[0]], "a factor is no difference"
    for place, answer in ((3, right[2]), (4, right[3]), (5, wrong[1])):
        other[answer.id] = shown(100.0, -100.0 * place)
    chosen = choose(answers, {"a": one, "b": other}, 3)
    assert chosen == [right[3], wrong[1], next(w for w in wrong if w.problem != wrong[1].problem)]
    both_of_one_problem = choose(answers, {"a": one, "b": other}, 12)
    assert len(both_of_one_problem) == 12
    assert right[2] in both_of_one_problem


def test_a_run_whose_critic_gives_advantages_in_training_needs_methods(
    run: tuple[PolicyIteration, ExperimentDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, credit=Gae())
    train(config)
    analyzer = CreditMicroscope()
    plain = {**PLAIN, "analyzers": [{"type": "credit_microscope"}]}
    assert run_analyzers(replace(config, analyzers=(analyzer,)), plain) == 1
    assert "credit_microscope.jsonnet" in capsys.readouterr().out
