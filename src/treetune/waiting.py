"""Sets how OpenMP's threads wait for each other.

After each parallel region, threads that are done wait for the others. By default libgomp, which PyTorch's
wheels for CPUs bring along, spins for milliseconds before it sleeps. On a machine with other busy processes,
a thread that only spins often occupies the core that the last working thread needs, and an iteration takes up
to 16 times as long as on an idle machine. Threads that spin for a microsecond and then sleep lose little on
an idle machine, and give their cores away on a busy one. No numerical result changes.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES_OF_SHORT_WAITS = {
    # libgomp: turns of its waiting loop before a thread sleeps. It takes precedence over the policy below.
    # Next to four busy processes on two cores an iteration of the quickstart's SFT takes 1.1 times its fair
    # share of the cores with 100 turns, and 1.7 times with 10,000. Alone it takes 5 % longer
    # (benchmarks/busy_machine.py).
    "GOMP_SPINCOUNT": "100",
    # Other OpenMP libraries (LLVM's, Intel's): sleep at once.
    "OMP_WAIT_POLICY": "PASSIVE",
}
WAITING_VARIABLES = (*VARIABLES_OF_SHORT_WAITS, "KMP_BLOCKTIME")
"""Variables by which a user says how threads wait. If one of them is set, `wait_briefly` sets none."""


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes threads that wait go to sleep soon, in this process and in processes that it starts.

    Changes nothing if the user has set one of the variables that say how threads wait. OpenMP reads these
    variables once, when it is loaded, so this function has to run before PyTorch is imported.
    """
    if not any(name in environment for name in WAITING_VARIABLES):
        environment.update(VARIABLES_OF_SHORT_WAITS)
