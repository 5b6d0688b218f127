"""Engines on the stub server, and helpers for tests that watch processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import stub_server
from treetune.engine.base import Canary, Chunk, EngineLaunch, Rendezvous, TransferMethod
from treetune.engine.client import SAMPLES_ROUTE
from treetune.engine.engine import VllmEngine
from treetune.engine.guard import find_descendants
from treetune.engine.launch import ServerLaunch
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.engine.server import make_servers
from treetune.engine.settings import VllmSettings
from treetune.vocabulary import TokenIds, token_array


@dataclass(frozen=True)
class StubLaunch(ServerLaunch):
    faults: Path = field(default=Path())

    def command(self, weights: Path, port: int) -> list[str]:
        script = [sys.executable, "-S", str(stub_server.__file__)]
        return [*script, "--port", str(port), "--model", str(weights), str(self.faults)]


@dataclass
class Stub:
    """A folder with weights of several versions, the order of faults, and an engine on them."""

    folder: Path
    engine: VllmEngine | None = None

    def start(self, transfer: TransferMethod = "file", **settings: object) -> VllmEngine:
        launch = self.launch(transfer=transfer, **settings)
        self.engine = VllmEngine(launch.settings, launch.run, make_servers(launch, self.log, None))
        return self.engine

    def launch(
        self, ranks: Rendezvous | None = None, transfer: TransferMethod = "file", **settings: object
    ) -> StubLaunch:
        """Builds the launch of a server on the weights of version 0."""
        self.faults.mkdir(exist_ok=True)
        run = EngineLaunch(
            weights=self.weights(0),
            logs=self.log.parent,
            seed=0,
            context_length=stub_server.CONTEXT,
            ranks=ranks or Rendezvous(),
            transfer=transfer,
        )
        chosen = VllmSettings(**{"start_timeout": 20.0, **settings})  # type: ignore[arg-type]
        return StubLaunch(chosen, run, faults=self.faults)

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / "server-0.log"

    def weights(self, version: int) -> Path:
        folder = self.folder / f"{version:04d}"
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(f"weights {version}")
        return folder

    def chunks(self, version: int) -> Iterator[Chunk]:
        """The same weights in three chunks, each written when it is asked for."""
        folder = self.folder / f"{version:04d}"
        folder.mkdir()
        for number, part in enumerate(("wei", "ghts ", str(version))):
            path = folder / f"chunk-{number}"
            path.write_text(part)
            if number == 2:
                self.weights(version)
            yield Chunk(path, number, number == 2, "")

    def order(self, fault: str) -> None:
        self.faults.mkdir(exist_ok=True)
        (self.faults / fault).touch()

    def sample_requests(self) -> list[dict]:
        """Reads the requests for samples that the servers have had, in their order."""
        return [json.loads(line) for line in (self.faults / "asked.jsonl").read_text().splitlines()]

    def servers_of_requests(self) -> list[int]:
        """Returns, for each of `sample_requests`, the number of its server; the first that was asked is 0."""
        pids = [body["server"] for body in self.sample_requests()]
        distinct_pids = list(dict.fromkeys(pids))
        return [distinct_pids.index(pid) for pid in pids]

    def forget_requests(self) -> None:
        (self.faults / "asked.jsonl").write_text("")

    def slow_down(self, seconds: float) -> None:
        """Delays every answer by `seconds` from now on."""
        (self.faults / "slow").write_text(str(seconds))

    def paths(self) -> list[str]:
        """Returns the paths that the server was asked since the last call, without those of samples."""
        file = self.faults / "paths"
        paths = [path for path in file.read_text().splitlines() if path != SAMPLES_ROUTE]
        file.write_text("")
        return paths

    def starts(self) -> int:
        """Counts how often a server was started."""
        return self.log.read_text().count("\n=== ") if self.log.is_file() else 0

    def canary(self, version: int) -> Canary:
        """Builds the canary of a trainer that has exactly the weights of `version`."""

        def score(pairs: list[tuple[TokenIds, TokenIds]]) -> list[list[float]]:
            weights = f"weights {version}"
            return [stub_server.sample(weights, p.tolist(), 0, len(ids))[1] for p, ids in pairs]

        return Canary(prompts=[token_array((1, 2)), token_array((3,))], score=score, max_tokens=4)  # type: ignore[arg-type]


def request(seed: int, n: int = 2, prompt: TokenIds = (1, 2, 3), max_tokens: int = 5) -> Request:
    return Request(prompt, seed, n, SamplingParams(max_tokens))


def answers(seed: int, n: int = 2, version: int = 0) -> list[Completion]:
    """Returns the answers of the stub server to a `request`, from the weights of `version`."""
    samples = (stub_server.sample(f"weights {version}", [1, 2, 3], seed + i, 5) for i in range(n))
    return [Completion(tuple(ids), tuple(logprobs), "length", version) for ids, logprobs in samples]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits for `condition` and returns whether it came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def none_alive(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def below(pid: int) -> list[int]:
    return find_descendants(pid)
