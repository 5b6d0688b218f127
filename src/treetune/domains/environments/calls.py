"""Reads the calls of tools in what a model wrote, in the formats that models are trained to write.

Models write JSON with mistakes. If a call has only one possible meaning in spite of its mistake, it is read
with this meaning: a newline within a string, arguments that are a JSON text, null or missing, a missing end
tag or closing bracket, an extra bracket, Python's quotes and names, a comma before a bracket, a code fence
around everything. Any other mistake becomes the call's `fault`, a message that the model reads in place of a
result. A tag that is only mentioned in prose is not a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from treetune.exceptions import NoJson, UnreadableValue
from treetune.tasks.graders.extraction import read_value
from treetune.tasks.thoughts import CLOSING_QUOTE, read_thoughts

NATIVE_FORMATS = ("hermes", "llama", "mistral")
"""The formats that are read here. `hermes` is also Qwen's, with JSON or with the tags of Qwen3-Coder."""

CALL_FORMAT = 'A call is JSON with a name and an object of arguments: {"name": "…", "arguments": {…}}.'

_HERMES_OPENING, _HERMES_CLOSING = "<tool_call>", "</tool_call>"
_LLAMA_OPENING = "<|python_tag|>"
_MISTRAL_OPENING = "[TOOL_CALLS]"

_LLAMA_WITHOUT_OPENING = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{\s*[\"'](?:name|type)[\"'])")
"""The beginning of Llama's JSON without a tag."""
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\]|(?=\s*\{))")
"""Mistral's name before the arguments: ``weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome"}``."""
_FENCE = re.compile(r"\s*```\w*\s*")
_FUNCTION_TAG = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER_TAG = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_SIGNS_BETWEEN_CALLS = " \t\r\n,;"
"""Characters that may be between two calls."""
# The quantifier is possessive, so that a string that isn't closed is read once, and not again from each quote
# in it.
_JSON_STRING = r'"(?:[^"\\]|\\.)*+(?P<closed>")?'
_STRING_OR_BRACKET = re.compile(rf"{_JSON_STRING}|[\[\]{{}}]", re.DOTALL)
_STRING_OR_END = re.compile(rf"{_JSON_STRING}|</tool_call>", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"(?P<string>{_JSON_STRING})|,(?=\s*+[}}\]])", re.DOTALL)
_ARGUMENTS_KEYS = ("arguments", "parameters", "args")
"""Keys under which models write the arguments."""
_OTHER_KEYS = ("name", "id", "type", "function", "call_id")
"""Keys of a call that are not arguments, in a call whose arguments are written next to its name:
``{"name": "weather", "city": "Rome"}``."""


class ToolCall(NamedTuple):
    """A call in a turn.

    Example: ``ToolCall("weather", {"city": "Rome"}, id="a1b2c3d4e")``; with the format ``tags``
    ``ToolCall("python", "6 * 7")``.
    """

    tool: str
    arguments: Any
    """The arguments by name, or a text that is the tool's only argument."""
    id: str = ""
    """The id that the model gave the call; empty if it gave none."""
    fault: str | None = None
    """The reason why the call can't be made, as the model reads it; None if it can be made."""


def calls_of_turn(format: str, action: str) -> tuple[list[ToolCall], str]:
    """Returns the calls of a turn in their order, and the turn without them. A call in a thought isn't made,
    and stays in the text."""
    reading = read_thoughts(action)
    calls, prose = native_calls(format, reading.answer)
    return calls, f"{reading.thought}\n{prose}".strip()


def native_calls(format: str, text: str) -> tuple[list[ToolCall], str]:
    """Returns the calls in a text in their order, and the text without them.

    Args:
        format: One of `NATIVE_FORMATS`.
        text: The text of a turn after its thought.
    """
    if format == "llama" and (bare := _LLAMA_WITHOUT_OPENING.match(text)):
        # Llama may leave out the tag before its JSON. JSON of a call begins with the key name or type (see
        # `_LLAMA_WITHOUT_OPENING`); any other JSON is an answer.
        return list(read_calls(text[bare.end() :])), ""
    opening = {"hermes": _HERMES_OPENING, "llama": _LLAMA_OPENING, "mistral": _MISTRAL_OPENING}[format]
    closing = _HERMES_CLOSING if format == "hermes" else None
    calls: list[ToolCall] = []
    prose: list[str] = []
    text_before, *parts = text.split(opening)
    prose.append(text_before)
    for part in parts:
        body, closing_tag, text_after = _split_at_closing_tag(part, closing)
        if _is_mention(text_before, body, is_closed=bool(closing_tag)):
            # The text only writes about the tag, and makes no call.
            prose.append(opening + part)
        else:
            # A tag with nothing in it is a faulty call.
            calls += list(read_calls(body)) or [ToolCall("", arguments=None, fault=CALL_FORMAT)]
            prose.append(text_after)
        text_before = part
    return calls, "".join(prose).strip()


