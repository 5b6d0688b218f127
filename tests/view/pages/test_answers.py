"""The pages about answers: lists, single answers, problems, comparisons and continuations.

Promises that these tests hold:

* A list shows the answers that its address asks for; a wrong address is explained.
* An answer is shown with its tokens, values, continuations and advantages, and says whether these trained.
* Trees and threads show every answer once; the numbers of the gradient are those of training.
* Damaged files are named, and the other answers are shown.
"""

import itertools
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

import treetune.parts  # noqa: F401  (registers them, as the command `view` does)
from tests.view.conftest import FIRST, Viewer, fingerprint_of
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
from treetune.runtime.analysis import ADVANTAGES, write_result
from treetune.runtime.directory import _LOCK_FILES
from treetune.store.journal import Journal
from treetune.tasks.arithmetic import AdditionChain
from treetune.view.app import SEEN_FINGERPRINT_HEADER
from treetune.view.charts import format_number
from treetune.view.pages import PAGES
from treetune.view.report.write import write_report
from treetune.view.store import Run
from treetune.view.store.queries import ColumnFilter, parse_conditions
from treetune.view.store.tokens import CreditedStep, tokens_of, trained_steps
from treetune.view.terminal import newest_answers
from treetune.vocabulary import Message, Segment, SegmentSpan, Trajectory

COLUMNS = {"tokens": "INTEGER", "outcome": "VARCHAR", "unfinished": "BOOLEAN", "number.lines/count": "DOUBLE"}


def test_titles_of_pages_are_plain_words() -> None:
    assert [page.title for page in PAGES if not re.fullmatch("[A-Z][a-z]+( [a-z]+)*", page.title)] == []


def test_conditions_are_read() -> None:
    assert parse_conditions("tokens >= 300; outcome has Time ;unfinished=true", COLUMNS) == [
        ColumnFilter("tokens", ">=", 300.0),
        ColumnFilter("outcome", "has", "Time"),
        ColumnFilter("unfinished", "=", True),
    ]
    assert parse_conditions("number.lines/count<2", COLUMNS) == [ColumnFilter("number.lines/count", "<", 2.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens", "is not a condition"),
        ("size > 3", "answers have no 'size'"),
        ("tokens > many", "compared with a number"),
        ("unfinished = 1", "true or false"),
        ("tokens > nan", "compared with a number"),
        ("tokens < 1e999", "compared with a number"),
    ],
)
def test_a_wrong_condition_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conditions(text, COLUMNS)


def test_the_list_shows_the_newest_iteration_or_what_is_asked_for(viewer: Viewer) -> None:
    viewer.record(iterations=2)
    newest = viewer.page("/answers?run=run")
    assert newest.count("iteration 2</td>") == 8 and "iteration 1</td>" not in newest

    def answers_in_order(query: str) -> list[str]:
        return re.findall(r'id="(a-[^"]+)"', viewer.page(f"/answers?run=run{query}"))

    by_credit = answers_in_order("&sort=advantage_size&order=down")
    longest_first = answers_in_order("&sort=tokens&order=down")
    assert answers_in_order("") == by_credit, "the default order"
    assert longest_first != answers_in_order("&sort=tokens&order=up")
    assert sorted(longest_first) == sorted(by_credit)
    query = {"run": "run", "of": "everything", "where": "score < 1; tokens > 3", "sort": "tokens"}
    assert "validation after 1 iterations</td>" in viewer.page("/answers", **query)
    # An evaluation is sorted and filtered by what only iterations have.
    query = {"run": "run", "of": "e1-validation", "sort": "advantage_mean", "where": "tokens < 1e300"}
    assert "<b>12</b> answers" in viewer.page("/answers", **query)
    assert "No answer matches" in viewer.page("/answers", **{**query, "where": "advantage_mean > 0"})
    record_iteration(begin_run(viewer.folder / "unmeasured"), 0)
    for status, query, message in (
        (400, {"run": "run", "where": "color = red"}, "answers have no"),
        (400, {"run": "run", "page": "9" * 20}, "at most 9 digits"),
        (404, {"run": "unmeasured", "of": "evaluations"}, "no answers of evaluations yet"),
    ):
        assert message in viewer.refusal("/answers", status, **query)


