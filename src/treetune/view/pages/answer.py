"""The page of an answer.

It shows coloured tokens, steps with their values, the grader's verdict, the credit of several methods, and
notes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from treetune.exceptions import NotThere
from treetune.view.drawings import DRAWING_NOTE, ThreadedAnswer, threads_html, tree_html
from treetune.view.experiment import CREDITED_LOG
from treetune.view.notes import NotedAnswer
from treetune.view.page import Form, Page, PageRequest
from treetune.view.pages.answers import STORED_ORDER, list_fields, question_of_address, with_all_columns
from treetune.view.pages.notes import Draft, all_labels, notes_on, save_form
from treetune.view.store.answers import AnswerStore, StoredAnswer
from treetune.view.store.folders import short_hash
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.store.tokens import (
    ADVANTAGE_OF_CREDIT,
    KL_TO_REFERENCE,
    CreditedStep,
    Tokens,
    all_texts,
    credits_of,
    describe_credit_change,
    fingerprint_of_credits,
    has_kl_penalty,
    texts_of,
    tokens_of,
    trained_steps,
)
from treetune.view.templates import FULL_COLOUR_QUANTILE
from treetune.view.text import CHARACTERS_SHOWN, MOST_SHOWN_MARKS, cut_text, ends_in_a_heap, make_visible
from treetune.vocabulary import Episode

TOKENS_SHOWN = 4000
"""The number of tokens that are shown at first."""

LONGEST_TOKEN, LONGEST_VERDICT, LONGEST_DATA = 1000, 2000, 20_000
"""The most characters that are shown of each text: a token; an extracted answer, a grader's message or a
reference answer; a prompt or data."""

CHARACTERS_OF_STEP = 140
"""The number of characters of a step in the table of its credit."""

WHY_UNRECORDED = (
    "the trainer recorded no numbers of this answer's tokens: the answer was not trained on, or the iteration"
    " has no token_signals.arrow"
)
VERDICT_FIELDS = ("outcome", "extracted", "message", "seconds")
"""The attributes of a grade that are shown in addition to its score."""


def show(view: PageRequest) -> Response:
    """Shows an answer, or redirects to one if the address has no `?answer=`.

    The address has `?run=`, `?source=` (the file), `?answer=`, `?as=` (see `_list_forms`), `?colour=` (the
    name of a number), `?depth=` (of a tree), `?all=1` (nothing is left out of a long answer) and `?on=1` (the
    page goes to the next answer after a label is ticked). It also has the fields of the list of answers,
    which `pages.answers.show` lists.

    If the address has no `?answer=`, the page redirects to the first answer on the present page of the list,
    or with `?last=1` to the last answer on it.
    """
    if not view.text("answer"):
        answers = view.store.answers(view.run)
        rows = answers.ask(question_of_address(view, answers)[0]).rows
        if not rows:
            raise NotThere("answer not found")
        row = rows[-1 if view.text("last") else 0]
        return RedirectResponse(view.here(source=row["source"], answer=row["answer"], last=None), 303)
    return _render_answer(view, _find_answer(view))


def save(view: PageRequest, form: Form) -> Response:
    """Saves the form's note and shows the answer again, with the form as it was sent if it can't be saved."""
    answer = _find_answer(view)
    draft = save_form(view, _describe_for_note(answer), form)
    if draft is None:
        return RedirectResponse(f"{view.here()}#notes", 303)
    return _render_answer(view, answer, draft)


def _find_answer(view: PageRequest) -> StoredAnswer:
    """Returns the answer that the address names.

    Raises NotThere while the index of its file is being made (the page reloads by itself), and ValueError if
    the file can't be read.
    """
    answers, source = view.store.answers(view.run), view.text("source")
    for item in answers.list_indexed_sources():
        if item.source.name == source and item.fault:
            raise ValueError(item.fault)
        if item.source.name == source and item.is_awaited:
            raise NotThere(f"{item.source.title} is still being read: the answer will appear on this page")
    return answers.answer(source, view.text("answer"))


def _render_answer(view: PageRequest, answer: StoredAnswer, draft: Draft | None = None) -> Response:
    """Returns the page of an answer. If there is a draft, the page has the form that could not be saved."""
    answers, episode = view.store.answers(view.run), answer.episode
    try:
        config = view.store.experiment(view.run).config
    except ValueError:  # it can't be read
        config = {}
    is_credited_log = config.get("type") == CREDITED_LOG
    tokens = tokens_of(view.run.path, answer, config)
    credit_change = describe_credit_change(config)  # a text on how training changes the advantages of credit
    colours = make_colourings(tokens, credit_change)
    if is_credited_log:  # the trainer of a log records no numbers of tokens
        colours = [colouring for colouring in colours if not colouring["missing"]]

    # The form in which the answer is shown.
    further_forms = []
    has_advantages = episode is not None and episode.advantages is not None
    # For another program's log, the advantages after the trainer changed them, and their shares in the
    # gradient, are unknown.
    if has_advantages and answer.source.episodes is not None and not is_credited_log:
        further_forms.append("credit")
    if episode is not None:
        further_forms.append("tree")
    forms = _list_forms(tokens, further_forms)
    form = view.choice("as", forms)
    depth = view.integer("depth", 0)
    everything = bool(view.choice("all", ("", "1")))
    most_tokens = None if everything else TOKENS_SHOWN
    text, left_out = cut_text(answer.text, len(answer.text) if everything else CHARACTERS_SHOWN)
    drawing: Markup | str = ""
    if form == "threads" and tokens is not None:
        scales = {colouring["name"]: colouring["scale"] for colouring in colours}
        scale = scales.get(ADVANTAGE_OF_CREDIT) or scales["advantage"] or 1.0
        threaded = ThreadedAnswer(tokens.texts or (), answer.episode, answer.trajectory, scale)
        drawing = Markup(threads_html(threaded))
    elif form == "tree" and episode is not None:
        drawing = _draw_tree(view, answers, answer, episode, depth)
    tokens_left_out = 0
    if tokens is not None and most_tokens is not None:
        tokens_left_out = max(0, tokens.count - most_tokens)

    credits = credits_of(view.run.path, answer)
    grade = answer.trajectory.grade if answer.trajectory is not None else None
    return view.render(
        "answer.html",
        409 if draft else 200,  # 409 (conflict): the note of the form could not be saved
        answer=answer,
        noted=notes_on(view, _describe_for_note(answer), draft),
        row=with_all_columns([answer.row])[0],
        asked=_problem_of(answer),
        prompt_tokens=_prompt_of_tokens(view, answer),
        verdict={name: getattr(grade, name, answer.line.get(name)) for name in VERDICT_FIELDS},
        facts=_list_facts(answer, tokens, is_credited_log=is_credited_log),
        is_credited_log=is_credited_log,
        counted=_numbers_of(answer),
        tokens=tokens,
        lines=_make_shown_steps(tokens, most_tokens, _has_end(answer)) if tokens and form == "tokens" else [],
        columns=_make_token_columns(tokens, most_tokens) if tokens else {},
        colourings=colours,
        made_of_credit=credit_change,
        forms=forms,
        form=form,
        drawing=drawing,
        depth=depth,
        chain=_make_gradient_chain(view, answer, tokens, config)
        if tokens is not None and form == "credit"
        else {},
        drawing_note=DRAWING_NOTE,
        text=text,
        left_out=left_out,
        everything=everything,
        tokens_left_out=tokens_left_out,
        prompt_text=lambda text: shorten_text(str(text), LONGEST_DATA),
        verdict_text=lambda text: shorten_text(str(text), LONGEST_VERDICT),
        credits=credits,
        credited_steps=max((len(method.cells) for method in credits), default=0),
        reading=_make_reading_list(view, answers, answer),
    )


def _draw_tree(
    view: PageRequest, answers: AnswerStore, answer: StoredAnswer, episode: Episode, depth: int
) -> Markup:
    """Returns a drawing of the tree of all answers to the problem, from the step `depth` on."""
    group = answers.group(answer.source.name, answer.row["problem"])
    answer_names = [member.trajectory for member in group]
    this_answer = answer_names.index(episode.trajectory) if episode.trajectory in answer_names else 0
    # The address of this page without the fields that its links set.
    base = view.here(answer=None, depth=None, all=None, **{"as": None})

    def address(number: int, depth: int | None, start: int | None = None) -> str:
        """Returns the address of a page about the answer `number` of the group, as `tree_html` needs it.

        With `start`, it is the page of the continuations after `start` tokens. With `depth`, it is the tree
        from that step on. With neither, it is the answer itself.
        """
        query: dict[str, Any] = {"answer": group[number].trajectory}
        if start is not None:
            run, source = view.run.name, answer.source.name
            return view.address("/continuations", **query, run=run, source=source, start=start)
        if depth is not None:
            query["as"] = "tree"
            if depth:
                query["depth"] = depth
        return f"{base}&{urlencode(query)}"

    return Markup(tree_html(group, all_texts(view.run.path) or [], this_answer, depth, address))


def _make_reading_list(view: PageRequest, answers: AnswerStore, answer: StoredAnswer) -> dict[str, Any]:
    """Returns the list of answers that is shown next to the answer.

    If the address has fields that describe a list (`list_fields`), it is that list. If not, the list has all
    answers to the same problem. The result has one page of the list, and the addresses of the answers before
    and after this answer, as values for ``answer.html``.
    """
    fields = list_fields(view)
    if fields:
        question, _ = question_of_address(view, answers)
    else:
        fields = {"of": [answer.source.name], "group": [answer.row["problem"]], "sort": [STORED_ORDER]}
        same_problem = ColumnFilter("problem", "=", answer.row["problem"])
        question = RowQuery((answer.source.name,), (same_problem,))
    # If the address names no page, the page with this answer is taken. With a search the page isn't known,
    # since `page_of` ignores the text that is searched for.
    if not view.text("page") and not question.search:
        question = replace(question, page=answers.page_of(question, answer.row))
    result = answers.ask(question)
    pages = max(1, math.ceil(result.total / question.size))
    number = question.page

    def address(row: Mapping[str, Any] | None, **query: Any) -> str:
        """Returns the address of an answer in the list. If `row` is None, it is the first answer on a page of
        the list, or the last with ``last=1``."""
        fields_of_answer = {"source": row and row["source"], "answer": row and row["answer"]}
        return view.here(**fields | {"page": number, "all": None} | fields_of_answer | query)

    keys = [(row["source"], row["row"]) for row in result.rows]
    this_key = (answer.row["source"], answer.row["row"])
    position = keys.index(this_key) if this_key in keys else None
    previous_address = next_address = None
    if position is not None and position > 0:
        previous_address = address(result.rows[position - 1])
    elif number > 1:  # the last answer on the page before
        previous_address = address(None, page=number - 1, last=1)
    if position is None:  # the answer isn't on the page any more: the next one is the page's first
        next_address = address(result.rows[0]) if result.rows else None
    elif position + 1 < len(result.rows):
        next_address = address(result.rows[position + 1])
    elif number < pages:  # the first answer on the page after
        next_address = address(None, page=number + 1)
    return {
        "rows": with_all_columns(result.rows, [question.sort] if question.sort else ()),
        "result": result,
        "question": question,
        "number": None if position is None else question.rows_before_page + position + 1,
        "before": previous_address,
        "after": next_address,
        "address_of": address,
        "back": view.address("/answers", run=view.run.name, **fields | {"page": number}),
        "of_problem": "group" in fields,
    }


def _list_forms(tokens: Tokens | None, further: Sequence[str]) -> Sequence[str]:
    """Returns the names of the forms in which an answer can be shown, the default first.

    `further` has those that need an episode, such as "credit" and "tree".
    """
    if tokens is None or tokens.texts is None:
        return ("rendered", "text", *further)
    threads = ("threads",) if any(tokens.branches) else ()
    return ("tokens", *threads, *further, "rendered", "text")


# Tokens


class _Colouring(NamedTuple):
    """A number of tokens by which they can be coloured."""

    name: str
    is_signed: bool
    meaning: str
    """What the colours mean."""
    why_missing: str = ""
    """Why an answer may lack the number. If it is empty, the colouring is left out for such an answer."""


def make_colourings(tokens: Tokens | None, credit_change: str) -> list[dict[str, Any]]:
    """Returns a dictionary for each kind of number that tokens can be coloured by.

    It has the `name`, the `meaning` of the colours, whether numbers are `signed`, the `scale` (the absolute
    value from which the colour is full), and `missing`, which says why the answer has no such numbers and is
    empty if it has. `credit_change` describes how training changes the advantages of credit.
    """
    numbers: Mapping[str, np.ndarray] = tokens.numbers if tokens is not None else {}
    kind_of_advantage = "training advantage"
    if credit_change and ADVANTAGE_OF_CREDIT not in numbers:
        kind_of_advantage = f"advantage of credit assignment ({credit_change})"
    # `ADVANTAGE_OF_CREDIT` is the advantage before training changed it; "advantage" is then the changed one.
    colourings = [
        _Colouring(
            "advantage",
            is_signed=True,
            meaning=f"blue: made more likely; orange: made less likely; {kind_of_advantage}",
            why_missing="not computed before training (a critic computes them in training, demonstrations"
            " have none)",
        ),
        _Colouring(
            ADVANTAGE_OF_CREDIT,
            is_signed=True,
            meaning=f"before training changes it ({credit_change})",
        ),
        _Colouring(
            "log-prob",
            is_signed=False,
            meaning="darker: less likely when it was sampled",
            why_missing="no log-probs are stored",
        ),
        _Colouring(
            "entropy",
            is_signed=False,
            meaning="darker: the policy was less certain, in nats",
            why_missing=WHY_UNRECORDED,
        ),
        _Colouring(
            "gap",
            is_signed=True,
            meaning="the trainer's log-prob minus the engine's: blue above, orange below",
            why_missing=WHY_UNRECORDED,
        ),
        _Colouring(
            "log-ratio",
            is_signed=True,
            meaning="blue: more likely at the last optimiser step than before the iteration; orange: less"
            " likely",
        ),
        _Colouring(
            KL_TO_REFERENCE,
            is_signed=False,
            meaning="darker: further from the reference model; the mean over all tokens is train/kl",
        ),
    ]
    colours = []
    for name, is_signed, meaning, missing in colourings:
        if name not in numbers and not missing:
            continue
        column, scale = numbers.get(name), None
        absolute_values = np.abs(column[np.isfinite(column)]) if column is not None else np.empty(0)
        if len(absolute_values):
            # All tokens of a step have the step's advantage. If the step with the largest advantage is short,
            # a quantile below 1 could be smaller than that advantage, whose colour would not stand out.
            quantile = 1.0 if name in ("advantage", ADVANTAGE_OF_CREDIT) else FULL_COLOUR_QUANTILE
            # The quantile is 0 if most numbers are. Then the largest number has the full colour.
            scale = float(np.quantile(absolute_values, quantile)) or float(absolute_values.max()) or 1.0
            missing = ""
        colours.append(
            {"name": name, "meaning": meaning, "scale": scale, "signed": is_signed, "missing": missing}
        )
    return colours


def _has_end(answer: StoredAnswer) -> bool:
    """Returns whether the model ended the answer. If it did, the last token is an end token, such as
    ``<|im_end|>``."""
    return answer.row.get("finish_reason") == "stop"


class _ShownToken(NamedTuple):
    """A token of an answer, as the page shows it: ``_ShownToken(4, "so↵", injected=False)``."""

    place: int
    """The number of the token in the answer."""
    text: str
    injected: bool
    """Whether the policy didn't sample it."""


