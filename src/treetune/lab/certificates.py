"""Certificates of runs: hashes of a run's inputs and results, so that others can verify them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import treetune
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import EPISODES, TRAJECTORIES, ExperimentDirectory
from treetune.runtime.machine import describe_different_bits, facts_that_decide_bits
from treetune.runtime.manifest import data_hash, read_config, read_manifest
from treetune.store.checksums import config_hash, digest_of, read_record, refuse_damaged, write_record

TOLERATED_SHARE = 0.01
"""The largest difference in weights that another processor, number of threads or version explains, as a share
of the length of the iteration's step. Measured differences are 1e-4 and less."""

CHECKPOINT_FOLDERS = ("policy", "adapter", "critic", "reward_model", "trainer")
"""The folders that a checkpoint may have. A certificate hashes the files of each of them."""
CERTIFY_REMEDY = "ask for the certificate again, or write a new one with `certify`"


def certify(path: Path, config: PolicyIteration) -> Path:
    """Writes ``certificate.json`` into a run's folder, and returns the file.

    The file has hashes of the configuration, the data and the code, and the versions of packages. For each
    iteration it has hashes of the answers, the episodes and the checkpoint after the iteration, as far as
    they are stored. It also has the iteration's `chain`: the hash of the iteration's hashes and of the
    previous iteration's chain. The first iteration's chain begins with the hash of the run's inputs.

    Raises ValueError for a run without an iteration, and Damaged for a damaged checkpoint.
    """
    directory = ExperimentDirectory(path)
    links: list[dict[str, Any]] = []
    inputs = _hashes_of_inputs(directory, config)
    chain = config_hash(inputs)
    for number in directory.iterations():  # counted from 0
        for folder_name in CHECKPOINT_FOLDERS:
            folder = directory.checkpoint_folder(number + 1) / folder_name
            refuse_damaged(folder, "a damaged checkpoint can't be certified")
        hashes = _hashes_of_iteration(directory, number)
        chain = config_hash([chain, hashes])
        links.append({"iteration": number + 1, **hashes, "chain": chain})
    if not links:
        raise ValueError(f"{path} has no iteration to certify: give an experiment's folder")
    write_record(path / "certificate.json", {**inputs, "iterations": links})
    return path / "certificate.json"


def _hashes_of_inputs(directory: ExperimentDirectory, config: PolicyIteration) -> dict[str, Any]:
    """Returns hashes of everything that a run's results depend on.

    `source` is the hash of the code that is installed now. `bits_rest_on` is not a hash: it has the
    processor, the number of ranks and the versions of packages when the run began. The last bits of the
    results depend on them (`runtime.machine.facts_that_decide_bits`)."""
    manifest = read_manifest(directory)
    sources = sorted(Path(treetune.__file__).parent.glob("**/*.py"))
    return {
        "configuration": config_hash(read_config(directory.path)),
        "data": {split: data_hash(config.task, split) for split in ("train", "validation", "test")},
        "commit": manifest.get("commit"),
        "own_modules": manifest.get("own_modules", {}),
        # Despite its name, `config_hash` hashes any value of JSON.
        "source": config_hash([digest_of(source) for source in sources]),
        "bits_rest_on": manifest.get("bits_rest_on", {}),
    }


def _hashes_of_iteration(directory: ExperimentDirectory, number: int) -> dict[str, Any]:
    """Returns a hash of each of an iteration's files and of each folder of the checkpoint after it.

    `number` counts from 0. A file or folder that is not stored, or was deleted, has None in place of a
    hash."""
    folder, checkpoint = directory.iteration_folder(number), directory.checkpoint_folder(number + 1)
    files = {"answers": folder / TRAJECTORIES, "episodes": folder / EPISODES}
    hashes: dict[str, Any] = {}
    for name, file in files.items():
        hashes[name] = digest_of(file) if file.is_file() else None
    for folder_name in CHECKPOINT_FOLDERS:
        files_of_part = sorted(file for file in (checkpoint / folder_name).rglob("*") if file.is_file())
        digests = {str(file.relative_to(checkpoint)): digest_of(file) for file in files_of_part}
        # Despite its name, `config_hash` hashes any value of JSON, such as this dictionary of digests.
        hashes[folder_name] = config_hash(digests) if digests else None
    return hashes


