"""The folder from which engines take weights: whole ones, or adapters on the start model."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.engine.base import Chunk, TransferMethod
from treetune.engine.settings import ON_THE_DEVICE, SETTING, VERSIONS
from treetune.exceptions import CheckpointGone
from treetune.store import held_folders
from treetune.store.checksums import digest_of_weights
from treetune.store.files import new_own_folder, remove_folder, write_text
from treetune.store.held_folders import MEMORY
from treetune.trainer.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from treetune.models.lora import Lora
    from treetune.runtime.session import Session
    from treetune.trainer.core import PolicyTrainer

GIB = 2**30
CHUNK_BYTES = 2**28
"""Size of a chunk of weights on their way into an engine. A larger weight is a chunk by itself."""

WRITERS = 4
"""Chunks that are written at a time, each by a thread. As many more wait at most."""

MORE_SHARED_MEMORY = "give it more (docker run --ipc=host; otherwise mount -o remount,size=… /dev/shm)"

START_MODEL = "start-model"
"""The folder of the model whose adapters the engine is sent, beside theirs."""


class WeightsFolder:
    """A folder with one folder for each version of the policy. Each machine has its own, which its first rank
    writes, unless all of them are to see one. `adapters` are the settings of the adapters that the engine is
    sent as they are; None where it is sent whole weights. In `meeting` the ranks' engines agree."""

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
        place = session.directory.path, session.purpose, session.ranks, in_memory
        self.path, self.meeting, self._writes = weights_folder(*place)

    def of(self, version: int) -> Path:
        return self.path / f"{version:04d}"

    def write_start(self) -> Path:
        """Writes the folder that the engine starts on: the start model, or adapters beside it that don't
        change it yet. Raises ValueError where it wouldn't fit, with the version that comes after it.
        Collective."""
        from treetune.models.policy_files import write_for_engine
        from treetune.models.saved_weights import saved_weights

        session, lora, folder = self._session, self.adapters, self.of(0)
        problem = model = None
        if self._writes:
            model = session.model.on_cpu()
            problem = no_room(self.path, room_needed(model, adapters_alone=lora is not None))
        if problems := list(filter(None, session.ranks.exchange("room for the weights", problem))):
            raise ValueError(problems[0])
        if model is not None:
            tokenizer = session.model.tokenizer
            whole = folder if lora is None else self._start_model
            write_for_engine(saved_weights(model), model.config, tokenizer, whole)
            if lora is not None:
                lora.apply(model, session.config.seed)
                lora.write(lora.adapters(dict(model.named_parameters())), str(whole), folder)
        session.ranks.barrier("start weights written for the engine")
        return folder

    def write_adapters(self, trainer: PolicyTrainer, version: int) -> Path:
        """Writes the trainer's present adapters. Collective."""
        assert self.adapters is not None
        session, folder = self._session, self.of(version)
        adapters = trainer.adapters()
        if self._writes:
            self.adapters.write(adapters, str(self._start_model), folder)
        session.ranks.barrier("weights written for the engine")
        return folder

    def send(self, trainer: PolicyTrainer, version: int) -> Iterator[Chunk]:
        """The trainer's present weights in chunks, on every rank. Where a transfer takes them from the device
        it has each before it is written. At the end the version's folder is whole. No rank has all weights
        at a time. Collective, to the end.
        """
        import torch

        from treetune.models.policy_files import describe_for_engine
        from treetune.models.saved_weights import architecture_of
        from treetune.models.shards import in_chunks, shard_path, with_head, write_index, write_shard

        session, folder = self._session, self.of(version)
        ranks, config = session.ranks, trainer.model.config
        weights = with_head(trainer.weights_in_turn(), trainer.weight_names, config.tie_word_embeddings)
        weights = architecture_of(config).in_turn_as_saved(weights)
        files: dict[str, str] = {}

        def keep(weight: Tensor) -> Tensor:
            """A weight for as long as its chunk is on its way, where somebody needs it there."""
            if self.transfer in ON_THE_DEVICE:
                return weight.contiguous().clone()
            return weight.to("cpu", copy=True).contiguous() if self._writes else weight

        def write(chunk: Mapping[str, Tensor], path: Path) -> None:
            if ranks.device.type == "cuda":
                torch.cuda.set_device(ranks.device)  # a thread begins on the first one
            write_shard({name: weight.to("cpu") for name, weight in chunk.items()}, path)

        checked = self.transfer == "shared_memory"  # by digests, each chunk when it is there
        writing: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WRITERS, "weights-writer") as writers:
            for number, (chunk, last) in enumerate(in_chunks(weights, CHUNK_BYTES, keep)):
                path = shard_path(folder, number)
                if ranks.device.type == "cuda":
                    # Whoever takes the chunk may read it on a stream of its own (vLLM for NCCL does).
                    torch.cuda.current_stream(ranks.device).synchronize()
                if self._writes:
                    if number == 0:
                        shutil.rmtree(folder, ignore_errors=True)  # a sync of this version, not finished
                        folder.mkdir(parents=True)
                        dtype = next(iter(chunk.values())).dtype
                        describe_for_engine(config, session.model.tokenizer, folder, dtype)
                    writing.append(writers.submit(write, chunk, path))
                    files |= dict.fromkeys(chunk, path.name)
                if self.transfer in ON_THE_DEVICE:
                    yield Chunk(path, number, last, "", chunk)
                while len(writing) > (0 if checked or last else WRITERS):
                    writing.popleft().result()
                if last and self._writes:
                    write_index(files, folder)
                if self.transfer not in ON_THE_DEVICE:
                    digest = digest_of_weights(path) if checked and ranks.is_first else ""
                    if checked or last:
                        digest = ranks.from_first("a chunk of weights", digest)
                    yield Chunk(path, number, last, digest)

    def write_stored(self, version: int) -> Path:
        """Writes a checkpoint's weights (0: the start model's). Raises CheckpointGone where a run that goes
        on has deleted it meanwhile. Collective.
        """
        session, folder = self._session, self.of(version)
        there = True
        if self._writes:
            from treetune.models.policy_files import write_for_engine

            try:
                write_for_engine(*self.stored(version), session.model.tokenizer, folder)
            except (OSError, ValueError):
                if version == 0 or version in session.directory.checkpoints():
                    raise
                there = False
        if not all(session.ranks.exchange("checkpoint written for the engine", there)):
            raise CheckpointGone(f"checkpoint {version} of {session.directory.path} was deleted meanwhile")
        return folder

    def stored(self, version: int) -> tuple[Mapping[str, Tensor], PretrainedConfig]:
        """A checkpoint's weights (0: the start model's) by name, and their architecture."""
        from treetune.models.policy_files import read_policy

        if version == 0:
            return self._session.model.weights()
        self._session.directory.refuse_misplaced_checkpoint(version)
        trusted = getattr(self._session.config.model, "trust_remote_code", False)
        return read_policy(self._session.directory.checkpoint(version) / "policy", trust_remote_code=trusted)

    def keep_only(self, version: int) -> None:
        """Removes older weights: the engine may restart from the newest alone."""
        if not self._writes:
            return
        for older in self.path.iterdir():
            if older.is_dir() and older not in (self.of(version), self._start_model):
                shutil.rmtree(older, ignore_errors=True)

    def remove(self) -> None:
        for folder in (self.path, self.meeting):
            remove_folder(folder)

    @property
    def _start_model(self) -> Path:
        return self.path / START_MODEL


