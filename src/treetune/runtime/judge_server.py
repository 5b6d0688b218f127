"""The model that a run serves to judge answers, from the start of its server to its end."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from treetune.domains.endpoints.client import EndpointClient
from treetune.domains.endpoints.settings import Message, Place
from treetune.domains.graders.judge import JudgeGrader, JudgeModel, RunningJudge, asks_the_run
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.client import MODEL_NAME, Address
from treetune.engine.server import POLL_S, Server, close_servers, start_servers
from treetune.exceptions import EndpointError, RequestRefused, Unanswered
from treetune.models.policy_files import resolve_policy
from treetune.runtime.session import Session
from treetune.runtime.weights_folder import weights_folder
from treetune.tasks.base import Task
from treetune.vocabulary import Problem


@contextmanager
def judge_server(session: Session) -> Iterator[RunningJudge | None]:
    """The server starts in the background: whoever asks first waits for it. None where there is no such
    model. Collective.
    """
    settings, ranks = session.config.engines.judge, session.ranks
    if settings is None:
        yield None
        return
    assert isinstance(settings, JudgeModel)
    machines = sorted(set(ranks.machines()))
    if len(machines) > 1:
        raise ValueError(
            f"engines.judge is served on one machine, and the ranks are on {len(machines)}"
            f" ({', '.join(machines)}): serve the judge yourself, and give the grader its endpoint"
        )
    _, rendezvous, _ = weights_folder(session.directory.path, f"{session.purpose} judge", ranks)
    model = ranks.from_first("the judge's model", str(downloaded(settings)) if ranks.is_first else "")
    logs = session.directory.logs
    launch = EngineLaunch(
        weights=Path(model),
        logs=logs if session.purpose == "run" else logs / session.purpose,
        seed=session.config.seed,
        context_length=settings.context_length,
        device=ranks.device.type,
        ranks=Rendezvous(ranks.rank, ranks.world_size, rendezvous, ranks.barrier),
    )
    servers = start_servers(settings.server, launch, launch.logs / "judge.log")

    try:
        yield served(settings, servers)
    finally:
        close_servers(servers)
        shutil.rmtree(rendezvous, ignore_errors=True)


def served(settings: JudgeModel, servers: Sequence[Server]) -> RunningJudge:
    """The judge behind these servers, which are alike."""
    turns = itertools.count()

    def place() -> Place:
        """Returns the servers that are there, each in its turn; where none is, the first that comes."""
        while not (addresses := [address for server in servers if (address := server.now()) is not None]):
            time.sleep(POLL_S)
        return _place(addresses[next(turns) % len(addresses)])

    def failed(where: Place, reason: str) -> None:
        for server in servers:
            if (address := server.now()) is not None and _place(address) == where:
                server.failed(address, reason)

    def succeeded() -> None:
        for server in servers:
            server.succeeded()

    judge = RunningJudge(
        asking=settings,
        place=place,
        name=MODEL_NAME,
        identity=f"{settings.model}@{settings.revision or ''}",
        failed=failed,
        succeeded=succeeded,
    )
    return replace(judge, refuse_unusable=partial(refuse_dumb, judge))


def refuse_dumb(judge: RunningJudge, task: Task, problems: Sequence[Problem]) -> None:
    """Asks the judge about one empty answer. Raises ValueError where it can't be asked: a model without a
    chat template, or one whose tokenizer has no tokens for the prompt, is otherwise found after a rollout."""
    graders_by_problem = ((problem, part) for problem in problems for part in task.grader.of(problem).parts())
    first = next(((problem, part) for problem, part in graders_by_problem if asks_the_run(part)), None)
    if first is None:
        return
    problem, grader = first
    assert isinstance(grader, JudgeGrader)
    system: list[Message] = [] if grader.system is None else [("system", grader.system)]
    asking = replace(judge.asking, retries=0)
    body = asking.question(judge.name, [*system, ("user", grader.question("", problem))], {})

    async def ask() -> None:
        async with EndpointClient(asking, judge.place, lambda: False) as client:
            await client.ask(body)

    try:
        asyncio.run(ask())
    except (EndpointError, Unanswered) as error:
        if not isinstance(error, EndpointError | RequestRefused) and "HTTP 500" not in str(error):
            return  # away for a moment, or killed: questions have the patience for that, and servers restart
        raise ValueError(
            f"the judge, engines.judge.model {judge.identity!r}, can't be asked: {error}. It needs a chat"
            " template, or engines.judge.api 'completions', and a tokenizer that has tokens for the prompt"
        ) from error


def _place(address: Address) -> Place:
    return Place(f"{address.url}/v1", address.key, "the server that was started here")


def downloaded(settings: JudgeModel) -> Path:
    """The model's folder. Raises ValueError where it can't be had."""
    path = Path(resolve_policy(settings.model))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(settings.model, revision=settings.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"engines.judge.model {settings.model!r} is no folder here, and can't be had from the hub:"
            f" {first}"
        ) from error
