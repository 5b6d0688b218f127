"""Answers of other people's runs, as rows like those of an evaluation: JSON lines with what was asked, what
was answered and what that earned, and Inspect's logs.

Read are verl's dumps (`trainer.rollout_data_dir`, `validation_data_dir`: input, output, gts, score, step),
rollouts of verifiers and prime-rl (prompt, completion, answer, reward, example_id; traces), slime's dumps
(`--save-debug-rollout-data`, .pt: prompt, response, label, reward, group_index), Inspect's logs (.json and
.eval), and whatever else names its fields like that.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treetune_view.store.folders import digest, stat_of

ENDINGS = (".jsonl", ".eval", ".json", ".pt")

NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("response", "completion", "output", "generation"),
    "reward": ("score", "reward", "scores"),
    "prompt": ("prompt", "input", "question", "problem"),
    "gold": ("gts", "gold", "ground_truth", "answer", "target", "label"),
    "problem": ("example_id", "problem_id", "group_index", "id"),
}
"""By what a row has here, the names that others give it; the first that is there is taken."""

RIGHT = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, True: 1.0, False: 0.0}
"""Inspect's grades, as it turns them into numbers: correct, partially so, incorrect, no answer."""

HEAD_BYTES = 1_000_000
"""The beginning of a file, which says whether it holds answers."""
ZSTANDARD, LENGTHS_AT = 93, 26
"""In a zip archive: packing that Python reads from 3.14 on; where a member's head has lengths of names."""
LARGEST_SAMPLE_BYTES = 200_000_000
"""Of a log of Inspect: what unpacks to more is no sample."""

UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, NotImplementedError,
    zipfile.BadZipFile,
)  # fmt: skip
"""What files raise that are none, or of another kind."""


def common_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a row with the names of an evaluation's line, but for the sample; None for what is no
    answer."""
    if not isinstance(row, Mapping):
        return None
    if row.get("traces"):  # an episode of verifiers 0.4, whose first agent's answer counts
        trace, task = row["traces"][0], row["task"]
        messages = [node["message"] for node in trace["nodes"]]
        asked = next(place for place, node in enumerate(trace["nodes"]) if node["sampled"])
        scores = {name: one["score"] for name, one in trace["rewards"].items() if one}
        reward = sum(scores[name] * trace["rewards"][name]["weight"] for name in scores)
        own = {"prompt": messages[:asked], "completion": messages[asked:], "reward": reward}
        row = scores | own | {"id": task.get("key"), "answer": task["data"].get("answer")}
    found = {own: next((row[one] for one in names if one in row), None) for own, names in NAMES.items()}
    text, reward = found["text"], found["reward"]
    said: Mapping[str, Any] = {}
    if isinstance(text, Mapping):  # Inspect's output: its choices' messages
        text = [one.get("message", {}) for one in text.get("choices", ())]
    if isinstance(reward, Mapping):  # Inspect's scores by their scorer, of which the first counts
        said = next((one for one in reward.values() if isinstance(one, Mapping)), {})
        value = said.get("value", next(iter(reward.values()), None))  # slime's are numbers by their names
        reward = RIGHT.get(value, value) if _is_plain(value) else None
    if not isinstance(reward, int | float) or text is None or found["prompt"] is None:
        return None
    prompt, gold = _written(found["prompt"]), found["gold"]
    numbers = {
        name: float(x)
        for name, x in row.items()
        if isinstance(x, int | float) and name not in NAMES["reward"]
    }
    given = found["problem"] if _is_plain(found["problem"]) else None
    return {
        "problem": str(given) if given is not None else digest(prompt)[:8],
        "prompt": prompt,
        "text": _written(text),
        "gold": gold if gold is None else _written(gold),
        "reward": float(reward),
        "outcome": "ok",
        "extracted": None if said.get("answer") is None else str(said["answer"]),
        "message": str(said.get("explanation") or ""),
        "numbers": numbers,
    }


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _written(value: Any) -> str:
    """Writes a text, a conversation (its roles where it has more than one message), or anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(one, Mapping) and "content" in one for one in value):
        return json.dumps(value, ensure_ascii=False)
    parts = []
    for one in value:
        content = one["content"]
        if isinstance(content, list):  # parts of a message
            content = "\n".join(str(part.get("text", part)) for part in content if isinstance(part, Mapping))
        content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        parts.append(f"{one.get('role', '')}: {content}" if len(value) > 1 else content)
    return "\n\n".join(parts)


