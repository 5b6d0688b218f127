"""Logs of other trainers are credited, and the viewer shows them as it shows runs.

Promises that these tests hold:

* Answers of verl, TRL, verifiers, slime, Inspect and plain rows get exactly the advantages of the library.
* Token ids are those of the log where it has some. Otherwise texts are encoded, and texts that change by it
  are counted. Prompts that were stored without special tokens get these back.
* Rows that can't be credited are counted with the reason.
* A killed command samples nothing again; a budget and a deadline end it without a loss.
* The folder is shown with values, advantages and continuations. The log stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tabular_mdp as mdp
from tests.support.chat_models import bpe_tokenizer
from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from tests.support.fake_vllm import FakeVllm
from tests.view.conftest import Viewer
from tests.view.store.test_foreign_runs import lines
from treetune.credit import CreditAssigner, CreditedAnswers
from treetune.engine.requests import SamplingParams
from treetune.exceptions import CreditLimitReached, EngineError
from treetune.main import main
from treetune.models.chat import Chat
from treetune.models.tokenizer import codec_of
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.view.crediting.credit_log import CreditOfLog, credit_log, read_sampling
from treetune.view.crediting.folder import RECORD_FILE
from treetune.view.crediting.log import files_of_log, find_log
from treetune.view.crediting.tokens import LogTokenizer
from treetune.view.store.foreign.token_ids import StoredTokens, stored_tokens
from treetune.vocabulary import Episode, Message, TextCodec, Trajectory

GRADER = {"type": "final_answer", "marker": "\n"}
"""An answer is right if its last line is the gold."""
SAMPLING = {"max_tokens": mdp.LONGEST}
MONTE_CARLO = {"type": "monte_carlo", "samples": 3}
CODEC = TextCodec(
    encode=lambda text: mdp.encode(text.replace("\n", ";")),
    decode=lambda ids: mdp.decode(ids).replace(";", "\n"),
    eos_id=mdp.EOS,
)
"""The language of the tests, with a line for each step."""

ANSWERS = [("0?", "a\na", 1.0), ("0?", "b\na\na", 1.0), ("1?", "b", 0.0), ("1?", "a\nb", 0.0)]
"""Prompt, answer, reward."""
GOLD = "a"


def engine(**settings: Any) -> FakeEngine:
    return FakeEngine(mdp.chances, mdp.EOS, decode=CODEC.decode, **settings)


def credit(log: Path, output: Path, *, by: FakeEngine | None = None, **changed: Any) -> list[str]:
    """Credits a log, and returns the lines that were printed."""
    settings: dict[str, Any] = {"credit": MONTE_CARLO, "grader": GRADER, "sampling": SAMPLING}
    printed: list[str] = []
    credit_log(
        CreditOfLog(log=log, output=output, **settings | changed),
        printed.append,
        engine=by or engine(),
        tokenizer=LogTokenizer(CODEC, vocabulary_size=mdp.EOS + 1),
    )
    return printed


def read_stored(output: Path, iteration: int) -> tuple[list[Trajectory], list[Episode]]:
    folder = output / "iterations" / f"{iteration - 1:04d}"
    return read_trajectories(folder / "trajectories.arrow"), read_episodes(folder / "episodes.arrow")


def credit_of_library(iteration: int, groups: list[str], **changed: Any) -> CreditedAnswers:
    """Credits `ANSWERS` by the library."""
    answers = []
    for (prompt, text, reward), group in zip(ANSWERS, groups, strict=True):
        ids = [*CODEC.encode(text), mdp.EOS]
        answers.append(
            {
                "prompt_ids": list(CODEC.encode(prompt)),
                "response_ids": ids,
                "reward": reward,
                "group": group,
                "gold": GOLD,
            }
        )
    with CreditAssigner(
        changed.pop("credit", MONTE_CARLO),
        engine=engine(),
        grader=GRADER,
        tokenizer=CODEC,
        sampling=SamplingParams(**SAMPLING),
    ) as assigner:
        return assigner.advantages(answers, iteration=iteration - 1)


# Formats


def verl(folder: Path) -> None:
    rows = [
        {"input": prompt, "output": text, "gts": GOLD, "score": reward, "step": 3}
        for prompt, text, reward in ANSWERS
    ]
    lines(folder / "3.jsonl", *rows)


def trl(folder: Path) -> None:
    """TRL has no column for the reference answer: a `solution` column of the data set is taken."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "step": [3] * len(ANSWERS),
        "prompt": [prompt for prompt, _, _ in ANSWERS],
        "completion": [text for _, text, _ in ANSWERS],
        "reward_ends_with_a": [reward for _, _, reward in ANSWERS],
        "solution": [GOLD] * len(ANSWERS),
        "advantage": [0.5, -0.5, 0.0, 0.0],
    }
    (folder / "completions").mkdir(parents=True)
    parquet.write_table(pa.table(columns), folder / "completions" / "completions_00003.parquet")


