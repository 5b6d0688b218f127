"""Gives `override` to the modules that the command line imports first, whether packages are installed or not.

A Python without the project's dependencies imports these modules too, to print how to install them. All
other modules import `override` from typing_extensions, because Python 3.11 doesn't have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import override as override
else:

    def override(method: Any) -> Any:
        return method
