"""What this file promises of the shipped configurations:

* each can be opened, and says in its first line what it is;
* plain Jsonnet evaluates it, with nothing of treetune's but the folder configs/;
* `treetune configs` lists it under its kind.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import _jsonnet
import pytest

from tests.support.shipped import CONFIGS, whole_configurations
from treetune.config import lexer
from treetune.config.catalogue import FRAGMENTS, entries, first_sentence, kind_of
from treetune.config.layers import configurations
from treetune.main import main

NAMES = [str(path.relative_to(CONFIGS)) for path in configurations(CONFIGS)]
LEFT = "polIter_rho1bSft2_vineppo_MATH.jsonnet"
OWN_LEFT = {
    "guru": "guru/dapo_7b_stem.jsonnet",
    "signposts": "signposts/fork_grpo.jsonnet",
    "preferences": "quickstart/dpo.jsonnet",
    "shaping/acceleration": "threadweaver/parallel.jsonnet",
}
"""Experiments that fragments for one kind of experiment go on, by a word of the fragment's name."""

VARIABLES = ("APP_JUDGE_URL", "APP_SEQUENTIAL_ANSWERS")


def test_imports_lead_to_files_beside_the_importer_or_below_configs() -> None:
    missing = []
    for path in sorted(CONFIGS.rglob("*sonnet")):
        for name in lexer.imports(path.read_text(encoding="utf-8")):
            if not (path.parent / name).is_file() and not (CONFIGS / name).is_file():
                missing.append(f"{path.relative_to(CONFIGS)} imports {name}")
    assert missing == []


APPENDED = [name for name in NAMES if kind_of(Path(name)) in ("presets", FRAGMENTS)]
"""Configurations that are appended to an experiment, on its right."""
OTHERS = [name for name in NAMES if name not in set(APPENDED)]


# One in five of the others: all of them would take 40 seconds, and other tests build each experiment.
@pytest.mark.parametrize("name", [*APPENDED, *OTHERS[::5]])
def test_plain_jsonnet_evaluates_it(name: str) -> None:
    # A variable that a file needs, such as APP_SEQUENTIAL_ANSWERS, is named in its first comment.
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    first_comment = " ".join(itertools.takewhile(lambda line: line.startswith("//"), lines))
    variables = {variable: "1" for variable in VARIABLES if variable in first_comment}
    value = _jsonnet.evaluate_file(str(CONFIGS / name), jpathdir=[str(CONFIGS)], ext_vars=variables)
    assert isinstance(json.loads(value), dict)


@pytest.mark.parametrize("name", APPENDED[::5])
def test_plain_jsonnet_evaluates_it_on_the_right_of_an_experiment(name: str) -> None:
    left = next((left for word, left in OWN_LEFT.items() if word in name), LEFT)
    text = f"(import '{left}') + (import '{name}')"
    variables = dict.fromkeys(VARIABLES, "1")
    value = _jsonnet.evaluate_snippet("plain", text, jpathdir=[str(CONFIGS)], ext_vars=variables)
    assert isinstance(json.loads(value), dict)


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_what_it_is(name: str) -> None:
    assert len(first_sentence((CONFIGS / name).read_text(encoding="utf-8"))) > 5


def test_a_first_sentence_ends_at_its_dot_and_not_in_an_abbreviation() -> None:
    text = "// DAPO (Yu et al. 2025) on one domain.\n// It samples. More.\n{}\n// no head"
    assert first_sentence(text) == "DAPO (Yu et al. 2025) on one domain"
    assert first_sentence("{ a: 1 }  // no head") == ""


def test_all_are_listed_under_their_kind_and_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert [entry.name for entry in entries() if "/" not in entry.name]  # configs/ itself
    assert {entry.name for entry in entries()} == set(NAMES)
    assert main(["configs", "rloo"]) == 0
    listed = capsys.readouterr().out
    assert "quickstart/rloo.jsonnet" in listed and "credit/rloo.jsonnet" in listed
    assert "quickstart/vineppo.jsonnet" not in listed
    assert listed.index("experiments") < listed.index("presets") < listed.index("fragments")


def test_a_word_that_no_configuration_has_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "no_such_method"]) != 0
    assert "no configuration has 'no_such_method'" in capsys.readouterr().err


def test_what_lies_in_a_folder_of_experiments_is_one() -> None:
    kinds = {kind_of(Path(name).relative_to("configs")) for name in whole_configurations()}
    assert kinds == {"experiments", "tables"}
