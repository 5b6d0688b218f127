"""Plays environments of verifiers for `verifiers_environments.py`, in a Python that needn't have treetune.

    python verifiers_player.py DESCRIPTOR PATH ARGUMENTS FOLDER…

DESCRIPTOR is a socket through which connections arrive. The player forks itself for each, so that one answer
doesn't block the others. PATH is the module or the file of `load_environment`, ARGUMENTS are its arguments
(JSON), and modules are searched in each FOLDER. `verifiers_environments.py` describes the lines of a
connection.
"""

import asyncio
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from openai.types.chat import ChatCompletion


async def play(
    lines: Iterable[str], send: Callable[[Any], None], environment: Any, row: Any, seed: int
) -> None:
    """Plays one answer.

    verifiers runs the environment, and asks a client for each turn of the model. The client here sends the
    new messages of the environment, and waits for a line with the turn.

    Args:
        lines: The turns of the policy, as messages in OpenAI's format.
        send: Sends an object as a line.
        environment: The environment.
        row: The row of its data set.
        seed: The seed of Python's `random`, and of NumPy's if the environment has imported it.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)

    loop = asyncio.get_running_loop()
    turns = asyncio.Queue[Any]()

    def listen() -> None:
        for line in lines:
            loop.call_soon_threadsafe(turns.put_nowait, json.loads(line))
        os._exit(0)  # the connection is closed: nobody needs the answer, even if the environment still works

    threading.Thread(target=listen, daemon=True).start()

    # The module of the clients lies beside that of the base class; their package depends on the version.
    base = next(cls for cls in type(environment).__mro__ if cls.__name__ == "Environment")
    clients = importlib.import_module(base.__module__.replace(".envs.environment", ".clients"))

    sent_messages: list[Any] = []
    turn_rewards: list[float] = []

    class Policy(clients.OpenAIChatCompletionsClient):
        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any, **_: Any
        ) -> ChatCompletion:
            if prompt[: len(sent_messages)] != sent_messages:
                raise ValueError("the environment rewrites earlier turns, which were sampled as they were")
            is_first = not sent_messages
            # The policy has its own turn already: the new messages follow it.
            new_messages = prompt if is_first else prompt[len(sent_messages) + 1 :]
            # The reward of the step before this turn. The first time there is none.
            turn_rewards.append(state["trajectory"][-1]["reward"] or 0.0 if turn_rewards else 0.0)
            send({"messages": new_messages, "tools": tools, "reward": turn_rewards[-1]})
            sent_messages[:] = prompt
            choice = {"index": 0, "finish_reason": "stop", "message": await turns.get()}
            return ChatCompletion.model_validate(
                {"id": "", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
            )

        async def raise_from_native_response(self, response: ChatCompletion) -> None:
            """Raises nothing: an empty turn is allowed."""

    (played,) = await environment.run_group([row], Policy(None), "policy", {})
    if played["error"] is not None:
        raise RuntimeError(played["error"])
    send({"reward": played["reward"] - sum(turn_rewards), "numbers": played["metrics"]})


def serve(environment: Any, lines: Any, output: Any) -> None:
    """Serves a connection: sends the rows of the data set, or plays an answer to a row."""

    def send(reply: Any) -> None:
        print(json.dumps(reply, default=str), file=output, flush=True)

    request = json.loads(next(lines))
    try:
        if request is None:
            send(environment.get_dataset().to_list())
        else:
            row, seed = request
            asyncio.run(play(lines, send, environment, row, seed))
    except (Exception, SystemExit) as error:
        send(f"{type(error).__name__}: {error}")


def load_environment(path: str, arguments: str, folders: list[str]) -> Any:
    """Returns the environment of a module, or of a file, whose name ends in .py."""
    sys.path[:] = [os.getcwd(), *folders, *sys.path[1:]]
    if path.endswith(".py"):
        candidates = [os.path.join(folder, path) for folder in ("", *folders)]
        names = runpy.run_path(next(filter(os.path.isfile, candidates), path))
    else:
        names = vars(importlib.import_module(path))
    return names["load_environment"](**json.loads(arguments))


def main() -> None:
    os.dup2(2, 1)  # what an environment prints goes to the error stream
    descriptor, path, arguments, *folders = sys.argv[1:]
    environment = load_environment(path, arguments, folders)
    connections = socket.socket(fileno=int(descriptor))
    connections.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombies
    while descriptors := socket.recv_fds(connections, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork():
                continue
            try:
                connections.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(environment, connection.makefile("r"), connection.makefile("w"))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
