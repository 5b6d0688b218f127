"""Rules against rows with nearly the words of another row, or of a problem of a test set."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import regex
from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune.data.templates import check_text, render_text
from treetune.domains.domain_rows import DATA_SOURCE, GROUND_TRUTH, REWARD_MODEL, prompt_text
from treetune.domains.extras import missing_extras
from treetune.exceptions import MissingField
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source

if TYPE_CHECKING:
    import numpy as np

_LETTER_WITHOUT_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""Letters of scripts that put no spaces between words."""

# A number with its point is one word, and so is each sign of mathematics: 2 + 3 is not 2 * 3.
_WORD = regex.compile(
    rf"\p{{Nd}}+(?:\.\p{{Nd}}+)?|{_LETTER_WITHOUT_SPACES}\p{{M}}*|(?:(?!{_LETTER_WITHOUT_SPACES})\p{{L}}\p{{M}}*)+|[+\-*/^=<>%]"
)
_CHARACTER = regex.compile(rf"{_LETTER_WITHOUT_SPACES}\p{{M}}*")
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
_LATEX_REPLACEMENTS = [
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
_NUMBER_WITH_SEPARATORS = regex.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?![\d,])")


def plain_notation(text: str) -> str:
    r"""Returns a text in which numbers and formulas are written in one way: ``1,000`` as ``1000``, ``\times``
    and ``×`` as ``*``, ``\frac{1}{2}`` as ``1 / 2``, dashes as ``-``."""
    for pattern, replacement in _LATEX_REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.translate(_PLAIN_SIGNS)
    return _NUMBER_WITH_SEPARATORS.sub(lambda number: number[0].replace(",", ""), text)


def word_list(text: str) -> list[str]:
    """Returns the words of a text in small letters, without punctuation and characters of no width.

    Variants of letters become plain ones, such as fullwidth letters (NFKC), and so do variants of numbers and
    formulas (`plain_notation`). In scripts without spaces between words (Chinese, Japanese, Thai, Lao, Khmer,
    Burmese), each character is a word. A text that has only signs is cut at its spaces.
    """
    # A thin space between the digits of a number becomes a comma, which `plain_notation` removes. NFKC would
    # turn it into a plain space, and the number would become two words.
    text = _THIN_SPACES.sub(",", text)
    # Powers and fractions are separated first (10^², 3 ½), since NFKC would turn 10² into 102, and 3½ into
    # 31/2.
    text = _FRACTION.sub(r" \g<0>", _POWER.sub(r"^\g<0>", _INVISIBLE.sub("", text)))
    text = unicodedata.normalize("NFKC", text).casefold()
    # NFKC is applied once more, since `casefold` may give letters that it changes. It writes fractions with
    # U+2044 in place of a slash.
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = plain_notation(text)
    return _WORD.findall(text) or text.split()


def length_in_words(words: Sequence[str]) -> float:
    """Returns the length of a text in words. A character of a script without spaces counts as half a word."""
    return sum(0.5 if not word.isascii() and _CHARACTER.fullmatch(word) else 1.0 for word in words)


def runs_of_words(words: Sequence[str], length: float) -> Iterator[str]:
    """Yields, from each word on, the shortest run of words with at least this length. A shorter text is one
    run.

    A length is a number of words, in which a character of a script without spaces, such as Chinese, counts as
    half a word (`length_in_words`). Example: the runs of length 2 of ``a b c`` are ``a b`` and ``b c``.
    """
    lengths = [length_in_words((word,)) for word in words] or [0.0]  # a text without words is one empty run
    end, length_of_run = 0, 0.0
    for start, length_of_first in enumerate(lengths):
        while end < len(words) and length_of_run < length:
            length_of_run += lengths[end]
            end += 1
        is_too_short = length_of_run < length  # the text has ended
        if is_too_short and start > 0:
            return
        yield " ".join(words[start:end])
        length_of_run -= length_of_first


def hash_number(text: str, size: int) -> int:
    """Returns a hash of `size` bytes as a number."""
    # A text from JSON may hold half of a surrogate pair, which UTF-8 has no bytes for.
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()
    return int.from_bytes(digest, "big")


LARGEST_MISS_PROBABILITY = 1e-3
"""The highest probability with which MinHash may miss a pair of rows that are similar enough."""


