"""A checkpoint for the Hugging Face hub: its model card (what the weights are, how they were made, what was
measured), and sending both in one commit.

Sending was only tried against a stand-in on this machine: no weights have been sent to the hub itself yet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune import __version__
from treetune.models.policy_files import CHECKPOINTS, resolve_policy
from treetune.store.checksums import SUMS, refuse_damaged
from treetune.view.experiment import StoredExperiment, name_of_task, read_experiment
from treetune.view.exports.evaluations import task_of_set
from treetune.view.templates import FOLDER as TEMPLATES

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

TAGS = ("treetune", "reinforcement-learning")
FOLDER = "the folder "
"""Begins the name of a base model that no hub has."""
MOST_STARTS = 8
"""Experiments that are followed back to the model which all began with."""

TOKEN = "HF_TOKEN"
"""The variable of the environment that has the token. Nothing else is asked, and nobody is told."""

SILENCE_S = 120.0
"""How long the hub may take to answer, or to take the next piece of a file."""

CARD = "README.md"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Licences:
    """Facts that nobody can read from an experiment: the licence of the weights, that of the data, and the
    base model's name where it lay in a folder. Licences are names such as ``mit`` or ``apache-2.0``."""

    weights: str | None = None
    data: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Weights in Hugging Face format, after `iteration` finished iterations of an experiment."""

    policy: Path
    iteration: int
    experiment: StoredExperiment

    @property
    def measured(self) -> dict[str, Mapping[str, Any]]:
        """The summaries of the sets that were measured on these weights."""
        evaluations = self.experiment.evaluations.items()
        return {label: own[self.iteration] for label, own in evaluations if self.iteration in own}


def checkpoint_at(path: Path) -> Checkpoint:
    """Reads a checkpoint's folder (``checkpoints/0004`` or ``checkpoints/last``), or the ``policy`` in it.

    Raises ValueError for what is none.
    """
    named = path if path.name == "policy" else path / "policy"
    if CHECKPOINTS not in named.parts or not named.parent.parent.name == CHECKPOINTS:
        raise ValueError(
            f"{path} is no checkpoint: give an experiment's, such as experiments/quickstart/vineppo/"
            f"{CHECKPOINTS}/last"
        )
    policy = Path(resolve_policy(str(named)))
    experiment = policy.parent.parent.parent
    return Checkpoint(policy, int(policy.parent.name), read_experiment(experiment))


# The card


def model_card(checkpoint: Checkpoint, licences: Licences, name: str | None = None) -> ModelCard:
    """Returns the card, under the repository's name or the experiment's. `missing` says what it lacks."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    def code(text: object) -> str:
        """Returns what may stand between backticks, also in a table."""
        return str(text).replace("`", "'").replace("\n", " ").replace("|", "¦")

    experiment, manifest, bits = (
        checkpoint.experiment,
        checkpoint.experiment.manifest,
        checkpoint.experiment.bits_rest_on,
    )
    name = name or experiment.name.replace("/", "-")
    base = base_model(experiment, licences)
    results, rows = [], []
    for label, summary in checkpoint.measured.items():
        task = task_of_set(experiment.config, label)
        data, kind = hub_data(task), name_of_task(task) or "task"
        low, high = summary.get("ci_low"), summary.get("ci_high")
        bounds = "not known" if low is None or high is None else f"{low:.3f}, {high:.3f}"
        settings = ("samples", "temperature", "top_p")
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=data[0][0] if len(data) == 1 else kind,
                dataset_name=f"{kind} ({label})",
                dataset_split=summary.get("split"),
                dataset_revision=data[0][1] if len(data) == 1 else None,
                metric_type="pass@1",
                metric_name=f"pass@1, 95 % interval [{bounds}]",
                metric_value=round(float(summary["pass_at_1"]), 4),
                metric_args={key: summary[key] for key in settings if key in summary},
            )
        )
        counts = [str(summary.get(key, "")) for key in ("n_problems", "samples", "temperature")]
        rows.append([label.replace("|", "¦"), f"{summary['pass_at_1']:.3f} [{bounds}]", *counts])
    card_data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=licences.weights,
        base_model=base if _HUB_NAME.fullmatch(base) else None,
        datasets=list(dict.fromkeys(name for one in tasks(experiment) for name, _ in hub_data(one))) or None,
        tags=[*TAGS, *dict.fromkeys(one for one in experiment.method.values() if one != "none")],
        eval_results=results or None,
    )
    planned = experiment.config.get("iterations")
    text = (TEMPLATES / "templates" / "model_card.md").read_text()
    # A line of the template with a block alone leaves nothing behind.
    template = re.sub(r"^(\{%.*%\})\n", r"\1", text, flags=re.MULTILINE).rstrip("\n") + "\n\n"
    return ModelCard.from_template(
        card_data,
        template_str=template,
        name=name,
        iterations=f"{checkpoint.iteration} of {planned}" if planned else checkpoint.iteration,
        experiment=code(experiment.name),
        base=f"`{code(base)}`" if " " not in base else base,
        results=rows,
        method={part: code(choice) for part, choice in experiment.method.items()},
        data=_data_lines(experiment, licences, code),
        facts={
            "code": f"commit `{manifest['commit']}`" if manifest.get("commit") else "",
            "configuration": f"hash `{manifest['config']}`" if manifest.get("config") else "",
            "seed": str(manifest.get("seed", experiment.config.get("seed", ""))),
            "ranks": str(bits.get("ranks", "")),
            "versions": ", ".join(
                f"{one} {version}" for one, version in (bits.get("packages") or {}).items()
            ),
        },
        # A text can't end the code block before its end: JSON has no line break within one.
        config=json.dumps(_without_folders(experiment.config), indent=1, ensure_ascii=False),
    )