def verifiers(folder: Path) -> None:
    rows = []
    for prompt, text, reward in ANSWERS:
        rows.append(
            {
                "example_id": 0,
                "prompt": prompt,
                "completion": [{"role": "assistant", "content": text}],
                "answer": GOLD,
                "reward": reward,
                "is_completed": True,
            }
        )
    lines(folder / "step_3" / "results.jsonl", *rows)


def traces(folder: Path) -> None:
    """Traces of verifiers have the token ids of each message."""
    rows = []
    for prompt, text, reward in ANSWERS:
        ids = [*CODEC.encode(text), mdp.EOS]
        user = {"role": "user", "content": prompt}
        assistant = {"role": "assistant", "content": text}
        nodes: list[dict[str, Any]] = [
            {"message": user, "sampled": False, "token_ids": list(CODEC.encode(prompt))},
            {"parent": 0, "message": assistant, "sampled": True, "token_ids": ids},
        ]
        task = {"data": {"prompt": prompt, "answer": GOLD}, "key": "letters"}
        trace = {"nodes": nodes, "rewards": {"right": reward}, "ok": True}
        rows.append({"task": task, "ok": True, "traces": [trace]})
    lines(folder / "step_3" / "train" / "all" / "traces.jsonl", *rows)


def slime(folder: Path) -> None:
    import torch

    samples = []
    for prompt, text, reward in ANSWERS:
        ids = [*CODEC.encode(text), mdp.EOS]
        samples.append(
            {
                "prompt": prompt,
                "tokens": torch.tensor([*CODEC.encode(prompt), *ids]),
                "response": text,
                "response_length": len(ids),
                "rollout_log_probs": [-0.5] * len(ids),
                "label": GOLD,
                "reward": reward,
                "status": "completed",
            }
        )
    folder.mkdir(parents=True)
    torch.save({"rollout_id": 3, "samples": samples}, folder / "rollout_3.pt")


def inspect(folder: Path) -> None:
    samples = []
    for number, (prompt, text, reward) in enumerate(ANSWERS):
        samples.append(
            {
                "id": prompt, "epoch": number % 2 + 1, "input": prompt, "target": GOLD, "messages": [],
                "output": {"choices": [{"message": {"role": "assistant", "content": text}}]},
                "scores": {"match": {"value": reward}},
            }
        )  # fmt: skip
    (folder / "step_3").mkdir(parents=True)
    log = {"version": 2, "status": "success", "eval": {"task": "letters"}, "samples": samples}
    (folder / "step_3" / "log.json").write_text(json.dumps(log))


def plain_rows(folder: Path) -> None:
    rows = [
        {"prompt": prompt, "response": text, "answer": GOLD, "reward": reward}
        for prompt, text, reward in ANSWERS
    ]
    lines(folder / "step_3.jsonl", *rows)


@pytest.mark.parametrize("write", [verl, trl, verifiers, traces, slime, inspect, plain_rows])
def test_answers_of_each_format_get_exactly_the_credit_of_the_library(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / "log")
    before = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    printed = credit(tmp_path / "log", tmp_path / "credited")
    trajectories, episodes = read_stored(tmp_path / "credited", iteration=3)
    expected = credit_of_library(3, [trajectory.problem.id for trajectory in trajectories])
    assert len(episodes) == len(ANSWERS)
    for number, (trajectory, episode) in enumerate(zip(trajectories, episodes, strict=True)):
        assert trajectory.id == episode.trajectory
        assert trajectory.text == ANSWERS[number][1] and trajectory.reward == ANSWERS[number][2]
        assert plain(episode.advantages) == tuple(expected.advantages[number])
        assert episode.step_values == expected.values[number]
        assert episode.step_ends == expected.step_ends[number]
        assert sum(map(len, episode.continuations.values())) == 3 * len(episode.step_ends)
    assert len({trajectory.problem.id for trajectory in trajectories}) == 2
    cost = f"{expected.cost.samples} continuations with {expected.cost.tokens} tokens"
    assert f": 4 rows, 4 credited; {cost}, " in printed[-1]
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("name", ["rloo", "group"])
def test_credit_without_continuations_needs_no_engine(name: str, tmp_path: Path) -> None:
    verl(tmp_path / "log")
    settings = CreditOfLog(log=tmp_path / "log", output=tmp_path / "credited", credit={"type": name})
    credit_log(settings, lambda line: None, tokenizer=LogTokenizer(CODEC))
    trajectories, episodes = read_stored(tmp_path / "credited", iteration=3)
    expected = credit_of_library(3, [trajectory.problem.id for trajectory in trajectories], credit=name)
    for episode, advantages in zip(episodes, expected.advantages, strict=True):
        assert plain(episode.advantages) == tuple(advantages)


