"""The model card of a checkpoint: what the weights are, how they were made, and what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.models.policy_files import CHECKPOINTS, resolve_policy
from treetune_view.exports.evaluations import task_of_set
from treetune_view.report.experiment import Experiment, read_experiment

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard

TAGS = ("treetune", "reinforcement-learning")
FOLDER = "the folder "
"""Begins the name of a base model that no hub has."""
MOST_STARTS = 8
"""Experiments that are followed back to the model which all began with."""

LOCAL = ("directory",)
"""Keys of a configuration that say where files lay, and nothing of what was computed."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Licences:
    """What nobody can read from an experiment: of the weights, of the data, and the base model's name where
    it lay in a folder. Licences are names such as ``mit`` or ``apache-2.0``."""

    weights: str | None = None
    data: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Weights in Hugging Face format, after `iteration` finished iterations of an experiment."""

    policy: Path
    iteration: int
    experiment: Experiment


def checkpoint_at(path: Path) -> Checkpoint:
    """A checkpoint's folder (``checkpoints/0004`` or ``checkpoints/last``), or the ``policy`` in it.

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


def model_card(checkpoint: Checkpoint, licences: Licences, name: str | None = None) -> ModelCard:
    """The card, under the repository's name or the experiment's. `missing` says what it lacks."""
    from huggingface_hub import ModelCard, ModelCardData

    experiment = checkpoint.experiment
    name = name or experiment.name.replace("/", "-")
    results = list(eval_results(checkpoint))
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=licences.weights,
        base_model=_base_on_the_hub(experiment, licences),
        datasets=list(dict.fromkeys(name for one in tasks(experiment) for name, _ in hub_data(one))) or None,
        tags=[*TAGS, *dict.fromkeys(one for one in experiment.method.values() if one != "none")],
        eval_results=results or None,
    )
    text = "\n\n".join(part for part in _parts(checkpoint, licences, name) if part)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


def missing(checkpoint: Checkpoint, licences: Licences) -> list[str]:
    """What somebody else must know before they use the weights, and nobody has said."""
    found = []
    if licences.weights is None:
        found.append("the weights' licence (--license)")
    if licences.data is None and has_foreign_data(checkpoint.experiment):
        found.append("the licence of the data (--data-license)")
    if base_model(checkpoint.experiment, licences).startswith(FOLDER):
        found.append("the base model's name (--base-model)")
    return found


def eval_results(checkpoint: Checkpoint) -> Iterator[EvalResult]:
    """pass@1 of each set that was measured on these weights, with the bounds beside it."""
    from huggingface_hub import EvalResult

    for label, summary in _measured(checkpoint):
        task = task_of_set(checkpoint.experiment.config, label)
        data, kind = hub_data(task), str(task.get("type", "task"))
        yield EvalResult(
            task_type="text-generation",
            dataset_type=data[0][0] if len(data) == 1 else kind,
            dataset_name=f"{kind} ({label})",
            dataset_split=summary.get("split"),
            dataset_revision=data[0][1] if len(data) == 1 else None,
            metric_type="pass@1",
            metric_name=f"pass@1, 95 % interval [{_bounds(summary)}]",
            metric_value=round(float(summary["pass_at_1"]), 4),
            metric_args={key: summary[key] for key in ("samples", "temperature", "top_p") if key in summary},
        )


def base_model(experiment: Experiment, licences: Licences) -> str:
    """What training began from, through the experiments whose checkpoints it began from."""
    if licences.base_model:
        return licences.base_model
    chain = _chain(experiment)
    start = _start(chain[-1])
    if start is None:
        return "random weights"
    if len(chain) > MOST_STARTS:
        return "a chain of experiments"
    return start if _HUB_NAME.fullmatch(start) and not Path(start).is_dir() else FOLDER + Path(start).name


def tasks(experiment: Experiment) -> list[Mapping[str, Any]]:
    """What its weights were trained on: its own task, and those of the experiments that it began from."""
    return [one.config.get("task") or {} for one in _chain(experiment)]


def hub_data(task: Mapping[str, Any] | None) -> list[tuple[str, str | None]]:
    """Data sets of the hub that a task's configuration names, with their revisions."""
    found = {
        (one["name"], one.get("revision"))
        for one in _objects(task)
        if one.get("type") == "hub" and isinstance(one.get("name"), str)
    }
    return sorted(found, key=str)


def has_foreign_data(experiment: Experiment) -> bool:
    """Whether a task that its weights were trained on names files or data sets, or can't be read any more."""
    named = any(hub_data(one) or _files(one) for one in tasks(experiment))
    return named or _began_from_unknown(experiment)


# Words


def _parts(checkpoint: Checkpoint, licences: Licences, name: str) -> Iterator[str]:
    experiment, config = checkpoint.experiment, checkpoint.experiment.config
    of = f" of {experiment.planned_iterations}" if experiment.planned_iterations else ""
    yield f"# {name}"
    yield (
        f"Weights after {checkpoint.iteration}{of} iterations of `{_code(experiment.name)}`, trained with"
        f" treetune from {_quoted(base_model(experiment, licences))}."
    )
    yield _results(checkpoint)
    yield _table(
        "## Method",
        ("part", "choice"),
        [(key, f"`{_code(value)}`") for key, value in experiment.method.items()],
    )
    yield _data(experiment, licences)
    yield _making(checkpoint)
    yield (
        "<details><summary>Configuration, as evaluated</summary>\n\n```json\n"
        f"{_without_folders(config)}\n```\n\n</details>"
    )


