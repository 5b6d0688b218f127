"""Storage of episodes, trajectories and tokens.

These tests promise:

* Rows come back bit for bit, in order, also between ranks and from files of earlier versions.
* A damaged file, a file of another kind, and data that can't be stored are refused by name.
* A write that fails leaves the old file and nothing beside it.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.storage import (
    TOKENS,
    episodes_from_bytes,
    episodes_to_bytes,
    read_episodes,
    read_tokens,
    read_trajectories,
    trajectories_from_bytes,
    trajectories_to_bytes,
    write_episodes,
    write_tokens,
    write_trajectories,
)
from treetune.runtime.generation import gather_episodes_on_all, gather_trajectories_on_first
from treetune.store.checksums import SEALED_MARK
from treetune.vocabulary import Episode, Grade, Message, Problem, Segment, Trajectory

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
numbers = st.lists(st.floats(allow_nan=False), max_size=5).map(tuple)
names = st.text(max_size=8)
keys = names.filter(lambda key: key != "tuple()")  # reserved: data of a problem may not have this key
json_data = st.dictionaries(
    keys,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.lists(inner, max_size=2).map(tuple)
            | st.dictionaries(keys, inner, max_size=2)
        ),
        max_leaves=3,
    ),
    max_size=2,
)
finish = st.sampled_from(["stop", "length"])
versions = st.integers(-1, 2**40)
rewards = st.floats(allow_nan=False)

episodes = st.builds(
    Episode,
    prompt_ids=ids,
    response_ids=ids,
    trained=st.lists(st.booleans(), max_size=5).map(tuple),
    reward=rewards,
    group=names,
    trajectory=names,
    policy_version=versions,
    finish_reason=finish,
    advantages=st.none() | numbers,
    behaviour_logprobs=st.none() | numbers,
    step_ends=ids,
    step_values=st.none() | numbers,
    text=names,
    score=rewards,
    step_rewards=st.just(()) | numbers,
    step_errors=st.none() | numbers,
    continuations=st.dictionaries(
        st.integers(0, 2**31 - 1), st.lists(st.none() | rewards, max_size=3).map(tuple), max_size=2
    ),
    domain=st.just("") | names,
)
trajectories = st.builds(
    Trajectory,
    problem=st.builds(
        Problem,
        id=names,
        prompt=names,
        gold=names,
        data=json_data,
        domain=st.just("") | names,
        messages=st.lists(st.builds(Message, names, names), max_size=2).map(tuple),
        as_is=st.booleans(),
    ),
    sample=st.integers(0, 1000),
    prompt_ids=ids,
    segments=st.lists(
        st.builds(
            Segment,
            token_ids=ids,
            origin=st.sampled_from(["sampled", "injected"]),
            logprobs=st.none() | numbers,
            policy_version=st.none() | versions,
        ),
        max_size=3,
    ).map(tuple),
    finish_reason=finish,
    text=names,
    grade=st.builds(
        Grade,
        reward=rewards,
        outcome=st.sampled_from(["ok", "no_answer", "timeout", "error", "unavailable"]),
        extracted=st.none() | names,
        seconds=rewards,
        message=st.none() | names,
        numbers=st.just({}) | st.dictionaries(names, rewards, max_size=2),
    ),
    step_ends=ids,
    bonus=rewards,
)


@settings(max_examples=25)
@given(st.lists(episodes, max_size=4), st.lists(trajectories, max_size=4))
def test_episodes_and_answers_are_read_back_exactly(rows: list[Episode], answers: list[Trajectory]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "iterations" / "episodes.arrow"
        write_episodes(path, rows)
        assert read_episodes(path) == rows
        write_trajectories(path, answers)
        assert read_trajectories(path) == answers


def bits_of_columns(columns: list[Any]) -> list[tuple[str, bytes] | None]:
    return [None if column is None else (column.dtype.str, column.tobytes()) for column in columns]


single = st.lists(st.floats(width=32, allow_nan=False), max_size=5)


@settings(max_examples=25)
@given(st.lists(st.tuples(numbers, single), max_size=4))
def test_every_bit_of_a_column_comes_back_and_log_probs_keep_their_width(
    rows: list[tuple[tuple[float, ...], list[float]]],
) -> None:
    written_rows = [
        replace(make_episode(), advantages=wide, behaviour_logprobs=narrow) for wide, narrow in rows
    ]
    read_rows = episodes_from_bytes(episodes_to_bytes(written_rows))
    assert bits_of_columns([row.advantages for row in read_rows]) == bits_of_columns(
        [row.advantages for row in written_rows]
    )
    assert bits_of_columns([row.behaviour_logprobs for row in read_rows]) == bits_of_columns(
        [row.behaviour_logprobs for row in written_rows]
    )
    segments = [Segment((1,) * len(narrow), logprobs=narrow) for _, narrow in rows]
    (answer, *_) = mdp.all_trajectories()
    (read_answer,) = trajectories_from_bytes(
        trajectories_to_bytes([replace(answer, segments=tuple(segments))])
    )
    assert bits_of_columns([segment.logprobs for segment in read_answer.segments]) == bits_of_columns(
        [segment.logprobs for segment in segments]
    )


class RanksThatHaveSent:
    """This rank among others that have already sent their parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self.everyones, self.world_size = parts, len(parts)

    def exchange(self, name: str, own_part: bytes) -> list[bytes]:
        assert own_part in self.everyones
        return self.everyones

    to_first = exchange


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rows_that_ranks_exchange_are_those_of_one_rank(ranks: int) -> None:
    for exchanged, to_bytes, rows in (
        (gather_trajectories_on_first, trajectories_to_bytes, mdp.all_trajectories()),
        (gather_episodes_on_all, episodes_to_bytes, [make_episode(number) for number in range(7)]),
    ):
        shares = [contiguous_share(rows, rank, ranks) for rank in range(ranks)]
        others: Any = RanksThatHaveSent([to_bytes(share) for share in shares])
        assert all(exchanged(others, "rows", share) == rows for share in shares)


