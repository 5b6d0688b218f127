"""One iteration's training, and the choice among its epochs where one is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from treetune.files import write_json, write_text
from treetune.runtime.base import ChoiceRule, ChooseCheckpoint
from treetune.runtime.clock import Clock
from treetune.runtime.evaluation import measure
from treetune.runtime.run import Run
from treetune.vocabulary import Episode, Metrics


def train(run: Run, iteration: int, episodes: Sequence[Episode], clock: Clock) -> Metrics:
    """Trains on the episodes, all epochs or those that the choice needs, and leaves the trainer with
    the weights that the iteration ends with. Collective.
    """
    assert run.trainer is not None
    metrics: Metrics = {}
    if run.config.restart == "every_iteration" and iteration > 0:
        with clock.phase("training"), run.engine_asleep():
            metrics = run.trainer.restart(episodes)
    choice = _Choice(run, iteration, run.config.choose_checkpoint) if run.config.choose_checkpoint else None
    if choice is not None:
        with clock.phase("choice"):
            choice.consider(0)
    epochs = run.trainer.epochs(iteration, episodes, lambda done, total: show(done, total))
    while True:
        with (
            clock.phase("training"),
            run.engine_asleep(),
            run.console.phase(f"iteration {iteration + 1}: training", "steps", run.news) as show,
        ):
            for trained in epochs:
                metrics |= trained
                if choice is not None:
                    break  # the engine is needed now
        if choice is None:
            return metrics
        with clock.phase("choice"):
            choice.consider(len(choice.accuracies))
            if choice.is_made:
                return metrics | choice.settle()


class _Choice:
    """Measures an iteration's epochs one by one and keeps the state of the one to go on with.

    What was measured lies in the iteration's folder and is read from there when the iteration is
    trained again: then the same epochs are trained, the same one is chosen, and nothing is sampled
    twice. The state of the trainer lies beside it until the choice is settled.
    """

    def __init__(self, run: Run, iteration: int, settings: ChooseCheckpoint) -> None:
        assert run.trainer is not None
        self.run, self.iteration, self.rule = run, iteration, settings.rule
        self.epochs = run.trainer.settings.epochs
        self.set = next(one for one in run.config.evaluation.sets if one.label == settings.set)
        self.accuracies: list[float] = []
        self._measured: list[Path] = []
        self._state = run.directory.iteration(iteration) / "candidates" / "state"

    @property
    def chosen(self) -> int:
        return choose(self.accuracies, self.rule)

    @property
    def is_made(self) -> bool:
        """Whether no later epoch can change it, or there is none."""
        measured = len(self.accuracies) - 1
        fallen = self.rule == "first_maximum" and self.chosen < measured
        return fallen or measured == self.epochs

    def consider(self, epoch: int) -> None:
        """Measures the trainer's present weights, those after `epoch` epochs. Collective."""
        run = self.run
        assert run.trainer is not None
        if (known := self._known(epoch)) is None:
            run.wait_for_engine()
            run.sync(self.iteration + 1)
            known = run.directory.candidate(self.iteration, epoch)
            name = f"{self.set.label} after epoch {epoch} of iteration {self.iteration + 1}"
            measure(run, self.iteration + 1, self.set, known, name)
        self._measured.append(known)
        self.accuracies.append(json.loads((known / "summary.json").read_text())["pass_at_1"])
        if self.chosen == epoch < self.epochs:
            if run.ranks.is_first:
                shutil.rmtree(self._state, ignore_errors=True)
            run.ranks.barrier("room for the candidate")
            run.trainer.save(self._state)

    def _known(self, epoch: int) -> Path | None:
        """Where these weights were measured already, by a run that was interrupted or, with restarts,
        in an earlier iteration that began with the same ones."""
        again = epoch == 0 and self.run.config.restart == "every_iteration"
        for iteration in (self.iteration, *(range(self.iteration) if again else ())):
            folder = self.run.directory.candidate(iteration, epoch)
            if (folder / "summary.json").is_file():
                return folder
        return None

    def settle(self) -> Metrics:
        """Leaves the trainer with the chosen weights. Collective."""
        run, chosen = self.run, self.chosen
        assert run.trainer is not None
        if chosen < len(self.accuracies) - 1:
            run.trainer.load(self._state)
        run.ranks.barrier("the chosen weights are back")
        if run.ranks.is_first:
            shutil.rmtree(self._state, ignore_errors=True)
            self._keep_as_evaluation(self._measured[chosen])
        run.ranks.barrier("the choice is settled")
        run.console.say(
            f"iteration {self.iteration + 1}: went on with epoch {chosen}, {self.set.label} "
            + " ".join(f"{accuracy:.3f}" for accuracy in self.accuracies)
        )
        measured = {f"choice/epoch_{epoch}": accuracy for epoch, accuracy in enumerate(self.accuracies)}
        return measured | {"choice/epoch": float(chosen), "choice/accuracy": self.accuracies[chosen]}

    def _keep_as_evaluation(self, measured: Path) -> None:
        """These weights are those after the iteration: they need not be measured again as such."""
        done = self.iteration + 1
        folder = self.run.directory.evaluation(done, self.set.label)
        if (folder / "summary.json").is_file():
            return
        summary = json.loads((measured / "summary.json").read_text())
        write_text(folder / "answers.jsonl", (measured / "answers.jsonl").read_text())
        write_json(folder / "summary.json", summary | {"iteration": done})


def choose(accuracies: Sequence[float], rule: ChoiceRule) -> int:
    """Which of the epochs 0, 1, … to go on with; see `ChooseCheckpoint`."""
    if rule == "best":
        return max(range(len(accuracies)), key=lambda epoch: (accuracies[epoch], -epoch))
    epoch = 0
    while epoch + 1 < len(accuracies) and accuracies[epoch + 1] > accuracies[epoch]:
        epoch += 1
    return epoch
