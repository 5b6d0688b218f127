"""The store of answers: queries over all answers of a run, and single answers.

Promises that these tests hold:

* A query returns exactly the answers that filters, search, sorting and pages ask for.
* The numbers of a row are those of the answer's tokens, credit and trainer; injected tokens don't count.
* A shown advantage is the one that trains, wherever the stored files tell it.
* New and damaged files are noticed; reading writes nothing into the run, and the index is reused.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.view.recorded import begin_run, episode, record_iteration, recorded_run, trajectory
from tests.view.report.synthetic import CODEC
from treetune.exceptions import NotThere
from treetune.rollouts.storage import write_episodes
from treetune.trainer.preparation import normalise_advantages, normalise_by_domain
from treetune.trainer.tokens import Sequences
from treetune.view.store import Run, Store
from treetune.view.store.answers import AnswerStore
from treetune.view.store.columns import mean_and_least
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.store.tokens import ADVANTAGE_OF_CREDIT, KL_TO_REFERENCE, tokens_of

EVALUATION = ("e1-validation",)


def answers_of(folder: Path) -> AnswerStore:
    """Opens the answers of the run in a folder, with an index beside it."""
    return AnswerStore(Run("run", folder / "run"), folder / "cache")


@pytest.fixture
def answers(tmp_path: Path) -> AnswerStore:
    recorded_run(tmp_path / "run", iterations=3)
    return answers_of(tmp_path)


def mtimes(files: Any) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(
    ("question", "total"),
    [
        (RowQuery(), 3 * 8 + 3 * 12),
        (RowQuery(filters=(ColumnFilter("problem", "has", "TRAIN/3"),)), 3 * 2 + 3 * 2),
        (RowQuery(filters=(ColumnFilter("tokens", "<", 1e300),)), 60),
        # Columns that only iterations have are null in evaluations.
        (RowQuery(EVALUATION, sort="advantage_mean", descending=True), 12),
        (RowQuery(EVALUATION, (ColumnFilter("advantage_mean", ">", -9.0),)), 0),
        (RowQuery(EVALUATION, (ColumnFilter("policy_version", "has", "0"),), "3"), 0),
    ],
)
def test_a_query_covers_all_answers_of_its_sources(
    answers: AnswerStore, question: RowQuery, total: int
) -> None:
    page = answers.ask(question)
    assert page.total == total
    all_sources = {f"i{number}" for number in (1, 2, 3)} | {f"e{number}-validation" for number in (1, 2, 3)}
    assert {row["source"] for row in page.rows} <= (set(question.sources) or all_sources)
    assert "advantage_mean" not in answers.columns(EVALUATION)


def test_filters_and_sorting_are_those_of_the_rows_and_pages_follow_each_other(answers: AnswerStore) -> None:
    everything = answers.ask(RowQuery(size=500)).rows
    is_wrong = (ColumnFilter("score", "<", 1),)
    wrong = answers.ask(RowQuery(filters=is_wrong, sort="tokens", descending=True, size=500))
    assert wrong.total == sum(row["score"] < 1 for row in everything)
    lengths = [row["tokens"] for row in wrong.rows]
    assert lengths == sorted(lengths, reverse=True)
    longest = max(row["tokens"] for row in everything)
    as_long = answers.ask(RowQuery(filters=(ColumnFilter("tokens", ">", longest - 0.4),))).total
    assert as_long == sum(row["tokens"] == longest for row in everything)
    pages = [answers.ask(RowQuery(sort="score", page=number, size=7)).rows for number in range(1, 10)]
    seen = [(row["source"], row["row"]) for rows in pages for row in rows]
    assert len(seen) == len(set(seen)) == 60


def test_a_row_has_the_numbers_of_the_sampled_answer_and_of_its_credit(answers: AnswerStore) -> None:
    [row] = answers.ask(RowQuery(sources=("i2",), filters=(ColumnFilter("answer", "=", "train/1#1"),))).rows
    stored = answers.answer("i2", "train/1#1").trajectory
    assert stored is not None and stored.segments[0].logprobs is not None
    credited = episode(stored)
    assert credited.advantages is not None
    trained = credited.advantages[np.asarray(credited.trained)]
    assert trained.mean() != pytest.approx(credited.advantages.mean()), "an injected token counts for nothing"
    sampled = trajectory(1, 1, "1+2=3\n3+3=7\n#7", correct=False, version=1)
    expected = {
        "problem": "train/1", "sample": 1, "tokens": len(sampled.response_ids), "injected": 1, "steps": 3,
        "policy_version": 1, "beginning": "1+2=3 ↵ 3+3=7 ↵ #7", "first_value": 0.5,
        "advantage_mean": trained.mean(), "advantage_least": trained.min(), "advantage_most": trained.max(),
        "logprob_mean": stored.segments[0].logprobs.mean(), "logprob_least": -1.5,
        "number.digits": 3.0, "number.lines/count": 3.0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_a_row_has_the_mean_and_the_largest_of_the_trainers_numbers(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    record_iteration(run, 0, [trajectory(0, 0, "abcdefg"), trajectory(0, 1, "abc")])
    record_iteration(run, 1, with_signals=False)
    answers = answers_of(tmp_path)
    largest, shorter, *unknown = answers.ask(RowQuery(sort="gap_most", descending=True)).rows
    # There are 6 trained tokens, and the second has no gap: the others are 0, 2/8, 3/8, 4/8, 5/8.
    assert (largest["gap_mean"], largest["gap_most"]) == (pytest.approx(14 / 8 / 5), 5 / 8)
    assert (largest["entropy_mean"], largest["entropy_most"]) == (0.5, 0.5)
    assert (shorter["gap_mean"], shorter["gap_most"]) == (0.0, 0.0)
    # r - 1 - log r with r = 1/2 at each token.
    assert (largest["kl_mean"], largest["kl_most"]) == pytest.approx((np.log(2) - 0.5,) * 2)
    assert len(unknown) == 8 and all(row["gap_most"] is None for row in unknown)
    with_gap = answers.ask(RowQuery(filters=(ColumnFilter("gap_mean", ">", 0.1),)))
    assert [row["answer"] for row in with_gap.rows] == ["train/0#0"]

    numbers = tokens_of(run.path, answers.answer("i1", "train/0#0"), {}).numbers
    assert set(numbers) == {"advantage", "log-prob", "entropy", "gap", "trainer's log-prob", KL_TO_REFERENCE}
    gaps = [-0.0, None, -2 / 8, -3 / 8, -4 / 8, -5 / 8, None]
    assert [float(x) if np.isfinite(x) else None for x in numbers["gap"]] == gaps

    write_episodes(run.iteration_folder(0) / "episodes.arrow", [episode(trajectory(0, 0, "abcdefg"))], CODEC)
    answers.ask(RowQuery())
    [problem] = answers.problems()
    assert "token_signals.arrow has other rows than" in problem and "delete it" in problem


@pytest.mark.parametrize("normalisation", ["whiten", "scale"])
@pytest.mark.parametrize("by_domain", [False, True])
def test_the_shown_advantage_of_a_token_is_the_one_that_trains(
    tmp_path: Path, normalisation: str, by_domain: bool
) -> None:
    run = begin_run(tmp_path / "run")
    sampled = [trajectory(0, i, f"ab{i}\ncdef{'!' * i}\ng", correct=i % 2 == 0) for i in range(4)]
    record_iteration(run, 0, sampled)
    episodes = []
    for i, answer in enumerate(sampled):
        episodes.append(replace(episode(answer), domain="algebra" if i % 2 else ""))
    write_episodes(run.iteration_folder(0) / "episodes.arrow", episodes, CODEC)
    sequences = Sequences.of(episodes)
    of_credit = np.concatenate([row.advantages[row.trained] for row in episodes])
    of_credit_N = torch.tensor(of_credit, dtype=torch.float32)
    if by_domain:
        expected_N = normalise_by_domain(of_credit_N, normalisation, sequences.starts, sequences.domains)
    else:
        expected_N = normalise_advantages(of_credit_N, normalisation)
    answers = answers_of(tmp_path)

    def shown_numbers(**settings: Any) -> list[dict[str, np.ndarray]]:
        numbers = []
        for answer in sampled:
            tokens = tokens_of(run.path, answers.answer("i1", answer.id), {"trainer": settings})
            numbers.append(dict(tokens.numbers))
        return numbers

    trainer: dict[str, Any] = {"advantage_normalisation": normalisation, "normalise_by_domain": by_domain}
    for number, numbers in enumerate(shown_numbers(**trainer)):
        tokens, trained = slice(*sequences.starts[number : number + 2]), episodes[number].trained
        assert numbers["advantage"][trained] == pytest.approx(expected_N[tokens].numpy(), abs=1e-6)
        assert numbers[ADVANTAGE_OF_CREDIT][trained].tolist() == of_credit[tokens].tolist()
        assert np.isnan(numbers["advantage"][~trained]).all()
    # A penalty that training subtracts is not stored: the shown advantages are those of credit, and so named.
    penalised = {"kl_coef": 0.1, "kl_placement": "reward"}
    for settings in ({**trainer, "objective": penalised}, {"advantage_normalisation": "none"}):
        assert all(ADVANTAGE_OF_CREDIT not in numbers for numbers in shown_numbers(**settings))


def test_advantages_of_injected_tokens_are_left_out_of_mean_and_maximum(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    sampled = [trajectory(0, 0, "abc"), trajectory(0, 1, "abcde")]
    record_iteration(run, 0, sampled, with_signals=False)
    credited = []
    for answer in sampled:
        advantages = [-0.25] * (len(answer.text) - 1) + [9.0]  # the last token was injected
        credited.append(replace(episode(answer), advantages=advantages, behaviour_logprobs=None))
    credited.insert(1, replace(credited[0], advantages=None, trajectory="train/7#0"))
    write_episodes(run.iteration_folder(0) / "episodes.arrow", credited, CODEC)
    rows = answers_of(tmp_path).ask(RowQuery()).rows
    assert [(row["advantage_mean"], row["advantage_most"]) for row in rows] == [(-0.25, -0.25)] * 2


def test_an_infinite_number_changes_only_its_own_row() -> None:
    mean, least = mean_and_least(np.array([-np.inf, -1.0, -1.0, -3.0, np.nan]), np.array([0, 2, 2, 4, 5]))
    assert mean[0] == least[0] == -np.inf and (mean[2], least[2]) == (-2.0, -3.0)
    assert np.isnan([mean[1], least[1], mean[3], least[3]]).all()


def test_an_answer_comes_back_whole_one_that_is_not_there_is_named_and_nothing_is_written(
    answers: AnswerStore, tmp_path: Path
) -> None:
    before = mtimes((tmp_path / "run").rglob("*"))
    answer = answers.answer("i3", "train/2#0")
    [row] = answer.episodes
    assert answer.trajectory.id == row.trajectory == "train/2#0" and row.step_values is not None
    assert row.response_ids.tolist() == answer.trajectory.response_ids.tolist()
    assert answers.answer("e3-validation", "train/5#1").line["gold"] == "18"
    with pytest.raises(NotThere, match="train/99#0"):
        answers.answer("i1", "train/99#0")
    answers.ask(RowQuery(search="3"))
    assert mtimes((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("text", ["3+3=", "#1", "+3", "=", "2+3=5\n5", "no such text", "#9\n"])
def test_a_search_finds_every_answer_whose_text_has_it(answers: AnswerStore, text: str) -> None:
    rows = answers.ask(RowQuery(size=500)).rows
    texts = answers.texts([(row["source"], row["place"]) for row in rows])
    expected = [row["answer"] for row, answer_text in zip(rows, texts, strict=True) if text in answer_text]
    page = answers.ask(RowQuery(search=text, size=500))
    assert page.total == len(expected)
    assert [row["answer"] for row in page.rows] == expected


def test_a_search_ignores_case_and_goes_with_filters_and_pages(tmp_path: Path) -> None:
    answer_texts = ["Therefore x = 2", "THEREFORE y = 3", "thus z = 4", "Übung: therefore, Ä"]
    sampled = [trajectory(n, 0, text, correct=n != 1) for n, text in enumerate(answer_texts)]
    record_iteration(begin_run(tmp_path / "run"), 0, sampled)
    answers = answers_of(tmp_path)
    assert answers.ask(RowQuery(search="tHEREFORE")).total == 3
    right = answers.ask(
        RowQuery(search="therefore", filters=(ColumnFilter("score", ">=", 1),), size=1, page=2)
    )
    assert (right.total, [row["answer"] for row in right.rows]) == (2, ["train/3#0"])
    assert answers.ask(RowQuery(search="übung")).total == 1, "letters beyond ASCII as well"
    assert answers.ask(RowQuery(search="zq")).rows == []
    record_iteration(begin_run(tmp_path / "run"), 1, [trajectory(5, 0, "therefore again", version=1)])
    assert answers.ask(RowQuery(search="therefore")).total == 4, "an earlier result is not kept too long"


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (RowQuery(filters=(ColumnFilter("scroe", "=", 1),)), "no 'scroe'"),
        (RowQuery(filters=(ColumnFilter("score", "; DROP", 1),)), "not a comparison"),
        (RowQuery(sort='score"; --'), "can't be sorted"),
    ],
)
def test_an_impossible_query_is_explained(answers: AnswerStore, question: RowQuery, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answers.ask(question)


def test_an_iteration_that_is_written_anew_is_read_anew(answers: AnswerStore, tmp_path: Path) -> None:
    before, fingerprint = answers.ask(RowQuery(sources=("i3",))).rows, answers.fingerprint()
    record_iteration(begin_run(tmp_path / "run"), 2, [trajectory(7, 0, "another", version=2)])
    assert answers.fingerprint() != fingerprint
    assert [row["answer"] for row in answers.ask(RowQuery(sources=("i3",))).rows] == ["train/7#0"] != before


def test_a_damaged_file_is_named_until_it_is_mended_and_the_others_are_shown(
    answers: AnswerStore, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "iterations" / "0001" / "trajectories.arrow"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert answers.ask(RowQuery()).total == 2 * 8 + 3 * 12
    assert ["iteration 2" in problem for problem in answers.problems()] == [True]
    assert not any(source.is_awaited for source in answers.list_indexed_sources())
    fingerprint_of_damaged = answers.fingerprint()
    path.write_bytes(content)
    assert (answers.ask(RowQuery()).total, answers.problems()) == (60, [])
    assert answers.fingerprint() != fingerprint_of_damaged


def test_the_mark_changes_when_a_file_turns_out_to_be_damaged(
    answers: AnswerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a thread reads every file:
    monkeypatch.setattr("treetune.view.store.answers.MOST_BYTES_READ_AT_ONCE", 0)
    (tmp_path / "run" / "iterations" / "0001" / "trajectories.arrow").write_bytes(b"nothing")
    before = answers.fingerprint()
    deadline = time.monotonic() + 60
    while any(source.is_awaited for source in answers.list_indexed_sources()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answers.problems() and answers.fingerprint() != before


def test_an_index_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", iterations=1)
    (tmp_path / "cache").write_text("a file where the folder would be")
    problems = answers_of(tmp_path).problems()
    assert len(problems) == 2 and all("its index can't be written to" in problem for problem in problems)


def test_the_answers_of_an_iteration_on_demonstrations_are_its_episodes(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", iterations=1)
    (run.iteration_folder(0) / "trajectories.arrow").unlink()
    answers = answers_of(tmp_path)
    assert answers.ask(RowQuery(sources=("i1",))).total == 8
    assert answers.ask(RowQuery(sources=("i1",), search="3+3")).total == 2
    assert answers.answer("i1", "train/1#0").episodes[0].text.startswith("1+2=3")


def test_the_index_is_kept_for_the_next_viewer(answers: AnswerStore, tmp_path: Path) -> None:
    answers.list_indexed_sources()
    times_of_index = mtimes((tmp_path / "cache").rglob("*.parquet"))
    again = Store([tmp_path / "run"], tmp_path / "cache")
    assert again.answers(again.runs()[0]).ask(RowQuery()).total == 60
    assert mtimes((tmp_path / "cache").rglob("*.parquet")) == times_of_index
