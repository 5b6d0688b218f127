"""Maps rollouts of verifiers and prime-rl: lines of ``results.jsonl`` (verifiers 0.1) and traces (0.4).

Prompt and completion are mapped with their calls of tools, results and thoughts. The reward, the error of a
failed rollout, the stop condition, the number of tokens, and metrics are mapped, too. If an episode has
several agents, its reward is that of the first agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treetune.exceptions import NotAnAnswer
from treetune.view.store.foreign.conversation import write_as_text
from treetune.view.store.foreign.line import (
    describe_change,
    describe_error,
    finish_reason_of,
    make_line,
    number_of,
    numbers_in,
    output_tokens,
    problem_name,
)

RESULT_FIELDS = ("stop_condition", "is_truncated", "is_completed", "example_id")
"""Fields that verifiers 0.1 writes in addition to a prompt and a completion. A result has at least one."""

FIELDS_WITHOUT_NUMBERS = (
    "reward",
    "example_id",
    "error",
    "info",
    "tool_defs",
    "tools",
    "sampling_args",
    "prompt",
    "completion",
)
"""Fields of a result whose numbers are not kept as numbers of the answer, because they don't describe it or
are shown elsewhere."""


def is_result(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is a result of verifiers 0.1."""
    return "completion" in row and "prompt" in row and any(name in row for name in RESULT_FIELDS)


