"""Asks a credit service (`treetune serve_credit`) for advantages, with Python's standard library alone.

    python over_http.py http://127.0.0.1:8200 credit.key

Any language can send the same request: the service's /openapi.json has its schema.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask_for_advantages(
    address: str, key: str, answers: list[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    """Returns the service's response: ``advantages``, with a number for each token, ``values``, ``cost``, ….

    Args:
        address: The service's address, such as ``http://127.0.0.1:8200``.
        key: The text of the service's key file.
        answers: The graded answers: ``{"prompt_ids": [12, 7], "response_ids": [5, 6, 0], "reward": 1.0}``.
        settings: ``credit``, and for credit with continuations ``sampling``.

    Raises:
        RuntimeError: The service refuses the request, or fails. The message says why.
    """
    request = urllib.request.Request(
        f"{address}/advantages",
        json.dumps({"answers": answers, **settings}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            credited: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        # A proxy in front of the service may send HTML, so the body is not parsed.
        message = error.read().decode(errors="replace")
        raise RuntimeError(f"HTTP {error.code}: {message}") from error
    return credited


if __name__ == "__main__":
    address, key_file = sys.argv[1:]
    answers = [
        {"prompt_ids": [12, 7], "response_ids": [5, 6, 0], "reward": 1.0},
        {"prompt_ids": [12, 7], "response_ids": [9, 0], "reward": 0.0},
    ]
    key = Path(key_file).read_text().strip()
    credited = ask_for_advantages(address, key, answers, credit={"type": "group", "std": False})
    print(credited["advantages"])
