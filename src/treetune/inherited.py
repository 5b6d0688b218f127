"""The environment for child processes: without the user's keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)$|^(SSH_AUTH_SOCK|NETRC)$", re.IGNORECASE
)


def remove_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment without variables whose names suggest a key, a token or a password.

    The engine's server and the grading processes get this environment. They work on texts that models wrote,
    and need no keys.
    """
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}
