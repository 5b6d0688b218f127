"""Writes an evaluation as a log of Inspect (UK AI Security Institute, inspect.aisi.org.uk), format version 2.

An ``.eval`` file is a zip archive of ``header.json``, ``summaries.json`` and a file for each sample; a
``.json`` file has the same content in one object.

    treetune                    Inspect
    problem                     sample
    answer number 3 to it       epoch 4 of the sample
    reward                      value of the score
    everything else             metadata

Writing the same evaluation again gives the same bytes: ids derive from the evaluation, and times from its
files.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from treetune.store.files import write_atomically
from treetune.view.experiment import name_of_task
from treetune.view.exports.evaluations import MeasuredSet, task_of_set
from treetune.view.text import make_writable

INSPECT_VERSION = 2
"""The version of Inspect's format."""

LONGEST_PROMPT = 2000
"""The most characters of a prompt in the list of samples."""

STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""Inspect's name for each of treetune's finish reasons."""

MAPPED_FIELDS = ("problem", "sample", "prompt", "text", "gold", "reward", "extracted")
"""The fields of an answer that have a counterpart in the log; the others become metadata."""

SUMMARY_FIELDS = ("id", "epoch", "target", "metadata", "scores", "model_usage", "uuid")
"""The fields of a sample that its entry in the list of samples (``summaries.json``) has as well."""

SUMMARY_NAMES = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""The numbers of an evaluation's summary that become metrics, in addition to pass@k."""


def write_inspect_log(evaluation: MeasuredSet, path: Path) -> int:
    """Writes an ``.eval`` or ``.json`` file, by the suffix of `path`, and returns the number of its answers.

    If the writing fails, no incomplete file is left.
    """
    if path.suffix == ".eval":
        with write_atomically(path, "wb") as file:
            return _write_archive(evaluation, file)
    count = 0
    with write_atomically(path) as file:
        # Samples are appended to the header's object one by one, because all of them may not fit in memory.
        header = json.dumps(_make_header(evaluation), ensure_ascii=False, allow_nan=False)
        file.write(header.removesuffix("}") + ', "samples": [')
        for count, sample in enumerate(_make_samples(evaluation), 1):
            text = json.dumps(sample, ensure_ascii=False, allow_nan=False)
            file.write(("," if count > 1 else "") + "\n" + text)
        file.write("\n]}\n")
    return count


