"""Writes a checkpoint's model card, and uploads the checkpoint and its card to the Hugging Face hub in one
commit.

The card describes the weights, how they were trained, and their evaluations. Uploading is tested against a
local stand-in for the hub only; nothing has been uploaded to the hub itself yet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune import __version__
from treetune.models.policy_files import CHECKPOINTS, experiment_of_checkpoint, resolve_policy
from treetune.store.checksums import CHECKSUMS_FILE, refuse_damaged
from treetune.view.experiment import StoredExperiment, name_of_task, read_experiment
from treetune.view.exports.evaluations import task_of_set
from treetune.view.templates import VIEW_FOLDER

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard

HUB_TAGS = ("treetune", "reinforcement-learning")
"""The hub's tags of each card, besides the types of the method's parts."""
FOLDER_PREFIX = "the folder "
"""The prefix of a base model's name if only its folder is known: "the folder rho-1b"."""
MOST_PARENTS = 8
"""The most earlier experiments through which an experiment is followed back to its base model."""

TOKEN_VARIABLE = "HF_TOKEN"
"""The environment variable with the hub's token. No other source is used, and messages never contain it."""

HUB_TIMEOUT_S = 120.0
"""The most seconds that the hub may take to answer, or to accept the next piece of a file."""

CARD_FILE = "README.md"
"""The name that the hub expects of a card's file."""

# A model's name on the hub: "owner/name".
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Licences:
    """Facts for a card that an experiment doesn't contain. A fact that isn't given is None.

    They are the licences of the weights and of the data, and the hub's name of a base model that was loaded
    from a folder. Example: `Licences(weights="apache-2.0", data="mit",
    base_model="microsoft/rho-math-1b-v0.1")`.
    """

    weights: str | None = None
    data: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Weights in Hugging Face format, after `iteration` finished iterations of an experiment."""

    policy: Path
    """The folder of the weights: ``checkpoints/0004/policy`` in the experiment's directory."""
    iteration: int
    experiment: StoredExperiment

    @property
    def evaluation_summaries(self) -> dict[str, Mapping[str, Any]]:
        """The summaries of the evaluations of these weights, by evaluation set."""
        summary_by_set = {}
        for label, summaries in self.experiment.evaluations.items():
            if self.iteration in summaries:
                summary_by_set[label] = summaries[self.iteration]
        return summary_by_set


def checkpoint_at(path: Path) -> Checkpoint:
    """Returns the checkpoint in a folder such as ``checkpoints/0004`` or ``checkpoints/last``.

    The path may also be that of the folder ``policy`` in it. Raises ValueError for any other path.
    """
    policy_path = path if path.name == "policy" else path / "policy"
    if policy_path.parent.parent.name != CHECKPOINTS:
        raise ValueError(
            f"{path} is not a checkpoint: give one of an experiment, such as experiments/quickstart/vineppo/"
            f"{CHECKPOINTS}/last"
        )
    policy = Path(resolve_policy(str(policy_path)))  # "last" is resolved to its iteration
    iteration_folder = policy.parent  # "checkpoints/0004" in the experiment's directory
    experiment = read_experiment(iteration_folder.parent.parent)
    return Checkpoint(policy, int(iteration_folder.name), experiment)


# The card


def make_model_card(checkpoint: Checkpoint, licences: Licences, name: str | None = None) -> ModelCard:
    """Returns a checkpoint's card. Its title is `name` or, without one, the experiment's name.

    The card is also made if it lacks facts; `describe_missing_facts` returns those.
    """
    from huggingface_hub import ModelCard, ModelCardData

    experiment = checkpoint.experiment
    name = name or experiment.name.replace("/", "-")
    base = base_model(experiment, licences)
    datasets: dict[str, None] = {}  # a dictionary as an ordered set
    for task in tasks_of_training(experiment):
        datasets |= dict.fromkeys(dataset for dataset, _ in hub_data(task))
    part_types = dict.fromkeys(part_type for part_type in experiment.method.values() if part_type != "none")
    card_data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=licences.weights,
        base_model=base if _HUB_NAME.fullmatch(base) else None,
        datasets=list(datasets) or None,
        tags=[*HUB_TAGS, *part_types],
        eval_results=_eval_results(checkpoint) or None,
    )
    planned = experiment.config.get("iterations")
    text = (VIEW_FOLDER / "templates" / "model_card.md").read_text()
    # A line that has only a Jinja block would leave an empty line, and the hub's library doesn't set
    # `trim_blocks`, which would remove it. So the ends of these lines are removed here.
    template = re.sub(r"^(\{%.*%\})\n", r"\1", text, flags=re.MULTILINE)
    template = template.rstrip("\n") + "\n\n"  # Jinja removes one of the line breaks at the end
    return ModelCard.from_template(
        card_data,
        template_str=template,
        name=name,
        iterations=f"{checkpoint.iteration} of {planned}" if planned else checkpoint.iteration,
        experiment=_as_inline_code(experiment.name),
        # A name is set as code, but not a description such as "random weights", which has spaces.
        base=f"`{_as_inline_code(base)}`" if " " not in base else base,
        results=_result_rows(checkpoint),
        method={part: _as_inline_code(choice) for part, choice in experiment.method.items()},
        data=_data_lines(experiment, licences),
        facts=_list_facts(experiment),
        # No text in the configuration can end the Markdown code block early: it would need a new line, and
        # JSON writes a line break in a text as \n.
        config=json.dumps(_without_folders(experiment.config), indent=1, ensure_ascii=False),
    )


