"""Promises of the files under configs/:

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
from treetune.config.catalogue import FRAGMENTS_FOLDER, find_configurations, first_sentence, kind_of
from treetune.config.layers import find_configuration_files
from treetune.main import main

NAMES = [str(path.relative_to(CONFIGS)) for path in find_configuration_files(CONFIGS)]
EXPERIMENT = "polIter_rho1bSft2_vineppo_MATH.jsonnet"
EXPERIMENT_FOR = {
    "guru": "guru/dapo_7b_stem.jsonnet",
    "signposts": "signposts/fork_grpo.jsonnet",
    "preferences": "quickstart/dpo.jsonnet",
    "shaping/acceleration": "threadweaver/parallel.jsonnet",
}
"""Experiments for the fragments that only go on one kind of experiment, by a word of the fragment's name."""

VARIABLES = ("APP_JUDGE_URL", "APP_SEQUENTIAL_ANSWERS")


def test_imports_lead_to_files_beside_the_importer_or_below_configs() -> None:
    missing = []
    for path in sorted(CONFIGS.rglob("*sonnet")):
        for name in lexer.imported_names(path.read_text(encoding="utf-8")):
            if not (path.parent / name).is_file() and not (CONFIGS / name).is_file():
                missing.append(f"{path.relative_to(CONFIGS)} imports {name}")
    assert missing == []


APPENDED = [name for name in NAMES if kind_of(Path(name)) in ("presets", FRAGMENTS_FOLDER)]
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
    special = [experiment for word, experiment in EXPERIMENT_FOR.items() if word in name]
    experiment = special[0] if special else EXPERIMENT
    text = f"(import '{experiment}') + (import '{name}')"
    variables = dict.fromkeys(VARIABLES, "1")
    value = _jsonnet.evaluate_snippet("plain", text, jpathdir=[str(CONFIGS)], ext_vars=variables)
    assert isinstance(json.loads(value), dict)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_begins_with_a_sentence_that_says_what_it_is(name: str) -> None:
    assert len(first_sentence((CONFIGS / name).read_text(encoding="utf-8"))) > 5


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("credit/")])
def test_a_credit_names_its_paper_or_says_that_it_is_our_own(name: str) -> None:
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    comment = " ".join(itertools.takewhile(lambda line: line.startswith("//"), lines))
    assert any(source in comment for source in ("arXiv:", "treetune's own", "Shapley 1953")), comment


def test_a_first_sentence_ends_at_its_dot_and_not_in_an_abbreviation() -> None:
    text = "// DAPO (Yu et al. 2025) on one domain.\n// It samples. More.\n{}\n// no head"
    assert first_sentence(text) == "DAPO (Yu et al. 2025) on one domain"
    assert first_sentence("{ a: 1 }  // no head") == ""


def test_configurations_are_listed_under_their_kind_and_by_a_word_of_their_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [entry.name for entry in find_configurations() if "/" not in entry.name]  # configs/ itself
    assert {entry.name for entry in find_configurations()} == set(NAMES)
    assert main(["configs", "rloo"]) == 0
    listed = capsys.readouterr().out
    assert "quickstart/rloo.jsonnet" in listed and "credit/rloo.jsonnet" in listed
    assert "quickstart/vineppo.jsonnet" not in listed
    assert listed.index("experiments") < listed.index("presets") < listed.index("fragments")


def test_a_word_that_no_configuration_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "no_such_method"]) != 0
    assert "no configuration has 'no_such_method'" in capsys.readouterr().err


def test_every_whole_configuration_is_an_experiment_or_a_table() -> None:
    kinds = {kind_of(Path(name).relative_to("configs")) for name in whole_configurations()}
    assert kinds == {"experiments", "tables"}