def test_logs_with_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    slime(tmp_path / "log")
    settings = CreditOfLog(log=tmp_path / "log", output=tmp_path / "credited", credit={"type": "rloo"})
    credit_log(settings, lambda line: None)
    trajectories, _ = read_stored(tmp_path / "credited", iteration=3)
    assert [trajectory.text for trajectory in trajectories] == [text for _, text, _ in ANSWERS]
    verl(tmp_path / "texts")
    with pytest.raises(ValueError, match="the log has no token ids: give --tokenizer"):
        credit_log(replace(settings, log=tmp_path / "texts", output=tmp_path / "other"), lambda line: None)


def test_rows_without_credit_are_counted_with_the_reason_and_shown(viewer: Viewer, tmp_path: Path) -> None:
    row = {"prompt": "0?", "response": "a\na", "answer": GOLD, "reward": 1.0}
    two_messages = [{"role": "assistant", "content": text} for text in ("a", "b")]
    lines(
        tmp_path / "log" / "1.jsonl",
        row,
        row | {"response": "b"},
        row | {"reward": None},
        row | {"error": "the server died"},
        row | {"response": "x"},
        row | {"response": "a\na\na\na"},
        row | {"prompt": "1?"},
        row | {"response": two_messages},
        {"prompt": "0?"},
        row | {"response": "a\na\nb", "finish_reason": "length"},
    )
    with (tmp_path / "log" / "1.jsonl").open("a") as file:
        file.write("no JSON\n")
    output = viewer.folder / "credited"
    printed = credit(tmp_path / "log", output, credit={"type": "rloo"})
    reasons = json.loads((output / "iterations" / "0000" / RECORD_FILE).read_text())["reasons"]
    assert reasons == {
        "an answer that the tokenizer can't encode": 1,
        "several messages without token ids": 1,
        "it has no answer (response, completion, output, output_response, generation)": 1,
        "not readable": 1,
        "without a reward": 1,
        "failed": 1,
        "longer than max_tokens (6)": 1,
        "in a group of 1, and the credit needs 2 answers": 1,
    }
    assert "1.jsonl: 11 rows, 3 credited: " in printed[0]
    trajectories, episodes = read_stored(output, iteration=1)
    assert [trajectory.unfinished for trajectory in trajectories][-1]
    assert plain(episodes[-1].response_ids) == tuple(CODEC.encode("a\na\nb")), "no end token was sampled"
    listed = viewer.page("/answers", run="credited", of="everything")
    assert "<b>7</b> answers" in listed
    page = viewer.page("/answer", run="credited", source="i1", answer=trajectories[2].id)
    assert "not credited: without a reward" in page and "none: see the outcome" in page
    assert "8 rows of the log have no credit" in viewer.page("/run", run="credited")


def test_a_log_without_anything_to_credit_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "log" / "1.jsonl", {"prompt": "0?", "response": "a", "reward": None})
    with pytest.raises(ValueError, match=r"no row of .* could be credited: 1 without a reward"):
        credit(tmp_path / "log", tmp_path / "credited")


# Token ids


