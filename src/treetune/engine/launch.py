"""Starts a vLLM server process, reads its log, and ends it.

::

    this process ──starts──► guard ──starts──► server ──starts──► engine core, workers

The guard (`treetune.engine.guard`) ends everything below it when this process is gone or asks for it, or when
the server has ended.
"""

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
from typing import TypeVar

import psutil

import treetune
from treetune.engine import guard, key
from treetune.engine.base import EngineLaunch, TransferMethod
from treetune.engine.client import MODEL_NAME, Address
from treetune.engine.settings import GIB, PlainVllmSettings, VllmSettings
from treetune.inherited import remove_secrets
from treetune.store import held_folders

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a folder of adapters is recognised, in the format of peft."""

LOOPBACK = "127.0.0.1"

START_MODEL_NAME = "start-model"
"""The name of the model whose adapters are the policy."""

BACKEND_OF_METHOD: Mapping[TransferMethod, str] = {
    "shared_memory": "treetune_shared_memory",
    "cuda_ipc": "ipc",
    "nccl": "nccl",
}
"""The names that vLLM has for the transfers."""

# The classes and the module of this project that a server's processes load.
PACKED_EXPERTS = "treetune.engine.packed_experts.PackedExpertsExtension"
WORKER_EXTENSION = "treetune.engine.shared_memory_worker.SharedMemoryExtension"
WHOLE_ANSWERS_MODULE = "treetune.engine.whole_answers"

SERVER_PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
"""The module with the server that ``vllm serve`` runs. The command itself fails in the CPU build of vLLM,
which has no package metadata under the name vllm; ``vllm.entrypoints.openai.api_server`` is deprecated."""

FORKING_SERVER_PROGRAM = "treetune.engine.vllm_server"
"""The module with the same server, whose engine core is forked. It starts in half of the time."""

BYTES_READ_PER_S = GIB / 5
"""The bytes of its weights that a server reads at least in a second. This is an estimate: half the speed of a
slow shared file system."""

DEFAULT_MEMORY_SHARE = 0.85
"""The share of a GPU's memory that a server takes if the share is neither configured nor planned."""

SERVER_END_TIMEOUT_S = 30.0
"""Most seconds until a server that was told to end and its guard are gone."""

_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``--max-lora-rank``."""

_SOURCES = Path(treetune.__file__).parents[1]

_LAUNCHER_VARIABLES = (
    # With these variables of DeepSpeed's launcher, vLLM would try to join the ranks' process group.
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"),
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PMI_", "OMPI_", "SLURM_")

_SCRATCH_PREFIX = f"{held_folders.FOLDER_PREFIX}engine-"
_MOST_SOCKET_PATH_BYTES = 107
"""The most bytes of a Unix socket's path (Linux)."""
_BYTES_AFTER_TEMPORARY_FOLDER = len(_SCRATCH_PREFIX) + 8 + 2 + len("00000000-0000-0000-0000-000000000000")
"""The bytes that a socket's path has in addition to the folder for temporary files: the server's folder, and
the socket's name, which vLLM draws."""


TimedSettings = TypeVar("TimedSettings", VllmSettings, PlainVllmSettings)


