"""The page of one answer: its tokens in colours, its steps with values, the grader's verdict, the credit of
several methods, notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from treetune.exceptions import NotThere
from treetune.view.drawings import NOTE, ThreadedAnswer, threads_html, tree_html
from treetune.view.notes import NotedAnswer
from treetune.view.page import Form, Page, PageRequest
from treetune.view.pages.answers import PLACE, asked_of, listed_as, whole
from treetune.view.pages.notes import Draft, all_labels, notes_on, save_form
from treetune.view.store.answers import AnswerStore, StoredAnswer
from treetune.view.store.folders import digest
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.store.tokens import (
    OF_CREDIT,
    CreditedStep,
    Tokens,
    all_texts,
    credits_of,
    made_of_credit,
    mark_of_credits,
    penalised,
    tokens_of,
    trained_steps,
)
from treetune.view.text import MARKS, SHOWN, cut, ends_in_a_heap, visible

TOKENS_SHOWN = 4000
"""Tokens that are shown before somebody asks for all."""

LONGEST_TOKEN, LONGEST_VERDICT, LONGEST_DATA = 1000, 2000, 20_000
"""Characters that are shown of a token; of a grader's extract, message and gold answer; of prompt and data.
"""

OF_A_STEP = 140
"""Characters of a step in the table of its credit."""

COLOURED_FULLY = 0.95
"""The quantile of a number's size in the answer that has the full colour; larger ones are not darker.
Advantages have it at their largest."""

UNRECORDED = (
    "the run kept nothing of what its trainer said of this answer's tokens: it was not trained, or by an"
    " iteration without token_signals.arrow"
)
VERDICT = ("outcome", "extracted", "message", "seconds")
"""What is known of a grade beside its score."""


def show(view: PageRequest) -> Response:
    """`?run=`, `?source=`, `?answer=`, `?as=` (see `_forms`), `?colour=`, `?depth=` (of a tree), `?all=1`,
    `?on=1` (a label goes on to the next), and of the list that it is read in what `pages.answers.show` takes.
    Without an answer it is the first of the list's page, or its last with `?last=1`."""
    if not view.text("answer"):
        answers = view.store.answers(view.run)
        rows = answers.ask(asked_of(view, answers)[0]).rows
        if not rows:
            raise NotThere("no answer is like that (any more)")
        row = rows[-1 if view.text("last") else 0]
        return RedirectResponse(view.here(source=row["source"], answer=row["answer"], last=None), 303)
    return _shown(view, _answer(view))


def save(view: PageRequest, form: Form) -> Response:
    """Puts the form's note beside the run, and shows the answer again."""
    answer = _answer(view)
    draft = save_form(view, _noted(answer), form)
    return RedirectResponse(f"{view.here()}#notes", 303) if draft is None else _shown(view, answer, draft)


def _answer(view: PageRequest) -> StoredAnswer:
    """Reads the answer of the address. Raises NotThere for a file whose index is still made: the page asks
    again by itself. Raises ValueError for one that can't be read."""
    answers, source = view.store.answers(view.run), view.text("source")
    for one in answers.indexed():
        if one.source.name == source and one.fault:
            raise ValueError(one.fault)
        if one.source.name == source and one.is_awaited:
            raise NotThere(
                f"{one.source.title} is still being read: this page shows the answer as soon as it is"
            )
    return answers.answer(source, view.text("answer"))