def missing(checkpoint: Checkpoint, licences: Licences) -> list[str]:
    """Returns the facts that somebody else must know before they use the weights, and nobody has said."""
    lacks = []
    if licences.weights is None:
        lacks.append("the weights' licence (--license)")
    if licences.data is None and has_foreign_data(checkpoint.experiment):
        lacks.append("the licence of the data (--data-license)")
    if base_model(checkpoint.experiment, licences).startswith(FOLDER):
        lacks.append("the base model's name (--base-model)")
    return lacks


def _data_lines(experiment: StoredExperiment, licences: Licences, code: Any) -> list[str]:
    lines = []
    for number, task in enumerate(tasks(experiment)):
        when = "" if number == 0 else " (of the training that this one began from)"
        named = [f"`{code(name)}`, revision `{code(revision)}`" for name, revision in hub_data(task)]
        named += [f"file `{code(Path(one).name)}`" for one in _files(task)]
        none = f"The task `{code(name_of_task(task) or 'task')}`{when} names no data set or file."
        lines += [f"{one}{when}" for one in named] or ([none] if task else [])
    if _began_from_unknown(experiment):
        lines.append("What was trained on before that can no longer be read.")
    if has_foreign_data(experiment):
        lines.append(f"Licence of the data: {licences.data or 'not stated'}")
    prints = experiment.manifest.get("data") or {}
    return [*lines, *(f"Fingerprint of the {split} split: `{one}`" for split, one in prints.items() if one)]


def _without_folders(config: Mapping[str, Any]) -> Any:
    """Returns the configuration with paths that begin where an experiment or a file does, and without the
    folder of experiments, which says nothing of what was computed."""

    def shortened(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shortened(own) for key, own in value.items()}
        if isinstance(value, list | tuple):
            return [shortened(own) for own in value]
        if not (isinstance(value, str) and value.startswith(("/", "~"))):
            return value
        parts = Path(value).parts
        kept = parts.index(CHECKPOINTS) - 1 if CHECKPOINTS in parts else len(parts) - 1
        return "/".join(["…", *parts[max(1, kept) :]])

    return shortened({key: value for key, value in config.items() if key != "directory"})


# Where weights and data come from


def base_model(experiment: StoredExperiment, licences: Licences) -> str:
    """Returns the model that training began from, through the experiments whose checkpoints it began from."""
    if licences.base_model:
        return licences.base_model
    chain = _chain(experiment)
    start = _start(chain[-1])
    if start is None:
        return "random weights"
    if len(chain) > MOST_STARTS:
        return "a chain of experiments"
    return start if _HUB_NAME.fullmatch(start) and not Path(start).is_dir() else FOLDER + Path(start).name


def tasks(experiment: StoredExperiment) -> list[Mapping[str, Any]]:
    """Returns the tasks that its weights were trained on: its own, and those of the experiments that it began
    from."""
    return [one.config.get("task") or {} for one in _chain(experiment)]


def hub_data(task: Mapping[str, Any] | None) -> list[tuple[str, str | None]]:
    """Returns the data sets of the hub that a task's configuration names, with their revisions."""
    named = {
        (one["name"], one.get("revision"))
        for one in _objects(task)
        if one.get("type") == "hub" and isinstance(one.get("name"), str)
    }
    return sorted(named, key=str)


def has_foreign_data(experiment: StoredExperiment) -> bool:
    """Returns whether a task that its weights were trained on names files or data sets, or can't be read any
    more."""
    named = any(hub_data(one) or _files(one) for one in tasks(experiment))
    return named or _began_from_unknown(experiment)


