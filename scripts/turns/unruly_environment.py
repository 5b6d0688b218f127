"""Makes the environment that misbehaves known to configurations."""

from tests.support.unruly_environment import Unruly
from treetune.tasks.environments.base import Environment

Environment.register("unruly")(Unruly)
