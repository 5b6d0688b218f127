"""The browser that tests and scripts share."""

from treetune.testing.browser import CHROMIUM, MISSING, Browser, browser

__all__ = ["CHROMIUM", "MISSING", "Browser", "browser"]
