"""Define graders that misbehave as an answer says, in a module that worker processes can import."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True)
class Obedient(Grader):
    """Misbehave as the first word of the answer says; any other answer is right."""

    deadline: float | None = None

    def grade(self, response: str, problem: Problem) -> Grade:
        word, _, argument = response.partition(" ")
        match word:
            case "sleep":
                time.sleep(600)
            case "spin":
                re.match(r"(a+)+b", "a" * 64)  # in C, with the interpreter locked
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "allocate":
                bytearray(1 << 40)
            case "raise":
                raise ValueError("I don't like this answer")
            case "quit":
                sys.exit(4)
            case "print":
                print("x" * 100_000, flush=True)  # noqa: T201
            case "modules":
                heavy = {"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)
                return Grade(reward=1.0, outcome="ok", extracted=",".join(sorted(heavy)))
            case "pid":
                return Grade(reward=1.0, outcome="ok", extracted=str(os.getpid()))
            case "child":
                child = subprocess.Popen(["sleep", "600"])
                Path(argument).write_text(str(child.pid))
                time.sleep(600)
        return Grade(reward=1.0, outcome="ok", extracted=response)


@dataclass(frozen=True)
class Counting(Grader):
    """Write a line into a file for each answer that it grades."""

    record: str

    def grade(self, response: str, problem: Problem) -> Grade:
        with open(self.record, "a") as file:
            file.write(f"{problem.id} {response}\n")
        return Grade(reward=float(response == problem.gold), outcome="ok", extracted=response)


class Unloadable(Grader):
    """A grader that can be pickled and fails when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (__import__, ("a_module_that_nobody_has",))