def test_a_damaged_file_is_named_instead_of_still_being_read(viewer: Viewer) -> None:
    run = viewer.record(iterations=2)
    (run.iteration_folder(1) / "trajectories.arrow").write_bytes(b"nothing")
    page = viewer.page("/answers?run=run")
    assert "iteration 2 can&#39;t be read" in page and "still being read" not in page
    answer = viewer.get("/answer", run="run", source="i2", answer="train/0#0").text
    assert "iteration 2 can&#39;t be read" in answer


def test_the_credit_of_analyses_is_shown_when_it_appears_with_a_column_for_each_step(viewer: Viewer) -> None:
    run = viewer.record()
    fingerprint = fingerprint_of(viewer.page("/answer", run="run", **FIRST))
    for name, count in (("replay-0001", 2), ("replay-0001-b", 4)):
        row = {"answer": "train/0#0", "step_ends": [*range(count)], "values": {}}
        row |= {"advantages": {"x": [0.5] * count}}
        write_result(run.analysis_folder(name), {"iteration": 0}, [row], ADVANTAGES)
    after = viewer.get("/answer", {SEEN_FINGERPRINT_HEADER: fingerprint}, run="run", **FIRST)
    assert after.status_code == 200, "the page has changed"
    table = after.text.split('<table class="credits">')[1].split("</table>")[0]
    assert table.count('href="#step-') == 4 and table.count("<td>") == 8


