"""Measures weights: samples n answers to each of a split's problems, and writes them with their grades.

Several processes, also on several machines, may measure the checkpoints of an experiment. Each (checkpoint,
set) is measured by the process that holds its claim (`runtime.claims`)::

    follow:  for each checkpoint and set without a summary
               the claim is free        → take it, load the checkpoint, measure, release
               another process has it   → wait FOLLOW_EVERY_S, look again; a dead holder's claim is free
             until the run has ended and nothing is missing
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from treetune.exceptions import CheckpointGone
from treetune.rollouts import unavailable
from treetune.rollouts.base import Rollout
from treetune.rollouts.metrics import DOMAIN_PREFIX
from treetune.rollouts.numbers import (
    EVALUATED_NUMBERS,
    collect_number_columns,
    evaluation_metrics,
    group_numbers,
    number_metrics,
)
from treetune.rollouts.storage import answer_row
from treetune.runtime.base import EvaluationSet, PolicyIteration
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.console import Clock
from treetune.runtime.directory import (
    ANSWERS,
    JOURNALS,
    MEASURE_AGAIN_REMEDY,
    SUMMARY,
    ExperimentDirectory,
    is_measured,
    missing_sets,
)
from treetune.runtime.generation import gather_trajectories_on_first
from treetune.runtime.intervals import interval_of_mean
from treetune.runtime.resources import RunResources
from treetune.seeds import derived_random
from treetune.store.checksums import digest_of, read_record, write_record
from treetune.store.files import write_atomically
from treetune.tree import answers_of
from treetune.vocabulary import Grade, Metrics, Problem, Trajectory, token_array

FOLLOW_EVERY_S = 5.0
"""Seconds between two checks for new checkpoints and free claims."""

ClaimVerdict = Literal["ours", "another's", "measured"]
"""The state of a set on a checkpoint: claimed by this process, claimed by another one, or measured."""


def evaluate_due(resources: RunResources, finished_iterations: int, clock: Clock) -> Metrics:
    """Measures the sets that are due after `finished_iterations`, on the engine's weights. Collective."""
    session = resources.session
    with clock.phase("evaluation"):
        sets = missing_sets(session.config, session.directory, finished_iterations)
        return evaluate(resources, finished_iterations, sets)


def evaluate(
    resources: RunResources,
    finished_iterations: int,
    sets: Sequence[EvaluationSet],
    claim: Claim | None = None,
) -> Metrics:
    """Measures the engine's present weights, which are those after `finished_iterations`. Collective.

    Args:
        claim: The first rank's claim, a lock that keeps other evaluators from this work. If another process
            has taken the claim over, nothing is written.

    Returns:
        The metrics of all sets that are measured on these weights. An earlier, interrupted run may have
        measured some of them.
    """
    directory = resources.session.directory
    for evaluation_set in sets:
        folder = directory.evaluation_folder(finished_iterations, evaluation_set.label)
        name = f"{evaluation_set.label} after iteration {finished_iterations}"
        measure_set(resources, finished_iterations, evaluation_set, folder, name, claim)
    metrics: Metrics = {}
    for evaluation_set in resources.session.config.evaluation.sets:
        if is_measured(directory, finished_iterations, evaluation_set):
            folder = directory.evaluation_folder(finished_iterations, evaluation_set.label)
            summary = read_record(folder / SUMMARY, MEASURE_AGAIN_REMEDY)
            metrics |= _metrics_of_summary(evaluation_set.label, summary)
    return metrics


