"""Takes references to a sibling's content out of a thread: the model proposes, a strict rule applies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from treetune_data import prompts
from treetune_data.asking import Questions, Unreadable, all_of
from treetune_data.reading import CONTROL, json_list
from treetune_threads.tags import TAGS

_TAG = re.compile("|".join(re.escape(tag) for tag in TAGS))


@dataclass(frozen=True)
class Edit:
    """In `thread`, `source` gave way to `destination` because of `sibling` (both counted from 1)."""

    thread: int
    sibling: int
    source: str
    destination: str


async def rewritten(
    questions: Questions, problem: str, known: str, threads: Sequence[str]
) -> tuple[tuple[str, ...], list[Edit]]:
    """The threads' texts without references to each other, and what was changed.

    Each thread is held against every earlier one, in their order: what was written from top to bottom looks
    back. Raises Unreadable where the model's edits can't be applied.
    """

    async def rewrite(thread: int) -> tuple[str, list[Edit]]:
        text, edits = threads[thread - 1], []
        for sibling in range(1, thread):
            current = text
            asked = prompts.REFERENCES.format(
                problem=problem, known=known, hidden=threads[sibling - 1], part=current
            )

            def read(answer: str, current: str = current) -> tuple[str, list[tuple[str, str]]]:
                return _apply(current, json_list(answer))

            (text, changed), _ = await questions.ask("references", [("user", asked)], read)
            edits += [Edit(thread, sibling, source, destination) for source, destination in changed]
        return text, edits

    results = await all_of([rewrite(thread) for thread in range(1, len(threads) + 1)])
    return tuple(text for text, _ in results), [edit for _, edits in results for edit in edits]


def _apply(text: str, items: Sequence[object]) -> tuple[str, list[tuple[str, str]]]:
    edits = []
    for item in items:
        source = item.get("source") if isinstance(item, dict) else None
        destination = item.get("destination") if isinstance(item, dict) else None
        if not isinstance(source, str) or not isinstance(destination, str) or not source:
            raise Unreadable(f"a replacement is no source and destination in words: {str(item)[:100]}")
        if _TAG.search(destination):
            raise Unreadable(f"a destination holds a tag: {destination[:100]!r}")
        if set(CONTROL.findall(destination)) - set(source):
            raise Unreadable(
                f"a destination brings in a line break or another control character: {destination[:100]!r};"
                " are backslashes doubled?"
            )
        count = occurrences(text, source)
        if count != 1:
            raise Unreadable(f"a source occurs {count} times in the part and not once: {source[:100]!r}")
        text = text.replace(source, destination)
        if source != destination:
            edits.append((source, destination))
    if not text.strip():
        raise Unreadable("nothing is left of the part")
    return text.strip(), edits


def occurrences(text: str, part: str) -> int:
    """How often `part` begins in the text, also where two overlap."""
    count, at = 0, text.find(part)
    while at >= 0:
        count, at = count + 1, text.find(part, at + 1)
    return count
