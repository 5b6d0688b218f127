"""Measuring weights: n samples for each of a split's problems, every answer kept with its grade."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.rollouts import unavailable
from treetune.rollouts.base import Rollout
from treetune.rollouts.metrics import PREFIX
from treetune.rollouts.numbers import by_group, columns, evaluated, number_metrics
from treetune.runtime.base import EvaluationSet, PolicyIteration
from treetune.runtime.claims import Claim
from treetune.runtime.clock import Clock
from treetune.runtime.columns_of_ranks import trajectories_on_first
from treetune.runtime.directory import ANSWERS, MEASURE_AGAIN
from treetune.runtime.due import due_sets, is_measured
from treetune.runtime.intervals import interval_of_mean
from treetune.runtime.sampler import Sampler
from treetune.seeds import derived_random
from treetune.store.checksums import digest_of, read_record, write_record
from treetune.store.files import whole_file
from treetune.tree import answers_of
from treetune.vocabulary import Grade, Metrics, Problem, Trajectory, token_array

EVALUATED = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""What becomes a metric of the run, of all problems and of each domain's."""


def evaluate_due(sampler: Sampler, done: int, clock: Clock) -> Metrics:
    """Measures what is due after `done` iterations, on the engine's weights. Collective."""
    session = sampler.session
    with clock.phase("evaluation"):
        return evaluate(sampler, done, due_sets(session.config, session.directory, done))


def evaluate(
    sampler: Sampler, done: int, sets: Sequence[EvaluationSet], claim: Claim | None = None
) -> Metrics:
    """Measures the engine's present weights, which are those after `done` iterations. Collective.

    The metrics are those of all sets measured at that point, also by an earlier, interrupted run.
    With the first rank's `claim`, nothing is written where somebody else took over meanwhile.
    """
    directory = sampler.session.directory
    for chosen in sets:
        folder = directory.evaluation(done, chosen.label)
        measure(sampler, done, chosen, folder, f"{chosen.label} after iteration {done}", claim)
    metrics: Metrics = {}
    for chosen in sampler.session.config.evaluation.sets:
        if is_measured(directory, done, chosen):
            summary = read_record(directory.evaluation(done, chosen.label) / "summary.json", MEASURE_AGAIN)
            metrics |= _known(f"evaluation/{chosen.label}/", summary)
            for domain, own in summary.get("domains", {}).items():
                metrics |= _known(f"evaluation/{chosen.label}/{PREFIX}{domain}/", own)
            if summary.get("unavailable"):
                metrics[f"evaluation/{chosen.label}/unavailable"] = float(summary["unavailable"])
            metrics |= evaluated(chosen.label, summary)
    return metrics


def _known(beginning: str, summary: Mapping[str, Any]) -> Metrics:
    return {beginning + name: summary[name] for name in EVALUATED if summary[name] is not None}


def set_problems(config: PolicyIteration, chosen: EvaluationSet) -> list[Problem]:
    """The problems of a set, in the order of their split. ValueError if there are not enough."""
    problems = list((chosen.task or config.task).problems(chosen.split))
    if chosen.problems is None:
        return problems
    if chosen.problems > len(problems):
        raise ValueError(
            f"evaluation set {chosen.label!r} asks for {chosen.problems} problems of the"
            f" {chosen.split} split, which has {len(problems)}: take fewer, or make the split larger"
        )
    if chosen.choose == "first":
        return problems[: chosen.problems]
    generator = derived_random(config.evaluation.seed, "evaluation problems")
    return [problems[i] for i in sorted(generator.sample(range(len(problems)), chosen.problems))]