def _shown(view: PageRequest, answer: StoredAnswer, draft: Draft | None = None) -> Response:
    answers = view.store.answers(view.run)
    try:
        config = view.store.experiment(view.run).config
    except ValueError:  # it can't be read
        config = {}
    tokens = tokens_of(view.run.path, answer, config)
    made = made_of_credit(config)
    colours = colourings(tokens, made)
    own, depth = answer.episode, view.integer("depth", 0)
    credited = own is not None and own.advantages is not None and answer.source.episodes is not None
    further = ("credit",) * credited + ("tree",) * (own is not None)
    forms = _forms(tokens, further)
    form = view.choice("as", forms)
    everything = bool(view.choice("all", ("", "1")))
    most = None if everything else TOKENS_SHOWN
    credits = credits_of(view.run.path, answer)
    grade = answer.trajectory.grade if answer.trajectory is not None else None
    text, left_out = cut(answer.text, len(answer.text) if everything else SHOWN)
    reading = _reading(view, answers, answer)
    drawing: Markup | str = ""
    if form == "threads" and tokens is not None:
        scales = {one["name"]: one["scale"] for one in colours}
        scale = scales.get(OF_CREDIT) or scales["advantage"] or 1.0
        drawn = ThreadedAnswer(tokens.texts or (), answer.episode, answer.trajectory, scale)
        drawing = Markup(threads_html(drawn))
    elif form == "tree" and own is not None:
        group = answers.group(answer.source.name, answer.row["problem"])
        this = next((i for i, one in enumerate(group) if one.trajectory == own.trajectory), 0)

        base = view.here(answer=None, depth=None, all=None, **{"as": None})

        def address(number: int, depth: int | None, start: int | None = None) -> str:
            """Returns the address of the tree from a step of the answer on, of the answer by itself, or of
            continuations of its beginning."""
            query = {"answer": group[number].trajectory}
            if start is not None:
                where = {"run": view.run.name, "source": answer.source.name}
                return view.address("/continuations", **query, **where, start=start)
            query |= {} if depth is None else {"as": "tree"}
            return f"{base}&{urlencode(query | ({'depth': depth} if depth else {}))}"

        drawing = Markup(tree_html(group, all_texts(view.run.path) or [], this, depth, address))
    return view.render(
        "answer.html",
        409 if draft else 200,
        answer=answer,
        noted=notes_on(view, _noted(answer), draft),
        row=whole([answer.row])[0],
        asked=_asked(answer),
        verdict={name: getattr(grade, name, answer.line.get(name)) for name in VERDICT},
        facts=_facts(answer, tokens),
        counted=_counted(answer),
        tokens=tokens,
        lines=_lines(tokens, most) if tokens and form == "tokens" else [],
        columns=_columns(tokens, most) if tokens else {},
        colourings=colours,
        made_of_credit=made,
        forms=forms,
        form=form,
        drawing=drawing,
        depth=depth,
        chain=_chain(view, answer, tokens, config) if tokens is not None and form == "credit" else {},
        drawing_note=NOTE,
        text=text,
        left_out=left_out,
        everything=everything,
        tokens_left_out=0 if most is None or tokens is None else max(0, tokens.count - most),
        prompt_text=lambda text: shortened(str(text), LONGEST_DATA),
        verdict_text=lambda text: shortened(str(text), LONGEST_VERDICT),
        credits=credits,
        credited_steps=max((len(method.cells) for method in credits), default=0),
        reading=reading,
    )


