"""Stands in for vLLM where a test is about processes and failures: the same routes, no model.

    python stub_server.py --port N --model FOLDER … FAULTS_FOLDER

Tokens are a function of (weights, prompt, seed), log-probs too. It has a child, as vLLM has its
engine core, that outlives it when it is killed. A file in the faults folder makes it misbehave;
`take` reads and removes it. The requests for samples are appended to ``asked.jsonl`` there.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from treetune.engine.client import SAMPLES_ROUTE, SCORES_ROUTE
from treetune.engine.key import WEIGHTS_HEADER, WEIGHTS_ROUTE, ServerDescription

FAULTS = Path(sys.argv[-1])
MODEL = Path(sys.argv[sys.argv.index("--model") + 1]) if __name__ == "__main__" else Path()
PORT = int(sys.argv[sys.argv.index("--port") + 1]) if __name__ == "__main__" else 0
CONTEXT = 64
SERVED = ServerDescription()


def sample(weights: str, prompt: list[int], seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """`max_tokens` token ids and log-probs that look random."""
    ids, logprobs = [], []
    for position in range(max_tokens):
        digest = hashlib.sha256(repr((weights, prompt, seed, position)).encode()).digest()
        ids.append(digest[0])
        logprobs.append(-(digest[1] + 1) / 64)
    return ids, logprobs


def read_weights(folder: Path) -> str:
    return (folder / "weights").read_text()


def take(fault: str) -> bool:
    """Whether this fault was ordered; it happens once for each order."""
    try:
        (FAULTS / fault).unlink()
    except FileNotFoundError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    weights = ""
    answered = 0
    met = False
    update: list[str] | None = None
    """The chunks of an update that was begun."""
    is_whole = False

    def log_message(self, *anything: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.headers.get("Authorization") != f"Bearer {os.environ['TREETUNE_SERVER_KEY']}":
            return self.answer(401, {"error": "no key"})
        if self.path.startswith(WEIGHTS_ROUTE):
            return self.answer(200, json.loads(SERVED.describe(self.path.partition("?")[2])))
        if refusal := SERVED.refusal(self.headers.get(WEIGHTS_HEADER)):
            return self.answer(409, {"error": refusal.decode()})
        with (FAULTS / "paths").open("a") as file:
            file.write(self.path + "\n")
        if self.path == SAMPLES_ROUTE:
            self.complete(body)
        elif self.path == SCORES_ROUTE:
            if take("dies-while-scoring"):
                os.kill(os.getpid(), signal.SIGKILL)
            if take("refuses-to-score"):
                return self.answer(400, {"error": "no such token"})
            missing = int(take("forgets-a-score"))
            logprobs = [-0.125 * token for token in body["text"][missing:]]
            self.answer(200, {"logprobs": logprobs})
        elif self.path.startswith(("/sleep", "/wake_up")):
            if self.path == "/sleep?level=2":
                Handler.weights = "none"
            self.answer(500 if take("sleep-fails") else 200, {})
        elif self.path == "/collective_rpc":
            if body["method"] == "give_up_weight_update":
                Handler.update = None
                return self.answer(200, {"results": [None]})
            if take("reload-fails"):
                return self.answer(500, {"error": "reload"})
            if Handler.update is not None:
                Handler.weights, Handler.update = "of two versions", None
            elif not take("reload-lies"):
                Handler.weights = read_weights(Path(body["kwargs"]["weights_path"]))
            self.answer(200, {"results": [None]})
        elif self.path in UPDATES:
            try:
                self.answer(200, UPDATES[self.path](body.get("update_info")))
            except Exception as error:  # as vLLM does: its model keeps the chunks that it has
                self.answer(500, {"error": repr(error)})
        elif self.path == "/reset_prefix_cache":
            self.answer(200, {"success": not take("cache-is-held")})
        else:
            self.answer(404, {"error": self.path})

    def complete(self, body: dict[str, Any]) -> None:
        if body["cache_salt"] == "warm-up":
            return self.answer(200, {"samples": []})
        sampling = body["sampling"]
        with (FAULTS / "asked.jsonl").open("a") as file:
            logged = {key: (body | sampling)[key] for key in ("prompt", "seed", "n", "priority")}
            file.write(json.dumps({**logged, "server": os.getpid()}) + "\n")
        if (slow := FAULTS / "slow").is_file():
            time.sleep(float(slow.read_text()))
        Handler.answered += 1
        if Handler.answered > 2 and take("dies-after-two"):
            os.kill(os.getpid(), signal.SIGKILL)
        if take("hangs"):
            time.sleep(60)
        if take("refuses"):
            return self.answer(400, {"error": "no such thing"})
        if len(body["prompt"]) + sampling["max_tokens"] > CONTEXT:
            return self.answer(400, {"error": "longer than the context"})
        samples = []
        for index in range(sampling["n"]):
            seed, tokens = sampling["seed"] + index, sampling["max_tokens"]
            ids, logprobs = sample(Handler.weights, body["prompt"], seed, tokens)
            sent_logprobs = logprobs if sampling["logprobs"] is not None else None
            samples.append({"token_ids": ids, "logprobs": sent_logprobs, "finish_reason": "length"})
        if take("forgets-a-logprob"):
            samples[0]["logprobs"].pop()
        self.answer(200, {"samples": samples})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def meet(update_info: None) -> dict[str, Any]:
    if take("meeting-fails"):
        raise RuntimeError("NCCL has no route")
    Handler.met = True
    return {}


def start(update_info: None) -> dict[str, Any]:
    if take("start-fails") or not Handler.met or Handler.update is not None:
        raise RuntimeError("no update can begin")
    Handler.update, Handler.is_whole = [], False
    return {}


def update(update_info: dict[str, Any]) -> dict[str, Any]:
    assert Handler.update is not None, "no update was begun"
    if update_info["number"] > 0 and take("dies-in-an-update"):
        os.kill(os.getpid(), signal.SIGKILL)
    if update_info["number"] > 0 and take("hangs-in-an-update"):
        time.sleep(60)
    if take("update-fails") or update_info["number"] != len(Handler.update):
        raise ValueError("a chunk is missing")
    Handler.update.append("other " if take("update-lies") else Path(update_info["path"]).read_text())
    Handler.is_whole = update_info["last"]
    return {}


def finish(update_info: None) -> dict[str, Any]:
    if take("finish-fails") or Handler.update is None or not Handler.is_whole:
        raise RuntimeError("the update is not whole")
    Handler.weights, Handler.update = "".join(Handler.update), None
    return {}


UPDATES = {
    "/init_weight_transfer_engine": meet,
    "/start_weight_update": start,
    "/update_weights": update,
    "/finish_weight_update": finish,
}

if __name__ == "__main__":
    if take("port-is-taken"):
        sys.exit("OSError: [Errno 98] Address already in use")
    if take("never-starts"):
        sys.exit("RuntimeError: CUDA out of memory")
    if take("never-listens"):
        time.sleep(60)
    Handler.weights = read_weights(MODEL)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