def _as_inline_code(text: object) -> str:
    """Returns a text in which characters that end inline code or a table's cell in Markdown are replaced."""
    return str(text).replace("`", "'").replace("\n", " ").replace("|", "¦")


def _format_interval(summary: Mapping[str, Any]) -> str:
    """Formats the interval of pass@1: "0.463, 0.501"."""
    low, high = summary.get("ci_low"), summary.get("ci_high")
    return "not known" if low is None or high is None else f"{low:.3f}, {high:.3f}"


def _eval_results(checkpoint: Checkpoint) -> list[EvalResult]:
    """Returns the accuracies of these weights in the form that the hub reads."""
    from huggingface_hub import EvalResult

    results = []
    for label, summary in checkpoint.evaluation_summaries.items():
        task = task_of_set(checkpoint.experiment.config, label)
        datasets, task_name = hub_data(task), name_of_task(task) or "task"
        # The hub expects the name of one data set. If the task has none or several, the task's name is used.
        dataset, revision = datasets[0] if len(datasets) == 1 else (task_name, None)
        setting_names = ("samples", "temperature", "top_p")
        result = EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=f"{task_name} ({label})",
            dataset_split=summary.get("split"),
            dataset_revision=revision,
            metric_type="pass@1",
            metric_name=f"pass@1, 95 % interval [{_format_interval(summary)}]",
            metric_value=round(float(summary["pass_at_1"]), 4),
            metric_args={key: summary[key] for key in setting_names if key in summary},
        )
        results.append(result)
    return results


def _result_rows(checkpoint: Checkpoint) -> list[list[str]]:
    """Returns the rows of the card's table of results."""
    rows = []
    for label, summary in checkpoint.evaluation_summaries.items():
        accuracy = f"{summary['pass_at_1']:.3f} [{_format_interval(summary)}]"
        counts = [str(summary.get(key, "")) for key in ("n_problems", "samples", "temperature")]
        rows.append([label.replace("|", "¦"), accuracy, *counts])  # "|" would end the cell in Markdown
    return rows


def _list_facts(experiment: StoredExperiment) -> dict[str, str]:
    """Returns facts on how the weights were made. A fact that isn't recorded is an empty text."""
    manifest, environment = experiment.manifest, experiment.environment
    packages = environment.get("packages") or {}
    return {
        "code": f"commit `{manifest['commit']}`" if manifest.get("commit") else "",
        "configuration": f"hash `{manifest['config']}`" if manifest.get("config") else "",
        "seed": str(manifest.get("seed", experiment.config.get("seed", ""))),
        "ranks": str(environment.get("ranks", "")),
        "versions": ", ".join(f"{package} {version}" for package, version in packages.items()),
    }


def describe_missing_facts(checkpoint: Checkpoint, licences: Licences) -> list[str]:
    """Returns descriptions of the facts that users of the weights need, but that neither the experiment nor
    `licences` has. Each names the option that gives the fact: "the weights' licence (--license)"."""
    absent = []
    if licences.weights is None:
        absent.append("the weights' licence (--license)")
    if licences.data is None and has_foreign_data(checkpoint.experiment):
        absent.append("the licence of the data (--data-license)")
    base = base_model(checkpoint.experiment, licences)
    if base.startswith(FOLDER_PREFIX):  # only the name of a folder is known
        absent.append("the base model's name (--base-model)")
    return absent


