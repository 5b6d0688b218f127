"""Answers that nobody could grade: left out of what is learnt, counted, and told of.

Whether an answer could be graded says nothing about it, so those that are left are a fair sample: a group's
baseline is that of fewer answers, a value that of fewer continuations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from treetune.contracts import Answers
from treetune.episode_generators.base import Credit, GenerationContext
from treetune.tree import Tree
from treetune.vocabulary import Grade, Metrics, Trajectory

TOLD = 3
"""Reasons that are told, the most frequent ones."""


class NothingGraded(RuntimeError):
    """No answer could be graded, so there is nothing to learn from or to measure."""


def reasons(grades: Iterable[Grade]) -> Counter[str]:
    """Why those were not graded that were not."""
    return Counter(grade.message or "no reason given" for grade in grades if not grade.is_known)


def told(what: str, lost: Mapping[str, int], total: int) -> str:
    """One line about how many were lost and why. ``what`` are such as answers."""
    first = Counter(lost).most_common(TOLD)
    more = ", …" if len(lost) > TOLD else ""
    why = "; ".join(f"{reason} ({count})" for reason, count in first)
    return f"{sum(lost.values())} of {total} {what} could not be graded and are left out: {why}{more}"


def tell(context: GenerationContext, answers: Sequence[Trajectory]) -> None:
    """Says how many of all ranks' answers could not be graded. Raises NothingGraded for all. Collective."""
    own = [len(answers), dict(reasons(answer.grade for answer in answers))]
    everyones = context.exchange("unavailable", [own])
    total = sum(count for ((count, _),) in everyones)
    lost: Counter[str] = Counter()
    for ((_, of_rank),) in everyones:
        lost.update(of_rank)
    if not lost:
        return
    words = f"iteration {context.iteration + 1}: {told('answers', lost, total)}"
    if lost.total() == total:
        raise NothingGraded(f"{words}. Nothing was learnt from them: the same command samples none again")
    context.say(words)


def least_answers(credit: Credit) -> int:
    """How many of a problem's answers must be graded, or it is left out."""
    return max([1, *(need.feature.count for need in credit.needs if isinstance(need.feature, Answers))])


def graded(context: GenerationContext, trees: Sequence[Tree], credit: Credit) -> tuple[list[Tree], Metrics]:
    """The trees without answers that nobody could grade.

    A problem of which fewer are left than `credit` needs is left out whole, and counted over all ranks in
    ``episodes/groups_ungraded``. Collective.
    """
    least = least_answers(credit)
    kept = []
    dropped = 0
    for tree in trees:
        known = [place for place, leaf in enumerate(tree.leaves) if leaf.grade.is_known]
        if len(known) == len(tree.leaves):
            kept.append(tree)
        elif len(known) >= least:
            kept.append(tree.keeping(known))
        else:
            dropped += 1
    everyones = context.exchange("ungraded", [dropped])
    groups = sum(count for (count,) in everyones)
    if not groups:
        return kept, {}
    why = "none" if least == 1 else f"fewer than {least}"
    context.say(
        f"iteration {context.iteration + 1}: {groups} problems are left out, since {why} of their answers"
        " could be graded"
    )
    return kept, {"episodes/groups_ungraded": float(groups)}
