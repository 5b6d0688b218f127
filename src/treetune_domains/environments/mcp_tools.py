"""Tools of MCP servers (Model Context Protocol, by its own package `mcp`): one connection to each server in a
rank, which all answers share and which ends with the run."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from treetune.tasks.graders.base import Isolation, Unavailable
from treetune_domains.environments.tools import Functions, Tool

_ALIVE_S, _END_S = 2.0, 10.0
"""How long a server may take to list its tools after a call that was overdue, and to end."""

# Has the kernel kill the server when the thread ends that started it, however the run ends (Linux).
_GUARDED = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0);"
    " os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)

log = logging.getLogger(__name__)


@Tool.register("mcp")
@dataclass(frozen=True, kw_only=True)
class Mcp(Tool):
    """The tools of an MCP server, which is started by its `command` or runs at an `address` already.

    A server is a program of yours: it has your files and your network. It gets no environment variables but
    PATH, HOME and the like, and those in `variables`. All answers of a rank share it, so that what one of
    them changes there, the others see; an answer that is gone on with finds it as it is by then.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments; it speaks on standard input and output."""
    address: str | None = None
    """The address of a server that runs elsewhere (streamable HTTP), ``http://localhost:8000/mcp``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the program."""
    only: tuple[str, ...] = ()
    """The names of the tools that are offered; empty: all."""
    call_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds for a call, after which the policy reads that there was no result."""
    start_seconds: Annotated[float, Gt(0)] = 15.0
    """Seconds until the server has said which tools it has."""

    isolation: ClassVar[Isolation] = "service"

    def __post_init__(self) -> None:
        if bool(self.command) == (self.address is not None):
            raise ValueError("an MCP server has a command or an address: give one of the two")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.address or " ".join(self.command)

    def missing(self) -> Sequence[str]:
        if find_spec("mcp") is None:
            return ["mcp, which tools of MCP servers need, isn't installed: pip install 'treetune[mcp]'"]
        if self.command and shutil.which(self.command[0]) is None:
            return [f"{self.command[0]}, which is to be started as an MCP server, isn't there"]
        return ()

    def functions(self) -> Functions:
        return {tool.name: partial(self.call_server, tool.name) for tool in self._offered()}

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        try:
            offered = self._offered()
        except Unavailable as error:  # nothing has begun yet: it is the user's to know
            raise ValueError(str(error)) from error
        if lacking := sorted(set(self.only) - {tool.name for tool in offered}):
            raise ValueError(
                f"only names {', '.join(lacking)}, which the MCP server {self.name} doesn't have"
            )
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in offered
        ]

    def call_server(self, tool: str, /, **arguments: Any) -> str:
        """Returns what a tool of the server answered, or what became of the call. Raises Unavailable where no
        server can be had."""
        return self._server().call(tool, arguments)

    def _offered(self) -> Sequence[Any]:
        return [tool for tool in self._server().connected()[1] if not self.only or tool.name in self.only]

    def _server(self) -> _Server:
        key = json.dumps([self.command, self.address, sorted(self.variables.items())])
        with _LOCK:
            if key not in _SERVERS:
                _SERVERS[key] = _Server(self)
            return _SERVERS[key]


class _Server:
    """The connection to a server, in a thread of its own. One that is lost is made anew by the next call."""

    def __init__(self, tool: Mcp) -> None:
        self._tool = tool
        self._loop = asyncio.new_event_loop()
        self._connecting = threading.Lock()
        self._ready: Future[tuple[Any, Sequence[Any]]] | None = None
        self._stop = asyncio.Event()
        self._held: Future[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="MCP server", daemon=True).start()

    def connected(self) -> tuple[Any, Sequence[Any]]:
        """Returns the client and the server's tools. Raises Unavailable where there is none in time."""
        with self._connecting:
            if self._ready is None:
                self._ready, self._stop = Future(), asyncio.Event()
                self._held = asyncio.run_coroutine_threadsafe(self._hold(self._ready, self._stop), self._loop)
            try:
                return self._ready.result(self._tool.start_seconds + _END_S)
            except Exception as error:
                self._drop()
                raise Unavailable(f"the MCP server {self._tool.name} can't be had: {error}") from error

    async def _hold(self, ready: Future[tuple[Any, Sequence[Any]]], stop: asyncio.Event) -> None:
        """Keeps a connection until it is stopped: it has to end in the task in which it began."""
        import anyio
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        tool = self._tool
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            try:
                arguments = ["-I", "-c", _GUARDED, str(os.getpid()), *tool.command]
                program = StdioServerParameters(
                    command=sys.executable, args=arguments, env=dict(tool.variables)
                )
                server = tool.address or stdio_client(program, errlog=printed)
                with anyio.fail_after(tool.start_seconds) as limit:
                    async with Client(server, cache=None) as client:
                        page = await client.list_tools()
                        tools = list(page.tools)
                        while page.next_cursor:
                            page = await client.list_tools(cursor=page.next_cursor)
                            tools += page.tools
                        ready.set_result((client, tools))
                        limit.deadline = math.inf
                        await stop.wait()
            except Exception as error:
                first: BaseException = error
                while isinstance(first, BaseExceptionGroup):
                    first = first.exceptions[0]
                printed.seek(0)
                last = printed.read()[-500:].strip().rpartition("\n")[2]
                if isinstance(first, TimeoutError):
                    last = f"it didn't list its tools within {tool.start_seconds:g} s"
                if not ready.done():
                    ready.set_exception(ConnectionError(last or f"{type(first).__name__}: {first}"))

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client, _ = self.connected()
        seconds = self._tool.call_seconds
        called = client.call_tool(tool, dict(arguments), read_timeout_seconds=seconds)
        code = None
        try:
            result = asyncio.run_coroutine_threadsafe(called, self._loop).result(seconds + _ALIVE_S)
        except TimeoutError:
            code = REQUEST_TIMEOUT
        except MCPError as error:
            code = error.code
            if code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                return f"Error: {error}"
        except Exception:  # a transport that broke raises what it likes
            code = CONNECTION_CLOSED
        if code is not None:
            hangs = code == REQUEST_TIMEOUT
            if not hangs or not self._is_alive(client):
                what = "hangs" if hangs else "ended"
                log.warning("the MCP server %s %s: the next call begins another", self._tool.name, what)
                with self._connecting:  # another call may have done so already
                    if self._ready is not None and self._ready.done() and self._ready.result()[0] is client:
                        self._drop()
            return f"No result within {seconds:g} s." if hangs else "The server ended during the call."
        parts = [one.text if one.type == "text" else f"[{one.type}]" for one in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content)]
        return ("Error: " if result.is_error else "") + "\n".join(parts)

    def _is_alive(self, client: Any) -> bool:
        try:
            asyncio.run_coroutine_threadsafe(client.list_tools(), self._loop).result(_ALIVE_S)
        except Exception:
            return False
        return True

    def _drop(self) -> None:
        self._ready = None
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        with self._connecting:
            self._drop()
            if self._held is not None:
                wait([self._held], _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


_SERVERS: dict[str, _Server] = {}
_LOCK = threading.Lock()


@atexit.register
def end_servers() -> None:
    """Ends this rank's connections, and the servers that it has started."""
    with _LOCK:
        servers = list(_SERVERS.values())
        _SERVERS.clear()
    for server in servers:
        server.close()
