"""A judge behind two servers that are alike: each is told of its own failures alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from treetune.inference.client import Address
from treetune.inference.settings import VllmSettings
from treetune_domains import judge_server
from treetune_domains.graders.judge import JudgeModel


class Served:
    """A server that is there when it is told to be."""

    def __init__(self, number: int) -> None:
        self.number, self.epoch = number, 0
        self.told: list[str] = []

    def come(self) -> None:
        self.epoch += 1

    def now(self) -> Address | None:
        found = Address(f"http://server-{self.number}", self.epoch, f"key {self.epoch}")
        return found if self.epoch else None

    def ready(self) -> Address:
        raise AssertionError("nobody waits for one of them alone")

    def failed(self, address: Address, reason: str) -> None:
        self.told.append(reason)


def test_the_server_that_failed_is_told_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Served(0), Served(1)]
    judge = judge_server.served(JudgeModel(model="a judge", server=VllmSettings(replicas=2)), servers)  # type: ignore[arg-type]
    monkeypatch.setattr(judge_server, "time", SimpleNamespace(sleep=lambda seconds: servers[1].come()))
    first = judge.place()
    assert first.url == "http://server-1/v1", "who comes first is asked"
    servers[0].come()
    assert {judge.place().url for _ in range(2)} == {"http://server-0/v1", "http://server-1/v1"}
    judge.failed(first, "it hangs")
    assert [one.told for one in servers] == [[], ["it hangs"]]
    servers[1].come()
    judge.failed(first, "it hangs")
    assert [one.told for one in servers] == [[], ["it hangs"]], "who was started anew is another"
