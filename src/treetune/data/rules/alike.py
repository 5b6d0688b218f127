"""Rows that ask what another row asks, or what a test set asks, by the words that they share."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import regex
from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune.data.templates import check_text, text_of
from treetune.domains.domain_rows import DATA_SOURCE, GROUND_TRUTH, REWARD_MODEL, prompt_text
from treetune.domains.extras import missing_extras
from treetune.exceptions import MissingField
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source

if TYPE_CHECKING:
    import numpy as np

_NO_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""Letters of scripts that put no spaces between words."""

# A number with its point is one word, and so is each sign of mathematics: 2 + 3 is not 2 * 3.
_WORD = regex.compile(
    rf"\p{{Nd}}+(?:\.\p{{Nd}}+)?|{_NO_SPACES}\p{{M}}*|(?:(?!{_NO_SPACES})\p{{L}}\p{{M}}*)+|[+\-*/^=<>%]"
)
_CHARACTER = regex.compile(rf"{_NO_SPACES}\p{{M}}*")
# NFKC would make 102 of 10², and 31/2 of 3½.
_POWER = regex.compile(r"[\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+")
_FRACTION = regex.compile(r"[\u00bc-\u00be\u2150-\u215f\u2189]")
_INVISIBLE = regex.compile(r"\p{Cf}+")

_PLAIN_SIGNS = str.maketrans({
    "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "—": "-",
    "‐": "-", "‑": "-", "‒": "-", "≤": "<=", "≥": ">=", "⩽": "<=", "⩾": ">=", "≠": "<>",
    "√": " sqrt ",
    "∑": " sum ", "∏": " prod ", "∫": " int ", "∞": " infty ", "π": " pi ", "θ": " theta ", "α": " alpha ",
    "β": " beta ", "γ": " gamma ", "δ": " delta ", "λ": " lambda ", "μ": " mu ", "σ": " sigma ",
    "ω": " omega ",
    "φ": " phi ",
})  # fmt: skip
_COMMANDS = [
    (regex.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), " * "),
    (regex.compile(r"\\div(?![A-Za-z])"), " / "),
    (regex.compile(r"\\(?:leqslant|leq|le)(?![A-Za-z])"), " <= "),
    (regex.compile(r"\\(?:geqslant|geq|ge)(?![A-Za-z])"), " >= "),
    (regex.compile(r"\\neq?(?![A-Za-z])"), " <> "),
    (regex.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1 / \2 "),
    (regex.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1 / \2 "),
    (regex.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|°"), " "),
    (
        regex.compile(
            r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|left|right|displaystyle|quad|qquad"
            r"|ldots|cdots|dots|[bB]igg?[lr]?)(?![A-Za-z])"
        ),
        " ",
    ),
    # Between digits these separate thousands; elsewhere they are spaces.
    (regex.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))"), ","),
    (regex.compile(r"\\[,;:! ]"), " "),
    (regex.compile(r"(?<=[\w)}])\*\*(?=[\d({-]|\w(?!\w))"), "^"),
    (regex.compile(r"\*\*"), " "),
    (regex.compile(r"(?<=\d)\s*[xX]\s*(?=\d)"), " * "),
]
_THIN_SPACES = regex.compile(r"(?<=\d)[\u2009\u202f\u00a0](?=\d{3}(?!\d))")
_SEPARATED = regex.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?![\d,])")


def plain_notation(text: str) -> str:
    r"""Returns a text in which numbers and formulas are written in one way: ``1,000`` as ``1000``, ``\times``
    and ``×`` as ``*``, ``\frac{1}{2}`` as ``1 / 2``, dashes as ``-``."""
    for pattern, plain in _COMMANDS:
        text = pattern.sub(plain, text)
    text = text.translate(_PLAIN_SIGNS)
    return _SEPARATED.sub(lambda number: number[0].replace(",", ""), text)


