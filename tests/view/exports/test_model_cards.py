"""The model card of a checkpoint, and its upload to the hub.

Promises that these tests hold:

* A card has the method, results, data, licences and the command of the very weights that it describes.
* Unknown facts are called missing, and no folder of the machine is named.
* Damaged weights are not uploaded; the hub gets card and weights whole, and no output has the token.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.view.exports.measured import write_checkpoint, write_experiment
from tests.view.exports.stand_in_hub import TOKEN, Hub, stand_in_hub
from treetune.store.checksums import seal_folder
from treetune.view.exports.card import (
    Checkpoint,
    Licences,
    base_model,
    checkpoint_at,
    describe_missing_facts,
    make_model_card,
    make_parcel,
)

MAIN = Path(__file__).resolve().parents[3] / "src" / "treetune" / "main.py"
LICENCES = Licences("apache-2.0", "mit")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_checkpoint(write_experiment(tmp_path / "run"))


def push(
    policy: Path, hub: Hub, *options: str, token: str | None = TOKEN
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.address, "HF_HOME": str(policy.parents[4] / "hub"), "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1", "PYTHONPATH": str(MAIN.parents[2]), **({"HF_TOKEN": token} if token else {}),
    }  # fmt: skip
    command = [sys.executable, str(MAIN), "push_to_hub", str(policy), "me/tiny", "--license", "mit"]
    command += ["--data-license", "mit", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def checkpoint_of(folder: Path, **config: Any) -> Checkpoint:
    """Writes an experiment with these settings, and returns its last checkpoint."""
    return checkpoint_at(write_checkpoint(write_experiment(folder, **config)))


def pretrained_model(folder: Path) -> dict[str, str]:
    """Returns the configuration of a model whose training begins from the weights in a folder."""
    return {"type": "pretrained", "name_or_path": str(folder)}


def test_a_card_holds_method_results_data_and_how_to_make_it(policy: Path) -> None:
    text = str(make_model_card(checkpoint_at(policy.parent), LICENCES, "tiny"))
    card = ModelCard(text)  # parses the text, as the hub does
    data, [result] = card.data, card.data.eval_results
    assert (data.license, data.base_model) == ("apache-2.0", "someone/base-1b")
    assert data.datasets == ["someone/sums"]
    assert (result.metric_type, result.metric_value) == ("pass@1", 0.75)
    measured_on = (result.dataset_type, result.dataset_split, result.dataset_revision)
    assert measured_on == ("someone/sums", "test", "v2")
    for expected in (
        "0.750 [0.625, 0.875]", "`monte_carlo`", "Licence of the data: mit", "revision `v2`",
        "a" * 40 + "+changes", "torch 2.13.0", '"learning_rate": 1e-06', "CONFIGSTR=config.jsonnet ./run.sh",
    ):  # fmt: skip
        assert expected in card.text


def test_a_card_has_the_results_of_its_weights_and_not_of_later_ones(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "run")
    first = write_checkpoint(experiment, 0)
    write_checkpoint(experiment, 2)
    assert "0.250 [0.125, 0.375]" in make_model_card(checkpoint_at(first), LICENCES).text
    last = make_model_card(checkpoint_at(experiment / "checkpoints/last"), LICENCES)
    assert "These weights were not evaluated." in last.text


def test_data_of_the_evaluation_are_not_listed_as_training_data(tmp_path: Path) -> None:
    other = {"type": "rows", "source": {"type": "hub", "name": "others/test-set", "revision": "v9"}}
    checkpoint = checkpoint_of(tmp_path / "run", evaluation={"sets": [{"split": "test", "task": other}]})
    data = make_model_card(checkpoint, LICENCES).data
    assert data.datasets == ["someone/sums"]
    assert [result.dataset_type for result in data.eval_results] == ["others/test-set"]


def test_no_folder_of_the_machine_is_in_a_card(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_checkpoint(write_experiment(secret / "start"))
    model = pretrained_model(secret / "start/checkpoints/last/policy")
    text = str(make_model_card(checkpoint_of(secret / "run", directory=str(secret), model=model), LICENCES))
    assert "secret" not in text and "…/start/checkpoints/last/policy" in text
    assert "from `someone/base-1b`" in text, "the base model is found through the experiment it began from"


def test_facts_that_nobody_stated_are_called_missing(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(
        tmp_path / "run", model=pretrained_model(tmp_path / "weights" / "folder-of-mine")
    )
    assert base_model(checkpoint.experiment, Licences()) == "the folder folder-of-mine"
    assert len(describe_missing_facts(checkpoint, Licences())) == 3
    assert describe_missing_facts(checkpoint, Licences("mit", "mit", "me/base")) == []
    assert "Licence of the data: not stated" in str(make_model_card(checkpoint, Licences()))
    with pytest.raises(ValueError, match=r"needs .*--license.*--data-license.*--base-model"):
        make_parcel(checkpoint, "me/tiny", Licences())


MISSING_DATA_LICENCE = "the licence of the data (--data-license)"


def test_a_licence_is_needed_for_data_that_are_read_and_not_for_generated_problems(
    tmp_path: Path,
) -> None:
    making = checkpoint_of(tmp_path / "making", task={"type": "multiplication"})
    assert describe_missing_facts(making, Licences("mit")) == []
    assert "names no data set or file" in str(make_model_card(making, Licences("mit")))
    source = {"type": "disk", "path": "sums", "train": "a/b"}
    reading = checkpoint_of(tmp_path / "reading", task={"type": "math", "source": source})
    assert describe_missing_facts(reading, Licences("mit")) == [MISSING_DATA_LICENCE]
    text = str(make_model_card(reading, Licences("mit")))
    assert "* file `sums`" in text and "Licence of the data: not stated" in text


def test_data_of_the_earlier_training_are_data_of_the_weights(tmp_path: Path) -> None:
    start = write_experiment(tmp_path / "sft")
    write_checkpoint(start)
    model = pretrained_model(start / "checkpoints/last/policy")
    checkpoint = checkpoint_of(tmp_path / "run", model=model, task={"type": "multiplication"})
    assert describe_missing_facts(checkpoint, Licences("mit")) == [MISSING_DATA_LICENCE]
    card = make_model_card(checkpoint, LICENCES)
    assert card.data.datasets == ["someone/sums"]
    assert "`someone/sums`, revision `v2` (in earlier training, which this one started from)" in card.text
    (start / "config.json").unlink()
    assert MISSING_DATA_LICENCE in describe_missing_facts(checkpoint, Licences("mit"))


@pytest.mark.parametrize("name", ["not there/", "a b", "me/tiny/more"])
def test_an_impossible_repository_name_is_refused(policy: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a repository name"):
        make_parcel(checkpoint_at(policy), name, LICENCES)


def test_damaged_weights_and_folders_without_a_checkpoint_are_not_uploaded(policy: Path) -> None:
    seal_folder(policy)
    (policy / "model.safetensors").write_bytes(b"\1" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        make_parcel(checkpoint_at(policy), "me/tiny", LICENCES)
    with pytest.raises(ValueError, match="is not a checkpoint: give one of an experiment"):
        checkpoint_at(policy.parents[3])


def test_the_hub_gets_card_and_weights_whole_and_no_output_has_the_token(policy: Path) -> None:
    with stand_in_hub() as hub:
        done = push(policy, hub, "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"{hub.address}/me/tiny/commit/1")
    assert [(request["name"], request["visibility"]) for request in hub.created] == [("tiny", "private")]
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert hub.files[name] == (policy / name).read_bytes()
    assert b"0.750 [0.625, 0.875]" in hub.files["README.md"]
    assert TOKEN not in done.stdout + done.stderr


def test_a_dry_run_lists_the_files_and_sends_no_request(policy: Path) -> None:
    with stand_in_hub() as hub:
        done = push(policy, hub, "--dry-run", token=None)
    assert done.returncode == 0 and hub.requests == []
    assert "This would be uploaded to me/tiny (public):" in done.stdout
    assert "model.safetensors  64 bytes" in done.stdout


def test_a_missing_and_a_wrong_token_are_named(policy: Path) -> None:
    with stand_in_hub() as hub:
        without = push(policy, hub, token=None)
        assert without.returncode == 2 and "HF_TOKEN is not set" in without.stderr and hub.requests == []
        wrong = push(policy, hub, token="hf_another")
    assert wrong.returncode == 1 and "uploading me/tiny to" in wrong.stderr and "401" in wrong.stderr
    assert "hf_another" not in wrong.stdout + wrong.stderr
