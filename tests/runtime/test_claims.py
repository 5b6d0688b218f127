"""One process at a time measures a set, and a dead one's work is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treetune.runtime import claims as module
from treetune.runtime.claims import Claim, Claims

ROOT = Path(__file__).parents[2]


def claimed_elsewhere(folder: Path, number: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{number:04d}"
    file.write_text(json.dumps({"machine": "another", "host": "node7", "pid": 12, "started": "1"}))
    return file


def taken(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_what_one_holds_another_does_not_get_until_it_is_released(tmp_path: Path) -> None:
    first = taken(Claims().take(tmp_path / "set"))
    assert Claims().take(tmp_path / "set") is None
    assert f"process {os.getpid()} on" in Claims().holder(tmp_path / "set")
    assert taken(Claims().take(tmp_path / "another set")).number == 0
    first.release()
    first.release()
    assert taken(Claims().take(tmp_path / "set")).number == 1


def test_of_many_who_take_at_once_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            claims = [claim for claim in pool.map(lambda _: Claims().take(tmp_path), range(8)) if claim]
        assert [claim.number for claim in claims] == [round_]
        claims[0].release()


def test_a_holder_on_another_machine_is_dead_when_its_file_has_not_changed_for_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    claims = Claims(lease_s=10, beat_s=1)
    file = claimed_elsewhere(tmp_path / "set")
    os.utime(file, (5, 5))  # that machine's clock is far behind
    assert claims.take(tmp_path / "set") is None
    assert claims.holder(tmp_path / "set") == "process 12 on node7"
    now[0] += 9
    assert claims.take(tmp_path / "set") is None
    os.utime(file, (6, 6))
    for _ in range(2):
        now[0] += 9
        assert claims.take(tmp_path / "set") is None, "it has beaten since"
        now[0] += 1
    now[0] += 1
    assert taken(claims.take(tmp_path / "set")).number == 1


def test_a_claim_that_its_maker_never_wrote_to_ends_with_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    claims = Claims(lease_s=10, beat_s=1)
    (tmp_path / "0003").touch()
    assert claims.take(tmp_path) is None
    now[0] += 11
    assert taken(claims.take(tmp_path)).number == 4


def test_a_holder_shows_signs_of_life_and_learns_that_it_was_taken_over(tmp_path: Path) -> None:
    claim = taken(Claims(beat_s=0.01).take(tmp_path))
    os.utime(claim.file, (5, 5))
    assert until(lambda: claim.file.stat().st_mtime > 5)
    assert not claim.lost()
    claimed_elsewhere(tmp_path, number=1)
    assert claim.lost()
    claim.release()
    assert Claims().take(tmp_path) is None, "a late release frees nothing of its successor's"


def test_a_killed_holder_on_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom treetune.runtime.claims import Claims\n"
        "claim = Claims().take(Path(sys.argv[1]))\nprint(claim.number, flush=True)\nsys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        assert Claims().take(tmp_path) is None
    finally:
        holder.kill()
        holder.wait()
    assert taken(Claims().take(tmp_path)).number == 1