def word_list(text: str) -> list[str]:
    """Returns the words of a text in small letters, without punctuation and characters of no width.

    Letters are compared by what they mean (NFKC): fullwidth ones are plain ones. Numbers and formulas are
    compared by what they say (`plain_notation`). In scripts without spaces
    between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character counts as a word of its own.
    A text of signs alone is cut at its spaces.
    """
    text = _THIN_SPACES.sub(",", text)  # NFKC makes plain spaces of them
    text = _FRACTION.sub(r" \g<0>", _POWER.sub(r"^\g<0>", _INVISIBLE.sub("", text)))
    text = unicodedata.normalize("NFKC", text).casefold()
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = plain_notation(text)
    return _WORD.findall(text) or text.split()


def length_of(words: Sequence[str]) -> float:
    """Returns the length of a text in words; a character of a script without spaces is half a word."""
    return sum(0.5 if not word.isascii() and _CHARACTER.fullmatch(word) else 1.0 for word in words)


def runs(words: Sequence[str], length: float) -> Iterator[str]:
    """Returns from each word on the shortest run of at least this length (see `length_of`). A text that is
    shorter is one run."""
    weights = [length_of((word,)) for word in words] or [0.0]
    end, total = 0, 0.0
    for start, weight in enumerate(weights):
        while end < len(words) and total < length:
            total += weights[end]
            end += 1
        if total < length and start:
            return
        yield " ".join(words[start:end])
        total -= weight


def hashed(run: str, size: int) -> int:
    """Returns a hash of `size` bytes as a number."""
    return int.from_bytes(
        hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=size).digest(), "big"
    )


MISSED = 1e-3


@Rule.register("exact_duplicates")
@dataclass(frozen=True, kw_only=True)
class ExactDuplicates(Rule):
    """Drops a row whose prompt has the same words in the same order as one before it, punctuation and
    capitals aside where `loose`. The summary says how many of them had another ground truth: one of the two
    is wrong.
    """

    loose: bool = False
    """Ignores punctuation and capitals."""
    name: str | None = None

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        first: dict[int, tuple[str, str]] = {}
        found = {}
        contradicting = 0
        for one in rows:
            text = prompt_text(one.row)
            words = " ".join(word_list(text) if self.loose else text.split())
            key = hashed(words, 16)
            gold = one.row[REWARD_MODEL][GROUND_TRUTH]
            place, other = first.setdefault(key, (one.place, gold))
            if place != one.place:
                another = " with another ground truth" if other != gold else ""
                found[one.number] = f"the same as {place}{another}"
                contradicting += other != gold
        return Verdict(found, {"with_another_ground_truth": contradicting})


@Rule.register("near_duplicates")
@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Rule):
    """Drops a row whose prompt has nearly the same words as one before it that stays, by the Jaccard
    similarity of the sets of their runs of words. In scripts without spaces between words, two characters
    count as a word.

    The default leaves variants of a template with other numbers. A copy with every tenth word changed is
    found with ``ngram: 2, similarity: 0.6``, which drops such variants as well.

    MinHash with locality-sensitive hashing finds the candidates, and misses fewer than one in a thousand;
    each is then compared as it is, so nothing goes by chance.
    """

    similarity: Annotated[float, Gt(0), Le(1)] = 0.8
    """The least similarity of rows that are too much alike."""
    ngram: Annotated[int, Ge(1)] = 5
    """Words of a run; a shorter prompt is one run."""
    permutations: Annotated[int, Ge(16), Le(1024)] = 128
    """Permutations of MinHash: more compare fewer candidates."""
    within_source: bool = False
    """Compares rows of one source alone."""
    name: str | None = None

    def __post_init__(self) -> None:
        for what in missing_extras("the rule near_duplicates", "datasketch"):
            raise ValueError(f"what it needs isn't here: {what}")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        import numpy as np
        from datasketch import MinHash, MinHashLSH

        bands = bands_for(self.similarity, self.permutations)
        index = MinHashLSH(num_perm=self.permutations, params=bands)
        empty = MinHash(num_perm=self.permutations, seed=1, hashfunc=_as_it_is)  # its permutations are dear
        kept: dict[int, tuple[str, str, np.ndarray]] = {}
        found = {}
        for done, one in enumerate(rows):
            if done % 64 == 0:
                context.progress(done, len(rows))
            words = word_list(prompt_text(one.row))
            own = np.unique(np.fromiter((hashed(run, 4) for run in runs(words, self.ngram)), np.uint32))
            sketch = empty.copy()
            sketch.update_batch(own.tolist())
            best = max(
                (
                    (_jaccard(own, other), -number)
                    for number in index.query(sketch)
                    for _, source, other in [kept[number]]
                    if not self.within_source or source == one.row[DATA_SOURCE]
                ),
                default=(0.0, 0),
            )
            if best[0] >= self.similarity:
                found[one.number] = f"{best[0]:.2f} alike {kept[-best[1]][0]}"
                continue
            index.insert(one.number, sketch)
            kept[one.number] = one.place, one.row[DATA_SOURCE], own
        return Verdict(found)


