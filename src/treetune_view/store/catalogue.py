"""All that pages ask for: the experiments below the folders, read again when their files have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune_view.experiment import Experiment, Status, read_experiment, status_of
from treetune_view.store.answers import Answers
from treetune_view.store.data_sets import DataSets
from treetune_view.store.folders import (
    NotThere,
    Run,
    digest,
    folders_below,
    is_experiment,
    leads_out,
    links_in,
    marks_of,
)
from treetune_view.text import writable

if TYPE_CHECKING:
    from treetune_view.notes import Notes

LOOK_AGAIN_S = 2.0
"""How old a list of what lies below a folder may be."""

ANSWERS_LOOK_AGAIN_S = 0.3
"""The same for the files of an experiment's answers."""

Value = TypeVar("Value")


class Store:
    """All that pages ask for. Safe for several threads. Only people's notes are ever written into an
    experiment (`pages.answer`), and none where it is `read_only`.

    `cache` is a folder for what is made from experiments to find their answers quickly. The list of
    experiments may be `look_again_s` old. `files` are data sets that lie elsewhere. Raises ValueError for a
    folder that is none, and for a file that holds no rows.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        cache: Path,
        look_again_s: float = LOOK_AGAIN_S,
        files: Sequence[Path] = (),
        *,
        read_only: bool = False,
    ) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} is no directory: give one that holds experiments, such as experiments"
                )
        self.folders, self.cache = [folder.resolve() for folder in folders], cache
        self.read_only = read_only
        self._look_again_s = look_again_s
        self._lock = threading.Lock()
        self._links: dict[Path, None] = {}
        self._runs: Mapping[str, Run] = {}
        self._looked = -float("inf")
        self._answers: dict[Run, Answers] = {}
        self._notes: dict[Run, Notes] = {}
        self.data = DataSets(self, files, look_again_s)
        """Prepared data sets."""
        self.made = 0
        """How much `later` has made."""
        self._cached: dict[tuple[str, str], tuple[str, Any]] = {}

    # Experiments

    def runs(self) -> list[Run]:
        """Returns all experiments below the folders, by name."""
        with self._lock:
            if time.monotonic() - self._looked > self._look_again_s:
                self._runs = {run.name: run for run in self._find()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> Run:
        """Returns the experiment of that name. Raises NotThere."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            there = f"; there are {', '.join(sorted(runs)[:20])}" if runs else ""
            where = ", ".join(map(str, self.folders))
            raise NotThere(f"there is no experiment {name!r} below {where}{there}")
        return runs[name]

    @property
    def left_out(self) -> list[Path]:
        """Symbolic links that were met and not followed, as they lead out of the folders."""
        return [path for path in [*self._links] if path.is_symlink()]

    def follows(self, path: Path) -> bool:
        """Returns whether a path is looked into: see `leads_out`. What isn't is among `left_out` from now
        on."""
        if not leads_out(path, self.folders):
            return True
        self._links[path] = None
        return False

    def _find(self) -> Iterator[Run]:
        several = len(self.folders) > 1
        names = [folder.name for folder in self.folders]
        for folder in self.folders:
            twice = names.count(folder.name) > 1
            beginning = (str(folder) if twice else folder.name) if several else ""
            # Experiments that are read through links that lead out are left out; files of iterations are
            # looked at one by one (`sources`).
            paths = [
                path
                for path, entries in folders_below(folder, is_experiment, self.follows)
                if is_experiment(entries) and all(map(self.follows, links_in(path)))
            ]
            for path in sorted(paths):
                below = path.relative_to(folder).as_posix()
                name = "/".join(part for part in (beginning, "" if below == "." else below) if part)
                # A name may be bytes that are no text.
                yield Run(writable(name or folder.name), path, tuple(self.folders))

    # What is known of them

    def experiment(self, run: Run) -> Experiment:
        """Returns its configuration, manifest, metrics, evaluations. Raises ValueError for what is no
        experiment."""
        return self.known("experiment", run, lambda: read_experiment(run.path))

    def status(self, run: Run) -> Status:
        """Returns how it stands. Raises ValueError for a folder that holds nothing to read."""
        return self.known("status", run, lambda: status_of(self.experiment(run)))

    def answers(self, run: Run) -> Answers:
        """Returns its sampled answers, to be asked."""
        with self._lock:
            if run not in self._answers:
                self._answers[run] = Answers(run, self.cache, min(self._look_again_s, ANSWERS_LOOK_AGAIN_S))
            return self._answers[run]

    def notes(self, run: Run) -> Notes:
        """Returns what people wrote on its answers."""
        from treetune_view.notes import Notes

        answers = self.answers(run)
        with self._lock:
            return self._notes.setdefault(run, Notes(run, answers))

    def known(self, what: str, run: Run, read: Callable[[], Value]) -> Value:
        """Returns what `read` gives, cached until a file of the experiment changes. `what` names it."""
        mark = self.mark([run])
        cached = self._cached.get((what, run.name))
        if cached is not None and cached[0] == mark:
            return cached[1]
        value = read()
        self._cached[what, run.name] = (mark, value)
        return value

    def later(
        self, what: str, run: Run, make: Callable[[], Value], failed: Callable[[Exception], Value]
    ) -> Value | None:
        """Works as `known`, for what takes seconds: None until a thread has made it, which changes `made`.
        `failed` gives the value after an error."""
        mark = self.mark([run])
        with self._lock:
            cached = self._cached.get((what, run.name))
            if cached is not None and cached[0] == mark:
                return cached[1]
            self._cached[what, run.name] = (mark, None)

        def work() -> None:
            try:
                value = make()
            except Exception as error:  # whatever it was, a page waits for an end
                value = failed(error)
            with self._lock:
                self._cached[what, run.name] = (mark, value)
                self.made += 1

        threading.Thread(target=work, daemon=True).start()
        return None

    def mark(self, runs: Sequence[Run]) -> str:
        """Returns another text as soon as anything of these experiments may have changed."""
        return digest([(run.name, *marks_of(run)) for run in runs])
