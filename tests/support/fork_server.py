"""Starts programs as forks of one process that has imported what a run needs.

The imports of a small run take longer than its work. A fork is a process like one that the command line
starts: it has a session, a title, an environment and files of its own, it gets real signals, and SIGKILL ends
it alone::

    this process ──asks──► fork server ──forks──► waiter ──forks──► command
          ▲                                         │
          └──────── process id and exit code ◄──────┘

The server is no child of this process, so that tests which count the processes below this one don't see it.
It ends when this process does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, TypedDict

from treetune.runtime.machine import list_gpus
from treetune.store import held_folders

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
MAIN = SOURCES / "treetune/main.py"
MODULES = (
    "deepspeed",
    "peft",
    "pandas",
    "torch._dynamo.convert_frame",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "treetune.cli.arguments",
    "treetune.parts",
    "treetune.runtime.commands",
    "treetune.trainer.core",
    "treetune.trainer.deepspeed_model",
    "treetune.trainer.preparation",
    "treetune.trainer.probe",
)
LARGEST_REQUEST = 100_000
RANKS_DEADLINE_S = 900.0


class ForkRequest(TypedDict):
    """A program that the server is asked to start."""

    program: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]


@dataclass
class ForkedCommand:
    """A command that the server has started. It has the methods of `subprocess.Popen` that tests call."""

    pid: int
    replies: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._read_code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Kills the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self.replies], [], [], timeout)[0]:
            self.returncode = int(self.replies.recv(64))
            self.replies.close()
        return self.returncode


def start_forked(
    arguments: Sequence[str],
    *,
    program: Path = MAIN,
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[bytes],
) -> ForkedCommand:
    """Starts a Python program with these arguments, in a session of its own, and returns at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request: ForkRequest = {
        "program": str(program),
        "arguments": list(arguments),
        "folder": str(cwd.absolute()),
        "environment": dict(environment),
    }
    message = json.dumps(request).encode()
    assert len(message) <= LARGEST_REQUEST
    with theirs:
        socket.send_fds(_server(), [message], [theirs.fileno(), output.fileno()])
    return ForkedCommand(int(ours.recv(64)), ours)


def run_forked_ranks(
    program: Path,
    arguments: Sequence[str],
    ranks: int,
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs a Python program on several ranks to its end. Fails with the output of a rank that fails.

    Args:
        folder: The folder that gets the output of each rank.
        variables: Further environment variables.
    """
    of_others = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in of_others}
    meeting = folder / "meeting"
    meeting.mkdir(mode=0o700)
    environment |= {
        **variables,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{ROOT}",
        # Otherwise ranks find each other by their parent, and each fork has a waiter of its own.
        held_folders.MEETING_VARIABLE: str(meeting),
    }
    outputs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    with socket.socket() as holder, contextlib.ExitStack() as stack:
        # The first rank can listen on its port, as it too lets others bind it, and the kernel gives it to
        # nobody else meanwhile.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
        processes = []
        for rank, output in enumerate(outputs):
            of_rank: dict[str, str] = {}
            if ranks > 1:
                of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                of_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with output.open("wb") as file:
                process = start_forked(
                    arguments, program=program, cwd=ROOT, environment=environment | of_rank, output=file
                )
            stack.callback(process.kill)
            processes.append(process)
        for process, output in zip(processes, outputs, strict=True):
            assert process.wait(RANKS_DEADLINE_S) == 0, output.read_text()[-3000:]


@cache
def _server() -> socket.socket:
    """Starts the server, once in each process that asks for it, and returns the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)}
    with theirs:
        number = theirs.fileno()
        command = ["setsid", "--fork", sys.executable, "-P", __file__, str(number)]
        subprocess.run(command, cwd=ROOT, env=environment, pass_fds=[number], check=True)
    return ours


def serve(requests: socket.socket) -> ForkRequest | None:
    """Forks for each request until the process that asks has ended.

    Returns the request in the forked command, and None in the server.
    """
    if not list_gpus():
        # Otherwise DeepSpeed warns that it finds no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for module in MODULES:
        importlib.import_module(module)
    # What is imported is never freed, and the forks need not look through it and so copy it.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the waiters
    while True:
        message, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 2)
        if not message:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            replies, output = files
            return fork_and_wait(json.loads(message), socket.socket(fileno=replies), output)
        for file in files:
            os.close(file)


def fork_and_wait(request: ForkRequest, replies: socket.socket, output: int) -> ForkRequest:
    """Forks the command, in which it returns the request. The waiter reports its end, and never returns."""
    command = os.fork()
    if command == 0:
        prepare(request, output)
        replies.send(str(os.getpid()).encode())
        replies.close()
        return request
    os.close(output)
    _, status = os.waitpid(command, 0)
    try:
        replies.send(str(os.waitstatus_to_exitcode(status)).encode())
    finally:  # the process that asked may have ended meanwhile
        os._exit(0)


def prepare(request: ForkRequest, output: int) -> None:
    """Gives this process what a command has that is started in a session of its own."""
    import setproctitle

    os.setsid()
    # Under nohup the tests ignore SIGHUP, and so would the command.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Python sets these from the command line and the environment.
    program = request["program"]
    further = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    libraries = [folder for folder in sys.path if folder != str(SOURCES)]
    sys.path[:] = [str(Path(program).parent), *filter(None, further), *libraries]
    sys.argv = [program, *request["arguments"]]
    setproctitle.setproctitle(" ".join([sys.executable, *sys.argv]))


if __name__ == "__main__":
    requested = serve(socket.socket(fileno=int(sys.argv[1])))
    if requested is None:
        os._exit(0)  # at once, as there is nothing to write or to close
    runpy.run_path(requested["program"], run_name="__main__")