def rows_in(path: Path, *, may_be_torn: bool = False) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the rows of a file, each with its place: the byte where its line begins, or its number in a log.
    Raises ValueError for one that can't be read; the end of one that `may_be_torn` is being written."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            place = 0
            for line in file:
                if may_be_torn and not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
                    return
                if line.strip():
                    yield place, json.loads(line)
                place += len(line)
    elif path.suffix == ".eval":
        import pyarrow as pa

        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            names = sorted(name for name in archive.namelist() if re.fullmatch(r"samples/[^/]+\.json", name))
            for place, name in enumerate(names):
                about = archive.getinfo(name)
                if about.file_size > LARGEST_SAMPLE_BYTES:
                    raise ValueError(f"{name} unpacks to more than {LARGEST_SAMPLE_BYTES:,} bytes")
                if about.compress_type == ZSTANDARD:
                    file.seek(about.header_offset + LENGTHS_AT)
                    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # of name, extra field
                    text = pa.decompress(file.read(about.compress_size), about.file_size, "zstd", True)
                else:
                    text = archive.read(name)
                yield place, json.loads(text)
    elif path.suffix == ".pt":
        try:
            import torch

            # Numbers, texts and tensors alone: whatever else a pickle asks for is refused.
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (ImportError, pickle.UnpicklingError, RuntimeError) as error:
            why = [*re.findall(r"GLOBAL (\S+)", str(error)), *str(error).splitlines()][0]
            raise ValueError(
                f"{path} is read by torch, as numbers, texts and tensors alone: {why}"
            ) from error
        yield from enumerate(loaded["samples"])
    else:
        yield from enumerate(json.loads(path.read_bytes())["samples"])


def answers_in(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the answers of a file as lines of an evaluation, with their places; samples of a problem are
    numbered as they come."""
    seen: Counter[str] = Counter()
    for place, row in rows_in(path, may_be_torn=True):
        if (own := common_row(row)) is not None:
            yield place, own | {"sample": seen[own["problem"]]}
            seen[own["problem"]] += 1


def answer_at(path: Path, place: int) -> Mapping[str, Any]:
    """Returns one of them."""
    if path.suffix != ".jsonl":
        return _log(path, stat_of(path))[place]
    with path.open("rb") as file:
        file.seek(place)
        return common_row(json.loads(file.readline())) or {}


_log = functools.lru_cache(maxsize=2)(lambda path, stat: dict(answers_in(path)))


def holds_answers(path: Path) -> bool:
    """Returns whether the first row of a file is an answer."""
    return path.suffix in ENDINGS and _holds_answers(path, stat_of(path))


@functools.lru_cache(maxsize=4096)
def _holds_answers(path: Path, stat: object) -> bool:
    try:
        if path.suffix == ".pt":  # a checkpoint may be as large as it likes: it is not unpickled for this
            with zipfile.ZipFile(path) as archive:
                [name] = [one for one in archive.namelist() if one.endswith("/data.pkl")]
                with archive.open(name) as pickled:
                    head = pickled.read(HEAD_BYTES)
            return all(word in head for word in (b"rollout_id", b"samples", b"response"))
        with path.open("rb") as file:
            head = file.readline(HEAD_BYTES) if path.suffix == ".jsonl" else file.read(HEAD_BYTES)
        if path.suffix == ".json":  # all in one: read when it is asked for
            return b'"version"' in head and b'"eval"' in head
        first = json.loads(head) if path.suffix == ".jsonl" else next(iter(rows_in(path)))[1]
        return common_row(first) is not None
    except (*UNREADABLE, StopIteration):
        return False
