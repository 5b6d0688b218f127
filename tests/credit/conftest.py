"""Fixtures that tests of credit share with those of domains."""

from tests.domains.conftest import environments

__all__ = ["environments"]
