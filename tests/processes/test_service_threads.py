"""Threads for services: so many calls may hang, and no more are made."""

from __future__ import annotations

import threading
import time
from typing import Any

from treetune.processes.pool import _STUCK_PER_THREAD, ServantCall, ServiceThreads


class Hanging:
    """A servant whose calls don't return before `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.begun: list[int] = []

    def answer(self, number: int) -> None:
        self.begun.append(number)
        self.over.wait(60)


def test_while_too_many_calls_hang_no_other_one_is_made() -> None:
    servant: Any = Hanging()
    results: dict[int, str] = {}
    all_settled = threading.Event()

    def settle(call: ServantCall, result: str) -> None:
        results[call.number] = result
        if len(results) == 200:
            all_settled.set()

    threads = ServiceThreads(servant, 1, settle, lambda outcome, message, seconds: message)
    try:
        for number in range(200):
            threads.add(ServantCall(number, servant=0, arguments=(number,), deadline_s=0.01))
            if number % 10 == 0:
                time.sleep(0.02)  # until the earlier calls are given up
        assert all_settled.wait(60)
        assert len(servant.begun) == _STUCK_PER_THREAD
        assert results[199] == f"not asked: {_STUCK_PER_THREAD} earlier calls have not returned"
    finally:
        servant.over.set()
        threads.close()