def is_episode(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is an episode with its traces, or a single trace. prime-rl writes both kinds."""
    return isinstance(row.get("traces"), list) or (isinstance(row.get("nodes"), list) and "rewards" in row)


def answer_of_result(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result of verifiers 0.1 in the form of a line of an evaluation's file (`line`)."""
    error = describe_error(row.get("error"))
    reward = number_of(row.get("reward"))
    numbers = numbers_in(row, FIELDS_WITHOUT_NUMBERS)
    if error and reward is not None:  # a failed rollout counts as not graded
        numbers["reward_of_a_failure"] = reward
    task = row.get("task") if row.get("task") != "default" else None  # "default" doesn't name a task
    return make_line(
        prompt=row["prompt"],
        text=row["completion"],
        reward=None if error else reward,
        problem=problem_name(row["prompt"], row.get("env_id") or task, row.get("example_id")),
        gold=row.get("answer"),
        error=error,
        finish_reason=finish_reason_of(row.get("stop_condition"), truncated=row.get("is_truncated")),
        tokens=output_tokens(row.get("token_usage")),
        message="" if error or reward is not None else "its reward is not a number",
        numbers=numbers,
    )


def answer_of_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an episode, or a single trace, of verifiers 0.4 in the form of a line of an evaluation's file.

    A trace has the messages of one agent. The line's text has the texts of all agents, and its reward is that
    of the first agent. Raises NotAnAnswer for an episode without a trace, a task and an error.
    """
    traces = row["traces"] if isinstance(row.get("traces"), list) else [row]
    first_trace: Mapping[str, Any] = traces[0] if traces else {}
    task = _find_task(row, first_trace)
    data = task["data"] if isinstance(task.get("data"), Mapping) else {}
    prompt, answer = _read_prompt_and_answer(first_trace, data)
    if not traces and not data and not row.get("errors"):
        raise NotAnAnswer("its episode has no trace, no task and no error")
    reason = first_trace.get("stop_condition") or row.get("stop_condition")
    error = _find_error(row, first_trace, reason)
    reward, scores = _read_reward(first_trace)
    numbers = scores | numbers_in({"metrics": first_trace.get("metrics") or row.get("metrics")})
    if error and reward is not None:  # a failed rollout counts as not graded
        numbers["reward_of_a_failure"] = reward
    # The name is made from the task's prompt, if there is one. A rollout that failed before its first message
    # has this prompt, too, so it gets the same name as the task's other rollouts.
    prompt_of_task = data.get("prompt") or prompt
    return make_line(
        prompt=prompt,
        text=write_as_text(answer) + _write_further_agents(traces[1:]),
        changed="several agents" if len(traces) > 1 else describe_change(answer),
        reward=None if error else reward,
        problem=problem_name(prompt_of_task, _find_environment(row, first_trace), task.get("key")),
        gold=data.get("answer"),
        error=error,
        finish_reason=finish_reason_of(reason, truncated=first_trace.get("is_truncated")),
        tokens=_count_tokens(first_trace),
        message="" if error or reward is not None else "it has no reward",
        numbers=numbers,
    )


def _find_task(row: Mapping[str, Any], first_trace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the task of an episode, or else that of its first trace, or else {}."""
    for task in (row.get("task"), first_trace.get("task")):
        if isinstance(task, Mapping):
            return task
    return {}


def _read_prompt_and_answer(trace: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Returns the messages before and from the model's first one. Without messages before it, the prompt is
    that of the task's data; "" if there is none."""
    prompt_messages, answer = _split_trace(trace)
    if prompt_messages:
        return prompt_messages, answer
    # The rollout failed before its first message, but the task may have the prompt.
    prompts = (data[name] for name in ("prompt", "question", "instruction") if data.get(name))
    return next(prompts, ""), answer


def _find_error(row: Mapping[str, Any], first_trace: Mapping[str, Any], reason: Any) -> str:
    """Returns the error with which an episode failed; "" if it didn't fail.

    Args:
        reason: The condition by which the episode stopped.
    """
    error = describe_error([*(row.get("errors") or ()), *(first_trace.get("errors") or ())])
    if error:
        return error
    has_failed = first_trace.get("ok") is False or row.get("ok") is False
    if not has_failed:
        return ""
    return f"it failed ({reason})" if reason else "it failed"


def _write_further_agents(traces: Sequence[Mapping[str, Any]]) -> str:
    """Returns the texts of the second and all further agents, each below its name."""
    text = ""
    for number, trace in enumerate(traces, 2):
        agent = trace.get("agent") or trace.get("agent_id") or f"agent {number}"
        _, answer = _split_trace(trace)
        text += f"\n\n--- {write_as_text(agent)} ---\n\n{write_as_text(answer)}"
    return text


def _split_trace(trace: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Returns (messages before the first sampled one, all further messages): the prompt and the answer."""
    nodes = [node for node in trace.get("nodes") or () if isinstance(node, Mapping) and node.get("message")]
    answer_start = next((i for i, node in enumerate(nodes) if node.get("sampled")), len(nodes))
    messages = [node["message"] for node in nodes]
    return messages[:answer_start], messages[answer_start:]


def _read_reward(trace: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """Returns a trace's reward, and its scores by name.

    The reward is the one that the trace states or, if it states none, the weighted sum of the scores. It is
    None if there is no score, or if a score whose weight isn't 0 is not a number. A reward function whose
    entry is null has no score.
    """
    scores, total = dict[str, float](), 0.0
    is_sum_known = True
    for name, reward in (trace.get("rewards") or {}).items():
        if reward is None:
            continue
        score = number_of(reward.get("score") if isinstance(reward, Mapping) else reward)
        weight = number_of(reward.get("weight", 1.0)) if isinstance(reward, Mapping) else 1.0
        if score is None or weight is None:
            is_sum_known = is_sum_known and weight == 0
            continue
        scores[name] = score
        total += score * weight
    stated_reward = number_of(trace.get("reward"))
    if stated_reward is not None:
        return stated_reward, scores
    weighted_sum = total if scores and is_sum_known else None
    return weighted_sum, scores


def _find_environment(row: Mapping[str, Any], trace: Mapping[str, Any]) -> Any:
    """Returns the name of the environment, from the episode or, if that has none, from the trace."""
    for source in (row, trace):
        environment = source.get("env")
        if isinstance(environment, Mapping) and (environment.get("name") or environment.get("id")):
            return environment.get("name") or environment.get("id")
        if source.get("env_name"):
            return source["env_name"]
        info = source.get("info")
        if isinstance(info, Mapping) and info.get("env_name"):
            return info["env_name"]
    return None


def _count_tokens(trace: Mapping[str, Any]) -> float | None:
    """Returns the number of sampled tokens, from the trace's usage or, if it has none, from its nodes.

    Returns None if neither says it.
    """
    tokens_of_trace = output_tokens(trace.get("usage") or trace.get("token_usage"))
    if tokens_of_trace is not None:
        return tokens_of_trace
    counts = list[float]()
    for node in trace.get("nodes") or ():
        if not isinstance(node, Mapping) or not node.get("sampled"):
            continue
        tokens = output_tokens(node.get("usage"))
        ids = node.get("token_ids") or node.get("completion_ids")
        if tokens is None and isinstance(ids, list):
            tokens = len(ids)
        if tokens is not None:
            counts.append(tokens)
    return sum(counts) if counts else None