@Rule.register("exact_duplicates")
@dataclass(frozen=True, kw_only=True)
class ExactDuplicates(Rule):
    """Drops a row whose prompt has the same words in the same order as a row before it. With `loose`,
    punctuation and capitals are ignored. The summary says how many dropped rows had another ground truth than
    the row before: one of the two is wrong.
    """

    loose: bool = False
    """Ignores punctuation and capitals."""
    name: str | None = None

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows whose prompts are the same as that of an earlier row."""
        first_by_words: dict[int, tuple[str, str]] = {}  # location and ground truth, by a hash of the words
        dropped = {}
        contradicting = 0
        for row in rows:
            text = prompt_text(row.row)
            words = word_list(text) if self.loose else text.split()
            key = hash_number(" ".join(words), size=16)
            ground_truth = row.row[REWARD_MODEL][GROUND_TRUTH]
            first_location, first_ground_truth = first_by_words.setdefault(key, (row.location, ground_truth))
            if first_location == row.location:  # it is the first one itself
                continue
            why = f"the same as {first_location}"
            if first_ground_truth != ground_truth:
                why += " with another ground truth"
                contradicting += 1
            dropped[row.number] = why
        return Verdict(dropped, {"with_another_ground_truth": contradicting})


@Rule.register("near_duplicates")
@dataclass(frozen=True, kw_only=True)
class NearDuplicates(Rule):
    """Drops a row whose prompt has nearly the same words as one before it that stays, by the Jaccard
    similarity of the sets of their runs of words. In scripts without spaces between words, two characters
    count as a word.

    The default leaves variants of a template with other numbers. A copy with every tenth word changed is
    found with ``ngram: 2, similarity: 0.6``, which drops such variants as well.

    MinHash with locality-sensitive hashing finds the candidates, and misses fewer than one in a thousand of
    the pairs that are similar enough. Each candidate is then compared exactly, so no row is dropped by
    chance.
    """

    similarity: Annotated[float, Gt(0), Le(1)] = 0.8
    """The least similarity of rows that are too much alike."""
    ngram: Annotated[int, Ge(1)] = 5
    """Words of a run; a shorter prompt is one run."""
    permutations: Annotated[int, Ge(16), Le(1024)] = 128
    """Permutations of MinHash: more compare fewer candidates."""
    within_source: bool = False
    """Compares a row only with rows of the same source."""
    name: str | None = None

    def __post_init__(self) -> None:
        for absent_extra in missing_extras("the rule near_duplicates", "datasketch"):
            raise ValueError(f"what it needs isn't here: {absent_extra}")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows whose similarity to an earlier kept row is `similarity` or more."""
        import numpy as np
        from datasketch import MinHash, MinHashLSH

        bands = bands_for(self.similarity, self.permutations)
        sketches_of_kept = MinHashLSH(num_perm=self.permutations, params=bands)
        # This sketch is copied for each row. Making a new one would draw its permutations, which takes long.
        # A sketch hashes what it gets. Here it gets hashes of runs, which `_hash_of_hash` leaves unchanged.
        empty = MinHash(num_perm=self.permutations, seed=1, hashfunc=_hash_of_hash)
        kept_rows: dict[int, _KeptRow] = {}
        dropped = {}
        for index, row in enumerate(rows):
            if index % 64 == 0:
                context.progress(index, len(rows))
            words = word_list(prompt_text(row.row))
            # Hashes have four bytes, since MinHash takes numbers of 32 bits.
            hashes_of_runs = (hash_number(run, size=4) for run in runs_of_words(words, self.ngram))
            hashes = np.unique(np.fromiter(hashes_of_runs, np.uint32))
            source = row.row[DATA_SOURCE]
            sketch = empty.copy()
            sketch.update_batch(hashes.tolist())
            best_number, best_similarity = None, 0.0
            for number in sorted(sketches_of_kept.query(sketch)):  # sorted: the earliest row wins a tie
                candidate = kept_rows[number]
                if self.within_source and candidate.source != source:
                    continue
                similarity = _jaccard(hashes, candidate.hashes)
                if similarity > best_similarity:
                    best_number, best_similarity = number, similarity
            if best_number is not None and best_similarity >= self.similarity:
                dropped[row.number] = f"{best_similarity:.2f} alike {kept_rows[best_number].location}"
                continue
            sketches_of_kept.insert(row.number, sketch)
            kept_rows[row.number] = _KeptRow(row.location, source, hashes)
        return Verdict(dropped)


