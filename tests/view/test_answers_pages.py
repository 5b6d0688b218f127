"""The pages of answers: what an address asks for is listed, and one answer is shown with what is its own."""

import itertools
import json
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.view.conftest import FIRST, Viewer, mark_of
from tests.view.recorded import begin_run, episode, record_iteration, trajectory
from tests.view.report import threaded
from tests.view.report.synthetic import CODEC
from treetune.credit.states.base import AnswerPrefix
from treetune.credit.states.one_line import continuation_request
from treetune.engine.journal import journal_row, request_key
from treetune.engine.requests import Completion, SamplingParams
from treetune.objectives.base import TokenBatch
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.context import AnswerSettings
from treetune.rollouts.storage import (
    SIGNALS,
    read_token_signals,
    write_episodes,
    write_token_signals,
    write_trajectories,
)
from treetune.runtime.directory import _LOCKS
from treetune.store.journal import Journal
from treetune.tasks.arithmetic import AdditionChain
from treetune.view.app import SEEN
from treetune.view.charts import number
from treetune.view.pages import PAGES
from treetune.view.report.write import write_report
from treetune.view.store import Run
from treetune.view.store.queries import ColumnFilter, parse_conditions
from treetune.view.store.tokens import CreditedStep, tokens_of, trained_steps
from treetune.view.terminal import newest_answers
from treetune.vocabulary import Message, Segment, Stretch, Trajectory

COLUMNS = {"tokens": "INTEGER", "outcome": "VARCHAR", "unfinished": "BOOLEAN", "number.lines/count": "DOUBLE"}


def test_titles_of_pages_are_words() -> None:
    assert [page.title for page in PAGES if not re.fullmatch("[A-Z][a-z]+( [a-z]+)*", page.title)] == []


def test_conditions_are_read() -> None:
    assert parse_conditions("tokens >= 300; outcome has Time ;unfinished=true", COLUMNS) == [
        ColumnFilter("tokens", ">=", 300.0),
        ColumnFilter("outcome", "has", "Time"),
        ColumnFilter("unfinished", "=", True),
    ]
    assert parse_conditions("number.lines/count<2", COLUMNS) == [ColumnFilter("number.lines/count", "<", 2.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens", "is not a condition"),
        ("size > 3", "answers have no 'size'"),
        ("tokens > many", "compared with a number"),
        ("unfinished = 1", "true or false"),
        ("tokens > nan", "compared with a number"),
        ("tokens < 1e999", "compared with a number"),
    ],
)
def test_a_wrong_condition_is_explained(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_conditions(text, COLUMNS)


def test_the_list_shows_the_newest_iteration_or_what_is_asked_for(viewer: Viewer) -> None:
    viewer.record(iterations=2)
    newest = viewer.page("/answers?run=run")
    assert newest.count("iteration 2</td>") == 8 and "iteration 1</td>" not in newest
    order = [
        re.findall(r'id="(a-[^"]+)"', viewer.page(f"/answers?run=run{how}"))
        for how in ("", "&sort=advantage_size&order=down", "&sort=tokens&order=down", "&sort=tokens&order=up")
    ]
    assert order[0] == order[1], "where nothing is asked for, those with the most credit come first"
    assert order[2] != order[3] and sorted(order[2]) == sorted(order[0])
    asked = {"run": "run", "of": "everything", "where": "score < 1; tokens > 3", "sort": "tokens"}
    assert "validation after 1 iterations</td>" in viewer.page("/answers", **asked)
    # An evaluation is sorted and filtered by what only iterations have.
    asked = {"run": "run", "of": "e1-validation", "sort": "advantage_mean", "where": "tokens < 1e300"}
    assert "<b>12</b> answers" in viewer.page("/answers", **asked)
    assert "No answer matches" in viewer.page("/answers", **{**asked, "where": "advantage_mean > 0"})
    record_iteration(begin_run(viewer.folder / "unmeasured"), 0)
    for status, query, words in (
        (400, {"run": "run", "where": "color = red"}, "answers have no"),
        (400, {"run": "run", "page": "9" * 20}, "at most 9 digits"),
        (404, {"run": "unmeasured", "of": "evaluations"}, "no answers of evaluations yet"),
    ):
        assert words in viewer.refusal("/answers", status, **query)


def test_a_damaged_file_is_named_and_not_waited_for(viewer: Viewer) -> None:
    run = viewer.record(iterations=2)
    (run.iteration(1) / "trajectories.arrow").write_bytes(b"nothing")
    page = viewer.page("/answers?run=run")
    assert "iteration 2 can&#39;t be read" in page and "still being read" not in page
    answer = viewer.get("/answer", run="run", source="i2", answer="train/0#0").text
    assert "iteration 2 can&#39;t be read" in answer


def test_credit_of_methods_is_followed_and_has_a_head_for_each_step(viewer: Viewer) -> None:
    run = viewer.record()
    mark = mark_of(viewer.page("/answer", run="run", **FIRST))
    for name, count in (("replay-0001", 2), ("replay-0001-b", 4)):
        row = {"answer": "train/0#0", "step_ends": [*range(count)], "values": {}}
        place = run.path / "analyses" / name / "advantages.jsonl"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(row | {"advantages": {"x": [0.5] * count}}) + "\n")
    after = viewer.get("/answer", {SEEN: mark}, run="run", **FIRST)
    assert after.status_code == 200, "what is found later is shown"
    table = after.text.split('<table class="credits">')[1].split("</table>")[0]
    assert table.count('href="#step-') == 4 and table.count("<td>") == 8


