"""Measures weights: n samples for each of a split's problems, every answer kept with its grade.

Several processes, also on several machines, may measure the checkpoints of one experiment: they share the
sets by claims."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from treetune.exceptions import CheckpointGone
from treetune.rollouts import unavailable
from treetune.rollouts.metrics import PREFIX
from treetune.rollouts.numbers import EVALUATED, by_group, columns, evaluated, number_metrics
from treetune.rollouts.storage import answer_row
from treetune.runtime.base import EvaluationSet, PolicyIteration
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.console import Clock
from treetune.runtime.directory import (
    ANSWERS,
    MEASURE_AGAIN,
    ExperimentDirectory,
    is_measured,
    missing_sets,
)
from treetune.runtime.generation import trajectories_on_first
from treetune.runtime.intervals import interval_of_mean
from treetune.runtime.sampler import Sampler
from treetune.seeds import derived_random
from treetune.store.checksums import digest_of, read_record, write_record
from treetune.store.files import whole_file
from treetune.tree import answers_of
from treetune.vocabulary import Grade, Metrics, Problem, Trajectory, token_array

FOLLOW_EVERY_S = 5.0

Verdict = Literal["ours", "another's", "measured"]


def evaluate_due(sampler: Sampler, done: int, clock: Clock) -> Metrics:
    """Measures what is due after `done` iterations, on the engine's weights. Collective."""
    session = sampler.session
    with clock.phase("evaluation"):
        return evaluate(sampler, done, missing_sets(session.config, session.directory, done))


def evaluate(
    sampler: Sampler, done: int, sets: Sequence[EvaluationSet], claim: Claim | None = None
) -> Metrics:
    """Measures the engine's present weights, which are those after `done` iterations. Collective.

    The metrics are those of all sets measured at that point, also by an earlier, interrupted run.
    With the first rank's `claim`, nothing is written where somebody else took over meanwhile.
    """
    directory = sampler.session.directory

    def known(beginning: str, summary: Mapping[str, Any]) -> Metrics:
        return {beginning + name: summary[name] for name in EVALUATED if summary[name] is not None}

    for chosen in sets:
        folder = directory.evaluation(done, chosen.label)
        measure(sampler, done, chosen, folder, f"{chosen.label} after iteration {done}", claim)
    metrics: Metrics = {}
    for chosen in sampler.session.config.evaluation.sets:
        if is_measured(directory, done, chosen):
            summary = read_record(directory.evaluation(done, chosen.label) / "summary.json", MEASURE_AGAIN)
            metrics |= known(f"evaluation/{chosen.label}/", summary)
            for domain, own in summary.get("domains", {}).items():
                metrics |= known(f"evaluation/{chosen.label}/{PREFIX}{domain}/", own)
            if summary.get("unavailable"):
                metrics[f"evaluation/{chosen.label}/unavailable"] = float(summary["unavailable"])
            metrics |= evaluated(chosen.label, summary)
    return metrics


