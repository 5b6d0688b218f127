"""Uses servers that `vllm serve` started, on this machine or on others, with a router or without.

A run that trains names the weights in each server (``/update_weight_version``), and asks every few seconds
for the name (``/weight_info``). A server that was restarted, or that another run has given weights, has
another name, and gets the newest weights again. With a router::

                    samples                            weights, canary, name of the weights
    engine ───────► Router ───► vLLM's servers   ◄─────────────────────────────────── engine
                     `RouterOfServers`            one `PlainServer` each

An answer names the weights that sampled it. If they are others than the run's, the router counts as lost
until each server behind it has the run's weights again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from treetune.engine.addressed import ANSWER_TIMEOUT_S, AddressedServer, ServerState
from treetune.engine.base import EngineLaunch
from treetune.engine.client import Address
from treetune.engine.plain_client import NAME_WHILE_REPLACED, PATH_OF_ROUTE, PlainClient, ServerFacts
from treetune.engine.server import Server
from treetune.engine.settings import PlainVllmSettings
from treetune.exceptions import EngineError, ServerFailure

logger = logging.getLogger(__name__)

REMEDY_TO_LOAD_WEIGHTS = (
    "start it with the environment variable VLLM_SERVER_DEV_MODE=1, on a network that only you can reach"
)
"""The remedy for servers that can't load weights, for messages."""

TOLERANCE_FACTOR = 4
"""A server's weights count as others if their log-probs differ by more than this many times the canary's
tolerance. A greedy sample has few tokens, so its mean difference is less certain than a canary's."""


class PlainServers(NamedTuple):
    """The servers of an engine, and the client that asks them."""

    client: PlainClient
    servers: Sequence[Server]
    router: Server | None


def connect_plain_servers(settings: PlainVllmSettings, launch: EngineLaunch) -> PlainServers:
    """Begins to connect to the servers of the settings. Collective.

    Raises:
        ValueError: The API key or the certificate can't be read.
    """
    key = settings.api_key()
    # A name of this run, which no other run has. The names of its weights begin with it, so that a server
    # with the weights of another run is noticed.
    run = launch.ranks.gather(secrets.token_hex(8))[0]
    client = PlainClient(settings, launch.end_ids, launch.special_ids, salt=f"{run}-")
    # Only the first rank loads weights. It loads them into the servers themselves, and not through a router.
    # With a router, `settings.servers` are the servers behind it, and `settings.addresses` is its address.
    is_first = launch.ranks.rank == 0
    urls = settings.servers or settings.addresses
    servers = [PlainServer(url, key, settings, launch, run, client, loads_weights=is_first) for url in urls]
    router = None
    if settings.servers is not None:
        (url,) = settings.addresses
        router = RouterOfServers(servers, url, key, settings, launch, run, client, loads_weights=False)
    return PlainServers(client, servers, router)


