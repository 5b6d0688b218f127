"""Counts and reports answers that could not be graded, and graders that failed on answers.

Two cases are kept apart:

* The grader was unavailable (a judge's server is down): the answer's reward is unknown, and the answer is
  left out. The cause has nothing to do with the answer, so the remaining answers are a fair sample: a group's
  baseline is computed from fewer answers, and a state's value from fewer continuations.
* The grader failed on the answer (the outcome ``error``): the answer earns 0 and stays, since the answer
  itself may have caused the failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from treetune.contracts import Answers, Part
from treetune.exceptions import NothingGraded
from treetune.rollouts.answers import CUT_OFF_MESSAGE
from treetune.rollouts.context import RolloutContext
from treetune.tasks.graders.base import RETURNED_NONE
from treetune.tree import Tree
from treetune.vocabulary import Metrics, Trajectory

MOST_REASONS = 3
"""The number of reasons that are reported: the most frequent ones."""

FEWEST_FAILED_ANSWERS, BROKEN_SHARE = 8, 0.9
"""A grader counts as broken if it failed on more than `BROKEN_SHARE` of a domain's answers, and the domain
has at least `FEWEST_FAILED_ANSWERS` answers."""

FEWEST_NONE_ANSWERS = 4
"""A reward function counts as broken if it returned None for all of a domain's answers, and the domain has at
least this many."""

RETRY_REMEDY = "the same command grades the stored answers again"


class _Failures(NamedTuple):
    """The grader's failures on one domain's answers on one rank."""

    n_answers: int
    """The number of answers on which the grader failed."""
    problem: str
    """The id of the first such answer's problem."""
    reason: str
    """The reason of the first failure."""


def report_ungraded(context: RolloutContext, name: str, answers: Sequence[Trajectory]) -> None:
    """Logs how many of all ranks' answers could not be graded, and on how many each domain's grader failed.
    The former are left out, the latter earn 0. Collective.

    Args:
        context: The context of the phase.
        name: The phase that the answers belong to, such as ``"iteration 3"``. Each message begins with it.
        answers: The answers of this rank.

    Raises:
        NothingGraded: No answer could be graded, or the grader failed on nearly all answers of a domain.
    """
    local_reasons: Counter[str] = Counter()
    local_counts: Counter[str] = Counter()  # answers by domain
    errors_by_domain: dict[str, list[Trajectory]] = {}
    for answer in answers:
        local_counts[answer.problem.domain] += 1
        if not answer.grade.is_known:
            local_reasons[answer.grade.message or "no reason given"] += 1
        if answer.grade.outcome == "error":
            errors_by_domain.setdefault(answer.problem.domain, []).append(answer)
    local_failures = {}
    for domain, errors in errors_by_domain.items():
        reason = errors[0].grade.message or "its process died"
        local_failures[domain] = _Failures(len(errors), errors[0].problem.id, reason)

    gathered = context.ranks.exchange("ungraded answers", (local_reasons, local_counts, local_failures))
    reasons: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failures_by_domain: dict[str, list[_Failures]] = {}
    for reasons_of_rank, counts_of_rank, failures_of_rank in gathered:
        reasons.update(reasons_of_rank)
        counts.update(counts_of_rank)
        for domain, failures in failures_of_rank.items():
            failures_by_domain.setdefault(domain, []).append(failures)

    if reasons:
        _report_unavailable(context, name, reasons, counts.total())
    for domain, count in sorted(counts.items()):
        if domain in failures_by_domain:
            _report_failures(context, name, domain, count, failures_by_domain[domain])


def _report_unavailable(context: RolloutContext, name: str, reasons: Counter[str], answers: int) -> None:
    """Logs why answers could not be graded. Raises NothingGraded if no answer could be graded."""
    ellipsis = ", …" if len(reasons) > MOST_REASONS else ""
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(MOST_REASONS))
    message = (
        f"{name}: {reasons.total()} of {answers} answers could not be graded and are left out:"
        f" {listed}{ellipsis}"
    )
    if reasons.total() == answers:
        raise NothingGraded(f"{message}. The run stops here: {RETRY_REMEDY}")
    context.log.say(message)


