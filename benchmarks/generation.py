"""The run's generation and credit phases against vLLM's own ``LLM.generate`` on the same requests, and its
route against vLLM's own routes."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import Measurement, Side, in_turns, rates, timed
from benchmarks.peers import Child, digest
from benchmarks.setting import Setting
from treetune.engine.base import Canary, Chunk, Engine, EngineLaunch, SyncReport
from treetune.engine.engine import start_engine
from treetune.engine.launch import ServerLaunch, ServerProcess
from treetune.engine.requests import Completion, OnResult, Request
from treetune.engine.settings import PlainVllmSettings, VllmSettings
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.tasks.drawing import draw_problems

START_S = 600.0
TURN_S = 600.0


@dataclass
class RecordingEngine(Engine):
    """Keeps what was asked and answered."""

    engine: Engine
    requests: list[Request] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results = self.engine.generate(requests, on_result)
        self.requests += requests
        self.completions += itertools.chain.from_iterable(results)
        return results

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        return self.engine.load(directory, version, canary, chunks)

    def asleep(self) -> AbstractContextManager[None]:
        return self.engine.asleep()


def measure(setting: Setting) -> dict[str, Measurement]:
    """With one server, against the bare engine with as many processes: the engine's, and its caller's."""
    return _measure(setting, replicas=1)


def measure_replicas(setting: Setting) -> dict[str, Measurement]:
    """With a server on each core, against one bare engine; on a CPU."""
    if torch.cuda.is_available():
        return {}
    return _measure(setting, replicas=len(os.sched_getaffinity(0)))


def _measure(setting: Setting, replicas: int) -> dict[str, Measurement]:
    # Three engines share a GPU.
    config = setting.configuration("vineppo", setting.vllm_servers(replicas, gpu_memory_utilization=0.25))
    of = "" if replicas == 1 else f", {replicas} servers"
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session) as server,
        RunResources.open(session, server) as resources,
    ):
        server.ready()
        # Short, since sockets are made there, whose paths have a limit.
        with (
            tempfile.TemporaryDirectory() as scratch,
            offline_engine(session, server, Path(scratch), core=True) as apart,
            offline_engine(session, server, Path(scratch), core=False) as together,
        ):
            for one in (apart, together):
                one.wait_ready(deadline=START_S)
            rollout_context = lambda: _context(resources, setting)  # noqa: E731
            problems = draw_problems(session.train_problems, setting.problems, config.seed, 0)
            trees, _ = config.rollout.run(rollout_context(), problems)
            phases: dict[str, Callable[[], Any]] = {
                "rollout": lambda: config.rollout.run(rollout_context(), problems),
                "credit": lambda: config.credit.assign(rollout_context(), trees),
            }
            return {
                f"generation/{name}{of}": _against_offline(resources, apart, together, setting, phase)
                for name, phase in phases.items()
            }


def measure_public_routes(setting: Setting) -> dict[str, Measurement]:
    """The route of servers that treetune starts, against vLLM's own routes of a plain server with the same
    flags, weights, requests and seeds."""
    config = setting.configuration("vineppo", setting.vllm_servers(1, gpu_memory_utilization=0.3))
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session) as server,
        RunResources.open(session, server) as resources,
        tempfile.TemporaryDirectory() as scratch,
    ):
        server.ready()
        private = server.engine
        assert private is not None
        server.engine = recording = RecordingEngine(private)
        problems = draw_problems(session.train_problems, setting.problems, config.seed, 0)
        config.rollout.run(_context(resources, setting), problems)
        server.engine = private
        requests = recording.requests

        launch = engine_launch(session, server, Path(scratch))
        settings = session.config.engines.policy
        assert isinstance(settings, VllmSettings)
        plain_launch = PlainLaunch(replace(settings, replicas=1), launch)
        process = ServerProcess(plain_launch, launch.weights, Path(scratch) / "plain.log")
        try:
            return _public_against_private(private, process.url, settings, launch, requests, setting.repeats)
        finally:
            process.end()


class PlainLaunch(ServerLaunch):
    """The launch of a server with vLLM's own scheduler and routes alone."""

    def command(self, weights: Path, port: int) -> list[str]:
        command = super().command(weights, port)
        for option in ("--scheduler-cls", "--middleware", "--middleware"):
            position = command.index(option)
            del command[position : position + 2]
        return [*command, "--enable-scale-out"]


