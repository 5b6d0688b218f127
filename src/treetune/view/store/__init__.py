"""Reads experiments in folders, with their numbers and answers, and data sets."""

from treetune.view.store.catalogue import Store
from treetune.view.store.folders import Run

__all__ = ["Run", "Store"]
