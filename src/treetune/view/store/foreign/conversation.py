"""Writes messages of conversations as text: contents, thoughts, calls of tools and their results.

Messages may have the form of OpenAI, Anthropic, Inspect, verifiers or TRL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
"""The names of fields in which a message, or a part of one, has the model's thoughts."""

MESSAGE_FIELDS = ("content", "tool_calls", "function_call", *THOUGHT_FIELDS)
"""The names of fields that make an object a message. An object with the field ``role`` is one, too."""


def is_message(value: object) -> bool:
    """Returns whether a value is a message: an object with a role or one of `MESSAGE_FIELDS`."""
    return isinstance(value, Mapping) and ("role" in value or any(name in value for name in MESSAGE_FIELDS))


def is_conversation(value: object) -> bool:
    """Returns whether a value is a conversation: a list of messages that isn't empty."""
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def write_as_text(value: Any) -> str:
    """Returns a text, a message or a conversation as text, and any other value as JSON.

    If a conversation has several messages, each begins with its role: "user: 2 + 2 =". None and an empty list
    become an empty text.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if is_message(value):
        return message_text(value)
    if value == []:
        return ""
    if not is_conversation(value):
        return json.dumps(value, ensure_ascii=False, default=str)
    if len(value) == 1:
        return message_text(value[0])
    return "\n\n".join(f"{_speaker_of(message)}: {message_text(message)}".rstrip() for message in value)


def read_turns(value: Any) -> list[dict[str, str]]:
    """Returns {"role": …, "content": …} for each message of a conversation, and [] for any other value."""
    if not is_conversation(value):
        return []
    return [{"role": _speaker_of(message), "content": message_text(message)} for message in value]


def message_text(message: Mapping[str, Any]) -> str:
    """Returns a message as text: its thought, its content, its calls of tools, and errors, in this order."""
    # `THOUGHT_FIELDS` has the names that different programs give the same field, so only one is shown.
    thoughts = [message[name] for name in THOUGHT_FIELDS if message.get(name)]
    parts = [_format_thought(thoughts[0])] if thoughts else []
    parts.append(_content_text(message.get("content")))
    parts += [_call_text(call) for call in _calls_of(message)]
    if message.get("refusal"):
        parts.append(f"[refused] {message['refusal']}")
    if error := message.get("error"):
        description = error.get("message", error) if isinstance(error, Mapping) else error
        parts.append(f"[error] {description}")
    return "\n\n".join(part for part in parts if part)


def _speaker_of(message: Mapping[str, Any]) -> str:
    """Returns the role of a message's author, and for the reply of a tool also the tool's name: "tool
    search"."""
    role = str(message.get("role") or "")
    if role != "tool":
        return role
    tool = message.get("name") or message.get("function")
    return f"{role} {tool}" if isinstance(tool, str) and tool else role


def _content_text(content: Any) -> str:
    """Returns a message's content, which is a text, a list of parts, or a single part, as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(text for text in map(_part_text, content) if text)
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return content["text"]
    return json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Any) -> str:
    """Returns a part of a message's content as text.

    A part without text is replaced by its kind: an image by "[image]".
    """
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
    kind = str(part.get("type") or "")
    if kind in ("reasoning", "thinking", "redacted_thinking"):
        thought = part.get("reasoning") or part.get("thinking") or part.get("text") or part.get("summary")
        return _format_thought(thought or "[not shown by its provider]")
    if isinstance(part.get("text"), str):
        return part["text"]
    if kind == "refusal":
        return f"[refused] {part.get('refusal', '')}"
    if kind in ("tool_use", "tool_call", "server_tool_use"):
        return _call_text(part)
    if kind == "tool_result":
        return f"<tool_result>\n{_content_text(part.get('content'))}\n</tool_result>"
    if "content" in part:
        return _content_text(part["content"])
    return f"[{kind}]" if kind else json.dumps(part, ensure_ascii=False, default=str)


def _format_thought(value: Any) -> str:
    """Returns a model's thought between ``<think>`` and ``</think>``; empty without text."""
    text = _content_text(value).strip()
    return f"<think>\n{text}\n</think>" if text else ""


def _calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the calls of tools in a message."""
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    return calls if isinstance(calls, list) else [calls]


def _call_text(call: Any) -> str:
    """Returns a call of a tool as text, with its name and its arguments."""
    if isinstance(call, str):  # verifiers writes each call as JSON in a text
        try:
            parsed = json.loads(call)
        except ValueError:
            parsed = None
        if not isinstance(parsed, Mapping):
            return f"<tool_call>\n{call}\n</tool_call>"
        call = parsed
    if not isinstance(call, Mapping):
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False, default=str)}\n</tool_call>"
    # OpenAI's `function` is an object with the name and the arguments, and Inspect's is the name itself.
    # Anthropic has no `function`: the call itself has the name and the arguments.
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    name = function if isinstance(function, str) else inner.get("name")
    arguments = next((inner[key] for key in ("arguments", "input", "args") if key in inner), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # invalid JSON is shown as the model wrote it, so that a reader sees what is wrong
            arguments = {"unreadable": arguments}
    named_call = {"name": name, "arguments": arguments}
    text = f"<tool_call>\n{json.dumps(named_call, ensure_ascii=False, default=str)}\n</tool_call>"
    return f"{text}\n[not understood] {call['parse_error']}" if call.get("parse_error") else text
