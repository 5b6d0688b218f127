"""vLLM's HTTP server, with an engine core that needn't import vLLM a second time. For CPUs only.

    python -m treetune.engine.vllm_server --model … --port …

On a CPU, vLLM starts its engine core with a new Python ("spawn"), which imports PyTorch and vLLM once more.
That takes as long as the rest of the server's start. This program forks the engine core's process instead::

    imports vLLM ──forks──► imports the API ────────► HTTP server
                    │                                     │ target, arguments, environment
                    └─────► imports the worker, waits ◄───┘
                                    └───► engine core

It forks before it does anything else, while it has a single thread: a fork has no other thread, and could
wait for ever for a lock of one, or for an OpenMP thread.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkProcess
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

MODULE_OF_THE_WORKER = "vllm.v1.worker.cpu_worker"


class EngineCoreProcess(ForkProcess):
    """The process of the engine core. It is forked at once, and waits until vLLM starts it."""

    def __init__(self) -> None:
        super().__init__(name="EngineCore")
        self._receiver, self._sender = multiprocessing.Pipe(duplex=False)
        super().start()  # forks; the class's own `start` is what vLLM calls later
        self._receiver.close()
        # If the HTTP server ends before it has used the forked process, multiprocessing waits at the exit for
        # that process to end. It ends when the sender is closed.
        atexit.register(self._sender.close)

    def called_with(
        self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]
    ) -> EngineCoreProcess:
        """Stores what this process is to run, and returns the process. vLLM calls this method where it would
        make a `multiprocessing.Process`."""
        self.name = name
        self._call = target, kwargs
        return self

    @override
    def start(self) -> None:
        """Tells the waiting process what to run. By now, vLLM has set environment variables for it."""
        self._sender.send((dict(os.environ), sys.path, self.name, *self._call))

    @override
    def run(self) -> None:
        """Runs what vLLM starts. This method is called in the forked process."""
        self._sender.close()  # while this copy of it is open, the end of the HTTP server goes unnoticed
        importlib.import_module(MODULE_OF_THE_WORKER)  # takes long, so it is done before the target comes
        try:
            environment, paths, self.name, target, kwargs = self._receiver.recv()
        except EOFError:  # the HTTP server has ended
            return
        self._receiver.close()
        for variable, value in environment.items():
            # If all variables were set anew, setproctitle would no longer find the memory with the title.
            if os.environ.get(variable) != value:
                os.environ[variable] = value
        sys.path[:] = paths
        target(**kwargs)


def main() -> None:
    """Runs vLLM's server with the arguments of the command line."""
    import vllm.v1.engine.core  # noqa: F401  (before the fork, as both processes need it)

    core = EngineCoreProcess()
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import utils

    # vLLM calls this function for a context of `multiprocessing`, and starts a `Process` of that context as
    # its engine core.
    utils.get_mp_context = lambda: SimpleNamespace(Process=core.called_with)
    entry.main()


if __name__ == "__main__":
    main()
