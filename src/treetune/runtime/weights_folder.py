"""Writes the folder from which engines load weights: whole models, or adapters of the start model.

::

    /dev/shm/treetune-x7f3/        one folder for each machine, or one for all in the experiment's folder
      0000/                        the start model
      0004/                        the policy after 4 iterations; older versions are deleted
      start-model/                 the start model, if the engine is sent adapters

`WeightsFolder.send` makes chunks on all ranks; those that write have a thread for each file::

    thread of the rank, from which the engine takes chunks     threads "weights-writer"
    ──────────────────────────────────────────────────────     ──────────────────────────────────
    gets a chunk's weights from the trainer, with all ranks
    starts a thread for the chunk ───────────────────────────► writes the chunk's file
    nccl, cuda_ipc: yields the chunk
    waits until at most MOST_UNWRITTEN files are unwritten ◄─  a file is written
      (none, with shared_memory or at the last chunk)
    shared_memory, file at the last chunk: waits for all ranks
    shared_memory, file: yields the chunk

Waits for other ranks and for a file end after `rank_deadline`. If a write fails, its error is raised in the
rank's thread when this thread waits for the file, and after the other threads have written theirs. If a write
hangs, a TimeoutError is raised there, and its thread is left behind. Ranks that wait for this one then raise,
at their deadline at the latest. `write_start`, `write_adapters` and `write_stored` have no threads: the ranks
that don't write wait for the others in a collective call.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from treetune.engine.base import Chunk, TransferMethod
from treetune.engine.settings import METHODS_ON_THE_DEVICE, TRANSFER_KEY, VERSIONS_AT_ONCE
from treetune.exceptions import CheckpointGone
from treetune.store import held_folders
from treetune.store.checksums import digest_of_weights
from treetune.store.files import make_new_private_folder, remove_folder, write_text
from treetune.store.held_folders import SHARED_MEMORY
from treetune.trainer.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from treetune.models.lora import Lora
    from treetune.runtime.session import Session
    from treetune.trainer.core import PolicyTrainer

GIB = 2**30
CHUNK_BYTES = 2**28
"""The size of a chunk of weights that is sent to an engine. A larger weight is a chunk by itself."""

MOST_UNWRITTEN = 4
"""The most chunks whose files are still being written while the next chunk is made."""

MORE_SHARED_MEMORY_REMEDY = "give it more (docker run --ipc=host; otherwise mount -o remount,size=… /dev/shm)"

START_MODEL_FOLDER = "start-model"
"""The subfolder of the model that adapters belong to."""


class WeightsFolder:
    """A folder with one subfolder for each version of the policy.

    In memory, each machine has its own folder, which the machine's first rank writes. On disk, all machines
    share one folder, which the first rank of all writes.

    Attributes:
        adapters: The settings of the adapters that the engine is sent; None if it is sent whole weights.
        transfer: The way in which new weights reach the engine; see `send`.
        meeting: The folder in which the engines of all ranks agree.
    """

    def __init__(
        self,
        session: Session,
        adapters: Lora | None,
        transfer: TransferMethod = "file",
        *,
        in_memory: bool = True,
    ) -> None:
        self.adapters, self.transfer = adapters, transfer
        self._session = session
        made = make_weights_folder(session.directory.path, session.purpose, session.ranks, in_memory)
        self.path, self.meeting, self._writes = made.path, made.meeting, made.writes

    def of(self, version: int) -> Path:
        """Returns the subfolder of a version."""
        return self.path / f"{version:04d}"

    def write_start(self) -> Path:
        """Writes the folder that the engine starts with: the start model, or the model and adapters that
        don't change it yet. Collective.

        Raises:
            ValueError: There is no space for this version and the next one.
        """
        from treetune.models.policy_files import write_for_engine
        from treetune.models.saved_weights import saved_weights

        session, lora, folder = self._session, self.adapters, self.of(0)
        model: PreTrainedModel | None = None
        problem: str | None = None
        if self._writes:
            model = session.model.load_on_cpu()
            problem = describe_missing_room(
                self.path, count_needed_bytes(model, adapters_alone=lora is not None)
            )
        # All ranks raise, also those whose machine has room: a collective start fails as a whole.
        problem_by_rank = session.ranks.exchange("room for the weights", problem)
        problems = [message for message in problem_by_rank if message is not None]
        if problems:
            raise ValueError(problems[0])
        if model is not None:  # this rank writes
            tokenizer = session.model.tokenizer
            folder_of_model = folder if lora is None else self._start_model
            write_for_engine(saved_weights(model), model.config, tokenizer, folder_of_model)
            if lora is not None:
                lora.apply(model, session.config.seed)
                adapters = lora.adapters(dict(model.named_parameters()))
                lora.write(adapters, base_model=str(folder_of_model), directory=folder)
        session.ranks.barrier("start weights written for the engine")
        return folder

    def write_adapters(self, trainer: PolicyTrainer, version: int) -> Path:
        """Writes the trainer's present adapters. Collective."""
        assert self.adapters is not None
        session, folder = self._session, self.of(version)
        adapters = trainer.adapters()
        if self._writes:
            self.adapters.write(adapters, base_model=str(self._start_model), directory=folder)
        session.ranks.barrier("weights written for the engine")
        return folder

    def send(self, trainer: PolicyTrainer, version: int) -> Iterator[Chunk]:
        """Writes the trainer's present weights chunk by chunk, and yields each chunk to the engine, on every
        rank.

        No rank ever holds all weights. At the end, the version's folder is complete. Collective: every rank
        must take all chunks.

        By `transfer`::

            nccl, cuda_ipc    yields the tensors on the device; threads write the file meanwhile
            shared_memory     yields each file with its digest, when it is written
            file              yields each file at once, while threads still write it; all are written when the
                              last one is yielded
        """
        import torch

        from treetune.models.policy_files import describe_for_engine
        from treetune.models.shards import shard_path, split_into_chunks, write_index

        session, folder = self._session, self.of(version)
        ranks, config = session.ranks, trainer.model.config
        sends_tensors = self.transfer in METHODS_ON_THE_DEVICE
        # With `shared_memory`, the engine checks the digest of each file when it gets the chunk.
        needs_digest = self.transfer == "shared_memory"
        file_of_weight: dict[str, str] = {}
        """The name of the file that has a weight, by the weight's name. It becomes the folder's index."""
        chunks = split_into_chunks(_weights_for_engine(trainer), CHUNK_BYTES, self._copy_weight)
        with _FileWriters(folder, ranks.deadline_s) as writers:
            for number, (chunk, is_last) in enumerate(chunks):
                path = shard_path(folder, number)
                if ranks.device.type == "cuda":
                    # The receiver may read the chunk on another stream (vLLM's NCCL does), which would not
                    # wait.
                    torch.cuda.current_stream(ranks.device).synchronize()

                if self._writes:
                    if number == 0:
                        shutil.rmtree(folder, ignore_errors=True)  # of a sync that did not finish
                        folder.mkdir(parents=True)
                        dtype = next(iter(chunk.values())).dtype
                        describe_for_engine(config, session.model.tokenizer, folder, dtype)
                    writers.start(_write_chunk, chunk, path, ranks.device)
                    file_of_weight |= dict.fromkeys(chunk, path.name)

                if sends_tensors:
                    yield Chunk(path, number, is_last, digest="", tensors=chunk)

                # A digest needs the written file, and the folder is complete only with all files. Otherwise
                # this waits only so that few chunks are in memory.
                needs_all_files = needs_digest or is_last
                writers.wait(0 if needs_all_files else MOST_UNWRITTEN)
                if is_last and self._writes:
                    write_index(file_of_weight, folder)

                if not sends_tensors:
                    digest = ""
                    if needs_digest and ranks.is_first:
                        digest = digest_of_weights(path)
                    if needs_all_files:
                        # The other ranks wait here until the first rank has written the files.
                        digest = ranks.from_first("a chunk of weights", digest)
                    yield Chunk(path, number, is_last, digest)

    def _copy_weight(self, weight: Tensor) -> Tensor:
        """Copies a weight on the device or to the CPU, so that the copy lasts until its chunk is sent."""
        if self.transfer in METHODS_ON_THE_DEVICE:
            return weight.contiguous().clone()
        if not self._writes:
            return weight  # this rank only takes part in gathering it
        return weight.to("cpu", copy=True).contiguous()

    def write_stored(self, version: int) -> Path:
        """Writes a checkpoint's weights (0: the start model's). Collective.

        Raises:
            CheckpointGone: The run has deleted the checkpoint meanwhile.
        """
        session, folder = self._session, self.of(version)
        exists = True
        if self._writes:
            from treetune.models.policy_files import write_for_engine

            try:
                weights, architecture = self.read_stored(version)
                write_for_engine(weights, architecture, session.model.tokenizer, folder)
            except (OSError, ValueError):
                is_still_there = version == 0 or version in session.directory.checkpoints()
                if is_still_there:  # so it failed for another reason
                    raise
                exists = False
        # Ranks that write nothing have to know it, too.
        if not all(session.ranks.exchange("checkpoint written for the engine", exists)):
            raise CheckpointGone(f"checkpoint {version} of {session.directory.path} was deleted meanwhile")
        return folder

    def read_stored(self, version: int) -> tuple[Mapping[str, Tensor], PretrainedConfig]:
        """Reads a checkpoint's weights (0: the start model's) by name, and their architecture."""
        from treetune.models.policy_files import read_policy

        if version == 0:
            return self._session.model.load_weights()
        self._session.directory.refuse_misplaced_checkpoint(version)
        # `getattr`, since a model that begins with random weights doesn't have the setting.
        trusted = getattr(self._session.config.model, "trust_remote_code", False)
        checkpoint = self._session.directory.checkpoint_folder(version)
        return read_policy(checkpoint / "policy", trust_remote_code=trusted)

    def keep_only(self, version: int) -> None:
        """Deletes all versions of the weights except this one, from which the engine restarts.

        If adapters are sent, the start model stays, too: an engine that restarts loads first the start model,
        which has a subfolder of its own, and then the adapters.
        """
        if not self._writes:
            return
        for folder in self.path.iterdir():
            if folder.is_dir() and folder not in (self.of(version), self._start_model):
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        for folder in (self.path, self.meeting):
            remove_folder(folder)

    @property
    def _start_model(self) -> Path:
        return self.path / START_MODEL_FOLDER


