"""Environments of verifiers (0.1 to 0.3) as they are, each answer in a process of another Python."""

from __future__ import annotations

import functools
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from treetune import (
    NATIVE_FORMATS,
    Again,
    Environment,
    Finding,
    Game,
    Message,
    Problem,
    Turn,
    Unavailable,
    calls_of_turn,
    import_folders,
)

PLAYER = Path(__file__).with_name("verifiers_player.py")


@Environment.register("verifiers")
@dataclass(frozen=True, kw_only=True)
class Verifiers(Game):
    """An environment that verifiers' `load_environment` returns (0.1 to 0.3), as it is, in a Python where
    that is installed. A level is a row of its data set; its `random` is seeded for each answer.

    An answer earns what the rubric says, and what each function of the rubric says is a metric,
    ``rewards/…``. Where the environment gives its steps rewards, each is its turn's, and the last turn earns
    the rest.
    """

    path: str
    """The module or the file of `load_environment`: ``my_env``, or ``folder/my_env.py``."""
    python: str = sys.executable
    """The Python that has verifiers, such as ``/path/to/venv/bin/python``; treetune needn't be there."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of `load_environment`."""
    format: str | None = None
    """The format in which the model calls the environment's tools: ``hermes``, ``llama`` or ``mistral``."""
    again: Again = "replay"  # type: ignore[misc]  # only who wrote it knows
    """Whether the same problem and actions give the same observations (``replay``), or not (``never``)."""
    deadline: float = 30.0

    quick: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.format not in (None, *NATIVE_FORMATS):
            raise ValueError(f"format is {self.format!r}: give {', '.join(NATIVE_FORMATS)}, or leave it out")
        object.__setattr__(self, "reads_specials", self.format is not None)

    def check(self, experiment: Any) -> Iterable[Finding]:
        if shutil.which(self.python) is None:
            what = f"python is {self.python!r}, which can't be run: give the path of a Python"
            yield Finding(what, level="missing")

    def prepare(self) -> None:
        self.connected().close()

    def problem(self, id: str, level: int) -> Problem:
        rows = _rows(self)
        if level >= len(rows):
            raise ValueError(f"{self.path} has {len(rows)} rows: lower the sizes of the task's splits")
        messages = tuple(Message(one["role"], one["content"]) for one in rows[level]["prompt"])
        prompt, gold = "\n\n".join(one.content for one in messages), str(rows[level].get("answer", ""))
        return Problem(id=id, prompt=prompt, gold=gold, data=rows[level], messages=messages)

    def offered(self) -> Sequence[Mapping[str, Any]]:
        tools: Sequence[Mapping[str, Any]] = self.reset(self.problem("", 0), 0).first["tools"] or ()
        if tools and self.format is None:
            raise ValueError(f"{self.path} offers tools: set format to that of the model's calls")
        return tools

    def reset(self, problem: Problem, seed: int) -> SimpleNamespace:
        lines = self.connected()
        first = _asked(lines, [problem.data, seed])
        if [(one["role"], one["content"]) for one in first["messages"]] != [
            (one.role, one.content) for one in problem.messages
        ]:
            raise Unavailable(f"{self.path} begins with other messages than those of its row's prompt")
        return SimpleNamespace(lines=lines, first=first, calls=0)

    def step(self, state: SimpleNamespace, action: str) -> Turn:
        message, names = self.message(action), {}
        for call in message.get("tool_calls", ()):
            state.calls += 1
            call["id"] = call["id"] or f"call{state.calls:05d}"
            names[call["id"]] = call["function"]["name"]
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        told = _asked(state.lines, message)
        if "messages" not in told:
            numbers = {f"rewards/{name}": float(value) for name, value in told["numbers"].items()}
            return Turn(done=True, reward=told["reward"], numbers=numbers)
        said = told["messages"]
        results = tuple(
            (names[one["tool_call_id"]], one["tool_call_id"], one["content"])
            for one in said
            if one["role"] == "tool"
        )
        text = "\n".join(one["content"] for one in said)
        return Turn(text, reward=told["reward"], results=results if len(results) == len(said) else ())

    def message(self, action: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": action}
        if self.format is not None:
            calls, message["content"] = calls_of_turn(self.format, action)
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.tool, "arguments": call.arguments},
                }
                for call in calls
                if call.fault is None  # unreadable ones are none
            ]
        return message

    def connected(self) -> Any:
        """Returns lines to and from a new process in the other Python, which has the environment."""
        ours, theirs = socket.socketpair()
        server = _server(self.python, self.path, json.dumps(self.arguments))
        with ours, theirs:
            socket.send_fds(server, [b"answer"], [theirs.fileno()])
            return ours.makefile("rw")


def _asked(lines: Any, words: Any) -> Any:
    """Returns what is answered to a line of JSON. Raises RuntimeError for a failure over there."""
    print(json.dumps(words), file=lines, flush=True)
    if not (line := lines.readline()):
        raise EOFError("the environment's process ended")
    if isinstance(told := json.loads(line), str):
        raise RuntimeError(told)
    return told


@functools.cache
def _rows(environment: Verifiers) -> Sequence[Mapping[str, Any]]:
    return _asked(environment.connected(), None)


@functools.cache
def _server(python: str, path: str, arguments: str) -> socket.socket:
    """Returns what gives connections to a process that forks itself for each. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [python, str(PLAYER), str(number), path, arguments, *import_folders()]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number])
    if not ours.recv(8):
        raise ValueError(f"{python} can't load {path!r} (exit code {process.wait()}): its log says why")
    return ours
