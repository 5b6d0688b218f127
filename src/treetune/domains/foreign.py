"""Calls reward functions in the way of verl, TRL and verifiers, according to the names of their parameters.

This file only needs the standard library. Another Python can execute it for a function whose packages can't
be installed together with the run's: ``python foreign.py PATH FOLDER…`` answers JSON lines with JSON lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GradedRow = Mapping[str, Any]
"""A problem's ``prompt``, ``gold``, ``data``, ``domain``, its ``messages`` if it is a conversation, and the
answer's ``transcript``."""


GOLD_IS_JSON = "ground_truth_is_json"
"""A key of a problem's data. It is true if the row's gold was a list or an object, which became JSON.
Functions of other libraries get the list or the object."""


class MessageWithAttributes(dict[str, Any]):
    """A message or a call whose values are both keys and attributes, as in verifiers."""

    __getattr__ = dict.get


def file_function(path: str, searched: list[str]) -> Any:
    """Returns the object that ``folder/file.py:name`` names. The file is looked up in the working directory,
    and then in the folders `searched`."""
    file, name = find_file(path, searched), path.rpartition(":")[2]
    module_name = name_in_process(file)
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it is executed, as by an `import`
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"path is {path!r}, and {file} has no {name!r}")
    return getattr(module, name)


def find_file(path: str, searched: list[str]) -> Path:
    """Returns the file of ``folder/file.py:name``, in the working directory or one of the folders `searched`.
    Raises ValueError if there is none."""
    file = path.rpartition(":")[0]
    for folder in ("", *searched):
        if Path(folder, file).is_file():
            return Path(folder, file)
    raise ValueError(f"path is {path!r}, and there is no file {file}")


def name_in_process(file: Path) -> str:
    """Returns the name that the module of a file with a reward function has in this process.

    ``my_reward.py`` becomes ``my_reward``, so that other files can import it. A file with a library's name
    (``json.py``) becomes ``reward_file_json_1a2b3c4d5e6f``. This function then imports the library, so that
    all files, including this one, find the library under its name.
    """
    stem = file.stem
    # The file's own folder is left out: in it, an import would find the file, and not the library.
    other_folders = [folder for folder in sys.path if Path(folder).resolve() != file.parent.resolve()]
    is_library = stem in sys.stdlib_module_names or PathFinder.find_spec(stem, other_folders) is not None
    if is_library and stem not in sys.modules:
        all_folders = sys.path[:]
        sys.path[:] = other_folders
        try:
            importlib.import_module(stem)
        except ImportError:
            pass  # if the file needs the library, its own import raises
        finally:
            sys.path[:] = all_folders
    loaded = sys.modules.get(stem)
    loaded_from: str | None = getattr(loaded, "__file__", None)
    # A module of this name may come from another folder's file: two files `reward.py`.
    is_this_file = loaded_from is not None and Path(loaded_from).resolve() == file.resolve()
    is_free = loaded is None or is_this_file
    if is_free and not is_library:
        return stem
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    return f"reward_file_{stem}_{digest}"


def gold_of_row(row: GradedRow) -> Any:
    """Returns the ground truth as it was in the row."""
    return json.loads(row["gold"]) if row["data"].get(GOLD_IS_JSON) is True else row["gold"]


def message_for_verifiers(message: Mapping[str, Any]) -> Any:
    """Returns a message of verifiers' class, or, if verifiers isn't loaded, a `MessageWithAttributes`: a
    dictionary whose values are attributes, too.

    ``{"role": "user", "content": "2 + 2?"}`` becomes a ``UserMessage``.
    """
    # The module with the classes of messages has had several names.
    modules = map(sys.modules.get, ("verifiers.types", "verifiers.legacy.types", "verifiers.v1.types"))
    loaded_module = next(filter(None, modules), None)
    kind = getattr(loaded_module, f"{message['role'].title()}Message", MessageWithAttributes)
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"])
        function = {**call["function"], "arguments": arguments}
        # Some reward functions read a call's name and arguments from its `function`, as in OpenAI's format.
        # Others read them from the call itself, as in verifiers' classes.
        call_in_openai_format = {**call, "function": function}
        calls.append(MessageWithAttributes({**call_in_openai_format, **function}))
    if not calls:
        return kind(**message)
    return kind(**{**message, "tool_calls": calls})