def _report_failures(
    context: RolloutContext, name: str, domain: str, answers: int, failures: Sequence[_Failures]
) -> None:
    """Logs on how many of a domain's answers grading failed. Raises NothingGraded if it failed on nearly all
    of them."""
    failed = sum(failures_of_rank.n_answers for failures_of_rank in failures)
    first_failure = failures[0]
    domain_text = f" of the domain {domain}" if domain else ""
    message = (
        f"{name}: grading failed on {failed} of {answers} answers{domain_text}, which earn nothing; the"
        f" first, to the problem {first_failure.problem!r}: {first_failure.reason}"
    )
    if answers >= FEWEST_FAILED_ANSWERS and failed > BROKEN_SHARE * answers:
        raise NothingGraded(
            f"{message}. These are more than {BROKEN_SHARE:.0%}, so that the run stops here. Fix the grader"
            f" (for a response without an answer it returns None) and rerun: {RETRY_REMEDY}"
        )
    context.log.say(message)


def refuse_only_none(context: RolloutContext, answers: Sequence[Trajectory]) -> None:
    """Refuses a reward function that returned None for all of a domain's answers. Collective.

    None means that a response holds no answer. A function that returns None for everything has most likely no
    ``return`` statement, and nothing would be learned. Only the first iteration is checked: in a later one,
    all answers may get None for other reasons, such as a policy that has collapsed. Answers that were cut off
    don't count: the function did not decide their reward.

    Raises:
        NothingGraded: In the first iteration, the function returned None for all answers of a domain, counted
            over all ranks, and they are `FEWEST_NONE_ANSWERS` or more.
    """
    if context.iteration != 0:
        return  # all ranks have the same iteration, so either all take part in the exchange below or none
    finished = [answer for answer in answers if answer.grade.message != CUT_OFF_MESSAGE]
    local_counts = Counter(answer.problem.domain for answer in finished)
    local_nones = Counter(
        answer.problem.domain for answer in finished if answer.grade.message == RETURNED_NONE
    )
    counts: Counter[str] = Counter()
    nones: Counter[str] = Counter()
    gathered = context.ranks.exchange("rewards that are None", (local_counts, local_nones))
    for counts_of_rank, nones_of_rank in gathered:
        counts.update(counts_of_rank)
        nones.update(nones_of_rank)
    for domain, count in sorted(counts.items()):
        if count >= FEWEST_NONE_ANSWERS and nones[domain] == count:
            domain_text = f" of the domain {domain}" if domain else ""
            raise NothingGraded(
                f"iteration 1: the reward function returned None for all {count} answers{domain_text}, so"
                " that none earns anything, and the run stops here. Return a number for every answer (0.0 for"
                f" a wrong one; None only for a response without an answer) and rerun: {RETRY_REMEDY}"
            )


def least_answers(credit: Part) -> int:
    """Returns how many graded answers to a problem a credit needs: the number in its `needs`, or else 1."""
    fewest_answers = 1
    for need in credit.needs:
        if isinstance(need.feature, Answers):
            fewest_answers = max(fewest_answers, need.feature.count)
    return fewest_answers


def drop_ungraded(context: RolloutContext, trees: Sequence[Tree], credit: Part) -> tuple[list[Tree], Metrics]:
    """Returns the trees without the answers that could not be graded. Collective.

    A problem with fewer remaining answers than `credit` needs is left out whole. The metric
    ``episodes/groups_ungraded`` counts such problems over all ranks, if there are any.
    """
    fewest_answers = least_answers(credit)
    kept_trees = []
    dropped = 0
    for tree in trees:
        known_leaves = [leaf for leaf, answer in enumerate(tree.leaves) if answer.grade.is_known]
        if len(known_leaves) == len(tree.leaves):
            kept_trees.append(tree)
        elif len(known_leaves) >= fewest_answers:
            kept_trees.append(tree.select_leaves(known_leaves))
        else:
            dropped += 1
    dropped_of_all = sum(context.ranks.exchange("ungraded", dropped))
    if not dropped_of_all:
        return kept_trees, {}
    graded_text = "none" if fewest_answers == 1 else f"fewer than {fewest_answers}"
    context.log.say(
        f"iteration {context.iteration + 1}: {dropped_of_all} problems are left out, because {graded_text} of"
        " their answers could be graded"
    )
    return kept_trees, {"episodes/groups_ungraded": float(dropped_of_all)}
