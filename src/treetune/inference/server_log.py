"""What a server's log says to a person: its end, the error that ended it, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

LOG_LINES = 25
ERROR_CHARACTERS = 300


def last_lines(log: Path) -> str:
    """The end of a log for an error message, and where the rest is."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return f"(its log {log} can't be read: {error})"
    return f"The end of its log, {log}:\n" + "\n".join(f"  | {line}" for line in lines)


_LOGGED = re.compile(r"^\(\w+ pid=\d+\) (?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""What vLLM puts before each line of a traceback that it logs."""

_ERROR = re.compile(
    r"(?:Fatal Python error: .*"
    r"|[\w.-]+: error: .*"  # of the command line
    r"|[\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$"
)

_SAYS_NOTHING = ("engine core initialization failed", "see root cause above", "see stack trace")
"""Errors that stand for another process's, which is in the log before them."""


def ending_error(log_text: str) -> str:
    """The error that ended the server, or "": the last in its log that isn't about another one.

    Warnings and the lines of tracebacks are passed over: a server names many dangers that don't come true.
    """
    lines = [_LOGGED.sub("", line) for line in log_text.splitlines()]
    for number in reversed(range(len(lines))):
        if not _ERROR.match(lines[number]) or any(words in lines[number].lower() for words in _SAYS_NOTHING):
            continue
        error = lines[number]
        # A validation error's own words stand indented below it.
        for line in lines[number + 1 :]:
            if not line.startswith("  ") or line.lstrip().startswith("For further information"):
                break
            error += f" {line.strip()}"
        error = error.partition(" [type=")[0]
        return error if len(error) <= ERROR_CHARACTERS else f"{error[:ERROR_CHARACTERS]}…"
    return ""


_NO_MEMORY = ("out of memory", "cannot allocate memory", "available memory on node", "free memory on device")
_NO_CACHE = ("no available memory for the cache blocks", "available kv cache memory")

_REMEDIES: list[tuple[Callable[[str], bool], str]] = [
    (
        lambda error: "greater than the derived max_model_len" in error,
        "the model's context is shorter than the engine's: lower context_length, or take a model with a"
        " longer context",
    ),
    (
        lambda error: any(words in error for words in _NO_CACHE),
        "too little memory is left for keys and values: raise gpu_memory_utilization (on a CPU kv_cache_gib),"
        " or lower context_length",
    ),
    (
        lambda error: any(words in error for words in _NO_MEMORY),
        "out of memory: lower gpu_memory_utilization, kv_cache_gib, max_num_seqs or context_length",
    ),
    (
        lambda error: "no space left on device" in error or "bus error" in error,
        "no room in /dev/shm (a container needs --ipc=host)",
    ),
    (lambda error: "address already in use" in error, "every port that was tried was taken"),
    (lambda error: "cannot find any model weights" in error, "the model's folder holds no weights"),
    (lambda error: "incomplete metadata" in error or "safetensor" in error, "the weights are not whole"),
    (lambda error: "unsupported cpu attention" in error, "on a CPU the head dimension must be at least 32"),
    (lambda error: "no module named 'vllm'" in error, "vLLM is not installed here: run the set-up"),
    (lambda error: "too many open files" in error, "too few open files allowed: raise `ulimit -n`"),
    (
        lambda error: "unrecognized arguments" in error or "max_num_batched_tokens" in error,
        "engines.policy.extra_arguments has what this vLLM doesn't take",
    ),
]


def diagnosis(log_text: str) -> str:
    """The error that ended the server and the likely remedy, as sentences to add; empty if there is none."""
    error = ending_error(log_text)
    if not error:
        return ""
    remedy = next((words for matches, words in _REMEDIES if matches(error.lower())), None)
    return f" It ended with {error!r}." + (f" Likely: {remedy}." if remedy else "")
