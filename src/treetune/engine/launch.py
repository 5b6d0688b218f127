"""A server process: its command line and environment, its start under a guard on a free port, its log and
its end."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

import treetune
from treetune.engine import guard, key
from treetune.engine.base import EngineLaunch, TransferMethod
from treetune.engine.client import MODEL_NAME, Address
from treetune.engine.settings import GIB, VllmSettings
from treetune.inherited import without_secrets
from treetune.store import held_folders

ADAPTER_CONFIG = "adapter_config.json"
"""A folder of adapters has it, in the format of peft."""

LOOPBACK = "127.0.0.1"

START_MODEL_NAME = "start-model"
"""The name of the model whose adapters are the policy."""

BACKENDS: Mapping[TransferMethod, str] = {
    "shared_memory": "treetune_shared_memory",
    "cuda_ipc": "ipc",
    "nccl": "nccl",
}
"""vLLM's names of the transfers."""

PACKED_EXPERTS = "treetune.engine.packed_experts.PackedExpertsExtension"
WORKER_EXTENSION = "treetune.engine.shared_memory_worker.SharedMemoryExtension"
WHOLE_ANSWERS = "treetune.engine.whole_answers"

READ_PER_SECOND = GIB / 5
"""Bytes that a server reads of its weights in a second, at least: an estimate, half of what a slow shared
file system gives."""

UNPLANNED_SHARE = 0.85
"""The share of a GPU of a server that has it alone or that nobody has planned, unless settings say it."""

END_S = 30.0
"""Seconds that an ended server, its guard included, may take to be gone."""

_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be set to hold."""

_SOURCES = Path(treetune.__file__).parents[1]

_FROM_THE_LAUNCHER = (
    # DeepSpeed's launcher tells a rank about itself; vLLM would take part in that group.
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"),
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PMI_", "OMPI_", "SLURM_")

_ENGINE = f"{held_folders.PREFIX}engine-"
_SOCKET_BYTES = 107
"""Bytes of a Unix socket's path at most (Linux)."""
_NAME_BYTES = len(_ENGINE) + 8 + 2 + len("00000000-0000-0000-0000-000000000000")
"""Bytes of a path below the folder of temporary files: the server's folder, and a socket of vLLM's in it."""


