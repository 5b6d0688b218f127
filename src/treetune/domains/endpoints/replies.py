"""Classifies the replies of endpoints, by this table.

An HTTP status of 200 need not be an answer, and a refusal may concern only its request:

==============  ============================================================================================
answered        200, with a complete text
cut_off         200, with ``finish_reason: length``; there may be no text, if it is within a thought
empty           200, without a text, e.g. because the model called a tool
refused         only this request is refused: 400, 403, 413, 422, a filter, a context that is too long
refused_all     every request is refused: a wrong key, no credit, an unknown model or address, a redirect
again           the failure may be temporary: 408, 409, 425, 429, 5xx, ``finish_reason: abort``, or 200
                without JSON
==============  ============================================================================================

The code in an error's body takes precedence over its status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ReplyKind = Literal["answered", "cut_off", "empty", "refused", "refused_all", "again"]

KINDS_BY_STATUS: Mapping[int, tuple[ReplyKind, str]] = {
    400: ("refused", "the request was refused"),
    401: ("refused_all", "the key is wrong or missing"),
    402: ("refused_all", "the account has nothing left"),
    403: ("refused", "the request is forbidden"),  # moderation answers so, too, for one prompt
    404: ("refused_all", "there is no such address or model"),
    405: ("refused_all", "this is not the address of an OpenAI-compatible endpoint"),
    408: ("again", "the endpoint waited too long"),
    409: ("again", "the endpoint is busy"),
    413: ("refused", "the request is too large"),
    422: ("refused", "the request was refused"),
    425: ("again", "the endpoint is busy"),
    429: ("again", "the endpoint has too many requests"),
}
"""The kind of a reply, and the reason, by its HTTP status. Of the statuses that are missing here, 5xx is
``again``, 3xx ``refused_all``, and every other one ``refused``."""

KINDS_BY_CODE: Mapping[str, tuple[ReplyKind, str]] = {
    "invalid_api_key": ("refused_all", "the key is wrong or missing"),
    "api_key_invalid": ("refused_all", "the key is wrong or missing"),
    "authentication_error": ("refused_all", "the key is wrong or missing"),
    "permission_denied": ("refused_all", "the key has no right to this model"),
    "permission_error": ("refused_all", "the key has no right to this model"),
    "insufficient_permissions": ("refused_all", "the key has no right to this model"),
    "insufficient_quota": ("refused_all", "the account has nothing left"),
    "billing_hard_limit_reached": ("refused_all", "the account has nothing left"),
    "model_not_found": ("refused_all", "there is no such model"),
    "context_length_exceeded": ("refused", "the request is longer than the context"),
    "string_above_max_length": ("refused", "the request is longer than the context"),
    "content_filter": ("refused", "a filter refused the request"),
    "content_policy_violation": ("refused", "a filter refused the request"),
    "moderation_blocked": ("refused", "a filter refused the request"),
    "rate_limit_exceeded": ("again", "the endpoint has too many requests"),
    "overloaded_error": ("again", "the endpoint is overloaded"),
    "server_error": ("again", "the endpoint failed"),
}
"""The kind of a reply, and the reason, by the `code` or `type` in an error's body."""

KINDS_BY_FINISH_REASON: Mapping[str, tuple[ReplyKind, str]] = {
    "length": ("cut_off", "the answer was cut off at max_tokens"),
    "max_tokens": ("cut_off", "the answer was cut off at max_tokens"),
    "content_filter": ("refused", "a filter ended the answer"),
    "refusal": ("refused", "the endpoint refused to answer"),
    "abort": ("again", "the server cut the answer off"),
    "cancelled": ("again", "the server cut the answer off"),
    "error": ("again", "the server failed in the midst of the answer"),
}
"""The kind of a reply, and the reason, by its `finish_reason`. If that has any other value, or is missing,
the answer came to its end."""


@dataclass(frozen=True)
class ClassifiedReply:
    """A reply with its kind.

    Example: ``ClassifiedReply("cut_off", "Let me think", "the answer was cut off at max_tokens")``.
    """

    kind: ReplyKind
    text: str = ""
    why: str = ""
    """The reason of the kind, if that isn't ``answered``."""
    input_tokens: int | None = None
    """The tokens of the request, as the endpoint counts them; None if it reports no plausible number."""
    output_tokens: int | None = None
    """The tokens of the answer, likewise."""


