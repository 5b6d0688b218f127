"""Small runs in processes that are forked off this one, so that a start takes as long as its work.

    python tests/support/forked_runs.py FOLDER JSONNET

carries one out in a process of its own, which is a rank where the environment says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.experiment_runs import CONFIG, Experiment
from treetune.runtime.base import PolicyIteration, Runtime

DEADLINE_S = 1800.0
POLL_S = 0.005


@dataclass(frozen=True)
class ForkedRun:
    """The small experiment with Jsonnet objects on its right. The run's own process samples, in place of a
    server."""

    experiment: Experiment
    overrides: Sequence[str]

    @property
    def output(self) -> Path:
        return self.experiment.base / "output"

    def start(self) -> int:
        """The process that carries the run out, or goes on with it; its id."""
        self.experiment.base.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            with self.output.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            self.run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def end(self, process: int) -> None:
        """Waits for the process's end. Raises SystemExit with what the run said where it failed."""
        if code := wait_until(lambda: False, process):
            raise SystemExit(f"{self.experiment.base} ended with {code}:\n{self.output.read_text()[-4000:]}")

    def run(self) -> None:
        """Carries it out in this process."""
        import treetune.parts  # noqa: F401  (registers them)
        from treetune.config.build import build
        from treetune.config.explain import Explanation
        from treetune.config.jsonnet import load
        from treetune.engine.settings import Engines, InProcessSettings
        from treetune.runtime.commands import run_iteration_loop

        place = f"{{ directory: '{self.experiment.base}' }}"
        loaded = load([str(CONFIG)], [*self.overrides, place], environment_keys=())
        config = build(Runtime, loaded.data, Explanation(loaded))
        assert isinstance(config, PolicyIteration)
        run_iteration_loop(replace(config, engines=Engines(policy=InProcessSettings())), loaded.data)


def wait_until(condition: Callable[[], bool], process: int) -> int | None:
    """Waits for the condition, within the deadline; the exit code of a process that ends before."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise SystemExit(f"no end within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    ForkedRun(Experiment(Path(sys.argv[1])), sys.argv[2:]).run()
