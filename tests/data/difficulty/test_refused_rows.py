"""Promise of `estimate_difficulty`: it ends with a result where single rows are refused or get an empty
answer; these rows have no rate, and the command says which they are and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data import command
from tests.data.oracle import sums
from tests.support.http_replies import Written, chat, error, replying
from treetune.data.difficulty.merging import read_rates


def test_rows_that_get_no_answer_have_no_rate_and_are_told(tmp_path: Path) -> None:
    rows = sums(4)
    refused, silent, cut = (f"{number}+1=?" for number in (1, 2, 3))

    def reply(body: dict[str, Any]) -> Written:
        prompt = body["messages"][-1]["content"]
        if refused in prompt:
            return 403, error("moderation", "flagged"), {}
        if silent in prompt:
            return 200, chat(None, reasoning_content="It is #3"), {}
        return 200, chat("#1", "length" if cut in prompt else "stop"), {}

    with replying(reply) as server:
        address = {"base_url": server.base_url, "model": "m", "concurrency": 1, "retries": 0}
        work = command.Work(
            tmp_path,
            "estimate_difficulty",
            rows,
            task={"type": "rows", "routes": {"math": {"type": "final_answer", "marker": "#"}}},
            policy={"type": "endpoint", "addresses": [address]},
            answers={"samples": 2, "max_tokens": 64},
            shards=1,
            jobs={"type": "local", "at_once": 1, "poll": 0.05},
        )
        assert work.run() == 0
    rates = {rate.index: rate for rate in read_rates(work.output / "rates.parquet")}
    assert [rates[row].pass_rate for row in range(4)] == [1.0, None, None, 0.0]
    assert rates[3].unfinished == 2
    summary = json.loads((work.output / "summary.json").read_text())
    assert summary["without_answer"]["refused"]["rows"] == [1]
    assert summary["without_answer"]["empty"]["answers"] == 2
    assert (summary["unavailable"], summary["bins"]["impossible"]) == (0, 1)
    log = (work.output / "logs" / "run.log").read_text()
    assert "2 of 8 answers are refused and count in no rate (rows 1)" in log
    assert "flagged" in log
    assert "all of it is thought" in log