def _metrics_of_summary(label: str, summary: Mapping[str, Any]) -> Metrics:
    """Returns the metrics of a measured set, by names such as ``evaluation/test/pass_at_1``."""

    def pick(name_prefix: str, values: Mapping[str, Any]) -> Metrics:
        return {name_prefix + name: values[name] for name in EVALUATED_NUMBERS if values[name] is not None}

    metrics = pick(f"evaluation/{label}/", summary)
    for domain, summary_of_domain in summary.get("domains", {}).items():
        metrics |= pick(f"evaluation/{label}/{DOMAIN_PREFIX}{domain}/", summary_of_domain)
    if summary.get("unavailable"):
        metrics[f"evaluation/{label}/unavailable"] = float(summary["unavailable"])
    # Rollouts and graders may declare further numbers, such as ``evaluation/test/threads/parallel_count``.
    declared_metrics = evaluation_metrics(label, summary)
    return metrics | declared_metrics


def problems_of_set(config: PolicyIteration, evaluation_set: EvaluationSet) -> list[Problem]:
    """Returns the problems of a set, in the order of their split.

    Raises:
        ValueError: The split has fewer problems than the set asks for.
    """
    problems = list((evaluation_set.task or config.task).problems(evaluation_set.split))
    if evaluation_set.problems is None:
        return problems
    if evaluation_set.problems > len(problems):
        raise ValueError(
            f"evaluation set {evaluation_set.label!r} asks for {evaluation_set.problems} problems of the"
            f" {evaluation_set.split} split, which has {len(problems)}: take fewer, or make the split larger"
        )
    if evaluation_set.choose == "first":
        return problems[: evaluation_set.problems]
    generator = derived_random(config.evaluation.seed, "evaluation problems")
    indices = generator.sample(range(len(problems)), evaluation_set.problems)
    return [problems[i] for i in sorted(indices)]


def measure_set(
    resources: RunResources,
    finished_iterations: int,
    evaluation_set: EvaluationSet,
    folder: Path,
    name: str,
    claim: Claim | None = None,
) -> None:
    """Measures the engine's present weights. Collective.

    Args:
        finished_iterations: The number of iterations that made these weights.
        folder: Gets the answers and then ``summary.json``, which says that the set is measured.
        name: The name of the measurement in messages.
        claim: The lock by which the first rank keeps other evaluators from the folder. A process that seems
            dead loses it, and then writes nothing more.
    """
    session, config = resources.session, resources.session.config
    ranks, seed, context_length = session.ranks, config.evaluation.seed, config.context_length
    resources.wait_until_ready()
    problems = problems_of_set(config, evaluation_set)
    rollout = evaluation_set.rollout(config)
    prompt_lengths = [len(session.model.codec.encode_prompt(problem)) for problem in problems]
    answerable: list[Problem] = []
    for problem, prompt_length in zip(problems, prompt_lengths, strict=True):
        if prompt_length < context_length:
            answerable.append(problem)

    # A process that takes the claim over writes a journal of its own, whose name has the number of takeovers.
    # It reads the journals of the claim's earlier holders, too.
    n_takeovers = ranks.from_first("claim", 0 if claim is None else claim.number)
    journal = folder / JOURNALS / f"{n_takeovers}-{ranks.rank}.jsonl"
    other_journals = [path for path in sorted(journal.parent.glob("*.jsonl")) if path != journal]

    # The grader is needed until the summary, whose majority vote asks it which answers are equal.
    with resources.grader_of(evaluation_set.task) as grader:
        with resources.phase(f"evaluating {name}", "answers") as show_progress:
            context = resources.context(
                rollout,
                seed=seed,
                iteration=0,  # the same draws for every checkpoint
                journal=journal,
                journals=other_journals,
                progress=show_progress,
                task=evaluation_set.task,
                grader=grader,
                reads_logprobs=False,
            )
            # No rank writes to its journal before every rank has listed the journals above.
            ranks.barrier("evaluation begins")
            answers_of_rank: list[Trajectory] = []
            if answerable:
                trees, _ = rollout.run(context, answerable)
                answers_of_rank = answers_of(trees)
            # {"judge/asked": 5.0} -> {"judge": {"asked": 5.0}}
            service_numbers = group_numbers(resources.service_metrics(grader))
        unavailable.report_ungraded(context, f"evaluating {name}", answers_of_rank)

        trajectories = gather_trajectories_on_first(ranks, "evaluation", answers_of_rank)
        message = ""
        if ranks.is_first:
            message = _describe_wrong_count(trajectories, answerable, evaluation_set.samples, rollout)
        # All ranks raise together, or the others would wait for the first one.
        message = ranks.from_first("answers to each", message)
        if message:
            raise ValueError(f"evaluating {name}: {message}")

        if ranks.is_first:
            for problem, prompt_length in zip(problems, prompt_lengths, strict=True):
                if prompt_length >= context_length:
                    trajectories += _make_empty_answers(
                        problem, evaluation_set.samples, prompt_length, context_length
                    )
            if claim is not None and claim.is_lost():
                session.console.say(
                    f"evaluating {name}: another process has taken over while this one was suspended"
                )
            else:
                assert rollout.sampling is not None
                summary = {
                    "split": evaluation_set.split,
                    "iteration": finished_iterations,
                    **summarise(trajectories, seed, grader.same_answer),
                    **summarise_domains(trajectories, seed, grader.same_answer),
                    "too_long": len(problems) - len(answerable),
                    "temperature": rollout.sampling.temperature,
                    "top_p": rollout.sampling.top_p,
                    "seed": seed,
                    **group_numbers(number_metrics(collect_number_columns(trajectories))),
                    **service_numbers,
                }
                write_evaluation(folder, summary, trajectories)
                session.console.say(f"{name}: {_describe_summary(summary)}")
        ranks.barrier("evaluation written")


