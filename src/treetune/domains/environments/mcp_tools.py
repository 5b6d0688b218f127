"""Tools of MCP servers (Model Context Protocol), with the package `mcp`. All answers of a rank share one
connection to each server, which ends with the run.

Calls come from threads, and each connection lives in the event loop of a separate thread::

    thread of an answer                    thread "MCP server", one for each server
    ───────────────────                    ────────────────────────────────────────
    Mcp.call_server                        _ServerThread._hold_connection: opens the connection, keeps it
      └ _ServerThread.call ─ coroutine ──►   until `_stop` is set, and closes it
          │                                _Connection.call: sends the call
          │ waits for a future               │ waits for the answer, for at most `call_seconds`
          │ ◄──── result or error ───────────┘ after the server has begun to process the call
          ▼
    text that the policy reads             thread "MCP server's errors": reads what the server prints

An answer's thread waits for its own call and for the calls before it, each of which ends at its deadline at
the latest. A new connection waits for at most `start_seconds`. If a server ends, all calls to it end with an
error, and the next call starts another server. `close`, at the end of the run, sets `_stop` and waits at most
`_ENDING_S`.
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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Finding, report_missing
from treetune.domains.environments.tools import Functions, Tool
from treetune.exceptions import Unavailable
from treetune.processes.pool import call_clock
from treetune.tasks.graders.base import Isolation

_LISTING_S = 2.0
"""The longest time in which a server has to list its tools after a call that was overdue, so that it counts
as alive."""
_ENDING_S = 10.0
"""The longest time that a server may take to end."""
_OVERDUE_IN_A_ROW = 2
"""The number of overdue calls, without an answer between them, after which the server seems to hang. Then the
clocks of all other calls run."""
_PRINTED_BYTES = 16_384
"""The number of bytes that are kept of a server's error output, from its end."""
_FAULT_CHARACTERS = 300
"""The number of characters that the policy reads of an error in a result, from its beginning."""
_VARIABLE_IN_BRACES = re.compile(r"\$\{(\w+)\}")
"""The name of an environment variable in a header or in an address."""

# A program that asks the kernel to kill it when the thread that started it ends for any reason (Linux), and
# then becomes the server.
_START_GUARDED = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0);"
    " os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)

log = logging.getLogger(__name__)


@Tool.register("mcp")
@dataclass(frozen=True, kw_only=True)
class Mcp(Tool):
    """The tools of an MCP server, which is started by its `command` or already runs at an `address`.

    A server runs with your user's rights: it has access to your files and your network. Of the environment
    variables it gets only PATH, HOME and similar ones, and those in `variables`. All answers of a rank share
    the server, so each answer sees the changes that others make in it. An answer that is continued finds the
    server in its present state, and not in that of the answer's middle.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments. It communicates by standard input and output."""
    address: str | None = field(default=None, repr=False)
    """The address of a running server (streamable HTTP), such as ``http://localhost:8000/mcp``. A key in it
    is written as a variable, as in `headers`: ``https://shop/mcp?key=${SHOP_KEY}``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the program."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers for the address. ``${NAME}`` is replaced by the run's environment variable of this name,
    so a configuration needs no secrets: ``{Authorization: 'Bearer ${SHOP_TOKEN}'}``."""
    only: tuple[str, ...] = ()
    """The names of the tools that are offered; empty: all."""
    call_seconds: Annotated[float, Gt(0)] = 10.0
    """The longest time for a call in seconds, after which the policy reads that there was no result. It
    begins when the server probably begins to process the call, since some servers process one call at a
    time."""
    start_seconds: Annotated[float, Gt(0)] = 15.0
    """The longest time in seconds until a new server has listed its tools."""

    isolation: ClassVar[Isolation] = "service"

    def __post_init__(self) -> None:
        has_command, has_address = bool(self.command), self.address is not None
        if has_command == has_address:
            raise ValueError("an MCP server has a command or an address: give one of the two")
        if self.headers and self.address is None:
            raise ValueError("headers are for an MCP server at an address: a command gets variables")
        user_and_password = re.search(r"//([^/?#]*)@", self.address or "")
        # ``${USER}:${PASSWORD}`` names variables, and leaves only the colon.
        if user_and_password and _VARIABLE_IN_BRACES.sub("", user_and_password[1]).strip(":"):
            # The message leaves the address out, because the address holds a secret.
            raise ValueError(
                "the address of the MCP server has a user name or a password, which would be stored with the"
                " run: export environment variables, and write ${NAME} for both, or send"
                " headers: {Authorization: …}"
            )

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        """The command, or the address without its user and query, which may be secret."""
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
            for value in (self.address or "", *self.headers.values()):
                yield from report_missing(
                    f"the environment variable {name}, which address or headers of the MCP server"
                    f" {self.name} name, isn't set"
                    for name in _VARIABLE_IN_BRACES.findall(value)
                    if name not in os.environ
                )

    @override
    def functions(self) -> Functions:
        return {tool.name: partial(self.call_server, tool.name) for tool in self._offered_tools()}

    @override
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        try:
            offered = self._offered_tools()
        except Unavailable as error:  # before the run begins, this is a mistake that the user has to fix
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
        """Calls a tool of the server, and returns the result or the error as the policy reads it.

        Raises Unavailable if there is no connection to a server.
        """
        return self._server_thread().call(tool, arguments)

    def _offered_tools(self) -> Sequence[Any]:
        tools = self._server_thread().connect().tools
        return [tool for tool in tools if not self.only or tool.name in self.only]

    def _server_thread(self) -> _ServerThread:
        """Returns the thread of this server, which all tools with the same settings share."""
        settings = [sorted(self.variables.items()), sorted(self.headers.items())]
        key = json.dumps([self.command, self.address, settings])
        with _SERVER_THREADS_LOCK:
            if key not in _SERVER_THREADS:
                _SERVER_THREADS[key] = _ServerThread(self)
            return _SERVER_THREADS[key]