def verify(
    certificate: Path,
    config: PolicyIteration,
    plain: Mapping[str, Any],
    run: Path,
    iteration: int | None = None,
    exact: bool = False,
) -> Iterator[str]:
    """Verifies a run: compares its files with a certificate, trains an iteration again, and yields messages.

    All files that the run's folder has are compared. Training again needs `config.json`, `manifest.json`, the
    iteration's folder, and the checkpoints before and after it.

    Args:
        certificate: the certificate's file.
        config: the run's experiment.
        plain: the configuration from which `config` was built, as a dictionary.
        run: the run's folder, or a folder with the parts of it that are needed.
        iteration: the number of the iteration to train again, counted from 1. None draws one at random from
            those that can be trained again.
        exact: whether to compute the optimiser's state from earlier episodes where it was deleted.

    Raises ValueError for files that differ from the certificate, and for resulting weights that differ more
    than another environment explains.
    """
    from treetune.lab.analyzers.replay import replay

    certified, directory = read_record(certificate, CERTIFY_REMEDY), ExperimentDirectory(run)

    # Compare the inputs and all files with the certificate.
    inputs = _hashes_of_inputs(directory, config)
    # A link has the hashes of an iteration's files. An iteration's chain is a hash of its link and of the
    # previous iteration's chain, so the last chain stands for the whole run.
    links, last_chain = _check_links(certificate, certified, inputs)
    for name in ("configuration", "data"):
        if inputs[name] != certified[name]:
            raise ValueError(
                f"the {name} differs from that of {certificate}: {certified[name]} there, {inputs[name]} here"
            )
    yield f"the configuration and data are the same; chain of {len(links)} iterations {last_chain}"
    for number, link in links.items():
        for name, digest in _hashes_of_iteration(directory, number - 1).items():
            # Certificates of earlier versions have no hashes of `adapter` and `reward_model`. A digest is
            # None if `run` doesn't have the files: perhaps they were deleted since.
            can_be_compared = name in link and digest is not None
            if can_be_compared and digest != link[name]:
                raise ValueError(f"iteration {number}: {name} in {run} differ from those of {certificate}")
    yield "all answers, episodes and checkpoints that are stored are those of the certificate"

    # Choose an iteration, and train it again.
    # `exact` computes the optimiser's state, and a trainer that restarts in every iteration has none.
    needs_state = not exact and config.restart != "every_iteration"
    trainable = [number for number in links if _can_be_trained_again(directory, number, needs_state)]
    is_possible = bool(trainable) if iteration is None else iteration in trainable
    if not is_possible:
        raise ValueError(
            f"these iterations of {run} can be trained again: {', '.join(map(str, trainable)) or 'none'}."
            " That needs the iteration's answers, the weights and the optimiser's state before it (`--exact`"
            " computes the state) and the weights after it, which `checkpoints: {every: 1, keep_every: 1}`"
            " keeps"
        )
    if iteration is None:
        iteration = random.SystemRandom().choice(trainable)
    # The folder may have another name or place than the configuration says.
    config_here = replace(config, directory=str(run.parent), experiment_name=run.name)
    # A replay may also train the iteration with another credit or objective (`changed_config`). Here it
    # trains the iteration only as the run did, and "own" is the result of that.
    trained_again = replay(
        run, iteration, run_config=config_here, plain=plain, changed_config=None, exact=exact
    )["own"]

    # Judge the difference of the weights.
    # Everything besides configuration, data and code on which the last bits of results depend: the processor,
    # the GPUs, the number of ranks and of threads, and the versions of packages. Such a difference explains
    # small differences of the weights.
    stated_environment = certified["bits_rest_on"]
    environment = facts_that_decide_bits(int(stated_environment.get("ranks", 1)), config.engines.policy)
    differences = describe_different_bits(stated_environment, environment)
    if inputs["source"] != certified["source"]:
        differences.append("the code was another")
    for difference in differences:
        yield f"another environment: {difference}"
    if trained_again["same_as_run"]:
        yield f"iteration {iteration}, trained again: bit-identical"
        return
    # "parted" describes the first tensor of the resulting weights that differs from the stored one.
    deviation = trained_again["parted"]
    result = (
        f"iteration {iteration}, trained again: the first tensor that differs is {deviation['tensor']}"
        f" ({deviation['numbers']} of {deviation['of']} numbers, by {deviation['largest']:.2g} at most); the"
        f" difference of all weights is {deviation['share']:.2g} of the length of the iteration's step"
    )
    if not differences:
        raise ValueError(f"{result}, although the environment is the run's")
    if deviation["share"] > TOLERATED_SHARE:
        raise ValueError(f"{result}, which exceeds the {TOLERATED_SHARE:g} that another environment explains")
    yield f"{result}: within the {TOLERATED_SHARE:g} that another environment explains"


def _check_links(
    certificate: Path, certified: Mapping[str, Any], inputs: Mapping[str, Any]
) -> tuple[dict[int, dict[str, Any]], str]:
    """Returns a certificate's hashes by iteration, and the chain of the last iteration.

    The chain of an iteration is the hash of the iteration's hashes and of the chain before it.

    Args:
        certified: The content of the certificate.
        inputs: Hashes of the run's inputs as they are now. Only their names are used here. The caller
            compares the hashes with those that the certificate states.

    Raises ValueError for a broken chain.
    """
    # The chain before the first iteration is the hash of the stated inputs, as `certify` computed it.
    chain = config_hash({name: certified[name] for name in inputs})
    links: dict[int, dict[str, Any]] = {}
    for stated_link in certified["iterations"]:
        link = {name: value for name, value in stated_link.items() if name not in ("iteration", "chain")}
        number = stated_link["iteration"]
        chain = config_hash([chain, link])
        if chain != stated_link["chain"]:
            raise ValueError(f"the chain of {certificate} breaks in iteration {number}: {CERTIFY_REMEDY}")
        links[number] = link
    return links, chain


def _can_be_trained_again(directory: ExperimentDirectory, number: int, needs_state: bool) -> bool:
    """Returns whether the files that training iteration `number` (from 1) again needs are stored."""
    # Folders of iterations are numbered from 0. A checkpoint has the number of the iterations before it.
    folder = directory.iteration_folder(number - 1)
    checkpoint_before = directory.checkpoint_folder(number - 1)
    needed = [folder / name for name in (TRAJECTORIES, EPISODES)]
    needed.append(directory.checkpoint_folder(number) / "policy")  # to compare the resulting weights with
    if number > 1:  # the first iteration begins with the start weights
        needed.append(checkpoint_before / "policy")
        if needs_state:
            needed.append(checkpoint_before / "trainer")
    return all(path.exists() for path in needed)
