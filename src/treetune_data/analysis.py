"""Finds the independent parts of a solution: one conversation of six tasks about its numbered lines."""

from __future__ import annotations

from collections.abc import Sequence

from treetune_data import prompts
from treetune_data.asking import Questions, Unreadable
from treetune_data.blocks import Block
from treetune_data.reading import Lines, json_list, ranges
from treetune_domains.endpoints.settings import Message


async def independent_parts(
    questions: Questions, problem: str, lines: Sequence[str]
) -> tuple[list[list[Lines]], list[Message]]:
    """Groups of threads by their lines, as the model names them, and the conversation that led there."""
    numbered = "\n".join(f"{number}| {line}" for number, line in enumerate(lines, start=1))
    conversation: list[Message] = []
    for step, task in (
        ("steps", prompts.STEPS.format(problem=problem, numbered=numbered, count=len(lines))),
        ("substeps", prompts.SUBSTEPS),
        ("groups", prompts.GROUPS),
        ("subgroups", prompts.SUBGROUPS),
    ):
        # What these say is for the model itself: it thinks aloud before it commits itself.
        _, conversation = await questions.ask(step, [*conversation, ("user", task)], str)
    return await questions.ask("ranges", [*conversation, ("user", prompts.RANGES)], ranges)


async def failed_threads(
    questions: Questions, conversation: Sequence[Message], blocks: Sequence[Block]
) -> dict[int, str]:
    """Which of the blocks (by their place) have a thread that the model itself doesn't let pass, and why."""
    shown = "\n\n".join(
        f"Group {number}, lines {block.first}-{block.last}:\n"
        + "\n".join(
            f"  thread {i}, lines {first}-{last}: {_beginning(text)}"
            for i, ((first, last), text) in enumerate(zip(block.lines, block.threads), start=1)
        )
        for number, block in enumerate(blocks, start=1)
    )
    expected = {(group, thread) for group, block in enumerate(blocks, 1) for thread in _numbers(block)}

    def read(text: str) -> dict[tuple[int, int], str]:
        verdicts: dict[tuple[int, int], bool] = {}
        notes: dict[tuple[int, int], str] = {}
        for item in json_list(text):
            place = (item.get("group"), item.get("thread")) if isinstance(item, dict) else None
            if place not in expected or place in verdicts:
                raise Unreadable(
                    f"a verdict is about no thread of the list, or about one again: {str(item)[:100]}"
                )
            if not isinstance(item.get("pass"), bool):
                raise Unreadable(
                    f"the verdict on group {place[0]}, thread {place[1]} is neither true nor false"
                )
            verdicts[place] = item["pass"]
            notes[place] = str(item.get("note", ""))[:500]
        if missing := expected - verdicts.keys():
            group, thread = min(missing)
            raise Unreadable(f"there is no verdict on group {group}, thread {thread}")
        return {place: notes[place] for place, passed in verdicts.items() if not passed}

    task: Message = ("user", prompts.CHECK.format(blocks=shown))
    failed, _ = await questions.ask("check", [*conversation, task], read)
    words: dict[int, str] = {}
    for (group, thread), note in sorted(failed.items()):
        words[group - 1] = "; ".join(filter(None, [words.get(group - 1), f"thread {thread}: {note}"]))
    return words


def _numbers(block: Block) -> range:
    return range(1, len(block.threads) + 1)


def _beginning(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= 80 else f"{first[:80]} …"