class _ShownStep(NamedTuple):
    """A step with its tokens, or with the first of them if the others are not shown."""

    step: CreditedStep
    tokens: list[_ShownToken]


def _make_shown_steps(tokens: Tokens, most_tokens: int | None, has_end: bool) -> list[_ShownStep]:
    """Returns the steps with their tokens as they are shown, up to the first `most_tokens` tokens of the
    answer.

    Ends of lines are made visible. A token is shown by its id if it has no text, or if it adds an accent to a
    character that has too many (`text.MOST_SHOWN_MARKS`). The end token is shown as ``⟨end⟩``. If
    `most_tokens` is None, all tokens are shown.
    """
    assert tokens.texts is not None
    lines = []
    for step in tokens.steps:
        end = step.end if most_tokens is None else min(step.end, most_tokens)
        # Steps that begin after the first `most_tokens` tokens are not shown. (An answer without tokens has a
        # single empty step, which is shown.)
        if step.start >= end and tokens.count:
            break
        shown_tokens = []
        for i in range(step.start, end):
            # The character and its accents may be spread over this token and those before it.
            recent_text = "".join(tokens.texts[max(0, i - MOST_SHOWN_MARKS) : i + 1])
            text = "" if ends_in_a_heap(recent_text) else tokens.texts[i]
            is_end = has_end and i == tokens.count - 1 and not tokens.texts[i]
            if text:
                shown_text = shorten_text(text, LONGEST_TOKEN).replace("\n", "↵\n")
            else:
                shown_text = "⟨end⟩" if is_end else f"⟨{tokens.ids[i]}⟩"
            shown_tokens.append(_ShownToken(i, shown_text, injected=not tokens.sampled[i]))
        lines.append(_ShownStep(step, shown_tokens))
    return lines


