"""Promises of `prepare_data`:

* rows of any source become rows of the schema, with their values unchanged;
* every row that a filter or rule drops is recorded with the rule, its place in the input and a reason;
* copies of test problems and near duplicates are found however they are written, and no clean row goes;
* rows that are held out stay held out when others are added, and a changed function makes the rows anew;
* whatever is wrong is one message, and a command that was killed ends with the same bytes.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

import treetune
from tests.data import command
from tests.data.command import read_lines, write_lines
from treetune.data.rules.alike import word_list
from treetune.domains.domain_rows import write_parquet
from treetune.main import main

WORDS = [first + second for first in "abcdefg" for second in "hijklmno"]
"""56 words that no real text has."""

QUESTION = (
    "A train leaves the station at {hour} o'clock and drives {speed} kilometres an hour for {hours} hours"
    " until it stops in a small town by the sea: how far has it come by then"
)


def question(number: int) -> str:
    return QUESTION.format(hour=number % 12 + 1, speed=40 + number, hours=2 + number % 5)


def rows(count: int) -> list[dict[str, Any]]:
    answers = [(40 + number) * (2 + number % 5) for number in range(count)]
    return [
        {"question": question(number), "answer": answer, "meta": {"level": number % 3},
         "solution": f"It is speed times hours.\n#### {answer}"}
        for number, answer in enumerate(answers)
    ]  # fmt: skip


class Work(command.Work):
    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            "prepare_data",
            rows(20),
            data_source="math__trains",
            source={"type": "files", "train": str(folder / "rows.jsonl")},
            prompt="{{ question }}",
            instruction=" Put the answer into \\boxed{}.",
            ground_truth="{{ answer }}",
            extra_info={"level": "meta.level", "reference": "solution"},
        )

    def prepare(self, content: list[dict[str, Any]], *rules: dict[str, Any], **settings: Any) -> None:
        """Run the command on these rows."""
        write_lines(self.input, content)
        assert self.run(rules=rules, **settings) == 0

    def write_test_set(self, *problems: str) -> list[dict[str, Any]]:
        """Write a test set of these problems, and return the setting that names it."""
        path = write_lines(self.folder / "test.jsonl", [{"problem": problem} for problem in problems])
        return [{"name": "t", "source": {"type": "files", "test": str(path)}}]

    def rule(self, name: str) -> dict[str, Any]:
        """Return what the summary says of a rule."""
        return next(rule for rule in self.summary["rules"] if rule["rule"] == name)

    @property
    def dropped_lines(self) -> list[int]:
        """Lines of the input whose rows were dropped; the first line is 1."""
        return [int(record["place"].rpartition(":")[2]) for record in self.dropped]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def rows_of_questions(*texts: str) -> list[dict[str, Any]]:
    return [{"question": text, "answer": 1} for text in texts]


WITHOUT_ADDITIONS: dict[str, Any] = {"instruction": "", "extra_info": {}}


def test_rows_become_the_schema_with_their_values_as_they_were(work: Work) -> None:
    assert work.run() == 0
    first = work.rows("train")[0]
    assert first["data_source"] == "math__trains" and first["ability"] == "math"
    assert first["prompt"] == [{"role": "user", "content": question(0) + " Put the answer into \\boxed{}."}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "80"}
    assert first["extra_info"] == {
        "index": 0, "split": "train", "level": 0, "reference": "It is speed times hours.\n#### 80"
    }  # fmt: skip
    assert work.summary["read"] == 20 and work.summary["files"] == {"train.parquet": 20}


def test_a_prompt_can_be_messages_and_a_raw_prompt_can_be_made_of_it(work: Work) -> None:
    turns = [{"role": "system", "content": "Think."}, {"content": "{{ question }}"}]
    assert work.run(prompt=turns, apply_chat_template=False, raw_prompt="Q: {{ prompt }}\n<think>") == 0
    first = work.rows("train")[0]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert first["raw_prompt"] == f"Q: {first['prompt'][1]['content']}\n<think>"


def test_filters_and_rules_say_how_many_rows_each_took(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "filters": [{"name": "levels", "where": "meta.level != 2"}],
        "rules": [
            {"type": "keep_where", "name": "small", "where": "reward_model.ground_truth | int < 200"},
            {"type": "length", "max_ground_truth_characters": 2},
        ],
    }
    assert work.run(**settings) == 0
    answers_of_kept_rows = [row["reward_model"]["ground_truth"] for row in work.rows("train")]
    expected = [str(row["answer"]) for row in rows(20) if row["meta"]["level"] != 2 and row["answer"] < 100]
    assert answers_of_kept_rows == expected
    rules = work.summary["rules"]
    assert [rule["rule"] for rule in rules] == ["bad rows", "levels", "small", "length"]
    assert [rule["dropped"] for rule in rules][:2] == [0, 6]
    assert rules[-1]["left"] == len(expected)
    assert len(work.dropped) == 20 - len(expected)
    assert {"place": f"{work.folder}/rows.jsonl:3", "rule": "levels", "why": "levels"} in work.dropped
    assert "small" in capsys.readouterr().err


def test_exact_duplicates_that_contradict_each_other_are_told(work: Work) -> None:
    different = rows(3)
    shouted = {**different[2], "question": question(2).upper()}
    content = [*different, different[0], {**different[1], "answer": 7}, shouted]
    work.prepare(content, {"type": "exact_duplicates"})
    rule = work.rule("exact_duplicates")
    assert (rule["dropped"], rule["with_another_ground_truth"]) == (2, 1)
    work.prepare(content, {"type": "exact_duplicates", "loose": True})
    assert work.rule("exact_duplicates")["dropped"] == 3


def test_near_duplicates_are_those_whose_similarity_is_as_high_as_was_asked(work: Work) -> None:
    content = rows_of_questions(
        " ".join(WORDS),
        " ".join([*WORDS[:-1], "other"]),  # all sequences of words but the last are the same
        " ".join(reversed(WORDS)),
        " ".join([*WORDS[:26], "x", *WORDS[26:]]),  # the inserted word interrupts four sequences
    )
    work.prepare(content, {"type": "near_duplicates", "similarity": 0.9}, **WITHOUT_ADDITIONS)
    assert [record["why"] for record in work.dropped] == [f"0.96 alike {work.folder}/rows.jsonl:1"]
    work.prepare(content, {"type": "near_duplicates", "similarity": 0.8}, **WITHOUT_ADDITIONS)
    assert len(work.dropped) == 2


def test_contamination_names_the_test_problem_and_the_words_or_is_only_reported(work: Work) -> None:
    [test_set] = work.write_test_set(f"Listen: {question(4).lower()}?!", "too short to say anything")
    named = {**test_set, "name": "trains24", "text": "{{ problem }}"}
    rule = {"type": "contamination", "against": [named], "ngram": 24}
    work.prepare(rows(20), rule)
    assert work.dropped_lines == [5]
    test_problem, _, shared_words = work.dropped[0]["why"].partition(": ")
    assert test_problem == f"trains24 ({work.folder}/test.jsonl:1)" and len(shared_words.split()) == 24
    summary = work.rule("contamination")
    assert (summary["matches"], summary["test_problems"]) == ({"trains24": 1}, {"trains24": 2})
    work.prepare(rows(20), {**rule, "action": "report"})
    assert list(work.rule("contamination")["matching_rows"]) == ["4"]
    assert len(work.rows("train")) == 20


HANZI = "甲乙丙丁数列函图形面积体长宽高求证明已知若则设点线角圆直三四五六七八九十百千万元米时速"
THAI = "กขคงจฉชซดตถทนบปผฝพฟภมยรลวสหอฮ"


def problem_and_copy(kind: str, number: int) -> tuple[str, str]:
    """Draw a problem, and return it with a copy that is written in another way."""
    rng = random.Random(number)
    if kind in ("chinese", "thai"):  # scripts without spaces between words
        problem = "".join(rng.choices(HANZI if kind == "chinese" else THAI, k=60))
        return problem, f"请回答。{problem}谢谢！"
    words = rng.choices(WORDS, k=30 + number)
    problem = " ".join(words)
    match kind:
        case "fullwidth":
            # Unicode has the letters of ASCII again, in the width of Chinese characters, 0xFEE0 higher.
            copy = "".join(chr(ord(letter) + 0xFEE0) if letter != " " else letter for letter in problem)
        case "zero width":
            copy = "\u200b".join(problem)
        case "soft hyphen":
            copy = " ".join(word[0] + "\u00ad" + word[1:] for word in words)
        case "every tenth word":
            changed = ["other" if index % 10 == number else word for index, word in enumerate(words)]
            copy = " ".join(changed)
        case _:
            copy = problem
    return problem, f"Answer me: {copy.upper()}?"


WAYS_TO_WRITE = ("plain", "fullwidth", "zero width", "soft hyphen", "chinese", "thai", "every tenth word")


@pytest.mark.parametrize("kind", WAYS_TO_WRITE)
def test_a_copied_test_problem_is_found_however_it_is_written_and_no_clean_row_goes(
    kind: str, work: Work
) -> None:
    pairs = [problem_and_copy(kind, number) for number in range(10)]
    problems = [problem for problem, _ in pairs]
    copies = [copy for _, copy in pairs]
    clean = [problem_and_copy(kind, number)[1] for number in range(100, 140)]
    rule = {"type": "contamination", "against": work.write_test_set(*problems)}
    overlap = {"overlap": 0.5} if kind == "every tenth word" else {}
    work.prepare(rows_of_questions(*copies, *clean), rule | overlap, extra_info={})
    assert work.dropped_lines == list(range(1, 11)), "the copies, and they alone"


@pytest.mark.parametrize("kind", WAYS_TO_WRITE)
def test_a_near_duplicate_is_found_however_it_is_written_and_no_clean_row_goes(kind: str, work: Work) -> None:
    pairs = [problem_and_copy(kind, number) for number in range(10)]
    problems = [problem for problem, _ in pairs]
    copies = [copy for _, copy in pairs]
    clean = [problem_and_copy(kind, number)[1] for number in range(100, 140)]
    similar = {"ngram": 2, "similarity": 0.6} if kind == "every tenth word" else {"similarity": 0.7}
    content = rows_of_questions(*problems, *clean, *copies)
    work.prepare(content, {"type": "near_duplicates", **similar}, **WITHOUT_ADDITIONS)
    assert work.dropped_lines == list(range(51, 61)), "the copies, and they alone"


def test_powers_and_fractions_are_compared_as_they_are_read() -> None:
    assert word_list("10²") == word_list("10^2") != word_list("102")
    assert word_list("3½") == word_list("3 1/2") != word_list("31/2")


def test_a_variant_of_a_test_problem_with_other_numbers_stays(work: Work) -> None:
    problem = "A train drives 40 kilometres an hour for 3 hours. How far does it come?"
    variant = "A bus drives 50 kilometres an hour for 2 hours. How far does it come?"
    rule = {"type": "contamination", "against": work.write_test_set(problem), "overlap": 0.5}
    work.prepare(rows_of_questions(problem, variant), rule, extra_info={})
    assert work.dropped_lines == [1]


def test_test_problems_too_short_to_be_matched_are_counted(work: Work) -> None:
    short = ["What is 2 + 3?", "", "求x的值", "已知三角形的面积是十平方米求它的高"]
    test_set = work.write_test_set(*short, " ".join(WORDS))
    work.prepare(rows(20), {"type": "contamination", "against": test_set})
    summary = work.rule("contamination")
    assert (summary["test_problems"], summary["too_short"]) == ({"t": 5}, {"t": 3})


GRADED = {"type": "reference_solutions", "grader": {"type": "final_answer", "marker": "####"}}


def test_reference_solutions_that_fail_their_grader_go_and_one_of_several_is_enough(work: Work) -> None:
    content = rows(6)
    content[1]["solution"], content[2]["solution"] = "#### 0", ""
    work.prepare(content, {**GRADED, "without": "drop"})
    assert work.dropped_lines == [2, 3] and "gets 0 (ok)" in work.dropped[0]["why"]
    assert work.rule("reference_solutions")["without_a_reference"] == 1
    assert len(read_lines(work.output / "work" / "references.jsonl")) == 5
    content[0]["solution"], content[1]["solution"] = ["#### 0", "#### 80"], ["#### 0", "#### 1"]
    work.prepare(content[:2], GRADED)
    assert [row["extra_info"]["index"] for row in work.rows("train")] == [0]


def test_held_out_rows_stay_held_out_when_others_are_added(work: Work) -> None:
    assert work.run(hold_out={"validation": 4}, sample={"train": 10}) == 0
    held_out = set(work.prompts("validation"))
    assert len(held_out) == 4 and len(work.rows("train")) == 10
    assert all(row["extra_info"]["split"] == "validation" for row in work.rows("validation"))
    assert not held_out & set(work.prompts("train"))
    work.prepare(rows(21), hold_out={"validation": 4})
    assert len(held_out & set(work.prompts("validation"))) >= 3


def test_a_row_can_become_several_rows_or_none(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    (work.folder / "expansions_of_a_test.py").write_text(
        "def both(row, seed):\n"
        "    if row['meta']['level'] == 2:\n"
        "        return None\n"
        "    return [row, {**row, 'question': 'Again: ' + row['question']}]\n"
    )
    monkeypatch.chdir(work.folder)
    assert work.run(expand="expansions_of_a_test:both") == 0
    assert work.rule("expand")["dropped"] == 6
    # 14 of the 20 rows have another level than 2, and each becomes two.
    assert len(work.rows("train")) == 28
    assert work.prompts("train")[1].startswith("Again: ")


def test_an_empty_row_is_a_bad_row(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(work.input, [*rows(2), {}])
    assert work.run() == 2
    assert "rows.jsonl:3" in capsys.readouterr().err
    assert work.run(bad_rows="drop") == 0
    counts = [(rule["rule"], rule["rows"], rule["dropped"], rule["left"]) for rule in work.summary["rules"]]
    assert (work.summary["read"], counts) == (3, [("bad rows", 3, 1, 2)])
    assert work.dropped_lines == [3]


def test_rows_that_are_left_out_of_two_splits_of_one_file_are_counted_twice(work: Work) -> None:
    write_lines(work.input, [*rows(2), {"question": "?"}])
    source = {"type": "files", "train": str(work.input), "test": str(work.input)}
    filters = [{"name": "levels", "where": "meta.level != 1"}]
    assert work.run(source=source, splits=["train", "test"], filters=filters, bad_rows="drop") == 0
    counts = [(rule["rule"], rule["rows"], rule["dropped"], rule["left"]) for rule in work.summary["rules"]]
    assert counts == [("bad rows", 6, 2, 4), ("levels", 4, 2, 2)]
    assert work.dropped_lines == [3, 3, 2, 2]


def test_a_changed_function_makes_the_rows_anew(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work.folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(treetune.__file__).parents[1]))
    for question_of_all in ("First", "Then"):
        function = f"def replace(row, seed):\n    return row | {{'question': {question_of_all!r}}}\n"
        (work.folder / "changing_expansions.py").write_text(function)
        with work.started(expand="changing_expansions:replace") as process:
            assert process.wait(120) == 0
        assert work.prompts("train")[0].startswith(question_of_all)


def test_of_equal_rows_in_two_splits_the_one_in_the_test_split_stays(work: Work) -> None:
    test = write_lines(work.folder / "test.jsonl", rows(2))
    source = {"type": "files", "train": str(work.input), "test": str(test)}
    assert work.run(source=source, splits=["train", "test"], rules=[{"type": "exact_duplicates"}]) == 0
    assert (len(work.rows("test")), len(work.rows("train"))) == (2, 18)


def test_rows_of_the_schema_are_taken_as_they_are(work: Work, tmp_path: Path) -> None:
    assert work.run() == 0
    before = work.rows("train")
    write_parquet(tmp_path / "again.parquet", before)
    source = {"type": "files", "train": str(tmp_path / "again.parquet")}
    assert work.run(source=source, copy=True, prompt="", ground_truth="", **WITHOUT_ADDITIONS) == 0
    assert work.rows("train") == before


def test_bad_rows_stop_with_their_place_or_are_counted(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(work.input, [*rows(2), {"question": "?"}])
    assert work.run() == 2
    message = capsys.readouterr().err
    assert "rows.jsonl:3" in message and "answer" in message
    assert work.run(bad_rows="drop") == 0
    assert work.rule("bad rows")["dropped"] == 1


@pytest.mark.parametrize(
    ("settings", "part_of_message"),
    [
        ({"prompt": "{{ question"}, "Jinja can't read"),
        ({"data_source": "trains"}, "<domain>__<name>"),
        ({"ground_truth": ""}, "needs a prompt and a ground_truth"),
        ({"hold_out": {"train": 3}}, "hold_out names train"),
        ({"hold_out": {"test": 20}}, "hold out"),
        ({"rules": [{"type": "length"}]}, "bounds nothing"),
        ({"rules": [{"type": "near_duplicatse"}]}, "near_duplicates"),
        ({"source": {"type": "files", "train": "nowhere.jsonl"}}, "there is no file nowhere.jsonl"),
        ({"rules": [{"type": "keep_where", "where": "nothing == 1"}]}, "nothing"),
        ({"filters": [{"name": "all", "where": "false"}]}, "no row is left"),
        # The summary counts rows by these names.
        ({"filters": [{"name": "a", "where": "true"}] * 2}, "several filters are called 'a'"),
        ({"filters": [{"name": "bad rows", "where": "true"}]}, "a filter is called 'bad rows'"),
        ({"type": "filter_data"}, "wrong configuration"),
    ],
)
def test_a_mistake_in_the_settings_is_one_message(
    work: Work, settings: dict[str, Any], part_of_message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work.run(**settings) == 2
    message = capsys.readouterr().err
    assert part_of_message in message and "Traceback" not in message


def test_another_pipelines_configuration_is_refused(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--configs", str(work.config()), "filter_data", "--input", str(work.input)]
    assert main([*command, "--output", str(work.output)]) == 2
    assert "the command prepare_data carries it out" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_at_any_point_it_ends_with_the_same_bytes(work: Work) -> None:
    rules = [{"type": "exact_duplicates"}, {"type": "near_duplicates", "similarity": 0.97}, GRADED]
    settings: dict[str, Any] = {"rules": rules, "hold_out": {"test": 100}}
    write_lines(work.input, rows(3000))

    def run_and_read() -> list[bytes]:
        assert work.run(**settings) == 0
        files = ("train.parquet", "test.parquet", "summary.json", "dropped.jsonl")
        return [(work.output / name).read_bytes() for name in files]

    expected = run_and_read()
    work.output = work.folder / "killed"
    for seconds in (1.0, 1.75, 2.5, 3.25):
        with work.started(**settings):  # which kills the command at its end
            time.sleep(seconds)
    assert run_and_read() == expected