@dataclass(frozen=True)
class ServerLaunch:
    """The settings with which a server is started, except for its weights and its port."""

    settings: VllmSettings
    run: EngineLaunch
    is_trained: bool = True
    """Whether new weights will be loaded into it."""
    replica: int = 0
    """The number of the server among this rank's servers, from 0."""
    host: str = LOOPBACK
    """The address on which it listens: the loopback, unless other machines must reach it."""

    def command(self, weights: Path, port: int) -> list[str]:
        """Returns the server's command line.

        Raises:
            ValueError: vLLM doesn't support the adapters, or computes this model differently.
        """
        refuse_wider_windows(weights, self.context_length)
        settings, device = self.settings, self.run.device
        cuda = device == "cuda"
        program = FORKING_SERVER_PROGRAM if self._engine_core_is_forked else SERVER_PROGRAM
        command = [sys.executable, "-m", program]
        command += ["--host", self.host, "--port", str(port)]
        if self.run.trust_remote_code:
            command += ["--trust-remote-code"]
        command += self._model_arguments(weights)
        # vLLM also seeds NumPy's generator, which takes 32 bits.
        command += ["--dtype", settings.resolved_dtype(device), "--seed", str(self.run.seed % 2**32)]
        command += ["--max-model-len", str(self.context_length)]
        command += ["--max-num-seqs", str(settings.max_num_seqs)]
        tokens = settings.tokens_of_a_step(device, self.context_length)
        command += ["--max-num-batched-tokens", str(tokens)]
        # Answers and continuations wait in the same queue, and answers come first.
        command += ["--scheduling-policy", "priority"]
        # Either scheduler returns an answer only when it is complete. On a CPU, vLLM itself switches
        # asynchronous scheduling off.
        scheduler = "AsyncWholeAnswers" if cuda and settings.async_scheduling else "WholeAnswersScheduler"
        command += ["--scheduler-cls", f"{WHOLE_ANSWERS_MODULE}.{scheduler}"]
        command += ["--disable-log-stats"]  # nobody reads vLLM's statistics of each token
        command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        # Without this argument, the model's generation_config would change temperature, top-p and top-k.
        command += ["--generation-config", "vllm"]
        # vLLM keeps a packed copy of a head that is tied to the embeddings, and loading new weights wouldn't
        # update the copy. So vLLM is told that the head isn't tied. The folders of weights that it loads have
        # the head as a separate tensor.
        if self.is_trained:
            command += ["--hf-overrides", '{"tie_word_embeddings": false}']
        # The log-probs of the distribution that is sampled from, after temperature and top-p.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
        # A request passes the last middleware first: `KeyRequired` sees a request before `SamplesRoute` does.
        command += ["--middleware", f"{WHOLE_ANSWERS_MODULE}.SamplesRoute"]
        command += ["--middleware", f"{key.__name__}.{key.KeyRequired.__name__}"]
        command += [f"--{'' if settings.caches_prefixes(device) else 'no-'}enable-prefix-caching"]
        command += [f"--{'' if settings.async_scheduling else 'no-'}async-scheduling"]
        if not cuda:
            # Without chunked prefill, no prompt is cut into two steps. After the first of two such steps,
            # vLLM resets the request's random generator, which on a CPU raises an error that ends the engine.
            command += ["--no-enable-chunked-prefill"]
            # Attention on a CPU reads whole blocks. With vLLM's 128 tokens, short answers take 10 % longer.
            command += ["--block-size", "32"]
        if self._is_eager:
            command += ["--enforce-eager"]
        if self._one_process_computes:
            command += ["--distributed-executor-backend", "uni"]
        if cuda:
            memory_share = settings.gpu_memory_utilization or DEFAULT_MEMORY_SHARE
            command += ["--gpu-memory-utilization", str(memory_share)]
        if settings.sleep:
            command += ["--enable-sleep-mode"]
        if self.is_trained and self.run.transfer != "file":
            backend = BACKEND_OF_METHOD[self.run.transfer]
            command += ["--weight-transfer-config", json.dumps({"backend": backend})]
            command += ["--worker-extension-cls", WORKER_EXTENSION]
        elif self.is_trained and not cuda:
            # On a CPU, vLLM packs the weights of experts for its kernel only when the server starts. With
            # this extension, a worker packs later weights, too.
            command += ["--worker-extension-cls", PACKED_EXPERTS]
        return [*command, *settings.extra_arguments]

    def _model_arguments(self, weights: Path) -> list[str]:
        """Returns the arguments for the model that is served.

        The folder `weights` has a whole model, or only an adapter. With an adapter, the server loads the
        model that the adapter belongs to, and serves the adapter as `MODEL_NAME`. Raises ValueError for an
        adapter of a rank that vLLM doesn't support.
        """
        adapter_rank = self.run.adapter_rank
        if adapter_rank is None:
            return ["--model", str(weights), "--served-model-name", MODEL_NAME]
        # The largest rank that the server has to allow. vLLM accepts only the values in `_ADAPTER_RANKS`.
        max_rank = next((rank for rank in _ADAPTER_RANKS if rank >= adapter_rank), None)
        if max_rank is None:
            raise ValueError(
                f"trainer.lora.rank is {adapter_rank}, and vLLM supports adapters up to rank"
                f" {_ADAPTER_RANKS[-1]}: lower it, or set trainer.lora.send to 'merged'"
            )
        model = json.loads((weights / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
        return [
            *("--model", model, "--served-model-name", START_MODEL_NAME),
            *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(max_rank)),
            *("--lora-modules", f"{MODEL_NAME}={weights}"),
        ]

    def environment(self, scratch: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the environment of the server: the inherited one without secrets and without the launcher's
        variables, and vLLM's settings.

        Raises:
            ValueError: The server needs GPUs that this process doesn't have.
        """
        settings, device = self.settings, self.run.device
        # By default, PyTorch keeps compiled code in the folder for temporary files. The server's own such
        # folder, `scratch`, is deleted with the server, and the code has to outlive it. So the code is kept
        # in the folder where this process would keep it.
        folder_of_compiled_code = inherited.get("TORCHINDUCTOR_CACHE_DIR")
        if not folder_of_compiled_code:
            folder_of_compiled_code = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
        environment = {}
        # The launcher started the ranks. With its variables, such as RANK, vLLM would try to join the ranks'
        # process group.
        for name, value in remove_secrets(inherited).items():
            if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES):
                environment[name] = value
        if self.is_trained:
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes that load weights
        environment |= {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
            "TORCHINDUCTOR_CACHE_DIR": folder_of_compiled_code,
            # Much longer than the client's `KEEP_ALIVE_S`. If the server closed a connection just when the
            # client uses it again, that would look like a failure of the server.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
            "OMP_NUM_THREADS": str(settings.threads(self.run.ranks.world_size)),
            # The server imports the middleware that asks for its key.
            "PYTHONPATH": os.pathsep.join(filter(None, [inherited.get("PYTHONPATH"), str(_SOURCES)])),
        }
        if self.run.adapter_rank is not None:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # opens the route that loads adapters
        if self.is_trained and self.run.transfer == "cuda_ipc":
            # Handles of GPU memory are sent as pickles. The server accepts them only with its key.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible_devices(inherited))
            # vLLM doesn't use this sampler for requests with seeds, and all of ours have one. So the sampler
            # is switched off, and needn't be compiled.
            environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
            if settings.resolved_dtype(device) == "float32":
                # By default, Triton's dot products, with which vLLM computes attention, would use TF32.
                environment["TRITON_F32_DEFAULT"] = "ieee"
            if settings.batch_invariant:
                environment["VLLM_BATCH_INVARIANT"] = "1"
        else:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
            # By default, each server would bind its threads to cores that it chooses without knowing of the
            # other servers. So all servers would share the same cores.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self._one_process_computes:
                # Without this variable, vLLM refuses the executor that has no workers. The engine core still
                # runs in a process apart from the HTTP server.
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if self._is_eager:
                # Without this, one small function would still be compiled, which takes 15 s and gains
                # nothing.
                environment["TORCH_COMPILE_DISABLE"] = "1"
        return environment

    @property
    def context_length(self) -> int:
        return self.settings.context_length or self.run.context_length

    @property
    def _is_eager(self) -> bool:
        """Whether vLLM runs the model without compilation and CUDA graphs."""
        eager = self.settings.enforce_eager
        return self.run.device != "cuda" if eager is None else eager

    @property
    def _one_process_computes(self) -> bool:
        """Whether the engine core computes without worker processes.

        On a CPU, a worker would only add messages between the engine core and the worker. With a tiny model
        on two cores, these messages take a third of the time.
        """
        set_by_user = any(
            argument.startswith("--distributed-executor-backend")
            for argument in self.settings.extra_arguments
        )
        return self.run.device != "cuda" and self.settings.tensor_parallel_size == 1 and not set_by_user

    @property
    def _engine_core_is_forked(self) -> bool:
        """Whether the engine core is a fork of the HTTP server, so that vLLM is imported only once.

        The fork is made when the server starts, before vLLM sets environment variables for the engine core.
        For an engine core with compiled code or with worker processes, some of these would come too late.
        """
        return self._one_process_computes and self._is_eager and not self.settings.extra_arguments

    def _visible_devices(self, inherited: Mapping[str, str]) -> list[str]:
        """Returns the names of the server's GPUs, from `devices` or, without it, from the trainer's.

        Example: with two GPUs for each server, the second of a rank's servers gets ``["2", "3"]``.
        """
        visible = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        settings, rank = self.settings, self.run.ranks.rank
        size = settings.tensor_parallel_size  # the GPUs of a server
        count = settings.replicas_on(self.run.device)  # the servers of an engine
        servers_before = self.replica
        if settings.servers == "per_rank":  # the engines of this machine's earlier ranks come first
            servers_before += int(inherited.get("LOCAL_RANK", rank)) * count
        start = servers_before * size
        indices = settings.devices[start : start + size] if settings.devices else range(start, start + size)
        fault = ""
        if len(indices) < size:
            fault = f"{size} GPUs, and engines.policy.devices has {len(indices) or 'none'} left for it"
        elif visible and max(indices) >= len(visible):
            fault = f"GPUs {list(indices)}, and this process sees {len(visible)}"
        if fault:
            server_name = f"server {self.replica + 1} of {count}" if count > 1 else "engine"
            raise ValueError(
                f"the {server_name} of rank {rank} needs {fault}: change engines.policy.replicas,"
                " engines.policy.devices or engines.policy.tensor_parallel_size"
            )
        return [visible[index] if visible else str(index) for index in indices]


def add_reading_time(settings: TimedSettings, weights: Path) -> TimedSettings:
    """Returns settings with longer timeouts of the start and of syncs: they are longer by the time that
    reading the weights takes."""
    adapter_config = weights / ADAPTER_CONFIG
    if adapter_config.is_file():  # the server reads the model that the adapters belong to
        weights = Path(json.loads(adapter_config.read_text())["base_model_name_or_path"])
    weight_bytes = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    reading_s = weight_bytes / BYTES_READ_PER_S
    return replace(
        settings,
        start_timeout=settings.start_timeout + reading_s,
        sync_timeout=settings.sync_timeout + reading_s,
    )


class ServerProcess:
    """A running server process with its guard.

    Args:
        port: The port on which it listens; None for a free one.
        server_key: The key that requests must have; None for a new one.
        variables: Further environment variables.
    """

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
        self.port = port or find_free_port()
        self.url = f"http://{launch.host}:{self.port}"
        self.key = server_key or secrets.token_urlsafe(32)
        folder = make_scratch_folder()
        command = launch.command(weights, self.port)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"\n=== {time.strftime('%F %T')} {' '.join(command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            # The guard is a small program. It starts the server, and ends the server when this process
            # (`os.getpid()`) is gone. Then it deletes the folder. It needs neither Python's settings in the
            # environment (-I) nor installed packages (-S).
            start_guard = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder)]
            self._guard = subprocess.Popen(
                [*start_guard, *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=launch.environment(folder) | {key.KEY_VARIABLE: self.key, **(variables or {})},
                # So that Ctrl-C in the terminal reaches only this process, which then ends the server.
                start_new_session=True,
                bufsize=0,  # so that the byte that ends the server is sent at once
            )
        self._scratch = folder

    def address(self, epoch: int = 0) -> Address:
        return Address(self.url, epoch, self.key)

    def pid(self) -> int | None:
        """Returns the server's process ID; None once it has ended."""
        # The guard is a small program that starts and ends the server. Its first child is the server. Its
        # later children are orphans of the server, which the guard adopts.
        try:
            children = psutil.Process(self._guard.pid).children()
            return min(children, key=lambda child: child.create_time()).pid
        except (psutil.Error, ValueError):  # ValueError: there are no children
            return None

    def exit_code(self) -> int | None:
        """Returns the server's exit code, which the guard passes on. Returns None while the guard runs."""
        return self._guard.poll()

    def end(self, *, at_once: bool = False) -> None:
        """Ends the server and all of its processes, and waits until they are gone.

        Args:
            at_once: Whether the processes are killed at once. If not, they get some seconds to end by
                themselves.
        """
        if self._guard.poll() is None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):  # the guard has just ended
                # Any byte but `END_NOW` asks for a clean end.
                self._guard.stdin.write(guard.END_NOW if at_once else b"q")
            try:
                self._guard.wait(SERVER_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # The guard has a session of its own, so its process group has only the guard and the server's
                # processes.
                os.killpg(self._guard.pid, signal.SIGKILL)
                self._guard.wait(SERVER_END_TIMEOUT_S)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def log_text(self) -> str:
        """Returns the end of the log, at most 200,000 bytes, without the lines of earlier starts."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, size - 200_000))
            return file.read().decode(errors="replace")
        return ""


def find_free_port() -> int:
    """Returns a port of this machine's loopback on which no process listens at present."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Returns whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def make_scratch_folder() -> Path:
    """Makes a folder for a server's sockets and temporary files. If this process dies without deleting the
    folder, the next start of a server deletes it (`held_folders.delete_abandoned_folders`)."""
    held_folders.delete_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX))
    held_folders.hold_folder(folder)  # so that it isn't deleted while this process lives
    return folder