def measure(
    sampler: Sampler, done: int, chosen: EvaluationSet, folder: Path, name: str, claim: Claim | None = None
) -> None:
    """Measures the engine's present weights into `folder`, whose `summary.json` says that it is done.

    `name` is what a person reads. Collective.
    """
    session, config = sampler.session, sampler.session.config
    seed = config.evaluation.seed
    sampler.ready()
    problems = set_problems(config, chosen)
    rollout = chosen.rollout(config)
    lengths = {problem.id: len(session.model.codec.encode_prompt(problem)) for problem in problems}
    answerable = [problem for problem in problems if lengths[problem.id] < config.context_length]
    number = session.ranks.from_first("claim", 0 if claim is None else claim.number)
    journal = folder / "journal" / f"{number}-{session.ranks.rank}.jsonl"
    with (
        sampler.phase(f"evaluating {name}", "answers") as show,
        sampler.grader_of(chosen.task) as grader,
    ):
        context = sampler.context(
            rollout,
            seed=seed,
            iteration=0,  # the same draws for every checkpoint
            journal=journal,
            journals=[other for other in sorted(journal.parent.glob("*.jsonl")) if other != journal],
            progress=show,
            task=chosen.task,
            grader=grader,
            reads_logprobs=False,
        )
        # Every rank has seen the journals before one of them writes.
        session.ranks.barrier("evaluation begins")
        own = answers_of(rollout.run(context, answerable)[0]) if answerable else []
        services = by_group(sampler.service_metrics(grader))
    unavailable.tell(context, f"evaluating {name}", own)
    trajectories = trajectories_on_first(session.ranks, "evaluation", own)
    counts = Counter(one.problem.id for one in trajectories)
    other = next((p.id for p in answerable if counts[p.id] != chosen.samples), None)
    found = (other, counts[other]) if other is not None else None
    if found := session.ranks.from_first("answers to each", found):
        raise ValueError(
            f"evaluating {name}: the rollout {type(rollout).__name__} gave {found[1]} answers to the problem"
            f" {found[0]}, and the set asks for {chosen.samples} of each, so that its numbers would be of"
            " something else: leave out the rollout's property sampler, and answers are sampled plainly"
        )
    if session.ranks.is_first:
        trajectories += [
            _unanswered(problem, sample, lengths[problem.id], config.context_length)
            for problem in problems
            if lengths[problem.id] >= config.context_length
            for sample in range(chosen.samples)
        ]
        if claim is not None and claim.lost():
            session.console.say(
                f"evaluating {name}: taken over by another process while this one stood still"
            )
        else:
            summary = _summary(rollout, chosen, done, trajectories, len(problems) - len(answerable), seed)
            summary |= services
            write_evaluation(folder, summary, trajectories)
            session.console.say(f"{name}: {_in_words(summary)}")
    session.ranks.barrier("evaluation written")


def _summary(
    rollout: Rollout,
    chosen: EvaluationSet,
    done: int,
    trajectories: Sequence[Trajectory],
    too_long: int,
    seed: int,
) -> dict[str, Any]:
    sampling = rollout.sampling
    assert sampling is not None
    return {
        "split": chosen.split,
        "iteration": done,
        **summarise(trajectories, seed),
        **by_domain(trajectories, seed),
        "too_long": too_long,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        **by_group(number_metrics(columns(trajectories))),
    }


