"""Servers that are there already, as a configuration names them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings

_ADDRESS = re.compile(r"https?://[^/:@?#\s]+:\d+")


def check_addresses(settings: VllmSettings) -> None:
    """Raises ValueError for what `addresses` can't be, or can't be with."""
    if settings.addresses is None:
        if settings.key_file is not None:
            raise ValueError("key_file is the key of servers at addresses, and there are none")
        return
    wrong = [one for one in settings.addresses if not _ADDRESS.fullmatch(one)]
    if wrong or not settings.addresses or len(set(settings.addresses)) < len(settings.addresses):
        what = f"has {wrong[0]!r}" if wrong else "names a server twice" if settings.addresses else "is empty"
        raise ValueError(f"addresses {what}: it lists servers such as 'http://10.0.0.2:8000', each once")
    if settings.key_file is None:
        raise ValueError("addresses need key_file, the file with the key that serve_engine was given")
    for name, there in (
        ("replicas", settings.replicas is not None),
        ("devices", settings.devices is not None),
        ("sleep", settings.sleep),
        ("servers: 'per_rank'", settings.servers == "per_rank"),
    ):
        if there:
            raise ValueError(
                f"{name} is about servers that the run starts, and those at addresses are there already:"
                " leave one of them out"
            )