def _public_against_private(
    private: Engine,
    url: str,
    settings: VllmSettings,
    launch: EngineLaunch,
    requests: Sequence[Request],
    repeats: int,
) -> dict[str, Measurement]:
    routes: dict[str, Engine] = {}
    for route in ("tokens", "completions"):
        plain = PlainVllmSettings(
            addresses=(url,),
            route=route,  # type: ignore[arg-type]
            weight_transfer="none",
            max_num_seqs=settings.max_num_seqs,
            max_concurrency=settings.max_concurrency,
        )
        routes[route] = start_engine(plain, launch)
    digests = set()

    def ask(engine: Engine) -> Side:
        def side(turn: int) -> float:
            start = time.perf_counter()
            results = engine.generate(requests)
            seconds = time.perf_counter() - start
            completions = itertools.chain.from_iterable(results)
            digests.add(digest(completion.token_ids for completion in completions))
            return seconds

        return side

    try:
        for engine in routes.values():
            engine.wait_ready()
        before = private.tokens
        private.generate(requests)
        tokens = private.tokens - before
        sides = {"private": ask(private)} | {route: ask(engine) for route, engine in routes.items()}
        seconds = in_turns(sides, repeats)
    finally:
        for engine in routes.values():
            engine.close()
    return {
        f"generation/private route, against {route}": Measurement(
            unit="tokens/s",
            ours=rates(tokens, seconds["private"]),
            theirs=rates(tokens, seconds[route]),
            what={
                "ours": "the server that treetune starts, with whole answers by its own route",
                "theirs": f"a plain vLLM server by its route of {route}; same flags, weights, requests and"
                " seeds",
            },
            details={"requests": len(requests), "tokens": tokens, "same_tokens": len(digests) == 1},
        )
        for route in routes
    }


def engine_launch(session: Session, server: PolicyServer, logs: Path) -> EngineLaunch:
    """The run's facts with which a second engine on its start weights is started."""
    assert server.folder is not None
    return EngineLaunch(
        weights=server.folder.of(0),
        logs=logs,
        seed=session.config.seed,
        context_length=session.config.context_length,
        device=session.ranks.device.type,
        end_ids=session.model.codec.end_ids,
    )


def offline_engine(session: Session, server: PolicyServer, scratch: Path, *, core: bool) -> Child:
    """vLLM on the run's start weights, told what the run's server is told: its core in a process of its own,
    or all of it in one."""
    settings = session.config.engines.policy
    assert isinstance(settings, VllmSettings)
    run = engine_launch(session, server, scratch)
    launch = ServerLaunch(replace(settings, replicas=1), run)
    command = launch.command(run.weights, port=0)
    arguments = command[command.index("--host") :]
    environment = {**launch.environment(scratch), "VLLM_LOGGING_LEVEL": "ERROR"}
    return Child("offline_vllm", {"arguments": arguments, "core": core}, environment=environment)


def _context(resources: RunResources, setting: Setting) -> Any:
    """What the runtime lends to a phase; a new journal each time, or the answers would be found there."""
    journal = Path(tempfile.mkdtemp(dir=setting.workspace)) / "journal.jsonl"
    rollout = resources.session.config.rollout
    return resources.context(rollout, seed=resources.session.config.seed, iteration=0, journal=journal)


def _against_offline(
    resources: RunResources, apart: Child, together: Child, setting: Setting, phase: Callable[[], Any]
) -> Measurement:
    server = resources.server
    engine = server.engine
    assert engine is not None
    recording = RecordingEngine(engine)
    server.engine = recording
    try:
        phase()
    finally:
        server.engine = engine
    tokens = sum(len(completion.token_ids) for completion in recording.completions)
    plain = [_as_json(request) for request in recording.requests]
    theirs: dict[str, Any] = {}
    digests = {digest(completion.token_ids for completion in recording.completions)}

    def ask(offline: Child) -> Side:
        def side(turn: int) -> float:
            theirs.update(offline.ask({"requests": plain}, deadline=TURN_S))
            digests.add(theirs["digest"])
            return theirs["seconds"]

        return side

    sides: dict[str, Side] = {
        "ours": timed(lambda turn: phase()),
        "theirs": ask(apart),
        "in_one_process": ask(together),
        "engine_alone": timed(lambda turn: engine.generate(recording.requests)),
    }
    seconds = in_turns(sides, setting.repeats)
    lengths = sorted(len(completion.token_ids) for completion in recording.completions)
    return Measurement(
        unit="tokens/s",
        ours=rates(tokens, seconds["ours"]),
        theirs=rates(theirs["tokens"], seconds["theirs"]),
        what={
            "ours": "the phase as the runtime runs it: server, journal, grading, decoding, trajectories",
            "theirs": "vllm.LLM.generate alone, its core in a process of its own; same flags, weights,"
            " requests and seeds",
            "in_one_process": "the same with its core in its caller's process",
            "engine_alone": "the server and its client, without journal, grading, decoding and trajectories",
        },
        details={
            "requests": len(plain),
            "samples": len(lengths),
            "tokens": tokens,
            "tokens_mean": tokens / len(lengths),
            "tokens_max": lengths[-1],
            "same_tokens": len(digests) == 1,
            "in_one_process": rates(tokens, seconds["in_one_process"]),
            "engine_alone": rates(tokens, seconds["engine_alone"]),
        },
    )


def _as_json(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "prompt_ids": [int(token) for token in request.prompt_ids],
        "sampling": {
            "n": request.n,
            "seed": int(request.seed),
            "max_tokens": int(sampling.max_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0 if request.reads_logprobs else None,
        },
    }
