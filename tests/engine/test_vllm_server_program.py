"""The program that starts vLLM's server on a CPU with a forked engine core.

Promises that these tests hold with a stand-in for vLLM; other tests start real servers with the program:

* The forked process runs what vLLM starts, with the environment of that time, and vLLM sees its exit code.
* It ends with a server that starts no engine core.
* An engine core is only forked if it computes alone and compiles nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stubs import none_alive, until
from treetune.engine.base import EngineLaunch
from treetune.engine.launch import FORKING_SERVER_PROGRAM, SERVER_PROGRAM, ServerLaunch
from treetune.engine.settings import VllmSettings

PROGRAM = """
import json, multiprocessing, os, setproctitle, signal, sys
from treetune.engine import vllm_server
vllm_server.MODULE_OF_THE_WORKER = "wave"

def run_core(path, code):
    name = multiprocessing.current_process().name
    setproctitle.setproctitle("VLLM::EngineCore")
    with open("/proc/self/cmdline") as file:
        title = file.read().strip("\\0")
    facts = [name, title, os.environ["SET_BY_VLLM"], sys.path[-1], "wave" in sys.modules, os.getppid()]
    with open(path, "w") as file:
        json.dump(facts, file)
    sys.exit(code)

core = vllm_server.EngineCoreProcess()
print(core.pid, flush=True)
end, path = sys.argv[1:]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "without a core":
    sys.exit("a wrong argument")
os.environ["SET_BY_VLLM"] = "later"
sys.path.append("/added")
process = core.called_with(target=run_core, name="EngineCore_7", kwargs={"path": path, "code": 3})
assert process.exitcode is None
process.start()
assert multiprocessing.connection.wait([process.sentinel], 60) == [process.sentinel]
process.join(60)
assert (process.exitcode, process.name) == (3, "EngineCore_7")
"""


def run_program(end: str, path: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """Runs the program, and returns its result and the id of the forked process."""
    command = [sys.executable, "-c", PROGRAM, end, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done, int(done.stdout)


def test_the_forked_process_runs_what_vllm_starts(tmp_path: Path) -> None:
    done, pid = run_program("as usual", tmp_path / "facts.json")
    assert done.returncode == 0, done.stderr
    name, title, variable, path, has_worker, parent = json.loads((tmp_path / "facts.json").read_text())
    assert title == "VLLM::EngineCore", "the guard knows the engine core by it"
    assert (name, variable, path, has_worker) == ("EngineCore_7", "later", "/added", True)
    assert parent not in (pid, os.getpid()), "it is a child of the server"


@pytest.mark.parametrize("end", ["killed", "without a core"])
def test_a_server_that_ends_before_it_starts_an_engine_core_leaves_no_process(
    end: str, tmp_path: Path
) -> None:
    done, pid = run_program(end, tmp_path / "facts.json")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert until(lambda: none_alive([pid]))


@pytest.mark.parametrize(
    ("device", "settings", "program"),
    [
        ("cpu", {}, FORKING_SERVER_PROGRAM),
        ("cpu", {"enforce_eager": False}, SERVER_PROGRAM),
        ("cpu", {"tensor_parallel_size": 2}, SERVER_PROGRAM),
        ("cpu", {"extra_arguments": ("--distributed-executor-backend", "mp")}, SERVER_PROGRAM),
        ("cuda", {}, SERVER_PROGRAM),
    ],
)
def test_an_engine_core_is_only_forked_if_it_computes_alone_and_compiles_nothing(
    device: str, settings: dict[str, object], program: str
) -> None:
    run = EngineLaunch(Path("/weights"), Path("/logs"), seed=3, context_length=256, device=device)
    launch = ServerLaunch(VllmSettings(**settings), run)  # type: ignore[arg-type]
    command = launch.command(Path("/weights"), 1234)
    assert command[command.index("-m") + 1] == program
