"""The grader of LiveBench's tasks on reasoning, language and tables (White et al., 2024,
arXiv:2406.19314)."""

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

from treetune.config.errors import nearest
from treetune.domains.graders.tagged import comparable_text
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import fenced_blocks, find_values, last_between, last_box, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

MOST_CHARACTERS_OF_ANSWER = 50_000
"""The most characters of an answer that are compared."""

# The lookbehind makes the time linear: in a run of asterisks, only the first one is tried as the beginning.
_BOLD_TEXT = re.compile(r"(?<!\*)\*{2,}+([^*\n]+)\*\*+")

_TASKS_OF_WHOLE_TEXT = ("typos", "plot_unscrambling", "cta", "tablejoin", "tablereformat")
"""Tasks whose answer may be the whole response."""

_TASKS_IN_CODE_BLOCKS = ("tablejoin", "tablereformat")
"""Tasks whose answer may be in a fenced block."""


@Grader.register("livebench")
@dataclass(frozen=True, kw_only=True)
class LiveBench(Grader):
    r"""Scores an answer as LiveBench does, according to the row's `task`. A correct answer earns 1. In
    ``connections``, ``zebra_puzzle``, ``tablejoin`` and ``plot_unscrambling`` a partly correct one earns
    less.

    After the last `think_end`, the answer is the first of these that the response has: the last
    ``<solution>…</solution>``; the last ``\boxed{…}``; for tables, the last fenced block; the bold text of
    the last line that has any; the last line. If the task asks for a text or a table, the answer may be all
    of the response. The published scorers accept the best of several answers, or a part of a longer word.
    This grader does neither.
    """

    votes_by_value: ClassVar[bool] = True

    task_field: Annotated[str, MinLen(1)] = "task"
    """The field of the row that names its task."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        task = self._read_task(problem)
        if task == "plot_unscrambling" and "<PLOT_SUMMARY>" in response:
            # The task's prompt asks for the answer within this tag.
            after_tag = response.rpartition("<PLOT_SUMMARY>")[2]
            return after_tag.partition("</PLOT_SUMMARY>")[0].strip() or None
        answer = last_between(response, "<solution>", "</solution>") or last_box(response)
        if task in _TASKS_IN_CODE_BLOCKS:
            # The last block is the answer. It may be within the solution, or there is only the block.
            blocks = fenced_blocks(answer or response)
            answer = blocks[-1] if blocks else answer
        elif answer is None and task not in ("typos", "plot_unscrambling"):
            # Bold text in these two tasks may be a part of the text that is asked for.
            for line in reversed(response.split("\n")):
                bold_parts = [part.strip(" .,:") for part in _BOLD_TEXT.findall(line)]
                if bold_parts:
                    answer = ", ".join(part for part in bold_parts if part)
                    break
        if answer is None:  # the answer of some tasks may be the whole response, and of others its last line
            last_line = response.strip().rpartition("\n")[2]
            answer = response if task in _TASKS_OF_WHOLE_TEXT else last_line
        # Tabs are kept, because one at the end is an empty cell.
        return answer.strip(" \r\n") if answer.strip() else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        score = SCORE_OF_TASK[self._read_task(problem)](extracted[:MOST_CHARACTERS_OF_ANSWER], problem.gold)
        return Grade(reward=score, outcome="ok")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Some scorers search the gold within the answer. So each answer has to be right with the other one as
        # the gold.
        return super().same_answer(answer, other, problem) and super().same_answer(other, answer, problem)

    def _read_task(self, problem: Problem) -> str:
        """Returns the name of the row's task. Raises ValueError for one that has no score here."""
        task = str(problem.data.get(self.task_field, ""))
        if task in SCORE_OF_TASK:
            return task
        nearest_names = nearest(task, SCORE_OF_TASK)
        raise ValueError(
            f"problem {problem.id} has {task!r} under {self.task_field!r}, and the supported tasks of"
            f" LiveBench are {', '.join(SCORE_OF_TASK)}"
            + (f"; did you mean {nearest_names[0]!r}?" if nearest_names else "")
        )


# Scores, task by task

MOST_SENTENCES = 60
"""The most sentences of a text that are compared."""
LONGEST_SENTENCE = 300
"""The most characters of a sentence that are compared."""

_NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_SHAPES = ("tetrahedra", "tetrahedron", "triangle", "square")
_TRUTH_VALUE = re.compile(r"\b(yes|no|unknown)\b")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm)(?=\s?\{)|[{}$*`\"“”]")


def score_truths(answer: str, gold: str) -> float:
    """Scores ``web_of_lies``: the words yes, no and unknown, in their order."""
    return float(_TRUTH_VALUE.findall(answer.lower()) == _TRUTH_VALUE.findall(gold.lower()))


def score_names_in_order(answer: str, gold: str) -> float:
    """Scores ``house_traversal``: the names, in their order, each once."""
    gold_names = re.findall(r"\w+", gold.casefold())
    # Other words are skipped, as in "Ann, then Bob".
    names = [name for name in re.findall(r"\w+", answer.casefold()) if name in gold_names]
    return float(names == gold_names)


def score_one_answer(answer: str, gold: str) -> float:
    """Scores ``spatial``: a number in digits or words, or a shape. Another word may come with the shape."""
    answer_word, gold_word = _comparable_word(answer), _comparable_word(gold)
    is_shape = gold_word in _SHAPES and gold_word in answer_word.split() and len(answer_word.split()) <= 2
    return float(answer_word == gold_word or is_shape)


def score_several_answers(answer: str, gold: str) -> float:
    """Scores ``zebra_puzzle``: 1 if all answers are right, and otherwise half of the share of right ones."""
    gold_parts = [_comparable_word(part) for part in gold.split(",")]
    parts = [_comparable_word(part) for part in answer.split(",")]
    if len(parts) > len(gold_parts):
        return 0.0
    right = sum(part == gold_part for part, gold_part in zip(parts, gold_parts, strict=False))
    are_all_right = right == len(gold_parts)
    share_of_right = right / len(gold_parts)
    return (float(are_all_right) + share_of_right) / 2


def score_groups_of_four(answer: str, gold: str) -> float:
    """Scores ``connections``: the share of the gold's groups that the answer has. Every four consecutive
    words are a group, in which their order doesn't matter."""
    gold_groups, groups = _read_groups(gold), _read_groups(answer)
    if len(groups) > len(gold_groups):
        return 0.0  # among many groups, some would be right by chance
    distinct_groups = {frozenset(group) for group in groups}  # a repeated group earns once
    return sum(group in gold_groups for group in distinct_groups) / len(gold_groups)


def score_corrected_text(answer: str, gold: str) -> float:
    """Scores ``typos``: the corrected text, which may be within other text."""
    return float(" ".join(gold.split()) in " ".join(answer.split()))


def score_order_of_sentences(answer: str, gold: str) -> float:
    """Scores ``plot_unscrambling``: 1 - d / n, where d is the edit distance between the answer's and the
    gold's order of the n sentences.

    Each sentence of the gold is looked up as the most similar sentence of the answer.
    """
    gold_sentences, sentences = _split_sentences(gold), _split_sentences(answer)
    if not sentences:
        return 0.0
    order = []
    for gold_sentence in gold_sentences:
        # With the cutoff 0, one of the answer's sentences is always found.
        [most_similar] = difflib.get_close_matches(gold_sentence, sentences, n=1, cutoff=0.0)
        order.append(sentences.index(most_similar))
    return 1 - edit_distance(range(len(gold_sentences)), order) / len(gold_sentences)


def score_label(answer: str, gold: str) -> float:
    """Scores ``cta``: the label of a column, compared by its letters and digits."""
    label = re.sub(r"[\W_]+", "", _MARKUP.sub(" ", answer).casefold())
    gold_label = re.sub(r"[\W_]+", "", _MARKUP.sub(" ", gold).casefold())
    return float(label == gold_label)


def score_mapping(answer: str, gold: str) -> float:
    """Scores ``tablejoin``: the F1 of the answer's pairs, each of which maps a column of one table to a
    column of the other."""
    gold_pairs, pairs = _read_pairs(gold), _read_pairs(answer)
    if gold_pairs is None:
        raise ValueError(f"the gold {gold[:100]!r} is not a mapping of columns")
    if not pairs or not gold_pairs:
        return 0.0
    return 2 * len(pairs & gold_pairs) / (len(pairs) + len(gold_pairs))


def edit_distance(source: Sequence[int], target: Sequence[int]) -> int:
    """Counts the insertions, deletions and replacements that make `source` into `target`."""
    # distances[j] is the distance from the items of `source` so far to the first j items of `target`.
    distances = list(range(len(target) + 1))
    for i, source_item in enumerate(source, start=1):
        diagonal, distances[0] = distances[0], i  # `diagonal` is the previous row's distances[j - 1]
        for j, target_item in enumerate(target, start=1):
            insertion = distances[j - 1] + 1
            deletion = distances[j] + 1
            replacement = diagonal + (source_item != target_item)
            diagonal, distances[j] = distances[j], min(insertion, deletion, replacement)
    return distances[-1]


def _comparable_word(text: str) -> str:
    """Returns an answer for comparison: "3" for ``**Three**`` or "position three", "cats" for "the cats", and
    "action" for "action movies"."""
    text = comparable_text(_MARKUP.sub(" ", text).replace("-", " ")).strip(" .,;:!")
    text = text.removeprefix("position ").removeprefix("the ").removesuffix(" movies")
    return str(_NUMBER_WORDS.index(text)) if text in _NUMBER_WORDS else text


def _read_groups(text: str) -> list[set[str]]:
    """Returns the words of a text, which are separated by commas or newlines, in groups of four."""
    parts = [comparable_text(_MARKUP.sub(" ", part)) for part in re.split(r"[,\n]", text)]
    members = [part for part in parts if part]
    return [set(members[i : i + 4]) for i in range(0, len(members), 4)]


def _split_sentences(text: str) -> list[str]:
    """Returns the parts of a text between full stops: the first `MOST_SENTENCES`, each cut to
    `LONGEST_SENTENCE` characters."""
    sentences = [" ".join(sentence.split())[:LONGEST_SENTENCE] for sentence in text.split(".")]
    return [sentence for sentence in sentences if sentence][:MOST_SENTENCES]


def _read_pairs(text: str) -> set[tuple[str, str]] | None:
    """Returns the keys and values of the JSON object in a text; None if there is no object."""
    try:
        mapping = read_value(text)
    except UnreadableValue:
        # The last object within other text, because `find_values` begins at the end.
        mapping = next((value for _, value in find_values(text, "{")), None)
    if not isinstance(mapping, dict):
        return None
    return {(str(key), str(value)) for key, value in mapping.items()}


# Tables, in the formats that LiveBench converts between: JSON, JSON lines, HTML, Markdown, CSV, TSV

LiveBenchRow = dict[str, str]

_NAMES_OF_INDICES = ("", "index", "Unnamed: 0")
"""Names of a column that only has the rows' numbers."""

_EMPTY_CELLS = ("", "nan", "none", "null", "nat")
"""Texts of cells without a value, which all equal each other."""
MOST_ROWS_OF_TABLE = 10_000
"""The most rows of a table that are compared."""


def score_table(answer: str, gold: str) -> float:
    """Scores ``tablereformat``: 1 if the answer has the gold's rows in their order, with the same columns.

    Cells are equal as texts, or as numbers that differ by less than 1e-6. A column of row numbers is ignored.
    """
    gold_table = next(iter(_read_tables(gold, columns=None)), None)
    if gold_table is None:
        raise ValueError(f"the gold {gold[:100]!r} is not a table")
    # A text may be a table in several formats. It is enough if one of them is right.
    for table in _read_tables(answer, list(gold_table[0])):
        if len(table) == len(gold_table) and all(map(_same_row, table, gold_table)):
            return 1.0
    return 0.0


def _same_row(row: LiveBenchRow, gold_row: LiveBenchRow) -> bool:
    if row.keys() != gold_row.keys():
        return False
    return all(_same_cell(row[name], gold_row[name]) for name in gold_row)


def _same_cell(cell: str, gold_cell: str) -> bool:
    """Returns whether two cells are equal: as texts, as empty cells, as booleans or as numbers."""
    if cell == gold_cell or (cell.lower() in _EMPTY_CELLS and gold_cell.lower() in _EMPTY_CELLS):
        return True
    if cell.lower() in ("true", "false"):  # formats write booleans differently: True in CSV, true in JSON
        return cell.lower() == gold_cell.lower()
    try:
        difference = float(cell) - float(gold_cell)
    except ValueError:  # words, which are different
        return False
    return math.isfinite(difference) and abs(difference) < 1e-6


def _read_tables(text: str, columns: Sequence[str] | None) -> Iterator[list[LiveBenchRow]]:
    """Yields the rows of the table in a text, once for each format in which the text can be read.

    In formats of lines, a text may have other lines before the table: the header is the line that names the
    given `columns`, or the first line if `columns` is None.
    """
    for read_format in (_read_json, _read_json_lines, _read_html):
        if rows := _clean_rows(read_format(text)):
            yield rows
    for delimiter in ("|", "\t", ","):
        if rows := _clean_rows(_read_lines(text, delimiter, columns)):
            yield rows


def _clean_rows(table: Sequence[Mapping[str, Any]]) -> list[LiveBenchRow]:
    """Returns rows with texts as cells, without the column of row numbers. Returns no rows if there is no
    other column."""
    rows: list[LiveBenchRow] = []
    for cells in table[:MOST_ROWS_OF_TABLE]:
        row: LiveBenchRow = {}
        for name, cell in cells.items():
            column = str(name).strip()
            if column not in _NAMES_OF_INDICES:
                row[column] = cell.strip() if isinstance(cell, str) else json.dumps(cell)
        rows.append(row)
    return rows if rows and rows[0] else []


def _read_json(text: str) -> Sequence[Mapping[str, Any]]:
    """Reads the rows of a table in JSON, each with its cells by column.

    Returns no rows if the text has no such table.
    """
    try:
        value = read_value(text)
    except UnreadableValue:
        # The last JSON value within other text, because `find_values` begins at the end.
        value = next((value for _, value in find_values(text)), None)
    if isinstance(value, Mapping):
        # {"schema": …, "data": [row, row]}, or {"0": row, "1": row}
        value = value["data"] if "data" in value else list(value.values())
    return value if isinstance(value, list) and all(isinstance(row, Mapping) for row in value) else []


def _read_json_lines(text: str) -> Sequence[Mapping[str, Any]]:
    """Reads a table with a JSON object in each line. Other lines are skipped. Returns no rows if a line in
    braces can't be read as an object."""
    rows = []
    for line in map(str.strip, text.split("\n")):
        if line.startswith("{") and line.endswith("}"):
            try:
                row = read_value(line)
            except UnreadableValue:  # the text has another format
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
            self._in_cell = False
        elif tag in ("td", "th"):
            self._in_cell = bool(self.rows)  # a cell before the first row is ignored
            if self._in_cell:
                self.rows[-1].append("")

    @override
    def handle_endtag(self, tag: str) -> None:
        # The end tag of a cell may be missing.
        if tag in ("td", "th", "tr", "table"):
            self._in_cell = False

    @override
    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def _read_html(text: str) -> Sequence[Mapping[str, Any]]:
    """Reads the rows of a table in HTML. Returns no rows if the text has no such table."""
    if "<tr" not in text.lower():
        return []
    parser = _Html()
    parser.feed(text)
    return _rows_below_header([row for row in parser.rows if row])


def _read_lines(text: str, delimiter: str, columns: Sequence[str] | None) -> Sequence[Mapping[str, Any]]:
    """Reads Markdown (``|``), TSV or CSV: the line with the `columns`, and the lines after it with the same
    number of cells."""
    lines = [line.strip() if delimiter == "|" else line for line in text.strip("\n").split("\n")]
    if delimiter == "|":  # only the rows of a table, without the rule |---|---|
        table_lines = [line for line in lines if line.startswith("|") and line.strip("|:- ")]
        # One bar at each end, since |a||b|| has an empty cell in the middle and one at the end.
        lines = [line.removeprefix("|").removesuffix("|") for line in table_lines]
    rows: list[list[str]] = []
    try:
        for cells in csv.reader(lines, delimiter=delimiter):
            rows.append([cell.strip() for cell in cells])
    except csv.Error:
        return []
    header_index: int | None = None
    # With `columns` None, the first line is the header. Columns of row numbers are not compared.
    for index, row in enumerate(rows):
        names = sorted(cell for cell in row if cell not in _NAMES_OF_INDICES)
        if columns is None or names == sorted(columns):
            header_index = index
            break
    if header_index is None or len(rows[header_index]) <= 1:
        return []  # lines without the delimiter would be a table of one column
    table: list[list[str]] = []
    for row in rows[header_index:]:
        if len(row) != len(rows[header_index]):
            break
        table.append(row)
    return _rows_below_header(table)


def _rows_below_header(rows: Sequence[Sequence[str]]) -> Sequence[Mapping[str, Any]]:
    """Returns the rows after the first one as objects, whose keys are the cells of the first row. Returns no
    rows unless all have the same length as the first one."""
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return []
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


SCORE_OF_TASK = {
    "web_of_lies_v2": score_truths,
    "web_of_lies_v3": score_truths,
    "house_traversal": score_names_in_order,
    "spatial": score_one_answer,
    "zebra_puzzle": score_several_answers,
    "connections": score_groups_of_four,
    "typos": score_corrected_text,
    "plot_unscrambling": score_order_of_sentences,
    "cta": score_label,
    "tablejoin": score_mapping,
    "tablereformat": score_table,
}
"""The function for each task that returns the score of an answer, given the answer and the gold."""