def _split_at_closing_tag(part: str, closing: str | None) -> tuple[str, str, str]:
    """Splits the text after an opening tag into the calls, the closing tag, and the text after the closing
    tag. Without a closing tag, all of the text is the calls, and the other two are empty."""
    if closing is None:
        return part, "", ""
    # A sign is a closing tag or a string. The group `closed` is empty if the string has no second quote.
    for sign in _STRING_OR_END.finditer(part):
        if sign[0] == closing:
            return part[: sign.start()], closing, part[sign.end() :]
        if not sign["closed"] and (end := part.find(closing, sign.start())) >= 0:
            # A string that isn't closed ends with the call.
            return part[:end], closing, part[end + len(closing) :]
    # If there is a closing tag, it is within a string. If the call can be read with the tag, the tag is a
    # part of an argument, and the model didn't close the call. If the call can't be read so, the quotes don't
    # enclose a JSON string (they may be Python's), and the tag ends the call.
    end = part.find(closing)
    if end >= 0 and _is_within_call(part, end):
        return part, "", ""
    return part.partition(closing)


def _is_within_call(body: str, position: int) -> bool:
    """Returns whether `position` is inside of a call in `body`: all calls of the whole `body` can be read,
    but not those of its part up to `position`."""
    if functions := list(_FUNCTION_TAG.finditer(body)):
        # Qwen3-Coder's tags can be read even if their end is missing, so reading them is no test. Here a call
        # is whole if it has its end tag.
        return any(
            function.start() < position < function.end() and function[0].endswith("</function>")
            for function in functions
        )
    is_whole = all(call.fault is None for call in read_calls(body))
    return is_whole and any(call.fault for call in read_calls(body[:position]))


def _is_mention(text_before: str, body: str, *, is_closed: bool) -> bool:
    """Returns whether the tag after `text_before` is only mentioned in prose, and is not a call."""
    closing_quote = CLOSING_QUOTE.get(text_before[-1:])
    if closing_quote is not None and body.startswith(closing_quote):
        return True  # only the tag is in quotes
    if is_closed:
        # "Put it between <tool_call> and </tool_call>" has no bracket of a call and no new line.
        return not body.startswith("\n") and not set(body) & set("{[(<")
    # Without a closing tag only the beginning of a call shows that it is one.
    body_start = body.lstrip()
    return not (body_start.startswith(("{", "[", "```", "<function=")) or _MISTRAL_NAME.match(body_start))


def read_calls(body: str) -> Iterator[ToolCall]:
    """Yields calls that are written one after the other, up to the first that can't be read, which is yielded
    with its `fault`."""
    if functions := list(_FUNCTION_TAG.finditer(body)):  # Qwen3-Coder's tags in place of JSON
        for function in functions:
            yield _read_tagged_call(function)
        return
    text_left = body
    while text_left := _without_fence(text_left).strip(_SIGNS_BETWEEN_CALLS):
        # Mistral writes the name before the JSON, which is then only the arguments.
        name_match = _MISTRAL_NAME.match(text_left)
        if name_match:
            text_left = text_left[name_match.end() :]
        try:
            value, text_left = read_json(text_left)
        except NoJson as error:
            yield ToolCall(
                name_match[1] if name_match else "",
                None,
                fault=f"The call is no JSON: {error}. {CALL_FORMAT}",
            )
            return
        if name_match:
            calls = [_call_of_value({"name": name_match[1], "arguments": value, "id": name_match[2]})]
        else:
            calls = [_call_of_value(item) for item in (value if isinstance(value, list) else [value])]
        yield from calls
        if any(call.fault for call in calls):
            return  # the model reads one message about its mistake
        next_call = _without_fence(text_left).strip(_SIGNS_BETWEEN_CALLS)
        continues_with_json = next_call.startswith(("{", "["))
        continues_with_name = _MISTRAL_NAME.match(next_call) is not None
        if not continues_with_json and not continues_with_name:
            return  # prose after a call