def test_credit_that_is_computed_while_an_answer_is_shown_makes_another_box(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    one = trajectory(0, 0, "a\nb")
    write_trajectories(run.iteration(0) / "trajectories.arrow", [one])

    def box() -> str:
        return viewer.page("/answer", run="run", **FIRST).split('<div id="tokens-')[1].split('"')[0]

    before = box()
    write_episodes(run.iteration(0) / "episodes.arrow", [episode(one)], CODEC)
    assert box() != before


def test_an_experiment_that_cannot_be_read_takes_no_other_along(viewer: Viewer) -> None:
    viewer.record("good")
    lock = viewer.record("bad").path / _LOCKS["run"]
    lock.unlink(missing_ok=True)
    lock.mkdir()  # as what one may not open: an OSError
    page = viewer.page("/")
    assert "good" in page and "Is a directory" in page


def test_numbers_that_are_none_have_names() -> None:
    assert [number(x) for x in (float("-inf"), float("nan"), 2.0)] == ["-inf", "nan", "2"]


def chat_answer(without_text: int) -> Trajectory:
    """An answer to a chat with a solved example, whose template and end have tokens without text."""
    plain = trajectory(0, 0, "4+5=9\n#9")
    messages = (Message("user", "1+2="), Message("assistant", "3"), Message("user", "4+5="))
    ids = [*plain.segments[0].token_ids, *plain.segments[1].token_ids, without_text]
    return replace(
        plain,
        problem=replace(plain.problem, prompt="1+2=\n\n3\n\n4+5=", messages=messages),
        prompt_ids=[without_text, *plain.prompt_ids],
        segments=(Segment(ids, logprobs=[-0.5] * len(ids), policy_version=0),),
        step_ends=(*plain.step_ends, len(ids)),
    )


def test_the_template_and_the_end_of_a_chat_are_shown(viewer: Viewer) -> None:
    without_text = 300
    answer = chat_answer(without_text)
    record_iteration(begin_run(viewer.folder / "run"), 0, [answer])

    page = viewer.page("/answer", run="run", source="i1", answer=answer.id)

    _, _, template = page.partition("as the model reads it, with the chat template")
    assert template.partition("</details>")[0].count("⟨300⟩") == 1
    assert "⟨end⟩" in page and page.count("⟨300⟩") == 1, "the end token is named, and not shown by its id"
    report = write_report([viewer.folder / "run"]).read_text()
    earlier = report.partition("earlier turns</summary>")[2].partition("</details>")[0]
    assert "user: 1+2=" in earlier and "assistant: 3" in earlier and "4+5=" not in earlier
    assert '<pre class="prompt">4+5=</pre>' in report and "⟨end⟩" in report


def test_an_answer_is_shown_with_its_own_tokens_and_credit(viewer: Viewer) -> None:
    texts = [f"line {i}\n#{'x' * i}" for i in range(5)]
    sampled = [trajectory(i, 0, text) for i, text in enumerate(texts)]
    record_iteration(begin_run(viewer.folder / "run"), 0, sampled)
    for i, text in enumerate(texts):
        page = viewer.page("/answer", run="run", source="i1", answer=f"train/{i}#0")
        shown = "".join(part.split("<", 1)[0] for part in page.split("<span data-i=")[1:])
        shown = "".join(piece.split(">", 1)[1] for piece in unescape(shown).split('"') if ">" in piece)
        assert shown.replace("↵\n", "\n") == text
        assert "V 0.500" in page and "A +0.250" in page
        assert page.count('class="injected">') == 2  # the last token, and the word for it


@pytest.mark.parametrize(
    ("trainer", "colour", "steps"),
    [
        ({}, "made less likely; training advantage", False),
        ({"advantage_normalisation": "whiten"}, "made less likely; training advantage", True),
        (
            {
                "advantage_normalisation": "scale",
                "objective": {"type": "ppo", "kl_coef": 0.1, "kl_placement": "advantage"},
            },
            "advantage of credit assignment (in training it is divided by the standard deviation of the"
            " iteration&#39;s trained tokens and the token&#39;s KL penalty is subtracted from it)",
            True,
        ),
    ],
)
def test_an_answer_says_whether_its_advantages_are_those_that_train(
    viewer: Viewer, trainer: dict[str, Any], colour: str, steps: bool
) -> None:
    viewer.record(trainer=trainer or {"learning_rate": 1e-3})
    page = viewer.page("/answer", run="run", **FIRST)
    assert colour in page and ("before training changes it (in training" in page) == steps
    assert ('value="advantage of credit"' in page) == (trainer == {"advantage_normalisation": "whiten"})


def test_demonstrations_are_titled_so_and_not_as_what_a_policy_sampled(viewer: Viewer) -> None:
    sft = viewer.record("sft", rollout={"type": "demonstrations"})
    (sft.iteration(0) / "trajectories.arrow").unlink()  # demonstrations have episodes alone
    viewer.record("sampled")
    for runs, shown in (
        (["sft"], "demonstrations"),
        (["sampled"], "sampled answers"),
        (["sft", "sampled"], "demonstrations and sampled answers"),
    ):
        titles = re.findall(r"reward of the ([^&<]*)", viewer.page("/run", run=runs))
        assert {title.strip() for title in titles} == {shown}
    assert "reward of the demonstrations" in write_report([sft.path]).read_text()
    assert "<b>8</b> demonstrations" in viewer.page("/answers?run=sft")
    assert "<b>20</b> answers and demonstrations" in viewer.page("/answers?run=sft&of=everything")
    assert "<h2>Demonstration</h2>" in viewer.page("/answer", run="sft", **FIRST)
    assert "<h2>Answer</h2>" in viewer.page("/answer", run="sampled", **FIRST)
    assert "demonstrations of iteration 1" in newest_answers(Run("sft", sft.path), 1)


def test_an_answer_of_an_evaluation_says_what_the_grader_took_and_one_that_is_not_there_is_named(
    viewer: Viewer,
) -> None:
    viewer.record()
    page = viewer.page("/answer", run="run", source="e1-validation", answer="train/0#0")
    assert "extracted" in page and "#3" in page
    assert "No advantage" not in page and 'name="colour"' not in page
    assert "train/99#0" in viewer.refusal("/answer", 404, run="run", source="i1", answer="train/99#0")


def test_a_problem_is_followed_along_training(viewer: Viewer) -> None:
    viewer.record(iterations=3)
    page = viewer.page("/problem?run=run&problem=train/3").partition("<tbody>")[2]
    assert page.count('<tr id="a-') == 12
    assert page.index("iteration 1<") < page.index("iteration 3<") < page.index("validation after 1")
    assert "No answer matches" in viewer.page("/problem?run=run&problem=none")


def test_problems_that_flipped_are_found(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    for iteration, right in enumerate(([True, False, True], [False, False, True])):
        sampled = [trajectory(i, 0, f"{iteration} and {i}", correct=own) for i, own in enumerate(right)]
        record_iteration(run, iteration, sampled)
    where = {"run": "run", "first": "i1", "second": "i2"}
    page = viewer.page("/compare", **where)
    assert [f"train/{i}" in page for i in range(3)] == [True, False, False]
    assert "<b>0</b> better in the second set, <b>1</b> worse" in page
    pair = viewer.page("/compare", **where, problem="train/0")
    assert "<mark>0</mark> and 0" in pair and "<mark>1</mark> and 0" in pair


def test_seeds_of_two_settings_are_compared_over_problems_and_seeds(viewer: Viewer) -> None:
    for setting, rights in (("a", (0, 1)), ("b", (1, 2))):
        for seed, right in enumerate(rights):
            run = begin_run(viewer.folder / f"{setting}{seed}", seed=seed, credit={"type": setting})
            sampled = [trajectory(i, 0, "1", correct=i < 3 * right) for i in range(6)]
            record_iteration(run, 0, sampled)
    page = viewer.page("/compare", run=["a0", "a1", "b0", "b1"])
    assert "<b>6</b> problems in common, in <b>2</b> seeds of each" in page
    assert "Mean change <b>+0.5000</b>" in page and "p = <b>" in page
    assert "<b>6</b> better in the second set, <b>0</b> worse; <b>3</b> became correct" in page
    begin_run(viewer.folder / "c", credit={"type": "c"})
    wrong = viewer.refusal("/compare", 400, run=["a0", "b0", "c"])
    assert "3 experiments are 3 settings with 0 seeds in common" in wrong


def test_histograms_above_the_list_filter_it(viewer: Viewer) -> None:
    viewer.record(iterations=2)
    asked = {"run": "run", "of": "iterations", "where": "tokens > 1"}
    page = viewer.page("/answers/histograms", **asked)
    drawn = re.findall("<figcaption><code>(.*?)</code>", page)
    assert drawn == ["reward", "tokens", "advantage_size"]
    links = [unescape(one) for one in re.findall(r'<a href="(/answers[^"]*where[^"]*)"><title>', page)]
    counts = [int(one) for one in re.findall(r"<title>.*?: (\d+) answers?</title>", page)]
    assert len(links) == len(counts) > 3
    for link, count in zip(links, counts, strict=True):
        assert f"<b>{count}</b> answer" in viewer.page(link)


def test_threads_and_turns_are_steps_of_the_same_tree(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    block = threaded.Fork((threaded.Thread(" b</Thread>"), threaded.Thread(" c</Thread>")))
    answer = threaded.trajectory([" a", block, "</Parallel> d"])
    threaded.write_answers(run.iteration(0), [answer], [threaded.episode(answer, (0.5,))])
    page = viewer.page("/answer", run="run", source="i1", answer="train/1#0", **{"as": "tree"})
    assert "thread 1.1: " in page and "thread 1.2: " in page and page.count("within") > 2
    turns = replace(episode(trajectory(0, 0, "one\ntwo")), step_values=None, step_rewards=(0.25, 0.5))
    other = begin_run(viewer.folder / "turns")
    record_iteration(other, 0, [trajectory(0, 0, "one\ntwo")])
    write_episodes(other.iteration(0) / "episodes.arrow", [turns], CODEC)
    (other.iteration(0) / "token_signals.arrow").unlink()
    page = viewer.page("/answer", run="turns", source="i1", answer="train/0#0", **{"as": "tree"})
    assert "earned +0.25" in page and "earned +0.5" in page


def test_every_answer_of_a_tree_is_drawn_or_counted_and_can_be_reached(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin_run(viewer.folder / "run")
    record_iteration(run, 0, [trajectory(0, i, f"same\nleaf {i}!\n#3") for i in range(100)])
    where = {"run": "run", "source": "i1", "answer": "train/0#42", "as": "tree"}
    page = viewer.page("/answer", **where)
    drawing = page.split('<svg class="tree"')[1].split("</svg>")[0]
    assert "All 100 answers" in page and " style=" not in page
    words = re.findall("<title>(.*?)</title>", drawing, re.DOTALL)
    assert any(t.startswith("the prompt · value after it 0.500 · 100 answers, 100 correct") for t in words)
    assert {f"leaf {i}!" for i in range(100)} == set(re.findall(r"leaf \d+!", drawing))
    assert drawing.count("here") == 4, "the prompt, what all share, and its own two steps"
    links = re.findall(r'<a href="([^"]+)"', drawing)
    asked = {unescape(one).split("answer=")[1].split("&")[0] for one in links if "as=tree" not in one}
    assert len(asked) == 100, "each leaf leads to its answer"
    assert viewer.page(unescape(links[0]))
    # Branches too low to be seen are one with others of about their value.
    monkeypatch.setattr("treetune.view.drawings.HIGH", 40)
    folded = viewer.page("/answer", **where)
    assert "99 branches of about the same value" in folded and "100 answers, 100 correct" in folded
    nearer = viewer.page("/answer", **where, depth=2)
    assert "<b>1 of the 100 answers</b>" in nearer
    assert "<b>100</b> answers" in viewer.page("/problem?run=run&problem=train/0")


def test_an_answer_is_read_in_its_list_and_the_next_one_lies_on_the_next_page(viewer: Viewer) -> None:
    record_iteration(begin_run(viewer.folder / "run"), 0, [trajectory(i, 0, f"a\n{i}") for i in range(43)])
    listed = {"run": "run", "sort": "problem", "size": 20, "page": 1}
    rows = [unescape(one) for one in re.findall(r'data-href="([^"]+)"', viewer.page("/answers", **listed))]
    seen, address = [], rows[0]
    while address:
        page = viewer.page(address)
        seen.append(re.findall(r"<h1>(\S+) ", page)[0])
        found = re.findall(r'href="([^"]+)" data-key="j"', page)
        address = unescape(found[0]) if found else ""
    assert seen == sorted(f"train/{i}#0" for i in range(43))
    assert "43 of 43" in page
    [before] = re.findall(r'href="([^"]+)" data-key="k"', viewer.page(rows[0].replace("page=1", "page=2")))
    assert f"<h1>{seen[19]} " in viewer.page(unescape(before)), "the last one of the page before"
    [back] = re.findall(r'href="([^"]+)" data-key="u"', page)
    assert "page=3" in back and "sort=problem" in back and "#a-i1-" in back
    # Without a list it stands among the answers to its problem.
    assert "1 of 1<" in viewer.page("/answer", run="run", **FIRST)


def test_problems_have_their_pass_rate_its_change_and_no_signal_is_a_filter(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    for iteration, right in enumerate(([0, 0, 1, 1], [1, 0, 1, 1])):
        sampled = [
            trajectory(i // 2, i % 2, f"{iteration}{i}", correct=bool(own)) for i, own in enumerate(right)
        ]
        record_iteration(run, iteration, sampled)
    credit = run.iteration(1) / "episodes.arrow"
    silent = [episode(one) for one in sampled]
    silent[2:] = [replace(one, advantages=[0.0] * len(one.response_ids)) for one in silent[2:]]
    write_episodes(credit, silent, CODEC)
    (run.iteration(1) / "token_signals.arrow").unlink()
    page = viewer.page("/problems?run=run&problems=problem")
    rows = [row.split("</tr>")[0] for row in page.split('<tr id="p-')[1:]]
    assert "1 of 2" in rows[0] and ">+0.50<" in rows[0] and 'title="iteration 1"' in rows[0]
    assert "2 of 2" in rows[1] and "no signal" in rows[1] and "no signal" not in rows[0]
    assert "<b>1</b> problem<" in viewer.page("/problems?run=run&signal=none")
    first = unescape(re.findall(r'data-href="([^"]+)"', rows[0])[0])
    assert "1 of 2<" in viewer.page(first) and "train/0#" in viewer.page(first)


def test_the_way_from_values_into_the_gradient_ends_in_shares_that_add_up(viewer: Viewer) -> None:
    run = viewer.record(trainer={"advantage_normalisation": "whiten", "objective": {"type": "ppo"}})
    answers = viewer.store.answers(viewer.store.run("run"))
    config = viewer.store.experiment(viewer.store.run("run")).config
    rows = answers.sql("SELECT answer FROM answers", sources=["i1"])
    whole = []
    for row in rows:
        one = answers.answer("i1", row["answer"])
        tokens = tokens_of(run.path, one, config)
        assert tokens is not None
        whole += trained_steps(one, tokens, config)
    assert sum(one.share or 0.0 for one in whole) == pytest.approx(1.0)
    flat = np.concatenate([np.repeat(one.advantage, one.tokens) for one in whole])
    trains = np.concatenate([np.repeat(one.trained_advantage, one.tokens) for one in whole])
    assert trains == pytest.approx((flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), rel=1e-5)
    weights = [abs(one.trained_advantage or 0.0) * one.tokens for one in whole]
    assert [one.share for one in whole] == pytest.approx(np.array(weights) / sum(weights))
    page = viewer.page("/answer", run="run", **FIRST, **{"as": "credit"})
    assert "also from tokens whose advantage is 0" in page and "share of the gradient weight" in page
    assert f"{100 * (whole[0].share or 0.0):.2g} %" in page


@pytest.mark.parametrize(("log_ratio", "clipped"), [(0.1, 0), (0.2, 6), (-0.3, 0)])
def test_the_way_into_the_gradient_says_how_far_a_step_had_moved_and_what_ppo_clipped(
    viewer: Viewer, log_ratio: float, clipped: int
) -> None:
    run = viewer.record(trainer={"objective": {"type": "ppo"}})
    rows = [
        replace(one, log_ratios=np.full_like(one.logprobs, log_ratio))
        for one in read_token_signals(run.iteration(0) / SIGNALS)
    ]
    write_token_signals(run.iteration(0) / SIGNALS, rows)
    page = viewer.page("/answer", run="run", **FIRST, **{"as": "credit"})
    first = page.split('id="step-0"')[1].split("</tr>")[0]
    assert f"{np.exp(log_ratio):.3f}" in first
    assert (f"{clipped} clipped" in first) if clipped else "clipped" not in first


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(
            st.floats(-4, 4, width=32), st.floats(2**-7, 128, width=32), st.sampled_from([-1.0, 0.0, 1.0])
        ),
        min_size=1,
        max_size=16,
    ),
    clip_low=st.floats(0.01, 0.99),
    clip_high=st.floats(0.01, 8),
    dual_clip=st.none() | st.floats(1.01, 20),
)
def test_what_is_called_clipped_is_what_has_no_gradient_in_training(
    tokens: list[tuple[float, float, float]], clip_low: float, clip_high: float, dual_clip: float | None
) -> None:
    """The page says the rule again without torch. Within rounding of a bound either may be right."""
    ppo = ClippedPolicyGradient(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    bounds = (1 - clip_low, 1 + clip_high, dual_clip or np.inf)
    tokens = [own for own in tokens if all(abs(np.exp(own[0]) / bound - 1) > 1e-5 for bound in bounds)]
    assume(tokens)
    log_ratios, sizes, signs = np.array(tokens, np.float32).reshape(-1, 3).T
    advantages = sizes * signs
    moved = torch.tensor(log_ratios, requires_grad=True)
    terms, is_clipped = ppo.surrogate(
        TokenBatch(torch.ones(len(tokens)), advantages_N=torch.tensor(advantages)), moved, moved
    )
    terms.sum().backward()
    assert moved.grad is not None
    # A penalty on advantages, so that no file of the iteration is asked for.
    objective = {"type": "ppo", "kl_placement": "reward", "kl_coef": 1.0}
    objective |= {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    one: Any = SimpleNamespace(
        episode=SimpleNamespace(advantages=advantages, trained=np.ones(len(tokens), np.bool_)),
        source=SimpleNamespace(episodes="not read"),
    )
    steps = [CreditedStep(i, i, i + 1, None, None, None) for i in range(len(tokens))]
    shown: Any = SimpleNamespace(steps=steps, numbers={"advantage": advantages, "log-ratio": log_ratios})
    said = [bool(step.clipped) for step in trained_steps(one, shown, {"trainer": {"objective": objective}})]
    assert said == is_clipped.tolist()
    assert said == [
        gradient == 0 and advantage != 0 for gradient, advantage in zip(moved.grad.tolist(), advantages)
    ]


def test_continuations_of_a_state_are_found_in_the_journal(viewer: Viewer) -> None:
    """A state asks as credit does, so that the page finds what credit asked for."""
    run = begin_run(viewer.folder / "run")
    one = trajectory(0, 0, "a\nb\nc")
    record_iteration(run, 0, [one])
    beginning = AnswerPrefix.of(one.problem, one.prompt_ids, one.segments, 2)
    sampling = AdditionChain().adjust_sampling(SamplingParams(max_tokens=48))
    request = continuation_request(AnswerSettings(64), 1, 0, beginning, sampling, "value", 0, 3)
    sampled = [Completion(list(map(ord, text)), [-0.5] * 2, "stop", 0) for text in ("x!", "y!", "x!")]
    rows = journal_row("another", sampled[:1]), journal_row(request_key(request, 0), sampled)
    with Journal(run.iteration(0) / "journal" / "credit-0.jsonl") as written:
        written.add(*rows)
    where = {"run": "run", **FIRST}
    found = viewer.page("/continuations", **where, start=2)
    assert "3 continuations, 2 of them different" in found and "<b>2 ×</b>" in found
    assert "x!" in found and "y!" in found and "did not store" in found
    assert "no continuations of this state" in viewer.page("/continuations", **where, start=4)
    assert "/continuations?run=run&amp;source=i1" in viewer.page("/answer", **where)

    credited = replace(episode(one), continuations={2: (1.0, 0.5, None), 4: (0.0, 0.0)})
    write_episodes(run.iteration(0) / "episodes.arrow", [credited], CODEC)
    rows = viewer.page("/continuations", **where, start=2).split("<li>")[1:]
    assert [("x!" in row, re.findall(r"[✓✗?] [\d.\w]+", row)) for row in rows] == [
        (True, ["✓ 1"]), (False, ["✗ 0.5"]), (True, ["? unknown"]),
    ]  # fmt: skip
    assert "2 earned 0. Their texts are not available" in viewer.page("/continuations", **where, start=4)
    words = "1 earned 1, 1 earned 0.5, 1 earned an unknown reward"
    assert f"before this step: {words}" in viewer.page("/answer", **where)
    tree = viewer.page("/answer", **where, **{"as": "tree"})
    assert f"continuations of the previous state: {words}" in tree and f"of its continuations {words}" in tree
    assert "/continuations?answer=" in tree and "start=2" in tree


def test_threads_are_drawn_side_by_side_without_styles(viewer: Viewer) -> None:
    parts = [("before ", ()), ("one way", ((0, 0),)), ("<b>other</b> way", ((0, 1),)), (" behind", ())]
    ends = itertools.accumulate(len(text) for text, _ in parts)
    stretches = tuple(Stretch(end, branch) for end, (_, branch) in zip(ends, parts, strict=True))
    segments = tuple(
        Segment(list(map(ord, text)), logprobs=[-0.5] * len(text), policy_version=0, branch=branch)
        for text, branch in parts
    )
    one = replace(trajectory(0, 0, "".join(text for text, _ in parts)), segments=segments)
    folder = begin_run(viewer.folder / "run").iteration(0)
    write_trajectories(folder / "trajectories.arrow", [one])
    write_episodes(folder / "episodes.arrow", [replace(episode(one), stretches=stretches)], CODEC)
    page = viewer.page("/answer", run="run", **FIRST, **{"as": "threads"})
    assert page.count('class="thread') >= 2 and "critical path" in page
    assert "&lt;b&gt;other&lt;/b&gt;" in page and "<b>other" not in page
    assert " style=" not in page and '<svg class="extent"' in page and '<span class="up s' in page
