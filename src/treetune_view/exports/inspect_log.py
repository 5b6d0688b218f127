"""An evaluation as a log of Inspect (UK AI Security Institute, inspect.aisi.org.uk), version 2 of its format.

``.eval`` is a zip archive of ``header.json``, ``summaries.json`` and a file for each sample; ``.json`` is
all in one. A problem is a sample, its answers are epochs of that, and a score's value is the reward. What the
log has no place for stands in `metadata`. Written alike each time: names derive from the evaluation, times
from its files.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from treetune.store.files import whole_file
from treetune_view.exports.evaluations import Evaluation, task_of_set, writable

VERSION = 2
"""Of the format."""

SHORT = 2000
"""Characters of an answer that the list of samples has."""

STOP_REASONS = {"stop": "stop", "length": "max_tokens"}

SUMMARY_NAMES = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""What of an evaluation's summary becomes metrics, beside pass@k."""


def write_inspect_log(evaluation: Evaluation, path: Path) -> int:
    """Writes an ``.eval`` or ``.json`` file, whole, and returns how many answers it has."""
    if path.suffix == ".eval":
        with whole_file(path, "wb") as file:
            return _write_archive(evaluation, file)
    with whole_file(path) as file:
        return _write_json(evaluation, file)


def _write_archive(evaluation: Evaluation, file: IO[bytes]) -> int:
    at = datetime.fromtimestamp(evaluation.measured_at, UTC).timetuple()[:6]
    summaries = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:

        def put(name: str, value: object) -> None:
            entry = zipfile.ZipInfo(name, max(at, (1980, 1, 1, 0, 0, 0)))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, json.dumps(value, ensure_ascii=False, allow_nan=False))

        header = _header(evaluation)
        put("_journal/start.json", {key: header[key] for key in ("version", "eval", "plan")})
        for sample in _samples(evaluation):
            put(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            summaries.append(_summary_of(sample))
        put("summaries.json", summaries)
        put("header.json", header)
    return len(summaries)


def _write_json(evaluation: Evaluation, file: IO[str]) -> int:
    header = json.dumps(_header(evaluation), ensure_ascii=False, allow_nan=False)
    file.write(header.removesuffix("}") + ', "samples": [')
    count = 0
    for count, sample in enumerate(_samples(evaluation), 1):
        text = json.dumps(sample, ensure_ascii=False, allow_nan=False)
        file.write(("," if count > 1 else "") + "\n" + text)
    file.write("\n]}\n")
    return count


# The evaluation


def _header(evaluation: Evaluation) -> dict[str, Any]:
    summary, experiment = evaluation.summary, evaluation.experiment
    config, manifest = experiment.config, experiment.manifest
    rows = list(_essentials(evaluation))
    ids = list(dict.fromkeys(problem for problem, *_ in rows))
    tokens = sum(tokens for _, tokens, _ in rows)
    at = datetime.fromtimestamp(evaluation.measured_at, UTC).isoformat(timespec="seconds")
    settings = {key: summary[key] for key in ("temperature", "top_p", "seed") if key in summary}
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": _id(evaluation, "eval"),
            "run_id": _id(evaluation, "run"),
            "task_id": _id(evaluation, "task"),
            "created": at,
            "task": _task_name(evaluation),
            "task_version": 0,
            "task_args": _writable(task_of_set(config, evaluation.label)),
            "dataset": {
                "name": evaluation.label,
                "samples": len(ids),
                "sample_ids": ids,
                "shuffled": False,
            },
            "model": _model(evaluation),
            "model_generate_config": settings,
            "config": {"epochs": summary.get("samples", 1), "epochs_reducer": ["mean"]},
            "packages": _packages(manifest),
            **_revision(manifest),
            "metadata": {
                "experiment": experiment.name,
                "iteration": evaluation.iteration,
                "summary": dict(summary),
                "configuration": _writable(config),
                "configuration_hash": manifest.get("config"),
            },
        },
        "plan": {"name": "plan", "steps": [], "config": settings},
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows),
            "scores": [
                {
                    "name": _grader(evaluation),
                    "scorer": _grader(evaluation),
                    "scored_samples": sum(known for *_, known in rows),
                    "unscored_samples": sum(not known for *_, known in rows),
                    "params": {},
                    "metrics": {
                        name: {"name": name, "value": value, "params": {}}
                        for name, value in _metrics(summary)
                    },
                }
            ],
        },
        "stats": {
            "started_at": at,
            "completed_at": at,
            "model_usage": {_model(evaluation): _usage(tokens)},
        },
    }


