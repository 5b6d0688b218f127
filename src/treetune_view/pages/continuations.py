"""What a state of an answer was gone on with: a part of its page, or a page of its own."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from treetune_view.page import Page, View
from treetune_view.pages.answer import shortened
from treetune_view.store.continuations import alike, continuations_of
from treetune_view.store.tokens import texts_of

LONGEST = 3000
"""Characters of one that are shown."""


def show(view: View) -> Response:
    """`?run=`, `?source=`, `?answer=`, `?start=` (tokens of the answer that the state has)."""
    answer = view.store.answers(view.run).answer(view.text("source"), view.text("answer"))
    config = view.store.experiment(view.run).config
    start, problem, found = view.integer("start", 0), "", list[dict[str, Any]]()
    try:
        completions = continuations_of(view.run, config, answer, start)
    except ValueError as error:
        problem, completions = str(error), []
    for one, times in alike(completions):
        texts = texts_of(view.run.path, one.token_ids)
        text = "".join(texts) if texts is not None else " ".join(map(str, one.token_ids.tolist()))
        found.append(
            {
                "text": shortened(text, LONGEST),
                "times": times,
                "tokens": len(one.token_ids),
                "logprob": None if one.logprobs is None else float(one.logprobs.sum()),
                "unfinished": one.finish_reason == "length",
            }
        )
    # htmx says that it asks; a person who opens the address gets a whole page.
    template = "continuations.html" if "HX-Request" in view.request.headers else "continuations_page.html"
    return view.render(
        template, answer=answer, start=start, problem=problem, found=found, count=len(completions)
    )


PAGE = Page("/continuations", "Continuations", show)
