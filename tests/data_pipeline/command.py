"""The command, with an input and an output of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.data_pipeline.scripted import PROBLEM, SOLUTION, Endpoint
from treetune.main import main

ROWS = [{"problem": f"{PROBLEM} ({i})", "solution": SOLUTION, "answer": "40", "level": i} for i in range(3)]
REQUESTS = 10
"""For one solution of three threads: six about its lines, three about references, one for outlines."""


class Work:
    """An input, an output and the command between them."""

    def __init__(self, folder: Path, endpoint: Endpoint, rows: list[dict[str, Any]] = ROWS) -> None:
        self.input, self.output, self.url = folder / "in.jsonl", folder / "out", endpoint.url
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(self, **settings: Any) -> list[str]:
        endpoint = {
            "base_url": self.url, "model": "scripted", "api_key_variable": "SCRIPTED_KEY",
            "backoff": 0.01, "timeout": 20, "concurrency": 2, **settings.pop("endpoint", {}),
        }  # fmt: skip
        config = {
            "type": "make_threads", "endpoint": endpoint, "prices": {"input": 1.25, "output": 10}, **settings
        }  # fmt: skip
        file = self.input.with_name("config.jsonnet")
        file.write_text(json.dumps(config))
        return [
            "--configs",
            str(file),
            "make_threads",
            "--input",
            str(self.input),
            "--output",
            str(self.output),
        ]

    def run(self, **settings: Any) -> int:
        return main(self.arguments(**settings))

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """The command as a process of its own, which has ended when this has."""
        log = self.input.with_name("log").open("w+")
        command = subprocess.Popen(
            [sys.executable, "-m", "treetune.main", *self.arguments()], stderr=log, text=True
        )
        try:
            yield command
        finally:
            command.kill()
            command.wait()
            log.close()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "threads.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())

    def record(self, number: int) -> dict[str, Any]:
        return json.loads((self.output / "solutions" / "0000" / f"{number:07d}.json").read_text())

    def everything_written(self) -> str:
        return "\n".join(path.read_text() for path in self.output.rglob("*") if path.is_file())
