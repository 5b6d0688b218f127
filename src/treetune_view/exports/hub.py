"""Sending a checkpoint with its card to the Hugging Face hub, in one commit.

Only tried against a stand-in on this machine: no weights have been sent to the hub itself yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune import __version__
from treetune.store.checksums import SUMS, refuse_damaged
from treetune_view.exports.card import Checkpoint, Licences, missing, model_card

TOKEN = "HF_TOKEN"
"""The variable of the environment that has the token. Nothing else is asked, and nobody is told."""

SILENCE_S = 120.0
"""How long the hub may take to answer, or to take the next piece of a file."""

CARD = "README.md"


@dataclass(frozen=True)
class Parcel:
    """What would be sent: the card's text, and files by their names in the repository."""

    repository: str
    card: str
    files: Mapping[str, Path]

    def lines(self) -> Iterator[str]:
        """Each file with its size in bytes."""
        yield f"{CARD}  {len(self.card.encode()):,} bytes"
        for name, path in self.files.items():
            yield f"{name}  {path.stat().st_size:,} bytes"


def parcel_of(checkpoint: Checkpoint, repository: str, licences: Licences) -> Parcel:
    """Raises ValueError for a name that is none, for weights that are damaged, and for a card that lacks what
    others must know."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no repository's name (owner/name): {error}") from error
    if lacks := missing(checkpoint, licences):
        raise ValueError(f"the model card of {checkpoint.policy.parent} lacks {', '.join(lacks)}: say it")
    refuse_damaged(checkpoint.policy, "take another checkpoint")
    files = {
        path.relative_to(checkpoint.policy).as_posix(): path
        for path in sorted(checkpoint.policy.rglob("*"))
        if path.is_file() and path.name not in (SUMS, CARD)
    }
    card = model_card(checkpoint, licences, repository.rpartition("/")[2])
    return Parcel(repository, str(card), files)


def push(parcel: Parcel, *, private: bool) -> str:
    """Makes the repository where there is none, commits to it, and returns the commit's address.

    Raises ValueError without a token, and RuntimeError where the hub refuses or can't be reached.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, set_client_factory
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    token = os.environ.get(TOKEN)
    if not token:
        raise ValueError(
            f"{TOKEN} is not set: put a token that may write into the environment"
            " (huggingface.co/settings/tokens)"
        )
    set_client_factory(_client)
    api = HfApi(token=token, library_name="treetune", library_version=__version__)
    sent: list[Any] = [CommitOperationAdd(CARD, parcel.card.encode())]
    sent += [CommitOperationAdd(name, path) for name, path in parcel.files.items()]
    try:
        api.create_repo(parcel.repository, private=private, exist_ok=True)
        commit = api.create_commit(
            parcel.repository, sent, commit_message="Weights and model card from treetune"
        )
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, RuntimeError, OSError) as error:
        words = f"{type(error).__name__}: {error}".replace(token, "…")
        raise RuntimeError(
            f"{api.endpoint} didn't take {parcel.repository}: {words}. The same command tries again; what is"
            " there already is not sent twice"
        ) from None
    return commit.commit_url


def _client() -> Any:
    """The library's own, which otherwise waits for ever."""
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = SILENCE_S
    return client
