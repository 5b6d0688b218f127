"""LiveBench's tasks on reasoning, language and tables (White et al., 2024, arXiv:2406.19314)."""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.domains.graders.tagged import plain
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import fenced_blocks, find_values, last_between, last_box, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

LONGEST = 50_000
"""Characters of an answer that are compared."""

_BOLD = re.compile(r"(?<!\*)\*{2,}+([^*\n]+)\*\*+")  # from the first asterisk of a row alone: linear

_WHOLE = ("typos", "plot_unscrambling", "cta", "tablejoin", "tablereformat")
"""Tasks whose answer may be all that is said."""

_FENCED = ("tablejoin", "tablereformat")


@Grader.register("livebench")
@dataclass(frozen=True, kw_only=True)
class LiveBench(Grader):
    r"""An answer earns the score that LiveBench gives it, by the row's `task`: 1 for a correct one, and in
    ``connections``, ``zebra_puzzle``, ``tablejoin`` and ``plot_unscrambling`` a part of it for a part.

    The answer stands behind the last `think_end`: in the last ``<solution>…</solution>``, else in the last
    ``\boxed{…}``, else (tables) in the last fenced block, else in bold on the last line that has any, else
    on the last line, or, where a whole text or table is asked for, is all of it. Only this one counts, where
    the published scorers take the best or any of several, and a part of another word is no answer.
    """

    votes_by_value: ClassVar[bool] = True

    task_field: Annotated[str, MinLen(1)] = "task"
    """The field of the row that names its task."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        text, task = response, self._task(problem)
        if task == "plot_unscrambling" and "<PLOT_SUMMARY>" in text:
            return text.rpartition("<PLOT_SUMMARY>")[2].partition("</PLOT_SUMMARY>")[0].strip() or None
        answer = last_between(text, "<solution>", "</solution>") or last_box(text)
        if task in _FENCED:
            answer = next(reversed(fenced_blocks(answer or text)), answer)
        elif answer is None and task not in ("typos", "plot_unscrambling"):
            for line in reversed(text.split("\n")):
                if parts := [part.strip(" .,:") for part in _BOLD.findall(line)]:
                    answer = ", ".join(part for part in parts if part)
                    break
        if answer is None:
            answer = text if task in _WHOLE else text.strip().rpartition("\n")[2]
        # A tab at the end is an empty cell.
        return answer.strip(" \r\n") if answer.strip() else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        score = SCORES[self._task(problem)](extracted[:LONGEST], problem.gold)
        return Grade(reward=score, outcome="ok")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Some scorers look for the gold within the answer: the one has to be in the other, and the other way.
        return super().same_answer(answer, other, problem) and super().same_answer(other, answer, problem)

    def _task(self, problem: Problem) -> str:
        task = str(problem.data.get(self.task_field, ""))
        if task in SCORES:
            return task
        near = difflib.get_close_matches(task, SCORES, n=1)
        raise ValueError(
            f"problem {problem.id} says {task!r} under {self.task_field!r}, and the tasks of LiveBench that"
            f" are known here are {', '.join(SCORES)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )


# Scores, task by task

MOST_SENTENCES = 60
LONGEST_SENTENCE = 300

_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_SHAPES = ("tetrahedra", "tetrahedron", "triangle", "square")
_TRUTH = re.compile(r"\b(yes|no|unknown)\b")
_DRESS = re.compile(r"\\(?:text|textbf|mathrm)(?=\s?\{)|[{}$*`\"“”]")


def truths(answer: str, gold: str) -> float:
    """Scores ``web_of_lies``: all of yes, no and unknown, in their order."""
    return float(_TRUTH.findall(answer.lower()) == _TRUTH.findall(gold.lower()))


def names_in_order(answer: str, gold: str) -> float:
    """Scores ``house_traversal``: the names, in their order, each once."""
    gold_names = re.findall(r"\w+", gold.casefold())
    # "Ann, then Bob" holds another word: what is no name of the gold doesn't count.
    names = [name for name in re.findall(r"\w+", answer.casefold()) if name in gold_names]
    return float(names == gold_names)


def one_answer(answer: str, gold: str) -> float:
    """Scores ``spatial``: a number, in digits or spelled, or a shape, which may be told with a word more."""
    answer_word, gold_word = _word(answer), _word(gold)
    is_shape = gold_word in _SHAPES and gold_word in answer_word.split() and len(answer_word.split()) <= 2
    return float(answer_word == gold_word or is_shape)


def several_answers(answer: str, gold: str) -> float:
    """Scores ``zebra_puzzle``: the mean of the share of answers that are right and of whether all are."""
    gold_parts = [_word(part) for part in gold.split(",")]
    parts = [_word(part) for part in answer.split(",")]
    if len(parts) > len(gold_parts):
        return 0.0
    right = sum(part == gold_part for part, gold_part in zip(parts, gold_parts, strict=False))
    return (float(right == len(gold_parts)) + right / len(gold_parts)) / 2


def groups_of_four(answer: str, gold: str) -> float:
    """Scores ``connections``: the share of groups that are found, four words after four, in any order."""
    gold_groups, groups = _groups(gold), _groups(answer)
    if len(groups) > len(gold_groups):
        return 0.0
    different = {frozenset(group) for group in groups}  # a group that is said twice earns once
    return sum(group in gold_groups for group in different) / len(gold_groups)


def corrected_text(answer: str, gold: str) -> float:
    """Scores ``typos``: the corrected text, whatever is said around it."""
    return float(" ".join(gold.split()) in " ".join(answer.split()))


def order_of_sentences(answer: str, gold: str) -> float:
    """Scores ``plot_unscrambling``: 1 less the edit distance between the orders of the sentences, for each
    sentence.

    A sentence of the gold is the one in the answer that is most like it.
    """
    gold_sentences, sentences = _sentences(gold), _sentences(answer)
    if not sentences:
        return 0.0
    order = []
    for gold_sentence in gold_sentences:
        [most_alike] = difflib.get_close_matches(gold_sentence, sentences, n=1, cutoff=0.0)
        order.append(sentences.index(most_alike))
    return 1 - edit_distance(range(len(gold_sentences)), order) / len(gold_sentences)


def label(answer: str, gold: str) -> float:
    """Scores ``cta``: the label of a column, letters and digits alone."""
    letters, gold_letters = (
        re.sub(r"[\W_]+", "", _DRESS.sub(" ", text).casefold()) for text in (answer, gold)
    )
    return float(letters == gold_letters)


def mapping(answer: str, gold: str) -> float:
    """Scores ``tablejoin``: the F1 of the pairs of columns."""
    gold_pairs, pairs = _pairs(gold), _pairs(answer)
    if gold_pairs is None:
        raise ValueError(f"the gold {gold[:100]!r} is no mapping of columns")
    if not pairs or not gold_pairs:
        return 0.0
    return 2 * len(pairs & gold_pairs) / (len(pairs) + len(gold_pairs))


def edit_distance(source: Sequence[int], target: Sequence[int]) -> int:
    """Counts the insertions, deletions and replacements that make `source` into `target`."""
    # distances[j]: from the items of the source so far to the first j of the target
    distances = list(range(len(target) + 1))
    for i, source_item in enumerate(source, start=1):
        diagonal, distances[0] = distances[0], i
        for j, target_item in enumerate(target, start=1):
            insertion = distances[j - 1] + 1
            deletion = distances[j] + 1
            replacement = diagonal + (source_item != target_item)
            diagonal, distances[j] = distances[j], min(insertion, deletion, replacement)
    return distances[-1]


def _word(text: str) -> str:
    """Returns an answer for comparison: "3" for ``**Three**`` or "position three", "cats" for "the cats"."""
    text = plain(_DRESS.sub(" ", text).replace("-", " ")).strip(" .,;:!")
    text = text.removeprefix("position ").removeprefix("the ").removesuffix(" movies")
    return str(_NUMBERS.index(text)) if text in _NUMBERS else text


def _groups(text: str) -> list[set[str]]:
    """Returns four words after four, of a text with commas or newlines between the words."""
    parts = [plain(_DRESS.sub(" ", part)) for part in re.split(r"[,\n]", text)]
    members = [part for part in parts if part]
    return [set(members[i : i + 4]) for i in range(0, len(members), 4)]


def _sentences(text: str) -> list[str]:
    """Splits at full stops; returns the first `MOST_SENTENCES`, each cut to `LONGEST_SENTENCE`."""
    sentences = [" ".join(sentence.split())[:LONGEST_SENTENCE] for sentence in text.split(".")]
    return [sentence for sentence in sentences if sentence][:MOST_SENTENCES]


def _pairs(text: str) -> set[tuple[str, str]] | None:
    """Returns keys with values of the object that the text is or holds; None where it holds none."""
    try:
        value = read_value(text)
    except UnreadableValue:
        value = next((value for _, value in find_values(text, "{")), None)
    if not isinstance(value, dict):
        return None
    return {(str(key), str(value)) for key, value in value.items()}


# Tables, in the formats that LiveBench converts between: JSON, JSON lines, HTML, Markdown, CSV, TSV

Row = dict[str, str]

_NUMBERS_OF_ROWS = ("", "index", "Unnamed: 0")
"""Names of a column that only counts rows."""

_NOTHING = ("", "nan", "none", "null", "nat")
MOST_ROWS = 10_000


def same_table(answer: str, gold: str) -> float:
    """Scores ``tablereformat``: 1 where the answer holds the gold's rows, in their order, with the same
    columns.

    Cells are equal as texts, or as numbers to within 1e-6. A column that counts rows is left out.
    """
    gold_table = next(iter(_tables(gold, None)), None)
    if gold_table is None:
        raise ValueError(f"the gold {gold[:100]!r} is no table")
    # A text may read as a table in several formats: one reading that is right is enough.
    for table in _tables(answer, list(gold_table[0])):
        if len(table) == len(gold_table) and all(map(_same_row, table, gold_table)):
            return 1.0
    return 0.0


def _same_row(row: Row, gold_row: Row) -> bool:
    if row.keys() != gold_row.keys():
        return False
    return all(_same_cell(row[name], gold_row[name]) for name in gold_row)


def _same_cell(cell: str, gold_cell: str) -> bool:
    if cell == gold_cell or (cell.lower() in _NOTHING and gold_cell.lower() in _NOTHING):
        return True
    if cell.lower() in ("true", "false"):
        return cell.lower() == gold_cell.lower()
    try:
        difference = float(cell) - float(gold_cell)
    except ValueError:
        return False
    return math.isfinite(difference) and abs(difference) < 1e-6


def _tables(text: str, columns: Sequence[str] | None) -> Iterator[list[Row]]:
    """Yields the text as a table, in each format in which it is one. In a text with other lines, rows begin
    below the line that names these columns."""
    for read_format in (_json, _json_lines, _html):
        if rows := _rows(read_format(text)):
            yield rows
    for delimiter in ("|", "\t", ","):
        if rows := _rows(_lines(text, delimiter, columns)):
            yield rows


def _rows(table: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns rows of texts, without the column that counts them; none where no other column is left."""
    rows: list[Row] = []
    for cells in table[:MOST_ROWS]:
        row: Row = {}
        for name, cell in cells.items():
            column = str(name).strip()
            if column not in _NUMBERS_OF_ROWS:
                row[column] = cell.strip() if isinstance(cell, str) else json.dumps(cell)
        rows.append(row)
    return rows if rows and rows[0] else []


