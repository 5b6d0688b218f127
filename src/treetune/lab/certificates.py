"""Certificates of runs: hashes of all that a run rests on and of what it made, to be tried elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import treetune
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.machine import bits_rest_on, describe_different_bits
from treetune.runtime.manifest import data_hash, read_config, read_manifest
from treetune.store.checksums import config_hash, digest_of, read_record, refuse_damaged, write_record

TOLERANCE = 0.01
"""The length of a difference in weights, in units of an iteration's step, that another processor, number of
threads or version explains: those that were tried make 1e-4 and less."""

PARTS = ("policy", "critic", "trainer")
REMEDY = "ask for the certificate again, or write it anew with `certify`"


def certify(path: Path, config: PolicyIteration) -> Path:
    """Writes ``certificate.json`` into the folder of the run in `path`, and returns the file.

    It holds hashes of configuration, data, code and versions, and for each iteration those of its answers,
    its episodes and the checkpoint behind it, as far as they are kept. The `chain` of an iteration is the
    hash of these and of the chain before it. Raises ValueError for no iteration, Damaged for a checkpoint."""
    directory, links = ExperimentDirectory(path), list[dict[str, Any]]()
    rests_on = _rests_on(directory, config)
    chain = config_hash(rests_on)
    for number in sorted(int(folder.name) for folder in (path / "iterations").glob("[0-9]*[0-9]")):
        for part in PARTS:
            refuse_damaged(directory.checkpoint(number + 1) / part, "a certificate is of what a run wrote")
        hashes = _hashes(directory, number)
        chain = config_hash([chain, hashes])
        links.append({"iteration": number + 1, **hashes, "chain": chain})
    if not links:
        raise ValueError(f"{path} holds no iteration to certify: name an experiment's folder")
    write_record(path / "certificate.json", {**rests_on, "iterations": links})
    return path / "certificate.json"


def _rests_on(directory: ExperimentDirectory, config: PolicyIteration) -> dict[str, Any]:
    """What a run rests on, and the place where it began. `source` is of the code that is installed now."""
    manifest = read_manifest(directory)
    sources = sorted(Path(treetune.__file__).parent.glob("**/*.py"))
    return {
        "configuration": config_hash(read_config(directory.path)),
        "data": {split: data_hash(config.task, split) for split in ("train", "validation", "test")},
        "commit": manifest.get("commit"),
        "own_modules": manifest.get("own_modules", {}),
        "source": config_hash([digest_of(source) for source in sources]),
        "bits_rest_on": manifest.get("bits_rest_on", {}),
    }


def _hashes(directory: ExperimentDirectory, number: int) -> dict[str, Any]:
    """Returns the hashes of an iteration's files (`number` counts from 0), and of each part of its checkpoint
    one over all files. None where there is no file, or none any more."""
    folder, checkpoint = directory.iteration(number), directory.checkpoint(number + 1)
    files = {"answers": folder / "trajectories.arrow", "episodes": folder / "episodes.arrow"}
    hashes: dict[str, Any] = {}
    for name, file in files.items():
        hashes[name] = digest_of(file) if file.is_file() else None
    for part in PARTS:
        files_of_part = sorted(file for file in (checkpoint / part).rglob("*") if file.is_file())
        digests = {str(file.relative_to(checkpoint)): digest_of(file) for file in files_of_part}
        hashes[part] = config_hash(digests) if digests else None
    return hashes


def verify(
    certificate: Path,
    config: PolicyIteration,
    plain: Mapping[str, Any],
    run: Path,
    iteration: int | None = None,
    exact: bool = False,
) -> Iterator[str]:
    """Holds the run in the folder `run` against its certificate, trains one iteration again from its stored
    answers, and yields what was found in words.

    All that `run` has is held against the certificate. Training needs `config.json`, `manifest.json`, and of
    the iteration its folder and the checkpoints before and behind it; `iteration` None draws one at random of
    those that have them. With `exact` the optimiser's state may be gone: it is made again from the episodes
    before. Raises ValueError where something isn't what the certificate is of, or the weights come out
    otherwise and no difference of the places explains it."""
    from treetune.lab.analyzers.replay import replay

    said, directory = read_record(certificate, REMEDY), ExperimentDirectory(run)
    now = _rests_on(directory, config)
    chain = config_hash({name: said[name] for name in now})
    links: dict[int, dict[str, Any]] = {}
    for link in said["iterations"]:
        number, stated = link.pop("iteration"), link.pop("chain")
        chain, links[number] = config_hash([chain, link]), link
        if chain != stated:
            raise ValueError(f"the chain of {certificate} breaks in iteration {number}: {REMEDY}")
    for name in ("configuration", "data"):
        if now[name] != said[name]:
            raise ValueError(f"the {name} is another than that of {certificate}: {said[name]}, {now[name]}")
    yield f"the same configuration and data; chain of {len(links)} iterations {chain}"
    restarts = exact or config.restart == "every_iteration"

    def can_be_tried(number: int) -> bool:
        folder, before = directory.iteration(number - 1), directory.checkpoint(number - 1)
        needed = [folder / name for name in ("trajectories.arrow", "episodes.arrow")]
        needed += [directory.checkpoint(number) / "policy", *([before / "policy"] if number > 1 else [])]
        needed += [before / "trainer"] if number > 1 and not restarts else []
        return all(path.exists() for path in needed)

    for number, link in links.items():
        for name, found in _hashes(directory, number - 1).items():
            if found not in (None, link[name]):
                raise ValueError(f"iteration {number}: {name} in {run} are not those of {certificate}")
    yield "the answers, episodes and checkpoints that are there are those of the certificate"
    there = list(filter(can_be_tried, links))
    if not there or iteration not in (None, *there):
        raise ValueError(
            f"of the iterations of {run} these can be trained again: {', '.join(map(str, there)) or 'none'}."
            " One needs its answers, the weights and the optimiser's state before it (`--exact` makes that"
            " again) and the weights behind it, which `checkpoints: {every: 1, keep_every: 1}` keeps"
        )
    iteration = iteration or random.SystemRandom().choice(there)
    here = replace(config, directory=str(run.parent), experiment_name=run.name)
    own = replay(run, iteration, here, plain, None, exact)["own"]
    ranks = int(said["bits_rest_on"].get("ranks", 1))
    elsewhere = describe_different_bits(said["bits_rest_on"], bits_rest_on(ranks, config.engines.policy))
    elsewhere += ["the code was another"] if now["source"] != said["source"] else []
    yield from (f"another place: {words}" for words in elsewhere)
    if own["same_as_run"]:
        yield f"iteration {iteration}, trained again: same bits"
        return
    parted = own["parted"]
    words = (
        f"iteration {iteration}, trained again: the first tensor that differs is {parted['tensor']}"
        f" ({parted['numbers']} of {parted['of']} numbers, by {parted['largest']:.2g} at most); the"
        f" difference of all weights is {parted['share']:.2g} of the length of the iteration's step"
    )
    if not elsewhere:
        raise ValueError(f"{words}, and this place is the run's")
    if parted["share"] > TOLERANCE:
        raise ValueError(f"{words}, which is more than the {TOLERANCE:g} that another place explains")
    yield f"{words}: within the {TOLERANCE:g} that another place explains"
