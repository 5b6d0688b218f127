"""Measures the sampling of a run against vLLM's own ways to sample the same requests.

* `measure` and `measure_replicas`: the phases `rollout` and `credit` of an iteration, against
  ``LLM.generate``;
* `measure_public_routes`: the route of the servers that treetune starts, against the routes of a plain vLLM
  server.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from benchmarks.pairs import Measurement, Side, compute_rates, take_turns, time_calls
from benchmarks.peers import Child, digest_samples
from benchmarks.setting import Setting
from treetune.engine.base import Engine, EngineLaunch, EngineWrapper
from treetune.engine.engine import start_engine
from treetune.engine.launch import ServerLaunch, ServerProcess
from treetune.engine.requests import Completion, Deferred, OnResult, Request
from treetune.engine.settings import PlainVllmSettings, VllmSettings
from treetune.rollouts.context import RolloutContext
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.tasks.drawing import draw_problems

START_S = 600.0
"""Seconds within which vLLM starts."""
TURN_S = 600.0
"""Seconds within which vLLM samples all requests of a turn."""

Phase = Callable[[], Any]
"""Runs a phase of an iteration."""


class RecordingEngine(EngineWrapper):
    """Records the requests that it forwards, and their completions."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.requests: list[Request] = []
        self.completions: list[Completion] = []

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results = self.engine.generate(requests, on_result)
        for request in requests:
            assert isinstance(request, Request), "single answers wait for nothing"
            self.requests.append(request)
        self.completions += itertools.chain.from_iterable(results)
        return results


# Phases against LLM.generate


def measure(setting: Setting) -> dict[str, Measurement]:
    """Measures a run with one server against two offline engines: one whose core is a process of its own, as
    the server's is, and one that is a single process."""
    return measure_phases(setting, replicas=1)


def measure_replicas(setting: Setting) -> dict[str, Measurement]:
    """Measures a run with a server on each core against the same engines. Only on a CPU."""
    if torch.cuda.is_available():
        return {}
    return measure_phases(setting, replicas=len(os.sched_getaffinity(0)))


def measure_phases(setting: Setting, replicas: int) -> dict[str, Measurement]:
    """Measures the phases `rollout` and `credit` of a VinePPO iteration."""
    # On a GPU, three engines share its memory.
    config = setting.configuration("vineppo", setting.vllm_servers(replicas, gpu_memory_utilization=0.25))
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session) as server,
        RunResources.open(session, server) as resources,
    ):
        server.wait_until_ready()
        # vLLM makes sockets in this folder, so its path has to be short.
        with (
            tempfile.TemporaryDirectory() as scratch,
            start_offline_engine(session, server, Path(scratch), separate_core=True) as two_processes,
            start_offline_engine(session, server, Path(scratch), separate_core=False) as one_process,
        ):
            two_processes.wait_ready(deadline=START_S)
            one_process.wait_ready(deadline=START_S)
            problems = draw_problems(session.train_problems, setting.problems, config.seed, 0)
            trees, _ = config.rollout.run(make_context(resources, setting), problems)
            phases: dict[str, Phase] = {
                "rollout": lambda: config.rollout.run(make_context(resources, setting), problems),
                "credit": lambda: config.credit.assign(make_context(resources, setting), trees),
            }
            suffix = "" if replicas == 1 else f", {replicas} servers"
            measurements = {}
            for name, phase in phases.items():
                measurements[f"generation/{name}{suffix}"] = measure_phase(
                    resources, two_processes, one_process, setting, phase
                )
            return measurements