class _KeptRow(NamedTuple):
    """A row that stays, with which later rows are compared."""

    location: str
    source: str
    hashes: np.ndarray
    """The hashes of the row's runs of words: sorted, each once."""


def bands_for(similarity: float, permutations: int) -> tuple[int, int]:
    """Returns the number of bands of MinHash, and the rows of each.

    A pair of similarity s is a candidate with the probability ``1 - (1 - s ** rows) ** bands``. The more rows
    a band has, the fewer candidates there are. So the result has the longest bands with which a pair of this
    similarity is missed with a probability below `LARGEST_MISS_PROBABILITY`.
    """
    longest = 1
    for rows in range(1, permutations + 1):
        bands = permutations // rows
        if (1 - similarity**rows) ** bands < LARGEST_MISS_PROBABILITY:
            longest = rows
    return permutations // longest, longest


def _jaccard(hashes: np.ndarray, other_hashes: np.ndarray) -> float:
    """Returns the Jaccard similarity of two sets: the size of their intersection over that of their union."""
    import numpy as np

    common = len(np.intersect1d(hashes, other_hashes, assume_unique=True))
    return common / (len(hashes) + len(other_hashes) - common)


def _hash_of_hash(hash_of_run: int) -> int:
    """Returns its argument: MinHash asks for a hash function, and runs are hashes already."""
    return hash_of_run


@dataclass(frozen=True, kw_only=True)
class TestSet:
    """A test set. The template `text` makes the text of each of its problems."""

    __test__ = False  # pytest would collect this class as tests, because of its name

    name: Annotated[str, MinLen(1)]
    """The name of the set in the report."""
    source: Source
    split: Split = "test"
    """The split of the source that holds its problems."""
    text: str = "{{ problem }}"

    def __post_init__(self) -> None:
        check_text(self.text, "text")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields each problem's location and text. Raises ValueError if a problem lacks a field of the
        template."""
        for location, row in self.source.rows(self.split):
            try:
                yield location, render_text(self.text, row)
            except MissingField as error:
                raise ValueError(f"the test set {self.name!r}, {location}: {error}") from error


OVERLAP_RUN = 4
"""The number of words in a run that `overlap` counts. If every tenth word of a text is changed, six of ten
such runs remain."""
RUN_HASH = 12
"""The bytes of a run's hash. With so many, even among billions of runs no two have the same hash by
chance."""


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
    """A row is also dropped if it has at least this share of a problem's runs of four words. 0.5 finds copies
    with every tenth word changed, and takes long variants of a problem with other numbers for copies. Only
    problems of about `ngram` words or more are compared in this way. Null: no row is dropped for it."""
    shortest: Annotated[int, Ge(1)] = 8
    """The fewest words of a problem. Shorter problems would match by chance. They are not looked for, and are
    counted as ``too_short``."""
    action: Literal["drop", "report"] = "drop"
    """``drop`` drops the rows that match; ``report`` lets them stay, and lists them in the summary."""
    name: str | None = None

    def __post_init__(self) -> None:
        names = [test_set.name for test_set in self.against]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"against has {', '.join(twice)} more than once: give each set its own name")

    @override
    def reads(self) -> Sequence[Path]:
        """Returns the files of the test sets that are in files."""
        paths: list[Path] = []
        for test_set in self.against:
            if isinstance(test_set.source, InFiles):
                paths += test_set.source.files(test_set.split)
        return paths

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Finds the training rows that match a problem of a test set, and drops or reports them."""
        problems = _TestProblems(self)
        matches: Counter[str] = Counter()  # by test set
        why_by_number = {}
        for index, row in enumerate(rows):
            if index % 256 == 0:
                context.progress(index, len(rows))
            if row.split != "train":  # problems of other splits aren't trained on
                continue
            match = problems.match(word_list(prompt_text(row.row)), self.overlap)
            if match is not None:
                matches[match.test_set] += 1
                why_by_number[row.number] = f"{match.test_set} ({match.location}): {match.common}"
        details: dict[str, Any] = {
            "test_problems": problems.counts,
            "too_short": problems.too_short,
            "matches": dict(matches.most_common()),
        }
        if self.action == "report":
            details["matching_rows"] = {str(number): why for number, why in why_by_number.items()}
            return Verdict(dropped={}, details=details)
        return Verdict(why_by_number, details)


