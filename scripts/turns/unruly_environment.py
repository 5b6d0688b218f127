"""Makes the environment that misbehaves known to configurations."""

from treetune.tasks.environments.base import Environment
from treetune.testing.unruly_environment import Unruly

Environment.register("unruly")(Unruly)
