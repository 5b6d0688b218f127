"""Machines that share a file system: what one writes into its memory, another doesn't see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.in_process import small
from treetune.inference.settings import VllmSettings
from treetune.runtime.policy_server import refuse_unreachable_server
from treetune.runtime.weights_folder import weights_folder


def rank(*machines: str, number: int = 0) -> Any:
    """A rank on ``machines[number]``."""
    return SimpleNamespace(
        is_first=number == 0, barrier=lambda name: None, machines=lambda: list(machines), world_size=2
    )


@pytest.mark.parametrize("purpose", ["run", "evaluation-0"])
def test_ranks_on_several_machines_find_the_weights_beside_the_experiment(
    tmp_path: Path, purpose: str
) -> None:
    folders = [weights_folder(tmp_path, purpose, rank("a", "a", "b", number=n)) for n in range(3)]
    assert len(set(folders)) == 1 and folders[0].parent == tmp_path
    assert folders[0].is_dir()


def test_ranks_on_one_machine_keep_the_weights_in_its_memory(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path, "run", rank("a", "a"))
    try:
        assert folder.parent == Path("/dev/shm")
    finally:
        folder.rmdir()


def test_one_server_for_ranks_on_several_machines_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, engine=VllmSettings(servers="one"))
    with pytest.raises(ValueError, match=r"on 2 machines \(a, b\): .* set it to 'per_rank'"):
        refuse_unreachable_server(config, rank("b", "a"))
    refuse_unreachable_server(config, rank("a", "a"))
    apart = small(tmp_path, engine=VllmSettings(servers="per_rank"))
    refuse_unreachable_server(apart, rank("b", "a"))
