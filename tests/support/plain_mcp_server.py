"""A hand-written MCP server on standard input and output that takes one request at a time, and whose results
aren't always as they should be."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SCHEMA = {"type": "object", "properties": {"degrees": {"type": "number"}}, "required": ["degrees"]}
NAMES = ("breaks_schema", "unknown_part", "resource", "link", "blob", "slow", "echo", "print_much")
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "unknown_part": [{"type": "hologram", "data": "AAA"}],
    "resource": [{"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}}],
    "blob": [
        {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AAA=", "mimeType": "image/png"}},
        {"type": "image", "data": "AAA=", "mimeType": "image/png"},
    ],
    "link": [{"type": "resource_link", "uri": "file:///b.txt", "name": "b", "description": "the second"}],
    "breaks_schema": [{"type": "text", "text": "warm"}],
}


def result_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "slow":
        time.sleep(arguments["seconds"])
    if name == "print_much":
        sys.stderr.write("x" * 3_000_000 + "\n")
    content = CONTENTS.get(name, [{"type": "text", "text": json.dumps(arguments)}])
    structured = {"structuredContent": {"degrees": "warm"}} if name == "breaks_schema" else {}
    return {"content": content, **structured}


for line in sys.stdin:
    message = json.loads(line)
    parameters = message.get("params", {})
    answers: dict[str, dict[str, Any]] = {
        "initialize": {
            "protocolVersion": parameters.get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "plain", "version": "1"},
        },
        "tools/list": {
            "tools": [
                {"name": name, "inputSchema": {"type": "object"}}
                | ({"outputSchema": SCHEMA} if name == "breaks_schema" else {})
                for name in NAMES
            ]
        },
    }
    method = message.get("method")
    if method == "tools/call":
        answer: dict[str, Any] = {"result": result_of(parameters["name"], parameters["arguments"])}
    elif method in answers:
        answer = {"result": answers[method]}
    else:
        answer = {"error": {"code": -32601, "message": "no such method"}}
    if "id" in message:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"]} | answer) + "\n")
        sys.stdout.flush()
