"""Fills a table of tiny experiments without paying for the imports of every run.

    python benchmarks/quick_table.py configs/tables/credit_training_first.jsonnet

It is `reproduce_table`, but that one process has everything imported and forks itself for each run: half of
a run of seconds is its imports. For experiments that sample in their own process, on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

CLIENT = """
import os, pickle, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
socket.send_fds(server, [pickle.dumps((sys.argv[2:], dict(os.environ)))], [1, 2])
sys.exit(int(server.recv(16) or b"1"))
"""


def serve(server: socket.socket) -> None:
    """Runs what clients ask for, each in a fork of this process, which writes where the client does."""
    import pickle

    import deepspeed  # noqa: F401
    import torch
    import transformers  # noqa: F401

    from treetune.main import main

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    while True:
        client, _ = server.accept()
        message, files, _, _ = socket.recv_fds(client, 1 << 20, 2)
        # One process for each client waits for its run, so that several runs go on at once.
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            arguments, environment = pickle.loads(message)
            code = run_in_a_fork(partial(main, arguments), files, environment)
            client.sendall(str(code).encode())
            os._exit(0)
        for file in files:
            os.close(file)
        client.close()


def reap() -> None:
    """Takes note of ended children, which would otherwise stay as zombies."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def run_in_a_fork(run: Callable[[], int], files: list[int], environment: dict[str, str]) -> int:
    """Returns the exit code of `run` in a child process with this output, error output and environment."""
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
        os.environ.update(environment)
        code = 1
        try:
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", help="a table's configuration")
    parser.add_argument("--output", type=Path, help="copy the table's files there as well")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, one core each (default: 1)")
    options = parser.parse_args()
    import treetune.parts  # noqa: F401  (registers all parts)
    from treetune.config.build import build
    from treetune.config.jsonnet import load
    from treetune.tables.launch import Launcher, reproduce
    from treetune.tables.runs import TableRuns
    from treetune.tables.settings import Reproduction, Table
    from treetune.tables.write import copy_files, write_runs_table

    table = build(Table, load([options.table]).data)
    if not isinstance(table, Reproduction):
        raise SystemExit(f"{options.table} is no table of type 'reproduction'")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/runs"
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        if (child := os.fork()) == 0:
            serve(server)
        launcher = Launcher(1, 1, (sys.executable, "-c", CLIENT, path))
        try:
            command = f"python benchmarks/quick_table.py {options.table}"

            def write(plan: TableRuns) -> None:
                copy_files(write_runs_table(plan, command), options.output)

            return reproduce(table, write, launcher, options.at_once)
        finally:
            os.kill(child, 15)
            os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
