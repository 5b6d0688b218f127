"""Which episodes of an experiment are worth a look, read from its newest iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.rollouts.storage import REMEDY, TOKENS, read_tokens
from treetune.store.checksums import verify_once
from treetune.vocabulary import CORRECT_SCORE, Segment
from treetune_view.report.sections.base import Sampled, drawing_of

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 8
TO_CHOOSE_BY = (
    "prompt", "reward", "score", "finish_reason", "group", "trajectory", "stretches", "step_values"
)  # fmt: skip
OF_TOKENS = ("advantages", "trained", "step_ends", "step_rewards", "step_errors")


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
    correct and half is wrong answers where there are both, those first that are drawn in a way of
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

    verify_once(path, REMEDY)
    with path.open("rb") as file:
        try:
            table = pa.ipc.open_stream(file).read_all()
            table.validate(full=True)  # of an earlier version, without a checksum
            return table
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """What rows are chosen by, and nothing of their tokens: `place` in the table, `length` of the answer, and
    the `spread` of its advantages, None where it has none."""
    import numpy as np
    import pyarrow.compute as pc

    from treetune.rollouts.rows import rows_of

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
        verify_once(path, REMEDY)
        with path.open("rb") as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                batch.validate(full=True)
                samples = pc.cast(batch["sample"], pa.string())
                names = pc.binary_join_element_wise(pc.struct_field(batch["problem"], "id"), samples, "#")
                is_wanted = pc.is_in(names, pa.array(wanted, pa.string()))
                counted = "numbers" in batch.schema.names  # else a file from before there were any
                for i in pc.indices_nonzero(is_wanted).to_pylist():
                    segments = tuple(map(_segment, batch["segments"][i].as_py()))
                    numbers = dict(batch["numbers"][i].as_py() or ()) if counted else {}
                    found[names[i].as_py()] = Sampled(segments, numbers)
    except (ValueError, OSError) as error:  # pyarrow's own are of these
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
    correct = _different_problems([row for row in ordered if score_of(row) >= CORRECT_SCORE])
    wrong = _different_problems([row for row in ordered if score_of(row) < CORRECT_SCORE])
    n_correct = min(len(correct), max(SHOWN // 2, SHOWN - len(wrong)))
    return correct[:n_correct] + wrong[: SHOWN - n_correct]


def score_of(row: dict[str, Any]) -> float:
    """The grader's verdict: the reward, where the file is from before the two were told apart."""
    score: float = row.get("score", row["reward"])
    return score


def _different_problems(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row.get("group") or row["prompt"], row)
    chosen = list(first.values())
    return chosen + [row for row in rows if not any(row is other for other in chosen)]
