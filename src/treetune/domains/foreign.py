"""Reward functions as verl, TRL and verifiers call them, found by the names of their parameters.

Needs the standard library alone, so that another Python can run this file for a function whose packages can't
be installed beside the run's: ``python foreign.py PATH FOLDER…`` answers JSON lines with JSON lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
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

Row = Mapping[str, Any]
"""A problem: ``prompt``, ``gold``, ``data``, ``domain``, ``messages`` where it is a conversation, and the
answer's ``transcript``."""


GOLD_IS_JSON = "ground_truth_is_json"
"""Key of a problem's data that is true where its gold is the JSON of a list or of an object that its row had.
Functions of other libraries get the list or the object, as they do there."""


class Said(dict[str, Any]):
    """A message, or a call in it, that is read by keys and by attributes, as those of verifiers are."""

    __getattr__ = dict.get


def file_function(path: str, searched: list[str]) -> Any:
    """Returns what ``folder/file.py:name`` names, from the working directory or one of the folders."""
    found, name = file_of(path, searched), path.rpartition(":")[2]
    module_name = name_in_process(found)
    spec = importlib.util.spec_from_file_location(module_name, found)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"path is {path!r}, and {found} has no {name!r}")
    return getattr(module, name)


def file_of(path: str, searched: list[str]) -> Path:
    """Returns the file of ``folder/file.py:name``. Raises ValueError where there is none."""
    file = path.rpartition(":")[0]
    for folder in ("", *searched):
        if Path(folder, file).is_file():
            return Path(folder, file)
    raise ValueError(f"path is {path!r}, and there is no file {file}")


def name_in_process(file: Path) -> str:
    """Returns the name under which a file with a reward is a module of this process: its own, under which
    other files can import it, but where that is another's (``math_verify.py``, ``json.py``). Then a library
    of that name is imported first, so that the file itself and all others find the library."""
    stem = file.stem
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != file.parent.resolve()]
    is_library = stem in sys.stdlib_module_names or PathFinder.find_spec(stem, elsewhere) is not None
    if is_library and stem not in sys.modules:
        path = sys.path[:]
        sys.path[:] = elsewhere
        try:
            importlib.import_module(stem)
        except ImportError:
            pass  # the file says so itself, if it needs the library
        finally:
            sys.path[:] = path
    loaded = sys.modules.get(stem)
    is_own = loaded is None or Path(getattr(loaded, "__file__", None) or "/").resolve() == file.resolve()
    if is_own and not is_library:
        return stem
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    return f"reward_file_{stem}_{digest}"


def gold_of(row: Row) -> Any:
    """Returns the ground truth as the row had it."""
    return json.loads(row["gold"]) if row["data"].get(GOLD_IS_JSON) is True else row["gold"]


def message_of(one: Mapping[str, Any]) -> Any:
    """Returns a message as verifiers has it, of its own class where it is loaded."""
    modules = map(sys.modules.get, ("verifiers.types", "verifiers.legacy.types", "verifiers.v1.types"))
    kind = getattr(next(filter(None, modules), None), f"{one['role'].title()}Message", Said)
    calls = []
    for call in one.get("tool_calls", ()):
        function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
        calls.append(Said({**call, "function": function, **function}))
    return kind(**{**one, "tool_calls": calls} if calls else one)


def answered(row: Row) -> dict[str, Any]:
    """Returns an answer in the form of verifiers' `state`, which all functions of a rubric share; its
    `trajectory` has a step for each turn."""
    data = row["data"]
    _, turns, rewards = row["transcript"]
    prompt = list(map(message_of, row["messages"] or [{"role": "user", "content": row["prompt"]}]))
    messages, trajectory = prompt, list[Mapping[str, Any]]()
    for turn, reward in zip(turns, rewards):
        said = list(map(message_of, turn))
        step = {"prompt": messages, "completion": said[:1], "reward": reward or None}
        trajectory.append({**step, "extras": {}})
        messages = [*messages, *said]
    gold = gold_of(row)
    state = {"answer": gold, **data, "info": data.get("info", data.get("extra_info", dict(data)))}
    state |= {"prompt": prompt, "completion": messages[len(prompt) :], "task": row["domain"]}
    return state | {"trajectory": trajectory}