def verifiers_state(row: GradedRow) -> dict[str, Any]:
    """Returns an answer as verifiers' `state`, which all functions of a rubric share.

    Its `trajectory` has a step for each turn: ``{"prompt": messages before it, "completion": [the model's
    message], "reward": None, "extras": {}}``.
    """
    data = row["data"]
    _, turns, rewards = row["transcript"]
    prompt = list(map(message_for_verifiers, row["messages"] or [{"role": "user", "content": row["prompt"]}]))
    messages_so_far = prompt
    trajectory: list[Mapping[str, Any]] = []
    for turn, reward in zip(turns, rewards):
        # The first message of a turn is the model's, and the others are replies to it.
        turn_messages = list(map(message_for_verifiers, turn))
        step: dict[str, Any] = {
            "prompt": messages_so_far,
            "completion": turn_messages[:1],
            # In verifiers, the reward of a step that earns nothing itself is None, and not 0.
            "reward": reward or None,
            "extras": {},
        }
        trajectory.append(step)
        messages_so_far = [*messages_so_far, *turn_messages]
    gold = gold_of_row(row)
    # The `info` of verifiers is the column `info`. If there is none, it is verl's column `extra_info`, and
    # without this, all columns.
    state = {"answer": gold, **data, "info": data.get("info", data.get("extra_info", dict(data)))}
    state |= {"prompt": prompt, "completion": messages_so_far[len(prompt) :], "task": row["domain"]}
    return state | {"trajectory": trajectory}


