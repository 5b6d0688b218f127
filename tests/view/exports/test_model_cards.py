"""A checkpoint's card says what the weights are; the hub gets both, and no log the token."""

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
    missing,
    model_card,
    parcel_of,
)

MAIN = Path(__file__).resolve().parents[3] / "src" / "treetune" / "main.py"
SAID = Licences("apache-2.0", "mit")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_checkpoint(write_experiment(tmp_path / "run"))


def _push(policy: Path, hub: Hub, *words: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.address, "HF_HOME": str(policy.parents[4] / "hub"), "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1", "PYTHONPATH": str(MAIN.parents[2]), **({"HF_TOKEN": token} if token else {}),
    }  # fmt: skip
    command = [sys.executable, str(MAIN), "push_to_hub", str(policy), "me/tiny", "--license", "mit"]
    command += ["--data-license", "mit", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def checkpoint_of(folder: Path, **config: Any) -> Checkpoint:
    """The last one of an experiment with these settings."""
    return checkpoint_at(write_checkpoint(write_experiment(folder, **config)))


def begun_from(folder: Path) -> dict[str, str]:
    """The model of a training that begins from weights in a folder."""
    return {"type": "pretrained", "name_or_path": str(folder)}


def test_a_card_holds_method_results_data_and_how_to_make_it(policy: Path) -> None:
    read = ModelCard(str(model_card(checkpoint_at(policy.parent), SAID, "tiny")))  # as a reader of cards does
    data, [result] = read.data, read.data.eval_results
    assert (data.license, data.base_model) == ("apache-2.0", "someone/base-1b")
    assert data.datasets == ["someone/sums"]
    assert (result.metric_type, result.metric_value) == ("pass@1", 0.75)
    measured_on = (result.dataset_type, result.dataset_split, result.dataset_revision)
    assert measured_on == ("someone/sums", "test", "v2")
    for words in (
        "0.750 [0.625, 0.875]", "`monte_carlo`", "Licence of the data: mit", "revision `v2`",
        "a" * 40 + "+changes", "torch 2.13.0", '"learning_rate": 1e-06', "CONFIGSTR=config.jsonnet ./run.sh",
    ):  # fmt: skip
        assert words in read.text


def test_a_card_is_of_its_own_weights_and_not_of_later_ones(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "run")
    first = write_checkpoint(experiment, 0)
    write_checkpoint(experiment, 2)
    assert "0.250 [0.125, 0.375]" in model_card(checkpoint_at(first), SAID).text
    last = model_card(checkpoint_at(experiment / "checkpoints/last"), SAID)
    assert "These weights were not evaluated." in last.text


def test_what_it_is_measured_on_is_not_what_it_was_trained_on(tmp_path: Path) -> None:
    other = {"type": "rows", "source": {"type": "hub", "name": "others/test-set", "revision": "v9"}}
    checkpoint = checkpoint_of(tmp_path / "run", evaluation={"sets": [{"split": "test", "task": other}]})
    data = model_card(checkpoint, SAID).data
    assert data.datasets == ["someone/sums"]
    assert [one.dataset_type for one in data.eval_results] == ["others/test-set"]


def test_no_folder_of_the_machine_is_in_a_card(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_checkpoint(write_experiment(secret / "start"))
    model = begun_from(secret / "start/checkpoints/last/policy")
    text = str(model_card(checkpoint_of(secret / "run", directory=str(secret), model=model), SAID))
    assert "secret" not in text and "…/start/checkpoints/last/policy" in text
    assert "from `someone/base-1b`" in text, "the base model is found through the experiment it began from"


def test_what_nobody_said_is_missing_and_not_made_up(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "run", model=begun_from(tmp_path / "weights" / "folder-of-mine"))
    assert base_model(checkpoint.experiment, Licences()) == "the folder folder-of-mine"
    assert len(missing(checkpoint, Licences())) == 3
    assert missing(checkpoint, Licences("mit", "mit", "me/base")) == []
    assert "Licence of the data: not stated" in str(model_card(checkpoint, Licences()))
    with pytest.raises(ValueError, match=r"needs .*--license.*--data-license.*--base-model"):
        parcel_of(checkpoint, "me/tiny", Licences())


OF_THE_DATA = "the licence of the data (--data-license)"


def test_data_are_those_of_others_wherever_they_lie_and_none_where_a_task_makes_its_problems(
    tmp_path: Path,
) -> None:
    making = checkpoint_of(tmp_path / "making", task={"type": "multiplication"})
    assert missing(making, Licences("mit")) == []
    assert "names no data set or file" in str(model_card(making, Licences("mit")))
    source = {"type": "disk", "path": "sums", "train": "a/b"}
    reading = checkpoint_of(tmp_path / "reading", task={"type": "math", "source": source})
    assert missing(reading, Licences("mit")) == [OF_THE_DATA]
    text = str(model_card(reading, Licences("mit")))
    assert "* file `sums`" in text and "Licence of the data: not stated" in text


def test_data_of_the_training_that_it_began_from_is_data_of_the_weights(tmp_path: Path) -> None:
    start = write_experiment(tmp_path / "sft")
    write_checkpoint(start)
    model = begun_from(start / "checkpoints/last/policy")
    checkpoint = checkpoint_of(tmp_path / "run", model=model, task={"type": "multiplication"})
    assert missing(checkpoint, Licences("mit")) == [OF_THE_DATA]
    card = model_card(checkpoint, SAID)
    assert card.data.datasets == ["someone/sums"]
    assert "`someone/sums`, revision `v2` (in earlier training, which this one started from)" in card.text
    (start / "config.json").unlink()
    assert OF_THE_DATA in missing(checkpoint, Licences("mit"))


@pytest.mark.parametrize("name", ["not there/", "a b", "me/tiny/more"])
def test_a_name_that_is_none_is_refused(policy: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a repository name"):
        parcel_of(checkpoint_at(policy), name, SAID)


def test_damaged_weights_and_what_is_no_checkpoint_are_not_sent(policy: Path) -> None:
    seal_folder(policy)
    (policy / "model.safetensors").write_bytes(b"\1" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        parcel_of(checkpoint_at(policy), "me/tiny", SAID)
    with pytest.raises(ValueError, match="is not a checkpoint: give one of an experiment"):
        checkpoint_at(policy.parents[3])


def test_the_hub_gets_the_card_and_the_weights_whole_and_no_log_the_token(policy: Path) -> None:
    with stand_in_hub() as hub:
        done = _push(policy, hub, "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"{hub.address}/me/tiny/commit/1")
    assert [(one["name"], one["visibility"]) for one in hub.created] == [("tiny", "private")]
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert hub.files[name] == (policy / name).read_bytes()
    assert b"0.750 [0.625, 0.875]" in hub.files["README.md"]
    assert TOKEN not in done.stdout + done.stderr


def test_a_dry_run_shows_what_would_be_sent_and_asks_nobody(policy: Path) -> None:
    with stand_in_hub() as hub:
        done = _push(policy, hub, "--dry-run", token=None)
    assert done.returncode == 0 and hub.requests == []
    assert "This would be uploaded to me/tiny (public):" in done.stdout
    assert "model.safetensors  64 bytes" in done.stdout


def test_without_a_token_and_with_a_wrong_one_it_says_so(policy: Path) -> None:
    with stand_in_hub() as hub:
        none = _push(policy, hub, token=None)
        assert none.returncode == 2 and "HF_TOKEN is not set" in none.stderr and hub.requests == []
        wrong = _push(policy, hub, token="hf_another")
    assert wrong.returncode == 1 and "uploading me/tiny to" in wrong.stderr and "401" in wrong.stderr
    assert "hf_another" not in wrong.stdout + wrong.stderr
