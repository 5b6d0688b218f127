"""The command `treetune serve_credit` as a process, with the commands and the client that its page shows.

Promises that these tests hold:

* The page's request has the answer that the page shows. The client in examples prints its advantages.
* The service makes a key that only its owner can read, and ends with exit code 0 on SIGTERM and on Ctrl-C.
* A command line that can't be served ends with a message.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.documents import ROOT, Document
from treetune.cli.arguments import parse
from treetune.cluster.commands import serve_credit
from treetune.exceptions import ConfigError

PAGE = Document(ROOT / "docs" / "credit_for_other_trainers.md")
CLIENT = ROOT / "examples" / "other_trainers" / "over_http.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the service on a free port, and yield its process and its address."""
    command = [sys.executable, "-m", "treetune.main", "serve_credit", "--port", "0", *options]
    process = subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("http://"):
                break
        else:
            pytest.fail("".join(lines))
        yield process, line.strip().removesuffix("/advantages")
    finally:
        process.kill()
        process.wait()


def run_command(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_request_and_the_client_get_advantages_and_the_service_ends_cleanly(tmp_path: Path) -> None:
    curl_command = next(text for info, text in PAGE.fences if info == "bash" and text.startswith("curl"))
    beginning = next(text for info, text in PAGE.fences if info == 'text title="response"').strip()
    body = next(text for info, text in PAGE.fences if info == 'json title="request.json"')
    (tmp_path / "request.json").write_text(body)
    with serving(tmp_path, "--key-file", "credit.key") as (process, address):
        assert stat.S_IMODE((tmp_path / "credit.key").stat().st_mode) == 0o600
        curl_command = curl_command.replace("http://127.0.0.1:8200", address).replace("curl ", "curl -s ")
        assert run_command(["bash", "-c", curl_command], tmp_path).startswith(beginning)
        printed = run_command([sys.executable, "-S", str(CLIENT), address, "credit.key"], tmp_path)
        assert printed == "[[0.5, 0.5, 0.5], [-0.5, -0.5]]\n"
        (tmp_path / "wrong.key").write_text("wrong")
        refused = subprocess.run(
            [sys.executable, "-S", str(CLIENT), address, "wrong.key"],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "RuntimeError: HTTP 401: " in refused.stderr
        assert "send the service's key in the header" in refused.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_the_service_ends_cleanly_on_ctrl_c_and_takes_its_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TREETUNE_CREDIT_KEY", "a key of the environment")
    with serving(tmp_path) as (process, address):
        (tmp_path / "key").write_text("a key of the environment\n")
        run_command([sys.executable, "-S", str(CLIENT), address, "key"], tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"give --key-file FILE.*TREETUNE_CREDIT_KEY"),
        (["--key-file", "open.key"], r"--key-file, open\.key, can be read by others: chmod 600"),
        (["--key-file", "k", "--grader", "nothing"], "grader"),
        (["--key-file", "k", "--grader", "{type:"], "--grader"),
        (["--key-file", "k", "--engine", "a", "--engine", "b"], "--engine is given several times"),
        (
            ["--key-file", "k", "--engine", "no_folder", "--tokenizer", "/no/folder"],
            "tokenizer .* can.t be loaded",
        ),
        (["--key-file", "k", "--engine", "http://a:1"], "give --tokenizer"),
        (["--key-file", "k", "--host", "192.0.2.1"], r"is not available on 192\.0\.2\.1"),
        (["--key-file", "k", "--credits", "rloo,nothing"], "there is no credit 'nothing'"),
    ],
)
def test_a_command_line_that_cannot_be_served_is_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREETUNE_CREDIT_KEY", raising=False)
    (tmp_path / "open.key").write_text("x")
    (tmp_path / "open.key").chmod(0o644)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises((ValueError, ConfigError, OSError), match=message):
            serve_credit(parse(["serve_credit", *options]))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
