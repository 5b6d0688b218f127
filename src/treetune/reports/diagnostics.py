"""The report's section on collapse signs: what was looked for, what was found, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from treetune.reports.experiment import Experiment
from treetune.runtime.diagnostics import METRICS, REMEDIES, SIGNS

PREFIX = "diagnostics/"

WORDS = {
    "entropy_low": "entropy has collapsed",
    "answers_short": "answers have collapsed to a few tokens",
    "answers_at_limit": "answers are as long as they may be",
    "truncated": "answers are cut off",
    "no_spread": "answers to a problem score all the same",
    "gradient_noise": "the gradient norm does not settle",
}


def diagnostics_html(one: Experiment) -> str:
    """A row for each sign that was looked for; nothing about runs that looked for none."""
    rows = []
    for sign in SIGNS:
        looked = one.curve(f"{PREFIX}{sign}")
        if not looked:
            continue
        seen = [int(iteration) for iteration, counts in looked if counts]
        now = bool(looked[-1][1])
        verdict = (
            f'<span class="verdict wrong">{"at the end" if now else "before"}</span>'
            if seen
            else '<span class="verdict right">no</span>'
        )
        cells = [
            escape(WORDS[sign]),
            verdict,
            escape(", ".join(_ranges(seen)) or "–"),
            f"<code>{escape(METRICS[sign])}</code>",
            escape(REMEDIES[sign]) if seen else "",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    heads = ("sign", "seen", "iterations", "metric", "what may help")
    head = "".join(f"<th>{name}</th>" for name in heads)
    end = ""
    if one.stopped:
        end = (
            '<p class="missing">The run was stopped for it, as <code>diagnostics.on_collapse</code> says.</p>'
        )
    return (
        "<h3>Signs of collapse</h3>"
        f'{end}<div class="scroll"><table class="results signs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    """3–5, 9: rising whole numbers, neighbours together."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield _range(run)
            run = []
        run.append(number)
    if run:
        yield _range(run)


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"
