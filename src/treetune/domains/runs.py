"""Services of every run: the model that judges answers, and environments with a journal of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.contracts import PHASE_SERVICES, RUN_SERVICES

if TYPE_CHECKING:
    from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
    from treetune.domains.graders.judge import RunningJudge
    from treetune.runtime.session import Session


@RUN_SERVICES.register("judge")
def judge(session: Session) -> AbstractContextManager[RunningJudge | None]:
    from treetune.domains.judge_server import judge_server

    return judge_server(session)


@RUN_SERVICES.register("environments")
def environments(session: Session) -> AbstractContextManager[EnvironmentPool]:
    from treetune.domains.environments.pool import EnvironmentPool

    return EnvironmentPool(timeline=session.console.timeline)


@PHASE_SERVICES.register("turns")
def turns(journal: Path, others: Sequence[Path]) -> TurnJournal:
    from treetune.domains.environments.pool import SUFFIX, TurnJournal

    return TurnJournal(journal.with_suffix(SUFFIX), [other.with_suffix(SUFFIX) for other in others])
