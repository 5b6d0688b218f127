"""Text that models wrote, for a page: what can't be seen is made visible, and nothing is markup.

Templates escape whatever is put into them; here are the characters that harm without being markup.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

SHOWN = 20_000
"""Characters of a text that a page shows before it is asked for all."""

_NAMES = {
    "\u061c": "ALM", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ", "\u200e": "LRM", "\u200f": "RLM",
    "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF", "\u202d": "LRO", "\u202e": "RLO", "\u2028": "LS",
    "\u2029": "PS", "\u2060": "WJ", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI", "\u2069": "PDI",
    "\ufeff": "BOM", "\u00ad": "SHY",
}  # fmt: skip
_ODD = re.compile(
    r"[^\n\t\x20-\x7e\u00a1-\u00ac\u00ae-\u060f\u0620-\u200a\u2010-\u2027\u2030-\u205f\u2070-\ud7ff]"
)


MARKS = 4
"""Marks on one character (accents, points of vowels) that are shown: hundreds would cover other lines."""


def visible(text: object) -> str:
    """Controls, marks of direction, what has no width, and halves of characters, each as a word in ⟨ ⟩; of
    more than `MARKS` marks on one character, how many more there are."""
    words = str(text)
    if not words.isascii():
        words = _heaps().sub(lambda found: f"{found[1]}⟨{len(found[2]):,} more marks⟩", words)
    return _ODD.sub(_named, words)


def ends_in_a_heap(text: str) -> bool:
    """Whether its last character has more marks than are shown."""
    return not text.isascii() and any(found.end() == len(text) for found in _heaps().finditer(text))


def cut(text: str, most: int = SHOWN) -> tuple[str, int]:
    """The beginning of a text, and how many characters were left out."""
    return text[:most], max(0, len(text) - most)


def one_line(text: str, most: int = 200) -> str:
    """The beginning of a text on one line, for a table."""
    beginning = visible(text[: most + 1]).replace("\n", " ↵ ").replace("\t", " ⇥ ")
    return beginning[:most] + "…" if len(text) > most else beginning


@functools.cache
def _heaps() -> re.Pattern[str]:
    """More marks on a character than are shown."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Mn", "Me")]
    ranges, begin = [], marks[0]
    for code, following in zip(marks, [*marks[1:], -1], strict=True):
        if following != code + 1:
            ranges.append(f"{chr(begin)}-{chr(code)}")
            begin = following
    one = f"[{''.join(ranges)}]"
    return re.compile(f"({one}{{{MARKS}}})({one}+)")


def _named(match: re.Match[str]) -> str:
    character = match[0]
    if character in _NAMES:
        return f"⟨{_NAMES[character]}⟩"
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + code) if code < 0x20 else "␡"  # the picture that Unicode has of a control
    # Others, surrogate, not assigned, private, format (tags among them): by number.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character
