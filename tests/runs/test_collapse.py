"""Every sign of collapse is seen where it is, counts after its patience, and is silent where it isn't; a run
that collapses says so once, and told to stop it keeps the good weights and stays stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.experiment_runs import CONFIG
from tests.support.small_run import (
    computed,
    directory_of,
    engines_of,
    log_of,
    raises_after,
    sampled_requests,
    small,
    train,
)
from treetune import main as command_line
from treetune.exceptions import Collapsed
from treetune.processes import lifetime
from treetune.runtime import commands, loop
from treetune.runtime.base import Checkpoints, PolicyIteration
from treetune.runtime.diagnostics import (
    SIGNS,
    Diagnostics,
    MetricsRow,
    Sign,
    WatchedRun,
    diagnose,
    find_last_good,
    find_stopping_signs,
)
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.record import CollapseWatch, Record
from treetune.store.files import write_json

SAMPLED = WatchedRun(sampled=True, max_tokens=64)


def healthy(iteration: int, **more: float) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "train/entropy": 0.3,
        "train/grad_norm": 0.5 + 0.1 * (iteration % 3),
        "episodes/response_tokens": 40.0,
        "episodes/unfinished": 0.02,
        "episodes/mixed": 0.6,
        "episodes/reward": 0.4,
        "episodes/count": 512.0,
        "episodes/problems": 64.0,
    } | more


def history(*changes: dict[str, float]) -> list[dict[str, Any]]:
    """Ten healthy iterations, then one for each of the changes."""
    rows = [healthy(i) for i in range(10)]
    return rows + [healthy(10 + i, **change) for i, change in enumerate(changes)]


def counting(chosen: Diagnostics, rows: Sequence[MetricsRow], watched: WatchedRun = SAMPLED) -> set[Sign]:
    return {sign for sign, one in diagnose(chosen, watched, rows).items() if one.is_confirmed}


SHOWN: dict[Sign, dict[str, float]] = {
    "entropy_low": {"train/entropy": 0.014},
    "answers_short": {"episodes/response_tokens": 9.9},
    "answers_at_limit": {"episodes/response_tokens": 61.0},
    "truncated": {"episodes/unfinished": 0.51},
    "no_spread": {"episodes/mixed": 0.09},
}
NOT_SHOWN: dict[Sign, dict[str, float]] = {
    "entropy_low": {"train/entropy": 0.016},
    "answers_short": {"episodes/response_tokens": 10.1},
    "answers_at_limit": {"episodes/response_tokens": 60.0},
    "truncated": {"episodes/unfinished": 0.5},
    "no_spread": {"episodes/mixed": 0.1},
}


def test_a_healthy_run_shows_none_and_all_were_looked_for() -> None:
    found = diagnose(Diagnostics(), SAMPLED, history())
    assert set(found) == set(SIGNS)
    assert all(one.since is None and not one.is_confirmed for one in found.values())


@pytest.mark.parametrize("sign", SHOWN)
def test_a_sign_counts_once_it_was_seen_often_enough_in_a_row(sign: Sign) -> None:
    chosen = Diagnostics(patience=3)
    shown, not_shown = SHOWN[sign], NOT_SHOWN[sign]
    assert counting(chosen, history(shown, shown)) == set()
    assert counting(chosen, history(shown, shown, shown)) == {sign}
    assert counting(chosen, history(shown, shown, not_shown, shown)) == set()
    assert counting(chosen, history(shown, shown, shown, not_shown)) == set()
    found = diagnose(chosen, SAMPLED, history(not_shown, shown, shown))[sign]
    assert (found.since, found.is_confirmed) == (11, False)
    assert counting(Diagnostics(patience=1), history(not_shown)) == set()
    assert counting(Diagnostics(patience=1), history(shown)) == {sign}


OFF: dict[Sign, dict[str, Any]] = {
    "entropy_low": {"entropy_floor": None, "entropy_share": None},
    "answers_short": {"length_floor": None, "length_share": None},
    "answers_at_limit": {"limit_share": None},
    "truncated": {"unfinished_ceiling": None},
    "no_spread": {"mixed_floor": None},
    "gradient_noise": {"gradient_variation_ceiling": None},
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_without_a_threshold_is_not_looked_for(sign: Sign) -> None:
    found = diagnose(Diagnostics(patience=1, **OFF[sign]), SAMPLED, history(SHOWN.get(sign, {})))
    assert set(found) == set(SIGNS) - {sign}


def test_floors_hold_from_the_first_iteration_and_shares_after_the_beginning() -> None:
    chosen = Diagnostics(patience=1, beginning=3, length_floor=5, length_share=0.5)
    low = [healthy(0, **{"train/entropy": 0.001, "episodes/response_tokens": 4.0})]
    assert counting(chosen, low) == {"entropy_low", "answers_short"}
    falling = [healthy(i, **{"episodes/response_tokens": tokens}) for i, tokens in enumerate((40, 10, 10))]
    assert counting(chosen, falling) == set(), "these are the beginning"
    falling.append(healthy(3, **{"episodes/response_tokens": 9.9}))
    assert counting(chosen, falling) == {"answers_short"}, "less than half of 20"


def test_gradient_norms_that_do_not_settle_are_noise_and_those_that_fall_are_not() -> None:
    def norms(*values: float) -> list[dict[str, Any]]:
        return [healthy(i, **{"train/grad_norm": value}) for i, value in enumerate(values)]

    chosen = Diagnostics(patience=1, window=6, gradient_variation_ceiling=1.0)
    wild = (0.1, 5.0, 0.1, 0.1, 0.1, 0.1)  # a standard deviation of 2.0 at a mean of 0.92
    assert counting(chosen, norms(*wild)) == {"gradient_noise"}
    assert counting(chosen, norms(*wild[:-1])) == set(), "the window is not full"
    assert counting(chosen, norms(*wild, 0.5, 0.5)) == set(), "the spike has left the window"
    assert counting(chosen, norms(2.2, 1.6, 1.1, 0.9, 0.7, 0.6)) == set()
    assert counting(chosen, norms(*[0.0] * 6)) == set()
    # Two values, x in five of six iterations: the coefficient of variation is known in closed form.
    found = diagnose(chosen, SAMPLED, norms(*wild))["gradient_noise"]
    assert f"{(4.9 / 6**0.5) / ((5 + 0.5) / 6):.3g} of its mean" in found.description


def test_what_a_run_lacks_is_not_looked_for() -> None:
    shown = {name: value for change in SHOWN.values() for name, value in change.items()}
    collapsed = history(*[shown] * 3)
    assert set(diagnose(Diagnostics(), WatchedRun(sampled=False), collapsed)) == {"gradient_noise"}
    assert "answers_at_limit" not in diagnose(Diagnostics(), WatchedRun(sampled=True), collapsed)
    alone = history(*[shown | {"episodes/problems": 512.0}] * 3)  # one answer to a problem
    assert "no_spread" not in counting(Diagnostics(), alone)
    bare = [{"iteration": i, "episodes/reward": 0.5} for i in range(5)]
    assert diagnose(Diagnostics(), SAMPLED, bare) == {}
    assert diagnose(Diagnostics(), SAMPLED, []) == {}


def test_rewards_that_are_levelled_teach_nothing_though_scores_differ() -> None:
    chosen = Diagnostics(patience=2)
    levelled = {"credit/advantage_zero": 1.0}
    assert counting(chosen, history(levelled, levelled)) == {"no_spread"}
    assert counting(chosen, history(levelled, {"credit/advantage_zero": 0.999})) == set()
    words = diagnose(chosen, SAMPLED, history(levelled))["no_spread"].description
    assert words == "every advantage is 0, though answers differ in score for 0.6 of the problems"
    assert counting(chosen, history(levelled | SHOWN["no_spread"], levelled)) == {"no_spread"}
    alone = levelled | {"episodes/problems": 512.0, "episodes/mixed": 0.0}  # one answer to a problem
    assert counting(chosen, history(alone, alone)) == {"no_spread"}
    assert diagnose(chosen, SAMPLED, history(alone))["no_spread"].description == "every advantage is 0"


def test_before_its_window_or_beginning_is_over_it_is_too_early_for_a_sign() -> None:
    def early(n: int, **changes: Any) -> set[Sign]:
        found = diagnose(
            Diagnostics(window=5, beginning=2, **changes), SAMPLED, [healthy(i) for i in range(n)]
        )
        return {sign for sign, one in found.items() if one.is_too_early}

    assert early(2) == {"entropy_low", "answers_short", "gradient_noise"}
    assert early(2, entropy_share=None) == {"answers_short", "gradient_noise"}, "a floor needs no beginning"
    assert early(4) == {"gradient_noise"}
    assert early(5) == set()


def test_an_iteration_that_trained_nothing_neither_ends_a_sign_nor_adds_to_it() -> None:
    shown = SHOWN["entropy_low"]
    rows = history(shown, shown, shown)
    del rows[11]["train/entropy"]
    assert counting(Diagnostics(patience=3), rows) == set()
    rows.append(healthy(13, **shown))
    assert counting(Diagnostics(patience=3), rows) == {"entropy_low"}


def test_what_stops_is_what_may_and_the_good_weights_are_from_before_it_began() -> None:
    stop = Diagnostics(on_collapse="stop", stopping=("entropy_low", "truncated"), patience=2)
    low, cut, spread = (SHOWN[sign] for sign in ("entropy_low", "truncated", "no_spread"))

    def judged(chosen: Diagnostics, *changes: dict[str, float]) -> tuple[list[str], int | None]:
        rows = history(*changes)
        found = diagnose(chosen, SAMPLED, rows)
        return [one.sign for one in find_stopping_signs(chosen, found)], find_last_good(
            chosen, found, len(rows) - 1
        )

    assert judged(Diagnostics(patience=2), low, low) == ([], None)
    assert judged(stop, spread, spread) == ([], 11), "it may not stop the run"
    # Iteration 10 (from 0) samples with the weights after 10: they show it, those after 9 did not.
    assert judged(stop, low) == ([], 9)
    assert judged(stop, low, low) == (["entropy_low"], 9)
    assert judged(stop, low, low | cut) == (["entropy_low"], 9)
    assert judged(stop, low, cut) == ([], 10)


def test_a_stop_that_nothing_can_cause_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="none of the signs that may stop"):
        Diagnostics(on_collapse="stop", stopping=("truncated",), unfinished_ceiling=None)
    with pytest.raises(ValueError, match="none of the signs that may stop"):
        Diagnostics(on_collapse="stop", stopping=())


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.3, 0.01]), min_size=1, max_size=12), st.integers(1, 4))
def test_patience_counts_iterations_in_a_row(entropies: list[float], patience: int) -> None:
    chosen = Diagnostics(entropy_floor=0.1, entropy_share=None, patience=patience)
    rows = [healthy(i, **{"train/entropy": value}) for i, value in enumerate(entropies)]
    expected = entropies[-patience:] == [0.01] * patience
    assert ("entropy_low" in counting(chosen, rows)) == expected


# Runs that collapse

STOP = Diagnostics(
    entropy_floor=1.0,
    unfinished_ceiling=None,
    limit_share=None,
    patience=2,
    on_collapse="stop",
)
ENTROPIES = (3.0, 3.0, 3.0, 0.5, 0.5, 3.0, 3.0)
"""Below the floor in iterations 4 and 5 (as people count), of which the second makes it count: the weights
after 3 iterations are the first that show it, and those after 2 the last that don't."""


