"""Two sets of answers to the same problems, of two runs or two checkpoints: which problems flipped, and both
answers to one of them side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.page import Page, View, paged
from treetune_view.pages.answers import mark_of_answers, whole
from treetune_view.store import NotThere, Run
from treetune_view.store.index import Source
from treetune_view.store.queries import Filter, Question
from treetune_view.text import cut, visible

SHOWN = 100
"""Problems of one page."""

LONGEST = 6000
"""Characters of each text that are compared."""

WHICH = ("flipped", "better", "worse", "all")

_WORD = re.compile(r"\s+|\w+|[^\w\s]")


Side = tuple[Run, Source]
"""A file of answers of an experiment."""


@dataclass(frozen=True)
class Both:
    """A problem that both were asked: the share of right answers of each, and how it changed."""

    problem: str
    first: float
    second: float
    change: float

    def belongs_to(self, which: str) -> bool:
        """Returns whether it is flipped (more often right than wrong on one side, and not on the other),
        better or worse."""
        if which == "flipped":
            return (self.first > 0.5) != (self.second > 0.5)
        return which == "all" or (self.change > 0 if which == "better" else self.change < 0)


def show(view: View) -> Response:
    """`?run=` (one or two), `?first=`, `?second=` (files), `?which=`, `?page=`; `?problem=` for two answers
    side by side, `?a=` and `?b=` which of its answers on either side, from 0 as the file has them."""
    runs = [view.run, view.runs[-1]]
    sides = _sides(view, runs)
    shares = [
        {
            row["problem"]: row["share"]
            for row in view.store.answers(run).sql(
                f"SELECT problem, avg((score >= {CORRECT_SCORE})::INTEGER) AS share FROM answers"
                " WHERE score IS NOT NULL GROUP BY problem",
                sources=(source.name,),
            )
        }
        for run, source in sides
    ]
    both = [
        Both(name, first, shares[1][name], shares[1][name] - first)
        for name, first in shares[0].items()
        if name in shares[1]
    ]
    both.sort(key=lambda one: (-abs(one.change), one.problem))
    which, problem = view.choice("which", WHICH), view.text("problem")
    return view.render(
        "compare.html",
        sides=sides,
        there=[view.store.answers(run).sources() for run in runs],
        both=both,
        listed=paged(view, [one for one in both if one.belongs_to(which)], SHOWN),
        which=which,
        options=WHICH,
        better=sum(one.belongs_to("better") for one in both),
        worse=sum(one.belongs_to("worse") for one in both),
        problem=problem,
        pair=_pair(view, sides, problem) if problem else None,
    )


def _sides(view: View, runs: Sequence[Run]) -> list[Side]:
    """Returns the files of the address. Without: of two runs the newest files that both have, of one its
    first and last evaluation."""
    there = [{one.name: one for one in view.store.answers(run).sources()} for run in runs]
    for run, own in zip(runs, there, strict=True):
        if not own:
            raise NotThere(f"{run.name} has no answers yet")
    usual = [name for name, one in there[0].items() if one.kind == "evaluation"] or list(there[0])
    if runs[0] != runs[1]:
        common = [name for name in usual if name in there[1]] or [usual[-1]]
        chosen = [common[-1], common[-1] if common[-1] in there[1] else list(there[1])[-1]]
    else:
        label = there[0][usual[-1]].label
        alike = [name for name in usual if there[0][name].label == label]
        chosen = [alike[0], alike[-1]]
    names = [view.text(key, one) for key, one in zip(("first", "second"), chosen, strict=True)]
    for run, own, name in zip(runs, there, names, strict=True):
        if name not in own:
            raise NotThere(f"{run.name} has no answers {name!r}: there are {', '.join(own)}")
    return [(run, own[name]) for run, own, name in zip(runs, there, names, strict=True)]


def _pair(view: View, sides: Sequence[Side], problem: str) -> dict[str, Any]:
    """Returns both answers to a problem, with what differs marked."""
    rows, chosen, texts = [], [], []
    for (run, source), key in zip(sides, ("a", "b"), strict=True):
        answers = view.store.answers(run)
        same = (Filter("problem", "=", problem),)
        own = whole(answers.ask(Question((source.name,), same, size=64)).rows)
        if not own:
            raise NotThere(f"{run.name} has no answer to {problem!r} in {source.title}")
        row = own[min(view.integer(key, 0), len(own) - 1)]
        rows.append(own)
        chosen.append(row)
        texts.append(cut(answers.texts([(source.name, row["place"])])[0], LONGEST))
    marked = differences(texts[0][0], texts[1][0])
    return {"rows": rows, "chosen": chosen, "marked": marked, "left_out": [left for _, left in texts]}


def differences(one: str, other: str) -> list[list[tuple[str, bool]]]:
    """Returns both texts in pieces, visible, each with whether the other lacks it."""
    words = [_WORD.findall(one), _WORD.findall(other)]
    # Words that stand everywhere begin no match: without that rule long texts of few words take minutes.
    steps = difflib.SequenceMatcher(None, words[0], words[1], autojunk=True).get_opcodes()

    def pieces(side: int) -> Iterator[tuple[str, bool]]:
        for kind, *ends in steps:
            begin, end = ends[2 * side : 2 * side + 2]
            if begin < end:
                yield visible("".join(words[side][begin:end])), kind != "equal"

    return [list(pieces(0)), list(pieces(1))]


PAGES = (Page("/compare", "Compare", show, place="run", key="m", mark=mark_of_answers),)