def measure_phase(
    resources: RunResources, two_processes: Child, one_process: Child, setting: Setting, phase: Phase
) -> Measurement:
    """Records the requests of a phase, and has all sides sample them in turns."""
    server = resources.server
    engine = server.engine
    assert engine is not None
    recording = RecordingEngine(engine)
    server.engine = recording
    try:
        phase()
    finally:
        server.engine = engine
    lengths = sorted(len(completion.token_ids) for completion in recording.completions)
    tokens = sum(lengths)
    requests = [request_as_json(request) for request in recording.requests]
    answer_of_vllm: dict[str, Any] = {}
    # One digest if all sides sample the same tokens.
    digests = {digest_samples(completion.token_ids for completion in recording.completions)}

    def offline_side(offline: Child) -> Side:
        def side(turn: int) -> float:
            answer_of_vllm.update(offline.ask({"requests": requests}, deadline=TURN_S))
            digests.add(answer_of_vllm["digest"])
            return answer_of_vllm["seconds"]

        return side

    sides = {
        "ours": time_calls(lambda turn: phase()),
        "theirs": offline_side(two_processes),
        "in_one_process": offline_side(one_process),
        "engine_alone": time_calls(lambda turn: engine.generate(recording.requests)),
    }
    seconds = take_turns(sides, setting.repeats)
    return Measurement(
        unit="tokens/s",
        ours=compute_rates(tokens, seconds["ours"]),
        theirs=compute_rates(answer_of_vllm["tokens"], seconds["theirs"]),
        what={
            "ours": "the phase as the runtime runs it: server, journal, grading, decoding, trajectories",
            "theirs": "vllm.LLM.generate alone, its core in a process of its own; same flags, weights,"
            " requests and seeds",
            "in_one_process": "the same with its core in its caller's process",
            "engine_alone": "the server and its client, without journal, grading, decoding and trajectories",
        },
        details={
            "requests": len(requests),
            "samples": len(lengths),
            "tokens": tokens,
            "tokens_mean": tokens / len(lengths),
            "tokens_max": lengths[-1],
            "same_tokens": len(digests) == 1,
            "in_one_process": compute_rates(tokens, seconds["in_one_process"]),
            "engine_alone": compute_rates(tokens, seconds["engine_alone"]),
        },
    )


def make_context(resources: RunResources, setting: Setting) -> RolloutContext:
    """Returns a context for a phase. Its journal is new, since answers that a journal has are not sampled
    again."""
    journal = Path(tempfile.mkdtemp(dir=setting.workspace)) / "journal.jsonl"
    config = resources.session.config
    return resources.context(config.rollout, seed=config.seed, iteration=0, journal=journal)


def start_offline_engine(
    session: Session, server: PolicyServer, scratch: Path, *, separate_core: bool
) -> Child:
    """Starts vLLM without a server, with the start weights and the options of the run's server.

    Args:
        session: The run.
        server: The run's server.
        scratch: A folder with a short path.
        separate_core: Whether the engine's core is a process of its own.
    """
    settings = session.config.engines.policy
    assert isinstance(settings, VllmSettings)
    engine_launch = make_engine_launch(session, server, scratch)
    launch = ServerLaunch(replace(settings, replicas=1), engine_launch)
    command = launch.command(engine_launch.weights, port=0)
    arguments = command[command.index("--host") :]
    environment = {**launch.environment(scratch), "VLLM_LOGGING_LEVEL": "ERROR"}
    peer_settings = {"arguments": arguments, "core": separate_core}
    return Child("offline_vllm", peer_settings, environment=environment)


def make_engine_launch(session: Session, server: PolicyServer, logs: Path) -> EngineLaunch:
    """Returns the facts with which a second engine on the run's start weights is started."""
    assert server.folder is not None
    return EngineLaunch(
        weights=server.folder.of(0),
        logs=logs,
        seed=session.config.seed,
        context_length=session.config.context_length,
        device=session.ranks.device.type,
        end_ids=session.model.codec.end_ids,
    )


