"""`treetune run`: starts a command's ranks on this machine, and ends with the exit code of the run.

DeepSpeed's own command ends with 0 when its node launcher is killed, though nothing is finished. Here the
node launcher is this process's child, whose end, whatever it is, is the exit code.
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

from treetune.processes.lifetime import CHECKPOINT, ENDING, PR_SET_PDEATHSIG, STARTED_BY
from treetune.runtime.machine import gpus
from treetune.store import held_folders
from treetune.store.files import remove_folder

MAIN = Path(__file__).resolve().parents[1] / "main.py"
END_S = 60.0
"""How long ranks may take to end after their launcher; then they are killed."""


def ranks_here(wanted: int | None = None) -> int:
    """Returns how many ranks this machine gets: `wanted`, else NUM_GPUS, else one for each GPU, or one on a
    CPU. Raises ValueError where that is no number, or more than there are GPUs."""
    there = gpus()
    if wanted is None and (text := os.environ.get("NUM_GPUS")) is not None:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"NUM_GPUS is {text!r}; it must be a whole number above 0")
        wanted = int(text)
    if wanted is not None and there and wanted > len(there):
        which = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = f"CUDA_VISIBLE_DEVICES={which} are" if which is not None else "this machine has"
        raise ValueError(f"NUM_GPUS (--num_gpus) is {wanted}, and {named} {len(there)} GPUs")
    ranks = wanted or max(1, len(there))
    if ranks > 1 and any(name.startswith("MIG-") for name in there):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={','.join(there)} has parts of GPUs (MIG), of which CUDA shows a process"
            f" one alone, and there would be {ranks} ranks: set NUM_GPUS to 1"
        )
    return ranks


def threads_each(processes: int) -> str:
    """Returns OMP_NUM_THREADS of each: processes that each take all cores run many times slower."""
    text = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // processes))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"OMP_NUM_THREADS is {text!r}; it must be a whole number above 0")
    return text


def start_ranks(
    words: Sequence[str], ranks: int, nodes: Sequence[str] = ("localhost",), node: int = 0, port: int = 0
) -> int:
    """Runs main.py with `words` on `ranks` ranks of this machine, which is the `node`-th of `nodes`. Signals
    are passed on. Returns the exit code: 0 if all ranks ended with 0, and 128 and a signal's number if
    that ended one of them, the node launcher or the run.
    """
    if not port:  # one that was free a moment ago: several runs may share the machine
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    devices: Sequence[str] = gpus()[:ranks]
    meeting = tempfile.mkdtemp(prefix=f"{held_folders.PREFIX}meeting-")
    environment = {**os.environ, STARTED_BY: str(os.getpid()), held_folders.MEETING: meeting}
    environment["OMP_NUM_THREADS"] = threads_each(ranks)
    if not devices:
        devices = [str(i) for i in range(ranks)]
        # DeepSpeed warns three times where it has to find out itself that there is no accelerator.
        environment.setdefault("DS_ACCELERATOR", "cpu")
    world = base64.urlsafe_b64encode(json.dumps({name: list(devices) for name in nodes}).encode()).decode()
    address = "127.0.0.1" if len(nodes) == 1 else nodes[0]
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    command += [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
    command += ["--quiet", "--no_local_rank", str(MAIN), *words]
    libc = ctypes.CDLL(None)
    launcher = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on once
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    passed_on: list[int] = []

    def pass_on(number: int, _: object) -> None:
        """Asks the ranks alone to end, which write a checkpoint first: their launcher would kill them after
        30 seconds. The second signal ends the launcher and the ranks, the third kills them."""
        ending = [earlier for earlier in passed_on if earlier in ENDING]
        passed_on.append(number)
        if not ending:
            asked = signal_ranks(launcher.pid, number)
            if asked or number == CHECKPOINT:
                return
        how = signal.SIGKILL if len(ending) > 1 else signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, how)

    for number in (*ENDING, CHECKPOINT):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # `nohup`: the run outlives its terminal
        signal.signal(number, pass_on)
    code = launcher.wait()
    _wait_for_group(launcher.pid)
    remove_folder(Path(meeting))
    if code and passed_on:
        return 128 + passed_on[0]
    # The launcher hands on a rank's code; a signal's is negative, and as an exit code counted from 256.
    return 128 - code if code < 0 else 128 + 256 - code if code > 256 - signal.NSIG else code


def signal_ranks(launcher: int, number: int) -> int:
    """Sends a signal to the ranks that a node launcher has started, and returns how many there are."""
    sent = 0
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)
                sent += 1
    return sent


def _wait_for_group(group: int) -> None:
    """Waits until no process of the group is left; ranks end by themselves when their launcher is gone."""
    for number in (None, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
