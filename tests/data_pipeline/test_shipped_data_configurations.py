"""Every configuration of a data set is right, and called by the source that it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.config.jsonnet import load
from treetune.main import main

ROOT = Path(__file__).parents[2]
DATA = sorted((ROOT / "configs" / "data").glob("*.jsonnet"))


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_a_data_set_is_right_and_called_by_its_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--configs", str(path), "check_config"]) == 0, capsys.readouterr().err
    source = load([str(path)], ()).data["data_source"]
    assert path.stem == source
