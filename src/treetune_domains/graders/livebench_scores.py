"""What an answer to a question of LiveBench earns, task by task: functions of the answer and the gold."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from treetune.tasks.graders.extraction import NoValue, read_value, values
from treetune_domains.graders.tagged import plain

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
    """``web_of_lies``: all of yes, no and unknown, in their order."""
    return float(_TRUTH.findall(answer.lower()) == _TRUTH.findall(gold.lower()))


def names_in_order(answer: str, gold: str) -> float:
    """``house_traversal``: the names, in their order, each once."""
    meant = re.findall(r"\w+", gold.casefold())
    return float([name for name in re.findall(r"\w+", answer.casefold()) if name in meant] == meant)


def one_answer(answer: str, gold: str) -> float:
    """``spatial``: a number, in digits or spelled, or a shape, which may be told with a word more."""
    said, meant = _word(answer), _word(gold)
    shape = meant in _SHAPES and meant in said.split() and len(said.split()) <= 2
    return float(said == meant or shape)


def several_answers(answer: str, gold: str) -> float:
    """``zebra_puzzle``: the mean of the share of answers that are right and of whether all are."""
    meant = [_word(part) for part in gold.split(",")]
    said = [_word(part) for part in answer.split(",")]
    if len(said) > len(meant):
        return 0.0
    right = sum(one == other for one, other in zip(said, meant, strict=False))
    return (float(right == len(meant)) + right / len(meant)) / 2


def groups_of_four(answer: str, gold: str) -> float:
    """``connections``: the share of groups that are found, four words after four, in any order."""
    meant, said = _groups(gold), _groups(answer)
    if len(said) > len(meant):
        return 0.0
    return sum(group in meant for group in {frozenset(group) for group in said}) / len(meant)


def corrected_text(answer: str, gold: str) -> float:
    """``typos``: the corrected text, whatever is said around it."""
    return float(" ".join(gold.split()) in " ".join(answer.split()))


def order_of_sentences(answer: str, gold: str) -> float:
    """``plot_unscrambling``: 1 less the edit distance between the orders of the sentences, for each sentence.

    A sentence of the gold is the one in the answer that is most like it.
    """
    meant, said = _sentences(gold), _sentences(answer)
    if not said:
        return 0.0
    order = []
    for sentence in meant:
        [best] = difflib.get_close_matches(sentence, said, n=1, cutoff=0.0)
        order.append(said.index(best))
    return 1 - edit_distance(range(len(meant)), order) / len(meant)


def label(answer: str, gold: str) -> float:
    """``cta``: the label of a column, letters and digits alone."""
    return float(_letters(answer) == _letters(gold))


def mapping(answer: str, gold: str) -> float:
    """``tablejoin``: the F1 of the pairs of columns."""
    meant, said = _pairs(gold), _pairs(answer)
    if meant is None:
        raise ValueError(f"the gold {gold[:100]!r} is no mapping of columns")
    if not said or not meant:
        return 0.0
    return 2 * len(said & meant) / (len(said) + len(meant))


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Insertions, deletions and replacements from one to the other."""
    row = list(range(len(other) + 1))
    for number, item in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, start=1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (item != wanted)),
            )
    return row[-1]


def _word(text: str) -> str:
    text = plain(_DRESS.sub(" ", text).replace("-", " ")).strip(" .,;:!")
    text = text.removeprefix("position ").removeprefix("the ").removesuffix(" movies")
    return str(_NUMBERS.index(text)) if text in _NUMBERS else text


def _groups(text: str) -> list[set[str]]:
    words = [plain(_DRESS.sub(" ", word)) for word in re.split(r"[,\n]", text)]
    words = [word for word in words if word]
    return [set(words[place : place + 4]) for place in range(0, len(words), 4)]


def _sentences(text: str) -> list[str]:
    sentences = [" ".join(sentence.split())[:LONGEST_SENTENCE] for sentence in text.split(".")]
    return [sentence for sentence in sentences if sentence][:MOST_SENTENCES]


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", _DRESS.sub(" ", text).casefold())


def _pairs(text: str) -> set[tuple[str, str]] | None:
    try:
        value = read_value(text)
    except NoValue:
        value = next((value for _, value in values(text, "{")), None)
    if not isinstance(value, dict):
        return None
    return {(str(key), str(value)) for key, value in value.items()}