def room_needed(model: PreTrainedModel, *, adapters_alone: bool) -> int:
    """Bytes that an engine's weights take beside the run: two versions at once, since a server that fails a
    sync restarts from what is new and what is old is deleted afterwards; the start model once where
    `adapters_alone` follow. The head is written out, be it tied or not."""
    from treetune.models.saved_weights import saved_weights

    weights = saved_weights(model)
    size = sum(weight.nbytes for weight in weights.values())
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        size += head.weight.nbytes
    return size if adapters_alone else VERSIONS * size


def no_room(folder: Path, needed: int) -> str | None:
    """An error message where a folder has less free space than that, or None."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    remedy = "make room"
    if folder.is_relative_to(MEMORY):
        remedy = (
            f"{MORE_SHARED_MEMORY}, clear it, or set {SETTING} to 'file', which puts them beside the"
            " experiment"
        )
    return (
        f"{folder} has {free / GIB:.1f} GiB free, and the weights that the trainer hands the engine there"
        f" ({VERSIONS} versions at once) take {needed / GIB:.1f}: {remedy}"
    )


def weights_folder(
    experiment: Path, purpose: str, ranks: Ranks, in_memory: bool = True
) -> tuple[Path, Path, bool]:
    """Makes this machine's empty folder for weights: in memory where that is wanted and there is /dev/shm,
    and otherwise beside the experiment. Returns it, the folder in which all ranks meet, and whether this rank
    writes the weights.

    With `in_memory` each machine has a folder of its own, otherwise all ranks share one, beside the
    experiment. In memory, where any user may put something, the name is random, so that nobody can be there
    first; the experiment's folder remembers it for the next start, which deletes what a killed run left.
    Nobody else can look into it. Raises ValueError where it is another user's.
    """
    machines = ranks.machines()
    here, several = machines[ranks.rank], len(set(machines)) > 1

    def named(*words: str) -> str:
        return held_folders.PREFIX + hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()

    # Evaluators on several machines may share the experiment's file system, and machines that are containers
    # one memory.
    identity = [str(experiment.resolve()), purpose, *([] if purpose == "run" else [machines[0]])]
    of_machine = named(*identity, *([here] if several and in_memory else []))
    writes = machines.index(here) == ranks.rank if in_memory else ranks.is_first
    folder: Path | None = None
    if writes:
        held_folders.sweep()
        remembered = experiment / f".{of_machine}"
        if in_memory and os.access(MEMORY, os.W_OK):
            _delete_remembered(remembered)
            folder = held_folders.new_in_memory()
            write_text(remembered, str(folder))
        else:
            folder = experiment / of_machine
            remove_folder(folder)
            new_own_folder(folder)
    made = ranks.exchange("weights folders", (here, None if folder is None else str(folder)))
    # Without memory, the first rank's folder is everybody's.
    paths = [path for machine, path in made if path is not None and (machine == here or not in_memory)]
    folder = Path(paths[0])
    meeting = folder
    if several:
        meeting = experiment / named(*identity)
        if ranks.is_first and meeting != folder:
            remove_folder(meeting)
            new_own_folder(meeting)
    ranks.barrier("the weights folder is empty")
    return folder, meeting, writes


def remembered_folder(remembered: Path) -> Path | None:
    """Returns the folder in memory whose name a run's last start has kept in a file; None where there is none
    that can be this user's."""
    try:
        folder = Path(remembered.read_text())
        about = folder.lstat()
    except (OSError, ValueError):
        return None
    is_ours = about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode)
    is_one_of_these = folder.parent == MEMORY and folder.name.startswith(held_folders.PREFIX)
    return folder if is_ours and is_one_of_these else None


def _delete_remembered(remembered: Path) -> None:
    """Deletes the folder that a killed run has left in memory. The run's lock says that nobody uses it."""
    folder = remembered_folder(remembered)
    if folder is not None:
        remove_folder(folder)
    remembered.unlink(missing_ok=True)
