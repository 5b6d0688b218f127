"""The files of another program's run by their steps: a folder for each step (prime-rl's
``rollouts/step_3/train/all/traces.jsonl``, SkyRL's ``dumped_evals/global_step_3_evals/gsm8k.jsonl``), or a
file for each (verl's ``3.jsonl``, slime's ``rollout_3.pt``, TRL's ``completions_00003.parquet``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_STEP_FOLDER = re.compile(r"(?:global_?)?(?:step|iter|iteration)s?[-_]?(\d{1,9})(?:[-_](.*))?", re.IGNORECASE)
_STEP_FILE = re.compile(
    r"(?:(rollout|completion|sample|generation|output|trace|result|train|training|eval|evaluation|val|validation"
    r"|test)s?[-_]?)?(?:(?:global_?)?(?:step|iter|iteration)[-_]?)?(\d{1,9})",
    re.IGNORECASE,
)
"""A number behind another word is no step: ``aime_2024.jsonl`` and ``math500.jsonl`` are sets of problems."""
_STEP_OF_TABLE = re.compile(r"(.*)_(\d{1,9})_[0-9a-f]+\.table", re.IGNORECASE)

ALL, EFFECTIVE = "all", "effective"
"""prime-rl's folders of all rollouts of a step, and of those among them that trained."""

ONE_FOR_ALL = ("traces", "results", "rollouts", "samples")
"""Names of files that say nothing of what they hold."""


@dataclass(frozen=True)
class RunStep:
    """The place of a file in its run: step 3 of ``train``. Files without a number have None."""

    number: int | None
    label: str


def gathered(found: Mapping[Path, tuple[Path, ...]], below: Path) -> dict[Path, tuple[Path, ...]]:
    """Returns the files of each run, in the order of their steps: files in folders of steps belong to the
    folder above these. `found` has the files of each folder below the one that was given."""
    runs: dict[Path, list[Path]] = {}
    for folder, inside in found.items():
        runs.setdefault(_run_of(folder, below), []).extend(inside)
    gathered_runs: dict[Path, tuple[Path, ...]] = {}
    for run, files in runs.items():
        everything = set(files)
        kept = [path for path in files if not _stands_among_all(path, everything)]
        gathered_runs[run] = tuple(sorted(kept, key=lambda path: _rank(path, run)))
    return gathered_runs


def _run_of(folder: Path, below: Path) -> Path:
    parts = folder.relative_to(below).parts
    for place, part in enumerate(parts):
        if _STEP_FOLDER.fullmatch(part):
            return below.joinpath(*parts[:place])
    return folder


def _stands_among_all(path: Path, files: Iterable[Path]) -> bool:
    """Returns whether a file repeats rollouts that another one has."""
    return path.parent.name == EFFECTIVE and path.parent.with_name(ALL) / path.name in files


def step_of(path: Path, run: Path) -> RunStep:
    """Returns the step of a file, and what it holds of that."""
    folders = path.relative_to(run).parts[:-1]
    for place, folder in enumerate(folders):
        if step := _STEP_FOLDER.fullmatch(folder):
            inside = [part for part in (step[2], *folders[place + 1 :]) if part not in (None, "", ALL)]
            name = path.name.removesuffix(path.suffix)
            return RunStep(int(step[1]), " ".join([*inside, *([name] if name not in ONE_FOR_ALL else [])]))
    if path.suffix == ".json":
        numbered = _STEP_OF_TABLE.fullmatch(path.stem)
    elif path.suffix == ".eval":  # begins with the time when it was made
        numbered = None
    else:
        numbered = _STEP_FILE.fullmatch(path.stem)
    return RunStep(int(numbered[2]), numbered[1] or "") if numbered else RunStep(None, "")


def _rank(path: Path, run: Path) -> tuple[float, str, list[int], str]:
    """Orders files by their steps, then by the numbers in their names."""
    step = step_of(path, run)
    numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
    return (-1.0 if step.number is None else step.number), step.label, numbers, str(path)
