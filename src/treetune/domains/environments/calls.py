"""Reads the calls of tools in what a model wrote, in the formats that models are trained to write.

Models write JSON with mistakes. Where a mistake leaves one reading, the call is read so: a newline within a
string, arguments as a JSON text, null or left out, a missing end tag or closing bracket, a bracket too many,
Python's quotes and names, a comma before a bracket, a code fence around all. Anything else is a call with a
`fault`, one message that the model reads in place of a result. A tag that prose merely mentions is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from treetune.exceptions import NoJson, UnreadableValue
from treetune.tasks.graders.extraction import read_value
from treetune.tasks.thoughts import read_thoughts

NATIVE_FORMATS = ("hermes", "llama", "mistral")
"""The formats that are read here. `hermes` is also Qwen's, with JSON or with the tags of Qwen3-Coder."""

FORM = 'A call is JSON with a name and an object of arguments: {"name": "…", "arguments": {…}}.'

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"

_LLAMA_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{\s*[\"'](?:name|type)[\"'])")
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\]|(?=\s*\{))")
_FENCE = re.compile(r"\s*```\w*\s*")
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_BETWEEN = " \t\r\n,;"
# Each string is read once, be it closed or not: else all quotes within one that isn't would be tried anew.
_STRING = r'"(?:[^"\\]|\\.)*+(?P<closed>")?'
_SIGN = re.compile(rf"{_STRING}|[\[\]{{}}]", re.DOTALL)
_STRING_OR_END = re.compile(rf"{_STRING}|</tool_call>", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"(?P<string>{_STRING})|,(?=\s*+[}}\]])", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters", "args")
_NO_ARGUMENTS = ("name", "id", "type", "function", "call_id")
_QUOTES = "`'\"“"


class ToolCall(NamedTuple):
    """A call as a turn has it. Arguments that are a text are the tool's only one. `fault` says why it is no
    call that could be made."""

    tool: str
    arguments: Any
    id: str = ""
    fault: str | None = None


def calls_of_turn(format: str, action: str) -> tuple[list[ToolCall], str]:
    """Returns the calls of a turn in their order, and the turn without them. A call that a thought speaks of
    isn't made, and stays in it."""
    reading = read_thoughts(action)
    calls, prose = native_calls(format, reading.answer)
    return calls, f"{reading.thought}\n{prose}".strip()


def native_calls(format: str, text: str) -> tuple[list[ToolCall], str]:
    """Returns the calls in a text in their order, and the text without them.

    Args:
        format: One of `NATIVE_FORMATS`.
        text: What a model says behind its thought.
    """
    if format == "llama" and (bare := _LLAMA_BARE.match(text)):
        return list(calls_in(text[bare.end() :])), ""  # what begins otherwise is an answer, be it JSON
    opening = {"hermes": _HERMES, "llama": _LLAMA, "mistral": _MISTRAL}[format]
    closing = _HERMES_END if format == "hermes" else None
    calls: list[ToolCall] = []
    prose: list[str] = []
    text_before, *parts = text.split(opening)
    prose.append(text_before)
    for part in parts:
        body, closing_tag, rest = _body(part, closing)
        if _is_mention(text_before, body, is_closed=bool(closing_tag)):
            prose.append(opening + part)
        else:
            calls += list(calls_in(body)) or [ToolCall("", None, fault=FORM)]
            prose.append(rest)
        text_before = part
    return calls, "".join(prose).strip()


def _body(part: str, closing: str | None) -> tuple[str, str, str]:
    """Divides what follows an opening tag into the calls, the closing tag, and what follows that. A closing
    tag within a string of the call is part of it."""
    if closing is None:
        return part, "", ""
    for sign in _STRING_OR_END.finditer(part):
        if sign[0] == closing:
            return part[: sign.start()], closing, part[sign.end() :]
        if not sign["closed"] and (end := part.find(closing, sign.start())) >= 0:
            return part[:end], closing, part[end + len(closing) :]  # within a string that isn't closed
    return part.partition(closing)


def _is_mention(text_before: str, body: str, *, is_closed: bool) -> bool:
    """Returns whether prose speaks of the tag behind `text_before`, and calls nothing with it."""
    sign_before = text_before[-1:]
    if sign_before and sign_before in _QUOTES and body[:1] == sign_before:
        return True  # the tag stands alone in quotes
    if is_closed:
        return not body.startswith("\n") and not set(body) & set("{[(<")
    begins = body.lstrip()
    return not (begins.startswith(("{", "[", "```", "<function=")) or _NAMED.match(begins))


def calls_in(body: str) -> Iterator[ToolCall]:
    """Yields the calls that are written one after the other, up to what can't be read."""
    if functions := list(_FUNCTION.finditer(body)):
        yield from (_tagged(function) for function in functions)
        return
    rest = body
    while rest := _without_fence(rest).strip(_BETWEEN):
        named = _NAMED.match(rest)
        if named:
            rest = rest[named.end() :]
        try:
            value, rest = read_json(rest)
        except NoJson as error:
            yield ToolCall(named[1] if named else "", None, fault=f"The call is no JSON: {error}. {FORM}")
            return
        if named:
            calls = [_call({"name": named[1], "arguments": value, "id": named[2]})]
        else:
            calls = list(map(_call, value if isinstance(value, list) else [value]))
        yield from calls
        if any(call.fault for call in calls):
            return  # one message says it
        if not _without_fence(rest).strip(_BETWEEN).startswith(("{", "[")) and not _NAMED.match(rest):
            return  # prose behind a call


def _tagged(function: re.Match[str]) -> ToolCall:
    """Reads a call of Qwen3-Coder: ``<function=weather><parameter=city>Rome</parameter></function>``."""
    parameters = _PARAMETER.findall(function[2])
    return ToolCall(function[1], {name.strip(): value.strip("\n") for name, value in parameters})


def _call(value: Any) -> ToolCall:
    """Returns the call that a value of JSON is."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {**value, **value["function"]}  # the form in which OpenAI answers
    if not isinstance(value, Mapping):
        return ToolCall("", None, fault=FORM)
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        return ToolCall("", None, fault=f"The call has no name. {FORM}")
    key = next((key for key in _ARGUMENTS if key in value), None)
    if key is None:  # they stand beside the name
        arguments: Any = {key: inner for key, inner in value.items() if key not in _NO_ARGUMENTS}
    else:
        arguments = value[key]
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments, _ = read_json(arguments)
        except NoJson as error:
            return ToolCall(name, None, fault=f"The arguments are no JSON: {error}. {FORM}")
    arguments = {} if arguments is None or arguments == "" else arguments
    if not isinstance(arguments, Mapping):
        return ToolCall(name, None, fault=f"The arguments are no object. {FORM}")
    return ToolCall(name, dict(arguments), str(value.get("id") or value.get("call_id") or ""))


def read_json(text: str) -> tuple[Any, str]:
    """Reads the value at the beginning of a text as leniently as one reading allows, and returns it with the
    rest of the text. Raises NoJson."""
    text = _without_fence(text).lstrip()
    decoder = json.JSONDecoder(strict=False)  # strings may hold newlines
    try:
        value, end = decoder.raw_decode(text)
        return value, text[end:].lstrip(" \t\r\n}]")  # one bracket too many closes nothing
    except (ValueError, RecursionError) as error:
        first = str(error)
    whole, rest = _balanced(text)
    for repaired in (whole, _TRAILING_COMMA.sub(lambda match: match["string"] or "", whole)):
        try:
            return decoder.decode(repaired), rest
        except (ValueError, RecursionError):
            continue
    try:
        if text[:1] in ("{", "["):
            return read_value(whole), rest
    except UnreadableValue:
        pass
    raise NoJson(first)


def _balanced(text: str) -> tuple[str, str]:
    """Returns the value at the beginning up to where its last bracket closes, with the brackets that are
    missing at its end, and the rest. A text that ends within a string is left as it is: nobody knows how it
    would go on."""
    closings: list[str] = []
    for sign in _SIGN.finditer(text):
        if sign[0].startswith('"'):
            continue
        if sign[0] in "[{":
            closings.append("]" if sign[0] == "[" else "}")
        elif closings and closings[-1] == sign[0]:
            closings.pop()
            if not closings:
                return text[: sign.end()], text[sign.end() :].lstrip(" \t\r\n}]")
        else:
            break
    ending = text.rstrip().removesuffix("```").rstrip()
    return ending + "".join(reversed(closings)), ""


def _without_fence(text: str) -> str:
    fence = _FENCE.match(text)
    return text[fence.end() :] if fence else text
