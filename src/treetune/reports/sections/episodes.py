"""Some episodes of an iteration as HTML: each step's text coloured by its advantage, with its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from treetune.reports.charts import number
from treetune.reports.experiment import Experiment
from treetune.reports.sections.base import ReportSection, Sampled, drawing_of
from treetune.reports.tokens import coloured
from treetune.vocabulary import Segment

SHOWN = 8
COLUMNS = (
    "prompt",
    "tokens",
    "advantages",
    "step_ends",
    "step_values",
    "reward",
    "score",
    "finish_reason",
    "group",
    "trajectory",
    "trained",
    "stretches",
)
COLOURED_FULLY = 0.95
"""The quantile of |advantage| among the shown tokens that has the full colour; larger ones are not darker."""


class EpisodesSection(ReportSection):
    title = "Episodes"

    def applies(self, experiment: Experiment) -> bool:
        return True

    def html(self, experiment: Experiment) -> str:
        sample = sample_episodes(experiment.path, experiment.missing)
        return episodes_html(sample) if sample is not None else ""


@dataclass(frozen=True)
class EpisodeSample:
    """Rows of `episodes.arrow` with its columns as keys, and the iteration (from 0) that they are of.

    `sampled` is of rows that are drawn in a way of their own, by trajectory, as far as these are stored.
    """

    iteration: int
    rows: Sequence[dict[str, Any]]
    sampled: Mapping[str, Sampled] = field(default_factory=dict)


def sample_episodes(experiment: Path, missing: list[str]) -> EpisodeSample | None:
    """From the newest iteration that can be read; None (and a word in `missing`) if there is none.

    Episodes with values of their steps go first, then those with advantages. Half of the sample is
    right and half is wrong answers where there are both, those first that are drawn in a way of
    their own and then those whose values move most, and no two of one problem while there are others.
    """
    for path in sorted(experiment.glob("iterations/*/episodes.arrow"), reverse=True):
        try:
            rows = _read(path)
        except (OSError, ValueError) as error:
            missing.append(f"{path.relative_to(experiment)} can't be read: {error}")
            continue
        rows = [row for row in rows if row["tokens"]]
        credited = [row for row in rows if row.get("advantages")]
        valued = [row for row in credited if row.get("step_values")]
        if rows:
            chosen = _chosen(valued or credited or rows)
            drawn = [row["trajectory"] for row in chosen if drawing_of(row)]
            sampled = _sampled(path.with_name("trajectories.arrow"), drawn, missing) if drawn else {}
            return EpisodeSample(int(path.parent.name), chosen, sampled)
    missing.append("no episodes are there to show")
    return None


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa

    with path.open("rb") as file:
        try:
            table = pa.ipc.open_stream(file).read_all()
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error
    if "tokens" not in table.column_names:
        raise ValueError("it was written without a tokenizer, and has no column `tokens`")
    return table.select([name for name in COLUMNS if name in table.column_names]).to_pylist()


def _sampled(path: Path, wanted: Sequence[str], missing: list[str]) -> dict[str, Sampled]:
    """Of some trajectories, by their ids; of none where there is no file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not path.is_file():
        return {}
    found = {}
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                samples = pc.cast(batch["sample"], pa.string())
                names = pc.binary_join_element_wise(pc.struct_field(batch["problem"], "id"), samples, "#")
                is_wanted = pc.is_in(names, pa.array(wanted, pa.string()))
                counted = "numbers" in batch.schema.names  # else a file from before there were any
                for i in pc.indices_nonzero(is_wanted).to_pylist():
                    segments = tuple(map(_segment, batch["segments"][i].as_py()))
                    numbers = dict(batch["numbers"][i].as_py() or ()) if counted else {}
                    found[names[i].as_py()] = Sampled(segments, numbers)
    except (pa.ArrowInvalid, OSError) as error:
        missing.append(f"{path.name} of iteration {int(path.parent.name) + 1} can't be read: {error}")
    return found


