"""Some episodes of an iteration as HTML: each step's text coloured by its advantage, with its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from treetune.episode_generators.storage import TOKENS, read_tokens
from treetune.reports.charts import number
from treetune.reports.experiment import Experiment
from treetune.reports.pages import render
from treetune.reports.sections.base import ReportSection, Sampled, drawing_of
from treetune.reports.tokens import coloured
from treetune.vocabulary import CORRECT_SCORE, Segment

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 8
TO_CHOOSE_BY = (
    "prompt", "reward", "score", "finish_reason", "group", "trajectory", "stretches", "step_values"
)  # fmt: skip
OF_TOKENS = ("advantages", "trained", "step_ends")
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
            table = _table(path)
            texts = [] if "tokens" in table.column_names else read_tokens(experiment / TOKENS)
        except (OSError, ValueError) as error:
            missing.append(f"{path.relative_to(experiment)} can't be read: {error}")
            continue
        rows = [row for row in _rows(table) if row["length"]]
        credited = [row for row in rows if row["spread"] is not None]
        valued = [row for row in credited if row.get("step_values")]
        if rows:
            chosen = [
                row | _tokens(table, row["place"], texts) for row in _chosen(valued or credited or rows)
            ]
            drawn = [row["trajectory"] for row in chosen if drawing_of(row)]
            sampled = _sampled(path.with_name("trajectories.arrow"), drawn, missing) if drawn else {}
            return EpisodeSample(int(path.parent.name), chosen, sampled)
    missing.append("no episodes are there to show")
    return None


def _table(path: Path) -> pa.Table:
    import pyarrow as pa

    with path.open("rb") as file:
        try:
            return pa.ipc.open_stream(file).read_all()
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """What rows are chosen by, and nothing of their tokens: `place` in the table, `length` of the answer, and
    the `spread` of its advantages, None where it has none."""
    import numpy as np
    import pyarrow.compute as pc

    from treetune.episode_generators.columns import rows_of

    rows = table.select([name for name in TO_CHOOSE_BY if name in table.column_names]).to_pylist()
    lengths = pc.list_value_length(table["response_ids"]).to_pylist()
    spreads = [
        float(np.ptp(advantages)) if advantages is not None and len(advantages) else None
        for chunk in table["advantages"].chunks
        for advantages in rows_of(chunk)
    ]
    return [
        row | {"place": place, "length": length, "spread": spread}
        for place, (row, length, spread) in enumerate(zip(rows, lengths, spreads, strict=True))
    ]


def _tokens(table: pa.Table, place: int, texts: Sequence[str]) -> dict[str, Any]:
    """What the row has of each token of its answer, its text too."""
    [row] = table.slice(place, 1).to_pylist()
    tokens = row.get("tokens")  # in a file of an older run
    if tokens is None:
        tokens = [texts[token] if token < len(texts) else "" for token in row["response_ids"]]
    return {"tokens": tokens, **{name: row.get(name) for name in OF_TOKENS}}


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
    return Segment(row["token_ids"], row["origin"], branch=branch, seconds=row.get("seconds"))


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def spread(row: dict[str, Any]) -> float:
        values = row.get("step_values")
        return max(values) - min(values) if values else row["spread"] or 0.0

    ordered = sorted(
        rows, key=lambda row: (drawing_of(row) is None, -spread(row), row.get("trajectory") or "")
    )
    right = _different_problems([row for row in ordered if _score(row) >= CORRECT_SCORE])
    wrong = _different_problems([row for row in ordered if _score(row) < CORRECT_SCORE])
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
    """The sample as a section's inner HTML."""
    sizes = sorted(abs(a) for row in sample.rows for a in row.get("advantages") or ())
    scale = (sizes[min(len(sizes) - 1, int(COLOURED_FULLY * len(sizes)))] if sizes else 0.0) or 1.0
    drawings = [drawing_of(row) for row in sample.rows]
    return render(
        "episodes.html",
        iteration=sample.iteration + 1,
        scale=scale if sizes else None,
        valued=any(row.get("step_values") for row in sample.rows),
        notes=list(dict.fromkeys(drawing.note for drawing in drawings if drawing)),
        episodes=[
            _episode(
                row, drawing.html(row, sample.sampled.get(row["trajectory"]), scale) if drawing else "", scale
            )
            for row, drawing in zip(sample.rows, drawings, strict=True)
        ],
    )


def _episode(row: dict[str, Any], drawing: str, scale: float) -> dict[str, Any]:
    earned = f"reward {number(row['reward'])}"
    if _score(row) != row["reward"]:  # it was shaped
        earned = f"score {number(_score(row))}, {earned}"
    return {
        "correct": _score(row) >= CORRECT_SCORE,
        "earned": earned,
        "unfinished": row.get("finish_reason") == "length",
        "trajectory": row.get("trajectory") or "",
        "prompt": row["prompt"],
        "drawing": drawing,
        "valued": bool(row.get("step_values")),
        "steps": [] if drawing else list(_steps(row, scale)),
    }


def _steps(row: dict[str, Any], scale: float) -> Iterator[tuple[str, str, str]]:
    """A line for each step: the value before it, its mean advantage, its text as HTML."""
    tokens, advantages = row["tokens"], row.get("advantages")
    ends = [end for end in row.get("step_ends") or () if end < len(tokens)] + [len(tokens)]
    values, start = row.get("step_values") or (), 0
    for step, end in enumerate(ends):
        own = advantages[start:end] if advantages else [0.0] * (end - start)
        mean = f"{fmean(own):+.2f}" if advantages and own else ""
        yield (
            f"{values[step]:.2f}" if step < len(values) else "",
            mean,
            coloured(tokens[start:end], own, scale),
        )
        start = end
