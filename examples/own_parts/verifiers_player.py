"""Plays environments of verifiers for answers that are sampled elsewhere; run by ``verifiers_environments``.

``python verifiers_player.py DESCRIPTOR PATH ARGUMENTS FOLDER…`` needs verifiers and nothing of treetune. It
gets connections by the socket DESCRIPTOR, and forks itself for each: one that blocks would block all others.
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
    lines: Iterable[str], tell: Callable[[Any], None], environment: Any, row: Any, seed: int
) -> None:
    """Plays one answer: tells what the environment says before each turn, and at last what was earned; each
    line is the message of a turn."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    loop, turns = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def listen() -> None:
        for line in lines:
            loop.call_soon_threadsafe(turns.put_nowait, json.loads(line))
        os._exit(0)  # nobody wants the answer any more, whatever the environment is at

    threading.Thread(target=listen, daemon=True).start()
    base = next(one for one in type(environment).__mro__ if one.__name__ == "Environment")
    clients = importlib.import_module(base.__module__.replace(".envs.environment", ".clients"))

    said: list[Any] = []
    earned: list[float] = []

    class Policy(clients.OpenAIChatCompletionsClient):
        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any, **_: Any
        ) -> ChatCompletion:
            if prompt[: len(said)] != said:
                raise ValueError("the environment rewrites earlier turns, which were sampled as they were")
            earned.append(state["trajectory"][-1]["reward"] or 0.0 if earned else 0.0)
            tell({"messages": prompt[len(said) + bool(said) :], "tools": tools, "reward": earned[-1]})
            said[:] = prompt
            choice = {"index": 0, "finish_reason": "stop", "message": await turns.get()}
            answer = {"id": "", "object": "chat.completion", "created": 0, "model": model}
            return ChatCompletion.model_validate({**answer, "choices": [choice]})

        async def raise_from_native_response(self, response: ChatCompletion) -> None:
            """An empty turn is one, too."""

    (played,) = await environment.run_group([row], Policy(None), "policy", {})
    if played["error"] is not None:
        raise RuntimeError(played["error"])
    tell({"reward": played["reward"] - sum(earned), "numbers": played["metrics"]})


def answer(environment: Any, lines: Any, told: Any) -> None:
    """Answers null with the rows of the environment's data set, and plays an answer to a row and a seed."""

    def tell(words: Any) -> None:
        print(json.dumps(words, default=str), file=told, flush=True)

    asked = json.loads(next(lines))
    try:
        if asked is None:
            tell(environment.get_dataset().to_list())
        else:
            asyncio.run(play(lines, tell, environment, *asked))
    except (Exception, SystemExit) as error:
        tell(f"{type(error).__name__}: {error}")


def main() -> None:
    os.dup2(2, 1)  # what an environment prints goes to the error stream
    descriptor, path, arguments, *searched = sys.argv[1:]
    sys.path[:] = [os.getcwd(), *searched, *sys.path[1:]]
    if path.endswith(".py"):
        files = [os.path.join(folder, path) for folder in ("", *searched)]
        named = runpy.run_path(next(filter(os.path.isfile, files), path))
    else:
        named = vars(importlib.import_module(path))
    environment = named["load_environment"](**json.loads(arguments))
    orders = socket.socket(fileno=int(descriptor))
    orders.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of connections
    while handed := socket.recv_fds(orders, 1, 1)[1]:
        with socket.socket(fileno=handed[0]) as connection:
            if os.fork():
                continue
            try:
                orders.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(environment, connection.makefile("r"), connection.makefile("w"))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
