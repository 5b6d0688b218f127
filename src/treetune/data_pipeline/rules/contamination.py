"""Rows that share a run of words with a problem of a test set."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from treetune.data_pipeline.rules.base import Rows, Rule, RuleContext, Verdict
from treetune.data_pipeline.rules.words import word_list
from treetune.data_pipeline.templates import NoValue, check_text, text_of
from treetune.tasks.base import Split
from treetune.tasks.domain_rows import prompt_text
from treetune.tasks.sources import InFiles, Source


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


@Rule.register("contamination")
@dataclass(frozen=True, kw_only=True)
class Contamination(Rule):
    """Drops a row of the train split that has a run of `ngram` words in common with a problem of one of the
    sets in `against`, capitals and punctuation aside. A test problem with fewer words is looked for whole,
    if it has `shortest` of them. What matched is written down for each row.

    With `action` ``report``, rows stay and the summary lists them.
    """

    against: Annotated[tuple[TestSet, ...], MinLen(1)]
    ngram: Annotated[int, Ge(2)] = 13
    """Words of a run that two texts don't share by chance."""
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
        runs, problems = self._runs()
        lengths = sorted({length for length, _ in runs.values()}, reverse=True)
        matches: Counter[str] = Counter()
        found = {}
        for done, one in enumerate(rows):
            if done % 256 == 0:
                context.progress(done, len(rows))
            if one.split != "train":
                continue
            words = word_list(prompt_text(one.row))
            match = next(
                (
                    (runs[key][1], run)
                    for length in lengths
                    for key, run in _hashed(words, length)
                    if key in runs
                ),
                None,
            )
            if match is not None:
                (name, place), run = match
                matches[name] += 1
                found[one.number] = f"{name} ({place}): {run}"
        told = {"test_problems": problems, "matches": dict(matches.most_common())}
        if self.action == "report":
            return Verdict({}, {**told, "matching_rows": {str(number): why for number, why in found.items()}})
        return Verdict(found, told)

    def _runs(self) -> tuple[dict[bytes, tuple[int, tuple[str, str]]], dict[str, int]]:
        """All runs of all test problems, with their length and the first problem that has them; and how many
        problems each set has."""
        runs: dict[bytes, tuple[int, tuple[str, str]]] = {}
        problems: dict[str, int] = {}
        for chosen in self.against:
            count = 0
            for place, text in chosen.texts():
                count += 1
                words = word_list(text)
                length = min(self.ngram, len(words))
                if length < min(self.shortest, self.ngram):
                    continue
                for key, _ in _hashed(words, length):
                    runs.setdefault(key, (length, (chosen.name, place)))
            if not count:
                raise ValueError(f"the test set {chosen.name!r} is empty")
            problems[chosen.name] = count
        return runs, problems


def _hashed(words: Sequence[str], length: int) -> Iterator[tuple[bytes, str]]:
    """Each run of so many words, and its hash."""
    for start in range(len(words) - length + 1):
        run = " ".join(words[start : start + length])
        yield hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=12).digest(), run
