"""Answers that nobody could grade, and graders that fail on what they are given: counted and reported.

Whether an answer could be graded says nothing about it, so those that are left are a fair sample: a group's
baseline is that of fewer answers, a value that of fewer continuations. An answer whose grader failed on it
(the outcome ``error``) earns nothing and stays, since it may be the answer's doing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treetune.contracts import Answers
from treetune.exceptions import NothingGraded
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree
from treetune.vocabulary import Metrics, Trajectory

REASONS = 3
"""Reasons that are reported, the most frequent ones."""

FEW, NEARLY_ALL = 8, 0.9
"""A grader that failed on more than this share of at least so many answers is broken."""


def report(context: RolloutContext, name: str, answers: Sequence[Trajectory]) -> None:
    """Logs how many of all ranks' answers could not be graded, and on how many each domain's grader failed,
    with the first failure. Raises NothingGraded where that were all, or nearly all of a domain's: then it is
    the grader's doing. `name` is for the reader. Collective.
    """
    lost = Counter(one.grade.message or "no reason given" for one in answers if not one.grade.is_known)
    counts = Counter(one.problem.domain for one in answers)
    failed: dict[str, list[tuple[str, str]]] = {}
    for one in answers:
        if one.grade.outcome == "error":
            why = one.grade.message or "its process died"
            failed.setdefault(one.problem.domain, []).append((one.problem.id, why))
    firsts = {domain: (len(of_domain), *of_domain[0]) for domain, of_domain in failed.items()}
    gathered = context.ranks.exchange("ungraded answers", [(lost, counts, firsts)])
    lost, counts = Counter(), Counter()
    for ((of_rank, answers_of_rank, _),) in gathered:
        lost.update(of_rank)
        counts.update(answers_of_rank)
    again = "the same command asks for grades again, and samples none again"
    if lost:
        more = ", …" if len(lost) > REASONS else ""
        reasons = "; ".join(f"{reason} ({count})" for reason, count in lost.most_common(REASONS))
        message = (
            f"{name}: {lost.total()} of {counts.total()} answers could not be graded and are left out:"
            f" {reasons}{more}"
        )
        if lost.total() == counts.total():
            raise NothingGraded(f"{message}. Nothing was made of them: {again}")
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
                f"{message}. Nothing was made of them: mend the grader (where an answer says nothing, it"
                f" returns None), and {again}"
            )
        context.log.say(message)


def least_answers(credit: Credit) -> int:
    """Returns how many of a problem's answers must be graded, or it is left out."""
    return max([1, *(need.feature.count for need in credit.needs if isinstance(need.feature, Answers))])


def graded(context: RolloutContext, trees: Sequence[Tree], credit: Credit) -> tuple[list[Tree], Metrics]:
    """Returns the trees without answers that nobody could grade.

    A problem of which fewer are left than `credit` needs is left out whole, and counted over all ranks in
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
        f"iteration {context.iteration + 1}: {groups} problems are left out, since {why} of their answers"
        " could be graded"
    )
    return kept, {"episodes/groups_ungraded": float(groups)}
