"""Two sets of answers to the same problems, of two runs or two checkpoints: which problems flipped, and both
answers to one of them side by side."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response

from treetune.exceptions import NotThere
from treetune.lab.paired import paired
from treetune.view.curves import setting_of
from treetune.view.page import Page, PageRequest, paged
from treetune.view.pages.answers import mark_of_answers, whole
from treetune.view.store import Run
from treetune.view.store.index import AnswerFile
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.text import cut, visible
from treetune.vocabulary import CORRECT_SCORE

SHOWN = 100
"""Problems of one page."""

LONGEST = 6000
"""Characters of each text that are compared."""

WHICH = ("flipped", "flipped to right", "flipped to wrong", "better", "worse", "all")

_WORD = re.compile(r"\s+|\w+|[^\w\s]")


Side = tuple[Run, AnswerFile]
"""A file of answers of an experiment."""


def show(view: PageRequest) -> Response:
    """`?run=` (one, two, or seeds of two settings), `?first=`, `?second=` (files), `?which=`, `?page=`;
    `?problem=` for two answers side by side, `?a=` and `?b=` which of its answers on either side, from 0 as
    the file has them."""
    seeds = _seeds(view)
    sides = _sides(view, list(seeds[0]))
    pairs = [[_shares(view, run, side[1].name) for run, side in zip(pair, sides)] for pair in seeds]
    # Problems that all were asked, in each the share of right answers: means over seeds.
    names = sorted(set(pairs[0][0]).intersection(*(own for pair in pairs for own in pair)))
    differences = [{name: pair[1][name][0] - pair[0][name][0] for name in names} for pair in pairs]
    both = list[dict[str, Any]]()
    for name in names:
        first, second = (math.fsum(pair[side][name][0] for pair in pairs) / len(pairs) for side in (0, 1))
        kinds = {"all", "better" if second > first else "worse" if second < first else "same"}
        if (first > 0.5) != (second > 0.5):  # more often right than wrong in one of them alone
            kinds |= {"flipped", "flipped to right" if second > first else "flipped to wrong"}
        asked = pairs[0][0][name][1]
        both.append({"problem": name, "asked": asked, "first": first, "second": second, "kinds": kinds})
    both.sort(key=lambda one: -abs(one["second"] - one["first"]))
    which, problem = view.choice("which", WHICH), view.text("problem")
    return view.render(
        "compare.html",
        sides=sides,
        there=[view.store.answers(run).sources() for run, _ in sides],
        both=both,
        listed=paged(view, [one for one in both if which in one["kinds"]], SHOWN),
        which=which,
        counts={one: sum(one in own["kinds"] for own in both) for one in WHICH},
        seeds=len(seeds),
        test=paired(differences) if names else None,
        problem=problem,
        pair=_pair(view, sides, problem) if problem else None,
    )


def _shares(view: PageRequest, run: Run, source: str) -> dict[str, tuple[float, str]]:
    """Returns by problem the share of right answers, and how its text begins."""
    rows = view.store.answers(run).sql(
        f"SELECT problem, avg((score >= {CORRECT_SCORE})::INTEGER) AS share, any_value(asked) AS asked"
        " FROM answers WHERE score IS NOT NULL GROUP BY problem",
        sources=(source,),
    )
    return {row["problem"]: (row["share"], row["asked"] or "") for row in rows}


def _seeds(view: PageRequest) -> list[tuple[Run, Run]]:
    """Returns what is compared: one pair of experiments, or the seeds that two settings have in common.
    Raises ValueError for experiments that are no such thing."""
    if len(view.runs) < 3:
        return [(view.run, view.runs[-1])]
    settings: dict[str, dict[Any, Run]] = {}
    for run in view.runs:
        config = view.store.experiment(run).config
        settings.setdefault(setting_of(config), {})[config.get("seed")] = run
    alike = set.intersection(*(set(own) for own in settings.values()))
    if len(settings) != 2 or not alike:
        raise ValueError(
            f"these {len(view.runs)} experiments are {len(settings)} settings with {len(alike)} seeds in"
            " common: compare two experiments, or the seeds of two settings"
        )
    first, second = settings.values()
    return [(first[seed], second[seed]) for seed in sorted(alike, key=str)]


def _sides(view: PageRequest, runs: Sequence[Run]) -> list[Side]:
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


def _pair(view: PageRequest, sides: Sequence[Side], problem: str) -> dict[str, Any]:
    """Returns both answers to a problem, with what differs marked."""
    rows, chosen, texts = [], [], []
    for (run, source), key in zip(sides, ("a", "b"), strict=True):
        answers = view.store.answers(run)
        same = (ColumnFilter("problem", "=", problem),)
        own = whole(answers.ask(RowQuery((source.name,), same, size=64)).rows)
        if not own:
            raise NotThere(
                f"{run.name} has no answer to {problem!r} in {source.title}, or is still being read"
            )
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
