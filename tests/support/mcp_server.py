"""An MCP server of the protocol's own package, which counts, fails, hangs and dies as it is told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("counting")
counted = Path(sys.argv[1])


@server.tool()
def count(step: int = 1) -> str:
    """Counts on, over all that ask."""
    with counted.open("a") as file:  # a server that is killed here leaves what others have counted
        file.write("|" * step)
    return f"{counted.stat().st_size}"


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool()
async def hang() -> str:
    """Hangs, and everything with it."""
    time.sleep(60)
    return "late"


@server.tool()
async def wait() -> str:
    """Takes its time, beside others."""
    import anyio

    await anyio.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run(sys.argv[2] if len(sys.argv) > 2 else "stdio")