@dataclass(frozen=True)
class ServerLaunch:
    """Everything but the weights and the port that decides how a server is started."""

    settings: VllmSettings
    run: EngineLaunch
    is_trained: bool = True
    """Whether its weights are exchanged; else they are served as they are on disk."""
    replica: int = 0
    """The server's number among this rank's."""
    host: str = LOOPBACK
    """The address that it listens on: this machine's loopback unless others are to reach it."""

    def command(self, weights: Path, port: int) -> list[str]:
        """Returns the server's command line."""
        settings, device, adapter_rank = self.settings, self.run.device, self.run.adapter_rank
        cuda = device == "cuda"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(port)]
        if self.run.trust_remote_code:
            command += ["--trust-remote-code"]
        if adapter_rank is None:
            command += ["--model", str(weights), "--served-model-name", MODEL_NAME]
        else:
            largest = next((rank for rank in _ADAPTER_RANKS if rank >= adapter_rank), None)
            if largest is None:
                raise ValueError(
                    f"vLLM adds adapters of rank {_ADAPTER_RANKS[-1]} at most, and trainer.lora.rank is"
                    f" {adapter_rank}: lower it, or set trainer.lora.send to 'merged'"
                )
            model = json.loads((weights / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
            command += ["--model", model, "--served-model-name", START_MODEL_NAME]
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(largest)]
            command += ["--lora-modules", f"{MODEL_NAME}={weights}"]
        command += ["--dtype", settings.resolved_dtype(device), "--seed", str(self.run.seed % 2**32)]
        command += ["--max-model-len", str(self.context_length)]
        command += ["--max-num-seqs", str(settings.max_num_seqs)]
        # vLLM refuses a budget below one sequence's length where prompts aren't cut.
        longest = 0 if cuda else self.context_length
        tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs, longest)
        command += ["--max-num-batched-tokens", str(tokens)]
        # Answers before continuations of others, which wait in one queue with them.
        command += ["--scheduling-policy", "priority"]
        # Nobody reads an answer before it is whole, nor statistics of each token.
        scheduler = "AsyncWholeAnswers" if cuda and settings.async_scheduling else "WholeAnswersScheduler"
        command += ["--scheduler-cls", f"{WHOLE_ANSWERS}.{scheduler}", "--disable-log-stats"]
        command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        # The model's own generation_config would change temperature, top-p and top-k behind our back.
        command += ["--generation-config", "vllm"]
        # A tied head keeps its old packed copy when weights are exchanged in place; the directories
        # that are served hold the head as a tensor of its own.
        if self.is_trained:
            command += ["--hf-overrides", '{"tie_word_embeddings": false}']
        # Log-probs of the distribution that was really sampled from, after temperature and top-p.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
        # The last one is asked first.
        command += ["--middleware", f"{WHOLE_ANSWERS}.SamplesRoute"]
        command += ["--middleware", f"{key.__name__}.{key.KeyRequired.__name__}"]
        command += [f"--{'' if settings.caches_prefixes(device) else 'no-'}enable-prefix-caching"]
        command += [f"--{'' if settings.async_scheduling else 'no-'}async-scheduling"]
        if not cuda:
            # A prompt cut over two steps takes back its first seeded draw, which a CPU's generator can't:
            # the engine dies as soon as a wave of prompts is longer than the budget.
            command += ["--no-enable-chunked-prefill"]
            # Attention on a CPU reads whole blocks: at vLLM's 128 tokens, short answers cost a tenth more.
            command += ["--block-size", "32"]
        if self._eager:
            command += ["--enforce-eager"]
        if self._one_process_computes:
            command += ["--distributed-executor-backend", "uni"]
        if cuda:
            command += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization or UNPLANNED_SHARE)]
        if settings.sleep:
            command += ["--enable-sleep-mode"]
        transfer = self.run.transfer if self.is_trained else "file"
        if transfer != "file":
            command += ["--weight-transfer-config", json.dumps({"backend": BACKENDS[transfer]})]
            command += ["--worker-extension-cls", WORKER_EXTENSION]
        elif self.is_trained and not cuda:
            command += ["--worker-extension-cls", PACKED_EXPERTS]
        return [*command, *settings.extra_arguments]

    def environment(self, scratch: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the server's environment: the inherited one without keys, and without the launcher's
        variables."""
        settings, device = self.settings, self.run.device
        before = tempfile.gettempdir()
        environment = {
            name: value
            for name, value in without_secrets(inherited).items()
            if name not in _FROM_THE_LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
        }
        if self.is_trained:
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes that exchange weights
        environment |= {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
            # PyTorch's compiled code is kept where it would be without a folder of the server's own.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or str(Path(before) / f"torchinductor_{getpass.getuser()}"),
            # Longer than the client keeps one: a request on a connection that the server just closed would
            # look like a failure of the server, and on a busy machine its 5 s are not far from our 3.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
            "OMP_NUM_THREADS": str(settings.threads(self.run.ranks.world_size)),
            # The server imports the middleware that asks for its key.
            "PYTHONPATH": os.pathsep.join(filter(None, [inherited.get("PYTHONPATH"), str(_SOURCES)])),
        }
        if self.run.adapter_rank is not None:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # opens the route that exchanges adapters
        if self.is_trained and self.run.transfer == "cuda_ipc":
            # Handles of a GPU's memory travel pickled, to a server that listens to who knows its key.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible_devices(inherited))
            # It draws for no request with a seed, and ours have one: vLLM needn't have nvcc compile it.
            environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
            if settings.resolved_dtype(device) == "float32":
                # Triton's dot products, vLLM's attention in float32, round to TF32 otherwise.
                environment["TRITON_F32_DEFAULT"] = "ieee"
            if settings.batch_invariant:
                environment["VLLM_BATCH_INVARIANT"] = "1"
        else:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self._one_process_computes:
                # vLLM refuses the executor without workers otherwise; the engine core is a process of
                # its own all the same.
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if self._eager:
                # One small function of the log-probs is left to compile: 15 s for no gain.
                environment["TORCH_COMPILE_DISABLE"] = "1"
        return environment

    @property
    def context_length(self) -> int:
        return self.settings.context_length or self.run.context_length

    @property
    def _eager(self) -> bool:
        eager = self.settings.enforce_eager
        return self.run.device != "cuda" if eager is None else eager

    @property
    def _one_process_computes(self) -> bool:
        """True if there is no worker process beside the engine core: on a CPU it only adds messages between
        the two, with a tiny model on two cores a third of the time."""
        set_by_user = any(
            argument.startswith("--distributed-executor-backend")
            for argument in self.settings.extra_arguments
        )
        return self.run.device != "cuda" and self.settings.tensor_parallel_size == 1 and not set_by_user

    def _visible_devices(self, inherited: Mapping[str, str]) -> list[str]:
        """Returns the server's GPUs: of those that the settings name, or else the trainer's own."""
        listed = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        settings, rank = self.settings, self.run.ranks.rank
        size, count = settings.tensor_parallel_size, settings.replicas_on(self.run.device)
        local_rank = int(inherited.get("LOCAL_RANK", rank)) if settings.servers == "per_rank" else 0
        start = (local_rank * count + self.replica) * size
        indices = settings.devices[start:][:size] if settings.devices else range(start, start + size)
        if len(indices) < size or (listed and max(indices) >= len(listed)):
            which = f"server {self.replica + 1} of {count}" if count > 1 else "engine"
            raise ValueError(
                f"the {which} of rank {rank} needs GPUs {list(indices) or '(none left)'}, and this"
                f" process sees {len(listed)}: change engines.policy.replicas, engines.policy.devices or"
                " engines.policy.tensor_parallel_size"
            )
        return [listed[index] if listed else str(index) for index in indices]


def with_time_for(settings: VllmSettings, weights: Path) -> VllmSettings:
    """Returns the settings with more seconds to start and to sync, by the size of the weights."""
    about = weights / ADAPTER_CONFIG
    if about.is_file():
        weights = Path(json.loads(about.read_text())["base_model_name_or_path"])
    more = sum(file.stat().st_size for file in weights.glob("*.safetensors")) / READ_PER_SECOND
    return replace(
        settings,
        start_timeout=settings.start_timeout + more,
        sync_timeout=settings.sync_timeout + more,
    )


class ServerProcess:
    """A server process under its guard, on a free port and with a new key, or on and with those of the
    arguments. Its environment is the launch's and `variables`."""

    def __init__(
        self,
        launch: ServerLaunch,
        weights: Path,
        log: Path,
        *,
        port: int | None = None,
        server_key: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = port or free_port()
        self.url = f"http://{launch.host}:{self.port}"
        self.key = server_key or secrets.token_urlsafe(32)
        folder = scratch_folder()
        command = launch.command(weights, self.port)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"\n=== {time.strftime('%F %T')} {' '.join(command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            watcher = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder)]
            # A session of its own: Ctrl-C in the terminal is ours to handle, not the server's.
            self._guard = subprocess.Popen(
                [*watcher, *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=launch.environment(folder) | {key.VARIABLE: self.key, **(variables or {})},
                start_new_session=True,
                bufsize=0,
            )
        self._scratch = folder

    def address(self, epoch: int = 0) -> Address:
        return Address(self.url, epoch, self.key)

    def pid(self) -> int | None:
        """Returns the server's own process ID, or None once it is gone. The guard started it first."""
        try:
            return min(psutil.Process(self._guard.pid).children(), key=lambda child: child.create_time()).pid
        except (psutil.Error, ValueError):
            return None

    def exit_code(self) -> int | None:
        """Returns None while it runs."""
        return self._guard.poll()

    def end(self, *, at_once: bool = False) -> None:
        """Ends the server and everything below it, and waits for that."""
        if self._guard.poll() is None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.write(guard.END_NOW if at_once else b"q")
            try:
                self._guard.wait(END_S)
            except subprocess.TimeoutExpired:
                # The session's leader is the guard: its process group is the server's and nobody else's.
                os.killpg(self._guard.pid, signal.SIGKILL)
                self._guard.wait(END_S)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def log_text(self) -> str:
        """Returns the end of this start's log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - 200_000))
            return file.read().decode(errors="replace")
        return ""


def free_port() -> int:
    """Returns a port of this machine's loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def listens(port: int, host: str = LOOPBACK) -> bool:
    """Returns whether somebody listens on this port, of this machine's loopback or another of its
    addresses."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def scratch_folder() -> Path:
    """Makes a folder for a server's sockets and temporary files, held by this process."""
    held_folders.sweep()
    folder = Path(tempfile.mkdtemp(prefix=_ENGINE))
    held_folders.hold(folder)
    return folder


def refuse_long_paths() -> None:
    """Raises ValueError if a server's sockets couldn't have their paths."""
    folder = os.fsencode(tempfile.gettempdir())
    most = _SOCKET_BYTES - _NAME_BYTES
    if len(folder) > most:
        raise ValueError(
            f"the folder for temporary files is {os.fsdecode(folder)}, {len(folder)} bytes long: the engine's"
            f" sockets lie there, and Linux allows their paths {_SOCKET_BYTES} bytes. Set TMPDIR to a folder"
            f" of at most {most}, such as /tmp"
        )


# The log

LOG_LINES = 25
ERROR_CHARACTERS = 300


def last_lines(log: Path) -> str:
    """Returns the end of a log for an error message, and its path."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return f"(its log {log} can't be read: {error})"
    return f"The end of its log, {log}:\n" + "\n".join(f"  | {line}" for line in lines)


_LOGGED = re.compile(r"^\(\w+ pid=\d+\) (?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""vLLM's prefix of each line of a traceback in the log."""

_ERROR = re.compile(
    r"(?:Fatal Python error: .*"
    r"|[\w.-]+: error: .*"  # of the command line
    r"|[\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$"
)

_SAYS_NOTHING = ("engine core initialization failed", "see root cause above", "see stack trace")
"""Errors that stand for another process's, which is in the log before them."""


def ending_error(log_text: str) -> str:
    """Returns the error that ended the server, or "": the last in its log that isn't about another one.

    Warnings and the lines of tracebacks are passed over: a server names many dangers that don't come true.
    """
    lines = [_LOGGED.sub("", line) for line in log_text.splitlines()]
    for number in reversed(range(len(lines))):
        if not _ERROR.match(lines[number]) or any(words in lines[number].lower() for words in _SAYS_NOTHING):
            continue
        error = lines[number]
        # A validation error's own words stand indented below it.
        for line in lines[number + 1 :]:
            if not line.startswith("  ") or line.lstrip().startswith("For further information"):
                break
            error += f" {line.strip()}"
        error = error.partition(" [type=")[0]
        return error if len(error) <= ERROR_CHARACTERS else f"{error[:ERROR_CHARACTERS]}…"
    return ""


_NO_MEMORY = ("out of memory", "cannot allocate memory", "available memory on node", "free memory on device")
_NO_CACHE = ("no available memory for the cache blocks", "available kv cache memory")

_REMEDIES: list[tuple[Callable[[str], bool], str]] = [
    (
        lambda error: "greater than the derived max_model_len" in error,
        "the model's context is shorter than the engine's: lower context_length, or take a model with a"
        " longer context",
    ),
    (
        lambda error: any(words in error for words in _NO_CACHE),
        "too little memory is left for keys and values: raise gpu_memory_utilization (on a CPU kv_cache_gib),"
        " or lower context_length",
    ),
    (
        lambda error: any(words in error for words in _NO_MEMORY),
        "out of memory: lower gpu_memory_utilization, kv_cache_gib, max_num_seqs or context_length",
    ),
    (
        lambda error: "no space left on device" in error or "bus error" in error,
        "no room in /dev/shm (a container needs --ipc=host)",
    ),
    (lambda error: "address already in use" in error, "every port that was tried was taken"),
    (lambda error: "cannot find any model weights" in error, "the model's folder holds no weights"),
    (lambda error: "incomplete metadata" in error or "safetensor" in error, "the weights are not whole"),
    (lambda error: "unsupported cpu attention" in error, "on a CPU the head dimension must be at least 32"),
    (lambda error: "no module named 'vllm'" in error, "vLLM is not installed here: run the set-up"),
    (lambda error: "too many open files" in error, "too few open files allowed: raise `ulimit -n`"),
    (
        lambda error: "unrecognized arguments" in error or "max_num_batched_tokens" in error,
        "engines.policy.extra_arguments has what this vLLM doesn't take",
    ),
]


def diagnosis(log_text: str) -> str:
    """Returns sentences about the error that ended the server and the likely remedy, or ""."""
    error = ending_error(log_text)
    if not error:
        return ""
    remedy = next((words for matches, words in _REMEDIES if matches(error.lower())), None)
    return f" It ended with {error!r}." + (f" Likely: {remedy}." if remedy else "")
