"""Starts a command's ranks on this machine (`treetune run`), and returns the exit code of the run.

DeepSpeed's own command returns 0 if its node launcher is killed. Here the node launcher is a child of this
process, and its exit code counts::

    treetune run  ──starts──►  node launcher  ──starts──►  rank 0, rank 1, …
         │                          (its own process group)      ▲
         └── 1st signal: to the ranks alone, which write a checkpoint first
             2nd signal: SIGTERM to the whole group; 3rd: SIGKILL
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from treetune.processes.lifetime import (
    CHECKPOINT_SIGNAL,
    ENDING_SIGNALS,
    PR_SET_PDEATHSIG,
    STARTED_BY_VARIABLE,
)
from treetune.runtime.machine import list_gpus
from treetune.store import held_folders
from treetune.store.files import remove_folder

MAIN_PROGRAM = Path(__file__).resolve().parents[1] / "main.py"
RANKS_END_TIMEOUT_S = 60.0
"""The longest that ranks may take to end after their launcher, before they are killed."""


def count_ranks_here(num_gpus: int | None = None, ranks: int | None = None) -> int:
    """Returns the number of ranks on this machine.

    If the user asked for no number, this is NUM_GPUS from the environment. Without NUM_GPUS, there is one
    rank for each GPU, or a single rank on a machine without GPUs.

    Args:
        num_gpus: The number of GPUs that the user asked for, with a rank on each.
        ranks: The number of ranks that the user asked for, on GPUs or on a CPU.

    Raises:
        ValueError: A number is not above 0, the two numbers differ, the machine has fewer GPUs, or several
            ranks would use parts of GPUs (MIG).
    """
    available = list_gpus()
    for option, number in (("--num_gpus", num_gpus), ("--ranks", ranks)):
        if number is not None and number < 1:
            raise ValueError(f"{option} is {number}; it must be a whole number above 0")
    if num_gpus is not None and ranks is not None and num_gpus != ranks:
        raise ValueError(f"--num_gpus is {num_gpus} and --ranks is {ranks}: there is one rank on each GPU")
    requested = num_gpus or ranks  # if both are given, they are equal
    if requested is None and (text := os.environ.get("NUM_GPUS")) is not None:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"NUM_GPUS is {text!r}; it must be a whole number above 0")
        requested = int(text)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if num_gpus is not None and not available:
        reason = "this machine has no GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} has none"
        raise ValueError(
            f"--num_gpus is {num_gpus}, and {reason}: leave it out to run on the CPU in one process, or give"
            f" --ranks {num_gpus} for {num_gpus} processes on the CPU"
        )
    if requested is not None and available and requested > len(available):
        gpus_are = "this machine has" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} are"
        raise ValueError(
            f"{requested} ranks were asked for (--num_gpus, --ranks or NUM_GPUS), one on each GPU, and"
            f" {gpus_are} {len(available)} GPUs: ask for {len(available)} or fewer"
        )
    n_ranks = requested or max(1, len(available))
    if n_ranks > 1 and any(name.startswith("MIG-") for name in available):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={','.join(available)} has parts of GPUs (MIG), of which CUDA shows a"
            f" process only one, and there would be {n_ranks} ranks: set NUM_GPUS to 1"
        )
    return n_ranks


def threads_per_process(processes: int) -> str:
    """Returns OMP_NUM_THREADS for each of several processes: the configured one, or an equal share of the
    cores, since processes that all use all cores are many times slower."""
    text = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // processes))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"OMP_NUM_THREADS is {text!r}; it must be a whole number above 0")
    return text


def start_ranks(
    arguments: Sequence[str], ranks: int, nodes: Sequence[str] = ("localhost",), node: int = 0, port: int = 0
) -> int:
    """Runs main.py on this machine's ranks, and passes signals on to them.

    Args:
        arguments: The arguments of main.py.
        nodes: The names of all machines, of which this one is number `node`.
        port: The port at which the ranks meet; 0 for a free one.

    Returns:
        The exit code: 0 if all ranks ended with 0; 128 + the number of a signal that ended a rank, the node
        launcher or the run; else the node launcher's exit code.
    """
    if not port:
        # The kernel chooses a free port. A fixed one might be taken by another run on this machine.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    devices: Sequence[str] = list_gpus()[:ranks]
    # The ranks find each other in this folder. The environment tells them its random name.
    meeting_folder = tempfile.mkdtemp(prefix=f"{held_folders.FOLDER_PREFIX}meeting-")
    environment = {
        **os.environ,
        STARTED_BY_VARIABLE: str(os.getpid()),  # ranks check whether this process still runs
        held_folders.MEETING_VARIABLE: meeting_folder,
    }
    environment["OMP_NUM_THREADS"] = threads_per_process(ranks)
    if not devices:
        devices = [str(i) for i in range(ranks)]  # on a CPU: the launcher starts a rank for each entry
        # Otherwise DeepSpeed warns three times that it finds no accelerator.
        environment.setdefault("DS_ACCELERATOR", "cpu")
    command = _make_launcher_command(nodes, node, devices, port)
    # Ranks read their numbers from the environment, so the launcher adds no --local_rank to the arguments.
    command += ["--quiet", "--no_local_rank", str(MAIN_PROGRAM), *arguments]
    libc = ctypes.CDLL(None)
    this_process = os.getpid()

    def end_with_this_process() -> None:
        """Makes the kernel send the launcher SIGTERM when this process dies, so that no ranks stay behind.

        It runs in the launcher's process, before the launcher itself.
        """
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != this_process:  # the parent died before the call above, so no signal will come
            os._exit(1)

    launcher = subprocess.Popen(
        command,
        env=environment,
        # In a session of its own, the launcher doesn't get a terminal's Ctrl-C. `pass_on` sends the signal.
        start_new_session=True,
        preexec_fn=end_with_this_process,
    )
    signals = SignalsOfRun(launcher.pid)
    for number in (*ENDING_SIGNALS, CHECKPOINT_SIGNAL):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # `nohup`: the run outlives its terminal
        signal.signal(number, signals.pass_on)
    code = launcher.wait()
    _wait_for_group(launcher.pid)
    remove_folder(Path(meeting_folder))
    return signals.exit_code(code)


class SignalsOfRun:
    """Passes this process's signals on to the node launcher and its ranks."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        """The node launcher's process id, which is also that of its process group."""
        self._received: list[int] = []
        """The signals that were passed on so far, in order."""

    def pass_on(self, number: int, _: object) -> None:
        """Sends a signal to the ranks alone, or ends launcher and ranks; see `signal_for_group`."""
        signal_of_group = signal_for_group(number, self._received)
        if number in ENDING_SIGNALS:
            # The signal is noted before it is passed on, since the next one may come meanwhile.
            self._received.append(number)
        if signal_of_group is not None:
            self._signal_group(signal_of_group)
            return
        has_ranks = signal_ranks(self._launcher, number) > 0
        if number == CHECKPOINT_SIGNAL:
            # Before there are ranks, a request for a checkpoint is dropped.
            if has_ranks:
                self._received.append(number)
        elif not has_ranks:
            self._signal_group(signal.SIGTERM)  # the launcher itself is ended

    def _signal_group(self, number: int) -> None:
        """Sends a signal to the launcher and its ranks."""
        with contextlib.suppress(ProcessLookupError):  # all of them have ended already
            os.killpg(self._launcher, number)

    def exit_code(self, code: int) -> int:
        """Returns the run's exit code from the node launcher's."""
        was_ended = any(number in ENDING_SIGNALS for number in self._received)
        if code and was_ended:
            # The ranks' exit codes depend on where the signal met each rank. So the run's exit code is made
            # from the first signal instead, which may be a request for a checkpoint: it ends the ranks, too.
            return 128 + self._received[0]
        # A request for a checkpoint needs no other code: all ranks then end with 138 (128 + SIGUSR1), unless
        # the run fails before it writes the checkpoint.
        return _code_of_run(code)


def _make_launcher_command(nodes: Sequence[str], node: int, devices: Sequence[str], port: int) -> list[str]:
    """Returns the beginning of the node launcher's command; see `start_ranks`. Each machine has the same
    `devices`."""
    devices_by_node = {name: list(devices) for name in nodes}
    world_info = base64.urlsafe_b64encode(json.dumps(devices_by_node).encode()).decode()
    address = "127.0.0.1" if len(nodes) == 1 else nodes[0]
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world_info}"]
    return [*command, f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]


def _code_of_run(code: int) -> int:
    """Returns the run's exit code from the node launcher's: 128 + the number of a signal that ended the
    launcher or a rank."""
    if code < 0:
        # A signal ended the launcher: Popen returns its number with a minus.
        return 128 - code
    if code > 256 - signal.NSIG:
        # A signal ended a rank: the launcher exits with minus the signal's number. In the eight bits of an
        # exit code, this is 256 minus the number.
        return 128 + 256 - code
    return code


def signal_for_group(number: int, earlier: Sequence[int]) -> int | None:
    """Returns the signal that launcher and ranks get when a signal of this number comes.

    Args:
        earlier: The numbers of the signals that came before, in order.

    Returns:
        None if only the ranks get the signal, to write a checkpoint and end.
    """
    n_endings = sum(earlier_number in ENDING_SIGNALS for earlier_number in earlier)
    if n_endings == 0 or number == CHECKPOINT_SIGNAL:
        # The launcher doesn't get it, since it would kill the ranks 30 seconds later.
        return None
    # The second ending signal ends launcher and ranks, and each later one kills them.
    return signal.SIGTERM if n_endings == 1 else signal.SIGKILL


def signal_ranks(launcher: int, number: int) -> int:
    """Sends a signal to the ranks that a node launcher has started, and returns how many there are."""
    # The launcher or a rank may have ended meanwhile, which is no error.
    signalled_ranks = 0
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)
                signalled_ranks += 1
    return signalled_ranks


def _wait_for_group(group: int) -> None:
    """Waits until no process of the group is left, and kills those that are left after `RANKS_END_TIMEOUT_S`.

    Ranks end by themselves when their launcher is gone.
    """
    # The first turn waits for processes that end by themselves, the second one for killed processes.
    for signal_number in (None, signal.SIGKILL):
        if signal_number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal_number)
        deadline = time.monotonic() + RANKS_END_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)  # sends nothing, and fails if no process is left
            except ProcessLookupError:
                return
            time.sleep(0.1)
