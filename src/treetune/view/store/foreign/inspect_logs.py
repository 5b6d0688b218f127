"""Maps samples of Inspect's logs (``.eval``, a zip archive with a file for each sample, and ``.json``).

The prompt consists of the messages before the first generated one, and the answer of the messages from there
on. The reward is the first number of the scores, and all numbers of all scores are kept. The sample's error,
the limit that ended it, the model's stop reason and the number of its tokens are mapped, too. Texts that the
log stores as attachments are put back into their places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from treetune.exceptions import NotAnAnswer
from treetune.view.store.foreign.line import (
    UNFINISHED_REASON,
    describe_error,
    finish_reason_of,
    is_plain,
    make_line,
    number_of,
    numbers_in,
    output_tokens,
    problem_name,
)

NUMBER_OF_GRADE = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""The numbers of Inspect's grades: correct, partially correct, incorrect, no answer."""
NUMBER_OF_WORD = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""The numbers of words that a score may be instead of a grade."""

ATTACHMENT_PREFIX = "attachment://"
"""The prefix of a text that stands for an attachment, followed by the attachment's name."""

GRADING_OUTCOMES = ("ok", "no_answer", "timeout", "error", "unavailable")
OWN_MODEL_PREFIX = "treetune/"
"""The prefix of the model's name in logs that treetune itself wrote (`export_evaluation`). The metadata of
their samples has the outcomes of treetune's graders."""


def answer_of(sample: Mapping[str, Any], task: str = "") -> dict[str, Any]:
    """Returns a sample in the form of a line of an evaluation's file (`line`).

    Raises NotAnAnswer for an object that is not a sample.
    """
    if "id" not in sample or ("input" not in sample and "messages" not in sample):
        raise NotAnAnswer("it has no id or no input, which a sample of Inspect has")
    attachments = sample.get("attachments") or {}
    output: Mapping[str, Any] = sample.get("output") or {}
    # The other parts of a sample, such as its events, may be large, and have nothing of prompt and answer.
    conversation = {"input": sample.get("input"), "messages": sample.get("messages")}
    prompt, answer = _split_sample(_with_attachments(conversation, attachments), output)
    reward, values, score = _read_scores(sample.get("scores"), sample.get("score"))
    error = describe_error(sample.get("error")) or describe_error(output.get("error"))
    limit = sample.get("limit")
    reason = next((choice.get("stop_reason") for choice in output.get("choices") or () if choice), None)
    # If treetune wrote the log, the sample's metadata has what treetune's grader said, even if the answer
    # could not be graded.
    is_exported = str(output.get("model") or "").startswith(OWN_MODEL_PREFIX)
    exported: Mapping[str, Any] = (sample.get("metadata") or {}) if is_exported else {}
    remarks = [str(score.get("explanation") or exported.get("message") or "")]
    if isinstance(limit, Mapping):
        remarks.append(f"stopped by the {limit.get('type')} limit ({limit.get('limit')})")
    if len(values) > 1 and reward is not None:
        remarks.append(f"the reward is the first of {len(values)} scores, {next(iter(values))}")
    if not values and not error and not is_exported:
        remarks.append("it has no score" if score == {} else "its score is not a number")
    epoch = sample.get("epoch")
    return make_line(
        prompt=prompt,
        text=answer,
        reward=reward,
        problem=problem_name(prompt, task, sample["id"], unique=True),
        gold=_reference_answer(sample.get("target")),
        error=error,
        finish_reason=UNFINISHED_REASON if isinstance(limit, Mapping) else finish_reason_of(reason),
        tokens=_count_tokens(sample, output),
        extracted=score.get("answer", exported.get("extracted")),
        message="; ".join(filter(None, remarks)),
        outcome=exported["outcome"] if exported.get("outcome") in GRADING_OUTCOMES else None,
        numbers=values | numbers_in(exported if is_exported else {"metadata": sample.get("metadata")}),
        sample=epoch - 1 if isinstance(epoch, int) and epoch > 0 else None,
    )


def _with_attachments(value: Any, attachments: Mapping[str, Any]) -> Any:
    """Returns a part of a sample in which each name of an attachment is replaced by the attachment."""
    if isinstance(value, str) and value.startswith(ATTACHMENT_PREFIX):
        return attachments.get(value.removeprefix(ATTACHMENT_PREFIX), value)
    if isinstance(value, list):
        return [_with_attachments(part, attachments) for part in value]
    if isinstance(value, Mapping):
        return {name: _with_attachments(part, attachments) for name, part in value.items()}
    return value