def _json(text: str) -> Sequence[Mapping[str, Any]]:
    try:
        value = read_value(text)
    except UnreadableValue:
        value = next((value for _, value in find_values(text)), None)
    if isinstance(value, Mapping):
        value = value.get("data", list(value.values()))  # by rows' numbers, or with a schema
    return value if isinstance(value, list) and all(isinstance(row, Mapping) for row in value) else []


def _json_lines(text: str) -> Sequence[Mapping[str, Any]]:
    rows = []
    for line in map(str.strip, text.split("\n")):
        if line.startswith("{") and line.endswith("}"):
            try:
                row = read_value(line)
            except UnreadableValue:
                return []
            if not isinstance(row, Mapping):
                return []
            rows.append(row)
    return rows


class _Html(HTMLParser):
    """Collects the cells of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._in_cell = False

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag in ("td", "th") and bool(self.rows)
        if self._in_cell:
            self.rows[-1].append("")

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    @override
    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def _html(text: str) -> Sequence[Mapping[str, Any]]:
    if "<tr" not in text.lower():
        return []
    parser = _Html()
    parser.feed(text)
    return _below_header([row for row in parser.rows if row])


def _lines(text: str, delimiter: str, columns: Sequence[str] | None) -> Sequence[Mapping[str, Any]]:
    """Reads Markdown (``|``), TSV or CSV, from the line with the `columns` on, up to the first line that has
    another number of cells."""
    lines = [line.strip() if delimiter == "|" else line for line in text.strip("\n").split("\n")]
    if delimiter == "|":
        lines = [line.strip("|") for line in lines if line.startswith("|") and line.strip("|:- ")]
    try:
        cells = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []
    named = [] if columns is None else sorted(columns)
    starts = [
        number
        for number, row in enumerate(cells)
        if columns is None or sorted(cell for cell in row if cell not in _NUMBERS_OF_ROWS) == named
    ]
    if not starts:
        return []
    below = cells[starts[0] :]
    end = next((number for number, row in enumerate(below) if len(row) != len(below[0])), len(below))
    return _below_header(below[:end]) if len(below[0]) > 1 else []


def _below_header(rows: Sequence[Sequence[str]]) -> Sequence[Mapping[str, Any]]:
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return []
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


SCORES = {
    "web_of_lies_v2": truths,
    "web_of_lies_v3": truths,
    "house_traversal": names_in_order,
    "spatial": one_answer,
    "zebra_puzzle": several_answers,
    "connections": groups_of_four,
    "typos": corrected_text,
    "plot_unscrambling": order_of_sentences,
    "cta": label,
    "tablejoin": mapping,
    "tablereformat": same_table,
}
"""The score of an answer to a question of each task, from the answer and the gold."""
