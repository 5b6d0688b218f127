"""Gives `override` to the modules that the command line imports first, whether packages are installed or not.

A Python without our packages imports them too, and is told what to run. All other modules take `override`
from typing_extensions, since Python 3.11 has none of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import override as override
else:

    def override(method: Any) -> Any:
        return method
