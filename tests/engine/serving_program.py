"""Runs `serve_engine` with the stub server in vLLM's place, for a test.

It ignores interrupts, as a background job of a shell does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from tests.engine.test_serve_engine_servers import Elsewhere
from tests.support.stubs import Stub
from treetune.cluster import commands as serving


def main(folder: Path, port: int) -> int:
    stub = Stub(folder)
    replaced: Any = serving
    replaced.build_root = replaced.evaluate_configuration = lambda *_: None
    replaced._make_launch = lambda root, host, weights: Elsewhere(stub).launch()
    replaced._write_start_weights = lambda root, folder: None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return serving.serve_engine(
        argparse.Namespace(
            host="127.0.0.1", port=port, command="serve_engine", key_file=folder / "key", log=folder / "log"
        )
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
