"""Where a policy lies on disk: a directory by name, or the newest checkpoint of an experiment."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_NUMBER = re.compile(r"\d{4,}")

CHECKPOINTS = "checkpoints"
LAST = "last"
STATE = "state.json"
"""Written last into a checkpoint: with it, the checkpoint is complete."""


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory` (``…/checkpoints``), oldest first."""
    if not directory.is_dir():
        return []
    found = [
        path for path in directory.iterdir() if _NUMBER.fullmatch(path.name) and (path / STATE).is_file()
    ]
    return sorted(found, key=lambda path: int(path.name))


def resolve_policy(name_or_path: str) -> str:
    """The absolute path of a model in Hugging Face format, or the name of one on the hub as it is.

    In ``…/checkpoints/last/policy``, ``last`` stands for the newest complete checkpoint; numbered
    ones must be complete too. What is a directory is never looked for on the hub.

    Raises ValueError saying where it looked and how the model comes there.
    """
    path = Path(name_or_path).expanduser()
    parts = path.parts
    for place, (parent, name) in enumerate(itertools.pairwise(parts), start=1):
        if parent != CHECKPOINTS or not (name == LAST or _NUMBER.fullmatch(name)):
            continue
        directory = Path(*parts[:place])
        if name == LAST:
            complete = complete_checkpoints(directory)
            if not complete:
                raise ValueError(
                    f"there is no complete checkpoint in {directory.absolute()}, where {name_or_path!r} "
                    f"points to. {_how_to_make(directory)}"
                )
            path = complete[-1].joinpath(*parts[place + 1 :])
        elif not (directory / name / STATE).is_file():
            raise ValueError(
                f"there is no complete checkpoint {(directory / name).absolute()} ({STATE} is missing), "
                f"where {name_or_path!r} points to. {_how_to_make(directory)}"
            )
        break
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path.absolute()} holds no model: it has no config.json. "
                "Give a directory in Hugging Face format, such as a checkpoint's policy/"
            )
        return str(path.absolute())
    if _HUB_NAME.fullmatch(name_or_path):
        return name_or_path
    raise ValueError(
        f"there is no model at {path.absolute()}: no such directory, and {name_or_path!r} is no name on "
        f"the Hugging Face hub (owner/name). {_how_to_make(path)}"
    )


def _how_to_make(path: Path) -> str:
    """The command that writes the checkpoints which `path` belongs to, as far as one can tell."""
    if CHECKPOINTS not in path.parts:
        return "Give the path of a directory in Hugging Face format, relative to the working directory."
    experiment = Path(*path.parts[: path.parts.index(CHECKPOINTS)])
    likely = Path("configs", experiment.parent.name, f"{experiment.name}.jsonnet")
    config = str(likely) if likely.is_file() else "CONFIG.jsonnet"
    return (
        f"Run the experiment {experiment.name!r} to its end first: "
        f"deepspeed --quiet --no_local_rank --num_gpus=1 src/treetune/main.py --configs {config}"
        " run_iteration_loop"
    )