def set_problems(config: PolicyIteration, chosen: EvaluationSet) -> list[Problem]:
    """Returns the problems of a set, in the order of their split. Raises ValueError if there are not
    enough."""
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
    # Held up to the summary, whose majority vote asks which answers are equal.
    with sampler.grader_of(chosen.task) as grader:
        with sampler.phase(f"evaluating {name}", "answers") as show:
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
        unavailable.report(context, f"evaluating {name}", own)
        trajectories = trajectories_on_first(session.ranks, "evaluation", own)
        counts = Counter(one.problem.id for one in trajectories)
        other = next((p.id for p in answerable if counts[p.id] != chosen.samples), None)
        found = (other, counts[other]) if other is not None else None
        if found := session.ranks.from_first("answers to each", found):
            raise ValueError(
                f"evaluating {name}: the rollout {type(rollout).__name__} gave {found[1]} answers to the"
                f" problem {found[0]}, and the set asks for {chosen.samples} of each, so that its numbers"
                " would be of something else: leave out the rollout's property sampler, and answers"
                " are sampled plainly"
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
                assert rollout.sampling is not None
                summary = {
                    "split": chosen.split,
                    "iteration": done,
                    **summarise(trajectories, seed, grader.same_answer),
                    **by_domain(trajectories, seed, grader.same_answer),
                    "too_long": len(problems) - len(answerable),
                    "temperature": rollout.sampling.temperature,
                    "top_p": rollout.sampling.top_p,
                    "seed": seed,
                    **by_group(number_metrics(columns(trajectories))),
                    **services,
                }
                write_evaluation(folder, summary, trajectories)
                session.console.say(f"{name}: {_in_words(summary)}")
        session.ranks.barrier("evaluation written")


SameAnswer = Callable[[str, str, Problem], bool | None]
"""Says whether two answers to a problem are equal; None where nobody knows."""


def by_domain(
    trajectories: Sequence[Trajectory], seed: int, same_answer: SameAnswer | None = None
) -> dict[str, Any]:
    """Returns `summarise` of each domain, where there are several; a domain without a graded answer has
    none."""
    of_domain: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        if one.problem.domain:
            of_domain.setdefault(one.problem.domain, []).append(one)
    if len(of_domain) < 2:
        return {}
    graded = {name: own for name, own in sorted(of_domain.items()) if any(t.grade.is_known for t in own)}
    return {"domains": {name: summarise(own, seed, same_answer) for name, own in graded.items()}}


def write_evaluation(folder: Path, summary: dict[str, Any], trajectories: Iterable[Trajectory]) -> None:
    """Writes a measured set: all answers, then the summary, which has their checksum."""
    with whole_file(folder / ANSWERS) as file:
        file.writelines(json.dumps(answer_row(one)) + "\n" for one in trajectories)
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
    """Returns the answer that stands for a problem whose prompt fills the context."""
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


def summarise(
    trajectories: Sequence[Trajectory], seed: int, same_answer: SameAnswer | None = None
) -> dict[str, Any]:
    """Returns pass@1 with its interval, pass@k, majority vote and lengths, over problems.

    pass@1 is the mean over problems of the share of their samples that are right; for its 95 % interval
    see `interval_of_mean`. pass@k for k = 1, 2, 4, … up to the number of samples n is the
    unbiased ``1 - C(n-c, k)/C(n, k)`` (Chen et al. 2021, eq. 1), c being the samples of full
    reward. Majority vote: the share of problems whose most frequent extracted answer (the first
    of several) earned full reward; samples without an answer have no vote. Answers that `same_answer` calls
    equal, however they are written, have one vote together, and so have all right ones. Where a grader says
    that an answer is right and not what it says, there is no vote: problems of such a domain are left out,
    and it is None where all are.

    Answers that nobody could grade are no part of these: a problem has the samples that were graded, is left
    out of pass@k where it has fewer than k, and of everything where it has none. `unavailable` counts them.
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

    def mean_pass_at(k: int) -> float:
        each = [pass_at_k(count, right, k) for count, right in correct if count >= k]
        return math.fsum(each) / len(each)

    silent = {t.problem.domain for t in trajectories if t.grade.correct and t.grade.extracted is None}
    voting = [group for group in groups.values() if group[0].problem.domain not in silent]
    return {
        "n_problems": len(groups),
        "samples": n,
        "pass_at_1": math.fsum(means) / len(means),
        "ci_low": low,
        "ci_high": high,
        "pass_at_k": {str(k): mean_pass_at(k) for k in ks},
        "majority_vote": sum(majority_is_right(group, same_answer) for group in voting) / len(voting)
        if voting
        else None,
        "unfinished": sum(t.unfinished for t in trajectories) / len(trajectories),
        "mean_tokens": sum(len(t.response_ids) for t in trajectories) / len(trajectories),
        "unavailable": sum(not t.grade.is_known for t in trajectories),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n samples, of which c are right, hold a right one."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


MOST_COMPARISONS = 200
"""Comparisons of a problem's wrong answers; what is left then counts as it is spelled."""


def majority_is_right(group: Sequence[Trajectory], same_answer: SameAnswer | None) -> bool:
    """Returns whether the most frequent answer of a problem's samples is right; see `summarise`.

    Right answers are equal to the gold, so they are one answer. Wrong ones are compared with each other only
    where they could outnumber the right ones together and don't do so as they are spelled.
    """
    problem = group[0].problem
    grades = [trajectory.grade for trajectory in group]
    answers = [(grade.extracted, grade.correct) for grade in grades if grade.extracted is not None]
    if same_answer is None or not _are_comparable(answers, same_answer, problem):
        spelled = Counter(answer for answer, _ in answers)
        winner = spelled.most_common(1)[0][0] if spelled else None
        return any(answer == winner and is_right for answer, is_right in answers)
    right_votes = sum(is_right for _, is_right in answers)
    first_right = next((place for place, (_, is_right) in enumerate(answers) if is_right), len(answers))
    wrong_votes = Counter(answer for answer, is_right in answers if not is_right)
    first_places = {answer: place for place, (answer, _) in reversed(list(enumerate(answers)))}

    def beats_the_right(answer: str, votes: int) -> bool:
        # Of equally frequent answers the first one given counts.
        return votes > right_votes or (votes == right_votes and first_places[answer] < first_right)

    if right_votes == 0 or any(beats_the_right(*pair) for pair in wrong_votes.items()):
        return False
    if sum(wrong_votes.values()) < right_votes:
        return True
    comparisons = 0
    class_votes: dict[str, int] = {}  # by the first answer of each class of equal ones
    for answer, votes in wrong_votes.items():
        representative = answer
        for other in class_votes:
            if comparisons == MOST_COMPARISONS:
                break
            comparisons += 1
            is_same = same_answer(answer, other, problem)
            if is_same is None:  # it hung or crashed: each such comparison may take a whole deadline
                comparisons = MOST_COMPARISONS
            elif is_same:
                representative = other
                break
        class_votes[representative] = class_votes.get(representative, 0) + votes
        if beats_the_right(representative, class_votes[representative]):
            return False
    return True


def _are_comparable(answers: Sequence[tuple[str, bool]], same_answer: SameAnswer, problem: Problem) -> bool:
    """Returns whether the problem's grader compares answers at all."""
    right = next((answer for answer, is_right in answers if is_right), None)
    return right is None or same_answer(right, right, problem) is not None


# Many checkpoints, many evaluators


def unmeasured(directory: ExperimentDirectory, sets: tuple[EvaluationSet, ...]) -> list[int]:
    """Returns the checkpoints that lack a summary of some set: those that were due by iterations and, where
    nobody goes on with the run, the newest."""
    numbers = directory.regular_checkpoints()
    if not directory.is_running():
        numbers = sorted({*numbers, *directory.checkpoints()[-1:]})
    return [number for number in numbers if not all(is_measured(directory, number, one) for one in sets)]


def follow(sampler: Sampler, claims: Claims, every_s: float = FOLLOW_EVERY_S) -> None:
    """Measures every set on every checkpoint that nobody else measures, until all are measured and
    the experiment, if it goes on, has ended. Collective.

    A set that another evaluator has claimed is waited for, and taken over if that evaluator dies. It lives
    while it shows signs of life, and what it does has deadlines of its own.
    """
    session, last_message = sampler.session, ""
    directory, sets = session.directory, session.config.evaluation.sets
    while True:
        going_on = session.ranks.from_first("is it running", directory.is_running())
        numbers = session.ranks.from_first("checkpoints", unmeasured(directory, sets))
        verdicts = {
            (number, one.label): measure_claimed(sampler, number, one, claims)
            for number in numbers
            for one in sets
        }
        if not numbers and not going_on:
            return
        others = [pair for pair, verdict in verdicts.items() if verdict == "another's"]
        if numbers and (not others or "ours" in verdicts.values()):
            continue
        if others:
            number, label = others[0]
            holder = claims.holder(directory.evaluation(number, label) / "claims")
            message = f"waiting for {holder}, which evaluates {label} after iteration {number}"
            if message != last_message:
                session.console.say(message)
            last_message = message
        time.sleep(every_s)


def measure_claimed(sampler: Sampler, number: int, chosen: EvaluationSet, claims: Claims) -> Verdict:
    """Measures one set on one checkpoint (0: the start weights), unless somebody else does. Collective."""
    session, directory = sampler.session, sampler.session.directory
    claim: Claim | None = None
    verdict: Verdict = "measured"
    if session.ranks.is_first and not is_measured(directory, number, chosen):
        claim = claims.take(directory.evaluation(number, chosen.label) / "claims")
        verdict = "ours" if claim else "another's"
    with contextlib.ExitStack() as stack:
        if claim is not None:
            stack.callback(claim.release)
            if is_measured(directory, number, chosen):  # by the one who had claimed it just before
                verdict = "measured"
        verdict = session.ranks.from_first("claim", verdict)
        if verdict == "ours":
            try:
                sampler.server.load_checkpoint(number)
            except CheckpointGone as gone:
                session.console.say(f"{gone}, before {chosen.label} was measured on it")
            else:
                evaluate(sampler, number, [chosen], claim)
    return verdict