def read_reply(status: int, body: str, *, is_chat: bool) -> ClassifiedReply:
    """Classifies a reply by the tables `KINDS_BY_CODE`, `KINDS_BY_STATUS` and `KINDS_BY_FINISH_REASON`.
    Raises nothing."""
    value = _read_json(body)
    error = value.get("error") if isinstance(value, Mapping) else None
    if status != 200 or error:
        return _classify_error(status, error or value)  # without a key `error`, the body may be the error
    if not isinstance(value, Mapping):
        return ClassifiedReply("again", why="the reply is not an answer")
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return ClassifiedReply("again", why="the reply has no choices")
    # Without a chat, the choice itself has the `text`. A message of a chat may have no content, e.g. if it is
    # a call of a tool.
    message = choice.get("message") if is_chat else choice
    if not isinstance(message, Mapping) or (not is_chat and "text" not in message):
        return ClassifiedReply("again", why="the reply has no message")
    usage = value.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    input_tokens = _plausible_token_count(usage.get("prompt_tokens"))
    output_tokens = _plausible_token_count(usage.get("completion_tokens"))
    text = _join_parts(message.get("content") if is_chat else message.get("text"))
    finish = choice.get("finish_reason")
    kind: ReplyKind = "answered"
    reason = ""
    if isinstance(finish, str) and finish in KINDS_BY_FINISH_REASON:
        kind, reason = KINDS_BY_FINISH_REASON[finish]
    if kind == "answered" and isinstance(message.get("refusal"), str) and message["refusal"]:
        return ClassifiedReply("refused", why=f"the endpoint refused to answer: {message['refusal']}")
    if kind == "answered" and not text.strip():
        kind, reason = "empty", _reason_of_empty_answer(message)
    return ClassifiedReply(kind, text, reason, input_tokens=input_tokens, output_tokens=output_tokens)


def _classify_error(status: int, error: Any) -> ClassifiedReply:
    """Classifies an error by its code or type, or else by its status. If the HTTP status is 200, the error in
    the body may contain the real status as its code."""
    codes = [error.get("code"), error.get("type")] if isinstance(error, Mapping) else []
    for code in codes:
        if isinstance(code, str) and code.lower() in KINDS_BY_CODE:
            kind, reason = KINDS_BY_CODE[code.lower()]
            return ClassifiedReply(kind, why=reason)
        # {"error": {"code": 429}}, although the HTTP status is 200
        if status == 200 and isinstance(code, int | str) and str(code).isdecimal() and len(str(code)) == 3:
            status = int(code)
    if status == 200:
        return ClassifiedReply("again", why="the reply is an error")
    if status in KINDS_BY_STATUS:
        kind, reason = KINDS_BY_STATUS[status]
        return ClassifiedReply(kind, why=reason)
    if status >= 500:
        return ClassifiedReply("again", why="the endpoint failed")
    if 300 <= status < 400:
        return ClassifiedReply("refused_all", why="the address sends requests elsewhere")
    return ClassifiedReply("refused", why="the request was refused")


def _reason_of_empty_answer(message: Mapping[str, Any]) -> str:
    if message.get("tool_calls") or message.get("function_call"):
        return "the answer is empty: it is a call of a tool"
    if message.get("reasoning_content") or message.get("reasoning"):
        return "the answer is empty: all of it is thought"
    return "the answer is empty"


def _join_parts(content: Any) -> str:
    """Returns the text of a message's content, which some endpoints send as a list of parts. Only parts of
    text are joined; others, such as thoughts, are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in ("text", "output_text"):
            parts.append(part["text"] if isinstance(part.get("text"), str) else "")
    return "".join(parts)


def _read_json(body: str) -> Any:
    """Returns the JSON value of a body, which may be a stream of events; None if it can't be read."""
    try:
        if body.lstrip().startswith(("data:", ":", "event:")):
            return _join_events(body)
        return json.loads(body)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None  # not JSON, or a stream whose events have other types than those of the API


def _join_events(stream: str) -> dict[str, Any] | None:
    """Returns a stream of events as one reply; None if its end is missing."""
    texts: list[str] = []
    finish, usage, is_done = None, None, False
    for line in stream.splitlines():
        if not line.startswith("data:"):
            continue
        event = line.removeprefix("data:").strip()
        if event == "[DONE]":
            is_done = True
            continue
        value = json.loads(event)
        if value.get("error"):
            return {"error": value["error"]}
        usage = value.get("usage") or usage
        for choice in value.get("choices") or ():
            # Chat models stream a `delta`, and models without a chat template a `text` in the choice itself.
            message = choice.get("delta") or choice.get("message") or choice
            texts.append(_join_parts(message.get("content", message.get("text"))))
            finish = choice.get("finish_reason") or finish
    if not is_done and finish is None:  # the connection broke, and the text may be incomplete
        return None
    text = "".join(texts)
    choice = {"message": {"content": text}, "text": text, "finish_reason": finish}
    return {"choices": [choice], "usage": usage}


def _plausible_token_count(value: Any) -> int | None:
    """Returns a plausible number of tokens (from 0 to a hundred million), or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**8 else None