def test_credit_that_comes_while_an_answer_is_shown_replaces_its_box_of_tokens(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    answer = trajectory(0, 0, "a\nb")
    write_trajectories(run.iteration_folder(0) / "trajectories.arrow", [answer])

    def box() -> str:
        return viewer.page("/answer", run="run", **FIRST).split('<div id="tokens-')[1].split('"')[0]

    before = box()
    write_episodes(run.iteration_folder(0) / "episodes.arrow", [episode(answer)], CODEC)
    assert box() != before


def test_an_experiment_that_cannot_be_read_hides_no_other(viewer: Viewer) -> None:
    viewer.record("good")
    lock = viewer.record("bad").path / _LOCK_FILES["run"]
    lock.unlink(missing_ok=True)
    lock.mkdir()  # opening a folder is an OSError, as opening a file without permission is
    page = viewer.page("/")
    assert "good" in page and "Is a directory" in page


def test_infinite_numbers_and_nan_are_written_as_names() -> None:
    assert [format_number(x) for x in (float("-inf"), float("nan"), 2.0)] == ["-inf", "nan", "2"]


def chat_answer(without_text: int) -> Trajectory:
    """Builds an answer to a chat with a solved example; its template and its end have tokens without text."""
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
        shown_tokens = []
        for element in page.split("<span data-i=")[1:]:
            attributes_and_text = element.partition("<")[0]
            shown_tokens.append(unescape(attributes_and_text.partition(">")[2]))
        assert "".join(shown_tokens).replace("↵\n", "\n") == text
        assert "V 0.500" in page and "A +0.250" in page
        assert page.count('class="injected">') == 2  # the last token, and the legend


@pytest.mark.parametrize(
    ("trainer", "legend", "training_differs"),
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
    viewer: Viewer, trainer: dict[str, Any], legend: str, training_differs: bool
) -> None:
    viewer.record(trainer=trainer or {"learning_rate": 1e-3})
    page = viewer.page("/answer", run="run", **FIRST)
    assert legend in page
    assert ("before training changes it (in training" in page) == training_differs
    assert ('value="advantage of credit"' in page) == (trainer == {"advantage_normalisation": "whiten"})


def test_demonstrations_are_titled_as_such_and_not_as_sampled_answers(viewer: Viewer) -> None:
    sft = viewer.record("sft", rollout={"type": "demonstrations"})
    (sft.iteration_folder(0) / "trajectories.arrow").unlink()  # demonstrations have episodes alone
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


def test_an_evaluations_answer_has_its_extracted_answer_and_a_missing_answer_is_named(
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
        sampled = [
            trajectory(i, 0, f"{iteration} and {i}", correct=is_right) for i, is_right in enumerate(right)
        ]
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
    query = {"run": "run", "of": "iterations", "where": "tokens > 1"}
    page = viewer.page("/answers/histograms", **query)
    drawn = re.findall("<figcaption><code>(.*?)</code>", page)
    assert drawn == ["reward", "tokens", "advantage_size"]
    links = [unescape(href) for href in re.findall(r'<a href="(/answers[^"]*where[^"]*)"><title>', page)]
    counts = [int(count) for count in re.findall(r"<title>.*?: (\d+) answers?</title>", page)]
    assert len(links) == len(counts) > 3
    for link, count in zip(links, counts, strict=True):
        assert f"<b>{count}</b> answer" in viewer.page(link)


def test_threads_and_turns_are_steps_of_the_same_tree(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    block = threaded.Fork((threaded.Thread(" b</Thread>"), threaded.Thread(" c</Thread>")))
    answer = threaded.trajectory([" a", block, "</Parallel> d"])
    threaded.write_answers(run.iteration_folder(0), [answer], [threaded.episode(answer, (0.5,))])
    page = viewer.page("/answer", run="run", source="i1", answer="train/1#0", **{"as": "tree"})
    assert "thread 1.1: " in page and "thread 1.2: " in page and page.count("within") > 2
    turns = replace(episode(trajectory(0, 0, "one\ntwo")), step_values=None, step_rewards=(0.25, 0.5))
    other = begin_run(viewer.folder / "turns")
    record_iteration(other, 0, [trajectory(0, 0, "one\ntwo")])
    write_episodes(other.iteration_folder(0) / "episodes.arrow", [turns], CODEC)
    (other.iteration_folder(0) / "token_signals.arrow").unlink()
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
    titles = re.findall("<title>(.*?)</title>", drawing, re.DOTALL)
    of_prompt = "the prompt · value after it 0.500 · 100 answers, 100 correct"
    assert any(title.startswith(of_prompt) for title in titles)
    assert {f"leaf {i}!" for i in range(100)} == set(re.findall(r"leaf \d+!", drawing))
    assert drawing.count("here") == 4, "the prompt, the step that all share, and its own two steps"
    links = re.findall(r'<a href="([^"]+)"', drawing)
    linked_answers = set()
    for link in links:
        if "as=tree" not in link:
            linked_answers.add(unescape(link).split("answer=")[1].split("&")[0])
    assert len(linked_answers) == 100, "each leaf leads to its answer"
    assert viewer.page(unescape(links[0]))
    # Branches that would be too low to be seen are joined with others of about the same value.
    monkeypatch.setattr("treetune.view.drawings.MOST_TREE_HEIGHT", 40)
    folded = viewer.page("/answer", **where)
    assert "99 branches of about the same value" in folded and "100 answers, 100 correct" in folded
    nearer = viewer.page("/answer", **where, depth=2)
    assert "<b>1 of the 100 answers</b>" in nearer
    assert "<b>100</b> answers" in viewer.page("/problem?run=run&problem=train/0")


def test_an_answer_is_read_in_its_list_and_the_next_one_lies_on_the_next_page(viewer: Viewer) -> None:
    record_iteration(begin_run(viewer.folder / "run"), 0, [trajectory(i, 0, f"a\n{i}") for i in range(43)])
    listed = {"run": "run", "sort": "problem", "size": 20, "page": 1}
    addresses = re.findall(r'data-href="([^"]+)"', viewer.page("/answers", **listed))
    rows = [unescape(address) for address in addresses]
    answers_read, address = [], rows[0]
    while address:
        page = viewer.page(address)
        answers_read.append(re.findall(r"<h1>(\S+) ", page)[0])
        next_links = re.findall(r'href="([^"]+)" data-key="j"', page)
        address = unescape(next_links[0]) if next_links else ""
    assert answers_read == sorted(f"train/{i}#0" for i in range(43))
    assert "43 of 43" in page
    [before] = re.findall(r'href="([^"]+)" data-key="k"', viewer.page(rows[0].replace("page=1", "page=2")))
    assert f"<h1>{answers_read[19]} " in viewer.page(unescape(before)), "the last answer of the page before"
    [back] = re.findall(r'href="([^"]+)" data-key="u"', page)
    assert "page=3" in back and "sort=problem" in back and "#a-i1-" in back
    # Opened without a list, an answer stands among the answers to its problem.
    assert "1 of 1<" in viewer.page("/answer", run="run", **FIRST)


def test_problems_have_their_pass_rate_its_change_and_no_signal_is_a_filter(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run")
    for iteration, right in enumerate(([0, 0, 1, 1], [1, 0, 1, 1])):
        sampled = [
            trajectory(i // 2, i % 2, f"{iteration}{i}", correct=bool(is_right))
            for i, is_right in enumerate(right)
        ]
        record_iteration(run, iteration, sampled)
    credit = run.iteration_folder(1) / "episodes.arrow"
    episodes = [episode(answer) for answer in sampled]
    # The second problem's answers have no advantage.
    for i in (2, 3):
        row = episodes[i]
        episodes[i] = replace(row, advantages=[0.0] * len(row.response_ids))
    write_episodes(credit, episodes, CODEC)
    (run.iteration_folder(1) / "token_signals.arrow").unlink()
    page = viewer.page("/problems?run=run&problems=problem")
    rows = [row.split("</tr>")[0] for row in page.split('<tr id="p-')[1:]]
    assert "1 of 2" in rows[0] and ">+0.50<" in rows[0] and 'title="iteration 1"' in rows[0]
    assert "2 of 2" in rows[1] and "no signal" in rows[1] and "no signal" not in rows[0]
    assert "<b>1</b> problem<" in viewer.page("/problems?run=run&signal=none")
    first = unescape(re.findall(r'data-href="([^"]+)"', rows[0])[0])
    assert "1 of 2<" in viewer.page(first) and "train/0#" in viewer.page(first)


def test_the_shares_of_steps_in_the_gradient_follow_from_trained_advantages_and_add_up_to_one(
    viewer: Viewer,
) -> None:
    run = viewer.record(trainer={"advantage_normalisation": "whiten", "objective": {"type": "ppo"}})
    answers = viewer.store.answers(viewer.store.run("run"))
    config = viewer.store.experiment(viewer.store.run("run")).config
    rows = answers.sql("SELECT answer FROM answers", sources=["i1"])
    steps = []
    for row in rows:
        answer = answers.answer("i1", row["answer"])
        tokens = tokens_of(run.path, answer, config)
        assert tokens is not None
        steps += trained_steps(answer, tokens, config)
    assert sum(step.share or 0.0 for step in steps) == pytest.approx(1.0)
    of_credit_N = np.concatenate([np.repeat(step.advantage, step.tokens) for step in steps])
    in_training_N = np.concatenate([np.repeat(step.trained_advantage, step.tokens) for step in steps])
    whitened_N = (of_credit_N - of_credit_N.mean()) / np.sqrt(of_credit_N.var(ddof=1) + 1e-8)
    assert in_training_N == pytest.approx(whitened_N, rel=1e-5)
    weights = [abs(step.trained_advantage or 0.0) * step.tokens for step in steps]
    assert [step.share for step in steps] == pytest.approx(np.array(weights) / sum(weights))
    page = viewer.page("/answer", run="run", **FIRST, **{"as": "credit"})
    assert "also from tokens whose advantage is 0" in page and "share of the gradient weight" in page
    assert f"{100 * (steps[0].share or 0.0):.2g} %" in page


@pytest.mark.parametrize(("log_ratio", "clipped"), [(0.1, 0), (0.2, 6), (-0.3, 0)])
def test_a_steps_ratio_and_the_number_of_its_clipped_tokens_are_shown(
    viewer: Viewer, log_ratio: float, clipped: int
) -> None:
    run = viewer.record(trainer={"objective": {"type": "ppo"}})
    rows = [
        replace(row, log_ratios=np.full_like(row.logprobs, log_ratio))
        for row in read_token_signals(run.iteration_folder(0) / SIGNALS)
    ]
    write_token_signals(run.iteration_folder(0) / SIGNALS, rows)
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
def test_tokens_are_called_clipped_exactly_where_ppo_has_no_gradient(
    tokens: list[tuple[float, float, float]], clip_low: float, clip_high: float, dual_clip: float | None
) -> None:
    """The page has PPO's rule once more, without torch.

    Ratios within rounding of a bound are left out: there, either side may be right.
    """
    ppo = ClippedPolicyGradient(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    bounds = (1 - clip_low, 1 + clip_high, dual_clip or np.inf)
    ratios_to_bounds = [[np.exp(token[0]) / bound for bound in bounds] for token in tokens]
    is_clear = [all(abs(ratio - 1) > 1e-5 for ratio in ratios) for ratios in ratios_to_bounds]
    tokens = [token for token, clear in zip(tokens, is_clear) if clear]
    assume(tokens)
    log_ratios, sizes, signs = np.array(tokens, np.float32).reshape(-1, 3).T
    advantages = sizes * signs
    moved = torch.tensor(log_ratios, requires_grad=True)
    terms, is_clipped = ppo.surrogate(
        TokenBatch(torch.ones(len(tokens)), advantages_N=torch.tensor(advantages)), moved, moved
    )
    terms.sum().backward()
    assert moved.grad is not None
    # With a penalty on advantages, the page asks for no file of the iteration.
    objective = {"type": "ppo", "kl_placement": "reward", "kl_coef": 1.0}
    objective |= {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    answer: Any = SimpleNamespace(
        episode=SimpleNamespace(advantages=advantages, trained=np.ones(len(tokens), np.bool_)),
        source=SimpleNamespace(episodes="not read"),
    )
    steps = [CreditedStep(i, i, i + 1, None, None, None) for i in range(len(tokens))]
    shown: Any = SimpleNamespace(steps=steps, numbers={"advantage": advantages, "log-ratio": log_ratios})
    shown_steps = trained_steps(answer, shown, {"trainer": {"objective": objective}})
    shown_as_clipped = [bool(step.clipped) for step in shown_steps]
    has_no_gradient = (moved.grad.numpy() == 0) & (advantages != 0)
    assert shown_as_clipped == is_clipped.tolist()
    assert shown_as_clipped == has_no_gradient.tolist()


def test_continuations_of_a_state_are_found_in_the_journal(viewer: Viewer) -> None:
    """The journal has a request like that of credit, which the page must find."""
    run = begin_run(viewer.folder / "run")
    answer = trajectory(0, 0, "a\nb\nc")
    record_iteration(run, 0, [answer])
    beginning = AnswerPrefix.of(answer.problem, answer.prompt_ids, answer.segments, 2)
    sampling = AdditionChain().adjust_sampling(SamplingParams(max_tokens=48))
    request = continuation_request(AnswerSettings(64), 1, 0, beginning, sampling, "value", 0, 3)
    sampled = [Completion(list(map(ord, text)), [-0.5] * 2, "stop", 0) for text in ("x!", "y!", "x!")]
    rows = journal_row("another", sampled[:1]), journal_row(request_key(request, 0), sampled)
    with Journal(run.iteration_folder(0) / "journal" / "credit-0.jsonl") as written:
        written.add(*rows)
    where = {"run": "run", **FIRST}
    page = viewer.page("/continuations", **where, start=2)
    assert "3 continuations, 2 of them different" in page and "<b>2 ×</b>" in page
    assert "x!" in page and "y!" in page and "did not store" in page
    assert "no continuations of this state" in viewer.page("/continuations", **where, start=4)
    assert "/continuations?run=run&amp;source=i1" in viewer.page("/answer", **where)

    credited = replace(episode(answer), continuations={2: (1.0, 0.5, None), 4: (0.0, 0.0)})
    write_episodes(run.iteration_folder(0) / "episodes.arrow", [credited], CODEC)
    rows = viewer.page("/continuations", **where, start=2).split("<li>")[1:]
    assert [("x!" in row, re.findall(r"[✓✗?] [\d.\w]+", row)) for row in rows] == [
        (True, ["✓ 1"]), (False, ["✗ 0.5"]), (True, ["? unknown"]),
    ]  # fmt: skip
    assert "2 earned 0. Their texts are not available" in viewer.page("/continuations", **where, start=4)
    counts = "1 earned 1, 1 earned 0.5, 1 earned an unknown reward"
    assert f"before this step: {counts}" in viewer.page("/answer", **where)
    tree = viewer.page("/answer", **where, **{"as": "tree"})
    assert f"continuations of the previous state: {counts}" in tree
    assert f"of its continuations {counts}" in tree
    assert "/continuations?answer=" in tree and "start=2" in tree


WEIGHTED_CREDIT = {
    "type": "weighted_by",
    "signal": "surprise",
    "weights": "softmax",
    "over": {"type": "hicra", "phrases": ["so"], "over": {"type": "monte_carlo", "samples": 3}},
}
MIXTURE = {
    "type": "mixture",
    "domains": {"sums": {"task": {"type": "addition_chain"}, "stop": ["!"], "max_tokens": 32}},
}


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({"credit": WEIGHTED_CREDIT}, SamplingParams(max_tokens=48)),
        ({"task": MIXTURE}, SamplingParams(max_tokens=32, stop=("!",))),
        ({"task": {"type": "a user's own"}}, SamplingParams(max_tokens=48)),
    ],
)
def test_continuations_are_found_below_another_credit_and_in_a_mixture(
    changes: dict[str, Any], sampling: SamplingParams, viewer: Viewer
) -> None:
    run = begin_run(viewer.folder / "run", **changes)
    answer = trajectory(0, 0, "a\nb\nc")
    answer = replace(answer, problem=replace(answer.problem, domain="sums"))
    record_iteration(run, 0, [answer])
    beginning = AnswerPrefix.of(answer.problem, answer.prompt_ids, answer.segments, 2)
    request = continuation_request(AnswerSettings(64), 1, 0, beginning, sampling, "value", 0, 3)
    sampled = [Completion(list(map(ord, text)), [-0.5] * 2, "stop", 0) for text in ("x!", "y!", "x!")]
    with Journal(run.iteration_folder(0) / "journal" / "credit-0.jsonl") as written:
        written.add(journal_row(request_key(request, 0), sampled))
    page = viewer.page("/continuations", run="run", **FIRST, start=2)
    assert "3 continuations, 2 of them different" in page


def test_threads_are_drawn_side_by_side_without_styles(viewer: Viewer) -> None:
    parts = [("before ", ()), ("one way", ((0, 0),)), ("<b>other</b> way", ((0, 1),)), (" behind", ())]
    ends = itertools.accumulate(len(text) for text, _ in parts)
    stretches = tuple(SegmentSpan(end, branch) for end, (_, branch) in zip(ends, parts, strict=True))
    segments = tuple(
        Segment(list(map(ord, text)), logprobs=[-0.5] * len(text), policy_version=0, branch=branch)
        for text, branch in parts
    )
    answer = replace(trajectory(0, 0, "".join(text for text, _ in parts)), segments=segments)
    folder = begin_run(viewer.folder / "run").iteration_folder(0)
    write_trajectories(folder / "trajectories.arrow", [answer])
    write_episodes(folder / "episodes.arrow", [replace(episode(answer), stretches=stretches)], CODEC)
    page = viewer.page("/answer", run="run", **FIRST, **{"as": "threads"})
    assert page.count('class="thread') >= 2 and "critical path" in page
    assert "&lt;b&gt;other&lt;/b&gt;" in page and "<b>other" not in page
    assert " style=" not in page and '<svg class="extent"' in page and '<span class="up s' in page