def _data_lines(experiment: StoredExperiment, licences: Licences) -> list[str]:
    """Returns the lines of the card's section about data."""
    lines = []
    for number, task in enumerate(tasks_of_training(experiment)):
        if not task:  # its configuration can't be read
            continue
        # The first task is that of the experiment itself. The others belong to earlier experiments, from
        # which it started.
        when_trained = "" if number == 0 else " (in earlier training, which this one started from)"
        sources = [
            f"`{_as_inline_code(name)}`, revision `{_as_inline_code(revision)}`"
            for name, revision in hub_data(task)
        ]
        sources += [f"file `{_as_inline_code(Path(file).name)}`" for file in _files_of_task(task)]
        if sources:
            lines += [source + when_trained for source in sources]
        else:
            task_name = _as_inline_code(name_of_task(task) or "task")
            lines.append(f"The task `{task_name}`{when_trained} names no data set or file.")
    if _began_from_unknown(experiment):
        lines.append("Data of still earlier training is unknown: its experiment can't be read any more.")
    if has_foreign_data(experiment):
        lines.append(f"Licence of the data: {licences.data or 'not stated'}")
    for split, fingerprint in (experiment.manifest.get("data") or {}).items():
        if fingerprint:
            lines.append(f"Fingerprint of the {split} split: `{fingerprint}`")
    return lines