def test_token_ids_are_read_with_masks_and_logprobs() -> None:
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [1, 0, 1]}
    assert stored_tokens(row) == StoredTokens([1, 2], [3, 4, 5], [True, False, True])
    with_logprobs = row | {"logprobs": [-0.5, 0.0, -1.5]}
    expected = StoredTokens([1, 2], [3, 4, 5], [True, False, True], [-0.5, 0.0, -1.5])
    assert stored_tokens(with_logprobs) == expected
    tool = {"parent": 1, "sampled": False, "token_ids": [6]}
    nodes = [
        {"sampled": False, "token_ids": [1, 2]},
        {"parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [True, True], "logprobs": [-1.0, -2.0]},
        tool,
        {"parent": 2, "sampled": True, "token_ids": [7], "logprobs": [-3.0]},
    ]
    of_trace = StoredTokens([1, 2], [3, 4, 6, 7], [True, True, False, True], [-1.0, -2.0, 0.0, -3.0])
    assert stored_tokens({"traces": [{"nodes": nodes}]}) == stored_tokens({"nodes": nodes}) == of_trace


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_ids": [1], "response": "3"},
        {"prompt_ids": [1], "completion_ids": "3"},
        {"tokens": [1, 2], "response_length": 5},
        {"traces": [{"nodes": []}, {"nodes": []}]},
        {"nodes": [{"sampled": True, "token_ids": [1]}, {"parent": None, "sampled": True, "token_ids": [2]}]},
        {"nodes": [{"sampled": False, "token_ids": [1]}, {"parent": 0, "sampled": False, "token_ids": [2]}]},
        {"nodes": [{"sampled": False}, {"parent": 0, "sampled": True, "token_ids": [2]}]},
        "a text",
    ],
)
def test_rows_without_the_ids_of_one_answer_have_none(row: Any) -> None:
    assert stored_tokens(row) is None


# Texts


def test_texts_that_the_tokenizer_changes_are_counted(tmp_path: Path) -> None:
    verl(tmp_path / "log")
    forgetful = replace(CODEC, encode=lambda text: CODEC.encode(text.replace("b", "a")))
    tokenizer = LogTokenizer(forgetful)
    printed: list[str] = []
    settings = CreditOfLog(log=tmp_path / "log", output=tmp_path / "credited", credit={"type": "rloo"})
    credit_log(settings, printed.append, tokenizer=tokenizer)
    encoded, warning = [line for line in printed if line.startswith("note: ")]
    assert "4 answers have no token ids in the log: their texts were encoded" in encoded
    assert "3 texts are not what their token ids decode to" in warning
    assert "such as 'b\\na\\na', which becomes 'a\\na\\na'" in warning


def test_prompts_that_verl_stored_without_special_tokens_get_them_back() -> None:
    tokenizer = bpe_tokenizer()
    codec, chat = codec_of(tokenizer), codec_of(tokenizer, chat=Chat())
    tokenizer_of_log = LogTokenizer(codec, chat)
    user = {"role": "user", "content": "What is 2 + 2?\nuser\nThink."}
    for messages in ([user], [{"role": "system", "content": "You answer."}, user]):
        sampled_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        stored_text = tokenizer.decode(sampled_ids, skip_special_tokens=True)
        assert "<|im_start|>" not in stored_text
        assert plain(tokenizer_of_log.encode_prompt(stored_text, ())) == tuple(sampled_ids)
        assert plain(tokenizer_of_log.encode_prompt("", messages)) == tuple(sampled_ids)
    no_chat = "What is 2 + 2?"
    assert plain(tokenizer_of_log.encode_prompt(no_chat, ())) == tuple(codec.encode(no_chat))
    assert tokenizer_of_log.warnings() == [
        "2 prompts were stored without special tokens, and got them back by the chat template"
    ]