def _essentials(evaluation: Evaluation) -> Iterator[tuple[str, int, bool]]:
    """Of each answer its problem, its tokens and whether it was graded."""
    for row in evaluation.rows():
        yield writable(row["problem"]), row.get("tokens", 0), row.get("reward") is not None


def _metrics(summary: Mapping[str, Any], beginning: str = "") -> Iterator[tuple[str, float]]:
    for name in SUMMARY_NAMES:
        if summary.get(name) is not None:
            yield beginning + name, summary[name]
    for k, value in (summary.get("pass_at_k") or {}).items():
        if k != "1":
            yield f"{beginning}pass_at_{k}", value
    for domain, own in (summary.get("domains") or {}).items():
        yield from _metrics(own, f"{domain}/")


def _revision(manifest: Mapping[str, Any]) -> dict[str, Any]:
    commit = manifest.get("commit")
    if not commit:
        return {}
    own, _, changes = commit.partition("+")
    return {"revision": {"type": "git", "origin": "", "commit": own, "dirty": bool(changes)}}


def _packages(manifest: Mapping[str, Any]) -> dict[str, str]:
    return dict((manifest.get("bits_rest_on") or manifest).get("packages") or {})


def _task_name(evaluation: Evaluation) -> str:
    kind = task_of_set(evaluation.experiment.config, evaluation.label).get("type", "task")
    return f"{kind}-{evaluation.label}"


def _grader(evaluation: Evaluation) -> str:
    task = task_of_set(evaluation.experiment.config, evaluation.label)
    return (task.get("grader") or {}).get("type") or task.get("type") or "grader"


def _model(evaluation: Evaluation) -> str:
    """As Inspect names models: who serves it, then its name."""
    return f"treetune/{evaluation.experiment.name}@{evaluation.iteration}"


def _id(evaluation: Evaluation, what: str) -> str:
    own = [what, evaluation.experiment.name, evaluation.label, evaluation.iteration]
    named = repr([*own, evaluation.summary.get("checksum"), evaluation.experiment.manifest.get("config")])
    return hashlib.blake2b(named.encode(), digest_size=11).hexdigest()


# Its answers


def _samples(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    model, grader = _model(evaluation), _grader(evaluation)
    for row in evaluation.rows():
        yield _sample(_writable(row), model, grader, _id(evaluation, f"{row['problem']} {row['sample']}"))


def _sample(row: Mapping[str, Any], model: str, grader: str, uuid: str) -> dict[str, Any]:
    prompt, text, usage = row.get("prompt") or "", row.get("text") or "", _usage(row.get("tokens", 0))
    answer = {"id": uuid, "role": "assistant", "content": text, "source": "generate", "model": model}
    stop = STOP_REASONS.get(row.get("finish_reason") or "", "unknown")
    return {
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
        "scores": _scores(row, grader),
        "metadata": _beside(row),
        "store": {},
        "events": [],
        "model_usage": {model: usage},
        "uuid": uuid,
        "attachments": {},
    }


def _scores(row: Mapping[str, Any], grader: str) -> dict[str, Any]:
    """None for what nobody could grade."""
    if row.get("reward") is None:
        return {}
    score = {"value": row["reward"], "answer": row.get("extracted"), "explanation": row.get("message")}
    return {grader: {**score, "metadata": {"outcome": row.get("outcome")}}}


def _beside(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("problem", "sample", "prompt", "text", "gold", "reward", "extracted")
    return {name: value for name, value in row.items() if name not in shown}


def _summary_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the list of samples."""
    same = ("id", "epoch", "target", "metadata", "scores", "model_usage", "uuid")
    return {
        **{name: sample[name] for name in same},
        "input": sample["input"][:SHORT],
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _usage(tokens: int) -> dict[str, int]:
    """The prompt's tokens aren't recorded."""
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, Mapping):
        return {writable(key): _writable(own) for key, own in value.items()}
    return [_writable(own) for own in value] if isinstance(value, list | tuple) else value