def test_the_text_of_a_token_can_be_read_without_a_tokenizer(tmp_path: Path) -> None:
    write_tokens(tmp_path / TOKENS, mdp.CODEC, mdp.EOS + 1)
    texts = read_tokens(tmp_path / TOKENS)
    assert "".join(texts[token] for token in make_episode().response_ids) == "a;b"


def make_episode(number: int = 0) -> Episode:
    answer = mdp.encode("a;b") + (mdp.EOS,)
    return Episode(
        prompt_ids=mdp.encode("7?"),
        response_ids=answer,
        trained=(True,) * len(answer),
        reward=1.0,
        group="train/0",
        trajectory=f"train/0#{number}",
        policy_version=2,
        step_ends=(2, 4),
    )


def test_an_episodes_file_has_a_column_for_each_field_that_has_data_and_the_text_of_prompts(
    tmp_path: Path,
) -> None:
    def columns() -> Any:
        with pa.ipc.open_stream(tmp_path / "episodes.arrow") as reader:
            return reader.read_all()

    row = replace(make_episode(1), domain="sums", step_rewards=(0.5, 0.5), step_errors=(0.1, math.inf))
    row = replace(row, continuations={0: (1.0, None), 3: ()}, critic_prompt_ids=mdp.encode("7a?"))
    row = replace(row, teacher_prompt_ids=mdp.encode("7b?"))
    write_episodes(tmp_path / "episodes.arrow", [make_episode(), row], mdp.CODEC)
    assert sorted(columns().column_names) == sorted([*(field.name for field in fields(Episode)), "prompt"])
    assert columns().column("prompt").to_pylist() == ["7?", "7?"]
    assert read_episodes(tmp_path / "episodes.arrow") == [make_episode(), row]
    write_episodes(tmp_path / "episodes.arrow", [make_episode()])
    rare = {"domain", "step_rewards", "step_errors", "continuations", "critic_prompt_ids"}
    rare.add("teacher_prompt_ids")
    assert not rare & set(columns().column_names)


def without_column(path: Path, name: str) -> None:
    """Rewrites the file as it was before that column existed."""
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all().drop_columns(name)
    metadata = {key: value for key, value in table.schema.metadata.items() if key != SEALED_MARK}
    table = table.replace_schema_metadata(metadata)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def test_files_of_versions_without_a_separate_score_are_read(tmp_path: Path) -> None:
    write_episodes(tmp_path / "episodes.arrow", [replace(make_episode(), reward=0.5, score=1.0)])
    without_column(tmp_path / "episodes.arrow", "score")
    assert read_episodes(tmp_path / "episodes.arrow") == [replace(make_episode(), reward=0.5, score=0.5)]
    (answer, *_) = mdp.all_trajectories()
    write_trajectories(tmp_path / "trajectories.arrow", [replace(answer, bonus=0.25)])
    without_column(tmp_path / "trajectories.arrow", "bonus")
    assert read_trajectories(tmp_path / "trajectories.arrow") == [answer]


def test_more_rows_than_a_batch_come_back_in_order_and_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.arrow"
    rows = [make_episode(number) for number in range(2100)]
    write_episodes(path, rows)
    assert read_episodes(path) == rows
    complete = path.read_bytes()
    # The last 8 bytes only mark the end of the stream: no row is missing without them.
    for length in (
        0,
        10,
        1000,
        len(complete) // 3,
        len(complete) // 2,
        len(complete) - 200,
        len(complete) - 9,
    ):
        path.write_bytes(complete[:length])
        with pytest.raises(ValueError, match=r"episodes\.arrow"):
            read_episodes(path)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "trajectories.arrow", mdp.all_trajectories())
    with pytest.raises(ValueError, match=r"trajectories\.arrow holds no episodes"):
        read_episodes(tmp_path / "trajectories.arrow")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.arrow"
    (answer, *_) = mdp.all_trajectories()
    write_trajectories(path, [answer])
    for data in ({"handle": object()}, {"map": {1: 2}}, {"tuple()": 1}):
        problem = Problem(id="train/9", prompt="9?", gold="", data=data)
        with pytest.raises(ValueError, match="'train/9' has data that can't be stored"):
            write_trajectories(path, [mdp.trajectory(plain(answer.response_ids), problem)])
    assert read_trajectories(path) == [answer]
    assert [file.name for file in tmp_path.iterdir()] == ["trajectories.arrow"]
