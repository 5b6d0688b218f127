"""Reads exported logs with Inspect itself, and compares them with the evaluation that was exported.

inspect_ai is no dependency of this project; install it in an environment of its own:

    python -m venv /tmp/inspect && /tmp/inspect/bin/pip install inspect_ai
    /tmp/inspect/bin/python tests/endurance/check_inspect_log.py EXPERIMENT_DIR LOG…

Each LOG is what `treetune export_evaluation EXPERIMENT_DIR --output LOG` wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log, read_eval_log_sample
from inspect_ai.log import read_eval_log_sample_summaries as read_summaries


def main(experiment: Path, logs: list[Path]) -> int:
    for path in logs:
        log = read_eval_log(str(path))
        faults = list(faults_of(log, answers_of(experiment, log)))
        header = read_eval_log(str(path), header_only=True)
        if header.results != log.results or header.eval != log.eval:
            faults.append("its header differs from the log")
        first = (log.samples or [])[0]
        if read_eval_log_sample(str(path), id=first.id, epoch=first.epoch).output != first.output:
            faults.append("a sample that is read alone differs")
        if len(read_summaries(str(path))) != len(log.samples or []):
            faults.append("the list of samples has another length")
        # Inspect lists only .json files with names that it has given itself.
        names = {Path(log_file.name).name for log_file in list_eval_logs(str(path.parent))}
        if path.suffix == ".eval" and path.name not in names:
            faults.append("it isn't listed among the folder's logs")
        assert log.results is not None
        metrics = {name: metric.value for name, metric in log.results.scores[0].metrics.items()}
        print(f"{path}: {log.status}, {log.eval.task} by {log.eval.model}, {metrics}")
        print(f"  {len(log.samples or [])} samples; {'; '.join(faults) or 'all as it was measured'}")
        if faults:
            return 1
    return 0


def answers_of(experiment: Path, log: EvalLog) -> dict[tuple[str, int], dict]:
    folder = experiment / "evaluations" / f"{log.eval.metadata['iteration']:04d}" / str(log.eval.dataset.name)
    rows = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    return {(row["problem"], row["sample"] + 1): row for row in rows}


def faults_of(log: EvalLog, rows: dict[tuple[str, int], dict]):
    samples = {(sample.id, sample.epoch): sample for sample in log.samples or []}
    if samples.keys() != rows.keys():
        yield f"{len(rows)} answers were measured and {len(samples)} are there"
    for key in samples.keys() & rows.keys():
        sample, row = samples[key], rows[key]
        text = row["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        [score] = (sample.scores or {}).values() or [None]
        if (sample.output.completion, sample.target, sample.input) != (text, row["gold"], row["prompt"]):
            yield f"{key} has other texts"
        if (None if score is None else score.value) != row["reward"]:
            yield f"{key} has another score"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