def _reading(view: PageRequest, answers: AnswerStore, answer: StoredAnswer) -> dict[str, Any]:
    """Returns the list that the answer is read in, as the address has it, else the answers to its problem:
    the page that it is on, and the addresses of the next one and the one before."""
    own = listed_as(view)
    if not own:
        own = {"of": [answer.source.name], "group": [answer.row["problem"]], "sort": [PLACE]}
        same = (ColumnFilter("problem", "=", answer.row["problem"]),)
        question = RowQuery((answer.source.name,), same)
    else:
        question, _ = asked_of(view, answers)
    if not view.text("page") and not question.search:
        question = replace(question, page=answers.page_of(question, answer.row))
    result = answers.ask(question)
    pages, number = max(1, -(-result.total // question.size)), question.page

    def address(row: Mapping[str, Any] | None, **query: Any) -> str:
        """Returns the address of an answer in the list; without one, of the page's first or last."""
        chosen = {"source": row and row["source"], "answer": row and row["answer"]}
        return view.here(**own | {"page": number, "all": None} | chosen | query)

    places = [(row["source"], row["row"]) for row in result.rows]
    this = (answer.row["source"], answer.row["row"])
    at = places.index(this) if this in places else None
    before = address(None, page=number - 1, last=1) if number > 1 else None
    after = address(None, page=number + 1) if number < pages else None
    if at is not None and at > 0:
        before = address(result.rows[at - 1])
    if at is None or at + 1 < len(result.rows):
        after = address(result.rows[0 if at is None else at + 1]) if result.rows else None
    return {
        "rows": whole(result.rows, [question.sort] if question.sort else ()),
        "result": result,
        "question": question,
        "number": None if at is None else question.skipped + at + 1,
        "before": before,
        "after": after,
        "address_of": address,
        "back": view.address("/answers", run=view.run.name, **own | {"page": number}),
        "of_problem": "group" in own,
    }


def _forms(tokens: Tokens | None, further: Sequence[str]) -> Sequence[str]:
    """Returns the forms in which an answer can be shown, the usual one first."""
    if tokens is None or tokens.texts is None:
        return ("rendered", "text", *further)
    drawn = ("threads",) if any(tokens.branches) else ()
    return ("tokens", *drawn, *further, "rendered", "text")


# Tokens


def colourings(tokens: Tokens | None, made: str) -> list[dict[str, Any]]:
    """Returns all numbers that tokens can be coloured by: what the colours mean, the `scale` from which on
    they are full, and why a number is `missing`, where it is. `made` describes what training makes of
    credit's advantages."""
    known: Mapping[str, np.ndarray] = tokens.numbers if tokens is not None else {}
    trains = "as it trains" if OF_CREDIT in known or not made else f"as credit gave it ({made})"
    kinds = [
        (
            "advantage",
            True,
            f"blue: made more likely; orange: less; {trains}",
            "none was given before training (a critic's are found in it, demonstrations have none)",
        ),
        (OF_CREDIT, True, f"as credit gave it ({made})", ""),
        ("log-prob", False, "the darker, the less likely when it was sampled", "no log-probs are stored"),
        ("entropy", False, "the darker, the less sure the policy was, in nats", UNRECORDED),
        ("gap", True, "the trainer's log-prob minus the engine's: blue above, orange below", UNRECORDED),
        ("log-ratio", True, "blue: likelier when it trained last; orange: less", ""),
    ]
    colours = []
    for name, signed, meaning, missing in kinds:
        if name in (OF_CREDIT, "log-ratio") and name not in known:
            continue
        column, scale = known.get(name), None
        sizes = np.abs(column[np.isfinite(column)]) if column is not None else np.empty(0)
        if len(sizes):
            # An advantage is a whole step's, and the step that matters may be short: the largest is full.
            quantile = 1.0 if name in ("advantage", OF_CREDIT) else COLOURED_FULLY
            scale, missing = float(np.quantile(sizes, quantile)) or float(sizes.max()) or 1.0, ""
        one = {"name": name, "meaning": meaning, "scale": scale, "signed": signed, "missing": missing}
        colours.append(one)
    return colours


def _lines(tokens: Tokens, most: int | None) -> list[tuple[CreditedStep, list[dict[str, Any]]]]:
    """Returns steps with their tokens, as far as these are shown: ends of lines are visible, and so is a
    token without a text, or one that heaps more marks on a character than are shown."""
    assert tokens.texts is not None
    lines = []
    for step in tokens.steps:
        end = step.end if most is None else min(step.end, most)
        if step.start >= end and tokens.count:
            break
        own = []
        for i in range(step.start, end):
            text = "" if ends_in_a_heap("".join(tokens.texts[max(0, i - MARKS) : i + 1])) else tokens.texts[i]
            written = shortened(text, LONGEST_TOKEN).replace("\n", "↵\n") if text else f"⟨{tokens.ids[i]}⟩"
            own.append({"place": i, "text": written, "injected": not tokens.sampled[i]})
        lines.append((step, own))
    return lines


def shortened(text: str, most: int) -> str:
    """Returns the beginning of a text, visible, and how much of it was left out."""
    beginning, left_out = cut(text, most)
    return visible(beginning) + (f"⟨{left_out:,} more characters⟩" if left_out else "")


def _columns(tokens: Tokens, most: int | None) -> dict[str, Any]:
    """Returns exact numbers of the tokens that are shown, for the browser: null where there is none."""
    columns: dict[str, Any] = {"id": tokens.ids[:most].tolist()}
    for name, column in tokens.numbers.items():
        # The shortest digits that give the same number in its own precision.
        columns[name] = [float(str(x)) if np.isfinite(x) else None for x in column[:most]]
    if any(version is not None for version in tokens.versions):
        columns["policy version"] = tokens.versions[:most]
    if any(tokens.branches):
        columns["thread"] = [
            " ".join(f"{block + 1}.{thread + 1}" for block, thread in branch) or None
            for branch in tokens.branches[:most]
        ]
    return columns


def _chain(
    view: PageRequest, answer: StoredAnswer, tokens: Tokens, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the steps on their way from values into the gradient, and what the configuration and the
    iteration's metrics say of that way."""
    trainer, episode = config.get("trainer") or {}, answer.episode
    objective = trainer.get("objective") or {}
    steps = trained_steps(answer, tokens, config)
    metrics: Mapping[str, Any] = next(
        (
            row
            for row in view.store.experiment(view.run).metrics
            if row.get("iteration") == answer.source.number - 1
        ),
        {},
    )
    assert episode is not None
    sizes = [abs(one.given) for one in steps]
    trained = [abs(one.trained) for one in steps if one.trained is not None]
    turned = [one for one in steps if one.trained is not None and one.given * one.trained < 0]
    return {
        "steps": [
            (one, shortened("".join((tokens.texts or ())[one.step.start : one.step.end]).strip(), OF_A_STEP))
            for one in steps
        ],
        "scale": max(sizes, default=0.0) or 1.0,
        "trained_scale": max(trained, default=0.0) or 1.0,
        "largest": max((one.share or 0.0 for one in steps), default=0.0) or 1.0,
        "share": math.fsum(one.share or 0.0 for one in steps),
        "turned": len(turned),
        "ratios": any(one.ratio is not None for one in steps),
        "moved": len([one for one in steps if one.given == 0 and one.trained]),
        "shaping": episode.reward - episode.score,
        "score": episode.score,
        "reward": episode.reward,
        "objective": objective,
        "normalised": trainer.get("advantage_normalisation"),
        "penalised": penalised(config),
        "metrics": metrics,
    }


# The whole answer


def _noted(answer: StoredAnswer) -> NotedAnswer:
    """Returns what a note says of the answer that it is on."""
    row, asked = whole([answer.row], ["advantage_mean"])[0], _asked(answer)
    return NotedAnswer(
        source=answer.source.name,
        answer=row["answer"],
        problem=row["problem"],
        sample=row["sample"],
        prompt=asked["prompt"],
        text=answer.text,
        gold=asked["gold"],
        score=row["score"],
        reward=row["reward"],
        outcome=row["outcome"],
        advantage=row["advantage_mean"],
    )


def _asked(answer: StoredAnswer) -> dict[str, Any]:
    """Returns the problem: its prompt, its messages where it is a conversation, the gold answer, further
    data."""
    if answer.trajectory is not None:
        problem = answer.trajectory.problem
        return {
            "prompt": problem.prompt,
            "messages": problem.messages,
            "gold": problem.gold,
            "data": dict(problem.data),
        }
    line = answer.line
    prompt = line.get("prompt") or answer.row.get("asked") or ""
    messages = line.get("messages") or ()  # of another program's conversation
    return {"prompt": prompt, "messages": messages, "gold": line.get("gold"), "data": {}}


def _facts(answer: StoredAnswer, tokens: Tokens | None) -> dict[str, str]:
    """Describes the whole answer."""
    row, trajectory, episode = answer.row, answer.trajectory, answer.episode
    facts: dict[str, str] = {}
    count = row.get("tokens")
    if count is not None:
        injected = row.get("injected") or 0
        words = f"{count}, {injected} of them injected" if injected else f"{count}"
        facts["tokens"] = f"{words}{', cut off by the budget' if row.get('unfinished') else ''}"
    elif row.get("unfinished"):
        facts["unfinished"] = "it was cut off"
    if answer.source.is_foreign and row.get("finish_reason"):
        facts["ended"] = str(row["finish_reason"]).replace("_", " ")
    if trajectory is not None and trajectory.bonus:
        facts["shaping"] = f"{trajectory.bonus:+.4g}, so the reward is {trajectory.reward:.4g}"
    if tokens is not None and (versions := sorted({one for one in tokens.versions if one is not None})):
        facts["sampled by"] = "policy after iteration " + ", ".join(map(str, versions))
    seconds = [one.seconds for one in trajectory.segments if one.seconds is not None] if trajectory else []
    if seconds:
        facts["seconds"] = f"{sum(seconds):.2f} in {len(seconds)} request{'s' if len(seconds) > 1 else ''}"
    if trajectory is not None and trajectory.fork is not None:
        facts["grew out of"] = (
            f"answer {trajectory.fork.sample}, after {trajectory.fork.tokens} of its tokens"
        )
    if answer.source.kind == "iteration" and answer.source.episodes is not None:
        if not answer.episodes:
            facts["credit"] = "none: it was not selected for training"
        elif episode is None:
            facts["credit"] = f"in {len(answer.episodes)} training rows with other tokens than these"
        elif episode.pair is not None:
            facts["pair"] = f"{episode.pair}, the {'better' if episode.chosen else 'worse'} of the two"
    return facts


def _counted(answer: StoredAnswer) -> dict[str, float]:
    """Returns the numbers of graders and rollouts."""
    counted: dict[str, float] = {}
    if answer.trajectory is not None:
        counted |= {f"grade/{name}": x for name, x in answer.trajectory.grade.numbers.items()}
        counted |= answer.trajectory.numbers
    for group, own in answer.line.items():
        if isinstance(own, dict):
            counted |= {f"{group}/{name}": x for name, x in own.items() if isinstance(x, int | float)}
    return counted


PAGES = (
    Page(
        "/answer",
        "StoredAnswer",
        show,
        mark=lambda view: digest(
            view.store.answers(view.run).mark(),
            mark_of_credits(view.run.path),
            view.store.notes(view.run).mark(),
            all_labels(view),
            view.request.url.query,
        ),
        save=save,
    ),
)
