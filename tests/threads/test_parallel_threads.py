"""Answers that fork into threads and join them.

These tests promise:

* Each call sees what the text before it says, and no sibling; every sampled token is in the answer once.
* An answer depends on its seeds alone, in any order of calls and after an interruption.
* Limits of tokens, threads, blocks and depth hold whatever the policy writes, and each event is counted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.columns import plain
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.threads import CODEC, TAG_IDS, context, decode, encode
from tests.support.trees import answered
from treetune.domains.mixture import Domain, Mixture
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import Request
from treetune.models.sources import TinyModel
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_trajectories, write_trajectories
from treetune.tasks.multiplication import Multiplication
from treetune.threads.fork_join import EVENTS
from treetune.threads.format import text_segments
from treetune.threads.numbers import count_threads
from treetune.threads.parallel_threads import ParallelThreads
from treetune.vocabulary import Problem, Trajectory, concatenate, sees

PROBLEM = Problem(id="train/0", prompt="?", gold="")
TWO_OUTLINES = "<Parallel><Outlines><Outline>1:a</Outline><Outline>2:b</Outline></Outlines>"


def rollout(**settings: Any) -> ParallelThreads:
    return ParallelThreads(**{"samples": 1, "max_tokens": 200, **settings})


def context_with(engine: Engine) -> RolloutContext:
    return context(engine=engine, context_length=4096)


def grow(script: Script, order: int = 0, **settings: Any) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(script, order)
    (trajectory,), _ = answered(rollout(**settings).run(context_with(engine), [PROBLEM]))
    return trajectory, engine


def events(trajectory: Trajectory) -> dict[str, float]:
    """Returns how often each event happened while the answer grew, without those that did not."""
    return {event: times for event in EVENTS if (times := trajectory.numbers[f"threads/{event}"])}


def script_by_ending(**after: str) -> Script:
    """Returns a script that gives the text of the longest ending that fits; `start` fits the prompt."""
    text_by_ending = {"?" if ending == "start" else ending: text for ending, text in after.items()}

    def script(before: str, request: Request) -> str:
        return text_by_ending[max((ending for ending in text_by_ending if before.endswith(ending)), key=len)]

    return script


def forking_script(
    *outlines: object, thread: str = "a\n</Thread>", end: str = "</Parallel>a$", **after: str
) -> Script:
    """Returns a script that forks into threads of these outlines, which all write the same text."""
    listed = "".join(f"<Outline>{outline}:a</Outline>" for outline in outlines)
    block = f"<Parallel><Outlines>{listed}</Outlines>"
    return script_by_ending(**{"start": block, ":": thread, "</Thread>\n": end, **after})


TWO_THREADS_SCRIPT = forking_script(
    start=f"b{TWO_OUTLINES}", **{"1:": "aa\n</Thread>", "2:": "bbb;a\n</Thread>"}
)
TWO_THREADS_TEXT = f"b{TWO_OUTLINES}\n<Thread>\n1:aa\n</Thread><Thread>\n2:bbb;a\n</Thread>\n</Parallel>a"


def test_a_thread_sees_everything_before_it_and_its_header_but_no_sibling() -> None:
    trajectory, engine = grow(TWO_THREADS_SCRIPT)
    prompts = {decode(request.prompt_ids) for request in engine.requests}
    fork = f"?b{TWO_OUTLINES}\n<Thread>\n"
    assert prompts == {"?", f"{fork}1:", f"{fork}2:", "?" + TWO_THREADS_TEXT.removesuffix("</Parallel>a")}
    assert trajectory.text == TWO_THREADS_TEXT
    assert (trajectory.finish_reason, events(trajectory), trajectory.grade.reward) == ("stop", {}, 1.0)


def test_the_text_that_each_call_saw_follows_from_the_segments() -> None:
    trajectory, engine = grow(TWO_THREADS_SCRIPT)
    sampled = {prompt_ids: ids for (prompt_ids, _), ids in engine.answered.items()}
    for number, segment in enumerate(trajectory.segments):
        if segment.origin == "sampled":
            before = [
                other_segment
                for other_segment in trajectory.segments[:number]
                if sees(segment.branch, other_segment.branch)
            ]
            prompt = plain(
                concatenate([trajectory.prompt_ids, *(other_segment.token_ids for other_segment in before)])
            )
            assert sampled.pop(prompt) == plain(segment.token_ids)
            assert segment.logprobs is not None and segment.seconds == 1.0
    assert not sampled, "each call is in the answer once"


def test_an_answer_has_the_segments_of_a_demonstration_with_its_text() -> None:
    trajectory, _ = grow(TWO_THREADS_SCRIPT)
    pieces = [(piece.text, piece.injected, piece.branch) for piece in text_segments(TWO_THREADS_TEXT)]
    assert pieces == [
        (decode(segment.token_ids), segment.origin == "injected", segment.branch)
        for segment in trajectory.segments
    ]


@pytest.mark.parametrize("order", range(6))
def test_the_answer_does_not_depend_on_the_order_in_which_calls_come_back(order: int) -> None:
    seeds = sorted(request.seed for request in grow(TWO_THREADS_SCRIPT)[1].requests)
    trajectory, engine = grow(TWO_THREADS_SCRIPT, order)
    assert trajectory == grow(TWO_THREADS_SCRIPT)[0]
    assert sorted(request.seed for request in engine.requests) == seeds
    assert len(set(seeds)) == len(seeds), "no two calls share their draws"


def test_an_answer_without_outlines_is_a_single_sample() -> None:
    trajectory, engine = grow(script_by_ending(start="a;ba$"))
    assert len(engine.requests) == 1
    assert trajectory.step_ends == (2, 5), "its steps are the task's"
    assert not events(trajectory)


def test_the_join_opens_a_conclusion_if_conclusions_are_on() -> None:
    script = forking_script(
        start=TWO_OUTLINES, **{"2:": "b\n</Thread>", "<Conclusion>\n": "a</Conclusion>\n</Parallel>a$"}
    )
    trajectory, _ = grow(script, conclusion=True)
    assert trajectory.text.endswith("2:b\n</Thread>\n<Conclusion>\na</Conclusion>\n</Parallel>a")


def test_two_blocks_follow_each_other_and_the_second_sees_the_first_joined() -> None:
    def script(before: str, request: Request) -> str:
        if before.endswith("</Thread>\n"):
            return f"</Parallel>{TWO_OUTLINES}" if before.count("<Parallel>") == 1 else "</Parallel>aa$"
        return TWO_OUTLINES if before == "?" else f"{'b' * before.count('<Parallel>')}\n</Thread>"

    trajectory, engine = grow(script)
    assert count_threads(trajectory.response_ids, TAG_IDS).parallel_count == 2
    second = [
        decode(request.prompt_ids)
        for request in engine.requests
        if decode(request.prompt_ids).count("<Parallel>") == 2
    ]
    assert sum("1:b\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>" in text for text in second) == 3
    assert {segment.branch for segment in trajectory.segments} == {
        (),
        ((0, 0),),
        ((0, 1),),
        ((1, 0),),
        ((1, 1),),
    }


def test_threads_may_open_threads_up_to_the_depth() -> None:
    def script(before: str, request: Request) -> str:
        if before.endswith("</Thread>\n"):
            return "</Parallel>a$" if before.startswith(outer) else "</Parallel>b\n</Thread>"
        return (
            TWO_OUTLINES
            if before.endswith("?") or (before.endswith("\n1:") and before.count("<P") == 1)
            else "a\n</Thread>"
        )

    inside = f"{TWO_OUTLINES}\n<Thread>\n1:a\n</Thread><Thread>\n2:a\n</Thread>\n</Parallel>b"
    outer = f"?{TWO_OUTLINES}\n<Thread>\n1:{inside}\n</Thread>"
    trajectory, engine = grow(script, max_depth=2)
    assert f"?{trajectory.text}" == f"{outer}<Thread>\n2:a\n</Thread>\n</Parallel>a"
    branches = [segment.branch for segment in trajectory.segments if segment.origin == "sampled"]
    inner = ((0, 0), (0, 0)), ((0, 0), (0, 1))
    assert branches == [(), ((0, 0),), *inner, ((0, 0),), ((0, 1),), ()]
    assert any(decode(request.prompt_ids).endswith("2:a\n</Thread>\n") for request in engine.requests)

    _, engine = grow(script, max_depth=2, thread_tokens=60)
    joined_inside = inside.removesuffix("</Parallel>b")
    (request_after_join,) = (
        request for request in engine.requests if decode(request.prompt_ids).endswith(f"1:{joined_inside}")
    )
    assert request_after_join.sampling.max_tokens == 60 - len(encode(joined_inside)), (
        "what it has written counts"
    )


def test_outlines_deeper_than_the_depth_are_plain_text() -> None:
    script = forking_script(start=TWO_OUTLINES, **{"1:": f"{TWO_OUTLINES}a\n</Thread>"})
    trajectory, engine = grow(script)
    assert len(engine.requests) == 4
    assert f"1:{TWO_OUTLINES}a\n</Thread>" in trajectory.text


def test_an_end_token_inside_a_thread_ends_the_answer_after_its_siblings() -> None:
    script = script_by_ending(start=TWO_OUTLINES, **{"1:": "a$", "2:": "bb\n</Thread>"})
    for order in range(4):
        trajectory, engine = grow(script, order)
        assert len(engine.requests) == 3, "nothing is sampled behind the join"
        assert trajectory.text.endswith("1:a\n</Thread><Thread>\n2:bb\n</Thread>\n</Parallel>")
        assert events(trajectory) == {"ended_in_thread": 1}
        assert trajectory.finish_reason == "stop"
        end = next(segment for segment in trajectory.segments if CODEC.eos_id in segment.token_ids)
        assert end.origin == "sampled" and end.branch == ((0, 0),), "it was sampled, so it is trained"


@pytest.mark.parametrize(
    ("stragglers", "joined", "counts"),
    [
        ("truncate", "1:bbbb\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>a", {"truncated": 1}),
        (
            "drop",
            "</Outlines>\n<Thread>\n2:b\n</Thread>\n</Parallel>a",
            {"dropped": 1, "dropped_tokens": 8},
        ),
        ("go_on", f"1:{'b' * 9}\n</Thread><Thread>\n2:b\n</Thread>\n</Parallel>a", {}),
    ],
)
def test_a_thread_at_its_limit_is_cut_or_dropped_or_goes_on(
    stragglers: str, joined: str, counts: dict[str, int]
) -> None:
    script = forking_script(start=TWO_OUTLINES, thread="b\n</Thread>", **{"1:": "b" * 9 + "\n</Thread>"})
    trajectory, _ = grow(script, stragglers=stragglers, thread_tokens=4)
    assert trajectory.text.endswith(joined)
    assert (events(trajectory), trajectory.finish_reason) == (counts, "stop")


def test_threads_share_the_remaining_tokens_evenly_and_never_exceed_them() -> None:
    script = forking_script(start=TWO_OUTLINES, thread="b" * 300, end="</Parallel>" + "a" * 300)
    for budget in range(20, 80):
        for stragglers in ("truncate", "go_on"):
            trajectory, engine = grow(script, max_tokens=budget, stragglers=stragglers)
            assert len(trajectory.response_ids) <= budget
            assert trajectory.finish_reason == "length"
            thread_requests = [
                request for request in engine.requests if decode(request.prompt_ids).endswith(":")
            ]
            assert len({request.sampling.max_tokens for request in thread_requests}) <= 1, "shared alike"
            if thread_requests:
                assert trajectory.text.count("</Thread>") == 2
                assert trajectory.text.count("</Parallel>") == 1


@pytest.mark.parametrize(
    "text", ["<Parallel><Outlines></Outlines>", "a</Outlines>", "<Outline>a</Outline></Outlines>"]
)
def test_a_block_without_a_readable_outline_ends_the_answer_or_is_text_if_so_configured(text: str) -> None:
    def script(before: str, request: Request) -> str:
        return text if before == "?" else "aa$"

    trajectory, engine = grow(script)
    assert (len(engine.requests), trajectory.text, events(trajectory)) == (1, text, {"malformed": 1})
    trajectory, engine = grow(script, malformed="go_on")
    assert (len(engine.requests), trajectory.text, events(trajectory)) == (2, f"{text}aa", {"malformed": 1})
    assert trajectory.finish_reason == "stop"


def test_two_outlines_of_the_same_number_open_one_thread() -> None:
    trajectory, _ = grow(forking_script(2, 1, 2, "1.1", 1))
    assert re.findall(r"<Thread>\n([0-9.]+):", trajectory.text) == ["2", "1", "1.1"]
    assert events(trajectory) == {"duplicate_outlines": 2}


def test_outlines_beyond_the_cap_open_no_thread_and_are_counted() -> None:
    trajectory, engine = grow(forking_script(*range(1, 8)), max_threads=5)
    assert len(engine.requests) == 7
    assert events(trajectory) == {"threads_over_cap": 2}


def test_an_answer_that_opens_block_after_block_ends_at_the_cap() -> None:
    def script(before: str, request: Request) -> str:
        if before.endswith(":"):
            return "a\n</Thread>"
        return TWO_OUTLINES if before == "?" else f"</Parallel>{TWO_OUTLINES}"

    trajectory, _ = grow(script, max_blocks=3, max_tokens=1000)
    assert count_threads(trajectory.response_ids, TAG_IDS).parallel_count == 4
    assert events(trajectory) == {"blocks_over_cap": 1}
    assert trajectory.finish_reason == "length"


def test_with_parallel_off_it_is_the_sequential_baseline() -> None:
    script = script_by_ending(start=f"{TWO_THREADS_TEXT}$")
    trajectory, engine = grow(script, parallel=False)
    assert len(engine.requests) == 1 and trajectory.text == TWO_THREADS_TEXT
    sequential_engine = ScriptedEngine(script)
    (sequential,), _ = answered(
        SingleTurn(samples=1, max_tokens=200).run(context_with(sequential_engine), [PROBLEM])
    )
    assert trajectory == sequential and engine.requests == sequential_engine.requests


def test_fifty_threads_are_joined_in_the_order_of_their_outlines() -> None:
    trajectory, engine = grow(
        forking_script(*range(1, 51), thread="aab\n</Thread>"), order=3, max_tokens=2000
    )
    assert len(engine.requests) == 52
    assert re.findall(r"<Thread>\n(\d+):", trajectory.text) == [str(n) for n in range(1, 51)]


def test_an_interrupted_rollout_goes_on_where_it_was_and_samples_no_call_twice(tmp_path: Path) -> None:
    problems = [replace(PROBLEM, id=f"train/{i}") for i in range(5)]

    class Broken(ScriptedEngine):
        def _completion(self, request: Request) -> Any:
            if len(self.requests) > 20:
                raise RuntimeError("killed")
            return super()._completion(request)

    def roll_out(engine: ScriptedEngine) -> list[Trajectory]:
        journaled = JournaledEngine(engine, tmp_path / "journal.jsonl")
        return answered(rollout(samples=3).run(context_with(journaled), problems))[0]

    killed = Broken(TWO_THREADS_SCRIPT, 1)
    with pytest.raises(RuntimeError, match="killed"):
        roll_out(killed)
    resumed = ScriptedEngine(TWO_THREADS_SCRIPT, 2)
    trajectories = roll_out(resumed)
    undisturbed, _ = answered(
        rollout(samples=3).run(context_with(ScriptedEngine(TWO_THREADS_SCRIPT)), problems)
    )
    assert trajectories == undisturbed
    assert len(resumed.requests) == 15 * 4 - 20


@given(data=st.data())
@settings(max_examples=150)
def test_any_text_of_the_policy_ends_within_its_budget(data: st.DataObject) -> None:
    parts = ["<Parallel>", "<Outlines>", "<Outline>1:a</Outline>", "<Outline>2:b</Outline>", "</Outlines>"]
    parts += ["<Thread>", "\n</Thread>", "</Parallel>", "a", "b", "\n", ";", "$"]
    texts = st.lists(st.sampled_from(parts), max_size=12).map("".join)

    def script(before: str, request: Request) -> str:
        return data.draw(texts) + "$"

    budget = data.draw(st.integers(1, 120))
    trajectory, engine = grow(
        script,
        order=data.draw(st.integers(0, 99)),
        max_tokens=budget,
        max_depth=data.draw(st.integers(1, 3)),
        max_threads=data.draw(st.integers(1, 3)),
        max_blocks=data.draw(st.integers(1, 4)),
        stragglers=data.draw(st.sampled_from(["truncate", "drop", "go_on"])),
        malformed=data.draw(st.sampled_from(["end", "go_on"])),
        conclusion=data.draw(st.booleans()),
        thread_tokens=data.draw(st.none() | st.integers(1, budget - 1) if budget > 1 else st.none()),
    )
    assert len(trajectory.response_ids) <= budget
    sampled = sum(len(segment.token_ids) for segment in trajectory.segments if segment.origin == "sampled")
    all_sampled = sum(map(len, engine.answered.values()))
    assert trajectory.step_ends[-1] == len(trajectory.response_ids)
    if not events(trajectory).get("dropped"):
        assert sampled == all_sampled, "every token that was sampled is in the answer once"


def test_threads_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    trajectory = replace(grow(TWO_THREADS_SCRIPT)[0], numbers={"threads/truncated": 2.0})
    write_trajectories(tmp_path / "trajectories.arrow", [trajectory])
    (read_trajectory,) = read_trajectories(tmp_path / "trajectories.arrow")
    assert (read_trajectory, read_trajectory.numbers) == (trajectory, trajectory.numbers)
    assert [segment.seconds for segment in read_trajectory.segments] == [
        segment.seconds for segment in trajectory.segments
    ]


def test_stop_strings_of_a_mixtures_domains_are_reported_since_they_end_no_answer_with_threads() -> None:
    domains = {"sums": Domain(task=Multiplication(), stop=("#",)), "others": Domain(task=Multiplication())}
    model = TinyModel(alphabet="0123456789")
    experiment = SimpleNamespace(task=Mixture(domains=domains), model=model, context_length=4096)
    (finding,) = [finding for finding in rollout().check(experiment) if finding.level == "warning"]
    assert "['#']" in finding.what
    assert finding.key == "$.task.domains"
    sequential = rollout(parallel=False)  # samples in one go, with the domain's stop strings
    assert not [finding for finding in sequential.check(experiment) if finding.level == "warning"]
