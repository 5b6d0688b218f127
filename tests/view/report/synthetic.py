"""The directory of an experiment, with the files of a run and made-up numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.view.report.page import Page
from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens
from treetune.view.report.write import write_report
from treetune.vocabulary import Episode, TextCodec

CODEC = TextCodec(
    encode=lambda text: tuple(map(ord, text)), decode=lambda ids: "".join(map(chr, ids)), eos_id=3
)


def summary(pass_at_1: float, half_width: float = 0.03, **more: Any) -> dict[str, Any]:
    return {
        "split": "test",
        "n_problems": 512,
        "samples": 4,
        "pass_at_1": pass_at_1,
        "ci_low": pass_at_1 - half_width,
        "ci_high": pass_at_1 + half_width,
        "pass_at_k": {"1": pass_at_1, "4": min(1.0, pass_at_1 + 0.1)},
        "majority_vote": min(1.0, pass_at_1 + 0.05),
        "unfinished": 0.01,
        "mean_tokens": 31.4,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
    } | more


def metrics_row(iteration: int, **more: float) -> dict[str, Any]:
    progress = 1 - math.exp(-iteration / 8)
    return {
        "iteration": iteration,
        "wall_time": 1.7e9 + 9 * iteration,
        "seconds/generation": 1.9,
        "seconds/credit": 3.2,
        "seconds/training": 1.7,
        "seconds/sync": 0.06,
        "seconds/evaluation": 0.9 if iteration % 5 == 4 else 0.0,
        "seconds/commit": 0.05,
        "seconds/other": 0.1,
        "seconds/total": 7.9,
        "engine/tokens_per_second": 9000 + 400 * math.sin(iteration),
        "engine/logprob_gap_mean": 1e-6,
        "engine/logprob_gap_max": 1.2e-5,
        "engine/canary_gap": 3e-6,
        "train/loss": 0.02 * math.cos(iteration),
        "train/kl": 0.03 * progress,
        "train/entropy": 0.2 - 0.1 * progress,
        "train/grad_norm": 0.6 + 0.1 * math.sin(iteration),
        "train/clip_fraction": 0.01,
        "train/learning_rate": 2e-4,
        "episodes/reward": 0.57 + 0.35 * progress,
        "episodes/response_tokens": 31 + math.sin(iteration),
        "episodes/unfinished": 0.01,
        "episodes/count": 512,
    } | more


def episode(text: str, values: tuple[float, ...] | None, reward: float, group: str = "train/1") -> Episode:
    """Builds a row whose steps are lines; with values, a step's advantage is the change of the value."""
    ends = [i + 1 for i, character in enumerate(text) if character == "\n"]
    if not ends or ends[-1] != len(text):
        ends.append(len(text))
    advantages = None
    if values is not None:
        values_after = [*values[1:], reward]
        by_step = [after - before for before, after in zip(values, values_after, strict=True)]
        step_of_token = [sum(end <= token for end in ends) for token in range(len(text))]
        advantages = tuple(by_step[step] for step in step_of_token)
    return Episode(
        prompt_ids=CODEC.encode("12+34+56+78="),
        response_ids=CODEC.encode(text),
        trained=(True,) * len(text),
        reward=reward,
        group=group,
        trajectory=f"{group}#0",
        policy_version=0,
        advantages=advantages,
        step_ends=tuple(ends),
        step_values=values,
        text=text,
    )


EPISODES = (
    episode("46\n102\n180\n#180", (0.6, 0.7, 0.9, 1.0), 1.0, "train/1"),
    episode("46\n103\n181\n#181", (0.6, 0.7, 0.05, 0.0), 0.0, "train/2"),
    episode("46\n102\n190\n#190", (0.55, 0.7, 0.9, 0.0), 0.0, "train/3"),
)


def write_summary(path: Path, iteration: int, label: str, values: Mapping[str, Any]) -> None:
    folder = path / "evaluations" / f"{iteration:04d}" / label
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"iteration": iteration, **values}))


def write_experiment(
    path: Path,
    *,
    name: str = "quickstart/vineppo",
    iterations: int = 25,
    planned: int | None = None,
    passes: Mapping[int, float] | None = None,
    episodes: Sequence[Episode] = EPISODES,
    metrics: Callable[[int], Mapping[str, float]] = lambda iteration: {},
    **settings: Any,
) -> Path:
    """Writes a run with `iterations` of its `planned` iterations; `passes` are its evaluations' pass@1."""
    path.mkdir(parents=True)
    config = {
        "type": "policy_iteration",
        "experiment_name": name,
        "iterations": planned or iterations,
        "task": {"type": "addition_chain"},
        "rollout": {"type": "single_turn"},
        "credit": {"type": "monte_carlo", "samples": 3},
        "selection": {"type": "all"},
        "trainer": {"objective": {"type": "ppo"}},
    } | settings
    (path / "config.json").write_text(json.dumps(config))
    manifest = {
        "config": "0123abcd",
        "seed": 1,
        "python": "3.11.7",
        "machine": "Linux",
        "packages": {"torch": "2.13.0", "vllm": "0.32.0"},
        "commit": "feedbeef+changes",
        "data": {"train": "a1", "validation": "b2", "test": None},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    rows = (json.dumps(metrics_row(i, **metrics(i))) + "\n" for i in range(iterations))
    (path / "metrics.jsonl").write_text("".join(rows))
    for iteration, value in ({iterations: 0.9} if passes is None else passes).items():
        write_summary(path, iteration, "test", summary(value))
    write_tokens(path / TOKENS, CODEC, 256)
    if episodes:
        last = path / "iterations" / f"{max(0, iterations - 1):04d}" / "episodes.arrow"
        write_episodes(last, list(episodes), CODEC)
    return path


def report(*experiments: Path) -> Page:
    """Writes the report on experiments and parses it; every element must be closed."""
    page = Page(write_report(list(experiments)))
    assert page.open == []
    return page