def _weights_for_engine(trainer: PolicyTrainer) -> Iterator[tuple[str, Tensor]]:
    """Yields the trainer's present weights one after the other, by the names that the engine knows.
    Collective."""
    from treetune.models.policy_files import HEAD_WEIGHT, has_no_head_in_engine
    from treetune.models.saved_weights import architecture_of
    from treetune.models.shards import add_head

    config = trainer.model.config
    weights = trainer.weights_in_turn()
    # The output head is sent as a separate weight, also if the model ties the head to the embeddings: an
    # engine may have copied the embeddings into its head when it started. For some models (Gemma 2) the
    # engine computes logits with the embeddings, and refuses a head.
    if has_no_head_in_engine(config):
        weights = ((name, weight) for name, weight in weights if name != HEAD_WEIGHT)
    else:
        weights = add_head(weights, trainer.weight_names, config.tie_word_embeddings)
    yield from architecture_of(config).convert_to_saved(weights)


def _write_chunk(chunk: Mapping[str, Tensor], path: Path, device: torch.device) -> None:
    """Writes a chunk's file, in a thread of its own."""
    import torch

    from treetune.models.shards import write_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread has the first device
    write_shard({name: weight.to("cpu") for name, weight in chunk.items()}, path)


class _FileWriters(AbstractContextManager["_FileWriters"]):
    """Writes each file in a thread of its own. Each wait for a file has a deadline.

    The end of a `with` statement waits for the files that are still being written, unless one was overdue.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._unwritten: deque[Future[None]] = deque()
        self._has_hung = False
        """Whether a file was not written in time."""

    def start(self, write: Callable[..., None], *arguments: Any) -> None:
        """Starts a thread that calls a function, which writes a file."""
        write_result: Future[None] = Future()

        def write_file() -> None:
            try:
                write(*arguments)
            except BaseException as error:  # `wait` raises it
                write_result.set_exception(error)
            else:
                write_result.set_result(None)

        self._unwritten.append(write_result)
        # A daemon, since Python's exit waits for all other threads, also for one whose disk hangs.
        threading.Thread(target=write_file, name="weights-writer", daemon=True).start()

    def wait(self, most_unwritten: int) -> None:
        """Waits until at most so many files are unwritten.

        Raises:
            TimeoutError: A file was not written within the deadline.
            Exception: What the write of a file has raised.
        """
        while len(self._unwritten) > most_unwritten:
            write_result = self._unwritten.popleft()
            # Not `result(timeout)`: its TimeoutError could also be that of the write, from a network's disk.
            if wait([write_result], self._deadline_s).not_done:
                self._has_hung = True
                raise TimeoutError(
                    f"a file with weights for the engine was not written into {self._folder} within"
                    f" {self._deadline_s:.0f} s (rank_deadline): see whether its disk hangs"
                )
            write_result.result()

    @override
    def __exit__(self, *error: object) -> None:
        # After an error, nothing may still write into the folder, which is deleted or written anew.
        if not self._has_hung:
            wait(self._unwritten, self._deadline_s)


def count_needed_bytes(model: PreTrainedModel, *, adapters_alone: bool) -> int:
    """Returns the bytes that the weights take in the folder.

    Two versions exist at a time, since the old one is deleted only when the engine has the new one. With
    `adapters_alone`, the start model is written once, and the versions hold adapters alone. So only the
    start model counts.
    """
    from treetune.models.saved_weights import saved_weights

    weights = saved_weights(model)
    size = sum(weight.nbytes for weight in weights.values())
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        # The head is tied to the embeddings. `weights` has their tensor once, and the folder has it twice.
        size += head.weight.nbytes
    return size if adapters_alone else VERSIONS_AT_ONCE * size


def describe_missing_room(folder: Path, needed: int) -> str | None:
    """Returns an error message if a folder has less free space than `needed` bytes, else None."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    remedy = "free some space"
    if folder.is_relative_to(SHARED_MEMORY):
        remedy = (
            f"{MORE_SHARED_MEMORY_REMEDY}, clear it, or set {TRANSFER_KEY} to 'file', which writes them into"
            " the experiment's folder"
        )
    return (
        f"{folder} has {free / GIB:.1f} GiB free, and the trainer's weights for the engine"
        f" ({VERSIONS_AT_ONCE} versions at the same time) need {needed / GIB:.1f} GiB: {remedy}"
    )


