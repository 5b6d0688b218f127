"""Starts a plain vLLM server by hand, as `vllm serve` does, and a small round-robin proxy."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from treetune.engine.launch import SERVER_PROGRAM, find_free_port, is_listening

KEY = "a-key-of-the-test"
START_S = 300.0


@dataclass
class PlainServerProcess:
    """A server process that the test has started."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kills the server and its engine core, which have a process group of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_plain_server(
    model: Path,
    log: Path,
    *arguments: str,
    port: int | None = None,
    dev_mode: bool = True,
) -> PlainServerProcess:
    """Starts ``vllm serve`` on a CPU with one thread, and returns at once."""
    port = port or find_free_port()
    environment = {
        variable: value for variable, value in os.environ.items() if not variable.startswith("VLLM_")
    }
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_API_KEY": KEY,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    if dev_mode:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    command = [sys.executable, "-m", SERVER_PROGRAM, "--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--no-enable-chunked-prefill", "--max-num-seqs", "64", *arguments]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    return PlainServerProcess(port, process, log)


def wait_for(server: PlainServerProcess) -> None:
    """Returns when the server listens. Fails if it ends before."""
    deadline = time.monotonic() + START_S
    while not is_listening(server.port):
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.2)


@contextmanager
def round_robin_proxy(urls: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """A reverse proxy that sends each request to the next server.

    Yields:
        Its address, and the list of the servers that were asked for samples, which grows.
    """
    turns = itertools.cycle(urls)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *anything: object) -> None:
            pass

        def do_GET(self) -> None:
            self.forward(b"")

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def forward(self, body: bytes) -> None:
            url = next(turns)
            if "generate" in self.path or "completions" in self.path:
                asked.append(url)
            connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                status, content = reply.status, reply.read()
            except OSError:
                status, content = 502, b"bad gateway"
            finally:
                connection.close()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 128
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", asked
    finally:
        proxy.shutdown()
        proxy.server_close()
