"""A failing server is diagnosed from the end of its log.

The tests hold that the message names the error that ended the server, and not an earlier warning, and that
known errors come with a remedy. The logs in `server_logs` are real ends of vLLM's, shortened.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.engine.launch import MOST_ERROR_CHARACTERS, diagnose_log, find_ending_error

LOGS = Path(__file__).parent / "server_logs"


@pytest.mark.parametrize(
    ("log", "error", "remedy"),
    [
        ("context_too_long", "max_model_len (512) is greater than the derived", "lower context_length"),
        (
            "torn_weights",
            "SafetensorError: Error while deserializing header",
            "the files of the weights are incomplete",
        ),
        ("no_weights", "Cannot find any model weights with `/weights`", "folder has no weights"),
        ("no_memory", "requested memory for kv (100000.0 GiB)", "out of memory: lower"),
        ("unknown_argument", "unrecognized arguments: --no-such-flag", "engines.policy.extra_arguments"),
        ("small_batches", "max_num_batched_tokens (16) is smaller than", "engines.policy.extra_arguments"),
    ],
)
def test_the_error_that_ended_a_server_is_named_and_not_its_warnings(
    log: str, error: str, remedy: str
) -> None:
    text = (LOGS / f"{log}.log").read_text()
    assert error in find_ending_error(text)
    assert remedy in diagnose_log(text)
    assert "open files" not in diagnose_log(text)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("OSError: [Errno 24] Too many open files: '/weights'", "raise `ulimit -n`"),
        # Too little memory for the cache and memory that others use have opposite remedies.
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "lower gpu_memory"),
        ("ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less", "lower gpu_memory"),
        ("ValueError: No available memory for the cache blocks.", "raise gpu_memory_utilization"),
        (
            "ValueError: 8 GiB KV cache, which is larger than the available KV cache memory",
            "raise gpu_memory",
        ),
    ],
)
def test_known_errors_have_a_remedy(error: str, remedy: str) -> None:
    assert remedy in diagnose_log(f"(EngineCore pid=7) ERROR 11-22 08:02:38 [core.py:1510] {error}\n")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a.b.StrangeError: something\n  line 3\n", " It ended with 'a.b.StrangeError: something line 3'."),
        ("INFO all is well\nWARNING OSError: [Errno 24] Too many open files\n", ""),
    ],
)
def test_an_unknown_error_is_quoted_and_a_log_without_error_gives_no_diagnosis(
    log: str, expected: str
) -> None:
    assert diagnose_log(log) == expected


def test_long_errors_are_cut() -> None:
    assert len(find_ending_error(f"RuntimeError: {'x' * 5000}")) == MOST_ERROR_CHARACTERS + 1
