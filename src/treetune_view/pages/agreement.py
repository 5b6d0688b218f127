"""Judge against rule: how often both gave the same verdict, and the answers on which they differ."""

from __future__ import annotations

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.page import Page, View, digest
from treetune_view.store import NotThere
from treetune_view.store.verdicts import JUDGE, RULE, agreements, graded_by_both, together


def show(view: View) -> Response:
    """`?run=`, `?of=` (one file; without it all)."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    columns = answers.columns()
    waiting = [one.source.words for one in indexed if one.is_awaited]
    if not (graded := graded_by_both(columns)) and not waiting:
        raise NotThere(
            f"no answer of {view.run.name} has been graded by a judge and by a rule: the grader"
            " {type: 'judge', rule: {…}} has both grade them"
        )
    sources = {one.source.name: one.source for one in indexed if one.about is not None}
    of = view.choice("of", ("", *sources))
    chosen = (of,) if of else ()
    by_file = agreements(answers, "source", ()) if graded else []
    order = list(sources)
    by_file.sort(key=lambda one: order.index(one.name))
    kept = [one for one in by_file if not of or one.name == of]
    domains = agreements(answers, "domain", chosen) if graded and "domain" in columns else []
    return view.render(
        "agreement.html",
        whole=together("all", kept),
        by_file=by_file,
        domains=domains if len(domains) > 1 else [],
        sources=sources,
        of=of,
        waiting=waiting,
        problems=answers.problems(),
        answers_with=lambda judged, ruled, **more: view.address(
            "/answers", run=view.run.name, of=of or "everything", where=_condition(judged, ruled), **more
        ),
    )


def _condition(judged: int, ruled: int) -> str:
    """Answers with these verdicts, as the list of answers takes it."""
    sign = {1: ">=", 0: "<"}
    return f"{JUDGE} {sign[judged]} {CORRECT_SCORE:g}; {RULE} {sign[ruled]} {CORRECT_SCORE:g}"


PAGE = Page(
    "/agreement",
    "Judge and rule",
    show,
    mark=lambda view: digest(view.store.answers(view.run).mark(), view.request.url.query),
)