def refuse_long_paths() -> None:
    """Raises ValueError if the paths of a server's sockets would be too long."""
    folder = os.fsencode(tempfile.gettempdir())
    max_bytes = _MOST_SOCKET_PATH_BYTES - _BYTES_AFTER_TEMPORARY_FOLDER
    if len(folder) > max_bytes:
        raise ValueError(
            f"the path of the folder for temporary files, {os.fsdecode(folder)}, has {len(folder)} bytes. The"
            " engine's sockets are in that folder, and Linux limits their paths to"
            f" {_MOST_SOCKET_PATH_BYTES} bytes: set TMPDIR to a folder whose path has at most {max_bytes}"
            " bytes, such as /tmp"
        )


def refuse_wider_windows(weights: Path, context_length: int) -> None:
    """Raises ValueError for a model whose sliding windows are wider in vLLM than in transformers.

    The server's log-probs would differ from the trainer's. The canary (a few answers by which new weights of
    the engine are verified) is too short to notice the difference.
    """
    config_file = weights / "config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    window = config.get("sliding_window")
    if config.get("model_type") == "cohere2" and window is not None and context_length > window:
        raise ValueError(
            f"vLLM makes the sliding windows of Cohere2 models {window + 1} tokens wide, and transformers"
            f" {window}: set context_length to {window} or less, or engines.policy to the type 'in_process'"
        )


