r"""What the VinePPO paper's code takes out of an answer to a MATH problem, quirks included.

Its rules are those of the Minerva evaluation (Lewkowycz et al., 2022, arXiv:2206.14858, appendix
D.1) with additions. Among what they get wrong, and this reproduces: only the first line of a box is
read, so that a matrix over several lines is lost; ``\boxed {5}`` with a space is no answer;
``7\cdot 1`` becomes 71; "information" becomes ``\inftyormation``.
"""

from __future__ import annotations

import re

from treetune.tasks.latex import braces

LONGEST = 1000
"""Characters of an answer that are read: three times the longest gold. The rules are quadratic in it."""

MOST_BOXES = 50
"""Only the last ones count, as many as the gold has answers."""

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_OUTPUT = re.compile(r"```output\n(.*?)```", re.DOTALL)
_AND = re.compile(r"\\text\{\s*and\s*\}")

_FIRST: list[tuple[str, str]] = [
    (r"\n", ""),
    (r"\.+$", ""),
    (r"\\!", ""),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"\\[tdc]frac", r"\\frac"),
    (r"\\left|\\right", ""),
]
_THEN: list[tuple[str, str]] = [
    (r"\^\\circ|\^\{\\circ\}", ""),
    (r"\{[cm]?m\}(?:\^[23])?", ""),
    (r"p\.m\.$", ""),
    (r"(\d)\s*t$", r"\1"),
    (r"\\?\$", ""),
    (r"x\\in", ""),
    (r"\\%", "%"),
    (r" \.", " 0."),
    (r"\{\.", "{0."),
    (r"\\cdot", ""),
    (r"infinity", r"\\infty"),
]
_LAST: list[tuple[str, str]] = [
    (r"\\mathbf|\\mathrm", ""),
    (r"\\mbox\{[^{}]*\}", ""),
]
_UNIT = re.compile(r"\\text\{.*?\}$")
_ZEROS = re.compile(r"(\d)\.0+(?!\d)")
_ROOT = re.compile(r"\\(sqrt|tan)([A-Za-z0-9]+)")
_FRAC = re.compile(r"\\frac(?:(?P<one>[^\s{}\\])(?P<two>[^\s{}\\])|(?P<first>[^\s{}\\])(?=\{))")
_SLASH = re.compile(r"(-?\d+|-?\d*\\sqrt\{\d+\})/(-?\d+|-?\d*\\sqrt\{\d+\})")


def extract(text: str, question: str) -> list[str]:
    """The answers that a text gives, normalised; none where it gives none.

    `question` decides whether commas part several answers.
    """
    found = [_normalised_line(part) for part in _parts(text)]
    answers = []
    for answer in found:
        if "separated by commas" in question and not re.search(r"[()\[\]]", answer):
            answers += [part.strip() for part in answer.split(",")]
        else:
            answers += [part.strip() for part in _AND.split(answer)]
    return answers


def _parts(text: str) -> list[str]:
    _, start, rest = text.partition("final answer is $")
    if start and "$. I hope" in rest:
        return [rest.partition("$. I hope")[0]]
    if "boxed" in text:
        return _boxes(text)
    _, told, rest = text.rpartition("he answer is")
    if told:
        return [rest]
    outputs = _OUTPUT.findall(text)
    if outputs:
        return [outputs[-1]]
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1:]


def _boxes(text: str) -> list[str]:
    """What stands in each box; a box that isn't closed, or has no brace at once, holds nothing."""
    found = []
    pairs = braces(text)
    for piece in list(re.finditer(r"boxed\{", text))[-MOST_BOXES:]:
        end = pairs.get(piece.end() - 1)
        if end is not None:
            percent = "%" if text[end + 1 : end + 2] == "%" else ""
            found.append(text[piece.end() : end] + percent)
    return found


def _normalised_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0].lstrip(":").strip()[:LONGEST]
    return normalised(line.rstrip("/").rstrip(".").rstrip("/"))


def normalised(text: str) -> str:
    """One answer in the form that is compared: the rules, one after the other."""
    text = _applied(_FIRST, text.strip())
    without_unit = _UNIT.sub("", text).strip()
    text = _applied(_THEN, without_unit or text)
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _applied(_LAST, text)
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZEROS.sub(r"\1", text)
    if text.startswith("."):
        text = "0" + text
    text = _ROOT.sub(r"\\\1{\2}", text)
    text = text.replace(" ", "")
    text = _FRAC.sub(_completed, text)
    match = _SLASH.fullmatch(text)
    if match:
        text = rf"\frac{{{match[1]}}}{{{match[2]}}}"
    return text.rstrip("\\,.")


def _applied(rules: list[tuple[str, str]], text: str) -> str:
    for pattern, into in rules:
        text = re.sub(pattern, into, text).strip()
    return text


def _completed(match: re.Match[str]) -> str:
    if match["one"]:
        return rf"\frac{{{match['one']}}}{{{match['two']}}}"
    return rf"\frac{{{match['first']}}}"