def _read_tagged_call(function: re.Match[str]) -> ToolCall:
    """Reads a call of Qwen3-Coder: ``<function=weather><parameter=city>Rome</parameter></function>``.

    A value may be on separate lines, so newlines around it don't belong to it.
    """
    parameters = _PARAMETER_TAG.findall(function[2])
    return ToolCall(function[1], {name.strip(): value.strip("\n") for name, value in parameters})


def _call_of_value(value: Any) -> ToolCall:
    """Returns the call that a JSON value describes, or a call with a fault."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {**value, **value["function"]}  # {"function": {"name": …, "arguments": …}}, as OpenAI's API
    if not isinstance(value, Mapping):
        return ToolCall("", arguments=None, fault=CALL_FORMAT)
    name = value.get("name", value.get("function"))  # some models write {"function": "weather", …}
    if not isinstance(name, str) or not name:
        return ToolCall("", arguments=None, fault=f"The call has no name. {CALL_FORMAT}")
    key = next((key for key in _ARGUMENTS_KEYS if key in value), None)
    if key is None:  # the arguments are next to the name
        arguments: Any = {
            parameter: item for parameter, item in value.items() if parameter not in _OTHER_KEYS
        }
    else:
        arguments = value[key]
    if isinstance(arguments, str) and arguments.strip():  # "{\"city\": \"Rome\"}", a JSON text
        try:
            arguments, _ = read_json(arguments)
        except NoJson as error:
            return ToolCall(name, None, fault=f"The arguments are no JSON: {error}. {CALL_FORMAT}")
    arguments = {} if arguments is None or arguments == "" else arguments
    if not isinstance(arguments, Mapping):
        return ToolCall(name, None, fault=f"The arguments are no object. {CALL_FORMAT}")
    return ToolCall(name, dict(arguments), str(value.get("id") or value.get("call_id") or ""))


def read_json(text: str) -> tuple[Any, str]:
    """Reads the JSON value at the beginning of a text, also one with mistakes if it has only one possible
    meaning (see the head of this file).

    Returns the value and the rest of the text. Raises NoJson if there is no such value.
    """
    text = _without_fence(text).lstrip()
    decoder = json.JSONDecoder(strict=False)  # strings may hold newlines
    try:
        value, end = decoder.raw_decode(text)
        return value, text[end:].lstrip(" \t\r\n}]")  # extra brackets are skipped
    except (ValueError, RecursionError) as error:
        message = str(error)
    # The repairs, from the smallest: missing brackets, then a comma before a bracket, then Python's literals.
    # `_TRAILING_COMMA` also matches whole strings, which are kept, so that no comma within a string is lost.
    balanced, text_after = _balance_brackets(text)
    for repaired in (balanced, _TRAILING_COMMA.sub(lambda match: match["string"] or "", balanced)):
        try:
            return decoder.decode(repaired), text_after
        except (ValueError, RecursionError):
            continue
    try:
        if text[:1] in ("{", "["):  # of Python's literals, only dictionaries and lists
            return read_value(balanced), text_after
    except UnreadableValue:
        pass
    raise NoJson(message)


def _balance_brackets(text: str) -> tuple[str, str]:
    """Splits a text into the value at its beginning and the text after the value. The value ends where the
    text's first bracket closes.

    If brackets are missing at the end of the text, they are added. A text that ends within a string still
    can't be read afterwards, because the end of the string isn't known.
    """
    closings: list[str] = []  # the closing brackets that are still needed: ["}", "]"] after {"a": [
    for sign in _STRING_OR_BRACKET.finditer(text):
        if sign[0].startswith('"'):
            continue  # brackets within a string don't count
        if sign[0] in "[{":
            closings.append("]" if sign[0] == "[" else "}")
        elif closings and closings[-1] == sign[0]:
            closings.pop()
            if not closings:  # the value ends here; extra brackets after it are skipped
                return text[: sign.end()], text[sign.end() :].lstrip(" \t\r\n}]")
        else:  # a closing bracket that fits no opening one: adding brackets doesn't help
            break
    without_fence = text.rstrip().removesuffix("```").rstrip()
    return without_fence + "".join(reversed(closings)), ""


def _without_fence(text: str) -> str:
    fence = _FENCE.match(text)
    return text[fence.end() :] if fence else text
