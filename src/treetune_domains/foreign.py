"""Reward functions as verl, TRL and verifiers call them, found by the names of their parameters.

Needs the standard library alone, so that another Python can run this file for a function whose packages can't
be installed beside the run's: ``python foreign.py PATH FOLDER…`` answers JSON lines with JSON lines.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Row = Mapping[str, Any]
"""A problem: ``prompt``, ``gold``, ``data``, ``domain``, and ``messages`` where it is a conversation."""


def file_function(path: str, searched: list[str]) -> Any:
    """Returns what ``folder/file.py:name`` names, from the working directory or one of the folders."""
    file, _, name = path.rpartition(":")
    found = next((whole for folder in ("", *searched) if (whole := Path(folder, file)).is_file()), None)
    if found is None:
        raise ValueError(f"path is {path!r}, and there is no file {file}")
    spec = importlib.util.spec_from_file_location(found.stem, found)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[found.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"path is {path!r}, and {found} has no {name!r}")
    return getattr(module, name)


def offered(parameters: Mapping[str, inspect.Parameter], response: str, row: Row) -> dict[str, Any] | None:
    """Returns what a function with these parameters is called with; None for one of no other library."""
    data, gold, conversation = row["data"], row["gold"], list(row["messages"])
    message = {"role": "assistant", "content": response}
    chat = conversation or [{"role": "user", "content": row["prompt"]}]
    extra = data.get("extra_info", dict(data))
    columns = {"answer": gold, "solution": gold, "ground_truth": gold, **data}
    given: dict[str, Any]
    if "solution_str" in parameters:  # verl
        given = {"data_source": data.get("data_source", row["domain"]), "solution_str": response}
        given |= {"ground_truth": gold, "extra_info": extra}
    elif "solution_strs" in parameters:  # verl, for whole batches
        given = {"data_sources": [data.get("data_source", row["domain"])], "solution_strs": [response]}
        given |= {"ground_truths": [gold], "extra_infos": [extra]}
    elif "completions" in parameters:  # TRL: texts, or conversations where prompts are; verifiers, by group
        columns |= {"answers": gold, "infos": data.get("info", extra), "states": columns}
        given = {name: [value] for name, value in columns.items()}
        given |= {
            "prompts": [conversation or row["prompt"]],
            "completions": [[message] if conversation else response],
        }
    elif parameters.keys() & {"completion", "state"}:  # verifiers, up to 0.2: a function of a rubric
        given = {**columns, "prompt": chat, "completion": [message], "info": data.get("info", extra)}
        state = {**given, "trajectory": [{"prompt": chat, "completion": [message]}]}
        given |= {"task": row["domain"], "state": state}
    elif "trace" in parameters:  # verifiers, from 0.3: a function that is plugged into a task
        said = {"last_reply": response.strip(), "messages": [*chat, message]}
        task = SimpleNamespace(**{"prompt": row["prompt"], "prompt_text": row["prompt"], **columns})
        given = {"task": task, "trace": SimpleNamespace(**said), "runtime": None}
    else:
        return None
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def rewarded(result: Any, name: str) -> tuple[float | None, dict[str, float]]:
    """Returns the reward that a function gave, None for no answer, and what else it counted. Awaits it.

    Raises ValueError for anything but a finite number, a dictionary with one as ``score`` or ``reward``, a
    list of one of these, or None.
    """
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    told, numbers = result, {}
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if result is None:
        return None, {}
    if isinstance(result, Mapping):
        for key, value in result.items():
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[f"rewards/{key}"] = float(value)
        result = result.get("score", result.get("reward"))
    if isinstance(result, str) or not hasattr(result, "__float__") or not math.isfinite(result):
        raise ValueError(
            f"{name} should return a finite number, a list of one for one answer, a dictionary with a number"
            f" as 'score', or None, not {told!r}"
        )
    return float(result), numbers


async def _awaited(result: Any) -> Any:
    return await result


def graded(
    function: Any, name: str, response: str, row: Row, arguments: Mapping[str, Any]
) -> tuple[float | None, dict[str, float]]:
    """Returns the reward of a function, or the weighted sum of several: of a rubric with `funcs` and
    `weights`, of an environment's `rubric`, of the rewards of a task's class (verifiers, from 0.3)."""
    objects: dict[str, Any] = {}
    if hasattr(function, "data_type"):
        known = {"prompt": row["prompt"], "answer": row["gold"], **row["data"]}
        fields = function.data_type().model_fields
        task = function(function.data_type()(**{key: known[key] for key in known if key in fields}))
        weighed = [(one, getattr(one, "_vf_weight", 1.0)) for one in task.hooks("reward")]
    else:
        rubric = getattr(function, "rubric", function)
        weighed = []
        for one in getattr(rubric, "rubrics", [rubric]):
            weighed += zip(getattr(one, "funcs", ()), getattr(one, "weights", ()), strict=True)
            objects |= getattr(one, "class_objects", {})
    if not weighed:
        given = offered(inspect.signature(function).parameters, response, row)
        return rewarded(function(**(given or {}), **arguments), name)
    total, numbers = 0.0, {}
    for part, weight in weighed:
        with_objects = {**row, "data": {**row["data"], **objects}}
        given = offered(inspect.signature(part).parameters, response, with_objects)
        reward, _ = rewarded(part(**(given or {})), part.__name__)
        numbers[f"rewards/{part.__name__}"] = reward or 0.0
        total += weight * (reward or 0.0)
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