def _results(checkpoint: Checkpoint) -> str:
    rows = [
        (
            label,
            f"{summary['pass_at_1']:.3f} [{_bounds(summary)}]",
            str(summary.get("n_problems", "")),
            str(summary.get("samples", "")),
            str(summary.get("temperature", "")),
        )
        for label, summary in _measured(checkpoint)
    ]
    if not rows:
        return "## Results\n\nNothing was measured on these weights."
    heads = ("set", "pass@1 [95 % interval over problems]", "problems", "samples each", "temperature")
    return _table("## Results", heads, rows)


def _measured(checkpoint: Checkpoint) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for label, summaries in checkpoint.experiment.evaluations.items():
        if checkpoint.iteration in summaries:
            yield label, summaries[checkpoint.iteration]


def _bounds(summary: Mapping[str, Any]) -> str:
    low, high = summary.get("ci_low"), summary.get("ci_high")
    return "not known" if low is None or high is None else f"{low:.3f}, {high:.3f}"


def _data(experiment: Experiment, licences: Licences) -> str:
    lines = []
    for number, task in enumerate(tasks(experiment)):
        when = "" if number == 0 else " (of the training that this one began from)"
        named = [f"`{_code(name)}`, revision `{_code(str(revision))}`" for name, revision in hub_data(task)]
        named += [f"file `{_code(Path(one).name)}`" for one in _files(task)]
        kind = _code(str(task.get("type", "task")))
        none = f"* The task `{kind}`{when} names no data set or file."
        lines += [f"* {one}{when}" for one in named] or ([none] if task else [])
    if _began_from_unknown(experiment):
        lines.append("* What was trained on before that can no longer be read.")
    if has_foreign_data(experiment):
        lines.append(f"* Licence of the data: {licences.data or 'not stated'}")
    prints = experiment.manifest.get("data") or {}
    lines += [f"* Fingerprint of the {split} split: `{one}`" for split, one in prints.items() if one]
    return "\n".join(["## Data", "", *lines])


def _making(checkpoint: Checkpoint) -> str:
    manifest = checkpoint.experiment.manifest
    bits = manifest.get("bits_rest_on") or manifest
    packages = ", ".join(f"{name} {version}" for name, version in (bits.get("packages") or {}).items())
    facts = {
        "code": f"commit `{manifest['commit']}`" if manifest.get("commit") else "",
        "configuration": f"hash `{manifest['config']}`" if manifest.get("config") else "",
        "seed": str(manifest.get("seed", checkpoint.experiment.config.get("seed", ""))),
        "ranks": str(bits.get("ranks", "")),
        "versions": packages,
    }
    lines = [f"* {key}: {value}" for key, value in facts.items() if value]
    steps = (
        "The configuration below, saved as `config.jsonnet` in treetune's folder, trains it again; folders of"
        " the machine that it was trained on stand there as `…`.\n\n"
        "```bash\nCONFIGSTR=config.jsonnet ./run.sh\n```"
    )
    return "\n".join(["## How it was made", "", *lines, "", steps])


def _without_folders(config: Mapping[str, Any]) -> str:
    """JSON in which paths begin where an experiment or a file does."""

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

    kept = {key: value for key, value in config.items() if key not in LOCAL}
    # A text can't end the code block before its end: JSON has no line break within one.
    return json.dumps(shortened(kept), indent=1, ensure_ascii=False)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        [title, "", *(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in lines)]
    )


def _code(text: str) -> str:
    """What may stand between backticks."""
    return text.replace("`", "'").replace("\n", " ")


def _quoted(base: str) -> str:
    return f"`{_code(base)}`" if " " not in base else base


# Where things come from


def _base_on_the_hub(experiment: Experiment, licences: Licences) -> str | None:
    base = base_model(experiment, licences)
    return base if _HUB_NAME.fullmatch(base) else None


def _chain(experiment: Experiment) -> list[Experiment]:
    """It, and those whose checkpoints training began from, as far back as they can be read."""
    chain = [experiment]
    while len(chain) <= MOST_STARTS and (start := _start(chain[-1])) is not None:
        before = _experiment_of(start)
        if before is None:
            break
        chain.append(before)
    return chain


def _start(experiment: Experiment) -> str | None:
    """The weights that training began from; None: random ones."""
    start = (experiment.config.get("model") or {}).get("name_or_path")
    return start if isinstance(start, str) else None


def _began_from_unknown(experiment: Experiment) -> bool:
    """Whether the chain ends at a checkpoint whose experiment, or its configuration, was not read."""
    *_, first = _chain(experiment)
    start = _start(first)
    return not first.config or (start is not None and CHECKPOINTS in Path(start).parts)


def _experiment_of(start: str) -> Experiment | None:
    """The experiment whose checkpoint a path names, where that can still be read."""
    parts = Path(start).parts
    if CHECKPOINTS not in parts:
        return None
    try:
        return read_experiment(Path(*parts[: parts.index(CHECKPOINTS)]))
    except ValueError:
        return None


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """All objects in a value of a configuration, the outer ones first."""
    if isinstance(value, Mapping):
        yield value
        for own in value.values():
            yield from _objects(own)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _objects(own)


def _files(task: Mapping[str, Any]) -> list[str]:
    """Files and folders of rows that a task names."""
    found = dict[str, None]()
    for one in _objects(task):
        if one.get("type") == "disk":  # its path may be any word; its `train` names a split
            found[str(one.get("path"))] = None
            continue
        for key in ("train", "validation", "test", "path", "files"):
            own = one.get(key)
            names = (
                own if isinstance(own, list) else list(own.values()) if isinstance(own, Mapping) else [own]
            )
            if one.get("type") != "hub":
                found |= dict.fromkeys(name for name in names if isinstance(name, str) and _is_file(name))
    return list(found)


def _is_file(name: str) -> bool:
    return "/" in name or name.endswith((".jsonl", ".json", ".parquet", ".arrow"))