def _chain(experiment: StoredExperiment) -> list[StoredExperiment]:
    """Returns it, and those whose checkpoints training began from, as far back as they can be read."""
    chain = [experiment]
    while len(chain) <= MOST_STARTS and (start := _start(chain[-1])) is not None:
        parts = Path(start).parts
        if CHECKPOINTS not in parts:
            break
        try:
            chain.append(read_experiment(Path(*parts[: parts.index(CHECKPOINTS)])))
        except ValueError:
            break
    return chain


def _start(experiment: StoredExperiment) -> str | None:
    """Returns the weights that training began from; None: random ones."""
    start = (experiment.config.get("model") or {}).get("name_or_path")
    return start if isinstance(start, str) else None


def _began_from_unknown(experiment: StoredExperiment) -> bool:
    """Returns whether the chain ends at a checkpoint whose experiment, or its configuration, was not read."""
    *_, first = _chain(experiment)
    start = _start(first)
    return not first.config or (start is not None and CHECKPOINTS in Path(start).parts)


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Yields all objects in a value of a configuration, the outer ones first."""
    if isinstance(value, Mapping):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for own in inner:
        yield from _objects(own)


def _files(task: Mapping[str, Any]) -> list[str]:
    """Returns the files and folders of rows that a task names."""
    files = dict[str, None]()
    endings = (".jsonl", ".json", ".parquet", ".arrow")
    for one in _objects(task):
        if one.get("type") == "disk":  # its path may be any word; its `train` names a split
            files[str(one.get("path"))] = None
        elif one.get("type") != "hub":
            for key in ("train", "validation", "test", "path", "files"):
                own = one.get(key)
                names = own.values() if isinstance(own, Mapping) else own if isinstance(own, list) else [own]
                for name in names:
                    if isinstance(name, str) and ("/" in name or name.endswith(endings)):
                        files[name] = None
    return list(files)


# Sending


@dataclass(frozen=True)
class Parcel:
    """The content of a commit: the card's text, and files by their names in the repository."""

    repository: str
    card: str
    files: Mapping[str, Path]

    def lines(self) -> Iterator[str]:
        """Yields each file with its size in bytes."""
        yield f"{CARD}  {len(self.card.encode()):,} bytes"
        for name, path in self.files.items():
            yield f"{name}  {path.stat().st_size:,} bytes"


def parcel_of(checkpoint: Checkpoint, repository: str, licences: Licences) -> Parcel:
    """Collects what is sent. Raises ValueError for a name that is none, for weights that are damaged, and for
    a card that lacks what others must know."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no repository's name (owner/name): {error}") from error
    if lacks := missing(checkpoint, licences):
        raise ValueError(f"the model card of {checkpoint.policy.parent} lacks {', '.join(lacks)}: say it")
    refuse_damaged(checkpoint.policy, "take another checkpoint")
    files = {
        path.relative_to(checkpoint.policy).as_posix(): path
        for path in sorted(checkpoint.policy.rglob("*"))
        if path.is_file() and path.name not in (SUMS, CARD)
    }
    card = model_card(checkpoint, licences, repository.rpartition("/")[2])
    return Parcel(repository, str(card), files)


def push(parcel: Parcel, *, private: bool) -> str:
    """Makes the repository where there is none, commits to it, and returns the commit's address.

    Raises ValueError without a token, and RuntimeError where the hub refuses or can't be reached.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, set_client_factory
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils._http import default_client_factory

    token = os.environ.get(TOKEN)
    if not token:
        raise ValueError(
            f"{TOKEN} is not set: put a token that may write into the environment"
            " (huggingface.co/settings/tokens)"
        )

    def client() -> Any:
        """Returns the library's own, which otherwise waits for ever."""
        made = default_client_factory()
        made.timeout = SILENCE_S
        return made

    set_client_factory(client)
    api = HfApi(token=token, library_name="treetune", library_version=__version__)
    sent: list[Any] = [CommitOperationAdd(CARD, parcel.card.encode())]
    sent += [CommitOperationAdd(name, path) for name, path in parcel.files.items()]
    try:
        api.create_repo(parcel.repository, private=private, exist_ok=True)
        commit = api.create_commit(
            parcel.repository, sent, commit_message="Weights and model card from treetune"
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, RuntimeError, OSError) as error:
        words = f"{type(error).__name__}: {error}".replace(token, "…")
        raise RuntimeError(
            f"{api.endpoint} didn't take {parcel.repository}: {words}. The same command tries again; what is"
            " there already is not sent twice"
        ) from None
    return commit.commit_url
