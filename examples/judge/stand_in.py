"""A server that takes the place of a judge model, to try the example without one.

It answers requests in OpenAI's format at http://127.0.0.1:8123/v1. It accepts an answer that ends with "#"
and the reference answer, but gives the wrong verdict on about one answer in twenty.
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The prompt of treetune's grader `judge` has these lines.
QUESTION = re.compile(
    r"Reference answer:\n(.*)\n\nAnswer to be compared:\n(.*)\n\nDoes the answer", re.DOTALL
)


def judge(prompt: str) -> str:
    """Returns the verdict on the answer in the prompt, the same one for the same prompt."""
    gold, answer = QUESTION.findall(prompt)[0]
    is_correct = answer.strip().endswith(f"#{gold}")
    is_mistaken = sum(prompt.encode()) % 20 == 0
    return "Verdict: correct" if is_correct != is_mistaken else "Verdict: incorrect"


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        request = json.loads(self.rfile.read(length))
        prompt = request["messages"][-1]["content"]
        message = {"role": "assistant", "content": judge(prompt)}
        response = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt) // 4, "completion_tokens": 4},
        }
        body = json.dumps(response).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8123), Judge).serve_forever()
