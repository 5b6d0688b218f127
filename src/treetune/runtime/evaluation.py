"""Measuring weights: n samples for each of a split's problems, every answer kept with its grade."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from treetune.episode_generators.base import Rollout
from treetune.runtime.base import EvaluationSet
from treetune.runtime.directory import write_json, write_whole
from treetune.runtime.run import Run
from treetune.seeds import derived_random
from treetune.vocabulary import Metrics, Trajectory

BOOTSTRAP_RESAMPLES = 2000
INTERVAL = 0.95


def due_sets(run: Run, done: int) -> list[EvaluationSet]:
    """The evaluation sets that are due after `done` iterations and not yet measured."""
    evaluation = run.config.evaluation
    last = done == run.config.iterations
    while_training = bool(evaluation.every) and done % (evaluation.every or 1) == 0
    due = [s for s in evaluation.sets if last or (while_training and s.while_training)]
    return [s for s in due if not _is_measured(run, done, s)]


def unmeasured_sets(run: Run, done: int) -> list[EvaluationSet]:
    """All evaluation sets that were not yet measured after `done` iterations."""
    return [s for s in run.config.evaluation.sets if not _is_measured(run, done, s)]


def _is_measured(run: Run, done: int, chosen: EvaluationSet) -> bool:
    return (run.directory.evaluation(done, chosen.label) / "summary.json").is_file()


def evaluate(run: Run, done: int, sets: Sequence[EvaluationSet]) -> Metrics:
    """Measures the engine's present weights, which are those after `done` iterations. Collective.

    The metrics are those of all sets measured at that point, also by an earlier, interrupted run.
    """
    if sets:
        run.wait_for_engine()
    for chosen in sets:
        folder = run.directory.evaluation(done, chosen.label)
        measure(run, done, chosen, folder, f"{chosen.label} after iteration {done}")
    metrics: Metrics = {}
    for chosen in run.config.evaluation.sets:
        if _is_measured(run, done, chosen):
            summary = json.loads((run.directory.evaluation(done, chosen.label) / "summary.json").read_text())
            for name in ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens"):
                metrics[f"evaluation/{chosen.label}/{name}"] = summary[name]
    return metrics


def measure(run: Run, done: int, chosen: EvaluationSet, folder: Path, name: str) -> None:
    """Measures the engine's present weights into `folder`, whose `summary.json` says that it is done.

    `name` is what a person reads. Collective.
    """
    config = run.config
    seed = config.evaluation.seed
    problems = list(config.task.problems(chosen.split))
    if chosen.problems is not None:
        if chosen.problems > len(problems):
            raise ValueError(
                f"evaluation set {chosen.label!r} asks for {chosen.problems} problems of the"
                f" {chosen.split} split, which has {len(problems)}: take fewer, or make the split larger"
            )
        problems = problems[: chosen.problems]
    rollout = _rollout(run, chosen)
    with run.console.phase(f"evaluating {name}", "answers", run.news) as show:
        context = run.context(
            rollout,
            seed=seed,
            iteration=0,  # the same draws for every checkpoint
            journal=folder / "journal" / f"{run.ranks.rank}.jsonl",
            progress=show,
        )
        own, _ = rollout.run(context, problems)
    trajectories = list(chain.from_iterable(run.ranks.exchange("evaluation", own)))
    if run.ranks.is_first:
        sampling = rollout.sampling
        assert sampling is not None
        summary = {
            "split": chosen.split,
            "iteration": done,
            **summarise(trajectories, seed),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        write_whole(
            folder / "answers.jsonl",
            lambda file: file.writelines(json.dumps(_row(t)) + "\n" for t in trajectories),
        )
        write_json(folder / "summary.json", summary)  # last: it says that the set is measured
        low, high = summary["ci_low"], summary["ci_high"]
        run.console.say(
            f"{name}: pass@1 {summary['pass_at_1']:.3f}"
            f" [{low:.3f}, {high:.3f}] on {summary['n_problems']} problems"
        )
    run.ranks.barrier("evaluation written")


def _rollout(run: Run, chosen: EvaluationSet) -> Rollout:
    """The run's rollout, or the evaluation's own, with the set's settings in place of its own."""
    rollout = run.config.evaluation.rollout or run.config.rollout
    given = {
        "samples": chosen.samples,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "max_tokens": chosen.max_tokens,
    }
    known = {field.name for field in fields(rollout)}  # type: ignore[arg-type]
    return replace(rollout, **{k: v for k, v in given.items() if v is not None and k in known})  # type: ignore[type-var]


def _row(trajectory: Trajectory) -> dict:
    return {
        "problem": trajectory.problem.id,
        "sample": trajectory.sample,
        "prompt": trajectory.problem.prompt,
        "gold": trajectory.problem.gold,
        "text": trajectory.text,
        "reward": trajectory.reward,
        "outcome": trajectory.grade.outcome,
        "extracted": trajectory.grade.extracted,
        "finish_reason": trajectory.finish_reason,
        "tokens": len(trajectory.response_ids),
    }


def summarise(trajectories: Sequence[Trajectory], seed: int) -> dict:
    """pass@1 with its interval, pass@k, majority vote and lengths, over problems.

    pass@1 is the mean over problems of their samples' mean reward; its 95 % interval resamples
    problems (percentile bootstrap). pass@k for k = 1, 2, 4, … up to the number of samples n is the
    unbiased ``1 - C(n-c, k)/C(n, k)`` (Chen et al. 2021, eq. 1), c being the samples of full
    reward. Majority vote: the share of problems whose most frequent extracted answer (the first
    of several) earned full reward; samples without an answer have no vote.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem.id, []).append(trajectory)
    means = [math.fsum(t.reward for t in group) / len(group) for group in groups.values()]
    low, high = bootstrap_interval(means, seed)
    n = min(len(group) for group in groups.values())
    ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
    correct = [(len(group), sum(t.reward >= 1.0 for t in group)) for group in groups.values()]
    return {
        "n_problems": len(groups),
        "samples": n,
        "pass_at_1": math.fsum(means) / len(means),
        "ci_low": low,
        "ci_high": high,
        "pass_at_k": {str(k): math.fsum(pass_at_k(n, c, k) for n, c in correct) / len(correct) for k in ks},
        "majority_vote": sum(_majority_is_right(group) for group in groups.values()) / len(groups),
        "unfinished": sum(t.unfinished for t in trajectories) / len(trajectories),
        "mean_tokens": sum(len(t.response_ids) for t in trajectories) / len(trajectories),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, of which c are right, hold a right one."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values` under resampling."""
    generator = derived_random(seed, "bootstrap")
    size = len(values)
    means = sorted(math.fsum(generator.choices(values, k=size)) / size for _ in range(BOOTSTRAP_RESAMPLES))
    tail = (1 - INTERVAL) / 2
    return means[int(tail * len(means))], means[int((1 - tail) * len(means)) - 1]


def _majority_is_right(group: Sequence[Trajectory]) -> bool:
    votes = Counter(t.grade.extracted for t in group if t.grade.extracted is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(t.grade.extracted == winner and t.reward >= 1.0 for t in group)
