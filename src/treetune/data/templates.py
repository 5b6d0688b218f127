"""Texts and values that are made from a row's fields by Jinja templates."""

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


def render_text(template: str, fields: Mapping[str, Any]) -> str:
    """Fills in a template such as ``'{{ question }}'``. Raises MissingField."""
    return str(_fill_in(_parse_template(template).render, template, fields))


def evaluate_expression(expression: str, fields: Mapping[str, Any]) -> Any:
    """Evaluates an expression such as ``metadata.level``, ``answers[0]`` or ``source != 'leetcode'``. Raises
    MissingField."""
    from jinja2 import Undefined

    value = _fill_in(_parse_expression(expression), expression, fields)
    if isinstance(value, Undefined):
        raise MissingField(f"{expression!r}: the row has no such field (it has {', '.join(sorted(fields))})")
    return value


def check_text(template: str, key: str) -> None:
    """Raises ValueError, with the configuration key, for a template that Jinja can't read."""
    _check_parse(functools.partial(_parse_template, template), template, key)


def check_value(expression: str, key: str) -> None:
    """Raises ValueError, with the configuration key, for an expression that Jinja can't read."""
    _check_parse(functools.partial(_parse_expression, expression), expression, key)


def _check_parse(parse: Any, text: str, key: str) -> None:
    """Calls `parse`, which parses the text, and raises ValueError with the configuration key if that
    fails."""
    from jinja2 import TemplateError

    try:
        parse()
    except TemplateError as error:
        raise ValueError(
            f"{key} is {text!r}, which Jinja can't read ({error}): a field is written as {{{{ name }}}} in a"
            " text, and as name in an expression"
        ) from error


def _fill_in(render: Any, text: str, fields: Mapping[str, Any]) -> Any:
    """Returns the result of `render` for these fields. `render` fills in a parsed template, or evaluates a
    parsed expression. Raises MissingField for any error that the fields or their values cause."""
    from jinja2 import TemplateError

    try:
        return render(**fields)
    except MissingField:
        raise  # it is a ValueError, and its message says enough
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        has = ", ".join(sorted(fields))
        raise MissingField(f"{text!r} can't be filled in: {error} (the row has {has})") from error


@functools.lru_cache(maxsize=256)
def _parse_template(text: str) -> Any:
    return _jinja_environment().from_string(text)


@functools.lru_cache(maxsize=256)
def _parse_expression(text: str) -> TemplateExpression:
    return _jinja_environment().compile_expression(text, undefined_to_none=False)


@functools.cache
def _jinja_environment() -> SandboxedEnvironment:
    """Returns Jinja's environment, with further filters and tests that data sets need."""
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
    """Returns its argument, a value that Jinja is about to put into a text. Raises MissingField for null."""
    if value is None:
        raise MissingField("a field is null")
    return value


def _last_match(text: str, pattern: str) -> str:
    """Returns the first group of the pattern's last match, or the whole match if the pattern has no groups.
    Raises MissingField if nothing matches."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        raise MissingField(f"nothing in {text[:60]!r} matches {pattern!r}")
    last = matches[-1]
    return last[1] if last.groups() else last[0]
