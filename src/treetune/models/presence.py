"""Finds out whether a model is on this machine, as a folder or in the hub's cache, without asking the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from treetune.contracts import Finding
from treetune.models.policy_files import resolve_policy
from treetune.models.shapes import number_of_weights

BYTES_OF_A_WEIGHT = 2
"""Models on the hub are mostly in bfloat16."""


def check_presence(name_or_path: str, revision: str | None, key: str) -> Iterator[Finding]:
    """Yields a finding if a model is not on this machine.

    A folder that doesn't exist is missing. A name on the hub that is not in the local cache is a warning: the
    start downloads it, and only the hub knows whether it exists. If downloads are switched off
    (HF_HUB_OFFLINE), it is missing, too.

    Args:
        name_or_path: A folder, or a name on the hub, such as ``Qwen/Qwen2.5-0.5B``.
        revision: A branch, tag or commit on the hub; None: main.
        key: The configuration key of the name.
    """
    try:
        path = resolve_policy(name_or_path)
    except ValueError as error:
        # The last sentence says how to make the model.
        what, _, remedy = str(error).rpartition(". ")
        yield Finding(what, key, remedy, level="missing")
        return
    if not Path(path).is_dir():
        yield from _check_cache(path, revision, key)


def _check_cache(name: str, revision: str | None, key: str) -> Iterator[Finding]:
    """Yields a finding if a model of the hub is not in the local cache."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        yield Finding(
            f"there is no folder {name} in {Path.cwd()}, and a model on the hub can't have this name"
            f" ({error})",
            key,
            "give a folder in Hugging Face format, or a name of the form owner/name",
            level="missing",
        )
        return
    if isinstance(cached, str):  # the path of the file in the cache
        return
    revision_text = f" (revision {revision!r})" if revision else ""
    absence = (
        f"the model {name!r}{revision_text} is neither a folder in {Path.cwd()} nor in the local cache"
        f" ({constants.HF_HUB_CACHE})"
    )
    if constants.is_offline_mode():
        yield Finding(
            f"{absence}, and HF_HUB_OFFLINE is set, so that it can't be downloaded",
            key,
            f"unset HF_HUB_OFFLINE, or download it with a network: hf download {name}",
            level="missing",
        )
        return
    weights = number_of_weights(name)
    size_text = f", about {weights * BYTES_OF_A_WEIGHT / 1e9:.1f} GB" if weights is not None else ""
    yield Finding(
        f"{absence}: the start downloads it from the Hugging Face hub{size_text}. Whether the hub has it is"
        " not checked here",
        key,
        level="warning",
    )
