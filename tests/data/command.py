"""Run commands of the data pipelines, each with an input and an output in a folder of the test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treetune.domains.domain_rows import read_domain_rows
from treetune.main import main


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Work:
    """A folder with rows, the settings of a command, and the command's results."""

    def __init__(self, folder: Path, command: str, rows: Sequence[Any], **settings: Any) -> None:
        self.folder, self.command, self.settings = folder, command, settings
        self.input, self.output = write_lines(folder / "rows.jsonl", rows), folder / "out"

    def config(self, **settings: Any) -> Path:
        file = self.folder / "config.jsonnet"
        file.write_text(json.dumps({"type": self.command, **self.settings, **settings}))
        return file

    def arguments(self, **settings: Any) -> list[str]:
        arguments = ["--configs", str(self.config(**settings)), self.command, "--output", str(self.output)]
        # prepare_data's input is its configuration's source.
        return arguments if self.command == "prepare_data" else [*arguments, "--input", str(self.input)]

    def run(self, **settings: Any) -> int:
        return main(self.arguments(**settings))

    @contextmanager
    def started(self, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Start the command as a process, and kill it at the end of the block if it still runs."""
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "treetune.main", *self.arguments(**settings)]
            process = subprocess.Popen(command, stderr=log)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())

    @property
    def dropped(self) -> list[dict[str, str]]:
        return read_lines(self.output / "dropped.jsonl")

    def rows(self, name: str = "rows") -> list[dict[str, Any]]:
        """Read the rows of a file of the output."""
        return [row for _, row in read_domain_rows(self.output / f"{name}.parquet")]

    def prompts(self, name: str = "rows") -> list[str]:
        return [row["prompt"][0]["content"] for row in self.rows(name)]
