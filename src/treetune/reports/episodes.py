"""Some episodes of an iteration as HTML: each step's text coloured by its advantage, with its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from treetune.reports.charts import number

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
)
COLOURED_FULLY = 0.95
"""The quantile of |advantage| among the shown tokens that has the full colour; larger ones are not darker."""


@dataclass(frozen=True)
class EpisodeSample:
    """Rows of `episodes.arrow` with its columns as keys, and the iteration (from 0) that they are of."""

    iteration: int
    rows: Sequence[dict[str, Any]]


def sample_episodes(experiment: Path, missing: list[str]) -> EpisodeSample | None:
    """From the newest iteration that can be read; None (and a word in `missing`) if there is none.

    Episodes with values of their steps go first, then those with advantages. Half of the sample is
    right and half is wrong answers where there are both, those first whose values move most, and no
    two of one problem while there are others.
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
            return EpisodeSample(int(path.parent.name), _chosen(valued or credited or rows))
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


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def spread(row: dict[str, Any]) -> float:
        moving = row.get("step_values") or row.get("advantages") or (0.0,)
        return max(moving) - min(moving)

    ordered = sorted(rows, key=lambda row: (-spread(row), row.get("trajectory") or ""))
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
    shown = "".join(_episode(row, scale) for row in sample.rows)
    return f'<p class="note">{note}</p><div class="episodes">{shown}</div>'


def _episode(row: dict[str, Any], scale: float) -> str:
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
            f"<td>{_coloured(tokens[start:end], own, scale)}</td></tr>"
        )
        start = end
    verdict = "right" if _score(row) > 0.5 else "wrong"
    earned = f"reward {number(row['reward'])}"
    if _score(row) != row["reward"]:  # it was shaped
        earned = f"score {number(_score(row))}, {earned}"
    unfinished = ", unfinished" if row.get("finish_reason") == "length" else ""
    return (
        f'<article class="episode"><header><span class="verdict {verdict}">{earned}'
        f"{unfinished}</span><code>{escape(row.get('trajectory') or '')}</code></header>"
        f'<pre class="prompt">{escape(row["prompt"])}</pre>'
        f'<table class="steps"><thead><tr><th>{"V" if values else ""}</th>'
        f"<th>{'A' if advantages else ''}</th><th></th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></article>"
    )


def _coloured(tokens: Sequence[str], advantages: Sequence[float], scale: float) -> str:
    """Neighbouring tokens of one advantage share a span; its strength is a CSS variable from 0 to 1."""
    parts = []
    for advantage, pairs in groupby(zip(tokens, advantages), key=lambda pair: round(pair[1], 4)):
        text = escape("".join(token for token, _ in pairs)).replace("\n", '<span class="newline">↵</span>\n')
        strength = min(1.0, abs(advantage) / scale)
        direction = " down" if advantage < 0 else ""
        parts.append(
            f'<span class="token{direction}" style="--s:{strength:.2f}" title="advantage {advantage:+.3f}">'
            f"{text}</span>"
        )
    return "".join(parts)