def shorten_text(text: str, max_characters: int) -> str:
    """Returns the first `max_characters` characters of a text, with invisible characters made visible.

    If the text is longer, it ends with the number of characters that were left out.
    """
    beginning, left_out = cut_text(text, max_characters)
    return make_visible(beginning) + (f"⟨{left_out:,} more characters⟩" if left_out else "")


def _make_token_columns(tokens: Tokens, most_tokens: int | None) -> dict[str, Any]:
    """Returns the numbers of the shown tokens as columns for the browser, by name.

    A token without a number has None. Example: {"id": [15, 7], "advantage": [0.25, None]}.
    """
    columns: dict[str, Any] = {"id": tokens.ids[:most_tokens].tolist()}
    for name, column in tokens.numbers.items():
        # `str` gives the fewest digits that stand for the number in the column's precision, such as float32.
        columns[name] = [float(str(x)) if np.isfinite(x) else None for x in column[:most_tokens]]
    if any(version is not None for version in tokens.versions):
        columns["policy version"] = tokens.versions[:most_tokens]
    # A token's branch has a pair for each block of threads around the token, the outermost first: the number
    # of the block and the number of the thread, both from 0.
    if any(tokens.branches):
        threads = []
        for branch in tokens.branches[:most_tokens]:
            numbers = " ".join(f"{block + 1}.{thread + 1}" for block, thread in branch)
            threads.append(numbers or None)
        columns["thread"] = threads
    return columns


