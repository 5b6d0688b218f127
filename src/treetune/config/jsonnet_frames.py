"""Reads the places out of Jsonnet's own messages: file, line and column of each step that led to an error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from treetune.config.layers import NAME_OF_SUM, shorten_path

_RANGE = r"\(?(?P<line>\d+):(?P<column>\d+)\)?(?:-\(?(?:(?P<last_line>\d+):)?(?P<last_column>\d+)\)?)?"
_LOCATION = rf"(?P<file>[^\t\n]+?):{_RANGE}"
STATIC_ERROR = re.compile(rf"STATIC ERROR: {_LOCATION}: (?P<what>.*)", re.DOTALL)
_FRAME = re.compile(rf"^\t{_LOCATION}(?:\t(?P<within>.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """A place in a user's file where Jsonnet was when an error occurred.

    Example: the line ``configs/a.jsonnet:3:5-12  object <anonymous>`` is
    ``Frame("configs/a.jsonnet", 3, 5, 3, 12, "object <anonymous>")``.
    """

    file: str
    line: int
    column: int
    last_line: int
    last_column: int
    within: str

    @property
    def in_object(self) -> bool:
        return self.within.startswith("object")

    def text(self, file_text: str) -> str:
        """Returns the expression at that place. `file_text` is the file's text."""
        lines = file_text.splitlines()[self.line - 1 : self.last_line]
        if not lines:
            return ""
        # The end is cut first. In a single line, cutting the beginning first would shift `last_column`.
        lines[-1] = lines[-1][: self.last_column]
        lines[0] = lines[0][self.column - 1 :]
        return "\n".join(lines)


def read_frames(message: str) -> list[Frame]:
    """Returns the places of one of Jsonnet's messages that are in a user's file, innermost first."""
    syntax_error = STATIC_ERROR.match(message)
    # An error of syntax has a single place, which is in another form.
    matches = [syntax_error] if syntax_error else _FRAME.finditer(message)
    all_frames = []
    for match in matches:
        line, column = int(match["line"]), int(match["column"])
        last_position = int(match["last_line"] or line), int(match["last_column"] or column)
        # What is around the place, such as "object <anonymous>". The other form has no such group.
        within = match.groupdict().get("within") or ""
        all_frames.append(Frame(match["file"], line, column, *last_position, within))
    users_frames = []
    for frame in all_frames:
        # `NAME_OF_SUM` is the program's own text that adds the configuration's files. The other two are
        # Jsonnet's standard library.
        if frame.file not in (NAME_OF_SUM, "<std>") and not frame.file.startswith("std"):
            users_frames.append(frame)
    return users_frames


def location_of(frame: Frame) -> str:
    """Returns the place for messages: ``configs/a.jsonnet:3:5``."""
    return f"{shorten_path(frame.file)}:{frame.line}:{frame.column}"