# The log

MOST_LOG_LINES = 25
MOST_ERROR_CHARACTERS = 300


def read_last_lines(log: Path) -> str:
    """Returns the end of a log for an error message, and its path."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-MOST_LOG_LINES:]
    except OSError as error:
        return f"(its log {log} can't be read: {error})"
    return f"The end of its log, {log}:\n" + "\n".join(f"  | {line}" for line in lines)


_LOG_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""vLLM's prefix of each line of a traceback in the log."""

_ERROR_LINE = re.compile(
    r"(?:Fatal Python error: .*"
    r"|[\w.-]+: error: .*"  # of the command line
    r"|[\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$"
)

_ERRORS_WITHOUT_CAUSE = ("engine core initialization failed", "see root cause above", "see stack trace")
"""Texts of errors that only report another process's error, which is earlier in the log."""


def find_ending_error(log_text: str) -> str:
    """Returns the error that ended the server: the last error in its log that doesn't only report another
    one. Returns an empty text if there is none. Warnings and lines of tracebacks are ignored.
    """
    lines = [_LOG_PREFIX.sub("", line) for line in log_text.splitlines()]
    for number in reversed(range(len(lines))):
        error = lines[number]
        only_reports_another = any(text in error.lower() for text in _ERRORS_WITHOUT_CAUSE)
        if not _ERROR_LINE.match(error) or only_reports_another:
            continue
        # The text of a validation error (pydantic) follows in indented lines, and ends with its type.
        for line in lines[number + 1 :]:
            if not line.startswith("  ") or line.lstrip().startswith("For further information"):
                break
            error += f" {line.strip()}"
        error = error.partition(" [type=")[0]
        return error if len(error) <= MOST_ERROR_CHARACTERS else f"{error[:MOST_ERROR_CHARACTERS]}…"
    return ""