def call_arguments(
    parameters: Mapping[str, inspect.Parameter], response: str, row: GradedRow, state: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the positional and keyword arguments for a function with these parameters.

    The names of parameters tell for which library the function was written: ``solution_str`` for verl,
    ``completions`` for TRL, ``completion``, ``state`` or ``trace`` for verifiers. Other functions get the
    response, and the gold or the whole `problem`, as positional arguments.

    Args:
        parameters: The function's parameters by their names.
        response: The answer's text; of several turns, the last turn's.
        row: The problem and the answer's transcript.
        state: The result of `verifiers_state` for the row.
    """
    gold = gold_of_row(row)
    columns = {"answer": gold, "solution": gold, "ground_truth": gold, **row["data"]}
    by_name: dict[str, Any]
    if "solution_strs" in parameters:
        # verl, a function for a whole batch, which has one answer here.
        by_name = {f"{name}s": [value] for name, value in _arguments_of_verl(row).items()}
    elif "solution_str" in parameters:
        by_name = _arguments_of_verl(row)
    elif "completions" in parameters:
        # TRL, or a function for a group of answers in verifiers. Each argument is a list with an item for
        # each answer: here there is one.
        columns |= _columns_of_trl(row)
        # Only verifiers has these names.
        columns |= {"answers": gold, "infos": state["info"], "states": state}
        by_name = {name: [value] for name, value in columns.items()}
    elif parameters.keys() & {"completion", "state"}:
        # verifiers, up to 0.2: a function of a rubric. It may take the keys of the state one by one, too.
        by_name = {**columns, **state, "state": state}
    elif "trace" in parameters:
        # verifiers, from 0.3: a function that is plugged into a task.
        task = SimpleNamespace(**{"prompt": row["prompt"], "prompt_text": row["prompt"], **columns})
        by_name = {"task": task, "trace": _trace_of_verifiers(response, row, state), "runtime": None}
    elif list(parameters)[1:2] == ["problem"]:  # ``def reward(response, problem)``
        # In another Python, the row came as JSON, which has no object `problem`. There the function gets an
        # object with the row's values as attributes.
        return [response, row.get("problem", SimpleNamespace(**row))], {}
    else:
        return [response, row["gold"]], {}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [], {name: value for name, value in by_name.items() if takes_all or name in parameters}


def _arguments_of_verl(row: GradedRow) -> dict[str, Any]:
    """Returns the arguments of verl's reward functions for one answer."""
    data = row["data"]
    text, turns, rewards = row["transcript"]
    # verl's own rollouts and tools put scores under the last two keys. Here they are always empty.
    extra = {**data.get("extra_info", data), "rollout_reward_scores": {}, "tool_rewards": []}
    # verl also counts the prompt and the messages between the model's turns: 3 turns count as 6.
    extra["num_turns"] = 2 * len(turns)
    extra["turn_scores"] = list(rewards) if any(rewards) else []
    return {
        "data_source": data.get("data_source", row["domain"]),
        "solution_str": text,
        "ground_truth": gold_of_row(row),
        "extra_info": extra,
    }


def _columns_of_trl(row: GradedRow) -> dict[str, Any]:
    """Returns the prompt and the completion as TRL gives them to reward functions: lists of messages for a
    conversation, and texts otherwise.

    The keys are plural because TRL passes lists with an item for each answer. A value here is one such item.
    """
    text, turns, _ = row["transcript"]
    conversation = list(row["messages"])
    if not conversation:
        return {"prompts": row["prompt"], "completions": text}
    return {"prompts": conversation, "completions": list(itertools.chain.from_iterable(turns))}


def _trace_of_verifiers(response: str, row: GradedRow, state: Mapping[str, Any]) -> SimpleNamespace:
    """Returns the trace of an answer, from which functions of verifiers' tasks read its messages."""
    _, turns, _ = row["transcript"]
    completion = state["completion"]
    return SimpleNamespace(
        messages=state["prompt"] + completion,
        last_reply=response.strip(),
        num_turns=len(turns),
        assistant_messages=[message for message in completion if message.role == "assistant"],
        tool_messages=[message for message in completion if message.role == "tool"],
    )


def read_rewards(result: Any, name: str, turns: int = 1) -> tuple[list[float], dict[str, float]]:
    """Returns the turns' rewards and the metrics in a function's result, which is awaited if necessary.

    A single number is the reward of the last turn: 1.0 for three turns gives ([0.0, 0.0, 1.0], {}).
    ``{"score": 1.0, "length": 7}`` gives ([1.0], {"rewards/score": 1.0, "rewards/length": 7.0}). None, which
    means that there is no answer, gives ([], {}).

    Raises ValueError unless the result has one of these forms:

    * None;
    * a finite number;
    * a list with a finite number for each turn;
    * a dictionary with such a number or list as ``score`` or ``reward``;
    * a list with one of these forms as its only item, which a function for a batch of answers returns (here
      the batch has one answer).
    """
    if inspect.isawaitable(result):
        result = asyncio.run(_await_result(result))
    returned = result  # for the message of the error
    numbers: dict[str, float] = {}
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]  # the result of a batch's only answer, or the reward of the only turn
    if result is None:
        return [], {}
    if isinstance(result, Mapping):
        for key, value in result.items():
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[f"rewards/{key}"] = float(value)
        result = result.get("score", result.get("reward"))
    has_reward_of_each_turn = isinstance(result, list | tuple) and len(result) == turns
    rewards = result if has_reward_of_each_turn else [result]
    # A list of another length has become an item of `rewards`. It is not a number, and raises here, too.
    if not all(map(_is_finite_number, rewards)):
        raise ValueError(
            f"{name} returned {returned!r}: return a finite number, a list with one number (or one for each"
            f" of the {turns} turns), a dict with a 'score' key, or None for a response without an answer"
        )
    return [0.0] * (turns - len(rewards)) + list(map(float, rewards)), numbers


def _is_finite_number(value: Any) -> bool:
    """Returns whether a value is a finite number, which may be one of numpy or torch."""
    return not isinstance(value, str) and hasattr(value, "__float__") and math.isfinite(value)


async def _await_result(result: Any) -> Any:
    return await result


def _is_grade(result: Any) -> bool:
    """Returns whether a function returned a `Grade`. This file can't import its class: it also runs in
    Pythons without treetune."""
    return hasattr(result, "outcome")