def offered(
    parameters: Mapping[str, inspect.Parameter], response: str, row: Row, state: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns what a function with these parameters is called with, in order and by name. One of no other
    library gets the response, and the gold or the whole `problem`."""
    data, conversation = row["data"], list(row["messages"])
    gold = gold_of(row)
    text, turns, rewards = row["transcript"]
    columns = {"answer": gold, "solution": gold, "ground_truth": gold, **data}
    given: dict[str, Any]
    if parameters.keys() & {"solution_str", "solution_strs"}:  # verl, and for whole batches
        extra = {**data.get("extra_info", data), "rollout_reward_scores": {}, "tool_rewards": []}
        extra["num_turns"] = 2 * len(turns)  # the prompt and what stands between turns count
        extra["turn_scores"] = list(rewards) if any(rewards) else []
        given = {"data_source": data.get("data_source", row["domain"]), "solution_str": text}
        given |= {"ground_truth": gold, "extra_info": extra}
        if "solution_strs" in parameters:
            given = {f"{name}s": [value] for name, value in given.items()}
    elif "completions" in parameters:  # TRL: texts, or conversations where prompts are; verifiers, by group
        columns |= {"answers": gold, "infos": state["info"], "states": state}
        completion = [one for turn in turns for one in turn] if conversation else text
        columns |= {"prompts": conversation or row["prompt"], "completions": completion}
        given = {name: [value] for name, value in columns.items()}
    elif parameters.keys() & {"completion", "state"}:  # verifiers, up to 0.2: a function of a rubric
        given = {**columns, **state, "state": state}
    elif "trace" in parameters:  # verifiers, from 0.3: a function that is plugged into a task
        heard = state["completion"]
        trace = {"messages": state["prompt"] + heard, "last_reply": response.strip(), "num_turns": len(turns)}
        for role in ("assistant", "tool"):
            trace[f"{role}_messages"] = [one for one in heard if one.role == role]
        task = SimpleNamespace(**{"prompt": row["prompt"], "prompt_text": row["prompt"], **columns})
        given = {"task": task, "trace": SimpleNamespace(**trace), "runtime": None}
    else:
        whole = list(parameters)[1:2] == ["problem"]
        return [response, row.get("problem", SimpleNamespace(**row)) if whole else row["gold"]], {}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [], {name: value for name, value in given.items() if takes_all or name in parameters}


def rewarded(result: Any, name: str, turns: int = 1) -> tuple[list[float], dict[str, float]]:
    """Returns the rewards that a function gave for so many turns, none for no answer, and what else it
    counted. Awaits it. A single number is the last turn's.

    Raises ValueError for anything but a finite number, one for each turn, a dictionary with these as
    ``score`` or ``reward``, a list of one of these, or None.
    """
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    returned, numbers = result, {}
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if result is None:
        return [], {}
    if isinstance(result, Mapping):
        for key, value in result.items():
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[f"rewards/{key}"] = float(value)
        result = result.get("score", result.get("reward"))
    earned = result if isinstance(result, list | tuple) and len(result) == turns else [result]
    texts = any(isinstance(one, str) for one in earned)
    if texts or not all(hasattr(one, "__float__") and math.isfinite(one) for one in earned):
        raise ValueError(
            f"{name} should return a finite number, a list of one (or of one for each of its turns: {turns}),"
            f" a dictionary with such as 'score', or None, not {returned!r}"
        )
    return [0.0] * (turns - len(earned)) + [float(one) for one in earned], numbers


async def _awaited(result: Any) -> Any:
    return await result


def graded(function: Any, name: str, response: str, row: Row, arguments: Mapping[str, Any]) -> Any:
    """Returns the rewards by turn of a function and what it counted, or its `Grade`; or the weighted sum of
    several: of a rubric with `funcs` and `weights`, of an environment's `rubric`, of the rewards of a task's
    class (verifiers, from 0.3). Rewards of steps that they set in verifiers' `state` are those of turns, and
    the last turn earns the rest."""
    objects: dict[str, Any] = {}
    state = answered(row)
    steps = state["trajectory"]
    before = [one["reward"] for one in steps]
    if hasattr(function, "data_type"):
        known = {"prompt": row["prompt"], "answer": gold_of(row), **row["data"]}
        fields = function.data_type().model_fields
        task = function(function.data_type()(**{key: known[key] for key in known if key in fields}))
        weighed = [(one, getattr(one, "_vf_weight", 1.0)) for one in task.hooks("reward")]
    else:
        rubric = getattr(function, "rubric", function)
        weighed = []
        for one in getattr(rubric, "rubrics", [rubric]):
            weighed += zip(getattr(one, "funcs", ()), getattr(one, "weights", ()), strict=True)
            objects |= getattr(one, "class_objects", {})
    if weighed:
        total, numbers = [0.0] * len(steps), {}
        row = {**row, "data": {**row["data"], **objects}}
        for part, weight in weighed:
            _, named = offered(inspect.signature(part).parameters, response, row, state)
            rewards, _ = rewarded(part(**named), part.__name__, len(steps))
            numbers[f"rewards/{part.__name__}"] = sum(rewards)
            total = [one + weight * own for one, own in zip_longest(total, rewards, fillvalue=0.0)]
    else:
        given, named = offered(inspect.signature(function).parameters, response, row, state)
        result = function(*given, **named, **arguments)
        if hasattr(result, "outcome"):
            return result
        total, numbers = rewarded(result, name, len(steps))
    if total and before != (after := [one["reward"] for one in steps]):
        own = [one or 0.0 for one in after]
        total = [*own[:-1], sum(total) - sum(own[:-1])]
    return total, numbers


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a function prints goes to the error stream
    path, *searched = sys.argv[1:]
    sys.path[:] = [os.getcwd(), *searched, *sys.path[1:]]
    module, _, name = path.rpartition(":")
    if module.endswith(".py"):
        function = file_function(path, searched)
    else:
        function = getattr(importlib.import_module(module), name)
    if name == "load_environment":
        function = function()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        response, row, arguments = json.loads(line)
        try:
            told: Any = graded(function, path, response, row, arguments)
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}"
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
