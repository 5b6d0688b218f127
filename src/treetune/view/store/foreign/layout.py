"""Finds the step of each file of another program's run from its path.

Some programs write a folder for each step: prime-rl's ``rollouts/step_3/train/all/traces.jsonl``, SkyRL's
``dumped_evals/global_step_3_evals/gsm8k.jsonl``. Others write a file for each step: verl's ``3.jsonl``,
slime's ``rollout_3.pt``, TRL's ``completions_00003.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# The name of a step's folder: the step, and what follows it.
_STEP_FOLDER = re.compile(
    r"(?:global_?)?(?:step|iter|iteration)s?[-_]?(?P<step>\d{1,9})(?:[-_](?P<label>.*))?",
    re.IGNORECASE,
)
_STEP_FILE = re.compile(
    r"(?:(?P<label>rollout|completion|sample|generation|output|trace|result|train|training|eval|evaluation"
    r"|val|validation|test)s?[-_]?)?(?:(?:global_?)?(?:step|iter|iteration)[-_]?)?(?P<step>\d{1,9})",
    re.IGNORECASE,
)
"""The name of a step's file: the kind of answers, if it says one, and the step. A number after any other word
is not a step: ``aime_2024.jsonl``, ``math500.jsonl``."""
# The name of W&B's table of a step, without its last suffix: NAME_STEP_HASH.table.
_STEP_OF_TABLE = re.compile(r"(?P<label>.*)_(?P<step>\d{1,9})_[0-9a-f]+\.table", re.IGNORECASE)

ALL_ROLLOUTS, TRAINED_ROLLOUTS = "all", "effective"
"""The names of prime-rl's folders with all rollouts of a step, and with those that were trained on."""

GENERIC_NAMES = ("traces", "results", "rollouts", "samples")
"""File names that don't tell the contents of the file. Labels leave them out."""


@dataclass(frozen=True)
class RunStep:
    """The step of a file in its run.

    Example: `RunStep(3, "train")` for ``rollouts/step_3/train/all/traces.jsonl``.
    """

    number: int | None
    """The step; None if the file's path has none."""
    label: str
    """The part of the step's answers that the file has, such as "train"; it may be empty."""


def group_by_run(
    files_by_folder: Mapping[Path, tuple[Path, ...]], root: Path
) -> dict[Path, tuple[Path, ...]]:
    """Returns the files of each run, in the order of their steps, by the folder of the run.

    Files in the folder of a step belong to the run in the folder above it. `files_by_folder` has the files of
    `root` and of folders below it.
    """
    files_by_run: dict[Path, list[Path]] = {}
    for folder, files in files_by_folder.items():
        files_by_run.setdefault(_run_of(folder, root), []).extend(files)
    sorted_files: dict[Path, tuple[Path, ...]] = {}
    for run, files_of_run in files_by_run.items():
        all_files = set(files_of_run)
        # prime-rl writes the rollouts that were trained on into a second file, which is left out.
        distinct = [path for path in files_of_run if not _repeats_another(path, all_files)]
        sorted_files[run] = tuple(sorted(distinct, key=lambda path: _sort_key(path, run)))
    return sorted_files


def _run_of(folder: Path, root: Path) -> Path:
    """Returns the run that a folder belongs to.

    If the folder is that of a step, such as ``step_3``, or is below one, the run is the folder above that. If
    not, the folder itself is the run.
    """
    parts = folder.relative_to(root).parts
    for depth, part in enumerate(parts):
        if _STEP_FOLDER.fullmatch(part):
            return root.joinpath(*parts[:depth])
    return folder


def _repeats_another(path: Path, files: Iterable[Path]) -> bool:
    """Returns whether a file's rollouts are also in another of the files: prime-rl's file of all rollouts."""
    return path.parent.name == TRAINED_ROLLOUTS and path.parent.with_name(ALL_ROLLOUTS) / path.name in files


def step_of(path: Path, run: Path) -> RunStep:
    """Returns the step of a file, from the names of its folders or, if they have none, from the file's
    name."""
    folders = path.relative_to(run).parts[:-1]
    for depth, folder in enumerate(folders):
        match = _STEP_FOLDER.fullmatch(folder)
        if match is None:
            continue
        # The label tells apart the files of a step. It is made of the text after the step in its folder's
        # name, the names of the folders below it, and the file's name, without names that say nothing.
        label_parts = [
            part for part in (match["label"], *folders[depth + 1 :]) if part not in (None, "", ALL_ROLLOUTS)
        ]
        name = path.name.removesuffix(path.suffix)
        if name not in GENERIC_NAMES:
            label_parts.append(name)
        return RunStep(int(match["step"]), " ".join(label_parts))
    if path.suffix == ".json":  # W&B's NAME_STEP_HASH.table.json
        match = _STEP_OF_TABLE.fullmatch(path.stem)
    elif path.suffix == ".eval":  # the number in its name is the time when it was made, and not a step
        match = None
    else:
        match = _STEP_FILE.fullmatch(path.stem)
    return RunStep(int(match["step"]), match["label"] or "") if match else RunStep(None, "")


def _sort_key(path: Path, run: Path) -> tuple[float, str, list[int], str]:
    """Returns the key by which a run's files are sorted: step, label, numbers in the file's name, path."""
    step = step_of(path, run)  # files without a step come first, hence −1 below
    numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
    return (-1.0 if step.number is None else step.number), step.label, numbers, str(path)
