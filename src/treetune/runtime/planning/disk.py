"""The disk space that a run's checkpoints take."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from treetune.models.policy_files import CHECKPOINTS
from treetune.runtime.checkpoint_schedule import MOST_WHOLE_CHECKPOINTS
from treetune.runtime.machine import format_bytes
from treetune.runtime.planning.memory import TrainerMemory, itemsize

CHECKPOINTS_AT_ONCE = MOST_WHOLE_CHECKPOINTS + 1
"""Checkpoints with weights and trainer's state that exist at once: those that remain once a new one is
written, and the new one while it is being written."""


@dataclass(frozen=True)
class CheckpointSpace:
    """The bytes of a run's checkpoints, and the room for them.

    Example: a model of a billion weights in bfloat16 with Adam takes ``weights`` of 2 GB and a ``state`` of
    14 GB in each checkpoint.
    """

    folder: Path
    """The folder of experiments."""
    weights: int
    """Bytes of one checkpoint's weights."""
    state: int
    """Bytes of the trainer's state, without which a run can't resume."""
    number: int
    """Checkpoints that exist at once: `CHECKPOINTS_AT_ONCE`, or fewer of a short run."""
    number_with_kept_weights: int
    """Checkpoints whose weights are kept to the end of the run."""
    room: int | None
    """Bytes that are free on the folder's disk, plus those that this run's checkpoints take already; None if
    unknown."""

    @property
    def bytes_at_once(self) -> int:
        """Bytes of all checkpoints that exist at once: the two newest, and the one that is being written."""
        return self.number * (self.weights + self.state)

    @property
    def bytes_by_the_end(self) -> int:
        """Bytes at the end of the run: the checkpoints that exist at once, and the weights of older ones that
        are kept. `MOST_WHOLE_CHECKPOINTS` of the checkpoints whose weights are kept are counted among the
        former."""
        further_checkpoints = max(0, self.number_with_kept_weights - MOST_WHOLE_CHECKPOINTS)
        return self.bytes_at_once + further_checkpoints * self.weights

    @property
    def problem(self) -> str | None:
        """The message about a disk that is too small for the run; None if the disk is large enough, or if its
        size is unknown."""
        if self.room is None or self.room >= self.bytes_at_once:
            return None
        return (
            f"checkpoints: the disk of {self.folder} has room for {format_bytes(self.room)}, and"
            f" {self.number} checkpoints of {format_bytes(self.weights + self.state)} exist at once: free"
            " some space, or set directory (APP_DIRECTORY) to another disk"
        )

    @property
    def warning(self) -> str | None:
        """The message about a disk that the run fills before its end. None if the run won't fill the disk, if
        the disk's room is unknown, or if there is a `problem`, which says more."""
        if self.room is None or self.problem is not None or self.room >= self.bytes_by_the_end:
            return None
        return (
            f"checkpoints take {format_bytes(self.bytes_by_the_end)} by the end of the run, and the disk of"
            f" {self.folder} has room for {format_bytes(self.room)}: free some space, raise"
            " checkpoints.keep_every, or set directory (APP_DIRECTORY) to another disk"
        )


def plan_checkpoint_space(memory: TrainerMemory) -> CheckpointSpace:
    """Returns the bytes that the checkpoints of an experiment take, and the room for them on the disk.

    The room is known only if the plan is for this machine.
    """
    experiment, machine = memory.experiment, memory.machine
    trainer = experiment.trainer
    weights_bytes = itemsize(trainer) * (memory.shape.parameters + memory.reward_model_weights)
    models = [memory.policy, *memory.learned_models]
    # Without ZeRO every rank has the whole state, and one of them writes it. The state is the bytes that stay
    # from step to step: weights and optimiser, on the device (`kept`) and on the host (`on_host`).
    writers = 1 if trainer.zero_stage == 0 else machine.world_size
    state_bytes = writers * sum(model.kept + model.on_host for model in models)
    state_bytes += 4 * memory.moving_average_weights  # one rank writes the moving average, in float32
    every = experiment.checkpoints.keep_every
    folder = Path(experiment.directory)
    return CheckpointSpace(
        folder=folder,
        weights=weights_bytes,
        state=state_bytes,
        # A short run has fewer checkpoints.
        number=min(CHECKPOINTS_AT_ONCE, experiment.iterations),
        number_with_kept_weights=experiment.iterations // every if every else 0,
        room=_count_available_bytes(folder, folder / experiment.experiment_name) if machine.is_here else None,
    )


def _count_available_bytes(folder: Path, experiment: Path) -> int:
    """Returns the sum of the free bytes of a folder's disk and the bytes of the experiment's checkpoints.

    The sum is the room for all checkpoints of the experiment, those that are on the disk already included.
    """
    # The folder may not exist yet, but one of its parents does, on the same disk.
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    checkpoint_bytes = 0
    for file in (experiment / CHECKPOINTS).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a run that is under way deletes old checkpoints
            if file.is_file() and not file.is_symlink():
                checkpoint_bytes += file.stat().st_size
    return shutil.disk_usage(existing).free + checkpoint_bytes