def bands_for(similarity: float, permutations: int) -> tuple[int, int]:
    """Bands and rows of each, the longest bands (the fewest candidates) that miss a pair of this similarity
    with a chance below `MISSED`: ``(1 - s ** rows) ** bands``."""
    rows = max(
        (
            rows
            for rows in range(1, permutations + 1)
            if (1 - similarity**rows) ** (permutations // rows) < MISSED
        ),
        default=1,
    )
    return permutations // rows, rows


def _jaccard(runs: np.ndarray, other: np.ndarray) -> float:
    """Returns the similarity of two sets, each sorted."""
    import numpy as np

    both = len(np.intersect1d(runs, other, assume_unique=True))
    return both / (len(runs) + len(other) - both)


def _as_it_is(run: int) -> int:
    return run


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A set that is measured on: the text of each of its rows is made by the template `text`."""

    __test__ = False  # no class of tests, whatever pytest takes it for

    name: Annotated[str, MinLen(1)]
    """The name of the set in the report."""
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
            except MissingField as error:
                raise ValueError(f"the test set {self.name!r}, {place}: {error}") from error


OVERLAP_RUN = 4
"""Words of the runs that `overlap` counts: six of ten remain where every tenth word is changed."""


@Rule.register("contamination")
@dataclass(frozen=True, kw_only=True)
class Contamination(Rule):
    """Drops a row of the train split that has a run of words in common with a problem of a test set.
    Capitals, punctuation, fullwidth letters and characters of no width make no difference; in scripts without
    spaces between words, two characters count as a word. What matched is written down for each row."""

    against: Annotated[tuple[TestSet, ...], MinLen(1)]
    """The test sets."""
    ngram: Annotated[int, Ge(2)] = 13
    """Words of a run that two texts don't share by chance. A problem of fewer words is looked for whole."""
    overlap: Annotated[float, Gt(0), Le(1)] | None = None
    """The share of a problem's runs of four words with which a row goes as well: 0.5 finds copies with every
    tenth word changed, and takes long variants of a problem with other numbers for copies. It is for problems
    of about `ngram` words or more."""
    shortest: Annotated[int, Ge(1)] = 8
    """Words that a problem needs: shorter ones can't be told from chance, and count as ``too_short``."""
    action: Literal["drop", "report"] = "drop"
    """Drops rows, or lets them stay and lists them in the summary."""
    name: str | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in self.against]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"against has {', '.join(twice)} more than once: give each set its own name")

    @override
    def reads(self) -> Sequence[Path]:
        sources = [(one.source, one.split) for one in self.against]
        return [
            path for source, split in sources if isinstance(source, InFiles) for path in source.files(split)
        ]

    @override
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
        details = {
            "test_problems": problems.counts,
            "too_short": problems.too_short,
            "matches": dict(matches.most_common()),
        }
        if self.action == "report":
            return Verdict(
                {}, {**details, "matching_rows": {str(number): why for number, why in found.items()}}
            )
        return Verdict(found, details)


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
