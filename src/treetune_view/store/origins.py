"""The origin of each value of an experiment's configuration: the files of its command, evaluated again."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treetune.config.errors import ConfigError
from treetune.config.explain import COMPUTED, Explanation, key_paths
from treetune.config.jsonnet import find_file, load
from treetune_view.experiment import Experiment

DEADLINE_S = 60
"""Seconds in which the files must have given what they give: somebody else may have written them."""


@dataclass(frozen=True)
class Origins:
    """The places that set each key, the one that won first; or why nobody knows, in `problem`."""

    places: Mapping[str, list[str]] = field(default_factory=dict)
    problem: str = ""


def origins(one: Experiment, seconds: float = DEADLINE_S) -> Origins:
    """Finds out where values come from, which takes seconds. The files are believed only as far as they still
    give what the experiment has. They are evaluated in a process of their own, which is killed after the
    deadline."""
    command = command_of(one.manifest)
    if command is None:
        return Origins(problem="the experiment was begun by a version that did not write down its command")
    asked = json.dumps({"command": command, "config": one.config, "seconds": seconds})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "treetune_view.store.origins"],
            input=asked, capture_output=True, text=True, timeout=seconds, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Origins(problem=f"the files of its command gave nothing within {seconds:g} s")
    try:
        return Origins(**json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]
        return Origins(problem=f"its command can't be evaluated again: {last}")


def command_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the newest command that set the configuration that is there now."""
    entries = [manifest, *manifest.get("continued", ())]
    return next((one["command"] for one in reversed(entries) if "command" in one), None)


def _evaluate(command: Mapping[str, Any], stored: Mapping[str, Any]) -> Origins:
    """Evaluates the files of a command again, and compares what they give with the stored configuration."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configs", action="append", default=[])
    parser.add_argument("--override", action="append", default=[])
    options, _ = parser.parse_known_args(command["words"])
    names = [name.strip() for text in options.configs for name in text.split(",") if name.strip()]
    try:
        files = [str(find_file(name, Path(command["folder"]))) for name in names]
        config = load(files, options.override, environ=command["variables"])
    except (ConfigError, RuntimeError) as error:
        return Origins(problem=f"the files of its command are no longer what they were: {error}")
    data = config.data
    different = sorted(key for key in {*data, *stored} if data.get(key) != stored.get(key))
    if different:
        return Origins(problem=f"the files of its command give another {', '.join(different[:5])} by now")
    explanation = Explanation(config)
    places = {}
    for path in key_paths(data):
        settings = reversed(explanation.settings(path))
        places[".".join(path)] = [
            one.place + (" (computed)" if one.value is COMPUTED else "") for one in settings
        ]
    return Origins(places)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    # Should the viewer end before this does, its deadline still holds.
    limit = int(asked["seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    json.dump(asdict(_evaluate(asked["command"], asked["config"])), sys.stdout)
