"""Tools of MCP servers (Model Context Protocol, by its own package `mcp`): one connection to each server in a
rank, which all answers share and which ends with the run.

Calls come from threads, and each connection lives in the event loop of a thread of its own::

    thread of an answer                    thread "MCP server", one for each server
    ───────────────────                    ────────────────────────────────────────
    Mcp.call_server                        _ServerThread._hold: opens the connection, keeps it
      └ _ServerThread.call ─ coroutine ──►   until `_stop` is set, and closes it
          │                                _Connection.call: sends the call
          │ waits for a future               │ waits for the answer, or for `call_seconds`
          │ ◄──── result or error ───────────┘ from when the server works on the call
          ▼
    text that the policy reads             thread "MCP server's errors": reads what the server prints

An answer's thread waits for at most the calls before its own, each of which is answered or overdue. A new
connection waits for at most `start_seconds`. A server that is lost ends all calls to it with an error, and
the next call begins another one. `close`, at the end of the run, sets `_stop` and waits `_END_S` at most.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Finding, lacking
from treetune.domains.environments.tools import Functions, Tool
from treetune.exceptions import Unavailable
from treetune.processes.pool import call_clock
from treetune.tasks.graders.base import Isolation

_ALIVE_S, _END_S = 2.0, 10.0
"""How long a server may take to list its tools after a call that was overdue, and to end."""
_OVERDUE_IN_A_ROW = 2
"""Overdue calls without an answer between them, after which no call that waits behind them is waited for."""
_PRINTED_BYTES = 16_384
"""The end of what a server prints, which says why it can't be had."""
_FAULT_CHARACTERS = 300
"""The beginning of an error about one result that the policy reads."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
"""The name of an environment variable in a header."""

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
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers for the address. ``${NAME}`` stands for an environment variable of the run, so that no
    secret is in a configuration: ``{Authorization: 'Bearer ${SHOP_TOKEN}'}``."""
    only: tuple[str, ...] = ()
    """The names of the tools that are offered; empty: all."""
    call_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds for a call, after which the policy reads that there was no result. They begin when the server
    works on it: one that takes a call at a time has others wait."""
    start_seconds: Annotated[float, Gt(0)] = 15.0
    """Seconds until the server has said which tools it has."""

    isolation: ClassVar[Isolation] = "service"

    def __post_init__(self) -> None:
        if bool(self.command) == (self.address is not None):
            raise ValueError("an MCP server has a command or an address: give one of the two")
        if self.headers and self.address is None:
            raise ValueError("headers are for an MCP server at an address: a command gets variables")

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        """The command, or the address without what may be secret in it: a user, a query."""
        if self.address is None:
            return " ".join(self.command)
        return re.sub(r"//[^/@]*@", "//", self.address.partition("?")[0])

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if find_spec("mcp") is None:
            what = "mcp, which tools of MCP servers need, isn't installed: pip install 'treetune[mcp]'"
            yield Finding(what, level="missing")
        elif self.command and shutil.which(self.command[0]) is None:
            what = f"{self.command[0]}, which is to be started as an MCP server, isn't there"
            yield Finding(what, level="missing")
        else:
            for value in self.headers.values():
                yield from lacking(
                    f"the environment variable {name}, which headers of the MCP server {self.name} name,"
                    " isn't set"
                    for name in _VARIABLE.findall(value)
                    if name not in os.environ
                )

    @override
    def functions(self) -> Functions:
        return {tool.name: partial(self.call_server, tool.name) for tool in self._offered()}

    @override
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        try:
            offered = self._offered()
        except Unavailable as error:  # nothing has begun yet: it is the user's to know
            raise ValueError(str(error)) from error
        if absent := sorted(set(self.only) - {tool.name for tool in offered}):
            raise ValueError(f"only names {', '.join(absent)}, which the MCP server {self.name} doesn't have")
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
        """Returns the answer of a tool of the server, or what became of the call. Raises Unavailable if no
        server can be had."""
        return self._server().call(tool, arguments)

    def _offered(self) -> Sequence[Any]:
        tools = self._server().connected().tools
        return [tool for tool in tools if not self.only or tool.name in self.only]

    def _server(self) -> _ServerThread:
        settings = [sorted(self.variables.items()), sorted(self.headers.items())]
        key = json.dumps([self.command, self.address, settings])
        with _LOCK:
            if key not in _SERVERS:
                _SERVERS[key] = _ServerThread(self)
            return _SERVERS[key]


@dataclass(eq=False)
class _Call:
    """A call that has been sent. Its clock runs from `since` on, None while it waits for its turn."""

    sent: float
    changed: asyncio.Event
    on_turn: Callable[[], None]
    since: float | None = None


class _Connection:
    """A client of a server, its tools, and the calls that it has been sent, in their order.

    Nobody says which calls a server works on. It takes them in the order in which they were sent, and one
    that has answered a call before `n` earlier ones works on `n + 1` at once; until then it is taken to work
    on one. So many calls have their clocks run, and the others wait. A server that has answered nothing while
    `_OVERDUE_IN_A_ROW` calls ran out of time works on none.
    """

    def __init__(self, client: Any, tools: Sequence[Any]) -> None:
        self.client, self.tools = client, tools
        self.answered = 0
        self.overdue_in_a_row = 0
        self._calls: list[_Call] = []
        self._at_once = 1

    @property
    def waiting(self) -> int:
        """The calls that have no answer."""
        return len(self._calls)

    async def call(
        self, tool: str, arguments: Mapping[str, Any], seconds: float, on_turn: Callable[[], None]
    ) -> Any:
        """Returns the result of a call, or raises what the client raises. `on_turn` is called when its clock
        begins to run. Raises TimeoutError where it is overdue: every call is, some time, as those before it
        are answered or overdue."""
        call = _Call(asyncio.get_running_loop().time(), asyncio.Event(), on_turn)
        self._calls.append(call)
        self._run_clocks()
        request = asyncio.ensure_future(self.client.call_tool(tool, dict(arguments)))
        try:
            await self._await_answer(request, call, seconds)
        finally:
            request.cancel()  # of one that is overdue: the server is told
            self._calls.remove(call)
            self._run_clocks()
        return request.result()

    async def _await_answer(self, request: asyncio.Future[Any], call: _Call, seconds: float) -> None:
        """Waits for the answer, or for the start of the clock, and from then on for `seconds` at most."""
        while not request.done():
            seconds_left = None
            if call.since is not None:
                seconds_left = call.since + seconds - asyncio.get_running_loop().time()
            if seconds_left is not None and seconds_left <= 0:
                self.overdue_in_a_row += 1
                raise TimeoutError
            changed = asyncio.ensure_future(call.changed.wait())
            await asyncio.wait({request, changed}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            call.changed.clear()
        self.answered += 1
        self.overdue_in_a_row = 0
        self._at_once = max(self._at_once, self._calls.index(call) + 1)

    def _run_clocks(self) -> None:
        """Starts the clocks of the calls that the server is taken to work on; of all where it hangs."""
        now = asyncio.get_running_loop().time()
        gives_no_answers = self.overdue_in_a_row >= _OVERDUE_IN_A_ROW
        for index, call in enumerate(self._calls):
            if call.since is None and (index < self._at_once or gives_no_answers):
                call.since = call.sent if gives_no_answers else now
                call.on_turn()
                call.changed.set()

    async def is_alive(self) -> bool:
        """Returns whether the server lists its tools, or answers another call, within `_ALIVE_S`."""
        answered = self.answered
        loop = asyncio.get_running_loop()
        end = loop.time() + _ALIVE_S
        listing = asyncio.ensure_future(self.client.list_tools())
        try:
            while loop.time() < end and self.answered == answered:
                await asyncio.wait({listing}, timeout=0.05)
                if listing.done():
                    return listing.exception() is None
            return self.answered > answered
        finally:
            listing.cancel()


class _ServerThread:
    """Holds the connection to a server, in a thread of its own. The next call replaces a lost connection."""

    def __init__(self, tool: Mcp) -> None:
        self._tool = tool
        self._loop = asyncio.new_event_loop()
        self._connection_lock = threading.Lock()
        """Held while a connection is made or dropped, so that no two threads do it at once."""
        self._ready: Future[_Connection] | None = None
        """Its result is the connection; None before the first call, and after a connection was dropped."""
        self._stop = asyncio.Event()
        """Set to end `_hold`."""
        self._hold_task: Future[None] | None = None
        """The newest run of `_hold`."""
        threading.Thread(target=self._loop.run_forever, name="MCP server", daemon=True).start()

    def connected(self) -> _Connection:
        """Returns the connection. Raises Unavailable where there is none in time."""
        with self._connection_lock:
            if self._ready is None:
                self._ready, self._stop = Future(), asyncio.Event()
                hold = self._hold(self._ready, self._stop)
                self._hold_task = asyncio.run_coroutine_threadsafe(hold, self._loop)
            try:
                return self._ready.result(self._tool.start_seconds + _END_S)
            except Exception as error:
                self._drop()
                raise Unavailable(f"the MCP server {self._tool.name} can't be had: {error}") from error

    async def _hold(self, ready: Future[_Connection], stop: asyncio.Event) -> None:
        """Opens a connection, keeps it until `stop` is set, and closes it: all in one task, as anyio asks."""
        import anyio
        from mcp import Client

        tool = self._tool
        with _printed() as printed:
            try:
                with anyio.fail_after(tool.start_seconds) as limit:
                    async with _transport(tool, printed) as server, Client(server, cache=None) as client:
                        page = await client.list_tools()
                        tools = list(page.tools)
                        while page.next_cursor:
                            page = await client.list_tools(cursor=page.next_cursor)
                            tools += page.tools
                        ready.set_result(_Connection(client, tools))
                        limit.deadline = math.inf
                        await stop.wait()
            except Exception as error:
                # Task groups of the client put the error of a task into a group, and that into another.
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                reason = printed.last_line() or f"{type(cause).__name__}: {cause}"
                if isinstance(cause, TimeoutError):
                    reason = f"it didn't list its tools within {tool.start_seconds:g} s"
                if not ready.done():
                    ready.set_exception(ConnectionError(reason))

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text that the policy reads: the result of a call, its error, or that it has none."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        connection = self.connected()
        seconds = self._tool.call_seconds
        # The deadline of the answer's turn stands still while the call waits for others.
        clock = call_clock()
        clock.stop()
        coroutine = connection.call(tool, arguments, seconds, clock.start)
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except TimeoutError:
            return self._overdue(connection)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return self._overdue(connection)
            if error.code == CONNECTION_CLOSED:
                return self._lost(connection)
            return f"Error: {error}"
        except Exception as error:
            # A malformed result and a broken transport may both raise any error.
            if not self._is_alive(connection):
                return self._lost(connection)
            fault = re.sub(r"\s+", " ", str(error))[:_FAULT_CHARACTERS]
            return f"Error: the result of {tool} can't be read: {fault}"
        finally:
            clock.start()
        parts = [_text_of(part) for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content)]
        return ("Error: " if result.is_error else "") + "\n".join(parts)

    def _overdue(self, connection: _Connection) -> str:
        # A server that takes one call at a time lists no tools before it has answered those that wait: they
        # tell whether it hangs.
        is_in_doubt = not connection.waiting or connection.overdue_in_a_row >= _OVERDUE_IN_A_ROW
        if is_in_doubt and not self._is_alive(connection):
            self._end(connection, "hangs")
        return f"No result within {self._tool.call_seconds:g} s."

    def _lost(self, connection: _Connection) -> str:
        self._end(connection, "ended")
        return "The server ended during the call."

    def _is_alive(self, connection: _Connection) -> bool:
        try:
            return asyncio.run_coroutine_threadsafe(connection.is_alive(), self._loop).result(2 * _ALIVE_S)
        except Exception:
            return False

    def _end(self, connection: _Connection, verb: str) -> None:
        """Drops a connection whose server "hangs" or "ended", unless another call has already done so."""
        with self._connection_lock:
            if self._ready is None or not self._ready.done() or self._ready.exception() is not None:
                return
            if self._ready.result() is connection:
                log.warning("the MCP server %s %s: the next call begins another", self._tool.name, verb)
                self._drop()

    def _drop(self) -> None:
        self._ready = None
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Ends the connection and its server, which gets `_END_S` for it."""
        with self._connection_lock:
            self._drop()
            if self._hold_task is not None:
                wait([self._hold_task], _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


@asynccontextmanager
async def _transport(tool: Mcp, printed: _Printed) -> AsyncIterator[Any]:
    """Gives the way to a server: to a program that is started, or to an address with its headers."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if tool.address is None:
        arguments = ["-I", "-c", _GUARDED, str(os.getpid()), *tool.command]
        program = StdioServerParameters(command=sys.executable, args=arguments, env=dict(tool.variables))
        yield stdio_client(program, errlog=printed.file)
        return
    headers = {
        name: _VARIABLE.sub(lambda variable: os.environ[variable[1]], value)
        for name, value in tool.headers.items()
    }
    async with create_mcp_http_client(headers=headers) as http:
        yield streamable_http_client(tool.address, http_client=http)


class _Printed:
    """What a server prints to its standard error: all of it is taken, and the end kept."""

    def __init__(self) -> None:
        self._read, written = os.pipe()
        self.file = os.fdopen(written, "w")
        self._kept = b""
        self._thread = threading.Thread(target=self._take, name="MCP server's errors", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while part := os.read(self._read, _PRINTED_BYTES):
            self._kept = (self._kept + part)[-_PRINTED_BYTES:]
        os.close(self._read)

    def close(self) -> None:
        self.file.close()

    def last_line(self) -> str:
        """Returns the last line, once the server has ended or a moment has passed."""
        self.close()
        self._thread.join(_ALIVE_S)
        return self._kept.decode(errors="replace").strip().rpartition("\n")[2]


@contextmanager
def _printed() -> Iterator[_Printed]:
    printed = _Printed()
    try:
        yield printed
    finally:
        printed.close()


def _text_of(part: Any) -> str:
    """Returns a part of a result as text; of what is none its kind and its type."""
    if part.type == "text":
        return part.text
    if part.type == "resource":
        resource = part.resource
        text = getattr(resource, "text", None)
        return text if text is not None else f"[{resource.mime_type or 'resource'} {resource.uri}]"
    if part.type == "resource_link":
        described = f": {part.description}" if part.description else ""
        return f"[{part.name} {part.uri}{described}]"
    kind = getattr(part, "mime_type", None)
    return f"[{part.type} {kind}]" if kind else f"[{part.type}]"


_SERVERS: dict[str, _ServerThread] = {}
_LOCK = threading.Lock()


@atexit.register
def end_servers() -> None:
    """Ends this rank's connections, and the servers that it has started."""
    with _LOCK:
        servers = list(_SERVERS.values())
        _SERVERS.clear()
    for server in servers:
        server.close()
