"""A run is forked: with nothing changed it is the run that went on, and with another credit the answers are
the same until weights part. And a run's certificate: what is verified, and what is told where bits differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_run import directory_of, small, train
from treetune.credit.grpo import Group
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import Damaged
from treetune.lab import certificates
from treetune.lab.analyzers.first_difference import find_first_difference
from treetune.lab.certificates import certify, verify
from treetune.lab.fork import fork
from treetune.models.policy_files import read_policy
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_trajectories
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import read_manifest
from treetune.store.checksums import read_record, seal_folder, write_record

PLAIN: dict[str, Any] = {"type": "policy_iteration", "trainer": {"seed": 1}}


def sampling(base: Path, **changes: Any) -> PolicyIteration:
    """The small experiment, whose answers come from its own weights."""
    rollout = SingleTurn(samples=4, max_tokens=12, unfinished_reward=0.5)
    return small(base, InProcessSettings(rows=16), rollout=rollout, iterations=4, **changes)


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyIteration, ExperimentDirectory]:
    """Two of four iterations: a stem to fork."""
    torch.set_num_threads(1)
    config = sampling(tmp_path_factory.mktemp("forked"))
    return config, train(replace(config, iterations=2))


def branched(
    run: tuple[PolicyIteration, ExperimentDirectory],
    name: str,
    **changes: Any,
) -> ExperimentDirectory:
    config = replace(run[0], experiment_name=name, **changes)
    fork(run[1].path, 2, config, PLAIN)
    train(config)
    return directory_of(config)


def test_a_branch_with_nothing_changed_is_the_run_that_went_on_to_the_bit(
    run: tuple[PolicyIteration, ExperimentDirectory], tmp_path: Path
) -> None:
    branch = branched(run, "same")
    shutil.copytree(run[1].path, tmp_path / "gone_on")
    gone_on = train(replace(run[0], directory=str(tmp_path), experiment_name="gone_on"))
    assert branch.checkpoints()[-1] == gone_on.checkpoints()[-1] == 4
    assert find_first_difference(branch.path, gone_on.path) is None
    assert [row["iteration"] for row in branch.read_metrics()] == [0, 1, 2, 3]
    origin = read_manifest(branch)["forked"]
    assert (origin["run"], origin["after"]) == (str(run[1].path), 2)


def test_branches_have_the_same_answers_until_their_weights_part(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    def answers(branch: ExperimentDirectory, iteration: int) -> list[Any]:
        rows = read_trajectories(branch.iteration_folder(iteration) / "trajectories.arrow")
        return [(one.problem.id, [segment.token_ids.tolist() for segment in one.segments]) for one in rows]

    one = branched(run, "group", credit=Group())
    other = branched(run, "monte_carlo", credit=MonteCarlo(samples=1))
    assert answers(one, 2) == answers(other, 2)
    weights = [read_policy(branch.checkpoint_folder(3) / "policy")[0] for branch in (one, other)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    shared = one.iteration_folder(0) / "trajectories.arrow"
    assert shared.samefile(run[1].iteration_folder(0) / "trajectories.arrow")
    shutil.rmtree(one.path)
    assert (run[1].checkpoint_folder(2) / "trainer").is_dir()


@pytest.mark.parametrize(
    ("after", "changes", "stored", "message"),
    [
        (1, {"experiment_name": "small"}, {}, "already has an experiment"),
        (3, {}, {}, "can't be forked after iteration 3"),
        (2, {}, {"seed": 7}, "seed was 0 and is 7: only credit"),
        (2, {}, {"problems_per_iteration": 2}, "problems_per_iteration"),
    ],
)
def test_what_would_be_no_branch_of_the_run_is_refused(
    run: tuple[PolicyIteration, ExperimentDirectory],
    after: int,
    changes: dict[str, Any],
    stored: dict[str, Any],
    message: str,
) -> None:
    config = replace(run[0], **({"experiment_name": "refused"} | changes))
    with pytest.raises(ValueError, match=message):
        fork(run[1].path, after, config, PLAIN | stored)
    assert not (run[1].path.parent / "refused").exists()


@pytest.fixture
def certified(run: tuple[PolicyIteration, ExperimentDirectory], tmp_path: Path) -> ExperimentDirectory:
    shutil.copytree(run[1].path, tmp_path / "small")
    certify(tmp_path / "small", run[0])
    return ExperimentDirectory(tmp_path / "small")


def verified(run: tuple[PolicyIteration, ExperimentDirectory], of: ExperimentDirectory, **asked: Any) -> str:
    return "\n".join(verify(of.path / "certificate.json", run[0], PLAIN, of.path, **asked))


def test_a_run_that_is_as_it_was_gives_the_same_bits_whichever_iteration_is_drawn(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory
) -> None:
    assert "trained again: bit-identical" in verified(run, certified)
    assert "iteration 2, trained again: bit-identical" in verified(run, certified, iteration=2)
    links = read_record(certified.path / "certificate.json", "")["iterations"]
    assert [link["iteration"] for link in links] == [1, 2]
    assert all(link["policy"] and link["answers"] and link["episodes"] for link in links)


def test_a_file_that_is_another_is_named_before_anything_is_trained(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory
) -> None:
    shutil.copyfile(
        certified.iteration_folder(0) / "episodes.arrow", certified.iteration_folder(1) / "episodes.arrow"
    )
    for drawn in (2, 1, None):
        with pytest.raises(ValueError, match=r"iteration 2: episodes in .* differ from those of"):
            verified(run, certified, iteration=drawn)


@pytest.mark.parametrize("part", ["adapter", "reward_model"])
def test_adapters_and_the_reward_model_are_certified_too(
    run: tuple[PolicyIteration, ExperimentDirectory],
    certified: ExperimentDirectory,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = certified.checkpoint_folder(2) / part
    shutil.copytree(certified.checkpoint_folder(2) / "policy", folder)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "CHECKPOINT_FOLDERS", ("policy", "critic", "trainer"))
        certify(certified.path, run[0])
    messages = verify(certified.path / "certificate.json", run[0], PLAIN, certified.path)
    assert "chain of 2" in next(messages)
    assert "are those of the certificate" in next(messages), "a certificate of an earlier version"
    certify(certified.path, run[0])
    weights = folder / "model.safetensors"
    *unchanged, last_byte = weights.read_bytes()
    weights.write_bytes(bytes([*unchanged, last_byte ^ 1]))
    with pytest.raises(ValueError, match=rf"iteration 2: {part} in .* differ from those of"):
        verified(run, certified)
    with pytest.raises(Damaged, match=rf"{part}/model\.safetensors is damaged"):
        certify(certified.path, run[0])


def test_a_run_that_keeps_too_little_to_train_again_is_held_against_its_certificate_all_the_same(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory
) -> None:
    shutil.rmtree(certified.checkpoint_folder(1))
    shutil.rmtree(certified.checkpoint_folder(2) / "policy")
    found = verify(certified.path / "certificate.json", run[0], PLAIN, certified.path)
    assert "chain of 2" in next(found) and "that are stored are those of the certificate" in next(found)
    with pytest.raises(ValueError, match=r"can be trained again: none\. That needs"):
        next(found)
    shutil.copyfile(
        certified.iteration_folder(1) / "episodes.arrow", certified.iteration_folder(0) / "episodes.arrow"
    )
    with pytest.raises(ValueError, match=r"iteration 1: episodes in .* differ from those of"):
        verified(run, certified)


def test_a_link_that_was_exchanged_breaks_the_chain(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory
) -> None:
    path = certified.path / "certificate.json"
    said = read_record(path, "")
    said["iterations"][0]["answers"] = said["iterations"][1]["answers"]
    write_record(path, said)
    with pytest.raises(ValueError, match="breaks in iteration 1"):
        verified(run, certified)


def test_weights_that_training_does_not_give_are_told_and_another_place_explains_only_little(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory
) -> None:
    """Somebody certifies weights of their own making."""
    from safetensors.torch import load_file, save_file

    policy, before = (certified.checkpoint_folder(n) / "policy" for n in (2, 1))
    weights, earlier = load_file(policy / "model.safetensors"), load_file(before / "model.safetensors")
    first = next(iter(dict(sorted(weights.items()))))

    def exchange(by: float) -> None:
        changed = weights | {first: weights[first] + by * (weights[first] - earlier[first])}
        save_file(changed, policy / "model.safetensors", metadata={"format": "pt"})
        seal_folder(policy)
        certify(certified.path, run[0])

    exchange(1e-4)
    with pytest.raises(ValueError, match=rf"differs is {first} .* although the environment is the run's"):
        verified(run, certified, iteration=2)
    path = certified.path / "manifest.json"
    manifest = read_record(path, "")
    write_record(path, manifest | {"bits_rest_on": manifest["bits_rest_on"] | {"threads": 64}})
    certify(certified.path, run[0])
    assert "another environment: threads was 64, is 1" in (told := verified(run, certified, iteration=2))
    assert "within the 0.01 that another environment explains" in told
    exchange(0.5)
    with pytest.raises(ValueError, match=r"exceeds the 0\.01 that another environment explains"):
        verified(run, certified, iteration=2)


def test_of_the_stored_parts_those_of_one_iteration_are_enough(
    run: tuple[PolicyIteration, ExperimentDirectory], certified: ExperimentDirectory, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    for name in ("config.json", "manifest.json", "iterations/0001", "checkpoints/0001", "checkpoints/0002"):
        source, target = certified.path / name, parts / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    told = "\n".join(verify(certified.path / "certificate.json", run[0], PLAIN, parts))
    assert "iteration 2, trained again: bit-identical" in told
    with pytest.raises(ValueError, match=r"can be trained again: 2\. That needs"):
        list(verify(certified.path / "certificate.json", run[0], PLAIN, parts, iteration=1))