def _split_sample(conversation: Mapping[str, Any], output: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the prompt and the answer of a sample. `conversation` has its ``input`` and its ``messages``.

    The answer begins with the first assistant message that the log marks as generated. Older logs have no
    such marks. There it begins with the first assistant message after the messages of the input, which may
    themselves contain assistant messages as examples.
    """
    sample_input = conversation["input"]
    messages = conversation["messages"] or []
    # System messages aren't counted, neither here nor below: solvers add some that are not in the input.
    messages_in_input = 1
    if isinstance(sample_input, list):
        messages_in_input = sum(message.get("role") != "system" for message in sample_input)
    has_marks = any(message.get("source") == "generate" for message in messages)
    answer_start = len(messages)
    messages_so_far = 0
    for position, message in enumerate(messages):
        if has_marks:
            may_begin_answer = message.get("source") == "generate"
        else:
            may_begin_answer = messages_so_far >= messages_in_input
        if message.get("role") == "assistant" and may_begin_answer:
            answer_start = position
            break
        if message.get("role") != "system":
            messages_so_far += 1
    prompt, answer = messages[:answer_start] or sample_input, messages[answer_start:]
    if not answer:  # a log without the messages has the answer only as the model's output
        choices = output.get("choices") or []
        answer = [choice["message"] for choice in choices if choice and choice.get("message")]
        answer = answer or output.get("completion") or ""
    return prompt, answer


def _read_scores(scores: Any, single_score: Any) -> tuple[float | None, dict[str, float], Mapping[str, Any]]:
    """Returns the reward, the numbers of all scores, and the score that the reward is from.

    The numbers are by scorer, or by ``scorer/name`` if a score has several. The reward is the first of them.
    If no score has a number, the reward is None, and the first score is returned.
    """
    if not scores and single_score:  # the first versions of the format have only a single score
        scores = {"score": single_score}
    values = dict[str, float]()
    reward_score: Mapping[str, Any] = {}
    if not isinstance(scores, Mapping):
        return None, values, reward_score
    for scorer, score in scores.items():
        is_object = isinstance(score, Mapping) and "value" in score
        score_object = score if is_object else {"value": score}
        numbers = dict(_numbers_of_score(str(scorer), score_object["value"]))
        is_first_with_number = numbers and not values
        if is_first_with_number or not reward_score:  # the first score of all, until one has a number
            reward_score = score_object
        values |= numbers
    reward = next(iter(values.values()), None)
    return reward, values, reward_score


def _numbers_of_score(name: str, value: Any) -> Sequence[tuple[str, float]]:
    """Returns (name, number) for each number of a score: [("match", 1.0)], or for a list [("match/0", 1.0),
    …]."""
    members: list[tuple[object, Any]] | None = None
    if isinstance(value, Mapping):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    if members is not None:
        named_numbers: list[tuple[str, float]] = []
        for key, member in members:
            named_numbers += _numbers_of_score(f"{name}/{key}", member)
        return named_numbers
    number = _number_of_grade(value)
    return [] if number is None else [(name, number)]


def _number_of_grade(value: Any) -> float | None:
    """Returns the number of a score, which may be a grade such as "C", a word such as "yes", or a number.

    Returns None for anything else.
    """
    if isinstance(value, str):
        grade = NUMBER_OF_GRADE.get(value, NUMBER_OF_WORD.get(value.strip().casefold()))
        return number_of(value) if grade is None else grade
    return None if isinstance(value, float) and math.isnan(value) else number_of(value)


def _reference_answer(target: Any) -> Any:
    """Returns a sample's reference answer. If there are several, each of which is right, they are joined by
    "or"."""
    if isinstance(target, list) and all(is_plain(part) for part in target):
        return " or ".join(map(str, target)) or None
    return None if target == "" else target


def _count_tokens(sample: Mapping[str, Any], output: Mapping[str, Any]) -> float | None:
    """Returns the number of tokens that the evaluated model wrote.

    The sample's usage is preferred, because it counts all calls of the model. The output's usage is only that
    of the last call.
    """
    by_model = sample.get("model_usage")
    usage = by_model.get(output.get("model")) if isinstance(by_model, Mapping) else None
    return output_tokens(usage) or output_tokens(output.get("usage"))