@dataclass(eq=False)
class _Call:
    """A call that has been sent and has no answer yet."""

    sent_at: float
    """The time when it was sent."""
    changed: asyncio.Event
    """Set when its clock begins to run."""
    on_start: Callable[[], None]
    """Called when its clock begins to run."""
    clock_start: float | None = None
    """The time from which `call_seconds` count; None while the server processes other calls."""


class _Connection:
    """A client of a server, the server's tools, and the calls without an answer.

    A client can't see which calls a server is processing, so this is an estimate. The server is assumed to
    begin calls in the order in which they were sent, one at a time. If it answers a call while `n` earlier
    calls have no answer yet, it processes at least `n + 1` calls at the same time. The clocks of that many
    calls run, and the other calls wait. If `_OVERDUE_IN_A_ROW` calls run out of time without an answer
    between them, the server is assumed to hang, and the clocks of all calls run.
    """

    def __init__(self, client: Any, tools: Sequence[Any]) -> None:
        self.client, self.tools = client, tools
        self.answered = 0
        """Calls that the server has answered."""
        self.overdue_in_a_row = 0
        """Calls that ran out of time since the last answer."""
        self._calls: list[_Call] = []
        """Calls without an answer, in the order in which they were sent."""
        self._parallel_calls = 1
        """The estimate of how many calls the server processes at the same time."""

    @property
    def unanswered_calls(self) -> int:
        """The number of calls without an answer."""
        return len(self._calls)

    async def call(
        self, tool: str, arguments: Mapping[str, Any], seconds: float, on_start: Callable[[], None]
    ) -> Any:
        """Returns the result of a call, or raises the client's exception.

        The call has `seconds` from the moment when the server begins to process it. The client can't see this
        moment, so `_run_clocks` estimates it, and calls `on_start` then. Raises TimeoutError `seconds` later.
        Before the moment, the call waits for earlier calls, each of which is answered or runs out of time.
        """
        call = _Call(asyncio.get_running_loop().time(), asyncio.Event(), on_start)
        self._calls.append(call)
        self._run_clocks()
        request = asyncio.ensure_future(self.client.call_tool(tool, dict(arguments)))
        try:
            await self._await_answer(request, call, seconds)
        finally:
            request.cancel()  # tells the server that an overdue call is not needed any more
            self._calls.remove(call)
            self._run_clocks()
        return request.result()

    async def _await_answer(self, request: asyncio.Future[Any], call: _Call, seconds: float) -> None:
        """Waits for the answer. Raises TimeoutError `seconds` after the start of the call's clock.

        The clock starts when the server probably begins with the call. Until then, `clock_start` is None, and
        the call waits for earlier ones.
        """
        while not request.done():
            seconds_left = None
            if call.clock_start is not None:
                seconds_left = call.clock_start + seconds - asyncio.get_running_loop().time()
            if seconds_left is not None and seconds_left <= 0:
                self.overdue_in_a_row += 1
                raise TimeoutError
            # The call's clock may begin while this waits. That sets `call.changed`, which ends the waiting,
            # so that the loop computes the deadline.
            changed = asyncio.ensure_future(call.changed.wait())
            await asyncio.wait({request, changed}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            call.changed.clear()
        self.answered += 1
        self.overdue_in_a_row = 0
        # `_calls` is in the order in which the calls were sent. The calls before this one have no answer yet,
        # so the server processes all of them and this one at the same time.
        self._parallel_calls = max(self._parallel_calls, self._calls.index(call) + 1)

    def _run_clocks(self) -> None:
        """Starts the clocks that measure the limited time of calls.

        The server probably processes the first `_parallel_calls` of the calls without an answer, so their
        clocks start. If the server seems to hang, the clocks of all calls start.
        """
        now = asyncio.get_running_loop().time()
        seems_to_hang = self.overdue_in_a_row >= _OVERDUE_IN_A_ROW
        for index, call in enumerate(self._calls):
            if call.clock_start is None and (index < self._parallel_calls or seems_to_hang):
                # If the server hangs, this call hasn't waited for the server to process another one. Then all
                # of its time since it was sent counts.
                call.clock_start = call.sent_at if seems_to_hang else now
                call.on_start()
                call.changed.set()

    async def is_alive(self) -> bool:
        """Returns whether the server lists its tools, or answers another call, within `_LISTING_S`."""
        answered_before = self.answered
        loop = asyncio.get_running_loop()
        end = loop.time() + _LISTING_S
        listing = asyncio.ensure_future(self.client.list_tools())
        try:
            # A server that processes one call at a time lists its tools only after the call. So an answer to
            # a call counts, too: the loop looks for it 20 times a second.
            while loop.time() < end and self.answered == answered_before:
                await asyncio.wait({listing}, timeout=0.05)
                if listing.done():
                    return listing.exception() is None
            return self.answered > answered_before
        finally:
            listing.cancel()


class _ServerThread:
    """Holds the connection to a server, in a separate thread. After a connection is lost, the next call opens
    another one."""

    def __init__(self, tool: Mcp) -> None:
        self._tool = tool
        self._loop = asyncio.new_event_loop()
        self._connection_lock = threading.Lock()
        """Held while a connection is opened or dropped, so that only one thread does it at a time."""
        self._ready: Future[_Connection] | None = None
        """A future with the connection; None before the first call, and after a connection was dropped."""
        self._stop = asyncio.Event()
        """Set to end `_hold_connection`."""
        self._hold_task: Future[None] | None = None
        """The latest call of `_hold_connection`."""
        threading.Thread(target=self._loop.run_forever, name="MCP server", daemon=True).start()

    def connect(self) -> _Connection:
        """Returns the connection, and opens it if there is none. Raises Unavailable if this fails."""
        with self._connection_lock:
            if self._ready is None:
                self._ready, self._stop = Future(), asyncio.Event()
                hold = self._hold_connection(self._ready, self._stop)
                self._hold_task = asyncio.run_coroutine_threadsafe(hold, self._loop)
            try:
                # `_hold_connection` fails after `start_seconds`, and may take `_ENDING_S` to end the server
                # first.
                return self._ready.result(self._tool.start_seconds + _ENDING_S)
            except Exception as error:
                self._drop_connection()
                raise Unavailable(f"the MCP server {self._tool.name} is not available: {error}") from error

    async def _hold_connection(self, ready: Future[_Connection], stop: asyncio.Event) -> None:
        """Opens a connection, keeps it until `stop` is set, and closes it. anyio requires that one task does
        all of this."""
        import anyio
        from mcp import Client

        tool = self._tool
        with closing(_ErrorOutput()) as error_output:
            try:
                with anyio.fail_after(tool.start_seconds) as limit:
                    async with (
                        _transport(tool, error_output) as server,
                        Client(server, cache=None) as client,  # each listing of tools asks the server
                    ):
                        page = await client.list_tools()
                        tools = list(page.tools)
                        while page.next_cursor:
                            page = await client.list_tools(cursor=page.next_cursor)
                            tools += page.tools
                        ready.set_result(_Connection(client, tools))
                        limit.deadline = math.inf  # `start_seconds` is only for what is above
                        await stop.wait()
            except Exception as error:
                # The client's task groups wrap the error of a task into groups within each other.
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                reason = error_output.last_line() or f"{type(cause).__name__}: {cause}"
                if isinstance(cause, TimeoutError):
                    reason = f"it didn't list its tools within {tool.start_seconds:g} s"
                if not ready.done():  # if it is done, the connection's calls fail and report the error
                    ready.set_exception(ConnectionError(reason))

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool, and returns the text that the policy reads: the result, or an error."""
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        connection = self.connect()
        seconds = self._tool.call_seconds
        # This clock measures the time of the answer's turn. It stops here, because the server may first
        # process other calls. `connection.call` starts it when the server probably begins with this call.
        clock = call_clock()
        clock.stop()
        coroutine = connection.call(tool, arguments, seconds, clock.start)
        try:
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except TimeoutError:
            return self._answer_overdue_call(connection)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return self._answer_overdue_call(connection)
            if error.code == CONNECTION_CLOSED:
                return self._answer_lost_call(connection)
            return f"Error: {error}"
        except Exception as error:
            # Any exception may come from a malformed result or from a broken connection.
            if not self._is_alive(connection):
                return self._answer_lost_call(connection)
            fault = re.sub(r"\s+", " ", str(error))[:_FAULT_CHARACTERS]
            return f"Error: the result of {tool} can't be read: {fault}"
        finally:
            clock.start()  # also if the server never began with the call
        parts = [_text_of_part(part) for part in result.content]
        # Structured content usually repeats the text, but some tools return only structured content.
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content)]
        return ("Error: " if result.is_error else "") + "\n".join(parts)

    def _answer_overdue_call(self, connection: _Connection) -> str:
        """Returns the text for a call that ran out of time. Drops the connection if the server hangs."""
        # A server that processes one call at a time can't list its tools while other calls wait (`waiting` is
        # their number). Then a single overdue call is no sign that the server hangs. Only several in a row
        # are a reason to test the server.
        is_in_doubt = not connection.unanswered_calls or connection.overdue_in_a_row >= _OVERDUE_IN_A_ROW
        if is_in_doubt and not self._is_alive(connection):
            self._end_connection(connection, "hangs")
        return f"No result within {self._tool.call_seconds:g} s."

    def _answer_lost_call(self, connection: _Connection) -> str:
        self._end_connection(connection, "ended")
        return "The server ended during the call."

    def _is_alive(self, connection: _Connection) -> bool:
        """Asks `_Connection.is_alive` in the event loop. Any error means that the connection is broken."""
        try:
            # The coroutine ends `_LISTING_S` after its start. A busy event loop may start it late, hence
            # twice the time.
            return asyncio.run_coroutine_threadsafe(connection.is_alive(), self._loop).result(2 * _LISTING_S)
        except Exception:
            return False

    def _end_connection(self, connection: _Connection, verb: str) -> None:
        """Drops a connection whose server "hangs" or "ended", unless another call has already done so."""
        with self._connection_lock:
            if self._ready is None or not self._ready.done() or self._ready.exception() is not None:
                return  # this connection has been dropped; another one may be opening
            if self._ready.result() is connection:
                log.warning("the MCP server %s %s: the next call begins another", self._tool.name, verb)
                self._drop_connection()

    def _drop_connection(self) -> None:
        self._ready = None
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Ends the connection and its server, and waits for this at most `_ENDING_S`."""
        with self._connection_lock:
            self._drop_connection()
            if self._hold_task is not None:
                wait([self._hold_task], _ENDING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


@asynccontextmanager
async def _transport(tool: Mcp, error_output: _ErrorOutput) -> AsyncIterator[Any]:
    """Yields the transport to a server: to a program that it starts, or to an address with headers."""
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if tool.address is None:
        # -I: the code that starts the server imports nothing from the working directory.
        # `_START_GUARDED` runs the command as a server that the kernel kills when its parent ends. The code
        # gets the number of this process. If the code's parent has another number, this process has ended
        # already, and the code starts nothing.
        arguments = ["-I", "-c", _START_GUARDED, str(os.getpid()), *tool.command]
        program = StdioServerParameters(command=sys.executable, args=arguments, env=dict(tool.variables))
        yield stdio_client(program, errlog=error_output.file)
        return
    headers = {name: _insert_variables(value) for name, value in tool.headers.items()}
    async with create_mcp_http_client(headers=headers) as http:
        yield streamable_http_client(_insert_variables(tool.address), http_client=http)


def _insert_variables(text: str) -> str:
    """Returns a text in which environment variables such as ``${NAME}`` are replaced by their values."""
    return _VARIABLE_IN_BRACES.sub(lambda variable: os.environ[variable[1]], text)


class _ErrorOutput:
    """Reads all that a server prints to its standard error, and keeps the end of it."""

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe()
        self.file = os.fdopen(write_fd, "w")
        self._end_of_text = b""
        """The last bytes that the server has written to `file`."""
        self._thread = threading.Thread(target=self._read_all, name="MCP server's errors", daemon=True)
        self._thread.start()

    def _read_all(self) -> None:
        while part := os.read(self._read_fd, _PRINTED_BYTES):
            self._end_of_text = (self._end_of_text + part)[-_PRINTED_BYTES:]
        os.close(self._read_fd)

    def close(self) -> None:
        self.file.close()

    def last_line(self) -> str:
        """Returns the last line, after the server has ended, or after a short wait for its end."""
        self.close()
        self._thread.join(_LISTING_S)
        return self._end_of_text.decode(errors="replace").strip().rpartition("\n")[2]


def _text_of_part(part: Any) -> str:
    """Returns a part of a result as text.

    For an image or a similar part, the text is only its kind: ``[image image/png]``.
    """
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


_SERVER_THREADS: dict[str, _ServerThread] = {}
_SERVER_THREADS_LOCK = threading.Lock()


@atexit.register
def end_servers() -> None:
    """Ends all connections of this rank, and the servers that it has started."""
    with _SERVER_THREADS_LOCK:
        servers = list(_SERVER_THREADS.values())
        _SERVER_THREADS.clear()
    for server in servers:
        server.close()