def _write_archive(evaluation: MeasuredSet, file: IO[bytes]) -> int:
    """Writes an ``.eval`` file, which is a zip archive, and returns the number of its samples.

    All members of the archive get the time of the evaluation instead of the present time, so that exporting
    again gives the same bytes.
    """
    # (year, month, day, hour, minute, second), as zip archives have it. They have no years before 1980.
    measured_at = datetime.fromtimestamp(evaluation.measured_at, UTC).timetuple()[:6]
    member_time = max(measured_at, (1980, 1, 1, 0, 0, 0))
    summaries = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:

        def put(name: str, value: object) -> None:
            """Adds a member with a value as JSON to the archive."""
            entry = zipfile.ZipInfo(name, member_time)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16  # the file's permissions
            archive.writestr(entry, json.dumps(value, ensure_ascii=False, allow_nan=False))

        header = _make_header(evaluation)
        put("_journal/start.json", {key: header[key] for key in ("version", "eval", "plan")})
        for sample in _make_samples(evaluation):
            put(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            summary = {name: sample[name] for name in SUMMARY_FIELDS}
            summary["input"] = sample["input"][:LONGEST_PROMPT]
            summary["completed"] = True
            summary["message_count"] = len(sample["messages"])
            summaries.append(summary)
        put("summaries.json", summaries)
        put("header.json", header)
    return len(summaries)


# The evaluation


def _make_header(evaluation: MeasuredSet) -> dict[str, Any]:
    """Returns Inspect's description of an evaluation: everything in a log except the samples."""
    summary, experiment = evaluation.summary, evaluation.experiment
    config, manifest = experiment.config, experiment.manifest
    ids: dict[str, None] = {}  # a dictionary as an ordered set
    answer_count = graded_count = token_count = 0
    for row in evaluation.rows():
        ids[make_writable(row["problem"])] = None
        answer_count += 1
        graded_count += row.get("reward") is not None
        token_count += row.get("tokens", 0)
    measured_at = datetime.fromtimestamp(evaluation.measured_at, UTC).isoformat(timespec="seconds")
    settings = {key: summary[key] for key in ("temperature", "top_p", "seed") if key in summary}
    # The commit is recorded as "5f3a…+changes" if files differed from it.
    commit, _, changes = (manifest.get("commit") or "").partition("+")
    revision = {"type": "git", "origin": "", "commit": commit, "dirty": bool(changes)}
    task = task_of_set(config, evaluation.label)
    return {
        "version": INSPECT_VERSION,
        "status": "success",
        "eval": {
            "eval_id": _make_id(evaluation, "eval"),
            "run_id": _make_id(evaluation, "run"),
            "task_id": _make_id(evaluation, "task"),
            "created": measured_at,
            "task": f"{name_of_task(task) or 'task'}-{evaluation.label}",
            "task_version": 0,
            "task_args": _make_texts_writable(task),
            "dataset": {
                "name": evaluation.label,
                "samples": len(ids),
                "sample_ids": list(ids),
                "shuffled": False,
            },
            "model": _model_name(evaluation),
            "model_generate_config": settings,
            "config": {"epochs": summary.get("samples", 1), "epochs_reducer": ["mean"]},
            "packages": dict(experiment.environment.get("packages") or {}),
            **({"revision": revision} if commit else {}),
            "metadata": {
                "experiment": experiment.name,
                "iteration": evaluation.iteration,
                "summary": dict(summary),
                "configuration": _make_texts_writable(config),
                "configuration_hash": manifest.get("config"),
            },
        },
        "plan": {"name": "plan", "steps": [], "config": settings},
        "results": {
            "total_samples": answer_count,
            "completed_samples": answer_count,
            "scores": [
                {
                    "name": _grader_type(evaluation),
                    "scorer": _grader_type(evaluation),
                    "scored_samples": graded_count,
                    "unscored_samples": answer_count - graded_count,
                    "params": {},
                    "metrics": {
                        name: {"name": name, "value": value, "params": {}}
                        for name, value in _metrics_of_summary(summary)
                    },
                }
            ],
        },
        "stats": {
            "started_at": measured_at,
            "completed_at": measured_at,
            "model_usage": {_model_name(evaluation): _make_usage(token_count)},
        },
    }


def _metrics_of_summary(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (name, value) for each number of a summary, and then for those of each domain's summary, whose
    names begin with the domain: "math/pass_at_1"."""
    for name in SUMMARY_NAMES:
        if summary.get(name) is not None:
            yield prefix + name, summary[name]
    for k, value in (summary.get("pass_at_k") or {}).items():
        if k != "1":  # pass@1 is among those above
            yield f"{prefix}pass_at_{k}", value
    for domain, summary_of_domain in (summary.get("domains") or {}).items():
        yield from _metrics_of_summary(summary_of_domain, f"{domain}/")


def _grader_type(evaluation: MeasuredSet) -> str:
    """Returns the type of the set's grader, or if the task names no grader, the type of the task."""
    task = task_of_set(evaluation.experiment.config, evaluation.label)
    return (task.get("grader") or {}).get("type") or task.get("type") or "grader"


def _model_name(evaluation: MeasuredSet) -> str:
    """Returns the model's name in Inspect's form, provider/model: "treetune/quickstart/vineppo@8"."""
    return f"treetune/{evaluation.experiment.name}@{evaluation.iteration}"


def _make_id(evaluation: MeasuredSet, object_name: str) -> str:
    """Returns an id for one thing (`object_name`) of an evaluation, such as "run".

    It is the same whenever the evaluation is exported, and different for each thing and each evaluation.
    """
    experiment = evaluation.experiment
    key = [object_name, experiment.name, evaluation.label, evaluation.iteration]
    key += [evaluation.summary.get("checksum"), experiment.manifest.get("config")]
    return hashlib.blake2b(repr(key).encode(), digest_size=11).hexdigest()


# The answers


def _make_samples(evaluation: MeasuredSet) -> Iterator[dict[str, Any]]:
    """Yields each answer as a sample of Inspect. An answer that could not be graded has no score."""
    model, grader = _model_name(evaluation), _grader_type(evaluation)
    for stored_row in evaluation.rows():
        uuid = _make_id(evaluation, f"{stored_row['problem']} {stored_row['sample']}")
        row = _make_texts_writable(stored_row)
        prompt, text = row.get("prompt") or "", row.get("text") or ""
        usage = _make_usage(row.get("tokens", 0))
        answer = {"id": uuid, "role": "assistant", "content": text, "source": "generate", "model": model}
        score = {
            "value": row.get("reward"),
            "answer": row.get("extracted"),
            "explanation": row.get("message"),
            "metadata": {"outcome": row.get("outcome")},
        }
        stop = STOP_REASONS.get(row.get("finish_reason") or "", "unknown")
        yield {
            "id": row["problem"],
            "epoch": row["sample"] + 1,
            "input": prompt,
            "target": row.get("gold") or "",
            "messages": [{"id": f"{uuid}-0", "role": "user", "content": prompt, "source": "input"}, answer],
            "output": {
                "model": model,
                "choices": [{"message": answer, "stop_reason": stop}],
                "completion": text,
                "usage": usage,
            },
            "scores": {grader: score} if row.get("reward") is not None else {},
            "metadata": _make_metadata(row),
            "store": {},
            "events": [],
            "model_usage": {model: usage},
            "uuid": uuid,
            "attachments": {},
        }


def _make_metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an answer that have no counterpart in a sample of Inspect."""
    metadata = {name: value for name, value in row.items() if name not in MAPPED_FIELDS}
    # The extracted answer belongs to the score. An answer without a score has it in the metadata.
    if row.get("reward") is None and row.get("extracted") is not None:
        metadata["extracted"] = row["extracted"]
    return metadata


def _make_usage(tokens: int) -> dict[str, int]:
    """Returns the numbers of tokens in Inspect's form, for `tokens` sampled tokens.

    The prompt's tokens count as 0, because their number is not recorded.
    """
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}


def _make_texts_writable(value: Any) -> Any:
    """Returns a value in which characters that UTF-8 can't encode are replaced, in all texts and keys."""
    if isinstance(value, str):
        return make_writable(value)
    if isinstance(value, Mapping):
        return {make_writable(key): _make_texts_writable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_make_texts_writable(item) for item in value]
    return value
