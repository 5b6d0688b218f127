"""Experiments for the viewer, written by the functions that write them in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.view.report.synthetic import CODEC, metrics_row
from treetune.rollouts.storage import (
    SIGNALS,
    TOKENS,
    TokenSignals,
    write_episodes,
    write_token_signals,
    write_tokens,
    write_trajectories,
)
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.evaluation import summarise, write_evaluation
from treetune.store.checksums import write_record
from treetune.view.notes import NotedAnswer, new_note, save_note
from treetune.vocabulary import Episode, Grade, Problem, Segment, Trajectory

CONFIG: Mapping[str, Any] = {
    "type": "policy_iteration",
    "context_length": 64,
    "task": {"type": "addition_chain"},
    "rollout": {"type": "single_turn", "max_tokens": 48},
    "credit": {"type": "monte_carlo", "samples": 3},
    "selection": {"type": "all"},
    "trainer": {"learning_rate": 0.0004, "objective": {"type": "ppo"}},
    "evaluation": {"every": 1, "sets": [{"split": "validation"}]},
}
LOGPROBS, VALUES = (-0.1, -0.4, -1.5, -0.02), (0.5, 0.75, 0.25, 1.0)


def trajectory(number: int, sample: int, text: str, *, correct: bool = True, version: int = 0) -> Trajectory:
    """Builds an answer whose steps are its lines, and whose last token was injected."""
    ids = CODEC.encode(text)
    logprobs = [LOGPROBS[i % len(LOGPROBS)] for i in range(len(ids) - 1)]
    line_ends = {i + 1 for i, character in enumerate(text) if character == "\n"}
    step_ends = sorted(line_ends | {len(ids)})
    return Trajectory(
        problem=Problem(f"train/{number}", f"{number}+{number + 1}+{number + 2}=", str(3 * number + 3)),
        sample=sample,
        prompt_ids=CODEC.encode(f"{number}+{number + 1}+{number + 2}="),
        segments=(
            Segment(ids[:-1], logprobs=logprobs, policy_version=version, seconds=0.5),
            Segment(ids[-1:], origin="injected"),
        ),
        finish_reason="stop" if correct else "length",
        text=text,
        grade=Grade(
            reward=float(correct),
            outcome="ok",
            extracted=text.split("\n")[-1],
            numbers={"digits": 2.0 + sample},
        ),
        step_ends=tuple(step_ends),
        numbers={"lines/count": float(len(step_ends))},
    )


def episode(answer: Trajectory) -> Episode:
    """Builds the training row of an answer: values of its steps, and their differences as advantages."""
    values = tuple(VALUES[i % len(VALUES)] for i in range(len(answer.step_ends)))
    values_after = [*values[1:], answer.reward]
    step_of_token = [
        sum(end <= token for end in answer.step_ends) for token in range(len(answer.response_ids))
    ]
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=[True] * (len(answer.response_ids) - 1) + [False],
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=answer.segments[0].policy_version or 0,
        finish_reason=answer.finish_reason,
        advantages=[values_after[step] - values[step] for step in step_of_token],
        step_ends=answer.step_ends,
        step_values=values,
        text=answer.text,
    )


def signals(row: Episode) -> TokenSignals:
    """Builds the trainer's numbers of a row: the gaps grow with the position; the second token has none.

    A token is half as likely under the reference as under the policy, so that its KL (k3) is log 2 - 0.5.
    """
    numbers = np.arange(int(row.trained.sum()), dtype=np.float32)
    numbers[1:2] = np.nan
    logprobs = -0.25 * numbers
    return TokenSignals(
        row.trajectory,
        logprobs,
        0.5 + 0 * numbers,
        gaps=-0.125 * numbers,
        ref_logprobs=logprobs - np.float32(np.log(2)),
    )


def answers(iteration: int, problems: int = 4, samples: int = 2) -> list[Trajectory]:
    """Builds the answers of an iteration; the later the iteration, the more of them are right."""
    trajectories = []
    for number in range(problems):
        for sample in range(samples):
            right = (number + sample) % 4 <= iteration
            last = 3 * number + 3 + (0 if right else 1)
            lines = (
                f"{number}+{number + 1}={2 * number + 1}",
                f"{2 * number + 1}+{number + 2}={last}",
                f"#{last}",
            )
            trajectories.append(
                trajectory(number, sample, "\n".join(lines), correct=right, version=iteration)
            )
    return trajectories


def begin_run(path: Path, *, planned: int = 3, seed: int = 1, **config: Any) -> ExperimentDirectory:
    """Writes an experiment that has begun and has no iteration yet."""
    settings = {
        **CONFIG,
        "experiment_name": path.name,
        "directory": str(path.parent),
        "iterations": planned,
        "seed": seed,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings | config))
    (path / "manifest.json").write_text(json.dumps({"config": "0123abcd", "seed": seed, "continued": []}))
    write_tokens(path / TOKENS, CODEC, 256)
    (path / "logs").mkdir(exist_ok=True)
    return ExperimentDirectory(path)


def record_iteration(
    directory: ExperimentDirectory,
    iteration: int,
    sampled: Sequence[Trajectory] | None = None,
    *,
    with_signals: bool = True,
    **metrics: float,
) -> None:
    """Writes an iteration (from 0) as a run commits it: answers, credit, the trainer's numbers, metrics."""
    sampled = answers(iteration) if sampled is None else sampled
    folder = directory.iteration_folder(iteration)
    write_trajectories(folder / "trajectories.arrow", sampled)
    episodes = [episode(answer) for answer in sampled]
    write_episodes(folder / "episodes.arrow", episodes, CODEC)
    if with_signals:
        write_token_signals(folder / SIGNALS, [signals(row) for row in episodes])
    row = metrics_row(iteration, **metrics)
    write_record(folder / "metrics.json", row)
    directory.append_metrics(row)


def record_evaluation(directory: ExperimentDirectory, done: int, label: str = "validation") -> None:
    """Writes the evaluation after `done` iterations."""
    sampled = answers(done, problems=6)
    summary = {"split": label, "iteration": done, **summarise(sampled, 0)}
    write_evaluation(directory.evaluation_folder(done, label), summary, sampled)


def record_note(directory: ExperimentDirectory, author: str = "maria", label: str = "a label") -> None:
    """Writes a note on the first answer of the first iteration."""
    answer = answers(0)[0]
    about = NotedAnswer(
        "i1", answer.id, answer.problem.id, answer.sample, answer.problem.prompt, answer.text, score=1.0
    )
    save_note(directory, replace(new_note(about, [label], "a note"), author=author), "")


def recorded_run(
    path: Path, *, iterations: int = 3, planned: int | None = None, **config: Any
) -> ExperimentDirectory:
    """Writes a run with `iterations` of its `planned` iterations, and an evaluation after each."""
    directory = begin_run(path, planned=iterations if planned is None else planned, **config)
    for iteration in range(iterations):
        record_iteration(directory, iteration)
        record_evaluation(directory, iteration + 1)
    return directory
