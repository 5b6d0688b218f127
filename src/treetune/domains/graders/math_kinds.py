"""Answers that look like arithmetic but are times, dates, ratios or scores. The method `read` of each class
reads a text. The grader `math` compares the results."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

# "At what time do they meet?", "When does the train leave?"
_ASKS_FOR_TIME = re.compile(
    r"\b(?:what time|time|clock|o'clock|[ap]\.?m\.?|noon|midnight|when|hour hand|arrive[sd]?"
    r"|depart|schedule)\b",
    re.IGNORECASE,
)
_ASKS_FOR_RATIO = re.compile(r"\b(?:ratio|ratios|proportion|proportional|odds|scale)\b", re.IGNORECASE)
_MOST_PARTS_OF_A_RATIO = 8


@dataclass(frozen=True)
class TimeOfDay:
    """A time of the day, such as ``4:30 p.m.``."""

    hour: int
    """The hour as it is written, from 0 to 23: 4 for ``4 p.m.``. It is 0 for ``24:00``."""
    minute: int | None
    """None for a time such as ``4 p.m.``, which is written without minutes."""
    second: int | None = None
    half: str = ""
    """The half of the day, "am" or "pm"; "" if it isn't given."""
    is_sure: bool = True
    """False for a text such as ``1:20``, which may also be a ratio."""

    # 4:30, 16:30:05, 4:30 pm, 4 o'clock, 12 noon, 4 in the afternoon
    _WRITTEN = re.compile(
        r"(?P<hour>\d{1,2})(?: ?: ?(?P<minute>\d{2})(?: ?: ?(?P<second>\d{2}))?)? ?"
        r"(?P<half>[aApP] ?[mM]|o'? ?clock|in the (?:morning|afternoon|evening)|noon|midnight)?"
    )

    @classmethod
    def read(cls, text: str) -> TimeOfDay | None:
        """Reads a text without LaTeX. Returns None if it isn't a time."""
        if text.lower() in ("noon", "midnight"):
            return cls(12, 0, half="pm" if text.lower() == "noon" else "am")
        match = cls._WRITTEN.fullmatch(text)
        if match is None or (match["minute"] is None and match["half"] is None):
            return None
        hour = int(match["hour"])
        minute = None if match["minute"] is None else int(match["minute"])
        second = None if match["second"] is None else int(match["second"])
        if (hour, minute or 0, second or 0) == (24, 0, 0):
            hour = 0  # 24:00 is midnight
        if hour > 23 or (minute or 0) > 59 or (second or 0) > 59:
            return None
        half = _half_of_day(match["half"] or "")
        if half and not 1 <= hour <= 12:
            return None  # 14 p.m.
        if minute is None and not half:
            minute = 0  # "3 o'clock" is the same as "3:00", unlike "4 p.m.", which isn't "4:00"
        # A ratio of 1 to 5 is not written as 1:05.
        leading_zero = any((match[part] or "").startswith("0") for part in ("minute", "second"))
        is_sure = bool(match["half"]) or leading_zero
        return cls(hour, minute, second, half, is_sure)

    def is_time(self, question: str) -> bool:
        """Returns whether this is a time, and not a ratio. If the text may be both (`is_sure` is False), the
        words of the question decide."""
        if self.is_sure or _ASKS_FOR_TIME.search(question):
            return True
        if _ASKS_FOR_RATIO.search(question):
            return False
        # The question doesn't tell. A ratio is given in lowest terms. 2:30 is not, so it must be a time.
        return math.gcd(self.hour, self.minute or 0, self.second or 0) != 1

    def equals(self, other: TimeOfDay) -> bool:
        """Compares two times. If only one of them has a half of the day, the other may be in the same half:
        ``4:30`` equals ``4:30 p.m.``"""
        # "4 p.m." has no minutes. It equals "4:00 p.m.", but not "4:00", which has no half of the day.
        have_both_halves = bool(self.half and other.half)
        only_one_has_minutes = (self.minute is None) != (other.minute is None)
        if only_one_has_minutes and not have_both_halves:
            return False
        if (self.minute or 0, self.second or 0) != (other.minute or 0, other.second or 0):
            return False
        if have_both_halves:
            return (self.hour, self.half) == (other.hour, other.half)
        # "4:30" and "16:30" both equal "4:30 p.m."
        return self.hour == other.hour or self._hour_of_day() == other._hour_of_day()

    def _hour_of_day(self) -> int:
        """Returns the hour from 0 to 23: 16 for ``4 p.m.``, 0 for ``12 a.m.``. Without a half of the day it
        is the written hour."""
        if not self.half:
            return self.hour
        return self.hour % 12 + (12 if self.half == "pm" else 0)

    def ratio(self) -> Ratio:
        """Returns the text as a ratio: ``1:20`` is 1 to 20."""
        parts = (
            (self.hour, self.minute or 0)
            if self.second is None
            else (self.hour, self.minute or 0, self.second)
        )
        return Ratio(tuple(str(part) for part in parts))


