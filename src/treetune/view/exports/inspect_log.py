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
from treetune.view.experiment import name_of_task
from treetune.view.exports.evaluations import MeasuredSet, task_of_set
from treetune.view.text import writable

VERSION = 2
"""Version of the format."""

SHORT = 2000
"""Characters of a prompt that the list of samples has."""

STOP_REASONS = {"stop": "stop", "length": "max_tokens"}

OWN_FIELDS = ("problem", "sample", "prompt", "text", "gold", "reward", "extracted")
"""Fields of an answer that the log has a place for."""

LISTED = ("id", "epoch", "target", "metadata", "scores", "model_usage", "uuid")
"""Fields of a sample that the list of samples has too."""

SUMMARY_NAMES = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""Numbers of an evaluation's summary that become metrics, beside pass@k."""


def write_inspect_log(evaluation: MeasuredSet, path: Path) -> int:
    """Writes an ``.eval`` or ``.json`` file, whole, and returns how many answers it has."""
    if path.suffix == ".eval":
        with whole_file(path, "wb") as file:
            return _write_archive(evaluation, file)
    count = 0
    with whole_file(path) as file:
        header = json.dumps(_header(evaluation), ensure_ascii=False, allow_nan=False)
        file.write(header.removesuffix("}") + ', "samples": [')
        for count, sample in enumerate(_samples(evaluation), 1):
            text = json.dumps(sample, ensure_ascii=False, allow_nan=False)
            file.write(("," if count > 1 else "") + "\n" + text)
        file.write("\n]}\n")
    return count


def _write_archive(evaluation: MeasuredSet, file: IO[bytes]) -> int:
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
            summaries.append(
                {
                    **{name: sample[name] for name in LISTED},
                    "input": sample["input"][:SHORT],
                    "completed": True,
                    "message_count": len(sample["messages"]),
                }
            )
        put("summaries.json", summaries)
        put("header.json", header)
    return len(summaries)


# The evaluation


def _header(evaluation: MeasuredSet) -> dict[str, Any]:
    summary, experiment = evaluation.summary, evaluation.experiment
    config, manifest = experiment.config, experiment.manifest
    # The problem, the tokens of an answer, and whether it was graded.
    rows = [
        (writable(row["problem"]), row.get("tokens", 0), row.get("reward") is not None)
        for row in evaluation.rows()
    ]
    ids = list(dict.fromkeys(problem for problem, *_ in rows))
    tokens = sum(tokens for _, tokens, _ in rows)
    at = datetime.fromtimestamp(evaluation.measured_at, UTC).isoformat(timespec="seconds")
    settings = {key: summary[key] for key in ("temperature", "top_p", "seed") if key in summary}
    commit, _, changes = (manifest.get("commit") or "").partition("+")
    revision = {"type": "git", "origin": "", "commit": commit, "dirty": bool(changes)}
    task = task_of_set(config, evaluation.label)
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": _id(evaluation, "eval"),
            "run_id": _id(evaluation, "run"),
            "task_id": _id(evaluation, "task"),
            "created": at,
            "task": f"{name_of_task(task) or 'task'}-{evaluation.label}",
            "task_version": 0,
            "task_args": _writable(task),
            "dataset": {
                "name": evaluation.label,
                "samples": len(ids),
                "sample_ids": ids,
                "shuffled": False,
            },
            "model": _model(evaluation),
            "model_generate_config": settings,
            "config": {"epochs": summary.get("samples", 1), "epochs_reducer": ["mean"]},
            "packages": dict(experiment.bits_rest_on.get("packages") or {}),
            **({"revision": revision} if commit else {}),
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


def _metrics(summary: Mapping[str, Any], beginning: str = "") -> Iterator[tuple[str, float]]:
    for name in SUMMARY_NAMES:
        if summary.get(name) is not None:
            yield beginning + name, summary[name]
    for k, value in (summary.get("pass_at_k") or {}).items():
        if k != "1":
            yield f"{beginning}pass_at_{k}", value
    for domain, own in (summary.get("domains") or {}).items():
        yield from _metrics(own, f"{domain}/")


def _grader(evaluation: MeasuredSet) -> str:
    task = task_of_set(evaluation.experiment.config, evaluation.label)
    return (task.get("grader") or {}).get("type") or task.get("type") or "grader"


def _model(evaluation: MeasuredSet) -> str:
    """Names the model as Inspect does: who serves it, then its name."""
    return f"treetune/{evaluation.experiment.name}@{evaluation.iteration}"


def _id(evaluation: MeasuredSet, what: str) -> str:
    own = [what, evaluation.experiment.name, evaluation.label, evaluation.iteration]
    named = repr([*own, evaluation.summary.get("checksum"), evaluation.experiment.manifest.get("config")])
    return hashlib.blake2b(named.encode(), digest_size=11).hexdigest()


# Its answers


def _samples(evaluation: MeasuredSet) -> Iterator[dict[str, Any]]:
    model, grader = _model(evaluation), _grader(evaluation)
    for stored in evaluation.rows():
        row, uuid = _writable(stored), _id(evaluation, f"{stored['problem']} {stored['sample']}")
        prompt, text, usage = row.get("prompt") or "", row.get("text") or "", _usage(row.get("tokens", 0))
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
            "metadata": _kept_beside(row),
            "store": {},
            "events": [],
            "model_usage": {model: usage},
            "uuid": uuid,
            "attachments": {},
        }


def _kept_beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the log has no place for: without a score, what the grader extracted too."""
    beside = {name: value for name, value in row.items() if name not in OWN_FIELDS}
    if row.get("reward") is None and row.get("extracted") is not None:
        beside["extracted"] = row["extracted"]
    return beside


def _usage(tokens: int) -> dict[str, int]:
    """Counts the answer's tokens; the prompt's aren't recorded."""
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, Mapping):
        return {writable(key): _writable(own) for key, own in value.items()}
    return [_writable(own) for own in value] if isinstance(value, list | tuple) else value
