"""Every fragment of configs/hardware goes on the right of a shipped experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune import main as command_line
from treetune.config.jsonnet import configurations

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = configurations(ROOT / "configs/hardware")
EXPERIMENT = "configs/polIter_rho1bSft2_grpo_MATH.jsonnet"


@pytest.mark.parametrize("fragment", HARDWARE, ids=lambda path: path.stem)
def test_a_hardware_fragment_is_right(
    fragment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("APP_SEED", "1")
    configs = f"{EXPERIMENT},{fragment.relative_to(ROOT)}"
    assert command_line.main(["--configs", configs, "check_config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("{ trainer+: { lora: { rnk: 8 } } }", "did you mean"),
        (
            "{ trainer+: { lora: { rank: 8 }, tensor_parallel_size: 2, offload_optimizer: false } }",
            "with lora",
        ),
        ("{ trainer+: { zero_stage: 2, offload_optimizer: true, tensor_parallel_size: 2 } }", "offload"),
        ("{ trainer+: { sequence_parallel_size: 2, tensor_parallel_size: 2 } }", "with sequence_parallel"),
        ("{ engines+: { policy+: { devices: [0, 0], tensor_parallel_size: 2 } } }", "a GPU twice"),
        ("{ engines+: { policy+: { devices: [] } } }", "no GPU"),
    ],
)
def test_hardware_settings_that_do_not_go_together_are_told(
    override: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("APP_SEED", "1")
    assert command_line.main(["--configs", EXPERIMENT, "--override", override, "check_config"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