def request_as_json(request: Request) -> dict[str, Any]:
    """Returns a request as `offline_vllm` reads it."""
    sampling = request.sampling
    return {
        "prompt_ids": request.prompt_ids.tolist(),
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


# The route of our servers against those of a plain server


class PlainLaunch(ServerLaunch):
    """The launch of a server with vLLM's own scheduler and routes alone."""

    @override
    def command(self, weights: Path, port: int) -> list[str]:
        command = super().command(weights, port)
        for option in ("--scheduler-cls", "--middleware", "--middleware"):
            position = command.index(option)
            del command[position : position + 2]  # the option and its value
        return [*command, "--enable-scale-out"]


def measure_public_routes(setting: Setting) -> dict[str, Measurement]:
    """Measures the route of the servers that treetune starts against those of a plain server, with the same
    flags, weights, requests and seeds."""
    config = setting.configuration("vineppo", setting.vllm_servers(1, gpu_memory_utilization=0.3))
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session) as server,
        RunResources.open(session, server) as resources,
        tempfile.TemporaryDirectory() as scratch,
    ):
        server.wait_until_ready()
        our_engine = server.engine
        assert our_engine is not None
        recording = RecordingEngine(our_engine)
        server.engine = recording
        problems = draw_problems(session.train_problems, setting.problems, config.seed, 0)
        config.rollout.run(make_context(resources, setting), problems)
        server.engine = our_engine

        engine_launch = make_engine_launch(session, server, Path(scratch))
        settings = session.config.engines.policy
        assert isinstance(settings, VllmSettings)
        plain_launch = PlainLaunch(replace(settings, replicas=1), engine_launch)
        process = ServerProcess(plain_launch, engine_launch.weights, Path(scratch) / "plain.log")
        try:
            plain_engines = start_plain_engines(process.url, settings, engine_launch)
            return measure_routes(our_engine, plain_engines, recording.requests, setting.repeats)
        finally:
            process.end()


def start_plain_engines(url: str, settings: VllmSettings, launch: EngineLaunch) -> dict[str, Engine]:
    """Returns a client of the plain server for each of its routes."""
    engines = {}
    for route in ("tokens", "completions"):
        plain_settings = PlainVllmSettings(
            addresses=(url,),
            route=route,
            weight_transfer="none",
            max_num_seqs=settings.max_num_seqs,
            max_concurrency=settings.max_concurrency,
        )
        engines[route] = start_engine(plain_settings, launch)
    return engines


def measure_routes(
    our_engine: Engine, plain_engines: dict[str, Engine], requests: Sequence[Request], repeats: int
) -> dict[str, Measurement]:
    """Has all engines sample the requests in turns, and closes the plain ones."""
    digests: set[str] = set()  # a single one if all engines sample the same tokens

    def engine_side(engine: Engine) -> Side:
        def side(turn: int) -> float:
            start = time.perf_counter()
            results = engine.generate(requests)
            seconds = time.perf_counter() - start
            digests.add(digest_samples(token_ids_of(results)))
            return seconds

        return side

    sides = {"private": engine_side(our_engine)}
    for route, engine in plain_engines.items():
        sides[route] = engine_side(engine)
    try:
        for engine in plain_engines.values():
            engine.wait_ready()
        tokens_before = our_engine.tokens
        our_engine.generate(requests)
        tokens = our_engine.tokens - tokens_before
        seconds = take_turns(sides, repeats)
    finally:
        for engine in plain_engines.values():
            engine.close()
    measurements = {}
    for route in plain_engines:
        measurements[f"generation/private route, against {route}"] = Measurement(
            unit="tokens/s",
            ours=compute_rates(tokens, seconds["private"]),
            theirs=compute_rates(tokens, seconds[route]),
            what={
                "ours": "the server that treetune starts, with whole answers by its own route",
                "theirs": f"a plain vLLM server by its route of {route}; same flags, weights, requests and"
                " seeds",
            },
            details={"requests": len(requests), "tokens": tokens, "same_tokens": len(digests) == 1},
        )
    return measurements


def token_ids_of(results: Sequence[Sequence[Completion]]) -> Iterable[Any]:
    """Yields the token ids of each completion."""
    for completions in results:
        for completion in completions:
            yield completion.token_ids