_TEXTS_OF_NO_MEMORY = (
    "out of memory",
    "cannot allocate memory",
    "available memory on node",
    "free memory on device",
)
_TEXTS_OF_NO_CACHE = ("no available memory for the cache blocks", "available kv cache memory")

_REMEDIES: list[tuple[Callable[[str], bool], str]] = [
    (
        lambda error: "greater than the derived max_model_len" in error,
        "the model's context is shorter than the engine's: lower context_length, or use a model with a"
        " longer context",
    ),
    (
        lambda error: any(words in error for words in _TEXTS_OF_NO_CACHE),
        "too little memory is left for keys and values: raise gpu_memory_utilization (on a CPU kv_cache_gib),"
        " or lower context_length",
    ),
    (
        lambda error: any(words in error for words in _TEXTS_OF_NO_MEMORY),
        "out of memory: lower gpu_memory_utilization, kv_cache_gib, max_num_seqs or context_length",
    ),
    (
        lambda error: "no space left on device" in error or "bus error" in error,
        "no room in /dev/shm (a container needs --ipc=host)",
    ),
    (lambda error: "address already in use" in error, "every port that was tried was in use"),
    (lambda error: "cannot find any model weights" in error, "the model's folder has no weights"),
    (
        lambda error: "incomplete metadata" in error or "safetensor" in error,
        "the files of the weights are incomplete",
    ),
    (lambda error: "unsupported cpu attention" in error, "on a CPU the head dimension must be at least 32"),
    (lambda error: "no module named 'vllm'" in error, "vLLM is not installed here: run the set-up"),
    (lambda error: "too many open files" in error, "too few open files are allowed: raise `ulimit -n`"),
    (
        lambda error: "unrecognized arguments" in error or "max_num_batched_tokens" in error,
        "engines.policy.extra_arguments has arguments that this version of vLLM doesn't accept",
    ),
]


def diagnose_log(log_text: str) -> str:
    """Returns sentences about the error that ended the server and about the likely remedy. The text is empty
    if there is no error in the log."""
    error = find_ending_error(log_text)
    if not error:
        return ""
    remedy = next((remedy for matches, remedy in _REMEDIES if matches(error.lower())), None)
    return f" It ended with {error!r}." + (f" Likely: {remedy}." if remedy else "")
