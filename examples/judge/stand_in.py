"""A judge for trying things out, at an OpenAI-compatible address. It accepts answers that end like the
reference answer, and is mistaken about one in twenty."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

QUESTION = re.compile(
    r"Reference answer:\n(.*)\n\nAnswer to be compared:\n(.*)\n\nDoes the answer", re.DOTALL
)


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][-1]["content"]
        gold, answer = QUESTION.findall(text)[0]
        right = answer.strip().endswith(f"#{gold}") != (sum(text.encode()) % 20 == 0)
        verdict = "Verdict: correct" if right else "Verdict: incorrect"
        message = {"role": "assistant", "content": verdict}
        reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        reply["usage"] = {"prompt_tokens": len(text) // 4, "completion_tokens": 4}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8123), Judge).serve_forever()
