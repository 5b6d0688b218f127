"""Two ranks and one server make the run that one rank makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load

from tests.support.faults import ITERATIONS, Experiment

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOLERANCE = 1e-6


def test_two_ranks_end_with_the_weights_of_one(undisturbed: Experiment, tmp_path: Path) -> None:
    two = Experiment(tmp_path, ranks=2)
    two.run()
    of_one, of_two = load(undisturbed.policy()), load(two.policy())
    assert of_one.keys() == of_two.keys()
    for name, weights in of_one.items():
        assert (weights - of_two[name]).abs().max() <= TOLERANCE, name
    moved = max(
        float((of_one[name] - start).abs().max()) for name, start in load(undisturbed.policy(2)).items()
    )
    assert moved > 100 * TOLERANCE, "the comparison says nothing: training moved no weight"
    assert [row["iteration"] for row in two.directory.read_metrics()] == list(range(ITERATIONS))
    assert {name.split("/")[1] for name in two.journals()} == {
        f"{phase}-{rank}.jsonl" for phase in ("rollout", "credit") for rank in (0, 1)
    }
