"""Promise of optional packages: a grader, tool or rule that needs one says so, with its remedy, where it
isn't installed.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from treetune.domains import extras
from treetune.domains.environments.tools import Search
from treetune.domains.graders.instruction_following import InstructionFollowing
from treetune.findings import missing_requirements
from treetune.main import main


@pytest.fixture
def default_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the optional packages, as if the set-up had not installed them."""
    lock = (Path(__file__).parents[2] / "requirements-extras.txt").read_text()

    def find_spec_without_extras(module: str) -> object:
        return None if f"\n{module.replace('_', '-')}==" in lock else find_spec(module)

    monkeypatch.setattr(extras, "find_spec", find_spec_without_extras)


@pytest.mark.usefixtures("default_set_up")
def test_a_grader_and_a_tool_say_what_they_lack(tmp_path: Path) -> None:
    corpus = tmp_path / "passages.jsonl"
    corpus.touch()
    (of_grader,) = missing_requirements([InstructionFollowing()])
    (of_tool,) = missing_requirements([Search(corpus=(str(corpus),))])
    assert of_grader.startswith("lm_eval, nltk, langdetect, which the grader instruction_following needs")
    assert of_tool.startswith("bm25s, which the tool search needs")
    assert all("./scripts/setup.sh --extras" in message for message in (of_grader, of_tool))


@pytest.mark.usefixtures("default_set_up")
def test_a_rule_is_refused_when_its_configuration_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.jsonnet"
    config.write_text(json.dumps({"type": "filter_data", "rules": [{"type": "near_duplicates"}]}))
    assert main(["--configs", str(config), "check_config"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "datasketch, which the rule near_duplicates needs" in message
    assert "./scripts/setup.sh --extras" in message
