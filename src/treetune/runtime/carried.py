"""Answers that a rollout carries over from one iteration to the next, in the iteration's folder."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.rollouts.storage import read_trajectories, write_trajectories
from treetune.runtime.columns_of_ranks import trajectories_on_first
from treetune.runtime.session import Session
from treetune.vocabulary import Trajectory

CARRIED = "carried.arrow"


def carried_over(session: Session, iteration: int) -> list[Trajectory]:
    """What the iteration before left, of all ranks. Raises ValueError where that is gone: a run that goes on
    has to know what an undisturbed one knows."""
    if iteration == 0 or not session.config.rollout.carries:
        return []
    path = session.directory.iteration(iteration - 1) / CARRIED
    if not path.is_file():
        raise ValueError(
            f"{path} is gone, which held the answers that iteration {iteration + 1} goes on with: put it"
            " back, or begin again under another experiment_name"
        )
    return read_trajectories(path)


def carry_over(session: Session, iteration: int, own: Sequence[Trajectory]) -> None:
    """Keeps what all ranks leave to the next iteration. Collective."""
    everyones = trajectories_on_first(session.ranks, "answers that go on", own)
    if session.ranks.is_first:
        write_trajectories(session.directory.iteration(iteration) / CARRIED, everyones)
