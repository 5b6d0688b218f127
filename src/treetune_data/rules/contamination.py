"""Rows that share a run of words with a problem of a test set."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source
from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_data.rules.words import hashed, length_of, runs, word_list
from treetune_data.templates import NoValue, check_text, text_of
from treetune_domains.domain_rows import prompt_text


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A set that is measured on: the text of each of its rows is made by the template `text`."""

    __test__ = False  # no class of tests, whatever pytest takes it for

    name: Annotated[str, MinLen(1)]
    """What the report calls it."""
    source: Source
    split: Split = "test"
    """The split of the source that holds its problems."""
    text: str = "{{ problem }}"

    def __post_init__(self) -> None:
        check_text(self.text, "text")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Each problem's place and text. Raises ValueError."""
        for place, row in self.source.rows(self.split):
            try:
                yield place, text_of(self.text, row)
            except NoValue as error:
                raise ValueError(f"the test set {self.name!r}, {place}: {error}") from error


OVERLAP_RUN = 4
"""Words of the runs that `overlap` counts: six of ten remain where every tenth word is changed."""


@Rule.register("contamination")
@dataclass(frozen=True, kw_only=True)
class Contamination(Rule):
    """Drops a row of the train split that has a run of `ngram` words in common with a problem of one of the
    sets in `against`. Capitals, punctuation, fullwidth letters and characters of no width make no difference;
    in scripts without spaces between words, two characters count as a word. What matched is written down for
    each row.

    With `overlap`, a row also goes that has this share of a problem's runs of four words: 0.5 finds copies
    with every tenth word changed, and takes long variants of a problem with other numbers for copies.

    A test problem with fewer words than `ngram` is looked for whole, if it has `shortest` of them; shorter
    ones can't be told from chance, and the summary counts them as ``too_short``. `overlap` is for problems
    of about `ngram` words or more.

    With `action` ``report``, rows stay and the summary lists them.
    """

    against: Annotated[tuple[TestSet, ...], MinLen(1)]
    ngram: Annotated[int, Ge(2)] = 13
    """Words of a run that two texts don't share by chance."""
    overlap: Annotated[float, Gt(0), Le(1)] | None = None
    shortest: Annotated[int, Ge(1)] = 8
    action: Literal["drop", "report"] = "drop"
    name: str | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in self.against]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"against has {', '.join(twice)} more than once: give each set its own name")

    def reads(self) -> Sequence[Path]:
        sources = [(one.source, one.split) for one in self.against]
        return [
            path for source, split in sources if isinstance(source, InFiles) for path in source.files(split)
        ]

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        problems = _Problems(self)
        matches: Counter[str] = Counter()
        found = {}
        for done, one in enumerate(rows):
            if done % 256 == 0:
                context.progress(done, len(rows))
            if one.split != "train":
                continue
            if match := problems.match(word_list(prompt_text(one.row)), self.overlap):
                name, place, what = match
                matches[name] += 1
                found[one.number] = f"{name} ({place}): {what}"
        told = {
            "test_problems": problems.counts,
            "too_short": problems.too_short,
            "matches": dict(matches.most_common()),
        }
        if self.action == "report":
            return Verdict({}, {**told, "matching_rows": {str(number): why for number, why in found.items()}})
        return Verdict(found, told)


class _Problems:
    """The test problems by the runs of words that they have."""

    def __init__(self, rule: Contamination) -> None:
        self.counts: dict[str, int] = {}
        self.too_short: dict[str, int] = {}
        self._long: dict[int, tuple[str, str]] = {}  # a long run's hash: the first problem that has it
        self._lengths: set[float] = set()
        self._short: defaultdict[int, list[int]] = defaultdict(list)  # a short run's hash: all that have it
        self._sizes: list[tuple[str, str, int]] = []  # set, place and how many short runs, by number
        for chosen in rule.against:
            count = too_short = 0
            for place, text in chosen.texts():
                count += 1
                words = word_list(text)
                length = min(rule.ngram, length_of(words))
                if length < min(rule.shortest, rule.ngram):
                    too_short += 1
                    continue
                self._lengths.add(length)
                for run in runs(words, length):
                    self._long.setdefault(hashed(run, 12), (chosen.name, place))
                short = {hashed(run, 12) for run in runs(words, OVERLAP_RUN)}
                # Fewer: a repetitive text, such as a table of zeros.
                if len(short) > rule.ngram - OVERLAP_RUN:
                    for key in short:
                        self._short[key].append(len(self._sizes))
                    self._sizes.append((chosen.name, place, len(short)))
            if not count:
                raise ValueError(f"the test set {chosen.name!r} is empty")
            self.counts[chosen.name] = count
            if too_short:
                self.too_short[chosen.name] = too_short

    def match(self, words: Sequence[str], overlap: float | None) -> tuple[str, str, str] | None:
        """Returns the set, the place and what is common of a problem that a row has."""
        for length in sorted(self._lengths, reverse=True):
            for run in runs(words, length):
                if known := self._long.get(hashed(run, 12)):
                    return (*known, run)
        if overlap is None:
            return None
        common: Mapping[int, int] = Counter(
            number
            for key in {hashed(run, 12) for run in runs(words, OVERLAP_RUN)}
            for number in self._short.get(key, ())
        )
        best = max(common, key=lambda number: common[number] / self._sizes[number][2], default=None)
        if best is None or (share := common[best] / self._sizes[best][2]) < overlap:
            return None
        name, place, _ = self._sizes[best]
        return name, place, f"{share:.0%} of its runs of {OVERLAP_RUN} words"
