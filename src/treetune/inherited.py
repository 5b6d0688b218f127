"""What child processes inherit: the environment, without the user's keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)$|^(SSH_AUTH_SOCK|NETRC)$", re.IGNORECASE
)


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables whose names don't say that they hold a key, a token or a password.

    For the engine's server and for the processes that grade: they work on what models wrote, and need none.
    """
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}