def _half_of_day(text: str) -> str:
    """Returns "am" for "in the morning", "pm" for "P M", and "" for "o'clock"."""
    text = text.lower().replace(" ", "")
    if text.endswith(("am", "morning", "midnight")):
        return "am"
    return "pm" if text.endswith(("pm", "afternoon", "evening", "noon")) else ""


@dataclass(frozen=True)
class Ratio:
    """A ratio such as ``1:2:3``, with its parts as texts."""

    parts: tuple[str, ...]

    @classmethod
    def read(cls, parts: list[str]) -> Ratio | None:
        """Makes a ratio of the parts between colons. Returns None if there is only one part, if a part is
        empty, or if there are more parts than any ratio has."""
        stripped = tuple(part.strip() for part in parts)
        return cls(stripped) if 1 < len(stripped) <= _MOST_PARTS_OF_A_RATIO and all(stripped) else None


# 5-3, 6 - 4 - 2
_SCORE = re.compile(r"\d{1,3}(?: ?- ?\d{1,3}){1,3}")


@dataclass(frozen=True)
class Score:
    """A score such as ``5-3``. In a comparison with a number it counts as a difference."""

    parts: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Score | None:
        """Reads integers with hyphens between them. Returns None for other texts."""
        if _SCORE.fullmatch(text) is None:
            return None
        return cls(tuple(int(part) for part in text.split("-")))

    def value(self) -> Fraction:
        """Returns the text as a difference: ``5-3`` is 2."""
        return Fraction(self.parts[0] - sum(self.parts[1:]))


_MONTHS = ["january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
           "november", "december"]  # fmt: skip
_MONTH = r"(?P<month>[A-Za-z]{3,9})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?"
_DATES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # 2024-01-02
        r"(?P<year>\d{4}) ?(?P<sign>[-/.]) ?(?P<month>\d{1,2}) ?(?P=sign) ?(?P<day>\d{1,2})",
        # 1/2/2024, where the month may also be second
        r"(?P<month>\d{1,2}) ?(?P<sign>[-/.]) ?(?P<day>\d{1,2}) ?(?P=sign) ?(?P<year>\d{4})",
        # Tuesday, January 2nd, 2024
        rf"{_WEEKDAY}{_MONTH} {_DAY}(?:,? (?P<year>\d{{4}}))?",
        # the 2nd of January 2024
        rf"{_WEEKDAY}(?:the )?{_DAY} (?:of )?{_MONTH}(?:,? (?P<year>\d{{4}}))?",
        # January 2024
        rf"{_MONTH},? (?P<year>\d{{4}})(?P<day>)",
    )
]


@dataclass(frozen=True)
class Date:
    """A date such as ``2024-01-02``, ``January 2, 2024`` or ``May 5``. Missing parts are None."""

    year: int | None
    month: int
    day: int | None

    @classmethod
    def read(cls, text: str) -> Date | None:
        """Reads a text without LaTeX. Returns None if it isn't a date. In ``2/1/2024`` the first number is
        the month, unless it is larger than 12."""
        if not any(character.isdigit() for character in text):
            return None  # a date has a day or a year. This test is quick, and most answers in words fail it.
        for pattern in _DATES:
            match = pattern.fullmatch(text)
            if match is None:
                continue
            month = _number_of_month(match["month"])
            day = int(match["day"]) if match["day"] else None
            is_year_first = match.start("year") == 0
            is_month_too_large = month is not None and month > 12
            is_day_a_month = day is not None and day <= 12
            if is_month_too_large and is_day_a_month and not is_year_first:
                month, day = day, month  # 31/1/2024 has the day first
            if month is None or not 1 <= month <= 12:
                continue
            if day is not None and not 1 <= day <= 31:
                continue
            return cls(int(match["year"]) if match["year"] else None, month, day)
        return None


def _number_of_month(text: str) -> int | None:
    """Returns the number of a month: 1 for ``January``, ``jan``, ``janu`` and ``01``. Returns None for any
    other word.

    A number above 12 is returned as well, since it may be the day of a date (31/1/2024).
    """
    if text.isdigit():
        return int(text)
    name = text.lower()
    for number, month in enumerate(_MONTHS, 1):
        if name in (month, month[:3], month[:4]):
            return number
    return None
