"""What tests of rollouts share with those of domains."""

from tests.domains.conftest import environments

__all__ = ["environments"]
