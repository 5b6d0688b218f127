"""Python as a tool of the policy's, in the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treetune.tasks.graders.base import Unavailable
from treetune_domains.environments.tools.base import Tool
from treetune_domains.sandbox.base import SandboxUnavailable
from treetune_domains.sandbox.python_tool import PythonTool


@Tool.register("python")
@dataclass(frozen=True, kw_only=True)
class Python(Tool):
    """Runs the code that it is called with, in a sandbox of its own for each call, and gives what that
    printed, the value of its last line, or the traceback."""

    name: str = "python"
    console: PythonTool = field(default_factory=PythonTool)
    """The sandbox, its limits, and how much of what is printed is kept."""

    def missing(self) -> Sequence[str]:
        return self.console.sandbox.missing()

    def call(self, argument: str) -> str:
        try:
            return self.console.run(argument)
        except SandboxUnavailable as error:
            raise Unavailable(str(error)) from error
