"""Jsonnet's lexical grammar, as far as it takes to find imports and the lines on which keys are set."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_TOKEN = re.compile(
    r"""
      (?P<space>\s+ | //[^\n]* | \#[^\n]* | /\*.*?\*/)
    | (?P<block>\|\|\|-?[ \t]*\n.*?\n[ \t]*\|\|\|)
    | (?P<string>@"(?:[^"]|"")*" | @'(?:[^']|'')*' | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<other>\+?:::?(?!:) | \+?: | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)
ReadText = Callable[[Path], str]
"""Returns the text of a file, as Jsonnet."""
FindImport = Callable[[str, Path], Path]
"""Returns the file of an import, from the name in the import and the folder of the importing file."""

_IMPORTS = {"import", "importstr", "importbin"}
_FIELD_COLONS = {":", "::", ":::", "+:", "+::", "+:::"}


@dataclass(frozen=True)
class Token:
    """A token of a Jsonnet text: a literal, a name or a sign."""

    kind: str
    """The name of its group in `_TOKEN`: ``name``, ``string``, ``block`` or ``other``."""
    text: str
    line: int
    """The number of the line on which it begins, from 1."""
    start: int
    """The index of its first character in the whole text."""

    @property
    def is_field_name(self) -> bool:
        return self.kind in ("name", "string")

    @property
    def value(self) -> str:
        """The text that a name or string literal denotes."""
        if self.kind != "string":
            return self.text
        if self.text.startswith("@"):  # @'…' has no escapes, and doubles a quote within
            quote = self.text[1]
            return self.text[2:-1].replace(quote * 2, quote)
        body = self.text[1:-1]
        if "\\" not in body:
            return body
        # Only quotes are written differently in JSON. All other escapes are the same there.
        body = _ESCAPE_OR_QUOTE.sub(_quote_as_in_json, body)
        try:
            # Without `strict`, a string may contain newlines, as in Jsonnet.
            return str(json.loads(f'"{body}"', strict=False))
        except json.JSONDecodeError:
            return body  # its escapes can't be read


def _quote_as_in_json(escape_or_quote: re.Match[str]) -> str:
    r"""Returns ``'`` for ``\'``, and ``\"`` for ``"``. Any other escape, such as ``\\``, stays as it is."""
    text = escape_or_quote[0]
    if text == r"\'":
        return "'"
    return r"\"" if text == '"' else text


def split_tokens(text: str) -> Iterator[Token]:
    """Yields the tokens, without white space and comments. A text that isn't Jsonnet raises no error."""
    line = 1
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        assert kind is not None, "every alternative of `_TOKEN` is a named group"
        if kind != "space":
            yield Token(kind, match.group(), line, match.start())
        line += match.group().count("\n")


def imported_names(text: str) -> list[str]:
    """Returns the operands of every ``import "…"``, each once, in the order of their appearance."""
    names = [name.value for keyword, name in _import_tokens(text) if keyword.text == "import"]
    return list(dict.fromkeys(names))


def replace_imports(text: str, make_replacement: Callable[[str, str], str]) -> str:
    """Returns the text with ``make_replacement(keyword, operand)`` in place of each import expression. Lines
    keep their numbers."""
    pieces, end = [], 0
    for keyword, name in _import_tokens(text):
        pieces += [text[end : keyword.start], make_replacement(keyword.text, name.value)]
        end = name.start + len(name.text)
        newlines_in_import = text.count("\n", keyword.start, end)
        pieces.append("\n" * newlines_in_import)
    return "".join([*pieces, text[end:]])


@lru_cache(maxsize=1024)  # a library is imported by many files
def _import_tokens(text: str) -> Sequence[tuple[Token, Token]]:
    """Returns the two tokens of each import: the keyword, and the string with the file's name."""
    pairs = itertools.pairwise(split_tokens(text))
    return [
        (keyword, operand)
        for keyword, operand in pairs
        if keyword.text in _IMPORTS and operand.kind == "string"
    ]


def mentions(text: str, name: str) -> bool:
    """Returns whether a name or string literal of the file is `name`."""
    return any(token.is_field_name and token.value == name for token in split_tokens(text))


@dataclass(frozen=True)
class _OpenBracket:
    """A bracket that is not closed yet."""

    sign: str
    """``{``, ``[`` or ``(``."""
    key: str | int | None
    """The key whose value begins with this bracket; None if there is none."""