def _without_folders(config: Mapping[str, Any]) -> Any:
    """Returns the configuration without the names of this machine's folders.

    Absolute paths are shortened to the experiment or the file that they name: "/scratch/sft/checkpoints/last"
    becomes "…/sft/checkpoints/last". `directory`, the folder of experiments, is left out.
    """

    def shorten_paths(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shorten_paths(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [shorten_paths(item) for item in value]
        if not (isinstance(value, str) and value.startswith(("/", "~"))):
            return value
        parts = Path(value).parts
        # `first_kept` is the position of the first part that is kept: the experiment's folder, which contains
        # "checkpoints", or else the last part. Part 0 is "/" or begins with "~", and is never kept.
        first_kept = parts.index(CHECKPOINTS) - 1 if CHECKPOINTS in parts else len(parts) - 1
        return "/".join(["…", *parts[max(1, first_kept) :]])

    return shorten_paths({key: value for key, value in config.items() if key != "directory"})


# Where weights and data come from


def base_model(experiment: StoredExperiment, licences: Licences) -> str:
    """Returns the name or a description of the model that training started from.

    If an experiment started from another's checkpoint, it is the model that the earliest one started from.
    Examples: "microsoft/rho-math-1b-v0.1", "the folder rho-1b", "random weights".
    """
    if licences.base_model:
        return licences.base_model
    chain = _chain_of_experiments(experiment)
    start = _start_model(chain[-1])
    if start is None:
        return "random weights"
    if len(chain) > MOST_PARENTS:  # the chain may go on: `_chain_of_experiments` doesn't follow it further
        return "a chain of experiments"
    is_folder = Path(start).is_dir() or not _HUB_NAME.fullmatch(start)
    return FOLDER_PREFIX + Path(start).name if is_folder else start


def tasks_of_training(experiment: StoredExperiment) -> list[Mapping[str, Any]]:
    """Returns the configurations of the tasks that the weights were trained on.

    The first is the experiment's task. Those of earlier experiments, from which it started, follow. A task
    is {} if its configuration can't be read.
    """
    return [parent.config.get("task") or {} for parent in _chain_of_experiments(experiment)]


def hub_data(task: Mapping[str, Any] | None) -> list[tuple[str, str | None]]:
    """Returns (name, revision) for each of the hub's data sets that a task's configuration names."""
    datasets = set()
    for part in _objects_within(task):
        if part.get("type") == "hub" and isinstance(part.get("name"), str):
            datasets.add((part["name"], part.get("revision")))
    return sorted(datasets, key=str)  # as texts, because a revision may be None, which can't be compared


def has_foreign_data(experiment: StoredExperiment) -> bool:
    """Returns whether the weights were trained on files or on data sets of the hub, or may have been.

    They may have been if training began from the weights of an earlier experiment that can't be read.
    """
    names_data = any(hub_data(task) or _files_of_task(task) for task in tasks_of_training(experiment))
    return names_data or _began_from_unknown(experiment)


def _chain_of_experiments(experiment: StoredExperiment) -> list[StoredExperiment]:
    """Returns the experiment, then the experiment whose checkpoint it started from, and so on.

    The chain ends at an experiment that can't be read, and in any case after MOST_PARENTS earlier ones.
    """
    chain = [experiment]
    while len(chain) <= MOST_PARENTS:
        start = _start_model(chain[-1])
        parent = None if start is None else experiment_of_checkpoint(Path(start))
        if parent is None:
            break
        try:
            chain.append(read_experiment(parent))
        except ValueError:  # it was deleted, or is on another machine
            break
    return chain


def _start_model(experiment: StoredExperiment) -> str | None:
    """Returns the name or path of the weights that training started from; None for random weights."""
    start = (experiment.config.get("model") or {}).get("name_or_path")
    return start if isinstance(start, str) else None


def _began_from_unknown(experiment: StoredExperiment) -> bool:
    """Returns whether a part of the training is unknown.

    The chain is the experiment, the experiment whose checkpoint it started from, and so on. A part is unknown
    if the earliest experiment of the chain has no readable configuration, or started from a checkpoint of an
    experiment that the chain doesn't contain.
    """
    earliest = _chain_of_experiments(experiment)[-1]
    start = _start_model(earliest)
    return not earliest.config or (start is not None and experiment_of_checkpoint(Path(start)) is not None)


def _objects_within(value: object) -> Iterator[Mapping[str, Any]]:
    """Yields all objects (dictionaries) in a value of a configuration, an outer object before those in it."""
    members: Iterable[object] = ()
    if isinstance(value, Mapping):
        yield value
        members = value.values()
    elif isinstance(value, list | tuple):
        members = value
    for member in members:
        yield from _objects_within(member)


def _files_of_task(task: Mapping[str, Any]) -> list[str]:
    """Returns the files and folders with problems that a task's configuration names."""
    files: dict[str, None] = {}  # a dictionary as an ordered set
    for part in _objects_within(task):
        if part.get("type") == "disk":
            # For a saved data set, only `path` is a path: `train` is the name of a split in it.
            files[str(part.get("path"))] = None
        elif part.get("type") != "hub":
            for key in ("train", "validation", "test", "path", "files"):
                files |= dict.fromkeys(_file_names(part.get(key)))
    return list(files)


def _file_names(value: object) -> list[str]:
    """Returns the texts in a value that look like paths. The value may be a text, a list or an object."""
    endings = (".jsonl", ".json", ".parquet", ".arrow")
    names: Iterable[object] = [value]
    if isinstance(value, Mapping):
        names = value.values()
    elif isinstance(value, list):
        names = value
    return [name for name in names if isinstance(name, str) and ("/" in name or name.endswith(endings))]


# Uploading


@dataclass(frozen=True)
class Parcel:
    """The content of a commit."""

    repository: str
    """The repository: "owner/name"."""
    card: str
    """The text of the card."""
    files: Mapping[str, Path]
    """The files of the weights, by their names in the repository."""

    def lines(self) -> Iterator[str]:
        """Yields a line for the card and for each file, with its size: "config.json  612 bytes"."""
        yield f"{CARD_FILE}  {len(self.card.encode()):,} bytes"
        for name, path in self.files.items():
            yield f"{name}  {path.stat().st_size:,} bytes"


def make_parcel(checkpoint: Checkpoint, repository: str, licences: Licences) -> Parcel:
    """Returns the card and the files to upload.

    Raises ValueError for an invalid repository name, for damaged weights, and for a card that lacks facts.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not a repository name (owner/name): {error}") from error
    absent = describe_missing_facts(checkpoint, licences)
    if absent:
        raise ValueError(f"the model card of {checkpoint.policy.parent} needs {', '.join(absent)}")
    refuse_damaged(checkpoint.policy, "take another checkpoint")
    # The file of checksums is left out, because only treetune reads it. A card in the folder is left out,
    # because the new card takes its place.
    files = {
        path.relative_to(checkpoint.policy).as_posix(): path
        for path in sorted(checkpoint.policy.rglob("*"))
        if path.is_file() and path.name not in (CHECKSUMS_FILE, CARD_FILE)
    }
    card = make_model_card(checkpoint, licences, repository.rpartition("/")[2])
    return Parcel(repository, str(card), files)


def push_parcel(parcel: Parcel, *, private: bool) -> str:
    """Creates the repository if it doesn't exist, commits the parcel to it, and returns the commit's address.

    Raises ValueError if the environment has no token, and RuntimeError if the hub refuses or can't be
    reached.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, set_client_factory
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils._http import default_client_factory

    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set: set it to a token with write access"
            " (huggingface.co/settings/tokens)"
        )

    def make_client() -> Any:
        """Returns the library's default client with a timeout, without which it would wait forever."""
        default_client = default_client_factory()
        default_client.timeout = HUB_TIMEOUT_S
        return default_client

    set_client_factory(make_client)
    api = HfApi(token=token, library_name="treetune", library_version=__version__)
    operations: list[Any] = [CommitOperationAdd(CARD_FILE, parcel.card.encode())]
    operations += [CommitOperationAdd(name, path) for name, path in parcel.files.items()]
    try:
        api.create_repo(parcel.repository, private=private, exist_ok=True)
        commit = api.create_commit(
            parcel.repository, operations, commit_message="Weights and model card from treetune"
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, RuntimeError, OSError) as error:
        # The error may contain an address with the token.
        reason = f"{type(error).__name__}: {error}".replace(token, "…")
        raise RuntimeError(
            f"uploading {parcel.repository} to {api.endpoint} failed: {reason}. Run the same command to try"
            " again; files that were uploaded already are not sent twice"
        ) from None  # a traceback with the causing error could show the token
    return commit.commit_url