def _segment(row: dict[str, Any]) -> Segment:
    branch = tuple((block, thread) for block, thread in row.get("branch") or ())
    return Segment(tuple(row["token_ids"]), row["origin"], branch=branch, seconds=row.get("seconds"))


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def spread(row: dict[str, Any]) -> float:
        moving = row.get("step_values") or row.get("advantages") or (0.0,)
        return max(moving) - min(moving)

    ordered = sorted(
        rows, key=lambda row: (drawing_of(row) is None, -spread(row), row.get("trajectory") or "")
    )
    right = _different_problems([row for row in ordered if _score(row) > 0.5])
    wrong = _different_problems([row for row in ordered if _score(row) <= 0.5])
    n_right = min(len(right), max(SHOWN // 2, SHOWN - len(wrong)))
    return right[:n_right] + wrong[: SHOWN - n_right]


def _score(row: dict[str, Any]) -> float:
    """The grader's verdict: the reward, where the file is from before the two were told apart."""
    score: float = row.get("score", row["reward"])
    return score


def _different_problems(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row.get("group") or row["prompt"], row)
    chosen = list(first.values())
    return chosen + [row for row in rows if not any(row is other for other in chosen)]


def episodes_html(sample: EpisodeSample) -> str:
    """The sample as a section's inner HTML; all text is escaped."""
    sizes = sorted(abs(a) for row in sample.rows for a in row.get("advantages") or ())
    scale = (sizes[min(len(sizes) - 1, int(COLOURED_FULLY * len(sizes)))] if sizes else 0.0) or 1.0
    note = f"Iteration {sample.iteration + 1}. "
    if not sizes:
        note += (
            "These episodes carry no advantages: a critic gave them while training, or the loss needs none."
        )
    else:
        valued = any(row.get("step_values") for row in sample.rows)
        note += (
            "One line per step: A is its mean advantage"
            + (
                ", V the value of the state before it. "
                if valued
                else " (this credit has no values of steps). "
            )
            + '<span class="token" style="--s:1">Blue</span> text was made more likely, '
            + '<span class="token down" style="--s:1">orange</span> text less; the colour is full from '
            + f"|A| = {number(scale)} on."
        )
    drawings = filter(None, map(drawing_of, sample.rows))
    note += "".join(f" {drawing_note}" for drawing_note in dict.fromkeys(one.note for one in drawings))
    shown = "".join(_episode(row, scale, sample.sampled.get(row["trajectory"])) for row in sample.rows)
    return f'<p class="note">{note}</p><div class="episodes">{shown}</div>'


def _episode(row: dict[str, Any], scale: float, sampled: Sampled | None) -> str:
    verdict = "right" if _score(row) > 0.5 else "wrong"
    earned = f"reward {number(row['reward'])}"
    if _score(row) != row["reward"]:  # it was shaped
        earned = f"score {number(_score(row))}, {earned}"
    unfinished = ", unfinished" if row.get("finish_reason") == "length" else ""
    drawing = drawing_of(row)
    answer = _steps(row, scale) if drawing is None else drawing.html(row, sampled, scale)
    return (
        f'<article class="episode{" whole" if drawing else ""}"><header><span class="verdict'
        f' {verdict}">{earned}{unfinished}</span><code>{escape(row.get("trajectory") or "")}</code></header>'
        f'<pre class="prompt">{escape(row["prompt"])}</pre>{answer}</article>'
    )


def _steps(row: dict[str, Any], scale: float) -> str:
    """A line for each step."""
    tokens, advantages = row["tokens"], row.get("advantages")
    ends = [end for end in row.get("step_ends") or () if end < len(tokens)] + [len(tokens)]
    values = row.get("step_values") or ()
    lines, start = [], 0
    for step, end in enumerate(ends):
        value = f"{values[step]:.2f}" if step < len(values) else ""
        own = advantages[start:end] if advantages else [0.0] * (end - start)
        mean = f"{sum(own) / len(own):+.2f}" if advantages and own else ""
        lines.append(
            f'<tr><td class="value">{value}</td><td class="advantage">{mean}</td>'
            f"<td>{coloured(tokens[start:end], own, scale)}</td></tr>"
        )
        start = end
    return (
        f'<table class="steps"><thead><tr><th>{"V" if values else ""}</th>'
        f"<th>{'A' if advantages else ''}</th><th></th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