class PlainServer(AddressedServer):
    """A server that `vllm serve` started.

    If the server can't load weights, it keeps those that it has, and the run takes them for its start
    weights. Whenever the server comes back, the log-probs of a greedy sample show whether it still has them.
    """

    start_command = "vllm serve"

    def __init__(
        self,
        url: str,
        key: str,
        settings: PlainVllmSettings,
        launch: EngineLaunch,
        run: str,
        client: PlainClient,
        *,
        loads_weights: bool,
    ) -> None:
        # All of these are set first, since the constructor of the base class starts a thread that reads them.
        self._plain_client, self._trains = client, launch.trains
        self._context_length = launch.context_length
        # Log-probs that differ by more than this on average are those of other weights.
        self._tolerance = TOLERANCE_FACTOR * settings.tolerance(launch.device).mean
        self._first_facts: ServerFacts | None = None
        """The facts about the server when it was met first."""
        self._meetings = 0
        """The number of attempts to meet the server, which are made only while it is away."""
        super().__init__(url, key, settings, launch.weights, run, client, loads_weights=loads_weights)

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        """Has the server's thread load the weights again. Gives up a server that has no routes for that."""
        with self._changed:
            if not self._takes_weights:
                self._error = self._explain_no_loading()
        # This is called for a server that was given up, too. It notifies waiting threads, which then raise
        # the error.
        super().start_anew(weights, reason)

    @override
    def _meet(self) -> None:
        # No route of vLLM tells one process from the next, so each meeting counts as a new one.
        self._meetings += 1
        super()._meet()

    @override
    def _introduce(self) -> ServerState:
        """Asks the server for the facts about it, and refuses one that this run can't use."""
        facts_before = self._plain_client.facts.get(self._url)
        facts = self._plain_client.meet(self._unnamed_address, ANSWER_TIMEOUT_S)
        # Only the first rank loads weights. It logs for all ranks.
        if self.loads_weights and facts != facts_before:
            about_weights = "gets new weights as files" if facts.takes_weights else "keeps its weights"
            logger.info(
                f"the server at {self._url} has the model {facts.root}, samples by"
                f" {PATH_OF_ROUTE[facts.route]} and {about_weights}"
            )
        says_length = facts.context_length > 0
        if says_length and self._context_length > facts.context_length:
            raise EngineError(
                f"the server at {self._url} takes {facts.context_length} tokens of prompt and response, and"
                f" context_length is {self._context_length}: start it with --max-model-len"
                f" {self._context_length}, or lower context_length"
            )
        if self._trains and not facts.takes_weights:
            raise EngineError(f"{self._explain_no_loading()}. This run trains, so it needs new weights")
        self._refuse_change(facts)
        return self._describe()

    def _refuse_change(self, facts: ServerFacts) -> None:
        """Raises EngineError if the server came back with other weights, or without the routes that load the
        run's weights."""
        first_facts = self._first_facts or facts
        self._first_facts = first_facts
        if first_facts.takes_weights and not facts.takes_weights:
            raise EngineError(
                f"the server at {self._url} was restarted without the routes that load weights, and the run"
                f" had loaded weights into it: {REMEDY_TO_LOAD_WEIGHTS}"
            )
        difference = facts.differs_from(first_facts, self._tolerance)
        # Other weights matter only if the server can't load weights. If it can, the run's weights are loaded
        # into it again.
        if not facts.takes_weights and difference is not None:
            raise EngineError(
                f"the server at {self._url} was away, and came back with other weights ({difference}), so"
                " that the answers are of two models: start it with the weights that it had, and repeat this"
                " evaluation or call"
            )

    @override
    def _describe(self) -> ServerState:
        """Returns the server's process and the name of its weights, as far as vLLM's routes show them."""
        # No route of vLLM shows whether the server was restarted. So a server that comes back after an
        # absence counts as a new process. `_meetings`, which has grown by then, serves as the process's name.
        process = str(self._meetings)
        if not self._takes_weights:
            # This only shows whether the server answers. `_refuse_change` notices a restart with other
            # weights.
            self._plain_client.get(self._unnamed_address, "/v1/models", ANSWER_TIMEOUT_S)
            return ServerState(process, self._weights_name)
        info = self._plain_client.get(self._unnamed_address, "/weight_info", ANSWER_TIMEOUT_S)
        return ServerState(process, info.get("weight_version") or "")

    @override
    def _load(self, weights: Path) -> None:
        if self._takes_weights:
            super()._load(weights)

    @override
    def _name_weights(self, address: Address, name: str) -> None:
        if not self._takes_weights:
            raise ServerFailure(self._explain_no_loading())
        body = {"new_version": name or NAME_WHILE_REPLACED}
        self._client.post(address, "/update_weight_version", body, timeout=ANSWER_TIMEOUT_S)

    @override
    def _weights_name_of(self, weights: Path) -> str:
        return super()._weights_name_of(weights) if self._takes_weights else ""

    def _explain_no_loading(self) -> str:
        """Returns why no weights can be loaded into the server, and the remedy."""
        if self._plain_client.keeps_weights:
            return (
                f"the server at {self._url} keeps its weights, since"
                f" {self._settings.key_path}.weight_transfer is 'none': set it to 'auto'"
            )
        return f"the server at {self._url} has no routes that load weights: {REMEDY_TO_LOAD_WEIGHTS}"

    @property
    def _takes_weights(self) -> bool:
        facts = self._plain_client.facts.get(self._url)
        return facts is not None and facts.takes_weights

    @property
    def _unnamed_address(self) -> Address:
        """The address without the name of the run's weights, for requests that any weights may answer."""
        return self._make_address(with_weights=False)


class RouterOfServers(PlainServer):
    """A router in front of plain servers. The router is asked for samples. It is present only if each of the
    servers is."""

    start_command = "your router"

    def __init__(self, servers: Sequence[PlainServer], *arguments: Any, loads_weights: bool) -> None:
        self._servers = servers
        super().__init__(*arguments, loads_weights=loads_weights)

    @override
    def _introduce(self) -> ServerState:
        """Returns the router's state if it and all of its servers are present."""
        for server in self._servers:
            # The thread of this server checks it now and then. Its last check may have been before the
            # failure that made the router go away.
            server.check_now()
            if server.current_address() is None:
                raise ServerFailure(f"a server behind it is away: {server.reason_away}")
        facts_by_url = self._plain_client.facts
        # The requests of `meet` go through the router to one of its servers, and a later request may reach
        # another server. So the router counts as returning processed log-probs only if all its servers do.
        # (These are of the distribution after temperature, top-p and top-k.)
        facts_of_one = self._plain_client.meet(self._unnamed_address, ANSWER_TIMEOUT_S, is_router=True)
        all_processed = all(facts_by_url[server._url].has_processed_logprobs for server in self._servers)
        facts_by_url[self._url] = replace(facts_of_one, has_processed_logprobs=all_processed)
        return self._describe()

    @override
    def _describe(self) -> ServerState:
        """Returns the router's state. Raises EngineError if one of its servers was given up."""
        for server in self._servers:
            if server.error is not None:
                raise EngineError(server.error)
        # This only shows whether the router answers. Each server is asked for its weights by its own thread,
        # since a question to the router may reach any of the servers.
        self._plain_client.get(self._unnamed_address, "/v1/models", ANSWER_TIMEOUT_S)
        # No route shows whether the router was restarted. So a router that comes back after an absence counts
        # as a new process. `_meetings`, which has grown by then, serves as the process's name.
        return ServerState(process=str(self._meetings), weights=self._weights_name)

    @property
    @override
    def _takes_weights(self) -> bool:
        return all(server._takes_weights for server in self._servers)