class _Match(NamedTuple):
    """A test problem that a row is too similar to."""

    test_set: str
    location: str
    common: str
    """The words in common, or the share of runs."""


class _ShortRuns(NamedTuple):
    """A test problem, and the number of its different short runs (`size`)."""

    test_set: str
    location: str
    size: int


class _TestProblems:
    """The test problems, found by the runs of words that they have."""

    def __init__(self, rule: Contamination) -> None:
        self.counts: dict[str, int] = {}
        """Problems of each test set."""
        self.too_short: dict[str, int] = {}
        """Problems of each test set that have too few words to be looked for."""
        self._by_long_run: dict[int, tuple[str, str]] = {}
        """Test set and location of the first problem with a long run, by the run's hash. A long run is
        `ngram` consecutive words of a problem, or all words of a problem that has fewer."""
        self._lengths_of_long_runs: set[float] = set()
        """`ngram`, and the lengths of shorter problems in words. A character of a script without spaces, such
        as Chinese, counts as half a word, so a length may be 6.5."""
        self._by_short_run: defaultdict[int, list[int]] = defaultdict(list)
        """All problems with a short run (`OVERLAP_RUN` words), as indices of `_short_runs`, by the run's
        hash."""
        self._short_runs: list[_ShortRuns] = []
        for test_set in rule.against:
            self._add(test_set, rule)

    def _add(self, test_set: TestSet, rule: Contamination) -> None:
        """Adds the long and the short runs of a test set's problems. Raises ValueError if it has none."""
        count = too_short = 0
        for location, text in test_set.texts():
            count += 1
            words = word_list(text)
            length = min(rule.ngram, length_in_words(words))
            # `shortest` may exceed `ngram`, but a problem with a run of `ngram` words is never too short.
            if length < min(rule.shortest, rule.ngram):
                too_short += 1
                continue
            self._lengths_of_long_runs.add(length)
            for run in runs_of_words(words, length):
                self._by_long_run.setdefault(hash_number(run, RUN_HASH), (test_set.name, location))
            short_runs = {hash_number(run, RUN_HASH) for run in runs_of_words(words, OVERLAP_RUN)}
            # A problem with fewer different short runs than `ngram` words have is too short, or repeats
            # itself, such as a table of zeros. A share of so few runs says nothing.
            short_runs_of_ngram_words = rule.ngram - OVERLAP_RUN + 1
            if len(short_runs) >= short_runs_of_ngram_words:
                index = len(self._short_runs)  # of the problem, in `_short_runs`
                for run_hash in short_runs:
                    self._by_short_run[run_hash].append(index)
                self._short_runs.append(_ShortRuns(test_set.name, location, len(short_runs)))
        if not count:
            raise ValueError(f"the test set {test_set.name!r} is empty")
        self.counts[test_set.name] = count
        if too_short:
            self.too_short[test_set.name] = too_short

    def match(self, words: Sequence[str], overlap: float | None) -> _Match | None:
        """Returns the test problem that has a long run of these words. Without one, returns the problem with
        the largest share of its short runs among these words, if the share is `overlap` or more."""
        for length in sorted(self._lengths_of_long_runs, reverse=True):
            for run in runs_of_words(words, length):
                problem = self._by_long_run.get(hash_number(run, RUN_HASH))
                if problem is not None:
                    test_set, location = problem
                    return _Match(test_set, location, run)
        if overlap is None:
            return None
        common: Counter[int] = Counter()  # runs in common with each problem
        for key in {hash_number(run, RUN_HASH) for run in runs_of_words(words, OVERLAP_RUN)}:
            common.update(self._by_short_run.get(key, ()))
        shares = {index: count / self._short_runs[index].size for index, count in common.items()}
        best = max(shares, key=lambda index: shares[index], default=None)
        if best is None or shares[best] < overlap:
            return None
        problem_of_best = self._short_runs[best]
        common_runs = f"{shares[best]:.0%} of its runs of {OVERLAP_RUN} words"
        return _Match(problem_of_best.test_set, problem_of_best.location, common_runs)
