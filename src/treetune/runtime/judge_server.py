"""Starts the server of a model that judges answers, and ends it with the run."""

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
from treetune.domains.endpoints.settings import EndpointAddress, EndpointMessage
from treetune.domains.graders.judge import JudgeGrader, JudgeModel, RunningJudge, asks_the_run
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.client import MODEL_NAME, Address
from treetune.engine.server import POLL_SERVER_EVERY_S, Server, close_servers, start_servers
from treetune.exceptions import EndpointError, RequestRefused, Unanswered
from treetune.models.policy_files import resolve_policy
from treetune.runtime.session import Session
from treetune.runtime.weights_folder import make_weights_folder
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Problem


@contextmanager
def judge_server(session: Session) -> Iterator[RunningJudge | None]:
    """Yields the judge of `engines.judge`; None if there is none. Its server starts in the background, and
    the first question waits for it. Collective."""
    settings, ranks = session.config.engines.judge, session.ranks
    if settings is None:
        yield None
        return
    assert isinstance(settings, JudgeModel)  # the only kind of `engines.judge`
    machines = sorted(set(ranks.machines()))
    if len(machines) > 1:
        raise ValueError(
            f"engines.judge is served on one machine, and the ranks are on {len(machines)}"
            f" ({', '.join(machines)}): serve the judge yourself, and give the grader its endpoint"
        )
    # The judge's weights stay in the folder of its model. Only the folder in which the ranks find the judge's
    # servers is needed.
    rendezvous_folder = make_weights_folder(session.directory.path, f"{session.purpose} judge", ranks).meeting
    # The first rank downloads the model if it isn't on this machine.
    model = ranks.from_first("the judge's model", str(model_folder(settings)) if ranks.is_first else "")
    logs = session.directory.logs_folder
    launch = EngineLaunch(
        weights=Path(model),
        logs=logs if session.purpose == "run" else logs / session.purpose,
        seed=session.config.seed,
        context_length=settings.context_length,
        device=ranks.device.type,
        ranks=Rendezvous(ranks.rank, ranks.world_size, rendezvous_folder, ranks.barrier),
    )
    servers = start_servers(settings.server, launch, launch.logs / "judge.log")
    try:
        yield make_judge(settings, servers)
    finally:
        close_servers(servers)
        shutil.rmtree(rendezvous_folder, ignore_errors=True)


def make_judge(settings: JudgeModel, servers: Sequence[Server]) -> RunningJudge:
    """Returns a judge that asks these servers, which all serve the same model."""
    question_numbers = itertools.count()

    def choose_server() -> EndpointAddress:
        """Returns the next of the running servers, which take turns; waits if none is running."""
        while True:
            addresses = [address for server in servers if (address := server.current_address()) is not None]
            if addresses:
                return _endpoint_address(addresses[next(question_numbers) % len(addresses)])
            time.sleep(POLL_SERVER_EVERY_S)

    def report_failure(failed_address: EndpointAddress, reason: str) -> None:
        for server in servers:
            address = server.current_address()
            if address is not None and _endpoint_address(address) == failed_address:
                server.report_failure(address, reason)

    def report_success() -> None:
        # The caller doesn't tell which server has answered, so the success counts for all of them.
        for server in servers:
            server.report_success()

    judge = RunningJudge(
        request_settings=settings,
        choose_server=choose_server,
        name=MODEL_NAME,
        identity=f"{settings.model}@{settings.revision or ''}",
        report_failure=report_failure,
        report_success=report_success,
    )
    # `refuse_unusable` asks this judge a question, so it is added once the judge has been made.
    return replace(judge, refuse_unusable=partial(refuse_unusable_judge, judge))


def refuse_unusable_judge(judge: RunningJudge, task: Task, problems: Sequence[Problem]) -> None:
    """Asks the judge about an empty answer, before the first rollout.

    Raises:
        ValueError: The judge can't answer: for example, its model has no chat template, or its tokenizer
            can't encode the prompt.
    """
    first_use = _find_first_use(task, problems)
    if first_use is None:
        return
    problem, grader = first_use
    assert isinstance(grader, JudgeGrader)
    messages: list[EndpointMessage] = [] if grader.system is None else [("system", grader.system)]
    messages.append(("user", grader.question("", problem)))
    # Without retries, a judge that can't answer is reported at once.
    request_settings = replace(judge.request_settings, retries=0)
    body = request_settings.request_body(judge.name, messages, extra={})

    async def ask() -> None:
        async with EndpointClient(request_settings, judge.choose_server, is_stopping=lambda: False) as client:
            await client.ask(body)

    try:
        asyncio.run(ask())
    except (EndpointError, Unanswered) as error:
        # HTTP 500 comes from a server that runs, but fails on this prompt, for example in encoding it.
        can_never_answer = isinstance(error, EndpointError | RequestRefused) or "HTTP 500" in str(error)
        if not can_never_answer:
            return  # the server was killed and will be restarted, and questions wait for that
        raise ValueError(
            f"the judge, engines.judge.model {judge.identity!r}, can't answer: {error}. It needs a chat"
            " template, or engines.judge.api 'completions', and a tokenizer that can encode the prompt"
        ) from error


def _find_first_use(task: Task, problems: Sequence[Problem]) -> tuple[Problem, Grader] | None:
    """Returns the first problem with a grader that asks the run's judge, and that grader; None if there is
    none."""
    for problem in problems:
        for grader in task.grader.of(problem).parts():
            if asks_the_run(grader):
                return problem, grader
    return None


def _endpoint_address(address: Address) -> EndpointAddress:
    return EndpointAddress(f"{address.url}/v1", address.key, "the server that was started here")


def model_folder(settings: JudgeModel) -> Path:
    """Returns the model's folder. Downloads a model of the hub first, and raises ValueError if the download
    fails."""
    path = Path(resolve_policy(settings.model))
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(settings.model, revision=settings.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"engines.judge.model {settings.model!r} is not a local folder, and can't be downloaded from the"
            f" hub: {first_line}"
        ) from error
