"""What a server's log says to a person: its end, and the likely cause of a failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

LOG_LINES = 25


def last_lines(log: Path) -> str:
    """The end of a log for an error message, and where the rest is."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return f"(its log {log} can't be read: {error})"
    return f"The end of its log, {log}:\n" + "\n".join(f"  | {line}" for line in lines)


_CAUSES: list[tuple[Callable[[str], bool], str]] = [
    (
        lambda text: (
            "out of memory" in text or "cannot allocate memory" in text or "no available memory" in text
        ),
        "out of memory: lower gpu_memory_utilization, kv_cache_gib, max_num_seqs or context_length",
    ),
    (
        lambda text: "no space left on device" in text or "bus error" in text,
        "no room in /dev/shm (in a container: start it with a larger --shm-size)",
    ),
    (lambda text: "address already in use" in text, "every port that was tried was taken"),
    (lambda text: "incomplete metadata" in text or "safetensor" in text, "the weights are not whole"),
    (lambda text: "unsupported cpu attention" in text, "on a CPU the head dimension must be at least 32"),
    (lambda text: "no module named 'vllm'" in text, "vLLM is not installed here: run the set-up"),
    (lambda text: "too many open files" in text, "too few open files allowed: raise `ulimit -n`"),
]


def likely_cause(log_text: str) -> str:
    """What the log points at, as a sentence to add; empty if nothing known."""
    text = log_text.lower()
    for matches, cause in _CAUSES:
        if matches(text):
            return f" Likely: {cause}."
    return ""