class MadeFolder(NamedTuple):
    """What `make_weights_folder` has made."""

    path: Path
    """The folder of the weights."""
    meeting: Path
    """The folder by whose files the engines of all ranks exchange values."""
    writes: bool
    """Whether this rank writes weights."""


def make_weights_folder(experiment: Path, purpose: str, ranks: Ranks, in_memory: bool = True) -> MadeFolder:
    """Makes an empty folder for weights, which no other user can access. Collective.

    With `in_memory`, each machine has a folder of its own in /dev/shm; without it, all ranks share one in the
    experiment's folder. Any user can make files in /dev/shm, so the folder there has a random name, which no
    other user can have taken before. A file in the experiment's folder records this name, so that the next
    start can delete the folder of a killed run.

    Raises:
        ValueError: The folder exists and belongs to another user.
    """
    machines = ranks.machines()
    this_machine = machines[ranks.rank]
    has_several_machines = len(set(machines)) > 1

    def make_name(*identity: str) -> str:
        return (
            held_folders.FOLDER_PREFIX
            + hashlib.blake2b(" ".join(identity).encode(), digest_size=8).hexdigest()
        )

    # Evaluators on several machines may share the experiment's folder. So the names of their folders contain
    # the machine of their first rank.
    identity = [str(experiment.resolve()), purpose]
    if purpose != "run":
        identity.append(machines[0])
    if in_memory:
        # In the experiment's folder, which several machines share, each machine has a file that records its
        # folder in memory. If /dev/shm can't be written, the machine has its folder itself there. In both
        # cases the machines need different names.
        name = make_name(*identity, this_machine) if has_several_machines else make_name(*identity)
        first_rank_of_machine = machines.index(this_machine)
        writes = ranks.rank == first_rank_of_machine
    else:
        name = make_name(*identity)  # of the folder that all ranks share
        writes = ranks.is_first
    folder: Path | None = None
    if writes:
        held_folders.delete_abandoned_folders()
        name_file = experiment / f".{name}"
        if in_memory and os.access(SHARED_MEMORY, os.W_OK):
            _delete_folder_of_killed_run(name_file)
            folder = held_folders.make_folder_in_memory()
            write_text(name_file, str(folder))
        else:
            folder = experiment / name
            remove_folder(folder)
            make_new_private_folder(folder)
    path_by_rank = ranks.exchange("weights folders", (this_machine, None if folder is None else str(folder)))
    for machine, path in path_by_rank:
        # The folder of this machine's first rank or, on disk, the one folder that there is.
        if path is not None and (machine == this_machine or not in_memory):
            folder = Path(path)
            break
    assert folder is not None, "the first rank of each machine makes a folder"
    # The exchange of values between engines needs a folder that all ranks see.
    meeting_folder = folder
    if has_several_machines:  # they share the experiment's folder, but not each other's /dev/shm
        meeting_folder = experiment / make_name(*identity)
        # Without `in_memory`, this is the folder of the weights, which exists already.
        if ranks.is_first and meeting_folder != folder:
            remove_folder(meeting_folder)
            make_new_private_folder(meeting_folder)
    ranks.barrier("the weights folder is empty")
    return MadeFolder(folder, meeting_folder, writes)


def read_name_file(name_file: Path) -> Path | None:
    """Returns the folder in memory that a run's last start has named in a file.

    Returns None if the file or the folder doesn't exist, if the folder belongs to another user, or if its
    path isn't of the form that this program gives to folders in memory.
    """
    try:
        folder = Path(name_file.read_text())
        status = folder.lstat()
    except (OSError, ValueError):
        return None
    is_folder_of_user = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
    has_right_name = folder.parent == SHARED_MEMORY and folder.name.startswith(held_folders.FOLDER_PREFIX)
    return folder if is_folder_of_user and has_right_name else None


def _delete_folder_of_killed_run(name_file: Path) -> None:
    """Deletes the folder that a killed run has left in memory. This process has the run's lock, so no other
    process uses the folder."""
    folder = read_name_file(name_file)
    if folder is not None:
        remove_folder(folder)
    name_file.unlink(missing_ok=True)