SameAnswer = Callable[[str, str, Problem], bool | None]
"""Returns whether two answers to a problem are equal; None if the grader can't tell."""


def _describe_wrong_count(
    trajectories: Iterable[Trajectory], problems: Iterable[Problem], samples: int, rollout: Rollout
) -> str:
    """Returns an error message for the first problem that has another number of answers than `samples`, or an
    empty text."""
    counts = Counter(answer.problem.id for answer in trajectories)
    for problem in problems:
        if counts[problem.id] != samples:
            return (
                f"the rollout {type(rollout).__name__} gave {counts[problem.id]} answers to the problem"
                f" {problem.id}, and the set asks for {samples} of each: remove the rollout's property"
                " rollout_for_fixed_problems, so that answers are sampled one by one"
            )
    return ""


def summarise_domains(
    trajectories: Sequence[Trajectory], seed: int, same_answer: SameAnswer | None = None
) -> dict[str, Any]:
    """Returns the summary of each domain that has a graded answer: ``{"domains": {"math": {…}, …}}``.

    Returns an empty dictionary if the answers are of fewer than two domains, since a single domain would only
    repeat the summary of all answers.
    """
    answers_by_domain: dict[str, list[Trajectory]] = {}
    for answer in trajectories:
        if answer.problem.domain:
            answers_by_domain.setdefault(answer.problem.domain, []).append(answer)
    if len(answers_by_domain) < 2:
        return {}
    summaries = {}
    for domain, answers in sorted(answers_by_domain.items()):
        if any(answer.grade.is_known for answer in answers):
            summaries[domain] = summarise(answers, seed, same_answer)
    return {"domains": summaries}


def write_evaluation(folder: Path, summary: dict[str, Any], trajectories: Iterable[Trajectory]) -> None:
    """Writes the answers of a measured set, and then its summary with the checksum of the answers."""
    with write_atomically(folder / ANSWERS) as file:
        file.writelines(json.dumps(answer_row(answer)) + "\n" for answer in trajectories)
    # The summary is written last, since it says that the set is measured.
    write_record(folder / SUMMARY, summary | {"answers": digest_of(folder / ANSWERS)})