def grade_answer(
    function: Any, name: str, response: str, row: GradedRow, arguments: Mapping[str, Any]
) -> Any:
    """Grades an answer with a reward function, or with several weighted ones (see `_weighted_functions`).

    Functions may set the rewards of steps in verifiers' `state`. Then each turn but the last has the reward
    of its step. The last turn has what remains of the sum of the rewards that the functions returned.

    Returns:
        The turns' rewards and the metrics, or the function's `Grade` if it returns one. The list of rewards
        is empty if the function returned None, which means that the response contains no answer. Of several
        weighted functions, each has to return None for this, and none may have set the reward of a step.
    """
    state = verifiers_state(row)
    steps = state["trajectory"]
    step_rewards_before = [step["reward"] for step in steps]
    weighted_functions, objects = _weighted_functions(function, row)  # none for a plain function
    numbers: dict[str, float] = {}
    if weighted_functions:
        rewards = [0.0] * len(steps)  # of each turn: the weighted sum of what the functions returned
        has_rewards = False
        row = {**row, "data": {**row["data"], **objects}}  # the functions get these by their names, too
        for part, weight in weighted_functions:
            # verifiers passes all arguments of a rubric's functions by their names.
            _, by_name = call_arguments(inspect.signature(part).parameters, response, row, state)
            rewards_of_part, _ = read_rewards(part(**by_name), part.__name__, len(steps))
            numbers[f"rewards/{part.__name__}"] = sum(rewards_of_part)
            # `rewards_of_part` is empty if the function returned None, which adds nothing.
            has_rewards |= bool(rewards_of_part)
            pairs = zip_longest(rewards, rewards_of_part, fillvalue=0.0)
            rewards = [sum_so_far + weight * reward for sum_so_far, reward in pairs]
    else:
        in_order, by_name = call_arguments(inspect.signature(function).parameters, response, row, state)
        result = function(*in_order, **by_name, **arguments)
        if _is_grade(result):
            return result
        rewards, numbers = read_rewards(result, name, len(steps))
        has_rewards = bool(rewards)

    step_rewards = [step["reward"] for step in steps]
    has_set_step_rewards = step_rewards != step_rewards_before
    if not has_set_step_rewards:
        return (rewards if has_rewards else []), numbers
    if not rewards:  # a plain function returned None
        return [], numbers
    rewards_before_last = [reward or 0.0 for reward in step_rewards[:-1]]
    return [*rewards_before_last, sum(rewards) - sum(rewards_before_last)], numbers


def _weighted_functions(reward_object: Any, row: GradedRow) -> tuple[list[tuple[Any, float]], dict[str, Any]]:
    """Returns reward functions with their weights, and the objects that they may take as parameters, by name.

    Args:
        reward_object: A rubric, a group of rubrics, an environment with one of these, a task's class
            (verifiers, from 0.3), or a plain function, for which both results are empty.
    """
    is_class_of_task = hasattr(reward_object, "data_type")
    if is_class_of_task:
        # A task is made of a pydantic object with the problem's columns. Its rewards are methods that
        # verifiers has marked with their weights.
        columns = {"prompt": row["prompt"], "answer": gold_of_row(row), **row["data"]}
        data_type = reward_object.data_type()
        fields = data_type.model_fields
        data = data_type(**{key: columns[key] for key in columns if key in fields})
        hooks = reward_object(data).hooks("reward")
        return [(hook, getattr(hook, "_vf_weight", 1.0)) for hook in hooks], {}
    weighted_functions: list[tuple[Any, float]] = []
    objects: dict[str, Any] = {}
    rubric_or_group = getattr(reward_object, "rubric", reward_object)
    for rubric in getattr(rubric_or_group, "rubrics", [rubric_or_group]):
        functions, weights = getattr(rubric, "funcs", ()), getattr(rubric, "weights", ())
        weighted_functions += zip(functions, weights, strict=True)
        objects |= getattr(rubric, "class_objects", {})
    return weighted_functions, objects


def main() -> None:
    """Loads the function of the command line, writes "ready", and grades an answer for each line of standard
    input.

    A line is ``[response, row, arguments]``. The reply is what `grade_answer` returns, with a `Grade` as an
    object of its fields. If the function raised an error, or its result can't be written as JSON, the
    reply is the error's text.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a function prints goes to the error stream
    path, *searched = sys.argv[1:]
    # The first entry is this file's folder, whose modules must not hide the function's.
    sys.path[:] = [os.getcwd(), *searched, *sys.path[1:]]
    module, _, name = path.rpartition(":")
    if module.endswith(".py"):
        function = file_function(path, searched)
    else:
        function = getattr(importlib.import_module(module), name)
    if name == "load_environment":  # verifiers' name for a function that makes an environment with its rubric
        function = function()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        response, row, arguments = json.loads(line)
        try:
            result = grade_answer(function, path, response, row, arguments)
            reply = json.dumps(vars(result) if _is_grade(result) else result)
        except (Exception, SystemExit) as error:
            reply = json.dumps(f"{type(error).__name__}: {error}")
        print(reply, file=answers, flush=True)


if __name__ == "__main__":
    main()
