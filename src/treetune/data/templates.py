"""Texts and values made of a row's fields: Jinja, as chat templates are."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treetune.exceptions import MissingField

if TYPE_CHECKING:
    from jinja2.environment import TemplateExpression
    from jinja2.sandbox import SandboxedEnvironment


def text_of(template: str, fields: Mapping[str, Any]) -> str:
    """``'{{ question }}'`` and the like, filled in. Raises MissingField."""
    return str(_rendered(_template(template).render, template, fields))


def value_of(expression: str, fields: Mapping[str, Any]) -> Any:
    """``metadata.level``, ``answers[0]``, ``source != 'leetcode'`` and the like, with its type. Raises
    MissingField."""
    value = _rendered(_expression(expression), expression, fields)
    from jinja2 import Undefined

    if isinstance(value, Undefined):
        raise MissingField(f"{expression!r}: the row has no such field (it has {', '.join(sorted(fields))})")
    return value


def check_text(template: str, key: str) -> None:
    """Raises ValueError for a template that can't be read."""
    _read(functools.partial(_template, template), template, key)


def check_value(expression: str, key: str) -> None:
    """Raises ValueError for an expression that can't be read."""
    _read(functools.partial(_expression, expression), expression, key)


def _read(read: Any, text: str, key: str) -> None:
    from jinja2 import TemplateError

    try:
        read()
    except TemplateError as error:
        raise ValueError(
            f"{key} is {text!r}, which Jinja can't read ({error}): fields stand in a text as {{{{ name }}}},"
            " and in an expression as name"
        ) from error


def _rendered(render: Any, text: str, fields: Mapping[str, Any]) -> Any:
    from jinja2 import TemplateError

    try:
        return render(**fields)
    except MissingField:
        raise
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        has = ", ".join(sorted(fields))
        raise MissingField(f"{text!r} can't be filled in: {error} (the row has {has})") from error


@functools.lru_cache(maxsize=256)
def _template(text: str) -> Any:
    return _environment().from_string(text)


@functools.lru_cache(maxsize=256)
def _expression(text: str) -> TemplateExpression:
    return _environment().compile_expression(text, undefined_to_none=False)


@functools.cache
def _environment() -> SandboxedEnvironment:
    """Returns what templates may use beside Jinja's own: filters and tests that data sets need."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, finalize=_not_null, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "from_json": json.loads,
        "words": lambda text: len(text.split()),
        "alphanumerics": lambda text: sum(character.isalnum() for character in text),
        "sub": lambda text, pattern, by="": re.sub(pattern, by, text),
        "found": lambda text, pattern: _last_match(text, pattern),
    }
    environment.tests["matching"] = lambda text, pattern: re.search(pattern, text) is not None
    return environment


def _not_null(value: Any) -> Any:
    """Returns a field for a text: null is none."""
    if value is None:
        raise MissingField("a field is null")
    return value


def _last_match(text: str, pattern: str) -> str:
    """The first group of the last match, or the whole of it."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        raise MissingField(f"nothing in {text[:60]!r} matches {pattern!r}")
    return matches[-1][1] if matches[-1].groups() else matches[-1][0]
