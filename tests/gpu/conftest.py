"""Tests of code that runs on a GPU only: `pytest tests/gpu -m gpu`, or all of scripts/gpu/half_hour.py.

Most have a rehearsal: the same test on a CPU, which shows that the test itself is right. The whole suite
runs only the rehearsals of the kernels; `pytest tests/gpu` runs all.
"""

from __future__ import annotations

import pytest
import torch

ON_A_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no NVIDIA GPU here")


def rehearse_if_asked(config: pytest.Config) -> None:
    if not any("tests/gpu" in argument for argument in config.args):
        pytest.skip("a rehearsal (pytest tests/gpu): what trains and samples on a CPU has tests of its own")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the test's tensors."""
    return torch.device(request.param)


@pytest.fixture(params=DEVICES)
def trainers_device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which DeepSpeed trains; a process has one for all its tests, the GPU if there is one."""
    if request.param == "cpu":
        rehearse_if_asked(request.config)
        if torch.cuda.is_available():
            pytest.skip("DeepSpeed takes the GPU that is here")
    return torch.device(request.param)