def _make_gradient_chain(
    view: PageRequest, answer: StoredAnswer, tokens: Tokens, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values for ``chain.html``, which shows how each step's value leads to its share in the
    gradient.

    They include the settings, and the metrics of the iteration, that affect these numbers.
    """
    trainer, episode = config.get("trainer") or {}, answer.episode
    objective = trainer.get("objective") or {}
    steps = trained_steps(answer, tokens, config)
    metrics: Mapping[str, Any] = {}
    for row in view.store.experiment(view.run).metrics:
        if row.get("iteration") == answer.source.number - 1:  # metrics count iterations from 0, files from 1
            metrics = row
    assert episode is not None
    rows = [(item, shorten_text(_text_of_step(tokens, item.step), CHARACTERS_OF_STEP)) for item in steps]
    advantages = [abs(item.advantage) for item in steps]
    trained_advantages = [abs(item.trained_advantage) for item in steps if item.trained_advantage is not None]
    shares = [item.share or 0.0 for item in steps]
    n_turned = n_moved = 0
    for item in steps:
        if item.trained_advantage is None:
            continue
        if item.advantage * item.trained_advantage < 0:  # the sign changes in training
            n_turned += 1
        elif item.advantage == 0 and item.trained_advantage != 0:  # 0 becomes another number in training
            n_moved += 1
    return {
        "steps": rows,
        "scale": max(advantages, default=0.0) or 1.0,
        "trained_scale": max(trained_advantages, default=0.0) or 1.0,
        "largest": max(shares, default=0.0) or 1.0,
        "share": math.fsum(shares),
        "turned": n_turned,
        "ratios": any(item.ratio is not None for item in steps),
        "moved": n_moved,
        "shaping": episode.reward - episode.score,
        "score": episode.score,
        "reward": episode.reward,
        "objective": objective,
        "normalised": trainer.get("advantage_normalisation"),
        "penalised": has_kl_penalty(config),
        "metrics": metrics,
    }


def _text_of_step(tokens: Tokens, step: CreditedStep) -> str:
    """Returns the text of a step without space around it."""
    return "".join((tokens.texts or ())[step.start : step.end]).strip()


# The whole answer


def _describe_for_note(answer: StoredAnswer) -> NotedAnswer:
    """Returns the description of an answer that is stored in a note about it."""
    [row] = with_all_columns([answer.row], ["advantage_mean"])
    stored_problem = _problem_of(answer)
    return NotedAnswer(
        source=answer.source.name,
        answer=row["answer"],
        problem=row["problem"],
        sample=row["sample"],
        prompt=stored_problem["prompt"],
        text=answer.text,
        gold=stored_problem["gold"],
        score=row["score"],
        reward=row["reward"],
        outcome=row["outcome"],
        advantage=row["advantage_mean"],
    )


def _problem_of(answer: StoredAnswer) -> dict[str, Any]:
    """Returns the answer's problem: "prompt", "messages" (empty if it isn't a conversation), "gold" (the
    reference answer) and "data" (further fields)."""
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
    messages = line.get("messages") or ()  # a conversation in another program's log
    return {"prompt": prompt, "messages": messages, "gold": line.get("gold"), "data": {}}


def _prompt_of_tokens(view: PageRequest, answer: StoredAnswer) -> str | None:
    """Returns the text of the prompt's tokens, in which a token without text is shown by its id.

    It also has the text that a chat template adds to the messages, such as
    ``⟨1⟩system ↵ You are a helpful assistant⟨2⟩``. Returns None if the tokens or their texts are not stored.
    """
    stored = answer.trajectory if answer.trajectory is not None else answer.episode
    if stored is None:
        return None
    texts = texts_of(view.run.path, np.asarray(stored.prompt_ids))
    if texts is None:
        return None
    return "".join(text or f"⟨{token_id}⟩" for token_id, text in zip(stored.prompt_ids, texts, strict=True))


def _list_facts(
    answer: StoredAnswer, tokens: Tokens | None, *, is_credited_log: bool = False
) -> dict[str, str]:
    """Returns facts about the whole answer, by the names that the page shows: {"tokens": "212", …}.

    `is_credited_log` tells whether the answers come from another program's log, and only their credit from
    treetune.
    """
    row, trajectory, episode = answer.row, answer.trajectory, answer.episode
    facts: dict[str, str] = {}
    count = row.get("tokens")
    if count is not None:
        injected = row.get("injected") or 0
        tokens_text = f"{count}, {injected} of them injected" if injected else f"{count}"
        facts["tokens"] = tokens_text + (", cut off by the token limit" if row.get("unfinished") else "")
    elif row.get("unfinished"):
        facts["unfinished"] = "it was cut off"
    if answer.source.is_foreign and row.get("finish_reason"):
        facts["ended"] = str(row["finish_reason"]).replace("_", " ")
    if trajectory is not None and trajectory.bonus:
        facts["shaping"] = f"{trajectory.bonus:+.4g}, so the reward is {trajectory.reward:.4g}"
    versions = (
        {version for version in tokens.versions if version is not None} if tokens is not None else set()
    )
    if versions:
        facts["sampled by"] = "policy after iteration " + ", ".join(map(str, sorted(versions)))
    segments = trajectory.segments if trajectory is not None else ()
    seconds = [segment.seconds for segment in segments if segment.seconds is not None]
    if seconds:
        facts["seconds"] = f"{sum(seconds):.2f} in {len(seconds)} request{'s' if len(seconds) > 1 else ''}"
    if trajectory is not None and trajectory.fork is not None:
        facts["forked from"] = (
            f"answer {trajectory.fork.sample}, after {trajectory.fork.tokens} of its tokens"
        )
    if answer.source.kind == "iteration" and answer.source.episodes is not None:
        if not answer.episodes and is_credited_log:
            facts["credit"] = "none: see the outcome"
        elif not answer.episodes:
            facts["credit"] = "none: the answer was not selected for training"
        elif episode is None:
            facts["credit"] = f"in {len(answer.episodes)} training rows with other tokens"
        elif episode.pair is not None:
            facts["pair"] = f"{episode.pair}, the {'better' if episode.chosen else 'worse'} of the two"
    return facts


def _numbers_of(answer: StoredAnswer) -> dict[str, float]:
    """Returns the numbers that graders and rollouts gave the answer, such as {"grade/rule": 1.0,
    "threads/count": 3.0}."""
    numbers: dict[str, float] = {}
    if answer.trajectory is not None:
        numbers |= {f"grade/{name}": x for name, x in answer.trajectory.grade.numbers.items()}
        numbers |= answer.trajectory.numbers
    for group, members in answer.line.items():
        if isinstance(members, dict):
            numbers |= {f"{group}/{name}": x for name, x in members.items() if isinstance(x, int | float)}
    return numbers


PAGES = (
    Page(
        "/answer",
        "Answer",
        show,
        fingerprint=lambda view: short_hash(
            view.store.answers(view.run).fingerprint(),
            fingerprint_of_credits(view.run.path),
            view.store.notes(view.run).fingerprint(),
            all_labels(view),
            view.request.url.query,
        ),
        save=save,
    ),
)
