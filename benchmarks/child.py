"""The other side of a pair, in a process of its own that waits for its turn on a pipe.

One JSON object a line goes in and one comes out. The child ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

END_S = 30.0


class Child:
    """Runs ``benchmarks.NAME.serve(settings, turns)`` and takes turns with it."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": path},
            start_new_session=True,
        )

    def ask(self, question: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        """One turn. Raises RuntimeError if the child ends or says nothing within `deadline` seconds."""
        return self._talk(json.dumps(question).encode() + b"\n", deadline)

    def wait_ready(self, *, deadline: float) -> dict[str, Any]:
        return self._talk(b"", deadline)

    def _talk(self, line: bytes, deadline: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        if line:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        answer = b""
        until = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise RuntimeError(f"{self.name} said nothing for {deadline:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise RuntimeError(f"{self.name} ended with code {self._process.wait(END_S)}")
                answer += piece
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._process.stdout.close()


class Turns:
    """The child's end of the pipe."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers

    def say(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def listen(self) -> dict[str, Any] | None:
        """The next question; None when nobody will ask any more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.listen, None)


def own_standard_output() -> IO[str]:
    """Standard output for us alone: what libraries print there goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder's files are no top-level modules
    importlib.import_module(f"benchmarks.{sys.argv[1]}").serve(
        json.loads(sys.argv[2]), Turns(own_standard_output())
    )
