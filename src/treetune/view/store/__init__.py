"""Reads experiments below folders, their numbers, their answers as columns, and data sets beside them."""

from treetune.view.store.catalogue import Store
from treetune.view.store.folders import Run

__all__ = ["Run", "Store"]