def _describe_summary(summary: dict[str, Any]) -> str:
    """Returns a summary as one line for people: ``pass@1 0.480 [0.431, 0.529] on 500 problems``."""
    notes = ""
    if summary["too_long"]:
        notes += f", {summary['too_long']} of them with too long a prompt"
    domain_texts = []
    for domain, summary_of_domain in summary.get("domains", {}).items():
        domain_texts.append(f"{domain} {summary_of_domain['pass_at_1']:.3f}")
    if domain_texts:
        notes += f" ({', '.join(domain_texts)})"
    return (
        f"pass@1 {summary['pass_at_1']:.3f} [{summary['ci_low']:.3f}, {summary['ci_high']:.3f}]"
        f" on {summary['n_problems']} problems{notes}"
    )


def _make_empty_answers(
    problem: Problem, samples: int, prompt_length: int, context_length: int
) -> list[Trajectory]:
    """Returns empty answers, which count as wrong, to a problem whose prompt fills the context."""
    message = f"the prompt of {prompt_length} tokens fills the context of {context_length}"
    answer = Trajectory(
        problem=problem,
        sample=0,
        prompt_ids=token_array(()),
        segments=(),
        finish_reason="length",
        text="",
        grade=Grade(reward=0.0, outcome="no_answer", message=message),
        step_ends=(),
    )
    return [replace(answer, sample=sample) for sample in range(samples)]