def by_domain(trajectories: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    """`summarise` for each domain, where there are several; a domain of which nothing was graded has none."""
    of_domain: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        if one.problem.domain:
            of_domain.setdefault(one.problem.domain, []).append(one)
    if len(of_domain) < 2:
        return {}
    graded = {name: own for name, own in sorted(of_domain.items()) if any(t.grade.is_known for t in own)}
    return {"domains": {name: summarise(own, seed) for name, own in graded.items()}}


def write_evaluation(folder: Path, summary: dict[str, Any], trajectories: Iterable[Trajectory]) -> None:
    """A measured set: all answers, then the summary, which has their checksum."""
    with whole_file(folder / ANSWERS) as file:
        file.writelines(json.dumps(_row(one)) + "\n" for one in trajectories)
    # Last: it says that the set is measured.
    write_record(folder / "summary.json", summary | {"answers": digest_of(folder / ANSWERS)})


def _in_words(summary: dict[str, Any]) -> str:
    note = f", {summary['too_long']} of them too long to be asked" if summary["too_long"] else ""
    by_domain = ", ".join(
        f"{name} {own['pass_at_1']:.3f}" for name, own in summary.get("domains", {}).items()
    )
    return (
        f"pass@1 {summary['pass_at_1']:.3f} [{summary['ci_low']:.3f}, {summary['ci_high']:.3f}]"
        f" on {summary['n_problems']} problems{note}{f' ({by_domain})' if by_domain else ''}"
    )


def _unanswered(problem: Problem, sample: int, length: int, context_length: int) -> Trajectory:
    """What stands for an answer to a problem that can't be asked."""
    message = f"the prompt of {length} tokens fills the context of {context_length}"
    return Trajectory(
        problem=problem,
        sample=sample,
        prompt_ids=token_array(()),
        segments=(),
        finish_reason="length",
        text="",
        grade=Grade(reward=0.0, outcome="no_answer", message=message),
        step_ends=(),
    )


def _row(trajectory: Trajectory) -> dict:
    return {
        "problem": trajectory.problem.id,
        "sample": trajectory.sample,
        **({"domain": trajectory.problem.domain} if trajectory.problem.domain else {}),
        "prompt": trajectory.problem.prompt,
        "gold": trajectory.problem.gold,
        "text": trajectory.text,
        "reward": trajectory.reward if trajectory.grade.is_known else None,
        "outcome": trajectory.grade.outcome,
        "extracted": trajectory.grade.extracted,
        "finish_reason": trajectory.finish_reason,
        "tokens": len(trajectory.response_ids),
        **({"message": trajectory.grade.message} if not trajectory.grade.is_known else {}),
        **({"grade": dict(trajectory.grade.numbers)} if trajectory.grade.numbers else {}),
        **by_group(trajectory.numbers),
    }


def summarise(trajectories: Sequence[Trajectory], seed: int) -> dict:
    """pass@1 with its interval, pass@k, majority vote and lengths, over problems.

    pass@1 is the mean over problems of the share of their samples that are right; for its 95 % interval
    see `interval_of_mean`. pass@k for k = 1, 2, 4, … up to the number of samples n is the
    unbiased ``1 - C(n-c, k)/C(n, k)`` (Chen et al. 2021, eq. 1), c being the samples of full
    reward. Majority vote: the share of problems whose most frequent extracted answer (the first
    of several) earned full reward; samples without an answer have no vote. Where a grader says that an
    answer is right and not what it says, there is no vote: problems of such a domain are left out, and it is
    None where all are.

    What nobody could grade is no part of these: a problem has the samples that were graded, is left out
    of pass@k where it has fewer than k, and of everything where it has none. `unavailable` counts them.
    """
    groups: dict[str, list[Trajectory]] = {}
    samples: Counter[str] = Counter()
    for trajectory in trajectories:
        samples[trajectory.problem.id] += 1
        if trajectory.grade.is_known:
            groups.setdefault(trajectory.problem.id, []).append(trajectory)
    means = [sum(t.grade.correct for t in group) / len(group) for group in groups.values()]
    low, high = interval_of_mean(means, seed)
    n = min(samples.values())
    correct = [(len(group), sum(t.grade.correct for t in group)) for group in groups.values()]
    most = max(len(group) for group in groups.values())
    ks = [2**i for i in range(n.bit_length()) if 2**i <= min(n, most)]
    silent = {t.problem.domain for t in trajectories if t.grade.correct and t.grade.extracted is None}
    voting = [group for group in groups.values() if group[0].problem.domain not in silent]
    return {
        "n_problems": len(groups),
        "samples": n,
        "pass_at_1": math.fsum(means) / len(means),
        "ci_low": low,
        "ci_high": high,
        "pass_at_k": {str(k): _mean_pass_at_k([one for one in correct if one[0] >= k], k) for k in ks},
        "majority_vote": sum(map(_majority_is_right, voting)) / len(voting) if voting else None,
        "unfinished": sum(t.unfinished for t in trajectories) / len(trajectories),
        "mean_tokens": sum(len(t.response_ids) for t in trajectories) / len(trajectories),
        "unavailable": sum(not t.grade.is_known for t in trajectories),
    }


def _mean_pass_at_k(correct: Sequence[tuple[int, int]], k: int) -> float:
    """Over problems of so many answers, of which so many are right."""
    return math.fsum(pass_at_k(n, c, k) for n, c in correct) / len(correct)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, of which c are right, hold a right one."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _majority_is_right(group: Sequence[Trajectory]) -> bool:
    votes = Counter(t.grade.extracted for t in group if t.grade.extracted is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(t.grade.extracted == winner and t.grade.correct for t in group)
