"""Which sandbox this machine has."""

from __future__ import annotations

from treetune_domains.sandbox.base import Sandbox, SandboxUnavailable
from treetune_domains.sandbox.bubblewrap import Bubblewrap


def choose() -> Sandbox:
    """The sandbox of this machine, seen to work by a trial run. Never none: `unsafe_local` has to be named.

    Raises SandboxUnavailable with the remedy where there is no sandbox.
    """
    sandbox = Bubblewrap()
    for what in sandbox.missing():
        raise SandboxUnavailable(what)
    return sandbox
