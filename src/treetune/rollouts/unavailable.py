"""Counts and reports answers that could not be graded, and graders that fail.

An answer that could not be graded (the outcome ``unavailable``) is left out: that its grader was down says
nothing about the answer, so that the others are a fair sample. A group's baseline is then the mean of fewer
answers, a state's value the mean of fewer continuations. An answer on which its grader failed (the outcome
``error``) earns nothing and stays, since the answer itself may be the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treetune.contracts import Answers
from treetune.exceptions import NothingGraded
from treetune.rollouts.answers import CUT_OFF
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.tasks.graders.base import RETURNED_NONE
from treetune.tree import Tree
from treetune.vocabulary import Metrics, Trajectory

REASONS = 3
"""Reasons that are reported, the most frequent ones."""

FEW, NEARLY_ALL = 8, 0.9
"""A grader that failed on more than this share of at least so many answers is broken."""

FEWEST_NONE = 4
"""A reward function that returned None for all of at least so many answers is broken."""


def report(context: RolloutContext, name: str, answers: Sequence[Trajectory]) -> None:
    """Logs how many of all ranks' answers could not be graded, and on how many each domain's grader failed,
    with the first failure. Collective.

    Args:
        name: Where the answers are from, such as ``iteration 3``, for the message.

    Raises:
        NothingGraded: No answer could be graded, or a domain's grader failed on nearly all of them, so that
            the grader must be at fault.
    """
    lost = Counter(
        answer.grade.message or "no reason given" for answer in answers if not answer.grade.is_known
    )
    counts = Counter(answer.problem.domain for answer in answers)
    failed: dict[str, list[tuple[str, str]]] = {}
    for answer in answers:
        if answer.grade.outcome == "error":
            why = answer.grade.message or "its process died"
            failed.setdefault(answer.problem.domain, []).append((answer.problem.id, why))
    firsts = {domain: (len(of_domain), *of_domain[0]) for domain, of_domain in failed.items()}
    gathered = context.ranks.exchange("ungraded answers", [(lost, counts, firsts)])
    lost, counts = Counter(), Counter()
    for ((of_rank, answers_of_rank, _),) in gathered:
        lost.update(of_rank)
        counts.update(answers_of_rank)
    again = "the same command grades the stored answers again"
    if lost:
        more = ", …" if len(lost) > REASONS else ""
        reasons = "; ".join(f"{reason} ({count})" for reason, count in lost.most_common(REASONS))
        message = (
            f"{name}: {lost.total()} of {counts.total()} answers could not be graded and are left out:"
            f" {reasons}{more}"
        )
        if lost.total() == counts.total():
            raise NothingGraded(f"{message}. No training was done: {again}")
        context.log.say(message)
    for domain, count in sorted(counts.items()):
        failures = [firsts[domain] for ((_, _, firsts),) in gathered if domain in firsts]
        if not failures:
            continue
        total, (_, problem, why) = sum(number for number, _, _ in failures), failures[0]
        of = f" of the domain {domain}" if domain else ""
        message = (
            f"{name}: grading failed on {total} of {count} answers{of}, which earn nothing; the first, to the"
            f" problem {problem!r}: {why}"
        )
        if count >= FEW and total > NEARLY_ALL * count:
            raise NothingGraded(
                f"{message}. No training was done. Fix the grader (for a response without an answer it"
                f" returns None) and rerun: {again}"
            )
        context.log.say(message)


def refuse_only_none(context: RolloutContext, answers: Sequence[Trajectory]) -> None:
    """Raises NothingGraded if a domain's reward function returned None for all answers of the first
    iteration, on all ranks. Collective.

    None means that a response holds no answer. A function that returns it for everything has most likely no
    ``return``, and nothing would be learned. Later iterations may end in that way for other reasons, such as
    a policy that has collapsed. Answers that were cut off don't count: their reward isn't the function's.
    """
    if context.iteration != 0:
        return
    graded = [answer for answer in answers if answer.grade.message != CUT_OFF]
    n_answers = Counter(answer.problem.domain for answer in graded)
    n_none = Counter(answer.problem.domain for answer in graded if answer.grade.message == RETURNED_NONE)
    gathered = context.ranks.exchange("rewards that are None", [(n_answers, n_none)])
    n_answers, n_none = Counter(), Counter()
    for ((answers_of_rank, none_of_rank),) in gathered:
        n_answers.update(answers_of_rank)
        n_none.update(none_of_rank)
    for domain, count in sorted(n_answers.items()):
        if count >= FEWEST_NONE and n_none[domain] == count:
            of_domain = f" of the domain {domain}" if domain else ""
            raise NothingGraded(
                f"iteration 1: the reward function returned None for all {count} answers{of_domain}, so that"
                " none earns anything. No training was done. Return a number for every answer (0.0 for a"
                " wrong one; None only for a response without an answer) and rerun: the same command grades"
                " the stored answers again"
            )


def least_answers(credit: Credit) -> int:
    """Returns the number of a problem's answers that must be graded, or the problem is left out."""
    return max([1, *(need.feature.count for need in credit.needs if isinstance(need.feature, Answers))])


def graded(context: RolloutContext, trees: Sequence[Tree], credit: Credit) -> tuple[list[Tree], Metrics]:
    """Returns the trees without the answers that could not be graded.

    A problem that keeps fewer answers than `credit` needs is left out, and counted over all ranks in
    ``episodes/groups_ungraded``. Collective.
    """
    least = least_answers(credit)
    kept = []
    dropped = 0
    for tree in trees:
        known = [leaf for leaf, answer in enumerate(tree.leaves) if answer.grade.is_known]
        if len(known) == len(tree.leaves):
            kept.append(tree)
        elif len(known) >= least:
            kept.append(tree.keeping(known))
        else:
            dropped += 1
    groups = sum(count for (count,) in context.ranks.exchange("ungraded", [dropped]))
    if not groups:
        return kept, {}
    why = "none" if least == 1 else f"fewer than {least}"
    context.log.say(
        f"iteration {context.iteration + 1}: {groups} problems are left out, because {why} of their answers"
        " could be graded"
    )
    return kept, {"episodes/groups_ungraded": float(groups)}
