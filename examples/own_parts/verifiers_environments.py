"""Environments of verifiers (0.1 to 0.3), as environments of treetune.

They run in another Python, in which verifiers is installed. Each environment has one such process, the player
(`verifiers_player.py`), which forks itself for each answer. Both sides send lines of JSON through a socket:

    here                                    the player's fork, for one answer
    [row, seed]                        ->
                                       <-   {"messages": […], "tools": […], "reward": 0.0}
    {"role": "assistant", …}           ->
                                       <-   {"messages": […], "tools": […], "reward": 0.0}
    {"role": "assistant", …}           ->
                                       <-   {"reward": 1.0, "numbers": {…}}        after the last turn

A line that is a text, instead of an object, is an error message. The line `null` asks for all rows instead.
"""

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
    """An environment of verifiers (0.1 to 0.3), unchanged: what `load_environment` returns in a Python that
    has verifiers. Each problem is a row of its data set. Python's `random` is seeded for each answer.

    The reward of an answer is the rubric's, and each function of the rubric is a metric, ``rewards/…``. If
    the environment gives rewards to single steps, a turn gets the reward of its step, and the last turn gets
    the remainder.
    """

    path: str
    """The module or the file that has `load_environment`: ``my_env``, or ``folder/my_env.py``."""
    python: str = sys.executable
    """The Python that has verifiers, such as ``/path/to/venv/bin/python``. It doesn't need treetune."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of `load_environment`."""
    format: str | None = None
    """The format in which the model calls the environment's tools: ``hermes``, ``llama`` or ``mistral``."""
    again: Again = "replay"  # type: ignore[misc]  # each environment needs its own
    """Whether the same problem and actions give the same observations (``replay``), or not (``never``)."""
    deadline: float = 30.0

    quick: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.format not in (None, *NATIVE_FORMATS):
            raise ValueError(f"format is {self.format!r}: give {', '.join(NATIVE_FORMATS)}, or leave it out")
        object.__setattr__(self, "reads_specials", self.format is not None)

    def check(self, experiment: Any) -> Iterable[Finding]:
        if shutil.which(self.python) is None:
            yield Finding(
                f"python is {self.python!r}, which can't be run: give the path of a Python", level="missing"
            )

    def prepare(self) -> None:
        self.connect().close()  # starts the player

    def problem(self, id: str, level: int) -> Problem:
        rows = _read_rows(self)
        if level >= len(rows):
            raise ValueError(f"{self.path} has {len(rows)} rows: lower the sizes of the task's splits")
        row = rows[level]
        messages = tuple(Message(message["role"], message["content"]) for message in row["prompt"])
        prompt = "\n\n".join(message.content for message in messages)
        return Problem(id=id, prompt=prompt, gold=str(row.get("answer", "")), data=row, messages=messages)

    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools of the environment. It asks by starting the first problem."""
        state = self.reset(self.problem("", 0), seed=0)
        tools: Sequence[Mapping[str, Any]] = state.first_reply["tools"] or ()
        if tools and self.format is None:
            raise ValueError(f"{self.path} offers tools: set format to that of the model's calls")
        return tools

    def reset(self, problem: Problem, seed: int) -> SimpleNamespace:
        connection = self.connect()
        first_reply = _ask(connection, [problem.data, seed])
        messages = [Message(message["role"], message["content"]) for message in first_reply["messages"]]
        if messages != list(problem.messages):
            raise Unavailable(f"{self.path} begins with other messages than those of its row's prompt")
        return SimpleNamespace(connection=connection, first_reply=first_reply, calls=0)

    def step(self, state: SimpleNamespace, action: str) -> Turn:
        reply = _ask(state.connection, self._write_message(state, action))
        if "messages" not in reply:  # that was the last turn
            numbers = {f"rewards/{name}": float(value) for name, value in reply["numbers"].items()}
            return Turn(done=True, reward=reply["reward"], numbers=numbers)
        messages = reply["messages"]
        text = "\n".join(message["content"] for message in messages)
        results = []
        for message in messages:
            if message["role"] == "tool":
                call_id = message["tool_call_id"]
                results.append((state.tools_by_call[call_id], call_id, message["content"]))
        # The policy reads results in the form of its chat template, if there is nothing else to read.
        only_results = len(results) == len(messages)
        return Turn(text, reward=reply["reward"], results=tuple(results) if only_results else ())

    def _write_message(self, state: SimpleNamespace, action: str) -> dict[str, Any]:
        """Returns the policy's turn as a message in OpenAI's format, with its calls of tools."""
        state.tools_by_call = {}
        if self.format is None:
            return {"role": "assistant", "content": action}
        calls, text = calls_of_turn(self.format, action)
        tool_calls = []
        for call in calls:
            if call.fault is not None:
                continue  # it can't be read, so it calls nothing
            state.calls += 1
            call_id = call.id or f"call{state.calls:05d}"
            state.tools_by_call[call_id] = call.tool
            function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
            tool_calls.append({"id": call_id, "type": "function", "function": function})
        return {"role": "assistant", "content": text, "tool_calls": tool_calls}

    def connect(self) -> Any:
        """Returns a file of lines to and from a new fork of the player."""
        ours, theirs = socket.socketpair()
        player = _start_player(self.python, self.path, json.dumps(self.arguments))
        with ours, theirs:
            socket.send_fds(player, [b"answer"], [theirs.fileno()])
            return ours.makefile("rw")


def _ask(connection: Any, request: Any) -> Any:
    """Sends a line of JSON and returns the reply. Raises RuntimeError if the environment failed."""
    print(json.dumps(request), file=connection, flush=True)
    line = connection.readline()
    if not line:
        raise EOFError("the environment's process ended")
    reply = json.loads(line)
    if isinstance(reply, str):
        raise RuntimeError(reply)
    return reply


@functools.cache
def _read_rows(environment: Verifiers) -> Sequence[Mapping[str, Any]]:
    """Returns the rows of the environment's data set."""
    return _ask(environment.connect(), None)


@functools.cache
def _start_player(python: str, path: str, arguments: str) -> socket.socket:
    """Starts a player and returns the socket that hands connections to it. It ends when this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptor = theirs.fileno()
        command = [python, str(PLAYER), str(descriptor), path, arguments, *import_folders()]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
    if not ours.recv(8):
        raise ValueError(f"{python} can't load {path!r} (exit code {process.wait()}): its log says why")
    return ours
