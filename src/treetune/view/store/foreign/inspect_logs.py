"""Samples of Inspect's logs (``.eval``, a zip archive with a file for each sample, and ``.json``).

Mapped: the messages of the input and before the first generated one are the prompt, all behind are the
answer; the first score is the reward, and all values of all scores are numbers; an error of the sample, a
limit that ended it, the model's stop reason and its tokens. Texts that the log keeps apart as attachments are
put back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from treetune.exceptions import NotAnAnswer
from treetune.view.store.foreign.line import (
    UNFINISHED,
    error_words,
    finish_reason_of,
    is_plain,
    line,
    number_of,
    numbers_in,
    output_tokens,
    problem_name,
)

GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Inspect's letters as it turns them into numbers: correct, partially so, incorrect, no answer."""
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}

ATTACHMENT = "attachment://"

OUTCOMES = ("ok", "no_answer", "timeout", "error", "unavailable")
OWN_MODEL = "treetune/"
"""Begins the model's name in logs that `export_evaluation` wrote, whose samples keep the grader's outcome."""


def answer_of(sample: Mapping[str, Any], task: str = "") -> dict[str, Any]:
    """Returns the line of a sample. Raises NotAnAnswer for what is none."""
    if "id" not in sample or ("input" not in sample and "messages" not in sample):
        raise NotAnAnswer("it has no id or no input, as a sample of Inspect has")
    attachments = sample.get("attachments") or {}
    output: Mapping[str, Any] = sample.get("output") or {}
    prompt, answer = _split(_with_attachments(sample, attachments), output)
    reward, values, score = _graded(sample.get("scores"), sample.get("score"))
    error = error_words(sample.get("error")) or error_words(output.get("error"))
    limit = sample.get("limit")
    reason = next((choice.get("stop_reason") for choice in output.get("choices") or () if choice), None)
    own = str(output.get("model") or "").startswith(OWN_MODEL)
    kept: Mapping[str, Any] = (sample.get("metadata") or {}) if own else {}
    remarks = [str(score.get("explanation") or kept.get("message") or "")]
    if isinstance(limit, Mapping):
        remarks.append(f"ended by its limit of {limit.get('type')} ({limit.get('limit')})")
    if len(values) > 1 and reward is not None:
        remarks.append(f"of {len(values)} scores the first, {next(iter(values))}, is the reward")
    if not values and not error and not own:
        remarks.append("it has no score" if score == {} else "its score is no number")
    epoch = sample.get("epoch")
    return line(
        prompt=prompt,
        text=answer,
        reward=reward,
        problem=problem_name(prompt, task, sample["id"], unique=True),
        gold=_target(sample.get("target")),
        error=error,
        finish_reason=UNFINISHED if isinstance(limit, Mapping) else finish_reason_of(reason),
        tokens=_tokens(sample, output),
        extracted=score.get("answer", kept.get("extracted")),
        message="; ".join(filter(None, remarks)),
        outcome=kept["outcome"] if kept.get("outcome") in OUTCOMES else None,
        numbers=values | numbers_in(kept if own else {"metadata": sample.get("metadata")}),
        sample=epoch - 1 if isinstance(epoch, int) and epoch > 0 else None,
    )


def _with_attachments(value: Any, attachments: Mapping[str, Any]) -> Any:
    """Returns a sample's input and messages with the texts that its log keeps apart."""
    if isinstance(value, str) and value.startswith(ATTACHMENT):
        return attachments.get(value.removeprefix(ATTACHMENT), value)
    if isinstance(value, list):
        return [_with_attachments(part, attachments) for part in value]
    if isinstance(value, Mapping):
        left = ("attachments", "events", "store")
        return {
            name: _with_attachments(part, attachments) for name, part in value.items() if name not in left
        }
    return value


def _split(sample: Mapping[str, Any], output: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the prompt and the answer.

    Solvers put system messages before the input, and examples in it may have answers of their own: what the
    model wrote begins behind as many messages as the input has, or where the log says that it was generated.
    """
    asked = sample.get("input")
    messages = sample.get("messages") or []
    in_input = len(asked) if isinstance(asked, list) else 1
    has_sources = any(message.get("source") == "generate" for message in messages)
    first = len(messages)
    messages_before = 0  # without the system messages, which solvers add
    for position, message in enumerate(messages):
        is_generated = message.get("source") == "generate"
        is_behind_input = not has_sources and messages_before >= in_input
        if message.get("role") == "assistant" and (is_generated or is_behind_input):
            first = position
            break
        if message.get("role") != "system":
            messages_before += 1
    prompt, answer = messages[:first] or asked, messages[first:]
    if not answer:
        choices = (_with_attachments(output, {}).get("choices") or []) if output else []
        answer = [choice["message"] for choice in choices if choice and choice.get("message")]
        answer = answer or output.get("completion") or ""
    return prompt, answer


def _graded(scores: Any, single: Any) -> tuple[float | None, dict[str, float], Mapping[str, Any]]:
    """Returns the reward, all values by scorer (and by name within a scorer), and the score that counts: the
    first one with a number, else the first."""
    if not scores and single:  # of the first versions of the format
        scores = {"score": single}
    values = dict[str, float]()
    counted: Mapping[str, Any] = {}
    if not isinstance(scores, Mapping):
        return None, values, counted
    for scorer, score in scores.items():
        is_object = isinstance(score, Mapping) and "value" in score
        score_object = score if is_object else {"value": score}
        numbers = dict(_values(str(scorer), score_object["value"]))
        # The first score counts, until one with a number comes.
        if not counted or (numbers and not values):
            counted = score_object
        values |= numbers
    reward = next(iter(values.values()), None)
    return reward, values, counted


def _values(name: str, value: Any) -> Sequence[tuple[str, float]]:
    """Returns the numbers of a score by name: one, or those of an object or a list."""
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _values(f"{name}/{key}", part)]
    if isinstance(value, list):
        return [pair for index, part in enumerate(value) for pair in _values(f"{name}/{index}", part)]
    number = _number(value)
    return [] if number is None else [(name, number)]


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        letter = GRADES.get(value, WORDS.get(value.strip().casefold()))
        return number_of(value) if letter is None else letter
    return None if isinstance(value, float) and math.isnan(value) else number_of(value)


def _target(target: Any) -> Any:
    if isinstance(target, list) and all(is_plain(part) for part in target):
        return " or ".join(map(str, target)) or None
    return None if target == "" else target


def _tokens(sample: Mapping[str, Any], output: Mapping[str, Any]) -> float | None:
    """Returns the tokens of all that the evaluated model wrote: a sample's usage counts all its calls, the
    output's the last alone."""
    by_model = sample.get("model_usage")
    usage = by_model.get(output.get("model")) if isinstance(by_model, Mapping) else None
    return output_tokens(usage) or output_tokens(output.get("usage"))