def test_prompts_that_may_have_several_turns_are_encoded_as_they_are_and_counted() -> None:
    tokenizer = bpe_tokenizer()
    codec = codec_of(tokenizer)
    tokenizer_of_log = LogTokenizer(codec, codec_of(tokenizer, chat=Chat()))
    turns = [("user", "What is 2 + 2?"), ("assistant", "4"), ("user", "And 3 + 3?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    stored_text = tokenizer.decode(ids, skip_special_tokens=True)
    assert plain(tokenizer_of_log.encode_prompt(stored_text, ())) == tuple(codec.encode(stored_text))
    assert tokenizer_of_log.warnings() == [
        "1 prompts may have several turns: they were encoded as plain text"
    ]


def test_a_template_without_text_between_its_messages_restores_no_system_message() -> None:
    def write(messages: Sequence[Message]) -> str:
        # It refuses conversations without a system message, so that such a form is the first to be tried.
        if messages[0].role != "system":
            raise ValueError("no system message")
        return "".join(message.content for message in messages) + "A: "

    codec = codec_of(bpe_tokenizer())
    tokenizer_of_log = LogTokenizer(codec, replace(codec, conversation=write))
    stored_text = "You answer.What is 2 + 2?A: "
    assert plain(tokenizer_of_log.encode_prompt(stored_text, ())) == tuple(codec.encode(stored_text))


def test_a_conversation_needs_a_chat_template() -> None:
    tokenizer = LogTokenizer(CODEC, why_no_chat="the tokenizer has no chat template")
    with pytest.raises(ValueError, match="a conversation: the tokenizer has no chat template"):
        tokenizer.encode_prompt("", [{"role": "user", "content": "0?"}])


# Engines


def test_a_server_at_an_address_continues_the_answers_and_is_asked_once(tmp_path: Path) -> None:
    as_bytes = TextCodec(
        encode=lambda text: list(text.encode("latin-1")),
        decode=lambda ids: bytes(map(int, ids)).decode("latin-1"),
        eos_id=0,
    )
    verl(tmp_path / "log")
    with closing(FakeVllm("weights of the trainer")) as server:
        settings = CreditOfLog(
            log=tmp_path / "log",
            output=tmp_path / "credited",
            credit=MONTE_CARLO,
            engine=server.url,
            grader=GRADER,
            sampling={"max_tokens": 20},
        )
        with pytest.raises(ValueError, match="--engine names a server: give --tokenizer too"):
            credit_log(settings, lambda line: None)
        credit_log(settings, lambda line: None, tokenizer=LogTokenizer(as_bytes))
        _, episodes = read_stored(tmp_path / "credited", iteration=3)
        assert len(episodes) == len(ANSWERS)
        for episode in episodes:
            assert {len(rewards) for rewards in episode.continuations.values()} == {3}
        assert server.requests
        server.requests.clear()
        for record in (tmp_path / "credited").rglob(RECORD_FILE):
            record.unlink()  # as after a kill before it was written
        credit_log(settings, lambda line: None, tokenizer=LogTokenizer(as_bytes))
        assert not server.requests
        assert read_stored(tmp_path / "credited", iteration=3)[1] == episodes


# Interrupted commands


def write_two_files(folder: Path) -> None:
    verl(folder)
    lines(folder / "4.jsonl", *map(json.loads, (folder / "3.jsonl").read_text().splitlines()))


def test_a_killed_command_samples_nothing_again(tmp_path: Path) -> None:
    write_two_files(tmp_path / "log")
    undisturbed = engine()
    credit(tmp_path / "log", tmp_path / "undisturbed", by=undisturbed)
    killed, resumed = engine(fail_after=len(undisturbed.asked) - 2), engine()
    with pytest.raises(EngineError):
        credit(tmp_path / "log", tmp_path / "credited", by=killed)
    printed = credit(tmp_path / "log", tmp_path / "credited", by=resumed)
    assert printed[0] == "1 of 2 files were credited before"
    assert len(killed.asked) + len(resumed.asked) == len(undisturbed.asked)
    for iteration in (3, 4):
        _, episodes = read_stored(tmp_path / "credited", iteration)
        _, expected = read_stored(tmp_path / "undisturbed", iteration)
        assert episodes == expected
    assert credit(tmp_path / "log", tmp_path / "credited", by=engine(fail_after=0))[0].startswith("2 of 2")


def test_files_that_are_new_or_have_changed_are_credited(tmp_path: Path) -> None:
    write_two_files(tmp_path / "log")
    (tmp_path / "log" / "4.jsonl").rename(tmp_path / "later")
    credit(tmp_path / "log", tmp_path / "credited")
    (tmp_path / "later").rename(tmp_path / "log" / "4.jsonl")
    first_row = (tmp_path / "log" / "3.jsonl").read_text().splitlines()[0]
    (tmp_path / "log" / "3.jsonl").write_text(first_row + "\n")
    printed = credit(tmp_path / "log", tmp_path / "credited")
    assert [line.partition(":")[0] for line in printed[:2]] == ["3.jsonl", "4.jsonl"]
    assert len(read_stored(tmp_path / "credited", 3)[1]) == 1
    assert len(read_stored(tmp_path / "credited", 4)[1]) == len(ANSWERS)


def cost_in(line: str) -> str:
    """Reads the continuations and tokens from the last line that the command prints."""
    return line.split(";")[1].split(",")[0]


def test_a_budget_and_a_deadline_end_the_command_and_a_higher_one_continues(tmp_path: Path) -> None:
    write_two_files(tmp_path / "log")
    whole = engine()
    total = credit(tmp_path / "log", tmp_path / "whole", by=whole)[-1]
    begun, continued = engine(), engine()
    with pytest.raises(CreditLimitReached, match=r"the budget of 40 tokens is used up in 3\.jsonl: 0 files"):
        credit(tmp_path / "log", tmp_path / "credited", by=begun, budget=40)
    with pytest.raises(CreditLimitReached, match="the deadline of 1e-06 s has passed"):
        credit(tmp_path / "log", tmp_path / "credited", deadline=1e-6)
    printed = credit(tmp_path / "log", tmp_path / "credited", by=continued, budget=100_000)
    assert cost_in(printed[-1]) == cost_in(total), "counted once"
    assert len(begun.asked) + len(continued.asked) <= len(whole.asked) + 1, (
        "only the request that exceeded the budget is sampled again"
    )


# Errors


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    verl(tmp_path / "log")
    credit(tmp_path / "log", tmp_path / "credited")
    with pytest.raises(ValueError, match=r"other settings: seed was 0 and is 1\. Choose another folder"):
        credit(tmp_path / "log", tmp_path / "credited", seed=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ValueError, match="mine is not empty: choose another folder"):
        credit(tmp_path / "log", tmp_path / "mine")


def test_continuations_need_engine_grader_and_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verl(tmp_path / "log")
    assert main(["credit", str(tmp_path / "log"), "--credit", "monte_carlo"]) == 2
    message = capsys.readouterr().err
    for option in ("--engine", "--grader (such as math, or reward.py:score", "--sampling"):
        assert option in message
    assert main(["credit", str(tmp_path / "log"), "--credit", "gae"]) == 2
    assert "learns a critic" in capsys.readouterr().err
    assert main(["credit", str(tmp_path / "log"), "--credit", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    wrong = ["--credit", "rloo", "--tokenizer", str(tmp_path)]
    assert main(["credit", str(tmp_path / "log"), *wrong]) == 2
    assert f"there is no tokenizer in {tmp_path}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--sampling has no key 'tokens'"):
        read_sampling({"tokens": 3})


def test_a_folder_without_a_log_or_with_several_logs_is_refused(viewer: Viewer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no file below .*empty has rows"):
        find_log(tmp_path / "empty")
    for name in ("first", "second"):
        verl(tmp_path / "logs" / name)
    with pytest.raises(ValueError, match=r"there are 2 logs below .*\(first, second\)"):
        find_log(tmp_path / "logs")
    run = viewer.record()
    with pytest.raises(ValueError, match="an experiment of treetune"):
        find_log(run.path)
    with pytest.raises(ValueError, match="there is no file or folder"):
        find_log(tmp_path / "missing")


# The viewer


def test_the_viewer_shows_values_advantages_and_continuations(viewer: Viewer, tmp_path: Path) -> None:
    trl(tmp_path / "log")
    output = viewer.folder / "credited"
    credit(tmp_path / "log", output)
    trajectories, episodes = read_stored(output, iteration=3)
    answer, episode = trajectories[1], episodes[1]
    run = viewer.page("/run", run="credited")
    assert "finished" in run and "reward of the sampled answers" in run
    page = viewer.page("/answer", run="credited", source="i3", answer=answer.id)
    assert "completions_00003.parquet" in page and "treetune run_analyzers" not in page
    assert "No entropy" not in page and "<option>credit</option>" not in page
    assert episode.step_values is not None
    for value in episode.step_values:
        assert f"V {value:.3f}" in page
    assert f"{episode.advantages[0]:+.3f}" in page
    assert "the log&#39;s trainer may have used other advantages" in page
    assert "log/advantage" in page, "the advantage that TRL computed"
    start = episode.step_ends[0]
    continued = viewer.page("/continuations", run="credited", source="i3", answer=answer.id, start=start)
    assert "<b>3</b>" in continued or "3 continuations" in continued
    assert np.isfinite(episode.advantages).all()


def test_a_log_with_links_to_other_folders_is_refused(tmp_path: Path) -> None:
    """Otherwise the answers of these files would be missing without a word."""
    verl(tmp_path / "elsewhere")
    (tmp_path / "log").mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (tmp_path / "log" / path.name).symlink_to(path)
    with pytest.raises(ValueError, match="symbolic links to other folders are not followed"):
        files_of_log(find_log(tmp_path / "log"))