class _OpenKeys:
    """The keys around the present place of a file, which is read token by token.

    Example: after ``{ rows: [{ x: 1 }, { y: 2`` the keys are ``["rows", 1, "y"]``.
    """

    def __init__(self) -> None:
        self._brackets: list[_OpenBracket] = []
        """The open brackets, the innermost last."""
        self._current_key: str | int | None = None
        """The field, or the number of the list's item, whose value is being read; None between fields."""
        self._previous: Token | None = None

    @property
    def keys(self) -> list[str | int]:
        """The keys on the way from the file's own object to the value that is being read."""
        keys = [bracket.key for bracket in self._brackets]
        return [key for key in (*keys, self._current_key) if key is not None]

    def read(self, token: Token) -> str | None:
        """Reads the next token. If the token is the colon after a field's name, returns the name, else None.

        Example: for the tokens of ``{ rows: [1, 2] }``, the result is "rows" at the colon, and None at all
        other tokens.
        """
        previous, self._previous = self._previous, token
        # Literals, names and all other signs change nothing.
        if token.text in _FIELD_COLONS:
            return self._begin_value(previous)
        if token.text in ("{", "[", "("):
            self._open_bracket(token.text)
        elif token.text in ("}", "]", ")"):
            self._close_bracket()
        elif token.text == ",":
            self._end_item()
        return None

    @property
    def _innermost(self) -> str:
        """The sign of the innermost open bracket; empty if no bracket is open."""
        return self._brackets[-1].sign if self._brackets else ""

    def _begin_value(self, previous: Token | None) -> str | None:
        """Reads a colon, and returns the field's name before it. Other colons, as in a slice, have none."""
        if self._innermost != "{" or previous is None or not previous.is_field_name:
            return None
        self._current_key = previous.value
        return previous.value

    def _open_bracket(self, sign: str) -> None:
        if sign == "(":
            # The key stays: in ``key: f({…}, {…})`` both objects belong to the key's value.
            self._brackets.append(_OpenBracket(sign, None))
            return
        self._brackets.append(_OpenBracket(sign, self._current_key))
        self._current_key = 0 if sign == "[" else None  # a list begins with its item 0

    def _close_bracket(self) -> None:
        if not self._brackets:
            return
        bracket = self._brackets.pop()
        # The value may continue after the bracket, as in ``key: {…} + {…}``.
        if bracket.sign != "(":
            self._current_key = bracket.key

    def _end_item(self) -> None:
        """Reads a comma, which ends a field or an item. Commas within parentheses end only arguments."""
        if self._innermost == "[":
            assert isinstance(self._current_key, int), "an item has a number"
            self._current_key += 1
        elif self._innermost == "{":
            self._current_key = None


def field_at(text: str, line: int, column: int) -> tuple[str, ...]:
    """Returns the key path (relative to the file's own object) of the field whose value includes this
    character of the text.

    The path leaves out the numbers of list items. The text doesn't show the numbers of all items: a
    comprehension, such as ``[{ … } for x in …]``, makes many items from one text.
    """
    length_of_earlier_lines = sum(map(len, text.splitlines(keepends=True)[: line - 1]))
    position = length_of_earlier_lines + column - 1
    open_keys = _OpenKeys()
    for token in split_tokens(text):
        if token.start >= position:
            break
        open_keys.read(token)
    return tuple(key for key in open_keys.keys if isinstance(key, str))


def field_line(text: str, path: tuple[str, ...]) -> int | None:
    """Returns the line on which the file sets `path` (relative to the file's own object).

    Fields of an object that a function makes don't have their whole path in the text. So if no field has this
    path, returns the line of the only field with the last name of the path. Returns None if there is no such
    field, or more than one.
    """
    lines_of_path: list[int] = []
    lines_of_name: list[int] = []
    open_keys = _OpenKeys()
    previous: Token | None = None
    for token in split_tokens(text):
        name = open_keys.read(token)
        if name is not None and name == path[-1]:
            assert previous is not None, "the name comes before its colon"
            lines_of_name.append(previous.line)
            if tuple(map(str, open_keys.keys)) == path:
                lines_of_path.append(previous.line)
        previous = token
    if lines_of_path:
        return lines_of_path[-1]  # of two settings in one file, the later one wins
    return lines_of_name[0] if len(lines_of_name) == 1 else None


def flatten_imports(operands: list[tuple[str, Path]], find: FindImport, read_text: ReadText) -> str:
    """Returns one text without imports whose value is the sum of the operands. Each of them is a text and the
    folder that its imports are relative to.

    This saves time: Jsonnet reads its standard library anew for every import, which takes 10 to 20 ms a file.
    That is nearly all of the time of a configuration of thirty fragments.

    Every imported file becomes a local variable. Jsonnet evaluates a local variable like an import: once, and
    only if it is needed. Raises RuntimeError if a file asks for its own name (``std.thisFile``), and passes
    on the errors of `find` and `read_text`.
    """
    files = _ImportedFiles(find, read_text)
    total = " + ".join(files.without_imports(text, folder) for text, folder in operands)
    if any("thisFile" in text for text in files.texts):
        raise RuntimeError("std.thisFile would be the name of the whole")
    return f"local {', '.join(files.definitions)};\n{total}" if files.definitions else total


class _ImportedFiles:
    """The files that a text imports, directly or by other files, each as a local variable."""

    def __init__(self, find: FindImport, read_text: ReadText) -> None:
        self.find, self.read_text = find, read_text
        self.variable_names: dict[Path, str] = {}
        """The name of each file's variable: "imported_file_0"."""
        self.definitions: list[str] = []
        """The definition of each variable: "imported_file_0 = ({ rate: 0.5 })"."""
        self.texts: list[str] = []
        """All texts as they were read, before their imports were replaced."""

    def without_imports(self, text: str, folder: Path) -> str:
        """Returns the text in parentheses, with the name of a local variable in place of each `import`.

        The text's imports are relative to `folder`. `importstr` and `importbin` stay, with whole paths.
        """
        self.texts.append(text)

        def replace_import(keyword: str, name: str) -> str:
            path = self.find(name, folder)
            return self.variable(path) if keyword == "import" else f"{keyword} {json.dumps(str(path))}"

        # The closing parenthesis is on a line of its own, since the text may end with a comment.
        return f"(\n{replace_imports(text, replace_import)}\n)"

    def variable(self, path: Path) -> str:
        """Returns the name of the local variable that holds a file's value. The first call defines it."""
        if path not in self.variable_names:
            # The file gets its name before it is read, since it may import itself.
            self.variable_names[path] = f"imported_file_{len(self.variable_names)}"
            value = self.without_imports(self.read_text(path), path.parent)
            self.definitions.append(f"{self.variable_names[path]} = {value}")
        return self.variable_names[path]