@pytest.fixture
def entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is real, and the entropy that it reports is from the table."""
    real = loop.train

    def train_with_known_entropy(
        resources: Any, trainer: Any, iteration: int, *rest: Any
    ) -> dict[str, float]:
        return real(resources, trainer, iteration, *rest) | {"train/entropy": ENTROPIES[iteration]}

    monkeypatch.setattr(loop, "train", train_with_known_entropy)


def config_of(base: Path, diagnostics: Diagnostics = STOP, **changes: Any) -> PolicyIteration:
    settings = {"iterations": len(ENTROPIES), "checkpoints": Checkpoints(every=1)} | changes
    return small(base, diagnostics=diagnostics, **settings)


def stopped(config: PolicyIteration) -> str:
    """What the run says when it stops."""
    with pytest.raises(Collapsed) as told:
        train(config)
    return str(told.value)


def said_of_entropy(config: PolicyIteration) -> list[str]:
    lines = log_of(config).splitlines()
    return [line.split(" INFO ")[1] for line in lines if " INFO " in line and "entropy_low" in line]


def column(directory: ExperimentDirectory, name: str) -> list[float]:
    return [row[name] for row in directory.read_metrics()]


@pytest.mark.usefixtures("entropies")
def test_a_stopped_run_keeps_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    message = stopped(config)
    directory = directory_of(config)
    assert directory.checkpoints() == [2, 4, 5], "the last good one, and the two newest"
    assert not (directory.checkpoint_folder(2) / "trainer").exists(), "its weights alone"
    assert f"The last checkpoint from before is {directory.checkpoint_folder(2) / 'policy'}" in message
    assert "stopped after iteration 5 of 7" in message
    assert "entropy_low since iteration 4: entropy in nats per token is below 1 (0.5)" in message
    assert column(directory, "diagnostics/entropy_low") == [0, 0, 0, 0, 1]
    assert column(directory, "diagnostics/stop") == [0, 0, 0, 0, 1]
    (line,) = said_of_entropy(config)
    assert line.startswith("warning: entropy_low in iterations 4 to 5: ")


@pytest.mark.usefixtures("entropies")
def test_the_same_command_stays_stopped_and_another_configuration_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = stopped(config_of(tmp_path))
    directory = directory_of(config_of(tmp_path))
    before = directory.metrics_file.read_bytes()
    again = config_of(tmp_path)
    assert stopped(again) == message
    assert not engines_of(again), "nothing was started for it"
    assert directory.metrics_file.read_bytes() == before

    commands.clean_up_checkpoints(again, {})
    assert directory.checkpoints() == [2, 4, 5], "tidying up keeps the good weights too"

    train(config_of(tmp_path, replace(STOP, on_collapse="warn")))
    assert directory.newest_resumable() == len(ENTROPIES)
    assert column(directory, "diagnostics/entropy_low") == [0, 0, 0, 0, 1, 0, 0]
    assert [line.split(":")[0] for line in said_of_entropy(again)] == [
        "warning",
        "entropy_low is over in iteration 6",
    ], "a line when it begins and a line when it ends"
    train(again)
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("struck", ["before the stop", "before the checkpoint", "before the line"])
@pytest.mark.usefixtures("entropies")
def test_a_run_killed_on_its_way_to_the_stop_ends_as_if_nothing_had_happened(
    struck: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = config_of(tmp_path / "undisturbed")
    message = stopped(undisturbed)

    config = config_of(tmp_path / "killed")
    with monkeypatch.context() as patch:
        owner: Any
        owner, name, calls = {
            "before the stop": (CollapseWatch, "stop_if_collapsed", 4),
            "before the checkpoint": (Record, "_write_checkpoint", 4),
            "before the line": (Record, "_write_metrics", 8),
        }[struck]
        patch.setattr(owner, name, raises_after(getattr(owner, name), calls, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(config)
    directory = directory_of(config)
    assert directory.newest_resumable() == (5 if struck == "before the stop" else 4)
    sampled = sampled_requests(config)
    assert stopped(config) == message.replace("undisturbed", "killed")
    assert sampled_requests(config) == sampled, "episodes that are there are not sampled again"
    assert computed(config)["weights"] == computed(undisturbed)["weights"]
    assert column(directory, "diagnostics/stop") == [0, 0, 0, 0, 1]


@pytest.mark.usefixtures("entropies")
def test_a_stop_between_checkpoints_writes_one_to_go_on_from(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoints=Checkpoints(every=2))
    assert "checkpoints/0002/policy" in stopped(config)
    directory = directory_of(config)
    assert directory.checkpoints() == [2, 4, 5]
    assert directory.newest_resumable() == 5


@pytest.mark.usefixtures("entropies")
def test_weights_that_collapsed_before_any_checkpoint_are_said_to_have(tmp_path: Path) -> None:
    early = replace(STOP, entropy_floor=4.0)
    assert "The start weights show it already" in stopped(config_of(tmp_path, early))
    assert directory_of(config_of(tmp_path)).checkpoints() == [1, 2]


@pytest.mark.usefixtures("entropies")
def test_without_a_stop_nothing_more_is_kept_and_the_run_is_finished(tmp_path: Path) -> None:
    directory = train(config_of(tmp_path, replace(STOP, on_collapse="warn")))
    assert directory.checkpoints() == [len(ENTROPIES) - 1, len(ENTROPIES)]
    assert "diagnostics/stop" not in directory.read_metrics()[0]


@pytest.mark.usefixtures("entropies")
def test_a_sign_that_counts_in_the_last_iteration_stops_nothing(tmp_path: Path) -> None:
    directory = train(config_of(tmp_path, iterations=5))
    assert column(directory, "diagnostics/entropy_low")[-1] == 1
    assert column(directory, "diagnostics/stop")[-1] == 0
    assert directory.newest_resumable() == 5


def test_the_command_line_ends_with_one_message_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifetime, "exit_on_signals", lambda: None)  # the test's process keeps its own
    settings = f"{{directory: '{tmp_path}', diagnostics: {{on_collapse: 'stop'}}}}"
    words = ["--configs", str(CONFIG), "--override", settings]
    assert command_line.main([*words, "print_config"]) == 0
    plain = json.loads(capsys.readouterr().out)
    directory = ExperimentDirectory(tmp_path / "small")
    write_json(directory.path / "config.json", plain)
    for i in range(2):
        row = {"iteration": i, "train/entropy": 1.0, "episodes/unfinished": 1.0}
        write_json(directory.iteration_folder(i) / "metrics.json", row)
    write_json(directory.checkpoint_folder(2) / "trainer" / "state", {})
    write_json(directory.checkpoint_folder(2) / "state.json", {})
    patient = "{diagnostics+: {patience: 2}}"
    assert command_line.main([*words, "--override", patient, "run_iteration_loop"]) == 1
    told = capsys.readouterr().err
    assert "run_iteration_loop failed:" in told and "truncated since iteration 1" in told
    assert "set on_collapse to 'warn'" in told