def summarise(
    trajectories: Sequence[Trajectory], seed: int, same_answer: SameAnswer | None = None
) -> dict[str, Any]:
    """Summarises graded answers: pass@1 with its interval, pass@k, majority vote, lengths.

    * ``pass_at_1``: the mean over problems of the share of their samples that are correct. For its 95 %
      interval see `interval_of_mean`.
    * ``pass_at_k`` for k = 1, 2, 4, … up to the number of samples n: the mean over problems of the unbiased
      ``1 - C(n-c, k)/C(n, k)`` (Chen et al. 2021, eq. 1), where c of a problem's n samples are correct.
    * ``majority_vote``: the share of problems whose most frequent extracted answer is correct (of equally
      frequent ones, the first). Samples without an extracted answer don't vote. Answers that `same_answer`
      finds equal vote together, and so do all correct ones. If a domain's grader gives no extracted answer
      for a correct sample, its problems are left out; None if all are.
    * ``unavailable``: the number of answers that could not be graded. Only ``unfinished`` and ``mean_tokens``
      include them. The other numbers are those of the graded samples: problems without any are left out, and
      problems with fewer than k are left out of ``pass_at_k``.
    """
    graded_samples: dict[str, list[Trajectory]] = {}  # by problem
    for trajectory in trajectories:
        if trajectory.grade.is_known:
            graded_samples.setdefault(trajectory.problem.id, []).append(trajectory)
    groups = list(graded_samples.values())
    # Graded or not, every problem has the same number of samples, as `measure_set` has checked.
    first_problem = trajectories[0].problem.id
    n_samples = sum(trajectory.problem.id == first_problem for trajectory in trajectories)

    # pass@1
    counts: list[int] = []
    correct_counts: list[int] = []
    correct_shares: list[float] = []
    for group in groups:
        correct = sum(sample.grade.correct for sample in group)
        counts.append(len(group))
        correct_counts.append(correct)
        correct_shares.append(correct / len(group))
    low, high = interval_of_mean(correct_shares, seed)

    # pass@k. A k above every problem's number of graded samples would leave no problem for it.
    mean_pass_at: dict[str, float] = {}  # by k
    k = 1
    while k <= max(counts):
        estimates = []
        for count, correct in zip(counts, correct_counts, strict=True):
            if count >= k:
                estimates.append(pass_at_k(count, correct, k))
        mean_pass_at[str(k)] = math.fsum(estimates) / len(estimates)
        k *= 2

    # Majority vote. An answer that is correct without an extracted answer, such as a program, has nothing to
    # vote with.
    domains_without_votes = set()
    for trajectory in trajectories:
        if trajectory.grade.correct and trajectory.grade.extracted is None:
            domains_without_votes.add(trajectory.problem.domain)
    voting_groups = [group for group in groups if group[0].problem.domain not in domains_without_votes]
    majority_vote = None
    if voting_groups:
        n_right = sum(majority_is_right(group, same_answer) for group in voting_groups)
        majority_vote = n_right / len(voting_groups)

    return {
        "n_problems": len(groups),
        "samples": n_samples,
        "pass_at_1": math.fsum(correct_shares) / len(correct_shares),
        "ci_low": low,
        "ci_high": high,
        "pass_at_k": mean_pass_at,
        "majority_vote": majority_vote,
        "unfinished": sum(t.unfinished for t in trajectories) / len(trajectories),
        "mean_tokens": sum(len(t.response_ids) for t in trajectories) / len(trajectories),
        "unavailable": sum(not t.grade.is_known for t in trajectories),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n samples, of which c are correct, contain a correct one."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


MOST_COMPARISONS = 200
"""The most comparisons among a problem's wrong answers. After them, answers count as equal only if they are
spelled alike."""


def majority_is_right(group: Sequence[Trajectory], same_answer: SameAnswer | None) -> bool:
    """Returns whether the most frequent answer of a problem's samples is correct; see `summarise`.

    All correct answers equal the reference answer, so they vote together. Wrong answers vote by their
    spellings. Comparing them is slow, and is done only if the spellings don't decide the vote.
    """
    problem = group[0].problem
    grades = [trajectory.grade for trajectory in group]
    answers = [(grade.extracted, grade.correct) for grade in grades if grade.extracted is not None]
    if same_answer is None or not _are_comparable(answers, same_answer, problem):
        votes_by_spelling = Counter(answer for answer, _ in answers)
        winner = votes_by_spelling.most_common(1)[0][0] if votes_by_spelling else None
        return any(answer == winner and is_right for answer, is_right in answers)

    right_votes = 0
    wrong_votes: Counter[str] = Counter()  # by spelling
    first_right_index = len(answers)
    first_index: dict[str, int] = {}  # of each spelling
    for index, (answer, is_right) in enumerate(answers):
        first_index.setdefault(answer, index)
        if is_right:
            right_votes += 1
            first_right_index = min(first_right_index, index)
        else:
            wrong_votes[answer] += 1

    def beats_right_answers(answer: str, votes: int) -> bool:
        # Among equally frequent answers the first one wins.
        comes_first = first_index[answer] < first_right_index
        return votes > right_votes or (votes == right_votes and comes_first)

    # Often the spellings of the wrong answers decide the vote already.
    if right_votes == 0 or any(beats_right_answers(answer, votes) for answer, votes in wrong_votes.items()):
        return False
    if wrong_votes.total() < right_votes:
        return True

    # Else the votes of wrong answers that are equal are counted together. After `MOST_COMPARISONS`
    # comparisons, each further spelling counts as an answer of its own.
    comparisons = 0
    votes_of_class: dict[str, int] = {}  # by the first answer of each class of equal answers
    for answer, votes in wrong_votes.items():
        representative = answer
        for earlier_answer in votes_of_class:
            if comparisons == MOST_COMPARISONS:
                break
            comparisons += 1
            is_same = same_answer(answer, earlier_answer, problem)
            if is_same is None:
                # The comparison hung or crashed. Each further comparison might take a whole deadline.
                comparisons = MOST_COMPARISONS
            elif is_same:
                representative = earlier_answer
                break
        votes_of_class[representative] = votes_of_class.get(representative, 0) + votes
        if beats_right_answers(representative, votes_of_class[representative]):
            return False
    return True


def _are_comparable(answers: Sequence[tuple[str, bool]], same_answer: SameAnswer, problem: Problem) -> bool:
    """Returns whether the problem's grader can compare answers, by comparing a correct one with itself."""
    right_answer = next((answer for answer, is_right in answers if is_right), None)
    return right_answer is None or same_answer(right_answer, right_answer, problem) is not None


# Many checkpoints, many evaluators


def find_unmeasured(directory: ExperimentDirectory, sets: tuple[EvaluationSet, ...]) -> list[int]:
    """Returns the numbers of the checkpoints on which at least one of the sets has not been measured.

    Only checkpoints that were due by iterations are measured, not those that were written by time or because
    of a signal. If the run has ended, its newest checkpoint is measured, too.
    """
    numbers = directory.regular_checkpoints()
    if not directory.is_running():
        numbers = sorted({*numbers, *directory.checkpoints()[-1:]})
    missing = []
    for number in numbers:
        if not all(is_measured(directory, number, evaluation_set) for evaluation_set in sets):
            missing.append(number)
    return missing


def measure_until_end(resources: RunResources, claims: Claims, every_s: float = FOLLOW_EVERY_S) -> None:
    """Measures every set on every checkpoint, until the run has ended and all are measured. Collective.

    It waits for sets that another evaluator has claimed, and takes them over if that evaluator dies. An
    evaluator that is alive can't hang, since whatever it waits for has a deadline.
    """
    last_message = ""
    session = resources.session
    directory, sets = session.directory, session.config.evaluation.sets
    while True:
        # `is_running` is read before the checkpoints are listed. If the run ends in between, `is_running` is
        # still True, so the loop runs once more and finds the last checkpoint.
        is_running = session.ranks.from_first("is it running", directory.is_running())
        numbers = session.ranks.from_first("checkpoints", find_unmeasured(directory, sets))
        verdicts: dict[tuple[int, str], ClaimVerdict] = {}
        for number in numbers:
            for evaluation_set in sets:
                verdicts[number, evaluation_set.label] = measure_claimed(
                    resources, number, evaluation_set, claims
                )
        if not numbers and not is_running:
            return
        claimed_by_others = [pair for pair, verdict in verdicts.items() if verdict == "another's"]
        has_measured = "ours" in verdicts.values()
        if numbers and (has_measured or not claimed_by_others):
            continue  # there may be new checkpoints by now, so it looks again without a pause
        if claimed_by_others:
            number, label = claimed_by_others[0]
            holder = claims.holder(directory.evaluation_folder(number, label) / "claims")
            message = f"waiting for {holder}, which evaluates {label} after iteration {number}"
            if message != last_message:
                session.console.say(message)
            last_message = message
        time.sleep(every_s)


def measure_claimed(
    resources: RunResources, number: int, evaluation_set: EvaluationSet, claims: Claims
) -> ClaimVerdict:
    """Measures a set on a checkpoint (0: the start weights), unless another process does. Collective.

    A claim is a lock on this work, which keeps other evaluators from it. The first rank takes the claim.

    Returns:
        "ours" if this process took the claim, "another's" if another process has the claim, and "measured"
        if the set was measured already.
    """
    session, directory = resources.session, resources.session.directory
    claim: Claim | None = None
    verdict: ClaimVerdict = "measured"
    if session.ranks.is_first and not is_measured(directory, number, evaluation_set):
        claim = claims.take(directory.evaluation_folder(number, evaluation_set.label) / "claims")
        verdict = "ours" if claim else "another's"
    with contextlib.ExitStack() as stack:
        if claim is not None:
            stack.callback(claim.release)
            # Another process may have measured the set between the first look and `take`.
            if is_measured(directory, number, evaluation_set):
                verdict = "measured"
        verdict = session.ranks.from_first("claim", verdict)  # the first rank decides for all
        if verdict == "ours":
            try:
                resources.server.load_checkpoint(number)
            except CheckpointGone as gone:
                session.console.say(f"{gone}, before {evaluation_set.label} was measured on it")
            else:
                evaluate(resources, number, [evaluation_set], claim)
    return verdict
